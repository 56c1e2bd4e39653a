"""A folder of commits: files that are whole or not there, whose damage is noticed, and which nobody else can write."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from ocomm.elastic import folder as folders
from ocomm.elastic.commits import Held, Label
from ocomm.elastic.folder import Folder

FIVE, SIX = Label(1, 5, "aa"), Label(1, 6, "aa")
PAYLOAD = bytes(range(100))


def nothing(file: IO[bytes]) -> None:
    pass


def some(file: IO[bytes]) -> None:
    file.write(PAYLOAD[:60])
    file.write(memoryview(PAYLOAD)[60:])


def written(path: Path, dump: Callable[[IO[bytes]], None] = some) -> tuple[Folder, str, Path]:
    folder = Folder(path, "set0.1")
    name = folder.replicated(FIVE)
    folder.write(name, dump)
    return folder, name, path / name


def test_a_file_is_read_as_it_was_written_and_may_be_copied_to_another_host(tmp_path: Path) -> None:
    folder, name, _ = written(tmp_path / "a")
    other = Folder(tmp_path / "b", "set0.1")
    other.write_copy(name, folder.copy(name))
    for each in (folder, other):
        assert each.damage(name) == ""
        with each.payload(name) as file:
            assert file.read() == PAYLOAD
    assert folders.received(folder.copy(name), name).read() == PAYLOAD


def test_a_folder_stays_where_it_is_when_the_script_changes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Folder("commits", "set0.1")
    (tmp_path / "data").mkdir()
    monkeypatch.chdir("data")
    folder.write(folder.replicated(FIVE), some)
    assert folder.listing() == {FIVE: Held(True)}
    assert [path.name for path in (tmp_path / "commits").iterdir()] == [folder.replicated(FIVE)]


def test_every_flipped_bit_and_every_other_length_is_noticed(tmp_path: Path) -> None:
    _, name, path = written(tmp_path)
    data = path.read_bytes()
    assert folders.damage(io.BytesIO(data), name) == ""
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert folders.damage(io.BytesIO(flipped), name), f"bit {bit % 8} of byte {bit // 8} of {len(data)}"
    for length in range(len(data)):
        assert folders.damage(io.BytesIO(data[:length]), name), length
    assert folders.damage(io.BytesIO(data + b"\0"), name)
    # Nor is a file taken for that of another commit, rank or state.
    assert folders.damage(io.BytesIO(data), name.replace("00000005", "00000006"))


def test_a_damaged_file_is_not_read(tmp_path: Path) -> None:
    folder, name, path = written(tmp_path)
    assert folder.damage(name) == ""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert folder.damage(name) == "its checksum does not match what is in it"
    with pytest.raises(ValueError, match="checksum"), folder.payload(name):
        pass


def test_files_are_listed_and_only_the_last_two_commits_are_kept(tmp_path: Path) -> None:
    folder, other = Folder(tmp_path / "new", "set0.1"), Folder(tmp_path / "new", "set0.11")
    assert folder.listing() == {}
    for number in range(1, 5):
        label = Label(0, number, "aa")
        for rank in (0, 1):
            folder.write(folder.of_rank(label, rank, 2, rank), nothing)
        folder.write(folder.replicated(label), nothing)
        folder.prune()
    other.write(other.replicated(FIVE), nothing)
    assert folder.listing() == {Label(0, number, "aa"): Held(True, {0: 0, 1: 1}, 2) for number in (3, 4)}
    folder.forget_after(Label(0, 3, "aa"))
    assert list(folder.listing()) == [Label(0, 3, "aa")]
    assert list(other.listing()) == [FIVE]


def test_what_commits_that_failed_have_left_does_not_grow(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "set0.1")
    for number in range(1, 8):
        label = Label(0, number, "aa")
        folder.write(folder.of_rank(label, 1, 2, 0), nothing)
        if number < 3:
            folder.write(folder.replicated(label), nothing)
        (tmp_path / f".{folder.replicated(label)}.123.abcd").touch()  # its process was killed
        folder.prune()
    # Both that are whole here, and the last two, which may be whole on another host.
    assert [label.number for label in folder.listing()] == [1, 2, 6, 7]
    assert [path.name for path in tmp_path.glob(".*")] == [f".{folder.replicated(label)}.123.abcd"]


def test_a_file_that_could_not_be_written_is_not_there(tmp_path: Path) -> None:
    def fail(file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        written(tmp_path, fail)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_os_error_whatever_the_writer_makes_of_it(tmp_path: Path) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "full")

    hashed = folders._Hashed(Full())
    with pytest.raises(OSError):
        hashed.write(b"x")
    assert hashed.error is not None and hashed.error.errno == errno.ENOSPC

    def translates(file: IO[bytes]) -> None:
        file.error = OSError(errno.ENOSPC, "full")  # type: ignore[attr-defined]
        raise RuntimeError("PytorchStreamWriter failed writing file")

    with pytest.raises(OSError, match="full"):
        written(tmp_path, translates)


def test_file_and_folder_are_on_the_disk_before_the_name_and_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        done.append("folder" if is_folder else f"file of {os.fstat(descriptor).st_size}")
        fsync(descriptor)

    def renamed(*args: object, **kwargs: object) -> None:
        done.append("rename")
        replace(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(os, "replace", renamed)
    written(tmp_path)
    assert done == [f"file of {48 + len(PAYLOAD)}", "rename", "folder"]


def test_a_folder_of_another_user_or_that_others_can_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name, path = written(tmp_path / "made")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700 and stat.S_IMODE(path.stat().st_mode) == 0o600
    for mode in (0o770, 0o702, 0o1777):
        path.parent.chmod(mode)
        for use in (folder.listing, folder.prune, lambda: folder.write(name, some), lambda: folder.copy(name)):
            with pytest.raises(PermissionError, match=f"can be written to by others .its mode is {mode:04o}"):
                use()
        assert "by others" in folder.damage(name)
    path.parent.chmod(0o755)
    assert folder.damage(name) == ""
    # Nor is a file that somebody has left there before.
    path.chmod(0o622)
    assert folder.damage(name) == "it can be written to by others (its mode is 0622)"
    path.chmod(0o600)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {uid}, and this process is of user {uid + 1}"):
        folder.listing()


def test_links_and_pipes_are_no_commits(tmp_path: Path) -> None:
    folder, _, path = written(tmp_path)
    second, third = folder.replicated(SIX), folder.of_rank(SIX, 0, 1, 0)
    (tmp_path / second).symlink_to(path)
    os.mkfifo(tmp_path / third, 0o600)
    assert folder.damage(second) and folder.damage(third) == "it is no regular file"
