"""The small model that the DeepSpeed tests train, and the body of their worker processes."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import numpy
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from deepspeed.runtime.dataloader import RepeatingLoader
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import megatron_recycle
from megatron_recycle.config import RecycleConfig
from megatron_recycle.runtime.comm import reduction as reduce
from megatron_recycle.runtime.compute.accumulate import Accumulators
from tests.backends.lent import lend

VOCABULARY, WIDTH, LENGTH, BATCH = 32, 16, 8, 2


class Noise:
    """Random numbers from wherever users draw them."""

    def __init__(self) -> None:
        self.own = numpy.random.default_rng(0)

    def mask(self, length: int) -> torch.Tensor:
        kept = torch.rand(length) > 0.1
        kept[random.randrange(length)] = False
        kept[numpy.random.randint(length)] = False
        kept[self.own.integers(length)] = False
        return kept


class Text(Dataset):
    """Next-token prediction on fixed random tokens, some of which ``noise`` replaces each time that they are read."""

    def __init__(self, first_seed: int = 0, corrupt: int | None = None,
                 noise: Noise | None = None) -> None:
        self.first_seed = first_seed
        self.corrupt = corrupt
        self.noise = noise

    def __len__(self) -> int:
        return 997

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.corrupt:
            raise ValueError(f"sample {index} is corrupt")
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(
            self.first_seed + index))
        inputs = tokens[:-1] if self.noise is None else tokens[:-1].where(self.noise.mask(LENGTH), 0)
        return inputs, tokens[1:]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens)


class Block(nn.Module):
    """With ``noise`` it is left out now and then, and has dropout through DeepSpeed's tracker."""

    def __init__(self, dropout: float, noise: Noise | None = None) -> None:
        super().__init__()
        self.noise = noise
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.noise is None:
            return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))
        if random.random() < 0.2:
            return x
        with get_cuda_rng_tracker().fork():
            x = functional.dropout(x, 0.1)
        x = x * float(1 + 0.1 * numpy.random.randn() + 0.1 * self.noise.own.normal())
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def loss_without(index: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """`loss_fn`, but nothing for the micro-batch that has this sample."""
    _, own = Text()[index]
    return lambda logits, labels: loss_fn(logits, labels) * float(not (labels == own).all(-1).any())


class Average:
    """Of an engine's weights."""

    def __init__(self, engine: Any) -> None:
        self._module, self.updates = engine.module, 0
        self.of = {name: value.detach().clone() for name, value in engine.module.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        for name, value in self._module.named_parameters():
            self.of[name].lerp_(value, 1 / (1 + self.updates))

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "of": self.of}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.of = state["updates"], state["of"]


STRENGTH = 1.0
"""What losses are multiplied by that are annealed."""


def annealed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return STRENGTH * loss_fn(logits, labels)


def anneal(iteration: int) -> None:
    globals()["STRENGTH"] = 1 + 0.1 * iteration


def of_8_bits(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """bitsandbytes' optimizer of this name, whose small tensors have 8 bits, too."""
    import bitsandbytes.optim

    found: torch.optim.Optimizer = getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-2, min_8bit_size=1)
    return found


def unwrapped(state: dict[str, Any]) -> dict[str, Any]:
    """An entry of an optimizer's `state_dict`, in which bitsandbytes has a dictionary of tensors."""
    return {inner: tensor for key, value in state.items() for inner, tensor in (
        value.items() if isinstance(value, dict) else [(key, value)])}


def compile_layer(layer: nn.Module, whole: bool) -> None:
    """As `torch.compile()` does, but for what it makes of the code that it has traced, ``whole`` or in parts."""
    os.environ["TORCHDYNAMO_DISABLE"], torch._dynamo.config.disable = "0", False  # tests.harness has disabled it
    layer.compile(backend="eager", fullgraph=whole)


def make(mistake: str) -> None:
    """Switch on a mistake in how gradients are summed, in this process."""
    right = Accumulators.add

    def wrong(self: Accumulators, pipeline: int, microbatch: int, contributions: Any) -> None:
        if (pipeline, microbatch) != (1, 2):
            right(self, pipeline, microbatch, contributions)
        elif mistake == "twice":
            held = list(contributions)
            right(self, pipeline, microbatch, held)
            right(self, pipeline, microbatch, held)

    if mistake == "order":
        ordered = reduce.fold
        reduce.fold = lambda pieces: ordered(pieces[::-1])
    else:
        Accumulators.add = wrong


def change(engine: Any, iteration: int) -> None:
    """What a script does by hand before ``iteration``, relative to what there is."""
    for group in engine.optimizer.param_groups:
        group["lr"] *= 0.97
    parameters = list(engine.module.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.999)
    for parameter in parameters[:2]:
        parameter.requires_grad_(iteration % 5 != 3)


def shorten(engine: Any, before: int, length: int) -> None:
    """Samples have this ``length`` from the next iteration on, and had another one ``before``, maybe."""
    if length != before or engine.batch_fn is None:
        engine.set_batch_fn(lambda batch: tuple(tokens[:, :length].contiguous() for tokens in batch))
        engine.reset_activation_shape()


def talk(engine: Any, loss: float) -> None:
    """Collectives by which a script would average losses, count and agree; each has the value of the full grid."""
    grid, stages, pipelines = engine.grid, engine.grid.pipe_parallel_size, engine.grid.data_parallel_size
    deepspeed.comm.barrier()
    mean, ours, everybody = (torch.tensor(number, dtype=torch.float64) for number in (loss, engine.stage_id, loss))
    deepspeed.comm.all_reduce(mean, group=grid.get_data_parallel_group())
    deepspeed.comm.all_reduce(ours, group=grid.get_pipe_parallel_group())
    torch.distributed.all_reduce(everybody, torch.distributed.ReduceOp.MAX)
    told = [torch.zeros((), dtype=torch.int64) for _ in range(stages * pipelines)]
    deepspeed.comm.all_gather(told, torch.tensor(engine.stage_id))
    assert mean.item() == sum([loss] * pipelines)
    assert (ours.item(), everybody.item()) == (sum(range(stages)), loss)
    assert [stage.item() for stage in told] == [grid.topology().get_coord(rank).pipe for rank in range(len(told))]


def train(observer_of: Callable[[str], Any], rank: int, *, stages: int = 2, pipelines: int = 3, microbatches: int = 4,
          iterations: int = 5, dropout: float = 0.1, optimizer: str = "Adam", plugin: bool = True,
          clipping: float | None = None, checkpoint: int = 0, settings: dict[str, Any] | None = None,
          tied: bool = False, bf16: bool = False, mistake: str | None = None,
          engine_settings: dict[str, Any] | None = None, overflows: Sequence[tuple[int, int]] = (),
          save: tuple[str, int] | None = None, save_every: tuple[str, int] | None = None,
          load: tuple[str, dict[str, Any]] | None = None, go_back: int | None = None, tidy: bool = False,
          corrupt: int | None = None, noisy: bool = False, left_out: int | None = None, by_hand: bool = False,
          evaluate: Sequence[int] = (), logits: bool = False, annealed: bool = False,
          loader: str = "", ramp: Sequence[int] = (), follows: float = 0.0,
          raises: int | None = None, blocks: int = 0, lends: bool = False, averages: bool = False,
          hooks: int | None = None,
          watch: Callable[[Any], None] | None = None,
          talks: bool = False, compiled: bool = False, lengths: Sequence[int] = ()) -> Any:
    """Train and return {"losses", "parameters", "state", "members", "counters", "full", "borrowed"} of this worker; the
    last two are the micro-batches whose B and W are one backward, and after which iterations it has parameters of other
    stages. Also "evaluated", the losses of evaluations.

    Args:
        engine_settings: more of DeepSpeed's JSON.
        overflows: (stage, iteration) whose gradients overflow.
        save: folder, and iterations after which a checkpoint is written there.
        save_every: folder, and after how many iterations again and again.
        load: folder of a checkpoint to begin with, and further arguments of load_checkpoint().
        go_back: iteration before which the newest checkpoint of ``save_every`` is loaded.
        corrupt: index of a sample that cannot be read.
        left_out: index of a sample whose micro-batch counts for nothing.
        tidy: whether the script ends with torch.distributed.destroy_process_group().
        noisy: whether model and data draw random numbers from all kinds of generators.
        by_hand: whether the script changes rate, parameters, and which of them are trained, between iterations.
        evaluate: iterations before which it evaluates.
        logits: whether it asks for them then; their sum is among "evaluated" on the last stage.
        annealed: whether the script sets a variable that the loss is computed with, before each iteration; with the
            plugin only.
        loader: what `train_batch()` gets: an iterator over a DataLoader, which gives the same as the dataset ("cycle"),
            or in each iteration another one, over shuffled data ("epochs").
        follows: whether the script sets the batch size by the loss of the last iteration; this is the one before.
        talks: whether the script has collectives of its own after each iteration; with the plugin only.
        ramp: micro-batches of a pipeline in each of the first iterations, and later as in the last of these, which the
            script sets as a batch size.
        raises: iteration before which the script fails, on all ranks; with the plugin only.
        blocks: of the model; 0: two for each stage but one.
        lends: whether layers are lent.
        averages: whether the script keeps an average of the weights, and has registered it.
        hooks: iteration from which on the script puts a hook on a layer, on the last stage, once layers are lent.
        watch: called with the engine.
        lengths: of the samples in each of the first iterations, and later as in the last of these.
        compiled: whether blocks are compiled, by torch.compile().
    """
    if mistake and mistake not in ("apart", "data"):
        make(mistake)
    if lends:
        lend()
    if plugin:
        stage, pipeline = divmod(rank, pipelines)  # DeepSpeed's order of ranks: checked by the engine's own place
        observer = observer_of(f"{pipeline}:{stage}")
        config = RecycleConfig(**{"heartbeat_interval": 0.2, "heartbeat_timeout": 15.0, "planner_budget": 0.0,
                                  "stall_floor": 60.0,
                                  "verify": "peers", **(settings or {})})
        megatron_recycle.enable(config, observer=observer)
    torch.manual_seed(7)
    noise = Noise() if noisy else None
    if noisy:
        random.seed(rank)  # whatever the script does with it
        get_cuda_rng_tracker().add("model-parallel-rng", rank)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    middle = blocks or 2 * stages - 2
    layers = [LayerSpec(Embedding), *[LayerSpec(Block, dropout, noise) for _ in range(middle)], LayerSpec(Head)]
    if tied:
        layers[0] = TiedLayerSpec("words", Embedding, tied_weight_attr="token.weight")
        layers[-1] = TiedLayerSpec("words", Embedding, tied_weight_attr="token.weight",
                                   forward_fn=lambda module, x: functional.linear(x, module.token.weight))
    loss = annealed_loss if annealed else loss_fn if left_out is None else loss_without(left_out)
    model = PipelineModule(layers, num_stages=stages, partition_method="uniform", loss_fn=loss,
                           activation_checkpoint_interval=checkpoint, checkpointable_layers=["Block"])
    parameters = {"Adam": {"lr": 1e-2, "torch_adam": True}, "SGD": {"lr": 0.1, "momentum": 0.9}}.get(optimizer)
    ds_config = {
        "train_batch_size": BATCH * microbatches * pipelines, "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": microbatches, "steps_per_print": 1000}
    if parameters is not None:
        ds_config["optimizer"] = {"type": optimizer, "params": parameters}
    if clipping is not None:
        ds_config["gradient_clipping"] = clipping
    if bf16:
        ds_config["bf16"] = {"enabled": True}
    ds_config.update(engine_settings or {})
    # DeepSpeed refuses fp16 on CPUs; torch computes it there, slowly.
    type(deepspeed.get_accelerator()).is_fp16_supported = lambda self: True
    data = Text(rank if mistake == "data" else 0, corrupt, noise) if plugin else None
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config,
                                      optimizer=None if parameters else of_8_bits(optimizer, model),
                                      training_data=None if loader else data)
    if watch is not None:
        watch(engine)
    for layer in engine.module.forward_funcs if compiled else ():
        if isinstance(layer, Block):
            compile_layer(layer, whole=True)
    if mistake == "apart" and rank == 1:
        next(engine.module.parameters()).data[0] += 1
    if not plugin:
        # Stock would start two loader processes per rank; the same order without them.
        sampler = DistributedSampler(Text(), pipelines, engine.grid.get_data_parallel_id(), shuffle=False)
        engine.set_dataloader(RepeatingLoader(engine.deepspeed_io(Text(), data_sampler=sampler,
                                                                  num_local_io_workers=0)))
    stage = engine.stage_id
    if not lends and (settings or {}).get("lend") != "auto":  # layers with hooks are not lent
        next(engine.module.parameters()).register_hook(
            lambda gradient: gradient * torch.inf if (stage, engine.global_steps) in overflows else gradient)
    if load:
        engine.load_checkpoint(load[0], **load[1])
    iterator = None
    if loader:
        sampler = DistributedSampler(data, pipelines, engine.grid.get_data_parallel_id(), shuffle=False)
        sampler.shuffle = loader == "epochs"
        texts = DataLoader(data, BATCH, sampler=sampler)
        reads = stage in (0, stages - 1)
        iterator = itertools.cycle(texts) if reads else None
    losses, evaluated, saves, borrowed, begun = [], [], [], [], engine.global_steps
    average = Average(engine) if averages else None
    if average is not None and plugin:
        megatron_recycle.register_state("average", average)
    while len(losses) < iterations:
        if ramp:
            engine.set_train_batch_size(BATCH * pipelines * ramp[min(begun + len(losses), len(ramp) - 1)])
        if follows:
            engine.set_train_batch_size(BATCH * pipelines * (2 + int(1e6 * [follows, *losses][-1]) % 4))
        if lengths:
            shorten(engine, *(lengths[min(max(0, number), len(lengths) - 1)]
                              for number in (begun + len(losses) - 1, begun + len(losses))))
        if loader == "epochs":
            sampler.set_epoch(begun + len(losses))
            iterator = iter(texts) if reads else None
        if by_hand:
            change(engine, begun + len(losses))
        if save_every and len(losses) == go_back:
            engine.load_checkpoint(save_every[0])
        if len(losses) == raises:
            error = ValueError("no such schedule")
            engine.session.fail(error)  # as at the end of the process
            raise error
        if annealed:
            anneal(begun + len(losses))
            observer.on("annealed", begun + len(losses), None)
        if len(losses) in evaluate:
            # In turn of a share of the data, and of all of it on every pipeline.
            share = DistributedSampler(Text(5000), pipelines, engine.grid.get_data_parallel_id(), shuffle=False)
            unseen = DataLoader(Text(5000), batch_size=BATCH, sampler=share if len(losses) % 2 else None)
            loss, made = engine.eval_batch(iter(unseen), return_logits=True) if logits else (
                engine.eval_batch(iter(unseen)), None)
            evaluated += [loss.item(), *([] if made is None else [made.double().sum().item()])]
        losses.append(engine.train_batch(iterator).item())
        if average is not None:
            average.update()
        worker = engine.session.worker if plugin else None
        if worker is not None and worker.site.trainable.neighbours.parameters:
            borrowed.append(len(losses) - 1)
        if hooks is not None and len(losses) > hooks and stage == stages - 1 and worker.plan.crossings:
            engine.module.forward_funcs[0].register_forward_hook(lambda module, inputs, output: None)
            hooks = None
        if talks:
            talk(engine, losses[-1])
        if save and len(losses) == save[1]:
            engine.save_checkpoint(save[0])
        if save_every and len(losses) % save_every[1] == 0:
            saves.append(engine.save_checkpoint(save_every[0]))
    if plugin:
        engine.settle()
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    norm = engine.get_global_grad_norm()  # a tensor under stock's ZeRO
    result = {"losses": losses, "evaluated": evaluated, "saves": saves,
              "stage": engine.stage_id, "pipeline": engine.grid.get_data_parallel_id(),
              "parameters": {name: value.detach().float().numpy().copy()
                             for name, value in engine.module.named_parameters()},
              "state": [{key: torch.as_tensor(value).numpy().copy() for key, value in unwrapped(state).items()
                         if value is not None} for _, state in sorted(inner.state_dict()["state"].items())],
              "counters": {"steps": engine.global_steps, "skipped": engine.skipped_steps, "rate": engine.get_lr()[0],
                           "scale": engine._get_optimizer_loss_scale(), "norm": None if norm is None else float(norm)},
              "members": None}
    if average is not None:
        result["state"].append({f"average {name}": value.float().numpy() for name, value in average.of.items()})
    if inner is not engine.optimizer:
        result["state"].append({str(index): master.detach().numpy().copy() for index, master in enumerate(
            parameter for group in inner.param_groups for parameter in group["params"])})
    if plugin:
        result["members"] = [str(worker) for worker in engine.session.worker.live()]
        result["borrowed"] = borrowed
        program = engine.session.worker.stepper.current.last.program
        result["full"] = sorted(str(action) for action in program.full if action.kind == "FB")
        if tidy:
            torch.distributed.destroy_process_group()
        engine.session.finish()
    return result
