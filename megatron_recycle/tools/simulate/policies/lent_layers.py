"""megatron-recycle with `lend: auto`: workers of neighbouring stages run some of a hit stage's layers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from megatron_recycle.plan import Worker
from megatron_recycle.tools.simulate.policies.base import Answer, Course
from megatron_recycle.tools.simulate.policies.recycling import Recycling, Stalls


class LentAndMoves(Recycling):
    """The product with `lend: auto` and `moves`.

    After each change of the membership micro-batches are re-routed at once, as without it. The plan that lends layers
    comes with the end of the background search, at the next boundary between two iterations, and costs no stall; copies
    of parameters go with every iteration, and are in the plan (`Plans.lent`). The next change ends it first.

    ``search``: seconds, the setting `planner_budget`.
    """

    name = "lent-and-moves"
    search: ClassVar[float] = 2.0

    def __init__(self, stalls: Stalls | None = None) -> None:
        super().__init__(stalls)
        self._changes = 0
        self._begin_search = self._found = False

    def woken(self, now: float, token: object, iteration: int) -> Answer:
        if not (isinstance(token, str) and token.startswith("lend")):
            return super().woken(now, token, iteration)
        self._found = self.members is not None and token == f"lend {self._changes}"
        return Answer(boundary=self._found)

    def _at_boundary(self, now: float, iteration: int) -> Answer:
        answer = super()._at_boundary(now, iteration)
        if not self._found or self.members is None or answer.course is not None:
            return answer
        self._found = False
        return replace(answer, course=self._lent(super()._course()))

    def _lent(self, usual: Course) -> Course:
        assert self.members is not None
        failed = [Worker.parse(name) for name in self.members.empty]
        return Course.of(self.setting.plans.lent(failed, self.dealt), usual.samples)

    def _course(self) -> Course:
        """The course with the stage's own layers, which the job follows at once."""
        assert self.members is not None
        self._changes += 1
        self._found, self._begin_search = False, bool(self.members.empty)
        return super()._course()

    def _and(self, answer: Answer) -> Answer:
        answer = super()._and(answer)
        if self._begin_search:
            self._begin_search = False
            answer = replace(answer, wakes=(*answer.wakes, (self.search, f"lend {self._changes}")))
        return answer


class LentLayers(LentAndMoves):
    """With `lend: auto` alone: every worker keeps its stage for good."""

    name = "lent-layers"
    moves = False
