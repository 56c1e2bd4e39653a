"""``torch.amp.GradScaler`` with optimizers whose ranks step together: they skip together, and their scales agree."""

from __future__ import annotations

from typing import Any

import torch

from ocomm.optim.stepper import StepOutcome


class CollectiveStep(torch.optim.Optimizer):
    """An optimizer of which all ranks take a step, or none does."""

    #: What the ranks did when ``step`` or ``skip`` was called last.
    outcome: StepOutcome | None = None

    def skip(self, *, overflow: bool) -> None:
        """This rank does not take the step under way, ``overflow``: because its gradients are not finite."""
        raise NotImplementedError

    def widen_gradients(self) -> None:
        """A loss scale is about to be divided out of the gradients: those in float16 become float32."""
        raise NotImplementedError

    def gradients_changed(self) -> None:
        """They are not what they were when backward handed them over."""
        raise NotImplementedError


class SharesOverflows(torch.optim.Optimizer):
    """An optimizer that all ranks or none must step: a rank that does not would leave the others waiting."""

    def overflowed_anywhere(self, here: bool) -> bool:
        """Has any rank found gradients that are not finite? Collective."""
        raise NotImplementedError


# Before 2.3 there was one for CUDA only, of which the one for CPUs was a subclass.
_GradScaler: Any = torch.amp.GradScaler if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler
_torch_step = _GradScaler.step
_torch_unscale = _GradScaler.unscale_


def install() -> None:
    """From now on ``GradScaler.step`` of an optimizer that ``CollectiveStep`` ends the step on all ranks alike; of one
    that ``SharesOverflows`` it begins it alike.

    A GradScaler looks for overflows in this rank's gradients alone. Where it finds one it does not call the optimizer,
    for which the other ranks wait; where it finds none it does not hear that the step was skipped, and keeps its scale.
    No hook of Torch gives the optimizer a word in either case (``_step_supports_amp_scaling`` would leave unscaling to
    it). To be removed once Torch asks the optimizer whether a step was skipped.

    ``GradScaler.unscale_`` refuses float16 gradients, because what the scale has saved is lost in them when it is
    divided out. Those of an optimizer with float32 masters are widened before. It leaves the versions of gradients as
    they were, so the optimizer is told that they have changed.
    """
    _GradScaler.step = _step
    _GradScaler.unscale_ = _unscale


def _step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    if self.is_enabled() and isinstance(optimizer, SharesOverflows):
        if not self._found_inf_per_device(optimizer):
            self.unscale_(optimizer)
        found = self._found_inf_per_device(optimizer)
        if optimizer.overflowed_anywhere(any(bool(each) for each in found.values())):
            for each in found.values():
                each.fill_(1.0)
    if not (self.is_enabled() and isinstance(optimizer, CollectiveStep)):
        return _torch_step(self, optimizer, *args, **kwargs)
    optimizer.outcome = None
    result = _torch_step(self, optimizer, *args, **kwargs)
    if optimizer.outcome is None:
        optimizer.skip(overflow=True)
    elif optimizer.outcome is StepOutcome.OVERFLOW:
        for found in self._found_inf_per_device(optimizer).values():
            found.fill_(1.0)
    return result


def _unscale(self: Any, optimizer: torch.optim.Optimizer) -> None:
    if not (self.is_enabled() and isinstance(optimizer, CollectiveStep)):
        _torch_unscale(self, optimizer)
        return
    optimizer.widen_gradients()
    _torch_unscale(self, optimizer)
    optimizer.gradients_changed()


_step.__doc__ = _torch_step.__doc__
_unscale.__doc__ = _torch_unscale.__doc__
