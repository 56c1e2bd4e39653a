"""1-bit Adam for Torch: wraps ``torch.optim.Adam`` or ``AdamW`` and takes over where its warm-up ends.

Torch's side only: tensors to addresses, hooks, param groups, state. The algorithm is ``ocomm.optim``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch

from ocomm import session as sessions
from ocomm.collectives.pipeline import segment_nbytes
from ocomm.compression.layout import Layout, TensorSpec
from ocomm.errors import InvalidRequestError, MismatchError
from ocomm.optim.freeze import FreezeSchedule, LateTensors
from ocomm.optim.onebit_adam import OneBitAdam as Core
from ocomm.optim.onebit_adam import Stage
from ocomm.optim.stepper import Stepper, Verdict
from ocomm.types import Flag, ReduceOp

_log = logging.getLogger("ocomm")
_COMPRESSED_STATE = ("exp_avg", "exp_avg_sq")


class OneBitAdam(torch.optim.Optimizer):
    """Data-parallel 1-bit Adam (arXiv 2102.02888): Adam at first, then 1 bit per parameter and direction.

    ``optimizer`` is a ``torch.optim.Adam`` or ``AdamW`` over float32 CPU parameters; its param groups stay live (lr,
    betas, weight_decay, LR schedulers on either object; eps up to the freeze) and its step makes the warm-up steps.

    ``named_parameters``: an iterable of (name, parameter), or None for names by position. ``freeze_step``: the number
    of dense steps T_w, or ``"auto"``: until the variance is stable (at least 2 / (1 - beta2) steps). ``block_size``:
    elements per scale, or ``"tensor"``. ``scale``: ``"l1"`` or ``"rms"``. ``variance_floor``: fraction of a block's
    mean sqrt(v) below which no element's falls. ``mask_refresh``: steps between looks for elements that had no gradient
    before the freeze and have one now. ``overlap``: exchange during backward. ``verify``: how a gradient that changed
    after backward is noticed (``"sampled"``, ``"full"``, ``"version"``). ``max_grad_norm``: clips by the agreed norm
    sqrt(mean over ranks of |g|^2), without overlap. ``backward_passes_per_step``: gradients are summed over that many
    backward passes.

    ``step`` changes parameters in place, identically on all ranks, or on none: a NaN raises NonFiniteError everywhere.
    Raises InvalidRequestError for what cannot be wrapped, MismatchError if the ranks wrap different things.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        freeze_step: int | Literal["auto"] = "auto",
        block_size: int | Literal["tensor"] = 4096,
        scale: Literal["l1", "rms"] = "l1",
        variance_floor: float = 0.05,
        overlap: bool = True,
        mask_refresh: int = 100,
        max_grad_norm: float | None = None,
        verify: Literal["sampled", "full", "version"] = "sampled",
        backward_passes_per_step: int = 1,
        process_set: Any = None,
    ) -> None:
        self._session = sessions.current()
        topology = self._session.require_topology()
        self._set = getattr(process_set, "process_set_id", 0) or 0
        ranks = self._session.set_ranks[self._set]
        if backward_passes_per_step < 1:
            raise InvalidRequestError("backward_passes_per_step must be > 0")
        if verify not in ("sampled", "full", "version"):
            raise InvalidRequestError(f"verify must be 'sampled', 'full' or 'version', got {verify!r}")
        self._inner = _wrappable(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        # The same objects, so that a scheduler or a user who holds either optimizer changes both.
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self._parameters, self._names = _named(optimizer, named_parameters)
        self._group_of = {id(p): g for g, group in enumerate(self.param_groups) for p in group["params"]}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            _check_parameter(name, parameter)
        specs = [TensorSpec(name, tuple(p.shape)) for name, p in zip(self._names, self._parameters, strict=True)]
        layout = Layout(specs, len(ranks), block_size)
        options = {
            "optimizer": "AdamW" if self._is_decoupled(0) else "Adam",
            "freeze_step": freeze_step,
            "block_size": block_size,
            "scale": scale,
            "variance_floor": variance_floor,
            "mask_refresh": mask_refresh,
            "overlap": overlap,
            "max_grad_norm": max_grad_norm,
            "backward_passes_per_step": backward_passes_per_step,
        }
        rank = ranks.index(topology.rank)
        assert self._session.kernels is not None
        self._core = Core(
            layout,
            rank,
            self._session.kernels,
            variance_floor=variance_floor,
            scale=scale,
            mask_refresh=mask_refresh,
        )
        beta2 = float(self.param_groups[0]["betas"][1])
        self._schedule = FreezeSchedule(freeze_step, beta2)
        self._late = LateTensors()
        name = self._session.automatic_name("OneBitAdam")
        channel = _open_channel(self._session, self._set, name, layout, options)
        settings = self._session.settings
        self._max_grad_norm = max_grad_norm
        self._passes_left = [backward_passes_per_step] * len(self._parameters)
        self._recorded: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._versions = [0] * len(self._parameters)
        self._copies: list[torch.Tensor] = []
        self._stepper = Stepper(
            name,
            self._core,
            channel,
            ranks,
            self._session.watch(),
            _weak_call(self._locate),
            segment_nbytes=segment_nbytes(layout.numel // 8, len(ranks), settings.segment_nbytes),
            overlap=overlap and max_grad_norm is None,
            verify=verify,
            timeout_s=settings.stall_shutdown_s,
        )
        self.backward_passes_per_step = backward_passes_per_step
        self._steps = 0  # taken, not skipped
        self._freeze_at = self._schedule.decided
        self._announcement = 0
        self._core.tensors["param"] = [p.data_ptr() for p in self._parameters]
        handles = [p.register_post_accumulate_grad_hook(self._make_hook(i)) for i, p in enumerate(self._parameters)]
        weakref.finalize(self, _remove, handles)

    def _is_decoupled(self, group: int) -> bool:
        default = isinstance(self._inner, torch.optim.AdamW)
        return bool(self.param_groups[group].get("decoupled_weight_decay", default))

    # Hyperparameters

    def _compress_hyper(self) -> int:
        """What gradients are compressed with: a change after hand-over means that the exchange must be done again."""
        return _digest(
            [
                (g["betas"][0], 0.0 if self._is_decoupled(i) else g["weight_decay"])
                for i, g in enumerate(self.param_groups)
            ]
        )

    def _full_hyper(self) -> int:
        return _digest(
            [
                (float(g["lr"]), *g["betas"], g["eps"], g["weight_decay"], self._is_decoupled(i))
                for i, g in enumerate(self.param_groups)
            ]
        )

    def _set_hyper(self) -> None:
        for number, group in enumerate(self.param_groups):
            decoupled = self._is_decoupled(number)
            self._core.set_hyper(
                self._group_indices[number],
                lr=float(group["lr"]),
                beta1=float(group["betas"][0]),
                coupled_decay=0.0 if decoupled else float(group["weight_decay"]),
                decoupled_decay=float(group["weight_decay"]) if decoupled else 0.0,
            )

    @property
    def _group_indices(self) -> list[np.ndarray]:
        if not hasattr(self, "_indices"):
            groups = np.array([self._group_of[id(p)] for p in self._parameters])
            self._indices = [np.flatnonzero(groups == number) for number in range(len(self.param_groups))]
        return self._indices

    # Gradients

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # The parameter keeps the hook: without the weak reference it would keep this optimizer and its buffers, too.
        reference = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            optimizer = reference()
            if optimizer is not None:
                optimizer._on_gradient(index, parameter)

        return hook

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        left = self._passes_left[index] - 1
        self._passes_left[index] = left
        if left:
            if left < 0:
                self._unexpected(index, parameter)
            return
        stepper = self._stepper
        if not stepper.begun:
            self._begin()
        self._recorded[index] = parameter.grad
        stepper.hand_over(index)

    def _unexpected(self, index: int, parameter: torch.Tensor) -> None:
        """More backward passes than announced: of the same step, or of the next one after a step that never came."""
        if self._recorded[index] is not parameter.grad:
            self._skip()
            self._on_gradient(index, parameter)
        else:
            self._stepper.object(Flag.UNHANDED)

    def _begin(self) -> None:
        self._set_hyper()
        self._stepper.begin(self._compress_hyper())

    def _locate(self, tensors: list[int], final: bool) -> np.ndarray | None:
        """Addresses of gradients as dense, contiguous float32; 0 for none. What is read is kept until the step is over.

        Before ``step()`` a gradient that would have to be copied is not ready: a copy would not show a later change.
        """
        addresses = []
        float32, strided = torch.float32, torch.strided
        recorded, versions, parameters = self._recorded, self._versions, self._parameters
        for index in tensors:
            grad = parameters[index].grad if final else recorded[index]
            recorded[index] = grad
            if grad is None:
                addresses.append(0)
                continue
            versions[index] = grad._version
            if grad.dtype is not float32:
                raise InvalidRequestError(
                    f"gradient of '{self._names[index]}' is {grad.dtype}, expected torch.float32."
                )
            if grad.layout is not strided or not grad.is_contiguous():
                if not final:
                    return None
                grad = grad.to_dense().contiguous()
                self._copies.append(grad)
            addresses.append(grad.data_ptr())
        return np.array(addresses, np.uint64)

    def _notice_changes(self) -> None:
        """Objects if a gradient that is on its way is not what it was when it was read."""
        stepper, versions = self._stepper, self._versions
        for index in stepper.posted_tensors:
            grad = self._parameters[index].grad
            if grad is not self._recorded[index] or (grad is not None and grad._version != versions[index]):
                stepper.object(Flag.CHANGED)
                return
        if stepper.changed_tensors():
            stepper.object(Flag.CHANGED)

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on all ranks. Returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._stepper.begun:
            self._begin()
        if self._max_grad_norm is not None:
            self._clip(self._max_grad_norm)
        if self._exchange() is Verdict.TAKE:
            self._take()
        return loss

    def _exchange(self) -> Verdict:
        try:
            self._notice_changes()
            return self._stepper.exchange(
                self._compress_hyper(),
                self._full_hyper(),
                float(self.param_groups[0]["lr"]),
                self._announcement,
                self._set_hyper,
            )
        finally:
            self._forget()

    def _forget(self) -> None:
        self._copies.clear()
        self._recorded[:] = [None] * len(self._recorded)
        self._passes_left[:] = [self.backward_passes_per_step] * len(self._passes_left)

    def _skip(self) -> None:
        """This rank does not take the step under way; then nobody does."""
        self._stepper.object(Flag.SKIP)
        self._exchange()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients. Between backward and ``step()`` it means that this step is skipped, on all ranks."""
        if self._stepper.begun:
            self._skip()
        super().zero_grad(set_to_none)

    def _take(self) -> None:
        stepper, core = self._stepper, self._core
        self._set_hyper()
        self._steps += 1
        order = list(stepper.arrivals)
        present = stepper.present_anywhere
        warming = [int(t) for t in np.flatnonzero(core.stage == Stage.WARMUP)]
        stepper.commit()
        if warming:
            self._dense_step([t for t in warming if present[t]])
            self._end_warmup(warming)
        if core.refresh_due:
            touched = core.touched()
            self._session.reduce(self._set, f"{stepper.name}.touched", touched, ReduceOp.BITWISE_OR)
            core.wake(touched)
        if self._steps == 1 and stepper.overlap:
            self._adopt_order(order)

    def _dense_step(self, tensors: list[int]) -> None:
        """The wrapped optimizer's own step on the averaged gradients of tensors in warm-up."""
        chosen = set(tensors)
        hidden = {}
        borrowed = []
        for index, parameter in enumerate(self._parameters):
            if index not in chosen:
                if parameter.grad is not None:
                    hidden[index], parameter.grad = parameter.grad, None
                continue
            average = torch.from_numpy(self._stepper.average(index)).view(parameter.shape)
            if parameter.grad is None:
                parameter.grad = average.clone()
                borrowed.append(index)
            else:
                parameter.grad.copy_(average)
        if self._max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_([self._parameters[t] for t in tensors], self._max_grad_norm, foreach=False)
        self._inner.step()
        for index, grad in hidden.items():
            self._parameters[index].grad = grad
        for index in borrowed:
            self._parameters[index].grad = None

    def _end_warmup(self, warming: list[int]) -> None:
        """Freezes what is due: all tensors at T_w, later ones after a warm-up of their own."""
        step = self._steps
        if self._freeze_at is None:
            heard = self._stepper.heard_announcement
            if heard:
                self._freeze_at = heard
            elif self._core.rank == 0:
                norm = self._variance_norm(warming)
                decided = self._schedule.observe(step, norm, [float(g["lr"]) for g in self.param_groups])
                self._announcement = decided or 0
        if self._freeze_at is None or step < self._freeze_at:
            return
        frozen = [t for t in warming if self._is_due(t, step) and self._freeze(t)]
        if frozen:
            self._stepper.rebuild()

    def _is_due(self, tensor: int, step: int) -> bool:
        state = self.state.get(self._parameters[tensor])
        if not state:
            return False
        if step == self._freeze_at:
            return True
        assert self._freeze_at is not None
        return self._late.observe(tensor, int(state["step"]), bool(state["exp_avg_sq"].any()), self._freeze_at)

    def _freeze(self, tensor: int) -> bool:
        parameter = self._parameters[tensor]
        state = self.state[parameter]
        group = self.param_groups[self._group_of[id(parameter)]]
        frozen = self._core.freeze(
            tensor,
            state["exp_avg"].reshape(-1).numpy(),
            state["exp_avg_sq"].reshape(-1).numpy(),
            step=int(state["step"]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
        )
        if frozen:
            for name in _COMPRESSED_STATE:
                del state[name]
        return frozen

    def _variance_norm(self, tensors: list[int]) -> float:
        """|v_hat|_1 over all parameters, in float64."""
        total = 0.0
        for tensor in tensors:
            parameter = self._parameters[tensor]
            state = self.state.get(parameter)
            if state:
                beta2 = float(self.param_groups[self._group_of[id(parameter)]]["betas"][1])
                total += state["exp_avg_sq"].sum(dtype=torch.float64).item() / (1 - beta2 ** int(state["step"]))
        return total

    def _adopt_order(self, arrivals: list[int]) -> None:
        """Buckets follow the order in which rank 0's gradients came in the first step; from now on with overlap."""
        seen = set(arrivals)
        order = np.array(arrivals + [t for t in self._stepper.order if t not in seen], np.int64)
        self._session.broadcast(self._set, f"{self._stepper.name}.order", order)
        self._stepper.adopt_order(order.tolist())
        self._stepper.overlapping = True

    def _clip(self, max_norm: float) -> None:
        """Scales this rank's gradients by max_norm / N, N = sqrt(mean over ranks of |g|^2), if N is larger."""
        if not (self._core.stage == Stage.COMPRESSED).any():
            return  # in warm-up the averaged gradient is clipped
        grads = [p.grad for p in self._parameters if p.grad is not None]
        squares = sum(g.double().pow(2).sum().item() for g in grads)
        total = np.array([squares])
        self._session.reduce(self._set, f"{self._stepper.name}.norm", total, ReduceOp.AVERAGE)
        norm = float(np.sqrt(total[0]))
        if norm > max_norm:
            for grad in grads:
                grad.mul_(max_norm / (norm + 1e-6))

    # State

    def compression_report(self) -> dict[str, Any]:
        """What was really sent, against dense: counts of steps and bytes of this rank, and where the run stands.

        ``ratio`` is dense over sent bytes of the whole run, ``last_ratio`` of the last step; ``exposed_ms`` the mean
        time that ``step()`` waited for the exchange; ``freeze_step`` is None until it is known.
        """
        traffic, core = self._stepper.traffic, self._core
        stages = {int(s) for s in core.stage}
        stage = "warm-up" if stages == {0} else "compressed" if stages == {1} else "mixed"
        dense = self._core.layout.dense_bytes()
        return {
            "stage": stage,
            "step": self._steps,
            "freeze_step": self._freeze_at,
            "dense_steps": traffic.dense_steps,
            "compressed_steps": traffic.compressed_steps,
            "skipped_steps": traffic.skipped_steps,
            "redone_steps": traffic.redone_steps,
            "overlap": self._stepper.overlap,
            "bytes_sent": traffic.bytes_sent,
            "bytes_dense": traffic.bytes_dense,
            "ratio": traffic.bytes_dense / traffic.bytes_sent if traffic.bytes_sent else None,
            "last_bytes_sent": traffic.last_bytes_sent,
            "last_ratio": dense / traffic.last_bytes_sent if traffic.last_bytes_sent else None,
            "exposed_ms": 1e3 * traffic.exposed_s / max(traffic.steps, 1),
            "masked_elements": int(core.masked.sum()),
            "woken_elements": core.woken,
            "memory_bytes": self._stepper.memory(),
        }

    def state_dict(self) -> dict[str, Any]:
        """What plain Adam would load (exp_avg = mbar, exp_avg_sq from the frozen variance), plus an entry "ocomm".

        The same on all ranks. The entry holds per tensor what a continued run needs; errors are this rank's own and
        not in it.
        """
        full = dict(super().state_dict())
        state = full["state"] = {key: dict(value) for key, value in full["state"].items()}
        tensors = {}
        numbers = {id(p): n for n, p in enumerate(p for g in self.param_groups for p in g["params"])}
        for tensor in np.flatnonzero(self._core.stage == Stage.COMPRESSED).tolist():
            parameter = self._parameters[tensor]
            group = self.param_groups[self._group_of[id(parameter)]]
            entry = state.setdefault(numbers[id(parameter)], {})
            entry["step"] = torch.tensor(float(self._core.steps[tensor]))
            entry["exp_avg"] = torch.from_numpy(self._core.momentum(tensor)).view(parameter.shape)
            variance = self._core.variance(tensor, beta2=float(group["betas"][1]))
            entry["exp_avg_sq"] = torch.from_numpy(variance).view(parameter.shape)
            saved = self._core.tensor_state(tensor)
            tensors[self._names[tensor]] = {
                key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in saved.items()
            }
        full["ocomm"] = {
            "version": 1,
            "steps": self._steps,
            "freeze_at": self._freeze_at,
            "tensors": tensors,
            "progress": self._core.progress(),
        }
        return full

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse, and also of plain Adam's ``state_dict`` (then the warm-up goes on). Errors start at zero.

        Raises InvalidRequestError, before anything is changed, if the state is of other tensors.
        """
        saved = state_dict.get("ocomm")
        if saved is not None:
            known = {name: index for index, name in enumerate(self._names)}
            for name, tensor_state in saved["tensors"].items():
                expected = self._parameters[known[name]].numel() if name in known else None
                if expected != tensor_state["denominator"].numel():
                    raise InvalidRequestError(
                        f"the state has tensor '{name}' with {tensor_state['denominator'].numel()} elements; "
                        "this model " + (f"has {expected}." if expected is not None else "has no tensor of that name.")
                    )
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "ocomm"})
        self._inner.state = self.state
        self._inner.param_groups = self.param_groups
        if saved is None:
            return
        self._steps, self._freeze_at = saved["steps"], saved["freeze_at"]
        for name, tensor_state in saved["tensors"].items():
            tensor = self._names.index(name)
            state = self.state[self._parameters[tensor]]
            plain = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in tensor_state.items()}
            self._core.load_tensor_state(tensor, plain, state["exp_avg"].reshape(-1).contiguous().numpy())
            for key in _COMPRESSED_STATE:
                del state[key]
        self._core.load_progress(saved["progress"])
        self._stepper.rebuild()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _weak_call(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        alive = reference()
        assert alive is not None, "the optimizer is gone"
        return alive(*arguments)

    return call


def _digest(values: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little")


def _wrappable(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """``optimizer``, if it is an Adam whose options 1-bit Adam has; InvalidRequestError that names what it has not."""
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        raise InvalidRequestError(
            f"DistributedOneBitAdam wraps torch.optim.Adam or AdamW, not {type(optimizer).__name__}; use "
            "DistributedOptimizer for other optimizers."
        )
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize", "capturable", "differentiable"):
            if group.get(option):
                raise InvalidRequestError(f"DistributedOneBitAdam does not support {option}=True; leave it out.")
    return optimizer


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> tuple[list[torch.Tensor], list[str]]:
    """The optimizer's parameters in group order, with their names. Tied ones come once."""
    names = {id(p): name for name, p in reversed(list(named_parameters or ()))}
    parameters, result = [], []
    for g, group in enumerate(optimizer.param_groups):
        for k, parameter in enumerate(group["params"]):
            if names and id(parameter) not in names:
                raise InvalidRequestError(
                    "named_parameters was specified, but one or more model parameters were not named. "
                    f"The first is number {k} of group {g}, of shape {tuple(parameter.shape)}."
                )
            parameters.append(parameter)
            result.append(names.get(id(parameter), f"parameter.{g}.{k}"))
    return parameters, result


def _check_parameter(name: str, parameter: torch.Tensor) -> None:
    if parameter.device.type != "cpu":
        raise InvalidRequestError(
            f"parameter '{name}' is on {parameter.device}; this build exchanges CPU tensors only."
        )
    if parameter.dtype is not torch.float32:
        raise InvalidRequestError(
            f"parameter '{name}' is {parameter.dtype}; DistributedOneBitAdam needs torch.float32."
        )
    if not parameter.is_contiguous():
        raise InvalidRequestError(
            f"parameter '{name}' is not contiguous (strides {parameter.stride()}); call "
            "parameter.data = parameter.data.contiguous() before wrapping."
        )


def _open_channel(session: sessions.Session, number: int, name: str, layout: Layout, options: dict[str, Any]) -> Any:
    """The optimizer's channel; if the ranks do not agree, an error that says on which tensor or option."""
    text = json.dumps(options, sort_keys=True)
    digest = layout.digest ^ _digest(text)
    try:
        return session.open_channel(number, name, digest, f"{len(layout.tensors)} tensors")
    except MismatchError as error:
        specs = [f"tensor '{t.name}' {t.shape} {t.dtype} order {t.order}" for t in layout.tensors]
        lines = [*specs, *(f"{key}={value!r}" for key, value in sorted(options.items()))]
        raise MismatchError(_first_difference(session, number, name, lines) or str(error)) from None


def _first_difference(session: sessions.Session, number: int, name: str, lines: list[str]) -> str:
    """Compares the ranks' descriptions line by line; collective. "" if all are equal."""
    ranks = session.set_ranks[number]
    mine = json.dumps(lines).encode()
    nbytes = np.zeros(len(ranks), np.int64)
    me = ranks.index(session.require_topology().rank)
    nbytes[me] = len(mine)
    session.reduce(number, f"{name}.lengths", nbytes, ReduceOp.SUM)
    table = np.zeros(int(nbytes.sum()), np.uint8)
    first = int(nbytes[:me].sum())
    table[first : first + len(mine)] = np.frombuffer(mine, np.uint8)
    session.reduce(number, f"{name}.descriptions", table, ReduceOp.BITWISE_OR)
    ends = np.cumsum(nbytes).tolist()
    all_lines = [json.loads(table[end - n : end].tobytes()) for end, n in zip(ends, nbytes.tolist(), strict=True)]
    for position in range(max(len(said) for said in all_lines)):
        values: dict[str, list[int]] = {}
        for rank, said in zip(ranks, all_lines, strict=True):
            values.setdefault(said[position] if position < len(said) else "nothing", []).append(rank)
        if len(values) > 1:
            each = "; ".join(f"rank(s) {who} registered {value}" for value, who in values.items())
            return f"{name}: the ranks do not wrap the same optimizer: {each}."
    return ""


DistributedOneBitAdam = OneBitAdam
