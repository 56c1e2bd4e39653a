"""Batch normalization over the batches of all ranks, on any device.

Statistics are gathered as count, mean and sum of squared deviations per rank and combined in rank order (Chan et al.,
Updating formulae and a pairwise algorithm for computing sample variances, 1979), so that ranks may have batches of
different sizes and all of them hold the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, functional
from torch.nn.modules.batchnorm import _BatchNorm

from ocomm import operations
from ocomm import session as sessions
from ocomm.api import Sum
from ocomm.errors import InvalidRequestError
from ocomm.operations import ProcessSet, global_process_set
from ocomm_torch.mpi_ops import TORCH, allreduce


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm1d/2d/3d`` whose mean and variance are those of the whole batch, over all ranks.

    The input is (N, C, ...); ranks may have different N, even 0. In evaluation, and with a single rank, it is plain
    batch normalization. All ranks of ``process_set`` run forward and backward equally often: both are collective.
    Gradients of ``weight`` and ``bias`` are this rank's own, as for every layer, and ``DistributedOptimizer`` averages
    them. Second derivatives, as of a gradient penalty, are those of the whole batch, too.

    Args:
        process_set: The ranks that share the statistics. The other arguments are Torch's.

    Raises:
        InvalidRequestError: In ``forward``: the input has fewer than 2 dimensions, or all ranks together have fewer
            than 2 values per channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(cls, module: Module, process_group: Any = None) -> Module:
        """Replaces every BatchNorm layer of a model by one of this class, as ``torch.nn.SyncBatchNorm`` does it.

        Parameters and buffers stay the same objects, so the model may have been loaded and moved to a device. Not
        collective.

        Args:
            module: The model. Its layers are replaced in place.
            process_group: The ranks that share the statistics: a ``ProcessSet``, or a group of torch.distributed that
                has all ranks. None for all ranks.

        Returns:
            The model; a new layer if ``module`` is itself a BatchNorm layer.

        Raises:
            InvalidRequestError: ``process_group`` is a group of torch.distributed that has only some of the ranks.
        """
        return cls._converted(module, _process_set(process_group))

    @classmethod
    def _converted(cls, module: Module, process_set: ProcessSet) -> Module:
        result = module
        if isinstance(module, _BatchNorm):
            layer = result = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_set,
            )
            if module.affine:
                layer.weight = module.weight
                layer.bias = module.bias
            layer.running_mean = module.running_mean
            layer.running_var = module.running_var
            layer.num_batches_tracked = module.num_batches_tracked
            layer.training = module.training
            if hasattr(module, "qconfig"):
                layer.qconfig = module.qconfig
        for name, child in module.named_children():
            result.add_module(name, cls._converted(child, process_set))
        return result

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise InvalidRequestError(f"SyncBatchNorm expects an input of at least 2 dimensions, got {input.dim()}.")

    def forward(self, input: Tensor) -> Tensor:
        """Returns the normalized input, with its dtype and shape. Changes the running statistics in place when
        training.
        """
        self._check_input_dim(input)
        if not self.training and self.track_running_stats:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # then the running statistics are a cumulative average
                factor = 1.0 / float(self.num_batches_tracked)
        running_mean = self.running_mean if self.track_running_stats else None
        running_var = self.running_var if self.track_running_stats else None
        if not self.training or self.process_set.size() == 1:  # also if evaluation uses the batch's statistics
            return functional.batch_norm(
                input, running_mean, running_var, self.weight, self.bias, True, factor, self.eps
            )
        return _Normalize.apply(
            input, self.weight, self.bias, running_mean, running_var, self.eps, factor, self.process_set
        )


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        given: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        eps: float,
        factor: float,
        process_set: ProcessSet,
    ) -> Tensor:
        session = sessions.current()
        wide = _wide(given)
        others = _others(wide)
        numel = wide.numel() // wide.shape[1]
        mean = wide.sum(others) / max(numel, 1)
        deviations = (wide - _spread(mean, wide)).square().sum(others)
        name = f"sync_batch_norm.{session.automatic_name('forward', process_set.number(session))}"
        mine = torch.cat([mean.new_tensor([numel]), mean, deviations]).unsqueeze(0)
        rows = operations.allgather(session, TORCH, [mine], name, process_set, False).wait()[0]
        counts, means, squares = rows[:, :1], rows[:, 1 : 1 + len(mean)], rows[:, 1 + len(mean) :]
        total = float(counts.sum())
        if total <= 1:
            raise InvalidRequestError(
                f"SyncBatchNorm: the batches of all ranks have {total:.0f} values per channel, at least 2 are needed."
            )
        mean = (counts * means).sum(0) / total
        variance = (squares + counts * (means - mean).square()).sum(0) / total
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), factor)
            running_var.lerp_((variance * (total / (total - 1))).to(running_var.dtype), factor)
        invstd = (variance + eps).rsqrt()
        normal = (wide - _spread(mean, wide)) * _spread(invstd, wide)
        ctx.save_for_backward(given, mean, invstd, weight, bias)
        ctx.settings = (session, process_set, total, eps)
        if weight is not None:
            normal = normal * _spread(weight.to(normal.dtype), wide)
        if bias is not None:
            normal = normal + _spread(bias.to(normal.dtype), wide)
        return normal.to(given.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        given, mean, invstd, weight, bias = ctx.saved_tensors
        session, process_set, total, eps = ctx.settings
        wide = _wide(given)
        others = _others(wide)
        if torch.is_grad_enabled():  # for second derivatives, which need the statistics as functions of all batches
            mean = allreduce(wide.sum(others), op=Sum, process_set=process_set) / total
            deviations = (wide - _spread(mean, wide)).square().sum(others)
            invstd = (allreduce(deviations, op=Sum, process_set=process_set) / total + eps).rsqrt()
        normal = (wide - _spread(mean, wide)) * _spread(invstd, wide)
        grad = grads[0].to(normal.dtype)
        grad_bias = grad.sum(others)
        grad_weight = (grad * normal).sum(others)
        name = f"sync_batch_norm.{session.automatic_name('backward', process_set.number(session))}"
        both = torch.cat([grad_bias, grad_weight])
        sums = allreduce(both, name=name, op=Sum, postscale_factor=1.0 / total, process_set=process_set)
        mean_grad, mean_product = sums[: len(grad_bias)], sums[len(grad_bias) :]
        scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
        inner = grad - _spread(mean_grad, grad) - normal * _spread(mean_product, grad)
        grad_input = (inner * _spread(scale, grad)).to(given.dtype)
        return (
            grad_input,
            None if weight is None else grad_weight.to(weight.dtype),
            None if bias is None else grad_bias.to(bias.dtype),
            *(None,) * 5,
        )


def _wide(given: Tensor) -> Tensor:
    """Returns the input in the precision of the statistics."""
    return given if given.dtype == torch.float64 else given.float()


def _others(wide: Tensor) -> list[int]:
    """Returns the dimensions over which statistics are taken: all but that of the channels."""
    return [d for d in range(wide.dim()) if d != 1]


def _process_set(process_group: Any) -> ProcessSet:
    """Returns the process set of what a script gives as a group of torch.distributed."""
    if process_group is None:
        return global_process_set
    if isinstance(process_group, ProcessSet):
        return process_group
    ranks = torch.distributed.get_process_group_ranks(process_group)
    if len(ranks) != global_process_set.size():
        raise InvalidRequestError(
            f"convert_sync_batchnorm: the process group has ranks {ranks}, not all {global_process_set.size()} of the "
            f"job. Pass process_group=hvd.add_process_set({ranks}), which all ranks call."
        )
    return global_process_set


def _spread(per_channel: Tensor, like: Tensor) -> Tensor:
    """Returns a value per channel in a shape that fits (N, C, ...)."""
    return per_channel.reshape(1, -1, *(1,) * (like.dim() - 2))
