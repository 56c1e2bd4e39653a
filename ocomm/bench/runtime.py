"""What negotiation, fusion and the background thread cost: a burst of tensors, a small tensor, and an idle job.

    ocommrun -np 2 python -m ocomm.bench runtime

*burst*: many tensors of mixed sizes, submitted one by one as in a backward pass, compared with one MPI_Allreduce of as
many bytes in the same run. *latency*: a small tensor whose name is known, from call to result. *idle*: CPU time of a
rank in which nothing happens. Results are checked before anything is timed. Figures are medians; with other programs on
the machine only the ratio is meaningful.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from ocomm import api
from ocomm.errors import LaunchError

_SMALL_NBYTES = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--nbytes", type=int, default=100_000_000, help="of all tensors of a burst")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=500, help="of the small tensor")
    parser.add_argument("--idle-s", type=float, default=4.0)


def sizes(tensors: int, nbytes: int) -> list[int]:
    """Returns numbers of float32 that make up ``nbytes``: from a bias to a large matrix, as in a model."""
    weights = np.random.default_rng(0).lognormal(sigma=2.0, size=tensors)
    numels = np.maximum(1, (weights / weights.sum() * nbytes / 4).astype(np.int64))
    numels[int(numels.argmax())] += nbytes // 4 - int(numels.sum())
    return [int(numel) for numel in numels]


def run(args: argparse.Namespace) -> int:
    """Prints three lines on rank 0."""
    from ocomm.transport import mpi

    api.init()
    if api.size() < 2:
        raise LaunchError("this needs ranks: ocommrun -np 2 python -m ocomm.bench runtime.")
    communicator = mpi.open_world().communicator
    me, ranks = api.rank(), api.size()
    tensors = [np.empty(numel, np.float32) for numel in sizes(args.tensors, args.nbytes)]
    whole, total = np.ones(args.nbytes // 4, np.float32), np.empty(args.nbytes // 4, np.float32)

    def burst() -> float:
        for tensor in tensors:
            tensor.fill(1.0 + me)
        api.barrier()
        begin = time.perf_counter()
        handles = [api.allreduce_async_(t, name=f"burst.{k}", op=api.Sum) for k, t in enumerate(tensors)]
        for handle in handles:
            api.synchronize(handle)
        return time.perf_counter() - begin

    def plain() -> float:
        api.barrier()
        begin = time.perf_counter()
        communicator.Allreduce(whole, total)
        return time.perf_counter() - begin

    burst()
    expected = ranks * (ranks + 1) / 2
    assert all((tensor == expected).all() for tensor in tensors)
    plain()
    assert (total == ranks).all()
    times = [(burst(), plain()) for _ in range(args.rounds)]
    ours, mpis = (statistics.median(column) for column in zip(*times, strict=True))

    small = np.ones(_SMALL_NBYTES // 4, np.float32)
    waits = []
    for _ in range(args.calls):
        begin = time.perf_counter()
        api.allreduce_(small, name="small", op=api.Max)
        waits.append(time.perf_counter() - begin)

    api.barrier()
    begin, used = time.perf_counter(), time.process_time()
    time.sleep(args.idle_s)
    share = (time.process_time() - used) / (time.perf_counter() - begin)
    idle = max(api.allgather_object(share))
    if me == 0:
        ratio = statistics.median(a / b for a, b in times)
        print(f"burst    {args.tensors} tensors, {args.nbytes / 1e6:.0f} MB: {1e3 * ours:.1f} ms", end="")
        print(f", one MPI_Allreduce: {1e3 * mpis:.1f} ms, ratio {ratio:.2f}")
        print(f"latency  {_SMALL_NBYTES} bytes, known name: {1e3 * statistics.median(waits):.3f} ms")
        print(f"idle     {100 * idle:.1f} % of a core, the most of {ranks} ranks", flush=True)
    communicator.Free()
    return 0
