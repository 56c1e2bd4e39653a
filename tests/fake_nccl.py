"""NCCL without GPUs: bytes between fake devices of several ranks, by the rules of ``transport.nccl.NcclLibrary``.

On each rank one call begins when the one before it is over, and is over when all its peers have made the call that
belongs to it. So ranks that make their calls in different orders wait for ever, as they do with NCCL.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ocomm.errors import HorovodInternalError
from ocomm.transport.base import Transport
from ocomm.transport.local import Fabric
from ocomm.transport.nccl import Piece
from tests import worlds
from tests.fake_device import FakeDevice, FakeStream

_DATA, _ACKNOWLEDGED, _BOOTSTRAP = 20_000, 25_000, 30_000


class FakeNccl:
    """Stands for a ``transport.nccl.NcclLibrary`` of all ranks; under mpirun all of them make one together.

    Of each node's first communicator, with two nodes, calls from number ``sticks_at`` on never end. ``garbles``: what
    arrives is something else.
    """

    def __init__(self, sticks_at: int = 1 << 60, garbles: bool = False) -> None:
        self.sticks_at = sticks_at
        self.garbles = garbles
        self.communicators: list[FakeCommunicator] = []
        self._numbers = itertools.count()
        self._fabrics: dict[bytes, Fabric] = {}
        self._lock = threading.Lock()
        self._world = worlds.mpi_world_copy() if worlds.MPI_SIZE else None

    def __str__(self) -> str:
        return "2.99.0"

    def unique_id(self) -> bytes:
        with self._lock:
            number = next(self._numbers)
        return f"{0 if self._world is None else self._world.rank},{number}".encode().ljust(128)

    def communicator(self, unique_id: bytes, size: int, rank: int) -> FakeCommunicator:
        leader, number = map(int, unique_id.split(b","))
        tag = number % 1000
        if self._world is None:
            with self._lock:
                fabric = self._fabrics.setdefault(unique_id, Fabric(size))
            found = FakeCommunicator(self, fabric.endpoint(rank), range(size), rank, number)
        else:
            world = self._world.communicator
            if rank == 0:
                table = {0: self._world.rank}
                for _ in range(size - 1):
                    position, where = world.recv(tag=_BOOTSTRAP + tag)
                    table[position] = where
                for position in range(1, size):
                    world.send(table, table[position], _BOOTSTRAP + 1000 + tag)
            else:
                world.send((rank, self._world.rank), leader, _BOOTSTRAP + tag)
                table = world.recv(source=leader, tag=_BOOTSTRAP + 1000 + tag)
            found = FakeCommunicator(self, self._world, [table[position] for position in range(size)], rank, number)
        self.communicators.append(found)
        return found


class FakeCommunicator:
    """See ``transport.nccl.Communicator``."""

    def __init__(self, library: FakeNccl, transport: Transport, members: Sequence[int], rank: int, number: int) -> None:
        self.transport = transport
        self.members = list(members)
        self.rank = rank
        self.tag = number % 1000
        self.garbles = library.garbles
        self.sticks_at = library.sticks_at if number < (1 if worlds.MPI_SIZE else 2) else 1 << 60
        self.calls = 0
        #: Bytes sent and received.
        self.moved = [0, 0]
        self.aborted = False
        #: What ``failure`` says.
        self.words = ""

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece], stream: FakeStream) -> None:
        if self.aborted:
            raise HorovodInternalError("ncclGroupEnd: invalid usage")
        for piece in receives:
            FakeDevice.bytes(piece.address, piece.nbytes)[:] = 0x5A
        call = _Call(self, sends, receives, self.calls >= self.sticks_at)
        self.calls += 1
        for way, pieces in enumerate((sends, receives)):
            self.moved[way] += sum(piece.nbytes for piece in pieces)
        stream.queue(call.goes_on)

    def failure(self) -> str:
        assert not self.aborted, "a communicator that is no more"
        return self.words

    def abort(self) -> None:
        assert not self.aborted, "a communicator that is no more"
        self.aborted = True


class _Call:
    def __init__(
        self, communicator: FakeCommunicator, sends: Sequence[Piece], receives: Sequence[Piece], sticks: bool
    ) -> None:
        self.communicator = communicator
        self.sends = sends
        self.receives = receives
        self.sticks = sticks
        self.begun = False
        self.requests: list[Any] = []
        self.arriving: list[tuple[Any, Piece, np.ndarray]] = []

    def goes_on(self) -> bool:
        communicator = self.communicator
        if communicator.aborted:
            return True
        if self.sticks:
            return False
        transport, members = communicator.transport, communicator.members
        data, acknowledged = _DATA + communicator.tag, _ACKNOWLEDGED + communicator.tag
        if not self.begun:
            self.begun = True
            for piece in self.sends:
                to = members[piece.peer]
                self.requests.append(transport.irecv(np.zeros(1, np.uint8), to, acknowledged))
                self.requests.append(transport.isend(FakeDevice.bytes(piece.address, piece.nbytes), to, data))
            for piece in self.receives:
                buffer = np.zeros(piece.nbytes, np.uint8)
                self.arriving.append((transport.irecv(buffer, members[piece.peer], data), piece, buffer))
        arriving, self.arriving = self.arriving, []
        for request, piece, buffer in arriving:
            if transport.test(request):
                FakeDevice.bytes(piece.address, piece.nbytes)[:] = buffer + communicator.garbles
                self.requests.append(transport.isend(np.zeros(1, np.uint8), members[piece.peer], acknowledged))
            else:
                self.arriving.append((request, piece, buffer))
        self.requests = [request for request in self.requests if not transport.test(request)]
        return not self.requests and not self.arriving
