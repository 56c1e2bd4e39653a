"""Every public call of Torch's frontend over Horovod's dtypes, dimensions and reductions, against exact results; and
what a Horovod script catches where the ranks disagree or one of them is wrong.

Numbers are small and factors are powers of two, so that all results are exact in every dtype.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ocomm_torch as hvd  # noqa: E402
from ocomm.session import Session  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.float32, torch.float64]
DTYPES = [*INTEGERS, *FLOATS]
OPS = [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product]
#: (prescale_factor, postscale_factor)
FACTORS = [(1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (2.0, 0.25), (0.5, 2.0)]
DIMENSIONS = [1, 2, 3]
#: Of the first dimension: what ranks send each other whole, and what is cut into a slice for each.
ROWS = [5, 1100]
SLICE = pytest.mark.parametrize("size", [2])
FULL = pytest.mark.parametrize("size", [2, 4])


def values(dtype: Any, rank: int, rows: int, dimensions: int) -> Any:
    """What a rank contributes: whole numbers from -3 to 3, or from 0."""
    generator = torch.Generator().manual_seed(rows * 10 + rank)
    shape = (rows, *[3] * (dimensions - 1))
    return torch.randint(0 if dtype == torch.uint8 else -3, 4, shape, generator=generator).to(dtype)


def scaled(tensor: Any, factor: float, dtype: Any) -> Any:
    """``tensor``, of float64, times ``factor``: integers are rounded towards zero."""
    product = tensor * factor
    if dtype == torch.uint8:
        product = product.clamp(min=0)
    return product if dtype.is_floating_point else product.trunc()


def reduced(rows: Sequence[Any], op: int, prescale: float = 1.0, postscale: float = 1.0) -> Any:
    """What Horovod's documents say of a reduction, of these tensors in rank order."""
    dtype = rows[0].dtype
    stack = torch.stack([scaled(row.double(), prescale, dtype) for row in rows])
    if op == hvd.Average:
        return scaled(stack.sum(0), postscale / len(rows), dtype).to(dtype)
    plain = {hvd.Sum: stack.sum, hvd.Min: stack.amin, hvd.Max: stack.amax, hvd.Product: stack.prod}[op](0)
    if not dtype.is_floating_point:
        plain = plain.long().to(dtype).double()  # wraps, as in Horovod
    return scaled(plain, postscale, dtype).to(dtype)


def adasum_of(rows: Sequence[Any]) -> Any:
    """The paper's formula, in float64."""
    terms = [row.double() for row in rows]
    while len(terms) > 1:
        terms = [
            (1 - (a * b).sum() / (2 * (a * a).sum())) * a + (1 - (a * b).sum() / (2 * (b * b).sum())) * b
            for a, b in zip(terms[::2], terms[1::2], strict=True)
        ]
    return terms[0]


def same(found: Any, expected: Any) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)


def allreduces(x: Any, **options: Any) -> Iterator[Any]:
    """The results of all calls that reduce a tensor; the calls in place get tensors of their own."""
    yield hvd.allreduce(x, **options)
    mine = x.clone()
    yield hvd.allreduce_(mine, **options)
    yield mine
    yield hvd.synchronize(hvd.allreduce_async(x, **options))
    mine = x.clone()
    yield hvd.synchronize(hvd.allreduce_async_(mine, **options))
    yield mine
    yield from hvd.grouped_allreduce([x, x], **options)
    yield from hvd.synchronize(hvd.grouped_allreduce_async([x, x], **options))
    several = [x.clone(), x.clone()]
    yield from hvd.grouped_allreduce_(several, **options)
    yield from several
    several = [x.clone(), x.clone()]
    yield from hvd.synchronize(hvd.grouped_allreduce_async_(several, **options))
    yield from several


def check_allreduce(cases: Sequence[tuple[Any, int, int]], ops: Sequence[int], factors: Sequence[Any]) -> None:
    me, size = hvd.rank(), hvd.size()
    for (dtype, dimensions, rows), op, (prescale, postscale) in itertools.product(cases, ops, factors):
        everyone = [values(dtype, rank, rows, dimensions) for rank in range(size)]
        expected, before = reduced(everyone, op, prescale, postscale), everyone[me].clone()
        options = {"op": op, "prescale_factor": prescale, "postscale_factor": postscale}
        for number, found in enumerate(allreduces(everyone[me], **options)):
            assert same(found, expected), (dtype, dimensions, rows, op, prescale, postscale, number)
        assert same(everyone[me], before), "a call that is not in place leaves its input alone"


def check_adasum(cases: Sequence[tuple[Any, int, int]]) -> None:
    for dtype, dimensions, rows in cases:
        if not dtype.is_floating_point:
            with pytest.raises(RuntimeError, match="Adasum needs floating-point elements"):
                hvd.allreduce(values(dtype, 0, rows, dimensions), op=hvd.Adasum)
            continue
        everyone = [values(dtype, rank, rows, dimensions) for rank in range(hvd.size())]
        expected = adasum_of(everyone).to(dtype)
        tolerance = {torch.float16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
        for found in allreduces(everyone[hvd.rank()], op=hvd.Adasum):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def check_reducescatter(cases: Sequence[tuple[Any, int, int]], factors: Sequence[Any]) -> None:
    me, size = hvd.rank(), hvd.size()
    for (dtype, dimensions, rows), op, factor in itertools.product(cases, (hvd.Average, hvd.Sum), factors):
        everyone = [values(dtype, rank, rows, dimensions) for rank in range(size)]
        lengths = [rows // size + (rank < rows % size) for rank in range(size)]
        expected = reduced(everyone, op, *factor).split(lengths)[me]
        options = {"op": op, "prescale_factor": factor[0], "postscale_factor": factor[1]}
        x = everyone[me]
        for found in (
            hvd.reducescatter(x, **options),
            hvd.synchronize(hvd.reducescatter_async(x, **options)),
            *hvd.grouped_reducescatter([x, x], **options),
            *hvd.synchronize(hvd.grouped_reducescatter_async([x, x], **options)),
        ):
            assert same(found, expected), (dtype, dimensions, rows, op, factor)


def check_moves(cases: Sequence[tuple[Any, int, int]]) -> None:
    """Calls that compute nothing, and take bool, too."""
    me, size = hvd.rank(), hvd.size()
    for dtype, dimensions, rows in cases:
        for lengths in ([rows] * size, [rows + rank for rank in range(size)], [0, *range(1, size)]):
            everyone = [values(dtype, rank, length, dimensions) for rank, length in enumerate(lengths)]
            x, expected = everyone[me], torch.cat(everyone)
            assert same(hvd.allgather(x), expected) and same(hvd.synchronize(hvd.allgather_async(x)), expected)
            assert all(same(found, expected) for found in hvd.grouped_allgather([x, x]))
            assert all(same(found, expected) for found in hvd.synchronize(hvd.grouped_allgather_async([x, x])))
        everyone = [values(dtype, rank, rows, dimensions) for rank in range(size)]
        x = everyone[me]
        for root in range(size):
            assert same(hvd.broadcast(x, root), everyone[root])
            assert same(hvd.synchronize(hvd.broadcast_async(x, root)), everyone[root])
            mine = x.clone()
            assert hvd.broadcast_(mine, root) is mine and same(mine, everyone[root])
            mine = x.clone()
            assert same(hvd.synchronize(hvd.broadcast_async_(mine, root)), everyone[root]) and same(
                mine, everyone[root]
            )
        assert same(x, everyone[me].clone())
        # Rank r sends s + 1 rows to rank s; without splits equal parts.
        splits = torch.arange(1, size + 1, dtype=torch.int32)
        total = int(splits.sum())
        everyone = [values(dtype, rank, total, dimensions) for rank in range(size)]
        expected = torch.cat([tensor.split(splits.tolist())[me] for tensor in everyone])
        for found, counts in (
            hvd.alltoall(everyone[me], splits=splits),
            hvd.synchronize(hvd.alltoall_async(everyone[me], splits=splits)),
        ):
            assert same(found, expected) and counts.tolist() == [me + 1] * size and counts.dtype == torch.int32
        everyone = [values(dtype, rank, 2 * size, dimensions) for rank in range(size)]
        expected = torch.cat([tensor.split(2)[me] for tensor in everyone])
        assert same(hvd.alltoall(everyone[me]), expected)
        assert same(hvd.synchronize(hvd.alltoall_async(everyone[me])), expected)


def check_bool(dimensions: int, rows: int) -> None:
    everyone = [values(torch.int8, rank, rows, dimensions) > 0 for rank in range(hvd.size())]
    stack = torch.stack(everyone)
    for op, expected in ((hvd.Sum, stack.any(0)), (hvd.Max, stack.any(0)), (hvd.Min, stack.all(0))):
        assert all(same(found, expected) for found in allreduces(everyone[hvd.rank()], op=op))
    with pytest.raises(RuntimeError, match="Average is not defined for bool"):
        hvd.allreduce(everyone[0])


def cases(dtypes: Sequence[Any], dimensions: Sequence[int], rows: Sequence[int]) -> list[tuple[Any, int, int]]:
    return list(itertools.product(dtypes, dimensions, rows))


@SLICE
def test_calls_are_exact_in_a_slice_of_the_matrix(size: int) -> None:
    def body(session: Session) -> None:
        some = cases([torch.int8, torch.int64, torch.float16], [2], [5]) + cases([torch.float32], [1, 3], [1100])
        check_allreduce(some, [hvd.Average], FACTORS)
        check_allreduce(some, OPS, FACTORS[:1])
        check_adasum(some[1:3])
        check_reducescatter(some, FACTORS[:3])
        check_moves([*some[:3], (torch.bool, 1, 5)])
        check_bool(2, 5)

    run_ranks(size, body)


@pytest.mark.long
@FULL
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_calls_are_exact_in_the_whole_matrix(size: int, dtype: Any) -> None:
    def body(session: Session) -> None:
        every = cases([dtype], DIMENSIONS, ROWS)
        check_allreduce(every, OPS, FACTORS)
        check_adasum(every)
        check_reducescatter(every, FACTORS)
        check_moves(every)

    run_ranks(size, body)


@pytest.mark.long
@FULL
def test_bool_is_moved_and_combined_in_every_shape(size: int) -> None:
    def body(session: Session) -> None:
        check_moves(cases([torch.bool], DIMENSIONS, ROWS))
        for dimensions, rows in itertools.product(DIMENSIONS, ROWS):
            check_bool(dimensions, rows)

    run_ranks(size, body)


def ones(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.ones(*shape, dtype=dtype)


#: Calls that reduce or move a tensor of this rank, by name: how the ranks are made to disagree is up to the arguments.
REDUCING: dict[str, Callable[..., Any]] = {
    "allreduce": lambda x, **o: hvd.allreduce(x, name="x", **o),
    "allreduce_": lambda x, **o: hvd.allreduce_(x, name="x", **o),
    "allreduce_async": lambda x, **o: hvd.synchronize(hvd.allreduce_async(x, name="x", **o)),
    "allreduce_async_": lambda x, **o: hvd.synchronize(hvd.allreduce_async_(x, name="x", **o)),
    "grouped_allreduce": lambda x, **o: hvd.grouped_allreduce([ones(2), x], name="x", **o),
    "grouped_allreduce_": lambda x, **o: hvd.grouped_allreduce_([ones(2), x], name="x", **o),
    "grouped_allreduce_async": lambda x, **o: hvd.synchronize(hvd.grouped_allreduce_async([x, x], name="x", **o)),
    "grouped_allreduce_async_": lambda x, **o: hvd.synchronize(
        hvd.grouped_allreduce_async_([x, x.clone()], name="x", **o)
    ),
    "reducescatter": lambda x, **o: hvd.reducescatter(x, name="x", **o),
    "reducescatter_async": lambda x, **o: hvd.synchronize(hvd.reducescatter_async(x, name="x", **o)),
    "grouped_reducescatter": lambda x, **o: hvd.grouped_reducescatter([ones(4), x], name="x", **o),
    "grouped_reducescatter_async": lambda x, **o: hvd.synchronize(
        hvd.grouped_reducescatter_async([x, x], name="x", **o)
    ),
}
MOVING: dict[str, Callable[..., Any]] = {
    "allgather": lambda x: hvd.allgather(x, name="x"),
    "allgather_async": lambda x: hvd.synchronize(hvd.allgather_async(x, name="x")),
    "grouped_allgather": lambda x: hvd.grouped_allgather([ones(2), x], name="x"),
    "grouped_allgather_async": lambda x: hvd.synchronize(hvd.grouped_allgather_async([x, x], name="x")),
    "alltoall": lambda x: hvd.alltoall(x, name="x"),
    "alltoall_async": lambda x: hvd.synchronize(hvd.alltoall_async(x, name="x")),
}
BROADCASTING: dict[str, Callable[..., Any]] = {
    "broadcast": lambda x, root=0: hvd.broadcast(x, root, name="x"),
    "broadcast_": lambda x, root=0: hvd.broadcast_(x, root, name="x"),
    "broadcast_async": lambda x, root=0: hvd.synchronize(hvd.broadcast_async(x, root, name="x")),
    "broadcast_async_": lambda x, root=0: hvd.synchronize(hvd.broadcast_async_(x, root, name="x")),
}


def disagreements() -> Iterator[tuple[str, str, Callable[[int], Any]]]:
    """(call, what the ranks disagree on, the call of a rank)."""
    everything = {**REDUCING, **MOVING, **BROADCASTING}
    for name, call in everything.items():
        # All ranks but the first have other columns, another number of dimensions, another dtype.
        yield name, "columns", lambda rank, call=call: call(ones(4, 5 + min(rank, 1)))
        yield name, "dimensions", lambda rank, call=call: call(ones(4, 6) if rank else ones(4, 2, 3))
        yield name, "dtype", lambda rank, call=call: call(ones(4, dtype=torch.int32 if rank else torch.float32))
        if name not in MOVING:
            yield name, "rows", lambda rank, call=call: call(ones(4 + min(rank, 1)))
    for name, call in REDUCING.items():
        yield name, "reduction", lambda rank, call=call: call(ones(4), op=hvd.Sum if rank else hvd.Average)
        yield name, "prescale", lambda rank, call=call: call(ones(4), prescale_factor=1.0 + rank)
        yield name, "postscale", lambda rank, call=call: call(ones(4), postscale_factor=1.0 + rank)
    for name, call in BROADCASTING.items():
        yield name, "root", lambda rank, call=call: call(ones(4), min(rank, 1))


def check_disagreements(names: Sequence[str] | None = None) -> None:
    for number, (name, what, call) in enumerate(disagreements()):
        if names is not None and name not in names:
            continue
        with pytest.raises(RuntimeError, match=r"tensor '.*x.*': mismatched .* rank") as caught:
            call(hvd.rank())
        assert isinstance(caught.value, hvd.HorovodInternalError), (name, what)
        assert hvd.allreduce(ones(1), op=hvd.Sum, name=f"on {number}").item() == hvd.size(), "the job goes on"


@SLICE
def test_ranks_that_disagree_get_the_runtime_error_that_horovods_scripts_catch(size: int) -> None:
    run_ranks(
        size, lambda session: check_disagreements(["allreduce", "grouped_allgather", "broadcast_", "reducescatter"])
    )


@pytest.mark.long
@FULL
def test_ranks_that_disagree_in_any_call_get_the_runtime_error(size: int) -> None:
    run_ranks(size, lambda session: check_disagreements())


#: (what is wrong, the call, what Horovod's scripts catch: a ValueError where it looks at this rank's call, a
#: RuntimeError where it compares the ranks')
WRONG: list[tuple[str, Callable[[], Any], tuple[type[Exception], ...]]] = [
    ("root", lambda: hvd.broadcast(ones(2), 99), (ValueError,)),
    ("root in place", lambda: hvd.broadcast_(ones(2), -1), (ValueError,)),
    ("op and average", lambda: hvd.allreduce(ones(2), average=True, op=hvd.Sum), (ValueError,)),
    ("uneven alltoall", lambda: hvd.alltoall(ones(hvd.size() + 1)), (ValueError,)),
    ("too many splits", lambda: hvd.alltoall(ones(9), splits=torch.ones(99, dtype=torch.int32)), (ValueError,)),
    (
        "splits beyond the rows",
        lambda: hvd.alltoall(ones(1), splits=torch.ones(hvd.size(), dtype=torch.int32)),
        (ValueError,),
    ),
    ("splits that are no integers", lambda: hvd.alltoall(ones(9), splits=torch.ones(hvd.size())), (ValueError,)),
    ("reducescatter by Max", lambda: hvd.reducescatter(ones(4), op=hvd.Max), (ValueError, RuntimeError)),
    ("reducescatter by Adasum", lambda: hvd.reducescatter(ones(4), op=hvd.Adasum), (ValueError, RuntimeError)),
    (
        "a group's reducescatter by Adasum",
        lambda: hvd.grouped_reducescatter([ones(4), ones(4, dtype=torch.int64)], op=hvd.Adasum),
        (ValueError, RuntimeError),
    ),
    ("unknown handle", lambda: hvd.poll(-1), (ValueError,)),
    ("parameters", lambda: hvd.broadcast_parameters(3, 0), (ValueError,)),
    ("unregistered set", lambda: hvd.allreduce(ones(1), process_set=hvd.ProcessSet([0])), (ValueError,)),
    ("LBFGS", lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS([ones(1)]), 0), (ValueError,)),
    ("complex", lambda: hvd.allreduce(ones(2, dtype=torch.complex64)), (ValueError, RuntimeError)),
    ("no tensor", lambda: hvd.broadcast(None, 0), (ValueError, RuntimeError)),
    (
        "Adasum of integers",
        lambda: hvd.allreduce(ones(2, dtype=torch.int32), op=hvd.Adasum),
        (ValueError, RuntimeError),
    ),
    (
        "a group's Adasum of integers",
        lambda: hvd.grouped_allreduce([ones(2), ones(2, dtype=torch.uint8)], op=hvd.Adasum),
        (ValueError, RuntimeError),
    ),
    ("average of bool", lambda: hvd.allreduce(ones(2, dtype=torch.bool)), (ValueError, RuntimeError)),
    (
        "factor of bool",
        lambda: hvd.allreduce(ones(2, dtype=torch.bool), op=hvd.Sum, prescale_factor=0.5),
        (ValueError, RuntimeError),
    ),
    ("allgather of a number", lambda: hvd.allgather(torch.tensor(1.0)), (ValueError, RuntimeError)),
    ("alltoall of a number", lambda: hvd.alltoall(torch.tensor(1.0)), (ValueError, RuntimeError)),
    ("reducescatter of a number", lambda: hvd.reducescatter(torch.tensor(1.0)), (ValueError, RuntimeError)),
    (
        "Max of a sparse tensor",
        lambda: hvd.sparse_allreduce_async(ones(2).to_sparse(), op=hvd.Max),
        (ValueError, NotImplementedError),
    ),
]  # fmt: skip


@FULL
def test_what_is_wrong_on_one_rank_raises_there_what_horovods_scripts_catch(size: int) -> None:
    def body(session: Session) -> None:
        for what, call, classes in WRONG:
            if hvd.rank() == 0:
                for caught in classes:
                    with pytest.raises(caught):
                        call()
                        pytest.fail(what)
            assert hvd.allreduce(ones(1), op=hvd.Sum, name=what).item() == size, "the job goes on"

    run_ranks(size, body)


@FULL
def test_a_name_that_is_in_use_is_a_value_error(size: int) -> None:
    started: list[Callable[[], int]] = [
        lambda: hvd.allreduce_async(ones(4), name="x"),
        lambda: hvd.allreduce_async_(ones(4), name="x"),
        lambda: hvd.grouped_allreduce_async([ones(4), ones(2)], name="x"),
        lambda: hvd.allgather_async(ones(4), name="x"),
        lambda: hvd.grouped_allgather_async([ones(4)], name="x"),
        lambda: hvd.broadcast_async(ones(4), 0, name="x"),
        lambda: hvd.alltoall_async(ones(size), name="x"),
        lambda: hvd.reducescatter_async(ones(size), name="x"),
        lambda: hvd.grouped_reducescatter_async([ones(size)], name="x"),
    ]

    def body(session: Session) -> None:
        for start in started:
            if hvd.rank() == 0:
                handle = start()  # cannot end before the others come
                with pytest.raises(ValueError, match="is already being processed on rank 0"):
                    start()
            hvd.barrier()
            hvd.synchronize(handle if hvd.rank() == 0 else start())

    run_ranks(size, body)


@FULL
def test_names_of_parameters_and_gradients_of_a_fresh_optimizer_are_what_horovods_scripts_find(size: int) -> None:
    def body(session: Session) -> None:
        for _ in range(2):  # the second optimizer has names of its own on the wire
            model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
            model[1].bias.requires_grad_(False)
            inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            named = hvd.DistributedOptimizer(inner, model.named_parameters())
            assert named._parameter_names == {p: name for name, p in model.named_parameters()}
            hvd.broadcast_optimizer_state(named, 0)
            grads = [p.grad for p in model.parameters()]
            assert grads[-1] is None and all(same(g, hvd.broadcast(g, 0)) and not g.any() for g in grads[:-1])
            inner.state[model[0].weight]["momentum_buffer"] = None if hvd.rank() == 0 else ones(2, 3)
            hvd.broadcast_optimizer_state(named, 0)
            assert inner.state[model[0].weight] == {"momentum_buffer": None}
            unnamed = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            names = [f"allreduce.noname.{position}" for position in range(4)]
            assert list(unnamed._parameter_names.values()) == names

    run_ranks(size, body)


def test_adasum_of_the_matrix_is_the_papers() -> None:
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert torch.equal(adasum_of([a, b]), torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert math.isclose(adasum_of([a, a]).norm().item(), 3.0)
