"""DistributedOptimizer: equals one process on the whole batch, and keeps Horovod's rules."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ocomm_torch as hvd  # noqa: E402
from ocomm import operations  # noqa: E402
from ocomm.errors import InvalidRequestError, StallError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from ocomm.types import Settings  # noqa: E402
from ocomm_torch.memory import naming  # noqa: E402
from ocomm_torch.optimizers import averaging  # noqa: E402
from ocomm_torch.optimizers.diloco import _check_storage  # noqa: E402
from tests.worlds import interrupt_soon, run_ranks  # noqa: E402

STEPS, BATCH = 5, 24
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def make_model(seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator) * 0.3
    return model


def batches() -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(BATCH, 6, generator=generator) for _ in range(STEPS)]
    return [(x, x.sum(1, keepdim=True)) for x in xs]


def part(tensor: Any, rank: int, size: int) -> Any:
    n = len(tensor) // size
    return tensor[rank * n : (rank + 1) * n]


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.mse_loss(model(x), y)


def alone(kind: str) -> list[Any]:
    """Parameters after training in one process on the whole batches."""
    model = make_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def together(size: int, kind: str, **options: Any) -> list[list[Any]]:
    """Parameters of every rank after training on parts of the batches."""

    def body(session: Session) -> list[Any]:
        model = make_model(hvd.rank())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        chosen = {k: make(model) if k == "groups" and callable(make) else make for k, make in options.items()}
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), model.named_parameters(), **chosen)
        for x, y in batches():
            optimizer.zero_grad()
            loss_of(model, part(x, hvd.rank(), size), part(y, hvd.rank(), size)).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    return run_ranks(size, body)


def assert_equal_ranks(results: list[list[Any]]) -> None:
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


class TestAgainstOneProcess:
    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    @pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
    def test_it_equals_training_on_the_whole_batch(self, size: int, kind: str) -> None:
        results = together(size, kind)
        assert_equal_ranks(results)
        torch.testing.assert_close(results[0], alone(kind), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        "options",
        [
            {"gradient_predivide_factor": 2.0},
            {"groups": 2},
            {"groups": 2, "gradient_predivide_factor": 4.0},
            {"groups": lambda model: [[model[0].weight, model[2].bias], [model[0].bias]]},
        ],
        ids=["predivide", "number of groups", "groups and predivide", "lists"],
    )
    def test_options_that_change_no_result(self, options: dict[str, Any]) -> None:
        results = together(2, "sgd", **options)
        assert_equal_ranks(results)
        torch.testing.assert_close(results[0], alone("sgd"), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", ["fp16", "bf16"])
    def test_compressed_gradients_stay_close(self, name: str) -> None:
        results = together(2, "sgd", compression=getattr(hvd.Compression, name))
        assert_equal_ranks(results)
        torch.testing.assert_close(results[0], alone("sgd"), rtol=0.05, atol=0.01)

    def test_a_compressor_may_be_an_object(self) -> None:
        class Halves(hvd.Compression.fp16):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                self.calls = 0

            def compress(self, tensor: Any) -> Any:  # type: ignore[override]
                self.calls += 1
                return super().compress(tensor)

        def body(session: Session) -> int:
            model, compression = make_model(), Halves()
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), compression=compression)
            loss_of(model, *batches()[0]).backward()
            optimizer.step()
            assert hvd.allreduce(torch.ones(2), compression=compression).tolist() == [1.0, 1.0]
            return compression.calls

        assert run_ranks(2, body) == [5, 5]

    def test_an_optimizer_of_the_users_may_clear_gradients_in_its_own_way(self) -> None:
        class Own(torch.optim.SGD):
            def zero_grad(self) -> None:  # type: ignore[override]
                for p in self.param_groups[0]["params"]:
                    p.grad = None

        def body(session: Session) -> None:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(Own(model.parameters(), lr=0.1), model.named_parameters())
            loss_of(model, *batches()[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert model[0].weight.grad is None

        run_ranks(2, body)

    def test_gradients_of_several_backward_passes_are_summed(self) -> None:
        def body(session: Session) -> list[Any]:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(
                OPTIMIZERS["sgd"](model.parameters()), model.named_parameters(), backward_passes_per_step=2
            )
            for x, y in batches():
                optimizer.zero_grad()
                for half in range(2):
                    quarter = 2 * hvd.rank() + half
                    (loss_of(model, part(x, quarter, 4), part(y, quarter, 4)) / 2).backward()
                optimizer.step()
            return [p.detach().clone() for p in model.parameters()]

        results = run_ranks(2, body)
        assert_equal_ranks(results)
        torch.testing.assert_close(results[0], alone("sgd"), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("groups", [None, 2], ids=["alone", "grouped"])
    @pytest.mark.parametrize("by_wrapped", [False, True])
    def test_layers_may_be_frozen_thawed_and_added_and_all_are_clipped(
        self, groups: int | None, by_wrapped: bool
    ) -> None:
        def train(model: Any, wrap: Callable[[Any], Any], rank: int, size: int) -> list[Any]:
            first, last = model[0], model[2]
            first.weight.requires_grad_(False)
            wrapped = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
            optimizer = wrap(wrapped)
            for step, (x, y) in enumerate(batches()):
                if step == 1:
                    (wrapped if by_wrapped else optimizer).add_param_group({"params": list(last.parameters())})
                if step == 2:
                    first.weight.requires_grad_(True)
                if step == 4:
                    first.bias.requires_grad_(False)
                    first.bias.grad = None
                loss_of(model, part(x, rank, size), part(y, rank, size)).backward()
                trained = [p for group in wrapped.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(trained, 0.5, foreach=False)  # looks at them one by one
                optimizer.step()
                optimizer.zero_grad()
            return [p.detach().clone() for p in model.parameters()]

        def body(session: Session) -> list[Any]:
            model = make_model()
            named = list(model[0].named_parameters())
            return train(model, lambda o: hvd.DistributedOptimizer(o, named, groups=groups), hvd.rank(), 2)

        results = run_ranks(2, body)
        assert_equal_ranks(results)
        for found, expected in zip(results[0], train(make_model(), lambda o: o, 0, 1), strict=True):
            assert torch.allclose(found, expected, atol=1e-6)

    def test_a_frozen_parameter_with_a_gradient_is_refused_by_name(self) -> None:
        def refused(optimizer: Any, name: str) -> None:
            with pytest.raises(InvalidRequestError) as error:
                optimizer.step()
            assert str(error.value) == (
                f"parameter '{name}' is frozen (requires_grad_(False)) and has a gradient. This rank would step on it "
                "alone, so replicas would come apart. Freeze parameters between step() and the next backward(), on all "
                "ranks, and set their .grad to None; where you compute gradients yourself, call requires_grad_(True) "
                "before step()."
            )

        def body(session: Session) -> list[Any]:
            p = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
            by_hand = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("by hand", p)])
            p.grad = torch.full((3,), 1.0 + hvd.rank())
            refused(by_hand, "by hand")
            p.requires_grad_(True)
            by_hand.step()
            assert p.tolist() == [-1.5] * 3

            model = make_model()
            optimizer = hvd.DistributedOptimizer(
                OPTIMIZERS["sgd"](model.parameters()), model.named_parameters(), backward_passes_per_step=2
            )
            loss_of(model, *batches()[hvd.rank()]).backward()
            model[0].weight.requires_grad_(False)
            loss_of(model, *batches()[hvd.rank()]).backward()
            refused(optimizer, "0.weight#2")
            optimizer.zero_grad(set_to_none=False)
            assert model[0].weight.grad is not None, "zeros, which are alike on all ranks"
            for _ in range(2):
                loss_of(model, *batches()[hvd.rank()]).backward()
            optimizer.step()
            return [p.detach().clone() for p in model.parameters()]

        assert_equal_ranks(run_ranks(2, body))

    def test_clipping_after_backward_sees_the_average(self) -> None:
        def body(session: Session) -> float:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
            x, y = batches()[0]
            loss_of(model, part(x, hvd.rank(), 2), part(y, hvd.rank(), 2)).backward()
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
            clipped = torch.cat([p.grad.flatten() for p in model.parameters()])
            assert abs(float(clipped.norm()) - 0.01) < 1e-6
            return norm

        a, b = run_ranks(2, body)
        model = make_model()
        loss_of(model, *batches()[0]).backward()
        alone_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        assert a == b == pytest.approx(alone_norm, rel=1e-5)

    def test_closures_get_averaged_gradients(self) -> None:
        def body(session: Session) -> list[Any]:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
            for x, y in batches():

                def closure(x: Any = x, y: Any = y) -> Any:
                    optimizer.zero_grad()
                    loss = loss_of(model, part(x, hvd.rank(), 2), part(y, hvd.rank(), 2))
                    loss.backward()
                    return loss

                optimizer.step(closure)
            return [p.detach().clone() for p in model.parameters()]

        results = run_ranks(2, body)
        assert_equal_ranks(results)
        torch.testing.assert_close(results[0], alone("sgd"), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("size", [2, 3])
    @pytest.mark.parametrize("search", [None, "strong_wolfe"])
    def test_lbfgs_decides_by_the_loss_of_all_ranks(self, search: str | None, size: int) -> None:
        # Larger on the first part, so that ranks that looked at their own loss would choose other steps.
        weights = torch.where(torch.arange(BATCH) < BATCH // size, 5.0, 0.1)[:, None]

        def train(rank: int, parts: int, wrap: Callable[..., Any]) -> tuple[list[Any], list[float], int]:
            model, calls = make_model(), 0
            options = {"lr": 0.2, "max_iter": 6, "tolerance_change": 1.0, "line_search_fn": search}
            optimizer = wrap(torch.optim.LBFGS(model.parameters(), **options), model)
            losses = []
            for x, y in batches():

                def closure(x: Any = x, y: Any = y) -> Any:
                    nonlocal calls
                    calls += 1
                    optimizer.zero_grad()
                    x, y, w = (part(values, rank, parts) for values in (x, y, weights))
                    loss = (w * (model(x) - y).square()).mean()
                    loss.backward()
                    return loss if search is None else loss.item()

                losses.append(float(torch.as_tensor(optimizer.step(closure)).detach()))
            return [p.detach().clone() for p in model.parameters()], losses, calls

        def distributed(optimizer: Any, model: Any) -> Any:
            return hvd.DistributedOptimizer(optimizer, model.named_parameters())

        found = run_ranks(size, lambda session: train(hvd.rank(), size, distributed))
        assert_equal_ranks([parameters for parameters, _, _ in found])
        assert len({(*losses, calls) for _, losses, calls in found}) == 1
        expected, losses, calls = train(0, 1, lambda optimizer, model: optimizer)
        torch.testing.assert_close(found[0][0], expected, rtol=1e-3, atol=1e-4)
        assert found[0][1] == pytest.approx(losses, rel=1e-3) and found[0][2] == calls


class TestSteps:
    """A step is averaged once, whatever has averaged the one before."""

    @pytest.mark.parametrize(("gradients", "expected"), [("set", 1.5), ("of a pass too few", 1.5), ("of a rank", 1.0)])
    @pytest.mark.parametrize("before", ["closure", "given up"])
    def test_averages_of_a_step_do_not_stand_for_those_of_the_next(
        self, before: str, gradients: str, expected: float
    ) -> None:
        def body(session: Session) -> list[list[float]]:
            p, q = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0), backward_passes_per_step=2)

            def closure() -> Any:
                for _ in range(2):
                    loss = p.sum() + q.sum()
                    loss.backward()
                return loss

            if before == "closure":
                optimizer.step(closure)
                p.grad = q.grad = None
            else:
                closure()
                optimizer.synchronize()
                optimizer.zero_grad()
            starts = [p.detach().clone(), q.detach().clone()]
            if gradients == "set":
                p.grad, q.grad = (torch.full((2,), 1.0 + hvd.rank()) for _ in range(2))
            elif gradients == "of a pass too few":
                ((p.sum() + q.sum()) * (1 + hvd.rank())).backward()
            elif hvd.rank() == 0:
                closure()
            optimizer.step()
            return [(start - now).tolist() for start, now in zip(starts, [p, q], strict=True)]

        assert run_ranks(2, body) == [[[expected] * 2] * 2] * 2

    @pytest.mark.parametrize("way", ["synchronize", "closure"])
    def test_gradients_that_were_used_are_not_averaged_again(self, way: str) -> None:
        """The use has averaged the step on the rank that lacks a gradient; the other one had all at backward's end."""

        def body(session: Session) -> list[float]:
            p, q = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0, momentum=0.5))

            def closure() -> Any:
                optimizer.zero_grad()
                loss = p + q if hvd.rank() == 0 else p * 1.0
                loss.backward()
                assert p.grad.item() == 1.0
                return loss

            for _ in range(2):
                if way == "closure":
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.synchronize()
                    with optimizer.skip_synchronize():
                        optimizer.step()
            return [p.item(), q.item()]

        assert run_ranks(2, body) == [[-2.5, -1.25]] * 2


class TestUnevenGradients:
    def test_a_missing_gradient_counts_as_zeros(self) -> None:
        def body(session: Session) -> list[Any]:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
            before = model[2].bias.detach().clone()
            unused = model[2].weight if hvd.rank() else None
            (model[2].bias.sum() + (0 if unused is not None else model[2].weight.sum())).backward()
            optimizer.step()
            assert torch.equal(model[2].bias, before - 1)
            assert model[0].weight.grad.abs().sum() == 0
            return [p.detach().clone() for p in model.parameters()]

        results = run_ranks(2, body)
        assert_equal_ranks(results)
        torch.testing.assert_close(results[0][2], make_model()[2].weight - 0.5)

    def test_a_kept_gradient_that_backward_has_not_reached_is_changed_as_the_average(self) -> None:
        def body(session: Session) -> list[float]:
            p, q = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0))
            for step in range(2):
                optimizer.zero_grad(set_to_none=False)
                (p.sum() + (q.sum() if hvd.rank() == 0 or step == 0 else 0)).backward()
                q.grad.add_(1.0)
                optimizer.step()
            return q.tolist()

        assert run_ranks(2, body) == [[-3.5, -3.5]] * 2

    @pytest.mark.parametrize("sparse", [False, True])
    def test_a_kept_gradient_that_a_later_backward_reaches_is_averaged_then(self, sparse: bool) -> None:
        def body(session: Session) -> tuple[list[float], set[type]]:
            p, table = torch.nn.Parameter(torch.zeros(())), torch.nn.Embedding(1, 1, sparse=sparse)
            torch.nn.init.zeros_(table.weight)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, table.weight], lr=1.0), op=hvd.Sum)
            for _ in range(2):
                optimizer.zero_grad(set_to_none=False)
                (p * (1.0 + hvd.rank())).backward()
                (table(torch.tensor([0])).sum() * (1.0 + hvd.rank())).backward()
                optimizer.step()
            return [p.item(), table.weight.item()], {type(p.grad), type(table.weight.grad)}

        assert run_ranks(2, body) == [([-6.0, -6.0], {torch.Tensor})] * 2

    @pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch < 2.10 has no Tensor.grad_dtype")
    def test_zeros_have_the_type_that_the_user_gives_gradients(self) -> None:
        def body(session: Session) -> list[Any]:
            p, q = (torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
            p.grad_dtype = q.grad_dtype = torch.float32
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0))
            hvd.broadcast_optimizer_state(optimizer, root_rank=1)  # makes gradients that are missing
            optimizer.zero_grad()
            torch.cat([p] if hvd.rank() else [p, q]).sum().backward()
            optimizer.synchronize()
            return [p.grad, q.grad]

        for found in run_ranks(2, body):
            for grad, expected in zip(found, (1.0, 0.5), strict=True):
                assert torch.equal(grad, torch.full((4,), expected))

    @pytest.mark.parametrize("as_dense", [False, True])
    def test_sparse_gradients(self, as_dense: bool) -> None:
        def body(session: Session) -> Any:
            embedding = torch.nn.Embedding(4, 2, sparse=True)
            embedding.weight.data.zero_()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(embedding.parameters(), lr=1.0), embedding.named_parameters(), sparse_as_dense=as_dense
            )
            for _ in range(2):
                optimizer.zero_grad()
                embedding(torch.tensor([hvd.rank(), 2])).sum().backward()
                optimizer.step()
            return embedding.weight.detach()[:, 0].tolist()

        assert run_ranks(2, body) == [[-1.0, -1.0, -2.0, 0.0]] * 2

    def test_sparse_adam_gets_sparse_gradients_however_they_were_sent(self) -> None:
        def body(session: Session) -> list[Any]:
            results = []
            for as_dense, groups in ((False, None), (True, None), (True, 1)):
                embedding = torch.nn.Embedding(5, 2, sparse=True)
                embedding.weight.data.fill_(1.0)
                inner = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
                optimizer = hvd.DistributedOptimizer(
                    inner, embedding.named_parameters(), groups=groups, sparse_as_dense=as_dense
                )
                for step in range(3):
                    optimizer.zero_grad()
                    if hvd.rank() == 0 or step == 0:  # rank 1 has no gradient later
                        embedding(torch.tensor([hvd.rank(), 2])).sum().backward()
                    optimizer.step()
                results.append(embedding.weight.detach().clone())
            return results

        sent, *others = itertools.chain(*run_ranks(2, body))
        assert all(torch.equal(sent, other) for other in others) and len(others) == 5
        assert (sent[3:] == 1).all() and (sent[:3] < 1).all()

    def test_a_missing_sparse_gradient_counts_as_no_rows(self) -> None:
        def body(session: Session) -> Any:
            embedding = torch.nn.Embedding(4, 2, sparse=True)
            embedding.weight.data.zero_()
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0))
            for users in (2, 1, 0):
                optimizer.zero_grad()
                if hvd.rank() < users:
                    embedding(torch.tensor([hvd.rank(), 2])).sum().backward()
                optimizer.step()
            return embedding.weight.detach()[:, 0].tolist()

        assert run_ranks(2, body) == [[-1.0, -0.5, -1.5, 0.0]] * 2

    def test_a_sparse_gradient_that_is_missing_in_the_first_step_is_told_with_what_to_do(self) -> None:
        def body(session: Session) -> str:
            embedding = torch.nn.Embedding(4, 2, sparse=True)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters()), embedding.named_parameters())
            if hvd.rank() == 0:
                embedding(torch.tensor([2])).sum().backward()
            with pytest.raises(StallError) as error:
                optimizer.step()
            return str(error.value)

        said = run_ranks(2, body, Settings(stall_raise=True, stall_check_s=600.0))
        assert "rank 1 waits for 'allreduce.weight' instead" in said[0]
        assert said[0].endswith(
            " A rank where 'weight' has had no gradient yet cannot know they are sparse: use it on all ranks in the "
            "first step, or pass sparse_as_dense=True."
        )
        assert "rank 0 waits for 'allgather.weight.indices', 'allgather.weight.values' instead" in said[1]

    def test_channels_last_gradients(self) -> None:
        def body(session: Session) -> Any:
            model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            for p in model.parameters():
                torch.nn.init.ones_(p)  # not drawn: ranks are threads, which share Torch's generator
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
            x = torch.full((1, 3, 5, 5), 1.0 + hvd.rank()).to(memory_format=torch.channels_last)
            model(x).sum().backward()
            optimizer.step()
            return model.weight.grad.clone()

        a, b = run_ranks(2, body)
        assert torch.equal(a, b) and torch.equal(a, torch.full_like(a, 9 * 1.5))


class TestGradScaler:
    @pytest.mark.parametrize("unscale_first", [False, True])
    def test_it_needs_nothing_special(self, unscale_first: bool) -> None:
        def body(session: Session) -> list[Any]:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for x, y in batches():
                optimizer.zero_grad()
                scaler.scale(loss_of(model, part(x, hvd.rank(), 2), part(y, hvd.rank(), 2))).backward()
                if unscale_first:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                scaler.step(optimizer)
                scaler.update()
            return [p.detach().clone() for p in model.parameters()]

        results = run_ranks(2, body)
        assert_equal_ranks(results)
        torch.testing.assert_close(results[0], alone("sgd"), rtol=1e-4, atol=1e-5)

    def test_a_gradient_that_one_rank_lacks_is_averaged_before_it_is_unscaled(self) -> None:
        def body(session: Session) -> list[Any]:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            used = model[2].bias.sum() + (model[2].weight.sum() if hvd.rank() else 0)
            scaler.scale(used).backward()
            scaler.step(optimizer)
            return [p.detach().clone() for p in model.parameters()]

        results = run_ranks(2, body)
        assert_equal_ranks(results)
        torch.testing.assert_close(results[0][2], make_model()[2].weight - 0.5)

    def test_an_overflow_on_one_rank_is_skipped_by_all(self) -> None:
        def body(session: Session) -> float:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            before = [p.detach().clone() for p in model.parameters()]
            for step, (x, y) in enumerate(batches()):
                optimizer.zero_grad()
                loss = loss_of(model, part(x, hvd.rank(), 2), part(y, hvd.rank(), 2))
                if step == 0 and hvd.rank() == 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                if step == 0:
                    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert not torch.equal(before[0], model[0].weight)
            return scaler.get_scale()

        assert run_ranks(2, body) == [512.0, 512.0]

    @pytest.mark.parametrize("unscale_first", [False, True])
    @pytest.mark.parametrize("fused", [False, True])
    def test_a_rank_with_no_gradient_under_way_unscales_the_averages(self, fused: bool, unscale_first: bool) -> None:
        def body(session: Session) -> list[tuple[float, float]]:
            p = torch.nn.Parameter(torch.zeros(2))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0, fused=fused))
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            found = []
            for step in range(4):
                optimizer.zero_grad(set_to_none=False)
                if step == 0 or hvd.rank() == 0:  # the other rank's batch has no sample for it later
                    scaler.scale(p.sum() * (float("inf") if step == 2 else 1.0)).backward()
                if unscale_first:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                found.append((p[0].item(), scaler.get_scale()))
            return found

        assert run_ranks(2, body) == [[(-1.0, 4.0), (-1.5, 4.0), (-1.5, 2.0), (-2.0, 2.0)]] * 2

    def test_an_overflow_after_a_pass_too_few_is_skipped_by_all(self) -> None:
        def body(session: Session) -> list[tuple[float, float]]:
            p = torch.nn.Parameter(torch.zeros(2))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), backward_passes_per_step=2)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            found = []
            for step, passes in enumerate([2, 1, 2]):
                for _ in range(passes):
                    overflow = step == 1 and hvd.rank() == 1
                    scaler.scale(p.sum() * (float("inf") if overflow else 1.0 + hvd.rank())).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                found.append((p[0].item(), scaler.get_scale()))
            return found

        assert run_ranks(2, body) == [[(-3.0, 4.0), (-3.0, 2.0), (-6.0, 2.0)]] * 2

    def test_a_step_that_was_skipped_is_over(self) -> None:
        def body(session: Session) -> list[float]:
            p = torch.nn.Parameter(torch.zeros(2))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(p.sum() * float("inf")).backward()
            scaler.step(optimizer)
            scaler.update()
            p.grad = torch.full((2,), 1.0 + hvd.rank())  # which no hook announces
            optimizer.step()
            return p.tolist()

        assert run_ranks(2, body) == [[-1.5, -1.5]] * 2


class TestRules:
    def test_the_class_keeps_its_name_state_and_groups(self) -> None:
        def body(session: Session) -> None:
            model = make_model()
            plain = torch.optim.Adam(model.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.1)
            loss_of(model, *batches()[0]).backward()
            plain.step()
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
            assert type(optimizer).__name__ == "Adam" and isinstance(optimizer, torch.optim.Adam)
            scheduler.step()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
            assert [s["step"] for s in optimizer.state_dict()["state"].values()] == [1] * 4
            optimizer.zero_grad()
            loss_of(model, *batches()[0]).backward()
            optimizer.step()
            other = torch.optim.Adam(make_model().parameters())
            other.load_state_dict(optimizer.state_dict())
            optimizer.load_state_dict(other.state_dict())
            assert [s["step"] for s in optimizer.state_dict()["state"].values()] == [2] * 4

        run_ranks(2, body)

    def test_optimizers_of_one_class_stay_of_one_class_which_nothing_else_keeps(self) -> None:
        """Lightning's LearningRateMonitor numbers equal names by the class."""
        kept: list[weakref.ref[type]] = []  # of the ranks of this process

        def body(session: Session) -> None:
            class Own(torch.optim.SGD):
                pass

            def wrapped(kind: Any, **options: Any) -> Any:
                return hvd.DistributedOptimizer(kind(make_model().parameters(), lr=0.01), **options)

            first, second = wrapped(Own), wrapped(Own)
            assert type(first) is type(second)
            assert len({type(first), type(wrapped(torch.optim.SGD)), type(wrapped(Own, op=hvd.Adasum))}) == 3
            kept.append(weakref.ref(type(first)))

        run_ranks(2, body)
        gc.collect()
        assert kept and not any(reference() for reference in kept)

    def test_both_optimizers_have_what_either_loads_and_a_schedule_goes_on(self) -> None:
        def body(session: Session) -> float:
            model = make_model()
            plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
            if hvd.rank() == 0:
                optimizer.param_groups[0]["momentum"] = 0.5
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            loss_of(model, *batches()[0]).backward()
            optimizer.step()
            scheduler.step()
            assert optimizer.param_groups is plain.param_groups and optimizer.state is plain.state
            state = optimizer.state_dict()
            state["param_groups"][0]["lr"] *= 4
            state["state"][0]["momentum_buffer"] = torch.full((16, 6), 3.0)
            plain.load_state_dict(state)
            assert float(optimizer.state[model[0].weight]["momentum_buffer"].mean()) == 3.0
            assert optimizer.param_groups[0]["momentum"] == 0.5
            return optimizer.param_groups[0]["lr"]

        assert run_ranks(2, body) == [0.2, 0.2]

    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
    @pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
    def test_it_cannot_be_copied_and_the_error_says_what_to_do(self, op: int, duplicate: Callable[[Any], Any]) -> None:
        def body(session: Session) -> None:
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](make_model().parameters()), op=op)
            with pytest.raises(InvalidRequestError) as raised:
                duplicate(optimizer)
            assert str(raised.value) == (
                "a distributed SGD cannot be copied or pickled: it holds connections to the other ranks. Save or "
                "send its state_dict(), and load it into a new one; of a scheduler that holds it, the scheduler's."
            )

        run_ranks(1, body)

    @pytest.mark.parametrize("named", [False, True])
    def test_gradients_of_equal_names_that_come_in_other_orders_are_each_models_own(self, named: bool) -> None:
        def body(session: Session) -> list[float]:
            models = [torch.nn.Linear(3, 1) for _ in range(2)]
            for p in (p for model in models for p in model.parameters()):
                torch.nn.init.ones_(p)
            optimizers = [
                hvd.DistributedOptimizer(OPTIMIZERS["sgd"](m.parameters()), m.named_parameters() if named else None)
                for m in models
            ]
            models[1].extra = torch.nn.Parameter(torch.ones(1))
            optimizers[1].add_param_group({"params": [models[1].extra]})
            losses = {}
            for k in (0, 1) if hvd.rank() else (1, 0):
                losses[k] = models[k](torch.ones(2, 3)).sum() * 10.0**k
            (losses[0] + losses[1] + models[1].extra.sum()).backward()
            for optimizer in optimizers:
                optimizer.synchronize()
            return [m.weight.grad[0, 0].item() for m in models] + [models[1].extra.grad.item()]

        assert run_ranks(2, body) == [[2.0, 20.0, 1.0]] * 2

    def test_a_gradient_that_is_changed_through_an_older_view_while_it_is_averaged_is_an_error(self) -> None:
        def body(session: Session) -> None:
            model = make_model()
            model.unused = torch.nn.Parameter(torch.ones(3))
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
            loss_of(model, *batches()[0]).backward()
            optimizer.step()
            views = [p.grad.view(-1) for p in model[2].parameters()]
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, *batches()[1]).backward()
            views[1].mul_(0.5)
            with pytest.raises(InvalidRequestError) as error:
                optimizer.step()
            assert str(error.value) == (
                "the gradient of '2.bias' was changed while it was being averaged. backward() waits for averages only "
                "where it reaches every parameter: else call optimizer.synchronize() before you clip or change "
                "gradients."
            )

        run_ranks(2, body)

    def test_no_name_is_given_twice_where_groups_are_removed_and_added(self) -> None:
        def body(session: Session) -> list[float]:
            a, b, c, d = (torch.nn.Parameter(torch.zeros(1)) for _ in range(4))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([{"params": [p]} for p in (a, b, c)], lr=1.0))
            optimizer.param_groups.pop(1)
            optimizer.add_param_group({"params": [d]})
            assert len(set(optimizer._parameter_names.values())) == 4
            (a + 2 * c + 3 * d * (1 + hvd.rank())).sum().backward()
            optimizer.step()
            return [p.item() for p in (a, b, c, d)]

        assert run_ranks(2, body) == [[-1.0, 0.0, -2.0, -4.5]] * 2

    def test_names_are_compared_a_few_times_each(self) -> None:
        compared = 0

        class Name(str):
            __hash__ = str.__hash__

            def __eq__(self, other: object) -> bool:
                nonlocal compared
                compared += 1
                return str.__eq__(self, other)

        named = [(Name(f"layer.{k}"), torch.nn.Parameter(torch.zeros(1))) for k in range(300)]
        assert list(naming.names_of([p for _, p in named], named).values()) == [name for name, _ in named]
        _check_storage([name for name, _ in named], [p for _, p in named])
        assert compared <= 3 * len(named) + 300  # of which 300 by this test

    def test_an_exchange_whose_wait_was_interrupted_is_waited_for_again(self) -> None:
        calls: list[str] = []

        def settle() -> None:
            calls.append("settle")
            if len(calls) == 1:
                raise KeyboardInterrupt

        def finish() -> None:
            calls.append("finish")
            if len(calls) == 3:
                raise KeyboardInterrupt

        exchange = averaging._Exchange(finish, settle)
        with pytest.raises(KeyboardInterrupt):
            exchange.settle()
        exchange.settle()
        with pytest.raises(KeyboardInterrupt):
            exchange.deliver()
        for _ in range(2):
            exchange.settle()
            exchange.deliver()
        assert calls == ["settle", "settle", "finish", "finish"]

    def test_sparse_gradients_whose_average_was_interrupted_are_averaged_in_step(self) -> None:
        def body(session: Session) -> list[float]:
            embedding = torch.nn.Embedding(4, 1, sparse=True)
            torch.nn.init.zeros_(embedding.weight)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(embedding.parameters(), lr=1.0), embedding.named_parameters()
            )
            loss = embedding(torch.tensor([hvd.rank()])).sum()
            if hvd.rank() == 0:
                interrupt_soon(KeyboardInterrupt)
                with pytest.raises(KeyboardInterrupt):
                    loss.backward()
                hvd.broadcast_object("interrupted", 0)
            else:
                hvd.broadcast_object(None, 0)
                loss.backward()
            optimizer.step()
            return embedding.weight.flatten().tolist()

        assert run_ranks(2, body) == [[-0.5, -0.5, 0.0, 0.0]] * 2

    def test_passes_before_zero_grad_do_not_count(self) -> None:
        def body(session: Session) -> list[Any]:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(
                OPTIMIZERS["sgd"](model.parameters()), model.named_parameters(), backward_passes_per_step=2
            )
            for x, y in batches():
                loss_of(model, x, y).backward()
                optimizer.zero_grad()
                for quarter in (2 * hvd.rank(), 2 * hvd.rank() + 1):
                    (loss_of(model, part(x, quarter, 4), part(y, quarter, 4)) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
            return [p.detach().clone() for p in model.parameters()]

        results = run_ranks(2, body)
        torch.testing.assert_close(results[0], alone("sgd"), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("again", [False, True])
    @pytest.mark.parametrize(
        ("kind", "wrapper", "options"),
        [
            ("sgd", "DistributedOptimizer", {}),
            ("sgd", "DistributedOptimizer", {"op": hvd.Adasum}),
            ("sgd", "DistributedOptimizer", {"compression": hvd.Compression.int8}),
            ("adam", "DistributedOneBitAdam", {}),
            ("sgd", "DistributedDiLoCo", {}),
        ],
    )
    def test_a_wrapper_that_nobody_keeps_is_told_at_the_first_step(
        self, kind: str, wrapper: str, options: dict[str, Any], again: bool
    ) -> None:
        """Without it each rank would train alone."""

        def body(session: Session) -> None:
            model = make_model()
            plain = OPTIMIZERS[kind](model.parameters())
            getattr(hvd, wrapper)(plain, model.named_parameters(), **options)
            loss_of(model, *batches()[0]).backward()
            if again:  # what it wraps may be wrapped again
                optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
                loss_of(model, *batches()[0]).backward()
                optimizer.step()
                del optimizer  # and is whoever's it was once it has stepped
                plain.step()
                return
            with pytest.raises(InvalidRequestError, match=f"^the {wrapper} that wraps this .* was not kept, so each"):
                plain.step()

        run_ranks(2, body)

    def test_the_result_may_be_dropped_on_one_rank_alone_in_the_job(self) -> None:
        def body(session: Session) -> None:
            plain = OPTIMIZERS["sgd"](make_model().parameters())
            hvd.DistributedOptimizer(plain)
            plain.step()

        run_ranks(1, body)

    def test_an_optimizer_may_be_replaced(self) -> None:
        def body(session: Session) -> None:
            model = make_model()
            for names in (model.named_parameters(), None):
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), names)
                with pytest.raises(InvalidRequestError, match=r"^this SGD is distributed already; wrap it once.$"):
                    hvd.DistributedOptimizer(optimizer)
                for _ in range(2):
                    before = model[2].bias.detach().clone()
                    optimizer.zero_grad()
                    (model[2].bias * (1.0 + hvd.rank())).sum().backward()
                    optimizer.step()
                    assert torch.equal(model[2].bias, before - 1.5)

        run_ranks(2, body)

    def test_zero_grad_between_backward_and_step_is_refused(self) -> None:
        def body(session: Session) -> None:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
            loss_of(model, *batches()[0]).backward()
            with pytest.raises(AssertionError) as error:
                optimizer.zero_grad()
            assert str(error.value) == (
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition. To leave a step out, as "
                "after a backward pass that raised, call optimizer.synchronize() first, on all ranks. Where a backward "
                "pass is for another optimizer, freeze the parameters of this one meanwhile: requires_grad_(False). "
                "For parameters that both have, make one optimizer with param groups of the two."
            )
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            assert model[0].weight.grad.abs().sum() == 0
            optimizer.zero_grad(set_to_none=True)
            assert model[0].weight.grad is None

        run_ranks(2, body)

    def test_too_many_backward_passes_are_refused(self) -> None:
        def body(session: Session) -> None:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
            loss_of(model, *batches()[0]).backward()
            with pytest.raises(AssertionError, match=r"^Gradients were computed more than backward_passes_per_step"):
                loss_of(model, *batches()[0]).backward()
            optimizer.step()
            optimizer.set_backward_passes_per_step(2)
            optimizer.zero_grad()
            loss_of(model, *batches()[0]).backward()
            loss_of(model, *batches()[0]).backward()
            optimizer.step()

        run_ranks(2, body)

    def test_horovods_dance_still_works(self) -> None:
        def body(session: Session) -> list[Any]:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
            for x, y in batches():
                optimizer.zero_grad()
                loss_of(model, part(x, hvd.rank(), 2), part(y, hvd.rank(), 2)).backward()
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                with optimizer.skip_synchronize():
                    optimizer.step()
            return [p.detach().clone() for p in model.parameters()]

        results = run_ranks(2, body)
        assert_equal_ranks(results)
        torch.testing.assert_close(results[0], alone("sgd"), rtol=1e-4, atol=1e-5)

    def test_step_after_synchronize_warns(self) -> None:
        def body(session: Session) -> None:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
            loss_of(model, *batches()[0]).backward()
            optimizer.synchronize()
            optimizer.step()

        with pytest.warns(UserWarning, match=r"^optimizer.step\(\) called without") as caught:
            run_ranks(2, body)
        assert {warning.filename for warning in caught} == {__file__}

    def test_a_rank_outside_the_set_steps_alone(self) -> None:
        def body(session: Session) -> Any:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0),
                model.named_parameters(),
                process_set=hvd.ProcessSet([0, 1]),
            )
            (model[2].bias * (1.0 + hvd.rank())).sum().backward()
            optimizer.step()
            return (make_model()[2].bias - model[2].bias).item()

        assert run_ranks(3, body, process_sets=[[0, 1]]) == pytest.approx([1.5, 1.5, 3.0])

    def test_wrong_arguments_get_horovods_messages(self) -> None:
        def body(session: Session) -> None:
            model = make_model()
            named = list(model.named_parameters())
            weight = model[0].weight
            cases: list[tuple[dict[str, Any], str]] = [
                (
                    {"named_parameters": list(model.parameters())},
                    "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                    "model.named_parameters().",
                ),
                (
                    {"named_parameters": [*named, named[0]]},
                    "Parameter names in named_parameters must be unique. Found duplicates: 0.weight",
                ),
                (
                    {"named_parameters": named[1:]},
                    "named_parameters was specified, but one or more model parameters were not named. Python object "
                    f"ids: {id(weight)}. The first is of shape {tuple(weight.shape)}.",
                ),
                ({"groups": -1}, "groups should be a non-negative integer or a list of list of torch.Tensor."),
                ({"groups": [weight]}, "groups should be a non-negative integer or a list of list of torch.Tensor."),
                ({"groups": [["a"]]}, "groups must consist of torch.Tensor."),
                ({"groups": [[weight], [weight]]}, "A parameter can only appear once in groups."),
                (
                    {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
                    "gradient_predivide_factor not supported with op != Average",
                ),
                ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
                (
                    {"gradient_predivide_factor": 2.0, "op": hvd.Adasum},
                    "gradient_predivide_factor not supported with op != Average",
                ),
            ]
            for options, message in cases:
                with pytest.raises(InvalidRequestError) as error:
                    hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), **options)
                assert str(error.value) == message
            with pytest.warns(DeprecationWarning, match=r"num_groups"):
                hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), num_groups=1)

        run_ranks(1, body)


class TestBuckets:
    """Gradients are submitted some bytes at a time; each is still matched by its own name."""

    @staticmethod
    def recorded(monkeypatch: pytest.MonkeyPatch, first: int, others: int) -> dict[int, list[list[str]]]:
        """By rank of this process the names of its submissions, with buckets of so many bytes."""
        submitted: dict[int, list[list[str]]] = {}
        prepare = operations.prepare_allreduce

        def record(session: Session, adapter: Any, call: operations.Allreduce, *rest: Any) -> Any:
            submitted.setdefault(session.require_topology().rank, []).append(list(call.name or ()))
            return prepare(session, adapter, call, *rest)

        monkeypatch.setattr(operations, "prepare_allreduce", record)
        monkeypatch.setattr(averaging, "FIRST_BUCKET_NBYTES", first)
        monkeypatch.setattr(averaging, "BUCKET_NBYTES", others)
        return submitted

    # Gradients arrive as 2.weight (64 bytes), 2.bias (4), 0.weight (384), 0.bias (64), in an order that is Torch's.
    @pytest.mark.parametrize(("first", "others", "per_step"), [(1, 1, 4), (1, 1000, 2), (1000, 1, 1)])
    def test_how_they_are_cut_changes_no_bit(
        self, first: int, others: int, per_step: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = together(2, "sgd")
        submitted = self.recorded(monkeypatch, first, others)
        for run, reference in zip(together(2, "sgd"), expected, strict=True):
            assert all(map(torch.equal, run, reference))
        assert submitted
        for buckets in submitted.values():
            assert len(buckets) == STEPS * per_step
            steps = [buckets[k : k + per_step] for k in range(0, len(buckets), per_step)]
            every = [sorted(itertools.chain(*of_step)) for of_step in steps]
            assert every == [["0.bias", "0.weight", "2.bias", "2.weight"]] * STEPS

    def test_gradients_may_be_parts_of_one_buffer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which share a version, so that autograd raises it after the first was submitted."""
        self.recorded(monkeypatch, 1, 1)

        def body(session: Session) -> list[Any]:
            model = make_model()
            parameters = list(model.parameters())
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](parameters), model.named_parameters())
            sizes = [p.numel() for p in parameters]
            for p, each in zip(parameters, torch.zeros(sum(sizes)).split(sizes), strict=True):
                p.grad = each.view_as(p).detach() if p.dim() == 1 else each.view_as(p)
            for x, y in batches():
                optimizer.zero_grad(set_to_none=False)
                loss_of(model, part(x, hvd.rank(), 2), part(y, hvd.rank(), 2)).backward()
                optimizer.step()
            return [p.detach().clone() for p in parameters]

        results = run_ranks(2, body)
        assert_equal_ranks(results)
        torch.testing.assert_close(results[0], alone("sgd"), rtol=1e-4, atol=1e-5)

    def test_ranks_may_fill_them_with_other_parameters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A parameter that has no gradient on one rank is late there, and in another bucket."""
        self.recorded(monkeypatch, 1, 300)

        def body(session: Session) -> list[float]:
            p = [torch.nn.Parameter(torch.zeros(20)) for _ in range(6)]
            named = [(f"p{k}", each) for k, each in enumerate(p)]
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(p, lr=1.0), named)
            used = p if hvd.rank() == 0 else p[1::2]
            sum(each.sum() for each in used).backward()
            with pytest.raises(AssertionError, match="zero_grad"):
                optimizer.zero_grad()
            optimizer.step()
            return [each[0].item() for each in p]

        assert run_ranks(2, body) == [[-0.5, -1.0, -0.5, -1.0, -0.5, -1.0]] * 2


class TestSharedMemory:
    """Autograd may give two parameters one gradient memory, or go on to compute with that of a gradient."""

    @staticmethod
    def averages(size: int, options: dict[str, Any], scale: float = 1.0) -> list[list[list[float]]]:
        """By rank, the values in the gradients of two parameters which share memory, and of one before them."""

        def body(session: Session) -> list[list[float]]:
            weight, *shared = (torch.nn.Parameter(torch.ones(300, 300)) for _ in range(3))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, *shared], lr=1.0), **options)
            used = torch.stack([weight * 2, *shared]).sum(0)
            (used * (hvd.rank() + 1) * scale).sum().backward()
            owners = {p.grad.untyped_storage().data_ptr() for p in shared}
            assert len(owners) == 1, "autograd gives them memory of their own now"
            optimizer.step()
            return [p.grad.unique().tolist() for p in (weight, *shared)]

        return run_ranks(size, body, Settings(fusion_threshold=0))

    @pytest.mark.parametrize("size", [2, 3])
    @pytest.mark.parametrize("groups", [None, 1])
    @pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
    def test_each_gradient_is_averaged_once(self, size: int, groups: int | None, op: int) -> None:
        expected = sum(range(1, size + 1)) / (size if op == hvd.Average else 1)
        found = self.averages(size, {"op": op, "groups": groups})
        assert found == [[[2 * expected], [expected], [expected]]] * size

    def test_each_is_averaged_once_after_float16_has_overflowed(self) -> None:
        found = self.averages(2, {"compression": hvd.Compression.fp16, "op": hvd.Sum}, scale=1e5)
        assert found == [[[6e5], [3e5], [3e5]]] * 2

    def test_autograd_goes_on_with_what_it_has_computed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(averaging, "FIRST_BUCKET_NBYTES", 1)

        def body(session: Session) -> list[float]:
            first, last = (torch.nn.Parameter(torch.ones(300, 300)) for _ in range(2))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, last], lr=1.0), op=hvd.Sum)
            hidden = (first * 2).view(-1)
            hidden.register_hook(lambda grad: hvd.barrier())  # by then the exchange before it is over
            (hidden + last.view(-1)).mul(hvd.rank() + 1).sum().backward()
            optimizer.step()
            return [p.grad.unique().tolist() for p in (first, last)]

        assert run_ranks(2, body, Settings(fusion_threshold=0)) == [[[6.0], [3.0]]] * 2

    def test_a_gradient_of_its_own_is_averaged_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if not hasattr(torch._C, "_storage_Use_Count"):
            pytest.skip(reason="this Torch does not count the owners of memory: all are copied")
        addresses: dict[int, set[int]] = {}
        prepare = operations.prepare_allreduce

        def record(session: Session, adapter: Any, call: operations.Allreduce, *rest: Any) -> Any:
            found = addresses.setdefault(session.require_topology().rank, set())
            found.update(tensor.data_ptr() for tensor in call.tensors)
            return prepare(session, adapter, call, *rest)

        monkeypatch.setattr(operations, "prepare_allreduce", record)

        def body(session: Session) -> bool:
            model = make_model()
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
            loss_of(model, *batches()[0]).backward()
            optimizer.step()
            return addresses[hvd.rank()] == {p.grad.data_ptr() for p in model.parameters()}

        assert run_ranks(2, body) == [True, True]
