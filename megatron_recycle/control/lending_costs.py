"""Lent layers as the coordinator plans them: the problem in which layers may be lent, and the price of copies."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_recycle.measure.measurements import Measured
from megatron_recycle.membership.description import Job, Lending
from megatron_recycle.plan import Costs, Problem
from megatron_recycle.planner import CopyPrice

_UNITS = 8
"""Units of memory in a micro-batch where its bytes are not known, so that a layer's share of it can be said."""
_ROUNDING = 0.05
"""Most by which a layer's cost may be wrong, being a whole number."""
_BANDWIDTH = 1e9
"""Bytes per second where no message has been timed."""


def with_lending(problem: Problem, job: Job, measured: Measured | None) -> Problem:
    """The problem, where the job's layers may be lent besides. As it is while the costs of a stage are not known.

    The job's ``lending`` is `membership.lendable`'s. A layer takes its share of its stage's time and memory. Its
    parameters weigh on a helper's memory with as much again for their gradients. Costs that the user gives may be so
    small that a layer's would round to nothing: then all durations are in a `finer` unit than his. The whole iteration
    counts, since no worker leaves one with lent layers before all have committed it.
    """
    told = job.lending
    if not told or (measured is None and not job.costs):
        return problem
    shares = told.share
    costs, times = problem.costs, finer(job)
    forward, backward, weight, step = (tuple(times * cost for cost in each) for each in (
        costs.forward, costs.backward_input, costs.backward_weight, costs.step))
    layer = tuple((round(f * share), round(b * share), round(w * share)) for f, b, w, share in zip(
        forward, backward, weight, shares))
    costs = replace(costs, forward=forward, backward_input=backward, backward_weight=weight, step=step,
                    hop=times * costs.hop)
    before, after, cap, message = problem.before_b, problem.after_b, problem.cap, problem.message
    parameters: tuple[int, ...] = ()
    if measured is not None and measured.memory is not None and not job.cap:
        unit = max(1, -(-max(*measured.held("before_b"), *measured.held("after_b")) // _UNITS))  # as measure.caps
        parameters = tuple(-(-2 * size // unit) for size in told.bytes)
    else:
        before, after, message = (tuple(units * _UNITS for units in each) for each in (before, after, message))
        cap = {worker: units * _UNITS for worker, units in cap.items()}
    lag = round(times * _lag(told, measured) / unit_of(job, measured))
    return replace(
        problem, costs=replace(costs, layer=layer, lent=(lag, lag)), before_b=before, after_b=after, cap=cap,
        message=message, layers=told.layers, lend=told.lend,
        layer_held=tuple((math.ceil(b * share), math.ceil(a * share)) for b, a, share in zip(before, after, shares)),
        layer_parameters=parameters, objective="makespan")


def copy_price(job: Job, measured: Measured | None) -> CopyPrice:
    """What copies of lent layers cost in this job."""
    told = job.lending or Lending((), (), (), ())
    return CopyPrice([*told.bytes], _bandwidth(told, measured) or _BANDWIDTH, job.horizon,
                     1e-6 * unit_of(job, measured) / finer(job))


def finer(job: Job) -> int:
    """How many units of a problem with lending are one of the costs that the user gives: 1, or more where a layer's
    share of them is not near a whole number."""
    given, told = job.costs, job.lending
    if not given or not told:
        return 1
    costs = Costs.from_json(given)
    shares = [cost * share for each in (costs.forward, costs.backward_input, costs.backward_weight)
              for cost, share in zip(each, told.share) if cost and share]
    if all(abs(round(x) - x) <= _ROUNDING * x for x in shares):
        return 1
    return math.ceil(0.5 / _ROUNDING / min(shares))


def unit_of(job: Job, measured: Measured | None) -> float:
    """Microseconds in a unit of the plans' durations: 1 where these are measured. Costs that the user gives are in a
    unit of his own, which is known by what the same work was measured to take."""
    given = job.costs
    if not given or measured is None:
        return 1.0
    work, took = (sum(sum(each) for each in (costs.forward, costs.backward_input, costs.backward_weight))
                  for costs in (Costs.from_json(given), measured.costs))
    return took / work if took and work else 1.0


def _bandwidth(told: Lending, measured: Measured | None) -> float | None:
    """Bytes per second between workers, at least; None if nothing has been timed.

    Messages of activations are timed, and may be so small that they tell the latency alone; the gradients of a stage,
    which its peers add up in its step, are longer.
    """
    if measured is None:
        return None
    sent = max(measured.held("message"), default=0)
    timed = [(sent, measured.costs.hop)]
    if len(told.bytes) == len(measured.costs.step):  # of chunks that share a stage's step nothing is taken
        timed += [(size * count, step) for size, count, step in zip(
            told.bytes, told.layers, measured.costs.step)]
    return max((1e6 * size / took for size, took in timed if size and took), default=None)


def _lag(told: Lending, measured: Measured | None) -> int:
    """Microseconds that the parameters of the layers lent at one boundary take to a helper, or their gradients back."""
    most = max((max(earlier * own, later * other) for (earlier, later), own, other in zip(
        told.lend, told.bytes, told.bytes[1:])), default=0)
    bandwidth = _bandwidth(told, measured)
    if measured is None or bandwidth is None:
        return 0
    return max(measured.costs.hop, round(1e6 * most / bandwidth))
