"""Whole runs: which kinds of steps each method takes, how long a run is with it, and what it costs in loss.

A kind of step is what it exchanges: some of ``PARTS``, and nothing in a step of the rank alone. What a run takes is the
sum over its kinds, so methods with different steps can be compared:

    run = sum over kinds of (number of steps of the kind) * (seconds of one)

``GAPS`` are measured (``benchmarks.time_to_loss``): how far above the exact averages' its loss is at the end
of 3,000 steps, as a part of that loss, in the mean over seeds. They hold for the wrapped optimizer that they were
measured with, and no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ocomm.kernels.base import GROUP
from ocomm.optim.zero_one_adam import ZeroOneAdamOptions
from ocomm.predict.model import CodecTimes, Network, Traffic, Training, hideable, traffic

#: What a step can exchange: averages in float32 or in codes; signs; without overlap, the same of DiLoCo's syncs; and
#: nothing but the vote on the step.
VOTE = "vote"
PARTS = ("32", "8", "4", "1", "sync-32", "sync-8", "sync-4", "sync-1", VOTE)

Kind = tuple[str, ...]
#: What a method must gain to be worth a larger gap.
WORTH = 1.05
#: Gaps below are equal: means over three seeds of runs that differ in rounding alone are as far apart.
NOISE = 0.0025


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train.

    Attributes:
        name: For people and checkpoints.
        wrapper: The name of the class or function of the frontends that does it.
        options: What it is called with, beside the optimizer, the parameters and ``total_steps``.
        kinds: The number of steps of each kind, from the number of steps of the run.
        takes_total_steps: Whether the wrapper has an argument of that name.
    """

    name: str
    wrapper: str
    kinds: Callable[[int], Counter[Kind]]
    options: Mapping[str, Any] = field(default_factory=dict)
    takes_total_steps: bool = False

    def gap(self, optimizer: str) -> float | None:
        """Returns the largest gap with ``optimizer`` on any task; None if none is known."""
        if self.wrapper == EXACT:
            return 0.0
        return max(GAPS.get(optimizer, {}).get(self.name, {}).values(), default=None)


#: The wrapper whose averages are exact, which fits every optimizer.
EXACT = "exact averages"


#: Loss above that of exact averages, as a part of it, by the class of the wrapped optimizer, method and task: means
#: over seeds, from benchmarks/results/time-to-loss/losses.json, which a test compares.
GAPS: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "Adam": {
        "averages in 8 bits": {"text": -0.0011, "code": 0.0005},
        "averages in 4 bits": {"text": -0.0008, "code": 0.0028},
        "1-bit Adam": {"text": 0.0007, "code": 0.001},
        "0/1 Adam": {"text": 0.0037, "code": 0.0064},
        "DiLoCo, a sync in 10 steps, 4 bits": {"text": 0.0112, "code": 0.0193},
        "DiLoCo, a sync in 30 steps, 4 bits": {"text": 0.0187, "code": 0.028},
        "DiLoCo, a sync in 30 steps, 1 bit": {"text": 0.0409, "code": 0.0586},
        "DiLoCo, a sync in 100 steps, 4 bits": {"text": 0.0316, "code": 0.0476},
    }
}


def _every_step(*parts: str) -> Callable[[int], Counter[Kind]]:
    return lambda total: Counter({parts: total})


def _onebit_adam(total: int) -> Counter[Kind]:
    warm = max(total // 5, 1)
    return Counter({("8",): warm, ("1",): total - warm})


def zero_one_kinds(total: int) -> Iterator[Kind]:
    """Yields the kind of each step of a run of 0/1 Adam with ``total_steps``."""
    syncs, refreshes = ZeroOneAdamOptions(total_steps=total).schedules()
    for step in range(1, total + 1):
        kind: Kind = ()
        if refreshes.is_due(step):
            refreshes.refreshed(step)
            kind += ("8",)
        if syncs.is_due(step):
            syncs.synced(step)
            kind += ("1",)
        yield kind or (VOTE,)


def _zero_one_adam(total: int) -> Counter[Kind]:
    """Counts ``zero_one_kinds`` of a run of any length: there are few refreshes and few changes of the interval."""
    syncs, refreshes = ZeroOneAdamOptions(total_steps=total).schedules()
    refreshed: list[int] = []
    while refreshes.next_step <= total and not refreshes.is_over(refreshes.next_step):
        refreshed.append(refreshes.next_step)
        refreshes.refreshed(refreshes.next_step)
    synced = both = 0
    step = 1
    while step <= total:
        interval, end = syncs.interval(step), min(syncs.interval_end(step) or total, total)
        first = max(step, syncs.last_sync + interval)
        if first <= end:
            last = end - (end - first) % interval
            synced += (last - first) // interval + 1
            both += sum(first <= at <= last and (at - first) % interval == 0 for at in refreshed)
            syncs.synced(last)
        step = end + 1
    if syncs.last_sync < total:  # the last step is one
        synced += 1
        both += total in refreshed
    alone = total - synced - len(refreshed) + both
    kinds = {("8", "1"): both, ("8",): len(refreshed) - both, ("1",): synced - both, (VOTE,): alone}
    return Counter({kind: number for kind, number in kinds.items() if number})


def _diloco(every: int, bits: int) -> Method:
    def kinds(total: int) -> Counter[Kind]:
        syncs = max(total // every, 1)
        return Counter({(f"sync-{bits}",): syncs, (): total - syncs})

    name = f"DiLoCo, a sync in {every} steps, {bits} bit{'s' * (bits > 1)}"
    return Method(name, "DistributedDiLoCo", kinds, {"sync_every": every, "bits": bits})


METHODS = (
    Method("exact averages", EXACT, _every_step("32")),
    Method("averages in 8 bits", "Compression.int8", _every_step("8")),
    Method("averages in 4 bits", "Compression.int4", _every_step("4")),
    Method("1-bit Adam", "DistributedOneBitAdam", _onebit_adam, {"dense_bits": 8}, takes_total_steps=True),
    Method("0/1 Adam", "DistributedZeroOneAdam", _zero_one_adam, {"dense_bits": 8}, takes_total_steps=True),
    _diloco(10, 4),
    _diloco(30, 4),
    _diloco(30, 1),
    _diloco(100, 4),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run takes place: nodes of equally many ranks, the network between them, and the codec's times."""

    nodes: int
    ranks_per_node: int
    network: Network
    codec: CodecTimes

    def seconds(self, kind: Kind, training: Training) -> float:
        """Returns the seconds of a step of ``kind``. Raises ValueError for a part that is none of ``PARTS``."""
        overlapping = exposed = added = 0.0
        for part in kind:
            if part not in PARTS:
                raise ValueError(f"{part!r} is none of {', '.join(PARTS)}")
            if part == VOTE:
                continue
            sent = self._traffic(part.removeprefix("sync-"), training)
            if self.nodes * self.ranks_per_node > 1:
                communication = sum(sent.seconds(self.network))
                if part.startswith("sync-"):
                    exposed += communication
                else:
                    overlapping += communication
                added += sent.codec_s
        waiting = self.network.round_s if kind and self.nodes > 1 else 0.0
        hidden = hideable(overlapping, training)
        return training.compute_s + added + overlapping - hidden + exposed + waiting

    def _traffic(self, bits: str, training: Training) -> Traffic:
        nodes, ranks, codec = self.nodes, self.ranks_per_node, self.codec
        if bits == "32":
            return traffic("dense", nodes, ranks, training, codec)
        if bits == "1":
            form = "hierarchical" if nodes > 1 and ranks > 1 else "flat"
            return traffic(form, nodes, ranks, training, codec)
        # Codes travel as dense values do, but nodes add up in float32 first.
        coded = replace(training, dense_nbytes=int(bits) / 8 + 4 / GROUP)
        sent = traffic("dense", nodes, ranks, coded, codec)
        inside = traffic("dense", 1, ranks, training, codec).inside if nodes > 1 else sent.inside
        return replace(sent, inside=inside, codec_s=sent.codec_s + codec.codes * training.parameters)

    def run_seconds(self, method: Method, training: Training, total_steps: int) -> float:
        """Returns the seconds of a run of ``total_steps`` steps."""
        kinds = method.kinds(total_steps)
        return sum(count * self.seconds(kind, training) for kind, count in kinds.items() if count)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method with what it would take here. ``gap``: its known loss cost, None if it was never measured with this
    optimizer. ``why_not``: why it is not to be taken; "" if it may be.
    """

    method: Method
    seconds: float
    gap: float | None
    why_not: str = ""


def candidates(
    place: Place,
    training: Training,
    total_steps: int,
    optimizer: str,
    max_loss_gap: float,
    unfit: Mapping[str, str],
) -> list[Candidate]:
    """Returns all methods, the fastest first.

    Args:
        place: Ranks and network.
        training: Parameters, and the seconds of a step without communication.
        total_steps: Steps of the run that are left.
        optimizer: The class of the wrapped optimizer.
        max_loss_gap: The largest loss cost that is accepted, as a part of the loss.
        unfit: By wrapper, why it cannot be used with this optimizer or frontend.
    """
    found = []
    for method in METHODS:
        gap = method.gap(optimizer)
        why_not = unfit.get(method.wrapper, "")
        if not why_not and gap is None:
            why_not = f"its loss with {optimizer} was not measured"
        elif not why_not and gap is not None and gap > max_loss_gap:
            why_not = f"its loss was {100 * gap:.2f} % above"
        found.append(Candidate(method, place.run_seconds(method, training, total_steps), gap, why_not))
    return sorted(found, key=lambda candidate: candidate.seconds)


def fastest(found: Iterable[Candidate]) -> Candidate:
    """Returns the fastest method that may be taken, or one with a smaller gap that takes at most ``WORTH`` as long.

    There is one, because exact averages always may. A gap below ``NOISE`` is no better or worse than another one.
    """
    allowed = [each for each in found if not each.why_not]
    limit = WORTH * min(each.seconds for each in allowed)

    def loss_then_time(each: Candidate) -> tuple[float, bool, float]:
        return max(each.gap or 0.0, NOISE), each.method.wrapper != EXACT, each.seconds

    return min((each for each in allowed if each.seconds <= limit), key=loss_then_time)


def table(found: Iterable[Candidate], chosen: Candidate) -> str:
    """Returns the methods as lines for people, with a mark at ``chosen``."""
    rows = []
    for each in found:
        mark = "->" if each is chosen else "  "
        gap = "  unknown" if each.gap is None else f"{100 * each.gap:+8.2f} %"
        rows.append(f"{mark} {each.method.name:36} {duration(each.seconds):>10} {gap}  {each.why_not}".rstrip())
    return "\n".join(rows)


def duration(seconds: float) -> str:
    """Returns seconds in a unit that people would choose."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
