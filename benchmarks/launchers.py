"""A training step under each launcher: is a job that mpirun, srun or torchrun starts as fast as one of ocommrun?

    python -m benchmarks.launchers --hosts 2 --rate 850mbit --pairs 10 [--json FILE]

makes a lab of namespaces on this machine (exit status 77 where it cannot be had); without ``--hosts`` the ranks are on
this machine, or in the allocation that Slurm has given, where srun is there, too. Every job is ``benchmarks.step``, of
a BERT-like model of 13.8 M parameters. Jobs come in pairs, one of ocommrun and one of the other launcher right after or
before it, in turn, so that whatever else the machine does, it does to both. The other launcher gets what is needed to
reach the hosts, to fill them and to bind no rank, and no setting of MPI's transports. Under torchrun MPI is MPICH,
started by PMI; ``--mpich`` is a virtual environment into which pip has installed it (``make test-mpich`` makes one).

ratio     step time under that launcher over that of the same pair under ocommrun, median over pairs
interval  of the median ratio, at least 95 %, from the order of the ratios (no distribution is assumed)

over DDP  the same of times over DDP's in the same job

DDP talks through gloo and not through MPI: its row shows what the machine itself does to a ratio.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from benchmarks.turns import DDP, DENSE, LOCAL, SKIPPED, command
from ocomm.bench._lab import Lab, LabError, why_not
from ocomm.bench.kernels import commit, processor

BASE = "ocommrun"
#: No rank is bound, and hosts are filled in order, as with ocommrun.
OTHERS = {
    "mpirun": ["--bind-to", "none", "--map-by", "slot", "--oversubscribe"],
    "srun": ["--mpi=pmix", "--cpu-bind=none", "--kill-on-bad-exit=1"],
    "torchrun": ["--no-python"],
}
#: Of rank 0's host, where torchrun's agents and then the ranks meet.
MASTER_PORT = "29520"


def interval_of_median(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The narrowest pair of order statistics, as far from both ends, that holds the median with that confidence.

    The whole range where there are too few values for it, five or fewer with 95 %.
    """
    ordered, count = sorted(values), len(values)
    outside = 1 - confidence
    # Both ends drop the same number of values; dropping k is wrong if at most k of all lie on one side of the median.
    dropped = 0
    while 2 * sum(math.comb(count, k) for k in range(dropped + 2)) / 2**count <= outside and 2 * dropped + 3 < count:
        dropped += 1
    enough = 2 * sum(math.comb(count, k) for k in range(dropped + 1)) / 2**count <= outside
    return (ordered[dropped], ordered[-1 - dropped]) if enough else (ordered[0], ordered[-1])


def words(launcher: str, lab: Lab | None, ranks: int, program: Sequence[str], variables: dict[str, str]) -> list[str]:
    """The command line that starts ``program``; ``variables`` travel to the ranks."""
    if launcher == "srun":
        return ["srun", f"--ntasks={ranks}", *OTHERS["srun"], *program]
    slots = ranks // len(lab.names) if lab is not None else ranks
    if launcher == "torchrun":
        line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(slots)]
        line += ["--master-port", MASTER_PORT]
        if lab is None:
            return [*line, *OTHERS["torchrun"], *program]
        line += ["--nnodes", str(len(lab.names)), "--master-addr", lab.address(0)]
        agents = [
            lab.on(host, [*line, "--node-rank", str(host), *OTHERS["torchrun"], *program])
            for host in range(len(lab.names))
        ]
        return ["sh", "-c", " & ".join(map(shlex.join, agents)) + "; wait"]
    where = ["-H", ",".join(f"{name}:{slots}" for name in lab.names)] if lab is not None else []
    if launcher == BASE:
        there = ["--mpi-args", " ".join(lab.mpi_options())] if lab is not None else []
        line = [sys.executable, "-m", "ocomm.launch", "-np", str(ranks), *where, *there, *program]
    else:
        beside = Path(sys.executable).with_name("mpirun")
        mpirun = str(beside) if beside.exists() else "mpirun"
        there = [*lab.mpi_options(), *(word for name in variables for word in ("-x", name))] if lab is not None else []
        line = [mpirun, "-np", str(ranks), *where, *OTHERS["mpirun"], *there, *program]
    return lab.on(None, line) if lab is not None else line


def step_times(launcher: str, lab: Lab | None, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a step by method, of one job. LabError if it has no results."""
    ranks = args.hosts * args.slots if lab is not None else args.ranks
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        program = [sys.executable, "-m", "benchmarks.step", "--rate", args.rate, "--json", str(output)]
        program += ["--methods", *args.methods, "--rounds", str(args.rounds), "--steps", str(args.steps)]
        program += ["--batch", str(args.batch)] if args.batch else []
        variables = {"OMP_NUM_THREADS": "1"}
        if lab is not None:
            # Hosts of a lab are one machine, whose memory UCX would use between them.
            variables |= {"BENCH_MASTER": lab.address(0), "GLOO_SOCKET_IFNAME": "eth0", "UCX_TLS": "tcp,self"}
        if launcher == "torchrun":
            variables |= {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(args.mpich / "lib")}
        line = words(launcher, lab, ranks, program, variables)
        if lab is not None:
            done = lab.run(line, args.timeout, variables)
        else:
            root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            done = subprocess.run(
                line,
                env={**os.environ, **root, **variables},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=args.timeout,
            )
        if not output.exists():
            raise LabError(f"a job of {launcher} has no result:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        (result,) = json.loads(output.read_text())["results"]
        if lab is not None and result["hosts"] != args.hosts:
            raise LabError(f"{launcher} has put the ranks on {result['hosts']} of {args.hosts} hosts")
        for row in result["rows"]:
            wire = 8 * result["parameters"] * (args.hosts - 1) / args.hosts  # of a ring of float32, out of each host
            if lab is not None and row["method"] == DENSE and row["sent"] < 0.9 * wire:
                raise LabError(
                    f"{launcher}: a step of {DENSE} sent {row['sent']:.3g} bytes over the network instead of "
                    f"{wire:.3g}; the rest went through the memory that the hosts of a lab share"
                )
        return {row["method"]: row["step_ms"] for row in result["rows"] if row["method"] != LOCAL}


def compare(pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """By method, from (ocommrun, other) of each pair."""
    compared = {}
    for method in pairs[0][0]:
        ratios = [other[method] / base[method] for base, other in pairs]
        over_ddp = [(other[method] / other[DDP]) / (base[method] / base[DDP]) for base, other in pairs if DDP in base]
        compared[method] = {
            "ratio": median(ratios),
            "interval": interval_of_median(ratios),
            "over_ddp": median(over_ddp) if over_ddp else None,
            "over_ddp_interval": interval_of_median(over_ddp) if over_ddp else None,
            "ocommrun_ms": [base[method] for base, _ in pairs],
            "other_ms": [other[method] for _, other in pairs],
        }
    return compared


def show(launcher: str, compared: dict[str, dict[str, Any]]) -> str:
    def cells(row: dict[str, Any], name: str, interval: str) -> list[str]:
        if row[name] is None:
            return ["-", "-"]
        return [f"{row[name]:.3f}", "{:.3f} to {:.3f}".format(*row[interval])]

    rows = [
        [
            method,
            f"{median(row['ocommrun_ms']):.1f}",
            f"{median(row['other_ms']):.1f}",
            *cells(row, "ratio", "interval"),
            *cells(row, "over_ddp", "over_ddp_interval"),
        ]
        for method, row in compared.items()
    ]
    columns = ["method", "ocommrun ms", f"{launcher} ms", "ratio", "interval", "over DDP", "interval"]
    return tabulate(rows, columns, "github")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hosts", type=int, metavar="N", help="make a lab of N hosts, and measure there")
    add("--slots", type=int, default=1, help="ranks on each host of the lab (default 1)")
    add("--ranks", type=int, default=2, help="ranks without a lab (default 2)")
    add("--rate", default="850mbit", help="nominal rate of a host's network (default 850mbit)")
    add("--launchers", nargs="+", choices=list(OTHERS), help="default: all that are here")
    add("--mpich", type=Path, default=Path(".venv-mpich").resolve(), metavar="FOLDER", help="MPICH for torchrun")
    add("--pairs", type=int, default=10, help="of jobs for each launcher (default 10)")
    add("--methods", nargs="+", default=["ddp", "dense", "onebit"], help="of benchmarks.step (default: %(default)s)")
    add("--rounds", type=int, default=3, help="of a job, in which every method has its turn (default 3)")
    add("--steps", type=int, default=4, help="of a method in one turn (default 4)")
    add("--batch", type=int, help="samples per rank (default: that of benchmarks.step)")
    add("--timeout", type=float, default=600, help="seconds for one job (default 600)")
    add("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.hosts and (reason := why_not()):
        print(f"no lab here: {reason}", file=sys.stderr)
        return SKIPPED
    has_srun = not args.hosts and "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None
    has_mpich = (args.mpich / "lib").is_dir()
    found = {"mpirun": True, "srun": has_srun, "torchrun": has_mpich}
    launchers = args.launchers or [name for name in OTHERS if found[name]]
    if "torchrun" in launchers and not has_mpich:
        print(f"torchrun is measured with MPICH, which is not in {args.mpich}: pass --mpich", file=sys.stderr)
        return SKIPPED
    if "srun" in launchers and not has_srun:
        print("srun is measured inside an allocation of Slurm, and not in a lab", file=sys.stderr)
        return SKIPPED
    results = {}
    try:
        with ExitStack() as stack:
            lab = stack.enter_context(Lab(args.hosts, args.rate)) if args.hosts else None
            pairs: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {name: [] for name in launchers}
            for number, launcher in itertools.product(range(args.pairs), launchers):
                order = (BASE, launcher) if number % 2 == 0 else (launcher, BASE)
                times = {name: step_times(name, lab, args) for name in order}
                pairs[launcher].append((times[BASE], times[launcher]))
                print(f"pair {number + 1} of {args.pairs}, {launcher}: {times}", file=sys.stderr, flush=True)
    except (LabError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    for launcher in launchers:
        results[launcher] = compare(pairs[launcher])
        print(show(launcher, results[launcher]), end="\n\n")
    if args.json:
        about = {"processor": processor(), "commit": commit()}
        args.json.write_text(json.dumps({"about": about, "command": command(), "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
