"""Errors of scripts and data, as the job remembers them: whether others can take over, or would meet the same error.
Pure, like `machine`.

The first worker that raises is out, as if it had died: the cause may be its host, device or memory. The same error in
the same work on a second worker is caused by the work: it ends the job, with its message, while the others still live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_recycle.errors import VerificationError
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.names import Process, in_order
from megatron_recycle.membership.resume import RESTART, by_stage
from megatron_recycle.membership.sole_holders import lost_with
from megatron_recycle.membership.state import Member, Said, State

_REMEMBERED = 64
"""How many of the latest errors are kept."""
_MEND = "It would fail there again after a restart: mend the data or the code first."


def remembered(state: State, member: Member, fault: Fault, number: int) -> State:
    """The state with this error."""
    report = Said(member.worker, member.incarnation, fault, number)
    return state.with_(faults=(*state.script.faults, report)[-_REMEMBERED:])


def repeated(state: State, member: Member, number: int) -> bool:
    """Whether this error is a repetition after a reconnect."""
    return number > 0 and any(
        (report.incarnation, report.number) == (member.incarnation, number) for report in state.script.faults)


def said_by(state: State, member: Member) -> Fault | None:
    """The last error of this process, except errors of recoveries that were retried with success, and of layers that
    are no longer lent."""
    return next((report.fault for report in reversed(state.script.faults) if report.incarnation == member.incarnation
                 and report.fault.unlent is None
                 and (state.tries.retries or not (report.fault.recovery and report.fault.whole))), None)


def fatal(state: State, member: Member, fault: Fault) -> str | None:
    """Why the job ends with this error of a member; None if it goes on without the member."""
    if fault.refused:
        return fault.text
    if (twin := _twin(state, member, fault)) is not None:
        if fault.microbatch is not None:
            return f"{_everywhere(fault, [twin, member.worker])} {_MEND}"
        return f"{twin} and {member.worker} have failed alike {fault.where}: {fault}. {_MEND}"
    if (last := the_last(state, member)) is not None:
        return f"{member.worker}, {last}, has failed {fault.where}: {fault}{out_before(state, member)}. {RESTART}"
    return None


def the_last(state: State, member: Member) -> str | None:
    """The stage or shard that would be lost with this member and its worker's other parts, in words; else None."""
    alone = next((one for one in lost_with(state, [member.worker]) if member.worker in one.by), None)
    if alone is None:
        return None
    return f"the last worker of {alone}" if alone.shard is None else f"the only one that holds {alone}"


def out_before(state: State, member: Member) -> str:
    """The workers of its stage that are out, in words."""
    out = by_stage(state.stages, state.absent.out)[Process.parse(member.worker).worker.stage]
    return f"; out before: {how(state, out)}" if out else ""


def may_go_well(state: State, member: Member, fault: Fault) -> bool:
    """Whether a restart of the script may do better after this error of a member: no other worker has met it, and it is
    no refusal. Peers that differ are equal again after a restart from a checkpoint."""
    return fault.error == VerificationError.__name__ or (not fault.refused and _twin(state, member, fault) is None)


def of_left_out(state: State, iteration: int) -> tuple[str, bool] | None:
    """The error for which a micro-batch of ``iteration`` is left out, as the end of the job would tell it, and whether
    a restart may do better, since only one worker has met it. None: there is none."""
    found = [one for one in state.script.faults if one.fault.iteration == iteration
             and (iteration, one.fault.microbatch) in state.script.left_out]
    if not found:
        return None
    fault = found[-1].fault
    names = [*dict.fromkeys(one.worker for one in found if one.fault.microbatch == fault.microbatch)]
    text = _everywhere(fault, names)
    return (text, True) if len(names) == 1 else (f"{text} {_MEND}", False)


def _everywhere(fault: Fault, names: Sequence[str]) -> str:
    return (f"micro-batch {fault.microbatch} of iteration {fault.iteration} fails on every worker: {fault} "
            f"(in {fault.action} on {' and '.join(names)}).")


def behind_training(state: State) -> str | None:
    """Errors of scripts after the last iteration of a finished job; None: there are none. They cost the job nothing,
    but the rest of such a script (an export) is not done. Errors of workers that came in again are forgotten."""
    found = [f"{report.worker} has failed {report.fault.where}: {report.fault}" for report in state.script.faults
             if report.incarnation in state.absent.fenced and report.fault.behind(state.progress.committed)]
    if not found:
        return None
    return (f"training has come to its end, but {'; '.join(found)}. What that script had still to do is not done")


def how(state: State, out: list[str], kinds: Mapping[str, FailureKind] | None = None) -> str:
    """Each of ``out`` with the kind of its failure (of ``kinds``, or as known) and its error."""
    errors = {one.worker: str(one.fault) for one in state.script.faults if one.fault.unlent is None}
    kinds = state.absent.out if kinds is None else kinds
    return ", ".join(f"{name} {kinds[name]}" + (f" ({errors[name]})" if name in errors else "")
                     for name in in_order(out))


def _twin(state: State, member: Member, fault: Fault) -> str | None:
    """Another worker with the same error. In the script's own code only workers of the same stage count: stages may run
    different code."""
    me = Process.parse(member.worker).worker
    for report in reversed(state.script.faults):
        other = Process.parse(report.worker).worker
        # A guest's lack of memory is no sign of bad data.
        alike = fault.same(report.fault) and not report.fault.recovery
        if other != me and alike and (fault.action is not None or other.stage == me.stage):
            return report.worker
    return None
