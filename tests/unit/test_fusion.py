"""Laws of fusion: nothing is lost, nothing is too large, nothing unlike meets."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ocomm.negotiation.fusion import fuse
from ocomm.negotiation.request import Kind, Request
from ocomm.types import DType, ReduceOp


def allreduce(name: str, nbytes: int, dtype: DType = DType.UINT8, op: ReduceOp = ReduceOp.SUM) -> Request:
    return Request(Kind.ALLREDUCE, name, dtype, (nbytes // dtype.itemsize,), op)


@st.composite
def ready_lists(draw: st.DrawFn) -> list[Request]:
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 300),
                st.sampled_from([DType.UINT8, DType.FLOAT32]),
                st.sampled_from([ReduceOp.SUM, ReduceOp.MAX]),
                st.booleans(),
            ),
            max_size=25,
        )
    )
    return [
        allreduce(str(i), nbytes, dtype, op) if fusable else Request(Kind.BROADCAST, str(i), dtype, (nbytes,))
        for i, (nbytes, dtype, op, fusable) in enumerate(rows)
    ]


@given(ready_lists(), st.integers(0, 800))
def test_every_tensor_is_in_one_group_and_a_group_is_alike_in_order_and_within_the_threshold(
    ready: list[Request], threshold: int
) -> None:
    groups = fuse(ready, threshold)
    assert sorted(r.name for group in groups for r in group) == sorted(r.name for r in ready)
    assert [group[0] for group in groups] == sorted((group[0] for group in groups), key=ready.index)
    for group in groups:
        assert len({(r.kind, r.dtype, r.op, r.prescale, r.postscale) for r in group}) == 1
        assert group == sorted(group, key=ready.index)
        if len(group) > 1:
            assert group[0].kind == Kind.ALLREDUCE
            assert sum(r.nbytes for r in group) <= threshold


@given(ready_lists())
def test_without_a_threshold_nothing_fuses(ready: list[Request]) -> None:
    assert fuse(ready, 0) == [[request] for request in ready]


def test_look_ahead_passes_over_what_does_not_fit() -> None:
    ready = [allreduce("a", 40), allreduce("b", 8, DType.FLOAT32), allreduce("c", 40), allreduce("d", 40)]
    assert [[r.name for r in group] for group in fuse(ready, 100)] == [["a", "c"], ["b"], ["d"]]


def test_a_tensor_above_the_threshold_goes_alone() -> None:
    ready = [allreduce("small", 10), allreduce("large", 500), allreduce("next", 10)]
    assert [[r.name for r in group] for group in fuse(ready, 100)] == [["small"], ["large"], ["next"]]


def test_groups_may_be_kept_apart_and_adasum_is_never_fused() -> None:
    ready = [replace(allreduce(f"{k}", 8), group=f"g{k % 2}", group_size=2) for k in range(4)]
    assert [[r.name for r in group] for group in fuse(ready, 1000)] == [["0", "1", "2", "3"]]
    assert [[r.name for r in group] for group in fuse(ready, 1000, across_groups=False)] == [["0", "2"], ["1", "3"]]
    adasum = [allreduce(f"{k}", 8, op=ReduceOp.ADASUM) for k in range(2)]
    assert [len(group) for group in fuse(adasum, 1000)] == [1, 1]


def test_what_fills_the_threshold_exactly_is_one_group_and_a_byte_more_is_not() -> None:
    ready = [allreduce("a", 60), allreduce("b", 40)]
    assert fuse(ready, 100) == [ready]
    assert fuse(ready, 99) == [[request] for request in ready]
