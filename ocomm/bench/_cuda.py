"""``python -m ocomm.bench kernels --device cuda``: the CUDA kernels compared with a copy inside the device's memory.

Each round times a copy of one array and then the kernel, by events on one stream, behind launches that keep the device
busy until both events are queued: so the time that Python takes for a launch is not counted. The fraction is the median
over rounds of (bytes the kernel moves / bandwidth of the copy) / time of the kernel. Every kernel is compared with the
NumPy reference on its first blocks before it is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from ocomm.compression.codecs import OF_BITS, Codec
from ocomm.kernels import BLOCK, NOISE, TENSOR, reference
from ocomm.kernels.cuda import CudaKernels, address_of
from ocomm.kernels.cuda_words import SIMULATED

BLOCK_SIZE = 4096
CHECKED_BLOCKS = 64
STRIDE = 4 + BLOCK_SIZE // 8  # scale and signs of a block are adjacent, as in a message
EPS = 1e-12
#: Messages of codes that are averaged, at most: those of 64 ranks at 16 bits are 32 times as large as all else.
MOST_CODED = 8
#: Launches of ``local_step`` in front of what is timed. At 256 MB one takes 0.7 ms on a fast GPU, and to queue a launch
#: or a copy takes Python 0.05 to 0.2 ms.
QUEUED_BEFORE = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    kernel: str
    bytes_per_element: float  # what the kernel must move
    milliseconds: float  # median
    gigabytes_per_second: float
    fraction: float  # of the copy's speed


def reason_against() -> str | None:
    """Returns why nothing can be measured here; None if it can."""
    if SIMULATED:
        return "the simulator's times mean nothing"
    return None if cuda.is_available() else "no CUDA device"


def device_name() -> str:
    name = cuda.get_current_device().name
    return name.decode() if isinstance(name, bytes) else str(name)


class WithoutAnswers(CudaKernels):
    """Kernels that do not ask whether everything was finite, so that only the launch is timed."""

    def _all_finite(self) -> bool:
        return True


def nbytes_of(codec: Codec) -> int:
    """Bytes of a whole block's message."""
    return int(codec.payload_nbytes(np.array([BLOCK_SIZE], np.int32))[0])


class Coded:
    """Dense values in few bits: where each block's are in a message, what was received, and what is sent."""

    def __init__(self, arrays: Arrays, codec: Codec, blocks: np.ndarray, rng: np.random.Generator, ranks: int) -> None:
        nbytes, scales = nbytes_of(codec), 4 * int(codec.scales(blocks["length"][:1])[0])
        table = blocks.copy()
        table["scale"] = np.arange(len(blocks)) * nbytes
        table["bits"] = table["scale"] + scales
        self.blocks = arrays.table(table)
        self.messages = []
        for _ in range(ranks):
            message = rng.integers(0, 256, (len(blocks), nbytes), np.uint8)
            if codec.bits == 16:
                message[:, 1::2] &= 0xBF  # bfloat16 below 2: all are finite
            message[:, :scales] = rng.random((len(blocks), scales // 4), np.float32).view(np.uint8)
            self.messages.append(arrays.place(message.reshape(-1)))
        self.packed = arrays.place(np.zeros(len(blocks) * nbytes, np.uint8))


class Arrays:
    """The inputs of all loops, on the host or on the device: one tensor, whole blocks, nothing masked."""

    def __init__(self, numel: int, ranks: int, to_device: bool) -> None:
        rng = np.random.default_rng(0)
        count = numel // BLOCK_SIZE
        blocks = np.zeros(count, BLOCK)
        for column in ("offset", "start", "owned", "local", "index"):
            blocks[column] = np.arange(count) * BLOCK_SIZE
        blocks["scale"] = np.arange(count) * STRIDE
        blocks["bits"] = blocks["scale"] + 4
        blocks["length"] = BLOCK_SIZE
        self._to_device = to_device
        self.blocks = self.table(blocks)
        self.grad, self.param, self.error, self.momentum, self.update, self.synced = (
            self.place(rng.standard_normal(numel, np.float32)) for _ in range(6)
        )
        self.magnitude, self.denominator = (
            self.place(rng.random(numel, np.float32) + np.float32(0.1)) for _ in range(2)
        )
        self.out, self.out2, self.out3 = (self.place(np.zeros(numel, np.float32)) for _ in range(3))
        self.packed = self.place(np.zeros(count * STRIDE, np.uint8))
        self.messages = []
        for _ in range(ranks):
            message = rng.integers(0, 256, (count, STRIDE), np.uint8)
            message[:, :4] = rng.random((count, 1), np.float32).view(np.uint8)
            self.messages.append(self.place(message.reshape(-1)))
        self.weights = self.place(np.full(ranks, 1 / ranks, np.float32))
        self.noise = np.array([(1, 2, 3, 0)], NOISE)
        self.dense, self.bare = (self._tensors(momentum) for momentum in (self.momentum, None))
        self.coded = {bits: Coded(self, codec, blocks, rng, min(ranks, MOST_CODED)) for bits, codec in OF_BITS.items()}

    def place(self, array: np.ndarray) -> Any:
        return cuda.to_device(array) if self._to_device else array

    def table(self, rows: np.ndarray) -> Any:
        return cuda.to_device(rows.view(np.uint8).reshape(len(rows), -1)) if self._to_device else rows

    def _address(self, array: Any) -> int:
        return address_of(array) if self._to_device else int(array.__array_interface__["data"][0])

    def _tensors(self, momentum: Any) -> Any:
        table = np.zeros(1, TENSOR)
        table["grad"], table["param"] = self._address(self.grad), self._address(self.param)
        table["momentum"] = 0 if momentum is None else self._address(momentum)
        table["beta1"], table["one_minus_beta1"], table["step_size"], table["decay"] = 0.9, 0.1, 1e-6, 1
        table["interval_root"], table["interval_decay"] = 1, 1
        return self.table(table)

    def written(self) -> list[np.ndarray]:
        """Returns what any loop may write, on the host."""
        arrays = (self.packed, self.out, self.out2, self.out3, self.param, self.momentum, self.update, self.synced)
        arrays += (self.magnitude, *(coded.packed for coded in self.coded.values()))
        return [array.copy_to_host() if self._to_device else array for array in arrays]


Loop = Callable[[Any, Arrays], object]


def cases(ranks: list[int]) -> Iterator[tuple[str, float, Loop]]:
    """Yields name, bytes per element, and the call of each loop."""
    sent = 1 / 8 + 4 / BLOCK_SIZE
    yield "compress", 12 + sent, lambda k, a: k.compress(a.blocks, a.grad, a.error, a.out, None, "l1", a.packed)
    yield (
        "compress_momentum, dense",
        16 + sent,
        lambda k, a: k.compress_momentum(a.blocks, a.dense, None, a.error, a.out, None, "l1", a.packed),
    )
    yield (
        "compress_momentum, from 1 bit",
        12 + 2 * sent,
        lambda k, a: k.compress_momentum(a.blocks, a.bare, a.messages[0], a.error, a.out, None, "l1", a.packed),
    )
    for n in ranks:
        yield f"average of {n}", 8 + (n + 1) * sent, averaged(n)
    yield "unpack", 4 + sent, lambda k, a: k.unpack(a.blocks, a.messages[0], None, a.out)
    yield "apply", 12 + sent, lambda k, a: k.apply(a.blocks, a.bare, a.messages[0], a.denominator, None)
    yield (
        "compress_update",
        20 + sent,
        lambda k, a: k.compress_update(a.blocks, a.bare, a.momentum, a.update, a.error, a.out, None, "l1", a.packed),
    )
    yield "local_step", 32, lambda k, a: k.local_step(a.blocks, a.bare, a.momentum, a.update, a.denominator, None)
    yield (
        "apply_update, interval > 1",
        24 + sent,
        lambda k, a: k.apply_update(
            a.blocks, a.bare, a.messages[0], a.denominator, None, a.momentum, a.update, a.synced
        ),
    )
    yield (
        "compress_quantized",
        28 + 1 / 8,
        lambda k, a: k.compress_quantized(
            a.blocks, a.bare, a.momentum, a.out, a.magnitude, a.out2, a.error, a.out3, EPS, False, a.noise, a.packed
        ),
    )
    for n in ranks:
        yield f"average_quantized of {n}", 8 + (n + 1) / 8, average_quantized(n)
    yield (
        "compress_signs",
        12 + 1 / 8,
        lambda k, a: k.compress_signs(a.blocks, a.bare, a.momentum, a.out, 0.99, 0.01, True, a.packed),
    )
    yield "apply_signs", 8 + 1 / 8, lambda k, a: k.apply_signs(a.blocks, a.bare, a.messages[0])
    yield (
        "soft_sign",
        24,
        lambda k, a: k.soft_sign(a.blocks, a.bare, a.momentum, a.out, a.magnitude, a.out2, EPS, False, a.out3),
    )
    yield (
        "adam_step",
        28,
        lambda k, a: k.adam_step(a.blocks, a.bare, a.error, a.momentum, a.magnitude, 1.0, 0.1, 0.999, 0.001, 0.5, EPS),
    )
    for bits, codec in OF_BITS.items():
        yield from cases_of_codes(bits, codec, [n for n in ranks if n <= MOST_CODED])


def cases_of_codes(bits: int, codec: Codec, ranks: list[int]) -> Iterator[tuple[str, float, Loop]]:
    sent, errors = nbytes_of(codec) / BLOCK_SIZE, 8 if codec.keeps_errors else 0

    def own(a: Arrays) -> tuple[Any, Any]:
        return (a.error, a.out) if codec.keeps_errors else (None, None)

    def averaged_codes(n: int) -> Loop:
        return lambda k, a: k.average_codes(
            a.coded[bits].blocks, a.coded[bits].messages[:n], 0, *own(a), bits, a.coded[bits].packed
        )

    yield (
        f"compress_codes, {codec.label}",
        4 + errors + sent,
        lambda k, a: k.compress_codes(a.coded[bits].blocks, a.bare, *own(a), bits, a.coded[bits].packed),
    )
    for n in ranks:
        yield f"average_codes of {n}, {codec.label}", errors + (n + 1) * sent, averaged_codes(n)
    yield (
        f"unpack_codes, {codec.label}",
        4 + sent,
        lambda k, a: k.unpack_codes(a.coded[bits].blocks, a.coded[bits].messages[0], bits, a.out),
    )


def averaged(ranks: int) -> Loop:
    return lambda k, a: k.average(a.blocks, a.messages[:ranks], 0, a.error, a.out, None, "l1", a.packed)


def average_quantized(ranks: int) -> Loop:
    return lambda k, a: k.average_quantized(
        a.blocks, a.messages[:ranks], 0, a.weights[:ranks], a.error, a.out, a.noise, a.packed
    )


def check(kernel: str, loop: Loop, checked: int, ranks: int) -> None:
    """Raises RuntimeError if the loop's results on the first blocks differ from the reference's by more than
    rounding.
    """
    got, expected = (
        run_once(kernels, Arrays(checked * BLOCK_SIZE, ranks, to_device), loop)
        for kernels, to_device in ((WithoutAnswers(), True), (reference, False))
    )
    rounded = [np.ascontiguousarray(side[0].reshape(-1, STRIDE)[:, :4]).view(np.float32) for side in (got, expected)]
    # Codes have the bits of the reference's, their scales too: a maximum does not depend on the order.
    pairs = [(rounded[0], rounded[1]), *zip(got[1:], expected[1:], strict=True)]
    signs_differ = (got[0] != expected[0]).reshape(-1, STRIDE)[:, 4:].any()
    if signs_differ or not all(np.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in pairs):
        raise RuntimeError(f"{kernel}: the result differs from the reference; its speed would mean nothing")


def run_once(kernels: Any, arrays: Arrays, loop: Loop) -> list[np.ndarray]:
    loop(kernels, arrays)
    return arrays.written()


def rows(numel: int, rounds: int, ranks: list[int]) -> Iterator[Row]:
    """Checks and times one loop after the other; ``numel`` is a multiple of the block size."""
    kernels, arrays = WithoutAnswers(), Arrays(numel, max(ranks), True)
    source, target = (cuda.to_device(np.zeros(numel, np.float32)) for _ in range(2))

    def copy() -> None:
        target.copy_to_device(source)

    (long_one,) = [loop for name, _, loop in cases(ranks) if name == "local_step"]
    busy = partial(long_one, kernels, arrays)
    busy()
    for kernel, nbytes, loop in cases(ranks):
        check(kernel, loop, min(CHECKED_BLOCKS, numel // BLOCK_SIZE), max(ranks))
        loop(kernels, arrays)
        times, fractions = [], []
        for _ in range(rounds):
            copied = elapsed_ms(busy, copy)
            times.append(elapsed_ms(busy, loop, kernels, arrays))
            fractions.append(nbytes * copied / (8 * times[-1]))
        milliseconds = statistics.median(times)
        yield Row(kernel, nbytes, milliseconds, nbytes * numel / milliseconds / 1e6, statistics.median(fractions))


def elapsed_ms(busy: Callable[[], object], work: Callable[..., object], *arguments: object) -> float:
    """Returns the device's time for ``work(*arguments)``, queued behind a few times ``busy()``."""
    before, after = cuda.event(), cuda.event()
    for _ in range(QUEUED_BEFORE):
        busy()
    before.record()
    work(*arguments)
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))
