"""Horovod's synthetic benchmark, as people have it. One line is not Horovod's: the import.

    ocommrun -np 2 python examples/torch_synthetic_benchmark.py
    ocommrun -np 2 python examples/torch_synthetic_benchmark.py --use-adasum --fp16-allreduce

The model is a stack of linear layers, so that it needs no package beside Torch.
"""

import argparse
import timeit

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

import ocomm_torch as hvd  # was: import horovod.torch as hvd

parser = argparse.ArgumentParser(
    description="PyTorch synthetic benchmark", formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel as float16")
parser.add_argument("--width", type=int, default=512, help="of the hidden layers")
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--num-warmup-batches", type=int, default=10)
parser.add_argument("--num-batches-per-iter", type=int, default=10)
parser.add_argument("--num-iters", type=int, default=10)
parser.add_argument("--use-adasum", action="store_true", help="Adasum instead of an average")


def log(text):
    if hvd.rank() == 0:
        print(text, flush=True)


def benchmark_step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()


if __name__ == "__main__":
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)

    hidden = [nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU()) for _ in range(args.layers)]
    model = nn.Sequential(*hidden, nn.Linear(args.width, 1000))
    lr_scaler = 1 if args.use_adasum else hvd.size()
    optimizer = optim.SGD(model.parameters(), lr=0.01 * lr_scaler)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    data = torch.randn(args.batch_size, args.width)
    target = torch.randint(1000, (args.batch_size,))

    log(f"Batch size: {args.batch_size}, ranks: {hvd.size()}, parameters: {sum(p.numel() for p in model.parameters())}")
    timeit.timeit(benchmark_step, number=args.num_warmup_batches)
    rates = []
    for x in range(args.num_iters):
        seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iter #{x}: {rates[-1]:.1f} samples/s per rank")
    mean, spread = np.mean(rates), 1.96 * np.std(rates)
    log(f"Samples/s per rank: {mean:.1f} +-{spread:.1f}")
    log(f"Samples/s on {hvd.size()} rank(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
