"""Drives one optimizer core through a session, step by step, for a frontend that holds the tensors.

The ``Frontend`` knows tensors, parameter groups and hooks. The driver knows the runtime: it opens the channel, agrees
with the other ranks, and takes or skips steps. Nothing here depends on a framework.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np

from ocomm.agreement import MADE_ALIKE, by_rank, first_difference, gather
from ocomm.collectives.bridge import IntraNode
from ocomm.collectives.engine import Channel
from ocomm.collectives.pipeline import segment_nbytes
from ocomm.compression.layout import Layout, TensorSpec
from ocomm.errors import InvalidRequestError, MismatchError
from ocomm.kernels.base import Kernels, Memory
from ocomm.kernels.device import DeviceMemory
from ocomm.nccl_opening import open_bridge
from ocomm.negotiation.coordinator import FIRST_STEP
from ocomm.optim import checkpoint
from ocomm.optim.core import Core, Group
from ocomm.optim.options import Options, option
from ocomm.optim.replicas import ReplicasDifferError, ReplicaWindows
from ocomm.optim.stepper import StepOutcome, Stepper
from ocomm.session import Session
from ocomm.training import resume
from ocomm.types import Flag, Nodes, ReduceOp

_log = logging.getLogger("ocomm")


class Frontend(Protocol):
    """A framework's side of a distributed optimizer."""

    #: Its name; ranks of several may train one model.
    framework: str
    #: Those of the parameters' device; None: the session's.
    kernels: Kernels | None

    def implementation(self) -> str:
        """What decides how the host's own dense steps round, in words: equal words mean equal bits."""
        ...

    def locate(self, tensors: list[int], final: bool) -> list[int] | None:
        """Addresses of gradients, contiguous float32, 0 for none; None: not to be read before ``step()``.

        On a device, unless ``driver.clips``, also in 16 bits, if ``core.gradients["grad_dtype"]`` says so.
        """
        ...

    def groups(self) -> list[Group]:
        """All parameter groups."""
        ...


@dataclass(frozen=True, kw_only=True)
class Common(Options):
    """Options that every compressed optimizer has. Raises InvalidRequestError for values that cannot be."""

    block_size: int | Literal["tensor"] = option(
        4096,
        """The number of elements of a tensor that share one scale, where the algorithm has scales, and one owner;
        ``"tensor"``: all of a tensor's.""",
    )
    overlap: bool = option(
        True,
        """Exchange gradients while backward goes on to compute others. With Keras that takes a graph of TensorFlow, in
        which gradients that are clipped by a common norm wait for each other.""",
    )
    max_grad_norm: float | None = option(
        None,
        """Clip gradients by one norm for all ranks, N = sqrt(mean over ranks of |g|^2), to this one; in the dense steps
        of a warm-up their average is clipped by its own norm. None: no clipping.""",
    )
    clip: Literal["exact", "previous"] = option(
        "exact",
        """``"exact"`` clips by this step's N, for which gradients wait, so that nothing overlaps; ``"previous"`` clips
        by the last step's, with overlap.""",
    )
    verify: Literal["sampled", "full", "version"] = option(
        "sampled",
        """How much of each gradient is read again to notice a change that the framework does not show (docs/checks.md):
        another 64th in each step (``"sampled"``), all of it (``"full"``), nothing (``"version"``).""",
        agree=False,
    )
    backward_passes_per_step: int = option(1, "Gradients are summed over that many backward passes.")
    hierarchical: bool | Literal["auto"] = option(
        "auto",
        """The ranks of a host add up their gradients, and each compresses a slice of the sum for the other hosts;
        ``"auto"``: if there are several hosts, all with several ranks.""",
    )

    def __post_init__(self) -> None:
        size, passes, norm = self.block_size, self.backward_passes_per_step, self.max_grad_norm
        if size != "tensor" and not isinstance(size, (int, np.integer)):
            raise InvalidRequestError(f"block_size must be a whole number or 'tensor', got {size!r}")
        if not isinstance(passes, (int, np.integer)) or passes < 1:
            raise InvalidRequestError(f"backward_passes_per_step must be > 0, got {passes!r}")
        if self.clip not in ("exact", "previous"):
            raise InvalidRequestError(f"clip must be 'exact' or 'previous', got {self.clip!r}")
        if norm is not None and not (isinstance(norm, (int, float, np.number)) and norm > 0):
            raise InvalidRequestError(f"max_grad_norm must be > 0 or None, got {norm!r}")
        if self.verify not in ("sampled", "full", "version"):
            raise InvalidRequestError(f"verify must be 'sampled', 'full' or 'version', got {self.verify!r}")


class Driver:
    """One rank's half of a distributed optimizer over process set ``number``.

    Args:
        session: Of the job.
        number: The process set.
        specs: The tensors, in registration order.
        host: The frontend that holds them.
        core_class: The algorithm.
        options: Its options.
        common: Those that every optimizer has.
        told: What else the ranks compare: values of JSON by name.

    Raises MismatchError that names the first tensor or option that differs between the ranks. Collective.
    """

    def __init__(
        self,
        session: Session,
        number: int,
        specs: Sequence[TensorSpec],
        frontend: Frontend,
        core_class: type[Core],
        options: Options,
        common: Common,
        told: Mapping[str, Any] | None = None,
    ) -> None:
        self.kind = core_class.kind
        topology = session.require_topology()
        ranks = session.set_ranks[number]
        nodes = session.nodes(number, common.hierarchical)
        name = session.automatic_name(self.kind, number)
        kernels = frontend.kernels or session.kernels
        assert kernels is not None
        mine = f"{_where(kernels.memory)} {common.hierarchical} {frontend.framework} {frontend.implementation()}"
        said = [text.split(maxsplit=3) for text in gather(session, number, f"{name}.frameworks", mine)]
        columns = list(zip(*said, strict=True))
        places, forms, frameworks = (set(column) for column in columns[:3])
        #: Are the ranks of several frameworks?
        self.is_mixed = len(frameworks) > 1
        #: Would the hosts' own dense steps round differently on different ranks? Then ``ocomm.optim.adam`` makes them.
        self.has_unlike_hosts = self.is_mixed or len(set(columns[3])) > 1
        if self.has_unlike_hosts and not self.is_mixed and topology.rank == ranks[0]:
            _say_unlike(name, dict(zip(ranks, columns[3], strict=True)))
        direct, intra_node = False, None
        if len(forms) == 1:  # else the channel will be refused, with the reason
            nodes, direct, intra_node = _arranged(
                session, number, common.hierarchical, nodes, places, name, kernels.memory
            )
        #: Do messages go from device to device? And what carries dense values inside nodes? As all ranks have agreed.
        self.direct = direct
        self.intra_node = intra_node
        block_size = common.block_size if common.block_size == "tensor" else int(common.block_size)
        layout = Layout(specs, len(ranks), block_size, nodes)
        self.session = session
        self.number = number
        self.common = common
        self.core: Core = core_class(layout, ranks.index(topology.rank), kernels, options)
        #: What the ranks compare, and what is saved: those named ``fixed_options`` must be the same when it is loaded.
        self.options = {**common.agreed(), **options.agreed(), **(told or {})}
        self.fixed_options = [*common.fixed(), *options.fixed()]
        channel = _open_channel(session, number, name, layout, self.options)
        weakref.finalize(self, session.release_channel, number, channel).atexit = False
        # The driver belongs to its host: a reference back would keep both alive, and their buffers.
        self._frontend = reference = weakref.ref(frontend)

        def locate(tensors: list[int], final: bool) -> list[int] | None:
            alive = reference()
            assert alive is not None, "the optimizer is gone"
            return alive.locate(tensors, final)

        self.stepper = Stepper(
            name,
            self.core,
            channel,
            ranks,
            session.watch(number, name),
            locate,
            segment_nbytes=segment_nbytes(layout.numel // 8, len(ranks), session.settings.segment_nbytes),
            overlap=common.overlap,
            # To look at gradients on a device the host would have to wait for it.
            verify="version" if kernels.memory.is_device else common.verify,
            timeout_s=session.settings.stall_shutdown_s,
            replicas=ReplicaWindows(
                4 * layout.numels,
                session.settings.replica_check_steps,
                kernels,
                on_devices=places != {_ON_HOST},
            ),
            direct=self.direct,
            intra_node=self.intra_node,
        )
        #: Steps taken, not skipped.
        self.steps = 0
        #: N of the last step taken whose gradients were clipped: sqrt(mean over ranks of |g|^2).
        self.norm: float | None = None
        self._announcement = 0
        #: What the core was handed last, all of it and what gradients are compressed with; None: to be handed anew.
        self._compress_hyper: Hashable = None
        #: Are the gradients of the step under way clipped by N?
        self.clips = False
        #: Must N be agreed before anything of the step under way is sent?
        self._needs_norm_round = False
        #: Are gradients compressed with parameters, by what the core was handed last?
        self.is_decay_coupled = False
        #: What ``load_state`` and ``load_rank_state`` have loaded, for the report.
        self.resumed: dict[str, Any] | None = None
        #: Has no step begun yet, since this driver was made or a state loaded?
        self._at_start = True
        #: Was a state loaded to which there are rank states that were not?
        self._rank_state_due = False
        #: Says which replicas the loaded state belongs to; None once they have moved on.
        self._loaded_replica: str | None = None
        #: What ``_state`` says before the first step.
        self._fresh: Mapping[str, Any] = self._state()

    @property
    def frontend(self) -> Any:
        frontend = self._frontend()
        assert frontend is not None, "the optimizer is gone"
        return frontend

    @property
    def name(self) -> str:
        return self.stepper.name

    @property
    def speaks(self) -> bool:
        """Is this the rank that tells the user what concerns all ranks? One rank alone has nothing to tell."""
        return self.core.rank == 0 and self.core.layout.ranks > 1

    # Hyperparameters

    def groups(self) -> list[Group]:
        """The host's parameter groups as they are now.

        Where ranks are of several frameworks, rates are those that float32 holds, since Keras has no others: the
        shortest number that stands for one.
        """
        groups = self.frontend.groups()
        return [replace(g, lr=float(str(np.float32(g.lr)))) for g in groups] if self.is_mixed else groups

    def compress_hyper(self, groups: Sequence[Group]) -> Hashable:
        """What gradients are compressed with: a change after hand-over means that the exchange must be done again."""
        if self.core.sends_rates:
            return tuple([(group.lr, group.betas[0], group.coupled_decay) for group in groups])
        return tuple([(group.betas[0], group.coupled_decay) for group in groups])

    def full_hyper(self, groups: Sequence[Group]) -> Hashable:
        """All that must be the same on all ranks."""
        values = [(g.lr, *g.betas, g.eps, g.coupled_decay, g.decoupled_decay) for g in groups]
        return (*values, self.core.gradient_scale)

    def _set_hyper(self, groups: Sequence[Group], hyper: Hashable) -> None:
        """Hands the core the hyperparameters of all groups; ``hyper`` is their ``compress_hyper``."""
        for group in groups:
            self.core.set_hyper(group)
        self._compress_hyper = hyper, self.core.gradient_scale
        self.is_decay_coupled = any(group.coupled_decay for group in groups)

    # Clipping

    def clips_next(self) -> bool:
        """Are the gradients of the next step to be clipped by N? Not where their average is clipped instead.

        Called only with ``max_grad_norm``.
        """
        return True

    def _clip_by(self, norm: float | None) -> None:
        """Gradients count by min(1, max_grad_norm / (N + 1e-6)), as in ``torch.nn.utils.clip_grad_norm_``."""
        limit, scale = self.common.max_grad_norm, 1.0
        # Whose gradient is not finite is found in the exchange, which says so.
        if limit is not None and norm is not None and math.isfinite(norm):
            scale = min(1.0, limit / (norm + 1e-6))
        self.core.gradient_scale = scale

    def _begin_clipping(self) -> None:
        """Decides how the gradients of the step that begins are clipped."""
        self.clips = self.clips_next()
        self._needs_norm_round = self.clips and (self.common.clip == "exact" or self.norm is None)
        self._clip_by(self.norm if self.clips and not self._needs_norm_round else None)

    # One step

    @property
    def is_at_start(self) -> bool:
        """Will the next step begin with what all ranks must agree on? Then gradients are not handed over before it."""
        return self._at_start

    def begin(self) -> None:
        """Opens the next step, if it is not open: before the first gradient of a step is handed over."""
        if not self.stepper.begun:
            if self._at_start:
                self._agree_on_start()
                self._compress_hyper = None
            if self.common.max_grad_norm is not None:
                self._begin_clipping()
            groups = self.groups()
            hyper = self.compress_hyper(groups)
            if self.core.sends_rates or (hyper, self.core.gradient_scale) != self._compress_hyper:
                self._set_hyper(groups, hyper)
            self.stepper.begin(_hyper_digest(hyper), early=not self._needs_norm_round)

    def step(self, changed: Callable[[], bool]) -> StepOutcome:
        """Exchanges, and takes the step if all ranks do. ``changed()``: is a gradient not what was handed over?"""
        self.begin()
        if changed() or self.stepper.buckets.changed_tensors():
            self.stepper.object(Flag.CHANGED)
        return self._end()

    def skip(self, overflow: bool = False) -> StepOutcome:
        """This rank does not take the step under way; then nobody does. ``overflow``: its gradients are not finite."""
        self.begin()
        self.stepper.object(Flag.SKIP | Flag.NON_FINITE if overflow else Flag.SKIP)
        return self._end()

    def _end(self) -> StepOutcome:
        try:
            return self._exchange()
        except ReplicasDifferError as error:
            within = self.session.settings.replica_check_steps
            difference = first_difference(self.session, self.number, f"{self.name}.drift", self._replicated(), "hold")
            told = MismatchError(
                f"{self.name}: the ranks' parameters have become different within the last {within} steps: "
                f"{difference or 'they are equal again'}. Something changed them on some ranks only: a write to a "
                "weight, a checkpoint that one rank loaded. Do it on all ranks, or "
                f"{MADE_ALIKE[self.frontend.framework]} after it. "
                "OCOMM_REPLICA_CHECK_STEPS says how often this is checked."
            )
            self.stepper.give_up(told)
            raise told from error

    def _exchange(self) -> StepOutcome:
        groups = self.groups()
        hyper, lr = self.compress_hyper(groups), groups[0].lr
        if self._needs_norm_round:
            outcome = self.stepper.agree_on_norm(lr)
            if outcome is not None:
                return outcome
            self._clip_by(self.stepper.norm)
            self._set_hyper(groups, hyper)
        outcome = self.stepper.exchange(
            _hyper_digest(hyper),
            _hyper_digest(self.full_hyper(groups)),
            lr,
            self._announcement,
            lambda: self._set_hyper(groups, hyper),
            with_norm=self.clips and self.common.clip == "previous",
        )
        if outcome is StepOutcome.TAKE:
            if self.clips:
                self.norm = self.stepper.norm
            self._set_hyper(groups, hyper)
            self._take()
        return outcome

    def _agree_on_start(self) -> None:
        """Before the first step: do all ranks hold the same? MismatchError that names what they do not."""
        said = self._replicated()
        try:
            self.session.agree(self.number, self.name + FIRST_STEP, f"{digest(said):016x}")
        except MismatchError as error:
            difference = first_difference(self.session, self.number, f"{self.name}.replicas", said, "hold")
            raise MismatchError(
                f"{self.name}: the replicas are not alike before their first step: {difference}. Load the same "
                f"checkpoint on all ranks, or {MADE_ALIKE[self.frontend.framework]}."
                if difference
                else str(error)
            ) from None
        if self._rank_state_due and self.core.has_rank_state and self.core.rank == 0:
            _log.warning(
                "%s: load_rank_state_dict was not called after load_state_dict: errors start at zero on all ranks.",
                self.name,
            )
        self._at_start = self._rank_state_due = False

    def _replicated(self) -> list[str]:
        """In words, what must be equal on all ranks before the first step."""
        core = self.core
        names = [spec.name for spec in core.layout.tensors]
        lines = [f"a state of step {self.steps}"]
        lines += [f"'{name}' with checksum {c:016x}" for name, c in zip(names, core.replica_digest(), strict=True)]
        if self.steps:
            lines += [f"{what} with checksum {checkpoint.fingerprint(v, self.kernels)}" for what, v in self._loaded()]
        return lines

    def _loaded(self) -> list[tuple[str, Any]]:
        """What a saved state has brought besides parameters, with its name in messages."""
        return [("the optimizer's state", self.core.state())]

    def _restart(self, steps: int) -> None:
        """The next step is the first after ``steps`` others that were not this driver's."""
        self.require_idle("a state")
        self.steps = steps
        self.stepper.resume(steps, None)
        self._at_start = True
        self._loaded_replica = None

    def forget(self) -> None:
        """As before the first step. Not collective, but for all ranks: the next step compares what they hold."""
        self._restart(0)
        self._rank_state_due = False
        self._load(self._fresh)

    def _take(self) -> None:
        self.steps += 1
        self._loaded_replica = None
        order = list(self.stepper.buckets.arrivals)
        try:
            self.take()
            if self.stepper.overlap and not self.stepper.overlapping:
                self._adopt_order(order)
        except BaseException as error:  # some parameters may have moved already
            self.stepper.give_up(error)
            raise

    def take(self) -> None:
        """Commits the step, and decides what the ranks decide after it."""
        self.stepper.commit()
        self._wake()

    def _wake(self) -> None:
        """Wakes masked elements that some rank has a gradient for, if it is time to look."""
        if self.core.wake_due:
            touched = self.core.touched()
            self.session.reduce(self.number, f"{self.name}.touched", touched, ReduceOp.BITWISE_OR)
            self.core.wake(touched)

    def _adopt_order(self, arrivals: list[int]) -> None:
        """Buckets follow the order in which rank 0's gradients came in the first step; from now on with overlap."""
        seen = set(arrivals)
        order = np.array(arrivals + [t for t in self.stepper.flows.order if t not in seen], np.int64)
        self.session.broadcast(self.number, f"{self.name}.order", order)
        self.stepper.adopt_order(order.tolist())
        self.stepper.overlapping = True

    # State

    def state(self, masters: Sequence[int] = ()) -> dict[str, Any]:
        """What is the same on all ranks, besides parameters and the wrapped optimizer's state; arrays are copies.

        ``masters``: tensors whose parameters have more digits here than in the framework. They are in it by name, as
        ``frontend.shaped`` gives them their shape.
        """
        specs = self.core.layout.tensors
        kept = {specs[t].name: self.frontend.shaped(t, self.core.replica(t)) for t in masters}
        return checkpoint.add_checksum({**resume.header(self), **self._state(), "masters": kept}, self.kernels)

    def _state(self) -> dict[str, Any]:
        """A driver with further replicated state adds it here, and takes it back in ``_load``."""
        return {
            "stepper": {"order": [int(t) for t in self.stepper.flows.order], "arrived": self.stepper.overlapping},
            "norm": self.norm,
            "core": self.core.state(),
        }

    def check_state(self, saved: Mapping[str, Any]) -> None:
        """Raises CheckpointError, naming what differs, if ``load_state`` would not load it."""
        resume.check(self, saved, "the state_dict")

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """The inverse of ``state``, after parameters and the wrapped optimizer's state are in place.

        The rank state starts at zero: ``load_rank_state`` comes after it. Raises CheckpointError, before anything is
        changed, for another model, optimizer or seed; InvalidRequestError between backward and ``step()``.
        """
        self.check_state(saved)
        self.require_idle("load_state_dict")
        self._at_start = self._rank_state_due = True
        order = saved["stepper"]
        self.stepper.resume(saved["steps"], order["order"] if order["arrived"] else None)
        self.steps = saved["steps"]
        self._load(saved)
        self._loaded_replica = saved["replica"]
        self.resumed = {"step": self.steps, "ranks": saved["ranks"], "rank_state": "reset"}
        resume.say_changes(self, saved)

    def _load(self, saved: Mapping[str, Any]) -> None:
        """The inverse of ``_state``; ``steps`` is set already."""
        self.norm = saved["norm"]
        self.core.load_state(saved["core"])

    def saved_moments(self, tensor: int) -> dict[str, Any] | None:
        """What the wrapped optimizer's state of a tensor is, where this driver has taken it over; else None.

        ``step`` and flat float32 arrays, in the wrapped optimizer's own terms.
        """
        del tensor
        return None

    def taken_over(self, saved: Mapping[str, Any]) -> list[int]:
        """The tensors whose moments a saved state needs from the wrapped optimizer's state."""
        del saved
        return []

    def rank_state(self) -> dict[str, Any]:
        """What only this rank knows, with a checksum; arrays are copies. See ``Core.rank_buffers``."""
        return checkpoint.add_checksum(
            {**resume.header(self), "rank": self.core.rank, **self.core.rank_state()}, self.kernels
        )

    def load_rank_state(self, source: resume.Source) -> dict[str, Any]:
        """The inverse. Collective: all ranks load, or none, or all start at zero if the state of any is missing.

        Comes after ``load_state`` of the same checkpoint. Returns what was done, as in ``report()["resumed"]``. Raises
        CheckpointError on all ranks, before anything is changed, if a state is damaged or foreign on any; MismatchError
        if the ranks have states of different runs.
        """
        self._rank_state_due = False
        self.resumed = {"step": self.steps, **(self.resumed or {}), **resume.load_rank_states(self, source)}
        return dict(self.resumed)

    def require_idle(self, what: str) -> None:
        """Raises InvalidRequestError between backward and ``step()``."""
        if self.stepper.begun:
            raise InvalidRequestError(
                f"{self.name}: {what} was called between backward and step(); take the step or call zero_grad() first."
            )

    @property
    def replica(self) -> str:
        """Hash of what is equal on all ranks: says whether two saved states are of the same moment of the same run."""
        return self._loaded_replica or f"{digest(self.core.replica_digest()):016x}"

    @property
    def kernels(self) -> Kernels:
        """The host's, for saved states."""
        assert self.session.kernels is not None
        return self.session.kernels

    def report(self) -> dict[str, Any]:
        """What was really sent, against dense: counts of steps and bytes of this rank.

        ``ratio`` is dense over sent bytes of the whole run, ``last_ratio`` of the last step; ``exposed_ms`` the mean
        time that ``step()`` waited for the exchange; ``grad_norm`` what the last step was clipped by, sqrt(mean over
        ranks of |g|^2), None if none was. ``resumed``: None, or what was loaded. Bytes, and steps by kind, are counted
        from the start of this process. The core adds its ``stage``, and more.

        ``form`` is ``"flat"`` or ``"hierarchical"``. In the latter ``bytes_sent`` and ``bytes_dense`` count what goes
        to other nodes, and ``bytes_sent_inside`` what this rank sends to others of its own; ``inside`` is ``"MPI"`` or
        ``"NCCL"``: which of them carries dense values there.
        """
        traffic = self.stepper.traffic
        dense = self.core.layout.dense_bytes()
        return {
            **self.core.report(),
            "form": "flat" if self.core.layout.nodes.is_flat else "hierarchical",
            "inside": None if self.core.layout.nodes.is_flat else "MPI" if self.intra_node is None else "NCCL",
            "bytes_sent_inside": traffic.bytes_sent_inside,
            "step": self.steps,
            "dense_steps": traffic.dense_steps,
            "compressed_steps": traffic.compressed_steps,
            "skipped_steps": traffic.skipped_steps,
            "redone_steps": traffic.redone_steps,
            "overlap": self.stepper.overlap,
            "grad_norm": self.norm,
            "bytes_sent": traffic.bytes_sent,
            "bytes_dense": traffic.bytes_dense,
            "ratio": traffic.bytes_dense / traffic.bytes_sent if traffic.bytes_sent else None,
            "last_bytes_sent": traffic.last_bytes_sent,
            "last_ratio": dense / traffic.last_bytes_sent if traffic.last_bytes_sent else None,
            "exposed_ms": 1e3 * traffic.exposed_s / max(traffic.steps, 1),
            "memory_bytes": self.stepper.memory(),
            "resumed": self.resumed,
        }


def digest(values: Any) -> int:
    """64-bit hash of a value by its ``repr``."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=8)  # hyperparameters are most often those of the last step
def _hyper_digest(values: Hashable) -> int:
    """The same for values that compare equal, 0 and 0.0 or -0.0, say: the cache holds any for all of them."""
    return digest(_as_floats(values))


def _as_floats(values: Any) -> Any:
    return tuple(map(_as_floats, values)) if isinstance(values, tuple) else float(values) + 0.0  # -0.0 + 0.0 is 0.0


#: Where a rank's parameters are: in the host's memory, on a device, on one that the network reaches.
_ON_HOST, _ON_DEVICE, _REACHED = "0", "1", "2"


def _say_unlike(name: str, implementations: Mapping[int, str]) -> None:
    by_text: dict[str, list[int]] = {}
    for rank, text in implementations.items():
        by_text.setdefault(text, []).append(rank)
    _log.warning(
        "%s: the ranks' own optimizers would round differently (%s), so ocomm's Adam makes the dense steps on all "
        "ranks, which rounds alike everywhere. Give all ranks the same flags to keep the framework's own.",
        name,
        by_rank(by_text, "have"),
    )


def _where(memory: Memory) -> str:
    if not memory.is_device:
        return _ON_HOST
    assert isinstance(memory, DeviceMemory)
    return _REACHED if memory.reached_by_network else _ON_DEVICE


def _arranged(
    session: Session,
    number: int,
    hierarchical: bool | Literal["auto"],
    nodes: Nodes,
    places: set[str],
    name: str,
    memory: Memory,
) -> tuple[Nodes, bool, IntraNode | None]:
    """The nodes, whether messages go from device to device, and what carries dense values inside nodes, as the
    ``places`` of the ranks' parameters allow.

    Where the sum inside a node would go through the host's memory it costs more than compression saves: then every rank
    is a node. InvalidRequestError if that was excluded.
    """
    reached = _REACHED in places and _ON_DEVICE not in places and nodes.ranks > 1
    direct = reached and nodes.groups == 1
    if nodes.is_flat or places == {_ON_HOST}:
        return nodes, direct, None
    intra_node, words = open_bridge(session, number, name, nodes, memory)
    is_first = session.require_topology().rank == session.set_ranks[number][0]
    if intra_node is not None or (direct and session.settings.nccl != "1"):
        if is_first:
            way = words if intra_node else f"MPI; not NCCL: {words}"
            _log.info("%s: hosts add up from device to device, over %s.", name, way)
        return nodes, direct, intra_node
    mpi = "there are too many hosts for that (OCOMM_DIRECT_PEERS)" if reached else "some rank's does not"
    why = f"It needs NCCL ({words}), or an MPI that takes device pointers, but {mpi}"
    if session.settings.nccl == "1":
        raise InvalidRequestError(f"{name}: OCOMM_NCCL=1, but there is no NCCL between the GPUs of a host ({words}).")
    if hierarchical is True:
        raise InvalidRequestError(
            f"{name}: hierarchical=True, but parameters are on GPUs, and the sum inside a node would go through the "
            f"host's memory. {why}; ocommrun --check-build says more. Leave it at 'auto': then every rank compresses "
            "by itself."
        )
    if is_first:
        _log.warning(
            "%s: hierarchical='auto' is off, because parameters are on GPUs and the sum inside a node would go through "
            "the host's memory: every rank compresses by itself. %s.",
            name,
            why,
        )
    flat = session.nodes(number, False)
    return flat, reached and flat.groups == 1, None


def _open_channel(session: Session, number: int, name: str, layout: Layout, options: Mapping[str, Any]) -> Channel:
    """The optimizer's channel; if the ranks do not agree, an error that says on which tensor or option."""
    text = json.dumps(options, sort_keys=True)
    try:
        return session.open_channel(number, name, layout.digest ^ digest(text), f"{len(layout.tensors)} tensors")
    except MismatchError as error:
        specs = [f"tensor '{t.name}' {t.shape} {t.dtype} order {t.order}" for t in layout.tensors]
        lines = [*specs, *(f"{key}={value!r}" for key, value in sorted(options.items()))]
        difference = first_difference(session, number, f"{name}.descriptions", lines, "registered")
        raise MismatchError(
            f"{name}: the ranks do not wrap the same optimizer: {difference}." if difference else str(error)
        ) from None
