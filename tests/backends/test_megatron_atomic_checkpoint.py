"""Megatron-LM's checkpoint gets its name when all of it is there, on a stand-in for its module of checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_recycle.backends.megatron.atomic_checkpoint import TRACKER, aside, opener, place_of, remove_parts
from megatron_recycle.errors import GenerationOver


class Stock(SimpleNamespace):
    """As `megatron.training.checkpointing` does: parts, then the tracker's file.

    ``by``: the name under which it has what opens files: "open_file", or since core 0.19 "maybe_msc".
    """

    def __init__(self, by: str = "open_file") -> None:
        self.logged: list[str] = []
        files = open if by == "open_file" else SimpleNamespace(open=open, os=os)
        super().__init__(
            get_checkpoint_name=lambda checkpoints_path, iteration, release=False, return_base_dir=False: os.path.join(
                checkpoints_path, "release" if release else f"iter_{iteration:07d}",
                *([] if return_base_dir else ["mp_rank_00"])),
            **{by: files},
            wandb_utils=SimpleNamespace(on_save_checkpoint_success=lambda path, *_: self.logged.append(path)))

    def save(self, folder: Path, iteration: int, parts: int = 2) -> None:
        for part in range(parts):
            path = Path(self.get_checkpoint_name(str(folder), iteration), f"part{part}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{iteration}")
        with opener(self)(str(folder / TRACKER), "w") as file:
            file.write(str(iteration))
        self.wandb_utils.on_save_checkpoint_success(self.get_checkpoint_name(str(folder), iteration), "tracker")


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("by", ["open_file", "maybe_msc"])
def test_parts_lie_beside_until_the_manifest_has_it_and_names_come_last(tmp_path: Path, by: str):
    stock, seen = Stock(by), []
    names = {**vars(stock)}

    def whole(place: str) -> None:
        seen.append((place, entries(tmp_path)))

    with aside(stock, str(tmp_path), 4, "g1", whole):
        stock.save(tmp_path, 4)
        # As --save-retain-interval asks, to remove the one before.
        before = stock.get_checkpoint_name(str(tmp_path), iteration=2, return_base_dir=True)
        assert before == f"{tmp_path}/iter_0000002"
        assert by == "open_file" or stock.maybe_msc.os is os
    assert seen == [(f"{tmp_path}/iter_0000004", [".iter_0000004.g1", f"{TRACKER}.part"])], "no more is written"
    assert entries(tmp_path) == ["iter_0000004", TRACKER] and (tmp_path / TRACKER).read_text() == "4"
    assert stock.logged == [f"{tmp_path}/iter_0000004/mp_rank_00"]
    assert vars(stock) == names, "as it was"


@pytest.mark.parametrize("dies", ["in a part", "before the manifest"])
def test_a_try_that_is_cut_short_leaves_the_one_before_and_goes_with_the_next(tmp_path: Path, dies: str):
    stock = Stock()
    with aside(stock, str(tmp_path), 4, "g1", lambda place: None):
        stock.save(tmp_path, 4)

    def over(place: str) -> None:
        raise GenerationOver("over")

    for again in (4, 6):  # also where it was to take the place of one of the same name
        with pytest.raises((GenerationOver, OSError)), aside(stock, str(tmp_path), again, "g1", over):
            if dies == "in a part":
                Path(stock.get_checkpoint_name(str(tmp_path), again)).mkdir(parents=True)
                raise OSError("gone")
            stock.save(tmp_path, again, parts=3)
        assert (tmp_path / TRACKER).read_text() == "4"
        assert entries(tmp_path / "iter_0000004" / "mp_rank_00") == ["part0", "part1"]
        with aside(stock, str(tmp_path), again, "g2", lambda place: None):
            stock.save(tmp_path, again, parts=2)
        (tmp_path / TRACKER).write_text("4")
    assert entries(tmp_path) == ["iter_0000004", "iter_0000006", TRACKER]


def test_other_files_and_other_folders_are_as_in_stock(tmp_path: Path):
    stock, other = Stock(), tmp_path / "other"
    with aside(stock, str(tmp_path), 4, "g1", pytest.fail):
        assert stock.get_checkpoint_name(str(other), 4) == f"{other}/iter_0000004/mp_rank_00"
        with stock.open_file(str(tmp_path / "progress.txt"), "w") as file:
            file.write("x")
    with aside(stock, "msc://bucket/x", 4, "g1", pytest.fail):
        assert stock.get_checkpoint_name("msc://bucket/x", 4, return_base_dir=True) == "msc://bucket/x/iter_0000004"


def test_of_one_that_cannot_be_written_nothing_is_left_and_what_is_whole_stays(tmp_path: Path):
    """Its namer may have died in a try before."""
    stock = Stock()
    whole = tmp_path / ".iter_0000004.g1"
    whole.mkdir()
    with pytest.raises(OSError, match="full"), aside(stock, str(tmp_path), 4, "g2", lambda place: None):
        Path(stock.get_checkpoint_name(str(tmp_path), 4)).mkdir(parents=True)
        with stock.open_file(str(tmp_path / TRACKER), "w"):
            raise OSError("full")
    remove_parts(place_of(str(tmp_path), 4))
    assert entries(tmp_path) == [whole.name]
