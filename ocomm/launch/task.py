"""A rank of ``ocomm.run``: python -m ocomm.launch.task HOST PORT. Fetches the function, calls it, sends the result."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import traceback
from typing import Any

from ocomm.config import read_launch
from ocomm.runtime.supervisor import client

#: The variable with the key that both ends must know, in hexadecimal. No setting, hence the name.
KEY = "_OCOMM_RUN_KEY"


def main(host: str, port: int) -> int:
    """The exit status of the rank."""
    launch = read_launch(os.environ)
    rank = launch.rank if launch else 0
    with contextlib.closing(client(host, port, bytes.fromhex(os.environ.pop(KEY)))) as parent:
        parent.send(("here", rank, socket.gethostname()))
        try:
            function, arguments, keywords = pickle.loads(parent.recv_bytes())
            answer: tuple[str, int, Any] = ("result", rank, function(*arguments, **keywords))
        except BaseException:
            parent.send(("failed", rank, traceback.format_exc()))
            raise
        try:
            parent.send(answer)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            parent.send(("failed", rank, f"its result cannot be pickled: {error}"))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
