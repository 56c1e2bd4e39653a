"""Where an optimizer's parameters and its state are, and how Torch's work there is ordered with ocomm's.

On a GPU Torch and ocomm have a stream each, and neither waits for the host: ``arrive`` orders ocomm's next work after
what Torch has queued, ``leave`` orders Torch's after ocomm's. With ``OffloadedPlacement`` parameters are on a GPU and
the state is in the host's memory, where steps are made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import Bytes, Floats, Kernels
from ocomm.kernels.device import DeviceArray, DeviceMemory, Event
from ocomm.kernels.files import FileMemory, in_memory
from ocomm.session import Session


class Placement:
    """Parameters in the host's memory, where all work is done when a call returns.

    ``kernels`` make the steps, in the memory in which the state is.
    """

    #: Is the state in another memory than the parameters?
    offloads = False

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    @property
    def is_device(self) -> bool:
        """True if the state is on a device."""
        return self.kernels.memory.is_device

    @property
    def tensor_kernels(self) -> Kernels:
        """The kernels of the memory in which parameters and gradients are."""
        return self.kernels

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

    def bytes(self, tensor: torch.Tensor) -> Bytes:
        """Returns the bytes of a tensor without gaps, of any type, as they are in memory."""
        raise NotImplementedError

    def tensor(self, array: Floats) -> torch.Tensor:
        """Returns a tensor that is a view of ``array``."""
        return torch.from_numpy(array)

    # State

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the elements of a tensor without gaps as float32 where the state is, in the same order of memory:
        the tensor itself, if it is that.
        """
        return tensor.detach().float()

    def zeros_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns float32 zeros where the state is, in the shape and the order of memory of a tensor without gaps."""
        return torch.zeros_like(tensor, dtype=torch.float32)

    def write(
        self, parameters: Mapping[int, torch.Tensor], masters: Mapping[int, torch.Tensor]
    ) -> Mapping[int, torch.Tensor]:
        """Sets parameters to their masters, rounded to nearest even.

        Returns:
            What the parameters are now, in the memory of ``kernels``.
        """
        # On a device two launches or so, instead of one each.
        torch._foreach_copy_([p.detach() for p in parameters.values()], [masters[index] for index in parameters])
        return parameters

    def memory(self) -> dict[str, int]:
        """Returns the bytes held, by buffer."""
        return {}


class FilePlacement(Placement):
    """Parameters in the host's memory, and state in the mapped files of ``kernels.memory``."""

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.zeros_like(tensor).copy_(tensor.detach())

    def zeros_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return _like(torch.from_numpy(self.kernels.memory.zeros(tensor.numel())), tensor)


def _like(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view with the shape and the order of memory of a tensor without gaps."""
    return flat.as_strided(tensor.shape, tensor.stride())


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
        """Torch's current stream in this thread. Asked in each hook, so without an object of Torch's class."""
        return int(torch._C._cuda_getCurrentRawStream(self._device.index or 0))

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
        return cast(Bytes, DeviceArray(self._memory, tensor.data_ptr(), tensor.nbytes, "uint8", tensor))

    def tensor(self, array: Any) -> torch.Tensor:
        return torch.as_tensor(array, device=self._device)


class OffloadedPlacement(FilePlacement):
    """Parameters and gradients on a device, and everything else in the host's memory, where steps are made.

    Each parameter has page-locked memory of the host, 4 bytes per element. Its gradient comes through that before a
    step, and its value goes back through it after one. ``device`` is the placement of the parameters.
    """

    offloads = True

    def __init__(self, kernels: Kernels, device: Placement, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(kernels)
        self._there = device
        assert isinstance(device.kernels.memory, DeviceMemory)
        self._memory = device.kernels.memory
        ends = np.cumsum([0, *(4 * parameter.numel() for parameter in parameters)]).tolist()
        self._locked = self._memory.device.pinned(max(ends[-1], 1))
        self._starts = ends[:-1]
        #: Until this is over, values are on their way out of the page-locked memory.
        self._sent: Event | None = None

    @property
    def tensor_kernels(self) -> Kernels:
        return self._there.kernels

    @property
    def is_captured(self) -> bool:
        return self._there.is_captured

    def note(self) -> None:
        self._there.note()

    def arrive(self) -> None:
        self._there.arrive()

    def leave(self) -> None:
        self._there.leave()

    def fetch(self, gradients: Mapping[int, torch.Tensor]) -> Event:
        """Queues copies of gradients, each without gaps and of at most 4 bytes per element, behind what Torch has been
        given to do so far. Returns what is over when the copies are.
        """
        self.arrive()
        with self._memory.lock:
            for index, gradient in gradients.items():
                if gradient.nbytes:
                    source: Any = self._there.bytes(gradient)
                    self._memory.device.download(self._room(index, gradient.nbytes), source.address)
            return self._memory.device.record()

    def wait(self, event: Event) -> None:
        """Waits for the device. Raises HorovodInternalError if that takes too long."""
        self._memory.wait(event)

    def fetched(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the copy of a gradient, which is valid until the next step."""
        return _like(torch.from_numpy(self._room(index, gradient.nbytes)).view(gradient.dtype), gradient)

    def _room(self, index: int, nbytes: int) -> Bytes:
        first = self._starts[index]
        return self._locked[first : first + nbytes]

    def write(
        self, parameters: Mapping[int, torch.Tensor], masters: Mapping[int, torch.Tensor]
    ) -> Mapping[int, torch.Tensor]:
        self.arrive()
        if self._sent is not None:
            self.wait(self._sent)
        found = {index: self.fetched(index, parameter) for index, parameter in parameters.items()}
        for index, value in found.items():
            value.copy_(masters[index])
        with self._memory.lock:
            for index, parameter in parameters.items():
                if parameter.nbytes:
                    there: Any = self._there.bytes(parameter)
                    self._memory.device.upload(there.address, self._room(index, parameter.nbytes))
            self._sent = self._memory.device.record()
        self.leave()
        return found

    def memory(self) -> dict[str, int]:
        return {"page_locked": self._locked.nbytes}


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


def offloaded(
    place: Placement,
    offload: bool | str | os.PathLike[str],
    kernels: Kernels,
    parameters: Sequence[torch.Tensor],
    nbytes: int,
) -> Placement:
    """Returns the placement with which the state is where ``offload`` says.

    Args:
        place: The placement of the parameters.
        offload: False: the state is with them. True: it is in the host's memory. A folder: in mapped files there.
        kernels: The host's kernels.
        parameters: The parameters.
        nbytes: The number of bytes that the state takes at most.

    Raises:
        InvalidRequestError: The folder is missing, or has no room.
    """
    if not isinstance(offload, bool):
        memory = FileMemory(offload)
        memory.require(nbytes)
        kernels = in_memory(kernels, memory)
    elif not offload or not place.is_device:
        return place
    return OffloadedPlacement(kernels, place, parameters) if place.is_device else FilePlacement(kernels)
