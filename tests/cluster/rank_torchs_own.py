"""A rank that runs test methods of Torch's ``distributed_test._DistTestBase`` on one backend.

    rank_torchs_own.py BACKEND FOLDER METHOD ...

Torch's class starts new processes for each method. Here the ranks of one job run one method after the other, each in a
new process group. A rank writes to ``FOLDER/rank R`` when a method begins and what becomes of it. It ends the job if a
method has failed and some rank does not come to its end, or if a method takes longer than ``DEADLINE_S``.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path

RANK, SIZE = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
#: Seconds after which a method hangs; the longest takes 10 on a busy machine.
DEADLINE_S = 60.0
#: Seconds for which a rank on which a method has failed waits for the others to end it.
PATIENCE_S = 3.0
GROUP_TIMEOUT_S = 30

# When its methods are defined, Torch leaves out most of them for backends that it does not know. So the name is gloo's.
os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(SIZE), "RANK": str(RANK), "INIT_METHOD": "file:///"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.common_distributed import TEST_SKIPS  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

if SIZE > 2:
    # Methods with a group of ranks 1 and 2 are skipped on less than 8 ranks unless this says MPI.
    os.environ["BACKEND"] = "mpi"
#: The start of the reasons for which gloo has no such methods, and backend "ocomm" has.
FOR_MPI = "Only MPI supports"


class StandIn(str):
    """A backend's name that also equals "gloo": methods compare it when they run."""

    def __eq__(self, other: object) -> bool:
        return other in (str(self), "gloo")

    __hash__ = str.__hash__


class OnThisRank(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Torch's methods. ``_run`` makes a process group and runs one of them in it."""

    place: Path  # a folder of the method
    barriers = 0

    def _barrier(self, wait_for: int | None = None, timeout: float = DEADLINE_S) -> None:
        """As Torch's, which goes through files, too. Raises RuntimeError if the method has failed on another rank."""
        self.barriers += 1
        (self.place / f"barrier {self.barriers} {RANK}").touch()
        while len([*self.place.glob(f"barrier {self.barriers} *")]) < (wait_for or dist.get_world_size()):
            if (self.place / "failed").exists():
                raise RuntimeError("the method has failed on another rank")
            time.sleep(0.01)


def outcome(method: str) -> tuple[str, str]:
    """Runs a method on this rank. Returns "passed", "failed" or "skipped", and why."""
    function = getattr(OnThisRank, method)
    if getattr(function, "__unittest_skip__", False) and not function.__unittest_skip_why__.startswith(FOR_MPI):
        return "skipped", function.__unittest_skip_why__
    ours, theirs = multiprocessing.Pipe()
    try:
        OnThisRank._run(RANK, method, str(OnThisRank.place / "rendezvous"), theirs)
    except SystemExit as end:
        skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
        if end.code == 0:
            return "passed", ""
        if end.code in skips:
            return "skipped", skips[end.code]
        return "failed", str(ours.recv()) if ours.poll() else f"it ended with {end.code}"
    except BaseException:
        return "failed", traceback.format_exc()
    return "failed", "it did not end"


def main(backend: str, folder: Path, methods: list[str]) -> None:
    distributed_test.BACKEND = StandIn(backend)
    distributed_test.default_pg_timeout = GROUP_TIMEOUT_S
    torch.set_num_threads(1)
    report = (folder / f"rank {RANK}").open("w", buffering=1)

    def say(**words: str | float) -> None:
        report.write(json.dumps(words) + "\n")

    stacks = (folder / f"stacks of rank {RANK}").open("w")
    for method in methods:
        place = OnThisRank.place = folder / method
        (place / "test_dir").mkdir(parents=True, exist_ok=True)
        os.environ["TEMP_DIR"] = str(place)
        distributed_test.INIT_METHOD = f"file://{place}/second_rendezvous"
        say(method=method, outcome="begun")
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True, file=stacks)
        start = time.monotonic()
        result, why = outcome(method)
        say(method=method, outcome=result, why=why, seconds=round(time.monotonic() - start, 3))
        (place / f"ended {RANK}").touch()
        if result == "failed":
            (place / "failed").touch()
        patience = time.monotonic() + PATIENCE_S
        while len([*place.glob("ended *")]) < SIZE:
            if result == "failed" and time.monotonic() > patience:
                os._exit(1)  # a rank waits for this one in a collective
            time.sleep(0.01)
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
