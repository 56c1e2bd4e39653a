"""What every set of kernels does: the reference obeys the laws, and the C loops equal the reference bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ocomm.kernels import BLOCK, NOISE, TENSOR, Kernels, cpu_kernels, reference
from ocomm.kernels.base import PARTS, PIECE, SKETCH, SKETCHED, SUMMED, WHOLE, aligned_zeros
from ocomm.types import DType, ReduceOp
from tests.contract.conftest import PATHS

native = pytest.importorskip("ocomm._native", reason="the extension ocomm._native is not built")

LENGTHS = ((), (1,), (31,), (4095,), (4096,), (4097,), (100003,), (1, 70, 4096, 3, 9001))
SCALES = ("l1", "rms")


def random_floats(rng: np.random.Generator, numel: int, extreme: bool) -> np.ndarray:
    """Returns normal values among zeros of both signs; if ``extreme`` of any size that a float32 may have."""
    x = rng.standard_normal(numel).astype(np.float32)
    x[rng.random(numel) < 0.05] = 0.0
    x[rng.random(numel) < 0.05] = -0.0
    if extreme:
        x *= np.exp2(rng.integers(-150, 100, numel)).astype(np.float32)
    return x


@dataclass
class World:
    """A layout of some tensors, and everything a step needs, filled at random."""

    lengths: tuple[int, ...]
    seed: int = 0
    block_size: int = 4096
    ranks: int = 3
    masked: float = 0.0  # share of masked elements; half of them lie in runs, as unused rows do
    extreme: bool = False
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, *self.lengths])
        rows = []
        flat = owned = local = 0
        message = 12  # a header, so that positions are not offsets
        index = int(self.rng.integers(0, 2**40))
        for tensor, numel in enumerate(self.lengths):
            for start in range(0, numel, self.block_size):
                length = min(self.block_size, numel - start)
                if self.rng.random() < 0.7:  # as in a layout; loops write such blocks in another way
                    owned, local = (-(-at // 16) * 16 for at in (owned, local))
                scale = -(-(message + int(self.rng.integers(0, 4))) // 4) * 4
                bits = scale + 4 + int(self.rng.integers(0, 3))
                rows.append((flat, start, owned, local, bits, scale, index + start, length, tensor))
                message = bits + (length + 7) // 8
                flat += -(-length // 16) * 16
                owned += length + 3
                local += length + 5
            index += numel
        self.blocks = np.array(rows, BLOCK)
        self.rng.shuffle(self.blocks)
        self.numel, self.owned_numel, self.local_numel, self.nbytes = flat, owned, local, message + 5
        self.values = self.floats(local)
        self.error = self.floats(local)
        self.server_error = self.floats(owned)
        self.denominator = np.abs(self.floats(flat)) + np.float32(1e-8)
        self.mask = self._mask() if self.masked else None
        self.messages = [self.message() for _ in range(self.ranks)]
        # One element off, so that nothing a tensor holds is aligned to more than a float.
        self.grads, self.params, self.momenta = ([self.floats(n + 1)[1:] for n in self.lengths] for _ in range(3))

    def floats(self, numel: int) -> np.ndarray:
        return random_floats(self.rng, numel, self.extreme)

    def message(self) -> np.ndarray:
        """Random signs and scales of all blocks, as a rank would send them; odd bytes in front."""
        whole = self.rng.integers(0, 256, self.nbytes + 3, np.uint8)[3:]
        for block in self.blocks:
            scale = np.float32(self.rng.choice([0.0, 1e-3, self.rng.random()]))
            whole[block["scale"] : block["scale"] + 4] = np.frombuffer(scale.tobytes(), np.uint8)
        return whole

    def _mask(self) -> np.ndarray:
        masked = self.rng.random(self.numel) < self.masked / 2
        for first in self.rng.integers(0, self.numel + 1, 1 + int(self.numel * self.masked / 200)):
            masked[first : first + 100] = True
        return np.packbits(masked, bitorder="little")

    def tensors(self, **columns: object) -> np.ndarray:
        """The tensor table; a column is one value for all tensors, or an array list whose addresses are taken."""
        table = np.zeros(len(self.lengths), TENSOR)
        table["beta1"], table["one_minus_beta1"], table["decay"] = 0.9, 0.1, 1
        for name, column in columns.items():
            if isinstance(column, list):
                table[name] = [array.__array_interface__["data"][0] for array in column]
            else:
                table[name] = column
        return table

    def sent(self, kernels: Kernels, scale: str = "l1") -> tuple[bool, np.ndarray, np.ndarray]:
        """compress(): its answer, the packed bytes, the new error; untouched bytes are 0x5a, untouched errors 7."""
        packed, error_out = self.empty(self.local_numel)
        finite = kernels.compress(self.blocks, self.values, self.error, error_out, self.mask, scale, packed)
        return finite, packed, error_out

    def empty(self, numel: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        packed = np.full(self.nbytes, 0x5A, np.uint8)
        return packed, sevens(self.numel if numel is None else numel)

    def hidden(self, block: np.void) -> np.ndarray:
        if self.mask is None:
            return np.zeros(block["length"], bool)
        return np.unpackbits(self.mask, bitorder="little").view(bool)[span(block)]


def sevens(numel: int) -> np.ndarray:
    """Floats that begin where the runtime's buffers do."""
    array = aligned_zeros(numel)
    array[:] = 7
    return array


def span(block: np.void, first: str = "offset") -> slice:
    return slice(int(block[first]), int(block[first] + block["length"]))


def scale_in(packed: np.ndarray, block: np.void) -> np.float32:
    return np.frombuffer(packed[block["scale"] : block["scale"] + 4].tobytes(), np.float32)[0]


def bits_in(packed: np.ndarray, block: np.void, count: int | None = None) -> np.ndarray:
    field_bytes = packed[block["bits"] : block["bits"] + (block["length"] + 7) // 8]
    return np.unpackbits(field_bytes, count=int(block["length"]) if count is None else count, bitorder="little")


def signs_in(packed: np.ndarray, block: np.void) -> np.ndarray:
    return bits_in(packed, block).astype(np.float32) * 2 - 1


def same_bits(got: object, expected: object) -> bool:
    """Equal answers, or equal arrays down to the sign of a zero; any NaN equals any NaN."""
    if isinstance(got, np.ndarray):
        assert isinstance(expected, np.ndarray)
        if got.dtype.kind == "f":
            nan = np.isnan(got) & np.isnan(expected)
            word = f"u{got.dtype.itemsize}"
            return bool(((got.view(word) == expected.view(word)) | nan).all())
        return bool((got == expected).all())
    return got == expected


def all_same(got: tuple, expected: tuple) -> bool:
    return len(got) == len(expected) and all(map(same_bits, got, expected))


worlds = st.builds(
    World,
    lengths=st.lists(st.integers(0, 150), max_size=4).map(tuple),
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([16, 32, 64, 80]),
    ranks=st.integers(1, 9),
    masked=st.sampled_from([0.0, 0.01, 0.5, 1.9]),
    extreme=st.booleans(),
)
few = settings(max_examples=100)


def momentum_results(world: World, kernels: Kernels, scale: str) -> tuple:
    """compress_momentum() of every kind of source."""
    results = []
    dense = {"momentum": world.momenta}
    coupled = {"param": world.params, "weight_decay": 0.01}
    for previous, columns in (
        (None, {"grad": world.grads, **dense}),
        (world.messages[0], {"grad": world.grads}),
        (world.messages[0], {"grad": world.grads, **coupled}),
        (world.messages[0], {"grad": world.grads, **dense, **coupled}),
        (world.messages[0], coupled),
        (None, {"grad": world.grads, "beta1": 0.3}),
        (None, {}),
    ):
        packed, error_out = world.empty(world.local_numel)
        tensors = world.tensors(**columns)
        finite = kernels.compress_momentum(
            world.blocks, tensors, previous, world.error, error_out, world.mask, scale, packed
        )
        results += [finite, packed, error_out]
    return tuple(results)


def update_results(world: World, kernels: Kernels, scale: str) -> tuple:
    """compress_update() with and without steps behind it, gradients and coupled decay."""
    results = []
    flat = flat_buffers(world)
    coupled = {"param": world.params, "weight_decay": 0.01}
    for update, columns in (
        (flat["update"], {"grad": world.grads}),
        (None, {"grad": world.grads}),
        (flat["update"], {"grad": world.grads, **coupled}),
        (flat["update"], coupled),
        (None, {}),
    ):
        packed, error_out = world.empty(world.local_numel)
        tensors = world.tensors(step_size=0.03, interval_root=0.03 if update is None else 0.07, **columns)
        finite = kernels.compress_update(
            world.blocks, tensors, flat["momentum"], update, world.error, error_out, world.mask, scale, packed
        )
        results += [finite, packed, error_out]
    return tuple(results)


def flat_buffers(world: World) -> dict[str, np.ndarray]:
    """0/1 Adam's state, drawn anew and always the same."""
    rng, world.rng = world.rng, np.random.default_rng(world.seed)
    buffers = {name: world.floats(world.numel) for name in ("momentum", "update", "synced")}
    world.rng = rng
    return buffers


def local_step_results(world: World, kernels: Kernels) -> tuple:
    results = []
    for with_update, columns in (
        (True, {"grad": world.grads, "step_size": 0.03}),
        (True, {"grad": world.grads, "step_size": 0.03, "weight_decay": 0.01, "decay": 0.99}),
        (True, {"step_size": 0.03, "decay": 0.99}),
        (False, {"grad": world.grads}),
    ):
        flat = flat_buffers(world)
        params = [np.concatenate([[np.float32(7)], p]).astype(np.float32)[1:] for p in world.params]
        tensors = world.tensors(param=params, **columns)
        tensors["skip"][1:2] = 1
        update = flat["update"] if with_update else None
        kernels.local_step(world.blocks, tensors, flat["momentum"], update, world.denominator, world.mask)
        results += [*params, flat["momentum"], flat["update"]]
    return tuple(results)


def apply_update_results(world: World, kernels: Kernels) -> tuple:
    results = []
    for names, decay in (((), 1), ((), 0.99), (("update", "synced"), 1), (("update", "synced"), 0.99)):
        flat = flat_buffers(world)
        params = [np.concatenate([[np.float32(7)], p]).astype(np.float32)[1:] for p in world.params]
        tensors = world.tensors(param=params, interval_root=0.07, interval_decay=decay)
        tensors["skip"][1:2] = 1
        update, synced = (flat[name] if name in names else None for name in ("update", "synced"))
        kernels.apply_update(
            world.blocks,
            tensors,
            world.messages[0],
            world.denominator,
            world.mask,
            flat["momentum"],
            update,
            synced,
        )
        results += [*params, *flat.values()]
    return tuple(results)


def average_results(world: World, kernels: Kernels, scale: str) -> tuple:
    packed, error_out = world.empty(world.owned_numel)
    origin = 8  # this owner's blocks start later in everyone's packed buffer
    received = [message[origin:] for message in world.messages]
    error = world.server_error
    finite = kernels.average(world.blocks, received, origin, error, error_out, world.mask, scale, packed)
    return finite, packed, error_out


def apply_results(world: World, kernels: Kernels) -> tuple:
    results = []
    for decay in (1, 0.99):
        params = [np.concatenate([[np.float32(7)], p]).astype(np.float32)[1:] for p in world.params]
        tensors = world.tensors(param=params, step_size=1e-3, decay=decay)
        tensors["skip"][1:2] = 1
        kernels.apply(world.blocks, tensors, world.messages[0], world.denominator, world.mask)
        results += params
    return tuple(results)


def unpack_results(world: World, kernels: Kernels) -> tuple:
    out = world.empty()[1]
    kernels.unpack(world.blocks, world.messages[0], world.mask, out)
    return (out,)


def adam_results(world: World, kernels: Kernels) -> tuple:
    """Adam's dense steps, with a coupled weight decay and without, clipped and not."""
    results: list[object] = []
    for weight_decay, scale in ((0, 1.0), (0.03, 0.3)):
        # One element off, as parameters are.
        params = [np.concatenate([[np.float32(7)], p]).astype(np.float32)[1:] for p in world.params]
        table = world.tensors(param=params, weight_decay=weight_decay, decay=0.99, step_size=1e-2)
        momentum, variance = world.server_error.copy(), np.abs(world.server_error)
        given = world.server_error[::-1].copy()
        for step in (1, 2):
            root = float(np.sqrt(1 - 0.999**step))
            kernels.adam_step(
                world.blocks, table, given, momentum, variance, scale, 1 - 0.9, 0.999, 1 - 0.999, root, 1e-8
            )
        results += [*params, momentum, variance]
    return tuple(results)


def lamb_results(world: World, kernels: Kernels) -> tuple:
    """The steps of 1-bit LAMB, tensor by tensor: in the warm-up, after it, and where the momentum was dense before."""
    results: list[object] = []
    floors = np.abs(world.denominator[: world.blocks.size])
    for tensor, numel in enumerate(world.lengths):
        moments = [world.momenta[tensor].copy(), np.abs(world.params[tensor])]
        update = np.full(numel, 7, np.float32)
        kernels.adam_update(world.grads[tensor], *moments, update, 0.9, 0.999, 1e-8, 3)
        results += [*moments, update]
        moved = world.params[tensor].copy()
        kernels.axpy(moved, world.grads[tensor], -0.3)
        results.append(moved)
        mine = world.blocks["tensor"] == tensor
        for previous, dense in ((world.messages[-1], None), (None, world.momenta[tensor])):
            fresh, update = np.abs(flat_buffers(world)["momentum"]), np.full(numel, 7, np.float32)
            blocks, message, own = world.blocks[mine], world.messages[0], floors[mine]
            largest = np.full(blocks.size, 7, np.float32)
            state = world.mask, own, world.denominator, fresh, update, largest
            kernels.lamb_update(blocks, message, previous, dense, *state, 0.9, 0.999, 1e-8, 7)
            results += [largest, fresh, update]
    return tuple(results)


class TestEqualsTheReference:
    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("lengths", LENGTHS, ids=str)
    def test_every_loop_at_every_length(self, cpu: Kernels, lengths: tuple[int, ...], scale: str) -> None:
        masked = 0.02 if scale == "l1" else 0.0
        world = World(lengths, masked=masked if sum(lengths) else 0.0)
        assert all_same(world.sent(cpu, scale), world.sent(reference, scale))
        assert all_same(average_results(world, cpu, scale), average_results(world, reference, scale))
        assert all_same(unpack_results(world, cpu), unpack_results(world, reference))
        assert all_same(apply_results(world, cpu), apply_results(world, reference))
        if sum(lengths) < 50000:
            assert all_same(momentum_results(world, cpu, scale), momentum_results(world, reference, scale))
            assert all_same(update_results(world, cpu, scale), update_results(world, reference, scale))
            assert all_same(local_step_results(world, cpu), local_step_results(world, reference))
            assert all_same(apply_update_results(world, cpu), apply_update_results(world, reference))
            assert all_same(lamb_results(world, cpu), lamb_results(world, reference))
            assert all_same(adam_results(world, cpu), adam_results(world, reference))

    @few
    @given(world=worlds, scale=st.sampled_from(SCALES))
    def test_compress(self, world: World, scale: str) -> None:
        for cpu in cpu_paths():
            assert all_same(world.sent(cpu, scale), world.sent(reference, scale))

    @few
    @given(world=worlds, scale=st.sampled_from(SCALES))
    def test_compress_momentum(self, world: World, scale: str) -> None:
        for cpu in cpu_paths():
            assert all_same(momentum_results(world, cpu, scale), momentum_results(world, reference, scale))

    @few
    @given(world=worlds, scale=st.sampled_from(SCALES))
    def test_compress_update(self, world: World, scale: str) -> None:
        for cpu in cpu_paths():
            assert all_same(update_results(world, cpu, scale), update_results(world, reference, scale))

    @few
    @given(world=worlds)
    def test_local_step_and_apply_update(self, world: World) -> None:
        for cpu in cpu_paths():
            assert all_same(local_step_results(world, cpu), local_step_results(world, reference))
            assert all_same(apply_update_results(world, cpu), apply_update_results(world, reference))

    @few
    @given(world=worlds, scale=st.sampled_from(SCALES))
    def test_average(self, world: World, scale: str) -> None:
        for cpu in cpu_paths():
            assert all_same(average_results(world, cpu, scale), average_results(world, reference, scale))

    @few
    @given(world=worlds)
    def test_unpack_and_apply(self, world: World) -> None:
        for cpu in cpu_paths():
            assert all_same(unpack_results(world, cpu), unpack_results(world, reference))
            assert all_same(apply_results(world, cpu), apply_results(world, reference))

    @few
    @given(world=worlds)
    def test_lamb(self, world: World) -> None:
        for cpu in cpu_paths():
            assert all_same(lamb_results(world, cpu), lamb_results(world, reference))

    @few
    @given(world=worlds)
    def test_adam_step(self, world: World) -> None:
        for cpu in cpu_paths():
            assert all_same(adam_results(world, cpu), adam_results(world, reference))

    @pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 17, 70])
    def test_average_of_any_number_of_ranks(self, cpu: Kernels, ranks: int) -> None:
        world = World((500, 33), ranks=ranks, block_size=128, masked=0.05)
        assert all_same(average_results(world, cpu, "l1"), average_results(world, reference, "l1"))

    def test_a_block_may_be_as_long_as_its_tensor(self, cpu: Kernels) -> None:
        world = World((70001, 40, 20000), block_size=1 << 20)
        assert all_same(world.sent(cpu), world.sent(reference))


def cpu_paths() -> Iterator[Kernels]:
    """The C loops on one path after the other, for tests that draw their input (a fixture would not be reset)."""
    usual = native.ffi.string(native.lib.ocomm_path())
    try:
        for path in PATHS:
            if native.lib.ocomm_select_path(path.encode()) == 0:
                yield cpu_kernels()
    finally:
        native.lib.ocomm_select_path(usual)


class TestCompress:
    @pytest.mark.parametrize("masked", [0.0, 0.3])
    @pytest.mark.parametrize("scale", SCALES)
    def test_what_is_sent_and_what_stays_are_what_there_was(self, kernels: Kernels, scale: str, masked: float) -> None:
        world = World((5000, 77), masked=masked)
        finite, packed, error_out = world.sent(kernels, scale)
        assert finite
        for block in world.blocks:
            c = world.values[span(block, "local")] + world.error[span(block, "local")]
            hidden = world.hidden(block)
            result = np.where(hidden, np.float32(0), scale_in(packed, block) * signs_in(packed, block))
            assert same_bits(error_out[span(block, "local")], np.where(hidden, c, c - result))

    @pytest.mark.parametrize("masked", [0.0, 0.3])
    def test_the_scale_is_the_mean_of_the_unmasked_magnitudes(self, kernels: Kernels, masked: float) -> None:
        world = World((5000, 77), masked=masked)
        l1, rms = world.sent(kernels)[1], world.sent(kernels, "rms")[1]
        for block in world.blocks:
            at = span(block, "local")
            c = (world.values[at] + world.error[at]).astype(np.float64)[~world.hidden(block)]
            assert scale_in(l1, block) == pytest.approx(np.abs(c).mean(), rel=1e-6)
            assert scale_in(rms, block) == pytest.approx(np.sqrt((c * c).mean()), rel=1e-6)

    def test_signs_are_exact_and_both_zeros_are_positive(self, kernels: Kernels) -> None:
        world = World((300,), extreme=True)
        world.error[:] = -0.0
        packed = world.sent(kernels)[1]
        assert (bits_in(packed, world.blocks[0]) == (world.values[:300] >= 0)).all()
        assert (world.values == 0).any() and np.signbit(world.values[world.values == 0]).any()

    def test_a_block_of_zeros_comes_back_as_zeros(self, kernels: Kernels) -> None:
        world = World((4096, 50))
        world.values[:] = 0
        world.error[:] = -0.0
        finite, packed, error_out = world.sent(kernels)
        out = world.empty()[1]
        kernels.unpack(world.blocks, packed, None, out)
        for block in world.blocks:
            assert scale_in(packed, block) == 0
            assert (out[span(block)] == 0).all() and (error_out[span(block, "local")] == 0).all()
        assert finite

    def test_nothing_but_the_blocks_is_written(self, kernels: Kernels) -> None:
        world = World((31, 4097, 1))
        _, packed, error_out = world.sent(kernels)
        local, message = np.zeros(world.local_numel, bool), np.zeros(world.nbytes, bool)
        for block in world.blocks:
            local[span(block, "local")] = True
            message[block["scale"] : block["scale"] + 4] = True
            message[block["bits"] : block["bits"] + (block["length"] + 7) // 8] = True
        assert (error_out[~local] == 7).all()
        assert (packed[~message] == 0x5A).all()

    def test_bits_after_the_last_element_are_zero(self, kernels: Kernels) -> None:
        world = World((1, 31, 4093))
        packed = world.sent(kernels)[1]
        for block in world.blocks:
            assert not bits_in(packed, block, count=-(-int(block["length"]) // 8) * 8)[block["length"] :].any()

    def test_a_scale_that_is_not_finite_is_found(self, kernels: Kernels) -> None:
        world = World((300, 1, 5000), block_size=128)
        message = world.messages[0]
        assert kernels.finite_scales(world.blocks, message)
        assert kernels.finite_scales(world.blocks[:0], message)
        for bad in (np.nan, np.inf, -np.inf):
            at = int(world.blocks["scale"][-1])
            broken = message.copy()
            broken[at : at + 4] = np.frombuffer(np.float32(bad).tobytes(), np.uint8)
            assert not kernels.finite_scales(world.blocks, broken)
            assert kernels.finite_scales(world.blocks[:-1], broken)

    def test_the_error_may_be_updated_in_place(self, kernels: Kernels) -> None:
        world = World((9000, 100), masked=0.1)
        _, packed, expected = world.sent(kernels)
        again = np.zeros_like(packed)
        kernels.compress(world.blocks, world.values, world.error, world.error, world.mask, "l1", again)
        for block in world.blocks:
            assert same_bits(world.error[span(block, "local")], expected[span(block, "local")])
            assert (bits_in(again, block) == bits_in(packed, block)).all()

    @pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
    @pytest.mark.parametrize("where", [0, 31, 4095, 4999])
    @pytest.mark.parametrize("masked", [0.0, 0.2, 2.0])
    def test_a_value_that_is_not_finite_is_told_even_if_masked(
        self, kernels: Kernels, bad: float, where: int, masked: float
    ) -> None:
        world = World((5000,), masked=masked)
        world.values[where] = bad
        finite, packed, _ = world.sent(kernels)
        scales = {int(block["start"]): scale_in(packed, block) for block in world.blocks}
        assert not finite
        assert not np.isfinite(scales[where // 4096 * 4096])
        assert np.isfinite(scales[4096 - where // 4096 * 4096])

    def test_a_block_masked_as_a_whole_sends_nothing_and_keeps_everything(self, kernels: Kernels) -> None:
        world = World((4096, 40), masked=1.0)
        world.mask = np.full(world.numel // 8, 0xFF, np.uint8)
        finite, packed, error_out = world.sent(kernels)
        out = world.empty()[1]
        kernels.unpack(world.blocks, packed, world.mask, out)
        assert finite
        for block in world.blocks:
            assert scale_in(packed, block) == 0 and bits_in(packed, block).all()
            at = span(block, "local")
            assert same_bits(error_out[at], world.values[at] + world.error[at])
            assert (out[span(block)] == 0).all()

    def test_masked_elements_do_not_change_their_neighbours(self, kernels: Kernels) -> None:
        world = World((4096,), masked=0.3)
        block, hidden = world.blocks[0], world.hidden(world.blocks[0])
        _, packed, error_out = world.sent(kernels)
        world.values[: hidden.size][hidden] *= 1000
        _, packed_after, error_after = world.sent(kernels)
        assert (packed_after == packed).all()
        assert bits_in(packed, block)[hidden].all()
        unmasked = np.flatnonzero(~hidden)
        assert same_bits(error_after[unmasked], error_out[unmasked])


class TestCompressMomentum:
    @pytest.mark.parametrize("masked", [0.0, 0.3])
    def test_it_is_compress_of_the_momentum(self, kernels: Kernels, masked: float) -> None:
        world = World((5000,), masked=masked)
        beta1, rest = np.float32(0.9), np.float32(0.1)
        before = world.empty()[1]
        kernels.unpack(world.blocks, world.messages[0], world.mask, before)
        for momentum in (before[:5000], world.momenta[0]):
            dense = momentum is world.momenta[0]
            tensors = world.tensors(
                grad=world.grads, param=world.params, weight_decay=0.01, **({"momentum": [momentum]} if dense else {})
            )
            gradient = world.grads[0] + np.float32(0.01) * world.params[0]
            for block in world.blocks:
                piece = slice(int(block["start"]), int(block["start"] + block["length"]))
                world.values[span(block, "local")] = beta1 * momentum[piece] + rest * gradient[piece]
            packed, error_out = world.empty(world.local_numel)
            kernels.compress_momentum(
                world.blocks, tensors, world.messages[0], world.error, error_out, world.mask, "l1", packed
            )
            assert all_same((packed, error_out), world.sent(kernels)[1:])


class TestZeroOneAdam:
    """The loops of 0/1 Adam: compress_update, local_step, apply_update, finite."""

    @pytest.mark.parametrize("masked", [0.0, 0.3])
    def test_a_sync_compresses_what_the_steps_add_up_to_over_the_root(self, kernels: Kernels, masked: float) -> None:
        world = World((5000,), masked=masked)
        flat = flat_buffers(world)
        tensors = world.tensors(
            grad=world.grads, param=world.params, weight_decay=0.01, step_size=0.03, interval_root=0.07
        )
        lr, root = np.float32(0.03), np.float32(0.07)
        gradient = world.grads[0] + np.float32(0.01) * world.params[0]
        for block in world.blocks:
            piece = slice(int(block["start"]), int(block["start"] + block["length"]))
            at = span(block)
            m = np.float32(0.9) * flat["momentum"][at] + np.float32(0.1) * gradient[piece]
            world.values[span(block, "local")] = 1 / root * flat["update"][at] + lr / root * m
        packed, error_out = world.empty(world.local_numel)
        before = {name: array.copy() for name, array in flat.items()}
        kernels.compress_update(
            world.blocks,
            tensors,
            flat["momentum"],
            flat["update"],
            world.error,
            error_out,
            world.mask,
            "l1",
            packed,
        )
        assert all_same((packed, error_out), world.sent(kernels)[1:])
        assert all(same_bits(flat[name], before[name]) for name in flat), "nothing is committed yet"

    @pytest.mark.parametrize("scale", SCALES)
    def test_no_update_is_an_update_of_zeros(self, kernels: Kernels, scale: str) -> None:
        world = World((5000, 31), masked=0.1)
        momentum = flat_buffers(world)["momentum"]
        momentum[:100] = world.grads[0][:100] = -0.0
        tensors = world.tensors(grad=world.grads, step_size=0.03, interval_root=0.03)
        found = []
        for update in (None, np.zeros(world.numel, np.float32)):
            packed, error_out = world.empty(world.local_numel)
            finite = kernels.compress_update(
                world.blocks, tensors, momentum, update, world.error, error_out, world.mask, scale, packed
            )
            found.append((finite, packed, error_out))
        assert all_same(*found)

    @pytest.mark.parametrize(("masked", "lr"), [(0.0, 0.03), (0.2, 0.03), (2.0, 0.03), (0.2, 0.0)])
    def test_a_gradient_that_is_not_finite_is_told_even_if_masked(
        self, kernels: Kernels, masked: float, lr: float
    ) -> None:
        for bad in (np.inf, -np.inf, np.nan):
            for where in (0, 31, 4095, 4999):
                world = World((5000,), masked=masked)
                momentum = flat_buffers(world)["momentum"]
                tensors = world.tensors(grad=world.grads, step_size=lr, interval_root=lr)
                assert kernels.finite(world.blocks, tensors)
                world.grads[0][where] = bad
                packed, error_out = world.empty(world.local_numel)
                assert not kernels.finite(world.blocks, tensors)
                assert not kernels.compress_update(
                    world.blocks, tensors, momentum, None, world.error, error_out, world.mask, "l1", packed
                )

    def test_no_gradient_and_the_largest_ones_are_finite(self, kernels: Kernels) -> None:
        world = World((5000, 31))
        assert kernels.finite(world.blocks, world.tensors())
        world.grads[0][:] = np.finfo(np.float32).max
        world.grads[1][:] = -np.finfo(np.float32).max
        assert kernels.finite(world.blocks, world.tensors(grad=world.grads))

    def test_a_local_step_adds_up_what_it_moves_and_leaves_masked_momentum_alone(self, kernels: Kernels) -> None:
        world = World((5000, 300), masked=0.3)
        flat, params = flat_buffers(world), [p.copy() for p in world.params]
        before = {name: array.copy() for name, array in flat.items()}
        tensors = world.tensors(grad=world.grads, param=params, step_size=0.03, decay=0.9)
        kernels.local_step(world.blocks, tensors, flat["momentum"], flat["update"], world.denominator, world.mask)
        for block in world.blocks:
            piece = slice(int(block["start"]), int(block["start"] + block["length"]))
            at, hidden = span(block), world.hidden(block)
            m = np.float32(0.9) * before["momentum"][at] + np.float32(0.1) * world.grads[block["tensor"]][piece]
            assert same_bits(flat["momentum"][at], np.where(hidden, before["momentum"][at], m))
            assert same_bits(flat["update"][at], before["update"][at] + np.float32(0.03) * m)
            p = world.params[block["tensor"]][piece] * np.float32(0.9)
            moved = p - np.float32(0.03) * (m / world.denominator[at])
            assert same_bits(params[block["tensor"]][piece], np.where(hidden, p, moved))

    @pytest.mark.parametrize("interval", [1, 4])
    def test_after_a_sync_all_start_from_one_point(self, kernels: Kernels, interval: int) -> None:
        world = World((5000, 300), masked=0.3)
        flat, params = flat_buffers(world), [p.copy() for p in world.params]
        synced = flat["synced"] if interval > 1 else None
        tensors = world.tensors(param=params, interval_root=0.1, interval_decay=0.9)
        before = flat["synced"].copy()
        kernels.apply_update(
            world.blocks,
            tensors,
            world.messages[0],
            world.denominator,
            world.mask,
            flat["momentum"],
            flat["update"],
            synced,
        )
        for block in world.blocks:
            piece = slice(int(block["start"]), int(block["start"] + block["length"]))
            at, hidden = span(block), world.hidden(block)
            base = (before[at] if interval > 1 else world.params[block["tensor"]][piece]) * np.float32(0.9)
            scale, signs = scale_in(world.messages[0], block), signs_in(world.messages[0], block)
            moved = base - np.float32(0.1) * scale * signs / world.denominator[at]
            param = params[block["tensor"]][piece]
            assert same_bits(param, np.where(hidden, base, moved))
            assert same_bits(flat["momentum"][at], np.where(hidden, np.float32(0), scale / np.float32(0.1) * signs))
            assert not flat["update"][at].any()
            assert same_bits(flat["synced"][at], param if interval > 1 else before[at])


class TestAverage:
    def test_the_owner_keeps_what_it_does_not_send(self, kernels: Kernels) -> None:
        world = World((5000, 77), masked=0.3, ranks=4)
        finite, packed, error_out = average_results(world, kernels, "l1")
        assert finite
        for block in world.blocks:
            hidden = world.hidden(block)
            total = sum(scale_in(m, block).astype(np.float64) * signs_in(m, block) for m in world.messages)
            error = world.server_error[span(block, "owned")]
            kept = error_out[span(block, "owned")]
            sent = scale_in(packed, block) * signs_in(packed, block)
            assert same_bits(kept[hidden], error[hidden])
            assert np.allclose((sent + kept)[~hidden], (total / 4 + error)[~hidden], rtol=1e-5, atol=1e-6)

    def test_of_one_rank_without_error_it_returns_the_message(self, kernels: Kernels) -> None:
        world = World((5000, 77), ranks=1)
        world.server_error[:] = 0
        _, packed, error_out = average_results(world, kernels, "l1")
        for block in world.blocks:
            sent = scale_in(world.messages[0], block)
            assert scale_in(packed, block) == pytest.approx(sent, rel=1e-5)
            assert sent == 0 or (bits_in(packed, block) == bits_in(world.messages[0], block)).all()
            assert np.allclose(error_out[span(block, "owned")], 0, atol=1e-5)

    @pytest.mark.parametrize("masked", [0.0, 0.2, 2.0])
    def test_one_scale_that_is_not_finite_is_passed_on(self, kernels: Kernels, masked: float) -> None:
        world = World((4096, 40), masked=masked)
        block = world.blocks[0]
        world.messages[1][block["scale"] : block["scale"] + 4] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
        finite, packed, _ = average_results(world, kernels, "l1")
        assert not finite
        assert [np.isfinite(scale_in(packed, b)) for b in world.blocks] == [False, True]


class TestUnpackAndApply:
    def test_unpack_gives_scale_times_sign_and_zero_where_masked(self, kernels: Kernels) -> None:
        world = World((4097, 31), masked=0.3)
        (out,) = unpack_results(world, kernels)
        written = np.zeros(world.numel, bool)
        for block in world.blocks:
            expected = scale_in(world.messages[0], block) * signs_in(world.messages[0], block)
            assert (out[span(block)] == np.where(world.hidden(block), 0, expected)).all()
            written[span(block)] = True
        assert (out[~written] == 7).all()

    def test_apply_moves_by_step_over_denominator_and_masked_elements_only_decay(self, kernels: Kernels) -> None:
        world = World((5000, 300), masked=0.3)
        params = [p.copy() for p in world.params]
        kernels.apply(
            world.blocks,
            world.tensors(param=params, step_size=0.01, decay=0.9),
            world.messages[0],
            world.denominator,
            world.mask,
        )
        for block in world.blocks:
            piece = slice(int(block["start"]), int(block["start"] + block["length"]))
            before = world.params[block["tensor"]][piece] * np.float32(0.9)
            after = params[block["tensor"]][piece]
            hidden = world.hidden(block)
            sent = scale_in(world.messages[0], block).astype(np.float64) * signs_in(world.messages[0], block)
            expected = before - 0.01 * sent / world.denominator[span(block)]
            assert same_bits(after[hidden], before[hidden])
            assert np.allclose(after[~hidden], expected[~hidden], rtol=1e-5, atol=1e-6)

    def test_a_skipped_tensor_is_left_alone(self, kernels: Kernels) -> None:
        world = World((5000,))
        params = [world.params[0].copy()]
        tensors = world.tensors(param=params, step_size=0.01, decay=0.9, skip=1)
        kernels.apply(world.blocks, tensors, world.messages[0], world.denominator, None)
        assert same_bits(params[0], world.params[0])


def raw_elements(dtype: DType, numel: int, rng: np.random.Generator) -> np.ndarray:
    """Random bytes as elements: every NaN, infinity and subnormal of a 16-bit float turns up; odd address."""
    data = rng.integers(0, 256, numel * dtype.itemsize + 1, np.uint8)[1:]
    if dtype in (DType.FLOAT32, DType.FLOAT64):
        floats = rng.standard_normal(numel).astype(f"f{dtype.itemsize}")
        floats[rng.random(numel) < 0.05] = np.nan
        floats[rng.random(numel) < 0.05] = -0.0
        floats[rng.random(numel) < 0.05] = np.inf
        data[:] = floats.view(np.uint8)
    return data


def as_elements(data: np.ndarray, dtype: DType) -> np.ndarray:
    copy = np.frombuffer(data.tobytes(), np.uint8)
    if dtype == DType.BFLOAT16:
        words = copy.view(np.uint16).astype(np.uint32) << 16
        return words.view(np.float32)
    if dtype == DType.BOOL:
        return copy
    return copy.view(dtype.label)


ARITHMETIC = (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
LOGIC = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
REDUCTIONS = (
    [(dtype, op) for dtype in DType if dtype != DType.BOOL for op in ARITHMETIC]
    + [(DType.BOOL, op) for op in LOGIC]
    + [(DType.UINT8, ReduceOp.BITWISE_OR)]
)


class TestReduce:
    @pytest.mark.parametrize(("dtype", "op"), REDUCTIONS, ids=lambda value: value.label)
    def test_it_equals_the_reference(self, cpu: Kernels, dtype: DType, op: ReduceOp) -> None:
        rng = np.random.default_rng(dtype * 10 + op)
        factors = [(1.0, 1.0)]
        if dtype != DType.BOOL and op != ReduceOp.BITWISE_OR:
            factors += [(1.0, 1 / 3), (0.3, 1.0), (-7.7, 1e-3)]
        for numel in (0, 1, 31, 1024, 3001):
            for ranks in (1, 2, 5):
                sources = [raw_elements(dtype, numel, rng) for _ in range(ranks)]
                for prescale, postscale in factors:
                    got, expected = np.empty_like(sources[0]), np.empty_like(sources[0])
                    cpu.reduce(dtype, op, sources, prescale, postscale, got)
                    reference.reduce(dtype, op, sources, prescale, postscale, expected)
                    assert same_bits(as_elements(got, dtype), as_elements(expected, dtype))

    @pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda dtype: dtype.label)
    def test_every_16_bit_float_survives_alone(self, kernels: Kernels, dtype: DType) -> None:
        every = np.arange(65536).astype(np.uint16).view(np.uint8)
        out = np.empty_like(every)
        kernels.reduce(dtype, ReduceOp.SUM, [every], 1.0, 1.0, out)
        assert same_bits(as_elements(out, dtype), as_elements(every, dtype))

    @pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda dtype: dtype.label)
    def test_16_bit_floats_round_once_at_the_end(self, kernels: Kernels, dtype: DType) -> None:
        one = {DType.FLOAT16: 0x3C00, DType.BFLOAT16: 0x3F80}[dtype]
        tiny = {DType.FLOAT16: 0x1000, DType.BFLOAT16: 0x3B80}[dtype]  # half a unit in the last place of 1
        sources = [np.array([word], np.uint16).view(np.uint8) for word in (one, tiny, tiny)]
        out = np.empty(2, np.uint8)
        kernels.reduce(dtype, ReduceOp.SUM, sources, 1.0, 1.0, out)
        assert out.view(np.uint16)[0] == one + 1

    def test_the_output_may_be_one_of_the_sources(self, kernels: Kernels) -> None:
        rng = np.random.default_rng(1)
        for position in range(3):
            sources = [rng.standard_normal(5000).astype(np.float32) for _ in range(3)]
            expected = (sources[0] + sources[1]) + sources[2]
            views = [source.view(np.uint8) for source in sources]
            kernels.reduce(DType.FLOAT32, ReduceOp.SUM, views, 1.0, 1.0, views[position])
            assert same_bits(sources[position], expected)

    @pytest.mark.parametrize("ranks", [3, 49, 98, 107])
    def test_the_average_of_equal_integers_is_that_integer(self, kernels: Kernels, ranks: int) -> None:
        for value in (1, -1, 1000003):
            sources = [np.full(3, value, np.int64).view(np.uint8)] * ranks
            out = np.empty(24, np.uint8)
            kernels.reduce(DType.INT64, ReduceOp.AVERAGE, sources, 1.0, 1.0, out)
            assert (out.view(np.int64) == value).all()
            kernels.reduce(DType.INT64, ReduceOp.SUM, sources, 1.0, 1 / ranks, out)
            assert (out.view(np.int64) == value).all()

    @pytest.mark.parametrize("dtype", [DType.UINT8, DType.INT8, DType.INT16, DType.INT32, DType.INT64])
    def test_the_average_of_integers_is_the_exact_sum_divided_towards_zero(
        self, kernels: Kernels, dtype: DType
    ) -> None:
        numpy_dtype = np.dtype(dtype.label)
        top = np.iinfo(numpy_dtype).max if dtype != DType.INT64 else 2**40
        low = -7 if numpy_dtype.kind == "i" else 7
        rows = np.array([[top, low, 1, low], [top, 2, 1, 1], [top - 1, 0, 0, 0]]).astype(numpy_dtype)
        out = rows[1].copy()
        sources = [rows[0].view(np.uint8), out.view(np.uint8), rows[2].view(np.uint8)]
        kernels.reduce(dtype, ReduceOp.AVERAGE, sources, 1.0, 1.0, sources[1])
        assert out.tolist() == [int(total / 3) for total in rows.astype(np.int64).sum(0)]

    @pytest.mark.parametrize("dtype", [DType.UINT8, DType.INT8, DType.INT16, DType.INT32, DType.INT64])
    def test_the_average_of_integers_and_a_factor_are_rounded_once(self, kernels: Kernels, dtype: DType) -> None:
        top = np.iinfo(dtype.label).max
        rows = np.array([[3, 1, 7, 100, 0], [0, 0, 0, 101, 1]]).astype(dtype.label)
        out = np.empty_like(rows[0])
        sources = [row.view(np.uint8) for row in rows]
        kernels.reduce(dtype, ReduceOp.AVERAGE, sources, 1.0, 2.0, out.view(np.uint8))
        assert out.tolist() == [3, 1, 7, min(201, top), 1]
        kernels.reduce(dtype, ReduceOp.AVERAGE, sources, 0.5, 1.0, out.view(np.uint8))
        assert out.tolist() == [0, 0, 1, 50, 0]  # each rank's own is rounded before the sum, too

    def test_scaled_integers_are_cut_towards_zero_and_stop_at_their_limits(self, kernels: Kernels) -> None:
        source = np.array([7, -7, 127, -128], np.int8).view(np.uint8)
        out = np.empty(4, np.uint8)
        kernels.reduce(DType.INT8, ReduceOp.SUM, [source], 1.0, 0.5, out)
        assert out.view(np.int8).tolist() == [3, -3, 63, -64]
        kernels.reduce(DType.INT8, ReduceOp.SUM, [source], 3.0, 1.0, out)
        assert out.view(np.int8).tolist() == [21, -21, 127, -128]

    def test_nan_wins_over_every_number(self, kernels: Kernels) -> None:
        a, b = (np.array(x, np.float32).view(np.uint8) for x in ([np.nan, 1, 2], [1, np.nan, 3]))
        out = np.empty(12, np.uint8)
        for op, last in ((ReduceOp.MIN, 2), (ReduceOp.MAX, 3)):
            kernels.reduce(DType.FLOAT32, op, [a, b], 1.0, 1.0, out)
            assert np.isnan(out.view(np.float32)[:2]).all() and out.view(np.float32)[2] == last

    @pytest.mark.parametrize(
        ("dtype", "op", "postscale"),
        [
            (DType.BOOL, ReduceOp.AVERAGE, 1.0),
            (DType.BOOL, ReduceOp.SUM, 0.5),
            (DType.INT32, ReduceOp.BITWISE_OR, 1.0),
            (DType.UINT8, ReduceOp.BITWISE_OR, 0.5),
            (DType.FLOAT32, ReduceOp.ADASUM, 1.0),
        ],
    )
    def test_what_a_type_does_not_have_is_refused(
        self, kernels: Kernels, dtype: DType, op: ReduceOp, postscale: float
    ) -> None:
        data = np.zeros(8, np.uint8)
        with pytest.raises(TypeError, match=f"{op.label} is not defined for {dtype.label}"):
            kernels.reduce(dtype, op, [data, data], 1.0, postscale, data)


class TestChecksum:
    @pytest.mark.parametrize("part", [WHOLE, 0, 17, PARTS - 1])
    @pytest.mark.parametrize("nbytes", [0, 1, 8, 63, 4096, 4104, 40961, 1 << 20])
    def test_it_equals_the_reference(self, cpu: Kernels, nbytes: int, part: int) -> None:
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        assert cpu.checksum(data, part) == reference.checksum(data, part)

    @given(st.binary(min_size=1, max_size=100), st.data())
    @few
    def test_a_full_one_notices_any_changed_byte(self, content: bytes, data: st.DataObject) -> None:
        before = np.frombuffer(content, np.uint8).copy()
        after = before.copy()
        after[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        for cpu in cpu_paths():
            assert cpu.checksum(before) != cpu.checksum(after)

    def test_every_byte_is_in_one_part(self, kernels: Kernels) -> None:
        before = np.random.default_rng(0).integers(0, 256, 8 * 5001, np.uint8)
        sums = [kernels.checksum(before, part) for part in range(PARTS)]
        for byte in range(0, before.size, 997):
            after = before.copy()
            after[byte] ^= 1
            changed = [part for part in range(PARTS) if kernels.checksum(after, part) != sums[part]]
            assert len(changed) == 1


#: Elements per array.
SQUARED = (0, 1, 31, 32, 33, 64, 100, 4096, 4097, 70001)


class TestSquares:
    def test_it_equals_the_reference_and_the_sum_of_squares(self, cpu: Kernels) -> None:
        rng = np.random.default_rng(1)
        arrays = [rng.normal(size=n).astype(np.float32) * np.float32(10.0**k) for k, n in enumerate(SQUARED, -15)]
        addresses = np.array([array.ctypes.data for array in arrays], np.uint64)
        addresses[3] = 0
        numels = np.array(SQUARED)
        found = cpu.squares(addresses, numels)
        assert np.array_equal(found, reference.squares(addresses, numels))
        exact = [0.0 if k == 3 else float((a.astype(np.float64) ** 2).sum()) for k, a in enumerate(arrays)]
        assert np.allclose(found, exact, rtol=1e-13, atol=0)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_what_is_not_finite_shows(self, kernels: Kernels, bad: float) -> None:
        array = np.ones(100, np.float32)
        array[99] = bad
        assert not np.isfinite(kernels.squares(np.array([array.ctypes.data], np.uint64), np.array([100]))[0])


class TestSums:
    def test_it_equals_the_reference_and_the_sum(self, cpu: Kernels) -> None:
        rng = np.random.default_rng(1)
        arrays = [rng.random(n, np.float32) * np.float32(10.0**-k) for k, n in enumerate((*SQUARED, 255, 256, 257))]
        arrays += [rng.random(2 * SUMMED + extra, np.float32)[1:] for extra in (0, 1, 2, 300)]
        addresses = np.array([array.ctypes.data for array in arrays], np.uint64)
        addresses[3] = 0
        numels = np.array([array.size for array in arrays])
        found = cpu.sums(addresses, numels)
        assert np.array_equal(found, reference.sums(addresses, numels))
        exact = [0.0 if k == 3 else float(a.sum(dtype=np.float64)) for k, a in enumerate(arrays)]
        assert np.allclose(found, exact, rtol=1e-6, atol=0)

    def test_its_order_is_the_documented_one(self, kernels: Kernels) -> None:
        array = np.random.default_rng(2).normal(size=SUMMED + 5).astype(np.float32)
        lanes = np.zeros(256, np.float32)
        for row in array[:SUMMED].reshape(-1, 256):
            lanes += row
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        (a, b, c, d, e) = array[SUMMED:]
        expected = float(lanes[0]) + float(((a + e) + c) + (b + d))
        assert kernels.sums(np.array([array.ctypes.data], np.uint64), np.array([array.size])).tolist() == [expected]

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_what_is_not_finite_shows(self, kernels: Kernels, bad: float) -> None:
        array = np.ones(1000, np.float32)
        array[777] = bad
        assert not np.isfinite(kernels.sums(np.array([array.ctypes.data], np.uint64), np.array([1000]))[0])


class TestSketch:
    @pytest.mark.parametrize("seed", [1, 5])
    def test_it_equals_the_reference(self, cpu: Kernels, seed: int) -> None:
        rng = np.random.default_rng(1)
        arrays = [rng.normal(size=n).astype(np.float32) for n in (*SQUARED, 2 * SKETCHED + 33)]
        addresses = np.array([array.ctypes.data for array in arrays], np.uint64)
        addresses[3] = 0
        numels = np.array([array.size for array in arrays])
        found = cpu.sketch(addresses, numels, seed)
        assert np.array_equal(found, reference.sketch(addresses, numels, seed))
        assert not np.array_equal(found, cpu.sketch(addresses, numels, seed + 1))

    @pytest.mark.parametrize("shape", ["even", "one column", "one row", "one element", "two tensors"])
    def test_its_norm_is_that_of_the_elements(self, cpu: Kernels, shape: str) -> None:
        """Over 400 seeds the mean of the squared norm is within five of its deviations, and its spread is at most that
        of the bound, wherever large elements are.
        """
        x = np.random.default_rng(2).normal(size=(256, 384)).astype(np.float32)
        factor = {"one column": (slice(None), 5), "one row": (7, slice(None)), "one element": (3, 9)}.get(shape)
        if factor is not None:
            x[factor] *= 1000
        parts = [x] if shape != "two tensors" else [x[:100].copy(), x[100:].copy()]
        addresses, numels = np.array([p.ctypes.data for p in parts], np.uint64), np.array([p.size for p in parts])
        exact = float((x.astype(np.float64) ** 2).sum())
        ratios = [float((cpu.sketch(addresses, numels, seed) ** 2).sum()) / exact for seed in range(400)]
        bound = math.sqrt(2 / SKETCH)
        assert abs(np.mean(ratios) - 1) < 5 * bound / math.sqrt(len(ratios))
        assert np.std(ratios) < 1.2 * bound

    def test_the_mean_of_sketches_is_the_sketch_of_the_mean(self, cpu: Kernels) -> None:
        ranks = np.random.default_rng(3).integers(-64, 64, (4, 70_000)).astype(np.float32)
        mean = ranks.mean(0, dtype=np.float32)
        found = [cpu.sketch(np.array([x.ctypes.data], np.uint64), np.array([x.size]), 9) for x in (*ranks, mean)]
        assert np.allclose(np.mean(found[:-1], 0), found[-1], rtol=1e-6, atol=1e-3)


def test_an_unknown_path_is_refused_and_changes_nothing() -> None:
    usual = native.ffi.string(native.lib.ocomm_path())
    assert native.lib.ocomm_select_path(b"avx1024") == -1
    assert native.ffi.string(native.lib.ocomm_path()) == usual


def test_the_tables_have_the_layout_of_the_c_structs() -> None:
    structs = {"ocomm_block": BLOCK, "ocomm_tensor": TENSOR, "ocomm_noise": NOISE, "ocomm_piece": PIECE}
    for struct, dtype in structs.items():
        assert dtype.itemsize == native.ffi.sizeof(struct)
        for name in dtype.names or ():
            assert dtype.fields[name][1] == native.ffi.offsetof(struct, name)
