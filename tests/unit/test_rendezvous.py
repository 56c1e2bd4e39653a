"""Ranks meet in a store, or hear who has not come, and why there is no job."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest

from ocomm.errors import LaunchError
from ocomm.runtime import rendezvous
from ocomm.runtime.rendezvous import Member, disagreement, meet


class DictStore:
    """What a c10d Store does for ranks that are threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self._values[key] = b"%d" % (int(self._values.get(key, b"0")) + amount)
            return int(self._values[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


def member(rank: int, **changes: str) -> Member:
    return Member(
        **{"rank": rank, "host": "h", "node": "n", "version": "1", "library": "MPICH 5.0.2", "size": "2", **changes}
    )


def met(
    members: list[Member],
    size: int,
    timeout_s: float,
    begin: Callable[..., Any] = lambda them: {"ranks": len(them)},
    store: DictStore | None = None,
    outlives_jobs: bool = False,
) -> list[Any]:
    """What each of these ranks gets, an answer or an error."""
    shared = store or DictStore()

    def one(mine: Member) -> Any:
        try:
            return meet(shared, mine, size, timeout_s, begin, outlives_jobs=outlives_jobs)
        except LaunchError as error:
            return str(error)

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, members))


def test_all_ranks_hear_what_rank_0_has_begun() -> None:
    seen: list[list[int]] = []

    def begin(them: list[Member]) -> dict[str, str]:
        seen.append([each.rank for each in them])
        return {"name": "x"}

    assert met([member(rank) for rank in (2, 0, 1)], 3, 60.0, begin) == [{"name": "x"}] * 3
    assert seen == [[0, 1, 2]]


def test_a_rank_that_does_not_come_is_named_on_all_others() -> None:
    began_s = time.monotonic()
    said = met([member(0), member(2)], 3, 0.2)
    assert time.monotonic() - began_s < 60.0
    assert len(set(said)) == 1, "rank 0 says it for all"
    assert "after 0.2 s ranks [1] have not come to init()" in said[0]


def test_without_rank_0_the_others_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ocomm.runtime.rendezvous._HEAR_S", 0.1)
    for said in met([member(1), member(2)], 3, 0.2):
        assert "ranks [0] have not come to init()" in said


def test_what_rank_0_cannot_begin_is_raised_everywhere() -> None:
    def begin(them: list[Member]) -> dict[str, str]:
        raise LaunchError("the service has not started")

    assert met([member(0), member(1)], 2, 60.0, begin) == ["the service has not started"] * 2


def test_any_error_of_rank_0_is_heard_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_HEAR_S", 0.0)  # nobody listens
    store = DictStore()
    store.set("ocomm/1/member/1", json.dumps({"rank": 1, "host": "h", "version": "2", "unheard_of": 1}))
    with pytest.raises(LaunchError, match="version"):
        meet(store, member(0), 2, 60.0, lambda them: {})
    assert "version" in json.loads(store.get("ocomm/1/said"))["error"]
    store = DictStore()
    store.set("ocomm/1/member/1", json.dumps(asdict(member(1))))

    def begin(them: list[Member]) -> dict[str, str]:
        raise OSError("no port")

    with pytest.raises(LaunchError, match="no port"):
        meet(store, member(0), 2, 60.0, begin)
    assert json.loads(store.get("ocomm/1/said"))["error"] == "rank 0 cannot start the job: OSError: no port"


def test_two_processes_with_one_number_are_told() -> None:
    said = met([member(0), member(1), member(1)], 2, 60.0)
    assert sum("two processes have RANK=1" in str(each) for each in said) == 1


class TestInAStoreThatOutlivesJobs:
    """torchrun's agents keep their store when they start the ranks again."""

    def test_ranks_meet_again_whatever_each_of_them_did_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Runs in which all have met, rank 0 has not come, or another rank has not."""
        monkeypatch.setattr(rendezvous, "_HEAR_S", 0.1)
        store = DictStore()
        runs: list[tuple[list[int], bool]] = [([0, 1, 2], True), ([1, 2], False), ([0, 1, 2], True), ([0, 2], False)]
        for number, (ranks, all_come) in enumerate([*runs, ([0, 1, 2], True)]):
            begin = lambda them, number=number: {"run": number}  # noqa: E731
            got = met([member(rank) for rank in ranks], 3, 60.0 if all_come else 0.2, begin, store, outlives_jobs=True)
            assert got == [{"run": number}] * 3 if all_come else all("have not come" in each for each in got)

    def test_ranks_that_come_before_rank_0_wait_for_its_meeting(self) -> None:
        store = DictStore()
        assert met([member(rank) for rank in range(3)], 3, 60.0, store=store, outlives_jobs=True) == [{"ranks": 3}] * 3
        late = threading.Event()

        class Slow(DictStore):
            def add(self, key: str, amount: int) -> int:
                if key == "ocomm/led" and amount == 1:
                    late.wait(60.0)  # until the others stand in the old meeting
                return store.add(key, amount)

            def check(self, keys: list[str]) -> bool:
                if store.add("ocomm/1/count/1", 0) == store.add("ocomm/1/count/2", 0) == 2:
                    late.set()
                return store.check(keys)

            set, get = staticmethod(store.set), staticmethod(store.get)  # type: ignore[assignment]

        got = met([member(rank) for rank in range(3)], 3, 60.0, lambda them: {"run": 2}, Slow(), outlives_jobs=True)
        assert late.is_set() and got == [{"run": 2}] * 3

    def test_a_smaller_world_meets_there_too(self) -> None:
        store = DictStore()
        for size in (3, 2, 3):
            got = met([member(rank) for rank in range(size)], size, 60.0, store=store, outlives_jobs=True)
            assert got == [{"ranks": size}] * size

    def test_two_processes_with_one_number_are_told_in_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rendezvous, "_HEAR_S", 0.1)
        said = met([member(0), member(1), member(1)], 2, 0.5, outlives_jobs=True)
        assert sum("two processes have RANK=1" in str(each) for each in said) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"problem": "there is no MPI."}, "ranks 1 (h): there is no MPI."),
        (
            {"size": "3"},
            "the ranks were told different numbers of ranks: 2 on ranks 0 (h); 3 on ranks 1 (h). Set WORLD_SIZE to the "
            "same number on all.",
        ),
        (
            {"version": "2"},
            "the ranks have different versions of ocomm: 1 on ranks 0 (h); 2 on ranks 1 (h). Type on all hosts: pip "
            "install the same version of ocomm.",
        ),
        (
            {"library": "MPICH 4.2.0", "host": "g"},
            "the ranks have different versions of MPI: MPICH 5.0.2 on ranks 0 (h); MPICH 4.2.0 on ranks 1 (g). Type on "
            "all hosts: pip install the same version of mpich.",
        ),
    ],
)
def test_ranks_that_cannot_start_together_are_named(changes: dict[str, str], said: str) -> None:
    assert disagreement([member(0), member(1, **changes)]) == said


def test_a_store_that_breaks_is_an_error_that_says_so() -> None:
    class Broken(DictStore):
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Connection reset by peer\nframes ...")

    with pytest.raises(LaunchError, match=r"rank 1: the store .* cannot be used any more: Connection reset by peer"):
        meet(Broken(), member(1), 2, 60.0, lambda them: {})
