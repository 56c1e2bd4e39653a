"""DiLoCo (arXiv 2311.08105, with fragments 2501.18512) as a state machine over flat buffers: the outer optimizer.

Between syncs every rank moves its own parameters theta with an optimizer of its own, and sends nothing. At a sync:

    delta  = anchor - theta                             each rank its own
    mean   = average of delta over the ranks            float32, codes of 8 or 4 bits, or 1 bit with error feedback
    buf    = mu * buf + mean
    anchor = anchor - lr * (mean + mu * buf)
    theta  = (1 - mix) * anchor + mix * theta

All is float32, one operation at a time. The tensors are divided into fragments, which are synced in turn.

Memory per parameter, besides the parameter, its gradient and the wrapped optimizer's state, for n ranks, in the host's
memory: anchor, buf and delta 4 B each; the averages 4 B; with fewer than 32 bits the worker's error 2 * 4 B, the
server's 2 * 4/n B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ocomm.collectives.plan import Computation, Loop, loop
from ocomm.compression.codecs import OF_BITS
from ocomm.compression.layout import Layout
from ocomm.errors import InvalidRequestError, SettingsError
from ocomm.kernels.base import TENSOR, Bytes, Floats, Kernels, Table
from ocomm.optim.core import Bools, Core, Exchange, Flags, Group, address, flat_floats
from ocomm.optim.dense_codes import DenseCodes
from ocomm.optim.options import Options, option

#: Number of elements that the outer step works on at once, so that what it needs stays in the cache.
_CHUNK = 1 << 15
#: What happens to a model's buffers, for the frontends, which have the argument; {example} is one of their own.
BUFFERS = (
    "those of float32, bfloat16 and float16, such as {example}, are averaged at the syncs of the first fragment, in "
    "float32. Others stay this rank's own. None: no buffer is averaged."
)


@dataclass(frozen=True, kw_only=True)
class DiLoCoOptions(Options):
    """The options of DiLoCo. Raises SettingsError for impossible values."""

    sync_every: int = option(
        10,
        """The number of steps from one sync of a parameter to its next one. Every call of ``step()`` counts, also one
        that changes nothing.""",
        fixed=True,
    )
    fragments: int = option(
        1,
        """The number of fragments of about equal size into which the parameters are divided. One fragment is synced
        every ``sync_every / fragments`` steps, which must be a whole number.""",
        fixed=True,
    )
    outer_lr: float = option(
        0.9, "The learning rate of the outer optimizer, which moves the anchors. 1 without momentum is plain averaging."
    )
    outer_momentum: float = option(
        0.6, "The momentum of the outer optimizer, in Nesterov's form. A run with few syncs needs a smaller one."
    )
    bits: Literal[32, 8, 4, 1] = option(
        32,
        """The number of bits per element in which a sync sends changes of parameters. 32: float32. 8, 4: whole numbers
        with a scale for every 128 elements. 1: signs with a scale for each block. With fewer than 32 there is error
        feedback.""",
        fixed=True,
    )
    delay: int = option(
        0,
        """The number of steps for which a sync may be under way while training goes on: fewer than ``sync_every /
        fragments``. 0: ``step()`` waits for the sync.""",
        fixed=True,
    )
    mix: float = option(
        0.0,
        """How much of a rank's own parameter a sync keeps, from 0 to below 1. With 0 all ranks have the same
        parameters after it; what they have done during ``delay`` is lost.""",
    )

    def __post_init__(self) -> None:
        for name, least in (("sync_every", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
                raise SettingsError(f"{name} must be a whole number of at least {least}, got {value!r}")
            object.__setattr__(self, name, int(value))
        if self.sync_every % self.fragments:
            raise SettingsError(
                f"sync_every={self.sync_every} must be a multiple of fragments={self.fragments}: one fragment is "
                "synced every sync_every / fragments steps"
            )
        if self.delay >= self.period:
            raise SettingsError(
                f"delay={self.delay} must be less than sync_every / fragments = {self.period}, so that one sync is "
                "over when the next one begins"
            )
        if isinstance(self.bits, bool) or self.bits not in (32, 8, 4, 1):
            raise SettingsError(f"bits must be 32, 8, 4 or 1, got {self.bits!r}")
        object.__setattr__(self, "bits", int(self.bits))
        for name, low, high in (("outer_lr", 0.0, np.inf), ("outer_momentum", 0.0, 1.0), ("mix", 0.0, 1.0)):
            value = getattr(self, name)
            if not isinstance(value, (int, float, np.number)) or not low <= value < high:
                raise SettingsError(f"{name} must be in [{low:g}, {high:g}), got {value!r}")
            object.__setattr__(self, name, float(value))

    @property
    def period(self) -> int:
        """The number of steps from the sync of one fragment to that of the next one."""
        return self.sync_every // self.fragments


class DiLoCo(Core):
    """DiLoCo's outer optimizer for the tensors of ``layout``, on rank ``rank`` of ``layout.ranks``, on the host.

    ``divide`` must be called before anything else. What the stepper calls a step is a sync of ``fragment``, and what it
    calls gradients are ``delta``. A tensor that is a buffer of the model, such as a running mean, has no outer
    optimizer: its ``delta`` is its value, and its anchor the last average.
    """

    kind = "DiLoCo"
    options_class = DiLoCoOptions
    compressor = "diloco"
    dense_again = True
    non_finite_text = (
        "a parameter or buffer is NaN or Inf at the sync of step {step}, on rank(s) {ranks}; all ranks have returned "
        "to the parameters of the last sync. Clip, or lower the wrapped optimizer's learning rate."
    )
    overflow_text = (
        "at the sync of step {step} all parameters and buffers are finite, but an average of what ranks send overflows "
        "float32; all ranks have returned to the parameters of the last sync. Clip, or lower the wrapped optimizer's "
        "learning rate."
    )

    def __init__(self, layout: Layout, rank: int, kernels: Kernels, options: DiLoCoOptions) -> None:
        super().__init__(layout, rank, kernels, options)
        self.chosen = options
        self.steps_per_exchange = options.period
        self.keeps_errors = options.bits < 32
        self._codes: DenseCodes | None = None
        if options.bits in OF_BITS:
            self._codes = DenseCodes(layout, rank, options.bits, self.param_memory)
            self.codec = self._codes.codec
            self.compressor = f"diloco {self.codec.label}"
            self.errors = self._codes.errors
        #: Number of calls of ``step()``, the same on all ranks.
        self.step = 0
        #: The fragment that is synced, or was last.
        self.fragment = 0
        #: Flat float32: the parameters after the last sync, the outer momentum, and what the next sync sends.
        self.anchor, self.momentum, self.delta = (self.param_memory.zeros(layout.flat_numel) for _ in range(3))
        self._averages = self.param_memory.zeros(layout.flat_numel if options.bits < 32 else 0)
        self._average_rows: Table = np.zeros(len(layout.tensors), TENSOR)
        self._average_rows["grad"] = address(self._averages) + 4 * layout.offsets.astype(np.uint64)
        # c is beta1 * 0 + one_minus_beta1 * delta.
        self.tensors["one_minus_beta1"] = 1.0
        #: The parameters of each fragment, and all buffers, as indices.
        self.parameters: list[list[int]] = []
        self.buffers: list[int] = []
        #: The fragment whose sync has begun and not ended; None for none. The same on all ranks.
        self.under_way: int | None = None
        #: The step of each fragment's last sync.
        self.synced_at = [0] * options.fragments
        #: True once the buffers have been averaged. Before that, ranks need not have the same.
        self.has_buffer_anchors = False
        #: True if this rank's parameters are the anchors, so that all ranks have the same.
        self.is_synced = True
        #: What ``load_rank_state`` has brought beyond errors; None after ``reset_rank_state``.
        self.loaded: Mapping[str, Any] | None = None
        self._exchanges: list[Exchange] = []
        if self.keeps_errors:
            self.allocate()

    def divide(self, buffers: int) -> None:
        """Divides the tensors into fragments. The last ``buffers`` tensors are buffers of the model, which travel with
        fragment 0.

        Raises InvalidRequestError if there are fewer parameters than fragments.
        """
        count, wanted = len(self.layout.tensors) - buffers, self.chosen.fragments
        if count < wanted:
            raise InvalidRequestError(f"fragments={wanted}, but there are only {count} parameters to divide.")
        self.buffers = list(range(count, count + buffers))
        self.parameters = _runs(self.layout.numels[:count].tolist(), wanted)
        for number, fragment in enumerate(self.parameters):
            compressed, dense = np.zeros((2, count + buffers), np.bool_)
            (dense if self.chosen.bits == 32 else compressed)[fragment] = True
            if number == 0:
                dense[self.buffers] = True
            self._exchanges.append(Exchange(compressed, dense))

    def set_hyper(self, group: Group) -> None:
        """Does nothing: the outer optimizer's settings are options, and the wrapped one steps by itself."""

    # One sync

    @property
    def traveling(self) -> list[int]:
        """The tensors that are synced with ``fragment``."""
        return self.parameters[self.fragment] + (self.buffers if self.fragment == 0 else [])

    @property
    def anchored(self) -> list[int]:
        """The tensors that have an anchor."""
        parameters = [tensor for fragment in self.parameters for tensor in fragment]
        return parameters + (self.buffers if self.has_buffer_anchors else [])

    def exchange(self) -> Exchange:
        return self._exchanges[self.fragment]

    def measure(self, tensor: int, value: Floats) -> None:
        """Sets what the next sync sends of a tensor, of which this rank has ``value``: ``numel`` float32."""
        span = self.flat_span(tensor)
        if tensor in self.buffers:
            self.delta[span] = value
        else:
            np.subtract(self.anchor[span], value, out=self.delta[span])

    def compress(self, segment: int, packed: Bytes, flags: Flags) -> Loop:
        """Returns the loop that compresses delta plus the worker error."""
        layout = self.segments[segment].layout
        if self._codes is not None:
            return self._codes.compress(layout, self.tensors, packed, flags)
        return loop(
            Kernels.compress_momentum,
            flags,
            blocks=layout.worker_blocks,
            tensors=self.tensors,
            previous=None,
            error=self.error,
            error_out=self.error_out,
            mask=None,
            scale=self.scale,
            packed=packed,
        )

    def average(self, segment: int, received: Sequence[Bytes], flags: Flags) -> Computation:
        if self._codes is None:
            return super().average(segment, received, flags)
        return self._codes.average(self.segments[segment].layout, received, self.result(segment), flags)

    def check_averages(self, segment: int, flags: Flags) -> list[Computation]:
        """Returns what unpacks the gathered averages, and checks them."""
        layout, result = self.segments[segment].layout, self.result(segment)
        if self._codes is None:
            unpack = loop(Kernels.unpack, None, layout.blocks, result, None, self._averages)
        else:
            unpack = self._codes.unpack(layout, result, self._averages)
        return [unpack, loop(Kernels.finite, flags, layout.blocks, self._average_rows)]

    def commit(self, present: Bools, averages: Floats) -> None:
        """Moves the anchors of the fragment, and takes over errors. ``averages`` has what traveled dense."""
        if self.chosen.bits < 32:
            # Copies only go to the buffers that are not in use yet, so nothing changes before the swap.
            for tensor in np.flatnonzero(~self.exchange().compressed).tolist():
                self.errors.keep(tensor)
            self.errors.swap()
        for tensor in self.parameters[self.fragment]:
            self._descend(self.flat_span(tensor), averages if self.chosen.bits == 32 else self._averages)
        if self.fragment == 0:
            for tensor in self.buffers:
                span = self.flat_span(tensor)
                self.anchor[span] = averages[span]
            self.has_buffer_anchors = True
        self.steps += present

    def _descend(self, span: slice, averages: Floats) -> None:
        """Moves the outer momentum and the anchors of ``span``."""
        lr, mu = np.float32(self.chosen.outer_lr), np.float32(self.chosen.outer_momentum)
        for start in range(span.start, span.stop, _CHUNK):
            part = slice(start, min(start + _CHUNK, span.stop))
            anchor, buf, mean = self.anchor[part], self.momentum[part], averages[part]
            buf *= mu
            buf += mean
            move = mu * buf
            move += mean
            move *= lr
            anchor -= move

    def mixed(self, tensor: int, value: Floats) -> Floats:
        """Returns what a parameter becomes after its sync, where this rank has ``value``: float32."""
        anchor = self.anchor[self.flat_span(tensor)]
        if not self.chosen.mix or tensor in self.buffers:
            return anchor
        return np.float32(1.0 - self.chosen.mix) * anchor + np.float32(self.chosen.mix) * value

    def delta_addresses(self, tensors: Sequence[int]) -> list[int]:
        """Returns the addresses of what is sent of ``tensors``."""
        first = address(self.delta)
        return [first + 4 * int(self.layout.offsets[tensor]) for tensor in tensors]

    def set_anchor(self, tensor: int, value: Floats) -> None:
        """Sets the anchor of a tensor: ``numel`` float32."""
        self.anchor[self.flat_span(tensor)] = value

    # The schedule, which follows from the number of steps and the options alone

    def begins_at(self, step: int) -> int | None:
        """Returns the fragment whose sync begins after step ``step``; None for none."""
        target = step + self.chosen.delay
        return None if target % self.chosen.period else (target // self.chosen.period - 1) % self.chosen.fragments

    def ends_at(self, step: int) -> bool:
        """Returns True if a sync that began ``delay`` steps ago ends after step ``step``."""
        return step % self.chosen.period == 0

    # State

    def report(self) -> dict[str, Any]:
        return {
            "stage": "local" if self.under_way is None else "syncing",
            "synced": self.is_synced,
        }

    def state(self) -> dict[str, Any]:
        """Returns the state that is the same on all ranks; ``anchor`` and ``momentum`` are by tensor name, flat."""
        names = [spec.name for spec in self.layout.tensors]
        return {
            **super().state(),
            "step": self.step,
            "under_way": self.under_way,
            "synced_at": list(self.synced_at),
            "has_buffer_anchors": self.has_buffer_anchors,
            "anchor": {name: self.anchor[self.flat_span(t)].copy() for t, name in enumerate(names)},
            "momentum": {names[t]: self.momentum[self.flat_span(t)].copy() for part in self.parameters for t in part},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        found: list[tuple[Floats, int, Any]] = []
        for tensor, spec in enumerate(self.layout.tensors):
            for own, name in ((self.anchor, "anchor"), (self.momentum, "momentum")):
                if spec.name in state[name]:
                    flat_floats(state[name][spec.name], spec.numel, f"{name} of {spec.name!r}")
                    found.append((own, tensor, state[name][spec.name]))
        super().load_state(state)
        for own, tensor, values in found:
            own[self.flat_span(tensor)] = values.reshape(-1)
        self.step, self.under_way, self.is_synced = int(state["step"]), state["under_way"], True
        self.synced_at = [int(step) for step in state["synced_at"]]
        self.has_buffer_anchors = bool(state["has_buffer_anchors"])

    def forget(self) -> None:
        """Returns to the state before the first step; the anchors are to be set."""
        self.anchor[:] = self.momentum[:] = 0.0
        self.has_buffer_anchors = False
        self.steps[:] = 0
        self.step, self.under_way, self.is_synced = 0, None, True
        self.synced_at = [0] * self.chosen.fragments
        self.reset_rank_state()

    def rank_state(self) -> dict[str, Any]:
        """Returns the errors, the step, and while a sync is under way what this rank sends in it, as ``delta``."""
        flat = {} if self.under_way is None else {"delta": self.delta.copy()}
        return {**super().rank_state(), "flat": flat, "plain": {"step": self.step, "synced": self.is_synced}}

    def check_rank_state(self, state: Mapping[str, Any]) -> None:
        super().check_rank_state({**state, "flat": {}})
        step = state.get("plain", {}).get("step")
        if step != self.step:
            raise ValueError(f"need a state of step {self.step}, got one of step {step}")
        flat = state.get("flat", {})
        needed = {"parameter"} if self.under_way is None else {"parameter", "delta"}
        if flat.keys() != needed:
            raise ValueError(f"need flat buffers {sorted(needed)}, got {sorted(flat)}")
        for name, buffer in flat.items():
            flat_floats(buffer, self.layout.flat_numel, f"flat buffer {name!r}")

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Loads the errors, and keeps the state as ``loaded``: the rest is for the driver."""
        self.check_rank_state(state)
        self.reset_rank_state()
        for kind, own in self.rank_buffers().items():
            for name, buffer in own.items():
                if state[kind][name].size:
                    buffer[:] = state[kind][name]
        self.is_synced = bool(state["plain"]["synced"])
        self.loaded = state

    def reset_rank_state(self) -> None:
        super().reset_rank_state()
        self.loaded = None

    @property
    def has_rank_state(self) -> bool:
        return self.step > 0

    def replica_addresses(self) -> Any:
        """Returns the addresses of the anchors."""
        return address(self.anchor) + 4 * self.layout.offsets.astype(np.uint64)

    def memory(self) -> dict[str, int]:
        """Returns the bytes held, by buffer."""
        return {
            **super().memory(),
            "anchor": self.anchor.nbytes,
            "momentum": self.momentum.nbytes,
            "delta": self.delta.nbytes,
            "update": self._averages.nbytes,
            "packed_result": self.results_nbytes(),
        }


def _runs(numels: Sequence[int], count: int) -> list[list[int]]:
    """Cuts tensors, in their order, into ``count`` runs of about equal numbers of elements, none of them empty."""
    runs: list[list[int]] = []
    first, left = 0, sum(numels)
    for number in range(count, 0, -1):
        last, taken = first + 1, numels[first]
        # A further tensor belongs here if more of it lies before this run's share of what is left than behind it.
        while len(numels) - last >= number and (number == 1 or 2 * taken + numels[last] <= 2 * left // number):
            taken += numels[last]
            last += 1
        runs.append(list(range(first, last)))
        first, left = last, left - taken
    return runs
