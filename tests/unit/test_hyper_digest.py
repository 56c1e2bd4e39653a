"""What ranks compare of their hyperparameters says what they are worth, not how they were written."""

from __future__ import annotations

import numpy as np
import pytest

from ocomm.training.driver import hyper_digest


@pytest.mark.parametrize("other", [(0, 1, 0.5), (-0.0, True, 0.5), (False, np.float64(1.0), np.float32(0.5))])
def test_equal_hyperparameters_have_equal_digests_whatever_a_rank_has_had_before(other: tuple[float, ...]) -> None:
    digests = set()
    for first in ((0.0, 1.0, 0.5), other):
        hyper_digest.cache_clear()
        digests |= {hyper_digest(((first, 0.25), 1.0)), hyper_digest(((other, 0.25), 1.0))}
    assert len(digests) == 1
    assert hyper_digest((((0.0, 1.0, 0.25), 0.25), 1.0)) not in digests
