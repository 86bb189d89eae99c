"""A coordinator for jobs started by another launcher (torchrun, deepspeed).

No launcher of ours sees their processes end: the end of a worker's control connection counts instead.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from megatron_recycle.config import RecycleConfig, variable
from megatron_recycle.control import tokens
from megatron_recycle.control.coordinator_spec import CoordinatorSpec
from megatron_recycle.environment import Launched
from megatron_recycle.launch import coordinator_process as service
from megatron_recycle.launch.run_folder import prepare


def start(settings: RecycleConfig) -> tuple[str, str]:
    """Start a coordinator beside this process (global rank 0); returns its address and the job's token.

    The coordinator outlives this process, which may die, and ends by itself when the job is over.
    Needs WORLD_SIZE in the environment. Raises ConfigError for a token that is too short, or an unfit run folder.
    """
    size = Launched.read().size
    assert size is not None, "torch's process group has been made"
    token = tokens.given(os.environ) or secrets.token_hex(32)
    run_dir = Path(settings.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    prepare(run_dir)
    timeouts = ("heartbeat_interval", "heartbeat_timeout", "transport_timeout", "report_timeout")
    environ = {**os.environ, **{variable(name): str(getattr(settings, name)) for name in timeouts}}
    spec = CoordinatorSpec(size, settings.interface, embedded=True)
    started = service.start(spec, run_dir, token, environ, tied=False)
    started.child.release()
    return started.control, token
