"""Commands in README and the documentation: all are accepted, and each is run by a test or says that it is not.

A block of commands that no test runs is marked: ```console title="Not run by a test: it needs Slurm".
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_recycle import cli

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "patches" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARK = 'title="Not run by a test'
_BLOCK = re.compile(r"^```console([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PLACEHOLDERS = {"K": "1", "GRID": "6x8x16", "ADDRESS": "127.0.0.1", "ADDRESS0": "127.0.0.1"}

RUN_HERE = ("recycle doctor", "recycle doctor --stages 4 --nproc 4 --nnodes 2",
            "openssl rand -hex 16 > token && chmod 600 token")
"""Commands that need no job, which a test of this file runs as they stand."""
EXAMPLES = (
    ("recycle example deepspeed my-job", "recycle run --nproc 4 my-job/gpt_deepspeed.py --stages 2 --iterations 20"),
    ("recycle example megatron my-job",
     "recycle run --nproc 4 my-job/pretrain_gpt_megatron.py --stages 2 --iterations 20"))
"""Commands that follow each other, likewise."""
RUN_ELSEWHERE = {
    'pip install ".[deepspeed]"': ("test_packaging.py", "test_a_wheel_has_all_that_its_commands_need"),
    "recycle quickstart": ("quickstart/test_quickstart.py", "test_two_workers_are_killed_and_the_result_is"),
    "recycle run --nproc 6 train.py": ("launch/test_run.py", "test_a_killed_worker_costs_no_iteration"),
    "recycle run --worker-restarts 3": ("launch/test_restarts.py", "max_restarts"),
    "recycle run --join RUN_DIR": ("quickstart/test_recycle_joins.py", "--join"),
    "recycle run --nnodes 3 --node-rank 0": ("network/test_hosts.py", "--node-rank"),
    "recycle run --chaos allow": ("chaos/test_chaos.py", "--chaos"),
    "recycle chaos ": ("chaos/test_chaos.py", "at-iteration"),
    "recycle serve ": ("launch/test_serve.py", "serve"),
    "recycle run --coordinator ": ("launch/test_serve.py", "--coordinator"),
    "recycle run --store ": ("launch/test_store.py", "--store"),
}
"""How a command begins -> the file of the tests that run one like it on real processes, and a text in that file."""


class Block(NamedTuple):
    page: str
    marked: bool
    commands: tuple[str, ...]


def blocks() -> Iterator[Block]:
    """Every block of commands; output after a line with `$` is left out."""
    for page in PAGES:
        for info, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
            lines = text.replace("\\\n", " ").splitlines()
            if any(line.startswith("$ ") for line in lines):
                lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            commands = tuple(plain for line in lines if (plain := re.sub(r"(^|\s)#.*", "", line).strip()))
            yield Block(str(page.relative_to(ROOT)), MARK in info, commands)


BLOCKS = [*blocks()]
OURS = sorted({(block.page, found[1]) for block in BLOCKS for command in block.commands
               if (found := re.search(r"^(?:(?:\S+=|\$step|srun|docker run)\b.* )?(recycle [a-z].*)", command))})


@pytest.mark.parametrize(("page", "command"), OURS, ids=lambda value: value[:60])
def test_a_command_is_accepted(page: str, command: str, monkeypatch: pytest.MonkeyPatch):
    words = [_PLACEHOLDERS.get(word, word) for word in shlex.split(command.removesuffix("&"))][1:]
    if words[0] in cli.COMMANDS:
        monkeypatch.setattr(importlib.import_module(cli.COMMANDS[words[0]][0]), "run", lambda args: 0)
    assert cli.main(words) == 0


def test_a_block_of_commands_is_run_by_a_test_or_says_that_it_is_not():
    known = {*RUN_HERE, *itertools.chain(*EXAMPLES)}
    idle = [f"{block.page}: {command}" for block in BLOCKS if not block.marked for command in block.commands
            if command not in known and not command.startswith(tuple(RUN_ELSEWHERE))]
    assert not idle, f"run these in a test, or mark their block: ```console {MARK}: why\""


def test_the_tests_that_are_named_are_there():
    gone = [f"{file}: {text}" for file, text in RUN_ELSEWHERE.values()
            if text not in (ROOT / "tests" / file).read_text(encoding="utf-8")]
    assert not gone


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN_HERE)
def test_a_command_that_needs_no_job_does_what_the_page_shows(command: str, tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str],
                                                              monkeypatch: pytest.MonkeyPatch):
    page = next(block.page for block in BLOCKS if command in block.commands)
    shown = re.search(rf"^\$ {re.escape(command)}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if command.startswith("recycle "):
        assert cli.main(shlex.split(command)[1:]) == 0
        out = capsys.readouterr().out
    else:
        out = in_shell(command, tmp_path)
    assert all(line in out for line in (shown[1].splitlines() if shown else ()))


@pytest.mark.night
@pytest.mark.processes
@pytest.mark.parametrize("commands", EXAMPLES, ids=("deepspeed", "megatron"))
def test_an_example_is_written_and_trains(commands: tuple[str, ...], tmp_path: Path):
    outputs = [in_shell(command, tmp_path) for command in commands]
    assert "20 iterations committed" in outputs[-1]


def in_shell(command: str, folder: Path) -> str:
    """What a command prints that ends well."""
    plain = re.sub(r"^recycle\b", f"{shlex.quote(sys.executable)} -m megatron_recycle.cli", command)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(plain, shell=True, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
