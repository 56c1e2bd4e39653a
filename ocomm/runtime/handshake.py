"""What the ranks tell each other before the runtime starts: their hosts and settings, which are compared."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ocomm import json_values
from ocomm.errors import HorovodInternalError, InvalidRequestError, LaunchError, SettingsError
from ocomm.json_values import expect
from ocomm.runtime.control import Link, MessageType
from ocomm.transport.base import Transport
from ocomm.types import Settings, Topology
from ocomm.version import __version__


def handshake(
    control: Transport, settings: Settings, sets: Sequence[tuple[int, ...]], host: str, counts: dict[str, int]
) -> tuple[list[str], dict[str, int]]:
    """Exchanges hosts and settings: every rank tells rank 0 its own; rank 0 compares them and answers all.

    Returns the hosts of all ranks, and ``counts`` as they are from now on: for each name the highest count of any rank.
    Raises SettingsError if settings differ, LaunchError if some ranks do not come within ``start_timeout_s``.
    """
    link = Link(control, range(control.size))
    agreed = {name: getattr(settings, name) for name in Settings.AGREED}
    process_sets = [list(s) for s in sets]
    mine = {"host": host, "version": __version__, "process_sets": process_sets, "counts": counts, **agreed}
    if control.size == 1:
        check_sets(sets, 1)
        return [host], counts
    end = time.monotonic() + settings.start_timeout_s
    if control.rank == 0:
        said: dict[int, dict[str, Any]] = {0: mine}
        try:
            while len(said) < control.size:
                message = link.receive()
                if message is not None:
                    said[message[0]] = _heard(message, MessageType.HELLO)
                elif time.monotonic() > end:
                    missing = [rank for rank in range(control.size) if rank not in said]
                    raise LaunchError(f"after {settings.start_timeout_s:.0f} s ranks {missing} have not come to init()")
                else:
                    time.sleep(2e-4)
        except (LaunchError, HorovodInternalError) as error:
            link.send_down(MessageType.WELCOME, json.dumps({"launch_error": str(error)}).encode())
            _flush(link)
            raise LaunchError(str(error)) from error
        highest: dict[str, int] = {}
        for each in said.values():
            highest |= {what: max(count, highest.get(what, 0)) for what, count in each["counts"].items()}
        answer: dict[str, Any] = {"hosts": [said[rank]["host"] for rank in range(control.size)], "counts": highest}
        difference = _difference(said)
        if difference:
            answer = {"settings_error": difference}
        link.send_down(MessageType.WELCOME, json.dumps(answer).encode())
        _flush(link)
    else:
        link.send(0, MessageType.HELLO, json.dumps(mine).encode())
        while (message := link.receive()) is None:
            if time.monotonic() > end + 5.0:
                raise LaunchError(f"rank {control.rank}: no answer from rank 0 after {settings.start_timeout_s:.0f} s")
            time.sleep(2e-4)
        answer = _heard(message, MessageType.WELCOME)
        _flush(link)
    if "settings_error" in answer:
        raise SettingsError(answer["settings_error"])
    if "launch_error" in answer:
        raise LaunchError(answer["launch_error"])
    check_sets(sets, control.size)
    if len(answer["hosts"]) != control.size:
        raise LaunchError(f"rank 0 has answered with {len(answer['hosts'])} hosts of {control.size} ranks.")
    return answer["hosts"], answer["counts"]


def _heard(message: tuple[int, MessageType, bytes], expected: MessageType) -> dict[str, Any]:
    """Returns what another rank says in init(). Raises LaunchError if that is no message of type ``expected``."""
    source, word, payload = message
    try:
        if word != expected:
            raise ValueError(f"its type is {word.name}")
        said: dict[str, Any] = expect(json_values.parse(payload), dict)
        if expected == MessageType.HELLO:
            expect(json_values.fields(said, "host", "version", "process_sets", "counts")[0], str)
        elif {"settings_error", "launch_error"} & said.keys():
            expect(next(iter(said.values())), str)
            return said
        else:
            for host in expect(json_values.fields(said, "hosts", "counts")[0], list):
                expect(host, str)
        for count in expect(said["counts"], dict).values():
            expect(count, int)
        return said
    except ValueError as error:
        raise LaunchError(
            f"rank {source} sent a message of {len(payload)} bytes in init() that is no {expected.name} of this "
            f"version of ocomm: {error}. Install the same version on all hosts."
        ) from None


def _flush(link: Link) -> None:
    end = time.monotonic() + 10.0
    while not link.flush() and time.monotonic() < end:
        time.sleep(1e-4)


def _difference(said: dict[int, dict[str, Any]]) -> str:
    """Returns a sentence about the first setting on which the ranks do not agree; "" if there is none."""
    for name in ("version", *Settings.AGREED, "process_sets"):
        values: dict[str, list[int]] = {}
        for rank in sorted(said):
            values.setdefault(json.dumps(said[rank].get(name)), []).append(rank)
        if len(values) > 1:
            each = ", ".join(f"{value} on ranks {ranks}" for value, ranks in values.items())
            return f"setting '{name}' differs between ranks: {each}. Set it to the same value everywhere."
    return ""


def check_sets(sets: Sequence[tuple[int, ...]], size: int, first: int = 1) -> None:
    for number, ranks in enumerate(sets, first):
        wrong = [rank for rank in ranks if not 0 <= rank < size]
        if wrong or not ranks or len(set(ranks)) != len(ranks):
            raise InvalidRequestError(
                f"process set {number} has ranks {list(ranks)}; the world has ranks 0..{size - 1}."
            )
        if sets.index(ranks) != number - first or len(ranks) == size:
            raise InvalidRequestError(f"process set {number} (ranks {list(ranks)}) is a duplicate of another set.")


def topology_of(rank: int, hosts: Sequence[str]) -> Topology:
    """Returns the place of a rank in the job.

    The local rank is its position among the ranks of its host; the cross rank is its position among the ranks with the
    same local rank.
    """
    local_ranks = [hosts[:r].count(host) for r, host in enumerate(hosts)]
    mine = local_ranks[rank]
    return Topology(
        rank=rank,
        size=len(hosts),
        local_rank=mine,
        local_size=hosts.count(hosts[rank]),
        cross_rank=sum(1 for r in local_ranks[:rank] if r == mine),
        cross_size=local_ranks.count(mine),
        hosts=tuple(hosts),
    )


def background_core(cores: Sequence[int], topology: Topology) -> int | None:
    """Returns the core for this rank's background thread; None for any. Raises SettingsError if there is no such
    core.
    """
    if not cores:
        return None
    if topology.local_rank >= len(cores):
        raise SettingsError(
            f"OCOMM_THREAD_AFFINITY names {len(cores)} cores, but host {topology.hosts[topology.rank]} has "
            f"{topology.local_size} ranks; name one for each."
        )
    core = cores[topology.local_rank]
    if core not in os.sched_getaffinity(0):
        allowed = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise SettingsError(f"OCOMM_THREAD_AFFINITY: rank {topology.rank} may not use core {core}, only {allowed}.")
    return core


def bounded(call: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Returns the result of a call that may wait for other ranks for ever, as some calls of MPI do.

    Raises LaunchError if it does not return within ``timeout_s``.
    """
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=work, name="ocomm-bounded", daemon=True).start()
    try:
        result, error = results.get(timeout=timeout_s)
    except queue.Empty:
        raise LaunchError(f"no {what.removeprefix('a ')} after {timeout_s:.0f} s; see the other ranks") from None
    if error is not None:
        raise error
    return result


def duplicate(transport: Transport, timeout_s: float) -> Transport:
    pending = transport.duplicate()
    end = time.monotonic() + timeout_s
    while (copy := transport.duplicated(pending)) is None:
        if time.monotonic() > end:
            raise LaunchError(f"rank {transport.rank}: no communicator after {timeout_s:.0f} s; see the other ranks")
        time.sleep(1e-4)
    return copy
