"""What a script sees of the package: a flag that switches the plugin on, and nothing at all without it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import megatron_recycle
from megatron_recycle import config
from megatron_recycle.policy import POLICIES


def test_the_flag_calls_enable_with_the_namespace(monkeypatch: pytest.MonkeyPatch):
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(megatron_recycle, "enable", lambda **given: calls.append(given))
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    megatron_recycle.add_arguments(parser)
    parser.parse_args(["--lr", "1"])
    assert calls == []
    args = parser.parse_args(["--recycle", "--lr", "1", "--recycle-seed", "5"])
    assert calls == [{"flags": args}]
    assert megatron_recycle.RecycleConfig.resolve(None, calls[0]["flags"], {}).seed == 5


def test_without_the_flag_nothing_is_loaded_and_without_the_plugin_deepspeed_is_untouched():
    program = (
        "import argparse, sys, megatron_recycle\n"
        "parser = argparse.ArgumentParser()\n"
        "megatron_recycle.add_arguments(parser)\n"
        "parser.parse_args([])\n"
        "sys.exit(str({'torch', 'deepspeed', 'megatron_recycle.backends'} & set(sys.modules) or ''))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root)
    assert done.stderr.strip() in ("", "''"), done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'enabel'"):
        megatron_recycle.enabel  # noqa: B018


def test_the_parser_comes_back_as_both_frameworks_expect():
    parser = argparse.ArgumentParser()
    assert megatron_recycle.add_arguments(parser) is parser


def test_every_public_name_is_there_and_completes():
    assert set(megatron_recycle.__all__) <= set(dir(megatron_recycle))
    assert all(getattr(megatron_recycle, name) is not None for name in megatron_recycle.__all__)
    assert issubclass(megatron_recycle.JobEnded, megatron_recycle.RecycleError)


def test_settings_with_few_values_are_typed_so():
    hints = get_type_hints(megatron_recycle.RecycleConfig)
    assert get_args(hints["policy"]) == tuple(POLICIES)
    assert {option.name: option.choices for option in config.options()}["placement"] == ("spread", "framework")
