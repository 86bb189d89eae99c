"""`python -m megatron_recycle SCRIPT ARGUMENTS`: runs an unchanged training script with the plugin on.

`recycle run` starts its workers this way; under torchrun it is `torchrun ... -m megatron_recycle SCRIPT ...`. The
script sees the environment of `python SCRIPT ARGUMENTS`: its name in `sys.argv[0]`, its folder in `sys.path[0]`, itself
as `__main__`; with `-m MODULE` in the place of SCRIPT, that of `python -m MODULE`. The plugin stays off if the
DeepSpeed JSON says `"recycle": {"enabled": false}`.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from functools import partial
from pathlib import Path

from megatron_recycle import enable
from megatron_recycle.errors import ConfigError, JobEnded, UnsupportedError
from megatron_recycle.launch.other_launchers import variables_of_srun
from megatron_recycle.observe.output import spare_output
from megatron_recycle.streams import open_standard_streams

USAGE = "usage: python -m megatron_recycle (SCRIPT | -m MODULE) [ARGUMENT ...]"
USAGE_ERROR = 2


def main(arguments: list[str]) -> int:
    """Run the script `arguments[0]`, or the module after -m, with the other arguments; returns 0 if it ended well.

    Statuses: the script's own where it calls `sys.exit`; 1 for an uncaught exception (as python does); 2 if the
    script, the module or a supported framework is not there, or a setting is refused; a JobEnded's own.

    Raises:
        SystemExit: the script's.
        Exception: any that the script does not catch.
    """
    open_standard_streams()
    spare_output()
    module = len(arguments) > 1 and arguments[0] in ("-m", "--module")
    arguments = arguments[module:]
    if not arguments or (arguments[0].startswith("-") and not module):
        print(USAGE, file=sys.stdout if arguments[:1] in (["-h"], ["--help"]) else sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else USAGE_ERROR
    script = Path(arguments[0])
    if not module and not script.exists():
        print(f"python -m megatron_recycle: there is no script {script}", file=sys.stderr)
        return USAGE_ERROR
    os.environ.update(variables_of_srun(os.environ))
    try:
        enable()
    except (ImportError, ConfigError) as error:
        if isinstance(error, ImportError) and error.name is not None:
            raise  # a framework is there but cannot be loaded: the traceback says where
        print(f"python -m megatron_recycle: {error}", file=sys.stderr)
        return USAGE_ERROR
    except JobEnded as end:  # of a process that is to join, and cannot even begin
        print(f"megatron-recycle: {end}", file=sys.stderr)
        return end.status
    sys.argv = arguments
    if not module:  # a module's place is the working directory, as it is of this one
        sys.path[0] = str(script if script.is_dir() else Path(os.path.realpath(script)).parent)
    run = partial(runpy.run_module, alter_sys=True) if module else runpy.run_path
    try:
        run(arguments[0], run_name="__main__")
    except ImportError as error:
        if not (module and _of_runpy(error)):
            raise
        return _failed(error, USAGE_ERROR, "python -m megatron_recycle")
    except JobEnded as end:
        return _failed(end, end.status)
    except (ConfigError, UnsupportedError) as error:  # known late: from the framework's own configuration, or the model
        return _failed(error, USAGE_ERROR)
    except SystemExit as end:
        if end.code not in (None, 0):
            _mark_failed(end)
        elif (status := _came_to_nothing()) != 0:
            return status
        raise
    return _came_to_nothing()


def _of_runpy(error: ImportError) -> bool:
    """Whether the module to run does not exist; any other failed import is the module's own."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals is vars(runpy)


def _came_to_nothing() -> int:
    """Exit status of a script that has ended well: 0, or a failure if it was to join a running job and never asked to
    be admitted."""
    from megatron_recycle.runtime.comm.standalone import came_to_nothing

    text = came_to_nothing()
    return 0 if text is None else _failed(JobEnded(text), 1)


def _failed(error: Exception, status: int, program: str = "megatron-recycle") -> int:
    print(f"{program}: {error}", file=sys.stderr)
    _mark_failed(error)
    return status


def _mark_failed(error: BaseException) -> None:
    """Mark this process as failed for its exit handlers, as an uncaught exception does.

    Otherwise the engine would stand by for the end of a job whose other workers wait for this one.
    """
    sys.last_type, sys.last_value = type(error), error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
