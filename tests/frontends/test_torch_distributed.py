"""The backend "ocomm" of torch.distributed: real jobs of two and four ranks, against gloo in the same job."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from benchmarks.torch_features.__main__ import PAGE, REPORT, RESULTS, page, report, rows_of, table
from benchmarks.torch_features.features import FEATURES
from benchmarks.torch_features.job import have_same_bits, relative_gap, wrong
from ocomm import torch_backend
from ocomm.collectives import dense
from ocomm.collectives.dense import Context
from ocomm.collectives.plan import Plan
from ocomm.errors import MismatchError
from ocomm.operations import start_message
from ocomm.ordered import Call, OrderedChannel
from ocomm.runtime import bystanders
from ocomm.runtime.bystanders import FUTURES
from ocomm.session import Session
from ocomm.types import DType, ReduceOp
from ocomm_torch.distributed import OcommProcessGroup
from ocomm_torch.distributed.futures import Completer
from tests.cluster.jobs import run_job
from tests.worlds import MPI_SIZE, run_ranks

alone_in_a_job = pytest.mark.skipif(MPI_SIZE > 0, reason="starts jobs of its own")
COMPARE = "import sys; from benchmarks.torch_features import job; job.main(*sys.argv[1:])\n"


def rows(file: Path, done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """The rows that a job has written, by feature."""
    assert file.exists(), done.stdout + done.stderr
    found: dict[str, dict[str, Any]] = json.loads(file.read_text())
    for name, row in found.items():
        print(f"{name:50} same bits {row['same_bits']!s:5} gap {row['gap']:.1e}")
    return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A job of two ranks that compares, and then makes mistakes: to import Torch takes longer than either."""
    file = tmp_path_factory.mktemp("features") / "rows.json"
    return file, run_job(2, COMPARE + ERRORS, "quick", str(file), PYTHONWARNINGS="ignore")


def on_both(size: int, is_long: bool) -> list[str]:
    """The features of the list that both backends have."""
    return [f.name for f in FEATURES if size in f.sizes and f.is_long == is_long and not f.lacking_here]


@pytest.mark.long
@alone_in_a_job
def test_every_feature_has_gloos_bits_on_two_ranks(job: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    found = rows(*job)
    assert list(found) == on_both(2, is_long=False)
    assert wrong(found, 2) == []


@alone_in_a_job
@pytest.mark.long
@pytest.mark.parametrize(("ranks", "tier"), [(2, "long"), (4, "quick"), (4, "long")])
def test_every_feature_has_gloos_numbers(ranks: int, tier: str, tmp_path: Path) -> None:
    done = run_job(ranks, COMPARE, tier, str(tmp_path / "rows.json"), PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(tmp_path / "rows.json", done)
    assert list(found) == on_both(ranks, is_long=tier == "long")
    assert wrong(found, ranks) == []


def test_the_tables_have_every_feature_of_the_list() -> None:
    found = json.loads(RESULTS.read_text())
    assert page(PAGE.read_text(), found) == PAGE.read_text(), "python -m benchmarks.torch_features --tables"
    assert report(found) == REPORT.read_text(), "python -m benchmarks.torch_features --tables"
    names = [feature.name for feature in FEATURES]
    assert len(names) == len({*names}) >= 18
    for size in (2, 4):  # what was measured is still in the list
        assert {*rows_of(found, size)} <= {f.name for f in FEATURES if size in f.sizes and (f.until or not f.lacking)}
    assert [line.split(" | ")[0].removeprefix("| ") for line in table(found).splitlines()[2:]] == names


@pytest.mark.parametrize(
    ("ours", "theirs", "same_bits", "gap"),
    [
        ([1.0, -4.0], [1.0, -4.0], True, 0.0),
        ([1.0, -4.0], [1.0, -5.0], False, 0.2),
        ([0.0], [-0.0], False, 0.0),
        ([float("nan")], [float("nan")], True, 0.0),
        ([float("nan")], [1.0], False, float("inf")),
        ([1, 2], [1, 3], False, float("inf")),
        ([1.0, 2.0], [1.0], False, float("inf")),
    ],
)
def test_numbers_are_compared_by_their_bits(ours: Any, theirs: Any, same_bits: bool, gap: float) -> None:
    one, other = [torch.tensor(ours)], [torch.tensor(theirs)]
    assert have_same_bits(one, other) == same_bits
    assert relative_gap(one, other) == gap
    assert relative_gap(one, []) == float("inf") and not have_same_bits(one, [])


ERRORS = """
import datetime, os, sys, threading, time
import torch
import torch.distributed as dist
import ocomm_torch as hvd

dist.init_process_group("ocomm", init_method="ocomm://")
rank = dist.get_rank()
assert hvd.is_initialized() and hvd.rank() == rank
assert dist.group.WORLD._device_types == [torch.device("cpu")]
devices_before = []  # of groups that torch has yet to enter in its tables, when it looks for them from 2.15 on
type(dist.group.WORLD)._set_group_desc = lambda group, description: devices_before.extend(group._device_types)
both = lambda seconds=60: dist.new_group([0, 1], timeout=datetime.timedelta(seconds=seconds))

def said(name, call):
    try:
        call()
    except Exception as error:
        print(f"[{name} {rank}] {type(error).__name__}: {error}".replace("\\n", " "), flush=True)
    else:
        print(f"[{name} {rank}] nothing", flush=True)

ones = torch.ones(4)
group = both()
assert devices_before == []
said("dtype", lambda: dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.int32][rank]), group=group))
said("again", lambda: dist.all_reduce(ones, group=group))
group = both()
said("call", lambda: dist.broadcast(ones, 0, group=group) if rank else dist.all_reduce(ones, group=group))
group = both()
said("message", lambda: dist.send(torch.ones(5), 0, group=group) if rank else dist.recv(ones, 1, group=group))
group = both(1)
if rank == 0:
    said("late", lambda: dist.all_reduce(ones, group=group))
dist.barrier()
group = both(1)
if rank == 0:
    said("unsent", lambda: dist.recv(ones, 1, group=group))
dist.barrier()
group = both()
group.monitored_barrier(datetime.timedelta(seconds=60))  # torch before 2.14 has no function for it
if rank == 0:
    said("barrier", lambda: group.monitored_barrier(datetime.timedelta(seconds=0.5)))
dist.barrier()
group = both()
if rank == 0:
    said("no time", lambda: group.monitored_barrier(datetime.timedelta(0)))
dist.barrier()
said("meta", lambda: dist.all_reduce(torch.ones(4, device="meta")))
said("any", lambda: dist.recv(ones))
said("sparse", lambda: dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX))
said("shapes", lambda: dist.all_reduce(torch.eye(3 + rank).to_sparse()))
said("bits", lambda: dist.all_reduce(ones, dist.ReduceOp.BAND))
group = both()
mixed = torch.ones(4, dtype=[torch.float32, torch.int32][rank])
said("one refused", lambda: dist.reduce(mixed, 0, dist.ReduceOp.BOR, group=group))
group = both()
if rank == 0:
    said("gather", lambda: group.gather([[ones] * 3], [ones], dist.GatherOptions()))
    said("scatter", lambda: group.scatter([ones], [[ones] * 3], dist.ScatterOptions()))
    said("lists", lambda: group.allgather_coalesced([[ones, ones], [ones]], [ones, ones]))
said("broadcast root", lambda: dist.broadcast(ones, 2))
said("reduce root", lambda: dist.reduce(ones, -1))
said("gather root", lambda: dist.gather(ones, dst=2))
said("scatter root", lambda: dist.scatter(ones, src=2))
said("sent outside", lambda: dist.send(ones, 2))
said("received outside", lambda: dist.recv(ones, 2))
said("sent together", lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, ones, 2)]))
dist.all_reduce(ones.clone())  # the group goes on
minute, most = datetime.timedelta(seconds=60), dist.ReduceOp.MAX  # as calls of a group of gloo's are written
word, one, two = torch.full((2,), rank + 1.0), torch.zeros(2), [torch.zeros(2), torch.zeros(2)]
for call, expected in (
    (lambda: (group.broadcast(mine := word.clone(), root=1), mine), [2.0, 2.0]),
    (lambda: (group.broadcast(mine := word.clone(), 1, minute), mine), [2.0, 2.0]),
    (lambda: (group.allreduce(mine := word.clone(), op=most, timeout=minute), mine), [2.0, 2.0]),
    (lambda: (group.allreduce(mine := word.clone(), most, minute), mine), [2.0, 2.0]),
    (lambda: (group.reduce(mine := word.clone(), root=0, op=most), mine), None if rank else [2.0, 2.0]),
    (lambda: (group.reduce(mine := word.clone(), 0, most, minute), mine), None if rank else [2.0, 2.0]),
    (lambda: (group.gather([] if rank else two, word, root=0), two[1]), None if rank else [2.0, 2.0]),
    (lambda: (group.scatter(one, [] if rank else [word, word * 5], root=0), one), [[1.0, 1.0], [5.0, 5.0]][rank]),
    (lambda: (group.allgather(two, word, timeout=minute), two[0]), [1.0, 1.0]),
    (lambda: (group.reduce_scatter(one, [word, word], op=most), one), [2.0, 2.0]),
    (lambda: (group.alltoall_base(one, word, [1, 1], [1, 1], minute), one), [1.0, 2.0]),
    (lambda: (group.barrier(timeout=minute), word), [rank + 1.0] * 2),
):
    work, found = call()
    assert work.wait() and expected in (None, found.tolist()), (expected, found)
limited = both()
if rank == 0:
    said("limited", lambda: limited.barrier(timeout=datetime.timedelta(seconds=0.5)).wait())
dist.barrier()
group.send([ones * 3], rank, 7)
mine = torch.zeros(4)
group.recv([mine], rank, 7)
assert mine[0] == 3
group.allreduce([ones.clone()]).get_future().wait()
from torch.distributed.distributed_c10d import _coalescing_manager
cpu = torch.device("cpu")
for asynchronous in (True, False):
    for device in (None, cpu):
        sums = [ones.clone(), ones[:2] * 3]
        wholes, parts = [torch.zeros(8), torch.zeros(4)], [torch.zeros(2), torch.zeros(1)]
        for each in (
            lambda: [dist.all_reduce(t, group=group) for t in sums],
            lambda: [dist.all_gather_into_tensor(w, t, group=group) for w, t in zip(wholes, sums)],
            lambda: [dist.reduce_scatter_tensor(p, t, group=group) for p, t in zip(parts, sums)],
        ):
            with _coalescing_manager(group, device, async_ops=asynchronous) as together:
                each()
            if asynchronous:
                together.wait()
        values = [t.tolist() for t in sums + wholes + parts]
        assert values == [[2.0] * 4, [6.0] * 2, [2.0] * 8, [6.0] * 4, [4.0] * 2, [12.0]]
number = torch.zeros(100_000)
with _coalescing_manager(group, cpu, async_ops=True) as together:
    (dist.isend(torch.full([100_000], 7.0), 0, group=group) if rank else dist.irecv(number, 1, group=group))
    gathered = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(gathered, torch.full([2], float(rank)), group=group, async_op=True)
together.wait()
assert number.eq(0.0 if rank else 7.0).all() and [t[0] for t in gathered] == [0.0, 1.0]
begun, asked = threading.Event(), threading.Event()
def waits_for_what_was_asked_later(future):
    begun.set()
    asked.wait()
    return later.wait()[0] + following.wait()
first = group.allreduce([ones.clone()]).get_future().then(waits_for_what_was_asked_later)
begun.wait()
later = group.allreduce([ones.clone()]).get_future()
following = later.then(lambda future: future.value()[0] * 2)
asked.set()
assert first.wait()[0] == 6.0
group = both()
for numel in (1000, 100_000):  # a small one has memory of its own until somebody asks for the result
    total, parts = torch.ones(numel), [torch.zeros(2), torch.zeros(2)]
    dist.all_reduce(total, group=group, async_op=True)
    dist.all_gather(parts, ones[:2] + rank, group=group, async_op=True)
    dist.barrier(group)
    assert total.eq(2.0).all() and [part[0] for part in parts] == [1.0, 2.0]
dealt = torch.zeros(4)
dist.all_to_all_single(dealt, torch.arange(4.0) + 10 * rank, *([[2, 2], [2, 2]] if rank else []), group=group)
assert dealt.tolist() == [2.0 * rank, 2.0 * rank + 1, 2.0 * rank + 10, 2.0 * rank + 11]
for name, sent in (("short", 1), ("long", 3)):
    splits = [2, 2] if rank else [2, sent]
    each = torch.zeros(sum(splits))
    said(name, lambda: dist.all_to_all_single(dealt, each, [2, 2], splits, group=both()))
    lists = list(each.split(splits))
    said(name + " list", lambda: dist.all_to_all([torch.zeros(2), torch.zeros(2)], lists, group=both()))
group = both()
said("single", lambda: dist.all_gather_into_tensor(torch.zeros(8, dtype=torch.int32), ones, group=group))
last = group.allreduce([ones.clone()])
last.wait()
dist.destroy_process_group(group)
said("destroyed", lambda: group.allreduce([ones]).wait())
last.get_future().wait()  # of a group whose thread for futures has ended
dist.destroy_process_group()
dist.init_process_group("cpu:ocomm,cuda:nccl", init_method="ocomm://")
said("mixed", lambda: dist.all_reduce(ones))
dist.destroy_process_group()
dist.init_process_group("ocomm", init_method="ocomm://")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 1))  # its C++ takes the tensors out of futures
if rank:
    said("backward", lambda: ddp(torch.ones(1, 64)).sum().backward())
else:
    said("backward", lambda: dist.all_reduce(torch.ones(65, dtype=torch.int32)))
dist.destroy_process_group()
dist.init_process_group("ocomm", init_method="ocomm://")
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
def mistake(future):
    raise ValueError("my hook has a mistake")
def chained(group, bucket):
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(mistake).then(lambda future: future.value()[0])
for name, hook, numel in (  # as many integers as the hook's first message has bytes for
    ("fp16 hook", lambda group: (group, default_hooks.fp16_compress_hook), 2080),
    ("PowerSGD hook", lambda group: (
        powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False),
        powerSGD_hook.powerSGD_hook,
    ), 64),
    ("chained hook", lambda group: (group, chained), 0),
):
    group = both()
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64), process_group=group)
    ddp.register_comm_hook(*hook(group))
    if rank or not numel:
        said(name, lambda: ddp(torch.ones(1, 64)).sum().backward())
    else:
        said(name, lambda: dist.all_reduce(torch.ones(numel, dtype=torch.int32), group=group))
def weight_after(*modules, **options):
    net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), *modules)
    torch.nn.init.zeros_(net[0].weight)
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    with ddp.join(**options):
        for _ in range(1 + rank):
            ddp(torch.full((2, 1), 0.5 + rank)).sum().backward()
            net[0].weight.data -= net[0].weight.grad
            net[0].weight.grad = None
    return net[0].weight.item()
# Gradients are 1 and 3, then 3 on rank 1 alone.
print(f"[join {rank}]", *[weight_after(divide_by_initial_world_size=each) for each in (True, False)], flush=True)
weight_after(torch.nn.BatchNorm1d(1), divide_by_initial_world_size=False)  # with buffers that are broadcast
dist.destroy_process_group()
dist.init_process_group("ocomm", init_method="ocomm://")
said("shape", lambda: dist.all_reduce(torch.ones(4 + rank)))
time.sleep(2.5)  # the other rank is to hear what this one did
os._exit(0)
"""


@pytest.mark.long
@alone_in_a_job
def test_what_ranks_do_not_do_alike_is_an_error_that_names_them(
    job: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = job
    said = {}
    for line in done.stdout.splitlines():
        if line.startswith("["):
            name, _, text = line[1:].partition("] ")
            said[name] = text
    for rank in (0, 1):
        for name, words in {
            "dtype": ["MismatchError", "rank 0", "4 elements of float32", "rank 1", "4 elements of int32"],
            "again": ["MismatchError", "cannot be done"],
            "call": ["MismatchError", "rank 0 called allreduce", "rank 1 called broadcast"],
            "message": ["MismatchError", "from rank 1 to rank 0", "(16,)", "(20,)"],
            "meta": ["NotImplementedError", "meta", "nccl"],
            "any": ["NotImplementedError", "any source"],
            "sparse": ["NotImplementedError", "MAX", "to_dense()"],
            "shapes": ["MismatchError", "rank 0", "(3, 3)", "rank 1", "(4, 4)"],
            "bits": ["InvalidRequestError", "integers and bool, not float32"],
            "one refused": [
                "MismatchError",
                "rank 0 called reduce of 4 elements of float32 by bitwise_or (refused) with root 0",
                "rank 1 called reduce of 4 elements of int32 by bitwise_or with root 0",
            ],
            "short": [
                "MismatchError",
                "all_to_all_single of float32",
                "expects 8 from it",
                "splits of the two must fit",
            ],
            "short list": ["MismatchError", "all_to_all of float32", "expects 8 from it"],
            "long": ["MismatchError", "all_to_all_single of float32", "expects 8 from it"],
            "long list": ["MismatchError", "all_to_all of float32", "expects 8 from it"],
            "single": ["InvalidRequestError", "8 elements of int32", "2 times the 4 of float32"],
            "broadcast root": ["InvalidRequestError: broadcast: ", " has no rank 2", "2 ranks count from 0 to 1"],
            "reduce root": ["InvalidRequestError: reduce: ", " has no rank -1", "2 ranks count from 0 to 1"],
            "gather root": ["InvalidRequestError: gather: ", " has no rank 2", "2 ranks count from 0 to 1"],
            "scatter root": ["InvalidRequestError: scatter: ", " has no rank 2", "2 ranks count from 0 to 1"],
            "sent outside": ["InvalidRequestError: send: ", " has no rank 2", "2 ranks count from 0 to 1"],
            "received outside": ["InvalidRequestError: recv: ", " has no rank 2", "2 ranks count from 0 to 1"],
            "sent together": ["InvalidRequestError: send: ", " has no rank 2", "2 ranks count from 0 to 1"],
            "destroyed": ["InvalidRequestError", "destroyed"],
            "mixed": ["NotImplementedError", "cuda:nccl would not be used"],
            "backward": ["MismatchError", "rank 0", "65 elements of int32", "rank 1", "65 elements of float32"],
            "fp16 hook": ["MismatchError: ", "2080 elements of int32", "4160 elements of float16"],
            "PowerSGD hook": ["MismatchError: ", "64 elements of int32", "64 elements of float32"],
            "chained hook": ["ValueError: my hook has a mistake"],
            "join": ["-3.5 -5.0"],
            "shape": ["MismatchError", "rank 0", "4 elements", "rank 1", "5 elements"],
        }.items():
            for word in words:
                assert word in said[f"{name} {rank}"], (name, rank, said, done.stderr)
    for name, words in {"gather": "2 tensors", "scatter": "2 tensors", "lists": "2 lists of 2 outputs"}.items():
        assert "InvalidRequestError" in said[f"{name} 0"] and words in said[f"{name} 0"]
    assert "StallError" in said["late 0"] and "rank(s) [1]" in said["late 0"]
    assert "StallError: torch.distributed" in said["barrier 0"]
    assert "timeout of 0.5 s; rank(s) [1] have not" in said["barrier 0"]
    assert "StallError: torch.distributed" in said["no time 0"]
    assert "timeout of 0.5 s; rank(s) [1] have not" in said["limited 0"]
    assert "StallError" in said["unsent 0"] and "from rank 1 to rank 0" in said["unsent 0"]


def test_what_torch_calls_has_the_names_of_2_13_and_of_later_releases() -> None:
    for old, new in {
        "_allgather_base": "all_gather_single",
        "_reduce_scatter_base": "reduce_scatter_single",
        "alltoall_base": "all_to_all_single",
        "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
        "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    }.items():
        assert getattr(OcommProcessGroup, old) is getattr(OcommProcessGroup, new)
    for group in ("torch.backends", "torch.distributed.backends"):
        (found,) = metadata.entry_points(group=group, name="ocomm")
        assert found.load() is torch_backend.register


@alone_in_a_job
@pytest.mark.long
def test_a_script_needs_no_import_of_ocomm() -> None:
    script = """
import torch, torch.distributed as dist
dist.init_process_group("ocomm", init_method="ocomm://")
ones = torch.ones(3)
dist.all_reduce(ones)
print("sum", ones.tolist())
dist.destroy_process_group()
"""
    done = run_job(2, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum [2.0, 2.0, 2.0]") == 2


POWER_SGD = """
import torch
import torch.distributed as dist
from benchmarks.torch_features import features, job

job.start()
with job.world("ocomm"):
    for round in range(12):
        torch.manual_seed(0)
        step = features.powersgd(0.002 if round % 2 else 25.0)
        *_, last = [step(number)[-1] for number in range(4)]
        every = [torch.zeros_like(last) for _ in range(2)]
        dist.all_gather(every, last)
        assert last.isfinite().all() and torch.equal(*every)
    print("equal")
"""


@alone_in_a_job
@pytest.mark.long
def test_callbacks_of_many_buckets_communicate_in_one_order() -> None:
    done = run_job(2, POWER_SGD, PYTHONWARNINGS="ignore")
    assert done.stdout.count("equal") == 2, done.stdout + done.stderr


FAILS = """
import datetime, os, time
import torch
import torch.distributed as dist
import ocomm_torch as hvd
from ocomm import session as sessions

hvd.init()
store = dist.FileStore(os.environ["STORE"], 2)
dist.init_process_group("ocomm", store=store, rank=hvd.rank(), world_size=2)
group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=float(os.environ["SECONDS"])))
if hvd.rank() == 0 or os.environ["CALLS"] != "one":
    try:
        work = dist.all_reduce(torch.ones(4 + hvd.rank()), group=group, async_op=True)
        if hvd.rank() == 1 and os.environ["CALLS"] == "late":
            while sessions.current().runtime.failure is None:
                time.sleep(0.01)
        work.wait()
    except hvd.HorovodInternalError as error:
        print(f"[{hvd.rank()}] {type(error).__name__}: {error}".replace("\\n", " "), flush=True)
hvd.barrier()
"""


@pytest.mark.long  # two jobs, of which the first waits for its end
@alone_in_a_job
def test_a_job_that_begins_again_with_the_same_store_says_nothing_of_the_one_before(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    before = run_job(2, FAILS, STORE=store, CALLS="all", SECONDS="60")
    assert "[1] MismatchError" in before.stdout and "allreduce of 5 elements" in before.stdout, before.stdout
    after = run_job(2, FAILS, STORE=store, CALLS="one", SECONDS="1")
    assert "[0] StallError" in after.stdout and "of 5 elements" not in after.stdout, after.stdout


@alone_in_a_job
def test_a_rank_that_hears_first_that_the_others_network_has_failed_says_what_both_have_called(tmp_path: Path) -> None:
    done = run_job(2, FAILS, STORE=str(tmp_path / "store"), CALLS="late", SECONDS="60")
    (said,) = [line for line in done.stdout.splitlines() if "[1] MismatchError" in line]
    assert "rank 1 called allreduce of 5 elements" in said and "rank 0 called allreduce of 4 elements" in said


# What it is made of


def test_messages_go_between_two_ranks_while_others_do_other_things() -> None:
    def body(session: Session) -> list[int]:
        session.registry.prepare_members()
        rank = session.require_topology().rank
        if rank == 3:
            return []
        member = session.member_set(session.registry.add_members([0, 1, 2], "three"))
        buffers = [np.full(200_000, rank, np.uint8), np.full(3, rank, np.uint8), np.full(3, rank, np.uint8)]
        ends = [(0, 1), (1, 2), (2, 0)]
        handles = [
            start_message(member, f"message {k}", buffer, *pair)
            for k, (buffer, pair) in enumerate(zip(buffers, ends, strict=True))
            if rank in pair
        ]
        for handle in reversed(handles):
            handle.wait()
        return [int(buffer[-1]) for buffer in buffers]

    assert run_ranks(4, body)[:3] == [[0, 0, 2], [0, 1, 1], [2, 1, 2]]


def test_sets_of_members_with_the_same_ranks_do_not_hear_each_other() -> None:
    def body(session: Session) -> list[float]:
        session.registry.prepare_members()
        rank = session.require_topology().rank
        numbers = [session.registry.add_members([0, 1], name) for name in ("one", "other")] if rank < 2 else []
        channels = [OrderedChannel(session, number, f"channel {number}", 30.0) for number in numbers]
        values = [np.full(3, 10.0**k + rank, np.float32) for k in range(len(channels))]
        exchanges = []
        for k in (0, 1) if rank == 0 else range(len(channels) - 1, -1, -1):
            buffer = values[k].view(np.uint8)
            exchanges.append(channels[k].start(Call("sum", "float32", (3,)), [buffer], [buffer], add))
        for exchange in exchanges:
            exchange.wait()
        for number in numbers:
            session.registry.remove_members(number)
        return [float(value[0]) for value in values]

    assert run_ranks(3, body) == [[3.0, 21.0], [3.0, 21.0], []]


def test_the_thread_of_futures_could_call_something_while_it_runs_a_callback() -> None:
    others = {thread.ident or 0 for thread in threading.enumerate()}
    begun, free = threading.Event(), threading.Event()
    completer = Completer("a group")
    completer.later(lambda: (begun.set(), free.wait(60)))
    assert begun.wait(60)
    assert bystanders.bystanders(others) == [FUTURES]
    free.set()
    end = time.monotonic() + 60
    while bystanders.bystanders(others):  # until it waits to be asked again
        assert time.monotonic() < end
    (thread,) = (each.ident for each in threading.enumerate() if each.ident not in others)
    assert bystanders.idle([thread]) == {thread}
    completer.close()


def add(context: Context, sources: Any, targets: Any) -> Plan:
    return dense.allreduce(context, sources, targets, [sources[0].nbytes], DType.FLOAT32, ReduceOp.SUM)


def test_calls_that_differ_end_as_a_mismatch_on_all_ranks() -> None:
    def body(session: Session) -> str:
        rank = session.require_topology().rank
        channel = OrderedChannel(session, 0, "the channel", 30.0)
        values = np.zeros(4, np.float32)
        buffer = values.view(np.uint8)
        for _ in range(3):  # a plan that is kept compares, too
            channel.start(Call("sum", "float32", (4,)), [buffer], [buffer], add).wait()
        call = Call("sum", "float32", (4,), root=1 if rank == 2 else 0)
        with pytest.raises(MismatchError, match=r"rank 2|rank 0"):
            channel.start(call, [buffer], [buffer], add).wait()
        with pytest.raises(MismatchError, match="cannot be done"):
            channel.start(call, [buffer], [buffer], add)
        return "raised"

    assert run_ranks(3, body) == ["raised"] * 3
