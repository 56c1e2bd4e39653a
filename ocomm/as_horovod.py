"""Starts a program in which ``import horovod.torch`` finds ocomm: what ``ocommrun --as-horovod`` starts on each rank.

    python -m ocomm.as_horovod python train.py --epochs 5

Processes that the program starts have the names, too, such as workers of data loaders. Nothing called horovod is
installed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

#: A module of Horovod, and the module in its place; submodules correspond, too.
_PLACES = {
    "horovod": "ocomm",
    "horovod.common": "ocomm",
    "horovod.common.exceptions": "ocomm.errors",
    "horovod.common.process_sets": "ocomm",
    "horovod.common.util": "ocomm",
    "horovod.keras": "ocomm_tf.keras",
    "horovod.runner": "ocomm",
    "horovod.tensorflow": "ocomm_tf",
    "horovod.torch": "ocomm_torch",
    "horovod.torch.elastic.sampler": "ocomm_torch.elastic",
    "horovod.torch.elastic.state": "ocomm_torch.elastic",
}

#: A folder with a package called horovod, which calls ``install``.
_NAMES = str(Path(__file__).with_name("horovod_names"))
#: The version whose names and parameters ocomm has (tests/architecture/parity_table.py): scripts ask for it.
_VERSION = "0.28.1"


def place_of(name: str) -> str | None:
    """Returns the module that stands for ``name``; None if ``name`` is no module of Horovod."""
    for horovod in sorted(_PLACES, key=len, reverse=True):
        if name == horovod or name.startswith(horovod + "."):
            return _PLACES[horovod] + name[len(horovod) :]
    return None


def _is_there(place: str) -> bool:
    try:
        return importlib.util.find_spec(place) is not None
    except ModuleNotFoundError:  # what should have it is no package
        return False


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes before all other finders, so that it also wins over an installed Horovod."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        place = place_of(name)
        if place is None:
            return None
        if not _is_there(place):
            raise ModuleNotFoundError(f"{name} would be {place}, which ocomm does not have", name=name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        # A module of its own, so that the real one keeps its own name, spec and loader.
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        place = place_of(module.__name__)
        assert place is not None
        real = importlib.import_module(place)
        module.__dict__.update({name: value for name, value in vars(real).items() if not name.startswith("__")})
        module.__dict__["__getattr__"] = lambda name: getattr(real, name)
        module.__file__, module.__path__ = real.__file__, []
        if hasattr(real, "__version__"):
            module.__version__ = _VERSION  # type: ignore[attr-defined]


def install() -> None:
    """Makes this process import ocomm under Horovod's names from now on. The processes that it starts do not."""
    if not is_installed():
        sys.meta_path.insert(0, _Finder())


def is_installed() -> bool:
    """Returns True if this process imports ocomm under Horovod's names."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def main(arguments: list[str]) -> None:
    """Becomes the program that ``arguments`` name."""
    if not arguments:
        raise SystemExit("usage: python -m ocomm.as_horovod program [arguments]")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_NAMES, os.environ.get("PYTHONPATH"))))
    try:
        os.execvp(arguments[0], arguments)
    except OSError as error:
        raise SystemExit(f"ocomm.as_horovod: {arguments[0]}: {error.strerror}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
