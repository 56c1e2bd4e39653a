"""Joins losses by step with step times to seconds and bytes until a loss, for each network; writes table and picture.

    python -m benchmarks.time_to_loss [--into FOLDER]

A target is Adam's loss at the end of the same seed's run, and some percent above it. "never": not within the run, with
one seed at least.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import pyplot
from tabulate import tabulate

from benchmarks import plots
from benchmarks.step import METHODS as STEP_METHODS
from benchmarks.time_to_loss import whole
from benchmarks.time_to_loss.losses import ADAM, EVERY, RESULTS, stored
from benchmarks.time_to_loss.methods import METHODS, Method
from benchmarks.turns import DENSE, LOCAL
from ocomm.bench._lab import PAYLOAD_FRACTION, bits_per_second
from ocomm.predict.methods import VOTE

STEPS_FILE, WHOLE_FILE = RESULTS / "steps.json", RESULTS / "whole.json"
#: Fractions above Adam's final loss.
MARGINS = (0.005, 0.01, 0.03)
WARM_8 = STEP_METHODS["onebit-warm-8"][0]
#: torch's averages of parameters are not measured: they take as long as their bytes, without anything else.
AVERAGED = "average"
#: What a reader has to know of the tables.
ABOUT = """Losses are those of a transformer of 116,256 parameters on four ranks, one of each method and seed over 3,000
steps (`benchmarks/tasks`, `benchmarks.time_to_loss.losses`). Seconds are those of a BERT-like model of 13.8 million
parameters on two hosts of one core with shaped links: each kind of step that the run took, as long as
`benchmarks.time_to_loss.steps` measured it on that network, or as its bytes take where it would be too long to measure.
All methods around Adam have the lr that was tuned for DDP. Networks with a delay have it one way; ocomm's rows there
are of four segments in flight. With 32, as it has now, a step at 160 Mbit/s and 100 ms takes 0.39 s instead of 1.31 in
1 bit, 1.2 instead of 7.1 in 8 bits, and a sync of DiLoCo in 32 bits 3.8 instead of 28."""
WHOLE_ABOUT = """The same runs, not joined but measured from their first step to their last
(`benchmarks.time_to_loss.whole`): every rank is a host, on a network that is as slow for the small model as 160 Mbit/s
are for the large one."""
#: By a method's ``steps_of`` and the kind of a step: the measured rows whose exposed times add up to those of the step.
ROWS: dict[tuple[str, str], tuple[str, ...]] = {
    ("DDP fp32", "32"): ("DDP fp32",),
    ("DDP fp32", AVERAGED): ("DDP fp32",),
    ("DDP bf16", "16"): ("DDP bf16",),
    ("DDP PowerSGD rank 1", "32"): ("DDP fp32",),
    ("DDP PowerSGD rank 1", "powersgd"): ("DDP PowerSGD rank 1",),
    ("DeepSpeed 1-bit Adam", "32"): ("DDP fp32",),
    ("DeepSpeed 1-bit Adam", "1"): ("DeepSpeed 1-bit Adam",),
    ("ocomm int8", "8"): ("ocomm int8",),
    ("ocomm int4", "4"): ("ocomm int4",),
    ("1-bit Adam", "32"): (DENSE,),
    ("1-bit Adam", "8"): (WARM_8,),
    ("1-bit Adam", "1"): ("1-bit Adam",),
    ("0/1 Adam", "32"): (DENSE, "0/1 Adam"),
    ("0/1 Adam", "8"): (WARM_8, "0/1 Adam"),
    ("0/1 Adam", "1"): ("0/1 Adam",),
    ("Birder", "1"): ("Birder",),
    **{("DiLoCo", f"sync-{bits}"): (STEP_METHODS[f"diloco-{bits}"][0],) for bits in (32, 4, 1)},
}


@dataclass(frozen=True)
class Network:
    """Times of steps at one rate and delay: by row, milliseconds.

    ``sent``: bytes that a host sends in a step of a row, on any network. A row that was not measured takes as long as
    its bytes beside the local step, without the delay.
    """

    rate: str
    delay_ms: float
    rows: Mapping[str, float]
    sent: Mapping[str, float]

    @property
    def name(self) -> str:
        return self.rate.replace("mbit", " Mbit/s") + (f", {self.delay_ms:g} ms" if self.delay_ms else "")

    def step(self, method: Method, kind: str) -> tuple[float, float]:
        """Seconds and bytes of a step."""
        local = self.rows[LOCAL] / 1e3
        if kind == "0":
            return local, 0.0
        if kind == VOTE:  # not measured: at most as long as a message's way there and back
            return local + 2 * self.delay_ms / 1e3, 0.0
        names = ROWS[method.steps_of, kind]
        exposed = [
            self.rows[name] / 1e3 - local if name in self.rows and kind != AVERAGED else self._wire_s(name)
            for name in names
        ]
        return local + sum(exposed), sum(self.sent[name] for name in names)

    def _wire_s(self, row: str) -> float:
        return 8 * self.sent[row] / PAYLOAD_FRACTION / bits_per_second(self.rate)


def networks(found: Sequence[Mapping[str, Any]]) -> list[Network]:
    """From the results of ``benchmarks.step``: those of one network are joined by what they add to their local step."""
    joined: dict[tuple[str, float], dict[str, float]] = {}
    sent: dict[str, float] = {}
    for result in found:
        rows = joined.setdefault((result["rate"], result.get("delay_ms", 0.0)), {})
        times = {row["method"]: row["step_ms"] for row in result["rows"]}
        slower = times[LOCAL] - rows.get(LOCAL, times[LOCAL])
        rows |= {name: ms - slower for name, ms in times.items()}
        sent |= {row["method"]: row["sent"] for row in result["rows"]}
    order = sorted(joined, key=lambda key: (bits_per_second(key[0]), key[1]))
    return [Network(*key, joined[key], sent) for key in order]


def reached(run: Mapping[str, Any], target: float) -> int | None:
    """The number of steps after which the validation loss was at most ``target``; None if it never was."""
    return next((EVERY * (number + 1) for number, loss in enumerate(run["losses"]) if loss <= target), None)


def kinds(run: Mapping[str, Any], steps: int) -> Iterator[tuple[str, int]]:
    """How many of the first ``steps`` steps are of a kind, in their order."""
    for kind, count in run["kinds"]:
        if steps <= 0:
            return
        yield kind, min(count, steps)
        steps -= count


def cost(network: Network, method: Method, run: Mapping[str, Any], steps: int) -> tuple[float, float]:
    """Seconds and bytes of the first ``steps`` steps."""
    parts = [(count, network.step(method, kind)) for kind, count in kinds(run, steps)]
    return sum(count * s for count, (s, _) in parts), sum(count * sent for count, (_, sent) in parts)


def to_loss(
    network: Network, method: Method, runs: Sequence[Mapping[str, Any]], adam: Mapping[int, float], margin: float
) -> tuple[float, float] | None:
    """Mean seconds and bytes over the seeds; None if a seed never gets there. ``adam``: its final losses by seed."""
    found = []
    for run in runs:
        steps = reached(run, adam[run["seed"]] * (1 + margin))
        if steps is None:
            return None
        found.append(cost(network, method, run, steps))
    return mean(s for s, _ in found), mean(sent for _, sent in found)


#: The names that ``ocomm.predict.methods`` has for methods, which all wrap Adam.
PREDICTED = {
    "Adam, Compression.int8": "averages in 8 bits",
    "Adam, Compression.int4": "averages in 4 bits",
    "1-bit Adam, total_steps, 8 bits": "1-bit Adam",
    "0/1 Adam, total_steps, 8 bits": "0/1 Adam",
    "DiLoCo 10, 4 bits": "DiLoCo, a sync in 10 steps, 4 bits",
    "DiLoCo 30, 4 bits": "DiLoCo, a sync in 30 steps, 4 bits",
    "DiLoCo 30, 1 bit": "DiLoCo, a sync in 30 steps, 1 bit",
    "DiLoCo 100, 4 bits": "DiLoCo, a sync in 100 steps, 4 bits",
}


#: Tasks on which equal runs end closer together than methods do. On images averages in bfloat16 alone change the loss
#: of a seed by -7 to +1 %.
DECIDING = ("text", "code", "large text")


def gaps(runs: Mapping[str, Any], seeds: int = 2) -> dict[str, dict[str, float]]:
    """By method and task, how far its final loss is above Adam's, as a part of it: ``ocomm.predict.methods.GAPS``.

    Of fewer than ``seeds`` runs nothing follows: one seed's loss is up to half a percent from the next one's.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in PREDICTED.values()}
    for task, by_method in runs.items():
        if task not in DECIDING or ADAM not in by_method:
            continue
        adam = {run["seed"]: run["losses"][-1] for run in by_method[ADAM]}
        for name, predicted in PREDICTED.items():
            changes = [run["losses"][-1] / adam[run["seed"]] - 1 for run in by_method.get(name, ())]
            if len(changes) >= seeds:
                found[predicted][task] = round(mean(changes), 4)
    return found


def tables(runs: Mapping[str, Any], measured: Sequence[Network]) -> str:
    """A section per task: the losses, and for each margin the seconds on each network."""
    parts = []
    for task, by_method in runs.items():
        adam = {run["seed"]: run["losses"][-1] for run in by_method[ADAM]}
        parts += [f"## {task}", _losses(by_method, adam)]
        for margin in MARGINS:
            rows = []
            for name, method in METHODS.items():
                if by_method.get(name):
                    cells = [to_loss(network, method, by_method[name], adam, margin) for network in measured]
                    steps = [reached(run, adam[run["seed"]] * (1 + margin)) for run in by_method[name]]
                    when = "never" if None in steps else f"{mean(s for s in steps if s is not None):.0f}"
                    sent = next((f"{cell[1] / 1e9:.3g}" for cell in cells if cell), "")
                    rows.append([name, when, sent, *(f"{cell[0]:,.0f}" if cell else "never" for cell in cells)])
            head = ["", "steps", "GB sent", *(f"s at {network.name}" for network in measured)]
            parts += [f"Until Adam's final loss + {margin:.1%}:", tabulate(rows, head, "github", disable_numparse=True)]
    return "\n\n".join(parts)


def _losses(by_method: Mapping[str, Any], adam: Mapping[int, float]) -> str:
    rows = []
    for name in METHODS:
        if runs := by_method.get(name):
            changes = [run["losses"][-1] / adam[run["seed"]] - 1 for run in runs]
            taken = {kind: 0 for run in runs for kind, _ in run["kinds"]}
            for kind, count in itertools.chain.from_iterable(run["kinds"] for run in runs):
                taken[kind] += count
            words = ", ".join(f"{count / len(runs):.0f} of {kind}" for kind, count in taken.items())
            row = [name, f"{runs[0]['lr']:g}", " / ".join(f"{run['losses'][-1]:.4f}" for run in runs)]
            rows.append([*row, f"{100 * mean(changes):+.2f} %", words, METHODS[name].note])
    head = ["", "lr", "final loss by seed", "against Adam", "steps by kind", ""]
    return tabulate(rows, head, "github", disable_numparse=True)


def draw(runs: Mapping[str, Any], measured: Sequence[Network], margins: Sequence[float], path: Path) -> None:
    """Seconds until Adam's final loss and a margin on each network, a line per method, a panel per task and margin."""
    figure, axes = pyplot.subplots(
        len(runs), len(margins), figsize=(5.2 * len(margins), 4.4 * len(runs)), squeeze=False
    )
    networks = sorted(measured, key=lambda network: (-bits_per_second(network.rate), network.delay_ms))
    for (row, (task, by_method)), (column, margin) in itertools.product(enumerate(runs.items()), enumerate(margins)):
        axis = axes[row][column]
        adam = {run["seed"]: run["losses"][-1] for run in by_method[ADAM]}
        for color, (name, method) in enumerate(METHODS.items()):
            if by_method.get(name):
                points = [to_loss(network, method, by_method[name], adam, margin) for network in networks]
                drawn = [(place, point[0]) for place, point in enumerate(points) if point]
                if drawn:
                    style = "--" if name.startswith(("DDP", "PostLocal")) else "-"
                    look = {"color": pyplot.get_cmap("tab20")(color), "marker": "o", "markersize": 3}
                    axis.plot(*zip(*drawn, strict=True), style, **look, label=name)
        axis.set(yscale="log", ylabel="seconds", title=f"{task}: until Adam's final loss + {margin:.0%}")
        axis.set_xticks(range(len(networks)), [network.name.replace(", ", "\n") for network in networks], fontsize=8)
        axis.legend(fontsize=6)
    figure.tight_layout()
    plots.save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER")
    args = parser.parse_args()
    runs = {task: runs for task, runs in stored()["runs"].items() if runs.get(ADAM)}
    for method, by_task in gaps(runs).items():
        print(f"{method}: {by_task}")
    if not runs or not STEPS_FILE.exists():
        print(f"{RESULTS} has no losses or no step times yet: make time-to-loss FULL=1 measures both", file=sys.stderr)
        return 1
    steps = json.loads(STEPS_FILE.read_text())
    measured = networks(steps["results"])
    text = f"# Seconds to a loss\n\n{ABOUT}\n\n![Seconds by network](time-to-loss.svg)\n\n{tables(runs, measured)}"
    if WHOLE_FILE.exists():
        shown = "\n\n".join(whole.show(result) for result in json.loads(WHOLE_FILE.read_text())["results"])
        text += f"\n\n## Whole runs\n\n{WHOLE_ABOUT}\n\n{shown}"
    args.into.mkdir(parents=True, exist_ok=True)
    (args.into / "time-to-loss.md").write_text(f"{text}\n")
    draw(runs, measured, (0.01, 0.03), args.into / "time-to-loss.svg")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
