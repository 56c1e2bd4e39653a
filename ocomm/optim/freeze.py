"""The freeze rule: when the dense warm-up ends and the variance is frozen. Decisions only, from numbers given as
arguments.

All ranks feed a ``FreezeSchedule``, so that any rank's checkpoint has its state; the coordinator announces the result
of its own in the header of an exchange. ``LateTensors`` uses whole numbers and v, which are the same on all ranks, so
each rank decides by its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ocomm.errors import SettingsError

#: The part of a run of known length after which the warm-up ends at the latest.
LATEST_FREEZE = 1 / 5
#: The variance counts as stable when min(r, 1/r) reaches this (1-bit Adam, section 7.1 of arXiv 2102.02888).
STABLE_RATIO = 0.96


def whole_freeze_step(freeze_step: int | Literal["auto"]) -> int | Literal["auto"]:
    """Returns ``freeze_step``, as an int if it is a number. Raises SettingsError for a number that is not whole and
    positive.
    """
    if freeze_step == "auto":
        return "auto"
    is_number = not isinstance(freeze_step, bool) and isinstance(freeze_step, (int, float, np.number))
    if not is_number or freeze_step < 1 or freeze_step % 1:
        raise SettingsError(f"freeze_step must be a positive number of steps or 'auto', got {freeze_step!r}")
    return int(freeze_step)


def require_total_steps(total_steps: int | None) -> int | None:
    """``total_steps`` as an int. Raises SettingsError for all but None and whole numbers from 1 on."""
    if total_steps is None:
        return None
    is_number = not isinstance(total_steps, bool) and isinstance(total_steps, (int, float, np.number))
    if not is_number or total_steps < 1 or total_steps % 1:
        raise SettingsError(f"total_steps must be a positive number of steps, got {total_steps!r}")
    return int(total_steps)


class FreezeSchedule:
    """Chooses T_w, the last dense step, counted from 1.

    ``freeze_step`` is T_w itself, or ``"auto"``. With ``"auto"`` all of these must hold after step t, with r =
    |v_hat_t|_1 / |v_hat_{t-Delta}|_1 and Delta = 1 / (1 - beta2): min(r, 1/r) >= 0.96, t > 2 Delta, and no
    group's learning rate has risen during the last Delta steps. v_hat is bias-corrected, because a raw v that grows
    from zero would pass a one-sided test at once. With ``total_steps``, ``"auto"`` means a fifth of them at the latest,
    and at least 2. Raises SettingsError for anything else.

    A norm is a pass over all of v. So after step Delta one step in ``stride`` computes it, at most a hundred per Delta:
    every 10th for beta2 = 0.999, every one for 0.95, whose Delta is 20. Delta is rounded to a multiple of ``stride``,
    so that a step with a norm can be compared with the one Delta earlier. Only such a step can find v stable; the limit
    of ``total_steps``, which needs no norm, may come in any.
    """

    def __init__(self, freeze_step: int | Literal["auto"], beta2: float, total_steps: int | None = None) -> None:
        if not 0.0 <= beta2 < 1.0:
            raise SettingsError(f"beta2 must be in [0, 1), got {beta2}")
        self.freeze_step = whole_freeze_step(freeze_step)
        delta = round(1.0 / (1.0 - beta2))
        #: Number of steps between two norms.
        self.stride = math.ceil(delta / 100)
        #: Delta in steps.
        self.window = self.stride * round(delta / self.stride)
        self.decided: int | None = None if self.freeze_step == "auto" else self.freeze_step
        #: The latest T_w of ``"auto"``; None without a limit.
        self.latest = None if total_steps is None else max(int(total_steps * LATEST_FREEZE), 2)
        self._norms: deque[float] = deque(maxlen=self.window + 1)
        self._lrs: tuple[float, ...] | None = None
        self._step = 0
        self._last_rise = 0

    def needs_norm(self, step: int) -> bool:
        """Returns True if ``observe`` reads the norm of v_hat after this step, which need not be computed otherwise."""
        return self.decided is None and self.is_norm_step(step)

    def is_norm_step(self, step: int) -> bool:
        """Returns True if ``observe`` reads the norm after this step unless it has decided already."""
        return step > self.window and step % self.stride == 0

    def observe(self, step: int, variance_l1: float | None, lrs: Sequence[float]) -> int | None:
        """Takes in what is known after dense step ``step``. Returns T_w once it is known, else None.

        With ``"auto"`` T_w is ``step + 1``, because ranks are told in the exchange of that step. Steps come one by one;
        after a gap (a restart), or if the number of groups changes, the window starts again.

        Args:
            step: The step, counted from 1.
            variance_l1: |v_hat|_1 over all parameters, float64; None if it is not needed.
            lrs: The learning rate of each group.
        """
        if self.decided is not None:
            return self.decided
        lrs = tuple(lrs)
        if step != self._step + 1 or self._lrs is None or len(lrs) != len(self._lrs):
            self._norms.clear()
            # The first lr of a window has no known predecessor, so it counts as a rise at the step before.
            self._last_rise = step - 1
        elif any(new > old for new, old in zip(lrs, self._lrs, strict=True)):
            self._last_rise = step
        self._step, self._lrs = step, lrs
        self._norms.append(math.nan if variance_l1 is None else variance_l1)
        is_long_enough = len(self._norms) > self.window and step > 2 * self.window
        is_late = self.latest is not None and step + 1 >= self.latest
        has_risen = step - self._last_rise < self.window
        if is_late or (is_long_enough and not has_risen and is_stable(self._norms[-1], self._norms[0])):
            self.decided = step + 1
        return self.decided

    def state(self) -> dict[str, Any]:
        """Returns what has been observed, as plain values and an array. A schedule that loads it continues without a
        gap.
        """
        return {
            "freeze_step": self.freeze_step,
            "decided": self.decided,
            "norms": np.array(self._norms, np.float64),
            "lrs": None if self._lrs is None else list(self._lrs),
            "step": self._step,
            "last_rise": self._last_rise,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Loads the result of ``state``. A decision counts only if both are ``"auto"``; a chosen number of steps is
        kept.
        """
        if self.freeze_step == "auto":
            self.decided = state["decided"] if state["freeze_step"] == "auto" else None
        self._norms.clear()
        self._norms.extend(state["norms"].tolist())
        self._lrs = None if state["lrs"] is None else tuple(state["lrs"])
        self._step, self._last_rise = state["step"], state["last_rise"]


def is_stable(now: float, before: float) -> bool:
    """Returns min(r, 1/r) >= 0.96 for r = now / before; False if a norm is zero or not finite."""
    if not (math.isfinite(now) and math.isfinite(before)) or min(now, before) <= 0.0:
        return False
    return min(now, before) / max(now, before) >= STABLE_RATIO


class LateTensors:
    """Dense warm-up of tensors that had no variance at T_w, because they were not used, frozen by the user, or added
    later.

    Each tensor gets T_w dense steps of its own, counted from the first with a variance.
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}

    def observe(self, tensor: int, step: int, has_variance: bool, warmup_steps: int) -> bool:
        """Returns True if the tensor should be frozen after the dense step ``step`` of its own count.

        ``warmup_steps`` is the run's T_w. Once True is returned the tensor is forgotten.
        """
        if not has_variance:
            return False
        first = self._first.setdefault(tensor, step)
        if step - first + 1 < warmup_steps:
            return False
        del self._first[tensor]
        return True

    def state(self) -> dict[str, int]:
        """Returns the first step with a variance of each tensor in its warm-up; keys are strings, as in every saved
        state.
        """
        return {str(tensor): step for tensor, step in self._first.items()}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Loads the result of ``state``."""
        self._first = {int(tensor): step for tensor, step in state.items()}
