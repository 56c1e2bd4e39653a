"""One rank's steps of an optimizer core: gradients become ready, are exchanged, and all ranks take the step or none
does.

A frontend tells ``buckets`` that a gradient is ready (``mark_ready``, from a hook, while backward goes on) and calls
``exchange`` in its ``step()``. Buckets (``buckets``) are posted in a fixed order; ``flows`` has what they exchange,
``vote`` what the ranks agree on. Nothing that the exchange writes is in use before all ranks have agreed: flags are
OR-ed over the ranks. If any is set all ranks discard the step, and skip it or do it again without overlap.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ocomm.collectives.bridge import IntraNode
from ocomm.collectives.engine import Channel
from ocomm.collectives.pipeline import Cut
from ocomm.collectives.waiting import Watch, wait
from ocomm.errors import HorovodInternalError, InvalidRequestError, NonFiniteError, OcommError
from ocomm.kernels.base import Floats
from ocomm.optim.buckets import Buckets, Locate
from ocomm.optim.core import Bools, Core, address
from ocomm.optim.flows import Flows, ShardedFlow
from ocomm.optim.grid import EARLY, FINAL, GridVote
from ocomm.optim.non_finite import non_finite_ranks
from ocomm.optim.replicas import ReplicaWindows
from ocomm.optim.step_channel import Sent, StepChannel
from ocomm.optim.traffic import Traffic
from ocomm.optim.verdict import FLAGS_OF, VERDICTS, StepOutcome
from ocomm.optim.vote import Statement, Vote
from ocomm.types import Flag

_log = logging.getLogger("ocomm")
_UNPOSTED, _AVERAGE, _RELEASED = int(Flag.UNPOSTED), int(Flag.AVERAGE), int(Flag.RELEASED)
#: What ends a step of which nothing was posted, so that nothing can have changed since.
_ENDS = int(Flag.SKIP | Flag.RAISED | Flag.NON_FINITE)


class NormOf(enum.Enum):
    """What ``exchange`` sets ``norm`` to the norm of; in a grid that of all parts."""

    NOTHING = "nothing"
    #: The mean of the ranks' gradients, from sketches.
    GRADIENTS = "gradients"
    #: The averages of tensors that travel dense.
    AVERAGES = "averages"


class Stepper:
    """Exchanges the gradients of ``core``'s layout over ``channel``, step by step, on one rank.

    Args:
        name: The optimizer's name in messages.
        core: The optimizer.
        channel: The channel of the optimizer's steps.
        ranks: The world ranks of the set, for messages.
        watch: What a waiting thread looks at.
        locate: ``locate(tensors, final)`` returns the addresses of their gradients at this moment, 0 for none:
            contiguous float32, or on a device of the types in ``core.gradients``. Before ``step()`` (``final`` False)
            it may return None if they must not be read yet. It is called from hooks, and returns a list because that
            costs less than an array.
        cut: How exchanges are cut.
        overlap: Whether buckets are posted before ``step()``, after a first step without overlap.
        verify: How much of a gradient is read again, as ``Buckets`` says.
        timeout_s: Deadline of a step in seconds, 0 for none.
        replicas: What each step compares; None for nothing.
        direct: Whether messages go from device to device.
        intra_node: What carries dense values inside nodes.
        grid: Holds the vote of the grid of which ``ranks`` are the data axis; None without other axes.
    """

    def __init__(
        self,
        name: str,
        core: Core,
        channel: Channel,
        ranks: Sequence[int],
        watch: Watch,
        locate: Locate,
        *,
        cut: Cut,
        overlap: bool,
        verify: str,
        timeout_s: float,
        replicas: ReplicaWindows | None = None,
        direct: bool = False,
        intra_node: IntraNode | None = None,
        grid: GridVote | None = None,
    ) -> None:
        self.name = name
        self.core = core
        self._grid = grid
        #: The norm of the average, from the last round in which ranks sent sketches, or of averages that this rank
        #: has; in a grid that of all parts.
        self.norm = 0.0
        self.overlap = overlap
        self.overlapping = False  # switched on after a first step without
        self.traffic = Traffic()
        self.step = 0  # number of steps that were committed or skipped
        self.begun = False
        #: Tensors that had a gradient on some rank in the last step.
        self.present_anywhere: Bools = np.zeros(len(core.layout.tensors), np.bool_)
        #: True if the vote carries a checksum of each rank's gradients.
        self.looks_at_gradients = False
        #: False if the frontend releases gradients that were read, so that this rank cannot exchange a step again.
        self.keeps_gradients = True
        self._replicas = replicas
        #: False if the ranks' parameters may differ in their last digits.
        self.compares_replicas = replicas is not None
        #: Flags of this rank other than those of its gradients; ``object`` sets them.
        self.objections = 0
        #: The world ranks that said in the last vote that a step of theirs without one has changed nothing.
        self.idle_ranks: list[int] = []
        #: The ranks that skipped the last step that was skipped, with places in a grid; "" if none was.
        self.skipped_by = ""
        #: The last step, in exchanges, of which replicas were compared.
        self._compared = -1
        #: What the next vote says of replicas, after ``note_replicas``; None: what they are in the vote.
        self.noted_replica: int | None = None
        self._hyper = 0
        self._early_sent: list[Sent] = []  # what the current step has sent before its exchange
        self._dead: OcommError | None = None
        self._dense_bytes = core.layout.dense_bytes(core.rank)
        self.wire = StepChannel(
            name, channel, ranks, core.rank, core.layout.nodes, watch, timeout_s, direct=direct, intra_node=intra_node
        )
        self.flows = Flows(core, self.wire, cut)
        self.buckets = Buckets(self.flows, self.wire, locate, verify)
        self._vote = Vote(core, self.wire, None if grid is None else grid.counted)
        self.wire.enter(core.param_memory)

    # Before step()

    def begin(self, hyper: int, early: bool = True) -> None:
        """Opens the next step. ``hyper`` is a hash of what gradients are compressed with: betas and coupled decay.

        ``early``: buckets may be posted before ``step()``, if the stepper overlaps at all.
        """
        if self._dead is not None:  # without a call, because this is on the way to the first hook of each step
            self.require_alive()
        self.begun = True
        self._early_sent = []
        self.objections = 0
        self._hyper = hyper
        self.wire.flags[0] = self.wire.heard_flags[0] = self.wire.announcement[0] = 0
        self.buckets.begin(self.step, 0, early and self.overlapping)

    def require_alive(self) -> None:
        """Raises the error of an earlier step, after which there can be no other."""
        if self._dead is not None:
            raise type(self._dead)(*self._dead.args)

    def object(self, flag: Flag) -> None:
        """Sets a flag of this rank: all ranks will discard the step, or do it again."""
        self.objections |= int(flag)

    # The exchange

    def agree_on_norm(self, hyper: int, lr: float) -> StepOutcome | None:
        """Exchanges sketches and sets ``norm``, before the exchange of gradients that are to be clipped. Collective.

        For a step of which nothing has been posted. ``hyper`` is a hash of what gradients will be compressed with;
        ``lr`` is shown in messages. Returns None, or what all ranks do with the step if one of them skips it: then it
        is over. Raises MismatchError, StallError, PeerError.
        """
        assert self.begun and not self.buckets.posted
        self._hyper = hyper  # no rank posts anything before step(): all decide so, without a message
        try:
            self.buckets.locate_all()
            heard = self._vote.hold(Statement(self.step + 1, 0, self._hyper, lr, self.objections), None, True)
            self.norm = math.sqrt(self._vote.square_of_mean)
            outcome = VERDICTS[heard & _ENDS]
            if self._grid is not None:
                outcome = self._agree_in_grid(self._grid, EARLY, outcome, self._vote.square_of_mean)
        except BaseException as error:
            self.give_up(error, EARLY)
            raise
        self._early_sent.append(self._vote.sent)
        if outcome not in (StepOutcome.SKIP, StepOutcome.OVERFLOW):
            return None
        self.begun = False
        return self._conclude(outcome, self._early_sent, 0.0)

    def _agree_in_grid(self, grid: GridVote, attempt: int, outcome: StepOutcome, squares: float | None) -> StepOutcome:
        """Returns the outcome for all ranks of the grid; ``outcome`` is that of this data axis. Sets ``norm`` to the
        root of ``squares``, summed over the grid, unless that is None.
        """
        heard = grid.hold(self.step + 1, attempt, FLAGS_OF[outcome], squares or 0.0, self.heard_announcement)
        self._early_sent.append(grid.sent)
        self.wire.announcement[0] = grid.announcement
        if squares is not None:
            self.norm = math.sqrt(grid.total)
        return VERDICTS[heard]

    def _squares(self, norm_of: NormOf, said: Statement) -> float:
        """Returns the square of the norm that ``norm_of`` names, after the vote in which this rank has ``said``."""
        if norm_of is NormOf.GRADIENTS:
            return self._vote.square_of_mean
        return self._average_squares() if said.squares is None else self._vote.square_of_average

    def _average_squares(self) -> float:
        """Returns |g|^2 of the averages of tensors that traveled dense and have a gradient on some rank."""
        addresses = np.zeros(len(self.core.layout.tensors), np.uint64)
        for tensor in np.flatnonzero(self.core.exchange().dense & self.present_anywhere).tolist():
            if self.core.layout.numels[tensor]:
                addresses[tensor] = address(self.average(tensor))
        return self._vote.squares(addresses)

    def sum_over_grid(self, value: float) -> float:
        """Returns the sum of a number over the parts of the grid, after a step. Collective in a grid, where it raises
        what ``exchange`` raises.
        """
        return value if self._grid is None else self._grid.sum(self.step, value)

    def exchange(
        self,
        hyper: int,
        hyper_now: int,
        lr: float,
        announcement: int,
        again: Callable[[], None],
        norm_of: NormOf = NormOf.NOTHING,
    ) -> StepOutcome:
        """Ends the step's exchange on all ranks: posts what is left, votes, and waits; commits nothing. Collective.

        Args:
            hyper: Hash of what gradients are compressed with.
            hyper_now: Hash of everything that must agree, with lr.
            lr: The learning rate, for messages.
            announcement: The coordinator's announcement to all ranks.
            again: Called before gradients are compressed with ``hyper`` in a step that was begun with another one, or
                a second time, to set the current hyperparameters.
            norm_of: What ``norm`` is set to the norm of.

        Returns:
            What all ranks do with the step.

        Raises:
            NonFiniteError: A gradient is not finite; on all ranks, nothing was changed.
            InvalidRequestError: The step would have to be exchanged again, and a rank has released its gradients; on
                all ranks, nothing was changed.
            MismatchError: The ranks disagree.
            StallError: A rank did not come in time.
            PeerError: A rank raised, left or died.
        """
        started = time.perf_counter()
        if not self.begun:
            self.begin(hyper)
        if hyper != self._hyper:
            if self.buckets.early:  # some rank may have posted a bucket
                self.object(Flag.CHANGED | Flag.HYPER)
            else:
                again()
                self._hyper = hyper
        try:
            finish = partial(self._finish, hyper_now, lr, announcement, norm_of is NormOf.AVERAGES)
            said = finish(0)
            heard = self._vote.hold(said, self.flows.flows, norm_of is NormOf.GRADIENTS)
            outcome = VERDICTS[heard]
            if outcome is StepOutcome.AGAIN:
                again()
                said, heard = self._exchange_again(heard, hyper, finish, norm_of)
                outcome = VERDICTS[heard]
            self.idle_ranks = self._vote.ranks_with(Flag.IDLE) if heard & Flag.IDLE else []
            self._hear()
            if outcome is StepOutcome.TAKE and not all(flow.is_finite() for flow in self.flows.flows):
                outcome = StepOutcome.NON_FINITE
            changed_at = ""
            if outcome is StepOutcome.REFUSE:
                changed_at = f"on rank(s) {self._vote.ranks_with(Flag.CHANGED | Flag.UNPOSTED)}"
            squares = None
            if norm_of is not NormOf.NOTHING:
                squares = self._squares(norm_of, said)
                self.norm = math.sqrt(squares)
            if self._grid is not None:
                outcome = self._agree_in_grid(self._grid, FINAL, outcome, squares)
                if outcome is StepOutcome.REFUSE and not changed_at:
                    changed_at = f"at {', '.join(self._grid.places_with(Flag.RELEASED))} of the grid"
        except BaseException as error:
            self.give_up(error)
            raise
        self.begun = False
        exposed_s = time.perf_counter() - started
        sent = [*(flow.sent for flow in self.flows.flows), self._vote.sent, *self._early_sent]
        if self.flows.sharded is not None and outcome is StepOutcome.TAKE:
            sent.append(self.flows.sharded.gathering.sent)
        return self._conclude(outcome, sent, exposed_s, changed_at)

    def _exchange_again(
        self, heard: int, hyper: int, finish: Callable[[int], Statement], norm_of: NormOf
    ) -> tuple[Statement, int]:
        """Exchanges the step once more, without overlap, and votes on it.

        Args:
            heard: The flags of the first vote, which say why.
            hyper: Hash of what gradients are compressed with.
            finish: ``finish(attempt)`` posts what is left, and returns what this rank says.
            norm_of: As in ``exchange``.

        Returns:
            What this rank said, and the flags of all ranks.
        """
        had_overlap = self.overlap
        self._start_again(hyper)
        said = finish(1)
        settled = self._vote.hold(said, self.flows.flows, norm_of is NormOf.GRADIENTS)
        assert VERDICTS[settled] is not StepOutcome.AGAIN, "a gradient changed while step() was running"
        if had_overlap and self.core.rank == 0:
            self._say_why(heard)
        return said, settled

    def end_silent(self) -> int:
        """Ends a step in which nothing travels, without a vote; commits nothing. Collective in a grid over the parts of
        this replica, which agree on the step.

        Sets ``present_anywhere`` to the tensors that have a gradient on this rank.

        Returns:
            The flags of all parts of this replica.

        Raises:
            HorovodInternalError: In a grid another part has failed: PeerError, MismatchError or StallError.
        """
        assert self.begun and not self.flows.flows
        try:
            self.buckets.locate_all()
            self.present_anywhere[:] = self.buckets.addresses != 0
            if not self.core.is_local_finite(range(self.present_anywhere.size)):
                self.object(Flag.NON_FINITE)
            heard = self.agree_with_parts(self.step + 1, FINAL, self.objections & _ENDS)
        except BaseException as error:
            self.give_up(error)
            raise
        self.begun = False
        self.step += 1
        self.traffic.count_local(self._dense_bytes)
        self.count_parts()
        return heard

    def agree_with_parts(self, step: int, attempt: int, flags: int) -> int:
        """Returns ``flags`` with those of the other parts of this replica in ``step``, counted from 1. Collective in a
        grid over these parts, where it raises what ``GridVote.hold`` raises; else it sends nothing.
        """
        return flags if self._grid is None else flags | self._grid.hold(step, attempt, flags)

    def count_parts(self) -> None:
        """Counts what ``agree_with_parts`` has sent, as of the last step that was counted."""
        if self._grid is not None:
            self.traffic.add(self._grid.sent)

    def _finish(self, hyper: int, lr: float, announcement: int, with_average_norm: bool, attempt: int) -> Statement:
        """Posts all buckets that are not posted, and returns what this rank says in the vote."""
        buckets, core = self.buckets, self.core
        buckets.post(final=True)
        squares = None
        if self.flows.sharded is not None:
            squares = self._squares_of(self.flows.sharded)
            if not math.isfinite(squares):
                self.objections |= _AVERAGE
        if core.steps_locally:
            self._look_at_local()
        replica = self.noted_replica or 0
        if self.noted_replica is None and self._replicas is not None and self.compares_replicas:
            number = self.step // core.steps_per_exchange
            replica = self._replicas.checksum(
                core.replica_addresses().__getitem__, range(self._compared + 1, number + 1)
            )
            self._compared = number
        flags = self.objections | (_UNPOSTED if buckets.is_surprised else 0)
        if not self.keeps_gradients:
            flags |= _RELEASED
        gradients = self._own_gradients() if self.looks_at_gradients else 0
        said = Statement(self.step + 1, attempt, hyper, lr, flags, announcement, replica, gradients)
        return said._replace(squares=squares) if with_average_norm and squares is not None else said

    def note_replicas(self) -> None:
        """Makes the next vote say what replicas are now, between two steps: where a step's exchange ends in backward, a
        script may have other values in parameters then.
        """
        self.noted_replica = 0
        if self.compares_replicas:
            assert self._replicas is not None
            steps = range(self._compared + 1, self.step // self.core.steps_per_exchange + 1)
            self.noted_replica = self._replicas.checksum(self.core.replica_addresses().__getitem__, steps)
            self._compared = steps.stop - 1

    def _squares_of(self, flow: ShardedFlow) -> float:
        """Waits for the averages that this rank alone has, and returns the sum of their squares."""
        sharded, wire = self.core.sharded, self.wire
        assert sharded is not None and flow.ticket is not None
        # If it has failed, the vote says how.
        wait(flow.ticket, wire.channel, wire.ranks, wire.watch, f"{self.name}: step {self.step + 1}")
        return sum(sharded.squares(np.flatnonzero(self.core.exchange().dense).tolist()))

    def _own_gradients(self) -> int:
        """Returns a checksum of this rank's gradients, all of which are located; 0 if all are zero, or on a device."""
        core = self.core
        addresses, numels = core.gradients["grad"].copy(), core.layout.numels
        if core.kernels.memory.is_device or not core.kernels.squares(addresses, numels).any():
            return 0
        sums = core.kernels.checksums(addresses, 4 * numels)
        return int.from_bytes(hashlib.blake2b(sums.tobytes(), digest_size=4).digest(), "little") or 1

    @property
    def gradients_are_alike(self) -> bool:
        """True if all ranks had the same gradients in the last step, and not all of these were zero.

        False if ``looks_at_gradients`` was False in that step.
        """
        return self._vote.gradients_are_alike

    def _look_at_local(self) -> None:
        """Checks the gradients that do not travel, so that the vote can tell the other ranks."""
        local, node, wire = self.flows.local, self.flows.node, self.wire
        if node is not None:
            assert node.ticket is not None
            wait(node.ticket, wire.channel, wire.ranks, wire.watch, f"{self.name}: step {self.step + 1}")
        self.buckets.locate_unposted(local)
        if local and not self.core.is_local_finite(local):
            self.object(Flag.NON_FINITE)
        bits = np.packbits((self.buckets.addresses != 0) | self.core.waiting(), bitorder="little")
        self._vote.presence[: bits.size] = bits

    def _start_again(self, hyper: int) -> None:
        """Begins the step again after a gradient has changed; from now on all ranks exchange without overlap."""
        self.overlap = self.overlapping = False
        self.traffic.redone_steps += 1
        self._early_sent += [*(flow.sent for flow in self.flows.flows), self._vote.sent]
        self.objections &= int(Flag.IDLE)
        self._hyper = hyper
        self.wire.flags[0] = self.wire.heard_flags[0] = 0
        self.buckets.begin(self.step, 1, False)

    def _say_why(self, heard: int) -> None:
        """Warns that nothing overlaps any more, and why. ``heard``: the flags of the first attempt."""
        norms = self._vote.norms
        if heard & Flag.EDITED and len(norms) > 1 and np.isfinite(norms).all():
            low, high = int(np.argmin(norms)), int(np.argmax(norms))
            where = (
                f"{norms[low]:.6g} on rank {self.wire.ranks[low]} and {norms[high]:.6g} on rank {self.wire.ranks[high]}"
            )
            if norms[low] == norms[high]:
                where = f"{norms[low]:.6g} on all ranks"
            likely = [
                "If each rank clips them by its own norm, the average is clipped by none: pass max_grad_norm= to the "
                "optimizer instead, which clips by the norm over all ranks; with clip='previous' the exchange "
                "overlaps, too.",
                "If a step has several backward passes, pass backward_passes_per_step=, or use no_sync() in all but "
                "the last.",
            ]
            if heard & Flag.UNPOSTED:
                likely.reverse()
            if not norms[low]:
                likely = [
                    "Something has cleared them, such as model.zero_grad(), and the step goes without them: "
                    "call zero_grad() before backward."
                ]
            _log.warning(
                "%s: gradients were changed between backward and step(), before they were averaged: their norm is now "
                "%s. %s The step was exchanged again, and from now on nothing overlaps; pass overlap=False if you want "
                "the changes.",
                self.name,
                where,
                " ".join(likely),
            )
            return
        if heard & Flag.HYPER:
            _log.warning(
                "%s: %s was set between backward and step(), and gradients are compressed with it, so the step was "
                "exchanged again, and from now on nothing overlaps. Set it before backward, or after step() as "
                "schedulers do, to keep the overlap; pass overlap=False if it must be set there.",
                self.name,
                "lr, a beta or a weight decay" if self.core.sends_rates else "a beta or a weight decay",
            )
            return
        _log.warning(
            "%s: a gradient changed after backward (loss scaling or a second backward), or a parameter whose weight "
            "decay is added to its gradient. So the step was exchanged again, and from now on nothing overlaps. Pass "
            "overlap=False to say so from the start.",
            self.name,
        )

    def _hear(self) -> None:
        """Notes which tensors have a gradient on some rank."""
        present = self.present_anywhere
        present[:] = False
        if self.core.steps_locally:
            present[:] = np.unpackbits(self._vote.present, count=present.size, bitorder="little")
        for flow in self.flows.flows:
            present[flow.present_anywhere()] = True

    def _conclude(
        self, outcome: StepOutcome, sent: Sequence[Sent], exposed_s: float, changed_at: str = ""
    ) -> StepOutcome:
        """Returns ``outcome``, of a step whose exchange is over, or raises the error that it is.

        Args:
            outcome: What all ranks do with the step.
            sent: What this rank has sent.
            exposed_s: Seconds in which the step waited.
            changed_at: On which ranks, or parts of the grid, released gradients have changed.

        Raises:
            NonFiniteError: A gradient is not finite.
            InvalidRequestError: Released gradients have changed.
        """
        flows = self.flows.flows
        self.step += 1
        is_taken, overlaps = outcome is StepOutcome.TAKE, self.overlap == self.overlapping
        self.traffic.count(sent, flows, self._dense_bytes, not is_taken, exposed_s, overlaps)
        if outcome is StepOutcome.REFUSE:
            raise InvalidRequestError(
                f"{self.name}: in step {self.step} gradients, or what they are compressed with, changed {changed_at} "
                "after they were exchanged, and free_gradients=True has released those that would be exchanged again; "
                "the step was discarded on all ranks. Change nothing between backward and step(), or leave "
                "free_gradients out."
            )
        if outcome is StepOutcome.NON_FINITE:
            is_known = self.buckets.had_non_finite
            whose = non_finite_ranks(self.core, self.wire, self._vote.held, flows, self.step, is_known)
            found = self._with_places(whose)
            is_of_average = found == "[]"  # no rank has such a gradient, also none of another part
            text = self.core.overflow_text if is_of_average else self.core.non_finite_text
            raise NonFiniteError(f"{self.name}: {text.format(step=self.step, ranks=found)}")
        if not is_taken:
            self.skipped_by = self._with_places(self._vote.ranks_with(Flag.SKIP))
        return outcome

    def _with_places(self, ranks: Sequence[int]) -> str:
        """Returns these ranks of this data axis; in a grid one of each part that has any, with its place. Collective in
        a grid.
        """
        return str(list(ranks)) if self._grid is None else self._grid.ranks_of_parts(self.step, ranks)

    def give_up(self, error: BaseException, attempt: int = FINAL) -> None:
        """Ends the stepper because a step was interrupted: every later step raises. ``attempt`` is the grid's next
        round, in which the other parts hear of it.
        """
        if self._grid is not None:
            self._grid.give_up(self.step + 1, attempt, error)
        if not isinstance(error, OcommError):
            self.wire.interrupt(error)
            error = HorovodInternalError.after_interruption(self.name, error)
        self._dead = error
        self.begun = False
        self.wire.give_up(str(error))

    # After it

    @property
    def heard_announcement(self) -> int:
        """What the coordinator announced in the last step."""
        return int(self.wire.announcement[0])

    def commit(self) -> None:
        """Takes the step: the core's state and parameters change."""
        if self.core.dense_codes is not None:
            self.core.commit_dense(self.present_anywhere)
        self.core.commit(self.present_anywhere, self.flows.averages)

    def gather_parameters(self) -> None:
        """Ends a sharded dense step that was taken, once this rank has stepped what it owns: the others get that, and
        this rank what they own. Collective; raises the error with which it fails, after which parameters may be of two
        steps.
        """
        flow = self.flows.sharded
        assert flow is not None
        started = time.perf_counter()
        try:
            flow.gathering.run(self.core.tensors["param"], f"{self.name}: parameters of step {self.step}")
        except OcommError as error:
            why = "Parameters were being sent, so those of this rank may be of two steps: load a saved state."
            raise type(error)(f"{error.args[0]} {why}", *error.args[1:]) from error
        self.traffic.count_wait(time.perf_counter() - started)

    def gather(self, tensor: int, whole: Floats) -> Floats:
        """Returns ``whole``, of a tensor, of which this rank has what it owns, with what all others own. Collective."""
        addresses = np.zeros(len(self.core.layout.tensors), np.uint64)
        addresses[tensor] = address(whole)
        if self.core.layout.numels[tensor]:
            gathering = self.flows.gathering_of(tensor)
            gathering.run(addresses, f"{self.name}: moments of '{self.core.layout.tensors[tensor].name}'")
            self.traffic.count_moments(gathering.sent.across)
        return whole

    @property
    def averages(self) -> Floats:
        """The averages of the tensors that traveled dense in the last step: flat float32, in the order of the
        layout.
        """
        return self.flows.averages

    def average(self, tensor: int) -> Floats:
        """Returns the averaged gradient of a tensor in warm-up: float32, ``numel`` elements, valid until the next
        step.
        """
        layout = self.core.layout
        first = int(layout.offsets[tensor])
        return self.flows.averages[first : first + int(layout.numels[tensor])]

    def resume(self, step: int, order: Sequence[int] | None) -> None:
        """Continues after ``step`` steps, with the order of a saved run or, if that is None, with a first step as at a
        start.

        Raises ValueError if a step has begun.
        """
        if self.begun:
            raise ValueError("a step is under way")
        self.step = step
        self._compared = step // self.core.steps_per_exchange - 1
        if self.noted_replica is not None:
            self.noted_replica = 0
        self.overlapping = False
        if order is not None:
            self.adopt_order(order)
            self.overlapping = self.overlap

    def adopt_order(self, order: Sequence[int]) -> None:
        """Uses the order in which gradients became ready on rank 0, the same on all ranks, for all later steps."""
        assert not self.begun
        self.flows.adopt_order(order)

    def memory(self) -> dict[str, int]:
        """Returns the bytes held, by buffer: the core's state and the runtime's own."""
        return {**self.core.memory(), **self.flows.memory()}
