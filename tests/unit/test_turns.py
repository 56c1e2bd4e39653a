"""Transfers of a node are launched in one order on all its ranks, and every rank comes to its end, whatever overtakes.

Ranks are simulated, with windows of segments, messages that take any time, and devices on which one transfer begins
when the one before it is over.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ocomm.collectives.turns import Turns

#: A transfer: (channel, segment, which of the segment's).
Key = tuple[int, int, int]


@dataclass
class Rank:
    """Its channels' segments, as engines run them: each waits for its transfers one after the other."""

    turns: Turns
    windows: list[int]
    segments: list[int]  # by channel
    transfers: int
    ends_at: int  # of the first channel's segments, the one before which it fails
    done: set[tuple[int, int]] = field(default_factory=set)
    at: dict[tuple[int, int], int] = field(default_factory=dict)  # transfers that are over, by segment
    said: set[Key] = field(default_factory=set)
    numbers: dict[Key, int] = field(default_factory=dict)
    launched: list[Key] = field(default_factory=list)
    over: int = 0  # of those launched

    def active(self) -> list[tuple[int, int]]:
        found = []
        for channel, (window, count) in enumerate(zip(self.windows, self.segments, strict=True)):
            count = min(count, self.ends_at) if channel == 0 else count
            found += [(channel, s) for s in range(count) if (channel, s) not in self.done][:window]
        return found

    @property
    def is_over(self) -> bool:
        return not self.active()


class Node:
    """Ranks, messages under way, and what happens next at random."""

    def __init__(self, ranks: list[Rank], chance: random.Random) -> None:
        self.ranks = ranks
        self.chance = chance
        self.ready: list[tuple[Key, int]] = []  # on their way to rank 0
        self.heard: dict[Key, set[int]] = {}
        self.told: list[tuple[int, Key, int]] = []

    def moves(self) -> list[tuple[str, tuple]]:
        found: list[tuple[str, tuple]] = [("hear", entry) for entry in self.ready]
        found += [("number", entry) for entry in self.told]
        for number, rank in enumerate(self.ranks):
            for channel, segment in rank.active():
                key = channel, segment, rank.at.get((channel, segment), 0)
                if key not in rank.said:
                    found.append(("say", (number, key)))
                elif key in rank.numbers and key not in rank.launched and rank.turns.is_due(rank.numbers[key]):
                    found.append(("launch", (number, key)))
            if rank.over < len(rank.launched) and self.is_met(rank.launched[rank.over]):
                found.append(("end", (number, rank.launched[rank.over])))
        return found

    def is_met(self, key: Key) -> bool:
        """Has every device come to this transfer?"""
        return all(key in rank.launched[: rank.over + 1] for rank in self.ranks)

    def run(self) -> None:
        while moves := self.moves():
            verb, what = self.chance.choice(moves)
            getattr(self, verb)(*what)

    def say(self, number: int, key: Key) -> None:
        self.ranks[number].said.add(key)
        self.ready.append((key, number))

    def hear(self, key: Key, number: int) -> None:
        self.ready.remove((key, number))
        heard = self.heard.setdefault(key, set())
        heard.add(number)
        if len(heard) == len(self.ranks):
            turn = self.ranks[0].turns.give()
            self.told += [(rank, key, turn) for rank in range(len(self.ranks))]

    def number(self, rank: int, key: Key, turn: int) -> None:
        self.told.remove((rank, key, turn))
        self.ranks[rank].numbers[key] = turn

    def launch(self, number: int, key: Key) -> None:
        rank = self.ranks[number]
        rank.turns.launch(rank.numbers[key])
        rank.launched.append(key)

    def end(self, number: int, key: Key) -> None:
        rank = self.ranks[number]
        rank.over += 1
        channel, segment, which = key
        rank.at[channel, segment] = which + 1
        if which + 1 == rank.transfers:
            rank.done.add((channel, segment))


@settings(max_examples=150)
@given(
    size=st.integers(2, 4),
    segments=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    transfers=st.integers(1, 3),
    windows=st.lists(st.integers(1, 4), min_size=8, max_size=8),
    failing=st.none() | st.integers(0, 4),
    chance=st.randoms(use_true_random=False),
)
def test_all_ranks_launch_in_one_order_and_come_to_the_end(
    size: int, segments: list[int], transfers: int, windows: list[int], failing: int | None, chance: random.Random
) -> None:
    ranks = [
        Rank(Turns(), windows[2 * r : 2 * r + len(segments)], segments, transfers, ends_at=99) for r in range(size)
    ]
    if failing is not None:
        ranks[-1].ends_at = failing  # it never says that it is ready for the segments from there on
    Node(ranks, chance).run()
    assert all(rank.launched == ranks[0].launched for rank in ranks), "one order"
    assert all(rank.over == len(rank.launched) for rank in ranks), "nobody's device hangs"
    if failing is None:
        assert all(rank.is_over for rank in ranks)
    else:
        assert ranks[-1].is_over, "who fails leaves nobody's device waiting, and the other channel goes on"
