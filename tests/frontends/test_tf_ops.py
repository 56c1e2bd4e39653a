"""TensorFlow collectives, eager and in graphs: dtypes, gradients, order of execution, errors."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import numpy as np  # noqa: E402

import ocomm_tf as hvd  # noqa: E402
from ocomm.errors import InvalidRequestError, MismatchError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from ocomm.types import Settings  # noqa: E402
from ocomm_tf import engine  # noqa: E402
from ocomm_tf.errors import public  # noqa: E402
from tests.worlds import MPI_SIZE, run_ranks  # noqa: E402

DTYPES = [
    tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64,
]  # fmt: skip


def eager(function: Any) -> Any:
    return function


def in_python(function: Any) -> Any:
    """A graph without the extension."""
    return tf.function(function)


WAYS = pytest.mark.parametrize("way", [eager, tf.function, in_python], ids=["eager", "graph", "numpy_function"])


@pytest.fixture(autouse=True)
def _without_extension(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("way") is in_python:
        monkeypatch.setattr(engine, "_problem", "the test says so")


@WAYS
class TestCollectives:
    @pytest.mark.short("graph")
    def test_every_dtype(self, way: Any) -> None:
        def body(session: Session) -> None:
            me = hvd.rank()

            @way
            def everything(x: Any) -> Any:
                return hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x), hvd.broadcast(x, 1), hvd.allreduce(x, op=hvd.Max)

            for dtype in DTYPES:
                x = tf.cast(tf.reshape(tf.range(6), (2, 3)) + me, dtype)
                total, gathered, sent, largest = (t.numpy().astype(float) for t in everything(x))
                plain = np.arange(6.0).reshape(2, 3)
                assert (total == 2 * plain + 1).all() and (sent == plain + 1).all() and (largest == plain + 1).all()
                assert (gathered == np.concatenate([plain, plain + 1])).all()
                assert (way(hvd._allreduce)(x, name="private").numpy().astype(float) == 2 * plain + 1).all()
            truth = way(lambda x: hvd.allreduce(x, op=hvd.Min))(tf.constant([me == 0, True]))
            assert truth.dtype == tf.bool and truth.numpy().tolist() == [False, True]

        run_ranks(2, body)

    def test_shapes_that_differ_between_ranks(self, way: Any) -> None:
        def body(session: Session) -> None:
            me = hvd.rank()

            @way
            def everything(x: Any) -> Any:
                gathered = hvd.grouped_allgather([x, 2 * x])
                received, rows = hvd.alltoall(tf.fill([3], float(me)), splits=[1, 2])
                return gathered, received, rows, hvd.reducescatter(tf.range(3), op=hvd.Sum), hvd.alltoall(tf.range(2))

            (a, b), received, rows, part, dealt = everything(tf.fill([me + 1, 2], me))
            assert a.numpy().tolist() == [[0, 0], [1, 1], [1, 1]] and b.numpy().tolist() == [[0, 0], [2, 2], [2, 2]]
            assert received.numpy().tolist() == [[0, 1], [0, 0, 1, 1]][me]
            assert rows.dtype == tf.int32 and rows.numpy().tolist() == [1 + me] * 2
            assert part.numpy().tolist() == [[0, 2], [4]][me] and dealt.numpy().tolist() == [me, me]

        run_ranks(2, body)

    def test_empty_and_scalar_tensors(self, way: Any) -> None:
        def body(session: Session) -> None:
            reduce = way(lambda x: hvd.allreduce(x, op=hvd.Sum))
            assert reduce(tf.constant(3.0)).numpy() == 6.0
            assert reduce(tf.zeros([0, 2])).shape == (0, 2)
            assert way(hvd.allgather)(tf.zeros([0, 2])).shape == (0, 2)

        run_ranks(2, body)

    def test_groups_and_compression(self, way: Any) -> None:
        def body(session: Session) -> None:
            @way
            def everything(x: Any, n: Any) -> Any:
                group = hvd.grouped_allreduce([x, n], op=hvd.Sum, name="g", compression=hvd.Compression.fp16)
                return *group, *hvd.grouped_reducescatter([x, x], op=hvd.Sum)

            a, b, c, d = everything(tf.constant([1.0, 1e-3]), tf.constant([3]))
            assert a.dtype == tf.float32 and b.numpy().tolist() == [6]
            np.testing.assert_allclose(a.numpy(), [2.0, 2e-3], rtol=1e-3)
            assert c.shape == d.shape == (1,)

        run_ranks(2, body)

    @pytest.mark.short("graph")
    def test_gradients_follow_horovod(self, way: Any) -> None:
        def body(session: Session) -> None:
            me = hvd.rank()

            def gradient_of(function: Any, x: Any) -> list[float]:
                @way
                def gradient(x: Any) -> Any:
                    with tf.GradientTape() as tape:
                        tape.watch(x)
                        y = function(x)
                        loss = tf.reduce_sum(y * tf.range(1.0, tf.cast(tf.shape(y)[0], tf.float32) + 1))
                    return tape.gradient(loss, x)

                return gradient(x).numpy().tolist()

            x = tf.ones([2])
            assert gradient_of(lambda x: hvd.allreduce(x, op=hvd.Sum), x) == [2, 4]
            assert gradient_of(lambda x: hvd.allreduce(x), x) == [1, 2]
            assert gradient_of(lambda x: hvd.broadcast(x, 1), x) == ([1, 2] if me == 1 else [0, 0])
            assert gradient_of(hvd.allgather, x) == [[1, 2], [3, 4]][me]
            assert gradient_of(lambda x: hvd.reducescatter(x, op=hvd.Sum), x) == [2, 2]
            assert gradient_of(lambda x: hvd.alltoall(x, splits=[1, 1])[0], x) == [1 + me, 1 + me]

        run_ranks(2, body)

    @pytest.mark.short("numpy_function")
    def test_second_derivatives_are_those_of_all_ranks_together(self, way: Any) -> None:
        # The call; a matrix of its results on both ranks; by what Horovod's gradient is larger than that of the sum of
        # all ranks' losses, in the first and in the second backward pass.
        calls = {
            "allreduce": (hvd.allreduce, np.kron(np.ones([2, 2]) / 2, np.eye(2)), 1.0, 1.0),
            "allgather": (hvd.allgather, np.kron(np.ones([2, 1]), np.eye(4)), 0.5, 0.5),
            "broadcast": (lambda x: hvd.broadcast(x, 1), np.kron([[0, 1], [0, 1]], np.eye(2)), 0.5, 0.5),
            "alltoall": (hvd.alltoall, np.eye(4)[[0, 2, 1, 3]], 1.0, 1.0),
            "reducescatter": (hvd.reducescatter, np.kron([[1, 1]], np.eye(2)) / 2, 2.0, 1.0),
        }
        xs, weights = np.linspace(-1, 2, 4), np.linspace(1, -2, 4)

        def body(session: Session) -> None:
            mine = slice(2 * hvd.rank(), 2 * hvd.rank() + 2)
            for kind, (call, matrix, first, second) in calls.items():
                y = matrix @ xs**2
                backward = first * matrix.T @ (3 * y**2)
                through = first * matrix.T @ (6 * y * (second * matrix @ (2 * xs * weights)))

                @way
                def gradients(x: Any, call: Any = call) -> Any:
                    with tf.GradientTape() as outer:
                        outer.watch(x)
                        with tf.GradientTape() as inner:
                            inner.watch(x)
                            loss = tf.reduce_sum(call(x * x) ** 3)
                        found = inner.gradient(loss, x)
                        weighted = tf.reduce_sum(found * weights[mine])
                    return found, outer.gradient(weighted, x)

                found, derivative = gradients(tf.constant(xs[mine]))
                np.testing.assert_allclose(found, (2 * xs * backward)[mine], rtol=1e-12, err_msg=kind)
                expected = 2 * weights * backward + 2 * xs * through
                np.testing.assert_allclose(derivative, expected[mine], rtol=1e-12, err_msg=kind)

        run_ranks(2, body)

    def test_indexed_slices_lie_side_by_side(self, way: Any) -> None:
        def body(session: Session) -> None:
            me = hvd.rank()

            @way
            def dense(values: Any) -> Any:
                slices = tf.IndexedSlices(values, tf.constant([me, 2]), tf.constant([4, 3]))
                return tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Sum)), tf.convert_to_tensor(
                    hvd.allreduce(slices, name="s")
                )

            total, mean = dense(tf.ones([2, 3]))
            assert total.numpy()[:, 0].tolist() == [1, 1, 2, 0] and mean.numpy()[:, 0].tolist() == [0.5, 0.5, 1, 0]
            slices = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([0]))
            with pytest.raises(InvalidRequestError, match=r"has Average and Sum only"):
                hvd.allreduce(slices, op=hvd.Max)

        run_ranks(2, body)

    def test_variables_are_overwritten_in_place(self, way: Any) -> None:
        def body(session: Session) -> None:
            variables = [tf.Variable([1.0 + hvd.rank()], name="a"), tf.Variable(hvd.rank(), name="b")]

            @way
            def broadcast() -> None:
                hvd.broadcast_variables(variables, root_rank=1)

            broadcast()
            assert [v.numpy().tolist() for v in variables] == [[2.0], 1]

        run_ranks(2, body)

    def test_the_graph_knows_where_it_runs(self, way: Any) -> None:
        def body(session: Session) -> None:
            @way
            def everything() -> Any:
                return (
                    hvd.size_op(),
                    hvd.size_op(1),
                    hvd.rank_op(),
                    hvd.local_rank_op(),
                    hvd.local_size_op(),
                    hvd.process_set_included_op(1),
                )

            me = hvd.rank()
            assert [int(n) for n in everything()] == [2, 1, me, me, 2, int(me == 1)]

        run_ranks(2, body, process_sets=[[1]])

    def test_process_sets_work_apart(self, way: Any) -> None:
        if way is in_python and not MPI_SIZE:
            pytest.skip(reason="four ranks in one process would wait in TensorFlow's two threads")

        def body(session: Session) -> None:
            mine = hvd.ProcessSet([0, 2] if hvd.rank() % 2 == 0 else [1, 3])
            total = way(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=mine, name="p"))(tf.constant([hvd.rank()]))
            assert total.numpy().tolist() == [2 if hvd.rank() % 2 == 0 else 4]

        run_ranks(4, body, process_sets=[[0, 2], [1, 3]])

    def test_a_rank_without_data_joins(self, way: Any) -> None:
        def body(session: Session) -> None:
            reduce = way(lambda x: hvd.allreduce(x, op=hvd.Sum, name="j"))
            for _ in range(1 + 2 * hvd.rank()):
                total = reduce(tf.ones([2]))
            assert total.numpy()[0] == [2, 1][hvd.rank()]
            assert hvd.join() == 1

        run_ranks(2, body)


class TestErrors:
    def test_a_mismatch_names_tensor_and_ranks(self) -> None:
        def body(session: Session) -> None:
            x = tf.ones([2 + hvd.rank()])
            text = (
                r"tensor 'allreduce.w': mismatched shape: rank 0 submitted shape \(2,\) float32, rank 1 submitted "
                r"shape \(3,\) float32\."
            )
            with pytest.raises(MismatchError, match=text):
                hvd.allreduce(x, name="w")
            with pytest.raises(tf.errors.FailedPreconditionError, match="MismatchError: " + text):
                tf.function(lambda x: hvd.allreduce(x, name="w"))(x)

        run_ranks(2, body)

    @pytest.mark.parametrize("way", [eager, tf.function])
    def test_what_cannot_be_sent_is_named(self, way: Any) -> None:
        def body(session: Session) -> None:
            with pytest.raises(InvalidRequestError, match=r"x': dtype complex64 is not supported; use one of uint8, "):
                way(public(lambda x: hvd.allreduce(x, name="x")))(tf.ones([1], tf.complex64))

        run_ranks(1, body)

    @WAYS
    def test_splits_that_are_not_whole_numbers_are_refused(self, way: Any) -> None:
        def body(session: Session) -> None:
            with pytest.raises(tf.errors.InvalidArgumentError, match="splits of whole numbers, got float32"):
                way(lambda: hvd.alltoall(tf.range(3), splits=[1.5, 1.5]))()

        run_ranks(2, body)

    def test_jit_compile_is_refused_with_what_to_do(self) -> None:
        def body(session: Session) -> None:
            with pytest.raises(InvalidRequestError, match=r"Use model.compile\(..., jit_compile=False\) in Keras"):
                tf.function(hvd.allreduce, jit_compile=True)(tf.ones([1]))

        run_ranks(1, body)

    def test_variables_in_another_order_are_named(self) -> None:
        def body(session: Session) -> None:
            a, b = tf.Variable([1.0], name="a"), tf.Variable([2.0], name="b")
            with pytest.raises(MismatchError) as error:
                hvd.broadcast_variables([a, b] if hvd.rank() == 0 else [b, a], 0)
            assert str(error.value) == (
                "broadcast_variables: variable 0 differs between ranks: rank(s) [0]: 'a:0' (1,) float32; rank(s) [1]: "
                "'b:0' (1,) float32. Build the same model, with its layers in the same order, on every rank."
            )
            with pytest.raises(MismatchError, match=r"variable 1 differs .*: 'b:0' \(1,\) float32; rank\(s\) \[1\]: n"):
                hvd.broadcast_variables([a, b][: 2 - hvd.rank()], 0)

        run_ranks(2, body)

    @pytest.mark.long
    @pytest.mark.skipif(MPI_SIZE > 0, reason="starts a process of its own")
    def test_no_compiler_is_needed(self) -> None:
        program = (
            "import tensorflow as tf, ocomm_tf as hvd; from ocomm_tf import engine; hvd.init(); "
            "print(tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.ones([2])).numpy().tolist(), "
            "[engine.problem()], sum(call.runs for call in engine._calls))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PATH": "", "CC": "", "CXX": ""},
        )
        assert done.stdout.strip() == "[1.0, 1.0] [''] 1", done.stderr

    def test_an_extension_that_cannot_be_loaded_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine, "_problem", None)
        monkeypatch.setitem(sys.modules, "ocomm_tf._native", None)
        assert "the extension ocomm_tf._native cannot be loaded" in engine.problem()

    def test_a_tensorflow_with_other_kernels_is_not_touched(self) -> None:
        from ocomm_tf._native import ffi, lib

        message = ffi.new("char[256]")
        library = sys.modules["ocomm._native"].__file__.encode()
        assert lib.ocomm_tf_register(library, message, 256) == -1
        assert ffi.string(message) == b"this TensorFlow calls asynchronous kernels in another way"
        assert lib.ocomm_tf_register(b"libtensorflow_framework.so.1", message, 256) == -1
        assert ffi.string(message) == b"libtensorflow_framework.so.1 is not loaded"


@pytest.mark.parametrize("way", [tf.function, in_python], ids=["graph", "numpy_function"])
class TestNamesInGraphs:
    """Calls without a name in graphs of ranks that are not the same in everything."""

    def test_models_that_keras_numbers_by_process(self, way: Any) -> None:
        def model() -> Any:
            inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])
            return keras.Sequential([keras.Input((3,)), inner, Averaged()])

        class Averaged(keras.layers.Layer):  # type: ignore[misc, name-defined]
            def call(self, x: Any) -> Any:
                return hvd.allreduce(x)

        def body(session: Session) -> list[float]:
            if hvd.rank() == 0:
                model()
            mine = model()

            @way
            def step(x: Any) -> Any:
                with tf.GradientTape() as tape:
                    y = mine(x) + hvd.allreduce(mine(x)) + hvd.allgather(mine(x))[:1] + hvd.alltoall(mine(2.0 * x))[:1]
                return y, tape.gradient(y, mine.trainable_variables)[0]

            y, gradient = step(tf.ones([2, 3]) * (1.0 + hvd.rank()))
            return [*y[0].numpy().tolist(), float(gradient[0][0])]

        first, second = run_ranks(2, body, Settings(stall_check_s=5.0, stall_shutdown_s=10.0))
        assert first[:2] == second[:2]

    def test_a_set_of_some_ranks_does_not_shift_the_names_of_the_others(self, way: Any) -> None:
        def body(session: Session) -> list[float]:
            alone = hvd.add_process_set([0])

            @way
            def step(x: Any) -> Any:
                parts = [x * 0.5, x * 0.25]
                if hvd.rank() == 0:
                    hvd.allreduce(parts[1], process_set=alone)
                return [hvd.allreduce(part) for part in parts]

            return [float(y[0]) for y in step(tf.ones([1]) * 8.0)]

        settings = Settings(stall_check_s=5.0, stall_shutdown_s=10.0)
        assert run_ranks(2, body, settings) == [[4.0, 2.0]] * 2


class TestGraphs:
    """What a graph does with operations of ours. The second rank is eager, so it decides what comes when."""

    def test_all_collectives_are_under_way_at_once(self) -> None:
        def body(session: Session) -> None:
            if hvd.rank() == 0:
                together = tf.function(lambda x: [hvd.allreduce(x * k, op=hvd.Sum, name=f"k{k}") for k in range(12)])
                for k, total in enumerate(together(tf.ones([4]))):
                    assert total.numpy().tolist() == [k] * 4
            else:
                for k in reversed(range(12)):  # each waits for the one before: a chain in the graph would never end
                    hvd.allreduce(tf.zeros([4]), op=hvd.Sum, name=f"k{k}")

        run_ranks(2, body)

    def test_every_call_runs_once_per_step(self) -> None:
        def body(session: Session) -> None:
            if hvd.rank() == 0:

                @tf.function
                def step(x: Any) -> Any:
                    hvd.allreduce(x, name="unused")
                    twins = hvd.allreduce(x, name="first twin"), hvd.allreduce(x, name="second twin")
                    return hvd.allreduce(tf.constant([1.0, 2.0]), name="constant"), *twins

                before = engine.runs()
                for _ in range(5):
                    step(tf.ones([2]))
                counts = {name: n - before.get(name, 0) for name, n in engine.runs().items()}
                for name in ("unused", "first twin", "second twin", "constant"):
                    assert counts[name] == 5
            else:
                for _ in range(5):
                    for name in ("unused", "first twin", "second twin", "constant"):
                        hvd.allreduce(tf.ones([2]), name=name)

        run_ranks(2, body)

    def test_the_first_gradient_leaves_before_half_of_backward_is_done(self) -> None:
        depth = 8

        def body(session: Session) -> None:
            if hvd.rank() == 0:

                @tf.custom_gradient
                def open_segments(x: Any) -> Any:
                    """Half of backward waits for the other rank, who waits for the first gradient."""
                    return x, lambda dy: dy + 0.0 * hvd.allreduce(dy, op=hvd.Sum, name="gate")

                weights = [tf.Variable(1.0) for _ in range(depth)]

                @tf.function
                def step() -> Any:
                    with tf.GradientTape() as tape:
                        y = tf.constant([1.0])
                        for k, w in enumerate(weights):
                            y = open_segments(y * w) if k == depth // 2 else y * w
                    gradients = tape.gradient(y, weights)
                    return [hvd.allreduce(g, op=hvd.Sum, name=f"w{k}") for k, g in enumerate(gradients)]

                assert [float(g) for g in step()] == [1.0] * depth
            else:
                for k in reversed(range(depth)):
                    hvd.allreduce(tf.constant(0.0), op=hvd.Sum, name=f"w{k}")
                    if k == depth // 2 + 1:
                        hvd.allreduce(tf.zeros([1]), op=hvd.Sum, name="gate")

        run_ranks(2, body)

    @pytest.mark.skipif(MPI_SIZE > 0, reason="one rank is enough")
    def test_an_operation_costs_ocomms_threads_six_calls(self) -> None:
        """In Python and C, per tensor of a graph: the same everywhere. benchmarks/tf_overhead.py has the times."""
        count, limit = 200, 6 * 200
        calls: Counter[str] = Counter()

        def count_call(frame: Any, event: str, argument: Any) -> None:
            if event in ("call", "c_call"):
                calls[threading.current_thread().name] += 1

        def body(session: Session) -> list[int]:
            xs = [tf.ones([64]) for _ in range(count)]

            @tf.function
            def averaged(xs: Any) -> Any:
                return [hvd.allreduce(x * 2.0, name=f"averaged{k}") for k, x in enumerate(xs)]

            turns = [limit + 1]
            # On a busy machine threads look more often whether something has come; some turn is without that.
            while len(turns) < 400 and not 0 < min(turns[2:], default=0) <= limit:
                calls.clear()
                averaged(xs)
                turns.append(sum(number for thread, number in calls.items() if thread.startswith("ocomm")))
            return turns[2:]

        threading.setprofile(count_call)
        try:
            (turns,) = run_ranks(1, body)
        finally:
            threading.setprofile(None)
        assert 0 < min(turns) <= limit


#: Horovod 0.28.1, tensorflow/__init__.py, mpi_ops.py and functions.py: parameters in order.
SIGNATURES = {
    "allreduce": "tensor average device_dense device_sparse compression op prescale_factor postscale_factor name "
    "process_set ignore_name_scope",
    "allgather": "tensor name ignore_name_scope process_set",
    "grouped_allgather": "tensors name ignore_name_scope process_set",
    "broadcast": "tensor root_rank name ignore_name_scope process_set",
    "broadcast_": "variables root_rank name process_set",
    "alltoall": "tensor splits name ignore_name_scope process_set",
    "reducescatter": "tensor device_dense compression op name process_set ignore_name_scope prescale_factor "
    "postscale_factor",
    "grouped_reducescatter": "tensors device_dense compression op name process_set ignore_name_scope prescale_factor "
    "postscale_factor",
    "broadcast_variables": "variables root_rank process_set inplace",
    "broadcast_object": "obj root_rank session name process_set",
    "broadcast_object_fn": "root_rank session name process_set",
    "allgather_object": "obj session name process_set",
    "size_op": "process_set_id name",
    "rank_op": "name",
    "process_set_included_op": "process_set_id name",
    "DistributedGradientTape": "gradtape device_dense device_sparse compression sparse_as_dense op "
    "gradient_predivide_factor num_groups groups process_set scale_local_gradients",
    "DistributedOptimizer": "optimizer name use_locking device_dense device_sparse compression sparse_as_dense "
    "backward_passes_per_step op gradient_predivide_factor average_aggregated_gradients num_groups groups process_set "
    "scale_local_gradients",
}


def test_calls_have_horovods_signatures_and_everything_public_is_documented() -> None:
    for name, parameters in SIGNATURES.items():
        ours = inspect.signature(getattr(hvd, name)).parameters.values()
        assert [p.name for p in ours if p.kind is not p.KEYWORD_ONLY] == parameters.split(), name
    for name in hvd.__all__:
        thing = getattr(hvd, name)
        assert not (inspect.isfunction(thing) or inspect.isclass(thing)) or thing.__doc__, name
