"""Counts what a reader has to take in: code lines by part of the package, and how far one thing has to be followed.

    python scripts/count.py               ten lines; scripts/style.sh prints them
    python scripts/count.py --details     what they are made of too: files, functions, reads of messages

A code line has something else on it than a comment or a docstring. The limits stand beside the figures; nothing fails.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_recycle"

EXTENSIONS: Mapping[str, tuple[str, ...]] = {
    "last copies, checkpoints": (
        "checkpoint_period", "membership.guarding", "membership.stage_restore", "membership.partial_checkpoint",
        "runtime.checkpoint_clock", "runtime.copies", "runtime.guard", "runtime.last_checkpoint", "runtime.saving"),
    "moves": ("control.moves", "membership.moving", "membership.open_positions"),
    "lent layers": (
        "control.lending_costs", "membership.lendable", "membership.lending_withdrawn", "plan.crossings",
        "planner.crossing_flow", "planner.lent_schedules", "planner.simultaneous", "planner.lending_gain",
        "runtime.lent", "backends.deepspeed.lent_layers", "backends.megatron.lent_layers"),
    "optimizer shards": (
        "membership.shards", "runtime.shard_moves", "runtime.shards", "runtime.comm.sharded_reduction",
        "runtime.compute.sharded_optimizer", "runtime.compute.sharding_cost", "backends.deepspeed.reshard",
        "backends.deepspeed.zero"),
    "bad micro-batches": ("membership.bad_microbatch",),
    "other policies": ("membership.policies", "planner.baselines"),
    "user collectives": (
        "runtime.script_collectives", "runtime.comm.user_collectives", "runtime.iteration_history",
        "runtime.missed_calls", "runtime.script_calls", "runtime.script_transfers"),
    "changes between iterations": (
        "backends.deepspeed.edit_refusals", "runtime.user_edits", "runtime.compute.edits",
        "runtime.compute.find_generators", "runtime.compute.modes"),
    "evaluation": (
        "backends.deepspeed.evaluation_passes", "backends.deepspeed.evaluation_data", "runtime.evaluation",
        "runtime.evaluation_pass"),
    "chunks, V-shaped stages": (
        "backends.deepspeed.chunks", "backends.deepspeed.regroup",
        "backends.deepspeed.relayout", "backends.megatron.chunks", "backends.megatron.vshape"),
    "checks of peers and first forwards": ("runtime.replica_check", "runtime.first_forward"),
    "registered state": ("runtime.registered",),
    "several coordinators": ("control.leader_election", "control.etcd"),
}
"""Extension -> its modules, or the packages that hold them. A folder of `extensions/` is one without being named."""

PARTS: Mapping[str, tuple[str, ...]] = {
    "core": ("plan", "planner", "measure", "membership", "control", "runtime"),
    "backends": ("backends",),
    "launcher": ("launch", "__main__", "streams"),
    "settings, records": ("", "config", "environment", "errors", "job_status", "nccl_settings", "observe", "option",
                          "policy"),
    "tools": ("tools", "cli", "planner.command", "usage"),
}
"""All else. Of several names that contain a module the longest one counts."""

LIMITS = {"package": 28_000, "core": 12_000, "functions": 25, "returns": 8, "fields": 25, "failure path": 12,
          "string keys": 0, "circles": 0}

WALK = ("runtime.recovery", "recover", "site")
"""The parameter that is followed: its module, its function, its name. It goes on where it, or an attribute of it, is an
argument, and where a method of either is called; and with a value that is built of it."""

MESSENGERS = ("control", "extensions", "launch", "membership", "runtime")
"""Packages in which a string key reads a message, a report or a record, but for `runtime.compute`, which sends none."""
NO_MESSAGES = frozenset({"environ", "counters", "group", "modules", "state_dict", "defaults", "globals()", "values"})
"""What else is read by a string there: variables of the environment, torch's dictionaries."""

_SHORT = 60
_NO_CODE = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
                      tokenize.ENDMARKER})
Function = tuple[str, str]
"""Module, and the name in it: `function` or `Class.method`."""


def code_lines(source: str) -> int:
    """Lines with code on them; a text that is a statement of its own is a docstring."""
    docs = {line for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len({line for token in tokens if token.type not in _NO_CODE
                for line in range(token.start[0], token.end[0] + 1)} - docs)


def part_of(module: str) -> str:
    """The part of the package that a module belongs to."""
    if module.startswith("extensions."):
        return module.split(".")[1].replace("_", " ")
    names = {name: part for part, names in {**EXTENSIONS, **PARTS}.items() for name in names}
    found = [name for name in names if module == name or (name and module.startswith(f"{name}."))]
    return names[max(found, key=len)] if found else "not named in scripts/count.py"


@dataclass(frozen=True)
class Code:
    """All modules of a package: `sources` by dotted name, relative to the package. A package's own module has its name.

    Attributes:
        packages: those of them that are packages.
    """

    sources: Mapping[str, str]
    packages: frozenset[str] = frozenset()

    @classmethod
    def read(cls, root: Path) -> Code:
        found, packages = {}, set()
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path.read_text(encoding="utf-8")
            packages |= {name} if parts[-1] == "__init__" else set()
        return cls(found, frozenset(packages))

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {name: ast.parse(source) for name, source in self.sources.items()}

    @cached_property
    def lines(self) -> dict[str, int]:
        return {name: code_lines(source) for name, source in self.sources.items()}

    @cached_property
    def imports(self) -> dict[str, dict[str, tuple[str, str]]]:
        """For each module local name -> module and name there of what it imports; name "" is the module itself."""
        return {module: dict(self._imports(module)) for module in self.sources}

    def _imports(self, module: str) -> Iterator[tuple[str, tuple[str, str]]]:
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.ImportFrom):
                home = [PACKAGE, *module.split(".")] if module else [PACKAGE]
                up = home[:len(home) - node.level + (module in self.packages)] if node.level else []
                base = ".".join([*up, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield alias.asname or alias.name, self._place(f"{base}.{alias.name}")
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.asname or alias.name, self._place(alias.name)

    def _place(self, target: str) -> tuple[str, str]:
        """The module of the package that is nearest to this name, and the rest; "?" if it is another package's."""
        if target.split(".")[0] != PACKAGE:
            return "?", ""
        module, rest = target.removeprefix(PACKAGE).lstrip("."), ""
        while module not in self.sources:
            module, _, last = module.rpartition(".")
            rest = f"{last}.{rest}".rstrip(".")
        return module, rest

    def circle(self) -> list[str]:
        """Modules that import each other in a circle, also late or for type checkers; none: there is no circle."""
        graph = {module: {where for _, (where, _) in self._imports(module)} - {module, "?"} for module in self.sources}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            return list(error.args[1])
        return []

    @cached_property
    def _functions(self) -> dict[Function, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
        found: dict[Function, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef] = {}
        for module, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    found[module, node.name] = node
                if isinstance(node, ast.ClassDef):
                    for inner in node.body:
                        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                            found[module, f"{node.name}.{inner.name}"] = inner
        return found

    @cached_property
    def _methods(self) -> dict[str, list[Function]]:
        found = defaultdict(list)
        for module, name in self._functions:
            if "." in name:
                found[name.partition(".")[2]].append((module, name))
        return found

    def _callee(self, module: str, owner: str, called: ast.expr) -> Function | None:
        """The function that a call means; of an object of unknown class, the only method of that name."""
        known = self.imports[module]
        if isinstance(called, ast.Name):
            target = known.get(called.id, (module, called.id))
        elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            local = called.value.id
            if local in ("self", "cls") and owner:
                target = (module, f"{owner}.{called.attr}")
            else:
                where, name = known.get(local, (module, local))
                target = (where, f"{name}.{called.attr}".lstrip("."))
        else:
            target = ("?", "")
        for _ in range(3):  # a package may pass the name on
            if target in self._functions or target[0] not in self.trees:
                break
            target = self.imports[target[0]].get(target[1], ("?", ""))
        if target not in self._functions and isinstance(called, ast.Attribute):
            same = self._methods.get(called.attr, [])
            target = same[0] if len(same) == 1 else ("?", "")
        if isinstance(self._functions.get(target), ast.ClassDef):
            built = (target[0], f"{target[1]}.__init__")
            return built if built in self._functions else target
        return target if target in self._functions else None

    def walk(self, start: Function, parameter: str) -> list[Function]:
        """Where a reader is, one after the other, who follows a parameter: into each function once, and back to the one
        that has called it."""
        met: list[Function] = []

        def follow(at: Function, name: str) -> None:
            met.append(at)
            node, (module, local) = self._functions[at], at
            calls = [] if isinstance(node, ast.ClassDef) else [
                each for each in ast.walk(node) if isinstance(each, ast.Call)]
            names = {name, *self._made_of(node, module, name)}
            for call in sorted(calls, key=lambda each: (each.lineno, each.col_offset)):
                places: list[int | str] = [place for place, value in enumerate(call.args) if _is_of(value, names)]
                places += [word.arg for word in call.keywords if word.arg and _is_of(word.value, names)]
                its_own = isinstance(call.func, ast.Attribute) and _is_of(call.func.value, names)
                if not places and not its_own:
                    continue
                found = self._callee(module, local.rpartition(".")[0], call.func)
                if found is not None and found not in met:
                    taken = self._parameter(found, places[0]) if places else "self"
                    if taken:
                        follow(found, taken)
                        met.append(at)

        follow(start, parameter)
        return met

    def _made_of(self, node: ast.AST, module: str, name: str) -> Iterator[str]:
        """Local names of values that are built of a parameter: `meeting` in ``meeting = Meeting(site, ...)``."""
        for each in ast.walk(node):
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and isinstance(
                    each.value, ast.Call) and any(_is_of(value, {name}) for value in each.value.args):
                built = self._callee(module, "", each.value.func)
                if built is not None and isinstance(self._functions[built], ast.ClassDef):
                    yield each.targets[0].id

    def _parameter(self, function: Function, place: int | str) -> str:
        """The name of what is passed at this place, or by this keyword; "" if it disappears in `*args`."""
        node = self._functions[function]
        if isinstance(place, str) or isinstance(node, ast.ClassDef):
            return str(place)
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        bound = names[1:] if "." in function[1] and names[:1] in (["self"], ["cls"]) else names
        return bound[place] if place < len(bound) else ""

    def string_keys(self) -> Iterator[tuple[str, int, str]]:
        """Module, line and text of what reads a message or the like by a key that is a text in the code."""
        for module, tree in self.trees.items():
            if module.split(".")[0] in MESSENGERS and not module.startswith("runtime.compute."):
                yield from ((module, node.lineno, ast.unparse(node)) for node in ast.walk(tree) if _reads_key(node))

    def fields(self, module: str, name: str) -> int:
        """Fields of a dataclass."""
        return sum(isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation)
                   for each in self._functions[module, name].body)


def _is_of(value: ast.expr, names: Container[str]) -> bool:
    """Whether an expression is one of these names, or an attribute of one."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name) and value.id in names


def _reads_key(node: ast.AST) -> TypeGuard[ast.expr]:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        key, base = node.slice, node.value
    elif (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
          and node.func.attr in ("get", "pop")):
        key, base = node.args[0], node.func.value
    else:
        return False
    named = ast.unparse(base).rpartition(".")[2]
    return isinstance(key, ast.Constant) and isinstance(key.value, str) and named not in NO_MESSAGES


def returns(met: list[Function]) -> int:
    """How often a walk comes to a file that it has been in and left."""
    files = [module for module, _ in met]
    return sum(file != before and file in files[:at] for at, (before, file) in enumerate(pairwise(files), 1))


def files_of_failure(page: str) -> set[str]:
    """The files in the tables of docs/path-of-a-failure.md; the last one where a hop names several."""
    rows = [line.split("|") for line in page.splitlines() if line.count("|") > 5]
    return {row[3].strip().strip("`").rpartition("`")[2] for row in rows if re.fullmatch(r" *\d+[a-z]? *", row[1])}


def shared_names(modules: Mapping[str, str]) -> Counter[str]:
    """Base names of files that another folder has too, and how many files have each."""
    found = Counter(name.rpartition(".")[2] for name in modules)
    return Counter({name: count for name, count in found.items() if count > 1})


def report(code: Code, page: str) -> Iterator[str]:
    """The lines of the report."""
    whole, parts = sum(code.lines.values()), Counter[str]()
    for module, lines in code.lines.items():
        parts[part_of(module)] += lines
    yield f"code lines: {whole:,} (at most {LIMITS['package']:,}), core {parts['core']:,} (at most {LIMITS['core']:,})"
    yield "  " + ", ".join(f"{part} {parts[part]:,}" for part in PARTS if part != "core")
    rest = {part: lines for part, lines in parts.most_common() if part not in PARTS}
    yield f"  extensions {sum(rest.values()):,}: " + ", ".join(f"{part} {lines:,}" for part, lines in rest.items())
    module, function, parameter = WALK
    met = code.walk((module, function), parameter)
    yield (f"{parameter} of {function}: passed on to {len(set(met))} functions (at most {LIMITS['functions']}) in "
           f"{len({where for where, _ in met})} files, {returns(met)} returns to a file (at most {LIMITS['returns']})")
    yield f"fields of State: {code.fields('membership.state', 'State')} (at most {LIMITS['fields']})"
    yield f"files on the path of a failure: {len(files_of_failure(page))} (at most {LIMITS['failure path']})"
    keys = Counter(where.split(".")[0] for where, _, _ in code.string_keys())
    yield (f"string keys of messages: {sum(keys.values())} (at most {LIMITS['string keys']}): "
           + ", ".join(f"{home} {count}" for home, count in keys.most_common()))
    circle = code.circle()
    yield f"import circles: {' -> '.join(circle) if circle else 'none'}"
    plain = {name: source for name, source in code.sources.items() if name not in code.packages}
    shared = shared_names(plain)
    yield (f"files: {len(plain)}, {sum(len(source.splitlines()) < _SHORT for source in plain.values())} of them under "
           f"{_SHORT} lines, {sum(shared.values())} with another's name: "
           + ", ".join(f"{name} {count}" for name, count in shared.most_common()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--details", action="store_true", help="also what the figures are made of")
    args = parser.parse_args()
    code = Code.read(ROOT / PACKAGE)
    for line in report(code, (ROOT / "docs" / "path-of-a-failure.md").read_text(encoding="utf-8")):
        print(line)
    if args.details:
        details(code)


def details(code: Code) -> None:
    """Print the files with their code lines and parts, the functions of the walk, and the reads of messages."""
    for module, lines in code.lines.items():
        print(f"{lines:6} {module:45} {part_of(module)}")
    module, function, parameter = WALK
    for where, name in dict.fromkeys(code.walk((module, function), parameter)):
        print(f"walk: {where}.{name}")
    for where, number, text in code.string_keys():
        print(f"key: {where}, line {number}: {text}")


if __name__ == "__main__":
    main()
