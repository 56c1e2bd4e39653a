"""What the optimizers that wrap ``torch.optim.Adam`` or ``AdamW`` share."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ocomm import session as sessions
from ocomm.agreement import gather
from ocomm.errors import CheckpointError, InvalidRequestError
from ocomm.kernels.base import Floats
from ocomm.optim.checkpoint import fingerprint, unwrapped
from ocomm.optim.core import Group
from ocomm.training.adam import AdamDriver, refuse_other
from ocomm.training.resume import class_of
from ocomm_torch.mesh import DataAxis, inside
from ocomm_torch.optimizers.checkpoint import check_plain, read, step_count, to_numpy
from ocomm_torch.optimizers.compressed import CompressedOptimizer
from ocomm_torch.optimizers.wrapped import check_plain_optimizer

#: Torch's names of m and v in the state of a parameter.
MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamWrapper(CompressedOptimizer):
    """Base class of optimizers that wrap an Adam. A driver takes over its m and v, and returns them in
    ``state_dict``.
    """

    _driver: AdamDriver
    refused_options = ("amsgrad", "maximize", "capturable", "differentiable")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        warm_start: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        **arguments: Any,
    ) -> None:
        self._warm_start: Any = warm_start
        self._warm: dict[int, dict[str, Any]] = {}
        inner = wrappable(optimizer, f"Distributed{type(self).__name__}")
        super().__init__(inner, named_parameters, **arguments)
        if self._warm:
            self._start_warm()
        elif len(self.state):
            for parameter in self._parameters:
                if parameter in self.state:
                    entry = self.state[parameter]
                    entry.update({name: inside(entry[name]).float() for name in MOMENTS if name in entry})
            self._arrange_state()
            self._driver.continue_plain()

    # For the driver

    def wrapped_adam(self) -> str:
        """Returns the class of the wrapped optimizer: ``"Adam"`` or ``"AdamW"``."""
        return "AdamW" if is_decoupled(self._inner, self.param_groups[0]) else "Adam"

    def read_warm_start(self) -> str | None:
        """Checks the warm start, keeps it in ``_warm``, and returns its fingerprint."""
        given, self._warm_start = self._warm_start, None
        if given is None:
            return None
        where = "warm_start"
        if isinstance(given, (str, os.PathLike)):
            where = f"warm_start {os.fspath(given)}"
            given = read(given)
        if not isinstance(given, Mapping):
            raise InvalidRequestError(
                f"{where} must be Adam's state_dict or a path to one, not a {type(given).__name__}."
            )
        if len(self.state):
            raise InvalidRequestError(
                f"{where} was given, but the wrapped {type(self._inner).__name__} has a state already; leave one out."
            )
        self._warm = self._check_adam(given, where, optional={"exp_avg"})
        if not self._warm:
            raise CheckpointError(f"{where} has no moments of any tensor: it is of an Adam that has taken no step.")
        numbers = iter(range(len(self._parameters)))
        betas2 = {next(numbers): float(group["betas"][1]) for group in given["param_groups"] for _ in group["params"]}
        for number, entry in self._warm.items():
            entry["beta2"] = betas2[number]
        kernels = sessions.current().kernels
        assert kernels is not None
        return fingerprint({str(number): to_numpy(entry) for number, entry in self._warm.items()}, kernels)

    def _start_warm(self) -> None:
        for number, entry in self._warm.items():
            variance = entry["exp_avg_sq"]
            self.state[self._parameters[number]] = {
                "step": step_count(entry["step"]),
                "exp_avg": _moment(entry.get("exp_avg", torch.zeros_like(variance)), self._masters.stepped[number]),
                "exp_avg_sq": _moment(variance, self._masters.stepped[number]),
            }
        self._arrange_state()
        self._driver.start_warm({number: entry["beta2"] for number, entry in self._warm.items()})
        self._warm = {}

    def _group(self, number: int, group: dict[str, Any]) -> Group:
        return adam_group(self._inner, self._group_tensors[number], group)

    def moments(self, tensor: int) -> tuple[Floats, Floats, int] | None:
        """Returns the wrapped Adam's m, v and step count of a tensor."""
        state = self.state.get(self._parameters[tensor])
        if not state or "exp_avg" not in state:
            return None
        self._placement.arrive()
        momentum, variance = (self.flat(tensor, state[name]) for name in MOMENTS)
        return momentum, variance, int(state["step"])

    def started(self, tensor: int) -> tuple[Floats, Floats, int]:
        """Returns m, v and step count of a tensor, which begin as zeros if there are none."""
        parameter = self._parameters[tensor]
        if not self.state[parameter]:
            zeros = {name: self._placement.zeros_like(self._masters.stepped[tensor]) for name in MOMENTS}
            self.state[parameter] = {"step": step_count(0), **zeros}
        moments = self.moments(tensor)
        assert moments is not None
        return moments

    def adopt(self, tensor: int, momentum: Floats, variance: Floats, step: int) -> None:
        """Copies m and v, flat in the order of the wire, as those of a tensor after ``step`` steps."""
        own = self.started(tensor)
        own[0][:], own[1][:] = momentum, variance
        self.state[self._parameters[tensor]]["step"] = step_count(step)

    def release(self, tensor: int) -> None:
        """Frees a tensor's m and v."""
        del self.state[self._parameters[tensor]]

    def _without_shards(self, state: Any, saved: Mapping[str, Any]) -> Any:
        shards = saved.get("core", {}).get("sharded", {})
        numbers = {number for number, name in enumerate(self._names) if name in shards}
        return {number: entry for number, entry in state.items() if number not in numbers}

    def _check_plain(self, plain: Mapping[str, Any]) -> dict[int, Any]:
        return self._check_adam(plain, "the state_dict")

    def _check_adam(
        self, plain: Mapping[str, Any], where: str, optional: set[str] | None = None
    ) -> dict[int, dict[str, Any]]:
        """Returns the entries of an Adam's or AdamW's ``state_dict`` by number, as copies; ``optional`` keys may be
        missing.

        Raises CheckpointError, whose message begins with ``where``, if it is of another optimizer or model.
        """
        states = {
            number: {key: inside(value) for key, value in entry.items()}
            for number, entry in check_plain(plain, self._group_counts, where).items()
        }
        for number, group in enumerate(plain["param_groups"]):
            absent = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]
            if absent:
                raise CheckpointError(
                    f"{where} is not of Adam or AdamW: its group {number} has no '{absent[0]}', but "
                    f"{sorted(set(group) - {'params'})}."
                )
            for option in ("amsgrad", "maximize"):
                if group.get(option):
                    raise CheckpointError(f"{where} has {option}=True in group {number}, which is not supported.")
        wanted = {"step", *MOMENTS}
        for number, entry in states.items():
            name, parameter = self._names[number], self._tensors[number]
            if not wanted - (optional or set()) <= set(entry) <= wanted:
                raise CheckpointError(
                    f"{where} is not of Adam or AdamW: of tensor '{name}' it has {sorted(entry)}, expected "
                    f"{sorted(wanted)}."
                )
            for key in [key for key in MOMENTS if key in entry]:
                found = entry[key]
                if found.shape != parameter.shape:
                    raise CheckpointError(
                        f"{where} is of another model: of tensor '{name}' it has {key} {tuple(found.shape)}, the "
                        f"parameter is {tuple(parameter.shape)}."
                    )
                if not torch.isfinite(found).all():
                    raise CheckpointError(f"{where}: {key} of tensor '{name}' has NaN or Inf.")
        return states

    def dense_state_dict(self) -> dict[str, Any]:
        """Returns what a run in another grid can go on from: m, v, step counts and masters, as copies; no errors.

        With parameters that are DTensors m, v and masters are DTensors, divided as the parameters are, so
        ``torch.distributed.checkpoint`` can save them in one grid and load them in another. Names tell the parameters,
        so all parts of a model need different ones. Tensors without moments have zeros. Collective over the ranks of a
        grid that have this rank's data coordinate.

        Returns:
            ``"state"``: for each parameter, by name, ``exp_avg``, ``exp_avg_sq`` and for low precision ``master``
            (float32, of the parameter's shape), ``step``, and ``beta2`` (that of v; 0 while its steps are dense).
            ``"run"``: a text, the same on all ranks.

        Raises:
            InvalidRequestError: Two stages have a parameter of the same name; or a step is under way; or m and v are
                sharded.
        """
        self._driver.require_idle("dense_state_dict")
        sharded = self._driver.core.sharded
        if sharded is not None and sharded.steps.any():
            raise InvalidRequestError(
                f"{self._driver.name}: dense_state_dict() needs whole m and v, and with shard_state each rank has its "
                "part until the warm-up is over. Save state_dict() and, on every rank, rank_state_dict()."
            )
        full = self.state_dict()
        taken = set(self._driver.taken_over(to_numpy(full["ocomm"])))
        masters, state = full["ocomm"]["masters"], {}
        counts = self._counts_in_grid(
            {
                name: (float(full["state"].get(index, {}).get("step", 0)), self._driver.beta2(index) * (index in taken))
                for index, name in enumerate(self._names)
            }
        )
        for index, name in enumerate(self._names):
            entry = full["state"].get(index) or {}
            local = {key: entry.get(key, torch.zeros_like(self._masters.stepped[index])) for key in MOMENTS}
            local |= {"master": masters[name]} if index in self._masters else {}
            state[name] = {
                **{key: self._local.placed(index, value) for key, value in local.items()},
                "step": torch.tensor(counts[name][0], dtype=torch.float64, device="cpu"),
                "beta2": torch.tensor(counts[name][1], dtype=torch.float64, device="cpu"),
            }
        return {"state": state, "run": json.dumps(self._driver.dense_run())}

    def _counts_in_grid(self, mine: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Returns the numbers of tensors by name; a rank with an empty shard has them from others. Collective."""
        if self.grid is None:
            return mine
        session, axis = sessions.current(), self.process_set
        assert isinstance(axis, DataAxis)
        me = session.require_topology().rank
        found = dict(mine)
        texts = gather(session, self.grid.number, f"{self._driver.name}.dense", json.dumps(mine))
        for rank, text in zip(axis.replica, texts, strict=True):
            both = {name: numbers for name, numbers in json.loads(text).items() if name in mine}
            if both and axis.stages[rank] != axis.stages[me]:
                raise InvalidRequestError(
                    f"rank {me} ({axis.place(me)}) and rank {rank} ({axis.place(rank)}) have parameters of the name "
                    f"'{next(iter(both))}', of which a dense state could have one. Give stages names of their own: "
                    "[(f'stage{i}.' + name, p) for name, p in stage.named_parameters()]."
                )
            for name, (step, beta2) in both.items():
                found[name] = max(found[name][0], step), max(found[name][1], beta2)
        return found

    def load_dense_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the result of ``dense_state_dict``, of any grid, in place. All ranks of the mesh load the same state.

        Load the parameters before it. Errors start at zero. Tensors that were compressed are compressed at once: their
        denominators are made from v again, so steps are not those of the other grid bit for bit.

        Args:
            state_dict: The state, whose tensors are DTensors divided as the parameters are, or this rank's parts. It
                is not changed, and may have more names.

        Raises:
            CheckpointError: The state is of another optimizer or model; nothing was changed.
            InvalidRequestError: Called between backward and ``step()``.
        """
        where = "the dense state"
        self._driver.require_idle("load_dense_state_dict")
        self._find_parameters()
        if not {"state", "run"} <= set(state_dict):
            raise CheckpointError(
                f"{where} is no result of dense_state_dict(): it has {sorted(map(str, state_dict))}, expected "
                "['run', 'state']."
            )
        run = json.loads(state_dict["run"])
        if run["optimizer"] != self._driver.kind:
            was, now = class_of(run["optimizer"]), class_of(self._driver.kind)
            raise CheckpointError(f"{where} is of {was}, the optimizer is {now}.")
        entries, state = {}, state_dict["state"]
        alike = {unwrapped(name): entry for name, entry in state.items()}
        for index, name in enumerate(self._names):
            found = state.get(name, alike.get(unwrapped(name)) if len(alike) == len(state) else None)
            if found is None:
                raise CheckpointError(f"{where} has nothing of '{name}': name parameters alike in all grids.")
            entries[index] = {key: inside(value) for key, value in found.items()}
        plain = dict(super(CompressedOptimizer, self).state_dict())
        moments = {index: entry for index, entry in entries.items() if float(entry["step"])}
        plain["state"] = {
            index: {"step": entry["step"].float(), **{key: entry[key].detach().clone() for key in MOMENTS}}
            for index, entry in moments.items()
        }
        self._check_adam(plain, where)
        absent = [self._names[index] for index in self._masters.indices if "master" not in entries[index]]
        if absent and len(absent) < len(self._masters.indices):
            raise CheckpointError(f"{where} has no master of '{absent[0]}'.")
        self._adopt(plain)
        betas2 = {index: float(entry["beta2"]) for index, entry in moments.items() if float(entry["beta2"])}
        with self._borrowed():
            if absent:
                self._masters.restart()
            else:
                self._masters.load({index: entries[index]["master"] for index in self._masters.indices})
            self._driver.continue_dense(run, betas2)

    def _load_plain(self, plain: dict[str, Any]) -> None:
        """Continues from the state of a plain Adam or AdamW."""
        self._adopt(plain)
        self._driver.continue_plain()


def _moment(saved: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a copy as the optimizer of ``parameter`` would hold it."""
    return saved.detach().to(parameter.device, torch.float32, copy=True)


def is_decoupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Returns True if Adam subtracts the weight decay from the parameter instead of adding it to the gradient."""
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def adam_group(optimizer: torch.optim.Optimizer, tensors: np.ndarray, group: dict[str, Any]) -> Group:
    """Returns a param group of Adam or AdamW as a ``Group``."""
    decay, decoupled = float(group["weight_decay"]), is_decoupled(optimizer, group)
    return Group(
        tensors,
        float(group["lr"]),
        (float(group["betas"][0]), float(group["betas"][1])),
        float(group["eps"]),
        coupled_decay=0.0 if decoupled else decay,
        decoupled_decay=decay if decoupled else 0.0,
    )


def wrappable(optimizer: torch.optim.Optimizer, wrapper: str) -> torch.optim.Optimizer:
    """Returns ``optimizer`` if it is an Adam with Torch's own step; raises InvalidRequestError, which says why, if it
    is not.
    """
    check_plain_optimizer(optimizer, wrapper)
    if not isinstance(optimizer, ADAMS):
        refuse_other(type(optimizer).__name__, isinstance(optimizer, torch.optim.SGD), wrapper, "torch.optim")
    # Torch's hooks, profilers and schedulers wrap step(), and have the original as an attribute.
    step = inspect.unwrap(getattr(optimizer.step, "__func__", optimizer.step))
    if step not in _STEPS:
        raise InvalidRequestError(
            f"{wrapper} makes steps in the place of the optimizer that it wraps, and this {type(optimizer).__name__} "
            "has a step() of its own, which would not be made. Wrap a plain torch.optim.Adam or AdamW and do what that "
            "step() adds before or after the step, or use DistributedOptimizer, which makes it."
        )
    return optimizer


#: The classes that 1-bit Adam, 1-bit LAMB and 0/1 Adam wrap.
ADAMS = (torch.optim.Adam, torch.optim.AdamW)
#: Torch's own steps, without the hooks that it puts around them.
_STEPS = {inspect.unwrap(kind.step) for kind in ADAMS}
