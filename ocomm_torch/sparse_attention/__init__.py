"""Block-sparse attention for torch, with DeepSpeed's layouts. This module only re-exports names.

    from ocomm_torch.sparse_attention import BSLongformerSparsityConfig, SparseSelfAttention

    attention = SparseSelfAttention(BSLongformerSparsityConfig(num_heads=8, block=64))
    out = attention(query, key, value)              # each (batch, 8, sequence, dimension)

The package imports torch alone, and nothing of ocomm; ``huggingface`` inside it imports transformers, too.
"""

from ocomm_torch.sparse_attention.attention import SparseSelfAttention, pad_to_block, sparse_attention
from ocomm_torch.sparse_attention.configs import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)
from ocomm_torch.sparse_attention.errors import InvalidRequestError
from ocomm_torch.sparse_attention.flex import block_mask
from ocomm_torch.sparse_attention.layout import BlockLayout

__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "BlockLayout",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "InvalidRequestError",
    "LocalSlidingWindowSparsityConfig",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "block_mask",
    "pad_to_block",
    "sparse_attention",
]
