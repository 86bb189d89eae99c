"""Placement of workers on hosts by the order of ranks, and so the cost of losing a host. Pure.

Launchers fill one host after the other, rank by rank. Both frameworks count the peers of a stage first (DeepSpeed's
axes pipe, data; Megatron's order tp-cp-ep-dp-pp), so that a host has many copies of few stages, perhaps all of one.
Counted through a pipeline first, a host has few copies of many stages: losing one costs less, and gradients are reduced
between hosts instead of activations sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_recycle.errors import ConfigError
from megatron_recycle.membership.names import Process, Worker

SPREAD, FRAMEWORK = "spread", "framework"


@dataclass(frozen=True)
class Placement:
    """The processes of a grid on equal hosts.

    Attributes:
        stages, pipelines: the grid's.
        parts: processes of a worker (tensor parallelism); they are neighbours in any order.
        per_host: processes of a host.
    """

    stages: int
    pipelines: int
    parts: int
    per_host: int

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.stages * self.pipelines * self.parts

    def hosts(self, spread: bool) -> dict[str, int]:
        """The host of each process, in the order of ranks: counted through a pipeline first (``spread``), or as the
        frameworks count."""
        workers = [Worker(pipeline, stage) for stage in range(self.stages) for pipeline in range(self.pipelines)]
        if spread:
            workers.sort()
        named = [Process(worker, part if self.parts > 1 else None) for worker in workers for part in range(self.parts)]
        return {str(process): rank // self.per_host for rank, process in enumerate(named)}

    def most(self, spread: bool) -> int:
        """The most copies of one stage that are lost with a host."""
        held: dict[tuple[int, int], set[Worker]] = {}
        for name, host in self.hosts(spread).items():
            worker = Process.parse(name).worker
            held.setdefault((host, worker.stage), set()).add(worker)
        return max(map(len, held.values()))

    def fatal(self, spread: bool) -> bool:
        """Whether all copies of a stage can be lost with one host."""
        return self.most(spread) == self.pipelines

    def spreads(self, wanted: str | None) -> bool:
        """Whether ranks are counted through a pipeline first: as ``wanted``, or by default where a host then has fewer
        copies of a stage."""
        if wanted is not None:
            return wanted == SPREAD
        return self.most(spread=True) < self.most(spread=False)


def placement(stages: int, parts: int, size: int, per_host: int) -> Placement:
    """`Placement` of ``size`` processes. Raises ConfigError if they form no grid."""
    for name, number in (("stages", stages), ("tensor-parallel parts", parts), ("processes of a host", per_host)):
        if number < 1:
            raise ConfigError(f"{number} {name}: give 1 or more")
    if size % (stages * parts):
        raise ConfigError(f"{size} processes are no whole pipelines of {stages} stages"
                          + f" x {parts} parts" * (parts > 1) + f": start a multiple of {stages * parts}")
    return Placement(stages, size // (stages * parts), parts, per_host)
