"""Features of torch.distributed over backend "ocomm" against gloo: compared, and timed as ratios in one run.

    ocommrun -np 2 python -m benchmarks.torch_features [--rounds 9] [--steps 10] [--only NAME ...]

runs as the ranks of a job, which torchrun or mpirun may start as well. First the numbers of all features are compared;
the exit status is 1 if some are not gloo's. Then features are timed over both backends in turn. Rank 0 writes the rows
for this number of ranks to ``benchmarks/results/torch-features.json``, and makes the tables in
``benchmarks/results/torch-features.md`` and ``docs/torch-distributed.md`` of all that is in it.

    python -m benchmarks.torch_features --tables

only makes the tables.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

import ocomm_torch as hvd
from benchmarks.launchers import interval_of_median
from benchmarks.torch_features import job
from benchmarks.torch_features.features import FEATURES, Feature
from ocomm.bench.kernels import commit, processor

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "torch-features.json"
REPORT = RESULTS.with_suffix(".md")
PAGE = ROOT / "docs" / "torch-distributed.md"
BEGIN, END = "<!-- features: made by python -m benchmarks.torch_features -->", "<!-- features: end -->"

ABOVE = """# Features of torch.distributed over ocomm and over gloo

Milliseconds of a step of the programs in `benchmarks/torch_features/features.py`, slowest rank, median over rounds. The
ratio is that of the two backends' times in one round: its median, with an interval of at least 95 % from the order of
the ratios. Both backends take turns in one job. Networks have some 1,600 parameters, and most messages are short: what
is timed are calls, not bandwidth. `python benchmarks/torch_distributed.py` times single calls by the tensor's size.
"""

#: By the number of ranks, as text: what was measured with so many.
Found = dict[str, dict[str, Any]]


def measure(features: list[Feature], rounds: int, steps: int) -> dict[str, Any]:
    """Compares and times features. Collective. SystemExit if their numbers are not gloo's."""
    rows = job.compare(features)
    if wrong := job.wrong(rows, hvd.size()):
        raise SystemExit(f"other numbers than gloo's: {[(name, rows[name]) for name in wrong]}")
    for name, of in job.times(features, rounds, steps).items() if rounds else ():
        ratios = [ours / theirs for ours, theirs in zip(of["ocomm"], of["gloo"], strict=True)]
        low, high = interval_of_median(ratios)
        rows[name] |= {f"{backend}_ms": round(median(of[backend]), 3) for backend in job.BACKENDS}
        rows[name] |= {"ratio": round(median(ratios), 3), "low": round(low, 3), "high": round(high, 3)}
    about = {"processor": processor(), "python": platform.python_version(), "torch": metadata.version("torch")}
    return {"about": about | {"commit": commit()}, "rounds": rounds, "steps": steps, "rows": rows}


def rows_of(found: Found, size: int) -> dict[str, dict[str, Any]]:
    return found.get(str(size), {}).get("rows", {})


def _numbers(feature: Feature, found: Found, size: int) -> str:
    """How the numbers of a feature compare with gloo's, in the words of the table."""
    if size not in feature.sizes:
        return "-"
    row = rows_of(found, size).get(feature.name)
    if row is None:
        return f"not on {' and '.join(feature.lacking)}" if feature.lacking else ""
    return "same bits" if row["same_bits"] else f"{row['gap']:.0e}"


def _ratio(row: dict[str, Any]) -> str:
    """Empty if the feature was compared and not timed."""
    return "" if "ratio" not in row else f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def _time(feature: Feature, found: Found) -> str:
    size = feature.sizes[0]
    row = rows_of(found, size).get(feature.name, {})
    return _ratio(row) + (f", on {size} ranks" if "ratio" in row and size > 2 else "")


def table(found: Found) -> str:
    """The table of the documentation."""
    lines = ["| feature | compared | on 2 ranks | on 4 ranks | time over gloo's |", "|---|---|---|---|---|"]
    for feature in FEATURES:
        cells = [feature.name, feature.compared, _numbers(feature, found, 2), _numbers(feature, found, 4)]
        lines.append("| " + " | ".join([*cells, _time(feature, found)]) + " |")
    return "\n".join(lines)


def page(text: str, found: Found) -> str:
    """The page of the documentation with the table between its two marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}"


def report(found: Found) -> str:
    """The page of results."""
    parts = [ABOVE]
    for size, of in sorted(found.items()):
        rows = [
            [name, f"{row['gloo_ms']:.2f}", f"{row['ocomm_ms']:.2f}", _ratio(row)]
            for name, row in of["rows"].items()
            if "ratio" in row
        ]
        if not rows:
            continue
        about = ", ".join(f"{key} {value}" for key, value in of["about"].items())
        parts += [
            f"## {size} ranks\n\n    ocommrun -np {size} python -m benchmarks.torch_features "
            f"--rounds {of['rounds']} --steps {of['steps']}\n",
            tabulate(rows, ["feature", "gloo ms", "ocomm ms", "ratio"], "github", disable_numparse=True) + "\n",
            f"One machine. {about[0].upper()}{about[1:]}.\n",
        ]
    return "\n".join(parts)


def make_tables() -> None:
    found = json.loads(RESULTS.read_text())
    REPORT.write_text(report(found))
    PAGE.write_text(page(PAGE.read_text(), found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="of times (default 9); 0: only compare")
    parser.add_argument("--steps", type=int, default=10, help="that are timed in a turn (default 10)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="print the rows of these features; write nothing")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if args.tables:
        make_tables()
        return 0
    job.start()
    features = job.chosen(hvd.size(), lambda feature: not args.only or feature.name in args.only)
    measured = measure(features, args.rounds, args.steps)
    if hvd.rank() == 0:
        for name, row in measured["rows"].items():
            print(f"{name:50} {_ratio(row):>24}", flush=True)
        if not args.only:
            found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            found[str(hvd.size())] = measured
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
            make_tables()
    return 0


if __name__ == "__main__":
    sys.exit(main())
