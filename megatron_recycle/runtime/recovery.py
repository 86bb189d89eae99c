"""A recovery, step by step: one function per step.

The coordinator decides the members and where training goes on; these steps carry it out on every survivor, in the
training thread. A further failure on the way (another death, say) ends in another generation, and each generation
starts again with fresh reports.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from megatron_recycle.config import RecycleConfig
from megatron_recycle.control import Go
from megatron_recycle.errors import GenerationOver, JobEnded
from megatron_recycle.membership import Standing, workers_of
from megatron_recycle.membership.report import ClosedReport, Report
from megatron_recycle.membership.worker_events import Rebuilt
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Plan, Worker
from megatron_recycle.runtime import worker_extensions as extensions
from megatron_recycle.runtime.activity import CONNECT
from megatron_recycle.runtime.admit import take_in
from megatron_recycle.runtime.comm.comm import is_broken
from megatron_recycle.runtime.comm.handles import Groups, Limits
from megatron_recycle.runtime.comm.levelling import Levelling
from megatron_recycle.runtime.comm.reuse import ReusableGroups
from megatron_recycle.runtime.description import description
from megatron_recycle.runtime.generation import Generation, Scope, store_prefix
from megatron_recycle.runtime.p2p_warmup import connect_partners
from megatron_recycle.runtime.phases import Phase
from megatron_recycle.runtime.resumable_attempt import ResumedIteration
from megatron_recycle.runtime.shards import cuts
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.stepper import Stepper
from megatron_recycle.runtime.worker_extension import PEERS, Meeting

_POLL_SECONDS = 0.001
_CONNECT_PER_RANK = 0.05  # seconds
_MOST_PATIENT = 2  # how often the limit is doubled
_LONGEST_ABSENCE = 3.0  # of the coordinator, in times that any failure takes to be found


def join(site: Site, stepper: Stepper) -> Generation:
    """Take part in the first generation: report that the model is built, and wait for all others. A worker that joins a
    running job waits until it is admitted."""
    agent, setup = site.agent, site.framework.setup
    learnt, joins = setup.close() if setup is not None else (), agent.outside
    agent.ready(description(site), _report(site, stepper.standing), () if joins else learnt)
    return _follow(site, stepper, agent.wait_taken_in() if joins else agent.wait_go(1))


def recover(site: Site, stepper: Stepper, error: GenerationOver) -> Generation:
    """From a broken generation to the next that holds, which is then in force.

    Raises JobEnded if training cannot go on, and ``error`` if no failure was declared for it.
    """
    await_stop(site, stepper.standing, error)
    retire(site, stepper)
    return _follow(site, stepper, report(site, stepper))


def _follow(site: Site, stepper: Stepper, go: Go | None) -> Generation:
    """Rebuild, reconcile, resume; whenever a newer generation comes up meanwhile, again from the report."""
    while True:
        try:
            if go is not None:
                for extension in extensions.ALL:
                    extension.decided(site, stepper, go)
                generation = rebuild(site, stepper, go)
                generation = reconcile(site, stepper, generation, go)
                resume(site, stepper.standing, go)
                return generation
        except GenerationOver as error:
            await_stop(site, stepper.standing, error)
            retire(site, stepper)
        go = report(site, stepper)


def await_stop(site: Site, standing: Standing, error: GenerationOver) -> None:
    """1-2. Wait until the coordinator has ended the generation in force.

    A communication error is only a hint: it never names the culprit. If no decision follows within the time
    in which any failure is found, the error is this worker's own and is raised.
    """
    agent, config = site.agent, site.config
    if not site.interrupted(standing):
        agent.hint(standing.epoch.generation, str(error))
    patience = config.heartbeat_timeout + 2 * config.heartbeat_interval + config.report_timeout
    begun = time.monotonic()
    limit = begun + patience
    while not site.interrupted(standing):
        if agent.out_of_reach:
            # A restarted coordinator has to find the failure first.
            limit = min(time.monotonic() + patience, begun + _LONGEST_ABSENCE * patience)
        if time.monotonic() > limit:
            raise error
        time.sleep(_POLL_SECONDS)
    if agent.ended is not None:
        raise JobEnded(agent.ended.message, agent.ended.status)


def comes_of_failure(site: Site, standing: Standing, error: RuntimeError) -> bool:
    """Whether ``error``, raised by a collective over all ranks between two iterations, is due to a failure: the next
    iteration then begins with the recovery. Raises JobEnded."""
    if not is_broken(error):
        return False
    try:
        await_stop(site, standing, GenerationOver(str(error)))
    except GenerationOver:
        return False
    return True


def retire(site: Site, stepper: Stepper) -> None:
    """3. Leave the old generation: nothing of it is pending afterwards. What an attempt has done may stay in
    `Current.kept`. Idempotent."""
    site.phases.enter(Phase.RECOVERING, stepper.standing.iteration)
    stepper.current.retire(lambda: not site.goes_on)
    stepper.leave()
    stepper.standing.give_up()


def install(site: Site, stepper: Stepper, generation: Generation) -> Generation:
    """Put ``generation`` in force, for the framework too.

    Raises GenerationOver if a newer one was announced meanwhile.
    """
    stepper.current.set(generation)
    site.stage.regroup(generation.groups)
    if site.interrupted(stepper.standing):
        raise GenerationOver("a newer generation was announced while this one was being installed")
    return generation


def report(site: Site, stepper: Stepper) -> Go | None:
    """3-4. Report where this worker stands and wait for the decision; None if a newer generation came first.

    A part of a worker that has lost another part waits here until the lost part is replaced. Raises JobEnded.
    """
    standing, held = stepper.standing, stepper.held
    if site.agent.outside:
        if site.place.parts > 1:
            get_logger().warning("megatron-recycle: another part of worker %s is out; this one (%s) has no work until "
                                 "that one is replaced", site.place.me, site.place.name)
        # Or it came in with the last generation, which was over before it counted.
        return site.agent.enter_again()
    generation = site.agent.stop_generation
    closed = None
    if held is not None and standing.closed == held.iteration:
        closed = ClosedReport(held.iteration, held.loss, held.weight, (site.place.me.stage, *site.tied))
    kept = tuple(each.report(standing.committed) for each in stepper.current.kept.values())
    site.agent.report(generation, _report(site, standing, kept=kept, torn=stepper.current.kept.torn, closed=closed))
    return site.agent.wait_go(generation)


def _report(site: Site, standing: Standing, **kept: Any) -> Report:
    for extension in extensions.ALL:
        kept |= extension.reports(site, standing)
    return standing.report(**kept)


def rebuild(site: Site, stepper: Stepper, go: Go) -> Generation:
    """5. Build the new generation's groups with all its members and adopt its plan."""
    begun, standing = time.monotonic(), stepper.standing
    standing.join(go.generation)
    if go.tries:  # no member is gone, and yet they could not go on: the communicators may be the cause
        stepper.current.let_go()
    groups = _connect(site, standing, go.prefix, go.tries, workers_of(go.members), site.config.report_timeout,
                      stepper.current.reusable)
    stepper.current.reusable = None
    scope = Scope(go.left_out, frozenset(go.without),
                  tuple(ResumedIteration.read(each) for each in (go.carried, go.ahead) if each is not None), go.closes)
    generation = Generation.of(standing.epoch, go.prefix, go.tries, scope, groups, site.stage,
                               Plan.from_file(go.plan), site.exact,
                               {int(stage): Worker.parse(keeper) for stage, keeper in go.keepers.items()},
                               cuts(site.stage, groups, go.resume, begun=False))
    install(site, stepper, generation)
    connect_partners(site, standing, generation, connect_limit(site.config, groups.control.size, go.tries),
                     site.phases.working(CONNECT), go.resume)
    site.agent.event(Rebuilt(go.generation, round(1000 * (time.monotonic() - begun), 1)))
    return generation


def renew(site: Site, stepper: Stepper) -> Generation:
    """New groups for the same members and plan: everything under way on the old ones is void.

    All members come here after the same verdict. No member tears anything down before all have arrived, since the
    verdict may still be on its way to another.
    """
    old, standing = stepper.current.get(), stepper.standing
    # Some members may still be in the script's own code.
    groups = _connect(site, standing, old.prefix, old.tries, old.groups.members, site.config.transport_timeout)
    stepper.current.take()
    old.groups.retire()
    renewed = install(site, stepper, old.renewed(standing.epoch, groups, site.stage))
    connect_partners(site, standing, renewed, connect_limit(site.config, groups.control.size, old.tries),
                     site.phases.working(CONNECT))
    for extension in extensions.ALL:
        extension.renew(site, standing, groups)
    return renewed


def _connect(site: Site, standing: Standing, prefix: str, tries: int, members: Sequence[Worker],
             patience: float, reusable: ReusableGroups | None = None) -> Groups:
    """The groups of the epoch that ``standing`` is in. ``patience``: seconds for all members to come to the store.
    ``reusable``: communicators that may be used again."""
    config, epoch = site.config, standing.epoch
    connect = connect_limit(config, len(members) * site.place.parts, tries)
    with site.phases.working(CONNECT):  # these limits hold, not learnt ones
        groups = site.network.connect(
            generation=epoch.generation, prefix=store_prefix(prefix, epoch), place=site.place, members=members,
            limits=Limits(config.transport_timeout, connect, max(patience, connect)),
            interrupted=lambda: site.interrupted(standing), before=reusable)
    if groups.siblings is not None and groups.siblings.backend.host and site.keeps_messages:
        groups.levelling = Levelling(groups.siblings, groups.teardown.threads, config.report_timeout / 2)
    return groups


def connect_limit(config: RecycleConfig, ranks: int, tries: int) -> float:
    """Seconds for one handle to connect ``ranks`` processes, after ``tries`` generations with the same members in a
    row. A try that was too slow gets twice the time, at most `_MOST_PATIENT` times over. However long this is, the
    coordinator finds a member that dies or freezes meanwhile."""
    derived = config.heartbeat_timeout + _CONNECT_PER_RANK * ranks
    return (config.connect_timeout or derived) * 2 ** min(tries, _MOST_PATIENT)


def reconcile(site: Site, stepper: Stepper, generation: Generation, go: Go) -> Generation:
    """6. Bring all workers to the same place: every worker steps the last iteration that every stage holds, and undoes
    and forgets anything beyond it. A joiner gets everything from its peers.

    Raises GenerationOver; VerificationError and TransferError if state is not as it should be; and JobEnded.
    """
    todo = stepper.standing.reconciliation(go.resume)
    meeting = Meeting(site, stepper, generation, go, todo)
    if not todo.enter and not todo.back:
        stepper.reconcile(todo, go.resume, generation.groups)
    _let_go(meeting)
    for extension in extensions.ALL:
        extension.level(meeting)
    (source,) = [found for extension in extensions.ALL if (found := extension.source(meeting)) is not None] or [PEERS]
    if todo.enter:
        take_in(meeting, source)
    elif todo.back or todo.give:
        site.phases.enter(Phase.JOINING, go.resume.next)
        with site.phases.copying():
            source.give(meeting)
    for extension in extensions.ALL:
        extension.settle(meeting)
    return stepper.current.get()


def _let_go(meeting: Meeting) -> None:
    """Keep only the attempts that go on. Not before the last step is undone: until then a worker that reports that its
    stage is closed has all its messages."""
    current, resume, me = meeting.stepper.current, meeting.resume, meeting.site.place.me
    kept, scope = current.kept, meeting.generation.scope
    goes_on = {carried.iteration for carried in scope.carried if me in carried.done}
    if me.stage in resume.closed:
        goes_on.add(resume.next)
    kept.let_go([each for each in kept if each > resume.target and each not in goes_on])
    carried = scope.carried_in(resume.next)
    if carried is not None and carried.provisional and meeting.stepper.refuted:
        kept.let_go()
        current.set(meeting.generation.begun_anew())


def resume(site: Site, standing: Standing, go: Go) -> None:
    """7. The next action that this worker runs is the first of the new generation."""
    standing.go_on(go.resume)
    site.phases.resumes()
