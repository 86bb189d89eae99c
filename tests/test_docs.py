"""The documentation names what is there: functions on the path of a failure, modules, links between pages."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_recycle"
PATH = ROOT / "docs" / "path-of-a-failure.md"
README = ROOT / "README.md"
PAGES = (README, ROOT / "patches" / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md",
         ROOT / "tests" / "README.md",
         *sorted((ROOT / "docs").glob("*.md")))
MOST_FILES = 27
"""Of the path of a failure. `scripts/count.py` has the aim."""
MOST_WORDS, FIRST_SCREEN = 900, 12
"""Of README: words that are more than signs, and lines that are seen without scrolling."""


def hops() -> Iterator[tuple[str, list[str]]]:
    """File (the last of several) and functions of each hop on the path of a failure."""
    for line in PATH.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 5 and re.fullmatch(r"\d+", cells[1]):
            yield cells[3].strip("`").rpartition("`")[2], re.findall(r"`([\w.]+)`", cells[4])


def functions(file: Path) -> set[str]:
    """Functions and methods of a module, as `name` and `Class.name`."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def test_every_function_on_the_path_of_a_failure_exists():
    missing = [f"{file}: {name}" for file, names in hops() for name in names
               if name not in functions(PACKAGE / file)]
    assert not missing, f"bring {PATH.name} up to date: {', '.join(missing)}"


def test_the_path_of_a_failure_leads_through_no_more_files():
    files = {file for file, _ in hops()}
    assert len(files) <= MOST_FILES, sorted(files)


def test_readme_takes_two_minutes_and_begins_with_the_status():
    text = README.read_text(encoding="utf-8")
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= MOST_WORDS
    screen = " ".join(text.splitlines()[:FIRST_SCREEN])
    assert "pre-release" in screen and "gloo" in screen and "NCCL" in screen


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_files_that_are_there(page: Path):
    text = page.read_text(encoding="utf-8")
    links = {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target}
    gone = sorted(link for link in links if link and not (page.parent / link).exists())
    for name in re.findall(r"`((?:megatron_recycle|scripts|tests|docs)/[\w./-]+)`", text):
        gone += [name] if not (ROOT / name).exists() else []
    rooms = "|".join(path.name for path in PACKAGE.iterdir() if path.is_dir())
    for name in re.findall(rf"`((?:{rooms})/[\w/]*\.py)`", text):
        gone += [name] if not (PACKAGE / name).exists() else []
    assert not gone, f"{page.name} names {', '.join(gone)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_log_lines_of_libraries(page: Path):
    """They come along when a program's output is pasted. Those that a page shows are in a block of code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^.*\[(?:DEBUG|INFO|WARNING|ERROR)\].*$|^[\w/.-]+\.py:\d+: \w*Warning: .*$", text, re.MULTILINE)
    assert not lines, f"{page.name} has {lines}"


def test_docstrings_name_modules_that_are_there():
    rooms = "|".join(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")
    gone = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(rf"`((?:{rooms})\.[a-z0-9_]+)[.\w]*(?:\(\))?`", file.read_text(encoding="utf-8")):
            place = PACKAGE / name.replace(".", "/")
            exported = place.parent / "__init__.py"
            known = place.is_dir() or place.with_suffix(".py").exists() or name.split(".")[1] in exported.read_text()
            gone += [] if known or name.endswith((".log", ".jsonl")) else [f"{file.relative_to(ROOT)}: {name}"]
    assert not gone, ", ".join(gone)


def test_the_guide_to_the_tests_names_every_folder():
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "tests" / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", " ".join(rows)))
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= named, f"tests/README.md says nothing of {', '.join(sorted(folders - named))}"


def test_the_table_of_slow_workers_is_the_one_of_the_code():
    made = runpy.run_path(str(ROOT / "scripts" / "bench" / "slowness.py"))["table"]()
    assert made in (ROOT / "docs" / "slowness.md").read_text(), "paste the output of python scripts/bench/slowness.py"


def test_the_images_have_all_that_their_scripts_import() -> None:
    for line in re.findall(r"^COPY (scripts/\S+\.py .*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
        copied = {Path(word).stem for word in line.split() if word.endswith(".py")}
        for name in copied:
            tree = ast.parse((ROOT / "scripts" / f"{name}.py").read_text())
            imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
            imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
            assert {one for one in imported if (ROOT / "scripts" / f"{one}.py").exists()} <= copied, name
