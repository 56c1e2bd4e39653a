"""Hugging Face's Trainer: ``OcommCallback(trainer)`` before ``trainer.train()``.

The Trainer's optimizer is wrapped, and its DistributedDataParallel leaves the gradients to it, so they travel once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch.nn.parallel import DistributedDataParallel

import ocomm_torch as hvd
from ocomm.docstrings import documented
from ocomm.errors import InvalidRequestError
from ocomm_torch import trainers
from ocomm_torch.optimizers.adam import ADAMS
from ocomm_torch.optimizers.compressed import CompressedOptimizer
from ocomm_torch.optimizers.rank_states import HasRankState

TrainerCallback: Any = transformers.TrainerCallback
_CLIPPING = "max_grad_norm of TrainingArguments"
#: The classes that an optimizer wraps; others wrap any.
_WRAPPED: Mapping[Any, tuple[type, ...]] = {
    hvd.DistributedOneBitAdam: ADAMS,
    hvd.DistributedOneBitLamb: ADAMS,
    hvd.DistributedZeroOneAdam: ADAMS,
    hvd.DistributedEFSGD: (torch.optim.SGD,),
}


@documented(
    {"optimizer": f"What wraps the Trainer's optimizer: {trainers.ONE_BIT_NAMES}, or a function with their arguments."}
)
class OcommCallback(TrainerCallback):
    """Makes a Trainer train with a 1-bit optimizer. Adds itself to the Trainer's callbacks.

    ``max_grad_norm`` of the TrainingArguments becomes the optimizer's, which clips by the norm of all ranks' gradients
    together; the number of steps becomes its ``total_steps``. Checkpoints have a file for each rank,
    ``ocomm_rank0.pt`` and so on, which are found again when the Trainer resumes. At the end of ``train()``, however it
    ends but by an error, all ranks have the same parameters: 0/1 Adam calls ``finish()``. Call it on all ranks, after
    the Trainer is made and before ``trainer.train()``; it calls ``init()``, where that was not called.

    Args:
        trainer: The ``transformers.Trainer``, or one of a subclass.
        {arguments}
        equal_replicas: Whether evaluation and checkpoints are to see equal replicas, too: ``finish()`` is then also
            called before each of them.
        options: Passed on to the function that wraps.

    Raises:
        InvalidRequestError: There is no 1-bit optimizer of that name, the Trainer does not see the ranks of the job,
            has trained before, or has an OcommCallback. Later: the Trainer would clip or exchange gradients by itself.
    """

    def __init__(
        self,
        trainer: Any,
        optimizer: str | Callable[..., Any] = "onebit_adam",
        *,
        equal_replicas: bool = False,
        **options: Any,
    ) -> None:
        self._wrapper = trainers.wrapper_of(optimizer)
        if self._wrapper is hvd.DistributedOptimizer:
            raise InvalidRequestError(
                "the Trainer's DistributedDataParallel averages by itself, which leaves nothing to optimizer='dense'. "
                "Leave OcommCallback out, or name a 1-bit optimizer."
            )
        if any(isinstance(callback, OcommCallback) for callback in trainer.callback_handler.callbacks):
            raise InvalidRequestError("the Trainer has an OcommCallback already. Make one for each Trainer.")
        if isinstance(trainer.optimizer, AcceleratedOptimizer):
            raise InvalidRequestError(
                "the Trainer has handed its optimizer to Accelerate, as train() does, and OcommCallback would come too "
                "late to wrap it. Make OcommCallback before the first train()."
            )
        hvd.init()
        seen = trainer.args.world_size
        if seen != hvd.size():
            raise InvalidRequestError(
                f"the Trainer sees {seen} process(es), and this is rank {hvd.rank()} of {hvd.size()}: each would train "
                "alone. On CPUs it looks for the others if it has TrainingArguments(use_cpu=True), or with "
                "ACCELERATE_USE_CPU=1. Call init() before TrainingArguments, or start the script with ocommrun or "
                "torchrun."
            )
        self._trainer = trainer
        self._options = options
        #: The norm of the step that is under way, for the Trainer's log: it is known when the step was taken.
        self._norm: torch.Tensor | None = None
        #: The number of steps for which the Trainer makes a scheduler beside the optimizer, while it does so.
        self._scheduled: int | None = None
        #: The ``total_steps`` that the optimizer was made with; None if the script has chosen, or it was not known.
        self._told: int | None = None
        self._create = trainer.create_optimizer
        self._create_both = trainer.create_optimizer_and_scheduler
        self._load = trainer._load_optimizer_and_scheduler
        self._save = trainer._save_rng_state
        self._make_accelerator = trainer.create_accelerator_and_postprocess
        trainer.create_optimizer = self._create_optimizer
        trainer.create_optimizer_and_scheduler = self._create_optimizer_and_scheduler
        trainer._load_optimizer_and_scheduler = self._load_states
        trainer._save_rng_state = self._save_states
        trainer.create_accelerator_and_postprocess = self._create_accelerator
        self._take_clipping()
        trainer._load_best_model = self._finishing_before(trainer._load_best_model)
        if equal_replicas:
            trainer.evaluation_loop = self._finishing_before(trainer.evaluation_loop)
            trainer._save_checkpoint = self._finishing_before(trainer._save_checkpoint)
        trainer.add_callback(self)

    # Instead of methods of the Trainer

    def _create_accelerator(self) -> None:
        # A search over hyperparameters makes one for each trial.
        self._make_accelerator()
        self._take_clipping()

    def _take_clipping(self) -> None:
        accelerator = self._trainer.accelerator
        accelerator.clip_grad_norm_ = self._clip(accelerator.clip_grad_norm_)

    def _finishing_before(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(theirs)
        def finishing(*args: Any, **kwargs: Any) -> Any:
            self._finish()
            return theirs(*args, **kwargs)

        return finishing

    def _finish(self) -> None:
        if self._optimizer is not None:
            trainers.finish([self._optimizer])

    def _create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        trainer = self._trainer
        returned = self._create(*args, **kwargs)
        created = trainer.optimizer or returned  # a method of a subclass may return nothing: the Trainer reads this
        if _plain(created) is None:
            self._check_kind(created)
            created = trainer.optimizer = self._wrapped(created, self._total_steps)
            if _plain(created) is None:
                raise InvalidRequestError(
                    f"OcommCallback needs a 1-bit optimizer, and its function returned a {type(created).__name__}: the "
                    "Trainer's DistributedDataParallel averages gradients in each step, and hands them to nothing else."
                )
        return created

    def _wrapped(self, created: torch.optim.Optimizer, total_steps: Callable[[], int | None]) -> Any:
        def told() -> int | None:
            self._told = total_steps()
            return self._told

        return trainers.wrap(
            self._wrapper,
            created,
            self._trainer.model.named_parameters(),
            self._options,
            total_steps=told,
            max_grad_norm=self._trainer.args.max_grad_norm or None,
            setting=_CLIPPING,
        )

    def _plan_anew(self, left: int) -> None:
        """Makes the optimizer go on with ``left`` steps to come, where it was told of another number: in a second
        ``train()``, after an out-of-memory error that has changed the batches, from another optimizer's checkpoint.
        Collective.
        """
        before = self._optimizer
        assert before is not None
        steps = before._driver.steps
        if self._told is None or self._told == steps + left or left <= 0:
            return
        if before.has_begun:
            before.skip()
        saved = (before.state_dict(), before.rank_state_dict()) if steps else None
        before.disconnect()
        before._driver.retire()
        now = self._wrapped(before._inner, lambda: steps + left)
        if saved is not None:
            now.load_state_dict(saved[0])
            now.load_rank_state_dict(saved[1])
        self._trainer.optimizer.optimizer = now  # inside Accelerate's wrapper

    def _create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self._scheduled = num_training_steps
        try:
            self._create_both(num_training_steps)
        finally:
            self._scheduled = None

    def _total_steps(self) -> int | None:
        # Only ``train()`` knows the steps of a number of epochs. Scripts may create the optimizer before it.
        steps = self._scheduled or self._trainer.state.max_steps or self._trainer.args.max_steps
        return steps if steps > 0 else None

    def _check_kind(self, created: torch.optim.Optimizer) -> None:
        """Raises InvalidRequestError for an optimizer that the chosen one does not wrap. Its own error would advise to
        take DistributedOptimizer, for which the Trainer has no place. Not for one that communicates already.
        """
        kinds = _WRAPPED.get(self._wrapper)
        if kinds is not None and not isinstance(created, (*kinds, HasRankState)):
            raise InvalidRequestError(
                f"Distributed{self._wrapper.__name__} wraps {' or '.join(kind.__name__ for kind in kinds)} of "
                f"torch.optim, and the Trainer has {type(created).__name__}. Leave OcommCallback out: "
                "DistributedDataParallel then averages gradients, through the backend of the process group. For SGD "
                "name 'ef_sgd', with half of SGD's lr."
            )

    def _load_states(self, checkpoint: str | None, *args: Any, **kwargs: Any) -> None:
        self._load(checkpoint, *args, **kwargs)
        if checkpoint is None or self._optimizer is None:
            return
        for said in trainers.load_saved_rank_states([self._optimizer], checkpoint, hvd.size()):
            if hvd.rank() == 0:
                print(said, flush=True)

    def _save_states(self, folder: str, *args: Any, **kwargs: Any) -> None:
        self._save(folder, *args, **kwargs)
        if self._optimizer is not None:
            trainers.save_rank_states([self._optimizer], folder)
            # All that ranks save is there, random numbers among it. What follows makes this checkpoint a whole one, and
            # may remove older ones.
            hvd.barrier()

    def _clip(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        """``Accelerator.clip_grad_norm_``, by which the Trainer also asks for the norm alone: that multiplies gradients
        by 1, while they are exchanged.
        """

        def clip(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            optimizer = self._optimizer
            if optimizer is None:
                return theirs(parameters, max_norm, norm_type)
            if max_norm != float("inf"):
                is_theirs = max_norm == self._trainer.args.max_grad_norm
                by = _CLIPPING if is_theirs else "a call of accelerator.clip_grad_norm_ in the script"
                trainers.has_clipped(optimizer, max_norm, norm_type, by)
            self._norm = None if optimizer.grad_norm is None else torch.zeros(())
            return self._norm

        return clip

    @property
    def _optimizer(self) -> CompressedOptimizer | None:
        return _plain(self._trainer.optimizer)

    # Called by the Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes DistributedDataParallel leave gradients to the optimizer, which hears how many steps are to come."""
        module = self._trainer.model_wrapped
        self._plan_anew(state.max_steps - state.global_step)
        if hvd.size() == 1:
            return
        if not isinstance(module, DistributedDataParallel):
            raise InvalidRequestError(
                f"OcommCallback needs a module in DistributedDataParallel, and the Trainer has made a "
                f"{type(module).__name__}. Leave fsdp, deepspeed and torch_compile out of TrainingArguments."
            )
        if not module._comm_hooks:
            module.register_comm_hook(self._trainer.optimizer, hvd.optimizer_hook)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tells the Trainer the norm of the step."""
        optimizer = self._optimizer
        if self._norm is not None and optimizer is not None and optimizer.grad_norm is not None:
            self._norm.fill_(optimizer.grad_norm)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes the parameters of all ranks equal, and says on rank 0 what was sent. Collective."""
        self._finish()
        if hvd.rank() == 0 and (said := trainers.summary(self._optimizer)):
            print(said, flush=True)


def _plain(optimizer: Any) -> CompressedOptimizer | None:
    """Returns the 1-bit optimizer that ``optimizer`` is, or that Accelerate has wrapped in it; None for another."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, CompressedOptimizer) else None
