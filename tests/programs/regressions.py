"""Programs that once failed, by kind: each is a line that a search has printed."""

from __future__ import annotations

from typing import Any

from tests.programs import huggingface, lightning

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

#: By the name of the kind.
FOUND: dict[str, list[Any]] = {"lightning": [_LIGHTNING], "huggingface": [_HUGGINGFACE]}
