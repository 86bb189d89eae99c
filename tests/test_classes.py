"""A class of the runtime has at most ten attributes: one that needs more is two things. Read from the syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent / "megatron_recycle"
MOST = 10


def attributes(node: ast.ClassDef) -> set[str]:
    """The fields of a class, and all that its methods set on ``self``."""
    fields = {each.target.id for each in node.body
              if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
              and "ClassVar" not in ast.unparse(each.annotation)}
    return fields | {each.attr for each in ast.walk(node)
                     if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                     and isinstance(each.value, ast.Name) and each.value.id == "self"}


def large(source: str) -> dict[str, set[str]]:
    """The classes of a module with too many attributes."""
    found = {node.name: attributes(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
    return {name: own for name, own in found.items() if len(own) > MOST}


def test_classes_of_the_runtime_have_few_attributes():
    faults = [f"{path.relative_to(ROOT)}: {name} has {len(own)} attributes ({', '.join(sorted(own))}); find those that "
              "belong together and give them a name"
              for path in sorted((ROOT / "runtime").rglob("*.py"))
              for name, own in large(path.read_text(encoding="utf-8")).items()]
    assert not faults, "\n".join(faults)


def test_a_large_class_would_be_found():
    """Whichever way it gets its attributes."""
    source = "class Large:\n    a: int\n    def f(self):\n        self.b, (self.c, *self.d) = 1, (2, 3)\n"
    source += "".join(f"        self.e{number} = {number}\n" for number in range(MOST - 3))
    assert large(source) and not large(source.replace("    a: int\n", ""))
