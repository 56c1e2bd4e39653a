"""Sharded dense steps (ZeRO-1, arXiv 1910.02054): the owner of a block makes Adam's step of it, for all ranks.

A rank keeps m and v of the blocks that it owns, and gets their averages alone. After the vote it makes the step of
these blocks, and sends the new parameters to the others (``optim.flows.ShardedFlow``). An element's step depends on
nothing but the element, so parameters have the bits of the same steps of whole tensors (``optim.adam``).

docs/decisions/0017-sharded-dense-steps.md says why, and what becomes of m and v at the freeze.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocomm.compression.layout import Layout, all_blocks
from ocomm.kernels.base import Bytes, Floats, Kernels
from ocomm.optim.adam import BlockAdam

#: The names of m and v of the blocks that a rank owns, in a rank state.
MOMENTS = ("momentum", "variance")
_NONE = np.zeros(0, np.float32)


class ShardedAdam:
    """m, v and averaged gradients of the blocks of ``layout`` that ``rank`` owns, in the host's memory.

    A tensor has m and v from its first step, or ``adopt``, until ``release``. All three lie by the ``owned`` of blocks.
    """

    def __init__(self, layout: Layout, rank: int, kernels: Kernels) -> None:
        assert not kernels.memory.is_device
        self._layout = layout
        self._rank = rank
        self._kernels = kernels
        self._numel = layout.owned_numel(rank)
        self.momentum = self.variance = self.average = _NONE
        blocks = all_blocks(layout, rank)
        self._adam = BlockAdam(blocks[blocks["owned"] >= 0], len(layout.tensors), kernels)
        #: Number of steps of each tensor that has m and v; 0 for the others.
        self.steps = self._adam.steps
        #: True between ``load_state`` and ``load``: m and v of a saved run are still to come.
        self.is_due = False

    # Averages

    def begin(self) -> None:
        """Allocates the averages, once."""
        if not self.average.size:
            self.average = self._kernels.memory.zeros(self._numel)

    def end(self) -> None:
        """Frees the averages."""
        self.average = _NONE

    def averages(self, owned: int, numel: int) -> Bytes:
        """Returns the bytes of ``numel`` averages from place ``owned`` on."""
        return self.average[owned : owned + numel].view(np.uint8)

    def squares(self, tensors: Sequence[int]) -> list[float]:
        """Returns the sum of squares, in float64, of this rank's averages of each of ``tensors``. It is finite if all
        of them are.
        """
        spans = [self._layout.owned_span(tensor, self._rank) for tensor in tensors]
        numels = np.array([span.stop - span.start for span in spans], np.int64)
        first = np.array([span.start for span in spans], np.uint64)
        addresses = np.where(numels > 0, np.uint64(self.average.ctypes.data) + np.uint64(4) * first, 0)
        return self._kernels.squares(addresses.astype(np.uint64), numels).tolist()

    # Steps

    def update(self, tensors: Sequence[int], groups: Iterable[Any], params: NDArray[np.uint64], factor: float) -> None:
        """Makes Adam's step of this rank's blocks of ``tensors``, in place, on the averages times ``factor``.

        ``groups`` are the ``core.Group`` of all tensors, ``params`` the addresses of all parameters.
        """
        self._allocate()
        chosen = np.zeros(self.steps.size, np.bool_)
        chosen[tensors] = True
        self._adam.update(chosen, groups, params, self.average, self.momentum, self.variance, factor)

    def _pieces(self, tensor: int) -> Iterable[tuple[int, int, int]]:
        """Yields (first element in the tensor, place in the buffers, number of elements) of what this rank owns."""
        blocks = self._layout.tensor_blocks(tensor)
        mine = blocks[blocks["owner"] == self._rank]
        yield from zip(*(mine[name].tolist() for name in ("start", "owned", "length")), strict=True)

    # m and v

    def _allocate(self) -> None:
        if not self.momentum.size:
            self.momentum, self.variance = (self._kernels.memory.zeros(self._numel) for _ in range(2))

    def adopt(self, tensor: int, momentum: Floats, variance: Floats, step: int) -> None:
        """Copies this rank's blocks of whole m and v, those of a tensor after ``step`` steps."""
        self._allocate()
        self.steps[tensor] = step
        for start, owned, numel in self._pieces(tensor):
            self.momentum[owned : owned + numel] = momentum[start : start + numel]
            self.variance[owned : owned + numel] = variance[start : start + numel]

    def own(self, tensor: int, buffer: Floats) -> Floats:
        """Returns this rank's elements of a tensor in ``buffer``, m or v, as a view."""
        return buffer[self._layout.owned_span(tensor, self._rank)]

    def spread(self, tensor: int, buffer: Floats) -> Floats:
        """Returns a new array of a whole tensor with this rank's elements in ``buffer``, m or v; all others are 0."""
        whole = self._kernels.memory.zeros(int(self._layout.numels[tensor]))
        for start, owned, numel in self._pieces(tensor):
            whole[start : start + numel] = buffer[owned : owned + numel]
        return whole

    def release(self, tensor: int) -> None:
        """Drops m and v of a tensor; their memory is freed when no tensor has any."""
        self.steps[tensor] = 0
        if not self.steps.any():
            self.momentum = self.variance = _NONE
            return
        for buffer in (self.momentum, self.variance):
            self.own(tensor, buffer)[:] = 0.0

    # State

    def state(self) -> dict[str, int]:
        """Returns the number of steps of each tensor that has m and v, by name: the same on all ranks."""
        names = [spec.name for spec in self._layout.tensors]
        return {names[tensor]: int(self.steps[tensor]) for tensor in np.flatnonzero(self.steps).tolist()}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Loads the result of ``state``. If a tensor has m and v, these are due: ``load`` must come before a step."""
        self.momentum = self.variance = _NONE
        self.steps[:] = [state.get(spec.name, 0) for spec in self._layout.tensors]
        self.is_due = bool(self.steps.any())

    def buffers(self) -> dict[str, Floats]:
        """Returns m and v, by their names in rank states; without elements if there are none."""
        return dict(zip(MOMENTS, (self.momentum, self.variance), strict=True))

    def load(self, momentum: Floats, variance: Floats) -> None:
        """Loads saved m and v of the blocks that this rank owns."""
        if self.is_due:
            self._allocate()
            self.momentum[:], self.variance[:] = momentum, variance
        self.is_due = False

    @property
    def nbytes(self) -> int:
        """The bytes of m and v."""
        return self.momentum.nbytes + self.variance.nbytes
