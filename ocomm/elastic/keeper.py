"""Keeps the commits of one state on disk, and brings the ranks back to one of them together."""

from __future__ import annotations

import io
import logging
import secrets
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ocomm import api
from ocomm import session as sessions
from ocomm.elastic.commits import Choice, Folder, Label, Part, choose
from ocomm.errors import CheckpointError
from ocomm.session import Session

if TYPE_CHECKING:
    from ocomm.elastic.state import ObjectState

_log = logging.getLogger("ocomm")
#: States of a session that have been kept, by process set: the first of a set is number 1, as in a run before.
_counts: weakref.WeakKeyDictionary[Session, dict[int, int]] = weakref.WeakKeyDictionary()


class Keeper:
    """Of a state that ``run`` runs. Collective over the state's process set, as are all its calls."""

    def __init__(self, state: ObjectState) -> None:
        self.state = state
        session = sessions.current()
        self.set = state.process_set
        number = self.set.number(session)
        counts = _counts.setdefault(session, {})
        counts[number] = counts.get(number, 0) + 1
        self.folder = Folder(session.settings.elastic_folder, f"set{number}.{counts[number]}")
        self.label = Label(session.settings.elastic_generation, 0, "0000")
        self._warned = False

    @property
    def _places(self) -> list[int]:
        """The number of each rank's host, in the order of their first ranks."""
        topology = sessions.current().require_topology()
        hosts = [topology.hosts[rank] for rank in self.set.ranks]
        order = list(dict.fromkeys(hosts))
        return [order.index(host) for host in hosts]

    @property
    def _is_writer(self) -> bool:
        """Is this the set's first rank on its host?"""
        places, me = self._places, self.set.rank()
        return places.index(places[me]) == me

    # Writing

    def write(self) -> None:
        """What the state has saved in memory.

        What cannot be written is a warning: a full disk must not keep anyone from training.
        """
        session = sessions.current()
        state, folder = self.state, self.folder
        label = Label(self.label.generation, state.commits, self.label.token)
        replicated, own = state.saved
        try:
            if own is not None:
                me = self.set.rank()
                path = folder.of_rank(label, me, self.set.size(), self._places[me])
                folder.write(path, lambda file: state.dump(own, file))
            if self._is_writer:
                folder.write(folder.replicated(label), lambda file: state.dump(replicated, file))
                folder.prune()
        except OSError as error:
            if not self._warned:
                self._warned = True
                rank = session.require_topology().rank
                _log.warning("rank %d cannot keep commit %d on disk: %s", rank, label.number, error)
            return
        if session.supervisor is not None:
            session.supervisor.say("commit", number=label.number)

    # Going back

    def resume(self) -> bool:
        """Loads the newest commit that the ranks have together; False if there is none."""
        state = self.state
        mine = self.folder.listing()
        listings = api.allgather_object(mine, "elastic.listings", self.set)
        choice = choose(listings)
        generation = max([self.label.generation, *(label.generation + 1 for each in listings for label in each)])
        token = api.broadcast_object(secrets.token_hex(2), self.set.ranks[0], "elastic.token", self.set)
        self.label = Label(generation, 0, token)
        if choice is None:
            return False
        state.load_replicated(self._replicated(choice, len(listings)))
        part = self._parts(choice, len(listings))
        if part.size:
            state.load_own(part)
        state.commits = choice.label.number
        state.save()
        state.resumed = {
            "commit": choice.label.number,
            "ranks": choice.size,
            "lost_ranks": choice.lost,
            **part.reports,
        }
        api.barrier(self.set)  # nobody reads any more
        if self._is_writer:
            self.folder.forget_after(choice.label)
        if self.set.rank() == 0:
            _log.warning("goes on from commit %d%s", choice.label.number, _describe(choice, self.set.size()))
        return True

    def _replicated(self, choice: Choice, size: int) -> Any:
        path = self.folder.replicated(choice.label)
        if len(choice.replicated) == size:
            return self._read(path)
        root = choice.replicated[0]
        data = self._send(path.read_bytes() if self.set.rank() == root else b"", root, "elastic.replicated")
        return self.state.load(io.BytesIO(data))

    def _parts(self, choice: Choice, size: int) -> Part:
        """The ranks' parts, once those that a host lacks have been brought there."""
        me, label, folder = self.set.rank(), choice.label, self.folder
        ranks = tuple(sorted(choice.sources))
        # With ranks as before each needs its own, but what stands in for a lost one is made of all others.
        everything = choice.size != size or choice.places != dict(enumerate(self._places))
        for rank in ranks:
            needed: Iterable[int] = range(size) if everything else [rank]
            sources = choice.sources[rank]
            if set(needed) <= set(sources):
                continue
            path = folder.of_rank(label, rank, choice.size, choice.places[rank])
            data = self._send(path.read_bytes() if me == sources[0] else b"", sources[0], f"elastic.part.{rank}")
            if self._is_writer and not path.exists():
                folder.write(path, lambda file, data=data: file.write(data))  # type: ignore[misc]
        api.barrier(self.set)

        last: dict[int, Any] = {}  # several readers ask for one rank's part after the other

        def read(rank: int) -> Any:
            if rank not in choice.sources:
                return None
            if rank not in last:
                last.clear()
                last[rank] = self._read(folder.of_rank(label, rank, choice.size, choice.places[rank]))
            return last[rank]

        return Part(read, ranks, choice.size, me, size)

    def _read(self, path: Any) -> Any:
        try:
            with open(path, "rb") as file:
                return self.state.load(file)
        except Exception as error:  # what the readers of a damaged file raise, they do not say
            raise CheckpointError(f"the commit {path} cannot be read: {type(error).__name__}: {error}") from error

    def _send(self, data: bytes, root: int, name: str) -> bytes:
        """``data`` of the set's rank ``root``, on all ranks."""
        world_rank = self.set.ranks[root]
        nbytes = np.array([len(data)], np.int64)
        api.broadcast_(nbytes, world_rank, f"{name}.nbytes", self.set)
        buffer = np.empty(int(nbytes[0]), np.uint8)
        if self.set.rank() == root:
            buffer[:] = np.frombuffer(data, np.uint8)
        api.broadcast_(buffer, world_rank, name, self.set)
        return buffer.tobytes()


def _describe(choice: Choice, size: int) -> str:
    words = f" with {size} ranks"
    if choice.size not in (0, size):
        words += f", which {choice.size} had"
    if choice.lost:
        words += f"; what only rank(s) {choice.lost} knew is lost"
    return words
