"""A rank's connection to the ``ocommrun`` that supervises its job: JSON messages over an ``AuthenticatedSocket``.

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
import socket
import sys
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from ocomm.errors import LaunchError
from ocomm.runtime import authenticated_socket
from ocomm.runtime.authenticated_socket import AuthenticatedSocket

_log = logging.getLogger("ocomm")
#: The variable with the key that both ends must know, in hexadecimal. No setting, hence the name.
KEY = "_OCOMM_ELASTIC_KEY"
#: How the words begin for a rank which may be alive, behind a cable that is cut.
SILENT = "has not answered"
_CONNECT_S = 10.0
#: Until the other end has shown that it knows the key.
_ANSWER_S = 60.0
#: Of an error's words. Somebody may raise a whole file.
_WORDS = 2000


def take_key(environ: MutableMapping[str, str]) -> bytes:
    """The key, which is removed from the environment: what this process starts is not to have it."""
    return bytes.fromhex(environ.pop(KEY, ""))


class SupervisorClient:
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
                self._connection.send(json.dumps({"word": word, **more}).encode())
            except (OSError, ValueError) as error:
                _log.info("rank %d cannot tell ocommrun '%s': %s", self._rank, word, error)

    def say_lost(self, ranks: Mapping[int, str]) -> None:
        """These ranks have failed, and how."""
        self.say("lost", ranks={str(rank): why[:_WORDS] for rank, why in ranks.items()})

    def _listen(self) -> None:
        while True:
            try:
                heard = json.loads(self._connection.receive())
            except (EOFError, OSError) as error:
                # Nobody would start a lost rank again, nor end this one: a job without its head is no job.
                sys.stderr.write(f"ocomm: rank {self._rank}: ocommrun, which supervises this job, has gone: {error}.\n")
                sys.stderr.flush()
                os._exit(1)
            if heard["word"] == "hosts":
                self.hosts_changed = True


def client(
    host: str, port: int, key: bytes, connect_s: float = _CONNECT_S, most_bytes: int = authenticated_socket.MOST_BYTES
) -> AuthenticatedSocket:
    """A line to a server that knows ``key``. OSError or EOFError if there is none that does."""
    connection = socket.create_connection((host, port), connect_s)
    try:
        return authenticated_socket.connect(connection, key, _ANSWER_S, most_bytes)
    except TimeoutError:
        connection.close()
        raise TimeoutError(f"connected, but no answer after {_ANSWER_S:.0f} s") from None
    except BaseException:
        connection.close()
        raise


def connect_to_any(addresses: Sequence[str], key: bytes) -> AuthenticatedSocket:
    """A line to the first of ``addresses``, given as HOST:PORT, where a server knows ``key``; LaunchError if none."""
    reasons = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            # An address that nobody has is given up before the system would.
            return client(host, int(port), key, _CONNECT_S / len(addresses))
        except (OSError, EOFError) as error:
            reasons.append(f"{address}: {error}")
    raise LaunchError("; ".join(reasons))


def _connect(addresses: Sequence[str], key: bytes) -> AuthenticatedSocket:
    if not key:
        raise LaunchError(
            f"this rank has no key for the ocommrun that supervises it, which passes it on in {KEY}: the launcher has "
            "not passed on that variable, or this process was started by a rank."
        )
    try:
        return connect_to_any(addresses, key)
    except LaunchError as error:
        raise LaunchError(
            f"this rank cannot reach the ocommrun that supervises it: {error}. Ranks connect to a port of the machine "
            "where ocommrun runs; is there a firewall?"
        ) from None
