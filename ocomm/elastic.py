"""Training that goes on after a failure: states that are committed, restored, synchronized, and the loop around them.

``run`` calls the training function again and again until it returns. When a collective fails, every rank restores its
last commit, leaves the job, joins it again and synchronizes; ranks that raise something else end the job as always.
All of this happens inside the processes that are there: whoever starts lost ones again is no concern of this module.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ocomm import api
from ocomm import session as sessions
from ocomm.errors import HorovodInternalError, HostsUpdatedInterrupt

_log = logging.getLogger("ocomm")
#: Failures in a row without a commit in between, after which the error is raised: it would only come again.
_LIMIT = 3


class State:
    """What a training function starts from: ``save``, ``restore`` and ``sync`` are a subclass's."""

    def __init__(self) -> None:
        self.commits = 0
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
        changed, added = self._hear()
        self.save()
        self.commits += 1
        if changed:
            raise HostsUpdatedInterrupt(skip_sync=not added)

    def check_host_updates(self) -> None:
        """HostsUpdatedInterrupt on all ranks if the hosts have changed, as heard by any. Collective."""
        changed, added = self._hear()
        if changed:
            raise HostsUpdatedInterrupt(skip_sync=not added)

    def _hear(self) -> tuple[bool, bool]:
        """Whether hosts have changed, and whether some were added, as heard by any rank."""
        with self._lock:
            news, self._news = self._news, []
        heard = np.array([bool(news), any(news)], np.uint8)
        changed, added = api.allreduce(heard, name="elastic.check_host_updates", op=api.Max)
        return bool(changed), bool(added)

    def save(self) -> None:
        """Keeps a copy in this process's memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Takes over rank 0's, and saves. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """After the job was joined again, before ``sync``."""


class ObjectState(State):
    """Picklable values as attributes: ``state = ObjectState(epoch=0); state.epoch += 1``."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._names = list(values)
        self._saved: dict[str, Any] = {}
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    def save(self) -> None:
        """Keeps deep copies in this process's memory."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Goes back to the copies."""
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Takes over rank 0's values, and saves. Collective."""
        values = {name: getattr(self, name) for name in self._names}
        for name, value in api.broadcast_object(values, 0, "elastic.sync").items():
            setattr(self, name, value)
        self.save()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates ``func(state, ...)`` so that it is called again, from the last commit, after a collective failed.

    Before each call the state is synchronized, except after a HostsUpdatedInterrupt whose ``skip_sync`` is set. The
    third failure in a row without a commit in between is raised.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        failures, skip_sync = 0, False
        while True:
            commits = state.commits
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                failures = 1 if state.commits > commits else failures + 1
                if failures >= _LIMIT:
                    raise
                _log.warning("%s: %s Going on from commit %d.", type(error).__name__, error, state.commits)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            _rejoin()
            state.on_reset()

    return wrapper


def _rejoin() -> None:
    """Leaves the job and joins it again, with the process sets that there were."""
    known = sessions.current().set_ranks
    process_sets = [ranks for number, ranks in sorted(known.items()) if number]
    api.shutdown()
    api.init(process_sets=process_sets)
