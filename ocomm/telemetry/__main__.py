"""``python -m ocomm.telemetry merged.json trace.json trace.*.json`` merges the timelines of all ranks into one file."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ocomm.telemetry.timeline import merge


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    into, *files = arguments
    try:
        print(f"{into}: {merge(into, files)} events of {len(files)} files")
    except OSError as error:
        print(f"ocomm.telemetry: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
