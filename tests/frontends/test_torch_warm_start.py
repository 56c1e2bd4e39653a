"""Starting compressed from the moments of a plain Adam, and going on from its state."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ocomm_torch as hvd
from ocomm.errors import CheckpointError, InvalidRequestError, MismatchError
from ocomm.session import Session
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from ocomm_torch.optimizers.zero_one import DistributedZeroOneAdam
from tests.doc_blocks import DOCS
from tests.frontends.onebit_jobs import SHAPES, backward, digest, gradients, initial
from tests.oracle.onebit_adam import Simulation
from tests.worlds import MPI_SIZE, run_ranks

pytestmark = pytest.mark.skipif(MPI_SIZE > 0, reason="threads are enough: nothing here is of the network")

T = 8
PAGE = (DOCS / "migrating-from-deepspeed.md").read_text()


def pretrained(skip: int | None = None, beta2: float = 0.9) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Parameters and state_dict of a plain Adam after T steps; tensor ``skip`` had no gradient."""
    parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3, betas=(0.9, beta2), foreach=False)
    for step in range(1, T + 1):
        for index, grad in enumerate(gradients(step, 0)):
            parameters[index].grad = None if index == skip else torch.from_numpy(grad)
        optimizer.step()
    return [p.detach().numpy() for p in parameters], optimizer.state_dict()


def rank_of(session: Session) -> int:
    return session.require_topology().rank


class Run:
    def __init__(self, session: Session, values: list[np.ndarray], wrap: Any = DistributedOneBitAdam, **options: Any):
        self.rank = rank_of(session)
        self.parameters = [torch.nn.Parameter(torch.from_numpy(np.array(p))) for p in values]
        inner = torch.optim.Adam(self.parameters, lr=1e-2, foreach=False)
        names = [f"layer.{number}" for number in range(len(self.parameters))]
        self.optimizer = wrap(inner, zip(names, self.parameters, strict=True), **options)
        self.digests: list[str] = []

    def train(self, first: int, last: int) -> list[str]:
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            backward(self.parameters, gradients(step, self.rank), range(len(SHAPES)))
            self.optimizer.step()
            self.digests.append(digest([p.detach().numpy() for p in self.parameters]))
        return self.digests


def test_a_warm_start_equals_the_simulation_from_the_first_step_without_a_dense_one() -> None:
    """v was made with beta2 = 0.9 and is corrected with that; this run's own beta2 and lr are others."""
    values, state = pretrained()
    simulation = Simulation(values, 2, freeze_step=T, lr=1e-2, betas=(0.9, 0.9))
    for index, value in enumerate(values):
        entry = state["state"][index]
        momentum, variance = entry["exp_avg"].numpy(), entry["exp_avg_sq"].numpy()
        simulation.adopt(index, param=value, momentum=momentum, variance=variance, step=T)
    simulation.end_warmup()
    expected = []
    for step in range(T + 1, T + 21):
        simulation.step([gradients(step, rank) for rank in range(2)])
        expected.append(digest(simulation.params))

    def body(session: Session) -> tuple[list[str], dict[str, Any]]:
        run = Run(session, values, warm_start=state)
        return run.train(T + 1, T + 20), run.optimizer.compression_report()

    for digests, report in run_ranks(2, body):
        assert digests == expected
        assert report["warm_start"] == {"step": T, "tensors": 4, "dense": []}
        found = [report[key] for key in ("stage", "step", "freeze_step", "dense_steps", "compressed_steps")]
        assert found == ["compressed", T + 20, T, 0, 20]


def test_a_warm_start_from_a_file_is_the_same_and_leaves_the_given_state_alone(tmp_path: Path) -> None:
    values, state = pretrained()
    path = tmp_path / "adam.pt"
    torch.save(state, path)
    before = {key: value.clone() for key, value in state["state"][0].items()}

    def body(session: Session) -> tuple[list[str], list[str]]:
        return Run(session, values, warm_start=path).train(1, 6), Run(session, values, warm_start=state).train(1, 6)

    for from_file, given in run_ranks(2, body):
        assert from_file == given
    assert all(torch.equal(value, before[key]) for key, value in state["state"][0].items())


def test_a_warm_start_without_first_moments_starts_from_a_momentum_of_zero() -> None:
    values, state = pretrained()
    for entry in state["state"].values():
        del entry["exp_avg"]

    def body(session: Session) -> bool:
        run = Run(session, values, warm_start=state)
        zero = not any(run.optimizer._driver.core.momentum(t).any() for t in range(4))
        run.train(1, 3)
        return zero

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize(("freeze_step", "own"), [(5, 5), ("auto", 2 * 1000 + 1)])
def test_tensors_that_the_warm_start_does_not_know_get_a_dense_warm_up_of_their_own(freeze_step: Any, own: int) -> None:
    values, state = pretrained(skip=1)

    def body(session: Session) -> tuple[list[str], dict[str, Any], list[int]]:
        run = Run(session, values, warm_start=state, freeze_step=freeze_step)
        first = run.optimizer.compression_report()
        stages = []
        for step in range(1, 9):
            run.train(step, step)
            stages.append(int(run.optimizer._driver.core.stage[1]))
        assert run.optimizer._driver.late_warmup == own
        return run.digests, {key: first[key] for key in ("stage", "warm_start")}, stages

    results = run_ranks(2, body)
    assert results[0] == results[1]
    _, report, stages = results[0]
    assert report["stage"] == "mixed"
    assert report["warm_start"] == {"step": T, "tensors": 3, "dense": ["layer.1"]}
    assert stages == [0, 0, 0, 0, 1, 1, 1, 1] if own == 5 else not any(stages)


def test_a_warm_started_run_that_stops_goes_on_bit_for_bit_without_its_warm_start() -> None:
    values, state = pretrained(skip=1)

    def body(session: Session) -> tuple[list[str], list[str], Any]:
        run = Run(session, values, warm_start=state, freeze_step=6)
        run.train(1, 4)
        saved, own = run.optimizer.state_dict(), run.optimizer.rank_state_dict()
        again = Run(session, [p.detach().numpy() for p in run.parameters], freeze_step=6)
        again.optimizer.load_state_dict(saved)
        again.optimizer.load_rank_state_dict(own)
        return again.train(5, 12), run.train(5, 12)[4:], again.optimizer.compression_report()["warm_start"]

    for found, expected, warm in run_ranks(2, body):
        assert found == expected
        assert warm == {"step": T, "tensors": 3, "dense": ["layer.1"]}


@pytest.mark.parametrize("in_half", [False, True], ids=["float32", "fp16"])
def test_a_checkpoint_of_deepspeed_goes_on_as_its_page_says(in_half: bool, tmp_path: Path) -> None:
    """Its OnebitAdam has moments by Adam's names, step counts that are integers, and sizes and errors beside them."""
    values, plain = pretrained()
    theirs = copy.deepcopy(plain)
    for state in theirs["state"].values():
        numel = state["exp_avg"].numel()
        state |= {"step": int(state["step"]), "tensor_size": numel, "corrected_tensor_size": numel + 1}
        state |= {"worker_error": torch.zeros(numel + 1), "server_error": torch.zeros(numel)}
    group = {"bias_correction": True, "max_grad_norm": 0.0}
    theirs["param_groups"] = [
        group | {name: each[name] for name in ("lr", "betas", "eps", "weight_decay", "params")}
        for each in plain["param_groups"]
    ]
    module = {str(number): torch.from_numpy(value) for number, value in enumerate(values)}
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": module, "optimizer": {"optimizer_state_dict": theirs} if in_half else theirs}, path)
    (block,) = [text for text in PAGE.split("```") if text.startswith("python\nsaved = torch.load(")]
    script = re.sub(r'"checkpoints/[^"]*"', repr(str(path)), block.removeprefix("python\n"))

    def digests(session: Session, options: dict[str, Any]) -> list[str]:
        run = Run(session, values, variance_floor=0.0, **options)
        return run.train(1, 5)

    def from_the_page(session: Session) -> list[str]:
        model = torch.nn.ParameterList([torch.zeros(np.shape(value)) for value in values])
        adam = torch.optim.Adam(model.parameters(), lr=1e-2)
        names: dict[str, Any] = {"torch": torch, "hvd": hvd, "model": model, "adam": adam}
        exec(script, names)
        assert names["optimizer"].compression_report()["warm_start"]
        for parameter, value in zip(model, values, strict=True):
            np.testing.assert_array_equal(parameter.detach().numpy(), value)
        return digests(session, {"warm_start": names["moments"]})

    assert run_ranks(2, from_the_page) == run_ranks(2, lambda session: digests(session, {"warm_start": plain}))


def test_0_1_adam_starts_warm_where_its_schedules_would_be() -> None:
    values, state = pretrained()

    def body(session: Session) -> tuple[list[str], list[bool], list[int], dict[str, Any]]:
        options = {"var_update_scaler": 2, "local_step_start": 10, "local_step_doubling": 4, "local_step_clip": 4}
        run = Run(session, values, DistributedZeroOneAdam, warm_start=state, **options)
        synced, refreshes, common = [], [], []
        for step in range(T + 1, T + 13):
            run.train(step, step)
            report = run.optimizer.compression_report()
            synced.append(report["synced"])
            refreshes.append(report["refreshes"])
            common += run.digests[-1:] if report["synced"] else []
        return common, synced, refreshes, report

    results = run_ranks(2, body)
    assert results[0][0] == results[1][0]
    _, synced, refreshes, report = results[0]
    # Syncs at every step up to 13, then every 2, from 18 on every 4; refreshes at 1, 2, 3, 5, 7, 11, and no more.
    assert [T + 1 + k for k, met in enumerate(synced) if met] == [9, 10, 11, 12, 13, 15, 17]
    assert refreshes == [5, 5, *[6] * 10]
    assert report["warm_start"] == {"step": T, "tensors": 4, "dense": []}
    assert report["step"] == T + 12


# Plain Adam's state_dict


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_the_warm_up_goes_on_from_a_plain_adams_state(wrapped_first: bool) -> None:
    """T_w counts from the plain run's first step: with ``freeze_step`` 12, four dense steps are left."""
    values, state = pretrained()

    def body(session: Session) -> tuple[list[str], dict[str, Any]]:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(np.array(p))) for p in values]
        inner = torch.optim.Adam(parameters, lr=1.0, foreach=False)
        if not wrapped_first:
            inner.load_state_dict(copy.deepcopy(state))
        optimizer = DistributedOneBitAdam(inner, freeze_step=T + 4)
        if wrapped_first:
            optimizer.load_state_dict(state)
        digests = []
        for step in range(T + 1, T + 9):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), range(len(SHAPES)))
            optimizer.step()
            digests.append(digest([p.detach().numpy() for p in parameters]))
        return digests, optimizer.compression_report()

    (first, report), (second, _) = run_ranks(2, body)
    assert first == second
    assert [report[key] for key in ("step", "dense_steps", "compressed_steps", "freeze_step")] == [T + 8, 4, 4, T + 4]
    assert report["resumed"] == {"step": T, "ranks": None, "rank_state": "none"}
    plain = [torch.nn.Parameter(torch.from_numpy(np.array(p))) for p in values]
    adam = torch.optim.Adam(plain, lr=1.0, foreach=False)
    adam.load_state_dict(state)
    for step in range(T + 1, T + 5):
        for index, parts in enumerate(zip(gradients(step, 0), gradients(step, 1), strict=True)):
            plain[index].grad = torch.from_numpy((parts[0] + parts[1]) * np.float32(0.5))
        adam.step()
        assert first[step - T - 1] == digest([p.detach().numpy() for p in plain])


def test_a_plain_state_older_than_the_warm_up_is_compressed_at_once() -> None:
    values, state = pretrained()

    def body(session: Session) -> dict[str, Any]:
        run = Run(session, values, freeze_step=T)
        run.optimizer.load_state_dict(state)
        run.train(T + 1, T + 3)
        return run.optimizer.compression_report()

    for report in run_ranks(2, body):
        assert [report[key] for key in ("stage", "dense_steps", "compressed_steps")] == ["compressed", 0, 3]


# Bad input


def test_warm_starts_that_differ_between_ranks_are_an_error_that_names_the_option() -> None:
    values, state = pretrained()

    def body(session: Session) -> str:
        own = {key: {k: v.clone() for k, v in entry.items()} for key, entry in state["state"].items()}
        own[2]["exp_avg_sq"][3] += rank_of(session)
        with pytest.raises(MismatchError) as raised:
            Run(session, values, warm_start={**state, "state": own})
        return str(raised.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert first.startswith(
        "DistributedOneBitAdam: the ranks do not wrap the same optimizer: rank(s) [0] registered warm_start='"
    )


@pytest.mark.parametrize("wrap", [DistributedOneBitAdam, DistributedZeroOneAdam])
@pytest.mark.parametrize("has_none", [False, True])
def test_plain_adams_that_differ_between_ranks_are_an_error_before_the_first_step(wrap: Any, has_none: bool) -> None:
    values, state = pretrained()

    def body(session: Session) -> None:
        parameters = [torch.nn.Parameter(torch.from_numpy(np.array(p))) for p in values]
        plain = torch.optim.Adam(parameters, lr=1e-2, foreach=False)
        if rank_of(session) == 0 or not has_none:
            plain.load_state_dict(copy.deepcopy(state))
        if rank_of(session) == 1 and not has_none:
            plain.state[parameters[2]]["exp_avg_sq"][3] *= 2
        optimizer = wrap(plain)
        backward(parameters, gradients(1, rank_of(session)), range(len(SHAPES)))
        with pytest.raises(MismatchError, match=r"are not alike before their first step: rank\(s\) \[0\] hold"):
            optimizer.step()

    run_ranks(2, body)


def sgd_state(momentum: float) -> dict[str, Any]:
    parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=momentum)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def test_a_warm_start_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    values, state = pretrained()
    torn = tmp_path / "torn.pt"
    torch.save(state, torn)
    torn.write_bytes(torn.read_bytes()[:2000])
    empty = torch.optim.Adam([torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]).state_dict()
    short = {**state, "param_groups": [{**state["param_groups"][0], "params": [0, 1, 2]}]}
    other = {**state, "state": {**state["state"], 2: {**state["state"][2], "exp_avg_sq": torch.ones(34)}}}
    nan = {**state, "state": {**state["state"], 2: {**state["state"][2], "exp_avg_sq": torch.full((33,), torch.nan)}}}

    def body(session: Session) -> None:
        for given, kind, message in [
            (sgd_state(0.9), CheckpointError, "warm_start is not of Adam or AdamW: its group 0 has no 'betas', but"),
            (empty, CheckpointError, "warm_start has no moments of any tensor: it is of an Adam that has taken no"),
            (short, CheckpointError, "warm_start has groups of [3] parameters, the optimizer has [4]. Wrap the same"),
            (
                other,
                CheckpointError,
                "warm_start is of another model: of tensor 'layer.2' it has exp_avg_sq (34,), the",
            ),
            (nan, CheckpointError, "warm_start: exp_avg_sq of tensor 'layer.2' has NaN or Inf."),
            ({"model": 1}, CheckpointError, "warm_start is no optimizer's state_dict: it has no 'param_groups'."),
            (3, InvalidRequestError, "warm_start must be Adam's state_dict or a path to one, not a int."),
            (torn, CheckpointError, f"{torn} cannot be read: RuntimeError: "),
            (tmp_path / "none.pt", CheckpointError, f"{tmp_path / 'none.pt'} cannot be read: FileNotFoundError: "),
        ]:
            with pytest.raises(kind) as raised:
                Run(session, values, warm_start=given)
            assert str(raised.value).startswith(message)

    run_ranks(1, body)
