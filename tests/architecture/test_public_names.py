"""The public names, and Horovod's signatures, which existing scripts rely on."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import ocomm
from ocomm.as_horovod import place_of
from tests.architecture.parity_table import (
    ELASTIC,
    IGNORED,
    KERAS,
    NUMPY,
    OPTIMIZER,
    PROCESS,
    SUBMODULES,
    TORCH,
    VALUES,
    VARIABLES,
)

_DEFAULTS = {
    "1.0": 1.0,
    "1e-05": 1e-05,
    "0.1": 0.1,
    "0": 0,
    "1": 1,
    "-1": -1,
    "None": None,
    "True": True,
    "False": False,
    "Average": ocomm.Average,
}


def check(function: object, spelled: str, frontend: str = "ocomm_torch") -> None:
    """Takes every call that Horovod's takes: its parameters in its order, what is added has a default."""
    ours = list(inspect.signature(function).parameters.values())  # type: ignore[arg-type]
    # What we have added by keyword is out of the way of Horovod's calls, also before **kwargs.
    added = [p for p in ours if p.kind is p.KEYWORD_ONLY and p.name not in spelled]
    parameters = [p for p in ours if p not in added]
    for text in filter(None, spelled.split(", ")):
        name, _, default = ("process_set=global" if text == "ps" else text).partition("=")
        parameter = parameters.pop(0)
        assert parameter.name == name.lstrip("*"), text
        if name.startswith("**"):
            assert parameter.kind is parameter.VAR_KEYWORD
        elif default == "global":
            assert parameter.default is ocomm.global_process_set
        elif default.startswith("Compression."):
            compressions = importlib.import_module(frontend).Compression
            assert parameter.default is getattr(compressions, default.split(".")[1])
        elif default:
            assert parameter.default == _DEFAULTS[default], text
    parameters += added
    assert all(parameter.default is not parameter.empty for parameter in parameters), parameters


def find(module: object, path: str) -> object:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_of_ocomm_exists_and_is_documented() -> None:
    assert {name for name in NUMPY if "." not in name} <= set(ocomm.__all__)
    for name in ocomm.__all__:
        thing = getattr(ocomm, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert thing.__doc__, name
    with pytest.raises(AttributeError, match=r"^module 'ocomm' has no attribute 'alreduce'$"):
        ocomm.alreduce  # noqa: B018


def test_every_public_name_of_ocomm_torch_exists_and_is_documented() -> None:
    hvd = pytest.importorskip("ocomm_torch", exc_type=ImportError)
    rows = [*PROCESS, *TORCH, *ELASTIC, *VALUES, "build_info"]
    assert {name.split(".")[0] for name in rows} <= set(hvd.__all__)
    for name in hvd.__all__:
        thing = getattr(hvd, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert thing.__doc__, name


ROWS = {**PROCESS, **TORCH, **ELASTIC}


@pytest.mark.parametrize("name", ROWS)
def test_a_call_of_horovods_fits_ours(name: str) -> None:
    hvd = pytest.importorskip("ocomm_torch", exc_type=ImportError)
    function = find(hvd, name)
    check(function, ROWS[name])
    assert inspect.getdoc(function), name


@pytest.mark.parametrize("name", KERAS)
def test_a_call_of_horovods_for_keras_fits_ours(name: str) -> None:
    hvd = pytest.importorskip("ocomm_tf.keras", exc_type=ImportError)
    check(getattr(hvd, name), KERAS[name], "ocomm_tf")


@pytest.mark.parametrize("name", OPTIMIZER)
@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_a_distributed_optimizer_has_horovods_methods(name: str, op: str) -> None:
    hvd = pytest.importorskip("ocomm_torch", exc_type=ImportError)
    torch = pytest.importorskip("torch")
    from tests.worlds import run_ranks

    def body(session: object) -> None:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        wrapped = hvd.DistributedOptimizer(optimizer, op=getattr(hvd, op))
        check(getattr(type(wrapped), name), OPTIMIZER[name])
        assert type(wrapped).__name__ == "SGD" and isinstance(wrapped, torch.optim.SGD)

    run_ranks(1, body)


def test_horovods_submodules_have_what_is_imported_from_them() -> None:
    for needed in ("torch", "tensorflow"):
        pytest.importorskip(needed)
    lines = ["from ocomm import as_horovod", "as_horovod.install()"]
    for module, names in SUBMODULES.items():
        lines.append(f"from horovod.{module} import {', '.join(names.split())}")
        place = place_of(f"horovod.{module}")
        assert place is not None
        # A script whose imports were renamed says the same.
        lines += [f"import {place}", *(f"assert {name} is {place}.{name}, '{place}.{name}'" for name in names.split())]
    run_python("\n".join(lines))


def test_a_script_that_asks_for_horovods_version_and_file_gets_them() -> None:
    asked = "import horovod, horovod.torch; print(horovod.__version__, horovod.torch.__version__, horovod.__file__)"
    pytest.importorskip("torch")
    version, of_torch, file = run_python(f"from ocomm import as_horovod; as_horovod.install(); {asked}").split()
    assert version == of_torch == "0.28.1" and file == ocomm.__file__


def test_what_horovod_has_without_parameters_is_there() -> None:
    hvd = pytest.importorskip("ocomm_torch", exc_type=ImportError)
    for name in VALUES:
        assert hasattr(hvd, name), name
    for name in ("process_set_id", "ranks", "mpi_comm"):
        assert hasattr(hvd.ProcessSet([0]), name), name
    assert issubclass(hvd.HorovodInternalError, RuntimeError) and issubclass(hvd.HostsUpdatedInterrupt, RuntimeError)


def test_horovods_variables_are_understood_or_named_and_ignored() -> None:
    from ocomm.config import VARIABLES as OURS
    from ocomm.config import read_settings, without_meaning

    assert sorted(VARIABLES) == sorted(f"HOROVOD_{name}" for name, (_, _, is_horovods) in OURS.items() if is_horovods)
    values = dict.fromkeys([*IGNORED, *VARIABLES, "OCOMM_WINDOW"], "1")
    assert without_meaning(values) == sorted(IGNORED)
    assert read_settings(dict.fromkeys(IGNORED, "1")) == read_settings({})


def test_reductions_have_horovods_numbers() -> None:
    names = (ocomm.Average, ocomm.Sum, ocomm.Adasum, ocomm.Min, ocomm.Max, ocomm.Product)
    assert [int(op) for op in names] == [0, 1, 2, 3, 4, 5]


def test_importing_ocomm_is_light() -> None:
    heavy = "{m for m in ('numpy', 'cffi', 'mpi4py', 'torch', 'ocomm._native', 'ocomm.session') if m in sys.modules}"
    assert run_python(f"import sys, ocomm, ocomm.launch; print({heavy})").strip() == "set()"
    assert run_python("import ocomm; print(ocomm.rank.__name__, 'rank' in dir(ocomm))").split() == ["rank", "True"]


def test_mpi_is_loaded_by_init_and_not_by_import() -> None:
    code = "import sys, ocomm.api, ocomm_torch; print('mpi4py' in sys.modules, 'mpi4py.MPI' in sys.modules)"
    pytest.importorskip("torch")
    assert run_python(code).split() == ["False", "False"]


def test_build_info_names_versions() -> None:
    info = ocomm.build_info()
    assert info["ocomm"] == ocomm.__version__ and info["native"] is True and info["numpy"]
