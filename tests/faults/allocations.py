"""Lets allocations of ocomm's extension fail, in a process that was started with ``library()`` in LD_PRELOAD."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("allocations.c")


def library(folder: Path) -> Path | None:
    """Compiles what is preloaded, and returns its path; None if there is no gcc."""
    compiler, path = shutil.which("gcc"), folder / "allocations.so"
    if compiler is None:
        return None
    # Without the builtins gcc would take a call here for one of the real function.
    flags = ["-O1", "-fno-builtin", "-Wall", "-Wextra", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", path, SOURCE, "-ldl"], check=True)
    return path


@dataclass(frozen=True)
class Allocation:
    """A call that allocates: its place in the extension, and its names."""

    offset: int
    name: str

    def __str__(self) -> str:
        return self.name


class Allocations:
    """The allocations of ``ocomm._native`` in this process. Raises RuntimeError if the library was not preloaded."""

    def __init__(self) -> None:
        from ocomm import _native

        try:
            self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
            self._library.faults_begin.argtypes = [ctypes.c_size_t] * 3 + [ctypes.c_int] * 2
        except (KeyError, OSError, AttributeError) as error:
            raise RuntimeError(f"allocations.so is not preloaded ({error!r})") from None
        self._low, self._high = _code_of(_native.__file__)

    def begin(self, fault: tuple[Allocation, int, bool] | None = None) -> None:
        """Counts anew; of ``fault`` = (allocation, number, lasting) that call fails, and with lasting all later
        ones."""
        allocation, number, lasting = fault or (Allocation(0, ""), 0, False)
        self._library.faults_begin(self._low, self._high, allocation.offset, number, lasting)

    def counts(self) -> Mapping[Allocation, int]:
        """Returns how often each has been called since ``begin``."""
        found: dict[Allocation, int] = {}
        offset, calls = ctypes.c_size_t(), ctypes.c_int()
        function, inside = ctypes.c_char_p(), ctypes.c_char_p()
        given = [ctypes.byref(x) for x in (offset, function, inside, calls)]
        while self._library.faults_site(len(found), *given):
            assert function.value is not None and inside.value is not None
            name = f"{function.value.decode()} near {inside.value.decode()} (+0x{offset.value:x})"
            found[Allocation(offset.value, name)] = calls.value
        return found

    @property
    def has_failed(self) -> bool:
        """True once the fault has happened."""
        return bool(self._library.faults_have_failed())


def _code_of(path: str) -> tuple[int, int]:
    """Returns where a library's code is in this process."""
    with open("/proc/self/maps") as maps:
        rows = [line.split() for line in maps if line.rstrip().endswith(path)]
    low = min(int(row[0].split("-")[0], 16) for row in rows)
    high = max(int(row[0].split("-")[1], 16) for row in rows)
    return low, high
