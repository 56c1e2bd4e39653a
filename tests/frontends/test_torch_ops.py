"""Torch collectives: dtypes, in place, gradients, handles, broadcasts of parameters and optimizer state."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ocomm_torch as hvd  # noqa: E402
from ocomm.errors import InvalidRequestError, MismatchError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
]  # fmt: skip
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


class TestCollectives:
    @SIZES
    def test_every_dtype(self, size: int) -> None:
        def body(session: Session) -> None:
            me = hvd.rank()
            for dtype in DTYPES:
                x = torch.arange(6).reshape(2, 3).to(dtype) + me
                total = sum((torch.arange(6).reshape(2, 3) + rank for rank in range(size)), torch.zeros(2, 3).long())
                assert torch.equal(hvd.allreduce(x, op=hvd.Sum), total.to(dtype))
                mean = total.div(size, rounding_mode="trunc")
                if dtype.is_floating_point:
                    mean = total.float() * (1 / size)
                assert torch.equal(hvd.allreduce(x), mean.to(dtype))
                assert torch.equal(hvd.allgather(x), torch.cat([x - me + rank for rank in range(size)]))
                assert torch.equal(hvd.broadcast(x, size - 1), x - me + size - 1)
                assert hvd.allreduce_(x, op=hvd.Max) is x and torch.equal(x[0, 0], torch.tensor(size - 1).to(dtype))
            truth = torch.tensor([me == 0, True, False])
            assert hvd.allreduce(truth, op=hvd.Min).tolist() == [size == 1, True, False]
            assert hvd.allgather(truth).dtype == torch.bool

        run_ranks(size, body)

    def test_any_layout(self) -> None:
        def body(session: Session) -> None:
            base = torch.zeros(4, 6)
            base[:, ::2] = 1.0
            hvd.allreduce_(base[:, ::2], op=hvd.Sum)
            assert base.sum() == 24 and base[:, 1::2].sum() == 0
            image = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
            assert torch.equal(hvd.allreduce(image), image)
            assert torch.equal(hvd.broadcast(torch.ones(1).expand(3) * (1 + hvd.rank()), 1), torch.full((3,), 2.0))
            assert hvd.allreduce(torch.tensor(3.0), op=hvd.Sum).item() == 6.0
            assert hvd.allreduce(torch.zeros(0, 2)).shape == (0, 2)

        run_ranks(2, body)

    @pytest.mark.parametrize(
        "change",
        [
            lambda t: hvd.allreduce_(t),
            lambda t: hvd.grouped_allreduce_([t])[0],
            lambda t: hvd.broadcast_(t, 0),
            lambda t: hvd.synchronize(hvd.allreduce_async_(t)),
        ],
        ids=["allreduce_", "grouped_allreduce_", "broadcast_", "allreduce_async_"],
    )
    def test_autograd_notices_that_a_tensor_which_it_has_saved_was_changed(self, change: Any) -> None:
        def body(session: Session) -> None:
            saved = torch.ones(3, requires_grad=True).exp()
            assert change(saved) is saved
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                saved.sum().backward()
            with torch.inference_mode():
                assert change(torch.full((2,), float(hvd.rank()))) is not None

        run_ranks(2, body)

    def test_groups_and_handles(self) -> None:
        def body(session: Session) -> None:
            xs = [torch.ones(3), torch.full((2,), 2, dtype=torch.int32)]
            handle = hvd.grouped_allreduce_async(xs, op=hvd.Sum, name="g")
            assert isinstance(handle, int)
            out = hvd.synchronize(handle)
            assert [o.tolist() for o in out] == [[2, 2, 2], [4, 4]] and hvd.synchronize(handle) is None
            hvd.grouped_allreduce_(xs, op=hvd.Sum)
            assert xs[0].tolist() == [2, 2, 2]
            mine = torch.full((hvd.rank() + 1, 2), float(hvd.rank()))
            assert [g.shape[0] for g in hvd.grouped_allgather([mine, mine])] == [3, 3]
            assert [p.tolist() for p in hvd.grouped_reducescatter([torch.ones(4)] * 2, op=hvd.Sum)] == [[2, 2]] * 2
            handle = hvd.broadcast_async_(mine[:1], 1)
            while not hvd.poll(handle):
                pass
            assert hvd.synchronize(handle).tolist() == [[1.0, 1.0]]
            hvd.barrier()

        run_ranks(2, body)

    def test_the_default_device_is_no_matter(self) -> None:
        def body(session: Session) -> None:
            mine = torch.full((4,), hvd.rank() + 1.0)
            rows = torch.tensor([2, 2])
            sparse = torch.eye(3).to_sparse() * (hvd.rank() + 1.0)
            model = torch.nn.Linear(2, 1)
            with torch.device("meta"):
                assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [3.0] * 4
                assert hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16).tolist() == [3.0] * 4
                assert hvd.allreduce(mine, name="bits", compression=hvd.Compression.onebit).tolist() == [1.5] * 4
                assert hvd.grouped_allreduce([mine], op=hvd.Sum)[0].tolist() == [3.0] * 4
                assert hvd.allgather(mine).tolist() == [1.0] * 4 + [2.0] * 4
                assert hvd.broadcast(mine, 1).tolist() == [2.0] * 4
                received, counts = hvd.alltoall(mine, splits=rows)
                assert received.tolist() == [1.0, 1.0, 2.0, 2.0] and counts.tolist() == [2, 2]
                assert hvd.synchronize(hvd.alltoall_async(mine, splits=rows))[1].tolist() == [2, 2]
                assert hvd.reducescatter(mine, op=hvd.Sum).tolist() == [3.0, 3.0]
                fp16 = hvd.Compression.fp16
                assert hvd.reducescatter(mine, op=hvd.Sum, compression=fp16).tolist() == [3.0, 3.0]
                assert hvd.sparse_allreduce_async(sparse, "s", hvd.Sum)().to_dense().sum().item() == 9.0
                assert hvd.broadcast_object({"a": mine}, 1)["a"].tolist() == [2.0] * 4
                hvd.broadcast_parameters(model.state_dict(), 0)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (hvd.rank() + 1), momentum=0.5)
                if hvd.rank() == 0:
                    for p in model.parameters():
                        p.grad = torch.ones_like(p)
                    optimizer.step()
                hvd.broadcast_optimizer_state(optimizer, 0)
                state = optimizer.state_dict()
                assert state["state"][0]["momentum_buffer"].tolist() == [[1.0, 1.0]]
                assert state["param_groups"][0]["lr"] == 0.1

        run_ranks(2, body)

    def test_alltoall_and_reducescatter(self) -> None:
        def body(session: Session) -> None:
            me = hvd.rank()
            received, counts = hvd.alltoall(torch.full((3,), float(me)), splits=torch.tensor([1, 2]))
            assert received.tolist() == [[0, 1], [0, 0, 1, 1]][me]
            assert counts.dtype == torch.int32 and counts.tolist() == [1 + me] * 2
            assert hvd.alltoall(torch.tensor([10, 20]) + me).tolist() == [[10, 11], [20, 21]][me]
            assert hvd.reducescatter(torch.arange(3), op=hvd.Sum).tolist() == [[0, 2], [4]][me]

        run_ranks(2, body)

    def test_compression_reduces_in_the_smaller_type(self) -> None:
        def body(session: Session) -> None:
            x = torch.tensor([1.0, 1e-3, 3.0]) * (1 + hvd.rank())
            for compression, wire in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
                out = hvd.allreduce(x, op=hvd.Sum, compression=compression)
                total = x.div(1 + hvd.rank()).mul(3)
                assert out.dtype == torch.float32
                torch.testing.assert_close(out, total, rtol=2 * torch.finfo(wire).eps, atol=0)
            whole = torch.tensor([3])
            assert hvd.allreduce(whole, op=hvd.Sum, compression=hvd.Compression.fp16).tolist() == [6]

        run_ranks(2, body)

    def test_sparse_tensors_are_summed_by_index(self) -> None:
        def body(session: Session) -> None:
            me = hvd.rank()
            x = torch.sparse_coo_tensor([[me, 2]], torch.ones(2, 3), (4, 3), check_invariants=True)
            dense = hvd.sparse_allreduce_async(x, name="s", op=hvd.Sum)().to_dense()
            assert dense[:, 0].tolist() == [1, 1, 2, 0]
            assert hvd.sparse_allreduce_async(x)().to_dense()[2].tolist() == [1, 1, 1]

        run_ranks(2, body)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_what_cannot_be_sent_is_named(self) -> None:
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

        def body(session: Session) -> None:
            with pytest.raises(InvalidRequestError) as error:
                hvd.allreduce(torch.ones(1, dtype=torch.complex64), name="x")
            assert str(error.value) == (
                "tensor 'allreduce.x': dtype torch.complex64 is not supported; use one of uint8, int8, int16, int32, "
                "int64, bool, float16, bfloat16, float32, float64."
            )
            with pytest.raises(InvalidRequestError) as error:
                hvd.allreduce(torch.eye(2).to_sparse(), name="x")
            assert str(error.value) == (
                "tensor 'allreduce.x': layout torch.sparse_coo is not supported; call to_dense() or "
                "sparse_allreduce_async()."
            )
            with pytest.raises(InvalidRequestError) as error:
                hvd.allreduce(nested, name="x")
            said = "tensor 'allreduce.x': it is a nested tensor; send the parts that unbind() returns."
            assert str(error.value) == said

        run_ranks(1, body)

    def test_a_mismatch_reaches_every_rank(self) -> None:
        def body(session: Session) -> None:
            handle = hvd.allreduce_async(torch.ones(2 + hvd.rank()), name="w")
            with pytest.raises(hvd.HorovodInternalError) as error:
                hvd.synchronize(handle)
            assert isinstance(error.value, MismatchError)
            assert str(error.value) == (
                "tensor 'allreduce.w': mismatched shape: rank 0 submitted shape (2,) float32, rank 1 submitted shape "
                "(3,) float32."
            )

        run_ranks(2, body)


class TestGradients:
    """Each rank's loss is its own; gradients follow Horovod's conventions (Horovod: test/parallel/test_torch.py)."""

    @SIZES
    def test_allreduce(self, size: int) -> None:
        def body(session: Session) -> None:
            for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
                x = torch.ones(3, requires_grad=True)
                hvd.allreduce(x, op=op).backward(torch.full((3,), 2.0))
                assert x.grad.tolist() == [2.0 * factor] * 3
            xs = [torch.ones(2, requires_grad=True) for _ in range(2)]
            a, b = hvd.grouped_allreduce(xs, op=hvd.Sum)
            (a + 2 * b).sum().backward()
            assert [x.grad.tolist() for x in xs] == [[size] * 2, [2 * size] * 2]

        run_ranks(size, body)

    @SIZES
    def test_allgather(self, size: int) -> None:
        def body(session: Session) -> None:
            me = hvd.rank()
            weight = torch.cat([torch.full((rank + 1, 2), float(rank)) for rank in range(size)])
            x = torch.ones(me + 1, 2, requires_grad=True)
            (hvd.allgather(x) * weight).sum().backward()
            assert torch.equal(x.grad, torch.full((me + 1, 2), float(me)))
            y = torch.ones(me + 1, 2, requires_grad=True)
            (hvd.grouped_allgather([y, y])[1] * weight).sum().backward()
            assert torch.equal(y.grad, torch.full((me + 1, 2), float(me)))

        run_ranks(size, body)

    @SIZES
    def test_broadcast(self, size: int) -> None:
        def body(session: Session) -> None:
            root = size - 1
            x = torch.ones(2, requires_grad=True)
            hvd.broadcast(x, root).sum().backward()
            assert x.grad.tolist() == [float(hvd.rank() == root)] * 2

        run_ranks(size, body)

    @SIZES
    def test_alltoall(self, size: int) -> None:
        def body(session: Session) -> None:
            me = hvd.rank()
            splits = [rank + 1 for rank in range(size)]
            x = torch.ones(sum(splits) + 1, requires_grad=True)
            received, _ = hvd.alltoall(x, splits=splits)
            (received * (me + 1)).sum().backward()
            wanted = [float(rank + 1) for rank in range(size) for _ in range(rank + 1)]
            assert x.grad.tolist() == [*wanted, 0.0]

        run_ranks(size, body)

    @SIZES
    def test_reducescatter(self, size: int) -> None:
        def body(session: Session) -> None:
            for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
                x = torch.ones(size + 1, requires_grad=True)
                hvd.reducescatter(x, op=op).sum().backward()
                assert x.grad.tolist() == [factor] * (size + 1)

        run_ranks(size, body)


def joined_alltoall(xs: list[Any]) -> list[Any]:
    """The rows that each rank receives if rank r sends r + 1 rows to rank 0, one to rank 1, and others to none."""
    return [torch.cat([xs[0][:1], xs[1][:2]]), torch.cat([xs[0][1:2], xs[1][2:3]])]


#: The call; the results of both ranks as a function of their tensors; by what Horovod's gradient is larger than that
#: of the sum of all ranks' losses, in the first and in the second backward pass.
LINEAR = {
    "allreduce": (hvd.allreduce, lambda xs: [sum(xs) / 2] * 2, 1.0, 1.0),
    "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum), lambda xs: [sum(xs)] * 2, 1.0, 1.0),
    "grouped_allreduce": (lambda x: hvd.grouped_allreduce([x])[0], lambda xs: [sum(xs) / 2] * 2, 1.0, 1.0),
    "allgather": (hvd.allgather, lambda xs: [torch.cat(xs)] * 2, 0.5, 0.5),
    "grouped_allgather": (lambda x: hvd.grouped_allgather([x])[0], lambda xs: [torch.cat(xs)] * 2, 0.5, 0.5),
    "broadcast": (lambda x: hvd.broadcast(x, 1), lambda xs: [xs[1]] * 2, 0.5, 0.5),
    "alltoall": (lambda x: hvd.alltoall(x, [hvd.rank() + 1, 1])[0], joined_alltoall, 1.0, 1.0),
    "reducescatter": (hvd.reducescatter, lambda xs: list((sum(xs) / 2).split(2)), 2.0, 1.0),
    "sum, scattered": (lambda x: hvd.reducescatter(x, op=hvd.Sum), lambda xs: list(sum(xs).split(2)), 2.0, 1.0),
}


@pytest.mark.parametrize("kind", LINEAR)
def test_second_derivatives_are_those_of_all_ranks_together(kind: str) -> None:
    """With y = A u(x), losses L(y) and a gradient g of them, the gradient of w g holds all second derivatives."""
    call, joined, first, second = LINEAR[kind]

    def body(session: Session) -> None:
        me = hvd.rank()
        xs = torch.linspace(-1, 2, 8, dtype=torch.float64)
        weights = torch.linspace(1, -2, 8, dtype=torch.float64)
        matrix = torch.autograd.functional.jacobian(lambda x: torch.cat(joined(list(x.split(4)))), xs)
        y = matrix @ xs.square()
        backward = first * matrix.T @ (3 * y.square())
        through = first * matrix.T @ (6 * y * (second * matrix @ (2 * xs * weights)))
        expected = 2 * weights * backward + 2 * xs * through

        x = xs.split(4)[me].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(call(x.square()).pow(3).sum(), x, create_graph=True)
        torch.testing.assert_close(gradient.detach(), (2 * xs * backward).split(4)[me])
        (gradient * weights.split(4)[me]).sum().backward()
        torch.testing.assert_close(x.grad, expected.split(4)[me])

    run_ranks(2, body)


def test_the_gradient_of_a_broadcast_is_zero_elsewhere_even_if_that_of_the_root_is_not_finite() -> None:
    def body(session: Session) -> None:
        x = torch.ones(2, requires_grad=True)
        hvd.broadcast(x, 0).backward(torch.full((2,), float("nan")))
        assert x.grad.isnan().all() if hvd.rank() == 0 else x.grad.tolist() == [0.0, 0.0]

    run_ranks(2, body)


def state_of(optimizer: Any) -> list[Any]:
    return [
        value.tolist() if isinstance(value, torch.Tensor) else value
        for state in optimizer.state_dict()["state"].values()
        for value in state.values()
    ]


class TestStartingAlike:
    @pytest.mark.parametrize("form", ["state_dict", "list", "pairs", "generator"])
    def test_parameters(self, form: str) -> None:
        def body(session: Session) -> None:
            torch.manual_seed(hvd.rank())
            model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)
            forms: dict[str, Any] = {
                "state_dict": model.state_dict(),
                "list": list(model.parameters()),
                "pairs": list(model.named_parameters()),
                "generator": model.named_parameters(),
            }
            hvd.broadcast_parameters(forms[form], root_rank=1)
            mine = [p.tolist() for p in model.parameters()]
            first, second = hvd.allgather_object(mine)
            assert first == second

        run_ranks(2, body)

    def test_parameters_of_another_kind_are_refused(self) -> None:
        for wrong in (3, torch.ones(2), {"a": 1}):
            with pytest.raises(InvalidRequestError, match=r"^invalid params"):
                hvd.broadcast_parameters(wrong, 0)
        for model in (torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))):
            with pytest.raises(InvalidRequestError, match=r"^invalid params: .* a module; pass its state_dict\(\)"):
                hvd.broadcast_parameters(model, 0)

    @pytest.mark.parametrize("kind", ["adam", "sgd", "fresh"])
    def test_optimizer_state(self, kind: str) -> None:
        def body(session: Session) -> None:
            me = hvd.rank()
            model = torch.nn.Linear(3, 2)
            if kind == "sgd":
                optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1 * (me + 1), momentum=0.5)
            else:
                optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (me + 1), betas=(0.5 + 0.1 * me, 0.9))
            if kind != "fresh" and me == 0:
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            state = hvd.allgather_object((state_of(optimizer), optimizer.param_groups[0]["lr"]))
            assert state[0] == state[1] and (kind == "fresh" or state[0][0])
            assert state[0][1] == 0.1
            if kind != "sgd":
                assert optimizer.param_groups[0]["betas"] == (0.5, 0.9)
            model.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

        run_ranks(2, body)

    def test_a_state_that_is_wider_than_its_parameters_stays_so(self) -> None:
        def body(session: Session) -> None:
            model = torch.nn.Linear(3, 2).bfloat16()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for position, p in enumerate(model.parameters()):  # as transformers' Adafactor has it
                optimizer.state[p] = {"wide": torch.full(p.shape, 1.001 + hvd.rank() + position), "step": 1}
            hvd.broadcast_optimizer_state(optimizer, root_rank=1)
            for position, p in enumerate(model.parameters()):
                wide = optimizer.state[p]["wide"]
                assert wide.dtype is torch.float32 and torch.equal(wide, torch.full(p.shape, 2.001 + position))

        run_ranks(2, body)

    def test_lbfgs_is_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match=r"^cannot broadcast torch.optim.LBFGS state$"):
            hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.ones(1, requires_grad=True)]), 0)

    def test_objects(self) -> None:
        def body(session: Session) -> None:
            assert hvd.broadcast_object(hvd.rank(), root_rank=1) == 1
            assert hvd.allgather_object(hvd.rank()) == [0, 1]

        run_ranks(2, body)


class TestOneBit:
    @SIZES
    def test_an_allreduce_of_one_bit_keeps_what_it_leaves_out(self, size: int) -> None:
        def body(session: Session) -> list:
            generator = torch.Generator().manual_seed(hvd.rank())
            given = torch.randn(3, 500, generator=generator)
            mean = hvd.allreduce(given)
            total, results = torch.zeros(3, 500), []
            for _ in range(200):
                results.append(hvd.allreduce(given, name="x", compression=hvd.Compression.onebit))
                total += results[-1]
            assert len(results[0].abs().unique()) <= 3  # scale times sign, three rows in one block
            assert (results[0] - mean).norm() > 0.5 * mean.norm() > 5 * (total / 200 - mean).norm()
            return results[-1].tolist()

        first, *rest = run_ranks(size, body)
        assert all(other == first for other in rest)

    def test_what_has_no_one_bit_form_is_refused(self) -> None:
        def body(session: Session) -> None:
            onebit = hvd.Compression.onebit
            for options in ({}, {"name": "x", "op": hvd.Sum}, {"name": "x", "prescale_factor": 2.0}):
                with pytest.raises(InvalidRequestError, match=r"with Compression\.onebit needs a name"):
                    hvd.allreduce(torch.ones(2), compression=onebit, **options)
            with pytest.raises(InvalidRequestError, match=r"got torch\.float16 and op=Average"):
                hvd.allreduce(torch.ones(2).half(), name="x", compression=onebit)
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
            with pytest.raises(InvalidRequestError, match="wrap the optimizer in DistributedOneBitAdam"):
                hvd.DistributedOptimizer(optimizer, compression=onebit)

        run_ranks(1, body)


def test_uneven_data_with_join_as_horovods_scripts_do_it() -> None:
    def body(session: Session) -> list:
        torch_generator = torch.Generator().manual_seed(1)
        model = torch.nn.Linear(3, 1)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=torch_generator))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        for epoch in range(2):
            for batch in range(2 + 3 * hvd.rank()):
                optimizer.zero_grad()
                model(torch.full((4, 3), 0.1 * (batch + epoch))).sum().backward()
                optimizer.step()
            last = hvd.join()
            assert last == hvd.size() - 1
            hvd.broadcast_parameters(model.named_parameters(), root_rank=last)
            # A metric: all are here, and an allgather may come from ranks with nothing to say.
            assert hvd.allgather(torch.full((hvd.rank(),), 1.0)).sum() == sum(range(hvd.size()))
        return [p.tolist() for p in model.parameters()]

    first, *rest = run_ranks(3, body)
    assert all(other == first for other in rest)
