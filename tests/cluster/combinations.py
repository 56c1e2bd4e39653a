"""What happens with each trainer, launcher and optimizer: the list, and the table of it in the documentation.

    python -m tests.cluster.combinations [FILE]

writes the table into ``docs/trainers/combinations.md``, or FILE. ``test_combinations.py`` runs every row.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

MARK = "<!-- made by tests/cluster/combinations.py -->"
PAGE = Path(__file__).parents[2] / "docs" / "trainers" / "combinations.md"
TRAINED, WARNED, REFUSED = "as alone", "warned", "refused"


@dataclass(frozen=True)
class Row:
    """``trainer``, ``optimizer`` and ``how`` are those of ``train_combination.py``; ``says`` is in the message."""

    trainer: str
    launcher: str
    optimizer: str
    how: str
    outcome: str
    says: str = ""


_TWICE = "all ranks had the same gradients in the first 2 steps"
_ALIKE = "all ranks changed their parameters in the same way before the first 2 syncs"
_PLAIN = "wrap the plain optimizer, not a DistributedOneBitAdam"
_ADAM = "wraps torch.optim.Adam or AdamW, not ZeroRedundancyOptimizer"
_CLIPPED = "gradients were changed between backward and step(), before they were averaged"
_DDP = "averages gradients of a module in DistributedDataParallel, which averages them by itself"
_ONE_BIT_IN_DDP = "DistributedDataParallel averages the gradients that Distributed"
_DTENSOR = "is a DTensor, whose elements are in a local tensor of each rank"
_FLAT = "is a flat parameter of FullyShardedDataParallel, of which each rank has another part"

ROWS = (
    Row("Lightning", "torchrun", "onebit_lamb", "", TRAINED),
    Row("Lightning", "Lightning's own", "zero_one_adam", "", TRAINED),
    Row("Lightning", "ocommrun", "diloco", "", TRAINED),
    Row("Lightning", "torchrun", "dense", "", TRAINED),
    Row("Lightning", "torchrun", "onebit_adam", 'strategy="ddp"', REFUSED, _ONE_BIT_IN_DDP),
    Row("Lightning", "mpirun", "onebit_adam", "devices=1", WARNED, _TWICE),
    Row("Lightning", "ocommrun", "onebit_adam", "wrapped already", REFUSED, _PLAIN),
    Row("Trainer", "ocommrun", "birder", "", TRAINED),
    Row("Trainer", "ocommrun", "diloco", "", REFUSED, "OcommCallback needs a 1-bit optimizer"),
    Row("Trainer", "ocommrun", "onebit_adam", "no OcommCallback", REFUSED, _ONE_BIT_IN_DDP),
    Row("Accelerate", "torchrun", "birder", "", TRAINED),
    Row("Accelerate", "mpirun", "onebit_adam", "no hook", REFUSED, _ONE_BIT_IN_DDP),
    Row("Accelerate", "ocommrun", "dense", "no hook", REFUSED, _DDP),
    Row("DDP", "ocommrun", "onebit_lamb", "", TRAINED),
    Row("DDP", "ocommrun", "lion", "gloo", TRAINED),
    Row("DDP", "ocommrun", "birder", "no hook", REFUSED, _ONE_BIT_IN_DDP),
    Row("DDP", "torchrun", "dense", "no hook", REFUSED, _DDP),
    Row("DDP", "mpirun", "onebit_adam", "clip_grad_norm_", WARNED, _CLIPPED),
    Row("DDP", "mpirun", "diloco", "", REFUSED, "optimizer_hook needs the 1-bit optimizer that trains the module"),
    Row("DDP", "ocommrun", "diloco", "no hook", WARNED, _ALIKE),
    Row("FSDP2", "mpirun", "onebit_adam", "mesh", TRAINED),
    Row("FSDP2", "ocommrun", "dense", "across_hook", TRAINED),
    Row("FSDP2", "ocommrun", "onebit_adam", "", REFUSED, _DTENSOR),
    Row("FSDP2", "ocommrun", "dense", "", REFUSED, _DTENSOR),
    Row("FSDP2", "torchrun", "diloco", "", REFUSED, _DTENSOR),
    Row("FSDP1", "ocommrun", "onebit_adam", "", REFUSED, _FLAT),
    Row("FSDP1", "ocommrun", "dense", "", REFUSED, _FLAT),
    Row("FSDP1", "ocommrun", "diloco", "", REFUSED, _FLAT),
    Row("FSDP1", "ocommrun", "onebit_adam", "use_orig_params", REFUSED, "the ranks do not wrap the same optimizer"),
    Row("ZeRO", "ocommrun", "dense", "", TRAINED),
    Row("ZeRO", "ocommrun", "onebit_adam", "", REFUSED, _ADAM),
    Row("ZeRO", "ocommrun", "onebit_adam", "inside", REFUSED, "the ranks do not wrap the same optimizer"),
)


def table() -> str:
    lines = ["| trainer | launcher | optimizer | how | what happens |", "|---|---|---|---|---|"]
    for row in ROWS:
        said = f": {row.says} ..." if row.says else ""
        lines.append(f"| {row.trainer} | {row.launcher} | {row.optimizer} | {row.how} | {row.outcome}{said} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the table below the mark."""
    return f"{text.partition(MARK)[0]}{MARK}\n\n{table()}\n"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(page(target.read_text()))
