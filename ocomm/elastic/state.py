"""States of an elastic job: what training goes on from, in this process's memory and on disk."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from typing import IO, Any

import numpy as np

from ocomm import api
from ocomm import session as sessions
from ocomm.elastic import plain
from ocomm.elastic.commits import Part
from ocomm.elastic.keeper import Keeper
from ocomm.errors import HostsUpdatedInterrupt
from ocomm.operations import ProcessSet, global_process_set


class State:
    """What a training function starts from: ``save``, ``restore`` and ``sync`` are a subclass's.

    ``process_set``: the ranks that have the state together; its calls are collective over them.
    """

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        self.commits = 0
        self.process_set = process_set
        #: What was done when a commit was last restored: "commit", "ranks", "lost_ranks", and what a subclass adds.
        self.resumed: dict[str, Any] | None = None
        self._keeper: Keeper | None = None  # while ``run`` runs a state that is kept on disk
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._news: list[bool] = []  # whether ranks were added, once per message

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Calls these after every reset, when the number of ranks may be another: to set a learning rate, say."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """After the job was joined again: resets, and calls the registered callbacks."""
        self.reset()
        for callback in self._callbacks:
            callback()

    def on_hosts_updated(self, added: bool = True) -> None:
        """The hosts of the job have changed; all ranks hear of it at the next commit. From any thread."""
        with self._lock:
            self._news.append(added)

    def commit(self) -> None:
        """Saves when all ranks have come this far, so that a failure costs at most what comes after. Collective.

        Then HostsUpdatedInterrupt as in ``check_host_updates``.
        """
        interrupt = self._hear()
        self._keep()
        if interrupt:
            raise interrupt

    def check_host_updates(self) -> None:
        """HostsUpdatedInterrupt on all ranks if the hosts have changed, as heard by any. Collective.

        Where the processes end for that it is a commit: others go on from here.
        """
        interrupt = self._hear()
        if interrupt:
            if interrupt.relaunch:
                self._keep()
            raise interrupt

    def _keep(self) -> None:
        self.share()
        self.save()
        self.commits += 1
        if self._keeper is not None:
            self._keeper.write()

    def _hear(self) -> HostsUpdatedInterrupt | None:
        """What all ranks are to raise if hosts have changed, as heard by any.

        Ranks of other sets that have left to join again count: nobody joins until all do.
        """
        session = sessions.current()
        with self._lock:
            news, self._news = self._news, []
        relaunch = session.supervisor is not None and session.supervisor.hosts_changed
        heard = np.array([bool(news) or session.is_rejoined, any(news), relaunch], np.uint8)
        changed, added, relaunch = api.allreduce(
            heard, name="elastic.check_host_updates", op=api.Max, process_set=self.process_set
        ).astype(bool)
        return HostsUpdatedInterrupt(not added and not relaunch, bool(relaunch)) if changed or relaunch else None

    def save(self) -> None:
        """Keeps a copy in this process's memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Takes over the first rank's, and saves. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """After the job was joined again, before ``sync``."""

    def share(self) -> None:
        """Before a commit: makes equal what only some ranks know and all can have. Collective."""


class ObjectState(State):
    """Picklable values as attributes: ``state = ObjectState(epoch=0); state.epoch += 1``.

    Kept on disk at each commit where the job has a folder for that (see ``docs/elastic.md``). A subclass for other
    values says what is equal on all ranks at a commit (``replicated``, ``load_replicated``), what only a rank knows
    (``own``, ``load_own``), and how a framework's tensors are written (``codec``).
    """

    #: Of values other than numbers, strings, NumPy's arrays and lists, tuples, sets and dicts of such.
    codec = plain.Codec()

    def __init__(self, process_set: ProcessSet = global_process_set, **values: Any) -> None:
        super().__init__(process_set)
        self._names = list(values)
        #: The last commit, in memory: copies of ``replicated()`` and ``own()``.
        self.saved: tuple[Any, Any] = (None, None)
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    def save(self) -> None:
        """Keeps deep copies in this process's memory."""
        self.saved = copy.deepcopy(self.replicated()), copy.deepcopy(self.own())

    def restore(self) -> None:
        """Goes back to the copies. Collective if ranks have parts of their own."""
        replicated, own = self.saved
        self.load_replicated(copy.deepcopy(replicated))
        if own is not None:
            rank, size = self.process_set.rank(), self.process_set.size()
            self.load_own(Part(lambda rank: own, (rank,), size, rank, size, alone=True))

    def sync(self) -> None:
        """Takes over the first rank's values, and saves. Collective."""
        self.load_replicated(self.from_first(self.replicated()))
        self.save()

    def replicated(self) -> dict[str, Any]:
        """What is equal on all ranks at a commit; may share memory with the state."""
        return {name: getattr(self, name) for name in self._names}

    def load_replicated(self, value: dict[str, Any]) -> None:
        """The inverse; ``value`` may be kept."""
        for name, item in value.items():
            setattr(self, name, item)

    def own(self) -> Any:
        """What only this rank knows, None for nothing."""
        return None

    def load_own(self, part: Part) -> None:
        """The inverse, after ``load_replicated``. Collective. What was done goes into ``part.reports``."""

    def dump(self, value: Any, file: IO[bytes]) -> None:
        """Writes what ``replicated`` or ``own`` returned; of that, only values of types unknown to us are pickled.

        Args:
            value: What is written.
            file: Open for writing, at the place where it begins.

        Raises:
            OSError: It cannot be written.
        """
        plain.dump(value, file, self.codec)

    def load(self, file: IO[bytes]) -> Any:
        """Returns what ``dump`` has written. Runs code where ``dump`` has pickled a value, and nowhere else.

        Args:
            file: Open for reading, at the place where ``dump`` began. It ends where ``dump`` ended, and its folder
                and checksum have been looked at.
        """
        return plain.load(file, self.codec)

    def from_first(self, value: Any) -> Any:
        """The value of the first rank of the process set, pickled. Collective."""
        return api.broadcast_object(value, self.process_set.ranks[0], "elastic.sync", self.process_set)
