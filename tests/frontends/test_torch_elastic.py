"""Elastic states and samplers, and the loop that goes on from the last commit, in a real job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import ocomm_torch as hvd  # noqa: E402
from ocomm.errors import HostsUpdatedInterrupt, InvalidRequestError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from tests.cluster.jobs import run_job  # noqa: E402
from tests.worlds import MPI_SIZE, run_ranks  # noqa: E402

JOB = """
import json, sys
import torch
import ocomm_torch as hvd

def run(mode):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
    )
    calls, resets, failed = [], [], []

    @hvd.elastic.run
    def train(state):
        calls.append(state.batch)
        while state.batch < 12:
            if state.batch == 6 and len(failed) < (9 if mode == "always" else 1):
                failed.append(state.batch)
                if mode in ("mismatch", "always"):
                    hvd.allreduce(torch.ones(1 + hvd.rank()), name="different")
                elif mode == "one rank" and hvd.rank() == 1:
                    raise hvd.HorovodInternalError("only rank 1 saw this")
                elif mode == "hosts":
                    if hvd.rank() == 1:
                        state.on_hosts_updated(added=False)
                    state.commit()
            torch.manual_seed(100 * state.batch + hvd.rank())
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()
            state.batch += 1
            if state.batch % 4 == 0:
                state.commit()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    error = ""
    try:
        train(state)
    except hvd.HorovodInternalError as caught:
        error = type(caught).__name__
    assert hvd.ProcessSet([0]).process_set_id == 1
    return {"parameters": [p.tolist() for p in model.parameters()], "calls": calls, "resets": resets, "error": error}

hvd.init(process_sets=[[0]])
results = {mode: run(mode) for mode in ("nothing", "mismatch", "one rank", "hosts", "always")}
open(f"{sys.argv[1]}.{hvd.rank()}", "w").write(json.dumps(results))
"""


@pytest.mark.skipif(MPI_SIZE > 0, reason="starts jobs of its own")
def test_a_failed_job_goes_on_from_its_last_commit_and_ends_where_it_would_have(tmp_path: Path) -> None:
    done = run_job(2, JOB, str(tmp_path / "result"), timeout_s=90.0)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"result.{rank}").read_text()) for rank in range(2))
    assert first == second
    calls = {"nothing": [0], "mismatch": [0, 4], "one rank": [0, 4], "hosts": [0, 6]}
    for mode, expected in calls.items():
        assert (first[mode]["calls"], first[mode]["error"]) == (expected, "")
        assert first[mode]["resets"] == [2] * (len(expected) - 1)
        assert first[mode]["parameters"] == first["nothing"]["parameters"]
    # An error which comes again every time ends the job.
    assert (first["always"]["calls"], first["always"]["error"]) == ([0, 4, 4], "MismatchError")


def test_a_state_is_restored_in_place_and_synchronized_from_rank_zero() -> None:
    def body(session: Session) -> None:
        me = hvd.rank()
        model = torch.nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.fill_(float(me))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (me + 1), momentum=0.9)
        state = hvd.elastic.TorchState(model, optimizer, epoch=me, data={"x": [me]})
        assert state.model is model and state.optimizer is optimizer
        state.sync()
        assert (state.epoch, state.data, optimizer.param_groups[0]["lr"]) == (0, {"x": [0]}, 0.1)
        assert model.weight.tolist() == [[0.0, 0.0]]
        state.epoch = 5
        state.data["x"].append(7)
        with torch.no_grad():
            model.weight.fill_(9.0)
        state.restore()
        assert (state.epoch, state.data, model.weight.tolist()) == (0, {"x": [0]}, [[0.0, 0.0]])
        state.epoch = 3
        state.commit()
        state.epoch = 4
        state.restore()
        assert (state.epoch, state.commits) == (3, 1)
        for added in (True, False):
            if me == 1:
                state.on_hosts_updated(added)
            with pytest.raises(HostsUpdatedInterrupt) as interrupt:
                state.check_host_updates()
            assert interrupt.value.skip_sync is not added
        state.check_host_updates()

    run_ranks(2, body)


def test_a_one_bit_optimizer_is_refused() -> None:
    def body(session: Session) -> None:
        optimizer = hvd.DistributedOneBitAdam(torch.optim.Adam(torch.nn.Linear(2, 1).parameters()))
        with pytest.raises(InvalidRequestError, match=r"^TorchState: optimizer is a OneBitAdam, which cannot go on"):
            hvd.elastic.TorchState(optimizer=optimizer)

    run_ranks(1, body)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("length", [0, 1, 10, 13])
def test_a_sampler_deals_what_is_left_to_all_ranks(size: int, shuffle: bool, length: int) -> None:
    def body(session: Session) -> None:
        sampler = hvd.elastic.ElasticSampler(range(length), shuffle=shuffle, seed=5)
        state = hvd.elastic.TorchState(sampler=sampler)
        sampler.set_epoch(2)
        mine = list(sampler)
        assert len(mine) == len(sampler) == -(-length // size)
        everyone = hvd.allgather_object(mine)
        assert {i for part in everyone for i in part} == set(range(length))
        assert shuffle or everyone == [[i % max(length, 1) for i in range(r, len(sampler) * size, size)]
                                       for r in range(size)]  # fmt: skip
        for batch in range(2):
            sampler.record_batch(batch, 2)
        done = {i for part in everyone for i in part[:4]}
        assert sampler.processed_indices == set(mine[:4])
        state.sync()
        assert sampler.processed_indices == done and state.sampler is sampler
        rest = hvd.allgather_object(list(sampler))
        assert {i for part in rest for i in part} == set(range(length)) - done
        assert len({len(part) for part in rest}) == 1
        sampler.set_epoch(3)
        state.restore()
        assert (sampler.epoch, sampler.processed_indices) == (2, done)

    run_ranks(size, body)
