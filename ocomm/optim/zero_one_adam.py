"""0/1 Adam (arXiv 2202.06009) as a state machine over flat float32 buffers, without framework, thread or network.

Each rank keeps a momentum of its own and steps with it. At a sync the ranks average, with 1 bit, the sum of their
updates since the last sync, and continue from the same parameters. At a refresh they average the gradient densely for
v:

    m  = beta1 * m + (1 - beta1) * g;  p = p * (1 - lr * wd) - lr * m / denominator;  u = u + lr * m
    sync:     ubar = q * CompressedAllreduce(u / q);  m = ubar / L;  u = 0
              p = p_sync * W - ubar / denominator;  p_sync = p
    refresh:  v = beta2 * v + (1 - beta2) * gbar^2, after p has moved

L is the sum of lr and W the product of (1 - lr * wd) since the last sync, and q is the square root of L: errors grow
and shrink with it (decision 0009). ``intervals`` says which steps are what, from whole numbers alone, so that all ranks
agree without a message. A tensor's first steps are dense (``Stage``).

Memory per parameter, besides the parameter and its gradient, for n ranks (``memory`` gives the real numbers):

    always          m 4 B, denominator 4 B, worker's error 2 * 4 B, server's error 2 * 4/n B; mask 1/8 B
    refreshes       v 4 B, until the last refresh
    local steps     u 4 B, p_sync 4 B, m of the last sync 4 B, from the first local step on
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ocomm.collectives.plan import Computation, Loop, loop
from ocomm.compression.layout import Layout, SegmentLayout, all_blocks, runs_of
from ocomm.errors import SettingsError
from ocomm.kernels.base import Bytes, Floats, Kernels, Table
from ocomm.optim.core import Bools, Core, Exchange, Flags, Group, address, flat_floats
from ocomm.optim.freeze import require_total_steps
from ocomm.optim.intervals import RefreshSchedule, SyncSchedule
from ocomm.optim.options import option
from ocomm.optim.preconditioner import Preconditioner, PreconditionerOptions

#: The unit of the errors in a rank state. A state without this entry has errors in units of lr * m.
ERROR_UNIT = "sqrt(lr) * m"


class Stage(enum.IntEnum):
    """The stage of one tensor. It starts DENSE: each step averages the gradient, refreshes v with it, and moves by the
    average.

    One such step is enough, so all tensors begin together. A tensor without a gradient in its first step is UNSEEN: it
    does not travel until some rank has a gradient. That gradient waits in the worker errors, and the tensor then takes
    as many dense steps as the others had refreshes.
    """

    DENSE = 0
    COMPRESSED = 1
    UNSEEN = 2


@dataclass(frozen=True, kw_only=True)
class ZeroOneAdamOptions(PreconditionerOptions):
    """The options of 0/1 Adam. Raises SettingsError for impossible values."""

    variance_floor: float = option(0.2, PreconditionerOptions.texts()["variance_floor"])
    var_update_scaler: int = option(
        16,
        """The variance is refreshed, with a dense average of the gradients, at step 1 and then after 2^floor(j /
        ``var_update_scaler``) steps, where j counts the refreshes.""",
    )
    var_freeze_step: int | None = option(
        None, "The last step that may refresh the variance. None: it is refreshed as long as every step is a sync."
    )
    local_step_start: int | None = option(
        None, "Up to this step every step is a sync. None: 0, or a quarter of ``total_steps``."
    )
    local_step_doubling: int | None = option(
        None,
        """After ``local_step_start``, syncs at step t are min(``local_step_clip``, 2^floor((t - ``local_step_start``) /
        ``local_step_doubling``)) steps apart. None: 32768, or a quarter of ``total_steps``.""",
    )
    local_step_clip: int | None = option(
        None,
        """The largest number of steps between two syncs, which may be any number from 1 on. None: 16, or 4 with
        ``total_steps``.""",
    )
    total_steps: int | None = option(
        None,
        """The number of the optimizer's steps in the whole run, such as ``epochs * len(loader)``. The last one is a
        sync, and those ``local_step`` options that are None are set by it. None: it is not known.""",
    )
    vote: Literal["step", "sync"] = option(
        "step",
        """When the ranks hear of each other. ``"step"``: also a step between syncs ends with a vote, and all ranks take
        it or none does. ``"sync"``: such a step sends nothing, and counts on each rank whatever happens in it; one
        whose gradients are not finite changes nothing on its rank. Between syncs all ranks need gradients of the same
        tensors. Every rank compresses by itself (``hierarchical=False``), and ``max_grad_norm`` is refused.""",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vote not in ("step", "sync"):
            raise SettingsError(f"vote must be 'step' or 'sync', got {self.vote!r}")
        object.__setattr__(self, "total_steps", require_total_steps(self.total_steps))
        for name, value in self.following(self.total_steps).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        self.schedules()

    @classmethod
    def following(cls, total_steps: int | None) -> dict[str, Any]:
        quarter = None if total_steps is None else max(total_steps // 4, 1)
        return {
            "local_step_start": quarter or 0,
            "local_step_doubling": quarter or 32768,
            "local_step_clip": 16 if quarter is None else 4,
        }

    def schedules(self) -> tuple[SyncSchedule, RefreshSchedule]:
        """Returns the schedules of syncs and of refreshes, before the first step."""
        start, doubling, clip = self.local_step_start, self.local_step_doubling, self.local_step_clip
        assert start is not None and doubling is not None and clip is not None
        syncs = SyncSchedule(start, doubling, clip, self.total_steps)
        return syncs, RefreshSchedule(syncs, self.var_update_scaler, self.var_freeze_step)


class ZeroOneAdam(Core):
    """0/1 Adam for the tensors of ``layout``, on rank ``rank`` of ``layout.ranks``."""

    kind = "ZeroOneAdam"
    options_class = ZeroOneAdamOptions
    compressor = "zeroone"
    steps_locally = True
    sends_rates = True
    options: ZeroOneAdamOptions

    def __init__(self, layout: Layout, rank: int, kernels: Kernels, options: ZeroOneAdamOptions) -> None:
        super().__init__(layout, rank, kernels, options)
        self.scale = options.scale
        self.syncs, self.refreshes = options.schedules()
        #: Whether steps between syncs send nothing.
        self.votes_at_syncs = options.vote == "sync"
        if self.votes_at_syncs:
            self.hyper_text = (
                "lr, betas, eps, weight decay, or in a step since the last sync lr, weight decay or the tensors with "
                "gradients differ between ranks"
            )
        #: True while the ranks exchange a sync that is no step; ``end_interval`` commits it.
        self.ends_interval = False
        self.mask_refresh = options.mask_refresh
        self.preconditioner = Preconditioner(layout, options.variance_floor, self.param_memory)
        #: Numbers of steps taken, of syncs among them, and of steps that averaged nothing but the gradients of late
        #: tensors.
        self.step = 0
        self.sync_steps = 0
        self.local_steps = 0
        count = len(layout.tensors)
        self.stage = np.zeros(count, np.uint8)
        #: Number of refreshes of each tensor's v, and the number with which its dense steps end.
        self.refreshed = np.zeros(count, np.int64)
        self._dense_refreshes = np.ones(count, np.int64)
        # Since the last sync, in float64.
        self._interval_lr = np.zeros(count)
        self._interval_decay = np.ones(count)
        #: Whether the tensor's momentum is that of the last sync.
        self._is_average = np.ones(count, np.bool_)
        #: Whether a tensor that is not compressed yet has gradients waiting in its worker errors.
        self._waits = np.zeros(count, np.bool_)
        self._lr, self._decay, self._beta2, self._eps = (
            np.zeros(count),
            np.ones(count),
            np.zeros(count),
            np.zeros(count),
        )
        self._woken_at = 0
        self._blocks = all_blocks(layout, rank)
        none = np.zeros(0, np.float32)
        self.momentum = none
        self._average_momentum = none
        self._update: Floats | None = None
        self._synced: Floats | None = None
        self._variance: dict[int, Floats] = {}

    def allocate(self) -> None:
        if not self._allocated:
            super().allocate()
            self.momentum = self.param_memory.zeros(self.layout.flat_numel)

    # Hyperparameters

    def set_hyper(self, group: Group) -> None:
        """Sets a group's hyperparameters. beta2 and ``eps`` are read at refreshes. A ``gradient_scale`` is built in as
        in 1-bit Adam.
        """
        index, lr, (beta1, beta2) = group.tensors, group.lr, group.betas
        rows = self.tensors
        decay = 1.0 - lr * group.decoupled_decay
        self._lr[index], self._decay[index], self._beta2[index], self._eps[index] = lr, decay, beta2, group.eps
        rows["beta1"][index] = beta1
        rows["one_minus_beta1"][index] = (1.0 - beta1) * self.gradient_scale
        rows["weight_decay"][index] = group.coupled_decay / self.gradient_scale
        rows["step_size"][index] = lr
        rows["decay"][index] = decay
        rows["interval_root"][index] = np.sqrt(self._interval_lr[index] + lr)
        rows["interval_decay"][index] = self._interval_decay[index] * decay

    # One step

    @property
    def is_sync(self) -> bool:
        """True if the next step is a sync. If learning rates are 0 nothing is exchanged, and the step after it becomes
        a sync.
        """
        return self.syncs.is_due(self.step + 1)

    @property
    def is_silent(self) -> bool:
        """True if the next step sends nothing, not even a vote. The same on all ranks."""
        if not self.votes_at_syncs or self.is_sync or self.is_refresh:
            return False
        return not (self.stage == Stage.DENSE).any()

    @property
    def interval_hyper(self) -> tuple[int, ...]:
        """A checksum of what steps without a vote have counted, which must be equal on all ranks at a vote; () if there
        are none.
        """
        if not self.votes_at_syncs:
            return ()
        counted = (part.tobytes() for part in (self._interval_lr, self._interval_decay, self.steps))
        found = hashlib.blake2b(b"".join(counted), digest_size=6)
        return (int.from_bytes(found.digest(), "little"),)

    def waiting(self) -> Bools:
        return self._waits & (self.stage == Stage.UNSEEN)

    @property
    def is_synced(self) -> bool:  # type: ignore[override]
        """True if all ranks have the same parameters."""
        return not (self._interval_lr > 0).any()

    @property
    def is_refresh(self) -> bool:
        """True if the next step is a refresh."""
        return self.refreshes.is_due(self.step + 1)

    @property
    def dense_again(self) -> bool:  # type: ignore[override]
        """True while there are refreshes to come."""
        return not self.refreshes.is_over(self.step + 1)

    def exchange(self) -> Exchange:
        compressed = self.stage == Stage.COMPRESSED
        if self.ends_interval:
            return Exchange(compressed, np.zeros_like(compressed))
        dense = self.stage == Stage.DENSE
        local = None if self.is_sync else compressed
        return Exchange(compressed & self.is_sync, dense | (compressed & self.is_refresh), local)

    def segment_mask(self, layout: SegmentLayout) -> Bytes | None:
        return self.preconditioner.mask_of(layout.tensors)

    def compress(self, segment: int, packed: Bytes, flags: Flags) -> Loop:
        """Returns the loop that compresses the sum of updates since the last sync, with this step's, divided by the
        square root of the sum of learning rates.

        It reads parameters if the decay is coupled.
        """
        layout = self.segments[segment].layout
        return loop(
            Kernels.compress_update,
            flags,
            blocks=layout.worker_blocks,
            tensors=self.tensors,
            momentum=self.momentum,
            update=self._update,
            error=self.error,
            error_out=self.error_out,
            mask=self.segment_mask(layout),
            scale=self.scale,
            packed=packed,
        )

    def built_in(self, segments: Sequence[int]) -> tuple[Any, ...]:
        masks = self.preconditioner.masked.tobytes(), self.preconditioner.mask
        return (*super().built_in(segments), *masks, self._update)

    def check_dense_averages(self, segment: SegmentLayout, averages: Table, flags: Flags) -> list[Computation]:
        """Returns nothing: ``can_use`` checks the squares."""
        return []

    def can_use(self, blocks: Table, averages: Table) -> bool:
        """Returns True if the squares of the averages, which v needs, are finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            return all(np.isfinite(part * part).all() for part in self._parts(blocks, averages))

    def _parts(self, blocks: Table, averages: Table) -> Iterator[Floats]:
        for run in runs_of(blocks):
            first = int(averages["grad"][run["tensor"]]) + 4 * int(run["start"])
            yield self.param_memory.host(self.param_memory.at(first, int(run["length"])))

    def is_local_finite(self, tensors: Sequence[int]) -> bool:
        return self.kernels.finite(self._blocks_of(tensors), self.tensors)

    def commit(self, present: Bools, averages: Floats) -> None:
        """Takes the step. Overwrites ``averages``."""
        self.allocate()
        is_sync, is_refresh = self.is_sync, self.is_refresh
        refreshes_before = self.refreshes.count
        compressed = self.stage == Stage.COMPRESSED
        moved = present.copy()
        if is_sync:
            # A tensor that took steps since the last sync moves even without a gradient, because all ranks sync it.
            moved |= compressed & (self._interval_lr.astype(np.float32) > 0)
        met = compressed & moved & is_sync & ((self._interval_lr + self._lr).astype(np.float32) > 0)
        local = compressed & moved & ~met
        self._start_intervals(met | local)
        refreshed = np.flatnonzero(compressed & present) if is_refresh else np.zeros(0, np.int64)
        for tensor in refreshed.tolist():
            self._decay_average(tensor, averages)
        self._take_dense_steps(present, averages, refreshes_before)
        if is_sync and compressed.any():
            self._end_sync(met)
        self._take_local_steps(local)
        for tensor in refreshed.tolist():
            self._refresh(tensor, self.param_memory.host(averages[self.flat_span(tensor)]))
        self.tensors["skip"] = 1
        self.steps += moved
        self.step += 1
        if is_refresh:
            self.refreshes.refreshed(self.step)
        if met.any():
            self.syncs.synced(self.step)
            self.sync_steps += 1
        elif self.step > 1:
            self.local_steps += 1
        self._free_variance()

    @property
    def has_left_sync(self) -> bool:
        """True if a step was taken since the last sync. The same on all ranks, which count their steps alike."""
        return self.step > self.syncs.last_sync

    def end_interval(self) -> None:
        """Commits a sync that is no step: what the local steps have added up since the last sync was exchanged, with
        learning rates of 0 and without gradients.
        """
        met = (self.stage == Stage.COMPRESSED) & (self._interval_lr.astype(np.float32) > 0)
        self._end_sync(met)
        self.tensors["skip"] = 1
        if met.any():
            self.syncs.synced(self.step)
            self.sync_steps += 1

    def commit_silent(self, present: Bools, moves: bool) -> None:
        """Takes a step in which nothing was sent.

        What all ranks must have in common changes in the same way if ``moves`` is False: then the gradients are not
        finite, and the parameters and the momentum stay.

        Args:
            present: The tensors that have a gradient on this rank. Those that have taken steps before need one on all
                ranks or on none: the next vote compares that.
            moves: Whether this rank's gradients are used.
        """
        self.allocate()
        local = present & (self.stage == Stage.COMPRESSED)
        self._start_intervals(local)
        if moves:
            unseen = present & (self.stage == Stage.UNSEEN)
            self.tensors["decay"][unseen] = 1.0  # other ranks do not know of this gradient
            self._keep_waiting(unseen)
            self.tensors["decay"][unseen] = self._decay[unseen]
        self._take_local_steps(local, moves)
        self.tensors["skip"] = 1
        self.steps += local
        self.step += 1
        self.local_steps += 1
        self._free_variance()

    def _take_dense_steps(self, present: Bools, averages: Floats, refreshes: int) -> None:
        """Takes a step of the tensors that are not compressed yet. ``refreshes`` is the number that the others had
        before this step.
        """
        rows = self.tensors
        dense, unseen = self.stage == Stage.DENSE, self.stage == Stage.UNSEEN
        self.stage[dense & ~present & (self.steps == 0)] = Stage.UNSEEN
        for tensor in np.flatnonzero(dense & present).tolist():
            average = averages[self.flat_span(tensor)]
            first = self.refreshed[tensor] == 0
            decayed = self.param_memory.host(average)
            if rows["weight_decay"][tensor] != 0:
                decayed = decayed + rows["weight_decay"][tensor] * self.param_memory.host(self.param(tensor))
            self._refresh(tensor, decayed)
            if first and self.refreshed[tensor]:
                self._dense_refreshes[tensor] = max(1, refreshes)
            rows["grad"][tensor], rows["grad_dtype"][tensor] = address(average), 0
        with_variance = dense & present & (self.refreshed > 0)
        self._step_locally(with_variance, None, self.preconditioner.denominator, self.preconditioner.mask)
        self._keep_waiting((dense | unseen) & present & ~with_variance)
        self.stage[unseen & present] = Stage.DENSE
        ready = with_variance & (self.refreshed >= self._dense_refreshes)
        self.stage[ready] = Stage.COMPRESSED
        self._waits[ready] = False
        if self._synced is not None:
            for tensor in np.flatnonzero(ready).tolist():
                self._synced[self.flat_span(tensor)] = self.param(tensor)

    def _keep_waiting(self, without: Bools) -> None:
        """Takes a step of tensors without a variance, all of whose elements are masked: parameters only decay, and
        gradients wait in the worker errors.
        """
        rows = self.tensors
        if without.any():
            everything = self.param_memory.staging(self.layout.flat_numel // 8)
            everything[:] = 255
            self.param_memory.changed(everything)
            waiting = self.param_memory.zeros(self.layout.flat_numel)
            # Gradients wait in the unit of errors. Masked elements are not moved by this step size.
            rows["step_size"][without] = np.sqrt(self._lr[without])
            self._step_locally(without, waiting, self.momentum, everything)
            rows["step_size"][without] = self._lr[without]
            for tensor in np.flatnonzero(without).tolist():
                part = self.layout.to_worker(tensor, self.rank, self.param_memory.host(waiting[self.flat_span(tensor)]))
                span = self.local_span(tensor)
                self.error[span] = self.param_memory.host(self.error[span]) + part
        self._waits |= without

    def _end_sync(self, met: Bools) -> None:
        """Ends a sync: the tensors ``met`` continue from the same parameters on all ranks, the others as if nothing had
        been sent.
        """
        for tensor in np.flatnonzero(~met & ((self.stage == Stage.COMPRESSED) | self._waits)).tolist():
            self.errors.keep(tensor)
        self.errors.swap()
        self.tensors["skip"] = ~met
        calls = []
        for number, segment in enumerate(self.segments):
            sent = segment.layout.blocks, self.tensors, self.result(number), self.preconditioner.denominator
            calls.append((*sent, self.segment_mask(segment.layout), self.momentum, self._update, self._synced))
        self.for_each("apply_update", calls)
        self._interval_lr[met], self._interval_decay[met] = 0.0, 1.0
        self._is_average |= met

    def _take_local_steps(self, local: Bools, moves: bool = True) -> None:
        """Counts a step of the tensors ``local``, and takes it if it ``moves`` them."""
        if not local.any():
            return
        self._leave_sync(local, bool((self.tensors["step_size"][local] > 0).any()))
        if moves:
            self._step_locally(local, self._update, self.preconditioner.denominator, self.preconditioner.mask)
        self._interval_lr[local] += self._lr[local]
        self._interval_decay[local] *= self._decay[local]

    def _start_intervals(self, moving: Bools) -> None:
        """Keeps the current parameters of tensors that have not moved since the last sync, as those they start from."""
        if self._synced is not None:
            for tensor in np.flatnonzero(moving & (self._interval_lr == 0)).tolist():
                self._synced[self.flat_span(tensor)] = self.param(tensor)

    def _leave_sync(self, tensors: Bools, moves: bool) -> None:
        """Keeps the momentum that a sync has left of ``tensors`` and, if they will move, their parameters."""
        if moves and self._update is None:
            self._update, self._synced = (self.param_memory.zeros(self.layout.flat_numel) for _ in range(2))
            for tensor in np.flatnonzero(self.stage == Stage.COMPRESSED).tolist():
                self._synced[self.flat_span(tensor)] = self.param(tensor)
        if not self._average_momentum.size:
            self._average_momentum = self.param_memory.zeros(self.layout.flat_numel)
        for tensor in np.flatnonzero(tensors & self._is_average).tolist():
            span = self.flat_span(tensor)
            self._average_momentum[span] = self.momentum[span]
        self._is_average &= ~tensors

    def _step_locally(self, tensors: Bools, update: Floats | None, denominator: Floats, mask: Bytes) -> None:
        if tensors.any():
            self.tensors["skip"] = ~tensors
            self.kernels.local_step(self._blocks, self.tensors, self.momentum, update, denominator, mask)

    # The variance

    def _decay_average(self, tensor: int, averages: Floats) -> None:
        """Adds the coupled decay to an averaged gradient, from the parameters before the step that all ranks have."""
        decay = self.tensors["weight_decay"][tensor]
        if decay != 0:
            span = self.flat_span(tensor)
            param = self.param(tensor) if self._synced is None else self._synced[span]
            averages[span] = self.param_memory.host(averages[span]) + decay * self.param_memory.host(param)

    def _refresh(self, tensor: int, gradient: Floats) -> None:
        """Updates v = beta2 * v + (1 - beta2) * gradient^2, and what is computed from it."""
        v = self._variance.get(tensor)
        if v is None:
            v = self._variance[tensor] = np.zeros(int(self.layout.numels[tensor]), np.float32)
        beta2 = self._beta2[tensor]
        if self.gradient_scale != 1.0:
            gradient = gradient * np.float32(self.gradient_scale)
        v *= np.float32(beta2)
        v += np.float32(1.0 - beta2) * (gradient * gradient)
        count = int(self.refreshed[tensor]) + 1
        correction, eps = 1.0 - beta2**count, float(self._eps[tensor])
        when = f"the refresh at step {self.step + 1}"
        if self.preconditioner.set_variance(tensor, v, correction, eps, when=when) or count > 1:
            self.refreshed[tensor] = count

    def _free_variance(self) -> None:
        if self._variance and not self.dense_again:
            for tensor in [t for t in self._variance if self.stage[t] == Stage.COMPRESSED]:
                del self._variance[tensor]
        if self.dense_codes is not None and not self.dense_again:
            self.dense_codes.drop(self.stage == Stage.COMPRESSED)

    # Masked elements

    @property
    def wake_due(self) -> bool:
        """True every ``mask_refresh`` syncs, while an element is masked."""
        due = self.sync_steps > self._woken_at and self.sync_steps % self.mask_refresh == 0
        return due and bool(self.preconditioner.masked.any())

    def touched(self) -> Bytes:
        """Returns one bit per flat element: it is masked, and this rank's gradients have left something in its worker
        error.
        """
        return self.preconditioner.touched(self.error, self.rank)

    def wake(self, touched: Bytes) -> int:
        """Unmasks the elements of ``touched``, the OR over all ranks. Returns their number.

        Their v becomes that of their block's mean sqrt(v_hat), so that no refresh masks them again. Their momentum is
        0. What they have accumulated in the worker errors goes into the next sync.
        """
        self._woken_at = self.sync_steps
        preconditioner = self.preconditioner
        tensors = preconditioner.touched_tensors(touched)
        before = {tensor: preconditioner.masked_elements(tensor) for tensor in tensors}
        woken = preconditioner.wake(touched)
        for tensor in tensors:
            v = self._variance.get(tensor)
            if v is not None:
                at = before[tensor] & ~preconditioner.masked_elements(tensor)
                root = preconditioner.roots(tensor)[at]
                v[at] = root * root * np.float32(1.0 - self._beta2[tensor] ** int(self.refreshed[tensor]))
        return woken

    # State

    def report(self) -> dict[str, Any]:
        """Returns the state for users. The ``stage`` is ``"warm-up"`` before the first step, ``"refreshing"`` while v
        changes, then ``"frozen"``.

        Also ``dense_bits``, the current ``interval`` between syncs, ``synced`` (all ranks have the same parameters),
        the steps of each kind, and the numbers of elements that are masked and that were woken.
        """
        return {
            "stage": "warm-up" if self.step == 0 else "refreshing" if self.dense_again else "frozen",
            "dense_bits": self.dense_bits,
            "interval": self.syncs.interval(self.step + 1),
            "synced": self.is_synced,
            "syncs": self.sync_steps,
            "local_steps": self.local_steps,
            "refreshes": self.refreshes.count,
            "masked_elements": int(self.preconditioner.masked.sum()),
            "woken_elements": self.preconditioner.woken,
        }

    def average_momentum(self, tensor: int) -> Floats:
        """Returns m of the last sync, the same on all ranks: a new float32 array of ``numel`` elements."""
        if not self._allocated:
            return np.zeros(int(self.layout.numels[tensor]), np.float32)
        momentum = self.momentum if self._is_average[tensor] else self._average_momentum
        return self._saved(momentum[self.flat_span(tensor)])

    def variance(self, tensor: int, *, beta2: float) -> Floats:
        """Returns Adam's exp_avg_sq for a checkpoint: v_hat * (1 - beta2^t), a new float32 array, 0 for masked
        elements.
        """
        if not self.refreshed[tensor]:
            return np.zeros(int(self.layout.numels[tensor]), np.float32)
        return self.preconditioner.variance(tensor, 1.0 - beta2 ** int(self.steps[tensor]))

    def adopt(self, tensor: int, momentum: Floats, variance: Floats, *, step: int, beta2: float, eps: float) -> None:
        """Continues from Adam's m and v, ``numel`` float32, after ``step`` steps; v counts as refreshed in each of
        them.

        If v is 0 everywhere only the step count changes. Raises ValueError for another number of elements,
        NonFiniteError if v has NaN or Inf.
        """
        spec = self.layout.tensors[tensor]
        momentum = flat_floats(momentum, spec.numel, f"momentum of {spec.name!r}")
        self.allocate()
        self.steps[tensor] = step
        if self.preconditioner.set_variance(tensor, variance, 1.0 - beta2**step, eps, when=f"step {step}"):
            self._forget(tensor)
            self.momentum[self.flat_span(tensor)] = momentum
            self._variance[tensor] = np.array(self.param_memory.host(variance), np.float32).reshape(-1)
            self.refreshed[tensor] = step
            self.stage[tensor] = Stage.COMPRESSED

    def start_at(self, step: int) -> None:
        """Sets the schedules as if ``step`` steps had been taken, the last of them a sync."""
        self.step = step
        self.syncs.synced(step)
        self.refreshes.start_at(step)
        self._free_variance()

    def _forget(self, tensor: int) -> None:
        """Lets the tensor start from its current parameter, as after a sync."""
        self.errors.reset(tensor)
        span = self.flat_span(tensor)
        if self._update is not None and self._synced is not None:
            self._update[span] = 0.0
            self._synced[span] = self.param(tensor)
        self._interval_lr[tensor], self._interval_decay[tensor] = 0.0, 1.0
        self._is_average[tensor] = True
        self._waits[tensor] = False

    def state(self) -> dict[str, Any]:
        """Returns counters, and by name of each tensor ``stage``, ``refreshes`` and ``dense_refreshes``; what the
        preconditioner has, once there was a refresh; ``variance`` while there are refreshes to come; between two syncs
        ``synced``, the parameter at the last one.
        """
        return {
            **super().state(),
            "step": self.step,
            "sync_steps": self.sync_steps,
            "local_steps": self.local_steps,
            "woken_at": self._woken_at,
            "woken": self.preconditioner.woken,
            **self.syncs.progress(),
            **self.refreshes.progress(),
            "tensors": {spec.name: self._tensor_state(tensor) for tensor, spec in enumerate(self.layout.tensors)},
        }

    def _tensor_state(self, tensor: int) -> dict[str, Any]:
        state: dict[str, Any] = {
            "stage": int(self.stage[tensor]),
            "refreshes": int(self.refreshed[tensor]),
            "dense_refreshes": int(self._dense_refreshes[tensor]),
        }
        if self.refreshed[tensor]:
            state |= self.preconditioner.tensor_state(tensor)
        if tensor in self._variance:
            state["variance"] = self._variance[tensor].copy()
        if self._interval_lr[tensor] > 0 and self._synced is not None:
            state["synced"] = self._saved(self._synced[self.flat_span(tensor)])
        return state

    def load_state(self, state: Mapping[str, Any], momentum: Callable[[int], Floats] | None = None) -> None:
        """Loads the result of ``state``: each tensor, with its parameter, is in the state after its last sync.

        ``momentum(tensor)``, float32, is ``average_momentum`` of a tensor that has taken steps. Raises ValueError,
        before anything is changed, if a number of elements differs.
        """
        tensors = [state["tensors"][spec.name] for spec in self.layout.tensors]
        momenta: list[Floats] = []
        for tensor, spec in enumerate(self.layout.tensors):
            found = momentum(tensor) if momentum and state["steps"][tensor] else np.zeros(spec.numel, np.float32)
            momenta.append(flat_floats(found, spec.numel, f"momentum of {spec.name!r}"))
            for name in ("denominator", "variance", "synced"):
                if name in tensors[tensor]:
                    flat_floats(tensors[tensor][name], spec.numel, f"{name} of {spec.name!r}")
        # The parameters are those of the state, so local steps taken before are forgotten, not undone.
        self._start_interval()
        self.preconditioner.unmask()
        super().load_state(state)
        self.allocate()
        for tensor, tensor_state in enumerate(tensors):
            if "denominator" in tensor_state:
                self.preconditioner.load_tensor_state(tensor, tensor_state)
            if "synced" in tensor_state:
                self.param(tensor)[:] = tensor_state["synced"]
            self._forget(tensor)
            self.momentum[self.flat_span(tensor)] = momenta[tensor]
            self._variance.pop(tensor, None)
            if "variance" in tensor_state:
                self._variance[tensor] = tensor_state["variance"].copy()
            self.stage[tensor] = int(tensor_state["stage"])
            self.refreshed[tensor] = int(tensor_state["refreshes"])
            self._dense_refreshes[tensor] = int(tensor_state["dense_refreshes"])
        self.step = int(state["step"])
        self.sync_steps = int(state["sync_steps"])
        self.local_steps = int(state["local_steps"])
        self._woken_at = int(state["woken_at"])
        self.preconditioner.woken = int(state["woken"])
        self.syncs.load_progress(state)
        self.refreshes.load_progress(state)

    def _start_interval(self) -> None:
        self._interval_lr[:], self._interval_decay[:] = 0.0, 1.0
        self._is_average[:] = True
        self._waits[:] = False

    def rank_state(self) -> dict[str, Any]:
        """Returns the rank state; between two syncs also ``momentum``, ``update`` and ``parameter`` (flat), and since
        when they are local.
        """
        flat: dict[str, Floats] = {}
        if not self._is_average.all():
            flat["momentum"] = self._saved(self.momentum)
        if self._update is not None and not self.is_synced:
            flat["update"] = self._saved(self._update)
            flat["parameter"] = np.zeros_like(flat["update"])
            for tensor in range(self.stage.size):
                flat["parameter"][self.flat_span(tensor)] = self.param_memory.host(self.param(tensor))
        return {
            **super().rank_state(),
            "flat": flat,
            "plain": {
                "error_unit": ERROR_UNIT,
                "interval_lr": self._interval_lr.tolist(),
                "interval_decay": self._interval_decay.tolist(),
                "is_average": self._is_average.tolist(),
                "waits": self._waits.tolist(),
            },
        }

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        super().check_rank_state({**state, "flat": {}})
        if state.get("plain", {}).get("error_unit") != ERROR_UNIT:
            raise ValueError(
                f"need errors in units of {ERROR_UNIT}, got those of an older release, in units of lr * m; leave the "
                "rank states out, and errors start at zero"
            )
        for name, buffer in state.get("flat", {}).items():
            if not np.isfinite(flat_floats(buffer, self.layout.flat_numel, f"flat buffer {name!r}")).all():
                raise ValueError(f"flat buffer {name!r} has NaN or Inf")

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Loads the result of ``rank_state``, after ``load_state``. Parameters become this rank's own again."""
        self.check_rank_state(state)
        flat, plain = state.get("flat", {}), state["plain"]
        super().load_rank_state({**state, "flat": {}})
        local = ~np.array(plain["is_average"], np.bool_)
        if local.any():
            self._leave_sync(local, "update" in flat)
        self._interval_lr[:], self._interval_decay[:] = plain["interval_lr"], plain["interval_decay"]
        self._waits[:] = plain["waits"]
        # Where errors were redistributed, each rank has a part of what waited on others.
        for tensor in np.flatnonzero(self.stage != Stage.COMPRESSED).tolist():
            self._waits[tensor] |= self.param_memory.host(self.error[self.local_span(tensor)]).any()
        for tensor in np.flatnonzero(local).tolist():
            span = self.flat_span(tensor)
            self.momentum[span] = flat["momentum"][span]
            if self._interval_lr[tensor] > 0 and self._update is not None:
                self._update[span] = flat["update"][span]
                self.param(tensor)[:] = flat["parameter"][span]

    def reset_rank_state(self) -> None:
        """Resets the rank state to that after the last sync; sets back parameters that have moved since."""
        for tensor in np.flatnonzero(~self._is_average).tolist():
            span = self.flat_span(tensor)
            self.momentum[span] = self._average_momentum[span]
            if self._interval_lr[tensor] > 0 and self._synced is not None:
                self.param(tensor)[:] = self._synced[span]
        if self._update is not None:
            self._update[:] = 0.0
        self._start_interval()
        super().reset_rank_state()

    def replica_addresses(self) -> NDArray[np.uint64]:
        """Returns the addresses of the parameters at the last sync."""
        addresses = self.tensors["param"].copy()
        if self._synced is not None:
            moved = self._interval_lr > 0
            addresses[moved] = address(self._synced) + 4 * self.layout.offsets[moved].astype(np.uint64)
        return addresses

    def memory(self) -> dict[str, int]:
        """Returns the bytes held, by buffer."""
        optional = {"update": self._update, "synced": self._synced}
        return {
            **self.preconditioner.memory(),
            **super().memory(),
            "momentum": self.momentum.nbytes,
            "average_momentum": self._average_momentum.nbytes,
            "variance": sum(v.nbytes for v in self._variance.values()),
            **{name: 0 if buffer is None else buffer.nbytes for name, buffer in optional.items()},
            "packed_result": self.results_nbytes(),
        }

    def _blocks_of(self, tensors: Sequence[int]) -> Table:
        if len(tensors) == len(self.stage):
            return self._blocks
        return self._blocks[np.isin(self._blocks["tensor"], tensors)]
