"""Workers of a DeepSpeed job are killed at chosen moments; training goes on and ends with the same bits."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_recycle.runtime.comm import threads
from tests.backends import gpt_job
from tests.backends.comparing import check_survivors, differences
from tests.harness import Hold, Job, Result
from tests.references import calm_run, run

pytestmark = pytest.mark.processes

PIPELINES, STAGES, ITERATIONS, KILLED_IN = 3, 2, 5, 2
RAMP = (2, 2, 4, 3)
"""Micro-batches of the first iterations: a failure finds them changed just then."""
POSITIONS = [f"{pipeline}:{stage}" for pipeline in range(PIPELINES) for stage in range(STAGES)]
EXACT: Mapping[str, Any] = {"pipelines": PIPELINES, "stages": STAGES, "iterations": ITERATIONS, "noisy": True,
                            "ramp": RAMP,
                            "settings": {"reduction": "exact"}}
FAST_SGD: Mapping[str, Any] = {**EXACT, "optimizer": "SGD", "settings": {"reduction": "fast"}}


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Result]:
    """The exact job without failures, in which every backward is split."""
    results = calm_run(gpt_job.train, PIPELINES * STAGES, EXACT)
    assert not any(result.value["full"] for result in results.values())
    return results


@pytest.fixture(scope="module")
def undisturbed_fast() -> dict[int, Result]:
    """The fast one, whose first stage runs most B and W in one."""
    results = calm_run(gpt_job.train, PIPELINES * STAGES, FAST_SGD)
    assert all(bool(result.value["full"]) == (rank < PIPELINES) for rank, result in results.items())
    return results


def kill_and_compare(holds: list[Hold], reference: Mapping[int, Result], arguments: Mapping[str, Any] = EXACT,
                     within: float = 0.0) -> Job:
    with Job(gpt_job.train, PIPELINES * STAGES, arguments, holds) as job:
        job.wait_held()
        job.kill(*holds)
        check_survivors(job, {hold.worker for hold in holds}, reference, within)
    return job


@pytest.mark.night
def test_a_worker_killed_in_a_collective_of_the_script_leaves_the_values_of_all_and_the_same_bits(undisturbed):
    """It dies in a sum over its pipeline, which a peer of another pipeline answers; then others gather from all."""
    kill_and_compare([Hold("1:0", "collective", KILLED_IN - 1, 2)], undisturbed, {**EXACT, "talks": True})


def test_a_worker_killed_in_mid_iteration_leaves_the_same_bits(undisturbed):
    """Other positions and moments, two deaths at once, and one in the recovery from the other: tests/in_memory_job. The
    script gives an iterator over a data loader, and asks for timers, whose lines the next worker goes on with."""
    timed = {"engine_settings": {"wall_clock_breakdown": True, "steps_per_print": 1}}
    dies = Hold("0:0", "backward", KILLED_IN, 1)
    with Job(gpt_job.train, PIPELINES * STAGES, {**EXACT, **timed, "loader": "cycle"}, [dies]) as job:
        job.wait_held()
        job.kill(dies)
        check_survivors(job, {"0:0"}, undisturbed)
        lines = [[line for line in (job.folder / f"worker-{rank}.log").read_text().splitlines()
                  if line.startswith("time (ms) | fwd: ")] for rank in range(PIPELINES * STAGES)]
    assert list(map(len, lines)) == [KILLED_IN, ITERATIONS - KILLED_IN, *[0] * (len(lines) - 2)]
    assert all(" | bwd_allreduce: " in line and " | step: " in line for own in lines for line in own)
    resumed = next(event for event in job.events if event["event"] == "resumed")
    assert resumed["generation"] == 2
    reconciled = next(event for event in job.events if event["event"] == "reconciled")
    assert reconciled["target"] == KILLED_IN - 1


@pytest.mark.night
def test_with_the_fast_reduction_results_agree_to_rounding(undisturbed_fast):
    kill_and_compare([Hold("0:0", "backward", KILLED_IN, 2)], undisturbed_fast, FAST_SGD, within=1e-5)


@pytest.mark.night
def test_a_worker_killed_in_the_last_iteration(undisturbed):
    """Others may have nothing left to do than to stand by; the recovery is told to be over all the same."""
    job = kill_and_compare([Hold("0:1", "reduced", ITERATIONS - 1)], undisturbed)
    assert [event["generation"] for event in job.events if event["event"] == "resumed"] == [2]


def test_a_worker_killed_when_the_scripts_of_others_have_destroyed_their_process_groups(undisturbed):
    """As many scripts end: torch does not know any group then, and the recovery makes new ones all the same. Those of
    the killed worker's own stage have not returned, since it is not closed."""
    hold = Hold("0:1", "stepped", ITERATIONS - 1)
    others = {rank for rank in range(PIPELINES * STAGES) if rank != PIPELINES}
    with Job(gpt_job.train, PIPELINES * STAGES, {**EXACT, "tidy": True}, [hold]) as job:
        job.wait_held()
        for position in ("0:0", "1:0", "2:0"):
            job.wait_event("left", worker=position)
        job.kill(hold)
        results = job.wait()
        assert {rank for rank, result in results.items() if result.status == 0} == others, job.where()
        assert all(not differences(results[rank], undisturbed[rank]) for rank in others)
        logs = [(job.folder / f"worker-{rank}.log").read_text() for rank in others]
        assert not any("Traceback" in log for log in logs), job.where()


def leaves_at_once(engine: Any) -> None:
    """The script ends so right behind its last train_batch()."""
    def leave() -> None:
        engine.session._options.observer.on("leaves", engine.global_steps, None)
        os._exit(0)

    engine.settle = leave


def leaves_and_starts_no_thread(engine: Any) -> None:
    """In an interpreter that does, when it ends, as Python 3.12 and newer."""
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def leave() -> None:
        engine.session._options.observer.on("leaves", engine.global_steps, None)
        threading.Thread.start = refuse
        os._exit(0)

    threads.sys = SimpleNamespace(version_info=(3, 12))
    threads.keep_some()
    engine.settle = leave


def tells_forwards(engine: Any) -> None:
    """Each one that begins, and of which iteration, is a line of the worker's log."""
    observer = engine.session._options.observer
    on = observer.on

    def tells(phase: str, iteration: int, action: Any) -> None:
        if phase == "forward":
            print(f"forward of {iteration}:", action, flush=True)
        on(phase, iteration, action)

    observer.on = tells


@pytest.mark.night
def test_what_closed_stages_have_done_of_the_next_iteration_is_not_run_twice():
    """1:1 is killed before it has reduced. By then the scripts of the other stages have left that iteration, and the
    first stage has run all forwards of the next one but the last, in which its workers are held."""
    arguments = {"pipelines": 2, "stages": 3, "iterations": 4, "watch": tells_forwards,
                 "settings": {"reduction": "exact", "verify": "none"}}
    calm = calm_run(gpt_job.train, 6, {key: value for key, value in arguments.items() if key != "watch"})
    dies, ahead = Hold("1:1", "reduce", KILLED_IN), [Hold(f"{d}:0", "forward", KILLED_IN + 1, 3) for d in range(2)]
    with Job(gpt_job.train, 6, arguments, [dies, *ahead]) as job:
        job.wait_held()
        job.kill(dies)
        for hold in ahead:
            job.release(hold)
        check_survivors(job, {dies.worker}, calm)
        logs = [(job.folder / f"worker-{rank}.log").read_text() for rank in range(2)]
    begun = [line for log in logs for line in log.splitlines() if line.startswith(f"forward of {KILLED_IN + 1}:")]
    assert len(begun) == len({*begun}) == 2 * 4, begun
    (went,) = [event for event in job.events if event["event"] == "reconciled"]
    assert (went["iteration"], went["redone"]) == (KILLED_IN, 0)


@pytest.mark.parametrize("watch", [
    leaves_at_once, pytest.param(leaves_and_starts_no_thread, marks=pytest.mark.night)])
def test_who_ends_by_hand_makes_the_last_iteration_again_for_those_who_have_not_made_it(watch):
    """The last stage has returned from it, and its scripts call os._exit(0), when a worker of the first one is killed
    that nobody has the gradient of."""
    arguments = {"pipelines": 2, "stages": 2, "iterations": 2, "watch": watch,
                 "settings": {"reduction": "fast", "step": "staggered"}}
    dies, leave = Hold("0:0", "reduce", 1), [Hold("0:1", "leaves", 2), Hold("1:1", "leaves", 2)]
    with Job(gpt_job.train, 4, arguments, [dies, *leave]) as job:
        job.wait_held()
        for hold in leave:
            job.release(hold)
        job.kill(dies)
        assert sorted(result.status for result in job.wait().values()) == [-9, 0, 0, 0], job.where()
        assert [event["iteration"] for event in job.events if event["event"] == "committed"] == [0, 1]
        (end,) = [event for event in job.events if event["event"] == "finished"]
        assert (end["status"], end["out"]) == (0, {"0:0": "exit"})
        logs = [(job.folder / f"worker-{rank}.log").read_text() for rank in (1, 2, 3)]
        assert not any("Traceback" in log for log in logs), job.where()


@pytest.mark.night
def test_when_a_stage_has_no_worker_left_the_job_stops_and_says_so():
    holds = [Hold(f"{pipeline}:1", "forward", KILLED_IN, 1) for pipeline in range(PIPELINES)]
    with Job(gpt_job.train, PIPELINES * STAGES, EXACT, holds) as job:
        job.wait_held()
        job.kill(*holds)
        results = job.wait()
        finished = job.wait_event("finished")
    assert "stage 1" in finished["message"] and "checkpoint" in finished["message"], finished
    assert [result.status for result in results.values()] == [1, 1, 1, -9, -9, -9]


@pytest.mark.night
@pytest.mark.parametrize("seed", range(20))
def test_random_campaign(seed, undisturbed):
    draw = random.Random(seed)
    phase, arrivals = draw.choice([("forward", 4), ("backward", 4), ("weight", 4), ("reduce", 1), ("reduced", 1),
                                   ("step", 1), ("stepped", 1)])
    hold = Hold(draw.choice(POSITIONS), phase, draw.randrange(ITERATIONS), draw.randrange(arrivals))
    kill_and_compare([hold], undisturbed)


# ---- without failures


@pytest.mark.night
def test_a_worker_may_pause_for_longer_than_connecting_may_take():
    """Here half a second: nobody has failed, so nobody gives up."""
    paused = Hold("1:1", "backward", 1, 1)
    settings = {"reduction": "exact", "report_timeout": 1.0}
    with Job(gpt_job.train, PIPELINES * STAGES, {**EXACT, "settings": settings}, [paused]) as job:
        job.wait_held()
        time.sleep(1.5)
        job.release(paused)
        assert all(result.status == 0 for result in job.wait().values()), job.where()
        assert not [event for event in job.events if event["event"] in ("hint", "decided")]


@pytest.mark.gloo
@pytest.mark.parametrize(("pipelines", "more"), [
    pytest.param(2, {}, marks=pytest.mark.night), (3, {}),
    pytest.param(2, {"gradient_predivide_factor": 2.0}, marks=pytest.mark.night),
    pytest.param(3, {"prescale_gradients": True, "gradient_predivide_factor": 2.0}, marks=pytest.mark.night)])
def test_without_failures_losses_and_parameters_have_the_stock_engines_bits(pipelines, more):
    arguments = {"pipelines": pipelines, "stages": 2, "iterations": 5, "dropout": 0.0, "engine_settings": more}
    with Job(gpt_job.train, 2 * pipelines, {**arguments, "plugin": False}, coordinated=False) as job:
        stock = job.wait()
    with Job(gpt_job.train, 2 * pipelines, arguments) as job:
        ours = job.wait()
    for rank in stock:
        assert stock[rank].status == ours[rank].status == 0
        assert differences(stock[rank], ours[rank]) == {}
        most = [f"FB{rank % pipelines}.{microbatch}" for microbatch in range(1, 4)]
        assert ours[rank].value["full"] == (most if rank < pipelines else []), "B and W in one"


# ---- the comparison itself can fail


@pytest.mark.night
def test_the_comparison_notices_another_order_of_additions(undisturbed):
    wrong = run(gpt_job.train, PIPELINES * STAGES, {**EXACT, "mistake": "order"})
    assert any(differences(wrong[rank], undisturbed[rank]) for rank in wrong)


def test_peers_that_do_not_begin_alike_are_told_so():
    with Job(gpt_job.train, PIPELINES * STAGES, {**EXACT, "mistake": "apart"}) as job:
        results = job.wait()
        assert all(result.status == 1 for result in results.values()), job.where()
    assert any("build the model from the same seed" in (result.error or "") for result in results.values())
