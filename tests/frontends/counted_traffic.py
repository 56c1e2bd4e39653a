"""Counts what a rank asks for and sends in the steps of one optimizer: nothing, in steps that send nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from ocomm.runtime.process_set import MemberSet
from ocomm.transport.local import LocalTransport
from tests.worlds import MPI_SIZE


class CountedTraffic:
    """Made before the ranks, with which it counts; the engine is the one in Python."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._asking: list[str] = []
        self._wire: list[tuple[Any, int]] = []
        ask, send = MemberSet.submit, LocalTransport.isend

        def counted_ask(member: MemberSet, submission: Any, *args: Any, **kwargs: Any) -> Any:
            self._asking.append(threading.current_thread().name)
            return ask(member, submission, *args, **kwargs)

        def counted_send(transport: LocalTransport, buffer: Any, dest: int, tag: int) -> None:
            self._wire.append((transport.identity, transport.rank))
            send(transport, buffer, dest, tag)

        monkeypatch.setattr(MemberSet, "submit", counted_ask)
        monkeypatch.setattr(LocalTransport, "isend", counted_send)

    def of(self, optimizer: Any, rank: int) -> Callable[[], tuple[int, int, int, int]]:
        """What returns, for the thread that calls this: requests that the background thread would negotiate, plans of
        the optimizer's channel, where ranks are threads messages on the wire of that channel, and bytes sent.
        """
        channel, plans = optimizer._driver.stepper.wire.channel, []
        submit, me = channel.submit, threading.current_thread().name
        identity = None if MPI_SIZE else channel.transport.identity

        def counted(*args: Any, **kwargs: Any) -> Any:
            plans.append(args)
            return submit(*args, **kwargs)

        self._monkeypatch.setattr(channel, "submit", counted)
        return lambda: (
            self._asking.count(me),
            len(plans),
            self._wire.count((identity, rank)),
            optimizer.compression_report()["bytes_sent"],
        )
