"""float32 masters of variables that are bfloat16 or float16: what is stepped in their place.

The law is that of ``ocomm_torch.masters``: a variable becomes its master, rounded to nearest even; of an element that
is not its rounded master, whoever wrote it, the master is taken from the variable, and the others keep their digits.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from ocomm.kernels.base import Floats

#: Variables of these types have a master; those of float32 are stepped themselves.
LOW_PRECISION = ("bfloat16", "float16")


def rounded(master: Floats, dtype: str) -> Floats:
    """A new float32 array of values that ``dtype`` has; too large ones become infinite."""
    with np.errstate(over="ignore"):
        return master.astype(tf.as_dtype(dtype).as_numpy_dtype).astype(np.float32)


def follow(master: Floats, value: Floats, dtype: str) -> None:
    """Takes over, in place, the elements of the variable's ``value``, float32, which are not the rounded master."""
    written = rounded(master, dtype).view(np.uint32) != value.view(np.uint32)
    np.copyto(master, value, where=written)
