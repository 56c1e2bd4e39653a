"""ocomm's errors, as TensorFlow scripts catch them: each is also the class of ``tf.errors`` that Horovod raises.

    InvalidRequestError            also tf.errors.InvalidArgumentError
    `-- UnsupportedError           also NotImplementedError
    HorovodInternalError           also tf.errors.FailedPreconditionError
    `-- MismatchError, StallError, PeerError, NonFiniteError

A graph reports an error by a status code and a text alone: there it is TensorFlow's class, and its message begins with
the name of ocomm's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

from ocomm import errors
from ocomm.errors import OcommError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _message_of(arguments: tuple[Any, ...]) -> str:
    """From the message alone, or TensorFlow's four arguments: Keras makes a new error, of the same class, of one that
    comes out of a layer or an operation of its own."""
    return str(arguments[0] if len(arguments) == 1 else arguments[2])


class InvalidRequestError(errors.InvalidRequestError, tf.errors.InvalidArgumentError):
    """A call which is wrong on this rank alone, found before anything is sent."""

    def __init__(self, *arguments: Any) -> None:
        message = _message_of(arguments)
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)
        self.args = (message,)


class UnsupportedError(errors.UnsupportedError, InvalidRequestError):
    """No tensor of this kind has the operation: Adasum of integers, or a scale factor of ``tf.IndexedSlices``."""


class HorovodInternalError(errors.HorovodInternalError, tf.errors.FailedPreconditionError):
    """A collective failed."""

    def __init__(self, *arguments: Any) -> None:
        message = _message_of(arguments)
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)
        self.args = (message,)


class MismatchError(errors.MismatchError, HorovodInternalError):
    """The ranks do not agree on what a collective is."""


class StallError(errors.StallError, HorovodInternalError):
    """Some ranks did not submit, or did not answer, before a deadline."""


class PeerError(errors.PeerError, HorovodInternalError):
    """Another rank raised, left the job or died."""


class NonFiniteError(errors.NonFiniteError, HorovodInternalError):
    """A gradient has NaN or Inf on some rank; the step was discarded on all ranks, no state was changed."""


#: Of each of ocomm's errors, the first that fits.
_CLASSES: dict[type[OcommError], Callable[[str], OcommError]] = {
    errors.MismatchError: MismatchError,
    errors.StallError: StallError,
    errors.PeerError: PeerError,
    errors.NonFiniteError: NonFiniteError,
    errors.HorovodInternalError: HorovodInternalError,
    errors.UnsupportedError: UnsupportedError,
    errors.InvalidRequestError: InvalidRequestError,
}


def status_of(error: BaseException) -> int:
    """The status code with which ``error`` comes out of a graph."""
    if isinstance(error, errors.InvalidRequestError):
        return int(tf.errors.INVALID_ARGUMENT)
    return int(tf.errors.FAILED_PRECONDITION if isinstance(error, OcommError) else tf.errors.UNKNOWN)


@contextlib.contextmanager
def of_tensorflow() -> Iterator[None]:
    """Errors of ocomm that leave this block are the classes of this module."""
    try:
        yield
    except OcommError as error:
        make = next((make for kind, make in _CLASSES.items() if isinstance(error, kind)), None)
        if make is None or isinstance(error, tf.errors.OpError):
            raise
        raise make(str(error)).with_traceback(error.__traceback__) from error.__cause__


def public(function: _Function) -> _Function:
    """Decorates what users call: its errors are TensorFlow's, too, and AutoGraph leaves it as it is.

    AutoGraph would translate this library inside ``tf.function`` as if it were the user's program.
    """

    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        with of_tensorflow():
            return function(*arguments, **options)

    return tf.autograph.experimental.do_not_convert(wrapper)
