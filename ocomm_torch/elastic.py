"""``hvd.elastic`` for Torch: models, optimizers and samplers that can be committed, restored and synchronized."""

from __future__ import annotations

import io
import random
from collections.abc import Hashable, Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from ocomm import api
from ocomm.elastic import ObjectState, Part, State, plain, run
from ocomm.elastic.state import copied
from ocomm.errors import CheckpointError
from ocomm.operations import ProcessSet, global_process_set
from ocomm.training.resume import Source, one_state
from ocomm_torch.functions import broadcast_optimizer_state, broadcast_parameters
from ocomm_torch.optimizers.checkpoint import to_numpy
from ocomm_torch.optimizers.rank_states import HasRankState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


class ElasticSampler(Sampler[int]):
    """Shares out a dataset to the ranks, without the samples that have been processed in this epoch.

    Call ``set_epoch`` before an epoch and ``record_batch`` after a step. After a failure the rest of the epoch is
    shared out again; on as many ranks as before, in the same order. The first indices of the epoch are repeated so that
    all ranks get equally many.

    Args:
        dataset: A dataset with a length.
        shuffle: Whether an epoch's order is random.
        seed: Seed of that order, the same on all ranks.
    """

    #: The ranks that share the dataset; in a ``TorchState`` those of the state.
    process_set: ProcessSet = global_process_set

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self._news: list[int] = []  # those of them that the other ranks do not know
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, in which nothing is processed yet, with another order."""
        self.epoch = epoch
        self.processed_indices = set()
        self._news = []
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Notes that this rank has processed its batch of this number."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Notes that these samples have been processed."""
        done = list(indices)
        self.processed_indices.update(done)
        self._news += done

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Returns the samples of this rank's batch of this number, in the order of the last iteration."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def share(self) -> None:
        """Exchanges with all ranks which samples have been processed. Collective."""
        news = np.array(self._news, np.int64)
        self._news = []
        self.processed_indices.update(api.allgather(news, process_set=self.process_set).tolist())

    def sync(self) -> None:
        """Takes the first rank's epoch and what any rank has processed in it, and shares out the rest. Collective."""
        states = api.allgather_object(self.state_dict(), process_set=self.process_set)
        done = [state["processed_indices"] for state in states if state["epoch"] == states[0]["epoch"]]
        self.load_state_dict({"epoch": states[0]["epoch"], "processed_indices": set().union(*done)})

    def reset(self) -> None:
        """Shares out the remaining samples to the current ranks."""
        self.num_replicas = self.process_set.size()
        self.rank = self.process_set.rank()
        self.remaining_indices = [i for i in range(len(self.dataset)) if i not in self.processed_indices]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and the samples processed in it."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads an epoch and the samples processed in it, and shares out the rest."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self._news = []
        self.reset()

    def __iter__(self) -> Iterator[int]:
        everything = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(everything)
        order = [i for i in everything if i not in self.processed_indices]
        total = self.num_samples * self.num_replicas
        order += [everything[i % len(everything)] for i in range(total - len(order))]
        self.indices = order[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


class TensorCodec(plain.Codec):
    """Writes tensors as their bytes, and other objects as ``torch.save`` does. Tensors come back on the CPU."""

    def key(self, leaf: Any) -> Hashable:
        """Returns a key that is equal for tied parameters, which are several tensors of the same memory."""
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided and leaf.numel():
            place = leaf.device, leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()
            return *place, leaf.is_conj(), leaf.is_neg(), leaf.requires_grad
        return id(leaf)

    def describe(self, leaf: Any) -> tuple[Any, np.ndarray] | None:
        """Returns the dtype, the shape in the order of memory, and that order, of a dense tensor; None for other
        values.
        """
        if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_quantized:
            return None
        if leaf.requires_grad or leaf.is_conj() or leaf.is_neg():
            return None
        order = sorted(range(leaf.ndim), key=lambda dim: -leaf.stride(dim))
        data = leaf.cpu().permute(order).contiguous()
        # Not a reshape, after which a single element may keep the stride 0 of an expanded tensor.
        flat = data.as_strided((data.numel(),), (1,)).view(torch.uint8).numpy()
        return [str(leaf.dtype).removeprefix("torch."), list(data.shape), order], flat

    def rebuild(self, description: Any, data: np.ndarray) -> torch.Tensor:
        """Returns the tensor, in ``data``."""
        name, shape, order = description
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a tensor has dtype {name!r}, which this version of Torch does not know")
        back = [order.index(dim) for dim in range(len(order))]
        flat = torch.from_numpy(data).view(dtype) if data.size else torch.empty(0, dtype=dtype, device="cpu")
        return flat.reshape(shape).permute(back)

    def pickle(self, leaf: Any) -> bytes:
        """Returns the bytes that ``torch.save`` writes."""
        file = io.BytesIO()
        torch.save(leaf, file)
        return file.getvalue()

    def unpickle(self, data: bytes) -> Any:
        """Returns what ``torch.load`` reads, which runs the code that the bytes name."""
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


class TorchState(ObjectState):
    """Everything that training continues from: ``TorchState(model, optimizer, epoch=0, batch=0, sampler=sampler)``.

    Modules, optimizers (plain, ``DistributedOptimizer`` or 1-bit), ElasticSamplers and other objects with
    ``state_dict`` and ``load_state_dict`` (LR schedulers, a GradScaler) are restored in place; other values are
    attributes that are copied. The state of Torch's random number generator of the CPU is restored, too. Gradients are
    not kept: those of restored parameters become None.

    Args:
        model: A module, or None.
        optimizer: An optimizer, or None.
        process_set: The ranks that train together; None for those of the optimizer.
        **kwargs: Further objects and values, by attribute name.
    """

    codec = TensorCodec()

    def __init__(
        self, model: Any = None, optimizer: Any = None, *, process_set: ProcessSet | None = None, **kwargs: Any
    ) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        values = {name: value for name, value in values.items() if value is not None}
        if process_set is None:
            process_set = next(filter(None, map(_set_of, values.values())), global_process_set)
        for value in values.values():
            if isinstance(value, ElasticSampler) and value.process_set is not process_set:
                value.process_set = process_set
                value.reset()
        super().__init__(process_set, **values)

    def save(self) -> None:
        """Keeps copies of all values in this process's memory."""
        onebit = set(self._onebit)  # what these return is a copy already
        values = self.replicated().items()
        self.saved = {n: v if n in onebit else copied(n, v) for n, v in values}, self.own()

    def replicated(self) -> dict[str, Any]:
        """Returns the states of objects that have one, and the other values."""
        values = {name: getattr(self, name) for name in self._names}
        return {name: value.state_dict() if _has_state(value) else value for name, value in values.items()}

    def load_replicated(self, value: dict[str, Any]) -> None:
        """Loads the result of ``replicated``; modules, optimizers and samplers are changed in place, and gradients
        dropped, which are those of a step that was given up.
        """
        # 1-bit optimizers compare their state with the parameters, which are therefore loaded first.
        for name in sorted(value, key=lambda name: isinstance(getattr(self, name), torch.optim.Optimizer)):
            target = getattr(self, name)
            if isinstance(target, HasRankState):
                target.reconnect(keep=False)
            if _has_state(target):
                target.load_state_dict(value[name])
            else:
                setattr(self, name, value[name])
        for name in value:
            for parameter in _parameters(getattr(self, name)):
                parameter.grad = None

    def own(self) -> dict[str, Any]:
        """Returns the rank states of 1-bit optimizers, and the state of the random number generator."""
        states = {name: getattr(self, name).rank_state_dict() for name in self._onebit}
        return {"optimizers": states, "random": torch.get_rng_state()}

    def load_own(self, part: Part) -> None:
        """Loads results of ``own``. Errors of ranks that are lost start at zero; ``resumed`` reports what was done, by
        optimizer.
        """
        for name in self._onebit:

            def read(rank: int, name: str = name) -> Any:
                found = part.read(rank)
                if found is None:
                    return None
                if name not in found["optimizers"]:
                    raise CheckpointError(f"{name!r} was an optimizer without errors or local moments")
                return to_numpy(found["optimizers"][name])

            if part.alone:
                source = one_state(read(part.rank))
            else:
                source = Source(read, part.ranks, lambda rank: f"the part of rank {rank} of the commit", partial=True)
            part.reports[name] = getattr(self, name).load_rank_state_dict(source)
        if part.own is not None:
            torch.set_rng_state(part.own["random"])

    def share(self) -> None:
        """Exchanges what the ranks' samplers have processed. Collective."""
        for value in self._samplers:
            value.share()

    def sync(self) -> None:
        """Replaces values by the first rank's, merges what any rank's samplers have processed, and saves.
        Collective.
        """
        first = self.process_set.ranks[0]
        plain: dict[str, Any] = {}
        # Between syncs of an optimizer that steps locally each rank has parameters of its own. A rank whose last step
        # changed nothing, because its gradients were not finite, may still have those of the sync.
        apart = [name for name in self._onebit if not getattr(self, name).compression_report().get("synced", True)]
        anywhere = set().union(*api.allgather_object(apart, "elastic.apart", self.process_set))
        local = {name: getattr(self, name).rank_state_dict() for name in self._onebit if name in anywhere}
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), first, self.process_set)
            elif isinstance(value, ElasticSampler):
                value.sync()
            elif not isinstance(value, torch.optim.Optimizer):
                plain[name] = value.state_dict() if _has_state(value) else value
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, HasRankState):
                self._sync_onebit(value, local.get(name))
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, first, process_set=self.process_set)
        for name, value in self.from_first(plain).items():
            target = getattr(self, name)
            if _has_state(target):
                target.load_state_dict(value)
            else:
                setattr(self, name, value)
        self.save()

    def _sync_onebit(self, optimizer: HasRankState, local: Any) -> None:
        """Makes an optimizer's state that of the first rank, if it is not. ``local`` is its rank state if its
        parameters are this rank's own.
        """
        state = optimizer.state_dict()
        mine = state["ocomm"]["checksum"], repr(state["param_groups"])
        if len(set(api.allgather_object(mine, process_set=self.process_set))) > 1:
            optimizer.load_state_dict(self.from_first(state))
            optimizer.load_rank_state_dict(None)
        elif local is not None:
            optimizer.load_rank_state_dict(local)

    def reset(self) -> None:
        """Shares out the samplers' remaining samples to the current ranks, and connects 1-bit optimizers with them."""
        for value in self._samplers:
            value.reset()
        for name in self._onebit:
            getattr(self, name).reconnect()

    @property
    def _onebit(self) -> list[str]:
        return [name for name in self._names if isinstance(getattr(self, name), HasRankState)]

    @property
    def _samplers(self) -> list[ElasticSampler]:
        values = [getattr(self, name) for name in self._names]
        return [value for value in values if isinstance(value, ElasticSampler)]


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _parameters(value: Any) -> Iterable[torch.Tensor]:
    """Returns the parameters of a module or of an optimizer."""
    if isinstance(value, torch.nn.Module):
        return value.parameters()
    groups = value.param_groups if isinstance(value, torch.optim.Optimizer) else []
    return [p for group in groups for p in group["params"]]


def _set_of(value: Any) -> ProcessSet | None:
    """Returns the process set that a distributed optimizer averages over."""
    if isinstance(value, HasRankState):
        return value.process_set
    return getattr(value, "_process_set", None) if isinstance(value, torch.optim.Optimizer) else None
