"""Next-token prediction on text, byte-level BPE, with a small transformer.

The tokens are learned from the training texts alone and kept in the cache. What texts there are say the modules
``shakespeare`` and ``source_code``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.tasks import Batch, Task
from benchmarks.tasks.downloads import CACHE

VOCABULARY = 640
VALIDATION_WINDOWS = 500


@dataclass(frozen=True)
class Size:
    """Of the model, and of a batch on one rank."""

    context: int
    width: int
    layers: int
    heads: int
    batch: int


FULL = Size(context=64, width=56, layers=2, heads=4, batch=8)
SMALL = Size(context=32, width=32, layers=1, heads=2, batch=4)
LARGE = Size(context=64, width=152, layers=4, heads=4, batch=8)


@dataclass(frozen=True)
class Corpus:
    """``texts`` returns training and validation texts, downloaded if need be; it may raise DownloadError."""

    name: str
    source: str  # for the reader of a result
    held_out: str  # what the validation texts are
    texts: Callable[[], tuple[str, str]]

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Training and validation tokens, int16, the texts one after the other."""
        kept = CACHE / f"{self.name}-{VOCABULARY}.npz"
        if not kept.exists():
            np.savez(kept, **dict(zip(("train", "validation"), encode(*self.texts()), strict=True)))
        with np.load(kept) as arrays:
            return arrays["train"], arrays["validation"]


def encode(training: str, *others: str) -> list[np.ndarray]:
    """All texts in the tokens that ``training`` is shortest in: byte-level BPE."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(training.split("\n\n"), trainer)
    return [np.array(tokenizer.encode(text).ids, np.int16) for text in (training, *others)]


def windows(stream: np.ndarray, context: int) -> Batch:
    """Every window of ``context`` tokens, and the token after each of them: int64, views of one array."""
    whole = torch.from_numpy(stream.astype(np.int64)).unfold(0, context + 1, 1)
    return whole[:, :-1], whole[:, 1:]


class Block(nn.Module):
    """Causal self-attention, then two layers, each on normalised input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], 3, self.heads, x.shape[2] // self.heads)
        query, key, value = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder; the embedding of a token is also its row of the last layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight
        return self.norm(self.blocks(x)) @ self.token.weight.T


def task(name: str, corpus: Corpus, size: Size = FULL) -> Task:
    """Raises DownloadError where the corpus is not in the cache and cannot be fetched."""
    train, validation = corpus.tokens()
    inputs, targets = windows(validation, size.context)
    spread = torch.linspace(0, len(inputs) - 1, VALIDATION_WINDOWS).long()
    digest = hashlib.sha256(train.tobytes() + validation.tobytes()).hexdigest()[:8]
    return Task(
        name=name,
        source=f"{corpus.source}, byte-level BPE with {VOCABULARY} tokens; {len(train):,} training tokens; "
        f"validation on {VALIDATION_WINDOWS} windows of {size.context} tokens of {corpus.held_out}; "
        f"sha256 of all tokens {digest}",
        train=windows(train, size.context),
        validation=(inputs[spread], targets[spread]),
        make_model=lambda: Transformer(size),
        model=f"transformer, {size.layers} layer(s), width {size.width}, {size.heads} heads, context {size.context}, "
        "embedding tied to the last layer",
        batch=size.batch,
        has_accuracy=False,
    )
