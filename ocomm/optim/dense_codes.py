"""Dense exchanges in 16, 8 or 4 bits: gradients go to the owners of blocks as codes, and come back averaged.

It is a compressed exchange with another wire format. With 8 and 4 bits what rounding loses is kept as errors of worker
and server, apart from those of the 1-bit exchange, and is added in the next dense exchange of the tensor. A tensor's
dense errors are dropped when it has no dense steps any more (decision 0014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ocomm.collectives.plan import Loop, loop
from ocomm.compression.codecs import OF_BITS
from ocomm.compression.layout import Layout, SegmentLayout
from ocomm.errors import SettingsError
from ocomm.kernels.base import Bytes, Floats, Kernels, Memory, Table
from ocomm.optim.feedback import Errors
from ocomm.optim.options import Options, option


@dataclass(frozen=True, kw_only=True)
class DenseOptions(Options):
    """The options of optimizers with dense steps. Raises SettingsError for impossible values."""

    dense_bits: Literal[32, 16, 8, 4] = option(
        32,
        """The number of bits per element in which gradients are averaged in dense steps: the warm-up, and the refreshes
        of 0/1 Adam. 32: float32. 16: bfloat16. 8, 4: whole numbers with a scale for every 128 elements and error
        feedback.""",
    )

    def __post_init__(self) -> None:
        bits = self.dense_bits
        if isinstance(bits, bool) or bits not in (32, *OF_BITS):
            raise SettingsError(f"dense_bits must be 32, 16, 8 or 4, got {bits!r}")
        object.__setattr__(self, "dense_bits", int(bits))  # a whole number of any type


class DenseCodes:
    """The dense exchanges, in ``bits`` bits, of the tensors of ``layout`` on rank ``rank``: loops and errors."""

    def __init__(self, layout: Layout, rank: int, bits: int, memory: Memory) -> None:
        self.codec = OF_BITS[bits]
        self.errors = Errors(layout, rank, memory)
        self._layout = layout
        self._rank = rank
        #: The tensors that may have errors.
        self._traveled = np.zeros(len(layout.tensors), np.bool_)

    def allocate(self) -> None:
        """Allocates errors, if this format has any."""
        if self.codec.keeps_errors:
            self.errors.allocate()

    def built_in(self) -> tuple[Any, ...]:
        """Returns what the plan of a step has built in and the next step may change."""
        self.allocate()
        return (self.errors.worker, self.errors.server)

    def compress(self, segment: SegmentLayout, tensors: Table, packed: Bytes, flags: NDArray[np.uint32]) -> Loop:
        """Returns the worker's loop for a segment, from the gradients in ``tensors`` to ``packed``."""
        return loop(
            Kernels.compress_codes,
            flags,
            blocks=segment.worker_blocks,
            tensors=tensors,
            error=self._own(self.errors.worker),
            error_out=self._own(self.errors.worker_out),
            bits=self.codec.bits,
            packed=packed,
        )

    def average(
        self, segment: SegmentLayout, received: Sequence[Bytes], packed: Bytes, flags: NDArray[np.uint32]
    ) -> Loop:
        """Returns the server's loop for a segment, from the messages of all workers to its part of ``packed``."""
        return loop(
            Kernels.average_codes,
            flags,
            blocks=segment.owned_blocks,
            received=received,
            origin=segment.message_start[self._rank],
            error=self._own(self.errors.server),
            error_out=self._own(self.errors.server_out),
            bits=self.codec.bits,
            packed=packed,
        )

    def unpack(self, segment: SegmentLayout, packed: Bytes, averages: Floats) -> Loop:
        """Returns the loop that writes what has been gathered to the flat ``averages``."""
        return loop(
            Kernels.unpack_codes, None, blocks=segment.blocks, packed=packed, bits=self.codec.bits, out=averages
        )

    def _own(self, errors: Floats) -> Floats | None:
        return errors if self.codec.keeps_errors else None

    def commit(self, traveled: NDArray[np.bool_]) -> None:
        """Makes the errors that a step has written the current ones; only the tensors of ``traveled`` had a gradient
        on some rank and took part.
        """
        if not self.errors.is_allocated or not traveled.any():
            return
        for tensor in np.flatnonzero(self._traveled & ~traveled).tolist():
            self.errors.keep(tensor)
        self.errors.swap()
        self._traveled |= traveled

    def drop(self, tensors: NDArray[np.bool_]) -> None:
        """Drops the errors of ``tensors``, one bool each, which have no dense steps any more."""
        dropped = self._traveled & tensors
        if not dropped.any():
            return
        self._traveled &= ~tensors
        if not self._traveled.any():
            self.errors.release()
            return
        for tensor in np.flatnonzero(dropped).tolist():
            self.errors.reset(tensor)

    def reset(self) -> None:
        """Zeroes all errors."""
        self.errors.reset_all()
        self._traveled[:] = False

    def buffers(self) -> tuple[Floats, Floats]:
        """Returns the errors of worker and server, without elements if all are zero, as where the only tensors with
        dense steps to come have had no gradient yet.
        """
        none = np.zeros(0, np.float32)
        return (self.errors.worker, self.errors.server) if self._traveled.any() else (none, none)

    def load(self, worker: Floats, server: Floats) -> None:
        """Loads saved errors, arrays of the host; those without elements stand for zeros."""
        self.reset()
        if not self.codec.keeps_errors or not (worker.any() or server.any()):
            return
        self.allocate()
        layout = self._layout
        for own, saved in ((self.errors.worker, worker), (self.errors.server, server)):
            if saved.size:
                own[:] = saved
        for tensor in range(self._traveled.size):
            mine, owned = layout.local_span(tensor, self._rank), layout.owned_span(tensor, self._rank)
            self._traveled[tensor] = worker[mine].any() or server[owned].any()
