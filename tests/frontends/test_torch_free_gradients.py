"""``free_gradients=True``: gradients that were read are released during backward, and every bit is that of a run that
keeps them.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.errors import HorovodInternalError, InvalidRequestError, NonFiniteError
from ocomm.session import Session
from ocomm.types import Settings
from ocomm_torch.optimizers import compressed
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from tests.fake_device import FakeDevice
from tests.frontends.every_kind import whole_state
from tests.frontends.fake_placement import FakePlacement
from tests.frontends.onebit_jobs import backward, digest, gradients, initial
from tests.frontends.test_torch_device import parameters_of, rank_of, some_gradients
from tests.tiers import few
from tests.worlds import MPI_SIZE, run_ranks

pytestmark = pytest.mark.skipif(MPI_SIZE > 0, reason="threads are enough: nothing here is of the network")

STEPS, WARMUP = 10, 4
#: Four tensors that are a bucket each.
LARGE = ((1 << 17,),) * 4
DEADLINE_S = 60.0


def wrapped(parameters: list[torch.nn.Parameter], inner: dict[str, Any] | None = None, **options: Any) -> Any:
    adam = torch.optim.Adam(parameters, **{"lr": 1e-2, "foreach": False, **(inner or {})})
    return DistributedOneBitAdam(adam, **{"freeze_step": WARMUP, "hierarchical": False, **options})


@pytest.fixture
def on_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def choose() -> None:
        monkeypatch.setattr(compressed, "placement", lambda *_: FakePlacement(FakeDevice()))

    return choose


def trained(rank: int, dtype: torch.dtype = torch.float32, passes: int = 1, **options: Any) -> tuple[list[str], str]:
    parameters = parameters_of(dtype)
    optimizer = wrapped(parameters, **options)
    history = []
    for step in range(1, STEPS + 1):
        if not options.get("free_gradients"):
            optimizer.zero_grad()
        for k in range(passes):
            backward(parameters, some_gradients(step + 100 * k, rank), range(len(parameters) - 1, -1, -1))
        optimizer.step()
        if options.get("free_gradients"):
            assert [p.grad for p in parameters] == [None] * len(parameters)
        history.append(digest([p.detach().float().numpy() for p in parameters]))
    report = optimizer.compression_report()
    assert report["redone_steps"] == 0 and report["overlap"]
    return history, whole_state(parameters, optimizer)


@pytest.mark.short("{}", "shard_state")
@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.bfloat16},
        {"dense_bits": 8},
        {"shard_state": True},
        {"inner": {"weight_decay": 0.1}},
        {"passes": 2, "backward_passes_per_step": 2},
        {"verify": "full"},
        {"hierarchical": True},
    ],
    ids=str,
)
def test_the_bits_are_those_of_a_run_that_keeps_gradients(options: dict[str, Any], engine: str) -> None:
    hosts = ["a", "a", "b", "b"] if "hierarchical" in options else None
    ranks, settings = 4 if hosts else 2, Settings(engine=engine)
    expected = run_ranks(ranks, lambda s: trained(rank_of(s), **options), settings, hosts=hosts)
    got = run_ranks(ranks, lambda s: trained(rank_of(s), free_gradients=True, **options), settings, hosts=hosts)
    assert got == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.bfloat16},
        {"max_grad_norm": 0.5, "clip": "previous"},
        {"passes": 2, "backward_passes_per_step": 2},
    ],
    ids=str,
)
def test_the_bits_are_the_same_where_the_state_is_offloaded(options: dict[str, Any], on_devices: Any) -> None:
    expected = run_ranks(2, lambda s: trained(rank_of(s), **options))
    on_devices()
    assert run_ranks(2, lambda s: trained(rank_of(s), free_gradients=True, offload=True, **options)) == expected


@pytest.mark.parametrize(
    ("engine", "offload"),
    few(itertools.product(["native", "python"], [False, True]), [("native", True), ("python", False)]),
)
def test_all_gradients_but_those_of_the_last_bucket_are_gone_when_backward_is_over(
    engine: str, offload: bool, on_devices: Any
) -> None:
    """In dense and in compressed steps; the exchange is waited for, as backward would take longer than it."""

    def body(session: Session) -> tuple[list[str], list[int], list[int]]:
        parameters = [torch.nn.Parameter(torch.from_numpy(array)) for array in initial(LARGE)]
        optimizer = wrapped(parameters, free_gradients=frees, **({"offload": True} if offload else {}))
        alive: list[int] = []
        most: list[int] = []
        history = []
        for step in range(1, STEPS):
            optimizer.zero_grad()
            counts = []
            for index in (3, 2, 1, 0):
                grad = torch.from_numpy(gradients(step, rank_of(session), LARGE)[index])
                (parameters[index] * grad).sum().backward()
                if frees and step > 1:
                    until_released(optimizer, parameters[index], index)
                pairs = zip(optimizer._gradients.recorded, parameters, strict=True)
                counts.append(sum(recorded is not None or p.grad is not None for recorded, p in pairs))
            most.append(max(counts))
            alive.append(counts[-1])
            optimizer.step()
            history.append(digest([p.detach().numpy() for p in parameters]))
        return history, most, alive

    frees = False
    kept = run_ranks(2, body, Settings(engine=engine))
    assert kept[0][2] == [4] * (STEPS - 1)
    if offload:
        on_devices()
    frees = True
    for (history, most, alive), (expected, _, _) in zip(run_ranks(2, body, Settings(engine=engine)), kept, strict=True):
        assert history == expected
        # In the first step nothing is sent before all ranks have agreed on an order.
        assert alive[0] == 4 and max(alive[1:]) <= 1 and max(most[1:]) <= 1


def until_released(optimizer: Any, parameter: torch.nn.Parameter, index: int) -> None:
    """Waits, as later hooks would ask, until the exchange has read a gradient."""
    end = time.monotonic() + DEADLINE_S
    while optimizer._gradients.recorded[index] is not None:
        assert parameter.grad is None, "its bucket was posted"
        optimizer._stepper.buckets.post_early()
        if not optimizer._stepper.keeps_gradients:
            optimizer._gradients.drop_read()
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_memory_of_a_gradient_is_free_for_the_next(on_devices: Any) -> None:
    """Nothing keeps a tensor that was released."""

    def body(session: Session) -> None:
        parameters = [torch.nn.Parameter(torch.from_numpy(array)) for array in initial(LARGE)]
        optimizer = wrapped(parameters, free_gradients=True)
        for step in range(1, STEPS):
            for index in (3, 2, 1, 0):
                grad = torch.from_numpy(gradients(step, rank_of(session), LARGE)[index])
                (parameters[index] * grad).sum().backward()
                if step > 1 and index == 3:
                    found = optimizer._gradients.recorded[index]
                    reference = weakref.ref(found) if found is not None else None
                    del found
                    until_released(optimizer, parameters[index], index)
                    assert reference is None or reference() is None
            optimizer.step()

    run_ranks(2, body)


# What cannot be done without gradients


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overlap": False}, "needs overlap=True"),
        ({"max_grad_norm": 1.0}, "cannot clip exactly"),
        ({"max_grad_norm": 1.0, "clip": "previous"}, "has no norm to clip by"),
        ({"free_gradients": 1}, "free_gradients must be True or False"),
    ],
    ids=str,
)
def test_options_that_need_gradients_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        run_ranks(1, lambda s: wrapped(parameters_of(torch.float32), **{"free_gradients": True, **options}))


def test_on_a_gpu_it_needs_copies_in_the_hosts_memory(on_devices: Any) -> None:
    on_devices()
    with pytest.raises(InvalidRequestError, match="on a GPU needs offload=True"):
        run_ranks(1, lambda s: wrapped(parameters_of(torch.float32), free_gradients=True))
    with pytest.raises(InvalidRequestError, match="cannot clip exactly"):
        options = {"free_gradients": True, "offload": True, "max_grad_norm": 1.0}
        run_ranks(1, lambda s: wrapped(parameters_of(torch.float32), **options))


def test_a_grad_scaler_is_refused() -> None:
    def body(session: Session) -> None:
        parameters = parameters_of(torch.float32)
        optimizer = wrapped(parameters, free_gradients=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale((parameters[0] * 2).sum()).backward()
        with pytest.raises(InvalidRequestError, match="a GradScaler would divide its scale out of them"):
            scaler.step(optimizer)

    run_ranks(1, body)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("what", ["backward", "assignment"])
def test_a_second_gradient_before_the_step_is_an_error(what: str, offload: bool, on_devices: Any) -> None:
    if offload:
        on_devices()

    def body(session: Session) -> None:
        parameters = parameters_of(torch.float32)
        optimizer = wrapped(parameters, free_gradients=True, offload=offload)
        for step in range(1, 7):
            backward(parameters, gradients(step, 0), range(len(parameters)))
            if step < 6:
                optimizer.step()
        with pytest.raises(InvalidRequestError, match=r"'parameter.0.\d' has another gradient before step\(\)"):
            if what == "backward":
                backward(parameters, gradients(7, 0), range(len(parameters)))
            else:
                parameters[2].grad = torch.ones_like(parameters[2])
                optimizer.step()
        with pytest.raises(InvalidRequestError, match="has another gradient"):
            optimizer.step()

    run_ranks(1, body)


def test_passes_inside_no_sync_are_added_up() -> None:
    def body(session: Session, **options: Any) -> list[str]:
        parameters = parameters_of(torch.float32)
        optimizer = wrapped(parameters, **options)
        history = []
        for step in range(1, 9):
            optimizer.zero_grad()
            with optimizer.no_sync():
                backward(parameters, gradients(100 + step, rank_of(session)), (3, 2, 1, 0))
            backward(parameters, gradients(step, rank_of(session)), (3, 2, 1, 0))
            optimizer.step()
            history.append(digest([p.detach().numpy() for p in parameters]))
        return history

    expected = run_ranks(2, body)
    assert run_ranks(2, lambda s: body(s, free_gradients=True)) == expected


def test_a_step_that_is_given_up_leaves_nothing_behind() -> None:
    def body(session: Session, **options: Any) -> list[str]:
        parameters = parameters_of(torch.float32)
        optimizer = wrapped(parameters, **options)
        history = []
        for step in range(1, 9):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank_of(session)), (3, 2, 1, 0))
            if step in (3, 6):
                optimizer.zero_grad()
                backward(parameters, gradients(100 + step, rank_of(session)), (3, 2, 1, 0))
            optimizer.step()
            history.append(digest([p.detach().numpy() for p in parameters]))
        return history

    expected = run_ranks(2, body)
    assert run_ranks(2, lambda s: body(s, free_gradients=True)) == expected


@pytest.mark.parametrize("hosts", [None, ["a", "a", "b", "b"]], ids=["flat", "hierarchical"])
@pytest.mark.parametrize("step_of_nan", [3, 7], ids=["dense", "compressed"])
def test_a_nan_in_a_released_gradient_is_named_with_its_rank(step_of_nan: int, hosts: list[str] | None) -> None:
    def body(session: Session) -> None:
        parameters = [torch.nn.Parameter(torch.from_numpy(array)) for array in initial(LARGE)]
        optimizer = wrapped(parameters, free_gradients=True, hierarchical=bool(hosts))
        for step in range(1, STEPS):
            grads = gradients(step, rank_of(session), LARGE)
            before = [p.detach().clone() for p in parameters]
            if step == step_of_nan and rank_of(session) == 1:
                grads[3][77] = np.nan
            for index in (3, 2, 1, 0):
                (parameters[index] * torch.from_numpy(grads[index])).sum().backward()
                if step > 1 and index == 3:  # the one that has it
                    until_released(optimizer, parameters[index], index)
            if step == step_of_nan:
                with pytest.raises(NonFiniteError, match=rf"in step {step}, on rank\(s\) \[1\]"):
                    optimizer.step()
                assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
            else:
                optimizer.step()

    run_ranks(4 if hosts else 2, body, hosts=hosts)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_that_would_be_exchanged_again_is_discarded_on_all_ranks(mixed: bool) -> None:
    """Also where only one rank has released its gradients."""

    def body(session: Session) -> list[str]:
        parameters = parameters_of(torch.float32)
        frees = not mixed or rank_of(session) == 0
        optimizer = wrapped(parameters, {"weight_decay": 0.1}, free_gradients=frees)
        history = []
        for step in range(1, STEPS):
            if not frees:
                optimizer.zero_grad()
            backward(parameters, gradients(step, rank_of(session)), (3, 2, 1, 0))
            before = [p.detach().clone() for p in parameters]
            if step == 7:
                if not mixed:
                    optimizer.param_groups[0]["weight_decay"] = 0.2  # gradients are compressed with it
                elif not frees:
                    parameters[0].grad *= 2
                words = rf"in step 7 gradients, .* changed on rank\(s\) \[{'1' if mixed else '0, 1'}\]"
                with pytest.raises(InvalidRequestError, match=words):
                    optimizer.step()
                assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
                optimizer.param_groups[0]["weight_decay"] = 0.1
            else:
                optimizer.step()
            history.append(digest([p.detach().numpy() for p in parameters]))
        report = optimizer.compression_report()
        assert report["skipped_steps"] == 1 and report["skipped_by"] is None  # nobody called skip()
        return history

    first, second = run_ranks(2, body)
    assert first == second and len(set(first)) == STEPS - 2


def test_copies_in_the_hosts_memory_are_exchanged_again(on_devices: Any) -> None:
    def body(session: Session, **options: Any) -> tuple[list[str], int]:
        parameters = parameters_of(torch.float32)
        optimizer = wrapped(parameters, {"weight_decay": 0.1}, **options)
        history = []
        for step in range(1, STEPS):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank_of(session)), (3, 2, 1, 0))
            if step == 7:
                optimizer.param_groups[0]["weight_decay"] = 0.2
            optimizer.step()
            history.append(digest([p.detach().numpy() for p in parameters]))
        return history, optimizer.compression_report()["redone_steps"]

    expected = run_ranks(2, body)
    assert expected[0][1] == 1
    on_devices()
    assert run_ranks(2, lambda s: body(s, free_gradients=True, offload=True)) == expected


def test_ddp_keeps_its_gradients() -> None:
    def body(session: Session) -> None:
        parameters = parameters_of(torch.float32)
        optimizer = wrapped(parameters, free_gradients=True)
        with pytest.raises(InvalidRequestError, match="cannot release what DDP keeps in buckets of its own"):
            optimizer.left_by_ddp(parameters)
        # As DDP's join() does for a rank that has no more batches.
        with pytest.raises(InvalidRequestError, match=r"DDP's join.* All ranks must take equally many steps"):
            wrapped(parameters_of(torch.float32)).left_by_ddp([])

    run_ranks(1, body)


def test_a_rank_that_raises_frees_the_others() -> None:
    def body(session: Session) -> None:
        parameters = parameters_of(torch.float32)
        optimizer = wrapped(parameters, free_gradients=True)
        for step in range(1, 7):
            backward(parameters, gradients(step, 0), range(len(parameters)))
            if step == 6 and rank_of(session) == 1:
                backward(parameters, gradients(7, 0), range(len(parameters)))
            optimizer.step()

    with pytest.raises((InvalidRequestError, HorovodInternalError)):
        run_ranks(2, body)
