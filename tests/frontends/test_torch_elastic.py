"""Elastic states and samplers, and the loop that goes on from the last commit, in a real job."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ocomm_torch as hvd  # noqa: E402
from ocomm.elastic import plain  # noqa: E402
from ocomm.errors import HostsUpdatedInterrupt  # noqa: E402
from ocomm.session import Session  # noqa: E402
from ocomm_torch.elastic import TensorCodec  # noqa: E402
from tests.cluster.jobs import run_job  # noqa: E402
from tests.worlds import MPI_SIZE, run_ranks  # noqa: E402

JOB = """
import json, sys
import torch
import ocomm_torch as hvd

def run(kind, mode):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    if kind == "dense":
        optimizer = hvd.DistributedOptimizer(adam, model.named_parameters())
    elif kind == "DiLoCo":
        optimizer = hvd.DistributedDiLoCo(adam, model.named_parameters(), sync_every=3, delay=1)
    else:
        optimizer = hvd.DistributedOneBitAdam(adam, model.named_parameters(), freeze_step=3)
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
modes = {"dense": ("nothing", "mismatch", "one rank", "hosts", "always")}
modes |= dict.fromkeys(("1-bit", "DiLoCo"), ("nothing", "one rank", "hosts"))
results = {kind: {mode: run(kind, mode) for mode in modes[kind]} for kind in modes}
open(f"{sys.argv[1]}.{hvd.rank()}", "w").write(json.dumps(results))
"""


# One optimizer is made before the loop, and one, of a model whose parameters have the same names, in each turn of it.
TWO_MODELS = """
import torch
import ocomm_torch as hvd

def wrapped(model):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())

@hvd.elastic.run
def train(state):
    second = wrapped(inner)
    if state.resets == 0 and hvd.rank() == 1:
        wrapped(torch.nn.Linear(4, 4, bias=False))  # what one rank alone had made when it failed
    for batch in range(2):
        first.zero_grad(), second.zero_grad()
        outer(inner(torch.full((1, 4), 1.0 + hvd.rank()))).sum().backward()
        first.step(), second.step()
        if state.resets == 0:
            raise hvd.HorovodInternalError("all ranks begin again")

hvd.init()
outer, inner = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
first = wrapped(outer)
state = hvd.elastic.TorchState(outer, first, inner=inner, resets=0)
state.register_reset_callbacks([lambda: setattr(state, "resets", state.resets + 1)])
train(state)
ranks = hvd.allgather_object([model.weight.tolist() for model in (outer, inner)])
assert ranks[0] == ranks[1]
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """How a job of both scripts has ended, and its results: to import Torch takes longer than each of them."""
    folder = tmp_path_factory.mktemp("job")
    return run_job(2, f"{JOB}\nhvd.shutdown()\n{TWO_MODELS}", str(folder / "result")), folder


@pytest.mark.long
@pytest.mark.skipif(MPI_SIZE > 0, reason="starts a job of its own")
def test_an_optimizer_of_a_later_turn_shares_no_name_with_one_of_before(results: Any) -> None:
    done, _ = results
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(MPI_SIZE > 0, reason="starts a job of its own")
def test_a_failed_job_goes_on_from_its_last_commit_and_ends_where_it_would_have(results: Any) -> None:
    done, folder = results
    assert len(list(folder.iterdir())) == 2, done.stderr
    first, second = (json.loads((folder / f"result.{rank}").read_text()) for rank in range(2))
    assert first == second
    calls = {"nothing": [0], "mismatch": [0, 4], "one rank": [0, 4], "hosts": [0, 6]}
    # An error which comes again every time ends the job.
    always = first["dense"].pop("always")
    assert (always["calls"], always["error"]) == ([0, 4, 4], "MismatchError")
    for done_by in first.values():
        for mode, result in done_by.items():
            assert (result["calls"], result["error"]) == (calls[mode], "")
            assert result["resets"] == [2] * (len(calls[mode]) - 1)
            assert result["parameters"] == done_by["nothing"]["parameters"]


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


Adam = torch.optim.Adam
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "dense": lambda model, **more: hvd.DistributedOptimizer(
        Adam(model.parameters(), 0.01), model.named_parameters(), **more
    ),
    "1-bit Adam": lambda model, **more: hvd.DistributedOneBitAdam(
        Adam(model.parameters(), 0.01), model.named_parameters(), freeze_step=3, **more
    ),
    "0/1 Adam": lambda model, **more: hvd.DistributedZeroOneAdam(
        Adam(model.parameters(), 0.01), model.named_parameters(), local_step_start=4, local_step_doubling=4, **more
    ),
    "DiLoCo": lambda model, **more: hvd.DistributedDiLoCo(
        Adam(model.parameters(), 0.01), model.named_parameters(), sync_every=4, delay=2, bits=8, **more
    ),
}


def train(
    session: Session,
    kind: str,
    folder: Path,
    batches: int,
    *,
    shared: bool = True,
    commits: int = 2,
    process_set: hvd.ProcessSet | None = None,
) -> tuple[list[list[int]], list[float], Any]:
    """Samples and parameters of a training up to so many batches, and what the state says that it began with."""
    me = hvd.rank()
    folder = Path(hvd.broadcast_object(str(folder)))
    place = folder if shared else folder / session.require_topology().hosts[me]
    session.settings = dataclasses.replace(session.settings, elastic_folder=str(place))
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Linear(37, 5)
    with torch.no_grad():
        model.weight.normal_(generator=generator)
        model.bias.normal_(generator=generator)
    optimizer = OPTIMIZERS[kind](model, **({} if process_set is None else {"process_set": process_set}))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    sampler = hvd.elastic.ElasticSampler(range(50), seed=3)
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, batch=0)
    samples = []

    @hvd.elastic.run
    def loop(state: Any) -> None:
        order = list(sampler)
        for number in range((len(order) + 1) // 2):
            if state.batch == batches:
                return
            mine = order[2 * number : 2 * number + 2]
            samples.append(mine)
            optimizer.zero_grad()
            inputs = torch.stack([torch.sin(torch.arange(37) * (i + 1.0)) for i in mine])
            model(inputs).square().sum().backward()
            optimizer.step()
            scheduler.step()
            sampler.record_batch(number, 2)
            state.batch += 1
            if state.batch % commits == 0:
                state.commit()

    loop(state)
    if kind == "DiLoCo":
        optimizer.finish()
    values = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    return samples, values, state.resumed


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_job_that_is_started_again_goes_on_bit_for_bit_wherever_its_ranks_are(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorCodec, "pickle", None)  # whose states need none
    whole = run_ranks(2, lambda session: train(session, kind, tmp_path / "whole", 9))
    # Of the first job what came after commit 3, of batch 6, is lost. Then the ranks have changed places.
    for hosts, batches in ((["a", "b"], 7), (["b", "a"], 9)):
        again = run_ranks(
            2, lambda session, batches=batches: train(session, kind, tmp_path, batches, shared=False), hosts=hosts
        )
    for before, after in zip(whole, again, strict=True):
        assert after[0] == before[0][6:]
        assert after[1] == before[1]
    resumed = again[0][2]
    assert (resumed["commit"], resumed["ranks"], resumed["lost_ranks"]) == (3, 2, [])
    assert kind == "dense" or resumed["optimizer"]["rank_state"] == "loaded"


@pytest.mark.parametrize("kind", ["0/1 Adam", "DiLoCo"])
def test_a_state_that_is_synchronized_between_two_syncs_leaves_each_rank_its_own_parameters(kind: str) -> None:
    def body(session: Session) -> list[float]:
        model = torch.nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = OPTIMIZERS[kind](model)
        state = hvd.elastic.TorchState(model, optimizer)
        noise = torch.Generator().manual_seed(hvd.rank())
        for _ in range(20):
            model.weight.grad = torch.randn(1, 3, generator=noise)
            optimizer.step()
            if not optimizer.compression_report()["synced"]:
                break
        before = model.weight.flatten().tolist()
        state.sync()
        assert model.weight.flatten().tolist() == before
        return before

    first, second = run_ranks(2, body)
    assert first != second


def test_a_rank_whose_step_after_a_sync_changed_nothing_does_not_leave_the_others_waiting() -> None:
    def body(session: Session) -> tuple[bool, list[float]]:
        model = torch.nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        adam = Adam(model.parameters(), 0.01)
        optimizer = hvd.DistributedDiLoCo(adam, model.named_parameters(), sync_every=2)
        state = hvd.elastic.TorchState(model, optimizer)
        for step in range(3):
            is_nan = step == 2 and hvd.rank() == 1
            model.weight.grad = torch.full((1, 3), torch.nan) if is_nan else torch.ones(1, 3)
            optimizer.step()
        synced, before = optimizer.compression_report()["synced"], model.weight.flatten().tolist()
        state.sync()
        assert model.weight.flatten().tolist() == before
        return synced, before

    (moved, first), (stayed, second) = run_ranks(2, body)
    assert (moved, stayed) == (False, True) and first != second


def there_and_back(value: Any) -> tuple[Any, bytes]:
    file = io.BytesIO()
    plain.dump(value, file, TensorCodec())
    file.seek(0)
    return plain.load(file, TensorCodec()), file.getvalue()


DTYPES = "float32 float64 bfloat16 float16 int8 uint8 int64 bool complex64 float8_e4m3fn"


@pytest.mark.skipif(MPI_SIZE > 0, reason="one rank")
def test_masks_of_dropout_stay_after_a_failure_within_an_epoch_if_the_loader_has_a_generator() -> None:
    def body(session: Session, fails: bool) -> list[float]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
        dataset = torch.utils.data.TensorDataset(torch.randn(12, 3))
        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, 2, sampler=sampler, generator=torch.Generator())
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)
        fail_at = [9] if fails else []

        @hvd.elastic.run
        def loop(state: Any) -> None:
            for state.epoch in range(state.epoch, 3):  # noqa: B020
                for number, (inputs,) in enumerate(loader):
                    optimizer.zero_grad()
                    model(inputs).square().sum().backward()
                    optimizer.step()
                    sampler.record_batch(number, 2)
                    state.batch += 1
                    if [state.batch] == fail_at:
                        fail_at.clear()
                        raise hvd.HorovodInternalError("on purpose")
                    if state.batch % 4 == 0:
                        state.commit()
                sampler.set_epoch(state.epoch + 1)

        loop(state)
        assert not fail_at
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()

    whole, again = (run_ranks(1, lambda session, fails=fails: body(session, fails)) for fails in (False, True))
    assert whole == again


@pytest.mark.skipif(MPI_SIZE > 0, reason="one rank")
@pytest.mark.parametrize("kind", [*OPTIMIZERS, "int8"])
def test_gradients_of_a_step_that_is_given_up_are_gone_when_it_is_made_again(kind: str) -> None:
    more: dict[str, Any] = {} if kind == "DiLoCo" else {"backward_passes_per_step": 2}
    if kind == "int8":
        more["compression"] = hvd.Compression.int8

    def body(session: Session, fail_at: int) -> list[float]:
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
        optimizer = OPTIMIZERS[kind if kind in OPTIMIZERS else "dense"](model, **more)
        head = torch.nn.Linear(2, 1)  # without an optimizer
        state = hvd.elastic.TorchState(model, optimizer, head=head, batch=0)
        data = torch.randn(20, 4, 3)
        passes = []

        @hvd.elastic.run
        def loop(state: Any) -> None:
            assert not any(p.grad is not None and p.grad.any() for p in [*model.parameters(), *head.parameters()])
            while state.batch < 20:
                head(model(data[state.batch])).square().sum().backward()
                passes.append(state.batch)
                if len(passes) == fail_at:
                    raise hvd.HorovodInternalError("on purpose")
                state.batch += 1
                if state.batch % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    state.commit()

        loop(state)
        assert len(passes) == 20 + (2 - fail_at % 2 if fail_at else 0)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()

    whole, *again = (run_ranks(1, lambda session, at=at: body(session, at)) for at in (0, 9, 10))
    assert again == [whole, whole]


@pytest.mark.parametrize("dtype", DTYPES.split())
def test_tensors_are_written_without_pickle_and_come_back_in_every_bit(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorCodec, "pickle", None)
    for shape in [(), (0,), (3,), (1, 1), (2, 0, 3), (2, 3, 4, 5)]:
        tensor = (3 * torch.rand(shape)).to(getattr(torch, dtype))
        views = [tensor, tensor[..., ::2] if shape else tensor, tensor.expand(2, *shape)]
        views += [tensor.to(memory_format=torch.channels_last)] if len(shape) == 4 else []
        for value in views:
            back, _ = there_and_back(value)
            assert (back.dtype, back.shape) == (value.dtype, value.shape)
            assert back.tolist() == value.tolist()
    assert there_and_back(views[-1])[0].stride() == views[-1].stride()  # of channels_last


def test_tied_parameters_are_written_once_and_other_objects_as_torch_does() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 30))
    model[2].weight = model[0].weight
    back, data = there_and_back(model.state_dict())
    assert back["0.weight"] is back["2.weight"] and len(data) < 2 * 30 * 30 * 4
    assert back._metadata == model.state_dict()._metadata and b"torch" not in data
    parameter, size = there_and_back([torch.nn.Parameter(torch.ones(2)), torch.Size([2])])[0]
    assert type(parameter) is torch.nn.Parameter and size == torch.Size([2])


def test_tensors_of_one_memory_that_mean_different_things_stay_apart() -> None:
    waves = torch.tensor([1 + 2j, 3 - 4j])
    weight = torch.ones(2, requires_grad=True)
    views = [waves, waves.conj(), waves.imag, waves.conj().imag, weight, weight.detach()]
    back, _ = there_and_back(views)
    assert [view.tolist() for view in back] == [view.tolist() for view in views]
    assert [view.requires_grad for view in back] == [view.requires_grad for view in views]


@pytest.mark.short("acde")
@pytest.mark.parametrize("kind", ["1-bit Adam", "0/1 Adam", "DiLoCo"])
@pytest.mark.parametrize("hosts", [["a", "b", "c"], ["a", "c", "d"], ["a", "c", "d", "e"]], ids="".join)
def test_with_a_host_its_errors_are_lost_and_the_report_says_what_share_that_was(
    kind: str, hosts: list[str], tmp_path: Path
) -> None:
    run_ranks(4, lambda session: train(session, kind, tmp_path, 4, shared=False), hosts=["a", "b", "c", "d"])
    again = run_ranks(len(hosts), lambda session: train(session, kind, tmp_path, 8, shared=False), hosts=hosts)
    assert all(values == again[0][1] for _, values, _ in again)
    for _, _, resumed in again:
        lost = [rank for rank, host in enumerate("abcd") if host not in hosts]
        assert (resumed["commit"], resumed["ranks"], resumed["lost_ranks"]) == (2, 4, lost)
        optimizer = resumed["optimizer"]
        assert optimizer["rank_state"] == ("loaded" if len(hosts) == 4 else "re-sharded")
        assert optimizer["lost_ranks"] == lost
        assert 0.0 <= optimizer["lost_owner_share"] < 1.0
    # What the lost rank had processed is not given out again: all ranks know of it since the commit.
    done = {i for samples, _, _ in again for batch in samples for i in batch}
    assert len(done) <= 50 - 4 * 2 * 4 + 2 * len(hosts)


def test_states_of_process_sets_come_back_by_themselves(tmp_path: Path) -> None:
    def body(session: Session, batches: tuple[int, int]) -> Any:
        team = hvd.rank() // 2
        process_set = hvd.ProcessSet([2 * team, 2 * team + 1])
        return train(session, "1-bit Adam", tmp_path, batches[team], commits=1 + team, process_set=process_set)

    sets = [[0, 1], [2, 3]]
    run_ranks(4, lambda session: body(session, (3, 5)), process_sets=sets)
    again = run_ranks(4, lambda session: body(session, (4, 6)), process_sets=sets)
    assert [resumed["commit"] for _, _, resumed in again] == [3, 3, 2, 2]
    assert [len(samples) for samples, _, _ in again] == [1, 1, 2, 2]
    assert again[0][1] == again[1][1] != again[2][1] == again[3][1]


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
        given, left = {i for part in rest for i in part}, set(range(length)) - done
        assert left <= given <= left | {everyone[i % size][i // size] for i in range(size) if left}
        assert len({len(part) for part in rest}) == 1
        sampler.set_epoch(3)
        state.restore()
        assert (sampler.epoch, sampler.processed_indices) == (2, done)

    run_ranks(size, body)


def test_samples_since_the_last_commit_are_shared_before_an_interrupt_without_a_sync() -> None:
    def body(session: Session) -> Any:
        sampler = hvd.elastic.ElasticSampler(range(13))
        state = hvd.elastic.TorchState(sampler=sampler)
        list(sampler)
        sampler.record_batch(0, 2)
        if hvd.rank() == 1:
            state.on_hosts_updated(added=False)
        with pytest.raises(HostsUpdatedInterrupt):
            state.check_host_updates()
        state.on_reset()
        return sampler.processed_indices, list(sampler)

    (done, first), (same, second) = run_ranks(2, body)
    assert len(done) == 4 and done == same
    assert len(first) == len(second) == 5 and set(range(13)) - done <= set(first + second)
