"""Warnings, errors and closing lines name a section of the runbook, and each section is there."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_recycle import cli
from megatron_recycle.observe.log import get_logger
from megatron_recycle.observe.runbook import ENDED, SECTIONS, section, with_section
from megatron_recycle.tools import runbook

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_recycle"
TOLD_BY_OTHERS = re.compile(r"(?:megatron-)?recycle: %s(?: \(%s\); training goes on)?")
"""Messages whose words are a value's: those of the places that make the value."""
LEVELS = ("warning", "error", "critical")


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))
            if path.name != "runbook.py" and path.relative_to(PACKAGE).parts[0] != "tools"}


def words(node: ast.expr) -> str:
    """A message as it is written, with a mark for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.BinOp):
        return words(node.left) + words(node.right)
    return "..."


def warnings() -> Iterator[tuple[str, str]]:
    """(place, text) of every warning and error that the plugin's loggers are given in so many words."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args and (
                    node.func.attr in LEVELS) and "log" in ast.unparse(node.func.value).lower():
                text = words(node.args[0])
                if not TOLD_BY_OTHERS.fullmatch(text):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def test_every_warning_and_error_has_a_section():
    found = list(warnings())
    assert len(found) > 40
    assert not [f"{place}: {text}" for place, text in found if section(text) is None]


def test_every_section_that_is_named_is_there():
    assert {*SECTIONS, ENDED} <= set(runbook.sections(runbook.text()))


def test_every_section_is_named_by_something():
    texts = "\n".join(text for tree in trees().values() for node in ast.walk(tree)
                      if isinstance(node, ast.expr) and (text := words(node)) != "...")
    idle = [(name, pattern) for name, patterns in SECTIONS.items() for pattern in patterns
            if not re.search(pattern, texts)]
    assert not idle, "these fit no message any more"


@pytest.mark.parametrize(("text", "name"), [
    ("stage 1 has lost its last worker (1:1: exit), so nobody holds its parameters any more", "lost-stage"),
    ("recycle: warning: stage 1 has one worker left (0:1 on n3); what only it has is lost with it", "last-copy"),
    ("the coordinator at 10.0.0.5:29500 cannot be reached for 60 s (refused)", "unreachable"),
    ("rank 3 ended with status 2 before training began: see worker-3.log (SyntaxError)", "not-started"),
    ("micro-batch 1.2 of iteration 7 fails on every worker: ValueError", "script-failed"),
    ("1:1, the only one that holds stage 1, has failed in F1.2 of iteration 7: ValueError: no", "script-failed"),
    ("the recovery has failed on 1:1, 0:1: no route", "cannot-go-on"),
    ("the job has finished", None),
])
def test_closing_lines_are_told_apart(text: str, name: str | None):
    assert section(text) == name
    assert with_section(text) == (text if name is None else f"{text} [recycle runbook {name}]")
    assert with_section(with_section(text)) == with_section(text)


def test_a_warning_names_its_section_on_the_screen_and_an_ordinary_line_does_not(capsys: pytest.CaptureFixture[str]):
    get_logger().warning("megatron-recycle: NO CHECKPOINT after iteration %d: the disk is full", 7)
    get_logger().info("megatron-recycle: the checkpoint of iteration 7 is there")
    get_logger().error("megatron-recycle: %s is over by %s", "1:1", 7)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith("NO CHECKPOINT after iteration 7: the disk is full [recycle runbook checkpoints]")
    assert "[recycle" not in second and third.endswith("1:1 is over by 7")


def test_the_command_prints_a_section_and_names_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["runbook", "last-copy"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("## Last copy\n") and "](" not in out
    assert cli.main(["runbook"]) == 0
    assert "job-ended" in capsys.readouterr().out
    assert cli.main(["runbook", "last-copi"]) == 2
    assert "did you mean last-copy?" in capsys.readouterr().err
