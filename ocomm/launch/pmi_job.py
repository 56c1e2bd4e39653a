"""Decides what the PMI-1 service of a job answers. Lines and times come in as arguments, lines and verdicts go out.

PMI-1 is the protocol by which MPICH's MPI_Init finds the other ranks. A rank sends lines ``cmd=NAME key=value ...``,
and waits for a line after each of them:

    init                        response_to_init
    get_maxes                   maxes             longest names and values
    get_appnum                  appnum
    get_universe_size           universe_size
    get_my_kvsname              my_kvsname        the name of the key space; MPICH makes names of files from it
    put key= value=             put_result
    get key=                    get_result        the key PMI_process_mapping says which ranks share a node
    barrier_in                  barrier_out       once all ranks have come
    finalize                    finalize_ack
    abort exitcode=             no answer         the job ends

A command may also stand in several lines, ``mcmd=NAME``, its values, and ``endcmd``, as ``spawn`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Hydra's limits, in characters: for the name of a key space, for a key, and for a value.
_MAXES = {"kvsname_max": "256", "keylen_max": "64", "vallen_max": "1024"}
#: Limit for the bytes of a line, which has a key, a value and the name of the key space.
LONGEST_LINE = 1 << 16
_MAPPING = "PMI_process_mapping"
#: Requests that MPICH may make and that no job of ocomm needs. The answer to them is "not supported".
_REFUSED = {
    "publish_name": "publish_result",
    "unpublish_name": "unpublish_result",
    "lookup_name": "lookup_result",
    "spawn": "spawn_result",
}


def parse(line: str) -> tuple[str, dict[str, str]]:
    """Returns the command of a line, and its other values.

    Args:
        line: ``cmd=NAME key=value ...``, without the end of the line.

    Raises:
        ValueError: The line has no command.
    """
    words = [word.partition("=") for word in line.split(" ") if word]
    values = {name: value for name, equals, value in words if equals}
    name = values.pop("cmd", None)
    if name is None:
        raise ValueError(f"a line of PMI without a command: {line!r}")
    return name, values


def line_of(command: str, values: Mapping[str, str]) -> str:
    """Returns an answer as a rank reads it, with the end of the line."""
    return " ".join([f"cmd={command}", *(f"{name}={value}" for name, value in values.items())]) + "\n"


def process_mapping(hosts: Sequence[str]) -> str:
    """Returns which ranks share a node, in PMI's notation: blocks of (first node, number of nodes, ranks on each).

    Args:
        hosts: The host of every rank, by rank. The ranks of a host need not follow each other.
    """
    numbers: dict[str, int] = {}
    runs: list[list[int]] = []
    for host in hosts:
        node = numbers.setdefault(host, len(numbers))
        if runs and runs[-1][0] == node:
            runs[-1][1] += 1
        else:
            runs.append([node, 1])
    blocks: list[list[int]] = []
    for node, ranks in runs:
        if blocks and blocks[-1][0] + blocks[-1][1] == node and blocks[-1][2] == ranks:
            blocks[-1][1] += 1
        else:
            blocks.append([node, 1, ranks])
    return f"(vector,{','.join(f'({first},{nodes},{ranks})' for first, nodes, ranks in blocks)})"


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds. The barriers of MPI_Finalize have none.

    A rank may do work of its own after the others have come to MPI_Finalize. If it dies, its connection ends.

    Args:
        init_s: For all ranks to connect, and to come to a barrier of MPI_Init after the first one has.
        grace_s: For the other ranks to end by themselves, after a rank has ended without MPI_Finalize.
    """

    init_s: float
    grace_s: float


class PmiJob:
    """The state of one job: its key space, its barriers, and why it has to end.

    Args:
        name: The name of the key space.
        hosts: The host of every rank, by rank.
        limits: The deadlines.
        now_s: The time, in seconds, of a clock that never goes back. All later times are of the same clock.
    """

    def __init__(self, name: str, hosts: Sequence[str], limits: Limits, now_s: float) -> None:
        self.name = name
        self.size = len(hosts)
        self.limits = limits
        #: Why the job has to end; "" while it need not.
        self.failure = ""
        self._failed_s = now_s
        mapping = process_mapping(hosts)
        # Without a mapping MPICH compares the names of the ranks' hosts, which takes one more exchange.
        self._values = {_MAPPING: mapping} if len(mapping) < int(_MAXES["vallen_max"]) else {}
        self._started_s = now_s
        self._here: set[int] = set()  # ranks that have connected
        self._up: set[int] = set()  # ranks that have come out of MPI_Init
        self._left: set[int] = set()  # ranks that have sent ``finalize``
        self._gone: set[int] = set()  # ranks whose connection has ended
        self._in_barrier: set[int] = set()
        self._barrier_s = now_s  # when the first rank came to the barrier
        self._is_immediate = False
        self._long: dict[int, str] = {}  # by rank, the command whose lines are arriving

    # Events

    def connected(self, rank: int) -> None:
        """Notes that a rank has opened the connection on which its MPI speaks."""
        self._here.add(rank)

    def up(self, rank: int) -> None:
        """Notes that a rank has come out of MPI_Init."""
        self._up.add(rank)

    def closed(self, rank: int, now_s: float) -> None:
        """Notes that a rank's connection has ended. The job has failed if the rank had not sent ``finalize``."""
        self._gone.add(rank)
        if rank not in self._left:
            where = "" if rank in self._up else ", in MPI_Init"
            self._fail(f"rank {rank} has ended without MPI_Finalize{where}", now_s)

    def endless(self, rank: int, now_s: float) -> None:
        """Notes that a rank has sent more than ``LONGEST_LINE`` bytes without the end of a line. The job fails."""
        self._fail(f"rank {rank} has sent a line of PMI of more than {LONGEST_LINE} bytes", now_s, at_once=True)

    def heard(self, rank: int, line: str, now_s: float) -> list[tuple[int, str]]:
        """Takes in a line from a rank, and returns the lines to send, each with the rank that it is for.

        A command of several lines is answered after the last of them.

        The job fails at once if the line has no command, or is ``abort``.
        """
        if line.startswith("mcmd="):
            self._long[rank] = line.removeprefix("mcmd=").strip()
            return []
        if rank in self._long:
            if line.strip() != "endcmd":
                return []
            line = f"cmd={self._long.pop(rank)}"
        try:
            command, values = parse(line)
        except ValueError as error:
            self._fail(f"rank {rank} has sent {error}", now_s, at_once=True)
            return []
        if command == "barrier_in":
            return self._enter(rank, now_s)
        if command == "abort":
            self._fail(f"rank {rank} has called MPI_Abort({values.get('exitcode', '')})", now_s, at_once=True)
            return []
        return [(rank, line_of(*self._answer(rank, command, values)))]

    def _answer(self, rank: int, command: str, values: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        if command == "init":
            known = values.get("pmi_version") == "1"
            return "response_to_init", {"pmi_version": "1", "pmi_subversion": "1", "rc": "0" if known else "-1"}
        if command == "get_maxes":
            return "maxes", dict(_MAXES)
        if command == "get_appnum":
            return "appnum", {"appnum": "0"}
        if command == "get_universe_size":
            return "universe_size", {"size": str(self.size)}
        if command == "get_my_kvsname":
            return "my_kvsname", {"kvsname": self.name}
        if command == "put":
            self._values[values.get("key", "")] = values.get("value", "")
            return "put_result", {"rc": "0", "msg": "success"}
        if command == "get":
            value = self._values.get(values.get("key", ""))
            if value is None:
                return "get_result", {"rc": "-1", "msg": "key_not_found", "value": "unknown"}
            return "get_result", {"rc": "0", "msg": "success", "value": value}
        if command == "finalize":
            self._left.add(rank)
            return "finalize_ack", {"rc": "0"}
        return _REFUSED.get(command, command), {"rc": "-1", "msg": "not_supported"}

    def _enter(self, rank: int, now_s: float) -> list[tuple[int, str]]:
        if not self._in_barrier:
            self._barrier_s = now_s
        self._in_barrier.add(rank)
        if len(self._in_barrier) < self.size:
            return []
        self._in_barrier.clear()
        return [(each, line_of("barrier_out", {"rc": "0"})) for each in range(self.size)]

    def _fail(self, why: str, now_s: float, at_once: bool = False) -> None:
        if not self.failure:
            self.failure, self._failed_s = why, now_s
            self._is_immediate = at_once

    # Verdicts

    @property
    def is_over(self) -> bool:
        """True if no rank needs the service any more."""
        return len(self._left) == self.size or len(self._gone) == self.size

    def must_end(self, now_s: float) -> str:
        """Returns why the remaining ranks have to be ended now; "" while they need not be."""
        if not self.failure:
            self._look_at_the_clock(now_s)
        due_s = self._failed_s if self._is_immediate else self._failed_s + self.limits.grace_s
        return self.failure if self.failure and now_s >= due_s else ""

    def _look_at_the_clock(self, now_s: float) -> None:
        limit_s = self.limits.init_s
        missing = [rank for rank in range(self.size) if rank not in self._here]
        if missing and now_s - self._started_s > limit_s:
            why = f"after {limit_s:g} s ranks {missing} have not connected to the PMI service of the job"
            self._fail(why, now_s, at_once=True)
        is_start = len(self._up) < self.size
        if self._in_barrier and is_start and now_s - self._barrier_s > limit_s:
            absent = [rank for rank in range(self.size) if rank not in self._in_barrier]
            why = f"after {limit_s:g} s ranks {absent} have not come to a barrier of MPI_Init"
            self._fail(why, now_s, at_once=True)
