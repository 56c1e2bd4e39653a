"""Value types that every layer may use: element types, operations, topology, settings.

Nothing here has side effects: no network, thread, clock or environment.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

#: Raw memory: a one-dimensional, contiguous uint8 array.
Bytes = NDArray[np.uint8]
#: The same, or the address of memory that its owner keeps alive.
Location = Bytes | int


class DType(enum.IntEnum):
    """Element types on the wire. The numbers are part of the wire format and of ``native/ocomm.h``."""

    UINT8 = 0
    INT8 = 1
    INT16 = 2
    INT32 = 3
    INT64 = 4
    BOOL = 5
    FLOAT16 = 6
    BFLOAT16 = 7
    FLOAT32 = 8
    FLOAT64 = 9
    UINT16 = 10

    @property
    def itemsize(self) -> int:
        """Returns the number of bytes per element."""
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        return DType.FLOAT16 <= self <= DType.FLOAT64

    @property
    def label(self) -> str:
        """Returns the name as NumPy, Torch and TensorFlow print it, such as ``float32``."""
        return self.name.lower()

    @classmethod
    def from_numpy(cls, dtype: np.dtype) -> DType:
        """Returns the element type of a NumPy dtype. ``bfloat16`` is recognised by name (ml_dtypes).

        Raises TypeError if the dtype is not supported.
        """
        try:
            return cls[dtype.name.upper()]
        except KeyError:
            raise TypeError(
                f"dtype {dtype.name} is not supported; use one of {', '.join(d.label for d in cls)}"
            ) from None


_ITEMSIZE = {
    DType.UINT8: 1,
    DType.INT8: 1,
    DType.INT16: 2,
    DType.INT32: 4,
    DType.INT64: 8,
    DType.BOOL: 1,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.UINT16: 2,
}


class ReduceOp(enum.IntEnum):
    """Reductions, with Horovod's numbers. BITWISE_OR is for uint8 masks of the runtime itself."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
    BITWISE_OR = 6

    @property
    def label(self) -> str:
        return self.name.capitalize()


@dataclass(frozen=True, slots=True)
class Topology:
    """The place of a rank in the job, on its host, and among the ranks with the same local rank on other hosts."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: tuple[str, ...]  # host of every rank

    @property
    def is_homogeneous(self) -> bool:
        """True if every host has the same number of ranks."""
        counts = {host: self.hosts.count(host) for host in self.hosts}
        return len(set(counts.values())) == 1


@dataclass(frozen=True)
class Nodes:
    """The ranks of a process set, grouped by the node they are on, and how the nodes reach each other.

    ``members[k]`` are the ranks of node k, ascending; nodes are ordered by their first ranks. Each node cuts its values
    into ``slices`` equal slices, as many as the smallest node has ranks. Rank ``members[k][s]`` is the worker of slice
    s in node k: it compresses the node's sum, and exchanges it with the workers of slice s in the other nodes. Further
    ranks of larger nodes only add to the sum and receive the result. The flat form is the case in which every node is
    one rank.

    With ``groups`` > 1 the workers of a slice reach each other in two hops: inside their group of nodes, then across
    groups.
    """

    members: tuple[tuple[int, ...], ...]
    groups: int = 1

    def __post_init__(self) -> None:
        ranks = [rank for node in self.members for rank in node]
        firsts = [node[0] for node in self.members if node]
        if (
            sorted(ranks) != list(range(len(ranks)))
            or not all(self.members)
            or firsts != sorted(firsts)
            or any(list(node) != sorted(node) for node in self.members)
        ):
            raise ValueError(f"nodes must share out the ranks 0..n-1 in ascending order, got {self.members}")
        if not 1 <= self.groups <= len(self.members):
            raise ValueError(f"{len(self.members)} nodes cannot be in {self.groups} groups")

    @classmethod
    def flat(cls, ranks: int) -> Nodes:
        """Returns nodes of one rank each."""
        return cls(tuple((rank,) for rank in range(ranks)))

    @classmethod
    def of_hosts(cls, hosts: Sequence[str]) -> Nodes:
        """Returns one node per host; ``hosts[r]`` is the host of rank r."""
        members: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            members.setdefault(host, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in members.values()))

    @property
    def is_flat(self) -> bool:
        return self.ranks == len(self.members)

    @cached_property
    def ranks(self) -> int:
        return sum(len(node) for node in self.members)

    @cached_property
    def slices(self) -> int:
        return min(len(node) for node in self.members)

    @property
    def weight(self) -> float:
        """Returns the factor for the sum of a node's ranks that makes the mean over nodes equal to the mean over
        ranks.
        """
        return len(self.members) / self.ranks

    def node_of(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of this rank's node."""
        return next(node for node in self.members if rank in node)

    def workers(self, rank: int) -> tuple[int, ...]:
        """Returns the workers of this rank's slice, one per node in the order of nodes; empty if the rank has no
        slice.
        """
        position = self.node_of(rank).index(rank)
        return tuple(node[position] for node in self.members) if position < self.slices else ()

    def sum_nbytes(self, nbytes: float, rank: int) -> float:
        """Returns the bytes that ``rank`` sends to other nodes when all ranks add up arrays of ``nbytes`` bytes.

        2 (N-1)/N * nbytes leave each of N nodes, from its workers; no other rank sends any. In the flat form, where
        every rank counts as a node, a ring sends as many. Such a sum goes directly; ``groups`` do not change it.
        """
        count = len(self.members)
        return 2 * (count - 1) / count * nbytes / self.slices if self.workers(rank) else 0.0

    def exchange_nbytes(self, nbytes: float, rank: int) -> float:
        """Returns the bytes, without headers, that ``rank`` sends to other nodes when arrays of ``nbytes`` bytes are
        exchanged as ``collectives.routes`` has it, on average over the workers.

        For N nodes in G groups, of c nodes each, 3 - 1/G - G/N - 1/N times ``nbytes`` leave a node, from its workers:
        (1 - 1/c) + (1 - 1/G) + (N-1)/N. The first two are scattered, inside groups and then across. With one group it
        is what ``sum_nbytes`` returns.
        """
        count = len(self.members)
        inside = 2 * (count - self.groups)
        bundled = count - sum(len(group) ** 2 for group in self.node_groups) / count
        return (inside + bundled + self.groups - 1) / count * nbytes / self.slices if self.workers(rank) else 0.0

    @cached_property
    def node_groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns the node numbers of each group, which are runs of nearly equal length."""
        count = len(self.members)
        bounds = [count * g // self.groups for g in range(self.groups + 1)]
        return tuple(tuple(range(low, high)) for low, high in pairwise(bounds))

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Returns the ranks that own a part of what is exchanged, in the order of their messages in a packed buffer."""
        return tuple(self.members[node][position] for position in range(self.slices) for node in self.wire_order)

    @cached_property
    def wire_order(self) -> tuple[int, ...]:
        """Returns node numbers in the order of their messages in a packed buffer: by the place in the group, and larger
        groups first, so that ``relayed`` is what it is.
        """
        places = sorted(
            (position, -len(group), node) for group in self.node_groups for position, node in enumerate(group)
        )
        return tuple(node for _, _, node in places)

    def relayed(self, group: int, position: int) -> tuple[int, ...]:
        """Returns the nodes to which the node at ``position`` in a group passes on the messages of its whole group.

        They are a run of ``wire_order``, so that messages through one relay are adjacent. The runs of a group have
        equal lengths, within one. Each has one node of the group, its relay, because groups have equal sizes, within
        one, and the nodes at one place of groups of one size are adjacent.
        """
        count, size = len(self.members), len(self.node_groups[group])
        return self.wire_order[count * position // size : count * (position + 1) // size]

    def relay(self, group: int, node: int) -> int:
        """Returns the node of a group that passes on the messages of the group to ``node``: the one in whose
        ``relayed`` it is.
        """
        size = len(self.node_groups[group])
        return self.node_groups[group][((self._wire_places[node] + 1) * size - 1) // len(self.members)]

    @cached_property
    def _wire_places(self) -> dict[int, int]:
        return {node: place for place, node in enumerate(self.wire_order)}


class Flag(enum.IntFlag):
    """What a rank tells all others before a step is committed; the flags of all ranks are combined by OR."""

    NON_FINITE = 1  # a scale was NaN or Inf
    CHANGED = 2  # a gradient, or what it was compressed with, changed after it was posted: do the step again
    SKIP = 4  # this rank does not take the step (loss scaling found an overflow, or zero_grad() came instead)
    RAISED = 8  # this rank raised an exception between backward and step()
    UNPOSTED = 16  # a gradient came after its bucket had been posted (second backward)
    EDITED = 32  # beside CHANGED: the script has changed a gradient, and no GradScaler
    AVERAGE = 64  # an average that this rank alone has is NaN or Inf
    IDLE = 128  # gradients in a step without a vote, since the last one, were not finite: it changed nothing here
    RELEASED = 256  # this rank has no gradients any more, so it cannot do the step again
    HYPER = 512  # beside CHANGED: hyperparameters that gradients are compressed with have changed


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user can set. ``ocomm.config`` reads the values from the environment.

    Units are in the names or in the comments.
    """

    fusion_threshold: int = 128 * 1024 * 1024  # bytes; 0: no fusion
    group_fusion: bool = True  # False: the tensors of a group fuse with each other only
    cycle_time_ms: float = 1.0  # how long requests are collected before they are announced, unless someone waits
    cache_capacity: int = 1024  # names; 0: no response cache
    segment_nbytes: int = 8 * 1024 * 1024  # largest piece of an exchange
    window: int = 0  # segments in flight per channel; 0: ``collectives.pipeline.window``
    hierarchical_allreduce: bool = True  # dense sums inside hosts first, where several have several ranks each
    direct_peers: int = 63  # a compressed exchange with more peers than this takes two hops
    scratch_nbytes: int = 512 * 1024 * 1024  # idle fusion and staging buffers kept
    idle_ms: float = 5.0  # longest sleep of the background thread while nothing is queued
    spin_us: float = 50.0  # how long it spins for a waiting thread before it yields its core between looks
    stall_check: bool = True
    stall_check_s: float = 60.0  # 0: no stall check
    stall_raise: bool = False  # a stall raises StallError instead of a warning
    deadlock_s: float = 10.0  # how long it must be certain that no rank can go on; 0: a deadlock is no error
    stall_shutdown_s: float = 1800.0  # 0: never give up on a rank that is alive
    replica_check_steps: int = 64  # all parameters are compared between the ranks once in this many steps; 0: never
    peer_timeout_s: float = 60.0  # silence after which a rank counts as dead; 0: never
    start_timeout_s: float = 120.0
    torch_env: bool = True  # init() sets RANK, WORLD_SIZE, ... where they are missing
    engine: str = "native"  # or "python", the slow one that it must equal
    cuda_aware: str = "auto"  # "1": MPI is given addresses on CUDA devices, "0": it is not
    nccl: str = "auto"  # "1": an error if GPUs of a host cannot use it, "0": it is not used
    kernels: str = "cpu"  # or "reference"
    kernel_threads: int = 1  # number of threads that share a large loop, with the one that calls it
    log_level: str = ""  # "": notice, or what the script's own configuration of logging says
    thread_affinity: tuple[int, ...] = ()  # core of the background thread, by local rank; empty: any
    timeline: str = ""  # file of rank 0's timeline; "": none
    timeline_mark_cycles: bool = False
    metrics_port: str = ""  # where rank 0 answers GET /metrics, PORT on loopback or ADDRESS:PORT; "": nowhere
    watch: bool = False  # rank 0 tells the supervisor what all ranks count
    elastic_folder: str = ""  # where commits of elastic states are kept on each host; "": in memory only
    elastic_generation: int = 0  # number of this generation, from 1; 0: nobody supervises the job
    elastic_supervisor: tuple[str, ...] = ()  # addresses HOST:PORT of the supervisor, which are tried in turn

    autotune: tuple[str, ...] = ()  # the settings that are tuned while the job runs
    autotune_log: str = ""  # CSV file of rank 0; "": none
    autotune_warmup_samples: int = 3
    autotune_steps_per_sample: int = 10
    autotune_max_points: int = 20
    autotune_noise: float = 0.8  # noise of a score, as a fraction of the spread of scores

    #: Settings that must be equal on all ranks, because they change what is sent when.
    AGREED: ClassVar[tuple[str, ...]] = (
        "fusion_threshold",
        "cache_capacity",
        "segment_nbytes",
        "hierarchical_allreduce",
        "direct_peers",
        "replica_check_steps",
        "torch_env",
        "metrics_port",
    )
