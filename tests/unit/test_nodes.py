"""Which ranks share a node, which share a slice, and in which groups nodes reach each other."""

from __future__ import annotations

import pytest

from ocomm.types import Nodes


def test_ranks_of_one_host_share_a_node_wherever_they_are() -> None:
    nodes = Nodes.of_hosts(["b", "a", "b", "c", "a"])
    assert nodes.members == ((0, 2), (1, 4), (3,))
    assert (nodes.ranks, nodes.slices, nodes.is_flat) == (5, 1, False)
    assert nodes.weight == pytest.approx(3 / 5)
    assert [nodes.node_of(rank) for rank in range(5)] == [(0, 2), (1, 4), (0, 2), (3,), (1, 4)]


def test_the_workers_of_a_slice_have_one_place_in_their_nodes() -> None:
    nodes = Nodes(((0, 1, 2), (3, 4)))
    assert [nodes.workers(rank) for rank in range(5)] == [(0, 3), (1, 4), (), (0, 3), (1, 4)]


def test_ranks_on_hosts_of_their_own_are_the_flat_form() -> None:
    assert Nodes.of_hosts(["x", "y", "z"]) == Nodes.flat(3)
    assert Nodes.flat(3).is_flat and Nodes.flat(3).workers(1) == (0, 1, 2) and Nodes.flat(3).weight == 1
    assert Nodes.flat(3).wire_order == (0, 1, 2)


def test_groups_are_nearly_equal_runs_and_relays_lie_side_by_side_on_the_wire() -> None:
    nodes = Nodes(tuple((rank,) for rank in range(7)), 3)
    assert nodes.node_groups == ((0, 1), (2, 3), (4, 5, 6))
    assert nodes.wire_order == (4, 0, 2, 5, 1, 3, 6)


@pytest.mark.parametrize("members", [((0,), (2,)), ((0, 1), (1,)), ((1,), (0,)), ((1, 0),), ((0,), ())])
def test_nodes_that_do_not_share_out_the_ranks_are_an_error(members: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="nodes must share out"):
        Nodes(members)


@pytest.mark.parametrize("groups", [0, 3])
def test_a_group_has_at_least_one_node(groups: int) -> None:
    with pytest.raises(ValueError, match="groups"):
        Nodes(((0,), (1,)), groups)
