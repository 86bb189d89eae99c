"""What a micro-batch holds is what is still alive when its backward begins, whoever holds it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_recycle.runtime.compute.device import Cpu
from megatron_recycle.runtime.compute.memory import ActivationMemory, Held, nbytes
from megatron_recycle.runtime.compute.split import Splitter, WeightQueue
from megatron_recycle.runtime.memory_budget import KeptBytes, kept_bytes, room_on

ROWS, WIDTH = 64, 32
TENSOR = ROWS * WIDTH * 4


class Stage(nn.Module):
    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.checkpointing = checkpointing

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.sigmoid(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x)
        if self.checkpointing == "none":
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.checkpointing == "reentrant")


def micro_batch(stage: Stage, splitter: Splitter, memory: ActivationMemory, number: int) -> torch.Tensor:
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number), requires_grad=True)
    with memory.forward((0, number), [inputs]):
        outputs = stage(inputs)
    result = outputs.detach().clone()
    memory.begin_backward((0, number), [result])
    queue = WeightQueue()
    with splitter.into(queue, [outputs]):
        outputs.backward(result)
    memory.end_backward((0, number), queue)
    return result


@pytest.mark.parametrize(("checkpointing", "alive"), [
    ("none", 4),  # the received input, frozen's output, the sigmoid's, the stage's own
    ("reentrant", 3), ("non-reentrant", 3),  # all but the sigmoid's
])
def test_what_a_micro_batch_holds_is_measured(checkpointing, alive):
    stage, memory = Stage(checkpointing), ActivationMemory(Cpu())
    splitter = Splitter(stage)
    memory.begin()
    for number in range(2):
        micro_batch(stage, splitter, memory, number)
    held = memory.held()
    assert held.before_b == alive * TENSOR
    # down: the sigmoid's output and its output's gradient; up: frozen's output and a gradient
    assert held.after_b == 4 * TENSOR and held.message == memory.message == TENSOR
    assert memory.now == 2 * held.after_b
    memory.weight((0, 0))
    memory.begin()
    assert memory.now == 0 and memory.peak == max(held.before_b, held.after_b) + held.after_b


def test_each_chunk_of_a_stage_holds_what_it_holds_itself():
    memory, wide = ActivationMemory(Cpu()), torch.zeros(ROWS, 2 * WIDTH)
    memory.begin()
    kept = []
    for number in range(2):
        for chunk, received in ((0, wide), (1, wide[:ROWS // 2].clone())):
            with memory.forward((0, number, chunk), [received]):
                kept.append(torch.zeros(chunk + 3, TENSOR // 4))
    for number in range(2):
        for chunk in (1, 0):
            memory.begin_backward((0, number, chunk), [wide[:chunk + 1].clone()])
            memory.end_backward((0, number, chunk), WeightQueue())
            memory.weight((0, number, chunk))
    assert memory.held(0) == Held(2 * TENSOR + 3 * TENSOR, 0, 2 * TENSOR)
    assert memory.held(1) == Held(TENSOR + 4 * TENSOR, 0, TENSOR) and memory.message == 2 * TENSOR
    with memory.forward((0, 2, 1), None):
        assert memory.now == 0
    assert memory.now == memory.held(1).before_b


def test_measuring_changes_no_bit():
    torch.manual_seed(0)
    stage, memory = Stage("none"), ActivationMemory(Cpu())
    splitter = Splitter(stage)
    measured = [micro_batch(stage, splitter, memory, number) for number in range(3)]
    for number, found in enumerate(measured):
        inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        assert torch.equal(found, stage(inputs))


def test_shared_memory_counts_once():
    base = torch.zeros(4, 8)
    assert nbytes([base, base[1:], base.t(), torch.zeros(3)]) == 4 * 8 * 4 + 12


def test_what_does_not_grow_with_activations_is_taken_off_first():
    state = [torch.zeros(1000)] * 2
    fast = kept_bytes(state, undo=12000, gradient=4000, sums=(), peers=3, messages=500)
    assert fast == KeptBytes(4000, undo=12000, gradient=4000, sums=4000, spare=500)
    exact = kept_bytes(state, undo=0, gradient=4000, sums=[(0, 0, 1), (2, 1, 1)], peers=3, messages=0)
    assert exact.sums == 3 * 4000, "a run of blocks needs two buffers, a single block one"
    assert exact.spare == 4000 * (1 + 2)
    assert kept_bytes(state, 0, 4000, (), 3, 0, on_the_way=700).spare == 700, "shards: what travels of them"
    cpu = Cpu()
    assert room_on(cpu, None, fast, 0) is None, "nobody says how much of a host's memory is a worker's"
    assert room_on(cpu, 1.0, fast, 0) == 2**30 - 24500
    assert room_on(cpu, 1e-6, fast, 0) == 0
