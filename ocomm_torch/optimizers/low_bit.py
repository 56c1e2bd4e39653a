"""``DistributedOptimizer`` with ``Compression.int8`` or ``int4``: any optimizer, on averages of gradients in codes.

The exchange has a fixed layout, a vote and error feedback, like those of the 1-bit optimizers (``compressed``); hooks
hand gradients over while backward goes on. What the user sees is what ``averaging`` shows: gradients are averages
when ``backward()`` returns, or ``synchronize()`` where backward has not reached every parameter.

Ranks wait for each other at the end of backward, where gradients of several optimizers may have come in different
orders. So they wait for all of them in the order in which the optimizers were made, once backward has ended for all.
That is done for the optimizers of each thread of autograd by itself: the thread that calls backward, or one per GPU. So
several optimizers with parameters on one GPU are to be trained in one thread.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ocomm.errors import InvalidRequestError, NonFiniteError, OcommError
from ocomm.operations import ProcessSet
from ocomm.optim.core import Group
from ocomm.optim.low_bit import LowBitAverages
from ocomm.optim.verdict import StepOutcome
from ocomm.session import Session
from ocomm.training.low_bit import LateLowBitDriver
from ocomm_torch.backward.late_averages import LateAverages
from ocomm_torch.backward.watched import watch
from ocomm_torch.compiling import eager
from ocomm_torch.memory.parameters import gradient_dtype, settings_of
from ocomm_torch.optimizers.compressed import CompressedOptimizer
from ocomm_torch.optimizers.ddp_modules import refuse_averaged
from ocomm_torch.optimizers.replicas import WAYS, way_of
from ocomm_torch.optimizers.wrapped import OF_ANOTHER, STEPPED, check_steps_without_closure, step_without_hooks

TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally. " + OF_ANOTHER
)
AVERAGED_EARLY = (
    "a backward pass has computed the gradient of '{name}' after the averages of this step were made, because a "
    "gradient was used, or synchronize() called, between two backward calls. Use gradients after the last backward "
    "call of a step."
)
CLEARED_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition. To leave a step out, as after a backward pass that raised, "
    "call optimizer.synchronize() first, on all ranks. " + OF_ANOTHER
)

_ordinals = itertools.count()
_living: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class Optimizer(CompressedOptimizer):
    """What ``DistributedOptimizer`` returns with ``Compression.int8`` or ``int4``.

    Gradients are averaged in place. A step is taken on all ranks or on none. The wrapped optimizer makes it, with its
    own arithmetic: on float32 parameters themselves, on float32 masters of bfloat16 and float16 ones.

    Args:
        optimizer: The optimizer to wrap; its ``step`` needs no closure.
        named_parameters: Names the parameters in messages; None names them by position.
        process_set: The ranks that train together.
        bits: Bits per element, 8 or 4.
        backward_passes_per_step: The number of backward passes whose gradients are summed before they are averaged.

    Raises:
        InvalidRequestError: The optimizer or a parameter cannot be wrapped.
        MismatchError: The ranks wrap different things, or compress differently.
        NonFiniteError: In ``step``, on all ranks: a rank's gradient has a NaN or infinity. No state was changed.
    """

    _core_class = LowBitAverages
    _driver_class = LateLowBitDriver
    _driver: LateLowBitDriver
    has_averages = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        process_set: ProcessSet,
        bits: int,
        backward_passes_per_step: int,
    ) -> None:
        check_steps_without_closure(optimizer, "DistributedOptimizer with this compression")
        #: What all ranks do with the averages in the gradients; None while there are none.
        self._agreed: StepOutcome | None = None
        #: Why no rank may step on them.
        self._failure: NonFiniteError | None = None
        #: The hyperparameters of the last step that was taken, and the learning rates among them. The next exchange
        #: compares these, because it ends in backward on ranks that have every gradient, and on others in ``step()``.
        self._stepped_with: tuple[Hashable, list[float]] = (), []
        #: True once ``synchronize`` was called for them, not only backward.
        self._synchronized = False
        self._callback_queued = False
        #: The thread of autograd that has last queued a callback; None before.
        self._thread: int | None = None
        #: True if the averages of this step were made before each parameter had a gradient.
        self._is_early = False
        self._late = LateAverages()
        #: When the last backward pass had computed all gradients; None before it.
        self.backward_ended: float | None = None
        #: True once it is known that nothing else averages the same gradients.
        self._is_checked = False
        self._ordinal = next(_ordinals)
        super().__init__(
            optimizer,
            named_parameters,
            process_set=process_set,
            dense_bits=bits,
            backward_passes_per_step=backward_passes_per_step,
        )
        _living.add(self)

    def _connect(self, session: Session) -> None:
        self._drop_averages()
        self._stepped_with = (), []
        super()._connect(session)

    # For the driver

    def implementation(self) -> str:
        """Returns how the wrapped optimizer's steps round, in words."""
        return way_of(self._inner, self.param_groups)

    def _group(self, number: int, group: dict[str, Any]) -> Group:
        rates = self._stepped_with[1]  # for messages
        return Group(self._group_tensors[number], rates[number] if rates else _rate_of(group))

    def hyper(self) -> Hashable:
        """Returns the numbers in the param groups of the last step, as nested tuples, without those that only choose a
        kernel; () before the first step.
        """
        return self._stepped_with[0]

    # Backward

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        hook = super()._make_hook(index)
        reference = weakref.ref(self)  # the parameter keeps its hook

        def hook_and_wait(parameter: torch.Tensor) -> None:
            optimizer = reference()
            if optimizer is None:
                return
            if optimizer._agreed is not None:
                name = optimizer._names[index]
                raise AssertionError(AVERAGED_EARLY.format(name=name) if optimizer._is_early else TOO_MANY_PASSES)
            optimizer._queue_callback()  # before the hook, which may read watched gradients of an earlier pass
            hook(parameter)
            optimizer._queue_callback()

        return hook_and_wait

    def _queue_callback(self) -> None:
        if not self._callback_queued and self._stepper.begun:
            self._callback_queued = True
            self._thread = threading.get_ident()
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        """Waits for the averages if every gradient is there, because what is missing on other ranks may need this rank
        to go on.
        """
        self._callback_queued = False
        self.backward_ended = time.perf_counter()
        under_way = self._under_way()
        if any(optimizer._callback_queued for optimizer in under_way):
            return
        if all(optimizer._is_complete for optimizer in under_way):
            # An error here would be raised by backward(); step() raises it again.
            with contextlib.suppress(OcommError):
                for optimizer in under_way:
                    optimizer._average()
        else:
            for optimizer in under_way:
                watch(optimizer._gradients.recorded)

    def _under_way(self) -> list[Optimizer]:
        """Returns the optimizers of this job whose exchange has begun, in the order in which they were made. Those of
        other threads are not among them.
        """
        found = [
            other
            for other in list(_living)
            if other._runtime is self._runtime and other._stepper.begun and self._thread in (None, other._thread)
        ]
        return sorted(found, key=lambda optimizer: optimizer._ordinal)

    def _forget(self) -> None:
        super()._forget()
        self._callback_queued = False  # autograd has dropped that of a backward pass that raised

    @property
    def _is_complete(self) -> bool:
        return self._passes.are_over(index for index, p in enumerate(self._parameters) if p.requires_grad)

    def used(self, gradients: Sequence[torch.Tensor]) -> None:
        """Called by ``Watcher``: makes gradients averages before anything else sees or changes them, once backward has
        ended. During backward a change is noticed, and the exchange is made again.
        """
        super().used(gradients)
        own = {id(grad) for grad in self._gradients.recorded if grad is not None}
        if not self._callback_queued and any(id(gradient) in own for gradient in gradients):
            self._late.expect(self._parameters)
            self.synchronize()
            self._late.note(self._parameters)

    # The step

    @eager
    def synchronize(self) -> None:
        """Waits until every gradient is the average over the ranks. Collective over the process set.

        On a rank without a gradient of a parameter it counts as zeros. Where no rank has one, it stays None.

        Raises:
            HorovodInternalError: The exchange failed: MismatchError, StallError or PeerError.
        """
        for optimizer in self._under_way():
            if optimizer._ordinal < self._ordinal:
                optimizer._average()
        self._average()
        self._synchronized = True

    @torch.no_grad()
    def _average(self) -> None:
        if self._agreed is not None:
            return
        self._is_early = not self._is_complete
        if not self._is_checked:
            self._is_checked = True
            refuse_averaged(self._parameters, "DistributedOptimizer")
        if not self._stepper.begun:
            self._begin()
        self._placement.arrive()
        try:
            agreed = self._driver.step(self._gradients.have_changed)
        except NonFiniteError as error:
            # Averages are not finite on any rank then, for a GradScaler to find.
            self._failure, agreed = error, StepOutcome.OVERFLOW
        finally:
            self._forget()
        self._placement.leave()
        if agreed is StepOutcome.TAKE or self._failure is not None:
            for tensor in np.flatnonzero(self._stepper.present_anywhere).tolist():
                self._deliver(tensor)
        self._agreed = agreed

    def _deliver(self, tensor: int) -> None:
        """Writes an average into the gradient, rounded to its type."""
        parameter = self._parameters[tensor]
        flat = self._placement.tensor(self._stepper.average(tensor))
        average = self._orders[tensor].shaped(flat, parameter.shape)
        grad = parameter.grad
        if isinstance(self._inner, torch.optim.SparseAdam):  # accepts only sparse gradients
            parameter.grad = average.to(gradient_dtype(parameter)).to_sparse(1)
        elif grad is None or grad.is_sparse:
            parameter.grad = average.to(gradient_dtype(parameter), copy=True)
        else:
            grad.detach().copy_(average)

    def widen_gradients(self) -> None:
        """Makes gradients averages first, because a GradScaler passes over parameters that have none yet."""
        self.synchronize()
        super().widen_gradients()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Does nothing: ``step()`` never waits for gradients that are averages already."""
        yield

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the averaged gradients, then makes the wrapped optimizer's step, which changes parameters in place.

        Collective over the process set.

        Args:
            closure: Computes the loss and gradients, as in Torch; None for none. It is called once.

        Returns:
            The closure's loss, or None.

        Raises:
            NonFiniteError: A gradient is not finite on some rank; no rank's state was changed.
            HorovodInternalError: The exchange failed: MismatchError, StallError or PeerError.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        self._late.look(lambda p: self._names[[id(q) for q in self._parameters].index(id(p))])
        failure, self.outcome = self._failure, self._agreed
        self._drop_averages()
        if failure is not None:
            raise failure
        if self.outcome is StepOutcome.TAKE:
            self._find_parameters()
            self._placement.arrive()
            self._masters.look()
            self._masters.take()
            self._driver.compare()
            self._step_inner()
        self._inner.__dict__.update(STEPPED)
        return loss

    def _step_inner(self) -> None:
        groups = self.param_groups
        settings = settings_of({key: group[key] for key in group if key not in WAYS} for group in groups)
        self._stepped_with = settings, list(map(_rate_of, groups))
        masters = {index: self._masters.stepped[index] for index in self._masters.indices}
        try:
            with self._masters.standing_in(self._inner):
                for index, master in masters.items():
                    grad = self._parameters[index].grad
                    master.grad = None if grad is None else grad.float()
                step_without_hooks(self._inner)
        except BaseException as error:
            self._driver.interrupted = self._driver.steps, type(error).__name__
            raise
        finally:
            for master in masters.values():
                master.grad = None
        self._masters.write()

    def skip(self, *, overflow: bool = False) -> None:
        """Skips the current step on this rank, so that no rank takes it. ``overflow``: this rank's gradients are not
        finite.
        """
        if self._agreed is None:
            super().skip(overflow=overflow)
            return
        self.outcome = StepOutcome.OVERFLOW if overflow else StepOutcome.SKIP
        self._drop_averages()

    def _drop_averages(self) -> None:
        """Ends the step, whose averages all ranks use, or none."""
        self._agreed = self._failure = None
        self._synchronized = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and leaves the step out for which ``synchronize()`` was called. Raises AssertionError
        between backward and ``step()`` or ``synchronize()``.
        """
        if self._stepper.begun or (self._agreed is not None and not self._synchronized):
            raise AssertionError(CLEARED_EARLY)
        if self._agreed is not None:
            self.skip()
        super().zero_grad(set_to_none)

    # State

    def refuse_reset(self) -> None:
        """Does nothing: the wrapped optimizer keeps the moments."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of ``state_dict``, or a state of the wrapped optimizer's class, with which errors start at
        zero. All ranks load the same state. ``CompressedOptimizer.load_state_dict`` says more.
        """
        super().load_state_dict(state_dict)
        self._drop_averages()
        self._stepped_with = (), []

    def _load_plain(self, plain: dict[str, Any]) -> None:
        self._adopt(plain)
        self._driver.forget()


def _rate_of(group: Mapping[str, Any]) -> float:
    return float(group.get("lr", 0.0))


def wrap(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    process_set: ProcessSet,
    bits: int,
    backward_passes_per_step: int,
    refused: Mapping[str, tuple[bool, str]],
) -> Optimizer:
    """Returns ``optimizer`` as an ``Optimizer``.

    Args:
        optimizer: Wrapped, like the further arguments, as ``Optimizer`` says.
        named_parameters: Names of parameters.
        process_set: The ranks that train together.
        bits: Bits per element.
        backward_passes_per_step: Passes whose gradients are summed.
        refused: By an option of ``DistributedOptimizer``, whether it was given, and what to do instead.

    Raises:
        InvalidRequestError: One of ``refused`` was given.
    """
    for option, (is_given, instead) in refused.items():
        if is_given:
            raise InvalidRequestError(f"{option} does not go with Compression.int{bits}: {instead}")
    return Optimizer(optimizer, named_parameters, process_set, bits, backward_passes_per_step)
