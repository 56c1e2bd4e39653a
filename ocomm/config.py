"""Reads settings from the environment. No other module does.

``OCOMM_<NAME>`` wins; Horovod's ``HOROVOD_<NAME>`` is read if it is unset. An ``OCOMM_*`` variable that does not exist
or cannot be parsed is an error, because a mistyped setting that is silently ignored costs someone a day. A
``HOROVOD_*`` variable that has no meaning here, or whose value Horovod alone takes, is ignored: ``without_meaning`` and
``unusable`` name it for the log.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ocomm.errors import SettingsError, clause
from ocomm.negotiation.autotune import SPACE
from ocomm.telemetry.counters import parse_address
from ocomm.telemetry.log import LEVELS
from ocomm.torch_variables import OF_LAUNCHERS
from ocomm.types import Settings

#: Of a duration, in whatever unit: C counts nanoseconds, and a thread cannot wait for more than 292 years.
_LONGEST = 1e9


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected 0 or 1")


def _whole(text: str, of: str = "") -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a whole number{of}") from None


def _count(text: str, of: str = "") -> int:
    number = _whole(text, of)
    if number < 0:
        raise ValueError("must not be negative")
    return number


def _nbytes(text: str) -> int:
    return _count(text, " of bytes")


def _positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise ValueError("must be at least 1")
    return number


def _at_most(limit: int, of: Callable[[str], int] = _positive) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = of(text)
        if number > limit:
            raise ValueError(f"must be at most {limit}")
        return number

    return parse


def _duration(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError("must be a number that is not negative")
    if number > _LONGEST:
        raise ValueError(f"must be at most {_LONGEST:.0f}")
    return number


def _time_limit(text: str) -> float:
    number = _duration(text)
    if number == 0:
        raise ValueError("must be more than 0")
    return number


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return text.lower()

    return parse


def _cores(text: str) -> tuple[int, ...]:
    return tuple(_count(core) for core in text.split(",")) if text else ()


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _timeline(text: str) -> str:
    return "" if text == "DYNAMIC" else text  # Horovod's word for a timeline that start_timeline() begins later


def _metrics_port(text: str) -> str:
    parse_address(text)
    return text


#: MPI counts the bytes of a message in an int, and a message can be a little more than a segment.
MOST_SEGMENT_NBYTES = 2**30
#: Each segment in flight needs 16 tags of its own, and MPI promises 32768 tags.
MOST_WINDOW = 2047

#: Settings that autotuning changes, unless the environment gives them a value.
TUNABLE = tuple(SPACE)

#: Variable name without its prefix -> (field of Settings, parser, whether Horovod has it).
VARIABLES: dict[str, tuple[str, Callable[[str], Any], bool]] = {
    "FUSION_THRESHOLD": ("fusion_threshold", _nbytes, True),
    "DISABLE_GROUP_FUSION": ("group_fusion", lambda text: not _flag(text), True),
    "CYCLE_TIME": ("cycle_time_ms", _duration, True),
    "CACHE_CAPACITY": ("cache_capacity", _count, True),
    "SEGMENT_BYTES": ("segment_nbytes", _at_most(MOST_SEGMENT_NBYTES), False),
    "WINDOW": ("window", _at_most(MOST_WINDOW, _count), False),
    "HIERARCHICAL_ALLREDUCE": ("hierarchical_allreduce", _flag, True),
    "DIRECT_PEERS": ("direct_peers", _positive, False),
    "SCRATCH_BYTES": ("scratch_nbytes", _nbytes, False),
    "IDLE_MS": ("idle_ms", _duration, False),
    "SPIN_US": ("spin_us", _duration, False),
    "STALL_CHECK_DISABLE": ("stall_check", lambda text: not _flag(text), True),
    "STALL_CHECK_TIME_SECONDS": ("stall_check_s", _duration, True),
    "STALL_CHECK_RAISE": ("stall_raise", _flag, False),
    "DEADLOCK_SECONDS": ("deadlock_s", _duration, False),
    "STALL_SHUTDOWN_TIME_SECONDS": ("stall_shutdown_s", _duration, True),
    "REPLICA_CHECK_STEPS": ("replica_check_steps", _count, False),
    "PEER_TIMEOUT_SECONDS": ("peer_timeout_s", _duration, False),
    "START_TIMEOUT": ("start_timeout_s", _time_limit, True),
    "TORCH_ENV": ("torch_env", _flag, False),
    "ENGINE": ("engine", _choice("native", "python"), False),
    "CUDA_AWARE": ("cuda_aware", _choice("auto", "0", "1"), False),
    "NCCL": ("nccl", _choice("auto", "0", "1"), False),
    "KERNELS": ("kernels", _choice("cpu", "reference"), False),
    "KERNEL_THREADS": ("kernel_threads", _positive, False),
    "LOG_LEVEL": ("log_level", _choice(*LEVELS), True),
    "THREAD_AFFINITY": ("thread_affinity", _cores, True),
    "TIMELINE": ("timeline", _timeline, True),
    "TIMELINE_MARK_CYCLES": ("timeline_mark_cycles", _flag, True),
    "METRICS_PORT": ("metrics_port", _metrics_port, False),
    "WATCH": ("watch", _flag, False),
    "ELASTIC_FOLDER": ("elastic_folder", str, False),
    "ELASTIC_GENERATION": ("elastic_generation", _count, False),
    "ELASTIC_SUPERVISOR": ("elastic_supervisor", _list, False),
    "AUTOTUNE": ("autotune", lambda text: TUNABLE if _flag(text) else (), True),
    "AUTOTUNE_LOG": ("autotune_log", str, True),
    "AUTOTUNE_WARMUP_SAMPLES": ("autotune_warmup_samples", _count, True),
    "AUTOTUNE_STEPS_PER_SAMPLE": ("autotune_steps_per_sample", _positive, True),
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": ("autotune_max_points", _positive, True),
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": ("autotune_noise", _duration, True),
}


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Returns the settings that ``environment`` asks for. Raises SettingsError for an unknown or unparsable
    ``OCOMM_*``.
    """
    values, _ = _parsed(environment)
    if "autotune" in values:
        values["autotune"] = tuple(field for field in values["autotune"] if field not in values)
    if values.get("stall_check_s") == 0:
        values["stall_check"] = False
    return Settings(**values)


def unusable(environment: Mapping[str, str]) -> list[str]:
    """Returns, of each ``HOROVOD_*`` variable that ``read_settings`` ignores because of its value, what is wrong."""
    _, complaints = _parsed(environment)
    return complaints


def _parsed(environment: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of Settings that ``environment`` gives a value, and what ``unusable`` says."""
    values: dict[str, Any] = {}
    complaints: list[str] = []
    for variable, text in sorted(environment.items()):
        prefix, _, name = variable.partition("_")
        if prefix not in ("OCOMM", "HOROVOD"):
            continue
        if name not in VARIABLES or (prefix == "HOROVOD" and not VARIABLES[name][2]):
            if prefix == "OCOMM":
                close = difflib.get_close_matches(name, VARIABLES, 1)
                hint = f" Did you mean OCOMM_{close[0]}?" if close else ""
                raise SettingsError(f"{variable} is not a setting of ocomm.{hint}")
            continue
        field, parse, _ = VARIABLES[name]
        if prefix == "HOROVOD" and f"OCOMM_{name}" in environment:
            continue
        try:
            values[field] = parse(text)
        except ValueError as error:
            complaint = f"{variable}={text!r} cannot be used: {clause(error)}"
            if prefix == "OCOMM":
                raise SettingsError(f"{complaint}.") from None
            complaints.append(complaint)  # Horovod takes any text, such as WARN for warning
    return values, complaints


def without_meaning(environment: Mapping[str, str]) -> list[str]:
    """Returns the ``HOROVOD_*`` variables that nothing of ocomm reads."""
    known = {f"HOROVOD_{name}" for name, (_, _, is_horovods) in VARIABLES.items() if is_horovods}
    known.add("HOROVOD_ELASTIC_TIMEOUT")  # ocommrun reads it
    return sorted(name for name in environment if name.startswith("HOROVOD_") and name not in known)


#: Variables in which launchers tell a process the number of ranks, the most reliable first.
_WORLD_SIZES = (*OF_LAUNCHERS["WORLD_SIZE"], "WORLD_SIZE")
_RANKS = (*OF_LAUNCHERS["RANK"], "RANK")
_JOBS = ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID")
#: Variables in which the launchers of Open MPI and MPICH tell the number of ranks on this host.
_LOCAL_SIZES = OF_LAUNCHERS["LOCAL_WORLD_SIZE"]
#: Variables in which srun tells the number of hosts, of this step or of the allocation.
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")


@dataclass(frozen=True, slots=True)
class Launch:
    """What the environment says about the job: the number of ranks, this rank's number, and the variable with the
    number of ranks.

    ``is_on_one_host`` is True only if the environment says that all ranks are on this host. ``local_size`` is the
    number of ranks on this host, 0 if the environment does not say it. ``ranks_here`` are the numbers of those that
    srun has started on this host; empty under other launchers, which do not tell them.
    """

    variable: str
    size: int
    rank: int
    job: str
    is_on_one_host: bool = False
    local_size: int = 0
    ranks_here: tuple[int, ...] = ()

    @property
    def said(self) -> tuple[int, int, str]:
        """This rank's number, the number of ranks, and the variable that says so."""
        return self.rank, self.size, self.variable

    @property
    def is_mpi(self) -> bool:
        """True if the launcher is one that MPI knows; torchrun is not."""
        return self.variable in OF_LAUNCHERS["WORLD_SIZE"]


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """Returns what the environment tells about the launcher of this process; None for a plain ``python train.py``."""
    # What torchrun starts inside a task of srun inherits the variables of that task, which is no rank.
    is_of_torchrun = "TORCHELASTIC_RUN_ID" in environment
    for variable, rank in zip(_WORLD_SIZES, _RANKS, strict=True):
        of_task = variable == "SLURM_NTASKS" or (variable == "PMI_SIZE" and "SLURM_PROCID" in environment)
        if of_task and is_of_torchrun:
            continue
        if environment.get(variable, "").isdigit() and (variable != "SLURM_NTASKS" or "SLURM_PROCID" in environment):
            number = environment.get(rank, "0")
            job = next((environment[name] for name in _JOBS if name in environment), "")
            if job and (restarts := environment.get("SLURM_RESTART_COUNT", "0")) != "0":
                job += f"-{restarts}"  # a job that Slurm starts again has the same names
            size = int(environment[variable])
            own = int(number) if number.isdigit() else 0
            local = int(next((text for name in _LOCAL_SIZES if (text := environment.get(name, "")).isdigit()), "0"))
            # Of what Hydra starts inside a task of srun, Slurm's list is about that task.
            tasks = environment.get("SLURM_GTIDS", "").split(",") if of_task and not local else []
            here = tuple(int(task) for task in tasks if task.isdigit())
            return Launch(variable, size, own, job, _is_on_one_host(variable, size, local, environment), local, here)
    return None


def _is_on_one_host(variable: str, size: int, local_size: int, environment: Mapping[str, str]) -> bool:
    if variable == "SLURM_NTASKS" or ("SLURM_PROCID" in environment and variable == "PMI_SIZE"):
        return next((environment[name] for name in _NODES if name in environment), "") == "1"
    return local_size == size


def is_gloo_launch(environment: Mapping[str, str]) -> bool:
    """Returns True if horovodrun started this process as one of several in Gloo mode, whose ranks do not use MPI."""
    return "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environment and environment.get("HOROVOD_SIZE", "1") not in ("", "1")
