"""How the elements of a block travel: bits per element, and how many elements share a scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ocomm.kernels.base import GROUP

#: More elements than any block has, so that all of a block share a scale.
_WHOLE_BLOCK = 1 << 31


@dataclass(frozen=True, slots=True)
class Codec:
    """A wire format for blocks: the scales of a block, if it has any, and ``bits`` for each element.

    ``label`` names the format in the signature of every message. ``group`` elements, counted from the start of the
    block, share a float32 scale; None: there are no scales.
    """

    label: str
    bits: int
    group: int | None

    @property
    def keeps_errors(self) -> bool:
        """True if what rounding loses is kept and added in the next exchange."""
        return self.group is not None

    def scales(self, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
        """Returns the number of scales of blocks of ``lengths`` elements."""
        wide = lengths.astype(np.int64)
        return np.zeros_like(wide) if self.group is None else -(-wide // self.group)

    def code_nbytes(self, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
        """Returns the bytes of the elements of blocks, without scales."""
        return (lengths.astype(np.int64) * self.bits + 7) // 8

    def payload_nbytes(self, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
        """Returns the bytes on the wire of blocks."""
        return self.code_nbytes(lengths) + 4 * self.scales(lengths)


#: 1 bit per element, without a scale and with one for each block.
SIGNS = Codec("signs", 1, None)
SCALED_SIGNS = Codec("scaled signs", 1, _WHOLE_BLOCK)
#: Whole numbers with a scale for each ``GROUP`` elements.
INT8 = Codec("int8", 8, GROUP)
INT4 = Codec("int4", 4, GROUP)
BFLOAT16 = Codec("bfloat16", 16, None)
#: Dense values as they are, in blocks that have an owner.
FLOAT32 = Codec("float32", 32, None)
#: The format of dense values in fewer than 32 bits, by the number of bits.
OF_BITS = {codec.bits: codec for codec in (BFLOAT16, INT8, INT4)}
