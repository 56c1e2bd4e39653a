"""When 0/1 Adam (arXiv 2202.06009) exchanges. Decisions only, from step numbers; no clock, network or buffer.

Every rank has its own schedules, which use whole numbers that are the same on all ranks, so nothing is announced. Steps
are those that were taken, counted from 1; a step that all ranks discard has no number.
"""

from __future__ import annotations

from collections.abc import Mapping

from ocomm.errors import SettingsError


class SyncSchedule:
    """T_u: the steps after which all ranks have the same parameters again.

    The interval is 1 up to step t = ``local_step_start``, then min(``local_step_clip``, 2^floor((t -
    ``local_step_start``) / ``local_step_doubling``)), all of them numbers of steps. A sync is due once that many steps
    have been taken since the last one, this one included; and at step ``last_step``, the last one of the run, if that
    is known. Raises SettingsError for impossible numbers.
    """

    def __init__(
        self, local_step_start: int, local_step_doubling: int, local_step_clip: int, last_step: int | None = None
    ) -> None:
        self.start = _at_least(0, "local_step_start", local_step_start)
        self.doubling = _at_least(1, "local_step_doubling", local_step_doubling)
        self.clip = _at_least(1, "local_step_clip", local_step_clip)
        self.last_step = last_step
        self.last_sync = 0

    def interval(self, step: int) -> int:
        """Returns the number of steps between syncs at ``step``; it never falls."""
        if step <= self.start:
            return 1
        return min(self.clip, 1 << min(self._doublings(step), self.clip.bit_length()))

    def _doublings(self, step: int) -> int:
        return (step - self.start) // self.doubling

    def interval_end(self, step: int) -> int | None:
        """Returns a step up to which the interval stays what it is at ``step``; None if it never changes again."""
        if step <= self.start:
            return self.start
        if self.interval(step) >= self.clip:
            return None
        return self.start + (self._doublings(step) + 1) * self.doubling - 1

    def is_due(self, step: int) -> bool:
        """Returns True if ``step``, the next one, should be a sync. If it cannot be one, ask again for the next."""
        return step - self.last_sync >= self.interval(step) or step == self.last_step

    def synced(self, step: int) -> None:
        """Notes that ``step`` was taken, as a sync."""
        self.last_sync = step

    def progress(self) -> dict[str, int]:
        """Returns what a checkpoint must hold."""
        return {"last_sync": self.last_sync}

    def load_progress(self, progress: Mapping[str, int]) -> None:
        self.last_sync = int(progress["last_sync"])


class RefreshSchedule:
    """T_v: the steps whose gradient is averaged densely, for the variance.

    They are t_0 = 1 and t_{j+1} = t_j + 2^floor(j / ``var_update_scaler``), up to step ``var_freeze_step``; if that is
    None, as long as the interval of ``syncs`` is 1. The first refresh always takes place. Raises SettingsError for
    impossible numbers.
    """

    def __init__(self, syncs: SyncSchedule, var_update_scaler: int, var_freeze_step: int | None) -> None:
        self.scaler = _at_least(1, "var_update_scaler", var_update_scaler)
        self.freeze_step = None if var_freeze_step is None else _at_least(1, "var_freeze_step", var_freeze_step)
        #: Number of refreshes so far, and the step of the next one.
        self.count = 0
        self.next_step = 1
        self._syncs = syncs

    def is_over(self, step: int) -> bool:
        """Returns True if no refresh takes place at ``step``, the next one, or later."""
        at = max(step, self.next_step)
        if self.count == 0:
            return False
        return at > self.freeze_step if self.freeze_step is not None else self._syncs.interval(at) > 1

    def is_due(self, step: int) -> bool:
        """Returns True if ``step``, the next one, should be a refresh."""
        return step >= self.next_step and not self.is_over(step)

    def refreshed(self, step: int) -> None:
        """Notes that ``step`` was taken, as a refresh."""
        self.next_step = step + (1 << self.count // self.scaler)
        self.count += 1

    def start_at(self, step: int) -> None:
        """Continues as if steps 1 to ``step`` had been taken, with a refresh whenever one was due."""
        while self.next_step <= step and not self.is_over(self.next_step):
            self.refreshed(self.next_step)

    def progress(self) -> dict[str, int]:
        """Returns what a checkpoint must hold."""
        return {"refreshes": self.count, "next_refresh": self.next_step}

    def load_progress(self, progress: Mapping[str, int]) -> None:
        self.count = int(progress["refreshes"])
        self.next_step = int(progress["next_refresh"])


def _at_least(least: int, option: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingsError(f"{option} must be a whole number of at least {least}, got {value!r}")
    return value
