"""Host memory in mapped files of a folder, for an optimizer's state that is larger than the host's memory."""

from __future__ import annotations

import copy
import mmap
import os
import shutil
import tempfile

import numpy as np

from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import Floats, HostMemory, Kernels, Memory


class FileMemory(HostMemory):
    """The host's memory, in which arrays of ``zeros`` are mapped files of ``folder``; messages are in its memory.

    A file has no name once it is mapped, so it is gone with its array, however the process ends. Its bytes are
    reserved when the array is made, because a write to a page that has no room on a full disk ends the process.

    Raises:
        InvalidRequestError: There is no such folder, or no file can be made in it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.path.abspath(os.fspath(folder))
        try:
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise InvalidRequestError(
                f"offload='{self.folder}': no file can be made there ({error.strerror}). Give a folder on this host "
                "in which this process may write."
            ) from None

    def require(self, nbytes: int) -> None:
        """Raises InvalidRequestError if the folder's disk has not as many bytes free."""
        free = shutil.disk_usage(self.folder).free
        if free < nbytes:
            raise InvalidRequestError(
                f"offload='{self.folder}': the optimizer's state takes up to {nbytes} bytes there, and {free} are "
                "free. Free some, or give a folder on another disk."
            )

    def zeros(self, numel: int) -> Floats:
        """Returns a new float32 array of zeros in a file of its own. Raises OSError, which names the folder, if there
        is no room.
        """
        if not numel:
            return np.zeros(0, np.float32)
        try:
            with tempfile.TemporaryFile(dir=self.folder, prefix="ocomm-") as file:
                os.posix_fallocate(file.fileno(), 0, 4 * numel)
                pages = mmap.mmap(file.fileno(), 4 * numel)
        except OSError as error:
            raise OSError(
                error.errno, f"{error.strerror}: no {4 * numel} bytes for the optimizer's state", self.folder
            ) from None
        return np.frombuffer(pages, np.float32, numel)


def in_memory(kernels: Kernels, memory: Memory) -> Kernels:
    """Returns the same kernels of the host, whose buffers will be in ``memory``."""
    found = copy.copy(kernels)
    found.memory = memory
    return found
