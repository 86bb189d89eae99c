"""Oobleck: pipelines of different lengths from templates, one for each number of nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_recycle.tools.simulate.cluster import Change, Unit
from megatron_recycle.tools.simulate.policies.base import NEVER, STANDS, Answer, Cause, Course, Policy, Setting

PLANNED = 8
"""Numbers of pipelines that are planned, the most promising ones."""


@dataclass(frozen=True)
class OobleckConstants:
    """``meeting``: seconds to take the groups apart and to build new ones. The paper gives no single number; 15 s is
    from a public simulation of it (ETOgaosion/BambooSimulator), beside Bamboo's 20. Copies of layers come on top.
    ``least``: share of the usual stages that the shortest template has; half of them is generous, since such a node
    holds twice the layers. ``faults``: f, of which f + 1 pipelines are kept. ``restart``: after a fatal failure."""

    meeting: float = 15.0
    least: float = 0.5
    faults: int = 1
    restart: float = 300.0
    save: float = 30.0
    save_every: float = 3600.0


class Oobleck(Policy):
    """Jang et al., "Oobleck: Resilient distributed training of large models using pipeline templates", SOSP 2023.

    All live units work: they form pipelines of n0, n0 + 1, ... units, each with its layers as even as possible, and
    micro-batches are dealt so that all end together (of the possible numbers of pipelines the fastest; lengths differ
    by at most one). 1F1B, the global batch is kept, the iteration in flight is lost. Fatal: all copies of a layer are
    lost at once, or fewer than (f + 1) n0 units are left.
    """

    name = "oobleck"

    def __init__(self, constants: OobleckConstants | None = None) -> None:
        self.constants = constants or OobleckConstants()
        self.save_takes = self.constants.save
        self.save_every = self.constants.save_every if self.save_takes else NEVER
        self._units: dict[Unit, tuple[int, int, int]] = {}  # pipeline, position, length
        self._fresh: dict[Unit, None] = {}
        self._lengths: tuple[int, ...] = ()

    def begin(self, setting: Setting) -> Answer:
        self.setting = setting
        self.least = max(1, -(-int(setting.job.stages * self.constants.least * 100) // 100))
        self._place(setting.units)
        return Answer(self._course())

    def changed(self, change: Change, iteration: int) -> Answer:
        lost = {unit: self._units.pop(unit) for unit in change.lost if unit in self._units}
        for unit in change.lost:
            self._fresh.pop(unit, None)
        self._fresh.update(dict.fromkeys(change.gained))
        if not lost and self._lengths:
            return Answer(boundary=bool(change.gained))
        fatal = self._all_copies(lost.values())
        self._place([*self._units, *self._fresh])
        restart = ((Cause.RESTART, self.constants.restart),)
        if not lost:
            return Answer(self._course(), restart) if self._lengths else Answer()
        if not self._lengths:
            return Answer(STANDS, back=True, fatal=True)
        if fatal:
            return Answer(self._course(), restart, back=True, fatal=True)
        return Answer(self._course(), ((Cause.RECONFIGURE, self._meeting()),), again=1.0, survived=1)

    def woken(self, now: float, token: object, iteration: int) -> Answer:
        if not self._fresh or not self._lengths:
            return Answer()
        self._place([*self._units, *self._fresh])
        return Answer(self._course(), ((Cause.RECONFIGURE, self._meeting()),))

    def _meeting(self) -> float:
        return self.constants.meeting + self.setting.job.state_seconds

    def _all_copies(self, lost: Iterable[tuple[int, int, int]]) -> bool:
        """Whether every pipeline has lost the same layer."""
        layers = self.setting.job.all_layers
        gone: dict[int, set[int]] = {}
        for pipeline, position, length in lost:
            cuts = [layers * part // length for part in (position, position + 1)]
            gone.setdefault(pipeline, set()).update(range(*cuts))
        return 0 < len(gone) == len(self._lengths) and bool(set.intersection(*gone.values()))

    def _place(self, units: Iterable[Unit]) -> None:
        ordered = sorted(units)
        self._lengths = self._template(min(len(ordered), self.setting.job.size))
        self._units, self._fresh = {}, {}
        left = iter(ordered)
        for pipeline, length in enumerate(self._lengths):
            for position in range(length):
                self._units[next(left)] = pipeline, position, length
        self._units.update(dict.fromkeys(left, (-1, 0, 1)))

    def _template(self, count: int) -> tuple[int, ...]:
        """Lengths of the fastest pipelines for so many units; () if there are too few."""
        job = self.setting.job
        longest = min(job.all_layers, 2 * job.stages)
        few, many = self.constants.faults + 1, min(count // self.least, job.pipelines * job.microbatches)
        found = []
        for pipelines in range(max(1, min(few, job.pipelines)), many + 1):
            each, more = divmod(count, pipelines)
            if each + bool(more) <= longest:
                found.append(tuple(each + (number < more) for number in range(pipelines)))
        likely = sorted(found, key=self._about)[:PLANNED]
        return min(likely, key=self._seconds, default=())

    def _about(self, lengths: tuple[int, ...]) -> int:
        """Layers that the slowest pipeline runs one after the other, a measure of its time."""
        deal = self._dealt(lengths)
        return max((count + length - 1) * -(-self.setting.job.all_layers // length) for length, count in deal.items())

    def _seconds(self, lengths: tuple[int, ...]) -> float:
        """Seconds of an iteration of such pipelines."""
        return max(self.setting.plans.template(length, count) for length, count in self._dealt(lengths).items())

    def _dealt(self, lengths: tuple[int, ...]) -> dict[int, int]:
        """The micro-batches of a pipeline by its length, so that all end about together."""
        job = self.setting.job
        pace = {length: -(-job.all_layers // length) for length in lengths}
        rate = {length: 1 / pace[length] for length in pace}
        total = job.pipelines * job.microbatches
        speed = sum(rate[length] for length in lengths)
        fill = sum(rate[length] * (length - 1) * pace[length] for length in lengths) / speed
        limit = (total / speed + fill)
        deal = {length: max(1, round(limit / pace[length]) - length + 1) for length in pace}
        while sum(deal[length] for length in lengths) < total:
            deal[min(deal, key=lambda length: (deal[length] + length) * pace[length])] += 1
        return deal

    def _course(self) -> Course:
        if not self._lengths:
            return STANDS
        seconds = self._seconds(self._lengths)
        return Course(seconds, seconds, self.setting.job.batch)
