"""Settings come from the environment in one place, and what cannot be right is refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ocomm.config import VARIABLES, Launch, read_launch, read_settings, unusable, without_meaning
from ocomm.errors import SettingsError
from ocomm.types import Settings


def test_without_variables_the_defaults_hold() -> None:
    assert read_settings({"PATH": "/bin", "OCOMMX": "1"}) == Settings()


def test_every_setting_has_a_variable() -> None:
    assert {field for field, _, _ in VARIABLES.values()} == {field.name for field in dataclasses.fields(Settings)}


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("OCOMM_FUSION_THRESHOLD", "0", "fusion_threshold", 0),
        ("OCOMM_CYCLE_TIME", "2.5", "cycle_time_ms", 2.5),
        ("OCOMM_STALL_CHECK_DISABLE", "1", "stall_check", False),
        ("HOROVOD_STALL_CHECK_DISABLE", "0", "stall_check", True),
        ("HOROVOD_LOG_LEVEL", "DEBUG", "log_level", "debug"),
        ("OCOMM_ENGINE", "python", "engine", "python"),
        ("HOROVOD_DISABLE_GROUP_FUSION", "1", "group_fusion", False),
        ("HOROVOD_THREAD_AFFINITY", "0,8", "thread_affinity", (0, 8)),
        ("HOROVOD_TIMELINE", "DYNAMIC", "timeline", ""),
        ("HOROVOD_TIMELINE", "/t/x.json", "timeline", "/t/x.json"),
    ],
)
def test_a_variable_sets_its_field(variable: str, text: str, field: str, value: object) -> None:
    assert read_settings({variable: text}) == dataclasses.replace(Settings(), **{field: value})


def test_our_variable_wins_over_horovods() -> None:
    both = {"HOROVOD_CYCLE_TIME": "7", "OCOMM_CYCLE_TIME": "3"}
    assert read_settings(both).cycle_time_ms == 3.0
    assert read_settings({"HOROVOD_CYCLE_TIME": "nonsense", "OCOMM_CYCLE_TIME": "3"}).cycle_time_ms == 3.0


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("OCOMM_CYLCE_TIME", "1", "OCOMM_CYLCE_TIME is not a setting of ocomm. Did you mean OCOMM_CYCLE_TIME?"),
        ("OCOMM_ZZZ", "1", "OCOMM_ZZZ is not a setting of ocomm."),
        ("OCOMM_WINDOW", "-1", "OCOMM_WINDOW='-1' cannot be used: must not be negative."),
        ("OCOMM_SEGMENT_BYTES", "0", "OCOMM_SEGMENT_BYTES='0' cannot be used: must be at least 1."),
        ("OCOMM_IDLE_MS", "1e300", "OCOMM_IDLE_MS='1e300' cannot be used: must be at most 1000000000."),
        ("OCOMM_FUSION_THRESHOLD", "-1", "OCOMM_FUSION_THRESHOLD='-1' cannot be used: must not be negative."),
        ("OCOMM_FUSION_THRESHOLD", "64MB",
         "OCOMM_FUSION_THRESHOLD='64MB' cannot be used: must be a whole number of bytes."),
        ("OCOMM_CYCLE_TIME", "1ms", "OCOMM_CYCLE_TIME='1ms' cannot be used: must be a number that is not negative."),
        ("OCOMM_PEER_TIMEOUT_SECONDS", "inf",
         "OCOMM_PEER_TIMEOUT_SECONDS='inf' cannot be used: must be a number that is not negative."),
        ("OCOMM_THREAD_AFFINITY", "1,x",
         "OCOMM_THREAD_AFFINITY='1,x' cannot be used: must be a whole number."),
        ("OCOMM_SEGMENT_BYTES", "1073741825",
         "OCOMM_SEGMENT_BYTES='1073741825' cannot be used: must be at most 1073741824."),
        ("OCOMM_WINDOW", "2048", "OCOMM_WINDOW='2048' cannot be used: must be at most 2047."),
        ("OCOMM_ENGINE", "rust", "OCOMM_ENGINE='rust' cannot be used: expected one of native, python."),
        ("OCOMM_STALL_CHECK_DISABLE", "maybe", "OCOMM_STALL_CHECK_DISABLE='maybe' cannot be used: expected 0 or 1."),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused_by_name(variable: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings({variable: text})
    assert str(caught.value) == message


def test_a_value_that_horovod_alone_takes_leaves_the_default_and_is_named() -> None:
    environment = {"HOROVOD_LOG_LEVEL": "WARN", "HOROVOD_FUSION_THRESHOLD": "-1", "HOROVOD_CYCLE_TIME": "2"}
    assert read_settings(environment) == dataclasses.replace(Settings(), cycle_time_ms=2.0)
    levels = "trace, debug, info, notice, warning, error, fatal"
    assert unusable(environment) == [
        "HOROVOD_FUSION_THRESHOLD='-1' cannot be used: must not be negative",
        f"HOROVOD_LOG_LEVEL='WARN' cannot be used: expected one of {levels}",
    ]
    assert unusable({"HOROVOD_LOG_LEVEL": "WARN", "OCOMM_LOG_LEVEL": "error"}) == []


def test_a_horovod_variable_without_meaning_is_ignored_and_known_by_name() -> None:
    environment = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CYCLE_TIME": "1", "OCOMM_WINDOW": "4", "PATH": "/bin"}
    assert read_settings({"HOROVOD_GPU_OPERATIONS": "NCCL"}) == Settings()
    assert without_meaning(environment) == ["HOROVOD_GPU_OPERATIONS"]


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, None),
        ({"WORLD_SIZE": "x"}, None),
        ({"WORLD_SIZE": "2", "RANK": "1"}, Launch("WORLD_SIZE", 2, 1, "")),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_NAMESPACE": "job@1", "WORLD_SIZE": "2"},
         Launch("OMPI_COMM_WORLD_SIZE", 4, 3, "job@1")),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
         Launch("OMPI_COMM_WORLD_SIZE", 4, 3, "", local_size=2)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
         Launch("OMPI_COMM_WORLD_SIZE", 4, 3, "", is_on_one_host=True, local_size=4)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"},
         Launch("PMI_SIZE", 2, 1, "", is_on_one_host=True, local_size=2)),
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "PMI_JOBID": "7"}, Launch("PMI_SIZE", 2, 0, "7")),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_JOB_ID": "9"}, Launch("SLURM_NTASKS", 8, 5, "9")),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_NNODES": "1"},
         Launch("SLURM_NTASKS", 8, 5, "", is_on_one_host=True)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_NNODES": "1", "SLURM_STEP_NUM_NODES": "2"},
         Launch("SLURM_NTASKS", 8, 5, "")),
        # a job that Slurm has started again
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "2"},
         Launch("SLURM_NTASKS", 8, 5, "9-2")),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "0"},
         Launch("SLURM_NTASKS", 8, 5, "9")),
        # the tasks of this host
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_GTIDS": "0,2"},
         Launch("SLURM_NTASKS", 4, 2, "", ranks_here=(0, 2))),
        ({"PMI_SIZE": "4", "PMI_RANK": "2", "SLURM_PROCID": "2", "SLURM_GTIDS": "0,2"},
         Launch("PMI_SIZE", 4, 2, "", ranks_here=(0, 2))),
        # Hydra in an allocation, whose daemons are tasks of srun
        ({"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "2", "SLURM_PROCID": "1", "SLURM_GTIDS": "1"},
         Launch("PMI_SIZE", 4, 2, "", local_size=2)),
        ({"SLURM_NTASKS": "8"}, None),  # a batch script, not a task
        # torchrun inside a task of srun, of which there is one for each host
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "PMI_SIZE": "2", "PMI_RANK": "1", "TORCHELASTIC_RUN_ID": "none",
          "WORLD_SIZE": "8", "RANK": "5"}, Launch("WORLD_SIZE", 8, 5, "")),
    ],
)  # fmt: skip
def test_the_environment_tells_who_launched_this_process(environment: dict[str, str], launch: Launch | None) -> None:
    assert read_launch(environment) == launch
    if launch is not None:
        assert launch.is_mpi == (launch.variable != "WORLD_SIZE")


def test_the_page_of_settings_says_what_the_code_does() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines()]
    told = [row[:4] for row in rows if len(row) == 5 and row[0].startswith("`OCOMM_")]
    defaults = Settings()
    expected = []
    for name, (field, _, horovod) in VARIABLES.items():
        value = getattr(defaults, field)
        if isinstance(value, bool):  # a variable that disables says the opposite
            value = int(value is not ("DISABLE" in name))
        default = "" if value == () else str(value)
        agreed = "all" if field in Settings.AGREED else ""
        expected.append([f"`OCOMM_{name}`", default, "yes" if horovod else "", agreed])
    assert told == expected
