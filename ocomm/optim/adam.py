"""Adam on flat float32 arrays, with the same bits in every framework.

Used for the dense steps of frontends whose own Adam differs from Torch's, and for those of all ranks if the job has
several frameworks, because Torch's own kernels round differently.

    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g^2
    p = p * (1 - lr * wd) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Every operation is rounded to float32, in the order of ``torch.optim.Adam``; ``g`` contains a coupled decay already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ocomm.compression.layout import Layout, all_blocks
from ocomm.kernels.base import TENSOR, Floats, Kernels, Table, aligned_zeros


@dataclass(slots=True)
class DenseAdam:
    """The moments m and v of one tensor, which are changed in place, and its step count."""

    momentum: Floats
    variance: Floats
    step: int = 0

    @classmethod
    def fresh(cls, numel: int) -> DenseAdam:
        """Returns the state before the first step of a tensor of ``numel`` elements."""
        return cls(aligned_zeros(numel), aligned_zeros(numel))

    def update(
        self, param: Floats, grad: Floats, *, lr: float, betas: tuple[float, float], eps: float, decay: float
    ) -> None:
        """Makes one step of ``param``, in place. ``decay`` is the decoupled weight decay; ``grad`` is not changed."""
        self.step += 1
        beta1, beta2 = betas
        if decay:
            param *= np.float32(1 - lr * decay)
        self.momentum += np.float32(1 - beta1) * (grad - self.momentum)
        self.variance *= np.float32(beta2)
        self.variance += np.float32(1 - beta2) * grad * grad
        root = np.sqrt(self.variance)
        root /= np.float32(math.sqrt(1 - beta2**self.step))
        root += np.float32(eps)
        param -= np.float32(lr / (1 - beta1**self.step)) * (self.momentum / root)


#: Number of sets of tensors whose tables are kept.
_REMEMBERED = 64


class DeviceAdam:
    """``DenseAdam`` for the tensors of ``layout`` on a device: all tensors at one step of one group are updated at
    once.

    A tensor has m and v from its first step, or ``adopt``, until ``release``.
    """

    def __init__(self, layout: Layout, rank: int, kernels: Kernels) -> None:
        self._layout = layout
        self._kernels = kernels
        self._momentum, self._variance = (kernels.memory.zeros(layout.flat_numel) for _ in range(2))
        self._steps = np.zeros(len(layout.tensors), np.int64)
        self._has = np.zeros(len(layout.tensors), np.bool_)
        self._blocks = all_blocks(layout, rank)
        self._blocks_of: dict[tuple[int, ...], Table] = {}
        self._table = np.zeros(len(layout.tensors), TENSOR)

    def moments(self, tensor: int) -> tuple[Floats, Floats, int] | None:
        """Returns m, v and step count of a tensor; None if it has none."""
        if not self._has[tensor]:
            return None
        first = int(self._layout.offsets[tensor])
        span = slice(first, first + int(self._layout.numels[tensor]))
        return self._momentum[span], self._variance[span], int(self._steps[tensor])

    def adopt(self, tensor: int, momentum: Floats, variance: Floats, step: int) -> None:
        """Copies m and v, from the host or the device, as those of a tensor after ``step`` steps."""
        self._has[tensor] = True
        found = self.moments(tensor)
        assert found is not None
        found[0][:], found[1][:] = momentum, variance
        self._steps[tensor] = step

    def release(self, tensor: int) -> bool:
        """Frees m and v of a tensor. Returns True if no other tensor has any."""
        self._has[tensor] = False
        return not self._has.any()

    def update(
        self, tensors: Sequence[int], averages: Floats, params: Any, groups: Iterable[Any], factor: float
    ) -> None:
        """Queues one step of ``tensors`` on the flat ``averages`` times ``factor``, and overwrites ``averages``.

        ``params`` are the addresses of the parameters, ``groups`` the ``training.driver.Group`` of all tensors.
        """
        chosen = np.zeros(self._has.size, np.bool_)
        chosen[tensors] = True
        self._has |= chosen
        self._steps += chosen
        self._table["param"] = params
        for group in groups:
            (beta1, beta2), mine = group.betas, group.tensors[chosen[group.tensors]]
            for step in np.unique(self._steps[mine]).tolist():
                now = mine[self._steps[mine] == step]
                self._table["step_size"][now] = group.lr / (1 - beta1**step)
                self._table["decay"][now] = 1 - group.lr * group.decoupled_decay
                moments = averages, self._momentum, self._variance
                root = math.sqrt(1 - beta2**step)
                self._kernels.adam_ratio(
                    self._rows(now), *moments, factor, 1 - beta1, beta2, 1 - beta2, root, group.eps
                )
        self._kernels.descend(self._rows(np.flatnonzero(chosen)), self._table, averages)

    def _rows(self, tensors: Any) -> Table:
        """Returns the blocks of ``tensors``. Each call returns the same object, since devices have copies of it."""
        key = tuple(tensors.tolist())
        if key not in self._blocks_of:
            if len(self._blocks_of) == _REMEMBERED:
                self._blocks_of.clear()
            self._blocks_of[key] = self._blocks[np.isin(self._blocks["tensor"], tensors)]
        return self._blocks_of[key]
