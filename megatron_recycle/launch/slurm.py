"""The Slurm step that a launcher runs in: its launchers, and this one among them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_recycle.errors import ConfigError

_INTERACTIVE = 4294967290
"""Step of the shell that `salloc` opens on a node; special steps have this number or a higher one."""
_LIMIT = 5.0


@dataclass(frozen=True)
class Task:
    """A launcher of which a node has several, one per worker, as `srun --ntasks-per-node=8` starts them.

    It is the one number `local` of `count` on the `node`-th of `nodes`.
    """

    nodes: int
    node: int
    local: int
    count: int


@dataclass(frozen=True)
class Step:
    """A step of this many `launchers`, and this one's `rank` among them: one per node, or with a `task` one per worker.

    `name` tells it from every other step, and from this one's life before a requeue. `folder` is its run folder unless
    the user names one.
    """

    launchers: int
    rank: int
    name: str
    folder: str
    task: Task | None = None


def step_of(environ: Mapping[str, str], nproc: int | None = None) -> Step | None:
    """The step of this process, if it has several launchers; None for one, or without Slurm.

    Args:
        nproc: workers that this launcher is to start, as far as the user has said.

    Raises:
        ConfigError: Slurm has started neither one launcher per node nor one per worker.
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
    if _number(environ, "SLURM_HET_SIZE", "SLURM_PACK_SIZE") > 1:
        raise ConfigError("the nodes of a heterogeneous Slurm job cannot be told apart: give --nnodes, --node-rank, "
                          "--master-addr, --master-port and a token yourself")
    if tasks == 1:
        return None
    name = f"slurm-{job}.{step}"
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    task = _task(environ, nodes, tasks, nproc) if tasks > nodes else None
    # A node's workers have consecutive ranks, as under torchrun, whatever srun's --distribution is.
    rank = int(environ["SLURM_PROCID"]) if task is None else task.node * task.count + task.local
    return Step(tasks, rank, f"{name}.{restarts}", f"runs/slurm-{job}" if step == "0" else f"runs/{name}", task)


def _task(environ: Mapping[str, str], nodes: int, tasks: int, nproc: int | None) -> Task:
    """This launcher among those of its node. Raises ConfigError."""
    each = _per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    instead = "start it once on each, and the workers are started there: srun --ntasks-per-node=1 ... recycle run"
    if (nproc or 1) > 1:
        raise ConfigError(f"Slurm has started {tasks} tasks on {nodes} node{'s' * (nodes > 1)}, and --nproc asks for "
                          f"{nproc} workers of each task: {instead} --nproc {nproc}; or leave --nproc out, and "
                          "each task has one worker")
    if each is None:
        given = environ.get("SLURM_STEP_TASKS_PER_NODE", "unknown")
        raise ConfigError(f"Slurm has started {tasks} tasks on {nodes} nodes, not as many on each ({given}): {instead}")
    return Task(nodes, int(environ["SLURM_NODEID"]), int(environ["SLURM_LOCALID"]), each)


def _per_node(text: str) -> int | None:
    """Tasks on each node, of "8(x2)" or "8"; None if they differ."""
    found = re.fullmatch(r"(\d+)(\(x\d+\))?", text)
    return int(found[1]) if found else None


def local_rank(environ: Mapping[str, str], task: Task) -> int:
    """LOCAL_RANK of the worker of a task: 0 where Slurm lets each task see one device only."""
    visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return 0 if len(visible) == 1 and task.count > 1 else task.local


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
