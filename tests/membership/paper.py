"""A worker on paper: does what its `Standing` says, without tensors. Its parameters are the updates made to them."""

from __future__ import annotations

from megatron_recycle.membership.names import Process
from megatron_recycle.membership.resume import Resume
from megatron_recycle.membership.standing import Reconciliation, Standing
from megatron_recycle.membership.verdict import StepMode, Verdict

GUESS = 1.0
"""The coefficient that every stage's own numbers suggest."""

Update = tuple[int, float]
"""An iteration, and the coefficient that it was stepped with."""


def verdict(iteration: int, right: float) -> Verdict:
    """The verdict on ``iteration`` that asks for the coefficient ``right``."""
    return Verdict(iteration, 0.0, 0.0, (right,), (GUESS,))


def right(of: Verdict) -> float:
    """What `Stage.coefficient` makes of a verdict."""
    return of.norm_squares[0]


class Paper:
    """What `runtime.stepper` does, with a list of updates for a stage."""

    def __init__(self, name: str, staggered: bool) -> None:
        self.standing = Standing(Process.parse(name), StepMode.of(staggered))
        self.updates: list[Update] = []
        self._snapshot: list[Update] = []

    def hold(self, iteration: int) -> None:
        """The reduction is complete: step at once, or wait for the verdict."""
        self.standing.hold(iteration)
        if self.standing.early:
            self._snapshot = list(self.updates)
            self.standing.save()
            self._step(GUESS)

    def settle(self, found: Verdict) -> bool:
        """The verdict is known here. Returns whether what is under way of the next iteration is void."""
        wrong = self.standing.early and found.refutes(right(found))
        todo = self.standing.settlement(found.iteration, right(found))
        if todo.undo:
            self._undo()
        if todo.step:
            self._step(right(found))
        self.standing.commit(found, right(found))
        return wrong

    def go_back(self, resume: Resume) -> Reconciliation:
        """The first half of a reconciliation, which takes nobody else; returns all of it."""
        todo = self.standing.reconciliation(resume)
        if todo.undo:
            self._undo()
        if todo.drop:
            self.standing.drop()
        return todo

    def enter(self, peer: Paper) -> None:
        """Take everything from ``peer``."""
        self.updates = list(peer.updates)
        assert peer.standing.verdict is not None
        self.standing.enter(peer.standing.verdict, self.standing.mode.like(peer.standing.mode))

    def _step(self, coefficient: float) -> None:
        self.standing.step(coefficient)
        self.updates.append((self.standing.stepped, coefficient))

    def _undo(self) -> None:
        self.standing.undo()
        self.updates = list(self._snapshot)
