"""The levels of the logger "ocomm", and where its lines go if the script has not configured logging.

Python's logging drops a line below ``warning`` if nobody has added a handler. So ``configure`` adds one, which writes
to stderr only while neither the logger "ocomm" nor a logger above it has a handler of the script's.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:  # takes no type before Python 3.11
    _StreamHandler = logging.StreamHandler

#: Between info and warning: what rank 0 says of every run, in three lines.
NOTICE = 25
TRACE = 5
#: The levels by the names that settings and flags use.
LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "notice": NOTICE,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}

_log = logging.getLogger("ocomm")


class _Formatter(logging.Formatter):
    """Says who speaks and, of all but notices, how serious it is."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"ocomm: {text}" if record.levelno == NOTICE else f"ocomm {record.levelname.lower()}: {text}"


class _Stderr(_StreamHandler):
    """Writes to what ``sys.stderr`` is at that moment, unless the script has a handler that gets the line."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(_Formatter())
        self.addFilter(lambda record: not has_handlers())

    def handleError(self, record: logging.LogRecord) -> None:
        """Drops a line that cannot be written, and the complaint about it if that cannot be written, either."""
        with contextlib.suppress(OSError, ValueError):  # as where the script has closed sys.stderr
            super().handleError(record)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        """Does nothing: the stream is always the current one."""


_handler = _Stderr()
#: The level that ``configure`` has set; another one was set by the script.
_own_level = logging.NOTSET


def has_handlers() -> bool:
    """Returns True if the script has a handler that gets the lines of "ocomm"."""
    logger: logging.Logger | None = _log
    while logger is not None:
        if any(handler is not _handler for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def configure(level: str) -> None:
    """Makes lines of ``level`` and above visible, where the script has not chosen a level for "ocomm" itself.

    Args:
        level: A key of ``LEVELS``; or "" for ``notice`` or, if the script has configured logging, the script's level.
    """
    global _own_level
    logging.addLevelName(TRACE, "TRACE")
    logging.addLevelName(NOTICE, "NOTICE")
    if _handler not in _log.handlers:
        _log.addHandler(_handler)
    if _log.level in (logging.NOTSET, _own_level):
        _own_level = LEVELS[level] if level else logging.NOTSET if has_handlers() else NOTICE
        _log.setLevel(_own_level)
