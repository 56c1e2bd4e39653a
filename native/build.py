"""Describes the extension module ``ocomm._native`` to cffi (API mode, stable ABI), and writes the headers that it
includes.

The C declarations come from the marked parts of ``ocomm.h`` and, for the loops, from ``ocomm/kernels/loops.py``, so
each is written once. The build needs no MPI and no framework: the engine gets MPI's functions as pointers when it is
made.

``python native/build.py FOLDER`` writes the headers only.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cffi

HERE = Path(__file__).parent

# -ffp-contract=off: a fused multiply-add rounds once where NumPy rounds twice, and every path must give the same bits.
COMPILE_ARGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"]

#: Loops over blocks that are not cut into pieces, and why.
_WHOLE = {"finite_scales": "reads a few bytes of each block, which no thread is worth"}


def _declared() -> ModuleType:
    """Returns the module of the declarations, without its package, which needs NumPy."""
    spec = importlib.util.spec_from_file_location("loops", HERE.parent / "ocomm" / "kernels" / "loops.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def declarations(loops: ModuleType) -> str:
    """Returns the C declarations that Python sees, for cffi."""
    header = (HERE / "ocomm.h").read_text()
    marked = dict(re.findall(r"/\* cffi: begin (\w+) \*/(.*?)/\* cffi: end \w+ \*/", header, re.DOTALL))
    return "\n".join([marked["types"], prototypes(loops), marked["more"]])


def prototypes(loops: ModuleType) -> str:
    """Returns ``loops.h``: the prototype of every loop in C, and the operation of a plan that calls it."""
    lines = [f"#define OCOMM_LOOPS {loops.DIGEST}", *(f"{_prototype(loops, loop)};" for loop in loops.IN_C)]
    codes = ", ".join(f"OCOMM_{loop.name.upper()} = {loop.code}" for loop in loops.IN_C)
    lines.append(f"enum {{ {codes} }};")
    lines.append("typedef union { int64_t i; double d; void *p; } ocomm_slot;")
    lines.append(f"typedef struct {{ int64_t code; ocomm_slot a[{loops.SLOTS}]; }} ocomm_op;")
    return "\n".join(lines) + "\n"


def _prototype(loops: ModuleType, loop: Any) -> str:
    parameters = ["ocomm_pool *pool", *(f"{of}{'' if of[-1] == '*' else ' '}{name}" for of, name in loop.c)]
    return f"{loops.ANSWERS[loop.answer]} ocomm_{loop.name}({', '.join(parameters)})"


def dispatch(loops: ModuleType) -> str:
    """Returns ``run_loop.h``: the function that calls the loop of an operation."""
    lines = [
        "static int run_loop(ocomm_pool *pool, const ocomm_op *op, uint32_t **flags) {",
        "    const ocomm_slot *a = op->a;",
        "    switch (op->code) {",
    ]
    for loop in loops.IN_C:
        passed = ["pool", *(_read(of, k) for k, (of, _) in enumerate(loop.c))]
        call = f"ocomm_{loop.name}({', '.join(passed)})"
        lines.append(f"    case OCOMM_{loop.name.upper()}:")
        if loop.reports:
            lines += [f"        *flags = a[{len(loop.c)}].p;", f"        return {call};"]
        else:
            lines += [f"        {call};", "        return 1;"]
    return "\n".join([*lines, "    }", "    return 1;", "}"]) + "\n"


def _cut(loops: ModuleType) -> list[Any]:
    """Returns the loops that are cut into pieces, of some blocks, pieces or elements, for the pool's threads."""
    kinds = ("Blocks", "Pieces", "Sized", "SizedOut")
    return [loop for loop in loops.IN_C if loop.name not in _WHOLE and any(loop.has(kind) for kind in kinds)]


def _fields(loops: ModuleType) -> dict[str, str]:
    """Returns the C type of each field of ``call`` by its name. It suits the argument of that name of every loop: it is
    not const if a loop writes there, and double if a loop has a double.
    """
    fields: dict[str, str] = {}
    for loop in _cut(loops):
        for of, name in loop.c:
            fields[name] = min(fields.get(name, of), of, key=lambda of: (of.startswith("const"), of == "float"))
    return fields


def call(loops: ModuleType) -> str:
    """Returns ``call.h``: a struct of the arguments of any loop that is cut; those that a loop does not have are 0."""
    fields = "".join(f"    {of}{'' if of[-1] == '*' else ' '}{name};\n" for name, of in _fields(loops).items())
    return f"typedef struct {{\n{fields}}} call;\n"


def cut_loops(loops: ModuleType) -> str:
    """Returns ``cut_loops.h``: the function of each loop that is cut, which hands the pieces to the path's loop."""
    fields, lines = _fields(loops), []
    for loop in _cut(loops):
        given = [f".{name} = {'' if of == fields[name] else f'({fields[name]})'}{name}" for of, name in loop.c]
        items = "blocks" if loop.has("Blocks") else "pieces" if loop.has("Pieces") else "elements"
        run = f"on_{items}(pool, active->{loop.name}, &args)"
        lines += [
            f"{_prototype(loops, loop)} {{",
            f"    const call args = {{{', '.join(given)}}};",
            f"    {'return ' * loop.reports}{run};",
            "}",
        ]
    return "\n".join(lines) + "\n"


def _read(of: str, slot: int) -> str:
    """Returns the expression for an argument of C type ``of`` in a slot."""
    if of.endswith("*"):
        return f"a[{slot}].p"
    return f"({of})a[{slot}].{'d' if of in ('float', 'double') else 'i'}"


def write_headers(folder: Path, loops: ModuleType | None = None) -> None:
    """Writes the headers that are made from the declarations. A file that would not change keeps its time."""
    loops = loops or _declared()
    made = {"loops.h": prototypes, "run_loop.h": dispatch, "call.h": call, "cut_loops.h": cut_loops}
    for name, make in made.items():
        path, text = folder / name, make(loops)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


ffibuilder = cffi.FFI()
ffibuilder.cdef(declarations(_declared()))
# In Python: an OCOMM_OFFLOAD's task (ocomm/collectives/native_engine.py).
ffibuilder.cdef('extern "Python" int ocomm_run_task(void *task, int begin);')
_BODIES = ("kernels_body.h", "quantize_body.h", "lamb_body.h", "adam_body.h", "codes_body.h")
_HEADERS = ("ocomm.h", "processor.h", "pool.h", "mixed.h", *_BODIES)
ffibuilder.set_source(
    "ocomm._native",
    '#include "ocomm.h"',
    sources=[f"native/{name}" for name in ("pool.c", "kernels.c", "reduce.c", "engine.c", "device.c", "exit.c")],
    depends=[*(f"native/{name}" for name in _HEADERS), "native/build.py", "ocomm/kernels/loops.py"],
    include_dirs=["native"],
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=["-pthread", "-lm"],
    py_limited_api=True,
)
# For setup.py, which knows the folder; cffi's modules have no place for it.
ffibuilder.write_headers = write_headers

if __name__ == "__main__":
    write_headers(Path(sys.argv[1]))
