"""Which error ends an exchange: one text and class per final state, for steps and collectives alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from ocomm.collectives.engine import Channel, State, Ticket
from ocomm.collectives.outcome import cause, explain
from ocomm.errors import HorovodInternalError, MismatchError, OcommError, PeerError, StallError


@dataclass
class Plan:
    broken: list[BaseException] = field(default_factory=list)

    def failures(self) -> list[BaseException]:
        return self.broken


@dataclass
class Ended:
    state: State
    error: int = 0
    plan: Plan = field(default_factory=Plan)
    late: tuple[int, ...] = ()

    def waiting_for(self) -> list[int]:
        return list(self.late)


def explained(ended: Ended, **options: Any) -> OcommError:
    return explain(cast(Ticket, ended), cast(Channel, ended), (4, 7), "Lion.1: step 3", 2.0, **options)


@pytest.mark.parametrize(
    ("ended", "kind", "words"),
    [
        (
            Ended(State.TIMED_OUT, late=(1,)),
            StallError,
            "Lion.1: step 3 was not over within its timeout of 2 s; rank(s) [7] have not sent their part, or wait for "
            "ranks that they name themselves. All ranks must make the same calls in the same order.",
        ),
        (
            Ended(State.TIMED_OUT),
            StallError,
            "Lion.1: step 3 was not over within its timeout of 2 s; the device has not finished.",
        ),
        (
            Ended(State.WRONG_SIZE, 1),
            MismatchError,
            "Lion.1: step 3: rank 7 sent a message that is too short. All ranks must run the same version of ocomm "
            "with the same settings.",
        ),
        (
            Ended(State.MPI_ERROR, 15),
            HorovodInternalError,
            "Lion.1: step 3: the network failed (MPI error 15). The job cannot go on with these communicators.",
        ),
        (
            Ended(State.MPI_ERROR, -1),
            HorovodInternalError,
            "Lion.1: step 3: this rank has no memory left for more messages under way.",
        ),
        (Ended(State.MISMATCH), MismatchError, "Lion.1: step 3: the headers of the ranks differ."),
        (Ended(State.ABORTED), PeerError, "Lion.1: step 3 was aborted; see the first error of this rank."),
    ],
)
def test_every_state_has_an_error_that_names_exchange_and_ranks(
    ended: Ended, kind: type[OcommError], words: str
) -> None:
    error = explained(ended)
    assert type(error) is kind and str(error) == words


def test_a_task_that_has_raised_is_the_cause() -> None:
    broken = ValueError("no room")
    error = explained(Ended(State.TASK_ERROR, plan=Plan([broken])))
    assert str(error) == "Lion.1: step 3: the device failed: no room" and error.__cause__ is broken


def test_headers_that_differ_are_explained_by_who_has_them() -> None:
    error = MismatchError("theirs")
    assert explained(Ended(State.MISMATCH), mismatch=lambda: error) is error


def test_a_cause_comes_before_what_it_brings_about() -> None:
    tickets = [Ended(state) for state in (State.DONE, State.ABORTED, State.TIMED_OUT, State.TIMED_OUT)]
    assert cause(cast(list[Ticket], tickets)) is tickets[2]
    assert cause(cast(list[Ticket], tickets[:1])) is None
