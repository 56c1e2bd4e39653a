"""The models of ``step`` and ``step_profile``: sized so that a step takes some tenths of a second on one core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.tasks.language import Block

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 8192, 384, 6, 6, 64
#: Channels of the four groups of residual blocks, two blocks each; the edge of an image; classes.
CHANNELS, EDGE, CLASSES = (64, 128, 256, 512), 32, 10


class Bert(nn.Module):
    """An encoder with a tied output layer, 13.8 M parameters: the embedding is a quarter of them, its gradient last."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.tokens(tokens) + self.positions)
        return hidden @ self.tokens.weight.T


@dataclass(frozen=True, slots=True)
class GptSize:
    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int


GPT2 = GptSize(vocabulary=50257, width=768, layers=12, heads=12, context=1024)


class Gpt(nn.Module):
    """A decoder with a tied output layer; at ``GPT2`` 124 M parameters, as GPT-2's smallest has."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        return self.norm(hidden) @ self.tokens.weight.T


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


class ResNet(nn.Sequential):
    """ResNet-18 for images of 32x32 (arXiv 1512.03385), 11.2 M parameters; the largest gradients come first."""

    def __init__(self) -> None:
        inputs = CHANNELS[0]
        layers: list[nn.Module] = [nn.Conv2d(3, inputs, 3, 1, 1, bias=False), nn.BatchNorm2d(inputs), nn.ReLU()]
        for outputs in CHANNELS:
            layers += [_Block(inputs, outputs, 1 if inputs == outputs else 2), _Block(outputs, outputs, 1)]
            inputs = outputs
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


@dataclass(frozen=True, slots=True)
class Task:
    """``batch(n, generator)`` draws n samples, by default ``samples``; ``loss(model, batch)`` is what a step lowers."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], torch.Tensor]
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    samples: int


def _tokens(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count, LENGTH), generator=generator)


def _of_successors(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def _images(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(count, 3, EDGE, EDGE, generator=generator)


def _of_classes(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(images), torch.arange(len(images)) % CLASSES)


TASKS = {"bert": Task(Bert, _tokens, _of_successors, 2), "resnet": Task(ResNet, _images, _of_classes, 4)}
