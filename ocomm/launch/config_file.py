"""``--config-file``: flags in YAML, under horovodrun's section names. The command line wins over the file.

params: {fusion_threshold_mb: 64, cycle_time_ms: 2.5}
timeline: {filename: /tmp/timeline.json, mark_cycles: true}
stall_check: {enabled: true, warning_time_seconds: 30}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ocomm.errors import LaunchError

#: By section and key, what stands on the command line: a flag with a value, or one for true and one for false.
_FLAGS: dict[str, dict[str, str | tuple[str, str]]] = {
    "params": {
        "fusion_threshold_mb": "--fusion-threshold-mb",
        "cycle_time_ms": "--cycle-time-ms",
        "cache_capacity": "--cache-capacity",
        "hierarchical_allreduce": ("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
        "hierarchical_allgather": ("--hierarchical-allgather", "--no-hierarchical-allgather"),
        "torus_allreduce": ("--torus-allreduce", "--no-torus-allreduce"),
    },
    "autotune": {
        "enabled": ("--autotune", "--no-autotune"),
        "log_file": "--autotune-log-file",
        "warmup_samples": "--autotune-warmup-samples",
        "steps_per_sample": "--autotune-steps-per-sample",
        "bayes_opt_max_samples": "--autotune-bayes-opt-max-samples",
        "gaussian_process_noise": "--autotune-gaussian-process-noise",
    },
    "timeline": {
        "filename": "--timeline-filename",
        "mark_cycles": ("--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    },
    "stall_check": {
        "enabled": ("--stall-check", "--no-stall-check"),
        "warning_time_seconds": "--stall-check-warning-time-seconds",
        "shutdown_time_seconds": "--stall-check-shutdown-time-seconds",
    },
    "library_options": {
        "mpi_threads_disable": ("--mpi-threads-disable", "--no-mpi-threads-disable"),
        "num_nccl_streams": "--num-nccl-streams",
        "thread_affinity": "--thread-affinity",
        "gloo_timeout_seconds": "--gloo-timeout-seconds",
    },
    "logging": {
        "level": "--log-level",
        "with_timestamp": ("--log-with-timestamp", "--log-without-timestamp"),
    },
}
_CONTROLLERS = {"mpi": ["--mpi"], "gloo": ["--gloo"]}


def read_config_file(path: str) -> list[str]:
    """Returns the flags that the file stands for. Raises LaunchError that names the file, the section and the key."""
    try:
        import yaml
    except ImportError:
        raise LaunchError("--config-file needs PyYAML: pip install 'ocomm[yaml]'.") from None
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise LaunchError(f"--config-file {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise LaunchError(f"--config-file {path}: this is no text in UTF-8.") from None
    except yaml.YAMLError as error:
        raise LaunchError(f"--config-file {path}: this is not YAML: {error}") from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise LaunchError(f"--config-file {path}: expected sections such as 'params:', got {type(content).__name__}.")
    return flags_of(content, path)


def flags_of(content: Mapping[str, Any], path: str) -> list[str]:
    """Returns the flags of a parsed file; ``path`` is for messages."""
    flags: list[str] = []
    for section, values in content.items():
        if section == "controller":
            if not isinstance(values, str) or values.lower() not in _CONTROLLERS:
                raise LaunchError(f"--config-file {path}: controller {values!r} is neither mpi nor gloo.")
            flags += _CONTROLLERS[values.lower()]
            continue
        known = _FLAGS.get(section)
        if known is None:
            sections = ", ".join(["controller", *_FLAGS])
            raise LaunchError(f"--config-file {path}: there is no section {section!r}; there are {sections}.")
        if not isinstance(values or {}, dict):
            raise LaunchError(f"--config-file {path}: {section} has lines such as 'name: value', not {values!r}.")
        for key, value in (values or {}).items():
            flag = known.get(str(key).replace("-", "_"))
            if flag is None:
                raise LaunchError(f"--config-file {path}: {section} has no {key!r}; it has {', '.join(known)}.")
            if isinstance(flag, tuple):
                if not isinstance(value, bool):
                    raise LaunchError(f"--config-file {path}: {section}.{key} is true or false, not {value!r}.")
                flags.append(flag[0] if value else flag[1])
            elif isinstance(value, (bool, dict, list)):
                raise LaunchError(f"--config-file {path}: {section}.{key} is one number or text, not {value!r}.")
            elif value is not None:
                flags.append(f"{flag}={os.path.expanduser(str(value))}")  # ~/x, as a shell expands it
    return flags
