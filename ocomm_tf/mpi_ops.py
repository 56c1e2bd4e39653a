"""Horovod's collectives on TensorFlow tensors, eager and inside ``tf.function``.

An eager call waits for its result. In a graph every call is an operation that waits for nothing but its inputs and
never runs more or less often than its place in the program says: its input may be constant, its result unused, its twin
beside it. All are differentiable. ``device_dense``, ``device_sparse`` and ``ignore_name_scope`` are accepted as in
Horovod and not needed: tensors are taken from and returned to where they are, and a ``name`` counts as it is given.

``name`` tells which calls of different ranks belong together. Eager calls without one are matched by their order, those
in a graph by their place in it. ``op`` is ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``; an
average of integers is rounded towards zero.

Errors: InvalidRequestError (a ValueError) where this rank's arguments cannot be right, HorovodInternalError where the
ranks do not agree or some do not come. The one is also a ``tf.errors.InvalidArgumentError``, the other a
``tf.errors.FailedPreconditionError`` (``ocomm_tf.errors``). Out of a graph they come as these classes of TensorFlow,
and their message starts with the name of ocomm's; ``hvd.elastic.run`` finds a HorovodInternalError in it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from ocomm import api, operations
from ocomm import session as sessions
from ocomm.api import Adasum, Average, Max, Sum
from ocomm.collectives.scratch import ALIGNMENT, aligned
from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import Bytes
from ocomm.operations import NUMPY, Operation, ProcessSet, RepeatedAllreduce, choose_op, global_process_set
from ocomm.session import Session
from ocomm.types import DType
from ocomm_tf import engine
from ocomm_tf.compression import UNCOMPRESSED, Compression, Compressor, has_overflowed
from ocomm_tf.errors import UnsupportedError, public

_log = logging.getLogger("ocomm")


@functools.cache
def _has_gpus() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))


def _device_of(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    """In here what is eager is made where ``tensor`` is; else TensorFlow prefers its first GPU, if it has one."""
    return tf.device(tensor.backing_device) if _has_gpus() else _ANYWHERE


_ANYWHERE = contextlib.nullcontext()


class TensorFlowAdapter:
    """See ``operations.Adapter``. A host tensor is a NumPy array; eager tensors in host memory share theirs with it."""

    def describe(self, tensor: Any) -> tuple[DType, tuple[int, ...]]:
        dtype = engine.DTYPES.get(tensor.dtype)
        if dtype is None:
            raise TypeError(engine.unsupported(tensor.dtype))
        return dtype, tuple(tensor.shape)

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

#: Submits tensors: (session, adapter, tensors, name) -> Operation with a list of results. For alltoall also the splits.
Start = Callable[..., Operation]


@dataclass(slots=True)
class Exchange:
    """One collective whose results have the shapes of ``tensors``; ``kind`` is its word in names and errors."""

    kind: str
    tensors: Sequence[tf.Tensor]
    name: str | None
    start: Start


@public
def run(exchanges: Sequence[Exchange]) -> list[list[tf.Tensor]]:
    """The results of several collectives, all of them under way at once. Not differentiable."""
    session = sessions.current()
    if tf.executing_eagerly():
        return _wait_for(session, TENSORFLOW, [(e.start, e.tensors, e.name) for e in exchanges])
    if _without_engine():
        return _run_in_python(session, exchanges)
    return [engine.exchange(_call(session, e), e.tensors, _label(e.kind, e.tensors)) for e in exchanges]


@public
def run_compressed(exchanges: Sequence[Exchange], compression: type[Compressor]) -> list[list[tf.Tensor]]:
    """The results of several allreduces on what ``compression`` makes of their tensors, all of them under way at once.

    An exchange in which a tensor overflows is made again, without compression, by all ranks. Not differentiable.
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
    """The name of a second reduction, of what the first, whose results are ``sent``, has sent compressed. In a graph it
    has one always: places inside of a ``tf.cond`` have numbers, which may be others on another rank."""
    if name is None and not tf.executing_eagerly():
        name = sent[0].op.name
    return None if name is None else name + UNCOMPRESSED


def _chosen(overflow: tf.Tensor, repeat: Callable[[], list[tf.Tensor]], plain: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """In a graph: what ``repeat`` returns if there is an overflow when it runs, else ``plain``."""
    results = tf.nest.flatten(tf.cond(overflow, repeat, lambda: [tf.identity(tensor) for tensor in plain]))
    for result, tensor in zip(results, plain, strict=True):
        result.set_shape(tensor.shape)
    return results


_exchanged = 0  # by this process, outside of ``engine``
_has_reduced = False  # outside of ``engine``
_reductions: list[engine.Call] = []  # of all graphs


def exchanged() -> int:
    """How many exchanges this process has begun, eager ones and those in graphs."""
    return _exchanged + sum(engine.runs().values())


def has_reduced() -> bool:
    """Has this process ever begun an allreduce here?"""
    return _has_reduced or any(call.runs for call in _reductions)


def _wait_for(session: Session, adapter: Any, calls: Iterable[tuple[Start, Sequence[Any], str | None]]) -> list[Any]:
    global _exchanged, _has_reduced
    started = []
    for start, tensors, name in calls:
        started.append(start(session, adapter, tensors, name))
        _exchanged += 1
        _has_reduced |= isinstance(start, StartAllreduce)
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


def _label(kind: str, tensors: Sequence[tf.Tensor]) -> str:
    """What an operation without a name is called in the graph, and on the wire."""
    return f"{kind}_{tensors[0].op.name.replace('/', '_')}" if tensors else kind


def name_in_graph(name: str) -> str:
    """``name``, and in a graph which has it already, another one: both may be under way at once."""
    if tf.executing_eagerly():
        return name
    # Not the graph's own unique_name(): it would prepend scopes with names that Keras numbers by process.
    used = tf.compat.v1.get_default_graph().get_collection_ref("ocomm_names")
    used.append(name)
    count = used.count(name)
    return name if count == 1 else f"{name}_{count}"


def refuse_xla() -> None:
    """InvalidRequestError, with what to do, if the graph under construction is for XLA."""
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise InvalidRequestError(
            "a collective cannot be inside a function with jit_compile=True: XLA compiles TensorFlow's own operations "
            "only. Use model.compile(..., jit_compile=False) in Keras, which turns it on by itself where there is a "
            "GPU; elsewhere leave jit_compile out, or compile a function of your own for the arithmetic and call the "
            "collective outside of it."
        )


def _without_engine() -> bool:
    """Whether the graph under construction must do with ``tf.numpy_function``; refuses what cannot be done at all."""
    refuse_xla()
    problem = engine.problem()
    if problem:
        _warn_slow(problem)
    return bool(problem)


@functools.lru_cache
def _warn_slow(problem: str) -> None:
    _log.warning("collectives inside tf.function run one after the other, and none during backward: %s", problem)


def _run_in_python(session: Session, exchanges: Sequence[Exchange]) -> list[list[tf.Tensor]]:
    """All of them in one ``tf.numpy_function``: TensorFlow would run several of those one after the other."""
    graph = tf.compat.v1.get_default_graph()
    names = [e.name or graph.unique_name(_label(e.kind, e.tensors)) for e in exchanges]
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
    kind: str, tensors: Sequence[tf.Tensor], name: str | None, start: Start, splits: Any = None
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The results of a collective that may change the first dimension, and the rows of every rank for each of them.

    The results of ``start`` are pairs (tensor, rows); with ``splits`` it takes one argument more.
    """
    session = sessions.current()
    if tf.executing_eagerly():
        given = start if splits is None else functools.partial(start, splits=np.asarray(splits))
        pairs = given(session, TENSORFLOW, tensors, name).wait()
        return [tensor for tensor, _ in pairs], [tf.constant(rows, tf.int64) for _, rows in pairs]
    if not _without_engine():

        def begin(works: list[Any], name: str) -> Operation:
            given = start if splits is None else functools.partial(start, splits=engine.splits_of(works))
            return given(session, engine.TENSORS, works, name).then(lambda pairs: [rows for _, rows in pairs])

        outputs, table = engine.gather(engine.Call(begin, name), tensors, splits, _label(kind, tensors))
        return outputs, tf.unstack(table, len(tensors))
    wire_name = name or tf.compat.v1.get_default_graph().unique_name(_label(kind, tensors))

    def body(*arrays: np.ndarray) -> list[np.ndarray]:
        given = start
        if splits is not None:
            given = functools.partial(start, splits=arrays[-1])
            arrays = arrays[:-1]
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
    """``forward(tensors)``'s first result; gradients are ``backward(gradients, forward's second result)``."""
    if not any(tensor.dtype.is_floating for tensor in tensors):
        return forward(list(tensors))[0]

    @tf.custom_gradient
    def function(*inputs: tf.Tensor) -> Any:
        outputs, context = forward(list(inputs))

        def gradients(*grads: tf.Tensor) -> list[tf.Tensor]:
            # Those that a caller gives may have another precision, which the variable's other gradients have not.
            found = backward(grads, context)
            return [tf.cast(grad, tensor.dtype) for grad, tensor in zip(found, inputs, strict=True)]

        return tuple(outputs), gradients

    with _device_of(tensors[0]) if tf.executing_eagerly() else _ANYWHERE:  # custom_gradient makes tensors, too
        return list(function(*tensors))


def _tensors(values: Iterable[Any]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(value) for value in values]


# allreduce


@dataclass(frozen=True, slots=True)
class StartAllreduce:
    """Submits an allreduce; see ``operations.allreduce``."""

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
        """The same for a graph, which makes it in every run."""
        return RepeatedAllreduce(
            *(session, name, self.op, self.prescale, self.postscale, self.process_set), count if self.grouped else None
        )


def _allreduce(
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
        return run_compressed([Exchange(kind, inputs, name, start)], compression)[0], None

    def backward(grads: Sequence[tf.Tensor], _: None) -> list[tf.Tensor]:
        return _allreduce(grads, None, op, prescale, postscale, process_set, grouped, compression)

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
    """The reduction of ``tensor`` over the ranks, as a new tensor of the same shape and dtype.

    ``prescale_factor`` is applied to every input, ``postscale_factor`` to the result. The gradient is the same
    allreduce of the gradient.

    ``tf.IndexedSlices`` stay that: indices and values of all ranks side by side. For Average the values are divided by
    the number of ranks, as ``/`` does in TensorFlow: those of int32 and int64 become float64, those of smaller integers
    float32. Other reductions and scale factors raise UnsupportedError, which is a NotImplementedError.
    """
    chosen = choose_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        return _allreduce_slices([tensor], chosen, (prescale_factor, postscale_factor), name, process_set, False)[0]
    factors = prescale_factor, postscale_factor
    return _allreduce(_tensors([tensor]), name, chosen, *factors, process_set, False, compression)[0]


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
    indices = _allgather(_tensors(each.indices for each in slices), indices_name, process_set, grouped)
    values = _allgather(_tensors(each.values for each in slices), values_name, process_set, grouped)
    if op == Average:
        values = [each / process_set.size() for each in values]
    return [
        tf.IndexedSlices(summed, where, each.dense_shape)
        for summed, where, each in zip(values, indices, slices, strict=True)
    ]


@public
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
    """``allreduce`` of several tensors, which are reduced when all ranks have submitted all of them.

    Those that are ``tf.IndexedSlices`` are a group of their own.
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
        results |= zip(dense, _allreduce(given, name, chosen, *factors, process_set, True, compression), strict=True)
    return [results[position] for position in range(len(tensors))]


# allgather


def _allgather(
    tensors: Sequence[tf.Tensor], name: str | None, process_set: ProcessSet, grouped: bool
) -> list[tf.Tensor]:
    def start(session: Session, adapter: Any, tensors: Sequence[Any], name: str | None) -> Operation:
        operation = operations.allgather(session, adapter, tensors, name, process_set, grouped)
        return operation if grouped else operation.then(lambda pair: [pair])

    def forward(inputs: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        return _gather("grouped_allgather" if grouped else "allgather", inputs, name, start)

    def backward(grads: Sequence[tf.Tensor], rows: list[tf.Tensor]) -> list[tf.Tensor]:
        reduced = _allreduce(grads, None, Average, 1.0, 1.0, process_set, grouped)
        me = process_set.rank()
        return [
            tf.split(grad, [tf.reduce_sum(counts[:me]), counts[me], tf.reduce_sum(counts[me + 1 :])])[1]
            for grad, counts in zip(reduced, rows, strict=True)
        ]

    return _differentiable(tensors, forward, backward)


@public
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The tensors of all ranks along the first dimension, which may have another length on every rank.

    The gradient is this rank's rows of the averaged gradient.
    """
    return _allgather(_tensors([tensor]), name, process_set, False)[0]


@public
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """``allgather`` of several tensors, gathered when all ranks have submitted all of them."""
    return _allgather(_tensors(tensors), name, process_set, True) if tensors else []


# broadcast


def start_broadcast(root_rank: int, process_set: ProcessSet) -> Start:
    """Submits a broadcast of one tensor; see ``operations.broadcast``."""

    def start(session: Session, adapter: Any, tensors: Sequence[Any], name: str | None) -> Operation:
        operation = operations.broadcast(session, adapter, tensors[0], root_rank, name, process_set, False)
        return operation.then(lambda tensor: [tensor])

    return start


@public
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The tensor of ``root_rank`` (a world rank, also in a process set), as a new tensor.

    The gradient is the averaged gradient on the root, zeros elsewhere.
    """
    start = start_broadcast(root_rank, process_set)

    def forward(inputs: list[tf.Tensor]) -> tuple[list[tf.Tensor], None]:
        return run([Exchange("broadcast", inputs, name, start)])[0], None

    def backward(grads: Sequence[tf.Tensor], _: None) -> list[tf.Tensor]:
        (reduced,) = _allreduce(grads, None, Average, 1.0, 1.0, process_set, False)
        if sessions.current().require_topology().rank == root_rank:
            return [reduced]
        # A session of tf.compat.v1 runs what it needs, and the root waits for this rank's part of the sum.
        with tf.control_dependencies([reduced]):
            return [tf.zeros_like(reduced)]

    return _differentiable(_tensors([tensor]), forward, backward)[0]


@public
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Sequence[Any]:
    """Overwrites ``variables`` (``tf.Variable`` or Keras variables) with those of ``root_rank``; returns their values.

    In a graph the variables have their values when the function has run, or, in a session of ``tf.compat.v1``, when
    what is returned has been fetched. Raises as ``broadcast`` does.
    """
    start = start_broadcast(root_rank, process_set)
    results = run(
        [
            Exchange("broadcast", [tf.convert_to_tensor(v)], None if name is None else f"{name}.{position}", start)
            for position, v in enumerate(variables)
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
    """Deals the rows of ``tensor`` to the ranks, in order, and returns what came from them, in rank order.

    ``splits`` (a tensor or sequence of whole numbers) are the rows for each rank, their sum at most the length of
    ``tensor``; equal parts by default. With it the result is a pair: the tensor, and the rows received from each rank
    (int32). The gradient goes back the same way.
    """
    counted: list[tf.Tensor] = []

    def start(
        session: Session, adapter: Any, tensors: Sequence[Any], name: str | None, splits: Any = None
    ) -> Operation:
        return operations.alltoall(session, adapter, tensors[0], splits, name, process_set).then(lambda pair: [pair])

    def forward(inputs: list[tf.Tensor]) -> tuple[list[tf.Tensor], Any]:
        parts = None if splits is None else tf.convert_to_tensor(splits)
        outputs, rows = _gather("alltoall", inputs, name, start, parts)
        counted.extend(rows)
        return outputs, (rows[0], tf.shape(inputs[0])[:1])

    def backward(grads: Sequence[tf.Tensor], context: Any) -> list[tf.Tensor]:
        rows, length = context
        back, _ = alltoall(grads[0], rows, process_set=process_set)
        missing = length - tf.shape(back)[:1]  # rows which the splits had left at home
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
        parts = _gather(kind, [tensor for tensor, _ in pairs], name, start)[0]
        plain = [compression.decompress(part, context) for part, (_, context) in zip(parts, pairs, strict=True)]
        overflow = has_overflowed(compression, parts, inputs)
        if overflow is None:
            return plain, None
        # Each rank sees its own part alone.
        ask = StartAllreduce(Max, 1.0, 1.0, process_set, False)
        asked = None if name is None else f"{name}.overflow"
        ((answer,),) = run([Exchange("allreduce", [tf.cast(overflow, tf.int32)], asked, ask)])

        def repeat() -> list[tf.Tensor]:
            return _gather(kind, inputs, _again(name, parts), start)[0]

        if tf.executing_eagerly():
            return repeat() if int(answer) else plain, None
        return _chosen(answer > 0, repeat, plain), None

    def backward(grads: Sequence[tf.Tensor], _: None) -> list[tf.Tensor]:
        factor = prescale * postscale * (process_set.size() if op == Sum else 1)
        return _allgather([grad * tf.cast(factor, grad.dtype) for grad in grads], None, process_set, grouped)

    return _differentiable(tensors, forward, backward)


@public
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
    """This rank's part of the reduction (Average or Sum): a share of the rows, the first ranks get the remainder.

    The gradient is the allgathered gradient, times the number of ranks for Sum (as in Horovod).
    """
    factors = prescale_factor, postscale_factor
    return _reducescatter(_tensors([tensor]), name, op, *factors, process_set, False, compression)[0]


@public
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
    """``reducescatter`` of several tensors, reduced when all ranks have submitted all of them."""
    if not tensors:
        return []
    factors = prescale_factor, postscale_factor
    return _reducescatter(_tensors(tensors), name, op, *factors, process_set, True, compression)


# Waiting, and where this process stands


@public
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it. Not for graphs."""
    operations.barrier(sessions.current(), process_set)


join = public(api.join)


def _topology(read: Callable[[Session], int], name: str | None) -> tf.Tensor:
    """A number that is looked up at every run of the graph; int32, scalar."""
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


@public
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """``size()`` of a process set, looked up whenever the graph runs; int32."""
    return _topology(lambda session: len(_set_ranks(session, process_set_id)), name)


@public
def rank_op(name: str | None = None) -> tf.Tensor:
    """``rank()``, looked up whenever the graph runs; int32."""
    return _topology(lambda session: session.require_topology().rank, name)


@public
def local_size_op(name: str | None = None) -> tf.Tensor:
    """``local_size()``, looked up whenever the graph runs; int32."""
    return _topology(lambda session: session.require_topology().local_size, name)


@public
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """``local_rank()``, looked up whenever the graph runs; int32."""
    return _topology(lambda session: session.require_topology().local_rank, name)


@public
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this rank is in the process set, else 0, looked up whenever the graph runs; int32."""
    return _topology(lambda session: int(session.require_topology().rank in _set_ranks(session, process_set_id)), name)
