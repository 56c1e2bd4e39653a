"""The loops of dense values in 16, 8 and 4 bits: the reference obeys the laws, the C loops equal it bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocomm.compression.codecs import OF_BITS
from ocomm.kernels import Kernels, reference
from ocomm.kernels.base import GROUP, LEAST
from tests.contract.test_kernels import World, all_same, cpu_paths, few, same_bits, sevens, span

BITS = tuple(OF_BITS)
LENGTHS = ((), (1,), (31,), (127,), (129,), (4095,), (4097,), (20003,), (1, 70, 4096, 3, 9001))


class Codes(World):
    """A ``World`` whose messages have codes of ``bits`` bits. ``with_errors`` is False where what is lost is lost."""

    def __init__(self, lengths: tuple[int, ...], bits: int, with_errors: bool = True, **options: object) -> None:
        super().__init__(lengths, **options)  # type: ignore[arg-type]
        self.bits, self.with_errors, self.codec = bits, with_errors, OF_BITS[bits]
        message = 12
        for block in self.blocks:
            length = block["length"][np.newaxis]
            message = -(-message // 4) * 4
            scales, codes = 4 * int(self.codec.scales(length)[0]), int(self.codec.code_nbytes(length)[0])
            block["scale"] = message if scales else -1
            # Messages of 8 and 4 bits have codes at any byte; those of 16 at even ones.
            block["bits"] = message + scales + (0 if bits == 16 else int(self.rng.integers(0, 3)))
            message = int(block["bits"]) + codes
        self.nbytes = message + 5
        self.messages = [self._coded() for _ in range(self.ranks)]

    def _coded(self) -> np.ndarray:
        whole = self.rng.integers(0, 256, self.nbytes + 3, np.uint8)[3:]
        for block in self.blocks:
            if block["scale"] >= 0:
                scales = self.rng.choice([0.0, 1e-3, self.rng.random()], self.scale_count(block)).astype(np.float32)
                whole[block["scale"] : block["scale"] + scales.nbytes] = scales.view(np.uint8)
            else:
                words = self.floats(int(block["length"])).view(np.uint16)[1::2].copy()
                words[words & 0x7F80 == 0x7F80] = 0  # a NaN may have other bits elsewhere
                whole[block["bits"] : block["bits"] + words.nbytes] = words.view(np.uint8)
        return whole

    def scale_count(self, block: np.void) -> int:
        return -(-int(block["length"]) // GROUP)

    def errors(self, of: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        return (of, sevens(of.size)) if self.with_errors else (None, None)

    def compressed(self, kernels: Kernels, **columns: object) -> tuple:
        packed = np.full(self.nbytes, 0x5A, np.uint8)
        error, error_out = self.errors(self.error)
        tensors = self.tensors(**(columns or {"grad": self.grads}))
        finite = kernels.compress_codes(self.blocks, tensors, error, error_out, self.bits, packed)
        return (finite, packed) if error_out is None else (finite, packed, error_out)

    def averaged(self, kernels: Kernels) -> tuple:
        packed = np.full(self.nbytes, 0x5A, np.uint8)
        origin = 8  # this owner's blocks start later in everyone's packed buffer
        received = [message[origin:] for message in self.messages]
        error, error_out = self.errors(self.server_error)
        finite = kernels.average_codes(self.blocks, received, origin, error, error_out, self.bits, packed)
        return (finite, packed) if error_out is None else (finite, packed, error_out)

    def unpacked(self, kernels: Kernels, packed: np.ndarray) -> np.ndarray:
        out = sevens(self.numel)
        kernels.unpack_codes(self.blocks, packed, self.bits, out)
        return out

    def results(self, kernels: Kernels) -> tuple:
        """What all three loops answer and write."""
        without = self.compressed(kernels, grad=0)
        out = self.unpacked(kernels, self.messages[0])
        return (*self.compressed(kernels), *without, *self.averaged(kernels), out)

    def c(self, block: np.void) -> np.ndarray:
        grad = self.grads[block["tensor"]][span(block, "start")]
        return grad + self.error[span(block, "local")] if self.with_errors else grad


worlds = st.builds(
    Codes,
    lengths=st.lists(st.integers(0, 300), max_size=4).map(tuple),
    bits=st.sampled_from(BITS),
    with_errors=st.booleans(),
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([16, 64, 80, 256]),
    ranks=st.integers(1, 9),
    extreme=st.booleans(),
)


class TestEqualsTheReference:
    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("lengths", LENGTHS, ids=str)
    def test_every_loop_at_every_length(self, cpu: Kernels, lengths: tuple[int, ...], bits: int) -> None:
        world = Codes(lengths, bits)
        assert all_same(world.results(cpu), world.results(reference))

    @few
    @given(world=worlds)
    def test_whatever_they_are_given(self, world: Codes) -> None:
        for cpu in cpu_paths():
            assert all_same(world.results(cpu), world.results(reference))

    @pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
    @pytest.mark.parametrize("bits", BITS)
    def test_what_is_not_finite(self, cpu: Kernels, bits: int, bad: float) -> None:
        world = Codes((5000,), bits)
        world.grads[0][[130, 4999]] = bad
        got, expected = world.compressed(cpu), world.compressed(reference)
        assert all_same(got, expected)
        assert same_bits(world.unpacked(cpu, got[1]), world.unpacked(reference, got[1]))

    def test_a_block_may_be_as_long_as_its_tensor(self, cpu: Kernels) -> None:
        for bits in BITS:
            world = Codes((70001, 40), bits, block_size=1 << 20)
            assert all_same(world.results(cpu), world.results(reference))


@few
@given(world=worlds)
def test_received_and_residuals_add_up_to_what_there_was(world: Codes) -> None:
    """At the worker and at the server, whatever there was; the residual is rounded once."""
    for results, buffer, first in ((world.compressed, "error", "local"), (world.averaged, "server_error", "owned")):
        finite, packed, *rest = results(reference)
        out = world.unpacked(reference, packed)
        for block in world.blocks if finite and rest else ():
            at = span(block, first)
            if first == "local":
                there_was = world.c(block)
            else:
                parts = [world.unpacked(reference, m)[span(block)] for m in world.messages]
                total = parts[0]
                for part in parts[1:]:
                    total = total + part
                there_was = total * np.float32(1 / world.ranks) + getattr(world, buffer)[at]
            assert same_bits(rest[0][at], there_was - out[span(block)])


@pytest.mark.parametrize("bits", BITS)
class TestLaws:
    def test_what_is_sent_and_what_stays_are_what_there_was(self, kernels: Kernels, bits: int) -> None:
        world = Codes((5000, 77), bits)
        finite, packed, error_out = world.compressed(kernels)
        out = world.unpacked(kernels, packed)
        assert finite
        for block in world.blocks:
            assert same_bits(error_out[span(block, "local")], world.c(block) - out[span(block)])

    def test_what_stays_is_at_most_half_a_unit(self, kernels: Kernels, bits: int) -> None:
        world = Codes((5000, 77), bits, extreme=True)
        packed = world.compressed(kernels)[1]
        out = world.unpacked(kernels, packed)
        for block in world.blocks:
            c = world.c(block).astype(np.float64)
            if bits == 16:
                unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(c), 1e-38))) - 7)
            else:
                largest = [np.abs(c[first : first + GROUP]).max() for first in range(0, c.size, GROUP)]
                unit = np.repeat(largest, GROUP)[: c.size] / (2 ** (bits - 1) - 1)
            bound = np.maximum(unit * 0.50001, 2 * LEAST)
            assert (np.abs(c - out[span(block)]) <= bound).all()

    def test_zeros_stay_exactly_zero_beside_anything(self, kernels: Kernels, bits: int) -> None:
        world = Codes((4096, 50), bits)
        for grad in world.grads:
            grad[::3] = 0
        world.error[:] = 0
        _, packed, error_out = world.compressed(kernels)
        out = world.unpacked(kernels, packed)
        for block in world.blocks:
            zero = world.c(block) == 0
            assert zero.any() and not out[span(block)][zero].any() and not error_out[span(block, "local")][zero].any()

    def test_an_average_of_equal_messages_is_the_message(self, kernels: Kernels, bits: int) -> None:
        world = Codes((1000,), bits, ranks=4)
        world.messages = [world.compressed(kernels)[1]] * 4
        world.server_error[:] = 0
        finite, packed, error_out = world.averaged(kernels)
        assert finite
        np.testing.assert_allclose(
            world.unpacked(kernels, packed)[:1000], world.unpacked(kernels, world.messages[0])[:1000], rtol=1e-6
        )
        assert np.abs(error_out[span(world.blocks[0], "owned")]).max() < 1e-6

    def test_nothing_but_the_blocks_is_written(self, kernels: Kernels, bits: int) -> None:
        world = Codes((31, 4097, 1), bits)
        _, packed, error_out = world.compressed(kernels)
        local, message = np.zeros(world.local_numel, bool), np.zeros(world.nbytes, bool)
        for block in world.blocks:
            local[span(block, "local")] = True
            if block["scale"] >= 0:
                message[block["scale"] : block["scale"] + 4 * world.scale_count(block)] = True
            message[block["bits"] : block["bits"] + (int(block["length"]) * bits + 7) // 8] = True
        assert (error_out[~local] == 7).all()
        assert (packed[~message] == 0x5A).all()

    @pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
    @pytest.mark.parametrize("where", [0, 4095, 4999])
    def test_a_value_that_is_not_finite_is_told_and_received(
        self, kernels: Kernels, bits: int, bad: float, where: int
    ) -> None:
        world = Codes((5000,), bits)
        world.grads[0][where] = bad
        finite, packed = world.compressed(kernels)[:2]
        assert not finite
        first = int(next(b["offset"] for b in world.blocks if b["start"] == where // 4096 * 4096))
        assert not np.isfinite(world.unpacked(kernels, packed)[first + where % 4096])

    def test_an_average_that_overflows_is_told(self, kernels: Kernels, bits: int) -> None:
        world = Codes((300,), bits, ranks=2)
        world.grads[0][:] = 3e38
        world.error[:] = 0
        world.messages = [world.compressed(kernels)[1]] * 2
        finite, packed = world.averaged(kernels)[:2]
        assert not finite
        assert not np.isfinite(world.unpacked(kernels, packed)[:300]).any()

    def test_the_error_may_be_updated_in_place(self, kernels: Kernels, bits: int) -> None:
        world = Codes((9000, 100), bits)
        _, packed, expected = world.compressed(kernels)
        again = np.full_like(packed, 0x5A)
        tensors = world.tensors(grad=world.grads)
        kernels.compress_codes(world.blocks, tensors, world.error, world.error, bits, again)
        assert same_bits(again, packed)
        for block in world.blocks:
            assert same_bits(world.error[span(block, "local")], expected[span(block, "local")])


@pytest.mark.parametrize("bits", [8, 4])
def test_what_feedback_has_not_sent_yet_is_in_the_errors(kernels: Kernels, bits: int) -> None:
    """Over many steps an element far below its neighbours arrives as well as they do."""
    world = Codes((128,), bits)
    grad = world.grads[0]
    grad[:] = np.linspace(1e-4, 1, 128, dtype=np.float32)
    world.error[:] = 0
    received = np.zeros(128)
    packed = np.zeros(world.nbytes, np.uint8)
    for _ in range(400):
        tensors = world.tensors(grad=world.grads)
        kernels.compress_codes(world.blocks, tensors, world.error, world.error, bits, packed)
        received += world.unpacked(kernels, packed)[:128]
    left = world.error[span(world.blocks[0], "local")]
    np.testing.assert_allclose(received + left, 400 * grad.astype(np.float64), rtol=1e-4, atol=1e-4)
    assert np.abs(left).max() < 1 / (2 ** (bits - 1) - 1)
