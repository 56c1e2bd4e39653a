"""Docstrings that are completed with what is said once: the options of optimizers, the arguments of collectives.

The completed text is what ``help()`` and the documentation's site show. Which arguments there are says the signature.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

#: The arguments that collectives share, by name. Tensors are arrays in ``ocomm``.
COLLECTIVE: Mapping[str, str] = {
    **dict.fromkeys(("array", "tensor"), "The input. Its shape and dtype are the same on all ranks."),
    **dict.fromkeys(("arrays", "tensors"), "The inputs. Their number, shapes and dtypes are the same on all ranks."),
    "average": "Horovod's older form of ``op``: True for Average, False for Sum. Give one of the two at most.",
    "name": "Matches the calls of different ranks; None to match them by their order.",
    "op": "The reduction: Average, Sum, Min, Max, Product or Adasum; Average if it is None.",
    "compression": "A class of ``Compression``.",
    "prescale_factor": "Multiplies every input.",
    "postscale_factor": "Multiplies the result.",
    "process_set": "The ranks that take part; all of them must make the call.",
    "root_rank": "The rank whose values all ranks get: a rank of the whole job, also if a process set is given.",
    "splits": "The number of rows for each rank; their sum is at most the length of the input. None for equal parts.",
    "obj": "Anything that can be pickled. Unpickling runs the code that its bytes name, so the ranks trust each other, "
    "and the network: MPI has neither keys nor encryption (docs/security.md).",
    **dict.fromkeys(
        ("device_dense", "device_sparse", "ignore_name_scope", "session"), "Accepted as in Horovod, and ignored."
    ),
}
#: Texts for arguments of some collectives, and for what they return.
GATHERED = (
    "At least one dimension. The length of the first may differ between ranks; dtype and other dimensions may not."
)
ROWS = "At least one dimension; a row is an element of the first one. The other dimensions are equal on all ranks."
IN_PLACE = "A writable NumPy array. Its shape and dtype are the same on all ranks."
AVERAGE_OR_SUM = "The reduction: Average or Sum."
SHARE = (
    "This rank's share of the rows: they are shared out evenly in rank order, and the first ranks get one row more if "
    "there is a remainder."
)
#: What a call returns that does not wait.
HANDLE = "A handle for ``poll`` and ``synchronize``. Until it is synchronized, inputs and outputs may not be used."
_WRONG = "InvalidRequestError: The arguments cannot be right."
_FAILED = "HorovodInternalError: The collective failed: MismatchError, StallError or PeerError."
_LATER = f"{_WRONG} That the collective failed is raised by ``synchronize``."


def documented(texts: Mapping[str, str]) -> Callable[[F], F]:
    """Returns a decorator that replaces ``{arguments}`` in a docstring by entries of ``Args:``, one per parameter.

    A parameter that has an entry in the docstring itself keeps that one.

    Args:
        texts: The documentation of parameters by name.
    """

    def decorate(shown: F) -> F:
        if shown.__doc__ is None:  # python -OO
            return shown
        doc = inspect.cleandoc(shown.__doc__)
        own = set(re.findall(r"^    (\w+): ", doc, re.MULTILINE))
        entries = [entry(f"{name}: {texts[name]}") for name in inspect.signature(shown).parameters if name not in own]
        shown.__doc__ = doc.replace("    {arguments}", "\n".join(entries))
        return shown

    return decorate


def collective(returns: str = "", **texts: str) -> Callable[[F], F]:
    """Returns a decorator that adds Args, Returns and Raises to the docstring of a collective's function.

    Args:
        returns: What it returns; "" for nothing, ``HANDLE`` for a call that does not wait.
        texts: The documentation of parameters that ``COLLECTIVE`` has not, or has in other words.
    """
    sections = ["Args:\n    {arguments}"]
    if returns:
        sections.append(f"Returns:\n{entry(returns)}")
    errors = [_LATER] if returns == HANDLE else [_WRONG, _FAILED]
    sections.append("\n".join(["Raises:", *map(entry, errors)]))

    def decorate(shown: F) -> F:
        if shown.__doc__ is None:  # python -OO
            return shown
        shown.__doc__ = "\n\n".join([inspect.cleandoc(shown.__doc__), *sections])
        return documented({**COLLECTIVE, **texts})(shown)

    return decorate


def entry(text: str) -> str:
    """Returns ``text`` as an entry of a section of a docstring, in lines of up to 116 characters."""
    return textwrap.fill(
        text,
        116,
        initial_indent="    ",
        subsequent_indent="        ",
        break_long_words=False,
        break_on_hyphens=False,
    )
