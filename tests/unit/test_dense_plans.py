"""The plans of the dense collectives, run for all ranks at once by a toy, give what NumPy gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ocomm.collectives import dense
from ocomm.collectives.plan import Copy, CopyIn, CopyOut, Loop, Plan
from ocomm.collectives.scratch import aligned
from ocomm.kernels.base import Bytes
from ocomm.kernels.reference import ReferenceKernels
from ocomm.types import DType, Nodes, ReduceOp

SEGMENT = 256 * 1024
SIZES = [1, 2, 3, 4, 5]
#: Elements: nothing, fewer than ranks, odd, around the small limit, several segments with an odd end.
NUMELS = [0, 1, 3, 1025, dense.SMALL_NBYTES // 4, dense.SMALL_NBYTES // 4 + 1, 100_003, 300_001]


def execute(plans: Sequence[Plan]) -> None:
    """All ranks in lockstep, one stage after the other; messages are copied when they are sent."""
    kernels = ReferenceKernels()
    assert len({tuple(len(stages) for stages in plan.segments) for plan in plans}) == 1, "one shape on all ranks"
    for number in range(len(plans[0].segments)):
        for stage in range(len(plans[0].segments[number])):
            mail: dict[tuple[int, int], list[Bytes]] = {}
            for rank, plan in enumerate(plans):
                for c in plan.segments[number][stage].compute:
                    if isinstance(c, Copy):
                        c.destination[:] = c.source
                    elif isinstance(c, CopyIn):
                        c.destination[:] = np.concatenate(c.sources)
                    elif isinstance(c, CopyOut):
                        parts = np.split(c.source, np.cumsum(c.nbytes)[:-1])
                        for part, destination in zip(parts, c.destinations, strict=True):
                            destination[:] = part
                    else:
                        assert isinstance(c, Loop)
                        c.run(kernels)
                for message in plan.segments[number][stage].sends:
                    mail.setdefault((rank, message.peer), []).append(message.buffer.copy())
            for rank, plan in enumerate(plans):
                for message in plan.segments[number][stage].receives:
                    message.buffer[:] = mail[message.peer, rank].pop(0)
            assert not any(mail.values()), "a message that nobody received"


def contexts(size: int, hosts: str = "") -> list[dense.Context]:
    """``hosts``: a letter per rank; ranks with the same one share a node."""
    nodes = Nodes.of_hosts(hosts) if hosts else Nodes.flat(size)
    return [dense.Context(rank, size, SEGMENT, aligned, nodes) for rank in range(size)]


def raw(array: np.ndarray) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def allreduce(
    context: dense.Context,
    sources: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    op: ReduceOp,
    scale: float = 1.0,
) -> Plan:
    dtype = DType.from_numpy(sources[0].dtype)
    nbytes = [source.nbytes for source in sources]
    return dense.allreduce(context, [*map(raw, sources)], [*map(raw, results)], nbytes, dtype, op, scale)


def inputs(size: int, numel: int) -> list[np.ndarray]:
    rng = np.random.default_rng(numel + size)
    return [rng.normal(size=numel).astype(np.float32) for _ in range(size)]


def rank_order_sum(arrays: Sequence[np.ndarray]) -> np.ndarray:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("size", SIZES)
def test_allreduce_is_the_sum_in_rank_order(size: int, numel: int, in_place: bool) -> None:
    given = inputs(size, numel)
    expected = rank_order_sum(given)
    sources = [array.copy() for array in given]
    results = sources if in_place else [np.full_like(array, np.nan) for array in given]
    plans = [
        allreduce(context, [source], [result], ReduceOp.SUM)
        for context, source, result in zip(contexts(size), sources, results, strict=True)
    ]
    execute(plans)
    for result in results:
        assert result.tobytes() == expected.tobytes()
    nbytes = 4 * numel
    sent = [plan.bytes_sent for plan in plans]
    if nbytes <= dense.SMALL_NBYTES:
        assert sent == [(size - 1) * nbytes] * size
    else:
        assert sum(sent) == 2 * (size - 1) * nbytes
        padding = len(plans[0].segments) * dense.ALIGNMENT * size
        assert max(sent) <= 2 * (size - 1) / size * nbytes + 2 * padding


@pytest.mark.parametrize(("nbytes", "size", "messages"), [(2_359_296, 2, 6), (2_359_296, 4, 18), (500_000, 4, 6)])
def test_messages_are_worth_what_each_costs(nbytes: int, size: int, messages: int) -> None:
    plan = dense.Context(0, size, 4 << 20, aligned, Nodes.flat(size))
    tensor = np.zeros(nbytes // 4, np.float32)
    assert allreduce(plan, [tensor], [tensor], ReduceOp.SUM).messages_sent == messages


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaab", "aabcc", "aaabbb", "aabbcc"])
def test_nodes_add_up_before_they_speak_to_each_other(hosts: str, numel: int, in_place: bool) -> None:
    """The average: sums in the order of ranks times nodes/n, their sum in the order of nodes times 1/nodes."""
    size, nodes = len(hosts), Nodes.of_hosts(hosts)
    count = len(nodes.members)
    given = inputs(size, numel)
    weight = np.float32(count / size)
    sums = [rank_order_sum([given[rank] for rank in node]) * weight for node in nodes.members]
    expected = rank_order_sum(sums) * np.float32(1 / count)
    sources = [array.copy() for array in given]
    results = sources if in_place else [np.full_like(array, np.nan) for array in given]
    plans = [
        allreduce(context, [source], [result], ReduceOp.AVERAGE)
        for context, source, result in zip(contexts(size, hosts), sources, results, strict=True)
    ]
    execute(plans)
    for source, array, result in zip(sources, given, results, strict=True):
        assert result.tobytes() == expected.tobytes()
        assert in_place or source.tobytes() == array.tobytes()
    if 4 * numel > dense.SMALL_NBYTES:
        padding = len(plans[0].segments) * dense.ALIGNMENT * size
        for node in nodes.members:
            leaving = sum(plans[rank].bytes_sent_to(set(range(size)) - set(node)) for rank in node)
            assert leaving <= 2 * (count - 1) / count * 4 * numel + 2 * padding, "a ring's bytes, for the whole node"


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
def test_every_operation_gives_on_nodes_what_it_gives_flat(hosts: str, op: ReduceOp, dtype: str) -> None:
    size, rng = len(hosts), np.random.default_rng(0)
    given = [rng.integers(-6, 7, 10_001).astype(dtype) for _ in range(size)]
    outcomes = []
    for way in ("", hosts):
        results = [np.zeros_like(array) for array in given]
        plans = [
            allreduce(context, [array], [result], op, 0.5 if dtype[0] == "f" else 1)
            for context, array, result in zip(contexts(size, way), given, results, strict=True)
        ]
        execute(plans)
        assert len({result.tobytes() for result in results}) == 1
        outcomes.append(results[0])
    # Halves and quarters of small integers are exact in every order, products and thirds of them are not in float16.
    np.testing.assert_allclose(outcomes[1], outcomes[0], rtol=0 if dtype != "float16" else 2e-3, atol=0)


def test_the_average_of_large_values_overflows_in_no_node() -> None:
    given = [np.full(10_001, 60_000, np.float16) for _ in range(4)]
    plans = [
        allreduce(context, [array], [array], ReduceOp.AVERAGE)
        for context, array in zip(contexts(4, "aabb"), given, strict=True)
    ]
    execute(plans)
    assert all((array == 60_000).all() for array in given)


@pytest.mark.parametrize(("size", "hosts"), [*((size, "") for size in SIZES), (4, "aabb"), (5, "aaabb")])
def test_fusion_does_not_change_a_bit(size: int, hosts: str) -> None:
    numels = [1, 30_001, 0, 77, 50_000, 200_003, 2, 16_385]
    given = [inputs(size, numel) for numel in numels]
    results = [[np.full_like(array, np.nan) for array in arrays] for arrays in given]
    plans = [
        allreduce(context, [a[context.rank] for a in given], [r[context.rank] for r in results], ReduceOp.AVERAGE, 0.5)
        for context in contexts(size, hosts)
    ]
    execute(plans)
    for arrays, outcome in zip(given, results, strict=True):
        alone = [np.full_like(array, np.nan) for array in arrays]
        execute([allreduce(p, [arrays[p.rank]], [alone[p.rank]], ReduceOp.AVERAGE, 0.5) for p in contexts(size, hosts)])
        assert alone[0].tobytes() == outcome[0].tobytes()
        scaled = [array * np.float32(0.5) for array in arrays]
        for result in outcome:
            expected = np.sum(scaled, axis=0) / size if arrays[0].size else arrays[0]
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
            assert result.tobytes() == outcome[0].tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_allgather_puts_the_ranks_side_by_side(size: int) -> None:
    lengths = [[0, 7, SEGMENT // 2 + 3, 1, SEGMENT // 4 * 3][(rank + 1) % 5] for rank in range(size)]
    given = [np.full(n, rank, np.float32) for rank, n in enumerate(lengths)]
    results = [np.full(sum(lengths), np.nan, np.float32) for _ in range(size)]
    nbytes = [4 * n for n in lengths]
    plans = [dense.allgather(p, [(raw(given[p.rank]), raw(results[p.rank]), nbytes)]) for p in contexts(size)]
    execute(plans)
    for result in results:
        np.testing.assert_array_equal(result, np.concatenate(given))
    assert [plan.bytes_sent for plan in plans] == [(size - 1) * n for n in nbytes]


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("size", SIZES)
def test_broadcast_gives_everybody_what_the_root_has(size: int, numel: int) -> None:
    for root in {0, size - 1}:
        given = inputs(size, numel)
        results = [np.full_like(array, np.nan) for array in given]
        plans = [dense.broadcast(p, raw(given[p.rank]), raw(results[p.rank]), root) for p in contexts(size)]
        execute(plans)
        for result in results:
            np.testing.assert_array_equal(result, given[root])
        total = sum(plan.bytes_sent for plan in plans)
        if 4 * numel <= dense.SMALL_NBYTES or size == 2:
            assert total == plans[root].bytes_sent == (size - 1) * 4 * numel
        else:  # the root deals all but its own slice once, and passes that on; no rank sends the whole to everyone
            assert plans[root].bytes_sent <= 4 * numel * 2
            assert total <= (size + 1) * 4 * numel


@pytest.mark.parametrize("whole", [False, True], ids=["segments", "one segment"])
@pytest.mark.parametrize("size", SIZES)
def test_alltoall_transposes(size: int, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "WHOLE_NBYTES", 100_000)  # less than the largest part
    counts = [[(rank * 7 + peer * 3) % 5 * 17_001 for peer in range(size)] for rank in range(size)]
    given = [
        np.concatenate([np.full(counts[rank][peer], 10 * rank + peer, np.float32) for peer in range(size)])
        for rank in range(size)
    ]
    results = [np.full(sum(row[rank] for row in counts), np.nan, np.float32) for rank in range(size)]
    nbytes = [[4 * n for n in row] for row in counts]

    def known(rank: int) -> list[list[int]]:
        """What ``rank`` knows of the sizes if it knows its row and column alone."""
        return [[n if rank in (row, column) else 0 for column, n in enumerate(nbytes[row])] for row in range(size)]

    plans = [
        dense.alltoall(p, raw(given[p.rank]), raw(results[p.rank]), known(p.rank) if whole else nbytes, whole)
        for p in contexts(size)
    ]
    if whole:  # all pairs meet in one stage, also those with nothing to send: a rank that expects something hears of it
        for rank, plan in enumerate(plans):
            ((stage,),) = plan.segments
            assert {m.peer for m in stage.sends} == {m.peer for m in stage.receives} == {*range(size)} - {rank}
    execute(plans)
    for rank, result in enumerate(results):
        expected = [np.full(counts[peer][rank], 10 * peer + rank, np.float32) for peer in range(size)]
        np.testing.assert_array_equal(result, np.concatenate(expected))
        assert plans[rank].bytes_sent == sum(nbytes[rank]) - nbytes[rank][rank]


@pytest.mark.parametrize("rows", [0, 1, 3, 7, 100_003])
@pytest.mark.parametrize("size", SIZES)
def test_reducescatter_gives_each_rank_its_part_of_the_sum(size: int, rows: int) -> None:
    given = inputs(size, rows)
    shares = [rows // size + (rank < rows % size) for rank in range(size)]
    results = [np.full(share, np.nan, np.float32) for share in shares]
    nbytes = [4 * share for share in shares]
    plans = [
        dense.reducescatter(p, raw(given[p.rank]), raw(results[p.rank]), nbytes, DType.FLOAT32, ReduceOp.SUM)
        for p in contexts(size)
    ]
    execute(plans)
    assert np.concatenate(results).tobytes() == rank_order_sum(given).tobytes()
    assert [plan.bytes_sent for plan in plans] == [4 * rows - n for n in nbytes]


@pytest.mark.parametrize("build", [lambda context: dense.allgather(context, []), lambda context: Plan("nothing", [])])
def test_a_plan_without_work_has_an_end_to_reach(build: Callable[[dense.Context], Plan]) -> None:
    plan = build(dense.Context(0, 1, SEGMENT, aligned, Nodes.flat(1)))
    assert [len(stages) for stages in plan.segments] == [1]
    assert (plan.bytes_sent, plan.messages_sent) == (0, 0)
