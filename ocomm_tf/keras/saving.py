"""Models that were saved, with a distributed optimizer."""

from __future__ import annotations

from typing import Any

import keras

from ocomm.operations import ProcessSet, global_process_set
from ocomm_tf.compression import Compression, Compressor
from ocomm_tf.keras_optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The model saved at ``filepath``, its optimizer's state included, to be trained by the ranks of ``process_set``.

    Its optimizer is dense, also where it was a 1-bit one: to go on with 1 bit see ``DistributedOneBitAdam``.
    ``custom_optimizers``: classes of your own that the model may have been trained with; ``custom_objects``: what else
    Keras needs to know. ``legacy_opts`` is accepted as in Horovod and not needed.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if model.optimizer is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, process_set=process_set)
    return model
