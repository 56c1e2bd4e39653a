"""SyncBatchNorm is BatchNorm of the ranks' batches put together: forward, backward, running statistics."""

from __future__ import annotations

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
