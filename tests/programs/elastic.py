"""Scripts that train with an elastic state under ocommrun while ranks are killed or raise.

A job of processes with random commits and harms ends well, after the steps asked for, and leaves what the same steps
leave in ranks that are threads and that nobody harms: the same parameters on each rank, bit for bit.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

import ocomm_torch as hvd
from ocomm.types import Settings
from tests.faults import world
from tests.frontends.every_kind import KINDS, Kind
from tests.frontends.onebit_jobs import digest

#: A program is a job of processes, each of which imports Torch: ``make test-long`` runs some.
FEW = 0
DEADLINE_S = 300.0
#: Seconds that a job gets: on two quiet cores it takes ten to thirty.
_JOB_S = 240.0
SHAPES = [(9, 7), (40,), ()]
DENSE = {
    "dense": Kind(hvd.DistributedOptimizer),
    "dense, momentum": Kind(hvd.DistributedOptimizer, functools.partial(torch.optim.SGD, momentum=0.9)),
}
MOMENTS = ("backward", "step", "commit", "file of a commit", "end of a step")


@dataclass(frozen=True)
class Harm:
    """Something that happens once to a rank, in step ``step``, at its ``moment``."""

    rank: int
    step: int
    moment: str = "step"
    #: Whether the rank is killed; else it raises HorovodInternalError.
    kills: bool = True

    def __str__(self) -> str:
        return f"rank {self.rank} {'is killed' if self.kills else 'raises'} in step {self.step}, at its {self.moment}"


@dataclass(frozen=True)
class Program:
    kind: str
    ranks: int = 2
    steps: int = 6
    #: The steps that end with a commit.
    commits: tuple[int, ...] = ()
    harms: tuple[Harm, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        setup = f"{self.kind}, {self.ranks} ranks, {self.steps} steps, commits at the end of steps {list(self.commits)}"
        return "\n".join([setup, *(f"    {harm}" for harm in self.harms)])

    @property
    def keeps_errors(self) -> bool:
        """Whether no part of the first commit is lost, before which there is none to go back to."""
        first = self.commits[:1]
        return not any(harm.moment == "file of a commit" and (harm.step,) == first for harm in self.harms)

    def noise(self, *where: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(hash((self.seed, *where)) & 0xFFFFFFFF)
        return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Script:
    """The script of one rank. ``happens`` is called at each moment of a step."""

    def __init__(self, program: Program, happens: Callable[[int, str], None]) -> None:
        self.program, self.happens = program, happens
        self.model = torch.nn.ParameterList(program.noise())
        kind = {**KINDS, **DENSE}[program.kind]
        self.optimizer = kind.wrap(list(self.model.parameters()))

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        noise = self.program.noise(number + 1, hvd.rank())
        loss = torch.stack([(p * g).sum() for p, g in zip(self.model, noise, strict=True)]).sum()
        self.happens(number, "backward")
        loss.backward()
        self.happens(number, "step")
        self.optimizer.step()
        self.happens(number, "end of a step")

    def digest(self) -> str:
        return digest([p.detach().numpy() for p in self.model])


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs of up to ten steps, with one harm or two."""
    ranks, steps = draw(st.integers(2, 3)), draw(st.integers(2, 10))
    commits = tuple(sorted(draw(st.sets(st.integers(0, steps - 1), max_size=4))))
    harms = []
    for _ in range(draw(st.integers(1, 2))):
        moment = draw(st.sampled_from([moment for moment in MOMENTS if commits or "commit" not in moment]))
        step = draw(st.sampled_from(commits) if "commit" in moment else st.integers(0, steps - 1))
        kills = moment == "file of a commit" or draw(st.integers(0, 3)) > 0
        harms.append(Harm(draw(st.integers(0, ranks - 1)), step, moment, kills))
    kind = draw(st.sampled_from([*KINDS, *DENSE]))
    return Program(kind, ranks, steps, commits, tuple(harms), draw(st.integers(0, 1 << 16)))


def without_harm(program: Program) -> list[str]:
    """Returns what each rank has after the same steps."""
    found = [""] * program.ranks

    def workload(_: Any) -> None:
        script = Script(program, lambda number, moment: None)
        for number in range(program.steps):
            script.step(number)
        found[hvd.rank()] = script.digest()

    done = world.run(workload, program.ranks, Settings(), native=True, deadline_s=_JOB_S)
    assert done.error is None and not done.stuck, done
    return found


def run(program: Program) -> None:
    """Runs the job, and compares what its ranks have."""
    from tests.cluster.jobs import ROOT

    expected = without_harm(program)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program").write_bytes(pickle.dumps(program))
        command = [sys.executable, "-m", "ocomm.launch", "-np", str(program.ranks), "--min-np", str(program.ranks)]
        command += [sys.executable, "-m", "tests.programs.elastic", folder]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_JOB_S,
        )
        assert done.returncode == 0, f"the job ends with status {done.returncode}:\n{done.stdout}"
        harmed = [k for k in range(len(program.harms)) if Path(folder, f"harm-{k}").exists()]
        found = [Path(folder, f"end-{rank}").read_text() for rank in range(program.ranks)]
    assert len(harmed) == len(program.harms), f"only {harmed} have happened:\n{done.stdout}"
    if program.keeps_errors:
        assert found == expected, f"ranks have {found}, without harm {expected}:\n{done.stdout}"
    elif len(set(expected)) == 1:
        assert len(set(found)) == 1, f"ranks have {found}:\n{done.stdout}"


def main() -> None:
    """Runs the program in the folder that the command names, on this rank."""
    folder = Path(sys.argv[1])
    program: Program = pickle.loads((folder / "program").read_bytes())
    hvd.init()

    def happens(number: int, moment: str) -> None:
        for k, harm in enumerate(program.harms):
            if (harm.rank, harm.step, harm.moment) != (hvd.rank(), number, moment):
                continue
            try:
                (folder / f"harm-{k}").touch(exist_ok=False)
            except FileExistsError:
                continue
            if not harm.kills:
                raise hvd.HorovodInternalError("the program says so")
            os.kill(os.getpid(), signal.SIGKILL)

    script = Script(program, happens)
    state = hvd.elastic.TorchState(script.model, script.optimizer, number=0)
    fsync = os.fsync

    def sync(file: int) -> None:
        happens(state.number - 1, "file of a commit")
        fsync(file)

    os.fsync = sync

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.number < program.steps:
            number = state.number
            script.step(number)
            state.number += 1
            if number in program.commits:
                happens(number, "commit")
                state.commit()

    train(state)
    (folder / f"end-{hvd.rank()}").write_text(script.digest())
    hvd.barrier()


if __name__ == "__main__":
    # Pickled programs are of the module by its name.
    from tests.programs import elastic

    elastic.main()
