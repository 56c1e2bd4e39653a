"""SyncBatchNorm is BatchNorm of the ranks' batches put together: forward, backward, running statistics."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ocomm_torch as hvd  # noqa: E402
from ocomm.errors import InvalidRequestError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from tests.tiers import few  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

SHAPES = {"2d": (3,), "3d": (3, 5), "4d": (3, 4, 2), "5d": (3, 2, 2, 2)}
PLAIN = {"2d": "BatchNorm1d", "3d": "BatchNorm1d", "4d": "BatchNorm2d", "5d": "BatchNorm3d"}


def batches(size: int, shape: tuple[int, ...], equal: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    rows = [4 if equal or size == 1 else 2 * rank for rank in range(size)]  # rank 0 may have none
    return [torch.randn(n, *shape, generator=generator, dtype=torch.float64) * 3 + 5 for n in rows]


@pytest.mark.parametrize("size", few([1, 2, 4], [2]))
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("dims", sorted(SHAPES))
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}])
def test_it_is_batch_norm_of_all_batches(size: int, equal: bool, dims: str, options: dict) -> None:
    def body(session: Session) -> None:
        me = hvd.rank()
        parts = batches(size, SHAPES[dims], equal)
        plain = getattr(torch.nn, PLAIN[dims])(3, **options).double()
        ours = hvd.SyncBatchNorm(3, **options).double()
        if plain.affine:
            for layer in (plain, ours):
                with torch.no_grad():
                    layer.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
                    layer.bias.copy_(torch.tensor([1.0, 0.0, 3.0]))
        for _ in range(2):
            whole = torch.cat(parts).requires_grad_()
            mine = parts[me].clone().requires_grad_()
            factors = torch.linspace(-1, 2, whole.numel(), dtype=torch.float64).reshape(whole.shape)
            first = sum(len(part) for part in parts[:me])
            rows = slice(first, first + len(parts[me]))
            expected = plain(whole)
            (expected * factors).sum().backward()
            got = ours(mine)
            (got * factors[rows]).sum().backward()
            torch.testing.assert_close(got, expected[rows])
            torch.testing.assert_close(mine.grad, whole.grad[rows])
        if plain.affine:
            torch.testing.assert_close(hvd.allreduce(ours.weight.grad, op=hvd.Sum), plain.weight.grad)
            torch.testing.assert_close(hvd.allreduce(ours.bias.grad, op=hvd.Sum), plain.bias.grad)
        if plain.track_running_stats:
            torch.testing.assert_close(ours.state_dict(), plain.state_dict())
            plain.load_state_dict(ours.state_dict())
            plain.eval()
            ours.eval()
            torch.testing.assert_close(ours(torch.cat(parts)), plain(torch.cat(parts)))

    run_ranks(size, body)


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_second_derivatives_are_those_of_the_whole_batch(equal: bool, affine: bool) -> None:
    def derivatives(layer: torch.nn.Module, given: torch.Tensor) -> list[torch.Tensor]:
        given = given.clone().requires_grad_()
        first = torch.autograd.grad(
            (layer(given) * torch.linspace(-1, 2, 15, dtype=given.dtype).reshape(3, 5)).tanh().square().sum(),
            [given, *layer.parameters()],
            create_graph=True,
        )
        # Gradients of weight and bias are each rank's own, which only add up.
        (first[0].square().sum() + sum(((each * 3).sum() for each in first[1:]), torch.zeros(()))).backward()
        return [given.grad, *(each.grad for each in layer.parameters())]

    def body(session: Session) -> None:
        me = hvd.rank()
        parts = batches(2, (3, 5), equal)
        plain = torch.nn.BatchNorm1d(3, affine=affine).double()
        ours = hvd.SyncBatchNorm(3, affine=affine).double()
        if affine:
            for layer in (plain, ours):
                with torch.no_grad():
                    layer.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
        expected, *sums = derivatives(plain, torch.cat(parts))
        got, *own = derivatives(ours, parts[me])
        torch.testing.assert_close(got, expected.split([len(part) for part in parts])[me])
        for each, whole in zip(own, sums, strict=True):
            torch.testing.assert_close(hvd.allreduce(each, op=hvd.Sum), whole)

    run_ranks(2, body)


def test_a_model_is_converted_as_torchs_own_class_does_it() -> None:
    def body(session: Session) -> None:
        model = torch.nn.Sequential(
            torch.nn.Conv1d(2, 3, 1),
            torch.nn.BatchNorm1d(3, eps=0.1, momentum=None),
            torch.nn.Sequential(torch.nn.BatchNorm2d(4, affine=False), torch.nn.BatchNorm3d(5).eval()),
            torch.nn.BatchNorm1d(6, track_running_stats=False),
        )
        model[1].bias = None
        model[1].qconfig = "a qconfig"
        before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        twin = torch.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
        converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        assert converted is model
        after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
        for ours, torchs in zip(model.modules(), twin.modules(), strict=True):
            assert isinstance(ours, hvd.SyncBatchNorm) == isinstance(torchs, torch.nn.SyncBatchNorm)
            assert ours.extra_repr() == torchs.extra_repr() and ours.training == torchs.training
        assert model[1].qconfig == "a qconfig" and not hasattr(model[3], "qconfig")
        alone = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(3), process_group=None)
        assert isinstance(alone, hvd.SyncBatchNorm) and alone.process_set is hvd.global_process_set
        plain = torch.nn.BatchNorm1d(3, eps=0.1, momentum=None)
        plain.bias = None
        parts = [torch.randn(2, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
        torch.testing.assert_close(model[1](parts[hvd.rank()]), plain(torch.cat(parts)).split(2)[hvd.rank()])
        model[1](parts[hvd.rank()]).square().sum().backward()
        assert model[1].weight.grad is not None

    run_ranks(2, body)


def test_a_conversion_takes_a_process_set_and_no_group_of_torchs_of_some_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = {"all": [0, 1], "one": [1]}
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", groups.__getitem__)

    def body(session: Session) -> None:
        def converted(group: Any) -> Any:
            return hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(3), group)

        assert converted("all").process_set is hvd.global_process_set
        one = hvd.add_process_set([1])
        assert converted(one).process_set is one
        with pytest.raises(InvalidRequestError) as error:
            converted("one")
        assert str(error.value) == (
            "convert_sync_batchnorm: the process group has ranks [1], not all 2 of the job. Pass "
            "process_group=hvd.add_process_set([1]), which all ranks call."
        )

    run_ranks(2, body)


def test_evaluation_is_this_ranks_own() -> None:
    def body(session: Session) -> None:
        for options in ({}, {"track_running_stats": False}):
            layer = hvd.SyncBatchNorm(2, **options).eval()
            given = torch.arange(8.0).reshape(4, 2)
            if hvd.rank() == 0:
                assert torch.equal(layer(given), torch.nn.BatchNorm1d(2, **options).eval()(given))
        hvd.barrier()

    run_ranks(2, body)


def test_half_precision_is_computed_in_float32_and_all_ranks_hold_the_same_statistics() -> None:
    def body(session: Session) -> list:
        layer = hvd.SyncBatchNorm(2)
        for dtype in (torch.float16, torch.bfloat16):
            given = (torch.arange(8.0).reshape(4, 2) + hvd.rank()).to(dtype).requires_grad_()
            out = layer(given)
            out.sum().backward()
            assert out.dtype == given.grad.dtype == dtype
        return [layer.running_mean.tolist(), layer.running_var.tolist()]

    first, *rest = run_ranks(2, body)
    assert all(other == first for other in rest)


def test_what_cannot_be_normalized_is_refused() -> None:
    def body(session: Session) -> None:
        layer = hvd.SyncBatchNorm(2)
        with pytest.raises(InvalidRequestError, match="at least 2 dimensions, got 1"):
            layer(torch.ones(2))
        with pytest.raises(InvalidRequestError) as error:
            layer(torch.ones(1 - hvd.rank(), 2))
        assert str(error.value) == (
            "SyncBatchNorm: the batches of all ranks have 1 values per channel, at least 2 are needed."
        )

    run_ranks(2, body)
