"""1-bit Lion (Liu et al., *Communication Efficient Distributed Training with Distributed Lion*, majority vote) as a
state machine over flat float32 buffers.

    u = sign(beta1 * m + (1 - beta1) * g);  m = beta2 * m + (1 - beta2) * g      each rank its own
    server:  vote = the sign that most ranks sent; a random sign if both were sent equally often
    p = p * (1 - lr * wd) - lr * vote

Lion's step is a sign already, so compression loses nothing on the way to the server and there are no errors to keep.
The server's sum of signs is a whole number; Q (``optim.birder``) turns it into its sign, or 0 into a random one that is
the same wherever it is computed.

1 bit has no zero. So the sign of a worker's zero alternates from step to step and from worker to worker. In the long
run such votes neither move a parameter nor, since half of them are +1, outvote workers whose value is not zero.

Memory per parameter, besides the parameter and its gradient: m 2 * 4 B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ocomm.collectives.plan import Loop, loop
from ocomm.compression.codecs import SIGNS
from ocomm.compression.layout import Layout
from ocomm.errors import SettingsError
from ocomm.kernels.base import NOISE, OWNERS, Bytes, Floats, Kernels
from ocomm.optim.core import Bools, Flags, Group, OneStageCore
from ocomm.optim.options import Options, option, require_seed


@dataclass(frozen=True, kw_only=True)
class LionOptions(Options):
    """The options of 1-bit Lion. Raises SettingsError for impossible values."""

    betas: tuple[float, float] = option(
        (0.9, 0.99), "The factor of the momentum in the sign, and of its moving average; both in [0, 1).", fixed=True
    )
    seed: int = option(0, "Seed of the random sign where both signs have equally many votes, in [0, 2^64).", fixed=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(float(beta) for beta in self.betas))
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise SettingsError(f"betas must be two numbers in [0, 1), got {self.betas}")
        require_seed(self.seed)


class Lion(OneStageCore):
    """1-bit Lion for the tensors of ``layout``, on rank ``rank`` of ``layout.ranks``."""

    kind = "Lion"
    options_class = LionOptions
    compressor = "lion"
    codec = SIGNS
    keeps_errors = False

    def __init__(self, layout: Layout, rank: int, kernels: Kernels, options: LionOptions) -> None:
        super().__init__(layout, rank, kernels, options)
        self.betas = betas = options.betas
        #: Number of steps taken, whatever tensors had gradients in them.
        self.committed = 0
        self.tensors["beta1"], self.tensors["one_minus_beta1"] = betas[0], 1.0 - betas[0]
        self.momentum, self.momentum_out = (self.param_memory.zeros(layout.worker_numel(rank)) for _ in range(2))
        self._worker = layout.nodes.members.index(layout.nodes.node_of(rank))
        # Plans read this when they run, so a new step needs no new plan.
        self._owner_noise = np.array([(options.seed, 0, OWNERS, 0)], NOISE)
        self._votes = np.array([len(node) for node in layout.nodes.members], np.float32)
        self.allocate()

    @property
    def zero_up(self) -> bool:
        """True if the sign of zero is +1 in this worker's next step."""
        return (self.committed + self._worker) % 2 == 0

    def set_hyper(self, group: Group) -> None:
        """Sets a group's hyperparameters; reads ``lr`` and ``decoupled_decay``."""
        self.tensors["one_minus_beta1"][group.tensors] = (1.0 - self.betas[0]) * self.gradient_scale
        self.tensors["step_size"][group.tensors] = group.lr
        self.tensors["decay"][group.tensors] = 1.0 - group.lr * group.decoupled_decay

    # One step

    def compress(self, segment: int, packed: Bytes, flags: Flags) -> Loop:
        """Returns the loop that writes this step's signs into ``packed``. It reads gradients and writes the
        momentum.
        """
        return loop(
            Kernels.compress_signs,
            flags,
            blocks=self.segments[segment].layout.worker_blocks,
            tensors=self.tensors,
            momentum=self.momentum,
            momentum_out=self.momentum_out,
            beta2=self.betas[1],
            one_minus_beta2=(1.0 - self.betas[1]) * self.gradient_scale,
            zero_up=self.zero_up,
            packed=packed,
        )

    def average(self, segment: int, received: Sequence[Bytes], flags: Flags) -> Loop:
        """Returns the loop that computes the majority; a worker has one vote for each rank of its node."""
        layout = self.segments[segment].layout
        return loop(
            Kernels.average_quantized,
            flags,
            blocks=layout.owned_blocks,
            received=received,
            origin=layout.message_start[self.rank],
            weights=self._votes,
            error=None,
            error_out=None,
            noise=self._owner_noise,
            packed=self.result(segment),
        )

    def built_in(self, segments: Sequence[int]) -> tuple[Any, ...]:
        return self.momentum, self.zero_up, self.gradient_scale, *[self.result(k) for k in segments]

    def commit(self, present: Bools, averages: Floats) -> None:
        """Swaps the momentum with what the exchange has written, and moves the parameters. ``averages`` is not used."""
        # Copies only go to the buffer that is not in use yet, so nothing changes before the swap.
        for tensor in np.flatnonzero(~present).tolist():
            span = self.local_span(tensor)
            self.momentum_out[span] = self.momentum[span]
        self.momentum, self.momentum_out = self.momentum_out, self.momentum
        self.tensors["skip"] = ~present
        self.steps += present
        self.committed += 1
        self._count()
        results = [(s.layout.blocks, self.tensors, self.result(k)) for k, s in enumerate(self.segments)]
        self.for_each("apply_signs", results)

    def _count(self) -> None:
        self._owner_noise["step"] = self.committed & 0xFFFFFFFF

    # State

    def rank_buffers(self) -> dict[str, dict[str, Floats]]:
        return {"worker": {"momentum": self.momentum}, "owner": {}, "flat": {}}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "committed": self.committed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.committed = int(state["committed"])
        self._count()

    def memory(self) -> dict[str, int]:
        """Returns the bytes held, by buffer."""
        return {
            **super().memory(),
            "momentum": self.momentum.nbytes + self.momentum_out.nbytes,
            "packed_result": self.results_nbytes(),
        }
