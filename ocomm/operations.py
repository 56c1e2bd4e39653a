"""The collectives, once for all frontends: checks arguments, turns tensors into bytes, and queues requests.

A frontend brings an ``Adapter`` for its tensors; everything else about a call is the same in NumPy, Torch and
TensorFlow. A call that is wrong on this rank alone raises InvalidRequestError here, before anything is sent.
"""

from __future__ import annotations

import itertools
import operator
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import numpy as np

from ocomm import session as sessions
from ocomm.collectives.adasum import adasum
from ocomm.collectives.error_feedback import OneBitAllreduce
from ocomm.errors import InvalidRequestError, OcommError, UnsupportedError, clause
from ocomm.kernels.base import Bytes
from ocomm.negotiation.coordinator import JOIN_NAME
from ocomm.negotiation.request import Kind, Request, TensorMemory
from ocomm.runtime.call_sites import NOBODY, Caller, caller
from ocomm.runtime.handle import NOTHING, Handle, Submission
from ocomm.runtime.plans import check_reduction
from ocomm.runtime.process_set import MemberSet
from ocomm.session import Session
from ocomm.types import DType, ReduceOp


class Copies(Protocol):
    """Copies from a device to the host's memory that are under way."""

    def is_over(self) -> bool:
        """Returns True if all copies are complete; never waits."""
        ...

    def wait(self) -> None: ...


class Adapter(Protocol):
    """Turns a framework's tensors into bytes and back. ``host`` tensors are contiguous and in this process's memory."""

    def describe(self, tensor: Any) -> tuple[DType, tuple[int, ...]]:
        """Returns element type and shape. Raises TypeError, with the reason, for tensors that cannot be sent."""
        ...

    def host(self, tensor: Any) -> tuple[Any, bool]:
        """Returns the tensor as a host tensor, and whether it shares the memory of ``tensor``.

        A copy from a device may still be under way; ``copies`` returns what to wait for.
        """
        ...

    def copies(self, tensors: Sequence[Any]) -> Copies | None:
        """Returns the copies of ``tensors`` that ``host`` has begun in this thread, which must be over before anyone
        reads them; None if there are none.
        """
        ...

    def view(self, host: Any) -> Bytes:
        """Returns the bytes of a host tensor, which share its memory and keep it alive."""
        ...

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        """Returns a new host tensor with the dtype of ``like``. May be called on any thread."""
        ...

    def deliver(self, host: Any, like: Any) -> Any:
        """Returns a result on the device of ``like``."""
        ...

    def store(self, host: Any, into: Any) -> None:
        """Copies a host tensor into a user's tensor of the same shape."""
        ...


class NumpyAdapter:
    """The ``Adapter`` of NumPy arrays."""

    def describe(self, tensor: Any) -> tuple[DType, tuple[int, ...]]:
        return DType.from_numpy(tensor.dtype), tensor.shape

    def host(self, tensor: Any) -> tuple[Any, bool]:
        if tensor.flags.c_contiguous and tensor.dtype.isnative:
            return tensor, True
        return tensor.astype(tensor.dtype.newbyteorder("="), order="C"), False

    def copies(self, tensors: Sequence[Any]) -> None:
        return None

    def view(self, host: Any) -> Bytes:
        return host.reshape(-1).view(np.uint8)

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        return np.empty(shape, like.dtype.newbyteorder("="))

    def deliver(self, host: Any, like: Any) -> Any:
        return host

    def store(self, host: Any, into: Any) -> None:
        into[...] = host


NUMPY = NumpyAdapter()


class ProcessSet:
    """Some of the ranks of the job, with collectives of their own.

    Pass it to ``init(process_sets=[...])`` or, later, to ``add_process_set``. Two objects with the same ranks are the
    same set. All members make the same calls in it.

    Args:
        ranks: Ranks of the whole job in any order, or an mpi4py communicator of these ranks.

    Raises:
        InvalidRequestError: The ranks are not distinct whole numbers.
    """

    def __init__(self, ranks: Any) -> None:
        self.mpi_comm = ranks if hasattr(ranks, "Get_group") else None
        if self.mpi_comm is not None:
            from ocomm.transport import mpi

            ranks = mpi.world_ranks(self.mpi_comm)
        try:
            found = sorted(operator.index(rank) for rank in ranks)
        except TypeError:
            raise InvalidRequestError(f"ProcessSet takes a list of world ranks, got {ranks!r}.") from None
        if not found or len(set(found)) < len(found):
            raise InvalidRequestError(f"ProcessSet takes one or more distinct world ranks, got {found}.")
        self._ranks: tuple[int, ...] = tuple(found)

    def number(self, session: Session) -> int:
        """Returns the set's id in ``session``. Raises InvalidRequestError if it was not registered there."""
        session.require_topology()
        for number, ranks in session.set_ranks.items():
            if ranks == self._ranks:
                return number
        raise InvalidRequestError(
            f"process set with ranks {list(self._ranks)} has not been registered; pass it to "
            "init(process_sets=[...]) or add_process_set() on every rank."
        )

    @property
    def process_set_id(self) -> int | None:
        """Returns the id in the running job; None before ``init()`` or if the set was not registered."""
        session = sessions.current()
        return next((n for n, ranks in session.set_ranks.items() if ranks == self._ranks), None)

    @property
    def ranks(self) -> list[int]:
        """Returns the members' ranks in the whole job, ascending."""
        return list(self._ranks)

    def size(self) -> int:
        """Returns the number of ranks in the set."""
        return len(self.ranks)

    def rank(self) -> int:
        """Returns this rank's position in the set. Raises InvalidRequestError if it is not a member."""
        session = sessions.current()
        return session.member_set(self.number(session)).rank

    def included(self) -> bool:
        """Returns True if this rank is a member."""
        return sessions.current().known_topology().rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _World(ProcessSet):
    """The set of all ranks of the job, which calls use by default."""

    def __init__(self) -> None:
        self.mpi_comm = None
        self._ranks = ()

    def number(self, session: Session) -> int:
        return 0

    @property
    def process_set_id(self) -> int | None:
        return 0

    @property
    def ranks(self) -> list[int]:
        return list(range(sessions.current().known_topology().size))

    def __repr__(self) -> str:
        return "global_process_set"


#: The set of all ranks, with id 0.
global_process_set: ProcessSet = _World()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers a process set while the job runs. Collective over all ranks of the job, also those that are not
    members.

    All ranks add and remove sets in the same order.

    Args:
        process_set: A ``ProcessSet``, or its ranks.

    Returns:
        The set, registered.

    Raises:
        InvalidRequestError: A rank does not exist, or the set is registered already.
        MismatchError: The ranks do not add the same set.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    sessions.current().registry.add(added.ranks)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forgets a process set of ``add_process_set`` or ``init``. Collective over all ranks of the job.

    Operations of the set that some of its ranks have not asked for by then fail.

    Args:
        process_set: The set.

    Returns:
        False if the set was not registered, or is the set of all ranks; else True.

    Raises:
        MismatchError: The ranks do not remove the same set.
        StallError: A rank has not closed the set's channels within ``OCOMM_START_TIMEOUT`` seconds.
    """
    number = process_set.process_set_id
    if not number:
        return False
    sessions.current().registry.remove(number)
    return True


@dataclass(slots=True, eq=False)
class Operation:
    """One call that is under way. Its tensors belong to the runtime until it is over; without a handle it is over.

    ``_finish`` makes the call's result from the results of its handle.
    """

    _handle: Handle | None
    _finish: Callable[[list[Any]], Any]

    def poll(self) -> bool:
        """Returns True once ``wait`` will not block."""
        return self._handle is None or self._handle.poll()

    def notify(self, listener: Callable[[], None]) -> None:
        """Calls ``listener`` once ``wait`` will not block: on the background thread, or here if that is so already."""
        if self._handle is None:
            listener()
        else:
            self._handle.notify(listener)

    def wait(self) -> Any:
        """Waits for the end and returns the result. If the operation failed, raises its error once no tensor is in use
        any more.
        """
        return self._finish([] if self._handle is None else self._handle.wait())

    def then(self, change: Callable[[Any], Any]) -> Operation:
        """Returns the same operation with ``change`` applied to its result."""
        finish = self._finish
        return Operation(self._handle, lambda results: change(finish(results)))


@dataclass(slots=True, eq=False)
class PreparedOperation:
    """One call that is ready to be submitted once its tensors are in the host's memory."""

    _session: Session
    _number: int
    _submission: Submission
    #: The copies to the host that are under way; None if there are none.
    copies: Copies | None
    _finish: Callable[[list[Any]], Any]
    _operation: Operation | None = None

    def submit(self) -> Operation:
        """Waits for the copies and submits the call. Returns the same operation when called again."""
        if self._operation is None:
            if self.copies is not None:
                self.copies.wait()
            handle = self._session.member_set(self._number).submit(self._submission)
            self._operation = Operation(handle, self._finish)
        return self._operation


def without_sizes(operation: Operation) -> Operation:
    """Returns an allgather or alltoall whose result is the tensor alone, without the numbers of rows."""
    return operation.then(lambda result: result[0])


class HandleTable:
    """Horovod's integer handles: numbers of operations under way, unique in this process."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._operations: dict[int, Operation] = {}  # only single dict operations, which are atomic between threads

    def add(self, operation: Operation) -> int:
        number = next(self._numbers)
        self._operations[number] = operation
        return number

    def poll(self, number: int) -> bool:
        """Returns True if ``synchronize`` will not block. Raises InvalidRequestError for an unknown handle."""
        operation = self._operations.get(number)
        if operation is None:
            raise InvalidRequestError(f"handle {number} was not created or has been synchronized already.")
        return operation.poll()

    def synchronize(self, number: int) -> Any:
        """Waits for an operation and returns its result; None for an unknown handle. The handle stays known if the wait
        is interrupted, as by a signal handler that raises.
        """
        operation = self._operations.get(number)
        if operation is None:
            return None
        try:
            result = operation.wait()
        except OcommError:
            self._operations.pop(number, None)
            raise
        self._operations.pop(number, None)
        return result


handles = HandleTable()


def choose_op(op: int | None, average: bool | None) -> int:
    """Returns the reduction that ``op``, or Horovod's older ``average``, names. Raises InvalidRequestError if both are
    given.
    """
    if average is None:
        return ReduceOp.AVERAGE if op is None else op
    if op is not None:
        raise InvalidRequestError("The op parameter supersedes average. Please provide only one of them.")
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


# Module globals, because looking up a member of an enumeration takes five times as long.
_MOST_ROWS = 2**31 - 1
_BRIDGED, _AVERAGE, _SUM, _BOOL = TensorMemory.BRIDGED, ReduceOp.AVERAGE, ReduceOp.SUM, DType.BOOL
_USABLE = frozenset(op for op in ReduceOp if op != ReduceOp.BITWISE_OR)


def _check_reduction(name: str, dtype: DType, op: int, prescale: float, postscale: float) -> ReduceOp:
    if (op is ReduceOp.AVERAGE or op is ReduceOp.SUM) and dtype is not DType.BOOL:
        return op  # the usual case, once per gradient
    if not isinstance(op, int) or op not in _USABLE:
        raise InvalidRequestError(
            f"tensor '{name}': op={op!r} is no reduction; use Average, Sum, Adasum, Min, Max or Product."
        )
    if op == ReduceOp.ADASUM and not dtype.is_floating:
        raise UnsupportedError(f"tensor '{name}': Adasum needs floating-point elements, not {dtype.label}.")
    if dtype == DType.BOOL:
        if op == ReduceOp.AVERAGE:
            raise UnsupportedError(
                f"tensor '{name}': Average is not defined for bool; use Max or Sum (true on any rank), Min or Product "
                "(true on all), or convert the tensor first."
            )
        if prescale != 1 or postscale != 1:
            raise UnsupportedError(f"tensor '{name}': a bool tensor cannot be scaled; leave out the scale factors.")
    return ReduceOp(op)


def _describe(adapter: Adapter, tensor: Any, name: str) -> tuple[DType, tuple[int, ...]]:
    try:
        return adapter.describe(tensor)
    except TypeError as error:
        raise UnsupportedError(f"tensor '{name}': {clause(error)}.") from None


def _need_dimension(kind: str, name: str, shape: tuple[int, ...]) -> None:
    if not shape:
        raise UnsupportedError(f"tensor '{name}': {kind} needs at least one dimension; reshape it to (1,).")


def _names(
    session: Session, number: int, operation: str, name: str | Sequence[str] | None, count: int | None
) -> list[str]:
    """Returns names on the wire, as Horovod forms them.

    Args:
        count: Number of tensors of a group; None for a single tensor, and for several tensors that have a name each.
    """
    if name is not None and not isinstance(name, str):
        return [f"{operation}.{each}" for each in name]
    if count is not None:
        operation = "grouped_" + operation
    base = session.automatic_name(operation, number) if name is None else f"{operation}.{name}"
    return [base] if count is None else [f"{base}_{k}of{count}" for k in range(1, count + 1)]


class _Result:
    """Allocates a result whose shape is known only once all ranks have submitted their tensors."""

    __slots__ = ("_adapter", "_like", "tensor")

    def __init__(self, adapter: Adapter, like: Any) -> None:
        self._adapter = adapter
        self._like = like
        self.tensor: Any = None

    def __call__(self, shape: tuple[int, ...]) -> Bytes:
        self.tensor = self._adapter.empty(self._like, shape)
        return self._adapter.view(self.tensor)


@dataclass(frozen=True, slots=True)
class Allreduce:
    """The arguments of an allreduce.

    ``prescale`` multiplies every input, ``postscale`` the result. If ``grouped``, the tensors become ready together and
    the result is a list. If ``name`` is a sequence, one name for each tensor, each tensor is matched by itself, as if
    it had been submitted alone, and the result is a list, too. If ``name`` is None, calls are matched by their order.
    """

    tensors: Sequence[Any]
    name: str | Sequence[str] | None = None
    op: int = ReduceOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set
    in_place: bool = False
    grouped: bool = False


def allreduce(session: Session, adapter: Adapter, call: Allreduce) -> Operation:
    """Reduces every tensor over the ranks of the set. The operation's result is the tensor, or a list for a group."""
    return prepare_allreduce(session, adapter, call).submit()


def prepare_allreduce(
    session: Session, adapter: Adapter, call: Allreduce, memory: TensorMemory = TensorMemory.HOST
) -> PreparedOperation:
    """Returns an ``allreduce`` that is not submitted yet, because its tensors are on their way to the host's memory.

    Args:
        memory: Where ``adapter`` leaves the tensors (``nccl_opening.memory_of``). ``BRIDGED`` tensors stay on their
            device: the adapter's host tensors, and their bytes, are there.
    """
    tensors, name, op, prescale, postscale = call.tensors, call.name, call.op, call.prescale, call.postscale
    number = call.process_set.number(session)
    names = _names(session, number, "allreduce", name, len(tensors) if call.grouped else None)
    group, group_size = (names[0], len(tensors)) if call.grouped and tensors else ("", 0)
    requests: list[Request] = []
    sources: list[Any] = []
    targets: list[Any] = []
    finishing: list[tuple[Any, Any, bool]] = []  # host result, the user's tensor, whether they share memory
    awaited = memory is _BRIDGED  # waits for what was queued on the device before
    # The usual case needs no further check unless elements are bool. This runs once per gradient.
    is_usual = (op is _AVERAGE or op is _SUM) and type(prescale) is float and type(postscale) is float
    line, digest = caller() if name is None else NOBODY
    for tensor, full_name in zip(tensors, names, strict=True):
        try:
            dtype, shape = adapter.describe(tensor)
        except TypeError as error:
            raise UnsupportedError(f"tensor '{full_name}': {clause(error)}.") from None
        if dtype is _BOOL:
            is_usual = False
        checked = cast(ReduceOp, op) if is_usual else _check_reduction(full_name, dtype, op, prescale, postscale)
        host, shared = adapter.host(tensor)
        source = target = adapter.view(host)
        if shared and not call.in_place:
            host = adapter.empty(tensor, shape)
            target = adapter.view(host)
        requests.append(Request(
            Kind.ALLREDUCE, full_name, dtype, shape, checked, 0, prescale, postscale, (), "torch", group, group_size,
            digest, line, memory,
        ))  # fmt: skip
        sources.append(source)
        targets.append(target)
        finishing.append((host, tensor, shared))
        if not shared:
            awaited = True
    finish = _finish_allreduce(adapter, call, finishing, requests, targets)
    submission = Submission(requests, sources, targets, is_usual)
    return PreparedOperation(session, number, submission, adapter.copies(tensors) if awaited else None, finish)


def _finish_allreduce(
    adapter: Adapter,
    call: Allreduce,
    finishing: Sequence[tuple[Any, Any, bool]],
    requests: Sequence[Request],
    targets: Sequence[Any],
) -> Callable[[list[Any]], Any]:
    """Returns the function that makes the result once all is over.

    Args:
        finishing: Of each tensor its host result, the user's tensor, and whether they share memory.
    """
    is_single = not call.grouped and (call.name is None or isinstance(call.name, str))

    def finish(results: list[Any]) -> Any:
        if call.op == ReduceOp.ADASUM:
            for rows, request, target in zip(results, requests, targets, strict=True):
                adasum(rows, request.dtype, call.prescale, call.postscale, target)
        if call.in_place:
            for host, tensor, shared in finishing:
                if not shared:
                    adapter.store(host, tensor)
            outputs = [tensor for _, tensor, _ in finishing]
        else:
            outputs = [adapter.deliver(host, tensor) for host, tensor, _ in finishing]
        return outputs[0] if is_single else outputs

    return finish


class RepeatedAllreduce:
    """Allreduces of one name that are made again and again. What does not change from run to run is made once.

    ``count`` is the number of tensors of a group, None for a single tensor. The other arguments and the errors are
    those of ``allreduce``; Adasum is not supported. ``AllreduceBatch`` submits it.
    """

    __slots__ = ("_described", "_factors", "_group", "_names", "_op", "member", "requests")

    def __init__(
        self,
        session: Session,
        name: str,
        op: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        count: int | None,
    ) -> None:
        number = process_set.number(session)
        #: The process set to which the requests are submitted.
        self.member = session.member_set(number)
        self._names = _names(session, number, "allreduce", name, count)
        self._group = (self._names[0], count) if count else ("", 0)
        self._op = op
        self._factors = prescale, postscale
        self._described: Sequence[tuple[DType, tuple[int, ...]]] = []
        #: The requests that the last ``describe`` made, one for each tensor.
        self.requests: list[Request] = []

    def describe(self, tensors: Sequence[tuple[DType, tuple[int, ...]]]) -> None:
        """Makes ``requests`` for tensors with these element types and shapes."""
        if tensors is self._described or tensors == self._described:
            return
        requests = [
            Request(
                Kind.ALLREDUCE, name, dtype, shape, _check_reduction(name, dtype, self._op, *self._factors), 0,
                *self._factors, (), "torch", *self._group,
            )
            for name, (dtype, shape) in zip(self._names, tensors, strict=True)
        ]  # fmt: skip
        for request in requests:
            check_reduction(request)
        self.requests, self._described = requests, tensors


class _SetBatch:
    """The part of an ``AllreduceBatch`` that goes to one process set."""

    __slots__ = ("_failures", "_left", "_listener", "_owners", "submission")

    def __init__(self, listener: Callable[[list[int], OcommError | None], None]) -> None:
        self.submission = Submission([], [], [], is_checked=True)
        self._owners: list[int] = []  # the owner of each tensor
        self._left: dict[int, int] = {}  # for owners of several tensors: how many of these are not over
        self._failures: dict[int, OcommError] = {}
        self._listener = listener

    def add(
        self, repeated: Sequence[RepeatedAllreduce], owners: Sequence[int], sources: list[int], targets: list[int]
    ) -> None:
        if len(sources) == len(owners):
            self._owners += owners
        else:
            counts = [len(one.requests) for one in repeated]
            self._owners += [owner for owner, count in zip(owners, counts, strict=True) for _ in range(count)]
            self._left |= {owner: count for owner, count in zip(owners, counts, strict=True) if count > 1}
        self.submission.requests += [request for one in repeated for request in one.requests]
        self.submission.sources += sources
        self.submission.targets += targets

    @property
    def owners(self) -> list[int]:
        return list(dict.fromkeys(self._owners))

    def hear(self, positions: Sequence[int], error: OcommError | None) -> None:
        """Takes in that the tensors at these positions are over, and tells the listener which owners are."""
        owners = [self._owners[position] for position in positions]
        if not self._left:
            self._listener(owners, error)
            return
        for owner in owners:
            if error is not None:
                self._failures[owner] = error
            self._left[owner] = self._left.get(owner, 1) - 1
            if not self._left[owner]:
                self._listener([owner], self._failures.get(owner))


class AllreduceBatch:
    """Repeated allreduces that are submitted at once. Each is matched by itself, as if it had been submitted alone.

    Args:
        listener: Called on the background thread with the owners whose operations are over, and the error if they
            failed.
    """

    def __init__(self, listener: Callable[[list[int], OcommError | None], None]) -> None:
        self._listener = listener
        self._batches: dict[MemberSet, _SetBatch] = {}

    def add(
        self, repeated: Sequence[RepeatedAllreduce], owners: Sequence[int], sources: list[int], targets: list[int]
    ) -> None:
        """Adds operations of one process set.

        Args:
            repeated: The operations, at least one.
            owners: The number by which the caller knows each operation.
            sources: Addresses of the operations' tensors, one after the other.
            targets: Addresses of the results, in the same order.
        """
        member = repeated[0].member
        batch = self._batches.get(member)
        if batch is None:
            batch = self._batches[member] = _SetBatch(self._listener)
        batch.add(repeated, owners, sources, targets)

    def submit(self) -> list[int]:
        """Submits all operations of the batch.

        Returns the owners of those that could not be submitted: the operations of a process set are refused together if
        one of them cannot be submitted or the set is closed.
        """
        refused: list[int] = []
        for member, batch in self._batches.items():
            try:
                member.submit(batch.submission, batch.hear)
            except OcommError:
                refused += batch.owners
        return refused


def compressed_allreduce(
    session: Session, number: int, name: str, array: np.ndarray, hierarchical: bool | Literal["auto"] = "auto"
) -> np.ndarray:
    """Averages a float32 array over process set ``number`` with 1 bit per element, and keeps the errors of ``name`` for
    the next call. Collective; waits.

    Returns a new array of the same shape. Raises InvalidRequestError for another dtype, or another shape than before,
    MismatchError, NonFiniteError and StallError.
    """
    if array.dtype != np.float32:
        raise InvalidRequestError(
            f"tensor '{name}': compressed_allreduce takes float32, got {array.dtype}; convert it first."
        )
    member = session.member_set(number)
    if name not in member.compressed:
        if member.compressed_channel is None:
            member.compressed_channel = session.open_channel(number, "compressed_allreduce", 0, "channel")
        nodes = session.nodes(number, hierarchical)
        said = f"shape {array.shape} {array.dtype}" + ("" if nodes.is_flat else ", hierarchical")
        session.agree(number, f"compressed_allreduce.{name}", said)
        member.compressed[name] = OneBitAllreduce(
            member.compressed_channel,
            name,
            array.shape,
            member.rank,
            member.ranks,
            nodes,
            session.settings.segment_nbytes,
            session.watch(number, name),
        )
    return member.compressed[name](array, session.settings.stall_shutdown_s)


def allgather(
    session: Session,
    adapter: Adapter,
    tensors: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
    grouped: bool,
    called: Caller = NOBODY,
) -> Operation:
    """Concatenates the tensors of all ranks along the first dimension, in rank order.

    The operation's result is a pair (tensor, rows of every rank), or a list of pairs for a group. ``called`` is the
    caller's line if ``name`` was made up because the user gave none.
    """
    number = process_set.number(session)
    session.member_set(number)
    names = _names(session, number, "allgather", name, len(tensors) if grouped else None)
    group, group_size = (names[0], len(tensors)) if grouped and tensors else ("", 0)
    submission, outputs = Submission([], [], []), []
    line, digest = caller() if name is None else called
    for tensor, full_name in zip(tensors, names, strict=True):
        dtype, shape = _describe(adapter, tensor, full_name)
        _need_dimension("allgather", full_name, shape)
        result = _Result(adapter, tensor)
        request = Request(
            Kind.ALLGATHER, full_name, dtype, shape, group=group, group_size=group_size, digest=digest, detail=line
        )
        submission.add(request, adapter.view(adapter.host(tensor)[0]), result)
        outputs.append((result, tensor))

    def finish(rows: list[Any]) -> Any:
        found = [
            (adapter.deliver(result.tensor, tensor), counts)
            for (result, tensor), counts in zip(outputs, rows, strict=True)
        ]
        return found if grouped else found[0]

    return PreparedOperation(session, number, submission, adapter.copies(tensors), finish).submit()


def broadcast(
    session: Session,
    adapter: Adapter,
    tensor: Any,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    in_place: bool,
    order: str = "torch",
    called: Caller = NOBODY,
) -> Operation:
    """Sends the tensor of the rank ``root_rank`` of the job to every rank of the set; ``order`` is the order of its
    elements.

    ``called`` is the caller's line if ``name`` was made up because the user gave none.
    """
    number = process_set.number(session)
    session.member_set(number)
    (full_name,) = _names(session, number, "broadcast", name, None)
    root = root_in_set(session, number, root_rank, full_name)
    dtype, shape = _describe(adapter, tensor, full_name)
    host, shared = adapter.host(tensor)
    source = target = adapter.view(host)
    if shared and not in_place:
        host = adapter.empty(tensor, shape)
        target = adapter.view(host)
    line, digest = caller() if name is None else called
    request = Request(Kind.BROADCAST, full_name, dtype, shape, root=root, order=order, digest=digest, detail=line)

    def finish(_: list[Any]) -> Any:
        if not in_place:
            return adapter.deliver(host, tensor)
        if not shared:
            adapter.store(host, tensor)
        return tensor

    submission = Submission.of(request, source, target)
    return PreparedOperation(session, number, submission, adapter.copies([tensor]), finish).submit()


def root_in_set(session: Session, number: int, root_rank: int, name: str) -> int:
    """Returns the position in the set of a rank of the job. Raises InvalidRequestError if that rank is not in the
    set.
    """
    ranks = session.set_ranks[number]
    if root_rank not in ranks:
        raise InvalidRequestError(
            f"tensor '{name}': broadcast received invalid root rank {root_rank} for provided process set; process set "
            f"{number} has the world ranks {_spell(ranks)}."
        )
    return ranks.index(root_rank)


def _spell(ranks: tuple[int, ...]) -> str:
    return f"0..{len(ranks) - 1}" if len(ranks) > 1 and ranks == tuple(range(len(ranks))) else str(list(ranks))


def alltoall(
    session: Session,
    adapter: Adapter,
    tensor: Any,
    splits: Any,
    name: str | None,
    process_set: ProcessSet,
) -> Operation:
    """Sends rows to the ranks and receives theirs. The operation's result is (tensor, rows received from every rank).

    Args:
        splits: Number of rows for each rank of the set, a sequence or 1-d array of whole numbers; None for equal parts.
    """
    number = process_set.number(session)
    size = session.member_set(number).size
    (full_name,) = _names(session, number, "alltoall", name, None)
    dtype, shape = _describe(adapter, tensor, full_name)
    _need_dimension("alltoall", full_name, shape)
    parts = _splits(splits, shape[0], size, full_name)
    result = _Result(adapter, tensor)
    # Rows beyond the splits are not sent.
    line, digest = caller() if name is None else NOBODY
    rows = (sum(parts), *shape[1:])
    request = Request(Kind.ALLTOALL, full_name, dtype, rows, splits=parts, digest=digest, detail=line)
    submission = Submission.of(request, adapter.view(adapter.host(tensor)[0])[: request.nbytes], result)

    def finish(received: list[Any]) -> Any:
        return adapter.deliver(result.tensor, tensor), received[0]

    return PreparedOperation(session, number, submission, adapter.copies([tensor]), finish).submit()


def _splits(splits: Any, rows: int, size: int, name: str) -> tuple[int, ...]:
    if splits is None:
        if rows % size:
            raise InvalidRequestError(
                f"tensor '{name}': splits not provided, but first dimension of tensor is not an even multiple of the "
                f"number of workers ({rows} rows, {size} ranks)."
            )
        return (rows // size,) * size
    array = np.asarray(splits)
    if array.ndim != 1:
        raise InvalidRequestError(f"tensor '{name}': alltoall expects a 1D splits tensor, got shape {array.shape}.")
    if array.dtype.kind not in "iu" and array.size:
        raise InvalidRequestError(f"tensor '{name}': alltoall expects splits of whole numbers, got {array.dtype.name}.")
    parts = tuple(int(part) for part in array)
    if len(parts) != size:
        raise InvalidRequestError(
            f"tensor '{name}': Number of entries in splits does not equal number of workers ({len(parts)} entries, "
            f"{size} ranks)."
        )
    if min(parts) < 0:
        raise InvalidRequestError(f"tensor '{name}': splits must not be negative, got {list(parts)}.")
    if sum(parts) > rows:
        raise InvalidRequestError(
            f"tensor '{name}': Sum of splits entries is greater than the first dimension of tensor ({sum(parts)} > "
            f"{rows})."
        )
    if max(parts) > _MOST_ROWS:  # the receiver could not count them
        raise InvalidRequestError(
            f"tensor '{name}': splits {list(parts)} send more than {_MOST_ROWS} rows to one rank, and counts of "
            f"received rows are int32; reshape the tensor to fewer, longer rows."
        )
    return parts


def reducescatter(
    session: Session,
    adapter: Adapter,
    tensors: Sequence[Any],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    grouped: bool,
) -> Operation:
    """Reduces tensors and gives each rank a share of the rows; the first ranks get the remainder. Only Average and
    Sum.
    """
    number = process_set.number(session)
    session.member_set(number)
    names = _names(session, number, "reducescatter", name, len(tensors) if grouped else None)
    group, group_size = (names[0], len(tensors)) if grouped and tensors else ("", 0)
    submission, outputs = Submission([], [], []), []
    line, digest = caller() if name is None else NOBODY
    for tensor, full_name in zip(tensors, names, strict=True):
        dtype, shape = _describe(adapter, tensor, full_name)
        _need_dimension("reducescatter", full_name, shape)
        checked = _check_reduction(full_name, dtype, op, prescale, postscale)
        if checked not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise UnsupportedError(f"tensor '{full_name}': reducescatter has Average and Sum, not {checked.label}.")
        result = _Result(adapter, tensor)
        request = Request(
            Kind.REDUCESCATTER, full_name, dtype, shape, checked, 0, prescale, postscale, (), "torch",
            group, group_size, digest, line,
        )  # fmt: skip
        submission.add(request, adapter.view(adapter.host(tensor)[0]), result)
        outputs.append((result, tensor))

    def finish(_: list[Any]) -> Any:
        found = [adapter.deliver(result.tensor, tensor) for result, tensor in outputs]
        return found if grouped else found[0]

    return PreparedOperation(session, number, submission, adapter.copies(tensors), finish).submit()


def barrier(session: Session, process_set: ProcessSet) -> None:
    """Returns once every rank of the set has called it."""
    number = process_set.number(session)
    session.member_set(number)
    request = Request(Kind.BARRIER, session.automatic_name("barrier", number))
    session.submit(number, Submission.of(request)).wait()


def join(session: Session, process_set: ProcessSet) -> int:
    """Takes part in what other ranks of the set ask for until all have joined. Returns the rank of the job that joined
    last.
    """
    number = process_set.number(session)
    session.member_set(number)
    return session.submit(number, Submission.of(Request(Kind.JOIN, JOIN_NAME))).wait()[0]


def broadcast_object(session: Session, obj: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
    """Returns the root's object on every rank of the set; it travels pickled (by cloudpickle if that is installed)."""
    number = process_set.number(session)
    called = caller() if name is None else NOBODY
    if name is None:
        session.member_set(number)
        name = session.automatic_name("broadcast_object", number)
    root_in_set(session, number, root_rank, name)
    is_root = session.require_topology().rank == root_rank
    data = np.frombuffer(_dumps(obj), np.uint8) if is_root else NOTHING
    length = np.array([data.size], np.int64)
    broadcast(session, NUMPY, length, root_rank, name + ".size", process_set, True, called=called).wait()
    if not is_root:
        data = np.empty(int(length[0]), np.uint8)
    broadcast(session, NUMPY, data, root_rank, name + ".data", process_set, True).wait()
    return obj if is_root else pickle.loads(data.data)


def allgather_object(session: Session, obj: Any, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Returns the objects of all ranks of the set in rank order; they travel pickled (by cloudpickle if that is
    installed).

    Ranks that have joined contribute none.
    """
    number = process_set.number(session)
    called = caller() if name is None else NOBODY
    if name is None:
        session.member_set(number)
        name = session.automatic_name("allgather_object", number)
    data = np.frombuffer(_dumps(obj), np.uint8)
    every, counts = allgather(session, NUMPY, [data], name, process_set, False, called).wait()
    ends = list(itertools.accumulate(counts))
    return [pickle.loads(every[end - count : end].data) for end, count in zip(ends, counts, strict=True) if count]


def _dumps(obj: Any) -> bytes:
    """Pickles an object, with cloudpickle if it is installed, because that also takes lambdas and classes of the main
    script.
    """
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(obj)
    return cloudpickle.dumps(obj)


def start_message(member: MemberSet, name: str, buffer: Bytes, source: int, destination: int) -> Handle:
    """Sends ``buffer`` from rank ``source`` of a set to rank ``destination``; called by these two alone.

    Args:
        member: The set on this rank.
        name: The same on both, and of no other message under way: it says which calls belong together.
        buffer: Contiguous bytes, equally many on both; what is sent, or where it arrives.
        source: The set's number of the rank that sends.
        destination: That of the rank that receives, another one.

    Returns:
        A handle; the buffer belongs to the runtime until it is over. It raises MismatchError where the sizes differ.
    """
    request = Request(
        Kind.MESSAGE, name, shape=(buffer.nbytes,), root=source, splits=(destination,), detail="a message"
    )
    return member.submit(Submission.of(request, buffer, buffer))
