"""How the workers of a slice reach each other: bytes, messages, and what is said of them beforehand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ocomm.collectives.compressed import vote
from ocomm.collectives.plan import Stage
from ocomm.collectives.routes import Route, vote_groups
from ocomm.collectives.segment_header import SegmentHeaders
from ocomm.compression.codecs import Codec
from ocomm.compression.layout import Layout, MessageLayout, float_messages
from ocomm.types import Nodes
from tests.unit.test_layout import bucketed, codecs

# A busy machine is no reason to fail.
law = settings(deadline=None, max_examples=60)


def stages(layout: MessageLayout) -> list[Stage]:
    """Returns what travels on the route of an exchange and back."""
    packed = np.zeros(layout.packed_nbytes, np.uint8)
    route = Route(layout, packed)
    return [*route.scatter(), *route.gather(packed)]


def sent(layout: MessageLayout) -> int:
    return sum(message.buffer.nbytes for stage in stages(layout) for message in stage.sends)


def root_groups(count: int) -> Nodes:
    """Returns nodes of one rank, in as many groups as ``arrange`` makes."""
    return Nodes(Nodes.flat(count).members, math.isqrt(count))


@law
@given(st.integers(1, 90).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count))))
def test_the_members_of_a_group_share_out_what_they_relay(case: tuple[int, int]) -> None:
    count, groups = case
    nodes = Nodes(Nodes.flat(count).members, groups)
    for number, group in enumerate(nodes.node_groups):
        runs = [nodes.relayed(number, position) for position in range(len(group))]
        assert sum(runs, ()) == nodes.wire_order
        assert max(map(len, runs)) - min(map(len, runs)) <= 1
        assert [set(run) & set(group) for run in runs] == [{node} for node in group], "each relays for itself"
        assert all(nodes.relay(number, node) == relay for relay, run in zip(group, runs, strict=True) for node in run)


@law
@given(bucketed(), codecs)
def test_what_is_said_beforehand_is_what_the_workers_send(
    case: tuple[Layout, int, list[int], int], codec: Codec
) -> None:
    """On average over the workers, but for headers, and for owners that have more than others in groups of unequal
    sizes.
    """
    layout, _, _, nbytes = case
    everything = range(len(layout.tensors))
    nodes = layout.nodes
    n, groups = len(nodes.members), nodes.groups
    per_rank = [layout.segments(everything, rank, nbytes, codec) for rank in range(layout.ranks)]
    lengths = layout.blocks["length"].tolist()
    scales = 0 if codec.group is None else sum(-(-length // codec.group) for length in lengths)
    real = sum((length * codec.bits + 7) // 8 for length in lengths) + 4 * scales
    told = [layout.compressed_bytes(rank, codec) for rank in range(layout.ranks)]
    if groups == 1:
        assert sum(told) == pytest.approx(2 * (n - 1) * real)
    crossings = 3 * n - groups - 1 - sum(len(group) ** 2 for group in nodes.node_groups) / n
    assert sum(told) == pytest.approx(crossings * real)
    found = [sum(sent(segment) for segment in segments) for segments in per_rank]
    headers = sum(n * nodes.slices * (segment.header_nbytes + 7) for segment in per_rank[0])
    uneven = len({len(group) for group in nodes.node_groups}) - 1
    assert sum(told) * (1 - 1e-12) - uneven * real <= sum(found)
    assert sum(found) <= sum(told) * (1 + 1e-12) + uneven * real + (crossings + uneven) * headers
    dense = [layout.dense_bytes(rank) for rank in range(layout.ranks)]
    assert sum(dense) == pytest.approx(2 * (n - 1) * 4 * layout.numel)
    # A rank without a slice, which a larger node has, sends nothing to other nodes in either form.
    for rank in range(layout.ranks):
        is_worker = bool(nodes.workers(rank))
        assert (dense[rank] > 0) == (told[rank] > 0) == is_worker or n == 1 or not layout.numel
        assert is_worker or not found[rank]


@law
@given(st.integers(2, 90))
def test_no_worker_sends_more_than_three_times_its_values_in_two_hops(count: int) -> None:
    """At any number of nodes, and on average what is said beforehand. All owners have the same number of bytes."""
    nodes = root_groups(count)
    layouts = [float_messages(rank, nodes, 0, 16 * count)[0] for rank in range(count)]
    whole = layouts[0].packed_nbytes
    assert whole == 64 * count
    found = [sent(layout) for layout in layouts]
    assert max(found) <= 3 * whole
    assert sum(found) == pytest.approx(sum(nodes.exchange_nbytes(whole, rank) for rank in range(count)))


@law
@given(st.integers(2, 400), st.data())
def test_no_worker_has_more_than_six_roots_of_messages_with_the_vote(count: int, data: st.DataObject) -> None:
    nodes = root_groups(count)
    rank = data.draw(st.integers(0, count - 1))
    layout, _ = float_messages(rank, nodes, 0, 16 * count)
    (headers,) = SegmentHeaders(rank, [(0, 0)], *(np.zeros(1, kind) for kind in (np.uint32, np.uint32, np.int64)))
    (voted,) = vote(rank, vote_groups(nodes), headers).segments
    for each in ("sends", "receives"):
        assert sum(len(getattr(stage, each)) for stage in [*stages(layout), *voted]) <= 6 * math.sqrt(count)


@law
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_every_rank_hears_every_header_of_a_vote_once(sizes: list[int]) -> None:
    """Also from groups of any sizes: what one sends to another is what that one receives from it."""
    ranks = iter(range(sum(sizes)))
    groups = [tuple(next(ranks) for _ in range(size)) for size in sizes]
    zeros = [np.zeros(1, kind) for kind in (np.uint32, np.uint32, np.int64)]
    plans = []
    for rank in range(sum(sizes)):
        (headers,) = SegmentHeaders(rank, [(0, 0)], *zeros)
        plans.append((vote(rank, groups, headers), headers.nbytes))
    for hop in range(max(len(plan.segments[0]) for plan, _ in plans) - 1):
        sends = sorted(
            (rank, one.peer, one.buffer.nbytes)
            for rank, (plan, _) in enumerate(plans)
            for one in plan.segments[0][hop].sends
        )
        receives = sorted(
            (one.peer, rank, one.buffer.nbytes)
            for rank, (plan, _) in enumerate(plans)
            for one in plan.segments[0][hop].receives
        )
        assert sends == receives
    for plan, nbytes in plans:
        heard = sum(one.buffer.nbytes for stage in plan.segments[0] for one in stage.receives)
        assert heard == nbytes * (sum(sizes) - 1)
