"""What ``DistributedOptimizer`` makes of an optimizer: one that steps on gradients averaged over the ranks.

Averages are made while backward goes on. In each step autograd calls ``_on_gradient`` when a gradient is ready, which
starts allreduces, some megabytes at a time. When the backward pass that completed the last gradient ends,
``_on_backward_end`` waits for them. So ``clip_grad_norm_`` and everything else between ``backward()`` and ``step()``
sees averages, as with DistributedDataParallel. What is missing then (parameters without a gradient) is submitted by
``synchronize()``, by ``step()`` and before a GradScaler unscales (``loss_scaling``), on all ranks; and on a rank with
gradients under way, where they are used (``backward.watched``) or something reads ``param_groups``.
"""

from __future__ import annotations

import contextlib
import inspect
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from ocomm import operations
from ocomm import session as sessions
from ocomm.agreement import digest, told_of_steps
from ocomm.api import Average, Sum
from ocomm.errors import InvalidRequestError, MismatchError, OcommError, StallError
from ocomm.operations import ProcessSet
from ocomm.optim.grid import Grid
from ocomm.training.comparison import StepComparison
from ocomm.training.notices import DenseNotices, follow_dense
from ocomm.types import ReduceOp
from ocomm_torch.backward.hooks import hook_gradient
from ocomm_torch.backward.late_averages import LateAverages
from ocomm_torch.backward.passes import CountsPasses, Passes, Verdict
from ocomm_torch.backward.watched import add_watcher, release, watch
from ocomm_torch.compiling import eager
from ocomm_torch.compression import UNCOMPRESSED, Compressor, has_overflowed
from ocomm_torch.memory.naming import NamesParameters
from ocomm_torch.memory.parameters import gradient_dtype
from ocomm_torch.memory.tensor_memory import is_dtensor, is_part, is_shared, why_untrainable
from ocomm_torch.mesh import DataAxis, inside
from ocomm_torch.mpi_ops import adapter_of, allreduce, sparse_allreduce_async
from ocomm_torch.optimizers import loss_scaling
from ocomm_torch.optimizers.ddp_modules import refuse_averaged
from ocomm_torch.optimizers.low_bit import CLEARED_EARLY, TOO_MANY_PASSES
from ocomm_torch.optimizers.replicas import ParameterChecksums, options_of, way_of, written_in_forward
from ocomm_torch.optimizers.wrapped import OF_ANOTHER, frozen_error

#: Bytes of gradients that are submitted together, because each submission costs the same; fewer the first time, so that
#: the network has work early.
BUCKET_NBYTES, FIRST_BUCKET_NBYTES = 4 << 20, 1 << 20


class _Exchange:
    """Gradients that are exchanged together: a bucket, or a group."""

    __slots__ = ("_error", "_finish", "_settle")

    def __init__(self, finish: Callable[[], None], settle: Callable[[], None] | None = None) -> None:
        self._settle = settle
        self._finish: Callable[[], None] | None = finish
        self._error: OcommError | None = None

    def settle(self) -> None:
        """Waits for what was sent, and sends it again if it overflowed. All exchanges settle before any is delivered,
        because ranks deliver them in different orders.
        """
        if self._settle is not None:
            self._try(self._settle)
            self._settle = None  # not before: who goes on after a KeyboardInterrupt waits again

    def deliver(self) -> None:
        """Waits, and writes the result into ``grad``, once: later changes of the gradient are the user's."""
        if self._finish is not None and self._error is None:
            self._try(self._finish)
            self._finish = None
        if self._error is not None:
            raise self._error

    def _try(self, part: Callable[[], None]) -> None:
        try:
            part()
        except OcommError as error:
            self._error = error


class AveragingOptimizer(loss_scaling.AveragesGradients, NamesParameters, CountsPasses):
    """Mixin of ``DistributedOptimizer``, placed before the class of the user's optimizer."""

    def _distribute(
        self,
        names: dict[Tensor, str],
        compression: type[Compressor] | Compressor,
        backward_passes_per_step: int,
        op: int,
        predivide: float,
        groups: Sequence[tuple[Tensor, ...]],
        sparse_as_dense: bool,
        process_set: ProcessSet,
        grid: Grid | None,
    ) -> None:
        # Hooks run in autograd's threads, which do not have this thread's session.
        self._session = sessions.current()
        self._names = names
        self._compression = compression
        self._op = op
        self._prescale, self._postscale = (1.0 / predivide, predivide) if op == Average else (1.0, 1.0)
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        #: Where parameters may be DTensors; None without a mesh.
        self._axis = process_set if isinstance(process_set, DataAxis) else None
        #: The place in a grid whose data axis is the process set; None without other axes.
        self._grid = grid
        self._passes = Passes(backward_passes_per_step, names)
        self._group_of = {p: group for group in groups for p in group}
        self._partial: set[Tensor] = set()  # DTensors whose gradients are partial sums, which torch adds up
        self._waiting: set[Tensor] = set()  # ready gradients in groups that are not complete
        self._bucket: list[Tensor] = []  # ready gradients that wait for others to be submitted with
        self._bucket_room = FIRST_BUCKET_NBYTES  # bytes until the bucket is full
        # By parameter; an exchange of several is there once for each, and None stands for a bucket that is not full.
        self._exchanges: dict[Tensor, _Exchange | None] = {}
        #: Exchanges that are not submitted yet, because their gradients are being copied from a GPU.
        self._copied: deque[operations.PreparedOperation] = deque()
        self._callback_queued = False
        #: When the last backward pass that exchanged had computed all gradients; None before it.
        self.backward_ended: float | None = None
        self._busy = False
        # Of the step under way: _complete() and synchronize() set these, and end_step() alone clears them.
        self._averaged = False  # every gradient is the average, for whatever reason
        self._synchronized = False  # and synchronize() has been called
        self._late = LateAverages()
        self._should_synchronize = True
        self._is_distributed = process_set.included() and process_set.size() > 1
        self._no_rows: dict[Tensor, Tensor] = {}  # empty sparse gradients, which count as zeros
        self._hooked: dict[Tensor, None] = {}  # parameters with hooks, in the order of the groups
        self._comparison = self._make_comparison()
        #: The last step that an error has ended, and its class; "" for none.
        self._interrupted = 0, ""
        self._compared: _Exchange | None = None  # the comparison of the current step
        #: The hyperparameters of the last step, a line for each. The next comparison has these, because the moment when
        #: it begins, in backward or in ``step()``, is another one on a rank that has no gradient.
        self._stepped_with: list[str] = []
        #: By the number of the next comparison: the checksum of what it looks at, at the end of the last step.
        self._noted: dict[int, int] = {}
        self._notices: DenseNotices | None = self._follow()
        #: Checksums of this rank's own gradients in the step under way, by parameter; None once that is over.
        self._own: dict[Tensor, int] | None = {}
        self._is_checked = False  # True once it is known that nothing else averages the same gradients
        self._hook_parameters()
        add_watcher(self)
        loss_scaling.install()

    def _follow(self) -> DenseNotices | None:
        """Says what is about to be averaged, on one rank, which says at the end what was."""
        trained = [p for group in self.__dict__["param_groups"] for p in group["params"] if p.requires_grad]
        if not self._is_distributed or not trained:
            return None
        wire = getattr(self._compression, "wire", None)
        sizes = [wire.itemsize if wire and p.is_floating_point() else p.element_size() for p in trained]
        return follow_dense(
            self._session,
            self._process_set.number(self._session),
            f"DistributedOptimizer{self._ending}",
            sum(p.numel() for p in trained),
            sum(p.numel() * size for p, size in zip(trained, sizes, strict=True)),
            trained[0].is_cuda,
        )

    def _make_comparison(self) -> StepComparison | None:
        """Makes what compares hyperparameters and parameters with the other ranks' in each step; None if that is
        switched off.
        """
        session = self._session
        steps = session.settings.replica_check_steps
        if not self._is_distributed or not steps:
            return None
        assert session.kernels is not None
        checksums = self._checksums = ParameterChecksums(steps, session.kernels)
        reference = weakref.ref(self)  # an optimizer that is replaced must be freed at once, with its hooks

        def this() -> Any:
            optimizer = reference()
            assert optimizer is not None, "the optimizer is gone"
            return optimizer

        def groups() -> list[dict[str, Any]]:
            return this().__dict__["param_groups"]

        def parameters() -> list[Tensor]:
            return this()._inside()

        def names() -> list[str]:
            known = this()._names
            return [known[p] for group in groups() for p in group["params"]]

        def described() -> list[str]:
            told = told_of_steps(this()._interrupted, this()._comparison.next_look, steps)
            return [told, *checksums.each(parameters(), names())]

        name = f"DistributedOptimizer{self._ending}"
        return StepComparison(
            session,
            self._process_set.number(session),
            name,
            name,
            "torch",
            way_of(self, groups()),
            lambda: this()._stepped_with,
            lambda look: checksums.of(parameters(), look),
            described,
            lambda: this()._own_gradients(),
            lambda look: this()._noted.get(look),
            lambda: written_in_forward(zip(names(), parameters(), strict=True)),
        )

    def _inside(self) -> list[Tensor]:
        return [inside(p) for group in self.__dict__["param_groups"] for p in group["params"]]

    def _note(self, look: int) -> None:
        """Notes what comparison ``look`` will look at, as it is after a step, or after one that was given up."""
        self._noted = {look: self._checksums.of(self._inside(), look)}

    def _look_at_own(self, parameters: tuple[Tensor, ...], grads: list[Tensor]) -> None:
        """Keeps checksums of gradients that are about to be averaged; None for good after the first steps."""
        assert self._comparison is not None and self._own is not None and self._session.kernels is not None
        if self._comparison.looked_at_gradients or any(grad.is_cuda or grad.is_sparse for grad in grads):
            self._own = None
            return
        dense = [grad.contiguous() for grad in grads]
        addresses = np.array([grad.data_ptr() for grad in dense], np.uint64)
        sums = self._session.kernels.checksums(addresses, np.array([grad.nbytes for grad in dense], np.int64))
        for p, grad, checksum in zip(parameters, dense, sums.tolist(), strict=True):
            self._own[p] = checksum if grad.any() else 0

    def _own_gradients(self) -> int:
        """Returns the checksum of this rank's own gradients of the step before, and begins a new one."""
        own, self._own = self._own, None if self._own is None else {}
        return (
            digest(sorted((self._names[p], checksum) for p, checksum in own.items()))
            if own and any(own.values())
            else 0
        )

    def _hook_parameters(self) -> list[Tensor]:
        """Adds hooks to trained parameters without one, which were frozen or are new, and returns these parameters."""
        if not self._is_distributed:
            return []
        # Parameters keep their hooks. A hook that kept this object alive would average beside those of its successor.
        reference = weakref.ref(self)

        def hook(p: Tensor) -> None:
            if p.is_cuda and torch.cuda.is_current_stream_capturing():
                return  # replays of the graph compute it without calling hooks, so step() finds it
            if (optimizer := reference()) is not None:
                optimizer._on_gradient(p)

        self._name_new()
        every = (p for group in self.__dict__["param_groups"] for p in group["params"])
        new = [p for p in dict.fromkeys(every) if p.requires_grad and p not in self._hooked]
        for p in new:
            check_averaged(self._names[p], p, self._axis)
            self._hooked[p] = None
            self._passes.add(p)
            weakref.finalize(self, hook_gradient(p, hook).remove)
        return new

    # Backward

    def _on_gradient(self, p: Tensor) -> None:
        verdict = self._passes.count(p)
        if verdict is Verdict.EXTRA:
            if _in_reentrant_checkpoint():
                raise AssertionError(
                    f"the gradient of '{self._names[p]}' came again after it had been submitted. It is used in several "
                    "checkpointed parts of the model, or in one and beside it, and reentrant checkpointing makes a "
                    "backward pass of its own for each: pass use_reentrant=False to torch.utils.checkpoint.checkpoint, "
                    "with which it comes once. If this is a second call of backward(), increase "
                    "backward_passes_per_step. " + OF_ANOTHER
                )
            raise AssertionError(TOO_MANY_PASSES)
        if self._averaged:
            self.end_step()
        if verdict is Verdict.KEEP:
            return
        self._ready(p)
        if not self._callback_queued:
            self._callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _ready(self, p: Tensor) -> None:
        if self._axis is not None and _is_partial(p):
            self._partial.add(p)
            return
        group = self._group_of.get(p)
        if group is None:
            self._collect(p)
        else:
            self._waiting.add(p)
            if all(member in self._waiting for member in group if member.requires_grad):
                self._submit(group)

    def _add_up(self, parameters: Iterable[Any]) -> None:
        """Lets torch add up partial sums, in one order on all ranks of the axes that divide the parameters."""
        for p in [p for p in parameters if _is_partial(p)]:
            p.grad = p.grad.redistribute(p.device_mesh, p.placements)

    def _on_backward_end(self) -> None:
        """Submits what is left before any optimizer waits, because gradients may come in another order on other
        ranks.
        """
        self.backward_ended = time.perf_counter()
        for p in self._hook_parameters():  # this pass has called no hook of theirs
            if p.grad is not None:
                self._passes.complete(p)
                self._ready(p)
        if self._partial:
            partial = [p for p in self._hooked if p in self._partial]
            self._add_up(partial)
            for p in partial:
                self._ready(p)
            self._partial.clear()
        self._submit_bucket()
        self._submit_copied(wait=True)
        torch.autograd.Variable._execution_engine.queue_callback(self._await_averages)

    def _await_averages(self) -> None:
        """Waits only if this rank's step is complete, because what is missing on other ranks may need this rank to go
        on. In a grid the next use of a gradient waits: a stage of a pipeline may wait for what this backward returns.
        """
        self._callback_queued = False
        missing = [p for p in self._hooked if p.requires_grad and p not in self._exchanges]
        watch(p.grad for p in missing)  # kept from before: ranks where backward has added to it see the average
        if self._grid is None and not missing:
            self._settle()
            torch.autograd.Variable._execution_engine.queue_callback(self._deliver_in_backward)

    def _deliver_in_backward(self) -> None:
        # An error here would be raised by backward(); synchronize() raises it again.
        with contextlib.suppress(OcommError):
            self._deliver()

    def _collect(self, p: Tensor) -> None:
        """Puts a parameter that is in no group into the bucket, and submits the bucket when it is full."""
        if p.grad is None:
            p.grad = self._no_rows.get(p)
        if p.grad is not None and p.grad.is_sparse and not self._sparse_as_dense:
            self._submit((p,))
            return
        self._bucket.append(p)
        self._exchanges[p] = None
        self._bucket_room -= p.nbytes if self._axis is None else inside(p).nbytes
        if self._bucket_room <= 0:
            self._submit_bucket()

    def _submit_bucket(self) -> None:
        if self._bucket:
            bucket, self._bucket, self._bucket_room = tuple(self._bucket), [], BUCKET_NBYTES
            for p in bucket:
                del self._exchanges[p]  # until it has one
            self._submit(bucket)

    def _submit(self, parameters: tuple[Tensor, ...]) -> None:
        """Starts the exchange of ready gradients, with zeros for missing ones, except those of frozen parameters."""
        parameters = tuple(p for p in parameters if p.requires_grad)
        if not parameters:
            return
        if not self._is_checked:
            self._is_checked = True
            refuse_averaged(self._names, "DistributedOptimizer")
        if self._comparison is not None and self._compared is None:
            self._comparison.start()
            self._compared = _Exchange(self._comparison.finish)
        grads = []
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=gradient_dtype(p))
            elif p.grad.is_sparse and (self._sparse_as_dense or len(parameters) > 1):
                p.grad = p.grad.to_dense()
            grad = p.grad.detach() if p.grad.requires_grad else p.grad
            grads.append(grad if self._axis is None else inside(grad))
        if self._comparison is not None and self._own is not None:
            self._look_at_own(parameters, grads)
        exchange = self._start_sparse(parameters[0]) if grads[0].is_sparse else self._start(parameters, grads)
        for p in parameters:
            self._exchanges[p] = exchange
            self._waiting.discard(p)

    def _start(self, parameters: tuple[Tensor, ...], grads: list[Tensor]) -> _Exchange:
        pairs = [self._compression.compress(grad) for grad in grads]
        tensors = [_unshared(compressed) for compressed, _ in pairs]
        prepared = self._prepare(parameters, tensors, "")
        self._copied.append(prepared)
        watched = [p.grad for p in parameters]
        versions = [grad._version for grad in watched if grad is not None]
        watch(watched)
        self._submit_copied(wait=False)
        changed: list[Tensor] = []
        again: operations.Operation | None = None
        repeated: dict[int, Tensor] = {}

        def settle() -> None:
            nonlocal again
            release(watched)
            found = [grad._version for grad in watched if grad is not None]
            # Autograd that adds to another part of one buffer of all gradients has raised the version of this one.
            changed.extend(
                p
                for p, grad, before, now in zip(parameters, grads, versions, found, strict=True)
                if before != now and not is_part(grad)
            )
            prepared.submit().wait()
            repeated.update((place, _unshared(grads[place])) for place in self._overflowed(parameters, tensors, grads))
            if repeated:
                chosen = tuple(parameters[place] for place in repeated)
                again = self._prepare(chosen, list(repeated.values()), UNCOMPRESSED).submit()

        def finish() -> None:
            if again is not None:
                again.wait()
            changed.extend(
                p for p, g in zip(parameters, watched, strict=True) if p.grad is not None and p.grad is not g
            )
            if changed:
                raise InvalidRequestError(
                    f"the gradient of '{self._names[changed[0]]}' was changed while it was being averaged. backward() "
                    "waits for averages only where it reaches every parameter: else call optimizer.synchronize() "
                    "before you clip or change gradients."
                )
            contexts = [context for _, context in pairs]
            for place, (p, grad, tensor) in enumerate(zip(parameters, grads, tensors, strict=True)):
                reduced = repeated.get(place)
                if reduced is None:
                    reduced = self._compression.decompress(tensor, contexts[place])
                if reduced.data_ptr() != grad.data_ptr():
                    grad.copy_(reduced)
                if isinstance(self, torch.optim.SparseAdam):  # accepts only sparse gradients
                    p.grad = grad.to_sparse(1)

        return _Exchange(finish, settle)

    def _overflowed(self, parameters: Sequence[Tensor], tensors: list[Tensor], grads: list[Tensor]) -> list[int]:
        """Returns the places of the reduced ``tensors`` that are reduced again, uncompressed: a group as a whole,
        others one by one, because ranks may have other tensors in a bucket.
        """
        if not has_overflowed(self._compression, tensors, grads):
            return []
        places = list(range(len(tensors)))
        if parameters[0] in self._group_of:
            return places
        return [k for k in places if has_overflowed(self._compression, tensors[k : k + 1], grads[k : k + 1])]

    def _prepare(
        self, parameters: tuple[Tensor, ...], tensors: list[Tensor], ending: str
    ) -> operations.PreparedOperation:
        """Prepares the allreduce of ``tensors`` in place, by the names of ``parameters`` with ``ending``."""
        is_group = parameters[0] in self._group_of
        factors = self._prescale, self._postscale
        adapter, memory = adapter_of(self._session, tensors, self._op, factors, self._process_set)
        return operations.prepare_allreduce(
            self._session,
            adapter,
            operations.Allreduce(
                tensors,
                self._names[parameters[0]] + ending if is_group else [self._names[p] + ending for p in parameters],
                self._op,
                *factors,
                self._process_set,
                in_place=True,
                grouped=is_group,
            ),
            memory,
        )

    def _submit_copied(self, wait: bool) -> None:
        """Submits what has been copied to the host's memory; with ``wait``, everything that is being copied."""
        while self._copied:
            copies = self._copied[0].copies
            if not (wait or copies is None or copies.is_over()):
                return
            self._copied.popleft().submit()

    def _start_sparse(self, p: Tensor) -> _Exchange:
        assert p.grad is not None
        indices, rows = p.grad._indices()[:, :0].clone(), p.grad._values()[:0].clone()  # not the whole memory
        self._no_rows[p] = torch.sparse_coo_tensor(
            indices, rows, p.grad.shape, device=rows.device, check_invariants=True
        )
        wait = sparse_allreduce_async(p.grad, self._names[p], self._op, self._process_set)
        watched = [p.grad]
        watch(watched)

        def finish() -> None:
            release(watched)
            try:
                p.grad = wait()
            except StallError as error:
                raise StallError(
                    f"{error} A rank where '{self._names[p]}' has had no gradient yet cannot know they are sparse: "
                    "use it on all ranks in the first step, or pass sparse_as_dense=True."
                ) from None

        return _Exchange(finish)

    def used(self, gradients: Sequence[Tensor]) -> None:
        """Called by ``Watcher``: makes gradients averages before anything else sees or changes them.

        After backward this completes the step, as ``synchronize`` does, because a rank that waited for this gradient
        alone could wait for a rank that waits for another. Raises InvalidRequestError for a sparse gradient, since its
        average is another tensor, and HorovodInternalError if an exchange failed.
        """
        if self._busy or not self._exchanges:
            return
        used = {id(gradient) for gradient in gradients}
        # Lists, at once: the gradients may be another optimizer's, of another thread.
        found = [p for p in list(self._hooked) if p.grad is not None and id(p.grad) in used]
        is_in_backward = self._callback_queued or torch._C._current_graph_task_id() >= 0
        if is_in_backward:  # the others are not ready yet
            found = [p for p in found if self._exchanges.get(p) is not None]
        if not found:
            return
        sparse = [self._names[p] for p in found if p.grad is not None and p.grad.is_sparse]
        if sparse:
            raise InvalidRequestError(
                f"the sparse gradient of '{sparse[0]}' was used while it was being averaged, and its average will be "
                "another tensor. Call optimizer.synchronize() before you use it."
            )
        if not is_in_backward:
            self._late.expect(self._hooked)
            self._complete()
            self._late.note(self._hooked)
            return
        for exchange in filter(None, map(self._exchanges.get, found)):
            exchange.settle()
            exchange.deliver()

    def _settle(self) -> None:
        self._submit_bucket()
        self._submit_copied(wait=True)
        for exchange in dict.fromkeys(self._exchanges.values()):
            assert exchange is not None
            exchange.settle()

    def _deliver(self) -> None:
        self._settle()
        failure = None
        for exchange in dict.fromkeys([*self._exchanges.values(), *([self._compared] if self._compared else [])]):
            assert exchange is not None
            try:
                exchange.deliver()
            except OcommError as error:  # a rank that has raised leaves; what differs says why
                failure = error if failure is None or isinstance(error, MismatchError) else failure
        if failure is not None:
            raise failure

    # Horovod's calls

    @eager
    def synchronize(self) -> None:
        """Waits until every gradient is the average over the ranks. Collective over the process set.

        Parameters without a gradient count as zeros, unless they are frozen (``requires_grad_(False)``), on all ranks.
        Gradients that are set or changed afterwards are stepped on as they are.
        Raises HorovodInternalError if an exchange failed, InvalidRequestError if a frozen parameter has a gradient.
        """
        # What has averaged without this call may have done so on some ranks alone, such as the use of a gradient.
        if self._synchronized or not self._averaged:
            self._complete()
        self._synchronized = True

    def await_averages(self) -> None:
        """Waits until every gradient is the average, once in each step. Collective over the process set."""
        if not self._averaged:
            self._complete()

    def end_step(self) -> None:
        """Forgets that gradients are averages: the step was made, skipped or given up, or a gradient came after it."""
        self._averaged = self._synchronized = False

    def _complete(self) -> None:
        if self._busy or not self._is_distributed:
            return
        self._hook_parameters()
        self._busy = True  # code that reads param_groups meanwhile must not call this again
        try:
            if self._axis is not None:
                self._add_up(p for p in self._hooked if p not in self._exchanges)
            for p in self._hooked:
                if p.requires_grad and p not in self._exchanges:
                    if p in self._group_of:
                        self._submit(self._group_of[p])
                    else:
                        self._collect(p)
            self._deliver()
            self._refuse_frozen()
            self._averaged = True
        finally:
            self._forget()
            self._busy = False

    def _refuse_frozen(self) -> None:
        """Raises InvalidRequestError for a frozen parameter whose gradient is not the average. It is not exchanged,
        because other ranks may have none. Zeros, which ``zero_grad(set_to_none=False)`` leaves, are alike.
        """
        for p in (p for group in self.__dict__["param_groups"] for p in group["params"]):
            if not p.requires_grad and p.grad is not None and p not in self._exchanges and inside(p.grad).any():
                raise frozen_error(self._names[p])

    def _forget(self) -> None:
        self._exchanges.clear()
        self._compared = None
        self._bucket.clear()
        self._bucket_room = FIRST_BUCKET_NBYTES
        self._copied.clear()
        self._waiting.clear()
        self._partial.clear()
        self._callback_queued = False
        self._passes.restart()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups. Waits for gradients under way, which a script finds through here."""
        if "param_groups" not in self.__dict__:  # Lightning's wrapper has this class, and finds attributes by itself
            raise AttributeError("param_groups")
        if self.__dict__.get("_exchanges"):
            self._complete()
        return self.__dict__["param_groups"]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def has_averaged(self) -> bool:
        """True if every gradient is the average already."""
        return self._averaged

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Makes ``step()`` inside the context not wait for gradients, after a call of ``synchronize()``."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the averaged gradients, then makes the wrapped optimizer's step, which changes parameters in place.

        Collective over the process set. Gradients that ``closure`` computes are averaged, too. Returns the closure's
        loss, or None; for LBFGS the loss of all ranks. Raises HorovodInternalError if an exchange failed.
        """
        if self._should_synchronize:
            if self._synchronized and self._is_distributed:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=4,  # behind the two calls of ``eager``
                )
            elif closure is None or self._exchanges:
                self.await_averages()
        if self._comparison is not None:
            self._stepped_with = options_of(self, self.__dict__["param_groups"])
        self._late.look(self._names.__getitem__)
        if self._notices is not None:
            self._notices.steps += 1

        def averaged_closure() -> Any:
            assert closure is not None
            self.end_step()
            loss = closure()
            self.await_averages()
            return self._reduced_loss(loss) if isinstance(self, torch.optim.LBFGS) else loss

        try:
            result = super().step() if closure is None else super().step(averaged_closure)
        except BaseException as error:
            if self._comparison is not None:
                self._interrupted = self._comparison.next_look + 1, type(error).__name__
            raise
        finally:
            self.end_step()
        if self._comparison is not None:
            self._note(self._comparison.next_look)
        return result

    def _reduced_loss(self, loss: Any) -> Any:
        """Returns the loss whose gradient the averaged gradients are. LBFGS ends its iterations, and chooses the length
        of its steps, by the loss: ranks that looked at their own would part, or wait for each other.
        """
        if not self._is_distributed:
            return loss
        op = self._op if self._op in (Average, Sum) else Average
        name = f"loss of DistributedOptimizer{self._ending}"
        is_tensor = isinstance(loss, Tensor)
        own = loss.detach() if is_tensor else torch.tensor(loss, dtype=torch.float64, device="cpu")
        reduced = allreduce(own, name=name, op=op, process_set=self._process_set)
        return reduced if is_tensor else reduced.item()

    # Torch wraps step() of every optimizer class to call hooks; that of the wrapped optimizer is wrapped already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears gradients. Raises AssertionError between backward and ``step()`` or ``synchronize()``."""
        if self._exchanges:
            raise AssertionError(CLEARED_EARLY)
        self._forget()
        self.end_step()
        if self._comparison is not None and self._comparison.next_look not in self._noted:
            self._note(self._comparison.next_look)
        self._hook_parameters()
        # That of an optimizer of the user's may have no such parameter.
        super().zero_grad(**({} if set_to_none is None else {"set_to_none": set_to_none}))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._hook_parameters()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sums gradients over ``passes`` backward passes before they are averaged over the ranks, from now on."""
        self.backward_passes_per_step = passes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as the wrapped optimizer does; gradients under way are waited for and forgotten."""
        with contextlib.suppress(OcommError):
            self._deliver()
        self._forget()
        self.end_step()
        self._stepped_with = []  # a broadcast may have made them equal, which loads on all ranks but one
        super().load_state_dict(state_dict)


class AveragingGridOptimizer(loss_scaling.SharesOverflows, AveragingOptimizer):
    """Mixin of ``DistributedOptimizer`` in a grid, whose parts a GradScaler steps together."""

    def overflowed_anywhere(self, here: bool) -> bool:
        """Returns True if a GradScaler has found averages that are not finite in any part of the grid. Collective over
        its ranks, which are all of the job.
        """
        found = np.array([here])
        self._session.reduce(0, f"overflow of the grid{self._ending}", found, ReduceOp.MAX)
        return bool(found[0])


def check_averaged(name: str, p: Tensor, axis: DataAxis | None) -> None:
    """Raises InvalidRequestError for a parameter whose gradient cannot be averaged over the ranks of ``axis``."""
    if axis is not None and is_dtensor(p):
        axis.check("Optimizer", name, p, needs_whole=False)
    elif reason := why_untrainable(p):
        raise InvalidRequestError(
            f"parameter '{name}' {reason}. DistributedOptimizer averages gradients in place: give it plain tensors, "
            "or, for DTensors, the mesh whose data axis it is to use (mesh=, data=)."
        )


def _unshared(tensor: Tensor) -> Tensor:
    """Returns the tensor, which is to be reduced in place, or a copy of it if its memory is that of other tensors, too.

    Autograd gives ``a`` and ``b`` in ``torch.stack([a, b]).sum(0)`` one gradient's memory, and may go on to compute
    with it. So that keeps what autograd has written until backward is over.
    """
    return tensor.clone(memory_format=torch.contiguous_format) if is_shared(tensor) else tensor


def _is_partial(p: Any) -> bool:
    """Returns True if the gradient of a DTensor is not divided as the parameter is."""
    return is_dtensor(p) and p.grad is not None and p.grad.placements != p.placements


def _in_reentrant_checkpoint() -> bool:
    """Returns True if this is called from a backward pass that torch.utils.checkpoint has begun inside another one."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _REENTRANT:
            return True
        frame = frame.f_back
    return False


_REENTRANT = CheckpointFunction.backward.__code__
