"""What the ranks of an optimizer that averages gradients must hold alike, compared in every step.

Each rank writes a row of four numbers into a table, and the ranks add their tables up while gradients travel: one small
allreduce per step. A rank that has joined contributes zeros, and is not compared. All ranks find a difference in the
same step, and only then ask each other for words.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ocomm.errors import MismatchError, StallError
from ocomm.negotiation.request import Kind, Request
from ocomm.runtime.handle import Handle, Submission
from ocomm.session import Session
from ocomm.training.agreement import first_difference
from ocomm.training.driver import digest
from ocomm.types import DType, ReduceOp

_log = logging.getLogger("ocomm")
_ROW = np.dtype([("count", np.uint64), ("options", np.uint64), ("parameters", np.uint64), ("way", np.uint64)])
_MADE_ALIKE = "Call broadcast_parameters and broadcast_optimizer_state before the first step"


class StepComparison:
    """Of one optimizer, on process set ``number``. ``name`` is the same on all ranks.

    ``parameters(count)`` checksums those that comparison ``count`` looks at, and all of them at 0; ``describe()`` gives
    a line for each parameter, and ``options()`` one for each hyperparameter; ``way`` says in words how this rank's
    optimizer rounds.
    """

    def __init__(
        self,
        session: Session,
        number: int,
        name: str,
        way: str,
        options: Callable[[], Sequence[str]],
        parameters: Callable[[int], int],
        describe: Callable[[], Sequence[str]],
    ) -> None:
        self._session, self._number, self._name = session, number, name
        self._options, self._parameters, self._describe = options, parameters, describe
        self._way = way
        self._rank = session.set_ranks[number].index(session.require_topology().rank)
        self._rows = np.zeros(len(session.set_ranks[number]), _ROW)
        #: Of comparisons so far, as far as the ranks agree on it.
        self._count = 0
        self._is_alike = True
        self._handle: Handle | None = None

    def start(self) -> None:
        """Sends this rank's row. From any thread; once before each ``finish``."""
        self._rows[:] = 0
        row = self._rows[self._rank]
        row["count"] = self._count + 1
        row["options"] = digest("\n".join(self._options()))
        row["parameters"] = self._parameters(self._count) if self._is_alike else 0
        row["way"] = digest(self._way)
        table = self._rows.view(np.uint8)
        request = Request(Kind.ALLREDUCE, self._name, DType.UINT8, table.shape, ReduceOp.BITWISE_OR)
        self._handle = self._session.submit(self._number, Submission.of(request, table, table))

    def finish(self) -> None:
        """Waits for all rows. MismatchError, on all ranks, that names what differs."""
        assert self._handle is not None
        self._handle.wait()
        self._handle = None
        rows = self._rows[self._rows["count"] > 0]
        counts = rows["count"].astype(np.int64) - 1
        is_first, self._count = int(counts.max()) == 0, int(counts.max()) + 1
        # Ranks that have not made the same steps, because one had joined, looked at other parameters.
        in_step = bool((counts == counts[0]).all())
        if is_first and in_step and (rows["way"] != rows["way"][0]).any():
            self._is_alike = False
            if self._rank == 0:
                # The others are not asked: they may be in another optimizer's step, and a warning must not wait.
                ranks = np.array(self._session.set_ranks[self._number])[self._rows["count"] > 0]
                is_other = rows["way"] != rows["way"][0]
                _log.warning(
                    "%s: the ranks' optimizers round differently (rank(s) %s have %s, rank(s) %s another), so their "
                    "parameters will come apart in the last digits, and are compared before the first step only. Call "
                    "broadcast_parameters now and then.",
                    self._name,
                    ranks[~is_other].tolist(),
                    self._way,
                    ranks[is_other].tolist(),
                )
        if (rows["options"] != rows["options"][0]).any():
            raise MismatchError(self._said(rows, self._options(), "the ranks' hyperparameters differ", "have") + (
                " Give all ranks the same optimizer settings, and schedule from what is the same everywhere: average a "
                "loss before ReduceLROnPlateau sees it."
            ))  # fmt: skip
        if in_step and (self._is_alike or is_first) and (rows["parameters"] != rows["parameters"][0]).any():
            what = "the replicas are not alike before their first step"
            if not is_first:
                what = "the ranks' parameters have become different"
            raise MismatchError(
                f"{self._said(rows, self._describe(), what, 'hold')} {_MADE_ALIKE}, and after anything that one rank "
                "does alone. OCOMM_REPLICA_CHECK_STEPS says how often this is checked, 0: never."
            )

    def _said(self, rows: NDArray, lines: Sequence[str], what: str, verb: str) -> str:
        """Who has what. Only where no rank has joined: the others cannot ask it."""
        difference = ""
        # Where several optimizers differ, and gradients came in different orders, each rank may ask about another one.
        with contextlib.suppress(StallError):
            if rows.size == self._rows.size:
                difference = first_difference(self._session, self._number, f"{self._name}.words", list(lines), verb)
        return f"{self._name}: {what}: {difference}." if difference else f"{self._name}: {what}."
