"""Starts a program whose processes may not read each other's memory, as a container's seccomp profile can forbid it.

python without_reading.py PROGRAM ARGUMENT...
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

#: Numbers of process_vm_readv and process_vm_writev.
CALLS = {"x86_64": (310, 311), "aarch64": (270, 271)}[platform.machine()]
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF: a word, which is the call's number at 0; a jump; the end
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000 | errno.EPERM
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # prctl


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def main(*command: str) -> None:
    steps = [
        (_LOAD, 0, 0, 0),
        (_IF_EQUAL, 2, 0, CALLS[0]),
        (_IF_EQUAL, 1, 0, CALLS[1]),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERROR),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    library = ctypes.CDLL(None)
    assert library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    assert library.prctl(_SECCOMP, _FILTER, ctypes.byref(program)) == 0
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
