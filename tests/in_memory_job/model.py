"""A small model in stages, as the runtime sees a framework: for jobs whose workers are threads."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.compute.data import Batch
from megatron_recycle.runtime.compute.deferral import task_now
from megatron_recycle.runtime.compute.optimizer_state import OptimizerState
from megatron_recycle.runtime.compute.sharded_optimizer import ShardedOptimizer, Slot, even
from megatron_recycle.runtime.compute.split import DeferredLinear, Splitter
from megatron_recycle.runtime.lent.layers import lendable
from megatron_recycle.runtime.stage import Averaging, Chunk, Forward, Tie, fingerprint

VOCABULARY, WIDTH, BATCH, LENGTH = 11, 8, 2, 3
DROPOUT = 0.1


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens)


class Block(nn.Module):
    """Its dropout draws from a generator of its own: workers that are threads share torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.draw, self.dropout = torch.Generator(), DROPOUT

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(x.shape, generator=self.draw) > self.dropout
        return x + functional.gelu(self.linear(self.norm(x))) * kept


class Part(Block):
    """One of several that hold the columns of the matrix together, and all else each."""

    def __init__(self, part: int, parts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH // parts, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.columns = slice(part * WIDTH // parts, (part + 1) * WIDTH // parts)
        self.siblings: Comm
        self.splitter: RowSplitter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(x.shape, generator=self.draw) > self.dropout
        normed = _Sum.apply(self.norm(x), self, False)
        own = (self.linear(normed[..., self.columns]) if self.splitter is None
               else _Rows.apply(normed, self.linear.weight, self))
        return x + functional.gelu(_Sum.apply(own, self, True) + self.bias) * kept

    def rows(self, count: int) -> slice:
        """Those of ``count`` that this part keeps of its input."""
        part, parts = self.siblings.rank, self.siblings.size
        return slice(part * count // parts, (part + 1) * count // parts)

    def gather(self, count: int, own: torch.Tensor) -> torch.Tensor:
        """This part's columns of the whole input."""
        whole = own.new_zeros(count, WIDTH)
        whole[self.rows(count)] = own
        return _over_all(self.siblings, whole)[:, self.columns]


class RowSplitter(Splitter):
    """With sequence parallelism: each part keeps its rows of a layer's input for W, which gathers the others."""

    def adopt(self, module: nn.Module) -> None:
        super().adopt(module)
        for layer in module.modules():
            if isinstance(layer, Part):
                layer.splitter = self


class _Rows(torch.autograd.Function):
    """The product of a part's columns of ``x`` with ``weight``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, layer: Part) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        ctx.save_for_backward(flat[layer.rows(len(flat))].clone())
        ctx.weight, ctx.layer, ctx.shape, ctx.made_in = weight, layer, x.shape, task_now()
        return functional.linear(x[..., layer.columns], weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer, (own,) = ctx.layer, ctx.saved_tensors
        for_inputs = gradient.new_zeros(ctx.shape)
        for_inputs[..., layer.columns] = gradient.matmul(ctx.weight)
        item = DeferredLinear(own, gradient, ctx.weight, None,
                              gather=functools.partial(layer.gather, ctx.shape[:-1].numel()))
        queue = layer.splitter.deferral.queue_for(ctx.made_in)
        if queue is None:
            return for_inputs, dict(item.contributions())[ctx.weight], None
        queue.deferred.append(item)
        return for_inputs, None, None


class _Sum(torch.autograd.Function):
    """The sum over all parts, of the values or (``forth`` is false) of their gradients: of those in force, since a
    backward may be run in a later generation than its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Part, forth: bool) -> torch.Tensor:
        ctx.layer, ctx.forth = layer, forth
        return _over_all(layer.siblings, x) if forth else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient if ctx.forth else _over_all(ctx.layer.siblings, gradient), None, None


def _over_all(siblings: Comm, values: torch.Tensor) -> torch.Tensor:
    """As a framework's own collective, which says nothing of an abort where the library does not."""
    total = values.detach().clone(memory_format=torch.contiguous_format)
    if siblings.backend.ordered:
        siblings.group.allreduce([total]).wait()
    else:
        siblings.sum(total).wait()
    return total


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)


@functools.lru_cache(maxsize=4096)
def batch(pipeline: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, labels) of a micro-batch, each (BATCH, LENGTH)."""
    draw = torch.Generator().manual_seed(1000 * pipeline + number)
    return tuple(torch.randint(VOCABULARY, (BATCH, LENGTH), generator=draw) for _ in range(2))


class Data:
    """Micro-batches by place (`runtime.compute.data.DataSource`); ``length`` of the samples of each."""

    since = 0

    def __init__(self, length: Callable[[int], int] = lambda number: LENGTH) -> None:
        self._length = length

    def batch(self, pipeline: int, number: int) -> Batch:
        return tuple(tensor[:, :self._length(number)] for tensor in batch(pipeline, number))

    def forget(self, pipeline: int, before: int) -> None:
        pass


_ONE_BY_ONE = threading.Lock()  # torch's generator, which new layers draw from, is everybody's


def _parted(state: Mapping[str, torch.Tensor], part: int, parts: int) -> Mapping[str, torch.Tensor]:
    """What a part has of a stage's parameters."""
    width = WIDTH // parts
    return {name.replace("linear.bias", "bias"): value[:, part * width:(part + 1) * width]
            if name.endswith("linear.weight") and parts > 1 else value for name, value in state.items()}


@functools.cache
def _initial(stages: int, stage: int, tied: bool, blocks: int) -> Mapping[str, torch.Tensor]:
    """The same in all processes. Other workers' threads may set torch's generator meanwhile, which is the process's:
    two draws in a row that are alike were not disturbed."""
    found, again = _drawn(stages, stage, tied, blocks), _drawn(stages, stage, tied, blocks)
    while any(not torch.equal(found[name], again[name]) for name in found):
        found, again = again, _drawn(stages, stage, tied, blocks)
    return found


def _drawn(stages: int, stage: int, tied: bool, blocks: int) -> Mapping[str, torch.Tensor]:
    torch.manual_seed(7)
    layers = [Embedding(), *[Block() for _ in range(blocks)], Head()]
    if tied:
        with torch.no_grad():
            layers[-1].out.weight.copy_(layers[0].token.weight)
    begin, end = _share(len(layers), stages, stage)
    return nn.Sequential(*layers[begin:end]).state_dict()


def _share(layers: int, stages: int, stage: int) -> tuple[int, int]:
    return layers * stage // stages, layers * (stage + 1) // stages


class Layers:
    """Those of a chunk, as they are lent (`runtime.lent.layers.Lending`): of its stage ``chunk``, ``first`` of the
    model's; ``ends``: whether nobody else has the layers before it, and behind it."""

    why = "the others are an embedding or a head"
    beside: Sequence[nn.Module] = ()
    like = 0
    refused = ""

    def __init__(self, stage: SmallStage, chunk: nn.Sequential, first: int, ends: tuple[bool, bool]) -> None:
        self._stage, self.first, self.layers = stage, first, list(chunk)
        self._running: Sequence[Any] = self.layers
        self.lendable = lendable([isinstance(layer, Block) for layer in self.layers], *ends, 2)
        self.built: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def build(self, number: int) -> nn.Module:
        with _ONE_BY_ONE:
            block = self._stage._block(self._stage.part)
        self.built.add(block)
        if isinstance(block, Part):
            block.siblings = self._stage.siblings
        return block

    @contextmanager
    def running(self, layers: Sequence[Any]) -> Iterator[None]:
        self._running = layers
        try:
            yield
        finally:
            self._running = self.layers

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self._running:
            x = layer(x)
        return x


class SmallStage:
    """One stage (`runtime.stage.Stage`).

    Args:
        stages, stage: which part of the model.
        pipelines: nominal number of them.
        clipping: limit on the norm of all gradients; 0: none.
        scale: of the loss, halved where a gradient overflows and the step is left out; 0: losses are not scaled.
        tied: whether the embedding and the head are one parameter.
        overflows: (stage, step) whose gradient overflows.
        part, parts: which part of the stage this is, and of how many.
        shards: of the optimizer, to begin with; it is cut into as many as there are pipelines; None: it is whole.
        blocks: of the model, between its embedding and its head; 0: one for each stage but two, or one.
        placement: the stage of each chunk of the model, where stages have several.
    """

    averaging: Averaging = "after"
    gradient_dtype = None
    report_width = 1
    device = torch.device("cpu")
    factor = 1.0
    settings: Mapping[str, Any] = {}

    def __init__(self, *, stages: int, stage: int, pipelines: int, microbatches: int, clipping: float = 0.0,
                 scale: float = 0.0, tied: bool = False, overflows: Collection[tuple[int, int]] = (),
                 part: int = 0, parts: int = 1, shards: Collection[int] | None = None, blocks: int = 0,
                 placement: Sequence[int] = ()) -> None:
        cut = len(placement) or stages
        blocks = blocks or max(1, cut - 2)
        self.part, self.parts = part, parts
        own = [chunk for chunk, at in enumerate(placement or range(stages)) if at == stage]
        self.modules = [self._chunk(cut, chunk, tied, blocks) for chunk in own]
        ends = (placement[0], placement[-1]) if placement else (0, stages - 1)
        if tied and ends == (stage, stage) and placement:
            self.modules[-1][-1].out.weight = self.modules[0][0].token.weight
        self.module = nn.Sequential(*self.modules) if placement else self.modules[0]
        at = [None, *(placement or range(stages)), None]
        layers = [Layers(self, each, _share(blocks + 2, cut, chunk)[0], tuple(
            beside in (None, stage) for beside in (at[chunk], at[chunk + 2])))
            for each, chunk in zip(self.modules, own, strict=True)]
        self.chunks = list(map(Chunk, self.modules, layers))
        self._layers = layers
        self._running = 0
        self._ends = [chunk == cut - 1 for chunk in own]
        self.siblings: Comm | None = None
        self.first, self.last, self.stage, self.pipelines = stage == 0, stage == stages - 1, stage, pipelines
        self.microbatches, self.clipping, self.scale, self.overflows = microbatches, clipping, scale, set(overflows)
        self.steps = self.skipped = 0
        self.parameters = list(self.module.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-2, foreach=False)
        self.shards = None if shards is None else self._sharded(shards)
        self._kept = OptimizerState(self.module, self.optimizer)
        self._kept.train(self.parameters)
        self.model = fingerprint(self.parameters)
        self.tied_stages = (ends,) if tied and ends[0] != ends[1] else ()
        self.ties: list[Tie] = []
        if self.tied_stages and stage in ends:
            inner = self.modules[0][0].token if stage == ends[0] else self.modules[-1][-1].out
            self.ties = [Tie(inner.weight, ends)]
        self.references: dict[str, Any] = {}

    def _chunk(self, chunks: int, chunk: int, tied: bool, blocks: int) -> nn.Sequential:
        with _ONE_BY_ONE:
            layers: list[nn.Module] = [Embedding(), *(self._block(self.part) for _ in range(blocks)), Head()]
            begin, end = _share(len(layers), chunks, chunk)
            module = nn.Sequential(*layers[begin:end])
            state = _initial(chunks, chunk, tied, blocks)
            module.load_state_dict(_parted(state, self.part, self.parts) if self.parts > 1 else state)
        return module

    @contextmanager
    def running_chunk(self, chunk: int) -> Iterator[None]:
        """As `runtime.stage.Stage`."""
        self._running = chunk
        try:
            yield
        finally:
            self._running = 0

    def _block(self, part: int) -> Block:
        return Part(part, self.parts) if self.parts > 1 else Block()

    def _sharded(self, own: Collection[int]) -> ShardedOptimizer:
        """Cut as DeepSpeed does; on every other stage as Megatron does, each parameter for itself and in its place."""
        cut = even([self.parameters], self.pipelines)
        if self.stage % 2:
            cut = [[Slot(slot.group, piece.end - piece.start, (piece._replace(offset=0),)) for slot in slots
                    for piece in slot.pieces] for slots in cut]
        return ShardedOptimizer(self.optimizer, cut, own, in_place=bool(self.stage % 2))

    @property
    def may_guess_wrong(self) -> bool:
        return self.clipping > 0 or self.scale > 0

    def look(self) -> bool:
        return False

    def forward(self, inputs: tuple[torch.Tensor, ...] | None, batch: Batch | None) -> Forward:
        x = batch[0] if inputs is None else inputs[0]
        outputs = self._layers[self._running].run(x)
        if not self._ends[self._running]:
            return Forward((inputs or (), outputs), (outputs,), None, roots=(outputs,))
        loss = self.factor * functional.cross_entropy(outputs.view(-1, VOCABULARY), batch[1].reshape(-1))
        return Forward((inputs or (), loss), (), loss, report=(float(loss.detach()),), roots=(loss,))

    def backward(self, forward: Forward, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        inputs, output = forward.saved
        if self._ends[self._running]:
            (output * (self.scale or 1.0) / self.microbatches).backward()
        else:
            output.backward(gradients[0])
        return [tensor.grad for tensor in inputs]

    def norm_square(self, gradients: Sequence[torch.Tensor]) -> float:
        if (self.stage, self.steps + self.skipped) in self.overflows:
            return math.inf
        if not self.may_guess_wrong:
            return 0.0
        total = torch.stack([gradient.norm() for gradient in gradients]).pow(2.0).sum().item()
        return total / (self.scale or 1.0) ** 2

    def zeros(self, gradients: Sequence[torch.Tensor]) -> float:
        return 0.0

    def coefficient(self, norm_squares: Sequence[float], weight: float) -> float:
        if not math.isfinite(sum(norm_squares)):
            return math.nan
        if self.clipping <= 0:
            return 1.0
        return min(1.0, self.clipping / (math.sqrt(sum(norm_squares)) + 1e-6))

    def step(self, gradients: Sequence[torch.Tensor], coefficient: float) -> None:
        if math.isnan(coefficient):
            self.scale, self.skipped = self.scale / 2, self.skipped + 1
            return
        if self.shards is not None:
            self.shards.load(gradients, coefficient / (self.scale or 1.0))
            self.shards.step()
            self.steps += 1
            return
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            gradient = gradient if coefficient == 1.0 else gradient.mul_(coefficient)
            parameter.grad = gradient / self.scale if self.scale else gradient
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.steps += 1

    def state(self) -> dict[str, torch.Tensor]:
        return self._kept.tensors()

    def fixed(self) -> dict[str, torch.Tensor]:
        return self._kept.fixed()

    def load_state(self, tensors: Mapping[str, torch.Tensor], counters: Any) -> None:
        self._kept.load(tensors, counters["optimizer"])
        self.steps, self.skipped, self.scale = counters["own"]

    def reset_state(self, names: Collection[str]) -> None:
        self._kept.reset(names)

    def counters(self) -> Any:
        return {"optimizer": self._kept.counters(), "own": [self.steps, self.skipped, self.scale]}

    def set_counters(self, counters: Any) -> None:
        self._kept.set_counters(counters["optimizer"])
        self.steps, self.skipped, self.scale = counters["own"]

    def refer(self, references: Mapping[str, Any]) -> None:
        pass

    def summary(self, verdict: Any, reports: Any) -> bytes:
        return b""

    def recall(self, summary: bytes) -> None:
        assert summary == b""

    def regroup(self, groups: Any) -> None:
        self.siblings = groups.siblings
        for layer in (*(layer for each in self._layers for layer in each.built), *self.module.modules()):
            if isinstance(layer, Part):
                layer.siblings = groups.siblings
