"""The error that ends an exchange, by the final state of its plan: for optimizer steps and collectives alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ocomm.collectives.engine import Channel, State, Ticket
from ocomm.errors import HorovodInternalError, MismatchError, OcommError, PeerError, StallError

#: Final states of plans that have failed: causes before consequences.
_CAUSES = (
    State.MISMATCH,
    State.WRONG_SIZE,
    State.TIMED_OUT,
    State.MPI_ERROR,
    State.TASK_ERROR,
    State.ABORTED,
)


def cause(tickets: Sequence[Ticket]) -> Ticket | None:
    """Returns the plan whose failure made the other plans of its channel fail; None if all are done.

    All plans of ``tickets`` are over. A plan that fails ends the other plans of its channel, in any order here.
    """
    failed = [ticket for ticket in tickets if ticket.state != State.DONE]
    return min(failed, key=lambda ticket: _CAUSES.index(ticket.state)) if failed else None


def explain(
    ticket: Ticket,
    channel: Channel,
    ranks: Sequence[int],
    what: str,
    timeout_s: float,
    *,
    mismatch: Callable[[], OcommError] | None = None,
    device: str = "the device",
) -> OcommError:
    """Returns the error of a plan that has ended without being done.

    Args:
        ticket: The plan's ticket; its state is final and not DONE.
        channel: The channel on which it ran.
        ranks: The channel's ranks as world ranks.
        what: Names the exchange and begins the message: "OneBitAdam.1: step 3".
        timeout_s: The plan's deadline, in seconds.
        mismatch: Makes the error for different headers; None for an error without details.
        device: Names the device that computes, for a plan that waits for no rank.
    """
    match ticket.state:
        case State.MISMATCH:
            return MismatchError(f"{what}: the headers of the ranks differ.") if mismatch is None else mismatch()
        case State.WRONG_SIZE:
            return MismatchError(
                f"{what}: rank {ranks[ticket.error]} sent a message that is too short. All ranks must run the same "
                "version of ocomm with the same settings."
            )
        case State.TIMED_OUT:
            late = [ranks[rank] for rank in channel.waiting_for()]
            why = (
                f"rank(s) {late} have not sent their part, or wait for ranks that they name themselves. All ranks must "
                "make the same calls in the same order"
                if late
                else f"{device} has not finished"
            )
            return StallError(f"{what} was not over within its timeout of {timeout_s:.0f} s; {why}.")
        case State.TASK_ERROR:
            failure = next(iter(ticket.plan.failures()), None)
            error = HorovodInternalError(f"{what}: the device failed: {failure}")
            error.__cause__ = failure
            return error
        case State.ABORTED:
            return PeerError(f"{what} was aborted; see the first error of this rank.")
        case State.MPI_ERROR if ticket.error < 0:
            return HorovodInternalError(f"{what}: this rank has no memory left for more messages under way.")
    return HorovodInternalError(
        f"{what}: the network failed (MPI error {ticket.error}). The job cannot go on with these communicators."
    )
