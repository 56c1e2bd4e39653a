"""1-bit LAMB (Li et al., arXiv 2104.06069) as a state machine over flat float32 buffers; no framework or network.

LAMB is Adam whose step of each tensor is scaled by a trust ratio, |p| / |update|. Steps 1..T_w are LAMB's own, made by
``dense_step``. From T_w + 1 on the momentum travels as in 1-bit Adam, whose state this core extends, and

    g'     = (mbar_t - beta1 * mbar_{t-1}) / (1 - beta1)         the averaged gradient as the exchange has left it
    fresh  = beta2 * fresh + (1 - beta2) * g'^2                  v as it would be, from v_{T_w} on; replicated
    adam   = mbar_t / (1 - beta1^t) / denominator                denominator: of the frozen v, with floor and eps
    update = adam + wd * p
    factor = max over elements of denominator / (max(sqrt(fresh_hat), floor) + eps), then bounded
    p      = p - lr * coefficient * factor * update

``coefficient`` is the moving average that the trust ratio had at the freeze: with a frozen v, |update| no longer says
how large a step should be, and ``factor`` says how much larger it would be with v as it is now.

Memory per parameter, besides that of 1-bit Adam: ``fresh`` 4 B; and 8 B per element of the largest tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocomm.compression.layout import Layout
from ocomm.errors import SettingsError
from ocomm.kernels.base import Bytes, Floats, Kernels, aligned_zeros
from ocomm.optim.core import address, flat_floats
from ocomm.optim.onebit_adam import MomentumSegment, OneBitAdam

#: Elements that are worked on at a time: few enough to stay in a core's cache from one operation to the next.
_CHUNK = 16384


class Lamb(OneBitAdam):
    """See ``OneBitAdam``, also for the options that are not here.

    ``min_coeff`` and ``max_coeff`` bound the trust ratio, ``coeff_beta`` in [0, 1) is of its moving average. The factor
    begins at 1, is in [``factor_min``, ``factor_max``], and changes in one step by at most ``factor_threshold`` of
    itself, in [0, 1). Raises SettingsError for other values.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        kernels: Kernels,
        *,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(layout, rank, kernels, **options)
        if not 0.0 < min_coeff <= max_coeff < math.inf:
            raise SettingsError(f"need 0 < min_coeff <= max_coeff, got {min_coeff} and {max_coeff}")
        if not 0.0 < factor_min <= 1.0 <= factor_max < math.inf:
            raise SettingsError(f"need 0 < factor_min <= 1 <= factor_max, got {factor_min} and {factor_max}")
        for name, value in (("coeff_beta", coeff_beta), ("factor_threshold", factor_threshold)):
            if not 0.0 <= value < 1.0:
                raise SettingsError(f"{name} must be in [0, 1), got {value}")
        self.max_coeff, self.min_coeff, self.coeff_beta = max_coeff, min_coeff, coeff_beta
        self.factor_max, self.factor_min, self.factor_threshold = factor_max, factor_min, factor_threshold
        count = len(layout.tensors)
        # Hyperparameters of the next step, by tensor.
        self._lr, self._beta1, self._beta2, self._eps, self._decay = np.zeros((5, count))
        #: Moving average of the trust ratio in the warm-up, from 0 on, and of how many it is.
        self.trust_average = np.zeros(count)
        self.trust_count = np.zeros(count, np.int64)
        #: The trust ratio at the freeze, 0 where it is not known yet.
        self.coefficient = np.zeros(count)
        #: Of the last compressed step.
        self.factor = np.ones(count)
        #: By what lr was multiplied in the last step.
        self.trust_ratio = np.ones(count)
        #: Flat: v with the rebuilt gradients.
        self.fresh = np.zeros(0, np.float32)
        self._scratch = np.zeros((2, 0), np.float32)

    def allocate(self) -> None:
        super().allocate()
        if not self.fresh.size:
            self.fresh = aligned_zeros(self.layout.flat_numel)

    def _workspace(self, numel: int) -> tuple[Floats, Floats]:
        """Two arrays for a tensor's step, which are free after it."""
        if self._scratch.shape[1] < numel:
            self._scratch = np.zeros((2, int(self.layout.numels.max())), np.float32)
        return self._scratch[0, :numel], self._scratch[1, :numel]

    # Hyperparameters

    def set_hyper(
        self,
        tensors: Sequence[int] | NDArray[np.integer],
        *,
        lr: float,
        beta1: float,
        coupled_decay: float = 0.0,
        decoupled_decay: float = 0.0,
        beta2: float = 0.999,
        eps: float = 1e-8,
    ) -> None:
        """Sets the next step's hyperparameters of a parameter group, in float64. Any decay is LAMB's, of the update;
        ``eps`` counts up to the freeze."""
        super().set_hyper(tensors, lr=lr, beta1=beta1)
        index = np.asarray(tensors, np.int64)
        for values, value in (
            (self._lr, lr),
            (self._beta1, beta1),
            (self._beta2, beta2),
            (self._eps, eps),
            (self._decay, coupled_decay + decoupled_decay),
        ):
            values[index] = value

    # The warm-up

    def dense_step(self, tensor: int, gradient: Floats, momentum: Floats, variance: Floats, step: int) -> None:
        """LAMB's step ``step``, counted from 1, of a tensor in warm-up: m, v and the parameter move in place.

        ``gradient`` is the averaged one, all are ``numel`` float32. Each line of

            m = beta1 * m + (1 - beta1) * g;   v = beta2 * v + (1 - beta2) * (g * g)
            update = m * (1 / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + wd * p
            p = p - (lr * ratio) * update,     ratio = |p| / |update| within bounds, 1 where one of them is 0

        is float32 operations in this order, with factors that are float64 rounded once; norms are float64.
        """
        param, update = self._param(tensor), self._workspace(gradient.size)[0]
        work = np.empty(min(_CHUNK, gradient.size), np.float32)
        beta1, beta2 = float(self._beta1[tensor]), float(self._beta2[tensor])
        with np.errstate(all="ignore"):  # what overflows is found at the freeze
            for at in _chunks(gradient.size):
                g, m, v, u = gradient[at], momentum[at], variance[at], update[at]
                w = work[: g.size]
                m *= np.float32(beta1)
                np.multiply(g, np.float32(1.0 - beta1), out=w)
                m += w
                v *= np.float32(beta2)
                np.multiply(g, g, out=w)
                w *= np.float32(1.0 - beta2)
                v += w
                np.divide(v, np.float32(1.0 - beta2**step), out=w)
                np.sqrt(w, out=w)
                w += np.float32(self._eps[tensor])
                np.multiply(m, np.float32(1.0 / (1.0 - beta1**step)), out=u)
                u /= w
            self._add_decay(tensor, param, update)
            ratio = self._ratio(param, update)
            if ratio is not None:
                self.trust_average[tensor] = (
                    self.coeff_beta * self.trust_average[tensor] + (1.0 - self.coeff_beta) * ratio
                )
                self.trust_count[tensor] += 1
            self._descend(tensor, param, update, 1.0 if ratio is None else ratio)

    def _add_decay(self, tensor: int, param: Floats, update: Floats) -> None:
        decay = np.float32(self._decay[tensor])
        if decay:
            for at in _chunks(param.size):
                update[at] += decay * param[at]

    def _descend(self, tensor: int, param: Floats, update: Floats, ratio: float) -> None:
        """p = p - (lr * ratio) * update."""
        self.trust_ratio[tensor] = ratio
        size = np.float32(float(self._lr[tensor]) * ratio)
        for at in _chunks(param.size):
            param[at] -= size * update[at]

    def _ratio(self, param: Floats, update: Floats) -> float | None:
        """|p| / |update| within bounds; None where one of them is 0."""
        of_param, of_update = self._norms(param, update)
        if not of_param or not of_update:
            return None
        return min(max(of_param / of_update, self.min_coeff), self.max_coeff)

    def _norms(self, *arrays: Floats) -> list[float]:
        """In float64, summed in one order whatever is fused with whatever."""
        addresses = np.array([address(array) for array in arrays], np.uint64)
        squares = self.kernels.squares(addresses, np.array([array.size for array in arrays], np.int64))
        return [math.sqrt(total) for total in squares.tolist()]

    # Freezing

    def freeze(self, tensor: int, momentum: Floats, variance: Floats, *, step: int, beta2: float, eps: float) -> bool:
        """See ``OneBitAdam.freeze``. A tensor that has taken no dense step with a trust ratio, as after a warm start,
        takes the ratio of its first compressed step for good."""
        if not super().freeze(tensor, momentum, variance, step=step, beta2=beta2, eps=eps):
            return False
        self.fresh[self.flat_span(tensor)] = variance.reshape(-1)
        count = int(self.trust_count[tensor])
        self.coefficient[tensor] = self.trust_average[tensor] / (1.0 - self.coeff_beta**count) if count else 0.0
        return True

    # One step

    def _move(self, tensors: Sequence[int]) -> None:
        for tensor in tensors:
            if self.layout.numels[tensor]:
                with np.errstate(all="ignore"):
                    self._move_tensor(tensor)

    def _move_tensor(self, tensor: int) -> None:
        param = self._param(tensor)
        update, rebuilt = self._workspace(param.size)
        for segment in self.segments_of(tensor):
            assert isinstance(segment, MomentumSegment) and segment.previous is not None
            self.unpack(tensor, segment.layout, segment.previous, update)
            if tensor not in self._dense:
                assert segment.result is not None, "a tensor without momentum"
                self.unpack(tensor, segment.layout, segment.result, rebuilt)
        if tensor in self._dense:
            rebuilt[:] = self._dense[tensor]
        factor = self._refresh(tensor, update, rebuilt)
        if self._decay[tensor]:
            (of_adam,) = self._norms(update)
            self._add_decay(tensor, param, update)
            (whole,) = self._norms(update)
            share = min(1.0, of_adam / whole) if whole else 1.0
            factor = factor * share + (1.0 - share)
        factor = min(max(factor, self.factor_min), self.factor_max)
        last, change = float(self.factor[tensor]), self.factor_threshold
        factor = min(max(factor, last * (1.0 - change)), last * (1.0 + change))
        if not self.coefficient[tensor]:
            ratio = self._ratio(param, update)
            self.coefficient[tensor] = 1.0 if ratio is None else ratio
        self.factor[tensor] = factor
        self._descend(tensor, param, update, float(self.coefficient[tensor]) * factor)

    def _refresh(self, tensor: int, momentum: Floats, rebuilt: Floats) -> float:
        """Brings ``fresh`` up to date, and returns the unbounded factor.

        ``momentum`` is mbar_t, and becomes Adam's update; ``rebuilt`` is mbar_{t-1}, and is spent.
        """
        beta1, beta2 = float(self._beta1[tensor]), float(self._beta2[tensor])
        step = int(self.steps[tensor])
        span = self.flat_span(tensor)
        all_fresh, divisor = self.fresh[span], self.preconditioner.denominator[span]
        masked = self.preconditioner.masked_elements(tensor) if self.preconditioner.masked[tensor] else None
        factor = 0.0
        for at in _chunks(momentum.size):
            m, g, fresh, denominator = momentum[at], rebuilt[at], all_fresh[at], divisor[at]
            g *= np.float32(beta1)
            np.subtract(m, g, out=g)
            g /= np.float32(1.0 - beta1)
            g *= g
            g *= np.float32(1.0 - beta2)
            fresh *= np.float32(beta2)
            fresh += g
            m *= np.float32(1.0 / (1.0 - beta1**step))
            m /= denominator
            np.divide(fresh, np.float32(1.0 - beta2**step), out=g)
            np.sqrt(g, out=g)
            np.maximum(g, self.preconditioner.floors(tensor, at), out=g)
            g += self.preconditioner.eps[tensor]
            np.divide(denominator, g, out=g)
            if masked is not None:
                g[masked[at]] = 0.0
            factor = max(factor, float(g.max()))
        return factor

    def wake(self, touched: Bytes) -> int:
        """See ``OneBitAdam.wake``; what wakes has the fresh variance of its block at the freeze."""
        waking = self.preconditioner.touched_tensors(touched)
        before = {tensor: self.preconditioner.masked_elements(tensor) for tensor in waking}
        woken = super().wake(touched)
        for tensor, masked in before.items():
            new = np.flatnonzero(masked & ~self.preconditioner.masked_elements(tensor))
            root = self.preconditioner.roots(tensor)[new]
            correction = np.float32(1.0 - float(self._beta2[tensor]) ** int(self.steps[tensor]))
            self.fresh[self.flat_span(tensor)][new] = root * root * correction
        return woken

    # State

    def state(self) -> dict[str, Any]:
        """Also the trust ratios, and ``fresh`` (float32, numel) of each compressed tensor."""
        state = super().state()
        numbers = {spec.name: number for number, spec in enumerate(self.layout.tensors)}
        for name, entry in state["tensors"].items():
            entry["fresh"] = self.fresh[self.flat_span(numbers[name])].copy()
        return {**state, "trust": {name: values.tolist() for name, values in self._trust().items()}}

    def _trust(self) -> dict[str, NDArray[Any]]:
        return {
            "average": self.trust_average,
            "count": self.trust_count,
            "coefficient": self.coefficient,
            "factor": self.factor,
            "ratio": self.trust_ratio,
        }

    def load_state(self, state: Mapping[str, Any], momentum: Callable[[int], Floats] | None = None) -> None:
        numbers = {spec.name: number for number, spec in enumerate(self.layout.tensors)}
        fresh = {
            numbers[name]: flat_floats(entry["fresh"], int(self.layout.numels[numbers[name]]), f"fresh of {name!r}")
            for name, entry in state.get("tensors", {}).items()
        }
        super().load_state(state, momentum)
        for name, values in self._trust().items():
            values[:] = state["trust"][name]
        for tensor, values in fresh.items():
            self.fresh[self.flat_span(tensor)] = values

    def memory(self) -> dict[str, int]:
        return {**super().memory(), "fresh_variance": self.fresh.nbytes, "scratch": self._scratch.nbytes}

    def _param(self, tensor: int) -> Floats:
        """The parameter behind its address: a flat view."""
        return self.home.at(int(self.tensors["param"][tensor]), int(self.layout.numels[tensor]))


def _chunks(numel: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, numel)) for start in range(0, numel, _CHUNK))
