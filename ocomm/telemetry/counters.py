"""What ranks have done and what they wait for: the counters of a job, and their text for Prometheus.

The numbers are those of ``compression_report()`` and of the lines that rank 0 says. ``OPTIMIZER`` and ``RANK`` declare
each once: its name here, its name for Prometheus, and what it means. All of this is values and pure functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ocomm import json_values
from ocomm.json_values import expect

#: Limits for what a rank sends of its waits and stalls: their number, and the characters of a name.
MOST_WAITS, MOST_CHARACTERS = 8, 200


class Metric(NamedTuple):
    """The name of a number for Prometheus, whether it only grows, and what it means."""

    name: str
    is_counter: bool
    meaning: str


#: The numbers of an optimizer on one rank, by their fields in ``OptimizerCounters``.
OPTIMIZER: dict[str, Metric] = {
    "steps": Metric("ocomm_steps_total", True, "number of steps that this process has exchanged, with skipped ones"),
    "dense_steps": Metric(
        "ocomm_dense_steps_total", True, "number of steps in which every tensor that was sent was sent dense"
    ),
    "compressed_steps": Metric(
        "ocomm_compressed_steps_total", True, "number of steps in which some tensor was sent compressed"
    ),
    "local_steps": Metric("ocomm_local_steps_total", True, "number of steps without an exchange between nodes"),
    "skipped_steps": Metric(
        "ocomm_skipped_steps_total",
        True,
        "number of steps that no rank took: a loss scale overflowed, or a gradient was not finite",
    ),
    "redone_steps": Metric(
        "ocomm_redone_steps_total",
        True,
        "number of steps that were exchanged twice, because a gradient, or what it is compressed with, changed after "
        "backward",
    ),
    "bytes_sent": Metric(
        "ocomm_sent_bytes_total",
        True,
        "bytes that this rank has sent to other nodes; in the flat form every rank is a node",
    ),
    "bytes_sent_inside": Metric(
        "ocomm_sent_inside_bytes_total",
        True,
        "bytes that this rank has sent to ranks of its own node; 0 in the flat form",
    ),
    "bytes_dense": Metric(
        "ocomm_dense_bytes_total",
        True,
        "bytes that dense averages would have sent from this rank to other nodes in as many steps",
    ),
    "waited_s": Metric(
        "ocomm_waited_seconds_total",
        True,
        "seconds that step() has waited for exchanges; not measured by an optimizer without compression",
    ),
}
#: The numbers of a rank that are not an optimizer's.
RANK: dict[str, Metric] = {
    "silent_s": Metric("ocomm_rank_silent_seconds", False, "seconds since rank 0 has heard of this rank"),
    "missed_by": Metric(
        "ocomm_rank_missed_by", False, "number of ranks that have waited for this one for a second or longer"
    ),
    "stalls": Metric(
        "ocomm_rank_stalled_tensors", False, "number of tensors that others submitted seconds ago and this rank did not"
    ),
}
#: The number of ranks of the job.
SIZE = Metric("ocomm_ranks", False, "number of ranks of the job")


@dataclass(frozen=True, slots=True)
class OptimizerCounters:
    """What one rank has done through the optimizer ``name`` since its process began. ``OPTIMIZER`` has the meanings."""

    name: str
    steps: int = 0
    dense_steps: int = 0
    compressed_steps: int = 0
    local_steps: int = 0
    skipped_steps: int = 0
    redone_steps: int = 0
    bytes_sent: float = 0
    bytes_sent_inside: float = 0
    bytes_dense: float = 0
    waited_s: float | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A thread that has waited for a second for the exchange ``what``, in which messages of ``ranks`` are missing."""

    what: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stalled:
    """A tensor that some ranks submitted ``waited_s`` seconds ago, and the ranks that did not."""

    name: str
    waited_s: float
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankCounters:
    """What one rank says of itself. ``stalls`` are those of the process sets that it coordinates."""

    rank: int
    host: str
    optimizers: tuple[OptimizerCounters, ...] = ()
    waits: tuple[Waiting, ...] = ()
    stalls: tuple[Stalled, ...] = ()
    #: Set by rank 0 when it hands the counters on: seconds since it has heard of the rank.
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobCounters:
    """What rank 0 knows of a job with ``size`` ranks at the time ``at_s`` of its monotonic clock."""

    at_s: float
    size: int
    ranks: tuple[RankCounters, ...]


def limited(counters: RankCounters) -> RankCounters:
    """Returns ``counters`` with at most ``MOST_WAITS`` waits and stalls, whose names are cut."""
    waits = tuple(Waiting(wait.what[:MOST_CHARACTERS], wait.ranks) for wait in counters.waits[:MOST_WAITS])
    longest = sorted(counters.stalls, key=lambda stall: -stall.waited_s)[:MOST_WAITS]
    stalls = tuple(Stalled(stall.name[:MOST_CHARACTERS], stall.waited_s, stall.missing) for stall in longest)
    return RankCounters(counters.rank, counters.host, counters.optimizers, waits, stalls, counters.silent_s)


def spelled(counters: RankCounters | JobCounters) -> dict[str, Any]:
    """Returns counters as values of JSON."""
    return asdict(counters)


def read_rank(said: Any, size: int) -> RankCounters:
    """Returns the counters of one of ``size`` ranks as ``spelled`` has written them. Raises ValueError for anything
    else.
    """
    rank, host, optimizers, waits, stalls, silent_s = json_values.fields(said, *_names(RankCounters))
    return RankCounters(
        json_values.rank(rank, size),
        expect(host, str),
        tuple(map(_read_optimizer, expect(optimizers, list))),
        tuple(_read_waiting(wait, size) for wait in expect(waits, list)),
        tuple(_read_stalled(stall, size) for stall in expect(stalls, list)),
        expect(silent_s, float, int),
    )


def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _read_optimizer(said: Any) -> OptimizerCounters:
    name, *numbers, waited_s = json_values.fields(said, *_names(OptimizerCounters))
    counted = [expect(number, int, float) for number in numbers]
    counted.append(expect(waited_s, float, int, type(None)))
    return OptimizerCounters(expect(name, str), *counted)


def _read_waiting(said: Any, size: int) -> Waiting:
    what, ranks = json_values.fields(said, *_names(Waiting))
    return Waiting(expect(what, str), json_values.ranks(ranks, size))


def _read_stalled(said: Any, size: int) -> Stalled:
    name, waited_s, missing = json_values.fields(said, *_names(Stalled))
    return Stalled(expect(name, str), expect(waited_s, float, int), json_values.ranks(missing, size))


def read_job(said: Any) -> JobCounters:
    """Returns the counters of a job that ``spelled`` has written. Raises ValueError for anything else."""
    at_s, size, ranks = json_values.fields(said, *_names(JobCounters))
    each = tuple(read_rank(rank, expect(size, int)) for rank in expect(ranks, list))
    return JobCounters(expect(at_s, float, int), expect(size, int), each)


def missed_by(job: JobCounters) -> dict[int, set[int]]:
    """Returns the ranks for which others have waited for a second, and those others."""
    missed: dict[int, set[int]] = {}
    for rank in job.ranks:
        for wait in rank.waits:
            for late in wait.ranks:
                missed.setdefault(late, set()).add(rank.rank)
    return missed


def stalls_of(job: JobCounters) -> list[Stalled]:
    """Returns the stalled tensors of all process sets, the oldest first."""
    return sorted((stall for rank in job.ranks for stall in rank.stalls), key=lambda stall: -stall.waited_s)


def prometheus(job: JobCounters) -> str:
    """Returns the counters in Prometheus' text format, version 0.0.4."""
    missed, stalled = missed_by(job), stalls_of(job)
    lines = [*_head(SIZE), f"{SIZE.name} {job.size}"]
    for field, metric in RANK.items():
        lines += _head(metric)
        for rank in job.ranks:
            values = {
                "silent_s": rank.silent_s,
                "missed_by": len(missed.get(rank.rank, ())),
                "stalls": sum(rank.rank in stall.missing for stall in stalled),
            }
            lines.append(f"{metric.name}{_labels(rank=str(rank.rank), host=rank.host)} {_number(values[field])}")
    for field, metric in OPTIMIZER.items():
        lines += _head(metric)
        lines += _samples(metric, field, job.ranks)
    return "\n".join(lines) + "\n"


def _head(metric: Metric) -> list[str]:
    kind = "counter" if metric.is_counter else "gauge"
    return [f"# HELP {metric.name} {metric.meaning}", f"# TYPE {metric.name} {kind}"]


def _samples(metric: Metric, field: str, ranks: Sequence[RankCounters]) -> Iterator[str]:
    for rank in ranks:
        for optimizer in rank.optimizers:
            value = getattr(optimizer, field)
            if value is not None:
                labels = _labels(rank=str(rank.rank), host=rank.host, optimizer=optimizer.name)
                yield f"{metric.name}{labels} {_number(value)}"


def _labels(**labels: str) -> str:
    escaped = {
        name: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, text in labels.items()
    }
    return "{" + ",".join(f'{name}="{text}"' for name, text in escaped.items()) + "}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.6f}"


def parse_address(text: str) -> tuple[str, int]:
    """Returns the address and port that ``OCOMM_METRICS_PORT`` has: "9100", on loopback, or "10.0.0.5:9100".

    Raises ValueError for anything else.
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError("expected a port, 0 for any free one, or ADDRESS:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)
