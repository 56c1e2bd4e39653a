"""Backend "ocomm" of torch.distributed against gloo: the time of each call, as a ratio in one run.

    mpirun -np 2 python benchmarks/torch_distributed.py [--rounds 9]

Both backends have a process group of the same ranks. Rounds alternate between them; of each round the median time of
its calls counts, and of the rounds' ratios the median is shown, with the smallest and the largest. Results are checked
before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import ocomm_torch  # noqa: F401  registers the backend

Call = Callable[[dist.ProcessGroup], object]


def calls(size: int, rank: int) -> dict[str, tuple[int, Call, Callable[[], torch.Tensor]]]:
    """By name: how often it is called in a round, the call, and its result."""
    found: dict[str, tuple[int, Call, Callable[[], torch.Tensor]]] = {}

    def add(name: str, repeats: int, call: Call, result: torch.Tensor) -> None:
        found[name] = repeats, call, lambda: result

    for numel, repeats in ((16, 200), (4096, 200), (250_000, 30), (13_800_000, 3)):
        one, whole = torch.zeros(numel), torch.zeros(numel // size * size)
        part = torch.ones(numel // size)
        add(f"allreduce of {numel}", repeats, lambda g, t=one: dist.all_reduce(t, group=g), one)
        add(f"broadcast of {numel}", repeats, lambda g, t=one: dist.broadcast(t, 0, group=g), one)
        add(
            f"allgather of {numel}",
            repeats,
            lambda g, w=whole, p=part: dist.all_gather_into_tensor(w, p, group=g),
            whole,
        )
        add(
            f"reduce_scatter of {numel}",
            repeats,
            lambda g, w=whole, p=part: dist.reduce_scatter_tensor(p, w, group=g),
            part,
        )
    add("barrier", 200, lambda g: dist.barrier(g), torch.zeros(1))
    message = torch.zeros(4096)

    def ping(group: dist.ProcessGroup) -> None:
        if rank == 0:
            dist.send(message, 1, group=group)
            dist.recv(message, 1, group=group)
        elif rank == 1:
            dist.recv(message, 0, group=group)
            dist.send(message, 0, group=group)

    add("send and recv of 4096", 100, ping, message)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    dist.init_process_group("ocomm", init_method="ocomm://")
    groups = {"gloo": dist.new_group(backend="gloo"), "ocomm": dist.group.WORLD}
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"{size} ranks, torch {torch.__version__}, {rounds} rounds of each backend in turn")
        print(f"{'':28} {'gloo us':>10} {'ocomm us':>10} {'ratio':>6} {'from':>6} {'to':>6}")
    for name, (repeats, call, result) in calls(size, rank).items():
        results = []
        for group in groups.values():
            result().fill_(float(rank + 1))
            call(group)
            results.append(result().clone())
        assert torch.equal(*results), name
        times: dict[str, list[float]] = {backend: [] for backend in groups}
        for _ in range(rounds):
            for backend, group in groups.items():
                dist.barrier()
                spent = []
                for _ in range(repeats):
                    begun = time.perf_counter()
                    call(group)
                    spent.append(time.perf_counter() - begun)
                times[backend].append(1e6 * statistics.median(spent))
        ratios = [ours / theirs for ours, theirs in zip(times["ocomm"], times["gloo"], strict=True)]
        if rank == 0:
            medians = [statistics.median(times[backend]) for backend in groups]
            print(
                f"{name:28} {medians[0]:10.0f} {medians[1]:10.0f} {statistics.median(ratios):6.2f} {min(ratios):6.2f} "
                f"{max(ratios):6.2f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
