"""The core of 1-bit Adam against its plain simulation: every bit, on every rank, after every step.

The ranks live side by side in one ``World``, which passes their messages around by hand: no transport, no thread.
"""

from __future__ import annotations

import numpy as np
import pytest

from ocomm.compression.layout import Layout, TensorSpec
from ocomm.errors import NonFiniteError, SettingsError
from ocomm.kernels.reference import ReferenceKernels
from ocomm.optim.checkpoint import Resharding
from ocomm.optim.core import Group
from ocomm.optim.freeze import LateTensors
from ocomm.optim.onebit_adam import OneBitAdam, OneBitAdamOptions, Stage
from tests.oracle.onebit_adam import Simulation, simulate

SHAPES = [(5, 33), (7,), (12, 16), (1,), (40,)]
EMBEDDING, UNUSED = 2, 4  # rows of the one are used late or never; the other has no gradient until late
WARMUP = 6
NOTHING = np.zeros(0, np.float32)  # no tensor travels dense here


class World:
    """n cores, each with its own parameters."""

    def __init__(self, ranks, *, shapes=SHAPES, block_size=32, **options):
        self.kernels = ReferenceKernels()
        self.layout = Layout([TensorSpec(f"t{k}", shape) for k, shape in enumerate(shapes)], ranks, block_size)
        self.cores = [
            OneBitAdam(self.layout, rank, self.kernels, OneBitAdamOptions(**options)) for rank in range(ranks)
        ]
        self.params = [[np.zeros(s, np.float32) for s in shapes] for _ in range(ranks)]
        for core, params in zip(self.cores, self.params, strict=True):
            core.tensors["param"] = [p.ctypes.data for p in params]

    def set_buckets(self, split=1, segment_nbytes=1 << 20):
        """All compressed tensors, last first, in ``split`` buckets."""
        ready = np.flatnonzero(self.cores[0].stage)[::-1]
        for core in self.cores:
            core.set_buckets([part.tolist() for part in np.array_split(ready, split)], segment_nbytes)

    def set_hyper(self, lr, beta1=0.9, **decay):
        for core in self.cores:
            core.set_hyper(Group(np.arange(len(self.layout.tensors)), lr, (beta1, 0.999), **decay))

    def exchange(self, gradients):
        """All that happens before the commit; returns which tensors have a gradient on some rank."""
        flags = np.zeros(1, np.uint32)
        present = np.zeros(len(self.layout.tensors), bool)
        for core, local in zip(self.cores, gradients, strict=True):
            core.tensors["grad"] = [0 if g is None else g.ctypes.data for g in local]
        for k in range(len(self.cores[0].segments)):
            layouts = [core.segments[k].layout for core in self.cores]
            packed = [np.zeros(layout.packed_nbytes, np.uint8) for layout in layouts]
            for core, local, layout, buffer in zip(self.cores, gradients, layouts, packed, strict=True):
                core.compress(k, buffer, flags).run(self.kernels)
                mine = np.array([g is not None for g in local])
                layout.read_presence(layout.presence_bits(mine), present)
            messages = [
                slice(start, start + nbytes)
                for start, nbytes in zip(layouts[0].message_start, layouts[0].message_nbytes, strict=True)
            ]
            for core, message in zip(self.cores, messages, strict=True):
                core.average(k, [buffer[message] for buffer in packed], flags).run(self.kernels)
            for core in self.cores:
                for owner, message in zip(self.cores, messages, strict=True):
                    core.result(k)[message] = owner.result(k)[message]
        return present

    def finish(self, present):
        """Commit, update, and wake where it is due."""
        for core in self.cores:
            core.commit(present, NOTHING)
        assert len({core.wake_due for core in self.cores}) == 1
        if self.cores[0].wake_due:
            touched = np.bitwise_or.reduce([core.touched() for core in self.cores])
            for core in self.cores:
                core.wake(touched)

    def step(self, gradients):
        self.finish(self.exchange(gradients))

    def state(self):
        """Everything that a step may change, as bytes."""
        return [
            (
                [p.tobytes() for p in params],
                core.error.tobytes(),
                core.server_error.tobytes(),
                [core.momentum(t).tobytes() for t in np.flatnonzero(core.stage)],
                core.steps.tobytes(),
                core.preconditioner.mask.tobytes(),
                core.preconditioner.denominator.tobytes(),
                core.compressed_steps,
            )
            for core, params in zip(self.cores, self.params, strict=True)
        ]


def make_gradients(steps, ranks, seed=0, missing=0.0):
    """gradients[t - 1][rank][tensor]; tensors of very different size, an embedding with rows that come late."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-4, 1, len(SHAPES))
    history = []
    for t in range(1, steps + 1):
        now = [
            [(rng.standard_normal(s) * size).astype(np.float32) for s, size in zip(SHAPES, sizes, strict=True)]
            for _ in range(ranks)
        ]
        nowhere = rng.random(len(SHAPES)) < missing
        for rank, local in enumerate(now):
            rows = local[EMBEDDING]
            rows[9:] = 0  # never used
            if t < 20:
                rows[4:8] = 0
            if t % ranks != rank:
                rows[8] = 0
            for tensor in range(len(SHAPES)):
                if nowhere[tensor] or rng.random() < missing:
                    local[tensor] = None
            if t < 15:
                local[UNUSED] = None
        history.append(now)
    return history


def assert_equal(world, simulation):
    for rank, (core, params) in enumerate(zip(world.cores, world.params, strict=True)):
        for index, x in enumerate(simulation.tensors):
            np.testing.assert_array_equal(params[index].reshape(-1), x.param)
            assert bool(core.stage[index]) == x.compressed
            if not x.compressed:
                continue
            span = slice(world.layout.offsets[index], world.layout.offsets[index] + x.param.size)
            np.testing.assert_array_equal(core.momentum(index), x.momentum)
            np.testing.assert_array_equal(core.error[span], x.errors[rank])
            divisor = core.preconditioner
            np.testing.assert_array_equal(divisor.denominator[span][~x.mask], x.denominator[~x.mask])
            lengths = world.layout.tensor_blocks(index)["length"]
            np.testing.assert_array_equal(
                np.repeat(divisor.block_root[divisor._block_span(index)], lengths), x.root_mean
            )
            assert core.steps[index] == x.step
            assert core.preconditioner.masked[index] == x.mask.sum()
            for block in world.layout.tensor_blocks(index):
                if block["owner"] == rank:
                    mine = core.server_error[block["owned"] : block["owned"] + block["length"]]
                    whole = x.server_error[block["start"] : block["start"] + block["length"]]
                    np.testing.assert_array_equal(mine, whole)


def follow(world, simulation, gradients, late, lr, buckets=lambda t: None, **decay):
    """Steps both; the dense steps are the simulation's, the compressed ones the world's own."""
    for t, now in enumerate(gradients, 1):
        if world.cores[0].stage.any():
            choice = buckets(t)
            if choice:
                world.set_buckets(*choice)
            world.set_hyper(lr(t), **decay)
            world.step(now)
        simulation.step(now)
        changed = False
        for index, x in enumerate(simulation.tensors):
            if world.cores[0].stage[index]:
                continue
            for params in world.params:
                params[index].reshape(-1)[:] = x.param
            used = bool(x.variance.any())
            if t == WARMUP or (t > WARMUP and late.observe(index, x.step, used, WARMUP)):
                frozen = {
                    core.freeze(index, x.momentum.copy(), x.variance, step=x.step, beta2=0.99, eps=1e-8)
                    for core in world.cores
                }
                assert frozen == {used}
                changed |= used
        if changed:
            world.set_buckets(2, 100)
        assert_equal(world, simulation)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("options", "decay"),
    [
        ({"variance_floor": 0.9}, {}),
        ({"scale": "rms", "variance_floor": 0.0}, {"coupled_decay": 0.01}),
        ({"block_size": "tensor", "variance_floor": 0.3}, {"decoupled_decay": 0.1}),
    ],
    ids=["plain", "rms-coupled", "tensor-decoupled"],
)
def test_every_bit_equals_the_simulation(ranks, options, decay):
    options = {"block_size": 32, "mask_refresh": 5, **options}

    def lr(t):
        return 1e-2 * min(1, t / 10)

    world = World(ranks, **options)
    rng = np.random.default_rng(1)
    initial = [rng.standard_normal(s).astype(np.float32) for s in SHAPES]
    simulation = Simulation(
        initial,
        ranks,
        freeze_step=WARMUP,
        lr=lr,
        betas=(0.9, 0.99),
        weight_decay=sum(decay.values()),
        decoupled="decoupled_decay" in decay,
        **options,
    )
    # Coupled decay gives every element a gradient, and so no mask, unless it is 0.
    for row in range(4, 12):
        simulation.tensors[EMBEDDING].param.reshape(12, 16)[row] = 0
    late = LateTensors()
    follow(world, simulation, make_gradients(52, ranks, missing=0.1), late, lr, **decay)
    assert world.cores[0].stage.all()
    assert world.cores[0].preconditioner.woken == simulation.woken >= 64  # four late rows
    assert world.cores[0].preconditioner.masked[EMBEDDING] == 48  # three rows are never used


def started(ranks, *, buckets=1, segment_nbytes=1 << 20, missing=0.0, steps=30, **options):
    """A world after its freeze, without late tensors, and gradients for ``steps`` compressed steps."""
    world = World(ranks, **options)
    rng = np.random.default_rng(2)
    for index, shape in enumerate(SHAPES):
        param = rng.standard_normal(shape).astype(np.float32)
        momentum = (rng.standard_normal(shape) * 0.1).astype(np.float32)
        variance = rng.random(shape).astype(np.float32)
        if index == EMBEDDING:
            momentum[4:] = variance[4:] = 0
        for core, params in zip(world.cores, world.params, strict=True):
            params[index][...] = param
            core.freeze(index, momentum, variance, step=10, beta2=0.99, eps=1e-8)
    world.set_buckets(buckets, segment_nbytes)
    gradients = make_gradients(steps + 20, ranks, seed=3, missing=missing)[20:]
    return world, gradients


def test_the_result_does_not_depend_on_buckets_or_segments_even_if_they_change():
    plain, gradients = started(3, missing=0.2, mask_refresh=4)
    other, _ = started(3, missing=0.2, mask_refresh=4, buckets=3, segment_nbytes=40)
    for t, now in enumerate(gradients):
        if t % 7 == 3:
            other.set_buckets(1 + t % 4, 30 + 17 * t)
        for world in (plain, other):
            world.set_hyper(1e-3)
            world.step(now)
        assert plain.state() == other.state()


def test_a_discarded_exchange_changes_nothing_and_can_be_repeated():
    world, gradients = started(2, missing=0.2, mask_refresh=4)
    undisturbed, _ = started(2, missing=0.2, mask_refresh=4)
    for before, now in zip(gradients[1:], gradients, strict=False):
        for each in (world, undisturbed):
            each.set_hyper(1e-3)
        state = world.state()
        world.exchange(before)  # and no commit
        assert world.state() == state
        world.step(now)
        undisturbed.step(now)
        assert world.state() == undisturbed.state()


def test_all_ranks_hold_the_same_parameters_and_momentum_after_every_step():
    world, gradients = started(4, missing=0.3)
    for now in gradients:
        world.set_hyper(1e-3)
        world.step(now)
        for params, core in zip(world.params[1:], world.cores[1:], strict=True):
            for index, param in enumerate(params):
                assert param.tobytes() == world.params[0][index].tobytes()
                assert core.momentum(index).tobytes() == world.cores[0].momentum(index).tobytes()


def whole_server_error(world):
    flat = np.zeros(world.layout.flat_numel)
    for block in world.layout.blocks:
        owned = slice(block["owned"], block["owned"] + block["length"])
        flat[block["offset"] : block["offset"] + block["length"]] = world.cores[block["owner"]].server_error[owned]
    return flat


def test_sent_is_received_plus_residuals_over_any_number_of_steps():
    world, gradients = started(3)
    layout = world.layout
    sent = np.zeros(layout.flat_numel)
    received = np.zeros(layout.flat_numel)
    for now in gradients:
        for index in range(len(SHAPES)):
            span = slice(layout.offsets[index], layout.offsets[index] + layout.numels[index])
            before = world.cores[0].momentum(index)
            sent[span] += np.mean([0.9 * before + 0.1 * local[index].reshape(-1) for local in now], axis=0)
        world.set_hyper(1e-3)
        world.step(now)
        for index in range(len(SHAPES)):
            span = slice(layout.offsets[index], layout.offsets[index] + layout.numels[index])
            received[span] += world.cores[0].momentum(index)
        residuals = np.mean([core.error for core in world.cores], axis=0) + whole_server_error(world)
        np.testing.assert_allclose(sent, received + residuals, rtol=1e-4, atol=1e-4)


def test_an_element_that_never_had_a_gradient_does_not_move():
    world, gradients = started(2, mask_refresh=3)
    before = world.params[0][EMBEDDING][9:].copy()
    used = world.params[0][EMBEDDING][:9].copy()
    for now in gradients:
        world.set_hyper(1e-2)
        world.step(now)
    np.testing.assert_array_equal(world.params[0][EMBEDDING][9:], before)
    assert (world.params[0][EMBEDDING][:9] != used).all()


def test_a_masked_element_keeps_what_its_gradients_bring_until_it_wakes():
    world, _ = started(2, mask_refresh=4)
    start = int(world.layout.offsets[EMBEDDING]) + 5 * 16
    now = [[np.zeros(s, np.float32) for s in SHAPES] for _ in range(2)]
    now[1][EMBEDDING][5] = 1.0
    for step in range(1, 5):
        world.set_hyper(1e-2, beta1=0.75)
        world.step(now)
        np.testing.assert_array_equal(world.cores[0].error[start : start + 16], 0)
        np.testing.assert_array_equal(world.cores[1].error[start : start + 16], 0.25 * step)
    for core in world.cores:
        assert core.preconditioner.woken == 16
        np.testing.assert_array_equal(core.momentum(EMBEDDING)[80:96], 0)
        # Rows 4 and 5 are one block that had no variance: the mean is the tensor's.
        mean = core.preconditioner.denominator[core.layout.offsets[EMBEDDING] :][:64].mean()
        np.testing.assert_allclose(core.preconditioner.denominator[start : start + 16], mean, rtol=1e-2)
    before = world.params[0][EMBEDDING][5].copy()
    world.set_hyper(1e-2, beta1=0.75)
    world.step(now)
    assert (world.params[0][EMBEDDING][5] < before).all()
    np.testing.assert_array_equal(world.params[0][EMBEDDING], world.params[1][EMBEDDING])


@pytest.mark.parametrize("first", [True, False], ids=["first-compressed-step", "later"])
def test_a_tensor_without_a_gradient_on_all_ranks_keeps_its_whole_state(first):
    world, gradients = started(2, buckets=2, segment_nbytes=60)
    if not first:
        world.set_hyper(1e-2, decoupled_decay=0.1)
        world.step(gradients[0])
    tensor, core = 0, world.cores[1]
    span, owned = core.flat_span(tensor), core.owned_span(tensor)

    def everything():
        error, server_error = core.error[span].copy(), core.server_error[owned].copy()
        return error, server_error, core.momentum(tensor), world.params[1][tensor].copy(), core.steps[tensor].copy()

    before = everything()
    for now in gradients[1:4]:
        for local in now:
            local[tensor] = None
        world.set_hyper(1e-2, decoupled_decay=0.1)
        world.step(now)
    for old, new in zip(before, everything(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert core.steps[1] == core.steps[tensor] + 3
    world.set_hyper(1e-2)
    world.step(gradients[5])
    assert core.steps[1] == core.steps[tensor] + 3
    assert (world.params[1][tensor] != before[3]).all()


def restore(world, source):
    """What a checkpoint does: replicated state of rank 0, errors of each rank."""
    for core, old, params, old_params in zip(world.cores, source.cores, world.params, source.params, strict=True):
        for index in range(len(SHAPES)):
            params[index][...] = old_params[index]
        core.load_state(source.cores[0].state(), source.cores[0].momentum)
        core.load_rank_state(old.rank_state())
    world.set_buckets(2, 50)


def test_a_loaded_checkpoint_continues_bit_for_bit():
    world, gradients = started(3, missing=0.2, mask_refresh=4)
    for now in gradients[:13]:
        world.set_hyper(1e-3)
        world.step(now)
    loaded = World(3, mask_refresh=4)
    restore(loaded, world)
    assert loaded.state() == world.state()
    for now in gradients[13:]:
        for each in (world, loaded):
            each.set_hyper(1e-3)
            each.step(now)
        assert loaded.state() == world.state()


def test_a_running_world_goes_back_to_a_checkpoint():
    world, gradients = started(2, missing=0.2, mask_refresh=4)
    running, _ = started(2, missing=0.2, mask_refresh=4)
    for now in gradients[:9]:
        world.set_hyper(1e-3)
        world.step(now)
    for now in gradients[10:15]:
        running.set_hyper(1e-3)
        running.step(now)
    for core in running.cores:
        core.load_state(world.cores[0].state(), world.cores[0].momentum)
        assert not core.error.any() and not core.server_error.any()
    restore(running, world)
    for now in gradients[9:]:
        for each in (world, running):
            each.set_hyper(1e-3)
            each.step(now)
        assert running.state() == world.state()


def test_a_state_of_another_block_size_wakes_elements_with_the_means_of_its_own_blocks():
    world, _ = started(1, variance_floor=0.0)
    (core,) = World(1, block_size=16).cores
    core.load_state(world.cores[0].state(), world.cores[0].momentum)
    roots = core.preconditioner.block_root[core.preconditioner._block_span(EMBEDDING)]
    denominator = core.preconditioner.denominator[core.flat_span(EMBEDDING)].reshape(12, 16)
    np.testing.assert_allclose(roots[:4], denominator[:4].mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(roots[4:], denominator[:4].mean(), rtol=1e-6)


def test_masked_elements_are_looked_at_once_per_refresh():
    world, gradients = started(1, mask_refresh=2)
    (core,) = world.cores
    due = []
    for now in gradients[:4]:
        world.set_hyper(1e-3)
        present = world.exchange(now)
        core.commit(present, NOTHING)
        due.append(core.wake_due)
        if due[-1]:
            core.wake(np.zeros_like(core.touched()))
            assert not core.wake_due
    assert due == [False, True, False, True]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_errors_of_another_number_of_ranks_keep_their_sum(ranks):
    world, gradients = started(3)
    for now in gradients[:5]:
        world.set_hyper(1e-3)
        world.step(now)
    other = World(ranks, block_size=16)
    for core in other.cores:
        core.load_state(world.cores[0].state(), world.cores[0].momentum)
        resharding = Resharding(world.layout, other.layout, core.rank)
        for old in world.cores:
            resharding.add({"rank": old.rank, **old.rank_state()})
        core.load_rank_state(resharding.result())
    other.set_buckets()
    mean = np.mean([core.error.astype(np.float64) for core in world.cores], axis=0).astype(np.float32)
    for core in other.cores:
        np.testing.assert_array_equal(core.error, mean)
    np.testing.assert_array_equal(whole_server_error(other), whole_server_error(world))


def test_a_rank_state_that_does_not_fit_changes_nothing():
    world, gradients = started(2)
    world.set_hyper(1e-3)
    world.step(gradients[0])
    before = world.state()
    core = world.cores[0]
    state = core.rank_state()
    for wrong, message in [
        ({**state, "worker": {}}, r"need worker buffers \['error'\], got \[\]"),
        ({**state, "owner": {"error": state["owner"]["error"][:-16]}}, "owner buffer 'error': need"),
        ({**state, "worker": {"error": state["worker"]["error"] * np.float32("nan")}}, "'error' has NaN or Inf"),
    ]:
        with pytest.raises(ValueError, match=message):
            core.load_rank_state(wrong)
        assert world.state() == before


def test_the_variance_for_a_checkpoint_is_the_floored_one():
    world, _ = started(1, variance_floor=0.0)
    rng = np.random.default_rng(4)
    variance = rng.random(165).astype(np.float32)
    variance[7] = 0
    core = OneBitAdam(world.layout, 0, world.kernels, OneBitAdamOptions(variance_floor=0.5))
    core.freeze(0, variance, variance, step=10, beta2=0.99, eps=1e-8)
    saved = core.variance(0, beta2=0.99)
    assert saved[7] == 0
    large = variance > 0.3  # above half the mean root, squared
    np.testing.assert_allclose(saved[large], variance[large], rtol=1e-5)
    assert (saved[variance > 0] > 0.01).all()


def test_warm_up_takes_no_memory_and_a_tensor_without_variance_stays_in_it():
    world = World(2)
    core = world.cores[0]
    assert sum(core.memory().values()) == 0
    zeros = np.zeros(7, np.float32)
    assert not core.freeze(1, zeros, zeros, step=3, beta2=0.99, eps=1e-8)
    assert core.stage[1] == Stage.WARMUP
    assert sum(core.memory().values()) == 0
    ones = np.ones(7, np.float32)
    assert core.freeze(1, ones, ones, step=3, beta2=0.99, eps=1e-8)
    memory = core.memory()
    assert memory["worker_error"] == 8 * core.layout.flat_numel
    assert memory["dense_momentum"] == 28
    assert not core.preconditioner.masked[1]
    with pytest.raises(ValueError, match="already"):
        core.freeze(1, ones, ones, step=3, beta2=0.99, eps=1e-8)
    core.set_buckets([[0, 1]], 1000)
    with pytest.raises(ValueError, match="'t0' is still in warm-up"):
        core.compress(0, np.zeros(1000, np.uint8), np.zeros(1, np.uint32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_variance_that_is_not_finite_cannot_be_frozen(bad):
    core = World(1).cores[0]
    variance = np.ones(7, np.float32)
    variance[3] = bad
    with pytest.raises(NonFiniteError, match=r"'t1'.*step 9"):
        core.freeze(1, variance, variance, step=9, beta2=0.99, eps=1e-8)
    assert not core.stage.any()


def test_a_tensor_of_many_blocks_has_the_means_of_its_blocks():
    world = World(1, shapes=[(40_001,)], block_size=16)
    (core,) = world.cores
    variance = np.random.default_rng(6).random(40_001).astype(np.float32)
    core.freeze(0, variance, variance, step=10, beta2=0.99, eps=1e-8)
    root = np.sqrt(variance / np.float32(1 - 0.99**10))
    means = [root[start : start + 16].mean() for start in range(0, root.size, 16)]
    np.testing.assert_allclose(core.preconditioner.block_root, means, rtol=1e-6)


def test_the_dense_momentum_is_given_back_after_the_first_committed_step():
    world, gradients = started(2)
    core = world.cores[0]
    assert core.memory()["dense_momentum"] == 4 * world.layout.numel
    for local in gradients[0]:
        local[1] = None
    world.set_hyper(1e-3)
    world.step(gradients[0])
    assert core.memory()["dense_momentum"] == 4 * 7  # the one without a gradient
    assert core.memory()["packed_momentum"] < 2 * world.layout.numel


def test_hyperparameters_are_rounded_once_from_double():
    world, _ = started(1)
    core = world.cores[0]
    core.steps[0] = 3
    core.set_hyper(Group(np.array([0, 1]), 0.1, (0.9, 0.999), coupled_decay=0.3, decoupled_decay=0.7))
    row = core.tensors[0]
    assert row["one_minus_beta1"] == np.float32(1 - 0.9) != np.float32(1) - np.float32(0.9)
    assert row["step_size"] == np.float32(0.1 / (1 - 0.9**4))
    assert core.tensors["step_size"][1] == np.float32(0.1 / (1 - 0.9**11))
    assert row["decay"] == np.float32(1 - 0.1 * 0.7)


@pytest.mark.parametrize("option", [{"variance_floor": 1.5}, {"scale": "max"}, {"mask_refresh": 0}])
def test_a_setting_out_of_range_is_an_error(option):
    with pytest.raises(SettingsError):
        World(1, **option)


def test_the_simulation_calls_back_for_gradients():
    history = simulate(
        [np.ones(40, np.float32)], lambda t, rank, params: [params[0]], ranks=2, steps=40, freeze_step=10, lr=0.01
    )
    assert len(history) == 40
    assert np.abs(history[-1][0]).max() < 0.75


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_the_dense_moments_of_the_simulation_are_those_of_torch(weight_decay):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    param = torch.nn.Parameter(torch.tensor(rng.standard_normal(100), dtype=torch.float32))
    adam = torch.optim.AdamW([param], lr=1e-2, weight_decay=weight_decay, foreach=False)
    simulation = Simulation(
        [param.detach().numpy().copy()], 1, freeze_step=99, lr=1e-2, weight_decay=weight_decay, decoupled=True
    )
    for _ in range(20):
        gradient = rng.standard_normal(100).astype(np.float32)
        param.grad = torch.tensor(gradient)
        adam.step()
        simulation.step([[gradient]])
    x = simulation.tensors[0]
    np.testing.assert_array_equal(adam.state[param]["exp_avg"].numpy(), x.momentum)
    np.testing.assert_array_equal(adam.state[param]["exp_avg_sq"].numpy(), x.variance)
    np.testing.assert_allclose(param.detach().numpy(), x.param, rtol=1e-6, atol=1e-7)
