"""What ocommrun prints, beside what it passes on of the launcher and the ranks, and the folder for their output."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import tempfile
from typing import TextIO

from ocomm.errors import LaunchError


def say(text: str) -> None:
    """Prints a line of ocommrun's own; nothing if nobody reads it."""
    with contextlib.suppress(OSError):
        write_all(sys.stderr, f"ocommrun: {text}\n".encode(errors="backslashreplace"))


def write_all(stream: TextIO, data: bytes) -> None:
    """Writes all of ``data``, also to a pipe or terminal that somebody has made non-blocking: then it waits for a slow
    reader as long as any other write would. Raises OSError if the words cannot be written.
    """
    # The buffer would keep what cannot be written, and Python would end with status 120 because of it.
    raw = getattr(stream.buffer, "raw", stream.buffer)
    while True:
        data = data[raw.write(data) or 0 :]  # None: it would have to wait
        if not data:
            return
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        poll.poll()


def is_read() -> bool:
    """Returns False if what this process and its job print goes into a pipe that nobody reads any more."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return not any(events & select.POLLERR for _, events in poll.poll(0))


def make_folder(path: str) -> None:
    """Makes the folder for the output of ranks. Raises LaunchError if it cannot be made or written to."""
    try:
        os.makedirs(path, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(dir=path))
    except OSError as error:
        raise LaunchError(f"--output-filename {path}: {error.strerror}; nothing was started.") from None
