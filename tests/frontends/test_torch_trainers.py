"""What Lightning's strategy and the Trainer's callback share, without these packages; and ``no_sync``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ocomm.api import rank
from ocomm.errors import CheckpointError, InvalidRequestError, LaunchError
from ocomm.session import Session
from ocomm_torch import trainers
from ocomm_torch.accelerate import keep_rank_states
from ocomm_torch.compression import Compression
from ocomm_torch.optimizer import DistributedOptimizer
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from tests.frontends.onebit_jobs import digest
from tests.worlds import run_ranks


def model() -> torch.nn.Linear:
    module = torch.nn.Linear(40, 30)
    generator = torch.Generator().manual_seed(7)  # ranks are threads, which share Torch's own
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return module


def loss(module: torch.nn.Module, step: int, part: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank())
    return module(torch.randn(8, 40, generator=generator)).square().mean()


def wrapped(module: torch.nn.Module, name: str = "onebit_adam", **given: Any) -> Any:
    known = {"total_steps": lambda: 50, "max_grad_norm": None, "setting": "the Trainer", "options": {}, **given}
    adam = torch.optim.Adam(module.parameters(), lr=1e-2)
    return trainers.wrap(trainers.wrapper_of(name), adam, module.named_parameters(), **known)


def test_what_a_trainer_knows_is_used_unless_the_user_says_otherwise() -> None:
    def body(session: Session) -> None:
        def options(**given: Any) -> dict[str, Any]:
            return wrapped(model(), **given)._driver.options

        assert options()["total_steps"] == 50
        assert options(options={"total_steps": 7})["total_steps"] == 7
        assert options(options={"freeze_step": 3}).get("total_steps") is None
        assert wrapped(model(), max_grad_norm=0.5).max_grad_norm == 0.5
        assert wrapped(model(), options={"max_grad_norm": 0.5}).max_grad_norm == 0.5
        assert isinstance(wrapped(model(), "dense", max_grad_norm=0.5), torch.optim.Adam)
        with pytest.raises(InvalidRequestError, match=r"max_grad_norm=1.0 and to 0.5, by the Trainer"):
            wrapped(model(), max_grad_norm=0.5, options={"max_grad_norm": 1.0})
        with pytest.raises(InvalidRequestError, match="there are onebit_adam, "):
            trainers.wrapper_of("two_bits")

    run_ranks(1, body)


@pytest.mark.parametrize("name", ["onebit_adam", "dense"])
def test_a_parameter_of_the_loss_is_trained_alike_on_all_ranks(name: str) -> None:
    def body(session: Session) -> str:
        module = model()
        scale = torch.nn.Parameter(torch.full((3,), 1.0 + rank()))
        adam = torch.optim.Adam([*module.parameters(), scale], lr=1e-2)
        options = {"freeze_step": 2} if name == "onebit_adam" else {}
        optimizer = trainers.wrap(
            trainers.wrapper_of(name),
            adam,
            module.named_parameters(),
            options,
            total_steps=lambda: None,
            max_grad_norm=None,
            setting="the Trainer",
        )
        assert scale.tolist() == [1.0, 1.0, 1.0]
        for step in range(5):
            optimizer.zero_grad()
            (loss(module, step) * scale.sum()).backward()
            optimizer.step()
        assert scale.tolist() != [1.0, 1.0, 1.0]
        return digest([p.detach().numpy() for p in (*module.parameters(), scale)])

    first, second = run_ranks(2, body)
    assert first == second


def test_an_accelerator_that_has_found_no_other_rank_is_refused() -> None:
    def body(session: Session) -> None:
        alone = SimpleNamespace(num_processes=1)
        with pytest.raises(
            LaunchError, match=r"trains on 1 process\(es\), and ocomm has 2 ranks.*Accelerator\(cpu=True"
        ):
            keep_rank_states(alone)

    run_ranks(2, body)


def test_a_trainer_clips_averages_only() -> None:
    def body(session: Session) -> None:
        optimizer = wrapped(model(), max_grad_norm=0.5)
        assert trainers.has_clipped(optimizer, 0.5, 2.0, "it")
        assert not trainers.has_clipped(wrapped(model(), "dense"), 0.5, 2.0, "it")
        for norm, kind in ((1.0, 2.0), (0.5, float("inf"))):
            with pytest.raises(InvalidRequestError, match=r"it would clip each rank's gradients by its .*0.5"):
                trainers.has_clipped(optimizer, norm, kind, "it")

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("name", "options", "kinds"),
    [
        ("onebit_adam", {"freeze_step": 2}, "DistributedOneBitAdam: 9 steps (2 dense, 7 compressed); "),
        ("onebit_adam", {"freeze_step": 9, "dense_bits": 8}, "DistributedOneBitAdam: 9 steps (9 dense in 8 bits); "),
        (
            "zero_one_adam",
            {"local_step_start": 2, "local_step_doubling": 3, "local_step_clip": 2, "total_steps": 9},
            "DistributedZeroOneAdam: 9 steps (1 dense, 6 compressed, 2 local); ",
        ),
        ("dense", {"compression": Compression.int8}, "DistributedOptimizer: 9 steps (9 dense in 8 bits); "),
        ("dense", {}, ""),
    ],
)
def test_the_last_line_counts_each_step_and_names_the_optimizer_as_users_do(
    name: str, options: dict[str, Any], kinds: str
) -> None:
    def body(session: Session) -> None:
        module = model()
        optimizer = wrapped(module, name, options=options)
        for step in range(9):
            optimizer.zero_grad()
            loss(module, step).backward()
            optimizer.step()
        said = trainers.summary(optimizer)
        assert said.startswith(kinds) and bool(said) == bool(kinds)
        assert not said or ("this rank has sent " in said and "; dense averages would have been " in said)

    run_ranks(2, body)


def test_rank_states_are_found_again_and_a_wrong_file_is_named() -> None:
    files: dict[int, Any] = {}

    def cut_off(rank: int) -> Any:
        if rank == 1:
            raise OSError("Invalid argument")  # what Torch says of half a file
        return files.get(rank)

    def body(session: Session) -> None:
        def train(optimizer: Any, module: torch.nn.Module, steps: range) -> str:
            for step in steps:
                optimizer.zero_grad()
                loss(module, step).backward()
                optimizer.step()
            return digest([p.detach().numpy() for p in module.parameters()])

        whole = model()
        optimizer = wrapped(whole, options={"freeze_step": 2})
        train(optimizer, whole, range(5))
        saved = {name: p.clone() for name, p in whole.state_dict().items()}, optimizer.state_dict()
        files[rank()] = trainers.rank_states([optimizer])
        expected = train(optimizer, whole, range(5, 9))

        resumed = model()
        resumed.load_state_dict(saved[0])
        optimizer = wrapped(resumed, options={"freeze_step": 2})
        assert not list(trainers.load_rank_states([optimizer], files.get, str, 2))  # nothing was loaded before
        optimizer.load_state_dict(saved[1])
        with pytest.raises(CheckpointError, match="has no rank state of optimizer 0"):
            list(trainers.load_rank_states([optimizer], lambda rank: {"optimizers": []}, str, 2))
        optimizer.load_state_dict(saved[1])
        with pytest.raises(CheckpointError, match="file of 1 cannot be read: OSError: Invalid argument"):
            list(trainers.load_rank_states([optimizer], cut_off, lambda rank: f"file of {rank}", 2))
        optimizer.load_state_dict(saved[1])
        (done,) = trainers.load_rank_states([optimizer], files.get, str, 2)
        assert done["rank_state"] == "loaded"
        assert train(optimizer, resumed, range(5, 9)) == expected

    run_ranks(2, body)


def test_a_rank_state_for_which_the_disk_has_no_space_leaves_the_old_one_and_an_error_that_names_it(
    tmp_path: Path,
) -> None:
    def body(session: Session) -> None:
        optimizer = wrapped(model())
        trainers.save_rank_states([optimizer], tmp_path)
        name = tmp_path / f"ocomm_rank{rank()}.pt"
        before = name.read_bytes()
        beside = name.with_name(f"{name.name}.part")
        assert not beside.exists()
        beside.symlink_to("/dev/full")
        with pytest.raises(OSError, match=f"No space left on device: '{name}'"):
            trainers.save_rank_states([optimizer], tmp_path)
        assert name.read_bytes() == before and not beside.is_symlink()

    run_ranks(2, body)


@pytest.mark.parametrize("wrap", [DistributedOneBitAdam, DistributedOptimizer])
def test_passes_inside_no_sync_only_add_to_gradients(wrap: Any) -> None:
    def body(session: Session) -> list[str]:
        results = []
        for counts in (False, True):
            module = model()
            extra = {"freeze_step": 2} if wrap is DistributedOneBitAdam else {}
            optimizer = wrap(
                torch.optim.Adam(module.parameters(), lr=1e-2),
                module.named_parameters(),
                backward_passes_per_step=3 if counts else 1,
                **extra,
            )
            for step in range(6):
                optimizer.zero_grad()
                for part in range(3):
                    if counts or part == 2:
                        loss(module, step, part).backward()
                    else:
                        with optimizer.no_sync():
                            loss(module, step, part).backward()
                optimizer.step()
            results.append(digest([p.detach().numpy() for p in module.parameters()]))
            if wrap is DistributedOneBitAdam:
                assert optimizer.compression_report()["redone_steps"] == 0
        return results

    (without, counted), other = run_ranks(2, body)
    assert without == counted and other == [without, counted]
