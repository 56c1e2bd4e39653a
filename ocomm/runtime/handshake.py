"""What the ranks tell each other before the runtime starts: their hosts and settings, which are compared."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ocomm import json_values
from ocomm.errors import HorovodInternalError, InvalidRequestError, LaunchError, SettingsError, clause, in_words
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
    agreed = {name: getattr(settings, name) for name in Settings.AGREED}
    process_sets = [list(s) for s in sets]
    mine = {"host": host, "version": __version__, "process_sets": process_sets, "counts": counts, **agreed}
    if control.size == 1:
        check_sets(sets, 1)
        return [host], counts
    answer = _ask(control, settings.start_timeout_s, mine, _check_hello, _compared, _check_welcome)
    check_sets(sets, control.size)
    if len(answer["hosts"]) != control.size:
        raise LaunchError(f"rank 0 has answered with {len(answer['hosts'])} hosts of {control.size} ranks.")
    return answer["hosts"], answer["counts"]


@contextlib.contextmanager
def confirmed(control: Transport, timeout_s: float) -> Iterator[None]:
    """Runs a block that may fail on this rank alone, and then waits until all ranks have said that they can go on.

    Without this the others would wait in MPI until their deadline. Collective over the ranks of ``control``.

    Raises:
        Exception: What the block has raised, once all others have heard of it.
        LaunchError: The block has failed on other ranks, or some do not answer.
    """
    mine = {"why_not": ""}
    try:
        yield
    except Exception as error:
        mine["why_not"] = in_words(error)
        if control.size > 1:
            with contextlib.suppress(LaunchError):  # of this error, or of one that is less than it
                _ask(control, timeout_s, mine, _check_reason, _refused)
        raise
    if control.size > 1:
        _ask(control, timeout_s, mine, _check_reason, _refused)


def _ask(
    control: Transport,
    timeout_s: float,
    mine: dict[str, Any],
    check: Callable[[dict[str, Any]], None],
    decide: Callable[[dict[int, dict[str, Any]]], dict[str, Any]],
    check_answer: Callable[[dict[str, Any]], None] = lambda said: None,
) -> dict[str, Any]:
    """Tells rank 0 ``mine``, and returns what rank 0 answers to all: ``decide`` of what all ranks have said.

    ``check`` and ``check_answer`` raise ValueError if that is not what it should be. Raises SettingsError or
    LaunchError if that is the answer.
    """
    link = Link(control, range(control.size))
    end = time.monotonic() + timeout_s
    if control.rank == 0:
        said = {0: mine}
        try:
            while len(said) < control.size:
                message = _receive(link, end)
                if message is None:
                    missing = [rank for rank in range(control.size) if rank not in said]
                    raise LaunchError(f"after {timeout_s:.0f} s ranks {missing} have not come to init()")
                said[message[0]] = _heard(message, MessageType.HELLO, check)
            answer = decide(said)
        except (LaunchError, HorovodInternalError) as error:
            answer = {"launch_error": str(error)}
        link.send_down(MessageType.WELCOME, json.dumps(answer).encode())
    else:
        link.send(0, MessageType.HELLO, json.dumps(mine).encode())
        message = _receive(link, end + 5.0)
        if message is None:
            raise LaunchError(f"rank {control.rank}: no answer from rank 0 after {timeout_s:.0f} s")
        answer = _heard(message, MessageType.WELCOME, check_answer)
    _flush(link)
    if "settings_error" in answer:
        raise SettingsError(answer["settings_error"])
    if "launch_error" in answer:
        raise LaunchError(answer["launch_error"])
    return answer


def _receive(link: Link, end: float) -> tuple[int, MessageType, bytes] | None:
    """Returns the next message; None if there is none before ``end``."""
    nap = 2e-4
    while (message := link.receive()) is None and time.monotonic() <= end:
        time.sleep(nap)
        nap = min(1.5 * nap, 5e-3)  # hundreds of ranks that wait on one host take the cores of those that start
    return message


def _heard(
    message: tuple[int, MessageType, bytes], expected: MessageType, check: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Returns what another rank says in init(). Raises LaunchError if that is no message of type ``expected``, or if
    ``check`` raises ValueError.
    """
    source, word, payload = message
    try:
        if word != expected:
            raise ValueError(f"its type is {word.name}")
        said: dict[str, Any] = expect(json_values.parse(payload), dict)
        errors = [said[name] for name in ("settings_error", "launch_error") if name in said]
        if expected == MessageType.WELCOME and errors:
            expect(errors[0], str)
        else:
            check(said)
        return said
    except ValueError as error:
        raise LaunchError(
            f"rank {source} sent a message of {len(payload)} bytes in init() that is no {expected.name} of this "
            f"version of ocomm: {clause(error)}. Install the same version on all hosts."
        ) from None


def _check_hello(said: dict[str, Any]) -> None:
    expect(json_values.fields(said, "host", "version", "process_sets", "counts")[0], str)
    _check_counts(said["counts"])


def _check_welcome(said: dict[str, Any]) -> None:
    for host in expect(json_values.fields(said, "hosts", "counts")[0], list):
        expect(host, str)
    _check_counts(said["counts"])


def _check_counts(counts: Any) -> None:
    for count in expect(counts, dict).values():
        expect(count, int)


def _check_reason(said: dict[str, Any]) -> None:
    expect(json_values.fields(said, "why_not")[0], str)


def _compared(said: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns rank 0's answer to the hosts and settings of all ranks."""
    if difference := _difference(said):
        return {"settings_error": difference}
    highest: dict[str, int] = {}
    for each in said.values():
        highest |= {what: max(count, highest.get(what, 0)) for what, count in each["counts"].items()}
    return {"hosts": [said[rank]["host"] for rank in sorted(said)], "counts": highest}


def _refused(said: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Returns rank 0's answer when all ranks have said whether they can take part."""
    reasons = {rank: said[rank]["why_not"] for rank in sorted(said) if said[rank]["why_not"]}
    text = "; ".join(f"rank {rank} cannot join the job: {why}" for rank, why in reasons.items())
    return {"launch_error": f"{text}."} if text else {}


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
            if name == "version":
                return f"the version of ocomm differs between ranks: {each}. Install the same one on all hosts."
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
    """Returns the core for this rank's background thread; None for any. Raises SettingsError if no thread can run on
    it.
    """
    if not cores:
        return None
    if topology.local_rank >= len(cores):
        raise SettingsError(
            f"OCOMM_THREAD_AFFINITY names {len(cores)} cores, but host {topology.hosts[topology.rank]} has "
            f"{topology.local_size} ranks; name one for each."
        )
    core = cores[topology.local_rank]
    given = os.sched_getaffinity(0)
    try:
        # A thread may leave the cores that the launcher has given to the process, to stay out of the training's way.
        os.sched_setaffinity(0, {core})
    except (OSError, OverflowError) as error:
        raise SettingsError(
            f"OCOMM_THREAD_AFFINITY: rank {topology.rank} cannot use core {core}: {clause(error)}."
        ) from None
    finally:
        os.sched_setaffinity(0, given)
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
