"""DistributedOptimizer(op=Adasum): local steps, combined by Adasum."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import ocomm_torch as hvd  # noqa: E402
from ocomm.errors import HorovodInternalError, InvalidRequestError, MismatchError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from tests.world.test_adasum import oracle  # noqa: E402
from tests.worlds import interrupt_soon, run_ranks  # noqa: E402


def model_and_gradients(rank: int) -> torch.nn.Module:
    """The same parameters on all ranks, gradients of the rank's own data; ranks may be threads with one seed."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    generator.manual_seed(rank)
    model(torch.randn(5, 4, generator=generator, dtype=torch.float64)).square().sum().backward()
    return model


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_step_is_the_adasum_of_the_ranks_own_steps(size: int, kind: str) -> None:
    def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)(model.parameters(), lr=0.1)

    def body(session: Session) -> list:
        steps = []
        for rank in range(size):
            model = model_and_gradients(rank)
            before = [p.detach().clone() for p in model.parameters()]
            optimizer_of(model).step()
            steps.append([p.detach() - b for p, b in zip(model.parameters(), before, strict=True)])
        model = model_and_gradients(hvd.rank())
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = hvd.DistributedOptimizer(
            optimizer_of(model), named_parameters=model.named_parameters(), op=hvd.Adasum
        )
        assert type(optimizer).__name__ == kind
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for k, (p, b) in enumerate(zip(model.parameters(), before, strict=True)):
            expected = oracle([step[k].flatten().numpy() for step in steps]).reshape(p.shape)
            torch.testing.assert_close(p.detach() - b, torch.from_numpy(expected), rtol=1e-9, atol=1e-12)
        return [p.tolist() for p in model.parameters()]

    first, *rest = run_ranks(size, body)
    assert all(other == first for other in rest)


def test_a_parameter_that_is_new_in_a_group_gets_a_name_and_is_combined() -> None:
    def body(session: Session) -> list[float]:
        model = torch.nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), op=hvd.Adasum
        )
        model.weight = optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.ones(2, 3))  # as pruning does
        model.weight.grad = torch.full((2, 3), 1.0 + hvd.rank())
        optimizer.step()
        return model.weight.flatten().tolist()

    first, second = run_ranks(2, body)
    assert first == second and first[0] < 1.0


def test_a_closure_schedulers_and_compression_work_and_nothing_can_be_skipped() -> None:
    def body(session: Session) -> None:
        model = model_and_gradients(hvd.rank())
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, op=hvd.Adasum, compression=hvd.Compression.bf16)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        assert optimizer.step(lambda: 5.0) == 5.0
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05
        optimizer.synchronize()
        optimizer.set_backward_passes_per_step(2)
        with (
            pytest.raises(AssertionError, match=r"^Skipping synchronization is not supported"),
            optimizer.skip_synchronize(),
        ):
            pass  # fmt: skip

    run_ranks(2, body)


def test_a_frozen_parameter_with_a_gradient_is_refused_by_name() -> None:
    def body(session: Session) -> list:
        model = model_and_gradients(hvd.rank())
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Adasum)
        model[1].weight.requires_grad_(False)
        for closure in (None, lambda: 1.0):
            with pytest.raises(InvalidRequestError, match=r"^parameter '1\.weight' is frozen .* and has a gradient\."):
                optimizer.step(closure)

        def clearing() -> float:
            model[1].weight.grad = None
            return 1.0

        assert optimizer.step(clearing) == 1.0
        return [p.tolist() for p in model.parameters()]

    first, second = run_ranks(2, body)
    assert first == second


def test_a_rank_whose_gradients_overflow_makes_all_skip_the_step_and_their_scales_agree() -> None:
    def body(session: Session) -> tuple[list[float], list[bool]]:
        model = model_and_gradients(0).float()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        scales, moved = [], []
        for step in range(4):
            optimizer.zero_grad()
            before = [p.detach().clone() for p in model.parameters()]
            loss = model(torch.ones(2, 4) + hvd.rank()).square().sum()
            if step == 1 + hvd.rank():
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            moved.append(not all(map(torch.equal, before, model.parameters())))
        return scales, moved

    assert run_ranks(2, body) == [([1024.0, 512.0, 256.0, 256.0], [True, False, False, True])] * 2


@pytest.mark.parametrize("when", ["in a hook", "while it waits"])
def test_a_step_that_was_interrupted_is_undone_and_the_last(when: str) -> None:
    def body(session: Session) -> None:
        if hvd.rank() > 0:
            assert hvd.broadcast_object(None, 0) == "interrupted"
            return
        model = model_and_gradients(0)
        before = [p.tolist() for p in model.parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
        if when == "in a hook":
            optimizer.register_step_post_hook(lambda *_: int("no number"))
        else:
            interrupt_soon(ValueError)
        with pytest.raises(ValueError):
            optimizer.step()
        assert [p.tolist() for p in model.parameters()] == before
        hvd.broadcast_object("interrupted", 0)
        with pytest.raises(HorovodInternalError) as error:
            optimizer.step()
        assert str(error.value) == (
            "DistributedOptimizer: a step was interrupted by ValueError, so this rank may have missed what the others "
            "have done. Wrap the optimizer anew, and load a state on all ranks."
        )

    run_ranks(2, body)


def test_a_step_whose_closure_or_exchange_fails_is_undone_and_may_be_made_again() -> None:
    def body(session: Session) -> None:
        sizes = torch.nn.Parameter(torch.ones(2 + hvd.rank())), torch.nn.Parameter(torch.ones(2))
        for p in sizes:
            p.grad = torch.ones_like(p)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(sizes, lr=0.1), op=hvd.Adasum)
        with pytest.raises(ValueError):
            optimizer.step(lambda: int("no number"))
        for _ in range(2):
            with pytest.raises(MismatchError):
                optimizer.step()
            assert all((p == 1).all() for p in sizes)

    run_ranks(2, body)
