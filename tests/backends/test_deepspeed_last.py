"""Whoever cannot write its part of a last checkpoint keeps nobody waiting who has come to write it too."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_recycle.backends.deepspeed import checkpoints
from megatron_recycle.backends.deepspeed.checkpoints import Checkpoints
from megatron_recycle.errors import SaveError
from megatron_recycle.plan import Worker

LIMIT = 40.0  # seconds


class Pair:
    """Two workers of one stage, as threads; `_count` of both meet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, written: list[Checkpoints]) -> None:
        self._barrier = threading.Barrier(2)
        self._told: list[tuple[bool, ...]] = []
        self._checkpoints = written
        monkeypatch.setattr(checkpoints, "count", self._count)

    def _count(self, group: Any, *flags: bool) -> list[int]:
        self._told.append(flags)
        self._barrier.wait(LIMIT)
        sums = [sum(column) for column in zip(*self._told[-2:], strict=True)]
        self._barrier.wait(LIMIT)
        return sums

    def write(self) -> list[str | Exception]:
        found: dict[int, str | Exception] = {}

        def work(pipeline: int) -> None:
            peers = [Worker(0, 0), Worker(1, 0)]
            groups: Any = SimpleNamespace(me=peers[pipeline], members=peers, part=0, peers=lambda stage: peers,
                                          control=None)
            try:
                found[pipeline] = self._checkpoints[pipeline].write_last(groups)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is looked at
                found[pipeline] = error

        threads = [threading.Thread(target=work, args=(pipeline,)) for pipeline in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LIMIT)
        return [found[pipeline] for pipeline in range(2)]


def checkpoint(folder: Path | None) -> Checkpoints:
    return Checkpoints(SimpleNamespace(global_steps=3), folder and str(folder))  # type: ignore[arg-type]


def written(self: Checkpoints, groups: Any, folder: str, hidden: Path, tag: str) -> None:
    hidden.mkdir(exist_ok=True)


@pytest.fixture(autouse=True)
def no_files_of_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoints, "_write_stage", written)


def test_latest_is_written_when_all_files_are_there(monkeypatch, tmp_path: Path):
    places = Pair(monkeypatch, [checkpoint(tmp_path), checkpoint(tmp_path)]).write()
    assert places == [f"{tmp_path}/global_step3"] * 2 and (tmp_path / "latest").read_text() == "global_step3"


@pytest.mark.parametrize("fails", ["_write_stage", "latest"])
def test_the_one_that_cannot_write_says_why_and_the_other_one_hears_of_it(monkeypatch, tmp_path: Path, fails: str):
    if fails == "latest":
        (tmp_path / "latest.part").mkdir()  # so that no file can be made there
    else:
        def fails_first(self: Checkpoints, groups: Any, *given: Any) -> None:
            if groups.me == Worker(0, 0):
                raise OSError(28, "No space left on device")
            written(self, groups, *given)

        monkeypatch.setattr(Checkpoints, "_write_stage", fails_first)
    failed, other = Pair(monkeypatch, [checkpoint(tmp_path), checkpoint(tmp_path)]).write()
    assert isinstance(failed, SaveError) and other == "" and not (tmp_path / "latest").exists()
    assert f"while writing checkpoint {tmp_path}/global_step3" in str(failed)
    assert not [*tmp_path.glob(".*")], "nothing is left of it"


def test_one_that_came_in_after_the_scripts_own_checkpoint_leaves_it_to_the_others_to_say_where_that_is(
        monkeypatch, tmp_path: Path):
    there, came = checkpoint(None), checkpoint(None)
    there.seen(tmp_path)
    there.saved("mine")
    came.seen(tmp_path)
    assert Pair(monkeypatch, [there, came]).write() == [f"{tmp_path}/mine", ""]
