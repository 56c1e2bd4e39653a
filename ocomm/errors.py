"""The exceptions of ocomm. Every message names the tensor, the ranks, what was expected and got, and what to do.

    OcommError
    |-- NotInitializedError (also ValueError)     a call before init() or after shutdown()
    |-- SettingsError (also ValueError)           an environment setting is unknown, unparsable or differs between ranks
    |-- LaunchError                               no MPI, the wrong MPI, or a launcher whose ranks MPI does not see
    |-- InvalidRequestError (also ValueError)     this rank's call cannot be right: dtype, root, splits, name in use
    |   `-- UnsupportedError (also RuntimeError)  no tensor of this kind has the operation: Adasum of integers, say
    |-- CheckpointError (also ValueError)         a saved state is damaged, or of another model, optimizer or world
    `-- HorovodInternalError (also RuntimeError)  a collective failed; raised on every rank that waits for it
        |-- MismatchError                         ranks disagree on shape, dtype, operation, order, step, ...
        |-- StallError                            ranks did not submit, or did not answer, before the deadline
        |-- PeerError                             a rank raised, left or died
        `-- NonFiniteError                        NaN or Inf in a gradient; no rank's state was changed

HostsUpdatedInterrupt tells a script of an elastic job that the hosts have changed. It is no error.
"""

from __future__ import annotations


def clause(said: object) -> str:
    """Returns what an error says, without a full stop at its end, for a sentence that goes on or ends after it."""
    return str(said).rstrip(". \n")


def in_words(error: BaseException) -> str:
    """Returns an error's class and what it says, for a sentence that goes on or ends after it."""
    return f"{type(error).__name__}: {clause(error)}"


class OcommError(Exception):
    """Base class of all errors of ocomm."""


class NotInitializedError(OcommError, ValueError):
    """A function was called before ``init()`` or after ``shutdown()``."""


class SettingsError(OcommError, ValueError):
    """A setting is unknown, cannot be parsed, or differs between ranks."""


class LaunchError(OcommError, RuntimeError):
    """The job was not started in a way that lets the ranks find each other."""


class InvalidRequestError(OcommError, ValueError):
    """A call is wrong on this rank alone; raised before anything is sent."""


class UnsupportedError(InvalidRequestError, NotImplementedError):
    """The operation does not exist for this element type, layout, shape or reduction: Adasum of integers, an average of
    bool, an allgather of a tensor without dimensions, a reducescatter by Adasum.

    Horovod sends such calls, and they fail on all ranks with a RuntimeError, which scripts catch. This error is raised
    at once and is a RuntimeError, a NotImplementedError and a ValueError.
    """


class CheckpointError(OcommError, ValueError):
    """A saved state is damaged, or belongs to another model, optimizer or number of ranks. Nothing of it was loaded."""


class HorovodInternalError(OcommError, RuntimeError):
    """A collective failed. It has Horovod's name, so that ``except hvd.HorovodInternalError`` still works."""

    @classmethod
    def after_interruption(cls, optimizer: str, error: BaseException) -> HorovodInternalError:
        """Returns the error of all later steps of ``optimizer``, of which ``error`` has interrupted one."""
        return cls(
            f"{optimizer}: a step was interrupted by {type(error).__name__}, so this rank may have missed what the "
            "others have done. Wrap the optimizer anew, and load a state on all ranks."
        )


class MismatchError(HorovodInternalError):
    """The ranks called different things: another shape, dtype, operation, order or step."""


class StallError(HorovodInternalError):
    """Some ranks did not submit, or did not answer, before a deadline."""


class PeerError(HorovodInternalError):
    """Another rank raised, left the job or died."""


class NonFiniteError(HorovodInternalError):
    """A gradient has NaN or Inf on some rank. All ranks discarded the step, and no state was changed."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed.

    Args:
        skip_sync: True if no state needs to be sent again.
        relaunch: True if the processes of the job end, and others continue from this commit on the new hosts.
    """

    def __init__(self, skip_sync: bool = False, relaunch: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync
        self.relaunch = relaunch
