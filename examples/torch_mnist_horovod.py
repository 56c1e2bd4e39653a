"""A Horovod training script, as people have them. One line is not Horovod's: the import.

    ocommrun -np 2 python examples/torch_mnist_horovod.py              # dense Adam, as before
    ocommrun -np 2 python examples/torch_mnist_horovod.py --one-bit    # 1-bit Adam: one more line, see below

Instead of MNIST it reads scikit-learn's 8 x 8 digits, which need no download.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data.distributed
from sklearn.datasets import load_digits

import ocomm_torch as hvd  # was: import horovod.torch as hvd

parser = argparse.ArgumentParser(description="PyTorch digits, Horovod's way")
parser.add_argument("--batch-size", type=int, default=32, help="per rank")
parser.add_argument("--test-batch-size", type=int, default=100)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--log-interval", type=int, default=10)
parser.add_argument("--fp16-allreduce", action="store_true", help="dense Adam: gradients travel as float16")
parser.add_argument("--one-bit", action="store_true", help="1-bit Adam")
parser.add_argument("--freeze-step", type=int, default=40, help="1-bit Adam: number of dense steps before compression")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0 and hvd.rank() == 0:
            done = batch_idx * len(data)
            print(f"Train Epoch: {epoch} [{done}/{len(train_sampler)}]\tLoss: {loss.item():.6f}", flush=True)


@torch.no_grad()
def test():
    model.eval()
    test_loss = 0.0
    test_accuracy = 0.0
    for data, target in test_loader:
        output = model(data)
        test_loss += F.nll_loss(output, target, reduction="sum").item()
        test_accuracy += (output.argmax(1) == target).float().sum().item()
    test_loss = metric_average(test_loss / len(test_sampler), "avg_loss")
    test_accuracy = metric_average(test_accuracy / len(test_sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"\nTest set: Average loss: {test_loss:.4f}, Accuracy: {100 * test_accuracy:.2f}%\n", flush=True)


if __name__ == "__main__":
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    train_dataset = torch.utils.data.TensorDataset(images[:1400], labels[:1400])
    test_dataset = torch.utils.data.TensorDataset(images[1400:], labels[1400:])

    # Every rank trains on its own part of the data.
    train_sampler = torch.utils.data.distributed.DistributedSampler(
        train_dataset, num_replicas=hvd.size(), rank=hvd.rank()
    )
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
    test_sampler = torch.utils.data.distributed.DistributedSampler(
        test_dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    test_loader = torch.utils.data.DataLoader(test_dataset, batch_size=args.test_batch_size, sampler=test_sampler)

    model = Net()
    optimizer = optim.Adam(model.parameters(), lr=args.lr)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    if args.one_bit:
        # The line that makes it 1-bit.
        optimizer = hvd.DistributedOneBitAdam(
            optimizer, named_parameters=model.named_parameters(), freeze_step=args.freeze_step
        )
    else:
        compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
        )

    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test()

    if args.one_bit and hvd.rank() == 0:
        report = optimizer.compression_report()
        print(
            f"Sent {report['bytes_sent']} bytes, dense: {report['bytes_dense']:.0f}; "
            f"{report['dense_steps']} dense and {report['compressed_steps']} compressed steps"
        )
