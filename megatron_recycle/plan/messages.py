"""Messages between workers that a plan implies, in the order in which each sender makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .action import PASSES_ON, Action, named
from .grid import Worker
from .plan import Plan
from .problem import AHEAD


class Message(NamedTuple):
    """``F``: the activation of ``(pipeline, microbatch)`` to the next chunk; ``B``: its gradient to the chunk before.

    ``chunk`` is the reading action's, counted within the reader's stage: a message is named after its reader.
    """

    kind: str
    pipeline: int
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return named(*self)


def results_in(plan: Plan, worker: Worker, action: Action) -> tuple[Worker, Message] | None:
    """Output of an action of ``worker`` for the next chunk (or the one before), and the worker whose action reads it,
    possibly ``worker`` itself. None: no output, or no reader."""
    problem, kind = plan.problem, PASSES_ON.get(action.kind)
    if kind is None:
        return None
    chunk = problem.chunks_of[worker.stage][action.chunk] + (1 if kind == "F" else -1)
    to = plan._route.get((action.pipeline, action.microbatch, chunk))
    return None if to is None else (to, Message(kind, action.pipeline, action.microbatch, problem.place_of[chunk]))


def is_read(plan: Plan, worker: Worker, message: Message) -> bool:
    """Whether the action of ``worker`` that reads ``message`` was done before the plan begins."""
    chunk = plan.problem.chunks_of[worker.stage][message.chunk]
    return (message.kind, message.pipeline, message.microbatch, chunk) in plan._read


def comes_first(plan: Plan, worker: Worker, message: Message) -> bool:
    """Whether ``worker`` may receive the gradient ``message`` before it has run the matching forward: a dead worker had
    run that forward, and the next chunk went on with the activation."""
    chunk, item = plan.problem.chunks_of[worker.stage][message.chunk], message[1:3]
    return message.kind == "B" and ("F", *item, chunk + 1) in plan._read and ("F", *item, chunk) not in plan._read


def passes_on(plan: Plan, worker: Worker, action: Action) -> tuple[Worker, Message] | None:
    """The message that an action of ``worker`` ends with, and its receiver. None: no message, the worker itself runs
    the next action, or that was done before the plan begins. Outputs of done actions may still have readers."""
    result = results_in(plan, worker, action)
    return None if result is None or result[0] == worker or is_read(plan, *result) else result


def needs(plan: Plan, worker: Worker, action: Action) -> tuple[Worker, Message] | None:
    """The message that an action of ``worker`` begins with, and its sender. None: it reads nothing from other workers,
    or was done before the plan begins."""
    kind = PASSES_ON.get(action.kind)
    if kind is None:
        return None
    chunk = plan.problem.chunks_of[worker.stage][action.chunk]
    if (kind, action.pipeline, action.microbatch, chunk) in plan._read:
        return None
    source = plan._route.get((action.pipeline, action.microbatch, chunk - (1 if kind == "F" else -1)))
    if source is None or source == worker:
        return None
    return source, Message(kind, *action[1:])


def channels(plan: Plan) -> dict[tuple[Worker, Worker], tuple[Message, ...]]:
    """Messages of each ordered pair of workers, in the sender's listed order: first outputs of its done actions that
    the receiver's actions are still to read."""
    found: dict[tuple[Worker, Worker], list[Message]] = {}
    for worker, actions in sorted(plan.workers.items()):
        for action in actions:
            if passed := passes_on(plan, worker, action):
                found.setdefault((worker, passed[0]), []).append(passed[1])
    return {pair: tuple(messages) for pair, messages in found.items()}


def read_by(plan: Plan, me: Worker) -> dict[Message, tuple[Message, ...]]:
    """For each message that ``me`` receives, the own messages whose arrival it proves: for a gradient its activation,
    for an activation the gradients that its maker had to read before it could send it."""
    place_of, chunks_of = plan.problem.place_of, plan.problem.chunks_of
    beside = {plan.problem.stage_of(chunk + way) for chunk in chunks_of[me.stage] for way in (-1, 1)
              if 0 <= chunk + way < plan.problem.chunks}
    found: dict[Message, tuple[Message, ...]] = {}
    for worker, actions in plan.workers.items():
        if worker.stage not in beside:
            continue
        unanswered: list[Message] = []
        for action in actions:
            if action.kind != "F":
                read = needs(plan, worker, action)
                if read is not None and read[0] == me:
                    unanswered.append(read[1])
            passed = passes_on(plan, worker, action)
            if passed is None or passed[0] != me:
                continue
            if action.kind == "F":
                found[passed[1]] = tuple(unanswered)
                unanswered.clear()
            else:
                to = chunks_of[me.stage][passed[1].chunk] + 1
                found[passed[1]] = (passed[1]._replace(kind="F", chunk=place_of[to]),)
    return found


def reads(plan: Plan, me: Worker) -> tuple[tuple[Worker, Message], ...]:
    """The messages that ``me`` reads from other workers, with their senders, in the order of its actions."""
    return tuple(read for action in plan.actions(me) if (read := needs(plan, me, action)))


def readers(plan: Plan, me: Worker) -> tuple[Worker, ...]:
    """The workers that read messages of ``me``."""
    return tuple(sorted({passed[0] for action in plan.actions(me) if (passed := passes_on(plan, me, action))}))


def last_reads(plan: Plan, me: Worker) -> dict[Action, tuple[Worker, ...]]:
    """The actions of ``me`` that read the last message of one worker or several."""
    last = {read[0]: action for action in plan.actions(me) if (read := needs(plan, me, action))}
    found: dict[Action, tuple[Worker, ...]] = {}
    for sender, action in last.items():
        found[action] = (*found.get(action, ()), sender)
    return found


def receives(plan: Plan) -> dict[Worker, int]:
    """Most receives that each worker has posted at a time.

    A worker posts receives for the next AHEAD activations and the next AHEAD gradients that it reads, and for every
    message that its neighbour sends before these on the same channel. They are posted in the order of sending, so that
    no order of a legal plan can deadlock for want of message tags. A read message makes room when its action is done.
    """
    sent = channels(plan)
    rank = {pair: {message: i for i, message in enumerate(messages)} for pair, messages in sent.items()}
    return {me: _most_posted([(source, message.kind, rank[source, me][message]) for source, message in reads(plan, me)])
            for me in plan.workers}


def surplus(plan: Plan) -> dict[Worker, int]:
    """Receives per worker beyond the usual number (`Problem.receives`), if any: such a worker reads messages in another
    order than they are sent."""
    found = {me: count - plan.problem.receives(me.stage) for me, count in receives(plan).items()}
    return {me: count for me, count in found.items() if count > 0}


def _most_posted(listed: Sequence[tuple[Worker, str, int]]) -> int:
    """Most receives posted at a time by a reader of these messages, each (sender, kind, number on the channel)."""
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
