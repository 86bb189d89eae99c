"""Results of an attempt's micro-batches, from the action that makes each to the one that takes it.

They live as long as their attempt: none of them outlasts it, whatever still refers to it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_recycle.plan import Microbatch
from megatron_recycle.runtime.compute.accumulate import Accumulators
from megatron_recycle.runtime.compute.split import WeightQueue
from megatron_recycle.runtime.stage import Forward


class Computed:
    """All that one attempt has computed so far on this worker, but for what it has sent.

    Args:
        sums: of the gradients, empty.

    Attributes:
        forwards: of the micro-batches between their F and their B.
        queues: weight gradients of those between their B and their W.
        losses: unscaled, a scalar for each micro-batch that the last stage has run forward.
        reports: of the same micro-batches (``Forward.report``).
        sums: of the gradients.
        digests: of the data of the micro-batches that this worker has read.
    """

    def __init__(self, sums: Accumulators) -> None:
        self.forwards: dict[Microbatch, Forward] = {}
        self.queues: dict[Microbatch, WeightQueue] = {}
        self.losses: dict[Microbatch, torch.Tensor] = {}
        self.reports: dict[Microbatch, tuple[float, ...]] = {}
        self.sums = sums
        self.digests: dict[Microbatch, int] = {}

    def add(self, microbatch: Microbatch, forward: Forward) -> None:
        """``microbatch`` has run forward, and its outputs are on their way."""
        if forward.loss is not None:
            self.losses[microbatch] = forward.loss.detach()
            self.reports[microbatch] = forward.report
        self.forwards[microbatch] = replace(forward, outputs=())  # sent: not to be kept until B

    def harvest(self, microbatch: Microbatch, queue: WeightQueue) -> None:
        """Take the gradients that a backward formed off the parameters; those that W adds to wait in ``queue``."""
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
        self.sums.add(*microbatch, now)

    def discard(self) -> None:
        """Let go of all of it. The traceback of an error may keep this object until the recovery has ended."""
        self.forwards.clear()
        self.queues.clear()
        self.losses.clear()
        self.reports.clear()
        del self.sums
