"""The order in which a variable's elements travel: Keras' own, or Torch's if ranks of both train one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from ocomm.collectives.scratch import aligned
from ocomm.compression.layout import TensorSpec
from ocomm.errors import InvalidRequestError
from ocomm_tf.naming import name_of, shape_of

#: A kernel in Keras has the window first, then its inputs, then its outputs; in Torch the order is reversed.
_KERNEL_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 2, 0, 1), 5: (4, 3, 0, 1, 2)}


@dataclass(frozen=True, slots=True)
class WireVariable:
    """One variable on the wire: its index among the optimizer's variables, its name there, its axes in wire order."""

    index: int
    name: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    order: str
    dtype: str

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, tuple(self.shape[axis] for axis in self.axes), self.order, self.dtype)

    @property
    def is_as_keras_has_it(self) -> bool:
        """True if elements travel in Keras' own order."""
        return self.axes == tuple(range(len(self.axes)))

    def to_wire(self, array: np.ndarray) -> np.ndarray:
        """Returns a contiguous, flat array; it shares memory with ``array`` if the order is the same."""
        return np.ascontiguousarray(array.transpose(self.axes)).reshape(-1)

    def from_wire(self, flat: np.ndarray) -> np.ndarray:
        """Returns a new array in Keras' order. TensorFlow takes its memory as a tensor's, without another copy."""
        shape = tuple(self.shape[axis] for axis in self.axes)
        array = aligned(flat.nbytes).view(flat.dtype).reshape(self.shape)
        array[...] = flat.reshape(shape).transpose(np.argsort(self.axes))
        return array


def wire_variables(
    variables: Sequence[Any], names: Mapping[str, Any] | None, agreed: Sequence[str]
) -> list[WireVariable]:
    """Returns how each variable travels: in Keras' order under the ``agreed`` names, or as ``names`` says.

    ``names`` maps the variables' paths, or their ends after some "/", to the names in the other framework, in the order
    of that framework's parameters. Kernels (of Dense, Conv and recurrent layers) are transposed; everything else
    (biases, embeddings, normalization) is equal in both. For other layers the value is a pair of name and axes.
    """
    if names is None:
        return [
            WireVariable(index, name, tuple(range(len(v.shape))), shape_of(v), "keras", _dtype(v))
            for index, (v, name) in enumerate(zip(variables, agreed, strict=True))
        ]
    entries = []
    for path, value in names.items():
        found = [i for i, v in enumerate(variables) if f"/{name_of(v)}".endswith(f"/{path}")]
        if len(found) != 1:
            raise InvalidRequestError(
                f"names: '{path}' is the end of {len(found)} variables' paths, expected one; the paths are "
                + ", ".join(f"'{name_of(v)}'" for v in variables)
            )
        shape = shape_of(variables[found[0]])
        plain = tuple(range(len(shape)))
        kernel = path.endswith("kernel")  # also a recurrent_kernel
        name, axes = (
            value if isinstance(value, tuple) else (value, _KERNEL_AXES.get(len(shape), plain) if kernel else plain)
        )
        order = "keras" if kernel and tuple(axes) == plain else "torch"
        entries.append(WireVariable(found[0], name, tuple(axes), shape, order, _dtype(variables[found[0]])))
    missing = sorted({*range(len(variables))} - {entry.index for entry in entries})
    if missing:
        raise InvalidRequestError(f"names: there is none for variable '{name_of(variables[missing[0]])}'.")
    return entries


def _dtype(variable: Any) -> str:
    return str(tf.as_dtype(variable.dtype).name)
