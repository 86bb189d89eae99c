"""TensorBoard and Weights & Biases of Megatron-LM's loop are written by whoever writes its log line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_recycle.backends.megatron.writers import VARIABLES, Writers, name_run, unopened


class Board:
    def __init__(self, folder: str) -> None:
        self.folder, self.kept, self.rows = folder, list[tuple[str, float, int]](), list[tuple[str, float, int]]()

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.kept.append((name, value, iteration))

    def flush(self) -> None:
        self.rows, self.kept = [*self.rows, *self.kept], []


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As Megatron-LM's module: it opens a writer on the last rank alone, and not twice."""
    module: Any = ModuleType(VARIABLES)
    opened: dict[str, Any] = {"tensorboard": None, "wandb": None}

    def set_board(arguments: Any) -> None:
        assert opened["tensorboard"] is None
        if arguments.rank == arguments.world_size - 1:
            opened["tensorboard"] = Board(arguments.tensorboard_dir)

    def set_wandb(arguments: Any) -> None:
        raise ValueError("Please specify the wandb experiment name!")

    module.get_tensorboard_writer, module.get_wandb_writer = (lambda name=name: opened[name] for name in opened)
    module._set_tensorboard_writer, module._set_wandb_writer = set_board, set_wandb
    monkeypatch.setitem(sys.modules, VARIABLES, module)
    yield module


def arguments(**others: Any) -> Any:
    return SimpleNamespace(**{"rank": 1, "world_size": 4, "tensorboard_dir": "board", "wandb_project": "",
                              "tensorboard_log_interval": 2, **others})


def test_a_worker_that_takes_over_opens_the_same_folder_and_nobody_else_writes(variables):
    turn = [False]
    writers = Writers(arguments, lambda: turn[0])
    writers.write(lambda: {"Recycle/live_workers": 4.0}, 2)
    assert writers.tensorboard() is None and variables.get_tensorboard_writer() is None
    turn[0] = True  # the last rank is gone
    for iteration in (3, 4):
        writers.write(lambda: {"Recycle/live_workers": 3.0}, iteration)
    board = writers.tensorboard()
    assert board.folder == "board"
    assert board.rows == [("Recycle/live_workers", 3.0, 4)]  # as often as the loop writes its own, and on disk
    turn[0] = False  # the last rank is back
    assert writers.tensorboard() is None


def test_a_writer_that_cannot_be_opened_is_told_once_and_training_goes_on(variables, capsys):
    writers = Writers(lambda: arguments(wandb_project="mine"), lambda: True)
    for _ in range(2):
        assert writers.wandb() is None
        writers.write(lambda: {"Recycle/live_workers": 3.0}, 2)
    told = capsys.readouterr().out
    assert told.count("WARNING") == 1 and "specify the wandb experiment name" in told


def test_a_process_that_joins_opens_nothing_until_it_is_its_turn(variables):
    given = arguments(rank=3)
    with unopened(given):
        assert not given.tensorboard_dir and not given.wandb_project
    assert variables.get_tensorboard_writer() is None and given.tensorboard_dir == "board"
    assert Writers(lambda: given, lambda: True).tensorboard().folder == "board"


@pytest.mark.parametrize(("project", "named"), [("mine", "20260101-7"), ("", None)])
def test_the_run_of_weights_and_biases_has_its_name_before_megatron_opens_it(project, named, monkeypatch):
    environ = {"RECYCLE_RUN_DIR": "/runs/20260101-7"}
    monkeypatch.setattr(os, "environ", environ)
    name_run(SimpleNamespace(wandb_project=project))
    assert environ.get("WANDB_RUN_ID") == named
