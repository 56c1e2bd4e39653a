"""Runs a program as ranks on several hosts that this machine pretends to be: what would a slower network cost?

    python benchmarks/lab.py --hosts 4 --rate 100mbit python train.py --epochs 1

See ``ocomm/bench/_lab.py`` for what a host is. As over ssh, ranks have no variables of this environment: give theirs
with ``env NAME=VALUE python train.py``. Prints what each host sent.
"""

from __future__ import annotations

import argparse
import sys

from ocomm.bench._lab import Lab, LabError, why_not


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--slots", type=int, default=1, help="ranks on each host (default 1)")
    parser.add_argument("--rate", default="1gbit", help="of each host's cable; none for unshaped (default 1gbit)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which all is ended (default 600)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    args = parser.parse_args()
    if not args.command:
        parser.error("no program to run")
    if reason := why_not():
        print(f"lab: {reason}", file=sys.stderr)
        return 1
    try:
        with Lab(args.hosts, args.rate) as lab:
            before = lab.sent_bytes()
            command = lab.mpirun(args.hosts * args.slots, args.command, slots=args.slots)
            status = lab.run(command, args.timeout, capture=False).returncode
            for name, first, last in zip(lab.names, before, lab.sent_bytes(), strict=True):
                print(f"{name} sent {last - first} bytes")
            return status
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
