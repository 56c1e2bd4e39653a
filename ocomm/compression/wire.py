"""The header with which every message of a fixed-layout exchange starts; ``layout`` has the geometry of what
follows.
"""

from __future__ import annotations

import numpy as np

from ocomm.kernels.base import RUN as RUN

#: The header of every message of a fixed-layout exchange; its numbers are compared on arrival.
#: ``signature`` names layout, segment and compressor; ``hyper`` digests lr, betas and weight decay.
HEADER = np.dtype(
    [
        ("magic", np.uint32),
        ("rank", np.uint32),
        ("step", np.int64),
        ("signature", np.uint64),
        ("hyper", np.uint64),
        ("flags", np.uint32),
        ("attempt", np.uint32),  # 0; 1 for a step that is done again without overlap
        ("announcement", np.int64),  # the coordinator's decision for the next step; 0 for none
        ("tensors", np.uint32),  # presence bits that follow, one per tensor: "has a gradient on this rank"
        # In a vote: checksum of this rank's own gradients, 0 for none. In a DISAGREEMENT: a rank.
        ("gradients", np.uint32),
        ("replica", np.uint64),  # in a vote: checksum of the parameters that this step compares
        ("lr", np.float64),  # the learning rate of the first group, for messages
        ("squares", np.float64),  # in a vote: the sum of squares of this rank's gradients
    ],
    align=True,
)
MAGIC = 0x4F434F4D
assert HEADER.itemsize == 80
#: The fields of a header that must be equal on all ranks.
COMPARED = ("magic", "step", "signature", "hyper", "attempt", "tensors", "replica")
#: Stands in the place of MAGIC in a header that reports a difference: ranks ``rank`` and ``gradients`` differ in the
#: field COMPARED[``tensors``], in which the first has the value ``signature`` and the second ``hyper``. It reaches
#: ranks that see neither header.
DISAGREEMENT = 0x4F434F44


def header_nbytes(tensors: int) -> int:
    """Returns the bytes of a header with presence bits for ``tensors`` tensors, a multiple of 8."""
    return HEADER.itemsize + (tensors + 63) // 64 * 8
