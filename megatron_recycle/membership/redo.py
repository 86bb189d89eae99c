"""What survivors have done of the iteration that a failure interrupts, so that only the rest of it is run.

A worker keeps its sums of gradients, its activations, and all messages that it has sent in an iteration that is not
committed. So the iteration goes on with a plan that begins, on each worker, with the actions that it has done. What a
dead worker has done is lost: its peers run it again, with inputs from their neighbours' messages. Pure, like `machine`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_recycle.membership.names import Process, in_order
from megatron_recycle.membership.policies import policy
from megatron_recycle.membership.resume import Resume
from megatron_recycle.membership.state import Redo, State


def done(state: State, resume: Resume) -> dict[str, tuple[str, ...]]:
    """The actions of the iteration ``resume.next`` that each worker has kept, in its order. Empty where the iteration
    is to begin anew."""
    plain = policy(state).reroutes and state.fallback is None and state.closing is None
    if not plain or resume.joined or resume.restored or resume.checkpoint is not None or any(
            iteration == resume.next for iteration, _ in state.left_out):
        return {}
    found = {worker: levelled([() if kept is None else kept["actions"]
                               for kept in (_kept(report, resume.next) for report in reports)])
             for worker, reports in _by_worker(state).items()}
    kept = {worker: actions for worker, actions in found.items() if actions}
    return kept if len(_lent(state, resume, kept)) < 2 else {}


def levelled(parts: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """What counts of what the parts of a worker have done, who follow one order.

    A forward or a backward counts if all have done it, and W if all have done its backward and one has done W: the
    others need nobody for that. A part drops a forward that does not count. Nothing counts at all where a part would
    have to undo something else.
    """
    if len(parts) == 1:
        return tuple(parts[0])
    sets = [frozenset(part) for part in parts]
    counted = [action for action in max(parts, key=len) if all(action in each for each in sets)]
    late = [action for part in parts for action in part if action not in counted and action[0] == "W"]
    counted += dict.fromkeys(action for action in late if all(f"B{action[1:]}" in each for each in sets))
    for each in sets:
        for action in each.difference(counted):
            if not action.startswith("F") or action[1] == "B" or {f"B{action[1:]}", f"FB{action[1:]}"} & each:
                return ()
    return tuple(counted)


def lent(state: State, resume: Resume, found: Mapping[str, tuple[str, ...]]) -> str:
    """The digest of the plan by which ``found`` was done, where that lends layers; else nothing."""
    return "".join(_lent(state, resume, found))


def asked(state: State, resume: Resume, found: Mapping[str, tuple[str, ...]]) -> Redo:
    """The rest of the iteration, before its plan is known."""
    reports = _by_worker(state)
    kept = [_kept(report, resume.next) for worker in found for report in reports[worker]]
    return Redo(resume.next, {name: len(actions) for name, actions in found.items()},
                any(each is not None and each["provisional"] for each in kept))


def size(state: State, resume: Resume) -> tuple[int, int]:
    """Micro-batches of each pipeline of the iteration, and those of a block."""
    kept = next(each for report in state.reports.values() if (each := _kept(report, resume.next)) is not None)
    return kept["microbatches"], kept["block"]


def carried(state: State, resume: Resume) -> dict[str, Any] | None:
    """As `policies.carried`, of an iteration whose rest is planned. Where a script has been given the iteration's
    `loss` and `weight`, all are."""
    redo = state.redo
    if redo is None or redo.plan is None or redo.iteration != resume.next:
        return None
    closed = next((state.reports[name]["closed"] for name in _closed(state, resume)), None) if resume.closed else None
    return {"iteration": redo.iteration, "chain": resume.attempt, "plan": redo.plan,
            "done": dict(redo.plan.get("done", {})), "provisional": redo.provisional,
            "loss": None if closed is None else [closed["loss"], closed["weight"]]}


def repeated(state: State, resume: Resume, now: float) -> tuple[dict[str, Any], ...]:
    """The event of an iteration that some scripts may have left, and that all run again: a message is lost with the
    worker that made it and the one that had used it."""
    if not resume.closed or state.closing is not None or (state.redo is not None and state.redo.plan is not None):
        return ()
    return ({"event": "repeated", "t": now, "generation": state.generation, "iteration": resume.next,
             "workers": _closed(state, resume)},)


def left_for_good(state: State) -> bool:
    """Whether no iteration that scripts have left is run again, since bits have to be the same whatever fails."""
    return (state.description or {}).get("reduction") == "exact"


def without_kept(state: State, resume: Resume) -> Resume:
    """``resume`` with the number of actions that are lost although somebody who did them lives. Where the iteration
    begins anew no stage stays behind it."""
    redo, reports = state.redo, _by_worker(state)
    if redo is None or redo.plan is None:
        return replace(resume, closed=())
    return replace(resume, redone=resume.redone - sum(
        min(count, _counted(reports[worker][0], resume.next)) for worker, count in redo.done.items()))


def _lent(state: State, resume: Resume, found: Mapping[str, tuple[str, ...]]) -> set[str]:
    reports = _by_worker(state)
    return {(_kept(report, resume.next) or {}).get("lent", "") for worker in found for report in reports[worker]}


def _closed(state: State, resume: Resume) -> list[str]:
    """The members that have found their stage closed for the iteration. One that has not heard a verdict may still
    report an earlier one."""
    return [name for name in in_order(state.reports)
            if state.reports[name].get("closed", {}).get("iteration") == resume.next]


def _counted(report: Mapping[str, Any], iteration: int) -> int:
    """How many actions of ``iteration`` `resume.decide` has counted. One that has just begun another attempt has done
    none in that, though it has kept some."""
    return int(report["actions"] if report["iteration"] == iteration else report.get("earlier", 0))


def _by_worker(state: State) -> dict[str, list[Mapping[str, Any]]]:
    """The reports of each worker's parts, in order."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for name in in_order(state.reports):
        found.setdefault(str(Process.parse(name).worker), []).append(state.reports[name])
    return found


def _kept(report: Mapping[str, Any], iteration: int) -> Mapping[str, Any] | None:
    return next((kept for kept in report.get("kept", ()) if kept["iteration"] == iteration), None)
