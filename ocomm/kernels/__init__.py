"""Loops over flat buffers, per device: ``reference`` in plain NumPy is the law, ``cpu_kernels()`` the same in C."""

from __future__ import annotations

from functools import cache

from ocomm.kernels.base import BLOCK, NOISE, OWNERS, TENSOR, Kernels
from ocomm.kernels.reference import ReferenceKernels

__all__ = ["BLOCK", "NOISE", "OWNERS", "TENSOR", "Kernels", "cpu_kernels", "reference"]

reference = ReferenceKernels()


@cache
def cpu_kernels() -> Kernels:
    """The C loops. ImportError if the extension was not built."""
    # Imported on demand, so that the reference and the tables also work in a tree without the extension.
    from ocomm.kernels.cpu import CpuKernels

    return CpuKernels()
