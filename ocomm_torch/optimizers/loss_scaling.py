"""Makes ``torch.amp.GradScaler`` work with optimizers whose ranks step together: ranks skip together, and scales
agree.
"""

from __future__ import annotations

from typing import Any

import torch

from ocomm.optim.verdict import StepOutcome


class CollectiveStep(torch.optim.Optimizer):
    """An optimizer of which all ranks take a step, or none does."""

    #: What the ranks did in the last ``step`` or ``skip``.
    outcome: StepOutcome | None = None

    def skip(self, *, overflow: bool) -> None:
        """Skips the current step on this rank. ``overflow``: because its gradients are not finite."""
        raise NotImplementedError

    def widen_gradients(self) -> None:
        """Makes float16 gradients float32, because a loss scale is about to be divided out of them."""
        raise NotImplementedError

    def gradients_changed(self) -> None:
        """Says that gradients have changed since backward handed them over."""
        raise NotImplementedError


class SharesOverflows(torch.optim.Optimizer):
    """An optimizer that all ranks or none must step, because a rank that does not would leave the others waiting."""

    def overflowed_anywhere(self, here: bool) -> bool:
        """Returns True if any rank has found gradients that are not finite. Collective."""
        raise NotImplementedError


class AveragesGradients(torch.optim.Optimizer):
    """An optimizer whose gradients are averages before a scale is divided out of them, and overflow on all ranks."""

    def await_averages(self) -> None:
        """Waits until every gradient is the average, once in each step. Collective."""
        raise NotImplementedError

    def end_step(self) -> None:
        """Says that the step is over: it was made, or skipped."""
        raise NotImplementedError


# Before Torch 2.3 there was a GradScaler for CUDA only, of which that for CPUs was a subclass.
_GradScaler: Any = torch.amp.GradScaler if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler
_torch_step = _GradScaler.step
_torch_unscale = _GradScaler.unscale_


def install() -> None:
    """Patches ``GradScaler.step`` and ``GradScaler.unscale_`` for the optimizers of this module.

    A step of a ``CollectiveStep`` then ends in the same way on all ranks; one that ``SharesOverflows`` begins in the
    same way. One that ``AveragesGradients`` does so before, also on a rank where backward has announced no gradient.

    A GradScaler looks for overflows in this rank's gradients alone. If it finds one it does not call the optimizer, for
    which the other ranks wait. If it finds none it is not told that the step was skipped, and keeps its scale. No hook
    of Torch tells the optimizer in either case (``_step_supports_amp_scaling`` would leave unscaling to it). Remove
    this once Torch asks the optimizer whether a step was skipped.

    ``GradScaler.unscale_`` refuses float16 gradients, because dividing out the scale loses what the scale has saved.
    Gradients of an optimizer with float32 masters are widened before. It does not change the versions of gradients, so
    the optimizer is told that they have changed.
    """
    _GradScaler.step = _step
    _GradScaler.unscale_ = _unscale


def _step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    if not self.is_enabled():
        return _torch_step(self, optimizer, *args, **kwargs)
    if isinstance(optimizer, AveragesGradients):
        optimizer.await_averages()  # a fused optimizer is asked to unscale by itself
    if isinstance(optimizer, SharesOverflows):
        if not self._found_inf_per_device(optimizer):
            self.unscale_(optimizer)
        found = self._found_inf_per_device(optimizer)
        if optimizer.overflowed_anywhere(any(bool(each) for each in found.values())):
            for each in found.values():
                each.fill_(1.0)
    if not isinstance(optimizer, CollectiveStep):
        try:
            return _torch_step(self, optimizer, *args, **kwargs)
        finally:
            if isinstance(optimizer, AveragesGradients):
                optimizer.end_step()
    optimizer.outcome = None
    result = _torch_step(self, optimizer, *args, **kwargs)
    if optimizer.outcome is None:
        optimizer.skip(overflow=True)
    elif optimizer.outcome is StepOutcome.OVERFLOW:
        for found in self._found_inf_per_device(optimizer).values():
            found.fill_(1.0)
    return result


def _unscale(self: Any, optimizer: torch.optim.Optimizer) -> None:
    if self.is_enabled() and isinstance(optimizer, AveragesGradients):
        optimizer.await_averages()
    if not (self.is_enabled() and isinstance(optimizer, CollectiveStep)):
        _torch_unscale(self, optimizer)
        return
    optimizer.widen_gradients()
    _torch_unscale(self, optimizer)
    optimizer.gradients_changed()


_step.__doc__ = _torch_step.__doc__
_unscale.__doc__ = _torch_unscale.__doc__
