"""Hugging Face models with block-sparse attention: ``register`` gives it a name for ``attn_implementation``.

This module needs transformers; the package itself does not import it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, causal_mask_function

from ocomm_torch.sparse_attention.attention import SparseSelfAttention
from ocomm_torch.sparse_attention.configs import SparsityConfig
from ocomm_torch.sparse_attention.errors import InvalidRequestError

#: What a model may hand to an attention function, and this one does not compute: it must be None, or False.
UNSUPPORTED = ("sliding_window", "softcap", "head_mask", "position_bias", "s_aux", "output_attentions")


def register(name: str, sparsity_config: SparsityConfig, pad: bool = False, backend: str = "auto") -> None:
    """Makes ``attn_implementation=name`` block-sparse attention, in all models that use AttentionInterface.

        register("longformer_blocks", BSLongformerSparsityConfig(num_heads=12, block=64))
        model = AutoModel.from_pretrained("bert-base-uncased", attn_implementation="longformer_blocks")

    Causality is the model's, per token. The model's 2-D attention mask hides padding. Dropout of attention, caches of
    keys and packed sequences are refused when the model runs, and so is what ``UNSUPPORTED`` lists.

    Args:
        name: A new name. Registering it again replaces the layout.
        sparsity_config: Draws the layout. ``num_heads`` is the model's; ``attention="unidirectional"`` needs a causal
            model.
        pad: Whether sequences that the block does not divide are padded inside attention. A data collator with
            ``pad_to_multiple_of=block`` does it once for all layers.
        backend: As of ``sparse_attention``.
    """
    causal, bidirectional = (
        SparseSelfAttention(sparsity_config, causal=causal, pad=pad, backend=backend) for causal in (True, False)
    )

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        _refuse(name, sparsity_config, is_causal, dropout, options)
        attention = causal if is_causal else bidirectional
        out = attention(query, key, value, _padding(name, attention_mask), scaling)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _mask)


def _mask(
    *args: Any, mask_function: Any = causal_mask_function, attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """The model's 2-D mask, or None if it hides nothing. Other implementations make a mask of all pairs of tokens."""
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        raise InvalidRequestError(
            "the model masks more than padding and later tokens (packed sequences, a sliding window, or blocks that "
            "see each other), which block-sparse attention does not. Pass an attention_mask of (batch, sequence) for "
            "sequences that are not packed, or use another attn_implementation."
        )
    return None if attention_mask is None or attention_mask.all() else attention_mask


def _padding(name: str, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise InvalidRequestError(
            f"attn_implementation={name!r} takes an attention_mask of (batch, sequence), and this is of "
            f"{tuple(attention_mask.shape)}: it would have to hold all pairs of tokens."
        )
    return attention_mask == 0


def _refuse(name: str, config: SparsityConfig, is_causal: bool, dropout: float, options: dict[str, Any]) -> None:
    if dropout:
        raise InvalidRequestError(
            f"attn_implementation={name!r} has no dropout, and the model asks for {dropout}: set the attention dropout "
            "of its config to 0 (attention_dropout, attention_probs_dropout_prob or attn_pdrop)."
        )
    if config.unidirectional and not is_causal:
        raise InvalidRequestError(
            f"attn_implementation={name!r} has a layout with attention='unidirectional', and the model is not causal: "
            "make the layout with attention='bidirectional'."
        )
    used = [option for option in UNSUPPORTED if options.get(option) is not None and options[option] is not False]
    if used:
        raise InvalidRequestError(
            f"attn_implementation={name!r} does not compute {', '.join(used)}, which the model asks for: use another "
            "attn_implementation, or a model without it."
        )
