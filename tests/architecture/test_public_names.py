"""The public names, and Horovod's signatures, which existing scripts rely on."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import ocomm

TOPOLOGY = [
    "init",
    "shutdown",
    "is_initialized",
    "rank",
    "size",
    "local_rank",
    "local_size",
    "cross_rank",
    "cross_size",
    "is_homogeneous",
    "mpi_threads_supported",
    "mpi_enabled",
    "mpi_built",
    "gloo_enabled",
    "gloo_built",
    "nccl_built",
    "ddl_built",
    "ccl_built",
    "cuda_built",
    "rocm_built",
    "build_info",
    "Average",
    "Sum",
    "Adasum",
    "Min",
    "Max",
    "Product",
    "ProcessSet",
    "global_process_set",
]
COLLECTIVES = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "allgather",
    "allgather_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "alltoall",
    "alltoall_async",
    "reducescatter",
    "reducescatter_async",
    "barrier",
    "poll",
    "synchronize",
    "broadcast_object",
    "allgather_object",
]

REDUCE = "average=None, name=None, {}op=None, prescale_factor=1.0, postscale_factor=1.0, process_set"
SCATTER = "name=None, {}op=Average, process_set, prescale_factor=1.0, postscale_factor=1.0"
#: Horovod 0.28.1, torch/mpi_ops.py, functions.py and optimizer.py; "process_set" has the default global_process_set.
TORCH = {
    "allreduce": "tensor, " + REDUCE.replace("{}", "").replace("name=None, ", "name=None, compression=none, "),
    "allreduce_": "tensor, " + REDUCE.replace("{}", ""),
    "allreduce_async": "tensor, " + REDUCE.replace("{}", ""),
    "allreduce_async_": "tensor, " + REDUCE.replace("{}", ""),
    "grouped_allreduce": "tensors, " + REDUCE.replace("{}", "compression=none, "),
    "grouped_allreduce_": "tensors, " + REDUCE.replace("{}", ""),
    "grouped_allreduce_async": "tensors, " + REDUCE.replace("{}", ""),
    "grouped_allreduce_async_": "tensors, " + REDUCE.replace("{}", ""),
    "allgather": "tensor, name=None, process_set",
    "allgather_async": "tensor, name=None, process_set",
    "grouped_allgather": "tensors, name=None, process_set",
    "grouped_allgather_async": "tensors, name=None, process_set",
    "broadcast": "tensor, root_rank, name=None, process_set",
    "broadcast_": "tensor, root_rank, name=None, process_set",
    "broadcast_async": "tensor, root_rank, name=None, process_set",
    "broadcast_async_": "tensor, root_rank, name=None, process_set",
    "alltoall": "tensor, splits=None, name=None, process_set",
    "alltoall_async": "tensor, splits=None, name=None, process_set",
    "reducescatter": "tensor, " + SCATTER.replace("{}", "compression=none, "),
    "reducescatter_async": "tensor, " + SCATTER.replace("{}", ""),
    "grouped_reducescatter": "tensors, " + SCATTER.replace("{}", "compression=none, "),
    "grouped_reducescatter_async": "tensors, " + SCATTER.replace("{}", ""),
    "poll": "handle",
    "synchronize": "handle",
    "barrier": "process_set",
    "broadcast_object": "obj, root_rank=0, name=None, process_set",
    "allgather_object": "obj, name=None, process_set",
    "init": "comm=None, process_sets=None",
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, op=Average, "
        "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set"
    ),
}


def spell(function: object) -> str:
    """The parameters of a function, as in the table above."""
    parts = []
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        default = parameter.default
        if parameter.name == "process_set":
            assert default is ocomm.global_process_set
            parts.append("process_set")
        elif default is parameter.empty:
            parts.append(parameter.name)
        else:
            shown = {"compression": "none", "op": "None" if default is None else "Average"}
            parts.append(f"{parameter.name}={shown.get(parameter.name, default)}")
    return ", ".join(parts)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_of_ocomm_exists_and_is_documented() -> None:
    assert {*TOPOLOGY, *COLLECTIVES} <= set(ocomm.__all__)
    for name in ocomm.__all__:
        thing = getattr(ocomm, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert thing.__doc__, name
    with pytest.raises(AttributeError, match=r"^module 'ocomm' has no attribute 'alreduce'$"):
        ocomm.alreduce  # noqa: B018


def test_every_public_name_of_ocomm_torch_exists_and_is_documented() -> None:
    hvd = pytest.importorskip("ocomm_torch", exc_type=ImportError)
    extra = [
        "Compression",
        "DistributedOptimizer",
        "broadcast_parameters",
        "broadcast_optimizer_state",
        "HorovodInternalError",
        "HostsUpdatedInterrupt",
        "grouped_allgather",
        "grouped_reducescatter",
        "sparse_allreduce_async",
    ]
    assert {*TOPOLOGY, *COLLECTIVES, *extra} <= set(hvd.__all__)
    for name in hvd.__all__:
        thing = getattr(hvd, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert thing.__doc__, name


@pytest.mark.parametrize("name", sorted(TORCH))
def test_torch_calls_have_horovods_signatures(name: str) -> None:
    hvd = pytest.importorskip("ocomm_torch", exc_type=ImportError)
    assert spell(getattr(hvd, name)) == TORCH[name]


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
