"""What other ranks are told of an exception that has ended a script."""

from __future__ import annotations

import pytest

from ocomm.bootstrap import _how


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("no data."), "raised ValueError: no data"), (KeyboardInterrupt(), "raised KeyboardInterrupt")],
)
def test_an_exception_is_told_with_its_text_if_it_has_one(error: BaseException, said: str) -> None:
    assert _how(type(error), error) == said
