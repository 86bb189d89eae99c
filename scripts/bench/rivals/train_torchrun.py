"""Data-parallel training that torchrun starts again from its newest checkpoint when a worker fails."""

from __future__ import annotations

import os
from datetime import timedelta

import common
import torch
import torch.distributed as dist

args = common.arguments()
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank, size = dist.get_rank(), dist.get_world_size()
model, optimizer = common.model_and_optimizer()
windows = common.training_text()
checkpoint = args.folder / "checkpoint.pt"
first = common.restore(checkpoint, model, optimizer)
for iteration in range(first, args.iterations):
    optimizer.zero_grad()
    loss = common.compute(model, windows, iteration, range(rank, common.BATCH, size))
    loss = common.add_up(model, loss)
    optimizer.step()
    common.done(args.folder, rank, iteration, float(loss))
    if rank == 0 and iteration % common.SAVE_EVERY == common.SAVE_EVERY - 1:
        common.save(checkpoint, model, optimizer, iteration)
if rank == 0:
    common.result(args.folder, rank, model)
dist.barrier()
os._exit(0) if torch.cuda.is_initialized() else dist.destroy_process_group()
