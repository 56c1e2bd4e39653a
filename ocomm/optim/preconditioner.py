"""The denominator of 1-bit Adam and 0/1 Adam, sqrt(v_hat) with a floor, and the mask of elements without a variance.

An element with v == 0 has had no gradient. One bit has no zero, so the element is masked on all ranks, until some rank
has a gradient for it: then it is woken (docs/algorithms.md, Mask). v is replicated, so floor and first mask need no
communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ocomm.compression.layout import Layout
from ocomm.errors import NonFiniteError, SettingsError
from ocomm.kernels.base import HOST, Bytes, Floats, Memory
from ocomm.optim.core import flat_floats
from ocomm.optim.dense_codes import DenseOptions
from ocomm.optim.options import option


@dataclass(frozen=True, kw_only=True)
class PreconditionerOptions(DenseOptions):
    """The options that 1-bit Adam, 1-bit LAMB and 0/1 Adam share. Raises SettingsError for impossible values."""

    scale: Literal["l1", "rms"] = option(
        "rms",
        """The scale of a block on the wire: the mean of its absolute values (``"l1"``), or the root of its mean square
        (``"rms"``).""",
    )
    variance_floor: float = option(
        0.05,
        """The least sqrt(v) of an element, as a fraction, in [0, 1], of its block's mean. 0: no floor.""",
    )
    mask_refresh: int = option(
        100,
        """The number of compressed exchanges after which the ranks look for elements that had no gradient when v was
        computed, and have one now.""",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale not in ("l1", "rms"):
            raise SettingsError(f"scale must be 'l1' or 'rms', got {self.scale!r}")
        if not 0.0 <= self.variance_floor <= 1.0:
            raise SettingsError(f"variance_floor must be in [0, 1], got {self.variance_floor}")
        if self.mask_refresh < 1:
            raise SettingsError(f"mask_refresh must be a positive number of steps, got {self.mask_refresh}")


class Preconditioner:
    """Denominators and masks of all tensors. ``variance_floor`` is f, in [0, 1]: no sqrt(v_hat) is below f times its
    block's mean.
    """

    def __init__(self, layout: Layout, variance_floor: float, memory: Memory = HOST) -> None:
        self.layout = layout
        self.param_memory = memory
        self.variance_floor = variance_floor
        count = len(layout.tensors)
        #: Number of masked elements per tensor, and of all elements that have been woken.
        self.masked = np.zeros(count, np.int64)
        self.woken = 0
        self._with_masked: set[int] = set()  # the tensors that have any
        self.eps = np.zeros(count, np.float32)
        #: What a step is divided by, flat.
        self.denominator = np.zeros(0, np.float32)
        #: Mean of sqrt(v_hat) of each block, which a woken element gets.
        self.block_root = np.zeros(0, np.float32)
        #: One bit per flat element, for the host and for kernels.
        self.mask = np.zeros(0, np.uint8)
        self._allocated = False

    def _allocate(self) -> None:
        if not self._allocated:
            self.denominator = self.param_memory.zeros(self.layout.flat_numel)
            self.block_root = np.zeros(self.layout.blocks.size, np.float32)
            self.mask = self.param_memory.staging(self.layout.flat_numel // 8)
            self.mask[:] = 0
            self.param_memory.changed(self.mask)
            self._allocated = True

    def set_variance(self, tensor: int, variance: Floats, correction: float, eps: float, *, when: str) -> bool:
        """Sets v of ``tensor``, ``numel`` float32: v_hat = v / float32(correction).

        Returns False, and changes nothing, if all of v is 0. Raises NonFiniteError (on all ranks, because v is
        replicated) if v has NaN or Inf; ``when`` names the step in the message.

        Rounding, each line one float32 operation per element: v_hat = v / float32(correction); root = sqrt(v_hat);
        floor = float32(f) * mean; max(root, floor) + float32(eps). The mean is over a block's unmasked elements, summed
        in float64 by folding halves (``fold``), and rounded to float32 after the division.
        """
        spec = self.layout.tensors[tensor]
        variance = self.param_memory.host(flat_floats(variance, spec.numel, f"variance of {spec.name!r}"))
        masked = variance == 0.0
        if spec.numel and masked.all():
            return False
        if not np.isfinite(variance).all():
            raise NonFiniteError(
                f"tensor {spec.name!r}: Adam's variance is NaN or Inf after {when}, so it cannot be frozen; "
                "gradients above about 1e19, whose squares overflow float32, make it so: clip with max_grad_norm= from "
                "the first step on"
            )
        self._allocate()
        root = np.sqrt(variance / np.float32(correction))
        means = self._block_means(tensor, root, masked)
        floor = np.repeat(np.float32(self.variance_floor) * means, self.layout.tensor_blocks(tensor)["length"])
        self._set_mask(tensor, np.packbits(masked, bitorder="little"))
        self.eps[tensor] = eps
        self.denominator[self.layout.flat_span(tensor)] = np.maximum(root, floor) + np.float32(eps)
        self.block_root[self._block_span(tensor)] = means
        return True

    def _set_mask(self, tensor: int, mask: Bytes) -> None:
        span = self._mask_span(tensor)
        self.mask[span] = mask
        self.param_memory.changed(self.mask[span])
        self._count_masked(tensor, int(np.unpackbits(mask).sum()))

    def _count_masked(self, tensor: int, count: int) -> None:
        self.masked[tensor] = count
        if count:
            self._with_masked.add(tensor)
        else:
            self._with_masked.discard(tensor)

    def _block_means(self, tensor: int, root: Floats, masked: NDArray[np.bool_]) -> Floats:
        """Returns the mean of ``root`` over each block's unmasked elements, or the tensor's for a block without any;
        float32.
        """
        blocks = self.layout.tensor_blocks(tensor)
        if not blocks.size:
            return np.zeros(0, np.float32)
        width = int(blocks["length"].max())
        sums = np.zeros(blocks.size)
        # Some blocks at a time, because a whole embedding would be large in float64.
        for first in range(0, blocks.size, 1024):
            part = root[first * width : (first + 1024) * width]
            table = np.zeros((min(1024, blocks.size - first), width))
            # The last block is short; zeros do not change its sum. Masked elements have root 0 already.
            table.reshape(-1)[: part.size] = part
            sums[first : first + 1024] = fold(table)
        counts = np.add.reduceat(~masked, blocks["start"], dtype=np.int64)
        whole = fold(sums[np.newaxis])[0] / counts.sum()
        return np.where(counts > 0, sums / np.maximum(counts, 1), whole).astype(np.float32)

    def _mask_span(self, tensor: int) -> slice:
        start = int(self.layout.offsets[tensor]) // 8
        return slice(start, start + (int(self.layout.numels[tensor]) + 7) // 8)

    def _block_span(self, tensor: int) -> slice:
        return slice(int(self.layout.first_block[tensor]), int(self.layout.first_block[tensor + 1]))

    def roots(self, tensor: int) -> Floats:
        """Returns, for each element of a tensor, the mean of sqrt(v_hat) of its block: a new array."""
        return np.repeat(self.block_root[self._block_span(tensor)], self.layout.tensor_blocks(tensor)["length"])

    def floors(self, blocks: NDArray[np.int64]) -> Floats:
        """Returns the floor of sqrt(v_hat) for each of these blocks of the layout: a new array."""
        return np.float32(self.variance_floor) * self.block_root[blocks]

    # Masked elements

    def mask_of(self, tensors: Iterable[int]) -> Bytes | None:
        """Returns the mask, or None if no element of ``tensors`` is masked."""
        return None if self._with_masked.isdisjoint(tensors) else self.mask

    def unmask(self) -> None:
        """Forgets which elements are masked, before a state is loaded."""
        self.masked[:] = 0
        self._with_masked.clear()

    def masked_elements(self, tensor: int) -> NDArray[np.bool_]:
        """Returns one bool per element of a tensor: whether it is masked."""
        count = int(self.layout.numels[tensor])
        return np.unpackbits(self.mask[self._mask_span(tensor)], count=count, bitorder="little").view(np.bool_)

    def touched(self, error: Floats, rank: int) -> Bytes:
        """Returns one bit per flat element: it is masked, and gradients have left something in ``error``, the worker
        error of ``rank``.
        """
        bits = np.zeros(self.mask.size, np.uint8)
        error = self.param_memory.host(error)
        for tensor in np.flatnonzero(self.masked).tolist():
            nonzero = np.packbits(self.layout.from_worker(tensor, rank, error != 0.0), bitorder="little")
            span = self._mask_span(tensor)
            bits[span] = nonzero & self.mask[span]
        return bits

    def touched_tensors(self, touched: Bytes) -> list[int]:
        """Returns the tensors in which ``wake(touched)`` would wake an element."""
        masked = np.flatnonzero(self.masked).tolist()
        return [t for t in masked if (touched[self._mask_span(t)] & self.mask[self._mask_span(t)]).any()]

    def wake(self, touched: Bytes) -> int:
        """Unmasks the elements of ``touched``, the OR over all ranks. Returns their number.

        Their sqrt(v_hat) becomes the mean over those elements of their block that had one; of their tensor if the block
        had none.
        """
        woken = 0
        for tensor in self.touched_tensors(touched):
            span = self._mask_span(tensor)
            bits = touched[span] & self.mask[span]
            self.mask[span] &= ~bits
            self.param_memory.changed(self.mask[span])
            start = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            block = np.searchsorted(self.layout.tensor_blocks(tensor)["start"], start, side="right") - 1
            root = self.block_root[self._block_span(tensor)][block]
            denominator = self.param_memory.host(self.denominator[self.layout.flat_span(tensor)])
            denominator[start] = root + self.eps[tensor]
            if self.param_memory.is_device:
                self.denominator[self.layout.flat_span(tensor)] = denominator
            self._count_masked(tensor, int(self.masked[tensor]) - start.size)
            woken += start.size
        self.woken += woken
        return woken

    # State

    def variance(self, tensor: int, correction: float) -> Floats:
        """Returns v for a checkpoint: v_hat * correction, a new float32 array, 0 for masked elements.

        v_hat is computed from the denominator, so it includes the floor, and a rounding. That is good enough for a
        plain Adam that continues. ``tensor_state`` has what a bit-identical continuation needs.
        """
        root = self.param_memory.host(self.denominator[self.layout.flat_span(tensor)]) - self.eps[tensor]
        root[self.masked_elements(tensor)] = 0.0
        return root * root * np.float32(correction)

    def tensor_state(self, tensor: int) -> dict[str, Any]:
        """Returns the state of one tensor, with copies of arrays: ``eps``, ``denominator`` (float32, numel), ``mask``
        (uint8 bits), ``block_root`` (float32, blocks).
        """
        return {
            "eps": float(self.eps[tensor]),
            "denominator": np.array(self.param_memory.host(self.denominator[self.layout.flat_span(tensor)])),
            "mask": self.mask[self._mask_span(tensor)].copy(),
            "block_root": self.block_root[self._block_span(tensor)].copy(),
        }

    def load_tensor_state(self, tensor: int, state: Mapping[str, Any]) -> None:
        """Loads the result of ``tensor_state``. Raises ValueError if the number of elements differs.

        If the state was saved with another block size, the roots of woken elements are means computed from the
        denominator.
        """
        spec = self.layout.tensors[tensor]
        denominator = flat_floats(state["denominator"], spec.numel, f"denominator of {spec.name!r}")
        self._allocate()
        self._set_mask(tensor, np.asarray(state["mask"], np.uint8))
        self.eps[tensor] = float(state["eps"])
        self.denominator[self.layout.flat_span(tensor)] = denominator
        roots = np.asarray(state["block_root"], np.float32)
        if roots.size != self.layout.tensor_blocks(tensor).size:
            masked = self.masked_elements(tensor)
            roots = self._block_means(tensor, np.where(masked, np.float32(0), denominator - self.eps[tensor]), masked)
        self.block_root[self._block_span(tensor)] = roots

    def memory(self) -> dict[str, int]:
        """Returns the bytes held, by buffer."""
        return {"denominator": self.denominator.nbytes, "mask": self.mask.nbytes}


def fold(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the sum of each row in float64: the second half is added to the first, and so on until one element is
    left.

    The order is explicit, so that ranks with different processors get the same bits.
    """
    while table.shape[1] > 1:
        width = table.shape[1]
        half = (width + 1) // 2
        folded = table[:, :half].copy()
        folded[:, : width - half] += table[:, half:]
        table = folded
    return table[:, 0]
