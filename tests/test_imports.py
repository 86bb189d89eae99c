"""Imports go one way (what may import what is below) and never in a circle; `membership` is pure. All of it is read
from the syntax trees of all modules."""

from __future__ import annotations

import ast
import functools
import importlib.util
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx
import pytest

from megatron_recycle import backends, cli

PACKAGE = "megatron_recycle"
COMMANDS = frozenset(module for module, _ in cli.COMMANDS.values())
ROOT = Path(__file__).parent.parent / PACKAGE

LEAVES: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "nccl_settings": frozenset(),
    "environment": frozenset(),
    "option": frozenset({"errors", "environment"}),
    "policy": frozenset(),
    "config": frozenset({"errors", "option", "policy"}),
    "observe.log": frozenset({"observe.runbook"}),
    "observe.runbook": frozenset(),
    "job_status": frozenset({"observe.log"}),
    "observe.text": frozenset(),
    "observe.disk": frozenset(),
    "observe.stacks": frozenset(),
    "observe.rolling": frozenset(),
    "observe.events": frozenset({"observe.disk", "observe.log", "observe.rolling", "observe.text"}),
}
"""Modules that everybody except plan may import, and what each of them may import."""

LEAF_NAMES = frozenset({"observe.EventLog", "observe.read_events", "observe.get_logger"})
"""The leaves' names that `observe` exports again."""

ALLOWED: dict[str, frozenset[str]] = {
    "plan": frozenset(),
    "measure": frozenset({"plan", "membership.names"}),
    "observe": frozenset({"plan"}),
    "planner": frozenset({"plan"}),
    "planner.command": frozenset({"plan", "planner", "observe"}),
    "membership": frozenset({"plan"}),
    "control": frozenset({"plan", "measure", "planner", "membership", "observe"}),
    "runtime": frozenset({"plan", "membership", "control", "checkpoint_period"}),
    "runtime.compute": frozenset({"plan", "runtime"}),
    "backends": frozenset({"plan", "membership", "control", "runtime"}),
    "usage": frozenset(),
    "launch": frozenset({"usage", "plan", "measure", "planner", "membership", "control", "observe"}),
    "tools.simulate": frozenset({"plan", "planner", "membership", "control", "checkpoint_period",
                                 "tools.picture_style", "usage"}),
    "tools.chaos": frozenset({"plan", "membership", "control", "runtime", "observe", "launch", "usage",
                              "tools.operate.runs"}),
}
"""Package (or a module or a part of it that differs: a command is a front end) -> packages it may import beside itself
and the leaves. What is not listed may import all, but for `TOOLS`."""

TOOLS = "tools"
"""What looks at a job, or simulates one, from outside. The plugin works without it: only a subcommand of `recycle`
may import from it, and only where it comes to that."""

THIRD_PARTY: dict[str, frozenset[str]] = {
    "torch": frozenset({"runtime", "backends", "tools", "launch"}),
    "deepspeed": frozenset({"backends"}),
    "megatron": frozenset({"backends"}),
    "ortools": frozenset({"planner.cpsat"}),
    "matplotlib": frozenset({"tools.timeline", "tools.picture_style"}),
}
"""Third-party package -> packages or modules that may import it."""

PURE = frozenset({
    "__future__", "abc", "bisect", "collections", "copy", "dataclasses", "enum", "functools", "hashlib", "heapq",
    "itertools", "json", "math", "msgspec", "operator", "re", "signal", "statistics", "string", "types", "typing",
    "zlib",
})
"""All that `membership` may import of the standard library, and of others: no clock, socket, file, thread, process or
chance (of `signal` it takes the names). Its functions give the same answer to the same question, in a simulator as in a
job."""

PURE_LEAVES = frozenset({"policy", "errors", "observe.text"})
"""The leaves that `membership` may import: the others read variables and files."""


@dataclass(frozen=True)
class Import:
    """`importer` (relative to the package, e.g. "plan.grid") imports `target`, a full dotted name."""

    importer: str
    target: str
    line: int
    lazy: bool
    checking: bool
    """Whether it is there for type checkers alone."""

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}: imports {self.target}"


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, module: str, is_package: bool) -> Iterator[Import]:
    """Every import in a module's source, also inside functions and for type checkers alone."""
    home = [PACKAGE, *(module.split(".") if module else [])]

    def inside(node: ast.AST, lazy: bool, checking: bool) -> Iterator[Import]:
        lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        checking = checking or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, lazy, checking)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = home if is_package else home[:-1]
                base = ".".join([*up[: len(up) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                yield Import(module, f"{base}.{alias.name}", node.lineno, lazy, checking)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
                yield from inside(child, lazy, checking)

    yield from inside(ast.parse(source), False, False)


@functools.cache
def all_imports() -> list[Import]:
    return [
        found
        for path in sorted(ROOT.rglob("*.py"))
        for found in imports_of(path.read_text(encoding="utf-8"), dotted(path), path.name == "__init__.py")
    ]


def covers(names: Iterable[str], module: str) -> bool:
    """Whether `module`, or a package that contains it, is in `names`."""
    return any(module == name or module.startswith(name + ".") for name in names)


def fault(found: Import) -> str | None:
    """What is wrong with an import, or None."""
    home, (first, _, rest) = found.importer.split(".")[0], found.target.partition(".")
    if home == "membership" and (text := impure(found)):
        return text
    if found.checking:
        return None
    if first != PACKAGE:
        if home == "plan" and first not in (*sys.stdlib_module_names, "__future__", "msgspec"):
            return f"{found}: plan imports the standard library and msgspec only"
        if first in THIRD_PARTY and not covers(THIRD_PARTY[first], found.importer):
            return f"{found}: only {', '.join(sorted(THIRD_PARTY[first]))} may"
        return None
    if covers({TOOLS}, rest) and not covers({TOOLS}, found.importer):
        its_own = found.lazy and f"{PACKAGE}.{found.importer}" in COMMANDS
        return None if its_own else f"{found}: only subcommands may, inside of a function"
    if found.importer in LEAVES:
        return None if covers(LEAVES[found.importer], rest) else f"{found}: it is a leaf"
    name = found.importer
    own = next((each for each in (name, ".".join(name.split(".")[:2]), home) if each in ALLOWED), home)
    allowed = ALLOWED.get(own)
    if covers({own if home == TOOLS else home}, rest) or allowed is None or covers(allowed, rest):
        return None
    if home != "plan" and covers({*LEAVES, *LEAF_NAMES}, rest):
        return None
    return f"{found}: {own} may import {', '.join(sorted(allowed)) or 'nothing of the package'}"


def impure(found: Import) -> str | None:
    """What is wrong with an import of `membership`, or None."""
    first, _, rest = found.target.partition(".")
    pure = rest.split(".")[0] in ("plan", "membership") or covers(PURE_LEAVES, rest) if first == PACKAGE else (
        first in PURE)
    if pure:
        return None
    return f"{found}: membership is pure; what needs {found.target} belongs to control"


def circles(found: Iterable[Import]) -> list[frozenset[str]]:
    """Sets of modules in which each imports, over others, each; imports for type checkers and inside functions count.
    An import of a name counts for the module that is nearest to it."""
    found = list(found)
    modules = {dotted(path) for path in ROOT.rglob("*.py")} | {one.importer for one in found}

    def nearest(target: str) -> str:
        name = target.removeprefix(PACKAGE).lstrip(".")
        while name not in modules:
            name = name.rpartition(".")[0]
        return name

    graph = networkx.DiGraph((one.importer, nearest(one.target)) for one in found
                             if one.target.split(".")[0] == PACKAGE)
    return [frozenset(one) for one in networkx.strongly_connected_components(graph) if len(one) > 1]


def test_imports_go_one_way():
    faults = [text for found in all_imports() if (text := fault(found))]
    assert not faults, "\n".join(faults)


def test_what_scripts_import_is_there():
    """Also what they import late, inside functions."""
    files = [*(ROOT.parent / "scripts").rglob("*.py")]
    wanted = [(file, found.target) for file in files
              for found in imports_of(file.read_text(encoding="utf-8"), "", False)
              if found.target.startswith(f"{PACKAGE}.")]
    assert wanted
    gone = []
    for file, target in wanted:
        module, _, name = target.rpartition(".")
        if not hasattr(importlib.import_module(module), name) and importlib.util.find_spec(target) is None:
            gone.append(f"{file.relative_to(ROOT.parent)}: {target}")
    assert not gone, "\n".join(gone)


def test_no_modules_import_each_other_in_a_circle():
    """Not for type checkers either: modules of a circle are read as one."""
    found = [sorted(one) for one in circles(all_imports())]
    assert not found, f"circles: {found}; move what both need below them"


def test_a_circle_would_be_found():
    """Through a package's own names and for type checkers too."""
    sources = {"plan.one": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .two import Two",
               "plan.two": "def f():\n    from megatron_recycle.plan import three",
               "plan.three": "import megatron_recycle.plan.one"}
    found = [one for module, source in sources.items() for one in imports_of(source, module, False)]
    assert circles(found) == [frozenset(sources)]
    assert circles(found[:-1]) == []


def test_one_room_of_the_runtime_knows_the_communication_library():
    """All others send, receive and add up by `runtime.comm.comm`, where what a library raises ends a generation. What a
    process is told while it builds its engine is not training's."""
    outside = [str(found) for found in all_imports()
               if found.target.startswith(("torch.distributed", "torch._C._distributed"))
               and found.importer.startswith("runtime.") and not found.importer.startswith("runtime.comm.")
               and found.importer != "runtime.setup_record"]
    assert not outside, "\n".join(outside)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plan.grid", "import torch"),
        ("plan.grid", "from megatron_recycle.errors import ConfigError"),
        ("planner.greedy", "from megatron_recycle.membership import machine"),
        ("planner.greedy", "from ..runtime import ledger"),
        ("planner.greedy", "def f():\n    from ortools.sat.python import cp_model"),
        ("membership.machine", "from megatron_recycle import planner"),
        ("runtime.step", "import deepspeed.comm"),
        ("runtime.step", "from megatron_recycle.backends.deepspeed.engine import Engine"),
        ("control.agent", "import torch"),
        ("membership.machine", "from megatron_recycle.control import Agent"),
        ("membership.machine", "import time"),
        ("membership.machine", "from threading import Lock"),
        ("membership.machine", "def f():\n    import os"),
        ("membership.machine", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import socket"),
        ("membership.machine", "from megatron_recycle.observe.log import get_logger"),
        ("membership.machine", "from megatron_recycle.config import RecycleConfig"),
        ("planner.greedy", "from megatron_recycle.measure import Profile"),
        ("observe.events", "from megatron_recycle.plan import Plan"),
        ("observe.events", "from megatron_recycle.tools.timeline import draw"),
        ("runtime.step", "def f():\n    from megatron_recycle.tools.timeline import draw"),
        ("launch.command", "from megatron_recycle.tools.post_mortem import collect"),
        ("tools.chaos.acts", "from megatron_recycle.tools.simulate import run"),
        ("runtime.step", "from megatron_recycle import launch"),
        ("config", "from megatron_recycle.observe.events import EventLog"),
        ("backends.deepspeed", "from megatron_recycle.tools.chaos import kill"),
    ],
)
def test_a_wrong_import_would_be_found(module: str, source: str):
    assert [text for found in imports_of(source, module, False) if (text := fault(found))]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("plan.grid", "import json\nfrom .errors import PlanError"),
        ("planner.cpsat", "from ortools.sat.python import cp_model"),
        ("membership.machine", "from signal import Signals\nfrom megatron_recycle.observe.text import one_line"),
        ("control.coordinator", "from megatron_recycle.observe.events import EventLog"),
        ("control.coordinator", "from megatron_recycle.observe import EventLog"),
        ("runtime.step", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import deepspeed"),
        ("cli", "from megatron_recycle.launch import command"),
        ("launch.command", "def f():\n    from megatron_recycle.tools.post_mortem import collect"),
        ("tools.chaos.acts", "from megatron_recycle.tools.chaos.target_job import TargetJob"),
    ],
)
def test_a_right_import_is_let_through(module: str, source: str):
    assert not [text for found in imports_of(source, module, False) if (text := fault(found))]


def test_what_takes_a_framework_over_is_there_by_the_name_that_is_looked_up():
    """The backends' modules are imported by name, and only once a framework is loaded."""
    for function in backends.BACKENDS.values():
        module, _, name = function.partition(":")
        tree = ast.parse((ROOT / "backends" / module.replace(".", "/")).with_suffix(".py").read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, function


def test_heavy_packages_are_loaded_only_when_they_are_used():
    """matplotlib and OR-Tools never at the top of a module; frameworks only in their backend's own module."""
    eager = [
        str(found)
        for found in all_imports()
        if not found.lazy
        and found.target.split(".")[0] in ("matplotlib", "ortools")
        and found.importer != "planner.cpsat"
    ]
    assert not eager, "\n".join(eager)


def test_importing_the_package_its_settings_and_its_command_line_loads_neither_torch_nor_ortools():
    program = (
        "import sys, megatron_recycle, megatron_recycle.config, megatron_recycle.cli, megatron_recycle.plan\n"
        "megatron_recycle.RecycleConfig()\n"
        "heavy = {'torch', 'ortools', 'deepspeed', 'matplotlib', 'numpy', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
