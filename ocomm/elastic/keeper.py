"""Keeps the commits of one state on disk, and brings all ranks back to one of them."""

from __future__ import annotations

import contextlib
import logging
import secrets
import weakref
from collections.abc import Iterable, Iterator
from typing import IO, Any, Protocol

import numpy as np

from ocomm import api
from ocomm import session as sessions
from ocomm.elastic.commits import Choice, File, Held, Label, Listing, Part, choose, without
from ocomm.elastic.folder import Folder, received
from ocomm.errors import CheckpointError, OcommError, clause, in_words
from ocomm.operations import ProcessSet
from ocomm.session import Session

_log = logging.getLogger("ocomm")
#: Number of states of a session that have been kept, by process set. The first of a set is number 1 in every run.
_counts: weakref.WeakKeyDictionary[Session, dict[int, int]] = weakref.WeakKeyDictionary()


class Kept(Protocol):
    """The interface of a state whose commits are kept; ``state.ObjectState`` implements it."""

    process_set: ProcessSet
    #: Number of commits so far, and the number of the last one.
    commits: int
    #: The last commit, in memory: what is equal on all ranks, and what only this rank has, None for nothing.
    saved: tuple[Any, Any]
    #: A report on the last restored commit.
    resumed: dict[str, Any] | None

    def save(self) -> None:
        """Makes the current state the last commit in memory."""
        ...

    def dump(self, value: Any, file: IO[bytes]) -> None:
        """Writes a part of ``saved``."""
        ...

    def load(self, file: IO[bytes]) -> Any:
        """Returns what ``dump`` has written."""
        ...

    def load_replicated(self, value: dict[str, Any]) -> None:
        """Loads what is equal on all ranks."""
        ...

    def load_own(self, part: Part) -> None:
        """Loads what only single ranks have, after ``load_replicated``. Collective."""
        ...


class Keeper:
    """Keeps the commits of a state that ``run`` runs. Making one, and all its methods, are collective over the state's
    process set.
    """

    def __init__(self, state: Kept) -> None:
        self.state = state
        session = sessions.current()
        self.set = state.process_set
        number = self.set.number(session)
        counts = _counts.setdefault(session, {})
        counts[number] = counts.get(number, 0) + 1
        self.folder = Folder(session.settings.elastic_folder, f"set{number}.{counts[number]}")
        self.label = Label(session.settings.elastic_generation, 0, "0000")
        self._kept: Label | None = None  # the last commit of which this rank has written all of its part

    @property
    def _places(self) -> list[int]:
        """The number of each rank's host, in the order of their first ranks."""
        topology = sessions.current().require_topology()
        hosts = [topology.hosts[rank] for rank in self.set.ranks]
        order = list(dict.fromkeys(hosts))
        return [order.index(host) for host in hosts]

    @property
    def _is_writer(self) -> bool:
        """True if this is the set's first rank on its host, which writes the replicated part."""
        places, me = self._places, self.set.rank()
        return places.index(places[me]) == me

    # Writing

    def write(self) -> None:
        """Writes what the state has saved in memory.

        If it cannot be written there is a warning at every commit, because a full disk must not end the training. The
        same holds where another job has begun to use the folder, which would remove what is written.
        """
        session = sessions.current()
        state, folder = self.state, self.folder
        label = Label(self.label.generation, state.commits, self.label.token)
        replicated, own = state.saved
        try:
            if any(self.label.is_displaced_by(other) for other in folder.listing()):
                _log.warning(
                    "rank %d does not keep commit %d: another job keeps its own in %s, and removes those of this one. "
                    "Training goes on, but would go on from the other's after a failure. Let each job have an "
                    "OCOMM_ELASTIC_FOLDER of its own.",
                    session.require_topology().rank,
                    label.number,
                    folder.path,
                )
                return
            if own is not None:
                me = self.set.rank()
                folder.write(folder.of_rank(label, me, self.set.size(), self._places[me]), lambda f: state.dump(own, f))
            if self._is_writer:
                folder.write(folder.replicated(label), lambda f: state.dump(replicated, f))
        except OSError as error:
            rank = session.require_topology().rank
            _log.warning(
                "rank %d cannot keep commit %d in %s: %s. Training goes on; the last commit that this rank has kept "
                "is %s.",
                rank,
                label.number,
                folder.path,
                error.strerror or error,
                self._kept.number if self._kept else "none",
            )
            self._prune()  # else parts of commits that could not be kept would accumulate
            return
        self._kept = label
        self._prune()
        # Without the replicated part there is nothing to go back to.
        if session.supervisor is not None and self._is_writer:
            session.supervisor.say("commit", number=label.number, state=folder.stem)

    def _prune(self) -> None:
        if self._is_writer:
            try:
                self.folder.prune()
            except OSError as error:
                _log.info("old commits stay in %s: %s", self.folder.path, error)

    # Going back

    def resume(self) -> bool:
        """Loads the newest intact commit that the ranks have together. Returns False if there is no commit at all.

        Raises:
            CheckpointError: On all ranks, if a rank's folder is not its user's alone or no commit in it is intact; on
                some ranks, if a commit whose checksum is right cannot be loaded, as that of another model, or its files
                cannot be handled.
        """
        try:
            return self._resume()
        except OSError as error:
            rank = sessions.current().require_topology().rank
            raise CheckpointError(
                f"rank {rank} cannot go back to a commit in {self.folder.path}: {error.strerror or error}"
            ) from error

    def _resume(self) -> bool:
        state = self.state
        listings = self._listings()
        generation = max([self.label.generation, *(label.generation + 1 for each in listings for label in each)])
        token = api.broadcast_object(secrets.token_hex(2), self.set.ranks[0], "elastic.token", self.set)
        self.label = Label(generation, 0, token)
        choice = self._choose(listings)
        if choice is None:
            supervisor = sessions.current().supervisor
            if supervisor is not None and self.set.rank() == 0:
                supervisor.say("anew", state=self.folder.stem, folder=str(self.folder.path))
            return False
        replicated = self._replicated(choice, len(listings))
        with self._loading(choice.label):
            state.load_replicated(replicated)
        part = self._parts(choice, len(listings))
        if part.size:
            with self._loading(choice.label):
                state.load_own(part)
        state.commits = choice.label.number
        self._kept = choice.label
        state.save()
        state.resumed = {
            "commit": choice.label.number,
            "ranks": choice.size,
            "lost_ranks": choice.lost,
            **part.reports,
        }
        api.barrier(self.set)  # after this no rank reads any more
        if self._is_writer:
            self.folder.forget_after(choice.label)
        if self.set.rank() == 0:
            _log.warning("goes on from commit %d%s", choice.label.number, _describe(choice, self.set.size()))
        return True

    def _listings(self) -> list[Listing]:
        """Returns what each rank sees in its folder. Raises CheckpointError on all ranks if one must not use its
        own.
        """
        mine: Listing = {}
        problem = ""
        try:
            mine = self.folder.listing()
        except OSError as error:
            problem = f"{self.folder.path}: {error.strerror}" if error.strerror else str(error)
        said = api.allgather_object((mine, problem), "elastic.listings", self.set)
        for rank, (_, why) in zip(self.set.ranks, said, strict=True):
            if why:
                raise CheckpointError(f"rank {rank} cannot use its elastic commits: {why}")
        return [listing for listing, _ in said]

    def _choose(self, listings: list[Listing]) -> Choice | None:
        """Returns the newest commit of which everything that the ranks would read is intact; None if there is no
        commit.
        """
        suspects: set[File] = set()
        damaged: dict[tuple[int, File], str] = {}
        choice = choose(listings)
        last = choice.label.number if choice else 0
        while choice is not None:
            # A file that one rank has found damaged counts as damaged on all ranks that have it, often on the same
            # disk.
            names = self._names(listings[self.set.rank()], suspects | self._needed(choice))
            mine = {file: why for file, name in names.items() if (why := self.folder.damage(name))}
            found = {
                (who, file): f"{why} (rank {self.set.ranks[who]})"
                for who, each in enumerate(api.allgather_object(mine, "elastic.damage", self.set))
                for file, why in each.items()
            }
            if found.keys() <= damaged.keys():
                break
            damaged |= found
            suspects |= {file for _, file in found}
            choice = choose(
                [without(each, {file for who, file in damaged if who == at}) for at, each in enumerate(listings)]
            )
        if damaged:
            # One rank's words for each file.
            reasons = {self._title(file): why for (_, file), why in reversed(damaged.items())}
            text = "; ".join(f"{title}: {why}" for title, why in sorted(reasons.items()))
            if choice is None:
                raise CheckpointError(
                    f"no commit in {self.folder.path} can be used: {text}. Remove what begins with {self.folder.stem} "
                    "from it to start anew, or name another folder."
                )
            if self.set.rank() == 0:
                _log.warning("commit %d in %s is damaged: %s.", last, self.folder.path, text)
        return choice

    def _title(self, file: File) -> str:
        label, rank = file
        return self.folder.replicated(label) if rank is None else f"{self.folder.stem}-{label}, the part of rank {rank}"

    def _names(self, listing: Listing, files: Iterable[File]) -> dict[File, str]:
        """Returns the names of those of ``files`` that this rank has."""
        names: dict[File, str] = {}
        for label, rank in files:
            held = listing.get(label, Held())
            if rank is None and held.replicated:
                names[label, None] = self.folder.replicated(label)
            elif rank is not None and rank in held.places:
                names[label, rank] = self.folder.of_rank(label, rank, held.size, held.places[rank])
        return names

    def _needed(self, choice: Choice) -> set[File]:
        """Returns the files that this rank reads or sends when all ranks go back to ``choice``."""
        me, size = self.set.rank(), self.set.size()
        needed: set[File] = set()
        if me in (choice.replicated if len(choice.replicated) == size else choice.replicated[:1]):
            needed.add((choice.label, None))
        everything = self._needs_everything(choice)
        for rank, sources in choice.sources.items():
            if me == sources[0] or (me in sources and (everything or me == rank)):
                needed.add((choice.label, rank))
        return needed

    def _needs_everything(self, choice: Choice) -> bool:
        """Returns True if every rank reads all parts.

        With as many ranks as before, each needs only its own, unless a part is lost: its replacement is made from all
        others.
        """
        return choice.size != self.set.size() or choice.places != dict(enumerate(self._places))

    def _replicated(self, choice: Choice, size: int) -> Any:
        name = self.folder.replicated(choice.label)
        if len(choice.replicated) == size:
            return self._read(name)
        root = choice.replicated[0]
        data = self._send(self.folder.copy(name) if self.set.rank() == root else b"", root, "elastic.replicated")
        with self._reading(name):
            return self.state.load(received(data, name))

    def _parts(self, choice: Choice, size: int) -> Part:
        """Returns the ranks' parts, after those that a host lacks have been sent there."""
        me, label, folder = self.set.rank(), choice.label, self.folder
        ranks = tuple(sorted(choice.sources))
        everything = self._needs_everything(choice)
        for rank in ranks:
            needed: Iterable[int] = range(size) if everything else [rank]
            sources = choice.sources[rank]
            if set(needed) <= set(sources):
                continue
            name = folder.of_rank(label, rank, choice.size, choice.places[rank])
            data = self._send(folder.copy(name) if me == sources[0] else b"", sources[0], f"elastic.part.{rank}")
            if self._is_writer and me not in sources:
                folder.write_copy(name, data)
        api.barrier(self.set)

        last: dict[int, Any] = {}  # the part that was read last, which several readers ask for in turn

        def read(rank: int) -> Any:
            if rank not in choice.sources:
                return None
            if rank not in last:
                last.clear()
                last[rank] = self._read(folder.of_rank(label, rank, choice.size, choice.places[rank]))
            return last[rank]

        return Part(read, ranks, choice.size, me, size)

    def _read(self, name: str) -> Any:
        with self._reading(name), self.folder.payload(name) as file:
            return self.state.load(file)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # it is not known what readers of states raise
            raise CheckpointError(f"the commit {self.folder.path / name} cannot be read: {in_words(error)}") from error

    @contextlib.contextmanager
    def _loading(self, label: Label) -> Iterator[None]:
        """Names the commit where the state does not take it, as that of another model or with other values."""
        try:
            yield
        except Exception as error:  # it is not known what models and optimizers raise
            if isinstance(error, OcommError) and not isinstance(error, CheckpointError):
                raise  # a collective has failed
            why = clause(error) if isinstance(error, CheckpointError) else in_words(error)
            raise CheckpointError(
                f"the state does not take commit {label.number} in {self.folder.path}: {why}. If that commit "
                "is of another model, script or optimizer, name another folder, or remove what begins with "
                f"{self.folder.stem} from it to start anew."
            ) from error

    def _send(self, data: bytes, root: int, name: str) -> bytes:
        """Returns ``data`` of the set's rank ``root``, on all ranks."""
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
