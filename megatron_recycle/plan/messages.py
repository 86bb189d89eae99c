"""The messages between workers that a plan implies, in the order in which each sender makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .action import PASSES_ON
from .grid import Worker
from .plan import Plan
from .problem import AHEAD


class Message(NamedTuple):
    """``F``: the activation of ``(pipeline, microbatch)`` to the next stage; ``B``: its gradient to the one before."""

    kind: str
    pipeline: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.pipeline}.{self.microbatch}"


def channels(plan: Plan) -> dict[tuple[Worker, Worker], tuple[Message, ...]]:
    """For each ordered pair of workers that talk, its messages in the sender's listed order."""
    route = plan._route
    found: dict[tuple[Worker, Worker], list[Message]] = {}
    for worker, actions in sorted(plan.workers.items()):
        for kind, d, m in actions:
            passed = PASSES_ON.get(kind)
            to = route.get((d, m, worker.stage + (1 if passed == "F" else -1))) if passed else None
            if passed and to is not None and to != worker:
                found.setdefault((worker, to), []).append(Message(passed, d, m))
    return {pair: tuple(messages) for pair, messages in found.items()}


def read_by(plan: Plan, me: Worker) -> dict[Message, tuple[Message, ...]]:
    """For each activation that ``me`` receives, the gradients whose arrival it proves: their reader had to read them
    before it could send that activation."""
    route, stage = plan._route, me.stage
    found: dict[Message, tuple[Message, ...]] = {}
    for worker, actions in plan.workers.items():
        if worker.stage != stage - 1:
            continue
        unanswered: list[Message] = []
        for kind, d, m in actions:
            if kind not in PASSES_ON or route.get((d, m, stage)) != me:
                continue
            if kind != "F":
                unanswered.append(Message("B", d, m))
            else:
                found[Message("F", d, m)] = tuple(unanswered)
                unanswered.clear()
    return found


def reads(plan: Plan, me: Worker) -> tuple[tuple[Worker, Message], ...]:
    """The messages that ``me`` reads from other workers, with their senders, in the order of its actions."""
    route, found = plan._route, []
    for kind, d, m in plan.actions(me):
        read = PASSES_ON.get(kind)
        source = route.get((d, m, me.stage + (-1 if read == "F" else 1))) if read else None
        if read and source is not None and source != me:
            found.append((source, Message(read, d, m)))
    return tuple(found)


def receives(plan: Plan) -> dict[Worker, int]:
    """The most receives that each worker has posted at a time.

    A worker posts receives for the next AHEAD activations and the next AHEAD gradients that it reads, and for every
    message that its neighbour sends before these on the same channel. They are posted in the order of sending, so that
    no order of a legal plan can deadlock for want of message tags. A message that was read makes room when its action
    is done.
    """
    talk = channels(plan)
    rank = {pair: {message: i for i, message in enumerate(messages)} for pair, messages in talk.items()}
    return {me: _most_posted([(source, message.kind, rank[source, me][message]) for source, message in reads(plan, me)])
            for me in plan.workers}


def surplus(plan: Plan) -> dict[Worker, int]:
    """How many receives a worker has posted beyond the usual ones (`Problem.receives`), if any: it reads messages in
    another order than they are sent."""
    found = {me: count - plan.problem.receives(me.stage) for me, count in receives(plan).items()}
    return {me: count for me, count in found.items() if count > 0}


def _most_posted(listed: Sequence[tuple[Worker, str, int]]) -> int:
    """The most receives posted at a time by a reader of these messages: (sender, kind, number on the channel) each."""
    posted: dict[Worker, int] = {}
    coming = {kind: [(source, number) for source, other, number in listed if other == kind] for kind in ("F", "B")}
    most, read = 0, dict.fromkeys(coming, 0)
    for done, (_, kind, _) in enumerate(listed):
        for next_kind, row in coming.items():
            for source, number in row[read[next_kind]:read[next_kind] + AHEAD]:
                posted[source] = max(posted.get(source, 0), number + 1)
        most = max(most, sum(posted.values()) - done)
        read[kind] += 1
    return most
