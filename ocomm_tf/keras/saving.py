"""Loads models that were saved with a distributed optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ocomm.operations import ProcessSet, global_process_set
from ocomm_tf.compression import Compression, Compressor
from ocomm_tf.keras_optimizer import DistributedOptimizer
from ocomm_tf.keras_version import in_keras_2


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    wrap: Callable[[Any], Any] | None = None,
) -> Any:
    """Returns the model saved at ``filepath``, with its optimizer's state, to be trained by the ranks of
    ``process_set``.

    A saved model has a plain optimizer, because it loads without ocomm. So ``wrap`` says how to distribute it: without
    it the optimizer is dense, even if it was a 1-bit one. Errors of a 1-bit optimizer start at zero.

    Args:
        filepath: The saved model.
        custom_optimizers: Your own optimizer classes with which the model may have been trained.
        custom_objects: Other objects that Keras needs, by name.
        compression: A class of ``Compression`` for its gradients. With ``int8`` and ``int4`` this call is collective.
        legacy_opts: Accepted as in Horovod, and ignored.
        process_set: The ranks that train together.
        wrap: Called with a new optimizer of the saved configuration, makes it distributed, as in
            ``wrap=hvd.DistributedOneBitAdam``; ``compression`` and ``process_set`` are then its own business. None:
            ``DistributedOptimizer``.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | (custom_objects or {})
    model = tf.keras.models.load_model(filepath, custom_objects=known)
    if model.optimizer is not None and wrap is not None:
        saved: dict[str, Any] = {}
        model.optimizer.save_own_variables(saved)
        wrapped = wrap(type(model.optimizer).from_config(model.optimizer.get_config()))
        wrapped.build(model.trainable_variables)
        wrapped.load_own_variables(saved)
        model.optimizer = wrapped
    elif model.optimizer is not None:
        optimizer = DistributedOptimizer(in_keras_2(model.optimizer), compression=compression, process_set=process_set)
        if in_keras_2(model.optimizer) is model.optimizer:
            model.optimizer = optimizer
        else:
            model.optimizer._optimizer = optimizer
    return model
