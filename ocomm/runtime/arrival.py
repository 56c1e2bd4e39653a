"""Watches over MPI_Init, which waits without limit for ranks that do not come."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_log = logging.getLogger("ocomm")
#: How often a folder is made again if another rank removes it meanwhile because it is empty.
_ATTEMPTS = 100
#: Seconds after which no rank waits any more in the folder of another job.
_OLD_S = 24 * 3600.0


class Arrival:
    """Ends the process if MPI_Init takes longer than ``timeout_s``, and names the ranks of the job that have not come.

    It is a context manager around MPI_Init. Every rank leaves a file, named by its number, in a folder of its host; a
    rank without a file is missing. The folder's name is made of the user and of ``job``, so it can be guessed: the
    folder is used only if it belongs to this user and nobody else can look into it. Without a folder, or on a full
    disk, the ranks are not named.

    ``on_late`` is called before the process ends. ``ranks_here`` are the numbers of this host's ranks; empty if they
    are not known.
    """

    def __init__(
        self,
        job: str,
        rank: int,
        size: int,
        timeout_s: float,
        on_late: Callable[[], None] = lambda: None,
        ranks_here: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        name = "".join(c if c.isalnum() else "-" for c in job) or str(os.getppid())
        self._of_this_user = f"ocomm-{os.getuid()}-"
        self.folder = Path(tempfile.gettempdir()) / f"{self._of_this_user}{name}"
        self._descriptor = -1
        self._here = threading.Event()
        self._on_late = on_late
        self._ranks_here = ranks_here

    def __enter__(self) -> None:
        if self.timeout_s <= 0:
            return
        self._sweep()
        try:
            self._descriptor = self._sign_in()
        except OSError as error:  # the list of ranks is not worth the end of the training
            _log.warning("rank %d keeps no list of arrived ranks: %s", self.rank, error)
        threading.Thread(target=self._watch, name="ocomm-arrival", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._here.set()
        if self._descriptor < 0:
            return
        try:
            os.unlink(str(self.rank), dir_fd=self._descriptor)
            self.folder.rmdir()
        except OSError:  # the folder still has files of other ranks
            return
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _sweep(self) -> None:
        """Removes the folders of jobs that ended in MPI_Init long ago; their names are not used again."""
        limit = time.time() - max(_OLD_S, self.timeout_s)
        for folder in self.folder.parent.glob(f"{self._of_this_user}*"):
            with contextlib.suppress(OSError):  # a link, another user's, or another rank is at it
                if folder.lstat().st_mtime > limit:
                    continue
                descriptor = open_private(folder)
                try:
                    for name in filter(str.isdigit, os.listdir(descriptor)):
                        os.unlink(name, dir_fd=descriptor)
                    folder.rmdir()
                finally:
                    os.close(descriptor)

    def _sign_in(self) -> int:
        """Creates this rank's file and returns a descriptor of the folder."""
        for _ in range(_ATTEMPTS):
            descriptor = open_private(self.folder)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                os.close(os.open(str(self.rank), flags, 0o600, dir_fd=descriptor))
                return descriptor
            except FileNotFoundError:  # another rank has removed it since
                os.close(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        raise FileNotFoundError(f"{self.folder} disappears again and again")

    def _watch(self) -> None:
        if self._here.wait(self.timeout_s):
            return
        sys.stderr.write(self.report())
        sys.stderr.flush()
        self._on_late()
        os._exit(1)

    def report(self) -> str:
        """Returns the message for when the time is up."""
        where = f"ocomm: rank {self.rank} of {self.size} on {socket.gethostname()}: after {self.timeout_s:.0f} s"
        missing, seen = "no list of them could be kept", "as seen from this host"
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # the process ends all the same
                arrived = {int(name) for name in os.listdir(self._descriptor) if name.isdigit()}
                here = sorted({*self._ranks_here, *arrived}) if self._ranks_here else list(range(self.size))
                absent = [rank for rank in here if rank not in arrived]
                if not absent and len(here) < self.size:
                    return (
                        f"{where} the ranks of this host, {here}, have all come to init(), and some of other hosts "
                        "have not, or MPI has not connected them. Look at what those say.\n"
                    )
                if not absent:
                    return (
                        f"{where} MPI has not connected the ranks, which have all come to init(). Pass the same "
                        "communicator, or list of ranks, as init(comm=...) on all of them; else look at the network.\n"
                    )
                missing = str(absent)
                if len(here) < self.size:
                    seen = f"of this host's {here}; nothing is known here of the others"
        return (
            f"{where} these ranks have not come to init() ({seen}): {missing}. Look at their output for errors, or "
            "raise OCOMM_START_TIMEOUT.\n"
        )


def open_private(folder: Path) -> int:
    """Returns a descriptor of ``folder``, which is created if it does not exist.

    Raises PermissionError if the folder is not accessible to this user alone.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # another rank has removed it since
            continue
        except OSError as error:
            raise PermissionError(f"{folder} is no folder but a link or a file ({error.strerror}); remove it") from None
        status = os.fstat(descriptor)
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid == os.geteuid() and not mode & 0o077:
            return descriptor
        os.close(descriptor)
        raise PermissionError(
            f"the folder {folder} belongs to user {status.st_uid} and has mode {mode:04o}; it must belong to user "
            f"{os.geteuid()}, with mode 0700. Remove it"
        )
    raise FileNotFoundError(f"{folder} disappears again and again")
