"""Each fault of ``tests.mutations`` can be inserted, and the tests that are to notice it exist."""

from __future__ import annotations

from tests.mutations import MPI, MUTATIONS, ROOT


def test_every_fault_has_its_place_and_its_tests() -> None:
    lost = [fault.name for fault in MUTATIONS if (ROOT / fault.file).read_text().count(fault.old) != 1]
    assert not lost
    files = {name for fault in MUTATIONS if fault.tests != MPI for name in fault.tests.split()}
    assert not [name for name in files if not (ROOT / "tests" / name).exists()]
