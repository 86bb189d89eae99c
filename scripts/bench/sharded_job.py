"""The training script of `sharding.py`: one wide stack of layers under DeepSpeed, which measures itself.

It counts the bytes of all tensors that live, at the moments when most do: at the end of each micro-batch's backward,
while something is sent or received, before and after the optimizer's step, and after the iteration. Processor time is
that of all threads of the process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

_TRANSFERS = ("send", "recv", "allreduce", "allreduce_coalesced", "_allgather_base", "allgather",
              "allgather_into_tensor_coalesced", "reduce", "broadcast")
_EVERY = 3
"""Of so many transfers one is looked at: that takes a while."""


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


def processor() -> float:
    """Seconds of processors that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


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
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--zero", type=int, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pipelines = size // arguments.stages
    most, seconds, begun, used, step, calls = {"training": 0, "reduce": 0, "step": 0, "after": 0}, [], 0, 0.0, 0, 0

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

    def noting(stock: Any) -> Any:
        def method(*given: Any, **keywords: Any) -> Any:
            nonlocal calls
            found, calls = stock(*given, **keywords), calls + 1
            if calls % _EVERY == 0:
                note("reduce")
            return found

        return method

    for name in _TRANSFERS:
        setattr(torch.distributed.ProcessGroup, name, noting(getattr(torch.distributed.ProcessGroup, name)))
    model = PipelineModule(
        [LayerSpec(nn.Linear, arguments.width, arguments.width, bias=False) for _ in range(arguments.layers)],
        num_stages=arguments.stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    data = Data(arguments.width, torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), training_data=None, config={
        "train_batch_size": arguments.batch * arguments.microbatches * pipelines,
        "train_micro_batch_size_per_gpu": arguments.batch, "gradient_accumulation_steps": arguments.microbatches,
        "steps_per_print": 10**6, "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"}, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": arguments.zero},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-6, "torch_adam": True}}})
    sampler = torch.utils.data.DistributedSampler(data, pipelines, engine.grid.get_data_parallel_id(), shuffle=False)
    loader = torch.utils.data.DataLoader(data, arguments.batch, sampler=sampler)
    iterator = iter(loader) if engine.is_first_stage() or engine.is_last_stage() else None
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    first = next(iter(engine.module.parameters()))
    first.register_hook(lambda gradient: note("training"))
    for step in range(arguments.iterations):
        if step == 4:
            torch.distributed.barrier()
            begun, used = sent(), processor()
        start = time.monotonic()
        engine.train_batch(iterator)
        seconds.append(time.monotonic() - start)
        note("after")
    used = processor() - used
    torch.distributed.barrier()
    (arguments.to / f"{rank}.json").write_text(json.dumps({
        "bytes": {moment: number / parameters for moment, number in most.items()}, "parameters": parameters,
        "sent": (sent() - begun) / (arguments.iterations - 4), "seconds": statistics.median(seconds[4:]),
        "processor": used / (arguments.iterations - 4)}))


if __name__ == "__main__":
    main()
