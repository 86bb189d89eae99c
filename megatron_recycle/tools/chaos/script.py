"""`recycle run --chaos FILE`: a process beside the job hurts it as a script says."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_recycle.control import tokens
from megatron_recycle.errors import ConfigError
from megatron_recycle.launch.child import Child
from megatron_recycle.tools.chaos.orders import read_script

ALLOW = "allow"
"""In place of a file: workers listen for precise moments, and no act is planned yet."""
_PATIENCE = 2.0


def check_acts(chaos: str) -> None:
    """Raises ConfigError if `chaos` is neither ALLOW nor a script."""
    if chaos == ALLOW:
        return
    try:
        read_script(Path(chaos).read_text(errors="replace").splitlines(), chaos)
    except OSError as error:
        raise ConfigError(f"--chaos {chaos}: {error.strerror}; give a script, or `{ALLOW}`") from error


@contextmanager
def hurting(chaos: str, run_dir: Path) -> Iterator[None]:
    """Block in which the script's acts happen; `chaos.log` and `chaos.jsonl` record them."""
    if chaos == ALLOW:
        yield
        return
    command = [sys.executable, "-m", "megatron_recycle.cli", "chaos", "--run-dir", str(run_dir), "script", chaos]
    child = Child(command, tokens.without(os.environ), run_dir / "chaos.log")
    try:
        yield
    finally:
        child.signal(signal.SIGINT)
        if child.wait(_PATIENCE) is None:
            child.signal(signal.SIGKILL)
            child.wait(_PATIENCE)
        child.release()
