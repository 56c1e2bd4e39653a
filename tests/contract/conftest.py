"""The kernels under test, one implementation after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from ocomm.kernels import Kernels, cpu_kernels, reference

PATHS = ["portable", "avx2", "avx512"]


def _cuda_kernels(suite: type | None) -> Any:
    device = pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")
    if not device.is_available():
        pytest.skip(reason="no CUDA device")
    if suite and suite.__name__ in ("TestReduce", "TestChecksum"):
        pytest.skip(reason="CudaKernels has neither reductions nor checksums")
    from tests.contract.on_device import OnDevice

    return OnDevice()


def _c_loops(path: str) -> Iterator[Kernels]:
    native = pytest.importorskip("ocomm._native", reason="the extension ocomm._native is not built")
    usual = native.ffi.string(native.lib.ocomm_path())
    if native.lib.ocomm_select_path(path.encode()) < 0:
        pytest.skip(reason=f"this processor cannot run the {path} path")
    yield cpu_kernels()
    native.lib.ocomm_select_path(usual)


@pytest.fixture(params=PATHS)
def cpu(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """The C loops, once per path."""
    yield from _c_loops(request.param)


#: The CUDA kernels obey the laws, too, where there is a device to run them (``make test-gpu``).
EVERY_SET = ["reference", *PATHS, *(["cuda"] if os.environ.get("TEST_CUDA") else [])]


@pytest.fixture(params=EVERY_SET)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Every implementation."""
    if request.param == "reference":
        yield reference
    elif request.param == "cuda":
        yield _cuda_kernels(request.cls)
    else:
        yield from _c_loops(request.param)
