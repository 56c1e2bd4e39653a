"""Commits on disk: their names, which commit the ranks go back to, and who still has what of it. Decisions only.

A commit has a replicated part, equal on all ranks and written once per host, and a part of each rank. Its files are

    set0.1-g0002-00000012-9f3c.all            replicated
    set0.1-g0002-00000012-9f3c.rank3of4on1    of rank 3 of 4 of the process set, which ran on its host number 1

for process set 0, its first state, generation 2, commit 12. Numbers go on from one generation to the next; the four
digits are drawn by each generation, so that what comes back on a host that was away is not taken for something newer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Commits that are kept: should the last not be whole, there is the one before.
KEPT = 2


@dataclass(frozen=True, order=True)
class Label:
    """Which commit: later ones are greater."""

    generation: int
    number: int
    token: str

    def __str__(self) -> str:
        return f"g{self.generation:04d}-{self.number:08d}-{self.token}"


@dataclass(frozen=True)
class Held:
    """What one rank sees of a commit: the replicated part or not, and parts of ranks.

    ``places``: rank -> the number of its host, of those that the ``size`` ranks had, in the order of first ranks.
    """

    replicated: bool = False
    places: Mapping[int, int] = field(default_factory=dict)
    size: int = 0


Listing = Mapping[Label, Held]
#: A file of a commit: the replicated part (None), or that of an old rank.
File = tuple[Label, int | None]


@dataclass(frozen=True)
class Choice:
    """The commit that all go back to. ``sources[r]``: those that have the part of old rank r; missing if it is lost.

    ``places``: as in ``Held``, of all that are not lost.
    """

    label: Label
    replicated: tuple[int, ...]  # those that have the replicated part
    size: int  # ranks that the state had; 0 if it has no parts of ranks
    sources: Mapping[int, tuple[int, ...]]
    places: Mapping[int, int]

    @property
    def lost(self) -> list[int]:
        """Old ranks whose parts nobody has."""
        return [rank for rank in range(self.size) if rank not in self.sources]


def choose(listings: Sequence[Listing]) -> Choice | None:
    """The newest commit of which somebody has the replicated part; ``listings`` are all ranks'.

    A rank that died while it wrote its part would lose it: if that of the commit before is still there, with all
    others, all go back to that one.
    """
    labels = sorted({label for listing in listings for label, held in listing.items() if held.replicated}, reverse=True)
    choices = [_choice(label, listings) for label in labels[:KEPT]]
    if not choices:
        return None
    if len(choices) > 1 and choices[0].lost and not choices[1].lost and labels[0].number == labels[1].number + 1:
        return choices[1]
    return choices[0]


def without(listing: Listing, damaged: Container[File]) -> dict[Label, Held]:
    """What a rank can use of ``listing``."""
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
    """What only the ranks knew at a commit. ``read(rank)``: an old rank's part, None where it is lost.

    ``size`` ranks had the state, of which those in ``ranks`` have left their parts; this one was or is ``rank``.
    ``alone``: only ``rank``'s can be read, and it is there on all ranks.
    """

    read: Callable[[int], Any]
    ranks: tuple[int, ...]
    size: int
    rank: int
    now: int  # ranks that the state has now
    alone: bool = False
    reports: dict[str, Any] = field(default_factory=dict)

    @property
    def own(self) -> Any:
        """This rank's part, if there are as many ranks as before and it is not lost."""
        return self.read(self.rank) if self.size == self.now and self.rank in self.ranks else None
