"""Compressed allreduce of one named array: the three-phase exchange with errors kept between calls.

What the optimizers do inside their steps, as a collective of its own (docs/algorithms.md, Compressed allreduce). Sent =
received + residuals, over any number of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ocomm.collectives import pipeline
from ocomm.collectives.compressed import Envelope, compressed_segment
from ocomm.collectives.engine import Channel, State
from ocomm.collectives.plan import Average, Compress, Plan, Stage, Unpack
from ocomm.collectives.scratch import aligned
from ocomm.collectives.waiting import Watch, wait
from ocomm.compression.layout import Layout, SegmentLayout, TensorSpec, payload_nbytes
from ocomm.errors import HorovodInternalError, InvalidRequestError, MismatchError, NonFiniteError
from ocomm.kernels.base import Bytes, Floats, aligned_zeros
from ocomm.types import Flag


class OneBitAllreduce:
    """Owner of the errors of one name on rank ``rank`` of the channel's ``ranks`` (world ranks, for messages).

    Memory per element: worker errors 2 * 4 B, owner errors 2 * 4/n B, values and result 8 B, packed 3/8 B.
    """

    def __init__(
        self,
        channel: Channel,
        name: str,
        shape: tuple[int, ...],
        rank: int,
        ranks: Sequence[int],
        segment_nbytes: int,
        watch: Watch,
    ) -> None:
        self.channel = channel
        self.name = name
        self.shape = shape
        self.rank = rank
        self.ranks = tuple(ranks)
        self.calls = 0
        self._watch = watch
        layout = Layout([TensorSpec(name, shape)], len(self.ranks))
        self.layout = layout
        self._values, self._result = (aligned_zeros(layout.flat_numel) for _ in range(2))
        self._errors: list[Floats] = [aligned_zeros(layout.flat_numel) for _ in range(2)]
        owned = layout.owned_numel(rank)
        self._owner_errors: list[Floats] = [aligned_zeros(owned) for _ in range(2)]
        self._flags, self._owner_flags, self._heard = (np.zeros(1, np.uint32) for _ in range(3))
        self._announcement = np.zeros(1, np.int64)
        packed_nbytes = int(payload_nbytes(layout.blocks["length"]).sum())
        cut = pipeline.segment_nbytes(packed_nbytes, len(self.ranks), segment_nbytes)
        segments = layout.segments([0], rank, cut)
        self._envelopes = [self._envelope(segment) for segment in segments]
        buffers = [self._buffers(segment) for segment in segments]
        # Errors are written beside the old ones; the roles of the two alternate.
        self._prepared = [channel.prepare(self._plan(segments, buffers, turn)) for turn in (0, 1)]
        self._turn = 0

    def _envelope(self, segment: SegmentLayout) -> Envelope:
        return Envelope.new(self.rank, segment.signature("onebit-l1"), 1, self._flags, self._heard, self._announcement)

    def _buffers(self, segment: SegmentLayout) -> tuple[Bytes, list[Bytes], Bytes]:
        receive = [aligned(segment.message_nbytes[self.rank]) for _ in self.ranks]
        return aligned(segment.packed_nbytes), receive, aligned(segment.packed_nbytes)

    def _plan(self, segments: list[SegmentLayout], buffers: list[tuple[Bytes, list[Bytes], Bytes]], turn: int) -> Plan:
        stages: list[list[Stage]] = []
        for segment, envelope, (send, receive, gathered) in zip(segments, self._envelopes, buffers, strict=True):
            compress = Compress(
                blocks=segment.worker_blocks, values=self._values, tensors=None, previous=None,
                error=self._errors[turn], error_out=self._errors[1 - turn], mask=None, scale="l1", packed=send,
                flags=self._flags,
            )  # fmt: skip

            def average(rows: Sequence[Bytes], segment: SegmentLayout = segment, gathered: Bytes = gathered) -> Average:
                return Average(
                    blocks=segment.owned_blocks, received=rows, origin=segment.message_start[self.rank],
                    error=self._owner_errors[turn], error_out=self._owner_errors[1 - turn], mask=None, scale="l1",
                    packed=gathered, flags=self._owner_flags,
                )  # fmt: skip

            cut = compressed_segment(self.rank, segment, envelope, send, receive, gathered, compress, average)
            cut[-1].compute.append(Unpack(segment.blocks, gathered, None, self._result))
            stages.append(cut)
        return Plan(self.name, stages or [[Stage()]])

    def __call__(self, array: np.ndarray, timeout_s: float) -> np.ndarray:
        """The average over ranks as scale times sign: a new float32 array of the same shape, the same on all ranks.

        Raises InvalidRequestError for another shape or dtype than the first call's, MismatchError if the ranks call
        different names, NonFiniteError (all ranks, errors unchanged) if a value is NaN or Inf.
        """
        if array.shape != self.shape or array.dtype != np.float32:
            raise InvalidRequestError(
                f"'{self.name}' was float32 of shape {self.shape} in its first call, now it is {array.dtype} of shape "
                f"{array.shape}; give another array another name."
            )
        self._values[: array.size] = array.reshape(-1)
        self._flags[0] = self._owner_flags[0] = self._heard[0] = 0
        for envelope in self._envelopes:
            envelope.begin(self.calls + 1, 0, 0, 0)
        ticket: Any = self.channel.submit(self._prepared[self._turn], timeout_s, False)
        state = wait(ticket, self.channel, self.ranks, self._watch, f"compressed_allreduce of '{self.name}'")
        if state == State.MISMATCH:
            raise MismatchError(
                f"'{self.name}': the ranks do not make the same compressed_allreduce calls in the same order; "
                f"rank {self.ranks[ticket.error]} sent another name, shape or call number."
            )
        if state != State.DONE:
            raise HorovodInternalError(f"compressed_allreduce of '{self.name}' failed: {state.name.lower()}.")
        self.calls += 1
        if self._heard[0] or not np.isfinite(self._result).all():
            who = sorted({rank for envelope in self._envelopes for rank in envelope.ranks_with(Flag.NON_FINITE)})
            raise NonFiniteError(
                f"'{self.name}' has NaN or Inf on rank(s) {[self.ranks[r] for r in who]}; no error was changed."
            )
        self._turn = 1 - self._turn
        return self._result[: array.size].reshape(self.shape).copy()

    @property
    def error(self) -> Floats:
        """This rank's worker error: a copy, flat float32."""
        return self._errors[self._turn][: int(self.layout.numel)].copy()

    def owner_error(self) -> Floats:
        """This rank's owner error, as a flat float32 array of the whole tensor, zero where others own."""
        flat = np.zeros(int(self.layout.numel), np.float32)
        for block in self.layout.blocks[self.layout.blocks["owner"] == self.rank]:
            first, owned, length = int(block["start"]), int(block["owned"]), int(block["length"])
            flat[first : first + length] = self._owner_errors[self._turn][owned : owned + length]
        return flat
