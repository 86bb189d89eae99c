"""What the Megatron backend uses without a promise is where its list says, in each version that is here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_recycle.backends.megatron.version import TESTED
from megatron_recycle.backends.releases import Release
from tests.backends.megatron_names import CORE, LOOP
from tests.backends.private_names import Private, defined, imported, missing

megatron_core = pytest.importorskip("megatron.core")
ROOT = Path(__file__).resolve().parents[2]


def _places() -> Iterator[Path]:
    """Folders with a `megatron/core`: the installed one, those of other environments (scripts/setup.sh --core), and a
    checkout of Megatron-LM."""
    yield Path(megatron_core.__file__).parents[2]
    yield from ROOT.glob(".venv-*core-*/lib/python*/site-packages")
    if "MEGATRON_LM" in os.environ:
        yield Path(os.environ["MEGATRON_LM"])


def _release(place: Path) -> Release:
    text = (place / "megatron" / "core" / "package_info.py").read_text()
    return tuple(int(number) for number in re.findall(r"^(?:MAJOR|MINOR|PATCH) *= *(\d+)", text, re.MULTILINE))


@pytest.mark.parametrize("place", _places(), ids=str)
def test_each_name_is_where_the_list_says(place):
    release = _release(place)
    assert release[:2] in TESTED
    assert missing(CORE, release, place) == []
    if (place / "megatron" / "training").exists():
        assert missing(LOOP, release, place) == []


def test_all_that_is_imported_from_core_is_listed():
    folder, place = ROOT / "megatron_recycle" / "backends" / "megatron", Path(megatron_core.__file__).parents[2]
    listed = {name.partition(".")[0] for one in CORE for name in one.names.split()}
    classes_and_functions = {name for module, name in imported(folder, "megatron")
                             if not defined(place, f"{module}.{name}")}  # not a module
    assert classes_and_functions <= listed


def test_a_name_that_has_gone_or_come_is_found(tmp_path):
    module = tmp_path / "package" / "module.py"
    module.parent.mkdir()
    module.write_text("try:\n    from x import here\nexcept ImportError:\n    here = None\n"
                      "class Kind:\n    a: int\n    def b(self):\n        self.c = 1\n")
    lists = [Private("package.module", "here Kind.a Kind.b Kind.c"), Private("package.module", "gone Kind.d"),
             Private("package.module", "late", since=(0, 18)), Private("package.module", "here", before=(0, 17)),
             Private("package.other", "any")]
    assert missing(lists, (0, 17, 1), tmp_path) == [
        "package.module:gone", "package.module:Kind.d", "package.module:here", "package.other:any"]
    assert "package.module:late" in missing(lists, (0, 18, 0), tmp_path)
