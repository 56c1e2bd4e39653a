"""Compares, in every step, what must be equal on the ranks of an optimizer that averages gradients.

Each rank writes a row of four numbers into a table, and the ranks add their tables while gradients travel: one small
allreduce per step. A rank that has joined contributes zeros and is not compared. All ranks detect a difference in the
same step, and only then exchange descriptions.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ocomm.agreement import LOOKED_AT, MADE_ALIKE, cause_of, digest, first_difference, say_alike
from ocomm.errors import MismatchError, StallError
from ocomm.negotiation.request import Kind, Request
from ocomm.runtime.handle import Handle, Submission
from ocomm.session import Session
from ocomm.types import DType, ReduceOp

_log = logging.getLogger("ocomm")
#: Number of steps for which replicas that began unequal may stay so. Scripts of Horovod broadcast late, or never.
GRACE = 16
#: ``parameters`` is of when gradients begin to travel, ``stepped`` of the end of the step before: one of them is alike.
#: ``own`` need not be: how this rank's optimizer rounds in the first comparison, its own gradients in others.
_ROW = np.dtype([(name, np.uint64) for name in ("count", "options", "parameters", "stepped", "own")])


def spelled(value: object, other: Callable[[object], str | None] = lambda value: None) -> str | None:
    """Returns a hyperparameter as text that is the same for equal values, such as 1 and 1.0, or -0.0 and 0.0.

    Args:
        value: A number, a string, None, or a tuple or list of those.
        other: Called for the text of anything else.

    Returns:
        The text; None for a value without one.
    """
    if isinstance(value, (tuple, list)):
        return f"({', '.join(str(spelled(each, other)) for each in value)})"
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return repr(value)
    return repr(float(value) + 0.0) if isinstance(value, (int, float)) else other(value)


class StepComparison:
    """Comparisons for one optimizer, or for something else that averages gradients of the same parameters repeatedly.

    Replicas that differ from the first comparison on are a warning of rank 0 after the first step, because Horovod's
    scripts make the ranks equal before or after it, and an error after ``GRACE`` further ones. Comparisons before some
    rank's parameters have changed do not count: gradients of a tape may be taken several times without a step.

    Args:
        session: The session whose ranks are compared.
        number: Their process set.
        name: The name of the rows on the wire, the same on all ranks.
        title: Names the optimizer in messages.
        framework: A key of ``MADE_ALIKE``.
        way: Says in words how this rank's optimizer rounds.
        options: Returns a line for each hyperparameter that a comparison compares; none if this rank has nothing to
            compare in it. They are of one moment of the script on all ranks: gradients may begin to travel at others.
        parameters: ``parameters(look)`` returns the checksum of the parameters that comparison number ``look``
            compares, of all of them for 0; 0 if this rank cannot compute it.
        describe: Returns a line for each parameter.
        gradients: Returns a checksum of this rank's own gradients of the step before; 0 for none, or none but zeros.
        stepped: ``stepped(look)`` returns what ``parameters(look)`` was at the end of the step before; None if it was
            not noted. Gradients of some ranks begin to travel in backward, when a script may have other values in
            parameters, those of others later; and a script may make parameters alike after a step.
        written: Returns what writes to parameters in forward, as ``Frontend.written_in_forward`` does.
    """

    def __init__(
        self,
        session: Session,
        number: int,
        name: str,
        title: str,
        framework: str,
        way: str,
        options: Callable[[], Sequence[str]],
        parameters: Callable[[int], int],
        describe: Callable[[], Sequence[str]],
        gradients: Callable[[], int] = lambda: 0,
        stepped: Callable[[int], int | None] = lambda look: None,
        written: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._session, self._number, self._name = session, number, name
        self._options, self._parameters, self._describe = options, parameters, describe
        self._title, self._way = title, way
        self._framework, self._gradients, self._stepped, self._written = framework, gradients, stepped, written
        #: Number of first steps in which all ranks had the same gradients.
        self._alike_steps = 0
        made_alike = MADE_ALIKE[framework]
        self._made_alike = f"{made_alike[0].upper()}{made_alike[1:]} before the first step"
        self._rank = session.set_ranks[number].index(session.require_topology().rank)
        self._rows = np.zeros(len(session.set_ranks[number]), _ROW)
        #: The ranks' checksums in the first comparison; 0 for a rank that had joined.
        self._at_first = self._rows["parameters"].copy()
        #: Number of comparisons so far, if the ranks agree on it.
        self._count = 0
        #: Number of steps in which replicas that began unequal were still so.
        self._unequal_steps = 0
        self._is_alike = True
        #: Ranks that took fewer steps than others, because they had joined; in the last comparison where some had.
        self._behind: list[int] = []
        self._handle: Handle | None = None

    def start(self) -> None:
        """Sends this rank's row. From any thread; once before each ``finish``."""
        self._rows[:] = 0
        row = self._rows[self._rank]
        row["count"] = self._count + 1
        row["own"] = self._gradients() if self._count else digest(self._way)
        if self._count and (lines := self._options()):
            row["options"] = digest("\n".join(lines))
        if self._is_alike:
            row["parameters"] = row["stepped"] = self._parameters(self.next_look)
            if (stepped := self._stepped(self.next_look)) is not None:
                row["stepped"] = stepped
        table = self._rows.view(np.uint8)
        request = Request(Kind.ALLREDUCE, self._name, DType.UINT8, table.shape, ReduceOp.BITWISE_OR)
        self._handle = self._session.submit(self._number, Submission.of(request, table, table))

    @property
    def next_look(self) -> int:
        """The number by which the next comparison chooses parameters."""
        return max(self._count - 1, 0)

    def notify(self, listener: Callable[[], None]) -> None:
        """Calls ``listener`` once all rows of ``start`` have arrived: on the background thread, or here if that is so
        already.
        """
        assert self._handle is not None
        self._handle.notify(listener)

    @property
    def looked_at_gradients(self) -> bool:
        """True once gradients of as many steps have been compared as there are to compare."""
        return self._count > LOOKED_AT

    def says_nothing(self) -> bool:
        """Returns True, once all rows have arrived, if they are equal, so that ``finish`` sends no messages."""
        rows = self._rows[self._rows["count"] > 0]
        return self._handle is not None and self._handle.poll() and bool((rows == rows[0]).all())

    def finish(self) -> None:
        """Waits for all rows. Raises MismatchError, on all ranks, that names what differs."""
        rows = self._wait()
        counts = rows["count"].astype(np.int64) - 1
        last = int(counts.max())
        self._count = last + 1
        # Ranks that have not made the same steps, because one had joined, have compared other parameters.
        in_step = bool((counts == counts[0]).all())
        if not in_step:
            self._behind = self._ranks()[counts < last].tolist()
        is_unequal = in_step and self._is_alike and _differ(rows["parameters"]) and _differ(rows["stepped"])
        if last == 0:
            self._at_first = self._rows["parameters"].copy()
            if in_step and _differ(rows["own"]):
                self._is_alike = False
                self._warn_of_rounding(rows)
        elif last == 1 and is_unequal and not _differ(rows["options"]) and self._may_still_be_made_alike(rows):
            is_unequal, self._count = False, 1  # this comparison is made again
        if self._count > 1 and in_step:
            self._look_at_gradients(rows["own"], last)
        if in_step and _differ(rows["options"]):
            raise MismatchError(self._said(rows, self._options(), "the ranks' hyperparameters differ", "have") + (
                " Give all ranks the same optimizer settings, and schedule from what is the same everywhere: average a "
                "loss before ReduceLROnPlateau sees it."
            ))  # fmt: skip
        if last and is_unequal:
            what = "the ranks' parameters have become different"
            if last == 1:
                what = f"the replicas are still not alike after {1 + GRACE} steps"
            said = self._said(rows, self._describe(), what, "hold")
            made_alike = f"{self._made_alike}, and after anything that one rank does alone."
            advice = cause_of(said, self._written()) or made_alike
            if self._behind:
                advice = (
                    f"Rank(s) {self._behind} had joined before, and have not taken the steps that others took "
                    f"meanwhile: after join(), {MADE_ALIKE[self._framework]}, with the rank that join() returns as the "
                    "root."
                )
            raise MismatchError(f"{said} {advice} OCOMM_REPLICA_CHECK_STEPS says how often this is checked, 0: never.")

    def _ranks(self) -> NDArray[np.int64]:
        """Returns the ranks that take part, once all rows have arrived."""
        return np.array(self._session.set_ranks[self._number])[self._rows["count"] > 0]

    def _wait(self) -> NDArray[np.void]:
        """Returns the rows of the ranks that take part, once all have arrived."""
        handle, self._handle = self._handle, None
        assert handle is not None
        try:
            handle.wait()
        except MismatchError as error:
            raise MismatchError(
                f"{self._title}: the ranks do not average gradients in the same way. Pass the same compression on all "
                f"ranks. ({error})"
            ) from None
        return self._rows[self._rows["count"] > 0]

    def _warn_of_rounding(self, rows: NDArray[np.void]) -> None:
        """Says on rank 0 that replicas will differ in their last digits. The other ranks are not asked: they may be in
        another optimizer's step, and a warning must not wait.
        """
        if self._rank:
            return
        ranks = self._ranks()
        is_other = rows["own"] != rows["own"][0]
        _log.warning(
            "%s: the ranks' optimizers round differently (rank(s) %s have %s, rank(s) %s another), so their parameters "
            "will differ in the last digits, and are not compared in later steps. Broadcast them now and then.%s",
            self._title,
            ranks[~is_other].tolist(),
            self._way,
            ranks[is_other].tolist(),
            " They differ already, before the first step." if _differ(rows["parameters"]) else "",
        )

    def _may_still_be_made_alike(self, rows: NDArray[np.void]) -> bool:
        """Returns True for ranks that began unequal if nobody has taken a step, or few steps were taken."""
        has_stepped = bool((rows["parameters"] != self._at_first[self._rows["count"] > 0]).any())
        if has_stepped:
            self._count_unequal_step()
        return not has_stepped or self._unequal_steps <= GRACE

    def _look_at_gradients(self, own: NDArray[np.uint64], step: int) -> None:
        """Counts steps in which all ranks had the same gradients of their own; rank 0 warns if the first ones were."""
        if own.size > 1 and own[0] and (own == own[0]).all():
            self._alike_steps += 1
            if self._alike_steps == LOOKED_AT == step and self._rank == 0:
                say_alike(self._title, self._framework)

    def _count_unequal_step(self) -> None:
        """Counts a step after which replicas that began unequal are still so; rank 0 warns of the first."""
        self._unequal_steps += 1
        if self._unequal_steps == 1 and self._rank == 0:
            _log.warning(
                "%s: the replicas are not alike after their first step: each rank trains a model of its own, with "
                "averages of gradients of all of them. %s It is an error after %d further steps.",
                self._title,
                " ".join([f"{self._made_alike}.", *self._written().values()]),
                GRACE,
            )

    def _said(self, rows: NDArray[np.void], lines: Sequence[str], what: str, verb: str) -> str:
        """Returns a message that says which rank has what, if no rank has joined, because a joined rank cannot be
        asked.
        """
        difference = ""
        # If several optimizers differ, and gradients came in different orders, each rank may ask about another one.
        with contextlib.suppress(StallError):
            if rows.size == self._rows.size:
                difference = first_difference(self._session, self._number, f"{self._name}.words", list(lines), verb)
        return f"{self._title}: {what}: {difference}." if difference else f"{self._title}: {what}."


def _differ(digests: NDArray[np.uint64]) -> bool:
    """Returns True if ranks that had something to compare (not 0) have different values."""
    given = digests[digests > 0]
    return bool((given != given[:1]).any())
