"""The planner's work beside the coordinator's event loop: each search in a thread, its result as an input."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from msgspec import structs

from megatron_recycle.membership.decisions import FindMoves, Improve, MakePlan, MakeRedo
from megatron_recycle.membership.description import Job
from megatron_recycle.membership.inputs import Improved, Input, MovesFound, PlanFailed, Planned, Redone
from megatron_recycle.membership.state import State
from megatron_recycle.plan.plan_file import PlanFile

Planner = Callable[[Job, "frozenset[str]"], PlanFile]
"""(job, failed) -> plan, at once; runs in a thread."""
Improver = Callable[[Job, "frozenset[str]", PlanFile, threading.Event], "PlanFile | None"]
"""(job, failed, plan, cancelled) -> a better plan or None; slow, runs in a thread."""
Redoer = Callable[[Job, MakeRedo], "PlanFile | None"]
"""(job, order) -> a plan that begins with the finished actions, or None, at once; runs in a thread."""
Mover = Callable[[Job, "frozenset[str]"], "dict[str, str]"]
"""(job, failed) -> by member, the empty position that it should take; runs in a thread."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plans:
    """The planner's functions that a coordinator uses. Without `improve` there is no search for better plans, without
    `moves` no healthy worker changes its stage, without `redo` an interrupted iteration begins anew."""

    plan: Planner
    improve: Improver | None = None
    moves: Mover | None = None
    redo: Redoer | None = None


def make_plan(plans: Plans, job: Job, order: MakePlan) -> Input:
    """The plan of a new generation, or the reason why there is none."""
    began = time.monotonic()
    if order.policy is not None:
        job = structs.replace(job, policy=order.policy)
    try:
        plan = plans.plan(job, order.failed)
    except Exception as error:  # on any planner error the job must hear of it instead of waiting
        log.exception("recycle: planning failed")
        return PlanFailed(order.generation, str(error) or type(error).__name__)
    return Planned(order.generation, plan, (time.monotonic() - began) * 1000)


def make_redo(plans: Plans, job: Job, order: MakeRedo) -> Input:
    """The plans for the rest of an interrupted iteration, and of the one after it, if there are any."""
    plan = _rest(plans, job, order)
    return Redone(order.generation, plan, None if plan is None else _rest(plans, job, order.ahead))


def _rest(plans: Plans, job: Job, order: MakeRedo | None) -> PlanFile | None:
    try:
        return None if plans.redo is None or order is None else plans.redo(job, order)
    except Exception:  # the iteration can always begin anew
        log.exception("recycle: planning the rest of an iteration failed")
        return None


def improve(plans: Plans, job: Job, order: Improve, cancelled: threading.Event) -> Input | None:
    """A better plan, if one was found before the search was ``cancelled``."""
    began = time.monotonic()
    try:
        plan = plans.improve and plans.improve(job, order.failed, order.plan, cancelled)
    except Exception:  # the plan in use is legal; a failed search costs only speed
        log.exception("recycle: the search for a better plan failed")
        return None
    if plan is None or cancelled.is_set():
        return None
    return Improved(order.generation, plan, (time.monotonic() - began) * 1000)


def find_moves(plans: Plans, job: Job, order: FindMoves) -> Input | None:
    """The moves that pay off, if there are any."""
    try:
        found = plans.moves and plans.moves(job, order.failed)
    except Exception:  # all workers train where they are
        log.exception("recycle: the search for moves failed")
        return None
    return MovesFound(order.generation, found or dict(order.wanted)) if found or order.wanted else None


class Searches:
    """Searches in threads; one at a time for a better plan. A search for an earlier membership is cancelled; one with
    outdated costs runs to its end: with frequent changes none would ever end otherwise."""

    def __init__(self, plans: Plans, feed: Callable[[Input], None], state: Callable[[], State]) -> None:
        self._plans = plans
        self._feed = feed
        self._state = state
        self._cancelled = threading.Event()
        self._under_way: Improve | None = None
        self._again: Improve | None = None
        """The search to run after the present one."""

    def cancel(self) -> None:
        """The search for a better plan ends soon, without a result."""
        self._cancelled.set()
        self._cancelled = threading.Event()
        self._under_way = self._again = None

    def make_plan(self, order: MakePlan) -> None:
        """All workers wait for it: if no thread can be started, it runs in the event loop instead."""
        job = self._state().job
        self._in_thread("recycle-plan", lambda: make_plan(self._plans, job, order), needed=True)

    def make_redo(self, order: MakeRedo) -> None:
        """All workers wait for it, as for `make_plan`."""
        job = self._state().job
        self._in_thread("recycle-redo", lambda: make_redo(self._plans, job, order), needed=True)

    def improve(self, order: Improve) -> None:
        if self._plans.improve is None:
            return
        if self._under_way is not None and self._under_way.generation == order.generation:
            self._again = order
            return
        self.cancel()
        self._under_way = order
        job, cancelled = self._state().job, self._cancelled
        self._in_thread("recycle-improve", lambda: improve(self._plans, job, order, cancelled),
                        ended=lambda: self._improved(cancelled))

    def _improved(self, cancelled: threading.Event) -> None:
        """A search has ended: if it was the last one, the search requested meanwhile comes next, from the plan now in
        force or on offer."""
        if cancelled is not self._cancelled:
            return
        again, state, self._under_way, self._again = self._again, self._state(), None, None
        if again is not None and state.generation == again.generation and state.round.plan is not None:
            self.improve(replace(again, plan=state.latest or state.round.plan))

    def find_moves(self, order: FindMoves) -> None:
        if self._plans.moves is not None:
            job = self._state().job
            self._in_thread("recycle-moves", lambda: find_moves(self._plans, job, order))

    def _in_thread(self, name: str, work: Callable[[], Input | None], needed: bool = False,
                   ended: Callable[[], None] | None = None) -> None:
        """Run `work` beside the running event loop and feed its result, then call `ended` there. A daemon thread: it
        must not delay the end."""
        loop = asyncio.get_running_loop()

        def tell(happened: Input | None) -> None:
            if happened is not None:
                self._feed(happened)
            if ended is not None:
                ended()

        def run() -> None:
            happened = work()
            if (happened is not None or ended is not None) and not loop.is_closed():
                loop.call_soon_threadsafe(tell, happened)

        try:
            threading.Thread(target=run, name=name, daemon=True).start()
        except RuntimeError:  # no more threads on this machine
            log.exception("recycle: no thread for %s", name)
            if needed:
                loop.call_soon(run)
            elif ended is not None:
                loop.call_soon(ended)
