"""Block-sparse attention in Hugging Face models: with a dense layout it gives what they compute without it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.worlds import MPI_SIZE

pytestmark = [
    pytest.mark.long,  # transformers is installed for the long tier alone
    pytest.mark.skipif(MPI_SIZE > 0, reason="one process is enough: nothing here is of the network"),
]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from ocomm_torch.sparse_attention import (  # noqa: E402
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    InvalidRequestError,
    huggingface,
)

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50}


def models(kind: str, implementation: str, **more: Any) -> Any:
    """A small model with random weights, the same for all implementations."""
    if kind == "bert":
        config = transformers.BertConfig(**SIZES, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, **more)
        make = transformers.BertModel
    else:
        config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **more)
        make = transformers.LlamaModel
    torch.manual_seed(0)
    return make._from_config(config, attn_implementation=implementation).double()


def batch() -> dict[str, Any]:
    torch.manual_seed(1)
    mask = torch.ones(2, 32, dtype=torch.int64)
    mask[1, 21:] = 0
    return {"input_ids": torch.randint(50, (2, 32)), "attention_mask": mask}


def gradients(model: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    out = model(**given).last_hidden_state[given["attention_mask"].bool()]
    out.square().sum().backward()
    return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_dense_layout_changes_nothing(kind: str, padded: bool) -> None:
    huggingface.register("blocks", DenseSparsityConfig(4, block=8))
    given = batch()
    if not padded:
        given["attention_mask"].fill_(1)
    ours, our_grads = gradients(models(kind, "blocks"), given)
    wanted, wanted_grads = gradients(models(kind, "sdpa"), given)
    assert (ours - wanted).abs().max() <= 1e-10
    assert our_grads.keys() == wanted_grads.keys()
    for name, grad in wanted_grads.items():
        assert (our_grads[name] - grad).abs().max() <= 1e-10 * max(1.0, float(grad.abs().max())), name


def test_padding_inside_attention_equals_a_padded_batch() -> None:
    config = BSLongformerSparsityConfig(4, block=8, num_sliding_window_blocks=1)
    huggingface.register("blocks", config)
    huggingface.register("padded blocks", config, pad=True)
    given = batch()
    given["attention_mask"][:, 29:] = 0
    wanted = models("bert", "blocks")(**given).last_hidden_state[:, :29]
    cut = {name: x[:, :29] for name, x in given.items()}
    found = models("bert", "padded blocks")(**cut).last_hidden_state
    seen = cut["attention_mask"].bool()
    assert (found - wanted)[seen].abs().max() <= 1e-9
    with pytest.raises(InvalidRequestError, match="29 tokens is not divisible by block=8: pad it to 32"):
        models("bert", "blocks")(**cut)


def test_what_it_does_not_compute_is_refused() -> None:
    huggingface.register("blocks", DenseSparsityConfig(4, block=8))
    huggingface.register("uni", BSLongformerSparsityConfig(4, block=8, attention="unidirectional"))
    given = batch()
    dropping = models("llama", "blocks", attention_dropout=0.1).train()
    with pytest.raises(InvalidRequestError, match=r"asks for 0\.1: set the attention dropout"):
        dropping(**given)
    with pytest.raises(InvalidRequestError, match="the model is not causal"):
        models("bert", "uni")(**given)
    model = models("llama", "blocks").eval()
    packed = torch.arange(16).repeat(2)[None].expand(2, -1)
    with pytest.raises(InvalidRequestError, match="packed sequences"):
        model(input_ids=given["input_ids"], position_ids=packed, use_cache=False)
    filled = model(input_ids=given["input_ids"])
    cache = filled.cache if "cache" in filled else filled.past_key_values  # its name before transformers 5.24
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    with pytest.raises(InvalidRequestError, match="use_cache=False"):
        model(input_ids=given["input_ids"][:, :8], **{name: cache})
    with pytest.raises(InvalidRequestError, match=r"takes an attention_mask of \(batch, sequence\)"):
        model(input_ids=given["input_ids"], attention_mask=torch.ones(2, 1, 32, 32))
    huggingface.register("three heads", DenseSparsityConfig(3, block=8))
    with pytest.raises(InvalidRequestError, match="query has 4 heads and the layout 3"):
        models("llama", "three heads")(**given)
