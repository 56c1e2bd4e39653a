"""The loops of Birder, SoftSignSGD and Lion: the reference obeys the laws, the C loops equal it bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocomm.kernels import BLOCK, NOISE, OWNERS, TENSOR, Kernels, reference
from ocomm.kernels.reference import philox4x32, uniform
from tests.contract.test_kernels import (
    LENGTHS,
    all_same,
    bits_in,
    cpu_paths,
    few,
    random_floats,
    same_bits,
    sevens,
    signs_in,
    span,
)

EPS = 1e-12


@dataclass
class Model:
    """Some tensors in blocks, and everything a step needs, filled at random."""

    lengths: tuple[int, ...]
    seed: int = 0
    block_size: int = 4096
    ranks: int = 3
    first: int = 0  # index of the first element
    extreme: bool = False
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, *self.lengths])
        rows = []
        local = owned = 0
        bits, index = 12, self.first  # a header, so that positions are not offsets
        for tensor, numel in enumerate(self.lengths):
            for start in range(0, numel, self.block_size):
                length = min(self.block_size, numel - start)
                rows.append((local + 16, start, owned, local, bits, -1, index + start, length, tensor))
                bits += (length + 7) // 8 + int(self.rng.integers(0, 3))
                local += -(-length // 16) * 16
                owned += length + 3
            index += numel
        self.blocks = np.array(rows, BLOCK)
        self.rng.shuffle(self.blocks)
        self.numel, self.owned_numel, self.nbytes = local, owned, bits + 5
        self.momentum, self.error, self.server_error = (self.floats(n) for n in (local, local, owned))
        self.magnitude = np.abs(self.momentum) + np.abs(self.floats(local))
        self.messages = [self.rng.integers(0, 256, self.nbytes + 3, np.uint8)[3:] for _ in range(self.ranks)]
        self.weights = self.rng.random(self.ranks).astype(np.float32)
        # One element off, so that nothing a tensor holds is aligned to more than a float.
        self.grads, self.params = ([self.floats(n + 1)[1:] for n in self.lengths] for _ in range(2))

    def floats(self, numel: int) -> np.ndarray:
        return random_floats(self.rng, numel, self.extreme)

    def tensors(self, **columns: object) -> np.ndarray:
        table = np.zeros(len(self.lengths), TENSOR)
        table["beta1"], table["one_minus_beta1"], table["decay"] = 0.95, 0.05, 1
        for name, column in columns.items():
            table[name] = [a.__array_interface__["data"][0] for a in column] if isinstance(column, list) else column
        return table

    def empty(self, *numels: int) -> list[np.ndarray]:
        """Buffers whose untouched elements are 7."""
        return [sevens(numel) for numel in numels]

    def packed(self) -> np.ndarray:
        """A message whose untouched bytes are 0x5a."""
        return np.full(self.nbytes, 0x5A, np.uint8)


def noise(seed: int = 0x0123456789ABCDEF, step: int = 3, stream: int = 1, steady: int = 0) -> np.ndarray:
    return np.array([(seed, step, stream, steady)], NOISE)


@dataclass
class Sent:
    """What ``compress_quantized`` answers and writes."""

    finite: bool
    momentum: np.ndarray
    magnitude: np.ndarray
    error: np.ndarray
    packed: np.ndarray


STEADY = {"draw": noise(steady=1)}


def quantize(
    model: Model, kernels: Kernels, *, amsgrad: bool = False, draw: np.ndarray | None = None, **columns: Any
) -> Sent:
    columns.setdefault("grad", model.grads)
    tensors = model.tensors(**columns)
    outs, packed = model.empty(model.numel, model.numel, model.numel), model.packed()
    finite = kernels.compress_quantized(
        model.blocks, tensors, model.momentum, outs[0], model.magnitude, outs[1], model.error, outs[2],
        EPS, amsgrad, noise() if draw is None else draw, packed,
    )  # fmt: skip
    return Sent(finite, *outs, packed)


def quantize_results(model: Model, kernels: Kernels) -> tuple:
    results: list[Any] = []
    for amsgrad, columns in ((False, {}), (True, {}), (False, {"grad": 0}), (True, {"beta1": 0.3}), (True, STEADY)):
        sent = quantize(model, kernels, amsgrad=amsgrad, **columns)
        results += [sent.finite, sent.momentum, sent.magnitude, sent.error, sent.packed]
    return tuple(results)


def average_results(model: Model, kernels: Kernels) -> tuple:
    (error_out,), packed, origin = model.empty(model.owned_numel), model.packed(), 8
    received = [message[origin:] for message in model.messages]
    draw = noise(stream=OWNERS)
    finite = kernels.average_quantized(
        model.blocks, received, origin, model.weights, model.server_error, error_out, draw, packed
    )
    votes, steady = model.packed(), model.packed()
    kernels.average_quantized(model.blocks, received, origin, model.weights, None, None, draw, votes)
    (steady_error,) = model.empty(model.owned_numel)
    kernels.average_quantized(
        model.blocks, received, origin, model.weights, model.server_error, steady_error, STEADY["draw"], steady
    )
    return finite, error_out, packed, votes, steady_error, steady


def lion_results(model: Model, kernels: Kernels, zero_up: bool = True) -> tuple:
    results: list[Any] = []
    for columns in ({"grad": model.grads}, {"grad": 0}, {"grad": model.grads, "beta1": 0}):
        (momentum_out,), packed = model.empty(model.numel), model.packed()
        finite = kernels.compress_signs(
            model.blocks, model.tensors(**columns), model.momentum, momentum_out, 0.99, 1 - 0.99, zero_up, packed
        )
        zero_up = not zero_up
        results += [finite, momentum_out, packed]
    return tuple(results)


def apply_results(model: Model, kernels: Kernels) -> tuple:
    results = []
    for decay in (1, 0.99):
        params = [np.concatenate([[np.float32(7)], p]).astype(np.float32)[1:] for p in model.params]
        tensors = model.tensors(param=params, step_size=1e-3, decay=decay)
        tensors["skip"][1:2] = 1
        kernels.apply_signs(model.blocks, tensors, model.messages[0])
        results += params
    return tuple(results)


def soft_sign_results(model: Model, kernels: Kernels) -> tuple:
    results: list[Any] = []
    for amsgrad, grad in ((False, model.grads), (True, model.grads), (False, 0)):
        outs = model.empty(model.numel, model.numel, model.numel + 16)
        finite = kernels.soft_sign(
            model.blocks, model.tensors(grad=grad), model.momentum, outs[0], model.magnitude, outs[1], EPS, amsgrad,
            outs[2],
        )  # fmt: skip
        results += [finite, *outs]
    return tuple(results)


RESULTS = (quantize_results, average_results, apply_results, soft_sign_results, lion_results)

models = st.builds(
    Model,
    lengths=st.lists(st.integers(0, 150), max_size=4).map(tuple),
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([16, 32, 64, 80]),
    ranks=st.integers(1, 9),
    first=st.one_of(st.integers(0, 7), st.integers(2**34 - 200, 2**34), st.integers(0, 2**60)),
    extreme=st.booleans(),
)


class TestEqualsTheReference:
    @pytest.mark.parametrize("lengths", LENGTHS, ids=str)
    def test_every_loop_at_every_length(self, cpu: Kernels, lengths: tuple[int, ...]) -> None:
        for first in (0, 1):
            model = Model(lengths, first=first)
            for results in RESULTS:
                assert all_same(results(model, cpu), results(model, reference))

    @few
    @given(model=models)
    def test_whatever_they_are_given(self, model: Model) -> None:
        for cpu in cpu_paths():
            for results in RESULTS:
                assert all_same(results(model, cpu), results(model, reference))

    @pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 17, 70])
    def test_average_of_any_number_of_ranks(self, cpu: Kernels, ranks: int) -> None:
        model = Model((500, 33), ranks=ranks, block_size=128)
        assert all_same(average_results(model, cpu), average_results(model, reference))


class TestRandomNumbers:
    @pytest.mark.parametrize(
        ("rounds", "counter", "key", "words"),
        [
            (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
            (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
            (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
            (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
            (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
            (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
        ],
    )
    def test_they_are_the_published_ones(self, rounds: int, counter: str, key: str, words: str) -> None:
        """The known answers that Random123 comes with."""
        low, high = (int(word, 16) for word in key.split())
        counters = np.array([[int(word, 16) for word in counter.split()]], np.uint32)
        got = philox4x32(counters, (low, high), rounds)[0]
        assert [f"{word:08x}" for word in got.tolist()] == words.split()

    def test_an_element_takes_its_word_of_its_counter(self) -> None:
        seed, step, stream, index = 0xAABBCCDD11223344, 9, 5, 2**35 + 4 * 77 + 3
        counters = np.array([[77, 2, step, stream]], np.uint32)
        word = int(philox4x32(counters, (0x11223344, 0xAABBCCDD))[0, 3])
        assert uniform(noise(seed, step, stream), index, 1).tolist() == [(word >> 8) * 2.0**-24]

    @few
    @given(first=st.integers(0, 2**40), cut=st.integers(0, 40))
    def test_they_do_not_depend_on_where_a_block_begins(self, first: int, cut: int) -> None:
        whole = uniform(noise(), first, 50)
        assert same_bits(np.concatenate([uniform(noise(), first, cut), uniform(noise(), first + cut, 50 - cut)]), whole)

    def test_seeds_steps_streams_and_elements_are_independent(self) -> None:
        rows = [uniform(n, 0, 40000) for n in (noise(), noise(seed=1 << 40), noise(step=4), noise(stream=OWNERS))]
        rows.append(uniform(noise(), 1, 40000))
        assert all(row.min() >= 0 and row.max() < 1 and abs(row.mean() - 0.5) < 0.01 for row in rows)
        correlation = np.corrcoef(rows)
        assert np.abs(correlation - np.eye(len(rows))).max() < 0.025  # 5 sigma


class TestQuantize:
    @few
    @given(model=models, size=st.sampled_from([16, 48, 4096]))
    def test_the_result_does_not_depend_on_how_tensors_are_cut(self, model: Model, size: int) -> None:
        other = Model(model.lengths, model.seed, size, model.ranks, model.first, model.extreme)
        other.grads = model.grads
        where = [np.concatenate([np.r_[span(b, "local")] for b in np.sort(m.blocks, order="local")] or [[]]).astype(int)
                 for m in (model, other)]  # fmt: skip
        for name in ("momentum", "magnitude", "error"):
            getattr(other, name)[where[1]] = getattr(model, name)[where[0]]
        for kernels in (reference, *cpu_paths()):
            sent = [quantize(m, kernels) for m in (model, other)]
            bits = [np.concatenate([bits_in(s.packed, b) for b in np.sort(m.blocks, order="local")] or [[]])
                    for m, s in zip((model, other), sent, strict=True)]  # fmt: skip
            assert same_bits(*bits)
            for name in ("momentum", "magnitude", "error"):
                assert same_bits(*(getattr(s, name)[w] for s, w in zip(sent, where, strict=True)))

    def test_what_is_sent_and_what_stays_are_what_there_was(self, kernels: Kernels) -> None:
        model = Model((5000, 77), first=2)
        for amsgrad in (False, True):
            sent = quantize(model, kernels, amsgrad=amsgrad)
            assert sent.finite
            beta, rest = np.float32(0.95), np.float32(0.05)
            for block in model.blocks:
                at = span(block, "local")
                grad = model.grads[block["tensor"]][span(block, "start")]
                m, b = beta * model.momentum[at] + rest * grad, beta * model.magnitude[at] + rest * np.abs(grad)
                b = np.maximum(model.magnitude[at], b) if amsgrad else b
                y = m / (b + np.float32(EPS)) + model.error[at]
                assert same_bits(sent.momentum[at], m) and same_bits(sent.magnitude[at], b)
                assert same_bits(sent.error[at], y - signs_in(sent.packed, block))
                assert (signs_in(sent.packed, block)[y >= 1] == 1).all()
                assert (signs_in(sent.packed, block)[y <= -1] == -1).all()

    @pytest.mark.parametrize("value", [-1.0, -0.999, -0.4, 0.0, 0.1, 0.75, 1.0])
    def test_the_mean_of_the_signs_is_the_value(self, kernels: Kernels, value: float) -> None:
        model = Model((100_000,), first=1)
        model.momentum[:], model.magnitude[:], model.error[:] = value, 1, 0
        sent = quantize(model, kernels, grad=0, beta1=1)
        mean = np.concatenate([signs_in(sent.packed, block) for block in model.blocks]).mean(dtype=np.float64)
        assert abs(mean - value) <= 5 * np.sqrt((1 - value * value) / 100_000)

    @pytest.mark.parametrize(("steady", "bound"), [(0, 2.0), (1, 1.0)])
    def test_an_error_is_never_larger_than_two_or_than_one_if_nothing_is_random(
        self, kernels: Kernels, steady: int, bound: float
    ) -> None:
        model = Model((3000,))
        model.momentum[:] = model.magnitude[:] = model.error[:] = 0
        largest = 0.0
        for step in range(300):
            # Some elements get the same sign for ever, some change, some are so small that they vanish in others.
            grad = model.rng.standard_normal(3000).astype(np.float32)
            grad[:1000] = np.abs(grad[:1000])
            grad[1000:2000] *= np.exp2(model.rng.integers(-140, 100, 1000)).astype(np.float32)
            sent = quantize(model, kernels, grad=[grad], draw=noise(step=step, steady=steady))
            assert sent.finite
            model.momentum, model.magnitude, model.error = sent.momentum, sent.magnitude, sent.error
            largest = max(largest, float(np.abs(sent.error[span(model.blocks[0], "local")]).max()))
        assert 0.75 * bound < largest <= bound

    def test_everything_may_be_updated_in_place(self, kernels: Kernels) -> None:
        model = Model((9000, 100), first=3)
        expected, packed = quantize(model, kernels), model.packed()
        m, b, e = model.momentum, model.magnitude, model.error
        kernels.compress_quantized(
            model.blocks, model.tensors(grad=model.grads), m, m, b, b, e, e, EPS, False, noise(), packed
        )
        assert same_bits(packed, expected.packed)
        for block in model.blocks:
            for got, want in ((m, expected.momentum), (b, expected.magnitude), (e, expected.error)):
                assert same_bits(got[span(block, "local")], want[span(block, "local")])

    @pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
    @pytest.mark.parametrize("where", [0, 31, 4095, 4999])
    @pytest.mark.parametrize("source", ["grad", "momentum", "magnitude", "error"])
    def test_whatever_is_not_finite_is_told(self, kernels: Kernels, bad: float, where: int, source: str) -> None:
        model = Model((5000,))
        assert quantize(model, kernels).finite
        if source == "grad":
            model.grads[0][where] = bad
        else:
            getattr(model, source)[where] = bad
        assert not quantize(model, kernels).finite
        if source != "error":
            assert not soft_sign_results(model, kernels)[0]


class TestQuantizedAverage:
    @pytest.mark.parametrize("ranks", [1, 2, 5])
    def test_the_owner_keeps_what_it_does_not_send(self, kernels: Kernels, ranks: int) -> None:
        model = Model((5000, 77), ranks=ranks)
        finite, error_out, packed, *_ = average_results(model, kernels)
        assert finite
        for block in model.blocks:
            total = sum(w * signs_in(m, block) for w, m in zip(model.weights.tolist(), model.messages, strict=True))
            a = total + model.server_error[span(block, "owned")]
            sent = signs_in(packed, block)
            assert np.allclose(sent + error_out[span(block, "owned")], a, rtol=1e-5, atol=1e-6)
            assert (sent[a > 1.001] == 1).all() and (sent[a < -1.001] == -1).all()

    def test_of_one_rank_without_error_it_returns_the_message(self, kernels: Kernels) -> None:
        model = Model((5000, 77), ranks=1)
        model.server_error[:], model.weights[:] = 0, 1
        _, error_out, packed, *_ = average_results(model, kernels)
        for block in model.blocks:
            assert same_bits(bits_in(packed, block), bits_in(model.messages[0], block))
            assert (error_out[span(block, "owned")] == 0).all()

    @pytest.mark.parametrize(("steady", "bound"), [(0, 2.0), (1, 1.0)])
    def test_an_error_is_never_larger_than_two_or_than_one_if_nothing_is_random(
        self, kernels: Kernels, steady: int, bound: float
    ) -> None:
        model = Model((2000,), ranks=4)
        model.weights[:], model.server_error[:] = 0.25, 0
        for message in model.messages:
            message[: 12 + 100] = 0xFF  # the first elements get +1 from everyone, for ever
        for step in range(200):
            (error_out,), packed = model.empty(model.owned_numel), model.packed()
            rows = [message.copy() for message in model.messages]
            for row in rows:
                row[112:] = model.rng.integers(0, 256, row.size - 112, np.uint8)
            draw, error = noise(step=step, stream=OWNERS), model.server_error
            assert kernels.average_quantized(model.blocks, rows, 0, model.weights, error, error_out, draw, packed)
            model.server_error = error_out
            assert np.abs(error_out[span(model.blocks[0], "owned")]).max() <= 2

    @pytest.mark.parametrize("where", [0, 40, 4095, 4096, 4099])
    def test_an_error_that_is_not_finite_is_told(self, kernels: Kernels, where: int) -> None:
        model = Model((4097,), block_size=8192)
        model.server_error[:4097][min(where, 4096)] = np.nan
        assert not average_results(model, kernels)[0]


class TestMajority:
    @pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 70])
    def test_the_sign_that_most_sent_is_taken_whatever_is_drawn(self, kernels: Kernels, ranks: int) -> None:
        model = Model((5000, 77), ranks=ranks, first=3)
        model.weights[:] = 1
        votes = average_results(model, kernels)[3]
        for block in model.blocks:
            total = sum(signs_in(message, block) for message in model.messages)
            taken = signs_in(votes, block)
            assert (taken[total != 0] == np.sign(total[total != 0])).all()
            assert (total == 0).any() == (ranks % 2 == 0)

    def test_ties_are_decided_by_the_owners_number_of_the_element(self, kernels: Kernels) -> None:
        model = Model((100_000,), ranks=2, first=1)
        model.weights[:] = 1
        model.messages[1][:] = ~model.messages[0]
        votes = average_results(model, kernels)[3]
        ups = 0
        for block in model.blocks:
            low = uniform(noise(stream=OWNERS), int(block["index"]), int(block["length"])) < 0.5
            assert same_bits(bits_in(votes, block), low)
            ups += int(low.sum())
        assert abs(ups - 50_000) <= 5 * np.sqrt(100_000 / 4)

    def test_a_worker_of_more_ranks_has_more_votes(self, kernels: Kernels) -> None:
        model = Model((300,), ranks=3)
        model.weights[:] = 3, 1, 1
        votes = average_results(model, kernels)[3]
        for block in model.blocks:
            assert same_bits(bits_in(votes, block), bits_in(model.messages[0], block))


class TestCompressSigns:
    @pytest.mark.parametrize("zero_up", [True, False])
    def test_it_sends_the_sign_of_one_average_and_keeps_another(self, kernels: Kernels, zero_up: bool) -> None:
        model = Model((5000, 77))
        model.momentum[:40], model.grads[0][:20], model.grads[0][20:40] = -0.0, 0.0, -0.0
        finite, momentum, packed = lion_results(model, kernels, zero_up)[:3]
        assert finite
        for block in model.blocks:
            m, grad = model.momentum[span(block, "local")], model.grads[block["tensor"]][span(block, "start")]
            c = np.float32(0.95) * m + np.float32(0.05) * grad
            expected = np.where(c == 0, np.float32(1 if zero_up else -1), np.sign(c))
            assert same_bits(signs_in(packed, block), expected)
            assert same_bits(momentum[span(block, "local")], np.float32(0.99) * m + np.float32(1 - 0.99) * grad)

    def test_the_momentum_may_be_updated_in_place(self, kernels: Kernels) -> None:
        model = Model((9000, 100))
        _, expected, expected_packed = lion_results(model, kernels)[:3]
        m, packed = model.momentum, model.packed()
        kernels.compress_signs(model.blocks, model.tensors(grad=model.grads), m, m, 0.99, 1 - 0.99, True, packed)
        assert same_bits(packed, expected_packed)
        for block in model.blocks:
            assert same_bits(m[span(block, "local")], expected[span(block, "local")])

    @pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
    @pytest.mark.parametrize("where", [0, 31, 4095, 4999])
    @pytest.mark.parametrize("source", ["grad", "momentum"])
    def test_whatever_is_not_finite_is_told(self, kernels: Kernels, bad: float, where: int, source: str) -> None:
        model = Model((5000,))
        assert lion_results(model, kernels)[0]
        (model.grads[0] if source == "grad" else model.momentum)[where] = bad
        assert not lion_results(model, kernels)[0]


class TestSoftSign:
    def test_it_is_what_quantize_sends_before_the_error(self, kernels: Kernels) -> None:
        model = Model((5000, 77))
        model.error[:] = 0
        sent = quantize(model, kernels)
        finite, momentum, magnitude, out = soft_sign_results(model, kernels)[:4]
        assert finite
        assert same_bits(momentum, sent.momentum) and same_bits(magnitude, sent.magnitude)
        for block in model.blocks:
            assert same_bits(out[span(block)] - signs_in(sent.packed, block), sent.error[span(block, "local")])


class TestApplySigns:
    def test_parameters_move_by_the_step_size_after_the_decay(self, kernels: Kernels) -> None:
        model = Model((5000, 300))
        params = [p.copy() for p in model.params]
        tensors = model.tensors(param=params, step_size=0.01, decay=0.9)
        tensors["skip"][1] = 1
        kernels.apply_signs(model.blocks, tensors, model.messages[0])
        assert same_bits(params[1], model.params[1])
        for block in model.blocks[model.blocks["tensor"] == 0]:
            piece = span(block, "start")
            expected = model.params[0][piece] * np.float32(0.9)
            expected = expected - np.float32(0.01) * signs_in(model.messages[0], block)
            assert same_bits(params[0][piece], expected)


def test_nothing_but_the_blocks_is_written(kernels: Kernels) -> None:
    model = Model((31, 4097, 1))
    sent, (_, server_error, owner_packed, votes, *_) = quantize(model, kernels), average_results(model, kernels)
    lion_momentum, lion_signs = lion_results(model, kernels)[1:3]
    local, owned, message = (np.zeros(n, bool) for n in (model.numel, model.owned_numel, model.nbytes))
    flat = np.zeros(model.numel + 16, bool)
    for block in model.blocks:
        local[span(block, "local")] = owned[span(block, "owned")] = flat[span(block)] = True
        message[block["bits"] : block["bits"] + (block["length"] + 7) // 8] = True
        for packed in (sent.packed, owner_packed, votes, lion_signs):
            assert not bits_in(packed, block, count=-(-int(block["length"]) // 8) * 8)[block["length"] :].any()
    *moments, ratio = soft_sign_results(model, kernels)[1:4]
    for out in (sent.momentum, sent.magnitude, sent.error, lion_momentum, *moments):
        assert (out[~local] == 7).all()
    assert (ratio[~flat] == 7).all()
    assert (server_error[~owned] == 7).all()
    assert all((packed[~message] == 0x5A).all() for packed in (sent.packed, owner_packed, votes, lion_signs))
