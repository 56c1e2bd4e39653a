"""``ocommrun --min-np`` as a user starts it: a job goes on when ranks die and hosts come, and ends when it cannot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ocomm.bench._lab import why_not
from tests.cluster.harms import Harm
from tests.cluster.jobs import LIMIT_S, ROOT, has_mpi
from tests.tiers import few

pytestmark = [
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts jobs itself"),
    pytest.mark.skipif(not has_mpi(), reason="there is no mpirun"),
]

#: Runs ``step(state, generation, folder)`` until state.step is 0, and says how it ended.
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
import numpy as np
import ocomm
from ocomm import elastic

folder, generation = Path(sys.argv[1]), int(os.environ["OCOMM_ELASTIC_GENERATION"])
assert os.environ["_OCOMM_ELASTIC_KEY"]
ocomm.init()
assert b"_OCOMM_ELASTIC_KEY" not in subprocess.run(["env"], capture_output=True).stdout
state = elastic.ObjectState(step=1, seen=[])

@elastic.run
def train(state):
    while state.step:
        total = ocomm.allreduce(np.full(4, ocomm.rank() + 1.0), name="x", op=ocomm.Sum)
        assert (total == ocomm.size() * (ocomm.size() + 1) / 2).all()
        state.step += 1
        step(state)
        state.commit()
"""
END = """
train(state)
(folder / f"end-{ocomm.rank()}").write_text(json.dumps([state.seen, state.commits]))
"""


def command(folder: Path, step: str, *flags: str) -> list[str]:
    program = folder / "train.py"
    program.write_text(PRELUDE + step + END)
    return [sys.executable, "-m", "ocomm.launch", *flags, sys.executable, str(program), str(folder)]


def run(folder: Path, step: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, step, *flags),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("ocommrun:")]


def test_new_slots_join_at_the_next_commit_and_a_dead_rank_is_replaced(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost\n")
    step = """
def step(state):
    if state.step == 3 and generation == 1:
        (folder / "hosts").write_text("localhost:2\\n")
    state.seen = sorted({*map(tuple, state.seen), (generation, ocomm.size())})
    if generation == 2 and ocomm.rank() == 1 and len(state.seen) == 2:
        os.kill(os.getpid(), signal.SIGKILL)  # in its first step, so that nothing of it has been committed
    if generation == 3:
        state.step = 0
"""
    flags = ("--min-np", "1", "--host-discovery-script", f"cat {hosts}", "--slots-per-host", "1")
    done = run(tmp_path, step, *flags)
    assert done.returncode == 0, done.stderr
    seen = [json.loads((tmp_path / f"end-{rank}").read_text()) for rank in range(2)]
    # What is new in generation 2 has gone with it; all that generation 1 had committed is there.
    assert seen[0] == seen[1] and seen[0][0] == [[1, 1], [3, 2]]
    commits = seen[0][1]
    assert said(done) == [
        "ocommrun: generation 1: 1 ranks on localhost:1",
        "ocommrun: the hosts have changed; the ranks make way at their next commit",
        "ocommrun: generation 1 has made way for one on other hosts",
        "ocommrun: generation 2: 2 ranks on localhost:2",
        "ocommrun: generation 2 failed: rank 1 on localhost was ended by signal 9; its last commit was none",
        "ocommrun: generation 3: 2 ranks on localhost:2",
    ]
    assert commits >= 3
    assert not list(tmp_path.glob("ocomm-elastic-*")), "commits of a job that has ended well are removed"


def test_a_job_that_cannot_go_on_ends_with_the_reason_and_where_its_commits_are(tmp_path: Path) -> None:
    step = """
def step(state):
    if state.step == 4 and ocomm.rank() == 1:
        raise ValueError("no data")
"""
    done = run(tmp_path, step, "-np", "2", "--min-np", "2", "--reset-limit", "0")
    assert done.returncode == 1
    (folder,) = tmp_path.glob("ocomm-elastic-*")
    assert said(done)[1:] == [
        "ocommrun: generation 1 failed: rank 1 on localhost raised ValueError: no data; its last commit was 2",
        "ocommrun: the job ends: the reset limit of 0 is used up; the last generation: rank 1 on localhost raised "
        f"ValueError: no data. Commits up to 2 are in {folder} on localhost; a job with that OCOMM_ELASTIC_FOLDER goes "
        "on from the last one that is whole.",
    ]


def test_a_rank_that_ends_before_the_others_is_named_and_not_who_waits_for_it(tmp_path: Path) -> None:
    step = """
def step(state):
    if state.step == 4 and ocomm.rank() == 1:
        sys.exit(0)
"""
    done = run(tmp_path, step, "-np", "2", "--min-np", "2", "--reset-limit", "0")
    assert done.returncode == 1
    assert said(done)[1] == "ocommrun: generation 1 failed: rank 1 on localhost has shut down; its last commit was 2"


@pytest.mark.parametrize("number", few([signal.SIGINT, signal.SIGKILL], [signal.SIGKILL]))
def test_ranks_end_with_their_ocommrun(number: signal.Signals, tmp_path: Path) -> None:
    step = """
def step(state):
    (folder / f"pid-{os.getpid()}").touch()
    time.sleep(60)
"""
    job = subprocess.Popen(
        command(tmp_path, step, "-np", "2", "--min-np", "1"),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        # A shell may have switched it off for these tests, as for what it puts into the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while len(ranks := list(tmp_path.glob("pid-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(ranks) == 2
        job.send_signal(number)
        assert job.wait(timeout=LIMIT_S) == (130 if number == signal.SIGINT else -9)
        alive = [Path(f"/proc/{path.name[4:]}") for path in ranks]
        while any(path.exists() for path in alive) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [path for path in alive if path.exists()]
    finally:
        job.kill()
        job.wait()
        assert job.stderr is not None
        job.stderr.close()


def test_a_job_whose_output_nobody_reads_ends(tmp_path: Path) -> None:
    step = """
def step(state):
    print("x" * 1000, flush=True)
"""
    unread, output = os.pipe()
    os.close(unread)
    try:
        job = subprocess.run(
            command(tmp_path, step, "-np", "2", "--min-np", "2"),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
    finally:
        os.close(output)
    assert job.returncode == 128 + signal.SIGPIPE, job.stderr
    assert said(job)[0] == "ocommrun: generation 1: 2 ranks on localhost:2"
    assert said(job)[-1].startswith("ocommrun: ended by SIGPIPE.") and len(said(job)) == 3


def test_a_rank_that_does_not_come_to_init_is_the_one_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import os, time
import ocomm

if os.environ["RANK"] == "1":
    time.sleep(600)
ocomm.init()
"""
    )
    flags = ("-np", "2", "--min-np", "2", "--start-timeout", "2", "--reset-limit", "0")
    done = subprocess.run(
        [sys.executable, "-m", "ocomm.launch", *flags, sys.executable, str(tmp_path / "train.py")],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 1
    assert said(done)[1] == (
        "ocommrun: generation 1 failed: rank 1 on localhost has not answered: it never came to init(); its last commit "
        "was none"
    )


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()), reason=f"no lab: {why_not()}")
def test_a_job_of_several_hosts_goes_on_without_the_one_whose_rank_was_killed() -> None:
    """The long run, with stops and cuts: chaos_elastic.py."""
    pytest.importorskip("torch")
    from tests.cluster.chaos_elastic import endure

    ended = endure(Harm("kill", 0, 0.4), 1, ranks=2, steps=80)
    assert not ended.faults, ended
