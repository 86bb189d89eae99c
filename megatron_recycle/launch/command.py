"""`recycle run`: starts a training script on this host so that it survives the death of its workers."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from pathlib import Path

from megatron_recycle.config import RecycleConfig
from megatron_recycle.errors import ConfigError, RecycleError
from megatron_recycle.launch import places, service
from megatron_recycle.launch.hurt import check_script, hurting
from megatron_recycle.launch.launcher import (
    Job,
    Launcher,
    default_nproc,
    python_command,
    say_to,
    torchrun_environment,
)
from megatron_recycle.launch.network import await_coordinator, check_address, check_listening, interface_towards
from megatron_recycle.launch.rundir import make, prepare
from megatron_recycle.launch.store import Store, keep_store
from megatron_recycle.launch.summary import print_table
from megatron_recycle.membership.notices import describe_status

_HIGHEST_PORT = 65534
"""The next one is for torch's store."""
_START_LIMIT = 600.0
"""Seconds that hosts wait for host 0; it waits as long for their workers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `recycle run`; all that follows the script is the script's."""
    parser.add_argument("--nproc", type=int, metavar="N", help="workers on this host (default: its GPUs, or 1)")
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="hosts (default 1)")
    parser.add_argument("--node-rank", type=int, default=0, metavar="K", help="which of the hosts this is")
    parser.add_argument(
        "--master-addr", metavar="HOST", help="address of host 0, the only one that its services listen on"
    )
    parser.add_argument(
        "--master-port",
        type=int,
        default=0,
        metavar="PORT",
        help="control port on host 0; torch's store takes the next one (default on one host: any)",
    )
    parser.add_argument(
        "--run-dir", type=Path, help="where logs and events go (default: RECYCLE_RUN_DIR, or runs/DATE-PID)"
    )
    parser.add_argument(
        "--show",
        choices=("first", "all", "none"),
        default="first",
        help="whose output is shown (default: the first live rank's); all of it is in RUN_DIR",
    )
    parser.add_argument(
        "--chaos",
        metavar="FILE",
        help="let `recycle chaos` hold workers at precise moments, and do what FILE says; `allow`: without a file",
    )
    parser.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="start workers for empty places of the running job whose control port this is (token: RECYCLE_TOKEN)",
    )
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")


def run(args: argparse.Namespace) -> int:
    """Run the job; returns its exit status.

    Raises:
        ConfigError: options that contradict each other.
        RecycleError: the coordinator did not start.
    """
    if not Path(args.script).exists():
        raise ConfigError(f"there is no script {args.script}")
    return launch(args, python_command(args.script, args.arguments))


def launch(args: argparse.Namespace, command: list[str], store: bool = True) -> int:
    """Like `run`, with the workers' command given; without `store` there is none of torch.distributed's."""
    config = RecycleConfig.resolve()
    _check(args)
    if args.join is not None:
        return _join(args, command, config)
    folder = args.run_dir or config.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    run_dir = Path(folder).absolute()
    nproc = args.nproc or default_nproc(os.environ)
    token = os.environ.get("RECYCLE_TOKEN") or secrets.token_hex(32)
    host = args.master_addr or config.interface
    say = say_to(sys.stderr)
    coordinator: service.Service | None = None
    kept: Store | None = None
    control, store_at = f"{host}:{args.master_port}", args.master_port + 1
    if args.node_rank == 0:
        check_listening(host, args.master_port)
        prepare(run_dir)
        if store:
            kept = keep_store(host, args.master_port + 1 if args.master_port else 0, os.environ, run_dir)
        store_at = -1 if kept is None else kept.port
        order = service.Order(nproc * args.nnodes, run_dir, token, host, os.environ, args.master_port, store_at)
        try:
            coordinator = service.start(order)
        except RecycleError:
            if kept is not None:
                kept.end()
            raise
        control = coordinator.control
    else:
        say(f"recycle: waiting for host 0 at {control}")
        await_coordinator(host, args.master_port, _START_LIMIT)
        make(run_dir)
    environ = torchrun_environment(os.environ, host, max(store_at, 0), args.nnodes, args.node_rank)
    environ |= {
        "RECYCLE_COORDINATOR": control,
        "RECYCLE_TOKEN": token,
        "RECYCLE_RUN_DIR": str(run_dir),
    }
    if args.nnodes > 1 and (interface := interface_towards(host)) is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if args.chaos is not None:
        environ["RECYCLE_CHAOS"] = "1"
    job = Job(
        command=command,
        environ=environ,
        run_dir=run_dir,
        ranks=range(nproc * args.node_rank, nproc * (args.node_rank + 1)),
        size=nproc * args.nnodes,
        show=args.show,
        heartbeat_interval=config.heartbeat_interval,
        leader=args.node_rank == 0,
    )
    say(f"recycle: {nproc} workers, control at {control}, logs and events in {run_dir}")
    launcher = Launcher(job, control, token, say, coordinator, kept)
    with hurting(args.chaos if args.node_rank == 0 else None, run_dir):
        status = launcher.run()
    _tell(launcher)
    return status


def _join(args: argparse.Namespace, command: list[str], config: RecycleConfig) -> int:
    """Start workers for empty places of a running job; returns 0 if all of them ended well.

    Raises RecycleError if the job has no use for them.
    """
    token = os.environ["RECYCLE_TOKEN"]
    found = places.ask(args.join, token, args.nproc or default_nproc(os.environ))
    run_dir = Path(args.run_dir or config.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()
    make(run_dir)
    host, _, port = found.store.rpartition(":")
    # Hosts are told apart by their number: no other one has this.
    environ = torchrun_environment({**os.environ, **found.environ}, host, int(port), 1, found.size + found.ranks[0])
    environ |= {"RECYCLE_COORDINATOR": args.join, "RECYCLE_TOKEN": token, "RECYCLE_RUN_DIR": str(run_dir)}
    job = Job(command, environ, run_dir, found.ranks, found.size, True, args.show, config.heartbeat_interval,
              leader=False)
    say = say_to(sys.stderr)
    ranks = ", ".join(map(str, found.ranks))
    say(f"recycle: rank {ranks} of {found.size} join the job at {args.join}, logs in {run_dir}")
    launcher = Launcher(job, args.join, token, say)
    status = launcher.run()
    _tell(launcher)
    return status


def _tell(launcher: Launcher) -> None:
    """The closing table."""
    lives = sorted(launcher.lives, key=lambda worker: worker.rank)
    rows = [(worker.rank, worker.child.pid, describe_status(worker.status)) for worker in lives]
    print_table(launcher.summary, rows, launcher.message, launcher.informed)


def _check(args: argparse.Namespace) -> None:
    if args.chaos is not None:
        check_script(args.chaos)
    if args.nproc is not None and args.nproc < 1:
        raise ConfigError(f"--nproc is {args.nproc}; give 1 or more")
    if args.nnodes < 1:
        raise ConfigError(f"--nnodes is {args.nnodes}; give 1 or more")
    if not 0 <= args.node_rank < args.nnodes:
        raise ConfigError(f"--node-rank is {args.node_rank}; with --nnodes {args.nnodes} give 0 to {args.nnodes - 1}")
    if not 0 <= args.master_port <= _HIGHEST_PORT:
        raise ConfigError(f"--master-port is {args.master_port}; give a port up to {_HIGHEST_PORT}")
    if args.join is not None:
        check_address("--join", args.join)
        if args.nnodes > 1 or args.chaos is not None or args.master_addr or args.master_port:
            raise ConfigError("--join takes the job as it is: leave out --nnodes, --master-addr, --master-port and "
                              "--chaos")
        if not os.environ.get("RECYCLE_TOKEN"):
            raise ConfigError("--join needs the job's token: set RECYCLE_TOKEN to what the job was started with")
    if args.nnodes > 1:
        missing = [name for name in ("master_addr", "master_port") if not getattr(args, name)]
        if missing:
            flags = " and ".join("--" + name.replace("_", "-") for name in missing)
            raise ConfigError(f"several hosts need {flags}, the same on each")
        if not os.environ.get("RECYCLE_TOKEN"):
            raise ConfigError("several hosts need a token: set RECYCLE_TOKEN to the same random text on each")
