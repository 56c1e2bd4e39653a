"""``hvd.elastic`` for Torch: models, optimizers and samplers that can be committed, restored and synchronized."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from ocomm import api
from ocomm.elastic import ObjectState, State, run
from ocomm.errors import InvalidRequestError
from ocomm_torch.compressed import CompressedOptimizer
from ocomm_torch.functions import broadcast_optimizer_state, broadcast_parameters

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


class ElasticSampler(Sampler[int]):
    """Deals a dataset to the ranks, without what has been processed in this epoch.

    Call ``set_epoch`` before an epoch and ``record_batch`` after a step; after a failure the rest of the epoch is dealt
    out anew. The last indices are repeated so that all ranks get equally many. ``dataset`` has a length.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: nothing is processed yet, and the order is another."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """This rank's batch of this number is done."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """These samples are done."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of this rank's batch of this number, in the order of the last iteration."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def reset(self) -> None:
        """Deals out what is left, to the ranks that there are now."""
        self.num_replicas = api.size()
        self.rank = api.rank()
        self.remaining_indices = [i for i in range(len(self.dataset)) if i not in self.processed_indices]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)

    def state_dict(self) -> dict[str, Any]:
        """The epoch and what is processed in it."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over an epoch and what is processed in it, and deals out the rest."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def __iter__(self) -> Iterator[int]:
        order = list(self.remaining_indices)
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        total = self.num_samples * self.num_replicas
        order = [order[i % len(order)] for i in range(total)]
        self.indices = order[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


class TorchState(ObjectState):
    """``TorchState(model, optimizer, epoch=0, batch=0, sampler=sampler)``: everything that training goes on from.

    Modules, optimizers (plain or ``DistributedOptimizer``) and ElasticSamplers keep their identity and are restored
    from their ``state_dict()``; other values are attributes that are copied. InvalidRequestError for a 1-bit optimizer,
    whose exchange belongs to the job in which it was made.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        for name, value in values.items():
            if isinstance(value, CompressedOptimizer):
                raise InvalidRequestError(
                    f"TorchState: {name} is a {type(value).__name__}, which cannot go on in another job; train with "
                    "DistributedOptimizer, or save its state_dict() yourself and start again."
                )
        super().__init__(**{name: value for name, value in values.items() if value is not None})

    def save(self) -> None:
        """Keeps copies of all values in this process's memory."""
        self._saved = {}
        for name in self._names:
            value = getattr(self, name)
            self._saved[name] = copy.deepcopy(value.state_dict() if _has_state(value) else value)

    def restore(self) -> None:
        """Goes back to the copies; modules, optimizers and samplers are changed in place."""
        for name, saved in self._saved.items():
            value = getattr(self, name)
            if _has_state(value):
                value.load_state_dict(copy.deepcopy(saved))
            else:
                setattr(self, name, copy.deepcopy(saved))

    def sync(self) -> None:
        """Takes over rank 0's values, for samplers what any rank has processed, and saves. Collective."""
        plain: dict[str, Any] = {}
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), 0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, 0)
            elif isinstance(value, ElasticSampler):
                states = api.allgather_object(value.state_dict())
                done = [state["processed_indices"] for state in states if state["epoch"] == states[0]["epoch"]]
                value.load_state_dict({"epoch": states[0]["epoch"], "processed_indices": set().union(*done)})
            else:
                plain[name] = value
        for name, value in api.broadcast_object(plain, 0, "elastic.sync").items():
            setattr(self, name, value)
        self.save()

    def reset(self) -> None:
        """Deals the samplers' rest to the ranks that there are now."""
        for name in self._names:
            if isinstance(getattr(self, name), ElasticSampler):
                getattr(self, name).reset()


def _has_state(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer, ElasticSampler))
