"""``python -m ocomm.predict``: dense and 1-bit step times for a cluster and a model, and which to use.

python -m ocomm.predict --nodes 8 --ranks-per-node 8 --rate 10gbit --parameters 110e6 --compute-ms 58
python -m ocomm.predict --parameters 336e6 --compute-ms 120 --gpu --table
python -m ocomm.predict --nodes 2 --ranks-per-node 1 --rate 50mbit --parameters 14e6 --compute-ms 150 --total-steps 5000
ocommrun -np 8 -H a:4,b:4 python -m ocomm.predict --probe --parameters 110e6 --compute-ms 58
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ocomm import api
from ocomm.bench._lab import bits_per_second
from ocomm.errors import OcommError
from ocomm.predict.methods import Place, candidates, fastest, table
from ocomm.predict.model import GPU, CodecTimes, Network, Training, advice, calibrated, compare
from ocomm.predict.probe import Probe, measure

_RATES = ("10gbit", "100gbit", "200gbit")
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ocomm.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--probe", action="store_true", help="as ranks of a job: measure network and kernels here, for ten seconds")
    add("--nodes", type=int, help="hosts (default 8; with --probe those of the job)")
    add("--ranks-per-node", type=int, help="ranks on each (default 8; with --probe those of the job)")
    add("--rate", default="10gbit", help="of each host's cable (default 10gbit)")
    add("--parameters", type=float, required=True, help="of the model, such as 110e6")
    add("--compute-ms", type=float, required=True, help="of a step on one rank without communication")
    add("--dense-bytes", type=float, default=4.0, help="per element of a dense gradient (default 4; 2 for fp16)")
    add("--backward", type=float, default=0.6, help="part of compute that can hide communication (default 0.6)")
    add("--last", type=float, default=0.05, help="part of the bytes whose gradient comes last (default 0.05)")
    add("--message-us", type=float, default=50.0, help="what one message costs a rank (default 50)")
    add("--node-gbytes", type=float, default=None, help="GB/s of a rank inside its node (default 5; with --gpu 200)")
    add("--dense-step-ms", type=float, help="measured; calibrates the network's efficiency")
    add("--total-steps", type=int, help="of a run with Adam: also prints how long it takes with each method")
    add("--max-loss-gap", type=float, default=0.005, help="loss above exact averages that a method may cost (0.005)")
    add("--gpu", action="store_true", help="compress on a GPU of 1.2 TB/s, not on a core")
    add("--table", action="store_true", help="8 to 4,096 ranks on 10 and 100 Gbit/s Ethernet and 200 Gbit/s")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and an advice."""
    parser = _parser()
    args = parser.parse_args(argv)
    if min(args.nodes or 1, args.ranks_per_node or 1) < 1 or not (args.dense_step_ms is None or args.dense_step_ms > 0):
        parser.error("nodes, ranks per node and step times are numbers above 0")
    if (args.total_steps is not None and args.total_steps < 1) or not args.max_loss_gap >= 0:
        parser.error("--total-steps is at least 1, and --max-loss-gap at least 0")
    try:
        training = Training(int(args.parameters), args.compute_ms / 1e3, args.dense_bytes, args.backward, args.last)
        inside = args.node_gbytes or (200.0 if args.gpu else 5.0)
        network = Network(bits_per_second(args.rate), args.message_us / 1e6, 1e9 * inside)
    except ValueError as error:
        parser.error(str(error))
    codec = GPU if args.gpu else CodecTimes()
    nodes, ranks_per_node = args.nodes or 8, args.ranks_per_node or 8
    if args.probe:
        try:
            api.init()
            probe = measure()
        except (ValueError, OcommError) as error:
            print(f"predict: {error}", file=sys.stderr)
            return 1
        is_teller = api.rank() == 0
        api.shutdown()
        if not is_teller:
            return 0
        network, codec = probe.network, probe.codec if not args.gpu else GPU
        nodes, ranks_per_node = args.nodes or probe.nodes, args.ranks_per_node or probe.ranks_per_node
        print(_found(probe))
    if args.dense_step_ms is not None:
        network = calibrated(network, training, nodes, ranks_per_node, args.dense_step_ms / 1e3, codec)
        print(f"the network works at {network.efficiency:.0%} of what its rate allows")
    if args.table:
        print(_table(ranks_per_node, training, network, codec))
        return 0
    predictions = compare(nodes, ranks_per_node, training, network, codec)
    rows = []
    for p in predictions.values():
        times = [1e3 * s for s in (p.step_s, p.wire_s, p.message_s, p.codec_s, p.hidden_s)]
        rows.append([p.method, *(f"{t:.1f}" for t in times), f"{p.nbytes / 1e6:.2f}", f"{p.messages:.0f}"])
    head = ["method", "step ms", "wire ms", "messages ms", "codec ms", "hidden ms", "MB per cable", "messages"]
    print(_columns([head, *rows]))
    print(advice(predictions))
    if args.total_steps is not None:
        place = Place(nodes, ranks_per_node, network, codec)
        found = candidates(place, training, args.total_steps, "Adam", args.max_loss_gap, {})
        print(f"{args.total_steps} steps with each method, and its loss above exact averages:")
        print(table(found, fastest(found)))
    return 0


def _found(probe: Probe) -> str:
    network, codec = probe.network, probe.codec
    found = [f"{probe.nodes} node(s) of {probe.ranks_per_node} rank(s)"]
    if probe.nodes > 1:
        found += [f"{network.rate / 1e6:.0f} Mbit/s per cable", f"{1e6 * network.message_s:.0f} us per message"]
        found.append(f"{1e3 * network.round_s:.1f} ms per round of answers")
    if probe.ranks_per_node > 1:
        found.append(f"{network.node_rate / 1e9:.2f} GB/s inside a node")
    elements = f"{1e9 * codec.compress:.2f} ns to compress an element, {1e9 * codec.dense:.2f} ns for a dense one"
    return "measured: " + ", ".join([*found, elements])


def _table(ranks_per_node: int, training: Training, network: Network, codec: CodecTimes) -> str:
    rows = [["ranks", "rate", *("dense", "flat", "hierarchical", "two-hop"), "advice"]]
    for rate in _RATES:
        for nodes in _SIZES:
            there = Network(bits_per_second(rate), network.message_s, network.node_rate, network.efficiency)
            predictions = compare(nodes, ranks_per_node, training, there, codec)
            times = [
                f"{1e3 * predictions[name].step_s:.1f}" if name in predictions else "-"
                for name in ("dense", "flat", "hierarchical", "two-hop")
            ]
            rows.append([str(nodes * ranks_per_node), rate, *times, advice(predictions).partition(":")[0]])
    return _columns(rows)


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
