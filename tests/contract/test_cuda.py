"""The CUDA kernels equal the reference: signs and errors exactly, given the scales; the scales but for a few last bits.

They run on a device if there is one, else in numba's simulator, whose variable must be set before numba is imported:
``NUMBA_ENABLE_CUDASIM=1 pytest tests/contract/test_cuda.py``, as ``make test`` does. The simulator takes a tenth of a
second for a block, whatever its length, so inputs are few here.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ocomm.kernels import NOISE, Kernels, reference
from tests.contract import test_kernels as adam
from tests.contract import test_quantizer as birder
from tests.contract.test_kernels import World, all_same, same_bits, scale_in
from tests.contract.test_quantizer import Model

numba_cuda = pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")
loops = importlib.import_module("ocomm.kernels.cuda")
SIMULATED = loops.SIMULATED
if not (SIMULATED or numba_cuda.is_available()):
    pytest.skip(reason="no CUDA device, and NUMBA_ENABLE_CUDASIM is not 1", allow_module_level=True)

from tests.contract.on_device import OnDevice  # noqa: E402  (needs numba-cuda)

pytestmark = [
    # NumPy's scalars, which the simulator computes with, warn where arrays do not; the contract has infinities.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

#: How far a scale may be from the reference's, which adds 128 numbers in a row where the kernels add 16.
SCALE_ULPS = 4

LAW = importlib.import_module("ocomm.kernels.reference")
EVERY_LENGTH = ((), (1,), (31,), (4095,), (4096,), (4097,))
MANY_BLOCKS = (100_003,)

Results = Callable[[Any, Kernels], tuple]


@pytest.fixture(scope="module", autouse=True)
def _short_turns() -> Iterator[None]:
    """The simulator's threads and the one that waits for them take turns more often: four times as fast."""
    usual = sys.getswitchinterval()
    if SIMULATED:
        sys.setswitchinterval(1e-3)
    yield
    sys.setswitchinterval(usual)


@pytest.fixture(scope="module")
def device() -> Any:
    return OnDevice()


def l1(results: Callable[..., tuple]) -> Results:
    return lambda world, kernels: results(world, kernels, "l1")


def rms(results: Callable[..., tuple]) -> Results:
    return lambda world, kernels: results(world, kernels, "rms")


def sent(world: World, kernels: Kernels, scale: str) -> tuple:
    return world.sent(kernels, scale)


def finite_results(world: World, kernels: Kernels) -> tuple:
    found = [kernels.finite(world.blocks, world.tensors(grad=grads)) for grads in (world.grads, 0)]
    if any(world.lengths):
        bad = [grad.copy() for grad in world.grads]
        max(bad, key=len)[-1] = np.nan
        found.append(kernels.finite(world.blocks, world.tensors(grad=bad)))
    return tuple(found)


ADAM: dict[str, Results] = {
    "compress, l1": l1(sent),
    "compress, rms": rms(sent),
    "compress_momentum": l1(adam.momentum_results),
    "average, l1": l1(adam.average_results),
    "average, rms": rms(adam.average_results),
    "unpack": adam.unpack_results,
    "apply": adam.apply_results,
    "compress_update": l1(adam.update_results),
    "local_step": adam.local_step_results,
    "apply_update": adam.apply_update_results,
    "finite": finite_results,
}
BIRDER: dict[str, Results] = {
    "quantize": birder.quantize_results,
    "quantized_average": birder.average_results,
    "compress_signs": birder.lion_results,
    "apply_signs": birder.apply_results,
    "soft_sign": birder.soft_sign_results,
}


def check(results: Results, world: Any, kernels: Any) -> None:
    """What the kernels answer and write is what the reference does with their scales, which are near its own."""
    got = results(world, kernels)
    messages = [part for part in got if isinstance(part, np.ndarray) and part.dtype == np.uint8]
    scales = iter([scale_in(m, block) for m in messages for block in world.blocks if block["scale"] >= 0])

    def near(c: np.ndarray, masked: np.ndarray, scale: str) -> np.float32:
        own, taken = exact(c, masked, scale), next(scales)
        if np.isfinite(own):
            assert abs(taken - own) <= SCALE_ULPS * np.spacing(own)
        else:
            assert not np.isfinite(taken)
        return taken

    exact = LAW._scale_to_send  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LAW, "_scale_to_send", near)
        expected = results(world, reference)
    assert all_same(got, expected)
    assert next(scales, None) is None


class TestEqualsTheReference:
    @pytest.mark.parametrize("lengths", EVERY_LENGTH, ids=str)
    @pytest.mark.parametrize("loop", ADAM)
    def test_loops_of_adam_at_every_length(self, device: Any, loop: str, lengths: tuple[int, ...]) -> None:
        check(ADAM[loop], World(lengths, masked=0.02 if lengths and "l1" in loop else 0.0), device)

    @pytest.mark.parametrize("lengths", EVERY_LENGTH, ids=str)
    @pytest.mark.parametrize("loop", BIRDER)
    def test_loops_of_birder_at_every_length(self, device: Any, loop: str, lengths: tuple[int, ...]) -> None:
        check(BIRDER[loop], Model(lengths, first=len(lengths)), device)

    def test_many_blocks(self, device: Any) -> None:
        check(l1(sent), World(MANY_BLOCKS), device)
        check(birder.average_results, Model(MANY_BLOCKS), device)

    def test_a_block_may_be_longer_than_a_tile(self, device: Any) -> None:
        world = World((9001,), block_size=1 << 20, masked=0.05)
        for results in (l1(sent), l1(adam.average_results), adam.unpack_results):
            check(results, world, device)
        for results in (birder.average_results, birder.apply_results):
            check(results, Model((9001,), block_size=1 << 20, first=3), device)

    @pytest.mark.parametrize("ranks", [1, 2, 8, 64])
    def test_average_of_any_number_of_ranks(self, device: Any, ranks: int) -> None:
        check(l1(adam.average_results), World((4096, 33), ranks=ranks, masked=0.05), device)
        check(birder.average_results, Model((77,), ranks=ranks, first=1), device)

    @settings(max_examples=15, deadline=None)
    @given(
        loop=st.sampled_from(sorted(ADAM)),
        lengths=st.lists(st.integers(0, 60), max_size=2).map(tuple),
        seed=st.integers(0, 2**32),
        ranks=st.integers(1, 9),
        masked=st.sampled_from([0.0, 0.5, 1.9]),
        extreme=st.booleans(),
    )
    def test_whatever_the_loops_of_adam_are_given(
        self, device: Any, loop: str, lengths: tuple[int, ...], seed: int, ranks: int, masked: float, extreme: bool
    ) -> None:
        check(ADAM[loop], World(lengths, seed, 48, ranks, masked, extreme), device)

    @settings(max_examples=10, deadline=None)
    @given(
        loop=st.sampled_from(sorted(BIRDER)),
        lengths=st.lists(st.integers(0, 60), max_size=2).map(tuple),
        seed=st.integers(0, 2**32),
        ranks=st.integers(1, 9),
        first=st.one_of(st.integers(0, 7), st.integers(2**34 - 70, 2**34), st.integers(0, 2**60)),
        extreme=st.booleans(),
    )
    def test_whatever_the_loops_of_birder_are_given(
        self, device: Any, loop: str, lengths: tuple[int, ...], seed: int, ranks: int, first: int, extreme: bool
    ) -> None:
        check(BIRDER[loop], Model(lengths, seed, 48, ranks, first, extreme), device)


class TestNotFinite:
    @pytest.mark.parametrize("masked", [0.0, 2.0])
    @pytest.mark.parametrize("where", [0, 4095])
    def test_it_is_told_even_if_masked(self, device: Any, where: int, masked: float) -> None:
        world = World((4096,), masked=masked)
        world.values[where] = np.inf
        assert not world.sent(device)[0]
        assert not np.isfinite(scale_in(world.sent(device)[1], world.blocks[0]))
        world.values[where] = 1
        assert world.sent(device)[0], "what was told once is over"

    @pytest.mark.parametrize("source", ["grad", "momentum", "magnitude", "error"])
    def test_birder_tells_it(self, device: Any, source: str) -> None:
        model = Model((100,))
        (model.grads[0] if source == "grad" else getattr(model, source))[99] = np.nan
        assert not birder.quantize(model, device).finite


def test_buffers_may_be_updated_in_place(device: Any) -> None:
    world = World((4097,), masked=0.1)
    _, packed, expected = world.sent(device)
    again = np.full_like(packed, 0x5A)
    device.compress(world.blocks, world.values, world.error, world.error, world.mask, "l1", again)
    assert same_bits(again, packed)
    for block in world.blocks:
        at = adam.span(block, "local")
        assert same_bits(world.error[at], expected[at])


def fenced(array: np.ndarray) -> np.ndarray:
    """A copy that ends where the process may read no further."""
    page = mmap.PAGESIZE
    inside = -(-array.nbytes // page) * page
    area = mmap.mmap(-1, inside + page)
    first = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(first + inside), ctypes.c_size_t(page), 0) == 0
    copy = np.frombuffer(area, array.dtype, array.size, inside - array.nbytes)
    copy[:] = array
    return copy


def message_end(world: Any) -> int:
    """Moves the signs of the only block so that its message ends on 4 bytes, and a copy at a fence is aligned."""
    block = world.blocks[0]
    nbytes = (int(block["length"]) + 7) // 8
    block["bits"] += -(int(block["bits"]) + nbytes) % 4
    return int(block["bits"]) + nbytes


@pytest.mark.skipif(not SIMULATED, reason="on a device compute-sanitizer looks for this")
class TestNothingOutsideIsTouched:
    """The process ends where a loop reads or writes past the end of a buffer."""

    @pytest.mark.parametrize("length", [31, 1030])
    def test_by_the_loops_of_adam(self, length: int) -> None:
        world: Any = World((length,), masked=0.1)
        end = message_end(world)
        world.numel = world.local_numel = world.owned_numel = length
        world.nbytes = end
        for name in ("values", "error", "owner_error", "denominator"):
            setattr(world, name, fenced(getattr(world, name)[:length]))
        world.mask = fenced(world.mask[: (length + 7) // 8])
        world.messages = [fenced(message[:end]) for message in world.messages]
        world.grads, world.params, world.momenta = (
            [fenced(a) for a in arrays] for arrays in (world.grads, world.params, world.momenta)
        )
        world.empty = lambda numel=None: tuple(map(fenced, World.empty(world, numel)))
        world.floats = lambda numel: fenced(World.floats(world, numel))
        kernels = loops.CudaKernels()
        for results in ADAM.values():
            check(results, world, kernels)

    @pytest.mark.parametrize("length", [31, 1030])
    def test_by_the_loops_of_birder(self, length: int) -> None:
        model: Any = Model((length,), first=1)
        end = message_end(model)
        model.blocks["offset"] = 0
        model.numel = model.owned_numel = length
        model.nbytes = end
        for name in ("momentum", "magnitude", "error", "owner_error"):
            setattr(model, name, fenced(getattr(model, name)[:length]))
        model.messages = [fenced(message[:end]) for message in model.messages]
        model.weights = fenced(model.weights)
        model.grads, model.params = ([fenced(a) for a in arrays] for arrays in (model.grads, model.params))
        model.empty = lambda *numels: list(map(fenced, Model.empty(model, *numels)))
        model.packed = lambda: fenced(Model.packed(model))
        kernels = loops.CudaKernels()
        for results in BIRDER.values():
            check(results, model, kernels)


class TestArguments:
    def test_an_array_that_is_not_on_a_device_is_refused(self) -> None:
        with pytest.raises(TypeError, match="list is not an array in the memory of a CUDA device"):
            loops.address_of([1.0])

    @pytest.mark.skipif(not SIMULATED, reason="a device faults, and nothing works after it")
    def test_the_simulator_refuses_an_address_that_a_device_would_fault_on(self) -> None:
        floats = np.zeros(8, np.float32)
        first = -(-loops.address_of(floats) // 16) * 16
        assert loops.load_quad(first) == (0, 0, 0, 0)
        for load, alignment in ((loops.load_quad, 16), (loops.load_float, 4), (loops.load_long, 8)):
            with pytest.raises(ValueError, match=f"not aligned to {alignment}"):
                load(first + alignment // 2)

    def test_more_addresses_than_are_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loops, "_REMEMBERED", 2)
        kernels = loops.CudaKernels()
        arrays = [numba_cuda.to_device(np.zeros(4, np.uint8)) for _ in range(3)]
        for array in [*arrays, *arrays]:
            assert kernels._addresses([array]).copy_to_host().tolist() == [loops.address_of(array)]
        assert len(kernels._messages) <= 2


def test_seeds_travel_in_halves() -> None:
    noise = np.array([(0xAABBCCDD11223344, 9, 0xFFFFFFFF, 1)], NOISE)
    assert loops._counted_by(noise) == (0x11223344, 0xAABBCCDD, 9, 0xFFFFFFFF, 1)


def test_the_benchmark_checks_every_loop_before_it_times_it() -> None:
    from ocomm.bench import _cuda

    names = {row.kernel.partition(",")[0].partition(" of ")[0] for row in _cuda.rows(4096, 1, [2])}
    assert names == {loop.__name__ for loop in loops.KERNELS} - {"finite"}
    with pytest.raises(RuntimeError, match="unpack: the result differs"):
        _cuda.check("unpack", lambda k, a: k.unpack(a.blocks, a.messages[k is reference], None, a.out), 1, 2)
