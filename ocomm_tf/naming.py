"""Names and shapes of variables and tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def name_of(variable: Any) -> str:
    """Returns a variable's name: its path in a Keras model, or TensorFlow's own. An eager tensor has none."""
    if isinstance(variable, tf.__internal__.EagerTensor):
        return "tensor"
    return str(getattr(variable, "path", None) or variable.name)


def shape_of(value: Any) -> tuple[Any, ...]:
    """Returns the static shape of a variable or tensor: numbers, also where ``tf.compat.v1`` makes them Dimensions.

    An axis of unknown length is None. A ValueError is raised for an unknown number of axes.
    """
    shape = value.shape
    return tuple(shape.as_list() if isinstance(shape, tf.TensorShape) else shape)


def unwrapped(variable: Any) -> Any:
    """Returns TensorFlow's variable, also where Keras wraps it."""
    return variable.value if hasattr(variable, "path") else variable


def key_of(variable: Any) -> int:
    """Returns a number that a variable has alone while it is alive, also where Keras wraps it."""
    return id(unwrapped(variable))
