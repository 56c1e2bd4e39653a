"""Lets ranks that no MPI launcher has started meet in a key-value store, before MPI starts.

Every rank writes who it is. Rank 0 compares the ranks, starts the PMI service (``runtime.pmi_client``), and writes
where the service is. Every wait has a deadline, and its error names the ranks that have not come.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from ocomm import json_values
from ocomm.errors import LaunchError, clause

_POLL_S = 0.01
_SLOWEST_POLL_S = 0.1
#: Seconds for the other ranks to read from rank 0 why there is no job, before they give up by themselves.
_HEAR_S = 5.0


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
    """

    rank: int
    host: str
    node: str
    version: str
    library: str
    problem: str = ""
    address: str = ""


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
    return ""


def _by_value(members: Sequence[Member], values: Sequence[str]) -> dict[str, str]:
    """Returns, for each value, the ranks that have it, with their hosts."""
    said: dict[str, list[str]] = {}
    for member, value in zip(members, values, strict=True):
        said.setdefault(value, []).append(f"{member.rank} ({member.host})")
    return {value: ", ".join(who) for value, who in said.items()}


def meet(
    store: Store,
    prefix: str,
    mine: Member,
    size: int,
    timeout_s: float,
    begin: Callable[[Sequence[Member]], Mapping[str, Any]],
) -> dict[str, Any]:
    """Waits until all ranks have come to ``store``, and returns the result of ``begin`` on all of them. Collective.

    Args:
        store: The same store on all ranks. No other job may have used it with this ``prefix``.
        prefix: The beginning of the names of all keys.
        mine: What this rank says of itself.
        size: The number of ranks.
        timeout_s: Seconds to wait for ranks.
        begin: Called on rank 0 with the members, by rank, when all have come. Its result must be JSON. A LaunchError
            that it raises is raised on all ranks.

    Raises:
        LaunchError: Ranks have not come, two ranks have the same number, the ranks cannot start MPI together, or the
            store has failed.
    """
    end_s = time.monotonic() + timeout_s
    try:
        if store.add(f"{prefix}/count/{mine.rank}", 1) > 1:
            raise LaunchError(
                f"rank {mine.rank} has come to the store before: two processes have RANK={mine.rank}, or the store was "
                "used by a job before. Give each process a RANK of its own, and init(store=...) a store, or a "
                "PrefixStore, for this job alone."
            )
        store.set(f"{prefix}/member/{mine.rank}", json.dumps(asdict(mine)))
        if mine.rank == 0:
            return _lead(store, prefix, mine, size, timeout_s, end_s, begin)
        # The other ranks wait a little longer than rank 0, so that they hear its reason if it gives up.
        return _follow(store, prefix, mine, size, timeout_s, end_s + _HEAR_S)
    except (RuntimeError, OSError) as error:  # errors of Torch's stores are subclasses of RuntimeError
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(
            f"rank {mine.rank}: the store in which the ranks meet cannot be used any more: {_first_line(error)}. Has "
            "the process that hosts it, rank 0 or torchrun's agent, ended? See its output."
        ) from error


def _lead(
    store: Store,
    prefix: str,
    mine: Member,
    size: int,
    timeout_s: float,
    end_s: float,
    begin: Callable[[Sequence[Member]], Mapping[str, Any]],
) -> dict[str, Any]:
    try:
        missing = _wait(store, [f"{prefix}/member/{rank}" for rank in range(size)], end_s)
        if missing:
            raise LaunchError(_absent(mine, size, timeout_s, missing))
        members = [_member(store.get(f"{prefix}/member/{rank}"), rank) for rank in range(size)]
        if why := disagreement(members):
            raise LaunchError(why)
        answer = _begun(begin, members)
    except LaunchError as error:
        store.set(f"{prefix}/job", json.dumps({"error": str(error)}))
        # This process may host the store, so it must not end before the others have read the error.
        others = [f"{prefix}/heard/{rank}" for rank in range(1, size) if store.check([f"{prefix}/member/{rank}"])]
        _wait(store, others, time.monotonic() + _HEAR_S)
        raise
    store.set(f"{prefix}/job", json.dumps(answer))
    return answer


def _begun(begin: Callable[[Sequence[Member]], Mapping[str, Any]], members: Sequence[Member]) -> dict[str, Any]:
    """Returns the result of ``begin``. Every error of it is a LaunchError."""
    try:
        return dict(begin(members))
    except LaunchError:
        raise
    except Exception as error:
        raise LaunchError(f"rank 0 cannot start the job: {type(error).__name__}: {error}") from error


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


def _follow(store: Store, prefix: str, mine: Member, size: int, timeout_s: float, end_s: float) -> dict[str, Any]:
    if _wait(store, [f"{prefix}/job"], end_s):
        missing = [rank for rank in range(size) if not store.check([f"{prefix}/member/{rank}"])]
        if missing:
            raise LaunchError(_absent(mine, size, timeout_s, missing))
        raise LaunchError(f"rank {mine.rank} of {size}: all ranks have come, but rank 0 has not started the job.")
    answer = _read(store.get(f"{prefix}/job"), 0)
    if "error" in answer:
        store.set(f"{prefix}/heard/{mine.rank}", "")
        raise LaunchError(str(answer["error"]))
    return answer


def _wait(store: Store, keys: Sequence[str], end_s: float) -> list[int]:
    """Waits until the store has all keys. Returns the positions of those that it does not have at ``end_s``."""
    pause_s = _POLL_S
    left = list(range(len(keys)))
    while left := [position for position in left if not store.check([keys[position]])]:
        if time.monotonic() > end_s:
            break
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _SLOWEST_POLL_S)
    return left


def _absent(mine: Member, size: int, timeout_s: float, missing: Sequence[int]) -> str:
    return (
        f"rank {mine.rank} of {size} on {mine.host}: after {timeout_s:g} s ranks {list(missing)} have not come to "
        "init(). Look at their output for errors, or raise OCOMM_START_TIMEOUT."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
