"""The workload as a real job, in which a call of one rank fails. Run as a script this is one rank of it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ocomm
from ocomm.config import VARIABLES
from ocomm.transport import mpi
from ocomm.types import Settings
from tests.cluster.jobs import run_job
from tests.faults import workloads, world
from tests.faults.allocations import Allocation, Allocations
from tests.faults.calls import Calls, Fault
from tests.faults.layers import FaultyMpi, FaultyTransport
from tests.faults.trail import Trail, differences

PATIENCE_S = 8.0
#: Seconds after which a job hangs.
DEADLINE_S = 200.0
#: Preloads into the ranks alone, not into the launcher.
_START = """
import os, sys
os.environ["LD_PRELOAD"] = os.environ["FAULTS_PRELOAD"]
os.execv(sys.executable, [sys.executable, "-m", "tests.faults.mpirun"])
"""


@dataclass(frozen=True)
class Chosen:
    """A fault of rank ``victim``. ``offset`` is that of an allocation; -1 for a call that Python sees."""

    victim: int
    fault: Fault
    offset: int = -1


@dataclass
class Told:
    """What one rank has written: its steps, its state when it ended, its error, how often it has called what."""

    steps: list[str]
    state: str | None = None
    has_ended: bool = False
    error: str | None = None
    is_named: bool = True
    counts: Mapping[str, int] | None = None
    allocations: Mapping[str, tuple[int, int]] | None = None
    has_failed: bool = False


def job(preload: Path, chosen: Chosen | None = None) -> tuple[list[Told], int | None]:
    """Runs a job, and returns what its ranks have written, and its exit status; None if it had to be ended."""
    # A rank that starts late on a busy machine is not what is tested.
    wanted = replace(workloads.patient(PATIENCE_S), start_timeout_s=60.0)
    settings = {
        f"OCOMM_{name}": str(getattr(wanted, field))
        for name, (field, _, _) in VARIABLES.items()
        if getattr(wanted, field) != getattr(Settings(), field)
    }
    said = "" if chosen is None else json.dumps({**asdict(chosen), "fault": asdict(chosen.fault)})
    with tempfile.TemporaryDirectory() as folder:
        environ = {"FAULTS_FOLDER": folder, "FAULTS_CHOSEN": said, "FAULTS_PRELOAD": str(preload), **settings}
        try:
            code = run_job(workloads.RANKS, _START, timeout_s=DEADLINE_S, OMP_NUM_THREADS="1", **environ)
            status: int | None = code.returncode
        except subprocess.TimeoutExpired:
            status = None
        return [_read(Path(folder) / f"{rank}") for rank in range(workloads.RANKS)], status


def _read(path: Path) -> Told:
    told = Told([])
    for line in path.read_text().splitlines() if path.exists() else ():
        number, value = json.loads(line)
        if isinstance(number, int):
            if number >= 0:
                told.steps.append(value)
            else:
                told.state, told.has_ended = value or None, True
        else:
            setattr(told, number, value)
    return told


def problems(clean: list[Told], ranks: list[Told], status: int | None, victim: int) -> list[str]:
    """Returns how a job with a fault breaks its promises."""
    found = ["the job hangs"] if status is None else []
    for number, (rank, whole) in enumerate(zip(ranks, clean, strict=True)):
        has_ended_well = rank.error is None and rank.has_ended
        found += differences(number, whole.steps, rank.steps, rank.state, has_ended_well)
        if not rank.is_named:
            found.append(f"rank {number}: an error without a name, {rank.error}")
    is_whole = all(len(rank.steps) == len(whole.steps) for rank, whole in zip(ranks, clean, strict=True))
    if status == 0 and not is_whole:
        found.append("the job has ended well, and not all of its ranks have done everything")
    if status not in (0, None) and ranks[victim].error is None and not is_whole and not any(r.error for r in ranks):
        found.append(f"the job has ended with status {status}, and no rank has raised")
    return found


def _rank_main() -> None:
    chosen: dict[str, Any] = json.loads(os.environ["FAULTS_CHOSEN"] or "null") or {"victim": -1}
    number = int(os.environ["OMPI_COMM_WORLD_RANK"])
    is_victim = number == chosen["victim"]
    fault = Fault(**chosen["fault"]) if is_victim else None
    calls = Calls(fault)
    allocations = Allocations()
    if is_victim and chosen["offset"] >= 0 and fault is not None:
        allocations.begin((Allocation(chosen["offset"], fault.site), fault.number, fault.lasting))
    else:
        allocations.begin()
    with (Path(os.environ["FAULTS_FOLDER"]) / f"{number}").open("w", buffering=1) as out:

        def write(what: int | str, value: Any) -> None:
            print(json.dumps([what, value]), file=out, flush=True)

        world_of, table_of, tables = mpi.open_world, mpi.abi, []

        def table() -> Any:
            tables.append(FaultyMpi(table_of(), calls))
            return tables[-1]

        def faulty_world(*given: Any, **named: Any) -> Any:
            return FaultyTransport(world_of(*given, **named), calls)

        mpi.open_world = faulty_world
        mpi.abi = table
        trail = Trail(write)
        try:
            ocomm.init()
            workloads.everything(trail)
            ocomm.shutdown()
        except BaseException as error:
            write("error", repr(error))
            write("is_named", not world.unnamed(error, None))
            raise
        finally:
            trail.end()
            write("counts", calls.counts)
            write("allocations", {each.name: (each.offset, n) for each, n in allocations.counts().items()})
            write("has_failed", calls.has_failed or allocations.has_failed)
            out.flush()


if __name__ == "__main__":
    _rank_main()
