"""The smallest backend: pipeline stages of plain torch modules, no framework. It has what docs/backends.md lists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import megatron_recycle
from megatron_recycle.backends.options import Options
from megatron_recycle.backends.session import Session
from megatron_recycle.config import RecycleConfig
from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.comm.standalone import backend_for, set_up
from megatron_recycle.runtime.compute.data import Batch, DatasetSource
from megatron_recycle.runtime.compute.optimizer_state import OptimizerState
from megatron_recycle.runtime.compute.sharded_optimizer import ShardedOptimizer
from megatron_recycle.runtime.compute.split import Splitter
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.stage import Averaging, Chunk, Forward, Tie, fingerprint

CPU = torch.device("cpu")


class ToyStage:
    """One stage (`runtime.stage.Stage`) without ties, clipping, or anything that a script may change on the way.

    Args:
        module: the stage's part of the model.
        optimizer: of its parameters.
        loss_fn: (output, labels) -> loss, at the last stage; None elsewhere.
        microbatches: of a pipeline; the loss is their mean.
    """

    device = CPU
    averaging: Averaging = "after"
    gradient_dtype: torch.dtype | None = None
    report_width = 0
    settings: Mapping[str, Any] = {}
    tied_stages: tuple[tuple[int, ...], ...] = ()
    ties: Sequence[Tie] = ()
    may_guess_wrong = False
    shards: ShardedOptimizer | None = None

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer,
                 loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None, microbatches: int) -> None:
        self.module, self.chunks = module, [Chunk(module)]
        self._optimizer, self._loss_fn, self._microbatches = optimizer, loss_fn, microbatches
        self._state = OptimizerState(module, optimizer)
        self._state.train(module.parameters())
        self.parameters: Sequence[nn.Parameter] = list(self._state.trained.values())
        self.model = f"{fingerprint(self.parameters)}, optimizer {type(optimizer).__name__}"
        self.references: dict[str, Any] = {}

    def look(self) -> bool:
        return False

    def running_chunk(self, chunk: int) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, inputs: tuple[torch.Tensor, ...] | None, batch: Batch | None) -> Forward:
        given = inputs or batch  # the first stage's inputs are the data
        assert given is not None
        output = self.module(given[0])
        if self._loss_fn is None:
            return Forward((inputs, output), (output,), None, roots=(output,))
        assert batch is not None
        loss = self._loss_fn(output, batch[1])
        return Forward((inputs, loss), (), loss, roots=(loss,))

    def backward(self, forward: Forward, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        inputs, output = forward.saved
        if gradients:
            output.backward(gradients[0])
        else:
            (output / self._microbatches).backward()
        return [tensor.grad for tensor in inputs or ()]

    def norm_square(self, gradients: Sequence[torch.Tensor]) -> float:
        return 0.0

    def zeros(self, gradients: Sequence[torch.Tensor]) -> float:
        return 0.0

    def coefficient(self, norm_squares: Sequence[float], weight: float) -> float:
        return 1.0

    def step(self, gradients: Sequence[torch.Tensor], coefficient: float) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        return self._state.tensors()

    def fixed(self) -> dict[str, torch.Tensor]:
        return self._state.fixed()

    def load_state(self, tensors: Mapping[str, torch.Tensor], counters: Any) -> None:
        self._state.load(tensors, counters)

    def reset_state(self, names: Collection[str]) -> None:
        self._state.reset(names)

    def counters(self) -> Any:
        return self._state.counters()

    def set_counters(self, counters: Any) -> None:
        self._state.set_counters(counters)

    def refer(self, references: Mapping[str, Any]) -> None:
        pass

    def summary(self, verdict: Any, reports: Any) -> bytes:
        return b""

    def recall(self, summary: bytes) -> None:
        assert summary == b""

    def regroup(self, groups: Any) -> None:
        pass


class Toy:
    """A trainer as a framework would have it: one process's part of a pipeline-parallel job.

    Args:
        layers: all of the model's, built; each stage keeps an equal share.
        loss_fn: (output, labels) -> loss.
        dataset: of (input, label).
        grid: stages, and micro-batches of each pipeline.
        batch: samples of a micro-batch.
        options: what `enable()` would have been given.
    """

    def __init__(self, layers: Sequence[nn.Module], loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
                 dataset: Any, grid: Grid, batch: int, options: Options) -> None:
        pipeline, number = divmod(dist.get_rank(), grid.stages)
        ranks = {worker: (worker.pipeline * grid.stages + worker.stage,) for worker in grid.workers()}
        place = Place(Worker(pipeline, number), grid, ranks, backend_for(CPU))
        share = len(layers) // grid.stages
        self.module = nn.Sequential(*layers[number * share:(number + 1) * share])
        optimizer = torch.optim.Adam(self.module.parameters(), lr=1e-2)
        self.stage = ToyStage(self.module, optimizer, loss_fn if place.last() else None, max(grid.microbatches))
        self.session = Session(place, options.resolve({}), options, CPU)
        self._data = DatasetSource(dataset, grid.pipelines, batch, seeds=self.session.seeds())

    def train(self) -> float:
        """One iteration; returns the mean loss of its global batch. Raises SystemExit if the job cannot go on."""
        with self.session.call():
            if not self.session.started:
                self.session.start(self.stage, Splitter(self.module), self._data)
            self.session.begin()
            return self.session.train()

    def save(self) -> bool:
        """What all workers do together, such as a checkpoint; False if it is left out since some are missing."""
        def write() -> bool:
            dist.barrier()
            return True

        return bool(self.session.together("save()", write, False))


class Words(torch.utils.data.Dataset):
    """Samples of (input, label) that anybody can compute."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=numbers), torch.randint(4, (), generator=numbers)


def train(observer_of: Callable[[str], Any], rank: int, *, stages: int = 2, pipelines: int = 2, microbatches: int = 3,
          iterations: int = 6, begun: Callable[[int, int, int], None] | None = None,
          trained: Callable[[int, float], None] | None = None) -> Any:
    """The body of a worker, for `tests.backends.comparing`. ``saved`` is what `Toy.save` gave, before the first
    iteration and after each. ``begun``(stage, stages, pipelines) and ``trained``(iteration, loss): more of the
    script."""
    config = RecycleConfig(heartbeat_interval=0.2, heartbeat_timeout=15.0, planner_budget=0.0, stall_floor=60.0,
                           verify="peers", reduction="exact")
    options = Options(config, observer=observer_of(str(Worker(*divmod(rank, stages)))), setup=set_up())
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    layers: list[nn.Module] = []
    for _ in range(stages):
        layers += [nn.Linear(8, 8), nn.Sequential(nn.GELU(), nn.Dropout(0.1))]
    toy = Toy([*layers[:-1], nn.Linear(8, 4)], functional.cross_entropy, Words(),
              Grid(stages, (microbatches,) * pipelines), 2, options)
    if begun is not None:
        begun(toy.session.place.me.stage, stages, pipelines)
    saved, losses, told = [toy.save()], [], list[Any]()
    megatron_recycle.on_event(told.append)
    for iteration in range(iterations):
        losses.append(toy.train())
        if trained is not None:
            trained(iteration, losses[-1])
        saved.append(toy.save())
    result = {"losses": losses, "saved": saved, "stage": toy.session.place.me.stage,
              "members": [str(worker) for worker in toy.session.live()],
              "told": [(event["event"], event.get("workers")) for event in told], "status": megatron_recycle.status(),
              "parameters": {name: tensor.numpy().copy() for name, tensor in toy.stage.state().items()}, "state": []}
    toy.session.finish()
    return result
