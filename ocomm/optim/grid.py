"""The vote of a grid: what the ranks of all axes agree on, after the ranks of each data axis have.

In a grid a model is divided among the ranks of some axes (pipeline stages, shards), and the ranks of one axis, the data
axis, hold replicas of the same part. The replicas of a part exchange their gradients and vote by themselves. Then the
ranks of one data coordinate, which hold all parts of one replica of the model, hold a round of headers. Every one of
them has heard the vote of its own part, so all ranks of the grid hear the same. In a step in which replicas send each
other nothing they hold that round alone, and what they hear is about their replica.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ocomm.collectives.engine import State
from ocomm.collectives.waiting import wait
from ocomm.errors import MismatchError, OcommError, PeerError
from ocomm.optim.disagreement import disagreement
from ocomm.optim.step_channel import Sent, StepChannel
from ocomm.optim.vote import Round
from ocomm.types import Flag

#: The ``attempt`` of a grid's rounds in a step: before anything is posted, the vote, on whose account it has ended, a
#: sum after it.
EARLY, FINAL, _WHO, _SUM = range(4)
_SIGNATURE = 0x67726964


@dataclass(frozen=True)
class Grid:
    """This rank's place in a grid.

    Args:
        number: The process set of the ranks with this rank's data coordinate.
        places: For each of its ranks, the coordinates on the other axes, in words.
        place: Those of this rank.
        counted: For each tensor, whether its squares count in norms of the grid: of replicas on other axes, one does.
    """

    number: int
    places: tuple[str, ...]
    place: str
    counted: tuple[bool, ...]


class GridVote:
    """One rank's votes in a grid, over ``wire``, a channel between the ranks of its data coordinate."""

    def __init__(self, grid: Grid, wire: StepChannel) -> None:
        self._grid = grid
        self._wire = wire
        self._round = Round(wire, _SIGNATURE, 0)
        self.counted = grid.counted
        #: The sum of what the ranks sent as squares in the last round.
        self.total = 0.0
        self._is_over = False

    @property
    def sent(self) -> Sent:
        """Bytes of a round."""
        return self._round.sent

    @property
    def announcement(self) -> int:
        """What the first part's coordinator announced, as heard in the last round."""
        return int(self._wire.announcement[0])

    def hold(self, step: int, attempt: int, flags: int, total: float = 0.0, announcement: int = 0) -> int:
        """Sends flags, a number and an announcement to the ranks of all parts, and waits for theirs. Collective.

        Args:
            step: The step, counted from 1.
            attempt: The round of the step.
            flags: What the ranks of this part have agreed on.
            total: A number of this part; ``self.total`` is the sum over parts.
            announcement: What this part's coordinator announced; the first part's counts.

        Returns:
            The flags of all parts.

        Raises:
            PeerError: The exchange of another part has failed, or a rank has left.
            MismatchError: The parts are not at the same step.
            StallError: A rank did not come in time.
        """
        wire = self._wire
        self._write(step, attempt, flags, total, announcement if wire.rank == 0 else 0)
        what = f"{wire.name}: step {step}"
        ticket = wire.channel.submit(self._round.prepared, wire.timeout_s, False)
        if wait(ticket, wire.channel, wire.ranks, wire.watch, what) != State.DONE:
            self._is_over = True
            raise wire.explain(ticket, what, lambda: self._mismatch(step))
        heard = int(wire.heard_flags[0])
        if heard & Flag.RAISED:
            self._is_over = True
            raise PeerError(
                f"{what}: the exchange has failed at {', '.join(self.places_with(Flag.RAISED))} of the grid, where the "
                "ranks say why; no rank of the grid takes the step."
            )
        # In the order of ranks, so that all ranks have the same bits.
        self.total = math.fsum(self._round.segment_header.squares())
        return heard

    def _write(self, step: int, attempt: int, flags: int, total: float, announcement: int) -> None:
        wire, header = self._wire, self._round.segment_header.header
        wire.flags[0] = wire.heard_flags[0] = wire.announcement[0] = 0
        self._round.segment_headers.begin(step, attempt, 0, announcement)
        header["flags"], header["squares"], header["gradients"] = flags, total, 0

    def _mismatch(self, step: int) -> MismatchError:
        return disagreement(self._wire.name, step, self._round.segment_header, self._wire.ranks, [], "settings differ")

    def places_with(self, flag: Flag) -> list[str]:
        """Returns the places of the parts that set ``flag`` in the last round."""
        return [self._grid.places[rank] for rank in self._round.segment_header.ranks_with(flag)]

    def sum(self, step: int, value: float) -> float:
        """Returns the sum of a number over all parts. Collective; raises what ``hold`` raises."""
        self.hold(step, _SUM, 0, value)
        return self.total

    def ranks_of_parts(self, step: int, ranks: Sequence[int]) -> str:
        """Exchanges on which ranks a step has ended. Collective, after a vote that heard of some.

        ``ranks`` are the world ranks of this part. Returns one rank of each part, with its place.
        """
        self._write(step, _WHO, 0, 0.0, 0)
        self._round.segment_header.header["gradients"] = ranks[0] + 1 if ranks else 0
        self._wire.run(self._round.prepared, f"{self._wire.name}: step {step}")
        said = zip(self._round.segment_header.gradients(), self._grid.places, strict=True)
        return f"[{', '.join(f'{rank - 1} ({place})' for rank, place in said if rank)}]"

    def give_up(self, step: int, attempt: int, error: BaseException) -> None:
        """Ends the votes, because a step has failed with ``error``. If all ranks of this part have that error, other
        parts hear of it in a round for which nobody waits here. If this rank was interrupted, the channel ends.
        """
        if self._is_over:
            return
        self._is_over = True
        if isinstance(error, OcommError):
            self._write(step, attempt, int(Flag.RAISED), 0.0, 0)
            self._wire.channel.submit(self._round.prepared, self._wire.timeout_s, False)
        else:
            self._wire.interrupt(error)
