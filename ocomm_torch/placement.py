"""Where an optimizer's parameters are, and how Torch's work there is ordered with ocomm's.

On a GPU Torch and ocomm have a stream each, and neither waits for the host: ``arrive`` orders ocomm's next work after
what Torch has queued, ``leave`` orders Torch's after ocomm's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import Bytes, Floats, Kernels
from ocomm.kernels.device import DeviceArray, DeviceMemory
from ocomm.session import Session


class Placement:
    """Parameters in the host's memory, where all work is done when a call returns."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    @property
    def is_device(self) -> bool:
        return self.kernels.memory.is_device

    @property
    def is_captured(self) -> bool:
        """True if Torch records this thread's calls for a CUDA graph instead of running them."""
        return False

    def note(self) -> None:
        """Makes the next ``arrive``, in any thread, wait for what Torch has queued on this thread's stream."""

    def arrive(self) -> None:
        """Lets ocomm read and write what Torch's calls so far have written or read, in this thread and in those that
        called ``note``.
        """

    def leave(self) -> None:
        """Lets Torch read and write what ocomm's calls so far have written."""

    def flat(self, tensor: torch.Tensor) -> Floats:
        """Returns a view of a float32 tensor; a copy if it has gaps."""
        return tensor.detach().reshape(-1).numpy()

    def tensor(self, array: Floats) -> torch.Tensor:
        """Returns a tensor that is a view of ``array``."""
        return torch.from_numpy(array)


class CudaPlacement(Placement):
    """Parameters on one GPU."""

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        super().__init__(kernels)
        self._device = device
        assert isinstance(kernels.memory, DeviceMemory)
        self._memory = kernels.memory
        self._memory.device.make_room = torch.cuda.empty_cache
        self._noted: set[int] = set()

    @property
    def _stream(self) -> int:
        """Torch's current stream in this thread."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    @property
    def is_captured(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def note(self) -> None:
        self._noted.add(self._stream)

    def arrive(self) -> None:
        refuse_in_a_graph()
        self.note()
        while self._noted:
            self._memory.device.follow(self._noted.pop())

    def leave(self) -> None:
        self._memory.device.precede(self._stream)

    def flat(self, tensor: torch.Tensor) -> Floats:
        tensor = tensor.detach().reshape(-1)
        return cast(Floats, DeviceArray(self._memory, tensor.data_ptr(), tensor.numel(), "float32", tensor))

    def bytes(self, tensor: torch.Tensor) -> Bytes:
        """Returns the bytes of a contiguous tensor of any type, in the form of the host's arrays."""
        return cast(Bytes, DeviceArray(self._memory, tensor.data_ptr(), tensor.nbytes, "uint8", tensor))

    def tensor(self, array: Any) -> torch.Tensor:
        return torch.as_tensor(array, device=self._device)


def refuse_in_a_graph() -> None:
    """Raises InvalidRequestError while this thread captures a CUDA graph, because a replay would exchange nothing."""
    if torch.cuda.is_current_stream_capturing():
        raise InvalidRequestError(
            "ocomm exchanges nothing in a CUDA graph: capture forward and backward, and call step() and collectives "
            "after replay()."
        )


def placement(names: Sequence[str], parameters: Sequence[torch.Tensor], session: Session) -> Placement:
    """Returns the placement of parameters that are all in one memory. Raises InvalidRequestError if they are not, or in
    one that ocomm does not support.
    """
    assert session.kernels is not None
    first = parameters[0].device if parameters else torch.device("cpu")
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.device != first:
            raise InvalidRequestError(
                f"parameter '{name}' is on {parameter.device}, '{names[0]}' on {first}; give each device's parameters "
                "an optimizer of their own."
            )
    if first.type == "cpu":
        return Placement(session.kernels)
    if first.type == "cuda" and torch.version.cuda is not None:
        return CudaPlacement(session.device_kernels(first.index or 0), first)
    raise InvalidRequestError(
        f"parameter '{names[0]}' is on {first}; ocomm trains parameters in the host's memory and on CUDA devices."
    )
