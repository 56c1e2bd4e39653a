"""DiLoCo for Torch: wraps any optimizer, whose steps are each rank's own, and syncs the ranks once in many steps."""

from __future__ import annotations

import contextlib
import copy
import io
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ocomm import session as sessions
from ocomm.compression.layout import TensorSpec
from ocomm.errors import CheckpointError, InvalidRequestError
from ocomm.faces import face
from ocomm.kernels.base import Bytes, Floats
from ocomm.operations import global_process_set
from ocomm.optim.core import Group
from ocomm.optim.diloco import BUFFERS, DiLoCoOptions
from ocomm.optim.grid import Grid
from ocomm.optim.verdict import StepOutcome
from ocomm.training import report
from ocomm.training.common import Common
from ocomm.training.diloco import LACKING, DiLoCoDriver
from ocomm_torch.backward.hooks import unhook
from ocomm_torch.compiling import eager
from ocomm_torch.memory.masters import LOW_PRECISION
from ocomm_torch.memory.parameters import copied, named, settings_of
from ocomm_torch.memory.tensor_memory import why_untrainable
from ocomm_torch.mesh import DataAxis, LocalTensors, chosen_ranks, inside
from ocomm_torch.optimizers import loss_scaling
from ocomm_torch.optimizers.checkpoint import check_plain, numbered_groups, to_numpy, to_torch
from ocomm_torch.optimizers.compressed import ARGUMENTS, remove_hooks
from ocomm_torch.optimizers.rank_states import HasRankState
from ocomm_torch.optimizers.wrapped import (
    STEPPED,
    check_plain_optimizer,
    check_steps_without_closure,
    stand_for_inner,
    step_without_hooks,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_FLOATS = (torch.float32, *LOW_PRECISION)
_SECTIONS = """\
Args:
    {arguments}

Raises:
    InvalidRequestError: The optimizer or a parameter cannot be wrapped.
    SettingsError: An option has an impossible value.
    MismatchError: The ranks wrap different things; in the first ``step``, their parameters differ; at a sync, their
        settings do.
    NonFiniteError: In ``step``, at a sync, on all ranks: a parameter of a rank is not finite. All ranks have
        returned to the anchors, and can go on."""


@face(
    (DiLoCoOptions, Common),
    _SECTIONS,
    LACKING,
    **ARGUMENTS,
    optimizer="Any ``torch.optim.Optimizer`` that can step without a closure, over float32, bfloat16 or float16 "
    "parameters. Its settings are used as they are in each step, so LR schedulers on either object work; all ranks "
    "need the same ones at a sync. Its state is each rank's own.",
    named_buffers="An iterable of (name, buffer), such as ``model.named_buffers()``: "
    + BUFFERS.format(example="a BatchNorm's running means"),
)
class DiLoCo(HasRankState):
    """Local steps that send nothing, and a sync of the ranks once in ``sync_every`` steps (DiLoCo, arXiv 2311.08105).

    Each ``step`` is a step of the wrapped optimizer on this rank's gradients alone. At a sync the ranks average how far
    they have come from the anchor, the parameters of the last sync, and an outer optimizer with Nesterov's momentum
    moves the anchor, on all ranks alike. Between syncs the ranks have different parameters, and exchange neither data
    nor votes: ``evaluation_parameters()`` has the anchors, ``finish()`` ends a run. A step whose gradients are not
    finite changes nothing on its rank, and is counted in ``compression_report()``.

    Making the optimizer, its first step and every step with a sync are collective. All ranks call ``step`` equally
    often. Anchors are in the host's memory, wherever parameters are. A parameter that is frozen during the run still
    moves at syncs, by the outer momentum that it has.
    """

    framework = "torch"
    kernels = None
    _driver: DiLoCoDriver

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        named_buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: Any = None,
        mesh: DeviceMesh | None = None,
        data: str | None = None,
        **arguments: Any,
    ) -> None:
        # What a sync sends cannot change under way: nothing has to be read again.
        chosen, common = DiLoCoOptions.of(arguments), replace(Common.of(arguments), verify="version")
        session = sessions.current()
        session.require_topology()
        check_plain_optimizer(optimizer, "DistributedDiLoCo")
        check_steps_without_closure(optimizer, "DistributedDiLoCo")
        loss_scaling.install()
        self._chosen, self._common = chosen, common
        self._parameters, names = named(optimizer, named_parameters)
        chosen_set = chosen_ranks(process_set, mesh, data)
        self.process_set = global_process_set if chosen_set is None else chosen_set
        axis = chosen_set if isinstance(chosen_set, DataAxis) else None
        self._local = LocalTensors(self._parameters, axis is not None)
        for index, parameter in self._local.inside.items():
            assert axis is not None
            axis.check("DiLoCo", names[index], parameter, needs_whole=False)
        buffers = [(name, buffer) for name, buffer in named_buffers or () if buffer.dtype in _FLOATS]
        self._names = [*names, *(name for name, _ in buffers)]
        #: What is synced: parameters, or the tensors inside those that are DTensors, and after them buffers.
        self._tensors = [*self._local.tensors, *(buffer for _, buffer in buffers)]
        for name, tensor in zip(self._names, self._tensors, strict=True):
            _check_tensor(name, tensor)
        for parameter in self._parameters:  # an optimizer that this one replaces would go on exchanging gradients
            unhook(parameter)
        _check_storage(self._names, self._tensors)
        super().__init__(optimizer)
        self._evaluates = False
        #: What ``reset_inner_state`` returns to: most optimizers have no state before their first step.
        self._first_state = {p: copy.deepcopy(entry) for p, entry in self.state.items() if entry}
        self.grid: Grid | None = None
        if axis is not None:
            grid = axis.grid(session, "DiLoCo", names, self._parameters, self._local)
            # Buffers count in no norm.
            self.grid = grid and replace(grid, counted=(*grid.counted, *[False] * len(buffers)))
        self._connect(session)
        self._handles = stand_for_inner(self, optimizer)
        weakref.finalize(self, remove_hooks, self._handles)

    def _connect(self, session: sessions.Session) -> None:
        """Makes a new driver, which has taken no step, in the current job."""
        specs = [
            TensorSpec(name, tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in zip(self._names, self._tensors, strict=True)
        ]
        buffers = len(self._tensors) - len(self._parameters)
        number = self.process_set.number(session)
        self._driver = DiLoCoDriver(session, number, specs, buffers, self, self._chosen, self._common)
        self._runtime = session.runtime

    def disconnect(self) -> None:
        remove_hooks(self._handles)

    # For the driver

    def implementation(self) -> str:
        """Returns words that say how dense steps round; ours, because there are none of the wrapped optimizer's."""
        return "ocomm"

    def groups(self) -> list[Group]:
        """Returns one group, with the first learning rate, for messages."""
        first = self.param_groups[0].get("lr", 0.0)
        return [Group(np.arange(len(self._tensors)), float(first))]

    def hyper(self) -> Hashable:
        """Returns the numbers in the param groups, as nested tuples."""
        return settings_of(self.param_groups)

    def locate(self, tensors: list[int], final: bool) -> list[int]:
        """Returns the addresses of what is sent of ``tensors``."""
        return self._driver.core.delta_addresses(tensors)

    def read(self, tensor: int) -> Floats:
        """Returns a tensor as it is on this rank: flat float32 in the host's memory, valid until it is written."""
        value, spec = self._tensors[tensor].detach(), self._driver.core.layout.tensors[tensor]
        if tuple(value.shape) != spec.shape:
            raise InvalidRequestError(
                f"'{spec.name}' has shape {tuple(value.shape)} now, and had {spec.shape} when it was wrapped. Wrap a "
                "new optimizer over the new parameters."
            )
        found: Floats = value.to("cpu", torch.float32).contiguous().reshape(-1).numpy()
        return found

    def write(self, tensor: int, values: Floats) -> None:
        """Overwrites a tensor, rounded to its own type."""
        target = self._tensors[tensor].detach()
        target.copy_(torch.from_numpy(values).view(target.shape))

    def inner_state(self) -> Bytes:
        """Returns the wrapped optimizer's state on this rank, as ``torch.save`` writes it.

        A tensor is a pair with whether it is on its parameter's device, and with a third element if it is inside a
        DTensor.
        """
        entries = [
            {key: _saved(value, parameter.device) for key, value in self.state.get(parameter, {}).items()}
            for parameter in self._parameters
        ]
        file = io.BytesIO()
        torch.save(entries, file)
        return np.frombuffer(file.getvalue(), np.uint8).copy()

    def load_inner_state(self, saved: Bytes) -> None:
        """Loads the result of ``inner_state``."""
        try:
            entries = torch.load(io.BytesIO(saved.tobytes()), map_location="cpu", weights_only=True)
        except Exception as error:  # Torch's readers raise many kinds
            reason = str(error).strip().split("\n")[0]
            raise CheckpointError(
                f"the state of the wrapped {type(self._inner).__name__} in the rank state cannot be read: {reason}"
            ) from error
        self.state.clear()
        for index, (parameter, entry) in enumerate(zip(self._parameters, entries, strict=True)):
            if entry:
                self.state[parameter] = {key: self._loaded(value, index) for key, value in entry.items()}

    def _loaded(self, value: Any, index: int) -> Any:
        if not (isinstance(value, tuple) and len(value) in (2, 3) and isinstance(value[0], torch.Tensor)):
            return value
        tensor, is_beside, *is_part = value
        tensor = tensor.to(self._parameters[index].device) if is_beside else tensor
        return self._local.placed(index, tensor) if is_part else tensor

    def reset_inner_state(self) -> bool:
        """Sets the wrapped optimizer's state back to what it was when it was wrapped, if it is not finite."""
        values = [value for entry in self.state.values() for value in entry.values()]
        if all_finite(inside(value) for value in values if isinstance(value, torch.Tensor)):
            return False
        self.state.clear()
        for parameter, entry in self._first_state.items():
            self.state[parameter] = copy.deepcopy(entry)
        return True

    # The step

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step of this rank, and a sync if one is due. Collective at the first step and where a sync is due.

        Args:
            closure: Computes the loss and gradients, as in Torch; None for none. It is called once.

        Returns:
            The closure's loss, or None.

        Raises:
            NonFiniteError: At a sync, on all ranks: a parameter is not finite on some rank. All have returned to the
                anchors; a rank whose optimizer's state is not finite has reset that.
            HorovodInternalError: The sync failed: MismatchError, StallError or PeerError. This rank has returned to
                the anchors.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin("step()")
        is_finite = all_finite(inside(p.grad) for p in self._parameters if p.grad is not None)
        moves = self._driver.may_move(is_finite)
        if moves:
            step_without_hooks(self._inner)
        self._end(moves)
        return loss

    def _begin(self, call: str) -> None:
        self._require_own_parameters(call)
        self._local.follow()
        self._check_groups()
        self._driver.start()

    def _end(self, moved: bool) -> None:
        # The parts of a replica divide their loss scales together: what one passes on has the scale of another.
        skipped = StepOutcome.SKIP if self.grid is None else StepOutcome.OVERFLOW
        self.outcome = StepOutcome.TAKE if moved else skipped
        self._driver.advance(moved)
        self._inner.__dict__.update(STEPPED)

    def skip(self, *, overflow: bool = False) -> None:
        """Counts a step that changes nothing on this rank, as after an overflow of its loss scale. Collective where
        ``step`` is.
        """
        del overflow  # each replica has a loss scale of its own
        self._begin("skip()")
        self._driver.may_move(False)
        self._end(False)

    def widen_gradients(self) -> None:
        """Does nothing: the wrapped optimizer takes gradients as they are."""

    def gradients_changed(self) -> None:
        """Does nothing: gradients are not sent."""

    def finish(self) -> None:
        """Syncs what has changed since the last syncs; all ranks have the anchors as parameters then. Collective.

        Call it on all ranks after the last step, before the model is saved or evaluated. Training may go on after it.

        Raises:
            NonFiniteError: A parameter is not finite on some rank; all ranks have returned to the anchors.
            HorovodInternalError: The sync failed: MismatchError, StallError or PeerError.
        """
        self._begin("finish()")
        self._driver.finish()

    @contextlib.contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        """Within this context the parameters, and buffers that are averaged, are those of the last syncs, the same on
        all ranks; after it they are this rank's own again. Not collective.

        Use it to evaluate the model, or to save its ``state_dict()``.
        """
        self._require_own_parameters("evaluation_parameters()")
        core = self._driver.core
        changed = core.anchored if core.step else []
        kept = [self._tensors[number].detach().clone() for number in changed]
        self._evaluates = True
        try:
            for number in changed:
                self.write(number, core.anchor[core.flat_span(number)])
            yield
        finally:
            for number, value in zip(changed, kept, strict=True):
                self._tensors[number].detach().copy_(value)
            self._evaluates = False

    def _require_own_parameters(self, call: str) -> None:
        if self._evaluates:
            raise InvalidRequestError(
                f"{call} was called inside evaluation_parameters(), where the parameters are not this rank's own; call "
                "it outside."
            )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Returns what the wrapped optimizer would load, plus an entry "ocomm" with anchors and outer momentum, as
        copies.

        "ocomm" is the same on all ranks; the wrapped optimizer's state is this rank's. So one rank saves it;
        ``rank_state_dict`` returns what only this rank has.
        """
        self._require_own_parameters("state_dict()")
        full = dict(super().state_dict())
        full["state"] = {number: copied(entry) for number, entry in full["state"].items()}
        full["param_groups"] = list(map(copied, full["param_groups"]))
        full["ocomm"] = to_torch(self._driver.state())
        return full

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of ``state_dict``, and makes its anchors the parameters. All ranks load the same state.

        Call ``load_rank_state_dict`` after it; without it each rank goes on from the anchors and from the optimizer
        state of the rank that saved. A state without "ocomm" is taken as the wrapped optimizer's, for a run that
        begins.

        Args:
            state_dict: The state. It is not changed.

        Raises:
            CheckpointError: The state is damaged, or of another optimizer, model or schedule; nothing was changed.
            InvalidRequestError: Called while a sync is under way.
        """
        self._require_own_parameters("load_state_dict()")
        self._driver.require_idle("load_state_dict")
        plain = {key: value for key, value in state_dict.items() if key != "ocomm"}
        entries = check_plain(plain, self._group_counts, "the state_dict")
        plain["state"] = {number: copied(entry) for number, entry in entries.items()}
        plain["param_groups"] = numbered_groups(plain)
        saved = state_dict.get("ocomm")
        if saved is not None:
            saved = self._driver.renamed(to_numpy(saved))
            self._driver.check_state(saved)
        super().load_state_dict(plain)
        # The wrapped optimizer's own method adds what states of other releases lack.
        self._inner.__setstate__({"state": self.state, "param_groups": self.param_groups})
        if saved is None:
            self._driver.forget()
        else:
            self._driver.load_state(saved)

    def rank_state_dict(self) -> dict[str, Any]:
        """Returns what only this rank has: its parameters, the wrapped optimizer's state, and errors; tensors and plain
        values, with a checksum.

        Each rank saves its own, at the same step as ``state_dict``.
        """
        self._require_own_parameters("rank_state_dict()")
        return to_torch(self._driver.rank_state())

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[None]:
        self._require_own_parameters("load_rank_state_dict()")
        yield

    @report.documented
    def compression_report(self) -> dict[str, Any]:
        """Returns counts of the steps and bytes of this rank, compared with dense averages in each step.

        Bytes, and steps by kind, are counted from the start of this process. Not collective.

        Returns:
            {entries}
        """
        return self._driver.report()


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Returns True if all elements of floating-point tensors are finite; others are. Waits for devices once."""
    extremes: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        values = tensor.detach()
        values = values._values() if values.is_sparse else values
        if values.is_floating_point() and values.numel():
            extremes.setdefault(values.device, []).extend(each.double() for each in torch.aminmax(values))
    return all(bool(torch.isfinite(torch.stack(found)).all()) for found in extremes.values())


def _saved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    local = inside(value)
    found = local.detach().cpu(), value.device == device
    return found if local is value else (*found, True)


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if reason := why_untrainable(tensor):
        raise InvalidRequestError(
            f"'{name}' {reason}. DistributedDiLoCo syncs plain tensors: give it those, or, for DTensors, the mesh "
            "whose data axis it is to use (mesh=, data=)."
        )
    if tensor.dtype not in _FLOATS:
        raise InvalidRequestError(
            f"parameter '{name}' is {tensor.dtype}; DistributedDiLoCo needs torch.float32, bfloat16 or float16."
        )


def _check_storage(names: list[str], tensors: list[torch.Tensor]) -> None:
    """Raises InvalidRequestError if two names are equal, or two of the tensors begin at the same address."""
    places: dict[Any, str] = {}
    seen: set[str] = set()
    for name, tensor in zip(names, tensors, strict=True):
        if name in seen:
            raise InvalidRequestError(f"two tensors have the name '{name}'; give each a name of its own.")
        seen.add(name)
        other = places.setdefault((tensor.device, tensor.data_ptr()), name) if tensor.numel() else name
        if other != name:
            raise InvalidRequestError(f"'{other}' and '{name}' share memory; give every tensor once.")


DistributedDiLoCo = DiLoCo
