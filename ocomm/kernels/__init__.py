"""Loops over flat buffers, per device. ``reference`` in plain NumPy defines the results; ``cpu_kernels()`` are the same
in C.
"""

from __future__ import annotations

from functools import cache

from ocomm.kernels.base import BLOCK, NOISE, OWNERS, TENSOR, Kernels
from ocomm.kernels.reference import ReferenceKernels

__all__ = ["BLOCK", "NOISE", "OWNERS", "TENSOR", "Kernels", "cpu_kernels", "reference"]

reference = ReferenceKernels()


@cache
def cpu_kernels() -> Kernels:
    """Returns the C loops. Raises ImportError if the extension was not built."""
    # Imported on demand, so that the reference and the tables also work without the extension.
    from ocomm.kernels.cpu import CpuKernels

    return CpuKernels()
