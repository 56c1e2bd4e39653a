"""What ``ocommrun --watch`` shows of a running job: ranks, steps per second, bytes, stage, stragglers and stalls.

Rank 0 sends the counters of all ranks every two seconds. ``Progress`` makes rows of them, without a terminal. On a
terminal ``LiveView`` keeps a table below the ranks' output; elsewhere ``PlainView`` writes a line now and then.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol, TextIO

from ocomm.errors import LaunchError
from ocomm.launch.output import write_all
from ocomm.telemetry.counters import JobCounters, OptimizerCounters, missed_by, stalls_of
from ocomm.telemetry.units import amount

#: A rank that rank 0 has not heard of for so many seconds is shown as silent.
_SILENT_S = 7.0
#: The part of the time that other ranks must wait more than the slowest one, to call it that.
_SLOWER = 0.1
#: Number of seconds between two lines where there is no terminal.
_LINES_S = 10.0
#: Number of rows of the table: of a large job those ranks are shown first with which something is wrong.
_ROWS = 24


@dataclass(frozen=True, slots=True)
class Row:
    """One optimizer on one rank.

    ``per_second`` are steps, ``stage`` is what the last steps sent, and ``waited`` the part of the time that ``step()``
    waited for exchanges; each None or "" until it is known. ``trouble`` is "" if nothing is wrong.
    """

    rank: int
    host: str
    optimizer: str
    steps: int
    per_second: float | None
    sent: float
    dense: float
    stage: str
    waited: float | None
    trouble: str


@dataclass(frozen=True, slots=True)
class _Pace:
    """What has changed between two samples of an optimizer on a rank."""

    per_second: float | None = None
    stage: str = ""
    waited: float | None = None


class Progress:
    """Turns the counters of a job, as they come, into rows. Decisions only."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], tuple[float, OptimizerCounters]] = {}
        self._paces: dict[tuple[int, str], _Pace] = {}

    def rows(self, job: JobCounters) -> list[Row]:
        """Returns a row for each optimizer of each rank, and one for a rank without any, by rank."""
        for rank in job.ranks:
            for optimizer in rank.optimizers:
                self._note((rank.rank, optimizer.name), job.at_s - rank.silent_s, optimizer)
        slowest = self._slowest()
        missed = missed_by(job)
        rows = []
        for rank in job.ranks:
            trouble = ""
            if rank.silent_s >= _SILENT_S:
                trouble = f"silent for {rank.silent_s:.0f} s"
            elif rank.rank in missed:
                trouble = f"{_ranks(sorted(missed[rank.rank]))} wait for it"
            elif rank.waits:
                trouble = f"waits for {_ranks(rank.waits[0].ranks)}"
            for optimizer in rank.optimizers or (OptimizerCounters(""),):
                key = rank.rank, optimizer.name
                pace = self._paces.get(key, _Pace(stage=_stage(optimizer, None)))
                rows.append(
                    Row(
                        rank.rank,
                        rank.host,
                        optimizer.name,
                        optimizer.steps,
                        pace.per_second,
                        optimizer.bytes_sent,
                        optimizer.bytes_dense,
                        pace.stage,
                        pace.waited,
                        trouble or ("slowest" if key in slowest else ""),
                    )
                )
        return rows

    def _note(self, key: tuple[int, str], at_s: float, now: OptimizerCounters) -> None:
        last_s, last = self._last.get(key, (at_s, now))
        if now.steps < last.steps:  # the job has been started again
            self._paces.pop(key, None)
        elif at_s > last_s:
            seconds = at_s - last_s
            waited = None
            if now.waited_s is not None and last.waited_s is not None:
                waited = min((now.waited_s - last.waited_s) / seconds, 1.0)
            stage = _stage(now, last) or self._paces.get(key, _Pace()).stage or _stage(now, None)
            self._paces[key] = _Pace((now.steps - last.steps) / seconds, stage, waited)
        self._last[key] = at_s, now

    def _slowest(self) -> set[tuple[int, str]]:
        """Returns, of each optimizer, the rank that waits least, if most others wait clearly longer: for that rank."""
        found = set()
        for name in {name for _, name in self._paces}:
            waits = {key: p.waited for key, p in self._paces.items() if key[1] == name and p.waited is not None}
            if len(waits) > 1:
                key = min(waits, key=lambda key: waits[key])
                if median(waits[other] for other in waits if other != key) - waits[key] >= _SLOWER:
                    found.add(key)
        return found


def _stage(now: OptimizerCounters, last: OptimizerCounters | None) -> str:
    """Returns which kinds of steps there were between two samples, or since the start; "" for none."""
    kinds = ("dense", "compressed", "local", "skipped")
    counts = {kind: getattr(now, f"{kind}_steps") - getattr(last, f"{kind}_steps", 0) for kind in kinds}
    return ", ".join(kind for kind in kinds if counts[kind] > 0)


def summary(job: JobCounters, rows: Sequence[Row]) -> str:
    """Returns a job's state in a line: of the optimizer with the most steps, of all bytes, and what is wrong."""
    parts = [f"{job.size} ranks" if len(job.ranks) == job.size else f"{len(job.ranks)} of {job.size} ranks heard"]
    first = max(rows, key=lambda row: row.steps, default=None)
    if first is not None and first.optimizer:
        parts.append(f"step {first.steps}")
        parts += [f"{first.per_second:.3g} steps/s"] if first.per_second is not None else []
        parts += [first.stage] if first.stage else []
        sent, dense = sum(row.sent for row in rows), sum(row.dense for row in rows)
        fewer = f" instead of {amount(dense)}, {dense / sent:.3g} times fewer" if sent and dense >= 1.05 * sent else ""
        parts.append(f"sent {amount(sent)}{fewer}")
    told = dict.fromkeys(f"rank {row.rank} on {row.host}: {row.trouble}" for row in rows if row.trouble)
    return "; ".join([", ".join(parts), *list(told)[:3], *stall_lines(job)[:1]])


def stall_lines(job: JobCounters) -> list[str]:
    """Returns a sentence for each stalled tensor, the oldest first."""
    return [
        f"tensor '{stall.name}' has waited {stall.waited_s:.0f} s for {_ranks(stall.missing)}"
        for stall in stalls_of(job)
    ]


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


class View(Protocol):
    """Shows a job to whoever has asked for it."""

    #: Whether what the ranks write to stdout has to come through ``write``.
    takes_output: bool

    def show(self, job: JobCounters) -> None:
        """Shows the latest counters."""
        ...

    def write(self, data: bytes) -> None:
        """Passes on what the launcher and the ranks have written. From any thread."""
        ...

    def close(self) -> None:
        """Shows the last counters for good."""
        ...


class PlainView:
    """Writes a line to ``stream`` every ten seconds at most, and one at the end."""

    takes_output = False

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._progress = Progress()
        self._line = ""
        self._said_s = clock()

    def show(self, job: JobCounters) -> None:
        self._line = summary(job, self._progress.rows(job))
        if self._clock() - self._said_s >= _LINES_S:
            self._say()

    def write(self, data: bytes) -> None:
        write_all(self._stream, data)

    def close(self) -> None:
        self._say()

    def _say(self) -> None:
        if self._line:
            write_all(self._stream, f"ocommrun: {self._line}\n".encode(errors="backslashreplace"))
        self._line, self._said_s = "", self._clock()


class LiveView:
    """Keeps a table at the end of a terminal, below what the ranks write. Needs ``rich``.

    Raises LaunchError if that is not installed.
    """

    takes_output = True

    def __init__(self, stream: TextIO) -> None:
        try:
            self._rich = importlib.import_module("rich.live"), importlib.import_module("rich.table")
            console, self._text = importlib.import_module("rich.console"), importlib.import_module("rich.text")
        except ImportError:
            raise LaunchError("--watch on a terminal needs rich: pip install 'ocomm[watch]'.") from None
        self._live: Any = self._rich[0].Live(
            console=console.Console(file=stream), auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._progress = Progress()
        self._lock = threading.Lock()
        self._begun: dict[int, bytes] = {}  # lines without an end, by thread

    def show(self, job: JobCounters) -> None:
        table = self.table(job, self._progress.rows(job))
        with self._lock:
            if not self._live.is_started:
                self._live.start()
            self._live.update(table, refresh=True)

    def table(self, job: JobCounters, rows: Sequence[Row]) -> Any:
        """Returns the table as an object of ``rich``."""
        text = self._text.Text
        chosen = sorted(rows, key=lambda row: (not row.trouble, row.rank))[:_ROWS]
        below = [f"and {len(rows) - len(chosen)} more"] if len(rows) > len(chosen) else []
        table = self._rich[1].Table(
            title=text(summary(job, rows)), caption=text("\n".join([*below, *stall_lines(job)[:4]])), box=None
        )
        for name in ("rank", "host", "optimizer", "steps", "steps/s", "sent", "fewer", "stage", "waited", ""):
            table.add_column(name, justify="right" if name in ("rank", "steps", "steps/s", "sent", "fewer") else "left")
        for row in sorted(chosen, key=lambda row: row.rank):
            table.add_row(*map(text, cells(row)), style="yellow" if row.trouble else None)
        return table

    def write(self, data: bytes) -> None:
        with self._lock:
            me = threading.get_ident()
            *lines, rest = (self._begun.pop(me, b"") + data).split(b"\n")
            if rest:
                self._begun[me] = rest
            self._print(lines)

    def close(self) -> None:
        with self._lock:
            self._print(list(self._begun.values()))
            self._begun.clear()
            self._live.stop()

    def _print(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            # A progress bar writes its line again and again: what counts is the last time.
            shown = line.rstrip(b"\r").rpartition(b"\r")[2]
            self._live.console.print(self._text.Text.from_ansi(shown.decode(errors="replace")), soft_wrap=True)


def cells(row: Row) -> tuple[str, ...]:
    """Returns the cells of a row of the table."""
    return (
        str(row.rank),
        row.host,
        row.optimizer,
        str(row.steps),
        "" if row.per_second is None else f"{row.per_second:.3g}",
        amount(row.sent),
        f"{row.dense / row.sent:.3g}x" if row.sent else "",
        row.stage,
        "" if row.waited is None else f"{row.waited:.0%}",
        row.trouble,
    )


def open_view(stream: TextIO | None = None) -> View:
    """Returns what shows a job on ``stream``, stderr by default. Raises LaunchError without ``rich`` on a terminal."""
    stream = stream or sys.stderr
    with contextlib.suppress(ValueError):  # the stream is closed
        if stream.isatty():
            return LiveView(stream)
    return PlainView(stream)
