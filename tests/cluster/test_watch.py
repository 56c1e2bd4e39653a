"""A real job that is watched: by Prometheus, and by ocommrun, which shows it in a pipe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.cluster.jobs import LIMIT_S, MPIRUN, ROOT
from tests.cluster.listeners import listeners, on_network, tree

pytestmark = [
    pytest.mark.skipif("TEST_MPI_SIZE" in os.environ, reason="starts jobs itself"),
    pytest.mark.skipif(not MPIRUN.exists(), reason="there is no mpirun beside this Python"),
    pytest.mark.long,
]

TORCH = """
import sys, time
from pathlib import Path
import torch, ocomm_torch as hvd
hvd.init()
folder = Path(sys.argv[1])
weight = torch.nn.Parameter(torch.ones(5000))
optimizer = hvd.DistributedOneBitAdam(torch.optim.Adam([weight]), freeze_step=3)
def step():
    optimizer.zero_grad()
    (weight * torch.full((5000,), 1.0 + hvd.rank())).sum().backward()
    optimizer.step()
while not hvd.broadcast_object((folder / "seen").exists()):
    step()
while hvd.rank() == 1 and not (folder / "missed").exists():
    time.sleep(0.01)
step()
hvd.shutdown()
sys.exit(3)
"""

KERAS = """
import sys
import numpy as np, keras, ocomm_tf.keras as hvd
hvd.init()
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
model.compile(getattr(hvd, sys.argv[1])(keras.optimizers.Adam()), "mse", jit_compile=False)
rng = np.random.default_rng(hvd.rank())
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(rng.normal(size=(80, 4)), rng.normal(size=(80, 2)), batch_size=8, epochs=3, callbacks=callbacks, verbose=0)
"""


def start(flags: list[str], script: Path, *arguments: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.Popen(
        [sys.executable, "-m", "ocomm.launch", "-np", "2", *flags, sys.executable, str(script), *arguments],
        cwd=ROOT,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def numbers(page: str, name: str) -> dict[int, float]:
    """By rank, the number of a metric."""
    found = re.findall(rf'^{name}{{rank="(\d+)"[^}}]*}} (\S+)$', page, re.MULTILINE)
    return {int(rank): float(value) for rank, value in found}


def test_a_job_is_scraped_while_it_trains_and_ends_with_its_own_status(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TORCH)
    job = start(["--watch", "--metrics-port", "0"], script, str(tmp_path))
    assert job.stderr is not None
    watchdog = threading.Timer(LIMIT_S, job.kill)
    watchdog.start()
    try:
        said = []
        while not said or "counters of all ranks" not in said[-1]:
            said.append(job.stderr.readline())
            assert said[-1], said
        url = said[-1].split()[-1]
        port = int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/metrics", url)[1])  # type: ignore[index]

        def page() -> str:
            assert job.poll() is None
            time.sleep(0.1)
            with urllib.request.urlopen(url, timeout=20) as answer:
                return answer.read().decode()

        while len(steps := numbers(text := page(), "ocomm_compressed_steps_total")) < 2 or not all(steps.values()):
            pass
        assert "ocomm_ranks 2" in text.splitlines()
        assert set(numbers(text, "ocomm_dense_steps_total").values()) == {3.0}
        assert all(waited > 0 for waited in numbers(text, "ocomm_waited_seconds_total").values())
        sent, dense = numbers(text, "ocomm_sent_bytes_total"), numbers(text, "ocomm_dense_bytes_total")
        assert all(0 < sent[rank] < dense[rank] for rank in range(2))
        sockets = [address for pid in tree(job.pid) for address in listeners(pid)]
        assert any(address.endswith(f":{port:04X}") for address in sockets) and not on_network(sockets)

        (tmp_path / "seen").touch()
        while numbers(page(), "ocomm_rank_missed_by") != {0: 0.0, 1: 1.0}:
            pass
        (tmp_path / "missed").touch()
        _, rest = job.communicate()
    finally:
        watchdog.cancel()
        job.kill()
        job.wait()
    assert job.returncode == 3, rest
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=20)
    lines = [line for line in (*said, *rest.splitlines()) if line.startswith("ocommrun: 2 ranks")]
    end = r"ocommrun: 2 ranks, step \d+, .*sent [\d.]+ [kM]B instead of [\d.]+ [kM]B, [\d.]+ times fewer"
    assert re.match(end, lines[-1])


@pytest.mark.parametrize("optimizer", ["DistributedOptimizer", "DistributedOneBitAdam"])
def test_keras_is_watched_as_torch_is(optimizer: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KERAS)
    job = start(["--watch"], script, optimizer)
    try:
        _, said = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, said
    lines = [line for line in said.splitlines() if line.startswith("ocommrun: ")]
    assert re.match(r"ocommrun: 2 ranks, step 30, (.* steps/s, )?dense, sent [\d.]+ kB(;|$)", lines[-1]), said
