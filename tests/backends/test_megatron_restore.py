"""A way back to a checkpoint of this job leaves Megatron-LM's loop where it is, on stand-ins for its modules."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from megatron_recycle.backends.megatron import restore
from megatron_recycle.backends.megatron.final_checkpoint import Beginning
from megatron_recycle.errors import RecycleError


class Stock:
    """Megatron-LM's modules of training and of checkpoints, of a job that was begun with --finetune from elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.arguments = SimpleNamespace(
            load="elsewhere", ckpt_step=None, finetune=True, no_load_optim=True, no_load_rng=False, ckpt_format="torch",
            consumed_train_samples=96, save=str(folder), no_save_optim=False, data_parallel_random_init=False,
            use_distributed_optimizer=False)
        self.loaded_iteration: int | None = 0
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.5, "weight_decay": 0.1, "params": []}])
        self.beginning = Beginning({"model": ["model"], "optimizer": self.optimizer}, 2, 0, 0, 0.0, 0)
        self.read: list[str] = []
        self.counted: list[int] = []
        self.error: BaseException | None = None
        self.get_args = lambda: self.arguments
        self.get_loaded_iteration = lambda: self.loaded_iteration
        self.update_num_microbatches = lambda consumed_samples, verbose: self.counted.append(consumed_samples)
        self.get_checkpoint_name = lambda path, number: os.path.join(path, f"iter_{number:07d}", "mp_rank_00")
        self.read_metadata = lambda tracker: (8, False)

    def set_loaded_iteration(self, iteration: int | None) -> None:
        self.loaded_iteration = iteration

    def load_checkpoint(self, model: Any, optimizer: Any, scheduler: Any) -> tuple[int, float]:
        given = self.arguments
        assert (model, optimizer, scheduler) == (["model"], self.optimizer, None), "the scheduler is the loop's"
        assert not given.finetune and not given.no_load_optim and given.no_load_rng
        iteration = self.read_metadata("tracker")[0]
        assert iteration == given.ckpt_step
        self.read.append(self.get_checkpoint_name(given.load, iteration))
        given.consumed_train_samples, given.late = 64, True
        self.loaded_iteration = iteration
        self.optimizer.param_groups = [{"lr": 0.25, "weight_decay": 0.1, "params": []}]
        if self.error is not None:
            raise self.error
        return iteration, 1.0


def test_what_is_the_loop_s_own_is_as_before_and_what_no_longer_has_its_name_is_read_where_it_is(tmp_path: Path):
    stock = Stock(tmp_path)
    place, before = f"{tmp_path}/iter_0000006", dict(vars(stock.arguments))
    assert restore.possible(stock.arguments)
    assert restore.load(stock, stock, stock.beginning, place, "g3.1") == 6
    (tmp_path / ".iter_0000006.g3.1").mkdir()  # who was to name it has died
    assert restore.load(stock, stock, stock.beginning, place, "g3.1") == 6
    assert stock.read == [f"{place}/mp_rank_00", f"{tmp_path}/.iter_0000006.g3.1/mp_rank_00"]
    assert vars(stock.arguments) == before and stock.loaded_iteration == 0 and stock.counted == [96, 96]
    assert stock.optimizer.param_groups[0]["lr"] == 0.5
    assert stock.read_metadata("tracker") == (8, False)


@pytest.mark.parametrize(("error", "says"), [
    (SystemExit(), "cannot be read"), (CheckpointException("read", {1: (OSError("cut"), None)}), "OSError: cut")])
def test_a_checkpoint_that_cannot_be_read_is_an_error_whatever_stock_raises(tmp_path: Path, error, says):
    stock = Stock(tmp_path)
    stock.error, before = error, dict(vars(stock.arguments))
    with pytest.raises((RecycleError, RuntimeError), match=says):
        restore.load(stock, stock, stock.beginning, f"{tmp_path}/iter_0000006", "g3.1")
    assert vars(stock.arguments) == before


@pytest.mark.parametrize("common", ["common_state/shard_0_1", "common.pt"])
def test_what_all_ranks_have_in_common_is_looked_for_where_the_version_has_it(tmp_path: Path, common):
    stock, place = Stock(tmp_path), tmp_path / "iter_0000004"
    stock.get_checkpoint_name = lambda path, number, return_base_dir: str(place)
    inside = {common: torch.zeros(1)} if common != "common.pt" else {}
    checkpoint.save({"weight": torch.zeros(3), **inside}, storage_writer=checkpoint.FileSystemWriter(place),
                    no_dist=True)
    (place / "metadata.json").write_text("{}")
    assert (restore._unreadable(stock, str(tmp_path), 4) is None) == bool(inside)
    (place / "common.pt").write_bytes(b"x")
    assert restore._unreadable(stock, str(tmp_path), 4) is None


@pytest.mark.parametrize("given", [
    {"no_save_optim": True}, {"data_parallel_random_init": True}, {"ckpt_format": "fsdp_dtensor"}])
def test_checkpoints_without_all_that_training_needs_are_not_gone_back_to(tmp_path: Path, given):
    stock = Stock(tmp_path)
    vars(stock.arguments).update(given)
    assert not restore.possible(stock.arguments)
