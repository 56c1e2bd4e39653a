"""Checkpoints in files: by path, by torch.distributed.checkpoint, and every way in which a file can be wrong."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from ocomm.errors import CheckpointError, InvalidRequestError, MismatchError
from ocomm.session import Session
from ocomm_torch.optimizers.birder import DistributedBirder
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from ocomm_torch.optimizers.rank_states import OwnState
from ocomm_torch.optimizers.zero_one import DistributedZeroOneAdam
from tests.frontends.every_kind import KINDS as EVERY_KIND
from tests.frontends.onebit_jobs import backward, digest, gradients
from tests.world.test_runtime import threads_only
from tests.worlds import MPI_SIZE, run_ranks

pytestmark = pytest.mark.skipif(MPI_SIZE > 0, reason="ranks of a job have a folder each; see cluster/test_resume.py")

SHAPES = ((40, 30), (33,))
KINDS: dict[str, Callable[..., Any]] = {
    "1-bit Adam": lambda p, **o: DistributedOneBitAdam(torch.optim.Adam(p[0]), p[1], **{"freeze_step": 3, **o}),
    "0/1 Adam": lambda p, **o: DistributedZeroOneAdam(
        torch.optim.Adam(p[0]), p[1], local_step_start=2, local_step_doubling=2, **o
    ),
    "Birder": lambda p, **o: DistributedBirder(torch.optim.SGD(p[0], lr=1e-3), p[1], **o),
}


def rank_of(session: Session) -> int:
    return session.require_topology().rank


class Run:
    """Two tensors, named, and their optimizer."""

    def __init__(
        self, kind: str, rank: int, values: Any = None, shapes: Any = SHAPES, names: Any = ("a", "b"), **options: Any
    ) -> None:
        self.rank, self.shapes = rank, shapes
        arrays = [np.ones(shape, np.float32) for shape in shapes] if values is None else values
        self.parameters = [torch.nn.Parameter(torch.from_numpy(np.array(array))) for array in arrays]
        self.optimizer = KINDS[kind]((self.parameters, list(zip(names, self.parameters, strict=True))), **options)

    def train(self, first: int, last: int) -> list[str]:
        digests = []
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            backward(self.parameters, gradients(step, self.rank, self.shapes), range(len(self.parameters)))
            self.optimizer.step()
            digests.append(digest([p.detach().numpy() for p in self.parameters]))
        return digests

    def save(self, folder: Path) -> None:
        """As examples/torch_resume.py does: rank 0 saves the common half, each rank its own."""
        if self.rank == 0:
            model = [p.detach().clone() for p in self.parameters]
            torch.save({"model": model, "optimizer": self.optimizer.state_dict()}, folder / "common.pt")
        torch.save(self.optimizer.rank_state_dict(), folder / f"rank{self.rank}.pt")

    @classmethod
    def read(cls, kind: str, rank: int, folder: Path, **options: Any) -> Run:
        common = torch.load(folder / "common.pt", weights_only=True)
        run = cls(kind, rank, [value.numpy() for value in common["model"]], **options)
        run.optimizer.load_state_dict(common["optimizer"])
        return run

    @property
    def pieces(self) -> list[bytes]:
        """Everything that a load may change."""
        core = self.optimizer._driver.core
        arrays = [buffer for buffers in core.rank_buffers().values() for buffer in buffers.values()]
        arrays += [p.detach().numpy() for p in self.parameters] + [core.steps]
        arrays += [value.numpy() for entry in self.optimizer.state.values() for value in entry.values()]
        return [np.asarray(array).tobytes() for array in arrays]


def write(kind: str, ranks: int, folder: Path, steps: int = 5, **options: Any) -> list[list[str]]:
    """Saves after ``steps`` steps; the digests of five more."""

    def body(session: Session) -> list[str]:
        run = Run(kind, rank_of(session), **options)
        run.train(1, steps)
        run.save(folder)
        return run.train(steps + 1, steps + 5)

    return run_ranks(ranks, body)


def test_files_by_a_path_with_the_rank_in_it_are_the_same_run(tmp_path: Path) -> None:
    for kind in KINDS:
        expected = write(kind, 2, tmp_path)

        def body(session: Session, kind: str = kind) -> tuple[list[str], str]:
            run = Run.read(kind, rank_of(session), tmp_path)
            done = run.optimizer.load_rank_state_dict(tmp_path / "rank{rank}.pt")
            return run.train(6, 10), done["rank_state"]

        assert run_ranks(2, body) == [(digests, "loaded") for digests in expected]


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_reads_the_files_of_all_old_ranks(ranks: int, tmp_path: Path) -> None:
    write("1-bit Adam", 4, tmp_path, steps=4)
    write("1-bit Adam", 2, tmp_path)  # those of ranks 2 and 3 are left from before

    def body(session: Session) -> tuple[list[str], str]:
        run = Run.read("1-bit Adam", rank_of(session), tmp_path)
        done = run.optimizer.load_rank_state_dict(str(tmp_path / "rank{rank}.pt"))
        return run.train(6, 8), done["why"]

    results = run_ranks(ranks, body)
    assert results[0][1].startswith(f"2 -> {ranks} ranks: ")
    assert results == ranks * [results[0]]


def test_a_file_that_is_missing_is_named_and_nobody_has_errors(tmp_path: Path) -> None:
    write("1-bit Adam", 2, tmp_path)
    (tmp_path / "rank1.pt").unlink()

    def body(session: Session) -> tuple[list[str], str]:
        run = Run.read("1-bit Adam", rank_of(session), tmp_path)
        done = run.optimizer.load_rank_state_dict(tmp_path / "rank{rank}.pt")
        assert not run.optimizer._driver.core.error.any()
        return run.train(6, 8), done["why"]

    first, second = run_ranks(2, body)
    assert first == second
    assert first[1] == f"rank(s) [1] say that {tmp_path}/rank1.pt is missing"
    three = run_ranks(3, body)
    assert three == 3 * [three[0]]
    assert three[0][1] == f"rank(s) [0, 1, 2] say that {tmp_path}/rank1.pt is missing"


# Files that are wrong


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _replaced_by(name: str) -> Callable[[Path, Path], None]:
    return lambda path, saved: _write(path, (saved / name).read_bytes())


def _edit(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    state = torch.load(path, weights_only=True)
    edit(state)
    torch.save(state, path)


#: What is done to rank 1's file, and what its message says after the file's name.
DAMAGE: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "truncated": (
        lambda path, saved: _write(path, path.read_bytes()[: path.stat().st_size // 2]),
        " cannot be read: RuntimeError: PytorchStreamReader failed",
    ),
    "empty": (lambda path, saved: _write(path, b""), " cannot be read: "),
    "no file of torch's": (lambda path, saved: _write(path, b"hello" * 100), " cannot be read: "),
    "one bit of an error changed": (
        lambda path, saved: _edit(path, lambda state: state["worker"]["error"].view(torch.int32)[7:8].bitwise_xor_(1)),
        " is damaged: its checksum is ",
    ),
    "a field missing": (lambda path, saved: _edit(path, lambda state: state.pop("owner")), " is damaged: its checksum"),
    "without a checksum": (
        lambda path, saved: _edit(path, lambda state: state.pop("checksum")),
        " has no checksum, so it is not what rank_state_dict() returned, or not all.",
    ),
    "a model's state_dict": (
        lambda path, saved: torch.save({"weight": torch.ones(3)}, path),
        " is no saved state of ocomm: it has ['weight'].",
    ),
    "a tensor": (lambda path, saved: torch.save(torch.ones(3), path), " holds a ndarray, not a rank state."),
    "from the future": (
        lambda path, saved: _edit(path, lambda state: state.update(version=99)),
        " has version 99; this release of ocomm reads versions up to 1.",
    ),
    "of another rank": (_replaced_by("rank0.pt"), " is of rank 0."),
    "of another step": (
        _replaced_by("late/rank1.pt"),
        " was saved at step 6, the optimizer is at step 5. Load the state_dict of the same checkpoint first.",
    ),
    "of another run": (
        _replaced_by("run/rank1.pt"),
        " was saved beside parameters ",
    ),
    "of another optimizer": (
        _replaced_by("birder/rank1.pt"),
        " is of DistributedBirder, the optimizer is DistributedOneBitAdam. Resume with the same class; to start from "
        "Adam's moments",
    ),
    "of another model": (
        _replaced_by("model/rank1.pt"),
        " is of another model: as tensor number 1 it has 'b' (34,) float32 order torch, the optimizer has 'b' (33,) "
        "float32 order torch. Wrap the same parameters, under the same names and in the same order.",
    ),
    "of another number of ranks": (
        _replaced_by("three/rank1.pt"),
        " was saved beside parameters ",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks, and others in folders beside it."""
    folder = tmp_path_factory.mktemp("saved")
    write("1-bit Adam", 2, folder)
    for name in ("late", "run", "birder", "model", "three"):
        (folder / name).mkdir()
    write("1-bit Adam", 2, folder / "late", steps=6)
    write("1-bit Adam", 2, folder / "run", freeze_step=4)
    write("Birder", 2, folder / "birder")
    write("1-bit Adam", 2, folder / "model", shapes=((40, 30), (34,)))
    write("1-bit Adam", 3, folder / "three")
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_wrong_file_of_one_rank_is_an_error_on_all_that_names_it_and_nothing_changes(
    damage: str, saved: Path, tmp_path: Path
) -> None:
    for name in ("common.pt", "rank0.pt", "rank1.pt"):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    wrong = tmp_path / "rank1.pt"
    DAMAGE[damage][0](wrong, saved)

    def body(session: Session) -> str:
        run = Run.read("1-bit Adam", rank_of(session), tmp_path)
        before = run.pieces
        with pytest.raises(CheckpointError) as raised:
            run.optimizer.load_rank_state_dict(tmp_path / "rank{rank}.pt")
        assert run.pieces == before
        # The run is not lost: it may go on without, on all ranks.
        run.optimizer.load_rank_state_dict(None)
        run.train(6, 6)
        return str(raised.value)

    there, here = run_ranks(2, body)
    assert here.startswith(f"{wrong}{DAMAGE[damage][1]}")
    assert there == f"DistributedOneBitAdam: no rank state was loaded on any rank. rank 1: {here}"


def test_a_single_state_of_another_world_or_rank_says_what_to_pass(saved: Path) -> None:
    def body(session: Session) -> tuple[str, str]:
        run = Run.read("1-bit Adam", rank_of(session), saved)
        with pytest.raises(CheckpointError) as world:
            run.optimizer.load_rank_state_dict(torch.load(saved / "rank1.pt", weights_only=True))
        with pytest.raises(InvalidRequestError) as number:
            run.optimizer.load_rank_state_dict(3)
        return str(world.value), str(number.value)

    def same(session: Session) -> str:
        run = Run.read("1-bit Adam", rank_of(session), saved)
        with pytest.raises(CheckpointError) as raised:
            run.optimizer.load_rank_state_dict(saved / f"rank{1 - rank_of(session)}.pt")
        return str(raised.value)

    assert run_ranks(1, body) == [
        (
            "the rank state is of rank 1 of 2 (nodes [[0], [1]], block_size 4096), this is rank 0 of 1 (block_size "
            "4096): the errors have to be redistributed. Pass the states of all 2 ranks on every rank.",
            "load_rank_state_dict takes a rank state, a list of all ranks' states, a path or None, got int.",
        )
    ]
    assert run_ranks(2, same) == [
        f"{saved}/rank1.pt is of rank 1, this is rank 0. Give each rank its own.",
        f"{saved}/rank0.pt is of rank 0, this is rank 1. Give each rank its own.",
    ]


def test_ranks_that_load_different_checkpoints_are_told_who_has_what(saved: Path) -> None:
    """Each is whole, and fits its rank's state_dict."""

    def body(session: Session) -> str:
        rank = rank_of(session)
        folder = saved if rank == 0 else saved / "run"
        run = Run.read("1-bit Adam", rank, folder, freeze_step=3)
        with pytest.raises(MismatchError) as raised:
            run.optimizer.load_rank_state_dict(folder / "rank{rank}.pt")
        return str(raised.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert re.fullmatch(
        r"DistributedOneBitAdam: the ranks have rank states of different runs: rank\(s\) \[0\] have those of 2 ranks "
        r"at step 5 with parameters \w{16}; rank\(s\) \[1\] have those of 2 ranks at step 5 with parameters "
        r"\w{16}\.",
        first,
    )


# state_dicts that are wrong


def test_a_wrong_state_dict_is_refused_by_name_before_anything_changes(saved: Path) -> None:
    good = torch.load(saved / "common.pt", weights_only=True)["optimizer"]
    birder = torch.load(saved / "birder" / "common.pt", weights_only=True)["optimizer"]
    model = torch.load(saved / "model" / "common.pt", weights_only=True)["optimizer"]
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    sgd = torch.optim.SGD(parameters, lr=0.1).state_dict()
    one = torch.optim.Adam(parameters[:1]).state_dict()
    amsgrad = torch.optim.Adam(parameters, amsgrad=True).state_dict()
    renamed = {**good, "ocomm": {**good["ocomm"], "steps": 6}}
    torn = {**good, "state": {0: good["state"][0]}}

    def body(session: Session) -> None:
        run = Run("1-bit Adam", 0)
        run.train(1, 2)
        before = run.pieces
        for state, message in [
            (sgd, "the state_dict is not of Adam or AdamW: its group 0 has no 'betas', but ['dampening', "),
            (birder, "the state_dict is not of Adam or AdamW: its group 0 has no 'betas', but ['dampening', "),
            (amsgrad, "the state_dict has amsgrad=True in group 0, which is not supported."),
            (
                one,
                "the state_dict has groups of [1] parameters, the optimizer has [2]. Wrap the same parameters, in the",
            ),
            (model, "the state_dict is of another model: of tensor 'b' it has exp_avg (34,), the parameter is"),
            (renamed, "the state_dict is damaged: its checksum is "),
            (torn, "the state_dict is not whole: it has no moments of 'b'."),
            ({"weight": 1}, "the state_dict is no optimizer's state_dict: it has no 'param_groups'."),
        ]:
            with pytest.raises(CheckpointError) as raised:
                run.optimizer.load_state_dict(state)
            assert str(raised.value).startswith(message)
            assert run.pieces == before
        run.train(3, 4)

    run_ranks(1, body)


def test_names_classes_and_seeds_of_another_run_are_refused(saved: Path) -> None:
    good = torch.load(saved / "common.pt", weights_only=True)["optimizer"]
    birder = torch.load(saved / "birder" / "common.pt", weights_only=True)["optimizer"]

    def body(session: Session) -> None:
        for run, state, message in [
            (
                Run("1-bit Adam", 0, names=("a", "c")),
                good,
                "the state_dict is of another model: as tensor number 1 it has 'b' (33,) float32 order torch, the "
                "optimizer has 'c' (33,) float32 order torch. Wrap the same parameters, under the same names and in "
                "the same order.",
            ),
            (
                Run("0/1 Adam", 0),
                good,
                "the state_dict is of DistributedOneBitAdam, the optimizer is DistributedZeroOneAdam. Resume with the "
                "same class; to start from Adam's moments alone, pass them as warm_start.",
            ),
            (
                Run("Birder", 0, seed=5),
                birder,
                "the state_dict is of a run with seed=0, this one has seed=5. Pass seed=0.",
            ),
            (
                Run("Birder", 0),
                {key: value for key, value in birder.items() if key != "ocomm"},
                "the state_dict has no entry 'ocomm', so it is not of Birder, which cannot go on from another "
                "optimizer's state. Load the model's parameters alone.",
            ),
        ]:
            with pytest.raises(CheckpointError) as raised:
                run.optimizer.load_state_dict(state)
            assert str(raised.value) == message

    run_ranks(1, body)


def test_between_backward_and_step_nothing_is_loaded(saved: Path) -> None:
    state = torch.load(saved / "common.pt", weights_only=True)["optimizer"]

    def body(session: Session) -> None:
        run = Run("1-bit Adam", 0)
        run.train(1, 2)
        backward(run.parameters, gradients(3, 0, SHAPES), range(2))
        for load, name in [
            (lambda: run.optimizer.load_state_dict(state), "load_state_dict"),
            (lambda: run.optimizer.load_rank_state_dict(None), "load_rank_state_dict"),
        ]:
            with pytest.raises(InvalidRequestError) as raised:
                load()
            assert str(raised.value) == (
                f"DistributedOneBitAdam: {name} was called between backward and step(); take the step or call "
                "zero_grad() first."
            )
        run.optimizer.step()

    run_ranks(1, body)


# torch.distributed.checkpoint


def test_torch_distributed_checkpoint_saves_and_loads_both_halves(tmp_path: Path) -> None:
    """Without a process group: rank 0 saves the common half, each rank its own, every one in its own folder."""
    for kind in KINDS:

        def body(session: Session, kind: str = kind) -> tuple[list[str], list[str], str]:
            rank = rank_of(session)
            folder = tmp_path / kind.replace("/", "") / str(rank)
            run = Run(kind, rank)
            run.train(1, 5)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is")
                common = {"optimizer": run.optimizer.state_dict()}
                dcp.save(common, checkpoint_id=folder / "common", no_dist=True)
                dcp.save(run.optimizer.rank_state_dict(), checkpoint_id=folder / "own", no_dist=True)
                values = [p.detach().numpy().copy() for p in run.parameters]
                expected = run.train(6, 10)
                again = Run(kind, rank, values)
                # A state_dict has entries that a new optimizer's lacks: it is read whole.
                dcp_to_torch_save(folder / "common", folder / "common.pt")
                again.optimizer.load_state_dict(torch.load(folder / "common.pt", weights_only=True)["optimizer"])
                # A rank state has the form of the new optimizer's by then.
                own = again.optimizer.rank_state_dict()
                dcp.load(own, checkpoint_id=folder / "own", no_dist=True)
                done = again.optimizer.load_rank_state_dict(own)
            return expected, again.train(6, 10), done["rank_state"]

        for expected, found, done in run_ranks(1, body):
            assert done == "loaded"
            assert found == expected


# get_state_dict of torch.distributed.checkpoint, which takes "state" and "param_groups" alone


def modelled(kind: str) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(6, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return model, EVERY_KIND[kind].wrap(list(model.parameters()))


def take_steps(model: torch.nn.Module, optimizer: Any, first: int, last: int, rank: int) -> None:
    for step in range(first, last + 1):
        backward(list(model.parameters()), gradients(step, rank, ((3, 6), (3,))), range(2))
        optimizer.step()
        optimizer.zero_grad()


@threads_only  # nothing here depends on the network
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_states_that_torch_collects_take_no_step(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnState, "_has_warned", False)

    def body(session: Session) -> bool:
        saved, plain = (modelled(kind) for _ in range(2))
        for model, optimizer in (saved, plain):
            take_steps(model, optimizer, 1, 6, rank_of(session))
        is_kept_by_ocomm = not len(saved[1].state)
        get_optimizer_state_dict(*saved)
        for model, optimizer in (saved, plain):
            take_steps(model, optimizer, 7, 8, rank_of(session))
        assert saved[1].compression_report()["step"] == 8
        for one, other in zip(saved[0].parameters(), plain[0].parameters(), strict=True):
            assert torch.equal(one, other)
        return is_kept_by_ocomm

    assert set(run_ranks(2, body)) == {"rank_state_dict() instead" in caplog.text}


@threads_only
def test_states_that_torch_has_collected_by_name_are_loaded_as_those_of_a_plain_adam() -> None:
    def body(session: Session) -> None:
        model, optimizer = modelled("1-bit Adam, compressed")
        take_steps(model, optimizer, 1, 6, rank_of(session))
        found = get_optimizer_state_dict(model, optimizer)
        assert list(found["state"]) == ["weight", "bias"]
        again, into = modelled("1-bit Adam, compressed")
        again.load_state_dict(model.state_dict())
        set_optimizer_state_dict(again, into, found)
        before, after = (one.state_dict() for one in (optimizer, into))
        assert [group["params"] for group in after["param_groups"]] == [[0, 1]]
        for number in range(2):
            for name in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(before["state"][number][name], after["state"][number][name])
        take_steps(again, into, 7, 8, rank_of(session))

    run_ranks(2, body)


@threads_only
@pytest.mark.parametrize(
    ("entries", "message"),
    [({"scale": {}}, r"has an entry of 'scale', which is in none of its groups"), ({2: {}}, "has an entry of 2")],
)
def test_an_entry_of_no_parameter_is_an_error(entries: dict[Any, Any], message: str) -> None:
    def body(session: Session) -> None:
        _, optimizer = modelled("1-bit Adam, dense")
        state = torch.optim.Adam(torch.nn.Linear(6, 3).parameters()).state_dict()
        with pytest.raises(CheckpointError, match=message):
            optimizer.load_state_dict({**state, "state": entries})

    run_ranks(1, body)
