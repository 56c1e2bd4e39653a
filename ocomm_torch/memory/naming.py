"""Names of an optimizer's parameters on the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ocomm.errors import InvalidRequestError


def pairs_of(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Returns ``named`` as a list. Raises InvalidRequestError, in Horovod's words, if it does not consist of pairs."""
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise InvalidRequestError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    return pairs


def names_of(parameters: Sequence[Tensor], named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """Returns a name for each parameter, by position if ``named`` is None. InvalidRequestError has Horovod's words."""
    if named is None:
        return {p: by_number(number) for number, p in enumerate(dict.fromkeys(parameters))}
    pairs = pairs_of(named)
    duplicates = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if duplicates:
        raise InvalidRequestError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    name_of = {p: name for name, p in pairs}
    unnamed = [p for p in parameters if p not in name_of]
    if unnamed:
        raise InvalidRequestError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            + ", ".join(str(id(p)) for p in unnamed)
            + f". The first is of shape {tuple(unnamed[0].shape)}."
        )
    return {p: name_of[p] for p in parameters}


def by_number(number: int) -> str:
    """Returns the name of a parameter without one, which ``number`` others had before it."""
    return f"allreduce.noname.{number}"


class NamesParameters(torch.optim.Optimizer):
    """Mixin placed before the class of the user's optimizer; ``_names`` are the names of its parameters."""

    _names: dict[Tensor, str]
    #: The end of every name.
    _ending: str

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        """The user's names of the parameters, or ``allreduce.noname.<number>``. Scripts read this attribute of
        Horovod.
        """
        return {p: name.removesuffix(self._ending) for p, name in self._names.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group to the wrapped optimizer. All ranks add the same, in the same order, by which new
        parameters are named.
        """
        super().add_param_group(param_group)
        self._name_new()

    def _name_new(self) -> None:
        for p in (p for group in self.__dict__["param_groups"] for p in group["params"]):
            if p not in self._names:  # which has those of removed groups, too: no name is given twice
                self._names[p] = by_number(len(self._names)) + self._ending

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidRequestError(
            f"a distributed {type(self).__name__} cannot be copied or pickled: it holds connections to the other "
            "ranks. Save or send its state_dict(), and load it into a new one; of a scheduler that holds it, the "
            "scheduler's."
        )
