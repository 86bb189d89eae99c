"""A Megatron job whose script has habits of its own between and inside iterations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

import megatron_recycle
from megatron_recycle.config import RecycleConfig
from tests.backends.megatron_job import SCRIPTS

ITERATIONS = 4
_ARGUMENTS = ("--length", "8", "--width", "16", "--heads", "2", "--blocks", "4", "--batch", "2", "--dropout", "0",
              "--clip", "0.05", "--stages", "2")


def train(observer_of: Callable[[str], Any], rank: int, *, habits: tuple[str, ...], plugin: bool,
          options: tuple[str, ...] = (), pipelines: int = 1, reduction: str = "fast") -> Any:
    """Two stages; returns what they end with. ``habits`` are functions of this module."""
    if SCRIPTS not in sys.path:
        sys.path.insert(0, SCRIPTS)
    import pretrain_gpt_megatron as script

    import megatron_cpu

    megatron_cpu.install()
    from megatron.core import distributed, parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if plugin:
        settings = RecycleConfig(heartbeat_interval=0.2, heartbeat_timeout=15.0, planner_budget=0.0, stall_floor=60.0,
                                 step="barrier", reduction=reduction)
        megatron_recycle.enable(settings, observer=observer_of(f"{rank % pipelines}:{rank // pipelines}"))
    from megatron.core.pipeline_parallel import get_forward_backward_func  # the plugin's from now on

    mine = [globals()[name] for name in habits]
    wrap = distributed.DistributedDataParallel

    class Wrapped(wrap):  # type: ignore[misc,valid-type]
        def __init__(self, config: Any, data_parallel: Any, module: Any) -> None:
            tell("module", SimpleNamespace(module=module))
            super().__init__(config, data_parallel, module)

    def tell(moment: str, job: Any, iteration: int = 0) -> None:
        for habit in mine:
            habit(moment, job, iteration)

    args = script.parse(["--data", __file__, *_ARGUMENTS, *options])
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 2)
    torch.manual_seed(args.seed + rank // pipelines)
    model_parallel_cuda_manual_seed(args.seed)
    distributed.DistributedDataParallel = Wrapped  # type: ignore[misc]
    config, (model,), optimizer = script.build(args)
    distributed.DistributedDataParallel = wrap  # type: ignore[misc]
    job = SimpleNamespace(
        config=config, model=model, optimizer=optimizer, parameters=[*model.module.parameters()], forward=forward_step,
        iterator=script.batches(args, validation=False), validation=script.batches(args, validation=True), values=[])
    script_step: Any = script.forward_step

    def step(forward_only: bool = False) -> list[Any]:
        call: Any = get_forward_backward_func()
        return call(forward_step_func=lambda iterator, part: job.forward(script_step, iterator, part), model=[model],
                    data_iterator=job.validation if forward_only else job.iterator, num_microbatches=args.microbatches,
                    seq_length=args.length, micro_batch_size=args.batch, forward_only=forward_only)

    job.step = step
    tell("built", job)
    for iteration in range(ITERATIONS):
        tell("before", job, iteration)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = step()
        job.values += [float(value) for report in reports for key in sorted(report) for value in report[key].flatten()]
        optimizer.step()
        tell("after", job, iteration)
    if plugin:
        schedule: Any = get_forward_backward_func()
        schedule.session.finish()
    torch.distributed.destroy_process_group()
    states = [value.float() for state in optimizer.optimizer.state.values() for value in state.values()]
    return {"losses": job.values, "state": [],
            "parameters": {str(index): value.detach().float().numpy().copy()
                           for index, value in enumerate([*job.parameters, *states])}}


def forward_step(script_step: Any, iterator: Iterator[Any] | None, model: Any) -> Any:
    return script_step(iterator, model)


# ---- habits: (moment, job, iteration)


def freezes_later(moment: str, job: Any, iteration: int) -> None:
    """Adam goes on to move what is frozen, by its moments and weight decay, in stock too."""
    if moment == "after" and iteration == 1:
        for parameter in job.parameters[2:5]:
            parameter.requires_grad_(False)


def freezes_first(moment: str, job: Any, iteration: int) -> None:
    if moment == "built":
        for parameter in job.parameters[2:5]:
            parameter.requires_grad_(False)


def trains_biases_only(moment: str, job: Any, iteration: int) -> None:
    """As adapters do; tied embeddings are frozen."""
    if moment == "module":
        for name, parameter in job.module.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))


def unfreezes_later(moment: str, job: Any, iteration: int) -> None:
    """What is no parameter of the optimizer stays as it is."""
    if moment in ("module", "after"):
        parameters = job.parameters if moment == "after" else [*job.module.parameters()]
        for parameter in parameters[3:5]:
            parameter.requires_grad_(moment == "after")


def sets_groups(moment: str, job: Any, iteration: int) -> None:
    """Rate, decay, momentum and limit by hand, in the middle of the training."""
    if moment == "before":
        for group in job.optimizer.param_groups:
            group["lr"] = 1e-3 * (iteration + 1)
            group["weight_decay"] = 0.1 * iteration
            group["betas"] = (0.9 - 0.1 * iteration, 0.99)
        job.optimizer.config.clip_grad = 0.05 + 0.01 * iteration


def hooks_parameters(moment: str, job: Any, iteration: int) -> None:
    if moment == "built":
        for parameter in job.parameters[6:12]:
            parameter.register_hook(lambda gradient: 0.5 * gradient)


def clamps_parameters(moment: str, job: Any, iteration: int) -> None:
    if moment == "after":
        for parameter in job.parameters:
            parameter.data.clamp_(-0.02, 0.02)


def takes_a_batch_first(moment: str, job: Any, iteration: int) -> None:
    if moment == "built":
        next(job.iterator)


def evaluates_averages(moment: str, job: Any, iteration: int) -> None:
    """Swapped in and out again."""
    if moment != "after":
        return
    job.model.eval()
    with torch.no_grad():
        kept = [parameter.clone() for parameter in job.parameters]
        for parameter in job.parameters:
            parameter.mul_(0.5)
        job.values += [float(value) for report in job.step(forward_only=True) for value in report["lm loss"]]
        for parameter, value in zip(job.parameters, kept):
            parameter.copy_(value)
    job.model.train()


def masks_tokens(moment: str, job: Any, iteration: int) -> None:
    """Every third micro-batch has no token at all; several values are reported."""
    def forward(script_step: Any, iterator: Any, model: Any) -> Any:
        output, _ = script_step(iterator, model)

        def loss(losses: torch.Tensor) -> Any:
            # Told by the data, not by a count of calls: whoever computes it.
            mask = (losses.detach() * 1000).long() % 3 > 0
            mask &= bool((losses.detach().sum() * 100).long() % 3)
            tokens = mask.sum().to(torch.int)
            total = (losses * mask).sum()
            return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()]), "aux": total.detach(),
                                   "plain": torch.tensor(3)}

        return output, loss

    if moment == "built":
        job.forward = forward


def adds_up_over_pipelines(moment: str, job: Any, iteration: int) -> None:
    """As loss functions did that know the number of tokens of all pipelines."""
    from megatron.core import parallel_state

    def forward(script_step: Any, iterator: Any, model: Any) -> Any:
        output, _ = script_step(iterator, model)

        def loss(losses: torch.Tensor) -> Any:
            tokens = torch.tensor(losses.numel())
            torch.distributed.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
            return losses.sum() / tokens, {"lm loss": losses.detach().mean()}

        return output, loss

    if moment == "built":
        job.forward = forward


def draws_out_of_sight(moment: str, job: Any, iteration: int) -> None:
    if moment == "built":
        draws(job.model.module.decoder.layers[-1].mlp)


def draws(layer: torch.nn.Module) -> None:
    """From here on ``layer`` adds noise that nobody can set."""
    stock: Any = layer.forward

    def forward(*inputs: Any, **named: Any) -> Any:
        generator = torch.Generator()
        generator.seed()
        made, *more = made if isinstance(made := stock(*inputs, **named), tuple) else (made,)
        made = made + torch.rand(made.shape, generator=generator)  # not one number: a softmax takes no notice of that
        return (made, *more) if more else made

    layer.forward = forward


def reports_a_mean(moment: str, job: Any, iteration: int) -> None:
    def forward(script_step: Any, iterator: Any, model: Any) -> Any:
        output, _ = script_step(iterator, model)
        return output, lambda losses: (losses.mean(), {"lm loss": losses.detach().mean()})

    if moment == "built":
        job.forward = forward
