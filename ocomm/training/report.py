"""The entries of ``compression_report()``: each is declared here once, and shown in docstrings and in the docs.

``tests/architecture/test_report.py`` compares the declaration with what the optimizers return, and with the docs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ocomm.docstrings import entry
from ocomm.optim.sketch import DEVIATION
from ocomm.telemetry.counters import OPTIMIZER

F = TypeVar("F", bound=Callable[..., Any])

#: Entries of all optimizers, in their order, and what they mean.
COMMON: dict[str, str] = {
    "stage": 'what the next step sends, in a word: "dense" or "compressed"; of 1-bit Adam and LAMB "warm-up", "mixed" '
    '(some tensors are in a warm-up of their own) or "compressed"; of 0/1 Adam "warm-up" (before the first step), '
    '"refreshing" (the variance still changes) or "frozen"; of DiLoCo "local", or "syncing" while a sync is under way',
    "form": '"flat", or "hierarchical" where the ranks of a host sum up before they compress',
    "inside": 'what carries dense values inside a host in the hierarchical form, "MPI" or "NCCL"; None in the flat '
    "form",
    "step": "number of steps taken, with those of a loaded state, without skipped ones",
    "dense_steps": OPTIMIZER["dense_steps"].meaning,
    "compressed_steps": OPTIMIZER["compressed_steps"].meaning,
    "skipped_steps": OPTIMIZER["skipped_steps"].meaning,
    "skipped_by": "the ranks that skipped the last skipped step, by skip(), zero_grad() or an overflow; in a grid one "
    "of each part, with its place; None if no step was skipped so",
    "redone_steps": OPTIMIZER["redone_steps"].meaning,
    "overlap": "True while exchanges may begin during backward; False after a gradient has changed after backward",
    "bytes_sent": OPTIMIZER["bytes_sent"].meaning,
    "bytes_sent_inside": OPTIMIZER["bytes_sent_inside"].meaning,
    "bytes_sent_masks": "the part of bytes_sent by which ranks looked for masked elements that have a gradient now, by "
    "formula",
    "bytes_dense": OPTIMIZER["bytes_dense"].meaning,
    "ratio": "bytes_dense / bytes_sent, of the whole run; None for a rank that sends nothing to other nodes, as on a "
    "node with more ranks than the smallest one has",
    "last_bytes_sent": "bytes that this rank has sent to other nodes in the last step",
    "last_ratio": "bytes of a dense step / last_bytes_sent; None if that is 0",
    "exposed_ms": "mean time per step, in ms, that step() waited for the exchange (time not hidden behind backward)",
    "exposed_dense_ms": "the same for dense steps alone, without a first step in which nothing overlaps yet; None if "
    "there was none",
    "exposed_compressed_ms": "the same for compressed steps alone",
    "grad_norm": "the norm of the averaged gradient in the last step that was clipped, with a standard deviation of "
    f"{100 * DEVIATION:.1f} % on several ranks; None without clipping",
    "memory_bytes": "bytes held, by buffer (docs/memory.md)",
    "resumed": "None, or what was loaded: the step, the number of ranks that saved it, and whether rank states were "
    "loaded, re-sharded or reset, and why",
}

_MASKED = {
    "masked_elements": "number of elements without a variance, which count in no scale",
    "woken_elements": "number of elements that were masked and have had a gradient since",
}
_WARM = {"warm_start": "None, or what was loaded of an Adam's checkpoint"}
_BITS = {"dense_bits": "bits per element of what travels dense"}
_FREEZE = {"freeze_step": "the last dense step; None until it is known"}

_NON_FINITE = {
    "non_finite_steps": "number of steps without a vote that changed nothing on this rank, because a gradient was not "
    "finite or its loss scale overflowed",
}
_SYNCS = {
    "synced": "True if all ranks have the same parameters now",
    "syncs": "number of steps that were syncs",
    "local_steps": "number of steps without an exchange",
}

#: Further entries, by the optimizer's kind.
OF_KIND: dict[str, dict[str, str]] = {
    "Optimizer": _BITS,
    "GradientTape": _BITS,
    "OneBitAdam": {**_MASKED, **_WARM, **_BITS, **_FREEZE},
    "OneBitLamb": {
        **_MASKED,
        **_WARM,
        **_BITS,
        **_FREEZE,
        "trust_ratios": "by tensor: the factor by which the last step multiplied lr",
        "factors": "by tensor: the part of the trust ratio that follows the variance since the freeze",
    },
    "ZeroOneAdam": {
        **_MASKED,
        **_WARM,
        **_BITS,
        "interval": "number of steps from one sync to the next, at this moment",
        **_SYNCS,
        "refreshes": "number of refreshes of the variance",
        **_NON_FINITE,
    },
    "DiLoCo": {
        **_SYNCS,
        **_NON_FINITE,
        "inner_resets": "number of times that this rank has reset the wrapped optimizer's state, because it was not "
        "finite after a sync that failed",
    },
}


def metrics(report: Mapping[str, Any], prefix: str = "ocomm/") -> dict[str, float]:
    """Returns the numbers of a report, flat, as loggers of metrics take them.

    Args:
        report: The result of ``compression_report()``.
        prefix: Put before each name.

    Returns:
        Each entry that is a number, a truth value as 0 or 1, and the sum of ``memory_bytes``.
    """
    numbers = {name: value for name, value in report.items() if isinstance(value, (bool, int, float))}
    numbers["memory_bytes"] = sum(report["memory_bytes"].values())
    return {prefix + name: float(value) for name, value in numbers.items()}


def documented(function: F) -> F:
    """Replaces ``{entries}`` in a docstring by a list of all entries."""
    if function.__doc__ is not None:  # python -OO
        lines = [entry(f"- ``{name}``: {text}.") for name, text in COMMON.items()]
        for kind, entries in OF_KIND.items():
            lines += [entry(f"- ``{name}`` ({kind}): {text}.") for name, text in entries.items()]
        # Python 3.13 has taken the indentation away already.
        function.__doc__ = inspect.cleandoc(function.__doc__).replace("    {entries}", "\n".join(lines))
    return function
