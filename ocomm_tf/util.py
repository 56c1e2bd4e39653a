"""Names that Horovod's scripts import from ``horovod.tensorflow.util``."""

from __future__ import annotations

import tensorflow as tf


def _executing_eagerly() -> bool:
    """Returns True if TensorFlow runs each operation at once, and builds no graph."""
    return bool(tf.executing_eagerly())
