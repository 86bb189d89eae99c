"""torchft with pipelines that sleep: each process stands for a replica group that is a whole pipeline, and its
iteration takes as long as 1F1B. For `validate_torchft.py`."""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo

parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, required=True, help="of an iteration")
parser.add_argument("--folder", type=Path, required=True)
args = parser.parse_args()
worker = int(os.environ["REPLICA_GROUP_ID"])
TIMEOUT = timedelta(seconds=30)
"""As in torchft's own example (train_ddp.py)."""
model = nn.Linear(64, 64)
plain = torch.optim.SGD(model.parameters(), lr=1e-3)


def load(state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    plain.load_state_dict(state["optimizer"])


def tell(**line: Any) -> None:
    with (args.folder / "lines.jsonl").open("a") as file:  # one short write a line
        file.write(json.dumps({"t": time.time(), "worker": worker, "pid": os.getpid(), **line}) + "\n")


store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=TIMEOUT), min_replica_size=1, load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()}, replica_id=f"replica_{worker}",
    store_addr="127.0.0.1", store_port=store.port, rank=0, world_size=1, timeout=TIMEOUT,
)
optimizer = Optimizer(manager, plain)
tell(ready=True)
while True:
    iteration = manager.current_step()
    optimizer.zero_grad()  # asks for the quorum
    time.sleep(args.seconds)
    flat = torch.full((64 * 64 + 64,), 1e-3)
    manager.allreduce(flat).wait()
    for parameter, piece in zip(model.parameters(), flat.split([64 * 64, 64])):
        parameter.grad = piece.view_as(parameter).clone()
    optimizer.step()
    if manager.current_step() > iteration:  # it was committed
        tell(iteration=iteration, groups=manager.num_participants())
