"""The 1-bit optimizers once more, written from docs/algorithms.md alone, to try whether the page is enough.

It shares no line with the other simulations of this folder, which stand beside the code. Where it differs from the
optimizers, either the page or the code is wrong. Workers are nodes; in the flat form each has one rank.

A tensor is a table with a row for each block. The rest of a short row counts as masked: it adds nothing to any sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

F = np.float32
Array = np.ndarray
#: For each rank the gradients of all tensors; None is a gradient that is missing.
Gradients = Sequence[Sequence[Array | None]]


class Blocks:
    """How a tensor becomes a table, and back."""

    def __init__(self, shape: tuple[int, ...], block_size: int) -> None:
        self.shape, self.numel = shape, math.prod(shape)
        self.size = min(block_size, self.numel)
        self.rows = -(-self.numel // self.size)
        self.width = -(-self.size // 32) * 32  # whole lanes
        self.exists = self.table(np.ones(shape)) > 0

    def table(self, tensor: Array) -> Array:
        whole = np.zeros(self.rows * self.size, F)
        whole[: self.numel] = tensor.reshape(-1)
        result = np.zeros((self.rows, self.width), F)
        result[:, : self.size] = whole.reshape(self.rows, self.size)
        return result

    def tensor(self, table: Array) -> Array:
        return table[:, : self.size].reshape(-1)[: self.numel].reshape(self.shape).copy()


# -- Averages --------------------------------------------------------------------------------------------------------


def total(parts: Sequence[Array]) -> Array:
    result = parts[0].copy()
    for part in parts[1:]:
        result = result + part
    return result


def worker_gradients(blocks: Blocks, nodes: Sequence[Sequence[int]], grads: Sequence[Array | None]) -> list[Array]:
    """Each node's weighted sum; a missing gradient counts as zero."""
    found = [np.zeros((blocks.rows, blocks.width), F) if g is None else blocks.table(g) for g in grads]
    weight = F(len(nodes) / len(grads))
    return [total([found[rank] for rank in node]) * weight for node in nodes]


def dense_average(workers: Sequence[Array]) -> Array:
    return total(workers) * F(1 / len(workers))


def scales(c: Array, live: Array, kind: str) -> Array:
    """One float32 per row, of its unmasked elements."""
    values = np.where(live, c * c if kind == "rms" else np.abs(c), F(0))
    lanes = np.zeros((len(c), 32), F)
    for start in range(0, c.shape[1], 32):
        lanes = lanes + values[:, start : start + 32]
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half:]
    count = live.sum(axis=1)
    inverse = np.array([1 / m if m else 0.0 for m in count.tolist()]).astype(F)
    mean = lanes[:, 0] * inverse
    return np.sqrt(mean) if kind == "rms" else mean


def sent(c: Array, live: Array, kind: str) -> Array:
    """What the others decode from scale and bits."""
    scale = scales(c, live, kind)[:, None]
    return np.where(live, np.where(c >= 0, scale, -scale), F(0))


class CompressedAllreduce:
    """The errors of one tensor, on all workers and servers."""

    def __init__(self, blocks: Blocks, workers: int, kind: str) -> None:
        self.kind = kind
        self.worker = [np.zeros((blocks.rows, blocks.width), F) for _ in range(workers)]
        self.server = np.zeros((blocks.rows, blocks.width), F)

    def __call__(self, values: Sequence[Array], live: Array) -> Array:
        decoded = []
        for i, x in enumerate(values):
            c = x + self.worker[i]
            decoded.append(sent(c, live, self.kind))
            self.worker[i] = c - decoded[-1]
        a = total(decoded) * F(1 / len(values)) + self.server
        result = sent(a, live, self.kind)
        self.server = a - result
        return result


# -- Variance --------------------------------------------------------------------------------------------------------


def folded(values: Array) -> Array:
    """Sum over the last axis in float64: the second half is added to the first, until one is left."""
    values = values.astype(np.float64)
    while (width := values.shape[-1]) > 1:
        second = values[..., -(-width // 2) :]
        values = values[..., : -(-width // 2)].copy()
        values[..., : second.shape[-1]] += second
    return values[..., 0]


class Denominator:
    """denominator, mask and floor of one tensor."""

    def __init__(self, blocks: Blocks, floor: float, eps: float) -> None:
        self.blocks, self.f, self.eps = blocks, F(floor), F(eps)
        self.live = np.zeros((blocks.rows, blocks.width), bool)
        self.touched = self.live.copy()
        self.value = np.ones((blocks.rows, blocks.width), F)

    def set_variance(self, v: Array, correction: float) -> None:
        """v_hat = v / correction; elements whose v is 0 are masked."""
        self.live = (v != 0) & self.blocks.exists
        self.touched &= ~self.live
        root = np.sqrt(v / F(correction))
        sums, counts = folded(root[:, : self.blocks.size]), self.live.sum(axis=1)
        self.means = (sums / np.maximum(counts, 1)).astype(F)
        self.tensor_mean = F(folded(sums) / max(counts.sum(), 1))
        self.had_live = self.live.any(axis=1)
        self.floor = (self.f * self.means)[:, None] * np.ones_like(v)
        self.value = np.where(self.live, np.maximum(root, self.floor) + self.eps, F(1))

    def masked(self) -> Array:
        return self.blocks.exists & ~self.live

    def touch(self, gradients: Sequence[Array]) -> None:
        for g in gradients:
            self.touched |= self.masked() & (g != 0)

    def wake(self) -> tuple[Array, Array]:
        """Returns which elements wake, and for every element its block's root of the variance."""
        woken, self.touched = self.touched, np.zeros_like(self.touched)
        roots = np.where(self.had_live, self.means, self.tensor_mean)[:, None] * np.ones_like(self.value)
        self.floor = np.where(woken, self.f * roots, self.floor)
        self.value = np.where(woken, np.maximum(roots, self.floor) + self.eps, self.value)
        self.live |= woken
        return woken, roots


# -- 1-bit Adam and LAMB ---------------------------------------------------------------------------------------------


@dataclass
class Settings:
    lr: float = 1e-2
    weight_decay: float = 0.0
    decoupled: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    block_size: int = 64
    scale: str = "rms"
    variance_floor: float = 0.05
    freeze_step: int = 6
    mask_refresh: int = 100
    min_coeff: float = 0.01
    max_coeff: float = 10.0
    coeff_beta: float = 0.9
    factor_min: float = 0.5
    factor_max: float = 4.0
    factor_threshold: float = 0.1
    # 0/1 Adam
    local_step_start: int = 8
    local_step_doubling: int = 10
    local_step_clip: int = 4
    var_update_scaler: int = 4
    var_freeze_step: int | None = None
    # Birder, Lion, SGD
    beta: float = 0.9
    seed: int = 0
    momentum: float = 0.9
    nesterov: bool = False


#: A dense step of the wrapped optimizer, which is not described in the page: tensor's number and averaged gradient to
#: the new parameter, m, v and the number of its steps.
DenseStep = Callable[[int, Array], tuple[Array, Array, Array, int]]


class Tensor:
    """What 1-bit Adam and LAMB keep of a tensor."""

    def __init__(self, param: Array, workers: int, s: Settings) -> None:
        self.blocks = Blocks(param.shape, s.block_size)
        self.p = self.blocks.table(param)
        self.m, self.v = np.zeros_like(self.p), np.zeros_like(self.p)
        self.t = 0
        self.frozen = False
        self.dense_steps = 0  # since its first gradient that was not zero
        self.average = CompressedAllreduce(self.blocks, workers, s.scale)
        self.denominator = Denominator(self.blocks, s.variance_floor, s.eps)
        # LAMB
        self.a, self.k, self.c, self.r = 0.0, 0, None, 1.0  # type: float, int, float | None, float
        self.fresh = np.zeros_like(self.p)


class OneBit:
    """Warm-up, freeze, exchange and mask of 1-bit Adam and LAMB."""

    def __init__(self, params: Sequence[Array], nodes: Sequence[Sequence[int]], s: Settings) -> None:
        self.s, self.nodes, self.t = s, nodes, 0
        self.tensors = [Tensor(p, len(nodes), s) for p in params]

    @property
    def params(self) -> list[Array]:
        return [x.blocks.tensor(x.p) for x in self.tensors]

    def step(self, grads: Gradients) -> None:
        self.t += 1
        for number, x in enumerate(self.tensors):
            local = [g[number] for g in grads]
            if all(g is None for g in local):
                continue
            workers = worker_gradients(x.blocks, self.nodes, local)
            if x.frozen:
                self.compressed_step(x, workers)
            else:
                self.dense(number, x, dense_average(workers))
                x.dense_steps += bool(x.v.any())
        for x in self.tensors:
            due = self.t == self.s.freeze_step or (self.t > self.s.freeze_step and x.dense_steps >= self.s.freeze_step)
            if due and not x.frozen and x.v.any():
                x.frozen = True
                x.denominator.set_variance(x.v, 1 - self.s.betas[1] ** x.t)
                self.freeze(x)
        if self.t > self.s.freeze_step and (self.t - self.s.freeze_step) % self.s.mask_refresh == 0:
            for x in self.tensors:
                if x.frozen:
                    self.woken(x, *x.denominator.wake())

    def exchange(self, x: Tensor, workers: Sequence[Array], coupled: float) -> tuple[Array, Array]:
        """mbar_{t-1} and mbar_t."""
        beta1 = self.s.betas[0]
        x.t += 1
        gradients = [g + F(coupled) * x.p if coupled else g for g in workers]
        x.denominator.touch(gradients)
        previous = x.m
        momenta = [F(beta1) * previous + F(1 - beta1) * g for g in gradients]
        x.m = x.average(momenta, x.denominator.live)
        return previous, x.m

    def dense(self, number: int, x: Tensor, average: Array) -> None:
        raise NotImplementedError

    def compressed_step(self, x: Tensor, workers: Sequence[Array]) -> None:
        raise NotImplementedError

    def freeze(self, x: Tensor) -> None:
        pass

    def woken(self, x: Tensor, which: Array, roots: Array) -> None:
        pass


class OneBitAdam(OneBit):
    def __init__(
        self, params: Sequence[Array], nodes: Sequence[Sequence[int]], s: Settings, dense_step: DenseStep
    ) -> None:
        super().__init__(params, nodes, s)
        self.dense_step = dense_step

    def dense(self, number: int, x: Tensor, average: Array) -> None:
        p, m, v, x.t = self.dense_step(number, x.blocks.tensor(average))
        x.p, x.m, x.v = x.blocks.table(p), x.blocks.table(m), x.blocks.table(v)

    def compressed_step(self, x: Tensor, workers: Sequence[Array]) -> None:
        s = self.s
        _, mbar = self.exchange(x, workers, 0.0 if s.decoupled else s.weight_decay)
        if s.decoupled:
            x.p = x.p * F(1 - s.lr * s.weight_decay)
        x.p = x.p - F(s.lr / (1 - s.betas[0] ** x.t)) * mbar / x.denominator.value


def norm(table: Array) -> float:
    wide = table.astype(np.float64)
    return math.sqrt(float((wide * wide).sum()))


class OneBitLamb(OneBit):
    def ratio(self, x: Tensor, update: Array) -> tuple[float, bool]:
        """The trust ratio, and whether both norms are there."""
        above, below = norm(x.p), norm(update)
        if above == 0 or below == 0:
            return 1.0, False
        return min(max(above / below, self.s.min_coeff), self.s.max_coeff), True

    def dense(self, number: int, x: Tensor, average: Array) -> None:
        s, (beta1, beta2), g = self.s, self.s.betas, average
        x.t += 1
        x.m = F(beta1) * x.m + F(1 - beta1) * g
        x.v = F(beta2) * x.v + F(1 - beta2) * (g * g)
        root = np.sqrt(x.v * F(1 / (1 - beta2**x.t)))
        update = (x.m * F(1 / (1 - beta1**x.t))) / (root + F(s.eps)) + F(s.weight_decay) * x.p
        ratio, both = self.ratio(x, update)
        if both:
            x.a = s.coeff_beta * x.a + (1 - s.coeff_beta) * ratio
            x.k += 1
        x.p = x.p - F(s.lr * ratio) * update

    def freeze(self, x: Tensor) -> None:
        x.fresh = x.v.copy()
        if x.k:
            x.c = x.a / (1 - self.s.coeff_beta**x.k)

    def compressed_step(self, x: Tensor, workers: Sequence[Array]) -> None:
        s, (beta1, beta2), d = self.s, self.s.betas, x.denominator
        previous, mbar = self.exchange(x, workers, 0.0)
        g = (mbar - F(beta1) * previous) * F(1 / (1 - beta1))
        x.fresh = F(beta2) * x.fresh + F(1 - beta2) * (g * g)
        adam = (mbar * F(1 / (1 - beta1**x.t))) / d.value
        update = adam + F(s.weight_decay) * x.p
        root = np.sqrt(x.fresh * F(1 / (1 - beta2**x.t)))
        quotients = d.value / (np.maximum(root, d.floor) + F(s.eps))
        r = float(quotients[d.live].max())
        share = min(1.0, norm(adam) / norm(update)) if norm(update) else 1.0
        r = r * share + 1 - share
        r = min(max(r, s.factor_min), s.factor_max)
        x.r = min(max(r, x.r * (1 - s.factor_threshold)), x.r * (1 + s.factor_threshold))
        if x.c is None:
            x.c, _ = self.ratio(x, update)
        x.p = x.p - F(s.lr * (x.c * x.r)) * update

    def woken(self, x: Tensor, which: Array, roots: Array) -> None:
        x.fresh = np.where(which, roots * roots * F(1 - self.s.betas[1] ** x.t), x.fresh)


# -- 0/1 Adam --------------------------------------------------------------------------------------------------------


class Schedules:
    """T_u and T_v."""

    def __init__(self, s: Settings) -> None:
        self.s, self.last_sync, self.next_refresh, self.refreshes = s, 0, 1, 0

    def interval(self, t: int) -> int:
        s = self.s
        if t <= s.local_step_start:
            return 1
        return int(min(s.local_step_clip, 2 ** ((t - s.local_step_start) // s.local_step_doubling)))

    def take(self, t: int) -> tuple[bool, bool]:
        """Whether step t is a sync, and whether it is a refresh."""
        sync = t - self.last_sync >= self.interval(t)
        if sync:
            self.last_sync = t
        last = self.s.var_freeze_step
        refresh = t == self.next_refresh and (self.interval(t) == 1 if last is None else t <= last)
        if refresh:
            self.next_refresh = t + 2 ** (self.refreshes // self.s.var_update_scaler)
            self.refreshes += 1
        return sync, refresh


class ZeroOneTensor:
    def __init__(self, param: Array, workers: int, s: Settings) -> None:
        self.blocks = Blocks(param.shape, s.block_size)
        zero = np.zeros((self.blocks.rows, self.blocks.width), F)
        self.p_sync = self.blocks.table(param)
        self.p = [self.p_sync] * workers
        self.m, self.u = [zero] * workers, [zero] * workers
        self.v, self.refreshes = zero, 0
        self.L, self.W = 0.0, 1.0
        self.average = CompressedAllreduce(self.blocks, workers, s.scale)
        self.denominator = Denominator(self.blocks, s.variance_floor, s.eps)
        self.seen = False  # whether it has had a gradient
        self.dense_steps: int | None = None  # that are left; None before the first


class ZeroOneAdam:
    def __init__(self, params: Sequence[Array], nodes: Sequence[Sequence[int]], s: Settings) -> None:
        self.s, self.nodes, self.t, self.syncs = s, nodes, 0, 0
        self.schedules = Schedules(s)
        self.tensors = [ZeroOneTensor(p, len(nodes), s) for p in params]

    def params_of(self, worker: int) -> list[Array]:
        return [x.blocks.tensor(x.p[worker]) for x in self.tensors]

    def step(self, grads: Gradients) -> None:
        self.t += 1
        before = self.schedules.refreshes
        sync, refresh = self.schedules.take(self.t)
        self.syncs += sync and self.t > 1
        for number, x in enumerate(self.tensors):
            local = [g[number] for g in grads]
            present = any(g is not None for g in local)
            workers = worker_gradients(x.blocks, self.nodes, local)
            if present and x.dense_steps != 0 and (self.t == 1 or x.seen):
                self.dense_step(x, workers, before)
            elif present and not x.seen:
                self.wait(x, workers)
            elif x.dense_steps == 0 and (present or (sync and x.L)):
                base = x.p_sync
                self.move(x, workers, sync)
                if refresh and present:
                    self.refresh(x, workers, base)
        if sync and self.syncs and self.syncs % self.s.mask_refresh == 0:
            for x in self.tensors:
                if x.dense_steps == 0:
                    which, roots = x.denominator.wake()
                    correction = F(1 - self.s.betas[1] ** x.refreshes)
                    x.v = np.where(which, roots * roots * correction, x.v)

    def decay(self) -> float:
        return self.s.weight_decay if self.s.decoupled else 0.0

    def coupled(self, gradient: Array, p: Array) -> Array:
        if self.s.decoupled or not self.s.weight_decay:
            return gradient
        return gradient + F(self.s.weight_decay) * p

    def refresh(self, x: ZeroOneTensor, workers: Sequence[Array], p: Array) -> None:
        gbar, beta2 = self.coupled(dense_average(workers), p), self.s.betas[1]
        x.v = F(beta2) * x.v + F(1 - beta2) * (gbar * gbar)
        x.refreshes += 1
        x.denominator.set_variance(x.v, 1 - beta2**x.refreshes)

    def dense_step(self, x: ZeroOneTensor, workers: Sequence[Array], refreshes: int) -> None:
        """The first step of all tensors, and those of one that comes late: refresh, then move."""
        s, beta1 = self.s, self.s.betas[0]
        x.seen = True
        gbar = self.coupled(dense_average(workers), x.p_sync)
        if not x.v.any() and not gbar.any():
            self.wait(x, workers)
            return
        self.refresh(x, workers, x.p_sync)
        m = np.where(x.denominator.live, F(beta1) * x.m[0] + F(1 - beta1) * gbar, F(0))
        p = x.p_sync * F(1 - s.lr * self.decay())
        x.p_sync = p - F(s.lr) * (m / x.denominator.value)
        x.p, x.m = [x.p_sync] * len(x.p), [m] * len(x.m)
        x.dense_steps = (max(refreshes, 1) if x.dense_steps is None else x.dense_steps) - 1

    def wait(self, x: ZeroOneTensor, workers: Sequence[Array]) -> None:
        """The step in which a late tensor has its first gradient, which is not sent."""
        s = self.s
        gradients = [self.coupled(g, x.p_sync) for g in workers]
        for i, g in enumerate(gradients):
            x.average.worker[i] = x.average.worker[i] + F(math.sqrt(s.lr)) * (F(1 - s.betas[0]) * g)
        x.p_sync = x.p_sync * F(1 - s.lr * self.decay())
        x.p = [x.p_sync] * len(x.p)
        x.seen = True

    def move(self, x: ZeroOneTensor, workers: Sequence[Array], sync: bool) -> None:
        s, beta1, live = self.s, self.s.betas[0], x.denominator.live
        x.L += s.lr
        x.W *= 1 - s.lr * self.decay()
        gradients = [self.coupled(g, p) for g, p in zip(workers, x.p, strict=True)]
        x.denominator.touch(gradients)
        momenta = [F(beta1) * m + F(1 - beta1) * g for m, g in zip(x.m, gradients, strict=True)]
        if not sync:
            for i, m in enumerate(momenta):
                p = x.p[i] * F(1 - s.lr * self.decay())
                x.p[i] = np.where(live, p - F(s.lr) * (m / x.denominator.value), p)
                x.u[i] = x.u[i] + F(s.lr) * m
                x.m[i] = np.where(live, m, x.m[i])
            return
        q = F(math.sqrt(x.L))
        by_u, by_m = F(1) / q, F(s.lr) / q
        result = x.average([by_u * u + by_m * m for u, m in zip(x.u, momenta, strict=True)], live)
        x.p_sync = x.p_sync * F(x.W) - (q * result) / x.denominator.value
        workers_count = len(x.p)
        x.p, x.m = [x.p_sync] * workers_count, [result / q] * workers_count
        x.u = [np.zeros_like(result)] * workers_count
        x.L, x.W = 0.0, 1.0


# -- Optimizers without a variance -----------------------------------------------------------------------------------


def philox(key: int, index: Array, step: int, stream: int) -> Array:
    """U of these elements."""
    low = np.uint64(0xFFFFFFFF)
    place = (index // 4).astype(np.uint64)
    c = [place & low, place >> np.uint64(32)] + [np.full(len(index), x, np.uint64) for x in (step, stream)]
    k0, k1 = key % 2**32, key // 2**32
    for _ in range(7):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            second & low,
            (first >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            first & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    words = np.choose((index % 4).astype(np.int64), c)
    return (words >> np.uint64(8)).astype(F) * F(2.0**-24)


@dataclass
class SignTensor:
    p: Array
    first: int  # index of its first element among those of all tensors
    m: list[Array] = field(default_factory=list)
    b: list[Array] = field(default_factory=list)
    e: list[Array] = field(default_factory=list)
    server: Array = field(default_factory=lambda: np.zeros(0, F))


class Signs:
    """What Birder and Lion share: no scales, so no blocks."""

    def __init__(self, params: Sequence[Array], nodes: Sequence[Sequence[int]], s: Settings) -> None:
        self.s, self.nodes, self.taken = s, nodes, 0
        self.shapes = [p.shape for p in params]
        self.tensors: list[SignTensor] = []
        first = 0
        for p in params:
            zeros = [[np.zeros(p.size, F) for _ in nodes] for _ in range(3)]
            self.tensors.append(SignTensor(p.reshape(-1).copy(), first, *zeros, np.zeros(p.size, F)))
            first += p.size

    @property
    def params(self) -> list[Array]:
        return [x.p.reshape(shape).copy() for x, shape in zip(self.tensors, self.shapes, strict=True)]

    def step(self, grads: Gradients) -> None:
        for number, x in enumerate(self.tensors):
            local = [g[number] for g in grads]
            if all(g is None for g in local):
                continue
            found = [np.zeros_like(x.p) if g is None else g.reshape(-1) for g in local]
            weight = F(len(self.nodes) / len(grads))
            workers = [total([found[rank] for rank in node]) * weight for node in self.nodes]
            result = self.exchange(x, workers)
            x.p = x.p * F(1 - self.s.lr * self.s.weight_decay) - F(self.s.lr) * result
        self.taken += 1

    def exchange(self, x: SignTensor, workers: Sequence[Array]) -> Array:
        raise NotImplementedError


def quantized(y: Array, u: Array | np.float32) -> Array:
    """Birder's Q."""
    return np.where(u < (y + F(1)) * F(0.5), F(1), F(-1))


class Birder(Signs):
    def exchange(self, x: SignTensor, workers: Sequence[Array]) -> Array:
        beta, rest, n = F(self.s.beta), F(1 - self.s.beta), sum(map(len, self.nodes))
        shares = []
        for i, g in enumerate(workers):
            x.m[i] = beta * x.m[i] + rest * g
            x.b[i] = beta * x.b[i] + rest * np.abs(g)
            y = x.m[i] / (x.b[i] + F(1e-12)) + x.e[i]
            u = quantized(y, F(0.5))
            x.e[i] = y - u
            shares.append(F(len(self.nodes[i]) / n) * u)
        a = total(shares) + x.server
        result = quantized(a, F(0.5))
        x.server = a - result
        return result


class Lion(Signs):
    def exchange(self, x: SignTensor, workers: Sequence[Array]) -> Array:
        beta1, beta2 = self.s.betas
        votes = []
        for i, g in enumerate(workers):
            c = F(beta1) * x.m[i] + F(1 - beta1) * g
            x.m[i] = F(beta2) * x.m[i] + F(1 - beta2) * g
            nothing = F(1 if (i + self.taken) % 2 == 0 else -1)
            votes.append(F(len(self.nodes[i])) * np.where(c == 0, nothing, np.sign(c)))
        index = np.arange(x.first, x.first + len(x.p))
        return quantized(total(votes), philox(self.s.seed, index, self.taken, 0xFFFFFFFF))


class SgdTensor:
    def __init__(self, param: Array, workers: int, block_size: int) -> None:
        self.blocks = Blocks(param.shape, block_size)
        self.p = self.blocks.table(param)
        self.m = [np.zeros_like(self.p) for _ in range(workers)]
        self.average = CompressedAllreduce(self.blocks, workers, "l1")


class EfSgd:
    def __init__(self, params: Sequence[Array], nodes: Sequence[Sequence[int]], s: Settings) -> None:
        self.s, self.nodes = s, nodes
        self.tensors = [SgdTensor(p, len(nodes), s.block_size) for p in params]

    @property
    def params(self) -> list[Array]:
        return [x.blocks.tensor(x.p) for x in self.tensors]

    def step(self, grads: Gradients) -> None:
        mu, s = self.s.momentum, self.s
        for number, x in enumerate(self.tensors):
            local = [g[number] for g in grads]
            if all(g is None for g in local):
                continue
            values = []
            for i, g in enumerate(worker_gradients(x.blocks, self.nodes, local)):
                if s.weight_decay:
                    g = g + F(s.weight_decay) * x.p
                old, x.m[i] = x.m[i], F(mu) * x.m[i] + g
                d = F(mu * mu) * old + F(1 + mu) * g if s.nesterov else x.m[i]
                values.append(F(s.lr) * d)
            x.p = x.p - x.average(values, x.blocks.exists)
