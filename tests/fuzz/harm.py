"""Bytes that somebody has damaged, for Hypothesis."""

from __future__ import annotations

import os
import struct

from hypothesis import settings
from hypothesis import strategies as st


def examples(number: int) -> settings:
    """So many examples; ``make fuzz`` takes many times as many."""
    return settings(max_examples=number * int(os.environ.get("FUZZ_TIMES", "1")))


#: Numbers with which sizes and counts overflow.
_NUMBERS = [0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]


@st.composite
def harmed(draw: st.DrawFn, original: bytes) -> bytes:
    """``original`` with a few flipped bits, other numbers, missing, added or exchanged bytes; or other bytes at all."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["flip", "cut", "number", "drop", "add", "move", "other"])):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at:]
            case "number":
                size = draw(st.sampled_from([1, 4, 8]))
                data[at : at + size] = struct.pack("<Q", draw(st.sampled_from(_NUMBERS)))[:size]
            case "drop":
                del data[at : at + draw(st.integers(1, 9))]
            case "add":
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            case "move":
                data[at : at + 8] = data[: len(data[at : at + 8])]
            case "other":
                data[:] = draw(st.binary(max_size=64))
    return bytes(data)


#: Values of JSON, of which an object may have names that ocomm uses.
NAMES = [
    "word", "rank", "host", "generation", "number", "job", "ranks", "why", "reports", "steps", "ended", "others",
    "counts", "hosts", "version", "process_sets", "settings_error", "launch_error", "error", "0", "1",
]  # fmt: skip
WORDS = ["here", "commit", "anew", "counters", "lost", "leave", "bye", "late", "hosts", "pmi", "watch", "up", "end"]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2, 7, 2**31, 2**63, 10**30])
    | st.floats()
    | st.sampled_from(WORDS)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=8,
)
