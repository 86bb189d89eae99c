"""After a failure only lost work is run again: survivors go on with what they have kept."""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_recycle.control import Go, planning
from megatron_recycle.errors import GenerationOver
from megatron_recycle.plan import Action, Costs, Grid, Message, Problem, Worker, passes_on, results_in
from megatron_recycle.planner import quick
from megatron_recycle.runtime import loop, recovery
from megatron_recycle.runtime import site as sites
from megatron_recycle.runtime.attempt import Attempt
from megatron_recycle.runtime.comm import reduction as reductions
from megatron_recycle.runtime.comm.acknowledgements import Acknowledgements
from megatron_recycle.runtime.comm.activations import Transport
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.compute.accumulate import Layout
from megatron_recycle.runtime.compute.device import Cpu, Device, LogBytes, Logged
from megatron_recycle.runtime.generation import Generation
from megatron_recycle.runtime.resumable_attempt import AttemptLog, ResumableAttempt
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.stage import Tie
from megatron_recycle.runtime.stepper import Stepper
from tests.in_memory_job.job import Job, Killed, Result, Shape, check, differences
from tests.in_memory_job.scenes import SHAPES
from tests.in_memory_job.test_last_copy import loading_fails
from tests.moments import Moment
from tests.seeds import by_day, rows

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

SHAPE = replace(SHAPES["3x2, four"], iterations=3)
MICRO = ("forward", "backward", "weight")


def ended(shape: Shape, kills: list[Moment], seed: int = 0) -> tuple[Job, list[Moment]]:
    """A job that has come to its end with the right numbers, and all moments of its life."""
    seen = list[Moment]()
    job = Job(shape, kills, seed=seed, at=lambda job, moment: seen.append(moment))
    with job:
        exact = dict(shape.settings)["reduction"] == "exact"
        check(job, job.wait(), {kill.worker for kill in kills}, within=0.0 if exact else 1e-5)
    return job, seen


def lost(job: Job) -> list[int]:
    """Actions that survivors had done and lost, by failure."""
    return [event["redone"] for event in job.control.events if event["event"] == "reconciled"]


@pytest.mark.parametrize(("moment", "reduction", "seed"), rows([
    ("1:1", "forward", 1), ("0:0", "backward", 2), ("2:1", "backward", 0), ("1:0", "forward", 3)], ["exact", "fast"],
    [0, 1], every=3), ids=str)
def test_survivors_lose_nothing_that_they_have_done(moment: tuple[str, str, int], reduction: str, seed: int):
    """With gloo's rules and with NCCL's: what survivors have done was computed from whole messages."""
    worker, phase, nth = moment
    job, seen = ended(SHAPE.with_settings(reduction=reduction), [Moment(worker, phase, 1, nth)], seed)
    assert lost(job) == [0]
    begun = Counter(moment.phase for moment in seen if moment.iteration == 1 and moment.worker != worker)
    # An action that waits for its message when the generation ends begins once more.
    assert begun["forward"] <= 3 * 2 * 4 + 5, begun


@pytest.mark.parametrize(("kill", "seed"), [(("1:1", "backward", 1), 0), (("0:0", "backward", 2), 1),
                                            (("1:0", "reduce", 0), 0)], ids=str)
def test_messages_that_are_kept_beside_the_device_are_sent_from_there(kill, seed, monkeypatch):
    """In the rest of the iteration, and by a stage that is closed for it (in its reduction nobody else has read them).
    A stand-in for a GPU's pinned copies; of the budget the sums are left on the device."""
    worker, phase, nth = kill
    brought = list[str]()

    class Copied(Logged):
        def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
            super().__init__([tensor.detach().clone() for tensor in tensors])

        def back(self) -> Sequence[torch.Tensor]:
            brought.append(threading.current_thread().name)
            return [tensor.clone() for tensor in self.tensors]

    class Beside(Device):
        def log(self, tensors: Sequence[torch.Tensor]) -> Logged:
            return Copied(tensors)

        def log_bytes(self, sizes: Sequence[int]) -> LogBytes:
            return LogBytes(0, sum(sizes))

    monkeypatch.setattr(sites, "device_of", lambda device: Beside())
    job, _ = ended(replace(SHAPE, iterations=3), [Moment(worker, phase, 1, nth)], seed)
    assert brought
    for process in job.processes.values():
        if process.result.status == 0:
            kept, (held,), plan = process.result.memory.kept, process.result.memory.held, process.worker.plan
            me = process.worker.site.place.me
            messages = sum(results_in(plan, me, action) is not None for action in plan.actions(me)) * held.message
            assert kept.log == (0 if seed else kept.sums) and kept.host == (messages if seed else 2 * messages) > 0


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("phase", ["reduce", "reduced", "stepped"])
def test_a_stage_that_has_reduced_does_so_again_from_what_it_has_kept(phase, reduction):
    """Its peers, or the other stage, may be an iteration ahead: of that iteration some is lost, of this one nothing."""
    _, seen = ended(SHAPE.with_settings(reduction=reduction), [Moment("1:1", phase, 1)])
    begun = Counter(moment.phase for moment in seen if moment.iteration == 1 and moment.worker != "1:1")
    assert all(begun[phase] <= 3 * 2 * 4 + 5 for phase in MICRO), begun


def test_nothing_is_kept_without_messages():
    shape = SHAPE.with_settings(keep_messages="none")
    job, _ = ended(shape, [Moment("1:1", "backward", 1, 2)])
    assert lost(job)[0] > 0


@pytest.mark.parametrize("second", [Moment("2:1", "recovering", 1), Moment("2:1", "forward", 1, 5),
                                    Moment("0:0", "backward", 1, 4), Moment("2:0", "reduce", 1)])
def test_a_second_death_while_the_rest_is_run(second):
    """Of a peer that runs the share of the first, of a neighbour whose messages it needs."""
    job, _ = ended(SHAPE, [Moment("1:1", "backward", 1, 1), second])
    assert len(lost(job)) >= 1


@pytest.mark.parametrize("worker", by_day(1, ["0:0", "1:1"]))
def test_work_on_a_wrong_guess_is_not_kept(worker):
    """Every step is wrong at first: the next iteration was begun with parameters that are not to be."""
    shape = replace(SHAPES["clipped"], microbatches=4)
    for nth in range(3):
        ended(shape, [Moment(worker, "forward", 1, nth)], seed=nth)


@pytest.mark.parametrize("seed", by_day(1, range(2)))
def test_a_gradient_may_come_before_the_forward_that_is_run_once_more(seed):
    """0:0 has sent nothing yet, and so does not know the shapes of the gradients that 1:1 has kept for it."""
    held, kill = Moment("0:0", "forward", 1), Moment("1:0", "weight", 1)
    job = Job(Shape(2, 2, 4, 3, blocks=6, chunks=2), [kill], holds=[held], seed=seed)
    with job:
        job.wait_event("decided", generation=2)
        job.release(held)
        check(job, job.wait(), {"1:0"})


def test_a_failure_while_kept_messages_are_sent_again(monkeypatch):
    """It is none of the worker that sends them, which takes them up in the next generation. With an order of transfers
    it meets the failure before the first of them is sent."""
    held, kill = Moment("2:0", "forward", 1), Moment("1:2", "weight", 1)
    job = Job(Shape(3, 3, 4, 3), [kill], holds=[held], seed=1)
    take_up, post_before, interrupted = Attempt._take_up, Transport._post_before, list[Transport]()

    def meanwhile(attempt: Attempt, kept: ResumableAttempt) -> None:
        site, standing, plan = attempt._site, attempt._stepper.standing, attempt._program.plan
        again = [to for action in kept.done if (to := passes_on(plan, site.place.me, action))]
        if site.place.name != "2:2" and len(again) > 1 and not interrupted:
            interrupted.append(attempt._generation.transport)
            job.control.lost("2:2")
            job.wait_for(lambda: site.interrupted(standing), "the next generation")
        take_up(attempt, kept)

    def aborted(transport: Transport, message: Message, sent: bool) -> None:
        if transport in interrupted:
            raise GenerationOver("aborted")
        post_before(transport, message, sent)

    monkeypatch.setattr(Attempt, "_take_up", meanwhile)
    monkeypatch.setattr(Transport, "_post_before", aborted)
    with job:
        job.wait_event("decided", generation=2)
        job.release(held)
        check(job, job.wait(), {"1:2", "2:2"})
    assert interrupted


@pytest.mark.parametrize("sharded", [False, True])
def test_a_block_that_comes_after_a_later_one_is_summed_apart(sharded):
    """1:0 dies, and 0:0 with its share of the blocks, of which 2:0 has made later ones: nobody else can take them."""
    # In the first iteration: no durations have been measured, so that the plan is the same each time.
    first, second, order = Moment("1:0", "forward", 0, 1), Moment("0:0", "backward", 0, 2), list[int]()
    early = Moment("0:0", "forward", 0, 1)
    shape = replace(SHAPE, microbatches=4, sharded=sharded).with_settings(block=1, state_copies=3)

    def at(job: Job, moment: Moment) -> None:
        if (moment.worker, moment.phase, moment.iteration) == ("2:0", "reduce", 0):
            done = job.processes[job.ranks[Worker(2, 0)][0]].worker.standing.done
            order[:] = [action.microbatch for action in done if (action.kind, action.pipeline) == ("B", 1)]

    job = Job(shape, holds=[early, first, second], at=at)
    with job:
        job.wait_held(early, first)
        groups = job.processes[job.ranks[Worker(0, 0)][0]].worker.current_groups()
        job.release(first, die=True)
        job.wait_for(lambda: groups.world.aborted, "the end of 0:0's first generation")
        job.release(early)
        job.wait_held(second)
        ahead = job.processes[job.ranks[Worker(2, 0)][0]].worker.standing
        job.wait_for(lambda: ("W", 1) in [action[:2] for action in ahead.done], "one of 1:0's micro-batches")
        job.release(second, die=True)
        check(job, job.wait(), {"1:0", "0:0"})
    assert len(order) == 4 and order != sorted(order), order
    assert lost(job) == [0, 0]


ANNEALS = replace(SHAPE, microbatches=4, iterations=4, anneals=True)
"""The script sets a variable of its loss before each iteration, which nothing can see."""


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("shape", ["3x2, four", "2x3", "3x3", "clipped now and then"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.night) for seed in range(1, 12))])
def test_no_code_of_the_script_runs_for_an_iteration_that_it_has_left(shape, seed, reduction):
    """Some have returned with iteration 1, and their stages are at the next one, when a worker of a stage that is not
    closed dies (`check` sees who runs what)."""
    draw = random.Random(seed)
    made = replace(SHAPES[shape], microbatches=4, iterations=4, anneals=True).with_settings(reduction=reduction)
    behind = f"{made.pipelines - 1}:0"
    kill = Moment(behind, draw.choice(["backward", "weight"]), 1, draw.randint(2, 3))
    job = Job(made, [kill], seed=2 * seed)
    with job:
        check(job, job.wait(), {behind}, within=0.0 if reduction == "exact" else 1e-5)
    assert not [event for event in job.control.events if event["event"] == "repeated"]


@pytest.mark.parametrize(("phase", "sizes", "reduction"), rows(
    ["forward", "backward", "reduce", "stepped"], [(4, 2), (2, 3), (2, 6, 4)], ["exact", "fast"], every=5), ids=str)
def test_an_iteration_of_another_batch_size_goes_on_where_it_stood(phase, sizes, reduction):
    """Survivors lose nothing of it, and the last stage's scripts may have left it."""
    shape = replace(ANNEALS, microbatches=sizes[0], sizes=sizes).with_settings(reduction=reduction)
    job, seen = ended(shape, [Moment("1:0", phase, 1, phase in MICRO)])
    begun = Counter(moment.phase for moment in seen if moment.iteration == 1 and moment.worker != "1:0")
    assert all(begun[each] <= 3 * 2 * sizes[1] + 5 for each in MICRO), begun
    assert phase not in MICRO or lost(job) == [0]


def test_a_stage_that_has_closed_an_iteration_of_another_batch_size_stays_there():
    stays(replace(ANNEALS, sizes=(4, 3)))


def test_a_stage_that_has_closed_an_iteration_stays_there():
    stays(ANNEALS)


def stays(shape: Shape, within: float = 0.0) -> None:
    """1:0 dies before it has reduced iteration 1, with which the last stage's scripts have gone on."""
    held = Moment("1:0", "reduce", 1)
    job = Job(shape, holds=[held])
    with job:
        job.wait_held()
        job.wait_left(1, 1)
        job.release(held, die=True)
        check(job, job.wait(), {"1:0"}, within=within)
    (go,) = [event for event in job.control.events if event["event"] == "reconciled"]
    assert go["iteration"] == 1, "the others had still to do some of it"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.night) for seed in range(1, 8))])
@pytest.mark.parametrize("second", [None, Moment("2:0", "backward", 2, 2), Moment("2:1", "recovering", 1)], ids=str)
@pytest.mark.parametrize(("reduction", "clipping"), [("exact", 0.0), ("fast", 0.0), ("exact", 0.05)])
def test_work_of_closed_stages_on_the_next_iteration_is_kept(reduction, clipping, second, seed, monkeypatch):
    """1:1 dies before it has reduced iteration 1. The scripts of the other stages have left that, and the first one has
    run all forwards of the next one. With clipping they are void: a guess was wrong. Then groups are made anew, since a
    worker that drained them would have to know the shapes of gradients for what it had sent in an older generation."""
    drain, renew, renewed = loop.drain, recovery.renew, list[int]()

    def drains(generation: Generation, iteration: int) -> bool:
        assert iteration not in generation.resumed
        return drain(generation, iteration)

    def renews(site: Site, stepper: Stepper) -> Generation:
        renewed.append(stepper.standing.epoch.generation)
        return renew(site, stepper)

    monkeypatch.setattr(loop, "drain", drains)
    monkeypatch.setattr(recovery, "renew", renews)
    shape = replace(SHAPES["3x3"], microbatches=4, iterations=4, clipping=clipping)
    held, seen, metered = Moment("1:1", "reduce", 1), list[Moment](), list[tuple[int, int]]()

    def at(job: Job, moment: Moment) -> None:
        worker = next(process for process in job.processes.values() if process.name == "0:0").worker
        if (moment.worker, moment.phase, moment.iteration) == ("0:0", "backward", 2) and (
                worker.standing.epoch.generation == 2):
            memory = worker.site.meters.memory
            metered.append((memory.now, memory.held().before_b))
        seen.append(moment)

    job = Job(shape.with_settings(reduction=reduction, verify="none"), [] if second is None else [second], holds=[held],
              seed=2 * seed, at=at)
    forwards = 3 * 4

    def ahead() -> bool:
        return sum((each.phase, each.iteration, each.worker[-1]) == ("forward", 2, "0") for each in [*seen]) == forwards

    with job:
        job.wait_held()
        job.wait_for(ahead, "the first stage to go ahead")
        job.release(held, die=True)
        out = {"1:1", *(() if second is None else [second.worker])}
        check(job, job.wait(), out, within=0.0 if reduction == "exact" else 1e-5)
    if second is None and not clipping:
        assert lost(job) == [0]
        begun = Counter(moment.worker for moment in seen if (moment.phase, moment.iteration) == ("forward", 2))
        assert sum(begun[f"{pipeline}:0"] for pipeline in range(3)) == forwards, begun
        bytes_held, each = metered[0]
        assert bytes_held == 4 * each > 0, "its meter counts the micro-batches that it had under way"
    if second is None and clipping:
        assert 2 in renewed


def test_work_on_the_next_iteration_is_not_kept_where_peers_are_compared_before_it():
    """0:0 has run it with a flipped number, which its peers find and heal once the iteration before is final."""
    shape = replace(SHAPES["3x3"], microbatches=4, iterations=4).with_settings(reduction="exact", verify_every=100)
    held, seen = Moment("1:1", "reduce", 1), set[Moment]()

    def at(job: Job, moment: Moment) -> None:
        if moment == Moment("0:0", "forward", 2):
            (odd,) = (process for process in job.processes.values() if process.name == "0:0")
            with torch.no_grad():
                next(odd.worker.site.stage.module.parameters()).view(-1)[0] += 1
        seen.add(moment)

    job = Job(shape, holds=[held], at=at)
    with job:
        job.wait_held()
        job.wait_for(lambda: {Moment(f"{pipeline}:0", "forward", 2, 3) for pipeline in range(3)} <= seen, "forwards")
        job.release(held, die=True)
        check(job, job.wait(), {"1:1"})
    assert [event["worker"] for event in job.control.events if event["event"] == "healed"] == ["0:0"]


@pytest.mark.parametrize(("reduction", "redone"), [("fast", 2), ("exact", 0)])
def test_work_is_kept_only_where_the_parameters_that_it_was_computed_with_stay(reduction, redone, monkeypatch):
    """0:0 is the only one to know that the first stage is closed for iteration 1, and dies in the next one. The second
    stage has run two forwards of that with its messages, and the last stage has still to reduce. The first one does so
    again now, and with `fast` in another order: its parameters may differ by rounding from those that it sent these
    with."""
    close, late, dies = Acknowledgements.close, Moment("1:2", "reduce", 1), Moment("0:0", "forward", 2, 2)
    seen = list[Moment]()

    def closes(acknowledgements: Acknowledgements) -> None:
        close(acknowledgements)
        groups = acknowledgements._groups
        standing = job.processes[job.ranks[groups.me][0]].worker.standing
        if str(groups.me) in ("1:0", "2:0") and (standing.stepped, standing.epoch.generation) == (1, 1):
            job.wait_for(lambda: groups.control.aborted, "the failure")
            raise GenerationOver("before it was heard that the stage is closed")

    def at(job: Job, moment: Moment) -> None:
        if (moment.worker[-1], moment.phase, moment.iteration) == ("2", "reduce", 1):
            worker = next(process for process in job.processes.values() if process.name == moment.worker).worker
            worker.stepper.current.get().shared[-1].losses.wait()  # the others hear the loss from these
        seen.append(moment)

    monkeypatch.setattr(Acknowledgements, "close", closes)
    shape = replace(SHAPES["3x3"], microbatches=4, iterations=4).with_settings(reduction=reduction, verify="none")
    job = Job(shape, holds=[late, dies], at=at)
    with job:
        job.wait_held()
        job.wait_for(lambda: len(job.processes[job.ranks[Worker(0, 1)][0]].worker.standing.done) == 2, "two forwards")
        groups = job.processes[job.ranks[Worker(1, 2)][0]].worker.current_groups()
        job.release(dies, die=True)
        job.wait_for(lambda: groups.world.aborted, "the end of the generation")
        job.release(late)
        check(job, job.wait(), {"0:0"}, within=0.0 if reduction == "exact" else 1e-5)
    assert lost(job) == [redone]
    for stage in range(3):
        one, other, *_ = [process.result for process in job.processes.values() if process.name in (f"1:{stage}",
                                                                                                 f"2:{stage}")]
        assert not differences(one, other), "peers have the same bits"


def test_a_worker_that_had_no_micro_batch_of_a_closed_iteration_stays_with_its_stage(monkeypatch):
    """0:1 is so slow that the plan has nothing for it. It leaves iteration 1 with its peers, and 1:0 dies in its
    reduction."""
    problem_of, held = planning.problem_of, Moment("1:0", "reduce", 1)

    def slow(*args: Any) -> Problem:
        return replace(problem_of(*args), costs=replace(Costs.uniform(2, 10, 10, 10), speed={Worker(0, 1): 5}))

    monkeypatch.setattr(planning, "problem_of", slow)
    job = Job(replace(ANNEALS, microbatches=1), holds=[held])
    with job:
        job.wait_held()
        job.wait_left(1, 1)
        job.release(held, die=True)
        check(job, job.wait(), {"1:0"})
    assert not [event for event in job.control.events if event["event"] == "repeated"]


def test_a_failure_that_is_met_while_a_stage_closes_is_not_taken_for_a_wrong_guess(monkeypatch):
    """All steps are wrong at first. 1:1 knows that of iteration 1 when it meets the death of 0:0; its peers wait for it
    to close the stage, and would take the first exchange of the next iteration for that."""
    close, met = Acknowledgements.close, list[str]()
    job = Job(replace(SHAPES["clipped"], microbatches=4))

    def meets(acknowledgements: Acknowledgements) -> None:
        process = job.processes[job.ranks[acknowledgements._groups.me][0]]
        if process.name == "1:1" and process.worker.standing.stepped == 1 and not met:
            met.append(process.name)
            pending = process.worker.stepper.pending
            job.wait_for(lambda: pending is None or pending.known, "the verdict")
            job.control.lost("0:0")
            raise GenerationOver("a reader has closed the connection")
        close(acknowledgements)

    monkeypatch.setattr(Acknowledgements, "close", meets)
    with job:
        check(job, job.wait(), {"0:0"}, within=1e-5)
    assert met


def test_a_worker_of_a_closed_stage_is_healed_once_the_step_is_final():
    """One number at 0:1 is another one since it has left iteration 1; then 1:0 dies, which has not reduced it."""
    held = Moment("1:0", "reduce", 1)
    job = Job(ANNEALS, holds=[held])
    with job:
        job.wait_held()
        last = job.wait_left(1, 1)
        (odd,) = [process for process in last if process.name == "0:1"]
        with torch.no_grad():
            next(odd.worker.site.stage.module.parameters()).view(-1)[0] += 1
        job.release(held, die=True)
        check(job, job.wait(), {"1:0"})
    (healed,) = [event for event in job.control.events if event["event"] == "healed"]
    assert healed["worker"] == "0:1" and healed["iteration"] == 2


@pytest.mark.parametrize("undone", [False, True])
def test_another_failure_while_a_closed_stage_is_to_begin_its_iteration_anew(undone, monkeypatch):
    """1:0 dies before it has reduced iteration 1, which the last stage's scripts have left; no plan for its rest is
    found. Then 2:0 dies, and there would be a plan. Who says now that its stage is closed has all its messages. If 0:1
    has undone its step, nothing is closed any more."""
    held, plan_rest, follow, asked = Moment("1:0", "reduce", 1), planning.Planning.redo, recovery.reconcile, list[int]()

    def plans(self: planning.Planning, *order: Any) -> Any:
        asked.append(1)
        return None if len(asked) == 1 else plan_rest(self, *order)

    def reconciles(site: Site, stepper: Stepper, generation: Generation, go: Go) -> Generation:
        if go.generation == 2 and site.place.name == "2:0":
            first = job.processes[job.ranks[Worker(0, 1)][0]].worker.standing
            job.wait_for(lambda: first.stepped == 0 or not undone, "0:1")
            job.processes[job.ranks[Worker(2, 0)][0]].network.die()
            raise Killed
        if go.generation == 2 and not (site.place.name == "0:1" and undone):
            job.wait_for(lambda: site.interrupted(stepper.standing), "the next generation")
            raise GenerationOver("2:0 is gone")
        return follow(site, stepper, generation, go)

    monkeypatch.setattr(planning.Planning, "redo", plans)
    monkeypatch.setattr(recovery, "reconcile", reconciles)
    job = Job(replace(ANNEALS, anneals=not undone).with_settings(reduction="fast"), holds=[held])
    with job:
        job.wait_held()
        job.wait_left(1, 1)
        job.release(held, die=True)
        check(job, job.wait(), {"1:0", "2:0"}, within=1e-5)
    repeated = [event["generation"] for event in job.control.events if event["event"] == "repeated"]
    assert repeated == ([2, 3] if undone else [2]) and bool(job.after_leaving) == undone


def both_ends_die(shape: Shape, *more: Moment) -> Job:
    """1:1 made the gradient that 1:0 used; the last stage has left iteration 1. ``more``: who dies then."""
    held = Moment("1:0", "reduce", 1)
    job = Job(shape, holds=[held])
    with job:
        job.wait_held()
        job.wait_left(1, 1)
        job.kills.add(Moment("1:1", "recovering", 1))
        job.kills.add(Moment("1:1", "recovering", 2))
        job.kills |= {*more}
        job.release(held, die=True)
        job.wait()
    return job


def results(job: Job) -> dict[int, Result]:
    return {rank: process.result for rank, process in job.processes.items()}


def test_a_message_that_is_lost_with_both_its_ends_is_made_again_by_all_who_say_so():
    job = both_ends_die(replace(ANNEALS, anneals=False).with_settings(reduction="fast"))
    check(job, results(job), {"1:0", "1:1"}, within=1e-5)
    (event,) = [event for event in job.control.events if event["event"] == "repeated"]
    assert event["iteration"] == 1 and set(event["workers"]) == {"0:1", "2:1"}


def test_with_exact_the_job_goes_back_to_a_checkpoint_then():
    job = both_ends_die(replace(ANNEALS, anneals=False, save=(1,)))
    check(job, results(job), {"1:0", "1:1"}, again=True)
    (event,) = [event for event in job.control.events if event["event"] == "restored"]
    assert event["iteration"] == 0 and event["from"] == {"1": "checkpoint"}
    assert not [event for event in job.control.events if event["event"] == "repeated"]


@pytest.mark.parametrize("dies", ["0:0", "2:1"])
def test_with_exact_another_death_on_the_way_to_a_checkpoint_does_not_end_the_job(dies):
    """Some have its state already, and some are where they were."""
    job = both_ends_die(replace(ANNEALS, anneals=False, save=(1,)), Moment(dies, "joining", 1))
    check(job, results(job), {"1:0", "1:1", dies}, again=True)
    assert [event["iteration"] for event in job.control.events if event["event"] == "restored"] == [0, 0]


def test_with_exact_a_checkpoint_half_loaded_is_not_trained_from(monkeypatch):
    """Nor saved: it was the only one, and cannot be read."""
    loading_fails(monkeypatch, {"0:0"}, 1)
    job = both_ends_die(replace(ANNEALS, anneals=False, save=(1,)))
    (end,) = {result.error for result in results(job).values() if result.status == 1}
    assert "cut off the way back to a checkpoint" in end and "cannot be read (OSError: [Errno 5]" in end
    assert job.control.state.ended[2], "the script may be started again"


def test_with_exact_the_job_ends_then_if_there_is_no_checkpoint():
    """No code of the script has run again, whose factors of the loss are others by now."""
    job = both_ends_die(ANNEALS)
    (end,) = {result.error for result in results(job).values() if result.status == 1}
    assert "scripts have left it, for which reduction exact does not run it again" in end and "iteration 1 " in end
    assert job.control.state.ended[2], "the script may be started again"
    assert not job.after_leaving


def test_with_exact_nobody_leaves_an_iteration_that_the_loss_of_one_host_would_take_back():
    """Each pipeline has a host, of which one is lost: 1:0 before it has reduced, with 1:1, whose gradient it has used.
    By then the last stage has reduced, and its messages are used, but its scripts wait for the commit."""
    held, hosts = Moment("1:0", "reduce", 1), tuple((name, f"host{name[0]}") for name in ANNEALS.workers)
    job = Job(replace(ANNEALS, hosts=hosts), holds=[held])
    with job:
        job.wait_held()
        last = [process for process in job.processes.values() if process.name.endswith(":1")]
        first = [process.thread for process in job.processes.values() if process.name in ("0:0", "2:0")]
        quiet = deque([False], maxlen=20)  # looks, at each of which the others wait and nothing is under way
        job.wait_for(lambda: quiet.append(bool(job.fabric.stuck(first))) or (len(quiet) == 20 and all(quiet)), "a rest")
        assert {len(each.result.losses) for each in last} == {1} and all(each.worker.stepper.pending for each in last)
        job.kills |= {Moment("1:1", "recovering", 1), Moment("1:1", "recovering", 2)}
        job.release(held, die=True)
        check(job, job.wait(), {"1:0", "1:1"})
    assert not {"repeated", "restored"} & {event["event"] for event in job.control.events}


@pytest.mark.parametrize("reduction", by_day(1, ["exact", "fast"]))
def test_stages_that_share_parameters_are_closed_together(reduction):
    """1:1 dies before it has reduced iteration 1, with which the scripts of the first and the last stage have gone on,
    that share theirs. Before 1:2 dies in its reduction none of them has."""
    held, behind = Moment("1:1", "reduce", 1), Moment("1:2", "reduce", 2)
    job = Job(TIED.with_settings(reduction=reduction), holds=[held, behind])
    with job:
        job.wait_held(held)
        ends = [process for process in job.processes.values() if process.worker and process.name[-1] in "02"]
        job.wait_for(lambda: all(len(process.result.losses) == 2 for process in ends), "the ends to leave")
        job.release(held, die=True)
        job.wait_held(behind)
        assert all(len(process.result.losses) == 2 for process in ends)
        job.release(behind, die=True)
        check(job, job.wait(), {"1:1", "1:2"}, within=0.0 if reduction == "exact" else 1e-5)
    assert not [event for event in job.control.events if event["event"] == "repeated"]


TIED = replace(ANNEALS, stages=3, blocks=6, tied=True)
"""The first and the last stage share a parameter."""


def test_a_stage_waits_for_the_gradient_of_one_that_shares_its_parameters(monkeypatch):
    """1:2 dies with the sum of the shared parameter's gradients, and before those of its own stage are added up. The
    first stage has its gradient; without the other's its scripts stay in the iteration."""
    fold, meet, held, met = reductions.fold_ties, Acknowledgements._meet_tied, threading.Event(), set[str]()
    job = Job(TIED.with_settings(reduction="fast"))

    def stops(ties: Sequence[Tie], layout: Layout, gradient: torch.Tensor, groups: Groups) -> None:
        fold(ties, layout, gradient, groups)
        process = job.processes[job.ranks[groups.me][0]]
        if ties and str(groups.me) == "1:2" and process.worker.standing.iteration == 1:
            process.worker.stepper.current.get().shared[-1].losses.wait()  # the others hear the loss from this one
            held.set()
            job.wait_event("decided", generation=2)

    def meets(acknowledgements: Acknowledgements) -> None:
        if held.is_set():
            met.add(str(acknowledgements._groups.me))
        meet(acknowledgements)

    monkeypatch.setattr(reductions, "fold_ties", stops)
    monkeypatch.setattr(Acknowledgements, "_meet_tied", meets)
    with job:
        job.wait_for(held.is_set, "1:2 to stop")
        job.wait_for(lambda: met == {"0:0", "1:0", "2:0"}, "the first stage to wait for the last one")
        job.control.lost("1:2")
        check(job, job.wait(), {"1:2"}, within=1e-5)
    assert not [event for event in job.control.events if event["event"] == "repeated"]


def test_a_stage_that_does_not_know_yet_that_both_are_closed_stays_with_the_one_that_does(monkeypatch):
    """1:1 dies in the reduction of iteration 1. The first stage's scripts have left it; 1:2 has still to hear that
    they may."""
    meet, late, held = Acknowledgements._meet_tied, Moment("1:1", "reduce", 1), threading.Event()
    job = Job(TIED, holds=[late])

    def stops(acknowledgements: Acknowledgements) -> None:
        meet(acknowledgements)
        if str(acknowledgements._groups.me) == "1:2" and not held.is_set() and late in job.held:
            held.set()
            job.wait_for(lambda: acknowledgements._groups.control.aborted, "the failure")

    monkeypatch.setattr(Acknowledgements, "_meet_tied", stops)
    with job:
        job.wait_for(held.is_set, "1:2 to stop")
        first = [process for process in job.processes.values() if process.name.endswith(":0")]
        job.wait_for(lambda: all(len(process.result.losses) == 2 for process in first), "the first stage to leave")
        job.release(late, die=True)
        check(job, job.wait(), {"1:1"})
    assert not [event for event in job.control.events if event["event"] == "repeated"]


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_message_that_its_reader_has_not_used_keeps_the_stage_open(reduction):
    """The last stage holds the gradient of iteration 1, and 1:0 has not come to the last gradients that it gets from
    1:1, when 1:1 dies with them."""
    late = Moment("1:0", "backward", 1, 2)
    job = Job(ANNEALS.with_settings(reduction=reduction), holds=[late])
    with job:
        job.wait_held()
        last = [process for process in job.processes.values() if process.name.endswith(":1")]
        job.wait_for(lambda: all(process.worker.standing.stepped == 1 for process in last), "the last stage to step")
        job.control.lost("1:1")
        job.wait_event("decided", generation=2)
        assert all(len(process.result.losses) == 1 for process in last)
        job.release(late)
        check(job, job.wait(), {"1:1"}, within=0.0 if reduction == "exact" else 1e-5)
    assert not [event for event in job.control.events if event["event"] == "repeated"]


SHARDED = replace(ANNEALS, sharded=True)
"""Each shard has two holders."""


@pytest.mark.parametrize("clipping", [0.0, 0.05, 0.9])
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_stage_in_shards_that_is_closed_stays_there(reduction, clipping):
    """Also where its step turns out to have been wrong. 1:1 dies as well, which had some of its slices."""
    shape = replace(SHARDED, clipping=clipping).with_settings(reduction=reduction)
    within = 0.0 if reduction == "exact" else 1e-5
    stays(shape, within)
    held = Moment("1:0", "reduce", 1)
    job = Job(shape, holds=[held])
    with job:
        job.wait_held()
        last = job.wait_left(1, 1)
        job.control.lost("1:1")
        job.wait_event("decided", generation=2)
        job.release(held)
        check(job, job.wait(), {"1:1"}, within=within)
    assert not [event for event in job.control.events if event["event"] == "repeated"]
    others = [process.worker.site.stage.shards.held for process in last if process.name != "1:1"]
    assert all(len(held) == 3 for held in others), "what 1:1 had is adopted"


def test_with_nccls_rules_no_stage_is_closed_before_the_commit():
    """What an abort has spoilt has to be run again, and may need messages that were used."""
    job = Job(ANNEALS, [Moment("1:1", "backward", 1, 2)], seed=1)
    with job:
        check(job, job.wait(), {"1:1"})
    assert {process.worker.standing.closed for process in job.processes.values()} == {-1}


def test_two_messages_of_one_name_are_both_kept():
    """A message's name has its reader's chunk: with a V, a worker's two forwards of a micro-batch may have one."""
    plan = quick(Problem(Grid(2, (2, 2)), Costs.uniform(4, 1, 1, 1), placement=(0, 1, 1, 0)))
    me, keeping = Worker(0, 1), AttemptLog(1, True, Cpu())
    first, second = (Action("F", 0, 0, chunk) for chunk in (0, 1))
    names = [results_in(plan, me, action) for action in (first, second)]
    assert names[0] is not None and names[1] is not None and names[0][1] == names[1][1] and names[0][0] != names[1][0]
    for number, action in enumerate((first, second)):
        keeping.made(action, [torch.tensor(number)])
    assert [keeping.log[action].tensors[0].item() for action in (first, second)] == [0, 1]
