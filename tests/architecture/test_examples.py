"""The examples as a user starts them, for a few steps on two ranks."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from tests.cluster.jobs import has_mpi

for _module in ("torch", "sklearn", "matplotlib", "tqdm", "tabulate"):
    pytest.importorskip(_module)

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


pytestmark = pytest.mark.skipif(not has_mpi(), reason="there is no mpirun")

#: Starts one script after the other in one process: to import Torch takes longer than each of them.
ONE_AFTER_THE_OTHER = """
import json, os, runpy, sys
import ocomm_torch as hvd
for name, *arguments in json.loads(sys.argv[1]):
    sys.argv = [name, *arguments]
    try:
        runpy.run_path(f"examples/{name}", run_name="__main__")
    except SystemExit as end:
        assert not end.code, name
    hvd.shutdown()
    if os.environ["RANK"] == "0":
        print("== over", flush=True)
"""


def run_example(name: str, *args: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return run(f"examples/{name}", *args, launcher=launcher)


def run(*program: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ocomm.launch", "-np", "2", *launcher, sys.executable, *program],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )


def untagged(output: str) -> str:
    """Without the launcher's tag at the start of each line."""
    return re.sub(r"^\[\d+,\d+\]<std(out|err)>: ?", "", output, flags=re.MULTILINE)


ONE_BIT, ADASUM = ["--one-bit", "--freeze-step", "10"], ["--use-adasum", "--fp16-allreduce"]
MNIST = ["torch_mnist_horovod.py", "--epochs", "2"]
SYNTHETIC = ["torch_synthetic_benchmark.py", *("--width", "16", "--layers", "2", "--num-iters", "2"),
             *("--num-batches-per-iter", "2")]  # fmt: skip


@dataclass
class Scripts:
    """How a job of several scripts has ended: what each of them has printed, and what all of them say on stderr."""

    outputs: list[str]
    stderr: str
    folder: Path


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    """The demo; then Horovod's scripts, as people have them and with a flag each."""
    folder = tmp_path_factory.mktemp("demo")
    demo = ["torch_digits.py", "--steps", "20", "--freeze-step", "10", "--output", str(folder)]
    given = [demo, MNIST, [*MNIST, *ONE_BIT], SYNTHETIC, [*SYNTHETIC, *ADASUM]]
    done = run("-c", ONE_AFTER_THE_OTHER, json.dumps(given))
    assert done.returncode == 0, done.stderr
    return Scripts(untagged(done.stdout).split("== over\n"), done.stderr, folder)


def test_the_demo_trains_both_and_says_that_the_replicas_are_equal(scripts):
    output = scripts.outputs[0]
    for name in ("Adam", "1-bit Adam"):
        assert re.search(rf"^{name} +\d\.\d+ +\d\.\d+ +\d+\.\d+ %", output, re.MULTILINE), output
        assert f"{name}: parameters of all 2 ranks are equal bit for bit" in output
    assert "PARAMETERS DIFFER" not in output


def test_the_demo_counts_a_thirtieth_of_the_bytes_in_a_compressed_step(scripts):
    (ratio,) = re.findall(r"A compressed step sends (\d+\.\d) times fewer bytes", scripts.outputs[0])
    assert 31 < float(ratio) < 32  # 31.75 without headers and short blocks


def test_the_demo_shows_progress_and_writes_the_picture(scripts):
    assert "20/20" in scripts.stderr
    picture = scripts.folder / "torch_digits.png"
    assert str(picture) in scripts.outputs[0]
    assert picture.read_bytes().startswith(PNG)


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("torch_digits")


def test_a_full_disk_is_named_after_the_results(digits, tmp_path, monkeypatch, capsys):
    (tmp_path / "torch_digits.png").symlink_to("/dev/full")
    flags = ["--steps", "4", "--freeze-step", "2", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["torch_digits.py", *flags])
    assert digits.main() == 1
    said = capsys.readouterr()
    assert "1-bit Adam: parameters of all 1 ranks are equal bit for bit" in said.out
    message = f"cannot write {tmp_path / 'torch_digits.png'}: No space left on device; the results above stand"
    assert message in said.err.splitlines()


def test_an_output_folder_that_cannot_be_made_is_named(digits, tmp_path, capsys):
    (tmp_path / "file").touch()
    run = digits.Run("Adam")
    assert not digits.save_picture(run, run, 0.0, tmp_path / "file" / "x")
    assert f"cannot write {tmp_path}/file/x/torch_digits.png: Not a directory" in capsys.readouterr().err


def trained_on(ranks: int, grid: str) -> tuple[str, float]:
    """The hash of the parameters of torch_3d.py on a grid of two replicas, and rank 0's kB per step."""
    done = run_example("torch_3d.py", "--grid", grid, "--steps", "10", launcher=("-np", str(ranks)))
    assert done.returncode == 0, done.stderr
    output = untagged(done.stdout)
    assert "The parameters of 2 replica(s) are equal bit for bit" in output
    sent = re.findall(r"^\d  +\S+ .*? \d+\.\d\d +(\d+\.\d) ", output, re.MULTILINE)
    assert len(sent) == ranks
    return output.split("sha256 ")[1], float(sent[0])


@pytest.mark.long  # jobs of four ranks; frontends/test_torch_grids.py has a short one
def test_a_grid_has_the_parameters_of_its_data_axis_alone_and_half_of_its_bytes():
    found = [trained_on(4, "pp=2,dp=2"), trained_on(2, "dp=2"), trained_on(4, "dp=2,fsdp=2")]
    assert found[0][0] == found[1][0] != found[2][0]
    assert found[0][1] <= 0.51 * found[1][1]


@pytest.mark.long
def test_stages_of_tensor_parallel_layers_have_the_parameters_of_one_stage():
    assert trained_on(8, "pp=2,dp=2,tp=2")[0] == trained_on(4, "dp=2,tp=2")[0]


@pytest.mark.long  # frontends/test_torch_diloco.py has it without a launcher
def test_ranks_that_meet_once_in_20_steps_learn_and_end_alike():
    done = run_example("torch_diloco.py", "--steps", "110")
    assert done.returncode == 0, done.stderr
    output = untagged(done.stdout)
    (accuracy,) = re.findall(r"accuracy (\d+\.\d) %; the parameters of all 2 ranks are equal bit for bit", output)
    assert float(accuracy) > 80
    assert "110 steps, 6 syncs" in output


@pytest.mark.parametrize("which", [0, 1], ids=["dense", "one-bit"])
def test_a_horovod_script_learns_with_one_line_changed(scripts, which):
    output = scripts.outputs[1 + which]
    first, last = (float(a) for a in re.findall(r"Accuracy: (\d+\.\d+)%", output))
    assert last > first
    assert last > 50
    found = re.findall(r"Sent (\d+) bytes, dense: (\d+)", output)
    assert len(found) == which
    assert all(int(sent) < 0.3 * int(dense) for sent, dense in found)


@pytest.mark.long  # two ranks import TensorFlow; cluster/test_mixed_teams.py starts an example with Keras
@pytest.mark.skipif(not find_spec("tensorflow"), reason="needs tensorflow")
def test_a_horovod_script_of_keras_learns_with_one_line_changed(tmp_path):
    saved = tmp_path / "digits.keras"
    flags = ("--one-bit", "--freeze-step", "10", "--epochs", "2", "--output", str(saved))
    done = run_example("keras_digits_horovod.py", *flags)
    assert done.returncode == 0, done.stderr
    output = untagged(done.stdout)
    assert float(re.findall(r"test loss .*, accuracy (\d+\.\d+) %", output)[0]) > 50
    assert float(re.findall(r"(\d+\.\d) times fewer bytes", output)[0]) > 3
    assert saved.exists()


def test_loaders_of_elastic_examples_draw_no_seeds_from_the_generator_that_dropout_uses():
    loaders = [
        node
        for example in (ROOT / "examples").glob("*elastic*.py")
        for node in ast.walk(ast.parse(example.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("DataLoader")
    ]
    assert loaders
    assert all("generator" in [keyword.arg for keyword in loader.keywords] for loader in loaders)


@pytest.mark.long  # two generations import Torch; frontends/test_torch_elastic.py and cluster/test_elastic.py have it
def test_an_elastic_script_of_horovods_goes_on_after_a_death():
    flags = ("--epochs", "2", "--batches-per-commit", "8", "--die-at", "30")
    done = run_example("torch_mnist_elastic.py", *flags, launcher=("--min-np", "2"))
    assert done.returncode == 0, done.stderr
    output = untagged(done.stdout)
    for rank in range(2):  # back to the last commit
        assert f"rank {rank} of 2 goes on after step 24" in output
    assert "generation 1 failed: rank 1 on localhost was ended by signal 9; its last commit was 3" in done.stderr
    first, last = (float(a) for a in re.findall(r"accuracy (\d+\.\d+)%", output))
    assert last > first and last > 50


@pytest.mark.long  # two generations import TensorFlow; frontends/test_tf_elastic.py has it
@pytest.mark.skipif(not find_spec("tensorflow"), reason="needs tensorflow")
def test_an_elastic_fit_of_keras_goes_on_after_a_death():
    done = run_example("keras_digits_elastic.py", "--epochs", "2", "--die-at", "33", launcher=("--min-np", "2"))
    assert done.returncode == 0, done.stderr
    for rank in range(2):  # back to the last commit, of step 30; an epoch has 22
        assert f"rank {rank} of 2 begins in epoch 1, batch 8" in untagged(done.stdout)
    assert "generation 1 failed: rank 1 on localhost was ended by signal 9; its last commit was 4" in done.stderr
    assert float(re.findall(r"test loss .*, accuracy (\d+\.\d+) %", untagged(done.stdout))[0]) > 50


@pytest.mark.parametrize("which", [3, 4], ids=["average", "adasum"])
def test_horovods_synthetic_benchmark_runs(scripts, which):
    assert re.search(r"^Samples/s on 2 rank\(s\): \d+", scripts.outputs[which], re.MULTILINE)
