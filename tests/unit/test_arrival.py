"""The list of arrived ranks lies in a folder whose name can be guessed: it is used only where nobody else can write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from ocomm.runtime.arrival import Arrival, open_private


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_who_has_left_a_file_has_arrived_and_the_last_removes_the_folder() -> None:
    ranks = [Arrival("job.1", rank, 3, 600.0) for rank in (0, 2)]
    for rank in ranks:
        rank.__enter__()
    folder = ranks[0].folder
    assert folder.name == f"ocomm-{os.getuid()}-job-1" and folder.stat().st_mode & 0o777 == 0o700
    assert "init() (as seen from this host): [1]." in ranks[0].report()
    ranks[0].__exit__()
    assert "init() (as seen from this host): [0, 1]." in ranks[1].report()
    ranks[1].__exit__()
    assert not folder.exists()


def test_steps_of_two_jobs_have_two_folders() -> None:
    steps = [Arrival(job, 0, 2, 600.0) for job in ("slurm.pmix.10.42", "slurm.pmix.104.2", "slurm.pmix.104.2-1")]
    assert len({step.folder for step in steps}) == 3


def test_where_all_have_arrived_nobody_is_blamed() -> None:
    ranks = [Arrival("job", rank, 2, 600.0) for rank in range(2)]
    with ranks[0], ranks[1]:
        assert "MPI has not connected the ranks, which have all come to init(). Pass the same " in ranks[0].report()


def test_where_the_ranks_of_this_host_are_known_nobody_elsewhere_is_called_missing() -> None:
    ranks = [Arrival("job", rank, 4, 600.0, ranks_here=(2, 3)) for rank in (2, 3)]
    with ranks[0]:
        words = "(of this host's [2, 3]; nothing is known here of the others): [3]. Look at their output"
        assert words in ranks[0].report()
        with ranks[1]:
            assert "the ranks of this host, [2, 3], have all come to init(), and some of" in ranks[0].report()


def test_what_a_job_that_was_killed_has_left_is_removed_after_a_day(temporary: Path) -> None:
    left, new, other = (
        temporary / f"ocomm-{user}-{job}" for user, job in ((os.getuid(), "a"), (os.getuid(), "b"), (7, "c"))
    )
    link = temporary / f"ocomm-{os.getuid()}-link"
    for folder in (left, new, other):
        folder.mkdir(mode=0o700)
        (folder / "0").touch()
    link.symlink_to(other)
    for folder in (left, other):
        os.utime(folder, (0, 0))
    os.utime(link, (0, 0), follow_symlinks=False)
    with Arrival("job", 0, 2, 600.0):
        assert not left.exists()
        assert (new / "0").exists() and (other / "0").exists() and link.is_symlink()


def test_a_link_in_its_place_is_not_followed(temporary: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = temporary / "elsewhere"
    target.mkdir(mode=0o700)
    arrival = Arrival("job", 0, 2, 600.0)
    arrival.folder.symlink_to(target)
    with arrival:
        assert not list(target.iterdir())
        assert "no list of them could be kept" in arrival.report()
    assert "is no folder but a link or a file" in caplog.text
    assert arrival.folder.is_symlink() and target.exists()


def test_a_link_in_the_place_of_a_rank_is_not_followed(temporary: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrival = Arrival("job", 0, 2, 600.0)
    arrival.folder.mkdir(mode=0o700)
    (arrival.folder / "0").symlink_to(temporary / "victim")
    with arrival:
        assert not (temporary / "victim").exists()
    assert "keeps no list of arrived ranks" in caplog.text


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707])
def test_a_folder_that_others_can_open_is_refused(mode: int, temporary: Path) -> None:
    folder = temporary / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match=f"has mode 0{mode:o}; it must belong to user {os.geteuid()}, with mode"):
        open_private(folder)
    assert not list(folder.iterdir())


def test_another_users_folder_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = temporary / "theirs"
    folder.mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {owner} and has mode 0700; it must belong to user"):
        open_private(folder)
    assert not list(folder.iterdir())


def test_without_a_limit_nothing_is_watched(temporary: Path) -> None:
    with Arrival("job", 0, 2, 0.0):
        assert not list(temporary.iterdir())
