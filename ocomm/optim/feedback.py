"""What compression has lost on one rank, which is added to the values of the next exchange (error feedback)."""

from __future__ import annotations

import numpy as np

from ocomm.compression.layout import Layout
from ocomm.kernels.base import Memory


class Errors:
    """The errors of rank ``rank`` as a worker and as a server, each with a second buffer that is being written.

    There are no elements before ``allocate``, and after ``release``.
    """

    def __init__(self, layout: Layout, rank: int, memory: Memory) -> None:
        self._layout = layout
        self._rank = rank
        self._memory = memory
        self.is_allocated = False
        self.release()

    def allocate(self) -> None:
        """Allocates buffers of zeros, if there are none."""
        if not self.is_allocated:
            mine, owned = self._layout.worker_numel(self._rank), self._layout.owned_numel(self._rank)
            self.worker, self.worker_out = (self._memory.zeros(mine) for _ in range(2))
            self.server, self.server_out = (self._memory.zeros(owned) for _ in range(2))
            self.is_allocated = True

    def release(self) -> None:
        """Frees the buffers: what they hold is dropped."""
        none = np.zeros(0, np.float32)
        self.is_allocated = False
        self.worker, self.worker_out = none, none
        self.server, self.server_out = none, none

    def swap(self) -> None:
        """Makes the errors that the exchange has written the current ones."""
        self.worker, self.worker_out = self.worker_out, self.worker
        self.server, self.server_out = self.server_out, self.server

    def keep(self, tensor: int) -> None:
        """Copies the errors of a tensor that has not traveled over what the exchange has written."""
        span, owned = self._layout.local_span(tensor, self._rank), self._layout.owned_span(tensor, self._rank)
        self.worker_out[span] = self.worker[span]
        self.server_out[owned] = self.server[owned]

    def reset(self, tensor: int) -> None:
        """Zeroes all errors of a tensor."""
        for array in (self.worker, self.worker_out):
            array[self._layout.local_span(tensor, self._rank)] = 0.0
        for array in (self.server, self.server_out):
            array[self._layout.owned_span(tensor, self._rank)] = 0.0

    def reset_all(self) -> None:
        """Zeroes all errors. Pages that were never written still take no memory."""
        for buffer in (self.worker, self.worker_out, self.server, self.server_out):
            if self._memory.is_device or buffer.any():
                buffer[:] = 0.0

    @property
    def worker_nbytes(self) -> int:
        """The bytes held for the worker's errors."""
        return self.worker.nbytes + self.worker_out.nbytes

    @property
    def server_nbytes(self) -> int:
        """The bytes held for the server's errors."""
        return self.server.nbytes + self.server_out.nbytes

    @property
    def nbytes(self) -> int:
        """The bytes held."""
        return self.worker_nbytes + self.server_nbytes
