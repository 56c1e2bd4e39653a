"""Which blocks of keys each block of queries attends to: DeepSpeed's SparsityConfig classes, with its arguments.

A sequence is divided into blocks of ``block`` tokens. A layout says for each head, block of queries (a row) and block
of keys (a column) whether attention is computed there. docs/sparse-attention.md has the layouts as formulas, and where
they differ from DeepSpeed's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from ocomm_torch.sparse_attention.errors import InvalidRequestError

BIDIRECTIONAL, UNIDIRECTIONAL = "bidirectional", "unidirectional"


class SparsityConfig:
    """Base class of all layouts. A layout of one's own is a subclass with ``make_layout``.

    Args:
        num_heads: Heads of the layer.
        block: Tokens in a block.
        different_layout_per_head: Whether heads may have layouts of their own: other global blocks with
            ``FixedSparsityConfig``, other random blocks with ``VariableSparsityConfig`` and ``BigBirdSparsityConfig``.

    Raises:
        InvalidRequestError: A number is less than 1.
    """

    #: "unidirectional": a token attends to itself and to earlier ones alone.
    attention = BIDIRECTIONAL

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        _at_least(1, num_heads=num_heads, block=block)
        self.num_heads = num_heads
        self.block = block
        self.different_layout_per_head = different_layout_per_head

    @property
    def num_layout_heads(self) -> int:
        """Heads whose layouts may differ: all or one."""
        return self.num_heads if self.different_layout_per_head else 1

    @property
    def unidirectional(self) -> bool:
        """Whether the layout is made for causal attention."""
        return self.attention == UNIDIRECTIONAL

    def num_blocks(self, seq_len: int) -> int:
        """Blocks in a sequence.

        Args:
            seq_len: Tokens of the sequence.

        Raises:
            InvalidRequestError: The block does not divide the sequence.
        """
        if seq_len < 1 or seq_len % self.block:
            raise InvalidRequestError(
                f"a sequence of {seq_len} tokens is not divisible by block={self.block}: pad it to "
                f"{padded_length(seq_len, self.block)} tokens (pad=True of SparseSelfAttention, or pad_to_block)."
            )
        return seq_len // self.block

    def make_layout(self, seq_len: int) -> torch.Tensor:
        """Draws the layout of a sequence.

        Args:
            seq_len: Tokens of the sequence, a multiple of ``block``.

        Returns:
            int64, (num_heads, seq_len / block, seq_len / block): 1 where a block of queries (row) attends to a block of
            keys (column), else 0.

        Raises:
            InvalidRequestError: The block does not divide the sequence, or the sequence has too few blocks.
        """
        raise NotImplementedError(f"{type(self).__name__} has no make_layout")

    def _for_all_heads(self, layout: torch.Tensor) -> torch.Tensor:
        """``layout`` of bool, (num_layout_heads or 1, rows, columns), as ``make_layout`` returns it."""
        return layout.expand(self.num_heads, -1, -1).to(torch.int64)

    def _check_attention(self, attention: str) -> None:
        if attention not in (BIDIRECTIONAL, UNIDIRECTIONAL):
            raise InvalidRequestError(f"attention={attention!r} must be 'bidirectional' or 'unidirectional'.")
        self.attention = attention

    def _check_horizontal(self, horizontal_global_attention: bool) -> None:
        if horizontal_global_attention and self.unidirectional:
            raise InvalidRequestError(
                "horizontal_global_attention=True lets global blocks attend to later ones, which "
                "attention='unidirectional' forbids. Choose one of them."
            )

    def _enough_blocks(self, num_blocks: int, **needed: int) -> None:
        for name, number in needed.items():
            if num_blocks < number:
                raise InvalidRequestError(
                    f"{name}={number} is more than the {num_blocks} block(s) of {self.block} tokens in the sequence of "
                    f"{num_blocks * self.block}: make the sequence longer, or {name} or block smaller."
                )


class DenseSparsityConfig(SparsityConfig):
    """All blocks: attention without sparsity, to compare with.

    Args:
        num_heads: Heads of the layer.
        block: Tokens in a block.
        different_layout_per_head: Without effect.
    """

    def make_layout(self, seq_len: int) -> torch.Tensor:
        num_blocks = self.num_blocks(seq_len)
        return self._for_all_heads(torch.ones(1, num_blocks, num_blocks, dtype=torch.bool))


class FixedSparsityConfig(SparsityConfig):
    """Local windows side by side, and one or more blocks of each window for all: the fixed pattern of Child et al.,
    "Generating Long Sequences with Sparse Transformers" (arXiv:1904.10509), by blocks.

    Args:
        num_heads: Heads of the layer.
        block: Tokens in a block.
        different_layout_per_head: Whether heads may have different global blocks.
        num_local_blocks: Blocks in a window, within which all attend to all.
        num_global_blocks: Consecutive blocks of each window that stand for it: later rows, or all of them if attention
            is bidirectional, attend to them.
        attention: "bidirectional" or "unidirectional".
        horizontal_global_attention: Whether global blocks attend to all blocks, too.
        num_different_global_patterns: Of how many choices of global blocks the heads take one each, in turn: the last
            blocks of the window first, then those before them.

    Raises:
        InvalidRequestError: Numbers do not fit each other; the message names them.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = BIDIRECTIONAL,
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        patterns = num_different_global_patterns
        _at_least(1, num_local_blocks=num_local_blocks, num_global_blocks=num_global_blocks)
        _at_least(1, num_different_global_patterns=patterns)
        if num_local_blocks % num_global_blocks:
            raise InvalidRequestError(
                f"num_local_blocks={num_local_blocks} is not divisible by num_global_blocks={num_global_blocks}."
            )
        self._check_attention(attention)
        self._check_horizontal(horizontal_global_attention)
        if patterns > 1 and not different_layout_per_head:
            raise InvalidRequestError(
                f"num_different_global_patterns={patterns} needs different_layout_per_head=True: with False all heads "
                "have one layout."
            )
        if patterns > num_local_blocks // num_global_blocks:
            raise InvalidRequestError(
                f"num_different_global_patterns={patterns} is more than the {num_local_blocks // num_global_blocks} "
                f"that num_local_blocks={num_local_blocks} and num_global_blocks={num_global_blocks} allow."
            )
        self.num_local_blocks = num_local_blocks
        self.num_global_blocks = num_global_blocks
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = patterns

    def make_layout(self, seq_len: int) -> torch.Tensor:
        num_blocks = self.num_blocks(seq_len)
        window = torch.arange(num_blocks) // self.num_local_blocks
        local = _windows(window, self.unidirectional)
        patterns = [
            local
            | _global(
                num_blocks, self._spans(pattern, num_blocks), self.unidirectional, self.horizontal_global_attention
            )
            for pattern in range(self.num_different_global_patterns)
        ]
        heads = [patterns[head % len(patterns)] for head in range(self.num_heads)]
        return self._for_all_heads(torch.stack(heads))

    def _spans(self, pattern: int, num_blocks: int) -> list[tuple[int, int]]:
        """Where the global blocks of each window begin and end. Those of a short last window end with the sequence."""
        offset = self.num_local_blocks - (pattern + 1) * self.num_global_blocks
        latest = max(0, num_blocks - self.num_global_blocks)
        starts = [min(start + offset, latest) for start in range(0, num_blocks, self.num_local_blocks)]
        return [(start, start + self.num_global_blocks) for start in starts]


class VariableSparsityConfig(SparsityConfig):
    """Local windows of chosen sizes, chosen global blocks, and random blocks.

    Args:
        num_heads: Heads of the layer.
        block: Tokens in a block.
        different_layout_per_head: Whether each head has random blocks of its own.
        num_random_blocks: Blocks of each row that are chosen at random, among earlier ones and its own if attention is
            unidirectional. They may coincide with other blocks of the row.
        local_window_blocks: Blocks in the first window, in the second and so on; the last number is that of all further
            windows. All attend to all within a window.
        global_block_indices: Blocks that all rows attend to, or all later rows if attention is unidirectional. Those
            beyond the end of a sequence are left out.
        global_block_end_indices: If given, of the same length: all blocks from ``global_block_indices[i]`` to
            ``global_block_end_indices[i]`` (exclusive) are global.
        attention: "bidirectional" or "unidirectional".
        horizontal_global_attention: Whether global blocks attend to all blocks, too.
        seed: Of the random blocks. All ranks of a job need the same.

    Raises:
        InvalidRequestError: Numbers do not fit each other; the message names them.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = BIDIRECTIONAL,
        horizontal_global_attention: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _at_least(0, num_random_blocks=num_random_blocks)
        if not local_window_blocks or min(local_window_blocks) < 1:
            raise InvalidRequestError(
                f"local_window_blocks={list(local_window_blocks)} must have at least one number, and none less than 1."
            )
        self._check_attention(attention)
        self._check_horizontal(horizontal_global_attention)
        self.num_random_blocks = num_random_blocks
        self.local_window_blocks = list(local_window_blocks)
        self.global_spans = _spans(global_block_indices, global_block_end_indices)
        self.horizontal_global_attention = horizontal_global_attention
        self.seed = seed

    def make_layout(self, seq_len: int) -> torch.Tensor:
        num_blocks = self.num_blocks(seq_len)
        self._enough_blocks(num_blocks, num_random_blocks=self.num_random_blocks)
        layout = _windows(self._window_of_each_block(num_blocks), self.unidirectional)
        layout = layout | _global(num_blocks, self.global_spans, self.unidirectional, self.horizontal_global_attention)
        return self._for_all_heads(layout | random_blocks(self, num_blocks, self.num_random_blocks, self.seed))

    def _window_of_each_block(self, num_blocks: int) -> torch.Tensor:
        first = self.local_window_blocks
        further = -(-max(0, num_blocks - sum(first)) // first[-1])
        sizes = torch.tensor(first + [first[-1]] * further)
        return torch.repeat_interleave(torch.arange(len(sizes)), sizes)[:num_blocks]


class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, the first blocks for all, and random blocks: Zaheer et al., "Big Bird: Transformers for Longer
    Sequences" (arXiv:2007.14062), by blocks.

    Args:
        num_heads: Heads of the layer.
        block: Tokens in a block.
        different_layout_per_head: Whether each head has random blocks of its own.
        num_random_blocks: Blocks of each row that are chosen at random, among earlier ones and its own if attention is
            unidirectional. They may coincide with other blocks of the row.
        num_sliding_window_blocks: Width of the window: a row attends to ``num_sliding_window_blocks // 2`` blocks on
            each side, and to its own.
        num_global_blocks: Blocks at the start of the sequence that all rows attend to, and that attend to all blocks.
        attention: "bidirectional" or "unidirectional", which leaves out all later blocks.
        seed: Of the random blocks. All ranks of a job need the same.

    Raises:
        InvalidRequestError: Numbers do not fit each other; the message names them.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = BIDIRECTIONAL,
        seed: int = 0,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _at_least(0, num_random_blocks=num_random_blocks, num_global_blocks=num_global_blocks)
        _at_least(1, num_sliding_window_blocks=num_sliding_window_blocks)
        self._check_attention(attention)
        self.num_random_blocks = num_random_blocks
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.num_global_blocks = num_global_blocks
        self.seed = seed

    def make_layout(self, seq_len: int) -> torch.Tensor:
        num_blocks = self.num_blocks(seq_len)
        self._enough_blocks(
            num_blocks,
            num_random_blocks=self.num_random_blocks,
            num_sliding_window_blocks=self.num_sliding_window_blocks,
            num_global_blocks=self.num_global_blocks,
        )
        layout = _sliding_window(num_blocks, self.num_sliding_window_blocks)
        layout = layout | _global(num_blocks, [(0, self.num_global_blocks)], unidirectional=False, horizontal=True)
        layout = layout | random_blocks(self, num_blocks, self.num_random_blocks, self.seed)
        return self._for_all_heads(layout.tril() if self.unidirectional else layout)


class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, and chosen blocks for all: Beltagy et al., "Longformer: The Long-Document Transformer"
    (arXiv:2004.05150), by blocks.

    Args:
        num_heads: Heads of the layer.
        block: Tokens in a block.
        different_layout_per_head: Without effect.
        num_sliding_window_blocks: Width of the window: a row attends to ``num_sliding_window_blocks // 2`` blocks on
            each side, and to its own.
        global_block_indices: Blocks that all rows attend to, and that attend to all blocks. Those beyond the end of a
            sequence are left out.
        global_block_end_indices: If given, of the same length: all blocks from ``global_block_indices[i]`` to
            ``global_block_end_indices[i]`` (exclusive) are global.
        attention: "bidirectional" or "unidirectional", which leaves out all later blocks.

    Raises:
        InvalidRequestError: Numbers do not fit each other; the message names them.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = BIDIRECTIONAL,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _at_least(1, num_sliding_window_blocks=num_sliding_window_blocks)
        self._check_attention(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.global_spans = _spans(global_block_indices, global_block_end_indices)

    def make_layout(self, seq_len: int) -> torch.Tensor:
        num_blocks = self.num_blocks(seq_len)
        self._enough_blocks(num_blocks, num_sliding_window_blocks=self.num_sliding_window_blocks)
        layout = _sliding_window(num_blocks, self.num_sliding_window_blocks)
        layout = layout | _global(num_blocks, self.global_spans, unidirectional=False, horizontal=True)
        return self._for_all_heads((layout.tril() if self.unidirectional else layout)[None])


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window alone.

    Args:
        num_heads: Heads of the layer.
        block: Tokens in a block.
        num_sliding_window_blocks: Width of the window: a row attends to ``num_sliding_window_blocks // 2`` blocks on
            each side, and to its own.
        attention: "unidirectional", which leaves out all later blocks, or "bidirectional".

    Raises:
        InvalidRequestError: Numbers do not fit each other; the message names them.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: str = UNIDIRECTIONAL,
    ) -> None:
        super().__init__(num_heads, block)
        _at_least(1, num_sliding_window_blocks=num_sliding_window_blocks)
        self._check_attention(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks

    def make_layout(self, seq_len: int) -> torch.Tensor:
        num_blocks = self.num_blocks(seq_len)
        self._enough_blocks(num_blocks, num_sliding_window_blocks=self.num_sliding_window_blocks)
        layout = _sliding_window(num_blocks, self.num_sliding_window_blocks)
        return self._for_all_heads((layout.tril() if self.unidirectional else layout)[None])


def padded_length(seq_len: int, block: int) -> int:
    """The least multiple of ``block`` tokens, and at least one block, that holds ``seq_len`` tokens."""
    return max(1, -(-seq_len // block)) * block


def random_blocks(config: SparsityConfig, num_blocks: int, per_row: int, seed: int) -> torch.Tensor:
    """Draws blocks at random, the same for the same arguments on every machine.

    Args:
        config: Whose heads and direction count: with "unidirectional" no block is later than its row.
        num_blocks: Rows and columns.
        per_row: Blocks to draw in each row, without repetition; in the first rows of a unidirectional layout as many as
            there are.
        seed: Of the generator.

    Returns:
        bool, (num_layout_heads, num_blocks, num_blocks).
    """
    generator = random.Random(seed)
    drawn = torch.zeros(config.num_layout_heads, num_blocks, num_blocks, dtype=torch.bool)
    for head in drawn:
        for row, blocks in enumerate(head):
            among = row + 1 if config.unidirectional else num_blocks
            blocks[generator.sample(range(among), min(per_row, among))] = True
    return drawn


def _windows(window: torch.Tensor, unidirectional: bool) -> torch.Tensor:
    """Blocks of one window attend to each other. ``window``: (num_blocks,), the number of each block's window."""
    local = window[:, None] == window
    return local.tril() if unidirectional else local


def _sliding_window(num_blocks: int, width: int) -> torch.Tensor:
    index = torch.arange(num_blocks)
    return (index[:, None] - index).abs() <= width // 2


def _global(num_blocks: int, spans: Sequence[tuple[int, int]], unidirectional: bool, horizontal: bool) -> torch.Tensor:
    """Blocks of ``spans`` (start, end) are attended to by all rows, or by those from the span's start on, and attend to
    all blocks if ``horizontal``."""
    layout = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)
    for start, end in spans:
        layout[start if unidirectional else 0 :, start:end] = True
        if horizontal:
            layout[start:end] = True
    return layout


def _spans(starts: Sequence[int], ends: Sequence[int] | None) -> list[tuple[int, int]]:
    if ends is not None and len(starts) != len(ends):
        raise InvalidRequestError(
            f"global_block_indices has {len(starts)} number(s), global_block_end_indices {len(ends)}: each start needs "
            "an end."
        )
    spans = list(zip(starts, [start + 1 for start in starts] if ends is None else ends, strict=True))
    for start, end in spans:
        if not 0 <= start < end:
            raise InvalidRequestError(
                f"global blocks from {start} to {end} (exclusive) are none: starts in global_block_indices must be at "
                "least 0, and less than their ends in global_block_end_indices."
            )
    return spans


def _at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise InvalidRequestError(f"{name}={number} must be at least {least}.")
