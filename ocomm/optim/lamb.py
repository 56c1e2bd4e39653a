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

Memory per parameter, besides that of 1-bit Adam: ``fresh`` 4 B; and 4 B per element of the largest tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ocomm.compression.layout import Layout
from ocomm.errors import SettingsError
from ocomm.kernels.base import Bytes, Floats, Kernels, Table, aligned_zeros
from ocomm.optim.core import Bools, Group, address, flat_floats
from ocomm.optim.onebit_adam import MomentumSegment, OneBitAdam, OneBitAdamOptions
from ocomm.optim.options import option


class _Part(NamedTuple):
    """Blocks of one tensor in one segment, and their numbers in the layout."""

    segment: MomentumSegment
    blocks: Table
    numbers: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LambOptions(OneBitAdamOptions):
    """The options of 1-bit LAMB. Raises SettingsError for impossible values."""

    max_coeff: float = option(10.0, "The upper bound of the trust ratio.")
    min_coeff: float = option(0.01, "The lower bound of the trust ratio, above 0.")
    coeff_beta: float = option(
        0.9,
        """The factor, in [0, 1), of the trust ratio's moving average, whose value at the freeze the 1-bit steps use.
        The warm-up should have more than 1 / (1 - coeff_beta) steps.""",
    )
    factor_max: float = option(
        4.0, "The upper bound, at least 1, of the factor that multiplies the trust ratio and follows the variance."
    )
    factor_min: float = option(0.5, "The lower bound of that factor, in (0, 1].")
    factor_threshold: float = option(
        0.1, "The fraction of itself, in [0, 1), by which that factor changes in one step at most."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.min_coeff <= self.max_coeff < math.inf:
            raise SettingsError(f"need 0 < min_coeff <= max_coeff, got {self.min_coeff} and {self.max_coeff}")
        if not 0.0 < self.factor_min <= 1.0 <= self.factor_max < math.inf:
            raise SettingsError(f"need 0 < factor_min <= 1 <= factor_max, got {self.factor_min} and {self.factor_max}")
        for name in ("coeff_beta", "factor_threshold"):
            if not 0.0 <= (value := getattr(self, name)) < 1.0:
                raise SettingsError(f"{name} must be in [0, 1), got {value}")


class Lamb(OneBitAdam):
    """1-bit LAMB for the tensors of ``layout``, on rank ``rank`` of ``layout.ranks``."""

    kind = "OneBitLamb"
    options_class = LambOptions
    fixed_options: ClassVar = {"shard_state": False}
    dense_steps_of = "LAMB"
    options: LambOptions

    def __init__(self, layout: Layout, rank: int, kernels: Kernels, options: LambOptions) -> None:
        super().__init__(layout, rank, kernels, options)
        self.kernels: Kernels = kernels
        count = len(layout.tensors)
        # Hyperparameters of the next step, by tensor.
        self._lr, self._beta1, self._beta2, self._eps, self._decay = np.zeros((5, count))
        #: Moving average of the trust ratio in the warm-up, which starts at 0, and the number of ratios in it.
        self.trust_average = np.zeros(count)
        self.trust_count = np.zeros(count, np.int64)
        #: The trust ratio at the freeze, 0 if it is not known yet.
        self.coefficient = np.zeros(count)
        #: The factor of the last compressed step.
        self.factor = np.ones(count)
        #: The ratio by which lr was multiplied in the last step.
        self.trust_ratio = np.ones(count)
        #: v with the rebuilt gradients, flat.
        self.fresh = np.zeros(0, np.float32)
        self._scratch = np.zeros(0, np.float32)
        #: The parts of each tensor, until its segments change.
        self._parts: dict[int, list[_Part]] = {}

    def allocate(self) -> None:
        super().allocate()
        if not self.fresh.size:
            self.fresh = aligned_zeros(self.layout.flat_numel)

    def _workspace(self, numel: int) -> Floats:
        """Returns an array for a tensor's update, which is free again after its step."""
        if self._scratch.size < numel:
            self._scratch = aligned_zeros(int(self.layout.numels.max()))
        return self._scratch[:numel]

    # Hyperparameters

    def set_hyper(self, group: Group) -> None:
        """Sets a group's hyperparameters. All decay is LAMB's, part of the update; ``eps`` is used up to the freeze."""
        super().set_hyper(replace(group, coupled_decay=0.0, decoupled_decay=0.0))
        for values, value in (
            (self._lr, group.lr),
            (self._beta1, group.betas[0]),
            (self._beta2, group.betas[1]),
            (self._eps, group.eps),
            (self._decay, group.coupled_decay + group.decoupled_decay),
        ):
            values[group.tensors] = value

    # The warm-up

    def dense_step(self, tensor: int, gradient: Floats, momentum: Floats, variance: Floats, step: int) -> None:
        """Makes LAMB's step ``step``, counted from 1, of a tensor in warm-up; changes m, v and the parameter in place.

        ``gradient`` is the averaged one; all arrays are ``numel`` float32. Each line of

            m = beta1 * m + (1 - beta1) * g;   v = beta2 * v + (1 - beta2) * (g * g)
            update = m * (1 / (1 - beta1^t)) / (sqrt(v * (1 / (1 - beta2^t))) + eps) + wd * p
            p = p - (lr * ratio) * update,     ratio = |p| / |update| within bounds, 1 if one of them is 0

        is float32 operations in this order, with factors that are float64 rounded once; norms are float64.
        """
        param, update = self.param(tensor), self._workspace(gradient.size)
        beta1, beta2, eps = (float(values[tensor]) for values in (self._beta1, self._beta2, self._eps))
        self.kernels.adam_update(gradient, momentum, variance, update, beta1, beta2, eps, step)
        if self._decay[tensor]:
            self.kernels.axpy(update, param, float(self._decay[tensor]))
        ratio = self._ratio(param, update)
        if ratio is not None:
            self.trust_average[tensor] = (
                self.options.coeff_beta * self.trust_average[tensor] + (1.0 - self.options.coeff_beta) * ratio
            )
            self.trust_count[tensor] += 1
        self._descend(tensor, param, update, 1.0 if ratio is None else ratio)

    def _descend(self, tensor: int, param: Floats, update: Floats, ratio: float) -> None:
        """Updates p = p - (lr * ratio) * update."""
        self.trust_ratio[tensor] = ratio
        self.kernels.axpy(param, update, -(float(self._lr[tensor]) * ratio))

    def _ratio(self, param: Floats, update: Floats) -> float | None:
        """Returns |p| / |update| within bounds; None if one of them is 0."""
        of_param, of_update = self._norm(param), self._norm(update)
        if not of_param or not of_update:
            return None
        return min(max(of_param / of_update, self.options.min_coeff), self.options.max_coeff)

    def _norm(self, array: Floats) -> float:
        """Returns the norm in float64, summed in an order that does not depend on fusion."""
        squares = self.kernels.squares(np.array([address(array)], np.uint64), np.array([array.size], np.int64))
        return math.sqrt(squares[0])

    # Freezing

    def freeze(self, tensor: int, momentum: Floats, variance: Floats, *, step: int, beta2: float, eps: float) -> bool:
        """Ends the warm-up of a tensor, as ``OneBitAdam.freeze`` does.

        A tensor that has taken no dense step with a trust ratio, as after a warm start, keeps the ratio of its first
        compressed step.
        """
        if not super().freeze(tensor, momentum, variance, step=step, beta2=beta2, eps=eps):
            return False
        self.fresh[self.flat_span(tensor)] = variance.reshape(-1)
        count = int(self.trust_count[tensor])
        self.coefficient[tensor] = self.trust_average[tensor] / (1.0 - self.options.coeff_beta**count) if count else 0.0
        return True

    # One step

    def _move(self, moved: Bools) -> None:
        for tensor in np.flatnonzero(moved).tolist():
            if self.layout.numels[tensor]:
                self._move_tensor(tensor)

    def _move_tensor(self, tensor: int) -> None:
        param = self.param(tensor)
        update = self._workspace(param.size)
        factor = max(self._update(tensor, part, update) for part in self._parts_of(tensor))
        decay = float(self._decay[tensor])
        if decay:
            of_adam = self._norm(update)
            self.kernels.axpy(update, param, decay)
            whole = self._norm(update)
            share = min(1.0, of_adam / whole) if whole else 1.0
            factor = factor * share + (1.0 - share)
        factor = min(max(factor, self.options.factor_min), self.options.factor_max)
        last, change = float(self.factor[tensor]), self.options.factor_threshold
        factor = min(max(factor, last * (1.0 - change)), last * (1.0 + change))
        if not self.coefficient[tensor]:
            ratio = self._ratio(param, update)
            self.coefficient[tensor] = 1.0 if ratio is None else ratio
        self.factor[tensor] = factor
        self._descend(tensor, param, update, float(self.coefficient[tensor]) * factor)

    def _update(self, tensor: int, part: _Part, update: Floats) -> float:
        """Updates ``fresh`` and computes Adam's update of a part of a tensor; returns the unbounded factor."""
        segment, preconditioner = part.segment, self.preconditioner
        assert segment.previous is not None
        dense = self._dense.get(tensor)
        assert dense is not None or segment.result is not None, "a tensor without momentum"
        largest = np.zeros(part.blocks.size, np.float32)
        self.kernels.lamb_update(
            part.blocks,
            segment.previous,
            segment.result if dense is None else None,
            dense,
            preconditioner.mask_of([tensor]),
            preconditioner.floors(part.numbers),
            preconditioner.denominator,
            self.fresh,
            update,
            largest,
            float(self._beta1[tensor]),
            float(self._beta2[tensor]),
            float(preconditioner.eps[tensor]),
            int(self.steps[tensor]),
        )
        return float(largest.max(initial=0.0))

    def _parts_of(self, tensor: int) -> list[_Part]:
        """Returns the parts of a tensor in the segments in which it travels."""
        if tensor not in self._parts:
            starts = self.layout.tensor_blocks(tensor)["start"]
            found = []
            for segment in self.segments_of(tensor):
                blocks = segment.layout.blocks[segment.layout.blocks["tensor"] == tensor]
                numbers = self.layout.first_block[tensor] + np.searchsorted(starts, blocks["start"])
                found.append(_Part(segment, blocks, numbers))
            self._parts[tensor] = found
        return self._parts[tensor]

    def set_buckets(self, buckets: Sequence[Sequence[int]], segment_nbytes: int) -> None:
        self._parts.clear()
        super().set_buckets(buckets, segment_nbytes)

    def wake(self, touched: Bytes) -> int:
        """Unmasks elements, as ``OneBitAdam.wake`` does. They get the fresh variance that their block had at the
        freeze.
        """
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

    def report(self) -> dict[str, Any]:
        """Also returns, by tensor, ``trust_ratios``, by which the last step multiplied lr, and ``factors``, the part of
        them that follows the variance since the freeze.
        """
        names = [spec.name for spec in self.layout.tensors]
        return {
            **super().report(),
            "trust_ratios": dict(zip(names, self.trust_ratio.tolist(), strict=True)),
            "factors": dict(zip(names, self.factor.tolist(), strict=True)),
        }

    def state(self) -> dict[str, Any]:
        """Also returns the trust ratios, and ``fresh`` (float32, numel) of each compressed tensor."""
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
