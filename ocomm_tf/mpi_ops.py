"""Horovod's collectives on TensorFlow tensors, eager and inside ``tf.function``.

An eager call waits for its result. In a graph every call is an operation that waits only for its inputs and runs
exactly as often as its place in the program says, even if its input is constant, its result is unused, or an equal call
is beside it. All are differentiable. ``device_dense``, ``device_sparse`` and ``ignore_name_scope`` are accepted as in
Horovod and ignored: tensors stay on their devices, and a ``name`` is used as it is given.

The collectives share these arguments:

- ``name`` tells which calls of different ranks belong together. Eager calls without a name are matched by their order,
  calls in a graph by their place in it: by the name of what they take, without numbers, and then by their order.
- ``op`` is ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``; ``average`` is Horovod's
  older way to choose between the first two. An average of integers is rounded towards zero.
- ``process_set`` names the ranks that take part; all of them must make the call. The default is all ranks of the job.

A collective raises InvalidRequestError (a ValueError) if this rank's arguments cannot be right, HorovodInternalError
(MismatchError, StallError or PeerError) if the ranks disagree or some do not come. The first is also a
``tf.errors.InvalidArgumentError``, the second a ``tf.errors.FailedPreconditionError`` (``ocomm_tf.errors``). A graph
raises these classes of TensorFlow, with a message that starts with the name of ocomm's; ``hvd.elastic.run`` finds a
HorovodInternalError in it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from ocomm import api, operations
from ocomm import session as sessions
from ocomm.api import Adasum, Average, Max, Sum
from ocomm.basics import *  # noqa: F403
from ocomm.collectives.scratch import ALIGNMENT, aligned
from ocomm.docstrings import AVERAGE_OR_SUM, GATHERED, SHARE, collective, documented
from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import Bytes
from ocomm.operations import NUMPY, Operation, ProcessSet, RepeatedAllreduce, choose_op, global_process_set
from ocomm.session import Session
from ocomm.types import DType
from ocomm_tf import engine
from ocomm_tf.compression import UNCOMPRESSED, Compression, Compressor, has_overflowed
from ocomm_tf.errors import UnsupportedError, public
from ocomm_tf.naming import shape_of

_log = logging.getLogger("ocomm")


@functools.cache
def _has_gpus() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))


def _device_of(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes eager tensors on the device of ``tensor``; otherwise TensorFlow prefers its first GPU, if it has one."""
    return tf.device(tensor.backing_device) if _has_gpus() else _ANYWHERE


_ANYWHERE = contextlib.nullcontext()


class TensorFlowAdapter:
    """The ``operations.Adapter`` of TensorFlow. A host tensor is a NumPy array; eager tensors in the host's memory
    share theirs with it.
    """

    def describe(self, tensor: Any) -> tuple[DType, tuple[int, ...]]:
        dtype = engine.DTYPES.get(tensor.dtype)
        if dtype is None:
            raise TypeError(engine.unsupported(tensor.dtype))
        return dtype, shape_of(tensor)

    def host(self, tensor: Any) -> tuple[Any, bool]:
        if tensor.backing_device.endswith("CPU:0"):
            with _device_of(tensor):
                plain = tf.bitcast(tensor, tf.uint16) if tensor.dtype == tf.bfloat16 else tensor
            return np.asarray(memoryview(plain)).view(tensor.dtype.as_numpy_dtype), True
        return tensor.numpy(), False

    def copies(self, tensors: Sequence[Any]) -> None:
        return None

    def view(self, host: Any) -> Bytes:
        return host.reshape(-1).view(np.uint8)

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        dtype = np.dtype(like.dtype.as_numpy_dtype)
        count = int(np.prod(shape, dtype=np.int64))
        return aligned(count * dtype.itemsize).view(dtype).reshape(shape)

    def deliver(self, host: Any, like: Any) -> Any:
        address = host.__array_interface__["data"][0]
        with _device_of(like):
            if like.dtype in (tf.bool, tf.bfloat16) or address % ALIGNMENT or not host.size:
                return tf.convert_to_tensor(host)
            result = tf.experimental.dlpack.from_dlpack(host.__dlpack__())
            return result if like.backing_device.endswith("CPU:0") else tf.identity(result)

    def store(self, host: Any, into: Any) -> None:
        raise NotImplementedError("eager tensors do not change")


TENSORFLOW = TensorFlowAdapter()

#: Submits tensors: (session, adapter, tensors, name) -> Operation with a list of results. Alltoall also takes splits.
Start = Callable[..., Operation]


@dataclass(slots=True)
class Exchange:
    """One collective whose results have the shapes of ``tensors``; ``kind`` names it in messages and on the wire."""

    kind: str
    tensors: Sequence[tf.Tensor]
    name: str | None
    start: Start
    process_set: ProcessSet


@public
def run(exchanges: Sequence[Exchange]) -> list[list[tf.Tensor]]:
    """Returns the results of several collectives, all of them under way at once. Not differentiable."""
    session = sessions.current()
    if tf.executing_eagerly():
        return _wait_for(session, TENSORFLOW, [(e.start, e.tensors, e.name) for e in exchanges])
    if _without_engine():
        return _run_in_python(session, exchanges)
    return [engine.exchange(_call(session, e), e.tensors, _label(e.kind, e.tensors, e.process_set)) for e in exchanges]


@public
def run_compressed(exchanges: Sequence[Exchange], compression: type[Compressor]) -> list[list[tf.Tensor]]:
    """Returns the results of several allreduces on tensors compressed by ``compression``, all of them under way at
    once.

    If a tensor of an exchange overflows, all ranks repeat the exchange without compression. Not differentiable.
    """
    pairs = [[compression.compress(tensor) for tensor in e.tensors] for e in exchanges]
    sent = [replace(e, tensors=[tensor for tensor, _ in pair]) for e, pair in zip(exchanges, pairs, strict=True)]
    results = run(sent)
    plain = [
        [compression.decompress(tensor, context) for tensor, (_, context) in zip(outputs, pair, strict=True)]
        for outputs, pair in zip(results, pairs, strict=True)
    ]
    overflows = [has_overflowed(compression, outputs, e.tensors) for outputs, e in zip(results, exchanges, strict=True)]
    found = [position for position, overflow in enumerate(overflows) if overflow is not None]
    if tf.executing_eagerly():
        found = [position for position in found if bool(overflows[position])]
        again = run([replace(exchanges[k], name=_again(exchanges[k].name, results[k])) for k in found]) if found else []
        for position, outputs in zip(found, again, strict=True):
            plain[position] = outputs
        return plain
    for position in found:
        exchange, outputs = exchanges[position], results[position]
        repeated = replace(exchange, name=_again(exchange.name, outputs))
        plain[position] = _chosen(overflows[position], functools.partial(_run_one, repeated), plain[position])
    return plain


def _run_one(exchange: Exchange) -> list[tf.Tensor]:
    return run([exchange])[0]


def _again(name: str | None, sent: Sequence[tf.Tensor]) -> str | None:
    """Returns the name of a second, uncompressed reduction, whose first one returned ``sent``.

    In a graph it always has a name, because places inside a ``tf.cond`` have numbers that may differ between ranks.
    """
    if name is None and not tf.executing_eagerly():
        name = sent[0].op.name
    return None if name is None else name + UNCOMPRESSED


def _chosen(overflow: tf.Tensor, repeat: Callable[[], list[tf.Tensor]], plain: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns, in a graph, the result of ``repeat`` if there is an overflow when it runs, else ``plain``."""
    results = tf.nest.flatten(tf.cond(overflow, repeat, lambda: [tf.identity(tensor) for tensor in plain]))
    for result, tensor in zip(results, plain, strict=True):
        result.set_shape(tensor.shape)
    return results


_exchanged = 0  # number of exchanges of this process outside of ``engine``
_has_reduced = False  # whether one of them was part of an allreduce
_reductions: list[engine.Call] = []  # the collectives of all graphs that are part of an allreduce


def exchanged() -> int:
    """Returns the number of exchanges that this process has begun, eagerly and in graphs."""
    return _exchanged + engine.exchanged()


def has_reduced() -> bool:
    """Returns True if this process has ever begun an allreduce here."""
    return _has_reduced or any(call.runs for call in _reductions)


def _count(is_reduction: bool) -> None:
    """Counts an exchange outside of ``engine``, before the other ranks can see it end: they may be threads of this
    process.
    """
    global _exchanged, _has_reduced
    _exchanged += 1
    _has_reduced |= is_reduction


def _wait_for(session: Session, adapter: Any, calls: Iterable[tuple[Start, Sequence[Any], str | None]]) -> list[Any]:
    started = []
    for start, tensors, name in calls:
        _count(isinstance(start, StartAllreduce))
        started.append(start(session, adapter, tensors, name))
    return [operation.wait() for operation in started]


def _call(session: Session, exchange: Exchange) -> engine.Call:
    start = exchange.start

    def begin(tensors: list[Any], name: str) -> Operation:
        return start(session, engine.TENSORS, tensors, name).then(lambda results: None)

    repeat = None
    if isinstance(start, StartAllreduce) and start.op != Adasum:
        repeat = functools.partial(start.repeated, session, len(exchange.tensors))
    call = engine.Call(begin, exchange.name, repeat)
    if isinstance(start, StartAllreduce):
        _reductions.append(call)
    return call


def _label(kind: str, tensors: Sequence[tf.Tensor], process_set: ProcessSet) -> str:
    """Returns the name of an operation without a name, in the graph and on the wire, where the graph makes it unique.

    It has the name of the input, which keeps calls apart if ranks build their graphs in another order, but without
    numbers, because Keras numbers by process, and the number of the process set, because other ranks do not count its
    calls.
    """
    number = process_set.number(sessions.current())
    source = re.sub(r"_\d+(?=_|/|$)", "", tensors[0].op.name).replace("/", "_") if tensors else ""
    return "_".join([kind, *([f"set{number}"] if number else []), *([source] if source else [])])


def name_in_graph(name: str) -> str:
    """Returns ``name``, or another name in a graph that has it already, because both may be under way at once."""
    if tf.executing_eagerly():
        return name
    # Not the graph's own unique_name(): it would prepend scopes with names that Keras numbers by process.
    used = tf.compat.v1.get_default_graph().get_collection_ref("ocomm_names")
    used.append(name)
    count = used.count(name)
    return name if count == 1 else f"{name}_{count}"


def refuse_xla() -> None:
    """Raises InvalidRequestError, which says what to do, if the graph under construction is for XLA."""
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise InvalidRequestError(
            "a collective cannot be inside a function with jit_compile=True: XLA compiles TensorFlow's own operations "
            "only. Use model.compile(..., jit_compile=False) in Keras, which turns it on by itself where there is a "
            "GPU; elsewhere leave jit_compile out, or compile a function of your own for the arithmetic and call the "
            "collective outside of it."
        )


def _without_engine() -> bool:
    """Returns True if the graph under construction must use ``tf.numpy_function``; raises for what is not possible at
    all.
    """
    refuse_xla()
    problem = engine.problem()
    if problem:
        _warn_slow(problem)
    return bool(problem)


@functools.lru_cache
def _warn_slow(problem: str) -> None:
    _log.warning("collectives inside tf.function run one after the other, and none during backward: %s", problem)


def _run_in_python(session: Session, exchanges: Sequence[Exchange]) -> list[list[tf.Tensor]]:
    """Runs all exchanges in one ``tf.numpy_function``, because TensorFlow would run several one after the other."""
    graph = tf.compat.v1.get_default_graph()
    with graph.name_scope(None):
        names = [e.name or graph.unique_name(_label(e.kind, e.tensors, e.process_set)) for e in exchanges]
    tensors = [tensor for e in exchanges for tensor in e.tensors]
    counts = [len(e.tensors) for e in exchanges]
    ends = np.cumsum(counts).tolist()
    starts = [e.start for e in exchanges]

    def body(*arrays: np.ndarray) -> list[np.ndarray]:
        calls = (
            (start, arrays[end - count : end], name)
            for start, name, count, end in zip(starts, names, counts, ends, strict=True)
        )
        return [array for outputs in _wait_for(session, NUMPY, calls) for array in outputs]

    outputs = tf.numpy_function(body, tensors, [tensor.dtype for tensor in tensors], stateful=True)
    for output, tensor in zip(outputs, tensors, strict=True):
        output.set_shape(tensor.shape)
    return [outputs[end - count : end] for count, end in zip(counts, ends, strict=True)]


@public
def _gather(
    kind: str,
    tensors: Sequence[tf.Tensor],
    name: str | None,
    start: Start,
    process_set: ProcessSet,
    splits: Any = None,
    is_reduction: bool = False,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the results of a collective that may change the first dimension, and the rows of every rank for each of
    them.

    The results of ``start`` are pairs (tensor, rows); with ``splits`` it takes one more argument. ``is_reduction``: it
    is part of an allreduce of ``tf.IndexedSlices``.
    """
    session = sessions.current()
    if tf.executing_eagerly():
        _count(is_reduction)
        given = start if splits is None else functools.partial(start, splits=np.asarray(splits))
        pairs = given(session, TENSORFLOW, tensors, name).wait()
        return [tensor for tensor, _ in pairs], [tf.constant(rows, tf.int64) for _, rows in pairs]
    if not _without_engine():

        def begin(works: list[Any], name: str) -> Operation:
            given = start if splits is None else functools.partial(start, splits=engine.splits_of(works))
            return given(session, engine.TENSORS, works, name).then(lambda pairs: [rows for _, rows in pairs])

        call = engine.Call(begin, name)
        if is_reduction:
            _reductions.append(call)
        outputs, table = engine.gather(call, tensors, splits, _label(kind, tensors, process_set))
        return outputs, tf.unstack(table, len(tensors))
    graph = tf.compat.v1.get_default_graph()
    with graph.name_scope(None):
        wire_name = name or graph.unique_name(_label(kind, tensors, process_set))

    def body(*arrays: np.ndarray) -> list[np.ndarray]:
        given = start
        if splits is not None:
            given = functools.partial(start, splits=arrays[-1])
            arrays = arrays[:-1]
        _count(is_reduction)
        pairs = given(session, NUMPY, arrays, wire_name).wait()
        return [array for array, _ in pairs] + [np.array(rows, np.int64) for _, rows in pairs]

    inputs = list(tensors) if splits is None else [*tensors, splits]
    count = len(tensors)
    results = tf.numpy_function(body, inputs, [t.dtype for t in tensors] + [tf.int64] * count, stateful=True)
    for output, tensor in zip(results, tensors, strict=False):
        output.set_shape([None, *tensor.shape[1:]] if tensor.shape.rank else tensor.shape)
    for rows in results[count:]:
        rows.set_shape([None])
    return results[:count], results[count:]


def _differentiable(
    tensors: Sequence[tf.Tensor],
    forward: Callable[[list[tf.Tensor]], tuple[list[tf.Tensor], Any]],
    backward: Callable[[Sequence[tf.Tensor], Any], Sequence[tf.Tensor]],
) -> list[tf.Tensor]:
    """Returns the first result of ``forward(tensors)``; its gradients are ``backward(gradients, second result of
    forward)``.
    """
    if not any(tensor.dtype.is_floating for tensor in tensors):
        return forward(list(tensors))[0]

    @tf.custom_gradient
    def function(*inputs: tf.Tensor) -> Any:
        outputs, context = forward(list(inputs))

        def gradients(*grads: tf.Tensor) -> list[tf.Tensor]:
            # Upstream gradients may have another precision than the variable's other gradients.
            found = backward(grads, context)
            return [tf.cast(grad, tensor.dtype) for grad, tensor in zip(found, inputs, strict=True)]

        return tuple(outputs), gradients

    with _device_of(tensors[0]) if tf.executing_eagerly() else _ANYWHERE:  # custom_gradient makes tensors, too
        return list(function(*tensors))


def _tensors(values: Iterable[Any]) -> list[tf.Tensor]:
    return [_tensor(value) for value in values]


def _tensor(value: Any) -> tf.Tensor:
    for kind, instead in ((tf.RaggedTensor, "to_tensor() or its flat_values"), (tf.SparseTensor, "tf.sparse.to_dense")):
        if isinstance(value, kind):
            raise InvalidRequestError(f"a collective takes dense tensors, not a tf.{kind.__name__}; pass {instead}.")
    tensor = tf.convert_to_tensor(value)
    # The value of a variable of TensorFlow 1 has a dtype of its own.
    return tf.identity(tensor) if tensor.dtype._is_ref_dtype else tensor


# allreduce


@dataclass(frozen=True, slots=True)
class StartAllreduce:
    """Submits an ``operations.allreduce``."""

    op: int
    prescale: float
    postscale: float
    process_set: ProcessSet
    grouped: bool

    def __call__(self, session: Session, adapter: Any, tensors: Sequence[Any], name: str | None) -> Operation:
        settings = self.op, self.prescale, self.postscale, self.process_set
        call = operations.Allreduce(tensors, name, *settings, grouped=self.grouped)
        operation = operations.allreduce(session, adapter, call)
        return operation if self.grouped else operation.then(lambda tensor: [tensor])

    def repeated(self, session: Session, count: int, name: str) -> RepeatedAllreduce:
        """Returns the allreduce of a graph, which makes it in every run."""
        return RepeatedAllreduce(
            *(session, name, self.op, self.prescale, self.postscale, self.process_set), count if self.grouped else None
        )


def _reduced(
    tensors: Sequence[tf.Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    grouped: bool,
    compression: type[Compressor] = Compression.none,
) -> list[tf.Tensor]:
    start = StartAllreduce(op, prescale, postscale, process_set, grouped)
    kind = "grouped_allreduce" if grouped else "allreduce"

    def forward(inputs: list[tf.Tensor]) -> tuple[list[tf.Tensor], None]:
        return run_compressed([Exchange(kind, inputs, name, start, process_set)], compression)[0], None

    def backward(grads: Sequence[tf.Tensor], _: None) -> list[tf.Tensor]:
        return _reduced(grads, None, op, prescale, postscale, process_set, grouped, compression)

    return _differentiable(tensors, forward, backward)


@public
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduces a tensor over the ranks. Collective. The gradient is the same allreduce of the gradient.

    ``tf.IndexedSlices`` stay ``tf.IndexedSlices``: the indices and values of all ranks are concatenated. For Average
    the values are divided by the number of ranks, as ``/`` does in TensorFlow: int32 and int64 become float64, smaller
    integers float32.

    Args:
        tensor: The input. Its shape and dtype are the same on all ranks.
        average: Horovod's older form of ``op``: True for Average, False for Sum. Give one of the two at most.
        compression: A class of ``Compression``.
        op: The reduction, Average if it is None.
        prescale_factor: Multiplies every input.
        postscale_factor: Multiplies the result.
        name: Matches the calls of different ranks.
        process_set: The ranks that take part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        UnsupportedError: ``tf.IndexedSlices`` with another reduction or with factors (a NotImplementedError).
        InvalidRequestError: The arguments cannot be right.
        HorovodInternalError: The collective failed: MismatchError, StallError or PeerError.
    """
    chosen = choose_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        return _allreduce_slices([tensor], chosen, (prescale_factor, postscale_factor), name, process_set, False)[0]
    factors = prescale_factor, postscale_factor
    return _reduced(_tensors([tensor]), name, chosen, *factors, process_set, False, compression)[0]


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Returns a sum, as Horovod's function of this name, which scripts call though it is not public."""
    return allreduce(tensor, None, "", "", Compression.none, op, prescale_factor, postscale_factor, name, process_set)


def _refuse_for_slices(op: int, factors: tuple[float, float], name: str | None) -> None:
    if op in (Average, Sum) and factors == (1.0, 1.0):
        return
    what = "Average and Sum only" if op not in (Average, Sum) else "no prescale_factor and no postscale_factor"
    raise UnsupportedError(
        f"tensor '{name or 'without a name'}': an allreduce of tf.IndexedSlices has {what}; use tf.convert_to_tensor, "
        "or sparse_as_dense=True in a DistributedOptimizer or tape."
    )


def _allreduce_slices(
    slices: Sequence[tf.IndexedSlices],
    op: int,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
    grouped: bool,
) -> list[tf.IndexedSlices]:
    _refuse_for_slices(op, factors, name)
    indices_name, values_name = (None, None) if name is None else (f"{name}.indices", f"{name}.values")
    indices = _allgather(_tensors(each.indices for each in slices), indices_name, process_set, grouped, True)
    values = _allgather(_tensors(each.values for each in slices), values_name, process_set, grouped, True)
    if op == Average:
        values = [each / process_set.size() for each in values]
    return [
        tf.IndexedSlices(summed, where, each.dense_shape)
        for summed, where, each in zip(values, indices, slices, strict=True)
    ]


@public
@collective("New tensors of the same shapes and dtypes.")
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduces several tensors, which all become ready at the same time: when every rank has submitted all of them.

    Collective. ``tf.IndexedSlices`` are a group of their own.
    """
    chosen = choose_op(op, average)
    factors = prescale_factor, postscale_factor
    results: dict[int, Any] = {}
    sparse = [position for position, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense = [position for position in range(len(tensors)) if position not in set(sparse)]
    if sparse:
        slices = _allreduce_slices([tensors[k] for k in sparse], chosen, factors, name, process_set, True)
        results |= zip(sparse, slices, strict=True)
    if dense:
        given = _tensors(tensors[k] for k in dense)
        results |= zip(dense, _reduced(given, name, chosen, *factors, process_set, True, compression), strict=True)
    return [results[position] for position in range(len(tensors))]


# allgather


def _allgather(
    tensors: Sequence[tf.Tensor],
    name: str | None,
    process_set: ProcessSet,
    grouped: bool,
    is_reduction: bool = False,
) -> list[tf.Tensor]:
    def start(session: Session, adapter: Any, tensors: Sequence[Any], name: str | None) -> Operation:
        operation = operations.allgather(session, adapter, tensors, name, process_set, grouped)
        return operation if grouped else operation.then(lambda pair: [pair])

    def forward(inputs: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        kind = "grouped_allgather" if grouped else "allgather"
        return _gather(kind, inputs, name, start, process_set, is_reduction=is_reduction)

    def backward(grads: Sequence[tf.Tensor], rows: list[tf.Tensor]) -> list[tf.Tensor]:
        reduced = _reduced(grads, None, Average, 1.0, 1.0, process_set, grouped)
        me = process_set.rank()
        return [
            tf.split(grad, [tf.reduce_sum(counts[:me]), counts[me], tf.reduce_sum(counts[me + 1 :])])[1]
            for grad, counts in zip(reduced, rows, strict=True)
        ]

    return _differentiable(tensors, forward, backward)


@public
@collective(
    "A new tensor.",
    tensor=GATHERED,
)
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenates the tensors of all ranks along the first dimension, in rank order. Collective.

    The gradient is this rank's rows of the averaged gradient.
    """
    return _allgather(_tensors([tensor]), name, process_set, False)[0]


@public
@collective("New tensors.", tensors="The inputs, as for ``allgather``; their number is the same on all ranks.")
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Makes an ``allgather`` of several tensors, which all become ready when every rank has submitted all of them.
    Collective.
    """
    return _allgather(_tensors(tensors), name, process_set, True) if tensors else []


# broadcast


def start_broadcast(root_rank: int, process_set: ProcessSet) -> Start:
    """Returns a function that submits an ``operations.broadcast`` of one tensor."""

    def start(session: Session, adapter: Any, tensors: Sequence[Any], name: str | None) -> Operation:
        operation = operations.broadcast(session, adapter, tensors[0], root_rank, name, process_set, False)
        return operation.then(lambda tensor: [tensor])

    return start


@public
@collective("A new tensor with the contents of the root's.")
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Sends a tensor of the rank ``root_rank`` to all ranks. Collective.

    The gradient is the averaged gradient on the root, zeros elsewhere.
    """
    start = start_broadcast(root_rank, process_set)

    def forward(inputs: list[tf.Tensor]) -> tuple[list[tf.Tensor], None]:
        return run([Exchange("broadcast", inputs, name, start, process_set)])[0], None

    def backward(grads: Sequence[tf.Tensor], _: None) -> list[tf.Tensor]:
        (reduced,) = _reduced(grads, None, Average, 1.0, 1.0, process_set, False)
        is_root = sessions.current().require_topology().rank == root_rank
        # The same operations on all ranks. Zeros alone would need no sum: a session of tf.compat.v1 would not run it,
        # and a second backward pass would not ask for its gradient, while the root waits for this rank's part.
        return [tf.where(is_root, reduced, tf.zeros_like(reduced))]

    return _differentiable(_tensors([tensor]), forward, backward)[0]


@public
@collective("Their values.", variables="``tf.Variable`` or Keras variables, the same on all ranks in the same order.")
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Sequence[Any]:
    """Overwrites variables with those of the rank ``root_rank``. Collective.

    In a graph the variables have their values when the function has run or, in a session of ``tf.compat.v1``, when the
    returned values have been fetched.
    """
    start = start_broadcast(root_rank, process_set)
    names = [None if name is None else f"{name}.{position}" for position in range(len(variables))]
    results = run(
        [
            Exchange("broadcast", [tf.convert_to_tensor(v)], own, start, process_set)
            for v, own in zip(variables, names, strict=True)
        ]
    )
    values = []
    for variable, (value,) in zip(variables, results, strict=True):
        with tf.control_dependencies([variable.assign(value)]):
            values.append(value if tf.executing_eagerly() else tf.identity(value))
    return values


# alltoall


@public
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends consecutive rows of ``tensor`` to the ranks, in rank order, and returns the rows received. Collective.

    The gradient goes back the same way.

    Args:
        tensor: At least one dimension; a row is an element of the first one. The other dimensions are equal on all
            ranks.
        splits: A tensor or sequence of whole numbers: the rows for each rank. Their sum is at most the length of
            ``tensor``. None for equal parts.
        name: Matches the calls of different ranks.
        ignore_name_scope: Accepted as in Horovod, and ignored.
        process_set: The ranks that take part.

    Returns:
        The received rows, in rank order. If ``splits`` is given, a pair: these rows, and the number of rows from each
            rank (int32).
    """
    counted: list[tf.Tensor] = []

    def start(
        session: Session, adapter: Any, tensors: Sequence[Any], name: str | None, splits: Any = None
    ) -> Operation:
        return operations.alltoall(session, adapter, tensors[0], splits, name, process_set).then(lambda pair: [pair])

    def forward(inputs: list[tf.Tensor]) -> tuple[list[tf.Tensor], Any]:
        parts = None if splits is None else tf.convert_to_tensor(splits)
        outputs, rows = _gather("alltoall", inputs, name, start, process_set, parts)
        counted.extend(rows)
        return outputs, (rows[0], tf.shape(inputs[0])[:1])

    def backward(grads: Sequence[tf.Tensor], context: Any) -> list[tf.Tensor]:
        rows, length = context
        back, _ = alltoall(grads[0], rows, process_set=process_set)
        missing = length - tf.shape(back)[:1]  # rows that the splits left out, which were not sent
        return [tf.concat([back, tf.zeros(tf.concat([missing, tf.shape(back)[1:]], 0), back.dtype)], 0)]

    (received,) = _differentiable(_tensors([tensor]), forward, backward)
    return received if splits is None else (received, tf.cast(counted[0], tf.int32))


# reducescatter


def _reducescatter(
    tensors: Sequence[tf.Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    grouped: bool,
    compression: type[Compressor],
) -> list[tf.Tensor]:
    kind = "grouped_reducescatter" if grouped else "reducescatter"

    def start(session: Session, adapter: Any, tensors: Sequence[Any], name: str | None) -> Operation:
        operation = operations.reducescatter(
            session, adapter, tensors, name, op, prescale, postscale, process_set, grouped
        )
        return operation.then(lambda parts: [(part, ()) for part in (parts if grouped else [parts])])

    def forward(inputs: list[tf.Tensor]) -> tuple[list[tf.Tensor], None]:
        pairs = [compression.compress(tensor) for tensor in inputs]
        parts = _gather(kind, [tensor for tensor, _ in pairs], name, start, process_set)[0]
        plain = [compression.decompress(part, context) for part, (_, context) in zip(parts, pairs, strict=True)]
        overflow = has_overflowed(compression, parts, inputs)
        if overflow is None:
            return plain, None
        # Each rank sees only its own part, so all must agree.
        ask = StartAllreduce(Max, 1.0, 1.0, process_set, False)
        asked = None if name is None else f"{name}.overflow"
        ((answer,),) = run([Exchange("allreduce", [tf.cast(overflow, tf.int32)], asked, ask, process_set)])

        def repeat() -> list[tf.Tensor]:
            return _gather(kind, inputs, _again(name, parts), start, process_set)[0]

        if tf.executing_eagerly():
            return repeat() if int(answer) else plain, None
        return _chosen(answer > 0, repeat, plain), None

    def backward(grads: Sequence[tf.Tensor], _: None) -> list[tf.Tensor]:
        factor = prescale * postscale * (process_set.size() if op == Sum else 1)
        return _allgather([grad * tf.cast(factor, grad.dtype) for grad in grads], None, process_set, grouped)

    return _differentiable(tensors, forward, backward)


@public
@collective(
    SHARE,
    op=AVERAGE_OR_SUM,
)
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces a tensor over the ranks and gives each rank a part of the rows of the result. Collective.

    The gradient is the allgathered gradient, times the number of ranks for Sum (as in Horovod).
    """
    factors = prescale_factor, postscale_factor
    return _reducescatter(_tensors([tensor]), name, op, *factors, process_set, False, compression)[0]


@public
@collective("This rank's share of each result.", op=AVERAGE_OR_SUM)
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Makes a ``reducescatter`` of several tensors, which all become ready when every rank has submitted all of them.
    Collective.
    """
    if not tensors:
        return []
    factors = prescale_factor, postscale_factor
    return _reducescatter(_tensors(tensors), name, op, *factors, process_set, True, compression)


# Waiting, and this process's place in the job


@public
@collective()
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the process set has called it. Collective; not for graphs."""
    operations.barrier(sessions.current(), process_set)


join = public(api.join)


def _topology(read: Callable[[Session], int], name: str | None) -> tf.Tensor:
    """Returns a number that is looked up at every run of the graph; int32, scalar."""
    session = sessions.current()
    session.require_topology()
    if tf.executing_eagerly():
        return tf.constant(read(session), tf.int32)
    found = tf.numpy_function(lambda: np.int32(read(session)), [], tf.int32, name=name)
    found.set_shape(())
    return found


def _set_ranks(session: Session, process_set_id: int) -> tuple[int, ...]:
    session.require_topology()
    if process_set_id not in session.set_ranks:
        raise InvalidRequestError(f"process set {process_set_id} has not been registered with init().")
    return session.set_ranks[process_set_id]


#: The arguments of operations that look up where the process is, by name.
LOOKUP = {
    "process_set_id": "The number of the process set, 0 for all ranks.",
    "name": "The operation's name in the graph.",
}


@public
@documented(LOOKUP)
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns ``size()`` of a process set, looked up whenever the graph runs.

    Args:
        {arguments}

    Returns:
        A scalar of int32.
    """
    return _topology(lambda session: len(_set_ranks(session, process_set_id)), name)


@public
@documented(LOOKUP)
def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns ``rank()``, looked up whenever the graph runs.

    Args:
        {arguments}

    Returns:
        A scalar of int32.
    """
    return _topology(lambda session: session.require_topology().rank, name)


@public
@documented(LOOKUP)
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns ``local_size()``, looked up whenever the graph runs.

    Args:
        {arguments}

    Returns:
        A scalar of int32.
    """
    return _topology(lambda session: session.require_topology().local_size, name)


@public
@documented(LOOKUP)
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns ``local_rank()``, looked up whenever the graph runs.

    Args:
        {arguments}

    Returns:
        A scalar of int32.
    """
    return _topology(lambda session: session.require_topology().local_rank, name)


@public
@documented(LOOKUP)
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns 1 if this rank is in the process set, else 0, looked up whenever the graph runs.

    Args:
        {arguments}

    Returns:
        A scalar of int32.
    """
    return _topology(lambda session: int(session.require_topology().rank in _set_ranks(session, process_set_id)), name)
