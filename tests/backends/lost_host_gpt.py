"""Runs a script of Megatron-LM's; LOSES names a rank of the job's first life and an iteration before which that one
kills its launcher, and so its host. Before that it cuts off the first file that CUTS, a pattern, finds.

The checkout is to be on PYTHONPATH.
"""

from __future__ import annotations

import glob
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import megatron_recycle.backends.megatron.schedule as ours

rank, before = os.environ["LOSES"].split()
stock = ours.RecycleSchedule._train


def train(self: Any, *arguments: Any) -> Any:
    if os.environ["RANK"] == rank and self.session.iteration + 1 == int(before):
        self.session.settle()
        file = Path(sorted(glob.glob(os.environ["CUTS"], recursive=True))[0])
        file.write_bytes(file.read_bytes()[:-100])
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)  # until that is its own end, too
    return stock(self, *arguments)


ours.RecycleSchedule._train = train  # type: ignore[method-assign]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
