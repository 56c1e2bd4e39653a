"""Writes the values of a state so that reading them back runs no code: a tree in JSON, then the bytes of arrays.

    length of the tree as a little-endian 64-bit integer | tree | bytes of the first array | of the second | ...

In the tree None, booleans, integers of 64 bits, floats and strings stand for themselves. Everything else is a list that
begins with its kind: ``["tuple", [1, 2]]``, ``["array", ["<f4", [2, 3]], 24]``. The last number of such a leaf is the
number of its bytes behind the tree, where leaves follow each other in the order of the tree. Only values of other types
than those below are pickled, each by itself; reading those, and no others, runs code.

A value that is in the tree twice is written once, and is one object again when it is read.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ocomm import json_values
from ocomm.errors import InvalidRequestError, in_words

_LENGTH = struct.Struct("<Q")
_INT64 = range(-(2**63), 2**63)
#: Kinds of NumPy's dtypes whose elements are plain bytes; those of ml_dtypes are "V".
_KINDS = frozenset("biufcSUVmM")
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_SEQUENCES: dict[str, type] = {"tuple": tuple, "frozenset": frozenset}
_NAMES = {made: name for name, made in {**_MAPPINGS, **_SEQUENCES, "list": list, "set": set}.items()}


class Codec:
    """Values that a framework adds to the plain ones, and how all other values are pickled. This one adds none."""

    def key(self, leaf: Any) -> Hashable:
        """Returns a key that is equal for two leaves of the tree that are written once."""
        return id(leaf)

    def describe(self, leaf: Any) -> tuple[Any, NDArray[np.uint8]] | None:
        """Returns what JSON can say about a tensor, and its bytes; None for other values."""
        return None

    def rebuild(self, description: Any, data: NDArray[np.uint8]) -> Any:
        """Returns the tensor that ``describe`` has described; it may keep ``data``."""
        raise ValueError(f"there is a tensor of another framework: {description!r}")

    def pickle(self, leaf: Any) -> bytes:
        """Returns the pickled bytes of any other value."""
        return pickle.dumps(leaf, pickle.HIGHEST_PROTOCOL)

    def unpickle(self, data: bytes) -> Any:
        """Returns the value that ``pickle`` has written. Runs the code that the bytes name."""
        return pickle.loads(data)


def not_kept(name: str, value: Any, error: Exception) -> InvalidRequestError:
    """Returns the error for the value ``name`` of a state that cannot be copied or pickled."""
    return InvalidRequestError(
        f"{name} of the elastic state is a {type(value).__name__}, which cannot be kept: {in_words(error)}. Leave it "
        "out of the state, and make it anew from values that are in it."
    )


def dump(value: Any, file: IO[bytes], codec: Codec) -> None:
    """Writes ``value`` into ``file``. Raises InvalidRequestError, which names the value, if one cannot be pickled."""
    writer = _Writer(codec)
    tree = json.dumps(writer.node(value), separators=(",", ":")).encode()
    file.write(_LENGTH.pack(len(tree)))
    file.write(tree)
    for data in writer.leaves:
        file.write(data)


def load(file: IO[bytes], codec: Codec) -> Any:
    """Returns what ``dump`` has written, from the position of ``file`` to its end.

    Raises ValueError, or what the codec raises, for anything else. Memory is allocated only for bytes that the file
    has.
    """
    reader = _Reader(file, codec)
    (length,) = _LENGTH.unpack(reader.read(_LENGTH.size).tobytes())
    tree = json_values.parse(reader.read(length).tobytes())
    try:
        value = reader.value(tree)
    except (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"its tree cannot be read: {in_words(error)}") from error
    if reader.left:
        raise ValueError(f"{reader.left} bytes follow its end")
    return value


class _Writer:
    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._seen: dict[Hashable, int] = {}
        self._path: list[str] = []  # keys of the dicts around the current value
        self.leaves: list[Any] = []

    def node(self, value: Any) -> Any:
        """Returns the value's part of the tree."""
        kind = type(value)
        if value is None or kind in (bool, float, str) or (kind is int and value in _INT64):
            return value
        if kind is int:
            return ["int", hex(value)]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind in (tuple, frozenset):  # these need no identity, because they are immutable
            return [_NAMES[kind], [self.node(item) for item in value]]
        key = self._codec.key(value)
        if key in self._seen:
            return ["same", self._seen[key]]
        # Registered before its items, so that a list may contain itself.
        self._seen[key] = len(self._seen)
        if kind in (list, set):
            return [_NAMES[kind], [self.node(item) for item in value]]
        if kind in _NAMES:
            # An OrderedDict has attributes, too: a module's state_dict has the versions of layers there.
            more = [self.node(vars(value))] if kind is OrderedDict and vars(value) else []
            return [_NAMES[kind], [self._item(name, item) for name, item in value.items()], *more]
        return self._leaf(value)

    def _item(self, name: Any, item: Any) -> list[Any]:
        self._path.append(str(name))
        found = [self.node(name), self.node(item)]
        self._path.pop()
        return found

    def _leaf(self, value: Any) -> list[Any]:
        if type(value) in (bytes, bytearray):
            return self._keep("bytes" if type(value) is bytes else "bytearray", None, value)
        is_array, is_scalar = (
            type(value) is np.ndarray,
            isinstance(value, np.generic) and type(value) is value.dtype.type,
        )
        if (is_array or is_scalar) and (name := _dtype_name(value.dtype)):
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return self._keep("array" if is_array else "scalar", [name, list(value.shape)], data)
        described = self._codec.describe(value)
        if described is not None:
            return self._keep("tensor", *described)
        try:
            pickled = self._codec.pickle(value)
        except Exception as error:  # whatever the value's class raises
            raise not_kept(".".join(self._path), value, error) from error
        return self._keep("pickle", None, pickled)

    def _keep(self, kind: str, description: Any, data: Any) -> list[Any]:
        self.leaves.append(data)
        return [kind, description, memoryview(data).nbytes]


class _Reader:
    def __init__(self, file: IO[bytes], codec: Codec) -> None:
        self._file = file
        self._codec = codec
        self._made: list[Any] = []
        start = file.tell()
        #: Number of bytes that have not been read.
        self.left = file.seek(0, os.SEEK_END) - start
        file.seek(start)

    def read(self, nbytes: int) -> NDArray[np.uint8]:
        """Reads ``nbytes`` bytes."""
        if not 0 <= nbytes <= self.left:
            raise ValueError(f"it ends {nbytes - self.left} bytes too early")
        self.left -= nbytes
        data = np.empty(nbytes, np.uint8)
        view, got = data.data, 0
        while got < nbytes:
            count = self._file.readinto(view[got:])  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"it ends {nbytes - got} bytes too early")
            got += count
        return data

    def value(self, node: Any) -> Any:
        """Returns the value of a part of the tree."""
        if not isinstance(node, list):
            if isinstance(node, dict):
                raise ValueError("the tree has an object of JSON, which is never written")
            return node
        kind, *rest = node
        if kind == "int":
            return int(rest[0], 16)
        if kind == "complex":
            return complex(*rest)
        if kind == "same":
            if not 0 <= rest[0] < len(self._made):  # a negative one would be counted from the end
                raise ValueError(f"the tree refers to value {rest[0]} of {len(self._made)}")
            return self._made[rest[0]]
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.value(item) for item in rest[0])
        if kind == "list":
            made: Any = []
            self._made.append(made)
            made.extend(self.value(item) for item in rest[0])
            return made
        if kind == "set":
            made = set()
            self._made.append(made)
            made.update(self.value(item) for item in rest[0])
            return made
        if kind in _MAPPINGS:
            made = _MAPPINGS[kind]()
            self._made.append(made)
            attributes = [self.value(item) for item in rest[1:]]
            for name, item in rest[0]:
                key = self.value(name)  # before the item, in the order in which they were written
                made[key] = self.value(item)
            if attributes:
                vars(made).update(attributes[0])
            return made
        made = self._leaf(kind, *rest)
        self._made.append(made)
        return made

    def _leaf(self, kind: str, description: Any, nbytes: int) -> Any:
        data = self.read(nbytes)
        if kind == "bytes":
            return data.tobytes()
        if kind == "bytearray":
            return bytearray(data)
        if kind in ("array", "scalar"):
            name, shape = description
            dtype = np.dtype(name)
            if _dtype_name(dtype) != name or min(shape, default=0) < 0:
                raise ValueError(f"an array has dtype {name!r} and shape {shape}, which are never written")
            made = data.view(dtype).reshape(shape)
            return made if kind == "array" else made[()]
        if kind == "tensor":
            return self._codec.rebuild(description, data)
        if kind == "pickle":
            return self._codec.unpickle(data.tobytes())
        raise ValueError(f"the tree has {kind!r}, which this version of ocomm does not know")


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """Returns a name from which ``numpy.dtype`` makes the same dtype; "" for dtypes whose elements are not plain
    bytes.
    """
    if dtype.hasobject or dtype.fields is not None or dtype.kind not in _KINDS or not dtype.itemsize:
        return ""
    for name in (dtype.str, dtype.name):
        try:
            if np.dtype(name) == dtype:
                return name
        except TypeError:
            continue
    return ""
