"""A job's state as numbers for its curves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from megatron_recycle.backends.scalars import Scalars
from tests.observe.plans import simple_plan


def test_a_lost_worker_shows_in_every_number() -> None:
    plan, now = simple_plan(2, 2, 3), [10.0]
    names = plan.problem.grid.workers()
    worker = SimpleNamespace(plan=plan, standing=SimpleNamespace(epoch=SimpleNamespace(generation=1)))

    def live() -> Any:
        return worker.plan.problem.live_workers()

    session = SimpleNamespace(live=live, place=SimpleNamespace(ranks=dict.fromkeys(names, (0,))), worker=worker)
    scalars = Scalars(cast(Any, session), lambda: now[0])
    assert scalars() == {"Recycle/live_workers": 4.0, "Recycle/lost_workers": 0.0, "Recycle/rerouted": 0.0,
                         "Recycle/generation": 1.0}
    worker.plan = simple_plan(2, 2, 3, failed=("1:0",))
    worker.standing.epoch.generation = 2
    now[0] = 12.5
    assert scalars() == {"Recycle/live_workers": 3.0, "Recycle/lost_workers": 1.0, "Recycle/rerouted": 3.0,
                         "Recycle/generation": 2.0, "Recycle/iteration_seconds": 2.5}
