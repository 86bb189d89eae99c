"""Orders to `recycle chaos`, one per line of a script: pure data."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from megatron_recycle.errors import ConfigError
from megatron_recycle.membership.names import Process
from megatron_recycle.plan.value import Value
from megatron_recycle.usage import count, number, seconds, some_seconds

PHASES = ("forward", "backward", "weight", "reduce", "reduced", "step", "stepped", "evaluate", "save", "saved",
          "collective", "collected", "boundary", "recovering", "joining")
"""Phases that an observer is called for (`runtime.phases.Observer`)."""
HEAL, STALL = "heal", "stall"


class Order(Value, frozen=True):
    """One act. `workers` ("d:s"; "d:s.p" is one of a worker's parts) are hit together; `hosts` are network namespaces.

    Its moment is the `nth` (from 0) beginning of `phase` in `iteration`, `after` seconds from now. Without a phase,
    `iteration` means: while it is in flight. Without any of these: at once.

    Attributes:
        factor: of `slow`: how many times as long all work takes.
        seconds: duration (freeze, stall, slow, partition); None: until something ends it.
        frozen: stop the coordinator instead of killing it.
        others: of `partition`: only the path to these hosts is cut; none named: the path to all others.
        one_way: packets from `hosts` are lost, packets to them arrive.
        link: take their link down.
    """

    act: str
    workers: tuple[str, ...] = ()
    iteration: int | None = None
    phase: str | None = None
    nth: int = 0
    after: float = 0.0
    factor: float = 1.0
    seconds: float | None = None
    frozen: bool = False
    hosts: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    one_way: bool = False
    link: bool = False

    @property
    def observed(self) -> bool:
        """Whether it needs the workers' observers, which alone can detect its moment or carry it out."""
        return self.phase is not None or self.act == STALL

    def __str__(self) -> str:
        moment = [f"in iteration {self.iteration}"] if self.iteration is not None else []
        moment += [f"at {self.phase}" + (f" number {self.nth}" if self.nth else "")] if self.phase else []
        moment += [f"after {self.after:g} s"] if self.after else []
        return " ".join((self.act, *self.workers, *self.hosts, *(moment or ["at once"])))


class LineParser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog.partition(' ')[2] or self.prog}: {message}")


def add_acts(acts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """One subparser for each act."""

    def act(name: str, help: str) -> argparse.ArgumentParser:
        made = acts.add_parser(name, help=help, description=help)
        made.add_argument("--after", type=seconds, default=0.0, metavar="SECONDS", help="wait so long first")
        return made

    def at_iteration(made: argparse.ArgumentParser) -> None:
        made.add_argument("--at-iteration", dest="iteration", type=count, metavar="K",
                          help="when iteration K is in flight")

    def on_workers(name: str, help: str) -> argparse.ArgumentParser:
        made = act(name, help)
        made.add_argument("workers", nargs="+", type=_worker, metavar="D:S", help="all of them at the same moment")
        at_iteration(made)
        return made

    def with_phase(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
        made.add_argument("--phase", choices=PHASES, help="when the worker begins it (needs `recycle run --chaos`)")
        made.add_argument("--nth", type=count, default=0, metavar="N", help="its Nth time in the iteration, from 0")
        return made

    def lasting(made: argparse.ArgumentParser, until: str) -> None:
        made.add_argument("--for", dest="seconds", type=some_seconds, metavar="SECONDS", help=f"default: until {until}")

    with_phase(on_workers("kill", "SIGKILL"))
    lasting(with_phase(on_workers("freeze", "SIGSTOP: the whole process stands still")), "`thaw`")
    on_workers("thaw", "SIGCONT, and the end of a stall")
    stall = "hold the training thread; heartbeats go on (needs `recycle run --chaos`)"
    lasting(with_phase(on_workers(STALL, stall)), "`thaw`")
    slow = on_workers("slow", "make everything take FACTOR times as long, by stopping the process for moments")
    slow.add_argument("factor", type=_factor, metavar="FACTOR", help="1.5: half as long again")
    lasting(slow, "the end of the job, or Ctrl-C")
    coordinator = act("coordinator", "kill the coordinator; the launcher starts it again")
    at_iteration(coordinator)
    coordinator.add_argument("--freeze", dest="frozen", action="store_true", help="SIGSTOP instead")
    lasting(coordinator, "for ever, with --freeze")
    cut = act("partition", "cut hosts that are network namespaces of this machine off (needs root)")
    cut.add_argument("hosts", nargs="+", metavar="NAMESPACE")
    at_iteration(cut)
    cut.add_argument("--from", dest="others", nargs="+", default=(), metavar="NAMESPACE", help="default: all others")
    cut.add_argument("--one-way", action="store_true", help="only what they send is lost")
    cut.add_argument("--link", action="store_true", help="take their link down")
    lasting(cut, "`heal`")
    act(HEAL, "undo `partition`").add_argument("hosts", nargs="+", metavar="NAMESPACE")


def order_of(args: argparse.Namespace) -> Order:
    """The order parsed by a subparser of `add_acts`. Raises ConfigError where options do not go together."""
    order = Order.from_json(vars(args))
    if order.link and (order.others or order.one_way):
        raise ConfigError("partition: a link that is down cuts both ways to everybody; leave out --from and --one-way")
    if order.act == "coordinator" and order.seconds is not None and not order.frozen:
        raise ConfigError("coordinator: --for goes with --freeze; the launcher starts a killed one again")
    if order.nth and order.phase is None:
        raise ConfigError(f"{order.act}: --nth counts the times of a --phase")
    return order


def read_file(path: Path) -> list[Order]:
    """The orders of the script in a file. Raises ConfigError."""
    try:
        return read_script(path.read_text(errors="replace").splitlines(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a script of acts") from error


def read_script(lines: Iterable[str], where: str) -> list[Order]:
    """The orders of a script: one a line, as on the command line; `#` begins a comment.

    Raises:
        ConfigError: names the line that is not an order.
    """
    parser = LineParser(prog="chaos", add_help=False)
    add_acts(parser.add_subparsers(dest="act", required=True, parser_class=LineParser))
    orders = []
    for place, line in enumerate(lines, start=1):
        try:
            words = shlex.split(line, comments=True)
            if words:
                orders.append(order_of(parser.parse_args(words)))
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"{where}, line {place}: {error}") from error
    return orders


def _worker(text: str) -> str:
    try:
        return str(Process.parse(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no worker; write pipeline:stage, as in 1:2, or one part of it, "
                                         "as in 1:2.0") from error


_factor = number("a FACTOR of more than 1 and at most 100", lambda found: 1.0 < found <= 100.0)
