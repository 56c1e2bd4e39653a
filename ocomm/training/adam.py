"""What drivers that take over Adam's m and v share: the frontend's interface, and a warm start."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from ocomm.compression.layout import TensorSpec
from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import Floats, Kernels
from ocomm.optim.adam import DenseAdam
from ocomm.optim.core import Group, address
from ocomm.optim.onebit_adam import OneBitAdam
from ocomm.optim.options import Options
from ocomm.optim.zero_one_adam import ZeroOneAdam
from ocomm.session import Session
from ocomm.training.clipping import clip_factor
from ocomm.training.common import Common
from ocomm.training.driver import Driver, Frontend

_log = logging.getLogger("ocomm")


class MomentsFrontend(Frontend, Protocol):
    """A frontend that wraps an Adam."""

    def wrapped_adam(self) -> str:
        """Returns ``"Adam"`` or ``"AdamW"``, which says how weight decay is applied. The ranks compare it."""
        ...

    def read_warm_start(self) -> str | None:
        """Returns the fingerprint of the moments with which the frontend will call ``start_warm``, None without. The
        ranks compare it, if all use the same framework.
        """
        ...

    def moments(self, tensor: int) -> tuple[Floats, Floats, int] | None:
        """Returns the wrapped optimizer's m and v (flat float32, its own memory) and step count of a tensor; None
        without any.
        """
        ...

    def release(self, tensor: int) -> None:
        """Says that the tensor's m and v are no longer needed."""
        ...


def refuse_other(kind: str, is_sgd: bool, wrapper: str, module: str) -> NoReturn:
    """Raises InvalidRequestError for an optimizer of class ``kind``, which is no Adam, and says what to take instead.

    Args:
        kind: The name of its class.
        is_sgd: Whether it is an SGD.
        wrapper: The name of what was to wrap it.
        module: The module of Adam, for the message.
    """
    instead = "use DistributedOptimizer for other optimizers"
    if is_sgd:
        instead = "use DistributedEFSGD for SGD: 1 bit per parameter from the first step on, at half of SGD's lr"
    raise InvalidRequestError(f"{wrapper} wraps {module}.Adam or AdamW, not {kind}; {instead}.")


def dense_step(
    kernels: Kernels,
    groups: Sequence[Group],
    averages: Mapping[int, Floats],
    parameter: Callable[[int], Floats],
    state: Callable[[int], DenseAdam],
) -> None:
    """Makes Adam's step of the tensors in ``averages``, in place, with the same bits in every framework.

    ``parameter`` and ``state`` return a tensor's elements, flat, and its moments, in the host's memory, which
    ``kernels`` are for.
    """
    for group in groups:
        for tensor in group.tensors.tolist():
            if tensor in averages:
                state(tensor).update(kernels, parameter(tensor), averages[tensor], group)


class AdamDriver(Driver):
    """A ``Driver`` whose ``frontend`` is a ``MomentsFrontend``."""

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
        #: What was loaded from an Adam's checkpoint, for the report.
        self.warm_start: dict[str, Any] | None = None
        self._warm_fingerprint = frontend.read_warm_start()
        super().__init__(session, number, specs, frontend, core_class, options, common)
        self.total_steps = self.core.options.total_steps or math.inf

    def arrange_core(self, frontend: Frontend) -> dict[str, Any]:
        made_by = self.core.dense_steps_of or self.frontend.wrapped_adam()
        # Keras' ranks have their moments later, so in a job with others they are compared before the first step only.
        is_given = self._warm_fingerprint is not None and self.is_mixed
        return {"optimizer": made_by, "warm_start": "given" if is_given else self._warm_fingerprint}

    def clip_averages(self, averages: Sequence[Floats], max_norm: float | None) -> None:
        """Clips averaged gradients in place, as ``torch.nn.utils.clip_grad_norm_`` does, unless ``max_norm`` is
        None.
        """
        factor = 1.0 if max_norm is None else self.clip_factor(averages, max_norm)
        for average in averages if factor < 1.0 else ():
            average *= np.float32(factor)

    def clip_factor(self, averages: Sequence[Floats], max_norm: float) -> float:
        """Returns the factor, at most 1, that clips averaged gradients in the host's memory to ``max_norm``."""
        addresses = np.array([address(average) for average in averages], np.uint64)
        squares = self.kernels.squares(addresses, np.array([average.size for average in averages], np.int64))
        return clip_factor(math.sqrt(sum(squares.tolist())), max_norm)

    def decided_by_length(self) -> str:
        """Returns what ``total_steps``, beyond which the run goes on, has decided, in words; "" for nothing."""
        raise NotImplementedError

    def say_longer(self) -> None:
        if what := self.decided_by_length():
            _log.warning(
                "%s: total_steps=%d is over and the run goes on, %s. total_steps counts the optimizer's steps of the "
                "whole run: epochs * len(loader), if each batch is one.",
                self.name,
                self.core.options.total_steps,
                what,
            )

    def report(self) -> dict[str, Any]:
        """Also returns ``warm_start``: None, or ``step`` of the checkpoint, the number of ``tensors`` with moments in
        it, and the names of those that are ``dense`` since they had none.
        """
        return {**super().report(), "warm_start": self.warm_start}

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "warm_start": self.warm_start}

    def _load(self, saved: Mapping[str, Any]) -> None:
        self.clipping.norm = saved.get("norm_of_average")
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

    def beta2(self, tensor: int) -> float:
        """Returns the current beta2 of the tensor's group."""
        return next(group.betas[1] for group in self.groups() if tensor in group.tensors)

    def _eps(self, tensor: int) -> float:
        return next(group.eps for group in self.groups() if tensor in group.tensors)

    def continue_plain(self) -> None:
        """Continues from the state of an Adam that was not distributed, which the wrapped optimizer has loaded."""
        raise NotImplementedError

    def start_warm(self, betas2: Mapping[int, float]) -> None:
        """Continues from Adam's moments of a checkpoint, which the wrapped optimizer has loaded, without dense steps.

        ``betas2`` are the beta2 with which they were computed, by tensor; tensors without moments have none.
        """
        raise NotImplementedError

    def dense_run(self) -> dict[str, Any]:
        """Returns what ``continue_dense`` needs besides moments, in plain values, the same in all parts of a grid."""
        return {"optimizer": self.kind, "steps": self.steps}

    def continue_dense(self, run: Mapping[str, Any], betas2: Mapping[int, float]) -> None:
        """Continues from moments of a run on another grid, which the wrapped optimizer has loaded; errors are zero.

        ``run`` is the result of ``dense_run``. ``betas2`` are the beta2 of v, by tensor, of those tensors that the run
        had taken over.
        """
        del run
        if betas2:
            self.start_warm(betas2)
        else:
            self.continue_plain()

    def _host_steps(self) -> int:
        """Returns the number of steps that the wrapped optimizer has taken."""
        counts = [moments[2] for t in range(self.core.steps.size) if (moments := self.frontend.moments(t)) is not None]
        return max(counts, default=0)

    def _say_warm(self, cold: Sequence[int] | np.ndarray) -> None:
        names = [spec.name for spec in self.core.layout.tensors]
        dense = [names[int(tensor)] for tensor in cold]
        self.warm_start = {"step": self.steps, "tensors": len(names) - len(dense), "dense": dense}
