"""`recycle quickstart`: a small job that loses two workers, compared bit for bit with a run without failures."""

from __future__ import annotations

import argparse
import importlib
import sys
from types import ModuleType

from megatron_recycle.tools import examples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the quickstart's program."""
    _program().add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run it; returns 0 if the two runs are equal bit for bit. Raises ConfigError for bad arguments."""
    return int(_program().run(args))


def _program() -> ModuleType:
    """scripts/quickstart.py, which imports its neighbours."""
    folder = str(examples.folder())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("quickstart")
