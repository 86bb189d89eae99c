"""The policies: what a failure costs the iterations after it. Pure, like `machine`.

With `reroute` and `drop` every micro-batch is run by those who are left, as guests of peers or dealt to whole
pipelines. `rollback` and `lossy_forward` leave the micro-batches of hit pipelines out until their workers are
replaced: each of the others runs its own, and the mean is over what was summed. `lossy_forward` goes on with the
iteration in flight where it stood, `rollback` makes it again. With `restart` a failure ends this life of the job.

Where no pipeline is whole there is nobody to be left: the micro-batches are re-routed, whatever the policy, until one
is whole again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_recycle.membership.names import Process
from megatron_recycle.membership.state import Message, State

LEAVE_OUT = ("rollback", "lossy_forward")
"""Policies by which the micro-batches of hit pipelines are not run."""
_WHOLE = ("drop", *LEAVE_OUT)
"""Policies by which hit pipelines are not used."""


def policy(state: State) -> str:
    """The job's policy."""
    return str((state.description or {}).get("policy", "reroute"))


def hit(state: State) -> tuple[int, ...]:
    """Pipelines that have lost a worker, or a part of one."""
    return tuple(sorted({Process.parse(name).worker.pipeline for name in state.out}))


def some_whole(state: State) -> bool:
    """Whether some pipeline has all of its workers."""
    return len(hit(state)) < len(_microbatches(state.description))


def plan_by(state: State) -> str | None:
    """The policy that the next plan is made by; None: the job's, or there is no failure."""
    if not some_whole(state):  # also where recoveries with guests have failed: nobody could train otherwise
        return "reroute" if policy(state) in _WHOLE else None
    if state.fallback is not None or not state.out or policy(state) not in _WHOLE:
        return state.fallback
    return "drop"


def left_out(state: State) -> tuple[int, ...]:
    """Pipelines whose micro-batches this generation does not run."""
    return hit(state) if policy(state) in LEAVE_OUT and some_whole(state) else ()


def told(state: State, before: Message | None, iteration: int, now: float) -> tuple[dict[str, Any], ...]:
    """The event of pipelines that are left out from ``iteration`` on, where they are others than ``before``, in the
    last go: which ones, and how many micro-batches an iteration has less. Of none: all take part again."""
    pipelines = list(left_out(state))
    known: Any = [] if state.generation == 1 else None  # a coordinator that has come back tells it again
    if pipelines == (known if before is None else before.get("without")):
        return ()
    counts = _microbatches(state.description)
    return ({"event": "left_out", "t": now, "generation": state.generation, "iteration": iteration,
             "pipelines": pipelines, "microbatches": sum(counts[pipeline] for pipeline in pipelines)},)


def _microbatches(description: Mapping[str, Any] | None) -> list[int]:
    return list((description or {}).get("grid", {}).get("microbatches", ()))
