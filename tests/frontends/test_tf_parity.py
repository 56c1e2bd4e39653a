"""Horovod's calls for TensorFlow: every element type, one to three dimensions, every reduction, every disagreement.

Results are compared with NumPy's, element by element. What each call refuses is the class of ``tf.errors`` that a
Horovod script catches, in eager mode, in a ``tf.function`` and in a session of ``tf.compat.v1``. The long tier has all
combinations on 2 and 4 ranks; the normal one has each element type, dimension, reduction and way of running once.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")

import numpy as np  # noqa: E402

import ocomm_tf as hvd  # noqa: E402
from ocomm.errors import InvalidRequestError, MismatchError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from ocomm_tf import mpi_ops  # noqa: E402
from tests.worlds import MPI_SIZE, run_ranks  # noqa: E402

NUMBERS = [
    tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64,
]  # fmt: skip
FLOATS = [dtype for dtype in NUMBERS if dtype.is_floating]
EVERY = [*NUMBERS, tf.bool]
DIMENSIONS = (1, 2, 3)
REDUCTIONS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    hvd.Sum: lambda rows: rows.sum(0),
    hvd.Average: lambda rows: rows.mean(0),
    hvd.Min: lambda rows: rows.min(0),
    hvd.Max: lambda rows: rows.max(0),
    hvd.Product: lambda rows: rows.prod(0),
}
FPE, INVALID = tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError
#: Of a job's long run only.
long = pytest.mark.long


# Ways of running: (make), where make() returns a flat list of tensors; -> list of arrays


def eager(make: Callable[[], Sequence[Any]]) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in make()]


def function(make: Callable[[], Sequence[Any]]) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in tf.function(make, autograph=False)()]


def in_session(make: Callable[[], Sequence[Any]]) -> list[np.ndarray]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return session.run(list(make()))


WAYS = (eager, function, in_session)
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
sizes = pytest.mark.parametrize("size", [2, pytest.param(4, marks=long)])


def values(rank: int, shape: Sequence[int], dtype: Any, low: int = 0) -> np.ndarray:
    """Whole numbers that sums and products of four ranks keep exact in every type."""
    drawn = np.random.default_rng([rank, *shape]).integers(low, 4, shape)
    return (drawn % 2 if dtype == tf.bool else drawn).astype(dtype.as_numpy_dtype)


def exact(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def of_all(size: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
    return np.stack([exact(values(rank, shape, dtype)) for rank in range(size)])


def rounded(result: np.ndarray, dtype: Any) -> np.ndarray:
    """As the element type has it: whole numbers are cut towards zero."""
    return exact(result.astype(dtype.as_numpy_dtype) if dtype.is_floating else np.trunc(result))


class Case:
    """One call: ``call(tensor)`` returns a list of tensors, ``oracle(rank, size)`` what they are."""

    def __init__(self, dtype: Any, shape: tuple[int, ...], call: Any, oracle: Any) -> None:
        self.dtype, self.shape, self.call, self.oracle = dtype, shape, call, oracle


def compare(way: Any, size: int, cases: Sequence[Case]) -> None:
    """Runs all cases at once, and compares element types, shapes and elements."""

    def body(session: Session) -> None:
        me = hvd.rank()

        def make() -> list[Any]:
            tensors = [tf.constant(values(me, case.shape, case.dtype)) for case in cases]
            return [t for case, tensor in zip(cases, tensors, strict=True) for t in case.call(tensor)]

        results = iter(way(make))
        for case in cases:
            for expected in case.oracle(me, size):
                result = next(results)
                assert result.dtype == case.dtype.as_numpy_dtype
                np.testing.assert_array_equal(exact(result), expected, f"{case.dtype.name} {case.shape}")

    run_ranks(size, body)


def reductions(dtype: Any, dimension: int, op: int, grouped: bool) -> Case:
    shape = (3, 2, 4)[:dimension]

    def call(tensor: Any) -> list[Any]:
        return hvd.grouped_allreduce([tensor, tensor], op=op) if grouped else [hvd.allreduce(tensor, op=op)]

    def oracle(rank: int, size: int) -> list[np.ndarray]:
        return [rounded(REDUCTIONS[op](of_all(size, shape, dtype)), dtype)] * (2 if grouped else 1)

    return Case(dtype, shape, call, oracle)


def scaled(dtype: Any, dimension: int, before: float, after: float) -> Case:
    shape = (3, 2, 4)[:dimension]

    def oracle(rank: int, size: int) -> list[np.ndarray]:
        return [rounded(rounded(of_all(size, shape, dtype) * before, dtype).sum(0) * after, dtype)]

    def call(tensor: Any) -> list[Any]:
        return [hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=before, postscale_factor=after)]

    return Case(dtype, shape, call, oracle)


def scattered(dtype: Any, dimension: int, op: int, grouped: bool) -> Case:
    shape = (5, 2, 4)[:dimension]

    def call(tensor: Any) -> list[Any]:
        return hvd.grouped_reducescatter([tensor, tensor], op=op) if grouped else [hvd.reducescatter(tensor, op=op)]

    def oracle(rank: int, size: int) -> list[np.ndarray]:
        whole = rounded(REDUCTIONS[op](of_all(size, shape, dtype)), dtype)
        return [np.array_split(whole, size)[rank]] * (2 if grouped else 1)

    return Case(dtype, shape, call, oracle)


def moved(dtype: Any, dimension: int, kind: str) -> Case:
    """Whatever moves elements and does not look at them; each rank's first dimension is its own."""
    rest = (2, 4)[: dimension - 1]

    def own(rank: int, size: int) -> np.ndarray:
        return exact(values(rank, (8, *rest), dtype))

    def lengths(rank: int, size: int) -> list[int]:
        return [(rank + other) % 3 for other in range(size)]

    def call(tensor: Any) -> list[Any]:
        me, size = hvd.rank(), hvd.size()
        if kind == "broadcast":
            return [hvd.broadcast(tensor, root) for root in range(size)]
        if kind == "allgather":
            return [hvd.allgather(tensor[: 1 + me])]
        if kind == "grouped_allgather":
            return hvd.grouped_allgather([tensor[: 1 + me], tensor])
        equal = hvd.alltoall(tensor)
        return [equal, hvd.alltoall(tensor, tf.constant(lengths(me, size)))[0]]

    def oracle(rank: int, size: int) -> list[np.ndarray]:
        everyone = [own(other, size) for other in range(size)]
        if kind == "broadcast":
            return everyone
        if kind.endswith("allgather"):
            parts = np.concatenate([whole[: 1 + other] for other, whole in enumerate(everyone)])
            return [parts] if kind == "allgather" else [parts, np.concatenate(everyone)]
        equal = [np.array_split(whole, size)[rank] for whole in everyone]
        starts = [np.cumsum([0, *lengths(other, size)])[rank] for other in range(size)]
        uneven = [everyone[other][starts[other] :][: lengths(other, size)[rank]] for other in range(size)]
        return [np.concatenate(equal), np.concatenate(uneven)]

    return Case(dtype, (8, *rest), call, oracle)


MOVES = ("broadcast", "allgather", "grouped_allgather", "alltoall")


def turns(items: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Each item once, with the others in turn."""
    return [(item, *(other[k % len(other)] for other in others)) for k, item in enumerate(items)]


class TestResults:
    @pytest.mark.parametrize("grouped", [False, True], ids=["alone", "grouped"])
    @ways
    def test_reductions_are_numpys(self, way: Any, grouped: bool) -> None:
        picked = turns(NUMBERS, DIMENSIONS, list(REDUCTIONS))
        compare(way, 2, [reductions(*case, grouped) for case in picked])

    @pytest.mark.short("function")
    @ways
    def test_what_moves_is_what_was_sent(self, way: Any) -> None:
        compare(way, 2, [moved(*case) for case in turns(EVERY, DIMENSIONS, MOVES)])
        compare(way, 2, [moved(*case) for case in turns([tf.uint16, tf.bool] * 2, DIMENSIONS, MOVES)])

    @ways
    def test_parts_and_scaled_sums_are_numpys(self, way: Any) -> None:
        cases = [scattered(*case) for case in turns(NUMBERS, DIMENSIONS, [hvd.Sum, hvd.Average], [False, True, True])]
        compare(way, 2, cases + [scaled(*case) for case in turns(NUMBERS, DIMENSIONS, [0.5, 1.0], [1.0, 2.0, 0.5])])

    @long
    @pytest.mark.parametrize("size", [2, 4])
    @pytest.mark.parametrize("grouped", [False, True], ids=["alone", "grouped"])
    @ways
    def test_all_reductions_are_numpys(self, way: Any, grouped: bool, size: int) -> None:
        compare(way, size, [reductions(*c, grouped) for c in itertools.product(NUMBERS, DIMENSIONS, REDUCTIONS)])

    @long
    @pytest.mark.parametrize("size", [2, 4])
    @pytest.mark.parametrize("kind", MOVES)
    @ways
    def test_all_that_moves_is_what_was_sent(self, way: Any, kind: str, size: int) -> None:
        compare(way, size, [moved(*case, kind) for case in itertools.product(EVERY, DIMENSIONS)])

    @long
    @pytest.mark.parametrize("size", [2, 4])
    @ways
    def test_all_parts_and_scaled_sums_are_numpys(self, way: Any, size: int) -> None:
        ops, factors = (hvd.Sum, hvd.Average), ((0.5, 1.0), (1.0, 0.5), (2.0, 0.5))
        cases = [scattered(*case) for case in itertools.product(NUMBERS, DIMENSIONS, ops, (False, True))]
        pairs = itertools.product(NUMBERS, DIMENSIONS, factors)
        compare(way, size, cases + [scaled(dtype, dimension, *both) for dtype, dimension, both in pairs])

    @sizes
    @ways
    def test_adasum_of_equal_tensors_is_that_tensor(self, way: Any, size: int) -> None:
        def body(session: Session) -> None:
            arrays = [values(0, (3, 2, 4)[:d], dtype) for dtype in FLOATS for d in DIMENSIONS]
            results = way(lambda: [hvd.allreduce(tf.constant(a), op=hvd.Adasum) for a in arrays])
            for array, result in zip(arrays, results, strict=True):
                assert result.dtype == array.dtype
                np.testing.assert_allclose(exact(result), exact(array), rtol=1e-2 if array.itemsize == 2 else 1e-6)

        run_ranks(size, body)

    @sizes
    @ways
    def test_variables_get_the_roots_values_and_the_call_returns_them(self, way: Any, size: int) -> None:
        dtypes = [dtype for dtype in EVERY if dtype not in (tf.uint16, tf.int16)]  # which have no assignment

        def body(session: Session) -> None:
            me, root = hvd.rank(), size - 1
            shapes = [(3, 2, 4)[: 1 + k % 3] for k in range(len(dtypes))]
            expected = [exact(values(root, shape, dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
            starts = [values(me, shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
            if way is in_session:
                with tf.Graph().as_default(), tf.compat.v1.Session() as v1:
                    kinds = [{"use_resource": resource} for resource in (False, True)]
                    for number, kind in enumerate(kinds):
                        variables = [
                            tf.compat.v1.get_variable(f"v{number}_{k}", initializer=start, **kind)
                            for k, start in enumerate(starts)
                        ]
                        v1.run(tf.compat.v1.global_variables_initializer())
                        returned = v1.run(hvd.broadcast_(variables, root))
                        for array, variable, right in zip(returned, variables, expected, strict=True):
                            np.testing.assert_array_equal(exact(array), right)
                            np.testing.assert_array_equal(exact(v1.run(variable)), right)
                return
            variables = [tf.Variable(start) for start in starts]
            for array, variable, right in zip(
                way(lambda: hvd.broadcast_(variables, root)), variables, expected, strict=True
            ):
                np.testing.assert_array_equal(exact(array), right)
                np.testing.assert_array_equal(exact(variable.numpy()), right)

        run_ranks(size, body)


class TestGradients:
    @pytest.mark.short("function")
    @sizes
    @ways
    def test_gradients_are_horovods(self, way: Any, size: int) -> None:
        """In a session a rank runs what its own result needs: all ranks must need the exchange."""

        def body(session: Session) -> None:
            me = hvd.rank()
            rows = [1 + rank for rank in range(size)]
            weights = np.repeat(np.arange(size, dtype=np.float64), rows)
            before = sum(rows[:me])
            calls: list[tuple[Any, int, Any, np.ndarray]] = [
                (lambda x: hvd.allreduce(x, op=hvd.Sum), 4, np.ones(4), np.full(4, size)),
                (lambda x: hvd.allreduce(x), 4, np.ones(4), np.ones(4)),
                (lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)[1], 4, np.ones(4), np.full(4, 2 * size)),
                (hvd.allgather, rows[me], weights, weights[before : before + rows[me]]),
                (lambda x: hvd.reducescatter(x, op=hvd.Sum), size, np.ones(1), np.full(size, size)),
                (lambda x: hvd.alltoall(x, [1] * size)[0], size, np.full(size, me), np.arange(size)),
                (hvd.alltoall, size, np.full(size, me), np.arange(size)),
            ]
            for root in range(size):

                def from_root(x: Any, root: int = root) -> Any:
                    return hvd.broadcast(x, root)

                calls.append((from_root, 3, np.ones(3), np.full(3, me == root)))

            for dtype in (tf.float32, tf.float64):

                def make(dtype: Any = dtype) -> list[Any]:
                    found = []
                    for call, length, given, _ in calls:
                        x = tf.ones([length], dtype)
                        given = tf.constant(given, tf.float32)  # as scripts give them to float64, too
                        if way is in_session:
                            found += tf.gradients(call(x), x, given)
                            continue
                        with tf.GradientTape() as tape:
                            tape.watch(x)
                            y = call(x)
                        found.append(tape.gradient(y, x, given))
                    return found

                for result, (_, _, _, expected) in zip(way(make), calls, strict=True):
                    assert result.dtype == dtype.as_numpy_dtype
                    np.testing.assert_allclose(result, expected.astype(np.float64))

        run_ranks(size, body)


class TestSlices:
    @pytest.mark.short("function")
    @pytest.mark.parametrize("grouped", [False, True], ids=["alone", "with dense ones"])
    @sizes
    @ways
    def test_averages_of_whole_numbers_are_fractions(self, way: Any, grouped: bool, size: int) -> None:
        def body(session: Session) -> None:
            me = hvd.rank()

            def average(dtype: Any) -> list[Any]:
                rows = tf.constant(values(me, (2, 3), dtype, -3 if dtype.min < 0 else 0))
                slices = tf.IndexedSlices(rows, tf.constant([me, me + 1]), tf.constant([size + 1, 3]))
                if not grouped:
                    mean = hvd.allreduce(slices, op=hvd.Average)
                    return [mean.values, mean.indices, rows]
                mean, dense, total = hvd.grouped_allreduce([slices, tf.abs(tf.cast(rows, tf.int32)), slices])
                return [mean.values, total.indices, dense]

            results = iter(way(lambda: [tensor for dtype in NUMBERS for tensor in average(dtype)]))
            for dtype in NUMBERS:
                low = -3 if dtype.min < 0 else 0
                rows = [exact(values(rank, (2, 3), dtype, low)) for rank in range(size)]
                found, indices, dense = next(results), next(results), next(results)
                wide = dtype if dtype.is_floating else tf.float64 if dtype.size >= 4 else tf.float32
                assert found.dtype == wide.as_numpy_dtype
                np.testing.assert_array_equal(exact(found), np.concatenate(rows) / size)
                assert indices.tolist() == [k + rank for rank in range(size) for k in (0, 1)]
                if grouped:
                    np.testing.assert_array_equal(dense, np.abs(rows).sum(0) // size)

        run_ranks(size, body)

    @pytest.mark.parametrize("gathers", ["slices", "a tensor"])
    @ways
    def test_only_an_allreduce_of_slices_counts_as_an_exchange_of_gradients(
        self, way: Any, gathers: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mpi_ops, "_has_reduced", False)
        monkeypatch.setattr(mpi_ops, "_reductions", [])

        def body(session: Session) -> None:
            def make() -> list[Any]:
                if gathers == "slices":
                    return [hvd.allreduce(tf.IndexedSlices(tf.ones([1, 3]), tf.constant([0]))).values]
                return [hvd.allgather(tf.ones([1, 3]))]

            before = mpi_ops.exchanged()
            way(make)
            assert mpi_ops.exchanged() > before

        run_ranks(2, body)
        assert mpi_ops.has_reduced() is (gathers == "slices")

    @ways
    def test_what_slices_do_not_have_is_not_implemented(self, way: Any) -> None:
        def body(session: Session) -> None:
            wrong: list[dict[str, Any]] = [{"op": op} for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum)]
            wrong += [{"prescale_factor": 2.0}, {"postscale_factor": 0.5}]

            def make(call: Any, options: dict[str, Any]) -> Any:
                slices = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([0]))
                return call(slices, **options)

            for options in wrong:
                for call in (
                    hvd.allreduce,
                    lambda slices, **o: hvd.grouped_allreduce([slices, tf.ones(3)], **o),
                ):
                    with pytest.raises(NotImplementedError, match=r"an allreduce of tf.IndexedSlices has"):
                        way(lambda call=call, options=options: make(call, options))

        run_ranks(1, body)


def shaped(*shape: int, dtype: Any = tf.float32) -> Any:
    return tf.ones(shape, dtype)


#: What the ranks disagree on: (rank, size) -> tensors.
DISAGREEMENTS: dict[str, Callable[[int, int], Any]] = {
    "allreduce: length": lambda me, n: hvd.allreduce(shaped(17 + (me == 1), 3)),
    "allreduce: dimensions": lambda me, n: hvd.allreduce(shaped(4, 6) if me else shaped(4, 2, 3)),
    "allreduce: type": lambda me, n: hvd.allreduce(shaped(4, dtype=tf.int32 if me else tf.float32)),
    "allreduce: operation": lambda me, n: hvd.allreduce(shaped(4), op=hvd.Max if me else hvd.Sum),
    "allreduce: factor": lambda me, n: hvd.allreduce(shaped(4), prescale_factor=1.0 + me),
    "grouped_allreduce: length": lambda me, n: hvd.grouped_allreduce([shaped(3), shaped(4 + (me == 1))]),
    "grouped_allreduce: type": lambda me, n: hvd.grouped_allreduce(
        [shaped(3), shaped(4, dtype=tf.uint16 if me else tf.int16)]
    ),
    "allgather: second length": lambda me, n: hvd.allgather(shaped(2, 3 + (me == 1))),
    "allgather: dimensions": lambda me, n: hvd.allgather(shaped(2) if me else shaped(2, 1)),
    "allgather: type": lambda me, n: hvd.allgather(shaped(2, dtype=tf.bool if me else tf.uint8)),
    "grouped_allgather: type": lambda me, n: hvd.grouped_allgather(
        [shaped(2), shaped(2, dtype=tf.int64 if me else tf.float64)]
    ),
    "broadcast: length": lambda me, n: hvd.broadcast(shaped(2 + (me == 1)), 0),
    "broadcast: type": lambda me, n: hvd.broadcast(shaped(2, dtype=tf.float16 if me else tf.bfloat16), 0),
    "broadcast: root": lambda me, n: hvd.broadcast(shaped(2), me),
    "alltoall: second length": lambda me, n: hvd.alltoall(shaped(n, 3 + (me == 1))),
    "alltoall: type": lambda me, n: hvd.alltoall(shaped(n, dtype=tf.int32 if me else tf.float32)),
    "reducescatter: length": lambda me, n: hvd.reducescatter(shaped(n + (me == 1))),
    "reducescatter: type": lambda me, n: hvd.reducescatter(shaped(n, dtype=tf.int32 if me else tf.float32)),
    "reducescatter: operation": lambda me, n: hvd.reducescatter(shaped(n), op=hvd.Average if me else hvd.Sum),
    "grouped_reducescatter: length": lambda me, n: hvd.grouped_reducescatter([shaped(n), shaped(n + (me == 1))]),
}

#: What is wrong on a rank alone: on all of them here, since nobody comes to the others.
WRONG: dict[str, Callable[[int], Any]] = {
    "alltoall: no equal parts": lambda n: hvd.alltoall(shaped(n + 1)),
    "alltoall: rows that are not there": lambda n: hvd.alltoall(shaped(n - 1), tf.ones([n], tf.int32)),
    "alltoall: too many splits": lambda n: hvd.alltoall(shaped(n), tf.ones([n + 1], tf.int32)),
    "alltoall: negative splits": lambda n: hvd.alltoall(shaped(n), tf.constant([-1] * n)),
    "alltoall: scalar": lambda n: hvd.alltoall(tf.constant(1.0)),
    "allgather: scalar": lambda n: hvd.allgather(tf.constant(1.0)),
    "reducescatter: scalar": lambda n: hvd.reducescatter(tf.constant(1.0)),
    "grouped_reducescatter: scalar": lambda n: hvd.grouped_reducescatter([shaped(n), tf.constant(1.0)]),
    "reducescatter: Max": lambda n: hvd.reducescatter(shaped(n), op=hvd.Max),
    "broadcast: no such root": lambda n: hvd.broadcast(shaped(n), n),
    "allreduce: no such operation": lambda n: hvd.allreduce(shaped(n), op=17),
    "allreduce: Average of bool": lambda n: hvd.allreduce(shaped(n, dtype=tf.bool)),
    "allreduce: Adasum of whole numbers": lambda n: hvd.allreduce(shaped(n, dtype=tf.int32), op=hvd.Adasum),
    "allreduce: complex numbers": lambda n: hvd.allreduce(shaped(n, dtype=tf.complex64)),
    "allreduce: op and average": lambda n: hvd.allreduce(shaped(n), op=hvd.Sum, average=True),
}


class TestErrors:
    @sizes
    @ways
    def test_ranks_that_disagree_get_a_failed_precondition(self, way: Any, size: int) -> None:
        def body(session: Session) -> None:
            me = hvd.rank()
            for what, make in DISAGREEMENTS.items():
                with pytest.raises(FPE) as caught:
                    way(lambda make=make: tf.nest.flatten(make(me, size)))
                if way is eager:
                    assert isinstance(caught.value, MismatchError), what
                else:
                    assert "MismatchError: " in caught.value.message, what
                assert re.search(r"\branks? \[?1\b", caught.value.message), what

        run_ranks(size, body)

    @sizes
    @ways
    def test_wrong_arguments_are_invalid(self, way: Any, size: int) -> None:
        def body(session: Session) -> None:
            for what, make in WRONG.items():
                with pytest.raises(INVALID) as caught:
                    way(lambda make=make: tf.nest.flatten(make(size)))
                if way is eager:
                    assert isinstance(caught.value, InvalidRequestError), what

        run_ranks(size, body)

    def test_other_public_calls_raise_these_classes_too(self) -> None:
        def body(session: Session) -> None:
            me = hvd.rank()
            a, b = tf.Variable([1.0], name="a"), tf.Variable([2.0 + me, 3.0], name="b")
            with pytest.raises(FPE) as caught:
                hvd.broadcast_variables([a, b] if me else [b, a], 0)
            assert isinstance(caught.value, MismatchError)
            with pytest.raises(FPE, match="is not the same on all ranks"):
                hvd.check_replicas([b])
            with pytest.raises(INVALID):
                hvd.broadcast_object("text", 7)
            with pytest.raises(FPE):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(a if me else b)
                hvd.DistributedGradientTape(tape).gradient(loss, [a] if me else [b])

        run_ranks(2, body)

    def test_ranks_that_disagree_backward_get_a_failed_precondition(self) -> None:
        def body(session: Session) -> None:
            x = tf.ones(4)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = hvd.allreduce(x, op=hvd.Sum)
            with pytest.raises(FPE, match="mismatched"):
                tape.gradient(y, x, tf.ones(4, tf.float64 if hvd.rank() else tf.float32))

        run_ranks(2, body)


class TestGraphs:
    def test_a_model_and_its_optimizer_are_broadcast_in_one_function(self) -> None:
        def body(session: Session) -> None:
            model = [tf.Variable([1.0 + hvd.rank()]), tf.Variable(hvd.rank())]
            optimizer = [tf.Variable([5.0 + hvd.rank()])]

            @tf.function
            def first_step() -> None:
                hvd.broadcast_variables(model, root_rank=1)
                hvd.broadcast_variables(optimizer, root_rank=1)

            for _ in range(2):
                first_step()
            assert [v.numpy().tolist() for v in (*model, *optimizer)] == [[2.0], 1, [6.0]]

        run_ranks(2, body)

    def test_a_session_runs_what_broadcasts_variables(self) -> None:
        def body(session: Session) -> None:
            with tf.Graph().as_default(), tf.compat.v1.Session() as v1:
                variables = [tf.compat.v1.get_variable(name, initializer=1.0 + hvd.rank()) for name in ("a", "b")]
                v1.run(tf.compat.v1.global_variables_initializer())
                both = [hvd.broadcast_variables(variables[:1], 1), hvd.broadcast_variables(variables[1:], 1)]
                v1.run(both)
                assert v1.run(variables) == [2.0, 2.0]

        run_ranks(2, body)


class TestNames:
    def test_a_tape_tells_local_gradients_from_global_ones(self) -> None:
        def body(session: Session) -> None:
            own, shared = tf.Variable(2.0), tf.Variable(3.0)
            with tf.GradientTape() as tape:
                loss = (1.0 + hvd.rank()) * own * shared
            tape = hvd.DistributedGradientTape(tape)
            tape.register_local_source(own)
            local, everyones = tape.get_local_and_global_gradients(loss, [own, shared])
            assert [(v is own, float(g)) for v, g in local] == [(True, 1.5 * (1 + hvd.rank()))]
            assert [(v is shared, float(g)) for v, g in everyones] == [(True, 3.0)]

        run_ranks(2, body)

    def test_scripts_ask_whether_tensorflow_is_eager(self) -> None:
        assert hvd._executing_eagerly() and hvd.util._executing_eagerly()
        with tf.Graph().as_default():
            assert not hvd._executing_eagerly()

    @pytest.mark.parametrize("fused", [True, None])
    def test_batch_statistics_of_all_ranks_are_not_fused(self, fused: Any) -> None:
        assert hvd.SyncBatchNormalization(axis=1, fused=False).axis == 1
        with pytest.raises(ValueError, match="does not support fused=True"):
            hvd.SyncBatchNormalization(fused=fused)

    @long  # starts TensorFlow once more
    @pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="Keras 2 (tf_keras) is not installed")
    @pytest.mark.skipif(MPI_SIZE > 0, reason="starts a process of its own")
    def test_batch_statistics_of_all_ranks_are_those_of_keras_2_too(self) -> None:
        done = subprocess.run(
            [sys.executable, "-c", KERAS_2],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TF_USE_LEGACY_KERAS": "1"},
        )
        assert done.stdout.split() == ["tf_keras", "equal", "equal"], done.stderr


KERAS_2 = """
import numpy as np
import tensorflow as tf
import ocomm_tf as hvd
from tests.worlds import MPI_SIZE, run_ranks

x = np.random.default_rng(1).standard_normal((4, 3, 2), np.float32)

def body(session):
    plain = tf.keras.layers.BatchNormalization(axis=1, fused=False)
    ours = hvd.SyncBatchNormalization(axis=1, fused=False)
    out = ours(tf.constant(x[hvd.rank() :: 2]), training=True)
    np.testing.assert_allclose(out, plain(x, training=True)[hvd.rank() :: 2], atol=1e-5)
    np.testing.assert_allclose(ours.moving_variance, plain.moving_variance, atol=1e-6)
    return "equal"

print(hvd.SyncBatchNormalization.__mro__[1].__module__.split(".")[0], *run_ranks(2, body))
"""
