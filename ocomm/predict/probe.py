"""Measures the cost model's numbers on a cluster: runs as ranks of a job there, on all of them at once.

Dense sums of up to ``NUMEL`` elements give the rate of the cables, one over the ranks of a node the rate inside nodes,
a small compressed exchange the time of a round and of its messages, and the kernels on all ranks at once the codec's
times. Takes about ten seconds on any network: sums grow only until one takes ``ENOUGH_S``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from ocomm import api
from ocomm.bench._lab import PAYLOAD_FRACTION
from ocomm.bench.kernels import Bench, elapsed
from ocomm.compression.codecs import OF_BITS
from ocomm.operations import ProcessSet, add_process_set, global_process_set, remove_process_set
from ocomm.predict.model import DENSE_NBYTES, CodecTimes, Network

#: Elements of the large sum, 32 MB, and of the kernels' arrays.
NUMEL = 8_000_000
_KERNEL_NUMEL = 4 << 20
#: The first sum, and how much larger the next one is.
_FIRST_NUMEL, _GROWTH = 4096, 8
#: Seconds of a sum that tell a rate well enough.
ENOUGH_S = 0.5
_ROUNDS = 5
#: Work that takes longer is measured in fewer rounds.
_SLOW_S = 0.05


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
    round_s = 0.0
    if nodes > 1:
        rate = _rate(values, nodes, per_node, node_rate, codec)
        round_s, message_s = _round(ranks)
    return Probe(nodes, per_node, Network(rate, message_s, node_rate, round_s=round_s), codec)


def _rate(values: np.ndarray, nodes: int, per_node: int, node_rate: float, codec: CodecTimes) -> float:
    """Returns the bits per second of a cable: what a larger sum takes longer than a smaller one, without latency."""
    sums: list[tuple[int, float]] = []
    numel = min(_FIRST_NUMEL, values.size // 2)
    while True:
        seconds = _slowest(partial(_sum, values[:numel], f"cables.{numel}", global_process_set))
        sums.append((numel, seconds))
        if len(sums) > 1 and (seconds >= ENOUGH_S or numel == values.size):
            break
        numel = min(numel * _GROWTH, values.size)
    (less, less_s), (more, more_s) = sums[-2:]
    spent_s = codec.dense * (more - less) + _share(more - less, per_node) / node_rate * (per_node > 1)
    taken_s = more_s - less_s
    return 8 * _share(more - less, nodes) / max(taken_s - spent_s, taken_s / 10, more_s / 100) / PAYLOAD_FRACTION


def _round(ranks: int) -> tuple[float, float]:
    """Returns the seconds of a round of answers, and of a message: what a small exchange takes is both."""
    small = np.ones(1024, np.float32)

    def exchange() -> object:
        return api.compressed_allreduce(small, name="predict.message", hierarchical=False)

    seconds = _slowest(exchange, rounds=50)
    message_s = min(seconds / (2 * (ranks - 1)), Network(1.0).message_s)
    return seconds - 2 * (ranks - 1) * message_s, message_s


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
    label = OF_BITS[8].label
    loops = {"compress_codes": 1.0, "average_codes of 2 ranks": 0.5, "unpack_codes": 1.0}
    codes = sum(part * _slowest(works[f"{loop}, {label}"]) for loop, part in loops.items()) / _KERNEL_NUMEL
    return CodecTimes(compress, average, DENSE_NBYTES * _slowest(axpy) / moved, codes=codes)


def _slowest(work: Callable[[], object], takes_part: bool = True, rounds: int = _ROUNDS) -> float:
    """Returns the median seconds over ``rounds`` on the slowest rank, without the first round; over fewer if that was
    slow. Collective.
    """
    first = _once(work, takes_part)
    if first > _SLOW_S:
        rounds = 1 if first > ENOUGH_S else min(rounds, 3)
    return median(_once(work, takes_part) for _ in range(rounds))


def _once(work: Callable[[], object], takes_part: bool) -> float:
    """Returns the seconds of one round on the slowest rank. Collective."""
    api.barrier()
    seconds = elapsed(work) if takes_part else 0.0
    return float(api.allreduce(np.array([seconds]), op=api.Max, name="predict.slowest")[0])
