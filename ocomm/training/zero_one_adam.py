"""Drives 0/1 Adam on one rank: steps that send nothing, and what it takes over of Adam's moments, and gives back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ocomm.compression.layout import TensorSpec
from ocomm.errors import InvalidRequestError
from ocomm.optim.core import Group
from ocomm.optim.verdict import StepOutcome
from ocomm.optim.zero_one_adam import ZeroOneAdam, ZeroOneAdamOptions
from ocomm.session import Session
from ocomm.telemetry.units import amount
from ocomm.training.adam import AdamDriver, MomentsFrontend
from ocomm.training.common import Common
from ocomm.training.driver import hyper_digest
from ocomm.types import Flag

_log = logging.getLogger("ocomm")


def _why_apart(total_steps: int | None, steps: int) -> str:
    """Returns why the ranks' parameters differ after ``steps`` steps, and what to change."""
    told = "total_steps was not given" if total_steps is None else f"total_steps is {total_steps}"
    return (
        f"the run ended with step {steps}, which was no sync, and without finish() after it, so the ranks' parameters "
        f"differ, unless something has made them equal since: {told}. Call finish() on all ranks after the last step, "
        f"or pass total_steps={steps}, with which the last step is a sync."
    )


class ZeroOneAdamDriver(AdamDriver):
    """The ``AdamDriver`` of 0/1 Adam.

    With ``vote="sync"`` the steps between syncs are this rank's own: they are counted alike on all ranks, and what the
    ranks would say in a vote they say in that of the next sync (docs/decisions/0004-steps-between-syncs.md).
    """

    core: ZeroOneAdam

    def __init__(
        self,
        session: Session,
        number: int,
        specs: Sequence[TensorSpec],
        frontend: MomentsFrontend,
        core_class: type[ZeroOneAdam],
        options: ZeroOneAdamOptions,
        common: Common,
    ) -> None:
        if options.vote == "sync":
            common = _alone(common)
        super().__init__(session, number, specs, frontend, core_class, options, common)
        #: Number of steps without a vote since the start of this process in which gradients were not finite here.
        self.non_finite_steps = 0
        #: True if there was one since the last vote.
        self._was_idle = False

    @property
    def why_apart(self) -> Callable[[int], str]:
        return partial(_why_apart, self.core.syncs.last_step)

    def decided_by_length(self) -> str:
        return f"with syncs up to {self.core.syncs.interval(self.steps)} steps apart"

    def plan(self) -> str:
        """Returns what this rank will send per step, in words."""
        return (
            f"a sync sends about {amount(self.compressed_nbytes)} per rank instead of {amount(self.dense_nbytes)}, and "
            f"{amount(self.uncompressed_nbytes)} besides where it refreshes the variance."
        )

    # Steps

    def full_hyper(self, groups: Sequence[Group]) -> Hashable:
        found, counted = super().full_hyper(groups), self.core.interval_hyper
        return (found, *counted) if counted else found

    def finish(self) -> None:
        """Syncs now what the steps since the last sync have added up, if there were any: all ranks have the same
        parameters then. It is no step, and averages no gradient. Collective.

        Raises:
            InvalidRequestError: Called between backward and ``step()``.
            NonFiniteError: What the steps have added up overflows on some rank; nothing was changed.
            HorovodInternalError: The exchange failed: MismatchError, StallError or PeerError.
        """
        self.require_idle("finish()")
        core = self.core
        if not core.has_left_sync:
            return
        if self._at_start:
            self._start()
        core.ends_interval = True
        try:
            self._end(self._sync)
        finally:
            core.ends_interval = False

    def _sync(self) -> StepOutcome:
        core, stepper = self.core, self.stepper
        # With learning rates of 0 a sync adds nothing to what the steps before it have added up.
        groups = [replace(group, lr=0.0) for group in self.groups()]
        hyper = self.compress_hyper(groups)
        self._set_hyper(groups, hyper)
        # The last number says that this is no step, to a rank that takes one whose rates are 0.
        compressed_with, everything = (hyper_digest((found, -1.0)) for found in (hyper, self.full_hyper(groups)))
        stepper.begin(compressed_with, early=False)
        stepper.buckets.locate_none()
        outcome = self._vote_after_silence(partial(stepper.exchange, compressed_with, everything, 0.0, 0, lambda: None))
        assert outcome is StepOutcome.TAKE, "a rank has skipped a sync that is no step"
        stepper.traffic.uncount(self.dense_nbytes)
        self._loaded_replica = None
        try:
            core.end_interval()
            self._wake()
        except BaseException as error:  # some parameters may have changed already
            stepper.give_up(error)
            raise
        self.note_equal()
        return outcome

    def _exchange(self) -> StepOutcome:
        if self.core.is_silent:
            return self._step_silently()
        return self._vote_after_silence(super()._exchange)

    def _vote_after_silence(self, exchange: Callable[[], StepOutcome]) -> StepOutcome:
        """Calls ``exchange``, which votes, and tells the ranks of steps without a vote that changed nothing."""
        if self._was_idle:
            self.stepper.object(Flag.IDLE)
        try:
            return exchange()
        finally:
            self._was_idle = False
            if self.stepper.idle_ranks and self.core.rank == 0:
                _log.warning(
                    "%s: on rank(s) %s gradients were NaN or Inf in a step since the last vote; it changed nothing "
                    "there. Use a GradScaler, clip, or lower the learning rate.",
                    self.name,
                    self.stepper.idle_ranks,
                )

    def _step_silently(self) -> StepOutcome:
        """Takes a step of this rank, or counts it if a gradient is not finite or the script has skipped it."""
        groups = self.groups()
        self._set_hyper(groups, self.compress_hyper(groups))
        heard = self.stepper.end_silent()
        is_skipped, is_finite = heard & Flag.SKIP, not heard & Flag.NON_FINITE
        moves = is_finite and not is_skipped
        try:
            self.core.commit_silent(self.stepper.present_anywhere, moves)
        except BaseException as error:  # some parameters may have changed already
            self.stepper.give_up(error)
            raise
        self.steps += 1
        self._loaded_replica = None
        self.non_finite_steps += not is_finite
        self._was_idle |= not is_finite and not is_skipped
        if self._notices is not None:
            self._notices.steps, self._notices.is_synced = self.steps, self.core.is_synced
        if moves:
            return StepOutcome.TAKE
        return StepOutcome.SKIP if is_finite else StepOutcome.OVERFLOW

    # State

    def report(self) -> dict[str, Any]:
        """Also returns ``non_finite_steps``."""
        return {**super().report(), "non_finite_steps": self.non_finite_steps}

    def saved_moments(self, tensor: int) -> dict[str, Any] | None:
        """Returns the moments as the wrapped Adam would have them: m of the last sync, and v."""
        core = self.core
        if not core.steps[tensor]:
            return None
        return {
            "step": int(core.steps[tensor]),
            "exp_avg": core.average_momentum(tensor),
            "exp_avg_sq": core.variance(tensor, beta2=self.beta2(tensor)),
        }

    def taken_over(self, saved: Mapping[str, Any]) -> list[int]:
        return np.flatnonzero(saved["core"]["steps"]).tolist()

    def continue_plain(self) -> None:
        """Continues from a plain Adam's m, v and step counts, if it has any; the schedules start again."""
        self._restart(0)
        self._load(self._fresh)
        self._adopt({})
        self.resumed = {"step": 0, "ranks": None, "rank_state": "none"}

    def start_warm(self, betas2: Mapping[int, float]) -> None:
        """Continues from a checkpoint: v counts as refreshed in each of its steps, and the schedules are set to its
        last step.
        """
        self._restart(self._host_steps())
        self._load(self._fresh)
        self._adopt(betas2)
        self.core.start_at(self.steps)
        self._say_warm(np.flatnonzero(self.core.steps == 0))

    def _adopt(self, betas2: Mapping[int, float]) -> None:
        for tensor in range(self.core.steps.size):
            moments = self.frontend.moments(tensor)
            if moments is not None:
                momentum, variance, step = moments
                beta2 = betas2.get(tensor, self.beta2(tensor))
                self.core.adopt(tensor, momentum, variance, step=step, beta2=beta2, eps=self._eps(tensor))
                self.frontend.release(tensor)


def _alone(common: Common) -> Common:
    """Returns the options of a run in which steps between syncs send nothing. Raises InvalidRequestError if one needs
    an exchange in each step.
    """
    if common.max_grad_norm is not None:
        raise InvalidRequestError(
            f"max_grad_norm={common.max_grad_norm!r} with vote='sync': a step between syncs sends nothing, so the "
            "ranks have no common norm. Take vote='step'."
        )
    if common.hierarchical is True:
        raise InvalidRequestError(
            "hierarchical=True with vote='sync': the ranks of a host add up their gradients in each step, and a step "
            "between syncs sends nothing. Leave one of them out."
        )
    return replace(common, hierarchical=False)
