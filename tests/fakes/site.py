"""A worker's `Site` with nobody else: real in all its parts, but for the agent and the network."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from megatron_recycle.config import RecycleConfig
from megatron_recycle.membership import Process, Standing
from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.activity import Activity
from megatron_recycle.runtime.compute.random_state import Generators
from megatron_recycle.runtime.compute.split import Splitter
from megatron_recycle.runtime.grids import Grids
from megatron_recycle.runtime.lent.neighbourhood import Neighbourhood
from megatron_recycle.runtime.phases import Phases
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.site import Framework, Meters, Site
from megatron_recycle.runtime.stage import Chunk
from megatron_recycle.runtime.trainable import Trainable

CPU = torch.device("cpu")
FIRST = Worker(0, 0)


class AgentAlone:
    """An agent that reaches no coordinator: attributes are set by the test, events are kept.

    Attributes:
        generation: the one in force, which is also the last that was announced.
        events: said by the worker.
    """

    def __init__(self, generation: int = 1) -> None:
        self.stop_generation = generation
        self.ended: Any = None
        self.outside = self.out_of_reach = False
        self.events: list[Any] = []

    def hint(self, generation: int, error: str) -> None:
        pass

    def event(self, event: Any) -> None:
        self.events.append(event)


class PlainStage:
    """A stage that is ``module``, without an optimizer."""

    device, shards, report_width, gradient_dtype = CPU, None, 0, None
    tied_stages, ties, may_guess_wrong = (), (), False
    references: Mapping[str, Any] = {}

    def __init__(self, module: nn.Module) -> None:
        self.module, self.chunks = module, [Chunk(module)]
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def look(self) -> bool:
        return False

    def running_chunk(self, chunk: int) -> AbstractContextManager[None]:
        return nullcontext()

    def state(self) -> Mapping[str, torch.Tensor]:
        return {f"parameter {name}": each.detach() for name, each in self.module.named_parameters()}

    def fixed(self) -> Mapping[str, torch.Tensor]:
        return {}

    def counters(self) -> Any:
        return {}


def site_of(stage: Any, *, me: Worker = FIRST, grid: Grid | None = None, agent: Any = None,
            data: Any = None, splitter: Any = None, standing: Standing | None = None, network: Any = None,
            activity: Activity | None = None, **settings: Any) -> Site:
    """The site of ``me``, which trains ``stage``; ``settings`` are those of `RecycleConfig`."""
    grid = grid or Grid(1, (1,))
    agent, standing = agent or AgentAlone(), standing or Standing(Process(me))
    config, generators = RecycleConfig(**settings), Generators(CPU)
    generators.adopt("the model", stage.module)
    return Site(
        place=Place(me, grid, {worker: (rank,) for rank, worker in enumerate(grid.workers())}, "gloo"), config=config,
        framework=Framework(stage, splitter or Splitter(stage.module), data, generators,
                            Grids(grid, config.block_size)),
        agent=agent, network=network, phases=Phases(standing, agent, activity or Activity(1.0), None),
        trainable=Trainable(stage, Neighbourhood({me.stage: None}, range(grid.stages), lambda module: None, False)),
        meters=Meters(CPU), asked=None)  # type: ignore[arg-type]
