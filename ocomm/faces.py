"""What a user sees of an optimizer, made from the definitions of its options: its signature and its docstring.

Editors and type checkers read the same signatures in ``ocomm_torch/__init__.pyi`` and ``ocomm_tf/keras/__init__.pyi``,
which ``tools/stubs.py`` writes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from inspect import Parameter
from typing import Any, TypeVar

from ocomm.docstrings import documented
from ocomm.optim.options import Options

F = TypeVar("F", bound=Callable[..., Any])


def face(
    definitions: Sequence[type[Options]], sections: str, without: Collection[str] = (), **texts: str
) -> Callable[[F], F]:
    """Returns a decorator for a function, or a class, that takes options as ``**arguments``.

    Its signature gets an argument by keyword for each option, and its docstring what each argument means. A call with
    another argument raises TypeError.

    Args:
        definitions: The classes of the options.
        sections: What follows the docstring; ``{arguments}`` stands for the entries of arguments.
        without: Options that it has not.
        texts: The documentation of other arguments by name.
    """
    found = {name: text for definition in definitions for name, text in definition.texts().items()}

    def decorate(shown: F) -> F:
        called: Any = shown.__init__ if isinstance(shown, type) else shown  # type: ignore[misc]
        own = _own_parameters(shown)
        options = [
            Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for definition in definitions
            for f in fields(definition)
            if f.name not in without and f.name not in own
        ]
        by_keyword = [p for p in own.values() if p.kind is Parameter.KEYWORD_ONLY]
        first = [p for p in own.values() if p not in by_keyword]
        signature = inspect.signature(called).replace(parameters=[*first, *options, *by_keyword])

        @functools.wraps(called)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{shown.__qualname__}() {error}") from None
            return called(*args, **kwargs)

        made: Any = checked
        made.__signature__ = signature
        if isinstance(shown, type):
            made = shown
            made.__init__ = checked
            made.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        if made.__doc__ is not None:  # python -OO
            made.__doc__ = f"{inspect.cleandoc(made.__doc__)}\n\n{sections}"
        return documented({**found, **texts})(made)

    return decorate


def _own_parameters(shown: Any) -> dict[str, Parameter]:
    """Returns the parameters but options, by name: of a class, those of each ``__init__`` to which options are passed
    on.
    """
    if not isinstance(shown, type):
        calls = [shown]
    else:
        calls = [vars(kind)["__init__"] for kind in shown.__mro__ if "__init__" in vars(kind)]
    found: dict[str, Parameter] = {}
    for call in calls:
        parameters = inspect.signature(call).parameters.values()
        found = {**{p.name: p for p in parameters if p.kind is not Parameter.VAR_KEYWORD}, **found}
        if all(p.kind is not Parameter.VAR_KEYWORD for p in parameters):
            break
    return found
