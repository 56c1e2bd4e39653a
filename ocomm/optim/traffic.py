"""What a rank has sent through its optimizer, and how its steps ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ocomm.optim.flows import CompressedFlow, DenseFlow, Flow, NodeFlow
from ocomm.optim.step_channel import Sent


@dataclass(slots=True)
class Traffic:
    """What this rank has sent through its optimizer, with headers.

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

    def count(self, sent: Sequence[Sent], flows: Sequence[Flow], bytes_dense: float, skipped: bool) -> None:
        """Counts a step that is over, in which this rank has ``sent`` these plans; ``flows`` are those of the step."""
        kinds = {kind for kind in (CompressedFlow, DenseFlow, NodeFlow) for flow in flows if isinstance(flow, kind)}
        across = sum([one.across for one in sent])
        self.steps += 1
        self.skipped_steps += skipped
        self.compressed_steps += CompressedFlow in kinds
        self.dense_steps += DenseFlow in kinds and CompressedFlow not in kinds
        self.local_steps += kinds <= {NodeFlow}
        self.last_bytes_sent = across
        self.bytes_sent += across
        self.bytes_sent_inside += sum([one.intra_node for one in sent])
        self.bytes_dense += bytes_dense
