"""Parts of the emulated stages of both backends: samples that know their number, and layers that sleep.

Forward, input gradient and weight gradient of a layer sleep for given times; the tensors between stages are real.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from megatron_recycle.runtime.compute.deferral import task_now
from megatron_recycle.runtime.compute.split import DeferredLinear

WIDTH = 64
"""Numbers in a sample, and so in a message between stages, unless told otherwise."""
WITHIN = 0.002
"""Seconds within which an action's next layer follows; the same micro-batch in a worker's other chunk comes later."""


class Numbers(Dataset):
    """Samples that carry their own number through the pipeline."""

    def __init__(self, size: int, width: int = WIDTH) -> None:
        self.size = size
        self.width = width

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = torch.zeros(self.width)
        sample[0] = index
        return sample, torch.zeros(1)


class Process:
    """What a worker's layers do, its own and those that others lend it: how long, one after the other.

    Attributes:
        find_splitter: gives the object that defers weight gradients, or None.
        ran: kinds of work and numbers of micro-batches, one for each layer.
    """

    def __init__(self) -> None:
        self.find_splitter: Callable[[], Any] = lambda: None
        self.ran: list[tuple[str, int]] = []
        self._until = self._woke = 0.0

    def work(self, kind: str, number: int, seconds: float) -> None:
        """Sleep. Layers of one action take together what is said: one that woke up late makes the next one shorter."""
        now = time.perf_counter()
        goes_on = bool(self.ran) and self.ran[-1] == (kind, number) and now - self._woke < WITHIN
        self._until = (self._until if goes_on else now) + seconds
        time.sleep(max(0.0, self._until - now))
        self._woke = time.perf_counter()
        self.ran.append((kind, number))


PROCESS = Process()


class WeightLater(DeferredLinear):
    """A weight gradient that is not computed yet: sleeps."""

    layer: Emulated
    number: int

    @classmethod
    def of(cls, layer: Emulated, number: int, gradient: torch.Tensor) -> WeightLater:
        later = cls(gradient, gradient, layer.weight, None)
        later.layer, later.number = layer, number
        return later

    def contributions(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        yield self.layer.weight, self.layer.weight_gradient(self.number)


class Emulated(nn.Module):
    """One layer of a stage, or all of it."""

    def __init__(self, seconds: tuple[float, float, float], parameters: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, self)

    def weight_gradient(self, number: int) -> torch.Tensor:
        PROCESS.work("W", number, self.seconds[2])
        return torch.full_like(self.weight, 1e-3 * (1 + number % 7))


class _Sleep(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Emulated) -> torch.Tensor:
        ctx.layer, ctx.number, ctx.made_in = layer, int(x.flatten()[0]), task_now()
        PROCESS.work("F", ctx.number, layer.seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient, = gradients
        PROCESS.work("B", ctx.number, ctx.layer.seconds[1])
        splitter = PROCESS.find_splitter()
        queue = None if splitter is None else splitter.deferral.queue_for(ctx.made_in)
        if queue is None:
            return gradient.clone(), ctx.layer.weight_gradient(ctx.number), None
        queue.deferred.append(WeightLater.of(ctx.layer, ctx.number, gradient))
        return gradient.clone(), None, None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipelines", type=int, required=True)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--seconds", type=float, nargs=3, required=True, metavar=("F", "B", "W"))
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--clipping", type=float, default=0.0)
    parser.add_argument("--parameters", type=int, default=1000, help="of each layer")
    parser.add_argument("--width", type=int, default=WIDTH, help="numbers in a message between stages")
    parser.add_argument("--layers", type=int, nargs="+", default=[1], help="of a stage, or of each")
    parser.add_argument("--chunks", type=int, default=1, help="of a stage, under Megatron")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def write(folder: Path, rank: int, place: tuple[int, int], ends: Sequence[float],
          layers: Mapping[int, Emulated]) -> None:
    """Write the file of this worker for `emulated.py`: ``place`` is (pipeline, stage), ``ends`` the end of each
    iteration, ``layers`` the stage's by their numbers in the model."""
    result = {"pipeline": place[0], "stage": place[1], "ends": list(ends), "ran": PROCESS.ran, "weights": {
        number: [layer.weight[0].item(), layer.weight.sum().item()] for number, layer in layers.items()}}
    (folder / f"worker-{rank}.json").write_text(json.dumps(result))
