"""The kernels under test, one implementation after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ocomm.kernels import Kernels, cpu_kernels, reference


def _c_loops(path: str) -> Iterator[Kernels]:
    native = pytest.importorskip("ocomm._native", reason="the extension ocomm._native is not built")
    usual = native.ffi.string(native.lib.ocomm_path())
    if native.lib.ocomm_select_path(path.encode()) < 0:
        pytest.skip(f"this processor cannot run the {path} path")
    yield cpu_kernels()
    native.lib.ocomm_select_path(usual)


@pytest.fixture(params=["portable", "avx2"])
def cpu(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """The C loops, once per path."""
    yield from _c_loops(request.param)


@pytest.fixture(params=["reference", "portable", "avx2"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Every implementation."""
    if request.param == "reference":
        yield reference
    else:
        yield from _c_loops(request.param)
