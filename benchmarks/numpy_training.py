"""Every compressed optimizer on NumPy arrays, through its real driver: for jobs of which many are started, or that make
many steps.

No framework is imported, so a rank starts in a fraction of a second. Gradients depend on the step and the rank alone:
two jobs of as many ranks must have the same bits after the same step, whatever happens to them on the way.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ocomm import api
from ocomm.compression.layout import TensorSpec
from ocomm.elastic.commits import Part
from ocomm.elastic.state import ObjectState
from ocomm.kernels.base import Bytes, Floats, aligned_zeros
from ocomm.optim.adam import DenseAdam
from ocomm.optim.birder import Birder, BirderOptions
from ocomm.optim.core import Core, Group, address
from ocomm.optim.diloco import DiLoCo, DiLoCoOptions
from ocomm.optim.ef_sgd import EFSGD, EFSGDOptions
from ocomm.optim.lamb import Lamb, LambOptions
from ocomm.optim.lion import Lion, LionOptions
from ocomm.optim.onebit_adam import OneBitAdam, OneBitAdamOptions
from ocomm.optim.options import Options
from ocomm.optim.soft_sign import SoftSignSGD, SoftSignSGDOptions
from ocomm.optim.zero_one_adam import ZeroOneAdam, ZeroOneAdamOptions
from ocomm.session import Session
from ocomm.training.adam import dense_step
from ocomm.training.common import Common
from ocomm.training.diloco import DiLoCoDriver
from ocomm.training.driver import Driver
from ocomm.training.onebit_adam import OneBitAdamDriver
from ocomm.training.resume import Source, one_state
from ocomm.training.zero_one_adam import ZeroOneAdamDriver

#: Several blocks, one with a short last block, less than a block, a single element.
SHAPES = ((20, 30), (257,), (33,), (1,))
BLOCK_SIZE = 128
LR = 1e-3


@dataclass(frozen=True)
class Kind:
    """An optimizer, with options that bring it into each of its stages within some twenty steps."""

    core: type[Core]
    options: Options
    driver: type[Driver] = Driver
    betas: tuple[float, float] = (0.9, 0.99)


KINDS = {
    "1-bit Adam": Kind(OneBitAdam, OneBitAdamOptions(freeze_step=5), OneBitAdamDriver),
    "1-bit Adam, sharded": Kind(OneBitAdam, OneBitAdamOptions(freeze_step=9, shard_state=True), OneBitAdamDriver),
    "1-bit Adam, 8-bit dense": Kind(OneBitAdam, OneBitAdamOptions(freeze_step=9, dense_bits=8), OneBitAdamDriver),
    "1-bit LAMB": Kind(Lamb, LambOptions(freeze_step=5), OneBitAdamDriver),
    "0/1 Adam": Kind(
        ZeroOneAdam,
        ZeroOneAdamOptions(local_step_start=6, local_step_doubling=6, local_step_clip=4),
        ZeroOneAdamDriver,
    ),
    "Lion": Kind(Lion, LionOptions()),
    "Birder": Kind(Birder, BirderOptions()),
    "SoftSignSGD": Kind(SoftSignSGD, SoftSignSGDOptions()),
    "EF-SGD": Kind(EFSGD, EFSGDOptions(), betas=(0.9, 0.9)),
    "DiLoCo": Kind(DiLoCo, DiLoCoOptions(sync_every=4, fragments=2, bits=1), DiLoCoDriver),
    "DiLoCo, delayed": Kind(DiLoCo, DiLoCoOptions(sync_every=4, delay=2, bits=8), DiLoCoDriver),
}


class Training:
    """A model of NumPy arrays under one optimizer: the ``Frontend`` of its driver, of whichever protocol that needs.

    Making one is collective over the ranks of the session, and so is a step, except for local steps of DiLoCo.
    """

    framework = "torch"  # whose words messages use
    kernels = None
    grid = None

    def __init__(self, session: Session, name: str, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
        self.kind = kind = KINDS[name]
        generator = np.random.default_rng([5, list(KINDS).index(name)])
        self.parameters: list[Floats] = []
        for shape in shapes:
            self.parameters.append(aligned_zeros(math.prod(shape)))
            self.parameters[-1][:] = generator.standard_normal(math.prod(shape), np.float32)
        self._gradients: list[Floats | None] = [None] * len(shapes)
        self._adam: list[DenseAdam | None] = [None] * len(shapes)
        specs = [TensorSpec(f"{name}.{number}", shape) for number, shape in enumerate(shapes)]
        self.driver: Any
        if kind.driver is DiLoCoDriver:
            assert isinstance(kind.options, DiLoCoOptions)
            common = Common(block_size=BLOCK_SIZE, verify="version")
            self.driver = DiLoCoDriver(session, 0, specs, 0, self, kind.options, common)
        else:
            common = Common(block_size=BLOCK_SIZE, verify="full")
            self.driver = kind.driver(session, 0, specs, self, kind.core, kind.options, common)
            self.driver.core.tensors["param"] = [address(parameter) for parameter in self.parameters]

    def step(self, number: int, between: Callable[[], None] = lambda: None) -> None:
        """Makes step ``number``. ``between`` is called before each gradient is ready, as in backward."""
        driver = self.driver
        generator = np.random.default_rng([number, driver.core.rank])
        gradients = [generator.standard_normal(parameter.size, np.float32) for parameter in self.parameters]
        if isinstance(driver, DiLoCoDriver):
            driver.start()
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                between()
                parameter -= np.float32(LR) * gradient
            driver.advance(True)
            return
        is_early = not driver.is_at_start
        for tensor in reversed(range(len(gradients))):
            between()
            self._gradients[tensor] = gradients[tensor]
            if is_early:
                driver.begin()
                driver.stepper.buckets.mark_ready(tensor)
        driver.step(lambda: False)
        self._gradients = [None] * len(self.parameters)

    @property
    def is_synced(self) -> bool:
        """True if all ranks have the same parameters now; False after a local step."""
        core = self.driver.core
        return core.is_synced if isinstance(core, (ZeroOneAdam, DiLoCo)) else True

    def hashes(self) -> tuple[str, str]:
        """Returns the hashes of this rank's parameters, and of the state that all ranks have in common."""
        moments = [None if own is None else (own.momentum, own.variance, own.step) for own in self._adam]
        return hash_of(self.parameters), hash_of([self.driver.core.state(), moments])

    # For the driver

    def implementation(self) -> str:
        return "ocomm"

    def written_in_forward(self) -> dict[str, str]:
        return {}

    def locate(self, tensors: list[int], final: bool) -> list[int]:
        if isinstance(self.driver, DiLoCoDriver):
            return self.driver.core.delta_addresses(tensors)
        return [address(self._gradients[tensor]) for tensor in tensors]

    def groups(self) -> list[Group]:
        return [Group(np.arange(len(self.parameters)), LR, self.kind.betas, 1e-8)]

    def hyper(self) -> Hashable:
        return ((LR,),)

    def wrapped_adam(self) -> str:
        return "Adam"

    def read_warm_start(self) -> str | None:
        return None

    def moments(self, tensor: int) -> tuple[Floats, Floats, int] | None:
        own = self._adam[tensor]
        return None if own is None else (own.momentum, own.variance, own.step)

    def release(self, tensor: int) -> None:
        self._adam[tensor] = None

    def dense_step(self, tensors: list[int], average: Callable[[int], Floats], max_norm: float | None) -> None:
        averages = {tensor: average(tensor) for tensor in tensors}
        dense_step(self.driver.kernels, self.groups(), averages, self.parameters.__getitem__, self._started)

    def advance(self, tensor: int) -> tuple[Floats, Floats, int]:
        own = self._started(tensor)
        own.step += 1
        return own.momentum, own.variance, own.step

    def _started(self, tensor: int) -> DenseAdam:
        own = self._adam[tensor] = self._adam[tensor] or DenseAdam.fresh(self.parameters[tensor].size)
        return own

    def adopt(self, tensor: int, momentum: Floats, variance: Floats, step: int) -> None:
        self._adam[tensor] = DenseAdam(momentum.copy(), variance.copy(), step)

    def read(self, tensor: int) -> Floats:
        return self.parameters[tensor]

    def write(self, tensor: int, values: Floats) -> None:
        self.parameters[tensor][:] = values

    def inner_state(self) -> Bytes:
        return np.zeros(0, np.uint8)

    def load_inner_state(self, saved: Bytes) -> None:
        pass

    def reset_inner_state(self) -> bool:
        return False

    # Saved states

    def state(self) -> dict[str, Any]:
        """Returns what is equal on all ranks."""
        moments: list[Any] = []
        for tensor in range(len(self.parameters)):
            saved, own = self.driver.saved_moments(tensor), self.moments(tensor)
            if saved is None and own is not None:
                saved = {"exp_avg": own[0].copy(), "exp_avg_sq": own[1].copy(), "step": own[2]}
            moments.append(saved)
        parameters = [parameter.copy() for parameter in self.parameters]
        return {"parameters": parameters, "moments": moments, "driver": self.driver.state()}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Loads the result of ``state``."""
        for parameter, value in zip(self.parameters, saved["parameters"], strict=True):
            parameter[:] = value
        self._adam = [None] * len(self.parameters)
        for tensor, own in enumerate(saved["moments"]):
            if own is not None and "exp_avg" in own:
                self.adopt(tensor, own["exp_avg"], own["exp_avg_sq"], own["step"])
        self.driver.load_state(saved["driver"])


class TrainingState(ObjectState):
    """The elastic state of several ``Training``, and of the number of the step."""

    def __init__(self, trainings: Mapping[str, Training]) -> None:
        self.trainings = trainings
        super().__init__(step=0)

    def replicated(self) -> dict[str, Any]:
        return {"step": self.step, **{name: training.state() for name, training in self.trainings.items()}}

    def load_replicated(self, value: dict[str, Any]) -> None:
        self.step = value["step"]
        for name, training in self.trainings.items():
            training.load_state(value[name])

    def own(self) -> dict[str, Any]:
        return {name: training.driver.rank_state() for name, training in self.trainings.items()}

    def load_own(self, part: Part) -> None:
        for name, training in self.trainings.items():

            def read(rank: int, name: str = name) -> Any:
                found = part.read(rank)
                return None if found is None else found[name]

            source = Source(read, part.ranks, lambda rank: f"the part of rank {rank} of the commit", partial=True)
            training.driver.load_rank_state(one_state(read(part.rank)) if part.alone else source)

    def sync(self) -> None:
        """Saves the state: all ranks have the same already, at the start and after a restored commit."""
        mine = hash_of([self.step, [training.hashes() for training in self.trainings.values()]])
        assert len(set(api.allgather_object(mine))) == 1, "ranks begin with different states"
        self.save()


def hash_of(value: Any) -> str:
    """Returns a hash of arrays, numbers and texts in lists, tuples and dicts."""
    hasher = hashlib.blake2b(digest_size=8)

    def feed(item: Any) -> None:
        if isinstance(item, Mapping):
            for key, inner in item.items():
                hasher.update(f"{key}:".encode())
                feed(inner)
        elif isinstance(item, np.ndarray):
            hasher.update(np.ascontiguousarray(item).tobytes())
        elif isinstance(item, Sequence) and not isinstance(item, str):
            for inner in item:
                feed(inner)
        else:
            hasher.update(f"{item};".encode())

    feed(value)
    return hasher.hexdigest()
