"""SoftSignSGD (Peng et al., *Birder*, algorithm 1) as a state machine over flat float32 buffers.

    m = beta * m + (1 - beta) * g;  b = beta * b + (1 - beta) * |g|      (from step T_0 + 1 on b = max(b_prev, b))
    p = p * (1 - lr * wd) - lr * mean over ranks of m / (b + eps)

Each rank has its own m and b; the ratio travels dense. m and b are written to second buffers, which ``commit`` swaps
with the current ones.

Memory per parameter, besides the parameter and its gradient: m and b 2 * 8 B, the ratio 4 B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ocomm.collectives.plan import Computation, loop
from ocomm.compression.layout import Layout, SegmentLayout, all_blocks
from ocomm.errors import SettingsError
from ocomm.kernels.base import Floats, Kernels, Table
from ocomm.optim.core import Bools, Flags, Group, OneStageCore, address
from ocomm.optim.options import Options, option

EPS = 1e-12


@dataclass(frozen=True, kw_only=True)
class SoftSignSGDOptions(Options):
    """The options of SoftSignSGD. Raises SettingsError for impossible values."""

    beta: float = option(
        0.95, "The factor, in [0, 1), of the moving averages m of the gradient and b of its magnitude.", fixed=True
    )
    amsgrad_after: int | None = option(
        None, "The number of steps T_0 after which b never falls. None: it may always fall.", fixed=True
    )

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta < 1.0:
            raise SettingsError(f"beta must be in [0, 1), got {self.beta}")
        if self.amsgrad_after is not None and self.amsgrad_after < 0:
            raise SettingsError(f"amsgrad_after must be a number of steps or None, got {self.amsgrad_after}")


class SoftSignSGD(OneStageCore):
    """SoftSignSGD for the tensors of ``layout``, on rank ``rank`` of ``layout.ranks``."""

    kind = "SoftSignSGD"
    options_class = SoftSignSGDOptions
    fixed_options: ClassVar = {"hierarchical": False}
    travels_dense = True

    def __init__(self, layout: Layout, rank: int, kernels: Kernels, options: SoftSignSGDOptions) -> None:
        super().__init__(layout, rank, kernels, options)
        self.amsgrad_after = options.amsgrad_after
        #: Number of steps taken, whatever tensors had gradients in them.
        self.committed = 0
        self.beta = options.beta
        self.tensors["beta1"], self.tensors["one_minus_beta1"] = self.beta, 1.0 - self.beta
        mine = layout.worker_numel(rank)
        self.momentum, self.momentum_out, self.magnitude, self.magnitude_out = (
            self.param_memory.zeros(mine) for _ in range(4)
        )
        self._allocate_exchanged()

    def _allocate_exchanged(self) -> None:
        """Allocates what this algorithm exchanges, or keeps of an exchange."""
        self.blocks = all_blocks(self.layout, self.rank)
        self.ratio = self.param_memory.zeros(self.layout.flat_numel)
        self._source: Table = np.zeros(len(self.layout.tensors), self.tensors.dtype)
        self._source["grad"] = address(self.ratio) + 4 * self.layout.offsets.astype(np.uint64)

    @property
    def amsgrad(self) -> bool:
        """True if b must not fall in the next step."""
        return self.amsgrad_after is not None and self.committed >= self.amsgrad_after

    def set_hyper(self, group: Group) -> None:
        """Sets a group's hyperparameters; reads ``lr`` and ``decoupled_decay``."""
        self.tensors["one_minus_beta1"][group.tensors] = (1.0 - self.beta) * self.gradient_scale
        self.tensors["step_size"][group.tensors] = group.lr
        self.tensors["decay"][group.tensors] = 1.0 - group.lr * group.decoupled_decay

    # One step

    def dense_source(self, segment: SegmentLayout, flags: Flags) -> tuple[list[Computation], Table]:
        soft_sign = loop(
            Kernels.soft_sign,
            flags,
            blocks=segment.blocks,
            tensors=self.tensors,
            momentum=self.momentum,
            momentum_out=self.momentum_out,
            magnitude=self.magnitude,
            magnitude_out=self.magnitude_out,
            eps=EPS,
            amsgrad=self.amsgrad,
            out=self.ratio,
        )
        return [soft_sign], self._source

    def built_in_dense(self) -> tuple[Any, ...]:
        return self.momentum, self.amsgrad

    def commit(self, present: Bools, averages: Floats) -> None:
        """Swaps the state with what the exchange has written, and moves the parameters. Overwrites ``averages``."""
        # Copies only go to the buffers that are not in use yet, so nothing changes before the swap.
        for tensor in np.flatnonzero(~present).tolist():
            self._keep(tensor)
        self._swap()
        self.tensors["skip"] = ~present
        self.steps += present
        self.committed += 1
        self._move(averages)

    def _keep(self, tensor: int) -> None:
        """Copies the state of a tensor that has no gradient on any rank over what the exchange has written."""
        span = self.local_span(tensor)
        self.momentum_out[span] = self.momentum[span]
        self.magnitude_out[span] = self.magnitude[span]

    def _swap(self) -> None:
        self.momentum, self.momentum_out = self.momentum_out, self.momentum
        self.magnitude, self.magnitude_out = self.magnitude_out, self.magnitude

    def _move(self, averages: Floats) -> None:
        """Updates the parameters of tensors without ``skip``, at their addresses."""
        self.kernels.descend(self.blocks, self.tensors, averages)

    # State

    def rank_buffers(self) -> dict[str, dict[str, Floats]]:
        buffers = super().rank_buffers()
        worker = {**buffers["worker"], "momentum": self.momentum, "magnitude": self.magnitude}
        return {**buffers, "worker": worker}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "committed": self.committed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.committed = int(state["committed"])

    def memory(self) -> dict[str, int]:
        """Returns the bytes held, by buffer."""
        return {
            **super().memory(),
            "momentum": self.momentum.nbytes + self.momentum_out.nbytes,
            "magnitude": self.magnitude.nbytes + self.magnitude_out.nbytes,
            **self._exchanged_memory(),
        }

    def _exchanged_memory(self) -> dict[str, int]:
        return {"ratio": self.ratio.nbytes}
