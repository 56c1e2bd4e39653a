"""Reads JSON that another process has written: values of the expected types, or a ValueError that says what is not."""

from __future__ import annotations

import json
import reprlib
from typing import Any


def parse(data: bytes | bytearray | str) -> Any:
    """Returns the value of a text of JSON. Raises ValueError if it is none, or is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def expect(value: Any, *kinds: type) -> Any:
    """Returns ``value``. Raises ValueError if it has none of these types; a bool is no int."""
    if type(value) not in kinds:
        raise ValueError(f"{reprlib.repr(value)} where {' or '.join(kind.__name__ for kind in kinds)} is expected")
    return value


def fields(value: Any, *names: str) -> list[Any]:
    """Returns what an object has under ``names``, in this order. Raises ValueError if it is no object, or lacks one."""
    missing = [name for name in names if name not in expect(value, dict)]
    if missing:
        raise ValueError(f"an object without {missing[0]!r}")
    return [value[name] for name in names]


def ranks(value: Any, size: int) -> tuple[int, ...]:
    """Returns a list of ranks as a tuple. Raises ValueError for anything else."""
    return tuple(rank(item, size) for item in expect(value, list))


def rank(value: Any, size: int) -> int:
    """Returns a number of one of ``size`` ranks. Raises ValueError for anything else."""
    if not 0 <= expect(value, int) < size:
        raise ValueError(f"rank {reprlib.repr(value)} of {size}")
    return int(value)
