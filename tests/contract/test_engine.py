"""What every engine must do: the native one, on an MPI of callbacks over the local network, and its Python twin."""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from ocomm.collectives import dense
from ocomm.collectives.compressed import compressed_segment, compressed_staging, vote
from ocomm.collectives.engine import Channel, Engine, Reason, State, Ticket, require_open
from ocomm.collectives.native_engine import _STAGES_PER_SEGMENT, NativeEngine
from ocomm.collectives.plan import Copy, Loop, Message, Offload, Plan, Stage, loop
from ocomm.collectives.python_engine import PythonEngine, PythonTicket
from ocomm.collectives.scratch import aligned
from ocomm.collectives.segment_header import SegmentHeaders
from ocomm.compression.codecs import SIGNS
from ocomm.compression.layout import Layout, TensorSpec
from ocomm.compression.wire import COMPARED
from ocomm.errors import InvalidRequestError, NotInitializedError
from ocomm.kernels.base import NOISE, NOTHING, OWNERS, RUN, TENSOR, WHOLE, Kernels
from ocomm.kernels.cpu import CpuKernels, Pool
from ocomm.kernels.reference import ReferenceKernels
from ocomm.transport.local import Fabric, LocalTransport
from ocomm.types import DType, Flag, Nodes, ReduceOp
from tests.callback_mpi import CallbackMpi

LIMIT_S = 20.0
ENGINES = ["python", "native"]


@dataclass
class World:
    """N engines, each run by a thread of its own, and one channel per rank to begin with."""

    kind: str
    size: int
    fabric: Fabric = field(init=False)
    engines: list[Engine] = field(default_factory=list)
    mpis: list[CallbackMpi] = field(default_factory=list)
    worlds: list[LocalTransport] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    pools: list[Pool | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fabric = Fabric(self.size)
        self.over = threading.Event()
        self.closing: list[deque[Any]] = [deque() for _ in range(self.size)]
        for rank in range(self.size):
            transport = self.fabric.endpoint(rank)
            if self.kind == "native":
                mpi = CallbackMpi()
                self.mpis.append(mpi)
                # Every other rank computes with threads, which no result depends on.
                self.pools.append(Pool(3, grain=64) if rank % 2 else None)
                self.engines.append(NativeEngine(mpi, 50.0, 1.0, self.pools[-1]))
                mpi.attach(transport)
            else:
                self.engines.append(PythonEngine(ReferenceKernels(), transport.arrival, 1.0))
            self.worlds.append(transport)
            self.reasons.append(Reason(0))
        self.threads = [threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in self.threads:
            thread.start()

    def _run(self, rank: int) -> None:
        while not self.over.is_set():
            self.reasons[rank] |= self.engines[rank].run(0.02)
            while self.closing[rank]:
                channel, result = self.closing[rank].popleft()
                result.put(channel.close())

    def close_channels(self, channels: Sequence[Channel]) -> list[int | None]:
        """What each says, asked in the thread that may."""
        results: list[queue.SimpleQueue[int | None]] = [queue.SimpleQueue() for _ in channels]
        for rank, (channel, result) in enumerate(zip(channels, results, strict=True)):
            self.closing[rank].append((channel, result))
            self.engines[rank].wake()
        return [result.get(timeout=LIMIT_S) for result in results]

    def watch(self, number: int) -> None:
        """Another communicator of each rank, with a message for rank 1 on the first."""
        for rank, engine in enumerate(self.engines):
            copy = self.worlds[rank].duplicate()
            if self.kind == "native":
                self.mpis[rank].attach(copy)
            engine.watch(copy)
            if number == rank == 0:
                copy.isend(aligned(1), 1, 0)

    def channels(self, window: int = 4) -> list[Channel]:
        found = []
        for rank, engine in enumerate(self.engines):
            copy = self.worlds[rank].duplicate()
            if self.kind == "native":
                self.mpis[rank].attach(copy)
            found.append(engine.open_channel(copy, window))
        return found

    def close(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        for engine in self.engines:
            engine.close()
        for pool in self.pools:
            if pool is not None:
                pool.close()


@contextmanager
def world_of(kind: str, size: int) -> Iterator[World]:
    world = World(kind, size)
    try:
        yield world
    finally:
        world.close()


def submit(channels: Sequence[Channel], plans: Sequence[Plan], timeout_s: float = 0.0) -> list[Ticket]:
    pairs = zip(channels, plans, strict=True)
    return [channel.submit(channel.prepare(plan), timeout_s, False) for channel, plan in pairs]


def states(tickets: Sequence[Ticket]) -> list[State]:
    return [ticket.wait(LIMIT_S) for ticket in tickets]


def raw(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def message_plan(rank: int, buffer: np.ndarray, sends: Sequence[int], receives: Sequence[int]) -> Plan:
    rows = [aligned(buffer.nbytes) for _ in receives]
    stage = Stage(
        [], [Message(peer, buffer) for peer in sends], [Message(p, r) for p, r in zip(receives, rows, strict=True)]
    )
    return Plan(f"plan of rank {rank}", [[stage]])


def headers_of(rank: int, tensors: int = 1, signature: int = 1) -> SegmentHeaders:
    flags, heard, announcement = np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.int64)
    return SegmentHeaders(rank, [(signature, tensors)], flags, heard, announcement)


def dense_exchange(kind: str, size: int, dtype: DType, numels: Sequence[int]) -> list[bytes]:
    rng = np.random.default_rng(3)
    given, results = [], []
    with world_of(kind, size) as world:
        plans = []
        for rank in range(size):
            context = dense.Context(rank, size, 64 * 1024, aligned, Nodes.flat(size))
            sources, targets, nbytes = [], [], []
            for numel in numels:
                values = (rng.normal(size=numel) * 100).astype(np.dtype(dtype.label))
                result = np.zeros_like(values)
                results.append(result)
                given.append(values)
                sources.append(raw(values) if rank % 2 else values.ctypes.data)  # the one is as good as the other
                targets.append(raw(result) if rank % 2 else result.ctypes.data)
                nbytes.append(values.nbytes)
            plans.append(dense.allreduce(context, sources, targets, nbytes, dtype, ReduceOp.AVERAGE))
        assert states(submit(world.channels(window=3), plans)) == [State.DONE] * size
        for rank, plan in enumerate(plans):
            counters = world.engines[rank].counters()
            assert (counters["bytes_sent"], counters["messages_sent"]) == (plan.bytes_sent, plan.messages_sent)
            assert counters["plans"] == 1
    return [result.tobytes() for result in results]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.INT32], ids=lambda d: d.label)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_both_engines_leave_the_same_bits_of_a_dense_exchange(size: int, dtype: DType) -> None:
    numels = [7, 100_001, 0, 20_000]
    assert dense_exchange("native", size, dtype, numels) == dense_exchange("python", size, dtype, numels)


def compressed_exchange(kind: str, size: int, steps: int, source: str = "values") -> list[bytes]:
    """A few compressed allreduces with error feedback; everything that each rank holds at the end.

    ``source`` is what is compressed: flat ``"values"``, or an ``"update"`` of 0/1 Adam, read at a gradient's address.
    """
    specs = [TensorSpec("a", (1000,)), TensorSpec("b", (33, 7)), TensorSpec("c", (1,))]
    layout = Layout(specs, size, block_size=128)
    rng = np.random.default_rng(5)
    held: list[bytes] = []
    with world_of(kind, size) as world:
        channels = world.channels()
        plans, buffers = [], []
        for rank in range(size):
            (segment,) = layout.segments([0, 1, 2], rank, 1 << 20)
            (env,) = said = headers_of(rank, len(segment.tensors), segment.signature("onebit-l1"))
            env.presence[:] = segment.presence_bits(np.array([True, rank == 0, False]))
            said.begin(1, 0, 9, 4 if rank == 0 else 0)
            flat = layout.flat_numel
            values, error, out = (np.zeros(flat, np.float32) for _ in range(3))
            values[:] = rng.normal(size=flat)
            server_error = np.zeros(layout.owned_numel(rank), np.float32)
            staging, result = compressed_staging(segment), aligned(segment.packed_nbytes)
            staging.send[:] = result[:] = 0
            if source == "values":
                compress = loop(
                    Kernels.compress, env.flags, segment.blocks, values, error, error, None, "l1", staging.send
                )
            else:
                tensors = np.zeros(3, TENSOR)
                tensors["grad"][:2] = [values[layout.offsets[t] :].ctypes.data for t in range(2)]
                tensors["beta1"], tensors["one_minus_beta1"], tensors["step_size"] = 0.9, 0.1, 0.3
                tensors["interval_root"] = 0.5
                momentum, update, mask = values[::-1].copy(), values * np.float32(2), np.zeros(flat // 8, np.uint8)
                mask[5:40] = rng.integers(0, 256, 35)
                compress = loop(
                    Kernels.compress_update,
                    env.flags,
                    segment.blocks,
                    tensors,
                    momentum,
                    update if rank else None,
                    error,
                    error,
                    mask,
                    "l1",
                    staging.send,
                )

            def average(rows: Any, s: Any = segment, e: Any = server_error, r: Any = result, v: Any = env) -> Loop:
                origin = s.message_start[s.rank]
                return loop(Kernels.average, v.flags, s.owned_blocks, rows, origin, e, e, None, "l1", r)

            stages = compressed_segment(staging, env, result, compress, average)
            stages[-1].compute.append(loop(Kernels.unpack, None, segment.blocks, result, None, out))
            plans.append(Plan("compressed", [stages], [values]))
            headers = [(start, start + segment.header_nbytes) for start in segment.message_start]
            buffers.append((error, server_error, out, env.heard, env.heard_flags, env.announcement, result, headers))
        for _ in range(steps):
            assert states(submit(channels, plans)) == [State.DONE] * size
        assert len({rank_buffers[2].tobytes() for rank_buffers in buffers}) == 1, "all ranks hold the same result"
        for *arrays, result, headers in buffers:
            for first, last in headers:
                result[first:last] = 0
            held += [array.tobytes() for array in [*arrays, result]]
        assert all(int(rank_buffers[5][0]) == 4 for rank_buffers in buffers), "rank 0's announcement"
    return held


@pytest.mark.parametrize("size", [1, 2, 3])
def test_both_engines_leave_the_same_bits_of_compressed_exchanges(size: int) -> None:
    assert compressed_exchange("native", size, 3) == compressed_exchange("python", size, 3)
    assert compressed_exchange("native", size, 3, "update") == compressed_exchange("python", size, 3, "update")


def quantized_exchange(kind: str, size: int, steps: int) -> list[bytes]:
    """A few steps of Birder; everything that each rank holds at the end."""
    layout = Layout([TensorSpec("a", (1000,)), TensorSpec("b", (33, 7)), TensorSpec("c", (1,))], size, block_size=128)
    rng = np.random.default_rng(6)
    weights = rng.random(size).astype(np.float32)
    held: list[bytes] = []
    noises, plans, buffers = [], [], []
    with world_of(kind, size) as world:
        for rank in range(size):
            (segment,) = layout.segments([0, 1, 2], rank, 1 << 20, SIGNS)
            (env,) = said = headers_of(rank, len(segment.tensors), segment.signature("birder"))
            said.begin(1, 0, 9, 0)
            grads = rng.normal(size=layout.flat_numel).astype(np.float32)
            tensors = np.zeros(3, TENSOR)
            tensors["grad"][:2] = [grads[layout.offsets[t] :].ctypes.data for t in range(2)]
            tensors["beta1"], tensors["one_minus_beta1"] = 0.9, 0.1
            m, b, e, out = (np.zeros(layout.flat_numel, np.float32) for _ in range(4))
            m_out, b_out = np.zeros_like(m), np.zeros_like(b)
            server_error = np.zeros(layout.owned_numel(rank), np.float32)
            staging, result = compressed_staging(segment), aligned(segment.packed_nbytes)
            staging.send[:] = result[:] = 0
            noise = np.array([(77, 0, rank, 0), (77, 0, OWNERS, 0)], NOISE)
            compress = loop(
                Kernels.compress_quantized, env.flags, segment.blocks, tensors, m, m, b, b, e, e, 1e-12, rank == 0,
                noise[:1], staging.send,
            )  # fmt: skip

            def average(
                rows: Any, s: Any = segment, e: Any = server_error, r: Any = result, v: Any = env, n: Any = noise
            ) -> Loop:
                origin = s.message_start[s.rank]
                return loop(Kernels.average_quantized, v.flags, s.owned_blocks, rows, origin, weights, e, e, n[1:], r)

            stages = compressed_segment(staging, env, result, compress, average)
            moments = m, m_out, b, b_out
            soft = loop(Kernels.soft_sign, env.flags, segment.blocks, tensors, *moments, 1e-12, rank == 0, out)
            stages[-1].compute.append(soft)
            plans.append(Plan("quantized", [stages], [grads]))
            headers = [(start, start + segment.header_nbytes) for start in segment.message_start]
            noises.append(noise)
            buffers.append(((m, b, e, m_out, b_out, out, server_error), env, result, headers))
        channels = world.channels()
        prepared = [channel.prepare(plan) for channel, plan in zip(channels, plans, strict=True)]
        for step in range(steps):
            for noise in noises:
                noise["step"] = step
            pairs = zip(channels, prepared, strict=True)
            assert states([channel.submit(plan, 0.0, False) for channel, plan in pairs]) == [State.DONE] * size
        for arrays, env, result, headers in buffers:
            assert env.flags[0] == 0
            for first, last in headers:
                result[first:last] = 0
            held += [array.tobytes() for array in [*arrays, result]]
        assert len({result.tobytes() for *_, result, _ in buffers}) == 1, "all ranks hold the same result"
    return held


@pytest.mark.parametrize("size", [1, 2, 3])
def test_both_engines_leave_the_same_bits_of_quantized_exchanges(size: int) -> None:
    native = quantized_exchange("native", size, 3)
    assert native == quantized_exchange("python", size, 3)
    assert native != quantized_exchange("native", size, 4)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_both_engines_leave_the_same_bits_of_majority_votes(size: int) -> None:
    native = voted_exchange("native", size)
    assert native == voted_exchange("python", size)


def voted_exchange(kind: str, size: int) -> list[bytes]:
    """Three steps of Lion; everything that each rank holds at the end."""
    layout = Layout([TensorSpec("a", (1000,)), TensorSpec("b", (33, 7))], size, block_size=128)
    rng = np.random.default_rng(7)
    held: list[tuple[np.ndarray, np.ndarray]] = []
    noise, votes, plans = np.array([(77, 0, OWNERS, 0)], NOISE), np.ones(size, np.float32), []
    with world_of(kind, size) as world:
        for rank in range(size):
            (segment,) = layout.segments([0, 1], rank, 1 << 20, SIGNS)
            (env,) = said = headers_of(rank, len(segment.tensors), segment.signature("lion"))
            said.begin(1, 0, 9, 0)
            grads = rng.normal(size=layout.flat_numel).astype(np.float32)
            tensors = np.zeros(2, TENSOR)
            tensors["grad"] = [grads[offset:].ctypes.data for offset in layout.offsets]
            tensors["beta1"], tensors["one_minus_beta1"] = 0.9, 0.1
            m = grads[::-1].copy()
            staging, result = compressed_staging(segment), aligned(segment.packed_nbytes)
            staging.send[:] = result[:] = 0
            compress = loop(
                Kernels.compress_signs, env.flags, segment.blocks, tensors, m, m, 0.99, 0.01, True, staging.send
            )

            def average(rows: Any, s: Any = segment, r: Any = result, v: Any = env) -> Loop:
                origin = s.message_start[s.rank]
                return loop(
                    Kernels.average_quantized, v.flags, s.owned_blocks, rows, origin, votes, None, None, noise, r
                )

            stages = compressed_segment(staging, env, result, compress, average)
            plans.append(Plan("votes", [stages], [grads]))
            held.append((m, result))
        channels = world.channels()
        prepared = [channel.prepare(plan) for channel, plan in zip(channels, plans, strict=True)]
        for step in range(3):
            noise["step"] = step
            pairs = zip(channels, prepared, strict=True)
            assert states([channel.submit(plan, 0.0, False) for channel, plan in pairs]) == [State.DONE] * size
        for _, result in held:
            for start in segment.message_start:
                result[start : start + segment.header_nbytes] = 0
    assert len({result.tobytes() for _, result in held}) == 1, "all ranks hold the same result"
    return [array.tobytes() for arrays in held for array in arrays]


@pytest.mark.parametrize("kind", ENGINES)
def test_what_birder_and_lion_compute_and_is_not_finite_sets_the_flag(kind: str) -> None:
    fabric = Fabric(1)
    engine: Engine = NativeEngine() if kind == "native" else PythonEngine(CpuKernels(), fabric.arrivals[0])
    (segment,) = Layout([TensorSpec("a", (40,))], 1, block_size=16).segments([0], 0, 1 << 20, SIGNS)
    flags, noise, packed = np.zeros((4, 1), np.uint32), np.zeros(1, NOISE), aligned(segment.packed_nbytes)
    tensors, grad = np.zeros(1, TENSOR), np.ones(40, np.float32)
    m, b, e, out, server_error = (np.zeros(48, np.float32) for _ in range(5))
    tensors["grad"], tensors["one_minus_beta1"] = grad.ctypes.data, 0.1
    quantized = loop(
        Kernels.compress_quantized, flags[0], segment.blocks, tensors, m, m, b, b, e, e, 1e-12, False, noise, packed
    )
    averaged = loop(
        Kernels.average_quantized, flags[1], segment.owned_blocks, [packed], 0, np.ones(1, np.float32), server_error,
        server_error, noise, packed,
    )  # fmt: skip
    soft = loop(Kernels.soft_sign, flags[2], segment.blocks, tensors, m, m, b, b, 1e-12, False, out)
    signs = loop(Kernels.compress_signs, flags[3], segment.blocks, tensors, e, out, 0.99, 0.01, False, packed)
    channel = engine.open_channel(fabric.endpoint(0), 1)
    prepared = channel.prepare(Plan("quantized", [[Stage([quantized, averaged, soft, signs])]]))
    for value, expected in ((1.0, 0), (np.nan, int(Flag.NON_FINITE))):
        grad[20] = server_error[20] = value
        ticket = channel.submit(prepared, 0.0, True)
        assert engine.run(1.0) & Reason.COMPLETED
        assert ticket.state == State.DONE
        assert (flags == expected).all()
    engine.close()


@pytest.mark.parametrize("kind", ENGINES)
def test_an_update_that_is_not_finite_sets_the_flag(kind: str) -> None:
    fabric = Fabric(1)
    engine: Engine = NativeEngine() if kind == "native" else PythonEngine(CpuKernels(), fabric.arrivals[0])
    (segment,) = Layout([TensorSpec("a", (40,))], 1, block_size=16).segments([0], 0, 1 << 20)
    tensors, flags = np.zeros(1, TENSOR), np.zeros(1, np.uint32)
    grad, flat = np.ones(40, np.float32), np.zeros(48, np.float32)
    tensors["grad"], tensors["one_minus_beta1"], tensors["step_size"] = grad.ctypes.data, 0.1, 0.3
    tensors["interval_root"] = 0.5
    packed = aligned(segment.packed_nbytes)
    errors = flat, flat.copy()
    compress = loop(Kernels.compress_update, flags, segment.blocks, tensors, flat, None, *errors, None, "l1", packed)
    channel = engine.open_channel(fabric.endpoint(0), 1)
    prepared = channel.prepare(Plan("update", [[Stage([compress])]]))
    for value, expected in ((1.0, 0), (np.nan, int(Flag.NON_FINITE))):
        grad[20] = value
        ticket = channel.submit(prepared, 0.0, True)
        assert engine.run(1.0) & Reason.COMPLETED
        assert ticket.state == State.DONE
        assert flags[0] == expected
    engine.close()


@pytest.mark.parametrize("kind", ENGINES)
def test_a_peer_that_never_sends_is_named_when_the_time_is_over(kind: str) -> None:
    with world_of(kind, 3) as world:
        channels = world.channels()
        assert states(submit(channels[1:2], [message_plan(1, aligned(10), [0], [])])) == [State.DONE]
        begin = time.monotonic()
        plan = message_plan(0, aligned(10), [], [1, 2])
        plan.segments[0].append(Stage([], [], [Message(1, aligned(10))]))  # a later stage is nobody's fault yet
        waiting = submit(channels[:1], [plan], timeout_s=0.5)
        assert states(waiting) == [State.TIMED_OUT]
        assert time.monotonic() - begin >= 0.5
        assert channels[0].waiting_for() == [2]
        assert states(submit(channels[:1], [message_plan(0, aligned(1), [1], [])])) == [State.ABORTED]
        assert world.engines[0].is_busy is False


@pytest.mark.parametrize("field", COMPARED)
@pytest.mark.parametrize("kind", ENGINES)
def test_a_header_that_differs_ends_the_plan_on_all_ranks(kind: str, field: str) -> None:
    with world_of(kind, 3) as world:
        plans, segment_headers = [], []
        for rank in range(3):
            (env,) = said = headers_of(rank)
            said.begin(7, 0, 5, 0)
            env.header[field] += rank == 2
            segment_headers.append(env)
            plans.append(vote(rank, [range(3)], env))
        channels = world.channels()
        tickets = submit(channels, plans)
        behind = submit(channels, [message_plan(rank, aligned(4), [], []) for rank in range(3)])
        assert states(tickets) == [State.MISMATCH] * 3
        assert [ticket.error for ticket in tickets] == [2, 2, 0]
        alike = int(segment_headers[0].header[field][0])
        wanted = [(field, {0: alike, 1: alike, 2: alike + 1})]
        assert [env.differences() for env in segment_headers] == [wanted] * 3
        assert set(states(behind)) <= {State.ABORTED, State.DONE}


@pytest.mark.parametrize("kind", ENGINES)
def test_flags_and_presence_of_all_ranks_are_known_to_all(kind: str) -> None:
    with world_of(kind, 3) as world:
        said = [headers_of(rank, tensors=9) for rank in range(3)]
        segment_headers = [env for (env,) in said]
        for rank, env in enumerate(segment_headers):
            env.flags[0] = 1 << rank
            env.presence[0] = 1 << rank
            said[rank].begin(1, 0, 0, 0)
        plans = [vote(rank, [range(3)], env) for rank, env in enumerate(segment_headers)]
        assert states(submit(world.channels(), plans)) == [State.DONE] * 3
        for env in segment_headers:
            assert (int(env.heard_flags[0]), int(env.heard[0])) == (7, 7)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("groups", [[(0, 1), (2, 3)], [(0, 3), (1, 2, 4)], [(0, 1, 2), (3,)], [(0,), (1,), (2, 3, 4)]])
def test_a_vote_in_groups_brings_every_header_to_everyone(kind: str, groups: list[tuple[int, ...]]) -> None:
    size = sum(len(group) for group in groups)
    with world_of(kind, size) as world:
        said = [headers_of(rank, tensors=size) for rank in range(size)]
        segment_headers = [env for (env,) in said]
        for rank, env in enumerate(segment_headers):
            env.flags[0] = env.presence[0] = 1 << rank
            said[rank].begin(1, 0, 0, 9 if rank == 0 else 0)
        channels = world.channels()
        assert (
            states(submit(channels, [vote(r, groups, env) for r, env in enumerate(segment_headers)]))
            == [State.DONE] * size
        )
        for env in segment_headers:
            assert (int(env.heard_flags[0]), int(env.heard[0])) == ((1 << size) - 1,) * 2
            assert int(env.announcement[0]) == 9
            assert env.ranks_with(Flag(1 << 1)) == [1]
        for rank in range(size):
            said[rank].begin(2 + (rank == 1), 0, 0, 0)
        tickets = submit(channels, [vote(r, groups, env) for r, env in enumerate(segment_headers)])
        assert states(tickets) == [State.MISMATCH] * size
        wanted = [("step", {rank: 2 + (rank == 1) for rank in range(size)})]
        assert [env.differences() for env in segment_headers] == [wanted] * size


@pytest.mark.parametrize("kind", ENGINES)
def test_news_of_the_vote_stays_whichever_message_is_checked_last(kind: str) -> None:
    with world_of(kind, 1) as world:
        said = headers_of(0), headers_of(0)
        (news,), (silence,) = said
        silence.announcement = news.announcement  # as all messages of a step
        said[0].begin(1, 0, 0, 4)
        said[1].begin(1, 0, 0, 0)
        plans = [vote(0, [range(1)], news), vote(0, [range(1)], silence)]
        assert states(submit(world.channels() * 2, plans)) == [State.DONE] * 2
        assert int(news.announcement[0]) == 4


@pytest.mark.parametrize("kind", ENGINES)
def test_a_channel_never_waits_for_another(kind: str) -> None:
    with world_of(kind, 2) as world:
        first, second = world.channels(window=1), world.channels(window=1)
        blocked = submit(first[:1], [message_plan(0, aligned(1), [], [1])])
        for _ in range(3):
            plans = [message_plan(rank, aligned(1), [1 - rank], [1 - rank]) for rank in range(2)]
            assert states(submit(second, plans)) == [State.DONE] * 2
        assert blocked[0].state == State.ACTIVE
        assert (first[0].waiting_for(), second[0].waiting_for()) == ([1], [])
        submit(first[1:], [message_plan(1, aligned(1), [0], [])])
        assert states(blocked) == [State.DONE]


def test_a_message_that_is_too_short_ends_its_channel_and_names_the_sender() -> None:
    with world_of("native", 3) as world:
        first, second = world.channels(), world.channels()
        world.mpis[0].missing = 1
        tickets = submit(first[:1], [message_plan(0, aligned(8), [], [2])])
        submit(first[2:], [message_plan(2, aligned(8), [0], [])])
        assert states(tickets) == [State.WRONG_SIZE] and tickets[0].error == 2
        assert states(submit(first[:1], [message_plan(0, aligned(1), [], [])])) == [State.ABORTED]
        world.mpis[0].missing = 0
        plans = [message_plan(rank, aligned(8), [1 - rank], [1 - rank]) for rank in range(2)]
        assert states(submit(second[:2], plans)) == [State.DONE] * 2


def test_what_a_failed_plan_still_receives_into_is_never_freed() -> None:
    """MPI keeps a receive that was posted, and writes to its buffer whenever the message comes."""
    with world_of("native", 2) as world:
        channels = world.channels()
        late, done = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
        buffers = weakref.ref(late), weakref.ref(done)
        finished = submit(channels, [Plan("sent", [[Stage([], [Message(1, done)])]]), message_plan(1, done, [], [0])])
        assert states(finished) == [State.DONE] * 2
        failed = submit(channels[:1], [Plan("late", [[Stage([], [], [Message(1, late)])]])], timeout_s=0.02)
        assert states(failed) == [State.TIMED_OUT]
        address = late.ctypes.data
        del late, done, finished, failed, channels
        mpi = world.mpis[0]
    world.engines.clear()
    gc.collect()
    late_now, done_now = (buffer() for buffer in buffers)
    assert done_now is None and late_now is not None and late_now.ctypes.data == address
    assert len(mpi.requests) == 1, "the receive is still posted"


def test_a_message_that_mpi_cannot_count_is_refused_when_its_plan_is_prepared() -> None:
    with world_of("native", 2) as world:
        huge = np.zeros(2**31, np.uint8)  # of memory that nobody touches, and that is not there therefore
        with pytest.raises(InvalidRequestError, match="plan of rank 0: a message of 2147483648 bytes is more than MPI"):
            world.channels()[0].prepare(Plan("plan of rank 0", [[Stage([], [Message(1, huge)])]]))


@pytest.mark.parametrize("kind", ENGINES)
def test_a_failed_channel_leaves_the_others_alone(kind: str) -> None:
    with world_of(kind, 2) as world:
        first, second = world.channels(), world.channels()
        late = submit(first[:1], [message_plan(0, aligned(1), [], [1])], timeout_s=0.02)
        waiting = submit(second[:1], [message_plan(0, aligned(1), [], [1])])
        assert states(late) == [State.TIMED_OUT]
        submit(second[1:], [message_plan(1, aligned(1), [0], [])])
        assert states(waiting) == [State.DONE]


def test_the_native_engine_has_room_for_any_number_of_channels_and_watched_communicators() -> None:
    with world_of("native", 2) as world:
        everyone = [world.channels() for _ in range(1100)]
        for number in range(300):
            world.watch(number)
        end = time.monotonic() + LIMIT_S
        while not world.reasons[1] & Reason.CONTROL:
            assert time.monotonic() < end
        for channels in (everyone[0], everyone[1023], everyone[-1]):
            plans = [message_plan(rank, aligned(1), [1 - rank], [1 - rank]) for rank in range(2)]
            assert states(submit(channels, plans)) == [State.DONE] * 2


@pytest.mark.parametrize("kind", ENGINES)
def test_a_channel_is_closed_between_its_plans_and_refuses_later_ones(kind: str) -> None:
    with world_of(kind, 2) as world:
        first, second = world.channels(), world.channels()
        waiting = submit(first[:1], [message_plan(0, aligned(1), [], [1])])
        assert world.close_channels(first) == [None, 0]
        submit(second[:1], [message_plan(0, aligned(1), [1], [])])
        submit(second[1:], [message_plan(1, aligned(1), [], [0])])
        late = submit(second[:1], [message_plan(0, aligned(1), [], [1])], timeout_s=0.02)
        assert states(late) == [State.TIMED_OUT]
        assert world.close_channels(second) == [-1, 1]
        assert states(submit(second, [Plan("refused", [])] * 2)) == [State.ABORTED] * 2
        assert waiting[0].state == State.ACTIVE


@pytest.mark.parametrize("kind", ENGINES)
def test_a_channel_that_was_abandoned_is_closed_as_a_failed_one_at_once(kind: str) -> None:
    fabric = Fabric(1)
    engine: Engine = NativeEngine() if kind == "native" else PythonEngine(CpuKernels(), fabric.arrivals[0])
    channel = engine.open_channel(fabric.endpoint(0), 1)
    channel.abandon()
    assert channel.close() == -1  # before the engine has run
    engine.close()


@pytest.mark.parametrize("kind", ENGINES)
def test_more_segments_than_the_window_pass_in_order(kind: str) -> None:
    with world_of(kind, 2) as world:
        source, target = np.arange(50, dtype=np.uint8), np.zeros(50, np.uint8)
        out = Plan("out", [[Stage([], [Message(1, source[i : i + 1])])] for i in range(50)])
        into = Plan("in", [[Stage([], [], [Message(0, target[i : i + 1])])] for i in range(50)])
        assert states(submit(world.channels(window=2), [out, into])) == [State.DONE] * 2
        np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_segment_waits_for_the_one_whose_memory_it_uses(kind: str, lanes: int) -> None:
    count = 7
    with world_of(kind, 2) as world:
        source, target = np.arange(1, count + 1, dtype=np.uint8), np.zeros(count, np.uint8)
        marks, one = np.zeros(count, np.uint8), np.ones(1, np.uint8)
        rows = np.zeros(lanes or count, np.uint8)
        sends = [[Stage([], [Message(1, source[k : k + 1])])] for k in range(count)]
        receives = []
        for k in range(count):
            row = rows[k % rows.size :][:1]
            first = Stage([Copy(one, marks[k : k + 1])], [], [Message(0, row)])
            receives.append([first, Stage([Copy(row, target[k : k + 1])])])
        channels = world.channels(window=4)
        plans = Plan("out", sends), Plan("in", receives, lanes=lanes)
        prepared = [channel.prepare(plan) for channel, plan in zip(channels, plans, strict=True)]
        tickets = [channels[0].submit(prepared[0], 0.0, False, 0), channels[1].submit(prepared[1], 0.0, False)]
        while marks[(lanes or 4) - 1] == 0:
            assert tickets[1].wait(0.001) < State.DONE
        pause(world, 0.05)
        assert marks.sum() == (lanes or 4)
        tickets[0].open(count)
        assert states(tickets) == [State.DONE] * 2
        assert target.tolist() == source.tolist()


def pairs_of(segments: int) -> tuple[Plan, Plan, np.ndarray]:
    """Plans of ranks 0 and 1, a byte from 0 to 1 in each segment, and what rank 1 has received."""
    source, target = np.arange(1, segments + 1, dtype=np.uint8), np.zeros(segments, np.uint8)
    out = Plan("out", [[Stage([], [Message(1, source[i : i + 1])])] for i in range(segments)])
    into = Plan("in", [[Stage([], [], [Message(0, target[i : i + 1])])] for i in range(segments)])
    return out, into, target


def pause(world: World, seconds: float) -> None:
    """Engines do what there is to do, for so long at least: in another channel plans run out of time."""
    late = submit(world.channels(), [message_plan(rank, aligned(1), [], [1 - rank]) for rank in range(2)], seconds)
    assert states(late) == [State.TIMED_OUT] * 2


@pytest.mark.parametrize("closed", [0, 1])
@pytest.mark.parametrize("kind", ENGINES)
def test_segments_start_when_they_are_let_and_later_plans_after_them(kind: str, closed: int) -> None:
    with world_of(kind, 2) as world:
        channels = world.channels()
        (*plans, target), (*later, last) = pairs_of(3), pairs_of(1)
        gates = [1, None] if closed == 0 else [None, 1]
        prepared = [channel.prepare(plan) for channel, plan in zip(channels, plans, strict=True)]
        tickets = [
            c.submit(p, 0.0, False, open_segments)
            for c, p, open_segments in zip(channels, prepared, gates, strict=True)
        ]
        behind = submit(channels, later)
        for opened in (1, 2):
            while target[opened - 1] == 0:
                assert tickets[1].wait(0.001) < State.DONE
            pause(world, 0.05)
            assert target.tolist() == [1, 2, 3][:opened] + [0] * (3 - opened) and last[0] == 0
            assert behind[closed].state == State.QUEUED
            tickets[closed].open(opened + 1)
        assert states([*tickets, *behind]) == [State.DONE] * 4
        assert target.tolist() == [1, 2, 3] and last[0] == 1


class Gate:
    """A task that is over when somebody says so."""

    failure: BaseException | None = None

    def __init__(self) -> None:
        self.opened = False

    def start(self) -> None: ...

    def is_over(self) -> bool:
        return self.opened


@pytest.mark.parametrize("kind", ENGINES)
def test_memory_that_segments_have_read_is_free_when_all_before_them_are_over(kind: str) -> None:
    one, marks, gate = np.ones(1, np.uint8), np.zeros(4, np.uint8), Gate()
    segments = [[Stage([Copy(one, marks[k : k + 1])])] for k in range(4)]
    segments[1][0].compute.append(Offload("wait", gate))
    with world_of(kind, 1) as world:
        (channel,) = world.channels()
        ticket = channel.submit(channel.prepare(Plan("read", segments)), 0.0, False, 1)
        assert ticket.past_segments <= 1
        end = time.monotonic() + LIMIT_S
        while ticket.past_segments < 1:
            assert time.monotonic() < end
        ticket.open(4)
        while marks.sum() < 4:
            assert time.monotonic() < end
        assert ticket.wait(0.05) == State.ACTIVE and ticket.past_segments == 1, "segments 2 and 3 are over, too"
        gate.opened = True
        assert states([ticket]) == [State.DONE]
        assert ticket.past_segments == 4


@pytest.mark.parametrize("kind", ENGINES)
def test_a_plan_has_no_deadline_while_it_waits_to_be_opened_and_a_new_one_after(kind: str) -> None:
    with world_of(kind, 2) as world:
        channels = world.channels()
        plan = Plan("late", [[Stage()], [Stage([], [], [Message(0, aligned(1))])]])
        late = channels[1].submit(channels[1].prepare(plan), 0.02, False, 1)
        pause(world, 0.1)
        assert late.state == State.ACTIVE and not world.engines[1].is_busy
        late.open(2)
        assert late.wait(LIMIT_S) == State.TIMED_OUT
        assert channels[1].waiting_for() == [0]
        late.open(2)  # of no effect
        assert late.state == State.TIMED_OUT


@pytest.mark.parametrize("part", [NOTHING, WHOLE, 5])
@pytest.mark.parametrize("kind", ENGINES)
def test_a_plan_finds_its_buffers_where_they_are_when_it_is_opened(kind: str, part: int) -> None:
    """The third tensor is in no inputs, the last has no gradient."""
    numel, kernels = 3000, ReferenceKernels()
    gradients = [np.arange(n, n + numel, dtype=np.float32) for n in range(4)]
    addresses = [int(gradient.ctypes.data) for gradient in gradients[:3]] + [0]
    table = np.zeros(4, TENSOR)
    table["grad"][2] = addresses[2]
    runs = [np.array([(0, 0, numel, tensor)], RUN) for tensor in range(4)]
    packed = [aligned(4 * numel) for _ in runs]
    for out in packed:
        out[:] = 0xAA  # zeros of a gradient that is missing must have been written
    segments = [[Stage([loop(Kernels.gather, None, run, table, out)])] for run, out in zip(runs, packed, strict=True)]
    sums = np.full(3, 7, np.uint64)
    nbytes = np.full(3, 4 * numel)
    rows = np.array([1, 0, 3])
    with world_of(kind, 1) as world:
        (channel,) = world.channels()
        inputs = [channel.inputs(table, rows[part], nbytes[part], sums[part]) for part in (slice(0, 2), slice(2, 3))]
        ticket = channel.submit(channel.prepare(Plan("told", segments)), 0.0, False, 0)
        assert ticket.wait(0.01) == State.QUEUED
        ticket.open(3, inputs[0], [addresses[1], addresses[0]], part)
        ticket.open(4, inputs[1], [0], part)
        assert states([ticket]) == [State.DONE]
    assert table["grad"].tolist() == addresses
    assert [out.tobytes() for out in packed] == [g.tobytes() for g in gradients[:3]] + [bytes(4 * numel)]
    told = np.array([addresses[1], addresses[0], 0], np.uint64)
    taken = np.full(3, 7) if part == NOTHING else kernels.checksums(told, nbytes, part)
    assert sums.tolist() == taken.tolist()


@pytest.mark.parametrize("kind", ENGINES)
def test_a_failing_engine_ends_every_plan_and_refuses_new_ones(kind: str) -> None:
    with world_of(kind, 2) as world:
        channels, others = world.channels(), world.channels()
        tickets = submit([channels[0], others[0]], [message_plan(0, aligned(1), [], [1]) for _ in range(2)])
        assert world.engines[0].is_busy
        world.engines[0].fail()
        assert states(tickets) == [State.ABORTED] * 2
        assert states(submit(channels[:1], [message_plan(0, aligned(1), [], [])])) == [State.ABORTED]


@pytest.mark.parametrize("kind", ENGINES)
def test_a_world_of_one_runs_plans_without_messages(kind: str) -> None:
    fabric = Fabric(1)
    engine: Engine = NativeEngine() if kind == "native" else PythonEngine(CpuKernels(), fabric.arrivals[0])
    channel = engine.open_channel(fabric.endpoint(0), 1)
    source, target = np.arange(9, dtype=np.uint8), np.zeros(9, np.uint8)
    tickets = [channel.submit(channel.prepare(Plan("copy", [[Stage([Copy(source, target)])]])), 0.0, True)]
    tickets.append(channel.submit(channel.prepare(Plan("nothing", [])), 0.0, True))
    assert engine.run(1.0) & Reason.COMPLETED
    assert [ticket.state for ticket in tickets] == [State.DONE] * 2
    assert target.tobytes() == source.tobytes()
    engine.close()
    with pytest.raises(NotInitializedError, match="late: the job that this belongs to has been shut down"):
        channel.submit(channel.prepare(Plan("late", [])), 0.0, False)


def test_a_process_that_was_forked_from_a_rank_may_not_submit() -> None:
    with pytest.raises(NotInitializedError, match=rf"^step 3: this process .* was forked .*\(pid {os.getpid() + 1}\)"):
        require_open(os.getpid() + 1, False, "step 3")


@pytest.mark.parametrize("kind", ENGINES)
def test_a_wake_that_comes_before_the_run_is_not_lost(kind: str) -> None:
    fabric = Fabric(1)
    engine: Engine = NativeEngine() if kind == "native" else PythonEngine(CpuKernels(), fabric.arrivals[0])
    engine.wake()
    assert engine.run(LIMIT_S) == Reason.WOKEN
    assert engine.run(0.0) == Reason(0)
    engine.close()


def test_an_error_of_the_network_ends_all_plans_with_its_code() -> None:
    with world_of("native", 2) as world:
        channels = world.channels()
        tickets = submit(channels[:1] * 2, [message_plan(0, aligned(1), [], [1]) for _ in range(2)])
        world.mpis[0].broken = True
        assert states(tickets) == [State.MPI_ERROR, State.ABORTED]
        assert tickets[0].error == 15
        end = time.monotonic() + LIMIT_S
        while not world.reasons[0] & Reason.FAILED:
            assert time.monotonic() < end
        assert states(submit(world.channels()[:1], [message_plan(0, aligned(1), [], [])])) == [State.ABORTED]


@pytest.mark.parametrize(("tests_move_little", "is_alone"), [(False, False), (True, True), (True, False)])
def test_after_long_waits_the_native_engine_sleeps_after_each_test_that_moves_nothing(
    tests_move_little: bool, is_alone: bool
) -> None:
    """But for the time that it is told to spin, here none, it sleeps after every poll that has found nothing. It tests
    again only where each test moves but a piece of a message, as one that takes as long as these callbacks has.
    """
    fabric, mpi = Fabric(2), CallbackMpi()
    mpi.tests_move_little = tests_move_little
    engine = NativeEngine(mpi, spin_us=0.0, is_alone=is_alone)
    peer = fabric.endpoint(1)
    channel = engine.open_channel(mpi.attach(fabric.endpoint(0)), 1)
    engine.expect(1, False)
    runs = before = 0
    for wait in range(12):
        if wait == 10:
            counters = engine.counters()
            runs, before = 0, counters["polls"] - counters["sleeps"]
        (ticket,) = submit([channel], [message_plan(0, aligned(1), [], [1])])
        assert engine.run(0.003) == Reason(0)
        peer.isend(aligned(1), 0, wait * _STAGES_PER_SEGMENT)
        while ticket.state != State.DONE:
            assert engine.run(0.003) == Reason(0)
            runs += 1
    counters = engine.counters()
    # Those which have seen a plan or a message, and the last of each run.
    sleeps = counters["polls"] - counters["sleeps"] - before <= 2 * 3 + runs
    assert sleeps == (is_alone or not tests_move_little)
    engine.close()


def test_tests_that_move_pieces_leave_half_of_a_core() -> None:
    """Each takes longer here than any sleep of an engine for which nobody waits, so none is followed by another."""

    class SlowMpi(CallbackMpi):
        tests_move_little = True

        def _testsome(self, *arguments: int) -> int:
            time.sleep(0.002)
            return super()._testsome(*arguments)

    fabric, mpi = Fabric(2), SlowMpi()
    engine = NativeEngine(mpi)
    channel = engine.open_channel(mpi.attach(fabric.endpoint(0)), 1)
    channel.submit(channel.prepare(message_plan(0, aligned(1), [], [1])), 60.0, False)
    runs = 0
    while (counters := engine.counters())["polls"] < 20:
        assert engine.run(0.1) == Reason(0)
        runs += 1
    # But for the one that has seen the plan, and the last of each run.
    assert counters["polls"] <= counters["sleeps"] + 1 + runs
    engine.close()


def test_the_native_engine_lets_go_of_plans_that_are_done_and_keeps_failed_ones() -> None:
    engine = NativeEngine()
    channel = engine.open_channel(Fabric(1).endpoint(0), 1)
    for _ in range(5):
        channel.submit(channel.prepare(Plan("done", [])), 0.0, True)
    assert len(engine._alive) == 5
    engine.run(0.0)
    assert engine._alive == []
    engine.fail()
    channel.submit(channel.prepare(Plan("refused", [])), 0.0, True)
    engine.run(0.0)
    assert [ticket.plan.name for ticket in engine._alive] == ["refused"]
    engine.close()


def test_many_threads_may_submit_to_one_native_channel() -> None:
    with world_of("native", 1) as world:
        (channel,) = world.channels()
        target = np.zeros(8 * 200, np.uint8)
        tickets: list[Ticket] = []

        def work(thread: int) -> None:
            for i in range(200):
                spot = target[thread * 200 + i :][:1]
                plan = Plan("one", [[Stage([Copy(np.ones(1, np.uint8), spot)])]])
                tickets.append(channel.submit(channel.prepare(plan), 0.0, False))

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert states(tickets) == [State.DONE] * 1600
        assert target.all()


def test_a_plan_may_be_submitted_while_the_python_engine_looks_through_its_queue() -> None:
    engine = PythonEngine(CpuKernels(), (fabric := Fabric(2)).arrivals[0])
    channel = engine.open_channel(fabric.endpoint(0), 1)

    class Watched(PythonTicket):
        """Another thread submits a plan at the moment in which this one is looked at."""

        @property
        def culprit(self) -> int | None:
            thread = threading.Thread(target=lambda: submit([channel], [message_plan(0, aligned(1), [], [])]))
            thread.start()
            thread.join(LIMIT_S)
            return None

        @culprit.setter
        def culprit(self, rank: int | None) -> None:
            assert rank is None

    for peer in (1, 1):
        channel.queue.append(Watched(engine, message_plan(0, aligned(1), [], [peer]), 0.0, False, None))
    engine.run(0.0)
    assert not channel.failed and len(channel.queue) > 2
    engine.close()
