"""What must hold of the records that the ranks of a job keep, whatever is done to them.

A rank appends one ``Line`` to its record after each step; the record outlives it. The functions here compare records
and return sentences about what does not hold, [] if all is well.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

#: The kinds of lines about commits; a number follows.
COMMITTING, RESTORED = "committing", "restored"


class Line(NamedTuple):
    """What a rank had after step ``number``.

    ``synced``: all ranks must have the same parameters, which is not so after a local step. ``parameters`` and
    ``state`` are hashes, of this rank's parameters and of the optimizer's state that all ranks have in common.
    """

    number: int
    synced: bool
    parameters: str
    state: str
    kind: str


#: By rank.
Records = Mapping[int, Sequence[Line]]


class Record:
    """Appends the lines of one rank to a file. Each is written at once, so it survives the rank's death."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._file)

    def write(self, line: Line) -> None:
        sign = "=" if line.synced else "~"
        os.write(self._file, f"{line.number} {sign} {line.parameters} {line.state} {line.kind}\n".encode())


def read(path: Path) -> list[Line]:
    """Returns the lines of a record; one that is not complete, as when its rank dies, does not count."""
    lines = []
    for text in path.read_text().split("\n")[:-1]:
        number, sign, parameters, state, kind = text.split(" ", 4)
        lines.append(Line(int(number), sign == "=", parameters, state, kind))
    return lines


def differences(records: Records) -> list[str]:
    """All ranks that have ended a step have the same parameters and state after it, and no rank leaves out a step."""
    found = []
    first: dict[tuple[int, str], tuple[int, Line]] = {}
    for rank, lines in records.items():
        last = None
        for line in lines:
            if not line.kind.startswith((COMMITTING, RESTORED)):
                if last is not None and line.number != last + 1:
                    found.append(f"rank {rank} has step {line.number} after step {last}")
                last = line.number
            # At a commit there is another line of the same number.
            what = next((word for word in (COMMITTING, RESTORED) if line.kind.startswith(word)), "step")
            other, seen = first.setdefault((line.number, what), (rank, line))
            found += [f"step {line.number}: ranks {other} and {rank} {words}" for words in _unlike(seen, line)]
    return found


def _unlike(one: Line, other: Line) -> list[str]:
    if one.kind != other.kind or one.synced != other.synced:
        return [f"made different steps: {one.kind!r}, {other.kind!r}"]
    found = ["differ in the parameters"] if one.synced and one.parameters != other.parameters else []
    return found + (["differ in the optimizer's state"] if one.state != other.state else [])


def lags(records: Records) -> list[str]:
    """No rank is more than one exchange ahead of another, dead ones included: to end a step is to hear of all ranks.

    Local steps of which no other rank hears do not count.
    """
    numbers = sorted({line.number for lines in records.values() for line in lines if line.synced})
    ended = {rank: max((line.number for line in lines if line.synced), default=0) for rank, lines in records.items()}
    if not ended:
        return []
    slowest, fastest = min(ended, key=ended.__getitem__), max(ended, key=ended.__getitem__)
    ahead = sum(ended[slowest] < number <= ended[fastest] for number in numbers)
    if ahead <= 1:
        return []
    return [f"rank {fastest} has ended step {ended[fastest]}, rank {slowest} only step {ended[slowest]}"]


class Expected:
    """The steps of all jobs of one kind so far: the next one must make the same, to whatever is done to it."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, int, int], Line] = {}

    def departures(self, records: Records, size: int) -> list[str]:
        """Compares the steps of a job of ``size`` ranks with those of earlier ones, and remembers new ones."""
        found = []
        for rank, lines in records.items():
            for line in lines:
                if line.kind.startswith((COMMITTING, RESTORED)):
                    continue
                seen = self._lines.setdefault((size, rank, line.number), line)
                if seen != line:
                    found.append(f"rank {rank} differs in step {line.number} from the same step of an earlier job")
                    break  # all later ones follow from it
        return found


def restores(generations: Sequence[Records]) -> list[str]:
    """Every generation of an elastic job after the first begins, on all ranks, with what some commit before it had."""
    found = []
    committed: dict[str, Line] = {}
    for number, records in enumerate(generations, 1):
        begun = {}
        for rank, lines in records.items():
            restored = [line for line in lines if line.kind.startswith(RESTORED)]
            if lines and lines[0].number > 1 and lines[0] not in restored:
                found.append(f"generation {number}: rank {rank} begins at step {lines[0].number} without a commit")
            if restored:
                begun[rank] = restored[0]
        if len(set(begun.values())) > 1:
            found.append(f"generation {number}: the ranks begin with different states: {begun}")
        for rank, line in begun.items():
            before = committed.get(line.kind.partition(" ")[2])
            if before is None:
                found.append(f"generation {number}: rank {rank} begins with a commit that was never made: {line.kind}")
            elif (before.number, before.parameters, before.state) != (line.number, line.parameters, line.state):
                found.append(f"generation {number}: rank {rank} begins with another state than was committed: {line}")
        for lines in records.values():
            for line in lines:
                if line.kind.startswith(COMMITTING):
                    committed[line.kind.partition(" ")[2]] = line
    return found
