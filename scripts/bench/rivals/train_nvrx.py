"""Data-parallel training in the wrapper of NVIDIA's resiliency extension: a failure starts the function again, in the
same processes, with those that are left, from the newest checkpoint."""

import os
from datetime import timedelta
from typing import Optional  # the wrapper looks for this very form, as a class and not as text

import common
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess

args = common.arguments()
worker = int(os.environ["RANK"])
windows = common.training_text()
GLOO_TIMEOUT = timedelta(seconds=10)
"""Its abort cannot end what waits in gloo: a worker that is no neighbour of the dead one waits this long."""


@inprocess.Wrapper(
    store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 1, "timeout": timedelta(seconds=60)},
    soft_timeout=timedelta(seconds=60),
    hard_timeout=timedelta(seconds=90),
)
def train(call_wrapper: Optional[inprocess.CallWrapper] = None) -> None:  # noqa: UP045
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 2, is_master=worker == 0,
                          multi_tenant=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    store = dist.PrefixStore(f"call {call_wrapper.iteration}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=GLOO_TIMEOUT)
    model, optimizer = common.model_and_optimizer()
    checkpoint = args.folder / "checkpoint.pt"
    for iteration in range(common.restore(checkpoint, model, optimizer), args.iterations):
        optimizer.zero_grad()
        loss = common.compute(model, windows, iteration, range(rank, common.BATCH, size))
        loss = common.add_up(model, loss)
        optimizer.step()
        common.done(args.folder, worker, iteration, float(loss))
        if rank == 0 and iteration % common.SAVE_EVERY == common.SAVE_EVERY - 1:
            common.save(checkpoint, model, optimizer, iteration)
    if rank == 0:
        common.result(args.folder, 0, model)
    dist.barrier()
    dist.destroy_process_group()


train()
