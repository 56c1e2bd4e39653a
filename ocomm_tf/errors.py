"""ocomm's errors for TensorFlow scripts: each is also the class of ``tf.errors`` that Horovod raises.

    InvalidRequestError            also tf.errors.InvalidArgumentError
    `-- UnsupportedError           also NotImplementedError
    HorovodInternalError           also tf.errors.FailedPreconditionError
    `-- MismatchError, StallError, PeerError, NonFiniteError

A graph reports an error only by a status code and a text: it raises TensorFlow's class, with a message that begins with
the name of ocomm's. While a graph is traced the classes are those above: AutoGraph leaves an error with
``ag_pass_through`` as it is, and would raise a StagingError in the place of any other.
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
    """Returns the message, given alone or as one of TensorFlow's four arguments.

    Keras makes a new error of the same class if one is raised in a layer or an operation of its own.
    """
    return str(arguments[0] if len(arguments) == 1 else arguments[2])


class InvalidRequestError(errors.InvalidRequestError, tf.errors.InvalidArgumentError):
    """A call is wrong on this rank alone; raised before anything is sent."""

    ag_pass_through = True

    def __init__(self, *arguments: Any) -> None:
        message = _message_of(arguments)
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)
        self.args = (message,)


class UnsupportedError(errors.UnsupportedError, InvalidRequestError):
    """The operation does not exist for this tensor or reduction: Adasum of integers, a scale factor of
    ``tf.IndexedSlices``, a reducescatter by Max.
    """


class HorovodInternalError(errors.HorovodInternalError, tf.errors.FailedPreconditionError):
    """A collective failed."""

    ag_pass_through = True

    def __init__(self, *arguments: Any) -> None:
        message = _message_of(arguments)
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)
        self.args = (message,)


class MismatchError(errors.MismatchError, HorovodInternalError):
    """The ranks called different things: another shape, dtype, operation, order or step."""


class StallError(errors.StallError, HorovodInternalError):
    """Some ranks did not submit, or did not answer, before a deadline."""


class PeerError(errors.PeerError, HorovodInternalError):
    """Another rank raised, left the job or died."""


class NonFiniteError(errors.NonFiniteError, HorovodInternalError):
    """A gradient has NaN or Inf on some rank. All ranks discarded the step, and no state was changed."""


#: Classes of ocomm's errors and of this module; the first that fits is used.
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
    """Returns the status code with which a graph reports ``error``."""
    if isinstance(error, errors.InvalidRequestError):
        return int(tf.errors.INVALID_ARGUMENT)
    return int(tf.errors.FAILED_PRECONDITION if isinstance(error, OcommError) else tf.errors.UNKNOWN)


@contextlib.contextmanager
def of_tensorflow() -> Iterator[None]:
    """Converts errors of ocomm that leave the context to the classes of this module."""
    try:
        yield
    except OcommError as error:
        make = next((make for kind, make in _CLASSES.items() if isinstance(error, kind)), None)
        if make is None or isinstance(error, tf.errors.OpError):
            raise
        raise make(str(error)).with_traceback(error.__traceback__) from error.__cause__


def public(function: _Function) -> _Function:
    """Decorates public functions: converts their errors to TensorFlow's, and keeps AutoGraph from translating them.

    AutoGraph would translate this library inside ``tf.function`` as if it were the user's program.
    """

    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        with of_tensorflow():
            return function(*arguments, **options)

    return tf.autograph.experimental.do_not_convert(wrapper)
