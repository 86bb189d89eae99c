"""The form in which tests list what a backend uses of its framework without a promise that it stays.

A framework may rename such a name, or change its meaning, in any release. So all of them are listed with the releases
that have them, and looked up in the source of every release that is installed, without importing it: another version
cannot be imported here.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_recycle.backends.releases import Release


@dataclass(frozen=True)
class Private:
    """Names of one module.

    Attributes:
        module: the dotted name.
        names: separated by blanks; ``Class.member`` is a method, an attribute of the class, or one that a method sets.
        since: the first release that has them; none: all supported ones.
        before: the first release without them; none: all supported ones have them.
    """

    module: str
    names: str
    since: Release = ()
    before: Release = ()

    def are_in(self, release: Release) -> bool:
        """Whether ``release`` is to have them."""
        return release >= self.since and (not self.before or release < self.before)


def missing(privates: Iterable[Private], release: Release, root: Path) -> list[str]:
    """The names that are not in the modules in ``root`` as they are to be in ``release``: those that are to be there
    and are not, and the other way round."""
    wrong = []
    for private in privates:
        there = defined(root, private.module)
        wrong += [f"{private.module}:{name}" for name in private.names.split()
                  if (name in there) != private.are_in(release)]
    return wrong


@functools.cache
def defined(root: Path, module: str) -> frozenset[str]:
    """The names of ``module``, and Class.member for those of its classes; of none, if there is no such module."""
    base = root.joinpath(*module.split("."))
    path = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists()), None)
    return frozenset() if path is None else frozenset(_names(ast.parse(path.read_text())))


def _names(tree: ast.Module) -> Iterator[str]:
    for node in _unconditional(tree.body):
        yield from _bound(node)
        if isinstance(node, ast.ClassDef):
            for member in _unconditional(node.body):
                yield from (f"{node.name}.{name}" for name in _bound(member))
                for inner in ast.walk(member):
                    if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and (
                            isinstance(inner.value, ast.Name) and inner.value.id == "self"):
                        yield f"{node.name}.{inner.attr}"


def _unconditional(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, also those inside of `if` and `try`."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)):
                yield from _unconditional(getattr(node, inner, []))
        for handler in getattr(node, "handlers", []):
            yield from _unconditional(handler.body)


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Assign):
        yield from (name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def imported(folder: Path, package: str) -> set[tuple[str, str]]:
    """(module, name) of all that the modules in ``folder`` import from ``package``."""
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                found |= {(str(node.module), alias.name) for alias in node.names}
    return found
