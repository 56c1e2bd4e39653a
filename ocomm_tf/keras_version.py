"""Keras 3, and Keras 2 (tf_keras), which TF_USE_LEGACY_KERAS=1 makes ``tf.keras``: which one is it, and what they have
under other names.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

#: True if ``tf.keras`` is Keras 2.
IS_KERAS_2 = not issubclass(tf.keras.layers.Layer, keras.layers.Layer)


def is_of_keras_2(thing: Any) -> bool:
    """Returns True for a model or an optimizer of Keras 2, whatever ``tf.keras`` is."""
    return any(base.__module__.startswith("tf_keras.") for base in type(thing).__mro__)


def all_variables(thing: Any) -> list[Any]:
    """Returns the variables of a model or an optimizer; ``tf.keras.optimizers.legacy`` has them as a method."""
    found = thing.variables
    return list(found() if callable(found) else found)


def build_optimizer(optimizer: Any, variables: Any) -> None:
    """Makes the variables of a Keras optimizer that has not made them yet."""
    if not is_of_keras_2(optimizer):
        if not optimizer.built:
            optimizer.build(variables)
    elif hasattr(optimizer, "build"):
        optimizer.build(variables)
    else:
        optimizer._create_all_weights(variables)


def in_keras_2(optimizer: Any) -> Any:
    """Returns what is inside a LossScaleOptimizer of Keras 2, which lets that average; else ``optimizer``."""
    return getattr(optimizer, "inner_optimizer", optimizer) if IS_KERAS_2 else optimizer


def run_in_session(fetches: Any) -> Any:
    """Returns what the session of Keras 2, which has one without eager execution, computes for ``fetches``."""
    return tf.compat.v1.keras.backend.get_session().run(fetches)
