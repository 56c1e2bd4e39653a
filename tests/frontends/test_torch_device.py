"""Compressed optimizers whose parameters are on a device: what they do in the host's memory, bit for bit.

The device is a fake (see ``tests.fake_device``): its memory is out of reach, and nothing is done before it is asked
for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ocomm
from ocomm import nccl_opening
from ocomm import session as sessions
from ocomm.collectives import pipeline
from ocomm.errors import HorovodInternalError, InvalidRequestError, MismatchError, NonFiniteError, StallError
from ocomm.kernels.base import SUMMED, pieces_of
from ocomm.kernels.device import DeviceMemory, device_kernels
from ocomm.operations import ProcessSet
from ocomm.optim import flows
from ocomm.session import Session
from ocomm.telemetry.timeline import path_of, read
from ocomm.transport import nccl
from ocomm.types import Settings
from ocomm_torch import mpi_ops
from ocomm_torch.memory.placement import CudaPlacement, placement
from ocomm_torch.optimizers import compressed
from tests.fake_device import FakeDevice
from tests.fake_nccl import FakeNccl
from tests.frontends.every_kind import KINDS, whole_state
from tests.frontends.fake_placement import FakePlacement
from tests.frontends.onebit_jobs import SHAPES, backward, digest, gradients, initial
from tests.tiers import few
from tests.worlds import MPI_SIZE, run_ranks

ON_DEVICES = [kind for kind in KINDS if "LAMB" not in kind]
Devices = dict[int, FakeDevice]


def rank_of(session: Session) -> int:
    assert session.topology is not None
    return session.topology.rank


@pytest.fixture
def on_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Devices]:
    """Says which ranks' tensors are on a device from now on, to which of them the network reaches, what NCCL there is,
    and who is without; the devices, by rank."""

    def choose(
        ranks: Sequence[int],
        reached: Sequence[int] = (),
        library: FakeNccl | None = None,
        without: Sequence[int] = (),
    ) -> Devices:
        def load() -> FakeNccl:
            if library is None or rank_of(sessions.current()) in without:
                raise HorovodInternalError("no NCCL")
            return library

        monkeypatch.setattr(nccl, "load", load)
        devices = {rank: FakeDevice(f"fake:{rank}", reached=rank in reached) for rank in ranks}

        def place(names: Any, parameters: Any, session: Session) -> Any:
            device = devices.get(rank_of(session))
            return placement(names, parameters, session) if device is None else FakePlacement(device)

        monkeypatch.setattr(compressed, "placement", place)
        return devices

    return choose


def some_gradients(step: int, rank: int) -> list[np.ndarray | None]:
    """One tensor has none on rank 1 in every third step, one has none anywhere in every fourth."""
    found = gradients(step, rank)
    if step % 3 == 0 and rank == 1:
        found[0] = None
    if step % 4 == 0:
        found[1] = None
    return found


def late_gradients(step: int, rank: int) -> list[np.ndarray | None]:
    """Some elements have none until step 6."""
    found = gradients(step, rank)
    for grad in found[:2] if step < 6 else ():
        assert grad is not None
        grad.reshape(-1)[7:300] = 0
    return found


def parameters_of(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.from_numpy(array.copy()).to(dtype)) for array in initial()]


def trained(
    kind: str,
    rank: int,
    steps: int,
    dtype: torch.dtype = torch.float32,
    watch: Callable[[Any, int], None] = lambda optimizer, step: None,
    grads: Callable[[int, int], list[np.ndarray | None]] = some_gradients,
    **options: Any,
) -> tuple[list[str], str]:
    """The parameters after every step, and in the end all that a step may change; as hashes."""
    parameters = parameters_of(dtype)
    optimizer = KINDS[kind].wrap(parameters, **options)
    history = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        backward(parameters, grads(step, rank), range(len(parameters) - 1, -1, -1))
        optimizer.step()
        watch(optimizer, step)
        history.append(digest([p.detach().float().numpy() for p in parameters]))
    return history, whole_state(parameters, optimizer)


def test_norms_of_16_bit_gradients_are_not_read_as_float32(on_devices: Callable[..., Devices]) -> None:
    """They would be read past their end, to say what was changed in a step that is exchanged again."""
    devices = on_devices([0, 1])

    def body(session: Session) -> int:
        parameters = parameters_of(torch.bfloat16)
        optimizer = KINDS["1-bit Adam, dense"].wrap(parameters)
        for step in (1, 2):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank_of(session)), range(len(parameters)))
            for parameter in parameters:
                parameter.grad.mul_(0.5)
            optimizer.step()
        return optimizer.compression_report()["redone_steps"]

    assert run_ranks(2, body) == [1, 1]
    launched = {what for device in devices.values() for verb, what, _ in device.log if verb == "launch"}
    assert "sum_words" in launched and "sum_squares" not in launched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_finish_of_zero_one_adam_has_the_bits_of_the_host_on_devices(
    on_devices: Callable[..., Devices], dtype: torch.dtype
) -> None:
    finishes = (5, 8, 11, 12, 17)

    def body(session: Session) -> tuple[list[str], str]:
        def finish(optimizer: Any, step: int) -> None:
            if step in finishes:
                optimizer.finish()

        return trained("0/1 Adam, local steps", rank_of(session), 20, dtype, watch=finish)

    expected = run_ranks(3, body)
    assert all(len({history[step - 1] for history, _ in expected}) == 1 for step in finishes)
    assert any(len(set(now)) > 1 for now in zip(*(history for history, _ in expected), strict=True))
    on_devices(range(3))
    assert run_ranks(3, body) == expected


WITH_MASTERS = ("1-bit Adam, compressed", "0/1 Adam, local steps")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    few(
        [(kind, torch.float32) for kind in ON_DEVICES]
        + [(kind, torch.bfloat16) for kind in (*WITH_MASTERS, "1-bit Adam, dense", "SoftSignSGD")]
        + [(kind, torch.float16) for kind in ("1-bit Adam, compressed", "Birder", "Lion")],
        lambda kind, dtype: dtype == torch.float32 or kind == "1-bit Adam, compressed",
    ),
    ids=str,
)
def test_ranks_with_and_without_a_device_train_what_ranks_without_do(
    kind: str, dtype: torch.dtype, on_devices: Any
) -> None:
    expected = run_ranks(3, lambda s: trained(kind, rank_of(s), 8, dtype))
    devices, widened = on_devices([0, 2]), {}

    def body(session: Session) -> Any:
        def watch(optimizer: Any, step: int) -> None:
            widened[rank_of(session)] = optimizer.compression_report()["memory_bytes"]["widened_gradients"]

        return trained(kind, rank_of(session), 8, dtype, watch)

    assert run_ranks(3, body) == expected
    if not MPI_SIZE:
        assert [widened[rank] > 0 for rank in range(3)] == [False, dtype is not torch.float32, False]
    if not MPI_SIZE:
        assert all(device.counts["launch"] for device in devices.values())


@pytest.mark.parametrize(
    ("hosts", "engine", "reached"),
    [("abc", "native", False), ("abc", "python", True), ("aabb", "python", False), ("aabb", "native", True)],
)
@pytest.mark.parametrize("kind", ["1-bit Adam, dense", "SoftSignSGD"])
def test_dense_segments_that_share_lanes_and_travel_in_pieces_have_the_bits_of_the_host(
    kind: str, hosts: str, engine: str, reached: bool, on_devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows, "LANES_NBYTES", 0)
    monkeypatch.setattr(pipeline, "LARGEST_MESSAGE_NBYTES", 96)
    monkeypatch.setattr(pipeline, "SMALLEST_NBYTES", 64)
    monkeypatch.setattr(pipeline, "SMALLEST_SHARE_NBYTES", 64)
    ranks, settings = len(hosts), Settings(engine=engine, segment_nbytes=1024)
    expected = run_ranks(ranks, lambda s: trained(kind, rank_of(s), 4, block_size=256), settings, hosts=hosts)
    on_devices(range(ranks), range(ranks) if reached else [], FakeNccl())

    def body(session: Session) -> Any:
        seen = []

        def watch(optimizer: Any, step: int) -> None:
            dense = optimizer._driver.stepper.flows.dense
            if dense is not None and dense.prepared is not None:
                seen.append((len(dense.segments), dense._lanes.count, dense.message_nbytes))

        run = trained(kind, rank_of(session), 4, watch=watch, block_size=256)
        assert any(segments > lanes == 4 and nbytes == 96 for segments, lanes, nbytes in seen)
        return run

    assert run_ranks(ranks, body, settings, hosts=hosts) == expected


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize(
    "kind", ["1-bit Adam, dense", "SoftSignSGD", "1-bit Adam, compressed", "Birder", "Lion", "EF-SGD"]
)
def test_a_step_of_one_rank_has_the_bits_of_the_host_and_copies_flags_alone(
    kind: str, engine: str, on_devices: Any
) -> None:
    settings = Settings(engine=engine)
    expected = run_ranks(1, lambda s: trained(kind, rank_of(s), 7), settings)
    devices = on_devices([0])
    seen: list[int] = []

    def watch(optimizer: Any, step: int) -> None:
        seen.append(len(devices[0].log))

    assert run_ranks(1, lambda s: trained(kind, rank_of(s), 7, watch=watch), settings) == expected
    copies = [nbytes for verb, nbytes, _ in devices[0].log[seen[-3] : seen[-1]] if verb == "download"]
    assert copies and set(copies) == {"4"}


@pytest.mark.parametrize("kind", ["1-bit Adam, dense", "1-bit Adam, compressed", "EF-SGD"])
@pytest.mark.parametrize("value", [np.nan, 3e38])
def test_one_rank_discards_what_is_not_finite_on_a_device_as_on_the_host(
    kind: str, value: float, on_devices: Any
) -> None:
    def grads(step: int, rank: int) -> list[np.ndarray | None]:
        found = gradients(step, rank)
        for grad in found if step == 6 else ():
            assert grad is not None
            grad.reshape(-1)[:] = value
        return found

    def body(session: Session) -> Any:
        try:
            return trained(kind, 0, 8, grads=grads)
        except NonFiniteError as error:
            return str(error)

    expected = run_ranks(1, body)
    on_devices([0])
    assert run_ranks(1, body) == expected


def test_the_dense_step_that_all_frameworks_share_is_made_by_the_host(on_devices: Any) -> None:
    def body(session: Session) -> Any:
        def watch(optimizer: Any, step: int) -> None:
            optimizer._driver.is_mixed = True  # as if another rank were of Keras

        return trained("1-bit Adam, compressed", rank_of(session), 5, watch=watch)

    expected = run_ranks(2, body)
    on_devices([0, 1])
    assert run_ranks(2, body) == expected


@pytest.mark.parametrize("kind", WITH_MASTERS)
def test_masked_elements_wake_on_devices_too(kind: str, on_devices: Any) -> None:
    def body(session: Session) -> Any:
        woken: list[int] = []

        def watch(optimizer: Any, step: int) -> None:
            woken.append(optimizer._driver.core.preconditioner.woken)

        run = trained(kind, rank_of(session), 12, watch=watch, grads=late_gradients, mask_refresh=2)
        return woken, run

    expected = run_ranks(2, body)
    assert expected[0][0][-1] > 0
    on_devices([1])
    assert run_ranks(2, body) == expected


def test_steps_without_a_vote_are_made_on_devices_too(on_devices: Any) -> None:
    """Steps 5, 9, 13 and 17 are syncs. One tensor has its first gradient between two of them, on one rank."""
    options = {"vote": "sync", "local_step_start": 2, "local_step_doubling": 2, "local_step_clip": 4}

    def late(step: int, rank: int) -> list[np.ndarray | None]:
        found = gradients(step, rank)
        if step < 10 and (step, rank) != (7, 1):
            found[2] = None
        return found

    def body(session: Session) -> Any:
        return trained("0/1 Adam", rank_of(session), 17, grads=late, **options)

    expected = run_ranks(2, body)
    assert expected[0][0][-1] == expected[1][0][-1] and expected[0][0][-2] != expected[1][0][-2]
    for places in ([1], [0, 1]):
        on_devices(places)
        assert run_ranks(2, body) == expected


@pytest.mark.parametrize("engine", ["python", "native"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_on_devices(ranks: int, engine: str, on_devices: Any) -> None:
    if MPI_SIZE and engine == "python":
        pytest.skip(reason="the Python engine is made for ranks in one process")
    settings = Settings(engine=engine, segment_nbytes=65536)
    expected = run_ranks(ranks, lambda s: trained("1-bit Adam, compressed", rank_of(s), 7), settings)
    on_devices(range(ranks))
    assert run_ranks(ranks, lambda s: trained("1-bit Adam, compressed", rank_of(s), 7), settings) == expected


@pytest.mark.parametrize(
    "kind", few(["1-bit Adam, compressed", "0/1 Adam, local steps", "Birder"], ["0/1 Adam, local steps"])
)
def test_messages_from_device_to_device_train_the_same_where_all_ranks_agree_on_them(
    kind: str, on_devices: Any
) -> None:
    direct: list[bool] = []

    def body(session: Session) -> Any:
        return trained(kind, rank_of(session), 8, watch=lambda optimizer, step: direct.append(optimizer._driver.direct))

    expected = run_ranks(2, body)
    for ranks, reached, agreed in (([0, 1], [0, 1], True), ([1], [1], True), ([0, 1], [1], False)):
        direct.clear()
        devices = on_devices(ranks, reached)
        assert run_ranks(2, body) == expected
        assert set(direct) == {agreed}
        for device in [device for device in devices.values() if device.log]:  # under mpirun: this rank's
            assert device.entered == ({"ocomm"} if agreed else set())


@pytest.mark.parametrize(("setting", "ranks", "reached"), [("1", 2, True), ("0", 2, False), ("1", 1, False)])
def test_mpi_is_given_addresses_on_a_device_as_the_setting_says_if_there_is_anybody_else(
    setting: str, ranks: int, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")
    monkeypatch.setattr("ocomm.kernels.cuda_device.CudaDevice", lambda number: FakeDevice(f"fake:{number}"))

    def body(session: Session) -> bool:
        memory = session.device_kernels(0).memory
        assert isinstance(memory, DeviceMemory)
        return memory.reached_by_network

    assert run_ranks(ranks, body, Settings(cuda_aware=setting)) == [reached] * ranks


@pytest.mark.short("0/1 Adam")
@pytest.mark.parametrize("kind", ["1-bit Adam, compressed", "0/1 Adam, local steps", "Lion"])
def test_nodes_add_up_from_device_to_device_what_they_do_in_the_hosts_memory(kind: str, on_devices: Any) -> None:
    def body(session: Session) -> Any:
        def watch(optimizer: Any, step: int) -> None:
            assert optimizer.compression_report()["form"] == "hierarchical"

        return trained(kind, rank_of(session), 8, torch.bfloat16 if kind == "Lion" else torch.float32, watch)

    expected = run_ranks(4, body, hosts=["a", "a", "b", "b"])
    on_devices([0, 1, 3], [0, 1, 3])
    assert run_ranks(4, body, hosts=["a", "a", "b", "b"]) == expected


ON_TWO_HOSTS = ["a", "a", "b", "b"]


@pytest.mark.short("aaabb", "Birder")
@pytest.mark.parametrize(
    ("kind", "hosts", "reached", "peers"),
    [
        pytest.param("1-bit Adam, compressed", "aabb", False, 63, marks=pytest.mark.long),
        ("0/1 Adam, local steps", "aabb", False, 63),
        ("Birder", "aabb", True, 63),
        pytest.param("0/1 Adam, local steps", "aabb", True, 63, marks=pytest.mark.long),
        ("1-bit Adam, compressed", "aaabb", False, 63),  # one rank has no slice
        pytest.param("1-bit Adam, dense", "aaab", False, 63, marks=pytest.mark.long),  # one is alone on its host
        ("1-bit Adam, compressed", "aabbcc", False, 1),  # in two hops
    ],
)
def test_nodes_add_up_over_nccl_what_they_do_in_the_hosts_memory(
    kind: str, hosts: str, reached: bool, peers: int, on_devices: Any
) -> None:
    """In segments that overtake each other."""

    def body(session: Session) -> Any:
        reports = []

        def watch(optimizer: Any, step: int) -> None:
            reports.append(optimizer.compression_report())
            found = reports[-1]["form"], reports[-1]["inside"], optimizer._driver.direct
            assert found == ("hierarchical", inside, direct)

        run = trained(kind, rank_of(session), 7, watch=watch, hierarchical=True)
        return run, reports[-1]["bytes_sent_inside"]

    inside, direct = "MPI", False
    settings = Settings(segment_nbytes=512, direct_peers=peers)
    expected = run_ranks(len(hosts), body, settings, hosts=hosts)
    inside, direct = "NCCL", reached
    library = FakeNccl()
    on_devices(range(len(hosts)), range(len(hosts)) if reached else [], library)
    got = run_ranks(len(hosts), body, settings, hosts=hosts)
    assert [run for run, _ in got] == [run for run, _ in expected]
    for host, (_, before), (_, now) in zip(hosts, expected, got, strict=True):
        # As many bytes, and a word of 8 to say that one is ready, or what the number is.
        assert (now - before) % 8 == 0 and (now > before) == (hosts.count(host) > 1)
    assert all(c.calls > 10 and c.aborted for c in library.communicators)
    assert MPI_SIZE or len(library.communicators) == sum(hosts.count(host) > 1 for host in hosts)


@pytest.mark.parametrize("engine", ["native", "python"])
def test_what_nccl_sends_is_counted_by_engine_timeline_and_report(engine: str, on_devices: Any, tmp_path: Path) -> None:
    library = FakeNccl()
    on_devices(range(3), [], library)

    def body(session: Session) -> None:
        assert session.engine is not None
        rank, reports = rank_of(session), []
        path = str(tmp_path / "trace.json")
        ocomm.start_timeline(path)

        def watch(optimizer: Any, step: int) -> None:
            reports.append(optimizer.compression_report())

        trained("1-bit Adam, compressed", rank, 7, watch=watch, hierarchical=True)
        ocomm.barrier()  # a plan is counted by the background thread, a moment after its end
        ocomm.stop_timeline()
        counted = session.engine.counters()["bytes_bridged"]
        spans = [e["args"] for e in read(path_of(path, rank)) if e.get("name") == "NCCL_EXCHANGE"]
        sent, received = (sum(span[name] for span in spans) for name in ("bytes_sent", "bytes_received"))
        assert counted == sent and (counted > 0) == (rank < 2)
        assert rank == 2 or counted < reports[-1]["bytes_sent_inside"]
        if session.bridge is not None and not MPI_SIZE:
            moved = [c.moved for c in library.communicators if c.rank == session.bridge.position]
            assert moved == [[nccl_opening._TRIAL_NBYTES + sent, nccl_opening._TRIAL_NBYTES + received]]

    run_ranks(3, body, Settings(engine=engine), hosts=["a", "a", "b"])


def test_dense_values_inside_a_host_are_neither_copied_over_the_bus_nor_kept_by_the_host(on_devices: Any) -> None:
    shape = (40, 1000)
    devices = on_devices(range(4), [], FakeNccl())

    def copied(device: FakeDevice) -> int:
        return sum(int(what) for verb, what, _ in device.log if verb in ("upload", "download"))

    def body(session: Session) -> list[int]:
        parameter = torch.nn.Parameter(torch.ones(shape))
        optimizer = KINDS["1-bit Adam, compressed"].wrap([parameter])
        seen = [copied(devices[rank_of(session)])]
        for step in range(1, 9):
            optimizer.zero_grad()
            parameter.backward(torch.full(shape, float(step + rank_of(session))))
            optimizer.step()
            seen.append(copied(devices[rank_of(session)]))
        for staging in optimizer._driver.stepper.flows.compressed.staging:
            payloads = [m[staging.layout.header_nbytes :] for m in (*staging.node.messages, *staging.node.rows)]
            assert payloads[0].size and not any(payload.any() for payload in payloads), "the host has touched them"
        return seen

    nbytes = 4 * 40 * 1000
    for seen in run_ranks(4, body, hosts=ON_TWO_HOSTS):
        # The sum of this rank's slice and the averages of a half of it; and what came in of both.
        assert nbytes < seen[2] - seen[1] < 1.8 * nbytes
        assert seen[-1] - seen[-2] < nbytes / 8


def test_optimizers_of_the_same_ranks_share_a_communicator_and_take_turns(on_devices: Any) -> None:
    def body(session: Session) -> list[str]:
        models = [parameters_of(torch.float32) for _ in range(2)]
        optimizers = [KINDS[kind].wrap(p) for kind, p in zip(("Birder", "Lion"), models, strict=True)]
        for step in range(1, 6):
            for parameters, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                backward(parameters, some_gradients(step, rank_of(session)), range(len(parameters)))
            for optimizer in optimizers:
                optimizer.step()
        return [whole_state(p, o) for p, o in zip(models, optimizers, strict=True)]

    expected = run_ranks(4, body, hosts=ON_TWO_HOSTS)
    library = FakeNccl()
    on_devices(range(4), [], library)
    assert run_ranks(4, body, hosts=ON_TWO_HOSTS) == expected
    assert len(library.communicators) == (1 if MPI_SIZE else 4)


@pytest.mark.parametrize("how", ["sticks", "fails"])
def test_a_transfer_that_fails_is_aborted_and_the_next_optimizer_has_another_communicator(
    how: str, on_devices: Any
) -> None:
    def body(session: Session) -> Any:
        rank = rank_of(session)
        if how:

            def watch(optimizer: Any, step: int) -> None:
                assert session.bridge is not None
                if step == 2 and how == "sticks":
                    session.bridge.timeout_s = 0.5
                if step == 2 and how == "fails":
                    session.bridge._communicator.words = "remote process exited"  # type: ignore[attr-defined]

            with pytest.raises(HorovodInternalError) as caught:
                trained("Lion", rank, 4, watch=watch)
            told.append(str(caught.value))
            broken = session.bridge
        run = trained("Lion", rank, 4)
        assert not how or (broken is not None and broken.ended and session.bridge is not broken)
        return run

    told: list[str] = []
    said, how = how, ""
    expected = run_ranks(4, body, hosts=ON_TWO_HOSTS)
    how = said
    library = FakeNccl(sticks_at=3 if how == "sticks" else 1 << 60)
    on_devices(range(4), [], library)
    assert run_ranks(4, body, hosts=ON_TWO_HOSTS) == expected
    assert told and all("step 3: the device failed: NCCL " in words for words in told)
    assert all(("is not over after 0 s" if how == "sticks" else "remote process exited") in words for words in told)
    assert all(communicator.aborted for communicator in library.communicators)


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("no library", r"rank 3: no NCCL"),
        ("one GPU", "ranks 2 and 3 share a GPU"),
        ("garbled", "arrived as something else"),
        ("0", "rank 0: OCOMM_NCCL=0"),
        ("a host", "hierarchical='auto' is off"),
    ],
)
def test_where_nccl_is_not_between_all_no_rank_uses_it(
    why: str, words: str, on_devices: Any, caplog: pytest.LogCaptureFixture
) -> None:
    library = FakeNccl(garbles=why == "garbled")
    devices = on_devices(range(3 if why == "a host" else 4), [], library, [3] if why == "no library" else [])
    if why == "one GPU":
        devices[3].identity = devices[2].identity

    def body(session: Session) -> str:
        optimizer = KINDS["Birder"].wrap(parameters_of(torch.float32))
        with pytest.raises(InvalidRequestError, match="hierarchical=True, but"):
            KINDS["Birder"].wrap(parameters_of(torch.float32), hierarchical=True)
        return optimizer.compression_report()["form"]

    settings = Settings(nccl="0" if why == "0" else "auto")
    assert run_ranks(4, body, settings, hosts=ON_TWO_HOSTS) == ["flat"] * 4
    assert all(communicator.aborted for communicator in library.communicators)
    if not MPI_SIZE or caplog.text:
        assert words in caplog.text


def test_ranks_of_another_set_get_no_second_communicator_in_a_process(on_devices: Any) -> None:
    def body(session: Session) -> None:
        KINDS["Birder"].wrap(parameters_of(torch.float32), hierarchical=True)
        if rank_of(session) != 2:
            with pytest.raises(InvalidRequestError, match=r"rank 0: its process has one between ranks \[0, 1, 2\]"):
                KINDS["Birder"].wrap(parameters_of(torch.float32), hierarchical=True, process_set=ProcessSet([0, 1, 3]))
        assert (session.bridge is None) == (rank_of(session) == 3)
        assert session.bridge is None or not session.bridge.ended

    on_devices(range(4), [], FakeNccl())
    run_ranks(4, body, process_sets=[[0, 1, 3]], hosts="aaab")


def test_who_insists_on_nccl_is_refused_without_and_forms_that_differ_are_named(on_devices: Any) -> None:
    def insists(session: Session) -> None:
        with pytest.raises(InvalidRequestError, match=r"OCOMM_NCCL=1, but .*\(rank 0: no NCCL\)"):
            KINDS["Birder"].wrap(parameters_of(torch.float32))

    def differs(session: Session) -> None:
        with pytest.raises(MismatchError, match="hierarchical"):
            KINDS["Birder"].wrap(parameters_of(torch.float32), hierarchical=rank_of(session) > 0 or "auto")

    on_devices(range(4), range(4))
    run_ranks(4, insists, Settings(nccl="1"), hosts=ON_TWO_HOSTS)
    run_ranks(4, differs, hosts=ON_TWO_HOSTS)


COMPRESSED = ("1-bit Adam, compressed", "Birder", "Lion")


@pytest.mark.parametrize("reached", [[], [0, 1]], ids=["staged", "direct"])
@pytest.mark.parametrize("kind", COMPRESSED)
def test_a_compressed_step_never_waits_for_the_device_and_has_three_launches_a_segment(
    kind: str, reached: list[int], on_devices: Any
) -> None:
    """But the one step in 64 that compares parameters."""
    devices = on_devices([0, 1], reached)

    def body(session: Session) -> list[tuple[int, int, int, int]]:
        rank, seen = rank_of(session), []

        def watch(optimizer: Any, step: int) -> None:
            core, counts = optimizer._driver.core, devices[rank].counts
            seen.append((counts["launch"], counts["download"], core.param_memory.waits, len(core.segments)))

        trained(kind, rank, 9, watch=watch)
        return seen

    # Two flags; and the bits that leave and the averages of this rank, or all averages if the host looks at scales.
    downloads = 4 if not reached else 3 if "Adam" in kind else 2
    for seen in run_ranks(2, body):
        launches, downloaded, waits, _ = (after - before for before, after in zip(seen[4], seen[-1], strict=True))
        segments = seen[-1][-1] * (len(seen) - 5)
        assert waits == 0
        assert launches <= 3 * segments
        assert downloaded == downloads * segments


def test_an_automatic_freeze_is_that_of_the_host_and_a_step_that_observes_waits_once(on_devices: Any) -> None:
    def body(session: Session) -> tuple[list[tuple[int, int, int]], int, tuple[list[str], str]]:
        rank, seen, frozen = rank_of(session), [], 0

        def watch(optimizer: Any, step: int) -> None:
            nonlocal frozen
            frozen = optimizer.compression_report()["freeze_step"]
            if rank in devices:
                log = devices[rank].log
                sums = sum(what == "sum_floats" for verb, what, _ in log if verb == "launch")
                downloaded = sum(int(what) for verb, what, _ in log if verb == "download")
                seen.append((optimizer._driver.core.param_memory.waits, sums, downloaded))

        def grads(step: int, rank: int) -> list[np.ndarray | None]:
            return gradients(step % 3, rank)

        options = {"freeze_step": "auto", "inner": {"betas": (0.9, 0.9)}}
        result = trained("1-bit Adam, dense", rank, 30, watch=watch, grads=grads, **options)
        return seen, frozen, result

    devices: Devices = {}
    expected = run_ranks(2, body)
    assert all(20 < frozen < 30 for _, frozen, _ in expected)
    devices |= on_devices([0, 1])
    for (seen, *found), (_, *of_host) in zip(run_ranks(2, body), expected, strict=True):
        assert found == of_host
        steps = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(seen)]
        alone, observing = steps[4:9], steps[9 : found[0] - 2]  # of steps 6 to 10, and from step 11 on
        assert {step[:2] for step in alone} == {(0, 0)}
        assert {(waits <= 1, sums) for waits, sums, _ in observing} == {(True, 1)}  # the device may be faster
        assert {nbytes - alone[0][2] for _, _, nbytes in observing} == {4 * len(SHAPES)}


@pytest.mark.parametrize("layers, width", [(12, 768), (24, 2048)], ids=["GPT-2 small", "1.3 G"])
def test_sums_of_a_large_model_are_few_bytes(layers: int, width: int) -> None:
    block = [width, width, 3 * width * width, 3 * width, width * width, width]
    block += [width, width, 4 * width * width, 4 * width, 4 * width * width, width]
    numels = np.array([50257 * width, 1024 * width, *layers * block, width, width])
    pieces, _ = pieces_of(np.arange(1, 1 + numels.size, dtype=np.uint64), numels, np.zeros_like(numels), SUMMED)
    assert pieces["count"].sum() == numels.sum() > 124e6
    assert 4 * pieces.size <= 65536


@pytest.mark.parametrize("kind", ["1-bit Adam, dense", "SoftSignSGD"])
def test_a_dense_step_never_waits_for_the_device(kind: str, on_devices: Any) -> None:
    on_devices([0, 1])

    def body(session: Session) -> list[int]:
        seen: list[int] = []
        trained(kind, rank_of(session), 6, watch=lambda optimizer, _: seen.append(optimizer.kernels.memory.waits))
        return seen

    for seen in run_ranks(2, body):
        assert len(set(seen[2:])) == 1, seen


@pytest.mark.parametrize("kind", ["1-bit Adam, compressed", "0/1 Adam, local steps", "SoftSignSGD", "Lion"])
def test_parameters_are_written_behind_what_torch_was_given_to_do_before_the_step(kind: str, on_devices: Any) -> None:
    """A forward pass between backward and step, say, when all buckets are on their way already."""
    devices = on_devices([0, 1])
    writes = {"apply", "apply_signs", "descend", "local_step", "apply_update"}

    def body(session: Session) -> list[int]:
        log = devices[rank_of(session)].log
        parameters = parameters_of(torch.float32)
        optimizer = KINDS[kind].wrap(parameters)
        written = []
        for step in range(1, 9):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank_of(session)), range(len(parameters) - 1, -1, -1))
            first = len(log)
            optimizer.step()
            queued = [verb if verb == "follow" else what for verb, what, _ in log[first:]]
            found = [at for at, what in enumerate(queued) if what in writes]
            assert not found or "follow" in queued[: found[0]]
            written.append(len(found))
        return written

    for written in run_ranks(2, body):
        assert written[-1] > 0


@pytest.mark.parametrize("unscale", [False, True], ids=["step unscales", "unscale_ before"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("kind", few(["1-bit Adam, compressed", "1-bit Adam, dense", "Lion"], ["1-bit Adam, dense"]))
def test_a_loss_scale_is_divided_out_of_what_is_exchanged(
    kind: str, on_device: bool, unscale: bool, on_devices: Any
) -> None:
    """Torch leaves the version of what it unscales as it was, and on a device that is all that tells a change."""

    def body(session: Session, scale: float) -> str:
        parameters = parameters_of(torch.float32)
        optimizer = KINDS[kind].wrap(parameters, verify="version")
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
        for step in range(1, 7):
            optimizer.zero_grad()
            for parameter, grad in zip(parameters, gradients(step, rank_of(session)), strict=True):
                assert grad is not None
                scaler.scale((parameter * torch.from_numpy(grad)).sum()).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return digest([p.detach().numpy() for p in parameters])

    expected = run_ranks(2, lambda s: body(s, 1.0))
    if on_device:
        on_devices([0, 1])
    assert run_ranks(2, lambda s: body(s, 1024.0)) == expected


@pytest.mark.parametrize("kind", ["1-bit Adam, compressed", "Lion"])
def test_gradients_of_a_captured_backward_are_left_to_the_step(
    kind: str, on_devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_ranks(2, lambda s: trained(kind, rank_of(s), 6))
    on_devices([0, 1])
    # What a replay leaves behind, to which no hook was called: the same gradients.
    monkeypatch.setattr(FakePlacement, "is_captured", True)
    handed_over: list[int] = []
    monkeypatch.setattr(compressed, "_on_gradient", lambda _, index, __: handed_over.append(index))
    assert run_ranks(2, lambda s: trained(kind, rank_of(s), 6)) == expected
    assert not handed_over


def test_nothing_is_exchanged_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    place = CudaPlacement(device_kernels(FakeDevice()), torch.device("cuda:0"))
    assert place.is_captured
    for call in (place.arrive, lambda: mpi_ops._Copies(set())):
        with pytest.raises(InvalidRequestError, match="nothing in a CUDA graph"):
            call()


def test_gradients_are_read_behind_the_streams_of_all_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a CPU build cannot say
    device, current = FakeDevice(), iter([7, 8, 7, 9, 9])
    monkeypatch.setattr(CudaPlacement, "_stream", property(lambda _: next(current)))
    place = CudaPlacement(device_kernels(device), torch.device("cuda:0"))
    for _ in range(3):
        place.note()
    place.arrive()
    assert {what for verb, what, _ in device.log if verb == "follow"} == {"7", "8", "9"}
    place.arrive()
    assert [what for verb, what, _ in device.log if verb == "follow"][3:] == ["9"]


@pytest.mark.parametrize("kind", ["1-bit Adam, compressed", "0/1 Adam, local steps", "Birder"])
def test_a_run_goes_on_from_a_device_in_the_hosts_memory_and_back(kind: str, on_devices: Any) -> None:
    def halves(session: Session, between: Callable[[], Any]) -> Any:
        rank = rank_of(session)
        parameters = parameters_of(torch.float32)
        optimizer = KINDS[kind].wrap(parameters)
        for step in range(1, 11):
            optimizer.zero_grad()
            backward(parameters, some_gradients(step, rank), range(len(parameters)))
            optimizer.step()
            if step == 6:
                saved, own = optimizer.state_dict(), optimizer.rank_state_dict()
                session.agree(0, "saved", "saved")
                between()
                session.agree(0, "chosen", "chosen")
                parameters = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
                optimizer = KINDS[kind].wrap(parameters)
                optimizer.load_state_dict(saved)
                optimizer.load_rank_state_dict(own)
        return whole_state(parameters, optimizer)

    expected = run_ranks(2, lambda s: halves(s, lambda: None))
    on_devices([0, 1])
    assert run_ranks(2, lambda s: halves(s, lambda: on_devices([]))) == expected
    assert run_ranks(2, lambda s: halves(s, lambda: on_devices([0, 1]))) == expected


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("1-bit Adam, compressed", torch.float32, {}),
        ("1-bit Adam, compressed", torch.float32, {"max_grad_norm": 0.1}),
        ("0/1 Adam", torch.float32, {}),
        ("Lion", torch.bfloat16, {}),
    ],
    ids=str,
)
def test_no_memory_is_made_in_a_step(kind: str, dtype: torch.dtype, options: dict[str, Any], on_devices: Any) -> None:
    devices = on_devices([0, 1])

    def body(session: Session) -> list[int]:
        rank = rank_of(session)
        seen: list[int] = []

        def watch(optimizer: Any, step: int) -> None:
            seen.append(devices[rank].allocations)

        trained(kind, rank, 9, dtype, watch, gradients, **options)
        return seen

    for seen in run_ranks(2, body):
        assert len(set(seen[6:])) == 1, seen


def test_gradients_are_clipped_by_one_norm_on_all_ranks(on_devices: Any) -> None:
    on_devices([0])
    # The norm is added up in another order on a device: what it is differs in the last bits, for all ranks alike.
    histories = run_ranks(2, lambda s: trained("1-bit Adam, compressed", rank_of(s), 7, max_grad_norm=0.1)[0])
    assert histories[0] == histories[1]


@pytest.mark.parametrize("kind", ["1-bit Adam, dense", "Birder", "1-bit Adam, compressed", "0/1 Adam, local steps"])
def test_what_is_not_finite_is_told_on_all_ranks_and_changes_nothing(kind: str, on_devices: Any) -> None:
    on_devices([1])

    def body(session: Session) -> None:
        rank = rank_of(session)
        parameters = parameters_of(torch.float32)
        optimizer = KINDS[kind].wrap(parameters)
        for step in range(1, 7):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank), range(len(parameters)))
            if step < 6:
                optimizer.step()
        before = [p.detach().clone() for p in parameters]
        if rank == 1:
            grad = parameters[2].grad
            assert grad is not None
            grad[5] = float("inf")
        # Of a dense average it is not known whose part was not finite.
        with pytest.raises(NonFiniteError, match=r"on rank\(s\) \[1\]"):
            optimizer.step()
        assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))

    run_ranks(2, body)


def test_a_device_that_fails_ends_the_step_with_its_words(on_devices: Any) -> None:
    devices = on_devices([0])

    def body(session: Session) -> None:
        def watch(optimizer: Any, step: int) -> None:
            devices[0].fails = step == 5

        trained("1-bit Adam, compressed", 0, 6, watch=watch)

    with pytest.raises((HorovodInternalError, RuntimeError), match="fallen off the bus"):
        run_ranks(1, body)


def test_a_device_that_never_gets_done_ends_the_step_and_is_named(on_devices: Any) -> None:
    devices = on_devices([0])

    def body(session: Session) -> None:
        def watch(optimizer: Any, step: int) -> None:
            if step == 5:
                devices[0].advance = lambda count: None  # type: ignore[method-assign]
                optimizer._stepper.wire.timeout_s = 0.2  # the steps before have the time that they need

        with pytest.raises(StallError, match="step 6 was not over within its timeout of 0 s; fake:0 has not finished"):
            trained("1-bit Adam, compressed", 0, 6, watch=watch)

    run_ranks(1, body)


def test_lamb_and_a_forced_hierarchy_are_refused_on_devices(on_devices: Any) -> None:
    on_devices([0, 1, 2, 3])

    def lamb(session: Session) -> None:
        with pytest.raises(InvalidRequestError, match="DistributedOneBitLamb makes its steps in the host's memory"):
            KINDS["1-bit LAMB, dense"].wrap(parameters_of(torch.float32))

    def hierarchy(session: Session) -> str:
        with pytest.raises(InvalidRequestError, match=r"It needs NCCL \(rank 0: no NCCL\), or an MPI"):
            KINDS["Birder"].wrap(parameters_of(torch.float32), hierarchical=True)
        return KINDS["Birder"].wrap(parameters_of(torch.float32)).compression_report()["form"]

    run_ranks(1, lamb)
    assert run_ranks(4, hierarchy, hosts=["a", "a", "b", "b"]) == ["flat"] * 4
