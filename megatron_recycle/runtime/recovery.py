"""A recovery, step by step: one function per step.

The coordinator decides who is in and where training goes on; this is what every survivor does about it.
The steps run in the training thread. Whatever goes wrong on the way (another death, say) ends in another
generation, and each generation starts again with fresh reports.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

from megatron_recycle.config import RecycleConfig
from megatron_recycle.control import Go
from megatron_recycle.errors import DataError, GenerationOver, JobEnded, RecycleError
from megatron_recycle.membership import Verdict, workers_of
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Plan, Worker
from megatron_recycle.runtime.activity import CONNECT, COPY, WORKING
from megatron_recycle.runtime.comm.comm import is_broken
from megatron_recycle.runtime.comm.handles import Groups, Limits
from megatron_recycle.runtime.compute.data import NotReadHere, digest
from megatron_recycle.runtime.description import description
from megatron_recycle.runtime.equality import verify_recovery
from megatron_recycle.runtime.state_copy import give, stage_tensors, take

if TYPE_CHECKING:
    from megatron_recycle.runtime.worker import StageWorker

_POLL_SECONDS = 0.001
_CONNECT_PER_RANK = 0.05  # seconds
_MOST_PATIENT = 2  # how often the limit is doubled
_LONGEST_ABSENCE = 3.0  # of the coordinator, in times that any failure takes to be found


def join(worker: StageWorker) -> None:
    """Take part in the first generation: say that the model is built, and wait for all others. A worker that joins a
    running job waits to be taken in."""
    learnt = worker.setup.close() if worker.setup is not None else ()
    if worker.agent.outside:
        _follow(worker, enter(worker))
    else:
        worker.agent.ready(description(worker), worker.standing.report(), learnt)
        _follow(worker, worker.agent.wait_go(1))


def enter(worker: StageWorker) -> Go | None:
    """Say that the model is built, and wait for a generation with this worker in it; None if one came and went."""
    worker.agent.ready(description(worker), worker.standing.report())
    return worker.agent.wait_taken_in()


def recover(worker: StageWorker, error: GenerationOver) -> None:
    """Bring this worker from a broken generation to the next one that holds.

    Raises JobEnded if training cannot go on, and ``error`` if nobody declared a failure for it.
    """
    await_stop(worker, error)
    stand_still(worker)
    _follow(worker, report(worker))


def finish(worker: StageWorker) -> None:
    """The script has nothing more to do: stand by until that is so everywhere, since another worker may fail
    before it has made its last step."""
    worker.tell_resumed()
    while not worker.agent.finished():
        stand_still(worker)
        _follow(worker, report(worker))
        worker.tell_resumed()


def _follow(worker: StageWorker, go: Go | None) -> None:
    """Rebuild, reconcile, resume; with every newer generation that comes up meanwhile, again from the report."""
    while True:
        try:
            if go is not None:
                rebuild(worker, go)
                reconcile(worker, go)
                verify_recovery(worker)
                if go.closing is not None:
                    close_down(worker, go)
                resume(worker, go)
                return
        except GenerationOver as error:
            await_stop(worker, error)
            stand_still(worker)
        go = report(worker)


def await_stop(worker: StageWorker, error: GenerationOver) -> None:
    """1-2. Wait until the coordinator has ended the generation in force.

    A communication error is only a hint: it never names the culprit. If no decision follows within the time
    that any failure takes to be found, the error is this worker's own and is raised.
    """
    if not worker.interrupted():
        worker.agent.hint(worker.generation, str(error))
    config = worker.config
    patience = config.heartbeat_timeout + 2 * config.heartbeat_interval + config.report_timeout
    begun = time.monotonic()
    limit = begun + patience
    while not worker.interrupted():
        if worker.agent.out_of_reach:
            # A coordinator that is started again has to find the failure first.
            limit = min(time.monotonic() + patience, begun + _LONGEST_ABSENCE * patience)
        if time.monotonic() > limit:
            raise error
        time.sleep(_POLL_SECONDS)
    if worker.agent.ended is not None:
        raise JobEnded(worker.agent.ended.message, worker.agent.ended.status)


def comes_of_failure(worker: StageWorker, error: RuntimeError) -> bool:
    """Whether ``error``, met in a collective over all ranks between two iterations, comes of a failure: the next
    iteration then begins with the recovery. Raises JobEnded."""
    if not is_broken(error):
        return False
    try:
        await_stop(worker, GenerationOver(str(error)))
    except GenerationOver:
        return False
    return True


def stand_still(worker: StageWorker) -> None:
    """3. Leave the old generation: nothing of it is pending afterwards, and the attempt is forgotten."""
    worker.observe("recovering", worker.standing.iteration)
    worker.uninstall()
    worker.stepper.leave()
    worker.discard_attempt()


def report(worker: StageWorker) -> Go | None:
    """3-4. Say where this worker stands and wait for the decision; None if a newer generation came first.

    A part of a worker that has lost another part waits here until that one is replaced. Raises JobEnded.
    """
    if worker.agent.outside:
        if worker.place.parts > 1:
            get_logger().warning("megatron-recycle: another part of worker %s is out; this one (%s) has no work until "
                                 "that one is replaced", worker.place.me, worker.place.name)
        return enter(worker)  # or it came in with the last generation, and that is over before it counted
    generation = worker.agent.stop_generation
    worker.agent.report(generation, worker.standing.report())
    return worker.agent.wait_go(generation)


def rebuild(worker: StageWorker, go: Go) -> None:
    """5. Build the new generation's groups with all its members and adopt its plan."""
    begun = time.monotonic()
    worker.standing.join(go.generation)
    worker.prefix, worker.tries = go.prefix, go.tries
    groups = _connect(worker, workers_of(go.members), worker.config.report_timeout)
    worker.left_out = go.left_out
    worker.install(groups, Plan.from_json(go.plan))
    worker.agent.event("rebuilt", generation=go.generation, ms=round(1000 * (time.monotonic() - begun), 1))


def renew(worker: StageWorker) -> None:
    """New handles for the same members and plan: what was under way on the old ones is void.

    All members come here after the same verdict. Whoever arrives tears nothing down before all have, since the
    verdict may still be on its way to another.
    """
    # Some may still be in the script's own code.
    groups = _connect(worker, worker.live(), worker.config.transport_timeout)
    worker.uninstall()
    worker.reinstall(groups)


def _connect(worker: StageWorker, members: Sequence[Worker], patience: float) -> Groups:
    """``patience``: seconds that the members may take to come to the store."""
    config = worker.config
    connect = connect_limit(config, len(members) * worker.place.parts, worker.tries)
    with worker.activity.during(WORKING, CONNECT):  # these limits hold, and none that has been learnt
        return worker.network.connect(
            generation=worker.generation, prefix=worker.store_prefix, place=worker.place, members=members,
            limits=Limits(config.transport_timeout, connect, max(patience, connect)), interrupted=worker.interrupted)


def connect_limit(config: RecycleConfig, ranks: int, tries: int) -> float:
    """Seconds that one handle may take to connect ``ranks`` processes, after ``tries`` generations with the same
    members in a row: what was too slow gets twice the time, and that again. Whoever dies or freezes meanwhile is found
    by the coordinator, however long this is."""
    derived = config.heartbeat_timeout + _CONNECT_PER_RANK * ranks
    return (config.connect_timeout or derived) * 2 ** min(tries, _MOST_PATIENT)


def reconcile(worker: StageWorker, go: Go) -> None:
    """6. Make all workers stand at the same place: the last iteration that every stage holds is stepped by
    everybody, anything beyond it is undone and forgotten. Who comes in gets everything from its peers."""
    groups, stepper = worker.current_groups(), worker.stepper
    joined = workers_of(go.resume.joined)
    if groups.me not in joined:
        stepper.reconcile(go.resume, groups)
    worker.evaluations.reconcile(groups)
    if groups.me in joined:
        worker.observe("joining", go.resume.next)
        with _copying(worker):
            tensors, facts, received = take(groups, joined, worker.stage.device)
        if worker.standing.verdict is None:  # it has never been in, so that it has let go of nothing
            with _copying(worker):  # a factory is read from its beginning, which may take minutes as well
                compare_data(worker, Verdict.from_json(facts["verdict"]).iteration, facts["read"])
        stepper.enter(tensors, facts)
        worker.brought = tensors, facts["counters"]
        worker.lay_out()
        worker.forget_data(go.resume.target)
        # From here on it is as good as any peer, whatever its script has to catch up with before it trains.
        worker.agent.holds(go.generation, vars(received))
    elif any(other.stage == groups.me.stage for other in joined):
        worker.observe("joining", go.resume.next)
        with _copying(worker):
            give(groups, joined, stage_tensors(worker.stage), stepper.facts())


def compare_data(worker: StageWorker, iteration: int, read: Mapping[tuple[int, int], int]) -> None:
    """Whether this worker, which comes in, reads what a peer has ``read`` in ``iteration``, which the peer tells.

    Raises JobEnded, here alone: the others would take its data for a fault of the dataset, which ends the job.
    """
    for (pipeline, microbatch), theirs in read.items():
        worker.forget_data(iteration - 1)
        number = iteration * worker.place.grid.microbatches[pipeline] + microbatch
        try:
            text = None if digest(worker.data.batch(pipeline, number)) == theirs else (
                f"it reads other data than the job for iteration {iteration}, pipeline {pipeline}, micro-batch "
                f"{microbatch}")
        except NotReadHere:
            continue
        except DataError as error:
            text = str(error)
        if text is not None:
            refuse_itself(worker, f"{text}; give it the job's dataset, and what else decides the order of samples "
                                  "(their number, seeds)")


def refuse_itself(worker: StageWorker, text: str) -> None:
    """What this worker has found in itself keeps it from training with the others, and nobody else. Raises JobEnded."""
    rank = worker.place.ranks[worker.place.me][worker.place.part]
    worker.agent.event("join_failed", reason=text, rank=rank, pid=os.getpid())
    raise JobEnded(f"worker {worker.place.name} cannot join: {text}. The job goes on without it")


def _copying(worker: StageWorker) -> AbstractContextManager[None]:
    """A stage's state may take minutes to copy: that nobody trains meanwhile is no sign of a lost message."""
    return worker.activity.during(WORKING, COPY)


def close_down(worker: StageWorker, go: Go) -> NoReturn:
    """7, at the end of a job that cannot go on: save what stands now, the same on all peers, and wait for the end.

    Raises JobEnded, or GenerationOver if another member is lost before all have said that they have saved.
    """
    get_logger().error("megatron-recycle: the job ends after a last checkpoint: %s", go.closing)
    place = error = ""
    with _copying(worker):
        try:
            assert worker.save_last is not None, "this worker has said that it can save"
            place = worker.save_last()
        except GenerationOver:
            raise
        except Exception as failure:  # noqa: BLE001 - whatever it is, it must not stand before what ends the job
            ours = isinstance(failure, RecycleError)
            error = str(failure) if ours else f"{type(failure).__name__}: {failure}"
            get_logger().error("megatron-recycle: no last checkpoint: %s", error, exc_info=None if ours else failure)
    worker.agent.saved(go.generation, place, error)
    raise GenerationOver("another member was lost before all had saved")


def resume(worker: StageWorker, go: Go) -> None:
    """7. The next action that this worker runs is the first of the new generation."""
    worker.standing.go_on(go.resume)
    worker.announce_resumed()
