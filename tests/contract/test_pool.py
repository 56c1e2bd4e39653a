"""Threads that share a loop: the same bits with any number of them, and nobody waits who need not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocomm.collectives.native_engine import NativeEngine
from ocomm.collectives.plan import Copy, Plan, Stage, loop
from ocomm.errors import InvalidRequestError, SettingsError
from ocomm.kernels import TENSOR, Kernels, cpu_kernels
from ocomm.kernels.base import RUN, SUMMED
from ocomm.kernels.cpu import GRAIN, CpuKernels, Pool
from ocomm.session import Session
from ocomm.transport.local import Fabric
from ocomm.types import DType, ReduceOp, Settings
from tests.contract import test_kernels as onebit
from tests.contract import test_quantizer as birder
from tests.contract.test_kernels import World, all_same, few, raw_elements, worlds
from tests.contract.test_quantizer import Model, models

ONEBIT: tuple[Callable[[World, Kernels], tuple], ...] = (
    lambda world, kernels: world.sent(kernels),
    lambda world, kernels: onebit.momentum_results(world, kernels, "l1"),
    lambda world, kernels: onebit.update_results(world, kernels, "rms"),
    lambda world, kernels: onebit.average_results(world, kernels, "l1"),
    onebit.unpack_results,
    onebit.apply_results,
    onebit.local_step_results,
    onebit.apply_update_results,
    onebit.lamb_results,
    lambda world, kernels: (kernels.finite(world.blocks, world.tensors(grad=world.grads)),),
)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    """By number of threads. The grain is so small that whatever has two blocks is cut."""
    made = {threads: Pool(threads, grain=1) for threads in (1, 2, 3, 5)}
    yield made
    for pool in made.values():
        pool.close()


threads = st.sampled_from([1, 2, 3, 5])


class TestTheSameBits:
    @few
    @given(world=worlds, threads=threads)
    def test_in_every_1_bit_loop(self, pools: dict[int, Pool], world: World, threads: int) -> None:
        shared, alone = CpuKernels(pools[threads]), cpu_kernels()
        for results in ONEBIT:
            assert all_same(results(world, shared), results(world, alone))

    @few
    @given(model=models, threads=threads)
    def test_in_every_loop_of_birder_and_lion(self, pools: dict[int, Pool], model: Model, threads: int) -> None:
        shared, alone = CpuKernels(pools[threads]), cpu_kernels()
        for results in birder.RESULTS:
            assert all_same(results(model, shared), results(model, alone))

    @pytest.mark.parametrize("numel", [2 * GRAIN - 1, 2 * GRAIN, 10 * GRAIN + 77])
    def test_with_the_usual_pieces(self, numel: int) -> None:
        shared, alone, alone_too = CpuKernels(Pool(3)), cpu_kernels(), CpuKernels(Pool(1))
        world, model = World((numel, 5, 5000), masked=0.01), Model((numel, 5, 5000), first=3)
        for kernels in (shared, alone_too):
            assert all_same(world.sent(kernels), world.sent(alone))
            assert all_same(onebit.average_results(world, kernels, "l1"), onebit.average_results(world, alone, "l1"))
            assert all_same(onebit.apply_results(world, kernels), onebit.apply_results(world, alone))
            assert all_same(birder.quantize_results(model, kernels), birder.quantize_results(model, alone))

    @pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
    def test_in_reductions(self, pools: dict[int, Pool], dtype: DType) -> None:
        rng = np.random.default_rng(1)
        op = ReduceOp.SUM if dtype == DType.BOOL else ReduceOp.AVERAGE
        for numel in (1, 1023, 1024, 5000, 40001):
            sources = [raw_elements(dtype, numel, rng) for _ in range(3)]
            found = []
            for kernels in (cpu_kernels(), CpuKernels(pools[3])):
                out = sources[1].copy()
                postscale = 0.3 if dtype.is_floating else 1.0
                kernels.reduce(dtype, op, [sources[0], out, sources[2]], 1.0, postscale, out)
                found.append(out.tobytes())
            assert found[0] == found[1]

    def test_in_sums(self, pools: dict[int, Pool]) -> None:
        values = np.random.default_rng(3).random(3 * SUMMED + 77, np.float32)
        addresses = np.array([values.ctypes.data, 0, values.ctypes.data + 4], np.uint64)
        numels = np.array([values.size, 5, SUMMED + 1])
        alone = cpu_kernels().sums(addresses, numels)
        assert all(np.array_equal(CpuKernels(pool).sums(addresses, numels), alone) for pool in pools.values())

    def test_in_what_the_engine_copies(self, pools: dict[int, Pool]) -> None:
        engine = NativeEngine(pool=pools[3])
        rng = np.random.default_rng(2)
        source, grads, placed = (rng.integers(0, 256, n, np.uint8) for n in (40007, 4 * 9000, 4 * 9000))
        copied, packed = np.zeros_like(source), np.zeros_like(grads)
        tensors = np.zeros(2, TENSOR)
        tensors["grad"] = [grads.ctypes.data, 0]
        targets = np.zeros(1, TENSOR)
        targets["grad"] = placed.ctypes.data
        runs = np.array([(i * 100, (89 - i) * 100, 100, i % 2) for i in range(90)], RUN)
        back = runs.copy()
        back["tensor"] = 0
        pack = loop(Kernels.gather, None, runs, tensors, packed)
        place = loop(Kernels.scatter, None, back, targets, packed)
        compute = [Copy(source, copied), pack, place]
        channel = engine.open_channel(Fabric(1).endpoint(0), 1)
        ticket = channel.submit(channel.prepare(Plan("copies", [[Stage(compute)]])), 0.0, True)
        engine.run(1.0)
        assert ticket.wait(10.0).name == "DONE"
        assert (copied == source).all()
        expected = grads.reshape(90, 400).copy()
        expected[1::2] = 0
        assert (packed.reshape(90, 400) == expected[::-1]).all()
        assert (placed.reshape(90, 400) == expected).all()
        engine.close()


def kernel_threads() -> set[str]:
    """Their numbers."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text().startswith("ocomm-kernels"):
                found.add(task.name)
    return found


class KernelThreads:
    """Those that are new, whatever becomes of older ones."""

    def __init__(self) -> None:
        self._older = {task.name for task in Path("/proc/self/task").iterdir()}

    def become(self, count: int) -> bool:
        """Whether there are so many, soon: a thread names itself, and is listed for a moment after it has been
        joined."""
        end = time.monotonic() + 20
        while len(kernel_threads() - self._older) != count and time.monotonic() < end:
            time.sleep(0.01)
        return len(kernel_threads() - self._older) == count


has_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc to count threads in")


class TestNobodyWaits:
    def test_two_callers_at_the_same_time_are_both_right(self, pools: dict[int, Pool]) -> None:
        kernels, world = CpuKernels(pools[3]), World((60000, 31), block_size=64)
        expected = world.sent(cpu_kernels())
        wrong: list[int] = []

        def call(caller: int) -> None:
            for _ in range(20):
                if not all_same(world.sent(kernels), expected):
                    wrong.append(caller)

        callers = [threading.Thread(target=call, args=(caller,)) for caller in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(20)
        assert not wrong and not any(caller.is_alive() for caller in callers)

    @has_proc
    def test_closing_ends_the_threads_in_the_middle_of_work_and_callers_go_on_alone(self) -> None:
        kernel = KernelThreads()
        world = World((60000, 31), block_size=64)
        expected = world.sent(cpu_kernels())
        pool = Pool(4, grain=1)
        kernels = CpuKernels(pool)
        assert kernel.become(3)
        results: list[bool] = []
        over = threading.Event()

        def call() -> None:
            while not over.is_set():
                results.append(all_same(world.sent(kernels), expected))

        caller = threading.Thread(target=call)
        caller.start()
        while len(results) < 3:
            time.sleep(0.001)
        pool.close()
        assert kernel.become(0)
        done = len(results)
        while len(results) < done + 3:
            time.sleep(0.001)
        over.set()
        caller.join(20)
        assert all(results) and not caller.is_alive()
        pool.close()

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # it is what is tested
    def test_a_forked_child_works_alone(self, pools: dict[int, Pool]) -> None:
        kernels, world = CpuKernels(pools[3]), World((6000, 31), block_size=64)
        expected = world.sent(kernels)
        child = os.fork()
        if child == 0:
            right = False
            try:
                right = all_same(world.sent(kernels), expected)
                pools[3].close()
            finally:
                os._exit(0 if right else 1)
        end = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
            time.sleep(0.01)
        assert ended == (child, 0)

    @has_proc
    def test_a_session_has_as_many_as_the_settings_say_until_it_shuts_down(self) -> None:
        kernel = KernelThreads()
        session = Session()
        session.start(Fabric(1).endpoint(0), Settings(kernel_threads=3))
        assert kernel.become(2)
        session.shutdown()
        assert kernel.become(0)

    @has_proc
    @pytest.mark.parametrize(("sets", "cores"), [([[5]], ()), ([], (9999,))], ids=["process set", "core"])
    def test_a_session_that_cannot_start_leaves_none(self, sets: list[list[int]], cores: tuple[int, ...]) -> None:
        kernel = KernelThreads()
        session = Session()
        with pytest.raises((SettingsError, InvalidRequestError)) as caught:
            session.start(Fabric(1).endpoint(0), Settings(kernel_threads=3, thread_affinity=cores), sets)
        assert kernel.become(0), caught  # whose stack keeps alive what was made and threading.active_count() == python
        session.start(Fabric(1).endpoint(0), Settings(kernel_threads=3))
        assert kernel.become(2)
        session.shutdown()
        assert kernel.become(0)
