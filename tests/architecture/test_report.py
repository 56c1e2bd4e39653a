"""The entries of ``compression_report()`` are declared once; optimizers return them, docstrings and docs show them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ocomm.session import Session
from ocomm.training.report import COMMON, OF_KIND, documented
from tests.architecture.test_options import CORES
from tests.worlds import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "is-it-working.md"


@pytest.mark.parametrize("kind", [*CORES, "Optimizer"])
def test_an_optimizer_reports_what_is_declared(kind: str) -> None:
    hvd = pytest.importorskip("ocomm_torch", exc_type=ImportError)
    torch = pytest.importorskip("torch")

    def body(session: Session) -> set[str]:
        weights = [torch.nn.Parameter(torch.ones(4))]
        plain = torch.optim.Adam if "Adam" in kind or "Lamb" in kind else torch.optim.SGD
        options = {"compression": hvd.Compression.int8} if kind == "Optimizer" else {}
        optimizer = getattr(hvd, f"Distributed{kind}")(plain(weights, lr=0.1), **options)
        return set(optimizer.compression_report())

    assert run_ranks(1, body) == [{*COMMON, *OF_KIND.get(kind, {})}]


def test_docstrings_have_all_entries() -> None:
    hvd = pytest.importorskip("ocomm_torch", exc_type=ImportError)
    doc = hvd.OneBitAdam.compression_report.__doc__
    named = set(re.findall(r"^    - ``(\w+)``", doc, re.MULTILINE))
    assert named == set(COMMON).union(*OF_KIND.values()) and "{entries}" not in doc
    assert max(map(len, doc.splitlines())) <= 116


def test_docstrings_of_which_python_has_taken_the_indentation_have_them_too() -> None:
    def older() -> None:
        """Counts.

        Returns:
            {entries}
        """

    def newer() -> None:
        pass

    newer.__doc__ = "Counts.\n\nReturns:\n    {entries}\n"  # as from Python 3.13 on
    shown = {documented(each).__doc__ for each in (older, newer)}
    assert len(shown) == 1 and "    - ``stage``: " in shown.pop()


def test_the_page_has_a_row_for_each_entry_with_its_text() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:.*? \| )?([^|]+) \|$", PAGE.read_text(), re.MULTILINE))
    assert rows == {**COMMON, **{name: text for entries in OF_KIND.values() for name, text in entries.items()}}


def test_the_numbers_of_a_report_are_flat_for_loggers_of_metrics() -> None:
    hvd = pytest.importorskip("ocomm_torch", exc_type=ImportError)
    torch = pytest.importorskip("torch")

    def body(session: Session) -> dict[str, float]:
        optimizer = hvd.DistributedOneBitLamb(torch.optim.Adam([torch.nn.Parameter(torch.ones(4))]), freeze_step=3)
        return hvd.report_metrics(optimizer, "run.")

    (numbers,) = run_ranks(1, body)
    assert numbers["run.freeze_step"] == 3.0 and numbers["run.overlap"] == 1.0
    assert "run.memory_bytes" in numbers
    assert all(type(value) is float for value in numbers.values())
    assert not numbers.keys() & {"run.stage", "run.ratio", "run.trust_ratios", "run.resumed"}
