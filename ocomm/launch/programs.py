"""The program that ranks run: whether it is there, and what a Python's command line consists of."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping

from ocomm.errors import LaunchError

#: A word of flags of Python's, the last of which has a value, in this word or the next one.
_WITH_VALUE = re.compile("-([^-cmWX]*)([cmWX])(.*)", re.DOTALL)
#: Flags of Python's in words that have their value in the next one.
_LONG_WITH_VALUE = ("--check-hash-based-pycs",)


def require_program(command: tuple[str, ...], environ: Mapping[str, str]) -> None:
    if command and shutil.which(command[0], path=environ.get("PATH")) is None:
        if os.path.isfile(command[0]):
            raise LaunchError(
                f"{command[0]!r} is a file, but no program: name its interpreter, as in ocommrun -np 2 python "
                "train.py, or make it executable and give its path, as in ./train.sh."
            )
        hint = ""
        if re.fullmatch(r"[A-Za-z_]\w*=.*", command[0], re.DOTALL):
            hint = f" Variables stand before ocommrun, or behind env, as in env {command[0]} python train.py."
        elif re.fullmatch(r"[\w.-]+:[0-9]+,?", command[0]):
            hint = " If it is a host: the hosts of -H are one word, without spaces, as in -H worker-0:2,worker-1:2."
        raise LaunchError(f"there is no program {command[0]!r} on PATH to start.{hint}")


def require_script(command: tuple[str, ...]) -> None:
    """Raises LaunchError if the command runs a Python script that is not there."""
    program = _program(command) if is_python(command) else ()
    if not program or program[0] in ("-m", "-c", "-"):
        return
    if not os.path.exists(program[0]):
        raise LaunchError(f"there is no file {program[0]!r} in {os.getcwd()} for {command[0]} to run.")


def is_python(command: tuple[str, ...]) -> bool:
    """Returns True if the command's program is a Python, by its name."""
    return bool(command) and os.path.basename(command[0]).startswith("python")


def _program(command: tuple[str, ...]) -> tuple[str, ...]:
    """Returns what follows the interpreter and its flags in a command of Python's; empty if there is nothing.

    It begins with a script, with "-", or with "-m" or "-c", also if these stand in one word with other flags, as in
    -um.
    """
    left = list(command[1:])
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        found = _WITH_VALUE.fullmatch(word)
        if found is None:
            if word in _LONG_WITH_VALUE:
                del left[:1]
            continue
        left[:0] = [f"-{found[2]}", found[3]] if found[3] else [f"-{found[2]}"]
        if found[2] in "mc":
            break
        del left[:2]
    return tuple(left)


def with_horovod_names(command: tuple[str, ...]) -> tuple[str, ...]:
    """Returns ``command`` with ``horovod`` standing for ocomm: python -m ocomm.as_horovod python train.py ..."""
    python = command[0] if is_python(command) else sys.executable
    return (python, "-m", "ocomm.as_horovod", *command) if command else ()
