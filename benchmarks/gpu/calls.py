"""Which calls of CUDA a step makes, in which thread: launches, copies, and what the host waits for.

Torch's profiler records all calls of CUDA's runtime in the process, and of the driver those that launch. What Python
calls of the driver, as ocomm and numba do, is counted where it is called; what ocomm's C calls, by itself.
"""

from __future__ import annotations

import importlib
import json
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

#: By what a call is: parts of the names of functions.
KINDS = {
    "waits": ("Synchronize", "cudaMemcpy_", "cuMemcpyDtoH_", "cuMemcpyHtoD_"),
    "asks": ("EventQuery", "StreamQuery"),
    "launches": ("LaunchKernel",),
    "copies": ("MemcpyAsync", "MemcpyDtoHAsync", "MemcpyHtoDAsync", "MemcpyDtoDAsync", "Memset"),
}
#: Of the engine; every other thread that is not the one that trains is backward's or a library's.
ENGINE = "ocomm"
#: (thread, kind): thread is "training", "engine" or "others".
Calls = Counter[tuple[str, str]]


def kind_of(function: str) -> str | None:
    """What a function of CUDA's runtime or driver does, if it is one of ``KINDS``; its name may end in ``_v2``."""
    name = function if function[-3:-1] != "_v" else function[:-3] + "_"
    name = name if name.endswith("_") else name + "_"
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), None)


def thread_of(name: str, is_main: bool) -> str:
    return "training" if is_main else "engine" if name == ENGINE else "others"


def tids(thread: threading.Thread) -> tuple[int, int]:
    """The numbers that a thread may have in a trace: the system's or, if none of Torch's operations ran in it, the
    size of what 32 bits have of its pthread handle.
    """
    handle = (thread.ident or 0) & 0xFFFFFFFF
    return thread.native_id or 0, min(handle, (1 << 32) - handle)


def calls_in(trace: dict[str, Any], threads: dict[int, str], main: set[int]) -> Calls:
    """Of a trace as Torch's profiler exports it. ``threads``: names by the numbers that they may have there; ``main``:
    those of the thread that trains.
    """
    found: Calls = Counter()
    for event in trace["traceEvents"]:
        layer, kind = event.get("cat"), kind_of(event["name"])
        # What else is called of the driver, ``Driver`` counts.
        if kind and (layer == "cuda_runtime" or (layer == "cuda_driver" and kind == "launches")):
            tid = int(event["tid"])
            found[thread_of(threads.get(tid, ""), tid in main), kind] += 1
    return found


class Driver:
    """Counts what Python calls of the driver. To be made before anything calls it: others keep what they found."""

    def __init__(self) -> None:
        self._calls: Calls = Counter()
        self._counts = False
        try:
            driver = importlib.import_module("cuda.bindings.driver")
        except ImportError:
            return  # a rehearsal on a machine without the bindings
        for name in dir(driver):
            kind = kind_of(name)
            # The profiler has the launches, whoever makes them.
            if name.startswith("cu") and kind not in (None, "launches") and callable(getattr(driver, name)):
                setattr(driver, name, self._counted(getattr(driver, name), str(kind)))

    def _counted(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self._counts:
                thread = threading.current_thread()
                self._calls[thread_of(thread.name, thread is threading.main_thread()), kind] += 1
            return function(*arguments)

        return call

    def during(self, work: Callable[[], object]) -> Calls:
        self._calls, self._counts = Counter(), True
        work()
        self._counts = False
        return self._calls


def count(
    driver: Driver, step: Callable[[], object], steps: int, in_c: Callable[[], dict[str, int]] = dict
) -> dict[str, float]:
    """Calls per step, as "training waits" and so on. ``in_c`` returns how often C has copied and asked so far, which it
    does for the engine.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]

    def run() -> None:
        for _ in range(steps):
            step()

    before = in_c()
    with profile(activities=activities) as profiler:
        called = driver.during(run)
    called.update({("engine", kind): number - before[kind] for kind, number in in_c().items()})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    threads = {tid: thread.name for thread in threading.enumerate() for tid in tids(thread)}
    called.update(calls_in(trace, threads, set(tids(threading.main_thread()))))
    return {
        f"{thread} {kind}": called[thread, kind] / steps
        for kind in KINDS
        for thread in ("training", "engine", "others")
    }
