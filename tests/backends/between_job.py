"""Runs the rows of `between_rows` one after another in the same four processes: stock's engine, then ours beside it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import numpy
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.pipe import topology
from torch.utils.data import Dataset, DistributedSampler

from megatron_recycle.backends.deepspeed.engine import install
from megatron_recycle.backends.options import Options
from megatron_recycle.config import RecycleConfig
from megatron_recycle.control import Coordinator, Timeouts
from megatron_recycle.control.journal import Journal
from megatron_recycle.control.planning import Planning
from megatron_recycle.control.searches import Plans
from megatron_recycle.errors import RecycleError
from megatron_recycle.runtime.comm.default_group import World
from tests.backends.between_rows import ROWS, WIDTH, Row

STAGES, PIPELINES, BATCH, STEPS = 2, 2, 2, 2


class Points(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=draw), torch.randn(WIDTH, generator=draw)


def run_rows(observer_of: Callable[[str], Any], rank: int, *, numbers: Sequence[int]) -> list[tuple[Any, Any, int]]:
    """For each row: what stock ended with, what the plugin did (`_train`), and on rank 0 how many steps were undone."""
    logging.disable(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    stock = deepspeed.initialize
    made: dict[tuple[int, ...], Any] = {}
    fresh = topology.dist.new_group

    def new_group(ranks: Sequence[int]) -> Any:
        key = tuple(ranks)
        if key not in made:
            made[key] = fresh(ranks)
        return made[key]

    topology.dist.new_group = new_group  # every engine would make its own, with threads of their own
    World.abort = lambda self: None  # the end of a row's job is not that of the next ones'
    results = []
    for number in numbers:
        deepspeed.initialize = stock
        expected = _train(ROWS[number], rank, plugin=False) if ROWS[number].refused is None else None
        events: list[Mapping[str, Any]] = []
        with _coordinator(rank, number, events) as (address, token):
            os.environ.update({"RECYCLE_COORDINATOR": address, "RECYCLE_TOKEN": token})
            config = RecycleConfig(**{"heartbeat_interval": 0.2, "heartbeat_timeout": 15.0, "planner_budget": 0.0,
                                      "stall_floor": 60.0, "verify": "peers", **ROWS[number].settings})
            install(Options(config=config))
            found = _train(ROWS[number], rank, plugin=True)
            torch.distributed.barrier()
        results.append((expected, found, len({event["iteration"] for event in events
                                              if event["event"] == "rolled_back"})))
    return results


def _train(row: Row, rank: int, plugin: bool) -> Any:
    """Bytes of everything by name; a text if it was refused, or ended by another worker's refusal (empty then)."""
    torch.manual_seed(7)
    data = Points(row.samples)
    model = PipelineModule(row.layers(), num_stages=STAGES, partition_method="uniform",
                           loss_fn=lambda output, label: (output - label).square().mean())
    config = {"train_batch_size": BATCH * STEPS * PIPELINES, "train_micro_batch_size_per_gpu": BATCH,
              "gradient_accumulation_steps": STEPS, "steps_per_print": 1000, "gradient_clipping": row.clipping,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}, **row.config}
    more = row.prepare(model)
    if "optimizer" in more:
        config.pop("optimizer")
    else:
        more["model_parameters"] = list(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=config, training_data=data if plugin else None, **more)
    if not plugin:
        # Stock would start loader processes; the same order without them.
        sampler = DistributedSampler(data, PIPELINES, engine.grid.get_data_parallel_id(), shuffle=False)
        engine.set_dataloader(RepeatingLoader(engine.deepspeed_io(data, data_sampler=sampler, num_local_io_workers=0)))
    engine.points = data
    memo: dict[str, Any] = {}
    losses = []
    try:
        for iteration in range(row.iterations):
            row.script(engine, iteration, memo)
            losses.append(engine.train_batch(getattr(engine, "data_iter", None)))
        row.script(engine, row.iterations, memo)
        if plugin:
            engine.settle()
    except (RecycleError, SystemExit) as error:
        # As at the end of a process that has failed.
        engine.session.fail(error)
        engine.session.finish()
        return str(error) if isinstance(error, RecycleError) else ""
    found = {f"loss {index}": loss for index, loss in enumerate(losses)}
    found.update(engine.module.named_parameters())
    for index, state in engine.optimizer.state_dict()["state"].items():
        found.update({f"{key} {index}": value for key, value in state.items() if isinstance(value, torch.Tensor)})
    for index, tensor in enumerate([*memo.get("kept", []), *memo.get("evaluated", [])]):
        found[f"kept {index}"] = tensor
    for index, group in enumerate(engine.optimizer.param_groups):
        found[f"rate {index}"] = torch.tensor(group["lr"], dtype=torch.float64)
    if plugin:
        engine.session.finish()
    return {name: numpy.ascontiguousarray(tensor.detach().numpy()) for name, tensor in found.items()
            if tensor is not None}


@contextmanager
def _coordinator(rank: int, number: int, events: list[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """One for each row, in a thread of rank 0, whose ``events`` are kept there."""
    store = torch.distributed.distributed_c10d._get_default_store()
    key = f"coordinator of row {number}"
    if rank:
        yield store.get(key).decode(), "token"
        return
    ready, over = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as folder:
        async def serve() -> None:
            planning = Planning()
            coordinator = Coordinator(
                size=STAGES * PIPELINES, token="token", journal=Journal.create(Path(folder) / "journal.jsonl"),
                plans=Plans(planning.plan, planning.improve, planning.moves, planning.redo),
                emit=events.append,
                timeouts=Timeouts(), launched=False, listener=socket.create_server(("127.0.0.1", 0)))
            store.set(key, await coordinator.start())
            ready.set()
            await over.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        assert ready.wait(60)
        yield store.get(key).decode(), "token"
        loop.call_soon_threadsafe(over.set)
        thread.join()
