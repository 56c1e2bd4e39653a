"""What ocomm raises. Every message names the tensor, the ranks, what was expected and got, and what to do.

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

HostsUpdatedInterrupt is Horovod's signal of an elastic job, for scripts that catch it; it is no error.
"""

from __future__ import annotations


class OcommError(Exception):
    """Base of every error of ocomm."""


class NotInitializedError(OcommError, ValueError):
    """A call before ``init()`` or after ``shutdown()``."""


class SettingsError(OcommError, ValueError):
    """A setting is unknown, unparsable, or differs between ranks."""


class LaunchError(OcommError, RuntimeError):
    """The job was not started in a way that lets the ranks find each other."""


class InvalidRequestError(OcommError, ValueError):
    """A call which is wrong on this rank alone, found before anything is sent."""


class UnsupportedError(InvalidRequestError, NotImplementedError):
    """An operation that tensors of this element type, layout or shape do not have: Adasum of integers, an average of
    bool, an allgather of a tensor without dimensions.

    Horovod sends such calls and fails in all ranks with a RuntimeError, which its scripts catch; this one is raised at
    once, and is a RuntimeError, a NotImplementedError and a ValueError.
    """


class CheckpointError(OcommError, ValueError):
    """A saved state is damaged, or of another model, optimizer or world; nothing of it was loaded."""


class HorovodInternalError(OcommError, RuntimeError):
    """A collective failed. Horovod's name, so that ``except hvd.HorovodInternalError`` goes on working."""


class MismatchError(HorovodInternalError):
    """The ranks do not agree on what a collective is."""


class StallError(HorovodInternalError):
    """Some ranks did not submit, or did not answer, before a deadline."""


class PeerError(HorovodInternalError):
    """Another rank raised, left the job or died."""


class NonFiniteError(HorovodInternalError):
    """A gradient has NaN or Inf on some rank; the step was discarded on all ranks, no state was changed."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed; ``skip_sync`` says that no state needs to be sent again.

    ``relaunch``: the processes end, and others go on from this commit on the new hosts.
    """

    def __init__(self, skip_sync: bool = False, relaunch: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync
        self.relaunch = relaunch
