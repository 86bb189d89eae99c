"""The training script of `sharding.py`: one wide stack of layers under DeepSpeed, which measures itself.

It counts the bytes of all tensors that live, at the moments when most do: at the end of each micro-batch's backward,
before and after the optimizer's step, and after the iteration.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

BATCH = 1


class Data(torch.utils.data.Dataset):
    """Rows of ones, as many as anybody asks for."""

    def __init__(self, width: int, kind: torch.dtype) -> None:
        self._row = torch.ones(width, dtype=kind)

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._row, self._row


def living() -> int:
    """Bytes of all tensors of this process."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter):
            for tensor in (each, each.grad) if each.is_leaf else (each,):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def sent() -> int:
    """Bytes that this network namespace has sent to itself."""
    line, = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--zero", type=int, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pipelines = size // arguments.stages
    most, seconds, begun, step = {"training": 0, "step": 0, "after": 0}, [], 0, 0

    def note(moment: str) -> None:
        if step == 3:  # the optimizer has its state by then; later ones are timed
            most[moment] = max(most[moment], living())

    plain = torch.optim.Adam.step

    def watched(self: torch.optim.Adam, *given: Any) -> Any:
        note("step")
        found = plain(self, *given)
        note("step")
        return found

    torch.optim.Adam.step = watched  # type: ignore[method-assign]  # hooks would be refused: steps may be undone
    model = PipelineModule(
        [LayerSpec(nn.Linear, arguments.width, arguments.width, bias=False) for _ in range(arguments.layers)],
        num_stages=arguments.stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    data = Data(arguments.width, torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), training_data=None, config={
        "train_batch_size": BATCH * arguments.microbatches * pipelines, "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": arguments.microbatches, "steps_per_print": 10**6, "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"}, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": arguments.zero},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-6, "torch_adam": True}}})
    sampler = torch.utils.data.DistributedSampler(data, pipelines, engine.grid.get_data_parallel_id(), shuffle=False)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler)
    iterator = iter(loader) if engine.is_first_stage() or engine.is_last_stage() else None
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    first = next(iter(engine.module.parameters()))
    first.register_hook(lambda gradient: note("training"))
    for step in range(arguments.iterations):
        if step == 4:
            torch.distributed.barrier()
            begun = sent()
        start = time.monotonic()
        engine.train_batch(iterator)
        seconds.append(time.monotonic() - start)
        note("after")
    torch.distributed.barrier()
    (arguments.to / f"{rank}.json").write_text(json.dumps({
        "bytes": {moment: number / parameters for moment, number in most.items()}, "parameters": parameters,
        "sent": (sent() - begun) / (arguments.iterations - 4), "seconds": statistics.median(seconds[4:])}))


if __name__ == "__main__":
    main()
