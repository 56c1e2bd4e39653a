"""Trains a small CNN on scikit-learn's handwritten digits twice, with Adam and with 1-bit Adam, and compares them.

    ocommrun -np 2 python examples/torch_digits.py

Both runs start from the same parameters and see the same batches. Printed: loss and accuracy on a fixed test split,
bytes that a rank sends per step, and whether all ranks hold the same parameters, bit for bit. The curves go to
demo-output/torch_digits.png.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tabulate import tabulate
from torch import nn
from torch.nn import functional
from tqdm import tqdm

import ocomm_torch as hvd

PICTURE = "torch_digits.png"


@dataclass(frozen=True)
class Data:
    """Images are float32 (N, 1, 8, 8) in [0, 1], labels int64 (N,)."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load_data() -> Data:
    """1797 scanned digits that come with scikit-learn, no download; the same fifth is always the test split."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, test_images = (torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for x in parts[:2])
    train_labels, test_labels = (torch.tensor(y, dtype=torch.int64) for y in parts[2:])
    return Data(train_images, train_labels, test_images, test_labels)


def make_model(seed: int) -> nn.Module:
    """Two convolutions and two linear layers, 283 786 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def schedule(steps: int) -> Callable[[int], float]:
    """Factor on the learning rate: rises over the first tenth, then falls to zero."""
    rise = max(1, steps // 10)
    return lambda step: min((step + 1) / rise, (steps - step) / max(1, steps - rise))


def batches(data: Data, steps: int, size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share of each step's batch: ``size`` samples, other ones on each rank, in a new order every epoch."""
    generator = torch.Generator().manual_seed(seed)
    whole = size * hvd.size()
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(order) < whole:
            order = torch.randperm(len(data.train_labels), generator=generator)
        mine = order[:whole][hvd.rank() :: hvd.size()]
        order = order[whole:]
        yield data.train_images[mine], data.train_labels[mine]


@torch.no_grad()
def evaluate(model: nn.Module, data: Data) -> tuple[float, float]:
    """Mean cross-entropy and accuracy on the test split."""
    scores = model(data.test_images)
    loss = functional.cross_entropy(scores, data.test_labels).item()
    return loss, (scores.argmax(1) == data.test_labels).double().mean().item()


def fingerprint(model: nn.Module) -> str:
    """Hash of every bit of every parameter."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


@dataclass
class Run:
    """What one training run leaves behind; the same on all ranks, but for ``report``."""

    name: str
    losses: list[float] = field(default_factory=list)  # training, mean over ranks
    test_steps: list[int] = field(default_factory=list)
    test_losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    bytes_sent: list[int] = field(default_factory=list)  # per step, by this rank; empty where nobody counts
    fingerprints: list[str] = field(default_factory=list)  # of each rank's parameters
    seconds: float = 0.0
    report: dict = field(default_factory=dict)


def train(
    name: str,
    wrap: Callable[[torch.optim.Optimizer, nn.Module], torch.optim.Optimizer],
    data: Data,
    *,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
    progress: bool,
    test_every: int = 10,
) -> Run:
    """Trains from scratch with ``wrap(torch.optim.Adam(...), model)``."""
    model = make_model(seed)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrap(torch.optim.Adam(model.parameters(), lr=lr), model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(steps))
    run = Run(name)
    started = time.perf_counter()
    bar = tqdm(total=steps, desc=f"{name:10}", ncols=78, mininterval=0.5, disable=not progress, file=sys.stderr)
    for step, (images, labels) in enumerate(batches(data, steps, batch, seed), 1):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.losses.append(loss.item())
        if hasattr(optimizer, "compression_report"):
            run.bytes_sent.append(optimizer.compression_report()["last_bytes_sent"])
        if step % test_every == 0 or step == steps:
            test_loss, run.accuracy = evaluate(model, data)
            run.test_steps.append(step)
            run.test_losses.append(test_loss)
            bar.set_postfix_str(f"test loss {test_loss:.3f}", refresh=False)
        bar.update()
    bar.close()
    run.seconds = time.perf_counter() - started
    run.losses = hvd.allreduce(torch.tensor(run.losses), name=f"losses.{name}").tolist()
    run.fingerprints = hvd.allgather_object(fingerprint(model))
    if hasattr(optimizer, "compression_report"):
        run.report = optimizer.compression_report()
    return run


def size_text(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.1f} kB"


def print_results(dense: Run, onebit: Run, dense_bytes: float) -> None:
    """``dense_bytes``: what a rank sends per dense step."""
    report = onebit.report
    rows = []
    for run, steps_text in (
        (dense, size_text(dense_bytes)),
        (onebit, f"{size_text(onebit.bytes_sent[-1])} after step {report['freeze_step']}"),
    ):
        whole = sum(run.bytes_sent) or dense_bytes * len(run.losses)
        rows.append(
            [
                run.name,
                f"{run.losses[-1]:.4f}",
                f"{run.test_losses[-1]:.4f}",
                f"{100 * run.accuracy:.2f} %",
                steps_text,
                size_text(whole),
            ]
        )
    headers = ["", "train loss", "test loss", "test accuracy", "sent per rank and step", "sent in all"]
    print(tabulate(rows, headers, disable_numparse=True))
    print()
    if dense_bytes:  # a rank alone sends nothing
        times, dense_steps = report["ratio"], report["dense_steps"]
        print(f"A compressed step sends {dense_bytes / onebit.bytes_sent[-1]:.1f} times fewer bytes than a dense one,")
        print(f"the whole run {times:.1f} times fewer: its first {dense_steps} steps are plain Adam's.")
    for run in (dense, onebit):
        ranks = len(run.fingerprints)
        if len(set(run.fingerprints)) == 1:
            print(
                f"{run.name}: parameters of all {ranks} ranks are equal bit for bit, sha256 {run.fingerprints[0][:16]}"
            )
        else:
            print(f"{run.name}: PARAMETERS DIFFER between ranks: {[f[:16] for f in run.fingerprints]}")


def smoothed(values: list[float], window: int = 15) -> list[float]:
    """Running mean over the last ``window`` values."""
    parts = (values[max(0, k - window + 1) : k + 1] for k in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def draw(dense: Run, onebit: Run, dense_bytes: float, path: Path) -> None:
    """Loss curves and bytes of both runs. OSError if the picture cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = range(1, len(dense.losses) + 1)
    freeze = onebit.report["freeze_step"]
    colours = {dense.name: "#767676", onebit.name: "#1b6ca8"}
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")

    for run, width in ((dense, 3.2), (onebit, 1.6)):
        colour = colours[run.name]
        label = f"{run.name}, {100 * run.accuracy:.2f} % correct"
        left.plot(run.test_steps, run.test_losses, color=colour, linewidth=width, label=label)
        left.plot(steps, smoothed(run.losses), color=colour, linewidth=width / 2, linestyle=":")
    left.set(yscale="log", xlabel="step", ylabel="cross-entropy", title="Loss: test split, and training (dotted)")
    left.legend(frameon=False, loc="upper right")

    sent = torch.tensor(onebit.bytes_sent, dtype=torch.float64)
    right.plot(steps, [dense_bytes * s / 1e6 for s in steps], color=colours[dense.name], linewidth=3.2)
    right.plot(steps, (sent.cumsum(0) / 1e6).tolist(), color=colours[onebit.name], linewidth=1.6)
    last = len(dense.losses)
    for run, at, whole, step_bytes, shift in (
        (dense, 0.7 * last, 0.7 * dense_bytes * last, dense_bytes, (-10, 4)),
        (onebit, last, sent.sum().item(), onebit.bytes_sent[-1], (-4, 8)),
    ):
        right.annotate(
            f"{run.name}: {size_text(step_bytes)} per step",
            (at, whole / 1e6),
            xytext=shift,
            textcoords="offset points",
            ha="right",
            color=colours[run.name],
        )
    right.set(xlabel="step", ylabel="MB sent by one rank so far", title="Bytes on the wire", ylim=(0, None))
    for axes in (left, right):
        axes.axvline(freeze, color="#c8553d", linewidth=0.9, linestyle="--")
        axes.margins(x=0.01)
    left.annotate(
        "variance frozen,\n1 bit from here on",
        (freeze, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(5, 0),
        textcoords="offset points",
        color="#c8553d",
        fontsize=9,
    )
    ratio = onebit.report["ratio"]  # None for a rank alone
    saved = f": {ratio:.1f} times fewer bytes in the whole run" if ratio else ""
    figure.suptitle(f"CNN on digits, {hvd.size()} ranks{saved}")
    # Drawn first and written at once: what fails then is the disk.
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    pyplot.close(figure)
    path.write_bytes(picture.getvalue())


def save_picture(dense: Run, onebit: Run, dense_bytes: float, folder: Path) -> bool:
    """Draws into ``folder``; where that cannot be written, says why and returns False."""
    path = folder / PICTURE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draw(dense, onebit, dense_bytes, path)
    except OSError as error:
        print(f"cannot write {path}: {error.strerror}; the results above stand", file=sys.stderr)
        return False
    print(f"Curves: {path}")
    return True


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Adam against 1-bit Adam on handwritten digits.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--freeze-step", type=int, help="number of dense steps; a fifth of all if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the picture")
    options = parser.parse_args(arguments)
    options.freeze_step = options.freeze_step or max(1, options.steps // 5)
    if not 0 < options.freeze_step < options.steps:
        parser.error(f"--freeze-step {options.freeze_step} must be below --steps {options.steps}")
    return options


def main() -> int:
    options = parse()
    hvd.init()
    # Ranks on one machine share its cores.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))
    is_first = hvd.rank() == 0
    data = load_data()
    common = {
        "steps": options.steps,
        "batch": options.batch,
        "lr": options.lr,
        "seed": options.seed,
        "progress": is_first,
    }

    def plain(adam: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        return hvd.DistributedOptimizer(adam, named_parameters=model.named_parameters())

    def compressed(adam: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        return hvd.DistributedOneBitAdam(
            adam, named_parameters=model.named_parameters(), freeze_step=options.freeze_step
        )

    if is_first:
        numel = sum(p.numel() for p in make_model(0).parameters())
        print(
            f"{len(data.train_labels)} training and {len(data.test_labels)} test images, {numel} parameters, "
            f"{hvd.size()} ranks, {options.steps} steps of {options.batch} images per rank\n",
            flush=True,
        )
    dense = train("Adam", plain, data, **common)
    onebit = train("1-bit Adam", compressed, data, **common)
    dense_bytes = onebit.report["bytes_dense"] / options.steps
    ok = len(set(dense.fingerprints)) == len(set(onebit.fingerprints)) == 1
    if is_first:
        print_results(dense, onebit, dense_bytes)
        sys.stdout.flush()
        ok &= save_picture(dense, onebit, dense_bytes, options.output)
    hvd.shutdown()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
