"""The grid of hybrid parallelism: pipelines, stages, micro-batches, and the names of its workers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .errors import PlanError

Microbatch = tuple[int, int]
"""(pipeline, micro-batch)."""

_WORKER = re.compile(r"([0-9]{1,9}):([0-9]{1,9})\Z")


class Worker(NamedTuple):
    """The worker at home at ``stage`` of ``pipeline``; printed and parsed as ``"1:2"`` (pipeline first)."""

    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"{self.pipeline}:{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Worker:
        """Read ``"1:2"``. Raises PlanError for anything else."""
        match = _WORKER.match(text) if isinstance(text, str) else None
        if match is None:
            raise PlanError(f"worker {text!r} is not of the form PIPELINE:STAGE, for example 1:2")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class Grid:
    """``stages`` pipeline stages; ``microbatches[d]`` micro-batches enter pipeline ``d`` in each iteration."""

    stages: int
    microbatches: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise PlanError(f"grid: stages must be positive, not {self.stages}")
        if not self.microbatches:
            raise PlanError("grid: at least one pipeline is needed")
        for pipeline, count in enumerate(self.microbatches):
            if count < 0:
                raise PlanError(f"grid: pipeline {pipeline} has {count} micro-batches")
        if not any(self.microbatches):
            raise PlanError("grid: no pipeline has a micro-batch")

    @property
    def pipelines(self) -> int:
        """Number of pipelines, failed or not."""
        return len(self.microbatches)

    @property
    def total(self) -> int:
        """Micro-batches of one iteration over all pipelines (the global batch)."""
        return sum(self.microbatches)

    def workers(self) -> tuple[Worker, ...]:
        """Every worker of the grid, in order of pipeline, then stage."""
        return tuple(Worker(d, s) for d in range(self.pipelines) for s in range(self.stages))

    def items(self) -> Iterator[Microbatch]:
        """Every ``(pipeline, microbatch)``, in logical order."""
        for pipeline, count in enumerate(self.microbatches):
            for microbatch in range(count):
                yield pipeline, microbatch

    def __contains__(self, worker: object) -> bool:
        if not isinstance(worker, tuple) or len(worker) != 2:
            return False
        pipeline, stage = worker
        return 0 <= pipeline < self.pipelines and 0 <= stage < self.stages
