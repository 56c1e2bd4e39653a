"""Sharded dense steps of 1-bit Adam in Keras: the bits of the law and of the unsharded run; bytes, saved states."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import numpy as np  # noqa: E402

import ocomm_tf.keras as hvd  # noqa: E402
from ocomm.errors import CheckpointError, InvalidRequestError  # noqa: E402
from ocomm.session import Session  # noqa: E402
from tests.oracle.dense_adam import DenseAdam  # noqa: E402
from tests.tiers import few  # noqa: E402
from tests.worlds import run_ranks  # noqa: E402

# Two blocks and more, a short last block, less than a block.
SHAPES = [(70, 130), (33,), (1,)]
STEPS, WARMUP = 10, 6
RATE, DECAY = 1e-2, 0.1


def initial() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def gradients(step: int, rank: int) -> list[np.ndarray]:
    rng = np.random.default_rng((step, rank))
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


class Run:
    """Variables and their optimizer, as in a script."""

    def __init__(self, values: list[np.ndarray], dtype: str = "float32", in_graph: bool = False, **options: Any):
        self.rank = hvd.rank()
        self.variables = [keras.Variable(value, dtype=dtype, name=f"v{n}") for n, value in enumerate(values)]
        inner = keras.optimizers.AdamW(RATE, weight_decay=DECAY)
        options = {"freeze_step": WARMUP, "block_size": 512, **options}
        self.optimizer = hvd.DistributedOneBitAdam(inner, self.variables, **options)
        self.apply = tf.function(self.optimizer.apply) if in_graph else self.optimizer.apply

    def train(self, first: int, last: int) -> list[bytes]:
        """Steps ``first`` to ``last``. Returns all variables after each."""
        history = []
        for step in range(first, last + 1):
            given = [
                keras.ops.cast(g, v.dtype) for g, v in zip(gradients(step, self.rank), self.variables, strict=True)
            ]
            self.apply(given)
            history.append(b"".join(v.tobytes() for v in self.values()))
        return history

    def values(self) -> list[np.ndarray]:
        return [v.numpy() for v in self.variables]

    def report(self) -> dict[str, Any]:
        return self.optimizer.compression_report()


def law(ranks: int) -> list[bytes]:
    """All variables after each step of the warm-up."""
    dense = DenseAdam(initial(), ranks, lr=RATE, eps=1e-7, weight_decay=DECAY, decoupled=True)
    history = []
    for step in range(1, WARMUP + 1):
        dense.step([gradients(step, rank) for rank in range(ranks)])
        history.append(b"".join(p.tobytes() for p in dense.params))
    return history


@pytest.mark.parametrize(
    ("ranks", "in_graph"), few([(n, graph) for n in (1, 2, 4) for graph in (False, True)], [(2, True), (4, False)])
)
def test_every_step_has_the_bits_of_the_law_and_of_the_unsharded_run(ranks: int, in_graph: bool) -> None:
    def body(session: Session) -> tuple[list[bytes], dict[str, Any], list[bytes]]:
        run = Run(initial(), in_graph=in_graph, shard_state=True)
        history = run.train(1, STEPS)
        return history, run.report(), Run(initial(), in_graph=in_graph).train(1, STEPS)

    expected = law(ranks)
    for history, report, whole in run_ranks(ranks, body):
        assert history == whole
        assert history[:WARMUP] == expected
        assert (report["dense_steps"], report["compressed_steps"]) == (WARMUP, STEPS - WARMUP)


@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"freeze_step": "auto", "total_steps": 20}], ids=str)
def test_options_of_the_warm_up_do_what_they_do_without_shards(options: dict[str, Any]) -> None:
    def body(session: Session) -> None:
        shards, whole = Run(initial(), shard_state=True, **options), Run(initial(), **options)
        assert shards.train(1, STEPS) == whole.train(1, STEPS)
        assert shards.report()["freeze_step"] == whole.report()["freeze_step"]
        assert shards.report()["stage"] == "compressed"

    run_ranks(2, body)


def test_low_precision_variables_have_the_masters_of_the_unsharded_run() -> None:
    def body(session: Session) -> None:
        found = []
        for shard_state in (True, False):
            run = Run(initial(), "bfloat16", shard_state=shard_state)
            run.train(1, STEPS)
            found.append([run.optimizer._frontend.masters()[n].tobytes() for n in range(len(SHAPES))])
        assert found[0] == found[1]

    run_ranks(2, body)


def test_m_and_v_of_a_rank_are_8_over_n_bytes_and_the_bytes_sent_are_those_without() -> None:
    values = [np.zeros((512, 1024), np.float32)]

    def body(session: Session, shard_state: bool) -> dict[str, Any]:
        run = Run(values, shard_state=shard_state)
        run.optimizer.apply([tf.ones((512, 1024))])
        moments = [run.optimizer._frontend.moments(tensor) for tensor in range(len(values))]
        held = sum(m.nbytes + v.nbytes for m, v, _ in (own for own in moments if own is not None))
        return {**run.report(), "held": held}

    whole, shards = (run_ranks(4, lambda s, on=on: body(s, on)) for on in (False, True))
    for before, now in zip(whole, shards, strict=True):
        numel = values[0].size
        assert before["held"] == 8 * numel and now["held"] == 0
        assert now["memory_bytes"]["sharded_moments"] == 8 * numel / 4
        assert now["memory_bytes"]["sharded_average"] == 4 * numel / 4 and now["memory_bytes"]["averages"] == 0
        assert abs(now["last_bytes_sent"] - before["last_bytes_sent"]) < 1000 < now["last_bytes_sent"]


# Saved states


@pytest.mark.parametrize("stop", few([3, 6, 8], [3]))
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)], ids=str)
def test_a_state_goes_on_with_and_without_shards(before: bool, after: bool, stop: int) -> None:
    def body(session: Session) -> None:
        run = Run(initial(), shard_state=before)
        run.train(1, stop)
        state, own, values = run.optimizer.ocomm_state(), run.optimizer.ocomm_rank_state(), run.values()
        expected = run.train(stop + 1, STEPS)
        again = Run(values, shard_state=after)
        again.optimizer.ocomm_load_state(state)
        again.optimizer.ocomm_load_rank_state(own_state(own))
        assert again.train(stop + 1, STEPS) == expected

    run_ranks(2, body)


def own_state(state: dict[str, Any]) -> Any:
    from ocomm.training.resume import one_state

    return one_state(state)


def test_without_the_ranks_own_states_a_sharded_one_is_refused() -> None:
    def body(session: Session) -> None:
        run = Run(initial(), shard_state=True)
        run.train(1, 3)
        state, values = run.optimizer.ocomm_state(), run.values()
        again = Run(values, shard_state=True)
        again.optimizer.ocomm_load_state(state)
        with pytest.raises(CheckpointError, match="load_rank_state_dict was not called"):
            again.train(4, 4)

    run_ranks(2, body)


@pytest.mark.parametrize("after", [True, False], ids=["to shards", "to whole"])
def test_a_model_is_saved_when_its_moments_are_gathered_and_goes_on_with_the_same_bits(after: bool) -> None:
    def body(session: Session) -> None:
        run = Run(initial(), shard_state=True)
        run.train(1, 2)
        run.optimizer.gather_moments()
        run.train(3, 3)
        with pytest.raises(InvalidRequestError, match=r"Call optimizer.gather_moments\(\) on all ranks after the last"):
            run.optimizer.save_own_variables({})
        run.optimizer.gather_moments()
        store: dict[str, np.ndarray] = {}
        run.optimizer.save_own_variables(store)
        values = run.values()
        dense = DenseAdam(initial(), 2, lr=RATE, eps=1e-7, weight_decay=DECAY, decoupled=True)
        for step in range(1, 4):
            dense.step([gradients(step, rank) for rank in range(2)])
        momenta = [m.numpy().tobytes() for m in run.optimizer._momentums]
        assert momenta == [m.tobytes() for m in dense.momenta]
        again = Run(values, shard_state=after)
        again.optimizer.load_own_variables(store)
        assert again.train(4, STEPS) == run.train(4, STEPS)
        run.optimizer.save_own_variables(store)  # the warm-up is over

    run_ranks(2, body)


@pytest.mark.parametrize("stop", [0, 2])
def test_going_back_to_moments_that_are_still_in_the_variables_is_refused(stop: int, tmp_path: Path) -> None:
    def body(session: Session) -> None:
        run = Run(initial(), shard_state=True)
        run.train(1, stop)
        run.optimizer.gather_moments()
        checkpoint = tf.train.Checkpoint(optimizer=run.optimizer, variables=run.variables)
        saved = checkpoint.save(str(tmp_path / str(hvd.rank())))
        run.train(stop + 1, 4)
        checkpoint.restore(saved)
        with pytest.raises(InvalidRequestError, match="after step 4 something has written to Adam's m and v"):
            run.train(stop + 1, stop + 1)

    run_ranks(2, body)


def test_what_one_rank_loads_reaches_the_others_before_it_is_divided() -> None:
    def body(session: Session) -> None:
        run = Run(initial(), shard_state=True)
        run.train(1, 3)
        run.optimizer.gather_moments()
        store: dict[str, np.ndarray] = {}
        run.optimizer.save_own_variables(store)
        again = Run(run.values(), shard_state=True)
        if again.rank == 0:
            again.optimizer.load_own_variables(store)
        again.optimizer.ocomm_begin_alike(0)
        assert again.train(4, WARMUP) == run.train(4, WARMUP)

    run_ranks(2, body)


def test_what_cannot_be_sharded_is_refused_and_auto_is_off_there() -> None:
    def body(session: Session) -> None:
        with pytest.raises(
            InvalidRequestError, match="shard_state=True, but dense_bits is 8, and parameters need 32 b"
        ):
            Run(initial(), shard_state=True, dense_bits=8)
        assert not Run(initial(), shard_state="auto", dense_bits=8).optimizer._frontend.driver.is_sharded
        assert Run(initial(), shard_state="auto").optimizer._frontend.driver.is_sharded

    run_ranks(2, body)
