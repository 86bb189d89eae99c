"""Hosts drop off the network in every way: the side with the coordinator trains on, with the same bits; the other side
has no effect and ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from megatron_recycle.tools.chaos.network_faults import find, lose, set_link
from tests.backends import gpt_job
from tests.backends.comparing import check_survivors
from tests.harness import Hold, Job, Result
from tests.network.hosts import Hosts, hosts
from tests.references import calm_run

pytestmark = pytest.mark.processes

SIZE, ITERATIONS, AT = 6, 6, 4
TIMES = {"heartbeat_interval": 0.2, "heartbeat_timeout": 2.0, "report_timeout": 4.0, "stall_floor": 3.0}
EXACT: Mapping[str, Any] = {"pipelines": 3, "stages": 2, "iterations": ITERATIONS,
                            "settings": {"reduction": "exact", **TIMES}}
WORKERS = ("0:0", "1:0", "2:0", "0:1", "1:1", "2:1")
"""DeepSpeed numbers workers stage by stage. Two in a row share a host: each stage has copies on several."""


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Result]:
    """The exact job without failures, on one host."""
    return calm_run(gpt_job.train, SIZE, EXACT)


@pytest.fixture(scope="module")
def net() -> Iterator[Hosts]:
    with hosts(3) as made:
        yield made


@pytest.fixture(autouse=True)
def healed(net: Hosts) -> Iterator[None]:
    yield
    for name in net.names:
        set_link(name, True)
        find(name)


def job_on(net: Hosts, hold: Hold) -> Job:
    places = [net.names[rank // 2] for rank in range(SIZE)]
    return Job(gpt_job.train, SIZE, EXACT, [hold], hosts=places, address=net.address, limit=100)


def workers_of(host: int) -> set[str]:
    return {WORKERS[rank] for rank in range(SIZE) if rank // 2 == host}


def check_gone(job: Job, host: int) -> None:
    """One decision about all workers of the host, by its right name; and none of them ended well."""
    decided = [event for event in job.events if event["event"] == "decided"]
    assert [event["out"] for event in decided] == [dict.fromkeys(workers_of(host), "unreachable")]
    assert not [event for event in job.events if event.get("fenced") and event["event"] == "committed"]
    for rank in range(2 * host, 2 * host + 2):
        assert job.results[rank].status not in (0, None), job.where()


@pytest.mark.night
def test_a_host_whose_link_goes_down_is_one_decision(net: Hosts, undisturbed: dict[int, Result]):
    """Its workers see no error at all; they end when they have waited in vain for long enough."""
    hold = Hold("1:1", "backward", AT, 1)
    with job_on(net, hold) as job:
        job.wait_held()
        set_link(net.names[2], False)
        job.release(hold)
        check_survivors(job, workers_of(2), undisturbed)
        check_gone(job, 2)
    resumed = next(event for event in job.events if event["event"] == "resumed")
    assert resumed["ms"] < 2000 * TIMES["heartbeat_timeout"]


@pytest.mark.night
def test_a_host_that_hears_and_is_not_heard_ends(net: Hosts, undisturbed: dict[int, Result]):
    hold = Hold("0:0", "forward", AT, 1)
    with job_on(net, hold) as job:
        job.wait_held()
        lose(net.names[1], [net.address, net.addresses[0], net.addresses[2]])
        job.release(hold)
        check_survivors(job, workers_of(1), undisturbed)
        check_gone(job, 1)


@pytest.mark.night
def test_a_host_that_is_heard_and_does_not_hear_ends(net: Hosts, undisturbed: dict[int, Result]):
    hold = Hold("0:0", "reduce", AT)
    with job_on(net, hold) as job:
        job.wait_held()
        for name in (None, net.names[0], net.names[2]):
            lose(name, [net.addresses[1]])
        try:
            job.release(hold)
            check_survivors(job, workers_of(1), undisturbed)
            check_gone(job, 1)
        finally:
            find(None)


def test_of_two_halves_that_could_both_train_only_the_coordinators_does():
    """Four hosts, two on each side of the cut, and each side has a copy of both stages."""
    arguments = {**EXACT, "pipelines": 4}
    undisturbed = calm_run(gpt_job.train, 8, arguments)
    # No script has left the iteration yet: both ends of a cut pipeline's messages are lost.
    hold = Hold("0:1", "backward", AT, 1)
    with hosts(4) as four, Job(gpt_job.train, 8, arguments, [hold], hosts=[four.names[rank // 2] for rank in range(8)],
                               address=four.address, limit=100) as job:
        job.wait_held()
        ours, theirs = (0, 2), (1, 3)
        for here, there in ((ours, theirs), (theirs, ours)):
            for host in here:
                lose(four.names[host], [four.addresses[other] for other in there])
        for host in theirs:
            lose(four.names[host], [four.address])
        job.release(hold)
        cut_off = {"2:0", "3:0", "2:1", "3:1"}
        check_survivors(job, cut_off, undisturbed)
        assert job.events[-1]["out"] == dict.fromkeys(cut_off, "unreachable")
        assert all(job.results[rank].status not in (0, None) for rank in (2, 3, 6, 7))


@pytest.mark.night
def test_a_link_that_flaps_costs_time_and_nobody(net: Hosts, undisturbed: dict[int, Result]):
    hold = Hold("2:1", "forward", AT, 1)
    with job_on(net, hold) as job:
        job.wait_held()
        for _ in range(3):
            set_link(net.names[2], False)
            time.sleep(0.3)  # much shorter than the heartbeat timeout
            set_link(net.names[2], True)
            time.sleep(0.3)
        job.release(hold)
        check_survivors(job, set(), undisturbed)
        assert not [event for event in job.events if event["event"] == "decided"]


@pytest.mark.night
def test_a_host_that_comes_back_after_it_was_declared_out_has_no_effect(net: Hosts, undisturbed: dict[int, Result]):
    hold = Hold("1:0", "forward", AT)
    with job_on(net, hold) as job:
        job.wait_held()
        set_link(net.names[2], False)
        job.wait_event("decided", generation=2)
        set_link(net.names[2], True)
        for rank in (4, 5):
            assert job.wait_ended(rank).status not in (0, None)
        job.release(hold)
        check_survivors(job, workers_of(2), undisturbed)
        check_gone(job, 2)
