"""What is public says in its docstring what it takes and what it returns."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PACKAGES = {"ocomm": "numpy", "ocomm_torch": "torch", "ocomm_tf": "tensorflow", "ocomm_tf.keras": "keras"}


def public(package: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Our functions and classes in a package, but errors, by name."""
    pytest.importorskip(PACKAGES[package])
    module = importlib.import_module(package)
    for name in module.__all__:
        found = getattr(module, name)
        is_error = isinstance(found, type) and issubclass(found, BaseException)
        is_ours = getattr(found, "__module__", "").startswith("ocomm")
        if is_ours and not is_error and (inspect.isfunction(found) or inspect.isclass(found)):
            yield name, found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_argument_and_result_has_words(package: str) -> None:
    lacking = []
    for name, found in public(package):
        doc, signature = inspect.getdoc(found) or "", inspect.signature(found)
        if signature.parameters and "Args:" not in doc:
            lacking.append(f"{name}: Args")
        returns = None if isinstance(found, type) else signature.return_annotation
        if returns not in (None, "None", inspect.Signature.empty) and "Returns" not in doc:
            lacking.append(f"{name}: Returns")
        if "{arguments}" in doc:
            lacking.append(f"{name}: the decorator that completes it")
    assert not lacking
