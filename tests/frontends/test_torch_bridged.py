"""Dense sums of tensors that are on devices, over NCCL: what they are in the host's memory, bit for bit.

Device and NCCL are fakes (see ``tests.fake_device``, ``tests.fake_nccl``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ocomm
import ocomm_torch as hvd
from ocomm.errors import HorovodInternalError, InvalidRequestError, PeerError
from ocomm.nccl_opening import could_be_bridged
from ocomm.operations import ProcessSet
from ocomm.session import Session
from ocomm.telemetry.timeline import path_of, read
from ocomm.transport import nccl
from ocomm.types import Settings
from ocomm_torch import mpi_ops
from ocomm_torch.mesh import nccl_user
from ocomm_torch.mpi_ops import TorchAdapter
from ocomm_torch.optimizers import compressed
from tests.fake_device import FakeDevice
from tests.fake_nccl import FakeNccl
from tests.frontends.every_kind import KINDS
from tests.frontends.fake_placement import FakePlacement
from tests.frontends.onebit_jobs import backward, digest, gradients, initial
from tests.worlds import MPI_SIZE, run_ranks

TEAMS = ProcessSet([0, 1]), ProcessSet([2, 3])


class OnDevices(TorchAdapter):
    """Takes tensors of the host for those of each rank's device."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.placements = {rank: FakePlacement(FakeDevice(f"fake:{rank}")) for rank in ranks}
        #: Ranks whose tensors are in the host's memory now.
        self.elsewhere: set[int] = set()

    def placement(self, session: Session, process_set: ProcessSet, tensors: Sequence[torch.Tensor]) -> Any:
        rank = session.require_topology().rank
        is_there = rank in self.placements and rank not in self.elsewhere
        could_be = could_be_bridged(session, process_set.number(session))
        return self.placements[rank] if is_there and tensors and could_be else None

    def counts(self, rank: int) -> Any:
        return self.placements[rank].device.counts


@pytest.fixture
def on_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[..., OnDevices]:
    """Says which ranks' tensors are on a device from now on, and what NCCL there is."""

    def choose(ranks: Sequence[int], library: FakeNccl | None = None) -> OnDevices:
        def load() -> FakeNccl:
            if library is None:
                raise HorovodInternalError("no NCCL")
            return library

        adapter = OnDevices(ranks)
        monkeypatch.setattr(nccl, "load", load)
        monkeypatch.setattr(mpi_ops, "TORCH", adapter)
        return adapter

    return choose


def rank_of(session: Session) -> int:
    return session.require_topology().rank


def opened(session: Session, process_set: ProcessSet = hvd.global_process_set) -> bool:
    """Whether the ranks of a set have a bridge, once they have tried."""
    member = session.member_set(process_set.number(session))
    while True:
        hvd.allreduce(torch.ones(3), name="first", process_set=process_set)
        tried = np.array([member.bridged is not None or member.unbridged != ""])
        if ocomm.allreduce(tried, op=ocomm.Min, name="tried", process_set=process_set)[0]:
            return member.bridged is not None


FLOATS = torch.float64, torch.float16, torch.bfloat16
WHOLES = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
LENGTHS = (1, 7, 0, 300, 2049, 5000, 40_001, 3)


def tensors_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(n, generator=generator) * 10**k for k, n in enumerate(LENGTHS)]


def sums(rank: int) -> list[np.ndarray]:
    """Of every form of call."""
    found: list[torch.Tensor] = []
    for tensor in tensors_of(rank):
        found.append(hvd.allreduce(tensor, op=hvd.Sum))
    found += hvd.grouped_allreduce(tensors_of(rank), prescale_factor=0.3, postscale_factor=1.7)
    for _ in range(3):  # of names that the ranks know
        handles = [hvd.allreduce_async_(tensor, name=f"{k}") for k, tensor in enumerate(tensors_of(rank))]
        found += [hvd.synchronize(handle) for handle in handles]
    found.append(hvd.allreduce_(torch.randn(40, 50, generator=torch.Generator().manual_seed(rank)).t()))
    found.append(hvd.allreduce(torch.arange(10.0).requires_grad_() + rank))
    for dtype in (*FLOATS, *WHOLES):
        tensor = (torch.randn(5001, generator=torch.Generator().manual_seed(rank)) * 20).to(dtype)
        found += [hvd.allreduce(tensor, op=hvd.Sum), hvd.allreduce(tensor[:900])]
        if dtype in FLOATS:
            found.append(hvd.allreduce(tensor, prescale_factor=0.3, postscale_factor=1.7))
    return list(map(bits, found))


def bits(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def demand_equal(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for ours, host in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(ours, host, strict=True)


def demand_nothing_bridged(
    library: FakeNccl, calls: Callable[[Session], list[np.ndarray]], expected: list[list[np.ndarray]]
) -> None:
    """Two ranks that have a bridge make no use of it for ``calls``, whose results are ``expected``."""

    def body(session: Session) -> list[np.ndarray]:
        assert opened(session)
        before = [communicator.calls for communicator in library.communicators]
        found = calls(session)
        assert [communicator.calls for communicator in library.communicators] == before
        return found

    for got, wanted in zip(run_ranks(2, body), expected, strict=True):
        demand_equal(got, wanted)


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_over_nccl_are_those_of_the_hosts_memory_and_nothing_is_copied_there(
    size: int, engine: str, on_devices: Any
) -> None:
    settings = Settings(segment_nbytes=1 << 14, engine=engine)
    expected = run_ranks(size, lambda s: sums(rank_of(s)), settings)
    library = FakeNccl()
    adapter = on_devices(range(size), library)

    def body(session: Session) -> Any:
        assert opened(session)
        before = adapter.counts(rank_of(session))
        found = sums(rank_of(session))
        assert "ocomm" in adapter.placements[rank_of(session)].device.entered
        return found, adapter.counts(rank_of(session)) - before

    for (got, counts), wanted in zip(run_ranks(size, body, settings), expected, strict=True):
        demand_equal(got, wanted)
        assert counts["download"] == counts["upload"] == 0
        assert counts["launch"] > 0
    for communicator in library.communicators:
        assert communicator.moved[0] > 0
        assert communicator.aborted


def test_where_a_rank_has_it_in_the_hosts_memory_all_go_that_way(on_devices: Any) -> None:
    """In one call or in all of them."""
    expected = run_ranks(2, lambda s: sums(rank_of(s)))
    library = FakeNccl()
    adapter = on_devices(range(2), library)

    def mixed(session: Session) -> list[np.ndarray]:
        if rank_of(session) == 1:
            adapter.elsewhere.add(1)
        return sums(rank_of(session))

    demand_nothing_bridged(library, mixed, expected)


def test_what_no_device_adds_up_goes_through_the_hosts_memory(on_devices: Any) -> None:
    def others(session: Session) -> list[np.ndarray]:
        rank = rank_of(session)
        tensor = torch.randn(5001, generator=torch.Generator().manual_seed(rank))
        whole = (tensor * 20).int()
        return list(
            map(
                bits,
                [
                    hvd.allreduce(tensor, op=hvd.Max),
                    hvd.allreduce(tensor, op=hvd.Adasum),
                    hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5),
                    hvd.allreduce(whole > 0, op=hvd.Sum),
                    *hvd.grouped_allreduce([tensor.half(), whole], op=hvd.Product),
                    hvd.allgather(tensor),
                    hvd.broadcast(tensor, 1),
                    hvd.reducescatter(tensor),
                    hvd.alltoall(tensor[:5000]),
                ],
            )
        )

    expected = run_ranks(2, others)
    library = FakeNccl()
    on_devices(range(2), library)
    demand_nothing_bridged(library, others, expected)


def test_ranks_that_have_joined_take_part_with_nothing(on_devices: Any) -> None:
    on_devices(range(2), FakeNccl())

    def body(session: Session) -> Any:
        assert opened(session)
        found = 0.0
        if rank_of(session) == 0:
            found = hvd.allreduce(torch.full((5000,), 3.0), op=hvd.Sum, name="alone").sum().item()
        assert hvd.join() in (0, 1)
        both = hvd.allreduce(torch.full((5000,), 3.0), op=hvd.Sum, name="both").sum().item()
        return found, both

    assert run_ranks(2, body) == [(15_000.0, 30_000.0), (0.0, 30_000.0)]


@pytest.mark.parametrize("ends", ["shuts down", "joins"])
def test_a_job_may_end_while_its_bridge_is_opened(ends: str, on_devices: Any) -> None:
    library = FakeNccl()
    on_devices(range(2), library)

    def body(session: Session) -> float:
        total = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="first").sum().item()
        if ends == "joins":
            hvd.join()
        return total

    assert run_ranks(2, body) == [6.0, 6.0]
    assert all(communicator.aborted for communicator in library.communicators)


@pytest.mark.parametrize("how", ["sticks", "words", "device"])
def test_a_transfer_that_fails_or_hangs_ends_with_its_name_on_all_ranks(how: str, on_devices: Any) -> None:
    library = FakeNccl(sticks_at=8 if how == "sticks" else 1 << 60)
    adapter = on_devices(range(2), library)

    def body(session: Session) -> str:
        assert opened(session)
        rank = rank_of(session)
        if how == "sticks":
            assert session.bridge is not None
            session.bridge.timeout_s = 0.5
        with pytest.raises(HorovodInternalError) as caught:
            for step in range(100):
                if step == 4 and how == "words":
                    library.communicators[-1].words = "remote process exited"
                if step == 4 and how == "device" and rank == 1:
                    adapter.placements[1].device.fails = True
                hvd.allreduce(torch.ones(3000), name="the tensor")
        with pytest.raises(HorovodInternalError):
            hvd.allreduce(torch.ones(3000), name="later")
        return str(caught.value)

    told = run_ranks(2, body)
    by_itself = "allreduce.the tensor on rank {}: the device failed: "
    words = {
        "sticks": ["NCCL", "was launched, and is not over after 0 s"],
        "words": ["NCCL", "remote process exited"],
        "device": ["the device has fallen off the bus"],
    }[how]
    # A rank hears of another one's failure, or finds its own first.
    itself = [said for rank, said in enumerate(told) if by_itself.format(rank) in said]
    assert itself and all(part in said for said in itself for part in words), told
    assert all(said in itself or "failed: HorovodInternalError" in said for said in told), told
    assert all(communicator.aborted for communicator in library.communicators)


def begun(tensors: Sequence[tuple[str, torch.Tensor]], process_set: ProcessSet) -> list[int]:
    return [hvd.allreduce_async_(tensor, name=name, process_set=process_set) for name, tensor in tensors]


def test_an_optimizer_and_dense_calls_share_the_bridge_whatever_the_order_on_each_rank(
    on_devices: Any, monkeypatch: Any
) -> None:
    def body(session: Session) -> Any:
        rank = rank_of(session)
        team = TEAMS[rank // 2]
        parameters = [torch.nn.Parameter(torch.from_numpy(array.copy())) for array in initial()]
        optimizer = KINDS["1-bit Adam, dense"].wrap(parameters, hierarchical=True)
        if adapter is not None:
            assert opened(session, team)
            bridged = session.member_set(team.number(session)).bridged
            assert bridged is not None and bridged.bridge is session.bridge
        digests = []
        for step in range(1, 6):
            optimizer.zero_grad()
            mine = [(f"{k}", tensor + step) for k, tensor in enumerate(tensors_of(rank))]
            handles = begun(mine[: 2 + rank], team)
            backward(parameters, gradients(step, rank), range(len(parameters) - 1, -1, -1))
            handles += begun(mine[2 + rank : -rank or None], team)
            optimizer.step()
            handles += begun(mine[len(mine) - rank :], team)
            found = [hvd.synchronize(handle).numpy() for handle in handles]
            digests.append(digest([*found, *(p.detach().numpy() for p in parameters)]))
        return digests

    sets = [list(team.ranks) for team in TEAMS]
    settings = Settings(segment_nbytes=1 << 12)
    adapter = None
    expected = run_ranks(4, body, settings, sets, hosts="aabb")
    library = FakeNccl()
    adapter = on_devices(range(4), library)
    there = adapter.placements
    monkeypatch.setattr(compressed, "placement", lambda names, parameters, session: there[rank_of(session)])
    assert run_ranks(4, body, settings, sets, hosts="aabb") == expected
    assert len(library.communicators) == (1 if MPI_SIZE else 4)


def test_gradients_of_a_distributed_optimizer_stay_on_the_device(on_devices: Any) -> None:
    def body(session: Session) -> Any:
        bridged = adapter is not None and opened(session)
        parameters = [torch.nn.Parameter(torch.from_numpy(array.copy())) for array in initial()]
        names = [(f"{k}", p) for k, p in enumerate(parameters)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), names)
        before = adapter.counts(rank_of(session)) if bridged else None
        digests = []
        for step in range(1, 5):
            optimizer.zero_grad()
            backward(parameters, gradients(step, rank_of(session)), range(len(parameters)))
            optimizer.step()
            digests.append(digest([p.detach().numpy() for p in parameters]))
        if bridged:
            counts = adapter.counts(rank_of(session)) - before
            assert counts["download"] == counts["upload"] == 0
            assert counts["launch"] >= 4
        return digests

    adapter = None
    expected = run_ranks(2, body)
    adapter = on_devices(range(2), FakeNccl())
    assert run_ranks(2, body) == expected


@pytest.mark.parametrize("why", ["no NCCL", "share a GPU", "arrived as something else", "OCOMM_NCCL=0"])
def test_where_there_is_no_nccl_sums_go_through_the_hosts_memory(
    why: str, on_devices: Any, caplog: pytest.LogCaptureFixture
) -> None:
    library = FakeNccl(garbles=why.startswith("arrived"))
    adapter = on_devices(range(2), None if why == "no NCCL" else library)
    if why == "share a GPU":
        adapter.placements[1].device.identity = adapter.placements[0].device.identity

    def body(session: Session) -> Any:
        if why == "OCOMM_NCCL=0":
            hvd.allreduce(torch.ones(3), name="first")
            assert session.member_set(0).open_bridge is None
        else:
            assert not opened(session)
        return hvd.allreduce(torch.ones(5000)).sum().item()

    assert run_ranks(2, body, Settings(nccl="0" if why == "OCOMM_NCCL=0" else "auto")) == [5000.0] * 2
    assert all(communicator.aborted for communicator in library.communicators)
    if why != "OCOMM_NCCL=0" and (not MPI_SIZE or caplog.text):
        assert "dense sums of tensors on GPUs go through the host's memory" in caplog.text and why in caplog.text


def test_beside_an_axis_of_a_mesh_that_uses_nccl_there_is_no_bridge(on_devices: Any, monkeypatch: Any) -> None:
    on_devices(range(2), FakeNccl())
    mesh = SimpleNamespace(mesh_dim_names=("dp", "pp", "fsdp"), mesh=torch.zeros(2, 1, 2), get_group=lambda name: name)
    configs = {"fsdp": "cpu:gloo,cuda:nccl"}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: configs.get(group, "cpu:gloo"))
    assert not nccl_user(mesh, "fsdp")

    def body(session: Session) -> str:
        session.other_nccl = nccl_user(mesh, "dp") if rank_of(session) else ""
        assert not opened(session)
        return session.member_set(0).unbridged

    assert all("rank 1: torch's axis 'fsdp' of the mesh uses NCCL" in why for why in run_ranks(2, body))


def test_who_insists_on_nccl_is_refused_without(on_devices: Any) -> None:
    on_devices(range(2))

    def body(session: Session) -> str:
        with pytest.raises((InvalidRequestError, PeerError)) as caught:
            opened(session)
            hvd.allreduce(torch.ones(3))
        return str(caught.value)

    told = run_ranks(2, body, Settings(nccl="1"))
    refused = [words for words in told if "OCOMM_NCCL=1, but there is no NCCL" in words and "rank 0: no NCCL" in words]
    # The other one hears so, or that this one has gone.
    assert refused and all(words in refused or "has shut down" in words for words in told), told


@pytest.mark.parametrize("engine", ["native", "python"])
def test_what_nccl_carries_is_all_but_words_and_is_counted_by_engine_and_timeline(
    engine: str, on_devices: Any, tmp_path: Path
) -> None:
    library = FakeNccl()
    on_devices(range(2), library)
    numel = 40_000

    def body(session: Session) -> None:
        assert session.engine is not None and opened(session)
        rank, path = rank_of(session), str(tmp_path / "trace.json")
        own = [c for c in library.communicators if c.rank == rank]
        hvd.barrier()
        ocomm.start_timeline(path)
        before, moved = session.engine.counters(), own[0].moved[0]
        hvd.allreduce_(torch.ones(numel), name="counted")
        hvd.barrier()  # a plan is counted by the background thread, a moment after its end
        after = session.engine.counters()
        ocomm.stop_timeline()
        spans = [e["args"] for e in read(path_of(path, rank)) if e.get("name") == "NCCL_EXCHANGE"]
        # To the owner of the other half, and this half's sum to it.
        assert sum(span["bytes_sent"] for span in spans) == 4 * numel
        assert after["bytes_bridged"] - before["bytes_bridged"] == own[0].moved[0] - moved == 4 * numel
        # The first rank sends numbers, the other one says that it is ready.
        assert after["bytes_sent"] - before["bytes_sent"] == 8 * len(spans)

    run_ranks(2, body, Settings(engine=engine, segment_nbytes=1 << 15))
