"""Lets ranks that no MPI launcher has started meet in a key-value store, before MPI starts.

Every rank writes who it is. Rank 0 compares the ranks, starts the PMI service (``runtime.pmi_client``), and writes
where the service is. Every wait has a deadline, and its error names the ranks that have not come.

A store may have been used before: torchrun's agents start ranks again, and keep theirs. They count restarts each for
itself, so no variable names the run. Rank 0 does: with each meeting that it opens it counts ``led`` up, and the others
come to the last one. A rank that has read the number of an old meeting waits there for the next. It knows that a job is
its own by its token, which rank 0 has repeated.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from ocomm import json_values
from ocomm.errors import LaunchError, clause, in_words

_POLL_S = 0.01
_SLOWEST_POLL_S = 0.1
#: Seconds for the other ranks to read from rank 0 why there is no job, before they give up by themselves.
_HEAR_S = 5.0
#: The beginning of the names of all keys; and the number of meetings that were opened.
_PREFIX, _LED = "ocomm", "ocomm/led"


class Store(Protocol):
    """The methods of a ``torch.distributed.Store`` that are used."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Member:
    """What a rank says of itself.

    ``node`` is the same for ranks that share memory. ``library`` is the name of its MPI library. ``problem`` says why
    that cannot start; it is "" if it can. ``address`` is the address of its host on the way to the store's host.
    ``size`` is the number of ranks that it was told.
    ``token`` is another one for every process.
    """

    rank: int
    host: str
    node: str
    version: str
    library: str
    problem: str = ""
    address: str = ""
    size: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(8))


_TEXTS = [field.name for field in fields(Member) if field.name != "rank"]


def node_of_this_process() -> str:
    """Returns a name that is the same for all processes with which this one shares memory and network addresses.

    These are the processes of a host, or of a container that has its own memory and network.
    """
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net", "/proc/self/ns/ipc"):
        try:
            parts.append(os.readlink(path) if "/ns/" in path else _text_of(path))
        except OSError:
            parts.append("")
    try:
        parts.append(str(os.stat("/dev/shm").st_dev))
    except OSError:
        parts.append("")
    return " ".join(parts)


def _text_of(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def disagreement(members: Sequence[Member]) -> str:
    """Returns why these ranks cannot start MPI together, as sentences; "" if they can."""
    problems = _by_value(members, [member.problem for member in members])
    if any(problems):
        return " ".join(f"ranks {who}: {problem}" for problem, who in problems.items() if problem)
    for what, found, remedy in (
        ("ocomm", [member.version for member in members], "pip install the same version of ocomm"),
        ("MPI", [member.library for member in members], "pip install the same version of mpich"),
    ):
        said = _by_value(members, found)
        if len(said) > 1:
            each = "; ".join(f"{value} on ranks {who}" for value, who in said.items())
            return f"the ranks have different versions of {what}: {each}. Type on all hosts: {remedy}."
    sizes = _by_value(members, [member.size for member in members])
    if len(sizes) > 1:
        each = "; ".join(f"{size} on ranks {who}" for size, who in sizes.items())
        return f"the ranks were told different numbers of ranks: {each}. Set WORLD_SIZE to the same number on all."
    return ""


def _by_value(members: Sequence[Member], values: Sequence[str]) -> dict[str, str]:
    """Returns, for each value, the ranks that have it, with their hosts."""
    said: dict[str, list[str]] = {}
    for member, value in zip(members, values, strict=True):
        said.setdefault(value, []).append(f"{member.rank} ({member.host})")
    return {value: ", ".join(who) for value, who in said.items()}


def meet(
    store: Store,
    mine: Member,
    size: int,
    timeout_s: float,
    begin: Callable[[Sequence[Member]], Mapping[str, Any]],
    *,
    outlives_jobs: bool = False,
) -> dict[str, Any]:
    """Waits until all ranks have come to ``store``, and returns the result of ``begin`` on all of them. Collective.

    Args:
        store: The same store on all ranks.
        mine: What this rank says of itself.
        size: The number of ranks.
        timeout_s: Seconds to wait for ranks.
        begin: Called on rank 0 with the members, by rank, when all have come. Its result must be JSON. A LaunchError
            that it raises is raised on all ranks.
        outlives_jobs: May earlier ranks of this job have met in the store? If not, a rank that comes twice is an error
            at once.

    Raises:
        LaunchError: Ranks have not come, two ranks have the same number, the ranks cannot start MPI together, or the
            store has failed.
    """
    meeting = _Meeting(store, mine, size, timeout_s, outlives_jobs)
    try:
        return meeting.lead(begin) if mine.rank == 0 else meeting.follow()
    except (RuntimeError, OSError) as error:  # errors of Torch's stores are subclasses of RuntimeError
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(
            f"rank {mine.rank}: the store in which the ranks meet cannot be used any more: {_first_line(error)}. Has "
            "the process that hosts it, rank 0 or torchrun's agent, ended? See its output."
        ) from error


class _Meeting:
    """One rank's way through the store. ``_number`` is that of the meeting to which it has come."""

    def __init__(self, store: Store, mine: Member, size: int, timeout_s: float, outlives_jobs: bool) -> None:
        self._store = store
        self._mine = mine
        self._size = size
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s
        self._outlives_jobs = outlives_jobs
        self._number = 0

    def lead(self, begin: Callable[[Sequence[Member]], Mapping[str, Any]]) -> dict[str, Any]:
        """Opens a meeting, and returns the job when all have come. Called on rank 0."""
        self._number = self._store.add(_LED, 1)
        self._come()
        try:
            missing = self._wait([self._member_key(rank) for rank in range(self._size)], self._end_s)
            if missing:
                raise LaunchError(self._absent(missing))
            members = [_member(self._store.get(self._member_key(rank)), rank) for rank in range(self._size)]
            if why := disagreement(members):
                raise LaunchError(why)
            answer = _begun(begin, members)
        except LaunchError as error:
            self._say(error=str(error))
            # This process may host the store, so it must not end before the others have read the error.
            others = [rank for rank in range(1, self._size) if self._has_come(rank)]
            self._wait([self._key(f"heard/{rank}") for rank in others], time.monotonic() + _HEAR_S)
            raise
        self._say(job=answer)
        return answer

    def follow(self) -> dict[str, Any]:
        """Comes to the meeting that rank 0 has opened last, and returns the job. Called on all ranks but 0."""
        # A little longer than rank 0, to hear its reason if it gives up.
        end_s, pause_s = self._end_s + _HEAR_S, _POLL_S
        said: dict[str, Any] = {}
        while time.monotonic() < end_s:
            last = self._store.add(_LED, 0)
            if last != self._number:
                self._number, said = last, {}
                self._come()
            if not said and self._number and self._store.check([self._key("said")]):
                said = _read(self._store.get(self._key("said")), 0)
                if not self._outlives_jobs or self._is_meant(said):
                    break
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _SLOWEST_POLL_S)
        if isinstance(said.get("job"), dict) and self._is_meant(said):
            return dict(said["job"])
        if "error" in said:
            self._store.set(self._key(f"heard/{self._mine.rank}"), "")
            raise LaunchError(str(said["error"]))
        if said:
            # A job, but of other processes: an earlier one, or one that another process with this number has joined.
            raise LaunchError(f"{self._absent([0])} If rank 0 runs, two processes have RANK={self._mine.rank}.")
        missing = [rank for rank in range(self._size) if not self._has_come(rank)] if self._number else [0]
        if missing:
            raise LaunchError(self._absent(missing))
        raise LaunchError(
            f"rank {self._mine.rank} of {self._size}: all ranks have come, but rank 0 has not started the job."
        )

    def _come(self) -> None:
        """Writes into the meeting who this rank is."""
        has_company = self._store.add(self._key(f"count/{self._mine.rank}"), 1) > 1 or self._number > 1
        if has_company and not self._outlives_jobs:
            raise LaunchError(self._twice())
        self._store.set(self._member_key(self._mine.rank), json.dumps(asdict(self._mine)))

    def _say(self, **what: Any) -> None:
        """Tells the others what has become of the meeting, and for which processes that is."""
        tokens: dict[int, str] = {}
        for rank in range(self._size):
            with contextlib.suppress(LaunchError):  # what cannot be read is the error that is said
                if self._has_come(rank):
                    tokens[rank] = _member(self._store.get(self._member_key(rank)), rank).token
        self._store.set(self._key("said"), json.dumps({**what, "tokens": tokens}))

    def _is_meant(self, said: Mapping[str, Any]) -> bool:
        """Returns True if what rank 0 has said is for this process."""
        tokens = said.get("tokens")
        return isinstance(tokens, dict) and tokens.get(str(self._mine.rank)) == self._mine.token

    def _key(self, name: str) -> str:
        return f"{_PREFIX}/{self._number}/{name}"

    def _member_key(self, rank: int) -> str:
        return self._key(f"member/{rank}")

    def _has_come(self, rank: int) -> bool:
        return self._store.check([self._member_key(rank)])

    def _wait(self, keys: Sequence[str], end_s: float) -> list[int]:
        """Waits until the store has all keys. Returns the positions of those that it does not have at ``end_s``."""
        pause_s = _POLL_S
        left = list(range(len(keys)))
        while left := [position for position in left if not self._store.check([keys[position]])]:
            if time.monotonic() > end_s:
                break
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _SLOWEST_POLL_S)
        return left

    def _absent(self, missing: Sequence[int]) -> str:
        return (
            f"rank {self._mine.rank} of {self._size} on {self._mine.host}: after {self._timeout_s:g} s ranks "
            f"{list(missing)} have not come to init(). Look at their output for errors, or raise OCOMM_START_TIMEOUT."
        )

    def _twice(self) -> str:
        rank = self._mine.rank
        return (
            f"rank {rank} has come to the store before: two processes have RANK={rank}, or the store was used by a job "
            "before. Give each process a RANK of its own, and init(store=...) a store, or a PrefixStore, for this job "
            "alone."
        )


def _begun(begin: Callable[[Sequence[Member]], Mapping[str, Any]], members: Sequence[Member]) -> dict[str, Any]:
    """Returns the result of ``begin``. Every error of it is a LaunchError."""
    try:
        return dict(begin(members))
    except LaunchError:
        raise
    except Exception as error:
        raise LaunchError(f"rank 0 cannot start the job: {in_words(error)}") from error


def _member(text: bytes | str, rank: int) -> Member:
    """Returns what a rank says of itself. Another version of ocomm may say more, or less."""
    said = _read(text, rank)
    return Member(rank, **{name: str(said.get(name, "")) for name in _TEXTS})


def _read(text: bytes | str, rank: int) -> dict[str, Any]:
    """Returns what a rank has written into the store. Raises LaunchError if it is no object of JSON."""
    try:
        found: dict[str, Any] = json_values.expect(json_values.parse(text), dict)
        return found
    except ValueError as error:
        raise LaunchError(
            f"rank {rank} has written into the store in which the ranks meet what cannot be read: {clause(error)}. "
            "Give the job a store, or a PrefixStore, of its own, and all hosts the same version of ocomm."
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
