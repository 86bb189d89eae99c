"""The script's joint calls, and its state beside the model: their parts of a recovery."""

from __future__ import annotations

from contextlib import nullcontext

from megatron_recycle.membership import Standing
from megatron_recycle.runtime.admit import refuse_itself
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.generation import Generation
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.stepper import Stepper
from megatron_recycle.runtime.worker_extension import Meeting, WorkerExtension


class ScriptCalls(WorkerExtension):
    """Ends the evaluations, collectives and transfers of which only some members have seen the end."""

    def level(self, meeting: Meeting) -> None:
        site, resume = meeting.site, meeting.resume
        joined = _ranks(meeting)
        with site.phases.copying() if joined else nullcontext():
            site.asked.reconcile(meeting.groups, meeting.standing.epoch, joined, joined if resume.restored else ())

    def renew(self, site: Site, standing: Standing, groups: Groups) -> None:
        site.asked.transfers.reconcile(groups, standing.epoch)


def _ranks(meeting: Meeting) -> list[int]:
    """Ranks in ``groups.control`` of all parts of the workers that come in."""
    ranks = meeting.site.place.ranks
    live_ranks = sorted(rank for worker in meeting.groups.members for rank in ranks[worker])
    return [live_ranks.index(rank) for worker in meeting.joined for rank in ranks[worker]]


class RegisteredState(WorkerExtension):
    """Gives registered state to peers that have come in."""

    def settle(self, meeting: Meeting) -> None:
        meeting.site.framework.registered.look(meeting.groups)

    def catch_up(self, site: Site, stepper: Stepper, generation: Generation) -> None:
        share_registered(site, generation.groups)


def share_registered(site: Site, groups: Groups) -> None:
    """Give registered state to peers that have come in; all workers together, inside calls of their scripts. Raises
    GenerationOver, and JobEnded on a joiner that cannot take it."""
    with site.phases.copying() if site.framework.registered.owed else nullcontext():
        reason = site.framework.registered.share(groups, site.stage.device)
    if reason is not None:
        refuse_itself(site, reason)
