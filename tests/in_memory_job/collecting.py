"""What the script of a worker in memory calls between two iterations, and the values that a full grid would have."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.comm.user_collectives.calls import AllGather, AllReduce, Broadcast, Call, adding
from megatron_recycle.runtime.comm.user_collectives.exchange import Group
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.script_transfers import Message
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
        entered = worker.standing.joined_after
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


class Ring:
    """Messages from each rank to the next two, and some that are waited for an iteration later.

    Attributes:
        brought: (iteration, sender) -> what came, and None where an error has named the sender.
    """

    def __init__(self, worker: StageWorker, place: Place) -> None:
        self._worker = worker
        self._ranks = sorted(rank for ranks in place.ranks.values() for rank in ranks)
        self._me = place.ranks[place.me][place.part]
        self._later: list[tuple[tuple[int, int], torch.Tensor, Message | None]] = []
        self.brought: dict[tuple[int, int], float | None] = {}

    def go_round(self, iteration: int) -> None:
        for way, tag in ((1, 0), (1, 1), (2, 0)):
            sent = self._begin(way, tag, iteration, True)
            came = self._begin(-way, tag, iteration, False)
            if tag:
                self._later.append(came)
                continue
            self._wait(came)
            self._wait(sent)
        while len(self._later) > 1:
            self._wait(self._later.pop(0))

    def end(self) -> None:
        for one in self._later:
            self._wait(one)

    def _begin(self, way: int, tag: int, iteration: int,
               sends: bool) -> tuple[tuple[int, int], torch.Tensor, Message | None]:
        peer = (self._me + way) % len(self._ranks)
        tensor = torch.full((1,), right(iteration, self._me) if sends else -1.0, dtype=torch.float64)
        message, place = None, (iteration, -1 if sends else 10 * tag + peer)
        try:
            message = self._worker.transfer(Group(tuple(self._ranks), self._me), peer, tensor, tag, sends, iteration)
        except UnsupportedError as error:
            assert f"rank {peer}" in str(error)
        return place, tensor, message

    def _wait(self, one: tuple[tuple[int, int], torch.Tensor, Message | None]) -> None:
        place, tensor, message = one
        try:
            if message is not None:
                self._worker.arrive(message)
        except UnsupportedError as error:
            assert f"rank {message.peer}" in str(error)  # type: ignore[union-attr]
            message = None
        if place[1] >= 0:
            self.brought[place] = None if message is None else tensor.item()


def right(iteration: int, sender: int) -> float:
    """What it sends."""
    return 100.0 * iteration + sender
