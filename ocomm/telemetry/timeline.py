"""The timeline: what every tensor waited for, as a Chrome trace (chrome://tracing, ui.perfetto.dev).

Every rank writes a file of its own. A rank is a process of the trace, a tensor is one of its threads; events have
Horovod's names. Times are microseconds of the wall clock, so the files of several hosts are aligned as well as the
hosts' clocks agree; ``merge`` joins files into one.

Recording an event only appends it to a list. A thread of the timeline turns events into text and writes one per line,
so that the file of a killed job can be read up to its last line. A full disk ends the timeline with one warning;
nothing else waits for the disk or fails because of it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

_log = logging.getLogger("ocomm")
_FLUSH_S = 0.2
_CLOSE_S = 10.0
#: Number of events that may wait for the disk. Further events are dropped, and counted in the file.
_LIMIT = 1_000_000
_BATCH = 10_000

#: (phase, track, name, monotonic ns, duration ns, arguments)
_Event = tuple[str, str, str, int, int, Mapping[str, Any] | None]


def path_of(path: str, rank: int, start: int = 1, generation: int = 1) -> Path:
    """Returns the file of a rank: ``path`` itself for rank 0, ``trace.3.json`` for rank 3 and ``trace.json``.

    A job that is joined again in the same process writes into ``trace.start2.json``, ``trace.start2.3.json``; the
    second generation of an elastic job into ``trace.generation2.json``, ``trace.generation2.3.json``.
    """
    whole = Path(path)
    again = (f".generation{generation}" if generation > 1 else "") + (f".start{start}" if start > 1 else "")
    return whole.with_name(f"{whole.stem}{again}{f'.{rank}' if rank else ''}{whole.suffix}")


class Timeline:
    """One rank's file. All methods may be called from any thread; only the timeline's own thread writes the file.

    ``label`` is the name of this rank in the trace. A file that cannot be opened is a warning, and so is a full disk.
    """

    def __init__(self, path: str | Path, rank: int, label: str, mark_cycles: bool = False) -> None:

        self.path = Path(path)
        self.mark_cycles = mark_cycles
        self._rank = rank
        self._events: deque[_Event] = deque()  # only appended to and popped from its ends, which is atomic
        self._dropped = 0
        self._over = False
        self._wake = threading.Event()
        self._closing = False
        self._numbers: dict[str, int] = {}
        self._wall_ns = time.time_ns() - time.monotonic_ns()
        self._lanes: list[int] = []
        self._first = True
        self._events.append(("M", "", "process_name", 0, 0, {"name": label}))
        self._events.append(("M", "", "process_sort_index", 0, 0, {"sort_index": rank}))
        self._thread = threading.Thread(target=self._run, name="ocomm-timeline", daemon=True)
        self._thread.start()

    # Recording

    def begin(self, track: str, name: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Begins a span of ``track`` now; spans of one track nest."""
        self._add(("B", track, name, time.monotonic_ns(), 0, arguments))

    def end(self, track: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Ends the span of ``track`` that began last."""
        self._add(("E", track, "", time.monotonic_ns(), 0, arguments))

    def mark(self, track: str, name: str) -> None:
        """Records a moment on ``track``."""
        self._add(("X", track, name, time.monotonic_ns(), 0, None))

    def span(
        self, track: str, name: str, start_ns: int, end_ns: int, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Records a span that is over; times are those of ``time.monotonic_ns``."""
        self._add(("X", track, name, start_ns, max(end_ns - start_ns, 0), arguments))

    def lane(self, start_ns: int, end_ns: int) -> str:
        """Returns a track on which nothing overlaps [start, end). For one thread at a time."""
        free = next((k for k, last in enumerate(self._lanes) if last <= start_ns), None)
        if free is None:
            free = len(self._lanes)
            self._lanes.append(0)
        self._lanes[free] = end_ns
        return f"exchange lane {free}"

    def _add(self, event: _Event) -> None:
        if self._over:
            return
        if len(self._events) >= _LIMIT:
            self._dropped += 1
            return
        self._events.append(event)

    @property
    def is_over(self) -> bool:
        """True once nothing more will be written."""
        return self._over

    def close(self) -> None:
        """Writes what is recorded and ends the file. Waits for the disk, ten seconds at most."""
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._over = True
            _log.warning("timeline %s: the disk has not taken it in %.0f s; its end is lost", self.path, _CLOSE_S)

    # The writer

    def _run(self) -> None:
        try:
            with self.path.open("w", encoding="utf-8") as file:
                file.write("[\n")
                while not self._closing:
                    self._wake.wait(_FLUSH_S)
                    self._drain(file)
                self._drain(file)
                file.write("\n]\n")
        except OSError as error:
            _log.warning("timeline %s ends here: %s. Training goes on.", self.path, error.strerror or error)
        except Exception:
            _log.exception("timeline %s ends here. Training goes on.", self.path)
        finally:
            self._over = True
            self._events.clear()

    def _drain(self, file: TextIO) -> None:
        while self._events and not self._over:
            self._write(file, [self._events.popleft() for _ in range(min(len(self._events), _BATCH))])

    def _write(self, file: TextIO, events: Sequence[_Event]) -> None:
        lines = [line for event in events for line in self._lines(event)]
        if self._dropped:
            count, self._dropped = self._dropped, 0
            lines += self._lines(("X", "timeline", f"{count} events dropped", time.monotonic_ns(), 0, None))
        file.write(("" if self._first else ",\n") + ",\n".join(lines))
        self._first = False
        file.flush()

    def _lines(self, event: _Event) -> Iterable[str]:
        phase, track, name, at_ns, duration_ns, arguments = event
        number = self._numbers.get(track, 0)
        if track and not number:
            number = self._numbers[track] = len(self._numbers) + 1
            yield from self._lines(("M", track, "thread_name", 0, 0, {"name": track}))
        row: dict[str, Any] = {"ph": phase, "pid": self._rank, "tid": number}
        if name:
            row["name"] = name
        if phase != "M":
            row["ts"] = (self._wall_ns + at_ns) / 1000
        if phase == "X":
            row["dur"] = duration_ns / 1000
        if arguments:
            row["args"] = arguments
        yield json.dumps(row)


def read(path: str | Path) -> list[dict[str, Any]]:
    """Returns the events of a file; of a file that was cut off, those up to its last whole line."""
    events = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line.rstrip(","))
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def merge(into: str | Path, files: Iterable[str | Path]) -> int:
    """Writes the events of several ranks' files into one trace, and returns their number.

    A rank may have several files, of several starts, in which the same tensor has another number.
    """
    rows = []
    numbers: dict[tuple[int, str], int] = {}
    for file in files:
        renumbered: dict[int, int] = {}
        for event in read(file):
            match event:
                case {"name": "thread_name", "pid": int(rank), "tid": int(number), "args": {"name": str(track)}}:
                    renumbered[number] = numbers.setdefault((rank, track), len(numbers) + 1)
            if isinstance(tid := event.get("tid"), int):
                event["tid"] = renumbered.get(tid, tid)
            rows.append(json.dumps(event))
    Path(into).write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
    return len(rows)
