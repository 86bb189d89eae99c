"""Parts of the emulated stages of both backends: samples that know their number, and a layer that sleeps.

Forward, input gradient and weight gradient of a stage sleep for given times; the tensors between stages are real.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from megatron_recycle.runtime.compute.deferral import task_now

WIDTH = 64


class Numbers(Dataset):
    """Samples that carry their own number through the pipeline."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = torch.zeros(WIDTH)
        sample[0] = index
        return sample, torch.zeros(1)


class WeightLater:
    """A weight gradient that is not computed yet, as the runtime's queue takes it."""

    def __init__(self, stage: Emulated, number: int, gradient: torch.Tensor) -> None:
        self.weight, self.bias, self.fused = stage.weight, None, None
        self.inputs = self.output_gradient = gradient
        self._stage, self._number = stage, number

    def contributions(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        yield self.weight, self._stage.weight_gradient(self._number)


class Emulated(nn.Module):
    """One stage. ``find_splitter`` gives the object that defers weight gradients, or None."""

    def __init__(self, seconds: tuple[float, float, float], parameters: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(parameters))
        self.find_splitter: Callable[[], Any] = lambda: None
        self.ran: list[tuple[str, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, self)

    def weight_gradient(self, number: int) -> torch.Tensor:
        time.sleep(self.seconds[2])
        self.ran.append(("W", number))
        return torch.full_like(self.weight, 1e-3 * (1 + number % 7))


class _Sleep(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, stage: Emulated) -> torch.Tensor:
        time.sleep(stage.seconds[0])
        ctx.stage, ctx.number, ctx.made_in = stage, int(x.flatten()[0]), task_now()
        stage.ran.append(("F", ctx.number))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient, = gradients
        stage = ctx.stage
        time.sleep(stage.seconds[1])
        stage.ran.append(("B", ctx.number))
        splitter = stage.find_splitter()
        queue = None if splitter is None else splitter.deferral.queue_for(ctx.made_in)
        if queue is None:
            return gradient.clone(), stage.weight_gradient(ctx.number), None
        queue.deferred.append(WeightLater(stage, ctx.number, gradient))
        return gradient.clone(), None, None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipelines", type=int, required=True)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--seconds", type=float, nargs=3, required=True, metavar=("F", "B", "W"))
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--clipping", type=float, default=0.0)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def write(folder: Path, rank: int, place: tuple[int, int], ends: Sequence[float], stage: Emulated) -> None:
    """Write the file of this worker for `emulated.py`: ``place`` is (pipeline, stage), ``ends`` the end of each
    iteration."""
    result = {"pipeline": place[0], "stage": place[1], "ends": list(ends), "ran": stage.ran,
              "weight": [stage.weight[0].item(), stage.weight.sum().item()]}
    (folder / f"worker-{rank}.json").write_text(json.dumps(result))
