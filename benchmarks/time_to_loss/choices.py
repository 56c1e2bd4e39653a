"""What ``DistributedAuto`` expects of each method on each network of ``steps.json``, and how often its choice is right.

    python -m benchmarks.time_to_loss.choices            # asks it, on a lab of two hosts
    python -m benchmarks.time_to_loss.choices --judge    # compares what it said with measured steps

The model is that of ``steps``, 13.8 M parameters. To judge, the loss costs of one task decide, and those of another are
the truth: the right choice is the method whose whole run takes the least time, by the measured steps, of those whose
loss on the other task is within ``max_loss_gap`` of exact averages'.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch
from tabulate import tabulate

import ocomm_torch as hvd
from benchmarks import turns
from benchmarks.models import TASKS
from benchmarks.step import adam
from benchmarks.time_to_loss.join import PREDICTED, Network, cost, gaps, networks
from benchmarks.time_to_loss.losses import ADAM, RESULTS, STEPS, stored
from benchmarks.time_to_loss.methods import METHODS
from benchmarks.time_to_loss.steps import STEPS_FILE, rows_at
from benchmarks.turns import Result
from ocomm.predict.methods import METHODS as KNOWN
from ocomm.predict.methods import WORTH, Candidate, fastest
from ocomm_torch.auto import MEASURED_STEPS

CHOICES = RESULTS / "choices.json"
#: The largest loss costs that a user might accept.
LIMITS = (0.005, 0.01, 0.03)
#: By a method's name in ``ocomm.predict``: its name in ``losses``.
NAMES = {predicted: name for name, predicted in PREDICTED.items()} | {"exact averages": ADAM}


def measure(args: argparse.Namespace) -> list[Result]:
    """Runs as every rank of a job; the result is that of rank 0."""
    torch.set_num_threads(1)
    hvd.init()
    task = TASKS["bert"]
    torch.manual_seed(0)
    model = task.model()
    batch = task.batch(task.samples, torch.Generator().manual_seed(hvd.rank()))
    optimizer = hvd.DistributedAuto(adam(model), model.named_parameters(), total_steps=STEPS)
    for _ in range(MEASURED_STEPS):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    seconds = {each.method.name: each.seconds for each in optimizer.candidates}
    hvd.shutdown()
    return [{"ranks": 2, "rate": args.rate[0], "seconds": seconds, "said": optimizer.decision}]


@dataclass(frozen=True)
class Choice:
    """``chosen_s``, ``best_s``: what whole runs take by measured steps. ``gap``: the chosen method's on the
    task that judges.
    """

    network: str
    task: str
    limit: float
    chosen: str
    best: str
    chosen_s: float
    best_s: float
    gap: float

    @property
    def is_close(self) -> bool:
        """Whether the loss that was asked for is kept."""
        return self.gap <= self.limit

    @property
    def is_right(self) -> bool:
        return self.is_close and self.chosen == self.best

    @property
    def is_as_good(self) -> bool:
        """Whether the choice is so little slower than the best one that it may be made for a smaller loss."""
        return self.is_close and self.chosen_s <= WORTH * self.best_s


def choices(
    runs: Mapping[str, Any], measured: Sequence[Network], predicted: Mapping[str, Mapping[str, float]]
) -> Iterator[Choice]:
    """One per network, pair of tasks and limit. ``predicted``: seconds by method, by the name of a network."""
    known = gaps(runs)
    tasks = sorted({task for by_task in known.values() for task in by_task})
    for network, (decides, judges), limit in itertools.product(measured, itertools.permutations(tasks, 2), LIMITS):
        if network.name not in predicted:
            continue
        costs = {
            name: {"exact averages": 0.0} | {method: by[name] for method, by in known.items() if name in by}
            for name in (decides, judges)
        }
        truth = {
            name: mean(cost(network, METHODS[NAMES[name]], run, run["steps"])[0] for run in runs[judges][NAMES[name]])
            for name in costs[judges]
        }
        expected = [
            Candidate(method, predicted[network.name][method.name], costs[decides].get(method.name))
            for method in KNOWN
            if method.name in truth
        ]
        asked = [replace(each, why_not="" if _within(each.gap, limit) else "its loss") for each in expected]
        chosen = fastest(asked).method.name
        best = min((name for name in truth if costs[judges][name] <= limit), key=lambda name: truth[name])
        yield Choice(network.name, judges, limit, chosen, best, truth[chosen], truth[best], costs[judges][chosen])


def _within(gap: float | None, limit: float) -> bool:
    return gap is not None and gap <= limit


def judged(found: Sequence[Choice]) -> str:
    """A table of all choices, and the part of them that is right."""
    rows = [
        [c.task, c.network, f"{c.limit:.1%}", c.chosen, f"{c.gap:+.2%}", c.best, f"{c.chosen_s / c.best_s:.2f}"]
        for c in found
    ]
    right, as_good, close = (sum(getattr(c, which) for c in found) for which in ("is_right", "is_as_good", "is_close"))
    worst = max((c.chosen_s / c.best_s for c in found if c.is_close), default=1.0)
    head = ["judged on", "network", "asked", "chosen", "its loss", "fastest within", "x its seconds"]
    said = (
        f"{right} of {len(found)} choices are the fastest within the loss that was asked for, {as_good} take at most "
        f"{WORTH - 1:.0%} longer than it, {len(found) - close} miss that loss, and the others take at most {worst:.2f} "
        "times as long as the fastest."
    )
    return said + "\n\n" + tabulate(rows, head, "github", disable_numparse=True)


def main() -> int:
    parser = turns.parser(__doc__, [], None, "samples")
    parser.set_defaults(rate=[])
    parser.add_argument("--judge", action="store_true")
    args = parser.parse_args()
    if args.judge:
        steps = networks(json.loads(STEPS_FILE.read_text())["results"])
        predicted = {
            Network(each["rate"], each["delay_ms"], {}, {}).name: each["seconds"]
            for each in json.loads(CHOICES.read_text())
        }
        print(judged(list(choices(stored()["runs"], steps, predicted))))
        return 0
    if args.hosts or args.json:
        job = "benchmarks.time_to_loss.choices"
        versions = {"torch": torch.__version__}
        return turns.main(
            args, measure, lambda args, rate: turns.in_lab(job, args, rate), lambda result: result["said"], versions
        )
    results = json.loads(CHOICES.read_text()) if CHOICES.exists() else []
    known = {(each["rate"], each["delay_ms"]) for each in results}
    measured = {(each["rate"], each.get("delay_ms", 0.0)) for each in json.loads(STEPS_FILE.read_text())["results"]}
    for rate, delay in sorted(measured - known):
        if "onebit" not in rows_at(rate, delay):  # it would begin with minutes of dense steps
            continue
        found = turns.ask("benchmarks.time_to_loss.choices", rate, delay)
        results.append({"delay_ms": 0.0, **found["results"][0]})
        CHOICES.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
