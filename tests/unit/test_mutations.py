"""The list of faults that tests must notice follows the code."""

from __future__ import annotations

import pytest

from tests.mutations import MPI, MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_fault_can_be_put_in(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    for tests in mutation.tests.replace(MPI, "").split():
        assert (ROOT / "tests" / tests.split("::")[0]).exists()
