"""Averages of gradients in 8 or 4 bits with error feedback, for an optimizer that makes its steps itself.

    worker i:  c = g_i + d_i;  u_i = C(c);  d_i = c - u_i
    server:    a = mean of u_i + D;  u = C(a);  D = a - u
    every rank:  the optimizer steps on u

They are low-bit dense steps (``optim.dense_codes``) from the first step to the last, so errors are never dropped. In 4
bits errors are LoCo's (arXiv 2407.04480), moving averages that are zeroed after every 1,024th step of a tensor:

    d_i = 0.8 * d_i + (1 - 0.8) * (c - u_i);  D = 0.8 * D + (1 - 0.8) * (a - u)

Memory per parameter, besides the parameter, its gradient and the optimizer's state, for n ranks: the averages 4 B;
errors of the worker 2 * 4 B, of the server 2 * 4/n B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocomm.compression.layout import Layout
from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import Floats, Kernels
from ocomm.optim.core import Bools, Group, OneStageCore
from ocomm.optim.dense_codes import DenseOptions

#: beta of LoCo's errors, and the number of steps after which they are zeroed.
BETA, RESET = 0.8, 1024
#: Number of elements that are worked on at once, so that what is needed stays in the cache.
_CHUNK = 1 << 15


@dataclass(frozen=True, kw_only=True)
class LowBitOptions(DenseOptions):
    """The options of averages of gradients. Raises SettingsError for impossible values."""


class LowBitAverages(OneStageCore):
    """The averages, in ``options.dense_bits`` bits, of gradients of the tensors of ``layout``."""

    kind = "Optimizer"
    options_class = LowBitOptions
    travels_dense = True
    hyper_text = "lr, betas, eps or weight decay of the step before differ between ranks"

    def __init__(self, layout: Layout, rank: int, kernels: Kernels, options: LowBitOptions) -> None:
        super().__init__(layout, rank, kernels, options)
        #: Whether errors are moving averages.
        self._averages_errors = options.dense_bits == 4
        if self._averages_errors and self.param_memory.is_device:
            raise InvalidRequestError(
                "Compression.int4 works on parameters in the host's memory only, and these are on a GPU; use "
                "Compression.int8."
            )

    def set_hyper(self, group: Group) -> None:
        """Does nothing: gradients travel as they are."""

    def commit_dense(self, present: Bools) -> None:
        if self._averages_errors:
            for tensor in np.flatnonzero(self.exchange().dense & present).tolist():
                self._average_errors(tensor)
        super().commit_dense(present)

    def _average_errors(self, tensor: int) -> None:
        """Makes what the step has lost of a tensor its new errors."""
        assert self.dense_codes is not None
        errors = self.dense_codes.errors
        is_reset = (int(self.steps[tensor]) + 1) % RESET == 0
        for span, before, after in (
            (self.local_span(tensor), errors.worker, errors.worker_out),
            (self.owned_span(tensor), errors.server, errors.server_out),
        ):
            for start in range(span.start, span.stop, _CHUNK):
                part = slice(start, min(start + _CHUNK, span.stop))
                if is_reset:
                    after[part] = 0.0
                else:
                    after[part] *= np.float32(1 - BETA)
                    after[part] += np.float32(BETA) * before[part]

    def commit(self, present: Bools, averages: Floats) -> None:
        """Counts the step of the tensors that have a gradient on some rank; their averages are what the optimizer
        steps on.
        """
        self.steps += present

    def report(self) -> dict[str, Any]:
        return {**super().report(), "dense_bits": self.dense_bits}


class ReturnedAverages(LowBitAverages):
    """``LowBitAverages`` of a frontend that has no parameters here: it returns the averages."""

    def replica_nbytes(self) -> NDArray[np.int64]:
        return np.zeros(len(self.layout.tensors), np.int64)


class TapeAverages(ReturnedAverages):
    """The gradients of a tape, whose averages are returned."""

    kind = "GradientTape"
