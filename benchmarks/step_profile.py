"""Where every millisecond of a step of 1-bit Adam goes, on slow links, beside the same step without communication.

    python -m benchmarks.step_profile --hosts 2 --rate 850mbit 160mbit [--json FILE] [--markdown docs/profile.md]
                                      [--hold codec hooks runtime]

makes a lab of namespaces (see benchmarks/step.py) with one rank and one thread per host; both trainings take turns.
As ranks of a job that is already running it profiles there. Figures are of rank 0, per step: means over that half of
the steps whose time is nearest to the median. ``--markdown`` replaces what follows the line MARK in that file;
with ``--hold`` the exit status is 1 if one of these budgets was exceeded.

wall     of the thread that trains: its parts add up to the step
CPU      of each thread, by its own clock: it does not grow while other programs, or other threads, have the processor
codec    of the background thread: the computations of the last step's own plans, the least of some repetitions
network  of the background thread: its time in the kernel; sockets, and waiting in between. The kernel looks some
         hundred times a second whether a thread is in it, so a short run knows this, and the runtime, only roughly
runtime  all CPU time of the background thread that is neither, MPI's library included, and what step() does in Python
budget   of the step in which it was least, because other programs only add to it
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import torch
from tabulate import tabulate

import ocomm_torch as hvd
from benchmarks import turns
from benchmarks.models import TASKS, Task
from benchmarks.step import FREEZE_STEP, adam, digest
from benchmarks.turns import MARK, Result
from ocomm import session as sessions
from ocomm.collectives.plan import name_of
from ocomm.collectives.python_engine import PythonEngine
from ocomm.telemetry import timeline

#: Steps before any is measured. In the first after its freeze 1-bit Adam reads a momentum which is gone when the step
#: is over, so what it computes cannot be repeated.
WARMUP = 6
#: Steps of one kind before those of the other.
TURN = 4
#: In milliseconds of CPU time; the codec's comes on top of the optimizer that it replaces.
BUDGETS = {"codec": 3.0, "hooks": 1.0, "runtime": 2.0}
NOT_CODEC = ("WriteHeaders", "CheckHeaders")
HOOKS = ("hook that opens the step", "hooks that post a bucket", "hooks that count")
CLOCK = "this profile's own hooks"

#: By part: milliseconds of a step.
Parts = dict[str, float]


class Clock:
    """Wall and CPU time of one thread by part. Parts nest; time counts for the innermost."""

    def __init__(self) -> None:
        self.spent: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        #: (part, start, end) in ns of the monotonic clock, while it is a list.
        self.spans: list[tuple[str, int, int]] | None = None
        self._open: list[tuple[str, int]] = []
        self._wall = self._cpu = 0

    def _charge(self) -> int:
        wall, cpu = time.monotonic_ns(), time.thread_time_ns()
        if self._open:
            spent = self.spent[self._open[-1][0]]
            spent[0] += wall - self._wall
            spent[1] += cpu - self._cpu
        self._wall, self._cpu = wall, cpu
        return wall

    def begin(self, part: str) -> None:
        self._open.append((part, self._charge()))

    def end(self, part: str = "") -> None:
        """``part``: what it turned out to be, if not what it began as."""
        begun_as, start = self._open[-1]
        part = part or begun_as
        self._open[-1] = part, start
        now = self._charge()
        self._open.pop()
        self.spent[part][2] += 1
        if self.spans is not None:
            self.spans.append((part, start, now))

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self.begin(part)
        try:
            yield
        finally:
            self.end()

    @property
    def part(self) -> str:
        """The innermost; "" outside all."""
        return self._open[-1][0] if self._open else ""

    def take(self) -> dict[str, tuple[float, float, int]]:
        """(wall, CPU, times) by part, in milliseconds, and starts anew."""
        taken = {part: (wall / 1e6, cpu / 1e6, times) for part, (wall, cpu, times) in self.spent.items()}
        self.spent.clear()
        return taken


class ClockedKernels:
    """Kernels of which every call within ``step()`` is a part of its own."""

    def __init__(self, kernels: Any, clock: Clock) -> None:
        self._kernels = kernels
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernels, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            if self._clock.part != "step":
                return found(*arguments)
            with self._clock(name):
                return found(*arguments)

        return call


class Recorder:
    """A channel that keeps the plans of the step under way."""

    def __init__(self, channel: Any, plans: list[Any]) -> None:
        self._channel = channel
        self._plans = plans

    def submit(self, *arguments: Any) -> Any:
        ticket = self._channel.submit(*arguments)
        self._plans.append(ticket.plan)
        return ticket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


class Trainer:
    """A model, its optimizer, and a clock of the parts of its steps."""

    def __init__(self, task: Task, batch: torch.Tensor, wrap: Callable[..., Any] | None) -> None:
        torch.manual_seed(0)
        self.clock = Clock()
        self.model = task.model()
        self._loss = lambda: task.loss(self.model, batch)
        self.optimizer: Any = adam(self.model)
        #: Those of the step under way.
        self.plans: list[Any] = []
        self._hooks = self._posted = 0
        # Hooks run in the order of their registration: these two are around the optimizer's own, or around nothing.
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._before_hook)
        if wrap is not None:
            self.optimizer = wrap(self.optimizer, self.model.named_parameters())
        self._stepper = SimpleNamespace(posted=0) if wrap is None else self.optimizer._driver.stepper.buckets
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._after_hook)

    def _before_hook(self, _: torch.Tensor) -> None:
        self._posted = self._stepper.posted
        self.clock.begin("hooks")

    def _after_hook(self, _: torch.Tensor) -> None:
        kind = HOOKS[0 if self._hooks == 0 else 1 if self._stepper.posted > self._posted else 2]
        self._hooks += 1
        self.clock.end(kind)

    def step(self) -> None:
        clock, self._hooks = self.clock, 0
        self.plans.clear()
        with clock("zero_grad"):
            self.optimizer.zero_grad()
        with clock("forward"):
            loss = self._loss()
        with clock("backward"):
            loss.backward()
        with clock("step"):
            self.optimizer.step()


class Threads:
    """CPU time of this process's threads."""

    def __init__(self) -> None:
        background = next(thread for thread in threading.enumerate() if thread.name == "ocomm")
        assert background.ident is not None
        self._clock = time.pthread_getcpuclockid(background.ident)
        self._stat = Path(f"/proc/self/task/{background.native_id}/stat")

    def now(self) -> tuple[float, float]:
        """Of the background thread and of the whole process, in milliseconds."""
        return 1e3 * time.clock_gettime(self._clock), 1e3 * time.process_time()

    def ticks(self) -> tuple[int, int]:
        """Of the background thread in user mode and in the kernel, as the kernel counts them: in coarse units."""
        fields = self._stat.read_text().rpartition(")")[2].split()
        return int(fields[11]), int(fields[12])


def sampling_error(user: int, in_kernel: int) -> float:
    """Standard error of the share that one of two kinds of samples has, if they come at random."""
    samples = max(user + in_kernel, 1)
    share = in_kernel / samples
    return math.sqrt(share * (1 - share) / samples)


def middle(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The half whose wall time is nearest to the median."""
    centre = median(step["wall"] for step in steps)
    return sorted(steps, key=lambda step: abs(step["wall"] - centre))[: max(1, len(steps) // 2)]


def mean(steps: list[dict[str, Any]], name: str) -> float:
    return fmean(step[name] for step in steps)


def mean_parts(steps: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Wall time, CPU time and times by part."""
    return {part: [fmean(step["parts"][part][k] for step in steps) for k in range(3)] for part in steps[0]["parts"]}


def without_clock(parts: dict[str, list[float]], clock: list[float]) -> None:
    """Takes from the hooks what the clock around each costs by itself: of ``clock[2]`` such pairs of hooks."""
    total = [0.0, 0.0, 0.0]
    for wall_or_cpu in (0, 1):
        each = clock[wall_or_cpu] / clock[2]
        for name in HOOKS:
            spent = parts[name][wall_or_cpu]
            parts[name][wall_or_cpu] = max(spent - each * parts[name][2], 0.0)
            total[wall_or_cpu] += spent - parts[name][wall_or_cpu]
    parts[CLOCK] = total


def watched(trainer: Trainer, threads: Threads) -> dict[str, Any]:
    """One step: its wall time, its parts, CPU of the background thread and of all threads."""
    before, started = threads.now(), time.perf_counter()
    trainer.step()
    wall, after = 1e3 * (time.perf_counter() - started), threads.now()
    spent = [b - a for a, b in zip(before, after, strict=True)]
    return {"wall": wall, "parts": trainer.clock.take(), "background": spent[0], "process": spent[1]}


def least(
    alone: list[dict[str, Any]], together: list[dict[str, Any]], kernels: list[str], codec: Parts, in_kernel: float
) -> Parts:
    """CPU milliseconds for which there are budgets, each of the step that took least: other programs only add to it."""

    def cpu(steps: list[dict[str, Any]], *parts: str) -> float:
        return min(sum(step["parts"][part][1] for part in parts) for step in steps)

    tensors = alone[0]["parts"][HOOKS[2]][2]
    clock = cpu(alone, HOOKS[2]) / tensors
    background = min(step["background"] for step in together)
    computed = sum(codec.values())
    return {
        "Adam": cpu(alone, "step"),
        "codec": computed + cpu(together, *kernels),
        "hooks": max(cpu(together, *HOOKS) - clock * (tensors + 1), 0.0),
        "runtime": max(background * (1 - in_kernel) - computed, 0.0) + cpu(together, "step"),
        "network": background * in_kernel,
    }


class Replay:
    """CPU time of the computations of a step's plans when it is over: each once more, into the same buffers.

    What they read is as it was until the next step begins, so they write the same bits.
    """

    def __init__(self, kernels: Any) -> None:
        self._engine = PythonEngine(kernels, threading.Event())
        #: By number of the computation, which is the same in every step: its kind, and the least that it took.
        self._least: dict[int, tuple[str, float]] = {}
        #: Elements of the last step's computations, by kind.
        self.elements: dict[str, int] = {}

    def run(self, plans: list[Any]) -> None:
        stages = [stage for plan in plans for segment in plan.segments for stage in segment]
        self.elements = defaultdict(int)
        for number, computation in enumerate(computation for stage in stages for computation in stage.compute):
            kind = name_of(computation)
            if kind not in NOT_CODEC:
                self.elements[kind] += int(computation.argument("blocks")["length"].sum())
                started = time.thread_time_ns()
                self._engine.compute(computation, None)  # type: ignore[arg-type]
                spent = (time.thread_time_ns() - started) / 1e6
                self._least[number] = kind, min(spent, self._least.get(number, (kind, spent))[1])

    @property
    def codec(self) -> Parts:
        """By kind, in milliseconds."""
        parts: Parts = defaultdict(float)
        for kind, spent in self._least.values():
            parts[kind] += spent
        return parts


def one_step(trainer: Trainer, steps: int = 5) -> list[tuple[str, str, float, float]]:
    """A typical step as (row, what, start, end): milliseconds from its begin, of this rank's threads."""
    ends: list[int] = []
    spans: list[tuple[str, int, int]] = []
    trainer.clock.spans = spans
    wall_ns = time.time_ns() - time.monotonic_ns()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        hvd.start_timeline(str(path))
        for _ in range(steps):
            ends.append(time.monotonic_ns())
            trainer.step()
        ends.append(time.monotonic_ns())
        hvd.stop_timeline()
        trainer.clock.spans = None
        trainer.clock.take()
        events = timeline.read(timeline.path_of(str(path), hvd.rank()))
    whole = [b - a for a, b in pairwise(ends)]
    number = whole.index(sorted(whole)[steps // 2])
    begin, end = ends[number], ends[number + 1]
    rows = [("training", part, start, until) for part, start, until in spans]
    names = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    for event in events:
        if event["ph"] == "X" and names.get(event["tid"], "").startswith("exchange lane"):
            start = 1000 * event["ts"] - wall_ns
            rows.append((names[event["tid"]], event["name"], start, start + 1000 * event["dur"]))
    inside = [(row, what, a - begin, b - begin) for row, what, a, b in rows if begin <= a < end]
    return [(row, what, round(a / 1e6, 3), round(b / 1e6, 3)) for row, what, a, b in inside]


def measure(args: argparse.Namespace) -> list[Result]:
    """Runs as every rank of a job; the result is rank 0's."""
    load = os.getloadavg()[0]
    torch.set_num_threads(args.threads)
    hvd.init()
    task = TASKS[args.model]
    batch = task.batch(args.batch or task.samples, torch.Generator().manual_seed(hvd.rank()))
    local = Trainer(task, batch, None)
    onebit = Trainer(task, batch, lambda inner, named: hvd.DistributedOneBitAdam(inner, named, freeze_step=FREEZE_STEP))
    threads, driver = Threads(), onebit.optimizer._driver
    engine = sessions.current().engine
    assert engine is not None
    for trainer in (local, onebit):
        for _ in range(WARMUP):
            trainer.step()
        trainer.clock.take()
    kernels, driver.core.kernels = driver.core.kernels, ClockedKernels(driver.core.kernels, onebit.clock)
    replay = Replay(kernels)
    driver.stepper.wire.channel = Recorder(driver.stepper.wire.channel, onebit.plans)
    alone: list[dict[str, Any]] = []
    together: list[dict[str, Any]] = []
    ticks, counters = [0, 0], dict.fromkeys(engine.counters(), 0)
    for _ in range(-(-args.steps // TURN)):
        hvd.barrier()
        alone += [watched(local, threads) for _ in range(TURN)]
        hvd.barrier()
        before, begun = threads.ticks(), engine.counters()
        together += [watched(onebit, threads) for _ in range(TURN)]
        ticks = [had + b - a for had, a, b in zip(ticks, before, threads.ticks(), strict=True)]
        counters = {name: had + engine.counters()[name] - begun[name] for name, had in counters.items()}
        hvd.barrier()
        for _ in range(2):
            replay.run(onebit.plans)
    codec = replay.codec
    hvd.barrier()
    trace = one_step(onebit)
    if len(set(hvd.allgather_object(digest(onebit.model)))) > 1:
        raise SystemExit("step_profile: the replicas differ")
    quiet, busy = middle(alone), middle(together)
    parts, local_parts = mean_parts(busy), mean_parts(quiet)
    without_clock(parts, local_parts[HOOKS[2]])
    background = mean(busy, "background")
    network = background * ticks[1] / max(sum(ticks), 1)
    own = sum(cpu for _, cpu, _ in parts.values())
    kernel_parts = {name: cpu for name, (_, cpu, _) in parts.items() if hasattr(kernels, name)}
    result: Result = {
        "model": args.model,
        "ranks": hvd.size(),
        "rate": args.rate[0],
        "parameters": sum(p.numel() for p in onebit.model.parameters()),
        "tensors": len(list(onebit.model.parameters())),
        "steps": len(busy),
        "load": load,
        "local_ms": mean(quiet, "wall"),
        "local_parts": local_parts,
        "step_ms": mean(busy, "wall"),
        "parts": parts,
        "kernels": {name: parts[name][2] for name in sorted(kernel_parts)},
        "background_ms": background,
        "codec": codec,
        "elements": replay.elements,
        "network_ms": network,
        "network_error_ms": background * sampling_error(*ticks),
        "others_ms": mean(busy, "process") - own - background,
        "per_step": {name: total / len(together) for name, total in counters.items()},
        "budget": least(alone, together, sorted(kernel_parts), codec, network / background),
        "timeline": trace,
    }
    hvd.shutdown()
    return [result]


def limits(budget: Parts) -> Parts:
    """What each part may take."""
    return BUDGETS | {"codec": budget["Adam"] + BUDGETS["codec"]}


def excesses(budget: Parts, held: Sequence[str]) -> list[str]:
    """The parts of ``held`` which took more than they may, and how much."""
    over = [(part, budget[part], limits(budget)[part]) for part in held if budget[part] > limits(budget)[part]]
    return [f"{part}: {spent:.1f} ms of {limit:.1f}" for part, spent, limit in over]


def show(result: Result) -> str:
    parts, budget = result["parts"], result["budget"]
    step_wall, step_cpu, _ = parts["step"]

    def row(thread: str, part: str, wall: float | None, cpu: float) -> list[str]:
        return [thread, part, "" if wall is None else f"{wall:.1f}", f"{cpu:.1f}"]

    rows = [row("training", name, *parts[name][:2]) for name in ("zero_grad", "forward", "backward")]
    rows += [row("", f"{parts[name][2]:.0f} {name}", *parts[name][:2]) for name in HOOKS]
    rows.append(row("", CLOCK, *parts[CLOCK][:2]))
    rows += [row("", f"step(): kernel `{name}`", *parts[name][:2]) for name in result["kernels"]]
    rows.append(row("", "step(): Python", step_cpu, step_cpu))
    rows.append(row("", "step(): waiting", step_wall - step_cpu, 0.0))
    rows += [row("background", f"codec: {kind}", None, ms) for kind, ms in result["codec"].items()]
    rows.append(row("", "in the kernel: sockets, sleeping", None, result["network_ms"]))
    rest = result["background_ms"] - result["network_ms"] - sum(result["codec"].values())
    rows.append(row("", "the rest: MPI's library, engine, Python", None, rest))
    rows.append(row("others", "", None, result["others_ms"]))
    total = sum(cpu for _, cpu, _ in parts.values()) + result["background_ms"] + result["others_ms"]
    rows.append(row("all", "", result["step_ms"], total))
    alone = {CLOCK if name == HOOKS[2] else name: spent for name, spent in result["local_parts"].items()}
    local = [row("training", name, *spent[:2]) for name, spent in alone.items() if name != HOOKS[0]]
    local.append(row("all", "", result["local_ms"], sum(cpu for _, cpu, _ in alone.values())))
    names = {"codec": "codec, `apply`, checks"}
    held = [
        [names.get(part, part), f"{budget[part]:.1f}", f"{limit:.1f}", "yes" if budget[part] <= limit else "no"]
        for part, limit in limits(budget).items()
    ]
    held += [["Adam, which they replace", f"{budget['Adam']:.1f}"], ["in the kernel", f"{budget['network']:.1f}"]]
    per_step = ", ".join(f"{result['per_step'][name]:.0f} {name}" for name in ("messages_sent", "polls", "sleeps"))
    model = f"{result['model']} of {result['parameters'] / 1e6:.1f} M parameters"
    head = f"{result['ranks']} hosts at {result['rate']}, {model}"
    columns = ["thread", "1-bit Adam", "wall ms", "CPU ms"]
    return "\n\n".join(
        [
            f"## {head}",
            tabulate(rows, columns, "github"),
            tabulate(local, ["thread", "without communication", "wall ms", "CPU ms"], "github"),
            tabulate(held, ["CPU, at least", "ms", "budget", "held"], "github"),
            f"Per step of the engine: {per_step}. {result['steps']} steps; load of the machine before them: "
            f"{result['load']:.1f}. Time in the kernel is a matter of samples, so it and the runtime are known to "
            f"+- {result['network_error_ms']:.1f} ms.",
        ]
    )


def main() -> int:
    parser = turns.parser(__doc__, [], None, "samples")
    parser.add_argument("--model", choices=list(TASKS), default="bert")
    parser.set_defaults(steps=160)
    parser.add_argument("--hold", choices=list(BUDGETS), nargs="*", default=[], help="fail if these are exceeded")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, below the mark")
    args = parser.parse_args()
    shown: list[str] = []
    exceeded: list[str] = []

    def shows(result: Result) -> str:
        shown.append(show(result))
        exceeded.extend(f"{excess} at {result['rate']}" for excess in excesses(result["budget"], args.hold))
        return shown[-1]

    def in_lab(args: argparse.Namespace, rate: str) -> list[Result]:
        return turns.in_lab("benchmarks.step_profile", args, rate)

    status = turns.main(args, measure, in_lab, shows, {"torch": torch.__version__})
    if args.markdown and shown:
        above = args.markdown.read_text().partition(MARK)[0]
        args.markdown.write_text(f"{above}{MARK}\n\n" + "\n\n".join(shown) + "\n")
    if exceeded:
        print("over budget: " + "; ".join(exceeded), file=sys.stderr)
    return status or int(bool(exceeded))


if __name__ == "__main__":
    sys.exit(main())
