"""A script that knows nothing of the plugin and meets its siblings at torch's store, as any does."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import TCPStore

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
store = TCPStore(
    os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=60)
)
store.set(f"rank{rank}", "here")
store.wait([f"rank{other}" for other in range(size)])
print("all met")
