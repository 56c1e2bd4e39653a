"""What variables and tensors are called."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def name_of(variable: Any) -> str:
    """A variable's name: its path in a Keras model, or TensorFlow's own; an eager tensor has none."""
    if isinstance(variable, tf.__internal__.EagerTensor):
        return "tensor"
    return str(getattr(variable, "path", None) or variable.name)
