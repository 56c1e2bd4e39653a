"""How values of elastic states are written: all come back, and only what is of an unknown type is pickled."""

from __future__ import annotations

import io
import json
import random
import struct
import threading
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocomm.elastic import ObjectState, plain
from ocomm.errors import InvalidRequestError


class Counting(plain.Codec):
    """Counts what is unpickled."""

    def __init__(self) -> None:
        self.unpickled = 0

    def unpickle(self, data: bytes) -> Any:
        self.unpickled += 1
        return super().unpickle(data)


def written(value: Any) -> bytes:
    file = io.BytesIO()
    plain.dump(value, file, plain.Codec())
    return file.getvalue()


def there_and_back(value: Any) -> tuple[Any, int]:
    codec = Counting()
    return plain.load(io.BytesIO(written(value)), codec), codec.unpickled


keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
leaves = keys | st.complex_numbers(allow_nan=False)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.sets(keys)
        | st.frozensets(keys)
        | st.dictionaries(keys | st.tuples(keys), inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
    ),
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            map(same, [x for pair in one.items() for x in pair], [x for pair in other.items() for x in pair])
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(values)
def test_plain_values_come_back_with_their_types_and_nothing_is_pickled(value: Any) -> None:
    back, unpickled = there_and_back(value)
    assert same(value, back) and not unpickled


@pytest.mark.parametrize("dtype", ["?", "i1", "<u2", ">i4", "f2", "f4", "f8", "c16", "S3", "U2", "M8[ns]", "bfloat16"])
def test_arrays_come_back_in_every_bit(dtype: str) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    for shape in [(), (0,), (5,), (2, 0), (2, 3)]:
        # Of booleans, only some bytes are values.
        data = np.random.default_rng(0).integers(0, 2, (*shape, np.dtype(dtype).itemsize), np.uint8)
        array = data.reshape(-1).view(dtype).reshape(shape)
        for value in (array, array.T, array[::2] if shape else array, array[()] if not shape else array):
            (back, again), unpickled = there_and_back([value, value])
            assert not unpickled and again is back
            assert type(back) is type(value) and back.dtype == value.dtype and back.shape == value.shape
            assert np.array(back).tobytes() == np.array(value).tobytes()


def test_random_states_and_counters_need_no_pickle() -> None:
    state = [random.getstate(), np.random.default_rng(3).bit_generator.state, Counter("aab"), float("inf")]
    assert there_and_back(state) == (state, 0)


def test_a_value_that_is_there_twice_is_one_value_again_even_in_itself() -> None:
    array, inner = np.arange(1000), [1]
    value: dict[str, Any] = {"a": array, "b": (array, inner), "c": inner}
    value["self"] = value
    back, _ = there_and_back(value)
    assert back["a"] is back["b"][0] and back["b"][1] is back["c"] and back["self"] is back
    assert len(written(value)) < 9000


def test_attributes_of_an_ordered_dict_come_back() -> None:
    state = OrderedDict(weight=1)
    state._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    back, unpickled = there_and_back(state)
    assert back == state and back._metadata == state._metadata and not unpickled  # type: ignore[attr-defined]


class Thing:
    def __init__(self, value: int) -> None:
        self.value = value


def test_objects_are_pickled_each_by_itself() -> None:
    thing = Thing(3)
    (back, again, array), unpickled = there_and_back([thing, thing, np.array([None])])
    assert unpickled == 2 and back is again and back.value == 3 and array[0] is None


def test_a_value_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(
        InvalidRequestError,
        match=r"^optimizers\.0\.schedule of the elastic state is a function, which cannot be kept: \w+: .*<lambda>.*\. "
        r"Leave it out of the state, and make it anew from values that are in it\.$",
    ):
        plain.dump(
            {"epoch": 1, "optimizers": {0: {"lr": 0.1, "schedule": lambda step: step}}}, io.BytesIO(), plain.Codec()
        )


def test_a_value_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^lock of the elastic state is a lock, which cannot be kept: TypeErr"
    ):
        ObjectState(epoch=0, lock=threading.Lock())


def tree(node: Any, rest: bytes = b"") -> io.BytesIO:
    text = json.dumps(node).encode()
    return io.BytesIO(struct.pack("<Q", len(text)) + text + rest)


@pytest.mark.parametrize(
    "node",
    [
        ["array", ["|O", [1]], 8],
        ["array", [[["a", "|O"]], [1]], 8],
        ["array", ["<f4", [3]], 8],
        ["array", ["<f4", [4]], 16],
        ["tensor", ["float32", [2], [0]], 8],
        ["same", 0],
        ["eval", None, 8],
        ["array", ["<f4", [-1]], -4],
        {"array": 1},
        [],
    ],
    ids=str,
)
def test_a_tree_that_is_never_written_is_an_error(node: Any) -> None:
    codec = Counting()
    with pytest.raises((ValueError, IndexError, TypeError)):
        plain.load(tree(node, b"\1" * 8), codec)
    assert not codec.unpickled


def test_what_is_cut_short_is_an_error() -> None:
    data = written({"a": np.arange(4), "b": [1, 2]})
    for length in range(len(data)):
        with pytest.raises(ValueError):
            plain.load(io.BytesIO(data[:length]), plain.Codec())
