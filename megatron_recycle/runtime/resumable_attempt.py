"""An attempt at an iteration that outlives its generation, and goes on in the next one.

An attempt is given up between two actions, or in the wait for a message; that action begins again. Its sums, its
activations and all messages that it has sent are kept until the iteration is committed. Peers run the actions of a dead
worker again and read those messages once more, and stages that have reduced already may have to do so again.

Where a worker has parts (tensor parallelism), an action counts if all parts have done it (`membership.redo`). W needs
no other worker, so a part catches up with the other parts' W. A forward that another part has lost, or not come to, is
dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from megatron_recycle.errors import GenerationOver
from megatron_recycle.membership.protocol import Carry
from megatron_recycle.membership.report import KeptReport
from megatron_recycle.plan import Action, Plan, Worker
from megatron_recycle.runtime.comm.messages import Meta
from megatron_recycle.runtime.compute.device import Device, Logged
from megatron_recycle.runtime.compute.memory import ActivationMemory
from megatron_recycle.runtime.computed import Computed
from megatron_recycle.runtime.place import Place

Log = Mapping[Action, Logged]
"""The tensors of a worker's messages, read or not, by the action that has made each: where a worker has several chunks,
two of its messages may have one name."""


@dataclass(frozen=True)
class ResumableAttempt:
    """An attempt that may be taken up again.

    Attributes:
        iteration: its iteration.
        chain: the attempt that began with the first of its actions.
        done: its actions, in order.
        computed: their results.
        log: their messages.
        metas: shapes of the activations that this worker has sent, by the boundary that they cross.
        microbatches: of each pipeline; the script may have changed that.
        block: micro-batches of a block of the exact reduction.
        lent: digest of its plan, if that lends layers.
    """

    iteration: int
    chain: int
    done: tuple[Action, ...]
    computed: Computed
    log: Log
    metas: Mapping[int, Meta]
    microbatches: int
    block: int
    lent: str = ""

    def report(self, committed: int) -> KeptReport:
        """For the coordinator; ``committed``: the last iteration that is final here. Until the previous iteration is
        final, a guess may turn out wrong, and with it the parameters that all this was computed with."""
        return KeptReport(self.iteration, self.chain, tuple(map(str, self.done)), committed < self.iteration - 1,
                          self.microbatches, self.block, self.lent,
                          not all(queue.alone for queue in self.computed.queues.values()))

    def levelled(self, done: tuple[Action, ...], place: Place, memory: ActivationMemory) -> ResumableAttempt:
        """With exactly these actions done: other forwards, which have no backward yet, are dropped, and W are run."""
        for action in {*self.done} - {*done}:
            if action.kind != "F" or action[1:] in self.computed.queues:
                raise AssertionError(f"{place.name} cannot undo {action}")
            ends = (place.first(action.chunk), False), (place.last(action.chunk), True)
            self.computed.forget(action, [end for present, end in ends if present])
            memory.drop(action[1:])
        had = {*self.done}
        with torch.no_grad():
            for action in [action for action in done if action not in had]:
                if action.kind != "W" or not self.computed.queues[action[1:]].alone:
                    raise AssertionError(f"{place.name} cannot catch up with {action}")
                self.computed.weigh(action)
                memory.weight(action[1:])
        return replace(self, done=done)


class KeptAttempts(dict[int, ResumableAttempt]):
    """A worker's resumable attempts by iteration: at the uncommitted iteration, and at the next one.

    Attributes:
        torn: whether the last attempt was given up in the midst of an action, whose message may have been read.
    """

    torn = False

    def let_go(self, iterations: Iterable[int] | None = None) -> None:
        """Discard the attempts at these iterations; None: at all."""
        for iteration in [*self] if iterations is None else [each for each in iterations if each in self]:
            self.pop(iteration).computed.discard()


@dataclass(frozen=True)
class ResumedIteration:
    """An iteration that goes on where it stood, as the go says (`membership.redo.carried`).

    Attributes:
        iteration: its number.
        chain: as `ResumableAttempt.chain`.
        plan: each worker's list begins with its actions that are done.
        done: how many of its actions each worker has done.
        provisional: whether some of them were done after a guess that may turn out wrong.
        loss: the iteration's loss and weight (`LossRelay.wait`), if some script has received them already.
    """

    iteration: int
    chain: int
    plan: Plan
    done: Mapping[Worker, int]
    provisional: bool
    loss: tuple[float, float] | None = None

    @classmethod
    def read(cls, carry: Carry) -> ResumedIteration:
        """From a go."""
        done = {Worker.parse(name): count for name, count in carry.done.items() if count}
        return cls(carry.iteration, carry.chain, Plan.from_file(carry.plan), done, carry.provisional, carry.loss)


class AttemptLog:
    """The log of an attempt, and whether it can be taken up again once it is given up.

    Args:
        chain: the attempt that began with the first of its actions.
        wanted: whether it is to be taken up again.
        device: of the messages.

    Attributes:
        torn: whether it is in the midst of an action that cannot be begun again.
        used: the forward of the backward under way, as long as nothing else is lost if that backward fails.
        log: messages that its actions have made.
        over: the end of the generation, which an action has met while it sent its results.
    """

    def __init__(self, chain: int, wanted: bool, device: Device) -> None:
        self.chain, self.wanted, self._device = chain, wanted, device
        self.torn = False
        self.used: Action | None = None
        self.log: dict[Action, Logged] = {}
        self.over: GenerationOver | None = None

    def done(self) -> None:
        """An action is done. Raises GenerationOver if the generation ended in it."""
        self.torn, self.used = False, None
        if self.over is not None:
            raise self.over

    def made(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Log the message of ``action``."""
        if self.wanted:
            self.log[action] = self._device.log(tensors)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A block in which an action sends its results. If they can be sent again later, the action completes although
        the generation ends."""
        try:
            yield
        except GenerationOver as error:
            if not self.wanted:
                raise
            self.over = error
