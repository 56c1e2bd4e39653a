"""Writes seeds for the fuzz target ``kernels``: messages as the kernels compress them.

python -m tests.fuzz.seeds FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from ocomm.compression.codecs import OF_BITS, SCALED_SIGNS, SIGNS
from ocomm.kernels.base import BLOCK, TENSOR
from ocomm.kernels.reference import ReferenceKernels

#: The numbers of loops, and of block lengths, in kernels.c.
SCALED = {"average": 0, "unpack": 1, "apply": 2, "apply_update": 3, "momentum": 4, "finite_scales": 5, "lamb": 12}
UNSCALED = {"average_quantized": 6, "apply_signs": 7}
CODED = {"average_codes": 8, "unpack_codes": 9}
LENGTHS = {3: 31, 9: 129, 13: 1000}
RANKS = 3


def message(bits: int, scaled: bool, length: int, seed: int) -> bytes:
    """Returns one block of random values as a rank would send it: scales, then elements."""
    codec = OF_BITS[bits] if bits > 1 else SCALED_SIGNS if scaled else SIGNS
    lengths = np.array([length], np.int32)
    block = np.zeros(1, BLOCK)
    block["length"], block["bits"] = length, 4 * codec.scales(lengths)[0]
    values = np.random.default_rng(seed).standard_normal(length).astype(np.float32)
    zeros, packed = np.zeros_like(values), np.zeros(int(codec.payload_nbytes(lengths)[0]), np.uint8)
    kernels = ReferenceKernels()
    if bits > 1:
        tensors = np.zeros(1, TENSOR)
        tensors["grad"] = values.ctypes.data
        kernels.compress_codes(block, tensors, zeros, zeros.copy(), bits, packed)
        return packed.tobytes()
    whole = np.zeros(packed.size + 4, np.uint8)
    block["bits"] = 4
    kernels.compress(block, values, zeros, zeros.copy(), None, "l1", whole)
    return whole.tobytes() if scaled else whole[4:].tobytes()


def seeds() -> dict[str, bytes]:
    """Returns the inputs by name: the choices that kernels.c reads first, and then the messages."""
    found = {}
    cases = [(name, loop, 1, True) for name, loop in SCALED.items()]
    cases += [(name, loop, 1, False) for name, loop in UNSCALED.items()]
    cases += [(f"{name}{bits}", loop, bits, True) for name, loop in CODED.items() for bits in OF_BITS]
    for name, loop, bits, scaled in cases:
        for number, length in LENGTHS.items():
            coded = [[4, 8, 16].index(bits)] if bits > 1 else []
            head = bytes([loop, 0, RANKS - 1, *coded, 0, number, 0, 0])
            found[f"{name}-{length}"] = head + b"".join(message(bits, scaled, length, seed) for seed in range(RANKS))
    return found


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in seeds().items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
