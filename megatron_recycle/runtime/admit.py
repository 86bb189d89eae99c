"""The admission of a joiner to a running job: it gets its peers' state, and must read the same data."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_recycle.errors import DataError, JobEnded
from megatron_recycle.membership.worker_events import JoinRefused
from megatron_recycle.runtime.compute.data import Mapped, NotReadHere, digest, follows_script
from megatron_recycle.runtime.phases import Phase
from megatron_recycle.runtime.shards import forget
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.stepper import Committed, Stepper
from megatron_recycle.runtime.worker_extension import Meeting, Source


def take_in(meeting: Meeting, source: Source) -> None:
    """This worker comes in: it takes everything from its peers, or from another ``source``. Raises GenerationOver,
    TransferError, and JobEnded if it reads other data."""
    site, stepper, resume = meeting.site, meeting.stepper, meeting.resume
    site.phases.enter(Phase.JOINING, resume.next)
    with site.phases.copying():
        tensors, facts, received = source.take(meeting)
    site.grids.take(facts.grids)
    site.asked.evaluations.take(facts.evaluated)
    # Else it has been in already, and has let go of its data.
    new, last = stepper.standing.verdict is None, facts.verdict.iteration
    later = follows_script(site.framework.data) or (stepper.standing.iteration <= last and not resume.restored)
    if new and not later:
        with site.phases.copying():  # a factory is read from its beginning, which may take minutes as well
            compare_data(site, last, facts.read)
    stepper.enter(tensors, facts)
    if not new:
        stepper.last = Committed(stepper.last.reports)
    if resume.checkpoint is None:
        forget(site.stage)
    if resume.restored:  # the others' scripts are further than their state
        stepper.standing.joined_after = resume.regained
    site.trainable.guard.watched, site.trainable.guard.midway = site.framework.restore is not None, False
    site.trainable.guard.saved = tuple(facts.saved)
    site.trainable.initial_state = tensors, facts.counters
    site.framework.registered.lacks = True
    site.trainable.lay_out()
    site.forget_data(resume.target)
    source.taken(meeting)
    # From here on it is as good as any peer, whatever its script has to catch up with before it trains.
    site.agent.holds(meeting.go.generation, received)


def compare_later(site: Site, stepper: Stepper) -> None:
    """Compare data once a joiner's script has gone through its loop, and so has given iterators and changed how data
    are read, as its peers' had: see `compare_data`."""
    verdict = stepper.standing.verdict
    if verdict is not None:
        with site.phases.copying():
            compare_data(site, verdict.iteration, stepper.last.read)


def compare_data(site: Site, iteration: int, read: Mapping[tuple[int, int, bool], int]) -> None:
    """Compare the data that this joiner reads with the digests ``read`` in ``iteration``, sent by a peer.

    Raises JobEnded, here alone: the others would take a difference for a fault of the dataset, which ends the job.
    """
    data = site.framework.data
    if site.place.parts > 1 and isinstance(data, Mapped) and data.maps:
        return  # the function may hand batches to the worker's other parts, which would take this one for their next
    for (pipeline, microbatch, _), theirs in read.items():
        site.forget_data(iteration - 1)
        number = site.grids.number(iteration, microbatch)
        try:
            text = None if digest(site.framework.data.batch(pipeline, number)) == theirs else (
                f"it reads other data than the job for iteration {iteration}, pipeline {pipeline}, micro-batch "
                f"{microbatch}")
        except NotReadHere:
            continue
        except DataError as error:
            text = str(error)
        if text is not None:
            refuse_itself(site, f"{text}; give it the job's dataset, and what else decides the order of samples "
                                "(their number, seeds)")


def refuse_itself(site: Site, text: str) -> None:
    """End this worker alone: a fault of its own keeps it from training with the others. Raises JobEnded."""
    site.agent.event(JoinRefused(text))
    raise JobEnded(f"worker {site.place.name} cannot join: {text}. The job goes on without it")
