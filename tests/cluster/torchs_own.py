"""What becomes of Torch's own distributed tests on backend "ocomm" and on gloo: the list, and the page of it.

    python -m tests.cluster.torchs_own [--measure]

makes ``docs/torchs-own-tests.md`` from the list ``torchs_own.json``; ``--measure`` makes the list first, in jobs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.jobs import launchers

HERE = Path(__file__).parent
LIST = HERE / "torchs_own.json"
PAGE = HERE.parents[1] / "docs" / "torchs-own-tests.md"
RANK = HERE / "rank_torchs_own.py"
MARK = "<!-- made by tests/cluster/torchs_own.py -->"
SIZES = (2, 4)
BACKENDS = ("gloo", "ocomm")
#: Seconds for a job; a method has a deadline of its own.
JOB_S = 600.0

#: Why methods that begin with the first text do not pass on ocomm, or not on gloo.
REASONS = {
    "test_all_to_all": "gloo has no all_to_all of lists of unlike tensors; ocomm has",
    "test_monitored_barrier": "Torch has `monitored_barrier` for gloo alone, and refuses other backends by their name",
    "test_send_recv_any_source": "backend ocomm has no `recv` from any source and says so; pass `src=`",
}

#: What became of a method on each backend, by the number of ranks: "passed", "failed", "hung", or why it was skipped.
Found = dict[str, dict[str, dict[str, str]]]


def methods() -> list[str]:
    """The names of the methods of the installed Torch, in a process of its own: importing them changes Torch."""
    program = (
        "import os; os.environ.update(BACKEND='gloo', WORLD_SIZE='2')\n"
        "from torch.testing._internal.distributed.distributed_test import DistributedTest\n"
        "print(*(name for name in dir(DistributedTest._DistTestBase) if name.startswith('test_')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.split()


def measure(size: int, backend: str, names: Sequence[str], folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Runs methods, in one job after the other if methods end jobs.

    Returns:
        What became of each method, and the words of those that did not pass on some rank.
    """
    outcomes: dict[str, str] = {}
    words: dict[str, str] = {}
    left = list(names)
    for number in range(len(names)):
        if not left:
            break
        place = folder / f"{backend} {size} {number}"
        place.mkdir()
        command, environ = launchers(size)["ocommrun"]
        done = subprocess.run(
            [*command, str(RANK), backend, str(place), *left],
            env={**environ, "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=JOB_S,
            check=False,
        )
        said = [_lines(place / f"rank {rank}") for rank in range(size)]
        begun = [name for name in left if any(name in lines for lines in said)]
        assert begun, f"no method has begun:\n{done.stdout[-5000:]}"
        for name in begun:
            lines = [each.get(name, {"outcome": "not begun"}) for each in said]
            outcomes[name] = _together(lines)
            words[name] = "\n".join(str(line.get("why", "")) for line in lines)
            if outcomes[name] == "hung":
                stacks = [(place / f"stacks of rank {rank}").read_text() for rank in range(size)]
                words[name] = "\n".join([done.stdout[-3000:], *stacks])
        left = left[left.index(begun[-1]) + 1 :]
    return outcomes, words


def _lines(file: Path) -> dict[str, dict[str, Any]]:
    """The last line of each method."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["method"]: line for line in lines}


def _together(lines: Sequence[dict[str, Any]]) -> str:
    """What became of a method on all ranks."""
    outcomes = [line["outcome"] for line in lines]
    if "failed" in outcomes:
        return "failed"
    if not {"passed", "skipped"}.issuperset(outcomes):
        return "hung"
    return "passed" if "passed" in outcomes else str(lines[0]["why"])


def every_outcome(folder: Path) -> tuple[Found, dict[str, str]]:
    """Runs all methods on all sizes and backends. Returns the list, and the words of what did not pass."""
    found: Found = {}
    words = {}
    names = methods()
    for size in SIZES:
        for backend in BACKENDS:
            outcomes, said = measure(size, backend, names, folder)
            words |= {f"{name}, {backend}, {size} ranks": text for name, text in said.items()}
            for name, outcome in outcomes.items():
                found.setdefault(name, {}).setdefault(str(size), {})[backend] = outcome
    return dict(sorted(found.items())), words


def read() -> tuple[str, Found]:
    """The version of Torch with which the list was made, and the list."""
    content = json.loads(LIST.read_text())
    return content["torch"], content["methods"]


def write(version: str, found: Found) -> None:
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    LIST.write_text(f'{{"torch": "{version}", "methods": {{\n{rows}\n}}}}\n')


def reason(name: str) -> str:
    return next((words for start, words in REASONS.items() if name.startswith(start)), "")


def page(text: str) -> str:
    """The page with the tables of the list below the mark."""
    version, found = read()
    lines = [f"{text.partition(MARK)[0]}{MARK}", "", "## Counts", ""]
    lines += [f"Torch {version}, {len(found)} methods.", ""]
    lines += ["| ranks | passed on gloo | passed on ocomm | on gloo alone | on ocomm alone | on neither | skipped |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for size in SIZES:
        rows = [row[str(size)] for row in found.values()]
        both = Counter((_kind(row["gloo"]), _kind(row["ocomm"])) for row in rows)
        on = {b: sum(row[b] == "passed" for row in rows) for b in BACKENDS}
        alone = [sum(n for kinds, n in both.items() if (kinds[k], kinds[1 - k]) == ("passed", "not")) for k in (0, 1)]
        neither, skipped = both["not", "not"], both["skipped", "skipped"]
        lines += [f"| {size} | {on['gloo']} | {on['ocomm']} | {alone[0]} | {alone[1]} | {neither} | {skipped} |"]
    lines += ["", "## What does not pass on one of them", ""]
    lines += ["| method | ranks | gloo | ocomm | cause |", "|---|---|---|---|---|"]
    for name, row in found.items():
        for outcomes, sizes in _alike(row):
            kinds = {_kind(outcome) for outcome in outcomes}
            if kinds not in ({"passed"}, {"skipped"}):
                lines += [f"| `{name}` | {sizes} | {outcomes[0]} | {outcomes[1]} | {reason(name)} |"]
    lines += ["", "## What Torch skips", ""]
    lines += ["| ranks | why, in Torch's words | methods |", "|---|---|---|"]
    skipped_for: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, row in found.items():
        for outcomes, sizes in _alike(row):
            if _kind(outcomes[1]) == "skipped":
                skipped_for[outcomes[1], sizes].append(name)
    for (why, sizes), names in sorted(skipped_for.items(), key=lambda item: (-len(item[1]), item[0])):
        lines += [f"| {sizes} | {why} | {_names(names)} |"]
    lines += ["", "## What passes on both", ""]
    lines += ["| ranks | methods |", "|---|---|"]
    passed: dict[str, list[str]] = defaultdict(list)
    for name, row in found.items():
        for outcomes, sizes in _alike(row):
            if {*outcomes} == {"passed"}:
                passed[sizes].append(name)
    for sizes, names in sorted(passed.items(), key=lambda item: -len(item[1])):
        lines += [f"| {sizes} | {len(names)}: {_names(names)} |"]
    return "\n".join(lines) + "\n"


def _kind(outcome: str) -> str:
    return {"passed": "passed", "failed": "not", "hung": "not"}.get(outcome, "skipped")


def _alike(row: dict[str, dict[str, str]]) -> list[tuple[tuple[str, str], str]]:
    """The outcomes on gloo and ocomm, and the numbers of ranks that have them."""
    sizes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for size, outcomes in row.items():
        sizes[outcomes["gloo"], outcomes["ocomm"]].append(size)
    return [(outcomes, " and ".join(each)) for outcomes, each in sizes.items()]


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name.removeprefix('test_')}`" for name in names)


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        from importlib.metadata import version

        with tempfile.TemporaryDirectory() as folder:
            write(version("torch").partition("+")[0], every_outcome(Path(folder))[0])
    PAGE.write_text(page(PAGE.read_text()))
