"""A recovery that fails for a reason of its own: once more, then without the hit pipelines, then without the worker;
never a hang, and never another result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_recycle.runtime import recovery
from megatron_recycle.runtime.attempt import Attempt
from megatron_recycle.runtime.replica_check import PeerCheck
from megatron_recycle.runtime.script_calls import RegisteredState
from megatron_recycle.runtime.stepper import Stepper
from tests.fakes.network import MemoryNetwork
from tests.in_memory_job.job import Job, Moment, check
from tests.in_memory_job.model import SmallStage
from tests.in_memory_job.scenes import SHAPES

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

SHAPE = SHAPES["3x2"]
HOPS = [(recovery, "retire"), (recovery, "report"), (recovery, "rebuild"), (recovery, "install"),
        (recovery, "reconcile"), (PeerCheck, "settle"), (RegisteredState, "settle"), (recovery, "resume"),
        (MemoryNetwork, "connect"), (Stepper, "reconcile"), (Stepper, "leave")]
KILL = Moment("2:1", "backward", 1, 1)


def fails(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, workers: set[str], times: int) -> list[str]:
    """``owner.name`` raises in recoveries of these workers, so many times in each; who has raised is noted."""
    whole: Callable[..., Any] = getattr(owner, name)
    raised: list[str] = []
    recovering = threading.local()
    begin = recovery.recover

    def recover(site: Any, *arguments: Any) -> Any:
        recovering.me = str(site.place.me)
        try:
            return begin(site, *arguments)
        finally:
            recovering.me = ""

    def bug(*arguments: Any, **keywords: Any) -> Any:
        me = getattr(recovering, "me", "")
        if me in workers and raised.count(me) < times:
            raised.append(me)
            raise ValueError(f"a bug in {name}")
        return whole(*arguments, **keywords)

    monkeypatch.setattr(recovery, "recover", recover)
    monkeypatch.setattr(owner, name, bug)
    return raised


def told(job: Job, name: str) -> list[dict[str, Any]]:
    return [event for event in job.control.events if event["event"] == name]


@pytest.mark.parametrize("owner, hop", HOPS, ids=[f"{owner.__name__.rpartition('.')[2]}.{hop}" for owner, hop in HOPS])
@pytest.mark.parametrize("workers", [pytest.param({"0:1"}, marks=pytest.mark.night, id="one"),
                                     pytest.param({"0:0", "1:1"}, id="two")])
def test_a_bug_at_any_hop_of_a_recovery_is_met_once_and_the_next_generation_holds(monkeypatch, owner, hop, workers):
    """Nobody else is out, and the bits are those of a run without failures."""
    raised = fails(monkeypatch, owner, hop, workers, times=1)
    with Job(SHAPE, [KILL]) as job:
        check(job, job.wait(), {"2:1"})
    assert set(raised) == workers
    assert [event["worker"] for event in told(job, "suspected")] == ["2:1"]
    assert len(told(job, "retried")) <= 2 and told(job, "decided")[-1]["out"] == {"2:1": "exit"}


@pytest.mark.parametrize("owner, hop", [(recovery, "rebuild"), (recovery, "reconcile"), (recovery, "retire")],
                         ids=["rebuild", "reconcile", "retire"])
def test_a_worker_on_which_no_recovery_goes_well_is_out_and_the_others_go_on(monkeypatch, owner, hop):
    fails(monkeypatch, owner, hop, {"0:1"}, times=100)
    with Job(SHAPE, [KILL]) as job:
        check(job, job.wait(), {"2:1", "0:1"})
    assert told(job, "decided")[-1]["out"] == {"2:1": "exit", "0:1": "exit"}
    policies = [event.get("policy") for event in told(job, "retried")]  # an iteration committed late begins anew
    assert not policies or (policies[-1] == "drop" and len(policies) <= 4), policies


def test_a_worker_that_is_lost_later_is_not_said_to_have_ended_for_a_bug_that_was_got_over(monkeypatch):
    fails(monkeypatch, recovery, "reconcile", {"0:1"}, times=1)
    late = Moment("0:1", "forward", 4)
    with Job(replace(SHAPE, iterations=5), [KILL], holds=[late]) as job:
        job.wait_event("committed", iteration=2)
        job.wait_held(late)
        job.release(late, die=True)
        check(job, job.wait(), {"2:1", "0:1"})
    assert told(job, "retried") and "error" not in told(job, "suspected")[-1]


def test_a_bug_that_every_worker_meets_ends_the_job_and_its_script_may_start_again(monkeypatch):
    fails(monkeypatch, recovery, "reconcile", {*SHAPE.workers}, times=100)
    with Job(SHAPE, [KILL]) as job:
        assert {result.status for result in job.wait().values()} <= {1, -9}
    status, message, again = job.control.state.ended
    assert (status, again) == (1, True)
    assert "a bug in reconcile" in message and "the recovery has failed on" in message


def test_a_step_that_is_cut_short_in_a_recovery_leaves_a_worker_out_at_once(monkeypatch):
    """Its parameters may be torn: it is not tried again with them."""
    step, once = SmallStage.step, []

    def torn(self: SmallStage, gradients: Any, coefficient: float) -> None:
        recovering = any(process.thread is threading.current_thread() and process.name == "0:1"
                         for process in job.processes.values())
        if recovering and not once and told(job, "decided"):
            once.append(1)
            next(iter(self.parameters)).data.fill_(7.0)
            raise ValueError("half a step")
        step(self, gradients, coefficient)

    monkeypatch.setattr(SmallStage, "step", torn)
    shape = SHAPE.with_settings(step="barrier")
    job = Job(shape, [Moment("2:1", "reduced", 1)])
    with job:
        check(job, job.wait(), {"2:1", "0:1"})
    assert once and "0:1" in told(job, "decided")[-1]["out"]


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_guests_for_which_there_is_no_memory_are_tried_again_and_then_dealt_otherwise(monkeypatch, reduction):
    """The worker has no room for guests between its own pipeline's micro-batches."""
    forward = Attempt._COMPUTES["F"]
    full: list[str] = []

    def short(self: Attempt, action: Any) -> Any:
        me = self._site.place.me
        if str(me) == "0:1" and action.pipeline != me.pipeline and self._program.plan.source != "drop":
            full.append(str(action))
            raise torch.OutOfMemoryError("no memory for a guest")
        return forward(self, action)

    monkeypatch.setattr(Attempt, "_COMPUTES", {**Attempt._COMPUTES, "F": short})
    shape = SHAPES["3x2, four"].with_settings(reduction=reduction)
    with Job(shape, [Moment("2:1", "forward", 1)]) as job:
        check(job, job.wait(), {"2:1"}, within=0.0 if reduction == "exact" else 1e-5)
    policies = [event.get("policy") for event in told(job, "retried")]
    assert len(full) == len(policies) <= 3 and policies[0] is None and policies[-1] == "drop", policies
