"""Detects that a parameter is written after an exchange has read it: a coupled weight decay is added to gradients when
they are compressed, which may be before ``step()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ocomm.kernels.base import NOTHING


class DecayedParameters:
    """Owns what is known of the parameters that the exchange of the current step has read.

    Args:
        tensors: The parameters, by index.
        checksums: ``checksums(indices, part)`` returns the checksums of the memory that the exchange reads.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], checksums: Callable[[list[int], int], NDArray[np.uint64]]
    ) -> None:
        self._tensors = tensors
        self._checksums = checksums
        #: By index of what was read, the version of the parameter, and its checksum, 0 if none was made.
        self.noted: dict[int, tuple[int, int]] = {}
        self._part = NOTHING
        #: True if a parameter was read twice, with a write between.
        self._has_changed = False

    def read(self, indices: list[int], part: int) -> None:
        """Notes that an exchange reads parameters now. ``part`` is the part of each that is looked at, as in
        ``Kernels.checksum``.
        """
        self._part = part
        for index, now in self._look(indices).items():
            self._has_changed |= self.noted.setdefault(index, now) != now

    def have_changed(self) -> bool:
        """Returns True if a parameter is another one than when it was read."""
        return self._has_changed or self._look(list(self.noted)) != self.noted

    def forget(self) -> None:
        """Ends the step."""
        self.noted.clear()
        self._has_changed = False

    def _look(self, indices: list[int]) -> dict[int, tuple[int, int]]:
        sums = [0] * len(indices) if self._part == NOTHING else self._checksums(indices, self._part).tolist()
        versions = [self._tensors[index]._version for index in indices]
        return dict(zip(indices, zip(versions, sums, strict=True), strict=True))
