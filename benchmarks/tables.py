"""Writes down what the benchmarks of a step have measured: the tables of step.md, from the JSON files beside it.

    python -m benchmarks.tables [--into benchmarks/results]

What stands above the line MARK in step.md stays as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import step
from benchmarks.plots import RESULTS
from benchmarks.turns import MARK

#: JSON files and what they are about, in the order of step.md.
SECTIONS = {
    "step-2hosts": "Two hosts",
    "step-2hosts-clipped": "Two hosts, gradients clipped",
    "step-2hosts-resnet": "Two hosts, ResNet-18",
    "step-2hosts-codes": "Two hosts, gradients in 16, 8 and 4 bits",
    "step-2hosts-slots": "Two hosts of two ranks: flat and hierarchical",
    "step-4hosts": "Four hosts",
    "step-1host": "One host, no shaped link",
    "step-2hosts-deepspeed": "DeepSpeed beside it",
}


def section(title: str, path: Path) -> str:
    whole = json.loads(path.read_text())
    about = dict(whole["about"])
    commit, machine = about.pop("commit"), about.pop("processor")
    versions = ", ".join(f"{name} {version}" for name, version in about.items())
    tables = [step.show(result) for result in whole["results"]]
    from_where = f"{path.name}; commit {commit}, {machine}, {versions}"
    return "\n\n".join([f"## {title}", f"`{whole['command']}` ({from_where})", *tables])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER")
    folder = parser.parse_args().into
    page = folder / "step.md"
    above = page.read_text().partition(MARK)[0] if page.exists() else ""
    paths = {folder / f"{name}.json": title for name, title in SECTIONS.items()}
    sections = [section(title, path) for path, title in paths.items() if path.exists()]
    page.write_text(f"{above}{MARK}\n\n" + "\n\n".join(sections) + "\n")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
