"""Drives DiLoCo: counts local steps, begins and ends the syncs of fragments, and saves what belongs to them.

A sync is a step of the stepper, with its exchange, vote and commit. The steps between two syncs do not reach the
stepper: they send nothing. So flags, hyperparameters and reports of values that are not finite travel with the vote of
the next sync (docs/decisions/0015-local-steps-that-send-nothing.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from ocomm.agreement import LOOKED_AT
from ocomm.compression.layout import TensorSpec
from ocomm.errors import InvalidRequestError, NonFiniteError
from ocomm.kernels.base import Bytes, Floats
from ocomm.optim import checkpoint
from ocomm.optim.core import Group
from ocomm.optim.diloco import DiLoCo, DiLoCoOptions
from ocomm.optim.grid import EARLY
from ocomm.session import Session
from ocomm.telemetry.units import amount
from ocomm.training import resume
from ocomm.training.common import Common
from ocomm.training.driver import Driver, Frontend
from ocomm.types import Flag

_log = logging.getLogger("ocomm")
#: Options of ``Common`` for which DiLoCo has no use.
LACKING = {*Common.texts()} - {"block_size", "hierarchical"}


class LocalFrontend(Frontend, Protocol):
    """A framework's side of an optimizer whose ranks step by themselves between syncs."""

    def read(self, tensor: int) -> Floats:
        """Returns a tensor as it is on this rank: flat float32 in the host's memory, valid until it is written."""
        ...

    def write(self, tensor: int, values: Floats) -> None:
        """Overwrites a tensor, rounded to its own type."""
        ...

    def hyper(self) -> Hashable:
        """Returns the numbers in the wrapped optimizer's settings, as nested tuples."""
        ...

    def inner_state(self) -> Bytes:
        """Returns the wrapped optimizer's state on this rank, in bytes."""
        ...

    def load_inner_state(self, saved: Bytes) -> None:
        """Loads the result of ``inner_state``."""
        ...

    def reset_inner_state(self) -> bool:
        """Sets the wrapped optimizer's state back to what it was when it was wrapped, if it is not finite. Returns
        whether it did.
        """
        ...


def _why_apart(steps: int) -> str:
    """Returns why the ranks' parameters differ after ``steps`` steps, and what to change."""
    return (
        f"the run ended without finish() after its last step, {steps}, so the parameters are each rank's own, and the "
        "steps since the last sync have reached no other rank. Call finish() on all ranks after the last step."
    )


class DiLoCoDriver(Driver):
    """One rank's part of DiLoCo over process set ``number``. Making one is collective.

    Args:
        session: The session of the job.
        number: The process set.
        specs: The parameters, in registration order, and after them the model's buffers.
        buffers: The number of buffers.
        frontend: The frontend that holds them.
        options: The options of DiLoCo.
        common: The options that every optimizer has.
        constraints: By parameter, what maps a new anchor to one that the framework lets the parameter have, with the
            same result on all ranks.

    Raises:
        MismatchError: A tensor or option differs between the ranks; the message names the first one.
        InvalidRequestError: There are fewer parameters than fragments.
    """

    core: DiLoCo

    def __init__(
        self,
        session: Session,
        number: int,
        specs: Sequence[TensorSpec],
        buffers: int,
        frontend: LocalFrontend,
        options: DiLoCoOptions,
        common: Common,
        constraints: Mapping[int, Callable[[Floats], Floats]] = MappingProxyType({}),
    ) -> None:
        self._chosen, self._buffers, self._constraints = options, buffers, constraints
        super().__init__(session, number, specs, frontend, DiLoCo, options, common)
        self.core.divide(buffers)
        self._fresh = {}  # ``forget`` needs no copy of the anchors
        self._overlap_from_the_start()
        session.rejoining.add(self)
        #: Counts since the start of this process: syncs, steps of this rank that changed nothing, and how often it has
        #: reset the wrapped optimizer's state.
        self.syncs = self.non_finite_steps = self.inner_resets = 0

    def arrange_core(self, frontend: Frontend) -> dict[str, Any]:
        return {"buffers": self._buffers}

    def _overlap_from_the_start(self) -> None:
        """Lets a sync that is delayed begin before its end; the order of tensors is the same on all ranks."""
        self.stepper.resume(self.steps, range(len(self.core.layout.tensors)))

    @property
    def why_apart(self) -> Callable[[int], str]:
        return _why_apart

    def plan(self) -> str:
        every, bits, layout = self._chosen.sync_every, self._chosen.bits, self.core.layout
        dense = 1.0  # the share of what is sent that is sent in float32: all, or the buffers
        if bits < 32:
            dense = int(layout.numels[len(layout.tensors) - self._buffers :].sum()) / max(layout.numel, 1)
        nbytes = dense * self.uncompressed_nbytes + (1.0 - dense) * self.compressed_nbytes
        return (
            f"{every} steps send {amount(nbytes)} per rank, in {bits} bits per element, instead of "
            f"{amount(self.dense_nbytes)} in each step."
        )

    def compress_hyper(self, groups: Sequence[Group]) -> Hashable:
        return ()

    def full_hyper(self, groups: Sequence[Group]) -> Hashable:
        """Returns what must be equal on all ranks at a sync: the wrapped optimizer's settings."""
        return (self.frontend.hyper(),)

    # Steps

    def start(self) -> None:
        """Begins a step of this rank. Before the first one all ranks compare their parameters, which are the first
        anchors: that alone is collective. Raises the error of an earlier sync after which there can be no other.
        """
        self.stepper.require_alive()
        if not self._at_start:
            return
        self._take_first_anchors()
        self._start()
        if self.core.under_way is not None:
            self._post(self._next_sync())

    def _first_round(self) -> int:
        return EARLY

    def may_move(self, is_finite: bool) -> bool:
        """Returns whether this rank takes the step that has begun. Collective in a grid, over the parts of this replica
        of the model, which all take it or none does; else nothing is sent.

        Args:
            is_finite: Whether this rank's gradients are.

        Raises:
            HorovodInternalError: In a grid another part has failed: PeerError, MismatchError or StallError.
        """
        try:
            flags = self.stepper.agree_with_parts(self.core.step + 1, EARLY, 0 if is_finite else int(Flag.NON_FINITE))
        except BaseException as error:
            self.stepper.give_up(error, EARLY)
            raise
        return not flags & Flag.NON_FINITE

    def _take_first_anchors(self) -> None:
        """Makes the parameters the anchors, if no step has been taken."""
        if self._at_start and self.core.step == 0:
            for tensor in self.core.anchored:
                self.core.set_anchor(tensor, self.frontend.read(tensor))

    def is_due(self) -> bool:
        """Returns whether the next step begins or ends a sync, and so reads and writes parameters."""
        core = self.core
        step = core.step + 1
        return core.begins_at(step) is not None or (core.under_way is not None and core.ends_at(step))

    def advance(self, moved: bool) -> None:
        """Counts a step of this rank, and begins and ends the syncs that are due after it. Collective if one is due.

        Args:
            moved: Whether the step has changed anything; if not, a gradient was not finite.

        Raises:
            NonFiniteError: A value is not finite on some rank; all ranks are back at their anchors.
            HorovodInternalError: The sync failed, and all ranks are back at their anchors.
        """
        core = self.core
        core.step += 1
        self.steps = core.step
        self.non_finite_steps += not moved
        core.is_synced &= not moved
        fragment = core.begins_at(core.step)
        if fragment is not None:
            self._begin_sync(fragment, self._next_sync())
        if core.under_way is not None and core.ends_at(core.step):
            self._end_sync()
        else:
            self.stepper.traffic.count_local(self.dense_nbytes)
        self.stepper.count_parts()
        if self._notices is not None:
            self._notices.steps, self._notices.is_synced = self.steps, core.is_synced

    def finish(self) -> None:
        """Ends the sync that is under way, syncs every fragment that has taken steps since its last one, and makes the
        anchors the parameters, on all ranks alike. Collective. Raises what ``advance`` raises.
        """
        self.start()
        core, traffic = self.core, self.stepper.traffic
        count, following = self._chosen.fragments, core.step // self._chosen.period
        for fragment in [core.under_way, *((following + k) % count for k in range(count))]:
            if fragment is None or core.synced_at[fragment] == core.step:
                continue
            if core.under_way is None:
                self._begin_sync(fragment, core.step)
            self._end_sync()
            traffic.uncount(self.dense_nbytes)
        if core.step:
            self._return_to_anchors()
        self.note_equal()

    def _next_sync(self) -> int:
        """The step at which a sync ends that is under way, or begins after the current step."""
        return -(-self.core.step // self._chosen.period) * self._chosen.period

    def _begin_sync(self, fragment: int, step: int) -> None:
        self.core.fragment = self.core.under_way = fragment
        self._measure()
        self._post(step)

    def _measure(self) -> None:
        """Sets what this rank sends of the fragment whose sync is under way."""
        for tensor in self.core.traveling:
            self.core.measure(tensor, self.frontend.read(tensor))

    def _post(self, step: int) -> None:
        """Begins the exchange of a sync that ends with ``step``."""
        assert self.core.under_way is not None
        self.core.fragment = self.core.under_way
        self.stepper.step = step - 1
        self.begin()
        traveling = set(self.core.traveling)
        for tensor in [tensor for tensor in self.stepper.flows.order if tensor in traveling]:
            self.stepper.buckets.mark_ready(tensor)

    def _end_sync(self) -> None:
        """Waits for the exchange that is under way, and takes over its result if all ranks do."""
        core = self.core
        try:
            self.step(lambda: False)
        except NonFiniteError:
            self._return_to_anchors()
            if self.frontend.reset_inner_state():
                self.inner_resets += 1
                _log.warning(
                    "%s: the wrapped optimizer's state on rank %d was not finite; it starts anew, as it was when "
                    "it was wrapped.",
                    self.name,
                    self.session.require_topology().rank,
                )
            raise
        except BaseException:
            self._return_to_anchors()
            raise
        for tensor in self._constraints.keys() & set(core.traveling):  # the outer optimizer steps beyond them
            core.set_anchor(tensor, self._constraints[tensor](core.anchor[core.flat_span(tensor)]))
        for tensor in core.traveling:
            self.frontend.write(tensor, core.mixed(tensor, self.frontend.read(tensor)))
        core.under_way = None
        core.synced_at[core.fragment] = core.step
        chosen = self._chosen
        core.is_synced = chosen.fragments == 1 and not chosen.mix
        self.syncs += 1

    def give_up_exchange(self) -> None:
        """Ends a sync that is under way on this rank: a rank that has left may never take part in it."""
        if self.stepper.begun:
            self.stepper.give_up(RuntimeError("the end of the job"))

    def _take(self) -> None:
        self.steps -= 1  # counted by ``advance`` already
        super()._take()

    def _return_to_anchors(self) -> None:
        """Makes the anchors of all fragments this rank's parameters. A sync that is under way is over."""
        core = self.core
        self._write_anchors()
        core.under_way = None
        core.synced_at = [core.step] * self._chosen.fragments

    def _write_anchors(self) -> None:
        for tensor in self.core.anchored:
            self.frontend.write(tensor, self.core.anchor[self.core.flat_span(tensor)])
        self.core.is_synced = True

    def _say_alike(self) -> None:
        _log.warning(
            "%s: all ranks changed their parameters in the same way before the first %d syncs, bit for bit. Either all "
            "read the same data, or something averages gradients in each step, such as DistributedDataParallel, and "
            "more ranks add nothing.",
            self.name,
            LOOKED_AT,
        )

    # State

    def require_idle(self, what: str) -> None:
        """Raises InvalidRequestError while a sync is under way."""
        if self.stepper.begun:
            raise InvalidRequestError(
                f"{self.name}: {what} was called while a sync is under way, until step {self._next_sync()}; call it "
                "after that step, or call finish() on all ranks first."
            )

    def forget(self) -> None:
        """Resets the driver to before the first step: the parameters will be the anchors. Every rank must call it."""
        self._restart(0)
        self.rank_state_due = False
        self._overlap_from_the_start()
        self.core.forget()

    @property
    def reset_text(self) -> str:
        text = (
            "all ranks go on from the anchors, with the wrapped optimizer's state that is in state_dict(): each rank's "
            "own state of it is lost, and so are its steps since the last sync"
        )
        return text if self._chosen.bits == 32 else f"{text}; errors start at zero"

    def state(self, masters: Sequence[int] = ()) -> dict[str, Any]:
        self._take_first_anchors()
        return super().state(masters)

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Loads the result of ``state``: this rank's parameters become the anchors."""
        super().load_state(saved)
        self._load_anchors()

    def _load_anchors(self) -> None:
        self._write_anchors()
        if self.core.under_way is not None:
            self.core.fragment = self.core.under_way
            self._measure()

    def rank_state(self) -> dict[str, Any]:
        """Returns what only this rank has, with a checksum: its parameters, the wrapped optimizer's state, errors."""
        self._take_first_anchors()
        core = self.core
        state = core.rank_state()
        flat = state["flat"]["parameter"] = core.param_memory.zeros(core.layout.flat_numel)
        for tensor in range(len(core.layout.tensors)):
            flat[core.flat_span(tensor)] = self.frontend.read(tensor)
        own = {**resume.header(self), "rank": core.rank, **state, "inner": self.frontend.inner_state()}
        return checkpoint.add_checksum(own, self.kernels)

    def load_rank_state(self, source: resume.Source) -> dict[str, Any]:
        """Loads rank states, as ``Driver.load_rank_state`` says. Without them this rank's parameters are the anchors,
        and the wrapped optimizer's state is that of ``state_dict``.
        """
        core = self.core
        done = super().load_rank_state(source)
        loaded, core.loaded = core.loaded, None
        if loaded is None:
            self._load_anchors()
            return done
        flat = loaded["flat"]
        for tensor in range(len(core.layout.tensors)):
            self.frontend.write(tensor, flat["parameter"][core.flat_span(tensor)])
        if "delta" in flat:
            core.delta[:] = flat["delta"]
        if "inner" in loaded:
            self.frontend.load_inner_state(loaded["inner"])
        return done

    def report(self) -> dict[str, Any]:
        return {
            **super().report(),
            "syncs": self.syncs,
            "local_steps": self.stepper.traffic.local_steps,
            "non_finite_steps": self.non_finite_steps,
            "inner_resets": self.inner_resets,
        }
