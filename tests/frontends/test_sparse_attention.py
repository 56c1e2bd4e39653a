"""Block-sparse attention: layouts against DeepSpeed's, numbers against masked dense attention, bad input by name."""

from __future__ import annotations

import ast
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ocomm_torch import sparse_attention as sparse  # noqa: E402
from ocomm_torch.sparse_attention import BlockLayout, InvalidRequestError  # noqa: E402
from ocomm_torch.sparse_attention import flex as flex_module  # noqa: E402
from ocomm_torch.sparse_attention import gathered as gathered_module  # noqa: E402
from ocomm_torch.sparse_attention.configs import random_blocks  # noqa: E402
from tests.frontends.sparse_layouts import (  # noqa: E402
    DIGESTS,
    SETTINGS,
    Setting,
    digest,
    random_blocks_of,
    without_random_blocks,
)
from tests.tiers import few  # noqa: E402
from tests.worlds import MPI_SIZE  # noqa: E402

pytestmark = pytest.mark.skipif(MPI_SIZE > 0, reason="one process is enough: nothing here is of the network")

RANDOM = [name for name, setting in SETTINGS.items() if random_blocks_of(setting)]
#: A layout of each class, with short windows, layouts per head and random blocks among them.
ONE_OF_EACH = (
    "dense",
    "fixed, 4 patterns, uni, short",
    "variable, random per head, uni",
    "bigbird, per head",
    "longformer, spans",
    "local",
)
LONGFORMER: dict[str, Any] = {"num_heads": 2, "block": 4}


def config_of(setting: Setting, **more: Any) -> Any:
    name, arguments, _ = setting
    return getattr(sparse, f"{name}SparsityConfig")(**arguments, **more)


def layout_of(setting: Setting, **more: Any) -> Any:
    return config_of(setting, **more).make_layout(setting[2])


def dense(q: Any, k: Any, v: Any, layout: BlockLayout, padding: Any = None) -> Any:
    """Attention with a mask of all pairs of tokens. A query without keys has the output 0."""
    tokens = layout.seq_len
    seen = layout.blocks.repeat_interleave(layout.block, 1).repeat_interleave(layout.block, 2)[None]
    if layout.causal:
        seen = seen & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if padding is not None:
        seen = seen & ~padding[:, None, None]
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) / math.sqrt(q.shape[-1])
    p = torch.where(seen, scores, -math.inf).softmax(-1)
    return torch.where(seen.any(-1, keepdim=True), p, 0.0) @ v


def inputs(layout: BlockLayout, batch: int = 2, kv_heads: int | None = None, dtype: Any = torch.float64) -> list[Any]:
    """Queries, keys and values, of dimensions 8, 8 and 6, in the order of memory that projections leave."""
    torch.manual_seed(0)
    heads = [layout.heads, kv_heads or layout.heads, kv_heads or layout.heads]
    shapes = [(batch, layout.seq_len, h, d) for h, d in zip(heads, (8, 8, 6), strict=True)]
    return [torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def check(layout: BlockLayout, padding: Any = None, kv_heads: int | None = None, batch: int = 2) -> None:
    """Forward and gradients are those of masked dense attention."""
    expected, found = (inputs(layout, batch, kv_heads) for _ in range(2))
    out = sparse.sparse_attention(*found, layout, key_padding_mask=padding)
    wanted = dense(*expected, layout, padding)
    assert (out - wanted).abs().max() <= 1e-12
    weights = torch.randn(out.shape, dtype=out.dtype)
    (out * weights).sum().backward()
    (wanted * weights).sum().backward()
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= 1e-11


# Layouts


def test_there_are_enough_settings() -> None:
    assert len(SETTINGS) >= 40
    assert DIGESTS.keys() == SETTINGS.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_layout_without_random_blocks_is_deepspeeds(name: str) -> None:
    layout = layout_of(without_random_blocks(SETTINGS[name]))
    assert layout.dtype is torch.int64
    assert digest(layout) == DIGESTS[name]


@pytest.mark.parametrize("name", RANDOM)
def test_random_blocks_are_added_to_the_others(name: str) -> None:
    setting = SETTINGS[name]
    config, base = config_of(setting, seed=3), layout_of(without_random_blocks(setting))
    layout = config.make_layout(setting[2])
    number, blocks = random_blocks_of(setting), base.shape[1]
    drawn = random_blocks(config, blocks, number, seed=3)
    most = torch.full((blocks,), number)
    if config.unidirectional:
        assert not drawn.triu(1).any()
        most = most.minimum(torch.arange(1, blocks + 1))
    assert torch.equal(drawn.sum(-1), most.expand(drawn.shape[0], -1))
    assert torch.equal(layout.bool(), base.bool() | drawn)
    assert len({digest(head[None]) for head in layout}) == config.num_layout_heads


@pytest.mark.parametrize("name", RANDOM)
def test_random_blocks_depend_on_the_seed_and_on_nothing_else(name: str) -> None:
    layouts = []
    for seed, of_torch in ((1, 5), (1, 6), (2, 6)):
        torch.manual_seed(of_torch)
        layouts.append(layout_of(SETTINGS[name], seed=seed))
    assert torch.equal(layouts[0], layouts[1]) and not torch.equal(layouts[1], layouts[2])


# Numbers


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", few(SETTINGS, ONE_OF_EACH))
def test_attention_is_that_of_a_dense_mask(name: str, causal: bool) -> None:
    setting = SETTINGS[name]
    check(BlockLayout.of(config_of(setting), setting[2], causal))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_many_pieces_is_that_of_a_dense_mask(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_module, "SCORES_AT_ONCE", 400)  # at most three rows at once
    check(BlockLayout.of(config_of(SETTINGS["bigbird, per head"]), 80, causal), batch=3)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads_may_share_keys_and_values(kv_heads: int) -> None:
    setting = SETTINGS["fixed, 4 patterns, uni, short"]
    check(BlockLayout.of(config_of(setting), setting[2]), kv_heads=kv_heads)


@pytest.mark.parametrize("causal", [False, True])
def test_no_query_sees_padding(causal: bool) -> None:
    layout = BlockLayout.of(sparse.LocalSlidingWindowSparsityConfig(2, 4, attention="bidirectional"), 40, causal)
    padding = torch.zeros(3, 40, dtype=torch.bool)
    padding[0, 30:] = padding[1, :13] = padding[1, 20:33] = True  # some queries of the second see no key at all
    check(layout, padding, batch=3)


def test_an_empty_batch_has_an_empty_result() -> None:
    layout = BlockLayout.of(sparse.BSLongformerSparsityConfig(**LONGFORMER), 32)
    q, k, v = inputs(layout, batch=0)
    out = sparse.sparse_attention(q, k, v, layout, key_padding_mask=torch.zeros(0, 32, dtype=torch.bool))
    out.sum().backward()
    assert out.shape == (0, 2, 32, 6) and q.grad.shape == q.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_low_precision_are_in_float32(dtype: Any) -> None:
    layout = BlockLayout.of(sparse.BSLongformerSparsityConfig(**LONGFORMER), 64, causal=True)
    found = inputs(layout, dtype=dtype)
    expected = [x.detach().float().requires_grad_() for x in found]
    for precise, given in ((False, found), (True, expected)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not precise):
            out = sparse.sparse_attention(*given, layout)
        out.float().square().sum().backward()
        assert out.dtype is given[0].dtype
    one_rounding = torch.finfo(dtype).eps
    for ours, theirs in zip(found, expected, strict=True):
        # The gradient of the output is rounded once, the output once, and the result.
        assert (ours.grad - theirs.grad).norm() <= 2 * one_rounding * theirs.grad.norm()


def test_a_module_pads_what_the_block_does_not_divide() -> None:
    for attention in ("unidirectional", "bidirectional"):
        config = sparse.BSLongformerSparsityConfig(2, 4, attention=attention)
        module = sparse.SparseSelfAttention(config, pad=True)
        q, k, v = inputs(module.layout(64))
        whole = [sparse.pad_to_block(x[:, :, :61], 4, dim=2) for x in (q, k, v)]
        padding = torch.zeros(2, 61, dtype=torch.bool)
        padding[1, 50:] = True
        for mask in (None, padding):
            full = sparse.pad_to_block(torch.zeros(2, 61, dtype=torch.bool) if mask is None else mask, 4, value=True)
            wanted = dense(*whole, module.layout(64), full)[:, :, :61]
            out = module(*(x[:, :, :61] for x in (q, k, v)), mask)
            assert out.shape == (2, 2, 61, 6) and (out - wanted).abs().max() <= 1e-12


def test_a_module_keeps_a_few_layouts() -> None:
    module = sparse.SparseSelfAttention(sparse.DenseSparsityConfig(1, block=2))
    first = module.layout(2)
    assert module.layout(2) is first and "block=2" in repr(module)
    for blocks in range(2, 12):
        module.layout(2 * blocks)
    assert len(module._layouts) == 8 and module.layout(2) is not first


def test_memory_grows_with_the_blocks_and_not_with_the_square_of_the_sequence() -> None:
    """Counted: elements of the largest tensor that forward and backward make."""

    class Largest(torch.overrides.TorchFunctionMode):
        elements = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.numel())
            return result

    tokens = 1024
    layout = BlockLayout.of(sparse.LocalSlidingWindowSparsityConfig(1, 16), tokens)
    with Largest() as largest:
        sparse.sparse_attention(*inputs(layout, batch=1), layout).sum().backward()
    assert largest.elements <= 2 * 16 * tokens, "two blocks of scores for each token"


# flex_attention: kernels need CUDA, the mask does not


@pytest.mark.parametrize("name", few(SETTINGS, ONE_OF_EACH))
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_mask_has_the_pairs_of_the_layout_and_no_more_blocks_than_needed(name: str, causal: bool) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="torch has flex_attention since 2.5")
    kind, arguments, tokens = SETTINGS[name]
    setting = (kind, {**arguments, "block": 32}, 32 * tokens // arguments.get("block", 16))
    layout = BlockLayout.of(config_of(setting), setting[2], causal)
    mask = sparse.block_mask(layout, torch.device("cpu"))
    pairs = flex.create_mask(mask.mask_mod, 1, layout.heads, layout.seq_len, layout.seq_len, device="cpu")
    wanted = layout.blocks.repeat_interleave(32, 1).repeat_interleave(32, 2)
    assert torch.equal(pairs[0], wanted.tril() if causal else wanted)
    ours = flex.create_block_mask(mask.mask_mod, 1, layout.heads, layout.seq_len, layout.seq_len, device="cpu")
    assert mask.BLOCK_SIZE == (128, 128) and mask.shape == ours.shape
    assert torch.equal(mask.to_dense(), ours.to_dense())
    for kind in ("kv", "full_kv", "q", "full_q"):
        assert torch.equal(getattr(mask, f"{kind}_num_blocks"), getattr(ours, f"{kind}_num_blocks")), kind


def test_a_block_mask_hides_padding() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="torch has flex_attention since 2.5")
    layout = BlockLayout.of(sparse.BSLongformerSparsityConfig(2, 128), 512, causal=True)
    padding = torch.zeros(2, 512, dtype=torch.bool)
    padding[1, 300:] = True
    mask = sparse.block_mask(layout, torch.device("cpu"), padding)
    assert not mask.full_kv_num_blocks.any()
    pairs = flex.create_mask(mask.mask_mod, 2, 2, 512, 512, device="cpu")
    assert not pairs[1, :, :, 300:].any() and pairs[0, 0, 511, 511]


@pytest.mark.long  # compiles
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
@pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")  # torch's own use
# torch's own use, too: it makes an object of its autograd function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# and says once where its graph ends, if masks were made in the process before
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
@pytest.mark.parametrize("block, tokens", [(32, 416), (128, 512)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_and_gathered_blocks_have_one_result(
    causal: bool, padded: bool, block: int, tokens: int
) -> None:
    """Forward alone: torch has no backward of flex_attention on the CPU."""
    torch.compiler.reset()  # torch 2.13 cannot compile a second length there
    layout = BlockLayout.of(sparse.BSLongformerSparsityConfig(2, block), tokens, causal)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, tokens, 32) for heads in (2, 1, 1))
    padding = None
    if padded:
        padding = torch.zeros(2, tokens, dtype=torch.bool)
        padding[1, tokens - 70 :] = True
    with torch.no_grad():
        ours, theirs = (
            sparse.sparse_attention(q, k, v, layout, key_padding_mask=padding, backend=backend)
            for backend in ("gathered", "flex")
        )
    assert (ours - theirs).abs().max() <= 1e-5


# Bad input


LAYOUT = BlockLayout(torch.ones(2, 4, 4), 4)
CALLS: dict[str, tuple[str, Any]] = {
    "sequence": (
        r"a sequence of 18 tokens is not divisible by block=4: pad it to 20 tokens \(pad=True",
        lambda: attend((1, 2, 18, 8)),
    ),
    "sequence of a config": (
        r"a sequence of 18 tokens is not divisible by block=4: pad it to 20",
        lambda: sparse.SparseSelfAttention(sparse.FixedSparsityConfig(**LONGFORMER))(*[torch.zeros(1, 2, 18, 8)] * 3),
    ),
    "another length": (r"query has 20 tokens and the layout is for 16", lambda: attend((1, 2, 20, 8))),
    "heads": (r"query has 3 heads and the layout 2: make the layout with num_heads=3", lambda: attend((1, 3, 16, 8))),
    "heads of keys": (
        r"key \(1, 3, 16, 8\).*heads of keys must divide",
        lambda: attend((1, 2, 16, 8), (1, 3, 16, 8)),
    ),
    "keys of a cache": (
        r"query \(1, 2, 16, 8\), key \(1, 2, 20, 8\).*use_cache=False",
        lambda: attend(key=(1, 2, 20, 8)),
    ),
    "dimension": (r"key \(1, 2, 16, 6\).*must agree", lambda: attend(key=(1, 2, 16, 6))),
    "three dimensions": (r"value has the shape \(2, 16, 8\)", lambda: attend(value=(2, 16, 8))),
    "types": (
        r"key is torch.float64 on cpu and query torch.float32",
        lambda: sparse.sparse_attention(
            torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 8).double(), torch.zeros(1, 2, 16, 8), LAYOUT
        ),
    ),
    "integers": (
        r"query is torch.int64",
        lambda: sparse.sparse_attention(*[torch.zeros(1, 2, 16, 8, dtype=torch.int64)] * 3, LAYOUT),
    ),
    "padding mask": (
        r"key_padding_mask is torch.float32 \(1, 16\) on cpu, and must be torch.bool \(1, 16\).*mask == 0",
        lambda: attend(key_padding_mask=torch.ones(1, 16)),
    ),
    "padding mask of another length": (
        r"key_padding_mask is torch.bool \(1, 14\)",
        lambda: attend(key_padding_mask=torch.ones(1, 14, dtype=torch.bool)),
    ),
    "second derivative": (r"no second derivative: call backward", lambda: penalty()),
    "backend": (r"backend='triton' must be one of auto, flex, gathered", lambda: attend(backend="triton")),
    "empty row": (
        r"block 2 of the queries \(tokens 8 to 11\) of head 1 attends to no block of keys, and so do 0 more",
        lambda: BlockLayout(without_row(2), 4),
    ),
    "row without earlier keys": (
        r"block 0 of the queries.*of head 0 attends to no block of keys that is not later, and so do 1 more",
        lambda: BlockLayout(torch.ones(2, 4, 4).tril().roll(1, 2), 4, causal=True),
    ),
    "shape of a layout": (r"this is \(4, 4\)", lambda: BlockLayout(torch.ones(4, 4), 4)),
    "weights": (r"no values but 0 and 1", lambda: BlockLayout(torch.full((1, 2, 2), 0.5), 4)),
    "block": (r"block=0 must be at least 1", lambda: BlockLayout(torch.ones(1, 2, 2), 0)),
    "block of padding": (r"block=0 must be at least 1", lambda: sparse.pad_to_block(torch.ones(1, 2), 0)),
    "no heads": (r"num_heads=0 must be at least 1", lambda: sparse.DenseSparsityConfig(0)),
    "global blocks": (
        r"num_local_blocks=4 is not divisible by num_global_blocks=3",
        lambda: sparse.FixedSparsityConfig(2, num_global_blocks=3),
    ),
    "attention": (r"attention='causal' must be", lambda: sparse.BigBirdSparsityConfig(2, attention="causal")),
    "horizontal": (
        r"horizontal_global_attention=True lets",
        lambda: sparse.VariableSparsityConfig(2, attention="unidirectional", horizontal_global_attention=True),
    ),
    "patterns without heads": (
        r"num_different_global_patterns=2 needs different_layout_per_head=True",
        lambda: sparse.FixedSparsityConfig(2, num_different_global_patterns=2),
    ),
    "too many patterns": (
        r"num_different_global_patterns=5 is more than the 4",
        lambda: sparse.FixedSparsityConfig(2, 16, True, num_different_global_patterns=5),
    ),
    "windows": (r"local_window_blocks=\[\]", lambda: sparse.VariableSparsityConfig(2, local_window_blocks=[])),
    "ends": (
        r"global_block_indices has 2 number\(s\), global_block_end_indices 1",
        lambda: sparse.BSLongformerSparsityConfig(2, global_block_indices=[0, 3], global_block_end_indices=[1]),
    ),
    "empty span": (
        r"global blocks from 3 to 3 \(exclusive\) are none",
        lambda: sparse.BSLongformerSparsityConfig(2, global_block_indices=[3], global_block_end_indices=[3]),
    ),
    "index from the end": (
        r"global blocks from -1 to 0",
        lambda: sparse.VariableSparsityConfig(2, global_block_indices=[-1]),
    ),
    "short sequence": (
        r"num_sliding_window_blocks=5 is more than the 4 block\(s\) of 16 tokens in the sequence of 64",
        lambda: sparse.LocalSlidingWindowSparsityConfig(2, num_sliding_window_blocks=5).make_layout(64),
    ),
    "random blocks": (
        r"num_random_blocks=5 is more than the 4 block\(s\)",
        lambda: sparse.VariableSparsityConfig(2, num_random_blocks=5).make_layout(64),
    ),
}


def attend(query: Any = (1, 2, 16, 8), key: Any = None, value: Any = None, **options: Any) -> Any:
    """Attention on tensors of these shapes: keys have the queries' shape, and values the keys', if not given."""
    key = key or query
    return sparse.sparse_attention(*map(torch.zeros, (query, key, value or key)), LAYOUT, **options)


def penalty() -> None:
    """A loss with the norm of a gradient, whose own gradient needs a second derivative."""
    x = torch.ones(1, 2, 16, 8, requires_grad=True)
    torch.autograd.grad(sparse.sparse_attention(x, x, x, LAYOUT).sum(), x, create_graph=True)


def without_row(row: int) -> Any:
    layout = torch.ones(2, 4, 4)
    layout[1, row] = 0
    return layout


@pytest.mark.parametrize("case", CALLS)
def test_bad_input_is_refused_by_name(case: str) -> None:
    message, call = CALLS[case]
    with pytest.raises(InvalidRequestError, match=message):
        call()


def test_a_torch_without_flex_attention_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_module, "_module", lambda: None)
    with pytest.raises(InvalidRequestError, match=r"is too old for backend='flex'.*: use 'gathered'"):
        attend(backend="flex")
    assert attend().shape == (1, 2, 16, 8)


def test_a_config_of_ones_own_needs_make_layout_alone() -> None:
    class EveryOther(sparse.SparsityConfig):
        def make_layout(self, seq_len: int) -> Any:
            index = torch.arange(self.num_blocks(seq_len))
            return ((index[:, None] - index) % 2 == 0)[None].expand(self.num_heads, -1, -1)

    check(BlockLayout.of(EveryOther(2, 4), 32))
    with pytest.raises(NotImplementedError, match="SparsityConfig has no make_layout"):
        sparse.SparsityConfig(2).make_layout(32)


def test_the_benchmark_checks_what_it_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import sparse_attention as benchmark

    threads = torch.get_num_threads()
    (tmp_path / "sparse-attention.md").write_text("above\n<!-- measured -->\nold\n")
    monkeypatch.setattr(sys, "argv", ["", "--seq", "256", "--rounds", "1", "--into", str(tmp_path)])
    try:
        assert benchmark.main() == 0
    finally:
        torch.set_num_threads(threads)
    page = (tmp_path / "sparse-attention.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| 256"))
    assert page.startswith("above") and "old" not in page
    assert float(row.split("|")[-2]) < 1e-4


def test_the_package_imports_torch_alone() -> None:
    folder = Path(sparse.__file__).parent
    for path in folder.glob("*.py"):
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
        allowed = {"torch", "transformers"} if path.name == "huggingface.py" else {"torch"}
        others = {name for name in found if name.partition(".")[0] not in allowed | set(sys.stdlib_module_names)}
        assert {name for name in others if not name.startswith("ocomm_torch.sparse_attention")} == set(), path.name
