"""Speed of the kernels: on CPU threads compared with an axpy that moves the same bytes, NumPy and Torch; or on a GPU.

Each round times the yardstick and the kernel one after the other, so that a busy machine slows both. The fraction is
the median over rounds of (bytes the kernel moves / bandwidth of the yardstick) / time of the kernel. The yardstick is
an in-place axpy over arrays of the same size, or a plain fill if the kernel mostly writes. The table also has an axpy
over three arrays (y += a x + a z), the limit of kernels that read as many. Arrays are aligned like the runtime's. Every
kernel is compared with the NumPy reference on its first blocks before it is timed.

A step writes new errors to a second buffer, with stores that bypass the caches. In rows "in place" the same loops
overwrite the old ones, as the axpy does.

With ``--threads N`` each C loop runs on one thread and on N in turn, beside its yardstick on as many, and ``gain`` is
its speed-up divided by the yardstick's. ``_cuda.py`` describes ``--device cuda``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ocomm._native import ffi, lib
from ocomm.compression.codecs import OF_BITS, Codec
from ocomm.kernels import BLOCK, NOISE, TENSOR, Kernels, reference
from ocomm.kernels.base import GROUP, aligned_zeros
from ocomm.kernels.cpu import CpuKernels, Pool, pointer_to
from ocomm.types import DType, ReduceOp

BLOCK_SIZE = 4096
CHECKED_BLOCKS = 64
SLOW_FORM_ROUNDS = 3  # NumPy and Torch forms take seconds, and are slower by far more than a few percent


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    kernel: str
    form: str  # "c avx2" and so on by path, "numpy" or "torch"
    bytes_per_element: float  # what the kernel must move; the same for all forms
    milliseconds: float  # median
    gigabytes_per_second: float
    yardstick: str
    fraction: float  # of the yardstick's speed
    times_c: float  # time of this form / time of the C loop in use, on one thread
    threads: int = 1
    gain: float = 1.0  # speed-up by more threads, divided by the yardstick's


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel with its inputs; ``forms`` are functions that do the same work."""

    kernel: str
    bytes_per_element: float
    yardstick: str
    forms: dict[str, Callable[[], object]]
    check: Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument("--nbytes", type=int, default=64 << 20, help="size of each float32 array (default 64 MiB)")
    parser.add_argument("--rounds", type=int, default=21, help="timed rounds of each C loop (default 21)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="ranks of the owner's average")
    parser.add_argument("--path", choices=["avx512", "avx2", "portable"], help="C path (default: the best here)")
    parser.add_argument("--threads", type=_positive, default=1, metavar="N", help="also the C loops on N threads")
    parser.add_argument("--only-c", action="store_true", help="leave out the NumPy and Torch forms")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table and the machine there")


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError("must be at least 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Prints the table; returns 1 if the requested path is not available, 77 if there is no GPU."""
    if args.device == "cuda":
        return run_on_cuda(args)
    if args.path and lib.ocomm_select_path(args.path.encode()) < 0:
        print(f"this processor cannot run the {args.path} path", file=sys.stderr)
        return 1
    numel = max(args.nbytes // 4 // BLOCK_SIZE, CHECKED_BLOCKS) * BLOCK_SIZE
    torch = None if args.only_c else torch_or_none()
    bench = Bench(numel, torch, with_numpy=not args.only_c, threads=args.threads)
    print(f"{4 * numel} bytes per array, blocks of {BLOCK_SIZE}, median of {args.rounds} paired rounds")
    print(HEADING)
    rows = []
    for case in bench.cases(args.ranks):
        case.check()
        for row in bench.measure(case, args.rounds):
            rows.append(row)
            print(formatted(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps({**surroundings(args), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0


def run_on_cuda(args: argparse.Namespace) -> int:
    from ocomm.bench import _cuda  # it needs numba-cuda, which most machines lack

    if reason := _cuda.reason_against():
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return 77
    numel = max(args.nbytes // 4 // BLOCK_SIZE, CHECKED_BLOCKS) * BLOCK_SIZE
    device = _cuda.device_name()
    print(f"{device}, {4 * numel} bytes per array, blocks of {BLOCK_SIZE}, median of {args.rounds} paired rounds")
    print(f"{'kernel':<40} {'B/element':>9} {'ms':>9} {'GB/s':>8} {'of copy':>8}")
    found = []
    for row in _cuda.rows(numel, args.rounds, args.ranks):
        found.append(asdict(row))
        print(
            f"{row.kernel:<40} {row.bytes_per_element:>9.3f} {row.milliseconds:>9.3f} "
            f"{row.gigabytes_per_second:>8.1f} {row.fraction:>8.3f}",
            flush=True,
        )
        if args.json:  # after each row, since time on a GPU may be short
            args.json.write_text(json.dumps({**surroundings(args), "device": device, "rows": found}, indent=1) + "\n")
    return 0


HEADING = (
    f"{'kernel':<40} {'form':<10} {'threads':>7} {'B/element':>9} {'ms':>9} "
    f"{'GB/s':>7} {'yardstick':>9} {'fraction':>8} {'times C':>7} {'gain':>6}"
)


def formatted(row: Row) -> str:
    return (
        f"{row.kernel:<40} {row.form:<10} {row.threads:>7} {row.bytes_per_element:>9.3f} {row.milliseconds:>9.2f} "
        f"{row.gigabytes_per_second:>7.2f} {row.yardstick:>9} {row.fraction:>8.3f} {row.times_c:>7.2f} {row.gain:>6.2f}"
    )


def torch_or_none() -> Any:
    """Returns Torch on one thread if it is installed. It is imported by name, because the package must not depend on a
    framework.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch


def surroundings(args: argparse.Namespace) -> dict[str, object]:
    """Returns what a published number must say: machine, versions, command, commit."""
    versions = {"python": platform.python_version()}
    for package in ("numpy", "cffi", "torch", "numba-cuda"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "machine": {"processor": processor(), "system": platform.platform()},
        "versions": versions,
        "command": "python -m ocomm.bench " + " ".join(sys.argv[1:]),
        "commit": commit(),
        "nbytes": args.nbytes,
        "rounds": args.rounds,
        "path": ffi.string(lib.ocomm_path()).decode(),
    }


def processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def machine() -> str:
    return f"{processor()}, {platform.system()} {platform.machine()}"


def commit() -> str | None:
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def elapsed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def aligned_copy(array: np.ndarray) -> np.ndarray:
    copy = aligned_zeros(array.size)
    copy[:] = array
    return copy


class Bench:
    """The arrays of one run, and the timing. One tensor, whole blocks, nothing masked."""

    def __init__(self, numel: int, torch: Any, *, with_numpy: bool, threads: int = 1) -> None:
        self.numel = numel
        self.torch = torch
        self.with_numpy = with_numpy
        self.pools: dict[int, Pool | None] = {1: None}
        if threads > 1:
            self.pools[threads] = Pool(threads)
        self.use(1)
        self.c_form = f"c {ffi.string(lib.ocomm_path()).decode()}"
        rng = self._rng = np.random.default_rng(0)
        count = numel // BLOCK_SIZE
        self.blocks = np.zeros(count, BLOCK)
        first = np.arange(count) * BLOCK_SIZE
        # Scale and signs of a block are adjacent, as in a message.
        stride = 4 + BLOCK_SIZE // 8
        for field in ("offset", "start", "owned", "local", "index"):
            self.blocks[field] = first
        self.blocks["scale"] = np.arange(count) * stride
        self.blocks["bits"] = self.blocks["scale"] + 4
        self.blocks["length"] = BLOCK_SIZE
        self.x, self.y, self.error, self.param, self.denominator, self.out = (aligned_zeros(numel) for _ in range(6))
        for array in (self.x, self.y, self.error, self.param):
            rng.standard_normal(out=array, dtype=np.float32)
        self.kept = aligned_zeros(numel)  # second buffer for errors and moments, as in a step
        np.abs(self.x, out=self.denominator)
        self.denominator += np.float32(0.1)
        self.packed = aligned_zeros(count * stride // 4).view(np.uint8)
        self.messages = [self._message(rng, stride) for _ in range(8)]
        self.yardsticks = {"axpy": (12 * numel, self._axpy), "fill": (4 * numel, self._fill)}
        self._pointers = [ffi.from_buffer("float[]", array) for array in (self.out, self.x, self.y)]

    def use(self, threads: int) -> None:
        """Runs kernels and yardsticks on ``threads`` threads from now on."""
        self.threads = threads
        self.c: Kernels = CpuKernels(self.pools[threads])

    def _message(self, rng: np.random.Generator, stride: int) -> np.ndarray:
        count = len(self.blocks)
        rows = rng.integers(0, 256, (count, stride), np.uint8)
        rows[:, :4] = rng.random((count, 1), np.float32).view(np.uint8)
        return rows.reshape(-1)

    def _axpy(self) -> None:
        y, x, _ = self._pointers
        lib.ocomm_axpy(pointer_to(self.pools[self.threads]), y, self.numel, x, 1e-3)

    def _triad(self) -> None:
        lib.ocomm_triad(pointer_to(self.pools[self.threads]), *self._pointers, 1e-3, self.numel)

    def _fill(self) -> None:
        parts = np.array_split(self.out, self.threads)
        others = [threading.Thread(target=part.fill, args=(1,)) for part in parts[1:]]
        for other in others:
            other.start()
        parts[0].fill(1)
        for other in others:
            other.join()

    def tensors(self, *, dense: bool) -> np.ndarray:
        table = np.zeros(1, TENSOR)
        table["grad"] = self.x.__array_interface__["data"][0]
        table["param"] = self.param.__array_interface__["data"][0]
        table["momentum"] = self.y.__array_interface__["data"][0] if dense else 0
        table["beta1"], table["one_minus_beta1"], table["step_size"], table["decay"] = 0.9, 0.1, 1e-6, 1
        table["interval_root"], table["interval_decay"] = 1.0, 1
        return table

    def measure(self, case: Case, rounds: int) -> list[Row]:
        rows: list[Row] = []
        for form, work in case.forms.items():
            is_c = form.startswith("c ")
            work()
            timed = [self._round(case, work, is_c) for _ in range(rounds if is_c else min(SLOW_FORM_ROUNDS, rounds))]
            for threads in timed[0]:
                seconds = statistics.median(kernel for _, kernel in (by_threads[threads] for by_threads in timed))
                rows.append(
                    self._row(case, form, threads, timed, 1e3 * seconds, rows[0].milliseconds if rows else None)
                )
        self.use(1)
        return rows

    def _round(self, case: Case, work: Callable[[], object], is_c: bool) -> dict[int, tuple[float, float]]:
        """Returns the seconds of the yardstick and of the kernel, by number of threads."""
        seconds = {}
        for threads in self.pools if is_c else (1,):
            self.use(threads)
            yard = elapsed(self.yardsticks[case.yardstick][1])
            seconds[threads] = yard, elapsed(work)
        return seconds

    def _row(
        self,
        case: Case,
        form: str,
        threads: int,
        timed: list[dict[int, tuple[float, float]]],
        milliseconds: float,
        c_milliseconds: float | None,
    ) -> Row:
        nbytes = case.bytes_per_element * self.numel
        share = nbytes / self.yardsticks[case.yardstick][0]
        fractions = [{n: share * yard / kernel for n, (yard, kernel) in seconds.items()} for seconds in timed]
        return Row(
            case.kernel,
            form,
            case.bytes_per_element,
            milliseconds,
            nbytes / milliseconds / 1e6,
            case.yardstick,
            statistics.median(fraction[threads] for fraction in fractions),
            milliseconds / (c_milliseconds or milliseconds),
            threads,
            statistics.median(fraction[threads] / fraction[1] for fraction in fractions),
        )

    def cases(self, ranks: list[int]) -> list[Case]:
        bits, scale = 1 / 8, 4 / BLOCK_SIZE
        sent = bits + scale
        dense, packed = self.tensors(dense=True), self.tensors(dense=False)
        previous = self.messages[0]
        blocks = self.blocks
        cases = [
            Case("triad, no kernel", 16, "axpy", {self.c_form: self._triad}, lambda: None),
        ]
        for place, in_place in (("", False), (", in place", True)):
            cases += [
                self._case(
                    f"compress{place}",
                    12 + sent,
                    lambda k, b, error, out, kept: k.compress(b, self.x, error, kept, None, "rms", out),
                    {"numpy": self._numpy_compress, "torch": self._torch_compress},
                    in_place,
                ),
                self._case(
                    f"compress_momentum, dense{place}",
                    16 + sent,
                    lambda k, b, error, out, kept: k.compress_momentum(b, dense, None, error, kept, None, "rms", out),
                    {"numpy": self._numpy_momentum, "torch": self._torch_momentum},
                    in_place,
                ),
                self._case(
                    f"compress_momentum, from 1 bit{place}",
                    12 + 2 * sent,
                    lambda k, b, error, out, kept: k.compress_momentum(
                        b, packed, previous, error, kept, None, "rms", out
                    ),
                    {"numpy": lambda: self._numpy_momentum(unpacked(previous))},
                    in_place,
                ),
            ]
        cases += [self._average_case(n) for n in ranks]
        forms: dict[str, Callable[[], object]] = {self.c_form: lambda: self.c.unpack(blocks, previous, None, self.out)}
        cases.append(
            Case(
                "unpack",
                4 + sent,
                "fill",
                forms | self._chosen({"numpy": lambda: np.copyto(self._blocked(self.out), unpacked(previous))}),
                self._check_unpack,
            )
        )
        forms = {self.c_form: lambda: self.c.apply(blocks, packed, previous, self.denominator, None)}
        cases.append(
            Case(
                "apply",
                12 + sent,
                "axpy",
                forms | self._chosen({"numpy": lambda: self._numpy_apply(previous)}),
                self._check_apply,
            )
        )
        cases += [self._adam_case(), *self._zero_one_cases()]
        cases += self._birder_cases(ranks)
        cases += self._code_cases(ranks)
        sources = [a.view(np.uint8) for a in (self.x, self.y, self.param, self.denominator)]
        target = self.out.view(np.uint8)

        def reduced() -> None:
            self.c.reduce(DType.FLOAT32, ReduceOp.AVERAGE, sources, 1.0, 0.25, target)

        def numpy_reduced() -> None:
            np.add(self.x, self.y, out=self.out)
            np.add(self.out, self.param, out=self.out)
            np.add(self.out, self.denominator, out=self.out)
            np.multiply(self.out, np.float32(0.25), out=self.out)

        def check_reduced() -> None:
            part = [s[: 4 * BLOCK_SIZE] for s in sources]
            got, expected = np.empty_like(part[0]), np.empty_like(part[0])
            for k, out in ((self.c, got), (reference, expected)):
                k.reduce(DType.FLOAT32, ReduceOp.AVERAGE, part, 1.0, 0.25, out)
            demand_equal("reduce", got, expected)

        forms = {self.c_form: reduced}
        cases.append(
            Case("reduce, float32, 4 ranks", 20, "axpy", forms | self._chosen({"numpy": numpy_reduced}), check_reduced)
        )
        return cases

    def _zero_one_cases(self) -> list[Case]:
        """Returns the loops of 0/1 Adam. At interval 1 there are neither updates nor parameters of the last sync."""
        sent = 1 / 8 + 4 / BLOCK_SIZE
        table = self.tensors(dense=False)
        momentum, update, synced = (aligned_copy(self.y) for _ in range(3))
        message, denominator = self.messages[0], self.denominator
        return [
            self._case(
                "compress_update, interval 1",
                16 + sent,
                lambda k, b, error, out, kept: k.compress_update(
                    b, table, momentum, None, error, kept, None, "rms", out
                ),
                {"numpy": lambda: self._numpy_update(None)},
            ),
            self._case(
                "compress_update, interval > 1",
                20 + sent,
                lambda k, b, error, out, kept: k.compress_update(
                    b, table, momentum, update, error, kept, None, "rms", out
                ),
                {"numpy": lambda: self._numpy_update(update)},
            ),
            self._changing_case(
                "local_step",
                32,
                (momentum, update, self.param),
                lambda k, b, m, u, p: k.local_step(b, self._with_param(table, p), m, u, denominator, None),
                lambda: self._numpy_local_step(momentum, update),
            ),
            self._changing_case(
                "apply_update, interval 1",
                16 + sent,
                (momentum, self.param),
                lambda k, b, m, p: k.apply_update(
                    b, self._with_param(table, p), message, denominator, None, m, None, None
                ),
                lambda: self._numpy_apply_update(message, momentum, self.param),
            ),
            self._changing_case(
                "apply_update, interval > 1",
                24 + sent,
                (momentum, self.param, update, synced),
                lambda k, b, m, p, u, s: k.apply_update(
                    b, self._with_param(table, p), message, denominator, None, m, u, s
                ),
                lambda: self._numpy_apply_update(message, momentum, self.param, update, synced),
            ),
        ]

    def _adam_case(self) -> Case:
        """Returns Adam's dense step, beside ``torch.optim.Adam(fused=True)``."""
        table = self.tensors(dense=False)
        arrays = self.param, aligned_copy(self.y), aligned_copy(self.denominator)
        numbers = 1.0, 0.1, 0.999, 0.001, 0.5, 1e-8

        def step(k: Kernels, b: np.ndarray, p: np.ndarray, m: np.ndarray, v: np.ndarray) -> None:
            k.adam_step(b, self._with_param(table, p), self.x, m, v, *numbers)

        return self._changing_case(
            "adam_step", 28, arrays, step, lambda: step(reference, self.blocks, *arrays), torch=self._torch_adam()
        )

    def _torch_adam(self) -> Callable[[], object]:
        """Returns Torch's fused step, on memory like ours."""
        if self.torch is None:
            return lambda: None
        parameter = self.torch.from_numpy(aligned_copy(self.param)).requires_grad_()
        parameter.grad = self.torch.from_numpy(self.x)
        optimizer = self.torch.optim.Adam([parameter], lr=1e-6, fused=True)
        optimizer.state[parameter] = {
            "step": self.torch.tensor(0.0),
            "exp_avg": self.torch.from_numpy(aligned_copy(self.y)),
            "exp_avg_sq": self.torch.from_numpy(aligned_copy(self.denominator)),
        }
        return optimizer.step

    def _birder_cases(self, ranks: list[int]) -> list[Case]:
        """Returns the loops of Birder, SoftSignSGD and Lion. The NumPy forms work in place, and use NumPy's
        generator.
        """
        table = self.tensors(dense=False)
        noise = np.array([(1, 2, 3, 0)], NOISE)
        momentum, magnitude, error = (aligned_copy(a) for a in (self.y, self.denominator, self.error))
        packed, message = self.packed.copy(), self.messages[0]
        kept = [self.kept, *(aligned_copy(self.kept) for _ in range(2))]
        bits = 1 / 8
        return [
            self._changing_case(
                "compress_quantized",
                28 + bits,
                (*kept, packed),
                lambda k, b, m, a, e, out: k.compress_quantized(
                    b, table, momentum, m, magnitude, a, error, e, 1e-12, False, noise, out
                ),
                lambda: self._numpy_quantize(self._numpy_ratio(momentum, magnitude), error),
            ),
            *(self._average_quantized_case(n, noise, error, packed) for n in ranks),
            *(self._majority_case(n, noise, packed) for n in ranks),
            self._changing_case(
                "soft_sign",
                24,
                (*kept[:2], self.out),
                lambda k, b, m, a, out: k.soft_sign(b, table, momentum, m, magnitude, a, 1e-12, False, out),
                lambda: np.copyto(self.out, self._numpy_ratio(momentum, magnitude)),
            ),
            self._changing_case(
                "compress_signs",
                12 + bits,
                (self.kept, packed),
                lambda k, b, m, out: k.compress_signs(b, table, momentum, m, 0.99, 0.01, True, out),
                lambda: self._numpy_lion(momentum),
            ),
            self._changing_case(
                "apply_signs",
                8 + bits,
                (self.param,),
                lambda k, b, p: k.apply_signs(b, self._with_param(table, p), message),
                lambda: np.subtract(self.param, np.float32(1e-6) * signs(message), out=self.param),
            ),
        ]

    def _code_cases(self, ranks: list[int]) -> list[Case]:
        """Returns the loops of dense values in few bits."""
        cases = []
        table = self.tensors(dense=False)
        for codec in OF_BITS.values():
            nbytes = int(codec.payload_nbytes(self.blocks["length"][:1])[0])
            blocks = self.blocks.copy()
            blocks["scale"] = np.arange(len(blocks)) * nbytes
            blocks["bits"] = blocks["scale"] + 4 * codec.scales(blocks["length"])
            # Of words, so that as many of them as a part has elements are more than its messages.
            packed = aligned_zeros(len(blocks) * BLOCK_SIZE // 2).view(np.uint16)
            self.c.compress_codes(blocks, table, None, None, codec.bits, packed.view(np.uint8))
            received = [packed.view(np.uint8).copy() for _ in range(max(ranks))]
            cases += self._cases_of_codec(codec, blocks, packed, received, ranks)
        return cases

    def _cases_of_codec(
        self, codec: Codec, blocks: np.ndarray, packed: np.ndarray, received: list[np.ndarray], ranks: list[int]
    ) -> list[Case]:
        table, bits = self.tensors(dense=False), codec.bits
        sent = codec.bits / 8 + (4 / codec.group if codec.group else 0)
        errors = 8 if codec.keeps_errors else 0

        def own(kept: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
            return (self.error, kept) if codec.keeps_errors else (None, None)

        def averaging(n: int) -> Callable[..., object]:
            return lambda k, b, kept, out: k.average_codes(
                blocks[: len(b)], received[:n], 0, *own(kept), bits, out.view(np.uint8)
            )

        def numpy_send(c: np.ndarray) -> None:
            if bits == 16:
                ((c.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
                return
            groups = c.reshape(-1, GROUP)
            levels = np.float32(2 ** (bits - 1) - 1)
            scale = np.abs(groups).max(axis=1, keepdims=True) / levels
            codes = np.rint(groups / scale).astype(np.int8)
            np.subtract(groups, codes * scale, out=self.error.reshape(-1, GROUP))

        def numpy_average(n: int) -> None:
            total = self.error + self.x
            for _ in range(n - 1):
                total += self.x
            numpy_send(total)

        def numpy_unpack() -> None:
            message = received[0]
            if bits == 16:
                wide = message.view(np.uint16)[: self.numel].astype(np.uint32)
                self.out.view(np.uint32)[:] = wide << np.uint32(16)
                return
            codes = message[: self.numel * bits // 8].view(np.int8)
            if bits == 4:
                codes = np.stack([codes << 4 >> 4, codes >> 4], axis=1).reshape(-1)
            np.multiply(codes, np.float32(0.1), out=self.out)

        return [
            self._changing_case(
                f"compress_codes, {codec.label}",
                4 + errors + sent,
                (self.kept, packed),
                lambda k, b, kept, out: k.compress_codes(blocks[: len(b)], table, *own(kept), bits, out.view(np.uint8)),
                lambda: numpy_send(self.x + self.error),
            ),
            *(
                self._changing_case(
                    f"average_codes of {n} ranks, {codec.label}",
                    errors + (n + 1) * sent,
                    (self.kept, packed),
                    averaging(n),
                    partial(numpy_average, n),
                )
                for n in ranks
            ),
            self._changing_case(
                f"unpack_codes, {codec.label}",
                4 + sent,
                (self.out,),
                lambda k, b, out: k.unpack_codes(blocks[: len(b)], received[0], bits, out),
                numpy_unpack,
            ),
        ]

    def _average_quantized_case(self, ranks: int, noise: np.ndarray, error: np.ndarray, packed: np.ndarray) -> Case:
        received = [self.messages[i % len(self.messages)].copy() for i in range(ranks)]
        weights = np.full(ranks, 1 / ranks, np.float32)

        def numpy_form() -> None:
            total = signs(received[0])
            for other in received[1:]:
                total += signs(other)
            total *= np.float32(1 / ranks)
            self._numpy_quantize(total, error)

        return self._changing_case(
            f"average_quantized of {ranks} ranks",
            8 + (ranks + 1) / 8,
            (self.kept, packed),
            lambda k, b, e, out: k.average_quantized(b, received, 0, weights, error, e, noise, out),
            numpy_form,
        )

    def _majority_case(self, ranks: int, noise: np.ndarray, packed: np.ndarray) -> Case:
        received = [self.messages[i % len(self.messages)].copy() for i in range(ranks)]
        votes = np.ones(ranks, np.float32)

        def numpy_form() -> None:
            total = signs(received[0])
            for other in received[1:]:
                total += signs(other)
            positive = self._rng.random(total.size, np.float32) < (total + np.float32(1)) * np.float32(0.5)
            np.packbits(positive, bitorder="little")

        return self._changing_case(
            f"majority of {ranks} ranks",
            (ranks + 1) / 8,
            (packed,),
            lambda k, b, out: k.average_quantized(b, received, 0, votes, None, None, noise, out),
            numpy_form,
        )

    @staticmethod
    def _with_param(table: np.ndarray, param: np.ndarray) -> np.ndarray:
        table["param"] = param.__array_interface__["data"][0]
        return table

    def _changing_case(
        self,
        kernel: str,
        bytes_per_element: float,
        arrays: tuple[np.ndarray, ...],
        call: Callable[..., object],
        numpy_form: Callable[[], object],
        **others: Callable[[], object],
    ) -> Case:
        """Returns the case of a kernel that changes ``arrays``; ``call`` takes kernels, blocks and the arrays."""

        def check() -> None:
            results = []
            for k in (self.c, reference):
                copies = [array[: CHECKED_BLOCKS * BLOCK_SIZE].copy() for array in arrays]
                call(k, self.blocks[:CHECKED_BLOCKS], *copies)
                results.append(copies)
            for got, expected in zip(*results, strict=True):
                demand_equal(kernel, got, expected)

        own = {self.c_form: lambda: call(self.c, self.blocks, *arrays)}
        return Case(kernel, bytes_per_element, "axpy", own | self._chosen({"numpy": numpy_form, **others}), check)

    def _average_case(self, ranks: int) -> Case:
        received = [self.messages[i % len(self.messages)].copy() for i in range(ranks)]
        return self._case(
            f"average of {ranks} ranks",
            8 + (ranks + 1) * (1 / 8 + 4 / BLOCK_SIZE),
            lambda k, b, error, out, kept: k.average(b, received, 0, error, kept, None, "rms", out),
            {"numpy": lambda: self._numpy_average(received)},
        )

    def _case(
        self,
        kernel: str,
        bytes_per_element: float,
        call: Callable[[Kernels, np.ndarray, np.ndarray, np.ndarray, np.ndarray], bool],
        forms: dict[str, Callable[[], object]],
        in_place: bool = False,
    ) -> Case:
        """Returns the case of a compressing kernel; ``call`` takes kernels, blocks, error, packed and error_out.

        If ``in_place``, error_out is error, and the other forms are left out, because they were timed with the first
        case.
        """

        def check() -> None:
            part = self.blocks[:CHECKED_BLOCKS]
            error = self.error[: CHECKED_BLOCKS * BLOCK_SIZE]
            got, expected = ((np.zeros_like(self.packed), error.copy(), k) for k in (self.c, reference))
            for out, kept, k in (got, expected):
                call(k, part, kept if in_place else error, out, kept)
            demand_equal(kernel, got[0], expected[0])
            demand_equal(kernel, got[1], expected[1])

        kept = self.error if in_place else self.kept
        own: dict[str, Callable[[], object]]
        own = {self.c_form: lambda: call(self.c, self.blocks, self.error, self.packed, kept)}
        return Case(kernel, bytes_per_element, "axpy", own if in_place else own | self._chosen(forms), check)

    def _chosen(self, forms: dict[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
        wanted = {"numpy": self.with_numpy, "torch": self.torch is not None}
        return {form: work for form, work in forms.items() if wanted[form]}

    def _check_unpack(self) -> None:
        part = self.blocks[:CHECKED_BLOCKS]
        got, expected = (np.zeros(CHECKED_BLOCKS * BLOCK_SIZE, np.float32) for _ in range(2))
        self.c.unpack(part, self.messages[0], None, got)
        reference.unpack(part, self.messages[0], None, expected)
        demand_equal("unpack", got, expected)

    def _check_apply(self) -> None:
        part, table = self.blocks[:CHECKED_BLOCKS], self.tensors(dense=False)
        results = []
        for k in (self.c, reference):
            param = self.param[: CHECKED_BLOCKS * BLOCK_SIZE].copy()
            table["param"] = param.__array_interface__["data"][0]
            k.apply(part, table, self.messages[0], self.denominator, None)
            results.append(param)
        demand_equal("apply", *results)

    def _blocked(self, flat: np.ndarray) -> np.ndarray:
        return flat.reshape(-1, BLOCK_SIZE)

    def _numpy_send(self, c: np.ndarray) -> None:
        scale = np.sqrt(np.square(c).mean(axis=1, keepdims=True, dtype=np.float32))
        positive = c >= 0
        np.packbits(positive, axis=1, bitorder="little")
        np.subtract(c, np.where(positive, scale, -scale), out=self._blocked(self.error))

    def _numpy_compress(self) -> None:
        self._numpy_send(self._blocked(self.x + self.error))

    def _numpy_momentum(self, momentum: np.ndarray | None = None) -> None:
        m = np.float32(0.9) * (self._blocked(self.y) if momentum is None else momentum)
        m += np.float32(0.1) * self._blocked(self.x)
        m += self._blocked(self.error)
        self._numpy_send(m)

    def _numpy_average(self, received: list[np.ndarray]) -> None:
        total = unpacked(received[0])
        for message in received[1:]:
            total += unpacked(message)
        total *= np.float32(1 / len(received))
        total += self._blocked(self.error)
        self._numpy_send(total)

    def _numpy_apply(self, message: np.ndarray) -> None:
        step = unpacked(message)
        step *= np.float32(1e-6)
        step /= self._blocked(self.denominator)
        self.param -= step.reshape(-1)

    def _numpy_update(self, update: np.ndarray | None) -> None:
        x = np.float32(0.9) * self.y
        x += np.float32(0.1) * self.x
        x *= np.float32(1e-6)
        if update is not None:
            x += update
        x += self.error
        self._numpy_send(self._blocked(x))

    def _numpy_local_step(self, momentum: np.ndarray, update: np.ndarray) -> None:
        momentum *= np.float32(0.9)
        momentum += np.float32(0.1) * self.x
        step = momentum / self.denominator
        step *= np.float32(1e-6)
        self.param -= step
        update += np.float32(1e-6) * momentum

    def _numpy_apply_update(
        self,
        message: np.ndarray,
        momentum: np.ndarray,
        param: np.ndarray,
        update: np.ndarray | None = None,
        synced: np.ndarray | None = None,
    ) -> None:
        sent = unpacked(message).reshape(-1)
        np.copyto(momentum, sent)
        sent /= self.denominator
        np.subtract(param if synced is None else synced, sent, out=param)
        if synced is not None:
            np.copyto(synced, param)
        if update is not None:
            update.fill(0)

    def _numpy_ratio(self, momentum: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
        momentum *= np.float32(0.9)
        momentum += np.float32(0.1) * self.x
        magnitude *= np.float32(0.9)
        magnitude += np.float32(0.1) * np.abs(self.x)
        return momentum / (magnitude + np.float32(1e-12))

    def _numpy_lion(self, momentum: np.ndarray) -> None:
        np.packbits(np.float32(0.9) * momentum + np.float32(0.1) * self.x >= 0, bitorder="little")
        momentum *= np.float32(0.99)
        momentum += np.float32(0.01) * self.x

    def _numpy_quantize(self, y: np.ndarray, error: np.ndarray) -> None:
        y += error
        positive = self._rng.random(y.size, np.float32) < (y + np.float32(1)) * np.float32(0.5)
        np.packbits(positive, bitorder="little")
        np.subtract(y, np.where(positive, np.float32(1), np.float32(-1)), out=error)

    def _torch_send(self, c: Any) -> None:
        torch = self.torch
        scale = c.square().mean(dim=1, keepdim=True).sqrt()
        positive = c >= 0
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
        (positive.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)
        error = torch.from_numpy(self._blocked(self.error))
        torch.sub(c, torch.where(positive, scale, -scale), out=error)

    def _torch_compress(self) -> None:
        x, error = (self.torch.from_numpy(self._blocked(a)) for a in (self.x, self.error))
        self._torch_send(x + error)

    def _torch_momentum(self) -> None:
        x, y, error = (self.torch.from_numpy(self._blocked(a)) for a in (self.x, self.y, self.error))
        self._torch_send((0.9 * y).add_(x, alpha=0.1).add_(error))


def unpacked(message: np.ndarray) -> np.ndarray:
    """Returns scale * sign of a message whose blocks are all whole, as rows."""
    rows = message.reshape(-1, 4 + BLOCK_SIZE // 8)
    scale = np.ascontiguousarray(rows[:, :4]).view(np.float32)
    return np.where(np.unpackbits(rows[:, 4:], axis=1, bitorder="little").view(bool), scale, -scale)


def signs(message: np.ndarray) -> np.ndarray:
    """Returns the signs of a message whose blocks are all whole, as one row of float32, without its scales."""
    bits = np.unpackbits(message.reshape(-1, 4 + BLOCK_SIZE // 8)[:, 4:], bitorder="little")
    return np.where(bits.view(bool), np.float32(1), np.float32(-1))


def demand_equal(kernel: str, got: np.ndarray, expected: np.ndarray) -> None:
    if not np.array_equal(got.view(np.uint8), expected.view(np.uint8)):
        raise RuntimeError(f"{kernel}: the result differs from the reference; its speed would mean nothing")
