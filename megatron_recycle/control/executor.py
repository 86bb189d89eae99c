"""Executors of the membership machine's decisions, and `Leader`, the loop: decided, recorded, carried out.

`Executor` has one method per decision. The coordinator's own (`asyncio_executor`) has sockets, timers and threads;
`tests/fakes/coordinator.py` has none. `Leader` drives either.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from megatron_recycle.control.journal import JournalError
from megatron_recycle.control.write_ahead import WriteAhead
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership.inputs import Input, Interrupted
from megatron_recycle.membership.protocol import Offer, TooLarge
from megatron_recycle.membership.state import State

log = logging.getLogger(__name__)

_DEFECT = ("the coordinator cannot decide what follows from {} ({!r}), a defect of megatron-recycle: please report "
           "it, with post-mortem/")


class Executor(Protocol):
    """Carries decisions out, in the given order. No method blocks or feeds an input before `Leader.feed` has
    returned."""

    def follow(self, before: State, after: State) -> None:
        """The state has changed: watch its processes; timers and searches of an old generation are void."""

    def note(self, decision: do.Note) -> None: ...
    def tell(self, decision: do.Tell) -> None: ...
    def command(self, decision: do.Command) -> None: ...
    def emit(self, decision: do.Emit) -> None: ...
    def await_reports(self, decision: do.Await) -> None: ...
    def await_loss(self, decision: do.AwaitLoss) -> None: ...
    def await_place(self, decision: do.AwaitPlace) -> None: ...
    def await_end(self, decision: do.AwaitEnd) -> None: ...
    def await_saved(self, decision: do.AwaitSaved) -> None: ...
    def make_plan(self, decision: do.MakePlan) -> None: ...
    def make_redo(self, decision: do.MakeRedo) -> None: ...
    def improve(self, decision: do.Improve) -> None: ...
    def find_moves(self, decision: do.FindMoves) -> None: ...
    def end(self, decision: do.End) -> None: ...


_METHODS: Mapping[type, str] = {
    do.Note: "note",
    do.Tell: "tell",
    do.Command: "command",
    do.Emit: "emit",
    do.Await: "await_reports",
    do.AwaitLoss: "await_loss",
    do.AwaitSaved: "await_saved",
    do.AwaitPlace: "await_place",
    do.AwaitEnd: "await_end",
    do.MakePlan: "make_plan",
    do.MakeRedo: "make_redo",
    do.Improve: "improve",
    do.FindMoves: "find_moves",
    do.End: "end",
}


def carry_out(executor: Executor, decision: do.Decision) -> None:
    """Carry out a decision. A `Record` is on disk already: see `WriteAhead.step`."""
    if not isinstance(decision, do.Record):
        getattr(executor, _METHODS[type(decision)])(decision)


class Leader:
    """The state of one job. Every input is decided, recorded, and carried out to its end, despite errors on the way; an
    input that cannot be decided ends the job. Inputs come one at a time, which the caller ensures.

    Args:
        clock: Unix seconds.
        tolerant: an error of the executor is logged, and the other decisions are carried out all the same; an error of
            the machine ends the job.
    """

    def __init__(self, state: State, memory: WriteAhead, executor: Executor, clock: Callable[[], float] = time.time,
                 tolerant: bool = True) -> None:
        self.state = state
        self.memory = memory
        self._executor = executor
        self._clock = clock
        self._tolerant = tolerant

    def feed(self, happened: Input) -> None:
        """Decide on an input, and carry the decisions out. If a message to go on cannot be sent, the job ends, since
        all would wait for ever. An unsendable better plan is dropped."""
        before, reason = self.state, ""
        try:
            self.state, decisions = self.memory.step(before, happened, self._clock())
        except JournalError:
            raise
        except Exception as error:  # the sender would repeat this input for ever
            if not self._tolerant:
                raise
            log.exception("recycle: what follows from %s cannot be decided", kind := type(happened).__name__)
            self.state, decisions = self.memory.end(before, _DEFECT.format(kind, error), self._clock())
        self._executor.follow(before, self.state)
        for decision in decisions:
            try:
                carry_out(self._executor, decision)
            except TooLarge as error:
                log.error("recycle: %s", error)
                if isinstance(decision, do.Tell) and not isinstance(decision.message, Offer):
                    reason = f"the workers cannot be told to go on: {error}"
            except Exception:  # the other decisions must still be carried out
                if not self._tolerant:
                    raise
                log.exception("recycle: %s could not be carried out", type(decision).__name__)
        if reason:
            self.feed(Interrupted(1, reason))
