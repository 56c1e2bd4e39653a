"""Searches for the fusion threshold, cycle time and segment size that move the most bytes per second. Decisions only.

A step ends when a tensor comes again. A number of steps is a sample, and the median of a few samples is a point's
score. The tuned settings change when bytes are sent, never a result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from ocomm.errors import SettingsError
from ocomm.types import Settings

#: Number of samples of a point. A single sample would depend on what else the machine does.
SAMPLES = 5
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Tuned:
    """The tuned fields of ``Settings``; all ranks of a set switch to new values at the same response."""

    fusion_threshold: int
    cycle_time_ms: float
    segment_nbytes: int

    @classmethod
    def of(cls, settings: Settings) -> Tuned:
        return cls(settings.fusion_threshold, settings.cycle_time_ms, settings.segment_nbytes)

    def pack(self) -> tuple[int, int, int]:
        """Returns the values as integers for the wire: bytes, microseconds, bytes."""
        return self.fusion_threshold, round(1e3 * self.cycle_time_ms), self.segment_nbytes

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> Tuned:
        return cls(numbers[0], numbers[1] / 1e3, numbers[2])


#: Settings that can be tuned: (lowest, highest). The search uses the logarithms of the values.
SPACE: Mapping[str, tuple[float, float]] = {
    "fusion_threshold": (MIB, 128 * MIB),
    "cycle_time_ms": (0.1, 25.0),
    "segment_nbytes": (MIB // 4, 16 * MIB),
}
assert list(SPACE) == [field.name for field in fields(Tuned)]
#: Points, as positions within SPACE, that are tried after the start and before the search.
_SEEDS = ({"fusion_threshold": 0.3}, {"cycle_time_ms": 0.6}, {"segment_nbytes": 0.2})

#: For the name of each tuned setting, a number from 0 (lowest) to 1 (highest).
Point = Mapping[str, float]


class Search(Protocol):
    """Proposes the next point from the scores of those before."""

    def tell(self, point: Point, score: float) -> None: ...

    def ask(self) -> Point: ...


class BayesianSearch:
    """Gaussian-process search of the package ``bayesian-optimization``. Raises SettingsError if it is not installed."""

    def __init__(self, names: Sequence[str], noise: float) -> None:
        try:
            from bayes_opt import BayesianOptimization
        except ImportError:
            raise SettingsError("autotuning needs bayesian-optimization: pip install 'ocomm[autotune]'.") from None
        bounds = dict.fromkeys(names, (0.0, 1.0))
        self._optimizer = BayesianOptimization(None, bounds, random_state=0, verbose=0, allow_duplicate_points=True)
        # Scores are normalized before they are compared; noise is a fraction of their spread.
        self._optimizer.set_gp_params(alpha=noise**2)

    def tell(self, point: Point, score: float) -> None:
        self._optimizer.register(dict(point), score)

    def ask(self) -> Point:
        return {name: float(value) for name, value in self._optimizer.suggest().items()}


def position(tuned: Tuned, names: Sequence[str]) -> Point:
    """Returns where these values lie within SPACE; on its edge if they are outside."""
    found = {}
    for name in names:
        low, high = SPACE[name]
        value = min(max(getattr(tuned, name), low), high)
        found[name] = math.log(value / low) / math.log(high / low)
    return found


def at(point: Point, tuned: Tuned) -> Tuned:
    """Returns ``tuned`` with the values at ``point``, rounded to MiB, tenths of a millisecond and 64 KiB."""
    values: dict[str, float] = {
        name: SPACE[name][0] * (SPACE[name][1] / SPACE[name][0]) ** where for name, where in point.items()
    }
    units = {"fusion_threshold": MIB, "cycle_time_ms": 0.1, "segment_nbytes": MIB // 16}
    rounded = {name: round(value / units[name]) * units[name] for name, value in values.items()}
    return replace(tuned, **rounded)  # type: ignore[arg-type]


class Autotune:
    """Decides which values are measured next, and which are kept in the end. ``names`` are tuned; all others stay as in
    ``start``.
    """

    def __init__(
        self, start: Tuned, names: Sequence[str], warmup_samples: int, steps_per_sample: int, max_points: int
    ) -> None:
        self.current = start
        self.results: list[tuple[Tuned, float]] = []  # (values, bytes per microsecond)
        #: The number of steps before the first point has its score.
        self.steps_of_first_point = steps_per_sample * (warmup_samples + SAMPLES) + 1
        self._names = tuple(names)
        self._start = start
        self._skipped = -warmup_samples
        self._steps_per_sample = steps_per_sample
        self._max_points = max_points
        self._scores: list[float] = []
        self._seen: set[str] = set()
        self._steps, self._nbytes, self._since_s = 0, 0, 0.0
        self._is_waiting = False

    @property
    def is_over(self) -> bool:
        """True if every point has been tried; ``current`` then has the best values."""
        return len(self.results) >= self._max_points

    def note(self, tensors: Sequence[str], nbytes: int, now_s: float) -> float | None:
        """Notes that these tensors, of ``nbytes`` bytes in all, are reduced from now on. Returns the score of a point
        once it is known.
        """
        if self.is_over or self._is_waiting:
            return None
        score = None
        if not self._seen.isdisjoint(tensors):
            self._seen.clear()
            self._steps += 1
            if self._steps > self._steps_per_sample:  # the first step does not count: its beginning was not seen
                score = self._end_sample(now_s)
            elif self._steps == 1:
                self._since_s, self._nbytes = now_s, 0
        self._seen.update(tensors)
        self._nbytes += nbytes
        return score

    def _end_sample(self, now_s: float) -> float | None:
        rate = self._nbytes / max(1e6 * (now_s - self._since_s), 1e-3)
        self._steps, self._since_s, self._nbytes = 1, now_s, 0
        if self._skipped < 0:
            self._skipped += 1
            return None
        self._scores.append(rate)
        if len(self._scores) < SAMPLES:
            return None
        score = sorted(self._scores)[SAMPLES // 2]  # the median
        self.results.append((self.current, score))
        self._is_waiting = True
        return score

    @property
    def seed(self) -> Point | None:
        """The next point, if it needs no search; else None."""
        tried = len(self.results) - 1
        if not 0 <= tried < len(_SEEDS):
            return None
        return {name: _SEEDS[tried].get(name, where) for name, where in position(self._start, self._names).items()}

    def go_on(self, point: Point | None) -> Tuned:
        """Tries ``point`` next. With None, or once every point has been tried, returns to the best values."""
        if point is None or self.is_over:
            self._max_points = len(self.results)
            self.current = max(self.results, key=lambda result: result[1])[0]
        else:
            self.current = at(point, self._start)
        self._scores.clear()
        self._seen.clear()
        self._steps = 0
        self._is_waiting = False
        return self.current
