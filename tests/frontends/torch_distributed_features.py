"""What torch.distributed offers, as programs of a rank: each returns numbers that another backend must give, too.

Run as a job: ``mpirun -np 2 python -m tests.frontends.torch_distributed_features NAMES FILE [ROUNDS]`` runs the
features (NAMES: "short", "long", "four", or names with semicolons) over gloo and over ocomm in one process group after
the other, ROUNDS times (2), and rank 0 writes a table of them to FILE, as JSON.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ocomm_torch  # noqa: F401  registers the backend

Feature = Callable[[], Sequence[Tensor]]
SHORT: dict[str, Feature] = {}
LONG: dict[str, Feature] = {}
FOUR: dict[str, Feature] = {}


def feature(name: str, into: dict[str, Feature] = SHORT) -> Callable[[Feature], Feature]:
    def add(run: Feature) -> Feature:
        into[name] = run
        return run

    return add


def mine(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(shape, generator=generator).to(dtype)


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 4))


def train(
    network: Any, optimizer: torch.optim.Optimizer, steps: int = 3, clip: Callable[[], Any] = lambda: None
) -> list[Tensor]:
    """The losses."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(network(mine(6, 12, seed=step)), mine(6, 4, seed=100 + step))
        loss.backward()
        clip()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def numbers(network: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in network.parameters()]


# Collectives


@feature("allreduce, every reduction and dtype")
def reductions() -> list[Tensor]:
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.uint8):
            tensor = (mine(33) * 3).abs().to(dtype)
            dist.all_reduce(tensor, op=op)
            found.append(tensor)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        tensor = (mine(9) * 100).to(torch.int32)
        dist.all_reduce(tensor, op=op)
        found.append(tensor)
    large = mine(300_000)
    dist.all_reduce(large)
    strided = mine(8, 6).t()
    dist.all_reduce(strided)
    empty = torch.zeros(0)
    dist.all_reduce(empty)
    return [*found, large, strided, empty]


@feature("coalesced and asynchronous allreduce")
def coalesced() -> list[Tensor]:
    tensors = [mine(5), mine(70_000, seed=1), mine(3, seed=2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced(tensors)
    later = [mine(4, seed=3), mine(9, seed=4), mine(50_000, seed=5)]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in later]:
        work.wait()
    polled = mine(6, seed=6)
    work = dist.all_reduce(polled, async_op=True)
    while not work.is_completed():
        time.sleep(0.0005)
    chained = dist.all_reduce(mine(8, seed=7), async_op=True).get_future().then(lambda future: future.value()[0] * 2)
    return [*tensors, *later, polled, chained.wait()]


@feature("allreduce of sparse tensors")
def sparse() -> list[Tensor]:
    rank = dist.get_rank()
    found = []
    for rows, dense_shape in ((rank + 1, ()), (2 * rank, (3,)), (0, (2, 2)), (40_000, ())):
        indices = torch.randint(50, (2, rows), generator=torch.Generator().manual_seed(rank))
        tensor = torch.sparse_coo_tensor(indices, mine(rows, *dense_shape), (50, 50, *dense_shape))
        dist.all_reduce(tensor)
        found.append(tensor.to_dense())
    return found


@feature("broadcast and reduce")
def broadcasts() -> list[Tensor]:
    found = []
    for root in range(dist.get_world_size()):
        tensor = mine(11, seed=root)
        dist.broadcast(tensor, root)
        large = mine(100_000, seed=root)
        dist.broadcast(large, root)
        reduced = mine(7, seed=root)
        dist.reduce(reduced, root)
        found += [tensor, large, *([reduced] if root == dist.get_rank() else [])]
    return found


@feature("allgather, into lists and tensors")
def gathers() -> list[Tensor]:
    size = dist.get_world_size()
    lists = [torch.zeros(5) for _ in range(size)]
    dist.all_gather(lists, mine(5))
    whole = torch.zeros(size * 40_000, dtype=torch.bfloat16)
    dist.all_gather_single(whole, mine(40_000, dtype=torch.bfloat16))
    flags = [torch.zeros(3, dtype=torch.bool) for _ in range(size)]
    dist.all_gather(flags, mine(3) > 0)
    return [*lists, whole, *flags]


@feature("gather and scatter")
def rooted() -> list[Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for root in range(size):
        parts = [torch.zeros(4) for _ in range(size)] if rank == root else None
        dist.gather(mine(4, seed=root), parts, root)
        part = torch.zeros(6)
        dist.scatter(part, [mine(6, seed=peer) for peer in range(size)] if rank == root else None, root)
        found += [*(parts or []), part]
    return found


@feature("reduce_scatter, of lists and tensors")
def scattered_sums() -> list[Tensor]:
    size = dist.get_world_size()
    one, other = torch.zeros(5), torch.zeros(30_000)
    dist.reduce_scatter(one, [mine(5, seed=peer) for peer in range(size)])
    dist.reduce_scatter_single(other, mine(30_000 * size))
    return [one, other]


@feature("alltoall, even and uneven")
def exchanges() -> list[Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    even = torch.zeros(4 * size, 3)
    dist.all_to_all_single(even, mine(4 * size, 3))
    sent, got = [peer + 1 for peer in range(size)], [rank + 1] * size
    uneven = torch.zeros(sum(got), 2)
    dist.all_to_all_single(uneven, mine(sum(sent), 2), got, sent)
    return [even, uneven]


@feature("send, recv, isend, irecv and tags")
def messages() -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(mine(9, seed=tag), after, tag=tag) for tag in (1, 2, 1)]
    sends.append(dist.isend(mine(200_000, seed=5), after, tag=5))
    one, two, three, large = torch.zeros(9), torch.zeros(9), torch.zeros(9), torch.zeros(200_000)
    dist.recv(large, before, tag=5)
    dist.recv(two, before, tag=2)
    dist.recv(one, before, tag=1)
    dist.irecv(three, before, tag=1).wait()
    for work in sends:
        work.wait()
    return [one, two, three, large]


@feature("batch_isend_irecv")
def batched() -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    got = [torch.zeros(5) for _ in range(size)]
    calls = [dist.P2POp(dist.isend, mine(5, seed=peer), peer) for peer in range(size) if peer != rank]
    calls += [dist.P2POp(dist.irecv, got[peer], peer) for peer in range(size) if peer != rank]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return got


@feature("object collectives")
def objects() -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    every: list[Any] = [None] * size
    dist.all_gather_object(every, {"rank": rank, "text": "x" * (rank * 1000)})
    listed = [f"from {rank}", rank]
    dist.broadcast_object_list(listed, size - 1)
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object((rank, "y"), gathered, 0)
    part: list[Any] = [None]
    dist.scatter_object_list(part, [f"to {peer}" for peer in range(size)] if rank == 0 else None, 0)
    text = json.dumps([every, listed, gathered, part])
    return [torch.tensor(list(text.encode()), dtype=torch.uint8)]


@feature("functional collectives")
def functional() -> list[Tensor]:
    import torch.distributed._functional_collectives as funcol

    group = list(range(dist.get_world_size()))
    size = len(group)
    found = [
        funcol.all_reduce(mine(6), "sum", group),
        funcol.all_gather_single(mine(2, 3), 0, group),
        funcol.reduce_scatter_single(mine(size * 4), "sum", 0, group),
        funcol.all_to_all_single(mine(size * 2), None, None, group),
        funcol.broadcast(mine(5), 1, group),
        *funcol.all_reduce_coalesced([mine(3), mine(4, seed=1)], "sum", group),
    ]
    return [torch.as_tensor(funcol.wait_tensor(one)) for one in found]


@feature("groups of members")
def groups() -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for ranks in ([0], [size - 1], list(range(size)), [0, size - 1]):
        group = dist.new_group(ranks)
        if rank in ranks:
            tensor = mine(4, seed=sum(ranks))
            dist.all_reduce(tensor, group=group)
            dist.barrier(group)
            found.append(tensor)
            dist.destroy_process_group(group)
    local = dist.new_group(list(range(size)), use_local_synchronization=True)
    tensor = mine(4, seed=9)
    dist.all_reduce(tensor, group=local)
    return [*found, tensor]


# DDP


@feature("DDP")
def ddp() -> list[Tensor]:
    network = DistributedDataParallel(model(), bucket_cap_mb=0.002)
    losses = train(network, torch.optim.Adam(network.parameters(), 0.01), 5)
    with network.no_sync():
        F.mse_loss(network(mine(6, 12)), mine(6, 4)).backward()
    return [*losses, *numbers(network)]


@feature("DDP: join with uneven inputs")
def ddp_join() -> list[Tensor]:
    network = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    with network.join():
        losses = train(network, optimizer, 2 + 2 * dist.get_rank())
    return [*losses, *numbers(network)]


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.one, self.other, self.last = nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(8, 4)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.last((self.one if (self.steps + dist.get_rank()) % 2 else self.other)(x))


@feature("DDP: unused parameters")
def ddp_unused() -> list[Tensor]:
    network = DistributedDataParallel(Forked(), find_unused_parameters=True)
    return [*train(network, torch.optim.SGD(network.parameters(), 0.1), 4), *numbers(network)]


@feature("DDP: sparse gradients")
def ddp_sparse() -> list[Tensor]:
    torch.manual_seed(9)
    network = DistributedDataParallel(nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 4)))
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        words = torch.randint(20, (5,), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        F.mse_loss(network(words), mine(5, 4, seed=step)).backward()
        optimizer.step()
    return numbers(network)


@feature("DDP: fp16 hook")
def ddp_fp16() -> list[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    network = DistributedDataParallel(model(), bucket_cap_mb=0.002)
    network.register_comm_hook(None, fp16_compress_hook)
    return [*train(network, torch.optim.SGD(network.parameters(), 0.1)), *numbers(network)]


@feature("DDP: PowerSGD hook")
def ddp_powersgd() -> list[Tensor]:
    return powersgd(25.0)  # one bucket: with several, gloo mixes up what the callbacks of its threads send


def powersgd(bucket_cap_mb: float) -> list[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    network = DistributedDataParallel(model(), bucket_cap_mb=bucket_cap_mb)
    state = PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    network.register_comm_hook(state, powerSGD_hook)
    return [*train(network, torch.optim.SGD(network.parameters(), 0.1), 4), *numbers(network)]


@feature("ZeroRedundancyOptimizer")
def zero() -> list[Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    network = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.Adam, lr=0.01)
    return [*train(network, optimizer), *numbers(network)]


# Shards


@feature("FSDP1")
def fsdp1() -> list[Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=400)
    network = FullyShardedDataParallel(model(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    losses = train(network, torch.optim.Adam(network.parameters(), 0.01), clip=lambda: network.clip_grad_norm_(0.5))
    return [*losses, *numbers(network)]


@feature("FSDP2 with clipping")
def fsdp2() -> list[Tensor]:
    return _fsdp2(None)


def _fsdp2(mesh: Any) -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    network = model()
    options = {} if mesh is None else {"mesh": mesh}
    if mesh is None:
        options["mesh"] = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in network:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(network, **options)
    losses = train(
        network,
        torch.optim.Adam(network.parameters(), 0.01),
        clip=lambda: nn.utils.clip_grad_norm_(network.parameters(), 0.5),
    )
    return [*losses, *[parameter.full_tensor().detach() for parameter in network.parameters()]]


@feature("tensor parallel")
def tensor_parallel() -> list[Tensor]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    network = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(3)
    x, y = torch.randn(6, 12), torch.randn(6, 4)
    loss = F.mse_loss(network(x), y)
    loss.backward()
    return [loss.detach(), *[_full(p.grad) for p in network.parameters()]]


def _full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@feature("DTensor redistribution")
def redistribution() -> list[Tensor]:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(5)
    sharded = distribute_tensor(torch.randn(10, 12), mesh, [Shard(0)])
    moved = sharded.redistribute(mesh, [Shard(1)])
    product = sharded.t() @ sharded  # a partial sum
    assert product.placements[0] == Partial()
    summed, reduced = product.redistribute(mesh, [Replicate()]), product.redistribute(mesh, [Shard(0)])
    return [moved.to_local(), moved.full_tensor(), summed.to_local(), reduced.to_local()]


@feature("pipeline, 1F1B")
def pipeline() -> list[Tensor]:
    return _pipeline("1F1B")


@feature("pipeline, interleaved 1F1B")
def interleaved() -> list[Tensor]:
    return _pipeline("Interleaved1F1B")


def _pipeline(schedule_name: str) -> list[Tensor]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    count = size if schedule_name == "1F1B" else 2 * size
    layers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(count)]
    places = [rank] if count == size else [rank, rank + size]
    stages = [PipelineStage(layers[place], place, count, torch.device("cpu")) for place in places]
    torch.manual_seed(12)
    x, y = torch.randn(8, 12), torch.randn(8, 12)
    schedule: Any
    if count == size:
        schedule = Schedule1F1B(stages[0], 4, loss_fn=F.mse_loss)
    else:
        schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=F.mse_loss)
    losses: list[Tensor] = []
    for _ in range(2):
        schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == size - 1 else {}))
    grads = [p.grad for place in places for p in layers[place].parameters()]
    return [*[loss.detach() for loss in losses], *[grad for grad in grads if grad is not None]]


@feature("checkpoints (DCP), saved asynchronously")
def checkpoints() -> list[Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(6)
    saved = {"sharded": distribute_tensor(torch.randn(9, 5), mesh, [Shard(0)]), "plain": torch.randn(4)}
    place: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place, 0)
    dcp.save(saved, checkpoint_id=f"{place[0]}/one")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        beside = dist.new_group(backend="gloo")  # as torch asks for: it saves from another thread
        dcp.async_save(copy.deepcopy(saved), checkpoint_id=f"{place[0]}/two", process_group=beside).result()
    found = []
    for name in ("one", "two"):
        loaded = {"sharded": distribute_tensor(torch.zeros(9, 5), mesh, [Shard(0)]), "plain": torch.zeros(4)}
        dcp.load(loaded, checkpoint_id=f"{place[0]}/{name}")
        found += [loaded["sharded"].to_local(), loaded["plain"]]
    return found


# Long, and on four ranks


@feature("compiled DDP", LONG)
def compiled() -> list[Tensor]:
    network = DistributedDataParallel(model())
    fast = torch.compile(network)
    return [*train(fast, torch.optim.SGD(network.parameters(), 0.1)), *numbers(network)]


@feature("compiled functional collectives", LONG)
def compiled_functional() -> list[Tensor]:
    import torch.distributed._functional_collectives as funcol

    @torch.compile
    def compute(x: Tensor) -> Tensor:
        return funcol.all_reduce(x * 2, "sum", list(range(dist.get_world_size()))) + 1

    return [compute(mine(40)), compute(mine(40, seed=1))]


@feature("HSDP", FOUR)
def hsdp() -> list[Tensor]:
    return _fsdp2(dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


@feature("FSDP1, hybrid", FOUR)
def fsdp1_hybrid() -> list[Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    network = FullyShardedDataParallel(
        model(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_id=torch.device("cpu")
    )
    return [*train(network, torch.optim.Adam(network.parameters(), 0.01)), *numbers(network)]


@feature("tensor parallel and data parallel", FOUR)
def grid() -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    network = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(network, mesh=mesh["dp"])
    torch.manual_seed(3 + mesh.get_local_rank("dp"))
    x, y = torch.randn(6, 12), torch.randn(6, 4)
    loss = F.mse_loss(network(x), y)
    loss.backward()
    return [loss.detach(), *[_full(p.grad) for p in network.parameters()]]


# The table


@contextlib.contextmanager
def world(backend: str) -> Iterator[None]:
    dist.init_process_group(backend, init_method="ocomm://")
    try:
        yield
    finally:
        dist.destroy_process_group()


def compare(features: dict[str, Feature], rounds: int) -> list[dict[str, Any]]:
    """Of each feature: the result of ocomm against gloo's on this rank, and the ratio of their times."""
    found: dict[str, dict[str, list[Tensor]]] = {}
    times: dict[str, dict[str, float]] = {}
    for backend in ("gloo", "ocomm") * rounds:  # of the times, the last counts: the first has imports in it
        with world(backend):
            for name, run in features.items():
                dist.barrier()
                begun = time.perf_counter()
                found.setdefault(name, {})[backend] = [tensor.detach().clone() for tensor in run()]
                times.setdefault(name, {})[backend] = time.perf_counter() - begun
    rows = []
    for name, results in found.items():
        ours, theirs = results["ocomm"], results["gloo"]
        same = len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
        gap = 0.0
        for one, other in zip(ours, theirs, strict=True):
            if one.numel() and one.is_floating_point() and not torch.equal(one, other):
                gap = max(gap, float((one - other).double().abs().max() / other.double().abs().max().clamp(min=1e-30)))
            elif not one.is_floating_point() and not torch.equal(one, other):
                gap = float("inf")
        rows.append(
            {"feature": name, "tensors": len(ours), "same_bits": same, "largest_relative_gap": gap}
            | {"time_of_gloo": times[name]["ocomm"] / times[name]["gloo"]}
        )
    return rows


def main(names: str, path: str, rounds: str = "2") -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sets = {"short": SHORT, "long": LONG, "four": FOUR}
    everything = SHORT | LONG | FOUR
    features = sets.get(names) or {name: everything[name] for name in names.split(";")}
    rows = compare(features, int(rounds))
    with world("ocomm"):
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, rows)
        if dist.get_rank() == 0:
            table = []
            for each in zip(*every, strict=True):
                row = dict(each[0])
                row["same_bits"] = all(one["same_bits"] for one in each)
                row["largest_relative_gap"] = max(one["largest_relative_gap"] for one in each)
                table.append(row)
            Path(path).write_text(json.dumps(table))
        dist.barrier()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        raise
