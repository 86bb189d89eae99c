"""Options for alarms and metrics, and the process beside a job's coordinator that serves them (`recycle watch`)."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from megatron_recycle.control import tokens
from megatron_recycle.errors import ConfigError
from megatron_recycle.launch.child import Child

_LIBRARY = "prometheus_client"
_PATIENCE = 25.0
"""Seconds that the last commands may take after the end of a job."""
_EVERYWHERE = ("0.0.0.0", "::", "")
LOG = "watch.log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("alarms and metrics (docs/monitoring.md)")
    group.add_argument("--on-event", metavar="CMD",
                       help="run this, once for the whole job, with a JSON object on standard input, when workers are "
                       "lost, one is a stage's last, the job stalls, ends ...")
    group.add_argument("--degraded-after", type=float, default=10.0, metavar="MINUTES",
                       help="without some worker, after which --on-event hears `degraded` (default 10)")
    group.add_argument("--metrics", metavar="HOST:PORT", help="serve /metrics for Prometheus there (HOST may be empty: "
                       "127.0.0.1; 0.0.0.0 is everywhere)")
    group.add_argument("--metrics-sd", type=Path, metavar="FILE",
                       help="with --metrics: write where it is served to FILE, for Prometheus' file_sd_configs")
    group.add_argument("--page", metavar="HOST:PORT", help="serve a page of the job for browsers there (HOST may be "
                       "empty: 127.0.0.1; elsewhere it asks for the secret in RUN_DIR/page.token)")
    group.add_argument("--textfile", type=Path, metavar="FILE",
                       help="write the metrics to FILE.prom, for a node exporter's textfile collector")
    group.add_argument("--until-told", action="store_true", help=argparse.SUPPRESS)  # the launcher says SIGTERM


def wanted(args: argparse.Namespace) -> bool:
    """Whether the options ask for alarms or metrics."""
    return any(each is not None for each in (args.on_event, args.metrics, args.textfile, args.page))


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that cannot work."""
    if args.on_event is not None and not args.on_event.strip():
        raise ConfigError("--on-event is empty; give a command for the shell, or leave it out")
    if not 0 < args.degraded_after < float("inf"):
        raise ConfigError(f"--degraded-after is {args.degraded_after:g}; give minutes, more than 0")
    if args.metrics is not None:
        address(args.metrics)
    if args.page is not None:
        address(args.page, "--page")
        if find_spec("aiohttp") is None:
            raise ConfigError("--page needs aiohttp: `pip install aiohttp`")
    if args.metrics_sd is not None and args.metrics is None:
        raise ConfigError("--metrics-sd says where --metrics is served: give both")
    if args.textfile is not None and args.textfile.suffix != ".prom":
        raise ConfigError(f"--textfile is {args.textfile}: a node exporter reads files whose name ends with .prom")
    for option, path in (("--textfile", args.textfile), ("--metrics-sd", args.metrics_sd)):
        if path is not None and not os.access(path.absolute().parent, os.W_OK | os.X_OK):
            raise ConfigError(f"{option}: {path.absolute().parent} is no folder that can be written to")
    if (args.metrics is not None or args.textfile is not None) and find_spec(_LIBRARY) is None:
        option = "--metrics" if args.metrics is not None else "--textfile"
        raise ConfigError(f"{option} needs prometheus-client: `pip install prometheus-client`")


def address(text: str, option: str = "--metrics") -> tuple[str, int]:
    """Host and port of "host:port". Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{option} is {text!r}; give HOST:PORT, for instance 0.0.0.0:9464")
    return host.strip("[]") or "127.0.0.1", int(port)


def name_of(host: str) -> str:
    """Name under which other hosts reach this host, where it listens on every address."""
    return socket.gethostname() if host in _EVERYWHERE else host


@contextmanager
def watched(args: argparse.Namespace, run_dir: Path, token: str, here: bool) -> Iterator[None]:
    """Block in which the job of ``run_dir`` is watched, if that is wanted and its coordinator is ``here``."""
    if not wanted(args) or not here:
        yield
        return
    options = [item for name, value in (("on-event", args.on_event), ("degraded-after", args.degraded_after),
                                        ("metrics", args.metrics), ("metrics-sd", args.metrics_sd),
                                        ("textfile", args.textfile), ("page", args.page))
               if value is not None for item in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "megatron_recycle.cli", "watch", str(run_dir), "--until-told", *options]
    child = Child(command, {**os.environ, tokens.TOKEN: token}, run_dir / LOG)
    try:
        yield
    finally:
        child.signal(signal.SIGTERM)
        if child.wait(_PATIENCE) is None:
            child.signal(signal.SIGKILL)
            child.wait(1.0)
        child.release()
