"""Marks for comparison: training without failures, and throughput in proportion to the live units."""

from __future__ import annotations

from megatron_recycle.tools.simulate.cluster import Change
from megatron_recycle.tools.simulate.policies.base import STANDS, Answer, Course, Policy, Setting


class Ideal(Policy):
    """Stock 1F1B on the whole grid, whatever fails. Throughputs are given relative to it."""

    name = "fault-free"

    def begin(self, setting: Setting) -> Answer:
        return Answer(Course.of(setting.plans.stock(), setting.job.batch))


class FaultScaled(Ideal):
    """Stock 1F1B, slower in proportion to the lost units, without any stall: a perfect system without idle time to
    use."""

    name = "fault-scaled"

    def begin(self, setting: Setting) -> Answer:
        self.live = len(setting.units)
        self.setting = setting
        return Answer(self._course())

    def changed(self, change: Change, iteration: int) -> Answer:
        self.live += len(change.gained) - len(change.lost)
        return Answer(self._course())

    def _course(self) -> Course:
        job = self.setting.job
        live = min(self.live, job.size)
        if not live:
            return STANDS
        seconds = self.setting.plans.stock().period * job.size / live
        return Course(seconds, seconds, job.batch)
