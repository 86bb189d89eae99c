"""The next life of a job whose grid cannot go on: the script starts again, on the largest grid of whole pipelines that
the remaining hosts can run. Pure, like `machine`.

The global batch stays: an iteration has as many micro-batches as before, so that each pipeline of a smaller grid gets
more of them. A number of pipelines that does not divide them is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_recycle.membership.description import Job
from megatron_recycle.plan.value import Value


class Shape(Value, frozen=True):
    """The common facts of all lives of a job: the number of processes of one pipeline (`unit`), and the micro-batches
    of an iteration over all pipelines."""

    unit: int
    microbatches: int

    @classmethod
    def of(cls, job: Job) -> Shape:
        """The shape of this job."""
        return cls(job.grid.stages * job.parts, job.grid.total)


class JobLife(Value, frozen=True):
    """A life of the job, as a launcher reports it to the coordinator: its `number`, of at most `most`; whether another
    one may follow (`restarts`); the `reason` for it, and the `shape` of the one before."""

    restarts: bool = False
    number: int = 0
    most: int = 0
    reason: str = ""
    shape: Shape | None = None


class Share(Value, frozen=True):
    """A host's part of a life: its number among the hosts, its first rank, and how many ranks it has; none where the
    host is a spare."""

    node: int
    first: int
    count: int


class NextLife(Value, frozen=True):
    """`size` processes on these hosts; `nodes` of the hosts have a share of them. Without a `shape` the life before
    ended before its grid was known."""

    size: int
    nodes: int
    shares: Mapping[str, Share]
    shape: Shape | None = None


def node_of(host: str) -> int:
    """The launcher's number after its host's name."""
    return int(host.rpartition("/")[2])


def plan_life(places: Mapping[str, int], shape: Shape | None, size: int) -> NextLife | str:
    """The next life on hosts with these ``places``; or the reason why there can be none.

    Args:
        places: number of processes that each host can start, the first host first.
        shape: of the life before, if its grid was known.
        size: processes of the life before.
    """
    available = sum(places.values())
    if shape is None:
        wanted = size
        if available < size:
            return (f"the hosts that are left have {available} places, and a job whose grid is not known needs all "
                    f"{size}")
    else:
        pipelines = next((n for n in range(available // shape.unit, 0, -1) if shape.microbatches % n == 0), 0)
        wanted = pipelines * shape.unit
        if not pipelines:
            return f"the hosts that are left have {available} places, and a pipeline takes {shape.unit}"
    shares: dict[str, Share] = {}
    first = 0
    used = [host for host, count in places.items() if count]
    for host in (*used, *(host for host in places if host not in used)):
        count = min(places[host], wanted - first)
        shares[host] = Share(len(shares), first, count)
        first += count
    return NextLife(wanted, sum(share.count > 0 for share in shares.values()), shares, shape)
