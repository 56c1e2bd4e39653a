"""Collectives inside a graph: one operation per tensor, all of them under way at once.

Tracing creates a ``Call``, which describes the collective, and an operation of ``native/tf_exchange.c`` that knows its
number. When the graph runs, TensorFlow's threads put the operations' tensors into a queue in C and continue. The thread
``ocomm-tensorflow`` takes them out, gives them to the runtime, and tells TensorFlow when they are over. Inputs and
outputs are not copied, and no thread of TensorFlow waits or runs Python.

If the extension cannot be loaded, ``problem()`` says why, and ``mpi_ops`` uses one ``tf.numpy_function`` instead.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from ocomm.errors import InvalidRequestError, OcommError
from ocomm.kernels.base import Bytes
from ocomm.operations import AllreduceBatch, Operation, RepeatedAllreduce
from ocomm.runtime.bystanders import TENSORFLOW
from ocomm.types import DType
from ocomm_tf.errors import status_of
from ocomm_tf.naming import shape_of, unwrapped

_IDLE_S = 3600.0
_PACE_S = 100e-6  # time between two looks at the queue

#: TensorFlow's numbers of element types.
DTYPES = {
    tf.uint8: DType.UINT8,
    tf.int8: DType.INT8,
    tf.uint16: DType.UINT16,
    tf.int16: DType.INT16,
    tf.int32: DType.INT32,
    tf.int64: DType.INT64,
    tf.bool: DType.BOOL,
    tf.float16: DType.FLOAT16,
    tf.bfloat16: DType.BFLOAT16,
    tf.float32: DType.FLOAT32,
    tf.float64: DType.FLOAT64,
}
_DTYPE_OF_NUMBER = {tensorflow.as_datatype_enum: dtype for tensorflow, dtype in DTYPES.items()}


def unsupported(dtype: tf.DType) -> str:
    """Returns why a tensor of ``dtype`` cannot be sent."""
    return f"dtype {dtype.name} is not supported; use one of {', '.join(d.label for d in DType)}"


@dataclass(slots=True)
class Call:
    """One collective in the program.

    ``start(tensors, name)`` submits it with the adapter ``TENSORS``; ``name`` is None if the place in the graph is the
    name. The operation's result is the rows of all ranks per tensor, or None if shapes do not change. ``repeat(name)``,
    if there is one, makes a faster form for later runs. ``static`` are element types and shapes of the tensors, if the
    graph knows them.
    """

    start: Callable[[list[Any], str], Operation]
    name: str | None
    repeat: Callable[[str], RepeatedAllreduce] | None = None
    repeated: dict[str, RepeatedAllreduce] = field(default_factory=dict)  # by name
    #: The faster form of all runs, if the program gives a name.
    ready: RepeatedAllreduce | None = None
    static: list[tuple[DType, tuple[int, ...]]] = field(default_factory=list)
    runs: int = 0
    #: True if it exchanges nothing with other ranks: it makes a gradient ready for a later step of the graph, or
    #: reports an error.
    is_local: bool = False


class _Tensor:
    """An input of an operation that is under way, and memory for the output."""

    __slots__ = ("c", "position", "work")

    def __init__(self, work: Any, position: int) -> None:
        self.work = work
        self.position = position
        self.c = work.tensors[position]


class _Output:
    """Allocates the result for a tensor."""

    __slots__ = ("shape", "tensor")

    def __init__(self, tensor: _Tensor, shape: tuple[int, ...]) -> None:
        self.tensor = tensor
        self.shape = shape


class TensorAdapter:
    """The ``operations.Adapter`` of tensors of operations that are under way."""

    def describe(self, tensor: Any) -> tuple[DType, tuple[int, ...]]:
        return _described(tensor.c)

    def host(self, tensor: Any) -> tuple[Any, bool]:
        return tensor, True

    def copies(self, tensors: Sequence[Any]) -> None:
        return None

    def view(self, host: Any) -> Bytes:
        if type(host) is _Tensor:
            return _bytes(host.c.input, host.c.nbytes)
        c = host.tensor.c
        if c.output != _ffi.NULL:
            return _bytes(c.output, c.nbytes)
        nbytes = _DTYPE_OF_NUMBER[c.dtype].itemsize * math.prod(host.shape)
        return _bytes(_allocate(host.tensor.work, host.tensor.position, c.dtype, host.shape, nbytes), nbytes)

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        return _Output(like, shape)

    def deliver(self, host: Any, like: Any) -> Any:
        return None  # the result is in TensorFlow's memory already

    def store(self, host: Any, into: Any) -> None:
        raise NotImplementedError("what an operation in a graph gets is not its own")


TENSORS = TensorAdapter()
_NOTHING = np.zeros(0, np.uint8)


def _bytes(address: Any, nbytes: int) -> Bytes:
    return np.frombuffer(_ffi.buffer(address, nbytes), np.uint8) if nbytes else _NOTHING


def _allocate(work: Any, position: int, dtype: int, shape: Sequence[int], nbytes: int) -> Any:
    address = _lib.ocomm_tf_output(work, position, dtype, shape, len(shape), nbytes)
    if address == _ffi.NULL and nbytes:
        raise MemoryError(f"TensorFlow has no {nbytes} bytes for the result of a collective")
    return address


# The extension

_ffi: Any = None
_lib: Any = None
_problem: str | None = None
_start_lock = threading.Lock()
_calls: list[Call] = []
_stopping = False
_thread: threading.Thread | None = None


def problem() -> str:
    """Returns why graphs cannot have operations of ours here; "" if they can. The first call registers them."""
    global _ffi, _lib, _problem, _thread
    if _problem is not None:
        return _problem
    with _start_lock:
        if _problem is not None:
            return _problem
        try:
            from ocomm_tf._native import ffi, lib
        except ImportError as error:
            _problem = f"the extension ocomm_tf._native cannot be loaded ({error}); reinstall ocomm"
            return _problem
        _ffi, _lib = ffi, lib
        message = ffi.new("char[256]")
        library = os.path.join(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2")
        if lib.ocomm_tf_register(library.encode(), message, 256):
            _problem = f"{ffi.string(message).decode()} (TensorFlow {tf.version.VERSION})"
            return _problem
        _thread = threading.Thread(target=_Courier().run, name=TENSORFLOW, daemon=True)
        _thread.start()
        atexit.register(_stop)
        _problem = ""
    return _problem


def runs() -> dict[str, int]:
    """Returns how often each named collective of this process's graphs has run."""
    counts: dict[str, int] = {}
    for call in _calls:
        if call.name is not None:
            counts[call.name] = counts.get(call.name, 0) + call.runs
    return counts


def exchanged() -> int:
    """Returns how often collectives of this process's graphs have run, those without a name, too."""
    return sum(call.runs for call in _calls if not call.is_local)


#: The frontends that make steps of 1-bit optimizers in graphs.
steppers: weakref.WeakSet[Any] = weakref.WeakSet()


def is_enclosing(stepper: Any) -> bool:
    """Returns True if nothing else of ours can run in TensorFlow while ``stepper`` makes its step in a graph that
    ``runs_in_order``.

    That is so if no graph of the process has another collective of ours, and the thread that starts a graph waits for
    its end.
    """
    return (
        not problem()
        and all(call.is_local for call in _calls)
        and list(steppers) == [stepper]
        and tf.config.experimental.get_synchronous_execution()
    )


def runs_in_order() -> bool:
    """Returns True if TensorFlow will run stateful operations of the graph under construction one after the other, in
    program order.

    Python functions of the user are stateful. It is so in ``tf.function``, but not in graphs of TensorFlow 1.
    """
    graph = tf.compat.v1.get_default_graph()
    return getattr(graph, "experimental_acd_manager", None) is not None


def _stop() -> None:
    global _stopping
    _stopping = True
    _lib.ocomm_tf_wake()
    assert _thread is not None
    _thread.join(1.0)


def exchange(call: Call, tensors: Sequence[tf.Tensor], label: str) -> list[tf.Tensor]:
    """Adds ``call``, whose results have the shapes of ``tensors``, to the graph under construction.

    ``label`` is the name of the operation in the graph, made unique.
    """
    if all(tensor.shape.is_fully_defined() and tensor.dtype in DTYPES for tensor in tensors):
        call.static = [(DTYPES[tensor.dtype], shape_of(tensor)) for tensor in tensors]
    outputs = _create("OcommExchange", call, tensors, [], label)
    for output, tensor in zip(outputs, tensors, strict=True):
        output.set_shape(tensor.shape)
    return outputs


def gather(
    call: Call, tensors: Sequence[tf.Tensor], splits: tf.Tensor | None, label: str
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Adds ``call``, whose results have a first dimension of their own, to the graph under construction.

    Returns the results, and the rows of all ranks, of shape (number of tensors, ranks), int64.
    """
    if splits is not None and not splits.dtype.is_integer and splits.shape != (0,):  # an empty list is float32
        raise InvalidRequestError(
            f"tensor '{call.name or label}': alltoall expects splits of whole numbers, got {splits.dtype.name}."
        )
    extra = [tf.zeros([0], tf.int64) if splits is None else tf.cast(splits, tf.int64)]
    *outputs, rows = _create("OcommGather", call, tensors, extra, label)
    for output, tensor in zip(outputs, tensors, strict=True):
        output.set_shape([None, *tensor.shape[1:]] if tensor.shape.rank else tensor.shape)
    return outputs, tf.reshape(rows, [len(tensors), -1])


def compare(call: Call, value: tf.Tensor, handles: Sequence[tf.Tensor], label: str) -> tf.Tensor:
    """Adds ``call`` to the graph under construction, so that it may read the variables of ``handles``. Returns a tensor
    that is there when the call is over.

    TensorFlow orders it between what writes to these variables before and after it in the program. Its one tensor is
    ``value``, float32.
    """
    call.static = [(DType.FLOAT32, shape_of(value))]
    return _create("OcommCompare", call, [value], list(handles), label)[0]


def held(results: Sequence[Any], after: Sequence[tf.Tensor], variables: Sequence[Any]) -> list[Any]:
    """Returns ``results``. In a ``tf.function`` they, and what the program writes to ``variables`` from here on, wait
    for ``after``: if one of ``after`` fails, nothing is written.

    TensorFlow orders operations on a variable. So an operation that reads it and waits holds those that write to it.
    """
    if tf.executing_eagerly() or not runs_in_order():
        return list(results)
    with tf.control_dependencies(after):
        for plain in map(unwrapped, variables):
            if hasattr(plain, "handle"):  # not a tensor, of which a tape may take gradients
                tf.raw_ops.VarIsInitializedOp(resource=plain.handle)
        return [None if r is None else tf.nest.map_structure(tf.identity, r, expand_composites=True) for r in results]


def in_python(function: Callable[..., Any], body: Callable[..., Any], inputs: Any, types: list[Any]) -> list[tf.Tensor]:
    """Returns ``function(body, inputs, types)`` as a list; ``function`` is ``tf.numpy_function`` or ``tf.py_function``.

    In a graph TensorFlow would report an error of ocomm in ``body`` with the status UNKNOWN. Here it has the status of
    ``_fail``.
    """
    if tf.executing_eagerly() or problem():
        return tf.nest.flatten(function(body, inputs, types))  # in eager mode a single result comes without its list
    failures: deque[OcommError] = deque()

    def caught(*arguments: Any) -> list[Any]:
        try:
            return [np.False_, *body(*arguments)]
        except OcommError as error:
            failures.append(error)
            return [np.True_, *(np.zeros(0, dtype.as_numpy_dtype) for dtype in types)]

    def fail(tensors: list[Any], name: str) -> Operation:
        raise failures.popleft()

    failed, *results = function(caught, inputs, [tf.bool, *types])
    failed.set_shape(())
    call = Call(fail, None, is_local=True)
    refused = tf.cond(failed, lambda: exchange(call, [failed], "failed")[0], lambda: failed)
    with tf.control_dependencies([refused]):
        return [tf.identity(result) for result in results]


def passed_on(tensor: _Tensor) -> Bytes:
    """Returns the bytes of an exchange's result, which are those of its input, without a copy unless TensorFlow needs
    one.
    """
    c = tensor.c
    result = _bytes(c.output, c.nbytes)
    if c.output != c.input:
        result[:] = _bytes(c.input, c.nbytes)
    return result


def kept(tensor: _Tensor) -> tuple[object, Bytes]:
    """Returns an object, and the bytes of an input that stay as they are while that object lives."""
    c = tensor.c
    handle = _lib.ocomm_tf_keep(tensor.work, tensor.position)
    if handle == _ffi.NULL:
        raise OcommError("TensorFlow does not give an operation its input.")
    return _ffi.gc(handle, _lib.ocomm_tf_release), _bytes(c.input, c.nbytes)


def splits_of(tensors: Sequence[_Tensor]) -> np.ndarray:
    """Returns the splits that came with the tensors, int64."""
    work = tensors[0].work
    return _bytes(work.splits, 8 * work.split_count).view(np.int64)


def _create(kind: str, call: Call, tensors: Sequence[tf.Tensor], extra: list[tf.Tensor], label: str) -> list[tf.Tensor]:
    with _start_lock:
        number = len(_calls)
        _calls.append(call)
    types = [tensor.dtype for tensor in tensors]
    for dtype in types:
        if dtype not in DTYPES:
            raise InvalidRequestError(f"tensor '{call.name or label}': {unsupported(dtype)}.")
    value = tf.compat.v1.AttrValue
    is_comparison = kind == "OcommCompare"
    attributes = {
        "N": value(i=len(extra) if is_comparison else 0),
        "call": value(i=number),
        "T": value(list=value.ListValue(type=[dtype.as_datatype_enum for dtype in types])),
        "nbytes": value(list=value.ListValue(i=[dtype.itemsize * math.prod(shape) for dtype, shape in call.static])),
    }
    graph = tf.compat.v1.get_default_graph()
    # Without a name of its own a call has that of the operation, which must not have scopes: Keras numbers them.
    place = contextlib.nullcontext() if call.name else graph.name_scope(None)
    with place, tf.device("CPU:0"):  # TensorFlow moves tensors of other devices
        operation = graph.create_op(
            kind,
            [*tensors, *extra],
            types if is_comparison else types + [tf.int64] * len(extra),
            name=label,
            attrs=attributes,
        )
    # Otherwise tf.function would run them one after the other, in program order. A comparison is ordered by its
    # variables.
    if graph.experimental_acd_manager is not None and not (is_comparison and extra):
        graph.experimental_acd_manager.run_independently(operation)
    return list(operation.outputs)


class _Stretch:
    """Consecutive works of one process set that are the same in every run."""

    __slots__ = ("inputs", "member", "outputs", "repeated", "works")

    def __init__(self, member: object = None) -> None:
        self.member = member
        self.repeated: list[RepeatedAllreduce] = []
        self.works: list[int] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []

    def end(self, submissions: AllreduceBatch) -> None:
        if self.works:
            submissions.add(self.repeated, self.works, self.inputs, self.outputs)


class _Courier:
    """The thread between TensorFlow's queue and the runtime.

    It handles hundreds of thousands of tensors per second. So a work is only a number that C knows, and nothing is
    allocated per tensor for repeated calls, because the garbage collector is slow in a process with TensorFlow.
    """

    def __init__(self) -> None:
        # Works that are over, with the operation to finish or the error. The runtime's thread appends to it.
        self._over: deque[tuple[list[int], Operation | OcommError | None]] = deque()
        self._told = False  # whether this thread has been told that there are such works

    def run(self) -> None:
        while not _stopping:
            batch = _lib.ocomm_tf_take(_IDLE_S, _PACE_S)
            if batch.count:
                self._start_all(batch)
            self._told = False
            self._finish()

    def _start_all(self, batch: Any) -> None:
        submissions = AllreduceBatch(self.hear)
        works = _ffi.unpack(batch.works, batch.count)
        numbers = _ffi.unpack(batch.calls, batch.count)
        counts = _ffi.unpack(batch.counts, batch.count)
        inputs = _ffi.unpack(batch.inputs, batch.tensors) if batch.tensors else []
        outputs = _ffi.unpack(batch.outputs, batch.tensors) if batch.tensors else []
        known = len(_calls)
        stretch = _Stretch()
        start = 0
        for work, number, count in zip(works, numbers, counts, strict=True):
            end = start + count
            if not 0 <= number < known:
                text = "a graph with collectives runs in the process which traced it; trace it here again"
                self._fail(work, InvalidRequestError(text))
                start = end
                continue
            call = _calls[number]
            call.runs += 1
            ready = call.ready
            if ready is not None and count:  # no function is called here, because every step has hundreds of works
                if ready.member is not stretch.member:
                    stretch.end(submissions)
                    stretch = _Stretch(ready.member)
                stretch.repeated += (ready,)
                stretch.works += (work,)
                stretch.inputs += inputs[start:end]
                stretch.outputs += outputs[start:end]
            elif call.repeat is None or not self._add(submissions, work, call, inputs[start:end], outputs[start:end]):
                self._start(work, call)
            start = end
        stretch.end(submissions)
        for work in submissions.submit():  # refused works are started one by one, since their set may have changed
            call = _calls[_pointer(work).call]
            call.repeated.clear()
            call.ready = None
            self._start(work, call)

    def _add(self, submissions: AllreduceBatch, work: int, call: Call, inputs: list[int], outputs: list[int]) -> bool:
        """Adds a work to the submissions. Returns False if it must be started by itself, which reports the reason.

        Without ``inputs`` the tensors are examined.
        """
        assert call.repeat is not None
        known = call.static
        if not inputs:
            c = _pointer(work)
            tensors = [c.tensors[position] for position in range(c.count)]
            if not tensors:
                return False
            known = [_described(tensor) for tensor in tensors]
            inputs = [int(_ffi.cast("intptr_t", tensor.input)) for tensor in tensors]
            outputs = [int(_ffi.cast("intptr_t", tensor.output)) for tensor in tensors]
        name = call.name or _name_of(work)
        repeated = call.repeated.get(name)
        try:
            if repeated is None:
                repeated = call.repeated[name] = call.repeat(name)
            repeated.describe(known)
        except OcommError:
            return False
        if call.name is not None and known is call.static:
            call.ready = repeated
        submissions.add([repeated], [work], inputs, outputs)
        return True

    def _start(self, work: int, call: Call) -> None:
        try:
            c = _pointer(work)
            tensors = [_Tensor(c, position) for position in range(c.count)]
            operation = call.start(tensors, call.name or _name_of(work))
        except Exception as error:  # TensorFlow waits, so it must be told about any error
            self._fail(work, error)
            return
        operation.notify(lambda: self.hear([work], operation))

    def hear(self, works: list[int], what: Operation | OcommError | None) -> None:
        """Notes that works are over. From any thread."""
        self._over.append((works, what))
        if not self._told:
            self._told = True
            _lib.ocomm_tf_wake()

    def _finish(self) -> None:
        good: list[int] = []
        while self._over:
            works, what = self._over.popleft()
            try:
                if isinstance(what, OcommError):
                    raise what
                rows = None if what is None else what.wait()
                if rows is not None:
                    _write_rows(_pointer(works[0]), rows)
            except Exception as error:
                for work in works:
                    self._fail(work, error)
            else:
                good += works
        if good:
            _lib.ocomm_tf_finish(good, len(good), 0, _ffi.NULL)

    def _fail(self, work: int, error: Exception) -> None:
        _lib.ocomm_tf_finish([work], 1, status_of(error), f"{type(error).__name__}: {error}".encode())


def _described(c: Any) -> tuple[DType, tuple[int, ...]]:
    return _DTYPE_OF_NUMBER[c.dtype], tuple(_ffi.unpack(c.shape, c.rank)) if c.rank else ()


def _pointer(work: int) -> Any:
    return _ffi.cast("ocomm_tf_work *", work)


def _name_of(work: int) -> str:
    c = _pointer(work)
    return _ffi.unpack(c.name, c.name_length).decode()


def _write_rows(work: Any, rows: Sequence[Sequence[int]]) -> None:
    table = np.array(rows, np.int64).reshape(-1)
    address = _allocate(work, work.count, tf.int64.as_datatype_enum, [table.size], table.nbytes)
    _bytes(address, table.nbytes).view(np.int64)[:] = table
