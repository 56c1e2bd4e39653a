"""Features of torch.distributed as small programs: each gives numbers that another backend must give, too.

``FEATURES`` is the list from which the tests, the benchmark and the table of the documentation are made.
"""

from __future__ import annotations

import copy
import functools
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

#: Takes step number n, and returns what this rank has got in it.
Step = Callable[[int], Sequence[Tensor]]


@dataclass(frozen=True)
class Feature:
    """A feature of torch.distributed, as a program of every rank.

    Args:
        name: As the documentation shows it.
        prepare: Makes networks, groups and the like in the default group, and returns the program's step. Collective.
        compared: What a step returns, in words.
        steps: The number of steps in which backends are compared.
        sizes: The numbers of ranks on which it runs.
        gap: Largest relative gap between the backends on four ranks, which add in another order.
        lacking: What the error says of a backend that does not have the feature, by backend.
        until: The first release of torch in which no backend lacks it; None if there is none.
        is_long: True if it takes seconds: the test of it is in the long tier.
    """

    name: str
    prepare: Callable[[], Step]
    compared: str
    steps: int = 4
    sizes: Sequence[int] = (2, 4)
    gap: float = 1e-6
    lacking: Mapping[str, str] = field(default_factory=dict)
    until: tuple[int, int] | None = None
    is_long: bool = False

    @property
    def lacking_here(self) -> Mapping[str, str]:
        """``lacking`` with the torch that is installed; the tables may be of another one."""
        here = tuple(map(int, torch.__version__.split(".")[:2]))
        return {} if self.until is not None and here >= self.until else self.lacking


def mine(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(shape, generator=generator).to(dtype)


def shared(*shape: int, seed: int) -> Tensor:
    """Numbers that all ranks have."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 4))


def everyone() -> Any:
    """A mesh of one dimension over all ranks."""
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def by_two(*names: str) -> Any:
    """A mesh of 2 x 2 ranks."""
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def local(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, without communication; any other tensor as it is."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def numbers(network: nn.Module) -> list[Tensor]:
    return [local(parameter).clone() for parameter in network.parameters()]


def training(network: Any, optimizer: Any, clip: Callable[[], object] = lambda: None) -> Step:
    def step(number: int) -> list[Tensor]:
        optimizer.zero_grad()
        loss = F.mse_loss(network(mine(6, 12, seed=number)), mine(6, 4, seed=100 + number))
        loss.backward()
        clip()
        optimizer.step()
        return [loss.detach(), *numbers(network)]

    return step


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), 0.1)


def adam(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), 0.01)


# Collectives


def reductions(number: int) -> list[Tensor]:
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.uint8):
            tensor = (mine(33, seed=number) * 3).abs().to(dtype)
            dist.all_reduce(tensor, op=op)
            found.append(tensor)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        tensor = (mine(9, seed=number) * 100).to(torch.int32)
        dist.all_reduce(tensor, op=op)
        found.append(tensor)
    large = mine(300_000, seed=number)
    dist.all_reduce(large)
    strided = mine(8, 6, seed=number).t()
    dist.all_reduce(strided)
    column = mine(1, 2, seed=number)[:, 0]  # contiguous, and has a stride of 2
    dist.all_reduce(column)
    columns = [torch.empty(1, 2)[:, 0] for _ in range(dist.get_world_size())]
    dist.all_gather(columns, column)
    empty = torch.zeros(0)
    dist.all_reduce(empty)
    return [*found, large, strided, torch.cat([column, *columns]), empty]


def averages(number: int) -> list[Tensor]:
    tensor = mine(33, seed=number)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    return [tensor]


def coalesced(number: int) -> list[Tensor]:
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


def sparse(number: int) -> list[Tensor]:
    rank = dist.get_rank()
    found = []
    for rows, dense_shape in ((rank + 1, ()), (2 * rank, (3,)), (0, (2, 2)), (40_000, ())):
        indices = torch.randint(50, (2, rows), generator=torch.Generator().manual_seed(rank + 10 * number))
        tensor = torch.sparse_coo_tensor(indices, mine(rows, *dense_shape), (50, 50, *dense_shape))
        dist.all_reduce(tensor)
        found.append(tensor.to_dense())
    return found


def broadcasts(number: int) -> list[Tensor]:
    found = []
    for root in range(dist.get_world_size()):
        tensor = mine(11, seed=root + number)
        dist.broadcast(tensor, root)
        large = mine(100_000, seed=root + number)
        dist.broadcast(large, root)
        reduced = mine(7, seed=root + number)
        dist.reduce(reduced, root)
        found += [tensor, large, *([reduced] if root == dist.get_rank() else [])]
    return found


def gathers(number: int) -> list[Tensor]:
    size = dist.get_world_size()
    lists = [torch.zeros(5) for _ in range(size)]
    dist.all_gather(lists, mine(5, seed=number))
    whole = torch.zeros(size * 40_000, dtype=torch.bfloat16)
    dist.all_gather_single(whole, mine(40_000, seed=number, dtype=torch.bfloat16))
    flags = [torch.zeros(3, dtype=torch.bool) for _ in range(size)]
    dist.all_gather(flags, mine(3, seed=number) > 0)
    return [*lists, whole, *flags]


def rooted(number: int) -> list[Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for root in range(size):
        parts = [torch.zeros(4) for _ in range(size)] if rank == root else None
        dist.gather(mine(4, seed=root + number), parts, root)
        part = torch.zeros(6)
        dist.scatter(part, [mine(6, seed=peer + number) for peer in range(size)] if rank == root else None, root)
        found += [*(parts or []), part]
    return found


def scattered_sums(number: int) -> list[Tensor]:
    size = dist.get_world_size()
    one, other = torch.zeros(5), torch.zeros(30_000)
    dist.reduce_scatter(one, [mine(5, seed=peer + number) for peer in range(size)])
    dist.reduce_scatter_single(other, mine(30_000 * size, seed=number))
    return [one, other]


def exchanges(number: int) -> list[Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    even = torch.zeros(4 * size, 3)
    dist.all_to_all_single(even, mine(4 * size, 3, seed=number))
    sent, got = [peer + 1 for peer in range(size)], [rank + 1] * size
    uneven = torch.zeros(sum(got), 2)
    dist.all_to_all_single(uneven, mine(sum(sent), 2, seed=number), got, sent)
    return [even, uneven]


def exchanged_lists(number: int) -> list[Tensor]:
    size = dist.get_world_size()
    got = [torch.zeros(7) for _ in range(size)]
    dist.all_to_all(got, [mine(7, seed=number + peer) for peer in range(size)])
    return got


def exchanged_unlike_lists(number: int) -> list[Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    got = [torch.zeros(rank + peer + 1) for peer in range(size)]
    dist.all_to_all(got, [mine(rank + peer + 1, seed=number + peer) for peer in range(size)])
    return got


def messages(number: int) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(mine(9, seed=tag + number), after, tag=tag) for tag in (1, 2, 1)]
    sends.append(dist.isend(mine(200_000, seed=5 + number), after, tag=5))
    one, two, three, large = torch.zeros(9), torch.zeros(9), torch.zeros(9), torch.zeros(200_000)
    dist.recv(large, before, tag=5)
    dist.recv(two, before, tag=2)
    dist.recv(one, before, tag=1)
    dist.irecv(three, before, tag=1).wait()
    for work in sends:
        work.wait()
    return [one, two, three, large]


def from_any_source(number: int) -> list[Tensor]:
    got = torch.zeros(5)
    received = dist.irecv(got)
    sent = dist.isend(mine(5, seed=number), (dist.get_rank() + 1) % dist.get_world_size())
    received.wait()
    sent.wait()
    return [got]


def batched(number: int) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    got = [torch.zeros(5) for _ in range(size)]
    calls = [dist.P2POp(dist.isend, mine(5, seed=peer + number), peer) for peer in range(size) if peer != rank]
    calls += [dist.P2POp(dist.irecv, got[peer], peer) for peer in range(size) if peer != rank]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return got


def objects(number: int) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    every: list[Any] = [None] * size
    dist.all_gather_object(every, {"rank": rank, "text": "x" * (rank * 1000 + number)})
    listed = [f"from {rank}", rank]
    dist.broadcast_object_list(listed, size - 1)
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object((rank, "y"), gathered, 0)
    part: list[Any] = [None]
    dist.scatter_object_list(part, [f"to {peer}" for peer in range(size)] if rank == 0 else None, 0)
    text = json.dumps([every, listed, gathered, part])
    return [torch.tensor(list(text.encode()), dtype=torch.uint8)]


def functional(number: int) -> list[Tensor]:
    import torch.distributed._functional_collectives as funcol

    group = list(range(dist.get_world_size()))
    size = len(group)
    found = [
        funcol.all_reduce(mine(6, seed=number), "sum", group),
        funcol.all_gather_single(mine(2, 3, seed=number), 0, group),
        funcol.reduce_scatter_single(mine(size * 4, seed=number), "sum", 0, group),
        funcol.all_to_all_single(mine(size * 2, seed=number), None, None, group),
        funcol.broadcast(mine(5, seed=number), 1, group),
        *funcol.all_reduce_coalesced([mine(3), mine(4, seed=1)], "sum", group),
    ]
    return [torch.as_tensor(funcol.wait_tensor(one)) for one in found]


def compiled_functional() -> Step:
    import torch.distributed._functional_collectives as funcol

    torch._dynamo.reset()  # else what was compiled for the groups before counts towards its limit

    @torch.compile
    def compute(x: Tensor) -> Tensor:
        return funcol.all_reduce(x * 2, "sum", list(range(dist.get_world_size()))) + 1

    return lambda number: [compute(mine(40, seed=number))]


def groups() -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    everybody = list(range(size))
    # Once: the next one of the same ranks has the same name, by which gloo finds the addresses of the one before.
    ours = dist.new_group(everybody, use_local_synchronization=True)

    def step(number: int) -> list[Tensor]:
        made = [(ranks, dist.new_group(ranks)) for ranks in ([0], [size - 1], everybody, [0, size - 1])]
        joined = [(ranks, group) for ranks, group in [*made, (everybody, ours)] if rank in ranks]
        found = []
        for ranks, group in joined:
            tensor = mine(4, seed=sum(ranks) + number)
            dist.all_reduce(tensor, group=group)
            dist.barrier(group)
            found.append(tensor)
        dist.barrier()  # gloo resets a connection on which the other end still reads
        for _, group in joined[:-1]:
            dist.destroy_process_group(group)
        return found

    return step


def monitored(number: int) -> list[Tensor]:
    dist.monitored_barrier()
    return []


# DDP


def ddp() -> Step:
    network = DistributedDataParallel(model(), bucket_cap_mb=0.002)
    return training(network, adam(network))


def ddp_no_sync() -> Step:
    network = DistributedDataParallel(model())
    optimizer = sgd(network)

    def step(number: int) -> list[Tensor]:
        optimizer.zero_grad()
        with network.no_sync():
            for part in range(2):
                F.mse_loss(network(mine(6, 12, seed=3 * number + part)), mine(6, 4, seed=part)).backward()
        unaveraged = [parameter.grad.clone() for parameter in network.parameters()]
        F.mse_loss(network(mine(6, 12, seed=3 * number + 2)), mine(6, 4, seed=2)).backward()
        optimizer.step()
        return [*unaveraged, *numbers(network)]

    return step


def ddp_join() -> Step:
    network = DistributedDataParallel(model())
    train = training(network, sgd(network))

    def step(number: int) -> list[Tensor]:
        found: list[Tensor] = []
        with network.join():
            for batch in range(1 + 2 * dist.get_rank()):
                found += train(10 * number + batch)
        return [*found, *numbers(network)]

    return step


class Forked(nn.Module):
    """A network of which each rank uses another half in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.one, self.other, self.last = nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(8, 4)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.last((self.one if (self.steps + dist.get_rank()) % 2 else self.other)(x))


def ddp_unused() -> Step:
    network = DistributedDataParallel(Forked(), find_unused_parameters=True)
    return training(network, sgd(network))


def ddp_static() -> Step:
    network = DistributedDataParallel(model(), static_graph=True, bucket_cap_mb=0.002)
    return training(network, sgd(network))


def ddp_buffers() -> Step:
    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    network = DistributedDataParallel(layers, gradient_as_bucket_view=True)
    train = training(network, sgd(network))
    return lambda number: [*train(number), *[buffer.clone() for buffer in layers.buffers()]]


def ddp_sparse() -> Step:
    torch.manual_seed(9)
    network = DistributedDataParallel(nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 4)))
    optimizer = sgd(network)

    def step(number: int) -> list[Tensor]:
        optimizer.zero_grad()
        words = torch.randint(20, (5,), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        F.mse_loss(network(words), mine(5, 4, seed=number)).backward()
        optimizer.step()
        return numbers(network)

    return step


def ddp_of_16_bits(name: str) -> Step:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    torchs_own = getattr(default_hooks, name)
    network = DistributedDataParallel(model(), bucket_cap_mb=0.002)
    # Where there is no GPU Torch refuses its bf16 hook, which it knows by its name.
    network.register_comm_hook(None, lambda state, bucket: torchs_own(state, bucket))
    return training(network, sgd(network))


def powersgd(bucket_cap_mb: float) -> Step:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    network = DistributedDataParallel(model(), bucket_cap_mb=bucket_cap_mb)
    state = PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    network.register_comm_hook(state, powerSGD_hook)
    return training(network, sgd(network))


def ddp_powersgd() -> Step:
    return powersgd(25.0)  # one bucket: with several, gloo mixes up what the callbacks of its threads send


def ddp_post_local_sgd() -> Step:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    rank, half = dist.get_rank(), dist.get_world_size() // 2
    halves = [dist.new_group(list(range(start, start + half))) for start in (0, half)]
    network = DistributedDataParallel(model())
    network.register_comm_hook(PostLocalSGDState(None, halves[rank // half], 2), post_localSGD_hook)
    return training(network, PostLocalSGDOptimizer(sgd(network), PeriodicModelAverager(period=2, warmup_steps=2)))


def ddp_compiled() -> Step:
    torch._dynamo.reset()
    network = DistributedDataParallel(model())
    return training(torch.compile(network), sgd(network))


def sync_batch_norm() -> Step:
    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    network = nn.SyncBatchNorm.convert_sync_batchnorm(layers)
    return training(network, sgd(network))


# Shards


def zero() -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    network = DistributedDataParallel(model())
    return training(network, ZeroRedundancyOptimizer(network.parameters(), torch.optim.Adam, lr=0.01))


def fsdp1() -> Step:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=400)
    network = FullyShardedDataParallel(model(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    return training(network, adam(network), lambda: network.clip_grad_norm_(0.5))


def fsdp1_hybrid() -> Step:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    network = FullyShardedDataParallel(
        model(),
        device_mesh=by_two("replicate", "shard"),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )
    return training(network, adam(network))


def fsdp2(mesh: Any) -> Step:
    from torch.distributed.fsdp import fully_shard

    network = model()
    for layer in network:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return training(network, adam(network), lambda: nn.utils.clip_grad_norm_(network.parameters(), 0.5))


def backward_of(network: nn.Module, loss_of: Callable[[int], Any]) -> Step:
    """Steps that return the loss and the gradients of this rank's parts."""

    def step(number: int) -> list[Tensor]:
        network.zero_grad()
        loss = loss_of(number)
        loss.backward()
        return [local(loss), *[local(parameter.grad) for parameter in network.parameters()]]

    return step


def tensor_parallel() -> Step:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    network = parallelize_module(model(), everyone(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return backward_of(network, lambda number: F.mse_loss(network(shared(6, 12, seed=number)), shared(6, 4, seed=99)))


def tensor_and_data_parallel() -> Step:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = by_two("dp", "tp")
    network = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(network, mesh=mesh["dp"])
    replica = mesh.get_local_rank("dp")
    return backward_of(
        network,
        lambda number: F.mse_loss(network(shared(6, 12, seed=2 * number + replica)), shared(6, 4, seed=98 + replica)),
    )


def sequence_parallel() -> Step:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(7)
    layers = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
    styles = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    network = parallelize_module(layers, everyone(), styles)
    # Of a sequence of 8 words every rank has a part, of its own numbers.
    words = 8 // dist.get_world_size()
    return backward_of(
        network, lambda number: F.mse_loss(network(mine(2, words, 12, seed=number)), mine(2, words, 12, seed=99))
    )


def loss_parallel() -> Step:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.distributed.tensor.parallel import loss_parallel as parallel_loss

    torch.manual_seed(7)
    logits = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    network = parallelize_module(nn.Sequential(nn.Linear(12, 16)), everyone(), {"0": logits})

    def step(number: int) -> list[Tensor]:
        network.zero_grad()
        classes = torch.randint(16, (6,), generator=torch.Generator().manual_seed(number))
        with parallel_loss():  # backward, too, must be in it
            loss = F.cross_entropy(network(shared(6, 12, seed=number)), classes)
            loss.backward()
        return [local(loss), *[local(parameter.grad) for parameter in network.parameters()]]

    return step


def redistribution() -> Step:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = everyone()

    def step(number: int) -> list[Tensor]:
        sharded = distribute_tensor(shared(10, 12, seed=number), mesh, [Shard(0)])
        moved = sharded.redistribute(mesh, [Shard(1)])
        product = sharded.t() @ sharded  # a partial sum
        assert product.placements[0] == Partial()
        summed, reduced = product.redistribute(mesh, [Replicate()]), product.redistribute(mesh, [Shard(0)])
        return [moved.to_local(), moved.full_tensor(), summed.to_local(), reduced.to_local()]

    return step


def pipeline(is_interleaved: bool) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    count = 2 * size if is_interleaved else size
    layers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(count)]
    places = [rank, rank + size] if is_interleaved else [rank]
    stages = [PipelineStage(layers[place], place, count, torch.device("cpu")) for place in places]
    schedule: Any
    if is_interleaved:
        schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=F.mse_loss)
    else:
        schedule = Schedule1F1B(stages[0], 4, loss_fn=F.mse_loss)

    def step(number: int) -> list[Tensor]:
        for place in places:
            layers[place].zero_grad()
        losses: list[Tensor] = []
        given = [shared(8, 12, seed=number)] if rank == 0 else []
        asked = {"target": shared(8, 12, seed=99), "losses": losses} if rank == size - 1 else {}
        schedule.step(*given, **asked)
        grads = [parameter.grad for place in places for parameter in layers[place].parameters()]
        return [*[loss.detach() for loss in losses], *[grad for grad in grads if grad is not None]]

    return step


def checkpoints(is_asynchronous: bool) -> Step:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = everyone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # As torch asks for: it saves from another thread.
        beside = dist.new_group(backend="gloo") if is_asynchronous else None

    def step(number: int) -> list[Tensor]:
        saved = {"sharded": distribute_tensor(shared(9, 5, seed=number), mesh, [Shard(0)]), "plain": shared(4, seed=6)}
        place: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(place, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if is_asynchronous:
                dcp.async_save(copy.deepcopy(saved), checkpoint_id=place[0], process_group=beside).result()
            else:
                dcp.save(saved, checkpoint_id=place[0])
        loaded = {"sharded": distribute_tensor(torch.zeros(9, 5), mesh, [Shard(0)]), "plain": torch.zeros(4)}
        dcp.load(loaded, checkpoint_id=place[0])
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place[0])
        return [local(loaded["sharded"]), loaded["plain"]]

    return step


# The list


def call(name: str, run: Step, compared: str = "results", **more: Any) -> Feature:
    """A feature without anything to prepare."""
    return Feature(name, lambda: run, compared, 2, **more)


_TRAINED = "losses, parameters"
_PART = "losses, this rank's parameters"
_GRADIENTS = "loss, this rank's gradients"
_HALF, _BRAIN = 2e-3, 2e-2  # roundings of sums in float16 and bfloat16

FEATURES = (
    call("`all_reduce`: every reduction, six dtypes", reductions, gap=_HALF),
    call("`all_reduce` by `AVG`", averages),
    call("`all_reduce`: coalesced, asynchronous, futures", coalesced),
    call("`all_reduce` of sparse tensors", sparse),
    call("`broadcast`, `reduce`", broadcasts),
    call("`all_gather`: lists, tensors", gathers),
    call("`gather`, `scatter`", rooted),
    call("`reduce_scatter`: lists, tensors", scattered_sums),
    call("`all_to_all_single`: even and uneven splits", exchanges),
    call("`all_to_all`: equal tensors", exchanged_lists),
    call("`all_to_all`: unlike tensors", exchanged_unlike_lists, lacking={"gloo": "invalid tensor size"}),
    call("`send`, `recv`, `isend`, `irecv` with tags", messages),
    call("`recv` from any source", from_any_source, lacking={"ocomm": "any source"}),
    call("`batch_isend_irecv`", batched),
    call("object collectives", objects),
    call("functional collectives", functional),
    Feature("functional collectives, compiled", compiled_functional, "results", is_long=True),
    Feature("`new_group`: subsets, `use_local_synchronization`", groups, "sums in each", 2),
    call("`monitored_barrier`", monitored, "", lacking={"ocomm": "only implemented for GLOO"}, until=(2, 14)),
    Feature("DDP", ddp, _TRAINED),
    Feature("DDP: gradient accumulation by `no_sync`", ddp_no_sync, "gradients, parameters"),
    Feature("DDP: `join` with uneven inputs", ddp_join, _TRAINED, 2),
    Feature("DDP: unused parameters", ddp_unused, _TRAINED),
    Feature("DDP: static graph", ddp_static, _TRAINED),
    Feature("DDP: buffers, `gradient_as_bucket_view`", ddp_buffers, "losses, parameters, buffers"),
    Feature("DDP: sparse gradients", ddp_sparse, "parameters"),
    Feature("DDP: fp16 hook", lambda: ddp_of_16_bits("fp16_compress_hook"), _TRAINED, gap=_HALF),
    Feature("DDP: bf16 hook, called by a hook", lambda: ddp_of_16_bits("bf16_compress_hook"), _TRAINED, gap=_BRAIN),
    Feature("DDP: PowerSGD hook", ddp_powersgd, _TRAINED),
    Feature("DDP: PostLocalSGD hook and optimizer", ddp_post_local_sgd, _TRAINED, 6),
    Feature("DDP, compiled", ddp_compiled, _TRAINED, is_long=True),
    Feature("`SyncBatchNorm`", sync_batch_norm, _TRAINED, lacking=dict.fromkeys(("gloo", "ocomm"), "to be on GPU")),
    Feature("`ZeroRedundancyOptimizer`", zero, _TRAINED),
    Feature("FSDP1 with clipping", fsdp1, _PART),
    Feature("FSDP1, hybrid", fsdp1_hybrid, _PART, sizes=(4,)),
    Feature("FSDP2 with clipping", lambda: fsdp2(everyone()), _PART),
    Feature("FSDP2, HSDP with clipping", lambda: fsdp2(by_two("replicate", "shard")), _PART, sizes=(4,)),
    Feature("tensor parallel", tensor_parallel, _GRADIENTS),
    Feature("tensor parallel and FSDP2", tensor_and_data_parallel, _GRADIENTS, sizes=(4,)),
    Feature("sequence parallel", sequence_parallel, _GRADIENTS),
    Feature("loss parallel", loss_parallel, _GRADIENTS),
    Feature("DTensor redistribution", redistribution, "parts, whole tensors", 2),
    Feature("pipeline, 1F1B", lambda: pipeline(False), _GRADIENTS, 2),
    Feature("pipeline, interleaved 1F1B", lambda: pipeline(True), _GRADIENTS, 2),
    Feature("DCP: `save`, `load`", lambda: checkpoints(False), "what was loaded", 1),
    Feature("DCP: `async_save` by a gloo group beside", lambda: checkpoints(True), "what was loaded", 1),
)
