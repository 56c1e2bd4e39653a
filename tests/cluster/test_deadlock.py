"""Jobs in which no rank can move end with an error that says why, and jobs in which one still can do not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.jobs import run_job

TRAINING = """
import torch
import torch.distributed as dist
import ocomm_torch as hvd
from ocomm.errors import StallError
hvd.init()
dist.init_process_group("ocomm", init_method="ocomm://")
rank = hvd.rank()

def made(name):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOneBitAdam(adam, named_parameters=model.named_parameters(), freeze_step=2)
    for _ in range(4):
        step(model, optimizer)
    return model, optimizer

def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

def stuck(body):
    try:
        body()
    except StallError as error:
        print(f"{what}, rank {rank}: {error}", flush=True)
    else:
        print(f"{what}, rank {rank} went on", flush=True)

what = "names"
stuck(lambda: hvd.allreduce(torch.ones(1), name=f"of {rank}"))
what = "order"
pair = [made("a"), made("b")]
stuck(lambda: [step(*one) for one in (pair if rank == 0 else reversed(pair))])
what = "loaded"
model, optimizer = made("c")
if rank == 0:
    optimizer.load_state_dict(optimizer.state_dict())
stuck(lambda: step(model, optimizer))
what = "barrier"
model, optimizer = made("d")
stuck(lambda: step(model, optimizer) if rank == 0 else dist.barrier())
hvd.shutdown()
"""

GAVE_UP = (
    " No rank can move, so ocomm gave up after 1 s (OCOMM_DEADLOCK_SECONDS): all ranks must make the same calls, and "
    "take the same steps, in the same order."
)


def said(output: str) -> dict[str, str]:
    lines = re.findall(r"^(\w+, rank \d): (.*)$", output, re.MULTILINE)
    return {
        who: re.sub(r"\d+ s ago", "N s ago", re.sub(r"train\.py:\d+ in [\w<>]+", "HERE", text)) for who, text in lines
    }


@pytest.mark.long  # Torch starts on two ranks; tests/world/test_stalls.py has each part
def test_ranks_that_wait_for_each_other_fail_and_are_told_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    job = run_job(2, script, OCOMM_DEADLOCK_SECONDS="1")
    found = said(job.stdout)
    assert set(found) == {
        f"{what}, rank {rank}" for what in ("names", "order", "loaded", "barrier") for rank in range(2)
    }, job.stdout + job.stderr
    assert all(text.endswith(GAVE_UP) for text in found.values())
    assert "rank 1 did not. rank 1 waits for 'allreduce.of 1' instead, at HERE." in found["names, rank 0"]
    text = found["order, rank 0"]
    assert text.startswith("DistributedOneBitAdam: step 5: rank(s) [1] will not come to it: rank 1 is at ")
    assert "in DistributedOneBitAdam#2: step 5. Step the optimizers in one order on all ranks." in text
    remedy = "If a rank has begun anew alone, because it has loaded a state or caught an error, out of memory for "
    assert found["loaded, rank 0"].startswith(
        "tensor 'DistributedOneBitAdam#3: first step, or first after load_state_dict"
    )
    assert "in DistributedOneBitAdam#3: step 5. " + remedy in found["loaded, rank 0"]
    assert found["loaded, rank 1"].startswith(
        "DistributedOneBitAdam#3: step 5: rank(s) [0] will not come to it: rank 0 is"
    )
    assert remedy in found["loaded, rank 1"]
    assert found["barrier, rank 0"].startswith(
        "DistributedOneBitAdam#4: step 5: rank(s) [1] will not come to it: rank 1 is at HERE, in torch.distributed "
        "group '0' of ranks [0, 1]: barrier. Give all ranks equally many batches."
    )
    assert found["barrier, rank 1"].startswith(
        "torch.distributed group '0' of ranks [0, 1]: barrier: rank(s) [0] will not come to it: rank 0 is at HERE, in "
        "DistributedOneBitAdam#4: step 5. Give all ranks equally many batches, and make the same calls on all of them."
    )


UNEVEN = """
import keras
import numpy as np
import ocomm_tf.keras as hvd

hvd.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile(hvd.DistributedOneBitAdam(keras.optimizers.Adam(1e-2), freeze_step=3), "mse")
images = np.ones((8 * (6 + hvd.rank()), 4), np.float32)
try:
    model.fit(
        images, images[:, :2], batch_size=8, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    )
    hvd.allreduce(np.ones(1, np.float32), name="metric")
except Exception as error:
    print(f"uneven, rank {hvd.rank()}: {error}".replace(chr(10), " "), flush=True)
"""


@pytest.mark.long  # TensorFlow starts on two ranks
def test_keras_with_one_batch_more_on_a_rank_ends_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    script = tmp_path / "train.py"
    script.write_text(UNEVEN)
    job = run_job(2, script, OCOMM_DEADLOCK_SECONDS="1")
    found = said(job.stdout)
    assert found.keys() == {"uneven, rank 0", "uneven, rank 1"}, job.stdout + job.stderr
    assert found["uneven, rank 0"].startswith("tensor 'allreduce.metric': rank 0 submitted it N s ago, rank 1 did not.")
    assert "step 7: rank(s) [0] will not come to it: rank 0 is at HERE" in found["uneven, rank 1"]
    assert "Give all ranks equally many batches." in found["uneven, rank 1"]


LATE = """
import logging, os, sys, threading, time
import numpy as np
import ocomm
from ocomm import session

warned = threading.Event()

class Warned(logging.Handler):
    def emit(self, record):
        warned.set()

logging.getLogger("ocomm").addHandler(Warned())
ocomm.init()
ocomm.barrier()

def late():
    if sys.argv[1] == "sleep":
        time.sleep(5.0)
    assert warned.wait(60), "nobody was told that all ranks wait"
    runtime = session.current().runtime
    for _ in range(6):  # looks of the background thread, half a second apart, in which it could have given up
        last = runtime._inspected_s
        while runtime._inspected_s == last:
            time.sleep(0.01)
    print(ocomm.allreduce(np.ones(1), op=ocomm.Sum, name="b"), flush=True)

if ocomm.rank() == 0:
    thread = threading.Thread(target=late)
    thread.start()
    ocomm.allreduce(np.ones(1), name="a")
    thread.join()
else:
    ocomm.allreduce(np.ones(1), op=ocomm.Sum, name="b")
    ocomm.allreduce(np.ones(1), name="a")
ocomm.shutdown()
"""


@pytest.mark.parametrize("kind", ["count", pytest.param("sleep", marks=pytest.mark.long)])
def test_a_thread_that_submits_for_the_first_time_while_all_others_wait_is_waited_for(kind: str) -> None:
    job = run_job(2, LATE, kind, OCOMM_DEADLOCK_SECONDS="0.5")
    assert (job.returncode, job.stdout) == (0, "[2.]\n"), job.stdout + job.stderr


KERAS = """
import os, sys
import numpy as np
import keras
import ocomm_tf.keras as hvd
hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
adam = hvd.DistributedOneBitAdam(keras.optimizers.Adam(0.01), freeze_step=3)
model.compile(optimizer=adam, loss="mse", metrics=["mae"])
x, y = np.ones((64, 4), "f"), np.ones((64, 1), "f")
model.fit(x, y, batch_size=8, verbose=0)
path = os.path.join(sys.argv[1], f"of {hvd.rank()}.weights.h5")
model.save_weights(path)
if hvd.rank() == 0:
    model.load_weights(path)
try:
    model.fit(x, y, batch_size=8, verbose=0)
except Exception as error:
    print(f"loaded, rank {hvd.rank()}: {' '.join(str(error).split())}", flush=True)
"""


@pytest.mark.long  # TensorFlow starts on two ranks
def test_a_state_that_one_rank_of_keras_loads_alone_is_an_error_in_a_graph(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="needs TensorFlow")
    job = run_job(2, KERAS, str(tmp_path), OCOMM_DEADLOCK_SECONDS="1", TF_CPP_MIN_LOG_LEVEL="3")
    assert "do so on all ranks, or broadcast the state" in said(job.stdout)["loaded, rank 0"], job.stdout + job.stderr
    assert "gave up after 1 s" in said(job.stdout)["loaded, rank 0"]
