"""Whether lending pays: its gain per iteration until the membership changes, against copying the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..plan import Plan, Worker, borrowings

Held = Mapping[Worker, Mapping[tuple[int, bool], int]]
"""Lent layers by worker, as `plan.borrowings` gives them: for (chunk, whether its end) the number of layers."""


@dataclass(frozen=True)
class CopyPrice:
    """``layer_bytes``: by chunk, the parameters of one layer. ``bandwidth``: bytes per second that a worker sends, and
    as many that it receives. ``horizon``: iterations until the next change of membership, about. ``unit``: seconds in a
    unit of the plans' durations."""

    layer_bytes: Sequence[int]
    bandwidth: float
    horizon: float = 100.0
    unit: float = 1e-6


@dataclass(frozen=True)
class LendingGain:
    """``pays``: whether to lend. ``gain``: seconds per iteration. ``copied``: bytes of all copies; ``copying``: seconds
    until they are there. ``line``: all of that, for the log."""

    pays: bool
    gain: float
    copied: int
    copying: float
    line: str


def worth(rerouted: Plan, lent: Plan, price: CopyPrice, held: Held | None = None) -> LendingGain:
    """Whether ``lent`` should be taken up rather than ``rerouted``, a plan without lent layers for the same membership.

    Copies start at once, every worker sends and receives one after the other, and the peers of a stage share the
    sending. Training is assumed to stand still meanwhile, so the answer errs on the side of not lending. ``held``:
    layers that helpers have already.
    """
    gain = (rerouted.objective_value - lent.objective_value) * price.unit
    copied, copying = _copies(lent, price, held or {})
    times = f"{_milliseconds(rerouted, price)} -> {_milliseconds(lent, price)} ms"
    if not lent.crossings:
        why = "no layers may be lent" if not lent.problem.lends else "no lent layer shortens an iteration"
        return LendingGain(False, 0.0, 0, 0.0, f"does not lend: {why}")
    if gain * price.horizon <= copying:
        return LendingGain(False, gain, copied, copying,
                     f"does not lend {lent_layers(lent)}: {times} gains {max(0.0, gain * price.horizon):.2f} s in"
                     f" {price.horizon:.0f} iterations, copying {_size(copied)} takes {copying:.2f} s")
    return LendingGain(True, gain, copied, copying, f"lends {lent_layers(lent)}: {times}; copies {_size(copied)}")


def _copies(plan: Plan, price: CopyPrice, held: Held) -> tuple[int, float]:
    """Bytes of all missing copies, and the time of the busiest sender or receiver."""
    problem = plan.problem
    total, longest = 0, 0.0
    sent: dict[int, int] = {}
    for worker, layers in borrowings(plan).items():
        received = 0
        for (chunk, end), count in layers.items():
            missing = max(0, count - held.get(worker, {}).get((chunk, end), 0)) * price.layer_bytes[chunk]
            received += missing
            stage = problem.stage_of(chunk)
            sent[stage] = sent.get(stage, 0) + missing
        total += received
        longest = max(longest, received / price.bandwidth)
    for stage, size in sent.items():
        longest = max(longest, size / len(problem.live(stage)) / price.bandwidth)
    return total, longest


def lent_layers(plan: Plan) -> str:
    """Which layers a plan with crossings lends where, for people."""
    most: dict[int, int] = {}
    for crossing in plan.crossings.values():
        for boundary, by in enumerate(crossing):
            if by:
                most[boundary] = max(abs(by), most.get(boundary, 0))
    where = [f"{boundary}-{boundary + 1}" for boundary in sorted(most)]
    layers = f"{max(most.values())} layer{'s' if max(most.values()) > 1 else ''}"
    if len(where) == 1:
        return f"{layers} at boundary {where[0]}"
    layers = f"up to {layers}" if max(most.values()) > 1 else layers
    return f"{layers} at boundaries {', '.join(where[:-1])} and {where[-1]}"


def _milliseconds(plan: Plan, price: CopyPrice) -> str:
    return f"{plan.objective_value * price.unit * 1000:.3g}" if plan.objective_value * price.unit < 0.1 else (
        f"{plan.objective_value * price.unit * 1000:.0f}")


def _size(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"
