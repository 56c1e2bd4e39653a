"""``CudaKernels`` for tests which hold their arrays on the host, as all of the contract suite does."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from numba import cuda

from ocomm.kernels.cuda import CudaKernels, address_of
from ocomm.kernels.loops import LOOPS


class OnDevice:
    """Copies what a call takes to the device, keeps every address modulo 16, and copies back what it may write."""

    name = "cuda"

    def __init__(self) -> None:
        self._kernels = CudaKernels()

    def __getattr__(self, loop: str) -> Any:
        if not hasattr(self._kernels, loop):
            pytest.skip(reason=f"CudaKernels has no {loop}: only the host asks for it")
        method, names = getattr(self._kernels, loop), LOOPS[loop].names

        def call(*arguments: Any) -> Any:
            given = dict(zip(names, arguments, strict=True))
            visit = Visit(given["blocks"])
            answer = method(*(visit.translated(name, argument) for name, argument in given.items()))
            visit.copy_back()
            return answer

        return call


class Visit:
    """The device's copies of one call's arrays."""

    def __init__(self, blocks: np.ndarray) -> None:
        self._blocks = blocks
        self._parts: dict[tuple[int, int], tuple[Any, np.ndarray]] = {}

    def translated(self, name: str, argument: Any) -> Any:
        if name == "tensors":
            return self._tensors(argument)
        if name == "received":
            return [self._array(message) for message in argument]
        if isinstance(argument, np.ndarray) and name != "noise":
            return self._table(argument) if name == "blocks" else self._array(argument)
        return argument

    def copy_back(self) -> None:
        for part, host in self._parts.values():
            if host.size:
                host[:] = part.copy_to_host()

    def _array(self, host: np.ndarray) -> Any:
        return self._part(host.view(np.uint8))

    def _table(self, host: np.ndarray) -> Any:
        return cuda.to_device(host.view(np.uint8).reshape(len(host), -1)) if host.size else host

    def _part(self, host: np.ndarray) -> Any:
        """The copy of some bytes; the same one for the same bytes."""
        first = host.__array_interface__["data"][0]
        key = first, host.size
        if key not in self._parts:
            whole = cuda.device_array(host.size + 16, np.uint8)
            shift = (first - address_of(whole)) % 16
            part = whole[shift : shift + host.size]
            if host.size:
                part.copy_to_device(host)
            self._parts[key] = part, host
        return self._parts[key][0]

    def _tensors(self, host: np.ndarray) -> Any:
        table = host.copy()
        for row in range(len(table)):
            own = self._blocks[self._blocks["tensor"] == row]
            numel = int((own["start"] + own["length"]).max()) if own.size else 0
            for column in ("grad", "param", "momentum"):
                address = int(table[column][row])
                if address and numel:
                    size = 2 if column == "grad" and table["grad_dtype"][row] else 4
                    elements = (ctypes.c_uint8 * (size * numel)).from_address(address)
                    table[column][row] = address_of(self._part(np.frombuffer(elements, np.uint8)))
        return self._table(table)
