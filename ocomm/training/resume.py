"""Continues from a saved run: whether a state fits, which states the ranks have, and what all ranks do about it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ocomm.agreement import by_rank, gather
from ocomm.errors import CheckpointError, MismatchError, OcommError, clause
from ocomm.kernels.base import Kernels
from ocomm.optim import checkpoint
from ocomm.optim.checkpoint import Resharding, State
from ocomm.optim.core import Core
from ocomm.session import Session

_log = logging.getLogger("ocomm")

#: Version of the format of saved states.
VERSION = 1


class Resumable(Protocol):
    """A run that a saved state can be loaded into: a ``training.driver.Driver``."""

    session: Session
    #: Id of the process set.
    number: int
    #: The optimizer's class, in saved states.
    kind: str
    options: dict[str, Any]
    #: Names of the options that must be those of the saved state.
    fixed_options: list[str]
    #: The defaults of options, which a saved state does not have if its release did not.
    default_options: dict[str, Any]
    steps: int

    @property
    def core(self) -> Core:
        """The optimizer's core."""
        ...

    @property
    def kernels(self) -> Kernels:
        """The kernels that compute checksums of saved states, in the host's memory."""
        ...

    @property
    def name(self) -> str:
        """The name of the optimizer in messages and on the network."""
        ...

    @property
    def reset_text(self) -> str:
        """What happens where the run goes on without its rank states, in words."""
        ...

    @property
    def replica(self) -> str:
        """A hash of the replica, the same on all ranks that hold the same."""
        ...

    def require_idle(self, what: str) -> None:
        """Raises InvalidRequestError if a step is under way, in which ``what`` cannot be changed."""
        ...


def class_of(kind: object) -> str:
    """Returns the name by which users know an optimizer, from its kind in a saved state, which may be damaged."""
    if not isinstance(kind, str):
        return repr(kind)
    # Without compression these have no state of ocomm.
    return f"Distributed{kind}" + (" with compression" if kind in ("Optimizer", "GradientTape") else "")


def header(driver: Resumable) -> dict[str, Any]:
    """Returns what every saved state says about its run, in plain values."""
    layout = driver.core.layout
    return {
        "version": VERSION,
        "optimizer": driver.kind,
        "options": dict(driver.options),
        "steps": driver.steps,
        "ranks": layout.ranks,
        "nodes": [list(node) for node in layout.nodes.members],
        "groups": layout.nodes.groups,
        "block_size": layout.block_size,
        "digest": f"{layout.digest:016x}",
        "tensors": checkpoint.describe(layout),
        "replica": driver.replica,
    }


def check(driver: Resumable, saved: State, where: str) -> None:
    """Raises CheckpointError, whose message begins with ``where``, if ``saved`` is damaged or does not belong to this
    run.
    """
    version = saved.get("version")
    if version is None:
        raise CheckpointError(f"{where} is no saved state of ocomm: it has {sorted(map(str, saved))}.")
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(f"{where} has version {version!r}; this release of ocomm reads versions up to {VERSION}.")
    if saved.get("optimizer") != driver.kind:
        raise CheckpointError(
            f"{where} is of {class_of(saved.get('optimizer'))}, the optimizer is {class_of(driver.kind)}. Resume with "
            "the same class; to start from Adam's moments alone, pass them as warm_start."
        )
    checkpoint.require_checksum(saved, driver.kernels, where)
    check_place(driver, saved, where)  # first, because the tensors of another place are others
    checkpoint.require_tensors(saved["tensors"], driver.core.layout, where)
    for name in driver.fixed_options:
        now, before = driver.options.get(name), saved["options"].get(name)
        if now != before:
            raise CheckpointError(
                f"{where} is of a run with {name}={before!r}, this one has {name}={now!r}. Pass {name}={before!r}."
            )


def check_place(driver: Resumable, saved: State, where: str) -> None:
    """Raises CheckpointError if ``saved`` is of another place in a grid, whose tensors are other parts of the model."""
    now, before = driver.options.get("grid"), saved.get("options", {}).get("grid")
    if now != before:
        raise CheckpointError(
            f"{where} is of {before or 'a run without a grid'}, and this rank is at {now or 'no place of a grid'}. "
            "Each part of a grid loads its own state, with axes of the same sizes; only the data axis may have another "
            "one. For other grids the 1-bit Adams have dense_state_dict()."
        )


def say_changes(driver: Resumable, saved: State) -> None:
    """Warns of options that differ from the saved ones, whose new values are used, and of another norm."""
    before, now = {**driver.default_options, **saved["options"]}, driver.options
    names = [n for n in sorted({*before, *now} - {"warm_start"}) if before.get(n) != now.get(n)]
    follow = [driver.core.options_class.following(options.get("total_steps")) for options in (before, now)]
    # Those that the user has not chosen are said of total_steps.
    both = [
        n for n in names if all(n in each and each[n] == o[n] for each, o in zip(follow, (before, now), strict=True))
    ]
    changed = [f"{n} {before.get(n)!r} -> {now.get(n)!r}" for n in names if n not in both]
    if both:
        changed[-1] += f" (so {', '.join(f'{n} {before[n]!r} -> {now[n]!r}' for n in both)})"
    if changed and driver.core.rank == 0:
        _log.warning("%s: resumed with other options: %s", driver.name, ", ".join(changed))
    if saved.get("norm") is not None and driver.core.rank == 0:  # of a release before norms of averages
        _log.warning(
            "%s: the state is of a release that clipped compressed steps by the root mean square of the ranks' norms. "
            "From now on they are clipped by the norm of the averaged gradient, as the warm-up is: on n ranks by up to "
            "sqrt(n) times less.",
            driver.name,
        )


# Rank states


@dataclass(frozen=True)
class Source:
    """Where rank states come from.

    - ``read(rank)`` returns that rank's state, None if there is none; raises CheckpointError if it cannot be read.
    - ``ranks`` are the ranks to ask for if this rank's own state is missing.
    - ``name(rank)`` names a state in messages.
    - ``alone``: there is one state, which must be this rank's own.
    - ``partial``: missing states count as lost, and the others are loaded. Then ``ranks`` are all that have a state,
      the same on all ranks.
    """

    read: Callable[[int], State | None]
    ranks: Iterable[int]
    name: Callable[[int], str]
    alone: bool = False
    partial: bool = False


#: No rank has a state, so all start at zero.
NO_STATE = Source(lambda rank: None, (), lambda rank: "the rank state", alone=True)


def one_state(state: State) -> Source:
    """Returns the source of this rank's own state."""
    return Source(lambda rank: state, (), lambda rank: "the rank state", alone=True)


def all_states(states: Iterable[State | None]) -> Source:
    """Returns the source of the states of all ranks of a run, in any order; None for those that are lost."""
    found: dict[int, State] = {}
    twice = []
    for state in states:
        if state is not None:
            rank = state.get("rank", -1)
            twice += [rank] if rank in found else []
            found[rank] = state

    def read(rank: int) -> State | None:
        if twice:
            raise CheckpointError(f"the state of rank {twice[0]} was given twice.")
        return found.get(rank)

    return Source(read, sorted(found), lambda rank: f"the state of rank {rank}")


@dataclass
class _Finding:
    """What one rank has found: ``how`` is ``"loaded"`` or ``"re-sharded"``, or ``"reset"`` or ``"failed"`` with the
    reason ``why``.
    """

    how: str
    run: str = ""
    ranks: int = 0
    why: str = ""
    state: Mapping[str, Any] | None = None
    #: For a partial source: the old ranks whose states are lost, and the fraction of all elements that they owned.
    lost: tuple[int, ...] = ()
    lost_share: float = 0.0


def load_rank_states(driver: Resumable, source: Source) -> dict[str, Any]:
    """Loads rank states from ``source``, as ``Driver.load_rank_state`` describes."""
    mine, error = _Finding("failed"), None
    try:
        mine = _examine(driver, source)
    except OcommError as found:
        error = found
        mine.why = str(found)
    text = json.dumps({"how": mine.how, "run": mine.run, "ranks": mine.ranks, "why": mine.why})
    texts = gather(driver.session, driver.number, f"{driver.name}.rank_state", text)
    if error is not None:
        raise error
    ranks, core = driver.session.set_ranks[driver.number], driver.core
    said = {rank: _Finding(**json.loads(each)) for rank, each in zip(ranks, texts, strict=True)}
    how, why = _decide(driver.name, said, core.needs_rank_state)
    speaks = core.rank == 0
    if how == "reset":
        core.reset_rank_state()
        if speaks:
            _log.warning("%s: %s: %s", driver.name, driver.reset_text, why)
        return {"rank_state": how, "why": why}
    assert mine.state is not None
    core.load_rank_state(mine.state)
    if how == "re-sharded":
        why = (
            f"{mine.ranks} -> {core.layout.ranks} ranks: server errors moved with their blocks, worker errors are the "
            f"mean over the {mine.ranks} old ranks"
        )
        if speaks:
            _log.warning("%s: errors were redistributed: %s", driver.name, why)
    if not mine.lost:
        return {"rank_state": how, "why": why}
    if speaks:
        _log.warning(
            "%s: the errors of rank(s) %s start at zero, which owned %.1f %% of all elements",
            driver.name,
            list(mine.lost),
            100 * mine.lost_share,
        )
    return {"rank_state": how, "why": why, "lost_ranks": list(mine.lost), "lost_owner_share": mine.lost_share}


def _decide(name: str, said: Mapping[int, _Finding], needs_rank_state: bool) -> tuple[str, str]:
    """Returns what all ranks do, ``"loaded"``, ``"re-sharded"`` or ``"reset"``, and why they reset.

    Args:
        name: The optimizer's.
        said: What each rank has found; none is of an error on this rank.
        needs_rank_state: Whether a run cannot go on without the rank states.

    Raises:
        CheckpointError: A rank has found an error, or a state is missing that cannot be.
        MismatchError: The ranks have states of different runs.
    """
    failed = {rank: finding.why for rank, finding in said.items() if finding.how == "failed"}
    if failed:
        each = "; ".join(f"rank {rank}: {why}" for rank, why in failed.items())
        raise CheckpointError(f"{name}: no rank state was loaded on any rank. {each}")
    runs = _ranks_by({rank: finding.run for rank, finding in said.items() if finding.run})
    if len(runs) > 1:
        raise MismatchError(f"{name}: the ranks have rank states of different runs: {by_rank(runs, 'have those of')}.")
    whys = _ranks_by({rank: finding.why for rank, finding in said.items() if finding.how == "reset"})
    if not whys:
        return "re-sharded" if any(finding.how == "re-sharded" for finding in said.values()) else "loaded", ""
    why = by_rank(whys, "say that")
    if needs_rank_state:
        raise CheckpointError(
            f"{name}: no rank state was loaded on any rank: {why}. The state_dict is of a run with shard_state, whose "
            "m and v are in the rank states of all its ranks and cannot begin at zero."
        )
    return "reset", why


def _ranks_by(texts: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, text in texts.items():
        found.setdefault(text, []).append(rank)
    return found


def _examine(driver: Resumable, source: Source) -> _Finding:
    """Returns what this rank has, ready to be loaded; nothing is changed."""
    driver.require_idle("load_rank_state_dict")
    core = driver.core
    # Rank 0's state says how many ranks the checkpoint has, because files of higher ranks may be left from an older
    # one.
    first_asked = core.rank if source.partial else 0
    places = [core.rank] if source.alone else list(dict.fromkeys([first_asked, core.rank, *source.ranks]))
    first = next((rank for rank in places if source.read(rank) is not None), None)
    if first is None:
        return _Finding("reset", why=f"{source.name(core.rank)} is missing")
    state = _read(driver, source, first)
    assert state is not None
    run = f"{state['ranks']} ranks at step {state['steps']} with parameters {state['replica']}"
    found = _Finding("loaded", run, state["ranks"], state=state)
    if source.alone and state["ranks"] == core.layout.ranks and state["rank"] != core.rank:
        raise CheckpointError(
            f"{source.name(first)} is of rank {state['rank']}, this is rank {core.rank}. Give each rank its own."
        )
    is_same = state["digest"] == f"{core.layout.digest:016x}"
    if source.partial:
        survivors = set(source.ranks)
        found.lost = tuple(rank for rank in range(state["ranks"]) if rank not in survivors)
        layout = core.layout if is_same else checkpoint.layout_of(state, core.layout, source.name(first))
        owned = [layout.owned_numel(rank) for rank in range(layout.ranks)]
        found.lost_share = sum(owned[rank] for rank in found.lost) / max(sum(owned), 1)
        if found.lost and core.needs_rank_state:
            raise CheckpointError(
                f"the states of rank(s) {list(found.lost)} are lost, and with them the m and v of the blocks that they "
                "owned (shard_state). Go on from a checkpoint of which all ranks have saved their states."
            )
    if is_same:
        found.state = _read(driver, source, core.rank)
        if found.state is None and source.partial:
            others = (_read(driver, source, rank) for rank in source.ranks)
            found.state = checkpoint.stand_in(other for other in others if other is not None)
        elif found.state is None:
            return _Finding("reset", run, found.ranks, f"{source.name(core.rank)} is missing")
        else:
            _same_checkpoint(source, core.rank, found.state, first, state)
        _check_buffers(driver, found.state, source.name(core.rank))
        return found
    if source.alone:
        raise CheckpointError(
            f"{source.name(first)} is of rank {state['rank']} of {state['ranks']} (nodes {state['nodes']}, block_size "
            f"{state['block_size']!r}), this is rank {core.rank} of {core.layout.ranks} (block_size "
            f"{core.layout.block_size!r}): the errors have to be redistributed. Pass the states of all "
            f"{state['ranks']} ranks on every rank."
        )
    return _reshard(driver, source, first, state, found)


def _reshard(driver: Resumable, source: Source, first: int, state: State, found: _Finding) -> _Finding:
    """Returns ``found`` with what this rank gets of the states of another number of ranks; ``state`` is rank
    ``first``'s.
    """
    core = driver.core
    old = checkpoint.layout_of(state, core.layout, source.name(first))
    resharding = Resharding(old, core.layout, core.rank)
    lost = []
    for rank in range(old.ranks):
        part = _read(driver, source, rank)
        if part is None:
            lost.append(rank)
            resharding.skip()
            continue
        _same_checkpoint(source, rank, part, first, state)
        if not lost or source.partial:
            resharding.add(part)
    if lost and not source.partial:
        names = ", ".join(map(source.name, lost))
        return _Finding("reset", found.run, found.ranks, f"{names} {'is' if len(lost) == 1 else 'are'} missing")
    found.how, found.state = "re-sharded", resharding.result()
    _check_buffers(driver, found.state, source.name(first))
    return found


def _read(driver: Resumable, source: Source, rank: int) -> State | None:
    """Returns the state of a rank, checked against the current run; None if there is none."""
    state, where = source.read(rank), source.name(rank)
    if state is None:
        return None
    state = checkpoint.renamed(state, driver.core.layout, driver.kernels, where)
    check(driver, state, where)
    if not source.alone and state["rank"] != rank:
        raise CheckpointError(f"{where} is of rank {state['rank']}.")
    if state["steps"] != driver.steps:
        raise CheckpointError(
            f"{where} was saved at step {state['steps']}, the optimizer is at step {driver.steps}. Load the state_dict "
            "of the same checkpoint first."
        )
    if state["replica"] != driver.replica:
        raise CheckpointError(
            f"{where} was saved beside parameters {state['replica']}, the optimizer's are {driver.replica}: it is of "
            "another run, or of another checkpoint."
        )
    return state


def _same_checkpoint(source: Source, rank: int, state: State, first: int, beside: State) -> None:
    if state["digest"] != beside["digest"]:
        raise CheckpointError(
            f"{source.name(rank)} is of {state['ranks']} ranks, {source.name(first)} of {beside['ranks']}: they are "
            "not of one checkpoint."
        )


def _check_buffers(driver: Resumable, state: State, where: str) -> None:
    try:
        driver.core.check_rank_state(state)
    except ValueError as error:
        raise CheckpointError(f"{where} does not fit: {clause(error)}.") from None
