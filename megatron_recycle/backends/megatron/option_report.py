"""Messages on a job's options before anything is built: refusals, changed options, and untested options of Megatron-LM,
from a fork or a newer release.

All others are in `known_options.txt`, the options of the tested releases: `options` treats some of them, and accepts
the rest as it is. Nothing of Megatron is imported here.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

from megatron_recycle.environment import Launched
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.comm.standalone import is_joining

PARSER = "megatron.training.arguments"
_HEARD = 5.0
"""Seconds that a silent rank waits: torchrun ends all ranks with the first one, and another must print first."""
_REFUSED = 2
"""Exit status, as of a wrong option on any command line."""


def refuse_or_tell(judge: Callable[[], list[str]]) -> None:
    """Print the refusals of ``judge``, an UnsupportedError, and end with status 2; or log the lines that it returns, on
    the first rank."""
    launched = Launched.read()
    try:
        lines = judge()
    except UnsupportedError as error:
        if launched.run_dir is not None or not launched.local_rank:
            print(error, file=sys.stderr, flush=True)
        else:
            time.sleep(_HEARD)
        raise SystemExit(_REFUSED) from None  # no traceback: nothing is wrong with the script
    if not launched.rank and not is_joining():
        for line in lines:
            get_logger().info("megatron-recycle: %s", line)


@cache
def known() -> Collection[str]:
    """Options of the tested releases, by their attributes' names."""
    return frozenset(Path(__file__).with_name("known_options.txt").read_text().split())


def unknown(arguments: Any) -> list[str]:
    """A line on Megatron-LM's ``arguments`` that are neither `known` nor at their default; empty if there are none. A
    script's own options are not checked."""
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
