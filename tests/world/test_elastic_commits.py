"""Elastic states go back to the newest commit that is intact, and a commit that somebody has planted runs nothing."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import ocomm
from ocomm import elastic
from ocomm.elastic.commits import Label
from ocomm.elastic.folder import Folder
from ocomm.errors import CheckpointError, PeerError
from ocomm.session import Session
from tests.tiers import few
from tests.worlds import MPI_SIZE, run_ranks

pytestmark = pytest.mark.skipif(MPI_SIZE > 0, reason="looks at the folder between two jobs of its own process")

ROOT = Path(__file__).resolve().parents[2]


class Ranked(elastic.ObjectState):
    """Has a part of each rank, too: ``mine``."""

    mine: Any = None

    def own(self) -> Any:
        return {"mine": self.mine}

    def load_own(self, part: elastic.Part) -> None:
        self.mine = None if part.own is None else part.own["mine"]


def job(folder: Path, commits: int, hosts: tuple[str, ...] = ("a", "a"), shared: bool = True) -> list[Any]:
    """Commits so many times more; returns what each rank began with: the commit, ``step``, ``mine``."""

    def body(session: Session) -> Any:
        place = folder if shared else folder / hosts[ocomm.rank()]
        session.settings = dataclasses.replace(session.settings, elastic_folder=str(place))
        state = Ranked(step=0)
        state.mine = -1

        @elastic.run
        def train(state: Ranked) -> Any:
            began = (state.commits, state.step, state.mine)
            for _ in range(commits):
                state.step += 1
                state.mine = 100 * ocomm.rank() + state.step
                state.commit()
            return began

        return train(state)

    return run_ranks(len(hosts), body, hosts=hosts)


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 4
    path.write_bytes(data)


def files(folder: Path, number: int) -> dict[str, Path]:
    return {path.suffix[1:]: path for path in folder.rglob(f"set0.1-*-{number:08d}-*")}


#: Of a file: its magic, its length, its checksum, the tree's length, the tree, the end.
BOUNDARIES = [0, 7, 8, 15, 16, 47, 48, 55, 56, -1]


@pytest.mark.parametrize(
    ("harm", "part"),
    few(
        itertools.product([*BOUNDARIES, "cut", "empty"], ["all", "rank1of2on0"]),
        [(0, "all"), (16, "rank1of2on0"), ("cut", "all"), ("empty", "rank1of2on0")],
    ),
)
def test_ranks_go_back_to_the_older_commit_when_the_newer_is_damaged(
    part: str, harm: int | str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job(tmp_path, 3)
    path = files(tmp_path, 3)[part]
    if isinstance(harm, int):
        flip(path, harm)
    else:
        os.truncate(path, 0 if harm == "empty" else path.stat().st_size - 1)
    with caplog.at_level(logging.WARNING, "ocomm"):
        assert job(tmp_path, 1) == [(2, 2, 2), (2, 2, 102)]
    (damaged,) = [record.message for record in caplog.records if "damaged" in record.message]
    assert f"commit 3 in {tmp_path} is damaged: set0.1-" in damaged
    assert job(tmp_path, 0) == [(3, 3, 3), (3, 3, 103)]


def test_a_damaged_copy_is_replaced_by_the_one_of_another_host(tmp_path: Path) -> None:
    # Rank 1 and its part have been on host b, and the replicated part is on both.
    job(tmp_path, 3, ("a", "b"), shared=False)
    flip(files(tmp_path / "b", 3)["all"], 50)
    assert job(tmp_path, 0, ("a", "b"), shared=False) == [(3, 3, 3), (3, 3, 103)]
    # Its part is lost with the last commit; then there is the one before, whose replicated part a has alone.
    flip(files(tmp_path / "b", 3)["rank1of2on1"], 50)
    flip(files(tmp_path / "b", 2)["all"], 50)
    assert job(tmp_path, 0, ("a", "b"), shared=False) == [(2, 2, 2), (2, 2, 102)]


def test_a_part_that_is_damaged_in_both_commits_is_lost_and_in_all_files_is_an_error(tmp_path: Path) -> None:
    job(tmp_path, 3)
    for number in (2, 3):
        flip(files(tmp_path, number)["rank1of2on0"], 50)
    assert job(tmp_path, 0) == [(3, 3, 3), (3, 3, None)]
    for path in tmp_path.iterdir():
        flip(path, 50)
    with pytest.raises(CheckpointError, match=r"no commit in .* can be used: .*checksum does not match.* start anew"):
        job(tmp_path, 0)


class Planted:
    """Makes a folder when it is read."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.ran),)


def test_a_planted_pickle_runs_nothing(tmp_path: Path) -> None:
    """What makes a folder, where it has run, is planted as a bare pickle and as a commit with a right checksum."""
    place, ran = tmp_path / "commits", tmp_path / "ran"
    job(place, 2)
    label = Label(9, 9, "aa")
    for name in Folder(place, "set0.1").replicated(label), Folder(place, "set0.1").of_rank(label, 0, 2, 0):
        (place / name).write_bytes(pickle.dumps(Planted(ran)))
    assert job(place, 0) == [(2, 2, 2), (2, 2, 102)]
    # What others could have written is not looked at, whatever its checksum is, nor is any other file there.
    state = elastic.ObjectState()
    for name in Folder(place, "set0.1").replicated(label), Folder(place, "set0.1").of_rank(label, 0, 2, 0):
        Folder(place, "set0.1").write(name, lambda file: state.dump({"step": Planted(ran)}, file))
    place.chmod(0o777)
    with pytest.raises((CheckpointError, PeerError), match="can be written to by others"):
        job(place, 0)
    place.chmod(0o700)
    for path in place.glob("*-g0009-*"):
        path.chmod(0o666)
    assert job(place, 0) == [(2, 2, 2), (2, 2, 102)]
    assert not ran.exists()


FULL = """
import logging, resource, sys
import numpy as np
import ocomm
from ocomm import elastic

logging.basicConfig(format="%(message)s")
ocomm.init()
state = elastic.ObjectState(data=np.zeros(1000), step=0)

@elastic.run
def train(state):
    for limit in (-1, 4096, 4096, 4096, -1, 4096):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
        state.step += 1
        state.commit()

train(state)
"""


def test_a_disk_that_is_full_says_so_at_every_commit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OCOMM_ELASTIC_FOLDER": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "cannot keep" in line] == [
        f"rank 0 cannot keep commit {number} in {tmp_path}: File too large. Training goes on; the last commit that "
        f"this rank has kept is {kept}."
        for number, kept in ((2, 1), (3, 1), (4, 1), (6, 5))
    ]
    # Nothing of those is left.
    assert sorted(label.number for label in Folder(tmp_path, "set0.1").listing()) == [1, 5]
    assert len(list(tmp_path.iterdir())) == 2


def test_ocommrun_hears_of_a_commit_from_those_who_have_written_what_all_ranks_go_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Folder.write

    def write_if_there_is_space(folder: Folder, name: str, dump: Any) -> None:
        if "-00000002-" in name and name.endswith(".all"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, name, dump)

    monkeypatch.setattr(Folder, "write", write_if_there_is_space)
    heard: list[tuple[int, str, int]] = []

    def body(session: Session) -> None:
        rank = ocomm.rank()

        def say(word: str, state: str, number: int = 0, folder: str = "") -> None:
            assert state == "set0.1" and folder in ("", str(tmp_path))
            heard.append((rank, word, number))

        session.settings = dataclasses.replace(session.settings, elastic_folder=str(tmp_path))
        session.supervisor = cast(Any, SimpleNamespace(hosts_changed=False, say=say))

        @elastic.run
        def train(state: Ranked) -> None:
            for _ in range(3):
                state.commit()

        train(Ranked(step=0))
        session.supervisor = None

    run_ranks(3, body, hosts=["a", "a", "b"])
    commits = [(rank, "commit", number) for rank in (0, 2) for number in (1, 3)]
    assert sorted(heard) == sorted([(0, "anew", 0), *commits])
    # The next job goes on, and says nothing of a beginning.
    run_ranks(3, body, hosts=["a", "a", "b"])
    assert [word for _, word, _ in heard].count("anew") == 1


def test_a_commit_that_the_state_does_not_take_is_an_error_that_names_it_and_says_what_to_do(tmp_path: Path) -> None:
    job(tmp_path, 3)

    class OfAnotherModel(Ranked):
        def load_replicated(self, value: dict[str, Any]) -> None:
            raise KeyError("weight")

    def body(session: Session) -> None:
        session.settings = dataclasses.replace(session.settings, elastic_folder=str(tmp_path))
        with pytest.raises(CheckpointError) as caught:
            elastic.run(lambda state: None)(OfAnotherModel(step=0))
        message = str(caught.value)
        assert f"the state does not take commit 3 in {tmp_path}: KeyError: 'weight'. " in message
        assert "remove what begins with set0.1 from it to start anew" in message

    run_ranks(2, body)
    assert job(tmp_path, 0) == [(3, 3, 3), (3, 3, 103)]


def test_what_is_no_folder_is_an_error_on_all_ranks_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(CheckpointError, match=f"rank 0 cannot use its elastic commits: {tmp_path}/taken: Not a dir"):
        job(tmp_path / "taken", 1)


@pytest.mark.parametrize("begun", [0, 2])
def test_a_job_whose_folder_another_one_takes_says_so_and_leaves_the_others_commits(
    begun: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Session) -> None:
        session.settings = dataclasses.replace(session.settings, elastic_folder=str(tmp_path))

        @elastic.run
        def train(state: Ranked) -> None:
            for _ in range(begun):
                state.commit()
            if ocomm.rank() == 0:
                job(tmp_path, 1)
            ocomm.barrier()
            state.commit()

        train(Ranked(step=0))

    with caplog.at_level(logging.WARNING, "ocomm"):
        run_ranks(2, body)
    said = sorted(record.message for record in caplog.records if "another job" in record.message)
    assert [message.partition(":")[0] for message in said] == [
        f"rank {rank} does not keep commit {begun + 1}" for rank in (0, 1)
    ]
    assert str(tmp_path) in said[0]
    assert job(tmp_path, 0) == [(begun + 1, 1, 1), (begun + 1, 1, 101)]


def test_a_rank_that_has_left_for_good_is_not_waited_for() -> None:
    calls: list[int] = []

    def body(session: Session) -> None:
        if ocomm.rank() == 1:
            return  # as after sys.exit(): it shuts down

        @elastic.run
        def train(state: Ranked) -> None:
            calls.append(ocomm.rank())
            ocomm.allreduce(np.ones(1, np.float32), name="alone")

        state = Ranked(step=0)
        state.sync = lambda: None  # type: ignore[method-assign]
        with pytest.raises(PeerError, match="rank 1 has shut down"):
            train(state)

    run_ranks(3, body)
    assert sorted(calls) == [0, 2]
