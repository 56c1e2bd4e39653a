"""What a plan that is over has spent its time on, for the timeline.

The engine notes three times per stage: when its computations begin, when its messages are posted, and when these are
over. The plan says what the stage did.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ocomm.collectives.plan import CopyOut, Offload, Plan, Stage, name_of
from ocomm.telemetry.timeline import Timeline

#: Shape (stages of the plan in order, 3), int64, ns of the monotonic clock; 0 for what has not happened.
Trace = NDArray[np.int64]

#: The name of a stage by the first words of its most significant computation; each compressor's loops have the same.
_NAMES = (("compress", "COMPRESS"), ("average", "AVERAGE"), ("reduce", "REDUCE"), ("unpack", "DECOMPRESS"))


def new_trace(plan: Plan) -> Trace:
    """Returns an array for the times of a plan."""
    return np.zeros((sum(len(segment) for segment in plan.segments), 3), np.int64)


def _work(stage: Stage, is_last: bool) -> str:
    kinds = [name_of(c) for c in stage.compute]
    for kind, name in _NAMES:
        if any(found.startswith(kind) for found in kinds):
            return name
    if {"Copy", "CopyIn", "CopyOut", "gather", "scatter"}.intersection(kinds):
        return "MEMCPY_OUT_FUSION_BUFFER" if is_last and not stage.sends else "MEMCPY_IN_FUSION_BUFFER"
    return ""


def record(timeline: Timeline, plan: Plan, trace: Trace) -> None:
    """Writes the segments of a plan to the timeline, each on a lane of its own, with what they computed, sent and
    received.
    """
    at = 0
    for number, stages in enumerate(plan.segments):
        times = trace[at : at + len(stages)]
        at += len(stages)
        start, end = int(times[0, 0]), int(times[-1, 2])
        lane = timeline.lane(start, end)
        whole = {"segment": number, "of": len(plan.segments)}
        timeline.span(lane, plan.name, start, end, whole)
        for position, (stage, (begun, out, over)) in enumerate(zip(stages, times.tolist(), strict=True)):
            for c in stage.compute:
                if isinstance(c, Offload) and (c.bytes_sent or c.bytes_received):
                    moved = {"bytes_sent": c.bytes_sent, "bytes_received": c.bytes_received}
                    timeline.span(lane, "NCCL_EXCHANGE", begun, out, moved)
            work = _work(stage, position == len(stages) - 1)
            if work:
                timeline.span(lane, work, begun, out)
            if stage.sends or stage.receives:
                sent = sum(message.buffer.nbytes for message in stage.sends)
                received = sum(message.buffer.nbytes for message in stage.receives)
                timeline.span(lane, "EXCHANGE", out, over, {"bytes_sent": sent, "bytes_received": received})


def activities(plan: Plan, trace: Trace) -> Sequence[tuple[str, int, int]]:
    """Returns Horovod's activities of a fused tensor: copied in, exchanged, copied out, as (name, from, to).

    Segments overlap: "in" ends when the first segment has sent, "out" begins when the last has received.
    """
    first, last = plan.segments[0], plan.segments[-1]
    start, end = int(trace[:, 0].min()), int(trace[:, 2].max())
    found = []
    exchange_start, exchange_end = start, end
    if _work(first[0], False) == "MEMCPY_IN_FUSION_BUFFER":
        exchange_start = int(trace[0, 1])
        found.append(("MEMCPY_IN_FUSION_BUFFER", start, exchange_start))
    if len(last) > 1 and any(isinstance(computation, CopyOut) for computation in last[-1].compute):
        exchange_end = max(int(trace[-1, 0]), exchange_start)
    found.append(("", exchange_start, exchange_end))
    if exchange_end < end:
        found.append(("MEMCPY_OUT_FUSION_BUFFER", exchange_end, end))
    return found
