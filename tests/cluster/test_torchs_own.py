"""Torch's own distributed tests on backend "ocomm" and on gloo: each has the outcome that the documentation says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.cluster.torchs_own import BACKENDS, PAGE, SIZES, measure, methods, page, read, reason


def test_the_page_is_made_from_the_list() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "python -m tests.cluster.torchs_own"


def test_what_passes_on_gloo_alone_has_a_cause() -> None:
    _, found = read()
    rows = [(name, outcomes) for name, row in found.items() for outcomes in row.values()]
    assert [name for name, on in rows if on["gloo"] == "passed" != on["ocomm"] and not reason(name)] == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts jobs itself")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_torchs_own_tests_have_the_outcomes_of_the_list(backend: str, size: int, tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="Torch's tests need expecttest: pip install 'ocomm[dev]'")
    version, known = read()
    expected = {name: row[str(size)][backend] for name, row in known.items()}
    found, words = measure(size, backend, methods(), tmp_path)
    differences = []
    for name in sorted({*expected, *found}):
        was, now = expected.get(name, "not in the list"), found.get(name, "no such method")
        if was != now:
            differences.append(f"{name}: {was}, now {now}\n{words.get(name, '')}")
    assert not differences, "\n".join(
        [*differences, f"(the list is of torch {version}; python -m tests.cluster.torchs_own --measure makes it anew)"]
    )
