"""What is computed, as whole numbers, and what a run without failures computes: every number hangs on all that goes
into it, so that equal numbers were made of the same things in the same way."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_recycle.plan import Action, Problem

Key = tuple[str, int, int, int]
"""A contribution to a sum of gradients: kind, pipeline, micro-batch and chunk."""
Sums = dict[Key, int]
"""The contributions that a worker has added up, with their values."""

_KINDS = {"F": 1, "B": 2, "W": 3, "L": 4}
GUESS = 1.0
"""The coefficient that every stage's own numbers suggest."""
WRONG = 0.5
"""The right one where that was wrong."""


class Activation(int):
    """One that knows the parameters ``by`` that it was made with, as they are rounded: of each chunk that it has come
    through."""

    by: tuple[int, ...] = ()

    def through(self, value: int, parameters: int) -> Activation:
        """What a chunk with these parameters has made of it: ``value``."""
        made = Activation(value)
        made.by = (*self.by, parameters)
        return made


def of(*parts: int) -> int:
    """A number that hangs on all of these."""
    return hash(parts)


def first(stage: int) -> int:
    """Parameters before training; -1: the tied one."""
    return of(11, stage)


def piece(stage: int, shard: int) -> int:
    """Parameters of a shard before training."""
    return of(19, stage, shard)


def part(gradient: int, shard: int) -> int:
    """The slice of a gradient that belongs to a shard."""
    return of(20, gradient, shard)


def forward(iteration: int, item: tuple[int, int, int], parameters: int, given: int) -> int:
    """The activation of (pipeline, micro-batch, chunk)."""
    return of(12, iteration, *item, parameters, given)


def with_lent(parameters: int, lent: int) -> int:
    """Parameters of a worker that runs layers of another stage too."""
    return of(18, parameters, lent)


def backward(made: int, given: int) -> int:
    """The gradient for the chunk before."""
    return of(13, made, given)


def contribution(kind: str, made: int, given: int) -> int:
    """What an action adds to a sum of gradients."""
    return of(14, _KINDS[kind], made, given)


def loss(made: int) -> int:
    """Of one micro-batch."""
    return of(15, made)


def whole(sums: Sums) -> int:
    """A sum as if it were exact."""
    return hash(frozenset(sums.items()))


def stepped(parameters: int, gradient: int, coefficient: float) -> int:
    """Parameters after one update."""
    return of(16, parameters, gradient, int(4 * coefficient))


def tied(gradients: tuple[int, ...]) -> int:
    """The gradient of a tied parameter, of those of its stages."""
    return of(17, *gradients)


def halves(kind: str) -> tuple[str, ...]:
    """The contributions of an action."""
    return {"F": (), "B": ("B",), "W": ("W",), "FB": ("B", "W")}[kind]


def place(problem: Problem, stage: int, action: Action) -> tuple[int, int, int]:
    """(pipeline, micro-batch, chunk counted through the model) of an action."""
    return action.pipeline, action.microbatch, problem.chunks_of[stage][action.chunk]


@dataclass(frozen=True)
class Reference:
    """A run without failures. By iteration: what each stage's gradient consists of, the loss, parameters
    after it by stage, likewise by shard, and the tied parameter."""

    sums: list[list[Sums]]
    losses: list[int]
    parameters: list[list[int]]
    pieces: list[list[list[int]]]
    ties: list[int]


def reference(problem: Problem, iterations: int, wrong: frozenset[int], lent: frozenset[tuple[int, int]] = frozenset(),
              tied_stages: tuple[int, ...] = (), shards: int = 0) -> Reference:
    """As it should be. ``lent``: micro-batches whose first layer of chunk 1 runs with chunk 0; ``shards`` of a stage's
    optimizer state."""
    now = [first(stage) for stage in range(problem.grid.stages)]
    pieces = [[piece(stage, shard) for shard in range(shards)] for stage in range(problem.grid.stages)]
    if shards:
        now = [of(*each) for each in pieces]
    found = Reference([], [], [], [], [])
    tie = first(-1)
    for iteration in range(iterations):
        sums: list[Sums] = [{} for _ in now]
        losses = []
        for d, m in problem.grid.items():
            made, given = [], 0
            for chunk in range(problem.chunks):
                own = now[problem.stage_of(chunk)]
                if chunk == 0 and (d, m) in lent:
                    own = with_lent(own, now[problem.stage_of(1)])
                given = forward(iteration, (d, m, chunk), own, given)
                made.append(given)
            losses.append(((d, m), loss(given)))
            given = 0
            for chunk in reversed(range(problem.chunks)):
                sums_here = sums[problem.stage_of(chunk)]
                for kind in "BW" if problem.split_backward else "B":
                    sums_here[kind, d, m, chunk] = contribution(kind, made[chunk], given)
                given = backward(made[chunk], given)
                if chunk == 0 and (d, m) in lent:
                    sums[problem.stage_of(1)]["L", d, m, 1] = contribution("L", made[0], now[problem.stage_of(1)])
        coefficient = WRONG if iteration in wrong else GUESS
        gradients = [whole(each) for each in sums]
        now = [stepped(value, gradient, coefficient) for value, gradient in zip(now, gradients)]
        pieces = [[stepped(value, part(gradient, shard), coefficient) for shard, value in enumerate(each)]
                  for each, gradient in zip(pieces, gradients)]
        if shards:
            now = [of(*each) for each in pieces]
        if tied_stages:
            tie = stepped(tie, tied(tuple(gradients[stage] for stage in tied_stages)), coefficient)
        found.sums.append(sums)
        found.losses.append(hash(frozenset(losses)) % (1 << 50))
        found.parameters.append(list(now))
        found.pieces.append(pieces)
        found.ties.append(tie)
    return found
