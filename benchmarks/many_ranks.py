"""One rank of a job of many: starts, takes steps of 1-bit Adam without a framework, and says how long each took.

    ocommrun -np 256 python -m benchmarks.many_ranks FILE [--steps 50] [--numel 40000]

Rank 0 writes JSON to FILE: the number of ranks, seconds until ``init()`` had returned everywhere and for the steps, the
most memory of all ranks together (their own, without what they share), and whether all ranks have the same parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import ocomm
from benchmarks.numpy_training import Training
from ocomm import session
from ocomm.agreement import gather


def own_mib() -> float:
    """Returns the memory of this process that it shares with no other."""
    text = Path("/proc/self/smaps_rollup").read_text()
    fields = {line.split(":")[0]: line.split()[1] for line in text.splitlines()[1:]}
    return (int(fields["Private_Clean"]) + int(fields["Private_Dirty"])) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--numel", type=int, default=40_000)
    args = parser.parse_args()
    began = float(os.environ.get("BEGAN", time.time()))
    ocomm.init()
    current = session.current()
    here = current.require_topology()
    ocomm.barrier()
    started = time.time()
    training = Training(current, "1-bit Adam", [(args.numel,)])
    made = time.time()
    for step in range(args.steps):
        training.step(step)
    ended = time.time()
    own = gather(current, 0, "memory", str(own_mib()))
    checksums = gather(current, 0, "checksum", training.hashes()[0])
    if here.rank == 0:
        found = {
            "ranks": here.size,
            "start_s": started - began,
            "optimizer_s": made - started,
            "steps_s": ended - made,
            "own_mib": sum(map(float, own)),
            "checksums": len(set(checksums)),
        }
        args.file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
