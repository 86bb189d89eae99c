"""Questions and orders of a job's owner to its coordinator: status, stacks, leave, out, stop, save.

An operator's connection proves the job's token; the lesser secret of joining hosts is not enough. Orders become inputs
of the membership machine, or messages that a worker would get anyway, and each is an event `ordered`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_recycle.control.event_feed import EventFeed
from megatron_recycle.control.server import Connection, Server
from megatron_recycle.membership import job_end
from megatron_recycle.membership.decisions import Tell
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.inputs import Input, Interrupted, Loss, Lost
from megatron_recycle.membership.names import Process, in_order
from megatron_recycle.membership.protocol import AskedForStacks, AskedToLeave, Facts, Order, Stacks, StacksOf
from megatron_recycle.membership.resume import by_stage
from megatron_recycle.membership.state import Member, Phase, State

STOPPED = 130
"""Exit status of a job stopped by its owner: that of Ctrl-C."""


class Operators:
    """Answers operators. Call it in the event loop.

    Args:
        feed: gets the inputs that result from orders.
    """

    def __init__(self, server: Server, event_feed: EventFeed, feed: Callable[[Input], None]) -> None:
        self._server = server
        self._event_feed = event_feed
        self._feed = feed
        self._asked: dict[int, Connection] = {}
        self._number = 0

    def asked(self, connection: Connection, message: Order, state: State) -> None:
        """Answer a question or an order."""
        what = message.what
        if what == "status":
            self._answer(connection, facts=self._facts(state))
        elif state.phase is Phase.ENDED or state.phase is Phase.FORMING:
            why = "is over" if state.phase is Phase.ENDED else "has not begun to train"
            self._answer(connection, f"the job {why}")
        elif what in ("stop", "save", "save anyway"):
            self._stop(connection, message, state)
        elif isinstance(named := _named(state, message.workers, message.host), str):
            self._answer(connection, named)
        elif what == "stacks":
            self._stacks(connection, named)
        elif what not in ("leave", "out"):
            self._answer(connection, f"{what!r:.40} is nothing that this version of megatron-recycle can do")
        elif why := _why_not(state, named):
            self._answer(connection, why)
        else:
            self._ordered(message, named, state)
            self._answer(connection, facts={"workers": [one.worker for one in named]})
            self._lose(what, named)

    def stacks(self, member: Member, message: Stacks) -> None:
        """A worker's stack traces."""
        if (connection := self._asked.get(message.number)) is not None:
            connection.send(StacksOf(member.worker, message.text))

    def gone(self, connection: Connection) -> None:
        """An operator has hung up."""
        self._asked = {number: one for number, one in self._asked.items() if one is not connection}

    def _lose(self, what: str, named: Sequence[Member]) -> None:
        """Order `leave` asks the workers to leave, as SIGTERM does; `out` declares them out, as stalled."""
        if what == "leave":
            self._server.tell(Tell(tuple(one.incarnation for one in named), AskedToLeave()))
        else:
            losses = tuple(Loss(one.incarnation, FailureKind.STALLED) for one in named)
            self._feed(Lost(losses, time.time()))

    def _stacks(self, connection: Connection, named: Sequence[Member]) -> None:
        self._number += 1
        self._asked[self._number] = connection
        self._answer(connection, facts={"workers": [one.worker for one in named]})
        self._server.tell(Tell(tuple(one.incarnation for one in named), AskedForStacks(self._number)))

    def _stop(self, connection: Connection, message: Order, state: State) -> None:
        saves = message.what != "stop"
        if message.what == "save" and not state.checkpoints:
            self._answer(connection, "it is uncertain whether a checkpoint can be written: the script has saved none "
                         "in this run yet, so nobody but it may know where to. If emergency_checkpoint is set, or "
                         "Megatron's --save, give --anyway")
        elif saves and (why := job_end.why_not(state, ())) is not None:
            nothing = state.progress.committed < 0
            why = why or ("nothing is committed yet" if nothing else "emergency_checkpoint is none")
            self._answer(connection, f"no checkpoint can be written: {why}. Without --checkpoint `recycle stop` ends "
                         "the job at once")
        else:
            self._ordered(message, (), state)
            self._answer(connection, facts={"iteration": state.progress.committed})
            self._feed(Interrupted(STOPPED, f"stopped by {message.by}", saves=saves))

    def _ordered(self, message: Order, named: Sequence[Member], state: State) -> None:
        event = {"event": "ordered", "t": time.time(), "generation": state.generation, "what": message.what,
                 "by": message.by, "workers": [one.worker for one in named], "host": message.host or None}
        self._event_feed.event(event, state)

    def _answer(self, connection: Connection, refusal: str = "", facts: Mapping[str, Any] | None = None) -> None:
        connection.send(Facts(refusal, dict(facts or {})))

    def _facts(self, state: State) -> dict[str, Any]:
        """Facts that only the coordinator has, such as each worker's activity and its seconds of silence."""
        now, connections = time.monotonic(), self._server.workers
        workers = {}
        for name in in_order(state.members):
            one = state.members[name]
            connection = connections.get(one.incarnation)
            workers[name] = {"host": one.host, "rank": one.rank, "pid": one.pid,
                             "iteration": state.progress.committed_by.get(name, state.progress.committed),
                             "silent_s": None if connection is None else round(now - connection.heard, 3),
                             "progress": self._event_feed.progress.get(one.incarnation)}
        return {"phase": state.phase.value, "generation": state.generation, "iteration": state.progress.committed,
                "workers": workers, "out": dict(state.absent.out), "joiners": in_order(state.arrivals.joiners),
                "stranded": in_order(state.absent.stranded), "host": state.host,
                "leaving": [name for name, one in state.members.items() if one.incarnation in state.absent.leaving],
                "launchers": sorted({str(one.host) for one in self._server.launchers})}


def on_host(host: str, named: str) -> bool:
    """Whether ``named`` means this host: its full name ("n3/2"), the name without the launcher's number ("n3"), or that
    number alone."""
    plain, _, number = host.rpartition("/")
    return named in (host, plain or host, number)


def _named(state: State, workers: Iterable[str], host: str) -> list[Member] | str:
    """The named members, by default all; or the reason why there are none."""
    members = [state.members[name] for name in in_order(state.members)]
    wanted = list(workers)
    for name in wanted:
        if not any(name in (one.worker, str(Process.parse(one.worker).worker)) for one in members):
            out = next((str(kind) for other, kind in state.absent.out.items()
                        if name in (other, str(Process.parse(other).worker))), None)
            return f"worker {name} " + (f"is out already ({out})" if out else
                                        f"is not of this job, whose workers are {members[0].worker} to "
                                        f"{members[-1].worker}")
    if host and not any(on_host(one.host, host) for one in members):
        return (f"no worker is on a host {host}: the job's hosts are "
                f"{', '.join(sorted({one.host for one in members}))}")
    return [one for one in members if (not wanted or one.worker in wanted
                                       or str(Process.parse(one.worker).worker) in wanted)
            and (not host or on_host(one.host, host))]


def _why_not(state: State, named: Iterable[Member]) -> str:
    """Why the job cannot do without these now; empty if it can."""
    if state.phase is not Phase.TRAINING:
        return f"the job is {state.phase.value} just now; ask again in a moment"
    going = {str(Process.parse(one.worker).worker) for one in named}
    left = [name for name in state.proven if str(Process.parse(name).worker) not in going]
    empty = [str(stage) for stage, names in enumerate(by_stage(state.stages, left)) if not names]
    if not empty:
        return ""
    return (f"stage {', '.join(empty)} would have no worker any more: let others join first (`recycle run --join`), or "
            "save and stop the job (`recycle stop --checkpoint`)")
