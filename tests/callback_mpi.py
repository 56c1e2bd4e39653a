"""An MPI of callbacks over the local network, for the native engine in a process whose ranks are threads."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ocomm.transport.local import LocalTransport

_INT, _PTR, _HANDLE = ctypes.c_int, ctypes.c_void_p, ctypes.c_ssize_t
#: The types of the functions of MPI that the engine calls.
PROTOTYPES = {
    "isend": ctypes.CFUNCTYPE(_INT, _PTR, _INT, _HANDLE, _INT, _INT, _HANDLE, _PTR),
    "irecv": ctypes.CFUNCTYPE(_INT, _PTR, _INT, _HANDLE, _INT, _INT, _HANDLE, _PTR),
    "testsome": ctypes.CFUNCTYPE(_INT, _INT, _PTR, _PTR, _PTR, _PTR),
    "iprobe": ctypes.CFUNCTYPE(_INT, _INT, _INT, _HANDLE, _PTR, _PTR),
    "get_count": ctypes.CFUNCTYPE(_INT, _PTR, _HANDLE, _PTR),
}


class CallbackMpi:
    """The five MPI functions which the engine calls, over local transports: one rank's ``MpiAbi``."""

    isend: int
    irecv: int
    testsome: int
    iprobe: int
    get_count: int
    byte_type, handle_nbytes, status_nbytes, any_source, undefined = 0, 8, 24, -1, -32766
    tests_move_little = False

    def __init__(self) -> None:
        self.transports: dict[int, LocalTransport] = {}
        self.requests: dict[int, tuple[LocalTransport, Any]] = {}
        self.made = 0
        self.broken = False
        self.missing = 0  # bytes by which every message is too short, as MPI tells it
        self._kept = {name: prototype(getattr(self, f"_{name}")) for name, prototype in PROTOTYPES.items()}
        for name, function in self._kept.items():
            setattr(self, name, ctypes.cast(function, _PTR).value)

    def attach(self, transport: LocalTransport) -> LocalTransport:
        transport.handle = len(self.transports) + 1  # type: ignore[attr-defined]
        self.transports[transport.handle] = transport  # type: ignore[attr-defined]
        return transport

    def _new(self, transport: LocalTransport, request: Any, out: int) -> int:
        self.made += 1
        self.requests[self.made] = (transport, request)
        ctypes.c_int64.from_address(out).value = self.made
        return 0

    @staticmethod
    def _buffer(address: int | None, count: int) -> np.ndarray:
        if not address or not count:
            return np.zeros(0, np.uint8)
        return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))

    def _isend(self, address: int, count: int, _type: int, dest: int, tag: int, comm: int, out: int) -> int:
        transport = self.transports[comm]
        transport.isend(self._buffer(address, count), dest, tag)
        return self._new(transport, None, out)

    def _irecv(self, address: int, count: int, _type: int, source: int, tag: int, comm: int, out: int) -> int:
        transport = self.transports[comm]
        return self._new(transport, transport.irecv(self._buffer(address, count), source, tag), out)

    def _testsome(self, count: int, requests: int, outcount: int, indices: int, statuses: int) -> int:
        handles = (ctypes.c_int64 * count).from_address(requests)
        done = 0
        for i in range(count):
            if handles[i] and self.requests[handles[i]][0].test(self.requests[handles[i]][1]):
                request = self.requests.pop(handles[i])[1]
                nbytes = 0 if request is None else request.buffer.nbytes
                _INT.from_address(statuses + self.status_nbytes * done).value = nbytes - self.missing
                handles[i] = 0
                _INT.from_address(indices + 4 * done).value = i
                done += 1
        _INT.from_address(outcount).value = done if any(handles) or done else self.undefined
        return 15 if self.broken else 0

    def _get_count(self, status: int, _type: int, count: int) -> int:
        _INT.from_address(count).value = _INT.from_address(status).value
        return 0

    def _iprobe(self, _source: int, tag: int, comm: int, flag: int, _status: int) -> int:
        _INT.from_address(flag).value = self.transports[comm].probe(tag) is not None
        return 0
