"""Lightning: ``Trainer(strategy=OcommStrategy("onebit_adam"))``, or ``strategy="ocomm"`` once this module is imported.

The optimizers that ``configure_optimizers`` returns are wrapped, and the module is not put into
DistributedDataParallel, so gradients travel once. Nothing else of a LightningModule changes. Where a script imports
``pytorch_lightning`` and not ``lightning``, the strategy is one of that package.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ocomm_torch as hvd
from ocomm.config import read_launch
from ocomm.docstrings import documented
from ocomm.errors import InvalidRequestError
from ocomm_torch import trainers

_IS_OLD_NAME = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
_PYTORCH = "pytorch_lightning" if _IS_OLD_NAME else "lightning.pytorch"
_FABRIC = "lightning_fabric" if _IS_OLD_NAME else "lightning.fabric"
_strategies: Any = importlib.import_module(f"{_PYTORCH}.strategies")
_cloud_io: Any = importlib.import_module(f"{_FABRIC}.utilities.cloud_io")
_environments: Any = importlib.import_module(f"{_FABRIC}.plugins.environments")
_rank_zero: Any = importlib.import_module(f"{_PYTORCH}.utilities.rank_zero")
_optimizer: Any = importlib.import_module(f"{_PYTORCH}.core.optimizer")
DDPStrategy: Any = _strategies.DDPStrategy
_callbacks: Any = importlib.import_module(f"{_PYTORCH}.callbacks")
Callback: Any = _callbacks.Callback
GradientAccumulationScheduler: Any = _callbacks.GradientAccumulationScheduler
StochasticWeightAveraging: Any = _callbacks.StochasticWeightAveraging
ClusterEnvironment: Any = _environments.ClusterEnvironment
LightningEnvironment: Any = _environments.LightningEnvironment
MPIEnvironment: Any = _environments.MPIEnvironment


def _has_launcher() -> bool:
    """True if a launcher has started this process as one rank of a job, so that ``init()`` can be called at once.

    Lightning's own launcher sets no RANK.
    """
    launch = read_launch(os.environ)
    return hvd.is_initialized() or (launch is not None and (launch.is_mpi or "RANK" in os.environ))


class OcommEnvironment(ClusterEnvironment):
    """The ranks of a job that a launcher has started: mpirun, ocommrun, srun, torchrun. Making it calls ``init()``."""

    def __init__(self) -> None:
        super().__init__()
        hvd.init()

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        return _has_launcher()

    def world_size(self) -> int:
        return hvd.size()

    def set_world_size(self, size: int) -> None:
        """The launcher has set it."""

    def global_rank(self) -> int:
        return hvd.rank()

    def set_global_rank(self, rank: int) -> None:
        """The launcher has set it."""

    def local_rank(self) -> int:
        return hvd.local_rank()

    def node_rank(self) -> int:
        return hvd.cross_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """InvalidRequestError if the Trainer counts other processes than the launcher has started."""
        if num_devices * num_nodes != hvd.size():
            raise InvalidRequestError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}) is for {num_devices * num_nodes} process(es), "
                f"and the launcher has started {hvd.size()}. Pass devices={hvd.local_size()}, "
                f"num_nodes={hvd.cross_size()}: a device is a process here."
            )


@documented(
    {
        "optimizer": f'What wraps each optimizer of ``configure_optimizers``: {trainers.ONE_BIT_NAMES}, "dense" for '
        "``DistributedOptimizer``, or a function with their arguments."
    }
)
class OcommStrategy(DDPStrategy):
    """Data-parallel training whose gradients ocomm's optimizers exchange.

    The Trainer's ``gradient_clip_val`` becomes ``max_grad_norm`` of a 1-bit optimizer, its number of steps
    ``total_steps``, and gradients that it accumulates stay on their rank until the last batch of a step. Checkpoints
    have a folder beside them, ``NAME.ckpt.ranks``, with what only one rank has of a 1-bit optimizer. At the end of
    ``fit``, however it ends but by an error, all ranks have the same parameters: 0/1 Adam and DiLoCo ``finish()``.

    Args:
        {arguments}
        equal_replicas: Whether validation and checkpoints are to see equal replicas, too: ``finish()`` is then also
            called before each of them.
        accelerator: As in ``DDPStrategy``.
        parallel_devices: As in ``DDPStrategy``.
        cluster_environment: As in ``DDPStrategy``; None for the launcher's, and Lightning's own launcher without one.
        checkpoint_io: As in ``DDPStrategy``.
        precision_plugin: As in ``DDPStrategy``.
        process_group_backend: Of torch.distributed, for metrics and what else Lightning exchanges; None for "ocomm", on
            a GPU "nccl".
        timeout: Of that process group.
        options: Passed on to the function that wraps. A file of LightningCLI has them under ``dict_kwargs:``, beside
            ``init_args:``.

    Raises:
        InvalidRequestError: There is no optimizer of that name.
    """

    strategy_name = "ocomm"

    def __init__(
        self,
        optimizer: str | Callable[..., Any] = "onebit_adam",
        *,
        equal_replicas: bool = False,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta = dist.default_pg_timeout,
        **options: Any,
    ) -> None:
        self._wrapper = trainers.wrapper_of(optimizer)
        self._options = options
        self.equal_replicas = equal_replicas
        self._loaded_from: Any = None
        #: The checkpoint from which the fit goes on that is being set up; None for none.
        self._goes_on_from: Mapping[str, Any] | None = None
        if cluster_environment is None:
            cluster_environment = OcommEnvironment() if _has_launcher() else LightningEnvironment()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes ``strategy="ocomm"`` known."""
        strategy_registry.register("ocomm", cls, description="Gradients travel by ocomm's optimizers, by 1 bit.")

    # Processes

    def setup_distributed(self) -> None:
        """Calls ``init()``, and makes a process group for what Lightning exchanges by torch.distributed. Collective."""
        environment = self.cluster_environment
        if not hvd.is_initialized():
            # Processes of Lightning's own launcher, which know their number by now.
            os.environ.update(RANK=str(environment.global_rank()), WORLD_SIZE=str(environment.world_size()))
            os.environ.setdefault("MASTER_ADDR", environment.main_address)
            os.environ.setdefault("MASTER_PORT", str(environment.main_port))
            hvd.init()
        if hvd.size() != environment.world_size() or hvd.rank() != environment.global_rank():
            raise InvalidRequestError(
                f"Lightning's {type(environment).__name__} says that this process is rank {environment.global_rank()} "
                f"of {environment.world_size()}, and it is rank {hvd.rank()} of {hvd.size()} of ocomm's job. Leave "
                "cluster_environment and plugins to OcommStrategy."
            )
        if not dist.is_initialized():
            dist.init_process_group(self._get_process_group_backend(), init_method="ocomm://", timeout=self._timeout)
        super().setup_distributed()

    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is None and self.root_device.type == "cpu":
            return "ocomm"
        return super()._get_process_group_backend()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks; not once this rank has failed, because the others may never come: callbacks such as
        OnExceptionCheckpoint save then, and saving ends with a barrier.
        """
        module = self.lightning_module
        if module is None or module._trainer is None or not module._trainer.interrupted:
            super().barrier(*args, **kwargs)

    # The model and its optimizers

    def configure_ddp(self) -> None:
        """Makes the replicas alike. The module stays as it is: its optimizers exchange gradients. Collective."""
        self._broadcast([*self.model.named_parameters(), *self.model.named_buffers()])

    def _broadcast(self, named: list[tuple[str, Any]]) -> None:
        if named:
            hvd.broadcast_parameters(named, root_rank=0)

    @property
    def optimizers(self) -> list[Any]:
        """The wrapped optimizers."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        super(OcommStrategy, type(self)).optimizers.fset(self, optimizers)
        # A LightningOptimizer has the class of its optimizer, and attributes of its own: methods of the class would set
        # those. Its own step() is Lightning's.
        for theirs, optimizer in zip(self._lightning_optimizers, optimizers, strict=True):
            for name, _ in inspect.getmembers(type(optimizer), callable):
                if not name.startswith("_") and not hasattr(_optimizer.LightningOptimizer, name):
                    setattr(theirs, name, getattr(optimizer, name))

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the module's optimizers, and wraps them. Collective."""
        self.optimizers = list[Any]()  # those of a fit before this one must be gone with their hooks
        super().setup_optimizers(trainer)
        if not any(isinstance(callback, _Finishing) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, _Finishing())  # others read parameters, and put averages in their place
        checkpoint, self._goes_on_from = self._goes_on_from if trainer.ckpt_path else None, None
        states = checkpoint["optimizer_states"] if checkpoint else [None] * len(self.optimizers)
        named = list(self.lightning_module.named_parameters())

        def left() -> int | None:
            return _steps_left(trainer, checkpoint, len(states))

        self.optimizers = [
            optimizer
            if isinstance(optimizer, _optimizer._MockOptimizer)
            else self._wrapped(optimizer, named, trainer, left, state)
            for optimizer, state in zip(self.optimizers, states, strict=True)
        ]

    def _wrapped(
        self,
        optimizer: Any,
        named: list[tuple[str, Any]],
        trainer: Any,
        left: Callable[[], int | None],
        state: Mapping[str, Any] | None,
    ) -> Any:
        def total_steps() -> int | None:
            steps = left()
            return None if steps is None else max(trainers.steps_in(state, self._wrapper) + steps, 1)

        by_norm = trainer.gradient_clip_algorithm in (None, "norm")
        return trainers.wrap(
            self._wrapper,
            optimizer,
            named,
            self._options,
            total_steps=total_steps,
            max_grad_norm=trainer.gradient_clip_val or None if by_norm else None,
            setting=_CLIPPING,
        )

    def setup_precision_plugin(self) -> None:
        """Leaves the clipping of gradients to optimizers that do it by themselves."""
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        # The only place through which all clipping of Lightning's goes, that of configure_gradient_clipping, too.
        plugin.clip_gradients = functools.partial(_clip, type(plugin).clip_gradients, plugin)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backward passes inside this context add to gradients, and exchange nothing."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                if hasattr(optimizer, "no_sync"):
                    stack.enter_context(optimizer.no_sync())
            yield

    # Evaluation

    def finish(self) -> None:
        """Makes the parameters of all ranks equal, by ``finish()`` of the optimizers that have it. Averages over the
        ranks what callbacks such as WeightAveraging have averaged of parameters that differed. Collective.
        """
        trainers.finish(self.optimizers)
        if any(hasattr(optimizer, "finish") for optimizer in self.optimizers):
            for _, averaged in self._averaged_models():
                hvd.grouped_allreduce_([p.detach() for p in averaged.parameters()], name="OcommStrategy.averages")

    def _averaged_models(self) -> list[tuple[int, Any]]:
        """Returns the averaged models that callbacks keep, each with the number of its callback."""
        callbacks = enumerate(self.lightning_module.trainer.callbacks)
        found = [(number, getattr(callback, "_average_model", None)) for number, callback in callbacks]
        return [(number, averaged) for number, averaged in found if averaged is not None]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the model's state for a checkpoint. Collective if replicas are made equal for it."""
        if self.equal_replicas and not self.lightning_module.trainer.interrupted:
            self.finish()
        return super().lightning_module_state_dict()

    def _share_buffers(self) -> None:
        """Gives all ranks the buffers of rank 0, such as the means of BatchNorm, as DDP does it. Collective.

        Callbacks such as WeightAveraging put an averaged model's buffers in their place after this, so those, too.
        """
        module = self.lightning_module
        if module is None:
            return
        named = list(module.named_buffers())
        for number, averaged in self._averaged_models():
            named += [(f"average {number}.{name}", buffer) for name, buffer in averaged.named_buffers()]
        self._broadcast(named)

    def on_validation_start(self) -> None:
        """Called before validation. Collective."""
        self._share_buffers()

    def on_test_start(self) -> None:
        """Called before a test. Collective."""
        self._share_buffers()

    def on_predict_start(self) -> None:
        """Called before predictions. Collective."""
        self._share_buffers()

    def on_train_end(self) -> None:
        """Shares the buffers that the run ends with, and says on rank 0 what was sent. Collective."""
        self._share_buffers()
        for said in filter(None, map(trainers.summary, self.optimizers)):
            _rank_zero.rank_zero_info(said)

    # Checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a checkpoint, and beside it what only this rank has. All ranks call it.

        A run that is killed meanwhile finds the whole checkpoint, or the one that was at its place.
        """
        if "optimizer_states" not in checkpoint or not trainers.compressed(self.optimizers):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        folder, step = _rank_folder(filepath), checkpoint["global_step"]
        states = trainers.rank_states(self.optimizers)
        self.checkpoint_io.save_checkpoint(states, _rank_file(folder, step, hvd.rank()))
        self.barrier("OcommStrategy.save_checkpoint")  # of all ranks, before the checkpoint asks for them
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero:
            self._remove_older(folder, step)

    def _remove_older(self, folder: str, step: int) -> None:
        """Removes the files of another step from a folder of rank states."""
        files = _cloud_io.get_filesystem(folder)
        for name in files.ls(folder, detail=False) if files.exists(folder) else ():  # not yet, by AsyncCheckpointIO
            if not os.path.basename(name).startswith(f"{step}."):
                self.checkpoint_io.remove_checkpoint(os.path.join(folder, os.path.basename(name)))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint with what is beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(_rank_folder(filepath))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint; notes where it was for ``load_optimizer_state_dict``."""
        self._loaded_from = checkpoint_path
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._goes_on_from = checkpoint if "optimizer_states" in checkpoint else None
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizers' states, and what each rank has saved beside the checkpoint. Collective.

        Raises CheckpointError if a state is of another run.
        """
        super().load_optimizer_state_dict(checkpoint)
        folder, last = _rank_folder(self._loaded_from), dict[int, Any]()

        def name(rank: int) -> str:
            return _rank_file(folder, checkpoint["global_step"], rank)

        def read(rank: int) -> Any:
            if rank not in last:
                last.clear()
                try:
                    last[rank] = self.checkpoint_io.load_checkpoint(name(rank))
                except FileNotFoundError:
                    last[rank] = None
            return last[rank]

        for done in trainers.load_rank_states(self.optimizers, read, name, hvd.size()):
            _rank_zero.rank_zero_info(f"ocomm: rank states {done['rank_state']} {done['why']}".rstrip())


class _Finishing(Callback):
    """The first callback of a Trainer: makes replicas equal before others look at parameters."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Called before the strategy's ``on_train_end``. Collective."""
        trainer.strategy.finish()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before StochasticWeightAveraging takes parameters into its average, or replaces them by it.
        Collective.
        """
        if any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
            trainer.strategy.finish()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before the strategy's ``on_validation_start``. Collective."""
        if trainer.strategy.equal_replicas:
            trainer.strategy.finish()


def _steps_left(trainer: Any, checkpoint: Mapping[str, Any] | None, optimizers: int) -> int | None:
    """Returns the number of steps that each optimizer takes in a fit; None if it is not known.

    Args:
        trainer: The Trainer, which has trained before if this is not its first fit.
        checkpoint: From which the fit goes on; None if it does not.
        optimizers: The number of optimizers. In manual optimization each is taken to step once for each batch, and
            ``max_steps`` counts the steps of all.
    """
    trainer.estimated_stepping_batches  # noqa: B018, sets up the loader
    loop, batches, limit = trainer.fit_loop, trainer.num_training_batches, math.inf
    is_automatic = trainer.lightning_module.automatic_optimization
    if checkpoint is None:
        steps, epoch, done = trainer.global_step, loop.epoch_progress.current.processed, 0
    else:
        steps, loops = checkpoint["global_step"], checkpoint["loops"]["fit_loop"]
        epoch = loops["epoch_progress"]["current"]["processed"]
        is_inside = loops["epoch_progress"]["current"]["ready"] > epoch
        done = loops["epoch_loop.batch_progress"]["current"]["ready"] if is_inside else 0
    if trainer.max_steps != -1:
        limit = max(trainer.max_steps - steps, 0)
        limit = limit if is_automatic else -(-limit // optimizers)
    found = math.inf
    if trainer.max_epochs != -1 and math.isfinite(batches):
        found = 0
        for number in range(epoch, trainer.max_epochs):
            passes = _passes_in(trainer, number)
            found += -(-batches // passes) - (done // passes if number == epoch else 0)
    found = min(found, limit)
    return int(found) if math.isfinite(found) else None


def _passes_in(trainer: Any, epoch: int) -> int:
    """Returns the number of batches whose gradients are added for a step in an epoch."""
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            passes: int = callback.get_accumulate_grad_batches(epoch)
            return passes
    return int(trainer.accumulate_grad_batches)


_CLIPPING = "Trainer(gradient_clip_val=...)"


def _clip(
    theirs: Any,
    plugin: Any,
    optimizer: Any,
    clip_val: float | None = 0.0,
    gradient_clip_algorithm: Any = "norm",
) -> None:
    """``Precision.clip_gradients``, for optimizers that clip by themselves."""
    if clip_val and clip_val > 0:
        norm_type = 2.0 if gradient_clip_algorithm == "norm" else math.inf
        plain = getattr(optimizer, "optimizer", optimizer)  # of a LightningOptimizer
        if not trainers.has_clipped(plain, clip_val, norm_type, f"{_CLIPPING}, or clip_gradients,"):
            theirs(plugin, optimizer, clip_val, gradient_clip_algorithm)


def _rank_folder(filepath: Any) -> str:
    """The folder of the rank states of a checkpoint, which may be a link to another one."""
    path = os.fspath(filepath)
    return f"{os.path.realpath(path) if os.path.exists(path) else path}.ranks"


def _rank_file(folder: str, step: int, rank: int) -> str:
    return f"{folder}/{step}.{rank}.pt"


def _started_by_mpi() -> bool:
    """Stands in for ``MPIEnvironment.detect``, which starts MPI to ask it: in a world of one where Lightning's own
    launcher starts the processes later, and where mpirun has, without the settings that ``init()`` makes.
    """
    launch = read_launch(os.environ)
    if launch is None or not launch.is_mpi:
        return False
    hvd.init()
    return hvd.size() > 1


MPIEnvironment.detect = staticmethod(_started_by_mpi)
OcommStrategy.register_strategies(_strategies.StrategyRegistry)
