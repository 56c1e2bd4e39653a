"""The part of NCCL that ocomm uses: sending bytes from device to device between the ranks of one node.

The library is the one that Torch brings (the package nvidia-nccl-cu12 or -cu13), else what the loader finds. Errors are
HorovodInternalError with NCCL's own words. ``python -m ocomm.transport.nccl`` prints which library there is.

Source: the NCCL user guide, and nccl.h of NCCL 2.7 (the first with send and receive) to 2.32.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ocomm.errors import HorovodInternalError

_NAME = "libnccl.so.2"
_OLDEST = (2, 7, 0)
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_uint8 * 128)]


_Comm = ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(_Comm), ctypes.c_int, _UniqueId, ctypes.c_int],
    "ncclCommAbort": [_Comm],
    "ncclCommGetAsyncError": [_Comm, ctypes.POINTER(ctypes.c_int)],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclSend": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _Comm, ctypes.c_void_p],
    "ncclRecv": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _Comm, ctypes.c_void_p],
}


@dataclass(frozen=True, slots=True)
class Piece:
    """``nbytes`` at ``address`` on this rank's device, sent to or received from rank ``peer`` of the communicator."""

    peer: int
    address: int
    nbytes: int


class NcclLibrary:
    """A loaded NCCL. Raises OSError if ``path`` is no library, HorovodInternalError if it is too old or lacks a
    function.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise HorovodInternalError(f"{path} has no {name}")
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._library.ncclGetErrorString.argtypes = [ctypes.c_int]
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        code = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(code))
        self.version = _version(code.value)
        if self.version < _OLDEST:
            raise HorovodInternalError(f"{path} is NCCL {self}, which cannot send and receive; 2.7 is the first")

    def __str__(self) -> str:
        return ".".join(map(str, self.version))

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function. Raises HorovodInternalError if it does not succeed."""
        code = getattr(self._library, name)(*arguments)
        if code != _SUCCESS:
            raise HorovodInternalError(f"{name}: {self.words(code)}")

    def words(self, code: int) -> str:
        """Returns the meaning of an error code."""
        return (self._library.ncclGetErrorString(code) or b"?").decode()

    def unique_id(self) -> bytes:
        """Returns a new id, by which the ranks of a communicator find each other."""
        new = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(new))
        return bytes(new)

    def communicator(self, unique_id: bytes, size: int, rank: int) -> Communicator:
        """Makes a communicator. Collective; waits for all ranks without limit. The calling thread's current device is
        this rank's.
        """
        handle = _Comm()
        arguments = ctypes.byref(handle), size, _UniqueId.from_buffer_copy(unique_id), rank
        self.call("ncclCommInitRank", *arguments)
        return Communicator(self, handle)


class Communicator:
    """One rank's side of a communicator. Not thread-safe, except for methods that say so."""

    def __init__(self, library: NcclLibrary, handle: Any) -> None:
        self._library = library
        self._handle = handle

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece], stream: Any) -> None:
        """Queues all sends and receives on the CUDA stream ``stream`` as one operation, and returns.

        All ranks make matching calls in the same order, each on a thread whose current device is this rank's.
        """
        call = self._library.call
        call("ncclGroupStart")
        try:
            for name, pieces in (("ncclSend", sends), ("ncclRecv", receives)):
                for piece in pieces:
                    call(name, piece.address, piece.nbytes, _UINT8, piece.peer, self._handle, stream)
        finally:
            call("ncclGroupEnd")

    def failure(self) -> str:
        """Returns what has gone wrong since, "" if nothing has."""
        code = ctypes.c_int()
        self._library.call("ncclCommGetAsyncError", self._handle, ctypes.byref(code))
        return "" if code.value in (_SUCCESS, _IN_PROGRESS) else self._library.words(code.value)

    def abort(self) -> None:
        """Aborts what is under way, and frees the communicator; must be the last call. From any thread; may wait for
        other ranks.
        """
        self._library.call("ncclCommAbort", self._handle)


def _version(code: int) -> tuple[int, int, int]:
    """Parses a version number: 2708 is 2.7.8; from 2.9 on, 20906 is 2.9.6."""
    unit = 1000 if code < 10000 else 10000
    return code // unit, code % unit // 100, code % 100


def candidates(find_spec: Callable[[str], Any] = importlib.util.find_spec) -> list[str]:
    """Returns the paths where the library may be, the best first."""
    try:
        spec = find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    paths = [Path(folder) / "lib" / _NAME for folder in folders]
    return [*(str(path) for path in paths if path.exists()), _NAME]


def load() -> NcclLibrary:
    """Loads the first library found. Raises HorovodInternalError if none can be used."""
    reasons = []
    for path in candidates():
        try:
            return NcclLibrary(path)
        except (OSError, HorovodInternalError) as error:
            reasons.append(str(error))
    raise HorovodInternalError(
        f"no NCCL ({'; '.join(reasons)}); Torch's CUDA builds bring one, as does pip install nvidia-nccl-cu12 or -cu13"
    )


def _main() -> int:
    try:
        library = load()
    except HorovodInternalError as error:
        print(error)
        return 1
    print(f"{library} ({library.path})")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
