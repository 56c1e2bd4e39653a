"""Every test is bounded (pytest-timeout in pyproject.toml) and leaves no session behind."""

from __future__ import annotations

import atexit
import faulthandler
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from ocomm import session as sessions
from tests.worlds import MPI_SIZE

# Ranks are threads, and each would have a team of Torch's threads of its own. Read when Torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With it ranks print a line in pieces, between which launchers put those of other ranks.
os.environ.pop("PYTHONUNBUFFERED", None)

# The same examples in every run, and a busy machine is no reason to fail. HYPOTHESIS_PROFILE=default takes new ones.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Those of `make fuzz`, by the seed that it prints.
settings.register_profile("fuzz", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

if MPI_SIZE:
    # mpirun ends a rank that hangs with this signal, once another has given up on it: say where it was.
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    # Ranks end at the same moment, and would stumble over each other when pytest removes what older runs have left.
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="ocomm-tests-")
    atexit.register(shutil.rmtree, os.environ["PYTEST_DEBUG_TEMPROOT"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _no_session_left_behind() -> Iterator[None]:
    yield
    assert not sessions.current().is_initialized, "a test left its session running"


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is marked ``short`` the other cases are ``long``."""
    marked, short = set(), set()
    for item in items:
        if marker := item.get_closest_marker("short"):
            test, _, case = item.nodeid.partition("[")
            marked.add(test)
            if any(part in case for part in marker.args):
                short.add(test)
            else:
                item.add_marker(pytest.mark.long)
    if (wrong := marked - short) and not any("[" in chosen for chosen in config.args):
        raise pytest.UsageError(f"no case has what its mark `short` says: {sorted(wrong)}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Under mpirun a test for another number of ranks is skipped by ``run_ranks``, and here before it works out what to
    expect."""
    parameters = getattr(item, "callspec", None)
    if not MPI_SIZE or parameters is None:
        return
    for name in ("ranks", "size", "hosts"):
        value = parameters.params.get(name, MPI_SIZE)
        wanted = len(value) if isinstance(value, str) else value
        if wanted != MPI_SIZE and isinstance(wanted, int):
            pytest.skip(reason=f"needs {wanted} ranks, this run has {MPI_SIZE}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Under mpirun the job ends in order: MPI reports a rank that ends without this as a failure."""
    if MPI_SIZE:
        from ocomm.transport import mpi

        mpi.finalize()
