"""Cells of the table of seconds to a loss, measured: the steps of a run, taken one after another on that network.

    python -m benchmarks.time_to_loss.cells

``join`` adds up times that steps of each kind took on their own. Here the same model, that of ``steps``, takes all the
steps that the run of ``losses.json`` needed to its loss, in their order, so that what a sum could miss is in it: a
first step, a freeze, memory that fills. CELLS are measured, those that ``cells.json`` has already not again; with
``--hosts 2`` the cell that the other options name.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

import ocomm_torch as hvd
from benchmarks import turns
from benchmarks.models import TASKS
from benchmarks.ranks import start
from benchmarks.step import LR
from benchmarks.time_to_loss.join import cost, networks, reached
from benchmarks.time_to_loss.losses import ADAM, RESULTS, STEPS, stored
from benchmarks.time_to_loss.methods import METHODS
from benchmarks.time_to_loss.steps import STEPS_FILE
from benchmarks.turns import Result

CELLS_FILE = RESULTS / "cells.json"
#: Rate, delay in milliseconds, method, and the margin above Adam's final loss.
CELLS = (
    ("160mbit", 0.0, "0/1 Adam, total_steps, 8 bits", 0.01),
    ("10mbit", 50.0, "DiLoCo 30, 4 bits", 0.03),
)
TASK, SEED = "text", 0


def run_of(method: str) -> dict[str, Any]:
    return next(run for run in stored()["runs"][TASK][method] if run["seed"] == SEED)


def steps_to(method: str, margin: float) -> int:
    """SystemExit if the run never gets there."""
    steps = reached(run_of(method), run_of(ADAM)["losses"][-1] * (1 + margin))
    if steps is None:
        raise SystemExit(f"{method} does not come within {margin:.1%} of the final loss of {ADAM}")
    return steps


def measure(args: argparse.Namespace) -> list[Result]:
    """Runs as every rank of a job; the result is that of the slowest."""
    rank, ranks = start(args.threads)
    task = TASKS["bert"]
    batch = task.batch(task.samples, torch.Generator().manual_seed(rank))
    torch.manual_seed(0)
    model = task.model()
    trained = METHODS[args.method].make(model, LR, STEPS)
    for group in trained.optimizer.param_groups:
        if "fused" in group:  # as in ``steps``
            group["fused"] = True

    def step() -> None:
        trained.optimizer.zero_grad()
        task.loss(trained.module, batch).backward()
        trained.optimizer.step()

    steps = min(args.steps, steps_to(args.method, args.margin))
    hvd.barrier()
    before = turns.sent_bytes()
    seconds = turns.timed(step)(steps)
    said = hvd.allgather_object((seconds, turns.sent_bytes() - before))
    dist.destroy_process_group()
    hvd.shutdown()
    return [
        {
            "ranks": ranks,
            "rate": args.rate[0],
            "method": args.method,
            "margin": args.margin,
            "steps": steps,
            "seconds": max(seconds for seconds, _ in said),
            "sent": max(sent for _, sent in said),
        }
    ]


def joined(result: Result) -> tuple[float, float]:
    """Seconds and bytes of the same steps by the table. KeyError for a network that ``steps.json`` does not have."""
    found = {(each.rate, each.delay_ms): each for each in networks(json.loads(STEPS_FILE.read_text())["results"])}
    network = found[result["rate"], result.get("delay_ms", 0.0)]
    return cost(network, METHODS[result["method"]], run_of(result["method"]), result["steps"])


def show(*results: Result) -> str:
    rows = []
    for result in results:
        seconds, sent = joined(result)
        where = result["rate"] + (f", {delay:g} ms" if (delay := result.get("delay_ms")) else "")
        row = [result["method"], where, f"{result['margin']:+.1%}", f"{result['steps']}", f"{seconds:,.0f}"]
        row += [f"{result['seconds']:,.0f}", f"{result['seconds'] / seconds - 1:+.1%}"]
        rows.append([*row, f"{sent / 1e9:.3f}", f"{result['sent'] / 1e9:.3f}"])
    head = ["", "network", "loss", "steps", "s joined", "s measured", "", "GB joined", "GB measured"]
    return tabulate(rows, head, "github", disable_numparse=True)


def main() -> int:
    parser = turns.parser(__doc__, [], None, "samples")
    parser.add_argument("--method", choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--margin", type=float, default=0.01, help="above Adam's final loss (default %(default)s)")
    parser.set_defaults(steps=STEPS)
    args = parser.parse_args()
    if args.method:
        job = "benchmarks.time_to_loss.cells"
        versions = {"torch": torch.__version__}
        return turns.main(args, measure, lambda args, rate: turns.in_lab(job, args, rate), show, versions)
    results = json.loads(CELLS_FILE.read_text()) if CELLS_FILE.exists() else []
    known = {(each["rate"], each["delay_ms"], each["method"], each["margin"]) for each in results}
    for rate, delay, method, margin in CELLS:
        if (rate, delay, method, margin) not in known:
            words = ["--method", method, "--margin", f"{margin}", "--timeout", "7200"]
            found = turns.ask("benchmarks.time_to_loss.cells", rate, delay, words)
            results.append({"delay_ms": delay, **found["results"][0]})
            CELLS_FILE.write_text(json.dumps(results, indent=1) + "\n")
    print(show(*results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
