"""Published systems that differ from ours in a rule or two; and marks for comparison: training without failures, and
throughput in proportion to the live units."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from megatron_recycle.plan import Worker
from megatron_recycle.tools.simulate.cluster import Change, Slots
from megatron_recycle.tools.simulate.plans import Figures
from megatron_recycle.tools.simulate.policies.base import STANDS, Answer, Cause, Course, Policy, Setting
from megatron_recycle.tools.simulate.policies.recycling import CheckpointRestart, Recycling, Stalls


class ReCycle(Recycling):
    """Gandhi et al., "ReCycle: Resilient training of large DNNs using pipeline adaptation", SOSP 2024 (arXiv
    2405.14009).

    Re-routing, decoupled backward, staggered step and normalising moves as published, without our alignment of failures
    over pipelines; the iteration in flight is begun anew. Schedules are our list scheduler's, not its MILP's. Its
    stalls are not published as constants: ours are taken, so that only the plan differs.
    """

    name = "recycle-published"
    again = "all"

    def _figures(self, policy: str, failed: list[Worker]) -> Figures:
        if self.dealt is not None:
            return super()._figures(policy, failed)
        return self.setting.plans.natural(failed)


class MovedLayers(Recycling):
    """Layers change their stage for good: ElasWave (Kang et al., arXiv 2510.00606, 2025) and ResiHP.

    After each change of the membership the layers are dealt to the stages anew, so that the fullest worker has least
    work: with n workers of a stage and T micro-batches, ceil(T / n) times its layers (a minimax over whole layers,
    alike in all pipelines). Micro-batches are re-routed as ours are, by our planner. ElasWave's own figure for new
    communicators is one second, which is added to our stalls; layers are copied while training goes on (its claim).
    """

    name = "moved-layers"
    communicators: ClassVar[float] = 1.0

    def __init__(self, stalls: Stalls | None = None) -> None:
        given = stalls or Stalls()
        more = {name: getattr(given, name) + self.communicators for name in ("exit", "host", "rejoin")}
        super().__init__(replace(given, **more))

    def _figures(self, policy: str, failed: list[Worker]) -> Figures:
        job = self.setting.job
        if self.dealt is not None:
            return super()._figures(policy, failed)
        lost = [sum(worker.stage == stage for worker in failed) for stage in range(job.stages)]
        loads = [-(-job.pipelines * job.microbatches // (job.pipelines - count)) for count in lost]
        shares = recut(loads, job.all_layers)
        usual = self.setting.plans.rerouted(failed)
        if len(set(shares)) == 1:
            return usual
        return min(usual, self.setting.plans.recut(shares, job.layers, tuple(lost)), key=lambda one: one.period)


def recut(loads: list[int], layers: int) -> tuple[int, ...]:
    """Layers of each stage, at least one, so that the largest load times layers is least."""
    def most(limit: int) -> list[int]:
        return [limit // load for load in loads]

    limit = next(bound for bound in sorted({load * count for load in loads for count in range(1, layers + 1)})
                 if min(most(bound)) >= 1 and sum(most(bound)) >= layers)
    shares = most(limit)
    while sum(shares) > layers:  # the fullest gives
        fullest = max((stage for stage in range(len(loads)) if shares[stage] > 1),
                      key=lambda stage: (shares[stage] * loads[stage], stage))
        shares[fullest] -= 1
    return tuple(shares)


class ElasticBatch(CheckpointRestart):
    """TorchElastic's restart: after every failure all processes start from the last checkpoint, with as many whole
    pipelines as there are workers for, each with its usual micro-batches, so that the global batch is smaller."""

    name = "elastic-batch"
    same_batch = False


class TorchFT(Policy):
    """torchft (meta-pytorch/torchft): a pipeline is a replica group, which is out as long as one of its workers is.

    The others throw the iteration in flight away, agree on a new quorum and go on with their own micro-batches: the
    batch is smaller meanwhile. ``stall``: 1.07 s, measured with torchft 0.2.0 (`scripts/bench/others.py`: its
    lighthouse gives a group up after 1 s there, after 5 s by default; `scripts/bench/validate_torchft.py` compares). A
    group that is whole again copies the state from a peer while the others wait. Without any whole group training goes
    back to the last checkpoint.
    """

    name = "torchft"
    stall: ClassVar[float] = 1.07

    def __init__(self, stalls: Stalls | None = None) -> None:
        self.stalls = stalls or Stalls()
        self.save_takes, self.save_every = self.stalls.save, self.stalls.save_every
        self._empty: set[Worker] = set()
        self._whole = 0

    def begin(self, setting: Setting) -> Answer:
        self.setting = setting
        usual, present = setting.cluster.slots(setting.job.pipelines, setting.job.stages), set(setting.units)
        self.slots = Slots({worker: unit for worker, unit in usual.items() if unit in present},
                           present - set(usual.values()))
        self._empty = {worker for worker, unit in usual.items() if unit not in present}
        self._empty -= self.slots.fill(sorted(self._empty)).keys()
        self._whole = self._count()
        return Answer(self._course())

    def changed(self, change: Change, iteration: int) -> Answer:
        lost = self.slots.lose(change.lost)
        self._empty |= set(lost)
        self.slots.gain(change.gained)
        came = self.slots.fill(sorted(self._empty))
        wakes = ((self.stalls.start, tuple(came)),) if came else ()
        before, self._whole = self._whole, self._count()
        if not lost or before == self._whole:
            return Answer(wakes=wakes, survived=int(bool(lost)))
        if not self._whole:
            return Answer(STANDS, back=True, fatal=True, wakes=wakes)
        return Answer(self._course(), ((Cause.RECOVERY, self.stall),), again=1.0, survived=1, wakes=wakes)

    def woken(self, now: float, token: object, iteration: int) -> Answer:
        if isinstance(token, tuple):
            self._empty -= {worker for worker in token if self.slots.unit(worker) is not None}
            if self._count() == self._whole:
                return Answer()
            if not self._whole:
                self._whole = self._count()
                return Answer(self._course(), ((Cause.RESTART, self.stalls.restart),))
            return Answer(boundary=True)
        if (whole := self._count()) <= self._whole:
            return Answer()
        self._whole = whole
        return Answer(self._course(), ((Cause.REJOIN, self.stall + self.setting.job.state_seconds),))

    def _count(self) -> int:
        """Whole pipelines."""
        return self.setting.job.pipelines - len({worker.pipeline for worker in self._empty})

    def _course(self) -> Course:
        job = self.setting.job
        if not self._whole:
            return STANDS
        return Course.of(self.setting.plans.stock(), self._whole * job.microbatches * job.samples)


# Marks for comparison


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
