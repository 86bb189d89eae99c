"""A worker's command and environment, and the number of workers on a host, in torchrun's terms."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_recycle import nccl_settings
from megatron_recycle.control.sockets import targets
from megatron_recycle.errors import ConfigError
from megatron_recycle.launch.devices import visible
from megatron_recycle.launch.surroundings import working_directory
from megatron_recycle.observe.runbook import with_section


def torchrun_environment(
    environ: Mapping[str, str], control: str, nodes: int, node: int
) -> dict[str, str]:
    """The variables that torchrun would set for a group of `nodes` hosts; RANK and its like come with each worker.
    torch's store is where the coordinator listens, `control`: see `runtime.comm.job_store`."""
    host, port = targets(control)[0]
    return {
        "OMP_NUM_THREADS": "1",
        **nccl_settings.defaults(environ),
        **environ,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_NAME": "default",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "recycle",
        "PYTHONUNBUFFERED": "1",
    }


def default_nproc(environ: Mapping[str, str]) -> int:
    """Visible CUDA devices, or 1 without any."""
    if (named := visible(environ)) is not None:
        return max(1, len([name for name in named if name != "-1"]))
    found = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    return max(1, len(found))


NO_PYTHON = "--no-python"


_PASSING = "recycle: committed "
_CLEAR = "\r\x1b[K"


def say_to(stream: Any) -> Callable[[str], None]:
    """A `say` that writes lines at once; warnings name their section of the runbook. On a terminal, lines about
    committed iterations overwrite each other, so that events stay in sight."""
    terminal, passing = stream.isatty(), False

    def say(line: str) -> None:
        nonlocal passing
        before = _CLEAR if passing else ""
        passing = terminal and _PASSING in line
        if passing:
            line = line[:max(1, shutil.get_terminal_size().columns - 1)]
        elif "recycle: warning: " in line:
            line = with_section(line)
        print(f"{before}{line}", end="" if passing else "\n", file=stream, flush=True)

    return say


def clock() -> str:
    """The current time, a prefix of the launcher's lines for later readers."""
    return time.strftime("%Y-%m-%d %H:%M:%S ")


def script_command(script: str, arguments: Sequence[str], module: bool, no_python: bool = False) -> tuple[str, ...]:
    """The script with its arguments, as they end a command line of `recycle run`."""
    return (*(("-m",) if module else ()), *((NO_PYTHON,) if no_python else ()), script, *arguments)


def python_command(script: Sequence[str]) -> list[str]:
    """A worker's command: the script (see `script_command`) with the plugin on, or the program as it is."""
    return list(script[1:]) if script[0] == NO_PYTHON else [sys.executable, "-m", "megatron_recycle", *script]


def check_script(script: str, module: bool, no_python: bool = False) -> None:
    """Raises ConfigError if there is no such script. For a module only the first name is looked up: further ones would
    take an import."""
    if no_python:
        if shutil.which(script) is None:
            raise ConfigError(f"there is no program {script}")
    elif not module:
        if not Path(script).exists():
            raise ConfigError(f"there is no script {script}")
    elif script.endswith(".py") and Path(script).is_file():
        raise ConfigError(f"-m takes a module's name, and {script} is a file: leave -m out")
    elif not all(part.isidentifier() for part in script.split(".")):
        raise ConfigError(f"-m takes a module's whole name, as package.module, and not {script}")
    elif not _is_there(script.partition(".")[0]):
        raise ConfigError(f"there is no module {script}")


def _is_there(name: str) -> bool:
    """Whether workers find this module or package, which has no dot: in the working directory, or installed."""
    try:
        return PathFinder.find_spec(name, [working_directory()]) is not None or find_spec(name) is not None
    except ValueError:  # of a module without a specification
        return False
