"""Synthetic traces: failures of GPUs, hosts and racks, drawn from a seed; each has a repair time.

Times between failures are exponential or Weibull, per unit. A Weibull shape below 1 is the usual finding of field
studies (Schroeder and Gibson, "A large-scale study of failures in high-performance computing systems", 2006: 0.7 to
0.8): soon after a failure the next one is more likely. Drawn per unit and merged: at most one outage of a unit at a
time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_recycle.tools.simulate.trace import EXIT, HOST, Cleaning, Outage, Trace, TraceError, checked, lasting


@dataclass(frozen=True)
class Failures:
    """Failure model of one kind of unit.

    ``mtbf``: mean seconds between two failures of one unit. ``shape``: of the Weibull distribution; 1 is exponential.
    ``repair``: mean seconds until the unit is back (exponential); infinite: never.
    """

    mtbf: float
    shape: float = 1.0
    repair: float = math.inf

    def __post_init__(self) -> None:
        if not (self.mtbf > 0 and self.shape > 0 and self.repair > 0):
            raise TraceError("times between failures, repair times and Weibull shapes must be above 0")

    def times(self, duration: float, draw: random.Random) -> Iterator[tuple[float, float]]:
        """Begin and end of each outage of one unit."""
        scale = self.mtbf / math.gamma(1 + 1 / self.shape)
        at = draw.weibullvariate(scale, self.shape)
        while at < duration:
            up = at + (self.repair if math.isinf(self.repair) else draw.expovariate(1 / self.repair))
            yield at, up
            if math.isinf(up):
                return
            at = up + draw.weibullvariate(scale, self.shape)


def generate(hosts: int, gpus: int, duration: float, seed: int, *, of_gpus: Failures | None = None,
             of_hosts: Failures | None = None, of_racks: Failures | None = None, rack: int = 16) -> Trace:
    """A trace of ``hosts`` hosts with ``gpus`` GPUs each, ``rack`` hosts to a rack.

    A failed GPU takes the processes of its worker along (kind exit); a failed host or rack is silent at once (kind
    host).
    """
    if hosts < 1 or gpus < 1 or rack < 1:
        raise TraceError("a cluster needs at least one host, one GPU in each and one host in a rack")
    lasting(duration)
    draw = random.Random(seed)
    names = [f"host{number}" for number in range(hosts)]
    outages: list[Outage] = []
    if of_gpus is not None:
        outages += [Outage(down, up, name, EXIT, gpu) for name in names for gpu in range(gpus)
                    for down, up in of_gpus.times(duration, draw)]
    if of_hosts is not None:
        outages += [Outage(down, up, name, HOST) for name in names for down, up in of_hosts.times(duration, draw)]
    if of_racks is not None:
        for first in range(0, hosts, rack):
            for down, up in of_racks.times(duration, draw):
                outages += [Outage(down, up, name, HOST) for name in names[first:first + rack]]
    return checked(names, outages, duration, Cleaning())


def spaced(hosts: int, every: float, duration: float, seed: int, repair: float = math.inf,
           first: float | None = None) -> Trace:
    """A trace in which a host, drawn from the live ones, fails every ``every`` seconds and is back ``repair`` seconds
    later. The ``first`` one fails after so many seconds (default: ``every``).

    ReCycle and Oobleck failed one machine after the other in this way ("every 6 h, 2 h, 30 min").
    """
    draw = random.Random(seed)
    names = [f"host{number}" for number in range(hosts)]
    until: dict[str, float] = {}
    outages: list[Outage] = []
    at = every if first is None else first
    while at < duration:
        live = [name for name in names if until.get(name, -1.0) <= at]
        if not live:
            break
        name = draw.choice(live)
        until[name] = at + repair
        outages.append(Outage(at, until[name], name, HOST))
        at += every
    return checked(names, outages, duration, Cleaning())
