"""Birder (Peng et al., algorithm 2) as a state machine over flat float32 buffers: SoftSignSGD with 1 bit each way.

    m and b as in SoftSignSGD;  y = m / (b + eps) + e;  u = Q(y);  e = y - u
    server:  a = mean over ranks of u + E;  ubar = Q(a);  E = a - ubar
    p = p * (1 - lr * wd) - lr * ubar

Q is +1 with probability (y + 1) / 2, else -1: unbiased for y in [-1, 1] and saturated outside, so that abs(e) <= 2. Its
random numbers depend on seed, element, step and rank alone, so buckets, threads and the order of arrival change no bit.
If it is not stochastic, Q is +1 if y > 0 (more exactly, if y + 1 > 1), else -1, and abs(e) <= 1.

Memory per parameter, besides the parameter and its gradient, for n ranks: m, b and the worker's error 2 * 12 B, the
server's 2 * 4/n B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ocomm.collectives.plan import Loop, loop
from ocomm.compression.codecs import SIGNS
from ocomm.compression.layout import Layout
from ocomm.kernels.base import NOISE, OWNERS, Bytes, Floats, Kernels
from ocomm.optim.core import Bools, Flags
from ocomm.optim.options import option, require_seed
from ocomm.optim.soft_sign import EPS, SoftSignSGD, SoftSignSGDOptions


@dataclass(frozen=True, kw_only=True)
class BirderOptions(SoftSignSGDOptions):
    """The options of Birder. Raises SettingsError for impossible values."""

    stochastic: bool = option(
        False,
        """Use the paper's random signs, which are unbiased in each step. False: use the sign itself, which is right on
        average over steps; errors stay in [-1, 1], and losses end nearer to Adam's (docs/decisions/0008).""",
        fixed=True,
    )
    seed: int = option(0, "Seed of the random signs, in [0, 2^64).", fixed=True)

    def __post_init__(self) -> None:
        require_seed(self.seed)
        super().__post_init__()


class Birder(SoftSignSGD):
    """Birder for the tensors of ``layout``, on rank ``rank`` of ``layout.ranks``."""

    kind = "Birder"
    options_class = BirderOptions
    fixed_options: ClassVar = {}
    compressor = "birder"
    codec = SIGNS
    travels_dense = False

    def __init__(self, layout: Layout, rank: int, kernels: Kernels, options: BirderOptions) -> None:
        super().__init__(layout, rank, kernels, options)
        seed, plain = options.seed, not options.stochastic
        # Plans read this when they run, so a new step needs no new plan.
        members = layout.nodes.members
        self._noise = np.array([(seed, 0, members.index(layout.nodes.node_of(rank)), plain)], NOISE)
        self._owner_noise = np.array([(seed, 0, OWNERS, plain)], NOISE)
        self._weights = np.array([len(node) / layout.ranks for node in members], np.float32)

    def _allocate_exchanged(self) -> None:
        self.allocate()

    # One step

    def compress(self, segment: int, packed: Bytes, flags: Flags) -> Loop:
        """Returns the loop that writes this step's signs into ``packed``. It reads gradients and writes momentum,
        magnitude and error.
        """
        return loop(
            Kernels.compress_quantized,
            flags,
            blocks=self.segments[segment].layout.worker_blocks,
            tensors=self.tensors,
            momentum=self.momentum,
            momentum_out=self.momentum_out,
            magnitude=self.magnitude,
            magnitude_out=self.magnitude_out,
            error=self.error,
            error_out=self.error_out,
            eps=EPS,
            amsgrad=self.amsgrad,
            noise=self._noise,
            packed=packed,
        )

    def average(self, segment: int, received: Sequence[Bytes], flags: Flags) -> Loop:
        layout = self.segments[segment].layout
        return loop(
            Kernels.average_quantized,
            flags,
            blocks=layout.owned_blocks,
            received=received,
            origin=layout.message_start[self.rank],
            weights=self._weights,
            error=self.server_error,
            error_out=self.server_error_out,
            noise=self._owner_noise,
            packed=self.result(segment),
        )

    def built_in(self, segments: Sequence[int]) -> tuple[Any, ...]:
        return (*super().built_in(segments), self.amsgrad)

    def commit(self, present: Bools, averages: Floats) -> None:
        super().commit(present, averages)
        self._count()

    def rank_buffers(self) -> dict[str, dict[str, Floats]]:
        buffers = super().rank_buffers()
        return {**buffers, "worker": {**buffers["worker"], **buffers["flat"]}, "flat": {}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._count()

    def _count(self) -> None:
        self._noise["step"] = self._owner_noise["step"] = self.committed & 0xFFFFFFFF

    def _keep(self, tensor: int) -> None:
        super()._keep(tensor)
        self.errors.keep(tensor)

    def _swap(self) -> None:
        super()._swap()
        self.errors.swap()

    def _move(self, averages: Floats) -> None:
        results = [(s.layout.blocks, self.tensors, self.result(k)) for k, s in enumerate(self.segments)]
        self.for_each("apply_signs", results)

    def _exchanged_memory(self) -> dict[str, int]:
        return {"packed_result": self.results_nbytes()}
