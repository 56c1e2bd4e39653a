"""State in the host's memory or in files while parameters are on a device: every bit is that of a run without.

The device is a fake (see ``tests.fake_device``): its memory is out of reach, a copy is garbage until it has been asked
for often enough. ``test_torch_cuda`` has the same law in numba's simulator.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.errors import InvalidRequestError, NonFiniteError
from ocomm.kernels import cpu_kernels, files
from ocomm.kernels import device as of_devices
from ocomm.kernels.files import FileMemory, in_memory
from ocomm.session import Session
from ocomm.training.common import Common
from ocomm_torch.memory.options import MemoryOptions
from ocomm_torch.memory.placement import placement
from ocomm_torch.optimizers import compressed
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from tests.fake_device import FakeDevice
from tests.frontends.every_kind import whole_state
from tests.frontends.fake_placement import FakePlacement
from tests.frontends.onebit_jobs import SHAPES, backward, digest, gradients, initial
from tests.frontends.test_torch_device import parameters_of, rank_of, some_gradients
from tests.frontends.test_torch_device import trained as trained_kind
from tests.tiers import alternating
from tests.worlds import MPI_SIZE, run_ranks

pytestmark = pytest.mark.skipif(MPI_SIZE > 0, reason="threads are enough: nothing here is of the network")

STEPS, WARMUP = 10, 4
NUMEL = sum(int(np.prod(shape)) for shape in SHAPES)
Between = Callable[[int, int, list[torch.nn.Parameter], Any], None]


@pytest.fixture
def on_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int]], dict[int, FakeDevice]]:
    """Says which ranks' tensors are on a device from now on; the devices, by rank."""

    def choose(ranks: Sequence[int]) -> dict[int, FakeDevice]:
        devices = {rank: FakeDevice(f"fake:{rank}") for rank in ranks}

        def place(names: Any, parameters: Any, session: Session) -> Any:
            device = devices.get(rank_of(session))
            return placement(names, parameters, session) if device is None else FakePlacement(device)

        monkeypatch.setattr(compressed, "placement", place)
        return devices

    return choose


def wrapped(parameters: list[torch.nn.Parameter], inner: dict[str, Any] | None = None, **options: Any) -> Any:
    adam = torch.optim.Adam(parameters, **{"lr": 1e-2, "foreach": False, **(inner or {})})
    return DistributedOneBitAdam(adam, **{"freeze_step": WARMUP, **options})


def trained(
    rank: int,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    between: Between = lambda step, rank, parameters, optimizer: None,
    watch: Callable[[Any, int], None] = lambda optimizer, step: None,
    passes: int = 1,
    **options: Any,
) -> tuple[list[str], str]:
    """The parameters after every step, and in the end all that a step may change; as hashes."""
    parameters = parameters_of(dtype)
    optimizer = wrapped(parameters, **options)
    history = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for k in range(passes):
            backward(parameters, some_gradients(step + 100 * k, rank), range(len(parameters) - 1, -1, -1))
        between(step, rank, parameters, optimizer)
        optimizer.step()
        watch(optimizer, step)
        history.append(digest([p.detach().float().numpy() for p in parameters]))
    return history, whole_state(parameters, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("place", "ranks"), alternating(["host", "files"], [3, 1]))
def test_offloaded_steps_have_every_bit_of_the_hosts(
    place: str, dtype: torch.dtype, ranks: int, on_devices: Any, tmp_path: Path
) -> None:
    expected = run_ranks(ranks, lambda s: trained(rank_of(s), dtype=dtype))
    offload = True if place == "host" else str(tmp_path)
    devices = on_devices(range(ranks))
    assert run_ranks(ranks, lambda s: trained(rank_of(s), dtype=dtype, offload=offload)) == expected
    for device in devices.values():
        loops = {what for verb, what, _ in device.log if verb == "launch"}
        assert loops == {"sum_words"}, "steps are the host's"


@pytest.mark.parametrize("place", ["host", "files"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["1-bit LAMB, compressed", "0/1 Adam", "0/1 Adam, local steps"])
def test_the_other_adams_offload_too(
    kind: str, dtype: torch.dtype, place: str, on_devices: Any, tmp_path: Path
) -> None:
    expected = run_ranks(2, lambda s: trained_kind(kind, rank_of(s), 8, dtype))
    on_devices([0, 1])
    offload = True if place == "host" else str(tmp_path)
    assert run_ranks(2, lambda s: trained_kind(kind, rank_of(s), 8, dtype, offload=offload)) == expected


@pytest.mark.parametrize("place", ["host", "files"])
def test_steps_that_send_nothing_offload_too(place: str, on_devices: Any, tmp_path: Path) -> None:
    def body(session: Session, **options: Any) -> Any:
        kind = "0/1 Adam, local steps"
        return trained_kind(kind, rank_of(session), 12, grads=gradients, vote="sync", **options)

    expected = run_ranks(2, body)
    on_devices([0, 1])
    offload = True if place == "host" else str(tmp_path)
    assert run_ranks(2, lambda session: body(session, offload=offload)) == expected


def test_ranks_that_offload_train_with_others(on_devices: Any) -> None:
    expected = run_ranks(3, lambda s: trained(rank_of(s)))
    on_devices([0, 1])
    assert run_ranks(3, lambda s: trained(rank_of(s), offload=rank_of(s) != 1)) == expected


def test_offload_of_parameters_in_the_hosts_memory_changes_nothing(tmp_path: Path) -> None:
    expected = run_ranks(2, lambda s: trained(rank_of(s)))
    for offload in (True, str(tmp_path), tmp_path):
        assert run_ranks(2, lambda s, offload=offload: trained(rank_of(s), offload=offload)) == expected


def rates_change(step: int, rank: int, parameters: list[torch.nn.Parameter], optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 1e-2 / step


OPTIONS: dict[str, dict[str, Any]] = {
    "exact clipping": {"max_grad_norm": 0.5},
    "previous norm": {"max_grad_norm": 0.5, "clip": "previous"},
    "shards": {"shard_state": True},
    "8 bits": {"dense_bits": 8},
    "no overlap": {"overlap": False},
    "coupled decay, another lr": {"inner": {"weight_decay": 0.1}, "between": rates_change},
    "fused": {"inner": {"fused": True}},
    "two passes": {"passes": 2, "backward_passes_per_step": 2},
    "hierarchical": {"hosts": True, "hierarchical": True},
}


@pytest.mark.parametrize(("given", "place"), alternating(OPTIONS, ["host", "files"]))
def test_options_have_the_bits_of_the_host(given: str, place: str, on_devices: Any, tmp_path: Path) -> None:
    options = dict(OPTIONS[given])
    hosts = ["a", "a", "b", "b"] if options.pop("hosts", False) else None
    ranks = 4 if hosts else 2
    options.setdefault("hierarchical", False)
    expected = run_ranks(ranks, lambda s: trained(rank_of(s), **options), hosts=hosts)
    on_devices(range(ranks))
    offload = True if place == "host" else str(tmp_path)
    assert run_ranks(ranks, lambda s: trained(rank_of(s), offload=offload, **options), hosts=hosts) == expected


def test_a_channels_last_parameter_keeps_its_order(on_devices: Any, tmp_path: Path) -> None:
    def body(session: Session, **options: Any) -> tuple[bytes, str]:
        values = torch.from_numpy(np.random.default_rng(1).normal(size=(8, 3, 5, 5)).astype(np.float32))
        parameter = torch.nn.Parameter(values.to(memory_format=torch.channels_last))
        optimizer = wrapped([parameter], **options)
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            random = np.random.default_rng([step, rank_of(session)])
            (parameter * torch.from_numpy(random.normal(size=values.shape).astype(np.float32))).sum().backward()
            optimizer.step()
        assert parameter.is_contiguous(memory_format=torch.channels_last)
        return parameter.detach().contiguous().numpy().tobytes(), whole_state([parameter], optimizer)

    expected = run_ranks(2, body)
    for offload in (True, str(tmp_path)):
        on_devices([0, 1])
        assert run_ranks(2, lambda s, offload=offload: body(s, offload=offload)) == expected


# What the user does between backward and step()


def halves_a_gradient(step: int, rank: int, parameters: list[torch.nn.Parameter], optimizer: Any) -> None:
    grad = parameters[0].grad
    if step in (2, 7) and rank == 1:
        assert grad is not None
        grad.data.mul_(0.5)  # leaves the tensor's version as it is


def replaces_a_gradient(step: int, rank: int, parameters: list[torch.nn.Parameter], optimizer: Any) -> None:
    if step in (3, 8):
        parameters[2].grad = torch.full_like(parameters[2], float(step + rank))


def drops_a_gradient(step: int, rank: int, parameters: list[torch.nn.Parameter], optimizer: Any) -> None:
    if step in (3, 8):
        parameters[2].grad = None


def writes_a_parameter(step: int, rank: int, parameters: list[torch.nn.Parameter], optimizer: Any) -> None:
    if step in (2, 7):
        parameters[1].data[3:9] = float(step)  # the rest of it has digits that must stay


@pytest.mark.parametrize(
    "between", [halves_a_gradient, replaces_a_gradient, drops_a_gradient, writes_a_parameter], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_uses_what_is_there_when_it_is_called(dtype: torch.dtype, between: Between, on_devices: Any) -> None:
    expected = run_ranks(2, lambda s: trained(rank_of(s), dtype=dtype, between=between))
    on_devices([0, 1])
    assert run_ranks(2, lambda s: trained(rank_of(s), dtype=dtype, between=between, offload=True)) == expected


def scaled(rank: int, **options: Any) -> tuple[list[str], list[float]]:
    parameters = parameters_of(torch.float32)
    optimizer = wrapped(parameters, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    history, scales = [], []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for parameter, grad in reversed(list(zip(parameters, gradients(step, rank), strict=True))):
            loss = (parameter * torch.from_numpy(grad)).sum()
            scaler.scale(loss * np.inf if (step, rank) == (6, 1) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append(digest([p.detach().numpy() for p in parameters]))
        scales.append(scaler.get_scale())
    return history, scales


def test_a_loss_scale_is_divided_out_of_what_was_copied(on_devices: Any) -> None:
    expected = run_ranks(2, lambda s: scaled(rank_of(s)))
    assert expected[0][1][-1] == 512.0
    on_devices([0, 1])
    assert run_ranks(2, lambda s: scaled(rank_of(s), offload=True)) == expected


def test_a_nan_on_one_rank_touches_nothing(on_devices: Any) -> None:
    def body(session: Session) -> None:
        parameters = parameters_of(torch.float32)
        optimizer = wrapped(parameters, offload=True)
        for step in range(1, 9):
            optimizer.zero_grad()
            grads = gradients(step, rank_of(session))
            before = whole_state(parameters, optimizer) if step > 1 else ""
            if step in (3, 7) and rank_of(session) == 1:
                grads[0][3, 7] = np.nan
            backward(parameters, grads, range(len(parameters) - 1, -1, -1))
            if step in (3, 7):
                with pytest.raises(NonFiniteError, match=rf"in step {step}, on rank\(s\) \[1\]"):
                    optimizer.step()
                assert whole_state(parameters, optimizer) == before
            else:
                optimizer.step()

    on_devices([0, 1])
    run_ranks(2, body)


# Where the bytes are


def device_nbytes(device: FakeDevice) -> int:
    return sum(block.memory.nbytes for block in device._blocks)


def test_the_device_has_parameters_gradients_and_activations_alone(
    on_devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ocomm has there is a few tables for checksums; the host has the state, and 4 bytes of page-locked memory."""
    # What is allocated is what is used, but for a kilobyte.
    monkeypatch.setattr(of_devices, "_SMALL_NBYTES", 64)
    monkeypatch.setattr(of_devices, "_SLAB_NBYTES", 1024)
    found: dict[bool, list[int]] = {True: [], False: []}
    reports: list[dict[str, int]] = []

    def body(session: Session, offload: bool) -> None:
        def watch(optimizer: Any, step: int) -> None:
            found[offload].append(device_nbytes(devices[0]))
            reports.append(optimizer.compression_report()["memory_bytes"])

        trained(0, watch=watch, offload=offload)

    for offload in (False, True):
        devices = on_devices([0])
        run_ranks(1, lambda s, offload=offload: body(s, offload))
    assert max(found[True]) < NUMEL / 4, "less than a bit of state per parameter"
    assert found[False][-1] > 12 * NUMEL
    last = reports[-1]
    assert last["masters"] == last["page_locked"] == 4 * NUMEL
    assert last["denominator"] >= 4 * NUMEL and last["worker_error"] >= 8 * NUMEL


def test_a_step_copies_one_gradient_down_and_one_value_up(on_devices: Any) -> None:
    devices = on_devices([0])
    moved: list[tuple[int, int]] = []

    def body(session: Session) -> None:
        def watch(optimizer: Any, step: int) -> None:
            log = list(devices[0].log)
            devices[0].log.clear()
            moved.append(
                tuple(sum(int(what) for verb, what, _ in log if verb == way) for way in ("download", "upload"))  # type: ignore[arg-type]
            )

        trained(0, watch=watch, offload=True)

    run_ranks(1, body)
    checks = 16 * 4 * len(SHAPES) + 256  # checksums, and the tables of their pieces
    down, up = moved[-1]  # a step in which all tensors have a gradient
    assert 4 * NUMEL <= down <= 4 * NUMEL + checks and 4 * NUMEL <= up <= 4 * NUMEL + checks


def mapped(folder: Path) -> int:
    """Bytes of this process's memory that are files in ``folder``."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{folder}/" in line]
    spans = [re.match(r"([0-9a-f]+)-([0-9a-f]+)", line) for line in lines]
    return sum(int(span[2], 16) - int(span[1], 16) for span in spans if span)


@pytest.mark.parametrize("device", [False, True])
def test_the_state_is_in_files_that_are_gone_with_it(device: bool, on_devices: Any, tmp_path: Path) -> None:
    nbytes: list[int] = []
    if device:
        on_devices([0])

    def body(session: Session) -> None:
        trained(0, watch=lambda optimizer, step: nbytes.append(mapped(tmp_path)), offload=str(tmp_path))

    run_ranks(1, body)
    masters = 4 if device else 0
    pages = 20 * len(SHAPES) * 4096
    for got, expected in ((nbytes[WARMUP - 2], 8 + 4 + masters), (nbytes[-1], 4 + 8 + 8 + masters)):
        assert 0 <= got - expected * NUMEL < pages, "m, v and averages; denominators and both errors"
    assert os.listdir(tmp_path) == [], "a file has no name, so that nothing stays behind whatever ends the process"


# Saved states


def halves(rank: int, first: dict[str, Any], second: dict[str, Any], at: int) -> list[str]:
    """Trains, saves at step ``at``, and goes on in another optimizer; digests of all parameters, and of the state."""
    parameters = parameters_of(torch.float32)
    optimizer = wrapped(parameters, **first)
    history = []
    for step in range(1, STEPS + 1):
        if step == at + 1:
            buffer = io.BytesIO()
            torch.save([optimizer.state_dict(), optimizer.rank_state_dict()], buffer)
            history.append(whole_state(parameters, optimizer))
            buffer.seek(0)
            own, ranks = torch.load(buffer, weights_only=True)
            optimizer.disconnect()
            parameters = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
            optimizer = wrapped(parameters, **second)
            optimizer.load_state_dict(own)
            optimizer.load_rank_state_dict(ranks)
        optimizer.zero_grad()
        backward(parameters, some_gradients(step, rank), range(len(parameters) - 1, -1, -1))
        optimizer.step()
        history.append(digest([p.detach().numpy() for p in parameters]))
    return history


@pytest.mark.parametrize("at", [2, 7], ids=["warm-up", "compressed"])
def test_saved_states_do_not_know_where_they_were(at: int, on_devices: Any, tmp_path: Path) -> None:
    expected = run_ranks(2, lambda s: halves(rank_of(s), {}, {}, at))
    on_devices([0, 1])
    ways: list[dict[str, Any]] = [{}, {"offload": True}, {"offload": str(tmp_path)}]
    for first, second in [(ways[1], ways[0]), (ways[0], ways[1]), (ways[2], ways[1]), (ways[1], ways[2])]:
        # Torch's Adam is the host's on a fake device, too.
        got = run_ranks(2, lambda s, first=first, second=second: halves(rank_of(s), first, second, at))
        assert got == expected


def test_a_wrapped_adam_that_has_a_state_gives_it_away(on_devices: Any, tmp_path: Path) -> None:
    def body(session: Session, **options: Any) -> list[str]:
        parameters = parameters_of(torch.float32)
        adam = torch.optim.Adam(parameters, lr=1e-2, foreach=False)
        backward(parameters, gradients(1, 0), range(len(parameters)))
        adam.step()
        optimizer = DistributedOneBitAdam(adam, freeze_step=WARMUP, **options)
        history = []
        for step in range(2, STEPS):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank_of(session)), range(len(parameters)))
            optimizer.step()
            history.append(digest([p.detach().numpy() for p in parameters]))
        return history

    expected = run_ranks(2, body)
    on_devices([0, 1])
    for offload in (True, str(tmp_path)):
        assert run_ranks(2, lambda s, offload=offload: body(s, offload=offload)) == expected


@pytest.mark.parametrize("at", [2, 7], ids=["warm-up", "compressed"])
def test_an_offloaded_run_goes_on_in_a_new_job(at: int, on_devices: Any, tmp_path: Path) -> None:
    """As after ``shutdown`` and ``init`` of an elastic job."""

    def new_job(step: int, rank: int, parameters: list[torch.nn.Parameter], optimizer: Any) -> None:
        if step == at:
            optimizer.zero_grad()
            optimizer._runtime = None  # another job's
            optimizer.reconnect()
            backward(parameters, some_gradients(step, rank), range(len(parameters) - 1, -1, -1))

    expected = run_ranks(2, lambda s: trained(rank_of(s), between=new_job))
    on_devices([0, 1])
    for offload in (True, str(tmp_path)):
        got = run_ranks(2, lambda s, offload=offload: trained(rank_of(s), between=new_job, offload=offload))
        assert got == expected


# Folders


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    def body(session: Session) -> None:
        with pytest.raises(InvalidRequestError, match=f"offload='{tmp_path}/none': no file can be made there"):
            wrapped(parameters_of(torch.float32), offload=str(tmp_path / "none"))

    run_ranks(1, body)


def test_a_disk_that_is_too_small_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: usage(1000))

    def body(session: Session) -> None:
        words = rf"offload='{tmp_path}'.* up to {36 * NUMEL} bytes.* 1000 are free"
        with pytest.raises(InvalidRequestError, match=words):
            wrapped(parameters_of(torch.float32), offload=str(tmp_path))

    run_ranks(1, body)


def test_a_disk_that_fills_up_later_is_an_error_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    memory = FileMemory(tmp_path)
    kept = memory.zeros(3)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=f"no 4000 bytes for the optimizer's state: '{tmp_path}'"):
        memory.zeros(1000)
    kept += 1
    assert kept.tolist() == [1.0] * 3 and memory.zeros(0).size == 0


def test_kernels_keep_their_memory_apart(tmp_path: Path) -> None:
    kernels = cpu_kernels()
    other = in_memory(kernels, FileMemory(tmp_path))
    assert other.memory.zeros(10).sum() == 0 and mapped(tmp_path) == 4096
    assert type(kernels.memory) is not type(other.memory)


@pytest.mark.parametrize("offload", [None, 3])
def test_what_is_no_place_is_refused(offload: Any) -> None:
    with pytest.raises(InvalidRequestError, match="offload must be True, False or a folder"):
        run_ranks(1, lambda s: wrapped([torch.nn.Parameter(torch.from_numpy(initial()[0]))], offload=offload))


@pytest.mark.parametrize("options", [{"offload": True}, {"offload": "/tmp"}, {"free_gradients": True}], ids=str)
def test_the_memory_of_dtensors_is_left_to_fully_shard(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=rf"Adam: {next(iter(options))} is for plain parameters"):
        MemoryOptions(**options).check("Adam", Common(), is_on_device=True, has_dtensors=True)
    MemoryOptions(offload=True).check("Adam", Common(), is_on_device=False, has_dtensors=True)
