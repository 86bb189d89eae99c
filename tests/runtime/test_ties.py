"""Stages that share several parameters with different other stages add each of them up with the right ones."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.reduction import FastReduction
from megatron_recycle.runtime.comm.tags import STAGE
from megatron_recycle.runtime.comm.tags import WORLD as TAGS
from megatron_recycle.runtime.compute.accumulate import WHOLE, Layout
from megatron_recycle.runtime.stage import Tie
from tests.runtime.test_transport import Plain

LIMIT = 10.0  # seconds
WORDS, PLACES = (0, 1), (0, 2)  # the stages of two tied parameters


class Work:
    def __init__(self, end: Any = None) -> None:
        self.wait = lambda *_: end and end()


class World:
    """All workers, as one of them sees them: messages between threads by sender, receiver and tag."""

    def __init__(self, me: int, messages: dict[Any, queue.Queue]) -> None:
        self._me, self._messages = me, messages

    def rank(self) -> int:
        return self._me

    def size(self) -> int:
        return 6

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Work:
        self._messages[self._me, to, tag].put(tensors[0].clone())
        return Work()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
        return Work(lambda: tensors[0].copy_(self._messages[source, self._me, tag].get(timeout=LIMIT)))


class Peers:
    """All workers of one stage: sums, when all have come."""

    def __init__(self, size: int) -> None:
        self._size, self._given = size, []
        self._barrier = threading.Barrier(size)

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        self._given.append(tensors[0].clone())
        self._barrier.wait(LIMIT)
        tensors[0].copy_(sum(self._given[-self._size:]))
        self._barrier.wait(LIMIT)
        return Work()


def reduced(live: list[Worker]) -> dict[Worker, list[float]]:
    """What each worker's parameters get, of gradients 1 (pipeline 0) and 10 (pipeline 1), times 1, 100, 10000 by
    stage: 0 has copies of both tied ones, 1 of the first, 2 of the second."""
    messages: dict[Any, queue.Queue] = defaultdict(queue.Queue)
    stages = {stage: [worker for worker in live if worker.stage == stage] for stage in range(3)}
    groups_of = {stage: Peers(len(workers)) for stage, workers in stages.items()}
    found: dict[Worker, list[float]] = {}

    def work(me: Worker) -> None:
        tied = [(number, stages_of) for number, stages_of in enumerate((WORDS, PLACES)) if me.stage in stages_of]
        parameters = [nn.Parameter(torch.zeros(1)) for _ in tied]
        ties = [Tie(parameter, stages_of, first=True, number=number)
                for parameter, (number, stages_of) in zip(parameters, tied, strict=True)]
        layout = Layout(parameters)
        flat = torch.full((len(tied),), 10.0**me.pipeline * 100.0**me.stage)
        sums: Any = SimpleNamespace(layout=layout, sum=lambda piece: flat if piece is WHOLE else None)
        groups: Any = SimpleNamespace(me=me, peers=stages.__getitem__, rank=live.index,
                                      stage=Comm(groups_of[me.stage], Plain(), STAGE),
                                      world=Comm(World(live.index(me), messages), Plain(), TAGS))
        found[me] = FastReduction(1, 1).gradient(sums, groups, ties).tolist()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in live]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
    return found


def test_each_tie_is_added_up_over_its_own_stages():
    workers = [Worker(pipeline, stage) for pipeline in range(2) for stage in range(3)]
    words, places = 11.0 * 101, 11.0 * 10001
    expected = {0: [words, places], 1: [words], 2: [places]}
    assert reduced(workers) == {worker: expected[worker.stage] for worker in workers}


def test_a_tie_whose_stages_have_lost_workers_of_different_pipelines_does_not_change_the_others():
    workers = [worker for pipeline in range(2) for stage in range(3) if (worker := Worker(pipeline, stage)) != (1, 2)]
    words, places = 11.0 * 101, 11.0 + 10000
    expected = {0: [words, places], 1: [words], 2: [places]}
    assert reduced(workers) == {worker: expected[worker.stage] for worker in workers}
