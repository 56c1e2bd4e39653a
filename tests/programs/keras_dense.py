"""Scripts of Keras that train with ``DistributedOptimizer`` or ``DistributedGradientTape``, held to averaging by hand.

The replay is the same optimizer of Keras in one process, in eager mode, which gets the averages of all ranks'
gradients. With int8 and int4 these are the averages of ``tests.oracle.dense_codes``. After each stage every rank has
the replay's variables, and the same bits as the other ranks. A step that is refused changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

import ocomm_tf as hvd
import ocomm_tf.keras as for_keras
from ocomm.session import Session
from ocomm.training.resume import one_state
from ocomm.types import Settings
from tests.oracle.dense_codes import DenseCodes
from tests.programs import keras_scripts as scripts
from tests.programs.keras_scripts import COUNT, NUMELS, PATIENCE_S, SHAPES, Array, Model, Noise, Script, Stage
from tests.worlds import run_ranks

FEW = 4
BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Setup:
    """How gradients are averaged."""

    model: Model
    kind: str = "none"
    tape: bool = False
    ranks: int = 2
    #: The ranks that train together; () for all. The others train alone.
    members: tuple[int, ...] = ()
    sums: bool = False
    predivide: float = 1.0
    groups: int = 0
    #: ``backward_passes_per_step`` instead of Keras' ``gradient_accumulation_steps``, and whether it averages.
    horovod: bool = False
    averages: bool = False
    #: Variables that each rank has for itself.
    local: tuple[int, ...] = ()
    checks: int = 2

    @property
    def together(self) -> tuple[int, ...]:
        return self.members or tuple(range(self.ranks))

    def group_of(self, rank: int) -> tuple[int, ...]:
        return self.together if rank in self.together else (rank,)


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
    model = draw(scripts.models(list(scripts.INNERS)))
    kind = draw(st.sampled_from(["none", "none", "int8", "int4"]))
    tape = draw(st.sampled_from([False, False, True]))
    ranks, members = draw(st.sampled_from([(2, ()), (2, ()), (3, ()), (3, (0, 2))]))
    local = draw(st.sampled_from([(), (), (), (3,), (1,)])) if not tape else ()
    if model.clip is not None and model.clip[0] == "global_clipnorm":
        local = ()  # refused
    setup = Setup(
        model=model,
        kind=kind,
        tape=tape,
        ranks=ranks,
        members=members,
        sums=kind == "none" and draw(st.sampled_from([False, False, True])),
        groups=draw(st.sampled_from([0, 0, 2])) if kind == "none" else 0,
        horovod=not tape and draw(st.booleans()),
        averages=draw(st.booleans()),
        local=tuple(i for i in local if i not in model.frozen),
        checks=draw(st.sampled_from([2, 2, 0, 64])),
    )
    failures = []
    if model.scale is not None or (kind != "none" and not tape):
        failures.append("nan")
    if not tape and setup.checks:
        failures.append("rate")
    victims = len(setup.together)
    drawn = draw(scripts.stages(model, victims, absent=kind == "none", failures=failures, decays=lambda way: False))
    if tape:
        drawn = tuple(_in_a_loop(stage) for stage in drawn)
    return Program(setup, drawn, draw(st.integers(0, 1 << 20)))


def _in_a_loop(stage: Stage) -> Stage:
    """``fit`` has no tape of the script."""
    ways = {"fit": "graph", "fit eagerly": "eager"}
    return Stage(**{**vars(stage), "way": ways.get(stage.way, stage.way), "at_once": 1})


# With ocomm


def wrapped(setup: Setup, inner: Any, net: scripts.Net, process_set: Any) -> Any:
    scripts.exclude(inner, setup.model, net)
    passes = setup.model.passes
    if setup.tape:
        if passes > 1:
            scripts.inner_of(inner).gradient_accumulation_steps = passes
        return inner
    options: dict[str, Any] = {}
    if setup.horovod:
        options = {"backward_passes_per_step": passes, "average_aggregated_gradients": setup.averages}
    elif passes > 1:
        scripts.inner_of(inner).gradient_accumulation_steps = passes
    optimizer = for_keras.DistributedOptimizer(
        inner,
        compression=getattr(hvd.Compression, setup.kind),
        op=hvd.Sum if setup.sums else hvd.Average,
        groups=setup.groups or None,
        process_set=process_set,
        **options,
    )
    for i in setup.local:
        optimizer.register_local_var(net.parameters[i])
    return optimizer


def reload(optimizer: Any) -> None:
    """Saves the state and loads it."""
    if hasattr(optimizer, "ocomm_state"):
        state, own = optimizer.ocomm_state(), optimizer.ocomm_rank_state()
        optimizer.ocomm_load_state(state)
        optimizer.ocomm_load_rank_state(one_state(own))
        return
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    optimizer.load_own_variables(store)


def on_a_rank(program: Program, session: Session) -> list[tuple[str, list[Array]]]:
    """Runs the program; returns after each stage the class of the error that ended it, and the model's variables."""
    setup = program.setup
    rank = session.require_topology().rank
    together = hvd.ProcessSet(setup.members) if setup.members else hvd.global_process_set
    if setup.members:
        together = hvd.add_process_set(list(setup.members))
    script = Script(setup.model, Noise(program.seed), rank, lambda inner, net: wrapped(setup, inner, net, together))
    if setup.tape:
        options = {
            "compression": getattr(hvd.Compression, setup.kind),
            "op": hvd.Sum if setup.sums else hvd.Average,
            "groups": setup.groups or None,
            "process_set": together,
        }
        script.tape = lambda tape: hvd.DistributedGradientTape(tape, **options)
    seen = []
    for number, stage in enumerate(program.stages):
        stage = _as_seen_by(setup, rank, stage)
        script.handle(number, stage, reload)
        before = script.state()
        error = script.run(number, stage)
        if error and stage.batches == 1:
            for old, new in zip(before, script.state(), strict=True):
                assert np.array_equal(old, new, equal_nan=True), f"stage {number}, {error}: {old} became {new}"
        seen.append((error, script.values()))
    return seen


def _as_seen_by(setup: Setup, rank: int, stage: Stage) -> Stage:
    """The stage with ``victim`` as a rank of the job; without failures for a rank that trains alone."""
    if not stage.fails:
        return stage
    alone = rank not in setup.together
    fails = "" if alone and (stage.fails == "rate" or setup.model.scale is None) else stage.fails
    return Stage(**{**vars(stage), "victim": setup.together[stage.victim], "fails": fails})


# By hand


class Averages:
    """The averages of the gradients of a group of ranks."""

    def __init__(self, setup: Setup, group: tuple[int, ...]) -> None:
        self.setup, self.group = setup, group
        bits = BITS.get(setup.kind)
        is_coded = bits is not None and group == setup.together
        self.codes = (
            [DenseCodes(n, len(group), bits, [slice(0, n)], 0.8 if bits == 4 else 0.0) for n in NUMELS]
            if is_coded and bits is not None
            else None
        )

    def average(self, each: list[list[Array]], rank: int) -> list[Array]:
        """The averages of ``each[member][variable]``, with what ``rank`` keeps of its own."""
        found = []
        shared = [i for i in range(COUNT) if i not in (*self.setup.local, *self.setup.model.frozen)]
        # NaN on any rank changes no error.
        are_finite = all(np.isfinite(gradients[i]).all() for gradients in each for i in shared)
        for i in range(COUNT):
            own = [gradients[i] for gradients in each]
            if i in self.setup.local and len(self.group) > 1:
                found.append(own[self.group.index(rank)] / np.float32(len(self.group)))
            elif self.codes is not None and i not in self.setup.model.frozen:
                flat = own[0].reshape(-1) * np.nan
                if are_finite:
                    flat = self.codes[i].average([g.reshape(-1) for g in own])
                found.append(flat.reshape(SHAPES[i]))
            else:
                total = sum(own[1:], own[0])
                found.append(total if self.setup.sums else total / np.float32(len(own)))
        return found


def by_hand(program: Program, rank: int) -> list[list[Array]]:
    """The variables of the model after each stage."""
    setup, model = program.setup, program.setup.model
    group = setup.group_of(rank)
    noise = Noise(program.seed)

    def kept(inner: Any, net: scripts.Net) -> Any:
        scripts.exclude(inner, model, net)
        if model.passes > 1:
            scripts.inner_of(inner).gradient_accumulation_steps = model.passes
        return inner

    script = Script(model, noise, rank, kept)
    averages = Averages(setup, group)
    summed = model.passes if setup.horovod and not setup.averages else 1
    sums = [[np.zeros(shape, np.float32) for shape in SHAPES] for _ in group]
    codes_sums = averages.codes is not None and not setup.tape and model.scale is None and model.passes > 1
    seen = []
    done = 0
    for number, full in enumerate(program.stages):
        stage = _as_seen_by(setup, rank, full)
        script.handle(number, stage, lambda optimizer: None)
        refused = False
        for batch in range(stage.batches):
            last = batch == stage.batches - 1
            scale = float(script.optimizer.dynamic_scale.numpy()) if model.scale is not None else 1.0
            each = []
            for member in group:
                flat = noise.batch(number, batch, member) * np.float32(scale)
                if last and stage.fails == "nan" and stage.victim == member:
                    flat[0] = np.nan
                each.append(scripts.parts(flat))
            if last and stage.fails and (stage.fails == "rate" or model.scale is None):
                refused = True
                break
            if codes_sums:
                # Keras sums this rank's gradients, and their sum is averaged.
                if scripts.is_update(done, model.passes):
                    share = np.float32(1 / model.passes)
                    means = [
                        [(new + old) * share * np.float32(summed) for new, old in zip(mine, before, strict=True)]
                        for mine, before in zip(each, sums, strict=True)
                    ]
                    sums = [[np.zeros(shape, np.float32) for shape in SHAPES] for _ in group]
                    found = [g * np.float32(model.passes) for g in averages.average(means, rank)]
                else:
                    sums = [
                        [new + old for new, old in zip(mine, before, strict=True)]
                        for mine, before in zip(each, sums, strict=True)
                    ]
                    found = [np.zeros(shape, np.float32) for shape in SHAPES]
            else:
                found = [g * np.float32(summed) for g in averages.average(each, rank)]
            grads = [None if i in stage.absent else tf.constant(found[i]) for i in model.trained]
            script.optimizer.apply(grads, script.trained)
            done += 1
        if stage.way.startswith("fit") and not refused:
            script.optimizer.finalize_variable_values(script.trained)
        seen.append(script.values())
    return seen


def run(program: Program) -> None:
    """Runs the program on all its ranks."""
    setup = program.setup
    settings = Settings(
        stall_check_s=PATIENCE_S / 4, stall_shutdown_s=PATIENCE_S, replica_check_steps=setup.checks, segment_nbytes=200
    )
    found = run_ranks(setup.ranks, lambda session: on_a_rank(program, session), settings)
    first = setup.together[0]
    local = set(setup.local)
    for rank, seen in enumerate(found):
        expected = by_hand(program, rank) if rank in (first,) or rank not in setup.together or local else None
        for number, (error, values) in enumerate(seen):
            where = f"stage {number} on rank {rank}"
            stage = _as_seen_by(setup, rank, program.stages[number])
            refused = stage.fails and (stage.fails == "rate" or setup.model.scale is None)
            assert bool(error) == bool(refused), f"{where}: {error or 'no error'}"
            if rank in setup.together:
                theirs = found[first][number]
                assert error == theirs[0], f"{where}: {error}, and {theirs[0]} on rank {first}"
                for i in range(COUNT):
                    if i not in local:
                        assert np.array_equal(values[i], theirs[1][i]), f"{where}: v[{i}] differs from rank {first}'s"
            for i in range(COUNT) if expected is not None else ():
                assert np.allclose(values[i], expected[number][i], rtol=2e-4, atol=2e-5), (
                    f"{where}: v[{i}] is {values[i].reshape(-1)[:4]}, by hand {expected[number][i].reshape(-1)[:4]}"
                )
