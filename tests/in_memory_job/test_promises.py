"""Promises that a comparison with a run without failures does not show: that run is compared with one process that
trains the whole model, memory with the plan's, events with what has happened, tokens with what they let through."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch

from megatron_recycle.config import RecycleConfig
from megatron_recycle.control.wire import WireError
from megatron_recycle.membership.inputs import FROM_WORKER
from megatron_recycle.plan.replay import peak
from megatron_recycle.runtime.commit import Commit
from megatron_recycle.runtime.compute.accumulate import Copies, Layout
from megatron_recycle.runtime.compute.device import Device, Logged
from megatron_recycle.runtime.compute.random_state import seed_of
from tests.in_memory_job.job import Job, Shape, undisturbed
from tests.in_memory_job.model import Block, SmallStage, batch
from tests.in_memory_job.scenes import SHAPES
from tests.moments import Moment

SHAPE = SHAPES["3x2, four"]


def in_one_process(shape: Shape, without: Mapping[int, Collection[int]] = MappingProxyType({})
                   ) -> tuple[list[float], list[Mapping[str, torch.Tensor]]]:
    """The losses of the iterations, and the parameters of the stages after them, as autograd and one optimizer for each
    stage give them; ``without`` these pipelines, by iteration."""
    stages = [SmallStage(stages=shape.stages, stage=stage, pipelines=shape.pipelines, microbatches=shape.microbatches)
              for stage in range(shape.stages)]
    losses = []
    for iteration in range(shape.iterations):
        places = [(pipeline, microbatch) for pipeline in range(shape.pipelines)
                  if pipeline not in without.get(iteration, ()) for microbatch in range(shape.microbatches)]
        total = torch.zeros(())
        for pipeline, microbatch in places:
            data = batch(pipeline, iteration * shape.microbatches + microbatch)
            x = data[0]
            for number, stage in enumerate(stages):
                for layer in stage.module:
                    if isinstance(layer, Block):
                        seed = RecycleConfig().seed
                        layer.draw.manual_seed(seed_of(seed, iteration, pipeline, microbatch, number))
                x = stage.module(x)
            total = total + torch.nn.functional.cross_entropy(x.flatten(0, 1), data[1].flatten())
        (total / len(places)).backward()
        losses.append(float(total.detach()) / len(places))
        for stage in stages:
            stage.optimizer.step()
            stage.optimizer.zero_grad()
    return losses, [{name: tensor for name, tensor in stage.state().items() if name.startswith("parameter")}
                    for stage in stages]


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_each_micro_batch_counts_once_in_a_mean_over_all_with_the_randomness_of_its_place(reduction):
    """P1, P2, P4, without failures and with one."""
    losses, stages = in_one_process(SHAPE)
    shape = SHAPE.with_settings(reduction=reduction)
    for kills in ([], [Moment("1:1", "backward", 1, 1)]):
        for rank, result in Job(shape, kills).run().items():
            if result.status == 0:
                assert result.losses == pytest.approx(losses, rel=1e-5)
                for name, tensor in stages[rank // shape.pipelines].items():
                    torch.testing.assert_close(result.state[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("victim", SHAPE.workers)
def test_activations_take_what_the_plan_says_also_of_guests(victim):
    """P7. The last iteration that is complete at the end is the one that the failure has interrupted, or the next."""
    cap = 2 * SHAPE.stages  # activations, by default
    for iterations in (SHAPE.iterations, SHAPE.iterations + 1):
        job = Job(replace(SHAPE, iterations=iterations), [Moment(victim, "forward", 1, 1)])
        for result in job.run().values():
            if result.status == 0:
                found = result.memory
                most = found.planned if iterations > SHAPE.iterations else cap * found.held[0].before_b
                assert 0 < found.peak <= most, found
    for process in job.processes.values():
        plan, me = process.worker.plan, process.worker.site.place.me
        if process.name != victim:
            assert peak(plan, me) <= cap


def test_what_is_kept_to_undo_a_step_is_one_copy():
    """P7."""
    for result in undisturbed(SHAPE).values():
        state = sum(tensor.nbytes for tensor in result.state.values())
        assert 0 < result.memory.kept.undo <= state


class Sizes:
    """Most bytes of flat gradients and logs that each worker has had at a time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.most, self._now = Counter[str](), Counter[str]()
        self._lock = threading.RLock()  # an object may go at any time
        empty, copied, log = Layout.empty, Copies.sum, Device.log
        patch.setattr(Layout, "empty", lambda layout: self._has(empty(layout)))
        patch.setattr(Copies, "sum", lambda sums, piece: self._has(copied(sums, piece)))
        patch.setattr(Device, "log", lambda device, tensors: self._has(log(device, tensors)))

    def _has(self, made: Any) -> Any:
        worker = threading.current_thread().name.removeprefix("worker-")
        size = sum(tensor.nbytes for tensor in made.tensors) if isinstance(made, Logged) else made.nbytes
        self._add(worker, size)
        weakref.finalize(made, self._add, worker, -size)
        return made

    def _add(self, worker: str, size: int) -> None:
        with self._lock:
            self._now[worker] += size
            self.most[worker] = max(self.most[worker], self._now[worker])


@pytest.mark.parametrize(("reduction", "step", "sharded", "policy", "seed"), [
    ("exact", "staggered", False, "reroute", 0), ("fast", "staggered", False, "reroute", 0),
    ("exact", "barrier", True, "reroute", 0), ("fast", "barrier", False, "reroute", 1),
    ("fast", "barrier", False, "lossy_forward", 1)])
def test_the_memory_budget_has_the_sums_and_messages_that_are_kept(reduction, step, sharded, policy, seed, monkeypatch):
    """P7. All have made the gradients of iteration 2 before they hear that the one before is final, if they may go on
    before that. With NCCL's rules (seed 1) a gradient stays until the next operation on its communicator."""
    sizes, gate, run, ahead = Sizes(monkeypatch), threading.Event(), Commit.run, set[str]()
    shape = replace(SHAPE, sharded=sharded).with_settings(reduction=reduction, policy=policy, step=step)

    def late(commit: Commit) -> None:
        assert commit._sum.iteration != 1 or step == "barrier" or gate.wait(30.0)
        run(commit)

    def at(job: Job, moment: Moment) -> None:
        if (moment.phase, moment.iteration) == ("reduce", 2):
            ahead.add(moment.worker)
            if len(ahead) == len(shape.workers):
                gate.set()

    monkeypatch.setattr(Commit, "run", late)
    job = Job(shape, seed=seed, at=at)
    for rank, result in job.run().items():
        kept, most = result.memory.kept, sizes.most[job.processes[rank].name]
        assert kept.log + kept.sums <= most <= kept.gradient + kept.sums + kept.log


@pytest.mark.parametrize("phase", ["forward", "reduced", "stepped"])
def test_each_failure_is_told_step_by_step_with_its_times(phase):
    """P9."""
    job = Job(SHAPE, [Moment("2:1", phase, 1)])
    job.run()
    told = [event for event in job.control.events if event["generation"] == 2 or event["event"] == "suspected"]
    names = [event["event"] for event in told]
    order = [names.index(name) for name in ("suspected", "decided", "planned", "stopped", "reconciled", "resumed")]
    assert order == sorted(order)
    assert (told[order[0]]["worker"], told[order[0]]["kind"]) == ("2:1", "exit")
    assert told[order[1]]["out"] == {"2:1": "exit"}
    assert all("t" in event for event in told)
    assert all(event["ms"] >= 0 for event in (told[number] for number in order[1:]))
    assert [event["event"] for event in job.control.events][-1] == "finished"


def test_what_is_no_message_of_the_protocol_is_not_taken():
    """P10. tests/membership has the token, and the wire."""
    for message in ({"type": "report", "generation": "2", "report": {}}, {"type": "go"}, {"type": "learn"}):
        with pytest.raises(WireError):
            FROM_WORKER.read(message)
