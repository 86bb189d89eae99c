"""One order of all transfers of an iteration, for libraries that run a communicator's operations one after the other.

NCCL queues the operations that a process starts on a communicator: a receive that is posted too early blocks every
later send, and two workers that post in different orders deadlock. So all workers post their transfers in one order,
that of the planned ends of the actions that make the messages. It agrees with each worker's own order: the action that
reads a message ends later than its maker, and a worker's actions end one after the other. The first transfer that has
not taken place is therefore always at the head of both of its queues, and both of its workers come to it. A plan that
can be replayed cannot deadlock, however its communicators are cut, whether or not small messages are buffered, and
whether or not first uses block.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_recycle.plan.messages import Message, passes_on

from .grid import Worker
from .plan import Plan
from .replay import in_order_of_ends


class Transfer(NamedTuple):
    """``message`` goes from ``source`` to ``target``."""

    source: Worker
    target: Worker
    message: Message

    def __str__(self) -> str:
        return f"{self.message} {self.source}>{self.target}"


def transfers(plan: Plan) -> tuple[Transfer, ...]:
    """All transfers of one iteration, in the order of posting; the same on all workers. Outputs of done actions come
    first.

    Raises DeadlockError: an action of the plan can never start.
    """
    return tuple(Transfer(worker, *passed) for worker, action in in_order_of_ends(plan)
                 if (passed := passes_on(plan, worker, action)))


def postings(order: tuple[Transfer, ...], me: Worker) -> tuple[Transfer, ...]:
    """The transfers of ``me``, in the order of posting: a worker posts all transfers before a send before that send,
    and all transfers before a message before it waits for that message."""
    return tuple(transfer for transfer in order if me in (transfer.source, transfer.target))
