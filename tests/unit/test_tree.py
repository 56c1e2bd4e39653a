"""The tree of ranks: its shape, and what its inner ranks pass on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocomm.negotiation.cache import Announcement
from ocomm.negotiation.request import Kind, Request
from ocomm.negotiation.tree import HOLD_S, Aggregator, Tree, read_aggregate
from tests.unit.test_negotiation import JOIN, World, allreduce

NAMES = [allreduce(name) for name in "abc"]


@given(st.integers(1, 5000), st.integers(1, 100))
def test_every_rank_has_one_parent_and_subtrees_are_ranges(size: int, direct_peers: int) -> None:
    trees = [Tree.of(rank, size, direct_peers) for rank in range(size)]
    parents = {child.start: tree.rank for tree in trees for child in tree.children}
    assert parents == {rank: trees[rank].parent for rank in range(1, size)}
    assert trees[0].parent == -1
    below = [1] * size
    for rank in reversed(range(1, size)):
        below[trees[rank].parent] += below[rank]
    assert all(len(child) == below[child.start] for tree in trees for child in tree.children)
    most = max(len(tree.children) for tree in trees)
    assert most <= max(direct_peers, (size - 1).bit_length())


@pytest.mark.parametrize(("size", "children", "depth"), [(64, 63, 1), (65, 19, 2), (256, 30, 2), (4096, 45, 3)])
def test_by_default_large_trees_have_few_children_and_levels(size: int, children: int, depth: int) -> None:
    trees = [Tree.of(rank, size, 63) for rank in range(size)]
    assert max(len(tree.children) for tree in trees) == children
    levels = [0] * size
    for rank in range(1, size):
        levels[rank] = levels[trees[rank].parent] + 1
    assert max(levels) == depth


@pytest.mark.parametrize("size", [100, 300])
def test_in_a_step_a_rank_hears_once_from_each_child_and_answers_once(size: int) -> None:
    """With ids, and in full; and all that comes to the coordinator are as many bytes as one rank's announcement, and
    ranges, from each child.
    """
    world = World(size)
    for _ in range(4):
        world.tree.costs = world.tree.fresh_costs()
        (response,) = world.ask_all(*NAMES)
        assert response.names == ("a", "b", "c")
        neighbours = [len(tree.children) + (tree.rank > 0) for tree in world.tree.trees]
        assert [cost.messages for cost in world.tree.costs] == [2 * count for count in neighbours]


def told(aggregator: Aggregator, now_s: float) -> list[tuple[list[int], Announcement]]:
    """What is passed on: ranks, and what they have announced."""
    return [
        ([rank for each in ranges for rank in each], Announcement.read(message))
        for ranges, message in read_aggregate(aggregator.take(now_s))
    ]


def test_what_some_ranks_ask_for_is_passed_on_after_a_while_and_the_others_join_in_at_once() -> None:
    node = Aggregator(4, [range(5, 6), range(6, 8)])
    ids, one = Announcement(0, 0b110, []).write(), Announcement(0, 0, NAMES[:1]).write()
    assert (node.is_holding, node.due_s(0.0), node.take(0.0)) == (False, 1.0, b"")
    node.add((range(4, 5),), ids, 1.0)
    node.add((range(6, 8),), ids, 1.1)
    node.add((range(6, 8),), one, 1.1)
    assert (node.is_holding, node.due_s(1.1), node.take(1.1)) == (True, pytest.approx(HOLD_S - 0.1), b"")
    assert told(node, 1.0 + HOLD_S) == [
        ([4, 6, 7], Announcement(0, 0b110, [])),
        ([6, 7], Announcement(0, 0, NAMES[:1])),
    ]
    assert not node.is_holding
    node.add((range(5, 6),), Announcement(0, 0b10, NAMES[:1]).write(), 9.0)
    assert told(node, 9.0) == [([5], Announcement(0, 0b10, []))]
    node.add((range(4, 5),), one, 9.0)
    assert told(node, 9.0) == [([4, 5], Announcement(0, 0, NAMES[:1]))]
    assert not node.is_holding


def test_what_a_rank_asked_for_before_it_joined_is_passed_on_before() -> None:
    node = Aggregator(2, [range(3, 4)])
    node.add((range(3, 4),), Announcement(0, 0b1, NAMES[:1]).write(), 0.0)
    node.add((range(3, 4),), Announcement(0, 0, [JOIN]).write(), 0.0)
    assert told(node, 0.0) == [([3], Announcement(0, 0b1, NAMES[:1])), ([3], Announcement(0, 0, [JOIN]))]


def test_a_message_between_two_ranks_waits_for_nobody() -> None:
    node = Aggregator(2, [range(3, 4)])
    message = Request(Kind.MESSAGE, "m", splits=(1,), root=3)
    node.add((range(3, 4),), Announcement(0, 0, [message]).write(), 0.0)
    assert told(node, 0.0) == [([3], Announcement(0, 0, [message]))]


def test_ids_of_an_older_epoch_are_not_taken_for_new_ones() -> None:
    node = Aggregator(2, [range(3, 4)])
    node.add((range(2, 3),), Announcement(0, 0b1, []).write(), 0.0)
    node.add((range(3, 4),), Announcement(1, 0b1, []).write(), 0.0)
    assert told(node, 0.0) == [([2], Announcement(0, 0b1, []))]
    node.add((range(2, 3),), Announcement(0, 0b10, NAMES).write(), 0.0)  # has not heard of the new epoch
    assert told(node, 0.0) == [([2], Announcement(0, 0b10, NAMES))]
    node.add((range(2, 3),), Announcement(1, 0b1, []).write(), 0.0)
    assert told(node, 0.0) == [([2, 3], Announcement(1, 0b1, []))]
