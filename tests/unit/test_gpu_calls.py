"""Calls of CUDA are counted by what they do and who makes them, from a trace and where Python makes them."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch

from benchmarks.gpu.calls import Driver, calls_in, count, kind_of, tids

MAIN, ENGINE, BACKWARD = 100, 101, 102
THREADS = {MAIN: "MainThread", ENGINE: "ocomm"}


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        ("cudaStreamSynchronize", "waits"),
        ("cudaDeviceSynchronize", "waits"),
        ("cuEventSynchronize", "waits"),
        ("cuMemcpyDtoH_v2", "waits"),
        ("cudaMemcpy", "waits"),
        ("cuMemcpyDtoHAsync_v2", "copies"),
        ("cudaMemcpyAsync", "copies"),
        ("cuMemsetD8Async", "copies"),
        ("cudaLaunchKernelExC", "launches"),
        ("cuLaunchKernel", "launches"),
        ("cuEventQuery", "asks"),
        ("cudaStreamWaitEvent", None),
        ("cudaEventRecord", None),
        ("cuMemAlloc", None),
    ],
)
def test_a_function_is_what_its_name_says(function: str, kind: str | None) -> None:
    assert kind_of(function) == kind


def test_a_trace_has_the_runtimes_calls_and_of_the_driver_the_launches() -> None:
    def event(category: str, name: str, tid: int) -> dict[str, Any]:
        return {"cat": category, "name": name, "tid": tid, "ts": 0}

    trace = {
        "traceEvents": [
            event("cuda_runtime", "cudaLaunchKernel", BACKWARD),
            event("cuda_runtime", "cudaStreamSynchronize", MAIN),
            event("cuda_driver", "cuLaunchKernel", ENGINE),
            event("cuda_driver", "cuStreamSynchronize", ENGINE),  # ``Driver`` has it
            event("kernel", "cudaLaunchKernel", MAIN),
            event("cpu_op", "aten::add", MAIN),
            {"name": "process_name"},
        ]
    }
    assert calls_in(trace, THREADS, {MAIN}) == {
        ("others", "launches"): 1,
        ("training", "waits"): 1,
        ("engine", "launches"): 1,
    }


@pytest.mark.parametrize("handle", [0x7F0012345678, 0x7F00FEDCBA98])
def test_a_thread_without_operations_of_torch_is_known_by_its_pthread_handle(handle: int) -> None:
    class Thread:
        ident, native_id = handle, 4711

    found: Any = Thread()
    assert tids(found) == (4711, abs(ctypes.c_int32(handle & 0xFFFFFFFF).value))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The driver's functions, of which one answers without a device; all are put back when a test is over."""
    found = pytest.importorskip("cuda.bindings.driver", reason="numba-cuda is not installed")
    for name in dir(found):
        if name.startswith("cu"):
            monkeypatch.setattr(found, name, getattr(found, name))
    monkeypatch.setattr(found, "cuStreamSynchronize", lambda stream: (stream,))
    return found


def test_calls_of_the_driver_are_counted_by_thread_while_they_are_asked_for(driver: Any) -> None:
    counted = Driver()

    def work() -> None:
        assert driver.cuStreamSynchronize(7) == (7,)
        other = threading.Thread(target=lambda: driver.cuStreamSynchronize(8), name="ocomm")
        other.start()
        other.join()

    work()  # not asked for
    assert counted.during(work) == {("training", "waits"): 1, ("engine", "waits"): 1}


def test_counting_gives_calls_per_step(driver: Any) -> None:
    def step() -> None:
        torch.ones(2).sum()
        driver.cuStreamSynchronize(7)
        driver.cuStreamSynchronize(7)

    found = count(Driver(), step, 3)
    assert found["training waits"] == 2 and found["engine waits"] == 0
    assert set(found) == {
        f"{thread} {kind}"
        for thread in ("training", "engine", "others")
        for kind in ("waits", "asks", "launches", "copies")
    }
