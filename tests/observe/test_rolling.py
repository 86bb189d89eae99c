"""A large event file: old ticks move away, decisions stay, and who reads along notices nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recycle.observe import rolling
from megatron_recycle.observe.events import EventLog, EventReader, read_events


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling, "LATEST", 10)
    monkeypatch.setattr(rolling, "FIRST", 5)
    monkeypatch.setattr(rolling, "FILES", 2)


def test_decisions_the_first_commits_and_the_latest_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader, told = EventReader(path), []
    with EventLog(path, log=False, most=4000) as log:
        for iteration in range(400):
            if iteration % 100 == 50:
                log.emit("decided", generation=2 + iteration // 100, out={})
            log.emit("committed", generation=1 + iteration // 100, iteration=iteration)
            log.emit("rolled_back", generation=1, iteration=iteration, worker="1:1", actions=0)
            if iteration % 7 == 0:
                told += reader.new()
    told += reader.new()
    left = read_events(path)
    assert path.stat().st_size < 12000 and len([one for one in left if one["event"] == "decided"]) == 4
    assert [one["iteration"] for one in left if one["event"] == "committed"][:5] == [0, 1, 2, 3, 4]
    assert left[-1]["iteration"] == 399 and len(list(tmp_path.glob("ticks-*.jsonl"))) == 2
    commits = [one["iteration"] for one in told if one["event"] == "committed"]
    assert commits == list(range(400)) and len([one for one in told if one["event"] == "decided"]) == 4


def test_what_cannot_be_moved_stays_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, log=False, most=2000) as log:
        (tmp_path / "events.part").mkdir()
        for iteration in range(100):
            log.emit("committed", generation=1, iteration=iteration)
    assert [one["iteration"] for one in read_events(path)] == list(range(100))


def test_a_new_file_in_the_place_of_the_old_one_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    for life in (1, 2):
        with EventLog(path, log=False) as log:
            log.emit("finished", status=life)
        if life == 1:
            assert [one["status"] for one in reader.new()] == [1]
            path.rename(tmp_path / "before")
    assert [one["status"] for one in reader.new()] == [2]
