"""Every collective against NumPy, over ranks, element types, operations and shapes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ocomm
from ocomm.session import Session
from ocomm.types import Settings
from tests.worlds import MPI_SIZE, interrupt_soon, run_ranks

SIZES = [1, 2, 3, 4]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
FLOATS = ["float16", "float32", "float64"]
EVERY_SIZE = pytest.mark.parametrize("size", SIZES)


def inputs(dtype: str, rank: int, shape: tuple[int, ...] = (5, 3)) -> np.ndarray:
    """What ``rank`` contributes; small enough that no sum or product of four wraps."""
    rng = np.random.default_rng(rank + 1)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    low = 0 if dtype == "uint8" else -3
    return rng.integers(low, 4, shape).astype(dtype)


def expected(op: int, rows: list[np.ndarray]) -> np.ndarray:
    dtype = rows[0].dtype
    stack = np.stack(rows)
    if dtype.kind == "b":
        return stack.any(0) if op in (ocomm.Sum, ocomm.Max) else stack.all(0)
    wide = stack.astype(np.float64 if dtype.kind == "f" else np.int64)
    if op == ocomm.Average:
        if dtype.kind != "f":
            return np.trunc(wide.sum(0) / len(rows)).astype(dtype)
        work = np.dtype("float32") if dtype.itemsize == 2 else dtype
        return (wide.sum(0).astype(work) * work.type(1.0 / len(rows))).astype(dtype)
    reduce = {ocomm.Sum: wide.sum, ocomm.Min: wide.min, ocomm.Max: wide.max, ocomm.Product: wide.prod}[op]
    return reduce(0).astype(dtype)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class TestAllreduce:
    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_averages_and_factors_of_integers_are_rounded_towards_zero(self, dtype: str) -> None:
        """In every call that reduces; those that are small go another way than those that are large."""
        sign = 1 if dtype == "uint8" else -1

        def body(session: Session) -> None:
            for rows in (1, 9000):
                mine = np.array([[75, 1, 3]] * 2 * rows).astype(dtype) * np.array(sign if ocomm.rank() else 0, dtype)
                half, kept = [sign * 37, 0, sign], [sign * 75, sign, sign * 3]
                for found in (
                    ocomm.allreduce(mine),
                    *ocomm.grouped_allreduce([mine, mine]),
                    ocomm.allreduce(mine, op=ocomm.Sum, prescale_factor=0.5),
                    ocomm.allreduce(mine, op=ocomm.Sum, postscale_factor=0.5),
                    ocomm.reducescatter(mine),
                    ocomm.reducescatter(mine, op=ocomm.Sum, postscale_factor=0.5),
                ):
                    assert (found == half).all() and found.dtype == mine.dtype, found
                assert (ocomm.allreduce(mine, postscale_factor=2.0) == kept).all()  # 75 / 2 * 2, rounded once

        run_ranks(2, body)

    @EVERY_SIZE
    def test_every_type_and_operation_equals_numpy(self, size: int) -> None:
        def body(session: Session) -> None:
            for dtype in [*INTEGERS, *FLOATS, "bool"]:
                for op in (ocomm.Average, ocomm.Sum, ocomm.Min, ocomm.Max, ocomm.Product):
                    if dtype == "bool" and op == ocomm.Average:
                        continue
                    rows = [inputs(dtype, rank) for rank in range(size)]
                    mine = rows[ocomm.rank()].copy()
                    result = ocomm.allreduce(mine, op=op)
                    np.testing.assert_array_equal(result, expected(op, rows), f"{dtype} {op!r}")
                    assert result.dtype == mine.dtype
                    assert same_bits(mine, rows[ocomm.rank()])
                    assert ocomm.allreduce_(mine, op=op) is mine
                    assert same_bits(mine, result)

        run_ranks(size, body)

    @EVERY_SIZE
    def test_large_tensors_are_cut_into_segments(self, size: int) -> None:
        def body(session: Session) -> None:
            rows = [np.random.default_rng(rank).standard_normal(300_001).astype(np.float32) for rank in range(size)]
            total = rows[0].copy()
            for row in rows[1:]:
                total += row
            assert same_bits(ocomm.allreduce(rows[ocomm.rank()], op=ocomm.Sum), total)

        run_ranks(size, body, Settings(segment_nbytes=65536))

    @EVERY_SIZE
    def test_factors_apply_before_and_after_the_sum(self, size: int) -> None:
        def body(session: Session) -> None:
            x = np.arange(6, dtype=np.float64) + ocomm.rank()
            total = np.sum([np.arange(6) + rank for rank in range(size)], 0)
            result = ocomm.allreduce(x, op=ocomm.Sum, prescale_factor=0.5, postscale_factor=4.0)
            np.testing.assert_allclose(result, 2 * total)
            result = ocomm.allreduce(x, prescale_factor=0.5, postscale_factor=4.0)
            np.testing.assert_allclose(result, 2 * total / size)

        run_ranks(size, body)

    def test_bfloat16_goes_by_its_name(self) -> None:
        bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

        def body(session: Session) -> None:
            x = np.array([1.0, 2.5, -3.0]).astype(bfloat16) * (ocomm.rank() + 1)
            result = ocomm.allreduce(x, op=ocomm.Sum)
            assert result.dtype == x.dtype
            assert result.astype(np.float32).tolist() == [3.0, 7.5, -9.0]

        run_ranks(2, body)

    @EVERY_SIZE
    def test_empty_tensors_and_scalars_work(self, size: int) -> None:
        def body(session: Session) -> None:
            assert ocomm.allreduce(np.zeros((0, 3), np.float32)).shape == (0, 3)
            assert ocomm.allreduce_(np.zeros(0)).shape == (0,)
            assert ocomm.broadcast(np.zeros((2, 0)), 0).shape == (2, 0)
            assert ocomm.allgather(np.zeros((0, 2))).shape == (0, 2)
            assert ocomm.alltoall(np.zeros((0, 2))).shape == (0, 2)
            assert ocomm.reducescatter(np.zeros((0, 2))).shape == (0, 2)
            mixed = ocomm.grouped_allreduce([np.zeros(0), np.ones(2), np.zeros((3, 0))], op=ocomm.Sum)
            assert [m.tolist() for m in mixed] == [[], [size] * 2, [[], [], []]]
            assert ocomm.allreduce(3.0, op=ocomm.Sum) == 3.0 * size
            assert ocomm.allreduce(np.float32(2), name="of a file: \udc80\0\n").shape == ()

        run_ranks(size, body)

    def test_arrays_of_any_layout_and_byte_order_are_taken(self) -> None:
        def body(session: Session) -> None:
            n, me = ocomm.size(), ocomm.rank()
            grid = np.arange(24.0).reshape(4, 6)
            for view in (grid.T, grid[::2, 1::2], grid[::-1], np.broadcast_to(np.arange(3.0), (2, 3))):
                assert same_bits(ocomm.allreduce(view, op=ocomm.Sum), np.ascontiguousarray(view) * n)
                assert same_bits(ocomm.broadcast(view * (me + 1), 0), np.ascontiguousarray(view))
                assert same_bits(ocomm.allgather(view), np.concatenate([view] * n))
            assert ocomm.allreduce(grid.astype(">f8"), op=ocomm.Sum).tolist() == (grid * n).tolist()
            read_only = np.frombuffer(b"abcd", np.uint8)
            assert ocomm.allreduce(read_only, op=ocomm.Max).tobytes() == b"abcd"
            base = np.zeros((4, 6))
            base[:, ::2] = 1
            ocomm.allreduce_(base[:, ::2], op=ocomm.Sum)
            assert base.sum() == 12 * n and base[:, 1::2].sum() == 0
            base[:, 1::2] = me
            ocomm.broadcast_(base[:, 1::2], 1)
            assert base[:, 1::2].sum() == 12

        run_ranks(2, body)

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_bursts_in_another_order_on_every_rank_find_together(self, size: int) -> None:
        def body(session: Session) -> None:
            tensors = {f"t{k}": np.full(k % 7 * 50 + 1, float(k + ocomm.rank())) for k in range(100)}
            names = sorted(tensors)
            for round_ in range(3):
                random.Random(100 * round_ + ocomm.rank()).shuffle(names)
                handles = {name: ocomm.allreduce_async(tensors[name], name=name, op=ocomm.Sum) for name in names}
                for name in sorted(tensors):
                    total = sum(int(name[1:]) + rank for rank in range(size))
                    assert (ocomm.synchronize(handles[name]) == total).all()

        run_ranks(size, body)

    @pytest.mark.parametrize("size", [3, 4])
    def test_bits_depend_neither_on_fusion_nor_on_order(self, size: int) -> None:
        def with_threshold(threshold: int, shuffled: bool) -> bytes:
            def body(session: Session) -> bytes:
                rng = np.random.default_rng(ocomm.rank())
                tensors = [rng.standard_normal(n).astype(np.float32) for n in (1, 700, 3000, 5, 40000, 64, 9999, 2)]
                order = list(range(len(tensors)))
                if shuffled:
                    random.Random(ocomm.rank()).shuffle(order)
                handles = {k: ocomm.allreduce_async(tensors[k], name=f"t{k}") for k in order}
                return b"".join(ocomm.synchronize(handles[k]).tobytes() for k in sorted(handles))

            results = run_ranks(size, body, Settings(fusion_threshold=threshold))
            assert len(set(results)) == 1
            return results[0]

        results = {with_threshold(t, s) for t in (0, 1 << 20, 128 << 20) for s in (False, True)}
        assert len(results) == 1

    def test_a_group_is_reduced_as_one(self) -> None:
        def body(session: Session) -> None:
            xs = [np.full(3, 1.0), np.full((2, 2), 2, np.int32), np.full(1, 3, np.float16)]
            out = ocomm.grouped_allreduce(xs, op=ocomm.Sum, name="group")
            assert [o.dtype for o in out] == [x.dtype for x in xs]
            assert [o.ravel()[0] for o in out] == [2, 4, 6]
            assert ocomm.grouped_allreduce([]) == []

        run_ranks(2, body)

    def test_a_handle_says_when_it_is_done_and_gives_its_result_once(self) -> None:
        def body(session: Session) -> None:
            handle = ocomm.allreduce_async(np.ones(3), op=ocomm.Sum)
            assert isinstance(handle, int)
            while not ocomm.poll(handle):
                pass
            assert ocomm.synchronize(handle).tolist() == [2, 2, 2]
            assert ocomm.synchronize(handle) is None

        run_ranks(2, body)

    @EVERY_SIZE
    def test_a_wait_that_was_interrupted_can_be_made_again(self, size: int) -> None:
        def body(session: Session) -> None:
            array = np.full(4, 1.0 + ocomm.rank())
            if ocomm.rank() == 0:
                handle = ocomm.allreduce_async_(array, op=ocomm.Sum, name="late")
                if size > 1:
                    interrupt_soon(TimeoutError)
                    with pytest.raises(TimeoutError):
                        ocomm.synchronize(handle)
                ocomm.broadcast_object("interrupted", 0)
            else:
                ocomm.broadcast_object(None, 0)
                handle = ocomm.allreduce_async_(array, op=ocomm.Sum, name="late")
            assert ocomm.synchronize(handle) is array
            assert (array == sum(range(1, size + 1))).all()
            assert ocomm.synchronize(handle) is None

        run_ranks(size, body)


class TestGatherAndScatter:
    @EVERY_SIZE
    def test_allgather_takes_another_length_from_every_rank(self, size: int) -> None:
        def body(session: Session) -> None:
            for dtype in [*INTEGERS, *FLOATS, "bool"]:
                for rows in (list(range(size)), [2] * size, [3 * (r == size - 1) for r in range(size)]):
                    parts = [inputs(dtype, rank, (n, 2)) for rank, n in enumerate(rows)]
                    assert same_bits(ocomm.allgather(parts[ocomm.rank()]), np.concatenate(parts))

        run_ranks(size, body)

    @EVERY_SIZE
    def test_allgather_of_large_ragged_tensors(self, size: int) -> None:
        def body(session: Session) -> None:
            parts = [np.arange(50_000 * rank + 7, dtype=np.int64) for rank in range(size)]
            assert same_bits(ocomm.allgather(parts[ocomm.rank()]), np.concatenate(parts))

        run_ranks(size, body, Settings(segment_nbytes=100_000))

    @EVERY_SIZE
    def test_broadcast_from_every_root(self, size: int) -> None:
        def body(session: Session) -> None:
            for root in range(size):
                for numel in (1, 500, 70_001):
                    mine = np.full(numel, ocomm.rank(), np.int32)
                    result = ocomm.broadcast(mine, root)
                    assert (result == root).all() and (mine == ocomm.rank()).all()
                    assert ocomm.broadcast_(mine, root) is mine
                    assert (mine == root).all()

        run_ranks(size, body)

    @EVERY_SIZE
    def test_alltoall_deals_rows_by_splits(self, size: int) -> None:
        def body(session: Session) -> None:
            me = ocomm.rank()
            even = np.arange(2 * size).reshape(size, 2) + 100 * me
            wanted = np.stack([np.array([2 * me, 2 * me + 1]) + 100 * rank for rank in range(size)])
            assert same_bits(ocomm.alltoall(even), wanted)
            # Rank r sends r + k rows of its number to rank k, and keeps one row.
            splits = [me + k for k in range(size)]
            data = np.full((sum(splits) + 1, 3), me, np.float32)
            received, counts = ocomm.alltoall(data, splits=np.array(splits))
            assert counts.dtype == np.int32 and counts.tolist() == [rank + me for rank in range(size)]
            assert received[:, 0].tolist() == [rank for rank in range(size) for _ in range(rank + me)]

        run_ranks(size, body)

    @EVERY_SIZE
    def test_reducescatter_gives_the_first_ranks_the_remainder(self, size: int) -> None:
        def body(session: Session) -> None:
            for op in (ocomm.Sum, ocomm.Average):
                for dtype in ("int64", "float32"):
                    for rows in (1, size, 2 * size + 1, 10_001):
                        parts = [inputs(dtype, rank, (rows, 3)) for rank in range(size)]
                        share = [rows // size + (rank < rows % size) for rank in range(size)]
                        start = sum(share[: ocomm.rank()])
                        result = ocomm.reducescatter(parts[ocomm.rank()], op=op)
                        wanted = expected(op, parts)[start : start + share[ocomm.rank()]]
                        np.testing.assert_array_equal(result, wanted)

        run_ranks(size, body)

    @pytest.mark.parametrize("segment_nbytes", [100, 1001])
    def test_odd_segment_sizes_cut_no_element(self, segment_nbytes: int) -> None:
        def body(session: Session) -> None:
            x = np.arange(999.0) + ocomm.rank()
            total = 2 * np.arange(999.0) + 1
            assert same_bits(ocomm.allreduce(x, op=ocomm.Sum), total)
            parts = ocomm.allgather(ocomm.reducescatter(x, op=ocomm.Sum))
            assert same_bits(parts, total)

        run_ranks(2, body, Settings(segment_nbytes=segment_nbytes))

    @EVERY_SIZE
    def test_objects_travel_pickled(self, size: int) -> None:
        def body(session: Session) -> None:
            me = {"rank": ocomm.rank(), "data": list(range(1000 * ocomm.rank()))}
            assert [o["rank"] for o in ocomm.allgather_object(me)] == list(range(size))
            assert ocomm.broadcast_object(me if ocomm.rank() == size - 1 else None, size - 1)["rank"] == size - 1

        run_ranks(size, body)

    @EVERY_SIZE
    def test_a_barrier_waits_for_all(self, size: int) -> None:
        come: list[int] = []

        def body(session: Session) -> None:
            come.append(ocomm.rank())
            ocomm.barrier()
            assert MPI_SIZE or len(come) == size

        run_ranks(size, body)


class TestTopology:
    @EVERY_SIZE
    def test_ranks_of_one_host_count_up(self, size: int) -> None:
        def body(session: Session) -> tuple[int, ...]:
            assert ocomm.is_initialized() and ocomm.is_homogeneous() and ocomm.mpi_threads_supported()
            assert (ocomm.size(), ocomm.local_size(), ocomm.cross_size()) == (size, size, 1)
            return ocomm.rank(), ocomm.local_rank(), ocomm.cross_rank()

        assert run_ranks(size, body) == [(rank, rank, 0) for rank in range(size)]


def both_engines(size: int, body: Callable[[Session], Any]) -> list[Any]:
    return [run_ranks(size, body, Settings(engine=engine, kernels=k)) for engine, k in
            (("native", "cpu"), ("python", "reference"))]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_fast_engine_and_kernels_equal_the_slow_ones(size: int) -> None:
    def body(session: Session) -> bytes:
        x = np.random.default_rng(ocomm.rank()).standard_normal(20_000).astype(np.float32)
        return b"".join(
            ocomm.allreduce(x.astype(dtype), op=op).tobytes()
            for dtype in ("float16", "float32", "float64", "int8")
            for op in (ocomm.Average, ocomm.Max)
        )

    fast, slow = both_engines(size, body)
    assert fast == slow


HUGE = """
import numpy as np, ocomm
ocomm.init()
x = np.empty(2**31 + 8, np.uint8)
x.fill(ocomm.rank() + 1)
x[-3:] = 5
ocomm.allreduce_(x, op=ocomm.Sum)
assert (x[:-3:4096] == 3).all() and x[2**31 - 1] == 3 and x[2**31 + 4] == 3 and (x[-3:] == 10).all()
print("huge", ocomm.rank(), flush=True)
ocomm.shutdown()
"""


def _available_nbytes() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@pytest.mark.skipif(bool(MPI_SIZE), reason="starts its own mpirun; runs once, without one")
@pytest.mark.skipif(_available_nbytes() < 7 * 2**30, reason="needs 7 GiB of free memory")
@pytest.mark.long
def test_more_elements_than_a_32_bit_count_are_reduced_in_place() -> None:
    mpirun = Path(sys.executable).parent / "mpirun"
    if not mpirun.exists():
        pytest.skip(reason="no mpirun beside this Python")
    command = [str(mpirun), "-np", "2", "--oversubscribe", "--bind-to", "none", sys.executable, "-c", HUGE]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "huge" in line) == ["huge 0", "huge 1"]
