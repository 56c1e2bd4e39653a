"""Keras' 1-bit optimizers whose variables are on a GPU: what they do in the host's memory, bit for bit.

For ``test_tf_gpu``, which runs it in a process of its own, since TensorFlow has two GPUs here (``tests/fake_gpu.c``).
What ocomm does there is done by ``tests.fake_device``, in memory that is out of the host's reach.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import load_library

LIBRARY = os.environ["FAKE_GPU"]
load_library.load_pluggable_device_library(LIBRARY)

import ocomm_tf.keras as hvd  # noqa: E402
from ocomm.errors import HorovodInternalError, InvalidRequestError, NonFiniteError  # noqa: E402
from ocomm.kernels import device as device_module  # noqa: E402
from ocomm.kernels.device import device_kernels  # noqa: E402
from ocomm.session import Session  # noqa: E402
from ocomm.training.resume import one_state  # noqa: E402
from ocomm.types import Settings  # noqa: E402
from ocomm_tf.keras import gpu  # noqa: E402
from tests.fake_device import ELSEWHERE, FakeDevice  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

DRIVER: Any = ctypes.CDLL(LIBRARY)
HOST = "CPU:0"
SHAPES = (70, 130), (4097,), (33,), ()
ADAM, SGD = keras.optimizers.Adam, keras.optimizers.SGD
KINDS: dict[str, Callable[..., Any]] = {
    "1-bit Adam": lambda **o: hvd.DistributedOneBitAdam(ADAM(1e-2), **{"freeze_step": 3, **o}),
    "0/1 Adam": lambda **o: hvd.DistributedZeroOneAdam(ADAM(1e-2), **o),
    "0/1 Adam, local steps": lambda: hvd.DistributedZeroOneAdam(
        keras.optimizers.AdamW(1e-2, weight_decay=0.1), local_step_start=2, local_step_doubling=2, local_step_clip=2
    ),
    "0/1 Adam, votes at syncs": lambda: hvd.DistributedZeroOneAdam(
        ADAM(1e-2), vote="sync", local_step_start=2, local_step_doubling=2, local_step_clip=4
    ),
    "Birder": lambda **o: hvd.DistributedBirder(SGD(1e-3, weight_decay=0.1), **o),
    "SoftSignSGD": lambda **o: hvd.DistributedSoftSignSGD(SGD(1e-3), **o),
    "Lion": lambda **o: hvd.DistributedLion(keras.optimizers.Lion(1e-3), **o),
    "EF-SGD": lambda **o: hvd.DistributedEFSGD(SGD(1e-3, momentum=0.9, weight_decay=0.1), **o),
}


class Devices:
    """What ocomm has in the place of TensorFlow's GPUs, by rank."""

    def __init__(self) -> None:
        self.made: dict[int, FakeDevice] = {}
        self.kernels: dict[int, Any] = {}

    def of(self, session: Session, number: int) -> Any:
        rank = rank_of(session)
        assert number == rank % 2
        if rank not in self.made:
            self.made[rank] = FakeDevice(f"fake:{rank}")
            self.kernels[rank] = device_kernels(self.made[rank], 20.0)
        return self.kernels[rank]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    found = Devices()
    real = gpu.address_of
    monkeypatch.setattr(Session, "device_kernels", lambda session, number: found.of(session, number))
    monkeypatch.setattr(gpu, "address_of", lambda tensor: real(tensor) + ELSEWHERE)
    return found


def rank_of(session: Session) -> int:
    assert session.topology is not None
    return session.topology.rank


def variables(device: str, dtype: str = "float32") -> list[Any]:
    random = np.random.default_rng(1)
    with tf.device(device):
        return [keras.Variable(random.normal(size=s), dtype=dtype, name=f"v{i}") for i, s in enumerate(SHAPES)]


def gradients(device: str, step: int, rank: int) -> list[tf.Tensor]:
    random = np.random.default_rng([step, rank])
    with tf.device(device):
        return [tf.identity(tf.constant(random.normal(size=shape), tf.float32)) for shape in SHAPES]


def trained(
    kind: str,
    device: str,
    steps: int = 8,
    in_graph: bool = False,
    watch: Callable[[Any, int], None] = lambda optimizer, step: None,
    **options: Any,
) -> list[list[bytes]]:
    """The variables after every step."""
    rank, mine = hvd.rank(), variables(device)
    optimizer = KINDS[kind](**options)
    optimizer.build(mine)
    apply = tf.function(lambda grads: optimizer.apply(grads, mine)) if in_graph else optimizer.apply
    history = []
    for step in range(steps):
        given = gradients(device, step, rank)
        # The last variable has no gradient in some steps.
        if not in_graph and step % 3 == 2:
            optimizer.apply(given[:-1], mine[:-1])
        else:
            apply(given) if in_graph else optimizer.apply(given, mine)
        watch(optimizer, step)
        history.append([v.numpy().tobytes() for v in mine])
    return history


long = pytest.mark.long
LOCAL = "0/1 Adam, local steps"
#: (kind, in a graph?)
SHORT = [(LOCAL, False), ("1-bit Adam", True)]
LONG = [
    *((kind, False) for kind in ("1-bit Adam", "Lion", "0/1 Adam", "Birder", "SoftSignSGD")),
    (LOCAL, True),
    ("0/1 Adam, votes at syncs", False),
]


@pytest.mark.parametrize(("kind", "in_graph"), [*SHORT, *(pytest.param(*way, marks=long) for way in LONG)])
def test_ranks_with_and_without_a_gpu_train_what_ranks_without_do(kind: str, in_graph: bool, devices: Devices) -> None:
    expected = run_ranks(2, lambda s: trained(kind, HOST, in_graph=in_graph))
    for places in (["GPU:0", "GPU:1"], [HOST, "GPU:1"]):
        devices.made.clear()
        got = run_ranks(2, lambda s, places=places: trained(kind, places[rank_of(s)], in_graph=in_graph))
        assert got == expected
        assert len(devices.made) == 2 - places.count(HOST) and all(d.counts["launch"] for d in devices.made.values())


@pytest.mark.parametrize(
    ("kind", "waits"), [("1-bit Adam", 1), pytest.param("Birder", 1, marks=long), pytest.param(LOCAL, 2, marks=long)]
)
@pytest.mark.parametrize("in_graph", [pytest.param(False, marks=long), True], ids=["eager", "graph"])
def test_neither_gradients_nor_values_pass_the_host_and_nothing_is_made(
    kind: str, waits: int, in_graph: bool, devices: Devices
) -> None:
    seen: list[tuple[int, ...]] = []

    def body(session: Session) -> None:
        mine = variables("GPU:0")
        optimizer = KINDS[kind]()
        optimizer.build(mine)
        apply = tf.function(lambda grads: optimizer.apply(grads, mine)) if in_graph else None
        for step in range(12):
            given = gradients("GPU:0", step, 0)
            device, home = devices.made[0], devices.kernels[0].memory
            before = DRIVER.fake_copied_to_host(), DRIVER.fake_waits(), home.waits, device.allocations
            copied = len(device.log)
            apply(given) if apply is not None else optimizer.apply(given, mine)
            after = DRIVER.fake_copied_to_host(), DRIVER.fake_waits(), home.waits, device.allocations
            largest = max(int(what) for verb, what, _ in device.log[copied:] if verb in ("upload", "download"))
            seen.append((*(b - a for a, b in zip(before, after, strict=True)), largest))

    run_ranks(1, body)
    numel = sum(int(np.prod(shape)) for shape in SHAPES)
    for to_host, tensorflow_waits, own_waits, made, largest in seen[8:]:
        assert to_host <= 24, "more than the learning rate and two counters"
        assert tensorflow_waits >= 1, "nobody knows that gradients are there"
        assert own_waits <= waits and made == 0
        assert largest <= numel // 8 + 600, "more than packed bits"


@pytest.mark.parametrize("device", [HOST, "GPU:0"])
def test_tensorflows_own_variables_are_trained_as_those_of_keras(device: str, devices: Devices) -> None:
    def body(session: Session) -> None:
        with tf.device(device):
            both = variables(device), [tf.Variable(v.numpy(), name=v.name) for v in variables(device)]
        assert all(v.device.endswith(device) for v in both[1])
        for mine in both:
            optimizer = KINDS["Birder"]()
            for step in range(3):
                optimizer.apply(gradients(device, step, 0), mine)
        assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(*both, strict=True))

    run_ranks(1, body)
    assert bool(devices.made) == (device != HOST)


def test_the_warm_up_is_made_on_the_gpu_too(devices: Devices) -> None:
    def body(session: Session) -> None:
        def watch(optimizer: Any, step: int) -> None:
            loops = [what for verb, what, _ in devices.made[0].log if verb == "launch"]
            assert loops.count("adam_step") == step + 1  # all tensors at once

        mine, optimizer = variables("GPU:0"), KINDS["1-bit Adam"](freeze_step=100)
        for step in range(3):
            optimizer.apply(gradients("GPU:0", step, 0), mine)
            watch(optimizer, step)

    run_ranks(1, body)


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.1}, {"max_grad_norm": 0.1, "freeze_step": 100}], ids=str)
def test_all_ranks_are_clipped_alike(options: dict[str, Any], devices: Devices) -> None:
    def body(session: Session) -> Any:
        return trained("1-bit Adam", "GPU:0" if rank_of(session) == 0 else HOST, **options)

    first, second = run_ranks(2, body)
    assert first == second
    if "freeze_step" in options:
        assert first == run_ranks(2, lambda s: trained("1-bit Adam", HOST, **options))[0]


def halves(kind: str, first: str, second: str | None) -> list[bytes]:
    """Six steps, and four by another optimizer on ``second`` that has loaded the state; None: by the same."""
    rank, mine, optimizer = hvd.rank(), variables(first), KINDS[kind]()
    for step in range(6):  # 0/1 Adam is between two syncs then
        optimizer.apply(gradients(first, step, rank), mine)
    if second is not None:
        saved, own = optimizer.ocomm_state(), optimizer.ocomm_rank_state()
        before, mine, optimizer = mine, variables(second), KINDS[kind]()
        optimizer.build(mine)
        for new, old in zip(mine, before, strict=True):
            new.assign(old.numpy())
        optimizer.ocomm_load_state(saved)
        assert optimizer.ocomm_load_rank_state(one_state(own))["rank_state"] == "loaded"
    for step in range(6, 10):
        optimizer.apply(gradients(second or first, step, rank), mine)
    optimizer._export_moments()
    return [v.numpy().tobytes() for v in (*mine, *optimizer.variables)]


@pytest.mark.parametrize("kind", [LOCAL, *(pytest.param(kind, marks=long) for kind in ("1-bit Adam", "Lion"))])
def test_a_run_goes_on_from_a_gpu_in_the_hosts_memory_and_back(kind: str, devices: Devices) -> None:
    expected = run_ranks(1, lambda s: halves(kind, HOST, None))
    for way in (("GPU:0", HOST), (HOST, "GPU:0"), ("GPU:0", "GPU:0"), (HOST, HOST)):
        assert run_ranks(1, lambda s, way=way: halves(kind, *way)) == expected


def test_kernels_travel_in_torchs_order(devices: Devices) -> None:
    def body(session: Session, device: str) -> list[bytes]:
        with tf.device(device):
            mine = [keras.Variable(np.arange(12.0).reshape(3, 4), dtype="float32", name="kernel")]
        optimizer = hvd.DistributedOneBitAdam(ADAM(1e-2), freeze_step=2, names={"kernel": "weight"})
        for step in range(4):
            with tf.device(device):
                optimizer.apply([tf.constant(np.random.default_rng(step).normal(size=(3, 4)), tf.float32)], mine)
        return [mine[0].numpy().tobytes()]

    assert run_ranks(1, lambda s: body(s, "GPU:0")) == run_ranks(1, lambda s: body(s, HOST))
    assert devices.made


def test_a_model_is_fit_on_a_gpu_as_by_the_host_without_xla(devices: Devices) -> None:
    def body(session: Session, device: str) -> list[bytes]:
        random = np.random.default_rng(0)
        x, y = random.normal(size=(64, 8)).astype(np.float32), random.normal(size=(64, 3)).astype(np.float32)
        with tf.device(device):
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, kernel_initializer="ones")])
            model.build((None, 8))
        model.compile(KINDS["1-bit Adam"](), "mse", jit_compile=False)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        weights = [w.numpy().tobytes() for w in model.weights]
        # "auto" is True where there is a GPU.
        model.compile(KINDS["1-bit Adam"](), "mse")
        with pytest.raises(InvalidRequestError, match=r"jit_compile=False\) in Keras, which turns it on by itself"):
            model.fit(x, y, batch_size=8, verbose=0)
        return weights

    assert run_ranks(1, lambda s: body(s, "GPU:0")) == run_ranks(1, lambda s: body(s, HOST))
    assert devices.made[0].counts["launch"]


@pytest.mark.parametrize("kind", ["1-bit Adam", "Birder"])
def test_what_is_not_finite_is_told_and_changes_nothing(kind: str, devices: Devices) -> None:
    def body(session: Session) -> None:
        mine, optimizer = variables(f"GPU:{rank_of(session)}"), KINDS[kind]()
        for step in range(5):
            given = gradients("GPU:0", step, rank_of(session))
            if step < 4:
                optimizer.apply(given, mine)
        before = [v.numpy() for v in mine]
        if rank_of(session) == 1:
            given[1] = given[1] * np.nan
        with pytest.raises(NonFiniteError, match=r"on rank\(s\) \[1\]"):
            optimizer.apply(given, mine)
        assert all(np.array_equal(v.numpy(), b) for v, b in zip(mine, before, strict=True))

    run_ranks(2, body)


def test_a_variable_that_only_others_move_moves(devices: Devices) -> None:
    def body(session: Session) -> list[Any]:
        mine, optimizer = variables(f"GPU:{rank_of(session)}"), KINDS["Birder"]()
        optimizer.build(mine)
        before, given = mine[-1].numpy(), gradients("GPU:0", 0, 0)
        count = len(mine) - rank_of(session)
        optimizer.apply(given[:count], mine[:count])
        assert not np.array_equal(mine[-1].numpy(), before)
        return [v.numpy() for v in mine]

    first, second = run_ranks(2, body)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_gpu_that_fails_ends_the_step_with_its_words(devices: Devices) -> None:
    def body(session: Session) -> None:
        def watch(optimizer: Any, step: int) -> None:
            devices.made[0].fails = step == 4

        trained("1-bit Adam", "GPU:0", watch=watch)

    with pytest.raises((HorovodInternalError, RuntimeError), match="fallen off the bus"):
        run_ranks(1, body)


def test_a_gpu_that_never_gets_done_is_named(devices: Devices) -> None:
    def body(session: Session) -> None:
        def watch(optimizer: Any, step: int) -> None:
            if step == 2:
                memory = devices.kernels[0].memory
                memory.timeout_s, memory.device.advance = 0.1, lambda count: None

        with pytest.raises(HorovodInternalError, match="fake:0"):
            trained("SoftSignSGD", "GPU:0", watch=watch)

    # It ends by the limit for a step's exchange, which waits for the device.
    run_ranks(1, body, Settings(stall_check_s=1, stall_shutdown_s=3))


@pytest.mark.parametrize("which", ["bfloat16", "LAMB", "two places", "no numba", "no memory"])
def test_steps_that_a_gpu_cannot_make_are_the_hosts_and_it_says_why(
    which: str, devices: Devices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(session: Session, number: int) -> Any:
        if which == "no memory":
            raise MemoryError("CUDA: out of memory: no 4 bytes on cuda:0")
        raise InvalidRequestError("parameters are on GPU 0, for which ocomm needs numba-cuda.")

    words = {"bfloat16": "variables are bfloat16", "LAMB": "in the host's memory only", "no numba": "needs numba-cuda"}
    words["no memory"] = "no 4 bytes on cuda:0. TensorFlow takes nearly all memory"
    if which in ("no numba", "no memory"):
        monkeypatch.setattr(Session, "device_kernels", missing)

    def body(session: Session, device: str) -> list[bytes]:
        mine = variables(device, which if which == "bfloat16" else "float32")
        if which == "two places" and device != HOST:
            mine[1:] = variables("GPU:1")[1:]
        optimizer = hvd.DistributedOneBitLamb(ADAM(1e-2), freeze_step=2) if which == "LAMB" else KINDS["Birder"]()
        for step in range(4):
            given = [tf.cast(g, v.dtype) for g, v in zip(gradients(device, step, 0), mine, strict=True)]
            optimizer.apply(given, mine)
        return [np.asarray(v.numpy(), np.float32).tobytes() for v in mine]

    expected = run_ranks(1, lambda s: body(s, HOST))
    assert not caplog.text
    assert run_ranks(1, lambda s: body(s, "GPU:0")) == expected
    assert not devices.made and words.get(which, "GPU:0 and /job") in caplog.text


def test_a_gpu_without_room_for_buffers_is_named_with_what_to_do(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(device: FakeDevice, nbytes: int) -> Any:
        raise MemoryError(f"CUDA: out of memory: no {nbytes} bytes on {device.name}")

    def body(session: Session) -> None:
        devices.of(session, 0)
        monkeypatch.setattr(FakeDevice, "allocate", allocate)
        monkeypatch.setattr(device_module, "_SMALL_NBYTES", 0)  # there is room for none, however small
        KINDS["Birder"]().apply(gradients("GPU:0", 0, 0), variables("GPU:0"))

    with pytest.raises(MemoryError, match=r"no [0-9]+ bytes on fake:0\. TensorFlow .*set_memory_growth\(gpu, True\)"):
        run_ranks(1, body)


def test_visible_devices_and_their_parts_are_counted_as_cuda_does(monkeypatch: pytest.MonkeyPatch) -> None:
    physical = [tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in (3, 1)]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: physical)
    parts = {physical[0]: [object(), object()], physical[1]: None}
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", parts.__getitem__)
    assert [gpu.cuda_number(f"/job:localhost/replica:0/task:0/device:GPU:{n}") for n in range(3)] == [3, 3, 1]


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "int64"])
def test_results_of_collectives_are_where_their_tensors_are(dtype: str) -> None:
    def body(session: Session) -> None:
        for device in (HOST, "GPU:0", "GPU:1"):
            with tf.device(device):
                tensor = tf.identity(tf.cast(tf.constant([1, 0, 1]), dtype))
            results = [
                hvd.allreduce(tensor, op=hvd.Max),
                hvd.broadcast(tensor, 0),
                *hvd.grouped_allreduce([tensor, tensor], op=hvd.Max),
                hvd.allgather(tensor)[:3] if device == HOST else hvd.allgather(tensor),
            ]
            for result in results[:4]:
                assert result.backing_device.endswith(device), (dtype, device, result.backing_device)
            assert all(np.array_equal(r.numpy()[:3], tensor.numpy()) for r in results)

    run_ranks(2, body)
