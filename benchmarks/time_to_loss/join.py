"""Losses by step and times of steps, joined: the seconds and the bytes until a loss on a network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from benchmarks.step import METHODS as STEP_METHODS
from benchmarks.time_to_loss.losses import ADAM, EVERY
from benchmarks.time_to_loss.methods import Method
from benchmarks.turns import DENSE, LOCAL
from ocomm.bench._lab import PAYLOAD_FRACTION, bits_per_second
from ocomm.predict.methods import VOTE

WARM_8 = STEP_METHODS["onebit-warm-8"][0]
#: torch's averages of parameters are not measured: they take as long as their bytes, without anything else.
AVERAGED = "average"
#: By a method's ``steps_of`` and the kind of a step: the measured rows whose exposed times add up to those of the step.
ROWS: dict[tuple[str, str], tuple[str, ...]] = {
    ("DDP fp32", "32"): ("DDP fp32",),
    ("DDP fp32", AVERAGED): ("DDP fp32",),
    ("DDP bf16", "16"): ("DDP bf16",),
    ("DDP PowerSGD rank 1", "32"): ("DDP fp32",),
    ("DDP PowerSGD rank 1", "powersgd"): ("DDP PowerSGD rank 1",),
    ("DeepSpeed 1-bit Adam", "32"): ("DDP fp32",),
    ("DeepSpeed 1-bit Adam", "1"): ("DeepSpeed 1-bit Adam",),
    ("hivemind, 8 bits", "8"): ("hivemind, 8 bits",),
    ("ocomm int8", "8"): ("ocomm int8",),
    ("ocomm int4", "4"): ("ocomm int4",),
    ("1-bit Adam", "32"): (DENSE,),
    ("1-bit Adam", "8"): (WARM_8,),
    ("1-bit Adam", "1"): ("1-bit Adam",),
    ("0/1 Adam", "32"): (DENSE, "0/1 Adam"),
    ("0/1 Adam", "8"): (WARM_8, "0/1 Adam"),
    ("0/1 Adam", "1"): ("0/1 Adam",),
    ("Birder", "1"): ("Birder",),
    **{("DiLoCo", f"sync-{bits}"): (STEP_METHODS[f"diloco-{bits}"][0],) for bits in (32, 4, 1)},
}


@dataclass(frozen=True)
class Network:
    """Times of steps at one rate and delay: by row, milliseconds.

    ``sent``: bytes that a host sends in a step of a row, on any network, most headers not counted. A row that was not
    measured takes as long as its bytes and its ``waits`` beside the local step: the delays that a step of it takes
    where it takes the fewest.
    """

    rate: str
    delay_ms: float
    rows: Mapping[str, float]
    sent: Mapping[str, float]
    waits: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.rate.replace("mbit", " Mbit/s") + (f", {self.delay_ms:g} ms" if self.delay_ms else "")

    def step(self, method: Method, kind: str) -> tuple[float, float]:
        """Seconds and bytes of a step."""
        local = self.rows[method.local] / 1e3
        if kind == "0":
            return local, 0.0
        if kind == VOTE:  # not measured: at most as long as a message's way there and back
            return local + 2 * self.delay_ms / 1e3, 0.0
        names = ROWS[method.steps_of, kind]
        exposed = [
            (self.rows[name] - self.rows[LOCAL]) / 1e3 if name in self.rows and kind != AVERAGED else self._wire_s(name)
            for name in names
        ]
        return local + sum(exposed), sum(self.sent[name] for name in names)

    def _wire_s(self, row: str) -> float:
        wire = 8 * self.sent[row] / PAYLOAD_FRACTION / bits_per_second(self.rate)
        return wire + self.waits.get(row, 0.0) * self.delay_ms / 1e3


def networks(found: Sequence[Mapping[str, Any]]) -> list[Network]:
    """From the results of ``benchmarks.step``: what each row adds to its own job's local step, and one local step.

    No network makes a local step slower, only the hour of the measurement does: all have the median's.
    """
    joined: dict[tuple[str, float], dict[str, float]] = {}
    sent: dict[str, float] = {}
    times = [{row["method"]: row["step_ms"] for row in result["rows"]} for result in found]
    local = median(each[LOCAL] for each in times)
    for result, own in zip(found, times, strict=True):
        rows = joined.setdefault((result["rate"], result.get("delay_ms", 0.0)), {})
        rows |= {name: local + ms - own[LOCAL] for name, ms in own.items()}
        for row in result["rows"]:
            # The smallest: hosts count segments of 64 KiB, before they become packets, where no relay is in between.
            sent[row["method"]] = min(sent.get(row["method"], math.inf), row["sent"])
    order = sorted(joined, key=lambda key: (bits_per_second(key[0]), key[1]))
    waits = _waits(joined)
    return [Network(*key, joined[key], sent, waits) for key in order]


def _waits(joined: Mapping[tuple[str, float], Mapping[str, float]]) -> dict[str, float]:
    """By row, how many delays its step takes beside what it takes at the same rate without one."""
    found: dict[str, float] = {}
    for (rate, delay), rows in joined.items():
        without = joined.get((rate, 0.0), {})
        for name in rows.keys() & without.keys() if delay else ():
            exposed, before = rows[name] - rows[LOCAL], without[name] - without[LOCAL]
            found[name] = min(found.get(name, math.inf), max(exposed - before, 0.0) / delay)
    return found


def reached(run: Mapping[str, Any], target: float) -> int | None:
    """The number of steps after which the validation loss was at most ``target``; None if it never was."""
    return next((EVERY * (number + 1) for number, loss in enumerate(run["losses"]) if loss <= target), None)


def kinds(run: Mapping[str, Any], steps: int) -> Iterator[tuple[str, int]]:
    """How many of the first ``steps`` steps are of a kind, in their order."""
    for kind, count in run["kinds"]:
        if steps <= 0:
            return
        yield kind, min(count, steps)
        steps -= count


def cost(network: Network, method: Method, run: Mapping[str, Any], steps: int) -> tuple[float, float]:
    """Seconds and bytes of the first ``steps`` steps."""
    parts = [(count, network.step(method, kind)) for kind, count in kinds(run, steps)]
    return sum(count * s for count, (s, _) in parts), sum(count * sent for count, (_, sent) in parts)


def to_loss(
    network: Network, method: Method, runs: Sequence[Mapping[str, Any]], adam: Mapping[int, float], margin: float
) -> tuple[float, float] | None:
    """Mean seconds and bytes over the seeds; None if a seed never gets there. ``adam``: its final losses by seed."""
    found = []
    for run in runs:
        steps = reached(run, adam[run["seed"]] * (1 + margin))
        if steps is None:
            return None
        found.append(cost(network, method, run, steps))
    return mean(s for s, _ in found), mean(sent for _, sent in found)


#: The names that ``ocomm.predict.methods`` has for methods, which all wrap Adam.
PREDICTED = {
    "Adam, Compression.int8": "averages in 8 bits",
    "Adam, Compression.int4": "averages in 4 bits",
    "1-bit Adam, total_steps, 8 bits": "1-bit Adam",
    "0/1 Adam, total_steps, 8 bits": "0/1 Adam",
    "DiLoCo 10, 4 bits": "DiLoCo, a sync in 10 steps, 4 bits",
    "DiLoCo 30, 4 bits": "DiLoCo, a sync in 30 steps, 4 bits",
    "DiLoCo 30, 1 bit": "DiLoCo, a sync in 30 steps, 1 bit",
    "DiLoCo 100, 4 bits": "DiLoCo, a sync in 100 steps, 4 bits",
}


#: Tasks on which equal runs end closer together than methods do. On images averages in bfloat16 alone change the loss
#: of a seed by -7 to +1 %.
DECIDING = ("text", "code", "large text")
#: The fewest runs that a loss cost follows from.
SEEDS = 2


def gaps(runs: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """By method and task, how far its final loss is above Adam's, as a part of it: ``ocomm.predict.methods.GAPS``.

    Of fewer than SEEDS runs nothing follows: one seed's loss is up to half a percent from the next one's.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in PREDICTED.values()}
    for task, by_method in runs.items():
        if task not in DECIDING or ADAM not in by_method:
            continue
        adam = {run["seed"]: run["losses"][-1] for run in by_method[ADAM]}
        for name, predicted in PREDICTED.items():
            changes = [run["losses"][-1] / adam[run["seed"]] - 1 for run in by_method.get(name, ())]
            if len(changes) >= SEEDS:
                found[predicted][task] = round(mean(changes), 4)
    return found
