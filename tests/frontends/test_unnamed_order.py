"""Calls without a name belong together by their order: where that differs between ranks, no tensors are mixed."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ocomm.api
import ocomm_torch as hvd
from ocomm.errors import MismatchError
from ocomm.negotiation.cache import RankCache
from ocomm.negotiation.call_order import CallOrder
from ocomm.negotiation.coordinator import Coordinator
from ocomm.negotiation.request import Fault, Kind, Request
from ocomm.runtime import call_sites
from ocomm.session import Session
from tests.worlds import run_ranks

A, B, C = torch.full((3,), 1.0), torch.full((3,), 20.0), torch.full((3,), 300.0)


def refused(body: Callable[[int], Any]) -> list[str]:
    """The message that every rank gets from ``body``."""

    def on_rank(session: Session) -> str:
        with pytest.raises(MismatchError) as raised:
            body(hvd.rank())
        hvd.barrier()
        return str(raised.value)

    return run_ranks(2, on_rank)


def accepted(body: Callable[[int], Any]) -> list[Any]:
    return run_ranks(2, lambda session: body(hvd.rank()))


def in_two_orders(rank: int) -> None:
    if rank == 0:
        hvd.allreduce(A)
        hvd.allreduce(B)
    else:
        hvd.allreduce(B)
        hvd.allreduce(A)


def test_two_tensors_that_are_averaged_in_two_orders_are_refused_with_the_lines_that_call() -> None:
    line = in_two_orders.__code__.co_firstlineno
    (first, second) = refused(in_two_orders)
    assert first == second
    assert first == (
        "tensor 'allreduce.noname.2': calls without a name come in different orders on ranks 0, 1. Calls without a "
        f"name belong together by their order: rank 0 called from test_unnamed_order.py:{line + 3} in in_two_orders, "
        f"rank 1 from test_unnamed_order.py:{line + 6} in in_two_orders, and with 'allreduce.noname.1' it was the "
        "other way round, so that results would mix different tensors. Call in the same order on all ranks, or pass "
        "name=."
    )


def summed(tensor: torch.Tensor) -> torch.Tensor:
    return hvd.allreduce(tensor, op=hvd.Sum)


def through_a_function(rank: int) -> None:
    for call in (0, 1) if rank == 0 else (1, 0):
        if call == 0:
            summed(A)
        else:
            summed(B)


def one_call_more_before_a_loop(rank: int) -> None:
    if rank == 1:
        summed(torch.zeros(3))
    for _ in range(3):
        summed(A)
        summed(B)
        summed(C)


def gathered(rank: int) -> None:
    for call in (0, 1) if rank == 0 else (1, 0):
        if call == 0:
            hvd.allgather(A)
        else:
            hvd.allgather(torch.zeros(1 + rank))


def broadcast(rank: int) -> None:
    for call in (0, 1) if rank == 0 else (1, 0):
        if call == 0:
            hvd.broadcast(A, 0)
        else:
            hvd.broadcast(B, 0)


def objects(rank: int) -> None:
    for call in (0, 1) if rank == 0 else (1, 0):
        if call == 0:
            ocomm.api.broadcast_object({"rank": rank}, 0)
        else:
            ocomm.api.broadcast_object([rank], 0)


def all_objects(rank: int) -> None:
    for call in (0, 1) if rank == 0 else (1, 0):
        if call == 0:
            ocomm.api.allgather_object({"rank": rank})
        else:
            ocomm.api.allgather_object([rank])


def groups(rank: int) -> None:
    for call in (0, 1) if rank == 0 else (1, 0):
        if call == 0:
            hvd.grouped_allreduce([A, B])
        else:
            hvd.grouped_allreduce([B, C])


def scattered(rank: int) -> None:
    for call in (0, 1) if rank == 0 else (1, 0):
        if call == 0:
            hvd.reducescatter(A)
        else:
            hvd.reducescatter(B)


def dealt(rank: int) -> None:
    for call in (0, 1) if rank == 0 else (1, 0):
        if call == 0:
            hvd.alltoall(torch.zeros(2))
        else:
            hvd.alltoall(torch.ones(2))


@pytest.mark.parametrize(
    "body",
    [
        through_a_function,
        one_call_more_before_a_loop,
        gathered,
        broadcast,
        objects,
        all_objects,
        groups,
        scattered,
        dealt,
    ],
)
def test_calls_that_come_in_two_orders_are_refused(body: Callable[[int], Any]) -> None:
    for message in refused(body):
        assert "different orders on ranks 0, 1" in message and "test_unnamed_order.py:" in message


def test_neither_result_is_mixed_where_the_coordinator_hears_of_both_calls_at_once() -> None:
    coordinator = Coordinator((0, 1), 0, 0)
    for rank, lines in enumerate([(1, 2), (2, 1)]):
        asked = [
            Request(Kind.ALLREDUCE, f"allreduce.noname.{number}", shape=(3,), digest=line, detail=f"train.py:{line}")
            for number, line in enumerate(lines, 1)
        ]
        coordinator.receive([rank], RankCache().announcement(asked), 0.0)
    responses = coordinator.decide()
    assert [response.fault for response in responses] == [Fault.MISMATCH] * 2
    assert "rank 0 called from train.py:1, rank 1 from train.py:2, and with 'allreduce.noname.2'" in responses[0].error


def branches(rank: int) -> list[float]:
    results = []
    for step in range(3):
        if rank == 0:
            mean = hvd.allreduce(A * step)
        else:
            mean = hvd.allreduce(torch.zeros(3))
        results.append(mean.sum().item())
    return results


def roots_in_turn(rank: int) -> list[float]:
    results = []
    for root in (0, 1, 0, 1):
        if rank == root:
            found = hvd.broadcast(A + rank, root)
        else:
            found = hvd.broadcast(torch.zeros(3), root)
        results.append(found.sum().item())
    return results


def one_rank_first_from_elsewhere(rank: int) -> float:
    total = hvd.allreduce(A) if rank == 0 else hvd.allreduce(B)
    for _ in range(3):
        total = total + hvd.allreduce(C)
    return total.sum().item()


def names_in_two_orders(rank: int) -> list[float]:
    results = {}
    for name, tensor in (("a", A), ("b", B)) if rank == 0 else (("b", B), ("a", A)):
        if name == "a":
            handle = hvd.allreduce_async(tensor, name="a")
        else:
            handle = hvd.allreduce_async(tensor, name="b")
        results[name] = handle
    return [hvd.synchronize(results[name]).sum().item() for name in "ab"]


def kinds_in_two_orders(rank: int) -> list[float]:
    """Each kind is counted by itself."""
    if rank == 0:
        reduced, everyone = hvd.allreduce_async(A), hvd.allgather_async(B)
    else:
        everyone, reduced = hvd.allgather_async(B), hvd.allreduce_async(A)
    return [hvd.synchronize(reduced).sum().item(), hvd.synchronize(everyone).sum().item()]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (branches, [0.0, 1.5, 3.0]),
        (roots_in_turn, [3.0, 6.0, 3.0, 6.0]),
        (one_rank_first_from_elsewhere, 31.5 + 2700.0),
        (names_in_two_orders, [3.0, 60.0]),
        (kinds_in_two_orders, [3.0, 120.0]),
    ],
)
def test_ranks_may_call_from_lines_of_their_own(body: Callable[[int], Any], expected: Any) -> None:
    assert accepted(body) == [expected, expected]


def test_a_mismatch_of_calls_without_a_name_says_where_they_were_made() -> None:
    def body(rank: int) -> None:
        if rank == 0:
            hvd.allreduce(A)
        else:
            hvd.allreduce(torch.zeros(5))

    line = body.__code__.co_firstlineno
    for message in refused(body):
        assert message == (
            "tensor 'allreduce.noname.1': mismatched shape: rank 0 submitted shape (3,) float32, rank 1 submitted "
            "shape (5,) float32. Calls without a name belong together by their order: rank 0 called from "
            f"test_unnamed_order.py:{line + 2} in body, rank 1 called from test_unnamed_order.py:{line + 4} in body. "
            "Pass name=."
        )


def installed_in(folder: str, lines: str) -> call_sites.Caller:
    """Who calls, from a module in ``folder``."""
    path = f"{folder}/train.py"
    linecache.cache[path] = (len(lines), None, lines.splitlines(keepends=True), path)
    namespace: dict[str, Any] = {"caller": call_sites.caller}
    exec(compile(lines, path, "exec"), namespace)
    return namespace["found"]


def test_the_hash_of_a_caller_depends_on_the_text_of_calls_and_not_on_where_files_lie() -> None:
    modules = [
        ("/opt/one", "found = caller()\n"),
        ("/opt/two", "found = caller()\n"),
        ("/opt/one/more", "\n\nfound =  caller( )\n"),
        ("/opt/three", "found = caller(*())\n"),
    ]
    one, elsewhere, further, other = [installed_in(folder, lines) for folder, lines in modules]
    assert one == elsewhere and one.line == "train.py:1 in <module>"
    assert further.digest == one.digest and further.line == "train.py:3 in <module>"
    assert other.digest != one.digest


def test_who_calls_is_not_looked_up_for_what_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> call_sites.Caller:
        raise AssertionError("looked up")

    monkeypatch.setattr("ocomm.operations.caller", fail)
    accepted(lambda rank: [hvd.allreduce(A, name="a") for _ in range(3)] and None)


def test_a_circle_of_calls_is_found_and_a_path_is_not() -> None:
    def requests(name: str, *lines: int) -> list[Request]:
        return [Request(Kind.ALLREDUCE, name, shape=(3,), digest=line) for line in lines]

    order = CallOrder()
    for number, (one, other) in enumerate([(9, 1), (1, 2), (2, 3), (7, 8), (7, 8)], 1):
        order.note(requests(str(number), one, other))
        assert order.crossed(requests(str(number), one, other)) is None
    circle = requests("6", 3, 1)
    order.note(circle)
    assert order.crossed(circle) == ((0, 1), ["2", "3"])
    assert order.crossed(requests("7", 1, 2)) == ((0, 1), ["3", "6"])
    assert order.crossed(requests("8", 7, 8)) is None
