"""All policies by name, and several of them through the same traces, with the two marks for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_recycle.tools.simulate.cluster import Cluster, changes, most_live
from megatron_recycle.tools.simulate.job import Job
from megatron_recycle.tools.simulate.plans import Plans
from megatron_recycle.tools.simulate.policies.bamboo import Bamboo
from megatron_recycle.tools.simulate.policies.base import Policy, Setting
from megatron_recycle.tools.simulate.policies.oobleck import Oobleck
from megatron_recycle.tools.simulate.policies.others import (
    ElasticBatch,
    FaultScaled,
    Ideal,
    MovedLayers,
    ReCycle,
    TorchFT,
)
from megatron_recycle.tools.simulate.policies.recycling import (
    CheckpointRestart,
    Dropping,
    LentAndMoves,
    LentLayers,
    LossyForward,
    Recycling,
    RollBack,
    Stalls,
    WithoutMoves,
)
from megatron_recycle.tools.simulate.report import Row
from megatron_recycle.tools.simulate.run import Outcome, simulate
from megatron_recycle.tools.simulate.trace import Trace, TraceError

_POLICIES: tuple[Any, ...] = (
    Recycling, WithoutMoves, LentAndMoves, LentLayers, ReCycle, MovedLayers, Dropping, TorchFT, RollBack, LossyForward,
    Bamboo, Oobleck, ElasticBatch, CheckpointRestart, FaultScaled, Ideal)
"""All policies, in the order of tables."""
_WITHOUT_OURS = (Bamboo, Oobleck, FaultScaled, Ideal)
"""Policies with stalls of their own, or none."""
ORDER = tuple(made.name for made in _POLICIES)
"""Their names."""
USUAL = ("ours", "lent-and-moves", "recycle-published", "oobleck", "bamboo", "torchft", "checkpoint-restart",
         "fault-scaled", "fault-free")
"""The default comparison."""
Progress = Callable[[str, int, float], None]
"""(policy, number of the trace, share of it)."""


def makers(names: Iterable[str], stalls: Stalls) -> dict[str, Callable[[], Policy]]:
    """A maker of each of these policies, with our own stalls. Raises TraceError for an unknown name."""
    known: dict[str, Callable[[], Policy]] = {made.name: partial(made, stalls) for made in _POLICIES}
    known |= {made.name: made for made in _WITHOUT_OURS}
    wanted = [*dict.fromkeys(names)]
    for name in wanted:
        if name not in known:
            raise TraceError(f"no policy {name!r}; there are {', '.join(ORDER)}, and all")
    return {name: known[name] for name in sorted(wanted, key=ORDER.index)}


def compare(policies: Mapping[str, Callable[[], Policy]], job: Job, cluster: Cluster, traces: Sequence[Trace], *,
            technique: str = "staggered", shapes: str = "auto", work: int | None = None,
            progress: Progress = lambda name, number, share: None) -> tuple[list[Row], tuple[str, ...]]:
    """A row for each policy, and, in sentences, the omissions from the traces and the policies' remarks.

    Plans of a policy are kept from one trace to the next. Raises TraceError if the job does not fit the cluster.
    """
    cluster.slots(job.pipelines, job.stages)
    notes: dict[str, None] = {}
    found: dict[str, list[Outcome]] = {name: [] for name in policies}
    remarks: dict[str, list[str]] = {}
    free: list[float] = []
    scaled: list[float] = []
    plans = {name: Plans(job, technique, shapes, work) for name in policies}
    marks = Plans(job, technique, shapes, work)
    for number, trace in enumerate(traces):
        happened, omissions = changes(trace, cluster)
        notes.update(dict.fromkeys((*trace.cleaned, *omissions)))
        at_start = {unit for change in happened if change.at == 0 for unit in change.lost}
        units = [unit for unit in cluster.units() if unit not in at_start]
        mtbf = trace.duration / max(1, sum(bool(change.lost) and change.at > 0 for change in happened))
        one = Setting(job, cluster, marks, units, mtbf, most_live(happened, cluster) >= job.size)
        free.append(simulate(Ideal(), one, happened, trace.duration).throughput)
        scaled.append(simulate(FaultScaled(), one, happened, trace.duration).throughput)
        for name, make in policies.items():
            setting = replace(one, plans=plans[name])
            found[name].append(simulate(make(), setting, happened, trace.duration, partial(progress, name, number)))
    for name, outcomes in found.items():
        for text in dict.fromkeys(text for outcome in outcomes for text in outcome.said):
            remarks.setdefault(text, []).append(name)
    notes.update(dict.fromkeys(f"{', '.join(names)}: {text}" for text, names in remarks.items()))
    return [Row(name, outcomes, free, scaled) for name, outcomes in found.items()], tuple(notes)
