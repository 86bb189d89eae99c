"""DeepSpeed's monitors are written by whoever is the first live worker."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.monitor import comet, csv_monitor, monitor, tensorboard, wandb
from deepspeed.monitor.config import DeepSpeedMonitorConfig

from megatron_recycle.backends.deepspeed.monitors import Monitors, name_run


class Worker:
    """One of a job's, at one step of the script."""

    def __init__(self, rank: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.is_logging_rank = rank == 0
        self.busy = False
        config = DeepSpeedMonitorConfig(csv_monitor={"enabled": True, "output_path": str(folder), "job_name": "job"})
        with patch.context() as built:
            for module in (monitor, tensorboard, csv_monitor, wandb, comet):
                built.setattr(module, "dist", SimpleNamespace(get_rank=lambda: rank))
            self.monitors = Monitors(monitor.MonitorMaster(config), lambda: self.is_logging_rank, lambda: self.busy)


def rows(folder: Path, name: str) -> list[list[str]]:
    with (folder / "job" / f"{name}.csv").open() as file:
        return list(csv.reader(file))


def test_when_the_writer_dies_the_next_one_writes_on_into_the_same_file(tmp_path: Path, monkeypatch):
    first, second = (Worker(rank, tmp_path, monkeypatch) for rank in range(2))
    for samples in (8, 16):
        for worker in (first, second):
            worker.monitors.write([("Train/Samples/train_loss", 1 / samples, samples)])
    second.is_logging_rank = True  # the other one is gone
    for samples in (24, 32):
        second.monitors.write([("Train/Samples/train_loss", 1 / samples, samples)])
    assert rows(tmp_path, "Train_Samples_train_loss") == [["step", "train_loss"], *(
        [str(samples), str(1 / samples)] for samples in (8, 16, 24, 32))]


def test_what_the_engine_writes_inside_an_iteration_is_left_out_and_the_scripts_own_numbers_are_written(
        tmp_path: Path, monkeypatch):
    worker = Worker(0, tmp_path, monkeypatch)
    worker.busy = True
    worker.monitors.write_events([("lr", 0.5, 8)])  # of a step that may be made again
    worker.busy = False
    worker.monitors.write_events([("own", 2.0, 8)])
    assert rows(tmp_path, "own") == [["step", "own"], ["8", "2.0"]]
    assert not (tmp_path / "job" / "lr.csv").exists()


@pytest.mark.parametrize("section", [{"enabled": True}, {"enabled": False}, None])
def test_the_run_of_weights_and_biases_has_its_name_before_deepspeed_opens_it(section, monkeypatch):
    environ = {"RECYCLE_RUN_DIR": "/runs/20260101-7"}
    monkeypatch.setattr(os, "environ", environ)
    name_run({} if section is None else {"wandb": section})
    names = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL")
    wanted = ("20260101-7", "allow", "1") if section and section["enabled"] else (None,) * 3
    assert tuple(map(environ.get, names)) == wanted
