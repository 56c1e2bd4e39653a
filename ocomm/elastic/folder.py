"""One host's folder of commits: checks its owner, keeps files that are complete or absent, with a checksum each.

A file is a header and a payload, which the state writes. The header has 48 bytes: ``_MAGIC``, the payload's length as a
little-endian 64-bit integer, and the SHA-256 of the payload, the first 16 bytes of the header and the file's name.

A commit may hold pickled objects, and reading those runs code. So a folder is used only if it belongs to the user of
this process and nobody else can write to it; the same holds for a file. All calls use a descriptor of the folder that
was checked, so another folder that takes its place is never read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import secrets
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from ocomm.elastic.commits import KEPT, Held, Label

_FILE = re.compile(r"(.+)-g(\d+)-(\d+)-([0-9a-f]+)\.(all|rank(\d+)of(\d+)on(\d+))")
#: Name of a file that is being written, or that was being written when its process died.
_BESIDE = re.compile(r"\.(.+)\.\d+\.[0-9a-f]+")
_MAGIC = b"ocommit1"
_HEADER = struct.Struct("<8sQ32s")
_PIECE = 1 << 20
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Folder:
    """One state's commits on this host. The folder is created when it is first written to.

    ``listing``, and all methods that write, raise PermissionError if the folder is another user's or others can write
    to it.
    """

    def __init__(self, path: str | os.PathLike[str], stem: str) -> None:
        self.path = Path(path).absolute()  # a script may change its working folder between commits
        self.stem = stem
        self._intact: dict[str, tuple[int, ...]] = {}  # files whose checksum was right, with their identity then

    def listing(self) -> dict[Label, Held]:
        """Returns what is there, by the names of files; ``damage`` says whether a file is intact."""
        found: dict[Label, Held] = {}
        for label, what, _ in self._files():
            held = found.get(label, Held())
            if what is None:
                found[label] = Held(True, held.places, held.size)
            else:
                rank, size, place = what
                found[label] = Held(held.replicated, {**held.places, rank: place}, size)
        return found

    def _files(self) -> list[tuple[Label, tuple[int, int, int] | None, str]]:
        found = []
        for name in self._names():
            match = _FILE.fullmatch(name)
            if match and match[1] == self.stem:
                label = Label(int(match[2]), int(match[3]), match[4])
                found.append((label, (int(match[6]), int(match[7]), int(match[8])) if match[6] else None, name))
        return found

    def _names(self) -> list[str]:
        try:
            with self._opened() as folder:
                return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Opens a descriptor of the folder, to which only this user can write."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if why := _not_ours(os.fstat(descriptor)):
                raise PermissionError(
                    f"the folder {self.path} {why}. Elastic commits are kept only where nobody else can write, because "
                    "reading them may run code. Remove group's and others' right to write (chmod go-w) from a folder "
                    "of your own, or let OCOMM_ELASTIC_FOLDER name one that does not exist yet: ocomm makes it."
                )
            yield descriptor
        finally:
            os.close(descriptor)

    def replicated(self, label: Label) -> str:
        """Returns the name of the file of the replicated part."""
        return f"{self.stem}-{label}.all"

    def of_rank(self, label: Label, rank: int, size: int, place: int) -> str:
        """Returns the name of the file of a rank's part."""
        return f"{self.stem}-{label}.rank{rank}of{size}on{place}"

    # Reading

    def damage(self, name: str) -> str:
        """Returns why the file cannot be used, "" if it is intact. Reads all of it."""
        try:
            with self._opened() as folder, self._open(folder, name) as file:
                identity = _identity(file)
                if self._intact.get(name) == identity:
                    return ""
                why = damage(file, name)
                if not why:
                    self._intact[name] = identity
                return why
        except OSError as error:
            return error.strerror or str(error)

    @contextlib.contextmanager
    def payload(self, name: str) -> Iterator[IO[bytes]]:
        """Opens the file after its header. Raises ValueError if it is not intact, OSError if it cannot be read."""
        with self._opened() as folder, self._open(folder, name) as file:
            if self._intact.get(name) != _identity(file) and (why := damage(file, name)):
                raise ValueError(why)
            file.seek(_HEADER.size)
            yield file

    def copy(self, name: str) -> bytes:
        """Returns all bytes of the file, with its header, which ``write_copy`` writes on another host."""
        with self._opened() as folder, self._open(folder, name) as file:
            return file.read()

    @contextlib.contextmanager
    def _open(self, folder: int, name: str) -> Iterator[IO[bytes]]:
        # Without O_NONBLOCK opening a named pipe would block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(name, flags, dir_fd=folder), "rb") as file:
            status = os.fstat(file.fileno())
            why = _not_ours(status) if stat.S_ISREG(status.st_mode) else "is no regular file"
            if why:
                raise PermissionError(f"it {why}")
            yield file

    # Writing

    def write(self, name: str, dump: Callable[[IO[bytes]], None]) -> None:
        """Writes a header and what ``dump`` writes. When this returns, the complete file is on the disk.

        Raises OSError if it cannot be written; then there is no such file, or still the old one.
        """
        with self._beside(name) as file:
            file.write(bytes(_HEADER.size))
            hashed = _Hashed(file)
            try:
                dump(cast(IO[bytes], hashed))
            except Exception:
                if hashed.error is None:
                    raise
                raise hashed.error from None  # writers such as torch.save replace it by a RuntimeError
            start = _HEADER.pack(_MAGIC, hashed.nbytes, b"")[:16]
            hashed.sha.update(start + name.encode())
            file.seek(0)
            file.write(start + hashed.sha.digest())

    def write_copy(self, name: str, data: bytes) -> None:
        """Writes the bytes that ``copy`` has read. Raises OSError if they cannot be written."""
        with self._beside(name) as file:
            file.write(data)

    @contextlib.contextmanager
    def _beside(self, name: str) -> Iterator[IO[bytes]]:
        """Opens a new file, which gets its name when all of it is on the disk."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._opened() as folder:
            beside = f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with open(os.open(beside, flags, 0o600, dir_fd=folder), "wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(beside, dir_fd=folder)
                raise
            try:
                os.fsync(folder)  # the name
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system that cannot do this for folders
                    raise

    # Removing

    def prune(self) -> None:
        """Keeps the last complete commits here, and the last one of which there is any part, and nothing older."""
        files = self._files()
        whole = sorted({label for label, what, _ in files if what is None}, reverse=True)[:KEPT]
        latest = sorted({label for label, _, _ in files}, reverse=True)[:KEPT]
        self._remove(name for label, _, name in files if label not in {*whole, *latest})
        for name in self._names():  # files that processes had not finished when they died
            beside = _BESIDE.fullmatch(name)
            match = _FILE.fullmatch(beside[1]) if beside else None
            if match and match[1] == self.stem and latest and Label(int(match[2]), int(match[3]), match[4]) < latest[0]:
                self._remove([name])

    def forget_after(self, label: Label) -> None:
        """Removes newer commits, because the ranks have agreed to go back to ``label``."""
        self._remove(name for other, _, name in self._files() if other > label)

    def _remove(self, names: Any) -> None:
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # another rank of this host may have been quicker
                    os.unlink(name, dir_fd=folder)


def damage(file: IO[bytes], name: str) -> str:
    """Returns why the bytes of a file of that name cannot be used, "" if they are as they were written."""
    file.seek(0, os.SEEK_END)
    nbytes = file.tell()
    file.seek(0)
    header = file.read(_HEADER.size)
    if header[: len(_MAGIC)] != _MAGIC[: len(header)] or not header:
        return "it does not begin as a commit of this version of ocomm does"
    if len(header) < _HEADER.size:
        return f"it ends after {nbytes} bytes, in its header"
    _, length, expected = _HEADER.unpack(header)
    if nbytes != _HEADER.size + length:
        return f"it has {nbytes} bytes, and its header says {_HEADER.size + length}"
    sha = hashlib.sha256()
    while piece := file.read(_PIECE):
        sha.update(piece)
    sha.update(header[:16] + name.encode())
    return "" if sha.digest() == expected else "its checksum does not match what is in it"


def received(data: bytes, name: str) -> IO[bytes]:
    """Returns the payload of a file that another host has sent. Raises ValueError if it is not intact."""
    file = io.BytesIO(data)
    if why := damage(file, name):
        raise ValueError(why)
    file.seek(_HEADER.size)
    return file


def _identity(file: IO[bytes]) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _not_ours(status: os.stat_result) -> str:
    """Returns why another user could have written it, "" if none could."""
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, and this process is of user {os.geteuid()}"
    if status.st_mode & _OTHERS_WRITE:
        return f"can be written to by others (its mode is {stat.S_IMODE(status.st_mode):04o})"
    return ""


class _Hashed(io.RawIOBase):
    """Passes on what is written, and counts and hashes it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha = hashlib.sha256()
        self.nbytes = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        """Returns True."""
        return True

    def write(self, data: Any) -> int:
        """Writes all of ``data``."""
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.sha.update(data)
        nbytes = memoryview(data).nbytes
        self.nbytes += nbytes
        return nbytes
