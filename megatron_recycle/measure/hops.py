"""The time of a transfer between stages, from times that its two ends took by clocks of their own.

A message's lag is its arrival minus its departure: the transfer, plus the lead of the receiver's clock, plus the
lateness of the machine. The least lag of a direction has the least lateness, and in the mean of both directions between
two workers the clocks cancel. Only lags of the same iteration are compared: clocks drift.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from megatron_recycle.plan import Worker

_KEPT = 12  # iterations

Pair = tuple[Worker, Worker]
"""Two workers of neighbouring stages, the earlier stage first."""


_Ends = dict[str, dict[tuple[str, int], tuple[Worker, float]]]
"""End of a message -> message and the boundary that it crosses -> who was there, and when."""


class Hops:
    """Times of the messages of the latest iterations, as workers have reported them."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], _Ends] = {}

    def take(self, worker: Worker, told: Mapping[str, Any]) -> None:
        """Take in one worker's times: the iteration and attempt ("of"), and when messages ("F0.1") were "sent" and
        "came"."""
        ends = self._ends.setdefault(tuple(told["of"]), {"sent": {}, "came": {}})
        for end, other in (("sent", "B"), ("came", "F")):
            for message, seconds in told[end].items():
                # An activation that comes and a gradient that is sent cross the boundary to the stage before.
                boundary = worker.stage - (message[0] == other)
                ends[end][message, boundary] = worker, seconds
        while len(self._ends) > _KEPT:
            del self._ends[min(self._ends)]

    def pairs(self) -> dict[Pair, float]:
        """Seconds that a transfer takes, for each pair that was heard in both directions in some iteration."""
        found: dict[Pair, float] = {}
        for ends in self._ends.values():
            least: dict[tuple[Pair, str], float] = {}
            for key, lag in _lags(ends):
                least[key] = min(least.get(key, lag), lag)
            for pair in {pair for pair, kind in least if kind == "F" and (pair, "B") in least}:
                seconds = max(0.0, (least[pair, "F"] + least[pair, "B"]) / 2)
                found[pair] = min(found.get(pair, seconds), seconds)
        return found

    def usual(self) -> float | None:
        """Seconds from one end to the other with the usual lateness of the machine, of all messages that were waited
        for; None: nothing is known. The first ones of a job take far longer: medians."""
        found = []
        for ends in self._ends.values():
            lags: dict[tuple[Pair, str], list[float]] = {}
            for key, lag in _lags(ends):
                lags.setdefault(key, []).append(lag)
            found += [(median(lags[pair, "F"]) + median(lags[pair, "B"])) / 2 for pair, kind in lags
                      if kind == "F" and (pair, "B") in lags]
        return max(0.0, median(found)) if found else None

    def seconds(self) -> float | None:
        """The median over all pairs, since a plan has one transfer time for all boundaries; None: nothing is known."""
        found = self.pairs()
        return median(found.values()) if found else None


def _lags(ends: _Ends) -> Iterator[tuple[tuple[Pair, str], float]]:
    """The pair of workers and the direction of each message of an iteration, and its lag."""
    for (message, boundary), (receiver, came) in ends["came"].items():
        sender, sent = ends["sent"].get((message, boundary), (receiver, came))
        if sender != receiver:  # else the sender has reported nothing
            yield ((sender, receiver) if message[0] == "F" else (receiver, sender), message[0]), came - sent
