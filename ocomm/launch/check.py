"""``--check-build``: what this installation can do, in horovodrun's form."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata, util

from ocomm.errors import LaunchError
from ocomm.launch import loopback
from ocomm.launch.flavour import PROBE_TIMEOUT_S, check_match, find_launcher, find_library, probe
from ocomm.transport import cuda_probe
from ocomm.transport.cuda_probe import ProbeResult
from ocomm.version import __version__

# Frameworks are looked up, not imported: that would take seconds and many megabytes for one line each.
_FRAMEWORKS = (("PyTorch", "torch", ("torch",)), ("TensorFlow", "tensorflow", ("tensorflow", "tensorflow-cpu")))


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the report: whether a thing was found, which one or why not. Without ``needed`` things nothing can be
    trained.
    """

    name: str
    found: bool
    detail: str = ""
    needed: bool = False

    def __str__(self) -> str:
        detail = f"  {self.detail}" if self.detail else ""
        return f"    [{'X' if self.found else ' '}] {self.name}{detail}"


def report(python: str, environ: Mapping[str, str]) -> tuple[str, bool]:
    """Returns the text of ``--check-build`` for the interpreter ``python``, and whether ocomm can train with what is
    installed.
    """
    driver = _cuda_driver()
    native = _loaded(python, environ, "-c", "import ocomm._native")
    sections = {
        "Available Frameworks": [_framework(*names) for names in _FRAMEWORKS],
        "Available Controllers": _controllers(python, environ),
        "Available Tensor Operations": [
            Item("native CPU kernels (ocomm._native)", native.yes, "" if native.yes else native.why, needed=True),
            *_gpu(
                driver,
                _numba_cuda(python, environ, driver.found),
                lambda: _device_messages(python, environ),
                lambda: _nccl(python, environ),
            ),
        ],
    }
    return render(sections)


def render(sections: Mapping[str, list[Item]]) -> tuple[str, bool]:
    """Returns the report as text, and whether everything needed was found."""
    blocks = [f"ocomm v{__version__}:"]
    blocks += ["\n".join([f"{title}:", *map(str, items)]) for title, items in sections.items()]
    complete = all(item.found for items in sections.values() for item in items if item.needed)
    return "\n\n".join(blocks), complete


def _framework(name: str, module: str, distributions: tuple[str, ...]) -> Item:
    if util.find_spec(module) is None:
        return Item(name, False)
    for distribution in distributions:
        try:
            return Item(name, True, metadata.version(distribution))
        except metadata.PackageNotFoundError:
            continue
    return Item(name, True)


def _controllers(python: str, environ: Mapping[str, str]) -> list[Item]:
    launcher = library = None
    items = []
    try:
        launcher = find_launcher(python, environ)
        items.append(Item("MPI launcher", True, f"{launcher} ({launcher.path})", needed=True))
        kept = bool(loopback.environment(launcher, environ))
        items.append(Item("local jobs on loopback alone", kept, "" if kept else "native/loopback.c is not built"))
    except LaunchError as error:
        items.append(Item("MPI launcher", False, str(error), needed=True))
    try:
        library = find_library(python, environ)
        items.append(Item("MPI library of mpi4py", True, str(library), needed=True))
    except LaunchError as error:
        items.append(Item("MPI library of mpi4py", False, str(error), needed=True))
    if launcher is not None and library is not None:
        try:
            check_match(launcher, library, python)
        except LaunchError as error:
            items.append(Item("launcher and library match", False, str(error), needed=True))
    return items


def _loaded(python: str, environ: Mapping[str, str], *words: str) -> ProbeResult:
    """Returns whether Python runs ``words`` without an error, and the last line of what it says."""
    try:
        done = probe([python, *words], environ)
    except subprocess.TimeoutExpired:
        return ProbeResult(False, f"loading it did not end within {PROBE_TIMEOUT_S:.0f} s")
    said = done.stdout.strip() or done.stderr.strip() or f"loading it ended with exit code {done.returncode}"
    return ProbeResult(done.returncode == 0, said.splitlines()[-1])


def _gpu(
    driver: Item, kernels: Item, messages: Callable[[], ProbeResult], nccl: Callable[[], ProbeResult]
) -> list[Item]:
    """Returns what there is for GPUs, which way messages and sums inside hosts go from there, and why."""
    missing = [item.name for item in (driver, kernels) if not item.found]
    if missing:
        way = f"no: {' and '.join(missing)} missing"
        return [driver, kernels, Item("1-bit optimizers on GPUs", False, way), Item("NCCL", False, "not used")]
    direct, library = messages(), nccl()
    way = "messages from device to device" if direct.yes else "messages through pinned host memory"
    if library.yes:
        sums = "ranks of a host add up over it, where each has a GPU of its own"
    elif direct.yes:
        sums = "ranks of a host add up through MPI"
    else:
        sums = "hierarchical='auto' is off where parameters are on GPUs"
    optimizers = Item("1-bit optimizers on GPUs", True, f"{way}: {direct.why}")
    return [driver, kernels, optimizers, Item("NCCL", library.yes, f"{library.why}: {sums}")]


def _nccl(python: str, environ: Mapping[str, str]) -> ProbeResult:
    if environ.get("OCOMM_NCCL") == "0":
        return ProbeResult(False, "OCOMM_NCCL=0")
    return _loaded(python, environ, "-m", "ocomm.transport.nccl")


def _device_messages(python: str, environ: Mapping[str, str]) -> ProbeResult:
    setting = environ.get("OCOMM_CUDA_AWARE", "auto")
    if setting == "auto":
        return cuda_probe.tried(python, environ, "--ask")
    return ProbeResult(setting == "1", f"OCOMM_CUDA_AWARE={setting}")


def _cuda_driver() -> Item:
    name = "CUDA driver"
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Item(name, False, "no libcuda.so.1 on this machine")
    count = ctypes.c_int(0)
    for code in (cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count))):
        if code != 0:
            return Item(name, False, f"libcuda.so.1 is there, but answers with CUDA error {code}")
    return Item(name, count.value > 0, f"{count.value} device{'' if count.value == 1 else 's'}")


def _numba_cuda(python: str, environ: Mapping[str, str], is_device: bool) -> Item:
    name = "CUDA kernels (numba-cuda)"
    try:
        version = metadata.version("numba-cuda")
    except metadata.PackageNotFoundError:
        return Item(name, False, "pip install 'ocomm[gpu-cu12]' or 'ocomm[gpu-cu13]' brings them")
    code = "from ocomm.kernels.cuda import require_compiler; require_compiler()"
    if is_device:
        code = "from ocomm.kernels.cuda_device import CudaDevice; CudaDevice(0).require_kernels()"
    kernels = _loaded(python, environ, "-c", code)
    return Item(name, kernels.yes, version if kernels.yes else kernels.why)
