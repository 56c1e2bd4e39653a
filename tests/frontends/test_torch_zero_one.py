"""DistributedZeroOneAdam against the plain simulation, and against what can go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.errors import CheckpointError, InvalidRequestError, MismatchError, NonFiniteError, SettingsError
from ocomm.optim.checkpoint import add_checksum
from ocomm.session import Session
from ocomm.types import Settings
from ocomm_torch import DistributedOneBitAdam, DistributedZeroOneAdam
from tests.frontends.onebit_jobs import SHAPES, backward, digest, gradients, initial, train
from tests.oracle.clipping import Clipping
from tests.oracle.zero_one_adam import Simulation, simulate
from tests.tiers import few
from tests.worlds import run_ranks

#: Intervals 1, 2 and 4 within 200 steps, and refreshes up to step 59.
SCHEDULE = {"local_step_start": 30, "local_step_doubling": 40, "local_step_clip": 4, "var_update_scaler": 4}
#: The same within 40 steps.
SHORT = {"local_step_start": 6, "local_step_doubling": 8, "local_step_clip": 4, "var_update_scaler": 4}

ADAMS: dict[str, tuple[Callable[[list[torch.Tensor]], torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (lambda p: torch.optim.Adam(p, lr=1e-2), {}),
    "Adam with coupled decay": (lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1), {"weight_decay": 0.1}),
    "AdamW": (
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        {"weight_decay": 0.1, "decoupled": True},
    ),
}
Grads = Callable[[int, int], Sequence[np.ndarray | None]]


def rank_of(session: Session) -> int:
    assert session.topology is not None
    return session.topology.rank


def state_digest(parameters: Sequence[torch.Tensor], optimizer: Any) -> str:
    """Hash of everything that a step may change on this rank: parameters, replicated state, this rank's own."""
    arrays = [p.detach().numpy() for p in parameters]
    saved, own = optimizer.state_dict(), optimizer._driver.core.rank_state()
    return digest([*arrays, *leaves(saved["state"]), *leaves(saved["ocomm"]["core"]), *leaves(own)])


def leaves(state: Any) -> list[np.ndarray]:
    if isinstance(state, dict):
        return [leaf for key in sorted(state, key=str) for leaf in leaves(state[key])]
    if isinstance(state, list):
        return [leaf for value in state for leaf in leaves(value)]
    if isinstance(state, torch.Tensor):
        return [state.numpy()]
    return [np.frombuffer(repr(state).encode(), np.uint8)]


def simulated(steps: int, ranks: int, grads: Grads = gradients, shapes: Any = SHAPES, **settings: Any) -> list:
    """Digests of every rank's parameters, after every step; and the simulation."""
    simulation = Simulation(initial(shapes), ranks, **{"lr": 1e-2, **settings})
    digests: list[list[str]] = [[] for _ in range(ranks)]
    for step in range(1, steps + 1):
        simulation.step([grads(step, rank) for rank in range(ranks)])
        for rank in range(ranks):
            digests[rank].append(digest(simulation.params_of(rank)))
    return [digests, simulation]


def trained(ranks: int, steps: int, settings: Settings | None = None, **options: Any) -> list[Any]:
    def body(session: Session) -> Any:
        return train(rank_of(session), steps, wrap=DistributedZeroOneAdam, hash_state=state_digest, **options)

    return run_ranks(ranks, body, settings=settings)


@pytest.mark.parametrize(
    ("kind", "ranks", "steps"),
    [
        pytest.param("Adam", 1, 200, marks=pytest.mark.long),
        ("Adam", 2, 80),
        ("AdamW", 4, 80),
        pytest.param("AdamW", 4, 200, marks=pytest.mark.long),
        ("Adam with coupled decay", 2, 80),
        pytest.param("AdamW", 1, 80, marks=pytest.mark.long),
    ],
)
def test_every_bit_equals_the_simulation_on_every_rank(kind: str, ranks: int, steps: int) -> None:
    make, settings = ADAMS[kind]
    results = trained(ranks, steps, make=make, **SCHEDULE)
    expected, simulation = simulated(steps, ranks, **settings, **SCHEDULE)
    assert [result["digests"] for result in results] == expected
    for result in results:
        report = result["report"]
        counts = report["syncs"], report["local_steps"], report["refreshes"]
        assert counts == (simulation.syncs, simulation.local_steps, simulation.refreshes)
        assert report["interval"] == simulation.interval(steps + 1)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": "l1", "variance_floor": 0.5},
        {"block_size": "tensor", "variance_floor": 0.0},
        {"block_size": 64, "var_freeze_step": 25},
        {"block_size": 64, "var_freeze_step": 3, "local_step_clip": 3},
    ],
    ids=["l1", "tensor", "refreshes-between-syncs", "few-refreshes"],
)
@pytest.mark.parametrize("kind", few(["Adam with coupled decay", "AdamW"], ["AdamW"]))
def test_every_bit_equals_the_simulation_with_every_option(kind: str, options: dict[str, Any]) -> None:
    make, settings = ADAMS[kind]
    results = trained(2, 40, make=make, **{**SHORT, **options})
    expected, _ = simulated(40, 2, **settings, **{**SHORT, **options})
    assert [result["digests"] for result in results] == expected


def sparse(step: int, rank: int) -> list[np.ndarray | None]:
    """A tensor like an embedding, whose rows come late or never, on some rank; one that is missing at times; one that
    comes late."""
    table, wide, narrow, single = gradients(step, rank)
    assert table is not None
    table[60:] = 0
    if step < 25:
        table[40:50] = 0
    if step < 8 or step % 2 != rank:
        table[50:60] = 0
    missing = np.random.default_rng([step, rank]).random() < 0.3 or step % 9 == 0
    return [table, None if missing else wide, narrow if step >= 21 else None, single if step > 2 else single * 0]


@pytest.mark.parametrize("kind", ADAMS)
def test_rows_and_tensors_that_come_late_or_are_missing_follow_the_simulation(kind: str) -> None:
    make, settings = ADAMS[kind]
    results = trained(2, 60, make=make, grads=sparse, mask_refresh=5, **SHORT)
    expected, simulation = simulated(60, 2, sparse, mask_refresh=5, **settings, **SHORT)
    assert [result["digests"] for result in results] == expected
    report = results[0]["report"]
    assert report["woken_elements"] == simulation.woken
    if kind != "Adam with coupled decay":  # which gives every element a gradient
        assert report["woken_elements"] >= 10 * 130
        assert report["masked_elements"] == 10 * 130
        assert np.array_equal(
            results[0]["parameters"][-1][0][60:] != initial()[0][60:], np.full((10, 130), kind == "AdamW")
        )


@pytest.mark.parametrize("pause", [1, 3])
def test_a_late_tensor_moves_in_every_step_with_a_gradient_but_its_first(pause: int) -> None:
    """Also if it never has gradients in two steps running."""
    present = range(4, 30, pause + 1)

    def late(step: int, rank: int) -> list[np.ndarray | None]:
        found = gradients(step, rank)
        return [*found[:-1], found[-1] if step in present else None]

    results = trained(2, 30, grads=late)
    expected, _ = simulated(30, 2, late)
    assert [result["digests"] for result in results] == expected
    values = [parameters[-1] for parameters in results[0]["parameters"]]
    moved = [step for step in range(2, 31) if not np.array_equal(values[step - 2], values[step - 1])]
    assert moved == list(present)[1:]


def test_learning_rates_that_start_at_0_or_differ_between_groups_follow_the_simulation() -> None:
    def lr(step: int) -> float:
        return 1e-2 * max(0, min(step - 3, 6)) / 6 if step != 22 else 0.0

    def schedule(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = lr(step)

    results = trained(2, 40, before_step=schedule, overlap=False, **SHORT)
    expected, simulation = simulated(40, 2, lr=lr, **SHORT)
    assert [result["digests"] for result in results] == expected
    assert results[0]["report"]["syncs"] == simulation.syncs
    first = results[0]["parameters"]
    assert all(np.array_equal(a, b) for a, b in zip(first[2], initial(), strict=True)), "the learning rate is 0"


def test_a_group_without_a_learning_rate_stays_while_the_other_learns() -> None:
    def body(session: Session) -> list[bool]:
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        groups = [{"params": parameters[:2], "lr": 0.0}, {"params": parameters[2:], "lr": 1e-2}]
        optimizer = DistributedZeroOneAdam(torch.optim.AdamW(groups, weight_decay=0.1), **SHORT)
        for step in range(1, 30):
            if step == 20:
                optimizer.param_groups[0]["lr"] = 1e-2
            if step in (2, 20):
                moved = [not np.array_equal(p.detach(), q) for p, q in zip(parameters, initial(), strict=True)]
                assert moved == [False, False, True, True]
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank_of(session)), range(4))
            optimizer.step()
        assert optimizer.compression_report()["synced"]
        return [digest([p.detach().numpy()]) for p in parameters]

    first, second = run_ranks(2, body)
    assert first == second
    assert first[:2] != [digest([p]) for p in initial()[:2]]


def test_all_ranks_hold_the_same_parameters_after_every_sync_and_only_then() -> None:
    reports: list[list[bool]] = [[], [], []]

    def body(session: Session) -> Any:
        rank = rank_of(session)

        def look(optimizer: Any) -> None:
            reports[rank].append(optimizer.compression_report()["synced"])

        return train(rank, 60, wrap=DistributedZeroOneAdam, hash_state=state_digest, watch=look, **SHORT)

    digests = [result["digests"] for result in run_ranks(3, body)]
    equal = [len(set(each)) == 1 for each in zip(*digests, strict=True)]
    assert equal == reports[0] == reports[1] == reports[2]
    assert equal[:13] == [True] * 13 and not all(equal)


# A sync that is no step

#: The first step of ``SHORT`` that is a sync after a local step.
SHORT_SYNC = 15
#: Finishes after the first step, after syncs, within intervals of 2 and of 4 steps, and twice in a row.
FINISHES = (1, 5, 17, 18, 26, 32, 32, 40)


def with_finishes(steps: int, ranks: int, grads: Grads = gradients, **settings: Any) -> list:
    digests: list[list[str]] = [[] for _ in range(ranks)]
    simulation = Simulation(initial(), ranks, **{"lr": 1e-2, **settings})
    for step in range(1, steps + 1):
        simulation.step([grads(step, rank) for rank in range(ranks)])
        for _ in range(FINISHES.count(step)):
            simulation.finish()
        for worker, of_worker in enumerate(digests[: len(simulation.nodes)]):
            of_worker.append(digest(simulation.params_of(worker)))
    return [digests, simulation]


def finishing(optimizer: Any) -> None:
    for _ in range(FINISHES.count(optimizer.compression_report()["step"])):
        optimizer.finish()
        assert optimizer.compression_report()["synced"]


@pytest.mark.short("{}", "mask_refresh")
@pytest.mark.parametrize("kind", ADAMS)
@pytest.mark.parametrize(
    "options",
    [{}, {"vote": "sync"}, {"overlap": False}, {"max_grad_norm": 1.0}, {"mask_refresh": 3}, {"dense_bits": 8}],
    ids=str,
)
def test_finish_is_the_simulations_sync_and_the_run_goes_on_bit_for_bit(kind: str, options: dict[str, Any]) -> None:
    make, settings = ADAMS[kind]
    settings = {**settings, **{k: v for k, v in options.items() if k in ("mask_refresh", "dense_bits")}}
    if "max_grad_norm" in options:
        settings["clipping"] = Clipping(options["max_grad_norm"], previous=False)
    results = trained(3, 45, make=make, watch=finishing, **SHORT, **options)
    expected, simulation = with_finishes(45, 3, **settings, **SHORT)
    assert [result["digests"] for result in results] == expected
    for step in set(FINISHES):
        assert len({result["digests"][step - 1] for result in results}) == 1, step
    for result in results:
        report = result["report"]
        assert report["step"] == 45 and report["syncs"] == simulation.syncs
        assert (report["local_steps"], report["refreshes"]) == (simulation.local_steps, simulation.refreshes)


def test_the_ranks_of_a_node_finish_as_one_worker() -> None:
    def body(session: Session) -> Any:
        job = {"hierarchical": True, "wrap": DistributedZeroOneAdam, "hash_state": state_digest, **SHORT}
        return train(rank_of(session), 45, watch=finishing, **job)

    expected, _ = with_finishes(45, 4, nodes=[3, 1], **SHORT)
    results = [result["digests"] for result in run_ranks(4, body, hosts="aaab")]
    assert results == [expected[0], expected[0], expected[0], expected[1]]


def test_finish_reads_no_gradient_that_backward_has_left() -> None:
    def body(session: Session) -> Any:
        rank = rank_of(session)

        def leave(optimizer: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.full_like(parameter, float("nan"))
            finishing(optimizer)
            optimizer.param_groups[0]["params"][0].grad = None

        return train(rank, 45, wrap=DistributedZeroOneAdam, hash_state=state_digest, watch=leave, **SHORT)

    assert [result["digests"] for result in run_ranks(2, body)] == with_finishes(45, 2, **SHORT)[0]


def test_rows_and_tensors_that_come_late_go_on_after_finish_as_in_the_simulation() -> None:
    results = trained(3, 45, grads=sparse, watch=finishing, **SHORT)
    expected, _ = with_finishes(45, 3, grads=sparse, **SHORT)
    assert [result["digests"] for result in results] == expected


def test_a_state_that_is_saved_after_finish_goes_on_bit_for_bit() -> None:
    def body(session: Session) -> Any:
        rank = rank_of(session)
        saved: dict[str, Any] = {}

        def look(optimizer: Any) -> None:
            finishing(optimizer)
            if optimizer.compression_report()["step"] == 26:
                saved["state"], saved["own"] = optimizer.state_dict(), optimizer.rank_state_dict()
                saved["parameters"] = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]

        whole = train(rank, 45, wrap=DistributedZeroOneAdam, hash_state=state_digest, watch=look, **SHORT)
        parameters = [torch.nn.Parameter(p) for p in saved["parameters"]]
        names = [f"tensor.{number}" for number in range(len(parameters))]
        adam = torch.optim.Adam(parameters, lr=1e-2, foreach=False)
        optimizer = DistributedZeroOneAdam(adam, zip(names, parameters, strict=True), **SHORT)
        optimizer.load_state_dict(saved["state"])
        optimizer.load_rank_state_dict(saved["own"])
        optimizer.finish()  # which is over
        for step in range(27, 46):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), range(len(parameters)))
            optimizer.step()
            finishing(optimizer)
        return whole["digests"][-1], digest([p.detach().numpy() for p in parameters])

    for whole, resumed in run_ranks(2, body):
        assert whole == resumed


def test_finish_between_backward_and_step_is_refused_and_leaves_the_step() -> None:
    def body(session: Session) -> Any:
        def early(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
            with pytest.raises(InvalidRequestError, match=r"finish\(\) was called between backward and step\(\)"):
                optimizer.finish()

        return train(
            rank_of(session), 20, wrap=DistributedZeroOneAdam, hash_state=state_digest, before_step=early, **SHORT
        )

    assert [result["digests"] for result in run_ranks(2, body)] == simulated(20, 2, **SHORT)[0]


def test_a_rank_that_finishes_while_another_steps_is_an_error_on_both() -> None:
    def body(session: Session) -> str:
        rank = rank_of(session)

        def stop(optimizer: Any) -> None:
            if rank == 1 and optimizer.compression_report()["step"] == SHORT_SYNC - 1:
                optimizer.finish()

        with pytest.raises(MismatchError) as found:
            train(rank, 20, wrap=DistributedZeroOneAdam, hash_state=state_digest, watch=stop, **SHORT)
        return str(found.value)

    for said in run_ranks(2, body):
        assert "lr" in said and "rank" in said, said


@pytest.mark.parametrize("engine", ["native", "python"])
def test_the_result_depends_on_neither_overlap_nor_segments_nor_order_of_arrival(engine: str) -> None:
    def shuffled(step: int, rank: int) -> list[int]:
        return np.random.default_rng([step, rank]).permutation(len(SHAPES)).tolist()

    plain = trained(2, 40, overlap=False, grads=sparse, mask_refresh=5, **SHORT)
    settings = Settings(engine=engine, segment_nbytes=65536, window=1)
    other = trained(2, 40, settings=settings, order=shuffled, grads=sparse, mask_refresh=5, **SHORT)
    assert [r["digests"] for r in plain] == [r["digests"] for r in other]
    assert [r["state"] for r in plain] == [r["state"] for r in other]


# What may happen between backward and step()

#: Of SHORT: the first one, an ordinary sync, a refresh, a local step, and a sync that ends an interval of 4.
KINDS = {"first": 1, "sync": 8, "refresh": 9, "local": 24, "late sync": 25}


def test_the_steps_below_are_of_the_kinds_they_are_meant_to_be() -> None:
    simulation = Simulation(initial(), 1, **SHORT)
    kinds = {}
    for step in range(1, 30):
        before = simulation.syncs, simulation.local_steps, simulation.refreshes
        simulation.step([gradients(step, 0)])
        now = simulation.syncs, simulation.local_steps, simulation.refreshes
        kinds[step] = tuple(b - a for a, b in zip(before, now, strict=True))
    assert [kinds[step] for step in KINDS.values()] == [(0, 0, 1), (1, 0, 0), (1, 0, 1), (0, 1, 0), (1, 0, 0)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_non_finite_gradient_on_one_rank_raises_on_all_changes_nothing_and_does_not_count(
    kind: str, overlap: bool
) -> None:
    bad = KINDS[kind]

    def body(session: Session) -> tuple[list[str], str]:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = DistributedZeroOneAdam(torch.optim.Adam(parameters, lr=1e-2), overlap=overlap, **SHORT)
        digests, message = [], ""
        for step in range(1, 31):
            if step == bad:
                before = state_digest(parameters, optimizer)
                optimizer.zero_grad()
                backward(parameters, gradients(step, rank), range(4))
                if rank == 1:
                    assert parameters[0].grad is not None
                    parameters[0].grad[3, 5] = float("inf") if overlap else float("nan")
                with pytest.raises(NonFiniteError) as raised:
                    optimizer.step()
                message = str(raised.value)
                assert state_digest(parameters, optimizer) == before
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), range(4))
            optimizer.step()
            digests.append(digest([p.detach().numpy() for p in parameters]))
        return digests, message

    expected, _ = simulated(30, 2, **SHORT)
    results = run_ranks(2, body)
    assert [digests for digests, _ in results] == expected
    for _, message in results:
        assert f"a gradient is NaN or Inf in step {bad}, on rank(s)" in message
        assert "[1]" in message or kind == "first"


@pytest.mark.parametrize("kind", KINDS)
def test_zero_grad_on_one_rank_skips_the_step_on_all(kind: str) -> None:
    def skip(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
        if step == KINDS[kind]:
            before = state_digest(parameters, optimizer)
            if rank == 1:
                optimizer.zero_grad()
            else:
                optimizer.step()
            assert state_digest(parameters, optimizer) == before
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), range(len(parameters)))

    results = trained(2, 30, before_step=skip, **SHORT)
    expected, _ = simulated(30, 2, **SHORT)
    assert [result["digests"] for result in results] == expected


def clip_one_rank(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
    if rank == 1:
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)


def change_lr(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 1e-3


def stop_learning(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.0


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (clip_one_rank, "refresh"),
        (clip_one_rank, "local"),
        (clip_one_rank, "late sync"),
        (change_lr, "sync"),
        (change_lr, "local"),
        (stop_learning, "late sync"),
    ],
)
def test_a_change_after_backward_gives_what_no_overlap_gives(change: Any, kind: str) -> None:
    def then(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
        if step >= KINDS[kind]:
            change(step, rank, parameters, optimizer)

    expected = trained(2, 30, before_step=then, overlap=False, **SHORT)
    found = trained(2, 30, before_step=then, **SHORT)
    assert [r["digests"] for r in found] == [r["digests"] for r in expected]
    assert [r["state"] for r in found] == [r["state"] for r in expected]


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=["unclipped", "clipped"])
def test_a_learning_rate_that_is_set_before_each_step_costs_one_exchange_which_is_counted_and_the_overlap(
    options: dict[str, float],
) -> None:
    """As in scripts that compute it from the number of steps, between backward and ``step()``."""

    def follow(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 60)

    def job(overlap: bool) -> list[tuple[dict[str, Any], list[int]]]:
        def body(session: Session) -> Any:
            sent: list[int] = []
            done = train(
                rank_of(session),
                12,
                wrap=DistributedZeroOneAdam,
                before_step=follow,
                watch=lambda o: sent.append(o.compression_report()["last_bytes_sent"]),
                overlap=overlap,
                hash_state=state_digest,
                **options,
            )
            return done, sent

        return run_ranks(2, body)

    for (alone, sent), (found, sent_twice) in zip(job(False), job(True), strict=True):
        assert found["digests"] == alone["digests"] and found["state"] == alone["state"]
        assert alone["report"]["redone_steps"] == 0
        overlaps = "max_grad_norm" in options  # nothing is posted before the ranks have the norm
        assert found["report"]["redone_steps"] == (not overlaps) and found["report"]["overlap"] is overlaps
        # The first step never overlaps, so the second one is exchanged again.
        assert sent_twice == [sent[0], sent[1] if overlaps else 2 * sent[1], *sent[2:]]


# Rare rows


def test_rows_first_seen_long_after_the_last_refresh_are_woken_and_learn() -> None:
    target = np.random.default_rng(1).normal(size=(30, 8)).astype(np.float32)

    def body(session: Session) -> tuple[float, float, int]:
        rank = rank_of(session)
        table = torch.nn.Embedding(30, 8)
        with torch.no_grad():
            table.weight.zero_()
        optimizer = DistributedZeroOneAdam(
            torch.optim.Adam(table.parameters(), lr=2e-2), mask_refresh=4, var_freeze_step=10, **SHORT
        )
        rng = np.random.default_rng(rank)
        for step in range(1, 301):
            rows = rng.integers(0, 10 if step < 60 else 30, 40)
            optimizer.zero_grad()
            loss = (table(torch.from_numpy(rows)) - torch.from_numpy(target[rows])).pow(2).sum(1).mean()
            loss.backward()
            optimizer.step()
        distance = np.abs(table.weight.detach().numpy() - target).mean(1)
        return distance[:10].mean(), distance[10:].mean(), optimizer.compression_report()["woken_elements"]

    early, late, woken = run_ranks(2, body)[0]
    assert woken == 20 * 8
    assert early < 0.2 and late < 0.2, "started at a mean distance of about 0.8"


def test_a_tensor_that_nobody_uses_is_not_sent() -> None:
    shapes = ((70, 130), (300, 300))

    def grads(step: int, rank: int) -> list[np.ndarray | None]:
        return [gradients(step, rank, shapes)[0], None]

    report = trained(2, 40, shapes=shapes, grads=grads, **SHORT)[0]["report"]
    used = 4 * 70 * 130
    # 12 refreshes, of which the first also carries the unused tensor; n - 1 = 1 of 2 halves, twice
    assert report["bytes_sent"] < 12 * used + 4 * 300 * 300 + 40 * used / 28 + 40 * 300


# Memory, state


def test_memory_grows_with_the_first_local_step_and_shrinks_after_the_last_refresh() -> None:
    seen: list[dict[str, int]] = []
    numel = sum(int(np.prod(shape)) for shape in SHAPES)
    trained(1, 30, watch=lambda o: seen.append(o.compression_report()["memory_bytes"]), **SHORT)
    for step in (0, 11):
        assert seen[step]["variance"] == 4 * numel
        assert seen[step]["update"] == seen[step]["synced"] == seen[step]["average_momentum"] == 0
        assert seen[step]["averages"] > 0
    assert seen[14]["variance"] == seen[14]["averages"] == seen[14]["dense_staging"] == 0
    for name in ("update", "synced", "average_momentum", "momentum", "denominator"):
        assert 4 * numel <= seen[14][name] < 4 * numel + 4 * 16 * len(SHAPES)
    assert sum(seen[14].values()) < 37 * numel


@pytest.mark.parametrize("stop", [1, 9, 14, 24, 26, 27])
def test_a_saved_run_goes_on_bit_for_bit(stop: int) -> None:
    def body(session: Session) -> tuple[list[str], list[str], str, str]:
        rank = rank_of(session)

        def fresh(values: Sequence[np.ndarray]) -> tuple[list[torch.Tensor], Any]:
            parameters = [torch.nn.Parameter(torch.from_numpy(np.array(p))) for p in values]
            return parameters, DistributedZeroOneAdam(
                torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1), mask_refresh=5, **SHORT
            )

        def steps(first: int, last: int, parameters: list[torch.Tensor], optimizer: Any) -> list[str]:
            digests = []
            for step in range(first, last + 1):
                optimizer.zero_grad()
                backward(parameters, sparse(step, rank), range(4))
                optimizer.step()
                digests.append(digest([p.detach().numpy() for p in parameters]))
            return digests

        parameters, optimizer = fresh(initial())
        steps(1, stop, parameters, optimizer)
        saved, own = optimizer.state_dict(), optimizer.rank_state_dict()
        model = [p.detach().numpy().copy() for p in parameters]
        before = state_digest(parameters, optimizer)
        expected = steps(stop + 1, 40, parameters, optimizer)
        again, resumed = fresh(model)
        resumed.load_state_dict(saved)
        at_sync = digest([p.detach().numpy() for p in again])
        resumed.load_rank_state_dict(own)
        assert state_digest(again, resumed) == before
        return expected, steps(stop + 1, 40, again, resumed), at_sync, digest(leaves(saved))

    results = run_ranks(2, body)
    for expected, found, _, _ in results:
        assert found == expected
    assert results[0][2:] == results[1][2:], "without the ranks' own state all are where the last sync left them"


def test_errors_of_an_older_release_are_refused_by_name() -> None:
    def body(session: Session) -> str:
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        optimizer = DistributedZeroOneAdam(torch.optim.Adam(parameters, lr=0.01), **SHORT)
        for step in (1, 2):
            backward(parameters, sparse(step, rank_of(session)), range(4))
            optimizer.step()
        own = {key: value for key, value in optimizer._driver.rank_state().items() if key != "checksum"}
        own["plain"] = {key: value for key, value in own["plain"].items() if key != "error_unit"}
        with pytest.raises(CheckpointError, match=r"does not fit: need errors in units of sqrt\(lr\) \* m, got"):
            optimizer.load_rank_state_dict(add_checksum(own, optimizer._driver.kernels))
        return digest([p.detach().numpy() for p in parameters])

    assert len(set(run_ranks(2, body))) == 1


def test_plain_adam_loads_its_state_and_it_goes_on_from_plain_adams() -> None:
    def body(session: Session) -> str:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        plain = torch.optim.Adam(parameters, lr=1e-2)
        for step in range(1, 6):
            for parameter, grad in zip(parameters, gradients(step, 0), strict=True):
                parameter.grad = torch.from_numpy(grad)
            plain.step()
        before = [plain.state[p]["exp_avg"].numpy().copy() for p in parameters]
        variance = [plain.state[p]["exp_avg_sq"].numpy().copy() for p in parameters]
        optimizer = DistributedZeroOneAdam(plain, variance_floor=0.0, **SHORT)
        state = optimizer.state_dict()["state"]
        for index in range(4):
            np.testing.assert_array_equal(state[index]["exp_avg"].numpy(), before[index])
            np.testing.assert_allclose(state[index]["exp_avg_sq"].numpy(), variance[index], rtol=1e-5)
        assert len(plain.state) == 0
        for step in range(6, 30):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), range(4))
            optimizer.step()
        saved = {key: value for key, value in optimizer.state_dict().items() if key != "ocomm"}
        copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        loaded = torch.optim.Adam(copies, lr=1e-2)
        loaded.load_state_dict(saved)
        assert int(loaded.state[copies[0]]["step"]) == 29
        return digest([loaded.state[p][name].numpy() for p in copies for name in ("exp_avg", "exp_avg_sq")])

    first, second = run_ranks(2, body)
    assert first == second


def test_it_goes_on_from_1_bit_adam() -> None:
    def body(session: Session) -> bool:
        rank = rank_of(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(p)) for p in initial()]
        before = DistributedOneBitAdam(torch.optim.Adam(parameters, lr=1e-2), freeze_step=4)
        for step in range(1, 9):
            before.zero_grad()
            backward(parameters, gradients(step, rank), range(4))
            before.step()
        after = DistributedZeroOneAdam(torch.optim.Adam(parameters, lr=1e-2), **SHORT)
        after.load_state_dict({key: value for key, value in before.state_dict().items() if key != "ocomm"})
        return all(
            np.array_equal(after._driver.core.average_momentum(t), before._driver.core.momentum(t)) for t in range(4)
        )

    assert run_ranks(2, body) == [True, True]


# Bad input


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [
        ("local_step_start", -1, 0),
        ("local_step_doubling", 0, 1),
        ("local_step_clip", 0, 1),
        ("var_update_scaler", 0, 1),
        ("var_freeze_step", 0, 1),
    ],
)
def test_an_option_out_of_range_is_an_error_that_names_it(option: str, value: int, least: int) -> None:
    def body(session: Session) -> None:
        with pytest.raises(SettingsError) as raised:
            DistributedZeroOneAdam(torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))]), **{option: value})
        assert str(raised.value) == f"{option} must be a whole number of at least {least}, got {value}"

    run_ranks(1, body)


def test_another_optimizer_is_refused_by_name() -> None:
    def body(session: Session) -> None:
        with pytest.raises(InvalidRequestError) as raised:
            DistributedZeroOneAdam(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1))
        assert str(raised.value) == (
            "DistributedZeroOneAdam wraps torch.optim.Adam or AdamW, not SGD; "
            "use DistributedEFSGD for SGD: 1 bit per parameter from the first step on, at half of SGD's lr."
        )

    run_ranks(1, body)


def test_different_schedules_on_two_ranks_are_an_error_that_names_the_option() -> None:
    def body(session: Session) -> None:
        weight = torch.nn.Parameter(torch.zeros(4))
        with pytest.raises(MismatchError) as raised:
            DistributedZeroOneAdam(torch.optim.Adam([weight]), local_step_clip=4 + rank_of(session))
        assert str(raised.value) == (
            "DistributedZeroOneAdam: the ranks do not wrap the same optimizer: rank(s) [0] registered "
            "local_step_clip=4; "
            "rank(s) [1] registered local_step_clip=5."
        )

    run_ranks(2, body)


@pytest.mark.parametrize("kind", ["sync", "local"])
def test_a_learning_rate_that_differs_between_ranks_is_an_error_on_all(kind: str) -> None:
    def diverge(step: int, rank: int, parameters: list[torch.Tensor], optimizer: Any) -> None:
        if step == KINDS[kind]:
            optimizer.param_groups[0]["lr"] = 1e-2 * rank

    def body(session: Session) -> str:
        with pytest.raises(MismatchError) as raised:
            train(
                rank_of(session),
                30,
                wrap=DistributedZeroOneAdam,
                hash_state=state_digest,
                before_step=diverge,
                overlap=False,
                **SHORT,
            )
        return str(raised.value)

    for message in run_ranks(2, body):
        assert f"lr, betas, eps or weight decay differ between ranks in step {KINDS[kind]}: " in message


def test_a_state_of_another_model_is_refused_before_anything_is_changed() -> None:
    def body(session: Session) -> None:
        first = [torch.nn.Parameter(torch.ones(4))]
        optimizer = DistributedZeroOneAdam(torch.optim.Adam(first), [("weight", first[0])])
        first[0].sum().backward()
        optimizer.step()
        second = [torch.nn.Parameter(torch.ones(5))]
        other = DistributedZeroOneAdam(torch.optim.Adam(second), [("weight", second[0])])
        with pytest.raises(CheckpointError) as raised:
            other.load_state_dict(optimizer.state_dict())
        assert str(raised.value) == (
            "the state_dict is of another model: of tensor 'weight' it has exp_avg (4,), the parameter is (5,)."
        )

    run_ranks(1, body)


# The law itself


def test_the_ranks_of_a_node_are_one_worker() -> None:
    """Four ranks on two nodes are two ranks with the nodes' averages."""
    nodes = Simulation(initial(), 4, nodes=[2, 2], lr=1e-2, **SHORT)
    pairs = Simulation(initial(), 2, lr=1e-2, **SHORT)
    for step in range(1, 40):
        each = [gradients(step, rank) for rank in range(4)]
        nodes.step(each)
        halves = [[(a + b) * np.float32(0.5) for a, b in zip(*each[k : k + 2], strict=True)] for k in (0, 2)]
        pairs.step(halves)
        for worker in (0, 1):
            for a, b in zip(nodes.params_of(worker), pairs.params_of(worker), strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_node_counts_as_much_as_it_has_ranks() -> None:
    """Dense steps of ragged nodes average over ranks, not over nodes."""
    nodes = Simulation([np.zeros(3)], 3, nodes=[2, 1], var_freeze_step=1)
    nodes.step([[np.array([1.0, 0.0, 1.0])], [np.array([1.0, 3.0, 1.0])], [np.array([1.0, 0.0, -2.0])]])
    (x,) = nodes.tensors
    np.testing.assert_allclose(x.variance[:2], 1e-3, rtol=1e-5)
    assert abs(x.variance[2]) < 1e-12


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_simulation_minimizes(ranks: int) -> None:
    target = np.random.default_rng(3).normal(size=300).astype(np.float32)

    def grads(step: int, rank: int, params: list[np.ndarray]) -> list[np.ndarray]:
        noise = np.random.default_rng([step, rank]).normal(size=300).astype(np.float32)
        return [params[0] - target + noise]

    schedule = {"local_step_start": 75, "local_step_doubling": 75, "local_step_clip": 4}
    simulation = simulate([np.zeros(300)], grads, ranks=ranks, steps=300, lr=2e-2, **schedule)
    assert np.abs(simulation.params[0] - target).mean() < 0.25 < np.abs(target).mean()
