"""Torch tensors of the host, taken for those of a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ocomm.kernels.device import DeviceArray, device_kernels
from ocomm_torch.memory.placement import Placement
from tests.fake_device import FakeDevice


class FakePlacement(Placement):
    """Torch tensors of the host as if they were on a device of their own."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device_kernels(device))
        self.kernels.memory.reached_by_network = device.reached  # type: ignore[attr-defined]
        self.device = device

    def arrive(self) -> None:
        self.device.follow(0)

    def leave(self) -> None:
        self.device.precede(0)

    def flat(self, tensor: torch.Tensor) -> Any:
        tensor = tensor.detach().reshape(-1)
        return DeviceArray(
            self.kernels.memory, self.device.elsewhere + tensor.data_ptr(), tensor.numel(), np.float32, tensor
        )

    def bytes(self, tensor: torch.Tensor) -> Any:
        return DeviceArray(
            self.kernels.memory, self.device.elsewhere + tensor.data_ptr(), tensor.nbytes, np.uint8, tensor
        )

    def tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(self.device.real(array))
