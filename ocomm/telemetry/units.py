"""Numbers as people say them."""

from __future__ import annotations


def amount(nbytes: float) -> str:
    """Returns a number of bytes as people say it, such as "13.8 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 999.5 * size else f"{nbytes / size:.0f} {unit}"
    return f"{nbytes:.0f} bytes"
