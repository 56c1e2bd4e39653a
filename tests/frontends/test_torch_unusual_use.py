"""What users do with a compressed optimizer besides zero_grad, backward, step: it is right, or refused by name."""

from __future__ import annotations

import copy
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.api import Adasum, Average, broadcast_object
from ocomm.collectives.waiting import REJOINS
from ocomm.errors import HorovodInternalError, InvalidRequestError, PeerError, StallError
from ocomm.operations import add_process_set, remove_process_set
from ocomm.runtime import bystanders
from ocomm.session import Session
from ocomm.types import Settings
from ocomm_torch.compression import Compression
from ocomm_torch.functions import broadcast_optimizer_state, broadcast_parameters
from ocomm_torch.optimizer import DistributedOptimizer
from ocomm_torch.optimizers.diloco import DistributedDiLoCo
from ocomm_torch.optimizers.lamb import DistributedOneBitLamb
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from tests.frontends.every_kind import KINDS, Kind
from tests.frontends.onebit_jobs import backward, digest, gradients, initial, state_digest
from tests.tiers import few
from tests.world.test_runtime import threads_only
from tests.worlds import interrupt_soon, run_ranks

Parameters = list[torch.nn.Parameter]
BACKWARDS = (3, 2, 1, 0)


def rank_of(session: Session) -> int:
    assert session.topology is not None
    return session.topology.rank


def make_parameters() -> Parameters:
    return [torch.nn.Parameter(torch.from_numpy(array.copy())) for array in initial()]


def wrap(parameters: Parameters, freeze_step: int = 3, weight_decay: float = 0.0, **options: Any) -> Any:
    adam = torch.optim.Adam(parameters, lr=1e-2, weight_decay=weight_decay, foreach=False)
    return DistributedOneBitAdam(adam, freeze_step=freeze_step, **options)


def one_step(parameters: Parameters, optimizer: Any, step: int, rank: int) -> None:
    optimizer.zero_grad()
    backward(parameters, gradients(step, rank), [i for i in BACKWARDS if parameters[i].requires_grad])
    optimizer.step()


def values(parameters: Parameters) -> str:
    return digest([p.detach().numpy() for p in parameters])


def run(body: Callable[[int], Any], ranks: int = 2) -> Any:
    """What all ranks return, which must be the same."""
    results = run_ranks(ranks, lambda session: body(rank_of(session)))
    assert all(result == results[0] for result in results)
    return results[0]


def plain(steps: int, **options: Any) -> str:
    """The end of an ordinary run."""

    def body(rank: int) -> str:
        parameters = make_parameters()
        optimizer = wrap(parameters, **options)
        for step in range(1, steps + 1):
            one_step(parameters, optimizer, step, rank)
        return values(parameters)

    return run(body)


# Parameters that are frozen, thawed, replaced


def test_a_parameter_that_is_frozen_at_first_gets_a_dense_warm_up_of_its_own_once_it_is_thawed() -> None:
    def body(rank: int) -> tuple[list[str], str, int]:
        parameters = make_parameters()
        parameters[1].requires_grad_(False)
        optimizer = wrap(parameters)
        stages = []
        for step in range(1, 11):
            if step == 6:
                assert np.array_equal(parameters[1].detach().numpy(), initial()[1])
                parameters[1].requires_grad_(True)
            one_step(parameters, optimizer, step, rank)
            stages.append(optimizer.compression_report()["stage"])
        assert int(optimizer.state_dict()["state"][1]["step"]) == 5
        return stages, values(parameters), optimizer.compression_report()["redone_steps"]

    stages, _, redone = run(body)
    # T_w = 3: the thawed tensor is dense in steps 6, 7 and 8.
    assert stages == ["warm-up"] * 2 + ["mixed"] * 5 + ["compressed"] * 3
    assert redone == 0


def test_a_parameter_that_is_frozen_in_the_compressed_stage_stands_still_and_holds_up_no_bucket() -> None:
    def body(rank: int) -> tuple[str, list[int]]:
        parameters = make_parameters()
        optimizer = wrap(parameters)
        posted = []
        for step in range(1, 14):
            parameters[0].requires_grad_(not 6 <= step < 10)
            before = parameters[0].detach().clone()
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), [i for i in BACKWARDS if parameters[i].requires_grad])
            posted.append(len(optimizer._stepper.buckets.posted_tensors))
            optimizer.step()
            assert torch.equal(before, parameters[0]) == (6 <= step < 10)
        assert int(optimizer.state_dict()["state"][0]["step"]) == 9
        return values(parameters), posted

    _, posted = run(body)
    assert posted == [0] + [4] * 12


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_parameters_whose_memory_is_replaced_between_steps_or_before_step_are_moved_where_they_are(
    weight_decay: float,
) -> None:
    """What is on its way has read them only if the decay is coupled: else nothing is exchanged again."""

    def body(rank: int) -> tuple[str, int]:
        parameters = make_parameters()
        optimizer = wrap(parameters, weight_decay=weight_decay)
        for step in range(1, 9):
            optimizer.zero_grad()
            for parameter in parameters:
                parameter.data = parameter.data.clone()
            backward(parameters, gradients(step, rank), BACKWARDS)
            if step == 7 and rank == 1:
                for parameter in parameters:
                    parameter.data = parameter.data.clone()
            optimizer.step()
            assert len(optimizer._held) <= 2 * len(parameters)
        return values(parameters), optimizer.compression_report()["redone_steps"]

    moved, redone = run(body)
    assert moved == plain(8, weight_decay=weight_decay)
    assert redone == (1 if weight_decay else 0)


def test_a_parameter_that_becomes_something_else_is_refused_by_name() -> None:
    def body(rank: int) -> None:
        parameters = make_parameters()
        optimizer = wrap(parameters)
        one_step(parameters, optimizer, 1, rank)
        parameters[2].data = torch.zeros(7)
        with pytest.raises(
            InvalidRequestError, match=r"parameter 'parameter.0.2' has shape \(7,\) now, and had \(33,\)"
        ):
            optimizer.step()
        torch.nn.ParameterList(parameters).double()
        with pytest.raises(InvalidRequestError, match=r"'parameter.0.0' is torch.float64; .* needs torch.float32"):
            optimizer.step()

    run(body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_another_size_is_not_read_and_is_refused_by_name(dtype: torch.dtype) -> None:
    def body(rank: int) -> None:
        parameters = [torch.nn.Parameter(p.detach().to(dtype)) for p in make_parameters()]
        optimizer = wrap(parameters)
        for p in parameters:
            p.grad = torch.ones_like(p)
        assert parameters[2].grad is not None
        parameters[2].grad.data = torch.ones(7, dtype=dtype)
        for p in parameters:  # as backward does
            for hook in p._post_accumulate_grad_hooks.values():  # type: ignore[attr-defined]
                hook(p)
        assert optimizer._stepper.begun and not optimizer._stepper.buckets.posted
        with pytest.raises(InvalidRequestError) as raised:
            optimizer.step()
        assert str(raised.value) == (
            "gradient of 'parameter.0.2' has shape (7,), expected (33,). Set .grad to a tensor of the parameter's "
            "shape, or to None."
        )

    run(body)


# What the parameters may be


def test_parameters_cannot_be_added_or_taken_away_and_the_error_says_what_to_do() -> None:
    later = (
        "Give the optimizer all parameters when it is made, also those that train later, and freeze these until then "
        "(requires_grad_(False)): then Lightning's BackboneFinetuning adds no group. "
    )
    advice = (
        "DistributedOneBitAdam exchanges the tensors that it was made with: to change them, take state_dict(), wrap a "
        'new Adam over all parameters, and load it there; or, where their number or shapes change, make its "state" '
        'and "param_groups" fit, and load these before you wrap.'
    )

    def body(rank: int) -> None:
        parameters = make_parameters()
        optimizer = wrap(parameters)
        one_step(parameters, optimizer, 1, rank)
        with pytest.raises(InvalidRequestError) as raised:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(7))]})
        assert str(raised.value) == f"a parameter group cannot be added. {later}{advice}"
        inner = optimizer._inner
        inner.add_param_group({"params": [torch.nn.Parameter(torch.zeros(7))]})
        before = state_digest(parameters, optimizer)
        with pytest.raises(InvalidRequestError) as raised:
            one_step(parameters, optimizer, 2, rank)
        assert str(raised.value) == (
            "the param groups of DistributedOneBitAdam have 5 parameters, not the 4 that were wrapped. " + advice
        )
        assert state_digest(parameters, optimizer) == before
        del inner.param_groups[1], inner.param_groups[0]["params"][3]
        with pytest.raises(InvalidRequestError, match="have 3 parameters, not the 4 that were wrapped"):
            one_step(parameters, optimizer, 2, rank)

    run(body)


@pytest.mark.parametrize("is_copied", [False, True], ids=["the same memory", "other memory"])
@pytest.mark.parametrize("kind", [*KINDS, "int8"])
def test_a_parameter_that_was_replaced_in_a_group_is_named(kind: str, is_copied: bool) -> None:
    """Steps would move the old one, or the memory of both by gradients of the old one."""

    def body(session: Session) -> None:
        parameters = make_parameters()
        rank = rank_of(session)
        if kind == "int8":
            optimizer: Any = DistributedOptimizer(torch.optim.Adam(parameters), compression=Compression.int8)
        else:
            optimizer = KINDS[kind].wrap(parameters)
        for step in (1, 2):
            one_step(parameters, optimizer, step, rank)
        data = parameters[2].data
        parameters[2] = optimizer.param_groups[0]["params"][2] = torch.nn.Parameter(data.clone() if is_copied else data)
        before = values(parameters)
        with pytest.raises(InvalidRequestError, match=r"parameter 'parameter.0.2' was replaced by another"):
            one_step(parameters, optimizer, 3, rank)
        assert values(parameters) == before

    run_ranks(2, body)


def test_moments_that_were_made_to_fit_new_shapes_are_gone_on_from() -> None:
    def body(rank: int) -> tuple[str, str]:
        parameters = make_parameters()
        optimizer = wrap(parameters)
        for step in range(1, 5):
            one_step(parameters, optimizer, step, rank)
        saved = optimizer.state_dict()
        for entry in saved["state"].values():
            entry.update({name: torch.cat([entry[name], entry[name][:1]]) for name in ("exp_avg", "exp_avg_sq")})
        grown = [torch.nn.Parameter(torch.cat([p.detach(), p.detach()[:1]])) for p in parameters]
        adam = torch.optim.Adam(grown, lr=1e-2)
        adam.load_state_dict({"state": saved["state"], "param_groups": saved["param_groups"]})
        again = DistributedOneBitAdam(adam, freeze_step=3)
        for p in grown:
            p.grad = torch.ones_like(p)
        again.step()
        assert again.state_dict()["state"][0]["step"] == 5
        return values(grown), again.compression_report()["stage"]

    assert run(body)[1] == "compressed"


def twice() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(5))
    return torch.optim.Adam([parameter, parameter])


def views() -> torch.optim.Optimizer:
    memory = torch.zeros(10)
    return torch.optim.Adam([torch.nn.Parameter(memory[4:]), torch.nn.Parameter(memory[:6])])


def with_gaps() -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.nn.Parameter(torch.zeros(3, 8)[:, ::2])])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (twice, "number 1 of group 0, of shape (5,), is there twice; give the optimizer every parameter once."),
        (
            views,
            "parameters 'parameter.0.1' and 'parameter.0.0' share memory; make one parameter of them, or copy one.",
        ),
        (
            with_gaps,
            "parameter 'parameter.0.0' has gaps (shape (3, 4), strides (8, 2)); call "
            "parameter.data = parameter.data.contiguous() before wrapping.",
        ),
        (
            lambda: torch.optim.Adam([torch.nn.Parameter(torch._neg_view(torch.zeros(3)))]),
            "parameter 'parameter.0.0' is a view whose memory holds its negatives; call parameter.data = "
            "parameter.data.resolve_neg() before wrapping.",
        ),
        (
            lambda: DistributedOptimizer(torch.optim.Adam([torch.nn.Parameter(torch.zeros(5))])),
            "DistributedOneBitAdam averages by itself; wrap the plain optimizer, not a DistributedOptimizer.",
        ),
    ],
)
def test_what_cannot_be_trained_rightly_is_refused_by_name(make: Callable[[], Any], message: str) -> None:
    def body(rank: int) -> None:
        with pytest.raises(InvalidRequestError) as raised:
            DistributedOneBitAdam(make())
        assert str(raised.value) == message

    run(body)


def test_parameters_without_elements_take_no_part_and_do_not_hold_up_the_others() -> None:
    def body(rank: int) -> tuple[list[float], str, int]:
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((0,), (3, 0), (4,))]
        optimizer = wrap(parameters, freeze_step=2)
        for _ in range(5):
            optimizer.zero_grad()
            sum((p * 2).sum() for p in parameters).backward()
            optimizer.step()
        report = optimizer.compression_report()
        return parameters[2].tolist(), report["stage"], report["memory_bytes"]["averages"]

    moved, stage, averages = run(body)
    assert moved == pytest.approx([-0.05] * 4, rel=1e-5)
    assert (stage, averages) == ("compressed", 0)


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_optimizer_whose_parameters_have_no_elements_steps_like_another(kind: str) -> None:
    def body(rank: int) -> int:
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((0,), (3, 0))]
        optimizer = KINDS[kind].wrap(parameters)
        for _ in range(4):
            optimizer.zero_grad()
            sum((p * 2).sum() for p in parameters).backward()
            optimizer.step()
        return optimizer.compression_report()["step"]

    assert run(body) == 4


def test_sparse_gradients_give_what_dense_ones_give() -> None:
    def train(sparse: bool) -> str:
        def body(rank: int) -> str:
            embedding = torch.nn.Embedding(20, 40, sparse=sparse)
            with torch.no_grad():
                embedding.weight.fill_(1.0)
            optimizer = wrap([embedding.weight])
            for step in range(8):
                optimizer.zero_grad()
                (embedding(torch.tensor([step % 5, rank, 7])) * (step + 1)).sum().backward()
                optimizer.step()
            return values([embedding.weight])

        return run(body)

    assert train(sparse=True) == train(sparse=False)


# How steps are made


def test_a_closure_gives_what_the_plain_loop_gives_and_its_loss() -> None:
    def body(rank: int) -> str:
        parameters = make_parameters()
        optimizer = wrap(parameters)
        for step in range(1, 9):

            def closure(step: int = step) -> float:
                optimizer.zero_grad()
                backward(parameters, gradients(step, rank), BACKWARDS)
                return 1.5

            assert optimizer.step(closure) == 1.5
        return values(parameters)

    assert run(body) == plain(8)


def test_a_schedule_on_the_wrapped_optimizer_gives_what_it_gives_on_the_outer_one() -> None:
    def train(outer: bool) -> str:
        def body(rank: int) -> str:
            parameters = make_parameters()
            optimizer = wrap(parameters, freeze_step=2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer if outer else optimizer._inner, 2, 0.5)
            for step in range(1, 9):
                one_step(parameters, optimizer, step, rank)
                scheduler.step()
            assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(1e-2 / 16)]
            return values(parameters)

        return run(body)

    assert train(outer=True) == train(outer=False)


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_summed_over_unannounced_passes_equal_announced_ones(overlap: bool) -> None:
    def train(passes: int) -> tuple[str, int]:
        def body(rank: int) -> tuple[str, int]:
            parameters = make_parameters()
            optimizer = wrap(parameters, overlap=overlap, backward_passes_per_step=passes)
            for step in range(1, 9):
                optimizer.zero_grad()
                for part in range(3):
                    backward(parameters, gradients(3 * step + part, rank), BACKWARDS)
                optimizer.step()
            return values(parameters), optimizer.compression_report()["redone_steps"]

        return run(body)

    announced, redone = train(3)
    assert redone == 0
    # The first step with overlap is exchanged again, and there is none from then on.
    assert train(1) == (announced, int(overlap))


def test_accumulated_gradients_are_sums_and_a_pass_without_a_gradient_adds_nothing() -> None:
    """As Horovod: summed over the passes, averaged over the ranks only."""

    def parts(step: int, rank: int) -> list[list[np.ndarray | None]]:
        found = [gradients(2 * step + part, rank) for part in (0, 1)]
        if rank == 0:
            found[1][1] = None
        if step % 2:
            found[0][2] = found[1][2] = None
        return found

    def train(accumulated: bool) -> str:
        def body(rank: int) -> str:
            parameters = make_parameters()
            optimizer = wrap(parameters, backward_passes_per_step=2 if accumulated else 1)
            for step in range(1, 9):
                optimizer.zero_grad()
                first, second = parts(step, rank)
                if accumulated:
                    backward(parameters, first, BACKWARDS)
                    backward(parameters, second, BACKWARDS)
                else:
                    added = [a if b is None else a + b for a, b in zip(first, second, strict=True)]
                    backward(parameters, added, BACKWARDS)
                optimizer.step()
            return values(parameters)

        return run(body)

    assert train(accumulated=True) == train(accumulated=False)


def test_passes_before_zero_grad_do_not_count_and_cost_no_overlap() -> None:
    def body(rank: int) -> tuple[str, int]:
        parameters = make_parameters()
        optimizer = wrap(parameters, backward_passes_per_step=2)
        for step in range(1, 9):
            optimizer.zero_grad()
            if step == 6:
                backward(parameters, gradients(20, rank), BACKWARDS)
                optimizer.zero_grad()
            for part in (0, 1):
                backward(parameters, gradients(2 * step + part, rank), BACKWARDS)
            optimizer.step()
        return values(parameters), optimizer.compression_report()["redone_steps"]

    assert run(body)[1] == 0


def test_step_without_a_backward_moves_nothing() -> None:
    def body(rank: int) -> str:
        parameters = make_parameters()
        optimizer = wrap(parameters)
        for step in range(1, 9):
            one_step(parameters, optimizer, step, rank)
            before = values(parameters)
            optimizer.zero_grad()
            optimizer.step()
            assert values(parameters) == before
        return before

    run(body)


def test_step_twice_takes_the_same_gradients_again() -> None:
    def train(again: bool) -> str:
        def body(rank: int) -> str:
            parameters = make_parameters()
            optimizer = wrap(parameters)
            for step in range(1, 7):
                one_step(parameters, optimizer, step, rank)
                if again:
                    optimizer.step()
                else:
                    one_step(parameters, optimizer, step, rank)
            return values(parameters)

        return run(body)

    assert train(again=True) == train(again=False)


def test_two_optimizers_on_one_model_give_what_each_gives_alone() -> None:
    """As for a GAN: every backward reaches all parameters, and one optimizer steps twice for one step of the other."""

    def train(which: set[str]) -> tuple[str, str, int]:
        def body(rank: int) -> tuple[str, str, int]:
            parameters = make_parameters()
            first = wrap(parameters[:2]) if "first" in which else None
            second = wrap(parameters[2:], freeze_step=4) if "second" in which else None
            for step in range(1, 9):
                for optimizer, turns in ((first, 2), (second, 1)):
                    if optimizer is None:
                        continue
                    for turn in range(turns):
                        optimizer.zero_grad()
                        backward(parameters, gradients(3 * step + turn, rank), BACKWARDS)
                        optimizer.step()
            redone = sum(o.compression_report()["redone_steps"] for o in (first, second) if o is not None)
            return values(parameters[:2]), values(parameters[2:]), redone

        return run(body)

    first, second, redone = train({"first", "second"})
    assert redone == 0
    assert first == train({"first"})[0]
    assert second == train({"second"})[1]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_are_stepped_like_others() -> None:
    def body(rank: int) -> str:
        parameters = make_parameters()
        optimizer = wrap(parameters)
        for step in range(1, 9):
            optimizer.zero_grad()
            for index, grad in enumerate(gradients(step, rank)):
                (parameters[index] * torch.from_numpy(grad)).sum().backward(create_graph=True)
            optimizer.step()
        return values(parameters)

    assert run(body) == plain(8)


def test_the_wrapped_optimizers_own_step_is_refused_before_it_sets_the_replicas_apart() -> None:
    def body(rank: int) -> str:
        parameters = make_parameters()
        optimizer = wrap(parameters)
        one_step(parameters, optimizer, 1, rank)
        optimizer.zero_grad()
        backward(parameters, gradients(2, rank), BACKWARDS)
        with pytest.raises(InvalidRequestError) as raised:
            optimizer._inner.step()
        assert str(raised.value) == (
            "step() of the Adam that DistributedOneBitAdam wraps was called, which would move this rank's parameters "
            "only; call step() of the DistributedOneBitAdam."
        )
        optimizer.step()
        return values(parameters)

    assert run(body) == plain(2)


def raises_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["while it waits", "while parameters move"])
def test_a_step_that_was_interrupted_is_the_last(when: str) -> None:
    def body(rank: int) -> None:
        parameters = make_parameters()
        optimizer = wrap(parameters)
        one_step(parameters, optimizer, 1, rank)
        if rank:  # comes when the other has been interrupted
            if when == "while parameters move":
                one_step(parameters, optimizer, 2, rank)
            assert broadcast_object("interrupted", 0) == "interrupted"
            return
        if when == "while it waits":
            interrupt_soon(KeyboardInterrupt)
        else:
            optimizer._inner.step = raises_interrupt
        with pytest.raises(KeyboardInterrupt):
            one_step(parameters, optimizer, 2, rank)
        broadcast_object("interrupted", 0)
        for use in (optimizer.step, lambda: one_step(parameters, optimizer, 3, rank)):
            with pytest.raises(HorovodInternalError) as error:
                use()
            assert str(error.value) == (
                "DistributedOneBitAdam: a step was interrupted by KeyboardInterrupt, so this rank may have missed what "
                "the others have done. Wrap the optimizer anew, and load a state on all ranks."
            )

    run(body)


def test_the_others_hear_of_a_step_that_was_interrupted() -> None:
    def body(rank: int) -> None:
        parameters = make_parameters()
        optimizer = wrap(parameters)
        one_step(parameters, optimizer, 1, rank)
        if rank == 0:
            optimizer._inner.step = raises_interrupt
            with pytest.raises(KeyboardInterrupt):
                one_step(parameters, optimizer, 2, rank)
        else:
            one_step(parameters, optimizer, 2, rank)
            with pytest.raises(PeerError) as error:
                one_step(parameters, optimizer, 3, rank)
            assert str(error.value) == (
                "DistributedOneBitAdam: step 3 cannot end: rank 0 was interrupted by KeyboardInterrupt. Wrap the "
                "optimizer anew, and load a state, on all ranks."
            )
        broadcast_parameters([(f"p{i}", p) for i, p in enumerate(parameters)], 0)
        again = wrap(parameters)
        for step in (3, 4):
            one_step(parameters, again, step, rank)

    run(body)


@threads_only
def test_a_step_that_waits_for_a_rank_that_joins_again_says_to_do_so_too() -> None:
    def body(session: Session) -> None:
        rank, parameters = rank_of(session), make_parameters()
        optimizer = wrap(parameters)
        one_step(parameters, optimizer, 1, rank)
        if rank > 0:
            with pytest.raises(PeerError) as error:
                one_step(parameters, optimizer, 2, rank)
            assert str(error.value) == (
                "DistributedOneBitAdam: step 2 cannot end: rank 0 has left to join again. Go back to the last commit "
                "and join again, too, as hvd.elastic.run does."
            )
        session.shutdown(why=REJOINS)

    run_ranks(2, body)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_on_a_process_set_that_was_removed_says_so(overlap: bool) -> None:
    def body(session: Session) -> None:
        pair = add_process_set([0, 1])
        if pair.included():
            parameters = make_parameters()
            optimizer = wrap(parameters, process_set=pair, overlap=overlap)
            for step in range(1, 5):
                one_step(parameters, optimizer, step, rank_of(session))
        remove_process_set(pair)
        if rank_of(session) < 2:
            for step in (5, 6):
                with pytest.raises(InvalidRequestError) as raised:
                    one_step(parameters, optimizer, step, rank_of(session))
                assert str(raised.value) == "process set [0, 1] was removed."

    run_ranks(3, body)


def test_what_the_wrapped_optimizer_would_load_alone_is_refused() -> None:
    def body(rank: int) -> None:
        optimizer = wrap(make_parameters())
        with pytest.raises(InvalidRequestError) as raised:
            optimizer._inner.load_state_dict(optimizer._inner.state_dict())
        assert str(raised.value) == (
            "load_state_dict() of the Adam that DistributedOneBitAdam wraps was called, which would change nothing "
            "here; call load_state_dict() of the DistributedOneBitAdam, or load before you wrap."
        )

    run(body)


@threads_only
def test_a_state_that_one_rank_alone_loads_is_told_at_the_next_step() -> None:
    def body(session: Session) -> str:
        parameters = make_parameters()
        optimizer = wrap(parameters)
        for step in range(1, 5):
            one_step(parameters, optimizer, step, rank_of(session))
        if rank_of(session) == 0:
            optimizer.load_state_dict(optimizer.state_dict())
            with pytest.raises(StallError) as error:
                one_step(parameters, optimizer, 5, 0)
            session.shutdown(failed=True, why="has seen enough")
            return re.sub(r"\d+ s ago", "N s ago", re.sub(r":\d+ in", ":N in", str(error.value)))
        with pytest.raises(PeerError, match="rank 0 has seen enough"):
            one_step(parameters, optimizer, 5, 1)
        return ""

    said = run_ranks(2, body, Settings(stall_raise=True, stall_check_s=600.0))
    assert said[0] == (
        "tensor 'DistributedOneBitAdam: first step, or first after load_state_dict()': rank 0 submitted it N s ago, "
        "rank "
        "1 did not. rank 1 is at test_torch_unusual_use.py:N in one_step, in DistributedOneBitAdam: step 5. If a "
        "rank has begun anew alone, because it has loaded a state or caught an error, out of memory for instance: do "
        "so on all ranks, or broadcast the state."
    )


@threads_only
def test_two_optimizers_that_are_stepped_in_another_order_on_each_rank_are_an_error_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bystanders, "bystanders", lambda waiting: [])  # other ranks are threads of this process

    def body(session: Session) -> str:
        pairs = []
        for _ in range(2):
            parameters = make_parameters()
            pairs.append((parameters, wrap(parameters)))
        rank = rank_of(session)
        for step in range(1, 3):
            for parameters, optimizer in pairs:
                one_step(parameters, optimizer, step, rank)
        parameters, optimizer = pairs[rank]
        with pytest.raises(StallError) as error:
            one_step(parameters, optimizer, 3, rank)
        with pytest.raises(StallError):
            optimizer.step()  # it is the last
        return re.sub(r":\d+ in", ":N in", str(error.value))

    said = run_ranks(2, body, Settings(deadlock_s=0.3, stall_check_s=600.0))
    names = ["DistributedOneBitAdam", "DistributedOneBitAdam#2"]
    for rank, text in enumerate(said):
        assert text == (
            f"{names[rank]}: step 3: rank(s) [{1 - rank}] will not come to it: rank {1 - rank} is at "
            f"test_torch_unusual_use.py:N in one_step, in {names[1 - rank]}: step 3. Step the optimizers in one "
            "order on all ranks. No rank can move, so ocomm gave up after 0.3 s (OCOMM_DEADLOCK_SECONDS): all "
            "ranks must make the same calls, and take the same steps, in the same order."
        )


@pytest.mark.parametrize("before", [0, 2, 6])
def test_a_state_may_be_broadcast_in_the_middle_of_training(before: int) -> None:
    def body(rank: int) -> tuple[str, int]:
        parameters = make_parameters()
        optimizer = wrap(parameters)
        for step in range(1, 11):
            if step == before + 1:
                optimizer.param_groups[0]["lr"] = 0.01 + 0.01 * rank
                broadcast_optimizer_state(optimizer, root_rank=1)
            one_step(parameters, optimizer, step, rank)
        assert optimizer.param_groups[0]["lr"] == 0.02
        return values(parameters), optimizer.compression_report()["step"]

    assert run(body)[1] == 10


#: Optimizers whose wrapped optimizer keeps its moments in these steps.
KEEP_MOMENTS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "1-bit Adam": lambda adam: DistributedOneBitAdam(adam, freeze_step=5),
    "1-bit LAMB": lambda adam: DistributedOneBitLamb(adam, freeze_step=5),
    "8 bits": lambda adam: DistributedOptimizer(adam, compression=Compression.int8),
    "4 bits": lambda adam: DistributedOptimizer(adam, compression=Compression.int4),
    "DiLoCo": lambda adam: DistributedDiLoCo(adam, sync_every=2),
}


@pytest.mark.parametrize("low_precision", few([False, True], [False]))
@pytest.mark.parametrize("before", [1, 4])
@pytest.mark.parametrize("kind", KEEP_MOMENTS)
def test_a_state_that_is_replaced_by_an_empty_one_is_that_of_the_steps(
    kind: str, before: int, low_precision: bool
) -> None:
    def assign(optimizer: Any, adam: torch.optim.Optimizer) -> None:
        optimizer.state = {}

    def assign_inside(optimizer: Any, adam: torch.optim.Optimizer) -> None:
        adam.state = defaultdict(dict)

    def zero(optimizer: Any, adam: torch.optim.Optimizer) -> None:
        for entry in adam.state.values():
            for moment in entry.values():
                moment.zero_()

    def train(rank: int, reset: Callable[[Any, torch.optim.Optimizer], None] | None) -> list[str]:
        parameters = make_parameters()
        if low_precision:
            parameters = [torch.nn.Parameter(p.detach().bfloat16()) for p in parameters]
        adam = torch.optim.Adam(parameters, lr=1e-2, foreach=False)
        optimizer = KEEP_MOMENTS[kind](adam)
        for step in range(1, 9):
            if step == before and reset is not None:
                reset(optimizer, adam)
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), BACKWARDS)
            optimizer.step()
        saved = optimizer.state_dict()["state"]
        assert list(saved) == list(range(len(parameters)))
        moments = [value.float().numpy() for entry in saved.values() for value in entry.values()]
        return [digest([p.detach().float().numpy() for p in parameters]), digest(moments)]

    def body(rank: int) -> bool:
        reset = train(rank, zero)
        assert train(rank, assign) == reset
        assert train(rank, assign_inside) == reset
        return train(rank, None) == reset

    assert run(body) == (before == 1)


#: Optimizers that keep moments themselves after six steps.
KEPT_BY_OCOMM = {
    **{name: kind for name, kind in KINDS.items() if not name.endswith("dense")},
    "1-bit Adam, sharded": Kind(DistributedOneBitAdam, options={"freeze_step": 100, "shard_state": True}),
}


@pytest.mark.parametrize("kind", KEPT_BY_OCOMM)
def test_a_state_without_the_moments_cannot_be_reset_and_the_error_says_how_to_begin_anew(kind: str) -> None:
    loads_plain = kind[0] in "10E"

    def train(rank: int, begin_anew: str) -> str:
        parameters = make_parameters()
        optimizer = KEPT_BY_OCOMM[kind].wrap(parameters)
        optimizer.state = {}  # nothing is lost before the first step
        step = 0
        while step < 6 or not optimizer.compression_report().get("synced", True):
            step += 1
            one_step(parameters, optimizer, step, rank)
        optimizer.state = optimizer.state
        for reset in (lambda: setattr(optimizer, "state", {}), optimizer.state.clear):
            with pytest.raises(InvalidRequestError, match="keeps moments itself, so replacing or clearing") as raised:
                reset()
        assert ("call optimizer.load_state_dict({'state': {}, " in str(raised.value)) == loads_plain
        assert ("wrap a new SGD over the same parameters" in str(raised.value)) != loads_plain
        if begin_anew == "load":
            optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
        elif begin_anew == "wrap":
            optimizer = KEPT_BY_OCOMM[kind].wrap(parameters)
        for later in range(step + 1, step + 7):
            one_step(parameters, optimizer, later, rank)
        return values(parameters)

    def body(rank: int) -> bool:
        wrapped = train(rank, "wrap")
        assert not loads_plain or train(rank, "load") == wrapped
        return train(rank, "") != wrapped

    assert all(run_ranks(2, lambda session: body(rank_of(session))))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
def test_an_optimizer_cannot_be_copied_and_the_error_says_what_to_do(duplicate: Callable[[Any], Any]) -> None:
    def body(rank: int) -> None:
        optimizer = wrap(make_parameters())
        with pytest.raises(InvalidRequestError) as raised:
            duplicate(optimizer)
        assert str(raised.value) == (
            "DistributedOneBitAdam cannot be copied or pickled: it holds connections to the other ranks. "
            "Save or send its state_dict(), and load it into a new one; of a scheduler that holds it, the scheduler's."
        )

    run(body)


def test_a_rank_that_raised_in_backward_and_goes_on_without_zero_grad_joins_its_next_step_to_the_others_last() -> None:
    def explode(grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("hook")

    def body(rank: int) -> str:
        parameters = make_parameters()
        optimizer = wrap(parameters)
        for step in range(1, 9 + rank):  # so that both call step() eight times
            failing = step == 6 and rank == 1
            if step != 7:
                optimizer.zero_grad()
            handle = parameters[1].register_hook(explode) if failing else None
            try:
                backward(parameters, gradients(step, rank), BACKWARDS)
            except RuntimeError:
                assert handle is not None
                handle.remove()
                continue
            optimizer.step()
        return values(parameters)

    run(body)


# Torch's defaults


@pytest.fixture
def bfloat16_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("kind", ["1-bit Adam, compressed", "1-bit LAMB, dense", "0/1 Adam"])
def test_steps_are_counted_in_float32_whatever_the_default_is(kind: str, bfloat16_by_default: None) -> None:
    def body(rank: int) -> list[Any]:
        parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.float32))
        optimizer = KINDS[kind].wrap([parameter], **({"freeze_step": 1000} if kind.endswith("dense") else {}))
        for step in range(260):
            parameter.grad = torch.full((8,), step % 7 - 3.0, dtype=torch.float32)
            optimizer.step()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        counts = [state["state"][0]["step"] for state in (saved, optimizer.state_dict())]
        return [(count.item(), count.dtype) for count in counts]

    assert run(body) == [(260.0, torch.float32)] * 2


def dense(op: int) -> Callable[..., Any]:
    return lambda parameters: DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), op=op)


OTHERS = {
    "dense": dense(Average),
    "Adasum": dense(Adasum),
    "int8": lambda p: DistributedOptimizer(torch.optim.SGD(p, lr=0.1), compression=Compression.int8),
    "DiLoCo": lambda p: DistributedDiLoCo(torch.optim.SGD(p, lr=0.1), sync_every=2),
}


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_the_default_device_is_no_matter(kind: str) -> None:
    make = OTHERS[kind] if kind in OTHERS else KINDS[kind].wrap

    def train(device: str) -> str:
        def body(rank: int) -> str:
            parameters = make_parameters()
            with torch.device(device):
                optimizer = make(parameters)
                for step in range(1, 7):
                    one_step(parameters, optimizer, step, rank)
                if kind == "DiLoCo":
                    optimizer.finish()
                optimizer.load_state_dict(optimizer.state_dict())
                if kind not in OTHERS:
                    optimizer.load_rank_state_dict(optimizer.rank_state_dict())
                one_step(parameters, optimizer, 7, rank)
                if kind == "DiLoCo":
                    optimizer.finish()
            return values(parameters)

        return run(body)

    assert train("meta") == train("cpu")
