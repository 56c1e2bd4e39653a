"""The kernels of the CUDA devices that this process uses."""

from __future__ import annotations

import logging

from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import Kernels
from ocomm.kernels.device import device_kernels
from ocomm.types import Settings

_log = logging.getLogger("ocomm")


class Devices:
    """Makes each device's kernels once, and finds out whether MPI takes addresses on it."""

    def __init__(self) -> None:
        self._kernels: dict[int, Kernels] = {}

    def kernels(self, number: int, settings: Settings, communicates: bool) -> Kernels:
        """Returns the kernels of CUDA device ``number``, made at the first call.

        Args:
            number: As Torch counts the devices that this process may see.
            settings: Say how long a device may take, and whether MPI is asked about addresses.
            communicates: False if there is no other rank, so that nothing is asked.

        Raises:
            InvalidRequestError: numba-cuda is not installed.
        """
        if number not in self._kernels:
            self._kernels[number] = _made(number, settings, communicates)
        return self._kernels[number]


def _made(number: int, settings: Settings, communicates: bool) -> Kernels:
    try:
        from ocomm.kernels.cuda_device import CudaDevice

        kernels = device_kernels(CudaDevice(number), settings.stall_shutdown_s)
    except ImportError as error:
        raise InvalidRequestError(
            f"parameters are on GPU {number}, for which ocomm needs numba-cuda: pip install 'ocomm[gpu-cu12]' "
            f"or 'ocomm[gpu-cu13]', as torch.version.cuda says ({error})."
        ) from error
    from ocomm.transport import cuda_probe

    found = cuda_probe.device_messages(settings.cuda_aware, number) if communicates else None
    if found is not None:
        which = "addresses on it" if found.yes else "copies in pinned memory"
        _log.info("CUDA device %d: MPI is given %s: %s", number, which, found.why)
    kernels.memory.reached_by_network = found is not None and found.yes  # type: ignore[attr-defined]
    return kernels
