"""Programs that once failed, by kind: each is a line that a search has printed."""

from __future__ import annotations

from typing import Any

from tests.programs import huggingface, lightning
from tests.programs import keras_compressed as compressed
from tests.programs import keras_dense as dense
from tests.programs import torch_compressed as torchs
from tests.programs import torch_dense as denses
from tests.programs.keras_scripts import Model, Stage

_WHOLE = ((3, 2, 1, 0),)
_TWO, _THREE, _FOUR = ((_WHOLE,) * ranks for ranks in (2, 3, 4))
_TORCH_COMPRESSED = (
    # An optimizer that is dropped while its node's sums are under way.
    torchs.Program(
        torchs.Setup("Lion", 4, 2, bucket_numel=1 << 17), (torchs.Step(_FOUR), torchs.Step(_FOUR, end="drop"))
    ),
    torchs.Program(
        torchs.Setup("1-bit Adam, compressed", 4, 2, "native"),
        (*[torchs.Step(_FOUR)] * 4, torchs.Step(_FOUR, end="drop")),
    ),
    # The headers of a sharded step of many segments, in lanes that are used again.
    *[
        torchs.Program(
            torchs.Setup("1-bit Adam, dense", 3, block_size=16, shard_state=True, bucket_numel=1 << 17),
            (torchs.Step(_THREE), torchs.Step(_THREE, end="nan", victim=1)),
            seed,
        )
        for seed in range(4)
    ],
    # A parameter whose decay is coupled, and one in 16 bits, that are perturbed for a backward pass.
    *[
        torchs.Program(
            torchs.Setup("EF-SGD", low=low, decay=0.25),
            (torchs.Step(_TWO), torchs.Step(_TWO, before=(torchs.Perturb(how, own),)), torchs.Step(_TWO)),
        )
        for low in ((), (0, 1, 2, 3))
        for how, own in (("add_", False), ("data", True))
    ],
    *[
        torchs.Program(
            torchs.Setup("int8", low=low),
            (*[torchs.Step(_TWO, before=(torchs.Perturb("data", True),))] * 3, torchs.Step(_TWO)),
        )
        for low in ((), (0, 1, 2, 3))
    ],
    # In codes, a 16-bit parameter that is written after backward.
    torchs.Program(
        torchs.Setup("int8", low=(0,)),
        (torchs.Step(_TWO, between=(torchs.Write(0, "copy_"),)), torchs.Step(_TWO)),
    ),
    # In codes, what is written long after masters were loaded has some elements that these round to.
    torchs.Program(
        torchs.Setup("int8", low=(0, 1, 2)),
        (
            torchs.Step(_TWO),
            torchs.Step(_TWO, before=(torchs.Reload(True),)),
            torchs.Step(_TWO, before=tuple(torchs.Write(at, "copy_") for at in range(3))),
        ),
        6,
    ),
    # What gradients are compressed with is changed after backward, where a rank had no gradient.
    *[
        torchs.Program(
            torchs.Setup(kind),
            (*[torchs.Step(_TWO)] * 2, torchs.Step((_WHOLE, ((),)), between=(torchs.Hyper(what, value),))),
        )
        for kind, what, value in (("EF-SGD", "lr", 0.02), ("0/1 Adam", "beta", 0.8))
    ],
    # Gradients in 16 bits on a device, which are widened once they are clipped by their norm.
    torchs.Program(
        torchs.Setup("1-bit Adam, compressed", low=(1, 2), max_grad_norm=0.5, place="device"),
        (torchs.Step(_TWO), torchs.Step(_TWO)),
    ),
    # A rank of which half a node's sum is NaN, while its own gradients are not.
    torchs.Program(
        torchs.Setup("0/1 Adam, local steps", 4, 2),
        (*[torchs.Step(_FOUR)] * 3, torchs.Step(_FOUR, end="nan")),
        270,
    ),
    # Parameters in 16 bits that are written after the wrap, and a first step that a rank begins in step().
    torchs.Program(
        torchs.Setup("Birder", low=(0,)), (torchs.Step((_WHOLE, ((),)), before=(torchs.Write(0, "new data"),)),)
    ),
)

_EVERYTHING = ((denses.EVERYTHING,),) * 2
_TORCH_DENSE = (
    # A replaced optimizer that lives on averaged the gradients of a rank that trains alone now.
    denses.Program(
        denses.Setup(),
        (denses.Step(_EVERYTHING), denses.Step(_EVERYTHING, before=(denses.Replace((1,), keep=True),))),
    ),
)

#: Ends of Lightning's fits that are no syncs of 0/1 Adam, and numbers of steps that are not the Trainer's.
_LIGHTNING = (
    lightning.Program(batches=8, fits=(lightning.Fit(epochs=2), lightning.Fit(epochs=3))),
    lightning.Program("onebit_adam", batches=8, fits=(lightning.Fit(epochs=4), lightning.Fit(epochs=4))),
    lightning.Program(batches=7, fits=(lightning.Fit(epochs=4, stop=18),)),
    lightning.Program(batches=7, fits=(lightning.Fit(epochs=4, accumulate=((0, 1), (2, 3))),)),
    lightning.Program(batches=7, manual=2, fits=(lightning.Fit(epochs=3),)),
    lightning.Program(
        batches=7, ddp=True, fits=(lightning.Fit(epochs=2), lightning.Fit("checkpoint", epochs=2), lightning.Fit())
    ),
)
#: Trials of a search, a second ``train()``, and one after an out-of-memory error.
_HUGGINGFACE = (
    huggingface.Program("onebit_adam", (("overlap", False),), 1.0, 20, trainings=(huggingface.Training("trial", 2),)),
    huggingface.Program(rows=20, trainings=(huggingface.Training("trial", 2), huggingface.Training(epochs=2))),
    huggingface.Program(rows=20, trainings=(huggingface.Training(epochs=2), huggingface.Training(epochs=3))),
    huggingface.Program(rows=28, trainings=(huggingface.Training(epochs=3, fails=5),)),
    huggingface.Program(rows=28, trainings=(huggingface.Training(epochs=3, stop=11),)),
)

#: Steps of Keras in graphs that are refused: what else was done than to apply averages.
_KERAS_DENSE = (
    dense.Program(dense.Setup(Model(decay=0.25), kind="int8"), (Stage(way="graph", fails="nan"),)),
    dense.Program(
        dense.Setup(Model()),
        (Stage(way="graph", batches=2), Stage(way="graph", fails="rate"), Stage(way="graph")),
    ),
    dense.Program(
        dense.Setup(Model(passes=2), kind="int4", horovod=True),
        (Stage(way="graph", batches=3), Stage(way="graph", fails="nan"), Stage(way="graph", batches=2)),
    ),
    dense.Program(
        dense.Setup(Model(schedule="exponential"), kind="int8"),
        (Stage(way="loop", batches=4, fails="nan"), Stage(way="loop", batches=4)),
    ),
    # A step that was counted changed when averages of variables are taken over: by 1.1 after a first step.
    dense.Program(
        dense.Setup(Model(ema=(0.9, 2)), kind="int8"), (Stage(way="graph", fails="nan"), Stage(way="graph", batches=6))
    ),
    # Rows of two ranks for one index were squared and clipped each by itself.
    dense.Program(dense.Setup(Model("adam", sparse=True)), (Stage(batches=3),)),
    dense.Program(
        dense.Setup(Model(clip=("clipnorm", 1.0), sparse=True), tape=True, ranks=3), (Stage(way="graph", batches=3),)
    ),
    # The errors of codes had changed.
    dense.Program(dense.Setup(Model(), kind="int4"), (Stage(batches=2), Stage(fails="rate"), Stage(batches=3))),
)

_KERAS_COMPRESSED = (
    # A sync moved a variable without a gradient, and Keras did not learn of it.
    compressed.Program(
        compressed.Setup(Model("adam"), "0/1 Adam, local steps"), (Stage(batches=4), Stage(batches=6, absent=(1,)))
    ),
    compressed.Program(
        compressed.Setup(Model(ema=(0.9, 1)), "EF-SGD"),
        (Stage(way="graph", fails="nan"), Stage(way="graph", batches=6)),
    ),
    compressed.Program(
        compressed.Setup(Model("adam", ema=(0.5, 3), scale=(8.0, 2)), "1-bit Adam"),
        (Stage(way="graph", batches=2), Stage(way="graph", fails="rate")),
    ),
)

#: By the name of the kind.
FOUND: dict[str, list[Any]] = {
    "torch_compressed": [*_TORCH_COMPRESSED],
    "torch_dense": [*_TORCH_DENSE],
    "lightning": [_LIGHTNING],
    "huggingface": [_HUGGINGFACE],
    "keras_dense": [*_KERAS_DENSE],
    "keras_compressed": [*_KERAS_COMPRESSED],
}
