"""Random delays between the threads of a job change no bit: in the network, in backward, and in Python's scheduler."""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

import ocomm
from benchmarks.numpy_training import KINDS, Training, hash_of
from ocomm.session import Session
from ocomm.transport.base import Request, Transport
from ocomm.types import Bytes
from tests.tiers import few
from tests.worlds import MPI_SIZE, run_ranks

pytestmark = pytest.mark.skipif(bool(MPI_SIZE), reason="C's engine calls MPI itself: the network is that of threads")

#: Into the compressed stage of each optimizer, and over a sync of each that steps locally.
STEPS = 11
RANKS = 2


def maybe_wait(draw: random.Random, share: float) -> None:
    """Gives way to the other threads, for up to a millisecond, in ``share`` of all calls."""
    if draw.random() < share:
        time.sleep(draw.choice([0.0, 0.0, draw.uniform(0.0, 1e-3)]))


class Delayed:
    """A transport whose calls take a random time each. Used by one thread, as any transport."""

    def __init__(self, inner: Transport, draw: random.Random) -> None:
        self.inner, self.draw = inner, draw
        self.rank, self.size, self.arrival = inner.rank, inner.size, inner.arrival

    def isend(self, buffer: Bytes, dest: int, tag: int) -> Request:
        maybe_wait(self.draw, 0.1)
        return self.inner.isend(buffer, dest, tag)

    def irecv(self, buffer: Bytes, source: int, tag: int) -> Request:
        maybe_wait(self.draw, 0.1)
        return self.inner.irecv(buffer, source, tag)

    def test(self, request: Request) -> bool:
        # What has not arrived yet is as good as what nobody has looked at.
        return self.draw.random() >= 0.3 and self.inner.test(request)

    def probe(self, tag: int) -> tuple[int, int] | None:
        return None if self.draw.random() < 0.3 else self.inner.probe(tag)

    def duplicate(self) -> Request:
        return self.inner.duplicate()

    def duplicated(self, request: Request) -> Transport | None:
        copy = self.inner.duplicated(request)
        return None if copy is None else Delayed(copy, random.Random(self.draw.random()))

    def subset(self, ranks: Sequence[int]) -> Transport:
        return Delayed(self.inner.subset(ranks), random.Random(self.draw.random()))

    def abort(self, code: int) -> None:
        self.inner.abort(code)

    def close(self) -> None:
        self.inner.close()


def train(half: int, seed: int | None) -> list[list[str]]:
    """Trains with every other optimizer, with allreduces under way meanwhile.

    ``half``: 0 or 1, which of them. The delays are those of ``seed``; None for none. Returns each rank's hashes after
    every step.
    """

    def body(session: Session) -> list[str]:
        rank = session.require_topology().rank
        draw = random.Random(f"{seed} of {rank}")
        trainings = [Training(session, name) for name in list(KINDS)[half::2]]
        found = []
        for number in range(1, STEPS + 1):
            names = list(range(6))
            if seed is not None:
                draw.shuffle(names)
            values = {name: np.full(700, number + 0.1 * name + rank, np.float32) for name in names}
            handles = {name: ocomm.allreduce_async(values[name], name=f"value.{name}", op=ocomm.Sum) for name in names}
            for training in trainings:
                training.step(number, (lambda: None) if seed is None else functools.partial(maybe_wait, draw, 0.2))
            sums = [ocomm.synchronize(handles[name]) for name in sorted(names)]
            found.append(hash_of([sums, [training.hashes() for training in trainings]]))
        return found

    def network(endpoint: Transport) -> Transport:
        return endpoint if seed is None else Delayed(endpoint, random.Random(f"{seed} at {endpoint.rank}"))

    interval_s = sys.getswitchinterval()
    try:
        if seed is not None:
            sys.setswitchinterval(random.Random(seed).choice([1e-6, 1e-5, 1e-4, 1e-3]))
        return run_ranks(RANKS, body, network=network)
    finally:
        sys.setswitchinterval(interval_s)


@functools.cache
def undelayed(half: int) -> Any:
    return train(half, None)


@pytest.mark.parametrize("seeds", few([range(12), range(12, 200)], [range(12)]), ids=["a dozen", "the rest of 200"])
def test_every_optimizer_has_the_same_bits_whatever_is_late(seeds: Iterable[int]) -> None:
    for seed in seeds:
        assert train(seed % 2, seed) == undelayed(seed % 2), f"seed {seed}"
