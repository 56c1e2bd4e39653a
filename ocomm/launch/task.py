"""A rank of ``ocomm.run``: ``python -m ocomm.launch.task HOST PORT`` fetches the function, calls it, and sends the
result.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import Any

from ocomm.config import read_launch
from ocomm.runtime.supervisor_client import client

#: The variable with the key that both ends must know, in hexadecimal. It is no setting, so its name differs from
#: theirs.
KEY = "_OCOMM_RUN_KEY"
#: Limit for the bytes of a function with its arguments, or of a result.
MOST_BYTES = 1 << 36
#: Seconds to wait for the function after this rank has connected, because other ranks may get a large one first.
_TASK_S = 3600.0


def main(host: str, port: int) -> int:
    """Runs the rank and returns its exit status."""
    launch = read_launch(os.environ)
    rank = launch.rank if launch else 0
    with client(host, port, bytes.fromhex(os.environ.pop(KEY)), most_bytes=MOST_BYTES) as parent:
        task = parent.receive(_TASK_S)
        try:
            function, arguments, keywords = pickle.loads(task)
            answer: tuple[str, int, Any] = ("result", rank, function(*arguments, **keywords))
        except BaseException:
            parent.send(pickle.dumps(("failed", rank, traceback.format_exc())))
            raise
        try:
            parent.send(pickle.dumps(answer))
        except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
            parent.send(pickle.dumps(("failed", rank, f"its result cannot be sent: {error}")))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
