"""The last copy of a stage is lost, and the stage comes back from the memory of another one's worker (`guard:
memory`)."""

from __future__ import annotations

import random
import threading
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_recycle.errors import GenerationOver
from megatron_recycle.membership.report import GuardReport
from megatron_recycle.runtime.copies import Guard, StateCopy
from megatron_recycle.runtime.saving import Save, Written
from megatron_recycle.runtime.worker import StageWorker
from tests.in_memory_job.job import Disk, Job, Killed, Shape, differences, undisturbed
from tests.in_memory_job.model import Block, SmallStage
from tests.moments import Moment
from tests.seeds import by_day, rows, seeds

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

GUARDED = {"guard": "memory", "guard_interval": 2}
SHAPE = Shape(2, 2, 2, 8).with_settings(**GUARDED)
PHASES = ("forward", "backward", "weight", "reduce", "reduced", "step", "stepped")


def told(job: Job, name: str) -> list[dict[str, Any]]:
    return [event for event in job.control.events if event["event"] == name]


def check_ends_well(job: Job, out: Collection[str] = (), restored: int = 1) -> None:
    """As if nothing had happened, bit for bit; who came in has the last loss, and knows no earlier ones."""
    job.control.wait_until(lambda: len(told(job, "restored")) >= restored or told(job, "finished"), "restored", 60.0)
    reference = undisturbed(job.shape.with_settings(step="barrier", guard="none", guard_interval=10))
    results = job.wait()
    came = {event["worker"] for event in told(job, "joined")}
    for rank, result in results.items():
        name = job.processes[rank].name
        if name in out:
            continue
        assert result.status == 0, f"{name} has ended with {result.status}: {result.error}\n{job.where()}"
        found = differences(result, reference[rank])
        found -= {"losses", "evaluated", "collected"} if name in came else set()
        assert not found, f"{name} differs in {sorted(found)}\n{job.where()}"
        assert result.losses[-1] == reference[rank].losses[-1]
    committed = [one["iteration"] for one in told(job, "committed")]
    assert committed[-1] == job.shape.iterations - 1 and set(committed) == {*range(job.shape.iterations)}


@pytest.mark.parametrize(("phase", "stage"), rows(PHASES, [0, 1], every=3))
def test_the_last_two_workers_of_a_stage_are_killed_one_after_the_other(phase, stage):
    first, last = Moment(f"0:{stage}", "forward", 1), Moment(f"1:{stage}", phase, 5)
    with Job(SHAPE, [first, last], seed=stage) as job:
        check_ends_well(job, out={first.worker})
    (event,) = told(job, "restored")
    assert event["stages"] == [stage] and event["iteration"] in (3, 4) and event["lost"] <= 2
    assert told(job, "guarded")[0]["bytes"] > 0


@pytest.mark.parametrize("worker", ["0:0", "0:1", "0:2"])
@pytest.mark.parametrize("iteration", [2, 5, 7])
def test_a_job_of_one_pipeline_outlives_its_workers(worker, iteration):
    """Nobody has a peer: every stage is its own last copy, from the first commit on."""
    shape = Shape(1, 3, 3, 8, clipping=0.05).with_settings(**GUARDED)
    with Job(shape, [Moment(worker, "backward", iteration, 1)], seed=iteration) as job:
        check_ends_well(job)


def test_two_stages_are_lost_one_after_the_other():
    shape = Shape(1, 3, 2, 9).with_settings(**GUARDED)
    with Job(shape, [Moment("0:1", "forward", 3), Moment("0:2", "forward", 7)]) as job:
        check_ends_well(job, restored=2)


@pytest.mark.parametrize("first, second", [("0:1", "0:0"), ("0:1", "0:2")])
def test_another_stage_is_lost_before_the_next_copies(first, second):
    """Those from the way back are of an iteration whose data have been read twice."""
    shape = Shape(1, 3, 2, 9).with_settings(**{**GUARDED, "guard_interval": 10})
    with Job(shape, [Moment(first, "forward", 3), Moment(second, "forward", 5)]) as job:
        check_ends_well(job, restored=2)
    assert [event["iteration"] for event in told(job, "restored")] == [0, 0] and not told(job, "join_failed")


@pytest.mark.parametrize("dies", ["1:0", "1:1"])
@pytest.mark.parametrize("seed", by_day(1, range(2)))
def test_another_failure_on_the_way_back(dies, seed):
    """The process that has come for the lost stage dies as well, or the keeper's peer."""
    kills = [Moment("0:0", "forward", 1), Moment("1:0", "backward", 5), Moment(dies, "joining", 4)]
    with Job(SHAPE, kills, seed=seed) as job:
        check_ends_well(job, out={"0:0"} | ({dies} - {"1:0"}), restored=1 + (dies == "1:0"))
    assert not job.kills


@pytest.mark.parametrize("phase, iterations", [("recovering", (4, 5)), ("joining", (4,))])
def test_a_stage_whose_keeper_dies_with_it_is_lost(phase, iterations):
    """The keeper may still be in the iteration before."""
    kills = [Moment("0:0", "forward", 1), Moment("1:0", "backward", 5)]
    kills += [Moment("0:1", phase, iteration) for iteration in iterations]
    with Job(SHAPE, kills) as job:
        job.wait_event("finished")
        job.wait()
    end = told(job, "finished")[-1]
    assert "nobody who is left keeps a copy of stage 0 that all others can go back to" in end["message"]
    assert job.control.state.ended[2], "the script may be started again"


def test_copies_of_what_is_made_again_are_not_gone_back_to():
    """Only some had made the last one; with another order of sums the next one of that iteration has other bits."""
    guard, copy = Guard(), StateCopy("", {})
    for iteration in (3, 5):
        guard.keep(2, iteration, copy, {1: copy})
    guard.go_back(2)
    assert guard.report(None, -1) == GuardReport((2,), {1: (2,)})


@pytest.mark.parametrize(("guard", "phase", "stage"), rows(
    ["memory", "checkpoint"], ["evaluate", "save", "saved", "collective", "collected"], [0, 1], every=3))
def test_a_stage_that_is_lost_between_two_iterations_comes_back(phase, stage, guard):
    """The process that comes in passes over what the others' scripts have done there, and takes part in the rest."""
    shape = Shape(2, 2, 2, 6, evaluate=(2, 4), save=(2, 4), collect=(1, 3)).with_settings(guard=guard, guard_interval=2)
    if (stage, phase) == (1, "saved"):
        pytest.skip("the first worker names a checkpoint")
    first, last = Moment(f"0:{stage}", "forward", 1), Moment(f"1:{stage}", phase, 3)
    with Job(shape, [first, last], seed=stage) as job:
        check_ends_well(job, out={first.worker})
    assert not job.kills
    assert [one["place"] for one in told(job, "checkpoint")] == ["iteration 2", "iteration 4"]


def test_evaluations_and_checkpoints_that_are_done_are_not_done_again():
    """The process that comes in gets the results of those since the copy, too."""
    shape = Shape(2, 2, 2, 8, evaluate=(3, 5), save=(3,)).with_settings(**{**GUARDED, "guard_interval": 4})
    with Job(shape, [Moment("0:1", "forward", 1), Moment("1:1", "backward", 6)]) as job:
        check_ends_well(job, out={"0:1"})
    (event,) = told(job, "restored")
    assert event["iteration"] == 3 and event["lost"] in (1, 2)  # the last one may not be committed yet
    assert [one["place"] for one in told(job, "checkpoint")] == ["iteration 3"]
    assert all(len(process.result.evaluated) == 4 for process in job.processes.values() if process.name != "0:1")
    came, other = (process.result for process in job.processes.values() if process.name in ("1:1", "1:0"))
    assert came.evaluated == other.evaluated


@pytest.mark.parametrize("seed", seeds(3))
def test_random_last_copies(seed):
    """Any job, any two moments; the coordinator may die on the way."""
    draw = random.Random(seed)
    shape = draw.choice([
        Shape(2, 2, 2, 8), Shape(2, 3, 3, 8), Shape(2, 2, 4, 8, clipping=0.05), Shape(2, 2, 2, 8, tied=True),
        Shape(2, 2, 2, 8, scale=64.0, overflows=((1, 1), (0, 2))), Shape(2, 2, 2, 8, lengths=(1, 1, 2, 2, 3, 1, 1, 2))])
    shape = shape.with_settings(guard="memory", guard_interval=draw.choice([1, 2, 3]),
                                step=draw.choice(["staggered", "barrier"]))
    stage, first = draw.randrange(shape.stages), draw.randrange(2)
    kills = [Moment(f"{first}:{stage}", draw.choice(PHASES), 1), Moment(f"{1 - first}:{stage}", draw.choice(PHASES), 5)]
    with Job(shape, kills, seed=seed, slow=draw.choice([0.0, 0.1, 0.5])) as job:
        if draw.random() < 0.5:
            job.wait_event("restoring")
            job.control.call(lambda: job.control.kill(0.01), draw.uniform(0.0, 0.03))
        check_ends_well(job, out={kills[0].worker})


def test_copies_from_before_the_script_has_changed_something_are_not_gone_back_to(monkeypatch):
    """A learning rate by hand in each iteration: it would be lost with the iterations that are made again."""
    train = StageWorker.train

    def by_hand(self: StageWorker, iteration: int) -> float:
        for group in self.site.stage.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + iteration)
        return train(self, iteration)

    monkeypatch.setattr(StageWorker, "train", by_hand)
    with Job(SHAPE, [Moment("0:1", "forward", 1), Moment("1:1", "backward", 5)]) as job:
        job.wait_event("finished")
        job.wait()
    assert "nobody who is left keeps a copy of stage 1" in told(job, "finished")[-1]["message"]


CHECKPOINTS = Shape(2, 2, 2, 8, save=(2, 4)).with_settings(guard="checkpoint")


@pytest.mark.parametrize(("phase", "stage"), rows(PHASES, [0, 1], every=3))
def test_a_lost_stage_comes_back_from_the_newest_checkpoint(phase, stage):
    with Job(CHECKPOINTS, [Moment(f"0:{stage}", "forward", 1), Moment(f"1:{stage}", phase, 6)], seed=stage) as job:
        check_ends_well(job, out={f"0:{stage}"})
    assert len(told(job, "restored")) == 1, [one for one in job.control.events if one["event"] != "committed"]
    (event,) = told(job, "restored")
    assert (event["stages"], event["iteration"], event["from"]) == ([stage], 3, {str(stage): "checkpoint"})
    assert 1 <= event["lost"] <= 3
    assert not told(job, "guarded")
    assert [one["place"] for one in told(job, "checkpoint")] == ["iteration 2", "iteration 4"]


@pytest.mark.parametrize("settings, found", [
    ({"guard": "memory", "guard_interval": 2}, "copy"), ({"guard": "memory", "guard_interval": 10}, "checkpoint")])
def test_the_newer_one_of_copy_and_checkpoint_is_gone_back_to(settings, found):
    shape = CHECKPOINTS.with_settings(**settings)
    with Job(shape, [Moment("0:1", "forward", 1), Moment("1:1", "backward", 6)]) as job:
        check_ends_well(job, out={"0:1"})
    (event,) = told(job, "restored")
    assert (event["from"] == {"1": "checkpoint"}) == (found == "checkpoint")
    assert event["iteration"] == 3 if found == "checkpoint" else event["iteration"] in (4, 5)


@pytest.mark.parametrize("shape", [CHECKPOINTS.with_settings(guard="none"), Shape(2, 2, 2, 8)])
def test_without_guard_or_a_checkpoint_the_job_ends(shape):
    with Job(shape, [Moment("0:1", "forward", 1), Moment("1:1", "backward", 6)]) as job:
        job.wait_event("finished")
        job.wait()
    assert "stage 1 has lost its last worker" in told(job, "finished")[-1]["message"]


def test_the_stage_is_lost_again_and_the_checkpoint_since_then_is_newer():
    with Job(CHECKPOINTS, [Moment("0:1", "forward", 1), Moment("1:1", "backward", 3), Moment("1:1", "step", 7)]) as job:
        check_ends_well(job, out={"0:1"}, restored=2)
    assert [event["iteration"] for event in told(job, "restored")] == [1, 3]


@pytest.mark.parametrize("dies", ["1:0", "1:1", "0:1"])
def test_another_failure_while_the_checkpoint_is_loaded(dies):
    kills = [Moment("0:0", "forward", 1), Moment("1:0", "backward", 5), Moment(dies, "joining", 4)]
    with Job(CHECKPOINTS, kills) as job:
        check_ends_well(job, out={"0:0"} | ({dies} - {"1:0"}), restored=1 + (dies == "1:0"))


@pytest.mark.parametrize("step", ["barrier", "staggered"])
@pytest.mark.parametrize("guard", ["memory", "checkpoint"])
def test_a_learning_rate_by_hand_since_is_not_lost_the_job_ends(monkeypatch, step, guard):
    """Whether the last step is final already or not."""
    train = StageWorker.train

    def by_hand(self: StageWorker, iteration: int) -> float:
        if iteration == 6:
            for group in self.site.stage.optimizer.param_groups:
                group["lr"] = 0.001
        return train(self, iteration)

    monkeypatch.setattr(StageWorker, "train", by_hand)
    shape = CHECKPOINTS.with_settings(step=step, guard=guard, guard_interval=100)
    with Job(shape, [Moment("0:1", "forward", 1), Moment("1:1", "backward", 6)]) as job:
        job.wait_event("finished")
        job.wait()
    assert "the script has changed something since the last checkpoint" in told(job, "finished")[-1]["message"]


@pytest.mark.parametrize("guard", ["checkpoint", "memory"])
@pytest.mark.parametrize("cut", [0, 1])
def test_a_checkpoint_that_cannot_be_read_is_no_end_while_there_is_an_older_one(cut, guard):
    """Nor where that is found on the way, by one that is left or by the one that has come for the stage; or there is a
    copy that is newer than the older one."""
    shape = replace(CHECKPOINTS, save=(2, 5)).with_settings(guard=guard, guard_interval=3)
    job = Job(shape, [Moment("0:1", "forward", 1), Moment("1:1", "backward", 6)], seed=cut)
    job.disk.cut.add((5, cut))
    with job:
        check_ends_well(job, out={"0:1"}, restored=2 if guard == "checkpoint" else 1)
    events = told(job, "restored")
    if guard == "memory":
        assert [event["iteration"] for event in events] == [5] and not told(job, "unreadable")
        return
    (event,) = told(job, "unreadable")
    assert (event["iteration"], event["place"], event["error"]) == (4, "iteration 5", "EOFError: Ran out of input")
    assert [event["iteration"] for event in events] == [4, 1]


def test_with_no_checkpoint_left_that_can_be_read_the_job_ends_and_says_why(tmp_path):
    job = Job(replace(CHECKPOINTS, folder=str(tmp_path)), [Moment("0:1", "forward", 1), Moment("1:1", "backward", 6)])
    job.disk.cut |= {(2, 0), (4, 1)}
    with job:
        job.wait_event("finished")
        job.wait()
    message, end = told(job, "finished")[-1]["message"], job.control.state.ended
    assert "stage 1 has lost its last worker" in message and end is not None and end[2]
    assert "The checkpoint in iteration 4 cannot be read (EOFError: Ran out of input on 1:1)" in message
    assert "The checkpoint in iteration 2 cannot be read" in message
    assert not [*tmp_path.iterdir()], "what is half loaded is held by nobody"


def test_who_names_a_checkpoint_dies_when_it_is_noted_and_not_yet_named(monkeypatch):
    """With it its stage: all go back to that one, and not to what had its name before."""
    write, died = Disk.write, []

    def dies(self: Disk, save: Save, iteration: int, stage: SmallStage) -> bool:
        def whole(place: str, of: Written | None = None) -> None:
            save.whole(place, of)
            if iteration == 4 and not died:
                died.append(threading.current_thread().name)
                next(one for one in job.processes.values() if one.thread is threading.current_thread()).network.die()
                raise Killed

        return write(self, save._replace(whole=whole), iteration, stage)

    monkeypatch.setattr(Disk, "write", dies)
    with Job(CHECKPOINTS, [Moment("1:0", "forward", 1)]) as job:
        check_ends_well(job, out={"1:0"})
    (event,) = told(job, "restored")
    assert (died, event["iteration"], event["from"]) == (["worker-0:0"], 3, {"0": "checkpoint"})


def changes_once(monkeypatch, call, before=False):
    """The script sets a learning rate by hand beside its first ``call`` after iteration 3, or for that ``call`` alone
    writes other parameters."""
    plain = getattr(StageWorker, call)

    def beside(self: StageWorker, iteration: int, *rest: Any) -> Any:
        if iteration != 4:
            return plain(self, iteration, *rest)
        parameters = self.site.stage.parameters if before else ()
        kept = [parameter.data.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.data.mul_(2.0)
        result = plain(self, iteration, *rest)
        for parameter, tensor in zip(parameters, kept):
            parameter.data.copy_(tensor)
        for group in () if before else self.site.stage.optimizer.param_groups:
            group["lr"] = 0.001
        return result

    monkeypatch.setattr(StageWorker, call, beside)


@pytest.mark.parametrize("step", ["barrier", "staggered"])
@pytest.mark.parametrize("save, call, before", [
    ((4,), "save", False), ((2, 4), "save", False), ((4,), "save", True), ((2, 4), "save", True),
    ((3,), "evaluate", False)])
def test_what_the_script_changes_beside_a_checkpoint_or_an_evaluation_is_not_lost(
        monkeypatch, step, save, call, before):
    """A learning rate by hand after the first checkpoint of all, or by an evaluation's loss; averaged parameters that
    are there for the checkpoint only: training must not go on from them."""
    changes_once(monkeypatch, call, before)
    shape = replace(CHECKPOINTS, save=save, evaluate=(4,)).with_settings(step=step)
    with Job(shape, [Moment("0:1", "forward", 1), Moment("1:1", "backward", 6)]) as job:
        job.wait_event("finished")
        job.wait()
    assert not told(job, "restored")
    end = told(job, "finished")[-1]["message"]
    assert "the script has changed something since the last checkpoint" in end and "keeps a copy" not in end


@pytest.mark.parametrize("kill", [Moment("1:0", "backward", 6), Moment("1:0", "evaluate", 3)])
def test_what_an_evaluation_leaves_in_a_module_is_no_change_of_the_scripts(monkeypatch, kill):
    """As Megatron's `set_input_tensor` does. The last copy may be lost in the evaluation itself."""
    forward = Block.forward

    def keeps(self: Block, x: torch.Tensor) -> torch.Tensor:
        self.given = x.detach()
        return forward(self, x)

    monkeypatch.setattr(Block, "forward", keeps)
    shape = replace(CHECKPOINTS, save=(3,), evaluate=(4,))
    with Job(shape, [Moment("0:0", "forward", 1), kill]) as job:
        check_ends_well(job, out={"0:0"})
    (event,) = told(job, "restored")
    assert event["iteration"] == 2 and not job.kills


@pytest.mark.parametrize("step", ["barrier", "staggered"])
def test_what_the_script_has_changed_just_before_a_checkpoint_is_in_it(monkeypatch, step):
    """All may go back to that one; not to the one before, nor, once there is more, to this one."""
    save = StageWorker.save

    def by_hand(self: StageWorker, iteration: int, *rest: Any) -> None:
        self.settle()
        for group in self.site.stage.optimizer.param_groups if iteration == 4 else ():
            group["lr"] *= 0.5
        save(self, iteration, *rest)

    monkeypatch.setattr(StageWorker, "save", by_hand)
    monkeypatch.setattr("tests.in_memory_job.job.once", lambda what, make: make())
    undisturbed.cache_clear()
    try:
        with Job(CHECKPOINTS.with_settings(step=step),
                 [Moment("0:1", "forward", 1), Moment("1:1", "backward", 6)]) as job:
            check_ends_well(job, out={"0:1"})
    finally:
        undisturbed.cache_clear()  # its jobs had other rates
    (event,) = told(job, "restored")
    assert event["iteration"] == 3


def test_a_change_between_two_checkpoints_of_one_iteration_bars_both():
    """They look the same to who chooses, and the first one does not have it."""
    guard = Guard()
    guard.save(3)
    guard.void(3)
    guard.save(3)
    assert guard.back == 4
    guard.save(4)
    assert guard.back == 4


@pytest.mark.parametrize("phase", PHASES)
def test_with_nothing_to_go_back_to_the_survivors_save_what_they_hold(tmp_path, phase):
    """Of the last committed iteration: the state of a job that ended with it, but for the stage that is lost."""
    shape = Shape(2, 2, 2, 8, folder=str(tmp_path), clipping=0.05).with_settings(guard="none")
    with Job(shape, [Moment("0:1", "forward", 1), Moment("1:1", phase, 4)]) as job:
        job.wait_event("finished")
        job.wait()
    status, message, again = job.control.state.ended
    (event,) = told(job, "surviving")
    assert (status, again, event["missing"], event["writers"]) == (1, True, [1], ["0:0"])
    place = tmp_path / f"survivors-iteration-{event['iteration']}"
    assert f"stage 1 is missing) is in {place}" in message and "stage 1 has lost its last worker" in message
    assert [file.name for file in place.iterdir()] == ["stage-0.pt"]
    held = torch.load(place / "stage-0.pt", weights_only=True)
    assert (held["iteration"], held["stage"], held["missing"]) == (event["iteration"], 0, [1])
    ended = replace(shape, iterations=event["iteration"] + 1, folder="").with_settings(step="barrier")
    for name, tensor in undisturbed(ended)[0].state.items():
        assert torch.equal(held["tensors"][name], tensor), name


def test_survivors_that_were_cut_off_while_they_loaded_a_checkpoint_save_nothing(tmp_path, monkeypatch):
    """The process that came for the stage dies each time. A survivor that was cut off before that holds all it had."""
    load, begun = Disk.load, set()

    def half(self: Disk, place: str, name: str, stage: SmallStage) -> None:
        if stage.stage == 1:
            return load(self, place, name, stage)
        stage.parameters[0].data.fill_(7.0)
        begun.add(threading.current_thread().name)
        worker = next(one.worker for one in job.processes.values() if one.thread is threading.current_thread())
        job.wait_for(worker.interrupted, "the next failure")
        raise GenerationOver("1:1 is gone")

    monkeypatch.setattr(Disk, "load", half)
    kills = [Moment("0:1", "forward", 1), Moment("1:1", "backward", 6)]
    job = Job(replace(CHECKPOINTS, folder=str(tmp_path)), kills,
              at=lambda job, at: job.kills.add(at) if (at.worker, at.phase) == ("1:1", "joining") else None)
    with job:
        job.wait_event("finished")
        job.wait()
    message = told(job, "finished")[-1]["message"]
    saved = {name for name in ("worker-0:0", "worker-1:0") if any(tmp_path.iterdir()) and name not in begun}
    assert bool(saved) == any(tmp_path.iterdir()), "what is half loaded is held by nobody"
    if not saved:
        assert "3 processes for it have failed" in message and "none of those that are left holds a whole" in message


def test_survivors_whose_optimizer_is_cut_into_shards_save_nothing(tmp_path):
    """Parameters that others have stepped may not have come, and nobody has all of the optimizer's state."""
    shape = Shape(2, 2, 2, 8, folder=str(tmp_path), sharded=True).with_settings(guard="none")
    with Job(shape, [Moment("0:1", "forward", 1), Moment("1:1", "backward", 4)]) as job:
        job.wait_event("finished")
        job.wait()
    assert job.control.state.ended[2] and "stage 1 has lost its last worker" in job.control.state.ended[1]
    assert not told(job, "surviving") and not [*tmp_path.iterdir()]


def test_survivors_that_cannot_write_end_the_job_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    shape = Shape(2, 2, 2, 8, folder=str(tmp_path / "file")).with_settings(guard="none")
    with Job(shape, [Moment("0:1", "forward", 1), Moment("1:1", "backward", 4)]) as job:
        job.wait_event("finished")
        job.wait()
    assert "No checkpoint was written" in told(job, "finished")[-1]["message"]
    assert job.control.state.ended[2]


def loading_fails(monkeypatch, workers, times):
    """In a checkpoint that is loaded by these workers, so many times in each, when half of it is there."""
    load, failed = Disk.load, []

    def half(self: Disk, place: str, name: str, stage: SmallStage) -> None:
        me = threading.current_thread().name.removeprefix("worker-")
        if me in workers and failed.count(me) < times:
            failed.append(me)
            stage.parameters[0].data.fill_(7.0)
            raise OSError(5, "Input/output error")
        load(self, place, name, stage)

    monkeypatch.setattr(Disk, "load", half)
    return failed


@pytest.mark.parametrize("worker", ["0:0", "1:0", "1:1"])
def test_a_checkpoint_that_cannot_be_read_is_tried_again(monkeypatch, worker):
    """A survivor's file, or that of the process that has come: whoever has got to the end before it waits for it."""
    failed = loading_fails(monkeypatch, {worker}, 1)
    with Job(CHECKPOINTS, [Moment("0:1", "forward", 1), Moment("1:1", "backward", 6)]) as job:
        check_ends_well(job, out={"0:1"})
    assert failed == [worker]


def test_a_checkpoint_that_nobody_can_read_ends_the_job_which_may_be_started_again(monkeypatch):
    loading_fails(monkeypatch, set(CHECKPOINTS.workers), 100)
    with Job(CHECKPOINTS, [Moment("0:1", "forward", 1), Moment("1:1", "backward", 6)]) as job:
        job.wait_event("finished")
        job.wait()
    status, message, again = job.control.state.ended
    assert (status, again) == (1, True)
    assert "Input/output error" in message or "processes for it have failed" in message, message


def test_no_copies_are_due_before_an_iteration_that_closed_stages_do_not_begin_any_more():
    """The others still make its rest: their copies would be sent to keepers that never come to it."""
    guard = Guard()
    guard.first = 3
    assert not guard.due(2, 2, every=1) and guard.due(2, 3, every=1)
