"""float32 masters, which steps change in the place of parameters that are in 16 bits, or in another memory than the
optimizer's state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import WHOLE, Kernels
from ocomm.kernels.device import DeviceKernels, Later
from ocomm_torch.memory.placement import Placement

#: Parameters of these types have a master; float32 parameters are changed directly, unless they are elsewhere.
LOW_PRECISION = (torch.bfloat16, torch.float16)


class Masters:
    """Owns a float32 master of each parameter in ``LOW_PRECISION``, and float32 memory for its gradient; with a
    placement that offloads, a master of every parameter, where the state is.

    After a step ``write`` rounds the masters to their parameters, to nearest even. Otherwise users may write
    parameters: ``follow`` finds the elements that are not their rounded master, however they were written, and copies
    these, and no others, to the masters. So an element that was not written keeps the precision that only its master
    has.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], placement: Placement, grouped: Sequence[torch.Tensor]
    ) -> None:
        self._low = {index: None for index, parameter in enumerate(parameters) if parameter.dtype in LOW_PRECISION}
        mastered = range(len(parameters)) if placement.offloads else self._low
        self._parameters = {index: parameters[index] for index in mastered}
        self._masters = {index: placement.kept(parameters[index]) for index in mastered}
        #: The tensor that steps change for each parameter: its master, or itself.
        self.stepped = [self._masters.get(index, parameter) for index, parameter in enumerate(parameters)]
        #: The parameters as param groups have them: DTensors, where ``parameters`` are the tensors inside.
        self._grouped = grouped
        self._gradients: dict[int, torch.Tensor] = {}
        self._placement = placement
        # Checksums of the parameters when they were last equal to their rounded masters; None if that is not known.
        self._known: NDArray[np.uint64] | Later | None = None
        #: Checksums of the parameters as ``look`` has found them, until they are compared.
        self._looked: NDArray[np.uint64] | Later | None = None
        #: Masters of a saved state, until a step begins: parameters may be loaded after them.
        self._saved: dict[int, torch.Tensor] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._low

    @property
    def indices(self) -> list[int]:
        """The parameters in ``LOW_PRECISION``, whose masters are part of a saved state."""
        return list(self._low)

    # Parameters

    def look(self) -> None:
        """Begins what ``settle`` ends; between them nothing writes to parameters. A device need not be waited for."""
        if self._parameters:
            if isinstance(self._looked, Later):
                self._looked.drop()
            self._looked = self._begin_sums(self._placement.tensor_kernels, self._parameters)

    def settle(self) -> bool:
        """Copies to masters what was written to parameters before ``look``. Returns True if anything was."""
        if self._looked is None:
            return False
        now, written = _result_of(self._looked), False
        known = None if self._known is None else _result_of(self._known)
        self._looked = None
        indices = list(self._parameters)
        for place in range(len(indices)) if known is None else np.flatnonzero(now != known).tolist():
            written |= self._take_written(indices[place], self._parameters[indices[place]].detach())
        self._known = now
        return written

    def follow(self) -> bool:
        """Copies to masters what was written to parameters. Returns True if anything was."""
        self.look()
        return self.settle()

    def _take_written(self, index: int, parameter: torch.Tensor) -> bool:
        master = self._masters[index]
        parameter = parameter.to(master.device)
        written = ~_rounds_to(master, parameter)
        if not written.any():
            return False
        value = parameter.float()
        if index in self._saved:
            saved = self._saved[index]
            value = torch.where(_rounds_to(saved, parameter), saved, value)
        master.copy_(torch.where(written, value, master))
        return True

    def take(self) -> bool:
        """Ends what ``look`` has begun before a step, and returns the result of ``settle``. Parameters that are loaded
        later belong to another state.
        """
        written = self.settle()
        self._saved.clear()
        return written

    def write(self) -> None:
        """Sets every parameter to its rounded master."""
        if not self._parameters:
            return
        written = self._placement.write(self._parameters, self._masters)
        self._known = self._begin_sums(self._placement.kernels, written)

    def restart(self) -> None:
        """Sets every master to its parameter."""
        for index, parameter in self._parameters.items():
            self._masters[index].copy_(parameter.detach())
        self._known = None
        self._saved.clear()

    def load(self, saved: Mapping[int, torch.Tensor]) -> None:
        """Loads saved masters, except for parameters that are not the rounded master."""
        self._saved = {index: master.to(self._masters[index].device) for index, master in saved.items()}
        for index, master in saved.items():
            self._masters[index].copy_(master)
        self._known = None
        self.follow()

    # Gradients

    def widened(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient in float32, in memory that the next call for the same parameter overwrites."""
        place = self._gradients.get(index)
        if place is None:
            place = self._gradients[index] = torch.empty_like(self._masters[index])
        return place.copy_(gradient.detach())

    def widen_float16(self) -> None:
        """Makes float16 parameters have float32 gradients from now on, with those that they have already.

        Raises InvalidRequestError if this release of Torch cannot do that.
        """
        for parameter in self._parameters.values():
            gradient = parameter.grad
            if gradient is None or gradient.dtype is not torch.float16:
                continue
            if not hasattr(parameter, "grad_dtype"):
                raise InvalidRequestError(
                    "a GradScaler would divide gradients in float16, which loses the small ones, and torch "
                    f"{torch.__version__} has no Tensor.grad_dtype to keep them in float32. Use torch 2.10 or later, "
                    "or bfloat16 parameters without a GradScaler."
                )
            parameter.grad = None
            parameter.grad_dtype = torch.float32
            parameter.grad = gradient.float()

    def checksums(self, tensors: Mapping[int, torch.Tensor], part: int = WHOLE) -> NDArray[np.uint64]:
        """Returns checksums of the bytes of parameters or gradients without gaps, in their order; ``part`` is that of
        ``Kernels.checksum``.
        """
        return self._sums(self._placement.tensor_kernels, tensors, part)

    def _sums(self, kernels: Kernels, tensors: Mapping[int, torch.Tensor], part: int = WHOLE) -> NDArray[np.uint64]:
        self._placement.arrive()
        return kernels.checksums(*_memory_of(tensors), part)

    def _begin_sums(self, kernels: Kernels, tensors: Mapping[int, torch.Tensor]) -> NDArray[np.uint64] | Later:
        self._placement.arrive()
        if isinstance(kernels, DeviceKernels):
            begun = kernels.begin_checksums(*_memory_of(tensors))
            self._placement.leave()  # later writes come after that
            return begun
        return kernels.checksums(*_memory_of(tensors))

    # The wrapped optimizer

    @contextlib.contextmanager
    def standing_in(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Replaces parameters by what steps change, in the groups and the state of ``optimizer`` inside the context."""
        pairs = [(old, new) for old, new in zip(self._grouped, self.stepped, strict=True) if old is not new]
        _replace(optimizer, pairs)
        try:
            yield
        finally:
            _replace(optimizer, [(new, old) for old, new in pairs])

    def memory(self) -> dict[str, int]:
        """Returns the bytes held, by buffer."""
        return {
            "masters": sum(master.nbytes for master in self._masters.values()),
            "widened_gradients": sum(place.nbytes for place in self._gradients.values()),
        }


def _rounds_to(master: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns for each element whether it is, bit for bit, the rounded master."""
    bits = torch.int32 if parameter.dtype is torch.float32 else torch.int16
    return master.to(parameter.dtype).view(bits) == parameter.view(bits)


def _replace(optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Puts the second of each pair in the place of the first."""
    new = {id(old): new for old, new in pairs}
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(id(parameter), parameter) for parameter in group["params"]]
    for before, after in pairs:
        if before in optimizer.state:
            optimizer.state[after] = optimizer.state.pop(before)


def _memory_of(tensors: Mapping[int, torch.Tensor]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Returns addresses, and sizes in bytes."""
    return (
        np.array([tensor.data_ptr() for tensor in tensors.values()], np.uint64),
        np.array([tensor.nbytes for tensor in tensors.values()], np.int64),
    )


def _result_of(sums: NDArray[np.uint64] | Later) -> NDArray[np.uint64]:
    return sums.result() if isinstance(sums, Later) else sums
