"""A small job, cluster and setting for the simulator's tests."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_recycle.plan import Costs
from megatron_recycle.tools.simulate.cluster import Cluster, changes
from megatron_recycle.tools.simulate.job import Job
from megatron_recycle.tools.simulate.plans import Plans
from megatron_recycle.tools.simulate.policies.base import Policy, Setting
from megatron_recycle.tools.simulate.run import Outcome, simulate
from megatron_recycle.tools.simulate.trace import Outage, Trace

JOB = Job(3, 2, 4, Costs.uniform(2, 20, 22, 18, 1, 5), unit=0.01)
CLUSTER = Cluster(6, 1)
PLANS = Plans(JOB, work=0)
"""Kept over all tests: plans do not depend on anything else."""


def trace(*outages: Outage, duration: float = 3600.0, hosts: int = 6) -> Trace:
    return Trace(tuple(f"host{number}" for number in range(hosts)), tuple(sorted(outages)), duration)


def run(policy: Policy, given: Trace, cluster: Cluster = CLUSTER, commits: bool = False, job: Job = JOB) -> Outcome:
    happened, _ = changes(given, cluster)
    gone = {unit for change in happened if change.at == 0 for unit in change.lost}
    units = [unit for unit in cluster.units() if unit not in gone]
    plans = PLANS if job is JOB else Plans(job, work=0)
    mtbf = given.duration / given.failures if given.failures else float("inf")
    return simulate(policy, Setting(job, cluster, plans, units, mtbf), happened, given.duration, commits=commits)


def total(outcome: Outcome, causes: Sequence[str] = ()) -> float:
    """Seconds that were accounted for."""
    return sum(seconds for cause, seconds in outcome.spent.items() if not causes or cause in causes)
