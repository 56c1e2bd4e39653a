"""What ``cuda_device`` asks of the driver: through cuda.bindings and numba-cuda as on a device, of a driver that has
none (``tests/fake_driver.c``) and says no to what a device would refuse. Nothing is computed here.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ocomm.errors import HorovodInternalError
from ocomm.kernels.base import BLOCK, NOISE, RUN, TENSOR
from ocomm.kernels.device import DeviceKernels, DeviceMemory
from ocomm.types import DType, ReduceOp
from tests.worlds import MPI_SIZE

pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")
pytestmark = pytest.mark.skipif(bool(MPI_SIZE), reason="it starts processes that are alone")

TESTS = Path(__file__).parents[1]
#: What the fake driver prints of a launch, but for the device.
LAUNCH = "{} x 256 threads, 6304 bytes, device {}"


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With this driver in the place of CUDA's."""
    folder = tmp_path_factory.mktemp("driver")
    command = ["gcc", "-shared", "-fPIC", TESTS / "fake_driver.c", "-o", folder / "libcuda.so.1", "-ldl"]
    subprocess.run(command, check=True)
    search = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    return {**os.environ, "LD_LIBRARY_PATH": search, "NUMBA_ENABLE_CUDASIM": "0"}


def said_by(body: Any, environ: dict[str, str]) -> str:
    """What a function of this module prints in a process of its own."""
    call = f"from tests.unit import test_cuda_device as here; here.{body.__name__}()"
    done = subprocess.run(
        [sys.executable, "-c", call], env=environ, cwd=TESTS.parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def devices() -> Any:
    from ocomm.kernels import cuda_device

    driver = ctypes.CDLL("libcuda.so.1")
    driver.fake_allocated.restype = ctypes.c_long
    return SimpleNamespace(made=[cuda_device.CudaDevice(number) for number in (0, 1)], driver=driver)


def buffers_and_events() -> None:
    there = devices()
    before = there.driver.fake_allocated()
    for device in there.made:
        memory: Any = DeviceMemory(device)
        array = memory.empty(100, np.float32)
        array[:] = np.arange(100, dtype=np.float32)
        copy = array.copy()
        copy[:10] = 0
        staging = memory.staging(64)
        staging[:] = 7
        memory.changed(staging)
        assert memory.wire(staging)[5] == 7
        with ThreadPoolExecutor(1) as another:
            found = another.submit(memory.host, copy).result().tolist()
        assert found == [0.0] * 10 + list(range(10, 100)) and memory.waits == 1
        event = device.stream().record()
        assert [event.is_over() for _ in range(3)] == [False, False, True]
        device.follow(0)  # Torch's usual stream
        device.precede(32)
        assert there.driver.fake_depth() == 0, "the thread's own context is as it was"
    assert len({device.identity for device in there.made}) == 2
    del memory, array, copy, staging
    gc.collect()
    assert there.driver.fake_allocated() == before


def test_buffers_copies_and_events_of_two_devices(environ: dict[str, str]) -> None:
    said_by(buffers_and_events, environ)


def captures() -> None:
    there = devices()
    device, driver = there.made[0], there.driver
    event = device.record()
    driver.fake_capture(1)  # in another thread
    assert [event.is_over() for _ in range(3)] == [False, False, True]
    before = driver.fake_allocated()
    block, pinned = device.allocate(64), device.pinned(64)
    assert driver.fake_allocated() == before + 2
    del block, pinned
    gc.collect()
    assert driver.fake_allocated() == before
    assert driver.fake_mode() == 0, "the thread's own mode is as it was"
    with ThreadPoolExecutor(1) as ours:
        ours.submit(device.enter).result()
        ours.submit(device.allocate, 64).result()


def test_what_ocomm_does_in_other_threads_is_no_matter_of_a_graph_that_one_captures(environ: dict[str, str]) -> None:
    said_by(captures, environ)


def mirrors() -> None:
    there = devices()
    memory: Any = DeviceMemory(there.made[0])
    table = np.zeros(2, TENSOR)
    for number in range(1, 30):
        table["step_size"] = number
        memory.rows(table)
    # No event is over before it was asked twice, so each change finds that of 16 changes before under way.
    assert memory.waits == 13 and there.driver.fake_events() <= 20


def test_events_of_tables_that_change_often_are_used_again(environ: dict[str, str]) -> None:
    said_by(mirrors, environ)


def runs_full() -> None:
    there = devices()
    device, driver = there.made[0], there.driver
    asked: list[int] = []
    device.make_room = lambda: asked.append(1)
    driver.fake_fill(1)
    block = device.allocate(100)
    assert block.address and len(asked) == 1
    driver.fake_fill(2)
    with pytest.raises(MemoryError, match="no 100 bytes on cuda:0"):
        device.allocate(100)
    assert len(asked) == 2


def test_a_framework_is_asked_for_room_before_there_is_none(environ: dict[str, str]) -> None:
    said_by(runs_full, environ)


def refuses() -> None:
    there = devices()
    there.driver.fake_refuse(222)
    with pytest.raises(ImportError) as caught:
        DeviceKernels(there.made[0])
    print(caught.value)


def test_a_compiler_that_does_not_fit_is_named_when_the_device_is_taken(environ: dict[str, str]) -> None:
    said = said_by(refuses, environ)
    if said.startswith("no NVVM"):
        pytest.skip(reason=said.strip())
    assert said.startswith("kernels cannot be compiled for cuda:0 (")
    assert "nor of a later CUDA than the driver, which is for 13.0, and there are numba-cuda " in said


def failures() -> None:
    there = devices()
    device, driver = there.made[1], there.driver
    memory: Any = DeviceMemory(device)
    for allocate, what in ((memory.zeros, "on cuda:1"), (memory.staging, "of the host, page-locked for cuda:1")):
        with pytest.raises(MemoryError, match=f"out of memory: no [0-9]+ bytes {what}"):
            allocate(1 << 41)
    array, before = memory.zeros(100), driver.fake_allocated()
    child = os.fork()
    if child == 0:  # has no device, and must not free what its parent has
        del array
        gc.collect()
        os._exit(driver.fake_allocated() != before)
    assert os.waitpid(child, 0)[1] == 0
    driver.fake_break(700)
    with pytest.raises(HorovodInternalError, match="CUDA error 700: an illegal memory access was encountered"):
        memory.host(array)
    # Nor does the collector of garbage print that it could not.
    unraisable: list[Any] = []
    sys.unraisablehook = unraisable.append
    del array
    gc.collect()
    assert not unraisable


def test_failures_are_named_once_and_a_forked_child_leaves_the_device_alone(environ: dict[str, str]) -> None:
    assert not said_by(failures, environ)


def launches() -> None:
    from ocomm.kernels import cuda_kernels as loops

    there = devices()
    for device in there.made:
        try:
            queue = DeviceKernels(device)._queue
        except ImportError as error:
            print(error)
            return
        memory: Any = queue._memory
        for loop in ("gather", "reduce"):
            queue.prepare(loop)
        compiled = loops.gather.overloads.keys() | loops.reduce.overloads.keys()
        runs, tensors, staging = np.zeros(3, RUN), np.zeros(2, TENSOR), memory.staging(64)

        with ThreadPoolExecutor(1) as another:
            another.submit(queue.call, "gather", runs, tensors, staging).result()
            arguments = DType.FLOAT32, ReduceOp.SUM, [staging], 1.0, 0.5, staging
            another.submit(queue.call, "reduce", *arguments).result()
        assert loops.gather.overloads.keys() | loops.reduce.overloads.keys() == compiled, "a launch compiles"
        assert there.driver.fake_depth() == 0, "the thread's own context is as it was"


@pytest.mark.long
def test_another_thread_launches_on_the_stream_of_each_device_what_was_compiled_before(
    environ: dict[str, str],
) -> None:
    said = said_by(launches, environ)
    if said.startswith("no NVVM"):
        pytest.skip(reason=said.strip())
    assert said.splitlines() == [LAUNCH.format(blocks, number) for number in (0, 1) for blocks in (3, 1)]


def native_tasks() -> None:
    from ocomm._native import lib

    from ocomm.collectives.engine import State
    from ocomm.collectives.native_engine import NativeEngine
    from ocomm.collectives.plan import Offload, Plan, Stage
    from ocomm.collectives.staged import DeviceTask

    there = devices()
    device, driver = there.made[1], there.driver
    try:
        device.require_kernels()
    except ImportError as error:
        print(error)
        return
    memory: Any = DeviceMemory(device)
    staging, flags = memory.staging(4096), np.zeros(1, np.uint32)
    staging[:] = 7
    runs, tensors, values = np.zeros(3, RUN), np.zeros(2, TENSOR), memory.zeros(64)
    blocks, noise = np.zeros(2, BLOCK), np.zeros(1, NOISE)
    blocks["length"], blocks["bits"] = 8, 4
    first, beside, last = DeviceTask(memory), DeviceTask(memory, beside=True), DeviceTask(memory, awaited=False)
    first.upload([staging[64:128]])
    first.loop(None, "gather", runs, tensors, staging)
    beside.loop(flags, "compress", blocks, values, values, values, None, "l1", staging)
    beside.loop(None, "average_quantized", blocks, [staging], 0, np.ones(1, np.float32), values, values, noise, staging)
    beside.download(staging)
    last.upload([staging])
    tasks = [Offload("task", task) for task in (first, beside, last)]
    for task in (first, beside, last):
        task.start = task.is_over = lambda: pytest.fail("Python is called")  # type: ignore[assignment, method-assign]
    engine = NativeEngine()
    channel = engine.open_channel(SimpleNamespace(size=1), 2)  # type: ignore[arg-type]
    prepared = channel.prepare(Plan("three tasks", [[Stage([*tasks])], [Stage()]]))
    counts = lib.ocomm_device_counts(device.context.native)
    for step in range(20):
        tensors["step_size"] = step // 2
        ticket = channel.submit(prepared, 0.0, True)
        driver.fake_capture(step == 3)  # what is queued and asked is no matter of another thread's graph
        while ticket.state < State.DONE:
            engine.run(0.01)
        assert ticket.state == State.DONE and flags[0] == 0, (step, ticket.state, ticket.plan.failures(), flags)
    driver.fake_capture(0)
    after = lib.ocomm_device_counts(device.context.native)
    # A table is copied when it has changed, and the flag goes back beside the message.
    assert [after.launches - counts.launches, after.copies - counts.copies] == [60, 20 * 4 + 10]
    assert driver.fake_depth() == 0
    driver.fake_break(700)
    ticket = channel.submit(prepared, 0.0, True)
    while ticket.state < State.DONE:
        engine.run(0.01)
    assert ticket.state == State.TASK_ERROR
    (failure,) = ticket.plan.failures()
    assert isinstance(failure, HorovodInternalError) and "illegal memory access" in str(failure)
    print("done")


@pytest.mark.long
def test_the_native_engine_queues_tasks_without_python(environ: dict[str, str]) -> None:
    said = said_by(native_tasks, environ)
    if said.startswith("no NVVM"):
        pytest.skip(reason=said.strip())
    lines = said.splitlines()
    assert lines.pop() == "done"
    one_step = [LAUNCH.format(blocks, 1) for blocks in (3, 2, 2)]
    assert lines == 20 * one_step


def batches() -> None:
    there = devices()
    try:
        kernels: Any = DeviceKernels(there.made[0])
    except ImportError as error:
        print(error)
        return
    memory, tensors = kernels.memory, np.zeros(2, TENSOR)
    blocks = [np.zeros(rows, BLOCK) for rows in (1, 0, 3)]
    staging = memory.staging(64)
    queue = kernels.batch("apply_signs", [(rows, tensors, staging) for rows in blocks])
    for number in range(20):  # more than there are slots for a table that changes
        tensors["step_size"] = number
        queue()
    assert memory.waits == 4 and there.driver.fake_depth() == 0
    addresses, nbytes = np.array([staging.ctypes.data, 0], np.uint64), np.array([64, 8])
    first, second = (kernels.begin_checksums(addresses, nbytes) for _ in range(2))
    first.drop()
    assert second.result().size == 2 and second.result() is second.result()
    assert kernels.squares(np.zeros(2, np.uint64), nbytes).tolist() == [0, 0]
    there.driver.fake_break(700)
    with pytest.raises(HorovodInternalError, match="illegal memory access"):
        queue()


def test_loops_are_queued_together_and_sums_are_waited_for_late(environ: dict[str, str]) -> None:
    said = said_by(batches, environ)
    if said.startswith("no NVVM"):
        pytest.skip(reason=said.strip())
    one = [LAUNCH.format(blocks, 0) for blocks in (1, 3)]
    assert said.splitlines() == 20 * one + 3 * one[:1], "then two sums, and one that the broken device refuses"
