"""Runs the search for better settings beside the job: on rank 0 of the world, in a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ocomm.errors import in_words
from ocomm.negotiation.autotune import Autotune, Point, Search, Tuned, position

_log = logging.getLogger("ocomm")
_COLUMNS = ("cycle_time_ms", "tensor_fusion_threshold", "segment_bytes", "score")


class Tuner:
    """Feeds ``autotune`` with measurements and asks ``search`` for the next settings, which may take long, so nobody
    waits for it.

    ``path`` is a CSV file with a line per point, the score in bytes per microsecond; "" for no file.
    """

    def __init__(self, autotune: Autotune, search: Search, names: Sequence[str], path: str) -> None:
        self._autotune = autotune
        self._search = search
        self._names = tuple(names)
        self._pool = ThreadPoolExecutor(1, "ocomm-autotune")
        self._next: Future[Point | None] | None = None
        self._log = Path(path) if path else None
        if self._log is not None:
            self._log.write_text(",".join(_COLUMNS) + "\n")

    def note(self, tensors: Sequence[str], nbytes: int, now_s: float) -> None:
        """Notes tensors that are reduced from now on; if that completes a point's score, asks for the next point."""
        score = self._autotune.note(tensors, nbytes, now_s)
        if score is None:
            return
        self._write(self._autotune.current, score)
        self._next = self._pool.submit(
            self._ask, position(self._autotune.current, self._names), score, self._autotune.seed, self._autotune.is_over
        )

    def _ask(self, point: Point, score: float, seed: Point | None, is_over: bool) -> Point | None:
        if is_over:
            return None
        self._search.tell(point, score)
        return seed or self._search.ask()

    def poll(self) -> Tuned | None:
        """Returns the settings to which all ranks should switch now; None if nothing changes."""
        if self._next is None or not self._next.done():
            return None
        pending, self._next = self._next, None
        try:
            point = pending.result()
        except Exception as error:  # a search that fails must not end the training
            _log.warning("autotuning ends early: %s", in_words(error))
            point = None
        tuned = self._autotune.go_on(point)
        if self._autotune.is_over:
            best = max(score for _, score in self._autotune.results)
            _log.info("autotuning is over: %s, %.4g bytes per microsecond", tuned, best)
            self.close()
        return tuned

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def say_end(self) -> None:
        """Warns if nothing was tried. Called when the job ends well."""
        if not self._autotune.results:
            _log.warning(
                "autotuning has tried nothing: it goes by what DistributedOptimizer, tapes and collectives of all "
                "ranks reduce in more than %d steps. Exchanges of 1-bit optimizers and of process sets have nothing "
                "that it tunes.",
                self._autotune.steps_of_first_point,
            )

    def _write(self, tuned: Tuned, score: float) -> None:
        if self._log is None:
            return
        try:
            with self._log.open("a") as file:
                print(*(tuned.cycle_time_ms, tuned.fusion_threshold, tuned.segment_nbytes, score), sep=",", file=file)
        except OSError as error:  # a full disk must not end the training
            _log.warning("the log of autotuning ends here: %s", error)
            self._log = None
