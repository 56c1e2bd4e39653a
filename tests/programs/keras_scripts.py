"""What scripts of Keras do, whoever makes their steps: ``keras_dense`` and ``keras_compressed`` are the kinds.

A model is a few variables whose loss is linear in them, so every gradient is known without autograd. A stage of a
script has events, which change what a script may change between steps, and then some batches: in a loop of the script's
own, in eager mode or in a graph of one or all batches, or in ``fit``.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from ocomm.errors import OcommError

Array = np.ndarray
#: A tensor of several rows, a matrix, a vector, a scalar.
SHAPES = [(9, 7), (5, 3), (7,), ()]
NAMES = ["kernel_0", "kernel_1", "bias_2", "scale_3"]
COUNT = len(SHAPES)
NUMELS = [math.prod(shape) for shape in SHAPES]
#: The rows of v[0] in the order of a sparse gradient.
ROWS = [4, 0, 8, 2, 1, 7, 3, 6, 5]
#: Seconds after which a rank that waits gives up on the others.
PATIENCE_S = float(os.environ.get("TEST_PATIENCE_S", "20"))
RATE = 0.0625
#: The ways to run batches; "loop" is a graph with all batches of a stage.
WAYS = ("eager", "graph", "loop", "fit", "fit eagerly")


@dataclass(frozen=True)
class Model:
    """What a script sets of Keras, alike on all ranks and in the replay."""

    inner: str = "sgd"
    decay: float | None = None
    #: The variables without decay, and whether they are given by their names.
    excluded: tuple[int, ...] = ()
    by_name: bool = False
    #: Momentum and overwrite frequency of averages of variables.
    ema: tuple[float, int | None] | None = None
    clip: tuple[str, float] | None = None
    passes: int = 1
    #: The first scale and the growth steps of a LossScaleOptimizer.
    scale: tuple[float, int] | None = None
    schedule: str = ""
    #: Variables that have a constraint, and those that are not trained.
    constrained: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    low: tuple[int, ...] = ()
    #: Whether the gradient of v[0] is ``tf.IndexedSlices``.
    sparse: bool = False

    @property
    def trained(self) -> list[int]:
        return [i for i in range(COUNT) if i not in self.frozen]


@dataclass(frozen=True)
class Rate:
    value: float

    def __str__(self) -> str:
        return f"optimizer.learning_rate = {self.value}"


@dataclass(frozen=True)
class Write:
    at: int

    def __str__(self) -> str:
        return f"v[{self.at}].assign(other values)"


@dataclass(frozen=True)
class Decay:
    value: float

    def __str__(self) -> str:
        return f"optimizer.weight_decay = {self.value}"


@dataclass(frozen=True)
class Reload:
    def __str__(self) -> str:
        return "save and load the optimizer's state"


@dataclass(frozen=True)
class Retrace:
    def __str__(self) -> str:
        return "make a new graph"


Event = Rate | Write | Decay | Reload | Retrace


@dataclass(frozen=True)
class Stage:
    """``fails`` at the last batch: "nan", a gradient of rank ``victim``; "rate", it has another lr."""

    events: tuple[Event, ...] = ()
    way: str = "eager"
    batches: int = 1
    #: Batches in one graph of ``fit``.
    at_once: int = 1
    #: The variables that the loss does not need; never in ``fit``.
    absent: tuple[int, ...] = ()
    #: Variables are changed before backward, and put back before the step; never in ``fit``.
    perturbed: bool = False
    fails: str = ""
    victim: int = 0

    def __str__(self) -> str:
        how = {"eager": "in a loop", "graph": "in a loop, each in a graph", "loop": "in a loop in a graph"}
        lines = [*map(str, self.events)]
        if self.fails == "rate":
            lines.append(f"another lr on rank {self.victim}")
        lines.append(f"{self.batches} batches {how.get(self.way, self.way)}")
        if self.at_once > 1:
            lines.append(f"(steps_per_execution={self.at_once})")
        if self.absent:
            lines.append(f"(without v{[*self.absent]})")
        if self.perturbed:
            lines.append("(variables are perturbed for the backward pass)")
        if self.fails == "nan":
            lines.append(f"(NaN in the last gradient of v[0] on rank {self.victim})")
        return "\n".join(f"    {line}" for line in lines)


class Noise:
    """Random numbers, the same for the same place in a program."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, numel: int, *where: Any) -> Array:
        draw = np.random.default_rng([self.seed, zlib.crc32(repr(where).encode())])
        return draw.normal(size=numel).astype(np.float32)

    def batch(self, stage: int, batch: int, rank: int) -> Array:
        """The gradients of all variables on a rank, end to end."""
        return self(sum(NUMELS), "gradient", stage, batch, rank)


def parts(flat: Array) -> list[Array]:
    """Returns the gradients of each variable."""
    ends = np.cumsum(NUMELS)[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends), SHAPES, strict=True)]


def _adamw(rate: Any, *, weight_decay: float | None, **options: Any) -> Any:
    return keras.optimizers.AdamW(rate, epsilon=1e-3, weight_decay=weight_decay or 0.125, **options)


INNERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda rate, **k: keras.optimizers.SGD(rate, momentum=0.5, **k),
    "nesterov": lambda rate, **k: keras.optimizers.SGD(rate, momentum=0.5, nesterov=True, **k),
    "adam": lambda rate, **k: keras.optimizers.Adam(rate, epsilon=1e-3, **k),
    "adamw": _adamw,
    "rmsprop": lambda rate, **k: keras.optimizers.RMSprop(rate, epsilon=1e-2, **k),
    "adagrad": lambda rate, **k: keras.optimizers.Adagrad(rate, **k),
}


class Net(keras.Model):
    """The loss of a batch is the sum of all variables, each times its gradient in the batch."""

    def __init__(self, model: Model, noise: Noise) -> None:
        super().__init__()
        self.is_sparse = model.sparse
        self.parameters = []
        for i, shape in enumerate(SHAPES):
            self.parameters.append(
                self.add_weight(
                    name=NAMES[i],
                    shape=shape,
                    dtype="bfloat16" if i in model.low else "float32",
                    trainable=i not in model.frozen,
                    constraint=keras.constraints.NonNeg() if i in model.constrained else None,
                )
            )
            self.parameters[i].assign(noise(NUMELS[i], "begin", i).reshape(shape))
        self.built = True

    def total(self, flat: Any, used: Sequence[int]) -> Any:
        """Returns the loss of a batch, with the variables ``used``."""
        grads = [tf.reshape(part, shape) for part, shape in zip(tf.split(flat, NUMELS), SHAPES, strict=True)]
        values = [self.parameters[i].value for i in range(COUNT)]
        if self.is_sparse:
            values[0], grads[0] = tf.gather(values[0], ROWS), tf.gather(grads[0], ROWS)
        return tf.add_n([tf.reduce_sum(tf.cast(values[i], tf.float32) * grads[i]) for i in used])

    def call(self, flat: Any) -> Any:
        return tf.reshape(self.total(flat[0], range(COUNT)), (1, 1))


def plain(model: Model, passes: int) -> Any:
    """Returns the optimizer of Keras, without ocomm. It sums gradients of ``passes`` itself."""
    options: dict[str, Any] = {"weight_decay": model.decay}
    if model.ema is not None:
        options |= {"use_ema": True, "ema_momentum": model.ema[0], "ema_overwrite_frequency": model.ema[1]}
    if model.clip is not None:
        options[model.clip[0]] = model.clip[1]
    if passes > 1:
        options["gradient_accumulation_steps"] = passes
    rate: Any = RATE
    if model.schedule == "piecewise":
        rate = keras.optimizers.schedules.PiecewiseConstantDecay([3, 6], [RATE, RATE / 2, RATE * 2])
    elif model.schedule == "exponential":
        rate = keras.optimizers.schedules.ExponentialDecay(RATE, 4, 0.5, staircase=True)
    return INNERS[model.inner](rate, **options)


def inner_of(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def exclude(optimizer: Any, model: Model, net: Net) -> None:
    """Takes variables out of the decay, which a script does before the optimizer is built."""
    if model.excluded:
        if model.by_name:
            names = [NAMES[i] for i in model.excluded]
            inner_of(optimizer).exclude_from_weight_decay(var_names=names)
        else:
            inner_of(optimizer).exclude_from_weight_decay(var_list=[net.parameters[i] for i in model.excluded])


class Script:
    """A model and its optimizer on one rank, and what the script does with them."""

    def __init__(self, model: Model, noise: Noise, rank: int, wrap: Callable[[Any, Net], Any]) -> None:
        self.model, self.noise, self.rank = model, noise, rank
        self.net = Net(model, noise)
        inner = plain(model, 1)
        if model.scale is not None:
            inner = keras.optimizers.LossScaleOptimizer(inner, *model.scale)
        self.optimizer = wrap(inner, self.net)
        self.trained = [self.net.parameters[i] for i in model.trained]
        self.optimizer.build(self.trained)
        #: Returns averages, if the optimizer does not.
        self.tape: Callable[[Any], Any] = lambda tape: tape
        self._graphs: dict[Any, Any] = {}

    def values(self) -> list[Array]:
        return [np.asarray(v.numpy()).astype(np.float32) for v in self.net.parameters]

    def state(self) -> list[Array]:
        """What a refused step must not change."""
        found = {id(v): v for v in (*self.net.parameters, *self.optimizer.variables)}
        return [np.asarray(v.numpy()).astype(np.float64) for v in found.values()]

    def handle(self, number: int, stage: Stage, reload: Callable[[Any], None]) -> None:
        for event in stage.events:
            if isinstance(event, Rate):
                self.optimizer.learning_rate = event.value
            elif isinstance(event, Decay):
                inner_of(self.optimizer).weight_decay = event.value
            elif isinstance(event, Write):
                shape = SHAPES[event.at]
                self.net.parameters[event.at].assign(self.noise(NUMELS[event.at], "write", number).reshape(shape))
            elif isinstance(event, Reload):
                reload(self.optimizer)
            elif isinstance(event, Retrace):
                self._graphs.clear()

    def batches(self, number: int, stage: Stage) -> Array:
        found = np.stack([self.noise.batch(number, batch, self.rank) for batch in range(stage.batches)])
        if stage.fails == "nan" and stage.victim == self.rank:
            found[-1, 0] = np.nan
        return found

    def run(self, number: int, stage: Stage) -> str:
        """Runs the batches of a stage; returns the class of the error that ends it, or ""."""
        flats = self.batches(number, stage)
        if stage.fails == "rate":
            before = float(inner_of(self.optimizer).learning_rate.numpy())
            if stage.victim == self.rank:
                self.optimizer.learning_rate = 3 * before
        try:
            self._train(stage, flats)
        except (OcommError, tf.errors.OpError) as error:
            print(f"stage {number}, rank {self.rank}: {type(error).__name__}: {str(error)[-900:]}", flush=True)
            return type(error).__name__
        finally:
            if stage.fails == "rate":
                self.optimizer.learning_rate = before
        return ""

    def _train(self, stage: Stage, flats: Array) -> None:
        if stage.way.startswith("fit"):
            key = stage.way, stage.at_once
            if self._graphs.get("compiled") != key:
                self.net.compile(
                    optimizer=self.optimizer,
                    loss=lambda wanted, found: tf.reduce_mean(found),
                    run_eagerly=stage.way == "fit eagerly",
                    steps_per_execution=stage.at_once,
                    jit_compile=False,
                )
                self._graphs["compiled"] = key
            data = tf.data.Dataset.from_tensor_slices((flats, np.zeros((len(flats), 1), np.float32))).batch(1)
            self.net.fit(data, epochs=1, shuffle=False, verbose=0)
            return

        def batch(flat: Any) -> None:
            self._batch(flat, stage)

        def loop(every: Any) -> None:
            for flat in every:
                batch(flat)

        graph = self._graphs.get((stage.way, stage.absent, stage.perturbed))
        if graph is None:
            graph = {"eager": batch, "graph": tf.function(batch), "loop": tf.function(loop)}[stage.way]
            self._graphs[stage.way, stage.absent, stage.perturbed] = graph
        if stage.way == "loop":
            graph(tf.constant(flats))
        else:
            for flat in flats:
                graph(tf.constant(flat))

    def _batch(self, flat: Any, stage: Stage) -> None:
        kept = [tf.identity(v.value) for v in self.trained] if stage.perturbed else []
        for value, v in zip(kept, self.trained, strict=False):
            v.assign(value * 1.25 + 0.5)
        used = [i for i in self.model.trained if i not in stage.absent]
        with tf.GradientTape() as tape:
            loss = self.net.total(flat, used)
            if self.model.scale is not None:
                loss = self.optimizer.scale_loss(loss)
        grads = self.tape(tape).gradient(loss, self.trained)
        for value, v in zip(kept, self.trained, strict=False):
            v.assign(value)
        self.optimizer.apply(grads, self.trained)


def is_update(done: int, passes: int) -> bool:
    """Whether the pass after ``done`` passes makes the step."""
    return (done + 1) % passes == 0


# Drawing


@st.composite
def models(draw: st.DrawFn, inners: Sequence[str]) -> Model:
    decay = draw(st.sampled_from([None, 0.25, 0.5]))
    inner = draw(st.sampled_from(list(inners)))
    excluded = draw(st.sampled_from([(), (), (2,), (0, 3)])) if decay else ()
    return Model(
        inner=inner,
        decay=decay,
        excluded=excluded,
        by_name=bool(excluded) and draw(st.booleans()),
        ema=draw(st.sampled_from([None, None, (0.5, None), (0.5, 1), (0.5, 2), (0.75, 3)])),
        clip=draw(st.sampled_from([None, None, ("clipnorm", 2.0), ("global_clipnorm", 4.0), ("clipvalue", 0.5)])),
        passes=draw(st.sampled_from([1, 1, 2])),
        scale=draw(st.sampled_from([None, None, (8.0, 2), (4.0, 1000)])),
        schedule=draw(st.sampled_from(["", "", "piecewise", "exponential"])),
        constrained=draw(st.sampled_from([(), (), (1,)])),
        frozen=draw(st.sampled_from([(), (), (0,), (2,)])),
        sparse=draw(st.sampled_from([False, False, True])),
    )


@st.composite
def stages(
    draw: st.DrawFn,
    model: Model,
    ranks: int,
    *,
    absent: bool,
    failures: Sequence[str],
    decays: Callable[[str], bool],
) -> tuple[Stage, ...]:
    """``decays`` says in which ways of running batches another weight decay is seen."""
    found: list[Stage] = []
    done = compared = 0
    way = draw(st.sampled_from(WAYS))
    for _ in range(draw(st.integers(2, 5))):
        if draw(st.integers(0, 3)) == 0:
            way = draw(st.sampled_from(WAYS))
        events: list[Event] = []
        for kind in draw(st.lists(st.sampled_from(["rate", "write", "reload", "retrace", "decay"]), max_size=2)):
            if kind == "rate" and not model.schedule:
                events.append(Rate(draw(st.sampled_from([RATE / 2, RATE * 2]))))
            elif kind == "decay" and model.decay and decays(way):
                events.append(Decay(draw(st.sampled_from([0.125, 0.5]))))
            elif kind == "write":
                events.append(Write(draw(st.integers(0, COUNT - 1))))
            elif kind == "reload":
                events.append(Reload())
            elif kind == "retrace":
                events.append(Retrace())
        batches = draw(st.integers(1, 4))
        in_fit = way.startswith("fit")
        fails = draw(st.sampled_from(["", "", *failures]))
        if fails == "rate" and (model.schedule or (in_fit and batches > 1)):
            fails = ""
        if fails and not is_update(done + batches - 1, model.passes):
            batches += 1
        if fails == "rate":
            batches = 1
            # Hyperparameters are compared from the second step on.
            fails = fails if compared and is_update(done, model.passes) else ""
        if fails == "nan" and 0 in model.frozen:
            fails = ""
        gone = draw(st.sampled_from([(), (), (), (1,), (2, 3)])) if absent and not in_fit and fails != "rate" else ()
        stage = Stage(
            events=tuple(events),
            way=way,
            batches=batches,
            at_once=draw(st.sampled_from([1, 1, 2])) if way == "fit" else 1,
            absent=tuple(i for i in gone if i not in model.frozen),
            perturbed=not in_fit and draw(st.integers(0, 3)) == 0,
            fails=fails,
            victim=draw(st.integers(0, ranks - 1)),
        )
        found.append(stage)
        if not stage.absent:
            compared += sum(is_update(done + k, model.passes) for k in range(batches))
        done += batches - (fails != "" and (model.scale is None or fails == "rate"))
    return tuple(found)
