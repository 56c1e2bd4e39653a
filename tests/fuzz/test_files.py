"""Commits and saved states with damage: it is noticed, and readers allocate no more than a file has."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import tracemalloc
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocomm.elastic import folder as folders
from ocomm.elastic import plain
from ocomm.errors import CheckpointError
from ocomm.kernels.reference import ReferenceKernels
from ocomm.optim import checkpoint
from tests.fuzz.harm import examples, harmed
from tests.unit.test_plain import there_and_back, values, written

NAME = "set0.1-g0001-00000005-aa.all"


class NoPickle(plain.Codec):
    """Reads no pickles, because damaged ones run any code."""

    def unpickle(self, data: bytes) -> NoReturn:
        raise ValueError("a pickle")


@pytest.fixture(scope="module")
def commit(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a file of a commit."""
    path = tmp_path_factory.mktemp("commits")
    folders.Folder(path, "set0.1").write(
        NAME, lambda file: plain.dump({"step": 3, "w": np.arange(5.0)}, file, plain.Codec())
    )
    return (path / NAME).read_bytes()


@examples(40)
@given(st.data())
def test_no_damage_to_a_commit_is_missed(commit: bytes, data: st.DataObject) -> None:
    damaged = data.draw(harmed(commit))
    why = folders.damage(io.BytesIO(damaged), NAME)
    assert bool(why) == (damaged != commit)
    if why:
        with pytest.raises(ValueError):
            folders.received(damaged, NAME)


@examples(40)
@given(values, st.data())
def test_a_damaged_tree_is_a_value_error_or_a_value(value: Any, data: st.DataObject) -> None:
    damaged = data.draw(harmed(written({"state": value, "array": np.arange(3), "again": [value, value]})))
    try:
        read = plain.load(io.BytesIO(damaged), NoPickle())
    except ValueError:
        return
    there_and_back(read)


NUMBERS = st.sampled_from([-1, 0, 1, 2**40, 2**63, True, None, 1.5, "x", [], [0], {}])


KINDS = [
    "int",
    "complex",
    "same",
    "tuple",
    "list",
    "set",
    "dict",
    "ordered",
    "counter",
    "bytes",
    "array",
    "scalar",
    "tensor",
    "?",
]
arguments = st.recursive(
    NUMBERS | st.sampled_from(["<f4", "O", "V0", "S99999999999"]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@examples(150)
@given(st.sampled_from(KINDS), st.lists(arguments, max_size=3))
def test_every_node_of_a_tree_with_wrong_arguments_is_a_value_error_or_a_value(kind: str, given_: list[Any]) -> None:
    tree = json.dumps([kind, *given_]).encode()
    file = io.BytesIO(plain._LENGTH.pack(len(tree)) + tree + bytes(8))
    with contextlib.suppress(ValueError):
        plain.load(file, NoPickle())


@pytest.mark.parametrize("nbytes", [2**20, 2**40, 2**63])
def test_memory_is_allocated_only_for_what_the_file_has(nbytes: int) -> None:
    tree = b'["bytes", null, %d]' % nbytes
    tracemalloc.start()
    try:
        for data in (plain._LENGTH.pack(nbytes), plain._LENGTH.pack(len(tree)) + tree + b"abc"):
            with pytest.raises(ValueError, match="bytes too early"):
                plain.load(io.BytesIO(data), NoPickle())
        assert tracemalloc.get_traced_memory()[1] < 2**19
    finally:
        tracemalloc.stop()


# States of ranks, as ``rank_state_dict`` returns them

KERNELS = ReferenceKernels()
STATE: dict[str, Any] = checkpoint.add_checksum(
    {
        "version": 1,
        "rank": 0,
        "steps": 12,
        "options": {"lr": 0.5, "betas": [0.9, 0.999], "name": "x"},
        "worker": {"error": np.arange(7, dtype=np.float32)},
        "flat": {"m": np.zeros((2, 3))},
    },
    KERNELS,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values of a state are that are no containers."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in places(item, (*path, key))] or ([path] if path else [])


def spelling(value: Any) -> Any:
    """Is the same for two values if they are the same in every bit."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    return type(value), value


def put(state: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = value


@examples(40)
@given(st.data())
def test_a_state_in_which_anything_is_another_value_is_refused(data: st.DataObject) -> None:
    checkpoint.require_checksum(STATE, KERNELS, "it")
    state = copy.deepcopy(STATE)
    path = data.draw(st.sampled_from(places(STATE)))
    before: Any = STATE
    for key in path:
        before = before[key]
    if isinstance(before, np.ndarray):
        raw = data.draw(harmed(before.tobytes()))
        now: Any = (
            np.frombuffer(raw[: len(raw) // 4 * 4], np.float32)
            if data.draw(st.booleans())
            else np.frombuffer(raw, np.uint8)
        )
    else:
        now = data.draw(
            st.none() | st.integers() | st.text() | st.binary() | st.floats() | st.just(object()) | st.just({"a": {1}})
        )
    if spelling(now) == spelling(before):
        return
    put(state, path, now)
    with pytest.raises(CheckpointError, match=r"^it (is damaged|has no checksum)"):
        checkpoint.require_checksum(state, KERNELS, "it")
