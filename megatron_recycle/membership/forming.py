"""From the first hello to generation 1. Pure, like `machine`."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_recycle.membership import commands, job_end, messages, records
from megatron_recycle.membership.decisions import Emit, MakePlan, Step
from megatron_recycle.membership.description import Description, Job, difference
from megatron_recycle.membership.extension import IN_FORCE, first
from megatron_recycle.membership.failure_domains import judge
from megatron_recycle.membership.failure_kinds import describe_status
from megatron_recycle.membership.inputs import Exited, Ready
from megatron_recycle.membership.names import Process, in_order
from megatron_recycle.membership.next_life import Shape
from megatron_recycle.membership.persistent_map import put
from megatron_recycle.membership.protocol import MOST_BYTES
from megatron_recycle.membership.resume import parts_of
from megatron_recycle.membership.shards import tables
from megatron_recycle.membership.state import Member, Phase, State
from megatron_recycle.plan.grid import Grid

_ACTION_BYTES = 7
"""Least size of one action in a plan: `"F0.0",`."""


def hello(state: State, member: Member, now: float) -> Step:
    """A process presents itself, or comes back after it lost its connection."""
    if member.incarnation in state.known:
        return state, ()
    for other in state.known.values():
        if member.worker == other.worker or member.rank == other.rank:
            text = f"rank {member.rank} as {member.worker}: rank {other.rank} is {other.worker} already"
            return state, (messages.refuse(member, text),)
    if not 0 <= member.rank < state.size:
        text = f"rank {member.rank} is not of this job of {state.size} workers"
        return state, (messages.refuse(member, text),)
    state = state.with_(known={**state.known, member.incarnation: member})
    if state.forming.gone:
        return job_end.end(state, 1, _left_early(min(state.forming.gone), 0, ""), now)
    return state, ()


def ready(state: State, happened: Ready, now: float) -> Step:
    member = state.known.get(happened.incarnation)
    if member is None or state.phase is not Phase.FORMING:
        return state, ()
    key = model_key(member.worker)
    # Equality with one of each kind is equality with all.
    samples = state.forming.samples
    for other in list(samples.values())[:1] + [other for kind, other in samples.items() if kind == key]:
        one, two = state.forming.descriptions[other], happened.description
        if found := difference(one, two) if model_key(other) == key else difference(one.of_job, two.of_job):
            name, ours, theirs = found
            text = (
                f"worker {other} has {name} = {ours} but worker {member.worker} has {theirs}: give all "
                f"workers the same configuration and the same model"
            )
            return job_end.end(state, 1, text, now)
    state = state.with_(
        descriptions=put(state.forming.descriptions, member.worker, happened.description),
        reports=put(state.round.reports, member.worker, happened.report),
        samples=samples if key in samples else {**samples, key: member.worker},
        learnt=put(state.forming.learnt, str(member.rank), happened.learnt),
    )
    return _form(state, now) if len(state.forming.descriptions) == state.size else (state, ())


def model_key(name: str) -> str:
    """A key shared by processes that hold the same model: the same part of a worker of the same stage."""
    (_, stage), part = Process.parse(name)
    return str(stage) if part is None else f"{stage}.{part}"


def _form(state: State, now: float) -> Step:
    """All workers are ready: generation 1."""
    models = {model_key(name): description.of_model for name, description in state.forming.descriptions.items()}
    job, grid, parts = _job(state.forming.descriptions)
    wanted = {str(Process(worker, part)) for worker in grid.workers()
              for part in (range(parts) if parts > 1 else (None,))}
    if wanted != set(state.forming.descriptions):
        text = (
            f"the grid has {grid.pipelines} pipelines x {grid.stages} stages"
            + (f" x {parts} parts" if parts > 1 else "") + ", but the workers are "
            f"{', '.join(in_order(state.forming.descriptions))}: start {len(wanted)} processes"
        )
        return job_end.end(state, 1, text, now)
    if text := _too_large(grid):
        return job_end.end(state, 1, text, now)
    if text := _ties_apart(state.forming.descriptions):
        return job_end.end(state, 1, text, now)
    if state.shape is not None and grid.total != state.shape.microbatches:
        return job_end.end(state, 1, _another_batch(grid, state.shape), now)
    state = state.with_(
        phase=Phase.RECOVERING,
        generation=1,
        members={member.worker: member for member in state.known.values()},
        description=job,
        descriptions={},
        samples={},
        models=models,
        ranks={member.worker: member.rank for member in state.known.values()},
    )
    hosts = {name: state.members[name].host for name in in_order(state.members)}
    cut = tables(parts_of(grid.stages, hosts), state.round.reports, (), hosts)
    survival = judge(hosts, state.host, job.guard == "memory", cut, job.guard != "none")
    started = {
        "event": "started",
        "t": now,
        "generation": 1,
        "members": state.incarnations(),
        "ranks": {name: state.members[name].rank for name in in_order(state.members)},
        "pids": {name: state.members[name].pid for name in in_order(state.members)},
        "hosts": hosts,
        "survival": survival.text,
        "fatal_hosts": dict(survival.fatal),
        "grid": {"stages": grid.stages, "microbatches": list(grid.microbatches)},
        "max_restarts": job.max_restarts,
    }
    kept = (records.learnt(state),) if any(state.forming.learnt.values()) else ()
    kept = (*kept, records.decided(state, [started]))
    plan_by = first(each.plan_by(state) for each in IN_FORCE)
    return state, (*kept, commands.begun(state), Emit(started), MakePlan(1, frozenset(), plan_by))


def _job(descriptions: Mapping[str, Description]) -> tuple[Job, Grid, int]:
    """The job that all describe, its grid, and the parts of a worker."""
    one = next(iter(descriptions.values()))
    split = {Process.parse(name).worker.stage for name, description in descriptions.items()
             if not description.full_backward}
    full = tuple(stage for stage in range(one.grid.stages) if stage not in split)
    job = Job.of(one, full)
    for each in IN_FORCE:
        job = each.described(job, descriptions)
    return job, one.grid, one.parts


def _too_large(grid: Grid) -> str:
    """Why this grid's plans cannot be sent; empty: they can."""
    least = 2 * grid.stages * grid.total  # a forward and a backward each
    if least * _ACTION_BYTES <= MOST_BYTES:
        return ""
    return (f"the grid is too large: {grid.pipelines} pipelines x {grid.stages} stages with {grid.total} micro-batches "
            f"make {least} actions or more, and a plan may have {MOST_BYTES // _ACTION_BYTES}: take fewer, "
            "larger micro-batches")


def _ties_apart(descriptions: Mapping[str, Description]) -> str:
    """The error about tied parameters; empty: each stage with a copy trains its own."""
    trained = {(Process.parse(name).worker.stage, number) for name, description in descriptions.items()
               for number, _ in description.ties}
    for name, description in descriptions.items():
        for number, stages in description.ties:
            if apart := [stage for stage in stages if (stage, number) not in trained]:
                return (f"worker {name} trains a tied parameter that stages {', '.join(map(str, stages))} keep copies "
                        f"of, and stage {apart[0]} does not: it would wait for gradients that never come. Freeze the "
                        "copies of all of these stages, or none")
    return ""


def _another_batch(grid: Grid, shape: Shape) -> str:
    """Why a life whose script has not adapted to the smaller grid does not train."""
    pipelines = "1 pipeline" if grid.pipelines == 1 else f"{grid.pipelines} pipelines"
    return (f"the script was started again with {pipelines}, and its global batch has {grid.total} micro-batches now "
            f"and had {shape.microbatches} before: that would be another training. Let the script derive the "
            f"micro-batches of a pipeline from WORLD_SIZE ({shape.microbatches} divided by the number of pipelines), "
            "or fix the global batch (DeepSpeed: train_batch_size; Megatron: --global-batch-size)")


def exited_early(state: State, member: Member | None, happened: Exited, now: float) -> Step:
    """A process ends before generation 1. That ends the job, unless all processes end well without using the plugin."""
    well = not happened.status and not happened.said and (member is None or member.worker in state.round.finished)
    if not well or (member is None and state.known):
        text = _left_early(happened.rank, happened.status, happened.log, happened.said)
        killed = not happened.said and (happened.status is None or happened.status < 0)
        return job_end.end(state, 1, text, now, again=killed)
    state = state.with_(gone=state.forming.gone | {happened.rank})
    if len(state.forming.gone) < state.size:
        return state, ()
    return job_end.end(state, 0, "all workers ended well; none of them trained with the plugin", now)


def _left_early(rank: int, status: int | None, log: str, error: str = "") -> str:
    if error:
        return f"rank {rank} has failed before training began: {error}"
    where = f": see {log}" if log else ""
    ended = "has ended" if status is None else f"ended with {describe_status(status)}"
    return f"rank {rank} {ended} before training began{where}"
