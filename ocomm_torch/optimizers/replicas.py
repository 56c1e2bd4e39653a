"""What ``ocomm.training.comparison`` compares of a Torch optimizer: its hyperparameters, and checksums of its
parameters.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ocomm.agreement import digest
from ocomm.kernels.base import Kernels
from ocomm.optim.replicas import ReplicaWindows
from ocomm.training.comparison import spelled

#: Options that choose between kernels, which round differently, not between algorithms.
WAYS = ("foreach", "fused", "capturable", "differentiable")


def way_of(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> str:
    """Returns how the optimizer's own step rounds, in words: equal words mean equal bits.

    Args:
        optimizer: Its class is used, and where its parameters are.
        groups: Its param groups.
    """
    first = next((p for group in groups for p in group["params"]), None)
    is_device = first is not None and first.is_cuda
    unit = torch.cuda.get_device_name(first.device) if first is not None and is_device else _instruction_set()
    kinds = sorted({_kind(group, is_device) for group in groups})
    return f"{type(optimizer).__name__} ({', '.join(kinds)}) of torch {torch.__version__} on {unit}"


def _kind(group: Mapping[str, Any], is_device: bool) -> str:
    """Returns how steps are computed: by default tensor by tensor on a CPU, and all tensors together on a GPU."""
    if group.get("fused"):
        return "fused"
    foreach = group.get("foreach")
    return "foreach" if foreach or (foreach is None and is_device) else "one by one"


def _instruction_set() -> str:
    return str(torch.backends.cpu.get_cpu_capability())


def options_of(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each hyperparameter of each group that the optimizer's class knows."""
    names = [name for name in optimizer.defaults if name not in WAYS]
    return [
        f"{name}={spelled(group[name], _of_tensor)} in group {number}"
        for number, group in enumerate(groups)
        for name in names
        if name in group and spelled(group[name], _of_tensor) is not None
    ]


def _of_tensor(value: object) -> str | None:
    """Returns a tensor's value as text; None if a device would have to be waited for, or if it is no single value."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_cuda:
        return repr(value.item())
    return None


def written_in_forward(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Returns what writes in forward to the parameters ``named`` on this rank alone, and what to do, in words, by name.

    It looks through all objects of the process, which takes a tenth of a second: call it where replicas differ.
    """
    names = {tensor.data_ptr(): name for name, tensor in named}
    found = {}
    for module in gc.get_objects():
        # Not isinstance, which asks an object for its class: some import something then.
        if not issubclass(type(module), (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            continue
        if getattr(module, "max_norm", None) is None:
            continue
        if name := names.get(module.weight.data_ptr()):
            found[name] = (
                f"'{name}' is the weight of an {type(module).__name__} with max_norm={module.max_norm:g}: its forward "
                "writes to the rows that this rank's batch has, and the other ranks' batches have others. Leave "
                "max_norm out, and on all ranks, after each step, scale all rows: under torch.no_grad(), "
                f"weight.copy_(weight.renorm({module.norm_type:g}, 0, {module.max_norm:g}))."
            )
    return found


class ParameterChecksums:
    """Checksums of the current parameters: of all, or of those that one comparison in ``steps`` compares.

    On a GPU, where the host has to wait for them, every ``steps``-th comparison compares the norms of all.
    """

    def __init__(self, steps: int, kernels: Kernels) -> None:
        self._steps, self._kernels = steps, kernels
        self._nbytes: list[int] = []
        self._windows = ReplicaWindows(np.zeros(0, np.int64), 0, kernels)

    def of(self, parameters: Sequence[Tensor], count: int) -> int:
        """Returns the checksum of what comparison ``count`` compares, of everything for 0. Parameters are on one
        device.
        """
        if any(p.is_cuda for p in parameters):
            return 0 if count % self._steps else digest(_norms(parameters))
        nbytes = [p.nbytes for p in parameters]
        if nbytes != self._nbytes:
            self._nbytes = nbytes
            self._windows = ReplicaWindows(np.array(nbytes, np.int64), self._steps, self._kernels)
        kept: list[Tensor] = []

        def addresses(rows: NDArray[np.int64]) -> NDArray[np.uint64]:
            kept[:] = [parameters[row].detach().contiguous() for row in rows]
            return np.array([tensor.data_ptr() for tensor in kept], np.uint64)

        return self._windows.checksum(addresses, range(count, count + 1)) if count else self._windows.whole(addresses)

    def each(self, parameters: Sequence[Tensor], names: Sequence[str]) -> list[str]:
        """Returns a line for each parameter."""
        if any(p.is_cuda for p in parameters):
            sums = [f"norm {norm!r}" for norm in _norms(parameters)]
        else:
            dense = [p.detach().contiguous() for p in parameters]
            addresses = np.array([tensor.data_ptr() for tensor in dense], np.uint64)
            nbytes = np.array([tensor.nbytes for tensor in dense], np.int64)
            sums = [f"checksum {sum:016x}" for sum in self._kernels.checksums(addresses, nbytes).tolist()]
        return [f"'{name}' with {sum}" for name, sum in zip(names, sums, strict=True)]


def _norms(parameters: Sequence[Tensor]) -> list[float]:
    """Returns the parameters' norms; waits for the device."""
    return torch.stack([norm.double() for norm in torch._foreach_norm([p.detach() for p in parameters])]).tolist()
