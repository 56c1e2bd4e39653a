"""One declaration per loop: what it says reaches every set of kernels, and a mistake is an error that names it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest

from ocomm.collectives.plan import loop
from ocomm.kernels import reference
from ocomm.kernels.base import Kernels
from ocomm.kernels.cpu import CpuKernels
from ocomm.kernels.loops import IN_C, KINDS, LOOPS, NOT_IN_C, NOT_ON_DEVICES, Loops, declarations
from ocomm.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from ocomm.kernels.loops import Blocks, BufferOut, DenseOut, Floats, FloatsOut, Mask, PackedOut, Runs, Tensors

ROOT = Path(__file__).resolve().parents[2]


def build_module() -> Any:
    """``native/build.py``, as setuptools reads it: by its path."""
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "native" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def altered(protocol: type) -> Any:
    """What ``native/build.py`` would read if the loops of a protocol were declared as they are there."""
    loops = importlib.import_module("ocomm.kernels.loops")
    methods = {name: method for of in (Loops, protocol) for name, method in vars(of).items() if name[0] != "_"}
    in_c = [declaration for declaration in declarations(type("Altered", (), methods)).values() if declaration.code >= 0]
    return SimpleNamespace(IN_C=in_c, ANSWERS=loops.ANSWERS, DIGEST=1, SLOTS=loops.SLOTS)


class TestEverySetOfKernels:
    def test_the_reference_has_every_loop_with_the_arguments_in_order(self) -> None:
        for name, declaration in LOOPS.items():
            own = inspect.signature(getattr(ReferenceKernels, name))
            assert tuple(own.parameters)[1:] == declaration.names, name
            assert (own.return_annotation == "bool") == declaration.reports, name

    def test_every_loop_is_in_c_but_those_that_are_named_with_a_reason(self) -> None:
        assert set(NOT_IN_C) < set(LOOPS)
        assert {declaration.name for declaration in IN_C} == set(LOOPS) - set(NOT_IN_C)
        for name in LOOPS:
            method = getattr(CpuKernels, name)
            assert (method is getattr(ReferenceKernels, name)) == (name in NOT_IN_C), name

    def test_every_loop_is_for_cuda_but_those_that_are_named_with_a_reason(self) -> None:
        pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")
        cuda = importlib.import_module("ocomm.kernels.cuda")
        assert set(NOT_ON_DEVICES) < set(LOOPS)
        assert {name for name in LOOPS if hasattr(cuda.CudaKernels, name)} == set(LOOPS) - set(NOT_ON_DEVICES)

    def test_a_cuda_kernel_with_other_parameters_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")
        cuda = importlib.import_module("ocomm.kernels.cuda")
        monkeypatch.setitem(cuda.KERNELS, "unpack", cuda.KERNELS["apply"])
        with pytest.raises(
            TypeError, match="CUDA kernel 'unpack' takes int, int, int, int, int; declared are int, int, "
        ):
            cuda._launching(LOOPS["unpack"])


class TestOperations:
    def test_arguments_by_name_come_into_the_declared_order(self) -> None:
        blocks, packed, out = np.zeros(0, np.void), np.zeros(1, np.uint8), np.zeros(1, np.float32)
        operation = loop(Kernels.unpack, None, blocks, out=out, mask=None, packed=packed)
        assert [id(argument) for argument in operation.arguments] == [id(a) for a in (blocks, packed, None, out)]
        assert operation.argument("out") is out

    def test_arguments_that_are_missing_unknown_or_too_many_are_an_error(self) -> None:
        operation: Any = loop
        for given, named in (((), {}), ((1, 2, 3), {"other": 4}), ((1, 2, 3, 4), {"out": 4}), ((1, 2, 3, 4, 5), {})):
            with pytest.raises(TypeError, match="unpack takes blocks, packed, mask, out"):
                operation(Kernels.unpack, None, *given, **named)

    def test_flags_are_for_loops_that_report_and_for_no_other(self) -> None:
        operation: Any = loop
        with pytest.raises(TypeError, match="finite needs flags"):
            operation(Kernels.finite, None, 1, 2)
        with pytest.raises(TypeError, match="unpack has nothing for flags"):
            operation(Kernels.unpack, np.zeros(1, np.uint32), 1, 2, 3, 4)

    def test_an_operation_runs_on_any_kernels(self) -> None:
        source, out = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
        arguments: Any = (0, 1, [source, source], 1.0, 1.0, out)
        loop(Kernels.reduce, None, *arguments).run(reference)
        assert (out == 2 * source).all()


class NoSuchKind(Protocol):
    def toy(self, blocks: Blocks, values: Numbers) -> None: ...  # type: ignore[name-defined]  # noqa: F821


class NoNumberIsNone(Protocol):
    def toy(self, blocks: Blocks | None) -> None: ...


class NoTable(Protocol):
    def toy(self, packed: PackedOut) -> None: ...


class TwoLengths(Protocol):
    def toy(self, one: BufferOut, other: BufferOut) -> None: ...


class NoSuchAnswer(Protocol):
    def toy(self, blocks: Blocks) -> float: ...


class WithDefault(Protocol):
    def toy(self, blocks: Blocks, mask: Mask | None = None) -> None: ...


class OtherOrder(Protocol):
    """``gather`` as it is not in C, where its function is written by hand."""

    def gather(self, tensors: Tensors, runs: Runs, destination: DenseOut) -> None: ...


class OtherName(Protocol):
    """``lamb_update`` without some of the arguments that its loop in C uses."""

    def lamb_update(self, blocks: Blocks, denominator: Floats, reborn: FloatsOut, update: FloatsOut) -> None: ...


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        (NoSuchKind, "loop 'toy', argument 'values': no kind 'Numbers'; there are Blocks, Runs, "),
        (NoNumberIsNone, "loop 'toy', argument 'blocks': Blocks cannot be None"),
        (NoTable, "loop 'toy': Blocks say where 'packed' has its elements; there must be one"),
        (TwoLengths, "loop 'toy': two parameters in C are called nbytes"),
        (NoSuchAnswer, "loop 'toy' answers 'float'; it may be None, Finite"),
        (WithDefault, "loop 'toy', argument 'mask': every call gives every argument"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mistake_in_a_declaration_is_an_error_that_names_it(protocol: type, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        declarations(protocol, ())


def test_a_loop_that_is_not_in_c_must_be_declared() -> None:
    with pytest.raises(TypeError, match="not in C, and not declared either: compres"):
        declarations(Loops, ("compres",))


@pytest.mark.parametrize(
    ("protocol", "source", "message"),
    [
        (None, "kernels.c", ""),
        (OtherOrder, "reduce.c", "conflicting types for .ocomm_gather"),
        (OtherName, "kernels.c", "has no member named .fresh"),
    ],
    ids=["as declared", "in another order", "by another name"],
)
def test_a_loop_in_c_that_is_not_as_declared_does_not_compile(
    protocol: type | None, source: str, message: str, tmp_path: Path
) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip(reason="no gcc")
    build = build_module()
    build.write_headers(tmp_path, None if protocol is None else altered(protocol))
    command = [compiler, "-fsyntax-only", "-std=gnu11", "-I", str(tmp_path), str(ROOT / "native" / source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (protocol is None), done.stderr
    assert re.search(message, done.stderr)


def test_an_extension_built_for_other_loops_is_refused() -> None:
    script = (
        "import ocomm.kernels.loops as loops; loops.DIGEST += 1\n"
        "try:\n    import ocomm.kernels.cpu\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "the extension ocomm._native was built for other loops than ocomm/kernels/loops.py declares" in done.stdout
    assert "rebuild it" in done.stdout


def test_the_declarations_are_read_without_numpy_and_without_the_package() -> None:
    script = (
        "import runpy, sys; sys.modules['numpy'] = None; found = runpy.run_path('ocomm/kernels/loops.py');"
        "print(sorted(found['LOOPS']), 'ocomm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{sorted(LOOPS)} False"


def test_every_kind_is_used() -> None:
    assert set(KINDS) == {argument.kind for declaration in LOOPS.values() for argument in declaration.arguments}
