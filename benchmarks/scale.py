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
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from tabulate import tabulate

from benchmarks import plots
from benchmarks.relays import Cost, Relays
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


class Negotiation:
    """The negotiation of a process set of ``size`` ranks, whose messages are handed over at once."""

    def __init__(self, size: int, direct_peers: int) -> None:
        self.coordinator = Coordinator(range(size), 1 << 26, 1024)
        self.caches = [RankCache() for _ in range(size)]
        self.tree = Relays(self.coordinator, size, direct_peers)
        self.requests = {
            name: Request(Kind.ALLREDUCE, name, DType.FLOAT32, (1000,))
            for name in [f"layer {number}.weight" for number in range(TENSORS)]
        }

    def step(self) -> list[Cost]:
        """Every rank asks for all tensors, and hears the answer. Returns what each rank has done."""
        tree = self.tree
        costs = tree.costs = tree.fresh_costs()
        asked = list(self.requests.values())
        for rank in reversed(range(len(self.caches))):  # children before parents
            cache = self.caches[rank]
            message = tree.timed(rank, lambda cache=cache: cache.announcement(asked))
            tree.announce(rank, message)
        responses = tree.timed(0, self.coordinator.decide)
        assert sum(len(response.names) for response in responses) == TENSORS
        answer = tree.timed(0, lambda: write_responses(tuple(responses)))
        tree.answer(responses, answer)
        for rank, cache in enumerate(self.caches):
            tree.timed(rank, lambda cache=cache: self._learn(cache, answer))
        return costs

    def _learn(self, cache: RankCache, answer: bytes) -> None:
        for response in read_responses(answer):
            for position, number in enumerate(response.cache_ids):
                if number >= 0:
                    name = response.names[position]
                    cache.learn(name, number, self.requests[name])


def negotiation(size: int, direct_peers: int) -> dict[str, float]:
    """Returns, for a step whose requests are known, the most that any rank has of each cost, and the coordinator's."""
    job = Negotiation(size, direct_peers)
    for _ in range(STEPS):
        costs = job.step()
    return {
        "messages": max(cost.messages for cost in costs),
        "bytes": max(cost.nbytes for cost in costs),
        "coordinator_ms": costs[0].seconds * 1e3,
        "others_ms": max(cost.seconds for cost in costs[1:]) * 1e3,
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
        # Modules are compiled before, as pip leaves them, also where PYTHONDONTWRITEBYTECODE is set.
        compiled = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(folder) / "compiled")}
        subprocess.run([sys.executable, "-c", "import benchmarks.many_ranks"], check=True, env=compiled, timeout=100)
        words = [sys.executable, "-m", "ocomm.launch", "-np", str(ranks)]
        command = [*words, sys.executable, "-m", "benchmarks.many_ranks", str(file)]
        began = time.time()
        environ = {**compiled, "BEGAN": repr(began), "OCOMM_START_TIMEOUT": "300"}
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
    args.into.mkdir(parents=True, exist_ok=True)
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
