"""What a worker has done of an iteration whose generation is over, for `policy: lossy_forward`: it goes on there.

An attempt is given up between two actions, or while one waits for a message; the one that it waits for is sent again.
Its sums are kept until the iteration is committed: another stage may lack an addend for good, and then all add up
again, over those that are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_recycle.errors import GenerationOver
from megatron_recycle.plan import Action, Message, Plan, Worker, needs
from megatron_recycle.runtime.comm.messages import Meta
from megatron_recycle.runtime.computed import Computed


@dataclass(frozen=True)
class Kept:
    """An attempt that may be taken up again.

    Attributes:
        iteration: of it.
        chain: the attempt that began with the first of its actions.
        done: the actions, in order.
        computed: by them.
        sent: messages that may not have been read.
        metas: shapes of the activations that this worker has sent, by the boundary that they cross.
    """

    iteration: int
    chain: int
    done: tuple[Action, ...]
    computed: Computed
    sent: Mapping[Message, Sequence[torch.Tensor]]
    metas: Mapping[int, Meta]

    def report(self) -> dict[str, int]:
        """For the coordinator."""
        return {"iteration": self.iteration, "chain": self.chain, "done": len(self.done)}


@dataclass(frozen=True)
class Carried:
    """An iteration that goes on where it stood, as the go says (`membership.policies.carried`).

    Attributes:
        iteration: of it.
        chain: as `Kept.chain`.
        plan: what was followed.
        done: how many of its actions each worker has done.
    """

    iteration: int
    chain: int
    plan: Plan
    done: Mapping[Worker, int]

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Carried:
        """From a go."""
        done = {Worker.parse(name): count for name, count in told["done"].items()}
        return cls(told["iteration"], told["chain"], Plan.from_json(told["plan"]), done)


class Keeping:
    """Whether an attempt can be taken up again where it is given up.

    Args:
        chain: the attempt that began with the first of its actions.
        wanted: whether it is to be.
        sound: whether what has come is in memory once it was waited for: then an abort spoils nothing computed of it.

    Attributes:
        torn: whether it is in the midst of an action that cannot be begun again.
        sent: messages that may not have been read.
        over: the end of the generation, which an action has met as it told what it had made.
    """

    def __init__(self, chain: int, wanted: bool, sound: bool) -> None:
        self.chain, self.wanted, self.sound = chain, wanted, wanted and sound
        self.torn = False
        self.sent: dict[Message, Sequence[torch.Tensor]] = {}
        self.over: GenerationOver | None = None

    def done(self) -> None:
        """An action is done. Raises GenerationOver if it has met that."""
        self.torn = False
        if self.over is not None:
            raise self.over

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A block in which an action tells others what it has made: where that may be told again, the action comes to
        its end all the same."""
        try:
            yield
        except GenerationOver as error:
            if not self.wanted:
                raise
            self.over = error


def read_already(plan: Plan, done: Mapping[Worker, int]) -> Iterator[tuple[Worker, Message]]:
    """The messages that actions which are done have read, with their receivers."""
    for worker, count in done.items():
        for action in plan.actions(worker)[:count]:
            if read := needs(plan, worker, action):
                yield worker, read[1]
