"""Names of processes.

A worker is one process, named as the worker: "1:2". With tensor parallelism it is a group of processes, its
parts, named "1:2.0", "1:2.1" and so on. They are lost together: no part can compute without the others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeVar

from megatron_recycle.plan.grid import Worker

Value = TypeVar("Value")
_NAME = re.compile(r"(\d+:\d+)(?:\.(\d+))?\Z")


class Process(NamedTuple):
    """Part ``part`` of ``worker``; None where the worker is one process."""

    worker: Worker
    part: int | None = None

    def __str__(self) -> str:
        return str(self.worker) if self.part is None else f"{self.worker}.{self.part}"

    @classmethod
    @lru_cache(maxsize=1 << 16)
    def parse(cls, name: str) -> Process:
        """Read ``"1:2"`` or ``"1:2.0"``. Raises PlanError, a ValueError, for anything else."""
        match = _NAME.match(name)
        if match is None or match[2] is None:
            return cls(Worker.parse(name))
        return cls(Worker.parse(match[1]), int(match[2]))


def in_order(names: Iterable[str]) -> list[str]:
    """Processes in grid order, pipeline by pipeline."""
    return sorted(names, key=Process.parse)


def workers_of(names: Iterable[str]) -> list[Worker]:
    """The workers of these processes, each once, in grid order."""
    return sorted({Process.parse(name).worker for name in names})


def siblings(names: Iterable[str], lost: Iterable[str]) -> list[str]:
    """The processes of ``names`` that are not ``lost`` themselves, but whose worker has lost a part."""
    broken = set(workers_of(lost))
    return [name for name in in_order(set(names) - set(lost)) if Process.parse(name).worker in broken]


def incomplete(names: Mapping[str, Value], done: Collection[str]) -> dict[str, Value]:
    """The processes of ``names`` whose worker has a part that is not ``done``."""
    without = set(workers_of(names.keys() - set(done)))
    return {name: value for name, value in names.items() if Process.parse(name).worker in without}
