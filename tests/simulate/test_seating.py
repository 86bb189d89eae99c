"""Machines of a trace take the places of a cluster: those that are there, under whatever names they come."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from megatron_recycle.plan import Costs, Worker
from megatron_recycle.tools.simulate.cluster import Change, Cluster, Unit, changes
from megatron_recycle.tools.simulate.compare import compare
from megatron_recycle.tools.simulate.job import Job
from megatron_recycle.tools.simulate.policies.oobleck import Oobleck
from megatron_recycle.tools.simulate.policies.others import FaultScaled, Ideal
from megatron_recycle.tools.simulate.policies.recycling import CheckpointRestart, Recycling, Stalls
from megatron_recycle.tools.simulate.reading import read
from megatron_recycle.tools.simulate.seating import most_at_once
from megatron_recycle.tools.simulate.trace import HOST, Cleaning, Outage, Trace, checked
from tests.seeds import examples
from tests.simulate.small import CLUSTER, JOB, PLANS, run, trace

A, B = Unit(0, 0), Unit(1, 0)


def told(tmp_path: Path, text: str, places: int) -> tuple[list[Change], tuple[str, ...]]:
    path = tmp_path / "trace"
    path.write_text(text)
    return changes(read(path), Cluster(places, 1))


def test_a_machine_under_a_new_name_takes_the_place_of_one_that_went(tmp_path: Path):
    found, notes = told(tmp_path, "0,add,a\n0,add,b\n60000,remove,a\n120000,add,c\n180000,remove,c\n300000,add,d\n"
                                  "400000,remove,b\n500000,add,e\n", 2)
    assert found == [Change(60, (A,), (), True), Change(120, (), (A,)), Change(180, (A,), (), True),
                     Change(300, (), (A,)), Change(400, (B,), (), True)]
    assert "5 machines, at most 2 at a time, and the cluster 2 hosts" in notes[0] and len(notes) == 1


def test_a_machine_for_which_there_is_no_place_waits_for_the_next_one(tmp_path: Path):
    """c waits for b's place, d for that of c; e leaves before a place is free."""
    found, _ = told(tmp_path, "0,add,a\n0,add,b\n1000,add,c\n2000,add,e\n3000,add,d\n4000,remove,e\n5000,remove,b\n"
                              "6000,remove,c\n7000,remove,d\n8000,remove,a\n9000,add,f\n", 2)
    assert found == [Change(5, (B,), (B,), True), Change(6, (B,), (B,), True), Change(7, (B,), (), True),
                     Change(8, (A,), (), True)]


def test_a_machine_comes_back_to_its_own_place_and_brings_its_gpus():
    outages = (Outage(10, 30, "b", HOST), Outage(20, 40, "a", HOST), Outage(25, 60, "b", gpu=1))
    found, notes = changes(Trace(("a", "b"), outages, 100), Cluster(2, 2))
    a, b = (Unit(0, 0), Unit(0, 1)), (Unit(1, 0), Unit(1, 1))
    assert found == [Change(10, b, (), True), Change(20, a, (), True), Change(30, (), b[:1]), Change(40, (), a),
                     Change(60, (), b[1:])]
    assert not notes


def test_a_trace_with_fewer_machines_leaves_places_empty():
    found, notes = changes(Trace(("a",), (), 100), Cluster(3, 1))
    assert found == [Change(0, (B, Unit(2, 0)), ())]
    assert notes == ("the trace has at most 1 machines at a time, and the cluster 3 hosts: 2 or more are always"
                     " missing",)


@settings(max_examples=examples(60), deadline=None)
@given(some.integers(1, 6), some.integers(1, 6), some.lists(
    some.tuples(some.integers(0, 5), some.integers(0, 30), some.integers(1, 20), some.booleans()), max_size=12))
def test_as_many_places_are_taken_as_there_are_machines(machines: int, places: int,
                                                         drawn: list[tuple[int, int, int, bool]]):
    outages = [Outage(down, down + length, f"m{host % machines}", gpu=0 if gpu else None)
               for host, down, length, gpu in drawn]
    made = checked([f"m{number}" for number in range(machines)], outages, 60, Cleaning())
    whole = [one for one in made.outages if one.gpu is None]
    found, _ = changes(made, Cluster(places, 2))
    lost: set[Unit] = set()
    most = 0
    for moment in range(60):
        for change in found:
            if change.at == moment:
                assert not lost & set(change.lost) and set(change.gained) <= lost | set(change.lost)
                lost = (lost | set(change.lost)) - set(change.gained)
        there = {f"m{number}" for number in range(machines)} - {
            one.host for one in whole if one.down <= moment < one.up}
        most = max(most, len(there))
        assert sum(Unit(place, 1) not in lost for place in range(places)) == min(len(there), places)
        if machines <= places:  # each has its own
            assert all((Unit(number, 1) in lost) == (f"m{number}" not in there) for number in range(machines))
            hit = {one.host for one in made.outages if one.gpu == 0 and one.down <= moment < one.up}
            assert all((Unit(number, 0) in lost) == (f"m{number}" not in there or f"m{number}" in hit)
                       for number in range(machines))
    assert most_at_once(made) == most


def renamed(hours: int) -> Trace:
    """Six machines; every ten minutes one goes, and a new one comes a minute later."""
    names = [f"m{number}" for number in range(6 + 6 * hours)]
    outages = []
    for number, host in enumerate(names):
        if number >= 6:
            outages.append(Outage(0, 600 * (number - 5) + 60, host, HOST))
        if number < 6 * hours:
            outages.append(Outage(600 * (number + 1), float("inf"), host, HOST))
    return Trace(tuple(names), tuple(sorted(outages)), 3600.0 * hours)


@pytest.mark.parametrize("policy", [Recycling, Oobleck])
def test_a_job_lives_on_machines_that_never_come_twice(policy: type):
    """After an hour none of the first six is left."""
    made = renamed(3)
    free, scaled = (run(ideal(), made).throughput for ideal in (Ideal, FaultScaled))
    assert scaled / free == pytest.approx(1 - 1 / 6 * 0.1, abs=0.01)
    outcome = run(policy(), made)
    assert outcome.failures == 17 and outcome.fatal == 0
    assert outcome.throughput > 0.85 * free


# The start of a job

LATE = [Outage(0, 900.0, f"host{number}", HOST) for number in (3, 4)]


def test_a_job_begins_with_its_whole_grid():
    whole = JOB.batch / PLANS.rerouted(()).period
    outcome = run(Recycling(), trace(*LATE))
    assert outcome.said == ["begins with the whole grid after 900 s"]
    assert outcome.rate[:2] == [(0.0, 0.0), (900.0, pytest.approx(whole))]
    assert outcome.spent["stopped"] == 900 and "restart" not in outcome.spent
    assert run(Recycling(), trace()).said == []


def test_a_job_that_has_waited_long_enough_begins_on_what_is_there_and_keeps_that_grid():
    """As a job that was started with fewer hosts: those that come later make no new pipeline."""
    outcome = run(Recycling(Stalls(wait=600, save=0)), trace(*LATE))
    two = JOB.batch / PLANS.rerouted((), JOB.dealt(2)).period
    assert outcome.said == ["begins with 2 of 3 pipelines, on 4 of 6 workers after 600 s"]
    assert outcome.rate == [(0.0, 0.0), (600.0, pytest.approx(two))]
    elastic = run(CheckpointRestart(), trace(*LATE))
    assert elastic.rate[0][1] == pytest.approx(JOB.batch / PLANS.stock(JOB.dealt(2)).period)
    assert elastic.rate[-1][1] == pytest.approx(JOB.batch / PLANS.stock().period)


def test_a_job_whose_whole_grid_never_comes_begins_after_an_hour():
    made = Trace(tuple(f"host{number}" for number in range(5)), (Outage(9000, 9100, "host0"),), 10_000)
    rows, notes = compare({"ours": Recycling, "oobleck": Oobleck}, JOB, CLUSTER, [made], work=0)
    assert notes[-1] == "ours: begins with 2 of 3 pipelines, on 5 of 6 workers after 3600 s"
    assert rows[0].outcomes[0].spent["stopped"] == 3600


def test_a_smaller_grid_divides_the_global_batch():
    """Of four whole pipelines that are there three are used, as the real job's next life does."""
    job = Job(5, 2, 3, Costs.uniform(2, 20, 22, 18, 1, 5), unit=0.01)
    late = [Outage(0, 3000.0, f"host{number}", HOST) for number in (0, 9)]
    outcome = run(Recycling(Stalls(wait=60)), trace(*late, hosts=10), Cluster(10, 1), job=job)
    assert outcome.said == ["begins with 3 of 5 pipelines, on 8 of 10 workers after 60 s"]
    assert outcome.samples == outcome.iterations * job.batch


def test_a_lost_stage_comes_back_on_the_same_grid():
    """Three workers of six are left; the hosts that come back later fill the empty places, without another restart."""
    dead = [Outage(250.0, 800.0, f"host{host}", HOST) for host in (0, 1, 2)]  # stage 0
    outcome = run(Recycling(Stalls(save=0, restart=50.0)), trace(*dead))
    three = JOB.batch / PLANS.rerouted([Worker(1, 1), Worker(2, 0), Worker(2, 1)]).period
    assert outcome.fatal == 1 and outcome.spent["restart"] == 50
    assert pytest.approx(three) in [rate for at, rate in outcome.rate if 300 <= at < 800]
    assert outcome.rate[-1][1] == pytest.approx(JOB.batch / PLANS.rerouted(()).period)
