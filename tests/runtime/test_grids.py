"""A script may change how many micro-batches an iteration has."""

from __future__ import annotations

from megatron_recycle.plan import Costs, Grid, Problem, Worker, violations
from megatron_recycle.planner import quick
from megatron_recycle.runtime.grids import Grids


def grids() -> Grids:
    found = Grids(Grid(2, (4, 4, 4)), lambda pipelines, microbatches: microbatches // 2)
    for iteration, count in enumerate((4, 2, 2, 6, 4)):
        found.change(iteration, count)
    return found


def test_data_goes_on_where_the_iteration_before_ended():
    found = grids()
    assert [found.number(iteration) for iteration in range(8)] == [0, 4, 6, 8, 14, 18, 22, 26]
    assert found.number(3, 5) == 13
    resumed = Grids(Grid(2, (4, 4, 4)), lambda *_: 0)
    resumed.begin(100, 250)
    resumed.change(102, 3)
    assert [resumed.number(iteration) for iteration in (100, 101, 102, 103)] == [250, 254, 258, 261]


def test_one_that_comes_in_knows_what_was_changed_and_hears_it_again_from_its_own_script():
    job, newcomer = grids(), Grids(Grid(2, (4, 4, 4)), lambda *_: 0)
    newcomer.take(job.told())
    assert not any(newcomer.change(iteration, count) for iteration, count in enumerate((4, 2, 2, 6, 4)))
    assert newcomer.told() == job.told() and newcomer.number(9) == job.number(9)


def test_one_that_was_in_before_keeps_what_its_script_has_changed_since_a_checkpoint():
    """All go back to that, with the script's later batch sizes, and its script is past them."""
    earlier, one = Grids(Grid(2, (4, 4, 4)), lambda *_: 0), grids()
    earlier.change(1, 2)
    one.take(earlier.told())
    assert one.told() == grids().told()


def test_each_worker_makes_the_same_plan_of_the_one_that_it_was_given():
    problem = Problem(Grid(2, (4, 4, 4)), Costs.uniform(2, 1, 1, 1), failed=(Worker(1, 1),), block=2)
    given = quick(problem)
    here, there = grids(), grids()
    for iteration in (1, 3):
        made = here.plan(given, here.of(iteration))
        assert made.problem.grid == here.of(iteration) and not violations(made)
        assert made.problem.failed == problem.failed and made.problem.block == max(made.problem.grid.microbatches) // 2
        assert made.digest == there.plan(given, there.of(iteration)).digest
        assert here.plan(made, here.of(iteration)) is made
        assert here.plan(made, here.of(0)) is given, "the better one of the coordinator's is used again"
