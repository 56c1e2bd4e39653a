"""States of an elastic job, from which training continues, in this process's memory and on disk."""

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
    """Base class of the state from which a training function starts. Subclasses define ``save``, ``restore`` and
    ``sync``.

    Args:
        process_set: The ranks that share the state; collective methods are collective over them.
    """

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        self.commits = 0
        self.process_set = process_set
        #: A report on the last restored commit: "commit", "ranks", "lost_ranks", and what a subclass adds.
        self.resumed: dict[str, Any] | None = None
        self._keeper: Keeper | None = None  # set while ``run`` runs a state that is kept on disk
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._news: list[bool] = []  # for each message about new hosts: whether ranks were added

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Registers functions that are called after every reset, when the number of ranks may have changed: to set a
        learning rate, for instance.
        """
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Resets, and calls the registered callbacks, after the job was joined again."""
        self.reset()
        for callback in self._callbacks:
            callback()

    def on_hosts_updated(self, added: bool = True) -> None:
        """Notes that the hosts of the job have changed; all ranks are told at the next commit. From any thread."""
        with self._lock:
            self._news.append(added)

    def commit(self) -> None:
        """Saves the state once all ranks have come this far, so that a failure only costs what comes later. Collective.

        Raises:
            HostsUpdatedInterrupt: The hosts of the job have changed; raised on all ranks.
        """
        interrupt = self._hear()
        self._keep()
        if interrupt:
            raise interrupt

    def check_host_updates(self) -> None:
        """Checks whether the hosts have changed. Collective.

        Raises:
            HostsUpdatedInterrupt: Some rank has heard that they have; raised on all ranks. If the processes end for
                that, the state is committed first, and others continue from it.
        """
        interrupt = self._hear()
        if interrupt:
            if interrupt.relaunch:
                self._keep()
            elif interrupt.skip_sync:
                self.share()
            raise interrupt

    def _keep(self) -> None:
        self.share()
        self.save()
        self.commits += 1
        if self._keeper is not None:
            self._keeper.write()

    def _hear(self) -> HostsUpdatedInterrupt | None:
        """Returns the interrupt that all ranks raise if one has heard that hosts have changed, else None.

        Ranks of other sets that have left to join again count, too, because nobody can join before all ranks do.
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
        """Keeps a copy of the state in this process's memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Sets the state back to the copy of the last ``save``."""
        raise NotImplementedError

    def sync(self) -> None:
        """Replaces the state on all ranks by that of the first rank, and saves it. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called after the job was joined again, before ``sync``."""

    def share(self) -> None:
        """Makes equal what only some ranks have and all can have, before a commit or an interrupt that no sync follows.
        Collective.
        """


class ObjectState(State):
    """A state of picklable values, which are attributes: ``state = ObjectState(epoch=0); state.epoch += 1``.

    It is kept on disk at each commit if the job has a folder for that (``docs/elastic.md``). A subclass for other
    values says what is equal on all ranks at a commit (``replicated``, ``load_replicated``), what only a rank has
    (``own``, ``load_own``), and how a framework's tensors are written (``codec``).

    Args:
        process_set: The ranks that share the state.
        **values: The attributes and their first values.
    """

    #: Writes values other than numbers, strings, NumPy's arrays and lists, tuples, sets and dicts of these.
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
        """Keeps deep copies of the values in this process's memory. Raises InvalidRequestError, which names it, for a
        value that cannot be copied.
        """
        try:
            self.saved = copy.deepcopy(self.replicated()), copy.deepcopy(self.own())
        except Exception:
            for name in self._names:
                copied(name, getattr(self, name))  # raises for the one that cannot be copied
            raise

    def restore(self) -> None:
        """Sets the values back to the copies. Collective if ranks have parts of their own."""
        replicated, own = self.saved
        self.load_replicated(copy.deepcopy(replicated))
        if own is not None:
            rank, size = self.process_set.rank(), self.process_set.size()
            self.load_own(Part(lambda rank: own, (rank,), size, rank, size, alone=True))

    def sync(self) -> None:
        """Replaces the values on all ranks by those of the first rank, and saves them. Collective."""
        self.load_replicated(self.from_first(self.replicated()))
        self.save()

    def replicated(self) -> dict[str, Any]:
        """Returns what is equal on all ranks at a commit; may share memory with the state."""
        return {name: getattr(self, name) for name in self._names}

    def load_replicated(self, value: dict[str, Any]) -> None:
        """Loads the result of ``replicated``, which it may keep."""
        for name, item in value.items():
            setattr(self, name, item)

    def own(self) -> Any:
        """Returns what only this rank has, None for nothing."""
        return None

    def load_own(self, part: Part) -> None:
        """Loads the results of ``own`` after ``load_replicated``, and adds to ``part.reports`` what was done.
        Collective.
        """

    def dump(self, value: Any, file: IO[bytes]) -> None:
        """Writes the result of ``replicated`` or ``own``; only values of types that are not known here are pickled.

        Args:
            value: What is written.
            file: Open for writing, at the place where it begins.

        Raises:
            OSError: It cannot be written.
        """
        plain.dump(value, file, self.codec)

    def load(self, file: IO[bytes]) -> Any:
        """Returns what ``dump`` has written. Runs code only if ``dump`` has pickled a value.

        Args:
            file: Open for reading, at the place where ``dump`` began. It ends where ``dump`` ended, and its folder and
                checksum have been checked.
        """
        return plain.load(file, self.codec)

    def from_first(self, value: Any) -> Any:
        """Returns the value of the first rank of the process set; it travels pickled. Collective."""
        return api.broadcast_object(value, self.process_set.ranks[0], "elastic.sync", self.process_set)


def copied(name: str, value: Any) -> Any:
    """Returns a deep copy of the value ``name`` of a state. Raises InvalidRequestError if it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception as error:  # whatever the value's class raises
        raise plain.not_kept(name, value, error) from error
