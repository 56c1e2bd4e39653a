"""Tests whether MPI takes addresses on a CUDA device: asks the library, and tries it in a process of its own.

A library that was built without CUDA takes such an address for one of the host and ends the process. One that was built
with it may still not work on a machine. So before any rank uses it, a process in a world of its own sends itself
messages from the device to the device, within a deadline. Messages between hosts are not tried.

``python -m ocomm.transport.cuda_probe [DEVICE]`` is that process: its exit code is 0 if all bytes have arrived, else it
prints the reason. With ``--ask`` the library is asked first.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ocomm.transport import mpi
from ocomm.types import Bytes

#: Deadline, in seconds, for the process to start, to send and to end.
DEADLINE_S = 30.0
#: Sizes of messages in bytes: one that MPI sends at once, one that waits for the receiver, and one in several pieces.
_SIZES = (64, 1 << 17, 1 << 22)
#: Exit code if the library says no.
_REFUSED = 3
#: Variables that tell a process that it is a rank; without them it is alone.
_LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_", "PALS_", "HYDRA_")
#: Variables that choose how MPI sends, which are kept.
_TRANSPORTS = tuple(f"OMPI_MCA_{name}" for name in ("accelerator", "btl", "mpi_", "mtl", "pml", "rcache", "smsc"))


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Whether MPI can send messages from a device, and the reason."""

    yes: bool
    why: str


def device_messages(setting: str, device: int) -> ProbeResult:
    """Returns whether this process, whose MPI has started, can send from ``device``.

    ``setting`` is that of OCOMM_CUDA_AWARE. Takes seconds if it is ``"auto"`` and the library says yes.
    """
    if setting != "auto":
        return ProbeResult(setting == "1", f"OCOMM_CUDA_AWARE={setting}")
    says, words = mpi.cuda_support()
    if not says:
        return ProbeResult(False, words)
    found = tried(sys.executable, os.environ, str(device))
    return ProbeResult(found.yes, f"{words}; {found.why}")


def tried(python: str, environ: Mapping[str, str], *arguments: str) -> ProbeResult:
    """Runs the process and returns what it says, or how it has ended."""
    alone = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_LAUNCHERS) or name.startswith(_TRANSPORTS)
    }
    alone["OMPI_MCA_opal_abort_delay"] = "0"  # nobody is left behind
    command = [python, "-m", "ocomm.transport.cuda_probe", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=alone, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            text, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the daemon that Open MPI 4 starts for a single process
            process.communicate()
            return ProbeResult(False, f"a trial exchange was not over after {DEADLINE_S:.0f} s")
    last = (text.strip().splitlines() or ["without a word"])[-1]
    if process.returncode < 0:
        return ProbeResult(False, f"a trial exchange ended with {signal.Signals(-process.returncode).name}")
    if process.returncode == _REFUSED:
        return ProbeResult(False, last)
    if process.returncode > 0:
        return ProbeResult(False, f"a trial exchange failed: {last}")
    return ProbeResult(True, "a trial exchange from device to device has passed")


class _Memory:
    """Bytes on a device, allocated through the driver."""

    def __init__(self, driver: _Driver, nbytes: int) -> None:
        self._driver = driver
        self._address, self._size = ctypes.c_uint64(), ctypes.c_size_t(nbytes)
        driver.call("cuMemAlloc_v2", ctypes.byref(self._address), self._size)
        address = self._address.value
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}

    @property
    def wire(self) -> Bytes:
        """The bytes as an array that only MPI may use."""
        return np.asarray(self)

    def write(self, data: Bytes) -> None:
        self._driver.call("cuMemcpyHtoD_v2", self._address, data.ctypes.data_as(ctypes.c_void_p), self._size)
        self._driver.call("cuCtxSynchronize")  # the copy may return before the bytes are on the device

    def read(self) -> Bytes:
        data = np.zeros(self._size.value, np.uint8)
        self._driver.call("cuMemcpyDtoH_v2", data.ctypes.data_as(ctypes.c_void_p), self._address, self._size)
        return data


class _Driver:
    """libcuda with the primary context of a device. A call that fails raises RuntimeError, which names it."""

    def __init__(self, device: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(number), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} answers with CUDA error {code}")


def _exchange(device: int) -> str:
    """Sends to itself from the device to the device. Returns what went wrong, "" if nothing did."""
    driver = _Driver(device)
    world = mpi.open_world()
    rng = np.random.default_rng(1)
    for nbytes in _SIZES:
        source, target = _Memory(driver, nbytes), _Memory(driver, nbytes)
        data = rng.integers(0, 256, nbytes, np.uint8)
        source.write(data)
        target.write(np.zeros_like(data))
        requests = [world.irecv(target.wire, 0, 1), world.isend(source.wire, 0, 1)]
        while requests:
            requests = [request for request in requests if not world.test(request)]
            time.sleep(1e-4)
        if not np.array_equal(target.read(), data):
            return f"a message of {nbytes} bytes has arrived as something else"
    return ""


def _main(arguments: list[str]) -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    world = mpi.open_world(one_host=True)
    if world.size > 1:
        print(f"not alone, but in a world of {world.size}")
        return 1
    if "--ask" in arguments:
        says, words = mpi.cuda_support()
        if not says:
            print(words)
            return _REFUSED
    device = next((int(argument) for argument in arguments if argument.isdigit()), 0)
    try:
        wrong = _exchange(device)
    except (OSError, RuntimeError) as error:
        wrong = str(error)
    if wrong:
        print(wrong)
        return 1
    mpi.finalize()
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
