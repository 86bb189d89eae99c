"""A model whose activations dwarf its messages, and the body of its workers, which watch the C library's allocator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import megatron_recycle
from megatron_recycle.config import RecycleConfig

NARROW, WIDE, ROWS, MICROBATCHES = 8, 256, 1024, 4
_M_MMAP_THRESHOLD = -3


class Numbers(Dataset):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.full((NARROW,), (index % 97) / 97)
        return row, row


class Block(nn.Module):
    """Narrow at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.across, self.down = nn.Linear(NARROW, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, NARROW)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.across(functional.gelu(self.up(x)))))


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


class Allocator:
    """Bytes in large allocations, as the C library counts them."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libc.so.6")
        self._library.mallinfo2.restype = _Counts
        # Fixed: otherwise the library moves it up, and large tensors out of this count.
        assert self._library.mallopt(_M_MMAP_THRESHOLD, 1 << 18)

    def large(self) -> int:
        return int(self._library.mallinfo2().hblkhd)


class Watching:
    """Passes phases on, and keeps the most memory seen in an iteration above what its first forward found."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._allocator = inner, Allocator()
        self._base = 0
        self.peaks: dict[int, int] = {}

    def on(self, phase: str, iteration: int, action: Any) -> None:
        now = self._allocator.large()
        if phase == "forward" and iteration not in self.peaks:
            self._base = now
        if action is not None:
            self.peaks[iteration] = max(self.peaks.get(iteration, 0), now - self._base)
        self._inner.on(phase, iteration, action)


def train(observer_of: Callable[[str], Any], rank: int, *, stages: int, pipelines: int, iterations: int,
          settings: dict[str, Any]) -> dict[str, Any]:
    """Train; returns what the last iteration held, by the worker's count, the allocator's and the plan."""
    stage, pipeline = divmod(rank, pipelines)
    watching = Watching(observer_of(f"{pipeline}:{stage}"))
    config = RecycleConfig(**{"heartbeat_interval": 0.2, "heartbeat_timeout": 15.0, "planner_budget": 0.0,
                              "stall_floor": 60.0, **settings})
    megatron_recycle.enable(config, observer=watching)
    torch.manual_seed(7)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    model = PipelineModule([LayerSpec(Block) for _ in range(stages)], num_stages=stages,
                           loss_fn=functional.mse_loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=Numbers(),
        config={"train_batch_size": ROWS * MICROBATCHES * pipelines, "train_micro_batch_size_per_gpu": ROWS,
                "gradient_accumulation_steps": MICROBATCHES, "steps_per_print": 1000,
                "optimizer": {"type": "SGD", "params": {"lr": 0.01}}})
    losses = [engine.train_batch().item() for _ in range(iterations)]
    engine.settle()
    worker = engine.session.worker
    memory = worker.site.meters.memory
    memory.begin()  # the last iteration is complete
    result = {"losses": losses, "worker": str(worker.site.place.me), "counted": memory.peak,
              "before_b": memory.held().before_b, "after_b": memory.held().after_b,
              "allocated": watching.peaks[iterations - 1], "plan": worker.plan.to_json()}
    engine.session.finish()
    return result
