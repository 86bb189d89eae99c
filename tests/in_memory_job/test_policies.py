"""Policies that leave micro-batches out: all survivors commit the same, the mean over what was run, which one process
that trains the whole model gets as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from tests.in_memory_job.job import Job, Result
from tests.in_memory_job.scenes import SHAPES, Draw
from tests.in_memory_job.test_promises import in_one_process
from tests.moments import Moment
from tests.seeds import seeds

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

POLICIES = ("rollback", "lossy_forward")
SHAPE = SHAPES["3x2, four"].with_settings(reduction="fast")


def left_out(job: Job) -> dict[int, frozenset[int]]:
    """By iteration the pipelines that its update goes without, as the events tell."""
    found: dict[int, frozenset[int]] = {}
    for event in job.control.events:
        if event["event"] == "left_out":
            pipelines = frozenset(event["pipelines"])
            found.update(dict.fromkeys(range(event["iteration"], job.shape.iterations), pipelines))
    return found


def check(job: Job, results: Mapping[int, Result], out: set[str], came: frozenset[str] = frozenset()) -> None:
    """The job has ended as one process would have that leaves out the same."""
    losses, stages = in_one_process(job.shape, left_out(job))
    for rank, result in results.items():
        name = job.processes[rank].name
        if name in out and result.status != 0:
            continue
        assert result.status == 0, f"{name}: {result.error}\n{job.where()}"
        if name not in came:
            assert result.losses == pytest.approx(losses, rel=1e-5), (name, left_out(job))
        for key, tensor in stages[int(name[-1])].items():
            torch.testing.assert_close(result.state[key], tensor, rtol=1e-4, atol=1e-5)
    committed = [event["iteration"] for event in job.control.events if event["event"] == "committed"]
    assert committed == list(range(job.shape.iterations)), f"committed {committed}\n{job.where()}"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("worker", ["0:0", "1:1"])
@pytest.mark.parametrize(("phase", "iteration"), [("forward", 0), ("weight", 1), ("reduced", 1), ("stepped", 2)])
def test_a_hit_pipeline_is_left_out_and_the_mean_is_over_the_others(policy, worker, phase, iteration):
    job = Job(SHAPE.with_settings(policy=policy), [Moment(worker, phase, iteration)], seed=1)
    with job:
        check(job, job.wait(), {worker})
    begin = [event for event in job.control.events if event["event"] == "left_out"]
    assert [(event["pipelines"], event["microbatches"]) for event in begin] == [([int(worker[0])], 4)]


@pytest.mark.parametrize("seed", (0, 2))
@pytest.mark.parametrize(("phase", "nth"), [("forward", 2), ("backward", 1), ("reduce", 0), ("reduced", 0)])
def test_what_whole_pipelines_have_done_is_not_done_again(phase, nth, seed):
    """Also by a stage that has added up already when another one loses an addend for good, and when a second pipeline
    is hit before the first failure is got over."""
    shape, seen = SHAPES["4x2"].with_settings(reduction="fast", policy="lossy_forward"), list[Moment]()
    shape = replace(shape, microbatches=4)
    kills = [Moment("1:0", phase, 1, nth), Moment("3:1", "recovering", 1)]
    job = Job(shape, kills, seed=seed, at=lambda job, moment: seen.append(moment))
    with job:
        check(job, job.wait(), {"1:0", "3:1"})
    for worker in ("0:0", "0:1", "2:0", "2:1"):
        begun = sum((moment.worker, moment.phase, moment.iteration) == (worker, "forward", 1) for moment in seen)
        # One that waits for its activation when the generation ends begins once more: there are two failures.
        assert begun <= 4 + 2, f"{worker} has begun {begun} forwards for 4 micro-batches\n{job.where()}"


KINDS = ("one", "two", "asks", "both_ask", "during_the_recovery", "with_coordinator", "comes_back",
         "asks_while_one_comes_back", "frozen")
GRIDS = ("3x2, four", "2x3", "4x2", "3x3")


@pytest.mark.parametrize("seed", seeds(4))
def test_random_campaign(seed):
    """One or two deaths, also while another one's recovery is under way, of the coordinator too; workers that come
    back, whose pipelines then take part again."""
    draw = Draw(seed)
    shape = SHAPES[draw.random.choice(GRIDS)].with_settings(reduction="fast", policy=POLICIES[seed % len(POLICIES)],
                                                            step="barrier", verify="peers")
    scene = getattr(draw, draw.random.choice(KINDS))(replace(shape, iterations=4))
    while any(hold.phase == "weight" or hold.worker[0] in {dies.worker[0] for dies in (*scene.kills, *scene.asked)}
              for hold in scene.holds):  # who is left out gets nowhere; and not everybody has a W
        scene = getattr(draw, draw.random.choice(KINDS))(replace(shape, iterations=4))
    job = Job(scene.shape, scene.kills, holds=scene.holds, seed=seed, slow=draw.random.choice([0.0, 0.1, 0.5]),
              asked=scene.asked)
    with job:
        if scene.play is not None:
            scene.play(job)
        check(job, job.wait(), scene.out, frozenset(scene.came))
