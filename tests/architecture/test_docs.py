"""The documentation says what the code says: files in it are well formed, and messages that it explains exist.

Scripts run in ``tests/cluster/test_doc_blocks.py``; links and references are checked by ``make docs``.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from ocomm.predict import __main__ as predict
from tests.doc_blocks import blocks
from tools import prose

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ocomm", "ocomm_torch", "ocomm_tf")
SCRIPTS = blocks(".sbatch") | blocks(".sh")
#: A line of a string that goes on in the next line of the source.
_JOINT = re.compile(r"""["'][ ]*\n\s*f?["']""")


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell_scripts_of_the_documentation_are_shell(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=SCRIPTS[name], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_there_are_files_of_each_kind() -> None:
    assert len(SCRIPTS) >= 2 and len(blocks(".yaml")) >= 2 and len(blocks(".py")) >= 3 and blocks("Dockerfile")


def test_jobs_of_kubernetes_have_what_their_operators_ask_for() -> None:
    jobs = {name: yaml.safe_load(text) for name, text in blocks(".yaml").items()}
    mpi, torchrun = jobs["recipes.md: mpijob.yaml"], jobs["recipes.md: trainjob.yaml"]
    assert (mpi["apiVersion"], mpi["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    replicas = mpi["spec"]["mpiReplicaSpecs"]
    assert replicas.keys() == {"Launcher", "Worker"} and replicas["Launcher"]["replicas"] == 1
    command = replicas["Launcher"]["template"]["spec"]["containers"][0]["command"]
    assert command[command.index("-np") + 1] == str(replicas["Worker"]["replicas"] * mpi["spec"]["slotsPerWorker"])
    assert (torchrun["apiVersion"], torchrun["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert torchrun["spec"]["trainer"]["command"][0] == "torchrun"


def test_messages_that_are_explained_are_in_the_code() -> None:
    source = "\n".join(
        _JOINT.sub("", path.read_text()) for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    )
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [
        message for row in re.findall(r"^\| (`[^|]*)\|", page, re.MULTILINE) for message in re.findall("`(.*?)`", row)
    ]
    assert len(quoted) > 12
    missing = [message for message in quoted if message not in source]
    assert not missing


def test_commands_of_the_cost_model_have_the_arguments_that_it_needs() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    found = [
        shlex.split(arguments)
        for page in pages
        for arguments in re.findall(r"python -m ocomm\.predict (--[^`\n]*)", page.read_text())
    ]
    assert len(found) >= 3
    for arguments in found:
        assert predict.main([each for each in arguments if each != "--probe"]) == 0  # a job's ranks measure


def test_the_readme_is_read_in_a_minute() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_prose_is_counted_without_code() -> None:
    page = (
        "One of [those of](what-is.md) all:\n\n    that of code\n\n| what is (a (b)) | `of which` |\n\n"
        + 36 * "word "
        + "."
    )
    assert [fault for each in prose.sentences(page) for fault in prose.faults(each)] == [
        "those of",
        "what is",
        "nested parentheses",
        "long",
    ]
