"""Decides which ranks and hosts have ended a generation, from what the launcher has printed and ranks have reported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ocomm.errors import PeerError

#: The beginning of the reason for a rank that failed because another had.
_CONSEQUENCE = f"raised {PeerError.__name__}: "
#: Ranks that a message lists, at most.
_MOST_NAMED = 8
_SIGNAL = re.compile(r"process\s+rank\s+(\d+)\s+with\s+PID\s+\d+\s+on\s+node\s+\S+\s+exited\s+on\s+signal\s+(\d+)")
_STATUS = re.compile(r"Process name: \[\S+@\d+,(\d+)\]\s+Exit code:\s+(\d+)")
_DAEMON = re.compile(
    r"lost\s+communication\s+with\s+a\s+remote\s+daemon.*?Remote\s+daemon:\s+\[\S+\]\s+on\s+node\s+(\S+)|"
    r"returned\s+non-zero\s+exit\s+status\s+\(\d+\)\s+from\s+launching\s+the\s+per-node\s+daemon",
    re.DOTALL,
)


@dataclass(frozen=True)
class Failure:
    """A rank that failed: its host, and how it failed. ``is_lost``: the host cannot be reached."""

    host: str
    rank: int | None
    why: str
    is_lost: bool = False

    def __str__(self) -> str:
        who = f"rank {self.rank} on {self.host}" if self.rank is not None else self.host
        return f"{who} {self.why}"


def failed_ranks(printed: str) -> tuple[dict[int, str], dict[int, str]]:
    """Returns the ranks that Open MPI's launcher names in what it has ``printed``: those ended by a signal, and those
    with an exit status.
    """
    signalled = {int(rank): f"was ended by signal {number}" for rank, number in _SIGNAL.findall(printed)}
    return signalled, {int(rank): f"ended with status {code}" for rank, code in _STATUS.findall(printed)}


def lost_daemons(printed: str) -> list[str]:
    """Returns the hosts whose daemon Open MPI's launcher has lost, by what it has ``printed``; "" for one of an
    allocation that it does not name.
    """
    return _DAEMON.findall(printed)


def blame(
    signalled: Mapping[int, str],
    reported: Mapping[int, str],
    exited: Mapping[int, str],
    vanished: Sequence[int],
    absent: Sequence[int],
    hosts: Mapping[int, str],
    lost: Mapping[str, bool],
) -> list[Failure]:
    """Returns the failures that caused the end, from what is known by rank; ``hosts`` are those of the ranks.

    The launcher knows best which rank was ended by a signal. Next come ranks that others have missed, because those
    others may be the first to exit. Of broken connections the first counts, as others break when the launcher ends
    their ranks. Of a rank that was still ``absent``, without a connection, nobody knows when it died. ``lost`` are
    hosts that cannot be reached.

    A rank that raised because another had failed is no cause where that other is known: a rank that was stopped, and
    runs again while the launcher ends it, reports it.
    """
    causes = {rank: why for rank, why in reported.items() if not why.startswith(_CONSEQUENCE)}
    some = ", ".join(map(str, absent[:_MOST_NAMED])) + ", ..." * (len(absent) > _MOST_NAMED)
    died = f"died, or before it one of the rank(s) {some}, which had not come to init()" if absent else "died"
    known = signalled or causes or reported or exited or dict.fromkeys(vanished[:1], died)
    return [
        Failure(hosts[rank], rank, why, lost.get(hosts[rank], False))
        for rank, why in sorted(known.items())
        if rank in hosts
    ]
