"""How the options of an optimizer are defined: once, in a frozen dataclass beside its core.

A field is an ``option``: a type, the default of the option, its documentation, whether all ranks must choose the same,
and whether a saved state goes on only with the same. ``__post_init__`` checks the values. Frontends repeat names, types
and defaults in their signatures, where editors look for them, and show the documentation with ``documented``;
``tests/architecture/test_options.py`` holds both equal to the definitions.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

from ocomm.errors import SettingsError

O = TypeVar("O", bound="Options")  # noqa: E741
F = TypeVar("F", bound=Callable[..., Any])


def option(default: Any, text: str, *, agree: bool = True, fixed: bool = False) -> Any:
    """A field of an ``Options`` class.

    Args:
        default: Its value where the user does not choose.
        text: What it means, in sentences, for the docstrings of all frontends.
        agree: Do all ranks have to choose the same? Such options are also saved.
        fixed: Does a saved state go on only with the same? With another value the run would be another.
    """
    return field(default=default, metadata={"text": " ".join(text.split()), "agree": agree, "fixed": fixed})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The base of all definitions. Its subclasses raise SettingsError or InvalidRequestError for impossible values."""

    @classmethod
    def of(cls: type[O], arguments: Mapping[str, Any]) -> O:
        """Those of ``arguments``, a function's ``locals()`` say, that are options; the others have their defaults."""
        return cls(**{f.name: arguments[f.name] for f in fields(cls) if f.name in arguments})

    @classmethod
    def texts(cls) -> dict[str, str]:
        """The documentation of each option."""
        return {f.name: f.metadata["text"] for f in fields(cls)}

    @classmethod
    def fixed(cls) -> list[str]:
        """The names of options that a saved state must share."""
        return [f.name for f in fields(cls) if f.metadata["fixed"]]

    def agreed(self) -> dict[str, Any]:
        """The options that all ranks must choose alike, as values of JSON, which are compared and saved."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.metadata["agree"]}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def require_seed(seed: int) -> None:
    """Raises SettingsError unless ``seed`` is in [0, 2^64)."""
    if not 0 <= seed < 1 << 64:
        raise SettingsError(f"seed must be in [0, 2^64), got {seed}")


def documented(texts: Mapping[str, str], *definitions: type[Options]) -> Callable[[F], F]:
    """A decorator that replaces ``{arguments}`` in a docstring by entries of ``Args:``, one per parameter.

    A parameter that has an entry in the docstring itself keeps that one.

    Args:
        texts: The documentation of parameters that are no options, by name.
        definitions: Where the options are defined.
    """
    found = {**texts, **{name: text for definition in definitions for name, text in definition.texts().items()}}

    def decorate(shown: F) -> F:
        if shown.__doc__ is None:  # python -OO
            return shown
        doc = inspect.cleandoc(shown.__doc__)
        own = set(re.findall(r"^    (\w+): ", doc, re.MULTILINE))
        names = [name for name in inspect.signature(shown).parameters if name not in own]
        entries = [
            textwrap.fill(
                f"{name}: {found[name]}",
                118,
                initial_indent="    ",
                subsequent_indent="        ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            for name in names
        ]
        shown.__doc__ = doc.replace("    {arguments}", "\n".join(entries))
        return shown

    return decorate
