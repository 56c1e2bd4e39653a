"""Horovod's callbacks, for the Keras that is ``tf.keras``: Keras 3, or Keras 2 by TF_USE_LEGACY_KERAS=1.

``process_set`` are the ranks with which a callback communicates; None for those of the model's distributed optimizers,
or all ranks if it has none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ocomm import api
from ocomm.elastic import State
from ocomm.errors import InvalidRequestError
from ocomm.operations import ProcessSet, global_process_set
from ocomm.training import report
from ocomm_tf import mpi_ops
from ocomm_tf.functions import broadcast_variables, check_replicas
from ocomm_tf.keras_optimizer import (
    Distributed,
    LossScaleOptimizer,
    MultiOptimizer,
    accumulators,
    optimizers_inside,
)
from ocomm_tf.keras_version import IS_KERAS_2, all_variables, build_optimizer, in_keras_2, is_of_keras_2, run_in_session

_log = logging.getLogger("ocomm")
#: Number of batches whose gradients a ``train_step`` of the model's own may add up before it averages them.
_MOST_ADDED_UP = 64
#: The part of the learning rate at which a constant multiplier is told to have been raised to a power.
_ALMOST_NOTHING = 1e-3
_OPTIMIZERS = (tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer if IS_KERAS_2 else ())


class _OfThisKeras(tf.keras.callbacks.Callback):
    def set_model(self, model: Any) -> None:
        if is_of_keras_2(model) is not IS_KERAS_2:
            which, change = (3, "unset") if IS_KERAS_2 else (2, "set")
            raise InvalidRequestError(
                f"this {type(model).__name__} is of Keras {which}, and the callback is not: {change} "
                "TF_USE_LEGACY_KERAS=1, which makes tf.keras Keras 2 (tf_keras)."
            )
        super().set_model(model)


class _Callback(_OfThisKeras):
    """Base class of callbacks that communicate with the ranks that train the model."""

    def __init__(self, process_set: ProcessSet | None) -> None:
        super().__init__()
        self._process_set = process_set

    @property
    def process_set(self) -> ProcessSet:
        if self._process_set is not None:
            return self._process_set
        distributed = self.distributed
        return distributed[0].ocomm_process_set if distributed else global_process_set

    @property
    def optimizers(self) -> list[Any]:
        """The model's optimizer, and those that its own ``compile`` has made attributes, as for a GAN; and what is
        inside them.
        """
        found = {id(v): in_keras_2(v) for v in vars(self.model).values() if isinstance(v, _OPTIMIZERS)}
        return [one for optimizer in found.values() for one in (optimizer, *optimizers_inside(optimizer))]

    @property
    def distributed(self) -> list[Any]:
        """The distributed optimizers among ``optimizers``."""
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, Distributed)]

    @property
    def averages_itself(self) -> bool:
        """True if the model has a ``train_step`` of its own, which may average gradients, and add them up before."""
        return type(self.model).train_step is not tf.keras.Model.train_step

    def on_train_begin(self, logs: Any = None) -> None:
        """Raises InvalidRequestError if the optimizer is not distributed, unless the model has a ``train_step`` of its
        own, which may average gradients.
        """
        optimizer = in_keras_2(self.model.optimizer)
        # What is inside refuses to be there in its first step, and says what to do instead.
        if isinstance(optimizer, LossScaleOptimizer) and isinstance(optimizer.inner_optimizer, Distributed):
            return
        inside = optimizers_inside(optimizer)
        if isinstance(optimizer, MultiOptimizer) and not inside:  # its function has not been asked yet
            return
        alone = [one for one in inside or [optimizer] if not isinstance(one, Distributed)]
        if self.process_set.size() > 1 and alone and not self.averages_itself:
            around = f"{type(optimizer).__name__} around " if inside else ""
            raise InvalidRequestError(
                f"the model was compiled with {around}{type(alone[0]).__name__}, which is not distributed: every rank "
                f"would train alone. {'Wrap what is inside' if inside else 'Compile it'} with "
                "hvd.DistributedOptimizer(optimizer)."
            )


class BroadcastGlobalVariablesCallback(_Callback):
    """Overwrites the model's and the optimizer's variables with those of ``root_rank``. Collective.

    The model's variables are broadcast before the first batch, since 1-bit optimizers begin with equal replicas, and so
    is their state if only some ranks have loaded one. All variables are broadcast after the first step, when they
    exist; gradients that an optimizer accumulates over several passes stay each rank's own. The optimizers are those
    that the model has as attributes. A callback that loads a state, such as BackupAndRestore, must come before this
    one, on all ranks, each with a folder of its own: the epoch at which ``fit`` goes on is not broadcast. A model that
    is built by its first batch has no variables before it: with a 1-bit optimizer call ``build`` or the model before
    ``fit``. The optimizer of a built model is built, too; but not where the model has a ``train_step`` of its own: if
    only some ranks restore it, call its ``build`` on all ranks before.

    Args:
        root_rank: A rank of the whole job.
        device: Accepted as in Horovod, and ignored.
        local_variables: Variables that are not broadcast.
        process_set: The ranks that take part; None for those of the model's optimizers.

    Raises:
        InvalidRequestError: The ranks exchanged nothing in the first step, so each would train alone; or in the first
            64 batches, if the model has a ``train_step`` of its own.

    If ranks of Torch train the same model, which the optimizer's ``names`` say, only trainable variables are broadcast.
    Those ranks call ``broadcast_parameters(model.named_parameters(), root_rank)`` before they wrap their optimizer.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Any = None, process_set: ProcessSet | None = None
    ) -> None:
        super().__init__(process_set)
        self.root_rank = root_rank
        self._local = {id(v) for v in local_variables or ()}
        self._done = False
        self._before = 0  # number of exchanges of this process before training began
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts the model's variables. Raises InvalidRequestError if an optimizer is not distributed."""
        super().on_train_begin(logs)
        if self._done:
            return
        if self._names is None:
            self._broadcast(self.model.weights if self.model.built else [])  # Keras 2 raises an error
            self._build_optimizer()
            for optimizer in self.distributed:
                optimizer.ocomm_begin_alike(self.root_rank)
        else:
            broadcast_variables(self.model.trainable_variables, self.root_rank, self.process_set, names=self._names)
        self._before = mpi_ops.exchanged()

    def _build_optimizer(self) -> None:
        """Builds the model's optimizer as its first batch would, so that what a rank has restored is in its
        variables.
        """
        model = self.model
        if not IS_KERAS_2 and not self.averages_itself and model.built and isinstance(model.optimizer, Distributed):
            build_optimizer(model.optimizer, model.trainable_variables)

    @property
    def _names(self) -> Mapping[str, Any] | None:
        return next((optimizer.ocomm_names for optimizer in self.distributed), None)

    def _broadcast(self, variables: list[Any]) -> None:
        shared = [v for v in variables if id(v) not in self._local]
        operation = broadcast_variables(shared, self.root_rank, self.process_set)
        if operation is not None:  # Keras 2 without eager execution
            run_in_session(operation)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts all variables after the first batch."""
        if self._done:
            return
        self._batches += 1
        # The counters of distributed optimizers are used because TensorFlow may run nothing, as with Keras' Torch
        # backend.
        counted = [optimizer.ocomm_exchanges for optimizer in self.distributed]
        if self.process_set.size() > 1 and not (any(counted) if counted else mpi_ops.exchanged() - self._before):
            if self._batches < max([_MOST_ADDED_UP if self.averages_itself else 1, *map(_passes, self.optimizers)]):
                return
            raise InvalidRequestError(
                f"the first {self._batches} batch(es) were trained without any exchange between the ranks; they would "
                "train apart. Does the model's train_step() use its optimizer, or a DistributedGradientTape?"
            )
        self._done = True
        self._broadcast_all()

    def on_train_end(self, logs: Any = None) -> None:
        """Warns if a ``train_step`` of the model's own has exchanged nothing."""
        if self._batches and not self._done and not api.rank():
            _log.warning("%d batches were trained without any exchange between the ranks", self._batches)

    def _broadcast_all(self) -> None:
        if self._names is None and not any(optimizer.steps_alone for optimizer in self.distributed):
            # Gradients that Keras has accumulated since the last step are each rank's own.
            own = {id(v) for o in self.optimizers for v in accumulators(o)}
            shared = {id(v): v for o in self.optimizers for v in all_variables(o) if id(v) not in own}
            self._broadcast([*self.model.weights, *shared.values()])


class MetricAverageCallback(_Callback):
    """Replaces the metrics in ``logs`` by their averages over the ranks at the end of every epoch. Collective.

    Put it before callbacks that read the metrics (ReduceLROnPlateau, TensorBoard, ModelCheckpoint).

    Args:
        device: Accepted as in Horovod, and ignored.
        process_set: The ranks that take part; None for those of the model's optimizers.

    Raises:
        InvalidRequestError: When training begins, as with all callbacks here: the model's optimizer is not distributed
            and its ``train_step`` is Keras' own, so every rank would train alone.
    """

    def __init__(self, device: str = "", process_set: ProcessSet | None = None) -> None:
        super().__init__(process_set)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Averages the metrics as one float64 tensor."""
        if not logs:
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        values = np.array([float(logs[name]) for name in names])
        averaged = api.allreduce(values, name=f"metrics.{','.join(names)}", process_set=self.process_set)
        logs.update(zip(names, averaged.tolist(), strict=True))


class LearningRateScheduleCallback(_Callback):
    """Sets the learning rate to ``initial_lr`` times ``multiplier`` from ``start_epoch`` until ``end_epoch``.

    Args:
        initial_lr: The learning rate that is multiplied.
        multiplier: A function of the epoch; or a number, which is raised to the number of epochs since ``start_epoch``
            (in older versions of Horovod it was the factor of all of them: ``lambda epoch: number``).
        start_epoch: The first epoch.
        end_epoch: The epoch after the last one; None for no end.
        staircase: True to set the rate once per epoch; False for every batch, at a fraction of an epoch.
        momentum_correction: Whether to multiply ``optimizer.momentum`` by the ratio of the rates for one batch, if it
            is a variable.
        steps_per_epoch: Number of batches, needed if ``staircase`` is False and Keras does not know it.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__(None)
        if initial_lr is None:
            raise InvalidRequestError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.staircase = staircase
        self.multiplier: Callable[[float], float]
        self._constant = None if callable(multiplier) else multiplier
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)
        self._epoch = 0
        self._restore: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the number of steps per epoch."""
        super().on_train_begin(logs)
        if self._constant is not None and self.process_set.rank() == 0:
            self._warn_of_decay(self._constant)
        if not self.staircase and not self.steps_per_epoch:
            samples, batch = self.params.get("samples"), self.params.get("batch_size")  # without eager execution
            self.steps_per_epoch = self.params.get("steps") or (samples and batch and samples // batch)
            if not self.steps_per_epoch:
                raise InvalidRequestError(
                    f"{type(self).__name__}: the number of steps per epoch is not known; pass steps_per_epoch."
                )

    def _warn_of_decay(self, constant: float) -> None:
        """Warns of a number that makes the last epochs' rate almost 0, as one for older versions of Horovod does."""
        epochs = self.params.get("epochs") or 0
        last = min(epochs, epochs if self.end_epoch is None else self.end_epoch) - 1
        if last > self.start_epoch + 1 and 0 <= constant ** (last - self.start_epoch) < _ALMOST_NOTHING:
            _log.warning(
                "%s(multiplier=%g, start_epoch=%d): the number is raised to the number of epochs since start_epoch, so "
                "epoch %d has initial_lr, and epoch %d %.3g of it. If all of them are to have %g of it, pass "
                "multiplier=lambda epoch: %g.",
                type(self).__name__,
                constant,
                self.start_epoch,
                self.start_epoch,
                last,
                constant ** (last - self.start_epoch),
                constant,
                constant,
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the learning rate."""
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._adjust(self._epoch)
        elif not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self._epoch + batch / self.steps_per_epoch)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = _number(optimizer.learning_rate)
        after = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = after
        momentum = getattr(optimizer, "momentum", None)
        if self.momentum_correction and before and isinstance(momentum, (keras.Variable, tf.Variable)):
            self._restore = _number(momentum)
            _assign(momentum, self._restore * after / before)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Restores the momentum."""
        if self._restore is not None:
            _assign(self.model.optimizer.momentum, self._restore)
            self._restore = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the learning rate to the history."""
        if logs is not None:
            logs["lr"] = _number(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr`` / number of ranks to ``initial_lr`` in ``warmup_epochs``.

    The other arguments are those of ``LearningRateScheduleCallback``; ``verbose`` > 0 prints a line at the end.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        process_set: ProcessSet | None = None,
    ) -> None:
        def multiplier(epoch: float) -> float:
            ranks = self.process_set.size()
            # Uses the end of a batch, so that the last one of the warm-up has the full rate.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return (epoch * (ranks - 1) / warmup_epochs + 1) / ranks

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self._process_set = process_set
        self.verbose = verbose
        self.warmup_epochs = warmup_epochs

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Prints on the first rank that the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose > 0 and self.process_set.rank() == 0:
            rate = _number(self.model.optimizer.learning_rate)
            print(f"Epoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class ReplicaChecksumCallback(_Callback):
    """Compares the model's trainable variables between the ranks, bit for bit, at the end of every epoch. Collective.

    Raises MismatchError, which names the first variable that differs and the ranks.
    """

    def __init__(self, process_set: ProcessSet | None = None) -> None:
        super().__init__(process_set)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compares the variables."""
        check_replicas(self.model.trainable_variables, self.process_set)


class DiLoCoCallback(_Callback):
    """Evaluates and ends a fit with ``DistributedDiLoCo`` on variables that all ranks have.

    Within ``evaluate`` and the validation of ``fit`` the model has the anchors; after it the rank's own variables come
    back. At the end of ``fit`` all ranks call ``finish()``, which is collective.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self._inside: Any = None

    @property
    def _optimizer(self) -> Any:
        optimizer = self.model.optimizer
        if not getattr(optimizer, "steps_alone", False):
            raise InvalidRequestError(
                f"DiLoCoCallback is for DistributedDiLoCo, and the model was compiled with {type(optimizer).__name__}."
            )
        return optimizer

    def on_test_begin(self, logs: Any = None) -> None:
        """Gives the model the anchors."""
        self._inside = self._optimizer.evaluation_parameters()
        self._inside.__enter__()

    def on_test_end(self, logs: Any = None) -> None:
        """Gives the model this rank's own variables."""
        if self._inside is not None:
            inside, self._inside = self._inside, None
            inside.__exit__(None, None, None)

    def on_train_end(self, logs: Any = None) -> None:
        """Syncs what has changed since the last syncs."""
        self._optimizer.finish()


class FinishCallback(_Callback):
    """Makes the variables of all ranks equal at the end of ``fit``, by ``finish()`` of the optimizers that have it: 0/1
    Adam and DiLoCo. Collective. For other optimizers it does nothing.

    Put it before callbacks that save.

    Args:
        equal_replicas: Whether validation, ``evaluate`` and what callbacks save at the end of an epoch are to see equal
            variables, too: ``finish()`` is then called before each of them.
    """

    def __init__(self, equal_replicas: bool = False) -> None:
        super().__init__(None)
        self.equal_replicas = equal_replicas

    def _finish(self) -> None:
        optimizer = self.model.optimizer
        for one in optimizers_inside(optimizer) or [optimizer]:
            inner = one.inner_optimizer if isinstance(one, LossScaleOptimizer) else one
            if hasattr(inner, "finish"):
                inner.finish()

    def on_test_begin(self, logs: Any = None) -> None:
        """Makes the variables equal, if asked for."""
        if self.equal_replicas:
            self._finish()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Makes the variables equal, if asked for."""
        if self.equal_replicas:
            self._finish()

    def on_train_end(self, logs: Any = None) -> None:
        """Makes the variables equal."""
        self._finish()


class CompressionReportCallback(_OfThisKeras):
    """Adds the numbers of the optimizer's ``compression_report()`` to ``logs`` at the end of every epoch, as
    ``"ocomm/ratio"`` and so on. Not collective.

    The numbers are those of this rank. Put it before callbacks that log metrics, such as those of TensorBoard, W&B or
    MLflow.

    Args:
        prefix: Put before each name.
    """

    def __init__(self, prefix: str = "ocomm/") -> None:
        super().__init__()
        self.prefix = prefix

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the numbers; none if the optimizer does not compress."""
        found = getattr(self.model.optimizer, "compression_report", None)
        if logs is not None and found is not None:
            logs.update(report.metrics(found(), self.prefix))


class CommitStateCallback(_OfThisKeras):
    """Commits an elastic ``state`` after every ``batches_per_commit`` batches, and at the end of every epoch.
    Collective.

    Put it after the callbacks that count batches and epochs.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._since = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits if it is time to."""
        self._since += 1
        if self._since >= self.batches_per_commit:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits the state."""
        self._commit()

    def _commit(self) -> None:
        self._since = 0
        self.state.commit()


class UpdateBatchStateCallback(_OfThisKeras):
    """Counts in ``state.batch`` the batches that are done in this epoch; 0 at its end.

    If training continues from such a state, leave those batches out of the first epoch.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._begun = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts at the state's batch."""
        self._begun = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the batch."""
        self.state.batch = self._begun + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Starts again at 0."""
        self._begun = self.state.batch = 0


class UpdateEpochStateCallback(_OfThisKeras):
    """Counts in ``state.epoch`` the epochs that are done.

    Use ``fit(initial_epoch=state.epoch, epochs=EPOCHS)`` or, as with Horovod, ``fit(epochs=EPOCHS - state.epoch)``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Notes that a new fit begins."""
        self._before = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Finds, in the first epoch, the number of epochs that Keras does not count."""
        if self._before is None:
            self._before = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts the epoch."""
        assert self._before is not None
        self.state.epoch = self._before + epoch + 1


def _passes(optimizer: Any) -> int:
    """Returns the number of batches in one step of the optimizer."""
    return getattr(getattr(optimizer, "inner_optimizer", optimizer), "gradient_accumulation_steps", None) or 1


def _number(value: Any) -> float:
    """Returns a Keras variable, tensor or number as a number."""
    if IS_KERAS_2:
        return float(tf.keras.backend.get_value(value))  # also without eager execution
    return float(value.numpy() if hasattr(value, "numpy") else value)


def _assign(variable: Any, value: float) -> None:
    if IS_KERAS_2:
        tf.keras.backend.set_value(variable, value)
    else:
        variable.assign(value)
