"""The trial of device pointers: a real MPI in a process of its own, and a driver whose device memory is the host's, or
out of its reach.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ocomm.transport import cuda_probe
from ocomm.transport.cuda_probe import ProbeResult, device_messages, tried
from tests.worlds import MPI_SIZE

pytestmark = pytest.mark.skipif(bool(MPI_SIZE), reason="it starts processes that are alone")

#: What it takes to allocate, write and read on a device. OFFSET is added to addresses.
DRIVER = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) { return flags ? 1 : NO_DEVICE; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = malloc(1 + device); return 0; }
int cuCtxSetCurrent(void *context) { return !context; }
int cuMemAlloc_v2(uint64_t *address, size_t nbytes) { *address = (uint64_t)malloc(nbytes) + OFFSET; return 0; }
/* A copy from pageable memory may return before the device has the bytes. */
static struct { void *to, *bytes; size_t n; } late[8];
int cuCtxSynchronize(void) {
    for (int k = 0; k < 8 && late[k].to; late[k++].to = NULL) {
        memcpy(late[k].to, late[k].bytes, late[k].n);
        free(late[k].bytes);
    }
    return 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t n) {
    int k = 0;
    while (late[k].to) k++;
    late[k].to = (void *)(to - OFFSET), late[k].bytes = memcpy(malloc(n), from, n), late[k].n = n;
    return 0;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t n) {
    cuCtxSynchronize();
    memcpy(to, (void *)(from - OFFSET), n);
    return 0;
}
"""


@pytest.fixture
def environ(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """That of a rank, with this driver."""
    (tmp_path / "driver.c").write_text(DRIVER)
    options = ["-DOFFSET=0", "-DNO_DEVICE=0", *request.param]
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", *options, tmp_path / "driver.c", "-o", library], check=True)
    search = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    rank = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "job", "PMIX_RANK": "0"}
    return {**os.environ, **rank, "LD_LIBRARY_PATH": search}


@pytest.mark.parametrize("environ", [[]], indirect=True)
def test_messages_that_arrive_are_a_yes_and_the_librarys_no_is_heard_first(environ: dict[str, str]) -> None:
    assert tried(sys.executable, environ) == ProbeResult(True, "a trial exchange from device to device has passed")
    asked = tried(sys.executable, environ, "--ask")  # an MPI with CUDA says yes
    assert asked.yes or "says no (" in asked.why


@pytest.mark.parametrize("environ", [["-UOFFSET", "-DOFFSET=(1UL<<60)"]], indirect=True)
def test_a_library_that_takes_an_address_for_the_hosts_ends_the_trial_only(environ: dict[str, str]) -> None:
    assert tried(sys.executable, environ) == ProbeResult(False, "a trial exchange ended with SIGSEGV")


@pytest.mark.parametrize("environ", [["-UNO_DEVICE", "-DNO_DEVICE=100"]], indirect=True)
def test_a_driver_that_fails_is_named(environ: dict[str, str]) -> None:
    assert tried(sys.executable, environ) == ProbeResult(
        False, "a trial exchange failed: cuInit answers with CUDA error 100"
    )


@pytest.mark.parametrize("environ", [[]], indirect=True)
def test_a_trial_that_does_not_end_is_given_up(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_probe, "DEADLINE_S", 0.01)
    assert tried(sys.executable, environ) == ProbeResult(False, "a trial exchange was not over after 0 s")


def test_a_setting_is_taken_at_its_word_and_without_mpi_there_is_nothing_to_ask() -> None:
    assert [device_messages(setting, 0).yes for setting in ("0", "1")] == [False, True]
    assert device_messages("auto", 0).yes is False
