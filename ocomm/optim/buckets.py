"""The buckets of a step: which gradients are exchanged together, in which order, and which of them have been posted.

A bucket is posted when all its gradients are ready and the buckets before it have been posted, in one order on all
ranks: before ``step()`` if steps overlap with backward, else in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocomm.kernels.base import NOTHING, PARTS, WHOLE
from ocomm.optim.flows import Flow, Flows
from ocomm.optim.step_channel import StepChannel

#: Returns the addresses of the tensors' gradients at this moment, 0 for none; or None if they must not be read before
#: ``step()``.
Locate = Callable[[list[int], bool], list[int] | None]


@dataclass(slots=True, eq=False)
class Bucket:
    """Tensors that are exchanged together, in ``segments`` of their flow.

    ``number`` is its position in the order of posting; ``end`` is the number of tensors in the buckets up to this one.
    """

    number: int
    end: int
    flow: Flow
    tensors: list[int]
    segments: range
    #: The result of ``Channel.inputs``, through which the engine gets the addresses of the gradients.
    inputs: Any
    #: Number of gradients that are expected and not ready yet.
    left: int = 0
    #: True if the headers say that this rank has all gradients.
    is_full: bool = False


class Buckets:
    """The buckets of ``flows``. ``locate(tensors, final)`` finds gradients, as ``Stepper`` says.

    ``verify`` says how much of a gradient is read again to detect that it changed after it was posted: all of it
    (``"full"``), another 64th in each step (``"sampled"``), or nothing (``"version"``).
    """

    def __init__(self, flows: Flows, wire: StepChannel, locate: Locate, verify: str) -> None:
        self._flows = flows
        self._wire = wire
        self._locate = locate
        self._verify = verify
        core = flows.core
        #: Tensors whose gradients the frontend expects in the step that begins; a bucket waits for these.
        self.expected = [True] * len(core.layout.tensors)
        self._expected = self.expected  # the tensors that the current step expects
        #: Tensors in the order in which their gradients became ready.
        self.arrivals: list[int] = []
        #: True if a gradient came that was not expected and whose bucket had been posted.
        self.is_surprised = False
        #: True if a gradient of this step that ``take_read`` has given up was not finite.
        self.had_non_finite = False
        #: How many buckets of the current step have been posted, and how many tensors are in them.
        self.posted = self._posted_count = 0
        self._read = 0
        #: The part of a gradient posted before ``step()`` that is read again (``Kernels.checksum``).
        self.verified_part = NOTHING
        #: Addresses of this rank's gradients, 0 for none; those of all tensors if all were located at once.
        self.addresses: NDArray[np.uint64] = core.gradients["grad"]
        self._are_located = False
        #: True if buckets may be posted before ``step()``. The same on all ranks whose step began before that.
        self.early = False
        self._buckets: list[Bucket] = []
        self._of_tensor: list[tuple[Bucket, ...]] = []
        # The tensors of the buckets one after the other, the sizes of their gradients in bytes, and the checksums of
        # the gradients when they were posted before ``step()``.
        self._rows = np.zeros(0, np.int64)
        self._nbytes = np.zeros(0, np.int64)
        self._sums = np.zeros(0, np.uint64)

    def begin(self, step: int, attempt: int, early: bool) -> None:
        """Opens an attempt of step ``step``, counted from 0, of which nothing is posted.

        ``early``: buckets may be posted before ``step()``. Headers do not say what gradients are compressed with: ranks
        may begin a step before and after that is changed, and the vote compares it.

        Everything that can be prepared is prepared here for all buckets at once, because when a bucket is posted the
        caches hold what backward needs.
        """
        flows = self._flows
        self.early = early
        self._are_located = self.is_surprised = self.had_non_finite = False
        self.posted = self._posted_count = self._read = 0
        if attempt == 0:
            self.verified_part = {"sampled": step % PARTS, "full": WHOLE, "version": NOTHING}[self._verify]
            flows.core.clear_gradients()
            self._expected = self.expected.copy()
            self.arrivals.clear()
            if flows.arrange():
                self._arrange()
        for flow in flows.flows:
            flow.ticket = None
            flow.segment_headers.begin(step + 1, attempt)
            if early:
                flow.prepare()
        all_expected = all(self._expected)
        for bucket in self._buckets:
            bucket.left = len(bucket.tensors) if all_expected else sum([self._expected[t] for t in bucket.tensors])

    def _arrange(self) -> None:
        """Makes the buckets of the flows of this step."""
        groups = [(flow, *bucket) for flow in self._flows.flows for bucket in flow.buckets]
        self._rows = np.array([tensor for _, tensors, _ in groups for tensor in tensors], np.int64)
        self._nbytes = 4 * self._flows.layout.numels[self._rows]
        self._sums = np.zeros(self._rows.size, np.uint64)
        of: list[list[Bucket]] = [[] for _ in self.expected]
        self._buckets, end = [], 0
        for number, (flow, tensors, segments) in enumerate(groups):
            start, end = end, end + len(tensors)
            inputs = self._wire.channel.inputs(
                self._flows.core.gradients, self._rows[start:end], self._nbytes[start:end], self._sums[start:end]
            )
            bucket = Bucket(number, end, flow, tensors, segments, inputs)
            self._buckets.append(bucket)
            for tensor in tensors:
                of[tensor].append(bucket)
        self._of_tensor = [tuple(buckets) for buckets in of]

    def mark_ready(self, tensor: int) -> None:
        """Notes that the gradient of ``tensor`` is ready and will not change. Called from hooks, once a step.

        It only counts; a bucket that is complete is posted when it is its turn.
        """
        self.arrivals.append(tensor)
        if not self._expected[tensor]:
            if self.is_posted(tensor):
                self.is_surprised = True
            return
        for bucket in self._of_tensor[tensor]:
            bucket.left -= 1
            if bucket.left == 0 and self.early:
                self.post(final=False)

    def post_early(self) -> None:
        """Posts buckets that are complete, if any may be posted before ``step()``."""
        if self.early:
            self.post(final=False)

    def post(self, final: bool) -> None:
        """Posts buckets as long as the next one is complete and its gradients can be read; in ``step()`` (``final``)
        all of them.
        """
        buckets, addresses_of, wire = self._buckets, self.addresses, self._wire
        while self.posted < len(buckets):
            bucket = buckets[self.posted]
            if bucket.left and not final:
                return
            tensors, flow = bucket.tensors, bucket.flow
            addresses = addresses_of[tensors].tolist() if self._are_located else self._locate(tensors, final)
            if addresses is None:
                return
            was_full, bucket.is_full = bucket.is_full, 0 not in addresses
            if not (was_full and bucket.is_full):
                addresses_of[tensors] = addresses
                flow.say_presence(bucket.segments, addresses_of != 0)
            self.posted += 1
            self._posted_count = bucket.end
            if flow.ticket is None:
                # In step() hyperparameters that are built in may have changed since the step was begun.
                prepared = flow.prepare() if final else flow.prepared
                flow.ticket = wire.channel.submit(prepared, wire.timeout_s, False, 0)
            part = NOTHING if final else self.verified_part
            flow.ticket.open(bucket.segments.stop, bucket.inputs, addresses, part)

    def take_read(self) -> list[int]:
        """Returns tensors whose gradients nobody will read again in this step, each once, and gives these up.

        Buckets are read in the order of posting; a tensor must be in one of them only. Where nothing that travels says
        whose gradient was not finite, as in dense steps and sums of nodes, gradients are looked at here.
        """
        found: list[int] = []
        while self._read < self.posted:
            bucket = self._buckets[self._read]
            ticket = bucket.flow.ticket
            if ticket is None or ticket.past_segments < bucket.segments.stop:
                break
            self._read += 1
            core, rows = self._flows.core, np.array(bucket.tensors)
            if bucket.flow is self._flows.dense or not core.layout.nodes.is_flat:
                squares = core.kernels.squares(self.addresses[rows], core.layout.numels[rows])
                self.had_non_finite |= not np.isfinite(squares).all()
            self.addresses[rows] = 0
            self._sums[bucket.end - rows.size : bucket.end] = 0
            found += bucket.tensors
        return found

    def locate_all(self) -> None:
        """Finds the gradients of all tensors at once, before the first is posted."""
        self.addresses[:] = self._found(list(range(len(self.expected))))
        self._are_located = True

    def locate_none(self) -> None:
        """Says that this rank has no gradients for the exchange that begins, whatever the frontend has."""
        self.addresses[:] = 0
        self._are_located = True

    def locate_unposted(self, tensors: list[int]) -> None:
        """Finds the gradients of those of ``tensors`` that are in no bucket."""
        unposted = [tensor for tensor in tensors if not self._of_tensor[tensor]]
        if unposted and not self._are_located:
            self.addresses[unposted] = self._found(unposted)

    def _found(self, tensors: list[int]) -> list[int]:
        addresses = self._locate(tensors, True)
        assert addresses is not None
        return addresses

    @property
    def posted_tensors(self) -> list[int]:
        """Tensors whose bucket has been posted: a change of their gradients comes too late for this attempt."""
        return list(dict.fromkeys(self._rows[: self._posted_count].tolist()))

    def is_posted(self, tensor: int) -> bool:
        """Returns True if a bucket of the tensor has been posted."""
        return any(bucket.number < self.posted for bucket in self._of_tensor[tensor])

    def changed_tensors(self) -> list[int]:
        """Returns the tensors of posted buckets whose gradients have other bytes than when they were posted. Called
        before ``exchange``.
        """
        if not self.posted or self.verified_part == NOTHING:
            return []
        count = self._posted_count
        rows = self._rows[:count]
        kernels = self._flows.core.kernels
        now = kernels.checksums(self.addresses[rows], self._nbytes[:count], self.verified_part)
        return rows[now != self._sums[:count]].tolist()
