"""The CUDA kernels equal the reference: signs and errors exactly, given the scales; the scales but for a few last bits.

They run on a device if there is one, else in numba's simulator, whose variable must be set before numba is imported:
``NUMBA_ENABLE_CUDASIM=1 pytest tests/contract/test_cuda.py``, as ``make test`` does. The simulator takes a tenth of a
second for a block, whatever its length, so inputs are few here.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import math
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ocomm.kernels import NOISE, TENSOR, Kernels, reference
from ocomm.kernels.base import RUN, SUMMED
from ocomm.kernels.device import REDUCTIONS, DeviceArray, DeviceKernels
from ocomm.types import DType, ReduceOp
from tests.contract import test_kernels as adam
from tests.contract import test_quantizer as birder
from tests.contract.test_codes import BITS, Codes
from tests.contract.test_kernels import World, all_same, same_bits, scale_in
from tests.contract.test_quantizer import Model
from tests.fake_device import FakeDevice
from tests.tiers import few

numba_cuda = pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")
words = importlib.import_module("ocomm.kernels.cuda_words")
SIMULATED = words.SIMULATED
if not (SIMULATED or numba_cuda.is_available()):
    pytest.skip(reason="no CUDA device, and NUMBA_ENABLE_CUDASIM is not 1", allow_module_level=True)
loops = importlib.import_module("ocomm.kernels.cuda")

from tests.contract.on_device import OnDevice  # noqa: E402  (needs numba-cuda)

pytestmark = [
    # NumPy's scalars, which the simulator computes with, warn where arrays do not; the contract has infinities.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

#: How far a scale may be from the reference's, which adds 128 numbers in a row where the kernels add 16.
SCALE_ULPS = 4

LAW = importlib.import_module("ocomm.kernels.reference")
EVERY_LENGTH = ((), (31,), (4097,), *(pytest.param((n,), marks=pytest.mark.long) for n in (1, 4095, 4096)))
#: Several tiles, and a part of one. In the simulator each takes a second.
MANY = (20_483 if SIMULATED else 100_003,)

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
    "compress_quantized": birder.quantize_results,
    "average_quantized": birder.average_results,
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

    # The simulator takes 5 s for each.
    @pytest.mark.parametrize("loop", few(ADAM, ["compress, l1"]))
    def test_loops_of_adam_over_many_elements(self, device: Any, loop: str) -> None:
        check(ADAM[loop], World(MANY), device)

    @pytest.mark.parametrize("loop", few(BIRDER, ["compress_quantized"]))
    def test_loops_of_birder_over_many_elements(self, device: Any, loop: str) -> None:
        check(BIRDER[loop], Model(MANY), device)

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

    @pytest.mark.parametrize("shift", range(4))
    def test_averages_of_messages_that_begin_at_any_byte(self, device: Any, shift: int) -> None:
        world, model = World((4096,), masked=0.05), Model((4096,))
        for moved, results in ((world, l1(adam.average_results)), (model, birder.average_results)):
            moved.blocks["bits"] += shift
            check(results, moved, device)

    @settings(max_examples=15)
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

    @settings(max_examples=10)
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


class TestCodes:
    """Whole scales and codes are the reference's: a largest element is the same in any order."""

    @pytest.mark.parametrize("lengths", EVERY_LENGTH, ids=str)
    @pytest.mark.parametrize("bits", BITS)
    def test_at_every_length(self, device: Any, bits: int, lengths: tuple[int, ...]) -> None:
        world = Codes(lengths, bits)
        assert all_same(world.results(device), world.results(reference))

    @pytest.mark.parametrize("bits", BITS)
    def test_a_block_may_be_longer_than_a_tile(self, device: Any, bits: int) -> None:
        world = Codes((9001,), bits, block_size=1 << 20)
        assert all_same(world.results(device), world.results(reference))

    @pytest.mark.parametrize("shift", range(4))
    @pytest.mark.parametrize("bits", [8, 4])
    def test_averages_of_messages_that_begin_at_any_byte(self, device: Any, bits: int, shift: int) -> None:
        world = Codes((4096,), bits)
        world.blocks["bits"] += shift
        assert all_same(world.averaged(device), world.averaged(reference))

    @pytest.mark.parametrize("bits", BITS)
    def test_what_is_not_finite(self, device: Any, bits: int) -> None:
        world = Codes((300,), bits)
        world.grads[0][[130, 299]] = np.nan, -np.inf
        (finite, packed, _), (_, expected, _) = world.compressed(device), world.compressed(reference)
        assert not finite
        assert same_bits(world.unpacked(device, packed), world.unpacked(reference, expected))

    @settings(max_examples=10)
    @given(
        lengths=st.lists(st.integers(0, 300), max_size=2).map(tuple),
        bits=st.sampled_from(BITS),
        with_errors=st.booleans(),
        seed=st.integers(0, 2**32),
        ranks=st.integers(1, 9),
        extreme=st.booleans(),
    )
    def test_whatever_they_are_given(
        self,
        device: Any,
        lengths: tuple[int, ...],
        bits: int,
        with_errors: bool,
        seed: int,
        ranks: int,
        extreme: bool,
    ) -> None:
        options = {"seed": seed, "block_size": 208, "ranks": ranks, "extreme": extreme}
        world = Codes(lengths, bits, with_errors, **options)
        assert all_same(world.results(device), world.results(reference))

    def test_gradients_of_16_bits_are_their_values_in_float32(self, device: Any) -> None:
        world = Codes((4096, 33), 8)
        world.grads = [widened(narrowed(grad, low), low) for grad, low in zip(world.grads, LOW, strict=True)]
        assert all_same(world.compressed(Low(device)), world.compressed(reference))


def narrowed(wide: np.ndarray, dtype: DType) -> np.ndarray:
    """The words of float32 values rounded to 16 bits, to nearest even."""
    if dtype is DType.FLOAT16:
        return wide.astype(np.float16).view(np.uint16)
    bits = wide.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(words: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is DType.FLOAT16:
        return words.view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << 16).view(np.float32)


#: 16-bit types; the loops that read gradients.
LOW = (DType.FLOAT16, DType.BFLOAT16)
READ_GRADIENTS: dict[str, tuple[type, Results]] = {
    "compress_momentum": (World, ADAM["compress_momentum"]),
    "compress_update": (World, ADAM["compress_update"]),
    "local_step": (World, ADAM["local_step"]),
    "finite": (World, ADAM["finite"]),
    "compress_quantized": (Model, BIRDER["compress_quantized"]),
    "compress_signs": (Model, BIRDER["compress_signs"]),
    "soft_sign": (Model, BIRDER["soft_sign"]),
}


class Low:
    """``kernels`` that are given gradients in 16 bits, of one type or the other, before a page that may not be read."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, loop: str) -> Any:
        def call(blocks: np.ndarray, tensors: np.ndarray, *rest: Any) -> Any:
            table, kept = tensors.copy(), []
            for row, dtype in zip(range(len(table)), itertools.cycle(LOW)):
                own = blocks[blocks["tensor"] == row]
                numel, address = int((own["start"] + own["length"]).max()), int(table["grad"][row])
                if address:
                    wide = np.ctypeslib.as_array((ctypes.c_float * numel).from_address(address))
                    kept.append(fenced(narrowed(wide, dtype)))
                    table["grad"][row], table["grad_dtype"][row] = kept[-1].__array_interface__["data"][0], dtype
            return getattr(self._kernels, loop)(blocks, table, *rest)

        return call


class TestGradientsOf16Bits:
    @pytest.mark.parametrize("loop", READ_GRADIENTS)
    def test_what_is_done_with_them_is_done_with_their_values_in_float32(self, device: Any, loop: str) -> None:
        kind, results = READ_GRADIENTS[loop]
        world = kind((4096, 33))  # one whose quads are whole and aligned, one whose are not
        world.grads = [widened(narrowed(grad, low), low) for grad, low in zip(world.grads, LOW, strict=True)]
        check(results, world, Low(device))

    @pytest.mark.parametrize("dtype", LOW, ids=lambda dtype: dtype.label)
    def test_every_value_is_packed_as_what_it_is(self, kernels: Any, dtype: DType) -> None:
        words = np.arange(1 << 16, dtype=np.uint16)
        on_device = kernels.memory.empty(words.size, np.uint16)
        on_device[:] = words
        packed = kernels.memory.staging(4 * words.size)
        tensors = table_of("grad", [on_device])
        tensors["grad_dtype"] = dtype
        kernels.gather(np.array([(0, 0, words.size, 0)], RUN), tensors, packed)
        got = kernels.memory.host(kernels.memory.twin(packed)).view(np.float32)
        assert same_bits(got, widened(words, dtype))


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

    @pytest.mark.parametrize("length", [pytest.param(31, marks=pytest.mark.long), 1030])
    def test_by_the_loops_of_adam(self, length: int) -> None:
        world: Any = World((length,), masked=0.1)
        end = message_end(world)
        world.numel = world.local_numel = world.owned_numel = length
        world.nbytes = end
        for name in ("values", "error", "server_error", "denominator"):
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

    @pytest.mark.parametrize("length", [pytest.param(31, marks=pytest.mark.long), 1030])
    def test_by_the_loops_of_birder(self, length: int) -> None:
        model: Any = Model((length,), first=1)
        end = message_end(model)
        model.blocks["offset"] = 0
        model.numel = model.owned_numel = length
        model.nbytes = end
        for name in ("momentum", "magnitude", "error", "server_error"):
            setattr(model, name, fenced(getattr(model, name)[:length]))
        model.messages = [fenced(message[:end]) for message in model.messages]
        model.weights = fenced(model.weights)
        model.grads, model.params = ([fenced(a) for a in arrays] for arrays in (model.grads, model.params))
        model.empty = lambda *numels: list(map(fenced, Model.empty(model, *numels)))
        model.packed = lambda: fenced(Model.packed(model))
        kernels = loops.CudaKernels()
        for results in BIRDER.values():
            check(results, model, kernels)

    @pytest.mark.parametrize("bits", BITS)
    def test_by_the_loops_of_codes(self, bits: int) -> None:
        length = 1030
        world: Any = Codes((length,), bits)
        block = world.blocks[0]
        block["offset"] = block["local"] = block["owned"] = 0
        nbytes = (length * bits + 7) // 8
        block["bits"] += -(int(block["bits"]) + nbytes) % 4
        world.nbytes = int(block["bits"]) + nbytes
        world.numel = world.local_numel = world.owned_numel = length
        world.error, world.server_error = (fenced(a[:length]) for a in (world.error, world.server_error))
        world.grads = [fenced(grad) for grad in world.grads]
        world.messages = [fenced(world._coded()[: world.nbytes]) for _ in world.messages]
        world.errors = lambda of: (of, fenced(np.full(length, 7, np.float32)))
        expected = world.compressed(reference), world.averaged(reference)
        kernels, out = loops.CudaKernels(), fenced(np.zeros(length, np.float32))
        packed = fenced(np.full(world.nbytes, 0x5A, np.uint8))
        left, kept = (fenced(np.full(length, 7, np.float32)) for _ in range(2))
        received = [message[8:] for message in world.messages]
        tensors = world.tensors(grad=world.grads)
        sent = kernels.compress_codes(world.blocks, tensors, world.error, left, bits, packed)
        assert all_same((sent, packed, left), expected[0])
        packed[:] = 0x5A
        sent = kernels.average_codes(world.blocks, received, 8, world.server_error, kept, bits, packed)
        assert all_same((sent, packed, kept), expected[1])
        kernels.unpack_codes(world.blocks, packed, bits, out)


@pytest.fixture(scope="module")
def kernels() -> Any:
    """``DeviceKernels`` over the CUDA kernels."""
    if SIMULATED:
        return DeviceKernels(FakeDevice(inner=loops.CudaKernels()))
    from ocomm.kernels.cuda_device import CudaDevice

    return DeviceKernels(CudaDevice(0))


def loaned(kernels: Any, array: np.ndarray) -> Any:
    """A copy on the device, one float away from where its memory begins."""
    copy = kernels.memory.zeros(array.size + 1)[1:]
    copy[:] = array
    return copy


def table_of(column: str, arrays: list[Any]) -> np.ndarray:
    table = np.zeros(len(arrays), TENSOR)
    table[column] = [0 if a is None else a.address if isinstance(a, DeviceArray) else a.ctypes.data for a in arrays]
    return table


def of_type(values: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype == DType.BFLOAT16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(dtype.label).view(np.uint8)


def is_nan(data: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype == DType.BFLOAT16:
        return np.isnan((data.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
    return np.isnan(data.view(dtype.label))


class TestDenseValues:
    """The loops whose arguments are the device's own."""

    numels = (1, 31, 100_003, 4096)

    def runs(self) -> np.ndarray:
        rows = [(0, 7, 1, 0), (5, 8, 26, 1), (3, 40, 100_000, 2), (0, 100_050, 4096, 3)]
        return np.array(rows, RUN)

    def values(self, seed: int = 0) -> list[np.ndarray]:
        return [np.random.default_rng([seed, n]).standard_normal(n, np.float32) for n in self.numels]

    def test_gradients_are_packed_and_placed(self, kernels: Any) -> None:
        home, runs = kernels.memory, self.runs()
        tensors: list[Any] = [*self.values()[:3], None]
        on_device = [None if t is None else loaned(kernels, t) for t in tensors]
        nbytes = 4 * int((runs["position"] + runs["length"]).max())
        packed, expected = home.staging(nbytes), np.full(nbytes, 0x5A, np.uint8)
        packed[:] = 0x5A
        home.changed(packed)
        kernels.gather(runs, table_of("grad", on_device), packed)
        reference.gather(runs, table_of("grad", tensors), expected)
        assert same_bits(home.host(home.twin(packed)), expected)
        targets = self.values(1)
        placed = [loaned(kernels, t) for t in targets]
        kernels.scatter(runs, table_of("grad", placed), packed)
        reference.scatter(runs, table_of("grad", targets), expected)
        assert all(same_bits(home.host(a), b) for a, b in zip(placed, targets, strict=True))

    @pytest.mark.parametrize("scales", [(1.0, 1.0), (0.3, 1 / 3)])
    @pytest.mark.parametrize("ranks", [1, 3])
    def test_sums_are_in_the_order_of_ranks(self, kernels: Any, ranks: int, scales: tuple[float, float]) -> None:
        home = kernels.memory
        sources = [home.staging(4 * 4101)[4:] for _ in range(ranks)]
        for rank, source in enumerate(sources):
            source.view(np.float32)[:] = np.random.default_rng(rank).standard_normal(4100, np.float32)
            home.changed(source)
        expected = np.zeros(4 * 4100, np.uint8)
        reference.reduce(DType.FLOAT32, ReduceOp.AVERAGE, sources, *scales, expected)
        kernels.reduce(DType.FLOAT32, ReduceOp.AVERAGE, sources, *scales, sources[-1])
        assert same_bits(home.host(home.twin(sources[-1])), expected)

    @pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE], ids=lambda op: op.label)
    @pytest.mark.parametrize("dtype", [d for d in DType if d not in (DType.FLOAT32, DType.BOOL)], ids=lambda d: d.label)
    def test_sums_of_other_types_are_the_references(self, kernels: Any, dtype: DType, op: ReduceOp) -> None:
        """Of all bytes that there are, but what is no number; aligned and not."""
        home, size = kernels.memory, dtype.itemsize
        for first, numel in ((0, 1030), (size, 1027)):
            sources = [home.staging(size * (numel + 1))[first : first + size * numel] for _ in range(3)]
            for rank, source in enumerate(sources):
                words = np.random.default_rng(rank).integers(0, 256, source.size, np.uint8)
                if dtype.is_floating:  # moderate exponents, and a few elements as they come
                    words[40 * size :] = of_type(np.random.default_rng(rank).normal(size=numel)[40:] * 1e3, dtype)
                source[:] = words
                home.changed(source)
            scales = (0.3, 1 / 3) if dtype.is_floating else (1.0, 1.0)
            expected = np.zeros(size * numel, np.uint8)
            reference.reduce(dtype, op, sources, *scales, expected)
            kernels.reduce(dtype, op, sources, *scales, sources[-1])
            found = home.host(home.twin(sources[-1]))
            differ = np.flatnonzero((found != expected).reshape(numel, size).any(1))
            assert is_nan(found, dtype)[differ].all() and is_nan(expected, dtype)[differ].all(), differ

    def test_other_reductions_are_refused(self) -> None:
        with pytest.raises(TypeError, match="Max of float16"):
            loops.CudaKernels().reduce(DType.FLOAT16, ReduceOp.MAX, [], 1.0, 1.0, None)
        with pytest.raises(TypeError, match=r"Sum of int32 by 0\.5"):
            loops.CudaKernels().reduce(DType.INT32, ReduceOp.SUM, [], 0.5, 1.0, None)

    @pytest.mark.parametrize("decay", [1, 0.99])
    def test_parameters_descend(self, kernels: Any, decay: float) -> None:
        model = Model((100, 4097, 31), first=1)
        averages = np.random.default_rng(3).standard_normal(model.numel + 16, np.float32)
        params = [p.copy() for p in model.params]
        on_device, flat = [loaned(kernels, p) for p in params], kernels.memory.zeros(averages.size)
        flat[:] = averages
        for tensors, run, average in (
            (table_of("param", params), reference, averages),
            (table_of("param", on_device), kernels, flat),
        ):
            tensors["step_size"], tensors["decay"], tensors["skip"][2:] = 0.1, decay, 1
            run.descend(model.blocks, tensors, average)
        assert all(same_bits(kernels.memory.host(a), b) for a, b in zip(on_device, params, strict=True))

    @pytest.mark.parametrize("weight_decay", [0, 0.03])
    def test_parameters_take_adams_steps_of_the_host(self, kernels: Any, weight_decay: float) -> None:
        model, home = Model((100, 4097, 31), first=1), kernels.memory
        size = int((model.blocks["owned"] + model.blocks["length"]).max())
        averages = np.random.default_rng(3).standard_normal(size, np.float32)
        params = [p.copy() for p in model.params]
        of_host = [np.zeros(size, np.float32) for _ in range(2)]
        on_device, of_device = [loaned(kernels, p) for p in params], [home.zeros(size) for _ in range(2)]
        flat = home.zeros(size)
        flat[:] = averages
        for step, scale in ((1, 1.0), (2, 0.3)):
            for table, run, gradients, moments in (
                (table_of("param", params), reference, averages, of_host),
                (table_of("param", on_device), kernels, flat, of_device),
            ):
                table["step_size"], table["decay"] = 1e-2 / (1 - 0.9**step), 1 - 1e-2 * 0.01
                table["weight_decay"] = weight_decay
                root = math.sqrt(1 - 0.999**step)
                run.adam_step(model.blocks, table, gradients, *moments, scale, 1 - 0.9, 0.999, 1 - 0.999, root, 1e-8)
        for own, host in zip([*on_device, *of_device], [*params, *of_host], strict=True):
            assert same_bits(home.host(own), host)

    def test_checksums_are_those_of_the_host(self, kernels: Any) -> None:
        home, data = kernels.memory, np.random.default_rng(4).integers(0, 256, 800_100, np.uint8)
        staging = home.staging(data.size)
        staging[:] = data
        home.changed(staging)
        spans = [(0, 0), (0, 1), (8, 16), (3, 12), (24, 24 + 8 * 4097 + 5), (64, 64 + 8 * 100_003 // 2)]
        first = home.twin(staging).address
        addresses = np.array([first + low for low, _ in spans] + [0], np.uint64)
        nbytes = np.array([high - low for low, high in spans] + [8])
        expected = [reference.checksum(data[low:high]) for low, high in spans] + [0]
        assert kernels.checksums(addresses, nbytes).tolist() == expected
        assert kernels.checksum(home.twin(staging)[8:16]) == expected[2]

    def test_squares_are_those_of_the_host_but_for_the_order(self, kernels: Any) -> None:
        tensors = [np.zeros(0, np.float32), *self.values()]
        on_device = [loaned(kernels, t) for t in tensors]
        numels = np.array([t.size for t in tensors])
        got = kernels.squares(table_of("grad", on_device)["grad"], numels)
        expected = reference.squares(table_of("grad", tensors)["grad"], numels)
        np.testing.assert_allclose(got, expected, rtol=1e-12)

    def test_sums_are_those_of_the_host(self, kernels: Any) -> None:
        values = np.random.default_rng(5).random(SUMMED + 300, np.float32)
        tensors = [np.zeros(0, np.float32), *self.values(), values[1:]]
        on_device = [loaned(kernels, t) for t in tensors]
        numels = np.array([t.size for t in tensors])
        got = kernels.sums(table_of("grad", on_device)["grad"], numels)
        assert np.array_equal(got, reference.sums(table_of("grad", tensors)["grad"], numels))
        assert kernels.sums(np.zeros(2, np.uint64), np.array([5, 0])).tolist() == [0, 0]

    def test_sketches_are_those_of_the_host(self, kernels: Any) -> None:
        tensors = [np.zeros(0, np.float32), *self.values()]
        on_device = [loaned(kernels, t) for t in tensors]
        numels = np.array([t.size for t in tensors])
        for seed in (3, 1 << 40):
            got = kernels.sketch(table_of("grad", on_device)["grad"], numels, seed)
            assert np.array_equal(got, reference.sketch(table_of("grad", tensors)["grad"], numels, seed))


class TestArguments:
    def test_an_array_that_is_not_on_a_device_is_refused(self) -> None:
        with pytest.raises(TypeError, match="list is not an array in the memory of a CUDA device"):
            loops.address_of([1.0])

    @pytest.mark.skipif(not SIMULATED, reason="a device faults, and nothing works after it")
    def test_the_simulator_refuses_an_address_that_a_device_would_fault_on(self) -> None:
        floats = np.zeros(8, np.float32)
        first = -(-loops.address_of(floats) // 16) * 16
        assert words.load_quad(first) == (0, 0, 0, 0)
        aligned = ((words.load_quad, 16), (words.load_low_quad, 8), (words.load_float, 4), (words.load_long, 8))
        for load, alignment in aligned:
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


#: Of dense exchanges and of rare sums, and what looks at gradients only.
WITHOUT_TIMES = {
    "finite",
    "descend",
    "gather",
    "scatter",
    "reduce",
    "sum_words",
    "sum_squares",
    "sum_floats",
    "sum_buckets",
    *REDUCTIONS,
}


@pytest.mark.long
def test_the_benchmark_checks_every_loop_before_it_times_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ocomm.bench import _cuda

    if _cuda.SIMULATED:
        monkeypatch.setattr(_cuda, "QUEUED_BEFORE", 0)  # nothing queues there, and each launch takes a second
    names = {row.kernel.partition(",")[0].partition(" of ")[0] for row in _cuda.rows(4096, 1, [2, 3])}
    assert names == loops.KERNELS.keys() - WITHOUT_TIMES
    with pytest.raises(RuntimeError, match="unpack: the result differs"):
        _cuda.check("unpack", lambda k, a: k.unpack(a.blocks, a.messages[k is reference], None, a.out), 1, 2)
