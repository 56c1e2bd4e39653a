"""Measures the cost model's numbers on a cluster: runs as ranks of a job there, on all of them at once.

Dense sums of up to ``NUMEL`` elements give the rate of the cables, one over the ranks of a node the rate inside nodes,
a small compressed exchange the time of a round and of its messages, and the kernels on all ranks at once the codec's
times. Takes about ten seconds on any network, and twice that with a delay of 100 ms: sums grow only until one takes
``ENOUGH_S`` longer than the first.
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
#: Seconds of a sum, latency not counted, that tell a rate well enough.
ENOUGH_S = 0.5
#: Rounds of what is measured: of short work, of what takes _SLOW_S, of what takes _LONG_S.
_ROUNDS, _SLOW_ROUNDS, _LONG_ROUNDS = 5, 3, 1
_SLOW_S, _LONG_S = 0.05, 0.1


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

    def slowest_s(numel: int) -> float:
        return _slowest(partial(_sum, values[:numel], f"cables.{numel}", global_process_set))

    (less, less_s), (more, more_s) = _grown(slowest_s, values.size)
    spent_s = codec.dense * (more - less) + _share(more - less, per_node) / node_rate * (per_node > 1)
    taken_s = more_s - less_s
    return 8 * _share(more - less, nodes) / max(taken_s - spent_s, taken_s / 10, more_s / 100) / PAYLOAD_FRACTION


def _grown(seconds_of: Callable[[int], float], largest: int) -> tuple[tuple[int, float], tuple[int, float]]:
    """Returns the last two sizes, with their seconds, of ever larger sums: the larger one takes long enough, without
    what the first one waits for, to tell the rate; or it is of ``largest`` elements.
    """
    less = min(_FIRST_NUMEL, largest // 2)
    less_s = first_s = seconds_of(less)
    while True:
        more = min(less * _GROWTH, largest)
        more_s = seconds_of(more)
        if more_s - first_s >= ENOUGH_S or more == largest:
            return (less, less_s), (more, more_s)
        less, less_s = more, more_s


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
    """Returns the codec's times on the slowest rank, while all ranks are at work. Collective."""
    bench = Bench(_KERNEL_NUMEL, None, with_numpy=False)
    works = {case.kernel: next(iter(case.forms.values())) for case in bench.cases([2])}
    moved, axpy = bench.yardsticks["axpy"]
    label = OF_BITS[8].label
    kernels = (
        works["compress_momentum, from 1 bit"],
        works["average of 2 ranks"],
        axpy,
        *(works[f"{loop}, {label}"] for loop in ("compress_codes", "average_codes of 2 ranks", "unpack_codes")),
    )
    api.barrier()
    own = [median([elapsed(kernel) for _ in range(1 + _ROUNDS)][1:]) for kernel in kernels]
    slowest = api.allreduce(np.array(own), op=api.Max, name="predict.kernels") / _KERNEL_NUMEL
    compress, average, dense, compress_codes, average_codes, unpack_codes = map(float, slowest)
    codes = compress_codes + average_codes / 2 + unpack_codes
    return CodecTimes(compress, average / 2, DENSE_NBYTES * dense * _KERNEL_NUMEL / moved, codes=codes)


def _slowest(work: Callable[[], object], takes_part: bool = True, rounds: int = _ROUNDS) -> float:
    """Returns the median seconds over ``rounds`` on the slowest rank, without the first round; over fewer if that was
    slow. Collective.
    """
    (first,) = _rounds(work, takes_part, 1)
    if first > _SLOW_S:
        rounds = _LONG_ROUNDS if first > _LONG_S else min(rounds, _SLOW_ROUNDS)
    return median(_rounds(work, takes_part, rounds))


def _rounds(work: Callable[[], object], takes_part: bool, rounds: int) -> list[float]:
    """Returns the seconds of each round on its slowest rank. Collective."""
    seconds = np.zeros(rounds)
    for number in range(rounds):
        api.barrier()
        seconds[number] = elapsed(work) if takes_part else 0.0
    return list(api.allreduce(seconds, op=api.Max, name=f"predict.slowest.{rounds}"))
