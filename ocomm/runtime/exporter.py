"""Collects the counters of all ranks on rank 0, and hands them on: to a port for Prometheus, and to ocommrun.

Every rank sends its counters with its sign of life, every two seconds, on the background thread. Training counts
nothing for this that it does not count anyway. There is an exporter only if somebody wants the counters.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ocomm import json_values
from ocomm.collectives.waiting import Wait
from ocomm.negotiation.coordinator import Stall
from ocomm.runtime.supervisor_client import SupervisorClient
from ocomm.telemetry.counters import (
    JobCounters,
    OptimizerCounters,
    RankCounters,
    Stalled,
    Waiting,
    limited,
    parse_address,
    prometheus,
    read_rank,
    spelled,
)
from ocomm.telemetry.log import NOTICE
from ocomm.types import Settings, Topology

_log = logging.getLogger("ocomm")
#: Seconds for ocommrun to take the last counters.
_CLOSE_S = 2.0


class Exporter:
    """One rank's part. ``sample`` and ``hear`` belong to the background thread; ``job`` may be called from any.

    Args:
        rank: This rank.
        size: The number of ranks.
        counters: Returns this rank's counters. Called on the background thread, beside the user's.
        clock: Monotonic, in seconds.
    """

    def __init__(self, rank: int, size: int, counters: Callable[[], RankCounters], clock: Callable[[], float]) -> None:
        self._rank = rank
        self._size = size
        self._counters = counters
        self._clock = clock
        self._heard: dict[int, tuple[float, RankCounters]] = {}  # by rank, on rank 0; single dict operations only
        self._port: Any = None  # a MetricsPort
        self._news = threading.Event()
        self._closing = False
        self._teller: threading.Thread | None = None

    def open(self, address: tuple[str, int] | None, tell: Callable[[JobCounters], None] | None) -> None:
        """Begins to hand counters on; on rank 0.

        Args:
            address: Where to listen for Prometheus; None for nowhere. If nobody can listen there, that is a warning.
            tell: Called with the counters whenever there are new ones, on a thread of its own, because it may take
                long; None for nobody.
        """
        if tell is not None:
            self._teller = threading.Thread(target=self._tell, args=(tell,), name="ocomm-counters", daemon=True)
            self._teller.start()
        if address is None:
            return
        # Few jobs need http.server, and its import is a tenth of what a rank without a framework imports.
        from ocomm.telemetry.metrics_port import MetricsPort

        try:
            self._port = MetricsPort(*address, lambda: prometheus(self.job()))
        except OSError as error:
            _log.warning(
                "OCOMM_METRICS_PORT: nobody can listen on %s:%d: %s. Training goes on without it; choose another port.",
                *address,
                error.strerror or error,
            )
        else:
            _log.log(NOTICE, "counters of all ranks: http://%s:%d/metrics", self._port.host, self._port.port)

    def sample(self) -> bytes:
        """Returns this rank's counters as they travel to rank 0; rank 0 keeps its own, and returns nothing."""
        counters = limited(self._counters())
        if self._rank != 0:
            return json.dumps(spelled(counters)).encode()
        self._heard[0] = self._clock(), counters
        self._news.set()
        return b""

    def hear(self, source: int, payload: bytes) -> None:
        """Takes in what ``sample`` has returned on rank ``source``; on rank 0. Raises ValueError for anything else."""
        counters = read_rank(json_values.parse(payload), self._size)
        if counters.rank != source:
            raise ValueError(f"counters of rank {counters.rank}")
        self._heard[source] = self._clock(), counters

    def job(self) -> JobCounters:
        """Returns the latest counters of all ranks that rank 0 has heard of."""
        now_s = self._clock()
        heard = sorted(self._heard.copy().items())
        ranks = [dataclasses.replace(counters, silent_s=max(now_s - then_s, 0.0)) for _, (then_s, counters) in heard]
        return JobCounters(now_s, self._size, tuple(ranks))

    def close(self) -> None:
        """Hands the last counters on, and ends the port."""
        self._closing = True
        self._news.set()
        if self._teller is not None:
            self._teller.join(_CLOSE_S)
        if self._port is not None:
            self._port.close()

    def _tell(self, tell: Callable[[JobCounters], None]) -> None:
        is_last = False
        while not is_last:
            self._news.wait()
            self._news.clear()
            is_last = self._closing  # there may be news since the last time, so it is told once more
            tell(self.job())


def open_exporter(
    topology: Topology,
    settings: Settings,
    supervisor: SupervisorClient | None,
    clock: Callable[[], float],
    *,
    waits: Callable[[], Iterable[Wait]],
    stalls: Callable[[], Iterable[Stall]],
    optimizers: Callable[[], Iterable[OptimizerCounters]],
) -> Exporter | None:
    """Returns this rank's exporter, which on rank 0 begins to hand counters on. Not collective.

    Args:
        topology: The place of this rank in the job.
        settings: The same on all ranks, as far as they say who wants counters.
        supervisor: Who is told of the job's counters if ``settings.watch``; None for nobody.
        clock: Monotonic, in seconds.
        waits: Returns what this rank's threads wait for. This and the following are called on the background thread.
        stalls: Returns what stalls in process sets that this rank coordinates.
        optimizers: Returns the counters of this rank's optimizers.

    Returns:
        The exporter; None if nobody wants the counters.
    """
    told = supervisor if settings.watch else None
    if not settings.metrics_port and told is None:
        return None
    rank = topology.rank
    host = topology.hosts[rank]

    def counters() -> RankCounters:
        waiting = tuple(Waiting(wait.what, wait.late) for wait in waits())
        stalled = tuple(Stalled(stall.name, stall.waited_s, stall.missing) for stall in stalls())
        return RankCounters(rank, host, tuple(optimizers()), waiting, stalled)

    def tell(job: JobCounters) -> None:
        if told is not None:
            told.say("counters", job=spelled(job))

    exporter = Exporter(rank, topology.size, counters, clock)
    if rank == 0:
        address = parse_address(settings.metrics_port) if settings.metrics_port else None
        exporter.open(address, None if told is None else tell)
    return exporter
