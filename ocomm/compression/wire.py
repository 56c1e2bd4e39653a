"""What every message of a fixed-layout exchange starts with; the geometry of packed payloads is in ``layout``."""

from __future__ import annotations

import numpy as np

from ocomm.kernels.base import RUN as RUN

#: What precedes the payload of every message of a fixed-layout exchange; the numbers are compared on arrival.
#: ``signature`` names layout, segment and compressor; ``hyper`` digests lr, betas and weight decay.
HEADER = np.dtype(
    [
        ("magic", np.uint32),
        ("rank", np.uint32),
        ("step", np.int64),
        ("signature", np.uint64),
        ("hyper", np.uint64),
        ("flags", np.uint32),
        ("attempt", np.uint32),  # 0, then 1 for a step that is done again without overlap
        ("announcement", np.int64),  # the coordinator's decision for the next step; 0 for none
        ("tensors", np.uint32),  # presence bits that follow, one per tensor: "has a gradient on this rank"
        ("reserved", np.uint32),
        ("replica", np.uint64),  # in a vote: checksum of the parameters that this step compares
        # In a vote: the step's learning rate, and the sum of squares of this rank's gradients.
        ("lr", np.float64),
        ("squares", np.float64),
    ],
    align=True,
)
MAGIC = 0x4F434F4D
assert HEADER.itemsize == 80
#: What the ranks must say alike.
COMPARED = ("magic", "step", "signature", "hyper", "attempt", "tensors", "replica")
#: Instead of MAGIC: ranks ``rank`` and ``reserved`` differ in COMPARED[``tensors``], where the one says ``signature``
#: and the other ``hyper``. So a difference reaches ranks which see neither header.
DISAGREEMENT = 0x4F434F44


def header_nbytes(tensors: int) -> int:
    """Bytes of a header with presence bits for ``tensors`` tensors; a multiple of 8."""
    return HEADER.itemsize + (tensors + 63) // 64 * 8
