"""DistributedOptimizer: wraps a Torch optimizer so that it steps on averages (``ocomm_torch.optimizers.averaging``)."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ocomm import as_horovod
from ocomm import session as sessions
from ocomm.api import Average, broadcast_object
from ocomm.errors import InvalidRequestError
from ocomm.operations import ProcessSet, global_process_set
from ocomm.optim.grid import Grid
from ocomm.types import ReduceOp
from ocomm_torch.backward.hooks import unhook
from ocomm_torch.compiling import leave_hooks_alone
from ocomm_torch.compression import CodesCompressor, Compression, Compressor, OneBitCompressor, is_kind
from ocomm_torch.memory.naming import NamesParameters, names_of
from ocomm_torch.mesh import DataAxis, LocalTensors, chosen_ranks
from ocomm_torch.optimizers import low_bit
from ocomm_torch.optimizers.adasum import AdasumOptimizer
from ocomm_torch.optimizers.averaging import AveragingGridOptimizer, AveragingOptimizer, check_averaged
from ocomm_torch.optimizers.loss_scaling import CollectiveStep
from ocomm_torch.optimizers.rank_states import require_optimizer
from ocomm_torch.optimizers.wrapped import STEPPED, StepGuard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Horovod's name for what ``DistributedOptimizer`` returns, which scripts annotate with and ask for by ``isinstance``.
_DistributedOptimizer = AveragingOptimizer


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    mesh: DeviceMesh | None = None,
    data: str | None = None,
) -> Any:
    """Makes ``optimizer`` step on gradients that are averaged over the ranks of ``process_set``.

    Exchanges overlap with backward. Gradients are averaged in place. They are complete when ``backward()`` returns if
    every parameter got one, so ``clip_grad_norm_`` and ``GradScaler`` need nothing special; a parameter without a
    gradient on this rank counts as zeros. Parameters may be frozen and thawed, and param groups added, at any time, on
    all ranks alike. Steps are collective over the process set.

    Args:
        optimizer: Any Torch optimizer that does not communicate by itself.
        named_parameters: (name, parameter) for every parameter of the optimizer; None names them by position.
        compression: A class of ``Compression`` other than ``Compression.onebit``, or a ``Compressor`` of yours, a
            class or an object. With ``int8`` and ``int4`` making the optimizer is collective, and what it returns has
            rank states: below.
        backward_passes_per_step: The number of backward passes whose gradients are summed before they are averaged.
        op: Average, Sum or Adasum. With Adasum the wrapped optimizer steps on this rank's own gradients, and the
            changes of the steps are combined; ``groups`` and ``sparse_as_dense`` then have no effect.
        gradient_predivide_factor: Divides gradients before the sum; the rest of the average is applied after it.
        num_groups: Horovod's older name for a number of ``groups``.
        groups: A number of groups, or lists of parameters; a group is exchanged only when it is complete.
        sparse_as_dense: Makes sparse gradients dense instead of gathering them. SparseAdam, which accepts only sparse
            ones, gets the averages as sparse gradients again.
        process_set: The ranks that train together.
        mesh: A torch ``DeviceMesh`` of all ranks (``init_device_mesh``), instead of ``process_set``: the ranks along
            its axis ``data`` train together, and torch divides the model along the other axes. Parameters are plain or
            DTensors. Averages are complete when a gradient is used, or in ``step()``; a GradScaler skips a step in all
            parts of the model. Making the optimizer is collective over the mesh.
        data: The name of the mesh's data axis.

    ``Compression.int8`` and ``int4`` send gradients as whole numbers with a scale for every 128 elements, and keep what
    that loses for the next step (docs/algorithms.md). Then parameters are float32, bfloat16 or float16, ``op`` is
    Average, ``groups`` is not given, sparse gradients are made dense, and param groups cannot be added; a parameter
    without a gradient on all ranks keeps None. ``step()`` raises NonFiniteError on all ranks for a NaN or infinity on
    one. ``rank_state_dict()`` has what only this rank has, ``load_rank_state_dict()`` loads it after
    ``load_state_dict()``.

    Returns:
        An optimizer of a subclass of the optimizer's class with the same name. It shares its param groups and state, so
        schedulers and checkpoints of either fit both. With ``Compression.int8`` and ``int4`` it is of another class,
        like that of the 1-bit optimizers.

    Raises:
        InvalidRequestError: An argument cannot be right (a ValueError). Later ``step()`` and ``synchronize()`` raise
            HorovodInternalError if an exchange failed.
    """
    require_optimizer(optimizer, "DistributedOptimizer")
    if is_kind(compression, OneBitCompressor):
        compression.compress(optimizer.param_groups[0]["params"][0])  # raises, and says what to use instead
    _check_wrappable(optimizer)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise InvalidRequestError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise InvalidRequestError("backward_passes_per_step must be > 0")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        if groups is None:
            groups = num_groups
    chosen_set = chosen_ranks(None if process_set is global_process_set else process_set, mesh, data)
    process_set = global_process_set if chosen_set is None else chosen_set
    axis = process_set if isinstance(process_set, DataAxis) else None
    if axis is not None and op == ReduceOp.ADASUM:
        raise InvalidRequestError(
            "op=Adasum with mesh=: it combines steps by inner products of whole tensors, of which a rank of a grid may "
            "have a part. Use Average."
        )
    if is_kind(compression, CodesCompressor) and process_set.included():
        refused = {
            f"op={_name_of(op)}": (op != Average, "codes are averaged, so leave op= out."),
            "mesh=": (axis is not None, "codes travel between replicas of plain tensors, so leave mesh= out."),
            "groups": (groups is not None, "its buckets have a fixed order, so leave groups= out."),
        }
        passes = backward_passes_per_step
        bits = cast(type[CodesCompressor], compression).bits
        return low_bit.wrap(optimizer, named_parameters, process_set, bits, passes, refused)
    leave_hooks_alone()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ending = _ending(process_set)
    names = {p: name + ending for p, name in names_of(parameters, named_parameters).items()}
    for p, name in names.items():
        check_averaged(name, p, axis)
        unhook(p)  # this rank may need no hook of its own, or none yet, and an optimizer before would go on averaging
    grid = None if axis is None else _grid(axis, parameters, names)
    chosen = _groups(groups, parameters, names, process_set)
    if op == ReduceOp.ADASUM:
        wrapped = _subclassed(optimizer, AdasumOptimizer, ending)
        wrapped._distribute(names, compression, backward_passes_per_step, process_set)
        _follow_steps(optimizer, wrapped)
        return wrapped
    wrapped = _subclassed(optimizer, AveragingOptimizer if grid is None else AveragingGridOptimizer, ending)
    wrapped._distribute(
        names,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        chosen,
        sparse_as_dense,
        process_set,
        grid,
    )
    _follow_steps(optimizer, wrapped)
    return wrapped


def _check_wrappable(optimizer: torch.optim.Optimizer) -> None:
    """Raises InvalidRequestError for an optimizer that communicates already."""
    if isinstance(optimizer, CollectiveStep):
        raise InvalidRequestError(
            f"Distributed{type(optimizer).__name__} averages by itself; leave DistributedOptimizer out."
        )
    if isinstance(optimizer, NamesParameters):
        raise InvalidRequestError(f"this {type(optimizer).__name__} is distributed already; wrap it once.")


def _grid(axis: DataAxis, parameters: Sequence[Tensor], names: Mapping[Tensor, str]) -> Grid | None:
    """Returns this rank's place in the grid of ``axis``; None if that is the only axis. Collective over the mesh."""
    local = LocalTensors(parameters, is_mesh=True)
    return axis.grid(sessions.current(), "Optimizer", [names[p] for p in parameters], parameters, local)


#: The classes in use that ``_subclassed`` has made. Loggers and profilers tell optimizers of one kind by their class.
_made: WeakValueDictionary[tuple[type, type, str], type] = WeakValueDictionary()


def _subclassed(optimizer: torch.optim.Optimizer, mixin: type, ending: str) -> Any:
    """Returns an optimizer that shares groups and state with ``optimizer``, and steps as ``mixin`` does. ``ending`` is
    that of its gradients' names.
    """
    base = type(optimizer)
    # Trainers for Horovod tell what is wrapped from what is not by the name of its module.
    module = "horovod.torch.optimizer" if as_horovod.is_installed() else base.__module__
    wrapper = _made.get((base, mixin, module))
    if wrapper is None:
        made = type(base.__name__, (mixin, base), {"__module__": module, "__doc__": base.__doc__})
        wrapper = _made.setdefault((base, mixin, module), made)
    wrapped: Any = object.__new__(wrapper)
    # A scheduler made before has set step() on the object, which would hide ours.
    wrapped.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in ("step", "zero_grad")})
    wrapped._ending = ending
    _share_what_is_loaded(wrapped)
    return wrapped


def _name_of(op: int) -> str:
    return ReduceOp(op).label if op in set(ReduceOp) else repr(op)


def _ending(process_set: ProcessSet) -> str:
    """Returns what distinguishes an optimizer's gradients from those of others, whose parameters may have the same
    names.

    Otherwise ranks whose gradients come in different orders would average one model's with another's.
    """
    if not process_set.included():
        return ""
    session = sessions.current()
    return session.ending("DistributedOptimizer", process_set.number(session))


def _follow_steps(optimizer: torch.optim.Optimizer, wrapped: torch.optim.Optimizer) -> None:
    """Tells a scheduler that was made with ``optimizer`` about steps, so that it does not warn that it is ahead of
    them, and refuses steps of ``optimizer`` if nobody has kept ``wrapped``.
    """

    def after_step(*_: Any) -> None:
        optimizer.__dict__.update(STEPPED)

    wrapped.register_step_post_hook(after_step)
    if wrapped._is_distributed:
        StepGuard(optimizer, wrapped, DistributedOptimizer.__name__, refuses=False)


def _share_what_is_loaded(wrapped: torch.optim.Optimizer) -> None:
    """Makes both optimizers, which have the same hooks, share their groups and state when either loads.

    Otherwise a scheduler of the other one would set rates that nobody reads.
    """
    kept: list[Any] = []

    def before(loading: torch.optim.Optimizer, _: Any) -> None:
        kept[:] = loading.__dict__["param_groups"], loading.state

    def after(loading: torch.optim.Optimizer) -> None:
        groups, state = kept
        for group, loaded in zip(groups, loading.__dict__["param_groups"], strict=True):
            group.clear()
            group.update(loaded)
        state.clear()
        state.update(loading.state)
        loading.__dict__["param_groups"], loading.state = groups, state

    wrapped.register_load_state_dict_pre_hook(before)
    wrapped.register_load_state_dict_post_hook(after)


def _groups(
    groups: Any, parameters: Sequence[Tensor], names: dict[Tensor, str], process_set: ProcessSet
) -> list[tuple[Tensor, ...]]:
    """Returns the groups as tuples of trained parameters; groups given by a number follow the first rank's order."""
    if groups is None:
        return []
    trained = [p for p in parameters if p.requires_grad]
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise InvalidRequestError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        if groups == 0 or not process_set.included():
            return []
        order = broadcast_object([names[p] for p in trained], process_set.ranks[0], process_set=process_set)
        position = {name: k for k, name in enumerate(order)}
        trained.sort(key=lambda p: position[names[p]])
        bounds = [len(trained) * k // groups for k in range(groups + 1)]
        return [tuple(trained[a:b]) for a, b in itertools.pairwise(bounds) if b > a]
    if not isinstance(groups, (list, tuple)) or any(not isinstance(group, (list, tuple)) for group in groups):
        raise InvalidRequestError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    every = [p for group in groups for p in group]
    if any(not isinstance(p, Tensor) for p in every):
        raise InvalidRequestError("groups must consist of torch.Tensor.")
    if len({id(p) for p in every}) != len(every):
        raise InvalidRequestError("A parameter can only appear once in groups.")
    known = {id(p) for p in trained}
    found = [tuple(p for p in group if id(p) in known) for group in groups]
    return [group for group in found if group]
