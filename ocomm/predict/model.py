"""Time of a training step from bytes, messages and passes over memory; a pure function of numbers.

A step is compute (forward, backward, optimizer), what the codec adds to it, and communication. To unpack and apply
takes the place of the optimizer's own step, and costs about as much; of a dense gradient the codec is what packs it,
sums it and puts the average where it belongs. What sockets cost the processor is in the codec, too, since it computes
nothing else meanwhile:

    communication = bytes on the busiest cable / its payload rate + messages of one rank * time per message
    hidden        = min(what can overlap of communication, the part of backward that is left to hide it behind)
    step          = compute + codec + communication - hidden + the round of answers that every exchange waits for

Bytes are those of docs/algorithms.md. n ranks = N nodes of M; d parameters; B elements per scale; w bytes per element
of a dense gradient:

    dense         per cable and direction 2 w d (N-1)/N: a ring that crosses each cable once
    flat          M ranks that each send 2 d/8 (1 + 32/B) (n-M)/n beyond their node, in 2 (n-1) messages
    hierarchical  d/4 (1 + 32/B) (N-1)/N, in 2 (N-1) messages, after a dense reduce-scatter inside the node
    two-hop       1.5 times the bytes of hierarchical, in about 4 (sqrt(N)-1) messages: what is scattered goes twice
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ocomm.bench._lab import PAYLOAD_FRACTION
from ocomm.collectives.pipeline import SEGMENTS, SMALLEST_NBYTES, share_nbytes

BLOCK = 4096
#: Memory traffic of a dense element: into a fusion buffer and out of it, and about 6 bytes of an owner's sum.
DENSE_NBYTES = 22.0
METHODS = ("dense", "flat", "hierarchical", "two-hop")


@dataclass(frozen=True, slots=True)
class Network:
    """A network. ``rate``: bits per second of a node's cable. ``message_s``: what one message costs a rank, with
    waiting. ``node_rate``: bytes per second of a rank to the others of its node. ``efficiency``: that of large
    messages. ``round_s``: what a step waits for answers of other nodes, however little is sent: vote, scatter and
    gather, one after another.
    """

    rate: float
    message_s: float = 50e-6
    node_rate: float = 5e9
    efficiency: float = 1.0
    round_s: float = 0.0

    def __post_init__(self) -> None:
        if self.rate <= 0 or self.message_s < 0 or self.node_rate <= 0 or self.efficiency <= 0 or self.round_s < 0:
            raise ValueError("rates must be > 0, and what messages and rounds cost not below 0")

    @property
    def cable(self) -> float:
        """Payload bytes per second."""
        return PAYLOAD_FRACTION * self.rate / 8 * self.efficiency


@dataclass(frozen=True, slots=True)
class CodecTimes:
    """Seconds to compress an element, to add up one sign that a server has received, and for a dense element.

    ``codes``: of an element of a gradient that is averaged in codes of 8 or 4 bits, from end to end. ``socket``:
    seconds of the training processor per byte that a rank sends to or receives from other nodes. The default is one
    core of a server processor, as ``python -m ocomm.bench kernels`` measures it, with sockets fitted to steps over TCP.
    ``GPU`` is a device that moves 1.2 TB/s, and leaves sockets to the host.
    """

    compress: float = 0.5e-9
    average: float = 0.065e-9
    dense: float = DENSE_NBYTES / 30e9
    socket: float = 0.21e-9
    codes: float = 1.5e-9


GPU = CodecTimes(12.25 / 1.2e12, 0.25 / 1.2e12, DENSE_NBYTES / 1.2e12, 0.0, 28.0 / 1.2e12)


@dataclass(frozen=True, slots=True)
class Training:
    """``parameters``; ``compute_s`` of a step on one rank; ``dense_nbytes`` per element of a dense gradient.

    ``backward`` is the part of compute during which gradients are ready to be sent. ``last`` is the part of the bytes
    that comes with the last gradient (a tied embedding) and cannot be hidden. ``segments`` is the number of segments of
    an exchange. Raises ValueError for impossible values.
    """

    parameters: int
    compute_s: float
    dense_nbytes: float = 4.0
    backward: float = 0.6
    last: float = 0.05

    def __post_init__(self) -> None:
        if self.parameters < 1 or self.compute_s <= 0 or self.dense_nbytes <= 0:
            raise ValueError("parameters, compute and bytes of an element must be > 0")
        if not (0 <= self.backward <= 1 and 0 <= self.last <= 1):
            raise ValueError("backward and last are parts of a whole, from 0 to 1")

    @property
    def segments(self) -> int:
        """The number of segments of a 1-bit exchange."""
        return max(1, min(SEGMENTS, self.parameters // 8 // SMALLEST_NBYTES))


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for one method: seconds, bytes on the busiest cable, messages of one rank."""

    method: str
    step_s: float
    wire_s: float
    message_s: float
    codec_s: float
    hidden_s: float
    nbytes: float
    messages: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one exchange costs, whenever it takes place. ``nbytes``: on the busiest cable. ``inside``: bytes that a rank
    moves inside its node. ``messages``: of one rank. ``codec_s``: seconds of the codec and of sockets, beside the
    optimizer's own step.
    """

    nbytes: float
    inside: float
    messages: float
    codec_s: float

    def seconds(self, network: Network) -> tuple[float, float]:
        """Returns the seconds of its bytes, and of its messages."""
        return self.nbytes / network.cable + self.inside / network.node_rate, self.messages * network.message_s


def traffic(method: str, nodes: int, ranks_per_node: int, training: Training, codec: CodecTimes) -> Traffic:
    """Returns the traffic of an exchange by one of ``METHODS``. Raises ValueError for another method."""
    if method not in METHODS:
        raise ValueError(f"{method!r} is none of {', '.join(METHODS)}")
    n, m, d = nodes * ranks_per_node, ranks_per_node, training.parameters
    packed = d / 8 * (1 + 32 / BLOCK)
    inside = 0.0
    if method == "dense":
        nbytes = 2 * training.dense_nbytes * d * (nodes - 1) / nodes
        inside = 2 * training.dense_nbytes * d * (m - 1) / m
        messages = 2.0 * (nodes - 1) * training.dense_nbytes * d / nodes / share_nbytes(nodes)
        added = codec.dense * d * training.dense_nbytes / 4
    elif method == "flat":
        nbytes = m * 2 * packed * (n - m) / n
        inside = 2 * packed * (m - 1) / n
        messages = 2.0 * (n - 1) * training.segments
        added = codec.compress * d + codec.average * d
    else:
        crossings = 3 if method == "two-hop" else 2
        nbytes = crossings * packed * (nodes - 1) / nodes
        inside = 4 * d * (m - 1) / m + packed * (m - 1) / m
        peers = nodes - 1 if crossings == 2 else 2 * (math.sqrt(nodes) - 1)
        messages = (2 * peers + 2 * (m - 1)) * training.segments
        added = codec.compress * d / m + codec.average * d / m
    return Traffic(nbytes, inside, messages, added + codec.socket * 2 * nbytes / m)


def predict(
    method: str, nodes: int, ranks_per_node: int, training: Training, network: Network, codec: CodecTimes
) -> Prediction:
    """Predicts one of ``METHODS`` on ``nodes`` nodes of ``ranks_per_node`` ranks. Raises ValueError for another
    method.
    """
    sent = traffic(method, nodes, ranks_per_node, training, codec)
    wire, waiting = sent.seconds(network)
    added = sent.codec_s
    if nodes * ranks_per_node == 1:
        wire = waiting = 0.0
        added = 0.0 if method == "dense" else added
    hidden = hideable(wire + waiting, training)
    waiting += network.round_s * (nodes > 1)
    step = training.compute_s + added + wire + waiting - hidden
    return Prediction(method, step, wire, waiting, added, hidden, sent.nbytes, sent.messages)


def hideable(communication_s: float, training: Training) -> float:
    """Returns the part of an exchange's seconds that backward hides."""
    return min(communication_s * (1 - training.last), training.backward * training.compute_s)


def compare(
    nodes: int, ranks_per_node: int, training: Training, network: Network, codec: CodecTimes
) -> dict[str, Prediction]:
    """Returns predictions for every method that differs from the others on these nodes."""
    methods = list(METHODS)
    if ranks_per_node == 1:
        methods.remove("hierarchical")  # it is the same as flat
    if nodes < 9 or ranks_per_node == 1:
        methods.remove("two-hop")
    if nodes == 1:
        methods = ["dense", "flat"]
    return {method: predict(method, nodes, ranks_per_node, training, network, codec) for method in methods}


def advice(predictions: dict[str, Prediction]) -> str:
    """Returns a sentence about which method to use, and whether compression pays off at all."""
    dense = predictions["dense"]
    best = min(predictions.values(), key=lambda p: p.step_s)
    gain = dense.step_s / best.step_s
    if best.method == "dense" or gain < 1.05:
        return f"do not compress: dense takes {1e3 * dense.step_s:.1f} ms per step, and 1 bit would gain nothing here"
    return f"use {best.method}: {gain:.2f} times as fast as dense"


def calibrated(
    network: Network,
    training: Training,
    nodes: int,
    ranks_per_node: int,
    dense_step_s: float,
    codec: CodecTimes = CodecTimes(),
) -> Network:
    """Returns the network whose efficiency makes the dense step take the measured time; efficiency 1 if the step was
    faster.
    """
    low, high = 0.01, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        guess = predict("dense", nodes, ranks_per_node, training, replace(network, efficiency=middle), codec)
        low, high = (low, middle) if guess.step_s < dense_step_s else (middle, high)
    return replace(network, efficiency=high)
