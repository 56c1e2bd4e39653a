"""Describes the extension module ``ocomm_tf._native`` to cffi, as ``build.py`` does for ``ocomm._native``.

TensorFlow need not be installed to build it: its C API is looked up when the module is first used.
"""

from __future__ import annotations

import re
from pathlib import Path

import cffi

HEADER = Path(__file__).parent / "tf_exchange.h"
(DECLARATIONS,) = re.findall(r"/\* cffi: begin \w+ \*/(.*?)/\* cffi: end \w+ \*/", HEADER.read_text(), re.DOTALL)

ffibuilder = cffi.FFI()
ffibuilder.cdef(DECLARATIONS)
ffibuilder.set_source(
    "ocomm_tf._native",
    '#include "tf_exchange.h"',
    sources=["native/tf_exchange.c"],
    depends=["native/tf_exchange.h"],
    include_dirs=["native"],
    extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror=vla"],
    extra_link_args=["-pthread", "-ldl"],
    py_limited_api=True,
)
