"""Waiting for other workers ends when the job does."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from megatron_recycle.config import RecycleConfig
from megatron_recycle.control import End
from megatron_recycle.errors import GenerationOver, JobEnded
from megatron_recycle.membership import Process, Standing
from megatron_recycle.membership.standing import Epoch
from megatron_recycle.plan import Worker
from megatron_recycle.runtime import recovery
from megatron_recycle.runtime import worker as worker_module
from megatron_recycle.runtime.comm.rendezvous import meet, unless_interrupted
from megatron_recycle.runtime.comm.threads import Threads
from megatron_recycle.runtime.compute.random_state import Seeds
from megatron_recycle.runtime.recovery import await_stop, connect_limit
from megatron_recycle.runtime.worker import StageWorker
from tests.fakes.site import AgentAlone, PlainStage, site_of


def worker(ended: End | None) -> Any:
    """In generation 2, the last that was announced."""
    agent = AgentAlone(generation=2)
    agent.ended = ended
    return site_of(PlainStage(nn.Linear(1, 1)), agent=agent, heartbeat_timeout=0.2, heartbeat_interval=0.05,
                   report_timeout=0.1)


STANDING = Standing(Process(Worker(0, 0)), epoch=Epoch(2))


def test_a_worker_that_waits_for_a_dead_one_to_connect_learns_that_the_job_has_ended():
    """The last copy of a stage that dies while the others rebuild: no generation follows, only the end."""
    over = worker(End(1, "stage 1 has lost its last worker"))
    with pytest.raises(GenerationOver) as aborted:
        meet(HashStore(), Worker(0, 0), [Worker(0, 0), Worker(0, 1)], lambda: over.interrupted(STANDING))
    with pytest.raises(JobEnded, match="stage 1 has lost its last worker"):
        await_stop(over, STANDING, aborted.value)


def test_an_error_that_nobody_declares_a_failure_for_is_raised():
    with pytest.raises(GenerationOver, match="broken"):
        await_stop(worker(None), STANDING, GenerationOver("broken"))


def test_time_without_a_coordinator_does_not_count_against_it_for_a_while():
    """It is started again, and then has to find the failure: 0.4 s here, which are over before it is back."""
    waits = worker(None)
    waits.agent.out_of_reach = True

    def comes_back() -> None:
        waits.agent.out_of_reach = False
        waits.agent.stop_generation = 3

    timer = threading.Timer(0.6, comes_back)
    timer.start()
    await_stop(waits, STANDING, GenerationOver("broken"))
    timer.join()


def test_a_coordinator_that_never_comes_back_is_not_waited_for_for_ever():
    alone = worker(None)
    alone.agent.out_of_reach = True
    begun = time.monotonic()
    with pytest.raises(GenerationOver, match="broken"):
        await_stop(alone, STANDING, GenerationOver("broken"))
    assert 1.0 < time.monotonic() - begun < 60.0


def test_what_is_still_connecting_when_the_generation_ends_is_left_behind_and_thrown_away():
    """However long it takes; and it is told, though the next generation is nothing to be interrupted by."""
    ends, answers, thrown_away = threading.Event(), threading.Event(), threading.Event()
    told: list[bool] = []

    def connect(over: Callable[[], bool]) -> str:
        told.append(over())
        ends.set()
        answers.wait()
        told.append(over())
        return "handles"

    with pytest.raises(GenerationOver):
        unless_interrupted(ends.is_set, connect, lambda handles: thrown_away.set(), Threads())
    ends.clear()
    answers.set()
    assert thrown_away.wait(60)
    assert told == [False, True]


def test_the_end_waits_for_what_was_left_behind():
    """An interpreter that ends while a thread comes back from the communication library aborts the process."""
    ends, threads = threading.Event(), Threads()
    left = threads.start("left behind", ends.wait, 10.0)
    threading.Timer(0.2, ends.set).start()
    made = SimpleNamespace(leave=lambda: None, site=site_of(PlainStage(nn.Linear(1, 1)), network=threads))
    MethodType(StageWorker.close, made)()
    assert not left.is_alive()


def test_workers_meet_though_a_stranger_deletes_what_they_write():
    """Again and again, while they wait for the last one; then the stranger goes away. (Who has met all others says so
    no more: were that deleted, the others would try again in another generation.)"""
    store = HashStore()
    workers = [threading.Thread(target=lambda rank=rank: meet(store, rank, [0, 1, 2], lambda: False, 20.0))
               for rank in range(3)]
    for thread in workers[:2]:
        thread.start()
    for key in 3 * ["met/0", "met/1"]:
        wait_until(lambda key=key: store.check([key]))
        store.delete_key(key)
    workers[2].start()
    for thread in workers:
        thread.join(60)
        assert not thread.is_alive()


def wait_until(reached: Callable[[], bool], limit: float = 10.0) -> None:
    end = time.monotonic() + limit
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_one_key_that_is_deleted_between_two_arrivals_holds_up_nobody():
    store, first = HashStore(), threading.Thread(target=lambda: meet(store, 0, [0, 1], lambda: False, 20.0))
    first.start()
    wait_until(lambda: store.check(["met/0"]))
    store.delete_key("met/0")
    meet(store, 1, [0, 1], lambda: False, 20.0)
    first.join(60)
    assert not first.is_alive()


def test_who_does_not_come_to_the_store_ends_the_wait_by_name_and_the_generation_is_tried_again():
    with pytest.raises(GenerationOver, match="rank 1, 3 did not come to torch's store within 0 s"):
        store = HashStore()
        store.set("met/2", "1")
        meet(store, 0, [0, 1, 2, 3], lambda: False, 0.1)


def test_connecting_gets_more_time_with_more_ranks_and_after_each_try_that_took_longer():
    config = RecycleConfig(heartbeat_timeout=4.0)
    assert connect_limit(config, 6, 0) == pytest.approx(4.3)
    assert connect_limit(config, 1000, 0) == pytest.approx(54.0)
    assert [connect_limit(RecycleConfig(connect_timeout=3.0), 6, tries) for tries in range(4)] == [3, 6, 12, 12]


def test_a_script_finds_its_random_numbers_as_it_left_them_though_its_worker_comes_in_and_compares_data(monkeypatch):
    site = site_of(PlainStage(nn.Linear(1, 1)))
    draws = site.framework.generators
    comes_in = SimpleNamespace(
        standing=Standing(Process(Worker(0, 0))), stepper=None, _loop=SimpleNamespace(telling=nullcontext),
        site=site)
    monkeypatch.setattr(recovery, "join", lambda *_: Seeds(draws, 7).set(1, 11) or SimpleNamespace(plan=None))
    monkeypatch.setattr(worker_module, "announce", lambda site, plan: None)
    before = random.getstate(), torch.get_rng_state()
    StageWorker.begin(comes_in, 0)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
