"""0/1 Adam on n ranks, or on nodes of ranks, in plain NumPy: the law for the core, the runtime and the frontends.

Written from docs/algorithms.md and nothing else: no ocomm code, no packing, no owners (who keeps a block's server error
does not change it). Everything is float32, one operation at a time, unless a comment says otherwise.

A *worker* is a rank, or a node: the ranks of a node average their gradient densely at every step, so they stay equal
between syncs, too. What the algorithm leaves open is decided here:

- **The first step** is dense. Before it there is no variance, so no denominator and no mask that a compressed exchange
  could use; and where the average is known exactly there is nothing to compress. It refreshes v, and then moves by
  m = (1 - beta1) * gbar.
- **A tensor that comes late** (nobody had a gradient for it in the first step) takes part in nothing until somebody
  has one. That first gradient waits in the worker errors, as those of masked elements do. From the next step on the
  tensor takes dense steps like the first one, each of which refreshes its v: as many as the others had refreshes when
  its own first one came. A tensor whose v is 0 everywhere stays at dense steps.
- **v is that of Adam**: where the decay is coupled, of gbar + wd * p with the p before the step, and between syncs of
  the p of the last one, which is the same on all ranks.
- **Waking does not wait for the last refresh**: refreshes become rare long before that. A woken element also gets v, so
  that the next refresh does not mask it again. A refresh that would mask all of a tensor leaves its mask alone.
- **A tensor that nobody has a gradient for** keeps its state. Only at a sync it moves nevertheless, with a gradient of
  0, if it took steps since the last one: after a sync all workers hold the same parameters.
- **finish** is such a sync of all tensors with a learning rate of 0, and no step: it counts in no schedule but as the
  last sync. A tensor that still takes dense steps, or none, has no part in it.
- **A tensor whose sum of learning rates is 0** takes a local step where the others sync. If that is so for all of them,
  the step is no sync, and the interval goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.oracle.clipping import Clipping
from tests.oracle.dense_codes import DenseCodes
from tests.oracle.onebit_adam import _fold, compress

F = np.float32
Array = np.ndarray
#: gradients[rank][tensor]; None: no gradient there.
Gradients = Sequence[Sequence[Array | None]]


@dataclass
class Tensor:
    """One parameter, flat: lists hold one array per worker, the rest is replicated."""

    params: list[Array]
    momenta: list[Array]
    updates: list[Array]
    errors: list[Array]
    server_error: Array
    synced: Array  # parameters at the last sync
    variance: Array
    stage: str = "dense"  # then "compressed"; "unseen" before the first gradient, if it comes late
    step: int = 0
    refreshes: int = 0
    dense_refreshes: int = 1  # with so many the dense steps end
    interval_lr: float = 0.0  # float64, since the last sync
    interval_decay: float = 1.0
    mask: Array = field(default_factory=lambda: np.zeros(0, bool))
    denominator: Array = field(default_factory=lambda: np.zeros(0, F))
    root_mean: Array = field(default_factory=lambda: np.zeros(0, F))  # of its block, per element
    codes: DenseCodes | None = None  # None: dense averages are in float32


class Simulation:
    """``lr`` is a number or a function of the step, counted from 1. ``step`` takes one step of all ranks.

    ``nodes``: the number of ranks of each node, ranks in order; None: every rank is a worker of its own.
    """

    def __init__(
        self,
        params: Sequence[Array],
        ranks: int,
        *,
        nodes: Sequence[int] | None = None,
        lr: float | Callable[[int], float] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        block_size: int | str = 4096,
        variance_floor: float = 0.2,
        scale: str = "rms",
        mask_refresh: int = 100,
        var_update_scaler: int = 16,
        var_freeze_step: int | None = None,
        local_step_start: int = 0,
        local_step_doubling: int = 32768,
        local_step_clip: int = 16,
        clipping: Clipping | None = None,
        dense_bits: int = 32,
    ) -> None:
        self.clipping = clipping
        self.nodes = list(nodes) if nodes is not None else [1] * ranks
        assert sum(self.nodes) == ranks
        self.ranks = ranks
        self.lr = lr if callable(lr) else lambda t: lr
        self.beta1, self.beta2 = betas
        self.eps = eps
        self.coupled = 0.0 if decoupled else weight_decay
        self.decoupled = weight_decay if decoupled else 0.0
        self.block_size = block_size
        self.variance_floor = variance_floor
        self.scale = scale
        self.mask_refresh = mask_refresh
        self.scaler = var_update_scaler
        self.freeze_step = var_freeze_step
        self.start, self.doubling, self.clip = local_step_start, local_step_doubling, local_step_clip
        self.shapes = [np.shape(p) for p in params]
        workers = range(len(self.nodes))
        self.tensors = []
        for p in params:
            flat = np.array(p, F).reshape(-1)

            def zeros(flat: Array = flat) -> list[Array]:
                return [np.zeros(flat.size, F) for _ in workers]

            copies = [flat.copy() for _ in workers]
            x = Tensor(copies, zeros(), zeros(), zeros(), zeros()[0], flat.copy(), zeros()[0])
            if dense_bits != 32:
                x.codes = DenseCodes(flat.size, len(self.nodes), dense_bits, self._blocks(x))
            self.tensors.append(x)
        self.t = 0
        self.last_sync = 0
        self.next_refresh = 1
        self.syncs = self.local_steps = self.refreshes = self.woken = 0

    @property
    def params(self) -> list[Array]:
        """Those of the first worker: copies, in their shapes."""
        return self.params_of(0)

    def params_of(self, worker: int) -> list[Array]:
        return [x.params[worker].reshape(shape).copy() for x, shape in zip(self.tensors, self.shapes, strict=True)]

    def interval(self, t: int) -> int:
        return 1 if t <= self.start else min(self.clip, 2 ** ((t - self.start) // self.doubling))

    def step(self, gradients: Gradients) -> None:
        self.t += 1
        lr = self.lr(self.t)
        self.factor = self.clipping.factor(gradients, self.t) if self.clipping else 1.0
        self.one_minus_beta1 = F((1 - self.beta1) * self.factor)
        due = self.t - self.last_sync >= self.interval(self.t)
        if self.freeze_step is None:
            refresh = self.t == self.next_refresh and (self.t == 1 or self.interval(self.t) == 1)
        else:
            refresh = self.t == self.next_refresh and (self.t == 1 or self.t <= self.freeze_step)
        before = self.refreshes
        synced = False
        for index, x in enumerate(self.tensors):
            local = self._of_workers(x, [g[index] for g in gradients])
            pending = due and F(x.interval_lr) > 0
            if local is None and not pending:
                if x.stage == "dense" and x.step == 0:
                    x.stage = "unseen"
                continue  # nobody touches its state
            seen = local is not None
            if local is None:
                local = [np.zeros(x.synced.size, F) for _ in self.nodes]
            x.step += 1
            if x.stage == "unseen":
                self._wait(x, local, lr)
            elif x.stage == "dense":
                self._dense_step(x, local, lr, before)
            else:
                x.interval_lr += lr
                x.interval_decay *= 1 - lr * self.decoupled
                base = x.synced
                if due and F(x.interval_lr) > 0:
                    self._sync_step(x, local, lr)
                    synced = True
                else:
                    self._local_step(x, local, lr)
                if refresh and seen:
                    self._refresh(x, self._average(x, local), base)
        if refresh:
            self.next_refresh = self.t + 2 ** (self.refreshes // self.scaler)
            self.refreshes += 1
        if synced:
            self.last_sync = self.t
            self.syncs += 1
            if self.syncs % self.mask_refresh == 0:
                self._wake()
        elif self.t > 1:
            self.local_steps += 1

    def finish(self) -> None:
        """A sync now, which is no step: the exchange of what the steps since the last sync have added up."""
        self.factor, self.one_minus_beta1 = 1.0, F(1 - self.beta1)
        pending = [x for x in self.tensors if x.stage == "compressed" and F(x.interval_lr) > 0]
        for x in pending:
            self._sync_step(x, [np.zeros(x.synced.size, F) for _ in self.nodes], 0.0)
        if pending:
            self.last_sync = self.t
            self.syncs += 1
            if self.syncs % self.mask_refresh == 0:
                self._wake()

    # Gradients

    def _of_workers(self, x: Tensor, gradients: Sequence[Array | None]) -> list[Array] | None:
        """Per worker: the sum over its ranks in order, times float32(nodes / ranks); None if no rank has one."""
        if all(g is None for g in gradients):
            return None
        flat = [np.zeros(x.synced.size, F) if g is None else np.asarray(g, F).reshape(-1) for g in gradients]
        if len(self.nodes) == self.ranks:
            return flat
        found = []
        for count in self.nodes:
            total = flat[0].copy()
            for g in flat[1:count]:
                total += g
            found.append(total * F(len(self.nodes) / self.ranks))
            flat = flat[count:]
        return found

    def _average(self, x: Tensor, local: list[Array]) -> Array:
        if x.codes is not None:
            return x.codes.average(local)
        total = local[0].copy()
        for g in local[1:]:
            total += g
        return total * F(1 / len(local))

    def _decayed(self, gradient: Array, param: Array) -> Array:
        return gradient + F(self.coupled / self.factor) * param if self.coupled else gradient

    # Steps

    def _wait(self, x: Tensor, local: list[Array], lr: float) -> None:
        """A gradient of a tensor without a variance: all of it is masked."""
        for worker, g in enumerate(local):
            m = F(self.beta1) * x.momenta[worker] + self.one_minus_beta1 * self._decayed(g, x.params[worker])
            x.errors[worker] = x.errors[worker] + F(np.sqrt(lr)) * m
            x.params[worker] = x.params[worker] * F(1 - lr * self.decoupled)
        x.synced = x.params[0].copy()
        x.stage = "dense"

    def _dense_step(self, x: Tensor, local: list[Array], lr: float, refreshes_before: int) -> None:
        average = self._average(x, local)
        first = x.refreshes == 0
        self._refresh(x, average, x.params[0])
        if not x.refreshes:
            self._wait(x, [average] * len(x.params), lr)
            return
        if first:
            x.dense_refreshes = max(1, refreshes_before)
        for worker, p in enumerate(x.params):
            m = F(self.beta1) * x.momenta[worker] + self.one_minus_beta1 * self._decayed(average, p)
            p = p * F(1 - lr * self.decoupled)
            x.params[worker] = np.where(x.mask, p, p - F(lr) * (m / x.denominator))
            x.momenta[worker] = np.where(x.mask, x.momenta[worker], m)
        x.synced = x.params[0].copy()
        if x.refreshes >= x.dense_refreshes:
            x.stage = "compressed"

    def _local_step(self, x: Tensor, local: list[Array], lr: float) -> None:
        for worker, g in enumerate(local):
            p = x.params[worker]
            m = F(self.beta1) * x.momenta[worker] + self.one_minus_beta1 * self._decayed(g, p)
            p = p * F(1 - lr * self.decoupled)
            x.params[worker] = np.where(x.mask, p, p - F(lr) * (m / x.denominator))
            x.updates[worker] = x.updates[worker] + F(lr) * m
            x.momenta[worker] = np.where(x.mask, x.momenta[worker], m)

    def _sync_step(self, x: Tensor, local: list[Array], lr: float) -> None:
        c, root = [], F(np.sqrt(x.interval_lr))
        for worker, g in enumerate(local):
            m = F(self.beta1) * x.momenta[worker] + self.one_minus_beta1 * self._decayed(g, x.params[worker])
            c.append((F(1) / root * x.updates[worker] + F(lr) / root * m) + x.errors[worker])
        mean = np.zeros(x.synced.size, F)
        for block in self._blocks(x):
            keep = ~x.mask[block]
            total = np.zeros(keep.size, F)
            for worker in range(len(self.nodes)):
                sent, x.errors[worker][block] = compress(c[worker][block], keep, self.scale)
                total = sent if worker == 0 else total + sent
            a = total * F(1 / len(self.nodes)) + x.server_error[block]
            mean[block], x.server_error[block] = compress(a, keep, self.scale)
        ubar = root * mean
        p = x.synced * F(x.interval_decay)
        x.synced = np.where(x.mask, p, p - ubar / x.denominator)
        for worker in range(len(self.nodes)):
            x.params[worker] = x.synced.copy()
            x.momenta[worker] = mean / root
            x.updates[worker] = np.zeros(x.synced.size, F)
        x.interval_lr, x.interval_decay = 0.0, 1.0

    # The variance

    def _refresh(self, x: Tensor, average: Array, param: Array) -> None:
        g = self._decayed(average, param) * F(self.factor)
        x.variance = F(self.beta2) * x.variance + F(1 - self.beta2) * (g * g)
        if x.refreshes == 0 and not x.variance.any():
            return
        x.refreshes += 1
        mask = x.variance == 0
        if mask.all():
            return
        x.mask = mask
        root = np.sqrt(x.variance / F(1 - self.beta2**x.refreshes))
        x.root_mean = np.zeros(root.size, F)
        floor = np.zeros(root.size, F)
        sums, seen = [], 0
        for block in self._blocks(x):
            total = _fold(root[block], self._width(x))
            count = int((~mask[block]).sum())
            if count:
                x.root_mean[block] = F(total / count)
            sums.append(total)
            seen += count
        whole = F(_fold(np.array(sums), len(sums)) / seen)
        for block in self._blocks(x):
            if mask[block].all():
                x.root_mean[block] = whole
            floor[block] = F(self.variance_floor) * x.root_mean[block]
        x.denominator = np.maximum(root, floor) + F(self.eps)

    def _width(self, x: Tensor) -> int:
        return x.synced.size if self.block_size == "tensor" else min(int(self.block_size), x.synced.size)

    def _blocks(self, x: Tensor) -> list[slice]:
        width = self._width(x)
        return [slice(start, min(start + width, x.synced.size)) for start in range(0, x.synced.size, width or 1)]

    # Masked elements

    def _wake(self) -> None:
        for x in self.tensors:
            if not x.mask.any():
                continue
            touched = np.zeros(x.synced.size, bool)
            for error in x.errors:
                touched |= error != 0
            woken = touched & x.mask
            root = x.root_mean[woken]
            x.denominator[woken] = root + F(self.eps)
            x.variance[woken] = root * root * F(1 - self.beta2**x.refreshes)
            x.mask = x.mask & ~woken
            self.woken += int(woken.sum())


def simulate(
    params: Sequence[Array],
    gradients: Callable[[int, int, list[Array]], Sequence[Array | None]],
    *,
    ranks: int,
    steps: int,
    **settings: object,
) -> Simulation:
    """The simulation after ``steps`` steps; ``settings`` as for ``Simulation``.

    ``gradients`` is called with (t, rank, the rank's parameters) and returns the gradients of one rank.
    """
    simulation = Simulation(params, ranks, **settings)  # type: ignore[arg-type]
    worker_of = [worker for worker, count in enumerate(simulation.nodes) for _ in range(count)]
    for t in range(1, steps + 1):
        now = [simulation.params_of(worker) for worker in range(len(simulation.nodes))]
        simulation.step([gradients(t, rank, now[worker_of[rank]]) for rank in range(ranks)])
    return simulation
