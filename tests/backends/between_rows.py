"""What scripts do between iterations, row by row: `docs/between-iterations.md` has the same table."""

from __future__ import annotations

import copy
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineError
from deepspeed.utils import RepeatingLoader
from torch import nn
from torch.optim import swa_utils
from torch.utils.data import DataLoader, DistributedSampler, Subset

WIDTH = 8
ALWAYS, NEVER = 0.05, 50.0
"""Limits on the gradient norm. One that is always exceeded makes the second stage's steps be undone and made again."""

Script = Callable[[Any, int, dict[str, Any]], None]
"""(engine, number of the iteration to come, a dict of the script's own); after the last iteration once more."""


@dataclass(frozen=True)
class Row:
    """One thing that a script does.

    Attributes:
        what: in words.
        script: called before each iteration.
        refused: part of the message, if it is refused; None: everything ends with stock's bits.
        says: how the documentation puts it, beyond "followed" and "refused".
        prepare: called with the model before the engine is built; gives further arguments of `initialize()`.
        clipping, settings, config: of the run.
        layers: of the model.
        samples: in the dataset.
        iterations: how many.
    """

    what: str
    script: Script
    refused: str | None = None
    says: str = ""
    prepare: Callable[[nn.Module], dict[str, Any]] = lambda model: {}
    clipping: float = NEVER
    settings: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    layers: Callable[[], list[Any]] = lambda: [LayerSpec(Block) for _ in range(4)]
    samples: int = 999
    iterations: int = 3


class Block(nn.Module):
    """A layer that can be told to do things."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale, self.extra = 1.0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(self.norm(x)))) * self.scale
        return x + y if self.extra is None else x + y + self.extra(x)


def blocks(engine: Any) -> list[Block]:
    """As a script finds them that has kept them since before training: nothing settles."""
    return [part for part in engine.module.forward_funcs if isinstance(part, Block)]


def nothing(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
    pass


def at(when: int, do: Callable[[Any], Any]) -> Script:
    def script(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
        if iteration == when:
            do(engine)
    return script


def every(do: Callable[[Any], Any]) -> Script:
    def script(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
        do(engine)
    return script


# ---- which parameters


def freeze(engine: Any) -> None:
    blocks(engine)[0].norm.requires_grad_(False)
    blocks(engine)[0].up.requires_grad_(False)


def start_frozen(model: nn.Module) -> dict[str, Any]:
    for part in model.modules():
        if isinstance(part, Block):
            part.norm.requires_grad_(False)
            part.down.requires_grad_(False)
    return {}


def unfreeze(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
    if iteration == 1:
        blocks(engine)[0].requires_grad_(True)
    if iteration == 2:
        blocks(engine)[1].down.requires_grad_(True)


def freeze_somewhere(engine: Any) -> None:
    if engine.global_rank == 0:
        blocks(engine)[0].norm.requires_grad_(False)


def only_linear(model: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW(
        [p for name, p in model.named_parameters() if "norm" not in name], lr=1e-2)}


def add_group(engine: Any) -> None:
    engine.optimizer.add_param_group(
        {"params": [p for name, p in engine.module.named_parameters() if "norm" in name], "lr": 1e-3})


def go_back_without(**options: Any) -> Script:
    def go_back(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
        if iteration == 1:
            folder = [tempfile.mkdtemp()]
            dist.broadcast_object_list(folder)
            memo["folder"] = folder[0]
            engine.save_checkpoint(folder[0])
        if iteration == 3:
            path, _ = engine.load_checkpoint(memo["folder"], **options)
            assert path is not None
            memo["kept"] = [torch.tensor([engine.global_steps, engine.global_samples])]
            dist.barrier()
            if not dist.get_rank():
                shutil.rmtree(memo["folder"])
    return go_back


go_back = go_back_without()


def add_layer(engine: Any) -> None:
    torch.manual_seed(5)
    for block in blocks(engine):
        block.extra = nn.Linear(WIDTH, WIDTH)
        engine.optimizer.add_param_group({"params": list(block.extra.parameters()), "lr": 1e-2})


def tie(engine: Any) -> None:
    one, two = blocks(engine)
    two.up.weight = one.up.weight


def normalise(engine: Any) -> None:
    for part in list(engine.module.modules()):
        if isinstance(part, Block):
            nn.utils.parametrizations.weight_norm(part.down)


# ---- the optimizer


def scale_rate(engine: Any) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] *= 0.7


def set_decay(engine: Any) -> None:
    engine.optimizer.param_groups[0]["weight_decay"] = 0.1
    engine.optimizer.param_groups[0]["betas"] = (0.8, 0.9)


def forget_moments(engine: Any) -> None:
    engine.settle()
    for state in engine.optimizer.state.values():
        state["exp_avg"].zero_()


def forget_moments_at_once(engine: Any) -> None:
    for state in engine.optimizer.state.values():
        state["exp_avg"].zero_()


def take_optimizer_back(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
    if iteration == 1:
        kept = engine.optimizer.state_dict()
        memo["optimizer"] = {"state": {key: {name: value.clone() for name, value in state.items()}
                                       for key, state in kept["state"].items()},
                             "param_groups": [dict(group) for group in kept["param_groups"]]}
    if iteration == 2:
        engine.optimizer.load_state_dict(memo["optimizer"])


class Counting(torch.optim.SGD):
    """Keeps its count of steps in an attribute, and what it has seen in another."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2)
        self.steps, self.seen = 0, {}

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 1e-2 / self.steps
        self.seen["last"] = torch.tensor([float(self.steps)])
        super().step(closure)


class Average:
    """An average of parameters, in an object of its own."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def take(self, parameters: list[torch.Tensor]) -> None:
        kept = self.kept or [torch.zeros_like(parameter) for parameter in parameters]
        self.kept = [0.9 * old + 0.1 * new.detach() for old, new in zip(kept, parameters)]


class Averaging(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2)
        self.average = Average()

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.average.take(self.param_groups[0]["params"])


def its_own(kind: type[torch.optim.Optimizer]) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda model: {"optimizer": kind(list(model.parameters()))}


def average_in_hook(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
    if iteration == 0:
        memo["average"] = Average()
        engine.optimizer.register_step_post_hook(
            lambda optimizer, *_: memo["average"].take(optimizer.param_groups[0]["params"]))
    if memo["average"].kept:
        memo["kept"] = [tensor.clone() for tensor in memo["average"].kept]


# ---- schedules


class Bare:
    """A schedule without a state dict."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + self.count)

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


def bare_schedule(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-2)
    return {"optimizer": optimizer, "lr_scheduler": Bare(optimizer)}


def stepwise(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-2)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


def replace_schedule(engine: Any) -> None:
    engine.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.8)


# ---- parameters


def clamp(engine: Any) -> None:
    for parameter in engine.module.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def keep(model: nn.Module) -> dict[str, Any]:
    KEPT[:] = list(model.parameters())
    return {}


KEPT: list[nn.Parameter] = []
"""References that a script took before the engine was built."""


def clamp_kept(engine: Any) -> None:
    for parameter in KEPT:
        parameter.data.clamp_(-0.2, 0.2)


def clamp_after_settling(engine: Any) -> None:
    if hasattr(engine, "settle"):
        engine.settle()
    clamp_kept(engine)


def average(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
    old = memo.get("kept") or [0.0] * 100
    new = [parameter.detach() for parameter in engine.module.parameters()]
    memo["kept"] = [0.5 * before + 0.5 * now for before, now in zip(old, new)]


def average_of_a_layer(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
    if iteration == 0:
        memo["layer"] = swa_utils.AveragedModel(blocks(engine)[0])
    memo["layer"].update_parameters(blocks(engine)[0])
    memo["kept"] = [memo["layer"](torch.ones(3, WIDTH)), *memo["layer"].parameters()]


def use_a_copy(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
    if iteration == 1:
        memo["copy"] = copy.deepcopy(blocks(engine)[0])
    if iteration > 1:
        memo["kept"] = [memo["copy"](torch.ones(3, WIDTH))]


def take_back(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
    if iteration == 1:
        memo["model"] = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    if iteration == 2:
        engine.module.load_state_dict(memo["model"])


def prune_and_swap(engine: Any) -> None:
    for name, parameter in engine.module.named_parameters():
        if "up.weight" in name:
            parameter.data = torch.where(parameter.abs() < 0.1, 0.0, parameter.data)


# ---- hooks


def double(gradient: torch.Tensor) -> torch.Tensor:
    return 2 * gradient


def hook_gradients(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
    if iteration == 1:
        memo["hooks"] = [block.up.weight.register_hook(double) for block in blocks(engine)]
        memo["hooks"] += [block.norm.weight.register_hook(double) for block in blocks(engine)]
    if iteration == 2:
        memo["hooks"].pop(0).remove()


def hook_modules(engine: Any) -> None:
    block = blocks(engine)[0]
    block.up.register_forward_hook(lambda module, inputs, output: output * 1.1)
    block.norm.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.1,))
    block.down.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.9,))

    def watch(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(double)
    blocks(engine)[1].up.register_forward_hook(watch)


def hook_sums(engine: Any) -> None:
    def clip(parameter: torch.Tensor) -> None:
        parameter.grad.clamp_(-0.1, 0.1)
    blocks(engine)[0].norm.weight.register_post_accumulate_grad_hook(clip)


# ---- the engine


def set_clipping(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
    engine._config.gradient_clipping = 10.0 if iteration % 2 else ALWAYS


def set_steps(engine: Any) -> None:
    engine._config.gradient_accumulation_steps = 1


def set_attribute(engine: Any) -> None:
    for block in blocks(engine):
        block.scale *= 0.8


def set_batch_fn(engine: Any) -> None:
    engine.set_batch_fn(lambda batch: (batch[0] * 0.5, batch[1]))


def set_length(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
    length = (1, 1, 3, 2)[iteration % 4]
    engine.set_batch_fn(lambda batch: tuple(tensor.unsqueeze(1).repeat(1, length, 1) for tensor in batch))
    if iteration > 1:
        engine.reset_activation_shape()


def set_loss(engine: Any) -> None:
    engine.module.loss_fn = lambda output, label: 3.0 * (output - label).abs().mean()


def put_gradients(engine: Any) -> None:
    for parameter in engine.module.parameters():
        parameter.grad = torch.ones_like(parameter)


def call_directly(engine: Any) -> None:
    for call in (engine.forward, engine.backward, engine.step):
        try:
            call(torch.ones(1))
        except PipelineError:
            continue
        raise AssertionError("stock refuses this")


def harmless(engine: Any) -> None:
    engine.zero_grad()
    engine.optimizer.zero_grad()
    engine.module.eval()
    blocks(engine)[0].eval()
    engine.train()
    with engine.no_sync():
        pass
    engine.set_gradient_accumulation_boundary(False)
    engine._config.steps_per_print = 2
    engine.set_train_batch_size(8)
    engine.set_train_micro_batch_size(2)


def loader_of(engine: Any, shuffle: bool = True) -> DataLoader:
    """Three micro-batches for each pipeline."""
    data = Subset(engine.points, range(12))
    sampler = DistributedSampler(data, engine.dp_world_size, engine.grid.get_data_parallel_id(), shuffle=shuffle)
    return DataLoader(data, 2, sampler=sampler)


def epochs_of(engine: Any) -> Iterator[Any]:
    loader = loader_of(engine)
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        yield from loader


def given(iterator: Callable[[Any], Iterator[Any]]) -> Script:
    """As `train_batch(iterator)` for each iteration."""
    def script(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
        if iteration == 0:
            memo["iterator"] = iterator(engine)
        engine.data_iter = memo["iterator"]
    return script


def given_each_epoch(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
    loader = loader_of(engine)
    loader.sampler.set_epoch(iteration)
    engine.data_iter = iter(loader)


def ramp(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
    engine.set_train_batch_size((4, 4, 12, 12, 8, 8)[iteration])


def ramp_and_evaluate(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
    ramp(engine, iteration, memo)
    evaluate(engine, iteration, memo)


def evaluate(engine: Any, iteration: int, memo: dict[str, Any]) -> None:
    torch.manual_seed(iteration)
    size = 2 + iteration
    data = [(torch.randn(size, WIDTH), torch.randn(size, WIDTH)) for _ in range(engine.micro_batches)]
    stock = not hasattr(engine, "settle")
    if stock:  # which has to be told of another shape
        engine.reset_activation_shape()
    memo.setdefault("evaluated", []).append(engine.eval_batch(iter(data)))
    if stock:
        engine.reset_activation_shape()


def tied_layers() -> list[Any]:
    def across(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, module.weight)
    return [TiedLayerSpec("words", nn.Linear, WIDTH, WIDTH, bias=False, tied_weight_attr="weight"), LayerSpec(Block),
            LayerSpec(Block), TiedLayerSpec("words", nn.Linear, WIDTH, WIDTH, bias=False, forward_fn=across,
                                            tied_weight_attr="weight")]


def freeze_tied(engine: Any) -> None:
    for name, parameter in engine.module.named_parameters():
        if "tied" in name:
            parameter.requires_grad_(not parameter.requires_grad)


def freeze_tied_first(engine: Any) -> None:
    if engine.is_first_stage():
        freeze_tied(engine)


BARRIER = {"step": "barrier"}



def undone(what: str, script: Script, **more: Any) -> Row:
    """A row whose steps are undone and made again."""
    return Row(what, script, clipping=ALWAYS, **more)


ROWS: list[Row] = [
    Row("does nothing", nothing),
    Row("has layers tied between stages", nothing, layers=tied_layers),
    undone("freezes parameters", at(1, freeze)),
    Row("unfreezes parameters one after another", unfreeze, prepare=start_frozen),
    Row("freezes and unfreezes a tied layer", lambda engine, i, memo: freeze_tied(engine) if i in (1, 2) else None,
        layers=tied_layers),
    Row("freezes parameters on some ranks only", at(1, freeze_somewhere),
        refused="do not train the same parameters (0.norm.weight by 1 of 2"),
    Row("freezes a tied layer on some stages only", at(1, freeze_tied_first), layers=tied_layers,
        refused="trained by stage 1 and frozen by stage 0: freeze it on all ranks"),
    undone("adds a parameter group", at(1, add_group), prepare=only_linear),
    Row("adds layers, with a parameter group", at(1, add_layer)),
    undone("replaces weights (`weight_norm()`, for instance) that it finds by `engine.module.modules()`",
           at(1, normalise)),
    Row("ties two layers of a stage that it took before", at(1, tie), refused="took parameters out of the model"),
    Row("ties two layers of a stage that it took before, without clipping", at(1, tie), clipping=0.0),
    undone("sets the learning rate by hand", every(scale_rate)),
    Row("sets weight decay, betas and the like by hand", at(1, set_decay)),
    undone("replaces `engine.lr_scheduler`", at(1, replace_schedule), prepare=stepwise),
    Row("steps `engine.lr_scheduler` by hand", at(1, lambda engine: engine.lr_scheduler.step()), prepare=stepwise),
    Row("has a schedule without `state_dict()`", nothing, prepare=bare_schedule),
    Row("changes `gradient_clipping`", set_clipping),
    undone("has an optimizer with state in attributes of its own", nothing, prepare=its_own(Counting)),
    Row("has an optimizer that changes other objects", nothing, prepare=its_own(Averaging),
        refused="a step changes optimizer.average, which cannot be put back"),
    Row("has an optimizer that changes other objects, `step: barrier`", nothing, prepare=its_own(Averaging),
        settings=BARRIER),
    Row("registers optimizer step hooks (an EMA, for instance)", average_in_hook, refused="has step hooks"),
    Row("registers optimizer step hooks, `step: barrier`", average_in_hook, settings=BARRIER),
    undone("writes to the optimizer's state after `engine.settle()`", at(
        1, lambda engine: (forget_moments if hasattr(engine, "settle") else forget_moments_at_once)(engine))),
    undone("writes to the optimizer's state at once", at(1, forget_moments_at_once),
           refused="Call engine.settle() before"),
    Row("writes to the optimizer's state at once, without clipping", at(1, forget_moments_at_once), clipping=0.0),
    undone("loads the optimizer's `state_dict()`", take_optimizer_back),
    undone("writes to `engine.module.parameters()` (clamping, pruning, swapping)", every(clamp)),
    Row("gives parameters other data by way of `engine.module.named_parameters()`", at(2, prune_and_swap)),
    undone("writes to parameters that it took before, after `engine.settle()`", every(clamp_after_settling),
           prepare=keep),
    undone("writes to parameters that it took before, at once", every(clamp_kept), prepare=keep,
           refused="the script changed parameter"),
    Row("writes to parameters that it took before, at once, without clipping", every(clamp_kept), prepare=keep,
        clipping=0.0),
    undone("averages `engine.module.parameters()` (an EMA)", average),
    undone("averages a layer by `torch.optim.swa_utils.AveragedModel`", average_of_a_layer),
    Row("loads the module's `state_dict()`", take_back),
    Row("computes with a copy that it has made of a layer", use_a_copy),
    Row("has hooks on parameters' gradients", hook_gradients),
    Row("has hooks on modules, forward and backward, and on their outputs", at(1, hook_modules)),
    Row("has hooks of `register_post_accumulate_grad_hook()`", at(1, hook_sums),
        refused="would see a micro-batch's gradient instead of the sum so far"),
    Row("puts gradients on parameters", at(1, put_gradients), refused=".grad holds a gradient"),
    Row("sets attributes of modules", every(set_attribute)),
    Row("calls `set_batch_fn()`", at(1, set_batch_fn)),
    undone("changes samples' lengths by `set_batch_fn()`, after `reset_activation_shape()` on all ranks", set_length,
           iterations=4),
    Row("replaces the loss function, or scales the loss", at(1, set_loss)),
    Row("calls `eval_batch()`", evaluate),
    Row("calls `zero_grad()`, `module.eval()`, `engine.train()`, `no_sync()`, `set_gradient_accumulation_boundary()`; "
        "sets `steps_per_print`; `set_train_batch_size()` and its kin with the number in force", every(harmless)),
    Row("calls `forward()`, `backward()`, `step()`", every(call_directly), says="refused, as by stock"),
    undone("calls `set_train_batch_size()` with other numbers", ramp, iterations=5),
    Row("calls it, and `eval_batch()`", ramp_and_evaluate, iterations=4),
    Row("calls `set_train_micro_batch_size()` with another number",
        at(1, lambda engine: engine.set_train_micro_batch_size(1)),
        refused="train_micro_batch_size_per_gpu cannot become 1: it was 2"),
    Row("changes such a number in the configuration", at(1, set_steps),
        refused="gradient_accumulation_steps cannot become 1: it was 2"),
    Row("gives `train_batch()` an `itertools.cycle` of a DataLoader", given(lambda engine: itertools.cycle(
        loader_of(engine)))),
    Row("gives it a generator over a DataLoader that shuffles each epoch otherwise", given(epochs_of)),
    Row("gives it another iterator for each epoch", given_each_epoch),
    Row("gives it a generator that changes what the loader gives", given(
        lambda engine: ((2 * x, y) for x, y in loader_of(engine))),
        refused="other micro-batches than its data loader's sampler names"),
    Row("gives it a DataLoader whose sampler knows no pipelines", given(lambda engine: iter(
        DataLoader(engine.points, 2))), refused="has no attribute data_parallel_rank or rank"),
    Row("gives it something else than a DataLoader",
        given(lambda engine: itertools.repeat((torch.ones(2, WIDTH),) * 2)),
        refused="took no batches from torch DataLoaders"),
    Row("calls `set_dataloader()`", at(0, lambda engine: engine.set_dataloader(RepeatingLoader(loader_of(engine))))),
    Row("calls `save_checkpoint()`, and `load_checkpoint()` an iteration later", go_back, clipping=ALWAYS, iterations=4,
        config={"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 20}}}),
    Row("calls `load_checkpoint(load_module_only=True)`, without clipping", go_back_without(load_module_only=True),
        clipping=0.0, iterations=4),
    Row("has a dataset whose last micro-batch is smaller", nothing, samples=2 * 2 * 4 + 2,
        refused="the last micro-batch has 1 instead of 2"),
    Row("has such a dataset, with `dataloader_drop_last`", nothing, samples=2 * 2 * 4 + 2,
        config={"dataloader_drop_last": True}),
]


def table() -> str:
    """The rows as the documentation has them."""
    lines = ["| the script | what comes of it |", "| --- | --- |"]
    for row in ROWS:
        refused = f'refused: "...{row.refused}..."' if row.refused else "equal"
        lines.append(f"| {row.what} | {row.says or refused} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
