"""Definitions of an optimizer's options: each once, in a frozen dataclass beside its core.

A field is an ``option``: a type, the default of the option, its documentation, whether all ranks must choose the same
value, and whether a saved state needs the same value. ``__post_init__`` checks the values. ``ocomm.faces`` makes the
frontends' signatures and docstrings of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

from ocomm.errors import SettingsError

O = TypeVar("O", bound="Options")  # noqa: E741


def option(default: Any, text: str, *, agree: bool = True, fixed: bool = False) -> Any:
    """Returns a field of an ``Options`` class.

    Args:
        default: The value if the user does not choose one.
        text: What it means, in sentences, for the docstrings of all frontends.
        agree: True if all ranks must choose the same value. Such options are also saved.
        fixed: True if a saved state can only be loaded with the same value, because another would be another run.
    """
    return field(default=default, metadata={"text": " ".join(text.split()), "agree": agree, "fixed": fixed})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The base class of all definitions. Subclasses raise SettingsError or InvalidRequestError for impossible
    values.
    """

    @classmethod
    def of(cls: type[O], arguments: Mapping[str, Any]) -> O:
        """Takes the options from ``arguments``, such as a function's ``locals()``; those that are missing have their
        defaults.
        """
        return cls(**{f.name: arguments[f.name] for f in fields(cls) if f.name in arguments})

    @classmethod
    def texts(cls) -> dict[str, str]:
        """Returns the documentation of each option."""
        return {f.name: f.metadata["text"] for f in fields(cls)}

    @classmethod
    def fixed(cls) -> list[str]:
        """Returns the names of options that must be the same when a saved state is loaded."""
        return [f.name for f in fields(cls) if f.metadata["fixed"]]

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Returns the defaults of the options that must be equal on all ranks, which a saved state of a release
        without them was made with.
        """
        return {f.name: _plain(f.default) for f in fields(cls) if f.metadata["agree"]}

    @classmethod
    def following(cls, total_steps: int | None) -> dict[str, Any]:
        """Returns the options that ``total_steps`` sets where the user has not chosen them, with their values."""
        return {}

    def agreed(self) -> dict[str, Any]:
        """Returns the options that must be equal on all ranks, as JSON values, which are compared and saved."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.metadata["agree"]}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def require_seed(seed: int) -> None:
    """Raises SettingsError unless ``seed`` is in [0, 2^64)."""
    if not 0 <= seed < 1 << 64:
        raise SettingsError(f"seed must be in [0, 2^64), got {seed}")
