"""Drives 1-bit Adam on one rank: the wrapped optimizer's warm-up, its end, and waking masked elements."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ocomm.compression.layout import TensorSpec
from ocomm.errors import CheckpointError, InvalidRequestError
from ocomm.kernels.base import Floats
from ocomm.optim.core import address
from ocomm.optim.freeze import FreezeSchedule, LateTensors
from ocomm.optim.onebit_adam import OneBitAdam, OneBitAdamOptions, Stage
from ocomm.optim.sharded import ShardedAdam
from ocomm.session import Session
from ocomm.telemetry.units import amount
from ocomm.training.adam import AdamDriver, MomentsFrontend
from ocomm.training.clipping import clip_factor
from ocomm.training.common import Common
from ocomm.training.driver import Frontend
from ocomm.types import ReduceOp

_log = logging.getLogger("ocomm")


class AdamFrontend(MomentsFrontend, Protocol):
    """A frontend whose Adam makes the warm-up's steps, or keeps m and v for a core that makes them."""

    def dense_step(self, tensors: list[int], average: Callable[[int], Floats], max_norm: float | None) -> None:
        """Makes the wrapped optimizer's own step of ``tensors``, and of no others, on their averaged gradients.

        The averages, which may be changed, are first clipped to a norm of ``max_norm``, unless that is None.
        """
        ...

    def advance(self, tensor: int) -> tuple[Floats, Floats, int]:
        """Counts a step of a tensor. Returns its m and v, which begin as zeros, and the number of that step."""
        ...

    def adopt(self, tensor: int, momentum: Floats, variance: Floats, step: int) -> None:
        """Copies m and v, flat float32, as the wrapped optimizer's own of a tensor after ``step`` steps."""
        ...


def _why_dense(schedule: FreezeSchedule, total_steps: int | None, seen: int, steps: int) -> str:
    """Returns why none of the ``seen`` last steps of ``steps`` was compressed, and what to change."""
    dense = f"all {seen} steps were dense, so nothing was compressed"
    if schedule.decided is not None and steps > schedule.decided:
        return (
            f"{dense}: when the warm-up was over, after step {schedule.decided}, the variance of all parameters was "
            "zero, because no gradient other than zero had come. A parameter's own warm-up begins with its first."
        )
    if schedule.freeze_step != "auto":
        why = f"freeze_step is {schedule.freeze_step}. Leave it at 'auto' and pass"
    elif total_steps is not None:
        why = (
            f"total_steps={total_steps}, which counts steps of the optimizer, ends the warm-up after step "
            f"{schedule.latest} at the latest. Pass"
        )
    else:
        why = (
            f"freeze_step='auto' waits for a stable variance, at least 2 / (1 - beta2) = {2 * schedule.window} steps. "
            "Pass"
        )
    return (
        f"{dense}: {why} total_steps={steps}, with which the warm-up takes a fifth of the run at most, or a "
        "smaller freeze_step."
    )


class OneBitAdamDriver(AdamDriver):
    """An ``AdamDriver`` whose ``frontend`` is an ``AdamFrontend``. Also drives 1-bit LAMB, whose core makes the dense
    steps.
    """

    core: OneBitAdam
    #: True if the owners of blocks make the warm-up's steps.
    is_sharded = False
    #: Why that is impossible here; None if it is possible.
    why_whole: str | None = None
    #: True if a loaded warm-up is over, as it is shorter now, but its shards are yet to come.
    _is_freeze_due = False

    def __init__(
        self,
        session: Session,
        number: int,
        specs: Sequence[TensorSpec],
        frontend: AdamFrontend,
        core_class: type[OneBitAdam],
        options: OneBitAdamOptions,
        common: Common,
    ) -> None:
        self.schedule = FreezeSchedule(options.freeze_step, frontend.groups()[0].betas[1], options.total_steps)
        #: T_w, once it is known.
        self.freeze_at = self.schedule.decided
        self._late = LateTensors()
        #: Number of dense steps of tensors that come later; None for T_w.
        self.late_warmup: int | None = None
        self._total_steps = options.total_steps
        super().__init__(session, number, specs, frontend, core_class, options, common)
        decided = self.freeze_at
        if self.speaks and decided is not None and self._total_steps is not None and decided >= self._total_steps:
            _log.warning(
                "%s: all of the %d steps will be dense, because freeze_step is %d: nothing will be compressed. Leave "
                "freeze_step at 'auto', or choose less: a fifth of the steps is usual.",
                self.name,
                self._total_steps,
                decided,
            )

    def arrange_core(self, frontend: Frontend) -> dict[str, Any]:
        core, told = self.core, super().arrange_core(frontend)
        wanted = core.options.shard_state
        self.why_whole = why = self._why_whole(frontend)
        if wanted == "auto" and (why is not None or core.layout.ranks == 1):
            if why is not None and core.rank == 0:
                _log.warning("Distributed%s: shard_state='auto' is off, because %s.", self.kind, why)
            return told
        if not wanted:
            return told
        if why is not None:
            raise InvalidRequestError(
                f"Distributed{self.kind}: shard_state=True, but {why}. Leave it out, or pass 'auto', which is off here."
            )
        self.is_sharded = True
        core.sharded = self._new_shards()
        return {**told, "shard_state": True}

    def _why_whole(self, frontend: Frontend) -> str | None:
        if self.core.dense_steps_of is not None:
            return f"the steps of {self.core.dense_steps_of} need norms of whole tensors"
        if self.core.dense_codes is not None:
            return f"dense_bits is {self.core.dense_bits}, and parameters need 32 bits"
        if frontend.grid is not None:
            return "there is a mesh, on which fully_shard divides m and v, and the parameters, too"
        if self.core.param_memory.is_device:
            return "the parameters are on GPUs"
        if not self.core.layout.nodes.is_flat:
            return "the form is hierarchical (hierarchical=False turns that off)"
        if self.is_mixed:
            return "the job mixes frameworks"
        return None

    def _new_shards(self) -> ShardedAdam:
        return ShardedAdam(self.core.layout, self.core.rank, self.core.kernels)

    @property
    def why_dense(self) -> Callable[[int, int], str]:
        return partial(_why_dense, self.schedule, self._total_steps)

    def decided_by_length(self) -> str:
        if self.freeze_at != self.schedule.latest:
            return ""
        return f"and because of it the warm-up ended after step {self.freeze_at}"

    def plan(self) -> str:
        compressed = f"about {amount(self.compressed_nbytes)} once the variance is frozen"
        schedule = self.schedule
        if schedule.decided is not None:
            when = f"after step {schedule.decided} (freeze_step)"
        elif schedule.latest is not None:
            when = f"after step {schedule.latest} at the latest (a fifth of total_steps)"
        else:
            when = f"after {2 * schedule.window} steps at the earliest (freeze_step='auto'; total_steps= sets a limit)"
        return f"a step sends {amount(self.uncompressed_nbytes)} per rank in the warm-up, {compressed}, {when}."

    def clips_next(self) -> bool:
        if self.grid is not None:  # the same in all parts, also in one whose tensors had no gradient yet
            return self.freeze_at is not None and self.steps >= self.freeze_at
        return bool((self.core.stage == Stage.COMPRESSED).any())

    def take(self) -> None:
        core = self.core
        dense, present = core.exchange().dense, self.stepper.present_anywhere
        limit = None if self.clipping.is_on else self.clipping.limit
        factor = core.gradient_scale
        if self.has_part_of_norm and limit is not None:
            factor, limit = clip_factor(self.stepper.norm, limit), None
        self.stepper.commit()
        if dense.any():
            warming: list[int] = np.flatnonzero(dense).tolist()
            moving = [t for t in warming if present[t]]
            if core.sharded is not None:
                self._sharded_step(moving, factor)
            else:
                for tensor in moving if factor != 1.0 else []:
                    average = self.stepper.average(tensor)
                    average[:] = core.param_memory.host(average) * np.float32(factor)
                self._dense_step(moving, limit)
            self._end_warmup(warming)
        self._wake()

    def _sharded_step(self, tensors: list[int], factor: float) -> None:
        """Makes the step of what this rank owns of tensors in warm-up, and gets what the others own."""
        assert self.core.sharded is not None
        if self.stepper.flows.sharded is not None:  # there are tensors with elements
            self.core.sharded.update(tensors, self.groups(), self.core.tensors["param"], factor)
            self.stepper.gather_parameters()

    def _dense_step(self, tensors: list[int], max_norm: float | None) -> None:
        """Makes a step of tensors in warm-up, on their averages, as ``AdamFrontend.dense_step`` describes."""
        if self.core.dense_steps_of is None:
            self.frontend.dense_step(tensors, self.stepper.average, max_norm)
            return
        averages = [self.stepper.average(tensor) for tensor in tensors]
        self.clip_averages(averages, max_norm)
        for tensor, average in zip(tensors, averages, strict=True):
            self.core.dense_step(tensor, average, *self.frontend.advance(tensor))

    # The end of the warm-up

    def _end_warmup(self, warming: list[int]) -> None:
        """Freezes what is due: all tensors at T_w, later ones after a warm-up of their own."""
        if self.freeze_at is None:
            heard = self.stepper.heard_announcement
            if heard:
                self.freeze_at = self.schedule.decided = heard
                self._announcement = 0
            else:
                # All ranks observe, so that a checkpoint of any rank has the window. Rank 0's result is announced.
                # A part of a grid whose own schedule has decided still counts for that of the first part.
                is_due = self.schedule.needs_norm if self.grid is None else self.schedule.is_norm_step
                norm = self.variance_norm(warming) if is_due(self.steps) else None
                if self.grid is not None and norm is not None:
                    norm = self.stepper.sum_over_grid(norm)
                decided = self.schedule.observe(self.steps, norm, [group.lr for group in self.groups()])
                if self.core.rank == 0:
                    self._announcement = decided or 0
        if self.freeze_at is None or self.steps < self.freeze_at:
            return
        due, warmup = self.steps == self.freeze_at, self.late_warmup or self.freeze_at
        has_variance = {} if due else self._have_variance(warming)
        for tensor in warming:
            step = self._step_of(tensor)
            if step is not None and (due or self._late.observe(tensor, step, has_variance[tensor], warmup)):
                self._freeze(tensor)

    def _step_of(self, tensor: int) -> int | None:
        """Returns the number of steps of a tensor that has m and v; None if it has none."""
        moments, sharded = self.frontend.moments(tensor), self.core.sharded
        if moments is not None or sharded is None:
            return None if moments is None else moments[2]
        return int(sharded.steps[tensor]) or None

    def _moments(self, tensor: int) -> tuple[Floats, Floats, int]:
        """Returns m, v and step count of a tensor that has them. Collective if it is sharded."""
        moments, sharded = self.frontend.moments(tensor), self.core.sharded
        if moments is not None or sharded is None:
            return moments
        momentum, variance = (
            self.stepper.gather(tensor, sharded.spread(tensor, buffer)) for buffer in sharded.buffers().values()
        )
        return momentum, variance, int(sharded.steps[tensor])

    def _have_variance(self, tensors: list[int]) -> dict[int, bool]:
        """Returns for each of ``tensors`` whether an element has a variance. Collective if they are sharded."""
        found = (self._variance_sums(tensors) != 0).astype(np.uint8)
        if self.core.sharded is not None:
            self.session.reduce(self.number, f"{self.name}.have_variance", found, ReduceOp.BITWISE_OR)
        return dict(zip(tensors, found.astype(bool).tolist(), strict=True))

    def _freeze(self, tensor: int, beta2: float | None = None) -> None:
        """Freezes a tensor. ``beta2`` is the one with which the variance was computed; None for the group's."""
        momentum, variance, step = self._moments(tensor)
        beta2 = self.beta2(tensor) if beta2 is None else beta2
        if self.core.freeze(tensor, momentum, variance, step=step, beta2=beta2, eps=self._eps(tensor)):
            self._release(tensor)

    def _release(self, tensor: int) -> None:
        if self.frontend.moments(tensor) is not None:
            self.frontend.release(tensor)
        elif self.core.sharded is not None:
            self.core.sharded.release(tensor)

    def variance_norm(self, tensors: Sequence[int]) -> float:
        """Returns |v_hat|_1 over those of ``tensors`` that count in a grid, in float64. Collective with shards."""
        if self.grid is not None:
            tensors = [tensor for tensor in tensors if self.grid.counted[tensor]]
        betas2 = {int(t): group.betas[1] for group in self.groups() for t in group.tensors}
        steps = {tensor: step for tensor in tensors if (step := self._step_of(tensor))}
        sums = self._variance_sums(list(steps)).tolist()
        total = sum(s / (1 - betas2[tensor] ** step) for s, (tensor, step) in zip(sums, steps.items(), strict=True))
        if self.core.sharded is not None:
            of_ranks = np.array([total])
            self.session.reduce(self.number, f"{self.name}.variance_norm", of_ranks, ReduceOp.SUM)
            total = float(of_ranks[0])
        return total

    def _variance_sums(self, tensors: Sequence[int]) -> NDArray[np.float64]:
        """Returns the sum of each tensor's v, or of the elements that this rank owns of it; 0 for one without v.

        The sums are computed where v is. On a device that is one launch, one wait, and 4 bytes per 262,144 elements.
        """

        def variance(tensor: int) -> Floats | None:
            moments, sharded = self.frontend.moments(tensor), self.core.sharded
            if moments is not None:
                return moments[1]
            return None if sharded is None or not sharded.steps[tensor] else sharded.own(tensor, sharded.variance)

        found = [variance(tensor) for tensor in tensors]
        addresses = np.array([address(v) for v in found], np.uint64)
        numels = np.array([0 if v is None else v.size for v in found], np.int64)
        return self.core.kernels.sums(addresses, numels)

    # State

    def report(self) -> dict[str, Any]:
        """Also returns ``freeze_step``; None until it is known."""
        return {**super().report(), "freeze_step": self.freeze_at}

    def _state(self) -> dict[str, Any]:
        return {
            **super()._state(),
            "freeze_at": self.freeze_at,
            "late_warmup": self.late_warmup,
            "schedule": self.schedule.state(),
            "late": self._late.state(),
        }

    def check_state(self, saved: Mapping[str, Any]) -> None:
        super().check_state(saved)
        if saved["core"].get("sharded") and self.why_whole is not None:
            raise CheckpointError(
                f"the state_dict is of a warm-up with shard_state, whose m and v cannot be put together here: "
                f"{self.why_whole}. Load it in a run in which that is not so, and save it again after the warm-up."
            )

    def _load(self, saved: Mapping[str, Any]) -> None:
        self._is_freeze_due = False
        if not self.is_sharded:  # shards of the saved run live until they are put together
            self.core.sharded = self._new_shards() if saved["core"].get("sharded") else None
        super()._load(saved)
        self.schedule.load_state(saved["schedule"])
        self._late.load_state(saved.get("late", {}))
        self.late_warmup = saved["late_warmup"]
        chosen = self.schedule.freeze_step
        if self.core.stage.any() or (chosen == "auto" and saved["schedule"]["freeze_step"] == "auto"):
            self.freeze_at = saved["freeze_at"]
        else:  # the length of the warm-up may be changed until it is over
            self.freeze_at = self.schedule.decided
            if self.freeze_at != saved["freeze_at"]:
                self._is_freeze_due = self.core.needs_rank_state
                if not self._is_freeze_due:
                    self._freeze_what_is_over()
        self._announcement = 0 if self.freeze_at is not None else self.schedule.decided or 0

    def _agree_on_start(self) -> None:
        """Also shards whole m and v, which until then can be saved and sent by one rank alone."""
        super()._agree_on_start()
        for tensor in range(self.core.steps.size) if self.is_sharded else ():
            moments = self.frontend.moments(tensor)
            if moments is not None and self.core.stage[tensor] == Stage.WARMUP:
                assert self.core.sharded is not None
                self.core.sharded.adopt(tensor, *moments)
                self.frontend.release(tensor)

    def use_rank_state(self) -> None:
        sharded = self.core.sharded
        if sharded is None:
            return
        if not self.is_sharded:
            for tensor in np.flatnonzero(sharded.steps).tolist():
                self.frontend.adopt(tensor, *self._moments(tensor))
            self.core.sharded = None
        if self._is_freeze_due:
            self._is_freeze_due = False
            self._freeze_what_is_over()

    @property
    def has_shards(self) -> bool:
        """True if m and v of a tensor are divided among the ranks now."""
        return self.core.sharded is not None and bool(self.core.sharded.steps.any())

    def gathered_moments(self) -> Iterator[tuple[int, Floats, Floats]]:
        """Yields each tensor whose m and v are divided among the ranks, with whole m and v, one tensor at a time.

        Collective; does nothing between backward and ``step()`` but raise InvalidRequestError.
        """
        self.require_idle("gather_moments")
        sharded = self.core.sharded
        for tensor in np.flatnonzero(sharded.steps).tolist() if sharded is not None else ():
            yield tensor, *self._moments(tensor)[:2]

    def saved_moments(self, tensor: int) -> dict[str, Any] | None:
        """Returns the moments of a compressed tensor as the wrapped Adam would have them."""
        if self.core.stage[tensor] == Stage.WARMUP:
            sharded = self.core.sharded
            # m and v are in the rank states; a plain Adam that finds none fails.
            return None if sharded is None or not sharded.steps[tensor] else {"step": int(sharded.steps[tensor])}
        return {
            "step": int(self.core.steps[tensor]),
            "exp_avg": self.core.param_memory.host(self.core.momentum(tensor)),
            "exp_avg_sq": self.core.variance(tensor, beta2=self.beta2(tensor)),
        }

    def taken_over(self, saved: Mapping[str, Any]) -> list[int]:
        numbers = {spec.name: number for number, spec in enumerate(self.core.layout.tensors)}
        return [numbers[name] for name in saved["core"].get("tensors", {})]

    def continue_plain(self) -> None:
        """Continues the warm-up of a plain Adam; after T_w steps it is over already."""
        self._restart(self._host_steps())
        self._load(self._fresh)
        self._freeze_what_is_over()
        self.resumed = {"step": self.steps, "ranks": None, "rank_state": "none"}

    def start_warm(self, betas2: Mapping[int, float]) -> None:
        """Freezes all tensors that have a variance at once.

        Any other tensor gets a dense warm-up of its own, of ``freeze_step`` steps; with ``"auto"``, of the fewest steps
        after which one could end.
        """
        self._restart(self._host_steps())
        self._load(self._fresh)
        chosen = self.schedule.freeze_step
        self.late_warmup = 2 * self.schedule.window + 1 if chosen == "auto" else int(chosen)
        self.freeze_at = self.schedule.decided = self.steps
        for tensor, beta2 in betas2.items():
            self._freeze(tensor, beta2)
        self._say_warm(np.flatnonzero(self.core.stage == Stage.WARMUP))

    def dense_run(self) -> dict[str, Any]:
        schedule = self.schedule.state()
        return {
            **super().dense_run(),
            "schedule": {**schedule, "norms": schedule["norms"].tolist()},
            "freeze_at": self.freeze_at,
            "late_warmup": self.late_warmup,
        }

    def continue_dense(self, run: Mapping[str, Any], betas2: Mapping[int, float]) -> None:
        self._restart(run["steps"])
        schedule = {**run["schedule"], "norms": np.array(run["schedule"]["norms"], np.float64)}
        self._load({**self._fresh, **run, "schedule": schedule})
        if betas2:  # the warm-up is over, whatever its length would be now
            self.freeze_at = self.schedule.decided = run["freeze_at"]
        for tensor, beta2 in betas2.items():
            self._freeze(tensor, beta2)
        self.resumed = {"step": self.steps, "ranks": None, "rank_state": "none"}

    def _freeze_what_is_over(self) -> None:
        """Freezes the tensors that have taken T_w steps."""
        for tensor in range(self.core.steps.size):
            step = self._step_of(tensor)
            if step is not None and self.freeze_at is not None and step >= self.freeze_at:
                self._freeze(tensor)
