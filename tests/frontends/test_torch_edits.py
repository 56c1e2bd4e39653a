"""What users do to gradients between backward() and step(): the step is made with what they have left there.

Every way of changing a gradient is compared with the same change where nothing overlaps. The changes are small (one
row, one element), so that a look at a part of each gradient is not enough, and come when the exchange has begun.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ocomm.api import barrier, rank
from ocomm.errors import InvalidRequestError
from ocomm.session import Session
from ocomm_torch.compression import Compression
from ocomm_torch.optimizer import DistributedOptimizer
from ocomm_torch.optimizers.onebit import DistributedOneBitAdam
from ocomm_torch.optimizers.zero_one import DistributedZeroOneAdam
from tests.frontends.onebit_jobs import digest
from tests.tiers import few
from tests.world.test_runtime import threads_only
from tests.worlds import run_ranks

pytestmark = threads_only  # nothing here depends on the network

ROWS, COLUMNS = 300, 40
STEPS, FREEZE_STEP, FIRST_EDIT = 10, 2, 6


class Model(torch.nn.Module):
    """An embedding of several bucket parts, a matrix, a bias, and a parameter of three that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.table = torch.nn.Parameter(torch.randn(ROWS, COLUMNS, generator=generator))
        self.matrix = torch.nn.Parameter(torch.randn(COLUMNS, COLUMNS, generator=generator))
        self.bias = torch.nn.Parameter(torch.randn(COLUMNS, generator=generator))
        self.unused = torch.nn.Parameter(torch.ones(3))

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank())
        rows = torch.randint(0, ROWS, (64,), generator=generator)
        rows[0] = 0
        return (self.table[rows].tanh() @ self.matrix + self.bias).square().mean() * 50


Parameters = list[torch.nn.Parameter]


def grads(parameters: Parameters) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def by_address(parameters: Parameters) -> None:
    for grad in grads(parameters):
        ctypes.memset(grad.data_ptr() + 4 * (grad.numel() // 2), 0, 4)


def by_numpy(parameters: Parameters) -> None:
    for grad in grads(parameters):
        array = grad.numpy().reshape(-1)
        np.multiply(array[:2], 0.5, out=array[:2])


def by_array(parameters: Parameters) -> None:
    for grad in grads(parameters):
        np.asarray(grad)[-1] = 0.0


def by_dlpack(parameters: Parameters) -> None:
    for grad in grads(parameters):
        torch.from_dlpack(grad)[0].mul_(0.25)


def by_prune_mask(parameters: Parameters) -> None:
    mask = torch.ones(ROWS, 1)
    mask[:: ROWS // 3] = 0
    assert parameters[0].grad is not None
    parameters[0].grad.data.mul_(mask)


def by_view_of_data(parameters: Parameters) -> None:
    for grad in grads(parameters):
        grad.view(-1).data[1] = 0.0


def by_storage(parameters: Parameters) -> None:
    for grad in grads(parameters):
        torch.empty(0).set_(grad.untyped_storage())[2] = 0.0


def by_new_data(parameters: Parameters) -> None:
    for grad in grads(parameters):
        grad.data = grad.data * 0.5


def by_new_gradient(parameters: Parameters) -> None:
    for p in parameters:
        p.grad = None if p.grad is None else p.grad * 0.5


def by_setting_none(parameters: Parameters) -> None:
    parameters[1].grad = None


EDITS: dict[str, Callable[[Parameters], Any]] = {
    "one row by data": lambda ps: ps[0].grad.data[0].zero_(),
    "clamped by data": lambda ps: [grad.data.clamp_(-0.05, 0.05) for grad in grads(ps)],
    "foreach of data": lambda ps: torch._foreach_mul_([grad.data[:1] for grad in grads(ps)], 0.5),
    "scaled in place": lambda ps: [grad.mul_(0.5) for grad in grads(ps)],
    "one element": lambda ps: [grad.__setitem__(-1, 0.0) for grad in grads(ps)],
    "detached": lambda ps: [grad.detach()[0].zero_() for grad in grads(ps)],
    "clip_grad_norm_": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.1),
    "clip_grad_value_": lambda ps: torch.nn.utils.clip_grad_value_(ps, 0.01),
    "out=": lambda ps: torch.mul(ps[1].detach(), 0.01, out=ps[1].grad),
    "prune mask": by_prune_mask,
    "address": by_address,
    "numpy": by_numpy,
    "asarray": by_array,
    "dlpack": by_dlpack,
    "view of data": by_view_of_data,
    "storage": by_storage,
    "new data": by_new_data,
    "new gradient": by_new_gradient,
    "no gradient": by_setting_none,
}


def train(
    wrap: Callable[[Model], Any], edit: Callable[[Parameters], Any], *, synchronize: bool = False, zero: bool = False
) -> str:
    """Hash of the parameters at the end. ``synchronize`` before each edit; ``zero``: gradients keep their memory."""
    model = Model()
    parameters = list(model.parameters())
    optimizer = wrap(model)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not zero)
        model.loss(step).backward()
        barrier()  # the exchange of what was handed over has begun on all ranks
        if synchronize:
            optimizer.synchronize()
        if step >= FIRST_EDIT:
            edit(parameters)
        if synchronize:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return digest([p.detach().numpy() for p in parameters])


def compressed(**options: Any) -> Callable[[Model], Any]:
    def wrap(model: Model) -> Any:
        adam = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
        return DistributedOneBitAdam(adam, model.named_parameters(), freeze_step=FREEZE_STEP, **options)

    return wrap


def dense(model: Model) -> Any:
    return DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2), model.named_parameters())


def same_everywhere(body: Callable[[], str]) -> str:
    def on_rank(session: Session) -> str:
        return body()

    results = run_ranks(2, on_rank)
    assert len(set(results)) == 1, "the replicas differ"
    return results[0]


@functools.cache
def without_edits() -> str:
    return same_everywhere(lambda: train(compressed(), lambda parameters: None))


@pytest.mark.parametrize("way", few(EDITS, list(EDITS)[::4]))
def test_a_compressed_step_has_every_edit_of_a_gradient(way: str) -> None:
    edit = EDITS[way]
    expected = same_everywhere(lambda: train(compressed(overlap=False), edit))
    assert same_everywhere(lambda: train(compressed(), edit)) == expected
    assert without_edits() != expected


#: One for each way to look: versions, tensors that watch, another gradient or none. Compressed steps have all edits.
WATCHED = ("scaled in place", "clip_grad_norm_", "one row by data", "numpy", "new gradient", "no gradient")


@pytest.mark.parametrize("way", few(EDITS, WATCHED))
def test_a_dense_step_has_every_edit_of_an_averaged_gradient_where_a_parameter_has_none(way: str) -> None:
    edit = EDITS[way]
    expected = same_everywhere(lambda: train(dense, edit, synchronize=True))
    assert same_everywhere(lambda: train(dense, edit)) == expected


def warned(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    found = [record.getMessage() for record in caplog.records if text in record.getMessage()]
    caplog.clear()
    return found


def test_a_change_of_gradients_that_are_not_averaged_is_one_warning_with_two_norms(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def clip(parameters: Parameters) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 0.1 * (1 + rank()))

    def on_one_rank(parameters: Parameters) -> None:
        if rank():
            clip(parameters)

    def zero(parameters: Parameters) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 0.0)

    def clear_on_one_rank(parameters: Parameters) -> None:
        if rank():
            torch._foreach_zero_([parameter.grad for parameter in parameters[:3]])

    def pass_again(parameters: Parameters) -> None:
        sum(p.square().sum() for p in parameters[:3]).backward()

    clips, passes = "pass max_grad_norm", "pass backward_passes_per_step"
    same_everywhere(lambda: train(compressed(), clip))
    (said,) = warned(caplog, "OneBitAdam")
    assert "their norm is now 0.1 on rank 0 and 0.2 on rank 1." in said and 0 < said.find(clips) < said.find(passes)
    same_everywhere(lambda: train(compressed(), pass_again))
    (said,) = warned(caplog, "OneBitAdam")
    assert "their norm is now " in said and 0 < said.find(passes) < said.find(clips)
    same_everywhere(lambda: train(compressed(), zero))
    (said,) = warned(caplog, "OneBitAdam")
    cleared = "Something has cleared them, such as model.zero_grad(), and the step goes without them: call"
    assert f"their norm is now 0 on all ranks. {cleared} zero_grad() before backward. The step" in said
    assert clips not in said and passes not in said
    same_everywhere(lambda: train(compressed(), clear_on_one_rank))
    (said,) = warned(caplog, "OneBitAdam")
    assert f" on rank 0. {cleared}" in said and "their norm is now 0 on rank 1 and " in said
    same_everywhere(lambda: train(compressed(), on_one_rank))
    (said,) = warned(caplog, "OneBitAdam")
    assert "changed between backward and step()" in said and "0.2 on rank 1" in said
    same_everywhere(lambda: train(compressed(overlap=False), clip))
    same_everywhere(lambda: train(compressed(max_grad_norm=0.1), lambda parameters: None))
    same_everywhere(lambda: train(dense, clip_all))
    assert warned(caplog, "") == []


@pytest.mark.parametrize(
    ("wrap", "name", "set_to", "text"),
    [
        (DistributedZeroOneAdam, "lr", 1e-3, "lr, a beta or a weight decay was set between backward and step()"),
        (DistributedOneBitAdam, "betas", (0.8, 0.99), ": a beta or a weight decay was set between backward and step()"),
        (DistributedOneBitAdam, "lr", 1e-3, ""),
    ],
    ids=["lr of 0/1 Adam", "betas", "lr"],
)
def test_a_hyperparameter_that_is_set_after_backward_is_named_as_the_cause(
    wrap: Any, name: str, set_to: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    def job(overlap: bool) -> list[str]:
        def body(session: Session) -> None:
            model = Model()
            inner = torch.optim.Adam(model.parameters(), lr=1e-2)
            optimizer = wrap(inner, model.named_parameters(), overlap=overlap)
            for step in range(4):
                optimizer.zero_grad()
                model.loss(step).backward()
                if step == 2:  # the first step does not overlap
                    optimizer.param_groups[0][name] = set_to
                optimizer.step()

        run_ranks(2, body)
        return warned(caplog, "nothing overlaps")

    assert job(False) == []
    said = job(True)
    assert len(said) == bool(text) and all(text in one for one in said)


def clip_all(parameters: Parameters) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.1)


@pytest.mark.parametrize("compression", [Compression.none, Compression.int8])
def test_a_clip_before_an_average_of_which_a_rank_has_no_gradient_is_a_warning_that_names_it(
    compression: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Session, synchronizes: bool) -> list[float]:
        parameters = {name: torch.nn.Parameter(torch.ones(3)) for name in ("all", "rank 0", "nobody")}
        inner = torch.optim.SGD(parameters.values(), lr=1.0)
        optimizer = DistributedOptimizer(inner, list(parameters.items()), compression=compression)
        for _ in range(2):
            (parameters["all"] * 3 + (0 if rank() else parameters["rank 0"])).sum().backward()
            if synchronizes:
                optimizer.synchronize()
            clip_all(list(parameters.values()))
            with optimizer.skip_synchronize() if synchronizes else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()
        return parameters["all"].tolist()

    first, second = run_ranks(2, lambda session: body(session, False))
    assert first != second
    (said,) = warned(caplog, "this rank had none")
    assert "had none of 'rank 0'" in said and "Call optimizer.synchronize() after backward" in said
    first, second = run_ranks(2, lambda session: body(session, True))
    assert first == second and warned(caplog, "this rank had none") == []


@pytest.mark.parametrize("clips", [False, True], ids=["alone", "and a clip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_grad_scaler_is_no_change_by_the_script(
    dtype: torch.dtype, clips: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Session) -> None:
        model = Model().to(dtype)
        optimizer = compressed()(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(model.loss(step) / 50).backward()
            barrier()
            scaler.unscale_(optimizer)
            if clips:
                clip_all(list(model.parameters()))
            scaler.step(optimizer)
            scaler.update()

    run_ranks(2, body)
    (said,) = warned(caplog, "OneBitAdam")
    assert ("changed between backward and step()" in said) is clips and ("loss scaling" in said) is not clips


@pytest.mark.parametrize(
    ("wrong", "warnings"), [("nothing", 0), ("data", 1), ("data, later", 0), ("zeros", 0)], ids=lambda value: str(value)
)
def test_equal_gradients_of_all_ranks_before_they_are_averaged_are_a_warning(
    wrong: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Session) -> None:
        model = Model()
        optimizer = dense(model)
        for step in range(5):
            generator = torch.Generator().manual_seed(
                0 if wrong == "data" or (wrong == "data, later" and step > 1) else rank()
            )
            optimizer.zero_grad()
            loss = (model.table[:8] @ model.matrix @ torch.randn(COLUMNS, generator=generator)).square().mean()
            (loss * (wrong != "zeros")).backward()
            optimizer.step()

    run_ranks(2, body)
    found = warned(caplog, "the same gradients")
    assert len(found) == warnings
    assert all("DistributedOptimizer: all ranks" in said and "DistributedSampler" in said for said in found)


@pytest.mark.long
@pytest.mark.parametrize("way", EDITS)
def test_equal_runs_give_equal_results_fifty_times(way: str) -> None:
    for wrap in (compressed(), dense):
        assert len({same_everywhere(lambda wrap=wrap: train(wrap, EDITS[way])) for _ in range(50)}) == 1


@pytest.mark.parametrize("way", ["numpy", "data"])
def test_an_edit_through_what_was_taken_of_a_lasting_gradient_is_noticed(way: str) -> None:
    def body(overlap: bool) -> str:
        taken: list[Any] = []

        def edit(parameters: Parameters) -> None:
            if not taken:
                taken.extend(grad.numpy() if way == "numpy" else grad.data for grad in grads(parameters))
            else:
                for alias in taken:
                    alias[0] *= 0.5

        return train(compressed(overlap=overlap), edit, zero=True)

    assert same_everywhere(lambda: body(True)) == same_everywhere(lambda: body(False))


def test_a_gradient_that_is_read_after_such_an_edit_keeps_the_checksum_from_before_it() -> None:
    def body(overlap: bool) -> str:
        taken: list[Any] = []

        def edit(parameters: Parameters) -> None:
            if taken:
                taken[0][0] *= 0.5
            else:
                taken.append(grads(parameters)[0].numpy())
            for grad in grads(parameters):
                grad.norm()

        return train(compressed(overlap=overlap), edit, zero=True)

    assert same_everywhere(lambda: body(True)) == same_everywhere(lambda: body(False))


def test_reading_gradients_costs_no_overlap() -> None:
    def on_rank(session: Session) -> tuple[bool, int, list[str]]:
        model = Model()
        optimizer = compressed()(model)
        kinds = []
        for step in range(STEPS):
            optimizer.zero_grad()
            model.loss(step).backward()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.norm().item()
                    kinds.append(type(p.grad).__name__)
            optimizer.step()
        report = optimizer.compression_report()
        return report["overlap"], report["redone_steps"], sorted(set(kinds))

    assert run_ranks(2, on_rank) == [(True, 0, ["Tensor"])] * 2


@pytest.mark.parametrize("kind", ["1-bit", "int8"])
def test_gradients_that_are_parts_of_one_buffer_cost_no_overlap(kind: str) -> None:
    """They share a version, which autograd raises after the first was posted."""
    numel, tensors = 1 << 17, 3

    def on_rank(session: Session) -> tuple[bool, int, str]:
        parameters = [torch.nn.Parameter(torch.zeros(numel)) for _ in range(tensors)]
        buffer = torch.zeros(tensors, numel)
        for p, part in zip(parameters, buffer, strict=True):
            p.grad = part
        optimizer: Any = (
            DistributedOneBitAdam(torch.optim.Adam(parameters), freeze_step=FREEZE_STEP)
            if kind == "1-bit"
            else DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), compression=Compression.int8)
        )
        own = torch.linspace(-1, 1 + rank(), numel)
        for _ in range(4):
            optimizer.zero_grad(set_to_none=False)
            torch.stack([(p * own).sum() for p in parameters]).sum().backward()
            optimizer.step()
        report = optimizer.compression_report()
        before = digest([p.detach().numpy() for p in parameters])
        if kind == "1-bit":
            optimizer.zero_grad(set_to_none=False)
            torch.stack([(p * own).sum() for p in parameters]).sum().backward()
            barrier()
            buffer.mul_(0.5)
            optimizer.step()
            assert optimizer.compression_report()["redone_steps"] == 1, "a change through the buffer is noticed"
        return report["overlap"], report["redone_steps"], before

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert first[:2] == (True, 0)


def test_gradients_are_plain_tensors_after_the_step() -> None:
    def on_rank(session: Session) -> set[type]:
        found = set()
        for wrap in (compressed(), dense):
            model = Model()
            optimizer = wrap(model)
            for step in range(STEPS):
                optimizer.zero_grad()
                model.loss(step).backward()
                optimizer.step()
                found |= {type(p.grad) for p in model.parameters() if p.grad is not None}
        return found

    assert run_ranks(2, on_rank) == [{torch.Tensor}] * 2


def test_every_byte_of_a_gradient_is_read_again_within_64_steps() -> None:
    """An edit of which Torch tells nothing, by an extension say, is found out soon if it is made again and again."""

    def on_rank(session: Session) -> int:
        model = Model()
        optimizer = compressed()(model)
        for step in range(80):
            optimizer.zero_grad()
            model.loss(step).backward()
            stepper = optimizer._stepper
            if stepper.buckets.posted:
                number = stepper.core.layout.names.index("table") if hasattr(stepper.core.layout, "names") else 0
                ctypes.memset(int(stepper.buckets.addresses[number]) + 4 * COLUMNS * (ROWS // 2), 1, 4)
            optimizer.step()
        return optimizer.compression_report()["redone_steps"]

    assert run_ranks(2, on_rank) == [1, 1]  # and no overlap after that


def test_a_sparse_gradient_that_is_used_while_it_is_averaged_is_refused_by_name() -> None:
    def on_rank(session: Session) -> str:
        model = torch.nn.Embedding(10, 4, sparse=True, _weight=torch.ones(10, 4))
        unused = torch.nn.Parameter(torch.ones(2))
        optimizer = DistributedOptimizer(
            torch.optim.SGD([model.weight, unused], lr=0.1), [("table", model.weight), ("unused", unused)]
        )
        model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(InvalidRequestError) as error:
            model.weight.grad.mul_(2.0)
        optimizer.step()
        return str(error.value)

    assert (
        run_ranks(2, on_rank)
        == [
            "the sparse gradient of 'table' was used while it was being averaged, and its average will be another "
            "tensor. Call optimizer.synchronize() before you use it."
        ]
        * 2
    )
