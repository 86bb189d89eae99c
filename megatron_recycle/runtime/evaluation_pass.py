"""One pass of an evaluation: the forwards of a worker, with its own layers only, and nothing after them."""

from __future__ import annotations

import torch

from megatron_recycle.membership import Standing
from megatron_recycle.plan import Action, Message, Microbatch, results_in
from megatron_recycle.runtime.actions import execute
from megatron_recycle.runtime.compute.data import DataSource, read_everywhere
from megatron_recycle.runtime.compute.random_state import seed_of
from megatron_recycle.runtime.evaluation import Shared, loss_report
from megatron_recycle.runtime.generation import Generation
from megatron_recycle.runtime.phases import Phase
from megatron_recycle.runtime.site import Site


def evaluate(site: Site, standing: Standing, generation: Generation, data: DataSource, number: int,
             limit: int | None = None) -> None:
    """One pass over global batch ``number`` of ``data``, in the order of the plan's forwards; each pipeline has
    micro-batches below ``limit``, if that is given. Raises GenerationOver."""
    place, transport, groups = site.place, generation.transport, generation.groups
    reports: dict[Microbatch, tuple[float, ...]] = {}
    handed: dict[Message, tuple[torch.Tensor, ...]] = {}
    beyond = [] if limit is None else [
        (pipeline, microbatch) for pipeline, microbatch in place.grid.items()
        if number * place.grid.microbatches[pipeline] + microbatch >= limit]
    program = generation.program.without(beyond, groups.me) if beyond else generation.program

    def enter(action: Action) -> None:
        site.phases.enter(Phase.EVALUATE, standing.iteration, action)

    def forward(action: Action) -> None:
        _, pipeline, microbatch, chunk = action
        batch, inputs, last = None, None, place.last(chunk)
        if place.first(chunk) or last or read_everywhere(data):
            site.phases.activity.work("data")
            with groups.together():
                batch = data.batch(pipeline, number * place.grid.microbatches[pipeline] + microbatch)
        message = Message("F", *action[1:])
        if message in handed:
            inputs = handed.pop(message)
        elif not place.first(chunk):
            with site.phases.waiting("an activation"):
                inputs = tuple(transport.receive(message))
        site.phases.activity.work("evaluate")
        site.framework.generators.seed(
            seed_of(site.config.seed, "evaluation", number, pipeline, microbatch, place.chunks[chunk]))
        with groups.together(), site.stage.running_chunk(chunk):
            made = site.stage.forward(inputs, batch)
        if last:
            reports[pipeline, microbatch] = made.report or loss_report(made.loss)
        elif (result := results_in(program.plan, place.me, action)) is not None:
            if result[0] == place.me:
                handed[result[1]] = tuple(tensor.contiguous() for tensor in made.outputs)
            else:
                transport.send(result[1], made.outputs)
        transport.post()

    if isinstance(data, Shared):
        wanted = [microbatch for microbatch in place.grid.items() if microbatch not in beyond]
        with site.phases.waiting("data of the evaluation"):
            whole = data.share(program.plan, wanted, number, groups)
        if not whole:
            site.asked.evaluations.skip()
            return
    transport.forget_shapes()
    transport.follow(program.plan, "F")
    transport.begin()
    with torch.no_grad(), site.trainable.neighbours.running():
        execute(site, standing, [action for action in program.actions if action.kind == "F"],
                {"F": forward}, enter, "the evaluation")
    with site.phases.waiting("the evaluation's end"):
        site.asked.evaluations.complete(reports, groups)
    transport.forget_shapes()
