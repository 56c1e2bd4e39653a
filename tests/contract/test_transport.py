"""What every Transport must do. ``local`` always; under mpirun (TEST_MPI_SIZE) the same laws hold for ``mpi``."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ocomm.errors import HorovodInternalError
from ocomm.transport.base import Request, Transport
from ocomm.transport.local import Fabric
from tests.worlds import MPI_SIZE

LIMIT_S = 20.0


def on_ranks(size: int, body: Callable[[Transport], Any]) -> list[Any]:
    """``body(transport)`` on every rank, all at once; its results over ranks."""
    if MPI_SIZE:
        if size != MPI_SIZE:
            pytest.skip(reason=f"needs {size} ranks, this run has {MPI_SIZE}")
        from ocomm.transport import mpi

        world = mpi.open_world()
        try:
            return world.communicator.allgather(body(world))
        except BaseException:
            # The others wait for this rank: end them now, with this stack as the reason.
            traceback.print_exc()
            sys.stderr.flush()
            world.abort(1)
            raise
        finally:
            world.close()
    fabric = Fabric(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            results[rank] = body(fabric.endpoint(rank))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


def finish(transport: Transport, *requests: Request) -> None:
    end = time.monotonic() + LIMIT_S
    for request in requests:
        while not transport.test(request):
            assert time.monotonic() < end, "no end in sight"


def finish_in_any_order(transport: Transport, requests: list[Request]) -> None:
    end = time.monotonic() + LIMIT_S
    while requests:
        requests = [request for request in requests if not transport.test(request)]
        assert time.monotonic() < end, "no end in sight"


def copy_of(transport: Transport) -> Transport:
    pending = transport.duplicate()
    while (copy := transport.duplicated(pending)) is None:
        pass
    return copy


def bytes_of(value: int, nbytes: int) -> np.ndarray:
    return np.full(nbytes, value, np.uint8)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("nbytes", [0, 1, 100_003])
def test_every_pair_exchanges_messages_of_any_length(size: int, nbytes: int) -> None:
    def body(t: Transport) -> None:
        others = [rank for rank in range(t.size) if rank != t.rank]
        buffers = {rank: bytes_of(255, nbytes) for rank in others}
        mine = bytes_of(t.rank, nbytes)
        finish(t, *[t.irecv(buffers[rank], rank, 5) for rank in others], *[t.isend(mine, rank, 5) for rank in others])
        for rank in others:
            assert (buffers[rank] == rank).all()

    on_ranks(size, body)


def test_messages_with_one_tag_keep_their_order_and_tags_do_not_mix() -> None:
    def body(t: Transport) -> list[int]:
        if t.rank == 0:
            finish(t, *[t.isend(bytes_of(value, 1), 1, tag) for value, tag in [(1, 7), (2, 8), (3, 7)]])
            return []
        values = []
        for tag in (8, 7, 7):
            buffer = bytes_of(0, 1)
            finish(t, t.irecv(buffer, 0, tag))
            values.append(int(buffer[0]))
        return values

    if MPI_SIZE in (0, 2):
        assert on_ranks(2, body)[1] == [2, 1, 3]


def test_receives_with_one_tag_are_filled_in_the_order_they_were_posted_however_they_are_tested() -> None:
    def body(t: Transport) -> list[int]:
        buffers = [bytes_of(0, nbytes) for nbytes in (1, 9, 3)]
        if t.rank == 0:
            finish(t, *[t.isend(bytes_of(value, b.nbytes), 1, 7) for value, b in enumerate(buffers, 1)])
            return []
        requests = [t.irecv(buffer, 0, 7) for buffer in buffers]
        finish_in_any_order(t, requests[::-1])
        return [int(buffer[-1]) for buffer in buffers]

    if MPI_SIZE in (0, 2):
        assert on_ranks(2, body)[1] == [1, 2, 3]


def test_a_probe_tells_source_and_length_and_takes_nothing() -> None:
    def body(t: Transport) -> None:
        if t.rank == 1:
            finish(t, t.isend(bytes_of(9, 33), 0, 0))
            return
        end = time.monotonic() + LIMIT_S
        while (found := t.probe(0)) is None:
            assert time.monotonic() < end
        assert found == t.probe(0) == (1, 33)
        assert t.probe(1) is None
        buffer = bytes_of(0, 33)
        finish(t, t.irecv(buffer, 1, 0))
        assert (buffer == 9).all()
        assert t.probe(0) is None

    on_ranks(2, body)


def test_a_duplicate_is_a_world_of_its_own() -> None:
    def body(t: Transport) -> tuple[int, int]:
        copy = copy_of(t)
        assert (copy.rank, copy.size) == (t.rank, t.size)
        values = bytes_of(0, 2)
        if t.rank == 0:
            finish(t, t.isend(bytes_of(1, 1), 1, 3), copy.isend(bytes_of(2, 1), 1, 3))
        elif t.rank == 1:
            finish(copy, copy.irecv(values[1:], 0, 3))
            finish(t, t.irecv(values[:1], 0, 3))
        copy.close()
        return int(values[0]), int(values[1])

    assert on_ranks(2, body)[1] == (1, 2)


@pytest.mark.parametrize(("size", "chosen"), [(2, (0, 1)), (2, (1, 0)), (4, (1, 3)), (4, (3, 1))])
def test_a_subset_counts_its_own_ranks_in_the_order_in_which_they_are_given(size: int, chosen: tuple[int, ...]) -> None:
    def body(t: Transport) -> tuple[int, int] | None:
        if t.rank not in chosen:
            return None
        pair = t.subset(chosen)
        buffer = bytes_of(0, 1)
        finish(pair, pair.irecv(buffer, 1 - pair.rank, 0), pair.isend(bytes_of(t.rank, 1), 1 - pair.rank, 0))
        place = pair.rank, int(buffer[0])
        pair.close()
        return place

    places = {rank: (place, chosen[1 - place]) for place, rank in enumerate(chosen)}
    assert on_ranks(size, body) == [places.get(rank) for rank in range(size)]


@pytest.mark.skipif(MPI_SIZE > 0, reason="an MPI abort ends the tests too")
def test_an_abort_ends_the_waiting_of_all_ranks() -> None:
    fabric = Fabric(2)
    waiting = fabric.endpoint(0)
    request = waiting.irecv(bytes_of(0, 1), 1, 0)
    assert not waiting.test(request)
    fabric.endpoint(1).abort(7)
    assert waiting.arrival.is_set()
    with pytest.raises(HorovodInternalError) as caught:
        waiting.test(request)
    assert str(caught.value) == "the job was aborted with code 7"


@pytest.mark.skipif(MPI_SIZE > 0, reason="MPI reports another length as an error of its own")
def test_a_message_of_another_length_is_an_error() -> None:
    fabric = Fabric(2)
    fabric.endpoint(1).isend(bytes_of(0, 3), 0, 0)
    with pytest.raises(HorovodInternalError) as caught:
        fabric.endpoint(0).test(fabric.endpoint(0).irecv(bytes_of(0, 4), 1, 0))
    assert str(caught.value) == "a message from rank 1 has 3 bytes, expected 4"
