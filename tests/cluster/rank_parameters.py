"""A rank that writes the values with which its Open MPI runs, as MPI_T tells them.

python rank_parameters.py FILE NAME...
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import ocomm
from ocomm.transport import mpi


def values(names: list[str]) -> dict[str, int | str]:
    """Control variables of the library. Strings have more than one character, which numbers are one of."""
    library = mpi._loaded_library(mpi._load())
    provided, found = ctypes.c_int(), {}
    assert library.MPI_T_init_thread(0, ctypes.byref(provided)) == 0
    for name in names:
        index, handle, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        assert library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)) == 0, name
        assert library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)) == 0, name
        buffer = ctypes.create_string_buffer(max(8, count.value))
        assert library.MPI_T_cvar_read(handle, buffer) == 0, name
        found[name] = buffer.value.decode() if count.value > 1 else int.from_bytes(buffer.raw[:8], "little")
    return found


def main(path: str, *names: str) -> None:
    ocomm.init()
    if ocomm.rank() == 1:
        Path(path).write_text(json.dumps(values(list(names))))
    ocomm.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
