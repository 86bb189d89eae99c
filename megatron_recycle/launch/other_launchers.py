"""Processes started by another launcher: one per worker by srun or torchrun."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_recycle.environment import COORDINATOR
from megatron_recycle.errors import ConfigError

_SIZES = {"torchrun": ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"), "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
          "mpiexec": ("PMI_RANK", "PMI_SIZE")}
"""Launcher -> its identifying variable, and the variable with the number of its processes."""


def refuse(environ: Mapping[str, str]) -> None:
    """Raises ConfigError if another launcher has started `recycle run` several times: each would be a job."""
    if COORDINATOR in environ or environ.get("SLURM_JOB_ID"):  # a worker of ours; or srun, whose step says how many
        return
    for launcher, (mark, size) in _SIZES.items():
        if mark in environ and environ.get(size, "").isdecimal() and int(environ[size]) > 1:
            raise ConfigError(f"{launcher} has started this {environ[size]} times; `recycle run` starts the workers "
                              f"itself: start it once on each host, in the place of {launcher}")


def variables_of_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """torch's variables for a script that srun has started once per worker, if the user has set MASTER_ADDR only; none
    for another launcher."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if "RANK" in environ or "MASTER_ADDR" not in environ or not tasks.isdecimal() or int(tasks) < 2:
        return {}
    found = {"RANK": environ.get("SLURM_PROCID"), "WORLD_SIZE": tasks, "LOCAL_RANK": environ.get("SLURM_LOCALID")}
    return {name: text for name, text in found.items() if text is not None and name not in environ}
