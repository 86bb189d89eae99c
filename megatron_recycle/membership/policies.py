"""The job's policy (`megatron_recycle.policy`) applied to a failure. Pure, like `machine`.

While no pipeline is whole, leaving hit pipelines out would leave none: the micro-batches are re-routed, whatever the
policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from megatron_recycle.membership import faults
from megatron_recycle.membership.extension import Extension
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.names import Process, in_order
from megatron_recycle.membership.protocol import Carry
from megatron_recycle.membership.resume import Resume
from megatron_recycle.membership.state import Event, Member, State
from megatron_recycle.policy import Policy


def policy(state: State) -> Policy:
    """The job's policy."""
    return state.job.chosen


def hit(state: State) -> tuple[int, ...]:
    """Pipelines that have lost a worker, or a part of one."""
    return tuple(sorted({Process.parse(name).worker.pipeline for name in state.absent.out}))


def some_whole(state: State) -> bool:
    """Whether some pipeline has all of its workers."""
    return state.description is not None and len(hit(state)) < state.description.grid.pipelines


def left_out(state: State) -> tuple[int, ...]:
    """Pipelines whose micro-batches this generation does not run."""
    return hit(state) if policy(state).leaves_out and some_whole(state) else ()


def _carried(state: State, resume: Resume) -> Carry | None:
    """The kept part of the iteration that ``resume`` begins. None: it begins anew.

    Each worker of a whole pipeline must still have all that it has done, or have begun nothing; and all must have
    followed one plan without guests. A stage may have summed already: its addends are kept until that is committed.
    """
    last, following = state.go, resume.next
    wanted = policy(state).in_flight == "whole" and state.closing is None and not resume.joined and not resume.restored
    if not wanted or last is None or state.tries.fallback is not None or not some_whole(state) or any(
            iteration == following for iteration, _ in state.script.left_out):
        return None
    before = last.carried if last.carried is not None and last.carried.iteration == following else None
    plan = last.plan if before is None else before.plan
    again = last.resume.next == following
    chain = before.chain if before is not None else last.resume.attempt if again else 1
    gone, done = hit(state), dict[str, int]()
    for name, report in state.round.reports.items():
        if Process.parse(name).worker.pipeline in gone:
            continue
        if (kept := report.kept_of(following, chain)) is not None:
            done[name] = len(kept.actions)
        elif report.iteration < following or not (report.actions or report.torn):
            done[name] = 0
        else:
            return None
    if plan.source != "drop" or not any(done.values()):
        return None
    return Carry(following, chain, plan, done, provisional=False)


class OtherPolicies(Extension):
    """All policies but `reroute`."""

    def ends(self, state: State, lost: Mapping[str, FailureKind]) -> str | None:
        """Members that leave as asked never end the job."""
        if not policy(state).ends_job or all(kind.asked_for for kind in lost.values()):
            return None
        return f"policy {policy(state).name}: {faults.how(state, in_order(lost), lost)}"

    def of_generation(self, state: State, lost: Mapping[str, FailureKind],
                      joined: Mapping[str, Member]) -> Mapping[str, Any]:
        return {"fallback": None} if joined else {}

    def plan_by(self, state: State) -> str | None:
        if not some_whole(state):  # also where recoveries with guests have failed: otherwise no worker could train
            return "reroute" if policy(state).avoids_hit else None
        if state.tries.fallback is not None or not policy(state).avoids_hit:
            return state.tries.fallback
        return "drop" if state.absent.out or policy(state).always_whole else None

    def fallback(self, state: State) -> str | None:
        """A plan without guests, as long as a pipeline is whole."""
        return "drop" if policy(state).reroutes and some_whole(state) else None

    def carried(self, state: State, resume: Resume) -> tuple[Resume, Carry] | None:
        """The actions of the whole pipelines; those of hit ones are lost."""
        if (carry := _carried(state, resume)) is None:
            return None
        lost = [report.actions for name, report in state.round.reports.items()
                if name not in carry.done and report.iteration == resume.next]
        return replace(resume, redone=sum(lost)), carry

    def of_go(self, state: State) -> Mapping[str, Any]:
        return {"without": left_out(state)}

    def went(self, state: State, resume: Resume, now: float) -> tuple[State, Sequence[Event]]:
        """The event of pipelines left out from this iteration on, if they differ from the last go's: their numbers, and
        how many micro-batches an iteration lacks. Without pipelines: all take part again."""
        pipelines = left_out(state)
        known = () if state.generation == 1 else None  # a restarted coordinator emits it again
        if pipelines == (known if state.go is None else state.go.without):
            return state, ()
        counts = state.job.grid.microbatches
        return state, ({"event": "left_out", "t": now, "generation": state.generation, "iteration": resume.next,
                        "pipelines": list(pipelines),
                        "microbatches": sum(counts[pipeline] for pipeline in pipelines)},)
