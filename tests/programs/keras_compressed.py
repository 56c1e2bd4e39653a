"""Scripts of Keras that train with a compressed optimizer, held to their clean replay and to the plain simulations.

The clean replay is the same script without noise, in eager mode: nothing is perturbed, saved and loaded or traced
again, and a step that is refused is left out. Both have the same bits. Where a plain simulation of ``tests.oracle``
knows the options, an optimizer of Keras in one process, which makes its steps by the simulation, has the same
variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

import ocomm_tf.keras as hvd
from ocomm.session import Session
from ocomm.training.resume import one_state
from ocomm.types import Settings
from tests.oracle import birder, ef_sgd, lion, onebit_adam, onebit_lamb, zero_one_adam
from tests.programs import keras_scripts as scripts
from tests.programs.keras_scripts import COUNT, PATIENCE_S, SHAPES, Array, Model, Noise, Script, Stage
from tests.worlds import run_ranks

FEW = 4


@dataclass(frozen=True)
class Kind:
    wrap: Callable[..., Any]
    inner: str = "sgd"
    options: dict[str, Any] = field(default_factory=dict)
    #: ``simulate(params, ranks, decay, block_size, dense_bits)``
    simulate: Callable[..., Any] | None = None


def _adam(steps: int, simulation: type) -> Callable[..., Any]:
    def make(params: Sequence[Array], ranks: int, decay: float, block_size: Any, dense_bits: int) -> Any:
        options: dict[str, Any] = {"decoupled": True} if simulation is onebit_adam.Simulation else {}
        return simulation(
            params, ranks, freeze_step=steps, eps=1e-3, weight_decay=decay, block_size=block_size,
            dense_bits=dense_bits, **options,
        )  # fmt: skip

    return make


def _zero_one(params: Sequence[Array], ranks: int, decay: float, block_size: Any, dense_bits: int) -> Any:
    return zero_one_adam.Simulation(
        params, ranks, eps=1e-3, weight_decay=decay, decoupled=True, block_size=block_size, dense_bits=dense_bits,
        local_step_start=10**6,
    )  # fmt: skip


def _ef_sgd(params: Sequence[Array], ranks: int, decay: float, block_size: Any, dense_bits: int) -> Any:
    size = 10**6 if block_size == "tensor" else block_size
    return ef_sgd.EFSGD(params, ranks, momentum=0.5, decoupled=decay, block_size=size)


def _signs(simulation: type) -> Callable[..., Any]:
    def make(params: Sequence[Array], ranks: int, decay: float, block_size: Any, dense_bits: int) -> Any:
        return simulation(params, ranks, weight_decay=decay)

    return make


_LOCAL = {"local_step_start": 2, "local_step_doubling": 2, "local_step_clip": 2}
KINDS = {
    "1-bit Adam, dense": Kind(hvd.DistributedOneBitAdam, "adam", {"freeze_step": 100}),
    "1-bit Adam": Kind(hvd.DistributedOneBitAdam, "adam", {"freeze_step": 3}, _adam(3, onebit_adam.Simulation)),
    "1-bit LAMB, dense": Kind(hvd.DistributedOneBitLamb, "adam", {"freeze_step": 100}),
    "1-bit LAMB": Kind(hvd.DistributedOneBitLamb, "adam", {"freeze_step": 3}, _adam(3, onebit_lamb.Simulation)),
    "0/1 Adam": Kind(hvd.DistributedZeroOneAdam, "adam", {"local_step_clip": 1}, _zero_one),
    "0/1 Adam, local steps": Kind(hvd.DistributedZeroOneAdam, "adam", _LOCAL),
    "Birder": Kind(hvd.DistributedBirder, simulate=_signs(birder.Birder)),
    "SoftSignSGD": Kind(hvd.DistributedSoftSignSGD, simulate=_signs(birder.SoftSign)),
    "Lion": Kind(hvd.DistributedLion, simulate=_signs(lion.Lion)),
    "EF-SGD": Kind(hvd.DistributedEFSGD, "sgd", {}, _ef_sgd),
}


@dataclass(frozen=True)
class Setup:
    model: Model
    kind: str
    ranks: int = 2
    #: Ranks per host; 0: all on one host.
    slots: int = 0
    block_size: int | str = 16
    overlap: bool = True
    max_grad_norm: float | None = None
    clip: str = "exact"
    dense_bits: int = 32
    shard_state: bool = False
    horovod: bool = False
    #: Whether the weight decay changes, which no simulation knows.
    decays: bool = False

    @property
    def hosts(self) -> list[str]:
        return [f"host{rank // self.slots}" for rank in range(self.ranks)] if self.slots else []

    @property
    def steps_locally(self) -> bool:
        return "local" in self.kind

    @property
    def is_simulated(self) -> bool:
        return (
            KINDS[self.kind].simulate is not None
            and not self.slots
            and self.max_grad_norm is None
            and not self.shard_state
            and not self.model.low
            and not self.model.excluded
            and not self.decays
            and (self.model.clip is None or self.model.clip[0] == "clipvalue")
        )

    def wrap(self, inner: Any, net: scripts.Net) -> Any:
        scripts.exclude(inner, self.model, net)
        passes = self.model.passes
        options: dict[str, Any] = {
            "block_size": self.block_size,
            "overlap": self.overlap,
            "max_grad_norm": self.max_grad_norm,
            "clip": self.clip,
            **KINDS[self.kind].options,
        }
        if self.horovod:
            options["backward_passes_per_step"] = passes
        elif passes > 1:
            scripts.inner_of(inner).gradient_accumulation_steps = passes
        if self.dense_bits != 32:
            options["dense_bits"] = self.dense_bits
        if self.shard_state:
            options["shard_state"] = True
        return KINDS[self.kind].wrap(inner, **options)


@dataclass(frozen=True)
class Program:
    setup: Setup
    stages: tuple[Stage, ...]
    seed: int = 0

    def __str__(self) -> str:
        texts = [f"stage {number}:\n{stage}" for number, stage in enumerate(self.stages)]
        return "\n".join([str(self.setup), *texts])


@st.composite
def programs(draw: st.DrawFn) -> Program:
    kind = draw(st.sampled_from(list(KINDS)))
    model = draw(scripts.models([KINDS[kind].inner]))
    is_local = "local" in kind
    if is_local:
        model = replace(model, ema=None)
    if not model.scale:
        model = replace(model, low=draw(st.sampled_from([(), (), (1,), (0, 1, 2, 3)])))
    ranks, slots = draw(st.sampled_from([(2, 0), (2, 0), (3, 0), (4, 2)]))
    has_moments = kind.startswith(("1-bit", "0/1"))
    dense_bits = draw(st.sampled_from([32, 32, 16, 8, 4])) if has_moments else 32
    has_other = kind == "SoftSignSGD" or is_local or (model.clip is not None and model.clip[0] == "global_clipnorm")
    may_shard = kind.startswith("1-bit Adam") and dense_bits == 32 and not slots
    setup = Setup(
        model=model,
        kind=kind,
        ranks=ranks,
        slots=slots,
        block_size=draw(st.sampled_from([16, 4096, "tensor"])),
        overlap=draw(st.sampled_from([True, True, False])),
        max_grad_norm=None if has_other else draw(st.sampled_from([None, None, 2.0])),
        clip=draw(st.sampled_from(["exact", "previous"])),
        dense_bits=dense_bits,
        shard_state=may_shard and draw(st.sampled_from([False, False, True])),
        horovod=draw(st.booleans()),
    )
    failures = ["nan"] if is_local else ["nan", "rate"]
    drawn = draw(scripts.stages(model, ranks, absent=model.passes == 1, failures=failures, decays=lambda way: True))
    setup = replace(setup, decays=any(isinstance(e, scripts.Decay) for stage in drawn for e in stage.events))
    # A step that other hyperparameters have ended is the optimizer's last.
    ends = [number for number, stage in enumerate(drawn) if stage.fails == "rate"]
    return Program(setup, drawn[: ends[0] + 1] if ends else drawn, draw(st.integers(0, 1 << 20)))


def reload(optimizer: Any) -> None:
    """Saves the whole state and loads it."""
    inner = scripts.inner_of(optimizer)
    state, own = inner.ocomm_state(), inner.ocomm_rank_state()
    if inner.compression_report().get("synced", True):  # else the ranks' states differ
        inner.ocomm_load_state(state)
        inner.ocomm_load_rank_state(one_state(own))


def on_a_rank(program: Program, session: Session, clean: bool) -> list[tuple[str, list[Array]]]:
    """Runs the program; returns after each stage the class of the error that ended it, and the variables."""
    setup = program.setup
    rank = session.require_topology().rank
    script = Script(setup.model, Noise(program.seed), rank, setup.wrap)
    seen = []
    for number, stage in enumerate(program.stages):
        error = ""
        if clean:
            quiet = replace(stage, way="eager", at_once=1, perturbed=False)
            script.handle(number, quiet, lambda optimizer: None)
            refused = bool(stage.fails) and (stage.fails == "rate" or setup.model.scale is None)
            if refused:
                quiet = replace(quiet, batches=stage.batches - 1, fails="")
            if quiet.batches:
                error = script.run(number, quiet)
                assert not error, f"the clean stage {number} raised {error}"
            if stage.way.startswith("fit") and not refused:
                script.optimizer.finalize_variable_values(script.trained)
        else:
            script.handle(number, stage, reload)
            before = script.state()
            error = script.run(number, stage)
            if error and stage.batches == 1:
                for old, new in zip(before, script.state(), strict=True):
                    assert np.array_equal(old, new), f"stage {number}, {error}: {old} became {new}"
        seen.append((error, script.values()))
    if setup.steps_locally:
        script.optimizer.finish()
        seen.append(("", script.values()))
    return seen


# The simulation


class Simulated(keras.optimizers.SGD):
    """Makes the steps of a simulation with what it finds in ``effective``: gradients by rank and variable."""

    def __init__(self, *arguments: Any, simulate: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.__dict__["simulate"] = simulate
        self.__dict__["effective"] = []

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.__dict__["law"] = self.simulate([v.numpy() for v in variables], float(self.weight_decay or 0.0))

    def _clip_gradients(self, grads: Any) -> Any:
        return grads

    def _apply_weight_decay(self, variables: Any) -> None:
        pass

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        law = self.law
        rate = float(str(np.float32(learning_rate)))
        law.lr = lambda step: rate
        for tensor, v in zip(law.tensors, self._trainable_variables, strict=True):
            for kept in [*tensor.params, tensor.synced] if hasattr(tensor, "synced") else [tensor.param]:
                kept[...] = v.numpy().reshape(-1)
        law.step(self.effective)
        for new, v in zip(law.params, self._trainable_variables, strict=True):
            v.assign(new)


def by_simulation(program: Program) -> list[list[Array]]:
    """The variables after each stage."""
    setup, model = program.setup, program.setup.model
    noise = Noise(program.seed)
    kind = KINDS[setup.kind]

    def wrap(inner: Any, net: scripts.Net) -> Any:
        plain = scripts.inner_of(inner)
        config = {
            name: value for name, value in plain.get_config().items() if name in ("weight_decay", "use_ema",
            "ema_momentum", "ema_overwrite_frequency")
        }  # fmt: skip

        def simulate(params: Sequence[Array], decay: float) -> Any:
            assert kind.simulate is not None
            return kind.simulate(params, setup.ranks, decay, setup.block_size, setup.dense_bits)

        made = Simulated(plain._learning_rate if model.schedule else scripts.RATE, simulate=simulate, **config)
        if model.passes > 1:
            made.gradient_accumulation_steps = model.passes
        if inner is not plain:
            return keras.optimizers.LossScaleOptimizer(made, *model.scale)
        return made

    script = Script(model, noise, 0, wrap)
    inner = scripts.inner_of(script.optimizer)
    summed = np.float32(model.passes if setup.horovod else 1)
    sums: list[list[Array]] = []
    zeros = [[np.zeros(shape, np.float32) for shape in SHAPES] for _ in range(setup.ranks)]
    done, seen = 0, []
    for number, stage in enumerate(program.stages):
        script.handle(number, stage, lambda optimizer: None)
        refused = False
        for batch in range(stage.batches):
            is_bad = stage.fails and batch == stage.batches - 1
            if is_bad and (stage.fails == "rate" or model.scale is None):
                refused = True
                break
            dummy = np.float32(np.nan if is_bad else 0.0)
            if not is_bad:
                each = [scripts.parts(noise.batch(number, batch, rank)) for rank in range(setup.ranks)]
                sums = sums or zeros
                sums = [[new + old for new, old in zip(*pair, strict=True)] for pair in zip(each, sums, strict=True)]
                if scripts.is_update(done, model.passes):
                    share = summed / np.float32(model.passes)
                    inner.effective[:] = [[_clipped(g * share, model) for g in own] for own in sums]
                    inner.effective[:] = [
                        [None if i in stage.absent else own[i] for i in model.trained] for own in inner.effective
                    ]
                    sums = []
                done += 1
            grads = [None if i in stage.absent else tf.constant(np.full(SHAPES[i], dummy)) for i in model.trained]
            script.optimizer.apply(grads, script.trained)
        if stage.way.startswith("fit") and not refused:
            script.optimizer.finalize_variable_values(script.trained)
        seen.append(script.values())
    return seen


def _clipped(gradient: Array, model: Model) -> Array:
    if model.clip is None:
        return gradient
    return np.clip(gradient, -model.clip[1], model.clip[1])


def run(program: Program) -> None:
    """Runs the program on all its ranks."""
    setup = program.setup
    settings = Settings(stall_check_s=PATIENCE_S / 4, stall_shutdown_s=PATIENCE_S, segment_nbytes=200)

    def noisy(session: Session) -> Any:
        return on_a_rank(program, session, False)

    def clean(session: Session) -> Any:
        return on_a_rank(program, session, True)

    found = run_ranks(setup.ranks, noisy, settings, hosts=setup.hosts)
    expected = run_ranks(setup.ranks, clean, settings, hosts=setup.hosts)
    simulated = by_simulation(program) if setup.is_simulated else None
    if setup.steps_locally:
        ends = [seen.pop()[1] for seen in found]
        for rank, values in enumerate(ends):
            for i in range(COUNT):
                assert np.array_equal(values[i], ends[0][i]), (
                    f"after finish() v[{i}] of rank {rank} differs from rank 0's"
                )
    for rank, seen in enumerate(found):
        for number, (error, values) in enumerate(seen):
            where = f"stage {number} on rank {rank}"
            stage = program.stages[number]
            refused = stage.fails and (stage.fails == "rate" or setup.model.scale is None)
            # A step between syncs asks nobody.
            assert bool(error) == bool(refused) or setup.steps_locally, f"{where}: {error or 'no error'}"
            if not setup.steps_locally:
                assert error == found[0][number][0], f"{where}: {error}, and {found[0][number][0]} on rank 0"
            for i in range(COUNT):
                if not setup.steps_locally:
                    assert np.array_equal(values[i], found[0][number][1][i]), f"{where}: v[{i}] differs from rank 0's"
                replayed = expected[rank][number][1][i]
                assert np.array_equal(values[i], replayed), (
                    f"{where}: v[{i}] is {values[i].reshape(-1)[:4]}, clean {replayed.reshape(-1)[:4]}"
                )
                if simulated is not None:
                    law = simulated[number][i]
                    assert np.allclose(values[i], law, rtol=2e-4, atol=2e-5), (
                        f"{where}: v[{i}] is {values[i].reshape(-1)[:4]}, simulated {law.reshape(-1)[:4]}"
                    )
