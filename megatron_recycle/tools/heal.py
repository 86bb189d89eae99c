"""`recycle slurm`: starter batch scripts, and new hosts for the lost ones of a job that runs under Slurm.

A lost node that is in the job's allocation and up gets a step of its own there. For a node that is gone, another job of
one node is submitted. Either way the host joins by the job's run folder, as `recycle run --join` does.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_recycle.errors import ConfigError
from megatron_recycle.launch import meeting
from megatron_recycle.launch.meeting import Meeting
from megatron_recycle.launch.slurm import Ask, ask
from megatron_recycle.observe.events import read_events
from megatron_recycle.tools import examples
from megatron_recycle.tools.operate.job_history import JobHistory
from megatron_recycle.tools.operate.runs import EVENTS
from megatron_recycle.usage import Parser

SCRIPTS = {"deepspeed": "deepspeed.sbatch", "megatron": "megatron.sbatch", "apart": "apart.sh"}
"""Argument of `recycle slurm script` -> the file."""
_USABLE = re.compile(r"State=(?:ALLOCATED|MIXED|IDLE|COMPLETING)(?:\+\S*)?(?:\s|$)")
_BAD = re.compile(r"State=\S*(?:DOWN|DRAIN|FAIL|NOT_RESPONDING|\*)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle slurm`."""
    acts = parser.add_subparsers(dest="act", required=True, metavar="ACT", parser_class=Parser)
    script = acts.add_parser("script", help="print a batch script: recycle slurm script deepspeed > job.sbatch",
                             epilog="example: recycle slurm script megatron > job.sbatch")
    script.add_argument("name", choices=tuple(SCRIPTS), help="the framework; apart: for a job without a batch script")
    heal = acts.add_parser("heal", help="start hosts in place of those that a running job has lost",
                           epilog="Options after -- are srun's and sbatch's, as in: -- --gres=gpu:8")
    heal.behind = "options"
    heal.add_argument("job", nargs="?", help="the job's number (default: SLURM_JOB_ID)")
    heal.add_argument("--run-dir", type=Path,
                      help="the job's run folder (default: runs/slurm-JOB where it was submitted)")
    heal.add_argument("--dry-run", action="store_true", help="print the commands, and start nothing")


def run(args: argparse.Namespace) -> int:
    """Print a batch script, or start the missing hosts; returns 0 if all of them could be started.

    Raises:
        ConfigError: Slurm knows no such job, or none of ours runs in its folder.
    """
    if args.act == "script":
        print((examples.folder() / "slurm" / SCRIPTS[args.name]).read_text(encoding="utf-8"), end="")
        return 0
    job = args.job or os.environ.get("SLURM_JOB_ID")
    if not job:
        raise ConfigError("recycle slurm heal: give the number of the job; `squeue --me` has it")
    slurm_job = allocation(job, ask)
    run_dir = args.run_dir or Path(slurm_job.folder, f"runs/slurm-{job}")
    found = meeting.read(run_dir) if run_dir.is_dir() else None
    if found is None or not found.control or not found.command:
        raise ConfigError(f"no job of `recycle run` runs in {run_dir}: give its run folder with --run-dir")
    losses, partial = lost(JobHistory(read_events(run_dir / EVENTS)))
    for host, ranks in partial.items():
        print(f"{host}: rank {', '.join(map(str, ranks))} missing, while others there live: `max_restarts` starts such "
              "workers again; a host is healed as a whole")
    if not losses:
        print("no host is missing")
        return 0
    return _start([healing(host, len(ranks), slurm_job, run_dir, found, args.options)
                   for host, ranks in losses.items()], args.dry_run)


@dataclass(frozen=True)
class Allocation:
    """A running job of Slurm's: its number, partition and the folder that it was submitted from; its nodes, and which
    of them are up; `left` is its remaining time, in sbatch's format ("": no limit)."""

    job: str
    folder: str
    partition: str
    nodes: Sequence[str]
    up: Sequence[str]
    left: str
    exclusive: bool


def allocation(job: str, query: Ask) -> Allocation:
    """Ask Slurm for the job. Raises ConfigError if it does not run."""
    reply = query(["scontrol", "show", "job", "-o", job])
    if "JobState=RUNNING" not in reply:
        raise ConfigError(f"job {job} does not run, or Slurm does not answer here")
    nodes = query(["scontrol", "show", "hostnames", _field(reply, "NodeList")]).split()
    states = {node: query(["scontrol", "show", "node", "-o", node]) for node in nodes}
    left = query(["squeue", "-h", "-j", job, "-o", "%L"]).strip()
    return Allocation(job, _field(reply, "WorkDir"), _field(reply, "Partition"), nodes,
                      [node for node, state in states.items() if _USABLE.search(state) and not _BAD.search(state)],
                      left if re.fullmatch(r"[0-9:-]+", left) else "", _field(reply, "OverSubscribe") == "NO")


def lost(seen: JobHistory) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """The ranks without a worker, by the node that they were on at the start: first for nodes without any worker left,
    then for nodes with some. Between two lives of a job there are none."""
    whole: dict[str, list[int]] = {}
    partial: dict[str, list[int]] = {}
    for host in dict.fromkeys(seen.hosts.values()) if seen.started else ():
        on_host = [worker for worker, where in seen.hosts.items() if where == host]
        missing = sorted(seen.ranks[worker] for worker in on_host if worker not in seen.members)
        if missing:
            (whole if len(missing) == len(on_host) else partial)[host.partition("/")[0]] = missing
    return whole, partial


def healing(host: str, count: int, slurm_job: Allocation, run_dir: Path, found: Meeting,
            options: Sequence[str]) -> list[str]:
    """The command that starts a host with this many workers in place of `host`."""
    join = [sys.executable, "-m", "megatron_recycle.cli", "run", "--join", str(run_dir), "--nproc", str(count),
            *found.command]
    if host in slurm_job.up:
        return ["srun", f"--jobid={slurm_job.job}", "--overlap", "--no-kill", "--nodes=1", "--ntasks=1",
                f"--nodelist={host}", f"--chdir={found.folder}", *options, *join]
    return ["sbatch", "--nodes=1", "--ntasks=1", f"--partition={slurm_job.partition}", "--job-name=recycle-heal",
            f"--exclude={','.join(dict.fromkeys((*slurm_job.nodes, host)))}", f"--chdir={found.folder}",
            f"--output={run_dir}/heal-%j.out", *(["--exclusive"] if slurm_job.exclusive else []),
            *([f"--time={slurm_job.left}"] if slurm_job.left else []), *options, "--wrap",
            f"exec srun {shlex.join(join)}"]


def _start(commands: Sequence[Sequence[str]], dry: bool) -> int:
    """Start all of them. A step of the job itself lasts as long as its srun, which is waited for."""
    running = []
    for command in commands:
        print(shlex.join(command), flush=True)
        if not dry:
            running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
    return int(any(process.wait() for process in running))


def _field(reply: str, name: str) -> str:
    found = re.search(rf"(?:^|\s){name}=(\S*)", reply)
    return found[1] if found else ""
