"""The folder that a failed job leaves: what is in it, what is not, and that nothing hangs on it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_recycle.membership.protocol import End
from megatron_recycle.observe.stacks import stacks, write_stacks
from megatron_recycle.tools import post_mortem

END = End(1, "stage 1 has lost its last worker")
ENVIRON = {"RECYCLE_TOKEN": "0123456789abcdef", "RECYCLE_GUARD": "memory", "HOME": "/root", "NCCL_DEBUG": "INFO"}


def test_what_an_engineer_needs_is_in_one_folder_and_no_secret(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(post_mortem, "_MOST", 10)
    (tmp_path / "events.jsonl").write_text("x" * 100 + "the end")
    (tmp_path / "worker-0.log").write_text("short")
    (tmp_path / "join.json").write_text('{"token": "0123456789abcdef"}')
    (tmp_path / "worker-1.log").symlink_to("/etc/passwd")
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "a.json").write_text("{}")
    write_stacks(tmp_path, 3)
    folder = post_mortem.collect(tmp_path, END, ENVIRON, "node/1")
    assert folder is not None
    stack = f"stack-3-{os.getpid()}.txt"
    names = {"events.jsonl", "worker-0.log", "plans", "about-node-1.json", stack}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "events.jsonl").read_text() == "xxxthe end"
    assert "test_post_mortem.py" in (folder / stack).read_text()
    about = json.loads((folder / "about-node-1.json").read_text())
    assert about["environment"] == {"NCCL_DEBUG": "INFO", "RECYCLE_GUARD": "memory"} and about["versions"]["python"]
    assert "0123456789abcdef" not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())


def test_a_folder_that_cannot_be_written_holds_nothing_up(tmp_path: Path):
    (tmp_path / "post-mortem").write_text("a file in its place")
    write_stacks(tmp_path, 0)
    assert post_mortem.collect(tmp_path, END, {}, "node/0") is None


def test_stacks_are_sent_though_there_is_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    assert "test_stacks_are_sent_though" in stacks()
