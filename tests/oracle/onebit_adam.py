"""1-bit Adam on n ranks in plain NumPy: the law for the core, the kernels, the runtime and the frontends.

Written from docs/algorithms.md and nothing else: no ocomm code, no packing, no owners (who keeps a block's server error
does not change it). Everything is float32, one operation at a time, unless a comment says otherwise.

The compressed steps are exact. The dense ones follow torch.optim.Adam and AdamW (single tensor, CPU): the moments
equal torch's in every bit but where a fused multiply-add, ``_fused``, rounds twice (about one element in 2^29). The
parameters do not quite: torch takes its square root from a vector library that is off by one unit in the last place
in a fifth of the elements. A test that wants every bit against torch hands over torch's own state at T_w: ``adopt``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.oracle.birder import inside_nodes
from tests.oracle.clipping import Clipping
from tests.oracle.dense_codes import DenseCodes

F = np.float32
Array = np.ndarray
#: gradients[rank][tensor]; None: no gradient there.
Gradients = Sequence[Sequence[Array | None]]


def _fused(a: Array | F, b: Array | F, c: Array) -> Array:
    """a * b + c, rounded once (see above)."""
    return (np.asarray(a, np.float64) * np.asarray(b, np.float64) + c.astype(np.float64)).astype(F)


@dataclass
class Tensor:
    """One parameter, flat, with all that is replicated, and every rank's worker error."""

    param: Array
    errors: list[Array]
    momentum: Array
    variance: Array
    server_error: Array
    step: int = 0
    compressed: bool = False
    first_variance: int | None = None
    late: bool = False
    mask: Array = field(default_factory=lambda: np.zeros(0, bool))
    denominator: Array = field(default_factory=lambda: np.zeros(0, F))
    root_mean: Array = field(default_factory=lambda: np.zeros(0, F))  # of its block, per element
    codes: DenseCodes | None = None  # None: dense averages are in float32


class Simulation:
    """``lr`` is a number or a function of the step, counted from 1. ``step`` takes one step of all ranks.

    ``nodes``: the number of ranks of each node, ranks in order; None: every rank is a worker of its own. The gradients
    of a node are added up, times float32(nodes / ranks), and it is one worker then, also in the dense steps.
    """

    def __init__(
        self,
        params: Sequence[Array],
        ranks: int,
        *,
        nodes: Sequence[int] | None = None,
        freeze_step: int,
        lr: float | Callable[[int], float] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        block_size: int | str = 4096,
        variance_floor: float = 0.05,
        scale: str = "rms",
        mask_refresh: int = 100,
        clipping: Clipping | None = None,
        dense_bits: int = 32,
    ) -> None:
        self.clipping = clipping
        self.ranks = ranks
        self.nodes = [1] * ranks if nodes is None else list(nodes)
        assert sum(self.nodes) == ranks
        self.workers = len(self.nodes)
        self.freeze_step = freeze_step
        self.lr = lr if callable(lr) else lambda t: lr
        self.beta1, self.beta2 = betas
        self.eps = eps
        self.coupled = 0.0 if decoupled else weight_decay
        self.decoupled = weight_decay if decoupled else 0.0
        self.block_size = block_size
        self.variance_floor = variance_floor
        self.scale = scale
        self.mask_refresh = mask_refresh
        self.shapes = [np.shape(p) for p in params]
        self.tensors = []
        for p in params:
            flat = np.array(p, F).reshape(-1)
            zeros = [np.zeros(flat.size, F) for _ in range(self.workers + 3)]
            x = Tensor(flat, zeros[: self.workers], *zeros[self.workers :])
            if dense_bits != 32:
                x.codes = DenseCodes(flat.size, self.workers, dense_bits, self._blocks(x))
            self.tensors.append(x)
        self.t = 0
        self.compressed_steps = 0
        self.woken = 0

    @property
    def params(self) -> list[Array]:
        """Copies, in their shapes."""
        return [x.param.reshape(shape).copy() for x, shape in zip(self.tensors, self.shapes, strict=True)]

    def adopt(self, tensor: int, *, param: Array, momentum: Array, variance: Array, step: int) -> None:
        """Takes over a framework's own state of one tensor, after its dense step ``step`` and before the freeze."""
        x = self.tensors[tensor]
        x.param, x.momentum, x.variance = (np.array(a, F).reshape(-1) for a in (param, momentum, variance))
        x.step = step

    def end_warmup(self) -> None:
        """After ``adopt``: the warm-up is over, step ``freeze_step`` has been taken by others."""
        self.t = self.freeze_step
        self._freeze()

    def step(self, gradients: Gradients) -> None:
        self.t += 1
        lr = self.lr(self.t)
        compressed = [x.compressed for x in self.tensors]
        # A warm-up of all tensors has an average to clip: that is the framework's.
        self.factor = self.clipping.factor(gradients, self.t) if self.clipping and any(compressed) else 1.0
        for index, x in enumerate(self.tensors):
            local = [None if g[index] is None else np.asarray(g[index], F).reshape(-1) for g in gradients]
            if all(g is None for g in local):
                continue  # nobody touches its state
            local = inside_nodes([np.zeros(x.param.size, F) if g is None else g for g in local], self.nodes)
            x.step += 1
            if x.compressed:
                self._compressed_step(x, local, lr)
            else:
                self._dense_step(x, local, lr)
        self._freeze()
        if any(compressed):
            self.compressed_steps += 1
            if self.compressed_steps % self.mask_refresh == 0:
                self._wake()

    # Dense: torch/optim/adam.py, _single_tensor_adam

    def _dense_average(self, x: Tensor, local: list[Array]) -> Array:
        if x.codes is not None:
            return x.codes.average(local) * F(self.factor)
        total = local[0].copy()
        for g in local[1:]:
            total += g
        return total * F(1 / self.workers) * F(self.factor)

    def _dense_step(self, x: Tensor, local: list[Array], lr: float) -> None:
        grad = self._dense_average(x, local)
        if self.decoupled:
            x.param *= F(1 - lr * self.decoupled)
        if self.coupled:
            grad = _fused(F(self.coupled), x.param, grad)
        x.momentum = _fused(F(1 - self.beta1), grad - x.momentum, x.momentum)  # lerp_
        x.variance = x.variance * F(self.beta2)
        x.variance = _fused(F(1 - self.beta2) * grad, grad, x.variance)  # addcmul_
        step_size = lr / (1 - self.beta1**x.step)
        root_correction = (1 - self.beta2**x.step) ** 0.5
        denominator = np.sqrt(x.variance) / F(root_correction) + F(self.eps)
        x.param = x.param + F(-step_size) * x.momentum / denominator  # addcdiv_

    # Freezing

    def _freeze(self) -> None:
        if self.t < self.freeze_step:
            return
        for x in self.tensors:
            if x.compressed:
                continue
            used = bool((x.variance != 0).any())
            if self.t == self.freeze_step:
                x.late = not used
            if x.late:
                # A warm-up of its own, counted from the first dense step with a variance.
                if used and x.first_variance is None:
                    x.first_variance = x.step
                if x.first_variance is None or x.step - x.first_variance + 1 < self.freeze_step:
                    continue
            self._freeze_tensor(x)

    def _freeze_tensor(self, x: Tensor) -> None:
        root = np.sqrt(x.variance / F(1 - self.beta2**x.step))
        x.mask = x.variance == 0
        x.root_mean = np.zeros(root.size, F)
        floor = np.zeros(root.size, F)
        sums, seen = [], 0
        for block in self._blocks(x):
            total = _fold(root[block], self._width(x))
            count = int((~x.mask[block]).sum())
            if count:
                x.root_mean[block] = F(total / count)
            sums.append(total)
            seen += count
        whole = F(_fold(np.array(sums), len(sums)) / seen)
        for block in self._blocks(x):
            if x.mask[block].all():
                x.root_mean[block] = whole
            floor[block] = F(self.variance_floor) * x.root_mean[block]
        x.denominator = np.maximum(root, floor) + F(self.eps)
        x.compressed = True

    def _width(self, x: Tensor) -> int:
        return x.param.size if self.block_size == "tensor" else min(int(self.block_size), x.param.size)

    def _blocks(self, x: Tensor) -> list[slice]:
        width = self._width(x)
        return [slice(start, min(start + width, x.param.size)) for start in range(0, x.param.size, width or 1)]

    # Compressed

    def _compressed_step(self, x: Tensor, local: list[Array], lr: float) -> None:
        step_size = F(lr / (1 - self.beta1**x.step))
        x.momentum = self._exchange(x, local)
        x.param = x.param * F(1 - lr * self.decoupled)
        moved = x.param - (step_size * x.momentum) / x.denominator
        x.param = np.where(x.mask, x.param, moved)

    def _exchange(self, x: Tensor, local: list[Array]) -> Array:
        """The average of all workers' momenta, 0 where masked."""
        beta1, one_minus_beta1 = F(self.beta1), F((1 - self.beta1) * self.factor)
        c = []
        for g, error in zip(local, x.errors, strict=True):
            m = beta1 * x.momentum + one_minus_beta1 * (g + F(self.coupled / self.factor) * x.param)
            c.append(m + error)
        mbar = np.zeros(x.param.size, F)
        for block in self._blocks(x):
            keep = ~x.mask[block]
            total = np.zeros(keep.size, F)
            for worker in range(self.workers):
                sent, x.errors[worker][block] = compress(c[worker][block], keep, self.scale)
                total = sent if worker == 0 else total + sent
            a = total * F(1 / self.workers) + x.server_error[block]
            mbar[block], x.server_error[block] = compress(a, keep, self.scale)
        return mbar

    # Masked elements

    def _wake(self) -> None:
        for x in self.tensors:
            if not x.compressed:
                continue
            touched = np.zeros(x.param.size, bool)
            for error in x.errors:
                touched |= error != 0
            woken = touched & x.mask
            x.denominator[woken] = x.root_mean[woken] + F(self.eps)
            x.mask = x.mask & ~woken
            self.woken += int(woken.sum())


def compress(c: Array, keep: Array, scale: str) -> tuple[Array, Array]:
    """What is sent of one block, 0 where masked, and what stays behind."""
    count = int(keep.sum())
    if count == 0:
        return np.zeros(c.size, F), c.copy()
    kept = np.where(keep, c, F(0))
    if scale == "l1":
        size = _lane_sum(np.abs(kept)) * F(1 / count)
    else:
        size = np.sqrt(_lane_sum(kept * kept) * F(1 / count))
    sent = np.where(keep, np.where(c >= 0, size, -size), F(0))
    return sent, c - sent


def _lane_sum(values: Array) -> F:
    """Lane k of 32 sums elements k, k + 32, ...; lanes fold by halves."""
    rows = np.zeros((1 + -(-values.size // 32), 32), F)
    rows.reshape(-1)[32 : 32 + values.size] = values
    lanes = np.add.accumulate(rows, axis=0)[-1]  # which adds row by row, where sum() may take another order
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    return lanes[0]


def _fold(values: Array, width: int) -> float:
    """Sum in float64 of ``width`` elements, zeros at the end: the second half is added to the first, and so on."""
    row = np.zeros(max(width, 1))
    row[: values.size] = values
    while row.size > 1:
        half = (row.size + 1) // 2
        second = np.zeros(half)
        second[: row.size - half] = row[half:]
        row = row[:half] + second
    return float(row[0])


def simulate(
    params: Sequence[Array],
    gradients: Callable[[int, int, list[Array]], Sequence[Array | None]] | Sequence[Gradients],
    *,
    ranks: int,
    steps: int,
    **settings: object,
) -> list[list[Array]]:
    """All parameters after each of ``steps`` steps; ``settings`` as for ``Simulation``.

    ``gradients`` is indexed ``[t - 1][rank][tensor]``, or is called with (t, rank, parameters) and returns the
    gradients of one rank.
    """
    simulation = Simulation(params, ranks, **settings)  # type: ignore[arg-type]
    history = []
    for t in range(1, steps + 1):
        if callable(gradients):
            now = simulation.params
            simulation.step([gradients(t, rank, now) for rank in range(ranks)])
        else:
            simulation.step(gradients[t - 1])
        history.append(simulation.params)
    return history
