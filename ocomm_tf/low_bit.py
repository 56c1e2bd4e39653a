"""Averages of gradients in codes, for tapes and optimizers with ``Compression.int8`` or ``int4``.

A list of variables has an exchange with a fixed layout and error feedback, like those of the 1-bit optimizers, and its
errors last as long as the process: tapes are made anew in each step. In a graph the exchange of a gradient begins when
it is ready.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ocomm import session as sessions
from ocomm.errors import InvalidRequestError, NonFiniteError
from ocomm.operations import ProcessSet
from ocomm.optim.core import Group
from ocomm.optim.low_bit import LowBitOptions, ReturnedAverages, TapeAverages
from ocomm.session import Session
from ocomm.training.common import Common
from ocomm.training.driver import Driver
from ocomm.training.low_bit import LowBitDriver
from ocomm.training.resume import one_state
from ocomm.types import Flag
from ocomm_tf import engine, mpi_ops
from ocomm_tf.compression import CodesCompressor
from ocomm_tf.errors import of_tensorflow
from ocomm_tf.naming import key_of, name_of, shape_of, unwrapped
from ocomm_tf.order import wire_variables
from ocomm_tf.ready import ReadyGradients

_DTYPES = (tf.float32, tf.bfloat16, tf.float16)

#: By session, what averages gradients in codes, by the variables.
_known: weakref.WeakKeyDictionary[Session, dict[Hashable, CodedGradients]] = weakref.WeakKeyDictionary()


class CodedGradients(ReadyGradients):
    """Averages gradients of a list of variables."""

    #: Those whose gradients it averages. A new variable may have the number of one that is gone, on some ranks only.
    _variables: Sequence[weakref.ref[Any]] = ()

    def follow(self, variables: Sequence[Any]) -> None:
        """Notes that it averages gradients of ``variables``, while they live."""
        self._variables = [weakref.ref(unwrapped(variable)) for variable in variables]

    def is_of(self, variables: Sequence[Any]) -> bool:
        """Returns True if these are the variables that it follows."""
        return all(own() is unwrapped(variable) for own, variable in zip(self._variables, variables, strict=True))

    def groups(self) -> list[Group]:
        """Returns one group of all tensors: nothing depends on its settings."""
        return [Group(np.arange(len(self.entries)), 0.0)]

    def hyper(self) -> Hashable:
        """Returns nothing: ``ocomm.training.comparison`` compares the settings of whoever steps."""
        return ()

    def reconnect(self, session: Session, keep: bool) -> None:
        """Joins the current ranks after ``shutdown`` and ``init``. Collective; does nothing if the driver is connected.

        ``keep``: the errors are kept. If not, a state must be loaded.
        """
        if self.runtime is session.runtime:
            return
        kept = (self.driver.state(), self.driver.rank_state()) if keep else None
        self.connect(session)
        if kept is not None:
            self.driver.load_state(kept[0])
            self.driver.load_rank_state(one_state(kept[1]))

    def averaged(
        self, gradients: Sequence[Any], variables: Sequence[Any], raises: bool, after: Sequence[tf.Tensor] = ()
    ) -> list[tf.Tensor]:
        """Returns the averages over all ranks, now or, in a graph, whenever it runs.

        Args:
            gradients: One for each entry; ``tf.IndexedSlices`` are made dense.
            variables: The variables, in the same order.
            raises: Whether a gradient that is not finite on some rank is an error; if not, averages are not finite on
                all ranks.
            after: In a graph, the step ends when these tensors are there, and changes nothing if one of them fails.
        """
        mpi_ops.refuse_xla()
        is_eager = tf.executing_eagerly()
        if not is_eager:
            engine.steppers.add(self)
        is_graph = not (is_eager or engine.problem())

        def body(*arrays: Any) -> list[Any]:
            if not is_graph:
                self._discard(list(self._early))  # a graph has failed since the last step
            return self._exchange(arrays, raises)

        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        wide = [tf.cast(gradient, tf.float32) for gradient in dense]
        indices = [entry.index for entry in self.entries]
        values = [tf.convert_to_tensor(variable) for variable in variables]
        wide = self._made_ready(tf.zeros((), tf.float32), indices, wide, values)
        with of_tensorflow(), tf.control_dependencies(after):
            results = engine.in_python(tf.numpy_function, body, wide, [tf.float32] * len(wide))
        for result, gradient in zip(results, dense, strict=True):
            result.set_shape(gradient.shape)
        return [tf.cast(result, gradient.dtype) for result, gradient in zip(results, dense, strict=True)]

    def _exchange(self, arrays: Sequence[Any], raises: bool) -> list[np.ndarray]:
        for number, entry in enumerate(self.entries):
            if number not in self._early:
                self._gradients[number] = entry.to_wire(np.asarray(arrays[number]))
        try:
            if self._stale:
                self.driver.stepper.object(Flag.CHANGED)
            self.driver.step(lambda: False)
        except NonFiniteError:
            if raises:
                raise
        finally:
            self._clear()
        return [entry.from_wire(self.driver.stepper.average(number)) for number, entry in enumerate(self.entries)]


def coded(
    what: str,
    variables: Sequence[Any],
    names: Callable[[], Sequence[str]],
    compression: type[CodesCompressor],
    process_set: ProcessSet,
) -> CodedGradients:
    """Returns what averages gradients of ``variables``. The first call with them is collective, and the first one after
    a new ``init``.

    Args:
        what: "DistributedOptimizer" or "DistributedGradientTape"; names the user.
        variables: Those that have a gradient.
        names: Returns their names on the wire, the same on all ranks.
        compression: The codes.
        process_set: The ranks that average.

    Raises:
        InvalidRequestError: A variable is of a type that has no codes, or the graph is one of ``tf.compat.v1``.
        MismatchError: The ranks average different variables, or compress differently.
    """
    bits = compression.bits
    if not tf.executing_eagerly() and not engine.runs_in_order():
        raise InvalidRequestError(
            f"Compression.int{bits} works in eager mode and in tf.function, not in graphs of tf.compat.v1; use "
            "Compression.bf16 there."
        )
    session = sessions.current()
    number = process_set.number(session)
    key = what, number, bits, tuple((key_of(v), shape_of(v)) for v in variables)
    found = _known.setdefault(session, {}).get(key)
    if found is None or not found.is_of(variables):
        for variable in variables:
            if tf.as_dtype(variable.dtype).base_dtype not in _DTYPES:
                raise InvalidRequestError(
                    f"variable '{name_of(variable)}' is {tf.as_dtype(variable.dtype).name}; Compression.int{bits} "
                    "needs float32, bfloat16 or float16."
                )
        core = TapeAverages if what == "DistributedGradientTape" else ReturnedAverages
        options = LowBitOptions(dense_bits=bits)  # type: ignore[arg-type]

        def make(session: Session, number: int, frontend: CodedGradients) -> Driver:
            return LowBitDriver(session, number, frontend.specs, frontend, core, options, Common())

        found = _known[session][key] = CodedGradients(wire_variables(variables, None, names()), process_set, make)
        found.follow(variables)
        found.connect(session)
    elif found.runtime is not session.runtime:
        found.connect(session)
    return found
