"""The Keras frontend of a 1-bit optimizer's driver for variables in the host's memory, where steps are made."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ocomm.collectives.scratch import aligned
from ocomm.kernels.base import Floats
from ocomm.operations import ProcessSet
from ocomm.optim.adam import FlatAdam
from ocomm.optim.core import Group
from ocomm.session import Session
from ocomm.types import Flag
from ocomm_tf import engine
from ocomm_tf.errors import of_tensorflow
from ocomm_tf.keras.masters import LOW_PRECISION, follow, rounded
from ocomm_tf.order import WireVariable
from ocomm_tf.ready import MakeDriver, ReadyGradients, shortest


class KerasFrontend(ReadyGradients):
    """The ``training.driver.Frontend`` of Keras: parameters and gradients in the host's memory, float32, in wire order.

    Traced graphs refer to it, so an optimizer keeps one for good; ``connect`` gives it a driver.
    """

    def __init__(
        self, optimizer: Any, entries: Sequence[WireVariable], process_set: ProcessSet, make: MakeDriver
    ) -> None:
        super().__init__(entries, process_set, make)
        self.parameters: list[Floats] = []
        #: m and v of Adam's warm-up; None while no tensor has any.
        self._warming: FlatAdam | None = None
        self._reference = weakref.ref(optimizer)  # the optimizer owns this frontend
        decayed = [optimizer._use_weight_decay(optimizer._trainable_variables[entry.index]) for entry in entries]
        self._decayed = np.flatnonzero(decayed), np.flatnonzero(np.logical_not(decayed))
        self._make_parameters()

    def _make_parameters(self) -> None:
        self.parameters = [aligned(4 * entry.spec.numel).view(np.float32) for entry in self.entries]

    @property
    def _owner(self) -> Any:
        optimizer = self._reference()
        assert optimizer is not None, "the optimizer is gone"
        return optimizer

    def connect(self, session: Session) -> None:
        super().connect(session)
        self._place_parameters()

    def _place_parameters(self) -> None:
        self.driver.core.tensors["param"] = [p.__array_interface__["data"][0] for p in self.parameters]

    def forget(self) -> None:
        """Resets to before the first step, as ``Driver.forget`` does."""
        self._clear()
        self.driver.forget()

    def _clear(self) -> None:
        super()._clear()
        self._warming = None
        self._zero_parameters()

    def _zero_parameters(self) -> None:
        for parameter in self.parameters:  # no precision beyond that of the variables
            parameter[:] = 0.0

    def read(self, variables: Sequence[Any], masters: Mapping[int, Floats] | None = None) -> None:
        """Reads the parameters from the optimizer's variables, with the higher precision of saved ``masters``, if
        any.
        """
        for number, entry in enumerate(self.entries):
            if masters is not None and entry.dtype in LOW_PRECISION:
                self.parameters[number][:] = masters[number]
            self._take(number, np.asarray(variables[entry.index].numpy(), np.float32))

    def write(self, variables: Sequence[Any]) -> None:
        """Writes the parameters to the optimizer's variables."""
        for number, entry in enumerate(self.entries):
            variables[entry.index].assign(self._given(number))

    def masters(self) -> dict[int, Floats]:
        """Returns copies of the parameters of low-precision variables, by tensor."""
        return {n: self.parameters[n].copy() for n, entry in enumerate(self.entries) if entry.dtype in LOW_PRECISION}

    def _take(self, number: int, value: np.ndarray) -> None:
        """Reads a variable's current value, in float32."""
        entry, parameter = self.entries[number], self.parameters[number]
        if entry.dtype in LOW_PRECISION:
            follow(parameter, entry.to_wire(value), entry.dtype)
        else:
            parameter[:] = entry.to_wire(value)

    def _given(self, number: int) -> np.ndarray:
        """Returns the new value of a variable, in float32."""
        entry, parameter = self.entries[number], self.parameters[number]
        return entry.from_wire(rounded(parameter, entry.dtype) if entry.dtype in LOW_PRECISION else parameter)

    def updated(
        self,
        rate: tf.Tensor,
        iterations: tf.Tensor,
        indices: Sequence[int],
        gradients: Sequence[Any],
        variables: Sequence[Any],
    ) -> list[tf.Tensor]:
        """Makes one step on all ranks, now or, in a graph, whenever it runs; returns the new values of the variables
        ``indices``, the first of which have ``gradients``. ``iterations`` are the optimizer's before the step: a graph
        may count on while it makes the step.
        """
        count = len(gradients)

        in_order = not tf.executing_eagerly() and engine.runs_in_order()
        if not tf.executing_eagerly():
            engine.steppers.add(self)

        is_graph = not (tf.executing_eagerly() or engine.problem())

        def body(lr: Any, made: Any, *arrays: Any) -> list[Any]:
            if not is_graph:
                self._discard(list(self._early))  # a graph has failed since the last step
            self._owner.ocomm_follow(int(made))
            is_enclosed = in_order and engine.is_enclosing(self)
            with self.driver.session.enclosed_step() if is_enclosed else contextlib.nullcontext():
                return self.step(float(lr), indices, arrays[:count], arrays[count:])

        values = [tf.cast(tf.convert_to_tensor(v), tf.float32) for v in variables]
        dense = self._made_ready(rate, indices[:count], [tf.convert_to_tensor(g) for g in gradients], values[:count])
        with of_tensorflow():
            inputs = [rate, iterations, *dense, *values]
            results = engine.in_python(tf.numpy_function, body, inputs, [tf.float32] * len(indices))
        for result, value in zip(results, values, strict=True):
            result.set_shape(value.shape)
        return results

    def step(self, lr: float, indices: Sequence[int], gradients: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Makes one step on all ranks. Values are those of all variables, in the order ``indices``, and gradients those
        of the first; returns new values.

        All of them are float32.
        """
        self._lr = shortest(lr)
        where = {index: position for position, index in enumerate(indices)}
        absent = [number for number, entry in enumerate(self.entries) if where[entry.index] >= len(gradients)]
        self._discard([number for number in absent if number in self._early])
        for number, entry in enumerate(self.entries):
            position = where[entry.index]
            self._take(number, np.asarray(values[position]))
            if position < len(gradients) and number not in self._early:
                self._gradients[number] = entry.to_wire(np.asarray(gradients[position]))
        try:
            if self._stale:
                self.driver.stepper.object(Flag.CHANGED)
            self.driver.step(lambda: False)
        finally:
            self._gradients = [None] * len(self.entries)
            self._early.clear()
            self._stale.clear()
        number_of = {entry.index: number for number, entry in enumerate(self.entries)}
        return [self._given(number_of[index]) for index in indices]

    # For the driver

    def groups(self) -> list[Group]:
        """Returns the variables with and without weight decay, with the current hyperparameters; an empty group is left
        out.
        """
        betas, eps = self._owner.ocomm_moments
        decays = (float(self._owner.weight_decay or 0.0), 0.0)
        return [
            Group(tensors, self._lr, betas, eps, decoupled_decay=decay)
            for tensors, decay in zip(self._decayed, decays, strict=True)
            if tensors.size
        ]

    def wrapped_adam(self) -> str:
        """Returns ``"AdamW"`` if there is a weight decay, which Keras always subtracts from the variable, else
        ``"Adam"``.
        """
        return "AdamW" if any(group.decoupled_decay for group in self.groups()) else "Adam"

    def read_warm_start(self) -> str | None:
        """Returns whether there is a warm start. Its moments come later, with the variables of a saved model."""
        return "of a saved model" if self._owner.ocomm_warm_start else None

    def dense_step(self, tensors: list[int], average: Callable[[int], Floats], max_norm: float | None) -> None:
        """Makes Adam's step of tensors in warm-up, on averages clipped to ``max_norm``. The host adds up the norm, so
        that it is the same on ranks with and without a GPU.
        """
        core, factor = self.driver.core, 1.0
        if max_norm is not None:
            averages = [core.param_memory.host(average(tensor)) for tensor in tensors]
            factor = self.driver.clip_factor(averages, max_norm)  # type: ignore[attr-defined]
        self._moments.update(tensors, self.driver.stepper.averages, core.tensors["param"], self.groups(), factor)

    @property
    def _moments(self) -> FlatAdam:
        core = self.driver.core
        self._warming = self._warming or FlatAdam(core.layout, core.rank, core.kernels)
        return self._warming

    def moments(self, tensor: int) -> tuple[Floats, Floats, int] | None:
        """Returns m, v and step count of a tensor in warm-up."""
        return None if self._warming is None else self._warming.moments(tensor)

    def step_counts(self) -> list[int]:
        """Returns the number of steps of each tensor, in warm-up or after it; 0 for one whose m and v have parts."""
        counts: list[int] = self.driver.core.steps.tolist()
        for tensor in range(len(counts)):
            warming = self.moments(tensor)
            if warming is not None:
                counts[tensor] = warming[2]
        return counts

    def adopt(self, tensor: int, momentum: Floats, variance: Floats, step: int) -> None:
        """Sets the moments of a tensor."""
        self._moments.adopt(tensor, momentum, variance, step)

    def advance(self, tensor: int) -> tuple[Floats, Floats, int]:
        """Counts a step of a tensor. Returns its m and v, which begin as zeros, and the number of that step."""
        return self._moments.advance(tensor)

    def release(self, tensor: int) -> None:
        """Frees a tensor's m and v."""
        if self._warming is not None and self._warming.release(tensor):
            self._warming = None
