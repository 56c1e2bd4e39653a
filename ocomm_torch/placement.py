"""Where an optimizer's parameters are, and how Torch's work there and ocomm's come in order.

On a GPU Torch and ocomm each have a stream, and neither waits for the host: ``arrive`` puts ocomm's next work behind
what Torch has queued, ``leave`` puts Torch's behind ocomm's.
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
    """Parameters in the host's memory, where all is done when a call returns."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    @property
    def is_device(self) -> bool:
        return self.kernels.memory.is_device

    @property
    def is_captured(self) -> bool:
        """Does Torch write down what this thread calls, for a CUDA graph, instead of doing it?"""
        return False

    def note(self) -> None:
        """The next ``arrive``, in whichever thread, is to be behind what Torch has queued on this thread's stream."""

    def arrive(self) -> None:
        """ocomm may read and write what Torch's calls so far have written or read, in this thread and where noted."""

    def leave(self) -> None:
        """Torch may read and write what ocomm's calls so far have written."""

    def flat(self, tensor: torch.Tensor) -> Floats:
        """A view of a float32 tensor; a copy where it has gaps."""
        return tensor.detach().reshape(-1).numpy()

    def tensor(self, array: Floats) -> torch.Tensor:
        """A tensor that is a view of ``array``."""
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
        """Torch's, in this thread."""
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
        """Those of a contiguous tensor of any type, in the form of the host's arrays."""
        return cast(Bytes, DeviceArray(self._memory, tensor.data_ptr(), tensor.nbytes, "uint8", tensor))

    def tensor(self, array: Any) -> torch.Tensor:
        return torch.as_tensor(array, device=self._device)


def refuse_in_a_graph() -> None:
    """InvalidRequestError while this thread captures a CUDA graph: a replay would exchange nothing."""
    if torch.cuda.is_current_stream_capturing():
        raise InvalidRequestError(
            "ocomm exchanges nothing in a CUDA graph: capture forward and backward, and call step() and collectives "
            "after replay()."
        )


def placement(names: Sequence[str], parameters: Sequence[torch.Tensor], session: Session) -> Placement:
    """Of parameters that are all in one place. InvalidRequestError if they are not, or in one that ocomm does not
    know."""
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
