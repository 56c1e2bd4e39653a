"""The options that all distributed optimizers have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ocomm.errors import InvalidRequestError
from ocomm.optim.options import Options, option
from ocomm.types import ReduceOp


@dataclass(frozen=True, kw_only=True)
class Common(Options):
    """Options that all compressed optimizers have. Raises InvalidRequestError for impossible values."""

    block_size: int | Literal["tensor"] = option(
        4096,
        """The number of elements of a tensor, a multiple of 16, that share one owner and, if the algorithm has
        scales, one scale. ``"tensor"``: all elements of a tensor.""",
    )
    overlap: bool = option(
        True,
        """Exchange gradients while backward computes others. With Keras this needs a graph of TensorFlow, in which
        gradients that are clipped by a common norm wait for each other.""",
    )
    max_grad_norm: float | None = option(
        None,
        """Clip gradients to this norm, by N, that of the averaged gradient. It is exact in the dense steps of a warm-up
        and on one rank; else it is estimated, with a standard deviation of 2.2 % (docs/algorithms.md). None: no
        clipping.""",
    )
    clip: Literal["exact", "previous"] = option(
        "exact",
        """``"exact"`` clips by N of this step, for which all gradients wait, so that nothing overlaps;
        ``"previous"`` clips by N of the last step, with overlap.""",
    )
    verify: Literal["sampled", "full", "version"] = option(
        "sampled",
        """How much of each gradient is read again to detect a change that the framework does not show
        (docs/checks.md): another 64th in each step (``"sampled"``), all of it (``"full"``), nothing
        (``"version"``).""",
        agree=False,
    )
    backward_passes_per_step: int = option(1, "The number of backward passes whose gradients are summed in a step.")
    hierarchical: bool | Literal["auto"] = option(
        "auto",
        """True: the ranks of a host sum their gradients, and each compresses a slice of the sum for the other hosts.
        ``"auto"``: the same if there are several hosts, all with several ranks.""",
    )
    op: int = option(
        ReduceOp.AVERAGE, "Horovod's argument. ``Average`` is what the optimizer does; others are refused.", agree=False
    )
    compression: type[Any] | None = option(  # noqa: RUF009, a class cannot be changed
        None,
        """Horovod's argument. None and ``Compression.none`` mean that the optimizer compresses by itself, as always;
        others are refused.""",
        agree=False,
    )
    gradient_predivide_factor: float = option(
        1.0, "Horovod's argument. It does not change an average, and has no effect here.", agree=False
    )

    def __post_init__(self) -> None:
        size, passes, norm = self.block_size, self.backward_passes_per_step, self.max_grad_norm
        if size != "tensor" and not isinstance(size, (int, np.integer)):
            raise InvalidRequestError(f"block_size must be a whole number or 'tensor', got {size!r}")
        if not isinstance(passes, (int, np.integer)) or passes < 1:
            raise InvalidRequestError(f"backward_passes_per_step must be > 0, got {passes!r}")
        if self.clip not in ("exact", "previous"):
            raise InvalidRequestError(f"clip must be 'exact' or 'previous', got {self.clip!r}")
        if norm is not None and not (isinstance(norm, (int, float, np.number)) and norm > 0):
            raise InvalidRequestError(f"max_grad_norm must be > 0 or None, got {norm!r}")
        if self.op != ReduceOp.AVERAGE:
            name = ReduceOp(self.op).label if isinstance(self.op, int) and self.op in set(ReduceOp) else repr(self.op)
            remedy = "Multiply the learning rate of SGD by size() for the effect of a sum; Adam's needs no change."
            if self.op == ReduceOp.ADASUM:
                remedy = "Write DistributedOptimizer(optimizer, op=Adasum) where you want Adasum."
            raise InvalidRequestError(f"op={name}: a 1-bit optimizer averages gradients, so leave op= out. {remedy}")
        if self.compression is not None and not getattr(self.compression, "changes_nothing", False):
            name = getattr(self.compression, "__name__", repr(self.compression))
            raise InvalidRequestError(
                f"compression={name}: a 1-bit optimizer compresses by itself, to less than that, so leave compression= "
                "out. DistributedOptimizer takes it."
            )
        if self.verify not in ("sampled", "full", "version"):
            raise InvalidRequestError(f"verify must be 'sampled', 'full' or 'version', got {self.verify!r}")
