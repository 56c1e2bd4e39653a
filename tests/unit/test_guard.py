"""The process beside Open MPI's launcher, which ends it if it hangs behind its ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ocomm.launch.guard import Look, Stillness
from ocomm.launch.processes import children

RANKS, ZOMBIES = {11: True, 12: False}, {11: False, 12: False}


def look(now_s: float, children: dict[int, bool], is_asleep: bool = True, used: int = 7, is_read: bool = True) -> Look:
    return Look(now_s, children, is_asleep, used, is_read)


def test_a_launcher_hangs_that_takes_no_note_of_the_end_of_its_ranks_and_does_nothing() -> None:
    stillness = Stillness(10.0)
    said = [stillness.hangs(look(float(t), RANKS if t < 3 else ZOMBIES)) for t in range(15)]
    assert said == [False] * 12 + [True] * 3  # the last look with a rank that lives is that of second 2


def test_one_that_has_taken_note_waits_for_something_else() -> None:
    stillness = Stillness(10.0)
    assert not any(stillness.hangs(look(float(t), RANKS if t < 3 else {})) for t in range(100))


@pytest.mark.parametrize(
    "busy",
    [
        {"is_asleep": False},  # it runs, waits for a disk, or was stopped
        {"is_read": False},  # a pager has not read what it printed
        {"children": RANKS},
        {"children": {}},
        {"used": 8},
    ],
)
def test_whatever_else_it_may_wait_for_begins_the_time_anew(busy: dict[str, object]) -> None:
    stillness = Stillness(10.0)
    stillness.hangs(look(0.0, RANKS))
    used = {"used": busy.get("used", 7)}  # at the last look as before it
    looks = [look(5.0, ZOMBIES), look(9.0, **{"children": ZOMBIES, **busy}), look(18.0, ZOMBIES, **used)]  # type: ignore[arg-type]
    assert not any(stillness.hangs(one) for one in looks)


def stand_in(then: str) -> subprocess.Popen[str]:
    """Starts what becomes a launcher: a process with a guard, whose child ``then`` says how it goes on."""
    script = (
        "import os, signal, sys, time\n"
        "from ocomm.launch import guard\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "guard.start('/opt/prterun', 0.3, 0.02)\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.close(write)\n"
        "    os.read(read, 1)\n"
        "    os._exit(0)\n"
        f"{then}\n"
    )
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_thread_that_ends_while_children_are_counted_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        threads, none = os.listdir("/proc/self/task"), str(2**30)
        monkeypatch.setattr(os, "listdir", lambda folder: [none, *threads, none])
        assert children(os.getpid())[process.pid]
        process.communicate(b"\n")


needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this Python has no pidfd_open")


@needs_pidfd
def test_a_process_that_hangs_behind_its_children_is_killed_and_says_why() -> None:
    process = stand_in("os.close(write)\ntime.sleep(600)")
    out, said = process.communicate(timeout=120)
    assert process.returncode == -9
    assert out == ""
    assert said == (
        "ocommrun: all ranks have ended, and /opt/prterun hangs, as Open MPI's may where a rank ends while others are "
        "in init(). It is killed; look at the ranks' output for what has ended them.\n"
    )


@needs_pidfd
def test_a_process_whose_child_lives_is_left_alone_and_the_guard_ends_with_it() -> None:
    process = stand_in("time.sleep(1.5)\nprint('ended')")
    out, said = process.communicate(timeout=120)  # waits until nobody has its output open: the guard has ended
    assert (process.returncode, out, said) == (0, "ended\n", "")
