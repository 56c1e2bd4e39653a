"""Runs a program in a process of its own, so that a crash, a hang or a leak of one is its failure alone."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from typing import Any

#: Seconds after which a program counts as stuck: its ranks give up on each other before.
DEADLINE_S = 90.0
#: What the server that forks the processes has imported.
_PRELOADED = ["tests.programs.preloaded"]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOADED)


def failure_of(kind: str, program: Any) -> str | None:
    """Returns what does not hold when ``program`` of the module ``kind`` runs, in words; None if all does."""
    deadline_s = getattr(importlib.import_module(f"tests.programs.{kind}"), "DEADLINE_S", DEADLINE_S)
    with tempfile.TemporaryFile("w+") as output:
        os.set_inheritable(output.fileno(), True)
        here, there = _context.Pipe(duplex=False)
        # A process of the server inherits no files, so it gets the output as a path.
        path = f"/proc/{os.getpid()}/fd/{output.fileno()}"
        process = _context.Process(target=_main, args=(kind, program, path, there), daemon=True)
        process.start()
        there.close()
        said: str | None = None
        try:
            if here.poll(deadline_s):
                said = here.recv()
            else:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGABRT)  # prints the stacks of all threads
                said = f"no end in {deadline_s} s"
        except EOFError:
            said = "the process died"
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
        if said is None:
            return None
        output.seek(0)
        return f"{said}\nexit status {process.exitcode}\n{output.read()[-6000:]}"


def _main(kind: str, program: Any, path: str, there: Connection) -> None:
    with open(path, "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    try:
        importlib.import_module(f"tests.programs.{kind}").run(program)
    except BaseException:
        there.send(traceback.format_exc())
    else:
        there.send(None)
    there.close()
    sys.stdout.flush()
    os._exit(0)  # without waiting for ranks that a failure has left behind
