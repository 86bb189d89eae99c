"""Imported last by the server that test workers are forked from: what it has loaded is no garbage, and no collection in
a worker looks at it again, or copies its pages.

DeepSpeed asks the C compiler what it could build when the first engine of a process is made, which takes as long as all
else that a test worker does until it trains: it is asked here, once."""

from __future__ import annotations

import gc

from deepspeed import ops

_ = ops.__compatible_ops__
gc.collect()
gc.freeze()
