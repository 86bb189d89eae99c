"""What the commit compares: the data that the first and the last stage read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_recycle.errors import DataError
from megatron_recycle.membership import Process, Standing, Verdict
from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime import stepper as steppers
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.sharded_reduction import Cuts
from megatron_recycle.runtime.commit import Commit, Committer, Held, _compare
from megatron_recycle.runtime.generation import PendingShards
from megatron_recycle.runtime.stepper import Stepper
from tests.fakes.network import Fabric, Killed
from tests.fakes.site import PlainStage, site_of
from tests.runtime.comms import connected

GRID = Grid(2, (2, 2))


def test_stages_that_read_different_data_are_told_which_micro_batch():
    _compare(3, GRID, [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0])
    with pytest.raises(DataError, match="iteration 3: .* pipeline 1, micro-batch 0"):
        _compare(3, GRID, [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 5.0, 4.0])


def test_data_that_only_a_dead_worker_has_read_is_not_compared():
    _compare(3, GRID, [1.0, 2.0, 0.0, 4.0], [1.0, 0.0, 3.0, 4.0])


def held(iteration: int) -> Held:
    return Held(iteration, torch.ones(3), (2.5,), 0.75, 6.0, {}, torch.zeros(GRID.total, 0, dtype=torch.float64))


def commits(me: Worker, groups: Groups) -> Commit:
    commit = Commit(held(3), GRID, groups, guess=1.0, offer=0, plan=5, coefficient=lambda verdict: 1.0)
    commit.run()
    return commit


def test_all_workers_get_the_same_verdict_or_those_that_are_left_learn_that_there_is_none():
    workers = [Worker(pipeline, stage) for pipeline in range(2) for stage in range(2)]
    for seed in range(10):
        fabric = Fabric(seed)
        groups = connected(fabric, GRID, workers)
        verdicts = {commit.verdict()[0] for commit in fabric.run(
            *[lambda me=me, groups=groups: commits(me, groups[me]) for me in workers])}
        assert verdicts == {Verdict(3, 0.75, 6.0, (2.5, 2.5), (1.0, 1.0))}


def test_a_commit_that_ends_in_an_unexpected_way_is_not_waited_for_for_ever():
    """Here by the death of its process, whose training thread has to end as well."""
    fabric = Fabric()
    one, _ = connected(fabric, GRID, [Worker(0, 0), Worker(0, 1)]).values()
    commit, committer = Commit(held(3), GRID, one, guess=1.0, offer=0, plan=5, coefficient=pytest.fail), Committer()
    committer.start(commit)
    fabric.die(one.control.group.process)
    assert commit.done.wait(60) and not commit.known
    with pytest.raises(Killed):
        commit.verdict()
    committer.close()


def test_once_a_verdict_is_known_it_does_not_matter_what_the_script_sets():
    """The thread that trains may see that it is known, and let the script's new limit on the norm in, before the thread
    of the commit has done anything with it: on one worker alone the guess would have been wrong."""
    fabric, limits, seen = Fabric(), {"now": 1.0}, []
    alone, = connected(fabric, Grid(1, (1,)), [Worker(0, 0)]).values()

    def coefficient(verdict: Verdict) -> float:
        assert not commit.known, "the script may have gone on"
        return limits["now"]

    def heard(commit: Commit) -> None:
        limits["now"] = 0.5
        seen.append((commit.known, commit.right, commit.refuted))

    one = Held(3, torch.ones(3), (2.5,), 0.75, 6.0, {}, torch.zeros(1, 0, dtype=torch.float64))
    commit = Commit(one, Grid(1, (1,)), alone, guess=1.0, offer=0, plan=5, coefficient=coefficient, heard=heard)
    commit.run()
    assert seen == [(True, 1.0, False)] and not commit.refuted


def test_a_verdict_survives_the_wire_bit_for_bit():
    verdict = Verdict(7, 0.1 + 0.2, 12.0, (1e-45, 3.0), (1.0, 0.3), 41.0)
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_what_a_peer_holds_can_be_copied_whole_but_for_what_it_has_read_itself():
    reports = torch.arange(8.0, dtype=torch.float64).view(4, 2)
    held = Held(4, torch.ones(3), (2.5, 1.5), 0.75, 6.0, {(0, 1): 77}, reports, 9.0)
    assert held.numbers().numel() == Held.count(4, 2, 2)
    copy = Held.from_numbers(4, torch.ones(3), held.numbers(), 4, 2)
    assert (copy.norm_squares, copy.loss, copy.weight, copy.zeros) == ((2.5, 1.5), 0.75, 6.0, 9.0)
    assert torch.equal(copy.reports, held.reports)
    assert copy.digests == {}, "the one that it is copied from tells its own"


def test_a_step_that_was_not_saved_is_not_undone_and_nothing_is_written() -> None:
    stage = SimpleNamespace(reset_state=pytest.fail, state=pytest.fail, set_counters=pytest.fail)
    stepper = Stepper(SimpleNamespace(stage=stage), Standing(Process(Worker(0, 0))))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="only a step that is not final is undone"):
        stepper._undo()


def test_while_shards_are_on_their_way_parameters_come_from_the_workers_that_had_them(monkeypatch: Any) -> None:
    """A step has been repeated by those. A new holder, which may speak for a shard already, has nothing to send yet."""
    site: Any = site_of(PlainStage(nn.Linear(1, 1)))
    stepper = Stepper(site, Standing(Process(Worker(0, 0))))
    had, holders = (Cuts(((Worker(pipeline, 0),),), lambda *_: ()) for pipeline in (0, 1))
    groups: Any = SimpleNamespace(me=Worker(0, 0), peers=lambda stage: (), stage_control=None)
    in_force: Any = SimpleNamespace(cuts=holders, groups=groups, epoch=None)
    stepper.current.set(in_force)
    asked: list[Cuts] = []
    monkeypatch.setattr(steppers, "gather", lambda stage, groups, cut, peers: asked.append(cut))
    monkeypatch.setattr(steppers, "count", lambda *_: None)
    stepper.current.owed = PendingShards(((0, Worker(0, 0), Worker(1, 0)),), had)
    stepper.gather()
    stepper.current.owed = None
    stepper.gather()
    assert asked == [had, holders]
