"""The run's folder is one user's alone, and nothing that lies in it leads its files elsewhere."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_recycle.control import Journal, JournalError
from megatron_recycle.errors import ConfigError
from megatron_recycle.launch.child import Child
from megatron_recycle.launch.run_folder import make, prepare
from megatron_recycle.observe.events import EventLog


@pytest.fixture(autouse=True)
def careless_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def run(log: Path) -> str | None:
    """A process with this log; returns why it has none."""
    child = Child(["true"], os.environ, log)
    child.wait(60.0)
    child.release()
    return child.unlogged


def test_whatever_the_umask_nobody_else_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run"
    prepare(folder)
    run(folder / "worker-0.log")
    EventLog(folder / "events.jsonl", log=False).close()
    assert mode(folder) == 0o700 and mode(folder.parent) == 0o755
    assert {path.name: mode(path) for path in folder.iterdir()} == {"worker-0.log": 0o600, "events.jsonl": 0o600}


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o775)
    with pytest.raises(ConfigError, match=r"others can write to the run's folder .*chmod go-w"):
        make(tmp_path / "run")
    (tmp_path / "run").chmod(0o755)
    make(tmp_path / "run")


def test_a_folder_or_a_link_to_it_that_somebody_else_has_made_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    (tmp_path / "theirs").mkdir(mode=0o755)
    os.chown(tmp_path / "theirs", 12345, -1)
    (tmp_path / "ours").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("ours")
    make(tmp_path / "link")
    os.chown(tmp_path / "link", 12345, -1, follow_symlinks=False)
    for name in ("theirs", "link"):
        with pytest.raises(ConfigError, match="belongs to another user"):
            make(tmp_path / name)


def test_links_in_it_move_aside_and_are_never_written_through(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir(mode=0o700)
    names = ("worker-1.log", "coordinator.log", "journal.jsonl", "events.jsonl", "join.json", "plans")
    for name in names:
        (folder / name).symlink_to(elsewhere / name)  # where there is nothing
    prepare(folder)
    (aside,) = folder.iterdir()
    assert {path.name for path in aside.iterdir()} == set(names) and aside.name.startswith("before-")
    (folder / "worker-1.log").symlink_to(elsewhere)
    assert run(folder / "worker-1.log") == f"{folder / 'worker-1.log'} cannot be written (it is a link)"
    with pytest.raises(OSError, match="symbolic links"):
        EventLog(folder / "worker-1.log", log=False)
    with pytest.raises(JournalError, match="is a link"):
        Journal.reopen(folder / "worker-1.log")
    assert not elsewhere.exists()


def test_two_earlier_runs_of_the_same_second_keep_a_folder_each(tmp_path: Path) -> None:
    for text in ("first", "second"):
        prepare(tmp_path / "run")
        (tmp_path / "run" / "events.jsonl").write_text(text)
        os.utime(tmp_path / "run" / "events.jsonl", (1e9, 1e9))
    prepare(tmp_path / "run")
    assert sorted(path.read_text() for path in tmp_path.glob("run/before-*/events.jsonl")) == ["first", "second"]
