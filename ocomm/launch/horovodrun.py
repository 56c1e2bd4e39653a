"""``ocommrun --install-horovodrun``: a program of Horovod's name that is ocommrun."""

from __future__ import annotations

import contextlib
import os
from importlib import metadata
from pathlib import Path

from ocomm.errors import LaunchError


def install_horovodrun(python: str, record: Path | None = None) -> str:
    """Puts a ``horovodrun`` that is ocommrun beside ``python``, and returns a sentence about what it did.

    Args:
        python: The path of the interpreter.
        record: pip's list of ocomm's files, to which the new file is added, so that pip uninstall removes it. Paths in
            it are relative to the folder above its own. None if there is no list.

    Raises:
        LaunchError: Another program has that name, or the file cannot be written.
    """
    path = os.path.join(os.path.dirname(os.path.abspath(python)), "horovodrun")
    script = f"#!{python}\nimport sys\n\nfrom ocomm.launch.cli import main\n\nsys.exit(main())\n"
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            if "ocomm.launch" in file.read():
                return f"{path} is there already"
        raise LaunchError(f"{path} is another program, of a Horovod for instance; it stays as it is.")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}.") from None
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(script)
        os.chmod(path, 0o755)
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}.") from None
    try:
        if record is None:
            return f"{path} starts ocommrun. Remove it when you uninstall ocomm"
        with open(record, "a", encoding="utf-8") as file:
            file.write(f"{os.path.relpath(path, record.parent.parent)},,\n")
    except OSError as error:
        return (
            f"{path} starts ocommrun. Remove it when you uninstall ocomm: {record} cannot be written, {error.strerror}"
        )
    return f"{path} starts ocommrun, until pip uninstalls ocomm"


def installed_record() -> Path | None:
    """Returns pip's list of the files of the ocomm that runs; None if pip has not installed it."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.distribution("ocomm").files or ():
            if file.name == "RECORD":
                return Path(str(file.locate()))
    return None
