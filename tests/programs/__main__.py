"""``python -m tests.programs [KIND] [--programs N] [--seed S] [--each | --first] [--where EXPRESSION]``"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.programs import KINDS, children
from tests.programs.laws import ProgramFails, law


def survey(kind: str, count: int, number: int, where: Callable[[Any], bool]) -> int:
    """Runs programs whether they fail or not, without making them small; returns how many fail."""
    results: list[bool] = []

    def body(program: object) -> None:
        failure = children.failure_of(kind, program)
        results.append(failure is not None)
        if failure is not None:
            print(f"FAILS\n{failure}\n    {program!r},\n", flush=True)

    law(kind, count, number, body, where)()
    print(f"{kind}: {sum(results)} of {len(results)} programs fail (--seed {number})")
    return sum(results)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("kind", nargs="?", choices=KINDS)
    parser.add_argument("--programs", type=int, default=200, help="how many programs are drawn")
    parser.add_argument("--seed", type=int, help="which ones; another number each time if it is left out")
    parser.add_argument("--each", action="store_true", help="run all, and only count and print those that fail")
    parser.add_argument("--first", action="store_true", help="leave the first one that fails as it was drawn")
    parser.add_argument("--where", default="True", help="which programs count, such as program.setup.kind == 'Birder'")
    chosen = parser.parse_args()
    expression = compile(chosen.where, "--where", "eval")

    def where(program: Any) -> bool:
        return bool(eval(expression, {"program": program}))

    number = secrets.randbits(32) if chosen.seed is None else chosen.seed
    if chosen.kind is None:
        print("\n".join(KINDS))
        return 0
    if chosen.each:
        return int(survey(chosen.kind, chosen.programs, number, where) > 0)
    began = time.monotonic()
    try:
        law(chosen.kind, chosen.programs, number, where=where, shrinks=not chosen.first)()
    except ProgramFails as failure:
        print(failure)
        print(f"again: python -m tests.programs {chosen.kind} --programs {chosen.programs} --seed {number}")
        return 1
    seconds = time.monotonic() - began
    print(f"{chosen.kind}: {chosen.programs} programs in {seconds:.0f} s (--seed {number})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
