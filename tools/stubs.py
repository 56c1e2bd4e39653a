"""Writes the stubs in which editors and type checkers find the options of optimizers: ``python tools/stubs.py``.

A stub has what the package's ``__init__.py`` imports, and of each function with a face (``ocomm.faces``) the signature.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEAD = '''"""Made by tools/stubs.py."""

# mypy: disable-error-code="assignment, no-redef"

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal
'''
#: By package: further lines that its signatures need.
NEEDED = {
    "ocomm_torch": "\nimport torch\nfrom torch.distributed.device_mesh import DeviceMesh\n",
    "ocomm_tf.keras": "\nfrom ocomm.operations import ProcessSet\n",
}


def path_of(package: str) -> Path:
    return ROOT / package.replace(".", "/") / "__init__.pyi"


def stub(package: str) -> str:
    """Returns the text of a package's stub."""
    module = importlib.import_module(package)
    source = ast.parse(path_of(package).with_suffix(".py").read_text())
    faces: dict[str, Callable[..., Any]] = {}
    lines = []
    for node in source.body:
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            name = alias.asname or alias.name
            found = getattr(module, name, None)
            imported = alias.name if alias.name == "*" else f"{alias.name} as {name}"
            if name.startswith("Distributed") and hasattr(found, "__signature__"):
                faces[name] = found
            elif alias.name != "__all__" and not name.startswith("_"):
                lines.append(
                    f"from {node.module} import {imported}"
                    if isinstance(node, ast.ImportFrom)
                    else f"import {imported}"
                )
    functions = [function(name, found) for name, found in faces.items()]
    return HEAD + NEEDED[package] + "\n" + "\n".join([*lines, "", *functions]) + "\n"


def function(name: str, found: Callable[..., Any]) -> str:
    """Returns the stub of a function, or of a class that stands for one."""
    signature = inspect.signature(found)
    parameters, is_by_keyword = [], False
    for p in signature.parameters.values():
        if p.kind is Parameter.KEYWORD_ONLY and not is_by_keyword:
            is_by_keyword = True
            parameters.append("*")
        default = "" if p.default is Parameter.empty else f" = {_literal(p.default)}"
        parameters.append(f"{p.name}: {p.annotation}{default}")
    returned = found.__name__ if isinstance(found, type) else "Any"
    return "\n".join([f"def {name}(", *(f"    {p}," for p in parameters), f") -> {returned}: ..."])


def _literal(value: Any) -> str:
    is_plain = value is None or type(value) in (bool, int, float, str, tuple)
    return repr(value) if is_plain else "..."


def main() -> int:
    for package in NEEDED:
        path_of(package).write_text(stub(package))
    return 0


if __name__ == "__main__":
    sys.exit(main())
