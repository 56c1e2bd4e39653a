"""Measures how long each kind of step takes at each rate and delay: ``benchmarks.step``, once per network.

    python -m benchmarks.time_to_loss.steps [--rate 10mbit ...] [--delay 0 50 ...]

What ``steps.json`` has already is not measured again. What would take longer than LONGEST_S per step is
not measured, and neither is what begins with dense steps of more than LONGEST_DENSE_S: ``join`` computes it from
the bytes, of which a faster network's row knows the number.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import turns
from benchmarks.step import DEEPSPEED, HIVEMIND, METHODS, can_import
from benchmarks.time_to_loss.losses import RESULTS
from ocomm.bench._lab import PAYLOAD_FRACTION, bits_per_second

STEPS_FILE = RESULTS / "steps.json"
#: Bits per element that a step of a row sends to another host, of 2: for what is not measured.
BITS = {
    "local-muon": 0,
    "ddp": 32,
    "ddp-bf16": 16,
    "powersgd": 1,
    "deepspeed": 1,
    "hivemind": 8,
    "dense": 32,
    "int8": 8,
    "int4": 4,
    "onebit": 1,
    "zero-one": 1,
    "birder": 1,
    "onebit-warm-8": 8,
    "diloco-32": 32,
    "diloco-4": 4,
    "diloco-1": 1,
}
NETWORKS = (
    *(("850mbit", 0.0), ("160mbit", 0.0), ("50mbit", 0.0), ("10mbit", 0.0), ("1mbit", 0.0)),
    # Delays are made by a process, which does not keep up with 850 Mbit/s.
    *((rate, delay) for rate in ("160mbit", "50mbit", "10mbit") for delay in (50.0, 100.0)),
)
LONGEST_S, LONGEST_DENSE_S = 30.0, 100.0
#: Rows whose first steps are dense.
BEGIN_DENSE = ("powersgd", "deepspeed", "onebit", "zero-one")
PARAMETERS = 13.8e6
DEEPSPEED_DELAYED = ("160mbit", 50.0)


def rows_at(rate: str, delay: float) -> list[str]:
    """The rows whose steps are short enough to be measured."""
    bit_s = PARAMETERS / PAYLOAD_FRACTION / bits_per_second(rate)
    is_dense_short = 32 * bit_s <= LONGEST_DENSE_S
    rows = [
        name for name, bits in BITS.items() if bits * bit_s <= LONGEST_S and (is_dense_short or name not in BEGIN_DENSE)
    ]
    # DeepSpeed waits for several messages per tensor: with a delay a step takes half a minute. One network has to do.
    return [name for name in rows if name != "deepspeed" or not delay or (rate, delay) == DEEPSPEED_DELAYED]


def measure(rate: str, delay: float, methods: Sequence[str]) -> list[dict[str, Any]]:
    """The results of ``benchmarks.step``. CalledProcessError if it fails, as where no lab can be had."""
    words = ["--rounds", "3", "--steps", "2", "--warmup", "4", "--timeout", "3000", "--methods", *methods]
    found = turns.ask("benchmarks.step", rate, delay, words)
    return [{**result, "about": found["about"]} for result in found["results"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", nargs="+", help="default: all")
    parser.add_argument("--delay", nargs="+", type=float, help="default: all")
    args = parser.parse_args()
    results = json.loads(STEPS_FILE.read_text())["results"] if STEPS_FILE.exists() else []
    known = {(each["rate"], each.get("delay_ms", 0.0), row["method"]) for each in results for row in each["rows"]}
    without = [name for name, module in (("deepspeed", DEEPSPEED), ("hivemind", HIVEMIND)) if not can_import(module)]
    for rate, delay in NETWORKS:
        asked = (not args.rate or rate in args.rate) and (args.delay is None or delay in args.delay)
        rows = [name for name in rows_at(rate, delay) if name not in without]
        missing = [name for name in rows if (rate, delay, METHODS[name][0]) not in known]
        if asked and missing:
            results += measure(rate, delay, missing)
            STEPS_FILE.parent.mkdir(parents=True, exist_ok=True)
            STEPS_FILE.write_text(
                json.dumps({"methods": {n: METHODS[n][0] for n in BITS}, "results": results}, indent=1)
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
