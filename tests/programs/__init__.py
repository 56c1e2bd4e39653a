"""Laws for every script: a random program, run beside an oracle, leaves what the oracle leaves.

A ``Program`` is a value: settings, and what the script of each rank does in each step. Hypothesis draws programs and
shrinks those that fail; ``str(program)`` is the script for a person to read, ``repr(program)`` the line that
``regressions`` keeps. Each program runs in a process of its own (``children``), where ranks are threads. So a crash or
a hang is a failure like any other.

    python -m tests.programs                              the kinds
    python -m tests.programs KIND --programs 2000         new ones
    python -m tests.programs KIND --seed 7                the same ones again

A kind of program is a module with three names, and a line in ``KINDS``:

    programs()      a Hypothesis strategy of programs
    run(program)    runs one; raises AssertionError that says what does not hold
    FEW             the number of programs that ``make test`` runs; 0: only ``make test-long`` runs some

and others, if it needs them:

    NEEDS           the names of packages that ``make test`` does not install
    DEADLINE_S      the seconds of a program, if they are more than those of ``children``
"""

from __future__ import annotations

#: The modules of this folder that are a kind of program.
KINDS = (
    "collectives",
    "elastic",
    "torch_compressed",
    "torch_dense",
    "torch_diloco",
    "torch_distributed",
    "keras_dense",
    "keras_compressed",
    "lightning",
    "huggingface",
)
