"""Gradients of TensorFlow for a driver of steps: made ready one by one while a graph computes others."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ocomm.compression.layout import TensorSpec
from ocomm.kernels.base import Bytes, Floats, Kernels
from ocomm.operations import Operation, ProcessSet
from ocomm.optim.grid import Grid
from ocomm.session import Session
from ocomm.training.driver import Driver
from ocomm_tf import engine
from ocomm_tf.order import WireVariable

#: (session, process set, frontend) -> driver
MakeDriver = Callable[[Session, int, Any], Driver]


class ReadyGradients:
    """The part of a ``training.driver.Frontend`` that has the gradients: in the host's memory, float32, in wire order.

    Traced graphs refer to it; ``connect`` gives it a driver.
    """

    framework = "keras"
    kernels: Kernels | None = None
    #: A model of Keras is not divided among ranks.
    grid: Grid | None = None
    driver: Driver

    def __init__(self, entries: Sequence[WireVariable], process_set: ProcessSet, make: MakeDriver) -> None:
        self.entries = entries
        self._process_set, self._make = process_set, make
        self._gradients: list[Floats | None] = [None] * len(entries)
        #: By tensor, what keeps the memory of a gradient that a graph has made ready before its step.
        self._early: dict[int, object] = {}
        #: The same of runs of a graph that failed before their step: a posted bucket may still read them.
        self._stale: list[object] = []
        self._lr = 0.0

    @property
    def specs(self) -> list[TensorSpec]:
        """What the ranks must agree on, in registration order."""
        return [entry.spec for entry in self.entries]

    def implementation(self) -> str:
        """Returns words that say how dense steps round, which are those of ``dense_step``."""
        return "ocomm"

    def written_in_forward(self) -> dict[str, str]:
        """Returns what writes to variables in forward on this rank alone: nothing in Keras does."""
        return {}

    def connect(self, session: Session) -> None:
        """Makes a driver that has taken no step, among the current ranks. Collective."""
        self._clear()
        #: The runtime through which the driver exchanges.
        self.runtime = session.runtime
        self.driver = self._make(session, self._process_set.number(session), self)

    def _clear(self) -> None:
        self._gradients = [None] * len(self.entries)
        self._early.clear()
        self._stale.clear()

    def _discard(self, numbers: Sequence[int]) -> None:
        """Forgets gradients of a run of a graph that failed before its step. What was posted of them does not count:
        all ranks exchange again.
        """
        for number in numbers:
            self._stale.append(self._early.pop(number))
            self._gradients[number] = None

    def _made_ready(
        self, rate: tf.Tensor, indices: Sequence[int], gradients: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the gradients. In a graph the exchange of each begins when it is ready, while backward goes on."""
        if tf.executing_eagerly() or engine.problem():
            return list(gradients)
        number_of = {entry.index: number for number, entry in enumerate(self.entries)}
        reference = weakref.ref(self)  # the graph's calls are kept for ever

        def start(number: int, tensors: Sequence[Any], name: str) -> Operation:
            engine.passed_on(tensors[0])
            lr = engine.passed_on(tensors[1]).view(np.float32)
            alive = reference()
            if alive is not None:
                alive.mark_ready(float(lr[0]), number, *engine.kept(tensors[0]))
            return Operation(None, lambda _: None)

        results = []
        for index, gradient, value in zip(indices, gradients, values, strict=True):
            call = engine.Call(functools.partial(start, number_of[index]), None, is_local=True)
            # In a loop in a graph, a gradient that does not depend on its variable could come before the last step is
            # over.
            with tf.control_dependencies([value]):
                results.append(engine.exchange(call, [gradient, rate], f"ready_{index}")[0])
        return results

    def mark_ready(self, lr: float, number: int, keeper: object, gradient: Bytes) -> None:
        """Notes that the gradient of tensor ``number``, in Keras' order, is ready. Its memory stays while ``keeper``
        lives.

        Its exchange may begin, unless ranks must agree on something before that step. If the graph fails before its
        step, the gradient is discarded at the next one.
        """
        if self.driver.is_at_start or not self.driver.common.overlap:
            return
        if number in self._early:
            self._discard([number])
        self._lr = shortest(lr)
        self.driver.begin()
        entry = self.entries[number]
        self._gradients[number] = entry.to_wire(gradient.view(np.float32).reshape(entry.shape))
        self._early[number] = keeper
        self.driver.stepper.buckets.mark_ready(number)

    def locate(self, tensors: list[int], final: bool) -> list[int]:
        """Returns addresses of gradients; 0 for none."""
        found = [self._gradients[tensor] for tensor in tensors]
        return [0 if g is None else g.__array_interface__["data"][0] for g in found]


def shortest(lr: float) -> float:
    """Returns the shortest decimal number that rounds to this float32, so that 0.001 is 0.001 on Torch's ranks, too."""
    return float(str(np.float32(lr)))
