"""The loop around an elastic training function.

``run`` calls the function again and again until it returns. When a collective fails, every rank leaves the job, joins
it again, goes back to its last commit and synchronizes. A rank that raises another error ends the job. A rank that dies
ends the whole job, because MPI does: then ``ocommrun --min-np`` starts the job again, and ``run`` continues from the
last commit on disk.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from ocomm import api
from ocomm import session as sessions
from ocomm.collectives.waiting import REJOINS
from ocomm.elastic.keeper import Keeper
from ocomm.elastic.state import ObjectState, State
from ocomm.errors import HorovodInternalError, HostsUpdatedInterrupt

_log = logging.getLogger("ocomm")
#: Number of failures in a row without a commit, after which the error is raised, because it would only come again.
_LIMIT = 3


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates ``func(state, ...)`` so that it is called again, from the last commit, after a collective failed.

    Before each call the state is synchronized, except after a HostsUpdatedInterrupt whose ``skip_sync`` is set. The
    third failure in a row without a commit is raised; so is the first one if a rank has died, raised or shut down.

    Under ``ocommrun --min-np`` the first call begins with the last commit of the job before. After a
    HostsUpdatedInterrupt the process ends, and ocommrun starts the next one on the new hosts.

    Args:
        func: The training function; its first argument is a ``State``.

    Returns:
        A function with the same arguments, which returns what ``func`` returns. All ranks of the state's process set
        call it.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        failures, skip_sync = 0, False
        session = sessions.current()
        session.require_topology()
        if session.settings.elastic_folder and isinstance(state, ObjectState):
            state._keeper = Keeper(state)
            if state._keeper.resume():
                state.on_reset()
        try:
            while True:
                commits = state.commits
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    failures = 1 if state.commits > commits else failures + 1
                    if failures >= _LIMIT or session.has_failed or session.left_for_good:
                        raise
                    _log.warning("%s: %s Going on from commit %d.", type(error).__name__, error, state.commits)
                    if not _rejoin():
                        raise
                    _go_back(state)
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    if interrupt.relaunch:
                        _leave(session)
                    skip_sync = interrupt.skip_sync
                    if not _rejoin():
                        raise
                state.on_reset()
        finally:
            state._keeper = None

    return wrapper


def _rejoin() -> bool:
    """Leaves the job and joins it again, with the same process sets. Returns False if some ranks have not left, or
    have left for good, for which init() would wait.
    """
    session = sessions.current()
    process_sets = [ranks for number, ranks in sorted(session.set_ranks.items()) if number]
    if not session.shutdown(why=REJOINS, goes_on=True) or session.left_for_good:
        return False
    api.init(process_sets=process_sets)
    return True


def _go_back(state: State) -> None:
    """Goes back to the last commit that all ranks have, in memory or else on disk. Collective."""
    numbers = api.allgather_object(state.commits, "elastic.commits", state.process_set)
    if len(set(numbers)) == 1:
        state.restore()
    elif state._keeper is None or not state._keeper.resume():
        raise HorovodInternalError(
            f"ranks {state.process_set.ranks} have different last commits in memory, {numbers}, and none on disk: one "
            "failed in the middle of commit()."
        )


def _leave(session: sessions.Session) -> None:
    """Ends this process in order; the supervisor starts a new one."""
    assert session.supervisor is not None
    session.supervisor.say("leave")
    session.shutdown(goes_on=True)
    sys.exit(0)
