"""The process group of backend "ocomm": the collectives of torch.distributed as plans of ``ocomm.collectives``."""

from __future__ import annotations

import datetime
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store, Work

from ocomm import operations
from ocomm.collectives import dense
from ocomm.collectives.dense import Context
from ocomm.collectives.plan import Plan, Stage
from ocomm.errors import InvalidRequestError, MismatchError
from ocomm.kernels.base import Bytes
from ocomm.ordered import Build, Call, Exchange, OrderedChannel
from ocomm.session import Session
from ocomm.torch_registration import NAME
from ocomm.types import ReduceOp
from ocomm_torch.distributed.futures import Completer
from ocomm_torch.distributed.tensors import (
    TORCH_OP,
    Combine,
    Combined,
    Out,
    Output,
    Parts,
    bytes_of,
    dtype_of,
    dtypes_of,
    joined,
    label_of,
    op_of,
    plain,
    reduction_of,
    require_same_size,
    row_nbytes,
)
from ocomm_torch.distributed.work import GroupWork, Messages, Together, UnderWay, within
from ocomm_torch.mpi_ops import TORCH

#: Seconds for which a rank that has failed waits until the other ranks say what they have called.
_WORDS_S = 3.0


class OcommProcessGroup(ProcessGroup):
    """A process group of torch.distributed. Creating it is collective over its members.

    All ranks call its collectives in the same order. Two ranks send and receive the messages of one direction and tag
    in the same order. A collective raises

    - MismatchError if the ranks have called different things,
    - StallError if it is not over within the group's timeout; the message names the ranks that have not come,
    - PeerError if a rank has failed or left.

    After such an error the group can do nothing more.

    Args:
        session: That of ocomm.
        store: Torch's for this group.
        rank: This rank's in the group.
        ranks: World ranks, in ascending order.
        group_id: Its name.
        timeout_s: Seconds for each call.
        token: A word that no other job has, under which ranks that fail leave words in the store.
    """

    def __init__(
        self,
        session: Session,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        group_id: str,
        timeout_s: float,
        token: str,
    ) -> None:
        super().__init__(rank, len(ranks))
        self._session = session
        self._store = store
        self._token = token
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
        self._number = session.registry.add_members(order, f"group {group_id!r}")
        self._member = session.member_set(self._number)
        self._channels: dict[str, OrderedChannel] = {}
        self._under_way: dict[OrderedChannel, UnderWay] = defaultdict(UnderWay)
        self._open_channel("")
        self._sent: dict[tuple[int, int, int], int] = defaultdict(int)
        #: What this rank has sent to itself and not yet received, by tag.
        self._to_itself: dict[int, deque[Tensor]] = defaultdict(deque)
        self._completer = Completer(group_id)
        #: What was started since torch has begun to coalesce calls; None if it does not.
        self._coalesced: list[GroupWork] | None = None
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
        # None until torch has the group in its tables. From 2.15 on it attaches a flight recorder before, to a group
        # that has a device, and fails if that has no backend in C++.
        return [torch.device("cpu")] if self in dist.distributed_c10d._world.pg_map else []

    #: Of ``split_group``, which torch refuses then.
    supports_splitting = False

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
        self._is_closed = True
        self._completer.close()
        if self._session.is_initialized:
            self._session.registry.remove_members(self._number)

    abort = shutdown

    # Channels

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
        if not self._completer.is_current():
            return self._channels[""]
        kind = ", callbacks"
        return self._channels.get(kind) or self._open_channel(kind)

    def _tell(self, kind: str, said: str) -> Mapping[int, str]:
        """Tells the other ranks through the store what this rank has called. Returns what they say within
        ``_WORDS_S``.
        """
        heard: dict[int, str] = {}
        try:
            # torchrun starts jobs again, and keeps the store with what an earlier job has said.
            prefix = f"ocomm/{self._token}/failed{kind}"
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
        *stores: Output,
    ) -> GroupWork:
        self._require(call)
        channel = self._channel
        exchange = channel.start(call, sources, targets, build)
        return self._work(exchange, result, *stores, under_way=self._under_way[channel])

    def _work(
        self, exchange: Exchange | Messages, result: list[Any], *stores: Output, under_way: UnderWay | None = None
    ) -> GroupWork:
        """Returns the work of a call, and keeps it for ``_end_coalescing`` while torch coalesces calls."""

        def finish() -> None:
            for each in stores:
                each.store()

        work = GroupWork(self._completer, exchange, result, finish, under_way)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # Collectives. As those of ``ProcessGroup`` they take ``opts``, or in its place a root, a reduction and a timeout.

    def allreduce(
        self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Work:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        return within(timeout, self._allreduce(given, opts if op is None else op, "allreduce"))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        return self._allreduce(list(tensors), opts, "allreduce_coalesced")

    def _allreduce(self, tensors: list[Tensor], opts: Any, operation: str) -> GroupWork:
        if len(tensors) == 1 and tensors[0].layout is torch.sparse_coo:
            return self._sparse_sum(tensors[0], op_of(opts), tensors)
        call, reduction = self._reduction(operation, tensors, [tensor.numel() for tensor in tensors], opts)
        if not isinstance(reduction, ReduceOp):
            combined = Combined(tensors, self._size, reduction)
            sources = [bytes_of(plain(tensor, operation)) for tensor in tensors]
            return self._start(call, sources, combined.bytes, _gather_equal, tensors, combined)
        outs = [Out(tensor, operation) for tensor in tensors]
        buffers = [out.bytes for out in outs]
        return self._start(call, buffers, buffers, _sum(reduction, tensors[0]), tensors, *outs)

    def _reduction(
        self, operation: str, tensors: Sequence[Tensor], counts: Sequence[int], opts: Any, root: int = -1
    ) -> tuple[Call, ReduceOp | Combine]:
        """Returns the call of a reduction, and what it reduces by.

        Raises on all ranks alike for what backend "ocomm" does not reduce.
        """
        op = op_of(opts)
        try:
            reduction = reduction_of(op, tensors, operation)
        except (InvalidRequestError, NotImplementedError) as refusal:
            dtypes = " + ".join(dict.fromkeys(map(dtype_of, tensors)))
            self._refuse(Call(operation, dtypes, tuple(counts), label_of(op), root), refusal)
        return Call(operation, dtype_of(tensors[0]), tuple(counts), label_of(op), root), reduction

    def _refuse(self, call: Call, refusal: Exception) -> NoReturn:
        """Raises ``refusal`` after all ranks have compared their calls. Collective.

        A rank that refused at once would leave the others waiting where they have called something else.
        """
        refused = replace(call, op=f"{call.op} (refused)")
        self._start(refused, [], [], lambda context, sources, targets: Plan("refusal", [[Stage()]]), []).wait()
        raise refusal

    def _sparse_sum(self, tensor: Tensor, op: Any, result: list[Tensor]) -> GroupWork:
        """Starts a sum of sparse COO tensors: every rank gathers the elements of all ranks, and adds them by itself.

        Waits until all ranks have said how many elements they have, because plans are of known sizes.
        """
        operation = "allreduce of sparse tensors"
        if op != TORCH_OP.SUM or not tensor.is_cpu:
            refusal = NotImplementedError(
                f"{operation}: backend 'ocomm' has sums of tensors of the CPU, not {op} of tensors of {tensor.device}; "
                "call to_dense()."
            )
            self._refuse(Call(operation, dtype_of(tensor), op=label_of(op)), refusal)
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

        call = Call(operation, dtype_of(mine.values()), tuple(counts), ReduceOp.SUM.label)
        buffers = [bytes_of(source) for source in sources], [bytes_of(rows) for rows in gathered]
        return self._start(call, *buffers, build, result, Summed())

    def broadcast(
        self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        root = self._root("broadcast", opts, root)
        out = Out(given[0], "broadcast")
        call = Call("broadcast", dtype_of(given[0]), (given[0].numel(),), root=root)

        def build(context: Context, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> Plan:
            return dense.broadcast(context, sources[0], targets[0], root)

        buffer = [out.bytes]
        return within(timeout, self._start(call, buffer, buffer, build, given, out))

    def reduce(
        self,
        tensors: list[Tensor] | Tensor,
        opts: Any = None,
        op: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> Work:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        op = op if op is not None or isinstance(opts, int) else opts
        return within(timeout, self._reduce(given, op, self._root("reduce", opts, root)))

    def _reduce(self, given: list[Tensor], opts: Any, root: int) -> GroupWork:
        call, reduction = self._reduction("reduce", given[:1], [given[0].numel()], opts, root)
        if not isinstance(reduction, ReduceOp):
            results = given[:1] if root == self._rank else []
            combined = Combined(results, self._size, reduction)
            source = bytes_of(plain(given[0], "reduce"))
            targets = combined.bytes or [np.empty(0, np.uint8)]
            return self._start(call, [source], targets, self._to_root(source.nbytes, root), given, combined)
        out = Out(given[0], "reduce")
        target = out.bytes if root == self._rank else bytes_of(torch.empty_like(out.contiguous))
        return self._start(call, [out.bytes], [target], _sum(reduction, given[0]), given, out)

    def _to_root(self, nbytes: int, root: int) -> Build:
        """Returns the builder of a gather of ``nbytes`` of each rank."""
        return _exchange([[[nbytes * (peer == root) for peer in range(self._size)] for _ in range(self._size)]])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *, timeout: Any = None) -> Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if len(inputs) != 1 or len(outputs[0]) != self._size:
            raise InvalidRequestError(
                f"allgather needs one input and {self._size} outputs, one for each rank of the group; got "
                f"{len(inputs)} and {len(outputs[0])}."
            )
        source, results = inputs[0], list(outputs[0])
        require_same_size("allgather", results, source)
        parts = Parts(results, "allgather")
        return within(timeout or opts, self._gather_all("allgather", [source], [parts.buffer], outputs[0], parts))

    def allgather_coalesced(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        if len(output_lists) != self._size or any(len(outputs) != len(inputs) for outputs in output_lists):
            raise InvalidRequestError(
                f"allgather_coalesced needs {self._size} lists of {len(inputs)} outputs, one list for each rank of the "
                f"group; got lists of {[len(outputs) for outputs in output_lists]}."
            )
        for k, source in enumerate(inputs):
            require_same_size("allgather_coalesced", [outputs[k] for outputs in output_lists], source)
        parts = [Parts([outputs[k] for outputs in output_lists], "allgather_coalesced") for k in range(len(inputs))]
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
                    f"{operation}: the output has {output.numel()} elements of {dtype_of(output)}, and needs "
                    f"{self._size} times the {source.numel()} of {dtype_of(source)} of the input."
                )
        outs = [Out(output, operation, filled=False) for output in outputs]
        return self._gather_all(operation, inputs, [out.contiguous for out in outs], list(outputs), *outs)

    def _gather_all(
        self,
        operation: str,
        inputs: Sequence[Tensor],
        gathered: Sequence[Tensor],
        result: list[Any],
        *stores: Output,
    ) -> GroupWork:
        sources = [bytes_of(plain(tensor, operation)) for tensor in inputs]
        call = Call(operation, dtypes_of(inputs), tuple([tensor.numel() for tensor in inputs]))
        targets = [bytes_of(tensor) for tensor in gathered]
        return self._start(call, sources, targets, _gather_equal, result, *stores)

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        root, source = self._root("gather", opts, root), inputs[0]
        call = Call("gather", dtype_of(source), (source.numel(),), root=root)
        results = list(outputs[0]) if root == self._rank else []
        if root == self._rank:
            self._one_for_each("gather", results)
            require_same_size("gather", results, source)
        parts = Parts(results, "gather")
        buffers = [bytes_of(plain(source, "gather"))], [bytes_of(parts.buffer)]
        return within(timeout, self._start(call, *buffers, self._to_root(source.nbytes, root), results, parts))

    def _root(self, operation: str, opts: Any, root: int | None) -> int:
        """Returns the root of a call: ``root``, or that of ``opts``, which may be the root itself."""
        if root is None:
            root = opts if isinstance(opts, int) else opts.rootRank
        return self._peer(operation, root)

    def _peer(self, operation: str, rank: int) -> int:
        """Returns ``rank``, a root or an end of a message. Raises InvalidRequestError unless the group has it."""
        if not 0 <= rank < self._size:
            raise InvalidRequestError(
                f"{operation}: process group {self._group_name!r} has no rank {rank}; its {self._size} ranks count "
                f"from 0 to {self._size - 1}."
            )
        return rank

    def _one_for_each(self, operation: str, tensors: Sequence[Tensor]) -> None:
        """Raises InvalidRequestError unless there is one tensor for each rank."""
        if len(tensors) != self._size:
            raise InvalidRequestError(
                f"{operation}: rank {self._rank} needs {self._size} tensors, one for each rank of the group; got "
                f"{len(tensors)}."
            )

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        root, output = self._root("scatter", opts, root), outputs[0]
        call = Call("scatter", dtype_of(output), (output.numel(),), root=root)
        source = torch.empty(0, dtype=torch.uint8)
        if root == self._rank:
            self._one_for_each("scatter", inputs[0])
            require_same_size("scatter", list(inputs[0]), output)
            source = joined(inputs[0], "scatter")
        table = [[output.nbytes * (sender == root)] * self._size for sender in range(self._size)]
        out = Out(output, "scatter", filled=False)
        work = self._start(call, [bytes_of(source)], [out.bytes], _exchange([table]), outputs, out)
        return within(timeout, work)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        output, parts = outputs[0], list(inputs[0])
        if len(parts) != self._size or parts[self._rank].numel() != output.numel():
            raise InvalidRequestError(
                f"reduce_scatter needs {self._size} inputs, one for each rank, and an output as large as this rank's; "
                f"got {len(parts)}, and {output.numel()} elements."
            )
        sizes = [part.numel() for part in parts]
        call, reduction = self._reduction("reduce_scatter", [output, *parts], sizes, opts if op is None else op)
        whole = joined(parts, "reduce_scatter")
        return within(timeout, self._scatter(call, reduction, [output], [whole], [sizes]))

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
                    f"{operation}: the input has {source.numel()} elements of {dtype_of(source)}, and needs "
                    f"{self._size} times the {output.numel()} of {dtype_of(output)} of the output."
                )
        sizes = [[output.numel()] * self._size for output in outputs]
        counts = [n for each in sizes for n in each]
        call, reduction = self._reduction(operation, [*outputs, *inputs], counts, opts)
        whole = [plain(source, operation) for source in inputs]
        return self._scatter(call, reduction, outputs, whole, sizes)

    def _scatter(
        self,
        call: Call,
        reduction: ReduceOp | Combine,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        sizes: Sequence[Sequence[int]],
    ) -> GroupWork:
        """Starts a reduction of each of ``inputs``, of which rank r gets the r-th part, of ``sizes[k][r]`` elements."""
        sources = [bytes_of(source) for source in inputs]
        itemsize = outputs[0].element_size()
        nbytes = [[n * itemsize for n in each] for each in sizes]
        if not isinstance(reduction, ReduceOp):
            combined = Combined(outputs, self._size, reduction)
            build = _exchange([[each] * self._size for each in nbytes])
            return self._start(call, sources, combined.bytes, build, list(outputs), combined)
        outs = [Out(output, call.operation, filled=False) for output in outputs]

        def sums(context: Context, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> Plan:
            dtype, _ = TORCH.describe(outputs[0])
            each = zip(sources, targets, nbytes, strict=True)
            plans = [dense.reducescatter(context, s, t, part, dtype, reduction) for s, t, part in each]
            return _joined(call.operation, plans)

        return self._start(call, sources, [out.bytes for out in outs], sums, list(outputs), *outs)

    def alltoall_base(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
        *,
        timeout: Any = None,
    ) -> Work:
        operation = "all_to_all_single"
        sent = row_nbytes(source, input_splits, self._size, "input")
        got = row_nbytes(output, output_splits, self._size, "output")
        out = Out(output, operation, filled=False)
        call = Call(operation, dtype_of(source), sent=tuple(sent), received=tuple(got))
        sources = [bytes_of(plain(source, operation))]
        work = self._start(call, sources, [out.bytes], self._deal(sent, got), [output], out)
        return within(timeout or opts, work)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        if not len(outputs) == len(inputs) == self._size:
            raise InvalidRequestError(
                f"all_to_all needs {self._size} inputs and outputs, got {len(inputs)} and {len(outputs)}."
            )
        parts = Parts(outputs, "all_to_all")
        source = joined(inputs, "all_to_all")
        sent, got = tuple([tensor.nbytes for tensor in inputs]), tuple([tensor.nbytes for tensor in outputs])
        call = Call("all_to_all", dtype_of(inputs[0]), sent=sent, received=got)
        return self._start(call, [bytes_of(source)], [bytes_of(parts.buffer)], self._deal(sent, got), outputs, parts)

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
        return _exchange([table])

    def barrier(self, opts: Any = None, *_: Any, timeout: Any = None) -> Work:
        def build(context: Context, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> Plan:
            return Plan("barrier", [[Stage()]])

        return within(timeout or opts, self._start(Call("barrier"), [], [], build, []))

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that ends within ``timeout``, or the group's. Every rank that waits there gets a StallError that
        names all ranks which have not come, whatever ``wait_all_ranks`` is.
        """
        shortest = datetime.timedelta(milliseconds=1)  # 0 stands for the group's in ``wait``
        self.barrier().wait(None if timeout is None else max(timeout, shortest))

    # Names of versions after torch 2.13

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # Messages between two ranks

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> Work:
        tensor = plain(tensors[0], "send")
        if self._peer("send", destination) == self._rank:
            self._to_itself[tag].append(tensor.clone())
            return self._done(tensors)
        return self._message(tensor, self._rank, destination, tag, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        out = Out(tensors[0], "recv", filled=False)
        if self._peer("recv", source) == self._rank:
            if not self._to_itself[tag]:
                raise InvalidRequestError(
                    f"recv: rank {source} receives from itself with tag {tag} what it has not sent before."
                )
            out.tensor.copy_(self._to_itself[tag].popleft())
            return self._done(tensors)
        return self._message(out.contiguous, source, self._rank, tag, tensors, out)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        raise NotImplementedError(
            "recv: backend 'ocomm' has no receive from any source; pass src=, or use a group of backend 'gloo'."
        )

    def _message(
        self, tensor: Tensor, source: int, destination: int, tag: int, result: list[Tensor], *stores: Output
    ) -> Work:
        self._require("send or recv")
        key = source, destination, tag
        self._sent[key] = count = self._sent[key] + 1
        name = f"message {count} from rank {self._ranks[source]} to rank {self._ranks[destination]} with tag {tag}"
        handle = operations.start_message(self._member, name, bytes_of(tensor), source, destination)
        messages = Messages([handle], f"group {self._group_name!r}: {name}", lambda: self.timeout_s)
        return self._work(messages, result, *stores)

    def _done(self, result: list[Tensor]) -> Work:
        return self._work(Messages([], "a message", lambda: self.timeout_s), result)

    def _start_coalescing(self, device: torch.device) -> None:
        """From now on calls start at once, as always, and are remembered for ``_end_coalescing``."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        """Returns what waits for all calls since ``_start_coalescing``."""
        works, self._coalesced = self._coalesced or [], None
        return GroupWork(self._completer, Together(works), [], lambda: None)


def _sum(reduction: ReduceOp, tensor: Tensor) -> Build:
    def build(context: Context, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> Plan:
        dtype, _ = TORCH.describe(tensor)
        return dense.allreduce(context, sources, targets, [s.nbytes for s in sources], dtype, reduction)

    return build


def _gather_equal(context: Context, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> Plan:
    return dense.allgather(context, [(s, t, [s.nbytes] * context.size) for s, t in zip(sources, targets, strict=True)])


def _exchange(tables: Sequence[Sequence[Sequence[int]]]) -> Build:
    """Returns the builder of an alltoall of ``tables[k][sender][receiver]`` bytes of each tensor k, in one segment.

    A rank does not know the bytes between two other ranks, and so not how many segments they would need.
    """

    def build(context: Context, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> Plan:
        each = zip(sources, targets, tables, strict=True)
        return _joined("alltoall", [dense.alltoall(context, s, t, table, whole=True) for s, t, table in each])

    return build


def _joined(name: str, plans: Sequence[Plan]) -> Plan:
    """Returns the plan of all ``plans``."""
    whole = Plan(name, [])
    whole.segments.clear()
    for plan in plans:
        whole.segments += plan.segments
        whole.keepalive += plan.keepalive
    return whole
