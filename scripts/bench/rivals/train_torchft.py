"""Data-parallel training with torchft: each process is a replica group of its own; those that are left go on without
the samples of the one that is gone."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import common
import torch
import torch.distributed as dist
from torchft import Manager, Optimizer, ProcessGroupGloo

args = common.arguments()
worker = int(os.environ["REPLICA_GROUP_ID"])
TIMEOUT = timedelta(seconds=30)
"""As in torchft's own example (train_ddp.py)."""
model, plain = common.model_and_optimizer()
windows = common.training_text()


def load(state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    plain.load_state_dict(state["optimizer"])


store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=TIMEOUT), min_replica_size=2, load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()}, replica_id=f"replica_{worker}",
    store_addr="127.0.0.1", store_port=store.port, rank=0, world_size=1, timeout=TIMEOUT,
)
optimizer = Optimizer(manager, plain)
while (iteration := manager.current_step()) < args.iterations:
    optimizer.zero_grad()  # asks for the quorum
    share = range(worker, common.BATCH, args.workers)
    loss = common.compute(model, windows, iteration, share) * args.workers
    # Its own DistributedDataParallel fails with an assertion here when a reduction has failed (0.2.0).
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]) * args.workers
    manager.allreduce(flat).wait()  # the mean over those that take part
    pieces = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces):
        parameter.grad.copy_(piece.view_as(parameter))
    optimizer.step()
    if manager.current_step() > iteration:  # it was committed
        common.done(args.folder, worker, iteration, float(loss), manager.num_participants() * len(share))
common.result(args.folder, worker, model)
manager.shutdown(wait=False)
os._exit(0)
