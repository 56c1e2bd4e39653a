"""What the ranks tell each other, agree on and open when a distributed optimizer is made."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from ocomm.agreement import digest, first_difference, gather
from ocomm.collectives.bridge import IntraNode
from ocomm.collectives.engine import Channel
from ocomm.compression.layout import Layout
from ocomm.errors import InvalidRequestError, MismatchError
from ocomm.kernels.base import Memory
from ocomm.kernels.device import DeviceMemory
from ocomm.nccl_opening import open_bridge
from ocomm.optim.grid import Grid
from ocomm.optim.step_channel import StepChannel
from ocomm.session import Session
from ocomm.types import Nodes

_log = logging.getLogger("ocomm")
#: Where a rank's parameters are: in the host's memory, on a device, on a device that the network reaches.
ON_HOST, ON_DEVICE, REACHED = "host", "device", "reached"


class RankFacts(NamedTuple):
    """What a rank tells the others about itself."""

    #: Where its parameters are: ``ON_HOST``, ``ON_DEVICE`` or ``REACHED``.
    place: str
    hierarchical: bool | Literal["auto"]
    framework: str
    #: Words that decide how its framework's own dense steps round.
    implementation: str


class AllFacts:
    """The facts of all ranks of a set, in rank order; ``ranks`` are their world ranks."""

    def __init__(self, ranks: Sequence[int], facts: Sequence[RankFacts]) -> None:
        self.places = {fact.place for fact in facts}
        #: True if the ranks use several frameworks.
        self.is_mixed = len({fact.framework for fact in facts}) > 1
        #: The world ranks by how their dense steps round.
        self.by_implementation: dict[str, list[int]] = {}
        for rank, fact in zip(ranks, facts, strict=True):
            self.by_implementation.setdefault(fact.implementation, []).append(rank)
        #: True if the frameworks' own dense steps would not round alike on all ranks.
        self.rounds_differently = self.is_mixed or len(self.by_implementation) > 1
        #: True if all ranks have asked for the same form of exchange.
        self.forms_agree = len({fact.hierarchical for fact in facts}) == 1


def place_of(memory: Memory) -> str:
    """Returns where parameters in ``memory`` are."""
    if not memory.is_device:
        return ON_HOST
    assert isinstance(memory, DeviceMemory)
    return REACHED if memory.reached_by_network else ON_DEVICE


class Arrangement(NamedTuple):
    """How an optimizer's messages go, as all ranks have agreed."""

    nodes: Nodes
    #: Whether they go from device to device.
    direct: bool = False
    #: What carries dense values inside nodes.
    intra_node: IntraNode | None = None


class Member(Protocol):
    """A rank's side of an optimizer, which says how its steps round."""

    framework: str

    def implementation(self) -> str:
        """Returns words that are equal where equal averages give equal bits."""
        ...


def meet(
    session: Session,
    number: int,
    name: str,
    member: Member,
    memory: Memory,
    hierarchical: bool | Literal["auto"],
    nodes: Nodes,
) -> tuple[AllFacts, Arrangement]:
    """Returns what the ranks have said of themselves, and how messages will go. Collective over process set ``number``.

    Args:
        session: The session of the job.
        number: The process set.
        name: The optimizer's name.
        member: This rank's side of it.
        memory: Where this rank's parameters are.
        hierarchical: The form of exchange that was asked for.
        nodes: The nodes of that form.
    """
    # The option may be a NumPy bool, which JSON does not have.
    asked = hierarchical if hierarchical == "auto" else bool(hierarchical)
    mine = RankFacts(place_of(memory), asked, member.framework, member.implementation())
    said = gather(session, number, f"{name}.facts", json.dumps(mine))
    facts = AllFacts(session.set_ranks[number], [RankFacts(*json.loads(text)) for text in said])
    if not facts.forms_agree:  # opening the channel fails, with the reason
        return facts, Arrangement(nodes)
    return facts, arrange(session, number, hierarchical, nodes, facts.places, name, memory)


def arrange(
    session: Session,
    number: int,
    hierarchical: bool | Literal["auto"],
    nodes: Nodes,
    places: set[str],
    name: str,
    memory: Memory,
) -> Arrangement:
    """Returns how messages go, as the ``places`` of the ranks' parameters allow. Collective over the process set.

    If the sum inside a node would go through the host's memory it costs more than compression saves; then every rank is
    a node. Raises InvalidRequestError if the user has asked for the hierarchical form.
    """
    reached = REACHED in places and ON_DEVICE not in places and nodes.ranks > 1
    # A rank without others sends nothing, so its messages stay where they are.
    direct = places != {ON_HOST} if nodes.ranks == 1 else reached and nodes.groups == 1
    if nodes.is_flat or places == {ON_HOST}:
        return Arrangement(nodes, direct)
    intra_node, words = open_bridge(session, number, name, nodes, memory)
    is_first = session.require_topology().rank == session.set_ranks[number][0]
    if intra_node is not None or (direct and session.settings.nccl != "1"):
        if is_first:
            way = words if intra_node else f"MPI; not NCCL: {words}"
            _log.info("%s: hosts add up from device to device, over %s.", name, way)
        return Arrangement(nodes, direct, intra_node)
    mpi = "there are too many hosts for that (OCOMM_DIRECT_PEERS)" if reached else "some rank's does not"
    why = f"It needs NCCL ({words}), or an MPI that takes device pointers, but {mpi}"
    if session.settings.nccl == "1":
        raise InvalidRequestError(f"{name}: OCOMM_NCCL=1, but there is no NCCL between the GPUs of a host ({words}).")
    if hierarchical is True:
        raise InvalidRequestError(
            f"{name}: hierarchical=True, but parameters are on GPUs, and the sum inside a node would go through the "
            f"host's memory. {why}; ocommrun --check-build says more. Leave it at 'auto': then every rank compresses "
            "by itself."
        )
    if is_first:
        _log.warning(
            "%s: hierarchical='auto' is off, because parameters are on GPUs and the sum inside a node would go through "
            "the host's memory: every rank compresses by itself. %s.",
            name,
            why,
        )
    flat = session.nodes(number, False)
    return Arrangement(flat, reached and flat.groups == 1)


def open_grid(session: Session, grid: Grid, name: str, options: Mapping[str, Any]) -> StepChannel:
    """Opens the channel between the parts of a grid. Raises MismatchError if their options differ."""
    ranks = session.set_ranks[grid.number]
    shared = {key: value for key, value in options.items() if key != "warm_start"}
    # The parts may count their optimizers differently.
    whole = session.automatic_name("grid", grid.number)
    try:
        channel = session.open_channel(grid.number, whole, digest(json.dumps(shared, sort_keys=True)), name)
    except MismatchError as error:
        lines = [f"{key}={value!r}" for key, value in sorted(shared.items())]
        difference = first_difference(session, grid.number, f"{whole}.options", lines, "have")
        raise MismatchError(
            f"{name}: the parts of the grid do not have the same options: {difference}." if difference else str(error)
        ) from None
    return StepChannel(
        name,
        channel,
        ranks,
        ranks.index(session.require_topology().rank),
        Nodes.flat(len(ranks)),
        session.watch(grid.number, whole),
        session.settings.stall_shutdown_s,
    )


def open_channel(session: Session, number: int, name: str, layout: Layout, options: Mapping[str, Any]) -> Channel:
    """Opens the optimizer's channel. If the ranks do not agree, the error says on which tensor or option."""
    text = json.dumps(options, sort_keys=True)
    try:
        return session.open_channel(number, name, layout.digest ^ digest(text), f"{len(layout.tensors)} tensors")
    except MismatchError as error:
        specs = [f"tensor '{t.name}' {t.shape} {t.dtype} order {t.order}" for t in layout.tensors]
        lines = [*specs, *(f"{key}={value!r}" for key, value in sorted(options.items()))]
        difference = first_difference(session, number, f"{name}.descriptions", lines, "registered")
        raise MismatchError(
            f"{name}: the ranks do not wrap the same optimizer: {difference}." if difference else str(error)
        ) from None
