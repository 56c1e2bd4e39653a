"""Whole runs over a slow network, measured from the first step to the last: seconds and loss of one and the same run.

    python -m benchmarks.time_to_loss.whole --hosts 4 --rate 10mbit [--methods "1-bit Adam, total_steps, 8 bits" ...]

``__main__`` joins losses with step times; this shows for some methods, SHOWN if none are named, that a run takes as
long as the sum of its steps says. It makes a lab of namespaces on this machine and trains the small transformer there,
one rank per host, with the rates of the lr of ``losses.json``. Choose the rate so that DDP spends as much of a step on
communication as a large model on your network does. DDP's steps are all alike: only ``--exact-steps`` of them are made,
and multiplied; its loss is that of ``losses.json``.

seconds    of training from the first step to the last, without evaluations
loss       at the end, on texts that were not trained on
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

import ocomm_torch as hvd
from benchmarks import turns
from benchmarks.convergence import load
from benchmarks.ranks import start
from benchmarks.time_to_loss.losses import ADAM, LOADERS, STEPS, learn, rate_of, stored
from benchmarks.time_to_loss.methods import METHODS, Method, Trained, adam
from benchmarks.turns import LOCAL, Result

#: One of each kind: a dense phase and then bits, refreshes and syncs, local steps.
SHOWN = ("1-bit Adam, total_steps, 8 bits", "0/1 Adam, total_steps, 8 bits", "DiLoCo 30, 4 bits")
#: Steps without communication, by which its part of DDP's step is known.
LOCAL_STEPS = 300
TRAINED_ALONE = Method(LOCAL, lambda model, lr, steps: Trained(model, adam(model, lr)), "", lambda step, steps: "0")


def measure(args: argparse.Namespace) -> list[Result]:
    """Runs as every rank of a job; the result is that of rank 0."""
    _, ranks = start(args.threads)
    task = load(args.task, LOADERS)
    found = hvd.broadcast_object(stored(), 0)

    def run(method: Method, steps: int) -> dict[str, Any]:
        hvd.barrier()
        clock: list[float] = []
        before = turns.sent_bytes()
        lr = rate_of(found, task.name, method.name) * method.lr
        made = learn(task, method, lr, args.seed, steps, clock)
        return {"method": method.name, **made, "clock": clock, "sent": turns.sent_bytes() - before}

    rows = [run(TRAINED_ALONE, min(LOCAL_STEPS, args.steps)), run(METHODS[ADAM], min(args.exact_steps, args.steps))]
    rows += [run(METHODS[name], args.steps) for name in args.methods]
    exact = next(each for each in found["runs"][task.name][ADAM] if each["seed"] == args.seed)
    dist.destroy_process_group()
    hvd.shutdown()
    parameters = sum(p.numel() for p in task.model_of(0).parameters())
    return [
        {
            "ranks": ranks,
            "rate": args.rate[0],
            "parameters": parameters,
            "steps": args.steps,
            "adam_loss": exact["losses"][-1],
            "rows": rows,
        }
    ]


def show(result: Result) -> str:
    """A table, and how much of DDP's steps is communication."""
    alone, exact, *others = result["rows"]
    local, ddp = (row["seconds"] / row["steps"] for row in (alone, exact))
    steps, loss = result["steps"], result["adam_loss"]
    rows = [[f"{ADAM} ({exact['steps']} steps, multiplied)", f"{ddp * steps:.0f}", "1.00", f"{loss:.4f}", ""]]
    for row in others:
        gap, speed = row["losses"][-1] / loss - 1, ddp * steps / row["seconds"]
        rows.append([row["method"], f"{row['seconds']:.0f}", f"{speed:.2f}", f"{row['losses'][-1]:.4f}", f"{gap:+.2%}"])
    head = (
        f"{result['ranks']} ranks at {result['rate']}, {result['parameters']:,} parameters, {steps} steps, "
        f"{1 - local / ddp:.0%} of the step of {ADAM} is communication"
    )
    columns = ["", "seconds", f"x {ADAM}", "loss", "against Adam"]
    return head + "\n\n" + tabulate(rows, columns, "github", disable_numparse=True)


def main() -> int:
    parser = turns.parser(__doc__, [], None, "samples")
    parser.add_argument("--task", choices=list(LOADERS), default="text")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(SHOWN), metavar="METHOD")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact-steps", type=int, default=STEPS // 10, metavar="N", help="default %(default)s")
    parser.set_defaults(steps=STEPS, timeout=3600.0)
    args = parser.parse_args()
    if args.hosts:
        LOADERS[args.task]()  # the hosts of a lab cannot download the texts
    job = "benchmarks.time_to_loss.whole"
    return turns.main(
        args, measure, lambda args, rate: turns.in_lab(job, args, rate), show, {"torch": torch.__version__}
    )


if __name__ == "__main__":
    sys.exit(main())
