"""What users do to a wrapped optimizer and to how it is wrapped: it is right, or refused by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from ocomm.api import Adasum, Average, Sum
from ocomm.errors import InvalidRequestError
from ocomm.session import Session
from ocomm_torch.auto import DistributedAuto
from ocomm_torch.compression import Compression
from ocomm_torch.optimizer import DistributedOptimizer
from ocomm_torch.optimizers.birder import DistributedBirder
from ocomm_torch.optimizers.diloco import DistributedDiLoCo
from ocomm_torch.optimizers.ef_sgd import DistributedEFSGD
from ocomm_torch.optimizers.lamb import DistributedOneBitLamb
from ocomm_torch.optimizers.lion import DistributedLion
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from ocomm_torch.optimizers.zero_one import DistributedZeroOneAdam
from tests.frontends.every_kind import KINDS, Kind
from tests.frontends.onebit_jobs import backward, gradients
from tests.frontends.test_torch_unusual_use import Parameters, make_parameters, one_step, rank_of, run, values, wrap
from tests.worlds import run_ranks

# The wrapped optimizer's state


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_state_dict_of_the_wrapped_optimizer_is_that_of_the_distributed_one(kind: Any) -> None:
    def body(rank: int) -> None:
        parameters = make_parameters()
        optimizer = kind.wrap(parameters)
        inner = optimizer._inner
        for step in range(1, 7):
            one_step(parameters, optimizer, step, rank)
        same(inner.state_dict(), optimizer.state_dict())
        assert "ocomm" in inner.state_dict()

    run(body)


@pytest.mark.parametrize(
    "wrap",
    [
        DistributedOneBitAdam,
        functools.partial(DistributedOptimizer, compression=Compression.int8),
        DistributedDiLoCo,
        functools.partial(DistributedAuto, total_steps=9),
    ],
)
def test_a_scheduler_of_a_rate_that_is_a_tensor_does_not_change_saved_states(wrap: Any) -> None:
    def body(session: Session) -> list[float]:
        optimizer = wrap(torch.optim.Adam(make_parameters(), lr=torch.tensor(0.5)))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        saved = optimizer.state_dict()
        optimizer.step()
        scheduler.step()
        return [float(state["param_groups"][0]["lr"]) for state in (saved, optimizer.state_dict())]

    assert run_ranks(1, body) == [[0.5, 0.25]]


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_a_plain_adam_goes_on_from_the_state_that_was_saved_of_the_wrapped_adam_after_the_freeze() -> None:
    def body(rank: int) -> float:
        parameters = make_parameters()
        adam = torch.optim.Adam(parameters, lr=1e-2, foreach=False)
        optimizer = DistributedOneBitAdam(adam, freeze_step=3)
        for step in range(1, 7):
            one_step(parameters, optimizer, step, rank)
        plain = torch.optim.Adam(make_parameters(), lr=1e-2, foreach=False)
        plain.load_state_dict(adam.state_dict())
        entries = list(plain.state.values())
        assert [int(entry["step"]) for entry in entries] == [6] * 4
        assert all(entry["exp_avg_sq"].gt(0).any() for entry in entries)
        return float(entries[0]["exp_avg"].abs().sum())

    assert run(body) > 0


# The wrapped optimizer's step


class OwnStep(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.sign(parameter.grad)
        return super().step(closure)


class OwnStepW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OtherDefaults(torch.optim.Adam):
    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, lr=3e-2, betas=(0.8, 0.99))


ADAMS = [DistributedOneBitAdam, DistributedZeroOneAdam, DistributedOneBitLamb]


@pytest.mark.parametrize("wrapper", ADAMS)
@pytest.mark.parametrize("adam", [OwnStep, OwnStepW])
def test_an_adam_with_a_step_of_its_own_is_refused_because_that_step_would_not_be_made(wrapper: Any, adam: Any) -> None:
    def body(rank: int) -> None:
        with pytest.raises(InvalidRequestError) as raised:
            wrapper(adam(make_parameters(), lr=1e-2))
        message = str(raised.value)
        assert f"{adam.__name__} has a step() of its own" in message
        assert f"Distributed{wrapper.__name__}" in message and "DistributedOptimizer" in message

    run(body)


def test_an_adam_whose_step_was_replaced_on_the_object_is_refused() -> None:
    def body(rank: int) -> None:
        adam = torch.optim.Adam(make_parameters(), lr=1e-2)
        adam.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
        with pytest.raises(InvalidRequestError, match=r"Adam has a step\(\) of its own"):
            DistributedOneBitAdam(adam)

    run(body)


def with_a_scheduler(adam: torch.optim.Optimizer) -> None:
    torch.optim.lr_scheduler.LambdaLR(adam, lambda _: 1.0)


def with_hooks(adam: torch.optim.Optimizer) -> None:
    adam.register_step_pre_hook(lambda *_: None)
    adam.register_step_post_hook(lambda *_: None)


def profiled(adam: torch.optim.Optimizer) -> None:
    step = adam.step

    @functools.wraps(step)
    def timed(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    adam.step = timed  # type: ignore[method-assign]


@pytest.mark.parametrize("prepare", [lambda adam: None, with_a_scheduler, with_hooks, profiled])
@pytest.mark.parametrize("adam", [torch.optim.Adam, torch.optim.AdamW, OtherDefaults])
def test_torchs_adam_is_accepted_with_other_defaults_schedulers_hooks_and_profilers(
    adam: Callable[..., Any], prepare: Callable[[Any], None]
) -> None:
    def body(rank: int) -> None:
        made = adam(make_parameters())
        prepare(made)
        DistributedOneBitAdam(made)

    run(body)


@pytest.mark.parametrize("given", ["parameters", "model"])
@pytest.mark.parametrize("options", [{}, {"lr": 1e-3, "freeze_step": 20}], ids=["alone", "with options"])
@pytest.mark.parametrize(
    "wrapper",
    [*ADAMS, DistributedBirder, DistributedEFSGD, DistributedLion, DistributedDiLoCo, DistributedAuto],
)
def test_parameters_in_the_place_of_an_optimizer_are_refused_with_what_to_pass(
    wrapper: Any, options: dict[str, Any], given: str
) -> None:
    """As DeepSpeed's 1-bit optimizers take them."""
    model = torch.nn.Linear(3, 2)
    first, kind = (model, "Linear") if given == "model" else (model.parameters(), "generator")
    with pytest.raises(InvalidRequestError) as raised:
        wrapper(first, **options)
    name = f"Distributed{wrapper.__name__}"
    assert str(raised.value).startswith(f"{name} wraps an optimizer, and its first argument is a {kind}. Make an opt")
    assert f"pass that: {name}(inner, model.named_parameters())." in str(raised.value)
    if not options:
        with pytest.raises(InvalidRequestError, match=f"DistributedOptimizer wraps an optimizer, .* is a {kind}"):
            DistributedOptimizer(model if given == "model" else model.parameters())


WITH_INNER_STEPS = {
    **KINDS,
    "DiLoCo": Kind(DistributedDiLoCo, torch.optim.SGD, {"sync_every": 2}),
    "int8": Kind(functools.partial(DistributedOptimizer, compression=Compression.int8)),
}


@pytest.mark.parametrize("scheduled", [False, True], ids=["plain", "with a scheduler"])
@pytest.mark.parametrize("kind", WITH_INNER_STEPS.values(), ids=WITH_INNER_STEPS.keys())
def test_hooks_of_the_wrapped_optimizer_and_torchs_of_all_run_once_in_each_step(kind: Any, scheduled: bool) -> None:
    """Such as one that clamps parameters, or follows them in an average."""
    logs: dict[int, list[str]] = {}

    def of_all(stepping: torch.optim.Optimizer, *_: Any) -> None:
        logs[id(stepping)].append("all")

    def body(session: Session) -> tuple[list[str], list[float]]:
        parameters = make_parameters()
        ran: list[str] = []
        lowest: list[float] = []

        def clamp(*_: Any) -> None:
            ran.append("clamp")
            for parameter in parameters:
                parameter.data.clamp_(min=0.01)

        inner = kind.inner(parameters, lr=1e-2)
        if scheduled:
            with_a_scheduler(inner)
        inner.register_step_post_hook(clamp)
        optimizer = kind.wrapper(inner, **kind.options)
        late = inner.register_step_pre_hook(lambda *_: ran.append("late"))
        optimizer.register_step_pre_hook(lambda *_: ran.append("outer"))
        logs[id(inner)] = logs[id(optimizer)] = ran
        for step in range(1, 7):
            if step == 4:
                late.remove()
            one_step(parameters, optimizer, step, rank_of(session))
            lowest.append(min(parameter.min().item() for parameter in parameters))
        with pytest.raises(InvalidRequestError, match=r"step\(\) of the .* wraps was called"):
            inner.step()
        return ran, lowest

    handle = register_optimizer_step_post_hook(of_all)
    try:
        found = run_ranks(2, body)
    finally:
        handle.remove()
    for ran, lowest in found:
        assert ran[:12] == ["late", "outer", "clamp", "all"] * 3
        assert {name: ran.count(name) for name in set(ran)} == {"late": 3, "outer": 6, "clamp": 6, "all": 6}
        assert min(lowest) >= np.float32(0.01)


# Options that are set, and parameters that are moved, after wrapping


@pytest.mark.parametrize("early", [False, True], ids=["between steps", "between backward and step"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_maximize_that_is_set_after_wrapping_is_refused(kind: Any, early: bool) -> None:
    def body(rank: int) -> str:
        parameters = make_parameters()
        optimizer = kind.wrap(parameters)
        for step in range(1, 6):
            one_step(parameters, optimizer, step, rank)
        before = values(parameters)
        optimizer.zero_grad()
        if early:
            backward(parameters, gradients(6, rank), (3, 2, 1, 0))
        optimizer.param_groups[0]["maximize"] = True
        with pytest.raises(InvalidRequestError, match=rf"Distributed{kind.wrapper.__name__} .*maximize=True"):
            if not early:
                backward(parameters, gradients(6, rank), (3, 2, 1, 0))
            optimizer.step()
        optimizer.param_groups[0]["maximize"] = False
        assert values(parameters) == before
        optimizer.step()
        assert values(parameters) != before
        return values(parameters) if kind.options.get("local_step_clip") is None else ""

    run(body)


def two_groups(wrapper: Any = DistributedOneBitAdam, **options: Any) -> tuple[Parameters, Any]:
    parameters = make_parameters()
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 1e-1}]
    return parameters, wrapper(torch.optim.Adam(groups, lr=1e-2, foreach=False), **options)


def last_to_first(groups: Any) -> None:
    """The order of all parameters is what it was."""
    groups[1]["params"].insert(0, groups[0]["params"].pop())


def first_to_last(groups: Any) -> None:
    groups[1]["params"].append(groups[0]["params"].pop(0))


def swapped(groups: Any) -> None:
    """The groups are as large as they were."""
    groups[0]["params"][0], groups[1]["params"][0] = groups[1]["params"][0], groups[0]["params"][0]


@pytest.mark.parametrize("early", [False, True], ids=["between steps", "between backward and step"])
@pytest.mark.parametrize(
    ("move", "name", "old", "new"),
    [(last_to_first, "0.1", 0, 1), (first_to_last, "0.0", 0, 1), (swapped, "0.0", 0, 1)],
)
def test_a_parameter_that_is_moved_to_another_group_after_wrapping_is_refused_by_name(
    move: Callable[[Any], None], name: str, old: int, new: int, early: bool
) -> None:
    def body(rank: int) -> str:
        parameters, optimizer = two_groups(freeze_step=3)
        for step in range(1, 6):
            one_step(parameters, optimizer, step, rank)
        before = values(parameters)
        kept = [list(group["params"]) for group in optimizer.param_groups]
        optimizer.zero_grad()
        if early:
            backward(parameters, gradients(6, rank), (3, 2, 1, 0))
        move(optimizer.param_groups)
        with pytest.raises(InvalidRequestError) as raised:
            if not early:
                backward(parameters, gradients(6, rank), (3, 2, 1, 0))
            optimizer.step()
        assert str(raised.value).startswith(
            f"parameter 'parameter.{name}' is in param group {new} now, and was in group {old} when it was wrapped."
        )
        assert values(parameters) == before
        for group, was in zip(optimizer.param_groups, kept, strict=True):
            group["params"][:] = was
        optimizer.step()
        assert values(parameters) != before
        return values(parameters)

    run(body)


# Wrappers around wrappers


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_distributed_optimizer_does_not_wrap_a_compressed_optimizer(kind: Any) -> None:
    def body(rank: int) -> None:
        optimizer = kind.wrap(make_parameters())
        with pytest.raises(InvalidRequestError) as raised:
            DistributedOptimizer(optimizer)
        assert f"Distributed{kind.wrapper.__name__} averages by itself; leave DistributedOptimizer out" in str(
            raised.value
        )

    run(body)


@pytest.mark.parametrize("wrapper", [DistributedOneBitAdam, DistributedLion, DistributedBirder])
def test_a_compressed_optimizer_does_not_wrap_another_one(wrapper: Any) -> None:
    def body(rank: int) -> None:
        with pytest.raises(InvalidRequestError, match="wrap the plain optimizer, not a DistributedOneBitAdam"):
            wrapper(wrap(make_parameters()))

    run(body)


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_a_compressed_optimizer_does_not_wrap_a_dense_one(op: str) -> None:
    import ocomm_torch as hvd

    def body(rank: int) -> None:
        dense = DistributedOptimizer(torch.optim.Adam(make_parameters()), op=getattr(hvd, op))
        with pytest.raises(InvalidRequestError, match="wrap the plain optimizer, not a DistributedOptimizer"):
            DistributedOneBitAdam(dense)

    run(body)


# Checkpointing with shared weights


class Shared(torch.nn.Module):
    """One layer in two checkpointed parts."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.last = torch.nn.Linear(3, 1)
        self.use_reentrant = use_reentrant
        for number, parameter in enumerate(self.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
            parameter.data = torch.sin(values + number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self._part, x, use_reentrant=self.use_reentrant)
        return self.last(x).sum()

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.sin(torch.arange(12.0).reshape(4, 3) + 7 * step + 3 * rank).requires_grad_()


def test_reentrant_checkpointing_with_shared_weights_is_refused_with_what_to_do() -> None:
    def body(session: Any) -> None:
        rank = session.topology.rank
        model = Shared(use_reentrant=True)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        with pytest.raises(AssertionError) as raised:
            model(batch(1, rank)).backward()
        message = str(raised.value)
        assert "'layer." in message and "use_reentrant=False" in message
        assert "several checkpointed parts" in message
        assert "Increase" not in message
        optimizer.synchronize()

    run_ranks(2, body)


def test_more_passes_than_announced_are_told_so_where_no_part_is_checkpointed() -> None:
    def body(session: Any) -> None:
        model = Shared(use_reentrant=False)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        model(batch(1, 0)).backward()
        with pytest.raises(AssertionError, match="Increase backward_passes_per_step"):
            model(batch(2, 0)).backward()
        optimizer.step()

    run_ranks(2, body)


@pytest.mark.parametrize("dense", [True, False], ids=["DistributedOptimizer", "1-bit Adam"])
def test_checkpointing_with_shared_weights_that_is_not_reentrant_is_right(dense: bool) -> None:
    def trained(checkpointed: bool) -> Any:
        def body(session: Any) -> Any:
            rank = session.topology.rank
            model = Shared(use_reentrant=False)
            if not checkpointed:
                model.forward = lambda x: model.last(model._part(model._part(x))).sum()  # type: ignore[method-assign]
            adam = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
            optimizer = (
                DistributedOptimizer(adam, model.named_parameters())
                if dense
                else DistributedOneBitAdam(adam, model.named_parameters(), freeze_step=2)
            )
            for step in range(1, 6):
                optimizer.zero_grad()
                model(batch(step, rank)).backward()
                optimizer.step()
            return [p.detach().clone() for p in model.parameters()]

        return run_ranks(2, body)

    for one, other in zip(trained(True), trained(False), strict=True):
        assert all(map(torch.equal, one, other))


def test_a_1_bit_optimizer_takes_gradients_of_reentrant_checkpointing_with_shared_weights() -> None:
    def trained(use_reentrant: bool) -> Any:
        def body(session: Any) -> Any:
            model = Shared(use_reentrant)
            adam = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
            optimizer = DistributedOneBitAdam(adam, model.named_parameters(), freeze_step=2)
            for step in range(1, 6):
                optimizer.zero_grad()
                model(batch(step, session.topology.rank)).backward()
                optimizer.step()
            return [p.detach().clone() for p in model.parameters()]

        return run_ranks(2, body)

    for one, other in zip(trained(True), trained(False), strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0.0, atol=1e-5)


# What scripts of Horovod's have around the optimizer


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_horovods_arguments_that_change_nothing_are_accepted(kind: Any) -> None:
    def body(rank: int) -> bool:
        found = []
        for options in ({}, {"op": Average, "compression": Compression.none, "gradient_predivide_factor": 2.0}):
            parameters = make_parameters()
            optimizer = kind.wrap(parameters, **options)
            for step in range(1, 7):
                one_step(parameters, optimizer, step, rank)
            found.append([p.detach().clone() for p in parameters])
        return all(torch.equal(one, other) for one, other in zip(*found, strict=True))

    assert run(body)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"op": Sum},
            "op=Sum: a 1-bit optimizer averages gradients, so leave op= out. Multiply the learning rate of SGD by "
            "size() "
            "for the effect of a sum; Adam's needs no change.",
        ),
        (
            {"op": Adasum},
            "op=Adasum: a 1-bit optimizer averages gradients, so leave op= out. Write DistributedOptimizer(optimizer, "
            "op=Adasum) where you want Adasum.",
        ),
        (
            {"compression": Compression.fp16},
            "compression=FP16Compressor: a 1-bit optimizer compresses by itself, to less than that, so leave "
            "compression= out. DistributedOptimizer takes it.",
        ),
    ],
)
def test_horovods_arguments_that_cannot_be_met_are_refused_with_what_to_write(
    options: dict[str, Any], message: str
) -> None:
    for kind in KINDS.values():
        with pytest.raises(InvalidRequestError, match=f"^{re.escape(message)}$"):
            kind.wrap(make_parameters(), **options)


@pytest.mark.parametrize("call", ["synchronize", "skip_synchronize"])
def test_horovods_calls_around_clipping_are_refused_with_what_to_write(call: str) -> None:
    def body(rank: int) -> str:
        parameters = make_parameters()
        optimizer = KINDS["1-bit Adam, dense"].wrap(parameters)
        with pytest.raises(InvalidRequestError) as raised:
            getattr(optimizer, call)()
        one_step(parameters, optimizer, 1, rank)
        return str(raised.value)

    assert run(body) == (
        f"{call}(): DistributedOneBitAdam exchanges compressed values in step(), so there are no averaged gradients to "
        "wait for. For clipping write DistributedOneBitAdam(..., max_grad_norm=LIMIT) instead of synchronize() and "
        "clip_grad_norm_(); for a GradScaler write scaler.step(optimizer) alone."
    )
