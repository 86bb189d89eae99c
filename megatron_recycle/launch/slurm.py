"""Slurm: the step that a launcher runs in, whether Slurm keeps survivors, and requests to requeue the job."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_recycle.errors import ConfigError
from megatron_recycle.launch.devices import visible

_INTERACTIVE = 4294967290
"""Step of the shell that `salloc` opens on a node; special steps have this number or a higher one."""
_LIMIT = 10.0
_SRUN = "srun --no-kill --kill-on-bad-exit=0 --wait=0"
_PROGRAM = re.compile(r"(?:.*/)?(?:recycle|python[0-9.]*|bash|sh|env)$")

Ask = Callable[[Sequence[str]], str]
"""Runs a command of Slurm's and returns its output; nothing if it fails, or is not there."""


@dataclass(frozen=True)
class Task:
    """One of several launchers per node, one per worker, as `srun --ntasks-per-node=8` starts them.

    Its number is `local` of `count` on the `node`-th of `nodes`.
    """

    nodes: int
    node: int
    local: int
    count: int


@dataclass(frozen=True)
class Hosts:
    """The number of hosts, and this host's rank among them.

    Hosts with a `name` meet by the file in the run folder (see `meeting`), which is `folder` unless the user names one.
    The name tells their step from every other step, and from its own life before a requeue. Hosts without a name meet
    at an address, with a token, both given by the user. With `task` each is a launcher of one worker, and one of
    several on its node.
    """

    count: int = 1
    rank: int = 0
    name: str = ""
    folder: str | None = None
    task: Task | None = None


def step_of(environ: Mapping[str, str], nproc: int | None = None) -> Hosts | None:
    """The hosts of this process's step, if it has several launchers; None for one, or without Slurm.

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
    # A node's workers have consecutive ranks, as under torchrun, for any --distribution of srun.
    rank = int(environ["SLURM_PROCID"]) if task is None else task.node * task.count + task.local
    return Hosts(tasks, rank, f"{name}.{restarts}", f"runs/slurm-{job}" if step == "0" else f"runs/{name}", task)


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
    return 0 if len(visible(environ) or ()) == 1 and task.count > 1 else task.local


def ask(command: Sequence[str]) -> str:
    """The command's output; "" if it fails."""
    return _run(command)[0]


def _run(command: Sequence[str]) -> tuple[str, str]:
    """The command's output, or else the reason of its failure."""
    try:
        done = subprocess.run(list(command), check=False, capture_output=True, text=True, timeout=_LIMIT,
                              stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return (done.stdout, "") if done.returncode == 0 else ("", done.stderr.strip() or f"status {done.returncode}")


def towards(environ: Mapping[str, str]) -> list[str]:
    """Names and addresses of the step's nodes and of its submitting node, as far as Slurm's variables have them."""
    nodes = ask(["scontrol", "show", "hostnames", environ.get("SLURM_STEP_NODELIST", "")]).split()[::-1]
    # The launch node is surely not this node, and so comes first. In a container there may be no Slurm.
    return [*nodes, *filter(None, [environ.get("SLURM_LAUNCH_NODE_IPADDR")])]


def _number(environ: Mapping[str, str], *names: str) -> int:
    """The first of these variables that is a number; 1 if there is none."""
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), 1)


def unkept(environ: Mapping[str, str], query: Ask = ask) -> list[str]:
    """Lines for the user: reasons for which Slurm would end this step, though workers are left.

    srun's options stand in no variable of the step; they are read from its command line, if it runs on this node, as it
    does under sbatch.
    """
    job, step = environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"]
    lines = []
    found = re.search(r"SrunHost:Pid=(\S+):(\d+)", query(["scontrol", "show", "step", "-o", f"{job}.{step}"]))
    if found is not None:
        host, pid = found[1], found[2]
        words = _command_line(pid) if host in (environ.get("SLURMD_NODENAME"), os.uname().nodename) else []
        if not words or Path(words[0]).name != "srun":
            lines.append(f"recycle: srun runs on {host}, where its options cannot be seen from here: unless it was "
                         f"started as `{_SRUN}`, Slurm ends the job when a node is lost")
        elif missing := missing_flags(words, environ, query(["scontrol", "show", "config"])):
            lines.append(f"recycle: warning: srun was started without {' '.join(missing)}: Slurm ends the job when a "
                         f"node or a task is lost. Start it as `{_SRUN} ... recycle run ...`")
    script = query(["scontrol", "write", "batch_script", job, "-"])
    if script and not re.search(r"^#SBATCH\s(?:.*\s)?(?:--no-kill|-k)(?:\s|$)", script, re.MULTILINE):
        lines.append("recycle: warning: the batch script has no `#SBATCH --no-kill`: unless sbatch itself was given "
                     "it, Slurm ends the job when a node is lost")
    return lines


def missing_flags(words: Sequence[str], environ: Mapping[str, str], config: str) -> list[str]:
    """Options that this srun lacks to keep survivors, judged by its command line `words`, its variables, and Slurm's
    configuration as `scontrol show config` prints it."""
    end = next((index for index, word in enumerate(words) if index and _PROGRAM.match(word)), len(words))
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-k", "--no-kill", nargs="?", const="on", default="on" if "SLURM_NO_KILL" in environ else "off")
    parser.add_argument("-K", "--kill-on-bad-exit", nargs="?", const="1", default=environ.get("SLURM_KILL_BAD_EXIT"))
    parser.add_argument("-W", "--wait", nargs="?", const="", default=environ.get("SLURM_WAIT"))
    given, _ = parser.parse_known_args(words[1:end])
    bad_exit = given.kill_on_bad_exit or _configured(config, "KillOnBadExit")
    wait = given.wait or _configured(config, "WaitTime")
    return [flag for flag, missing in (("--no-kill", given.no_kill == "off"), ("--kill-on-bad-exit=0", bad_exit != "0"),
                                       ("--wait=0", wait != "0")) if missing]


def _configured(config: str, name: str) -> str:
    """A number of slurm.conf; "0", Slurm's own default, if it is not given."""
    found = re.search(rf"^{name}\s*=\s*(\d+)", config, re.MULTILINE)
    return found[1] if found else "0"


def _command_line(pid: str) -> list[str]:
    try:
        return Path("/proc", pid, "cmdline").read_text().rstrip("\0").split("\0")
    except OSError:
        return []


def check_requeue(environ: Mapping[str, str], query: Ask = ask) -> None:
    """Raises ConfigError if Slurm could not start this job again."""
    job = environ.get("SLURM_JOB_ID")
    if not job:
        raise ConfigError("--requeue asks Slurm to start the job again, and this is no job of Slurm's: leave it out")
    description = query(["scontrol", "show", "job", "-o", job])
    if not description:
        raise ConfigError("--requeue needs `scontrol`, which does not answer here (in a container it may be missing): "
                          "let the batch script call `scontrol requeue $SLURM_JOB_ID` after srun instead")
    if "BatchFlag=1" not in description:
        raise ConfigError(f"--requeue: Slurm starts batch jobs again only, and job {job} is none: start it by sbatch")


def requeue(environ: Mapping[str, str], query: Ask = ask) -> str:
    """Ask Slurm to start the job again, after it has saved and ended; returns the line for the user.

    A cancelled job is not started again. A job counts as cancelled if Slurm ends it for another reason than its time
    limit.
    """
    job = environ["SLURM_JOB_ID"]
    description = query(["scontrol", "show", "job", "-o", job])
    state, reason = (re.search(rf"\b{name}=(\S+)", description) for name in ("JobState", "Reason"))
    if state is None or reason is None:
        return f"recycle: Slurm does not say what has become of job {job}: it is not requeued"
    if state[1] != "RUNNING" and reason[1] != "TimeLimit":
        return f"recycle: job {job} is not requeued (--requeue): Slurm ends it as {state[1]}"
    _, failed = _run(["scontrol", "requeue", job])
    if failed:
        return f"recycle: job {job} cannot be requeued: {failed}"
    return f"recycle: job {job} is requeued: Slurm starts it again, and it goes on from its last checkpoint"
