"""Which of torchrun's variables a rank gets, and which of them cannot be true."""

from __future__ import annotations

import subprocess

import pytest

from ocomm.torch_variables import OF_LAUNCHERS, contradiction, exports, inherited, malformed, missing

NAMES = list(OF_LAUNCHERS)


@pytest.mark.parametrize("column", [0, 1, 2], ids=["Open MPI", "MPICH", "srun"])
def test_a_shell_gives_a_rank_what_its_launcher_says_of_it(column: int) -> None:
    own = {theirs[column]: str(number) for number, theirs in enumerate(OF_LAUNCHERS.values()) if column < len(theirs)}
    script = f"{exports(OF_LAUNCHERS['RANK'][column])}; env"
    done = subprocess.run(["sh", "-c", script], env=own, capture_output=True, text=True, check=True, timeout=60)
    said = dict(line.split("=", 1) for line in done.stdout.splitlines())
    expected = {name: str(number) for number, (name, theirs) in enumerate(OF_LAUNCHERS.items()) if column < len(theirs)}
    assert {name: said[name] for name in NAMES if name in said} == expected


def test_what_the_user_has_set_stays() -> None:
    script = f"{exports('PMI_RANK')}; echo $RANK $LOCAL_RANK"
    environ = {"RANK": "7", "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    done = subprocess.run(["sh", "-c", script], env=environ, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["7", "1"]
    assert missing({"RANK": "7"}, {"RANK": "1", "WORLD_SIZE": "2"}) == {"WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, ""),
        ({"WORLD_SIZE": "2", "RANK": "1"}, ""),
        ({"WORLD_SIZE": "4", "RANK": "1"}, "WORLD_SIZE=4 is set, but this process is one of 2 ranks, as PMI_SIZE says"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "RANK=0 is set, but this process is rank 1, as PMI_SIZE says"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two is set, but this process is one of 2 ranks, as PMI_SIZE says"),
    ],
)
def test_a_contradiction_names_both(environ: dict[str, str], said: str) -> None:
    assert contradiction(environ, 1, 2, "PMI_SIZE") == said


@pytest.mark.parametrize(
    ("environ", "size", "wrong"),
    [
        ({"PATH": "/bin", "MASTER_PORT": "1"}, 2, []),
        ({"WORLD_SIZE": "2"}, 2, []),
        ({"WORLD_SIZE": "2"}, None, ["WORLD_SIZE"]),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, 1, []),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, 2, ["RANK", "LOCAL_RANK", "WORLD_SIZE"]),
        ({"RANK": "1"}, 1, ["RANK"]),
    ],
)
def test_ranks_must_not_inherit_the_place_of_another(
    environ: dict[str, str], size: int | None, wrong: list[str]
) -> None:
    assert inherited(environ, size) == wrong


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, ""),
        ({"WORLD_SIZE": "", "RANK": "7"}, ""),
        ({"WORLD_SIZE": "1"}, ""),
        ({"WORLD_SIZE": "2", "RANK": "1"}, ""),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two is no number of ranks: set it to a whole number of 1 or more"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE=0 is no number of ranks"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set, but not RANK: number the ranks from 0 to 3 by RANK"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 is no rank of WORLD_SIZE=2: number the ranks from 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK=-1 is no rank of WORLD_SIZE=2"),
        ({"WORLD_SIZE": "1", "RANK": "3"}, "RANK=3 is no rank of WORLD_SIZE=1"),
    ],
)
def test_a_rank_without_a_place_is_told_so(environ: dict[str, str], said: str) -> None:
    assert malformed(environ).startswith(said) and bool(malformed(environ)) == bool(said)
