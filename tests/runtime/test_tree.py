"""A few numbers added up over many workers: in threads here, which meet as processes would."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import torch

from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.tags import CONTROL
from megatron_recycle.runtime.comm.tree_allreduce import add_up
from tests.runtime.test_transport import Plain


class Work:
    def __init__(self, arrive: Any) -> None:
        self._arrive = arrive

    def wait(self) -> None:
        self._arrive()


class Wire:
    """A process group of one thread per rank."""

    def __init__(self, rank: int, size: int, boxes: dict[Any, Queue[torch.Tensor | None]]) -> None:
        self.rank, self.size = (lambda: rank), (lambda: size)
        self.boxes, self.sent = boxes, 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        self.sent += 1
        self.boxes[self.rank(), peer, tag].put(tensors[0].clone())
        return Work(lambda: None)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        def arrive() -> None:
            message = self.boxes[peer, self.rank(), tag].get(timeout=10)
            if message is None:
                raise RuntimeError("pair closed")
            tensors[0].copy_(message)
        return Work(arrive)


def wires(size: int) -> list[Wire]:
    boxes: dict[Any, Queue[torch.Tensor | None]] = {
        (one, other, 3): Queue() for one in range(size) for other in range(size)}
    return [Wire(rank, size, boxes) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 6, 9])
def test_everybody_gets_the_sum_with_few_messages(size: int):
    ranks = wires(size)
    tensors = [torch.tensor([float(rank), 1.0]) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda wire, tensor: add_up(tensor, Comm(wire, Plain(), CONTROL), 3), ranks, tensors))
    assert all(tensor.tolist() == [size * (size - 1) / 2, size] for tensor in tensors)
    assert sum(wire.sent for wire in ranks) == 2 * (size - 1) and max(wire.sent for wire in ranks) <= 3


def test_a_closed_connection_ends_the_wait():
    one, _ = wires(2)
    one.boxes[1, 0, 3].put(None)
    with pytest.raises(GenerationOver, match="pair closed"):
        add_up(torch.zeros(1), Comm(one, Plain(), CONTROL), 3)
