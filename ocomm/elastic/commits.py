"""Commits on disk: their names, which commit the ranks go back to, and which ranks have which part of it. Decisions
only.

A commit has a replicated part, equal on all ranks and written once per host, and a part of each rank. Its files are

    set0.1-g0002-00000012-9f3c.all            replicated
    set0.1-g0002-00000012-9f3c.rank3of4on1    of rank 3 of 4 of the process set, which ran on its host number 1

for process set 0, its first state, generation 2, commit 12. Numbers continue from one generation to the next. Each
generation draws the four digits at random, so that files of a host that was away are not taken for newer ones.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Number of commits that are kept, so that there is one more if the last is not complete.
KEPT = 2


@dataclass(frozen=True, order=True)
class Label:
    """Identifies a commit; later commits are greater."""

    generation: int
    number: int
    token: str

    def is_displaced_by(self, other: Label) -> bool:
        """Returns True if ``other`` is of a job that has begun since this one's generation, or with it. Each generation
        takes a number above those that it finds.
        """
        return other.generation >= self.generation and other.token != self.token

    def __str__(self) -> str:
        return f"g{self.generation:04d}-{self.number:08d}-{self.token}"


@dataclass(frozen=True)
class Held:
    """The parts of a commit that one rank sees: whether the replicated one, and those of which ranks.

    ``places``: rank -> the number of its host among the hosts of the ``size`` ranks, in the order of first ranks.
    """

    replicated: bool = False
    places: Mapping[int, int] = field(default_factory=dict)
    size: int = 0


Listing = Mapping[Label, Held]
#: A file of a commit: the replicated part (None), or the part of an old rank.
File = tuple[Label, int | None]


@dataclass(frozen=True)
class Choice:
    """The commit that all ranks go back to.

    ``sources[r]`` are the ranks that have the part of old rank r; there is no entry if it is lost. ``places`` is that
    of ``Held``, of all parts that are not lost.
    """

    label: Label
    replicated: tuple[int, ...]  # ranks that have the replicated part
    size: int  # number of ranks that the state had; 0 if it has no parts of ranks
    sources: Mapping[int, tuple[int, ...]]
    places: Mapping[int, int]

    @property
    def lost(self) -> list[int]:
        """Old ranks whose parts no rank has."""
        return [rank for rank in range(self.size) if rank not in self.sources]


def choose(listings: Sequence[Listing]) -> Choice | None:
    """Returns the newest commit whose replicated part some rank has; ``listings`` are those of all ranks.

    If a rank died while it wrote its part, that part is lost. Then, if the commit before is complete with that part,
    all ranks go back to it.
    """
    labels = sorted({label for listing in listings for label, held in listing.items() if held.replicated}, reverse=True)
    choices = [_choice(label, listings) for label in labels[:KEPT]]
    if not choices:
        return None
    if len(choices) > 1 and choices[0].lost and not choices[1].lost and labels[0].number == labels[1].number + 1:
        return choices[1]
    return choices[0]


def without(listing: Listing, damaged: Container[File]) -> dict[Label, Held]:
    """Returns what a rank can use of ``listing``: all but ``damaged`` files."""
    return {
        label: Held(
            held.replicated and (label, None) not in damaged,
            {rank: place for rank, place in held.places.items() if (label, rank) not in damaged},
            held.size,
        )
        for label, held in listing.items()
    }


def _choice(label: Label, listings: Sequence[Listing]) -> Choice:
    held = [listing.get(label, Held()) for listing in listings]
    size = max(entry.size for entry in held)
    places = {rank: place for entry in held for rank, place in entry.places.items()}
    sources = {rank: tuple(who for who, entry in enumerate(held) if rank in entry.places) for rank in sorted(places)}
    return Choice(
        label,
        tuple(who for who, entry in enumerate(held) if entry.replicated),
        size,
        sources,
        places,
    )


@dataclass(frozen=True)
class Part:
    """What only single ranks had at a commit. ``read(rank)`` returns an old rank's part, None if it is lost.

    The state had ``size`` ranks, of which those in ``ranks`` have left their parts; this rank was or is ``rank``.
    ``alone``: only the part of ``rank`` can be read, and every rank has its own.
    """

    read: Callable[[int], Any]
    ranks: tuple[int, ...]
    size: int
    rank: int
    now: int  # number of ranks that the state has now
    alone: bool = False
    reports: dict[str, Any] = field(default_factory=dict)

    @property
    def own(self) -> Any:
        """This rank's part, if there are as many ranks as before and it is not lost."""
        return self.read(self.rank) if self.size == self.now and self.rank in self.ranks else None
