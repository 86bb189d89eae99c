"""A worker's measured durations for the planner: a few numbers of every iteration, once it is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from megatron_recycle.environment import Launched
from megatron_recycle.membership.protocol import Lags
from megatron_recycle.runtime.activity import ACTIONS
from megatron_recycle.runtime.generation import Generation
from megatron_recycle.runtime.memory_budget import announce_profile, profile
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.spans import FOLDER

_FIRST, _EVERY = 4, 25
"""Commits until durations are reported for the first time (then after each), and between reports of memory."""
_LAGS_EVERY = 5
"""Iterations between reports of the times of messages; all before the first report are in it."""


class Profiling:
    """Reports one worker's durations to the coordinator."""

    def __init__(self) -> None:
        self._commits = 0
        launched = Launched.read()
        self._file = None if launched.run_dir is None else (
            Path(launched.run_dir) / FOLDER / f"worker-{launched.rank}.jsonl")
        self._unsent: list[dict[str, float]] = []
        self._lags: list[Lags] = []

    def committed(self, site: Site, generation: Generation, iteration: int, undo: int) -> None:
        """``iteration``, trained in ``generation`` or before it, is final; ``undo``: bytes of the copy to undo a
        step."""
        self._commits += 1
        site.phases.activity.spans.committed(iteration, site.agent.worker, self._file)
        taken = site.meters.watch.take()
        medians = {kind: round(median(seconds), 7) for kind, seconds in taken.items()}
        medians.update(_spent(site.phases.activity.spent(), taken, medians, site.meters.watch.more,
                              generation.groups.world.backend.host))
        if self._commits > 1:  # the first has costs that come once: memory, threads, caches
            self._unsent.append(medians)
            if self._commits <= _FIRST or iteration % _LAGS_EVERY == 0:
                lags = generation.transport.lags.told(iteration)
                self._lags += [] if lags is None else [Lags(*lags)]
        if self._commits < _FIRST:
            return
        found = profile(site, generation, undo) if self._commits == _FIRST or self._commits % _EVERY == 0 else None
        site.agent.measured(self._unsent, self._lags, None if found is None else found.told())
        self._unsent, self._lags = [], []
        if self._commits > _FIRST or found is None:
            return
        if generation.plan.problem.live(site.place.me.stage)[0] == site.place.me:
            announce_profile(site.place.me, found)


def _spent(parts: Mapping[str, float], taken: Mapping[str, Sequence[float]], medians: Mapping[str, float],
           more: float, host: bool) -> dict[str, float]:
    """The thread's time by part, in seconds, and on the ``host`` also ``gap``: the excess of an action, with the time
    between two of them, over the median of its kind.

    Args:
        parts: `Activity.spent`.
        taken, medians: durations of the actions themselves, by kind (and chunk), with the stage's own layers.
        more: additional time of these, for layers of other stages.
        host: whether they compute there; elsewhere the thread only launches them, and is ahead of the device.
    """
    found = dict(parts)
    kinds = [kind for kind in taken if kind.partition("/")[0] in ("F", "B", "W")]
    actions = [seconds for kind in kinds for seconds in taken[kind]]
    if actions and host:
        whole = found.get(ACTIONS, 0.0) - more
        usual = sum(len(taken[kind]) * medians[kind] for kind in kinds)
        between = found["between"] = max(0.0, whole - sum(actions))
        found[ACTIONS] = whole + more - between
        found["gap"] = max(0.0, whole - usual) / len(actions)
    return {name: round(seconds, 7) for name, seconds in found.items()}
