"""A layout that attention can compute: checked, without blocks that causality empties, with its rows grouped."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ocomm_torch.sparse_attention.configs import SparsityConfig
from ocomm_torch.sparse_attention.errors import InvalidRequestError


@dataclass(frozen=True)
class RowGroup:
    """Rows of blocks that attend to equally many blocks, so that they are computed as one batch.

    Attributes:
        heads: int64, (n,): head of each row.
        rows: int64, (n,): block of queries.
        columns: int64, (n, degree), ascending: blocks of keys.
        diagonal: Whether the last column of each row is its own block, half of which causality hides.
    """

    heads: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    diagonal: bool


class BlockLayout:
    """Which blocks of keys each block of queries attends to, on any number of sequences of one length.

    Args:
        blocks: (heads, rows, rows), of any type: 0 or False where nothing is computed, 1 or True else.
        block: Tokens in a block.
        causal: Whether a token attends to itself and earlier ones alone. Causality is per token, also inside a block;
            blocks of later keys are left out.

    Attributes:
        blocks: bool, (heads, rows, rows), on the CPU, without what causality leaves out.

    Raises:
        InvalidRequestError: ``blocks`` has another shape or other values, or a row has no block: its tokens would
            attend to nothing.
    """

    def __init__(self, blocks: torch.Tensor, block: int, causal: bool = False) -> None:
        if blocks.ndim != 3 or blocks.shape[1] != blocks.shape[2] or not blocks.numel():
            raise InvalidRequestError(
                f"a layout has the shape (heads, blocks of queries, blocks of keys), with as many of both, and this is "
                f"{tuple(blocks.shape)}."
            )
        if block < 1:
            raise InvalidRequestError(f"block={block} must be at least 1.")
        kept = blocks.detach().to("cpu", torch.bool)
        if not torch.equal(kept.to(blocks.dtype), blocks.detach().cpu()):
            raise InvalidRequestError("a layout has no values but 0 and 1: it says where attention is, not how much.")
        self.blocks = kept.tril() if causal else kept.clone()
        self.block = block
        self.causal = causal
        self._refuse_empty_rows()
        self._groups: dict[torch.device, list[RowGroup]] = {}

    @classmethod
    def of(cls, config: SparsityConfig, seq_len: int, causal: bool | None = None) -> BlockLayout:
        """The layout of ``config`` for sequences of ``seq_len`` tokens.

        Args:
            config: Whose ``make_layout`` and ``block`` count.
            seq_len: Tokens of a sequence, a multiple of the block.
            causal: Whether a token attends to itself and earlier ones alone. By default if ``config.attention`` is
                "unidirectional".

        Raises:
            InvalidRequestError: The block does not divide the sequence, or a row has no block.
        """
        config.num_blocks(seq_len)
        return cls(config.make_layout(seq_len), config.block, config.unidirectional if causal is None else causal)

    @property
    def heads(self) -> int:
        return self.blocks.shape[0]

    @property
    def num_blocks(self) -> int:
        """Blocks in a sequence."""
        return self.blocks.shape[1]

    @property
    def seq_len(self) -> int:
        """Tokens in a sequence."""
        return self.num_blocks * self.block

    @property
    def density(self) -> float:
        """Share of all blocks that are computed."""
        return float(self.blocks.to(torch.float64).mean())

    def groups(self, device: torch.device) -> list[RowGroup]:
        """All rows of all heads, those of equal degree together. They are made once for each device."""
        if device not in self._groups:
            self._groups[device] = self._group_rows(device)
        return self._groups[device]

    def _group_rows(self, device: torch.device) -> list[RowGroup]:
        degrees = self.blocks.sum(-1)
        on_diagonal = self.blocks.diagonal(dim1=1, dim2=2) & self.causal
        found = []
        for degree, diagonal in torch.stack([degrees, on_diagonal], -1).flatten(0, 1).unique(dim=0).tolist():
            chosen = (degrees == degree) & (on_diagonal == bool(diagonal))
            heads, rows = chosen.nonzero(as_tuple=True)
            columns = self.blocks[chosen].nonzero(as_tuple=True)[1].view(-1, degree)
            found.append(RowGroup(heads.to(device), rows.to(device), columns.to(device), bool(diagonal)))
        return found

    def _refuse_empty_rows(self) -> None:
        empty = (~self.blocks.any(-1)).nonzero().tolist()
        if not empty:
            return
        head, row = empty[0]
        causality = " that is not later" if self.causal else ""
        raise InvalidRequestError(
            f"block {row} of the queries (tokens {row * self.block} to {(row + 1) * self.block - 1}) of head {head} "
            f"attends to no block of keys{causality}, and so do {len(empty) - 1} more: their softmax is of nothing. "
            "Give each row a block, for instance its own."
        )
