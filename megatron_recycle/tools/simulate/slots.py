"""Which unit stands for which position of the grid, and which units are spare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_recycle.plan import Worker
from megatron_recycle.tools.simulate.cluster import Unit


class Slots:
    """Positions and units of one life of a job.

    A unit that comes back takes its old position if that is still empty, else another one, else it is spare.
    """

    def __init__(self, seated: Mapping[Worker, Unit], spare: Iterable[Unit] = ()) -> None:
        self.of: dict[Unit, Worker] = {unit: worker for worker, unit in seated.items()}
        self.spare: dict[Unit, None] = dict.fromkeys(spare)
        self._usual = dict(self.of)

    def lose(self, units: Iterable[Unit]) -> list[Worker]:
        """The positions that these units leave empty."""
        found = []
        for unit in units:
            self.spare.pop(unit, None)
            if unit in self.of:
                found.append(self.of.pop(unit))
        return found

    def gain(self, units: Iterable[Unit]) -> None:
        """These units can be used again."""
        self.spare.update(dict.fromkeys(unit for unit in units if unit not in self.of))

    def fill(self, empty: Iterable[Worker]) -> dict[Worker, Unit]:
        """Spare units for empty positions, as far as there are some; they count as taken."""
        left = dict.fromkeys(empty)
        found: dict[Worker, Unit] = {}
        for unit in [*self.spare]:
            if (usual := self._usual.get(unit)) in left:
                found[usual] = unit
                del left[usual]
                del self.spare[unit]
        for worker, unit in zip([*left], [*self.spare]):
            found[worker] = unit
            del self.spare[unit]
        for worker, unit in found.items():
            self.of[unit] = worker
        return found

    def move(self, unit: Unit, to: Worker) -> None:
        """A unit stands for another position from now on."""
        self.of[unit] = to

    def unit(self, worker: Worker) -> Unit | None:
        """The unit of a position."""
        return next((unit for unit, other in self.of.items() if other == worker), None)


def packed(units: Iterable[Unit], pipelines: int, stages: int) -> dict[Worker, Unit]:
    """The first units, pipeline by pipeline, as a launcher numbers ranks over the hosts that are left."""
    workers = [Worker(pipeline, stage) for pipeline in range(pipelines) for stage in range(stages)]
    return dict(zip(workers, sorted(units)))
