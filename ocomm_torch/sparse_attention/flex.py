"""Attention by torch's flex_attention (Dong et al., arXiv:2412.05496), with a BlockMask made from the layout.

Nothing here has as many elements as there are pairs of tokens: the mask looks up blocks in the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ocomm_torch.sparse_attention.errors import InvalidRequestError
from ocomm_torch.sparse_attention.layout import BlockLayout

#: flex_attention's kernels divide the mask's blocks into tiles of at most so many tokens.
TILE = 128

#: What masks of a layout are made of, by device and by whether all blocks are masked: layers and steps share it.
_made: WeakKeyDictionary[BlockLayout, dict[tuple[torch.device, bool], tuple[torch.Tensor, ...]]] = WeakKeyDictionary()

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def runs_on(query: torch.Tensor) -> bool:
    """Whether flex_attention has kernels for forward and backward on this tensor."""
    return query.device.type == "cuda" and query.dtype is not torch.float64 and _module() is not None


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BlockLayout,
    key_padding_mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Block-sparse attention by a compiled flex_attention. Arguments as checked by ``sparse_attention``.

    Returns:
        (batch, heads, sequence, value dimension), of the queries' type.
    """
    mask = block_mask(layout, query.device, key_padding_mask)
    grouped = query.shape[1] != key.shape[1]
    result: torch.Tensor = _compiled()(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return result


def block_mask(layout: BlockLayout, device: torch.device, key_padding_mask: torch.Tensor | None = None) -> Any:
    """Makes the BlockMask of a layout.

    Its blocks have the least common multiple of the layout's block and of 128 tokens, so that flex_attention's kernels
    accept them. A block of the mask of which the layout has a part is computed whole and masked; so 128 tokens in a
    block of the layout, or a multiple, cost least.

    Args:
        layout: Which blocks of keys each block of queries attends to.
        device: Where the mask's tensors are to be.
        key_padding_mask: bool, (batch, sequence): True for keys that are padding. All blocks are masked then.

    Returns:
        A ``torch.nn.attention.flex_attention.BlockMask``, for any batch, or for that of ``key_padding_mask``.

    Raises:
        InvalidRequestError: This torch has no flex_attention, or none for BlockMasks of any number of tokens.
    """
    if _module() is None:
        raise InvalidRequestError(
            f"torch {torch.__version__} is too old for backend='flex', which is its flex_attention: use 'gathered'."
        )
    made = _made.setdefault(layout, {})
    key = device, key_padding_mask is not None
    if key not in made:
        made[key] = _tensors(layout, *key)
    table, *blocks = made[key]
    return _module().BlockMask.from_kv_blocks(
        *blocks,
        BLOCK_SIZE=math.lcm(layout.block, TILE),
        mask_mod=_mask_mod(layout, table, key_padding_mask),
        seq_lengths=(layout.seq_len, layout.seq_len),
    )


def _tensors(layout: BlockLayout, device: torch.device, all_masked: bool) -> tuple[torch.Tensor, ...]:
    """The layout itself, then numbers and columns of the mask's masked blocks, and of those that need no mask."""
    some, whole = _coarse(layout, math.lcm(layout.block, TILE) // layout.block)
    if layout.causal:
        whole = whole.tril(-1)
    if all_masked:
        whole = torch.zeros_like(whole)
    return layout.blocks.to(device), *_ordered(some & ~whole, device), *_ordered(whole, device)


def _coarse(layout: BlockLayout, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where squares of ``factor`` x ``factor`` blocks have some of the layout's, and where all, (heads, rows, rows)."""
    missing = -layout.num_blocks % factor
    padded = torch.nn.functional.pad(layout.blocks, (0, missing, 0, missing))
    rows = padded.shape[1] // factor
    squares = padded.view(layout.heads, rows, factor, rows, factor)
    return squares.any(-1).any(2), squares.all(-1).all(2)


def _ordered(blocks: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks per row (1, heads, rows), and their columns first among all (1, heads, rows, rows), both int32."""
    counts = blocks.sum(-1)
    columns = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return counts.to(device, torch.int32)[None], columns.to(device, torch.int32)[None]


def _mask_mod(layout: BlockLayout, table: torch.Tensor, key_padding_mask: torch.Tensor | None) -> MaskMod:
    """Whether a query sees a key, for tokens that stand at these places. ``table``: the layout on the device."""
    block = layout.block

    def in_layout(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return table[h, q // block, kv // block]

    def causal(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return in_layout(b, h, q, kv) & (q >= kv)

    seen = causal if layout.causal else in_layout
    if key_padding_mask is None:
        return seen
    real = ~key_padding_mask

    def not_padded(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return seen(b, h, q, kv) & real[b, kv]

    return not_padded


@cache
def _module() -> Any:
    """torch.nn.attention.flex_attention, or None where it is missing or too old for BlockMasks of any length."""
    try:
        from torch.nn.attention import flex_attention as module
    except ImportError:
        return None
    return module if "seq_lengths" in signature(module.BlockMask.from_kv_blocks).parameters else None


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    compiled: Callable[..., torch.Tensor] = torch.compile(_module().flex_attention)
    return compiled
