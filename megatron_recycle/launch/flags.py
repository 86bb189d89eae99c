"""The options of `recycle run`; settings among them, --set KEY=VALUE and --config FILE, become variables of the
environment."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_recycle.config import SECTION, Option, options, variable
from megatron_recycle.control.etcd import Access, Place
from megatron_recycle.errors import ConfigError
from megatron_recycle.launch import watching
from megatron_recycle.launch.reachability import bare, check_address
from megatron_recycle.option import nearest, shown
from megatron_recycle.usage import also

_AT_SERVICE = "the service says where it listens"
_BESIDE = {
    "--join": "to join a running job, give --join alone, with the service's address",
    "--master-addr": _AT_SERVICE,
    "--master-port": _AT_SERVICE,
    "--job-restarts": "a service serves one life of a job; leave it out, or start the job without a service",
    "--chaos": "its acts look for the coordinator on this host; leave one of them out",
    "--requeue": "a service does not outlive the job's first life; leave one of them out",
}
"""Remedies for options that `--coordinator` excludes."""
_ELSEWHERE = ("join", "master_addr", "master_port", "restarts", "requeue", "chaos")
"""Options that need a coordinator on host 0."""
HIGHEST_PORT = 65535
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
"""Name of a job in a store."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `recycle run`; arguments after the script are the script's."""
    _add_hosts(parser)
    _add_coordinator(parser)
    _add_ways_in(parser)
    _add_settings(parser)
    _add_restarts(parser)
    watching.add_arguments(parser)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("-m", "--module", action="store_true",
                      help="the script is a module's name, as in `python -m` and torchrun")
    kind.add_argument("--no-python", "--no_python", action="store_true",
                      help="the script is a program that is started as it is, such as numactl; write `python -m "
                      "megatron_recycle SCRIPT` in it where you would write python SCRIPT")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    """Workers, hosts and where they meet, also by torchrun's names."""
    parser.add_argument("--nproc", type=_workers, metavar="N",
                        help="workers on this host (default: its GPUs, or 1); torchrun's names of options do as well")
    also(parser, "nproc", "--nproc-per-node", "--nproc_per_node", "--num-gpus", "--num_gpus", type=_workers)
    parser.add_argument("--nnodes", type=_hosts, metavar="N", help="hosts (default: those of Slurm's step, or 1)")
    also(parser, "nnodes", "--num-nodes", "--num_nodes", type=_hosts)
    parser.add_argument("--node-rank", type=int, default=0, metavar="K", help="which of the hosts this is")
    also(parser, "node_rank", "--node_rank", type=int)
    parser.add_argument("--master-addr", metavar="HOST", type=bare,
                        help="address of host 0, the only one that its services listen on")
    parser.add_argument("--master-port", type=int, default=0, metavar="PORT",
                        help="control port on host 0 (default on one host: any)")
    also(parser, "master_addr", "--master_addr", type=bare)
    also(parser, "master_port", "--master_port", type=int)
    parser.add_argument("--rdzv-endpoint", "--rdzv_endpoint", metavar="HOST:PORT", help=argparse.SUPPRESS)
    parser.add_argument("--rdzv-backend", "--rdzv_backend", metavar="NAME", help=argparse.SUPPRESS)
    also(parser, "ignored", "--rdzv-id", "--rdzv_id")
    also(parser, "ignored", "--standalone", action="store_true")


def _add_coordinator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coordinator", metavar="HOST:PORT",
                        help="the job's coordinator is a service there (`recycle serve`), and no host is the first")
    parser.add_argument("--store", metavar="etcd://HOST:PORT,...",
                        help="keep the journal in etcd, with a coordinator standing by on each host: any of them may "
                        "die")
    parser.add_argument("--job", default="", metavar="NAME", help="with --store: the job's name there")


def _add_ways_in(parser: argparse.ArgumentParser) -> None:
    """The run's folder, displayed output, and what comes in while the job runs: acts, hosts."""
    parser.add_argument("--run-dir", type=Path,
                        help="where logs and events go (default: RECYCLE_RUN_DIR, or runs/DATE-PID)")
    parser.add_argument("--show", choices=("first", "all", "none"), default="first",
                        help="whose output is shown (default: the first live rank's, and that of the one that writes "
                        "Megatron's log lines); all of it is in RUN_DIR")
    parser.add_argument("--chaos", metavar="FILE",
                        help="let `recycle chaos` hold workers at precise moments, and do what FILE says; `allow`: "
                        "without a file")
    parser.add_argument("--join", metavar="RUN_DIR|HOST:PORT",
                        help="start workers for empty places of a running job: its run folder, or its control port "
                        "(with its token)")
    parser.add_argument("--join-timeout", type=float, metavar="SECONDS",
                        help="with --join: how long to wait for a place without a worker (default 600; 0: not at all)")
    parser.add_argument("--token-file", type=Path, metavar="FILE",
                        help="where the job's token stands (default: RECYCLE_TOKEN, or any)")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="a setting, such as max_restarts=3 or reduction=exact; may be given several times. "
                        "`recycle doctor --help` lists all settings")
    parser.add_argument("--config", type=Path, metavar="FILE",
                        help='settings as JSON, an object of them or one with a section "recycle"; variables beat it')


def _add_restarts(parser: argparse.ArgumentParser) -> None:
    """Restarts of workers, and of the job."""
    parser.add_argument("--worker-restarts", type=int, metavar="N",
                        help="how often each dead worker is started again, beside the others that train on (default: "
                        "0); the same as --set max_restarts=N")
    parser.add_argument("--job-restarts", dest="restarts", type=int, default=0, metavar="N",
                        help="how often the script is started again, on the hosts that are left, when the grid cannot "
                        "go on (default: 0); it must take up its last checkpoint by itself, and the number of "
                        "pipelines from WORLD_SIZE")
    also(parser, "restarts", "--restarts", "--max-restarts", "--max_restarts", type=int)
    parser.add_argument("--requeue", action="store_true",
                        help="under Slurm: a SIGTERM (sbatch --signal=TERM@120, pre-emption) saves a checkpoint "
                        "(on_leave), and Slurm starts the job again (scontrol requeue); a job that is cancelled stays "
                        "so")


def _workers(text: str) -> int | None:
    """--nproc; torchrun's words for the GPUs of the host are the default."""
    if text in ("gpu", "auto"):
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {text!r}; give a number, or gpu") from None


def _hosts(text: str) -> int:
    """--nnodes; torchrun also takes a range."""
    try:
        return int(text)
    except ValueError:
        hint = "one number, and later hosts come by --join" if ":" in text else "a number"
        raise argparse.ArgumentTypeError(f"it is {text!r}; give {hint}") from None


def translate(args: argparse.Namespace) -> None:
    """Put torchrun's rendezvous in the place of --master-addr and --master-port. Raises ConfigError."""
    if args.rdzv_backend not in (None, "c10d", "static"):
        raise ConfigError(f"--rdzv-backend is {args.rdzv_backend}; leave it out, or give --store etcd://HOST:PORT")
    if args.rdzv_endpoint is None:
        return
    if args.master_addr or args.master_port:
        raise ConfigError("--rdzv-endpoint and --master-addr with --master-port are the same: give one of them")
    host, colon, port = args.rdzv_endpoint.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ConfigError(f"--rdzv-endpoint is {args.rdzv_endpoint!r}; give HOST:PORT")
    args.master_addr, args.master_port = bare(host), int(port)


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that contradict each other."""
    if args.nproc is not None and args.nproc < 1:
        raise ConfigError(f"--nproc is {args.nproc}; give 1 or more")
    if args.nnodes is not None and args.nnodes < 1:
        raise ConfigError(f"--nnodes is {args.nnodes}; give 1 or more")
    if not 0 <= args.node_rank < (args.nnodes or 1):
        raise ConfigError(f"--node-rank is {args.node_rank}; with --nnodes {args.nnodes or 1} give 0 to "
                          f"{(args.nnodes or 1) - 1}")
    if not 0 <= args.master_port <= HIGHEST_PORT:
        raise ConfigError(f"--master-port is {args.master_port}; give a port up to {HIGHEST_PORT}")
    if args.join_timeout is not None and not 0 <= args.join_timeout < float("inf"):
        raise ConfigError(f"--join-timeout is {args.join_timeout:g}; give a number of seconds, 0 or more")
    if args.join_timeout is not None and args.join is None:
        raise ConfigError("--join-timeout is how long --join waits for a place: give --join RUN_DIR or HOST:PORT with "
                          "it, or leave it out")
    if args.restarts < 0:
        raise ConfigError(f"--job-restarts is {args.restarts}; give how often the script may be started again, 0 or "
                          "more")
    if args.restarts and args.join is not None:
        raise ConfigError("--job-restarts is the job's, and --join takes the job as it is: give it where that was "
                          "started")
    if args.requeue and args.join is not None:
        raise ConfigError("--requeue is the job's, and --join takes the job as it is: give it where that was started")
    if args.coordinator is not None:
        check_address("--coordinator", args.coordinator)
        given = _given(args, *_ELSEWHERE)
        if given:
            raise ConfigError(f"--coordinator and {given[0]} contradict each other: " + _BESIDE[given[0]])
    if args.store is not None:
        given = _given(args, "coordinator", *_ELSEWHERE)
        if given:
            raise ConfigError(f"--store and {given[0]} cannot be given together: with a store every host has a "
                              "coordinator, for one life of the job")
    elif args.job:
        raise ConfigError("--job is the job's name in a --store: give both")
    watching.check(args)
    if watching.wanted(args) and (args.coordinator is not None or args.join is not None):
        where = "`recycle serve`" if args.coordinator is not None else "the command that has begun the job"
        raise ConfigError("--on-event, --metrics and --textfile are for the whole job, once, beside its coordinator: "
                          f"give them to {where}, or start `recycle watch RUN`")
    several = (args.nnodes or 1) > 1
    if args.join is not None and (several or args.chaos is not None or args.master_addr or args.master_port):
        raise ConfigError("--join takes the job as it is: leave out --nnodes, --master-addr, --master-port and --chaos")


def check_store(store: str, job: str) -> None:
    """Raises ConfigError."""
    if Place.parse(store).scheme == "https":
        Access.read(os.environ).context()
    if not _NAME.fullmatch(job):
        raise ConfigError(f"--job {job!r} names no job: with --store give a name that no other job has there (letters, "
                          "digits, dots, dashes), the same on each host")


def _given(args: argparse.Namespace, *names: str) -> list[str]:
    """The options among these that are given, as users write them."""
    spelled = {"restarts": "job-restarts"}
    return [f"--{spelled.get(name, name.replace('_', '-'))}" for name in names if getattr(args, name)]


@contextmanager
def in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for as long as the block lasts: workers, coordinator and settings read them there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def settings(texts: Sequence[str], file: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for the given options. A variable that is set beats the file, and --set beats both.

    Args:
        texts: KEY=VALUE each.
        file: JSON, either an object of settings or one with a section "recycle", as DeepSpeed's.

    Raises:
        ConfigError: an unknown key, a bad value, a file that is no such JSON.
    """
    found = {} if file is None else {name: text for name, text in _of_file(file).items() if name not in environ}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise ConfigError(f"--set {text}: give KEY=VALUE, for example --set max_restarts=3")
        _setting(key, f"--set {text}").parse(value, f"--set {key}")
        found[variable(key)] = value
    return found


def _of_file(file: Path) -> dict[str, str]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--config {file} is no JSON: {error}") from error
    section = content.get(SECTION, content) if isinstance(content, Mapping) else content
    if not isinstance(section, Mapping):
        raise ConfigError(f'--config {file}: give an object of settings, or one with a section "{SECTION}"')
    for key, value in section.items():
        _setting(key, f"--config {file}").parse(value, f"{key} in {file}")
    return {variable(key): shown(value) for key, value in section.items()}


def _setting(key: str, source: str) -> Option:
    """The setting of this name. Raises ConfigError."""
    known = {option.name: option for option in options()}
    if key not in known:
        raise ConfigError(f"{source}: there is no setting {key}; the nearest is {nearest(key, list(known))}")
    return known[key]
