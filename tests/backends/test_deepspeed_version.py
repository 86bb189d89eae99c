"""Releases of DeepSpeed: what the backend uses of them is there, and others are refused."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_recycle.backends import Options
from megatron_recycle.backends.deepspeed import version
from megatron_recycle.backends.releases import release_of
from megatron_recycle.config import RecycleConfig
from megatron_recycle.errors import UnsupportedError
from tests.backends.deepspeed_names import NAMES
from tests.backends.private_names import defined, imported, missing

deepspeed = pytest.importorskip("deepspeed")
ROOT = Path(__file__).resolve().parents[2]


def test_each_name_is_where_the_list_says_and_all_that_is_imported_is_listed():
    spec = find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    place = Path(spec.origin).parents[1]
    assert missing(NAMES, release_of(deepspeed.__version__), place) == []
    listed = {name.partition(".")[0] for one in NAMES for name in one.names.split()}
    used = {name for module, name in imported(ROOT / "megatron_recycle" / "backends" / "deepspeed", "deepspeed")
            if not defined(place, f"{module}.{name}")}  # not a module
    assert used - {"PipelineEngine"} <= listed


@pytest.mark.parametrize(("release", "taken"), [
    ("0.19.8", True), ("0.19.8+unknown", True), ("0.19.6", False), ("0.19.11", True), ("0.19.7", False),
    ("0.16.5", False), ("0.20.0", False), ("1.19.8", False), ("own", False)])
def test_releases_are_known_by_their_numbers(release, taken):
    assert version.is_supported(release) == taken


def test_another_release_is_named_where_it_is_to_train_a_pipeline_and_left_alone_elsewhere(monkeypatch):
    class PipelineModule:
        pass

    other: Any = ModuleType("deepspeed")
    other.__version__, other.__file__ = "0.16.5", "place/of/deepspeed/__init__.py"
    other.PipelineModule = PipelineModule
    other.initialize = lambda args=None, model=None, **keywords: model
    monkeypatch.setitem(sys.modules, "deepspeed", other)
    version.install(Options(RecycleConfig()))
    assert other.initialize(model="plain") == "plain"
    with pytest.raises(UnsupportedError, match=r"0\.16\.5 \(place/of.*install deepspeed 0\.19\.8 .*DeeperSpeed"):
        other.initialize(model=PipelineModule())
    version.install(Options(RecycleConfig(enabled=False)))
    assert isinstance(other.initialize(model=PipelineModule()), PipelineModule)
