"""A rank of a job that looks at who listens: after init(), and after an exchange. Ranks write what they see to FOLDER.

    TEST_TOP=PID python rank_listening.py FOLDER

PID is the process at the head of the job.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

import ocomm
from tests.cluster.listeners import listeners, tree


def main(folder: str) -> None:
    seen = []
    ocomm.init()
    for _ in range(2):
        ocomm.barrier()  # nobody has left yet
        seen.append({pid: listeners(pid) for pid in tree(int(os.environ["TEST_TOP"]))})
        ocomm.barrier()
        ocomm.allreduce(np.ones(1 << 20, np.float32))
    Path(folder, str(ocomm.rank())).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
