"""dist-EF-SGD with blockwise momentum (Zheng, Huang, Kwok, arXiv 1905.10936) as a state machine over flat buffers.

    g = local gradient (+ wd * p if the decay is coupled)
    m = mu * m + g                                     each rank its own
    d = m, or with Nesterov's momentum g + mu * m
    c = lr * d + e;  u = C(c);  e = c - u              C: per block, mean of abs(c) times the signs
    server:  a = mean over ranks of u + E;  ubar = C(a);  E = a - ubar
    p = p * (1 - lr * wd) - ubar                       if the decay is decoupled

The paper sends C(d + lr_{t-1} / lr_t * e). C(lr * x) is lr * C(x), so errors in units of lr * d need no such ratio, and
a step with a learning rate of 0 is defined, too.

Memory per parameter, besides the parameter and its gradient, for n ranks: m 4 B, the worker's error 2 * 4 B, the
server's 2 * 4/n B, ubar 4 B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ocomm.collectives.plan import Loop, loop
from ocomm.compression.layout import Layout, all_blocks
from ocomm.kernels.base import Bytes, Floats, Kernels, Table
from ocomm.optim.core import Bools, Flags, Group, OneStageCore, address
from ocomm.optim.options import Options


@dataclass(frozen=True, kw_only=True)
class EFSGDOptions(Options):
    """The options of dist-EF-SGD: none. Momentum, Nesterov's form, learning rate and weight decay are the wrapped
    optimizer's.
    """


class EFSGD(OneStageCore):
    """dist-EF-SGD for the tensors of ``layout``, on rank ``rank`` of ``layout.ranks``.

    A group's ``betas`` are mu, and mu again for Nesterov's momentum, else 0.
    """

    kind = "EFSGD"
    options_class = EFSGDOptions
    compressor = "efsgd"
    sends_rates = True

    def __init__(self, layout: Layout, rank: int, kernels: Kernels, options: EFSGDOptions) -> None:
        super().__init__(layout, rank, kernels, options)
        self.momentum = self.param_memory.zeros(layout.worker_numel(rank))
        self._update = self.param_memory.zeros(layout.flat_numel)
        self._blocks = all_blocks(layout, rank)
        mine = self._blocks if layout.nodes.is_flat else self._blocks[self._blocks["local"] >= 0]
        self._worker_blocks = _by_local(mine)
        self._momentum_rows: Table = np.zeros(len(layout.tensors), self.tensors.dtype)
        # Hyperparameters of the next step, by tensor.
        self._mu, self._lr = np.zeros((2, len(layout.tensors)))
        # The loop divides by this; errors are in units of lr * d, so it is 1.
        self.tensors["interval_root"] = 1.0
        self.allocate()

    def set_hyper(self, group: Group) -> None:
        """Sets a group's hyperparameters for the next step.

        With m of the last step, d is mu * m + g, or mu^2 * m + (1 + mu) * g. A ``gradient_scale`` is built in as in
        1-bit Adam.
        """
        rows, index = self.tensors, group.tensors
        mu, nesterov = group.betas[0], group.betas[1] > 0
        self._mu[index], self._lr[index] = mu, group.lr
        rows["beta1"][index] = mu * mu if nesterov else mu
        rows["one_minus_beta1"][index] = (1.0 + mu if nesterov else 1.0) * self.gradient_scale
        rows["weight_decay"][index] = group.coupled_decay / self.gradient_scale
        rows["step_size"][index] = group.lr
        rows["decay"][index] = 1.0 - group.lr * group.decoupled_decay

    # One step

    def compress(self, segment: int, packed: Bytes, flags: Flags) -> Loop:
        """Returns the loop of 0/1 Adam that compresses lr * d. It reads gradients and, if the decay is coupled,
        parameters.
        """
        return loop(
            Kernels.compress_update,
            flags,
            blocks=_by_local(self.segments[segment].layout.worker_blocks),
            tensors=self.tensors,
            momentum=self.momentum,
            update=None,
            error=self.error,
            error_out=self.error_out,
            mask=None,
            scale=self.scale,
            packed=packed,
        )

    def commit(self, present: Bools, averages: Floats) -> None:
        """Swaps the errors with what the exchange has written, and moves momenta and parameters. ``averages`` is not
        used.
        """
        # Copies only go to the buffers that are not in use yet, so nothing changes before the swap.
        for tensor in np.flatnonzero(~present).tolist():
            self.errors.keep(tensor)
        self.errors.swap()
        self._accumulate(present)
        for number, segment in enumerate(self.segments):
            self.kernels.unpack(segment.layout.blocks, self.result(number), None, self._update)
        self.tensors["skip"] = ~present
        self.tensors["step_size"] = 1.0  # the learning rate is in the values that were sent
        self.kernels.descend(self._blocks, self.tensors, self._update)
        self.tensors["step_size"] = self._lr
        self.steps += present

    def _accumulate(self, present: Bools) -> None:
        """Updates m = mu * m + g, g with its coupled decay, for what this rank compresses of the tensors ``present``.

        It uses the loop of 0/1 Adam's local steps with a step size of 0. That loop would change the parameters, because
        p - 0 * m may have another sign of 0 on each rank, so it gets copies of them. What it divides by does not
        matter, since nobody reads these copies.
        """
        rows = self._momentum_rows
        rows[:] = self.tensors
        rows["beta1"], rows["one_minus_beta1"], rows["step_size"], rows["decay"] = self._mu, self.gradient_scale, 0, 1
        rows["skip"] = ~present
        rows["param"] = address(self._update) + 4 * self.layout.offsets.astype(np.uint64)
        for tensor in np.flatnonzero(present & (rows["weight_decay"] != 0)).tolist():
            self._update[self.flat_span(tensor)] = self.param(tensor)
        self.kernels.local_step(self._worker_blocks, rows, self.momentum, None, self.error_out, None)

    # State

    def adopt(self, tensor: int, momentum: Floats) -> None:
        """Continues from the momentum of an SGD, ``numel`` float32 in the host's memory, as this rank's own."""
        self.momentum[self.local_span(tensor)] = self.layout.to_worker(tensor, self.rank, momentum)

    def rank_buffers(self) -> dict[str, dict[str, Floats]]:
        buffers = super().rank_buffers()
        return {**buffers, "worker": {**buffers["worker"], "momentum": self.momentum}}

    def memory(self) -> dict[str, int]:
        """Returns the bytes held, by buffer."""
        return {
            **super().memory(),
            "momentum": self.momentum.nbytes,
            "update": self._update.nbytes,
            "packed_result": self.results_nbytes(),
        }

    def built_in(self, segments: Sequence[int]) -> tuple[Any, ...]:
        return (*super().built_in(segments), self.momentum)


def _by_local(blocks: Table) -> Table:
    """Returns a copy of ``blocks`` for loops that look for the momentum at ``offset``, where it is placed as the worker
    errors are.
    """
    found = blocks.copy()
    found["offset"] = found["local"]
    return found
