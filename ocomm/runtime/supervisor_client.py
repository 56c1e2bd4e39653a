"""A rank's connection to the ``ocommrun`` that supervises its job: JSON messages over an ``AuthenticatedSocket``.

A rank sends:

    {"word": "here", "rank": 3, "host": "b", "generation": 1}      its first message, before it waits for the others
    {"word": "late"}                                               not all others have come in time, so it ends
    {"word": "commit", "number": 12, "state": "set0.1"}            a commit that a later generation can restore
    {"word": "anew", "state": "set0.1", "folder": "/tmp/a"}        the ranks have no commit of this state
    {"word": "counters", "job": {...}}                             counters of all ranks, from rank 0 of a watched job
    {"word": "lost", "ranks": {"2": "has not answered for 7 s"}}   ranks that have failed, as this rank knows
    {"word": "leave"}                                              it ends in order, for a generation on other hosts
    {"word": "bye"}                                                it ends in order

and receives {"word": "hosts"}: there will be such a generation, so leave after the next commit.
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

from ocomm import json_values
from ocomm.errors import LaunchError, clause
from ocomm.runtime import authenticated_socket
from ocomm.runtime.authenticated_socket import AuthenticatedSocket

_log = logging.getLogger("ocomm")
#: The variable with the key that both ends must know, in hexadecimal. It is no setting, so its name differs from
#: theirs.
KEY = "_OCOMM_ELASTIC_KEY"
#: Beginning of the reason for a rank that may be alive, but cut off from the network.
SILENT = "has not answered"
_CONNECT_S = 10.0
#: Time for the other end to prove that it knows the key.
_ANSWER_S = 60.0
#: Characters of an error's text that are sent, because an exception may carry a whole file.
_WORDS = 2000


def take_key(environ: MutableMapping[str, str]) -> bytes:
    """Returns the key and removes it from the environment, so that processes started by this one do not get it."""
    return bytes.fromhex(environ.pop(KEY, ""))


class SupervisorClient:
    """Connects a rank to its supervisor. Raises LaunchError if none of ``addresses``, given as HOST:PORT, answers.

    ``launcher``: the descriptor of this process's connection to the launcher; -1 if it has none. The launcher kills the
    other ranks as soon as that ends, so the one to the supervisor, which names the first rank that is lost, ends
    before.
    """

    def __init__(self, addresses: Sequence[str], key: bytes, rank: int, generation: int, launcher: int = -1) -> None:
        self.hosts_changed = False
        self._rank = rank
        self._lock = threading.Lock()
        self._connection = _connect(addresses, key)
        self._connection.end_before(launcher)
        # A forked process, such as a worker of a data loader, must not keep the connection open when this one ends.
        os.register_at_fork(after_in_child=self._connection.close)
        self.say("here", rank=rank, host=socket.gethostname(), generation=generation)
        threading.Thread(target=self._listen, name="ocomm-supervisor", daemon=True).start()

    def say(self, word: str, **more: Any) -> None:
        """Sends a message; from any thread. A message that cannot be sent is dropped, because the other end has
        gone.
        """
        with self._lock:
            try:
                self._connection.send(json.dumps({"word": word, **more}).encode())
            except (OSError, ValueError) as error:
                _log.info("rank %d cannot tell ocommrun '%s': %s", self._rank, word, error)

    def say_lost(self, ranks: Mapping[int, str]) -> None:
        """Tells the supervisor which ranks have failed, and how."""
        self.say("lost", ranks={str(rank): why[:_WORDS] for rank, why in ranks.items()})

    def _listen(self) -> None:
        while True:
            try:
                (word,) = json_values.fields(json_values.parse(self._connection.receive()), "word")
            except (EOFError, OSError, ValueError) as error:
                # Without its supervisor nobody starts a lost rank again or ends this one, so this rank ends itself.
                how = "has sent" if isinstance(error, ValueError) else "has gone:"
                sys.stderr.write(
                    f"ocomm: rank {self._rank}: ocommrun, which supervises this job, {how} {clause(error)}.\n"
                )
                sys.stderr.flush()
                os._exit(1)
            if word == "hosts":
                self.hosts_changed = True


def client(
    host: str, port: int, key: bytes, connect_s: float = _CONNECT_S, most_bytes: int = authenticated_socket.MOST_BYTES
) -> AuthenticatedSocket:
    """Connects to a server that knows ``key``. Raises OSError or EOFError if there is none."""
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
    """Returns a connection to the first of ``addresses``, given as HOST:PORT, at which a server knows ``key``.

    Raises LaunchError if there is none.
    """
    reasons = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            # An address that no machine has is given up earlier than the operating system would.
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
            f"this rank cannot reach the ocommrun that supervises it: {clause(error)}. Ranks connect to a port of the "
            "machine where ocommrun runs; is there a firewall?"
        ) from None
