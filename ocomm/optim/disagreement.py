"""Errors that say what the ranks disagree on in a step, from the headers of their messages."""

from __future__ import annotations

from collections.abc import Sequence

from ocomm.collectives.segment_header import SegmentHeader
from ocomm.errors import MismatchError
from ocomm.optim.replicas import ReplicasDifferError


def disagreement(
    name: str,
    step: int,
    segment_header: SegmentHeader,
    ranks: Sequence[int],
    tensors: Sequence[str],
    settings: str,
    rate_advice: str = "",
) -> MismatchError:
    """Returns the error for headers of a segment that differ in step ``step`` of the optimizer ``name``.

    ``ranks`` are the channel's ranks as world ranks, ``tensors`` the names of the segment's tensors. ``settings``
    says that what the hash of settings is of differs, ``rate_advice`` is said besides if learning rates do.
    """
    differences = segment_header.differences()
    if not differences or max(differences[0][1]) >= len(ranks):
        return MismatchError(
            f"{name}: a message arrived in step {step} whose header no rank writes. All ranks must run the same "
            "version of ocomm, over a network that does not change what it carries."
        )
    what, values = differences[0]
    if what == "replica":
        return ReplicasDifferError(f"{name}: the ranks' parameters differ in step {step}.")
    by_value: dict[int, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(ranks[rank])
    if what == "step":
        said = "; ".join(f"rank(s) {who} are at step {value}" for value, who in by_value.items())
        return MismatchError(
            f"{name}: the ranks are not at the same step: {said}. Call step() equally often everywhere."
        )
    if what == "hyper":
        rates = {ranks[rank]: lr for rank, lr in segment_header.learning_rates().items()}
        known = {rates[who[0]] for who in by_value.values() if who[0] in rates}
        digits = "g" if len({f"{lr:g}" for lr in known}) == len(known) else ""  # "" has all that differ
        texts = {rank: f" (lr {lr:{digits}})" for rank, lr in rates.items()}
        said = "; ".join(f"rank(s) {who}{texts.get(who[0], '')}" for who in by_value.values())
        is_equal = len(known) == 1 and all(who[0] in rates for who in by_value.values())
        other = " This lr is equal, so another of these differs, or the lr of a later group." if is_equal else ""
        return MismatchError(
            f"{name}: {settings} in step {step}: {said}.{other} "
            f"Give all ranks the same optimizer settings and the same schedule.{'' if is_equal else rate_advice}"
        )
    said = "; ".join(f"rank(s) {who}: {value:#x}" for value, who in by_value.items())
    return MismatchError(f"{name}: mismatched {what} in the exchange of {list(tensors[:3])}: {said}.")
