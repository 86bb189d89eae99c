"""What the training scripts of all systems share: the quickstart's model and text, an iteration, and a line for each.

Every system trains the same model on the same windows of the same text, `BATCH` windows an iteration, with AdamW. The
others train it data-parallel, a copy of the whole model in each process, which is what they do for a job this small;
ours trains it as a grid of pipelines (gpt_deepspeed.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpt_deepspeed import Shape, Windows, layers, loss_function, read_text

BATCH = 16
"""Windows an iteration."""
LEARNING_RATE = 1e-3
SAVE_EVERY = 10
"""Iterations between two checkpoints, where a system goes on from a checkpoint."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for iterations.jsonl, checkpoints and results")
    parser.add_argument("--workers", type=int, required=True, help="of a job in which nobody is lost")
    return parser.parse_args()


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = Shape(dropout=0.0)
    model = nn.Sequential(*(kind(argument) for kind, argument in layers(shape)))
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def training_text() -> Windows:
    return Windows(read_text(None), Shape().length, validation=False)


def compute(model: nn.Module, windows: Windows, iteration: int, share: Iterable[int]) -> Tensor:
    """Gradients of this share of the iteration's windows into `.grad`; returns its share of the loss.

    The loss is divided by the whole batch, so that the sum over the shares is the batch's mean.
    """
    total = torch.zeros(())
    for index in share:
        text, following = windows[(iteration * BATCH + index) % len(windows)]
        loss = loss_function(model(text[None]), following[None]) / BATCH
        loss.backward()
        total += loss.detach()
    return total


def add_up(model: nn.Module, loss: Tensor) -> Tensor:
    """Gradients and loss become the sums over all workers, in one reduction; returns the loss."""
    parameters = list(model.parameters())
    flat = torch.cat([*(parameter.grad.flatten() for parameter in parameters), loss[None]])
    dist.all_reduce(flat)
    for parameter, piece in zip(parameters, flat[:-1].split([parameter.numel() for parameter in parameters])):
        parameter.grad.copy_(piece.view_as(parameter))
    return flat[-1]


def done(folder: Path, worker: int, iteration: int, loss: float, samples: int = BATCH) -> None:
    """A line for an iteration whose step this worker has made: what the program measures by."""
    line = {"t": time.time(), "worker": worker, "pid": os.getpid(), "iteration": iteration, "loss": loss,
            "samples": samples}
    with (folder / "iterations.jsonl").open("a") as file:  # one short write a line
        file.write(json.dumps(line) + "\n")


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, iteration: int) -> None:
    """A checkpoint, whole or not at all."""
    part = path.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}, part)
    part.replace(path)


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The next iteration: 0 where there is no checkpoint."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["iteration"]) + 1


def result(folder: Path, worker: int, model: nn.Module) -> None:
    """The final parameters, whole or not at all."""
    part = folder / f"result-{worker}.part"
    torch.save(model.state_dict(), part)
    part.replace(part.with_suffix(".pt"))
