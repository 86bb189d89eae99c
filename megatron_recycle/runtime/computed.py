"""Results of an attempt's micro-batches, between the action that makes each and the action that takes it.

They live as long as their attempt, whatever still refers to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from megatron_recycle.plan import Action, Message, Microbatch
from megatron_recycle.runtime.compute.accumulate import Accumulators
from megatron_recycle.runtime.compute.split import WeightQueue
from megatron_recycle.runtime.stage import Forward

Item = tuple[int, int, int]
"""The pipeline, the micro-batch, and the chunk within the stage of an action."""


class Computed:
    """All results of one attempt on this worker so far, but for its messages.

    Args:
        sums: of the gradients, empty.

    Attributes:
        forwards: of the micro-batches between their F and their B, by chunk.
        queues: weight gradients of those between their B and their W, by chunk.
        handed: results for another chunk of this worker's own, named as a message would be.
        losses: unscaled, a scalar for each micro-batch that the last stage has run forward.
        reports: of the same micro-batches (``Forward.report``).
        sums: of the gradients.
        digests: of the data of the micro-batches that this worker has read, as `Held.digests`.
    """

    def __init__(self, sums: Accumulators) -> None:
        self.forwards: dict[Item, Forward] = {}
        self.queues: dict[Item, WeightQueue] = {}
        self.handed: dict[Message, list[torch.Tensor]] = {}
        self.losses: dict[Microbatch, torch.Tensor] = {}
        self.reports: dict[Microbatch, tuple[float, ...]] = {}
        self.sums = sums
        self.digests: dict[tuple[int, int, bool], int] = {}

    @property
    def under_way(self) -> bool:
        """Whether some micro-batch is between its forward and the sum of its gradients."""
        return bool(self.forwards or self.queues)

    def add(self, action: Action, forward: Forward) -> None:
        """The forward of ``action`` has run, and its outputs are on their way."""
        if forward.loss is not None:
            self.losses[action[1:3]] = forward.loss.detach()
            self.reports[action[1:3]] = forward.report
        self.forwards[action[1:]] = replace(forward, outputs=())  # sent: not to be kept until B

    def hand(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Keep ``tensors`` for this worker's own action that reads ``message``: detached, and laid out as if they had
        been sent, so that a reader here or elsewhere makes no difference."""
        self.handed[message] = [tensor.detach().contiguous() for tensor in tensors]

    def weigh(self, action: Action) -> None:
        """The W of ``action``: add up the gradients that its B has put off."""
        queue = self.queues.pop(action[1:])
        self.sums.of(action.chunk).add(action.pipeline, action.microbatch, queue.contributions())

    def forget(self, action: Action, ends: Collection[bool]) -> None:
        """Drop the forward ``action``, whose gradients are not formed yet, as if it had not been run. ``ends``: the
        ends of the model that its chunk is, as in `digests`."""
        self.forwards.pop(action[1:], None)
        for end in ends:
            self.digests.pop((*action[1:3], end), None)
        if True in ends:
            self.losses.pop(action[1:3], None)
            self.reports.pop(action[1:3], None)

    def harvest(self, action: Action, queue: WeightQueue) -> None:
        """Take a backward's gradients off the parameters; gradients that W adds to wait in ``queue``."""
        later = queue.identities()
        now = []
        for parameter in self.sums.parameters:
            if parameter.grad is None:
                continue
            if id(parameter) in later:
                queue.formed.append((parameter, parameter.grad))
            else:
                now.append((parameter, parameter.grad))
            parameter.grad = None
        self.sums.of(action.chunk).add(action.pipeline, action.microbatch, now)

    def discard(self) -> None:
        """Drop all results. The traceback of an error may keep this object until the recovery has ended."""
        self.forwards.clear()
        self.queues.clear()
        self.handed.clear()
        self.losses.clear()
        self.reports.clear()
        del self.sums
