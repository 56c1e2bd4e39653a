"""DistributedOptimizer with op=Adasum: every rank makes the wrapped optimizer's step, and the steps are combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ocomm import operations
from ocomm import session as sessions
from ocomm.errors import HorovodInternalError, OcommError
from ocomm.operations import ProcessSet
from ocomm.types import ReduceOp
from ocomm_torch.compiling import eager
from ocomm_torch.compression import UNCOMPRESSED, Compressor, has_overflowed
from ocomm_torch.memory.naming import NamesParameters
from ocomm_torch.mpi_ops import TORCH
from ocomm_torch.optimizers import loss_scaling
from ocomm_torch.optimizers.wrapped import frozen_error


class AdasumOptimizer(loss_scaling.SharesOverflows, NamesParameters):
    """Mixin of ``DistributedOptimizer``, placed before the class of the user's optimizer.

    Each rank keeps its own optimizer state and gradients; only the change that a step made is combined.
    """

    def _distribute(
        self,
        names: dict[Tensor, str],
        compression: type[Compressor] | Compressor,
        backward_passes_per_step: int,
        process_set: ProcessSet,
    ) -> None:
        self._session = sessions.current()
        self._names = names
        self._compression = compression
        self._process_set = process_set
        self.backward_passes_per_step = backward_passes_per_step
        self._is_distributed = process_set.included() and process_set.size() > 1
        self._is_in_closure = False
        self._dead: HorovodInternalError | None = None  # the error of every step after one that was interrupted
        loss_scaling.install()

    def overflowed_anywhere(self, here: bool) -> bool:
        """Returns True if a GradScaler has found gradients that are not finite on any rank. Collective."""
        if not self._is_distributed:
            return here
        found = torch.tensor([here], device="cpu")
        name = f"adasum.overflow{self._ending}"
        call = operations.Allreduce([found], name, ReduceOp.MAX, process_set=self._process_set, in_place=True)
        operations.allreduce(self._session, TORCH, call).wait()
        return bool(found)

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes the wrapped optimizer's step and replaces it by the Adasum of all ranks' steps, in place.

        Collective over the process set; all its parameters take part, with zeros if the step changed nothing.

        Args:
            closure: Computes the loss again, as in Torch; None for none.

        Returns:
            The closure's loss, or None.

        Raises:
            HorovodInternalError: An exchange failed, and parameters are those before the step; or an earlier step was
                interrupted. The other ranks wait for a rank that was interrupted until no rank can move, or until the
                stall limit.
            InvalidRequestError: A frozen parameter has a gradient.
        """
        if not self._is_distributed:
            return super().step() if closure is None else super().step(closure)
        if self._dead is not None:
            raise HorovodInternalError(*self._dead.args)
        self._name_new()
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        starts = [p.detach().clone() for p in trained]
        if closure is None:
            self._refuse_frozen()
        else:
            closure = self._checked(closure)
        try:
            loss = super().step() if closure is None else super().step(closure)
            self._combine(trained, starts)
        except BaseException as error:
            with torch.no_grad():
                for p, start in zip(trained, starts, strict=True):
                    p.copy_(start)
            if not isinstance(error, OcommError) and not self._is_in_closure:
                self._dead = HorovodInternalError.after_interruption(f"DistributedOptimizer{self._ending}", error)
            raise
        finally:
            self._is_in_closure = False
        return loss

    def _combine(self, trained: Sequence[Tensor], starts: Sequence[Tensor]) -> None:
        """Replaces the change of ``trained`` parameters from ``starts`` by the Adasum of all ranks' changes."""
        started = []
        for p, start in zip(trained, starts, strict=True):
            compressed, context = self._compression.compress(p.detach() - start)
            started.append((self._start(compressed, f"adasum.{self._names[p]}"), context))
        failure = None
        with torch.no_grad():
            for p, start, (operation, context) in zip(trained, starts, started, strict=True):
                try:
                    combined = operation.wait()
                    if has_overflowed(self._compression, [combined], [p]):  # the same on all ranks, in the same order
                        combined = self._start(p - start, f"adasum.{self._names[p]}{UNCOMPRESSED}").wait()
                    else:
                        combined = self._compression.decompress(combined, context)
                    p.copy_(start + combined)
                except OcommError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def _refuse_frozen(self) -> None:
        """Raises InvalidRequestError for a frozen parameter with a gradient, be it zero: each rank has its own momentum
        in the optimizer's state, and the step of a frozen parameter is not combined, because other ranks may make none.
        """
        for p in (p for group in self.param_groups for p in group["params"]):
            if not p.requires_grad and p.grad is not None:
                raise frozen_error(self._names[p])

    def _checked(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def checked_closure() -> Any:
            self._is_in_closure = True
            loss = closure()
            self._is_in_closure = False
            self._refuse_frozen()
            return loss

        return checked_closure

    def _start(self, step: Tensor, name: str) -> operations.Operation:
        call = operations.Allreduce([step], name, ReduceOp.ADASUM, process_set=self._process_set)
        return operations.allreduce(self._session, TORCH, call)

    # Torch wraps step() of every optimizer class to call hooks; that of the wrapped optimizer is wrapped already.
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Does nothing, because gradients are not exchanged."""

    def skip_synchronize(self) -> Any:
        """Raises AssertionError, as in Horovod, because there is nothing to skip."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accepted as in Horovod; gradients of several passes are summed in ``grad`` anyway."""
        self.backward_passes_per_step = passes
