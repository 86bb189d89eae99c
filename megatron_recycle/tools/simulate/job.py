"""The simulated job: grid, costs, memory, and the sizes of copies and messages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_recycle.observe import read_events
from megatron_recycle.plan import Costs, Grid, PlanError, Problem, Worker
from megatron_recycle.tools.simulate.trace import TraceError


@dataclass(frozen=True)
class Job:
    """A hybrid-parallel training job.

    Attributes:
        pipelines, stages: the grid.
        microbatches: of each pipeline, in an iteration.
        costs: of a stage, in integer ``unit``s.
        unit: seconds.
        cap: activations that a worker may hold; None: twice the stages, as a real job's default.
        samples: of a micro-batch.
        layers: of a stage, for policies that move layers between stages.
        state_seconds: time to copy a worker's state (parameters and optimizer) from a peer.
    """

    pipelines: int
    stages: int
    microbatches: int
    costs: Costs
    unit: float = 1e-6
    cap: int | None = None
    samples: int = 1
    state_seconds: float = 0.0
    layers: int = 4

    def __post_init__(self) -> None:
        Grid(self.stages, (self.microbatches,) * self.pipelines)
        if self.costs.stages != self.stages:
            raise PlanError(f"costs: {self.costs.stages} stages are given, the grid has {self.stages}")
        if self.costs.speed:
            raise PlanError("costs: workers of different speed are not simulated; leave `speed` out")
        if self.cap is not None and self.cap < 1:
            raise PlanError("cap: a worker holds at least one activation")

    @property
    def size(self) -> int:
        """Workers of the grid."""
        return self.pipelines * self.stages

    @property
    def all_layers(self) -> int:
        """Layers of the model."""
        return self.layers * self.stages

    @property
    def batch(self) -> int:
        """Samples of an iteration."""
        return self.pipelines * self.microbatches * self.samples

    @property
    def activations(self) -> int:
        """Activations that a worker may hold."""
        return 2 * self.stages if self.cap is None else self.cap

    @property
    def longest_action(self) -> float:
        """Seconds of the longest action, which cannot be interrupted."""
        costs = self.costs
        return self.unit * max(*costs.forward, *costs.backward_input, *costs.backward_weight)

    def dealt(self, pipelines: int) -> tuple[int, ...]:
        """The same global batch over so many pipelines."""
        each, more = divmod(self.pipelines * self.microbatches, pipelines)
        return tuple(each + (number < more) for number in range(pipelines))

    def problem(self, microbatches: tuple[int, ...] | None = None, failed: tuple[Worker, ...] = ()) -> Problem:
        """The planner's problem; ``microbatches`` of each pipeline may differ from the job's."""
        grid = Grid(self.stages, microbatches or (self.microbatches,) * self.pipelines)
        return Problem(grid, self.costs, failed, cap=dict.fromkeys(grid.workers(), self.activations))


def profiled(path: str | Path) -> Costs:
    """The measured costs of a real run, in microseconds: the last event `spent` or `profiled` of its events.jsonl, or a
    file with a plan's ``costs`` object. Raises TraceError."""
    try:
        events = read_events(path)
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: the profile cannot be read: {error}") from None
    told = [event["costs"] for event in events if event.get("event") in ("profiled", "spent")]
    found = told[-1] if told else events[0].get("costs", events[0]) if len(events) == 1 else None
    if found is None:
        raise TraceError(f"{path}: no event `profiled` is in it; give the events.jsonl of a run that has trained some"
                         " iterations, or one line with a plan's costs")
    try:
        costs = Costs.from_json({**found, "speed": {}})
    except PlanError as error:
        raise TraceError(f"{path}: {error}") from None
    if len(costs.step) < costs.stages:
        raise TraceError(f"{path}: its stages have several chunks ({costs.stages} on {len(costs.step)} stages), which "
                         "are not simulated: give the profile of a run without, or --costs by stage")
    return costs

