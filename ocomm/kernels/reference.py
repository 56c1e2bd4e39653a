"""The kernels in plain NumPy: slow and simple. Every other implementation must equal them bit for bit.

All arithmetic is float32, and each operation rounds separately. Three conventions hold everywhere:

- The sign of 0 and of -0.0 is +1. A block's signs are ``ceil(length / 8)`` bytes, the first element in the lowest bit,
  1 = positive; bits after the last element are 0.
- A masked element is not counted in its block's scale, its bit is 1, its result is 0, and its value stays in the error.
  A block with nothing but masked elements has scale 0, and so has a block of zeros.
- If a value of a block is not finite, masked elements included, its scale is not finite either, so that the scale alone
  tells every rank. The error that is written is then meaningless.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocomm.kernels.base import (
    GROUP,
    HOST,
    LEAST,
    PARTS,
    SKETCH,
    SKETCHED,
    SUMMED,
    WHOLE,
    Bytes,
    Floats,
    Table,
    pieces_of,
)
from ocomm.types import DType, ReduceOp

LANES, SUM_LANES = 32, 256
_ZERO, _ONE = np.float32(0), np.float32(1)


class ReferenceKernels:
    """The kernels in NumPy. ``ocomm.kernels.loops`` has the arguments."""

    name = "reference"
    memory = HOST

    def gather(self, runs: Table, tensors: Table, destination: Bytes) -> None:
        """Copies gradient elements of each row of a RUN table into ``destination``, float32; zeros for a tensor without
        a gradient.
        """
        for part, gradient in _runs(tensors, runs, destination):
            part[:] = 0 if gradient is None else gradient

    def scatter(self, runs: Table, tensors: Table, source: Bytes) -> None:
        """Copies the elements of ``source`` to the addresses of the tensors' gradients."""
        for part, gradient in _runs(tensors, runs, source):
            assert gradient is not None
            gradient[:] = part

    def compress(
        self,
        blocks: Table,
        values: Floats,
        error: Floats,
        error_out: Floats,
        mask: Bytes | None,
        scale: str,
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and ``error_out`` where the blocks are; ``error_out`` may be ``error``."""
        finite = True
        with np.errstate(all="ignore"):
            for block in blocks:
                at = _span(block["local"], block)
                c = values[at] + error[at]
                masked = _masked(mask, block)
                finite &= _send(block, c, c, masked, scale, packed, error_out[at])
        return finite

    def compress_momentum(
        self,
        blocks: Table,
        tensors: Table,
        previous: Bytes | None,
        error: Floats,
        error_out: Floats,
        mask: Bytes | None,
        scale: str,
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and ``error_out``. A gradient of address 0 counts as zeros; without dense momentum and
        without ``previous`` the momentum is zero.
        """
        finite = True
        with np.errstate(all="ignore"):
            for block in blocks:
                tensor = tensors[block["tensor"]]
                masked = _masked(mask, block)
                gradient = _decayed_gradient(tensor, block)
                if tensor["momentum"]:
                    average = _tensor_part(tensor["momentum"], block)
                elif previous is not None:
                    average = np.where(masked, _ZERO, _decoded(previous, block))
                else:
                    average = np.zeros(block["length"], np.float32)
                m = tensor["beta1"] * average + tensor["one_minus_beta1"] * gradient
                at = _span(block["local"], block)
                c = m + error[at]
                finite &= _send(block, c, c, masked, scale, packed, error_out[at])
        return finite

    def average(
        self,
        blocks: Table,
        received: Sequence[Bytes],
        origin: int,
        error: Floats,
        error_out: Floats,
        mask: Bytes | None,
        scale: str,
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and ``error_out``, in which masked elements keep ``error``."""
        finite = True
        with np.errstate(all="ignore"):
            for block in blocks:
                total = _decoded(received[0], block, origin)
                for message in received[1:]:
                    total = total + _decoded(message, block, origin)
                at = _span(block["owned"], block)
                kept = error[at].copy()
                a = total * np.float32(1 / len(received)) + kept
                finite &= _send(block, a, kept, _masked(mask, block), scale, packed, error_out[at])
        return finite

    def unpack(self, blocks: Table, packed: Bytes, mask: Bytes | None, out: Floats) -> None:
        """Writes ``out`` where the blocks are."""
        for block in blocks:
            result = np.where(_masked(mask, block), _ZERO, _decoded(packed, block))
            out[_span(block["offset"], block)] = result

    def apply(self, blocks: Table, tensors: Table, packed: Bytes, denominator: Floats, mask: Bytes | None) -> None:
        """Updates the tensors at the ``param`` addresses in place, except those with ``skip``."""
        with np.errstate(all="ignore"):
            for block in blocks:
                tensor = tensors[block["tensor"]]
                if tensor["skip"]:
                    continue
                param = _tensor_part(tensor["param"], block)
                if tensor["decay"] != 1:
                    param[:] = param * tensor["decay"]
                step = (tensor["step_size"] * _scale(packed, block)) * _signs(packed, block)
                moved = param - step / denominator[_span(block["offset"], block)]
                param[:] = np.where(_masked(mask, block), param, moved)

    def compress_update(
        self,
        blocks: Table,
        tensors: Table,
        momentum: Floats,
        update: Floats | None,
        error: Floats,
        error_out: Floats,
        mask: Bytes | None,
        scale: str,
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and ``error_out``. A gradient of address 0 counts as zeros."""
        finite = True
        with np.errstate(all="ignore"):
            for block in blocks:
                tensor = tensors[block["tensor"]]
                at = _span(block["offset"], block)
                m = tensor["beta1"] * momentum[at] + tensor["one_minus_beta1"] * _decayed_gradient(tensor, block)
                root = tensor["interval_root"]
                per_root, share = (_ONE / root, tensor["step_size"] / root) if root > 0 else (_ZERO, _ZERO)
                x = (_ZERO if update is None else per_root * update[at]) + share * m
                kept = _span(block["local"], block)
                c = x + error[kept]
                finite &= _send(block, c, c, _masked(mask, block), scale, packed, error_out[kept])
        return finite

    def local_step(
        self,
        blocks: Table,
        tensors: Table,
        momentum: Floats,
        update: Floats | None,
        denominator: Floats,
        mask: Bytes | None,
    ) -> None:
        """Updates ``momentum``, ``update`` and the tensors at ``param`` in place, except those with ``skip``."""
        with np.errstate(all="ignore"):
            for block in blocks:
                tensor = tensors[block["tensor"]]
                if tensor["skip"]:
                    continue
                at = _span(block["offset"], block)
                masked = _masked(mask, block)
                param = _tensor_part(tensor["param"], block)
                m = tensor["beta1"] * momentum[at] + tensor["one_minus_beta1"] * _decayed_gradient(tensor, block)
                if tensor["decay"] != 1:
                    param[:] = param * tensor["decay"]
                moved = param - tensor["step_size"] * (m / denominator[at])
                param[:] = np.where(masked, param, moved)
                if update is not None:
                    update[at] = update[at] + tensor["step_size"] * m
                momentum[at] = np.where(masked, momentum[at], m)

    def apply_update(
        self,
        blocks: Table,
        tensors: Table,
        packed: Bytes,
        denominator: Floats,
        mask: Bytes | None,
        momentum: Floats,
        update: Floats | None,
        synced: Floats | None,
    ) -> None:
        """Updates the tensors at ``param`` and the flat buffers in place, except those with ``skip``."""
        with np.errstate(all="ignore"):
            for block in blocks:
                tensor = tensors[block["tensor"]]
                if tensor["skip"]:
                    continue
                at = _span(block["offset"], block)
                masked = _masked(mask, block)
                param = _tensor_part(tensor["param"], block)
                base = param if synced is None else synced[at]
                if tensor["interval_decay"] != 1:
                    base = base * tensor["interval_decay"]
                scale, signs = _scale(packed, block), _signs(packed, block)
                moved = base - ((tensor["interval_root"] * scale) * signs) / denominator[at]
                param[:] = np.where(masked, base, moved)
                momentum[at] = np.where(masked, _ZERO, (scale / tensor["interval_root"]) * signs)
                if synced is not None:
                    synced[at] = param
                if update is not None:
                    update[at] = 0

    def finite(self, blocks: Table, tensors: Table) -> bool:
        """Reads the gradients only; a gradient of address 0 is finite."""
        return all(np.isfinite(_tensor_part(tensors["grad"][block["tensor"]], block)).all() for block in blocks)

    def finite_scales(self, blocks: Table, packed: Bytes) -> bool:
        """Reads the scales only."""
        scales = packed[blocks["scale"][:, np.newaxis] + np.arange(4)]
        return bool(np.isfinite(scales.view(np.float32)).all())

    def compress_quantized(
        self,
        blocks: Table,
        tensors: Table,
        momentum: Floats,
        momentum_out: Floats,
        magnitude: Floats,
        magnitude_out: Floats,
        error: Floats,
        error_out: Floats,
        eps: float,
        amsgrad: bool,
        noise: NDArray[np.void],
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and the three ``_out`` arrays where the blocks are; each may be the array before it."""
        finite = True
        with np.errstate(all="ignore"):
            for block in blocks:
                at = _span(block["local"], block)
                m, b = _moments(tensors[block["tensor"]], block, momentum[at], magnitude[at], amsgrad)
                y = m / (b + np.float32(eps)) + error[at]
                momentum_out[at], magnitude_out[at] = m, b
                error_out[at] = _quantize(block, y, noise, packed)
                finite &= all(bool(np.isfinite(part).all()) for part in (m, b, y))
        return finite

    def average_quantized(
        self,
        blocks: Table,
        received: Sequence[Bytes],
        origin: int,
        weights: Floats,
        error: Floats | None,
        error_out: Floats | None,
        noise: NDArray[np.void],
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and ``error_out``, which may be ``error``; both may be None."""
        finite = True
        with np.errstate(all="ignore"):
            for block in blocks:
                total = weights[0] * _signs(received[0], block, origin)
                for weight, message in zip(weights[1:], received[1:], strict=True):
                    total = total + weight * _signs(message, block, origin)
                at = _span(block["owned"], block)
                a = total if error is None else total + error[at]
                left = _quantize(block, a, noise, packed)
                if error_out is not None:
                    error_out[at] = left
                finite &= bool(np.isfinite(a).all())
        return finite

    def compress_signs(
        self,
        blocks: Table,
        tensors: Table,
        momentum: Floats,
        momentum_out: Floats,
        beta2: float,
        one_minus_beta2: float,
        zero_up: bool,
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and ``momentum_out`` where the blocks are; the latter may be ``momentum``."""
        finite = True
        with np.errstate(all="ignore"):
            for block in blocks:
                at, tensor = _span(block["local"], block), tensors[block["tensor"]]
                gradient = _tensor_part(tensor["grad"], block)
                c = tensor["beta1"] * momentum[at] + tensor["one_minus_beta1"] * gradient
                m = np.float32(beta2) * momentum[at] + np.float32(one_minus_beta2) * gradient
                momentum_out[at] = m
                signs = np.packbits(c >= 0 if zero_up else c > 0, bitorder="little")
                packed[int(block["bits"]) : int(block["bits"]) + signs.size] = signs
                finite &= bool(np.isfinite(c).all()) and bool(np.isfinite(m).all())
        return finite

    def apply_signs(self, blocks: Table, tensors: Table, packed: Bytes) -> None:
        """Updates the tensors at the ``param`` addresses in place."""
        with np.errstate(all="ignore"):
            for block in blocks:
                tensor = tensors[block["tensor"]]
                if tensor["skip"]:
                    continue
                param = _tensor_part(tensor["param"], block)
                if tensor["decay"] != 1:
                    param[:] = param * tensor["decay"]
                param[:] = param - tensor["step_size"] * _signs(packed, block)

    def compress_codes(
        self,
        blocks: Table,
        tensors: Table,
        error: Floats | None,
        error_out: Floats | None,
        bits: int,
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and ``error_out``, which may be ``error``; both may be None."""
        finite = True
        with np.errstate(all="ignore"):
            for block in blocks:
                at = _span(block["local"], block)
                c = _tensor_part(tensors["grad"][block["tensor"]], block)
                finite &= _send_codes(block, c if error is None else c + error[at], bits, packed, error_out, at)
        return finite

    def average_codes(
        self,
        blocks: Table,
        received: Sequence[Bytes],
        origin: int,
        error: Floats | None,
        error_out: Floats | None,
        bits: int,
        packed: Bytes,
    ) -> bool:
        """Writes ``packed`` and ``error_out``, which may be ``error``; both may be None."""
        finite = True
        with np.errstate(all="ignore"):
            for block in blocks:
                total = _of_codes(received[0], block, bits, origin)
                for message in received[1:]:
                    total = total + _of_codes(message, block, bits, origin)
                at = _span(block["owned"], block)
                a = total * np.float32(1 / len(received))
                finite &= _send_codes(block, a if error is None else a + error[at], bits, packed, error_out, at)
        return finite

    def unpack_codes(self, blocks: Table, packed: Bytes, bits: int, out: Floats) -> None:
        """Writes ``out`` where the blocks are."""
        with np.errstate(all="ignore"):
            for block in blocks:
                out[_span(block["offset"], block)] = _of_codes(packed, block, bits)

    def descend(self, blocks: Table, tensors: Table, averages: Floats) -> None:
        """Updates the tensors at the ``param`` addresses in place, runs of adjacent blocks at once."""
        ends = blocks["start"] + blocks["length"]
        joined = (np.diff(blocks["tensor"]) == 0) & (blocks["start"][1:] == ends[:-1])
        joined &= np.diff(blocks["offset"]) == blocks["length"][:-1]
        firsts = np.flatnonzero(np.concatenate([[True], ~joined])[: blocks.size])
        lasts = np.append(firsts, blocks.size)[1:] - 1
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            tensor = tensors[blocks["tensor"][first]]
            if tensor["skip"]:
                continue
            at, numel = int(blocks["start"][first]), int(ends[last] - blocks["start"][first])
            param = HOST.at(int(tensor["param"]) + 4 * at, numel)
            update = averages[int(blocks["offset"][first]) : int(blocks["offset"][first]) + numel]
            if tensor["decay"] != 1:
                param *= tensor["decay"]
            update *= tensor["step_size"]
            param -= update

    def adam_step(
        self,
        blocks: Table,
        tensors: Table,
        gradients: Floats,
        momentum: Floats,
        variance: Floats,
        scale: float,
        rest1: float,
        beta2: float,
        rest2: float,
        root: float,
        eps: float,
    ) -> None:
        """Updates parameters, ``momentum`` and ``variance`` in place."""
        with np.errstate(all="ignore"):
            for block in blocks:
                tensor, own = tensors[block["tensor"]], _span(block["owned"], block)
                param, m, v = _tensor_part(tensor["param"], block), momentum[own], variance[own]
                g = gradients[own] * np.float32(scale)
                if tensor["weight_decay"]:
                    g += tensor["weight_decay"] * param
                param *= tensor["decay"]
                m += np.float32(rest1) * (g - m)
                v *= np.float32(beta2)
                v += np.float32(rest2) * g * g
                param -= tensor["step_size"] * (m / (np.sqrt(v) / np.float32(root) + np.float32(eps)))

    def soft_sign(
        self,
        blocks: Table,
        tensors: Table,
        momentum: Floats,
        momentum_out: Floats,
        magnitude: Floats,
        magnitude_out: Floats,
        eps: float,
        amsgrad: bool,
        out: Floats,
    ) -> bool:
        """Writes ``out`` and the two ``_out`` arrays where the blocks are; the latter may be the arrays before them."""
        finite = True
        with np.errstate(all="ignore"):
            for block in blocks:
                at = _span(block["local"], block)
                m, b = _moments(tensors[block["tensor"]], block, momentum[at], magnitude[at], amsgrad)
                momentum_out[at], magnitude_out[at] = m, b
                ratio = m / (b + np.float32(eps))
                out[_span(block["offset"], block)] = ratio
                finite &= all(bool(np.isfinite(part).all()) for part in (m, b, ratio))
        return finite

    def reduce(
        self,
        dtype: DType,
        op: ReduceOp,
        sources: Sequence[Bytes],
        prescale: float,
        postscale: float,
        out: Bytes,
    ) -> None:
        """Writes ``out``, which may be one of the sources.

        AVERAGE of floats is SUM: its 1/n is in ``postscale``. AVERAGE of integers is a sum in 64 bits divided by the
        number of sources, rounded towards zero; with a ``postscale`` it is the sum times ``postscale / n``. Other
        integer results wrap. Factors of integers are applied in float64, and products are rounded towards zero and
        clamped to the type's limits. Raises TypeError for an operation that the element type does not have.
        """
        reject_unsupported(dtype, op, prescale, postscale)
        with np.errstate(all="ignore"):
            parts = (_scaled(_load(source, dtype), prescale) for source in sources)
            if op == ReduceOp.AVERAGE and not dtype.is_floating:
                wide = functools.reduce(np.add, (part.astype(np.int64) for part in parts))
                total = _integer_mean(wide, len(sources), postscale, np.iinfo(_NUMPY_DTYPE[dtype]))
            else:
                total = _scaled(functools.reduce(_COMBINE[op], parts), postscale)
            out[:] = _store(total, dtype)

    def checksum(self, data: Bytes, part: int = WHOLE) -> int:
        """Returns the sum of the mixed 8-byte words, of all or of a part, and of the bytes at the end that are no whole
        word.
        """
        count = len(data) // 8
        words = data[: 8 * count].view(np.uint64)
        whole = part == WHOLE or count <= 512
        first, last = (0, count) if whole else (count * part // PARTS, count * (part + 1) // PARTS)
        at = np.arange(first, last, dtype=np.uint64)
        end = np.zeros(8, np.uint8)
        end[: len(data) % 8] = data[8 * count :]
        parts = [_mixed(words[at], at), np.array([len(data)], np.uint64) * CHECKSUM_SPREAD]
        if len(data) % 8:
            parts.append(_mixed(end.view(np.uint64), np.array([count], np.uint64)))
        return int(np.concatenate(parts).sum(dtype=np.uint64))

    def sum_words(self, pieces: Table, sums: NDArray[np.uint64]) -> None:
        """Computes what each row of a PIECE table adds to a full ``checksum``; elements are words of 8 bytes."""
        for k, (address, first, count, tail) in enumerate(pieces.tolist()):
            data = np.zeros(count + 1, np.uint64)
            data.view(np.uint8)[: 8 * count + tail] = _memory(address + 8 * first, 8 * count + tail)
            positions = np.arange(first, first + count + 1, dtype=np.uint64)
            sums[k] = _mixed(data, positions)[: count + (tail > 0)].sum(dtype=np.uint64)

    def sum_squares(self, pieces: Table, sums: NDArray[np.float64]) -> None:
        """Computes the sum of squares of each row of a PIECE table, in float64 and in any order; elements are
        float32.
        """
        for k, (address, first, count, _) in enumerate(pieces.tolist()):
            values = _memory(address + 4 * first, 4 * count).view(np.float32).astype(np.float64)
            sums[k] = (values * values).sum()

    def sum_floats(self, pieces: Table, sums: Floats) -> None:
        """Computes the sum of each row of a PIECE table; elements are float32."""
        for k, (address, first, count, _) in enumerate(pieces.tolist()):
            with np.errstate(all="ignore"):
                sums[k] = _lane_sum(_memory(address + 4 * first, 4 * count).view(np.float32), SUM_LANES)

    def sum_buckets(self, pieces: Table, sums: Floats) -> None:
        """Computes the sums of each row of a PIECE table, SKETCH of them."""
        for k, (address, first, count, key) in enumerate(pieces.tolist()):
            values = _memory(address + 4 * first, 4 * count).view(np.float32)
            sums[k * SKETCH : (k + 1) * SKETCH] = _sums_of_buckets(values, key)

    def checksums(
        self, addresses: NDArray[np.uint64], nbytes: NDArray[np.int64], part: int = WHOLE
    ) -> NDArray[np.uint64]:
        """Returns the checksum of each buffer."""
        sums = np.zeros(addresses.size, np.uint64)
        for i, (address, count) in enumerate(zip(addresses.tolist(), nbytes.tolist(), strict=True)):
            if address:
                data = np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)
                sums[i] = self.checksum(data, part)
        return sums

    def squares(self, addresses: NDArray[np.uint64], numels: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the sum of squares of each buffer."""
        sums = np.zeros(addresses.size)
        for i, (address, count) in enumerate(zip(addresses.tolist(), numels.tolist(), strict=True)):
            if address and count:
                values = np.frombuffer((ctypes.c_float * count).from_address(address), np.float32).astype(np.float64)
                lanes = np.zeros((-(-count // 32), 32))
                lanes.reshape(-1)[:count] = values * values
                total = lanes[0]
                for row in lanes[1:]:
                    total = total + row
                for half in (16, 8, 4, 2, 1):
                    total = total[:half] + total[half : 2 * half]
                sums[i] = total[0]
        return sums

    def sums(self, addresses: NDArray[np.uint64], numels: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the sum of each buffer."""
        pieces, of = pieces_of(addresses, numels, np.zeros_like(numels), SUMMED)
        found, sums = np.zeros(pieces.size, np.float32), np.zeros(addresses.size)
        self.sum_floats(pieces, found)
        np.add.at(sums, of, found)
        return sums

    def sketch(self, addresses: NDArray[np.uint64], numels: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
        """Returns the sums of the buckets."""
        sums = np.zeros(SKETCH)
        for i, (address, count) in enumerate(zip(addresses.tolist(), numels.tolist(), strict=True)):
            for first in range(0, count if address else 0, SKETCHED):
                values = _memory(address + 4 * first, 4 * min(SKETCHED, count - first)).view(np.float32)
                sums += _sums_of_buckets(values, int(sketch_keys(*np.array([[seed], [i], [first]]))[0]))
        return sums

    def axpy(self, y: Floats, x: Floats, factor: float) -> None:
        """Updates ``y`` in place."""
        with np.errstate(all="ignore"):
            y += np.float32(factor) * x

    def adam_update(
        self,
        gradient: Floats,
        momentum: Floats,
        variance: Floats,
        update: Floats,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
    ) -> None:
        """Updates ``momentum`` and ``variance`` in place, and writes ``update``."""
        with np.errstate(all="ignore"):
            momentum[:] = np.float32(beta1) * momentum + np.float32(1.0 - beta1) * gradient
            variance[:] = np.float32(beta2) * variance + np.float32(1.0 - beta2) * (gradient * gradient)
            root = np.sqrt(variance * np.float32(1.0 / (1.0 - beta2**step)))
            update[:] = np.float32(1.0 / (1.0 - beta1**step)) * momentum / (root + np.float32(eps))

    def lamb_update(
        self,
        blocks: Table,
        packed: Bytes,
        previous: Bytes | None,
        dense: Floats | None,
        mask: Bytes | None,
        floors: Floats,
        denominator: Floats,
        fresh: Floats,
        update: Floats,
        largest: Floats,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
    ) -> None:
        """Updates ``fresh`` in place, and writes ``update`` and ``largest``."""
        with np.errstate(all="ignore"):
            for k, (block, floor) in enumerate(zip(blocks, floors, strict=True)):
                flat, own = _span(block["offset"], block), _span(block["start"], block)
                masked = _masked(mask, block)
                m = np.where(masked, _ZERO, _decoded(packed, block))
                if previous is None:
                    assert dense is not None, "neither has the momentum before"
                    before = dense[own]
                else:
                    before = np.where(masked, _ZERO, _decoded(previous, block))
                g = (m - np.float32(beta1) * before) * np.float32(1.0 / (1.0 - beta1))
                fresh[flat] = np.float32(beta2) * fresh[flat] + np.float32(1.0 - beta2) * (g * g)
                moved = np.float32(1.0 / (1.0 - beta1**step)) * m / denominator[flat]
                update[own] = np.where(masked, _ZERO, moved)
                root = np.maximum(np.sqrt(fresh[flat] * np.float32(1.0 / (1.0 - beta2**step))), floor)
                ratio = denominator[flat] / (root + np.float32(eps))
                largest[k] = max(_ZERO, np.where(masked, _ZERO, ratio).max())


def _memory(address: int, nbytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _runs(tensors: Table, runs: Table, message: Bytes) -> Iterator[tuple[Bytes, Bytes | None]]:
    """Yields (part of the message, part of the gradient or None) for each run."""
    for run in runs:
        first, nbytes = 4 * int(run["position"]), 4 * int(run["length"])
        address = int(tensors["grad"][run["tensor"]])
        gradient = None
        if address:
            gradient = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address + 4 * int(run["start"])))
        yield message[first : first + nbytes], gradient


def _span(first: int, block: np.void) -> slice:
    return slice(int(first), int(first) + int(block["length"]))


def _bits(data: Bytes, first_byte: int, block: np.void) -> NDArray[np.bool_]:
    length = int(block["length"])
    return np.unpackbits(data[first_byte : first_byte + (length + 7) // 8], count=length, bitorder="little").view(bool)


def _masked(mask: Bytes | None, block: np.void) -> NDArray[np.bool_]:
    if mask is None:
        return np.zeros(block["length"], bool)
    return _bits(mask, int(block["offset"]) // 8, block)


def _scale(message: Bytes, block: np.void, origin: int = 0) -> np.float32:
    at = int(block["scale"]) - origin
    return np.frombuffer(message[at : at + 4].tobytes(), np.float32)[0]


def _signs(message: Bytes, block: np.void, origin: int = 0) -> Floats:
    positive = _bits(message, int(block["bits"]) - origin, block)
    return np.where(positive, np.float32(1), np.float32(-1))


def _decoded(message: Bytes, block: np.void, origin: int = 0) -> Floats:
    return _scale(message, block, origin) * _signs(message, block, origin)


def _tensor_part(address: np.uint64, block: np.void) -> Floats:
    """Returns the block's elements of the tensor at an address, as a view; zeros for address 0."""
    length = int(block["length"])
    if not address:
        return np.zeros(length, np.float32)
    first = int(address) + 4 * int(block["start"])
    return np.ctypeslib.as_array((ctypes.c_float * length).from_address(first))


def _decayed_gradient(tensor: np.void, block: np.void) -> Floats:
    """Returns the block's gradient plus the coupled weight decay."""
    gradient = _tensor_part(tensor["grad"], block)
    if tensor["weight_decay"] != 0:
        gradient = gradient + tensor["weight_decay"] * _tensor_part(tensor["param"], block)
    return gradient


def _lane_sum(parts: Floats, width: int = LANES) -> np.float32:
    """Returns the sum of parts: lane k of 32, say, adds parts k, k + 32, ...; then the lanes are folded by halves."""
    padded = np.zeros(-(-len(parts) // width) * width, np.float32)
    padded[: len(parts)] = parts
    lanes = np.zeros(width, np.float32)
    for row in padded.reshape(-1, width):
        lanes = lanes + row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return np.float32(lanes[0])


def _scale_to_send(c: Floats, masked: NDArray[np.bool_], scale: str) -> np.float32:
    count = len(c) - int(np.count_nonzero(masked))
    inverse = np.float32(1 / count) if count else _ZERO
    # c - c is +0.0, or NaN if c is not finite.
    if scale == "rms":
        return np.float32(np.sqrt(_lane_sum(np.where(masked, c - c, c * c)) * inverse))
    return np.float32(_lane_sum(np.where(masked, c - c, np.abs(c))) * inverse)


def _send(
    block: np.void,
    c: Floats,
    kept: Floats,
    masked: NDArray[np.bool_],
    scale: str,
    packed: Bytes,
    error_out: Floats,
) -> bool:
    """Writes signs and scale of c into ``packed``, and what was not sent into ``error_out``, which is ``kept`` for
    masked elements.
    """
    s = _scale_to_send(c, masked, scale)
    positive = c >= 0
    signs = np.packbits(positive | masked, bitorder="little")
    packed[int(block["bits"]) : int(block["bits"]) + len(signs)] = signs
    packed[int(block["scale"]) : int(block["scale"]) + 4] = np.frombuffer(np.float32(s).tobytes(), np.uint8)
    error_out[:] = np.where(masked, kept, c - np.where(positive, s, -s))
    return bool(np.isfinite(s))


def philox4x32(counters: NDArray[np.uint32], key: tuple[int, int], rounds: int = 7) -> NDArray[np.uint32]:
    """The counter-based generator of Salmon et al. (SC 2011): maps (n, 4) counters to (n, 4) random words."""
    words = [counters[:, i].astype(np.uint64) for i in range(4)]
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    for i in range(rounds):
        # The products are of two 32-bit numbers, so they fit.
        p0, p1 = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        keys = [np.uint64((k + i * w) & 0xFFFFFFFF) for k, w in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
        words = [(p1 >> half) ^ words[1] ^ keys[0], p1 & low, (p0 >> half) ^ words[3] ^ keys[1], p0 & low]
    return np.stack(words, axis=1).astype(np.uint32)


def uniform(noise: NDArray[np.void], index: int, count: int) -> Floats:
    """Returns the random numbers of elements index ... index + count - 1: multiples of 2^-24 in [0, 1); 1/2 if
    steady.
    """
    row = noise.reshape(-1)[0]
    if row["steady"]:
        return np.full(count, 0.5, np.float32)
    quads = np.arange(index // 4, (index + count + 3) // 4, dtype=np.uint64)
    counters = np.empty((quads.size, 4), np.uint32)
    counters[:, 0], counters[:, 1] = quads & np.uint64(0xFFFFFFFF), quads >> np.uint64(32)
    counters[:, 2], counters[:, 3] = row["step"], row["stream"]
    words = philox4x32(counters, (int(row["seed"]) & 0xFFFFFFFF, int(row["seed"]) >> 32)).reshape(-1)
    return (words[index % 4 :][:count] >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


def _moments(
    tensor: np.void, block: np.void, momentum: Floats, magnitude: Floats, amsgrad: bool
) -> tuple[Floats, Floats]:
    """Returns this step's m and b of a block."""
    gradient = _tensor_part(tensor["grad"], block)
    m = tensor["beta1"] * momentum + tensor["one_minus_beta1"] * gradient
    b = tensor["beta1"] * magnitude + tensor["one_minus_beta1"] * np.abs(gradient)
    return m, np.where(magnitude > b, magnitude, b) if amsgrad else b


def _quantize(block: np.void, y: Floats, noise: NDArray[np.void], packed: Bytes) -> Floats:
    """Writes random signs of y into ``packed``; returns what they lose of y."""
    positive = uniform(noise, int(block["index"]), y.size) < (y + np.float32(1)) * np.float32(0.5)
    signs = np.packbits(positive, bitorder="little")
    packed[int(block["bits"]) : int(block["bits"]) + signs.size] = signs
    return y - np.where(positive, np.float32(1), np.float32(-1))


def _send_codes(block: np.void, c: Floats, bits: int, packed: Bytes, error_out: Floats | None, at: slice) -> bool:
    """Writes codes and scales of c into ``packed``, and what they lose of c to ``error_out``. Returns whether they are
    finite.
    """
    first, length = int(block["bits"]), int(block["length"])
    if bits == 16:
        codes = _store(c, DType.BFLOAT16)
        packed[first : first + codes.size] = codes
        meant = _load(codes, DType.BFLOAT16)
        finite = bool(np.isfinite(meant).all())
    else:
        rows = np.zeros((-(-length // GROUP), GROUP), np.float32)
        rows.reshape(-1)[:length] = c
        levels, largest = np.float32(2 ** (bits - 1) - 1), np.abs(rows).max(axis=1)
        bad, silent = ~np.isfinite(largest), largest < np.float32(LEAST)
        scales = np.where(bad, np.float32(np.nan), np.where(silent, _ZERO, largest / levels))
        factors = np.where(bad | silent, _ZERO, levels / largest)
        numbers = np.where(bad[:, np.newaxis], _ZERO, np.rint(rows * factors[:, np.newaxis])).astype(np.int8)
        meant = (numbers.astype(np.float32) * scales[:, np.newaxis]).reshape(-1)[:length]
        codes = numbers.reshape(-1)[:length].view(np.uint8)
        if bits == 4:
            low, high = codes[::2] & 15, codes[1::2] << 4
            codes = low
            codes[: high.size] |= high
        packed[first : first + codes.size] = codes
        packed[int(block["scale"]) : int(block["scale"]) + 4 * scales.size] = scales.view(np.uint8)
        finite = not bad.any()
    if error_out is not None:
        error_out[at] = c - meant
    return finite


def _of_codes(message: Bytes, block: np.void, bits: int, origin: int = 0) -> Floats:
    """Returns what the codes of a block stand for."""
    first, length = int(block["bits"]) - origin, int(block["length"])
    codes = message[first : first + (length * bits + 7) // 8]
    if bits == 16:
        return _load(codes, DType.BFLOAT16)
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=1).reshape(-1)[:length]
        codes = (codes ^ 8) - np.uint8(8)
    at = int(block["scale"]) - origin
    scales = np.frombuffer(message[at : at + 4 * -(-length // GROUP)].tobytes(), np.float32)
    return codes.view(np.int8).astype(np.float32) * np.repeat(scales, GROUP)[:length]


_NUMPY_DTYPE = {
    DType.UINT8: np.uint8,
    DType.INT8: np.int8,
    DType.INT16: np.int16,
    DType.INT32: np.int32,
    DType.INT64: np.int64,
    DType.BOOL: np.bool_,
    DType.FLOAT16: np.float16,
    DType.BFLOAT16: np.uint16,
    DType.FLOAT32: np.float32,
    DType.FLOAT64: np.float64,
    DType.UINT16: np.uint16,
}

_COMBINE: dict[ReduceOp, Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]] = {
    ReduceOp.AVERAGE: np.add,
    ReduceOp.SUM: np.add,
    # Like np.minimum and np.maximum, but these do not define which of 0.0 and -0.0 they return: here the later rank's.
    ReduceOp.MIN: lambda a, b: np.where((a < b) | (a != a), a, b),
    ReduceOp.MAX: lambda a, b: np.where((a > b) | (a != a), a, b),
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BITWISE_OR: np.bitwise_or,
}


def reject_unsupported(dtype: DType, op: ReduceOp, prescale: float, postscale: float) -> None:
    if dtype == DType.BOOL:
        supported = op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
    elif op == ReduceOp.BITWISE_OR:
        supported = dtype == DType.UINT8
    else:
        supported = op in _COMBINE
    scalable = dtype != DType.BOOL and op != ReduceOp.BITWISE_OR
    if not supported or (not scalable and (prescale != 1 or postscale != 1)):
        raise TypeError(unsupported_reduction(dtype, op, prescale, postscale))


def unsupported_reduction(dtype: DType, op: ReduceOp, prescale: float, postscale: float) -> str:
    """Returns the message of the TypeError that all kernels raise."""
    scaled = "" if prescale == postscale == 1 else f" with prescale {prescale} and postscale {postscale}"
    return f"{ReduceOp(op).label} is not defined for {DType(dtype).label}{scaled}"


def _load(source: Bytes, dtype: DType) -> NDArray[Any]:
    elements: NDArray[Any] = np.frombuffer(source.tobytes(), np.dtype(_NUMPY_DTYPE[dtype]))
    if dtype == DType.BFLOAT16:
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == DType.FLOAT16:
        return elements.astype(np.float32)
    if dtype == DType.BOOL:
        return elements.view(np.uint8) != 0
    return elements


def _store(total: NDArray[Any], dtype: DType) -> Bytes:
    if dtype == DType.BFLOAT16:
        # Rounds half to even: adds just less than half a unit, and one more if the unit is odd.
        bits = total.view(np.uint32)
        nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
        total = np.where(np.isnan(total), quiet, nearest)
    return total.astype(_NUMPY_DTYPE[dtype]).view(np.uint8)


def _integer_mean(total: NDArray[Any], ranks: int, postscale: float, limits: np.iinfo[Any]) -> NDArray[Any]:
    """Returns ``postscale * total / ranks``, rounded towards zero; ``total`` is int64."""
    if postscale == 1:
        below = total // ranks
        return below + ((total < 0) & (below * ranks != total))
    return np.clip(_scaled(total, postscale / ranks), limits.min, limits.max)


def _scaled(elements: NDArray[Any], factor: float) -> NDArray[Any]:
    if factor == 1:
        return elements
    if elements.dtype.kind == "f":
        return elements * elements.dtype.type(factor)
    limits = np.iinfo(elements.dtype)
    exact = elements.astype(np.float64) * factor
    whole = np.trunc(exact)
    # A product that differs from a whole number by no more than rounding can explain is that number: the average of 49
    # ones, 49 * (1 / 49), is 1.
    missing = 1 - np.abs(exact - whole)
    up = (missing < 1) & (missing <= np.abs(exact) * 2.0**-51)
    whole = np.where(up, whole + np.sign(exact), whole)
    low, high = exact <= float(limits.min), exact >= float(limits.max)
    result = np.where(low | high | np.isnan(exact), 0, whole).astype(elements.dtype)
    result[low] = limits.min
    result[high] = limits.max
    return result


_STEP = np.uint64(0x9E3779B97F4A7C15)
#: Also the factor of the buffer's length in a checksum.
CHECKSUM_SPREAD = np.uint64(0xD6E8FEB86659FD93)


def sketch_keys(seeds: NDArray[np.int64], buffers: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the keys of the chunks that begin with elements ``first`` of ``buffers``."""
    key, chunks = _mixed(seeds.astype(np.uint64), buffers.astype(np.uint64)), first // SKETCHED
    return _mixed(key, chunks.astype(np.uint64)).view(np.int64)


def _sums_of_buckets(values: Floats, key: int) -> Floats:
    """Returns the sums of the buckets of one chunk."""
    rows = np.zeros((-(-values.size // 32), 32), np.float32)
    rows.reshape(-1)[: values.size] = values
    number, lanes = np.arange(len(rows), dtype=np.uint64), np.arange(32, dtype=np.uint64)
    hashes = _mixed(_mixed(np.array([key]).view(np.uint64), number), number)[:, None]
    is_negative = hashes >> (np.uint64(32) + lanes) & np.uint64(1) > 0
    sums = np.zeros(SKETCH + 32, np.float32)
    with np.errstate(all="ignore"):
        np.add.at(sums, hashes % np.uint64(SKETCH) + lanes, np.where(is_negative, -rows, rows))
        sums[:32] += sums[SKETCH:]
    return sums[:SKETCH]


def _mixed(words: NDArray[np.uint64], position: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = words + (position + np.uint64(1)) * _STEP
    return (x ^ (x >> np.uint64(32))) * CHECKSUM_SPREAD
