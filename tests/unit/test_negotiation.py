"""The coordinator and the response cache: what all ranks are told to do, whatever order the announcements come in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.relays import Relays
from ocomm.negotiation.cache import RankCache
from ocomm.negotiation.coordinator import EQUAL_CALLS, JOIN_NAME, Coordinator, Stall, describe_stalls, find_mismatch
from ocomm.negotiation.request import (
    Fault,
    Kind,
    Reader,
    Request,
    Response,
    TensorMemory,
    Writer,
    read_request,
    read_responses,
    write_request,
    write_responses,
)
from ocomm.types import DType, ReduceOp

THRESHOLD = 1 << 20
JOIN = Request(Kind.JOIN, JOIN_NAME)
#: All ranks but the coordinator are its children, or the tree is binary.
DIRECT_PEERS = st.sampled_from([1, 63])


def allreduce(name: str, numel: int = 4, **changes: object) -> Request:
    return replace(Request(Kind.ALLREDUCE, name, DType.FLOAT32, (numel,)), **changes)  # type: ignore[arg-type]


class World:
    """A coordinator and the caches of all ranks, joined by messages in the real format, which travel along a tree if
    there are more ranks than ``direct_peers`` beside the coordinator.
    """

    def __init__(
        self, size: int, capacity: int = 16, ranks: Sequence[int] | None = None, direct_peers: int = 63
    ) -> None:
        self.coordinator = Coordinator(ranks or range(size), THRESHOLD, capacity)
        self.caches = [RankCache() for _ in range(size)]
        self.asked: list[dict[str, Request]] = [{} for _ in range(size)]
        self.sizes: list[int] = []
        self.tree = Relays(self.coordinator, size, direct_peers)

    def ask(self, rank: int, *requests: Request, now_s: float = 0.0) -> None:
        self.asked[rank].update({request.name: request for request in requests})
        message = self.caches[rank].announcement(requests)
        self.sizes.append(len(message))
        self.tree.announce(rank, message, now_s)

    def decide(self) -> list[Response]:
        self.tree.pass_all()
        responses = self.coordinator.decide()
        message = write_responses(tuple(responses))
        assert read_responses(message) == tuple(responses)
        self.tree.answer(responses, message)
        for rank, cache in enumerate(self.caches):
            cache.enter(self.coordinator.cache.epoch)
            for response in responses:
                numbers = response.cache_ids or (-1,) * len(response.names)
                for name, number in zip(response.names, numbers, strict=True):
                    request = self.asked[rank].pop(name, None)
                    if number >= 0:
                        assert request is not None
                        cache.learn(name, number, request)
        return responses

    def ask_all(self, *requests: Request) -> list[Response]:
        for rank in range(len(self.caches)):
            self.ask(rank, *requests)
        return self.decide()


def test_a_tensor_is_ready_when_every_rank_has_asked() -> None:
    world = World(2)
    world.ask(0, allreduce("a"))
    assert world.decide() == []
    world.ask(1, allreduce("a"))
    assert [response.names for response in world.decide()] == [("a",)]
    assert world.decide() == []


def test_a_request_survives_the_wire() -> None:
    request = Request(
        Kind.ALLTOALL,
        "näme",
        DType.BFLOAT16,
        (3, 0, 7),
        ReduceOp.MAX,
        2,
        0.5,
        3.0,
        (1, 2, 0),
        "keras",
        "g",
        2,
        2**63,
        "d",
        TensorMemory.BRIDGED,
    )
    writer = Writer()
    write_request(writer, request)
    assert read_request(Reader(writer.bytes())) == request


def test_the_third_announcement_of_a_tensor_is_one_bit() -> None:
    world = World(2)
    for _ in range(4):
        world.ask_all(allreduce("a"))
    assert world.sizes[:4] == world.sizes[:1] * 4  # in full until the coordinator has given it an id
    assert world.sizes[4:] == [13] * 4
    assert world.coordinator.cache.hits == 4


def test_a_changed_request_travels_in_full_and_is_remembered() -> None:
    world = World(2)
    for _ in range(3):
        world.ask_all(allreduce("a", 4))
    world.sizes.clear()
    for _ in range(2):
        world.ask_all(allreduce("a", 5))
    assert world.sizes[0] == world.sizes[1] > 13
    assert world.sizes[2:] == [13, 13]


def test_a_rank_that_changes_a_cached_request_alone_is_a_mismatch() -> None:
    world = World(2)
    for _ in range(3):
        world.ask_all(allreduce("a", 4))
    world.ask(0, allreduce("a", 4))
    world.ask(1, allreduce("a", 5))
    (response,) = world.decide()
    assert response.error == (
        "tensor 'a': mismatched shape: rank 0 submitted shape (4,) float32, rank 1 submitted shape (5,) float32."
    )


def test_ids_that_were_given_before_a_new_epoch_began_are_void() -> None:
    world = World(2, capacity=2)
    requests = [allreduce(name) for name in "abcde"]
    for _ in range(3):  # the ids run out in the middle of a decision, every time
        world.ask_all(*requests)
        for cache in world.caches:
            assert cache.epoch == world.coordinator.cache.epoch
    assert world.coordinator.cache.epoch > 0


@settings(max_examples=60)
@given(st.data())
def test_any_interleaving_of_announcements_answers_every_name_once_and_equally_on_all_ranks(
    data: st.DataObject,
) -> None:
    size = data.draw(st.integers(1, 7), "ranks")
    world = World(size, capacity=data.draw(st.integers(0, 4), "capacity"), direct_peers=data.draw(DIRECT_PEERS))
    names = "abcdefg"[: data.draw(st.integers(1, 7), "names")]
    for step in range(3):
        left = {rank: data.draw(st.permutations(names), f"order of {rank}") for rank in range(size)}
        answered: list[str] = []
        while any(left.values()):
            rank = data.draw(st.sampled_from([r for r in left if left[r]]), "who")
            count = data.draw(st.integers(1, len(left[rank])), "how many")
            world.ask(rank, *(allreduce(name, 4 + step // 2) for name in left[rank][:count]))
            left[rank] = left[rank][count:]
            for response in world.decide():
                assert response.fault == Fault.NONE, response.error
                answered += response.names
        assert sorted(answered) == sorted(names)
        assert not any(world.asked)


GROUPED = {"f": ("g", 2), "g": ("g", 2), "h": ("h", 3), "i": ("h", 3), "j": ("h", 3)}


@settings(max_examples=100)
@given(st.data())
def test_ids_change_nothing_but_the_length_of_messages(data: st.DataObject) -> None:
    """Whatever ranks ask for, and whenever somebody looks: the answers are those of a coordinator without ids. So they
    are if announcements travel along a tree.
    """
    size = data.draw(st.integers(1, 7), "ranks")
    with_ids = World(size, capacity=data.draw(st.integers(1, 12), "capacity"), direct_peers=data.draw(DIRECT_PEERS))
    without = World(size, capacity=0)
    open_names: list[set[str]] = [set() for _ in range(size)]
    joined: set[int] = set()
    now = 0.0
    versions = dict.fromkeys("abcdefghij", 4)
    for _ in range(data.draw(st.integers(1, 25), "steps")):
        now += 1
        match data.draw(st.sampled_from(["all", "all", "some", "some", "change", "look", "join"]), "what"):
            case "all":  # an ordinary step
                for rank in set(range(size)) - joined:
                    names = [name for name in versions if name not in open_names[rank]]
                    open_names[rank].update(names)
                    for world in (with_ids, without):
                        world.ask(rank, *(_member(name, versions[name]) for name in names), now_s=now)
            case "some":
                rank = data.draw(st.integers(0, size - 1), "rank")
                names = data.draw(st.lists(st.sampled_from(sorted(versions)), unique=True), "names")
                names = [name for name in names if rank not in joined and name not in open_names[rank]]
                odd = data.draw(st.sampled_from(["", "", "", *names]), "odd")
                open_names[rank].update(names)
                for world in (with_ids, without):
                    requests = [_member(name, versions[name] + (name == odd)) for name in names]
                    world.ask(rank, *requests, now_s=now)
            case "change":
                versions[data.draw(st.sampled_from(sorted(versions)), "changed")] += 10
            case "look":
                assert _seen(with_ids, now) == _seen(without, now)
            case "join":
                rank = data.draw(st.integers(0, size - 1), "rank")
                if rank not in joined and not open_names[rank]:
                    joined.add(rank)
                    for world in (with_ids, without):
                        world.ask(rank, JOIN, now_s=now)
        answers = []
        for world in (with_ids, without):
            responses = world.decide()
            told = [(r.kind, name, r.fault) for r in responses for name in r.names or ("",)]
            answers.append((sorted(told), [r.sizes for r in responses if r.kind == Kind.JOIN]))
            for response in responses:
                for names in open_names:
                    names.difference_update(response.names)
                if JOIN_NAME in response.names:
                    joined.clear()
        assert answers[0] == answers[1]
    assert _seen(with_ids, now) == _seen(without, now)


def _member(name: str, numel: int) -> Request:
    group, group_size = GROUPED.get(name, ("", 0))
    return allreduce(name, numel, group=group, group_size=group_size)


def _seen(world: World, now: float) -> list[Stall]:
    world.tree.pass_all()
    return sorted(world.coordinator.stalled(now, 0.0), key=lambda stall: stall.name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": Kind.BROADCAST}, "mismatched operation: ranks 0, 2 submitted allreduce, rank 1 submitted broadcast."
         " Give different operations different names."),
        ({"dtype": DType.FLOAT16}, "mismatched dtype: ranks 0, 2 submitted float32, rank 1 submitted float16."),
        ({"shape": (2, 2)}, "mismatched shape: ranks 0, 2 submitted shape (4,) float32,"
         " rank 1 submitted shape (2, 2) float32."),
        ({"order": "keras"}, "mismatched element order: ranks 0, 2 submitted torch, rank 1 submitted keras."),
        ({"op": ReduceOp.MAX}, "mismatched reduction: ranks 0, 2 submitted Sum, rank 1 submitted Max."),
        ({"prescale": 0.5}, "mismatched prescale and postscale: ranks 0, 2 submitted (1.0, 1.0),"
         " rank 1 submitted (0.5, 1.0)."),
        ({"group": "g", "group_size": 2}, "mismatched group: ranks 0, 2 submitted none, rank 1 submitted 'g' of 2."),
    ],
)  # fmt: skip
def test_a_disagreement_names_the_tensor_the_ranks_and_both_values(change: dict, message: str) -> None:
    world = World(3)
    for rank in range(3):
        world.ask(rank, allreduce("w", **(change if rank == 1 else {})))
    (response,) = world.decide()
    assert (response.fault, response.names, response.error) == (Fault.MISMATCH, ("w",), f"tensor 'w': {message}")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(Kind.BROADCAST, "b", DType.FLOAT32, (4,), root=2), "there is no root rank 2 in a set of 2 ranks."),
        (Request(Kind.ALLGATHER, "b", DType.FLOAT32),
         "allgather needs at least one dimension; reshape it to (1,)."),
        (Request(Kind.REDUCESCATTER, "b", DType.FLOAT32, (4,), ReduceOp.MAX),
         "reducescatter supports Sum and Average, not Max."),
        (Request(Kind.ALLTOALL, "b", DType.FLOAT32, (4,), splits=(1, 2)),
         "rank 0 submitted splits (1, 2) for 4 rows;"
         " they must be 2 counts, one for each rank, that add up to the rows."),
        (Request(Kind.ALLTOALL, "b", DType.FLOAT32, (4,), splits=(4,)),
         "rank 0 submitted splits (4,) for 4 rows;"
         " they must be 2 counts, one for each rank, that add up to the rows."),
    ],
)  # fmt: skip
def test_what_no_rank_can_do_is_said_to_all(request_: Request, message: str) -> None:
    assert find_mismatch([request_, request_], (0, 1)) == f"tensor 'b': {message}"


def test_a_message_has_one_destination() -> None:
    one, other = (Request(Kind.MESSAGE, "m", DType.FLOAT32, (4,), root=0, splits=(peer,)) for peer in (1, 2))
    assert find_mismatch([one, one, None], (0, 1, 2)) == ""
    assert "destination" in find_mismatch([one, other, None], (0, 1, 2))


def test_sizes_of_ragged_operations_are_told_to_all() -> None:
    world = World(2)
    for rank in range(2):
        gather = Request(Kind.ALLGATHER, "g", DType.FLOAT32, (rank + 3, 2))
        exchange = Request(Kind.ALLTOALL, "x", DType.FLOAT32, (3,), splits=(rank, 3 - rank))
        world.ask(rank, gather, exchange)
    assert [(r.names, r.sizes) for r in world.decide()] == [(("g",), ((3, 4),)), (("x",), ((0, 3, 1, 2),))]


def test_a_group_becomes_ready_together() -> None:
    world = World(2)
    a, b = (allreduce(name, group="g", group_size=2) for name in "ab")
    world.ask(0, a, b)
    world.ask(1, a)
    assert world.decide() == []
    world.ask(1, b)
    assert [response.names for response in world.decide()] == [("a", "b")]


def grouped(*names: str, numel: int = 4) -> list[Request]:
    return [allreduce(name, numel, group="g", group_size=2) for name in names]


def test_a_group_that_is_looked_at_half_way_becomes_ready_together() -> None:
    world = World(2)
    for _ in range(3):
        world.ask_all(*grouped("a", "b"))
    world.ask(0, *grouped("a"))
    assert [stall.name for stall in world.coordinator.stalled(1.0, 0.0)] == ["a"]
    world.ask(0, *grouped("b"))
    world.ask(1, *grouped("b", "a"))
    assert [sorted(response.names) for response in world.decide()] == [["a", "b"]]


def test_a_group_of_which_one_tensor_has_changed_fails_as_a_whole() -> None:
    world = World(2)
    for _ in range(3):
        world.ask_all(*grouped("a", "b"))
    world.ask(0, *grouped("a", "b"))
    world.ask(1, *grouped("b"))
    assert world.decide() == []
    world.ask(1, *grouped("a", numel=5))
    assert [(response.names, response.fault) for response in world.decide()] == [
        (("a",), Fault.MISMATCH),
        (("b",), Fault.MISMATCH),
    ]


def test_a_group_of_the_same_name_does_not_keep_another_waiting() -> None:
    world = World(2)
    for _ in range(3):
        world.ask_all(*grouped("a", "b"))
    world.ask(0, *grouped("a", "b"))
    for _ in range(2):
        assert [response.names for response in world.ask_all(*grouped("c", "d"))] == [("c", "d")]
    world.ask(1, *grouped("a", "b"))
    assert [sorted(response.names) for response in world.decide()] == [["a", "b"]]
    assert [sorted(response.names) for response in world.ask_all(*grouped("a", "b"))] == [["a", "b"]]


def test_a_group_with_a_mismatch_fails_as_a_whole() -> None:
    world = World(2)
    a, b = (allreduce(name, group="g", group_size=2) for name in "ab")
    world.ask(0, a, b)
    world.ask(1, a, replace(b, dtype=DType.FLOAT64))
    mismatch = "tensor 'b': mismatched dtype: rank 0 submitted float32, rank 1 submitted float64."
    assert [(r.names, r.error) for r in world.decide()] == [
        (("b",), mismatch),
        (("a",), f"tensor 'a': its group 'g' cannot go on: {mismatch}"),
    ]


def test_a_group_that_waits_for_a_rank_which_left_fails_as_a_whole() -> None:
    world = World(2)
    a, b = (allreduce(name, group="g", group_size=2) for name in "ab")
    world.ask(0, a, b)
    world.ask(1, a)
    world.coordinator.remove(1, "has shut down")
    assert [(r.names, r.fault, r.error) for r in world.decide()] == [
        (("b",), Fault.LEFT, f"tensor 'b': rank 1 has shut down. {EQUAL_CALLS}"),
        (
            ("a",),
            Fault.LEFT,
            f"tensor 'a': its group 'g' cannot go on: tensor 'b': rank 1 has shut down. {EQUAL_CALLS}",
        ),
    ]


def test_ranks_that_disagree_on_the_group_do_not_wait_for_its_other_members() -> None:
    world = World(2)
    world.ask(0, allreduce("a", group="g", group_size=2))
    world.ask(1, allreduce("a", group="g", group_size=3))
    (response,) = world.decide()
    assert response.error == "tensor 'a': mismatched group: rank 0 submitted 'g' of 2, rank 1 submitted 'g' of 3."


def test_what_comes_after_a_rank_has_left_fails_too() -> None:
    world = World(2)
    world.coordinator.remove(1, "raised ValueError: no data")
    world.ask(0, allreduce("late"))
    (response,) = world.decide()
    assert (response.fault, response.error) == (Fault.LEFT, "tensor 'late': rank 1 raised ValueError: no data.")


def test_a_stall_says_who_waits_for_whom_and_for_what_instead() -> None:
    world = World(3, ranks=(4, 5, 7))  # a process set: people read world ranks
    world.ask(0, allreduce("a"), now_s=10.0)
    world.ask(1, allreduce("a"), now_s=12.0)
    world.ask(2, *(allreduce(name) for name in ("b", "c", "d", "e")), now_s=30.0)
    assert world.coordinator.stalled(69.0, 60.0) == []
    (stall,) = world.coordinator.stalled(71.0, 60.0)
    assert stall == Stall("a", 61.0, (4, 5), (7,))
    assert describe_stalls([stall], world.coordinator) == (
        "tensor 'a': ranks 4, 5 submitted it 61 s ago, rank 7 did not."
        " rank 7 waits for 'b', 'c', 'd' and 1 more instead."
    )
    (response,) = world.coordinator.fail_stalled([stall])
    assert (response.fault, response.names) == (Fault.STALL, ("a",))
    assert world.coordinator.stalled(75.0, 60.0) == []


def test_giving_up_on_two_members_of_one_group_fails_each_once() -> None:
    world = World(2)
    world.ask(0, *(allreduce(name, group="g", group_size=2) for name in "ab"))
    responses = world.coordinator.fail_stalled(world.coordinator.stalled(100.0, 60.0))
    assert sorted(response.names for response in responses) == [("a",), ("b",)]


def test_a_rank_that_has_joined_counts_as_ready_for_what_others_ask_before_and_after() -> None:
    world = World(3)
    world.ask(0, allreduce("before"))
    world.ask(1, allreduce("before"))
    world.ask(2, JOIN)
    news, before = world.decide()
    assert (news.kind, news.names, news.sizes) == (Kind.JOIN, (), ((2,),))
    assert (before.names, before.templates) == (("before",), (allreduce("before"),))
    world.ask(0, allreduce("after"))
    assert world.decide() == [] and world.coordinator.stalled(99.0, 1.0)[0].missing == (1,)
    world.ask(1, allreduce("after"))
    assert [r.names for r in world.decide()] == [("after",)]
    world.ask(1, JOIN)
    world.ask(0, JOIN)
    responses = world.decide()
    assert [r.names for r in responses] == [(), (), (JOIN_NAME,)] and responses[-1].sizes == ((0,),)
    world.ask(0, allreduce("again"))
    world.ask(1, allreduce("again"))
    assert world.decide() == []  # all are back, so all must ask


def test_names_that_ranks_know_by_number_stay_right_while_one_has_joined() -> None:
    world = World(2)
    for _ in range(3):
        world.ask_all(allreduce("a", 4))
    world.ask(1, JOIN)
    world.ask(0, allreduce("a", 4))
    _, response = world.decide()
    assert response.cache_ids == (-1,) and response.templates == (allreduce("a", 4),)
    world.ask(0, allreduce("a", 7))
    assert world.decide()[0].templates == (allreduce("a", 7),)
    world.ask(0, JOIN)
    world.decide()
    assert [r.error for r in world.ask_all(allreduce("a", 7))] == [""]
    assert [r.templates for r in world.ask_all(allreduce("a", 7))] == [()]


@given(st.lists(st.tuples(*[st.sampled_from(TensorMemory)] * 3), min_size=1, max_size=8), st.booleans())
@settings(max_examples=60)
def test_tensors_are_bridged_where_all_ranks_have_them_on_devices_and_one_bridge_is_asked_for(
    steps: list[tuple[TensorMemory, TensorMemory, TensorMemory]], joins: bool
) -> None:
    """Also of names that ranks know by number."""
    world = World(3)
    asked_for = 0
    for memories in steps:
        for rank, memory in enumerate(memories):
            world.ask(rank, allreduce("a", memory=memory), allreduce("b"))
        answers = world.decide()
        bridges = [response for response in answers if response.kind == Kind.BRIDGE]
        helps = not asked_for and TensorMemory.HOST not in memories and set(memories) != {TensorMemory.BRIDGED}
        assert bridges == [Response(Kind.BRIDGE, ())] * helps
        asked_for += len(bridges)
        bridged = {name: response.bridged for response in answers for name in response.names}
        assert bridged == {"a": set(memories) == {TensorMemory.BRIDGED}, "b": False}
        # What goes different ways does not fuse.
        assert not bridged["a"] or all(len(response.names) < 2 for response in answers)
    if joins:
        world.ask(0, JOIN)
        world.ask(1, allreduce("a", memory=TensorMemory.BRIDGED))
        world.ask(2, allreduce("a", memory=TensorMemory.BRIDGED))
        (answer,) = [response for response in world.decide() if response.kind == Kind.ALLREDUCE]
        assert not answer.bridged and [template.memory for template in answer.templates] == [TensorMemory.HOST]


@pytest.mark.parametrize(
    ("segments", "is_empty"), [((5, 5, 5), 1), ((0, 0, 0), 1), ((5, 4, 5), 0), ((-1, 5, 5), 0), ((-1, -1, -1), 0)]
)
def test_a_channel_is_closed_once_all_have_released_it_and_freed_if_all_ran_the_same(
    segments: tuple[int, ...], is_empty: int
) -> None:
    world = World(3)
    for rank, count in zip((2, 0), segments, strict=False):
        world.coordinator.release(rank, 7, count)
        assert world.decide() == []
    world.coordinator.release(1, 7, segments[2])
    assert world.decide() == [Response(Kind.CLOSE, (), sizes=((7, is_empty),))]
    assert world.decide() == []
