"""Grids of ranks: 1-bit optimizers on the data axis, one step for all ranks, pipelines and shards of torch's."""

from __future__ import annotations

import functools
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ocomm_torch as hvd
from ocomm.errors import CheckpointError, HorovodInternalError, InvalidRequestError, MismatchError
from ocomm.session import Session
from ocomm_torch import mesh as meshes
from tests.cluster.jobs import run_job
from tests.frontends.every_kind import KINDS, Kind
from tests.frontends.onebit_jobs import backward, digest
from tests.oracle.clipping import sketch
from tests.tiers import few
from tests.worlds import MPI_SIZE, run_ranks

#: The shapes of the parameters of two stages, which differ.
SHAPES = {0: ((70, 13), (33,), (1,)), 1: ((4097,), (5, 3))}
STEPS = 7


def mesh_of(**axes: int) -> Any:
    """What ocomm reads of a torch DeviceMesh; for ranks that are threads there is none."""
    sizes = tuple(axes.values())
    return SimpleNamespace(mesh=torch.arange(math.prod(sizes)).view(sizes), mesh_dim_names=tuple(axes))


class Part:
    """One rank of PP2 x DP with gradients of its own, or, with ``process_set``, of the replicas of its stage."""

    def __init__(self, session: Session, kind: Kind, replicas: int = 2, **options: Any) -> None:
        rank = session.require_topology().rank
        self.stage, self.replica = divmod(rank, replicas)
        rng = np.random.default_rng(self.stage)
        self.parameters = [
            torch.nn.Parameter(torch.from_numpy(rng.normal(size=shape).astype(np.float32)))
            for shape in SHAPES[self.stage]
        ]
        names = [(f"stage{self.stage}.{number}", p) for number, p in enumerate(self.parameters)]
        chosen = options if "process_set" in options else {"mesh": mesh_of(pp=2, dp=replicas), "data": "dp"} | options
        self.optimizer = kind.wrap(self.parameters, named_parameters=names, **chosen)

    def gradients(self, step: int) -> list[np.ndarray]:
        rng = np.random.default_rng([step, self.stage, self.replica])
        return [rng.normal(size=p.shape).astype(np.float32) for p in self.parameters]

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        backward(self.parameters, self.gradients(step), range(len(self.parameters) - 1, -1, -1))

    def train(self, steps: int) -> str:
        for step in range(steps):
            self.backward(step)
            self.optimizer.step()
        return self.values

    @property
    def values(self) -> str:
        return digest([p.detach().numpy() for p in self.parameters])


ADAM = KINDS["1-bit Adam, compressed"]
#: Optimizers with steps in which replicas send each other nothing. Step 8 is one, step 9 is a sync.
LOCAL = {
    "DiLoCo": Kind(hvd.DistributedDiLoCo, torch.optim.AdamW, {"sync_every": 3}),
    "DiLoCo, all of it": Kind(
        hvd.DistributedDiLoCo, torch.optim.SGD, {"sync_every": 6, "fragments": 2, "delay": 1, "mix": 0.5, "bits": 1}
    ),
    "0/1 Adam": Kind(
        hvd.DistributedZeroOneAdam,
        options={"vote": "sync", "local_step_start": 2, "local_step_doubling": 2, "local_step_clip": 4},
    ),
}
local_kinds = pytest.mark.parametrize("kind", LOCAL.values(), ids=LOCAL.keys())
SHORT = ("1-bit Adam, compressed", "0/1 Adam, local steps", "Lion")
every_kind = pytest.mark.parametrize("kind", few(KINDS.values(), [KINDS[name] for name in SHORT]), ids=KINDS.keys())


@every_kind
def test_each_part_of_a_grid_has_the_bits_of_its_replicas_alone(kind: Kind) -> None:
    def body(session: Session) -> list[str]:
        in_grid = Part(session, kind)
        alone = Part(session, kind, process_set=hvd.ProcessSet([2 * in_grid.stage, 2 * in_grid.stage + 1]))
        return [in_grid.train(STEPS), alone.train(STEPS)]

    results = run_ranks(4, body)
    assert all(one == other for one, other in results)
    if "local" not in str(kind.options):
        assert results[0] == results[1] != results[2] == results[3]


@local_kinds
def test_a_part_that_steps_alone_between_syncs_has_the_bits_of_its_replicas_alone(kind: Kind) -> None:
    def body(session: Session) -> list[str]:
        in_grid = Part(session, kind)
        alone = Part(session, kind, process_set=hvd.ProcessSet([2 * in_grid.stage, 2 * in_grid.stage + 1]))
        return [each.train(1) for _ in range(20) for each in (in_grid, alone)]

    for digests in run_ranks(4, body):
        assert digests[::2] == digests[1::2] and len(set(digests)) == 20


@local_kinds
def test_a_nan_on_one_stage_in_a_local_step_keeps_all_stages_of_its_replica_back(kind: Kind) -> None:
    def body(session: Session) -> tuple[bool, int, str, str, int]:
        part = Part(session, kind)
        before = part.train(STEPS)
        part.backward(STEPS)
        if session.require_topology().rank == 3:
            gradient = part.parameters[0].grad
            assert gradient is not None
            gradient.view(-1)[0] = math.nan
        part.optimizer.step()
        stayed = part.values == before
        counted = part.optimizer.compression_report()["non_finite_steps"]
        part.train(7)
        if hasattr(part.optimizer, "finish"):
            part.optimizer.finish()
        else:
            part.train(2)  # step 17 is a sync
        report = part.optimizer.compression_report()
        assert report["synced"]
        return stayed, counted, part.values, str(part.optimizer.outcome), report["bytes_sent"]

    found = run_ranks(4, body)
    assert [each[:2] for each in found] == [(False, 0), (True, 1)] * 2
    assert found[0][2] == found[1][2] != found[2][2] == found[3][2]


@local_kinds
def test_an_overflow_of_one_stage_divides_the_loss_scale_of_its_replica(kind: Kind) -> None:
    def body(session: Session) -> float:
        part = Part(session, kind)
        part.train(STEPS)
        part.backward(STEPS)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        if session.require_topology().rank == 0:
            gradient = part.parameters[0].grad
            assert gradient is not None
            gradient.view(-1)[0] = math.inf
        scaler.scale(torch.ones(1))
        scaler.step(part.optimizer)
        scaler.update()
        return scaler.get_scale()

    assert run_ranks(4, body) == [1.0, 2.0, 1.0, 2.0]


def test_a_stage_of_diloco_that_fails_at_a_sync_fails_the_others_by_its_place() -> None:
    kind = LOCAL["DiLoCo"]

    def body(session: Session) -> str:
        part = Part(session, kind)
        part.train(STEPS)
        if session.require_topology().rank == 3:
            part.optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(HorovodInternalError) as caught:
            part.train(2)
        return f"{type(caught.value).__name__} {caught.value}"

    first, second, third, fourth = run_ranks(4, body)
    assert first == second and "PeerError" in first and "has failed at pp=1 of 2 of the grid" in first
    assert third == fourth and "MismatchError" in third and "differ between ranks" in third


def test_stages_of_diloco_whose_replicas_are_not_alike_say_so_before_the_first_step() -> None:
    def body(session: Session) -> str:
        part = Part(session, LOCAL["DiLoCo"])
        if session.require_topology().rank == 3:
            with torch.no_grad():
                part.parameters[0][0] += 1
        with pytest.raises(HorovodInternalError) as caught:
            part.train(1)
        return f"{type(caught.value).__name__} {caught.value}"

    first, second, third, fourth = run_ranks(4, body)
    assert first == second and "PeerError" in first and "has failed at pp=1 of 2 of the grid" in first
    assert third == fourth and "MismatchError" in third and "not alike before their first step" in third


@local_kinds
def test_a_state_of_a_stage_that_was_saved_between_syncs_goes_on_in_every_bit(kind: Kind) -> None:
    def body(session: Session) -> tuple[bool, str]:
        part, again = Part(session, kind), Part(session, kind)
        part.train(STEPS)
        saved = part.optimizer.state_dict(), part.optimizer.rank_state_dict()
        with torch.no_grad():
            for p, q in zip(part.parameters, again.parameters, strict=True):
                q.copy_(p)
        again.optimizer.load_state_dict(saved[0])
        again.optimizer.load_rank_state_dict(saved[1])
        alone = Part(session, kind, process_set=hvd.ProcessSet([2 * part.stage, 2 * part.stage + 1]))
        with pytest.raises(CheckpointError) as caught:
            alone.optimizer.load_state_dict(saved[0])
        return part.train(STEPS) == again.train(STEPS), str(caught.value)

    for rank, (same, said) in enumerate(run_ranks(4, body)):
        assert same
        assert f"is of pp={rank // 2} of 2, and this rank is at no place of a grid" in said


def test_dense_averages_of_a_part_of_a_grid_have_the_bits_of_its_replicas_alone() -> None:
    def body(session: Session) -> list[str]:
        dense = Kind(hvd.DistributedOptimizer, functools.partial(torch.optim.Adam, lr=0.1))
        in_grid = Part(session, dense)
        alone = Part(session, dense, process_set=hvd.ProcessSet([2 * in_grid.stage, 2 * in_grid.stage + 1]))
        return [in_grid.train(STEPS), alone.train(STEPS)]

    results = run_ranks(4, body)
    assert all(one == other for one, other in results)
    assert results[0] == results[1] != results[2] == results[3]


def test_dense_averages_of_a_mesh_have_its_data_axis_alone() -> None:
    def body(session: Session) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        wrap = functools.partial(hvd.DistributedOptimizer, torch.optim.SGD([parameter], lr=0.1))
        mesh = mesh_of(pp=2, dp=2)
        for words, options in {
            "process_set= and mesh= were given": {"mesh": mesh, "data": "dp", "process_set": hvd.ProcessSet([0, 1])},
            "mesh= was given without data=": {"mesh": mesh},
            "data='tp' is no axis of the mesh": {"mesh": mesh, "data": "tp"},
        }.items():
            with pytest.raises(InvalidRequestError) as caught:
                wrap(**options)
            assert words in str(caught.value)

    run_ranks(4, body)


def test_the_data_axis_of_several_hosts_sums_inside_hosts_first() -> None:
    def body(session: Session) -> tuple[str, str, str]:
        part = Part(session, ADAM, replicas=4)
        ranks = hvd.ProcessSet(range(4 * part.stage, 4 * part.stage + 4))
        alone = Part(session, ADAM, replicas=4, process_set=ranks)
        return part.train(STEPS), alone.train(STEPS), part.optimizer.compression_report()["form"]

    for mine, expected, form in run_ranks(8, body, hosts=["a", "a", "b", "b"] * 2):
        assert mine == expected and form == "hierarchical"


@every_kind
def test_a_nan_on_one_rank_moves_no_rank_and_is_named_with_its_place(kind: Kind) -> None:
    def body(session: Session) -> tuple[str, bool, bool]:
        part = Part(session, kind)
        before = part.train(STEPS)
        part.backward(STEPS)
        if session.require_topology().rank == 3:
            gradient = part.parameters[0].grad
            assert gradient is not None
            gradient.view(-1)[0] = math.nan
        with pytest.raises(hvd.HorovodInternalError) as caught:
            part.optimizer.step()
        stayed = part.values == before
        part.train(1)
        return str(caught.value), stayed, part.values != before

    for said, stayed, goes_on in run_ranks(4, body):
        assert "NaN or Inf" in said and "on rank(s) [3 (pp=1 of 2)]" in said
        assert stayed and goes_on


def test_a_rank_that_skips_a_step_skips_it_for_the_whole_grid() -> None:
    def body(session: Session, **options: Any) -> tuple[str, bool, str | None]:
        part = Part(session, ADAM, **options)
        before = part.train(STEPS)
        assert part.optimizer.compression_report()["skipped_by"] is None
        part.backward(STEPS)
        if session.require_topology().rank == 2:
            part.optimizer.skip(overflow=True)
        else:
            part.optimizer.step()
        who = part.optimizer.compression_report()["skipped_by"]
        return str(part.optimizer.outcome), part.values == before, who

    for options in ({}, {"max_grad_norm": 1.0}):  # with the second ranks hear of it before anything is posted
        found = run_ranks(4, functools.partial(body, **options))
        assert found == [("StepOutcome.OVERFLOW", True, "[2 (pp=1 of 2)]")] * 4


def test_a_part_of_which_several_ranks_have_copies_counts_once_in_a_norm() -> None:
    places = [(row, column) for row in range(2) for column in range(3)]
    for is_replicated, counted in {
        (False, False): places,
        (True, False): [(0, 0), (0, 1), (0, 2)],
        (False, True): [(0, 0), (1, 0)],
        (True, True): [(0, 0)],
    }.items():
        assert [place for place in places if meshes.is_first_copy(place, is_replicated)] == counted


@pytest.mark.parametrize("clip", ["exact", "previous"])
def test_the_norm_that_clips_is_that_of_all_parts(clip: str) -> None:
    def body(session: Session) -> tuple[list[float], int]:
        part = Part(session, ADAM, max_grad_norm=0.5, clip=clip)
        norms = []
        for step in range(STEPS):
            part.backward(step)
            part.optimizer.step()
            norms.append(part.optimizer._driver.stepper.norm)
        return norms, part.stage

    results = run_ranks(4, body)
    assert all(norms == results[0][0] for norms, _ in results)
    ranks = [Part.__new__(Part) for _ in range(4)]
    for rank, part in enumerate(ranks):
        part.stage, part.replica = divmod(rank, 2)
        part.parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES[part.stage]]
    for step in range(STEPS):
        gradients = [part.gradients(step) for part in ranks]
        if step < 3:  # of the averages themselves
            halves = [[(a + b) / 2 for a, b in zip(gradients[k], gradients[k + 1], strict=True)] for k in (0, 2)]
            expected = sum(np.square(g).sum(dtype=np.float64) for part in halves for g in part)
        else:  # of their sketches
            sketches = [sketch(own, step + 1) for own in gradients]
            expected = sum(np.square((sketches[k] + sketches[k + 1]) / 2).sum() for k in (0, 2))
        assert math.isclose(results[0][0][step], math.sqrt(expected), rel_tol=1e-6)


def test_all_parts_freeze_in_the_same_step_by_the_variance_of_the_whole_model() -> None:
    def body(session: Session) -> list[int | None]:
        part = Part(session, Kind(hvd.DistributedOneBitAdam, functools.partial(torch.optim.Adam, betas=(0.9, 0.8))))
        part.train(30)
        return [part.optimizer.compression_report()["freeze_step"]]

    found = run_ranks(4, body)
    assert found[0][0] is not None and found == [found[0]] * 4


def test_the_variance_of_all_parts_counts_whatever_a_part_has_decided_by_its_learning_rate() -> None:
    def body(session: Session, rises: bool) -> list[float | None]:
        part = Part(session, Kind(hvd.DistributedOneBitAdam, functools.partial(torch.optim.Adam, betas=(0.9, 0.8))))
        norms: list[float | None] = []
        schedule = part.optimizer._driver.schedule
        observe = schedule.observe

        def observed(step: int, norm: float | None, lrs: Any) -> int | None:
            norms.append(norm)
            return observe(step, norm, lrs)

        schedule.observe = observed
        for step in range(30):
            if rises and part.stage == 0:
                part.optimizer.param_groups[0]["lr"] = 1e-3 * min(step + 1, 16)
            part.backward(step)
            part.optimizer.step()
        assert part.optimizer.compression_report()["freeze_step"] == len(norms) + 1
        return norms

    still, rising = (run_ranks(4, functools.partial(body, rises=rises)) for rises in (False, True))
    assert still == [still[0]] * 4 and rising == [rising[0]] * 4
    assert len(rising[0]) > len(still[0]) and rising[0][: len(still[0])] == still[0]
    assert min(norm for norm in rising[0] if norm) > 0.9 * max(norm for norm in still[0] if norm)


def test_a_step_whose_gradients_are_released_and_have_changed_is_an_error_on_all_parts() -> None:
    def body(session: Session) -> str:
        part = Part(session, ADAM, free_gradients=True)
        before = part.train(7)
        part.backward(7)
        if part.stage == 1:
            part.optimizer.param_groups[0]["betas"] = (0.8, 0.999)
        with pytest.raises(InvalidRequestError) as caught:
            part.optimizer.step()
        assert part.values == before and part.optimizer.compression_report()["skipped_by"] is None
        return str(caught.value)

    for rank, said in enumerate(run_ranks(4, body)):
        assert ("changed at pp=1 of 2 of the grid" if rank < 2 else "changed on rank(s) [2, 3]") in said


def test_what_the_parts_do_not_have_in_common_is_named() -> None:
    def body(session: Session) -> str:
        with pytest.raises(MismatchError) as caught:
            Part(session, ADAM, variance_floor=0.05 + 0.01 * (session.require_topology().rank // 2))
        return str(caught.value)

    for said in run_ranks(4, body):
        assert "the parts of the grid do not have the same options" in said and "variance_floor=0.06" in said


@pytest.mark.parametrize("norm", [None, 1.0])
def test_a_part_that_fails_fails_the_step_of_the_others_by_its_place(norm: float | None) -> None:
    def body(session: Session) -> str:
        part = Part(session, ADAM, max_grad_norm=norm)
        if session.require_topology().rank == 3:
            with torch.no_grad():
                part.parameters[0][0] += 1
        with pytest.raises(HorovodInternalError) as caught:
            part.train(1)
        return f"{type(caught.value).__name__} {caught.value}"

    first, second, third, fourth = run_ranks(4, body)
    assert first == second and "PeerError" in first and "has failed at pp=1 of 2 of the grid" in first
    assert third == fourth and "MismatchError" in third and "not alike before their first step" in third


def test_the_replicas_of_a_part_are_made_equal_over_the_ranks_of_its_optimizer() -> None:
    def body(session: Session) -> str:
        part = Part(session, ADAM)
        with torch.no_grad():
            part.parameters[0][0] += session.require_topology().rank
        ranks = part.optimizer.process_set
        hvd.broadcast_parameters([(str(k), p.detach()) for k, p in enumerate(part.parameters)], ranks.ranks[0], ranks)
        return part.train(STEPS)

    results = run_ranks(4, body)
    assert results[0] == results[1] != results[2] == results[3]


def test_a_state_loads_at_its_own_place_only() -> None:
    def body(session: Session) -> tuple[bool, str]:
        part, again = Part(session, ADAM), Part(session, ADAM)
        part.train(STEPS)
        saved = part.optimizer.state_dict(), part.optimizer.rank_state_dict()
        with torch.no_grad():
            for p, q in zip(part.parameters, again.parameters, strict=True):
                q.copy_(p)
        again.optimizer.load_state_dict(saved[0])
        again.optimizer.load_rank_state_dict(saved[1])
        pair = hvd.ProcessSet([2 * part.stage, 2 * part.stage + 1])
        alone = Part(session, ADAM, process_set=pair)
        with pytest.raises(CheckpointError) as caught:
            alone.optimizer.load_state_dict(saved[0])
        return part.train(STEPS) == again.train(STEPS), str(caught.value)

    for rank, (same, said) in enumerate(run_ranks(4, body)):
        assert same
        assert f"is of pp={rank // 2} of 2, and this rank is at no place of a grid" in said


ADAMS = [KINDS[name] for name in ("1-bit Adam, compressed", "1-bit LAMB, compressed", "0/1 Adam")]


@pytest.mark.parametrize("kind", ADAMS, ids=lambda kind: kind.wrapper.__name__)
def test_a_dense_state_has_the_moments_of_a_run_and_goes_on_with_them(kind: Kind) -> None:
    def body(session: Session) -> tuple[bool, bool, int, bool]:
        part, again = Part(session, kind), Part(session, kind)
        part.train(STEPS)
        saved = part.optimizer.dense_state_dict()
        with torch.no_grad():
            for p, q in zip(part.parameters, again.parameters, strict=True):
                q.copy_(p)
        compiled = {f"_orig_mod.{name}": entry for name, entry in saved["state"].items()}
        again.optimizer.load_dense_state_dict({**saved, "state": compiled})
        loaded = again.optimizer.dense_state_dict()
        pairs = [(entry, loaded["state"][name]) for name, entry in saved["state"].items()]
        same = all(torch.equal(a[key], b[key]) for a, b in pairs for key in ("exp_avg", "step", "beta2"))
        # A floor has raised small roots to a twentieth of their block's mean, which that raised by less than as much.
        ratios = torch.cat([(b["exp_avg_sq"] / a["exp_avg_sq"]).reshape(-1) for a, b in pairs])
        near = bool((ratios > 1 - 1e-6).all() and (ratios < 1.05**2).all() and ratios.median() < 1 + 1e-6)
        before = again.values
        again.train(1)
        return same, near, again.optimizer.compression_report()["step"], again.values != before

    assert run_ranks(4, body) == [(True, True, STEPS + 1, True)] * 4


def test_a_dense_state_of_stages_with_equal_names_is_refused() -> None:
    def body(session: Session) -> str:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = ADAM.wrap([parameter], named_parameters=[("norm", parameter)], mesh=mesh_of(pp=2, dp=2), data="dp")
        with pytest.raises(InvalidRequestError) as caught:
            optimizer.dense_state_dict()
        return str(caught.value)

    for rank, said in enumerate(run_ranks(4, body)):
        other = rank ^ 2
        assert f"rank {rank} (pp={rank // 2} of 2) and rank {other} (pp={other // 2} of 2) have parameters" in said
        assert "of the name 'norm'" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": mesh_of(pp=2, dp=2), "data": "tp"}, "data='tp' is no axis of the mesh, which has ['pp', 'dp']"),
        ({"mesh": mesh_of(pp=2, dp=1), "data": "dp"}, "the mesh has ranks [0, 1], and ocomm's job has 0 to 3"),
        ({"mesh": mesh_of(pp=2, dp=2)}, "mesh= was given without data="),
        ({"data": "dp"}, "data= was given without mesh="),
        (
            {"mesh": mesh_of(pp=2, dp=2), "data": "dp", "process_set": hvd.ProcessSet([0, 1])},
            "process_set= and mesh= were given",
        ),
    ],
)
def test_a_mesh_that_cannot_be_used_is_refused(options: dict[str, Any], words: str) -> None:
    def body(session: Session) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(InvalidRequestError) as caught:
            hvd.DistributedOneBitAdam(torch.optim.Adam([parameter]), **options)
        assert words in str(caught.value)

    run_ranks(4, body)


@pytest.mark.parametrize("wrap", [hvd.DistributedLion, hvd.DistributedOptimizer])
def test_a_weight_that_two_stages_share_is_refused_by_name(wrap: Any) -> None:
    def body(session: Session) -> str:
        tied = torch.nn.Parameter(torch.arange(6.0))
        ones = torch.nn.Parameter(torch.ones(3))  # as many weights are at first
        named = [("norm", ones), ("embedding", tied)]
        with pytest.raises(InvalidRequestError) as caught:
            wrap(torch.optim.SGD([ones, tied], lr=0.1), named, mesh=mesh_of(pp=2, dp=2), data="dp")
        return str(caught.value)

    for rank, said in enumerate(run_ranks(4, body)):
        first, second = rank % 2, rank % 2 + 2
        assert f"parameter 'embedding' of rank {first} (pp=0 of 2) has the name and the elements of one of" in said
        assert f"of rank {second} (pp=1 of 2)" in said


def test_stages_that_share_nothing_hear_of_two_others_that_do() -> None:
    def body(session: Session) -> str:
        stage = session.require_topology().rank
        tied = torch.nn.Parameter(torch.arange(6.0) + (stage == 1))
        with pytest.raises(InvalidRequestError) as caught:
            hvd.DistributedLion(
                torch.optim.SGD([tied], lr=0.1), [("embedding", tied)], mesh=mesh_of(pp=3, dp=1), data="dp"
            )
        return str(caught.value)

    for said in run_ranks(3, body):
        assert "'embedding' of rank 0 (pp=0 of 3) has the name and the elements of one of rank 2 (pp=2 of 3)" in said


@pytest.mark.skipif(MPI_SIZE > 0, reason="rank 0's process alone has what it logs")
def test_weights_of_two_names_that_begin_equal_on_two_stages_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def body(session: Session) -> None:
        stage = session.require_topology().rank // 2
        tied, own = torch.nn.Parameter(torch.arange(6.0)), torch.nn.Parameter(torch.arange(4.0) + stage)
        named = [(f"stage{stage}.own", own), (("embed", "head")[stage], tied)]
        hvd.DistributedLion(torch.optim.SGD([own, tied], lr=0.1), named, mesh=mesh_of(pp=2, dp=2), data="dp")

    run_ranks(4, body)
    (said,) = [record.getMessage() for record in caplog.records if "begin with the same elements" in record.message]
    assert "'embed' of rank 0 (pp=0 of 2) and 'head' of rank 2 (pp=1 of 2)" in said


# Torch's own axes, in jobs


#: Programs that `make test` runs, in one job: to import Torch on four ranks takes longer than each of them.
TOGETHER = ("pipeline", "dense", "placed")


def job(name: str) -> list[dict[str, Any]]:
    """What each rank says in a program of ``torch_grids``."""
    return said_in(TOGETHER if name in TOGETHER else (name,))[name]


@functools.cache
def said_in(names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    done = run_job(4, f"from tests.frontends.torch_grids import main; main(*{names})", PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line.partition("] ") for line in done.stdout.splitlines() if line.startswith("["))
    return {name: [json.loads(said) for key, _, said in lines if key.startswith(f"[{name} ")] for name in names}


in_a_job = pytest.mark.skipif(MPI_SIZE > 0, reason="starts jobs of its own")


@in_a_job
def test_a_pipeline_has_the_bits_of_data_parallel_steps_and_steps_as_one() -> None:
    found = job("pipeline")
    for rank, said in enumerate(found):
        assert said["mine"] == said["expected"] != said["began"]
        assert said["redone"] == 0, "overlap"
        assert "on rank(s) [3 (pp=1 of 2)]" in said["nan"]
        assert said["skipped"] == ["StepOutcome.SKIP", True, "[2 (pp=1 of 2)]"]
        assert said["overflow"] == ["StepOutcome.OVERFLOW", 1.0, True, "[1 (pp=0 of 2)]"]
        assert said["goes on"]
        assert said["mine"] == found[rank ^ 1]["mine"]
        assert said["share"] < 0.6  # a half, and votes


@in_a_job
@pytest.mark.long
def test_shards_whose_replicas_are_averaged_by_a_hook_train_as_one_process() -> None:
    found = job("across")
    assert max(said["gap"] for said in found) < 1e-6
    assert [said["digest"] for said in found[:2]] == [said["digest"] for said in found[2:]]
    assert found[0]["digest"] != found[1]["digest"]


@in_a_job
def test_dense_averages_of_shards_train_as_one_process_and_have_the_bits_of_a_hook() -> None:
    found = job("dense")
    assert max(said["gap"] for said in found) < 1e-6
    assert [said["digest"] for said in found[:2]] == [said["digest"] for said in found[2:]]
    assert found[0]["digest"] != found[1]["digest"]
    for rank, said in enumerate(found):
        assert said["digest"] == said["hooked"]
        assert said["submitted in backward"] > 0
        assert said["norms"] < 1e-6
        assert (said["watched"], said["then"]) == ("WatchedDTensor", "DTensor")
        assert said["used"] == found[rank ^ 2]["used"], "the averages"
        assert said["overflow"] == [1.0, True]
        assert said["partial"]


@in_a_job
def test_a_second_pass_of_a_step_is_for_dtensors_what_it_is_for_plain_tensors() -> None:
    for said in job("placed"):
        assert said["same"]
        assert said["again"] == [[5, 0, said["again"][1][2]]] * 2


@in_a_job
def test_a_loss_scale_that_is_divided_out_of_dtensors_is_named_as_such() -> None:
    (said,) = job("placed")[0]["scaled"]
    assert "loss scaling" in said and "max_grad_norm" not in said


def test_gradients_that_torch_may_still_copy_to_pinned_memory_are_left_to_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grad = torch.nn.Parameter(torch.ones(3))
    placed = SimpleNamespace(placements=(), _version=0, to_local=lambda: grad)
    local = meshes.LocalTensors([], True)
    local.inside = {0: SimpleNamespace(grad=placed, placements=())}
    local.tensors = [SimpleNamespace(is_pinned=lambda: True, grad=None)]  # type: ignore[list-item]
    monkeypatch.setattr(meshes, "_COPIES_LATE", True)
    assert not local.take_gradient(0, final=False) and local.tensors[0].grad is None
    assert local.take_gradient(0, final=True) and local.tensors[0].grad is not None
    local.forget()
    monkeypatch.setattr(meshes, "_COPIES_LATE", False)
    assert local.take_gradient(0, final=False)


@in_a_job
def test_a_rank_skips_a_step_whose_gradients_are_partial_sums() -> None:
    for said in job("placed"):
        assert said["outcomes"] == [["StepOutcome.SKIP", True], ["StepOutcome.TAKE", False]]


@in_a_job
@pytest.mark.long
def test_dense_averages_beside_tensor_parallelism_train_as_one_process() -> None:
    for said in job("tensors"):
        assert said["gap"] <= 1e-6 < 0.01 < said["moved"]


def test_a_hook_across_all_ranks_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="pass process_set=, or mesh=mesh, data='dp'"):
        hvd.across_hook()


@in_a_job
@pytest.mark.long
def test_shards_have_the_bits_of_the_simulation_and_replicas_are_equal() -> None:
    found = job("shards")
    assert found[1]["empty"] == [False, False, True, True]
    for rank, said in enumerate(found):
        assert all(said["same"]) and said["compressed"] == 6
        assert said["posted in backward"] > 0
        assert said["redone"] == said["bfloat16 redone"] == 0 and said["clipped redone"] == 1
        assert said["resumed"] and said["partial"]
        assert said["overflow"] == ["StepOutcome.OVERFLOW", 1.0, True]
        assert f"is of fsdp={1 - rank % 2} of 2, and this rank is at fsdp={rank % 2} of 2" in said["of another part"]
        for what in ("values", "bfloat16", "clipped"):
            assert said[what] == found[rank ^ 2][what]


@in_a_job
@pytest.mark.long
def test_diloco_of_shards_has_the_bits_of_plain_tensors_and_a_replica_steps_as_one() -> None:
    found = job("local")
    for rank, said in enumerate(found):
        assert all(said["same"]) and len(said["same"]) == 10
        assert said["resumed"]
        assert said["stayed"] == ([True, 1] if rank < 2 else [False, 0])
        assert f"is of fsdp={1 - rank % 2} of 2, and this rank is at fsdp={rank % 2} of 2" in said["of another part"]
        for what in ("anchors", "finished"):
            assert said[what] == found[rank ^ 2][what] != found[rank ^ 1][what]
        assert said["lone"].startswith("InvalidRequestError") and "(mesh=, data=)" in said["lone"]


@in_a_job
@pytest.mark.long
def test_offloaded_shards_have_the_bits_of_others_and_half_of_the_state() -> None:
    found = job("offload")
    for rank, said in enumerate(found):
        assert said["offload"] == said["plain"] and len(set(said["plain"])) == 10
        assert said["plain"][-1] == found[rank ^ 2]["plain"][-1]
        assert said["compressed"] == 6 and said["redone"] == 0
        assert said["state"] <= (12.7 + 8 / 2) / 2  # bytes per model parameter


@in_a_job
@pytest.mark.long
def test_a_dense_state_loads_into_another_grid() -> None:
    words = [
        "the dense state is of DistributedOneBitAdam, the optimizer is DistributedZeroOneAdam",
        "the dense state has nothing of 'stage0.0.weight'",
        "is of another model: of tensor 'stage0.0.weight' it has exp_avg (3,)",
        "no result of dense_state_dict(): it has ['ocomm', 'param_groups', 'state']",
    ]
    for said in job("regrid"):
        for found in (*said["warm-up"], *said["compressed"], *said["bfloat16"]):
            assert found["loaded"] and found["variance"] < 1e-6 and found["freeze"] == 4
        for found in said["warm-up"]:
            assert found["gap"] < 1e-7 and (found["step"], found["compressed"]) == (4, 0)
        # Two roundings of bfloat16: gradients are averaged after it, of other batches.
        assert max(found["gap"] for found in said["bfloat16"]) < 0.01
        assert said["warm-up"][2]["gap"] == said["bfloat16"][2]["gap"] == 0.0, "in the same grid"
        for found in said["compressed"]:
            assert (found["step"], found["compressed"], found["stage"]) == (8, 1, "compressed")
        assert said["compressed"][2]["gap"] < 1e-6, "in the same grid"
        for error, expected in zip(said["wrong"], words, strict=True):
            assert error.startswith("CheckpointError") and expected in error


@in_a_job
@pytest.mark.long
def test_norm_and_freeze_of_stages_and_tensor_shards_are_those_of_one_process() -> None:
    found = job("norms")
    for rank, said in enumerate(found):
        assert said["shared"] == found[rank ^ 1]["shared"] != found[rank ^ 2]["shared"]
        assert said["freeze"][0] == said["freeze"][1] is not None
        assert said["steps"] > 10 and said["gap"] < 1e-6
        # Of the second tensor-parallel rank the norm's weights and the last bias are replicas.
        assert said["counted"] == ([False, False, True, True, True, False] if rank % 2 else [True] * 6)


@in_a_job
@pytest.mark.long
def test_shards_that_ocomm_cannot_have_are_refused_by_name() -> None:
    for rank, said in enumerate(job("mistakes")):
        words = {
            "size": "a mesh of pp=3, dp=2 has 6 ranks, and the job has 4",
            "part": f"the mesh has ranks [{rank % 2}, {rank % 2 + 2}]",
            "lone": "parameter '0.weight' is a DTensor",
            "HSDP": "would average again. Give fully_shard the inner axis alone",
            "on data": "are on the data axis 'dp'",
            "LAMB": "divides by the norm of a whole tensor",
            "dense lone": "parameter '0.weight' is a DTensor",
            "dense HSDP": "would average again. Give fully_shard the inner axis alone",
            "adasum": "op=Adasum with mesh=",
        }
        for what, expected in words.items():
            assert said[what].startswith("InvalidRequestError") and expected in said[what]
