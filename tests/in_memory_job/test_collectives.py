"""Collectives of the script's own between two iterations, while a worker dies: in memory, see
`tests.in_memory_job.job`."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_recycle.runtime import script_transfers
from megatron_recycle.runtime.comm.user_collectives import calls, shares
from tests.in_memory_job.collecting import right
from tests.in_memory_job.job import Job, Shape, check
from tests.in_memory_job.scenes import SHAPES, Scene
from tests.moments import Moment
from tests.seeds import by_day, seeds

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

SHAPE = SHAPES["collects"]


def test_without_failures():
    job = Job(SHAPE)
    with job:
        check(job, job.wait())


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.night) for turn in range(1, 6))])
@pytest.mark.parametrize("phase", ["collective", "collected"])
@pytest.mark.parametrize("nth", by_day(5, [0, 3, 5, 8, 10, 1, 2, 4, 6, 7, 9]))
def test_a_worker_killed_in_each_call(phase, nth, turn):
    """A barrier, sums over all, its stage and its pipeline, a gathering, and broadcasts from all: those that are
    left have the values of all, and train on to the same bits. By night each worker."""
    worker = SHAPE.workers[(nth + turn + 3 * (phase == "collected")) % len(SHAPE.workers)]
    Scene("collects", SHAPE, [Moment(worker, phase, 0, nth)], out={worker}, sure=True).run(nth + turn)


@pytest.fixture
def by_shares(monkeypatch):
    """All reductions are large ones, of four rounds."""
    monkeypatch.setattr(calls, "LARGE", 8)
    monkeypatch.setattr(shares, "_ROUND", 24)


@pytest.mark.parametrize("seed", seeds(2))
def test_a_worker_killed_at_anything_that_large_reductions_ask_of_the_network(seed, by_shares):
    """Nobody has written anything before all have all: what is cut short is made again, over who is left, with the same
    bits."""
    draw, shape = random.Random(seed), replace(SHAPE, iterations=2, collect=(0,))
    calm = Job(shape, seed=1)
    calm.run()
    one = draw.choice([asked for asked in calm.deaths.all() if asked.what in ("send control", "receive control")])
    Scene("collects", shape, out={one.worker}, asked=[one]).run(seed)


@pytest.mark.parametrize("seed", seeds(3))
def test_two_die(seed):
    first, second = SHAPE.workers[seed % 6], SHAPE.workers[(seed + 2 + 2 * (seed % 2)) % 6]
    phases = ["collective", "collected", "recovering", "forward", "reduce"]
    moments = [Moment(first, phases[seed % 2], 0, seed // 6 % 10),
               Moment(second, phases[seed % 5], 0 if seed % 3 else 2, seed // 3 % 10)]
    Scene("collects", SHAPE, moments, out={first, second}, slow=0.2 * (seed % 2)).run(seed)


def test_a_worker_that_comes_in_is_told_what_the_calls_brought_that_it_did_not_see():
    shape, late = replace(SHAPE, iterations=6, collect=(0, 1, 4, 5)), Moment("0:0", "collective", 1)
    for seed in range(2):  # gloo's rules, and NCCL's
        job = Job(shape, [Moment("1:1", "collected", 0, 3)], holds=[late], seed=seed)
        with job:
            job.comes_back("1:1", late)
            check(job, job.wait(), came={"1:1"})


def test_a_worker_that_has_come_in_tells_the_next_one_of_calls_that_neither_has_seen():
    """Its own script makes none over these groups any more."""
    shape = replace(SHAPE, iterations=9, collect=(0, 1))
    late, dies, later = Moment("0:0", "forward", 2), Moment("0:0", "forward", 5), Moment("2:1", "forward", 6)
    job = Job(shape, [Moment("1:1", "collected", 0, 3)], holds=[late, dies, later])
    with job:
        job.comes_back("1:1", late)
        job.wait_held(dies)
        job.release(dies, die=True)
        job.comes_back("0:0", later)
        check(job, job.wait(), came={"1:1", "0:0"})


def test_a_part_that_was_in_a_call_when_it_lost_another_is_told_what_it_brought_when_both_come_in():
    """The others have ended that call long ago."""
    shape, late = Shape(2, 2, 2, 6, collect=(0, 1, 5), parts=2), Moment("0:0.0", "collective", 1)
    job = Job(shape, [Moment("1:1.0", "collective", 0, 3)], holds=[late])
    with job:
        job.wait_event("decided", generation=2)
        job.wait_held(late)
        job.start("1:1.0", joining=True)
        job.wait_event("waiting", worker="1:1.0")
        job.release(late)
        check(job, job.wait(), came={"1:1.0", "1:1.1"})


def messages(job: Job, gone: set[str], lose: bool = False) -> None:
    """What came is right; only of a rank that is gone nothing came, or, where senders keep nothing, of those that
    ``lose`` what has left."""
    for process in job.processes.values():
        for (iteration, sender), value in process.result.brought.items() if process.name not in gone else ():
            named = job.names[sender % 10] in gone
            assert value == right(iteration, sender % 10) or ((named or lose) and value is None), (
                f"{process.name} got {value} from {job.names[sender % 10]} after {iteration}\n{job.where()}")


@pytest.mark.parametrize("seed", seeds(2))
def test_a_worker_killed_at_anything_that_messages_ask_of_the_network(seed):
    """All others have what they sent each other, once, and in order, also what was waited for an iteration later."""
    draw, shape = random.Random(seed), Shape(3, 2, 2, 3, send=(0, 1), clipping=0.05 * (seed % 2))
    calm = Job(shape, seed=1)
    calm.run()
    messages(calm, set())
    one = draw.choice([asked for asked in calm.deaths.all() if asked.what in ("send control", "receive control")])
    messages(Scene("sends", shape, out={one.worker}, asked=[one]).run(seed), {one.worker})


@pytest.mark.parametrize("seed", seeds(2))
def test_what_cannot_be_sent_again_is_an_error_that_names_the_sender(seed, monkeypatch):
    monkeypatch.setattr(script_transfers, "_MOST", 0)
    draw, shape = random.Random(seed), Shape(3, 2, 2, 3, send=(0, 1))
    calm = Job(shape, seed=1)
    calm.run()
    one = draw.choice([asked for asked in calm.deaths.all() if asked.what == "receive control"])
    messages(Scene("sends", shape, out={one.worker}, asked=[one]).run(seed), {one.worker}, lose=True)


def test_one_that_comes_in_counts_messages_as_its_peers_do():
    shape, late = Shape(3, 2, 2, 6, send=(0, 1, 4, 5)), Moment("0:0", "forward", 2)
    job = Job(shape, [Moment("1:1", "forward", 1)], holds=[late])
    with job:
        job.comes_back("1:1", late)
        check(job, job.wait(), came={"1:1"})
        brought = {key: value for process in job.processes.values() for key, value in process.result.brought.items()
                   if key[0] >= 4}
        assert brought == {key: right(key[0], key[1] % 10) for key in brought} and len(brought) == 2 * 12
