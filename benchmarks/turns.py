"""Methods that take turns in one job, on the same links: what ``step`` and ``keras_step`` have in common.

Whatever else the machine does, it does to all of them. The job runs in a lab of namespaces that is made for it, or the
ranks of a job that is already running call ``main``. See the benchmarks for what the columns mean.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from ocomm import api
from ocomm.bench._lab import Lab, LabError, interface_sent_bytes, why_not
from ocomm.bench.kernels import commit, processor

SKIPPED = 77
#: Of a Markdown file that a benchmark writes: what stands below is replaced.
MARK = "<!-- measured -->"
#: What tables and pictures compare with: training without communication, and torch's.
LOCAL, DDP = "local", "DDP fp32"
LOCAL_MUON = "local, Muon"
#: Rows whose parameters ranks do not compare: they train alone, or round an average in their own way.
APART = (LOCAL, LOCAL_MUON, "hivemind, 8 bits")
#: What dense averages of ocomm's are called.
DENSE = "ocomm dense"

#: Of one rate: ranks, rate, parameters, rows, and what else the benchmark has to say.
Result = dict[str, Any]


@dataclass(slots=True, eq=False)
class Method:
    """``run(n)`` trains n steps and returns their seconds; ``digest()`` is of the parameters, which ranks compare.

    ``times`` are of this rank, in seconds per step, one per round.
    """

    name: str
    run: Callable[[int], float]
    digest: Callable[[], str]
    report: Callable[[], dict[str, Any]] = dict
    times: list[float] = field(default_factory=list)
    sent: int = 0
    stolen: float = 0.0
    steps: int = 0


def sent_bytes() -> int:
    """Over all interfaces of this host but loopback, all headers included."""
    return interface_sent_bytes(Path("/proc/self/net/dev").read_text())


def stolen_ms() -> float:
    """Time of this machine's processors that its hypervisor has given to other machines."""
    total = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return 1e3 * int(total[8]) / os.sysconf("SC_CLK_TCK")


def timed(step: Callable[[], object]) -> Callable[[int], float]:
    """A ``Method.run`` of a function that takes one step."""

    def run(steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            step()
        return time.perf_counter() - started

    return run


def take_turns(methods: Sequence[Method], rounds: int, steps: int) -> list[dict[str, Any]]:
    """A row per method: ``step_ms`` of the slowest rank, median over ``times_ms``; bytes ``sent`` of the busiest
    host per step; ``stolen_ms`` of its machine. Collective; the same on all ranks. SystemExit if replicas differ.
    """
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for method in methods:
            api.barrier()
            before, gone = sent_bytes(), stolen_ms()
            method.times.append(method.run(steps) / steps)
            api.barrier()  # whoever is done sooner must not take the others' share of a processor
            method.sent += sent_bytes() - before
            method.stolen += stolen_ms() - gone
            method.steps += steps
    gc.enable()
    table = api.allgather_object([(m.times, m.sent / m.steps, m.stolen / m.steps, m.digest()) for m in methods])
    rows = []
    for number, method in enumerate(methods):
        of = [said[number] for said in table]
        if method.name not in APART and len({digest for *_, digest in of}) > 1:
            raise SystemExit(f"the replicas of {method.name} differ")
        times = [max(each) for each in zip(*(t for t, *_ in of), strict=True)]
        rows.append(
            {
                "method": method.name,
                "step_ms": 1e3 * median(times),
                "sent": max(sent for _, sent, _, _ in of),
                "stolen_ms": max(stolen for _, _, stolen, _ in of),
                "times_ms": [1e3 * seconds for seconds in times],
                "report": {k: v for k, v in method.report().items() if isinstance(v, (int, float, str))},
            }
        )
    return rows


def step_ms(result: Result, method: str) -> float | None:
    """None where the method was not measured."""
    return next((row["step_ms"] for row in result["rows"] if row["method"] == method), None)


def show(
    result: Result,
    base: str,
    also: Mapping[str, float] | None = None,
    notes: Sequence[str] = (),
    further: Mapping[str, Mapping[str, str]] | None = None,
) -> str:
    """A headline and a table of the speed over ``base``. ``also``: further rows, name and ms; ``further``: columns."""
    more = further or {}
    local, slow = step_ms(result, LOCAL), step_ms(result, base)
    assert local is not None

    def row(name: str, ms: float, sent: str) -> list[str]:
        words = [name, f"{ms:.1f}", f"{ms - local:.1f}", sent, f"{slow / ms:.2f}" if slow else "-"]
        return words + [cells.get(name, "") for cells in more.values()]

    lines = [row(r["method"], r["step_ms"], f"{r['sent'] / 1e6:.2f}") for r in result["rows"]]
    lines += [row(name, ms, "") for name, ms in (also or {}).items()]
    head = [f"{result['ranks']} ranks at {result['rate']}", f"{result['parameters'] / 1e6:.1f} M parameters", *notes]
    if result.get("delay_ms"):
        head.append(f"{result['delay_ms']:g} ms of delay, which took {result['relay_cores']:.2f} processors")
    if (stolen := max(r.get("stolen_ms", 0.0) for r in result["rows"])) >= 1:
        head.append(f"up to {stolen:.0f} ms per step taken by the hypervisor")
    if slow:
        head.append(f"{1 - local / slow:.0%} of the step of {base} is communication")
    columns = ["method", "step ms", "exposed ms", "sent MB", f"x {base}", *more]
    return ", ".join(head) + "\n\n" + tabulate(lines, columns, "github")


def parser(doc: str | None, methods: Sequence[str], batch: int | None, of_what: str) -> argparse.ArgumentParser:
    """With the options that the benchmarks have in common; ``batch``: the default, of ``of_what``."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--hosts", type=int, metavar="N", help="make a lab of N hosts, and measure there")
    add("--slots", type=int, default=1, help="ranks on each host of the lab (default 1)")
    add("--rate", nargs="+", default=["160mbit"], help="nominal rate of a host's network (default 160mbit)")
    add("--delay", type=float, default=0.0, metavar="MS", help="of a packet between hosts of the lab, one way")
    if methods:
        add("--methods", nargs="+", choices=methods, help="default: all that differ; 'local' is always one of them")
        add("--rounds", type=int, default=3, help="in which every method has its turn (default 3)")
    add("--steps", type=int, default=4, help="of a method in one turn (default %(default)s)")
    add("--batch", type=int, default=batch, help=f"{of_what} per rank (default {batch or 'that of the model'})")
    add("--threads", type=int, default=1, help="of the framework, per rank (default 1)")
    add("--timeout", type=float, default=900, help="seconds for one rate (default 900)")
    add("--json", type=Path, metavar="FILE")
    return made


def in_lab(module: str, args: argparse.Namespace, rate: str, environ: Mapping[str, str] | None = None) -> list[Result]:
    """Runs the benchmark ``module`` as a job of its own on hosts joined at ``rate``. LabError if it has no results.

    ``environ`` is for all ranks, beside the address of rank 0 in BENCH_MASTER.
    """
    own = ("hosts", "slots", "rate", "delay", "timeout", "json", "markdown")
    words: list[str] = []
    for name, value in vars(args).items():
        if name not in own and value is not None and value is not False:
            given = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, given)]
    with Lab(args.hosts, rate, args.delay) as lab, tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        program = [sys.executable, "-m", module, "--rate", rate, "--json", str(output), *words]
        variables = {"BENCH_MASTER": lab.address(0), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        variables |= environ or {}
        command = lab.mpirun(args.hosts * args.slots, program, slots=args.slots, exported=variables)
        started = time.perf_counter()
        done = lab.run(command, args.timeout, variables)
        if not output.exists():
            raise LabError(f"the ranks have written no result:\n{done.stdout[-2000:]}{done.stderr[-8000:]}")
        results = json.loads(output.read_text())["results"]
        if args.delay:
            share = lab.relay_seconds() / (time.perf_counter() - started)
            results = [{**result, "delay_ms": args.delay, "relay_cores": share} for result in results]
        return results


def ask(module: str, rate: str, delay: float, words: Sequence[str] = ()) -> dict[str, Any]:
    """What the benchmark ``module`` writes of a lab of two hosts; ``words`` are further options of its command line.

    CalledProcessError if it fails, as where no lab can be had.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        where = ["--hosts", "2", "--rate", rate, "--delay", f"{delay:g}", "--json", str(file)]
        subprocess.run([sys.executable, "-m", module, *where, *words], check=True)
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def command() -> str:
    """What was typed, but for where its results go."""
    words = sys.argv[1:]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    program = Path(sys.argv[0]).resolve().with_suffix("").relative_to(Path(__file__).resolve().parents[1])
    return shlex.join(["python", "-m", ".".join(program.parts), *words])


def main(
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], list[Result]],
    measure_in_lab: Callable[[argparse.Namespace, str], list[Result]],
    show: Callable[[Result], str],
    versions: Mapping[str, str],
) -> int:
    """Measures in a lab, once per rate, or as the ranks of a job; prints and writes the results. The exit status."""
    if args.hosts:
        if reason := why_not():
            print(f"no lab here: {reason}", file=sys.stderr)
            return SKIPPED
        results = []
        try:
            for rate in args.rate:
                results += measure_in_lab(args, rate)
        except LabError as error:
            print(error, file=sys.stderr)
            return 1
    else:
        results = measure(args)
    # init() has set RANK, whatever started the ranks.
    if args.hosts or os.environ.get("RANK", "0") == "0":
        for result in results:
            print(show(result), end="\n\n")
        if args.json:
            packages = {name: metadata.version(name) for name in ("numpy", "mpi4py")}
            about = {"processor": processor(), "python": platform.python_version(), **versions, **packages}
            whole = {"about": {**about, "commit": commit()}, "command": command(), "results": results}
            args.json.write_text(json.dumps(whole, indent=1))
    return 0
