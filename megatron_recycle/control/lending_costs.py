"""Planning of lent layers in the coordinator: the problem with lendable layers, and the price of copies."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_recycle.measure.measurements import Measured
from megatron_recycle.membership.description import Job, Lending
from megatron_recycle.plan import Costs, Problem
from megatron_recycle.planner import CopyPrice

_UNITS = 8
"""Units of memory in a micro-batch where its bytes are unknown, fine enough for a layer's share."""
_ROUNDING = 0.05
"""Limit of the relative rounding error of a layer's cost, a whole number."""
_BANDWIDTH = 1e9
"""Default bytes per second, before any message has been timed."""


def with_lending(problem: Problem, job: Job, measured: Measured | None) -> Problem:
    """The problem, with the job's lendable layers; unchanged while the costs of a stage are unknown.

    The job's ``lending`` is `membership.lendable`'s. A layer takes its share of its stage's time and memory. On a
    helper its parameters take memory, and its gradients as much again. If the user's costs are so small that a layer's
    would round to nothing, all durations are in a `finer` unit. The whole iteration counts, since no worker leaves an
    iteration with lent layers before all have committed it.
    """
    lending = job.lending
    if not lending or (measured is None and not job.costs):
        return problem
    shares = lending.share
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
        parameters = tuple(-(-2 * size // unit) for size in lending.bytes)
    else:
        before, after, message = (tuple(units * _UNITS for units in each) for each in (before, after, message))
        cap = {worker: units * _UNITS for worker, units in cap.items()}
    lag = round(times * _lag(lending, measured) / unit_of(job, measured))
    return replace(
        problem, costs=replace(costs, layer=layer, lent=(lag, lag)), before_b=before, after_b=after, cap=cap,
        message=message, layers=lending.layers, lend=lending.lend,
        layer_held=tuple((math.ceil(b * share), math.ceil(a * share)) for b, a, share in zip(before, after, shares)),
        layer_parameters=parameters, objective="makespan")


def copy_price(job: Job, measured: Measured | None) -> CopyPrice:
    """The price of copies of lent layers in this job."""
    lending = job.lending or Lending((), (), (), ())
    return CopyPrice([*lending.bytes], _bandwidth(lending, measured) or _BANDWIDTH, job.horizon,
                     1e-6 * unit_of(job, measured) / finer(job))


def finer(job: Job) -> int:
    """Units of a problem with lending per unit of the user's costs: 1, or more where a layer's share of them is not
    near a whole number."""
    given, lending = job.costs, job.lending
    if not given or not lending:
        return 1
    costs = Costs.from_json(given)
    shares = [cost * share for each in (costs.forward, costs.backward_input, costs.backward_weight)
              for cost, share in zip(each, lending.share) if cost and share]
    if all(abs(round(x) - x) <= _ROUNDING * x for x in shares):
        return 1
    return math.ceil(0.5 / _ROUNDING / min(shares))


def unit_of(job: Job, measured: Measured | None) -> float:
    """Microseconds in a unit of the plans' durations: 1 where these are measured. The user's costs are in a unit of
    their own, which follows from the measured time of the same work."""
    given = job.costs
    if not given or measured is None:
        return 1.0
    work, took = (sum(sum(each) for each in (costs.forward, costs.backward_input, costs.backward_weight))
                  for costs in (Costs.from_json(given), measured.costs))
    return took / work if took and work else 1.0


def _bandwidth(lending: Lending, measured: Measured | None) -> float | None:
    """A lower bound of the bytes per second between workers; None if nothing has been timed.

    Messages of activations are timed, but may be so small that only latency counts. The gradients of a stage, reduced
    by its peers in its step, are larger.
    """
    if measured is None:
        return None
    sent = max(measured.held("message"), default=0)
    timed = [(sent, measured.costs.hop)]
    if len(lending.bytes) == len(measured.costs.step):  # skipped for chunks that share a stage's step
        timed += [(size * count, step) for size, count, step in zip(
            lending.bytes, lending.layers, measured.costs.step)]
    return max((1e6 * size / took for size, took in timed if size and took), default=None)


def _lag(lending: Lending, measured: Measured | None) -> int:
    """Microseconds to send the parameters of the layers lent at one boundary to a helper, or their gradients back."""
    most = max((max(earlier * own, later * other) for (earlier, later), own, other in zip(
        lending.lend, lending.bytes, lending.bytes[1:])), default=0)
    bandwidth = _bandwidth(lending, measured)
    if measured is None or bandwidth is None:
        return 0
    return max(measured.costs.hop, round(1e6 * most / bandwidth))
