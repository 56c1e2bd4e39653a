"""The Keras frontend for float32 variables on one GPU, where steps are made.

Gradients and variables are read where TensorFlow has them, through DLPack. New values are written into memory that
TensorFlow has allocated for them. TensorFlow does not share its streams, so the host waits twice in a step: in
TensorFlow when an address is asked for, until its stream is done and gradients are ready; and in ocomm at the end,
until new values are ready.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from ocomm.errors import OcommError, clause
from ocomm.kernels.base import Floats
from ocomm.kernels.device import DeviceMemory
from ocomm.operations import ProcessSet
from ocomm.session import Session
from ocomm_tf import engine
from ocomm_tf.errors import of_tensorflow
from ocomm_tf.keras.frontend import KerasFrontend
from ocomm_tf.order import WireVariable
from ocomm_tf.ready import MakeDriver, shortest

_log = logging.getLogger("ocomm")
_FULL = (
    "TensorFlow takes nearly all memory of a GPU at its first operation, unless you call "
    "tf.config.experimental.set_memory_growth(gpu, True) before it"
)


class GpuFrontend(KerasFrontend):
    """The frontend for parameters and gradients on ``device``, TensorFlow's name of it, in wire order."""

    def __init__(
        self, optimizer: Any, entries: Sequence[WireVariable], process_set: ProcessSet, make: MakeDriver, device: str
    ) -> None:
        super().__init__(optimizer, entries, process_set, make)
        self._device = device
        #: The parameters during a step, or while a state is saved or loaded: TensorFlow's memory.
        self._tensors: list[tf.Tensor | None] = [None] * len(entries)
        self._addresses = [0] * len(entries)

    def _make_parameters(self) -> None:
        """Does nothing: between steps only variables have the values."""

    @property
    def _memory(self) -> DeviceMemory:
        assert self.kernels is not None
        return cast(DeviceMemory, self.kernels.memory)

    def connect(self, session: Session) -> None:
        try:
            self.kernels = session.device_kernels(cuda_number(self._device))
            super().connect(session)
        except MemoryError as error:
            raise MemoryError(f"{clause(error)}. {_FULL}.") from error

    def _place_parameters(self) -> None:
        self.driver.core.tensors["param"] = 0

    def _zero_parameters(self) -> None:
        """Does nothing: there are none between steps."""

    def _let_go(self) -> None:
        """Returns memory to TensorFlow, which may reuse it at once, after all queued work is done."""
        try:
            if any(tensor is not None for tensor in self._tensors):
                self._memory.wait()
        finally:
            self._tensors = [None] * len(self.entries)
            self._addresses = [0] * len(self.entries)
            self._place_parameters()

    # Variables

    def read(self, variables: Sequence[Any], masters: Mapping[int, Floats] | None = None) -> None:
        self._let_go()
        for number, entry in enumerate(self.entries):
            self._take_copy(number, variables[entry.index])

    def write(self, variables: Sequence[Any]) -> None:
        self._memory.wait()
        for number, entry in enumerate(self.entries):
            with tf.device(self._device):
                variables[entry.index].assign(_from_wire(self._tensors[number], entry))
        self._let_go()

    def _take_copy(self, number: int, variable: Any) -> None:
        with tf.device(self._device):
            self._hold(number, _copy(_to_wire(tf.convert_to_tensor(variable), self.entries[number])))

    def _hold(self, number: int, tensor: tf.Tensor) -> None:
        """Uses ``tensor``, which nothing else reads, as the parameter for now."""
        self._tensors[number] = tensor
        self.driver.core.tensors["param"][number] = address_of(tensor)

    # The step

    def updated(
        self,
        rate: tf.Tensor,
        iterations: tf.Tensor,
        indices: Sequence[int],
        gradients: Sequence[Any],
        variables: Sequence[Any],
    ) -> list[tf.Tensor]:
        count = len(gradients)
        entry_of = {entry.index: entry for entry in self.entries}
        entries = [entry_of[index] for index in indices]

        def body(lr: Any, made: Any, *tensors: Any) -> list[Any]:
            self._owner.ocomm_follow(int(made))
            return self.step(float(lr), indices, tensors[:count], tensors[count:])

        with tf.device(self._device):
            given = [_to_wire(tf.convert_to_tensor(g), entry) for g, entry in zip(gradients, entries, strict=False)]
            values = [_copy(_to_wire(tf.convert_to_tensor(v), p)) for v, p in zip(variables, entries, strict=True)]
            if tf.executing_eagerly():
                with of_tensorflow():
                    there = map(tf.identity, given)  # copied if they are elsewhere
                    results = body(rate, iterations, *there, *values)
            else:
                inputs = [rate, iterations, *given, *values]
                results = engine.in_python(tf.py_function, body, inputs, [tf.float32] * len(indices))
                for result, value in zip(results, values, strict=True):
                    result.set_shape(value.shape)
            return [_from_wire(result, entry) for result, entry in zip(results, entries, strict=True)]

    def step(self, lr: float, indices: Sequence[int], gradients: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Makes one step on all ranks; ``values`` are changed in place and returned."""
        self._lr = shortest(lr)
        position_of = {index: position for position, index in enumerate(indices)}
        self._let_go()
        try:
            for number, entry in enumerate(self.entries):
                position = position_of[entry.index]
                self._hold(number, values[position])
                if position < len(gradients):
                    self._addresses[number] = address_of(gradients[position])
            self.driver.step(lambda: False)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is raised
                self._let_go()
            raise
        self._let_go()
        return list(values)

    # For the driver

    def locate(self, tensors: list[int], final: bool) -> list[int]:
        return [self._addresses[tensor] for tensor in tensors]


def _to_wire(tensor: tf.Tensor, entry: WireVariable) -> tf.Tensor:
    return tensor if entry.is_as_keras_has_it else tf.transpose(tensor, entry.axes)


def _from_wire(tensor: tf.Tensor, entry: WireVariable) -> tf.Tensor:
    return tensor if entry.is_as_keras_has_it else tf.transpose(tensor, np.argsort(entry.axes))


def _copy(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a copy that shares no memory, because variables share theirs with their readers."""
    return tf.raw_ops.DeepCopy(x=tensor)


class _DLTensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype, _pointer_in.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def address_of(tensor: tf.Tensor) -> int:
    """Returns the address of an eager tensor on a device, after TensorFlow's queued work there is done; never 0."""
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    found = _DLTensor.from_address(_pointer_in(capsule, b"dltensor"))
    return (found.data or 0) + found.byte_offset or 1  # a tensor without elements has no address


def cuda_number(device: str) -> int:
    """Returns CUDA's number, in this process, of the device that TensorFlow calls ``device``.

    TensorFlow counts the devices that it can see, and the parts into which each was cut.
    """
    numbers: list[int] = []
    for physical in tf.config.get_visible_devices("GPU"):
        parts = tf.config.get_logical_device_configuration(physical)
        numbers += [int(physical.name.rpartition(":")[2])] * len(parts or [None])
    return numbers[tf.DeviceSpec.from_string(device).device_index]


def device_of(kind: str, variables: Sequence[Any], session: Session, trains_on_devices: bool) -> str | None:
    """Returns TensorFlow's name of the GPU that makes the steps of ``variables``; None if the host makes them.

    If the variables are on a GPU and the host makes the steps, a warning says why.
    """
    plain = [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]
    devices = sorted({variable.device for variable in plain})
    gpus = [device for device in devices if tf.DeviceSpec.from_string(device).device_type == "GPU"]
    if not gpus:
        return None
    others = sorted({tf.as_dtype(variable.dtype).name for variable in variables} - {"float32"})
    why = ""
    if not trains_on_devices:
        why = "it trains in the host's memory only"
    elif len(devices) > 1:
        why = f"variables are on {' and '.join(devices)}"
    elif others:
        why = f"variables are {' and '.join(others)}"
    else:
        try:
            session.device_kernels(cuda_number(gpus[0]))
        except (OcommError, RuntimeError) as error:
            why = str(error)
        except MemoryError as error:
            why = f"{clause(error)}. {_FULL}"
    if not why:
        return gpus[0]
    _log.warning(
        "Distributed%s: variables are on %s, and steps are made in the host's memory, through which gradients and "
        "values are copied: %s.", kind, gpus[0], why.rstrip("."),
    )  # fmt: skip
    return None
