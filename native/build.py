"""Describes the extension module ``ocomm._native`` to cffi (API mode, stable ABI).

The C declarations come from the marked part of ``ocomm.h``, so there is one list of them. No MPI and no framework
is needed to build: the engine gets MPI's functions as pointers at run time.
"""

from __future__ import annotations

import re
from pathlib import Path

import cffi

HERE = Path(__file__).parent

# -ffp-contract=off: a fused multiply-add rounds once where NumPy rounds twice, and every path must give the same bits.
COMPILE_ARGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"]


def declarations() -> str:
    """The parts of ``ocomm.h`` between the cffi marks."""
    header = (HERE / "ocomm.h").read_text()
    return "\n".join(re.findall(r"/\* cffi: begin \w+ \*/(.*?)/\* cffi: end \w+ \*/", header, re.DOTALL))


ffibuilder = cffi.FFI()
ffibuilder.cdef(declarations())
# In Python: an OCOMM_OFFLOAD's task (ocomm/collectives/native_engine.py).
ffibuilder.cdef('extern "Python" int ocomm_run_task(void *task, int begin);')
ffibuilder.set_source(
    "ocomm._native",
    '#include "ocomm.h"',
    sources=[f"native/{name}" for name in ("pool.c", "kernels.c", "reduce.c", "engine.c")],
    depends=[f"native/{name}" for name in ("ocomm.h", "pool.h", "kernels_body.h", "quantize_body.h", "lamb_body.h")],
    include_dirs=["native"],
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=["-pthread"],
    py_limited_api=True,
)
