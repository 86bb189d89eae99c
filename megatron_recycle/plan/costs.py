"""Costs of actions: durations per stage, transfer latency, step times and the workers' measured slowness."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from typing import Any

from .errors import PlanError
from .grid import Worker
from .value import Count, read

NOTABLE = 0.25
"""Share by which a worker differs from its peers' median when it counts as slow (or fast)."""


@dataclass(frozen=True)
class Costs:
    """Durations in one integer unit (microseconds when profiled), one entry per chunk, which is per stage where each
    stage has one. ``hop``: latency of a transfer between different workers. ``speed``: slowness by worker (1.5: half as
    slow again, default 1).

    ``step``: time of a stage's reduce-and-step, one entry per stage; a collective, so not scaled by ``speed``.
    ``layer``: by chunk, (F, B, W) of one layer that may be lent; () where none is. ``lent``: time after a step until a
    helper has the new parameters of the layers lent to it, and time before a step at which it must have run all its
    actions: then it sends the sums of their gradients.
    """

    forward: tuple[Count, ...]
    backward_input: tuple[Count, ...]
    backward_weight: tuple[Count, ...]
    hop: Count = 0
    step: tuple[Count, ...] = ()
    speed: Mapping[Worker, float] = field(default_factory=dict)
    layer: tuple[tuple[Count, Count, Count], ...] = ()
    lent: tuple[Count, Count] = (0, 0)

    def __post_init__(self) -> None:
        chunks = len(self.forward)
        if not self.step:
            object.__setattr__(self, "step", (0,) * chunks)
        if not self.layer:
            object.__setattr__(self, "lent", (0, 0))
        for name in ("backward_input", "backward_weight", "step", "layer"):
            count = len(getattr(self, name))
            if count != chunks and not (name == "step" and count < chunks) and not (name == "layer" and not count):
                raise PlanError(f"costs: {name} lists {count} entries, forward {chunks}")
        durations = (*self.forward, *self.backward_input, *self.backward_weight, self.hop, *self.step, *self.lent,
                     *chain.from_iterable(self.layer))
        if min(durations, default=0) < 0:
            raise PlanError(f"costs: no duration may be negative, {min(durations)} is")
        for worker, factor in self.speed.items():
            if not (factor > 0 and math.isfinite(factor)):
                raise PlanError(f"costs: speed of worker {worker} must be positive, not {factor!r}")

    def by_chunk(self, placement: tuple[int, ...]) -> Costs:
        """The same costs by chunk for ``placement``: per-stage entries are repeated for each chunk of the stage.
        Unchanged if by chunk already, or if ``placement`` is (); else ``layer`` is dropped."""
        if not placement or len(placement) == len(self.forward):
            return self
        forward, backward, weight = (tuple(each[stage] for stage in placement) for each in (
            self.forward, self.backward_input, self.backward_weight))
        return replace(self, forward=forward, backward_input=backward, backward_weight=weight, layer=())

    @classmethod
    def uniform(cls, stages: int, forward: int, backward_input: int, backward_weight: int, hop: int = 0,
                step: int = 0, speed: Mapping[Worker, float] | None = None) -> Costs:
        """The same costs for every one of ``stages`` stages."""
        return cls((forward,) * stages, (backward_input,) * stages, (backward_weight,) * stages, hop,
                   (step,) * stages, dict(speed or {}))

    @classmethod
    def parse(cls, text: str, stages: int) -> Costs:
        """Read ``"F,B,W"`` for all ``stages`` alike, or one triple per stage: ``"F,B,W;F,B,W"``. Raises PlanError."""
        triples = [part.split(",") for part in text.split(";")]
        if len(triples) not in (1, stages) or any(len(triple) != 3 for triple in triples):
            raise PlanError(f"costs: {text!r} is not F,B,W, nor {stages} such triples separated by ;")
        try:
            numbers = [tuple(map(int, triple)) for triple in triples]
        except ValueError:
            raise PlanError(f"costs: {text!r} has something that is not an integer") from None
        forward, backward_input, backward_weight = zip(*(numbers * stages if len(numbers) == 1 else numbers))
        return cls(forward, backward_input, backward_weight)

    @property
    def stages(self) -> int:
        """Number of stages, or of chunks where a stage has several, that these costs describe."""
        return len(self.forward)

    def work(self, chunk: int) -> int:
        """Time of F, B and W of ``chunk`` on a worker of usual speed."""
        return self.forward[chunk] + self.backward_input[chunk] + self.backward_weight[chunk]

    def cost(self, kind: str, chunk: int, more: Mapping[int, int] | None = None, split: bool = True) -> int:
        """Time of a F, B or W of ``chunk`` on a worker of usual speed. ``more``: by chunk, the extra layers that it
        runs (negative: layers that it does not run). Never less than 0.

        Without ``split`` a ``B`` costs both halves of the backward and a ``W`` nothing.
        """
        if kind == "F":
            return self._spanned(0, self.forward[chunk], more)
        if kind == "B":
            return self._spanned(1, self.backward_input[chunk], more) + (
                0 if split else self._spanned(2, self.backward_weight[chunk], more))
        if kind == "W":
            return self._spanned(2, self.backward_weight[chunk], more) if split else 0
        raise PlanError(f"no action kind {kind!r}")

    def _spanned(self, place: int, cost: int, more: Mapping[int, int] | None) -> int:
        return max(0, cost + sum(count * self.layer[chunk][place] for chunk, count in more.items())) if more else cost

    def scaled(self, cost: int, worker: Worker) -> int:
        """``ceil(cost x speed)``. The factor is taken as the decimal it prints as, so that 20 x 1.1 is 22."""
        factor = self.speed.get(worker, 1)
        return cost if factor == 1 else math.ceil(cost * Fraction(str(factor)))

    def to_json(self) -> dict[str, Any]:
        """The ``costs`` object of the plan file."""
        speed = {str(w): int(f) if float(f).is_integer() else float(f) for w, f in sorted(self.speed.items())}
        value: dict[str, Any] = {
            "forward": list(self.forward), "backward_input": list(self.backward_input),
            "backward_weight": list(self.backward_weight), "hop": self.hop, "step": list(self.step), "speed": speed}
        if self.layer:
            value |= {"layer": [list(triple) for triple in self.layer], "lent": list(self.lent)}
        return value

    @classmethod
    def from_json(cls, value: Any) -> Costs:
        """Read the ``costs`` object of a plan file. Raises PlanError."""
        given = read(dict[str, Any], value, "costs")
        speed = read(dict[str, int | float], given.pop("speed", {}), "costs: speed")
        return replace(read(cls, given, "costs"), speed={Worker.parse(name): factor for name, factor in speed.items()})
