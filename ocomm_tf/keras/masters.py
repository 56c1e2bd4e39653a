"""float32 masters of bfloat16 and float16 variables, which steps change in the variables' place.

The rule is the same as in ``ocomm_torch.memory.masters``: a variable becomes its master, rounded to nearest even. If an
element is not its rounded master, whoever wrote it, the master is set to it; the other masters keep their precision.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from ocomm.kernels.base import Floats

#: Variables of these types have a master; float32 variables are changed directly.
LOW_PRECISION = ("bfloat16", "float16")


def rounded(master: Floats, dtype: str) -> Floats:
    """Returns a new float32 array of values that ``dtype`` can hold; too large ones become infinite."""
    with np.errstate(over="ignore"):
        return master.astype(tf.as_dtype(dtype).as_numpy_dtype).astype(np.float32)


def follow(master: Floats, value: Floats, dtype: str) -> None:
    """Copies to ``master``, in place, the elements of the variable's ``value`` (float32) that are not the rounded
    master.
    """
    written = rounded(master, dtype).view(np.uint32) != value.view(np.uint32)
    np.copyto(master, value, where=written)
