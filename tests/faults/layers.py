"""Where faults are put in: around a transport, into the table of MPI's functions, under files and sockets."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import io
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from ocomm.transport.base import Transport
from ocomm.types import Bytes
from tests.callback_mpi import PROTOTYPES, CallbackMpi
from tests.faults.calls import Calls, caller, place

_MPI_ERR_OTHER = 16


class NetworkFault(RuntimeError):
    """What a transport raises, as mpi4py's ``MPI.Exception``, which is a RuntimeError, too."""


class FaultyTransport:
    """A ``Transport`` whose calls may fail. A poll counts once: when it has found something.

    Args:
        inner: The transport.
        calls: The calls of this rank.
        mpi: Where the communicators of the native engine are, if MPI is one of callbacks.
    """

    def __init__(self, inner: Any, calls: Calls, mpi: CallbackMpi | None = None) -> None:
        self._inner = inner
        self._calls = calls
        self._mpi = mpi
        if mpi is not None:
            mpi.attach(inner)
        if hasattr(inner, "handle"):
            self.handle = inner.handle
        self.rank: int = inner.rank
        self.size: int = inner.size
        self.arrival = inner.arrival

    def _count(self, what: str) -> None:
        if self._calls.fails(f"{what} in {caller(3)}"):
            raise NetworkFault(f"{what} has failed")

    def isend(self, buffer: Bytes, dest: int, tag: int) -> Any:
        self._count("isend")
        return self._inner.isend(buffer, dest, tag)

    def irecv(self, buffer: Bytes, source: int, tag: int) -> Any:
        self._count("irecv")
        return self._inner.irecv(buffer, source, tag)

    def test(self, request: Any) -> bool:
        if not self._inner.test(request):
            return False
        self._count("test")
        return True

    def probe(self, tag: int) -> tuple[int, int] | None:
        found = self._inner.probe(tag)
        if found is not None:
            self._count("probe")
        return found

    def duplicate(self) -> Any:
        self._count("duplicate")
        return self._inner.duplicate()

    def duplicated(self, request: Any) -> Transport | None:
        copy = self._inner.duplicated(request)
        if copy is None:
            return None
        self._count("duplicated")
        return FaultyTransport(copy, self._calls, self._mpi)

    def subset(self, ranks: Sequence[int]) -> Transport:
        self._count("subset")
        return FaultyTransport(self._inner.subset(ranks), self._calls, self._mpi)

    def abort(self, code: int) -> None:
        self._inner.abort(code)

    def close(self) -> None:
        self._count("close")
        self._inner.close()


class FaultyMpi:
    """A table of MPI's functions, as ``MpiAbi``, whose calls may fail. A poll counts once: when it has found something.

    Args:
        table: The real functions, or those of a ``CallbackMpi``.
        calls: The calls of this rank.
    """

    isend: int
    irecv: int
    testsome: int
    iprobe: int
    get_count: int

    def __init__(self, table: Any, calls: Calls) -> None:
        for name in ("byte_type", "handle_nbytes", "status_nbytes", "any_source", "undefined", "tests_move_little"):
            setattr(self, name, getattr(table, name))
        self._table = table
        self._kept = {}
        for name, prototype in PROTOTYPES.items():
            real = prototype(getattr(table, name))
            has_found = {"testsome": self._some, "iprobe": self._message}.get(name, lambda *given: True)
            self._kept[name] = prototype(_failing(f"MPI_{name.capitalize()}", real, calls, has_found))
            setattr(self, name, ctypes.cast(self._kept[name], ctypes.c_void_p).value)

    def _some(self, *given: Any) -> bool:
        done = ctypes.c_int.from_address(given[2]).value
        return 0 < done != self._table.undefined

    def _message(self, *given: Any) -> bool:
        return ctypes.c_int.from_address(given[3]).value != 0


def _failing(site: str, real: Callable[..., int], calls: Calls, has_found: Callable[..., bool]) -> Callable[..., int]:
    polls = site in ("MPI_Testsome", "MPI_Iprobe")

    def function(*given: Any) -> int:
        if not polls and calls.fails(site):
            return _MPI_ERR_OTHER
        code = real(*given)
        if polls and code == 0 and has_found(*given) and calls.fails(site):
            return _MPI_ERR_OTHER
        return code

    return function


# Files and sockets


@contextlib.contextmanager
def files_and_sockets(calls: Calls) -> Iterator[None]:
    """Lets calls of files and sockets fail whose nearest caller, the standard library left out, is a line of ocomm."""
    with contextlib.ExitStack() as stack:
        for name in ("open", "fsync", "fstat", "replace", "unlink", "mkdir", "rmdir", "listdir", "dup2"):
            stack.enter_context(mock.patch.object(os, name, _checked(name, getattr(os, name), calls)))
        opened = _opening(io.open, calls)
        stack.enter_context(mock.patch.object(builtins, "open", opened))
        stack.enter_context(mock.patch.object(io, "open", opened))  # pathlib's
        stack.enter_context(mock.patch.object(socket, "socket", _socket_class(calls)))
        yield


def _check(what: str, calls: Calls, code: int = errno.ENOSPC, path: str | None = None) -> None:
    at = place(sys._getframe(2))
    if at is not None and calls.fails(f"{what} in {at}"):
        raise OSError(code, os.strerror(code), path)


def _checked(name: str, real: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    def function(*given: Any, **named: Any) -> Any:
        _check(name, calls, path=None if isinstance(given[0], int) else str(given[0]))
        return real(*given, **named)

    return function


def _opening(real: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    def function(*given: Any, **named: Any) -> Any:
        at = place(sys._getframe(1))
        if at is not None and calls.fails(f"open in {at}"):
            if isinstance(given[0], int):
                os.close(given[0])
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        file = real(*given, **named)
        return file if at is None else _File(file, calls)

    return function


class _File:
    """A file whose reads and writes may fail."""

    def __init__(self, file: Any, calls: Calls) -> None:
        self._file = file
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def write(self, data: Any) -> Any:
        _check("write", self._calls)
        return self._file.write(data)

    def flush(self) -> None:
        _check("flush", self._calls)
        self._file.flush()

    def read(self, *given: Any) -> Any:
        _check("read", self._calls, errno.EIO)
        return self._file.read(*given)


def _socket_class(calls: Calls) -> type[socket.socket]:
    class FaultySocket(socket.socket):
        pass

    def method(name: str) -> Callable[..., Any]:
        real = getattr(socket.socket, name)

        def function(self: socket.socket, *given: Any) -> Any:
            _check(name, calls, errno.ECONNRESET)
            return real(self, *given)

        return function

    for name in ("bind", "listen", "connect", "accept", "send", "sendall", "recv", "recv_into", "setsockopt"):
        setattr(FaultySocket, name, method(name))
    return FaultySocket
