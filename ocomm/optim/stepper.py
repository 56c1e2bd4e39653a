"""One rank's steps of an optimizer core: hand gradients over, exchange, vote, commit or discard. Framework-free.

A frontend tells the stepper that a gradient is there (``hand_over``, from a hook, while backward goes on) and calls
``exchange`` in its ``step()``. Buckets are posted in a fixed order; nothing that the exchange writes is in use before
all ranks have agreed: flags are OR-ed over the ranks, and if any is set all ranks discard, and skip the step or do it
once more without overlap.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ocomm.collectives.bridge import Inside
from ocomm.collectives.compressed import (
    compressed_segment,
    compressed_staging,
    dense_segment,
    node_segment,
    node_staging,
    vote,
)
from ocomm.collectives.engine import Channel, State, Ticket
from ocomm.collectives.envelope import Envelope, Envelopes
from ocomm.collectives.phases import NodeStaging, Staging
from ocomm.collectives.plan import Computation, Plan, Stage
from ocomm.collectives.routes import vote_groups
from ocomm.collectives.staged import entry, staged
from ocomm.collectives.waiting import Watch, wait
from ocomm.compression.layout import SegmentLayout
from ocomm.errors import HorovodInternalError, MismatchError, NonFiniteError, OcommError, PeerError, StallError
from ocomm.kernels.base import NOTHING, PARTS, TENSOR, WHOLE, Bytes, Floats, Table
from ocomm.kernels.device import DeviceArray
from ocomm.optim.core import Bools, Core, Exchange, address
from ocomm.optim.replicas import ReplicasDifferError, ReplicaWindows
from ocomm.types import Flag

_log = logging.getLogger("ocomm")
#: At most so many buckets, of at least so many elements: at 1 Gbit/s these take as long as posting a bucket takes.
_BUCKETS, _BUCKET_NUMEL = 8, 1 << 17
#: ``attempt`` of the vote in which ranks say whose gradients were not finite.
_INQUEST = 2
#: Flags with which a step is exchanged once more, and with which it is over.
_AGAIN, _OVER = int(Flag.CHANGED | Flag.UNHANDED), int(Flag.SKIP | Flag.RAISED)
#: States of failed plans: causes before what they bring about.
_FAILURES = (
    State.MISMATCH,
    State.WRONG_SIZE,
    State.TIMED_OUT,
    State.MPI_ERROR,
    State.TASK_ERROR,
    State.ABORTED,
)


class Verdict(enum.Enum):
    """What all ranks do with a step."""

    TAKE = "take"
    SKIP = "skip"
    #: They skip it, and some rank that does has a gradient that is not finite: a loss scale was too large.
    OVERFLOW = "overflow"


class _Sent(NamedTuple):
    """Bytes which a plan sends to other nodes, and to other ranks of this rank's node."""

    across: int
    inside: int


@dataclass(slots=True, eq=False)
class _Bucket:
    """Tensors which leave together, in ``segments`` of their flow."""

    tensors: list[int]
    segments: range
    left: int = 0
    #: Of all buckets, in the order in which they are posted.
    number: int = 0
    #: Tells the engine where its gradients are.
    intake: Any = None
    #: Do the envelopes say that this rank has all gradients?
    is_full: bool = False


@dataclass(slots=True, eq=False)
class _Flow:
    """The exchange of all tensors of a kind: one plan, whose segments may start as their buckets are posted."""

    kind: Literal["compressed", "dense", "node"]
    buckets: list[_Bucket]
    segments: list[SegmentLayout]
    envelopes: Envelopes
    staging: list[Staging] = field(default_factory=list)
    node_staging: list[NodeStaging] = field(default_factory=list)
    #: Prepared plans with their bytes sent and what is built into them, by its identity: buffers alternate, so two are
    #: kept.
    plans: dict[tuple[Hashable, ...], tuple[Any, _Sent, tuple[Any, ...]]] = field(default_factory=dict)
    plan_memory: list[Bytes] = field(default_factory=list)
    sent: _Sent = field(default_factory=lambda: _Sent(0, 0))
    #: The plan with which it begins before ``step()``.
    prepared: Any = None
    ticket: Ticket | None = None
    #: The presence bits heard last, and the tensors that some rank has by them.
    heard: bytes = b""
    anywhere: NDArray[np.int64] | None = None


@dataclass(slots=True)
class Traffic:
    """What this rank has really sent through its optimizer, headers included.

    ``bytes_sent`` went to other nodes, ``bytes_sent_inside`` to ranks of its own; in the flat form each rank counts as
    a node. ``bytes_dense`` is what a dense average would have sent to other nodes.
    """

    steps: int = 0
    dense_steps: int = 0
    compressed_steps: int = 0
    local_steps: int = 0
    skipped_steps: int = 0
    redone_steps: int = 0
    bytes_sent: int = 0
    bytes_sent_inside: int = 0
    bytes_dense: float = 0.0
    last_bytes_sent: int = 0
    exposed_s: float = 0.0
    last_exposed_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Ballot:
    """A round in which every rank says something to all, by headers alone."""

    envelopes: Envelopes
    prepared: Any
    sent: _Sent


class Stepper:
    """Exchanges the gradients of ``core``'s layout over ``channel``, step by step, on one rank.

    ``ranks`` are the world ranks of the set, for messages.
    ``locate(tensors, final)`` gives the addresses of their gradients as they are now, 0 for none: contiguous float32,
    on a device of the types that ``core.gradients`` says; before ``step()`` (``final`` False) it may answer None: not
    yet. It is called from hooks: a list of numbers costs them less than an array.
    ``segment_nbytes`` bounds a segment's packed bytes. ``verify``: how much of a gradient is read again
    to notice that it changed after hand-over: ``"full"``: all of it, ``"sampled"``: another 64th in each step,
    ``"version"``: nothing. ``replicas``: what each step compares; None: nothing. ``direct``, ``inside``: see
    ``staged``.
    """

    def __init__(
        self,
        name: str,
        core: Core,
        channel: Channel,
        ranks: Sequence[int],
        watch: Watch,
        locate: Callable[[list[int], bool], list[int] | None],
        *,
        segment_nbytes: int,
        overlap: bool,
        verify: str,
        timeout_s: float,
        replicas: ReplicaWindows | None = None,
        bucket_count: int = _BUCKETS,
        direct: bool = False,
        inside: Inside | None = None,
    ) -> None:
        self.name = name
        self.core = core
        self.layout = core.layout
        self.channel = channel
        self.ranks = tuple(ranks)
        self.rank = core.rank
        self.segment_nbytes = segment_nbytes
        self.overlap = overlap
        self.overlapping = False  # switched on after a first step without
        self._verify = verify
        #: What is read again of a gradient that was handed over in the step under way: see ``Kernels.checksum``.
        self.verified_part = NOTHING
        self._replicas = replicas
        self.timeout_s = timeout_s
        self.bucket_count = bucket_count
        self.direct = direct
        self.inside = inside
        self.traffic = Traffic()
        self.step = 0  # committed or skipped by all
        self.averages = np.zeros(0, np.float32)
        self._averages: Table = np.zeros(len(self.layout.tensors), TENSOR)  # their addresses
        self._watch = watch
        self._locate = locate
        count = len(self.layout.tensors)
        self.order = list(range(count - 1, -1, -1))
        self.arrivals: list[int] = []
        # What this rank objects to; `_flags` is written by the engine's thread alone.
        self._objections = 0
        self._flags = np.zeros(1, np.uint32)
        # An average that overflows is seen by all in the result; in the headers stands who had a bad gradient.
        self._owner_flags = np.zeros(1, np.uint32)
        self._heard_flags = np.zeros(1, np.uint32)
        self._announcement = np.zeros(1, np.int64)
        #: Tensors that the frontend expects to hand over in the step that begins: a bucket waits for those.
        self.expected = [True] * count
        self._expected = self.expected  # as the step under way has begun with
        self.present_anywhere: Bools = np.zeros(count, np.bool_)
        self.begun = False
        self._hyper = 0
        #: Those of the step under way, and of the last step that had compressed, or dense ones.
        self._flows: list[_Flow] = []
        self._compressed: _Flow | None = None
        self._dense: _Flow | None = None
        self._node: _Flow | None = None
        self._buckets: list[tuple[_Flow, _Bucket]] = []  # in the order in which they are posted
        # Their tensors one after the other, the bytes of the gradients, and the checksums that these had when they were
        # posted before ``step()``.
        self._rows = np.zeros(0, np.int64)
        self._nbytes = np.zeros(0, np.int64)
        self._sums = np.zeros(0, np.uint64)
        self._buckets_of: list[tuple[_Bucket, ...]] = []
        self._exchange: Exchange | None = None
        self._arranged: tuple[bytes, bytes] | None = None
        self._cut_for: dict[str, bytes] = {}
        #: How many buckets of the step under way have been posted.
        self.posted = 0
        self._dead: OcommError | None = None
        #: Tensors that do not travel in the step under way.
        self._local: list[int] = []
        self._outside = set(range(len(self.ranks))).difference(self.layout.nodes.node_of(self.rank))
        #: Where this rank's gradients lie, 0 for none; those of all tensors, if they were looked for all at once.
        self._grads: NDArray[np.uint64] = core.gradients["grad"]
        self._located = False
        #: sqrt(mean over ranks of |g|^2), as the ranks have said in the last round that asked for it.
        self.norm = 0.0
        self._early = False
        self._vote = self._ballot(self.layout.digest, count if core.steps_locally else 0)
        self._survey: _Ballot | None = None
        self._surveyed = False
        if direct or inside is not None:
            ticket = channel.submit(channel.prepare(entry(core.home)), timeout_s, False)
            if wait(ticket, channel, ranks, watch, name) != State.DONE:
                self._fail(ticket, [])

    # Buckets

    def _arrange(self) -> None:
        """Makes the buckets that the core wants for the step that begins: compressed ones first, then dense ones."""
        exchange = self.core.exchange()
        if exchange is self._exchange:
            return
        self._exchange = exchange
        compressed, dense = (wanted & (self.layout.numels > 0) for wanted in exchange)
        wanted = compressed.tobytes(), dense.tobytes()
        if wanted == self._arranged:
            return
        # Steps without one kind or the other come and go; its buckets stay as they are until other tensors are in them.
        if compressed.any() and self._cut_for.get("compressed") != wanted[0]:
            groups = self._cut([t for t in self.order if compressed[t]])
            self.core.set_buckets(groups, self.segment_nbytes)
            parts = [[self.core.segments[k].layout for k in span] for span in self.core.bucket_segments]
            self._compressed = self._compressed_flow(groups, parts)
            self._cut_for["compressed"] = wanted[0]
        if self._cut_for.get("dense") != wanted[1] and (dense.any() or not self.core.dense_again):
            self.averages = self.core.home.zeros(self.layout.flat_numel if dense.any() else 0)
            self._averages["grad"] = address(self.averages) + 4 * self.layout.offsets.astype(np.uint64)
            self._dense = self._dense_flow(self._cut([t for t in self.order if dense[t]])) if dense.any() else None
            self._cut_for["dense"] = wanted[1]
        local = ~(compressed | dense)
        self._local = np.flatnonzero(local).tolist()
        alone = local & (self.layout.numels > 0)
        self._node = None
        if self._adds_up_locally and alone.any():
            self._node = self._node_flow(self._cut([t for t in self.order if alone[t]]))
        chosen = (compressed.any(), self._compressed), (dense.any(), self._dense), (True, self._node)
        self._flows = [flow for travels, flow in chosen if travels and flow is not None]
        self._buckets = [(flow, bucket) for flow in self._flows for bucket in flow.buckets]
        self._rows = np.array([tensor for _, bucket in self._buckets for tensor in bucket.tensors], np.int64)
        self._nbytes = 4 * self.layout.numels[self._rows]
        self._sums = np.zeros(self._rows.size, np.uint64)
        of: list[list[_Bucket]] = [[] for _ in self.layout.tensors]
        end = 0
        for number, (_, bucket) in enumerate(self._buckets):
            start, end = end, end + len(bucket.tensors)
            bucket.number = number
            bucket.intake = self.channel.intake(
                self.core.gradients, self._rows[start:end], self._nbytes[start:end], self._sums[start:end]
            )
            for tensor in bucket.tensors:
                of[tensor].append(bucket)
        self._buckets_of = [tuple(buckets) for buckets in of]
        self._arranged = wanted

    def _cut(self, tensors: list[int]) -> list[list[int]]:
        """At most ``bucket_count`` runs, small models in one."""
        numel = int(self.layout.numels[tensors].sum())
        return self.layout.buckets(tensors, max(1, min(self.bucket_count, numel // _BUCKET_NUMEL)))

    def _envelopes(self, contents: Sequence[tuple[int, int]], *, for_node: bool = False) -> Envelopes:
        shared = self._flags, self._heard_flags, self._announcement
        return Envelopes(self.rank, contents, *shared, for_node=for_node)

    def _bytes(self, plan: Plan) -> _Sent:
        across = plan.bytes_sent_to(self._outside)
        return _Sent(across, plan.bytes_sent - across + plan.bytes_bridged)

    def _ballot(self, signature: int, tensors: int) -> _Ballot:
        envelopes = self._envelopes([(signature, tensors)])
        plan = vote(self.rank, vote_groups(self.layout.nodes), envelopes[0])
        return _Ballot(envelopes, self.channel.prepare(plan), self._bytes(plan))

    def _flow(
        self,
        kind: Literal["compressed", "dense", "node"],
        groups: list[list[int]],
        parts: list[list[SegmentLayout]],
        compressor: str,
    ) -> _Flow:
        """Of the buckets ``groups``, which are cut into the segments ``parts``."""
        ends = np.cumsum([0, *(len(part) for part in parts)]).tolist()
        buckets = [
            _Bucket(group, range(start, end)) for group, (start, end) in zip(groups, pairwise(ends), strict=True)
        ]
        segments = [segment for part in parts for segment in part]
        contents = [(segment.signature(compressor), len(segment.tensors)) for segment in segments]
        envelopes = self._envelopes(contents, for_node=not self.layout.nodes.is_flat)
        return _Flow(kind, buckets, segments, envelopes)

    def _compressed_flow(self, groups: list[list[int]], parts: list[list[SegmentLayout]]) -> _Flow:
        name = f"{self.core.compressor}-{self.core.scale}" if self.core.scales else self.core.compressor
        flow = self._flow("compressed", groups, parts, name)
        flow.staging = [compressed_staging(segment, self.core.home) for segment in flow.segments]
        return flow

    def _dense_flow(self, groups: list[list[int]]) -> _Flow:
        nbytes = max(self.segment_nbytes // 32, 1)
        return self._flow("dense", groups, [self.layout.segments(g, self.rank, nbytes) for g in groups], "dense")

    @property
    def _adds_up_locally(self) -> bool:
        """Do ranks take steps of their own, and nodes take them together?"""
        return self.core.steps_locally and not self.layout.nodes.is_flat

    def _node_flow(self, groups: list[list[int]]) -> _Flow:
        parts = [self.layout.segments(group, self.rank, self.segment_nbytes) for group in groups]
        flow = self._flow("node", groups, parts, "node")
        flow.node_staging = [node_staging(segment, self.core.home) for segment in flow.segments]
        return flow

    def _prepared(self, flow: _Flow) -> Any:
        """The flow's plan for the buffers that this step reads and writes."""
        built_in: tuple[Any, ...] = ()
        if flow.kind == "compressed":
            built_in = self.core.built_in(range(len(flow.segments)))
        elif flow.kind == "dense":
            built_in = self.core.built_in_dense()
        key = tuple([id(part) if isinstance(part, (np.ndarray, DeviceArray)) else part for part in built_in])
        if key not in flow.plans:
            if len(flow.plans) >= 4:
                flow.plans.clear()
                flow.plan_memory.clear()
            plan = {"compressed": self._compressed_plan, "dense": self._dense_plan, "node": self._node_plan}[flow.kind](
                flow
            )
            # In the direct form a device has the averages already, and without scales the host does not look at them.
            wanted = flow.kind == "compressed" and (self.core.scales or not self.direct)
            results = [self.core.result(k) for k in range(len(flow.segments))] if wanted else []
            plan = staged(plan, self.core.home, results, self.direct, self.inside)
            flow.plans[key] = self.channel.prepare(plan), self._bytes(plan), built_in
        prepared, flow.sent, _ = flow.plans[key]
        return prepared

    def _compressed_plan(self, flow: _Flow) -> Plan:
        core = self.core
        stages = []
        for k, (segment, staging, envelope) in enumerate(zip(flow.segments, flow.staging, flow.envelopes, strict=True)):

            def average(rows: Sequence[Bytes], k: int = k) -> Computation:
                return core.average(k, rows, self._owner_flags)

            compress = core.compress(k, staging.send, envelope.node_flags)
            node_sum = core.node_sum(segment)
            stages.append(compressed_segment(staging, envelope, core.result(k), compress, average, node_sum))
        return Plan(f"{self.name}: compressed", stages)

    def _dense_plan(self, flow: _Flow) -> Plan:
        stages: list[list[Stage]] = []
        memory: list[Bytes] = []
        for segment, envelope in zip(flow.segments, flow.envelopes, strict=True):
            before, source = self.core.dense_source(segment, envelope.flags)
            where = source, self._averages, segment.runs()
            cut, used = dense_segment(self.rank, self.layout.nodes, envelope, *where, self.core.home)
            cut[0].compute[:0] = before
            stages.append(cut)
            memory += used
        flow.plan_memory += memory
        return Plan(f"{self.name}: dense", stages, memory)

    def _node_plan(self, flow: _Flow) -> Plan:
        stages = []
        for segment, envelope, staging in zip(flow.segments, flow.envelopes, flow.node_staging, strict=True):
            node_sum = self.core.node_sum(segment)
            assert node_sum is not None
            stages.append(node_segment(segment, staging, envelope, node_sum))
        return Plan(f"{self.name}: node", stages)

    # Handing over

    def begin(self, hyper: int, early: bool = True) -> None:
        """Opens the next step. ``hyper`` digests what gradients are compressed with: betas and coupled decay.

        ``early``: buckets may be posted before ``step()``, if that is done at all.
        """
        if self._dead is not None:
            raise type(self._dead)(*self._dead.args)
        self.begun = True
        self.verified_part = {"sampled": self.step % PARTS, "full": WHOLE, "version": NOTHING}[self._verify]
        self._hyper = hyper
        self._clear_flags()
        self._announcement[0] = 0
        self.core.clear_gradients()
        self._expected = self.expected.copy()
        self._located = self._surveyed = False
        self._early = early and self.overlapping
        self.arrivals.clear()
        self._arrange()
        self._reset_buckets(0)

    def _clear_flags(self) -> None:
        self._objections = 0
        self._flags[0] = self._heard_flags[0] = 0

    def _reset_buckets(self, attempt: int) -> None:
        """Does what can be done for all buckets at once: when one is posted, caches are full of what backward needs."""
        self.posted = 0
        all_expected = all(self._expected)
        for flow in self._flows:
            flow.ticket = None
            flow.envelopes.begin(self.step + 1, attempt, self._hyper, 0)
            if self._early:
                flow.prepared = self._prepared(flow)
        for _, bucket in self._buckets:
            bucket.left = len(bucket.tensors) if all_expected else sum(self._expected[t] for t in bucket.tensors)

    def hand_over(self, tensor: int) -> None:
        """The gradient of ``tensor`` is there and will not change. Called from hooks, once a step: it only counts.

        A bucket that is full is posted when it is its turn.
        """
        self.arrivals.append(tensor)
        if not self._expected[tensor]:
            if self.is_posted(tensor):
                self.object(Flag.UNHANDED)
            return
        for bucket in self._buckets_of[tensor]:
            bucket.left -= 1
            if bucket.left == 0 and self._early:
                self._post_full()

    def _post_full(self) -> None:
        while self.posted < len(self._buckets) and self._buckets[self.posted][1].left == 0:
            if not self._post(*self._buckets[self.posted], final=False):
                return

    @property
    def posted_tensors(self) -> list[int]:
        """Tensors whose bucket is on its way: a change of their gradient comes too late for this attempt."""
        return list(dict.fromkeys(self._rows[: self._posted_count].tolist()))

    @property
    def _posted_count(self) -> int:
        return sum([len(bucket.tensors) for _, bucket in self._buckets[: self.posted]])

    def is_posted(self, tensor: int) -> bool:
        """Is a bucket of the tensor on its way?"""
        return any(bucket.number < self.posted for bucket in self._buckets_of[tensor])

    def object(self, flag: Flag) -> None:
        """Sets a flag of this rank: all ranks will discard the step, or do it again."""
        self._objections |= int(flag)

    def _post(self, flow: _Flow, bucket: _Bucket, final: bool) -> bool:
        """Sends the next bucket on its way; False, and nothing done, if a gradient cannot be read before ``step()``."""
        addresses = self._grads[bucket.tensors].tolist() if self._located else self._locate(bucket.tensors, final)
        if addresses is None:
            return False
        was_full, bucket.is_full = bucket.is_full, 0 not in addresses
        if not (was_full and bucket.is_full):
            self._grads[bucket.tensors] = addresses
            for k in bucket.segments:
                flow.envelopes[k].presence[:] = flow.segments[k].presence_bits(self._grads != 0)
        self.posted += 1
        if flow.ticket is None:
            # In step() hyperparameters that are built in may be others than when the step was begun.
            prepared = self._prepared(flow) if final else flow.prepared
            flow.ticket = self.channel.submit(prepared, self.timeout_s, False, 0)
        flow.ticket.open(bucket.segments.stop, bucket.intake, addresses, NOTHING if final else self.verified_part)
        return True

    def changed_tensors(self) -> list[int]:
        """Before ``exchange``: tensors of posted buckets whose gradient's bytes are not what was handed over."""
        if not self.posted or self.verified_part == NOTHING:
            return []
        count = self._posted_count
        rows = self._rows[:count]
        now = self.core.kernels.checksums(self._grads[rows], self._nbytes[:count], self.verified_part)
        return rows[now != self._sums[:count]].tolist()

    # The exchange

    def survey(self, lr: float) -> Verdict | None:
        """Before the exchange of gradients that are to be clipped: all ranks tell their norms, and ``norm`` is set.

        For a step of which nothing is on its way. Returns None, or what all ranks do with the step if one of them skips
        it: then it is over. ``lr`` is shown in messages. Raises MismatchError, StallError, PeerError.
        """
        assert self.begun and not self.posted_tensors
        self._survey = self._survey or self._ballot(self.layout.digest ^ 1, 0)
        self._surveyed = True
        try:
            everything = list(range(len(self._grads)))
            addresses = self._locate(everything, True)
            assert addresses is not None
            self._grads[:] = addresses
            self._located = True
            self._cast(self._survey, 0, self._hyper, lr, 0, with_norm=True)
        except BaseException as error:
            self.give_up(error)
            raise
        heard = int(self._heard_flags[0])
        if not heard & _OVER:
            return None
        self.begun = False
        return self._skipped(heard, sent=[self._survey.sent])

    def exchange(
        self,
        hyper: int,
        hyper_now: int,
        lr: float,
        announcement: int,
        again: Callable[[], None],
        *,
        with_norm: bool = False,
    ) -> Verdict:
        """Ends the step's exchange on all ranks: posts what is left, votes, waits; commits nothing.

        ``hyper`` digests what gradients are compressed with, ``hyper_now`` everything that must agree (lr too), ``lr``
        is shown in messages. ``announcement`` is the coordinator's news for all. ``again`` is called before a second
        attempt, to set the hyperparameters as they are now. ``with_norm``: the vote also sets ``norm``.

        Raises NonFiniteError (all ranks, nothing changed), MismatchError, StallError, PeerError.
        """
        started = time.perf_counter()
        if not self.begun:
            self.begin(hyper)
        if hyper != self._hyper:
            self.object(Flag.CHANGED)
        attempt = 0
        try:
            while True:
                self._finish(attempt, hyper_now, lr, announcement, with_norm)
                heard = int(self._heard_flags[0])
                if not heard & _AGAIN or heard & _OVER:
                    break
                assert attempt == 0, "a gradient changed while step() was running"
                self._withdraw_overlap()
                attempt = 1
                self.traffic.redone_steps += 1
                self._clear_flags()
                self._hyper = hyper
                self._located = False
                again()
                self._reset_buckets(attempt)
            self._hear()
        except BaseException as error:
            self.give_up(error)
            raise
        self.begun = False
        self.traffic.last_exposed_s = time.perf_counter() - started
        self.traffic.exposed_s += self.traffic.last_exposed_s
        if heard & _OVER:
            return self._skipped(heard, self._exchanged)
        if heard & Flag.NON_FINITE or not self._is_finite():
            self._account(self._exchanged, skipped=True)
            raise NonFiniteError(
                f"{self.name}: a gradient is NaN or Inf in step {self.step}, on rank(s) {self._non_finite_ranks()}; "
                "the step was discarded on all ranks. Use a GradScaler, clip, or lower the learning rate."
            )
        self._account(self._exchanged, skipped=False)
        return Verdict.TAKE

    def _skipped(self, heard: int, sent: Sequence[_Sent]) -> Verdict:
        self._account(sent, skipped=True)
        return Verdict.OVERFLOW if heard & Flag.NON_FINITE else Verdict.SKIP

    def _withdraw_overlap(self) -> None:
        if self.overlap:
            _log.warning(
                "%s: a gradient changed after backward (clipping, loss scaling or a second backward), so it is "
                "exchanged again, and from now on without overlap. Pass overlap=False to say so from the start.",
                self.name,
            )
        self.overlap = self.overlapping = self._early = False

    def _finish(self, attempt: int, hyper: int, lr: float, announcement: int, with_norm: bool) -> None:
        for flow, bucket in self._buckets[self.posted :]:
            self._post(flow, bucket, final=True)
        if self.core.steps_locally:
            self._read_local()
        if self._replicas is not None:
            checksum = self._replicas.checksum(self.core.replica_addresses().__getitem__, self.step)
            self._vote.envelopes[0].header["replica"] = checksum
        self._cast(self._vote, attempt, hyper, lr, announcement, with_norm)

    def _cast(self, ballot: _Ballot, attempt: int, hyper: int, lr: float, announcement: int, with_norm: bool) -> None:
        """Says to all what this rank has to say, and waits for it and for all that is on its way."""
        ballot.envelopes.begin(self.step + 1, attempt, hyper, announcement)
        (envelope,) = ballot.envelopes
        envelope.header["lr"] = lr
        envelope.header["flags"] = self._objections
        if ballot is self._vote:
            for heard in self._node.envelopes if self._node is not None else ():
                if heard.has_disagreement:
                    envelope.header[0] = heard.passed_on[0]
        # Read while what has been posted travels.
        envelope.header["squares"] = self._squares() if with_norm else 0.0
        exchanges = [(flow.ticket, flow.envelopes) for flow in self._flows if flow.ticket is not None]
        exchanges.append((self.channel.submit(ballot.prepared, self.timeout_s, False), ballot.envelopes))
        what = f"{self.name}: step {self.step + 1}"
        states = [wait(ticket, self.channel, self.ranks, self._watch, what) for ticket, _ in exchanges]
        # One that fails takes the others of its channel with it, whichever comes first here: report the cause.
        for state in _FAILURES if any(state != State.DONE for state in states) else ():
            for found, (ticket, envelopes) in zip(states, exchanges, strict=True):
                if found == state:
                    self._fail(ticket, envelopes)
        if with_norm:
            squares = envelope.squares()
            self.norm = math.sqrt(sum(squares) / len(squares))

    def _squares(self) -> float:
        """Sum of squares of this rank's gradients, in float64: tensor by tensor, in registration order."""
        return sum(self.core.kernels.squares(self._grads.copy(), self.layout.numels).tolist())

    def _read_local(self) -> None:
        """Looks at the gradients that do not travel, for the vote to tell the others."""
        if self._node is not None:
            assert self._node.ticket is not None
            wait(self._node.ticket, self.channel, self.ranks, self._watch, f"{self.name}: step {self.step + 1}")
        unposted = [tensor for tensor in self._local if not self._buckets_of[tensor]]
        if unposted:
            addresses = self._grads[unposted] if self._located else self._locate(unposted, True)
            assert addresses is not None
            self._grads[unposted] = addresses
        if self._local and not self.core.is_local_finite(self._local):
            self.object(Flag.NON_FINITE)
        bits = np.packbits(self._grads != 0, bitorder="little")
        self._vote.envelopes[0].presence[: bits.size] = bits

    def give_up(self, error: BaseException) -> None:
        """A step that was begun has not come to its end: there will be no other."""
        if not isinstance(error, OcommError):
            self.channel.abandon()
            error = HorovodInternalError(
                f"{self.name}: a step was interrupted by {type(error).__name__}, so this rank may have missed what the "
                "others have done. Wrap the optimizer anew, and load a state on all ranks."
            )
        self._dead = error
        self.begun = False
        # Some rank may have been ready for a transfer that it will not make now.
        if self.inside is not None and self.inside.bridge is not None:
            self.inside.bridge.end(f"{self.name} has failed: {error}")

    def _hear(self) -> None:
        self.present_anywhere[:] = False
        if self.core.steps_locally:
            count = self.present_anywhere.size
            self.present_anywhere[:] = np.unpackbits(self._vote.envelopes[0].heard, count=count, bitorder="little")
        for flow in self._flows:
            heard = flow.envelopes.heard.tobytes()
            if flow.anywhere is None or heard != flow.heard:
                present = np.zeros_like(self.present_anywhere)
                for segment, envelope in zip(flow.segments, flow.envelopes, strict=True):
                    segment.read_presence(envelope.heard, present)
                flow.heard, flow.anywhere = heard, np.flatnonzero(present)
            self.present_anywhere[flow.anywhere] = True

    @property
    def heard_announcement(self) -> int:
        """What the coordinator announced in the last step."""
        return int(self._announcement[0])

    def _is_finite(self) -> bool:
        """The averages are finite; the same on all ranks, since all hold the same bytes."""
        for flow in self._flows:
            for k, segment in enumerate(flow.segments):
                if flow.kind == "compressed":
                    if not self.core.is_finite(k):
                        return False
                elif flow.kind == "dense" and not self.core.is_dense_finite(segment, self._averages):
                    return False
        return True

    def _has_finite_gradients(self) -> bool:
        core = self.core
        return all(core.kernels.finite(s.blocks, core.gradients) for flow in self._flows for s in flow.segments)

    def _non_finite_ranks(self) -> list[int]:
        """Ranks whose gradients have it; empty where only the average overflowed.

        Those that compressed have said so in a header, unless it spoke for a node. For the others, who only add up, the
        ranks look at their gradients and tell each other once more: all of them or none, for all have heard the same.
        """
        (vote,) = self._vote.envelopes
        if self.layout.nodes.is_flat:
            envelopes = [vote, *(envelope for flow in self._flows for envelope in flow.envelopes)]
            found = {rank for envelope in envelopes for rank in envelope.ranks_with(Flag.NON_FINITE)}
            if found:
                return [self.ranks[rank] for rank in sorted(found)]
        if not self._has_finite_gradients():
            vote.header["flags"] = Flag.NON_FINITE
        vote.header["attempt"] = _INQUEST
        ticket = self.channel.submit(self._vote.prepared, self.timeout_s, False)
        wait(ticket, self.channel, self.ranks, self._watch, f"{self.name}: step {self.step}")
        return [self.ranks[rank] for rank in vote.ranks_with(Flag.NON_FINITE)]

    @property
    def _exchanged(self) -> list[_Sent]:
        ballots = [self._vote, self._survey] if self._surveyed else [self._vote]
        return [*(flow.sent for flow in self._flows), *(ballot.sent for ballot in ballots if ballot is not None)]

    def _account(self, sent: Sequence[_Sent], skipped: bool) -> None:
        self.step += 1
        across = sum(one.across for one in sent)
        traffic = self.traffic
        traffic.steps += 1
        traffic.skipped_steps += skipped
        kinds = {flow.kind for flow in self._flows}
        traffic.compressed_steps += "compressed" in kinds
        traffic.dense_steps += "dense" in kinds and "compressed" not in kinds
        traffic.local_steps += kinds <= {"node"}
        traffic.last_bytes_sent = across
        traffic.bytes_sent += across
        traffic.bytes_sent_inside += sum(one.inside for one in sent)
        traffic.bytes_dense += self.layout.dense_bytes()

    def commit(self) -> None:
        """Takes the step: the core's state and parameters move."""
        self.core.commit(self.present_anywhere, self.averages)

    def average(self, tensor: int) -> Floats:
        """The averaged gradient of a tensor in warm-up: float32, ``numel`` elements, valid until the next step."""
        first = int(self.layout.offsets[tensor])
        return self.averages[first : first + int(self.layout.numels[tensor])]

    def resume(self, step: int, order: Sequence[int] | None) -> None:
        """Goes on after ``step`` steps, with the order of a saved run or, if None, with the first step's as at a start.

        Raises ValueError if a step is under way.
        """
        if self.begun:
            raise ValueError("a step is under way")
        self.step = step
        self.overlapping = False
        if order is not None:
            self.adopt_order(order)
            self.overlapping = self.overlap

    def adopt_order(self, order: Sequence[int]) -> None:
        """Takes over the order in which gradients arrive (rank 0's, the same on all ranks) for all later steps."""
        assert sorted(order) == sorted(self.order) and not self.begun
        self.order = list(order)
        self._exchange = self._arranged = None
        self._cut_for.clear()

    def _fail(self, ticket: Ticket, envelopes: Sequence[Envelope]) -> None:
        state = ticket.state
        if state == State.MISMATCH:
            raise self._explained(envelopes[ticket.error_segment])
        if state == State.TIMED_OUT:
            late = [self.ranks[rank] for rank in self.channel.waiting_for()]
            why = f"rank(s) {late} have not sent their part" if late else f"{self.core.kernels.name} does not end"
            raise StallError(f"{self.name}: step {self.step + 1} was not over after {self.timeout_s:.0f} s; {why}.")
        if state == State.WRONG_SIZE:
            raise MismatchError(
                f"{self.name}: rank {self.ranks[ticket.error]} sent a message that is too short in step "
                f"{self.step + 1}. All ranks must run the same version of ocomm with the same settings."
            )
        if state == State.TASK_ERROR:
            cause = next(iter(ticket.plan.failures()), None)
            raise HorovodInternalError(f"{self.name}: the device failed in step {self.step + 1}: {cause}") from cause
        if state == State.ABORTED and self._dead is None:
            raise PeerError(f"{self.name}: step {self.step + 1} was aborted; see the first error of this rank.")
        raise HorovodInternalError(
            f"{self.name}: the network failed in step {self.step + 1} (MPI error {ticket.error})."
        )

    def _explained(self, envelope: Envelope) -> MismatchError:
        differences = envelope.differences()
        if differences and differences[0][0] == "replica":
            return ReplicasDifferError(f"{self.name}: the ranks' parameters differ in step {self.step + 1}.")
        return MismatchError(self._explain(envelope))

    def _explain(self, envelope: Envelope) -> str:
        """What the headers of all ranks disagree on."""
        for what, values in envelope.differences():
            by_value: dict[int, list[int]] = {}
            for rank, value in values.items():
                by_value.setdefault(value, []).append(self.ranks[rank])
            if what == "step":
                said = "; ".join(f"rank(s) {who} are at step {value}" for value, who in by_value.items())
                return f"{self.name}: the ranks are not at the same step: {said}. Call step() equally often everywhere."
            if what == "hyper":
                lrs = {self.ranks[rank]: f" (lr {lr:g})" for rank, lr in envelope.learning_rates().items()}
                said = "; ".join(f"rank(s) {who}{lrs.get(who[0], '')}" for who in by_value.values())
                return (
                    f"{self.name}: lr, betas, eps or weight decay differ between ranks in step {self.step + 1}: "
                    f"{said}. "
                    "Give all ranks the same optimizer settings and the same schedule."
                )
            names = [self.layout.tensors[t].name for t in self._tensors_of(envelope)[:3]]
            said = "; ".join(f"rank(s) {who}: {value:#x}" for value, who in by_value.items())
            return f"{self.name}: mismatched {what} in the exchange of {names}: {said}."
        return f"{self.name}: a message with a wrong header arrived in step {self.step + 1}."

    def _tensors_of(self, envelope: Envelope) -> tuple[int, ...]:
        for flow in self._flows:
            for segment, candidate in zip(flow.segments, flow.envelopes, strict=True):
                if candidate is envelope:
                    return segment.tensors
        return ()

    def memory(self) -> dict[str, int]:
        """Bytes held, by buffer: the core's state and the runtime's own."""
        own = {
            "averages": self.averages.nbytes,
            "dense_staging": sum(memory.nbytes for memory in self._dense.plan_memory) if self._dense else 0,
            **dict.fromkeys(("send", "receive", "node_staging"), 0),
        }
        for staging in self._compressed.staging if self._compressed else ():
            for name, nbytes in staging.held().items():
                own[name] += nbytes
        for node in self._node.node_staging if self._node else ():
            own["node_staging"] += node.memory.nbytes + sum(message.nbytes for message in node.messages)
        return {**self.core.memory(), **own}
