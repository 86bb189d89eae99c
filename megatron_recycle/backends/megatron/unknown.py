"""Options of Megatron-LM that nobody has looked at: a fork's, or a newer release's.

All others are in `known_options.txt`, the options of the tested releases: `options` says which of them are treated, and
the rest is taken as it is.

Nothing of Megatron is imported here.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

PARSER = "megatron.training.arguments"


@cache
def known() -> Collection[str]:
    """Options of the tested releases, by their attributes' names."""
    return frozenset(Path(__file__).with_name("known_options.txt").read_text().split())


def unknown(arguments: Any) -> list[str]:
    """A line on those of Megatron-LM's ``arguments`` that are not `known` and not at their default; none if there are
    none. A script's own options are its own business."""
    module: Any = sys.modules.get(PARSER)
    if module is None:
        return []
    parser = module.add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    found = {action.option_strings[-1]: value for action in parser._actions
             if action.dest not in known() and hasattr(arguments, action.dest) and action.option_strings
             and (value := getattr(arguments, action.dest)) != parser.get_default(action.dest)}
    if not found:
        return []
    return [f"no tested release of Megatron-LM has {', '.join(f'{name} ({value})' for name, value in found.items())}: "
            "nobody knows what becomes of that after a failure. Compare a short run with one without the plugin"]
