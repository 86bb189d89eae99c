"""The Slurm step that a launcher runs in: the number of its nodes, and this node among them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_recycle.errors import ConfigError

_INTERACTIVE = 4294967290
"""Step of the shell that `salloc` opens on a node; special steps have this number or a higher one."""
_LIMIT = 5.0


@dataclass(frozen=True)
class Step:
    """A step of one launcher per node: the number of its `nodes`, and this node's `rank` among them.

    `name` tells it from every other step, and from this one's life before a requeue. `folder` is its run folder unless
    the user names one.
    """

    nodes: int
    rank: int
    name: str
    folder: str


def step_of(environ: Mapping[str, str]) -> Step | None:
    """The step of this process, if it has several nodes; None for one node, or without Slurm.

    Raises:
        ConfigError: Slurm has not started one launcher per node.
    """
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return None
    step = environ.get("SLURM_STEP_ID", "")
    shell = not step.isdecimal() or int(step) >= _INTERACTIVE
    nodes = _number(environ, *(["SLURM_NNODES", "SLURM_JOB_NUM_NODES"] if shell else ["SLURM_STEP_NUM_NODES"]))
    if shell or "SLURM_PTY_PORT" in environ:
        if nodes > 1:
            raise ConfigError(f"Slurm has given this job {nodes} nodes, and `recycle run` was started on one of them: "
                              "start it by `srun --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1`, or say "
                              "--nnodes 1")
        return None
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks > nodes:
        raise ConfigError(f"Slurm has started {tasks} tasks on {nodes} node{'s' * (nodes > 1)}; `recycle run` is "
                          "started once on each and starts the workers there itself: srun --ntasks-per-node=1 ... "
                          "recycle run --nproc WORKERS_PER_NODE")
    if _number(environ, "SLURM_HET_SIZE", "SLURM_PACK_SIZE") > 1:
        raise ConfigError("the nodes of a heterogeneous Slurm job cannot be told apart: give --nnodes, --node-rank, "
                          "--master-addr, --master-port and a token yourself")
    if nodes == 1:
        return None
    name = f"slurm-{job}.{step}"
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    return Step(nodes, int(environ["SLURM_PROCID"]), f"{name}.{restarts}",
                f"runs/slurm-{job}" if step == "0" else f"runs/{name}")


def towards(environ: Mapping[str, str]) -> list[str]:
    """Names and addresses of the step's nodes and of the one that started it, as far as Slurm tells them here."""
    nodes: list[str] = []
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", environ.get("SLURM_STEP_NODELIST", "")],
                              check=False, capture_output=True, text=True, timeout=_LIMIT, stdin=subprocess.DEVNULL)
        nodes = done.stdout.split()[::-1] if done.returncode == 0 else []  # the last one is surely not this one
    except (OSError, subprocess.TimeoutExpired):
        pass  # in a container there may be no Slurm
    return [*nodes, *filter(None, [environ.get("SLURM_LAUNCH_NODE_IPADDR")])]


def _number(environ: Mapping[str, str], *names: str) -> int:
    """The first of these variables that is a number; 1 if there is none."""
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), 1)
