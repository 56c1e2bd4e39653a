"""What the drivers that take over Adam's m and v have in common: a host that has them, and a warm start from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ocomm.compression.layout import TensorSpec
from ocomm.kernels.base import Floats
from ocomm.optim.adam import DenseAdam
from ocomm.optim.core import Group, address
from ocomm.optim.onebit_adam import OneBitAdam
from ocomm.optim.options import Options
from ocomm.optim.zero_one_adam import ZeroOneAdam
from ocomm.session import Session
from ocomm.training.driver import Common, Driver, Frontend


class MomentsFrontend(Frontend, Protocol):
    """A frontend that wraps an Adam."""

    def wrapped_adam(self) -> str:
        """``"Adam"`` or ``"AdamW"``: where the weight decay goes. The ranks compare it."""
        ...

    def read_warm_start(self) -> str | None:
        """The fingerprint of the moments with which the frontend will call ``start_warm``; None without. The ranks
        compare it."""
        ...

    def moments(self, tensor: int) -> tuple[Floats, Floats, int] | None:
        """The wrapped optimizer's m, v (flat float32, its own memory) and step count of a tensor, None without any."""
        ...

    def release(self, tensor: int) -> None:
        """The tensor's m and v are no longer needed."""
        ...


def dense_step(
    groups: Sequence[Group],
    averages: Mapping[int, Floats],
    parameter: Callable[[int], Floats],
    state: Callable[[int], DenseAdam],
) -> None:
    """Adam's step of the tensors in ``averages``, in place, with the same bits in every framework.

    ``parameter`` and ``state`` give a tensor's elements, flat, and its moments.
    """
    for group in groups:
        for tensor in group.tensors.tolist():
            if tensor in averages:
                gradient = averages[tensor]
                if group.coupled_decay:
                    gradient = gradient + np.float32(group.coupled_decay) * parameter(tensor)
                state(tensor).update(
                    parameter(tensor),
                    gradient,
                    lr=group.lr,
                    betas=group.betas,
                    eps=group.eps,
                    decay=group.decoupled_decay,
                )


class AdamDriver(Driver):
    """See ``Driver``; ``frontend`` is a ``MomentsFrontend``."""

    core: OneBitAdam | ZeroOneAdam

    def __init__(
        self,
        session: Session,
        number: int,
        specs: Sequence[TensorSpec],
        frontend: MomentsFrontend,
        core_class: type[OneBitAdam] | type[ZeroOneAdam],
        options: Options,
        common: Common,
    ) -> None:
        #: What came from an Adam's checkpoint, for the report.
        self.warm_start: dict[str, Any] | None = None
        told = {
            "optimizer": core_class.dense_steps_of or frontend.wrapped_adam(),
            "warm_start": frontend.read_warm_start(),
        }
        super().__init__(session, number, specs, frontend, core_class, options, common, told)

    def clip_averages(self, averages: Sequence[Floats], max_norm: float | None) -> None:
        """Clips averaged gradients in place, as ``torch.nn.utils.clip_grad_norm_``, unless ``max_norm`` is None."""
        factor = 1.0 if max_norm is None else self.clip_factor(averages, max_norm)
        for average in averages if factor < 1.0 else ():
            average *= np.float32(factor)

    def clip_factor(self, averages: Sequence[Floats], max_norm: float) -> float:
        """What clips averaged gradients, in the host's memory, to ``max_norm``; 1 at most."""
        addresses = np.array([address(average) for average in averages], np.uint64)
        squares = self.kernels.squares(addresses, np.array([average.size for average in averages], np.int64))
        return min(1.0, max_norm / (math.sqrt(sum(squares.tolist())) + 1e-6))

    def report(self) -> dict[str, Any]:
        """Also ``warm_start``: None, or ``step`` of the checkpoint, how many ``tensors`` had moments in it, and the
        names of those that are ``dense`` since they had none."""
        return {**super().report(), "warm_start": self.warm_start}

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "warm_start": self.warm_start}

    def _load(self, saved: Mapping[str, Any]) -> None:
        self.core.load_state(saved["core"], lambda tensor: self.frontend.moments(tensor)[0])
        for tensor in self.taken_over(saved):
            self.frontend.release(tensor)
        self.warm_start = saved.get("warm_start")

    def _loaded(self) -> list[tuple[str, Any]]:
        found = super()._loaded()
        for tensor, spec in enumerate(self.core.layout.tensors):
            moments: Any = self.saved_moments(tensor)
            if moments is None and (own := self.frontend.moments(tensor)) is not None:
                moments = tuple(map(self.core.param_memory.host, own))
            if moments is not None:
                found.append((f"moments of '{spec.name}'", moments))
        return found

    def _beta2(self, tensor: int) -> float:
        """Of the tensor's group, as it is now."""
        return next(group.betas[1] for group in self.groups() if tensor in group.tensors)

    def _eps(self, tensor: int) -> float:
        return next(group.eps for group in self.groups() if tensor in group.tensors)

    def continue_plain(self) -> None:
        """The wrapped optimizer has the state of an Adam that was not distributed: goes on from that."""
        raise NotImplementedError

    def start_warm(self, betas2: Mapping[int, float]) -> None:
        """The wrapped optimizer has got Adam's moments from a checkpoint: goes on without dense steps from those.

        ``betas2`` are the beta2 with which they were made, by tensor; tensors without have none.
        """
        raise NotImplementedError

    def _host_steps(self) -> int:
        """How many steps the wrapped optimizer has taken."""
        counts = [moments[2] for t in range(self.core.steps.size) if (moments := self.frontend.moments(t)) is not None]
        return max(counts, default=0)

    def _say_warm(self, cold: Sequence[int] | np.ndarray) -> None:
        names = [spec.name for spec in self.core.layout.tensors]
        dense = [names[int(tensor)] for tensor in cold]
        self.warm_start = {"step": self.steps, "tensors": len(names) - len(dense), "dense": dense}
