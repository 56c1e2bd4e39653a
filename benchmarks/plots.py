"""Draws what the benchmarks have measured, from the JSON files beside the pictures.

    python -m benchmarks.plots [--into benchmarks/results]

speed.svg     speed over DDP by bandwidth, from step-2hosts.json, with what a perfect 1-bit exchange would reach
bytes.svg     bytes per step by method, from the same
timeline.svg  one step, thread by thread, from profile-2hosts.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from benchmarks.turns import DDP, LOCAL, step_ms
from ocomm.bench._lab import bits_per_second

RESULTS = Path(__file__).parent / "results"
#: Of the timeline; what is not named here is grey.
COLOURS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "hooks": "#d94801",
    "step": "#dadaeb",
    "apply": "#807dba",
    "COMPRESS": "#41ab5d",
    "AVERAGE": "#006d2c",
    "EXCHANGE": "#fdae6b",
}


def save(figure: Any, path: Path) -> None:
    """As small text that is the same for the same numbers."""
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ocomm"}):
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    print(path)


def speed(results: list[dict[str, Any]], path: Path) -> None:
    """Speed over DDP by bandwidth."""
    results = sorted(results, key=lambda result: bits_per_second(result["rate"]))
    rates = [bits_per_second(result["rate"]) / 1e6 for result in results]
    figure, axes = plt.subplots(figsize=(7, 4.2))
    bases = [step_ms(result, DDP) for result in results]
    names = [row["method"] for row in results[0]["rows"] if row["method"] not in (LOCAL, DDP)]
    for name in names:
        axes.plot(rates, [a / step_ms(r, name) for a, r in zip(bases, results, strict=True)], "o-", label=name)
    for name, style in zip(results[0]["limits"], (":", "--"), strict=True):
        axes.plot(rates, [a / r["limits"][name] for a, r in zip(bases, results, strict=True)], f"k{style}", label=name)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", ylabel=f"speed over {DDP}")
    shares = [1 - step_ms(r, LOCAL) / a for a, r in zip(bases, results, strict=True)]
    axes.set_xticks(rates, [f"{rate:g} Mbit/s\n{share:.0%}" for rate, share in zip(rates, shares, strict=True)])
    axes.set_xticks([], minor=True)
    ticks = [1, 2, 4, 8, 16]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_xlabel(f"a host's link, and the part of {DDP}'s step that is communication")
    millions = results[0]["parameters"] / 1e6
    axes.set_title(f"{results[0]['ranks']} hosts, {results[0]['model']}, {millions:.1f} M parameters", fontsize=10)
    axes.legend(fontsize=7, ncol=2)
    save(figure, path)


def sent(result: dict[str, Any], path: Path) -> None:
    """Bytes per step by method."""
    rows = [row for row in result["rows"] if row["method"] != LOCAL][::-1]
    megabytes = [row["sent"] / 1e6 for row in rows]
    figure, axes = plt.subplots(figsize=(7, 0.35 * len(rows) + 1))
    bars = axes.barh([row["method"] for row in rows], megabytes, color="#4292c6")
    axes.bar_label(bars, [f"{value:.2f}" for value in megabytes], padding=3, fontsize=8)
    axes.set(xscale="log", xlabel="MB that a host sends per step, all headers included")
    axes.margins(x=0.15)
    save(figure, path)


def timeline(result: dict[str, Any], path: Path) -> None:
    """One step: the thread that trains, and below it the segments of the exchange."""
    spans = [tuple(span) for span in result["timeline"]]
    rows = ["training", *sorted({span[0] for span in spans} - {"training"}, key=lambda row: (len(row), row))]
    figure, axes = plt.subplots(figsize=(9, 0.22 * len(rows) + 1.4))
    # What is nested is shorter than what it is in, and is painted over it.
    for row, what, start, end in sorted(spans, key=lambda span: span[2] - span[3]):
        kind = "hooks" if "hook" in what else what
        if row == "training" or kind in COLOURS:  # of a segment only its stages, not the whole
            axes.barh(rows.index(row), end - start, left=start, color=COLOURS.get(kind, "#969696"))
    names = ["training thread", *(f"segment lane {n}" for n in range(1, len(rows)))]
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"ms; 1-bit Adam, {result['ranks']} hosts at {result['rate']}, rank 0")
    place = {"ncol": len(COLOURS), "loc": "upper center", "bbox_to_anchor": (0.5, -0.35), "frameon": False}
    axes.legend([Patch(color=colour) for colour in COLOURS.values()], list(COLOURS), fontsize=7, **place)
    save(figure, path)


def results(names: Iterable[Path]) -> list[dict[str, Any]]:
    return [result for name in names if name.exists() for result in json.loads(name.read_text())["results"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER")
    args = parser.parse_args()
    steps = results([args.into / "step-2hosts.json"])
    if steps:
        speed(steps, args.into / "speed.svg")
        sent(steps[0], args.into / "bytes.svg")
    profiles = results([args.into / "profile-2hosts.json"])
    if profiles:
        timeline(profiles[0], args.into / "timeline.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
