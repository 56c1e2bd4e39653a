"""Saved states: checks that they are complete and fit, and redistributes errors when the number of ranks changes.

A saved state is a dict with string keys of plain values, lists, dicts and NumPy arrays. What is the same on all ranks
is saved once. Each rank also saves what only it has, its *rank state*:

    worker   buffers of what this rank compresses (worker errors)
    owner    buffers of the blocks that this rank owns (errors as a server)
    flat     buffers of all elements (local moments)
    plain    plain values, the same on all ranks, that belong to the others

On another number of ranks owner buffers move with their blocks. Of the other buffers every rank gets the mean over the
ranks that had the element, so that an average over the ranks is the same as before. If a rank state is lost, its errors
count as zero; of a flat buffer the mean is over the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocomm.compression.layout import Layout, TensorSpec
from ocomm.errors import CheckpointError
from ocomm.kernels.base import Kernels
from ocomm.types import Nodes

State = Mapping[str, Any]
#: What ``torch.compile``, DistributedDataParallel, FSDP and activation checkpoints put into the names of parameters.
_WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
#: The entries of a core's state that have the names of tensors as keys.
_BY_TENSOR = ("tensors", "sharded", "anchor", "momentum")


def fingerprint(state: Any, kernels: Kernels) -> str:
    """Returns a hash of a state's contents, 16 hexadecimal digits. An empty dict counts as absent, because some formats
    drop it.
    """
    hasher = hashlib.blake2b(digest_size=8)
    hasher.update(json.dumps(_outline(state, kernels), sort_keys=True).encode())
    return hasher.hexdigest()


def _outline(value: Any, kernels: Kernels) -> Any:
    """Returns the value with checksums in the place of its arrays."""
    if isinstance(value, Mapping):
        parts = {key: _outline(item, kernels) for key, item in value.items()}
        return {key: part for key, part in parts.items() if part != {}}
    if isinstance(value, (list, tuple)):
        return [_outline(item, kernels) for item in value]
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        address = np.array([array.ctypes.data if array.size else 0], np.uint64)
        checksum = kernels.checksums(address, np.array([array.nbytes], np.int64))[0]
        return [str(array.dtype), list(array.shape), int(checksum)]
    return value


def add_checksum(state: dict[str, Any], kernels: Kernels) -> dict[str, Any]:
    """Adds a ``checksum`` of everything else in the state, and returns it."""
    return {**state, "checksum": fingerprint(state, kernels)}


def require_checksum(state: State, kernels: Kernels, where: str) -> None:
    """Raises CheckpointError, whose message begins with ``where``, if the state does not have the checksum it names."""
    if "checksum" not in state:
        raise CheckpointError(f"{where} has no checksum, so it is not what rank_state_dict() returned, or not all.")
    try:
        found = fingerprint({key: value for key, value in state.items() if key != "checksum"}, kernels)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where} is damaged: it has {error}, which is never saved.") from error
    if found != state["checksum"]:
        raise CheckpointError(f"{where} is damaged: its checksum is {state['checksum']}, its contents have {found}.")


# Layouts


def describe(layout: Layout) -> list[list[Any]]:
    """Returns the tensors as plain values: name, shape, order and dtype of each."""
    return [[spec.name, [int(n) for n in spec.shape], spec.order, spec.dtype] for spec in layout.tensors]


def require_tensors(saved: Iterable[Any], layout: Layout, where: str) -> None:
    """Raises CheckpointError, which names the first different tensor, if a layout saved by ``describe`` has other
    tensors.
    """
    before = [(name, tuple(shape), order, dtype) for name, shape, order, dtype in saved]
    now = [(name, tuple(shape), order, dtype) for name, shape, order, dtype in describe(layout)]
    for number in range(max(len(before), len(now))):
        old = _spell(before[number]) if number < len(before) else "nothing"
        new = _spell(now[number]) if number < len(now) else "nothing"
        if old != new:
            raise CheckpointError(
                f"{where} is of another model: as tensor number {number} it has {old}, the optimizer has {new}. "
                "Wrap the same parameters, under the same names and in the same order."
            )


def _spell(tensor: tuple[str, tuple[int, ...], str, str]) -> str:
    name, shape, order, dtype = tensor
    return f"'{name}' {shape} {dtype} order {order}"


def unwrapped(name: str) -> str:
    """Returns the name of a parameter without what Torch's wrappers of modules put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def renamed(state: State, layout: Layout, kernels: Kernels, where: str) -> State:
    """Returns a saved state under the names of ``layout``, if the names in it are others only because Torch's wrappers
    of modules were switched on or off since; else ``state`` itself.

    Raises CheckpointError if the state to be renamed is damaged.
    """
    saved = state.get("tensors")
    if not isinstance(saved, list):  # whoever checks the state says what it is
        return state
    before = [str(tensor[0]) if isinstance(tensor, list) and tensor else "" for tensor in saved]
    now = [spec.name for spec in layout.tensors]
    if before == now or list(map(unwrapped, before)) != list(map(unwrapped, now)):
        return state
    require_checksum(state, kernels, where)
    names = dict(zip(before, now, strict=True))

    def with_new(entries: State) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in entries.items()}

    new = {**state, "tensors": [[name, *rest] for name, (_, *rest) in zip(now, saved, strict=True)]}
    if "core" in state:  # not in rank states
        core = state["core"]
        new["core"] = {**core, **{key: with_new(core[key]) for key in _BY_TENSOR if key in core}}
        new["masters"] = with_new(state.get("masters", {}))
    if _digest(saved, state) == state["digest"]:  # else it is of another release
        new["digest"] = _digest(new["tensors"], state)
    return add_checksum({key: value for key, value in new.items() if key != "checksum"}, kernels)


def _digest(tensors: Iterable[Any], state: State) -> str:
    """Returns the digest of the layout of ``tensors``, as ``describe`` returns them, in the run of ``state``."""
    specs = [TensorSpec(name, tuple(shape), order, dtype) for name, shape, order, dtype in tensors]
    return f"{_layout(specs, state).digest:016x}"


def _layout(tensors: Iterable[TensorSpec], state: State) -> Layout:
    nodes = Nodes(tuple(tuple(node) for node in state["nodes"]), state["groups"])
    return Layout(tensors, state["ranks"], state["block_size"], nodes)


def layout_of(state: State, layout: Layout, where: str) -> Layout:
    """Returns the layout of the run in which a rank state was saved; its tensors are those of ``layout``.

    Raises CheckpointError if that layout cannot be made again, for instance because another release has saved it.
    """
    old = _layout(layout.tensors, state)
    if f"{old.digest:016x}" != state["digest"]:
        raise CheckpointError(
            f"{where} has layout {state['digest']}, but its tensors on {state['ranks']} ranks have layout "
            f"{old.digest:016x} here: it was written by another release of ocomm."
        )
    return old


def _runs(layout: Layout, rank: int, kind: str) -> NDArray[np.int64]:
    """Returns where the elements of a rank's buffer lie: rows (first in the flat buffers, first in the buffer,
    number).
    """
    if kind == "flat":
        return np.array([[0, 0, layout.flat_numel]])
    blocks = layout.blocks
    rows, place = {
        "worker": (blocks["slice"] == layout.slice_of(rank), "local"),
        "owner": (blocks["owner"] == rank, "owned"),
    }[kind]
    mine = blocks[rows]
    return np.stack([mine["offset"], mine[place], mine["length"].astype(np.int64)], axis=1)


class Resharding:
    """Redistributes the rank states of ``old`` to ``rank`` of ``new``: ``add`` them in rank order, then take the
    ``result``.

    Both layouts have the same tensors, so their flat buffers are the same, whatever the blocks.
    """

    def __init__(self, old: Layout, new: Layout, rank: int) -> None:
        assert old.tensors == new.tensors
        self.old = old
        self.new = new
        self.rank = rank
        self._next = 0
        self._plain: Any = {}
        #: Number of ranks of a run that have each element in a buffer of this kind.
        self._holders = {"worker": len(old.nodes.members), "owner": 1, "flat": old.ranks}
        self._totals: dict[str, dict[str, NDArray[np.float64]]] = {kind: {} for kind in self._holders}

    def add(self, state: State) -> None:
        """Adds the state of the next old rank. A buffer without elements stands for zeros: nothing was compressed
        yet.
        """
        rank, self._next = self._next, self._next + 1
        assert state["rank"] == rank
        self._plain = state.get("plain", {})
        for kind, totals in self._totals.items():
            runs = _runs(self.old, rank, kind)
            for name, buffer in state.get(kind, {}).items():
                total = totals.setdefault(name, np.zeros(0))
                if buffer.size and not total.size:
                    total = totals[name] = np.zeros(self.old.flat_numel)
                for flat, own, length in runs.tolist() if buffer.size else ():
                    total[flat : flat + length] += buffer[own : own + length]

    def skip(self) -> None:
        """Skips the next old rank, whose state is lost."""
        self._next += 1
        self._holders["flat"] -= 1

    def result(self) -> dict[str, Any]:
        """Returns the buffers of the new rank: means over the ranks that had each element, in float64, rounded once."""
        assert self._next == self.old.ranks
        numels = {
            "worker": self.new.worker_numel(self.rank),
            "owner": self.new.owned_numel(self.rank),
            "flat": self.new.flat_numel,
        }
        state: dict[str, Any] = {"plain": self._plain}
        for kind, totals in self._totals.items():
            runs = _runs(self.new, self.rank, kind).tolist()
            state[kind] = {}
            for name, total in totals.items():
                buffer = state[kind][name] = np.zeros(numels[kind] if total.size else 0, np.float32)
                for flat, own, length in runs if total.size else ():
                    buffer[own : own + length] = total[flat : flat + length] / self._holders[kind]
        return state


def stand_in(states: Iterable[State]) -> dict[str, Any]:
    """Returns a rank state for a rank that has lost its own, made from those of the other ranks of the same layout."""
    plain: Any = {}
    empty: dict[str, dict[str, NDArray[np.float32]]] = {"worker": {}, "owner": {}}
    totals: dict[str, NDArray[np.float64]] = {}
    count = 0
    for state in states:
        count += 1
        plain = state.get("plain", {})
        for kind, buffers in empty.items():
            buffers.update({name: np.zeros(0, np.float32) for name in state.get(kind, {})})
        for name, buffer in state.get("flat", {}).items():
            if buffer.size:
                totals[name] = totals.get(name, 0.0) + buffer.astype(np.float64)
    flat = {name: (total / count).astype(np.float32) for name, total in totals.items()}
    return {**empty, "flat": flat, "plain": plain}
