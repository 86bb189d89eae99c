"""The worker's side of membership: a thread that the training thread cannot block.

The training thread polls `stop_generation` between two actions (an attribute read, no lock), reports when it stands
still, and waits for the go of the next generation. `on_stop` runs in the agent's own thread the moment a stop arrives,
so that transports are aborted under a training thread that hangs in one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from megatron_recycle.control.host_memory import HostMemory
from megatron_recycle.control.link import AnyLink, Link
from megatron_recycle.control.parcels import Arrivals
from megatron_recycle.errors import JobEnded
from megatron_recycle.membership import inputs
from megatron_recycle.membership.description import Description
from megatron_recycle.membership.detectors import Doing
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.messages import Role
from megatron_recycle.membership.protocol import (
    TO_WORKER,
    Answer,
    AskedForStacks,
    AskedToLeave,
    End,
    Go,
    Heartbeat,
    Lags,
    LogsNow,
    Measured,
    Message,
    Noted,
    Offer,
    Parcel,
    Part,
    Profiled,
    Said,
    Stacks,
    Stop,
    There,
    ToWorker,
)
from megatron_recycle.membership.report import Report
from megatron_recycle.membership.resume import RESTART
from megatron_recycle.membership.worker_events import WorkerEvent
from megatron_recycle.observe.stacks import stacks

_EXPENDABLE = (Said, Heartbeat, Measured, LogsNow, Stacks)
"""Expendable messages."""
_GLANCE = 0.5
"""Seconds between looks at the connection while the training thread waits."""


class Agent:
    """Membership of one training process.

    Args:
        address: "host:port" of the coordinator (RECYCLE_COORDINATOR).
        token: the job's token (RECYCLE_TOKEN).
        worker: position "d:s" in the grid.
        rank: global rank.
        incarnation: random text, different for every process that ever stands at this position.
        heartbeat_interval: seconds between heartbeats.
        on_stop: called with a `Stop` in the agent's thread at once; it must return soon.
        on_end: called with an `End` in the agent's thread at once.
        patience: seconds without a connection to the coordinator that a waiting training thread tolerates, whether it
            waits for the coordinator or for other workers.
        joining: the job runs already, and this process waits to be taken in.
        link: makes the connection, from the arguments of `Link`.
        on_connect: called in the agent's thread whenever a coordinator is reached (again); it must return soon.
        memory: the host memory; None: this process fetches parcels for itself.
    """

    def __init__(
        self,
        address: str,
        token: str,
        worker: str,
        rank: int,
        incarnation: str,
        heartbeat_interval: float = 0.5,
        on_stop: Callable[[Stop], None] | None = None,
        on_end: Callable[[End], None] | None = None,
        patience: float = 60.0,
        pid: int | None = None,
        host: str | None = None,
        joining: bool = False,
        link: Callable[..., AnyLink] = Link,
        on_connect: Callable[[], None] | None = None,
        memory: HostMemory | None = None,
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.stop_generation = 0
        """Highest generation announced by a stop; the training thread polls it between actions."""
        self.progress: Callable[[], Mapping[str, Any]] | None = None
        """Returns the training thread's position, for each heartbeat; called in the agent's thread."""
        self.doing: Callable[[], Mapping[str, Any]] | None = None
        """Returns the training thread's activity and its duration (`detectors.Doing`); called in the agent's thread."""
        self.handles_sigterm: Callable[[], bool] = lambda: False
        """Whether the script has its own SIGTERM handler; sent with each heartbeat."""
        self.ended: End | None = None
        """Set when the job is over; the training thread polls it, or meets JobEnded when it waits."""
        self.offer: Offer | None = None
        """The latest better plan for the current generation."""
        self.missing = 0
        """Positions that the last stop left without a process."""
        self.outside = joining
        """Whether this process is no member (any more) and waits to be taken in; see `wait_taken_in`. True also for a
        stranded part of a worker."""
        self._last_stop = self._errors = self._answered = 0
        self._noted: tuple[int, str] | None = None
        self._leave_asked = self._leave_sent = False
        self._identity = inputs.WorkerHello(
            worker,
            rank,
            incarnation,
            os.getpid() if pid is None else pid,
            socket.gethostname() if host is None else host,
            generation=0,
            role="worker",
        )
        self._on_stop = on_stop
        self._on_end = on_end
        self._on_connect = on_connect
        self._patience = patience
        self._changed = threading.Condition()
        self._ready: inputs.Ready | None = None
        self._latest: dict[str, Message] = {}
        self._go: Go | None = None
        self._link = link(
            address,
            token,
            hello=self._hello,
            handle=self._handle,
            beat=self._beat,
            interval=heartbeat_interval,
            known=TO_WORKER,
            name="recycle-agent",
            failed=self._alone,
            unsent=self._too_large,
        )
        self._arrivals = Arrivals(self._link.send, self._handle, memory)

    @property
    def generation(self) -> int:
        """The generation of the last go; 0 before the first."""
        return 0 if self._go is None else self._go.generation

    @property
    def members(self) -> Mapping[str, str]:
        """Process -> incarnation of the last go; empty before the first."""
        return {} if self._go is None else self._go.members

    @property
    def breaks_off(self) -> bool:
        """Whether a collective of all ranks outside of training must be cancelled: a rank is gone, or has left it for a
        newer generation. Not at the end of the job, when the script may still go on."""
        return self.missing > 0 or self.ended is None

    @property
    def out_of_reach(self) -> bool:
        """Whether the coordinator is disconnected at present."""
        return self._link.lost_since is not None

    def start(self) -> None:
        """Connect, in the background, and send heartbeats from now on."""
        self._link.start()

    def ready(self, description: Description, report: Report,
              learnt: Sequence[Mapping[str, Any]] = ()) -> None:
        """The engine is built. `description` must be equal on all workers; then `wait_go(1)`. `learnt` is this
        process's set-up record, for a later joiner."""
        self._say(inputs.Ready(self.incarnation, description, report, tuple(map(dict, learnt))))

    def enter_again(self) -> Go | None:
        """Say `ready` once more, of the same job, and `wait_taken_in`."""
        assert self._ready is not None
        self._say(replace(self._ready, learnt=()))
        return self.wait_taken_in()

    def _say(self, ready: inputs.Ready) -> None:
        self._last_stop = self.stop_generation
        self._ready = ready
        self._link.send(ready)

    def wait_taken_in(self) -> Go | None:
        """Block until a generation has this process as a member, after `ready`.

        Returns None if it was taken in and the generation is over again: `enter_again`.

        Raises:
            JobEnded: as for `wait_go`.
        """
        before, last_stop = self.generation, self._last_stop

        def arrived() -> bool:
            return self.generation > before and self.generation >= self.stop_generation

        self._wait(lambda: arrived() or (self.outside and self.stop_generation > last_stop), None, "a place in the job")
        return self._go if arrived() else None

    def wait_stop(self, generation: int) -> None:
        """Block until a generation above `generation` is announced. Raises JobEnded as `wait_go` does."""
        self._wait(lambda: self.stop_generation > generation, None, "the next generation")

    def boundary(self, generation: int, iteration: int) -> None:
        """All before `iteration` is committed here, and this worker waits before it, as agreed: see `wait_stop`."""
        self._send_kept(inputs.Boundary(self.incarnation, generation, iteration, time.time()))

    def leave(self) -> None:
        """Ask to leave at the next boundary; until then go on. Safe in a signal handler: sent with the next
        heartbeat."""
        self._leave_asked = True

    @property
    def leaving(self) -> bool:
        """Whether `leave` was called."""
        return self._leave_asked

    def report(self, generation: int, report: Report) -> None:
        """The training thread stands still for `generation`; see `Report`."""
        self._send_kept(inputs.Reported(self.incarnation, generation, report))

    def wait_go(self, generation: int, timeout: float | None = None) -> Go | None:
        """Block until `generation` may go on.

        Returns None if a newer stop came instead: report again, for `stop_generation`.

        Raises:
            JobEnded: the job is over, or the coordinator cannot be reached for `patience` seconds.
            TimeoutError: nothing came within `timeout` seconds.
        """

        def arrived() -> bool:
            return self._go is not None and self._go.generation == generation

        self._wait(lambda: arrived() or self.stop_generation > generation, timeout, f"the go of {generation}")
        return self._go if self.stop_generation <= generation else None

    def holds(self, generation: int, received: inputs.Received) -> None:
        """This process, which came in with `generation`, has all of its stage's state, checked; `received` is the size
        of the copy (bytes, ms)."""
        self._send_kept(inputs.Holds(self.incarnation, generation, received))

    def resumed(self, generation: int, t: float | None = None) -> None:
        """The first action of `generation` begins (at `t`, default now)."""
        moment = time.time() if t is None else t
        self._send_kept(inputs.Resumed(self.incarnation, generation, moment))

    def committed(self, iteration: int, loss: float | None = None) -> None:
        """`iteration` is validated and stepped here."""
        self._send_kept(inputs.Committed(self.incarnation, self.generation, iteration, loss))

    def event(self, event: WorkerEvent) -> None:
        """A line for events.jsonl; the coordinator adds worker and, where missing, time and generation."""
        self._link.send(Said(event))

    def logs_from(self, offset: int) -> None:
        """This process is the logging rank from now on; `offset`: bytes that its own log has already."""
        self._link.send(LogsNow(offset))

    def measured(self, iterations: Sequence[Mapping[str, float]], lags: Sequence[Lags],
                 memory: Profiled | None) -> None:
        """Send the measurements since the last call to the planner: seconds by kind of work of each of `iterations`;
        when messages left and came (`lags`); bytes (``memory``), if measured anew."""
        self._link.send(Measured(tuple(iterations), tuple(lags), memory))

    def hint(self, generation: int, error: str) -> None:
        """A communication error: never a verdict, since errors cascade. If no failure explains it, a new generation
        with the same members follows."""
        self._send_kept(inputs.Hinted(self.incarnation, generation, error))

    def raised(self, fault: Fault) -> bool:
        """The training thread has met this error. Returns once the coordinator has decided, or cannot be reached for
        `patience` seconds: whether this worker goes on in the next generation, without the failed work."""
        number = self._errors = self._errors + 1
        self._send_kept(inputs.Raised(self.incarnation, fault, time.time(), number))
        try:
            self._wait(lambda: self._answered == number, None, "a decision")
        except JobEnded:
            return False
        return True

    def saved(self, generation: int, place: str, error: str) -> None:
        """This worker's part of a last checkpoint is at ``place``, or, with an ``error``, not written; wait for the end
        of the job. Returns if another generation comes instead. Raises JobEnded."""
        self._send_kept(inputs.Saved(self.incarnation, generation, place, error))
        self._wait(lambda: self.stop_generation > generation, None, "the end of the job")

    def written(self, generation: int, iteration: int, place: str, facts: Mapping[str, Any] | None = None) -> bool:
        """All parts of the checkpoint at ``place``, of the state after ``iteration``, are there; ``facts`` are needed
        besides to go back to it, None if that is impossible. Returns True once the coordinator has noted that; False if
        another generation comes instead. Raises JobEnded."""
        self._noted = None
        self._send_kept(inputs.Written(self.incarnation, generation, iteration, place, facts))
        noted = generation, place
        self._wait(lambda: self._noted == noted or self.stop_generation > generation, None, "the manifest")
        return self._noted == noted

    def unreadable(self, generation: int, place: str, why: str) -> None:
        """This worker cannot load its part of the checkpoint at ``place``: the coordinator decides the consequence."""
        self._send_kept(inputs.Unreadable(self.incarnation, generation, place, why))

    def unwritten(self, generation: int, why: str) -> None:
        """This worker cannot write its part of a checkpoint, and others wait for it: a new generation frees them."""
        self._send_kept(inputs.Unwritten(self.incarnation, generation, why))

    def adopted(self, generation: int, iteration: int, digest: str) -> None:
        """The offered plan of this digest is in use from `iteration` on."""
        self._send_kept(inputs.Adopted(self.incarnation, generation, iteration, digest))

    def unlent(self, generation: int, stage: int, why: str) -> None:
        """The offered plan is declined here: it lends layers of ``stage`` that cannot be lent."""
        self._send_kept(inputs.Unlent(self.incarnation, generation, stage, why))

    def finished(self, timeout: float | None = None) -> bool:
        """The script has ended; stand by until all scripts have.

        Returns True when the job has finished. Returns False if a stop came instead, because another worker failed and
        may need this one: report, wait for the go, recover, and call again.

        Raises:
            JobEnded: the job failed, or the coordinator cannot be reached for `patience` seconds.
            TimeoutError: as for `wait_go`.
        """
        generation = self.generation
        self._send_kept(inputs.Finished(self.incarnation, generation))
        try:
            self._wait(lambda: self.stop_generation > generation, timeout, "the end of the job")
        except JobEnded as ended:
            if ended.status == 0:
                return True
            raise
        return False

    def ending(self, fault: Fault | None = None) -> None:
        """The script has failed, with this error if one is known, and this process ends: others need not wait for the
        interpreter to exit, which takes seconds on a busy machine."""
        self._link.send(inputs.Ending(self.incarnation, fault, time.time()))

    def close(self) -> None:
        """Send all queued messages and end the thread. The coordinator is not informed: see `finished` and `ending`."""
        self._link.close()

    def _send_kept(self, message: Message) -> None:
        """Send, and repeat after a reconnect; only the latest of each type matters."""
        self._latest[message.type] = message
        self._link.send(message)

    def _hello(self) -> list[Message]:
        if self._on_connect is not None:
            self._on_connect()
        self._arrivals.forget()
        first: list[Message] = [replace(self._identity, generation=self.generation)]
        if self._ready is not None and (self._go is None or self.outside):
            first.append(self._ready)
        return first + [self._latest[key] for key in tuple(self._latest)]

    def _beat(self) -> Message:
        if self._leave_asked and not self._leave_sent:
            self._leave_sent = True
            self._send_kept(inputs.Leave(self.incarnation))
        where = {} if self.progress is None else self.progress()
        doing = {} if self.doing is None else {"doing": self.doing()}
        handles = {"sigterm": True} if self.handles_sigterm() else {}
        return Heartbeat({**where, **doing, **handles} or None)

    def _wait(self, reached: Callable[[], bool], timeout: float | None, what: str) -> None:
        limit = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not reached():
                if self.ended is not None:
                    raise JobEnded(self.ended.message, self.ended.status)
                now, lost = time.monotonic(), self._link.lost_since
                if lost is not None and now - lost > self._patience:
                    raise JobEnded(self._out_of_reach())
                if limit is not None and now >= limit:
                    raise TimeoutError(f"worker {self.worker} has waited {timeout} s for {what}")
                self._changed.wait(_GLANCE if limit is None else min(_GLANCE, limit - now))
            if self.ended is not None:
                raise JobEnded(self.ended.message, self.ended.status)

    def _handle(self, message: ToWorker) -> None:
        """In the agent's thread: one message of the coordinator."""
        if isinstance(message, Stop):
            self._stopped(message)
        elif isinstance(message, (Parcel, Part, There)):
            self._unpack(message)
        elif isinstance(message, Go):
            self._goes(message)
        elif isinstance(message, Offer) and message.generation == self.generation:
            self.offer = message
        elif isinstance(message, Answer):
            with self._changed:
                self._answered = message.number
                self._changed.notify_all()
        elif isinstance(message, Noted):
            with self._changed:
                self._noted = message.generation, message.place
                self._changed.notify_all()
        elif isinstance(message, End):
            self._end(message)
        elif isinstance(message, AskedToLeave):
            self.leave()
        elif isinstance(message, AskedForStacks):
            self._link.send(Stacks(message.number, stacks()))

    def _too_large(self, message: Message, why: str) -> None:
        """In the agent's thread: a message is too large. Unless it is expendable, others would wait for it for ever."""
        if not isinstance(message, _EXPENDABLE):
            self._end(End(1, f"worker {self.worker} cannot tell what it has to: {why}"))

    def _unpack(self, message: Parcel | Part | There) -> None:
        try:
            if isinstance(message, Parcel):
                self._arrivals.told(message)
            elif isinstance(message, Part):
                self._arrivals.came(message)
            else:
                self._arrivals.there(message)
        except Exception as error:  # noqa: BLE001 - else this process would wait unnoticed
            self._end(End(1, f"worker {self.worker} cannot read what the coordinator has told: {error}"))

    def _end(self, ended: End) -> None:
        if self.ended is not None:
            return
        self.ended = ended
        with self._changed:
            self._changed.notify_all()
        if self._on_end is not None:
            self._on_end(ended)

    def _alone(self) -> None:
        """In the agent's thread: the coordinator cannot be reached. Training goes on without it, unless the training
        thread waits in vain: on the wrong side of a network partition there is no error."""
        lost, doing = self._link.lost_since, None if self.doing is None else Doing.read(self.doing())
        if lost is None or doing is None or not doing.waits or time.monotonic() - lost <= self._patience:
            return
        if doing.for_s > max(self._patience, doing.limit_s or 0.0):
            self._end(End(1, self._out_of_reach()))

    def _out_of_reach(self) -> str:
        return (f"the coordinator at {self._link.address} cannot be reached for {self._patience:.0f} s "
                f"({self._link.error}); without it no failure can be recovered. {RESTART}")

    def _stopped(self, stop: Stop) -> None:
        if stop.generation <= self.stop_generation:
            return
        self._arrivals.over(stop.generation)
        with self._changed:
            self.outside = stop.role != Role.MEMBER
            self.stop_generation = stop.generation
            self.missing = stop.missing
            self.offer = None
            self._changed.notify_all()
        if self._on_stop is not None:
            self._on_stop(stop)

    def _goes(self, go: Go) -> None:
        if go.generation <= self.generation or go.generation < self.stop_generation:
            return
        with self._changed:
            self.outside = False
            self._go = go
            self._changed.notify_all()
