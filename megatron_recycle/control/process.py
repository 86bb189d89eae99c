"""The coordinator's process: the control server, on one interface only.

Run by `recycle run`, and by `embedded` under other launchers, as its own process. The token comes in the environment,
never as an argument: arguments are public. The first line on standard output has the server's address, or the reason
why it does not listen; all later output goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from megatron_recycle.config import RecycleConfig, options, variable
from megatron_recycle.control import Coordinator, Journal, JournalError, Timeouts
from megatron_recycle.control.coordinator_spec import DEPOSED, CoordinatorSpec
from megatron_recycle.control.etcd import Access, Etcd, Place, StoreRefused, StoreUnreachable
from megatron_recycle.control.event_fields import EventFields
from megatron_recycle.control.leader_election import Candidate, ElectedJournal, LeadLost, Sealed
from megatron_recycle.control.plan_folder import PlanFolder
from megatron_recycle.control.planning import Planning
from megatron_recycle.control.ports import joined, listen, reserve
from megatron_recycle.control.profiles import Profiles
from megatron_recycle.control.rendezvous_store import RendezvousStore
from megatron_recycle.control.searches import Plans
from megatron_recycle.control.write_ahead import Records
from megatron_recycle.environment import TOKEN
from megatron_recycle.membership.open_positions import Offered
from megatron_recycle.membership.records import restore, taken_up, untold
from megatron_recycle.membership.resume import RESTART
from megatron_recycle.membership.state import State
from megatron_recycle.observe.events import VERSION, EventLog, read_events
from megatron_recycle.observe.output import spare_output
from megatron_recycle.plan import Plan
from megatron_recycle.plan.plan_file import PlanFile

Answer = TypeVar("Answer")
logger = logging.getLogger(__name__)
_PAUSE = 0.25
"""Seconds between polls for a leader."""
PLANS = "plans"
"""The folder in a run's folder that keeps its plans."""
EVENTS = "events.jsonl"
_DESCRIPTORS = 65536
LINGER = 30.0
"""Seconds that the services outlive a job without a launcher, for processes that are still ending."""


def settings_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings in an environment, for later joiners."""
    return {variable(option.name): environ[variable(option.name)] for option in options()
            if variable(option.name) in environ and option.name != "run_dir"}


@dataclass(frozen=True)
class Past:
    """The remains of a dead coordinator: `state` from its journal, and its decisions' events, already emitted (`told`)
    or not (`untold`)."""

    state: State | None = None
    told: Sequence[Mapping[str, Any]] = ()
    untold: Sequence[Mapping[str, Any]] = ()


def open_journal(spec: CoordinatorSpec, run_dir: Path) -> tuple[Journal, Past]:
    """A new journal, or that of a coordinator that has died."""
    path = run_dir / "journal.jsonl"
    if not spec.resume:
        return Journal.create(path), Past()
    journal = Journal.reopen(path)
    return journal, _past(spec.size, journal.records, _past_events(run_dir), PlanFolder(run_dir / PLANS).load, path)


def _past(size: int, records: Sequence[dict[str, Any]], events: Sequence[Mapping[str, Any]],
          plan: Callable[[str], PlanFile | None], path: Path) -> Past:
    """The knowledge of a new coordinator. Raises JournalError."""
    try:
        state = taken_up(restore(size, records), records, plan)
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"{path} cannot be read by this version of megatron-recycle (it lacks, or has another, "
                           f"{error}): a job goes on only with the version that has begun it. {RESTART}") from error
    return Past(state, events, untold(records, events))


async def _stand_by(spec: CoordinatorSpec, token: str, starter: IO[str]) -> tuple[socket.socket, ElectedJournal]:
    """Announce this coordinator's address, and wait until it leads. The second line to the starter has the addresses of
    all candidates."""
    listener = reserve(spec.interface, spec.port)
    control = joined(*listener.getsockname()[:2])
    store = Etcd(Place.parse(spec.store), Access.read(os.environ))
    candidate = Candidate(Sealed(store, spec.job, token), spec.node, control)

    def tell(**fields: str) -> None:
        if not starter.closed:
            starter.write(json.dumps(fields) + "\n")
            starter.flush()

    def meet() -> None:
        until_answered(candidate.announce, say=lambda why: tell(waits=why))
        while not (found := until_answered(lambda: candidate.meet(spec.hosts), say=lambda why: tell(waits=why))):
            time.sleep(_PAUSE)
        tell(all=",".join(found))

    def lead() -> ElectedJournal:
        while (journal := until_answered(candidate.try_lead, bears=True)) is None:
            time.sleep(_PAUSE)
        if spec.begun and not journal.records:
            raise JournalError(f"{journal.path} in the store has been emptied: without it no coordinator leads. "
                               f"{RESTART}")
        return journal

    tell(control=control)
    if not spec.resume:
        await asyncio.to_thread(meet)
    return listener, await asyncio.to_thread(lead)


def _past_events(run_dir: Path) -> list[dict[str, Any]]:
    """The events so far. The file is expendable: without it some events are emitted twice."""
    try:
        return [event for event in read_events(run_dir / EVENTS) if EventFields.understood(event)]
    except (OSError, ValueError) as error:
        logger.warning("recycle: the events so far cannot be read: %s", error)
        return []


async def coordinate(spec: CoordinatorSpec, run_dir: Path, token: str, config: RecycleConfig, starter: IO[str]) -> int:
    """Serve until the job is over; returns its status. `starter` gets the address, once the server listens."""
    listener, elected, plans = None, None, PlanFolder(run_dir / PLANS)
    if spec.store:
        listener, elected = await _stand_by(spec, token, starter)
        past = Past() if not elected.records else _past(
            spec.size, elected.records, _past_events(run_dir), lambda digest: (
                plans.load(digest) or elected.load_plan(digest)), elected.path)
        journal: Records = elected
        keep = both(plans.keep, elected.keep_plan)
    else:
        journal, past = open_journal(spec, run_dir)
        keep = both(plans.keep)
    log, life = EventLog(run_dir / EVENTS), spec.life

    def emit(event: Mapping[str, Any]) -> None:
        log.emit(**{**event, **({"v": VERSION} if EventFields.from_json(event).event == "started" else {})})

    if life.number and not spec.resume:
        emit({"event": "started_again", "t": time.time(), "restart": life.number, "of": life.most,
              "workers": spec.size, "reason": life.reason})
    for event in past.untold:
        emit(event)
    planning = Planning(keep)
    if past.state is not None and past.state.description:
        planning.resume(past.state.description, past.state.failed, past.told)
    offered = None if spec.embedded else Offered(settings_of(os.environ))
    coordinator = Coordinator(
        size=spec.size,
        token=token,
        journal=journal,
        plans=Plans(planning.plan, planning.improve, None if spec.embedded else planning.moves, planning.redo),
        measure=Profiles(planning).take,
        emit=emit,
        timeouts=Timeouts(config.heartbeat_interval, config.heartbeat_timeout, config.report_timeout),
        listener=listener or listen(spec.interface, spec.port),
        launched=not spec.embedded,
        state=past.state,
        offered=offered,
        told=(*past.told, *past.untold),
        host="" if spec.store else socket.gethostname() + ("" if spec.embedded else f"/{spec.node}"),
        life=life,
        store=None if elected is None else RendezvousStore(elected.term, leads=elected.leads),
        follows=spec.resume or (elected is not None and elected.term > 1),
        before="" if elected is None else elected.before,
        leads=(lambda: True) if elected is None else elected.leads,
    )
    control = await coordinator.start()
    signs = asyncio.create_task(coordinator.server.give_signs(several=elected is not None))
    if elected is not None:
        loop = asyncio.get_running_loop()
        elected.keep_lead(partial(_in_loop, loop, coordinator.deposed))
        starter.close()
        emit({"event": "leads", "t": time.time(), "term": elected.term, "control": control})
    elif not starter.closed:
        with starter:
            starter.write(json.dumps({"control": control}) + "\n")
    try:
        end = await coordinator.wait_ended()
    except LeadLost as lost:
        logger.warning("recycle: %s", lost)
        return DEPOSED
    # A launcher stays connected until its workers have ended.
    await coordinator.wait_quiet(LINGER if spec.embedded else None)
    signs.cancel()
    await coordinator.close()
    log.close()
    return end.status


def _in_loop(loop: asyncio.AbstractEventLoop, what: Callable[[str], None], why: str) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(what, why)


def until_answered(ask: Callable[[], Answer], bears: bool = False, say: Callable[[str], None] = lambda why: None
                   ) -> Answer:
    """The answer of a store that may be unreachable for a while; with ``bears`` refusals are retried too. ``say`` gets
    the reason for a wait."""
    reason = ""
    while True:
        try:
            return ask()
        except (StoreUnreachable, StoreRefused) as error:
            if isinstance(error, StoreRefused) and not bears:
                raise
            if str(error) != reason:
                reason = str(error)
                logger.warning("recycle: %s", reason)
                say(reason)
            time.sleep(_PAUSE)


def both(*keep: Callable[[Plan], None]) -> Callable[[Plan], None]:
    """Keep a plan in several places; errors are only logged."""

    def all_of_them(plan: Plan) -> None:
        for each in keep:
            try:
                each(plan)
            except (OSError, JournalError) as error:
                logger.warning("recycle: a plan could not be kept: %s", error)

    return all_of_them


def _take_stdout() -> IO[str]:
    """Standard output for the one line to this process's starter; all other output goes to standard error, the log
    file."""
    sys.stdout.flush()
    line = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return line


def _many_connections() -> None:
    """Raise the limit of descriptors: the usual one is too low for a thousand workers, and as many strangers."""
    with contextlib.suppress(ValueError, OSError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_recycle.control.process", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("spec", help="a CoordinatorSpec in JSON")
    args = parser.parse_args()
    _many_connections()
    starter = _take_stdout()
    spare_output()
    try:
        spec = CoordinatorSpec.from_json(json.loads(args.spec))
        return asyncio.run(coordinate(spec, args.run_dir, os.environ.pop(TOKEN), RecycleConfig.resolve(), starter))
    except (OSError, JournalError) as error:  # the log, where a reader would look first, may be on a full disk
        if not starter.closed:
            with contextlib.suppress(OSError), starter:
                starter.write(json.dumps({"error": str(error)}) + "\n")
        raise


if __name__ == "__main__":
    sys.exit(main())
