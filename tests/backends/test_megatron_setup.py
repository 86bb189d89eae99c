"""What Megatron-LM's loop gets in the place of its own functions, on a stand-in for it, in this process."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_recycle.backends.megatron import training as megatron_setup
from megatron_recycle.backends.megatron.training import LOOP
from megatron_recycle.backends.options import Options
from megatron_recycle.runtime.setup_record import SetUpRecorder, SetUpReplay


class Schedule:
    """A scheduler of learning rates, as far as a checkpoint goes."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.steps, "max_lr": 0.1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["num_steps"]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its newest checkpoint is of iteration `newest`."""
    found: Any = ModuleType(LOOP)
    found.newest, found.told = 4, []
    found.arguments = SimpleNamespace(consumed_train_samples=0, finetune=False, lr=0.1, tensors=object())
    found.get_args = lambda: found.arguments
    found.update_num_microbatches = lambda consumed_samples, verbose: found.told.append(consumed_samples)
    found.one_logger_utils = SimpleNamespace(get_one_logger=lambda: "writer")

    def load_checkpoint(model: Any, optimizer: Any, scheduler: Any, **keywords: Any) -> tuple[int, float]:
        found.arguments.consumed_train_samples, scheduler.steps = 16 * found.newest, 16 * found.newest
        optimizer.param_groups[0]["max_lr"] = 0.3
        return found.newest, 1e9 * found.newest

    found.load_checkpoint = load_checkpoint
    found.train = lambda: None
    found.dummy_train_step = lambda data_iterator: None
    monkeypatch.setitem(sys.modules, LOOP, found)
    monkeypatch.setitem(sys.modules, "megatron.core.timers",
                        SimpleNamespace(Timers=SimpleNamespace(_get_elapsed_time_all_ranks=lambda *_: None)))
    return found


def load(loop: Any, setup: Any) -> tuple[Any, Schedule, dict[str, Any]]:
    optimizer, schedule = SimpleNamespace(param_groups=[{"params": [], "max_lr": 0.1}]), Schedule()
    megatron_setup.install(Options(setup=setup))
    megatron_setup.install(Options(setup=setup))  # `--recycle` is read after `recycle run` has switched it on
    return loop.load_checkpoint([], optimizer, schedule, checkpointing_context={}), schedule, optimizer.param_groups[0]


def test_one_that_joins_begins_where_the_job_began_and_not_at_the_newest_checkpoint(loop, monkeypatch):
    recorder = SetUpRecorder()
    begun, schedule, group = load(loop, recorder)
    assert begun == (4, 4e9) and schedule.steps == 64 and group["max_lr"] == 0.3
    record = json.loads(json.dumps(recorder.close()))
    loop.newest, loop.arguments.consumed_train_samples = 20, 0
    monkeypatch.setenv("RECYCLE_JOIN", "1")
    again, schedule, group = load(loop, SetUpReplay(record))
    assert again == (4, 4e9) and schedule.steps == 64 and group["max_lr"] == 0.3
    assert loop.arguments.consumed_train_samples == 64 and loop.told == [64]
    assert loop.get_one_logger() is None and loop.one_logger_utils.get_one_logger() is None


def test_its_beginning_and_rates_are_compared_by_the_names_of_flags(loop):
    loop.arguments.iteration = 4
    told = megatron_setup.settings()
    assert told["--lr"] == 0.1 and told["the loop's first iteration"] == 4
