"""Whether the peers of a stage train the same parameters in an iteration.

Each worker sees its script's frozen parameters for itself. If these differed, peers would add up gradients of different
parameters, and diverge. So a checksum of each worker's list is exchanged while micro-batches are computed, and compared
before anything is reduced.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import nn

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.compute.accumulate import Layout
from megatron_recycle.runtime.compute.module_tree import ModuleTree

_NAMED = 3  # parameters that a message lists


@dataclass(frozen=True)
class Trained:
    """A stage's trained parameters: all names, a flag for each (1: trained), and a checksum of the flags."""

    names: tuple[str, ...]
    flags: tuple[int, ...]
    number: int

    @classmethod
    def of(cls, model: nn.Module, layout: Layout) -> Trained:
        named = ModuleTree(model).parts.parameters
        flags = tuple(int(parameter in layout) for parameter in named.values())
        # Short, since its square must not overflow.
        return cls(tuple(named), flags, zlib.crc32(bytes(flags)) >> 8)


class Agreement:
    """One exchange among peers, begun by the constructor. Raises GenerationOver."""

    def __init__(self, trained: Trained, groups: Groups) -> None:
        self._trained = trained
        self._peers = groups.stage_control
        number, count = trained.number, len(trained.names)
        self._own = torch.tensor([number, number**2, count, count**2])
        self._sums = self._own.clone()
        self._adding = self._peers.sum(self._sums)

    def end(self) -> None:
        """The attempt is void: wait until nothing of it is pending. Raises GenerationOver."""
        self._adding.wait()

    def check(self, iteration: int) -> None:
        """Wait for the others' numbers. Raises UnsupportedError, on all peers alike, and GenerationOver."""
        self._adding.wait()
        size = self._peers.size
        same = (self._sums == size * self._own).tolist()
        if all(same):
            return
        found = ""
        if all(same[2:]):
            sums = torch.tensor(self._trained.flags)
            self._peers.sum(sums).wait()
            named = [f"{name} by {count} of {size}" for name, count in zip(self._trained.names, sums.tolist())
                     if 0 < count < size]
            found = f" ({', '.join(named[:_NAMED])}{' and more' if named[_NAMED:] else ''})"
        raise UnsupportedError(f"iteration {iteration}: the workers of one stage do not train the same parameters"
                               f"{found}. Freeze, unfreeze or add parameters on all ranks alike, in the same iteration")
