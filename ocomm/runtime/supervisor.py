"""The line from a rank to the ``ocommrun`` that supervises its job: JSON over a socket, both ways.

A rank says:

    {"word": "here", "rank": 3, "host": "b", "generation": 1}      first
    {"word": "commit", "number": 12}                               a commit that a later generation can restore
    {"word": "lost", "ranks": {"2": "has not answered for 7 s"}}   these have failed, as this rank knows
    {"word": "leave"}                                              it ends in order, for a generation on other hosts
    {"word": "bye"}                                                it ends in order

and hears {"word": "hosts"}: there will be such a generation, leave after the next commit.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any

from ocomm.errors import LaunchError

_log = logging.getLogger("ocomm")
#: The variable with the key that both ends must know, in hexadecimal. No setting, hence the name.
KEY = "_OCOMM_ELASTIC_KEY"
#: How the words begin for a rank which may be alive, behind a cable that is cut.
SILENT = "has not answered"
_CONNECT_S = 10.0
#: Until the other end has shown that it knows the key.
_ANSWER_S = 60.0


class Supervisor:
    """The line of a rank. LaunchError if none of ``addresses`` answers, given as HOST:PORT."""

    def __init__(self, addresses: Sequence[str], key: bytes, rank: int, generation: int) -> None:
        self.hosts_changed = False
        self._rank = rank
        self._lock = threading.Lock()
        self._connection = _connect(addresses, key)
        self.say("here", rank=rank, host=socket.gethostname(), generation=generation)
        threading.Thread(target=self._listen, name="ocomm-supervisor", daemon=True).start()

    def say(self, word: str, **more: Any) -> None:
        """Sends a message; from any thread. One that cannot be sent is dropped: the other end has gone."""
        with self._lock:
            try:
                self._connection.send_bytes(json.dumps({"word": word, **more}).encode())
            except OSError as error:
                _log.info("rank %d cannot tell ocommrun '%s': %s", self._rank, word, error)

    def say_lost(self, ranks: Mapping[int, str]) -> None:
        """These ranks have failed, and how."""
        self.say("lost", ranks={str(rank): why for rank, why in ranks.items()})

    def _listen(self) -> None:
        while True:
            try:
                heard = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                # Nobody would start a lost rank again, nor end this one: a job without its head is no job.
                sys.stderr.write(f"ocomm: rank {self._rank}: ocommrun, which supervises this job, has gone.\n")
                sys.stderr.flush()
                os._exit(1)
            if heard["word"] == "hosts":
                self.hosts_changed = True


def client(host: str, port: int, key: bytes) -> Connection:
    """A connection to a Listener that knows ``key``; OSError, EOFError or AuthenticationError if there is none.

    multiprocessing's own waits without limit for a port that is another program's.
    """
    found: queue.SimpleQueue[Connection | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found.put(Client((host, port), authkey=key))
        except (OSError, EOFError, AuthenticationError) as error:
            found.put(error)

    threading.Thread(target=ask, name="ocomm-client", daemon=True).start()
    try:
        answer = found.get(timeout=_ANSWER_S)
    except queue.Empty:
        raise TimeoutError(f"connected, but no answer after {_ANSWER_S:.0f} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _connect(addresses: Sequence[str], key: bytes) -> Connection:
    reasons = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            # An address that nobody has is given up before the system would.
            socket.create_connection((host, int(port)), _CONNECT_S / len(addresses)).close()
            return client(host, int(port), key)
        except (OSError, EOFError, AuthenticationError) as error:
            reasons.append(f"{address}: {error}")
    raise LaunchError(
        f"this rank cannot reach the ocommrun that supervises it: {'; '.join(reasons)}. Ranks connect to a port of the "
        "machine where ocommrun runs; is there a firewall?"
    )
