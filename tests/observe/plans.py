"""Plans made by hand for the tests: all forwards, then all backwards, then all weight gradients."""

from __future__ import annotations

from megatron_recycle.plan import STEP, Action, Costs, Grid, Plan, Problem, Worker, replay


def simple_plan(
    pipelines: int,
    stages: int,
    microbatches: int | tuple[int, ...],
    failed: tuple[str, ...] = (),
    step: int = 1,
    unit: int = 1,
) -> Plan:
    """A legal plan without any finesse; guests are dealt out in turn to the live workers of their stage."""
    counts = (microbatches,) * pipelines if isinstance(microbatches, int) else microbatches
    problem = Problem(
        grid=Grid(stages, counts),
        costs=Costs.uniform(stages, 2 * unit, 2 * unit, unit, hop=0, step=step),
        failed=tuple(Worker.parse(name) for name in failed),
    )
    items = sorted(problem.grid.items(), key=lambda item: (item[1], item[0]))
    workers: dict[Worker, list[Action]] = {worker: [] for worker in problem.live_workers()}
    for kind in "FBW":
        for stage in range(stages):
            live, turn = problem.live(stage), 0
            for pipeline, microbatch in items:
                worker = Worker(pipeline, stage)
                if worker not in workers:
                    worker, turn = live[turn % len(live)], turn + 1
                workers[worker].append(Action(kind, pipeline, microbatch))
    orders = {worker: (*actions, STEP) for worker, actions in workers.items()}
    timeline = replay(Plan(problem, orders, 0, 0, 0, "greedy"))
    return Plan(problem, orders, timeline.period, timeline.makespan, 0, "greedy")
