"""What an allreduce inside ``tf.function`` costs: CPU time of all threads of a process, per tensor.

    ocommrun -np 2 python benchmarks/tf_overhead.py

"beyond the graph": less the same graph without exchanges. "handed over": from TensorFlow to the thread that submits,
and back, without the runtime. NumPy's calls beside it are what the runtime costs every frontend.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from tabulate import tabulate

import ocomm
import ocomm_tf as hvd
from ocomm.operations import Operation
from ocomm_tf import mpi_ops


def cpu_us(runs: Sequence[Callable[[], object]], repeats: int, count: int) -> list[float]:
    """Per tensor, median of eight times ``repeats`` of each, in turns: a processor's clock changes within seconds."""
    for run in runs:
        for _ in range(5):
            run()
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(8):
        for run, spent in zip(runs, times, strict=True):
            started = time.process_time()
            for _ in range(repeats):
                run()
            spent.append((time.process_time() - started) / repeats / count * 1e6)
    return [median(spent) for spent in times]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--elements", type=int, default=64, help="float32 in each (default 64)")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    hvd.init()
    xs = [tf.ones([options.elements]) for _ in range(options.tensors)]
    arrays = [np.ones(options.elements, np.float32) for _ in xs]

    def nothing(session: Any, adapter: Any, tensors: Any, name: str | None) -> Operation:
        return Operation(None, lambda results: tensors)

    @tf.function
    def plain(xs: Any) -> Any:
        return [x * 2.0 for x in xs]

    @tf.function
    def handed(xs: Any) -> Any:
        calls = [mpi_ops.Exchange("allreduce", [x * 2.0], f"handed{k}", nothing) for k, x in enumerate(xs)]
        return [y for (y,) in mpi_ops.run(calls)]

    @tf.function
    def graph(xs: Any) -> Any:
        return [hvd.allreduce(x * 2.0, name=f"graph{k}") for k, x in enumerate(xs)]

    @tf.function
    def group(xs: Any) -> Any:
        return hvd.grouped_allreduce([x * 2.0 for x in xs], name="group")

    def by_numpy() -> None:
        for handle in [ocomm.allreduce_async(array, name=f"numpy{k}") for k, array in enumerate(arrays)]:
            ocomm.synchronize(handle)

    graphs = [partial(function, xs) for function in (plain, handed, graph, group)]
    base, *others, numpy = cpu_us([*graphs, by_numpy], options.repeats, options.tensors)
    rows = [["graph without exchanges", f"{base:.1f}", ""]]
    for name, spent in zip(("handed over", "graph", "group"), others, strict=True):
        rows.append([name, f"{spent:.1f}", f"{spent - base:.1f}"])
    rows.append(["NumPy's calls", f"{numpy:.1f}", ""])
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, {options.tensors} tensors of {options.elements} float32")
        print(tabulate(rows, ["", "us per tensor", "beyond the graph"], tablefmt="github", disable_numparse=True))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
