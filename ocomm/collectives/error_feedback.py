"""Compressed allreduce of one named array: the three-phase exchange with errors that are kept between calls.

The optimizers do the same inside their steps; this is a collective of its own (docs/algorithms.md, Compressed
allreduce). Sent = received + residuals, over any number of calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ocomm.collectives import pipeline
from ocomm.collectives.compressed import NodeSum, compressed_segment, compressed_staging, vote
from ocomm.collectives.engine import Channel, State, Ticket
from ocomm.collectives.outcome import explain
from ocomm.collectives.phases import Staging
from ocomm.collectives.plan import Loop, Plan, Stage, loop
from ocomm.collectives.routes import vote_groups
from ocomm.collectives.scratch import aligned
from ocomm.collectives.segment_header import SegmentHeaders
from ocomm.collectives.waiting import Watch, wait
from ocomm.compression.codecs import SCALED_SIGNS
from ocomm.compression.layout import Layout, SegmentLayout, TensorSpec
from ocomm.errors import InvalidRequestError, MismatchError, NonFiniteError
from ocomm.kernels.base import TENSOR, Bytes, Floats, Kernels, aligned_zeros
from ocomm.types import Flag, Nodes


class OneBitAllreduce:
    """Owns the errors of one name on rank ``rank`` of the channel. ``ranks`` are the channel's world ranks, for
    messages.

    ``nodes`` groups the channel's ranks. If they have several ranks each, a node sums before it compresses, and each of
    its ranks keeps the errors of its slice.

    Memory per element: worker errors 2 * 4 B, server errors 2 * 4/n B, values and result 8 B, packed 3/8 B. On nodes of
    M ranks: worker errors 2 * 4/M B, values 4 + 4/M B, result 4 B, packed 3/8 B, messages inside the node about 8 B.
    """

    def __init__(
        self,
        channel: Channel,
        name: str,
        shape: tuple[int, ...],
        rank: int,
        ranks: Sequence[int],
        nodes: Nodes,
        segment_nbytes: int,
        watch: Watch,
        block_size: int = 4096,
    ) -> None:
        self.channel = channel
        self.name = name
        self.shape = shape
        self.rank = rank
        self.ranks = tuple(ranks)
        self.calls = 0
        self._watch = watch
        layout = Layout([TensorSpec(name, shape)], len(self.ranks), block_size, nodes=nodes)
        self.layout = layout
        mine = layout.worker_numel(rank)
        self._values, self._result = (aligned_zeros(layout.flat_numel) for _ in range(2))
        self._node_values = self._values if nodes.is_flat else aligned_zeros(mine)
        self._addresses, self._node_addresses = np.zeros(1, TENSOR), np.zeros(1, TENSOR)
        self._addresses["grad"] = self._values.ctypes.data
        self._node_addresses["grad"] = self._node_values.ctypes.data
        self._errors: list[Floats] = [aligned_zeros(mine) for _ in range(2)]
        owned = layout.owned_numel(rank)
        self._server_errors: list[Floats] = [aligned_zeros(owned) for _ in range(2)]
        self._flags, self._owner_flags, self._heard = (np.zeros(1, np.uint32) for _ in range(3))
        self._announcement = np.zeros(1, np.int64)
        packed_nbytes = int(SCALED_SIGNS.payload_nbytes(layout.blocks["length"]).sum())
        cut = pipeline.segment_nbytes(packed_nbytes, len(self.ranks), segment_nbytes)
        segments = layout.segments([0], rank, cut)
        contents = [(segment.signature("onebit-l1"), 1) for segment in segments]
        shared = self._flags, self._heard, self._announcement
        self._headers = SegmentHeaders(rank, contents, *shared, for_node=not nodes.is_flat)
        stagings = [compressed_staging(segment) for segment in segments]
        results = [aligned(segment.packed_nbytes) for segment in segments]
        # New errors are written to a second buffer, so that a failed call changes nothing; the two buffers alternate.
        self._prepared = [channel.prepare(self._plan(stagings, results, turn)) for turn in (0, 1)]
        self._turn = 0

    def _plan(self, stagings: list[Staging], results: list[Bytes], turn: int) -> Plan:
        segments: list[list[Stage]] = []
        for staging, segment_header, result in zip(stagings, self._headers, results, strict=True):
            layout = staging.layout
            assert isinstance(layout, SegmentLayout)
            compress = loop(
                Kernels.compress, segment_header.node_flags, blocks=layout.worker_blocks, values=self._node_values,
                error=self._errors[turn], error_out=self._errors[1 - turn], mask=None, scale="l1", packed=staging.send,
            )  # fmt: skip

            def average(rows: Sequence[Bytes], layout: SegmentLayout = layout, result: Bytes = result) -> Loop:
                return loop(
                    Kernels.average, self._owner_flags, blocks=layout.owned_blocks, received=rows,
                    origin=layout.message_start[self.rank], error=self._server_errors[turn],
                    error_out=self._server_errors[1 - turn], mask=None, scale="l1", packed=result,
                )  # fmt: skip

            stages = compressed_segment(staging, segment_header, result, compress, average, self._node_sum(layout))
            stages[-1].compute.append(loop(Kernels.unpack, None, layout.blocks, result, None, self._result))
            segments.append(stages)
        return Plan(self.name, segments or [[Stage()]])

    def _node_sum(self, layout: SegmentLayout) -> NodeSum | None:
        """Returns the node's sum, which is written to where this rank's blocks have their values."""
        if layout.nodes.is_flat:
            return None
        runs = [table.copy() for table in layout.slice_runs]
        if layout.workers:
            mine = runs[self.layout.slice_of(self.rank)]
            first = np.searchsorted(layout.worker_blocks["start"], mine["start"])
            mine["start"] = layout.worker_blocks["local"][first]
        return NodeSum(self._addresses, self._node_addresses, runs, layout.nodes.weight)

    def __call__(self, array: np.ndarray, timeout_s: float) -> np.ndarray:
        """Returns the average over ranks as scale times sign: a new float32 array of the same shape and bits on all
        ranks.

        Collective; waits. Raises InvalidRequestError for another shape or dtype than in the first call, MismatchError
        if the ranks call different names, NonFiniteError (on all ranks, errors unchanged) if a value is NaN or Inf.
        """
        ticket = self.begin(array, timeout_s)
        wait(ticket, self.channel, self.ranks, self._watch, f"compressed_allreduce of '{self.name}'")
        return self.finish(ticket, timeout_s)

    def begin(self, array: np.ndarray, timeout_s: float) -> Ticket:
        """Begins a call: gives a copy of ``array`` to the engine."""
        if array.shape != self.shape or array.dtype != np.float32:
            raise InvalidRequestError(
                f"'{self.name}' was float32 of shape {self.shape} in its first call, now it is {array.dtype} of shape "
                f"{array.shape}; give another array another name."
            )
        self._values[: array.size] = array.reshape(-1)
        self._flags[0] = self._owner_flags[0] = self._heard[0] = 0
        self._headers.begin(self.calls + 1, 0, 0, 0)
        return self.channel.submit(self._prepared[self._turn], timeout_s, False)

    def finish(self, ticket: Ticket, timeout_s: float) -> np.ndarray:
        """Ends a call once the ticket is over, and returns the average."""
        if ticket.state != State.DONE:
            what = f"compressed_allreduce of '{self.name}': call {self.calls + 1}"
            raise explain(ticket, self.channel, self.ranks, what, timeout_s, mismatch=lambda: self._mismatch(ticket))
        self.calls += 1
        if self._heard[0] or not np.isfinite(self._result).all():
            who = [self.ranks[rank] for rank in self._non_finite_ranks(timeout_s)]
            raise NonFiniteError(f"'{self.name}' has NaN or Inf on rank(s) {who}; no error was changed.")
        self._turn = 1 - self._turn
        return self._result[: math.prod(self.shape)].reshape(self.shape).copy()

    def _mismatch(self, ticket: Ticket) -> MismatchError:
        segment_header = self._headers[ticket.error_segment]
        who = f"rank {self.ranks[ticket.error]}"
        if not segment_header.received:
            found = {rank for _, values in segment_header.differences() for rank in values}
            named = sorted(self.ranks[rank] for rank in found if rank < len(self.ranks))
            who = f"one of ranks {named or list(self.ranks)}"
        return MismatchError(
            f"'{self.name}': the ranks do not make the same compressed_allreduce calls in the same order; {who} sent "
            "another name, shape or call number."
        )

    def _non_finite_ranks(self, timeout_s: float) -> list[int]:
        """Returns the ranks whose values were not finite. Of a node's sum that is not known, so the ranks tell each
        other.
        """
        if self.layout.nodes.is_flat:
            return sorted(
                {rank for segment_header in self._headers for rank in segment_header.ranks_with(Flag.NON_FINITE)}
            )
        own = np.array([0 if np.isfinite(self._values).all() else Flag.NON_FINITE], np.uint32)
        segment_headers = SegmentHeaders(self.rank, [(self.layout.digest, 0)], own, self._heard, self._announcement)
        segment_headers.begin(self.calls, 1, 0, 0)
        (segment_header,) = segment_headers
        plan = vote(self.rank, vote_groups(self.layout.nodes), segment_header)
        ticket = self.channel.submit(self.channel.prepare(plan), timeout_s, False)
        wait(ticket, self.channel, self.ranks, self._watch, f"compressed_allreduce of '{self.name}'")
        return segment_header.ranks_with(Flag.NON_FINITE)

    @property
    def error(self) -> Floats:
        """A copy of this rank's worker error: flat float32, zero where other ranks of its node compress."""
        return self.layout.from_worker(0, self.rank, self._errors[self._turn]).copy()

    def server_error(self) -> Floats:
        """Returns this rank's server error as a flat float32 array of the whole tensor, zero where other ranks own
        blocks.
        """
        flat = np.zeros(int(self.layout.numel), np.float32)
        for block in self.layout.blocks[self.layout.blocks["owner"] == self.rank]:
            first, owned, length = int(block["start"]), int(block["owned"]), int(block["length"])
            flat[first : first + length] = self._server_errors[self._turn][owned : owned + length]
        return flat
