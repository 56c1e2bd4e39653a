"""The vote of a step: what the ranks agree on before the step is taken.

In a round every rank sends a header, and nothing else, to all others. A step has one round, the vote, after its last
bucket: flags, hyperparameters, which gradients exist, a checksum of parameters. If gradients are clipped by their exact
norm, there is a round before the first bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ocomm.collectives.compressed import vote
from ocomm.collectives.engine import State, Ticket
from ocomm.collectives.outcome import cause
from ocomm.collectives.routes import vote_groups
from ocomm.collectives.waiting import wait
from ocomm.errors import MismatchError, OcommError
from ocomm.kernels.base import Bytes
from ocomm.optim.core import Core
from ocomm.optim.disagreement import disagreement
from ocomm.optim.flows import Flow, NodeFlow
from ocomm.optim.sketch import SKETCH_NBYTES, square_of_mean, write_sketch
from ocomm.optim.step_channel import StepChannel
from ocomm.types import Flag


class Statement(NamedTuple):
    """What this rank says in a round.

    ``step`` counts from 1. ``hyper`` is a hash of everything that must agree, ``lr`` is shown in messages,
    ``announcement`` is the coordinator's to all ranks, ``replica`` is a checksum of parameters. ``gradients`` is a
    checksum of this rank's own gradients, which need not be the same on all ranks; 0 for none. ``squares`` is the sum
    of squares of the averages that this rank alone has, which takes the place of its gradients'; None if all ranks have
    all averages.
    """

    step: int
    attempt: int
    hyper: int
    lr: float
    flags: int = 0
    announcement: int = 0
    replica: int = 0
    gradients: int = 0
    squares: float | None = None


class Round:
    """Headers, with presence bits of ``tensors`` and ``payload``, from every rank to all. ``signature`` says which
    round it is.
    """

    def __init__(self, wire: StepChannel, signature: int, tensors: int, payload: Bytes | None = None) -> None:
        self.segment_headers = wire.segment_headers([(signature, tensors)])
        (self.segment_header,) = self.segment_headers
        plan = vote(wire.rank, vote_groups(wire.nodes), self.segment_header, payload)
        self.prepared: Any
        self.prepared, self.sent = wire.prepare(plan)
        self.ticket: Ticket | None = None

    def tensors_of(self, segment: int) -> tuple[int, ...]:
        """Returns no tensors, because a round has no payload."""
        return ()


class Vote:
    """One rank's votes on the steps of ``core``. ``counted`` says which tensors count in norms; None for all."""

    def __init__(self, core: Core, wire: StepChannel, counted: Sequence[bool] | None = None) -> None:
        self._counted = counted
        self._core = core
        self._wire = wire
        #: What this rank sends in a round of sketches.
        self._sketch = np.zeros(SKETCH_NBYTES, np.uint8)
        layout = core.layout
        self._tensors = len(layout.tensors) if core.steps_locally else 0
        self._vote = Round(wire, layout.digest, self._tensors)
        #: The last round that was held.
        self.held = self._vote
        #: |g|^2 of the ranks' mean gradient, from the last round in which ranks sent sketches.
        self.square_of_mean = 0.0
        #: The sum over ranks of ``Statement.squares``, from the last round in which ranks sent them.
        self.square_of_average = 0.0
        #: Each rank's |g|, in rank order, from the last round in which ranks began a step again; NaN of a rank whose
        #: gradients are 16-bit.
        self.norms: list[float] = []
        #: True if all ranks had the same checksum of gradients in the last round, and had one.
        self.gradients_are_alike = False
        #: Bytes of the last round that was held.
        self.sent = self._vote.sent

    @property
    def presence(self) -> Bytes:
        """Bits that say which gradients this rank has, for a core that steps locally; ``hold`` sends them."""
        return self._vote.segment_header.presence

    @cached_property
    def _early_round(self) -> Round:
        """The round of sketches, before anything is posted."""
        return Round(self._wire, self._core.layout.digest ^ 1, 0, self._sketch)

    @cached_property
    def _vote_with_sketch(self) -> Round:
        return Round(self._wire, self._core.layout.digest ^ 2, self._tensors, self._sketch)

    @property
    def present(self) -> Bytes:
        """The presence bits of all ranks, OR-ed, as heard."""
        return self.held.segment_header.heard

    def ranks_with(self, flags: Flag) -> list[int]:
        """Returns the world ranks that set one of ``flags`` in the last round that was held."""
        return [self._wire.ranks[rank] for rank in self.held.segment_header.ranks_with(flags)]

    def hold(self, said: Statement, flows: Sequence[Flow] | None, with_norm: bool) -> int:
        """Sends ``said`` to all ranks, and waits for their statements and for ``flows``. Collective.

        Args:
            said: What this rank says.
            flows: The flows of the step; None for a round before anything is posted.
            with_norm: Whether ranks also send sketches, which sets ``square_of_mean``.

        Returns:
            The flags of all ranks.

        Raises:
            HorovodInternalError: The exchange failed: MismatchError, StallError or PeerError.
        """
        wire, core = self._wire, self._core
        held = self.held = self._early_round if flows is None else self._vote_with_sketch if with_norm else self._vote
        self.sent = held.sent
        header = held.segment_header.header
        held.segment_headers.begin(said.step, said.attempt, said.hyper, said.announcement, said.lr)
        header["flags"], header["replica"] = said.flags, said.replica
        header["gradients"] = said.gradients
        for flow in flows or ():
            if isinstance(flow, NodeFlow):
                for heard in flow.segment_headers:
                    if heard.has_disagreement:
                        header[0] = heard.passed_on[0]
        sends_norm = said.attempt > 0 and said.squares is None
        if said.squares is not None:
            header["squares"] = said.squares
        elif sends_norm:  # read while what has been posted travels; in float64, tensor by tensor in registration order
            are_16_bit = core.gradients["grad_dtype"].any()  # on a device, where nothing is clipped by norms
            header["squares"] = math.nan if are_16_bit else self.squares(core.gradients["grad"])
        else:
            header["squares"] = 0.0
        if held is not self._vote and flows is not None:
            held.segment_header.presence[:] = self.presence
        sketches = with_norm and len(wire.ranks) > 1
        if sketches:
            addresses = self._counting(core.gradients["grad"])
            write_sketch(core.kernels.sketch(addresses, core.layout.numels, core.sketch_seed), self._sketch)
        parts: list[Flow | Round] = [*(flow for flow in flows or () if flow.ticket is not None), held]
        held.ticket = wire.channel.submit(held.prepared, wire.timeout_s, False)
        what = f"{wire.name}: step {said.step}"
        tickets = [part.ticket for part in parts if part.ticket is not None]
        states = [wait(ticket, wire.channel, wire.ranks, wire.watch, what) for ticket in tickets]
        if any(state != State.DONE for state in states):
            raise self._failed(parts, tickets, what, said.step)
        self.gradients_are_alike = said.gradients > 0 and set(held.segment_header.gradients()) == {said.gradients}
        squares = held.segment_header.squares() if sends_norm else []
        self.norms = [math.sqrt(square) for square in squares]
        if sketches:
            self.square_of_mean = square_of_mean(held.segment_header.payloads)
        elif with_norm:
            self.square_of_mean = self.squares(core.gradients["grad"])
        if said.squares is not None:
            self.square_of_average = sum(held.segment_header.squares())
        return int(wire.heard_flags[0])

    def squares(self, addresses: NDArray[np.uint64]) -> float:
        """Returns |x|^2 over the tensors that count, of which x has the elements at ``addresses``, 0 for none."""
        return sum(self._core.kernels.squares(self._counting(addresses), self._core.layout.numels).tolist())

    def _counting(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns the addresses of tensors that count in norms, 0 for others."""
        return addresses.copy() if self._counted is None else np.where(self._counted, addresses, np.uint64(0))

    def _failed(self, parts: Sequence[Flow | Round], tickets: Sequence[Ticket], what: str, step: int) -> OcommError:
        failed = cause(tickets)
        assert failed is not None
        part = parts[tickets.index(failed)]

        def mismatch() -> MismatchError:
            tensors, segment = self._core.layout.tensors, failed.error_segment
            names = [tensors[tensor].name for tensor in part.tensors_of(segment)]
            # Headers of a flow are about this step alone.
            settings = self._core.hyper_text if isinstance(part, Round) else Core.hyper_text
            header, advice = part.segment_headers[segment], self._core.rate_advice
            return disagreement(self._wire.name, step, header, self._wire.ranks, names, settings, advice)

        return self._wire.explain(failed, what, mismatch, self._core.kernels.name)
