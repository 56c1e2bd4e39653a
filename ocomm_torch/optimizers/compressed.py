"""The Torch frontend of all compressed optimizers: addresses of tensors, hooks, param groups.

``ocomm.training`` drives the steps; ``ocomm.optim`` has the algorithms.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import textwrap
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ocomm import session as sessions
from ocomm.compression.layout import TensorSpec
from ocomm.errors import CheckpointError, InvalidRequestError
from ocomm.faces import face
from ocomm.kernels.base import Floats
from ocomm.operations import ProcessSet, global_process_set
from ocomm.optim.core import Core, Group
from ocomm.optim.grid import Grid
from ocomm.optim.verdict import StepOutcome
from ocomm.training import report
from ocomm.training.common import Common
from ocomm.training.driver import Driver
from ocomm.types import Flag
from ocomm_torch.backward.hooks import hook_gradient
from ocomm_torch.backward.passes import CountsPasses, Passes, Verdict
from ocomm_torch.backward.watched import add_watcher
from ocomm_torch.compiling import eager, leave_hooks_alone
from ocomm_torch.memory.gradients import Gradients
from ocomm_torch.memory.masters import Masters
from ocomm_torch.memory.options import MemoryOptions
from ocomm_torch.memory.order import MemoryOrder
from ocomm_torch.memory.parameters import check_parameter, check_storage, copied, dtype_name, named
from ocomm_torch.memory.placement import Placement, offloaded, placement
from ocomm_torch.mesh import DataAxis, LocalTensors, chosen_ranks
from ocomm_torch.optimizers import loss_scaling
from ocomm_torch.optimizers.checkpoint import check_plain, numbered_groups, step_count, to_numpy, to_torch
from ocomm_torch.optimizers.ddp_modules import DDPModule
from ocomm_torch.optimizers.rank_states import HasRankState
from ocomm_torch.optimizers.wrapped import OF_ANOTHER, STEPPED, stand_for_inner

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("ocomm")
#: So many steps that ``zero_grad`` skips are no accident.
_MANY_CLEARED = 3
#: The documentation of arguments that all compressed optimizers have.
ARGUMENTS = {
    "named_parameters": "An iterable of (name, parameter), which names the parameters in messages; None names them by "
    "position.",
    "process_set": "The ranks that train together; None for all ranks of the job.",
    "mesh": "A torch ``DeviceMesh`` of all ranks (``init_device_mesh``), instead of ``process_set``: the ranks along "
    "its axis ``data`` train together, and torch divides the model along the other axes. Parameters are plain or "
    "DTensors; all ranks of the mesh take a step, or none does; a step in which replicas send each other nothing is "
    "taken by all ranks of one replica, or by none. Making the optimizer is collective over the mesh.",
    "data": "The name of the mesh's data axis.",
    "warm_start": (
        "The ``state_dict`` of an Adam or AdamW over the same parameters, or a path to one that ``torch.save`` wrote. "
        "Training continues from its v, its m if there is one, and its step count. Only tensors without moments in it "
        "take dense steps first; its param groups are not used. None: all tensors take dense steps first."
    ),
}


_SECTIONS = """\
{step}

Args:
    {{arguments}}

Raises:
    InvalidRequestError: The optimizer or a parameter cannot be wrapped, or an option has an impossible value.
    MismatchError: The ranks wrap different things.
    NonFiniteError: In ``step``, on all ranks: a rank's gradient has a NaN or infinity.
    SettingsError: An option of the algorithm has an impossible value."""


def optimizer_face(
    core: type[Core],
    *,
    memory: Collection[str] = (),
    step: str = "changes parameters in place, identically on all ranks, or on none",
    **texts: str,
) -> Callable[[Any], Any]:
    """Returns ``face`` for a class of a compressed optimizer.

    Args:
        core: The algorithm.
        memory: Those of ``MemoryOptions`` that it has.
        step: What ``step`` does.
        texts: The documentation of arguments by name.
    """
    lacking = {*core.fixed_options, *MemoryOptions.texts()}.difference(memory)
    whole = textwrap.fill(f"``step`` {step}. Making the optimizer and its steps are collective.", 116)
    sections = _SECTIONS.format(step=whole)
    return face((core.options_class, Common, MemoryOptions), sections, lacking, **{**ARGUMENTS, **texts})


class CompressedOptimizer(HasRankState, CountsPasses):
    """Base class of compressed optimizers: wraps ``optimizer``, whose param groups stay in use, for ``_core_class``.

    Parameters are all CPU tensors, or all on one GPU. They are float32, or bfloat16 or float16 with a float32 master
    (``Masters``), contiguous or dense in another order of their axes, such as channels_last, which is the same on all
    ranks. ``step`` changes them in place, identically on all ranks, or on none: a NaN raises NonFiniteError on all
    ranks. At any time a parameter may be frozen (``requires_grad_(False)``) and thawed, written, and its ``data``
    replaced by a tensor of the same kind; the set of parameters is fixed.

    Raises InvalidRequestError for what cannot be wrapped, MismatchError if the ranks wrap different things.
    """

    framework = "torch"
    trains_on_devices = True
    #: The algorithm, and the driver of its steps.
    _core_class: type[Core]
    _driver_class: type[Driver] = Driver
    #: Options of param groups that would change the step, and that this optimizer does not support.
    refused_options: tuple[str, ...] = ()
    #: Are gradients averages between backward and ``step()``?
    has_averages = False
    #: Does a step use the norms of whole tensors, so that a rank cannot have a part of one?
    needs_whole_tensors = False
    #: Number of bytes per parameter that the state takes on one rank at most, with masters, at the end of the warm-up.
    most_state_nbytes = 36

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        process_set: Any = None,
        mesh: DeviceMesh | None = None,
        data: str | None = None,
        **arguments: Any,
    ) -> None:
        arguments |= self._core_class.fixed_options
        self._options, self._common = self._core_class.options_class.of(arguments), Common.of(arguments)
        memory = MemoryOptions.of(arguments)
        process_set = chosen_ranks(process_set, mesh, data)
        session = sessions.current()
        session.require_topology()
        loss_scaling.install()
        leave_hooks_alone()
        self._parameters, self._names = named(optimizer, named_parameters)
        super().__init__(optimizer)
        axis = process_set if isinstance(process_set, DataAxis) else None
        self._local = LocalTensors(self._parameters, axis is not None)
        #: What is exchanged and stepped: the parameters, and the tensors inside those that are DTensors.
        self._tensors = self._local.tensors
        self._check_parameters(axis)
        self._orders = [MemoryOrder(p) for p in self._tensors]
        self._placement = self._place(session, memory)
        if self._placement.offloads:  # as on a device: the host would have to wait to read a gradient again
            self._common = replace(self._common, verify="version")
        #: The kernels of the driver's core.
        self.kernels = self._placement.kernels
        groups = np.array(self._group_of, np.int64)
        self._group_tensors = [np.flatnonzero(groups == number) for number in range(len(self.param_groups))]
        self._masters = Masters(self._tensors, self._placement, self._parameters)
        self._has_masters = any(m is not p for m, p in zip(self._masters.stepped, self._tensors, strict=True))
        self._gradients = Gradients(
            self._names, self._tensors, self._orders, self._masters, self._placement, memory.free_gradients
        )
        self.locate = self._gradients.locate
        self._passes = Passes(self._common.backward_passes_per_step, range(len(self._parameters)))
        #: Number of steps that ``zero_grad`` has skipped.
        self._cleared = 0
        self._ddp = DDPModule(self._parameters, f"Distributed{type(self).__name__}")
        self.groups()  # raises for options that would be ignored
        self.process_set: ProcessSet = global_process_set if process_set is None else process_set
        self.grid: Grid | None = None
        if axis is not None:
            self.grid = axis.grid(session, type(self).__name__, self._names, self._parameters, self._local)
        #: Addresses of the parameters, and what keeps their memory alive while an exchange may read it.
        self._addresses: list[int] = []
        self._held: list[torch.Tensor] = []
        self._connect(session)
        #: Parameters without a hook, because a frozen one cannot have any.
        self._unhooked = list(range(len(self._parameters)))
        self._handles = stand_for_inner(self, optimizer)
        weakref.finalize(self, remove_hooks, self._handles)
        self._hook_parameters()
        add_watcher(self)

    def _check_parameters(self, axis: DataAxis | None) -> None:
        """Raises InvalidRequestError for a parameter that this optimizer cannot train."""
        for index, parameter in self._local.inside.items():
            assert axis is not None
            axis.check(type(self).__name__, self._names[index], parameter, self.needs_whole_tensors)
        for name, tensor in zip(self._names, self._tensors, strict=True):
            self._check_parameter(name, tensor)

    def _place(self, session: sessions.Session, memory: MemoryOptions) -> Placement:
        """Returns where parameters and state are. Raises InvalidRequestError if this optimizer cannot train there."""
        assert session.kernels is not None
        place = placement(self._names, self._tensors, session)
        check_storage(self._names, self._tensors)
        memory.check(f"Distributed{type(self).__name__}", self._common, place.is_device, bool(self._local.inside))
        nbytes = self.most_state_nbytes * sum(tensor.numel() for tensor in self._tensors)
        chosen = offloaded(place, memory.offload, session.kernels, self._tensors, nbytes)
        if chosen.is_device and not self.trains_on_devices:
            raise InvalidRequestError(
                f"Distributed{type(self).__name__} makes its steps in the host's memory only, and "
                f"'{self._names[0]}' is on {self._tensors[0].device}: pass offload=True."
            )
        return chosen

    def _connect(self, session: sessions.Session) -> None:
        """Makes a new driver, which has taken no step, in the current job."""
        specs = [
            TensorSpec(name, tuple(p.shape), order.name, dtype_name(p))
            for name, p, order in zip(self._names, self._tensors, self._orders, strict=True)
        ]
        number = self.process_set.number(session)
        self._driver = self._driver_class(session, number, specs, self, self._core_class, self._options, self._common)
        self._stepper = self._driver.stepper
        self._gradients.connect(self._driver)
        if self._gradients.frees and not self._placement.offloads:
            self._stepper.keeps_gradients = self._stepper.looks_at_gradients = False
        gradients = self._gradients
        self._driver.core.borrowed += [
            self._placement, gradients.recorded, gradients.copies, self._held, self._masters
        ]  # fmt: skip
        self._runtime = session.runtime
        self._addresses = []
        self._find_parameters()

    def disconnect(self) -> None:
        remove_hooks(self._handles)

    # The current parameters

    def _find_parameters(self) -> None:
        """Finds the addresses of parameters. Raises InvalidRequestError if they are not those that were wrapped."""
        if self._local.inside:
            self._local.follow()
        now = [p for group in self.param_groups for p in group["params"]]
        counts = [len(group["params"]) for group in self.param_groups]
        addresses = [p.data_ptr() for p in self._tensors]
        # A comparison of lists would ask tensors that differ whether their elements are equal.
        is_same = counts == self._group_counts and all(map(operator.is_, now, self._parameters))
        if is_same and addresses == self._addresses:
            return
        self._check_groups()
        specs = self._driver.core.layout.tensors
        for name, parameter, spec in zip(self._names, self._tensors, specs, strict=True):
            self._check_parameter(name, parameter)
            if tuple(parameter.shape) != spec.shape:
                raise InvalidRequestError(
                    f"parameter '{name}' has shape {tuple(parameter.shape)} now, and had {spec.shape} when it was "
                    "wrapped. " + self._fixed
                )
            if dtype_name(parameter) != spec.dtype:
                raise InvalidRequestError(
                    f"parameter '{name}' is {dtype_name(parameter)} now, and was {spec.dtype} when it was wrapped. "
                    + self._fixed
                )
            if (order := MemoryOrder(parameter).name) != spec.order:
                raise InvalidRequestError(
                    f"the elements of parameter '{name}' lie in memory in the order {order} now, and lay in the order "
                    f"{spec.order} when it was wrapped: change the memory format of a model before. " + self._fixed
                )
        if self._stepper.begun and self._driver.is_decay_coupled:
            self._object_to_posted()  # and what they have read lives on
        else:
            self._held.clear()
        self._held += [p.detach() for p in self._tensors]
        self._addresses = addresses
        self._driver.core.tensors["param"] = [tensor.data_ptr() for tensor in self._masters.stepped]

    def _check_parameter(self, name: str, parameter: torch.Tensor) -> None:
        check_parameter(type(self).__name__, name, parameter)

    # For the driver

    def implementation(self) -> str:
        """Returns words that say how dense steps round; ours if no step is the wrapped optimizer's own."""
        return "ocomm"

    def groups(self) -> list[Group]:
        """Returns the current param groups. Raises InvalidRequestError if one has an option that would be ignored."""
        for group in self.param_groups:
            for option in self.refused_options:
                if option in group and group[option]:  # noqa: RUF019, get() would be a call in a hook
                    raise InvalidRequestError(
                        f"Distributed{type(self).__name__} does not support {option}={group[option]!r}; leave it out."
                    )
        return [self._group(number, group) for number, group in enumerate(self.param_groups)]

    def _group(self, number: int, group: dict[str, Any]) -> Group:
        raise NotImplementedError

    def flat(self, index: int, tensor: torch.Tensor) -> Floats:
        """Returns the elements of a float32 tensor, which has the memory order of parameter ``index``, in the order of
        the wire.
        """
        return self._placement.flat(self._orders[index].flat(tensor))

    def shaped(self, index: int, flat: Floats) -> np.ndarray:
        """Returns an array of the host with the shape of parameter ``index``, contiguous, from its elements in the
        order of the wire.
        """
        shape = self._tensors[index].shape
        return self._orders[index].shaped(torch.from_numpy(flat), shape).contiguous().numpy()

    # Gradients

    def _hook_parameters(self) -> None:
        """Adds hooks to parameters that are trained and have none yet."""
        for index in [i for i in self._unhooked if self._parameters[i].requires_grad]:
            self._unhooked.remove(index)
            self._handles.append(hook_gradient(self._parameters[index], self._make_hook(index)))

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # The parameter keeps its hook, which must not keep this optimizer and its buffers alive.
        is_inside = index in self._local.inside
        hook = partial(_on_local_gradient if is_inside else _on_gradient, weakref.ref(self), index)
        place = self._placement

        def hook_on_device(parameter: torch.Tensor) -> None:
            if place.is_captured:  # replays compute it without calling hooks, so step() finds it
                return
            place.note()  # autograd may have summed each gradient on another stream
            hook(parameter)

        return hook_on_device if place.is_device or place.offloads else hook

    def _begin(self, early: bool = False) -> None:
        """Begins a step. ``early``: before ``step()``, until which only a coupled decay reads parameters."""
        counts = [len(group["params"]) for group in self.param_groups]
        if early and (self._driver.is_at_start or self._driver.is_decay_coupled or counts != self._group_counts):
            self._find_parameters()
        self._placement.arrive()
        if self._unhooked:
            self._hook_parameters()
        self._stepper.buckets.expected = [p.requires_grad for p in self._parameters]
        self._driver.begin(early)

    def _take_written(self) -> None:
        """Copies to masters what the script has written to their parameters.

        Called where the step ends, on all ranks. Until then the script may have other values in them, such as noise for
        backward.
        """
        self._masters.look()
        is_read = self._driver.is_at_start or any(group.coupled_decay for group in self._driver.groups())
        if self._placement.is_device and not is_read:
            return  # the host would wait for all that Torch has queued; ``Driver.step`` takes them later
        if self._masters.take():
            self._object_to_posted()

    def _follow(self) -> None:
        """Copies to masters what was written to their parameters, before a state is saved."""
        if self._masters.follow():
            self._object_to_posted()

    def _object_to_posted(self) -> None:
        """Says that parameters have changed, which posted gradients were compressed with if decay is coupled."""
        if self._stepper.begun and self._driver.is_decay_coupled and self._stepper.buckets.posted_tensors:
            self._stepper.object(Flag.CHANGED)

    def _unexpected(self, index: int, parameter: torch.Tensor) -> None:
        """Handles more backward passes than expected: of the same step, or of the next one after a step that never
        came.
        """
        self._gradients.require_freed()
        if self._gradients.recorded[index] is not parameter.grad:
            self.skip()
            _on_gradient(weakref.ref(self), index, parameter)
        elif self._stepper.buckets.is_posted(index):
            self._stepper.object(Flag.UNPOSTED)

    def used(self, gradients: Sequence[torch.Tensor]) -> None:
        """Called by ``Watcher``."""
        self._gradients.used(gradients)

    def left_by_ddp(self, parameters: Sequence[torch.Tensor]) -> None:
        """Takes over the gradients of a bucket from DDP. Called in backward, once for each bucket.

        Raises InvalidRequestError if this optimizer does not have one of the parameters, or releases gradients.
        """
        if self._gradients.frees:
            raise InvalidRequestError(
                f"{self._driver.name}: free_gradients=True cannot release what DDP keeps in buckets of its own. Leave "
                "free_gradients out, or DDP: the optimizer averages without it."
            )
        self._ddp.take(parameters, self._gradients.follow_ddp)

    # The step

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step on all ranks. Collective.

        Args:
            closure: Computes the loss and gradients, as in Torch; None for none.

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
        if self._local.inside and self._local.take_gradients():
            self.gradients_changed()
        if self._gradients.frees:
            self._gradients.require_freed()
        if self._stepper.begun and self._placement.offloads:
            self._gradients.post_copies()
        self._find_parameters()
        self._placement.arrive()  # work that Torch has queued since the last hook may read what will be written
        if self._has_masters:
            self._take_written()
        if self._gradients.decayed.noted and self._gradients.decayed.have_changed():
            self._object_to_posted()
        if not self._stepper.begun:
            self._begin()
        before_take = self._masters.take if self._has_masters else None
        try:
            self.outcome = self._driver.step(self._gradients.have_changed, before_take)
            self._placement.leave()
            if self._has_masters and self.outcome is StepOutcome.TAKE:
                self._masters.write()
        finally:
            self._forget()
        self._inner.__dict__.update(STEPPED)
        return loss

    @property
    def has_begun(self) -> bool:
        """True if backward has begun a step that was neither taken nor skipped."""
        return self._stepper.begun

    # Horovod's calls that this optimizer cannot have

    def synchronize(self) -> None:
        """Raises InvalidRequestError: there are no averaged gradients between backward and ``step()``."""
        raise self._without_averages("synchronize()")

    def skip_synchronize(self) -> Any:
        """Raises InvalidRequestError: ``step()`` is the exchange, which cannot be left out."""
        raise self._without_averages("skip_synchronize()")

    def _without_averages(self, call: str) -> InvalidRequestError:
        kind = type(self).__name__
        return InvalidRequestError(
            f"{call}: Distributed{kind} exchanges compressed values in step(), so there are no averaged gradients to "
            f"wait for. For clipping write Distributed{kind}(..., max_grad_norm=LIMIT) instead of synchronize() and "
            "clip_grad_norm_(); for a GradScaler write scaler.step(optimizer) alone."
        )

    def _forget(self) -> None:
        self._gradients.forget()
        if self._local.inside:
            self._local.forget()
        self._passes.left.update(self._passes.first)  # restart(), without a call of Python's

    def skip(self, *, overflow: bool = False) -> None:
        """Skips the current step on this rank, so that no rank takes it. ``overflow``: this rank's gradients are not
        finite.
        """
        if self._local.inside:
            self._local.take_gradients()  # others wait for this rank in step(), where torch adds up partial sums
        self._find_parameters()
        self._placement.arrive()
        if self._has_masters:
            self._take_written()  # the vote compares them
        if not self._stepper.begun:
            self._begin()
        try:
            self.outcome = self._driver.skip(overflow)
        finally:
            self._forget()

    @property
    def max_grad_norm(self) -> float | None:
        """The norm, of all ranks' gradients, to which this optimizer clips them; None if it does not clip."""
        return self._common.max_grad_norm

    @property
    def grad_norm(self) -> float | None:
        """The norm of the average by which the last step was clipped; None if none was yet."""
        return self._driver.clipping.norm

    def widen_gradients(self) -> None:
        """Makes float16 gradients float32, now and in all later steps. Called by a GradScaler, which will divide its
        scale out of them.
        """
        if self._gradients.frees:
            raise InvalidRequestError(
                f"{self._driver.name}: free_gradients=True releases gradients during backward, and a GradScaler would "
                "divide its scale out of them after it. Use bfloat16 without a GradScaler, or leave free_gradients out."
            )
        for index in self._local.inside:
            if self._tensors[index].dtype is torch.float16:
                raise InvalidRequestError(
                    f"parameter '{self._names[index]}' is a float16 DTensor, whose gradients a GradScaler would divide "
                    "in float16, which loses the small ones. Keep the parameters in float32 (MixedPrecisionPolicy of "
                    "fully_shard computes in float16), or use bfloat16 without a GradScaler."
                )
        self._masters.widen_float16()

    def gradients_changed(self) -> None:
        """Says that posted gradients have changed, so that ``step()`` exchanges them again."""
        self._gradients.note_change()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients. Between the last backward pass of a step and ``step()`` this also skips the step, on
        all ranks. After an earlier pass (``backward_passes_per_step``, ``no_sync``) it ends the passes of this rank
        alone: call ``skip()`` before it if the other ranks are to skip the step, too.
        """
        if self._stepper.begun:
            self.skip()
            self._cleared += 1
            if self._cleared == _MANY_CLEARED and self._driver.is_first:
                _log.warning(
                    "%s: zero_grad() has cleared %d steps that backward had begun. Their gradients were "
                    "exchanged for nothing. %s",
                    self._driver.name,
                    self._cleared,
                    OF_ANOTHER,
                )
        self._forget()  # the backward passes of a step that is skipped
        super().zero_grad(set_to_none)

    # State

    def refuse_reset(self) -> None:
        core = self._driver.core
        if not (core.steps.any() or (core.sharded is not None and core.sharded.steps.any())):
            return
        begin = f"wrap a new {type(self._inner).__name__} over the same parameters, on all ranks"
        if type(self)._load_plain is not CompressedOptimizer._load_plain:
            begin = (
                "call optimizer.load_state_dict({'state': {}, 'param_groups': optimizer.state_dict()['param_groups']}) "
                "on all ranks"
            )
        raise InvalidRequestError(
            f"{self._driver.name} keeps moments itself, so replacing or clearing optimizer.state would not reset them. "
            f"To begin them anew, with the errors of compression and any warm-up, {begin}."
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns what the wrapped optimizer would load, plus an entry "ocomm" of tensors and plain values, as copies.

        It is the same on all ranks (for optimizers that step locally: that of the last sync), so one rank saves it.
        ``rank_state_dict`` returns what only this rank has. The masters are ``["ocomm"]["masters"]``, by name.
        ``state_dict()`` of the wrapped optimizer returns the same.
        """
        self._find_parameters()
        self._placement.arrive()
        self._follow()
        full = dict(super().state_dict())
        state = full["state"] = {number: copied(entry) for number, entry in full["state"].items()}
        full["param_groups"] = list(map(copied, full["param_groups"]))
        # Parameters are numbered as here: group by group, each once.
        for tensor, parameter in enumerate(self._tensors):
            moments = self._driver.saved_moments(tensor)
            if moments is not None:
                entry = state[tensor] = to_torch(moments)
                for name, value in entry.items():
                    is_step = not isinstance(value, torch.Tensor)
                    order = self._orders[tensor]
                    entry[name] = step_count(value) if is_step else order.shaped(value, parameter.shape)
        full["ocomm"] = to_torch(self._driver.state(self._masters.indices))
        return full

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of ``state_dict``. All ranks load the same state.

        Load the parameters before it, and call ``load_rank_state_dict`` after it; until then errors are zero. A state
        without masters starts them from the parameters. If a parameter is not the rounded saved master, the parameter
        is used.

        Args:
            state_dict: The state. It is not changed.

        Raises:
            CheckpointError: The state is damaged, or of another optimizer, model or seed; nothing was changed.
            InvalidRequestError: Called between backward and ``step()``.
        """
        self._driver.require_idle("load_state_dict")
        self._find_parameters()
        plain = {key: value for key, value in state_dict.items() if key != "ocomm"}
        saved = state_dict.get("ocomm")
        if saved is not None:
            saved = self._driver.renamed(to_numpy(saved))
            self._driver.check_place(saved)
            plain["state"] = self._without_shards(plain.get("state", {}), saved)
        plain["state"] = {number: copied(entry) for number, entry in self._check_plain(plain).items()}
        plain["param_groups"] = numbered_groups(plain)
        if saved is None:
            self._load_plain(plain)
            self._masters.restart()
            return
        self._driver.check_state(saved)
        for tensor in self._driver.taken_over(saved):
            if tensor not in plain["state"]:
                raise CheckpointError(f"the state_dict is not whole: it has no moments of '{self._names[tensor]}'.")
        self._adopt(plain)
        masters = to_torch(saved.get("masters", {}))
        with self._borrowed():
            self._masters.load({index: masters[self._names[index]] for index in self._masters.indices})
            self._driver.load_state(saved)

    def _without_shards(self, state: Any, saved: Mapping[str, Any]) -> Any:
        """Returns a saved state of the wrapped optimizer without the entries of tensors whose moments are elsewhere."""
        del saved
        return state

    def _check_plain(self, plain: Mapping[str, Any]) -> dict[int, Any]:
        """Returns the entries of the wrapped optimizer's state by number. Raises CheckpointError if it cannot be
        loaded.
        """
        return check_plain(plain, [len(group["params"]) for group in self.param_groups], "the state_dict")

    def _load_plain(self, plain: dict[str, Any]) -> None:
        """Continues from the state of an optimizer that is not distributed."""
        raise CheckpointError(
            f"the state_dict has no entry 'ocomm', so it is not of {type(self).__name__}, which cannot go on from "
            "another optimizer's state. Load the model's parameters alone."
        )

    def _adopt(self, plain: dict[str, Any]) -> None:
        """Loads the state of the wrapped optimizer, which is that of this one, too."""
        with self._masters.standing_in(self):  # Torch casts moments to the dtype of their parameters
            super().load_state_dict(plain)
        # The wrapped optimizer's own method adds what states of other releases lack.
        self._inner.__setstate__({"state": self.state, "param_groups": self.param_groups})
        self._arrange_state()

    def _arrange_state(self) -> None:
        """Gives the wrapped optimizer's tensors the memory order of their parameters."""
        for parameter, tensor, order in zip(self._parameters, self._tensors, self._orders, strict=True):
            for name, value in self.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                    self.state[parameter][name] = self._placement.kept(order.arranged(value))
                elif isinstance(value, torch.Tensor) and self._placement.offloads:  # a step count of a fused Adam
                    self.state[parameter][name] = value.cpu()

    def rank_state_dict(self) -> dict[str, Any]:
        """Returns what only this rank has, errors and local moments: tensors and plain values, with a checksum.

        Each rank saves its own, at the same step as ``state_dict``.
        """
        self._find_parameters()
        self._placement.arrive()
        self._follow()
        return to_torch(self._driver.rank_state())

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[None]:
        """Lets ocomm write to parameters and masters inside the context: after all that the script has queued and
        written, and before what it will queue.
        """
        self._find_parameters()
        self._placement.arrive()
        self._masters.follow()
        yield
        self._placement.leave()
        self._masters.write()

    @report.documented
    def compression_report(self) -> dict[str, Any]:
        """Returns counts of the steps and bytes of this rank, compared with dense averages, and the stage of the run.

        Bytes, and steps by kind, are counted from the start of this process. Not collective.

        Returns:
            {entries}
        """
        found = self._driver.report()
        own = {**self._masters.memory(), **self._placement.memory()}
        return {**found, "memory_bytes": {**found["memory_bytes"], **own}}


def report_metrics(optimizer: CompressedOptimizer, prefix: str = "ocomm/") -> dict[str, float]:
    """Returns the numbers of ``compression_report()`` for a logger of metrics. Not collective.

    ``wandb.log(report_metrics(optimizer))`` and ``mlflow.log_metrics(report_metrics(optimizer), step)`` take all of
    them; TensorBoard's ``writer.add_scalar(name, value, step)`` takes one at a time.

    Args:
        optimizer: A 1-bit optimizer.
        prefix: Put before each name.

    Returns:
        Numbers by name; entries that are None or no number are left out, ``memory_bytes`` is a sum.
    """
    return report.metrics(optimizer.compression_report(), prefix)


def _on_gradient(reference: weakref.ref[CompressedOptimizer], index: int, parameter: torch.Tensor) -> None:
    """Counts the gradient of parameter ``index``, and hands it over after the last pass. A hook of backward."""
    optimizer = reference()
    if optimizer is None:
        return
    ddp = optimizer._ddp
    if not ddp.is_known:
        ddp.find(optimizer)
    module: Any = ddp.reference and ddp.reference()  # without a call of Python's, which a hook has no time for
    passes = optimizer._passes
    holds = passes.holds or (module is not None and not module.require_backward_grad_sync)
    passes.left[index], verdict = passes.moves[holds][passes.left[index]]
    if verdict is not Verdict.POST:
        if verdict is Verdict.EXTRA:
            optimizer._unexpected(index, parameter)
        return
    stepper = optimizer._stepper
    if not stepper.begun:
        optimizer._begin(early=True)
    optimizer._gradients.recorded[index] = parameter.grad
    stepper.buckets.mark_ready(index)
    if not stepper.keeps_gradients:
        optimizer._gradients.drop_read()


def _on_local_gradient(reference: weakref.ref[CompressedOptimizer], index: int, parameter: torch.Tensor) -> None:
    """The hook of parameter ``index``, a DTensor. A partial sum is left to ``step()``."""
    optimizer = reference()
    if optimizer is not None and optimizer._local.take_gradient(index, final=False):
        _on_gradient(reference, index, optimizer._tensors[index])


def remove_hooks(handles: list[Any]) -> None:
    """Removes the hooks of ``handles``."""
    for handle in handles:
        handle.remove()
