"""What a rank has sent through its optimizer, and how its steps ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ocomm.optim.flows import CompressedFlow, DenseFlow, Flow, NodeFlow
from ocomm.optim.step_channel import Sent
from ocomm.telemetry.counters import OptimizerCounters


@dataclass(slots=True)
class Waited:
    """How long ``step()`` has waited for the exchanges of some steps."""

    steps: int = 0
    seconds: float = 0.0

    @property
    def mean_ms(self) -> float | None:
        """The mean per step; None without steps."""
        return 1e3 * self.seconds / self.steps if self.steps else None


@dataclass(slots=True)
class Traffic:
    """What this rank has sent through its optimizer, with headers.

    ``bytes_sent`` went to other nodes, ``bytes_sent_inside`` to ranks of its own; in the flat form each rank counts as
    a node. ``bytes_sent_masks`` is the part of ``bytes_sent`` that looked for masked elements to wake, by formula.
    ``bytes_dense`` is what a dense average would have sent to other nodes.
    """

    steps: int = 0
    dense_steps: int = 0
    compressed_steps: int = 0
    #: The step, counted from 1, in which something was compressed for the first time; 0 before it.
    first_compressed: int = 0
    local_steps: int = 0
    skipped_steps: int = 0
    redone_steps: int = 0
    bytes_sent: int = 0
    bytes_sent_inside: int = 0
    bytes_sent_masks: int = 0
    bytes_dense: float = 0.0
    last_bytes_sent: int = 0
    exposed_s: float = 0.0
    #: Of dense and of compressed steps, without those at the start that had to end before anything could overlap.
    waited_dense: Waited = field(default_factory=Waited)
    waited_compressed: Waited = field(default_factory=Waited)
    #: The kinds of exchange in the last step.
    _kinds: set[type[Flow]] = field(default_factory=set)

    def count(
        self,
        sent: Sequence[Sent],
        flows: Sequence[Flow],
        bytes_dense: float,
        skipped: bool,
        exposed_s: float,
        overlaps: bool,
    ) -> None:
        """Counts a step that is over.

        Args:
            sent: What this rank has sent.
            flows: The flows of the step.
            bytes_dense: Bytes of a dense step.
            skipped: Whether no rank takes it.
            exposed_s: How long ``step()`` has waited for its exchange.
            overlaps: Whether it overlapped as later ones do.
        """
        kinds = self._kinds = {
            kind for kind in (CompressedFlow, DenseFlow, NodeFlow) for flow in flows if isinstance(flow, kind)
        }
        across = sum([one.across for one in sent])
        self.exposed_s += exposed_s
        if overlaps and exposed_s and (CompressedFlow in kinds or DenseFlow in kinds):
            waited = self.waited_compressed if CompressedFlow in kinds else self.waited_dense
            waited.steps += 1
            waited.seconds += exposed_s
        self.steps += 1
        self.skipped_steps += skipped
        if CompressedFlow in kinds:
            self.compressed_steps += 1
            self.first_compressed = self.first_compressed or self.steps
        self.dense_steps += DenseFlow in kinds and CompressedFlow not in kinds
        self.local_steps += kinds <= {NodeFlow}
        self.last_bytes_sent = across
        self.bytes_sent += across
        self.bytes_sent_inside += sum([one.intra_node for one in sent])
        self.bytes_dense += bytes_dense

    def counters(self, name: str) -> OptimizerCounters:
        """Returns the counters of the optimizer ``name``, which are these, for whoever watches the job."""
        return OptimizerCounters(
            name,
            self.steps,
            self.dense_steps,
            self.compressed_steps,
            self.local_steps,
            self.skipped_steps,
            self.redone_steps,
            self.bytes_sent,
            self.bytes_sent_inside,
            self.bytes_dense,
            self.exposed_s,
        )

    def count_local(self, bytes_dense: float) -> None:
        """Counts a step without an exchange and without a vote. ``bytes_dense`` is what a dense step sends."""
        self.steps += 1
        self.local_steps += 1
        self.last_bytes_sent = 0
        self.bytes_dense += bytes_dense

    def add(self, sent: Sent) -> None:
        """Adds to the last step what was sent in it beside an exchange."""
        self.last_bytes_sent += sent.across
        self.bytes_sent += sent.across
        self.bytes_sent_inside += sent.intra_node

    def uncount(self, bytes_dense: float) -> None:
        """Takes back that the last exchange was a step, because it belongs to one that was counted already.
        ``bytes_dense`` is what a dense step sends.
        """
        kinds = self._kinds
        self.steps -= 1
        self.compressed_steps -= CompressedFlow in kinds
        self.dense_steps -= DenseFlow in kinds and CompressedFlow not in kinds
        self.local_steps -= kinds <= {NodeFlow}
        self.bytes_dense -= bytes_dense

    def count_wait(self, seconds: float) -> None:
        """Adds time that the last step has waited after its vote."""
        self.exposed_s += seconds
        if self.waited_dense.steps:
            self.waited_dense.seconds += seconds

    def count_moments(self, nbytes: int) -> None:
        """Counts ``nbytes`` bytes to other nodes in an exchange of moments after a step."""
        self.bytes_sent += nbytes

    def count_mask(self, nbytes: float) -> None:
        """Counts ``nbytes`` bytes to other nodes in an exchange of masks."""
        self.bytes_sent += round(nbytes)
        self.bytes_sent_masks += round(nbytes)
