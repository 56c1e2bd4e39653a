"""Adam on float32 arrays, with the same bits in every framework, on the host and on devices (``Kernels.adam_step``).

Used for the dense steps of frontends whose own Adam differs from Torch's, for those of all ranks if the job has several
frameworks, because Torch's own kernels round differently, and for those of shards.

    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g^2
    p = p * (1 - lr * wd) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Every operation is rounded to float32, in the order of ``torch.optim.Adam``; ``g`` contains a coupled decay already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocomm.compression.layout import Layout, all_blocks
from ocomm.kernels.base import BLOCK, TENSOR, Floats, Kernels, Table, aligned_zeros

#: Number of sets of tensors whose tables are kept.
_REMEMBERED = 64
#: Number of elements of a block of a whole tensor: threads of the kernels take blocks in turn.
_BLOCK_NUMEL = 1 << 15


@dataclass(slots=True)
class DenseAdam:
    """The moments m and v of one tensor in the host's memory, which are changed in place, and its step count."""

    momentum: Floats
    variance: Floats
    step: int = 0

    @classmethod
    def fresh(cls, numel: int) -> DenseAdam:
        """Returns the state before the first step of a tensor of ``numel`` elements."""
        return cls(aligned_zeros(numel), aligned_zeros(numel))

    def update(self, kernels: Kernels, param: Floats, grad: Floats, group: Any) -> None:
        """Makes one step of ``param``, in place, by the host's ``kernels``. ``grad`` is not changed. All arrays are
        contiguous.

        ``group`` is the ``core.Group`` of the tensor, whose ``tensors`` are not read.
        """
        self.step += 1
        table = np.zeros(1, TENSOR)
        table["param"] = param.__array_interface__["data"][0]
        _set(table, 0, group, self.step)
        moments = self.momentum, self.variance
        kernels.adam_step(_whole(param.size), table, grad, *moments, *_factors(group, self.step, 1.0))


@lru_cache(maxsize=1024)
def _whole(numel: int) -> Table:
    """Returns the BLOCK table of one tensor, whose elements are at their own places."""
    starts = np.arange(0, numel, _BLOCK_NUMEL)
    blocks = np.zeros(starts.size, BLOCK)
    blocks["start"] = blocks["owned"] = starts
    blocks["length"] = np.minimum(_BLOCK_NUMEL, numel - starts)
    blocks.flags.writeable = False
    return blocks


def _set(table: Table, rows: Any, group: Any, step: int) -> None:
    """Sets what ``adam_step`` reads of a tensor."""
    table["weight_decay"][rows] = group.coupled_decay
    table["decay"][rows] = 1 - group.lr * group.decoupled_decay
    table["step_size"][rows] = group.lr / (1 - group.betas[0] ** step)


def _factors(group: Any, step: int, scale: float) -> tuple[float, ...]:
    """Returns the numbers that ``adam_step`` has for all tensors."""
    beta1, beta2 = group.betas
    return scale, 1 - beta1, beta2, 1 - beta2, math.sqrt(1 - beta2**step), group.eps


class BlockAdam:
    """Adam's step of the tensors of ``blocks``, whose gradients, m and v are indexed by ``owned``."""

    def __init__(self, blocks: Table, count: int, kernels: Kernels) -> None:
        self._blocks = blocks
        self._kernels = kernels
        #: Number of steps of each tensor.
        self.steps = np.zeros(count, np.int64)
        self._blocks_of: dict[tuple[int, ...], Table] = {}
        self._table = np.zeros(count, TENSOR)

    def update(
        self,
        chosen: NDArray[np.bool_],
        groups: Iterable[Any],
        params: NDArray[np.uint64],
        gradients: Floats,
        momentum: Floats,
        variance: Floats,
        factor: float,
    ) -> None:
        """Makes the next step of the ``chosen`` tensors, one bool each, on ``gradients`` times ``factor``: all tensors
        at one step of one group at once. On a device the step is queued.

        Args:
            chosen: Which tensors.
            groups: The ``core.Group`` of all tensors.
            params: The addresses of all parameters, which are changed in place.
            gradients: Averaged gradients, float32.
            momentum: m, float32, changed in place.
            variance: v, float32, changed in place.
            factor: What gradients are multiplied by.
        """
        self.steps += chosen
        self._table["param"] = params
        for group in groups:
            mine = group.tensors[chosen[group.tensors]]
            for step in np.unique(self.steps[mine]).tolist():
                now = mine[self.steps[mine] == step]
                _set(self._table, now, group, step)
                moments = momentum, variance
                self._kernels.adam_step(
                    self._rows(now), self._table, gradients, *moments, *_factors(group, step, factor)
                )

    def _rows(self, tensors: NDArray[np.int64]) -> Table:
        """Returns the blocks of ``tensors``. Each call returns the same object, since devices have copies of it."""
        key = tuple(tensors.tolist())
        if key not in self._blocks_of:
            if len(self._blocks_of) == _REMEMBERED:
                self._blocks_of.clear()
            self._blocks_of[key] = self._blocks[np.isin(self._blocks["tensor"], tensors)]
        return self._blocks_of[key]


class FlatAdam:
    """``DenseAdam`` for the tensors of ``layout`` in the memory of ``kernels``: one call updates all tensors of a group
    that are at the same step.

    A tensor has m and v from its first step, or ``adopt``, until ``release``.
    """

    def __init__(self, layout: Layout, rank: int, kernels: Kernels) -> None:
        self._layout = layout
        self._momentum, self._variance = (kernels.memory.zeros(layout.flat_numel) for _ in range(2))
        self._has = np.zeros(len(layout.tensors), np.bool_)
        blocks = all_blocks(layout, rank).copy()
        blocks["owned"] = blocks["offset"]  # all arrays are flat
        self._adam = BlockAdam(blocks, self._has.size, kernels)

    def moments(self, tensor: int) -> tuple[Floats, Floats, int] | None:
        """Returns m, v and step count of a tensor; None if it has none."""
        if not self._has[tensor]:
            return None
        first = int(self._layout.offsets[tensor])
        span = slice(first, first + int(self._layout.numels[tensor]))
        return self._momentum[span], self._variance[span], int(self._adam.steps[tensor])

    def adopt(self, tensor: int, momentum: Floats, variance: Floats, step: int) -> None:
        """Copies m and v, from the host or a device, as those of a tensor after ``step`` steps."""
        found = self.advance(tensor)
        found[0][:], found[1][:] = momentum, variance
        self._adam.steps[tensor] = step

    def advance(self, tensor: int) -> tuple[Floats, Floats, int]:
        """Counts a step of a tensor. Returns its m and v, which begin as zeros, and the number of that step."""
        self._start([tensor])
        self._adam.steps[tensor] += 1
        found = self.moments(tensor)
        assert found is not None
        return found

    def _start(self, tensors: Iterable[int]) -> None:
        """Gives m and v of zeros to those of ``tensors`` that have none."""
        for tensor in tensors:
            if self._has[tensor]:
                continue
            self._has[tensor] = True
            if self._adam.steps[tensor]:  # of a state that was released, whose m may have been in use until now
                self._adam.steps[tensor] = 0
                for buffer in (self._momentum, self._variance):
                    buffer[self._layout.flat_span(tensor)] = 0

    def release(self, tensor: int) -> bool:
        """Frees m and v of a tensor. Returns True if no other tensor has any."""
        self._has[tensor] = False
        return not self._has.any()

    def update(
        self, tensors: Sequence[int], averages: Floats, params: Any, groups: Iterable[Any], factor: float
    ) -> None:
        """Makes one step of ``tensors`` on the flat ``averages`` times ``factor``; on a device it is queued.

        ``params`` are the addresses of the parameters, ``groups`` the ``training.driver.Group`` of all tensors.
        """
        self._start(tensors)
        chosen = np.zeros(self._has.size, np.bool_)
        chosen[tensors] = True
        self._adam.update(chosen, groups, params, averages, self._momentum, self._variance, factor)
