"""Measures the cost model's numbers on a cluster: runs as ranks of a job there, on all of them at once.

A dense sum of ``NUMEL`` elements gives the rate of the cables, one over the ranks of a node the rate inside nodes, a
small compressed exchange the time of a message, and the kernels on all ranks at once the codec's times. Takes about ten
seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from ocomm import api
from ocomm.bench._lab import PAYLOAD_FRACTION
from ocomm.bench.kernels import Bench, elapsed
from ocomm.operations import ProcessSet, add_process_set, global_process_set, remove_process_set
from ocomm.predict.model import DENSE_NBYTES, CodecTimes, Network

#: Elements of the large sum, 32 MB, and of the kernels' arrays.
NUMEL = 8_000_000
_KERNEL_NUMEL = 4 << 20
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Probe:
    """The measurements, which are the same on all ranks."""

    nodes: int
    ranks_per_node: int
    network: Network
    codec: CodecTimes


def measure(numel: int = NUMEL) -> Probe:
    """Measures. Collective over all ranks of the job. Raises ValueError unless every node has the same number of
    ranks.
    """
    if not api.is_homogeneous():
        raise ValueError("--probe needs equally many ranks on every node; start the job with as many slots everywhere")
    nodes, per_node, ranks = api.cross_size(), api.local_size(), api.size()
    codec = _codec()
    values = np.zeros(numel, np.float32)
    node_rate, rate, message_s = Network(1.0).node_rate, 1e12, Network(1.0).message_s
    if per_node > 1:
        node_ranks = [rank for rank, cross in enumerate(api.allgather_object(api.cross_rank())) if cross == 0]
        team = add_process_set(node_ranks) if nodes > 1 else global_process_set
        inside_s = _slowest(lambda: _sum(values, "inside", team), team.included())
        node_rate = _share(numel, per_node) / max(inside_s - codec.dense * numel, inside_s / 10)
        if nodes > 1:
            remove_process_set(team)
    if nodes > 1:
        total_s = _slowest(lambda: _sum(values, "cables", global_process_set))
        spent_s = codec.dense * numel + _share(numel, per_node) / node_rate * (per_node > 1)
        rate = 8 * _share(numel, nodes) / max(total_s - spent_s, total_s / 10) / PAYLOAD_FRACTION
        small = np.ones(1024, np.float32)

        def exchange() -> object:
            return api.compressed_allreduce(small, name="predict.message", hierarchical=False)

        message_s = _slowest(exchange, rounds=50) / (2 * (ranks - 1))
    return Probe(nodes, per_node, Network(rate, message_s, node_rate), codec)


def _share(numel: int, parts: int) -> float:
    """Returns the bytes of a ring, in one direction."""
    return 2 * 4 * numel * (parts - 1) / parts


def _sum(values: np.ndarray, name: str, ranks: ProcessSet) -> None:
    api.allreduce_(values, name=f"predict.{name}", op=api.Sum, process_set=ranks)


def _codec() -> CodecTimes:
    """Returns the codec's times on the slowest rank, while all ranks are at work."""
    bench = Bench(_KERNEL_NUMEL, None, with_numpy=False)
    works = {case.kernel: next(iter(case.forms.values())) for case in bench.cases([2])}
    moved, axpy = bench.yardsticks["axpy"]
    compress = _slowest(works["compress_momentum, from 1 bit"]) / _KERNEL_NUMEL
    average = _slowest(works["average of 2 ranks"]) / _KERNEL_NUMEL / 2
    return CodecTimes(compress, average, DENSE_NBYTES * _slowest(axpy) / moved)


def _slowest(work: Callable[[], object], takes_part: bool = True, rounds: int = _ROUNDS) -> float:
    """Returns the median seconds over ``rounds`` on the slowest rank, without the first round. Collective."""
    seconds = []
    for _ in range(rounds + 1):
        api.barrier()
        seconds.append(elapsed(work) if takes_part else 0.0)
    return float(api.allreduce(np.array([median(seconds[1:])]), op=api.Max, name="predict.slowest")[0])
