"""What rank 0 says of a run, at level notice: a line at its start, one when compression begins, and one at its end.

Texts are pure functions of numbers. ``Notices`` follows one optimizer and decides what is said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ocomm.optim.traffic import Traffic
from ocomm.session import Session
from ocomm.telemetry.counters import OptimizerCounters
from ocomm.telemetry.log import NOTICE
from ocomm.telemetry.units import amount

_log = logging.getLogger("ocomm")
#: How many optimizers of a session speak: a search over hyperparameters makes many.
_SPEAKERS = 3
#: Steps of each kind, and seconds lost, from which on it is no chance that compressed steps wait longer.
_MEASURED_STEPS, _LOST_S = 20, 1.0


def count(number: int) -> str:
    """Returns a number of parameters as people say it, such as "13.8 million"."""
    return f"{number / 1e6:.3g} million" if number >= 1e6 else str(number)


def describe_ranks(hosts: Sequence[str], network: str, is_on_devices: bool) -> str:
    """Returns where the ranks are, and what connects them.

    Args:
        hosts: The host of each rank.
        network: What connects the ranks, in words.
        is_on_devices: Whether the parameters of some rank are on a GPU.
    """
    number = len(set(hosts))
    where = "1 host" if number == 1 else f"{number} hosts"
    return f"{len(hosts)} ranks on {where}, {network}, parameters {'on GPUs' if is_on_devices else 'in host memory'}"


def steps_by_kind(traffic: Traffic, dense_bits: int = 32) -> str:
    """Returns the steps of a run, such as "9 steps (2 dense, 7 compressed)". ``dense_bits`` are those of an element in
    a dense step.
    """
    kinds = {
        "dense" if dense_bits == 32 else f"dense in {dense_bits} bits": traffic.dense_steps,
        "compressed": traffic.compressed_steps,
        "local": traffic.local_steps,
    }
    events = {"skipped": traffic.skipped_steps, "exchanged twice": traffic.redone_steps}
    steps, of_these = (
        ", ".join(f"{number} {what}" for what, number in counts.items() if number) for counts in (kinds, events)
    )
    return f"{traffic.steps} steps ({steps}{'; of these ' if of_these else ''}{of_these})"


def totals(traffic: Traffic, dense_bits: int = 32) -> str:
    """Returns the steps of a run by kind, its bytes, and how long it has waited."""
    ratio = traffic.bytes_dense / traffic.bytes_sent if traffic.bytes_sent else 1.0
    text = f"{steps_by_kind(traffic, dense_bits)}. This rank sent {amount(traffic.bytes_sent)}"
    text += f" instead of {amount(traffic.bytes_dense)}, {ratio:.3g} times fewer" if ratio >= 1.05 else ""
    text += f". step() waited {traffic.exposed_s:.1f} s for exchanges"
    dense, compressed = traffic.waited_dense, traffic.waited_compressed
    if dense.mean_ms is not None and compressed.mean_ms is not None:
        text += f": {dense.mean_ms:.3g} ms in a dense step, {compressed.mean_ms:.3g} ms in a compressed one"
        saved = (dense.mean_ms - compressed.mean_ms) / 1e3 * compressed.steps
        text += f", which saved {saved:.1f} s" if saved >= 0.1 else ""
    return text + "."


def loss(traffic: Traffic) -> str:
    """Returns a warning if compressed steps have waited longer than dense ones of the same run; "" if not."""
    dense, compressed = traffic.waited_dense, traffic.waited_compressed
    if min(dense.steps, compressed.steps) < _MEASURED_STEPS:
        return ""
    assert dense.mean_ms is not None and compressed.mean_ms is not None
    lost = (compressed.mean_ms - dense.mean_ms) / 1e3 * compressed.steps
    if lost < _LOST_S:
        return ""
    return (
        f"1 bit did not pay: compressed steps waited {compressed.mean_ms:.3g} ms for their exchange, and dense ones "
        f"{dense.mean_ms:.3g} ms, which cost {lost:.1f} s. Set OCOMM_KERNEL_THREADS to the number of cores that each "
        "rank can spare, or use DistributedOptimizer on this network."
    )


@dataclass(eq=False)
class Notices:
    """What is said of one optimizer. The session keeps it, also when the optimizer is gone, to speak at the end.

    Args:
        name: The optimizer's name in messages.
        traffic: Its counters, which others write.
        why_dense: ``why_dense(seen, steps)`` returns why none of the ``seen`` steps of this process was compressed, of
            ``steps`` of the whole run, and what to change; None for an optimizer without a warm-up.
        dense_bits: Bits per element of a dense step.
        speaks: Whether the lines at the start and when compression begins are said.
        why_apart: ``why_apart(steps)`` returns why the ranks' parameters differ after so many steps, and what to
            change; None for an optimizer after whose steps they never do.
    """

    name: str
    traffic: Traffic
    why_dense: Callable[[int, int], str] | None
    dense_bits: int = 32
    speaks: bool = True
    why_apart: Callable[[int], str] | None = None
    #: Number of steps taken, with those before a saved state was loaded.
    steps: int = 0
    #: True if all ranks had the same parameters after the last step.
    is_synced: bool = True
    #: True once a compressed step was taken.
    compresses: bool = False

    def begin(self, where: str, numel: int, plan: str) -> None:
        """Says what is about to be trained, where, and what a step sends."""
        if self.speaks:
            _log.log(NOTICE, "%s. %s, %s parameters: %s", where, self.name, count(numel), plan)

    def first_compressed(self, dense_nbytes: float) -> None:
        """Says that the last step was the first compressed one. ``dense_nbytes`` is what this rank sends in a dense
        one.
        """
        if self.speaks and self.traffic.dense_steps and self.why_dense is not None:
            sent = amount(self.traffic.last_bytes_sent)
            change = f"instead of {amount(dense_nbytes)}"
            if self.traffic.last_bytes_sent >= dense_nbytes:
                change = (
                    f"where a dense step has sent {amount(dense_nbytes)}: with so few parameters the headers of "
                    "messages are more than their bits, so DistributedOptimizer would send less"
                )
            _log.log(
                NOTICE,
                "%s: the warm-up is over. From step %d on this rank sends %s per step %s.",
                *(self.name, self.steps, sent, change),
            )

    def at_end(self, goes_on: bool) -> None:
        """Says what the run has sent and waited for. Warns at its end if nothing was compressed, if that did not pay,
        or if the ranks end with different parameters.
        """
        if not self.traffic.steps:
            return
        _log.log(NOTICE, "%s: %s", self.name, totals(self.traffic, self.dense_bits))
        if goes_on:
            return
        if self.why_apart is not None and not self.is_synced:
            _log.warning("%s: %s", self.name, self.why_apart(self.steps))
        if self.why_dense is not None and not self.traffic.compressed_steps and self.steps:
            _log.warning("%s: %s", self.name, self.why_dense(self.traffic.steps, self.steps))
        elif text := loss(self.traffic):
            _log.warning("%s: %s", self.name, text)


@dataclass(eq=False)
class DenseNotices:
    """What is said and counted of an optimizer that averages gradients without compression, ``nbytes`` bytes in each
    step.
    """

    name: str
    nbytes: float
    #: Number of steps taken.
    steps: int = 0

    def counters(self) -> OptimizerCounters:
        """Returns the optimizer's counters, for whoever watches the job."""
        nbytes = self.steps * self.nbytes
        return OptimizerCounters(self.name, self.steps, dense_steps=self.steps, bytes_sent=nbytes, bytes_dense=nbytes)

    def at_end(self, goes_on: bool) -> None:
        """Says what the run has sent."""
        del goes_on
        if self.steps:
            sent = amount(self.steps * self.nbytes)
            _log.log(NOTICE, "%s: %d steps, all dense. This rank sent about %s.", self.name, self.steps, sent)


def follow_dense(
    session: Session, number: int, name: str, numel: int, nbytes: float, is_on_devices: bool
) -> DenseNotices | None:
    """Says what an optimizer is about to average, on one rank, and counts it on all.

    Args:
        session: The session of the job.
        number: The process set.
        name: The optimizer's name in messages.
        numel: Number of trained elements.
        nbytes: Number of bytes of their gradients, as they are sent.
        is_on_devices: Whether they are on a GPU.

    Returns:
        The notices, whose ``steps`` the caller counts; None without other ranks.
    """
    topology, ranks = session.require_topology(), session.set_ranks[number]
    if len(ranks) == 1:
        return None
    own = ranks.index(topology.rank)
    notices = DenseNotices(name, session.member_set(number).nodes.sum_nbytes(nbytes, own))
    session.count(notices.counters)
    if own != 0:
        return notices
    if len(session.at_end) < _SPEAKERS:
        where = describe_ranks([topology.hosts[rank] for rank in ranks], session.network, is_on_devices)
        plan = f"a step sends {amount(notices.nbytes)} per rank, dense."
        _log.log(NOTICE, "%s. %s, %s parameters: %s", where, name, count(numel), plan)
    session.at_end.append(notices)
    return notices


def follow(
    session: Session,
    name: str,
    traffic: Traffic,
    why_dense: Callable[[int, int], str] | None,
    dense_bits: int,
    why_apart: Callable[[int], str] | None,
) -> Notices:
    """Returns the notices of a new optimizer, which ``session`` calls when it ends."""
    notices = Notices(name, traffic, why_dense, dense_bits, len(session.at_end) < _SPEAKERS, why_apart)
    session.at_end.append(notices)
    return notices
