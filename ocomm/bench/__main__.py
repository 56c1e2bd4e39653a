"""``python -m ocomm.bench <name> [options]``: runs the benchmark module of that name."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence

import ocomm.bench


def names() -> list[str]:
    """Returns the names of the benchmarks: the package's public modules."""
    return sorted(m.name for m in pkgutil.iter_modules(ocomm.bench.__path__) if not m.name.startswith("_"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a benchmark and returns its exit status, 0 if it returns none."""
    chooser = argparse.ArgumentParser(prog="python -m ocomm.bench", description="Benchmarks of ocomm.", add_help=False)
    chooser.add_argument("name", choices=names(), nargs="?")
    chooser.add_argument("-h", "--help", action="store_true")
    chosen, rest = chooser.parse_known_args(argv)
    if chosen.name is None:
        chooser.print_help()
        return 0 if chosen.help else 2
    if chosen.help:
        rest.append("--help")
    # Only the chosen module is imported, because another benchmark may need packages that are not installed.
    module = importlib.import_module(f"ocomm.bench.{chosen.name}")
    summary = (module.__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m ocomm.bench {chosen.name}", description=summary)
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(rest)) or 0)


if __name__ == "__main__":
    sys.exit(main())
