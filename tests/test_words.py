"""Modules and classes are called by words that docs/words.md explains, or that every engineer knows."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_recycle"

PLAIN = frozenset(re.findall(r"\w+", """
access account acknowledgements activity adam adapters addition addresses allocation allreduce apex api arrivals asyncio
averages await background bamboo base baselines breakdown bridge broadcast budget bw cache callback candidate chain
charts child cli client clipping clock cluster conclusions config constants cpsat cuda current cycle dashes dataset dead
deadlock deaths deep deepspeed default deferred delayed described description detached detectors dice director draw
dropping durations embedded emit engine entry environment estimate examples exporter factory facts figures findings
finished form formatter ft gather given gloo grads hang heal health hello here hidden hook ideal improve inbox incoming
item iterators kernel kind layout lazy lead legacy level limit link main map mapped master measurements merge metric
microbatch middle mirror monitors mutations native noise now numpy objects observe oobleck option outcome outgoing
output p2p pair patching parser persistent phase pictures planned plugin policies ports preemption price private profile
program progress python quickstart raised re reachability rebind rebuilt reconciliation redone refused registry relay
resizing reuse role rooms row rules runbook runtime sampler scaled scatter schema sealed setup shifted shutdown slowness
slurm spec speed splitter stacks standalone stateful status stopwatch stream stuck style summary support surviving
target task te teardown template terminal terminate text timeline timeouts too topology tracker unfinished unlent
unreadable unsupported unwritten ups usage validate version vshape welcome world wrapping
"""))
"""Words that need no explanation: of English in their usual meaning, of Python, of torch, of the trade; and names."""

_ENDINGS = ("s", "es", "ies", "d", "ed", "ied", "ing", "er", "ers", "or", "able", "ion", "ions", "ment")


def parts(name: str) -> list[str]:
    """The words of a name: HostMemory and host_memory are host and memory."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def forms(word: str) -> set[str]:
    """The word, and what is left of it without one of the usual endings."""
    left = {word.removesuffix(ending) for ending in _ENDINGS if word.endswith(ending)}
    return {word} | {each + more for each in left if len(each) >= 3 for more in ("", "e", "y")}


def names(root: Path) -> dict[str, set[str]]:
    """Word -> the modules and classes of a package that have it in their names."""
    found = defaultdict(set)
    for path in root.rglob("*.py"):
        module = path.parent.name if path.stem == "__init__" else path.stem
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name in (module, *(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
            for word in parts(name):
                found[word].add(name)
    return found


def unexplained(found: dict[str, set[str]], text: str, plain: Iterable[str]) -> list[str]:
    known = {form for word in (*re.findall(r"[a-z]+", text.lower()), *plain) for form in forms(word)}
    return [f"{word} ({', '.join(sorted(found[word]))})" for word in sorted(found) if not forms(word) & known]


def test_names_are_made_of_words_that_are_explained():
    missing = unexplained(names(PACKAGE), (ROOT / "docs" / "words.md").read_text(encoding="utf-8"), PLAIN)
    assert not missing, ("give these the field's name, a row in docs/words.md, or if everybody knows them a place in "
                         f"PLAIN: {'; '.join(missing)}")


def test_a_word_that_nobody_explains_would_be_found():
    found = {"gizmo": {"GizmoTable"}, "tables": {"tables"}, "frozen": {"Frozen"}}
    assert unexplained(found, "| frozen | stands still |", ["table"]) == ["gizmo (GizmoTable)"]
