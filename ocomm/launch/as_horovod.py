"""Runs a Python program in which ``import horovod.torch`` finds ocomm: what ``ocommrun --as-horovod`` starts.

    python -m ocomm.launch.as_horovod train.py --epochs 5
    python -m ocomm.launch.as_horovod -m package.train

Only this process sees the names; nothing called horovod is installed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

#: A module of Horovod, and the module in its place; submodules correspond, too.
_PLACES = {
    "horovod": "ocomm",
    "horovod.torch": "ocomm_torch",
    "horovod.tensorflow": "ocomm_tf",
    "horovod.keras": "ocomm_tf.keras",
}


def place_of(name: str) -> str | None:
    """Returns the module that stands for ``name``; None if ``name`` is no module of Horovod."""
    for horovod in sorted(_PLACES, key=len, reverse=True):
        if name == horovod or name.startswith(horovod + "."):
            return _PLACES[horovod] + name[len(horovod) :]
    return None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes before all other finders, so that it also wins over an installed Horovod."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        place = place_of(name)
        if place is None:
            return None
        if importlib.util.find_spec(place) is None:
            raise ModuleNotFoundError(f"{name} would be {place}, which ocomm does not have", name=name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        # A module of its own, so that the real one keeps its own name, spec and loader.
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        place = place_of(module.__name__)
        assert place is not None
        real = importlib.import_module(place)
        module.__dict__.update({k: v for k, v in vars(real).items() if not k.startswith("__") or k == "__version__"})
        module.__dict__["__getattr__"] = lambda name: getattr(real, name)
        module.__path__ = []


def install() -> None:
    """Makes this process import ocomm under Horovod's names from now on."""
    if not is_installed():
        sys.meta_path.insert(0, _Finder())


def is_installed() -> bool:
    """Returns True if this process imports ocomm under Horovod's names."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def main(arguments: Sequence[str]) -> None:
    """Runs ``script.py ...`` or ``-m module ...`` as the main program."""
    if not arguments:
        raise SystemExit("usage: python -m ocomm.launch.as_horovod (script.py | -m module) [arguments]")
    install()
    if arguments[0] == "-m" and len(arguments) > 1:
        sys.argv = list(arguments[1:])
        sys.path.insert(0, "")
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    # ``python script.py`` does this, too; runpy.run_path does not change the path.
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    # This module, run as the main program, is another one than the module that others import.
    importlib.import_module("ocomm.launch.as_horovod").main(sys.argv[1:])
