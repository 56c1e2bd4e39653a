"""The backend "ocomm" of torch.distributed: process groups of CPU tensors on ocomm's plans and network.

``import ocomm_torch.distributed`` registers the backend, and so does the entry point of an installed ocomm. After that
``torch.distributed.init_process_group("ocomm")`` works in every process that an MPI launcher has started.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import queue
import secrets
import socket
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store, Work

from ocomm import api, operations
from ocomm import session as sessions
from ocomm.collectives import dense
from ocomm.collectives.dense import Context
from ocomm.collectives.plan import Plan, Stage
from ocomm.errors import (
    InvalidRequestError,
    LaunchError,
    MismatchError,
    OcommError,
    StallError,
    UnsupportedError,
    clause,
)
from ocomm.kernels.base import Bytes
from ocomm.kernels.reference import reject_unsupported
from ocomm.operations import global_process_set
from ocomm.ordered import Build, Call, Exchange, OrderedChannel
from ocomm.runtime.handle import Handle
from ocomm.runtime.own_address import ways_to_this_host
from ocomm.session import Session
from ocomm.torch_backend import NAME, register
from ocomm.types import DType, ReduceOp
from ocomm_torch.compiling import leave_hooks_alone
from ocomm_torch.mpi_ops import TORCH

_log = logging.getLogger("ocomm")
_TORCH_OP = dist.ReduceOp.RedOpType
_OPS = {
    _TORCH_OP.SUM: ReduceOp.SUM,
    _TORCH_OP.AVG: ReduceOp.AVERAGE,
    _TORCH_OP.MIN: ReduceOp.MIN,
    _TORCH_OP.MAX: ReduceOp.MAX,
    _TORCH_OP.PRODUCT: ReduceOp.PRODUCT,
}
_BITWISE: dict[Any, Callable[..., Tensor]] = {
    _TORCH_OP.BAND: torch.bitwise_and,
    _TORCH_OP.BOR: torch.bitwise_or,
    _TORCH_OP.BXOR: torch.bitwise_xor,
}
#: Seconds for which a rank that has failed waits until the other ranks say what they have called.
_WORDS_S = 1.0
#: Seconds for an answer of one of the addresses of rank 0's host; and between two rounds over them.
_WAY_S, _POLL_S = 2.0, 0.1
#: In a thread that completes futures, ``group`` is the process group of the futures. Collectives that callbacks start
#: there are on a channel of their own.
_completing = threading.local()
#: A word that no other job has, by the session of this one.
_tokens: weakref.WeakKeyDictionary[Session, str] = weakref.WeakKeyDictionary()


# Tensors


def _host(tensor: Tensor, operation: str) -> Tensor:
    """Returns the tensor without autograd. Raises NotImplementedError unless it is dense and in the host's memory."""
    if not tensor.is_cpu:
        raise NotImplementedError(
            f"{operation}: the tensor is on {tensor.device}, and backend 'ocomm' has collectives of CPU tensors only. "
            "Use backend 'nccl' for tensors of a GPU, in a group of its own."
        )
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"{operation}: backend 'ocomm' has no {tensor.layout} tensors; call to_dense(), or use gloo."
        )
    return tensor.detach() if tensor.requires_grad else tensor


def _bytes(tensor: Tensor) -> Bytes:
    """Returns the memory of a contiguous tensor of any dtype."""
    if tensor.dtype is torch.uint8:
        return tensor.numpy().reshape(-1)
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype)[6:]  # without "torch."


class _Out:
    """The memory for a result: the tensor's own, or that of a contiguous copy, which ``store`` writes back.

    ``filled``: the copy begins with the values of the tensor.
    """

    __slots__ = ("contiguous", "tensor")

    def __init__(self, tensor: Tensor, operation: str, filled: bool = True) -> None:
        self.tensor = _host(tensor, operation)
        self.contiguous = self.tensor
        if not tensor.is_contiguous():
            self.contiguous = self.tensor.contiguous() if filled else torch.empty(tensor.shape, dtype=tensor.dtype)

    @property
    def bytes(self) -> Bytes:
        return _bytes(self.contiguous)

    def store(self) -> None:
        if self.contiguous is not self.tensor:
            self.tensor.copy_(self.contiguous)


def _joined(tensors: Sequence[Tensor], operation: str) -> Tensor:
    """Returns the bytes of the tensors, one tensor after the other, in new memory."""
    return torch.cat([_host(t, operation).contiguous().reshape(-1).view(torch.uint8) for t in tensors])


class _Parts:
    """The memory for results that arrive one after the other in ``buffer``. ``store`` copies them to the tensors."""

    __slots__ = ("buffer", "tensors")

    def __init__(self, tensors: Sequence[Tensor], operation: str) -> None:
        self.tensors = [_host(tensor, operation) for tensor in tensors]
        self.buffer = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)

    def store(self) -> None:
        start = 0
        for tensor in self.tensors:
            part = self.buffer[start : start + tensor.nbytes]
            tensor.copy_(
                (part if part.storage_offset() % 16 == 0 else part.clone()).view(tensor.dtype).view(tensor.shape)
            )
            start += tensor.nbytes


def _reduction(op: Any, tensors: Sequence[Tensor], operation: str) -> tuple[ReduceOp, DType]:
    """Returns a reduction and an element type in ocomm's terms.

    Raises NotImplementedError or UnsupportedError for those that ocomm does not have, and InvalidRequestError if the
    tensors have several dtypes.
    """
    kind = getattr(op, "op", op)
    if kind not in _OPS:
        raise NotImplementedError(f"{operation}: backend 'ocomm' has no reduction {kind}.")
    try:
        dtype, _ = TORCH.describe(tensors[0])
        reject_unsupported(dtype, _OPS[kind], 1.0, 1.0)
    except TypeError as error:
        raise UnsupportedError(f"{operation} with backend 'ocomm': {clause(error)}.") from None
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        raise InvalidRequestError(f"{operation}: the tensors of one call must have one dtype.")
    return _OPS[kind], dtype


# Work


def _seconds(timeout: Any) -> float | None:
    """Returns the seconds of a caller's timeout; None for the value that torch passes if the caller has given none."""
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else 0.0
    return seconds if seconds > 0 else None


class _Future(torch.futures.Future):
    """A future whose callbacks run on the group's completing thread, in the order in which they were added.

    A future of Torch's runs a callback in the thread that adds it if the future is complete by then, else in the thread
    that completes the future. Which of the two it is differs between ranks, and so does the order of the collectives
    that callbacks start.

    Args:
        group: The group whose thread completes it.
        result: Waits for what the future is of, and returns its result, or raises its error.
    """

    def __init__(self, group: OcommProcessGroup, result: Callable[[], Any]) -> None:
        super().__init__()
        self._group = group
        self._result: Callable[[], Any] | None = result

    def complete(self) -> None:
        """Gives the future its result or error. A second call does nothing."""
        result, self._result = self._result, None
        if result is None:
            return
        try:
            found = result()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(found)

    def wait(self) -> Any:
        # A callback that waits for a future whose turn comes after its own would wait for itself.
        if self._group.is_completing():
            self.complete()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> _Future:
        def result() -> Any:
            self.complete()
            return callback(self)

        following = _Future(self._group, result)
        self._group.complete_later(following.complete)
        return following

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._group.complete_later(lambda: callback(self))


class _Work(Work):
    """A collective under way. ``finish`` copies its results to the caller's tensors. A future is made on request."""

    def __init__(
        self,
        group: OcommProcessGroup,
        exchange: Exchange | _Messages | _Together,
        result: list[Any],
        finish: Callable[[], None],
    ) -> None:
        super().__init__()
        self._group = group
        self._exchange = exchange
        self._result = result
        self._finish: Callable[[], None] | None = finish
        self._lock = threading.Lock()
        self._future: _Future | None = None
        group.collect(self)

    def wait(self, timeout: Any = None) -> bool:
        self._exchange.wait(_seconds(timeout))
        self._store()
        return True

    def _store(self) -> None:
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._exchange.poll():
            return False
        if self._exchange.error is None:
            self._store()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._exchange.error is None

    def exception(self) -> BaseException | None:
        return self._exchange.error if self.is_completed() else None

    def result(self) -> list[Any]:
        self.wait()
        return self._result

    def source_rank(self) -> int:
        return -1

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = _Future(self._group, self.result)
        self._group.complete_later(future.complete)
        return future

    getFuture = get_future


class _Messages:
    """Messages under way between two ranks, with the interface of ``Exchange``."""

    def __init__(self, group: OcommProcessGroup, handles: Sequence[Handle], what: str) -> None:
        self._group = group
        self._handles = handles
        self._what = what
        self.error: OcommError | None = None

    def poll(self) -> bool:
        if not all(handle.poll() for handle in self._handles):
            return False
        with contextlib.suppress(OcommError):
            self.wait()
        return True

    def wait(self, seconds: float | None = None) -> None:
        if self.error is not None:
            raise self.error
        limit = seconds or self._group.timeout_s or None
        try:
            for handle in self._handles:
                handle.wait(limit)
        except TimeoutError:
            self.error = StallError(
                f"{self._what} was not over within the timeout of {limit:g} s; the other rank has not come."
            )
            raise self.error from None
        except OcommError as error:
            self.error = error
            raise


class _Together:
    """Several calls under way, with the interface of ``Exchange``."""

    def __init__(self, works: Sequence[_Work]) -> None:
        self._works = works

    @property
    def error(self) -> BaseException | None:
        return next(filter(None, (work.exception() for work in self._works)), None)

    def poll(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, seconds: float | None = None) -> None:
        for work in self._works:
            work.wait(None if seconds is None else datetime.timedelta(seconds=seconds))


class _Mailbox:
    """Messages that a rank has sent to itself and not yet received, by tag."""

    def __init__(self) -> None:
        self.sent: dict[int, deque[Tensor]] = defaultdict(deque)


# The process group


class OcommProcessGroup(ProcessGroup):
    """A process group of torch.distributed. Creating it is collective over its members.

    All ranks call its collectives in the same order. Two ranks send and receive the messages of one direction and tag
    in the same order. A collective raises

    - MismatchError if the ranks have called different things,
    - StallError if it is not over within the group's timeout; the message names the ranks that have not come,
    - PeerError if a rank has failed or left.

    After such an error the group can do nothing more.
    """

    def __init__(
        self, session: Session, store: Store, rank: int, ranks: Sequence[int], group_id: str, timeout_s: float
    ) -> None:
        super().__init__(rank, len(ranks))
        self._session = session
        self._store = store
        self._ranks = tuple(ranks)  # world ranks, by rank of the group; all other ranks here are of the group
        self._rank, self._size = rank, len(ranks)
        self._group_name = group_id
        self._group_description = "undefined"
        self.timeout_s = timeout_s
        order = sorted(self._ranks)
        if order != list(self._ranks):
            raise InvalidRequestError(
                f"backend 'ocomm' has groups in ascending order of their ranks only, got {list(self._ranks)}."
            )
        self._number = session.add_members(order, f"group {group_id!r}")
        self._member = session.member_set(self._number)
        self._channels: dict[str, OrderedChannel] = {}
        self._open_channel("")
        self._sent: dict[tuple[int, int, int], int] = defaultdict(int)
        self._mailbox = _Mailbox()
        self._futures: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._futures_lock = threading.Lock()
        #: What was started since torch has begun to coalesce calls; None if it does not.
        self._coalesced: list[_Work] | None = None
        self._is_closed = False
        self._is_checked = False

    # What torch asks of a group

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._group_description

    def setGroupDesc(self, description: str) -> None:
        self._group_description = description

    @property
    def group_name(self) -> str:
        return self._group_name

    @property
    def group_desc(self) -> str:
        return self._group_description

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, description: str) -> None:
        self._group_description = description

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend_name(self) -> str:
        return NAME

    def _get_backend(self, device: torch.device) -> OcommProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"backend 'ocomm' is for CPU tensors, not for {device}; use 'nccl' there.")
        return self

    def get_group_store(self) -> Store:
        return self._store

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        self.timeout_s = timeout.total_seconds()
        for channel in self._channels.values():
            channel.timeout_s = self.timeout_s

    set_timeout = _set_default_timeout

    def shutdown(self) -> None:
        """Leaves the group. Torch calls it in ``destroy_process_group``. Not collective: waits for no other rank."""
        if self._is_closed:
            return
        with self._futures_lock:
            self._is_closed = True
            if self._futures is not None:
                self._futures.put(None)
        if self._session.is_initialized:
            self._session.remove_members(self._number)

    abort = shutdown

    # Channels and futures

    def _open_channel(self, kind: str) -> OrderedChannel:
        name = f"torch.distributed group {self._group_name!r} of ranks {list(self._ranks)}{kind}"
        channel = OrderedChannel(self._session, self._number, name, self.timeout_s, lambda said: self._tell(kind, said))
        self._channels[kind] = channel
        return channel

    @property
    def _channel(self) -> OrderedChannel:
        """The channel of this thread's calls. Callbacks of futures have a channel of their own.

        The calls of callbacks have the same order on all ranks, and so have the calls of other threads. Between the two
        there is no order that is the same on all ranks.
        """
        if not self.is_completing():
            return self._channels[""]
        kind = ", callbacks"
        return self._channels.get(kind) or self._open_channel(kind)

    def is_completing(self) -> bool:
        """True in the thread that completes the group's futures."""
        return getattr(_completing, "group", None) is self

    def collect(self, work: _Work) -> None:
        """Remembers a call that torch coalesces with others, for which one ``wait`` is enough."""
        if self._coalesced is not None:
            self._coalesced.append(work)

    def complete_later(self, complete: Callable[[], None]) -> None:
        """Makes the group's completing thread call ``complete``, after everything that it was asked to call before.

        The order of these calls is the same on all ranks. In the completing thread itself, ``complete`` is called at
        once, because the caller may wait for its result.
        """
        with self._futures_lock:
            is_now = self._is_closed or self.is_completing()
            if not is_now:
                if self._futures is None:
                    self._futures = queue.SimpleQueue()
                    threading.Thread(target=self._complete, name="ocomm-futures", daemon=True).start()
                self._futures.put(complete)
        if is_now:
            complete()

    def _complete(self) -> None:
        assert self._futures is not None
        _completing.group = self
        while (complete := self._futures.get()) is not None:
            try:
                complete()
            except Exception:
                _log.exception("a callback of a future of process group %r failed", self._group_name)
            del complete

    def _tell(self, kind: str, said: str) -> Mapping[int, str]:
        """Tells the other ranks through the store what this rank has called. Returns what they say within a second."""
        heard: dict[int, str] = {}
        try:
            # torchrun starts jobs again, and keeps the store with what an earlier job has said.
            prefix = f"ocomm/{_tokens.get(self._session, '')}/failed{kind}"
            keys = {rank: f"{prefix}/{rank}" for rank in range(self._size)}
            self._store.set(keys[self._rank], said)
            end = time.monotonic() + _WORDS_S
            missing = set(keys) - {self._rank}
            while missing and time.monotonic() < end:
                for rank in list(missing):
                    if self._store.check([keys[rank]]):
                        heard[rank] = self._store.get(keys[rank]).decode()
                        missing.discard(rank)
                time.sleep(0.02)
        except Exception:  # the store has ended with the rank that hosts it; the caller has its own error
            return heard
        return heard

    def _require(self, operation: object) -> None:
        """Raises InvalidRequestError if the group was destroyed, NotImplementedError if it has other backends, too."""
        if self._is_closed:
            raise InvalidRequestError(f"{operation}: process group {self._group_name!r} was destroyed.")
        if self._is_checked:
            return
        # Torch registers a group's backends after it has made the group, so they are checked at the first call.
        config = str(dist.distributed_c10d._world.pg_backend_config.get(self, f"cpu:{NAME}"))
        others = [part for part in config.split(",") if part.split(":")[-1] != NAME]
        if others:
            raise NotImplementedError(
                f"{operation}: this group was made with the backends {config}, and a backend in Python, as 'ocomm' is, "
                f"takes the place of all of them: {', '.join(others)} would not be used. Make a group of each backend."
            )
        self._is_checked = True

    def _start(
        self,
        call: Call,
        sources: Sequence[Bytes],
        targets: Sequence[Bytes],
        build: Build,
        result: list[Any],
        *stores: _Out | _Parts,
        own: tuple[int, ...] = (),
    ) -> _Work:
        self._require(call)
        exchange = self._channel.start(call, sources, targets, build, own)

        def finish() -> None:
            for store in stores:
                store.store()

        return _Work(self, exchange, result, finish)

    # Collectives

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None, *_: Any) -> Work:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        return self._allreduce(given, opts, "allreduce")

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._allreduce(list(tensors), opts, "allreduce_coalesced")

    def _allreduce(self, tensors: list[Tensor], opts: Any, operation: str) -> Work:
        op = _op_of(opts)
        if op in _BITWISE:
            return self._bitwise(tensors, _BITWISE[op], operation)
        if len(tensors) == 1 and tensors[0].layout is torch.sparse_coo:
            return self._sparse_sum(tensors[0], op, tensors)
        reduction, dtype = _reduction(op, tensors, operation)
        outs = [_Out(tensor, operation) for tensor in tensors]
        buffers = [out.bytes for out in outs]
        call = Call(operation, dtype.label, tuple([tensor.numel() for tensor in tensors]), reduction.label)
        return self._start(call, buffers, buffers, _sum(reduction, dtype), tensors, *outs)

    def _bitwise(self, tensors: list[Tensor], combine: Callable[..., Tensor], operation: str) -> Work:
        """Starts a bitwise reduction: every rank gathers the tensors of all ranks, and combines them by itself."""
        for tensor in tensors:
            if tensor.is_floating_point() or tensor.is_complex():
                raise InvalidRequestError(
                    f"{operation}: {combine.__name__} is for integers and bool, not {_dtype(tensor)}."
                )
        gathered = [torch.empty((self._size, *tensor.shape), dtype=tensor.dtype) for tensor in tensors]

        class Combined:
            def store(self) -> None:
                for tensor, rows in zip(tensors, gathered, strict=True):
                    result = rows[0]
                    for row in rows[1:]:
                        result = combine(result, row)
                    tensor.detach().copy_(result)

        call = Call(operation, _dtype(tensors[0]), tuple([t.numel() for t in tensors]), combine.__name__)
        sources = [_bytes(_host(tensor, operation).contiguous()) for tensor in tensors]
        targets = [_bytes(rows) for rows in gathered]
        return self._start(call, sources, targets, _gather_equal, tensors, Combined())  # type: ignore[arg-type]

    def _sparse_sum(self, tensor: Tensor, op: Any, result: list[Tensor]) -> Work:
        """Starts a sum of sparse COO tensors: every rank gathers the elements of all ranks, and adds them by itself.

        Waits until all ranks have said how many elements they have, because plans are of known sizes.
        """
        operation = "allreduce of sparse tensors"
        if op != _TORCH_OP.SUM or not tensor.is_cpu:
            raise NotImplementedError(
                f"{operation}: backend 'ocomm' has sums of tensors of the CPU, not {op} of tensors of {tensor.device}; "
                "call to_dense()."
            )
        mine = tensor.detach().coalesce()
        form = torch.tensor([mine.sparse_dim(), *mine.shape, mine.values().shape[0]])
        forms = torch.empty((self._size, len(form)), dtype=form.dtype)
        self._gather_all(f"form of an {operation}", [form], [forms], []).wait()
        for rank, other in enumerate(forms[:, :-1].tolist()):
            if other != form[:-1].tolist():
                raise MismatchError(
                    f"{operation}: rank {self._ranks[self._rank]} has shape {tuple(mine.shape)}, of which "
                    f"{mine.sparse_dim()} sparse dimensions; rank {self._ranks[rank]} {tuple(other[1:])}, of which "
                    f"{other[0]}. All ranks must have the same."
                )
        counts: list[int] = forms[:, -1].tolist()
        sources = [mine.indices().t().contiguous(), mine.values().contiguous()]
        gathered = [torch.empty((sum(counts), *source.shape[1:]), dtype=source.dtype) for source in sources]
        widths = [rows[:1].nbytes for rows in gathered]

        class Summed:
            def store(self) -> None:
                indices, values = gathered
                with torch.no_grad():
                    tensor.copy_(
                        torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()
                    )

        def build(context: Context, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> Plan:
            each = zip(sources, targets, widths, strict=True)
            return dense.allgather(context, [(s, t, [n * width for n in counts]) for s, t, width in each])

        call = Call(operation, _dtype(mine.values()), tuple(counts), ReduceOp.SUM.label)
        buffers = [_bytes(source) for source in sources], [_bytes(rows) for rows in gathered]
        return self._start(call, *buffers, build, result, Summed())  # type: ignore[arg-type]

    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any = None, *_: Any) -> Work:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        out = _Out(given[0], "broadcast")
        call = Call("broadcast", _dtype(given[0]), (given[0].numel(),), root=root)

        def build(context: Context, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> Plan:
            return dense.broadcast(context, sources[0], targets[0], root)

        buffer = [out.bytes]
        return self._start(call, buffer, buffer, build, given, out)

    def reduce(self, tensors: list[Tensor] | Tensor, opts: Any = None, *_: Any) -> Work:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        reduction, dtype = _reduction(_op_of(opts), given, "reduce")
        root = opts.rootRank
        out = _Out(given[0], "reduce")
        call = Call("reduce", dtype.label, (given[0].numel(),), reduction.label, root)
        target = out.bytes if root == self._rank else _bytes(torch.empty_like(out.contiguous))
        return self._start(call, [out.bytes], [target], _sum(reduction, dtype), given, out)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if len(inputs) != 1 or len(outputs[0]) != self._size:
            raise InvalidRequestError(
                f"allgather needs one input and {self._size} outputs, one for each rank of the group; got "
                f"{len(inputs)} and {len(outputs[0])}."
            )
        source, results = inputs[0], list(outputs[0])
        _same_size("allgather", results, source)
        parts = _Parts(results, "allgather")
        return self._gather_all("allgather", [source], [parts.buffer], outputs[0], parts)

    def allgather_coalesced(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        if len(output_lists) != self._size or any(len(outputs) != len(inputs) for outputs in output_lists):
            raise InvalidRequestError(
                f"allgather_coalesced needs {self._size} lists of {len(inputs)} outputs, one list for each rank of the "
                f"group; got lists of {[len(outputs) for outputs in output_lists]}."
            )
        for k, source in enumerate(inputs):
            _same_size("allgather_coalesced", [outputs[k] for outputs in output_lists], source)
        parts = [_Parts([outputs[k] for outputs in output_lists], "allgather_coalesced") for k in range(len(inputs))]
        flat = [tensor for outputs in output_lists for tensor in outputs]
        return self._gather_all("allgather_coalesced", inputs, [part.buffer for part in parts], flat, *parts)

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        return self._all_gather_singles("all_gather_into_tensor", [output], [source])

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._all_gather_singles("all_gather_into_tensor_coalesced", outputs, inputs)

    def _all_gather_singles(self, operation: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        for output, source in zip(outputs, inputs, strict=True):
            if output.dtype != source.dtype or output.numel() != self._size * source.numel():
                raise InvalidRequestError(
                    f"{operation}: the output has {output.numel()} elements of {_dtype(output)}, and needs "
                    f"{self._size} times the {source.numel()} of {_dtype(source)} of the input."
                )
        outs = [_Out(output, operation, filled=False) for output in outputs]
        return self._gather_all(operation, inputs, [out.contiguous for out in outs], list(outputs), *outs)

    def _gather_all(
        self,
        operation: str,
        inputs: Sequence[Tensor],
        gathered: Sequence[Tensor],
        result: list[Any],
        *stores: _Out | _Parts,
    ) -> Work:
        sources = [_bytes(_host(tensor, operation).contiguous()) for tensor in inputs]
        call = Call(operation, _dtypes(inputs), tuple([tensor.numel() for tensor in inputs]))
        targets = [_bytes(tensor) for tensor in gathered]
        return self._start(call, sources, targets, _gather_equal, result, *stores)

    def gather(self, outputs: Any, inputs: list[Tensor], opts: Any = None) -> Work:
        root, source = opts.rootRank, inputs[0]
        call = Call("gather", _dtype(source), (source.numel(),), root=root)
        results = list(outputs[0]) if root == self._rank else []
        if root == self._rank:
            self._one_for_each("gather", results)
            _same_size("gather", results, source)
        parts = _Parts(results, "gather")
        table = [[source.nbytes * (peer == root) for peer in range(self._size)] for _ in range(self._size)]
        sources = [_bytes(_host(source, "gather").contiguous())]
        return self._start(call, sources, [_bytes(parts.buffer)], _exchange(table), results, parts)

    def _one_for_each(self, operation: str, tensors: Sequence[Tensor]) -> None:
        """Raises InvalidRequestError unless there is one tensor for each rank."""
        if len(tensors) != self._size:
            raise InvalidRequestError(
                f"{operation}: rank {self._rank} needs {self._size} tensors, one for each rank of the group; got "
                f"{len(tensors)}."
            )

    def scatter(self, outputs: list[Tensor], inputs: Any, opts: Any = None) -> Work:
        root, output = opts.rootRank, outputs[0]
        call = Call("scatter", _dtype(output), (output.numel(),), root=root)
        source = torch.empty(0, dtype=torch.uint8)
        if root == self._rank:
            self._one_for_each("scatter", inputs[0])
            _same_size("scatter", list(inputs[0]), output)
            source = _joined(inputs[0], "scatter")
        table = [[output.nbytes * (sender == root)] * self._size for sender in range(self._size)]
        out = _Out(output, "scatter", filled=False)
        return self._start(call, [_bytes(source)], [out.bytes], _exchange(table), outputs, out)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        output, parts = outputs[0], list(inputs[0])
        if len(parts) != self._size or parts[self._rank].numel() != output.numel():
            raise InvalidRequestError(
                f"reduce_scatter needs {self._size} inputs, one for each rank, and an output as large as this rank's; "
                f"got {len(parts)}, and {output.numel()} elements."
            )
        whole = _joined(parts, "reduce_scatter").view(output.dtype)
        sizes = [part.numel() for part in parts]
        return self._scatter_sums("reduce_scatter", [output], [whole], [sizes], opts)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter_singles("reduce_scatter_tensor", [output], [source], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        return self._reduce_scatter_singles("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    def _reduce_scatter_singles(
        self, operation: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        for output, source in zip(outputs, inputs, strict=True):
            if source.numel() != self._size * output.numel() or source.dtype != output.dtype:
                raise InvalidRequestError(
                    f"{operation}: the input has {source.numel()} elements of {_dtype(source)}, and needs {self._size} "
                    f"times the {output.numel()} of {_dtype(output)} of the output."
                )
        sizes = [[output.numel()] * self._size for output in outputs]
        whole = [_host(source, operation).contiguous() for source in inputs]
        return self._scatter_sums(operation, outputs, whole, sizes, opts)

    def _scatter_sums(
        self,
        operation: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        sizes: Sequence[Sequence[int]],
        opts: Any,
    ) -> Work:
        reduction, dtype = _reduction(_op_of(opts), inputs, operation)
        call = Call(operation, dtype.label, tuple([n for each in sizes for n in each]), reduction.label)
        outs = [_Out(output, operation, filled=False) for output in outputs]

        def build(context: Context, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> Plan:
            plan = Plan(operation, [])
            plan.segments.clear()
            for source, target, each in zip(sources, targets, sizes, strict=True):
                nbytes = [n * dtype.itemsize for n in each]
                one = dense.reducescatter(context, source, target, nbytes, dtype, reduction)
                plan.segments += one.segments
                plan.keepalive += one.keepalive
            return plan

        sources = [_bytes(source) for source in inputs]
        return self._start(call, sources, [out.bytes for out in outs], build, list(outputs), *outs)

    def alltoall_base(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        operation = "all_to_all_single"
        sent = _rows(source, input_splits, self._size, "input")
        got = _rows(output, output_splits, self._size, "output")
        out = _Out(output, operation, filled=False)
        is_even = not input_splits and not output_splits
        counts = (source.numel(),) if is_even else ()
        call = Call(operation, _dtype(source), counts)
        sources = [_bytes(_host(source, operation).contiguous())]
        return self._start(call, sources, [out.bytes], self._deal(sent, got), [output], out, own=(*sent, *got))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        if not len(outputs) == len(inputs) == self._size:
            raise InvalidRequestError(
                f"all_to_all needs {self._size} inputs and outputs, got {len(inputs)} and {len(outputs)}."
            )
        parts = _Parts(outputs, "all_to_all")
        source = _joined(inputs, "all_to_all")
        sent, got = [tensor.nbytes for tensor in inputs], [tensor.nbytes for tensor in outputs]
        call, deal = Call("all_to_all", _dtype(inputs[0])), self._deal(sent, got)
        return self._start(call, [_bytes(source)], [_bytes(parts.buffer)], deal, outputs, parts, own=(*sent, *got))

    def _deal(self, sent: Sequence[int], got: Sequence[int]) -> Build:
        """Returns the builder of an alltoall. This rank knows only how many bytes it sends and receives itself."""
        table = [[0] * self._size for _ in range(self._size)]
        for peer in range(self._size):
            table[peer][self._rank] = got[peer]
            table[self._rank][peer] = sent[peer]
        if sent[self._rank] != got[self._rank]:
            raise InvalidRequestError(
                f"all_to_all: rank {self._rank} sends itself {sent[self._rank]} bytes and expects {got[self._rank]}."
            )
        return _exchange(table)

    def barrier(self, opts: Any = None, *_: Any) -> Work:
        return self._start(Call("barrier"), [], [], lambda context, sources, targets: Plan("barrier", [[Stage()]]), [])

    # Names of versions after torch 2.13

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # Messages between two ranks

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> Work:
        tensor = _host(tensors[0], "send").contiguous()
        if destination == self._rank:
            self._mailbox.sent[tag].append(tensor.clone())
            return self._done(tensors)
        return self._message(tensor, self._rank, destination, tag, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        out = _Out(tensors[0], "recv", filled=False)
        if source == self._rank:
            if not self._mailbox.sent[tag]:
                raise InvalidRequestError(
                    f"recv: rank {source} receives from itself with tag {tag} what it has not sent before."
                )
            out.tensor.copy_(self._mailbox.sent[tag].popleft())
            return self._done(tensors)
        return self._message(out.contiguous, source, self._rank, tag, tensors, out)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        raise NotImplementedError(
            "recv: backend 'ocomm' has no receive from any source; pass src=, or use a group of backend 'gloo'."
        )

    def _message(
        self, tensor: Tensor, source: int, destination: int, tag: int, result: list[Tensor], *stores: _Out
    ) -> Work:
        self._require("send or recv")
        key = source, destination, tag
        self._sent[key] = count = self._sent[key] + 1
        name = f"message {count} from rank {self._ranks[source]} to rank {self._ranks[destination]} with tag {tag}"
        handle = operations.start_message(self._member, name, _bytes(tensor), source, destination)

        def finish() -> None:
            for store in stores:
                store.store()

        return _Work(self, _Messages(self, [handle], f"group {self._group_name!r}: {name}"), result, finish)

    def _done(self, result: list[Tensor]) -> Work:
        return _Work(self, _Messages(self, [], "a message"), result, lambda: None)

    def _start_coalescing(self, device: torch.device) -> None:
        """From now on calls start at once, as always, and are remembered for ``_end_coalescing``."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        """Returns what waits for all calls since ``_start_coalescing``."""
        works, self._coalesced = self._coalesced or [], None
        return _Work(self, _Together(works), [], lambda: None)


def _op_of(opts: Any) -> Any:
    """Returns the reduction of a call's options; SUM if c10d passes none."""
    op = getattr(opts, "reduceOp", opts)
    op = _TORCH_OP.SUM if op is None else op
    return getattr(op, "op", op)


def _dtypes(tensors: Sequence[Tensor]) -> str:
    return _dtype(tensors[0]) if len(tensors) == 1 else " + ".join(map(_dtype, tensors))


def _same_size(operation: str, tensors: Sequence[Tensor], like: Tensor) -> None:
    for rank, tensor in enumerate(tensors):
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise InvalidRequestError(
                f"{operation}: the tensor for rank {rank} has {tensor.numel()} elements of {_dtype(tensor)}, and needs "
                f"{like.numel()} of {_dtype(like)}."
            )


def _rows(tensor: Tensor, splits: Sequence[int] | None, size: int, what: str) -> list[int]:
    """Returns the number of bytes of each rank's rows. Raises InvalidRequestError if the splits do not fit the rows."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise InvalidRequestError(f"all_to_all_single: {rows} rows of the {what} do not part among {size} ranks.")
        return [tensor.nbytes // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise InvalidRequestError(
            f"all_to_all_single: the {what} has {rows} rows, and its splits are {list(splits)}; they must be {size} "
            "counts that add up to the rows."
        )
    return [n * (tensor.nbytes // rows if rows else 0) for n in splits]


def _sum(reduction: ReduceOp, dtype: DType) -> Build:
    def build(context: Context, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> Plan:
        return dense.allreduce(context, sources, targets, [s.nbytes for s in sources], dtype, reduction)

    return build


def _gather_equal(context: Context, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> Plan:
    return dense.allgather(context, [(s, t, [s.nbytes] * context.size) for s, t in zip(sources, targets, strict=True)])


def _exchange(table: Sequence[Sequence[int]]) -> Build:
    """Returns the builder of an alltoall of ``table[sender][receiver]`` bytes, in one segment.

    A rank does not know the bytes between two other ranks, and so not how many segments they would need.
    """

    def build(context: Context, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> Plan:
        return dense.alltoall(context, sources[0], targets[0], table, whole=True)

    return build


# Functions that torch calls


def create(options: Any, backend_options: Any = None) -> OcommProcessGroup:
    """Returns a new process group. Collective over its members, on which torch.distributed calls it.

    Calls ``ocomm.init()`` if the script has not done so.

    Args:
        options: Torch's ``_DistributedBackendOptions``: store, ranks, name and timeout of the group.
        backend_options: Not used.

    Raises:
        InvalidRequestError: The ranks are not those of ocomm's job or not ascending, or no group of all ranks was made
            before.
        LaunchError: Some members do not come within ``start_timeout_s``.
    """
    if not api.is_initialized():
        api.init()
    leave_hooks_alone()
    session = sessions.current()
    topology = session.require_topology()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    world, me = topology.size, topology.rank
    if max(ranks) >= world or ranks[options.group_rank] != me:
        raise InvalidRequestError(
            f"this process is rank {ranks[options.group_rank]} of torch.distributed and rank {me} of {world} of "
            "ocomm's job. Leave RANK and WORLD_SIZE to the launcher, or set them as it numbers the ranks."
        )
    if len(ranks) == world:
        is_first = not session.has_members
        session.prepare_members()
        if is_first:
            _tokens[session] = operations.broadcast_object(session, secrets.token_hex(4), 0, None, global_process_set)
    elif not session.has_members:
        raise InvalidRequestError(
            f"a group of ranks {ranks} with backend 'ocomm' needs one of all {world} ranks before it: call "
            "init_process_group('ocomm'), or new_group(backend='ocomm') on all ranks."
        )
    timeout: datetime.timedelta = options.timeout
    return OcommProcessGroup(
        session, options.store, options.group_rank, ranks, options.group_id, timeout.total_seconds()
    )


def rendezvous(url: str, timeout: datetime.timedelta = dist.default_pg_timeout, **_: Any) -> Iterator[Any]:
    """Yields store, rank and size for ``init_method="ocomm://"``. Collective over the job.

    Rank 0 opens the store. The ranks of ocomm's job know each other, so MASTER_ADDR and MASTER_PORT are not needed.

    Args:
        url: Not used.
        timeout: The timeout of the store.
    """
    if not api.is_initialized():
        api.init()
    session = sessions.current()
    topology = session.require_topology()
    rank, size = topology.rank, topology.size
    store: Any = None
    ways, port = ["127.0.0.1"], 0
    if rank == 0:
        others = [host for host in topology.hosts if host != topology.hosts[0]]
        if others:
            ways = [*filter(None, [os.environ.get("MASTER_ADDR")]), *ways_to_this_host(others)]
        store = dist.TCPStore("127.0.0.1", 0, size, True, timeout, wait_for_workers=False)
        port = store.port
    ways, port = operations.broadcast_object(session, (ways, port), 0, None, global_process_set)
    if rank != 0:
        store = dist.TCPStore(_first_that_answers(ways, port, timeout.total_seconds()), port, size, False, timeout)
    yield store, rank, size


def _first_that_answers(ways: Sequence[str], port: int, timeout_s: float) -> str:
    """Returns the first of ``ways`` to rank 0's host at which its store can be reached. Raises LaunchError if none can
    be within ``timeout_s``.
    """
    end_s, reasons = time.monotonic() + timeout_s, dict.fromkeys(ways, "not tried")
    while True:
        for way in ways:
            try:
                with socket.create_connection((way, port), timeout=min(_WAY_S, timeout_s)):
                    return way
            except OSError as error:
                reasons[way] = str(error)
        if time.monotonic() > end_s:
            said = "; ".join(f"{way}: {reason}" for way, reason in reasons.items())
            raise LaunchError(
                f"the store of torch.distributed, which rank 0 has opened on port {port} of its host, cannot be "
                f"reached: {said}. Is there a firewall? MASTER_ADDR on rank 0 may name an address that others reach."
            )
        time.sleep(_POLL_S)


register()
