"""Block-sparse attention as a function and as a module."""

from __future__ import annotations

import torch
from torch import nn

from ocomm_torch.sparse_attention import flex
from ocomm_torch.sparse_attention.configs import SparsityConfig, padded_length
from ocomm_torch.sparse_attention.errors import InvalidRequestError
from ocomm_torch.sparse_attention.gathered import gathered_attention
from ocomm_torch.sparse_attention.layout import BlockLayout

BACKENDS = ("auto", "flex", "gathered")
#: Layouts that a module keeps, for sequences of different lengths.
KEPT_LAYOUTS = 8


def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BlockLayout,
    *,
    key_padding_mask: torch.Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """softmax(scale Q K^T) V, where a query sees the keys that the layout says, and the softmax is over those.

    Args:
        query: (batch, heads, sequence, dimension), of a floating type.
        key: (batch, heads of keys, sequence, dimension), of the same type. Heads of keys divide the heads: each stands
            for as many consecutive heads of queries (grouped-query attention).
        value: (batch, heads of keys, sequence, value dimension), of the same type.
        layout: For as many heads and tokens. It also says whether attention is causal.
        key_padding_mask: bool, (batch, sequence): True for keys that are padding, which no query sees, as in
            ``torch.nn.MultiheadAttention``. A query without any key has the output 0.
        scale: Of the scores; by default 1 / sqrt(dimension).
        backend: "flex" is torch's flex_attention, compiled; "gathered" is this package's own, for any device and type;
            "auto" is the first on CUDA, except for float64, and the second elsewhere.

    Returns:
        (batch, heads, sequence, value dimension), of the queries' type. Differentiable once.

    Raises:
        InvalidRequestError: Shapes, types or devices do not fit each other or the layout; the message names them.
    """
    _check(query, key, value, layout, key_padding_mask)
    if backend not in BACKENDS:
        raise InvalidRequestError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}.")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    use_flex = flex.runs_on(query) if backend == "auto" else backend == "flex"
    compute = flex.flex_attention if use_flex else gathered_attention
    return compute(query, key, value, layout, key_padding_mask, scale)


class SparseSelfAttention(nn.Module):
    """Block-sparse attention of queries, keys and values that are already projected. It has no parameters.

    Args:
        sparsity_config: Draws the layout of each length of sequences. The last eight layouts are kept.
        causal: Whether a token attends to itself and earlier ones alone. By default if ``sparsity_config.attention`` is
            "unidirectional".
        pad: Whether sequences that the block does not divide are padded with keys that no query sees. The output has
            the length of the input. Without it such a sequence is an InvalidRequestError.
        backend: As of ``sparse_attention``.
    """

    def __init__(
        self, sparsity_config: SparsityConfig, causal: bool | None = None, pad: bool = False, backend: str = "auto"
    ) -> None:
        super().__init__()
        self.sparsity_config = sparsity_config
        self.causal = sparsity_config.unidirectional if causal is None else causal
        self.pad = pad
        self.backend = backend
        self._layouts: dict[int, BlockLayout] = {}

    def layout(self, seq_len: int) -> BlockLayout:
        """The layout for sequences of ``seq_len`` tokens, a multiple of the block."""
        if seq_len not in self._layouts:
            made = BlockLayout.of(self.sparsity_config, seq_len, self.causal)
            if len(self._layouts) >= KEPT_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[seq_len] = made
        return self._layouts[seq_len]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            query: (batch, heads, sequence, dimension), of a floating type.
            key: (batch, heads of keys, sequence, dimension).
            value: (batch, heads of keys, sequence, value dimension).
            key_padding_mask: bool, (batch, sequence): True for keys that are padding.
            scale: Of the scores; by default 1 / sqrt(dimension).

        Returns:
            (batch, heads, sequence, value dimension).

        Raises:
            InvalidRequestError: Shapes, types or devices do not fit each other or the layout; the message names them.
        """
        _check_dimensions(query, key, value)
        seq_len = query.shape[2]
        missing = padded_length(seq_len, self.sparsity_config.block) - seq_len if self.pad else 0
        layout = self.layout(seq_len + missing)
        if missing:
            _check_padding_mask(query, key_padding_mask)
            key_padding_mask = self._padded_mask(query, key_padding_mask, missing)
            query, key, value = (_longer(x, missing) for x in (query, key, value))
        out = sparse_attention(
            query, key, value, layout, key_padding_mask=key_padding_mask, scale=scale, backend=self.backend
        )
        return out[:, :, :seq_len]

    def _padded_mask(self, query: torch.Tensor, mask: torch.Tensor | None, missing: int) -> torch.Tensor | None:
        """The padding mask with ``missing`` more keys. Causality hides these already."""
        if mask is None:
            if self.causal:
                return None
            mask = torch.zeros(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
        return nn.functional.pad(mask, (0, missing), value=True)

    def extra_repr(self) -> str:
        config = self.sparsity_config
        return f"{type(config).__name__}, block={config.block}, heads={config.num_heads}, causal={self.causal}"


def pad_to_block(x: torch.Tensor, block: int, dim: int = 1, value: float = 0) -> torch.Tensor:
    """Pads a tensor at the end of one dimension to a multiple of ``block``.

    Args:
        x: Of any shape and type, such as token ids of (batch, sequence).
        block: Tokens in a block.
        dim: The dimension of the sequence.
        value: What to pad with: the id of the padding token for ids, 0 for an attention mask, True for a
            ``key_padding_mask``.

    Returns:
        ``x`` itself if nothing is missing, or a longer copy.

    Raises:
        InvalidRequestError: ``block`` is less than 1.
    """
    if block < 1:
        raise InvalidRequestError(f"block={block} must be at least 1.")
    missing = padded_length(x.shape[dim], block) - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_full(shape, value)], dim)


def _longer(x: torch.Tensor, missing: int) -> torch.Tensor:
    return nn.functional.pad(x, (0, 0, 0, missing))


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: BlockLayout, padding: torch.Tensor | None
) -> None:
    _check_dimensions(query, key, value)
    _check_padding_mask(query, padding)
    if query.shape[1] != layout.heads:
        raise InvalidRequestError(
            f"query has {query.shape[1]} heads and the layout {layout.heads}: make the layout with num_heads="
            f"{query.shape[1]}."
        )
    seq_len, block = query.shape[2], layout.block
    if seq_len % block:
        raise InvalidRequestError(
            f"a sequence of {seq_len} tokens is not divisible by block={block}: pad it to "
            f"{padded_length(seq_len, block)} tokens (pad=True of SparseSelfAttention, or pad_to_block)."
        )
    if seq_len != layout.seq_len:
        raise InvalidRequestError(
            f"query has {seq_len} tokens and the layout is for {layout.seq_len}: make one with BlockLayout.of(config, "
            f"{seq_len})."
        )


def _check_dimensions(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    given = {"query": query, "key": key, "value": value}
    for name, x in given.items():
        if x.ndim != 4:
            raise InvalidRequestError(
                f"{name} has the shape {tuple(x.shape)}, which must be (batch, heads, sequence, dimension)."
            )
        if x.dtype != query.dtype or x.device != query.device or not x.is_floating_point():
            raise InvalidRequestError(
                f"{name} is {x.dtype} on {x.device} and query {query.dtype} on {query.device}: all three must have one "
                "floating type and one device."
            )
    if key.shape[:3] != value.shape[:3] or key.shape[0] != query.shape[0] or key.shape[-1] != query.shape[-1]:
        raise InvalidRequestError(_shapes(given) + ": batch, sequence and dimension must agree.")
    if key.shape[2] != query.shape[2]:
        raise InvalidRequestError(
            _shapes(given) + ": keys are of other tokens than queries, and a layout is of a sequence with itself. "
            "Generate without a cache of keys (use_cache=False)."
        )
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        raise InvalidRequestError(_shapes(given) + ": the heads of keys must divide those of queries.")


def _shapes(given: dict[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items())


def _check_padding_mask(query: torch.Tensor, mask: torch.Tensor | None) -> None:
    wanted = (query.shape[0], query.shape[2])
    if mask is None or (mask.dtype is torch.bool and mask.shape == wanted and mask.device == query.device):
        return
    raise InvalidRequestError(
        f"key_padding_mask is {mask.dtype} {tuple(mask.shape)} on {mask.device}, and must be torch.bool {wanted} on "
        f"{query.device}, True for keys that are padding. Of an attention mask that is 1 for tokens: mask == 0."
    )
