"""Horovod's elastic training script, as people have it. One line is not Horovod's: the import.

    ocommrun -np 2 python examples/torch_mnist_elastic.py
    ocommrun -np 2 python examples/torch_mnist_elastic.py --fail-at 30     # a collective fails; training goes on
    ocommrun -np 2 --min-np 2 python examples/torch_mnist_elastic.py --die-at 30     # a rank is killed; so does this
    ocommrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python examples/torch_mnist_elastic.py

Instead of MNIST it reads scikit-learn's 8 x 8 digits, which need no download.
"""

import argparse
import os
import signal

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits

import ocomm_torch as hvd  # was: import horovod.torch as hvd

parser = argparse.ArgumentParser(description="PyTorch digits, elastic, Horovod's way")
parser.add_argument("--batch-size", type=int, default=32, help="per rank")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--batches-per-commit", type=int, default=10)
parser.add_argument("--fail-at", type=int, default=0, help="step in which the last rank's collective fails, once")
parser.add_argument("--die-at", type=int, default=0, help="step in which the last rank is killed, once")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, kernel_size=3)
        self.norm = hvd.SyncBatchNorm(16)
        self.fc = nn.Linear(16 * 6 * 6, 10)

    def forward(self, x):
        return F.log_softmax(self.fc(F.relu(self.norm(self.conv(x))).flatten(1)), dim=1)


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, args.epochs):  # noqa: B020 -- Horovod's idiom
        model.train()
        for batch_idx, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            sampler.record_batch(batch_idx, args.batch_size)
            state.steps += 1
            if state.steps == args.fail_at and not failed:
                failed.append(state.steps)
                if hvd.rank() == hvd.size() - 1:
                    raise hvd.HorovodInternalError("on purpose")
            if state.steps == args.die_at and hvd.rank() == hvd.size() - 1 and is_first_generation:
                os.kill(os.getpid(), signal.SIGKILL)
            if state.steps % args.batches_per_commit == 0:
                state.commit()
        accuracy = test()
        if hvd.rank() == 0:
            print(f"Epoch {state.epoch}: {state.steps} steps, accuracy {100 * accuracy:.2f}%", flush=True)
        sampler.set_epoch(state.epoch + 1)
    state.epoch = args.epochs
    state.commit()


@torch.no_grad()
def test():
    model.eval()
    correct = (model(test_images).argmax(1) == test_labels).float().mean()
    return hvd.allreduce(correct, name="accuracy").item()


if __name__ == "__main__":
    args = parser.parse_args()
    failed = []
    is_first_generation = os.environ.get("OCOMM_ELASTIC_GENERATION", "1") == "1"

    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    test_images, test_labels = images[1400:], labels[1400:]
    dataset = torch.utils.data.TensorDataset(images[:1400], labels[:1400])
    sampler = hvd.elastic.ElasticSampler(dataset, seed=args.seed)
    # Each iteration over the loader draws a seed. From Torch's own generator a restart within an epoch would draw one
    # more, and the masks of dropout would be others than in a run that was not interrupted.
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=args.batch_size, sampler=sampler, generator=torch.Generator()
    )

    model = Net()
    optimizer = hvd.DistributedOptimizer(
        optim.Adam(model.parameters(), lr=args.lr), named_parameters=model.named_parameters()
    )

    def on_state_reset():
        print(f"rank {hvd.rank()} of {hvd.size()} goes on after step {state.steps}", flush=True)

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, steps=0)
    state.register_reset_callbacks([on_state_reset])
    train(state)

    digest = sum(p.double().sum().item() for p in model.parameters())
    assert len(set(hvd.allgather_object(digest))) == 1, "the replicas differ"
