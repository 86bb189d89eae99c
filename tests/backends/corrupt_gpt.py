"""Runs a script of Megatron-LM's with a dataset in which one training sample cannot be read: CORRUPT names it.

The checkout is to be on PYTHONPATH.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from megatron.core.datasets.gpt_dataset import GPTDataset

CORRUPT = int(os.environ["CORRUPT"])
stock = GPTDataset.__getitem__


def read(self: Any, index: int) -> Any:
    if index == CORRUPT and self.index_split.name == "train":
        raise ValueError(f"sample {index} is corrupt")
    return stock(self, index)


GPTDataset.__getitem__ = read
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
