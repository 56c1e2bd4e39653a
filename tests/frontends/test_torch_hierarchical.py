"""Compressed optimizers on several nodes of several ranks, against the plain simulations.

Hosts are names that the ranks give themselves, one letter per rank: "aabb" is two hosts with two ranks each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.errors import InvalidRequestError, MismatchError, NonFiniteError
from ocomm.session import Session
from ocomm.types import Nodes, Settings
from ocomm_torch import (
    DistributedBirder,
    DistributedLion,
    DistributedOneBitAdam,
    DistributedOneBitLamb,
    DistributedZeroOneAdam,
)
from tests.frontends.onebit_jobs import digest, gradients, initial, train
from tests.oracle import birder, lion, onebit_adam, onebit_lamb, zero_one_adam
from tests.oracle.clipping import Clipping
from tests.oracle.hierarchical import node_sums
from tests.tiers import alternating, few
from tests.worlds import MPI_SIZE, PATIENT, run_ranks

#: Many blocks of 64, a short last one, a block of less, and a single element.
SHAPES = ((20, 33), (130,), (33,), (1,))
BLOCKS = {"block_size": 64}
MASKS = {"mask_refresh": 5}
#: Intervals of 1, 2 and 4 steps between syncs within 40 steps, and refreshes at first.
SCHEDULE = {"local_step_start": 8, "local_step_doubling": 10, "local_step_clip": 4, "var_update_scaler": 4}


def grads(step: int, rank: int) -> Sequence[np.ndarray | None]:
    """Some are missing on some ranks, some on all; one tensor comes late, and rows of another, at last on one rank."""
    chance = np.random.default_rng([13, step])
    nowhere, here = chance.random(len(SHAPES)) < 0.1, np.random.default_rng([14, step, rank]).random(len(SHAPES)) < 0.2
    nowhere[2] |= step < 4
    found = gradients(step, rank, SHAPES)
    assert found[0] is not None
    found[0][10 if step < 12 else 15 if rank != 1 else 20 :] = 0.0
    return [None if a or b else g for g, a, b in zip(found, nowhere, here, strict=True)]


def no_hash(parameters: list[torch.Tensor], optimizer: Any) -> str:
    return ""


def on(hosts: str, steps: int, wrap: Callable[..., Any], settings: Settings | None = None, **options: Any) -> list[Any]:
    job = {"hierarchical": True, "wrap": wrap, "shapes": SHAPES, "grads": grads, "hash_state": no_hash, **BLOCKS}

    def body(session: Session) -> Any:
        assert session.topology is not None
        return train(session.topology.rank, steps, **{**job, **options})

    return run_ranks(len(hosts), body, settings=settings, hosts=list(hosts))


def in_nodes(hosts: str, simulation: type, **settings: Any) -> tuple[Any, list[int]]:
    """A simulation of these hosts, and the ranks in the order in which it wants their gradients."""
    members = Nodes.of_hosts(hosts).members
    order = [rank for node in members for rank in node]
    return simulation(initial(SHAPES), len(hosts), nodes=[len(node) for node in members], **settings), order


def onebit_digests(
    hosts: str,
    steps: int,
    warmup: int,
    weight_decay: float = 0.0,
    *,
    grads: Callable[[int, int], Sequence[np.ndarray | None]] = grads,
    clipping: Clipping | None = None,
) -> list[str]:
    """torch's AdamW on the average of nodes' sums up to ``warmup``, clipped by torch, then the simulation."""
    members = Nodes.of_hosts(hosts).members
    parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial(SHAPES)]
    adam = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=weight_decay, foreach=False)
    settings = {"freeze_step": warmup, "lr": 1e-2, "weight_decay": weight_decay, "decoupled": True, **BLOCKS, **MASKS}
    simulation, order = in_nodes(hosts, onebit_adam.Simulation, clipping=clipping, **settings)
    digests = []
    for step in range(1, warmup + 1):
        each = [grads(step, rank) for rank in range(len(hosts))]
        for number, parameter in enumerate(parameters):
            local = [g[number] for g in each]
            parameter.grad = None
            if any(g is not None for g in local):
                sums = node_sums(members, [np.zeros(SHAPES[number], np.float32) if g is None else g for g in local])
                total = sums[0].copy()
                for part in sums[1:]:
                    total += part
                parameter.grad = torch.from_numpy(total * np.float32(1 / len(sums)))
        if clipping is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clipping.max_grad_norm, foreach=False)
        adam.step()
        digests.append(digest([p.detach().numpy() for p in parameters]))
    for index, parameter in enumerate(parameters):
        state = adam.state[parameter]
        simulation.adopt(
            index,
            param=parameter.detach().numpy(),
            momentum=state["exp_avg"].numpy(),
            variance=state["exp_avg_sq"].numpy(),
            step=int(state["step"]),
        )
    simulation.end_warmup()
    for step in range(warmup + 1, steps + 1):
        simulation.step([grads(step, rank) for rank in order])
        digests.append(digest(simulation.params))
    return digests


@pytest.mark.short("aaab-")
@pytest.mark.parametrize(
    ("hosts", "steps"),
    # Of the network 40 steps show as much.
    [("aabb", 40 if MPI_SIZE else 200), ("abab", 40), ("aaab", 40), ("abcc", 40), ("aaabbb", 40)],
)
def test_onebit_adam_equals_the_simulation_on_all_ranks_after_every_step(hosts: str, steps: int) -> None:
    def adamw(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=False)

    expected = onebit_digests(hosts, steps, 6, 0.1)
    for result in on(hosts, steps, DistributedOneBitAdam, make=adamw, freeze_step=6, **MASKS):
        assert result["digests"] == expected
        assert result["report"]["woken_elements"] > 0
        assert result["report"]["form"] == "hierarchical"


@pytest.mark.parametrize(("hosts", "steps"), [("aabb", 40 if MPI_SIZE else 100), ("aaab", 40), ("abcc", 40)])
def test_birder_equals_the_simulation_on_all_ranks_after_every_step(hosts: str, steps: int) -> None:
    simulation, order = in_nodes(hosts, birder.Birder, lr=1e-2, weight_decay=0.1, seed=7, beta=0.9)
    expected = []
    for step in range(1, steps + 1):
        simulation.step([grads(step, rank) for rank in order])
        expected.append(digest(simulation.params))

    def sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-2, weight_decay=0.1)

    for result in on(hosts, steps, DistributedBirder, make=sgd, seed=7, beta=0.9):
        assert result["digests"] == expected


@pytest.mark.parametrize(("hosts", "steps"), [("aabb", 40 if MPI_SIZE else 60), ("aaab", 40), ("abcc", 40)])
def test_lion_equals_the_simulation_on_all_ranks_after_every_step(hosts: str, steps: int) -> None:
    simulation, order = in_nodes(hosts, lion.Lion, lr=1e-2, weight_decay=0.1, seed=7)
    expected = []
    for step in range(1, steps + 1):
        simulation.step([grads(step, rank) for rank in order])
        expected.append(digest(simulation.params))

    def sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-2, weight_decay=0.1)

    for result in on(hosts, steps, DistributedLion, make=sgd, seed=7):
        assert result["digests"] == expected


#: Coupled weight decay, and options of refreshes.
ZERO_ONE: list[tuple[float, dict[str, int]]] = [(0.0, {}), (0.1, {}), (0.0, {"var_freeze_step": 30})]


@pytest.mark.parametrize(("hosts", "given"), alternating(["aabb", "aaab", "abcc"], ZERO_ONE), ids=str)
def test_zero_one_adam_equals_the_simulation_on_every_rank_after_every_step(
    hosts: str, given: tuple[float, dict[str, int]]
) -> None:
    """With ``var_freeze_step`` there are refreshes in local steps, where a tensor travels dense alone."""
    steps = 40 if hosts != "aabb" or MPI_SIZE else 60
    decay, refreshes = given
    options = {**SCHEDULE, **MASKS, **refreshes}
    simulation, order = in_nodes(hosts, zero_one_adam.Simulation, lr=1e-2, weight_decay=decay, **BLOCKS, **options)
    members = Nodes.of_hosts(hosts).members
    expected: list[list[str]] = [[] for _ in hosts]
    for step in range(1, steps + 1):
        simulation.step([grads(step, rank) for rank in order])
        for worker, node in enumerate(members):
            for rank in node:
                expected[rank].append(digest(simulation.params_of(worker)))

    def adam(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-2, foreach=False, weight_decay=decay)

    results = on(hosts, steps, DistributedZeroOneAdam, make=adam, **options)
    assert [result["digests"] for result in results] == expected
    report = results[0]["report"]
    assert (report["syncs"], report["local_steps"]) == (simulation.syncs, simulation.local_steps)
    assert report["local_steps"] > 10 and report["woken_elements"] == simulation.woken
    assert (simulation.woken > 0) == (not decay), "with a coupled decay every element has a gradient"


def waves(step: int, rank: int) -> Sequence[np.ndarray | None]:
    """``grads`` with a norm that is above ``MAX_NORM`` in some steps and below it in others."""
    size = np.float32([0.1, 0.3, 1.0, 4.0, 0.5][step % 5])
    return [None if g is None else g * size for g in grads(step, rank)]


def clipped_onebit(hosts: str, steps: int, clipping: Clipping) -> list[str]:
    return onebit_digests(hosts, steps, 6, 0.1, grads=waves, clipping=clipping)


def clipped(kind: type, **settings: Any) -> Callable[[str, int, Clipping], list[str]]:
    def law(hosts: str, steps: int, clipping: Clipping) -> list[str]:
        simulation, order = in_nodes(hosts, kind, lr=1e-2, weight_decay=0.1, clipping=clipping, **settings)
        digests = []
        for step in range(1, steps + 1):
            simulation.step([waves(step, rank) for rank in order])
            digests.append(digest(simulation.params))
        return digests

    return law


MAX_NORM = 10.0
#: Optimizer, what it wraps, options, and the law.
CLIPPED: dict[str, tuple[Any, Any, dict[str, Any], Callable[[str, int, Clipping], list[str]]]] = {
    "1-bit Adam": (DistributedOneBitAdam, torch.optim.AdamW, {"freeze_step": 6, **MASKS}, clipped_onebit),
    "1-bit LAMB": (
        DistributedOneBitLamb,
        torch.optim.AdamW,
        {"freeze_step": 6, **MASKS},
        clipped(onebit_lamb.Simulation, freeze_step=6, **BLOCKS, **MASKS),
    ),
    "Birder": (DistributedBirder, torch.optim.SGD, {"seed": 7, "beta": 0.9}, clipped(birder.Birder, seed=7, beta=0.9)),
    "Lion": (DistributedLion, torch.optim.SGD, {"seed": 7}, clipped(lion.Lion, seed=7)),
}


@pytest.mark.parametrize("hosts", few(["aabb", "aaab"], ["aabb"]))
@pytest.mark.parametrize(("kind", "clip"), alternating(CLIPPED, ["exact", "previous"]))
def test_clipped_by_one_norm_of_all_ranks_it_equals_the_simulation(kind: str, hosts: str, clip: str) -> None:
    wrap, inner, options, law = CLIPPED[kind]
    clipping = Clipping(MAX_NORM, previous=clip == "previous")
    expected = law(hosts, 40, clipping)
    assert {f == 1.0 for f in clipping.factors} == {True, False}, "some steps must be clipped, others not"
    clips = {"max_grad_norm": MAX_NORM, "clip": clip, "grads": waves, **options}
    results = on(hosts, 40, wrap, make=lambda p: inner(p, lr=1e-2, weight_decay=0.1, foreach=False), **clips)
    for result in results:
        assert result["digests"] == expected
        assert result["report"]["grad_norm"] == pytest.approx(clipping.norm, rel=1e-12)
        assert (result["report"]["form"], result["report"]["redone_steps"]) == ("hierarchical", 0)


KINDS: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
    "1-bit Adam": (DistributedOneBitAdam, torch.optim.Adam, {"freeze_step": 4}),
    "1-bit LAMB": (DistributedOneBitLamb, torch.optim.AdamW, {"freeze_step": 4}),
    "0/1 Adam": (DistributedZeroOneAdam, torch.optim.Adam, SCHEDULE),
    "Birder": (DistributedBirder, torch.optim.SGD, {}),
    "Lion": (DistributedLion, torch.optim.SGD, {}),
}


@pytest.mark.parametrize("kind", few(KINDS, ["1-bit Adam", "0/1 Adam", "Birder"]))
def test_the_result_does_not_depend_on_segments_window_overlap_engine_or_arrival_order(kind: str) -> None:
    wrap, inner, options = KINDS[kind]

    def shuffled(step: int, rank: int) -> list[int]:
        return np.random.default_rng([step, rank]).permutation(len(SHAPES)).tolist()

    variants: list[tuple[Settings, dict[str, Any]]] = [
        (PATIENT, {"overlap": False}),
        (PATIENT, {"order": shuffled}),
        (replace(PATIENT, segment_nbytes=64, window=1), {"order": shuffled}),
        (replace(PATIENT, segment_nbytes=64, window=8, engine="python"), {}),
    ]
    found = set()
    for settings, variant in variants:
        results = on("aabb", 24, wrap, settings, make=lambda p: inner(p, lr=1e-2, foreach=False), **options, **variant)
        found.add(tuple(tuple(result["digests"]) for result in results))
    assert len(found) == 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Lion"])
def test_each_rank_holds_the_errors_of_its_slice_alone(kind: str) -> None:
    wrap, inner, options = KINDS[kind]
    results = on("aabb", 8, wrap, make=lambda p: inner(p, lr=1e-2, foreach=False), **options)
    numel = sum(int(np.prod(shape)) for shape in SHAPES)
    for node in ((0, 1), (2, 3)):
        held = sum(results[rank]["report"]["memory_bytes"]["worker_error"] for rank in node)
        assert 8 * numel <= held <= 8 * (numel + 16 * 2 * len(SHAPES))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_on_one_rank_is_named_on_all_and_changes_nothing(kind: str) -> None:
    wrap, inner, options = KINDS[kind]

    def poisoned(step: int, rank: int) -> list[np.ndarray | None]:
        found = gradients(step, rank, SHAPES)
        if step in (3, 14) and rank == 2 and found[0] is not None:
            found[0][7, 7] = np.nan
        return found

    def body(session: Session) -> list[str]:
        assert session.topology is not None
        rank = session.topology.rank
        parameters = [torch.nn.Parameter(torch.from_numpy(array)) for array in initial(SHAPES)]
        optimizer = wrap(inner(parameters, lr=1e-2, foreach=False), hierarchical=True, **options, **BLOCKS)
        messages = []
        for step in range(1, 17):
            for parameter, grad in zip(parameters, poisoned(step, rank), strict=True):
                parameter.grad = torch.from_numpy(grad)
            before = digest([p.detach().numpy() for p in parameters])
            try:
                optimizer.step()
            except NonFiniteError as error:
                assert digest([p.detach().numpy() for p in parameters]) == before
                messages.append(f"{step}: {error}")
        return messages

    for messages in run_ranks(4, body, hosts=list("aabb")):
        assert [message.split(":")[0] for message in messages] == ["3", "14"]
        assert all("on rank(s) [2]" in message for message in messages)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", [0, 3])
def test_a_rank_that_is_a_step_ahead_is_an_error_on_all_of_them(kind: str, odd: int) -> None:
    wrap, inner, options = KINDS[kind]

    def body(session: Session) -> str:
        assert session.topology is not None
        rank = session.topology.rank
        parameters = [torch.nn.Parameter(torch.from_numpy(array)) for array in initial(SHAPES)]
        optimizer = wrap(inner(parameters, lr=1e-2, foreach=False), hierarchical=True, **options, **BLOCKS)
        for step in range(1, 30):
            for parameter, grad in zip(parameters, gradients(step, rank, SHAPES), strict=True):
                parameter.grad = torch.from_numpy(grad)
            if step == 12 and rank == odd:
                optimizer._driver.stepper.step += 1
            try:
                optimizer.step()
            except MismatchError as error:
                assert step == 12
                return str(error)
        return "no error"

    for message in run_ranks(4, body, hosts=list("aabb")):
        assert "the ranks are not at the same step" in message and f"[{odd}] are at step 13" in message


def test_bytes_between_nodes_are_counted_apart_from_those_inside() -> None:
    results = on("aabb", 10, DistributedBirder, make=lambda p: torch.optim.SGD(p, lr=1e-2))
    for result in results:
        report = result["report"]
        assert 0 < report["bytes_sent"] < report["bytes_sent_inside"]
    flat = on("aabb", 10, DistributedBirder, make=lambda p: torch.optim.SGD(p, lr=1e-2), hierarchical=False)
    assert {result["report"]["form"] for result in flat} == {"flat"}
    assert {result["report"]["bytes_sent_inside"] for result in flat} == {0}


@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
def test_the_ratio_is_that_of_the_bytes_that_leave_a_node_even_or_not(hosts: str) -> None:
    shapes = ((400, 400),)
    job = {"shapes": shapes, "grads": lambda step, rank: gradients(step, rank, shapes), "block_size": 4096}
    results = on(hosts, 3, DistributedBirder, make=lambda p: torch.optim.SGD(p, lr=1e-2), **job)
    # Each node has as many workers as the smallest one has ranks; the others send nothing to another node.
    workers = [number in (0, 3) or hosts == "aabb" for number in range(4)]
    for is_worker, report in zip(workers, (result["report"] for result in results), strict=True):
        names = ("bytes_sent", "bytes_dense", "ratio", "last_ratio")
        if is_worker:
            assert 30 < report["ratio"] < 32 and 30 < report["last_ratio"] < 32
        else:
            assert [report[name] for name in names] == [0, 0, None, None] and report["bytes_sent_inside"] > 0


def test_ranks_that_choose_different_forms_are_told() -> None:
    def body(session: Session) -> str:
        assert session.topology is not None
        parameter = torch.nn.Parameter(torch.zeros(100))
        with pytest.raises(MismatchError) as raised:
            DistributedOneBitAdam(torch.optim.Adam([parameter]), hierarchical=session.topology.rank != 1)
        return str(raised.value)

    for message in run_ranks(4, body, hosts=list("aabb")):
        assert "rank(s) [1] registered hierarchical=False" in message


def test_hierarchical_that_cannot_be_is_an_error_that_says_why() -> None:
    def body(session: Session) -> str:
        parameter = torch.nn.Parameter(torch.zeros(100))
        with pytest.raises(InvalidRequestError) as raised:
            DistributedOneBitAdam(torch.optim.Adam([parameter]), hierarchical=True)
        return str(raised.value)

    assert all("all 2 are on host 'a'" in message for message in run_ranks(2, body, hosts=["a", "a"]))
