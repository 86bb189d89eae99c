"""`recycle serve`: a job's coordinator on a machine that trains nothing, so that any training host may die.

One service serves one job. It is a launcher without workers: it starts its coordinator again when it dies, prints
events, and ends with the job. A service that was itself ended, or whose machine was restarted, goes on with `--resume`.
The workers train meanwhile, as long as none of them fails, and wait for it for as long as they wait for any
coordinator.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from megatron_recycle.config import RecycleConfig
from megatron_recycle.control import tokens
from megatron_recycle.control.coordinator_spec import CoordinatorSpec
from megatron_recycle.errors import ConfigError
from megatron_recycle.launch import coordinator_process as service
from megatron_recycle.launch import meeting, watching
from megatron_recycle.launch.command import closing_table, grace_of, run_dir_of
from megatron_recycle.launch.flags import HIGHEST_PORT
from megatron_recycle.launch.launcher import Launcher
from megatron_recycle.launch.meeting import Meeting
from megatron_recycle.launch.processes import Job
from megatron_recycle.launch.reachability import bare, check_host, check_listening
from megatron_recycle.launch.run_folder import make, prepare
from megatron_recycle.launch.surroundings import withstand
from megatron_recycle.launch.worker_command import clock, say_to
from megatron_recycle.observe.events import read_events

NODE = "service"
"""Stands for the number in a service's host name."""
_LINGER = 30.0
"""Seconds that hosts have to receive the end."""
_DYING = 10.0
"""Seconds that the coordinator of a killed service may hold its port, where a disk or processor is slow."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `recycle serve`."""
    parser.add_argument("--workers", type=int, required=True, metavar="N",
                        help="of the job: hosts (--nnodes) times workers on each (--nproc)")
    parser.add_argument("--interface", metavar="HOST", type=bare,
                        help="only address to listen on (default: RECYCLE_INTERFACE, or 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="to listen on (default: any)")
    parser.add_argument("--token-file", type=Path, metavar="FILE",
                        help="where the job's token stands (default: RECYCLE_TOKEN)")
    parser.add_argument("--run-dir", type=Path,
                        help="where the journal and events go (default: RECYCLE_RUN_DIR, or runs/DATE-PID)")
    parser.add_argument("--resume", action="store_true",
                        help="go on with the job of --run-dir, whose service has ended, at the same --port")
    watching.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve one job; returns its status.

    Raises:
        ConfigError: options that contradict each other.
        RecycleError: the coordinator did not start.
    """
    withstand()
    config, say = RecycleConfig.resolve(), say_to(sys.stderr)
    watching.check(args)
    if args.workers < 1:
        raise ConfigError(f"--workers is {args.workers}; give 1 or more")
    if not 0 <= args.port <= HIGHEST_PORT:
        raise ConfigError(f"--port is {args.port}; give a port up to {HIGHEST_PORT}, or leave it out for any")
    token = tokens.given(os.environ, args.token_file)
    if token is None:
        raise ConfigError("a service needs a token, the same as on each host: --token-file, or RECYCLE_TOKEN; make one "
                          "with `openssl rand -hex 16`")
    if args.resume and (not args.port or args.run_dir is None):
        raise ConfigError("--resume takes a job up where its service left it: give the same --run-dir and --port")
    host = args.interface or config.interface
    check_host(host, several=False)
    check_listening(host, args.port, ("--interface", "--port"), _DYING if args.resume else 0.0)
    run_dir = run_dir_of(args.run_dir, config)
    if args.resume:
        make(run_dir)
    else:
        prepare(run_dir)
    before: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError):  # without it the job goes on just as well
        before = read_events(run_dir / "events.jsonl") if args.resume else []
    spec = CoordinatorSpec(args.workers, host, args.port, args.resume, node=NODE)
    coordinator = service.start(spec, run_dir, token, os.environ)
    coordinator.linger = _LINGER
    meeting.publish(run_dir, Meeting("", coordinator.control, token))
    tokens.publish(run_dir, token)
    say(f"recycle: serving a job of {args.workers} workers at {coordinator.control}, logs and events in {run_dir}; "
        f"start its hosts: recycle run --coordinator {coordinator.control} --token-file FILE --nnodes N --node-rank K "
        "--nproc M SCRIPT")
    job = Job([], {"GROUP_RANK": NODE}, run_dir, (), args.workers, show="none",
              heartbeat_interval=config.heartbeat_interval, grace=grace_of(config))
    launcher = Launcher(job, coordinator.control, token, say, coordinator, clock)
    for event in before:  # the closing table is of the whole job
        launcher.summary.add(event)
    try:
        with watching.watched(args, run_dir, token, here=True):
            status = launcher.run()
    finally:
        meeting.withdraw(run_dir)
    closing_table(launcher)
    return status
