"""Attention on gathered blocks: dense products of blocks of queries with the blocks of keys that they attend to.

Rows of a layout that attend to equally many blocks form a batch (``RowGroup``). Their keys and values are gathered into
one buffer, so that a row is an ordinary small attention. Backward computes the probabilities again, as FlashAttention
does (Dao et al., arXiv:2205.14135, section 3.1), so that a step keeps queries, keys, values and the output alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ocomm_torch.sparse_attention.errors import InvalidRequestError
from ocomm_torch.sparse_attention.layout import BlockLayout, RowGroup

#: Scores that are computed at a time, so that a piece with its probabilities stays in a core's cache.
SCORES_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class _Piece:
    """Rows of one group that are computed together.

    Attributes:
        queries: int64, (n,): the rows, as indices of blocks of all sequences and heads.
        keys: int64, (n * degree,): blocks of keys and values, likewise.
        diagonal: Whether causality hides half of each row's last block.
        padding: bool, (n, 1, degree * block): keys that are padding, or None.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    diagonal: bool
    padding: torch.Tensor | None


def gathered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BlockLayout,
    key_padding_mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Block-sparse attention by gathered blocks, on any device. Arguments as checked by ``sparse_attention``.

    Returns:
        (batch, heads, sequence, value dimension), of the queries' type. Sums are in float32 at least.
    """
    with torch.autocast(query.device.type, enabled=False):
        result: torch.Tensor = _Gathered.apply(query, key, value, layout, key_padding_mask, scale)
    return result


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: BlockLayout,
        padding: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        q, k, v = (_blocks(x, layout.block) for x in (query, key, value))
        out = q.new_empty(q.shape[0], layout.block, v.shape[-1])
        for piece in _pieces(layout, query, key, padding):
            p = _probabilities(piece, _queries(q, piece) * scale, _gather(k, piece))
            out[piece.queries] = torch.bmm(p, _gather(v, piece)).to(out.dtype)
        result = out.view(*query.shape[:3], value.shape[-1])
        ctx.save_for_backward(query, key, value, padding, result)
        ctx.layout, ctx.scale = layout, scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """With P the probabilities: dV = P^T dO, dP = dO V^T, dS = P (dP - rowsum(dO O)), dQ = dS K, dK = dS^T Q."""
        if torch.is_grad_enabled():
            # Torch's once_differentiable would leave the second derivative out without an error.
            raise InvalidRequestError(
                "block-sparse attention has no second derivative: call backward or grad with create_graph=False."
            )
        query, key, value, padding, result = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        q, k, v, o, do = (_blocks(x, layout.block) for x in (query, key, value, result, grad))
        work = _work_dtype(query.dtype)
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k, dtype=work), torch.zeros_like(v, dtype=work)
        for piece in _pieces(layout, query, key, padding):
            scaled, keys, of_out = _queries(q, piece) * scale, _gather(k, piece), _queries(do, piece)
            p = _probabilities(piece, scaled, keys)
            _add(dv, piece, torch.bmm(p.transpose(1, 2), of_out))
            inner = (of_out * o[piece.queries]).sum(-1, keepdim=True)
            ds = torch.bmm(of_out, _gather(v, piece).transpose(1, 2)).sub_(inner).mul_(p)
            dq[piece.queries] = (torch.bmm(ds, keys) * scale).to(dq.dtype)
            _add(dk, piece, torch.bmm(ds.transpose(1, 2), scaled))
        return (
            dq.view(query.shape),
            dk.to(key.dtype).view(key.shape),
            dv.to(value.dtype).view(value.shape),
            None,
            None,
            None,
        )


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """(batch, heads, sequence, dimension) as (batch * heads * blocks, block, dimension)."""
    return x.contiguous().view(x.shape[:3].numel() // block, block, x.shape[-1])


def _pieces(
    layout: BlockLayout, query: torch.Tensor, key: torch.Tensor, padding: torch.Tensor | None
) -> Iterator[_Piece]:
    """All rows of all sequences and heads, in pieces."""
    block = layout.block
    for group in layout.groups(query.device):
        queries, keys, batch = _indices(layout, group, query, key)
        rows = max(1, SCORES_AT_ONCE // (block * keys.shape[1] * block))
        for start in range(0, len(queries), rows):
            part = slice(start, start + rows)
            padded = None
            if padding is not None:
                columns = group.columns.repeat(query.shape[0], 1)[part]
                of_blocks = padding.view(len(padding), layout.num_blocks, block)
                padded = of_blocks[batch[part, None], columns].flatten(1)[:, None]
            yield _Piece(queries[part], keys[part].flatten(), group.diagonal, padded)


def _indices(
    layout: BlockLayout, group: RowGroup, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a group's rows in all sequences: indices of blocks of queries, of keys (.., degree), and of the sequence.

    Heads of queries share heads of keys if there are fewer of these.
    """
    heads, kv_heads, n = query.shape[1], key.shape[1], layout.num_blocks
    batch = torch.arange(query.shape[0], device=query.device)[:, None]
    queries = ((batch * heads + group.heads) * n + group.rows).flatten()
    first = (batch * kv_heads + group.heads // (heads // kv_heads)) * n
    keys = (first[..., None] + group.columns).flatten(0, 1)
    return queries, keys, batch.expand(-1, len(group.rows)).flatten()


def _queries(x: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """The blocks of a piece's queries, or of what has their places: (n, block, dimension)."""
    return x[piece.queries].to(_work_dtype(x.dtype))


def _gather(x: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """The blocks of a piece's keys or values: (n, degree * block, dimension)."""
    gathered = x.index_select(0, piece.keys).view(len(piece.queries), -1, x.shape[-1])
    return gathered.to(_work_dtype(x.dtype))


def _add(total: torch.Tensor, piece: _Piece, gradient: torch.Tensor) -> None:
    """Adds gradients of gathered keys or values to those of their blocks, in place."""
    total.index_add_(0, piece.keys, gradient.view(-1, *total.shape[1:]))


def _probabilities(piece: _Piece, scaled_queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The softmax of a piece's scores, (n, block, degree * block)."""
    scores = torch.bmm(scaled_queries, keys.transpose(1, 2))
    if piece.diagonal:
        block = scores.shape[1]
        later = torch.ones(block, block, dtype=torch.bool, device=scores.device).triu(1)
        scores[:, :, -block:].masked_fill_(later, -math.inf)
    if piece.padding is None:
        return scores.softmax(-1)
    scores.masked_fill_(piece.padding, -math.inf)
    # A query without keys has the softmax of nothing; its output is 0, as flex_attention's.
    nothing = scores.amax(-1, keepdim=True) == -math.inf
    return scores.softmax(-1).masked_fill_(nothing, 0.0)
