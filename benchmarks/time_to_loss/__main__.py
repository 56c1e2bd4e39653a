"""Seconds and bytes until a loss for each method and network (``join``): writes a table and two pictures.

    python -m benchmarks.time_to_loss [--into FOLDER]

A target is Adam's loss at the end of the same seed's run, and some percent above it. "never": not within the run, with
one seed at least.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import pyplot
from tabulate import tabulate

from benchmarks import plots
from benchmarks.time_to_loss import cells, whole
from benchmarks.time_to_loss.join import Network, gaps, networks, reached, to_loss
from benchmarks.time_to_loss.losses import ADAM, RESULTS, stored
from benchmarks.time_to_loss.methods import METHODS
from benchmarks.time_to_loss.steps import STEPS_FILE
from ocomm.bench._lab import bits_per_second

WHOLE_FILE = RESULTS / "whole.json"
#: Fractions above Adam's final loss.
MARGINS = (0.005, 0.01, 0.03)
#: The task, margins and delays of the picture.
DRAWN = "text", (0.01, 0.03), (0.0, 100.0)
#: Of ten methods with different colours each.
MARKERS = "os^"
#: Of the picture with three bars per network: its task, margin, networks, and ocomm's method.
BARS = "text", 0.005, ("10mbit", "50mbit", "160mbit", "850mbit"), "1-bit Adam, total_steps, 8 bits"
#: What a reader has to know of the tables.
ABOUT = """Losses are those of a transformer of 116,256 parameters ("large text": 1.2 million) on four ranks, one of
each method and seed over 3,000 steps (`benchmarks/tasks`, `benchmarks.time_to_loss.losses`). Seconds are those of a
BERT-like model of 13.8 million parameters on two hosts of one core with shaped links: each kind of step that the run
took, as long as `benchmarks.time_to_loss.steps` measured it on that network, or as its bytes take where it would be too
long to measure. All methods around Adam have the lr that was tuned for DDP. A network's delay is one way. No network
slows a local step: everywhere it takes the median of all jobs, 0.15 s, and 0.38 with Muon instead of Adam. DeepSpeed
waits for several messages per tensor: 31 s for a step at 160 Mbit/s and 50 ms, from which its other rows with a delay
follow."""
WHOLE_ABOUT = """The same runs, not joined but measured from their first step to their last
(`benchmarks.time_to_loss.whole`): every rank is a host, on a network that is as slow for the small model as 160 Mbit/s
are for the large one."""
CELLS_ABOUT = """Cells of the tables above for text and its first seed, measured (`benchmarks.time_to_loss.cells`): the
large model takes all the steps that the small one's run took to its loss, on that network."""


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
                    costs = [to_loss(network, method, by_method[name], adam, margin) for network in measured]
                    steps = [reached(run, adam[run["seed"]] * (1 + margin)) for run in by_method[name]]
                    when = "never" if None in steps else f"{mean(s for s in steps if s is not None):.0f}"
                    sent = next((f"{cost[1] / 1e9:.3g}" for cost in costs if cost), "")
                    rows.append([name, when, sent, *(f"{cost[0]:,.0f}" if cost else "never" for cost in costs)])
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


def draw(runs: Mapping[str, Any], measured: Sequence[Network], path: Path) -> None:
    """Seconds until DRAWN's target against the rate, a line per method, a panel per margin and delay."""
    task, margins, delays = DRAWN
    adam = {run["seed"]: run["losses"][-1] for run in runs[task][ADAM]}
    figure, axes = pyplot.subplots(
        len(delays), len(margins), figsize=(11, 8), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    lines: dict[str, Any] = {}
    for (row, delay), (column, margin) in itertools.product(enumerate(delays), enumerate(margins)):
        networks = [network for network in measured if network.delay_ms == delay]
        axis = axes[row][column]
        for number, (name, method) in enumerate(METHODS.items()):
            found = runs[task].get(name)
            points = [to_loss(network, method, found, adam, margin) for network in networks] if found else []
            drawn = [
                (bits_per_second(network.rate) / 1e6, point[0])
                for network, point in zip(networks, points, strict=bool(found))
                if point is not None
            ]
            if drawn:
                look = {
                    "linestyle": "--" if method.is_peer else "-",
                    "color": f"C{number}",
                    "marker": MARKERS[number // 10],
                }
                (lines[name],) = axis.plot(*zip(*drawn, strict=True), **look, markersize=4, label=name)
        axis.set(xscale="log", yscale="log", title=f"Adam's final loss + {margin:.0%}, {delay:g} ms of delay")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    figure.supxlabel("Mbit/s")
    figure.supylabel(f"seconds until a loss, {task}")
    figure.legend(lines.values(), lines, loc="outside right upper", fontsize=8)
    plots.save(figure, path)


def bars(runs: Mapping[str, Any], measured: Sequence[Network], path: Path) -> None:
    """Time until BARS' target on networks without delay: DDP's, the fastest peer's and ocomm's."""
    task, margin, rates, ours = BARS
    adam = {run["seed"]: run["losses"][-1] for run in runs[task][ADAM]}
    figure, panels = pyplot.subplots(1, len(rates), figsize=(11, 2.6), layout="constrained")
    figure.suptitle("Time until Adam's loss, by speed of the network")
    for axis, network in zip(panels, [n for n in measured if n.rate in rates and not n.delay_ms], strict=True):
        found = {name: to_loss(network, METHODS[name], each, adam, margin) for name, each in runs[task].items()}
        seconds = {name: cost[0] for name, cost in found.items() if cost}
        peer = min((name for name in seconds if METHODS[name].is_peer and name != ADAM), key=seconds.__getitem__)
        names = {ADAM: "DDP", peer: peer.removesuffix(" hook"), ours: "ocomm"}
        drawn = axis.barh(list(names.values()), [seconds[name] / 3600 for name in names], color=["C7", "C0", "C1"])
        texts = [f"{s / 3600:.1f} h" if s > 3600 else f"{s / 60:.0f} min" for s in map(seconds.__getitem__, names)]
        axis.bar_label(drawn, texts, padding=3)
        axis.set(title=network.name, xticks=[])
        axis.margins(x=0.35)
        axis.invert_yaxis()
        axis.spines[["top", "right", "bottom"]].set_visible(False)
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
    if cells.CELLS_FILE.exists():
        text += f"\n\n## Cells measured\n\n{CELLS_ABOUT}\n\n{cells.show(*json.loads(cells.CELLS_FILE.read_text()))}"
    args.into.mkdir(parents=True, exist_ok=True)
    (args.into / "time-to-loss.md").write_text(f"{text}\n")
    draw(runs, measured, args.into / "time-to-loss.svg")
    bars(runs, measured, args.into / "bars.svg")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
