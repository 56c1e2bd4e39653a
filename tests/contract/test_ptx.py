"""What the compiler makes of the CUDA kernels, where NVVM is installed: no device is needed."""

from __future__ import annotations

import importlib

import pytest

from ocomm.bench import ptx

pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")
words = importlib.import_module("ocomm.kernels.cuda_words")
if words.SIMULATED:
    pytest.skip(reason="the simulator does not compile", allow_module_level=True)
loops = importlib.import_module("ocomm.kernels.cuda_kernels")


@pytest.fixture(scope="module", params=["sm_90", pytest.param("sm_80", marks=pytest.mark.long)])
def rows(request: pytest.FixtureRequest) -> list[ptx.Row]:
    try:
        return list(ptx.rows([request.param]))
    except ImportError as error:
        pytest.skip(reason=str(error))


def test_a_small_launch_is_no_reason_to_warn() -> None:
    assert loops.compress[1, words.THREADS, 0, loops.SHARED_NBYTES].griddim == (1, 1, 1)


#: Kernels that read gradients.
LOW = {
    "compress_momentum", "compress_update", "local_step", "finite", "compress_quantized", "compress_signs", "soft_sign",
    "compress_codes", "gather", "reduce_low",
}  # fmt: skip
#: Kernels that read or write no floats but one way, and those that go through memory of any alignment once in a while,
#: or through elements of other sizes.
ONLY_WRITE, ONLY_READ = {"unpack", "unpack_codes"}, {"finite"}
RARE = {"sum_words", "sum_squares", "sum_floats", "sum_buckets", "reduce_low", "reduce_double", "reduce_whole"}


@pytest.mark.long
def test_whole_blocks_are_read_and_written_16_bytes_at_a_time(rows: list[ptx.Row]) -> None:
    assert {row.kernel for row in rows} == set(loops.KERNELS)
    assert {row.kernel for row in rows if not row.vector_loads} == ONLY_WRITE | RARE
    assert {row.kernel for row in rows if not row.vector_stores} == ONLY_READ | RARE


@pytest.mark.long
def test_gradients_of_16_bits_are_read_four_at_a_time(rows: list[ptx.Row]) -> None:
    assert {row.kernel for row in rows if row.low_loads} == LOW


@pytest.mark.long
def test_nothing_lives_in_local_memory(rows: list[ptx.Row]) -> None:
    assert not [row for row in rows if row.local]


@pytest.mark.long
def test_no_product_may_be_fused_with_a_sum(rows: list[ptx.Row]) -> None:
    assert not [row for row in rows if row.fused]


@pytest.mark.long
@pytest.mark.skipif(ptx.assembler() is None, reason="no ptxas: pip install nvidia-cuda-nvcc")
def test_four_thread_blocks_share_a_multiprocessor_without_spills(rows: list[ptx.Row]) -> None:
    for row in rows:
        assert (row.stack_nbytes, row.spill_stores_nbytes, row.spill_loads_nbytes) == (0, 0, 0), row
        assert row.registers is not None and row.registers * words.THREADS * 4 <= 65536, row
