"""Training with the CUDA kernels: on a GPU that all ranks share, or in numba's simulator, on one rank.

The law is the same training in the host's memory. Where there are no scales every bit is the same; scales may differ in
their last bits, and Torch's own Adam rounds differently on a GPU, so that now and then a sign is another one.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.kernels.device import DeviceMemory
from ocomm.session import Session
from ocomm.transport import nccl
from ocomm.types import ReduceOp, Settings
from ocomm_torch import mpi_ops
from ocomm_torch.memory.placement import placement
from ocomm_torch.optimizers import compressed
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from tests.fake_device import FakeDevice
from tests.frontends.every_kind import KINDS
from tests.frontends.fake_placement import FakePlacement
from tests.frontends.onebit_jobs import digest, gradients, initial
from tests.tiers import few
from tests.worlds import MPI_SIZE, run_ranks

GPU = torch.cuda.is_available()
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
if not (GPU or SIMULATED):
    pytest.skip(reason="no GPU that Torch can use, and NUMBA_ENABLE_CUDASIM is not 1", allow_module_level=True)

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # see tests/contract/test_cuda.py

#: Kinds whose messages have no scales and whose dense steps, if any, are ocomm's own.
EXACT = ("Birder", "SoftSignSGD", "Lion")
NEAR = ("1-bit Adam, compressed", "0/1 Adam, local steps")
SHAPES = ((70, 130), (4097,), (33,), (1,)) if GPU else ((5, 7), (33,))
STEPS = 21 if GPU else 3  # 0/1 Adam's ranks are alike where an interval ends, as after an odd number here
RANKS = MPI_SIZE or 1


def trained(kind: str, session: Session, device: str, dtype: torch.dtype = torch.float32) -> list[np.ndarray]:
    assert session.topology is not None
    parameters = [torch.nn.Parameter(torch.from_numpy(a).to(device, dtype)) for a in initial(SHAPES)]
    optimizer = KINDS[kind].wrap(parameters)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for parameter, grad in zip(parameters, gradients(step, session.topology.rank, SHAPES), strict=True):
            assert grad is not None
            (parameter * torch.from_numpy(grad).to(device, dtype)).sum().backward()
        optimizer.step()
    return [p.detach().float().cpu().numpy() for p in parameters]


@pytest.fixture
def on_host_and_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Any], list[Any]]]:
    def train(kind: str, dtype: torch.dtype = torch.float32) -> tuple[list[Any], list[Any]]:
        expected = run_ranks(RANKS, lambda s: trained(kind, s, "cpu", dtype))
        if not GPU:
            loops = importlib.import_module("ocomm.kernels.cuda")
            monkeypatch.setattr(
                compressed, "placement", lambda *_: FakePlacement(FakeDevice(inner=loops.CudaKernels()))
            )
        got = run_ranks(RANKS, lambda s: trained(kind, s, "cuda" if GPU else "cpu", dtype))
        monkeypatch.setattr(compressed, "placement", placement)
        assert len({digest(arrays) for arrays in got}) == 1, "all ranks hold the same bits"
        return expected[0], got[0]

    return train


@pytest.mark.parametrize("kind", EXACT)
def test_what_has_no_scales_has_the_bits_of_the_host(kind: str, on_host_and_gpu: Any) -> None:
    expected, got = on_host_and_gpu(kind)
    assert digest(got) == digest(expected)


@pytest.mark.parametrize("kind", NEAR)
def test_what_has_scales_is_near(kind: str, on_host_and_gpu: Any) -> None:
    expected, got = on_host_and_gpu(kind)
    moved = np.concatenate([(e - i).ravel() for e, i in zip(expected, initial(SHAPES), strict=True)])
    apart = np.concatenate([(g - e).ravel() for g, e in zip(got, expected, strict=True)])
    assert np.isfinite(apart).all()
    assert np.linalg.norm(apart) < 0.05 * np.linalg.norm(moved)


@pytest.mark.parametrize("place", few(["host", "files"], ["host"]))
def test_offloaded_steps_have_every_bit_of_the_hosts(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps, four of them in the warm-up: the GPU computes checksums alone."""

    def body(session: Session, device: str, **options: Any) -> str:
        assert session.topology is not None
        parameters = [torch.nn.Parameter(torch.from_numpy(a).to(device)) for a in initial(SHAPES)]
        optimizer = DistributedOneBitAdam(torch.optim.Adam(parameters, lr=1e-2), freeze_step=4, **options)
        for step in range(1, 11):
            optimizer.zero_grad()
            for parameter, grad in zip(parameters, gradients(step, session.topology.rank, SHAPES), strict=True):
                (parameter * torch.from_numpy(grad).to(device)).sum().backward()
            optimizer.step()
        assert optimizer.compression_report()["stage"] == "compressed"
        assert {p.device.type for p in parameters} == {device}
        return hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in parameters)).hexdigest()

    expected = run_ranks(RANKS, lambda s: body(s, "cpu"))
    if not GPU:
        loops = importlib.import_module("ocomm.kernels.cuda")
        monkeypatch.setattr(compressed, "placement", lambda *_: FakePlacement(FakeDevice(inner=loops.CudaKernels())))
    offload = True if place == "host" else str(tmp_path)
    assert run_ranks(RANKS, lambda s: body(s, "cuda" if GPU else "cpu", offload=offload)) == expected


@pytest.mark.skipif(not GPU, reason="the fake device has Torch's tensors of the host")
class TestOnAGpu:
    def test_low_precision_parameters_follow_their_masters(self, on_host_and_gpu: Any) -> None:
        expected, got = on_host_and_gpu("Lion", torch.bfloat16)
        assert digest(got) == digest(expected)

    def test_dense_collectives_take_tensors_of_the_gpu(self) -> None:
        def body(session: Session) -> Any:
            assert session.topology is not None
            tensor = torch.arange(1000.0, device="cuda") + session.topology.rank
            mpi_ops.allreduce_(tensor, name="in place")
            return tensor.cpu(), mpi_ops.allreduce(tensor.half(), name="new"), tensor.device

        for result, new, device in run_ranks(RANKS, body):
            expected = torch.arange(1000.0) + (RANKS - 1) / 2
            assert torch.equal(result, expected) and new.device == device
            assert torch.equal(new.cpu(), expected.half())

    def test_nccl_takes_bytes_from_a_stream_of_ours_to_the_rank_itself(self) -> None:
        """As far as one GPU goes: the library, the device's context, streams, events and an abort."""
        device: Any = importlib.import_module("ocomm.kernels.cuda_device").CudaDevice(0)
        memory, stream, numel = DeviceMemory(device), device.stream(), 1 << 20
        library = nccl.load()
        sent, received = memory.empty(numel, np.uint8), memory.empty(numel, np.uint8)
        values = np.random.default_rng(1).integers(0, 256, numel, np.uint8)
        device.enter()
        communicator = library.communicator(library.unique_id(), 1, 0)
        for turn in range(3):
            sent[:] = values + np.uint8(turn)
            memory.wait()
            communicator.exchange(
                [nccl.Piece(0, sent.address, numel)], [nccl.Piece(0, received.address, numel)], stream.handle
            )
            event, end = stream.record(), time.monotonic() + 30
            while not event.is_over():
                assert not communicator.failure() and time.monotonic() < end
            assert np.array_equal(memory.host(received), values + np.uint8(turn))
        communicator.abort()

    def test_what_torch_was_given_before_the_step_reads_parameters_of_before(self) -> None:
        def body(session: Session) -> None:
            parameter = torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))
            optimizer = KINDS["Lion"].wrap([parameter])
            for _ in range(5):
                optimizer.zero_grad()
                (parameter * 2).sum().backward()
                before = parameter.detach().cpu()
                torch.cuda._sleep(50_000_000)  # cycles
                read = parameter.detach().clone()
                optimizer.step()
                assert torch.equal(read.cpu(), before) and not torch.equal(parameter.detach().cpu(), before)

        run_ranks(RANKS, body)

    @pytest.mark.parametrize("kind", ["Lion", "1-bit Adam, dense"])
    def test_a_backward_that_is_replayed_from_a_graph_is_averaged_by_the_step(self, kind: str) -> None:
        def body(session: Session, captures: bool) -> np.ndarray:
            assert session.topology is not None
            parameter = torch.nn.Parameter(torch.ones(5000, device="cuda"))
            factor = torch.zeros(5000, device="cuda")
            optimizer = KINDS[kind].wrap([parameter])
            torch.autograd.grad((parameter * factor).sum(), parameter)  # what is made once is not to be captured
            graph = torch.cuda.CUDAGraph()
            if captures:
                with torch.cuda.graph(graph):
                    (parameter * factor).sum().backward()
            for step in range(1, 6):
                factor.copy_(torch.from_numpy(gradients(step, session.topology.rank, [(5000,)])[0]))
                if captures:
                    graph.replay()
                else:
                    optimizer.zero_grad()
                    (parameter * factor).sum().backward()
                optimizer.step()
            return parameter.detach().cpu().numpy()

        expected = run_ranks(RANKS, lambda s: body(s, False))
        got = run_ranks(RANKS, lambda s: body(s, True))
        assert [digest([array]) for array in got] == [digest([array]) for array in expected]

    def test_a_loss_scale_is_divided_out_of_what_is_exchanged(self) -> None:
        def body(session: Session, scale: float) -> str:
            assert session.topology is not None
            parameters = [torch.nn.Parameter(torch.from_numpy(a).to("cuda")) for a in initial(SHAPES)]
            optimizer = KINDS["Lion"].wrap(parameters)
            scaler = torch.amp.GradScaler("cuda", init_scale=scale, enabled=scale != 1)
            for step in range(1, 6):
                optimizer.zero_grad()
                for parameter, grad in zip(parameters, gradients(step, session.topology.rank, SHAPES), strict=True):
                    scaler.scale((parameter * torch.from_numpy(grad).to("cuda")).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
            return digest([p.detach().cpu().numpy() for p in parameters])

        expected = run_ranks(RANKS, lambda s: body(s, 1.0))
        assert run_ranks(RANKS, lambda s: body(s, 1024.0)) == expected

    def test_a_compressed_step_never_waits_for_the_gpu(self) -> None:
        def body(session: Session) -> list[int]:
            parameters = [torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))]
            optimizer = KINDS["1-bit Adam, compressed"].wrap(parameters)
            waits = []
            for _ in range(10):
                optimizer.zero_grad()
                (parameters[0] * 2).sum().backward()
                optimizer.step()
                waits.append(optimizer._driver.core.param_memory.waits)
            return waits

        for waits in run_ranks(RANKS, body):
            assert waits[5] == waits[-1]


_FEW = torch.cuda.device_count() < 4 or MPI_SIZE != 4
FOUR_GPUS = pytest.mark.skipif(_FEW, reason="no four GPUs for four ranks under mpirun")


@FOUR_GPUS
def test_dense_sums_of_ranks_with_a_gpu_each_go_over_nccl() -> None:
    def body(session: Session, device: str) -> list[np.ndarray]:
        rank, member = session.require_topology().rank, session.member_set(0)
        there = device.format(rank)
        deadline = time.monotonic() + 60
        while device != "cpu" and not mpi_ops.allreduce(torch.tensor(member.bridged is not None), op=ReduceOp.MIN):
            mpi_ops.allreduce(torch.ones(8, device=there), name="first")
            assert time.monotonic() < deadline, member.unbridged or "the bridge is not open yet"
        generator = torch.Generator().manual_seed(rank)
        tensors = [torch.randn(n, generator=generator).to(there) for n in (1, 3000, 100_003, 1 << 20)]
        found = [*mpi_ops.grouped_allreduce(tensors), *(mpi_ops.allreduce(t * 2, op=ReduceOp.SUM) for t in tensors)]
        return [tensor.cpu().numpy() for tensor in found]

    settings = Settings(nccl="1")
    expected = run_ranks(RANKS, lambda s: body(s, "cpu"), settings)
    got = run_ranks(RANKS, lambda s: body(s, "cuda:{}"), settings)
    assert [digest(arrays) for arrays in got] == [digest(arrays) for arrays in expected]


@FOUR_GPUS
@pytest.mark.parametrize("kind", ["Lion", "0/1 Adam, local steps"])
def test_ranks_with_a_gpu_each_add_up_over_nccl(kind: str) -> None:
    """As two hosts with two of them each, which here are names."""
    hosts = ["a", "a", "b", "b"]

    def body(session: Session) -> list[np.ndarray]:
        assert session.topology is not None
        found = trained(kind, session, f"cuda:{session.topology.rank}")
        assert session.bridge is not None and not session.bridge.ended, "ocommrun --check-build says what NCCL there is"
        return found

    settings = Settings(nccl="1", segment_nbytes=2048)
    expected = run_ranks(RANKS, lambda s: trained(kind, s, "cpu"), settings, hosts=hosts)
    got = run_ranks(RANKS, body, settings, hosts=hosts)
    assert len({digest(arrays) for arrays in got}) == 1
    assert kind not in EXACT or digest(got[0]) == digest(expected[0])
