"""What grows with the number of ranks: messages, bytes and processor time of a step; and jobs of up to 256 processes.

    python -m benchmarks.scale [--ranks 64 ... 4096] [--processes 2 ... 256] [--into FOLDER]

Negotiation: the real caches, nodes of the tree and coordinator of all ranks in one process, which hand each other the
messages that would travel; 160 tensors, whose requests are known after two steps. Exchange: the real plans of one rank
per host. Processes: real jobs on this machine (``benchmarks.many_ranks``). Writes scale.md and scale.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from tabulate import tabulate

from benchmarks import plots
from benchmarks.turns import MARK
from ocomm.collectives.compressed import vote
from ocomm.collectives.error_feedback import OneBitAllreduce
from ocomm.collectives.plan import Plan
from ocomm.collectives.python_engine import PythonChannel, PythonEngine
from ocomm.collectives.routes import arrange, vote_groups
from ocomm.collectives.segment_header import SegmentHeaders
from ocomm.collectives.waiting import Watch
from ocomm.kernels import cpu_kernels
from ocomm.negotiation.cache import RankCache
from ocomm.negotiation.coordinator import Coordinator
from ocomm.negotiation.request import Kind, Request, read_responses, write_responses
from ocomm.negotiation.tree import Aggregator, Ranges, Tree, read_aggregate
from ocomm.transport.local import Fabric
from ocomm.types import DType, Nodes, Settings

TENSORS = 160
STEPS = 5
PARAMETERS = 100_000_000
DIRECT_PEERS = Settings().direct_peers
WATCH = Watch(failure=lambda: None, departed=dict, stall_check_s=60.0)
#: Columns of an exchange, and how their numbers are written.
EXCHANGE = {"messages": ".0f", "segments": ".0f", "bytes_per_parameter": ".3f"}
EXCHANGE_HEAD = ("exchange, messages", "segments", "B/parameter")
#: Columns of a job: what ``benchmarks.many_ranks`` says, and the whole time.
JOB_HEAD = ("processes", "start, s", "optimizer, s", "50 steps, s", "own memory, MiB", "different checksums", "all, s")
RANKS = (2, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PROCESSES = (2, 4, 8, 16, 32, 64, 128, 256)


@dataclass
class Cost:
    """What one rank does for negotiation in one step."""

    messages: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def count(self, message: bytes) -> None:
        """Notes a message that this rank sends or receives."""
        self.messages += 1
        self.nbytes += len(message)


@dataclass
class Negotiation:
    """The negotiation of a process set of ``size`` ranks, whose messages are handed over at once."""

    size: int
    direct_peers: int
    costs: list[Cost] = field(init=False)

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(range(self.size), 1 << 26, 1024)
        self.caches = [RankCache() for _ in range(self.size)]
        self.trees = [Tree.of(rank, self.size, self.direct_peers) for rank in range(self.size)]
        self.parents = [tree.parent for tree in self.trees]
        self.children = [[child.start for child in tree.children] for tree in self.trees]
        inner = [tree for tree in self.trees if tree.rank and tree.children]
        self.nodes = {tree.rank: Aggregator(tree.rank, tree.children) for tree in inner}
        self.requests = [Request(Kind.ALLREDUCE, f"layer {n}.weight", DType.FLOAT32, (1000,)) for n in range(TENSORS)]

    def step(self) -> None:
        """Every rank asks for all tensors, and hears the answer."""
        self.costs = [Cost() for _ in range(self.size)]
        for rank in reversed(range(self.size)):  # children before parents
            message = self._timed(rank, lambda rank=rank: self.caches[rank].announcement(self.requests))
            if self._is_leaf(rank):
                self._send(rank, message)
            else:
                self._hear(rank, (range(rank, rank + 1),), message)
            if rank in self.nodes:
                aggregate = self._timed(rank, lambda rank=rank: self.nodes[rank].take(0.0))
                assert aggregate and not self.nodes[rank].is_holding
                self._send(rank, aggregate)
        responses = self._timed(0, self.coordinator.decide)
        answer = self._timed(0, lambda: write_responses(tuple(responses)))
        assert sum(len(response.names) for response in responses) == TENSORS
        for rank in range(self.size):
            self._timed(rank, lambda rank=rank: self._execute(rank, answer))
            for child in self.children[rank]:
                self.costs[rank].count(answer)
                self.costs[child].count(answer)

    def _is_leaf(self, rank: int) -> bool:
        return rank != 0 and rank not in self.nodes

    def _send(self, rank: int, message: bytes) -> None:
        parent = self.parents[rank]
        self.costs[rank].count(message)
        self.costs[parent].count(message)
        if self._is_leaf(rank):
            self._hear(parent, (range(rank, rank + 1),), message)
        else:
            for ranges, announcement in read_aggregate(message):
                self._hear(parent, ranges, announcement)

    def _hear(self, rank: int, ranges: Ranges, message: bytes) -> None:
        if rank == 0:
            ranks = ranges[0] if len(ranges) == 1 else [rank for each in ranges for rank in each]
            self._timed(0, lambda: self.coordinator.receive(ranks, message, 0.0))
        else:
            self._timed(rank, lambda: self.nodes[rank].add(ranges, message, 0.0))

    def _execute(self, rank: int, answer: bytes) -> None:
        cache = self.caches[rank]
        for response in read_responses(answer):
            for position, number in enumerate(response.cache_ids):
                if number >= 0:
                    name = response.names[position]
                    cache.learn(name, number, next(r for r in self.requests if r.name == name))

    def _timed(self, rank: int, call: Any) -> Any:
        begin = time.perf_counter()
        result = call()
        self.costs[rank].seconds += time.perf_counter() - begin
        return result


def negotiation(size: int, direct_peers: int) -> dict[str, float]:
    """Returns, for a step whose requests are known, the most that any rank has of each cost, and the coordinator's."""
    job = Negotiation(size, direct_peers)
    for _ in range(STEPS):
        job.step()
    return {
        "messages": max(cost.messages for cost in job.costs),
        "bytes": max(cost.nbytes for cost in job.costs),
        "coordinator_ms": job.costs[0].seconds * 1e3,
        "others_ms": max(cost.seconds for cost in job.costs[1:]) * 1e3,
    }


def nodes_of(ranks: int, per_node: int, direct_peers: int = DIRECT_PEERS) -> Nodes:
    """Returns how a job of ``ranks`` on hosts of ``per_node`` arranges itself."""
    return arrange([f"host {rank // per_node}" for rank in range(ranks)], "auto", direct_peers)


def plans_of(rank: int, nodes: Nodes, numel: int, block_size: int, most_nbytes: int) -> tuple[Plan, Plan]:
    """Returns this rank's plans of an exchange of ``numel`` elements and of its vote."""
    engine = PythonEngine(cpu_kernels(), threading.Event())
    channel: PythonChannel = engine.open_channel(Fabric(nodes.ranks).endpoint(rank), 1)
    ranks = range(nodes.ranks)
    exchange = OneBitAllreduce(channel, "x", (numel,), rank, ranks, nodes, most_nbytes, WATCH, block_size=block_size)
    (headers,) = SegmentHeaders(rank, [(0, 0)], *(np.zeros(1, kind) for kind in (np.uint32, np.uint32, np.int64)))
    return exchange._prepared[0], vote(rank, vote_groups(nodes), headers)


def messages_of(rank: int, nodes: Nodes) -> tuple[int, int]:
    """Returns the messages that leave this rank's node in one fused exchange of one segment in which every rank owns a
    part, and in its vote.
    """
    plans = plans_of(rank, nodes, 16 * nodes.ranks, 16, 1 << 20)  # every owner a block
    assert [len(plan.segments) for plan in plans] == [1, 1]
    return len(_leaving(plans[0], nodes.node_of(rank))), len(_leaving(plans[1], nodes.node_of(rank)))


def _leaving(plan: Plan, node: Sequence[int]) -> list[int]:
    """Returns the bytes of each message."""
    stages = [stage for stages in plan.segments for stage in stages]
    return [message.buffer.nbytes for stage in stages for message in stage.sends if message.peer not in node]


def exchange(size: int) -> dict[str, float]:
    """Returns what leaves a rank that has a host: messages per segment, with the vote, segments, and bytes per
    parameter.
    """
    nodes = nodes_of(size, 1)
    plan, voted = plans_of(0, nodes, PARAMETERS, 4096, Settings().segment_nbytes)
    sent = _leaving(plan, (0,))
    return {
        "messages": len(sent) / len(plan.segments) + len(_leaving(voted, (0,))),
        "segments": len(plan.segments),
        "bytes_per_parameter": sum(sent) / PARAMETERS,
    }


def job(ranks: int) -> dict[str, float]:
    """Starts a job of real processes on this machine, and returns what its rank 0 says.

    Raises CalledProcessError if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        words = [sys.executable, "-m", "ocomm.launch", "-np", str(ranks)]
        command = [*words, sys.executable, "-m", "benchmarks.many_ranks", str(file)]
        began = time.time()
        environ = {**os.environ, "BEGAN": repr(began), "OCOMM_START_TIMEOUT": "300"}
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env=environ, timeout=900, stderr=subprocess.PIPE)
        found: dict[str, float] = json.loads(file.read_text())
        return {**found, "whole_s": time.time() - began}


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Returns the exponent a of the power law n^a that fits best."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def picture(sizes: Sequence[int], found: Sequence[dict[str, dict[str, float]]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, style in (("direct", "--"), ("tree", "o-")):
        axes.plot(sizes, [each[name]["messages"] for each in found], style, label=f"negotiation, {name}")
    axes.plot(sizes, [each["exchange"]["messages"] for each in found], "s-", label="exchange and vote, a segment")
    axes.plot(sizes, [6 * math.sqrt(size) for size in sizes], ":", color="grey", label="6 √n")
    axes.set(xscale="log", yscale="log", xlabel="ranks, one per host", ylabel="messages of the busiest rank in a step")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False)
    axes.legend()
    plots.save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--processes", type=int, nargs="*", default=PROCESSES)
    parser.add_argument("--into", type=Path, default=plots.RESULTS, metavar="FOLDER")
    args = parser.parse_args()
    found = [
        {"direct": negotiation(size, size), "tree": negotiation(size, DIRECT_PEERS), "exchange": exchange(size)}
        for size in args.ranks
    ]
    columns = ("messages", "bytes", "coordinator_ms", "others_ms")
    rows = [
        [f"{size:,}"]
        + [f"{each['direct'][name]:,.3g} / {each['tree'][name]:,.3g}" for name in columns]
        + [f"{each['exchange'][name]:{form}}" for name, form in EXCHANGE.items()]
        for size, each in zip(args.ranks, found, strict=True)
    ]
    head = ["ranks", *("messages", "bytes", "coordinator, ms", "other ranks, ms"), *EXCHANGE_HEAD]
    text = [tabulate(rows, head, tablefmt="github", disable_numparse=True)]
    large = [(size, each["tree"]) for size, each in zip(args.ranks, found, strict=True) if size >= 64]
    if len(large) > 1:
        sizes = [size for size, _ in large]
        growth = ", ".join(f"{name} {slope(sizes, [cost[name] for _, cost in large]):.2f}" for name in columns)
        text.append(f"Growth with the tree from 64 ranks on, as a power of the number of ranks: {growth}.")
    jobs = [[f"{value:.1f}".removesuffix(".0") for value in job(ranks).values()] for ranks in args.processes]
    if jobs:
        text.append(tabulate(jobs, JOB_HEAD, tablefmt="github", disable_numparse=True))
    page = args.into / "scale.md"
    above = page.read_text().partition(MARK)[0] if page.exists() else "# Many ranks\n\n"
    page.write_text(above + MARK + "\n\n" + "\n\n".join(text) + "\n")
    print(page.read_text())
    if args.ranks:
        picture(args.ranks, found, args.into / "scale.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
