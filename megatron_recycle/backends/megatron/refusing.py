"""What a user is told of a job's options before anything is built: refusals, or what is set otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from megatron_recycle.environment import Launched
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.comm.standalone import is_joining

_HEARD = 5.0
"""Seconds that a silent rank stays, since torchrun ends all with the first one that ends, and another is to speak."""
_REFUSED = 2
"""Exit status, as of a wrong option on any command line."""


def refuse_or_tell(judge: Callable[[], list[str]]) -> None:
    """Print what ``judge`` refuses, by an UnsupportedError, and end with status 2; or log the lines that it returns, on
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
