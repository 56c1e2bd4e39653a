"""Opens NCCL between the GPUs of each node (ncclCommInitRank): on all nodes of a process set, or on none.

The result is the ``Bridge`` of each node (``collectives.bridge``).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import time
from dataclasses import dataclass

import numpy as np

from ocomm.agreement import gather
from ocomm.collectives.bridge import Bridge, IntraNode
from ocomm.collectives.bridged import BridgedSums
from ocomm.errors import HorovodInternalError, InvalidRequestError, OcommError
from ocomm.kernels.base import Memory
from ocomm.kernels.device import DeviceMemory, Stream
from ocomm.negotiation.request import TensorMemory
from ocomm.runtime.handshake import bounded
from ocomm.runtime.process_set import MemberSet
from ocomm.session import Session
from ocomm.transport import nccl
from ocomm.types import Nodes

_log = logging.getLogger("ocomm")
#: Bytes that each rank sends to every other rank in the trial transfer, before a bridge is used.
_TRIAL_NBYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Word:
    """What a rank tells the others: why it cannot use NCCL, "" if it can; its library; its device; the bridge that it
    has.
    """

    why: str
    version: str = ""
    device: str = ""
    bridge: str = ""


def open_bridge(
    session: Session, number: int, name: str, nodes: Nodes, memory: Memory, waits: bool = True
) -> tuple[IntraNode | None, str]:
    """Opens NCCL between the devices of each node of process set ``number``.

    Collective: the result is the same on all ranks of the set. May take up to ``start_timeout_s``. A process has at
    most one bridge, because NCCL wants the calls of all its communicators in one order: optimizers of the same ranks
    share it, and an optimizer of other ranks gets none.

    Args:
        waits: True to wait while another thread of this process opens a bridge; such threads must come in the same
            order on all ranks. False: in that case no rank gets a bridge.

    Returns:
        The bridge of this rank's node and the version of NCCL, or None and the reason why there is no bridge.
    """
    patience = session.settings.start_timeout_s if waits else 0
    if not session.opening_bridge.acquire(timeout=patience):
        _, why = _open_bridge(session, number, name, nodes, memory, "its process is opening another one")
        return None, why
    try:
        return _open_bridge(session, number, name, nodes, memory, "")
    finally:
        session.opening_bridge.release()


def _open_bridge(
    session: Session, number: int, name: str, nodes: Nodes, memory: Memory, busy: str
) -> tuple[IntraNode | None, str]:
    ranks = session.set_ranks[number]
    me = ranks.index(session.require_topology().rank)
    node = nodes.node_of(me)
    members = tuple(ranks[rank] for rank in node)
    library, word = (None, _Word(busy)) if busy else _ability(session, members, memory)
    said = [_Word(**json.loads(text)) for text in _tell(session, number, f"{name}.nccl", dataclasses.asdict(word))]
    if why := _objection(said, nodes, ranks):
        return None, why
    assert library is not None and isinstance(memory, DeviceMemory)
    version = f"NCCL {library}"
    bridges = {said[rank].bridge for rank in node}
    kept = len(bridges) == 1 and "" not in bridges
    # All ranks take part in all rounds, also those that have a bridge already.
    unique_id, why = "", ""
    if node[0] == me and len(node) > 1 and not kept:
        try:
            unique_id = library.unique_id().hex()
        except OcommError as error:
            why = str(error)
    ids = [json.loads(text) for text in _tell(session, number, f"{name}.nccl.ids", [unique_id, why])]
    why = next((f"rank {ranks[rank]}: {words}" for rank, (_, words) in enumerate(ids) if words), "")
    if why:
        return None, why
    if len(node) > 1 and not kept:
        if session.bridge is not None:
            session.bridge.end("another rank's has failed")
        try:
            session.bridge = _opened(session, library, bytes.fromhex(ids[node[0]][0]), memory, members)
        except (OcommError, MemoryError) as error:
            why = str(error) or "out of memory"
    outcomes = [json.loads(text) for text in _tell(session, number, f"{name}.nccl.open", why)]
    if any(outcomes):
        if session.bridge is not None and not kept:
            session.bridge.end("another rank could not open it")
        return None, next(f"rank {ranks[rank]}: {words}" for rank, words in enumerate(outcomes) if words)
    return IntraNode(session.bridge if len(node) > 1 else None, node), version


def could_be_bridged(session: Session, number: int) -> bool:
    """Returns True if dense sums over process set ``number`` could go over a bridge: it has several ranks, all on one
    host.
    """
    member, hosts = session.member_set(number), session.require_topology().hosts
    if session.settings.nccl == "0" or member.size == 1 or (member.unbridged and session.settings.nccl != "1"):
        return False
    return all(hosts[rank] == hosts[member.ranks[0]] for rank in member.ranks)


def memory_of(session: Session, number: int, memory: DeviceMemory) -> TensorMemory:
    """Returns which way tensors on this device take when they are summed over a set that ``could_be_bridged``.

    ``BRIDGED`` tensors stay on the device; ``COPIED`` tensors go through the host's memory. The set's bridge is opened
    once all ranks have come with tensors that are ``COPIED``. Not collective. Raises InvalidRequestError if settings
    ask for NCCL and the ranks have found that there can be no bridge.
    """
    member = session.member_set(number)
    if member.bridged is not None:
        bridge = member.bridged.bridge
        return TensorMemory.BRIDGED if bridge.device is memory.device and not bridge.ended else TensorMemory.COPIED
    if member.unbridged and session.settings.nccl == "1":
        raise InvalidRequestError(f"OCOMM_NCCL=1, but there is no NCCL between the ranks' GPUs ({member.unbridged}).")
    if member.open_bridge is None:
        member.open_bridge = functools.partial(_open_for_sums, session, number, member, memory)
    return TensorMemory.COPIED


def give_up(member: MemberSet, why: str, is_news: bool = True) -> None:
    """Notes that there will be no bridge for sums over this set, with a warning if that is news."""
    member.unbridged = why
    if is_news:
        _log.warning("dense sums of tensors on GPUs go through the host's memory, not over NCCL: %s.", why)


def _open_for_sums(session: Session, number: int, member: MemberSet, memory: DeviceMemory) -> None:
    """Opens the set's bridge for dense sums. Runs on all ranks at once, in a thread that only the end of the session
    waits for.
    """
    intra_node: IntraNode | None = None
    try:
        memory.device.enter()
        nodes = Nodes((tuple(range(member.size)),))
        intra_node, words = open_bridge(session, number, "dense sums", nodes, memory, waits=False)
        if intra_node is not None:
            member.bridged = BridgedSums(intra_node, memory, session.settings.scratch_nbytes)
    except (OcommError, MemoryError, ValueError) as error:  # ValueError: a rank has joined, and its text is empty
        words = str(error) or "out of memory"
    if member.bridged is None:
        give_up(member, words, is_news=session.is_initialized and (member.rank == 0 or intra_node is not None))
    elif member.rank == 0:
        _log.info("dense sums of tensors on GPUs go over %s.", words)


def _tell(session: Session, number: int, name: str, what: object) -> list[str]:
    return gather(session, number, name, json.dumps(what))


def _ability(session: Session, members: tuple[int, ...], memory: Memory) -> tuple[nccl.NcclLibrary | None, _Word]:
    """Returns this rank's NCCL library, and what this rank tells the others."""
    if session.settings.nccl == "0":
        return None, _Word("OCOMM_NCCL=0")
    if not isinstance(memory, DeviceMemory):
        return None, _Word("its parameters are in the host's memory")
    if session.other_nccl:
        return None, _Word(f"{session.other_nccl} uses NCCL in its process, too")
    bridge = session.bridge
    if bridge is not None and not bridge.ended and (bridge.ranks, bridge.device) != (members, memory.device):
        return None, _Word(f"its process has one between ranks {list(bridge.ranks)} on {bridge.device.name} already")
    try:
        library = nccl.load()
    except OcommError as error:
        return None, _Word(str(error))
    known = bridge.name if bridge is not None and not bridge.ended else ""
    return library, _Word("", str(library), memory.device.identity, known)


def _objection(said: list[_Word], nodes: Nodes, ranks: tuple[int, ...]) -> str:
    """Returns why there can be no bridges, the same on all ranks; "" if there can be."""
    for rank, word in enumerate(said):
        if word.why:
            return f"rank {ranks[rank]}: {word.why}"
    for node in nodes.members:
        first = node[0]
        for position, rank in enumerate(node):
            if said[rank].version != said[first].version:
                versions = f"{said[first].version}, rank {ranks[rank]} {said[rank].version}"
                return f"rank {ranks[first]} has NCCL {versions}"
            twin = next((other for other in node[:position] if said[other].device == said[rank].device), None)
            if twin is not None:
                return f"ranks {ranks[twin]} and {ranks[rank]} share a GPU; give each its own"
    return ""


def _opened(
    session: Session, library: nccl.NcclLibrary, unique_id: bytes, memory: DeviceMemory, members: tuple[int, ...]
) -> Bridge:
    """Returns the bridge after a trial transfer, since NCCL makes connections in the first transfer, which may wait for
    ranks.
    """
    position = members.index(session.require_topology().rank)
    seconds = session.settings.start_timeout_s
    device = memory.device
    stream = device.stream()

    def connect() -> nccl.Communicator:
        device.enter()
        communicator = library.communicator(unique_id, len(members), position)
        try:
            _try(communicator, memory, stream, len(members), position, seconds)
        except BaseException:
            communicator.abort()
            raise
        return communicator

    communicator = bounded(connect, seconds, f"communicator of NCCL between ranks {list(members)}")
    name = f"NCCL {hashlib.blake2b(unique_id, digest_size=4).hexdigest()}"
    return Bridge(name, communicator, device, stream, members, position, session.settings.peer_timeout_s)


def _try(
    communicator: nccl.Communicator, memory: DeviceMemory, stream: Stream, size: int, position: int, seconds: float
) -> None:
    """Sends 64 KiB of this rank's number to every other rank. Raises HorovodInternalError if a rank's number does not
    arrive.
    """
    mine, theirs = memory.empty(_TRIAL_NBYTES, np.uint8), memory.empty(size * _TRIAL_NBYTES, np.uint8)
    mine[:] = np.full(_TRIAL_NBYTES, position + 1, np.uint8)
    memory.wait()
    others = [peer for peer in range(size) if peer != position]
    sends = [nccl.Piece(peer, mine.address, _TRIAL_NBYTES) for peer in others]
    receives = [nccl.Piece(peer, theirs.address + peer * _TRIAL_NBYTES, _TRIAL_NBYTES) for peer in others]
    communicator.exchange(sends, receives, stream.handle)
    event, end = stream.record(), time.monotonic() + seconds
    while not event.is_over():
        if (words := communicator.failure()) or time.monotonic() > end:
            raise HorovodInternalError(f"NCCL: a trial transfer failed: {words or f'not over after {seconds:.0f} s'}")
        time.sleep(1e-4)
    found = memory.host(theirs).reshape(size, _TRIAL_NBYTES)
    if any((found[peer] != peer + 1).any() for peer in others):
        raise HorovodInternalError("NCCL: a trial transfer has arrived as something else")
