"""What the script of a worker in memory calls between two iterations, and the values that a full grid would have."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_recycle.runtime.comm.living.calls import AllGather, AllReduce, Broadcast, Call, adding
from megatron_recycle.runtime.comm.living.exchange import Group
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.worker import StageWorker


def collect(worker: StageWorker, place: Place, iteration: int, loss: float) -> list[float]:
    """A barrier, a sum and a gathering over all, sums over the stage and the pipeline, and a broadcast from each rank;
    what they brought here. Every value is one that a worker's peers have, too."""
    part, me = place.part, place.ranks[place.me][place.part]
    ranks = tuple(sorted(rank for ranks in place.ranks.values() for rank in ranks))
    peers = tuple(sorted(each[part] for other, each in place.ranks.items() if other.stage == place.me.stage))
    ours = tuple(sorted(each[part] for other, each in place.ranks.items() if other.pipeline == place.me.pipeline))
    everybody, stage, pipeline = (Group(each, each.index(me)) for each in (ranks, peers, ours))
    mine = torch.tensor([loss, *(place.me.stage + iteration / number for number in range(3, 14))], dtype=torch.float64)
    add = adding(dist.ReduceOp.SUM)
    assert add is not None
    total, of_stage, of_pipeline = mine.clone(), mine.clone(), mine.clone()
    slots = [torch.zeros(len(mine), dtype=torch.float64) for _ in ranks]
    told = [mine.clone() for _ in ranks]

    def make(group: Group, call: Call) -> None:
        entered = worker.standing.entered
        if entered is not None and entered >= iteration:
            worker.recall(group, call, iteration)
        else:
            worker.collective(group, call, iteration)

    make(everybody, Call())
    make(everybody, AllReduce([total], add))
    make(stage, AllReduce([of_stage], add))
    make(pipeline, AllReduce([of_pipeline], add))
    make(everybody, AllGather([slots], [mine]))
    for root, tensor in enumerate(told):
        make(everybody, Broadcast([tensor], root))
    return torch.cat([total, of_stage, of_pipeline, *slots, *told]).tolist()
