"""Moves of healthy workers, as the coordinator asks for them and as a launcher carries them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_recycle.plan import Problem
from megatron_recycle.planner import Prices, normalise


def moves_of(problem: Problem, description: Mapping[str, Any]) -> dict[str, str]:
    """Which workers had better move, and the empty position of another stage that each is to take.

    The description's `move_cost` and `horizon` are the planner's prices, in iterations.
    """
    prices = Prices(float(description.get("move_cost", 1.0)), float(description.get("horizon", 100.0)))
    return {str(mover): str(to) for mover, to in normalise(problem, prices).items()}


class Starts:
    """The launcher's memory of the ranks that it starts beside its own, each on the device of another.

    Args:
        devices: local rank of each rank of this host.
    """

    def __init__(self, devices: Mapping[int, int]) -> None:
        self.devices = dict(devices)
        """Local rank of every rank that this launcher has started or is to start."""
        self._due: list[int] = []
        self._moving: set[int] = set()
        self._numbers: dict[int, int] = {}

    def begin(self, rank: int, beside: int, number: int) -> None:
        """The worker of rank ``beside`` moves: its successor is to be started, once, however often that is told."""
        if self._numbers.get(rank) != number:
            self._numbers[rank] = number
            self.devices[rank] = self.devices[beside]
            self._due.append(rank)
            self._moving.add(rank)

    def number(self, rank: int) -> int:
        """Which move it is that this rank's process is started for; 0 for none."""
        return self._numbers.get(rank, 0)

    def due(self) -> list[int]:
        """The ranks to be started now, each named once."""
        found, self._due = self._due, []
        return found

    def later(self, rank: int) -> None:
        """Its earlier process still ends."""
        self._due.append(rank)

    def awaited(self, rank: int) -> bool:
        """Whether this rank's process of a move is still to be started: what ends now made room for it."""
        return rank in self._due

    def moves(self, rank: int) -> bool:
        """Whether this rank's process belongs to a move that is under way."""
        return rank in self._moving

    def end(self, rank: int) -> None:
        """The move is over, well or not."""
        self._moving.discard(rank)
        self._due = [other for other in self._due if other != rank]

    def others(self, rank: int) -> list[int]:
        """Ranks that share this one's device."""
        return [other for other, device in self.devices.items() if device == self.devices[rank] and other != rank]
