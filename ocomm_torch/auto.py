"""DistributedAuto: measures network and compute in the first steps, and goes on with the fastest method.

``ocomm.predict.methods`` knows the methods and decides, from numbers alone. This module has what a decision needs of
Torch: which methods fit the wrapped optimizer, how long a step computes, and an optimizer whose method can change.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import Any

import numpy as np
import torch

from ocomm import api
from ocomm import session as sessions
from ocomm.errors import CheckpointError, InvalidRequestError, SettingsError
from ocomm.operations import ProcessSet, global_process_set
from ocomm.optim.checkpoint import fingerprint
from ocomm.optim.freeze import require_total_steps
from ocomm.optim.verdict import StepOutcome
from ocomm.predict.methods import EXACT, METHODS, Candidate, Method, Place, candidates, duration, fastest, table
from ocomm.predict.model import Training
from ocomm.predict.probe import measure
from ocomm.telemetry.log import NOTICE
from ocomm_torch.compression import Compression
from ocomm_torch.memory.parameters import copied
from ocomm_torch.optimizer import DistributedOptimizer
from ocomm_torch.optimizers import loss_scaling
from ocomm_torch.optimizers.adam import AdamWrapper, wrappable
from ocomm_torch.optimizers.checkpoint import to_numpy
from ocomm_torch.optimizers.compressed import CompressedOptimizer
from ocomm_torch.optimizers.diloco import DiLoCo
from ocomm_torch.optimizers.loss_scaling import AveragesGradients, CollectiveStep
from ocomm_torch.optimizers.onebit import OneBitAdam
from ocomm_torch.optimizers.rank_states import HasRankState
from ocomm_torch.optimizers.wrapped import check_plain_optimizer, check_steps_without_closure
from ocomm_torch.optimizers.zero_one import ZeroOneAdam

_log = logging.getLogger("ocomm")

_BY_NAME = {method.name: method for method in METHODS}
_AVERAGES = {EXACT: Compression.none, "Compression.int8": Compression.int8, "Compression.int4": Compression.int4}
_WRAPPERS: Mapping[str, Callable[..., HasRankState]] = {
    "DistributedOneBitAdam": OneBitAdam,
    "DistributedZeroOneAdam": ZeroOneAdam,
    "DistributedDiLoCo": DiLoCo,
}
#: Steps before the decision; the first is not measured, because much happens in it for the only time.
MEASURED_STEPS = 4
#: First steps send 8 bits where exact averages would take longer than this.
PATIENCE_S = 1.0


class Auto(HasRankState):
    """Trains with the method that is expected to end the run first, of those whose loss is known to stay close enough.

    The network is measured when the optimizer is made, which takes about ten seconds, 20 with a delay of 100 ms, and
    compute in the first four steps, in which gradients are averaged, exactly or in 8 bits. Then rank 0 decides, and
    says for each method how long the run would take and what it costs in loss (``decision``). Losses were measured on
    small models (docs/choosing.md), and are known for Adam and AdamW; any other optimizer goes on with exact averages.

    Between backward and ``step()`` gradients are averages or this rank's own, by the method: clip with
    ``max_grad_norm``, and let nothing else depend on them. With DiLoCo and 0/1 Adam the ranks have different
    parameters between syncs: call ``finish()`` at the end, and evaluate in ``evaluation_parameters()``; both are there
    for every method. Making the optimizer and its steps are collective.

    Args:
        optimizer: A ``torch.optim.Optimizer`` over parameters in the host's memory or on one GPU. Its param groups stay
            in use, with LR schedulers on either object.
        named_parameters: An iterable of (name, parameter), which names the parameters in messages; None names them by
            position.
        total_steps: The number of the optimizer's steps in the whole run, such as ``epochs * len(loader)``.
        max_loss_gap: The largest loss above that of exact averages that is accepted, as a part of it.
        max_grad_norm: The norm to which gradients are clipped: that of the averages where there are any. None: they are
            not clipped.
        backward_passes_per_step: The number of backward passes whose gradients are summed before they are averaged.

    Raises:
        InvalidRequestError: The optimizer or a parameter cannot be wrapped.
        MismatchError: The ranks wrap different things.
        SettingsError: ``total_steps`` is not a number of steps.
        ValueError: The nodes have different numbers of ranks, or ``max_loss_gap`` is below 0.
    """

    #: The current method.
    method: Method
    #: The lines that rank 0 has said; "" before the decision.
    decision: str
    #: What the decision was made from: every method with its seconds, the fastest first; empty before the decision.
    candidates: list[Candidate]

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        total_steps: int,
        max_loss_gap: float = 0.005,
        max_grad_norm: float | None = None,
        backward_passes_per_step: int = 1,
    ) -> None:
        if not max_loss_gap >= 0:
            raise ValueError(f"max_loss_gap must be at least 0, got {max_loss_gap!r}")
        session = sessions.current()
        session.require_topology()
        check_plain_optimizer(optimizer, "DistributedAuto")
        check_steps_without_closure(optimizer, "DistributedAuto")
        loss_scaling.install()
        self._named = list(named_parameters) if named_parameters is not None else None
        self._max_loss_gap = max_loss_gap
        #: The norm to which gradients are clipped; None if they are not.
        self.max_grad_norm = max_grad_norm
        self._passes = backward_passes_per_step
        self._unfit = _unfit(optimizer, backward_passes_per_step)
        super().__init__(optimizer)
        self.process_set: ProcessSet = global_process_set
        self.total_steps = _whole_run(total_steps)
        #: Steps taken, and of these the steps before the current method.
        self.steps = self._begun_at = 0
        self.decision = ""
        self.candidates = []
        self._computed: list[float] = []
        self._step_ended: float | None = None
        #: Steps taken since measuring began, in this process.
        self._watched = 0
        self._is_decided = api.size() == 1
        #: None where nothing has to be decided.
        self._place = None if self._is_decided else _place()
        exact = _BY_NAME["exact averages"]
        is_quick = self._place is None or self._place.seconds(("32",), self._training(1e-9)) < PATIENCE_S
        self._use(exact if is_quick else _BY_NAME["averages in 8 bits"])

    def _training(self, compute_s: float) -> Training:
        return Training(sum(p.numel() for group in self._inner.param_groups for p in group["params"]), compute_s)

    # The current method

    def _use(self, method: Method) -> None:
        """Wraps the plain optimizer for ``method``. Collective."""
        before = self.__dict__.get("_optimizer")
        if isinstance(before, HasRankState):
            before.disconnect()
        common: dict[str, Any] = (
            {} if method.wrapper == "DistributedDiLoCo" else {"backward_passes_per_step": self._passes}
        )
        if method.wrapper in _AVERAGES:
            made = DistributedOptimizer(self._inner, self._named, _AVERAGES[method.wrapper], **common)
        else:
            if method.takes_total_steps:
                common["total_steps"] = max(self.total_steps - self.steps, 1)
            if method.wrapper != "DistributedDiLoCo":
                common["max_grad_norm"] = self.max_grad_norm
            made = _WRAPPERS[method.wrapper](self._inner, self._named, **common, **method.options)
        self._optimizer: Any = made
        self.method, self._begun_at = method, self.steps

    @property
    def optimizer(self) -> Any:
        """The optimizer of the current method, such as a ``DistributedOneBitAdam``."""
        return self._optimizer

    # Torch sets groups, which nobody sees once a method has wrapped the optimizer.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups. Waits for gradients under way, because GradScaler finds them through here."""
        current = self.__dict__.get("_optimizer")
        groups: list[dict[str, Any]] = self.__dict__["_own_groups"] if current is None else current.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["_own_groups"] = groups

    @property
    def state(self) -> Any:
        """The state of the current method's optimizer, by parameter."""
        return self._optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        if not self._wrapping:
            self._optimizer.state = state
            self._inner.state = self._optimizer.state  # which the next method wraps

    def reconnect(self, keep: bool = True) -> None:
        if isinstance(self._optimizer, HasRankState):
            self._optimizer.reconnect(keep)

    # The step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step of the current method; the last measured one ends with the decision. Collective.

        Args:
            closure: Computes the loss and gradients, as in Torch; None for none. It is called once.

        Returns:
            The closure's loss, or None.

        Raises:
            NonFiniteError: As the current method raises it.
            HorovodInternalError: The exchange failed: MismatchError, StallError or PeerError.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.outcome = None
        if self._is_decided:
            self._step()
            # A rank that skips a step does not come here where a GradScaler has found the reason.
            self.steps += self.outcome is StepOutcome.TAKE
        else:
            self._measured_step()
        return loss

    def _step(self) -> None:
        current = self._optimizer
        if isinstance(current, CompressedOptimizer) and not current.has_averages:
            current.step()  # clips by itself
        else:
            self._await_averages()
            self._step_on_gradients()
        self.outcome = getattr(current, "outcome", StepOutcome.TAKE)

    def _await_averages(self) -> None:
        """Waits until gradients are averages, where the current method has any."""
        if not isinstance(self._optimizer, DiLoCo) and not getattr(self._optimizer, "has_averaged", False):
            self._optimizer.synchronize()

    def _step_on_gradients(self) -> None:
        """Makes the wrapped optimizer's step on the gradients as they are."""
        current = self._optimizer
        if self.max_grad_norm is not None:
            parameters = [p for group in self._inner.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        with contextlib.nullcontext() if isinstance(current, DiLoCo) else current.skip_synchronize():
            current.step()

    def _measured_step(self) -> None:
        current = self._optimizer
        self._await_averages()
        arrived = time.perf_counter()
        self._step_on_gradients()
        self.outcome = getattr(current, "outcome", StepOutcome.TAKE)
        ended = time.perf_counter()
        if self._step_ended is not None and current.backward_ended is not None:
            computed = current.backward_ended - self._step_ended
            if computed > 0:
                self._computed.append(computed + ended - arrived)
        self._step_ended = ended
        self.steps += 1
        self._watched += 1
        if self._watched >= MEASURED_STEPS:
            self._decide()

    def _decide(self) -> None:
        """Chooses the method for the rest of the run. Collective."""
        assert self._place is not None
        mine = median(self._computed) if self._computed else 0.0
        slowest = float(api.allreduce(np.array([mine]), op=api.Max, name="auto.compute")[0])
        left = max(self.total_steps - self.steps, 1)
        training = self._training(max(slowest, 1e-6))
        found = candidates(self._place, training, left, _kind(self._inner), self._max_loss_gap, self._unfit)
        chosen = fastest(found)
        self.candidates = found
        said = _said(self._place, training, left, found, chosen)
        # Numbers are equal on all ranks; a choice that was not would be a job that hangs.
        name, self.decision = api.broadcast_object((chosen.method.name, said), 0, name="auto.decision")
        if api.rank() == 0:
            _log.log(NOTICE, "%s", said)
        self._is_decided = True
        if name != self.method.name:
            self._use(_BY_NAME[name])

    def skip(self, *, overflow: bool = False) -> None:
        """Skips the current step on this rank, as the current method does."""
        if isinstance(self._optimizer, CollectiveStep):
            self._optimizer.skip(overflow=overflow)
            self.outcome = self._optimizer.outcome
        else:  # averages overflow on all ranks
            self._optimizer.end_step()
            self.outcome = StepOutcome.OVERFLOW if overflow else StepOutcome.SKIP

    def widen_gradients(self) -> None:
        if isinstance(self._optimizer, CollectiveStep):
            self._optimizer.widen_gradients()
        elif isinstance(self._optimizer, AveragesGradients):
            self._optimizer.await_averages()

    def gradients_changed(self) -> None:
        if isinstance(self._optimizer, CollectiveStep):
            self._optimizer.gradients_changed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, as the current method does."""
        self._optimizer.zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside this context add to gradients, and exchange nothing; the next one outside it does."""
        if isinstance(self._optimizer, DiLoCo):
            yield
        else:
            with self._optimizer.no_sync():
                yield

    def finish(self) -> None:
        """Makes the parameters of all ranks equal at the end of the run, by a last sync of DiLoCo or of 0/1 Adam. With
        other methods they are equal. Collective.
        """
        if isinstance(self._optimizer, (DiLoCo, ZeroOneAdam)):
            self._optimizer.finish()

    @contextlib.contextmanager
    def evaluation_parameters(self) -> Iterator[None]:
        """Within this context the parameters are those to evaluate or save: with DiLoCo those of the last syncs, else
        the parameters themselves, which with 0/1 Adam differ between ranks until a sync or ``finish()``. Not
        collective.
        """
        if isinstance(self._optimizer, DiLoCo):
            with self._optimizer.evaluation_parameters():
                yield
        else:
            yield

    # State

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the current method's optimizer, and the choice of the method, as copies."""
        full = dict(self._optimizer.state_dict())
        if "ocomm" not in full:
            kernels = sessions.current().kernels
            assert kernels is not None
            full["state"] = {number: copied(entry) for number, entry in full["state"].items()}
            full["param_groups"] = list(map(copied, full["param_groups"]))
            full["ocomm"] = {"steps": self.steps, "checksum": fingerprint(to_numpy(full["state"]), kernels)}
        full["auto"] = {
            "method": self.method.name,
            "is_decided": bool(self.decision),  # one rank has nothing to decide, and more ranks may go on
            "steps": self.steps,
            "begun_at": self._begun_at,
            "decision": self.decision,
        }
        return full

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of ``state_dict``, and goes on with its method, whatever the network. All ranks load the
        same state. Collective if the method is another one. If nothing was decided before, as on one rank, the next
        four steps are measured. ``total_steps`` is that of this optimizer, so a run may be made longer.

        Raises:
            CheckpointError: The state has no choice of a method, or is of a method that does not exist.
        """
        saved = state_dict.get("auto")
        if not isinstance(saved, Mapping) or saved.get("method") not in _BY_NAME:
            what = "is not of a DistributedAuto" if saved is None else f"has a method that is unknown: {saved!r}"
            raise CheckpointError(
                f"the state_dict {what}. Load the state of another optimizer into the plain one, before it is wrapped."
            )
        method = _BY_NAME[saved["method"]]
        rest = {key: value for key, value in state_dict.items() if key != "auto"}
        self.steps = int(saved["begun_at"])
        if method is not self.method or method.takes_total_steps:
            self._use(method)
        self._begun_at, self.steps = int(saved["begun_at"]), int(saved["steps"])
        self._is_decided, self.decision = bool(saved["is_decided"]) or api.size() == 1, str(saved["decision"])
        self._computed, self._step_ended, self._watched = [], None, 0  # what was measured is not saved
        if not isinstance(self._optimizer, HasRankState):
            del rest["ocomm"]
        self._optimizer.load_state_dict(rest)

    def rank_state_dict(self) -> dict[str, Any]:
        """Returns what only this rank has; nothing if averages are exact."""
        found = self._optimizer.rank_state_dict() if isinstance(self._optimizer, HasRankState) else {}
        return dict(found)

    def load_rank_state_dict(self, state: Any) -> dict[str, Any]:
        if isinstance(self._optimizer, HasRankState):
            return self._optimizer.load_rank_state_dict(state)
        return {"step": self.steps, "ranks": api.size(), "rank_state": "loaded", "why": ""}

    @property
    def awaits_rank_state(self) -> bool:
        return isinstance(self._optimizer, HasRankState) and self._optimizer.awaits_rank_state

    def compression_report(self) -> dict[str, Any]:
        """Returns the report of the current method's optimizer, since it has begun; for exact averages the steps alone.

        Returns:
            The entries of that report, and "method", the name of the current method.
        """
        if isinstance(self._optimizer, HasRankState):
            return {**self._optimizer.compression_report(), "method": self.method.name}
        return {"step": self.steps, "dense_steps": self.steps, "compressed_steps": 0, "ratio": None} | {
            "method": self.method.name
        }


def _whole_run(total_steps: int) -> int:
    found = require_total_steps(total_steps)
    if found is None:
        raise SettingsError(
            "DistributedAuto needs total_steps, the number of steps of the whole run, to compare methods"
        )
    return found


def _place() -> Place:
    probe = measure()
    return Place(probe.nodes, probe.ranks_per_node, probe.network, probe.codec)


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Returns the class that losses were measured with, which AdamW shares with Adam."""
    return "Adam" if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) else type(optimizer).__name__


def _unfit(optimizer: torch.optim.Optimizer, backward_passes_per_step: int) -> dict[str, str]:
    """Returns by wrapper why it cannot be used; what is missing can."""
    try:
        wrappable(optimizer, "1-bit Adam")
        adam = next(
            (
                f"it does not support {option}={group[option]!r}"
                for group in optimizer.param_groups
                for option in AdamWrapper.refused_options
                if group.get(option)
            ),
            "",
        )
    except InvalidRequestError as error:
        adam = str(error).split(". ")[0]
    unfit = {name: adam for name in ("DistributedOneBitAdam", "DistributedZeroOneAdam") if adam}
    if backward_passes_per_step > 1:
        unfit["DistributedDiLoCo"] = "it steps after each backward pass"
    return unfit


def _said(place: Place, training: Training, left: int, found: list[Candidate], chosen: Candidate) -> str:
    network, ranks = place.network, place.nodes * place.ranks_per_node
    where = f"{ranks} ranks on {place.nodes} host{'s' * (place.nodes > 1)}"
    if place.nodes > 1:
        where += f", {network.rate / 1e6:.0f} Mbit/s and {1e3 * network.round_s:.1f} ms per round"
    return (
        f"DistributedAuto: {chosen.method.name}, {duration(chosen.seconds)} for the {left} steps that are left "
        f"({where}, {1e3 * training.compute_s:.0f} ms of compute per step, {training.parameters:,} parameters). Time "
        f"and loss above exact averages by method:\n{table(found, chosen)}"
    )


DistributedAuto = Auto
