"""Block-sparse attention against dense attention, forward and backward, on one core of a CPU or on a GPU.

    python -m benchmarks.sparse_attention --seq 4096 8192 16384 [--rounds 5] [--device cuda] [--into FOLDER]

Sparse is BSLongformer with 3 blocks of 64 tokens in the window and one global block; dense is torch's
scaled_dot_product_attention. Both take turns on the same queries, keys and values, one sequence: 4 heads of 64 in
float32, on a GPU 16 in bfloat16. Times are of the processor, which on a machine with nothing else to do are those of
the clock; on a GPU they are its own. They are medians, and so is the ratio of each round. The sparse result is first
compared with that of a dense mask, where this is affordable. ``--into`` also writes the table to sparse-attention.md,
that of a GPU to gpu-sparse-attention.md.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.turns import MARK, SKIPPED
from ocomm.bench.kernels import commit, processor
from ocomm_torch.sparse_attention import BlockLayout, BSLongformerSparsityConfig, sparse_attention

HEADS, DIMENSION, BLOCK, WINDOW = 4, 64, 64, 3
GPU_HEADS = 16
#: Longest sequence that is compared with a dense mask, which takes a byte for each pair of tokens.
CHECKED = 4096

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def step(attention: Attention, inputs: list[torch.Tensor], grad: torch.Tensor) -> torch.Tensor:
    """Forward and backward; the output."""
    for x in inputs:
        x.grad = None
    out = attention(*inputs)
    out.backward(grad)
    return out.detach()


def timed(attention: Attention, inputs: list[torch.Tensor], grad: torch.Tensor) -> float:
    """Seconds of forward and backward: of the processor, or of the GPU on which the inputs are."""
    if grad.is_cuda:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        step(attention, inputs, grad)
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3
    started = time.process_time()
    step(attention, inputs, grad)
    return time.process_time() - started


def largest_difference(layout: BlockLayout, inputs: list[torch.Tensor], grad: torch.Tensor) -> float:
    """Of output and gradients from those with a dense mask."""
    seen = layout.blocks[:1].repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2).to(grad.device)
    found = []
    for attention in (
        lambda q, k, v: sparse_attention(q, k, v, layout),
        lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=seen),
    ):
        found.append([step(attention, inputs, grad), *(x.grad for x in inputs)])
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(*found, strict=True))


def row(seq_len: int, rounds: int, device: str) -> list[str]:
    """One line of the table."""
    heads, dtype = (HEADS, torch.float32) if device == "cpu" else (GPU_HEADS, torch.bfloat16)
    layout = BlockLayout.of(BSLongformerSparsityConfig(heads, BLOCK, num_sliding_window_blocks=WINDOW), seq_len)
    torch.manual_seed(0)
    shape = (1, heads, seq_len, DIMENSION)
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape, device=device, dtype=dtype)
    difference = f"{largest_difference(layout, inputs, grad):.0e}" if seq_len <= CHECKED else ""
    methods: tuple[Attention, Attention] = (
        scaled_dot_product_attention,
        lambda q, k, v: sparse_attention(q, k, v, layout),
    )
    timed(methods[1], inputs, grad)  # allocates
    times = [[timed(method, inputs, grad) for method in methods] for _ in range(rounds)]
    ratios = [dense / sparse for dense, sparse in times]
    dense, sparse = (1e3 * median(column) for column in zip(*times, strict=True))
    return [
        str(seq_len),
        f"{100 * layout.density:.1f} %",
        f"{dense:.0f}" if device == "cpu" else f"{dense:.3f}",
        f"{sparse:.1f}" if device == "cpu" else f"{sparse:.3f}",
        f"{median(ratios):.1f}",
        f"{min(ratios):.1f} to {max(ratios):.1f}",
        difference,
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, nargs="+", default=[4096, 8192, 16384], metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument("--into", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("nothing to measure: no GPU that Torch can use", file=sys.stderr)
        return SKIPPED
    torch.set_num_threads(1)
    head = ["tokens", "blocks", "dense ms", "sparse ms", "times", "min to max", "difference"]
    table = tabulate(
        [row(seq_len, options.rounds, options.device) for seq_len in options.seq],
        head,
        tablefmt="github",
        disable_numparse=True,
    )
    command = f"python -m benchmarks.sparse_attention --seq {' '.join(map(str, options.seq))} --rounds {options.rounds}"
    if options.device == "cuda":
        command, where = f"{command} --device cuda", torch.cuda.get_device_name()
    else:
        where = processor()
    machine = f"`{command}`; commit {commit()}, {where}, torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{table}\n\n{machine}")
    if options.into:
        page = options.into / ("sparse-attention.md" if options.device == "cpu" else "gpu-sparse-attention.md")
        above = page.read_text().partition(MARK)[0] if page.exists() else ""
        page.write_text(f"{above}{MARK}\n\n{table}\n\n{machine}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
