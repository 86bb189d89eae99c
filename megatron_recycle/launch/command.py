"""`recycle run`: starts a training script on this host as a job that survives the death of workers."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import stat
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from megatron_recycle.config import RecycleConfig, variable
from megatron_recycle.control import tokens
from megatron_recycle.control.coordinator_spec import CoordinatorSpec
from megatron_recycle.control.etcd import Place
from megatron_recycle.control.ports import joined
from megatron_recycle.control.wire import GUEST, for_joining
from megatron_recycle.environment import Launched, not_handed_over
from megatron_recycle.errors import ConfigError, RecycleError
from megatron_recycle.launch import coordinator_process as service
from megatron_recycle.launch import join_request, meeting, slurm
from megatron_recycle.launch.flags import add_arguments, check, check_store, in_environment, settings, translate
from megatron_recycle.launch.launcher import Launcher
from megatron_recycle.launch.life import Life
from megatron_recycle.launch.meeting import Meeting
from megatron_recycle.launch.other_launchers import refuse
from megatron_recycle.launch.processes import Grace, Job
from megatron_recycle.launch.reachability import (
    await_coordinator,
    check_address,
    check_host,
    check_listening,
    interface_towards,
    own_address,
)
from megatron_recycle.launch.run_folder import make, prepare
from megatron_recycle.launch.slurm import Hosts
from megatron_recycle.launch.summary import print_table
from megatron_recycle.launch.surroundings import Terminated, terminable, withstand, working_directory
from megatron_recycle.launch.watching import watched
from megatron_recycle.launch.worker_command import (
    check_script,
    clock,
    default_nproc,
    python_command,
    say_to,
    script_command,
    torchrun_environment,
)
from megatron_recycle.membership.failure_kinds import describe_status

__all__ = ["add_arguments", "launch", "run"]
_JOIN_SECONDS = 600.0  # --join-timeout
_PORT_LIMIT, _PAUSE = 60.0, 0.5
"""Seconds that a restarted job waits for its ports, and between two tries."""
_Led = tuple[Meeting, service.Service]
_TERMINATED = 128 + signal.SIGTERM
"""Status of a job that a SIGTERM has ended."""
_START_LIMIT = 600.0
"""Seconds that hosts wait for host 0; it waits as long for their workers."""


def run(args: argparse.Namespace) -> int:
    """Run the job; returns its exit status.

    Raises:
        ConfigError: options that contradict each other.
        RecycleError: the coordinator did not start.
    """
    check_script(args.script, args.module, args.no_python)
    if args.no_python and "megatron_recycle" not in " ".join(args.arguments):
        say_to(sys.stderr)("recycle: warning: --no-python starts the program as it is, with the plugin off unless the "
                           "script switches it on: write `python -m megatron_recycle SCRIPT` for `python SCRIPT`")
    if args.worker_restarts is not None and args.worker_restarts < 0:
        raise ConfigError(f"--worker-restarts is {args.worker_restarts}; give 0 or more")
    texts = [*args.settings, *([] if args.worker_restarts is None else [f"max_restarts={args.worker_restarts}"])]
    with in_environment(settings(texts, args.config, os.environ)):
        return launch(args, python_command(_script(args)))


def launch(args: argparse.Namespace, command: list[str]) -> int:
    """Like `run`, with the workers' command given."""
    withstand()
    folder, config = working_directory(), RecycleConfig.resolve()
    translate(args)
    if args.chaos is not None:
        from megatron_recycle.tools.chaos.command import check_acts

        check_acts(args.chaos)
    check(args)
    refuse(os.environ)
    say = say_to(sys.stderr)
    token = tokens.given(os.environ, args.token_file)
    if args.token_file is not None and args.token_file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        say(f"recycle: warning: others can read the token in {args.token_file}: chmod 600 {args.token_file}")
    if args.join is None and (token or "").startswith(GUEST):
        raise ConfigError("that token lets a host join a running job, and no more: give the job's own, or --join")
    if args.join is not None:
        return _join(args, command, config, token, say)
    hosts = _hosts(args, token)
    if args.store is not None:
        check_store(args.store, args.job or hosts.name)
    nproc = args.nproc or (1 if hosts.task else default_nproc(os.environ))
    if hosts.rank == 0:
        _ask_slurm(args, hosts, say)
    run_dir = run_dir_of(args.run_dir, config, hosts.folder)
    token = token or (secrets.token_hex(32) if hosts.rank == 0 else None)
    status = Run(args, command, config, hosts, run_dir, token, nproc, say, folder).all_lives()
    if args.requeue and hosts.rank == 0 and status == _TERMINATED:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm may send it again
        say(slurm.requeue(os.environ))
    return status


def _gather(launcher: Launcher, run_dir: Path, say: Callable[[str], None]) -> None:
    """Gather a failed life's evidence for an engineer."""
    end = launcher.ending.end
    if end is not None and end.status == 1 and not launcher.ending.interrupted:
        from megatron_recycle.tools.post_mortem import collect

        if (folder := collect(run_dir, end, launcher.job.environ, launcher.processes.host)) is not None:
            say(f"recycle: events, plans, stacks, the ends of all logs and versions are in {folder}")


def _hurting(chaos: str | None, run_dir: Path) -> AbstractContextManager[None]:
    """Block in which the acts of --chaos happen, if there are any."""
    if chaos is None:
        return nullcontext()
    from megatron_recycle.tools.chaos.command import hurting

    return hurting(chaos, run_dir)


def _ask_slurm(args: argparse.Namespace, hosts: Hosts, say: Callable[[str], None]) -> None:
    """Print reasons for which Slurm would end this job. Raises ConfigError if Slurm could not start the job again."""
    if args.requeue:
        slurm.check_requeue(os.environ)
    if hosts.name:
        for line in slurm.unkept(os.environ):
            say(line)


@dataclass(frozen=True)
class Run:
    """One `recycle run` on this host, for all lives of its job.

    `command` is a worker's, `nproc` the number of workers of this host. `given` is the job's token; None: the first
    host makes one, and this one reads it in the run folder. `folder` is the working directory.
    """

    args: argparse.Namespace
    command: list[str]
    config: RecycleConfig
    hosts: Hosts
    run_dir: Path
    given: str | None
    nproc: int
    say: Callable[[str], None]
    folder: str

    def all_lives(self) -> int:
        """The job on this host, from its first life to its last one; returns the last one's status."""
        hosts, nproc = self.hosts, self.nproc
        life: Life | None = Life(nproc * hosts.count, range(nproc * hosts.rank, nproc * (hosts.rank + 1)), hosts.rank,
                                 hosts.count, most=self.args.restarts)
        status = _TERMINATED
        try:
            with terminable():
                while life is not None:
                    launcher, status = self.live(life)
                    closing_table(launcher)
                    _gather(launcher, self.run_dir, self.say)
                    if (life := launcher.next_life(life)) is not None:
                        self.say(f"recycle: {life}" + ("" if life.ranks else "; this host stays as a spare"))
        except Terminated:
            self.say("recycle: SIGTERM, while no worker is running: nothing is started any more")
            return status and _TERMINATED
        return status

    @property
    def token(self) -> str:
        """The job's token, where this host needs it before it has met the other hosts."""
        assert self.given is not None, "_hosts() has looked, and the first host has made one"
        return self.given

    def live(self, life: Life) -> tuple[Launcher, int]:
        """One life of the job on this host: its launcher, which has ended, and its status."""
        args, hosts, run_dir = self.args, self.hosts, self.run_dir
        coordinator: service.Service | None = None
        try:
            if args.coordinator is not None:
                found = self._at_service()
            elif args.store is not None:
                found, coordinator = self._stand_by(life)
            elif hosts.rank == 0:
                found, coordinator = _lead_in_time(lambda last: self._lead(life, last), _PORT_LIMIT * bool(life.number))
            else:
                found = self._follow(life)
            nodes, node = (hosts.task.nodes, hosts.task.node) if hosts.task else (life.nodes, life.node)
            environ = torchrun_environment(not_handed_over(_environ(args)), found.control, nodes, node)
            environ |= life.variables()
            environ |= Launched(control=found.control, token=found.token, run_dir=str(run_dir),
                                chaos=args.chaos is not None,
                                microbatches=None if life.shape is None else life.shape.microbatches).variables()
            if hosts.count > 1 and (interface := interface_towards(found.host)) is not None:
                environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            job = Job(
                command=self.command,
                environ=environ,
                run_dir=run_dir,
                ranks=life.ranks,
                size=life.size,
                show=args.show,
                heartbeat_interval=self.config.heartbeat_interval,
                grace=grace_of(self.config),
                leader=hosts.rank == 0 and args.coordinator is None,
                first_local=slurm.local_rank(os.environ, hosts.task) if hosts.task else 0,
                local_size=hosts.task.count if hosts.task else None,
                places=self.nproc,
                folder=Path(self.folder),
            )
            self.say(f"recycle: {len(life.ranks)} workers, control at {found.control}, logs and events in {run_dir}")
            launcher = Launcher(job, found.control, found.token, self.say, coordinator, clock)
            home = run_dir if args.store is None else run_dir / f"node-{hosts.rank}"
            with _hurting(args.chaos if hosts.rank == 0 and not life.number else None, run_dir), \
                    watched(args, home, found.token, coordinator is not None):
                return launcher, launcher.run()
        finally:
            if coordinator is not None:
                meeting.withdraw(run_dir)

    def _at_service(self) -> Meeting:
        """Wait for a coordinator that is a service of its own. Host 0 writes the command of the job into the run
        folder, for joining hosts, if the service uses the same folder. Raises RecycleError."""
        control = self.args.coordinator
        self.say(f"recycle: waiting for the coordinator at {control}")
        await_coordinator(control, self.token, _START_LIMIT, self.say)
        make(self.run_dir)
        found = self._meeting(self.hosts.name, control)
        published = meeting.read(self.run_dir) if self.hosts.rank == 0 else None
        if published is not None and published.token == self.token:
            meeting.publish(self.run_dir, found)
        return found

    def _stand_by(self, life: Life) -> _Led:
        """Start this host's coordinator, one of several, and wait for the other hosts' ones. Raises RecycleError."""
        args, hosts = self.args, self.hosts
        given = self.config.interface if "interface" in self.config.sources else None
        interface = given or own_address([host for host, _ in Place.parse(args.store).members]) or "127.0.0.1"
        own = self.run_dir / f"node-{hosts.rank}"  # the folder may be on a file system of all hosts
        make(self.run_dir)
        prepare(own)
        spec = CoordinatorSpec(life.size, interface, life=life.told(), node=str(hosts.rank), store=args.store,
                               job=args.job or hosts.name, hosts=hosts.count)
        coordinator = service.start(spec, own, self.token, _environ(args))
        control = coordinator.stand_by(_START_LIMIT, self.say)
        # Each host writes the whole record, since any of them may go.
        return self._published(hosts.name, control), coordinator

    def _lead(self, life: Life, last: bool) -> _Led:
        """Start the coordinator, and write its address into the run folder.

        Raises:
            RecycleError: it cannot be started; if this was the ``last`` try, the waiting hosts read why.
        """
        args, hosts, sources = self.args, self.hosts, self.config.sources
        if not hosts.name:
            host = args.master_addr or self.config.interface
            check_host(host, hosts.count > 1)
            check_listening(host, args.master_port)
        prepare(self.run_dir)
        name = _name(hosts, life)
        try:
            if hosts.name:
                given = self.config.interface if "interface" in sources else None
                alone = "127.0.0.1" if hosts.task is not None and hosts.task.nodes == 1 else None
                host = args.master_addr or given or alone or own_address(slurm.towards(os.environ))
                if host is None:
                    raise ConfigError("this host has no address but loopback, so that no other host can reach it: give "
                                      "one in --master-addr")
                check_host(host, several=alone is None)
                check_listening(host, args.master_port)
            spec = CoordinatorSpec(life.size, host, args.master_port, life=life.told())
            coordinator = service.start(spec, self.run_dir, self.token, _environ(args))
        except RecycleError as error:
            if hosts.name and last:
                meeting.publish(self.run_dir, Meeting(name, refusal=str(error)))
            raise
        return self._published(name, coordinator.control), coordinator

    def _follow(self, life: Life) -> Meeting:
        """Wait for the first host.

        Raises:
            RecycleError: it does not come; or it starts another number of workers, which ends the job.
        """
        hosts = self.hosts
        if not hosts.name:
            control = joined(self.args.master_addr, self.args.master_port)
            self.say(f"recycle: waiting for host 0 at {control}")
            await_coordinator(control, self.token, _START_LIMIT, self.say)
            make(self.run_dir)
            return self._meeting("", control)
        make(self.run_dir)
        kind = "task" if hosts.task else "node"
        self.say(f"recycle: {kind} {hosts.rank} of {hosts.count} waits for the first one, in {self.run_dir}")
        found = meeting.await_first(self.run_dir, _name(hosts, life), _START_LIMIT, self.say)
        if found.nproc != self.nproc:
            why = (f"the first host starts {found.nproc} workers and this one {self.nproc}: give the same --nproc on "
                   "every host, and ask Slurm for the same GPUs on every node")
            join_request.call_off(found.control, found.token, why)
            raise ConfigError(why)
        return found

    def _meeting(self, name: str, control: str) -> Meeting:
        return Meeting(name, control, self.token, self.nproc, command=_script(self.args), folder=self.folder)

    def _published(self, name: str, control: str) -> Meeting:
        found = self._meeting(name, control)
        meeting.publish(self.run_dir, found)
        tokens.publish(self.run_dir, self.token)
        return found


def _name(hosts: Hosts, life: Life) -> str:
    """Name of this life of a job that meets by its run folder, distinct from all others."""
    return f"{hosts.name}.life{life.number}" if hosts.name and life.number else hosts.name


def _script(args: argparse.Namespace) -> tuple[str, ...]:
    return script_command(args.script, args.arguments, args.module, args.no_python)


def _environ(args: argparse.Namespace) -> dict[str, str]:
    """The environment for workers, coordinator and joining hosts: a job that is to be started again saves first."""
    return {**({variable("on_leave"): "checkpoint"} if args.requeue else {}), **os.environ}


def _hosts(args: argparse.Namespace, token: str | None) -> Hosts:
    """The hosts, from the options, or else from Slurm. Raises ConfigError."""
    if args.coordinator is not None and token is None:
        raise ConfigError("--coordinator needs the service's token: --token-file, or RECYCLE_TOKEN")
    if args.store is not None and token is None:
        raise ConfigError("--store needs a token, the same on each host: --token-file, or RECYCLE_TOKEN; make one with "
                          "`openssl rand -hex 16`")
    if args.nnodes is None:
        step = slurm.step_of(os.environ, args.nproc) or Hosts()
        if step.task is not None and args.restarts:
            raise ConfigError("--job-restarts needs one launcher per node: srun --ntasks-per-node=1 ... recycle run "
                              f"--nproc {step.task.count}")
        return step
    if args.nnodes > 1 and args.coordinator is None and args.store is None:
        missing = [name for name in ("master_addr", "master_port") if not getattr(args, name)]
        if missing:
            flags = " and ".join("--" + name.replace("_", "-") for name in missing)
            also = "" if token is not None else ("; they need a token, too (--token-file, or RECYCLE_TOKEN): make one "
                                                 "with `openssl rand -hex 16`")
            raise ConfigError(f"several hosts need {flags}, the same on each{also}")
        if token is None:
            raise ConfigError("several hosts need a token, the same on each: --token-file, or RECYCLE_TOKEN; make one "
                              "with `openssl rand -hex 16`")
    return Hosts(args.nnodes, args.node_rank)


def grace_of(config: RecycleConfig) -> Grace:
    """Times that the coordinator may refuse, or be out of reach: longer than workers bear to be without it."""
    patience = config.heartbeat_timeout + 2 * config.heartbeat_interval + config.report_timeout
    return Grace(refused=max(60.0, 10.0 + patience), cut_off=2 * patience)


def run_dir_of(option: Path | None, config: RecycleConfig, folder: str | None = None) -> Path:
    """The run's folder: from the options, the settings, Slurm (``folder``), or a new one."""
    given = option or config.run_dir or folder
    return Path(given or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()


def _lead_in_time(lead: Callable[[bool], _Led], limit: float) -> _Led:
    """The result of ``lead``, retried for ``limit`` seconds: between two lives of a job another process may briefly
    have its port. Its argument says whether the try is the last. Raises RecycleError."""
    until = time.monotonic() + limit
    while True:
        last = time.monotonic() >= until
        try:
            return lead(last)
        except RecycleError:
            if last:
                raise
            time.sleep(_PAUSE)


def _join(
    args: argparse.Namespace, command: list[str], config: RecycleConfig, token: str | None, say: Callable[[str], None]
) -> int:
    """Start workers for open positions of a running job; returns 0 if all of them ended well.

    Raises RecycleError if the job has no use for them.
    """
    control = args.join
    if Path(args.join).is_dir():
        published = meeting.read(Path(args.join))
        if published is None or not published.control:
            raise ConfigError(f"--join {args.join}: no job of `recycle run` runs in that folder (it has no "
                              f"{meeting.FILE})")
        control, token = published.control, for_joining(published.token)
    elif "/" in args.join or ":" not in args.join:
        raise ConfigError(f"--join {args.join}: there is no such folder; give the job's run folder, or HOST:PORT")
    check_address("--join", control)
    if token is None:
        raise ConfigError("--join needs the job's token: give the job's run folder instead of its address, or "
                          "--token-file, or RECYCLE_TOKEN, as the job was started with")
    found = join_request.ask(control, token, args.nproc or default_nproc(os.environ),
                             _JOIN_SECONDS if args.join_timeout is None else args.join_timeout, say)
    run_dir = run_dir_of(args.run_dir, config)
    make(run_dir)
    # Hosts are told apart by their number: no other one has this.
    outer = {**not_handed_over(os.environ), **found.environ}
    environ = torchrun_environment(outer, control, 1, found.size + found.ranks[0])
    environ |= Launched(control=control, token=token, run_dir=str(run_dir)).variables()
    job = Job(command, environ, run_dir, found.ranks, found.size, True, args.show, config.heartbeat_interval,
              grace_of(config), leader=False, folder=Path(working_directory()))
    ranks = ", ".join(map(str, found.ranks))
    say(f"recycle: rank {ranks} of {found.size} join the job at {control}, logs in {run_dir}")
    launcher = Launcher(job, control, token, say, stamp=clock)
    status = launcher.run()
    closing_table(launcher)
    return status


def closing_table(launcher: Launcher) -> None:
    """Print the closing table."""
    lives = sorted(launcher.processes.lives, key=lambda worker: worker.rank)
    rows = [(worker.rank, worker.child.pid, describe_status(worker.status)) for worker in lives]
    print_table(launcher.summary, rows, launcher.message, launcher.informed, late=launcher.job.joining,
                failed=launcher.ending.end is None or bool(launcher.ending.end.status))
