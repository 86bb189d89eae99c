"""What a last checkpoint of Megatron-LM holds, and what is said where there is none, on a stand-in for its loop."""

from __future__ import annotations

from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_recycle.backends.megatron import final_checkpoint as megatron_last
from megatron_recycle.backends.megatron.final_checkpoint import LastCheckpoint, beginning_of, remember
from megatron_recycle.backends.megatron.skipped_iterations import Gaps
from megatron_recycle.errors import RecycleError

BATCH = 16


class Run(Enum):
    NOT_RUNNING_YET = 0
    INITIAL_RUN = 1


class Scheduler:
    num_steps = 0

    def step(self, increment: int) -> None:
        self.num_steps += increment
        self.rate = 1.0 / (1 + self.num_steps)


class Loop:
    """A job that went on from iteration 4, evaluates after each third one, and has 8 workers."""

    def __init__(self, folder: Path | None) -> None:
        self.arguments = SimpleNamespace(
            save=folder and str(folder), iteration=4, consumed_train_samples=4 * BATCH,
            consumed_valid_samples=2 * BATCH,
            num_floating_point_operations_so_far=4e9, micro_batch_size=2, data_parallel_size=4, eval_interval=3,
            eval_iters=2, global_batch_size=BATCH, do_valid=True, curr_iteration=0, data_parallel_random_init=False,
            world_size=8, iterations_to_skip=[])
        self.scheduler, self.machine = Scheduler(), SimpleNamespace(state=Run.INITIAL_RUN)
        self.scheduler.step(4 * BATCH)
        self.get_args = lambda: self.arguments
        self.get_rerun_state_machine = lambda: self.machine
        self.num_floating_point_operations = lambda arguments, batch: 1e9
        self.preprocess_common_state_dict = None
        self.error: BaseException | None = None
        self.saves: list[dict[str, Any]] = []
        remember(self, self.train, "forward_step", ["model"], "optimizer", self.scheduler, train_data_iterator="data")

    def train(self, forward_step_func: Any, model: Any, optimizer: Any, opt_param_scheduler: Any,
              train_data_iterator: Any) -> None:
        pass

    def save_checkpoint(self, iteration: int, model: Any, optimizer: Any, scheduler: Any, operations: float,
                        context: Any, **keywords: Any) -> None:
        if self.error is not None:
            raise self.error
        self.saves.append({"iteration": iteration, "operations": operations, "steps": scheduler.num_steps,
                           "rate": scheduler.rate, "samples": self.arguments.consumed_train_samples,
                           "validation": self.arguments.consumed_valid_samples, "state": self.machine.state})
        Path(self.arguments.save, "latest_checkpointed_iteration.txt").write_text(str(iteration))


class Left:
    """Those that are left, as far as a checkpoint goes."""

    def __init__(self, workers: int = 7) -> None:
        self.aborted = False
        self.control: Any = SimpleNamespace(size=workers)

    def abort(self) -> None:
        self.aborted = True


def last(loop: Loop, wanted: Path | None = None, skipped: tuple[int, ...] = (),
         gaps: Gaps | None = None) -> LastCheckpoint:
    beginning = beginning_of(loop)
    assert beginning is not None
    return LastCheckpoint(loop, beginning, wanted and str(wanted), lambda groups: nullcontext(),
                          lambda folder, iteration: nullcontext(), lambda done: 2 * done, gaps or Gaps(),
                          lambda: skipped)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_last, "count", lambda group, *flags: [int(flag) for flag in flags])


def test_steps_that_fp16_has_left_out_are_none_of_the_schedulers(tmp_path: Path):
    """Nor is one of an iteration behind the checkpoint's."""
    loop = Loop(tmp_path)
    last(loop, skipped=(0, 1, 3)).write(Left(), 2)
    (saved,) = loop.saves
    assert (saved["steps"], saved["samples"]) == (5 * BATCH, 7 * BATCH)


@pytest.mark.parametrize(("committed", "iteration", "read", "evaluations"), [(0, 6, 2, 1), (1, 8, 4, 1), (2, 9, 5, 2)])
def test_iterations_that_the_loop_passes_over_count_and_are_not_trained(
        tmp_path: Path, committed: int, iteration: int, read: int, evaluations: int):
    """It passes over its 5th and its 7th, and the last one trained is the checkpoint's: what the loop passes over
    behind that is passed over again."""
    loop, gaps = Loop(tmp_path), Gaps()
    loop.arguments.iterations_to_skip = [4, 6]
    for number in (0, 2):  # micro-batches trained before
        gaps.add(number, 2)
    last(loop, gaps=gaps).write(Left(), committed)
    (saved,) = loop.saves
    assert saved["iteration"] == iteration
    assert (saved["samples"], saved["steps"]) == ((4 + read) * BATCH, (4 + committed + 1) * BATCH)
    assert saved["validation"] == (2 + 2 * evaluations) * BATCH


@pytest.mark.parametrize("ahead", [-3, -1, 0, 1])
def test_it_holds_the_counts_of_the_committed_iteration_wherever_the_loop_is(tmp_path: Path, ahead: int):
    loop = Loop(tmp_path)
    loop.scheduler.step((3 + ahead) * BATCH)
    loop.arguments.consumed_train_samples += (3 + ahead) * BATCH
    assert last(loop).write(Left(), 2) == f"{tmp_path}/iter_0000007"
    assert loop.saves == [{"iteration": 7, "operations": 7e9, "steps": 7 * BATCH, "rate": 1 / (1 + 7 * BATCH),
                           "samples": 7 * BATCH, "validation": 4 * BATCH, "state": Run.NOT_RUNNING_YET}]


def test_what_the_loop_has_saved_just_now_is_the_last_checkpoint_and_another_job_s_stays_as_it_is(tmp_path: Path):
    loop = Loop(tmp_path)
    own = last(loop)
    with own.saving(7):
        loop.save_checkpoint(7, None, None, loop.scheduler, 0.0, {})
    assert own.write(Left(), 2) == f"{tmp_path}/iter_0000007" and len(loop.saves) == 1
    with pytest.raises(RecycleError, match="iter_0000007 is there already, of an earlier job"):
        last(loop).write(Left(), 2)
    with own.saving(7):
        pass  # again, and cut short: it was whole before
    assert own.write(Left(), 2) == f"{tmp_path}/iter_0000007"


def test_one_that_was_cut_short_is_written_again_and_a_named_folder_counts_more_than_the_loop_s(tmp_path: Path):
    loop = Loop(tmp_path)
    own = last(loop)
    with pytest.raises(OSError, match="gone"), own.saving(7):
        raise OSError("gone")
    assert own.write(Left(), 2) and len(loop.saves) == 1
    (tmp_path / "other").mkdir()
    assert last(loop, tmp_path / "other").write(Left(), 2) == f"{tmp_path}/other/iter_0000007" and len(loop.saves) == 2


def test_without_a_folder_and_where_all_workers_are_needed_it_says_so(tmp_path: Path):
    with pytest.raises(RecycleError, match="give --save DIR, or --recycle-emergency-checkpoint DIR"):
        last(Loop(None)).write(Left(), 2)
    loop = Loop(tmp_path)
    loop.arguments.data_parallel_random_init = True
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(RecycleError, match=f"needs all workers.* the newest one in {tmp_path} is of iteration 5"):
        last(loop).write(Left(), 2)
    assert last(loop).write(Left(8), 2)


@pytest.mark.parametrize(("error", "says"), [
    (OSError(28, "No space left"), "no space left on /.*while writing checkpoint .*/iter_0000007"),
    (AssertionError("shards"), "shards"),
    (CheckpointException("write", {3: (RuntimeError("Worker failure: [Errno 28] No"), None)}), "no space left on /"),
    (CheckpointException("write", {3: (ValueError("a plan"), None)}), "ValueError: a plan")])
def test_whoever_cannot_write_frees_those_that_wait_for_it(tmp_path: Path, error: BaseException, says: str):
    loop, left = Loop(tmp_path), Left()
    loop.error = error
    with pytest.raises(Exception, match=says):
        last(loop).write(left, 2)
    assert left.aborted and not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [RuntimeError("gloo: connection closed by peer"), CheckpointException("write", {})])
def test_who_is_freed_so_has_nothing_to_say(tmp_path: Path, error: BaseException):
    loop = Loop(tmp_path)
    loop.error = error
    assert last(loop).write(Left(), 2) == ""
