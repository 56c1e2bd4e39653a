"""Plans that compute on a device: what an engine does with tasks that go on elsewhere, and what ``staged`` makes of a
plan. The device is a fake (see ``tests.fake_device``).
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ocomm.collectives.compressed import compressed_segment, compressed_staging
from ocomm.collectives.engine import State
from ocomm.collectives.plan import Loop, Message, Offload, Plan, Stage, loop
from ocomm.collectives.scratch import aligned
from ocomm.collectives.staged import staged
from ocomm.compression.layout import Layout, TensorSpec
from ocomm.compression.wire import header_nbytes
from ocomm.errors import HorovodInternalError
from ocomm.kernels import cpu_kernels
from ocomm.kernels.base import RUN, TENSOR, Kernels
from ocomm.kernels.device import DeviceArray, DeviceKernels, device_kernels
from ocomm.telemetry.timeline import Timeline
from ocomm.types import DType, Flag, ReduceOp
from tests.contract.test_engine import ENGINES, headers_of, message_plan, states, submit, world_of
from tests.fake_device import FakeDevice


class Patient:
    """A task that is over when it has been asked often enough; then it has written."""

    def __init__(self, target: np.ndarray, asked: int = 5, raises: str = "") -> None:
        self.failure: BaseException | None = None
        self.target, self.asked, self.raises = target, asked, raises
        self.starts = self.left = 0

    def start(self) -> None:
        if self.raises == "start":
            raise RuntimeError("no such device")
        self.starts += 1
        self.left = self.asked

    def is_over(self) -> bool:
        if self.raises == "is_over":
            raise RuntimeError("the device is gone")
        self.left -= 1
        if self.left == 0:
            self.target[:] = self.starts
        return self.left <= 0


def offloading(rank: int, task: Patient, received: np.ndarray) -> Plan:
    other = 1 - rank
    stage = Stage([Offload("compress", task)], [Message(other, task.target)], [Message(other, received)])
    return Plan(f"plan of rank {rank}", [[stage]])


@pytest.mark.parametrize("kind", ENGINES)
def test_messages_leave_when_the_task_is_over_however_often_the_plan_runs(kind: str) -> None:
    with world_of(kind, 2) as world:
        tasks = [Patient(aligned(3), asked) for asked in (1, 50)]
        received = [aligned(3) for _ in tasks]
        channels = world.channels()
        plans = [offloading(rank, task, received[rank]) for rank, task in enumerate(tasks)]
        prepared = [channel.prepare(plan) for channel, plan in zip(channels, plans, strict=True)]
        for turn in (1, 2, 3):
            for array in received:
                array[:] = 0
            tickets = [channel.submit(p, 0.0, False) for channel, p in zip(channels, prepared, strict=True)]
            assert states(tickets) == [State.DONE] * 2
            assert [array.tolist() for array in received] == [[turn] * 3] * 2


@pytest.mark.parametrize("kind", ENGINES)
def test_others_go_on_while_a_task_does_not_end(kind: str) -> None:
    with world_of(kind, 2) as world:
        stuck, channels = world.channels()[:1], world.channels()
        waiting = submit(stuck, [offloading(0, Patient(aligned(1), asked=1 << 60), aligned(1))], timeout_s=0.3)
        plans = [message_plan(rank, aligned(10), [1 - rank], [1 - rank]) for rank in range(2)]
        assert states(submit(channels, plans)) == [State.DONE] * 2
        assert states(waiting) == [State.TIMED_OUT]


@pytest.mark.parametrize("where", ["start", "is_over"])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_task_that_fails_ends_its_channel_and_no_other(kind: str, where: str, capfd: Any) -> None:
    with world_of(kind, 2) as world:
        channels, others = world.channels()[:1], world.channels()
        plans = [offloading(0, Patient(aligned(1), 3, where), aligned(1)), message_plan(0, aligned(1), [], [1])]
        tickets = [channels[0].submit(channels[0].prepare(plan), 0.0, False) for plan in plans]
        assert states(tickets) == [State.TASK_ERROR, State.ABORTED]
        assert [str(failure) for failure in plans[0].failures()] == [
            "no such device" if where == "start" else "the device is gone"
        ]
        plans = [message_plan(rank, aligned(10), [1 - rank], [1 - rank]) for rank in range(2)]
        assert states(submit(others, plans)) == [State.DONE] * 2
    assert not capfd.readouterr().err


class Exchange:
    """A compressed allreduce of one tensor on ``size`` ranks, in segments, on devices, on the host where it is None."""

    def __init__(
        self, size: int, devices: Sequence[FakeDevice | None], segments: int = 4, direct: bool = False
    ) -> None:
        self.layout = Layout([TensorSpec("a", (segments * 4096,))], size, block_size=64)
        self.size = size
        self.kernels: list[Any] = [cpu_kernels() if d is None else DeviceKernels(d) for d in devices]
        rng = np.random.default_rng(5)
        numel = self.layout.flat_numel
        self.plans, self.errors, self.outs, self.flags, self.looked = [], [], [], [], []
        for rank, kernels in enumerate(self.kernels):
            home = kernels.memory
            values, error, server_error, out = (
                home.zeros(n) for n in (numel, numel, self.layout.owned_numel(rank), numel)
            )
            values[:] = rng.normal(size=numel).astype(np.float32)
            stages, results, looked = [], [], np.zeros(1, np.uint32)
            self.looked.append(looked)
            for layout in self.layout.segments([0], rank, self.layout.numel // 8 // segments):
                (env,) = said = headers_of(rank, 1, layout.signature("onebit-l1"))
                said.begin(1, 0, 9, 0)
                staging, result = compressed_staging(layout, home), home.staging(layout.packed_nbytes)
                compress = loop(
                    Kernels.compress, env.flags, layout.worker_blocks, values, error, error, None, "l1", staging.send
                )

                def average(
                    rows: Any, s: Any = layout, e: Any = server_error, r: Any = result, f: Any = env.flags
                ) -> Loop:
                    origin = s.message_start[s.rank]
                    return loop(Kernels.average, f, s.owned_blocks, rows, origin, e, e, None, "l1", r)

                stages.append(compressed_segment(staging, env, result, compress, average))
                stages[-1][-1].compute += [
                    loop(Kernels.finite_scales, looked, layout.blocks, result),
                    loop(Kernels.unpack, None, layout.blocks, result, None, out),
                ]
                results.append(result)
                self.flags.append(env.flags)
            self.plans.append(staged(Plan("compressed", stages), home, results, direct))
            self.errors += [(home, error), (home, server_error)]
            self.outs.append((home, out))

    def held(self) -> list[bytes]:
        return [home.host(array).tobytes() for home, array in [*self.errors, *self.outs]]


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_staged_plan_leaves_the_bits_of_the_plan_in_either_form(kind: str, size: int) -> None:
    staged_on = [FakeDevice() for _ in range(size)]
    direct_on = [FakeDevice(reached=True) if rank != 1 else None for rank in range(size)]
    forms = [Exchange(size, [None] * size), Exchange(size, staged_on), Exchange(size, direct_on, direct=True)]
    for exchange in forms:
        with world_of(kind, size) as world:
            channels = world.channels()
            for _ in range(3):
                assert states(submit(channels, exchange.plans)) == [State.DONE] * size
    assert forms[0].held() == forms[1].held() == forms[2].held()


@pytest.mark.parametrize("form", ["host", "staged", "direct"])
@pytest.mark.parametrize("kind", ENGINES)
def test_every_rank_sees_an_average_that_overflows_on_its_owner(kind: str, form: str) -> None:
    devices = [None if form == "host" else FakeDevice(reached=form == "direct") for _ in range(3)]
    exchange = Exchange(3, devices, direct=form == "direct")
    home, error = exchange.errors[3]  # rank 1's as a server
    with world_of(kind, 3) as world:
        channels = world.channels()
        assert states(submit(channels, exchange.plans)) == [State.DONE] * 3
        assert [int(flags[0]) for flags in exchange.looked] == [0] * 3
        error[-64:] = np.full(64, np.inf, np.float32)
        home.host(error)  # waits for the copy
        assert states(submit(channels, exchange.plans)) == [State.DONE] * 3
    assert [int(flags[0]) for flags in exchange.looked] == [Flag.NON_FINITE] * 3


@pytest.mark.parametrize("kind", ENGINES)
def test_in_the_direct_form_payloads_leave_from_devices_and_only_averages_are_copied(kind: str) -> None:
    devices = [FakeDevice(reached=True), FakeDevice(reached=True)]
    exchange = Exchange(2, devices, direct=True)
    for plan, device in zip(exchange.plans, devices, strict=True):
        for scatter, gather, end in plan.segments:
            head, payload = scatter.sends
            assert head.buffer.nbytes == header_nbytes(1) and not device.has(head.buffer)
            assert device.has(payload.buffer)
            assert [device.has(message.buffer) for message in scatter.receives] == [False, True]
            assert all(device.has(message.buffer) for message in gather.sends + gather.receives)
            assert not end.sends + end.receives
    for mine, theirs in zip(exchange.plans[0].segments, exchange.plans[1].segments, strict=True):
        for stage, other in zip(mine, theirs, strict=True):
            assert [m.buffer.nbytes for m in stage.sends] == [m.buffer.nbytes for m in other.receives]
    segments = len(exchange.plans[0].segments)
    with world_of(kind, 2) as world:
        channels = world.channels()
        assert states(submit(channels, exchange.plans)) == [State.DONE] * 2
        for device in devices:  # tables were copied in the first run
            device.log.clear()
        assert states(submit(channels, exchange.plans)) == [State.DONE] * 2
    for device in devices:
        # The flag of compress and of average, and the averages.
        assert (device.counts["launch"], device.counts["download"]) == (3 * segments, 3 * segments)
        assert device.counts["upload"] == 0
    assert [kernels.memory.waits for kernels in exchange.kernels] == [0, 0]


@pytest.mark.parametrize("kind", ENGINES)
def test_bits_are_copied_under_the_exchange_of_those_before_and_nobody_waits(kind: str, tmp_path: Path) -> None:
    devices = [FakeDevice(), FakeDevice()]
    exchange = Exchange(2, devices)
    segments = len(exchange.plans[0].segments)
    assert segments > 3
    timeline = Timeline(str(tmp_path / "timeline.json"), 0, "rank 0", False)
    with world_of(kind, 2) as world:
        channels = world.channels(window=segments)
        assert states(submit(channels, exchange.plans)) == [State.DONE] * 2
        for device in devices:  # tables were copied in the first run
            device.log.clear()
        world.engines[0].timeline = timeline
        tickets = submit(channels, exchange.plans)
        assert states(tickets) == [State.DONE] * 2
    timeline.close()
    text = (tmp_path / "timeline.json").read_text()
    assert all(f'"{name}"' in text for name in ("COMPRESS", "AVERAGE", "DECOMPRESS")), "stages keep their names"
    trace = tickets[0].trace
    assert trace is not None
    over = [int(trace[3 * k, 2]) / 1e9 for k in range(segments)]
    log = devices[0].log
    launched = [at for at, (verb, what, _) in enumerate(log) if (verb, what) == ("launch", "compress")]
    copied = [next(when for verb, _, when in log[at:] if verb == "download") for at in launched]
    for k in range(segments - 1):
        assert copied[k + 1] < over[k], "segment k + 1 is on its way to the host before the exchange of k is over"
    # Per segment: compress, average and unpack; the bits and the flag of the first two; what came in, and the result
    # for the plan's own last loop and for whoever comes after it.
    assert devices[0].counts["launch"] == 3 * segments
    assert devices[0].counts["download"] == 4 * segments
    assert devices[0].counts["upload"] == 3 * segments
    assert [kernels.memory.waits for kernels in exchange.kernels] == [0, 0]


@pytest.mark.parametrize("kind", ENGINES)
def test_what_is_not_finite_on_a_device_sets_the_flag_once(kind: str) -> None:
    exchange = Exchange(1, [FakeDevice()], segments=1)
    home, error = exchange.errors[0]
    for value, expected in ((np.nan, int(Flag.NON_FINITE)), (0.0, 0)):
        error[:] = np.full(error.size, value, np.float32)
        exchange.errors[1][1][:] = 0
        exchange.flags[0][0] = 0
        with world_of(kind, 1) as world:
            assert states(submit(world.channels(), exchange.plans)) == [State.DONE]
        assert exchange.flags[0][0] == expected
    assert home.is_device


def test_a_dense_average_on_a_device_is_that_of_the_host() -> None:
    home = DeviceKernels(FakeDevice()).memory
    rng = np.random.default_rng(1)
    rows = [home.staging(4 * 1001) for _ in range(3)]
    out = home.staging(4 * 1001)
    for row in rows:
        row.view(np.float32)[:] = rng.normal(size=1001)
    reduce = loop(Kernels.reduce, None, DType.FLOAT32, ReduceOp.AVERAGE, rows, 1.0, 1 / 3, out)
    (stages,) = staged(Plan("dense", [[Stage([reduce])]]), home, [out]).segments
    offload = stages[0].compute[0]
    assert isinstance(offload, Offload)
    offload.task.start()
    while not offload.task.is_over():
        pass
    expected = np.zeros_like(out)
    cpu_kernels().reduce(DType.FLOAT32, ReduceOp.AVERAGE, rows, 1.0, 1 / 3, expected)
    assert out.tobytes() == expected.tobytes()


class TestMemory:
    def test_the_host_cannot_look_at_a_device_array(self) -> None:
        array: Any = DeviceKernels(FakeDevice()).memory.zeros(4)
        for look in (np.asarray, np.isfinite, np.sum, list, lambda a: a + 1, lambda a: a == np.zeros(4)):
            with pytest.raises(TypeError):
                look(array)

    def test_arrays_are_cut_copied_and_filled(self) -> None:
        home = DeviceKernels(FakeDevice()).memory
        array: Any = home.zeros(6)
        array[1:4] = np.arange(3, dtype=np.float32) + 1
        array[4:] = array[2:4]
        copy = array.copy()
        array[:2] = 0.0
        assert home.host(array).tolist() == [0, 0, 2, 3, 2, 3]
        assert home.host(copy[:3]).tolist() == [0, 1, 2]
        assert home.host(array[6:]).size == 0
        assert isinstance(array[1:2], DeviceArray) and len(array[9:]) == 0
        more = np.random.default_rng(1).integers(0, 256, (2 << 22) + 5, np.uint8)
        long: Any = home.empty(more.size, np.uint8)
        long[:] = more
        assert np.array_equal(home.host(long), more) and np.array_equal(home.host(long[3:]), more[3:])

    def test_a_device_that_never_gets_done_is_given_up(self) -> None:
        device = FakeDevice()
        home: Any = device_kernels(device, timeout_s=1e-3).memory
        device.advance = lambda count: None  # type: ignore[method-assign]
        with pytest.raises(HorovodInternalError, match="fake:0 has not done after 0 s what it was given"):
            home.host(home.zeros(4))

    def test_staging_memory_has_a_copy_while_it_lives(self) -> None:
        home = DeviceKernels(FakeDevice()).memory
        staging = home.staging(100)
        staging[:] = np.arange(100)
        home.changed(staging)
        part = staging[10:20]
        del staging
        gc.collect()
        assert home.host(home.twin(part)).tolist() == list(range(10, 20))
        with pytest.raises(ValueError, match="not staging memory"):
            home.twin(np.zeros(10, np.uint8))
        address = part.__array_interface__["data"][0]
        del part
        gc.collect()
        assert address - 10 not in home._staged

    def test_a_table_follows_every_change_and_is_kept_until_it_has_arrived(self) -> None:
        device = FakeDevice()
        home = DeviceKernels(device).memory
        table, seen = np.zeros(2, TENSOR), []
        for step in range(12):  # more changes than are kept
            table["step_size"] = step
            home.rows(table)
            uploads = device.counts["upload"]
            copy = home.rows(table)
            assert device.counts["upload"] == uploads, "nothing has changed"
            device.queue("look", "", lambda copy=copy: seen.append(float(device.real(copy)["step_size"][0])))  # type: ignore[misc]
        home.wait()
        assert seen == list(range(12))

    def test_tables_that_never_change_are_copied_once(self) -> None:
        device = FakeDevice()
        home = DeviceKernels(device).memory
        runs = np.zeros(3, RUN)
        assert home.table(runs).address == home.table(runs).address
        assert device.counts["upload"] == 1
