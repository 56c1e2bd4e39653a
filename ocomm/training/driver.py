"""Drives one optimizer core through a session, step by step, for a frontend that holds the tensors.

The ``Frontend`` knows tensors, parameter groups and hooks. The driver knows the runtime: it opens the channel, agrees
with the other ranks, and takes or skips steps. Nothing here depends on a framework.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np

from ocomm.agreement import LOOKED_AT, MADE_ALIKE, by_rank, cause_of, digest, first_difference, say_alike, told_of_steps
from ocomm.collectives.engine import Channel
from ocomm.collectives.pipeline import cut_of
from ocomm.compression.codecs import FLOAT32, Codec
from ocomm.compression.layout import Layout, TensorSpec
from ocomm.errors import CheckpointError, InvalidRequestError, MismatchError
from ocomm.kernels.base import Kernels
from ocomm.negotiation.coordinator import FIRST_STEP
from ocomm.optim import checkpoint
from ocomm.optim.core import Core, Group
from ocomm.optim.grid import EARLY, FINAL, Grid, GridVote
from ocomm.optim.options import Options
from ocomm.optim.replicas import ReplicasDifferError, ReplicaWindows
from ocomm.optim.stepper import NormOf, Stepper
from ocomm.optim.verdict import StepOutcome
from ocomm.session import Session
from ocomm.telemetry.units import amount
from ocomm.training import resume
from ocomm.training.clipping import Clipping
from ocomm.training.common import Common
from ocomm.training.notices import Notices, describe_ranks, follow
from ocomm.training.opening import ON_HOST, meet, open_channel, open_grid
from ocomm.types import Flag, Nodes, ReduceOp

_log = logging.getLogger("ocomm")
_CHANGED = int(Flag.CHANGED)


class Frontend(Protocol):
    """A framework's side of a distributed optimizer."""

    #: The framework's name; ranks of several frameworks may train one model.
    framework: str
    #: The kernels of the parameters' device; None for the session's.
    kernels: Kernels | None
    #: The place in a grid whose data axis is the process set; None without other axes.
    grid: Grid | None

    def implementation(self) -> str:
        """Returns words that decide how the frontend's own dense steps round: equal words mean equal bits."""
        ...

    def locate(self, tensors: list[int], final: bool) -> list[int] | None:
        """Returns addresses of gradients, contiguous float32, 0 for none; or None if they must not be read before
        ``step()``.

        Gradients on a device may be 16-bit, if ``core.gradients["grad_dtype"]`` says so, unless ``driver.clipping``
        is on.
        """
        ...

    def groups(self) -> list[Group]:
        """Returns all parameter groups."""
        ...

    def written_in_forward(self) -> Mapping[str, str]:
        """Returns what writes to parameters in forward on this rank alone, and what to do, in words, by the parameters'
        names. Called where replicas differ.
        """
        ...


class Driver:
    """One rank's part of a distributed optimizer over process set ``number``. Making one is collective.

    Args:
        session: The session of the job.
        number: The process set.
        specs: The tensors, in registration order.
        frontend: The frontend that holds them.
        core_class: The algorithm.
        options: The algorithm's options.
        common: The options that every optimizer has.

    Raises:
        MismatchError: A tensor or option differs between the ranks; the message names the first one.
    """

    #: The number of steps of the run, as far as it was told and has not been exceeded.
    total_steps: float = math.inf
    #: The last step that the frontend has not finished, and the class of the error that ended it; "" for none.
    interrupted: tuple[int, str] = (0, "")
    #: What is said where the frontends' own steps would round differently; {} says which rank has what.
    unlike_text = (
        "the ranks' own optimizers would round differently ({}), so ocomm's Adam makes the dense steps on all ranks, "
        "which rounds alike everywhere. Give all ranks the same flags to keep the framework's own."
    )

    def __init__(
        self,
        session: Session,
        number: int,
        specs: Sequence[TensorSpec],
        frontend: Frontend,
        core_class: type[Core],
        options: Options,
        common: Common,
    ) -> None:
        self.kind = core_class.kind
        self.session = session
        self.number = number
        self.common = common
        self.grid = grid = frontend.grid
        # The driver belongs to its frontend; a reference back would keep both, and their buffers, alive.
        self._frontend = weakref.ref(frontend)
        nodes = session.nodes(number, common.hierarchical)  # an error if this rank is no member
        name = f"Distributed{self.kind}"
        name += session.ending(name, number)
        self.greet(session, number, name)
        kernels = frontend.kernels or session.kernels
        assert kernels is not None
        facts, arrangement = meet(session, number, name, frontend, kernels.memory, common.hierarchical, nodes)
        #: True if the ranks use several frameworks.
        self.is_mixed = facts.is_mixed
        #: True if the frontends' own dense steps would round differently. Then ``ocomm.optim.adam`` makes them.
        self.has_unlike_hosts = facts.rounds_differently
        if self.has_unlike_hosts and not self.is_mixed and self.is_first:
            _log.warning("%s: %s", name, self.unlike_text.format(by_rank(facts.by_implementation, "have")))
        #: True if some rank's parameters are on a device.
        self.on_devices = facts.places != {ON_HOST}
        self._all_on_devices = ON_HOST not in facts.places
        #: Whether messages go from device to device, and what carries dense values inside nodes, as all ranks have
        #: agreed.
        self.direct, self.intra_node = arrangement.direct, arrangement.intra_node
        self.core = self._make_core(specs, core_class, options, kernels, arrangement.nodes)
        #: The options that the ranks compare, which are saved; ``fixed_options`` must be equal when a state is loaded.
        self.options = {**common.agreed(), **options.agreed(), **self.arrange_core(frontend)}
        self.fixed_options = [*common.fixed(), *options.fixed()]
        self.default_options = {**common.defaults(), **options.defaults()}
        self.clipping = Clipping(common.max_grad_norm, common.clip == "previous")
        #: True if averages, when they are clipped, are clipped by a norm of which each rank has a part.
        self.has_part_of_norm = common.max_grad_norm is not None and (grid is not None or self.core.sharded is not None)
        self.stepper = self._open_stepper(name)
        #: Number of steps taken, without skipped ones.
        self.steps = 0
        #: Number of first steps in which all ranks had the same gradients.
        self._alike_steps = 0
        self._announcement = 0
        #: What gradients are compressed with, as the core has it; None if it must be set again.
        self._compress_hyper: Hashable = None
        #: True if the hyperparameters that the core got last make it compress gradients together with parameters.
        self.is_decay_coupled = False
        self._before_take: Callable[[], object] | None = None
        #: What ``load_state`` and ``load_rank_state`` have loaded, for the report.
        self.resumed: dict[str, Any] | None = None
        #: True if no step has begun since this driver was made or a state was loaded.
        self._at_start = True
        #: True if a state was loaded, but not yet the rank state that belongs to it.
        self.rank_state_due = False
        #: Says which replicas the loaded state belongs to; None once they have moved on.
        self._loaded_replica: str | None = None
        #: What ``_state`` says before the first step.
        self._fresh: Mapping[str, Any] = self._state()
        session.count(partial(self.stepper.traffic.counters, name))
        #: Says on one rank what the run does; None on the others.
        self._notices = self._begin_notices() if self.speaks else None

    def _make_core(
        self, specs: Sequence[TensorSpec], core_class: type[Core], options: Options, kernels: Kernels, nodes: Nodes
    ) -> Core:
        size = self.common.block_size
        layout = Layout(specs, len(self._ranks), size if size == "tensor" else int(size), nodes)
        core = core_class(layout, self._ranks.index(self.session.require_topology().rank), kernels, options)
        if self.is_mixed:
            core.rate_advice = (
                " Schedules of Keras round to float32 where those of Torch do not: compute the lr in Python on both "
                "sides, in a callback such as LearningRateScheduler and in LambdaLR."
            )
        return core

    def _open_stepper(self, name: str) -> Stepper:
        """Opens the channels, with errors that name the tensor or option that the ranks do not agree on."""
        vote = None
        if self.grid is not None:
            vote = GridVote(self.grid, open_grid(self.session, self.grid, name, self.options))
            self.options["grid"] = self.grid.place
        channel = open_channel(self.session, self.number, name, self.core.layout, self.options)
        weakref.finalize(self, self.session.release_channel, self.number, channel).atexit = False
        stepper = self._make_stepper(name, channel, vote)
        stepper.looks_at_gradients = len(self._ranks) > 1
        return stepper

    def _begin_notices(self) -> Notices:
        notices = follow(
            self.session, self.name, self.stepper.traffic, self.why_dense, self.core.dense_bits, self.why_apart
        )
        hosts = self.session.require_topology().hosts
        where = describe_ranks([hosts[rank] for rank in self._ranks], self.session.network, self.on_devices)
        notices.begin(where, self.core.layout.numel, self.plan())
        return notices

    @property
    def _ranks(self) -> Sequence[int]:
        """The world ranks of the process set."""
        return self.session.set_ranks[self.number]

    @property
    def is_first(self) -> bool:
        """True on the first rank of the process set."""
        return self.session.require_topology().rank == self._ranks[0]

    def _make_stepper(self, name: str, channel: Channel, grid: GridVote | None) -> Stepper:
        session, common, layout = self.session, self.common, self.core.layout
        reference = self._frontend
        all_hosts = session.require_topology().hosts
        hosts = len({all_hosts[rank] for rank in self._ranks})

        def locate(tensors: list[int], final: bool) -> list[int] | None:
            alive = reference()
            assert alive is not None, "the optimizer is gone"
            return alive.locate(tensors, final)

        return Stepper(
            name,
            self.core,
            channel,
            self._ranks,
            replace(session.watch(self.number, name), framework=self.frontend.framework),
            locate,
            cut=cut_of(
                layout.numel, layout.ranks, hosts, session.settings.segment_nbytes, on_devices=self._all_on_devices
            ),
            overlap=common.overlap,
            # The host would have to wait for a device to read gradients there.
            verify="version" if self.core.kernels.memory.is_device else common.verify,
            timeout_s=session.settings.stall_shutdown_s,
            replicas=ReplicaWindows(
                self.core.replica_nbytes(),
                -(-session.settings.replica_check_steps // self.core.steps_per_exchange),
                self.core.kernels,
                on_devices=self.on_devices,
            ),
            direct=self.direct,
            intra_node=self.intra_node,
            grid=grid,
        )

    def greet(self, session: Session, number: int, name: str) -> None:
        """Called before the ranks exchange anything about the optimizer ``name``."""

    def arrange_core(self, frontend: Frontend) -> dict[str, Any]:
        """Called once the core is made. Returns what the ranks compare besides options: JSON values by name."""
        del frontend
        return {}

    @property
    def frontend(self) -> Any:
        frontend = self._frontend()
        assert frontend is not None, "the optimizer is gone"
        return frontend

    @property
    def name(self) -> str:
        return self.stepper.name

    @property
    def speaks(self) -> bool:
        """True if this rank tells the user what concerns all ranks: rank 0, unless it is alone."""
        return self.core.rank == 0 and self.core.layout.ranks > 1

    @property
    def why_dense(self) -> Callable[[int, int], str] | None:
        """A function that says why none of a number of steps was compressed; None if there is no warm-up.

        The function must not keep the driver alive.
        """
        return None

    @property
    def why_apart(self) -> Callable[[int], str] | None:
        """A function that says why the ranks' parameters differ after a number of steps; None if they never do.

        The function must not keep the driver alive.
        """
        return None

    def plan(self) -> str:
        """Returns what this rank will send per step, in words."""
        if not self.core.exchange().compressed.any():
            return f"a step sends {amount(self.uncompressed_nbytes)} per rank, dense."
        return f"a step sends about {amount(self.compressed_nbytes)} per rank instead of {amount(self.dense_nbytes)}."

    @property
    def dense_nbytes(self) -> float:
        """What this rank would send to other nodes in an allreduce of all gradients in float32."""
        return self.core.layout.dense_bytes(self.core.rank)

    @property
    def uncompressed_nbytes(self) -> float:
        """What this rank sends to other nodes in a dense step, in ``dense_bits`` per element, without headers."""
        codes = self.core.dense_codes
        return self._nbytes_in(FLOAT32 if codes is None else codes.codec)

    @property
    def compressed_nbytes(self) -> float:
        """What this rank sends to other nodes in a compressed step, without headers."""
        return self._nbytes_in(self.core.codec)

    def _nbytes_in(self, codec: Codec) -> float:
        return self.core.layout.compressed_bytes(self.core.rank, codec)

    # Hyperparameters

    def groups(self) -> list[Group]:
        """Returns the frontend's current parameter groups."""
        groups = self.frontend.groups()
        return [replace(g, lr=float(str(np.float32(g.lr)))) for g in groups] if self.is_mixed else groups

    def compress_hyper(self, groups: Sequence[Group]) -> Hashable:
        """Returns what gradients are compressed with. If it changes after gradients were posted, the exchange is
        done again.
        """
        if self.core.sends_rates:
            return tuple([(group.lr, group.betas[0], group.coupled_decay) for group in groups])
        return tuple([(group.betas[0], group.coupled_decay) for group in groups])

    def full_hyper(self, groups: Sequence[Group]) -> Hashable:
        """Returns everything that must be equal on all ranks."""
        values = [(g.lr, *g.betas, g.eps, g.coupled_decay, g.decoupled_decay) for g in groups]
        return (*values, self.core.gradient_scale)

    def _set_hyper(self, groups: Sequence[Group], hyper: Hashable) -> None:
        """Sets the hyperparameters of all groups in the core; ``hyper`` is their ``compress_hyper``."""
        for group in groups:
            self.core.set_hyper(group)
        self._compress_hyper = hyper, self.core.gradient_scale
        self.is_decay_coupled = any(group.coupled_decay for group in groups)

    # Clipping

    def clips_next(self) -> bool:
        """Returns True if the gradients of the next step are to be clipped by N, False if their average is clipped.

        It is called only if there is a ``max_grad_norm``.
        """
        return True

    def _begin_clipping(self) -> None:
        """Decides how the gradients of the step that begins are clipped."""
        self.core.gradient_scale = self.clipping.begin(self.clips_next())
        self.core.sketch_seed = self.steps + 1

    # One step

    @property
    def is_at_start(self) -> bool:
        """True if the next step begins with what all ranks must agree on. Then gradients are not posted before
        it.
        """
        return self._at_start

    def begin(self, early: bool = False) -> None:
        """Opens the next step, if it is not open. Called before the first gradient of a step is posted.

        ``early``: before ``step()``. Until then a script may have other parameters on each rank, such as noise for the
        backward pass, so the first step compares the ranks only there, and posts nothing before.
        """
        starts = self._at_start
        if starts and not early:
            self._start()
        if not self.stepper.begun:
            if starts:  # a core that was loaded has not been told yet
                self._compress_hyper = None
            if self.common.max_grad_norm is not None:
                self._begin_clipping()
            groups = self.groups()
            hyper = self.compress_hyper(groups)
            if self.core.sends_rates or (hyper, self.core.gradient_scale) != self._compress_hyper:
                self._set_hyper(groups, hyper)
            early = not self.clipping.needs_round and not self._at_start
            self.stepper.begin(hyper_digest(hyper), early)

    def step(self, changed: Callable[[], bool], before_take: Callable[[], object] | None = None) -> StepOutcome:
        """Exchanges gradients, and takes the step if all ranks do. ``changed()`` returns True if the script has changed
        a gradient since it was posted. ``before_take()`` is called before parameters change.
        """
        self._before_take = before_take
        if self._at_start or not self.stepper.begun:
            self.begin()
        if changed() or (not self.stepper.objections & _CHANGED and self.stepper.buckets.changed_tensors()):
            self.stepper.object(Flag.CHANGED | Flag.EDITED)
        return self._end(self._exchange)

    def skip(self, overflow: bool = False) -> StepOutcome:
        """Skips the current step on this rank, so that no rank takes it. ``overflow``: this rank's gradients are not
        finite.
        """
        self.begin()
        self.stepper.object(Flag.SKIP | Flag.NON_FINITE if overflow else Flag.SKIP)
        return self._end(self._exchange)

    def _end(self, exchange: Callable[[], StepOutcome]) -> StepOutcome:
        """Calls ``exchange``. Raises MismatchError that names what differs if it finds that the replicas do."""
        try:
            return exchange()
        except ReplicasDifferError as error:
            within = self.session.settings.replica_check_steps
            lines = [told_of_steps(self.interrupted, self.steps, within), *self._replicated()]
            difference = first_difference(self.session, self.number, f"{self.name}.drift", lines, "hold")
            advice = (
                "Something changed them on some ranks only: a write to a weight, a step that raised and whose error "
                "was caught, a checkpoint that one rank loaded. Do it on all ranks, or "
                f"{MADE_ALIKE[self.frontend.framework]} after it."
            )
            told = MismatchError(
                f"{self.name}: the ranks' parameters have become different within the last {within} steps: "
                f"{difference or 'they are equal again'}. {self._cause(difference) or advice} "
                "OCOMM_REPLICA_CHECK_STEPS says how often this is checked."
            )
            self.stepper.give_up(told)
            raise told from error

    def _cause(self, difference: str) -> str:
        """Returns what makes replicas differ as ``difference`` says, and what to do; "" if that is not known."""
        return cause_of(difference, self.frontend.written_in_forward())

    def _exchange(self) -> StepOutcome:
        groups = self.groups()
        hyper, lr = self.compress_hyper(groups), groups[0].lr
        if self.clipping.needs_round:
            outcome = self.stepper.agree_on_norm(hyper_digest(hyper), lr)
            if outcome is not None:
                return outcome
            self.core.gradient_scale = self.clipping.factor(self.stepper.norm)
            self._set_hyper(groups, hyper)
        norm_of = NormOf.NOTHING
        if self.clipping.is_on and self.clipping.by_previous:
            norm_of = NormOf.GRADIENTS
        elif self.has_part_of_norm and not self.clipping.is_on:
            norm_of = NormOf.AVERAGES
        outcome = self.stepper.exchange(
            hyper_digest(hyper),
            hyper_digest(self.full_hyper(groups)),
            lr,
            self._announcement,
            lambda: self._set_hyper(groups, hyper),
            norm_of,
        )
        if outcome is StepOutcome.TAKE:
            if self.clipping.is_on:
                self.clipping.norm = self.stepper.norm
            self._set_hyper(groups, hyper)
            self._take()
        return outcome

    def _start(self) -> None:
        """Compares the ranks' states before the first step. The other parts of a grid hear of a difference in their
        vote, not here: a stage of a pipeline may wait for what this rank computes next.
        """
        try:
            self._agree_on_start()
        except MismatchError as error:
            if self.grid is not None:
                self.stepper.give_up(error, self._first_round())
            raise

    def _first_round(self) -> int:
        """Returns which round of a step is the first one that the parts of a grid hold."""
        if self.common.max_grad_norm is not None:
            self._begin_clipping()
        return EARLY if self.clipping.needs_round else FINAL

    def _agree_on_start(self) -> None:
        """Compares the ranks' states before the first step. Raises MismatchError that names what differs."""
        said = self._replicated()
        try:
            self.session.agree(self.number, self.name + FIRST_STEP, f"{digest(said):016x}")
        except MismatchError as error:
            difference = first_difference(self.session, self.number, f"{self.name}.replicas", said, "hold")
            both = " In a job of Keras and Torch load Torch's into the optimizer before it is wrapped."
            advice = f"Load the same checkpoint on all ranks, or {MADE_ALIKE[self.frontend.framework]}."
            raise MismatchError(
                f"{self.name}: the replicas are not alike before their first step: {difference}. "
                f"{self._cause(difference) or advice}{both if self.is_mixed else ''}"
                if difference
                else str(error)
            ) from None
        if self.core.needs_rank_state:
            raise CheckpointError(
                f"{self.name}: the loaded state is of a run with shard_state, in which each rank has m and v of the "
                "blocks that it owns, and load_rank_state_dict was not called after load_state_dict: call it on all "
                "ranks, with the rank states of the same checkpoint."
            )
        if self.rank_state_due and self.steps and self.core.has_rank_state and self.core.rank == 0:
            _log.warning(
                "%s: load_rank_state_dict was not called after load_state_dict: %s.", self.name, self.reset_text
            )
        self._at_start = self.rank_state_due = False

    def _replicated(self) -> list[str]:
        """Returns descriptions of what must be equal on all ranks before the first step."""
        core = self.core
        names = [spec.name for spec in core.layout.tensors]
        lines = [f"a state of step {self.steps}"]
        lines += [f"'{name}' with checksum {c:016x}" for name, c in zip(names, core.replica_digest(), strict=True)]
        if self.steps or self.core.steps.any():  # 0/1 Adam goes on from a plain Adam with step 0 of its schedules
            lines += [f"{what} with checksum {checkpoint.fingerprint(v, self.kernels)}" for what, v in self._loaded()]
            # The step after which there is none has one collective more.
            lines.append("an order of gradients" if self.stepper.overlapping else "no order of gradients")
            if self.clipping.limit is not None:  # by it, or with a round in which the ranks make it
                lines.append(f"a last norm of {self.clipping.norm} to clip by")
        return lines

    def _loaded(self) -> list[tuple[str, Any]]:
        """Returns what a saved state has brought besides parameters, with its name in messages."""
        return [("the optimizer's state", self.core.state())]

    def _restart(self, steps: int) -> None:
        """Makes the next step the first one after ``steps`` steps that were not this driver's."""
        self.require_idle("a state")
        self.steps = steps
        self.stepper.resume(steps, None)
        self._at_start = True
        self._loaded_replica = None

    def forget(self) -> None:
        """Resets the driver to before the first step. Every rank must call it, without waiting: the next step compares
        the ranks.
        """
        self._restart(0)
        self.rank_state_due = False
        self._load(self._fresh)

    def _look_at_gradients(self) -> None:
        """Warns where the ranks' own gradients were equal in the first steps. Those of other data are not."""
        are_alike = self.stepper.gradients_are_alike
        self._alike_steps += are_alike
        if are_alike and self._alike_steps < LOOKED_AT:
            return
        self.stepper.looks_at_gradients = False
        if are_alike and self.core.rank == 0:
            self._say_alike()

    def _say_alike(self) -> None:
        say_alike(self.name, self.frontend.framework)

    def _take(self) -> None:
        self.steps += 1
        if self.stepper.looks_at_gradients:
            self._look_at_gradients()
        self._loaded_replica = None
        order = list(self.stepper.buckets.arrivals)
        try:
            if self._before_take is not None:
                self._before_take()
            self.take()
            if self.stepper.overlap and not self.stepper.overlapping:
                self._adopt_order(order)
            notices = self._notices
            if notices is not None:
                notices.steps, notices.is_synced = self.steps, self.core.is_synced
                if self.stepper.traffic.first_compressed and not notices.compresses:
                    notices.compresses = True
                    notices.first_compressed(self.uncompressed_nbytes)
                if self.steps > self.total_steps:
                    self.total_steps = math.inf
                    if notices.speaks:
                        self.say_longer()
        except BaseException as error:  # some parameters may have changed already
            self.stepper.give_up(error)
            raise

    def say_longer(self) -> None:
        """Warns of a run that goes on after ``total_steps``, if something follows from that. Called once."""

    def retire(self) -> None:
        """Says nothing of this optimizer at the end of the run, because another one goes on with its state."""
        if self._notices is not None:
            self.session.at_end.remove(self._notices)
            self._notices = None

    def note_equal(self) -> None:
        """Notes that all ranks have the same parameters now, for what is said at the end of the run."""
        if self._notices is not None:
            self._notices.is_synced = True

    def take(self) -> None:
        """Commits the step, and decides what the ranks decide after it."""
        self.stepper.commit()
        self._wake()

    def _wake(self) -> None:
        """Wakes masked elements that have a gradient on some rank, if it is time to look for them."""
        if self.core.wake_due:
            touched = self.core.touched()
            self.session.reduce(self.number, f"{self.name}.touched", touched, ReduceOp.BITWISE_OR)
            self.stepper.traffic.count_mask(
                self.session.member_set(self.number).nodes.sum_nbytes(touched.nbytes, self.core.rank)
            )
            self.core.wake(touched)

    def _adopt_order(self, arrivals: list[int]) -> None:
        """Cuts buckets in the order in which rank 0's gradients came in the first step; later steps overlap."""
        seen = set(arrivals)
        order = np.array(arrivals + [t for t in self.stepper.flows.order if t not in seen], np.int64)
        self.session.broadcast(self.number, f"{self.name}.order", order)
        self.stepper.adopt_order(order.tolist())
        self.stepper.overlapping = True

    # State

    def state(self, masters: Sequence[int] = ()) -> dict[str, Any]:
        """Returns the state that is the same on all ranks, without parameters and the wrapped optimizer's state; arrays
        are copies.

        ``masters`` are the tensors whose parameters have a higher precision here than in the framework. They are in the
        state by name, with the shape that ``frontend.shaped`` gives them.
        """
        specs = self.core.layout.tensors
        kept = {specs[t].name: self.frontend.shaped(t, self.core.replica(t)) for t in masters}
        return checkpoint.add_checksum({**resume.header(self), **self._state(), "masters": kept}, self.kernels)

    def _state(self) -> dict[str, Any]:
        """Returns further replicated state. A driver that has any adds it here, and loads it in ``_load``."""
        return {
            "stepper": {"order": [int(t) for t in self.stepper.flows.order], "arrived": self.stepper.overlapping},
            "norm_of_average": self.clipping.norm,
            "core": self.core.state(),
        }

    def check_state(self, saved: Mapping[str, Any]) -> None:
        """Raises CheckpointError, which names the difference, if ``load_state`` would not load the state."""
        resume.check(self, saved, "the state_dict")

    def renamed(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the state under this run's names, as ``checkpoint.renamed`` says."""
        return checkpoint.renamed(saved, self.core.layout, self.kernels, "the state_dict")

    def check_place(self, saved: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the state is of another place in a grid."""
        resume.check_place(self, saved, "the state_dict")

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Loads the result of ``state``, after parameters and the wrapped optimizer's state have been loaded.

        The rank state starts at zero: ``load_rank_state`` comes after it. Raises CheckpointError, before anything is
        changed, for another model, optimizer or seed; InvalidRequestError between backward and ``step()``.
        """
        self.check_state(saved)
        self.require_idle("load_state_dict")
        # Errors are zero before the first step, as they are here without a rank state.
        self._at_start, self.rank_state_due = True, saved["steps"] > 0
        order = saved["stepper"]
        self.stepper.resume(saved["steps"], order["order"] if order["arrived"] else None)
        self.steps = saved["steps"]
        self._load(saved)
        self._loaded_replica = saved["replica"]
        # A state that was saved before the first step, as Accelerate loads it at once, is where every run begins.
        self.resumed = {"step": self.steps, "ranks": saved["ranks"], "rank_state": "reset"} if self.steps else None
        resume.say_changes(self, saved)

    def _load(self, saved: Mapping[str, Any]) -> None:
        """Loads the result of ``_state``; ``steps`` is set already."""
        self.clipping.norm = saved.get("norm_of_average")
        self.core.load_state(saved["core"])

    def saved_moments(self, tensor: int) -> dict[str, Any] | None:
        """Returns the wrapped optimizer's state of a tensor, if this driver has taken it over; else None.

        It has ``step`` and flat float32 arrays, under the wrapped optimizer's own names.
        """
        del tensor
        return None

    def taken_over(self, saved: Mapping[str, Any]) -> list[int]:
        """Returns the tensors whose moments a saved state needs from the wrapped optimizer's state."""
        del saved
        return []

    def rank_state(self) -> dict[str, Any]:
        """Returns what only this rank has, with a checksum; arrays are copies. ``Core.rank_buffers`` says what it
        is.
        """
        return checkpoint.add_checksum(
            {**resume.header(self), "rank": self.core.rank, **self.core.rank_state()}, self.kernels
        )

    def load_rank_state(self, source: resume.Source) -> dict[str, Any]:
        """Loads rank states. Collective: all ranks load, or none; or all start at zero if the state of a rank is
        missing.

        Comes after ``load_state`` of the same checkpoint. Returns what was done, as in ``report()["resumed"]``. Raises
        CheckpointError on all ranks, before anything is changed, if a state is damaged or does not belong here on any
        rank; MismatchError if the ranks have states of different runs.
        """
        self.rank_state_due = False
        self.resumed = {"step": self.steps, **(self.resumed or {}), **resume.load_rank_states(self, source)}
        self.use_rank_state()
        return dict(self.resumed)

    def use_rank_state(self) -> None:
        """Called on all ranks when they have loaded their rank states."""

    def require_idle(self, what: str) -> None:
        """Raises InvalidRequestError between backward and ``step()``."""
        if self.stepper.begun:
            raise InvalidRequestError(
                f"{self.name}: {what} was called between backward and step(); take the step or call zero_grad() first."
            )

    @property
    def reset_text(self) -> str:
        """What happens where a run goes on without its rank states, in words."""
        return "errors start at zero on all ranks"

    @property
    def replica(self) -> str:
        """Hash of what is equal on all ranks: says whether two saved states are of the same moment of the same run."""
        return self._loaded_replica or f"{digest(self.core.replica_digest()):016x}"

    @property
    def kernels(self) -> Kernels:
        """The kernels of the host's memory, for saved states."""
        assert self.session.kernels is not None
        return self.session.kernels

    def report(self) -> dict[str, Any]:
        """Returns counts of the steps and bytes of this rank; ``ocomm.training.report`` says what each entry means."""
        traffic = self.stepper.traffic
        dense = self.dense_nbytes
        return {
            **self.core.report(),
            "form": "flat" if self.core.layout.nodes.is_flat else "hierarchical",
            "inside": None if self.core.layout.nodes.is_flat else "MPI" if self.intra_node is None else "NCCL",
            "bytes_sent_inside": traffic.bytes_sent_inside,
            "bytes_sent_masks": traffic.bytes_sent_masks,
            "step": self.steps,
            "dense_steps": traffic.dense_steps,
            "compressed_steps": traffic.compressed_steps,
            "skipped_steps": traffic.skipped_steps,
            "skipped_by": self.stepper.skipped_by or None,
            "redone_steps": traffic.redone_steps,
            "overlap": self.stepper.overlap,
            "grad_norm": self.clipping.norm,
            "bytes_sent": traffic.bytes_sent,
            "bytes_dense": traffic.bytes_dense,
            "ratio": traffic.bytes_dense / traffic.bytes_sent if traffic.bytes_sent else None,
            "last_bytes_sent": traffic.last_bytes_sent,
            "last_ratio": dense / traffic.last_bytes_sent if traffic.last_bytes_sent else None,
            "exposed_ms": 1e3 * traffic.exposed_s / max(traffic.steps, 1),
            "exposed_dense_ms": traffic.waited_dense.mean_ms,
            "exposed_compressed_ms": traffic.waited_compressed.mean_ms,
            "memory_bytes": self.stepper.memory(),
            "resumed": self.resumed,
        }


@lru_cache(maxsize=8)  # hyperparameters are most often those of the last step
def hyper_digest(values: Hashable) -> int:
    """Returns the same hash for values that compare equal, such as 0, 0.0 and -0.0, because the cache holds one for all
    of them.
    """
    return digest(_as_floats(values))


def _as_floats(values: Any) -> Any:
    return tuple(map(_as_floats, values)) if isinstance(values, tuple) else float(values) + 0.0  # -0.0 + 0.0 is 0.0
