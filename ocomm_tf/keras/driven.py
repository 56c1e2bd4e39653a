"""What optimizers of Keras share that have a driver of ``ocomm.training``: its report, and going on in a new job."""

from __future__ import annotations

from typing import Any, Protocol

import keras
import numpy as np

from ocomm import api
from ocomm import session as sessions
from ocomm.errors import InvalidRequestError
from ocomm.kernels.base import Floats
from ocomm.operations import ProcessSet
from ocomm.session import Session
from ocomm.training import report
from ocomm.training.resume import NO_STATE, Source, one_state
from ocomm_tf.keras.masters import LOW_PRECISION
from ocomm_tf.keras_optimizer import Distributed, LossScaleOptimizer
from ocomm_tf.naming import name_of

#: The dtypes of variables that are trained.
FLOATS = ("float32", *LOW_PRECISION)
#: The optimizer's variables, ocomm's own state, masters by tensor, and the tensors' step counts, which need not be
#: ``iterations``.
State = tuple[list[np.ndarray], dict[str, Any], dict[int, Floats], list[int]]


class HasDriver(Protocol):
    """Keeps a driver for a process set, through one job after the other."""

    driver: Any
    #: The runtime through which the driver exchanges.
    runtime: Any

    def connect(self, session: Session) -> None:
        """Makes a driver that has taken no step, among the current ranks. Collective."""
        ...


class Driven(Distributed):
    """Mixin placed before the class of the user's optimizer. ``_setup`` begins with the process set."""

    #: What has the driver; None before ``build``.
    _frontend: HasDriver | None = None
    _setup: tuple[Any, ...]

    @property
    def ocomm_process_set(self) -> ProcessSet:
        process_set: ProcessSet = self._setup[0]
        return process_set

    def _check_dtypes(self: Any, wrapper: str) -> None:
        """Raises InvalidRequestError for a variable that is no float of at most 32 bits."""
        for variable in self._trainable_variables:
            if keras.backend.standardize_dtype(variable.dtype) not in FLOATS:
                raise InvalidRequestError(
                    f"variable '{name_of(variable)}' is {variable.dtype}; {wrapper} needs float32, bfloat16 or float16."
                )

    @report.documented
    def compression_report(self) -> dict[str, Any]:
        """Returns counts of the steps and bytes of this rank, compared with dense averages, and the stage of the run.

        Bytes, and steps by kind, are counted from the start of this process. Not collective.

        Returns:
            {entries}

        Raises:
            InvalidRequestError: No step has been taken yet.
        """
        if self._frontend is None:
            raise InvalidRequestError("there is nothing to report before the optimizer is built.")
        found: dict[str, Any] = self._frontend.driver.report()
        return found

    # The complete state, for elastic jobs

    def ocomm_state(self) -> State:
        """Returns the state that is saved by one rank."""
        raise NotImplementedError

    def ocomm_load_state(self, state: State) -> None:
        """Loads the result of ``ocomm_state``. Collective after ``init``."""
        raise NotImplementedError

    def ocomm_rank_state(self) -> dict[str, Any]:
        """Returns what only this rank has."""
        raise NotImplementedError

    def ocomm_load_rank_state(self, source: Source) -> dict[str, Any]:
        """Loads rank states after ``ocomm_load_state``, as ``ocomm.training.driver.Driver.load_rank_state`` does.
        Collective.
        """
        raise NotImplementedError

    def ocomm_reconnect(self, keep: bool = True) -> None:
        """Joins the current ranks after ``shutdown`` and ``init``. Collective; does nothing if the driver is connected.

        ``keep``: the optimizer keeps its state. If not, a state must be loaded.
        """
        session, frontend = sessions.current(), self._frontend
        assert frontend is not None, "the optimizer is not built"
        if frontend.runtime is session.runtime:
            return
        kept = (self.ocomm_state(), self.ocomm_rank_state()) if keep else None
        frontend.connect(session)
        if kept is not None:
            self.ocomm_load_state(kept[0])
            self.ocomm_load_rank_state(one_state(kept[1]))

    def ocomm_begin_alike(self: Any, root_rank: int) -> None:
        """Makes the ranks' states equal, as ``Distributed`` describes; what only one rank has starts anew."""
        if self._frontend is None:
            return
        mine = int(self.iterations.numpy()), self._frontend.driver.steps
        process_set = self.ocomm_process_set
        if len(set(api.allgather_object(mine, process_set=process_set))) > 1:
            is_root = sessions.current().require_topology().rank == root_rank
            state = api.broadcast_object(self.ocomm_state() if is_root else None, root_rank, process_set=process_set)
            self.ocomm_load_state(state)
            self.ocomm_load_rank_state(NO_STATE)


#: What to do where there can be no loss scale.
WITHOUT_LOSS_SCALE = "Train with the dtype policy mixed_bfloat16, which needs no loss scale."


def refuse_loss_scaling(optimizer: Any, why: str) -> None:
    """Raises InvalidRequestError for a LossScaleOptimizer, or where Keras would need one. ``why`` is a sentence."""
    if isinstance(optimizer, LossScaleOptimizer) or keras.config.dtype_policy().name == "mixed_float16":
        raise InvalidRequestError(f"{why} {WITHOUT_LOSS_SCALE}")


def refuse_averages(optimizer: Any, wrapper: str, instead: str) -> None:
    """Raises InvalidRequestError if Keras would average variables that differ between ranks. ``instead`` says what to
    do.
    """
    if getattr(optimizer, "use_ema", False):
        raise InvalidRequestError(
            f"the {type(optimizer).__name__} has use_ema=True: with {wrapper} each rank would average variables of its "
            "own, and Keras makes these averages the model at the end of fit, another one on each rank. " + instead
        )


def refuse_replicas(optimizer: Any, wrapper: str) -> None:
    """Raises InvalidRequestError for an optimizer of a ``tf.distribute`` strategy that trains on several devices."""
    strategy = getattr(optimizer, "_distribution_strategy", None)  # none on Keras' Torch backend
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        raise InvalidRequestError(
            f"this {type(optimizer).__name__} was made inside a {type(strategy).__name__} of "
            f"{strategy.num_replicas_in_sync} devices, each of which would make steps of {wrapper} by itself. Leave "
            "the strategy out, and start one rank per device (ocommrun -np DEVICES); or use DistributedOptimizer."
        )


def check_unused(optimizer: Any, is_used: bool) -> None:
    """Raises InvalidRequestError if ``optimizer`` has variables already (``is_used``)."""
    if is_used:
        raise InvalidRequestError(
            f"this {type(optimizer).__name__} has been used already; wrap it before its first step. To go on from a "
            "saved model, compile with a new one, build it, and load_weights(file)."
        )
