"""Transfer time between stages, from timestamps of its two ends by clocks of their own.

A message's lag is its arrival minus its departure: the transfer, plus the lead of the receiver's clock, plus the
lateness of the machine. The least lag of a direction has the least lateness, and in the mean of both directions between
two workers the clocks cancel. Only lags of the same iteration are compared: clocks drift.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from megatron_recycle.plan import Worker

_KEPT = 12  # iterations

Pair = tuple[Worker, Worker]
"""Two workers of neighbouring stages, the earlier stage first."""


_Ends = dict[str, dict[tuple[str, int], tuple[Worker, float]]]
"""End of a message -> message and the boundary that it crosses -> worker and time."""


class Hops:
    """Message times of the latest iterations, as workers have reported them."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], _Ends] = {}

    def take(self, worker: Worker, times: Mapping[str, Any]) -> None:
        """Take in one worker's times: the iteration and attempt ("of"), and when messages ("F0.1") were "sent" and
        "came"."""
        ends = self._ends.setdefault(tuple(times["of"]), {"sent": {}, "came": {}})
        for end, other in (("sent", "B"), ("came", "F")):
            for message, seconds in times[end].items():
                # A received activation and a sent gradient cross the boundary to the stage before.
                boundary = worker.stage - (message[0] == other)
                ends[end][message, boundary] = worker, seconds
        while len(self._ends) > _KEPT:
            del self._ends[min(self._ends)]

    def pairs(self) -> dict[Pair, float]:
        """Seconds of a transfer, for each pair with reports of both directions in some iteration."""
        found: dict[Pair, float] = {}
        for ends in self._ends.values():
            for pair, seconds in _transfers(ends, min).items():
                found[pair] = max(0.0, min(found.get(pair, seconds), seconds))
        return found

    def usual(self) -> float | None:
        """Seconds from one end to the other with the usual lateness of the machine, over all messages that were waited
        for; None: nothing is known. Medians, since the first ones of a job take far longer."""
        found = [seconds for ends in self._ends.values() for seconds in _transfers(ends, median).values()]
        return max(0.0, median(found)) if found else None

    def seconds(self) -> float | None:
        """The median over all pairs, since a plan has one transfer time for all boundaries; None: nothing is known."""
        found = self.pairs()
        return median(found.values()) if found else None


def _transfers(ends: _Ends, of: Callable[[list[float]], float]) -> dict[Pair, float]:
    """For each pair with reports of both directions in an iteration, their mean, ``of`` all lags of each."""
    lags: dict[str, dict[Pair, list[float]]] = {"F": {}, "B": {}}
    for (message, boundary), (receiver, came) in ends["came"].items():
        sender, sent = ends["sent"].get((message, boundary), (receiver, came))
        if sender != receiver:  # else the sender has reported nothing
            pair = (sender, receiver) if message[0] == "F" else (receiver, sender)
            lags[message[0]].setdefault(pair, []).append(came - sent)
    backward = lags["B"]
    return {pair: (of(forward) + of(backward[pair])) / 2 for pair, forward in lags["F"].items() if pair in backward}
