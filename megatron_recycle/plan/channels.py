"""The messages between workers that a plan implies, in the order in which each sender makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .action import PASSES_ON
from .grid import Worker
from .plan import Plan


class Message(NamedTuple):
    """``F``: the activation of ``(pipeline, microbatch)`` to the next stage; ``B``: its gradient to the one
    before."""

    kind: str
    pipeline: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.pipeline}.{self.microbatch}"


Channels = Mapping[tuple[Worker, Worker], tuple[Message, ...]]


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
    """For activations that ``me`` receives, the gradients it has sent that their sender must have read before it could
    send them."""
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


def buffers(plan: Plan) -> dict[tuple[Worker, Worker], int]:
    """Per channel, how many receive buffers its reader needs when it posts receives in the sender's order.

    A reader that wants the sender's i-th message must have posted i+1 receives; what came before it and is
    not yet used stays in its buffer. With that many buffers no order can deadlock for want of message tags.
    """
    talk = channels(plan)
    needed: dict[tuple[Worker, Worker], int] = {}
    rank = {pair: {message: i for i, message in enumerate(messages)} for pair, messages in talk.items()}
    route = plan._route
    for worker, actions in plan.workers.items():
        stage = worker.stage
        posted: dict[tuple[Worker, Worker], int] = {}
        used: dict[tuple[Worker, Worker], int] = {}
        for kind, d, m in actions:
            read = PASSES_ON.get(kind)
            source = route.get((d, m, stage + (-1 if read == "F" else 1))) if read else None
            if not read or source is None or (source, worker) not in talk:
                continue
            pair = (source, worker)
            posted[pair] = max(posted.get(pair, 0), rank[pair][Message(read, d, m)] + 1)
            needed[pair] = max(needed.get(pair, 0), posted[pair] - used.get(pair, 0))
            used[pair] = used.get(pair, 0) + 1
    return needed
