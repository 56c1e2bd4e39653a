"""The hierarchical compressed allreduce: nodes add up, slices are exchanged between nodes, everyone gets all of them.

Hosts are names that the ranks give themselves, one letter per rank: "aab" is two ranks on host a and one on b.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ocomm
from ocomm import session as sessions
from ocomm.errors import InvalidRequestError, MismatchError, NonFiniteError
from ocomm.session import Session
from ocomm.types import Nodes
from tests.oracle.hierarchical import Simulation
from tests.tiers import few
from tests.worlds import PATIENT, run_ranks

#: 2 x 2, the same with mixed ranks, 3 + 1, 1 + 1 + 2, 2 x 3 and 3 x 2.
HOSTS = ["aabb", "abab", "aaab", "abcc", "aaabbb", "aabbcc"]


def values(call: int, rank: int, numel: int = 20_001) -> np.ndarray:
    scale = 10.0 ** np.random.default_rng(call).uniform(-2, 2)
    return (np.random.default_rng([call, rank]).normal(size=numel) * scale).astype(np.float32)


def state(name: str = "x") -> Any:
    return sessions.current().member_set(0).compressed[name]


def reduce(array: np.ndarray, name: str = "x", hierarchical: Any = True) -> np.ndarray:
    return ocomm.compressed_allreduce(array, name, hierarchical=hierarchical)


def on(hosts: str, body: Callable[[Session], Any], **settings: Any) -> list[Any]:
    return run_ranks(len(hosts), body, settings=replace(PATIENT, **settings), hosts=list(hosts))


@pytest.mark.parametrize("hosts", HOSTS)
def test_every_call_equals_the_simulation_bit_for_bit(hosts: str) -> None:
    calls = 30

    def body(session: Session) -> list[bytes]:
        return [reduce(values(call, ocomm.rank())).tobytes() for call in range(calls)]

    results = on(hosts, body)
    law = Simulation(Nodes.of_hosts(hosts).members, 20_001)
    for call in range(calls):
        expected = law.step([values(call, rank) for rank in range(len(hosts))]).tobytes()
        assert {result[call] == expected for result in results} == {True}, f"call {call}"


def test_a_world_of_one_is_flat_and_equals_the_simulation() -> None:
    (results,) = on("a", lambda s: [reduce(values(c, 0), hierarchical="auto").tobytes() for c in range(5)])
    law = Simulation([[0]], 20_001)
    assert results == [law.step([values(call, 0)]).tobytes() for call in range(5)]


@pytest.mark.parametrize("hosts", HOSTS)
def test_what_was_sent_is_what_was_received_plus_residuals(hosts: str) -> None:
    calls, numel = 20, 5_000

    def body(session: Session) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        received = [reduce(values(call, ocomm.rank(), numel)).astype(np.float64) for call in range(calls)]
        held = state()._errors[0].size
        return np.sum(received, axis=0), state().error, state().server_error(), held

    results = on(hosts, body)
    nodes = Nodes.of_hosts(hosts)
    sent = np.sum([values(c, r, numel).astype(np.float64) for c in range(calls) for r in range(len(hosts))], axis=0)
    residuals = sum(r[1].astype(np.float64) for r in results) / len(nodes.members) + sum(r[2] for r in results)
    scale = np.abs(sent).max()
    assert np.abs(sent / len(hosts) - results[0][0] - residuals).max() < 1e-5 * scale
    assert np.abs(residuals).max() > 0.01 * scale, "the residuals explain nothing: the law was not tested"
    for node in nodes.members:
        share = [results[rank][3] for rank in node]
        assert sum(share) <= numel + 16 * 2, "a node holds one worker error, whatever its number of ranks"
        assert share[nodes.slices :] == [0] * (len(node) - nodes.slices)


def test_the_result_does_not_depend_on_segments_or_window() -> None:
    def body(session: Session) -> bytes:
        return b"".join(reduce(values(c, ocomm.rank(), 300_000)).tobytes() for c in range(3))

    found = {
        digest
        for nbytes, window in ((4096, 1), (4096, 8), (1 << 20, 4))
        for digest in on("aabb", body, segment_nbytes=nbytes, window=window)
    }
    assert len(found) == 1


@pytest.mark.parametrize("hosts", ["aabb", "abcc", "aaabbb"])
def test_bytes_that_leave_a_node_are_those_of_the_formula_and_few_headers(hosts: str) -> None:
    numel = 4096 * 600

    def body(session: Session) -> tuple[int, int, int]:
        reduce(values(0, ocomm.rank(), numel))
        assert session.engine is not None
        before = session.engine.counters()
        reduce(values(1, ocomm.rank(), numel))
        after = session.engine.counters()
        plan = state()._prepared[0]
        plan = getattr(plan, "plan", plan)
        others = {r for r, host in enumerate(hosts) if host != hosts[ocomm.rank()]}
        messages = [m.peer for segment in plan.segments for stage in segment for m in stage.sends]
        assert after["bytes_sent"] - before["bytes_sent"] == plan.bytes_sent
        assert len(messages) == plan.messages_sent == after["messages_sent"] - before["messages_sent"]
        return plan.bytes_sent_to(others), sum(peer in others for peer in messages), len(plan.segments)

    results = on(hosts, body)
    nodes = Nodes.of_hosts(hosts)
    count = len(nodes.members)
    formula = numel / 4 * (count - 1) / count * (1 + 32 / 4096)
    for node in nodes.members:
        sent = sum(results[rank][0] for rank in node)
        assert formula <= sent * 1.01 and sent <= 1.03 * formula
        for rank in node[: nodes.slices]:
            assert results[rank][1] == 2 * (count - 1) * results[rank][2], "two messages per segment and node"
        assert all(results[rank][1] == 0 for rank in node[nodes.slices :])


def test_nan_on_one_rank_is_named_on_all_and_the_errors_stay() -> None:
    def body(session: Session) -> tuple[str, bool]:
        reduce(values(0, ocomm.rank()))
        before = state().error
        bad = values(1, ocomm.rank())
        if ocomm.rank() == 3:
            bad[77] = np.nan
        with pytest.raises(NonFiniteError) as raised:
            reduce(bad)
        same = np.array_equal(before, state().error)
        reduce(values(2, ocomm.rank()))
        return str(raised.value), same

    for message, same in on("aabb", body):
        assert message == "'x' has NaN or Inf on rank(s) [3]; no error was changed."
        assert same


@pytest.mark.parametrize("odd", [0, 1, 2, 3])
@pytest.mark.parametrize("hosts", ["aabb", "aaab", "abcc"])
def test_ranks_that_disagree_are_an_error_on_all_of_them(hosts: str, odd: int) -> None:
    for message in on(hosts, lambda session: disagreement(odd, True)):
        assert f"one of ranks [{odd}," in message or f", {odd}] sent another name" in message


@pytest.mark.parametrize("odd", [0, 3, 6])
def test_ranks_that_disagree_over_two_hops_are_an_error_on_all_of_them(odd: int) -> None:
    messages = on("abcdefg", lambda session: disagreement(odd, False), direct_peers=2)
    assert [f"rank {odd} sent another" in message for message in messages] == [rank != odd for rank in range(7)]


def disagreement(odd: int, hierarchical: bool) -> str:
    """What this rank is told when rank ``odd`` calls another name than the others."""
    for name in "xy":
        reduce(values(0, ocomm.rank()), name, hierarchical)
    with pytest.raises(MismatchError) as raised:
        reduce(values(1, ocomm.rank()), "y" if ocomm.rank() == odd else "x", hierarchical)
    return str(raised.value)


def test_auto_depends_on_the_hosts_alone() -> None:
    def body(session: Session) -> list[bool]:
        flat = []
        for wanted in ("auto", False):
            reduce(values(0, ocomm.rank()), f"x{wanted}", wanted)
            flat.append(state(f"x{wanted}").layout.nodes.is_flat)
        return flat

    assert on("aabb", body) == [[False, True]] * 4
    assert on("aaab", body) == [[True, True]] * 4
    assert on("abcc", body) == [[True, True]] * 4
    assert on("aaaa", body) == [[True, True]] * 4


@pytest.mark.parametrize(("hosts", "why"), [("aaaa", "all 4 are on host 'a'"), ("abcd", "every rank has its own")])
def test_hierarchical_that_cannot_be_is_an_error_that_says_why(hosts: str, why: str) -> None:
    def body(session: Session) -> str:
        with pytest.raises(InvalidRequestError) as raised:
            reduce(values(0, ocomm.rank()))
        return str(raised.value)

    assert all(why in message for message in on(hosts, body))


def test_ranks_that_choose_different_forms_are_told() -> None:
    def body(session: Session) -> str:
        with pytest.raises(MismatchError) as raised:
            reduce(values(0, ocomm.rank()), hierarchical=ocomm.rank() != 2)
        return str(raised.value)

    for message in on("aabb", body):
        assert "hierarchical" in message and "rank 2" in message


@pytest.mark.parametrize("ranks", few([36, 41], [41]))
def test_two_hops_bring_the_same_bits_with_few_messages(ranks: int) -> None:
    """Every rank by itself; 41 makes groups of unequal size."""
    numel = 4096 * ranks + 5

    def body(session: Session) -> tuple[bytes, int, int]:
        found = b"".join(reduce(values(c, ocomm.rank(), numel), hierarchical=False).tobytes() for c in range(2))
        plan = state()._prepared[0]
        return found, plan.messages_sent, len(plan.segments)

    direct = run_ranks(ranks, body)
    relayed = run_ranks(ranks, body, settings=replace(PATIENT, direct_peers=10))
    assert {result[0] for result in direct} == {result[0] for result in relayed} == {direct[0][0]}
    assert all(messages == 2 * (ranks - 1) * segments for _, messages, segments in direct)
    for _, messages, segments in relayed:
        assert messages <= 5 * math.ceil(math.sqrt(ranks)) * segments


@pytest.mark.parametrize("hosts", ["aabbccddeeffgg", "aaabbcccddeefff"])
def test_two_hops_across_nodes_equal_the_simulation_bit_for_bit(hosts: str) -> None:
    results = on(hosts, lambda s: [reduce(values(c, ocomm.rank())).tobytes() for c in range(4)], direct_peers=3)
    law = Simulation(Nodes.of_hosts(hosts).members, 20_001)
    for call in range(4):
        expected = law.step([values(call, rank) for rank in range(len(hosts))]).tobytes()
        assert {result[call] == expected for result in results} == {True}, f"call {call}"


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
def test_dense_sums_are_made_inside_nodes_first_in_one_order(hosts: str, engine: str) -> None:
    """Whether small or large, alone or fused, in place or not; and of a process set by its own nodes."""
    numels = [5, 3_000, 150_001]
    members = [0, 2, 3]

    def law(arrays: list[np.ndarray], letters: str) -> bytes:
        nodes = Nodes.of_hosts(letters)
        sums = [sum((arrays[rank] for rank in node[1:]), arrays[node[0]]) for node in nodes.members]
        sums = [part * np.float32(nodes.weight) for part in sums] if nodes.slices > 1 else arrays
        return (sum(sums[1:], sums[0]) * np.float32(1 / len(sums))).tobytes()

    def body(session: Session) -> list[tuple[bytes, ...]]:
        mine = [values(0, ocomm.rank(), numel) for numel in numels]
        alone = [ocomm.allreduce(array).tobytes() for array in mine]
        fused = [array.tobytes() for array in ocomm.grouped_allreduce(mine)]
        pair = ocomm.add_process_set(members)
        of_set = [ocomm.allreduce(array, process_set=pair).tobytes() if pair.included() else b"" for array in mine]
        in_place = [array.copy() for array in mine]
        for array in in_place:
            ocomm.allreduce_(array)
        return [*zip(alone, fused, (array.tobytes() for array in in_place), of_set, strict=True)]

    results = on(hosts, body, engine=engine)
    for number, numel in enumerate(numels):
        given = [values(0, rank, numel) for rank in range(4)]
        expected = law(given, hosts if hosts == "aabb" else "abcd")
        chosen = law([given[rank] for rank in members], "abc")
        for rank, result in enumerate(results):
            assert result[number] == (expected, expected, expected, chosen if rank in members else b"")


def test_dense_sums_can_be_made_by_all_ranks_alike() -> None:
    def body(session: Session) -> bytes:
        return ocomm.allreduce(values(0, ocomm.rank())).tobytes()

    flat = on("abcd", body)
    assert on("aabb", body, hierarchical_allreduce=False) == flat
    assert on("aabb", body) != flat
