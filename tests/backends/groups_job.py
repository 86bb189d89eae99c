"""A script with collectives of its own between two iterations, over all ranks and over groups that it has made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests import toy


class Script:
    """What one worker's script calls; every value is one that its peers have, too.

    Args:
        stage: of this worker.
        stages, pipelines: of the job. Ranks go through a pipeline first.
    """

    def __init__(self, stage: int, stages: int, pipelines: int) -> None:
        size = stages * pipelines
        self._stage = stage
        self._peers = [dist.new_group(list(range(each, size, stages))) for each in range(stages)][stage]
        self._line = dist.new_subgroups(stages)[0]
        self._size = size
        self.secrets: list[Any] = []
        """What only rank 0 knew before it told all, after each iteration."""

    def after(self, iteration: int, loss: float) -> list[Any]:
        """What the calls after ``iteration`` have brought, as bits or as they are."""
        secret = [os.urandom(8).hex()]
        dist.broadcast_object_list(secret, src=0)
        self.secrets += secret
        mine = torch.tensor([loss, self._stage + iteration / 3])
        total, mean, biggest, told, again, line = (mine.clone() for _ in range(6))
        dist.barrier()
        dist.all_reduce(total)
        dist.all_reduce(mean, group=self._peers)
        mean /= dist.get_world_size(self._peers)
        dist.all_reduce(biggest, dist.ReduceOp.MAX, async_op=True).wait()
        dist.all_reduce(line, group=self._line)
        gathered = [torch.zeros(2) for _ in range(self._size)]
        dist.all_gather(gathered, mine)
        whole = torch.zeros(2 * self._size)
        dist.all_gather_into_tensor(whole, mine)
        dist.broadcast(told, src=1)
        objects: list[Any] = [{"iteration": iteration, "stage": self._stage}]
        dist.broadcast_object_list(objects, src=2)
        everybody: list[Any] = [None] * self._size
        dist.all_gather_object(everybody, (self._stage, iteration))
        later = dist.new_group(list(range(self._size)))
        dist.all_reduce(again, group=later)
        dist.monitored_barrier()
        dist.monitored_barrier(later)
        piece = torch.zeros(2)
        dist.reduce_scatter_tensor(piece, whole, group=None)
        self._send()
        tensors = (total, mean, biggest, line, *gathered, whole, told, again, piece)
        numbers = [each.numpy().tobytes() for each in tensors]
        names = [(dist.get_backend(group), dist.get_backend_config(group)) for group in (None, self._line, later)]
        return [*numbers, objects, everybody, dist.get_world_size(), dist.get_rank(), names]

    def _send(self) -> None:
        """From rank to rank, among those that nobody kills."""
        rank, mine = dist.get_rank(), torch.full((3,), float(dist.get_rank()))
        came, told = torch.zeros(3), [None]
        if rank == 0:
            dist.send(mine, 3)
            dist.send_object_list(["from 0"], 1)
            dist.recv(came, 1)
            assert came.tolist() == [1.0] * 3
        elif rank == 1:
            dist.recv_object_list(told, 0)
            assert told == ["from 0"]
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, 0), dist.P2POp(dist.irecv, came, 3)]):
                work.wait()
            assert came.tolist() == [3.0] * 3
        elif rank == 3:
            work = dist.isend(mine, 1)
            assert dist.recv(came, 0) == 0 and came.tolist() == [0.0] * 3
            assert work is not None
            work.wait()


def train(observer_of: Callable[[str], Any], rank: int, *, after: Sequence[int] = (1, 2, 5), **arguments: Any) -> Any:
    """`toy.train`, with the script's collectives ``after`` some iterations; ``called``: what they brought;
    ``secrets``: `Script.secrets`."""
    called: list[Any] = []
    script: list[Script] = []

    def begun(stage: int, stages: int, pipelines: int) -> None:
        script.append(Script(stage, stages, pipelines))

    def trained(iteration: int, loss: float) -> None:
        if iteration in after:
            called.append(script[0].after(iteration, loss))

    return {**toy.train(observer_of, rank, begun=begun, trained=trained, **arguments), "called": called,
            "secrets": script[0].secrets}
