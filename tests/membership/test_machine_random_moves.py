"""Random interleavings with moves, beside all that goes wrong in `test_machine_random_joins`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as some
from hypothesis.stateful import invariant, precondition, rule

from megatron_recycle.membership import inputs, moving
from megatron_recycle.membership import state as st
from tests.membership import test_machine_random as base
from tests.membership import test_machine_random_joins as joins
from tests.membership.cluster import described
from tests.seeds import by_day


class Moves(joins.Joins):
    def _say_ready(self, process: base.Process) -> None:
        description = {"grid": base.GRID, "moves": True}
        process.outbox.append(inputs.Ready(process.member.incarnation, described(description), process.report()))

    def _movers(self) -> list[tuple[str, str]]:
        """Members and the empty positions of other stages that they could take."""
        if self.end is not None or not moving.seek(self.state):
            return []
        return [(mover, to) for mover in self.state.members for to in self._empty() if mover[-1] != to[-1]]

    @precondition(lambda self: self._movers())
    @rule(data=some.data())
    def planner_wants_a_move(self, data: Any) -> None:
        mover, to = base._pick(data, self._movers())
        self._feed(inputs.MovesFound(self.state.generation, {mover: to}))

    @precondition(lambda self: set(self.state.moving.moves) & set(self._empty()))
    @rule(data=some.data())
    def the_movers_launcher_starts_its_process(self, data: Any) -> None:
        self._comes(base._pick(data, sorted(set(self.state.moving.moves) & set(self._empty()))))

    def _comes(self, name: str) -> None:
        self.lives += 1
        rank = self.processes[name].member.rank
        member = st.Member(name, rank, f"{name}/{self.lives}", 100 + rank + 1000 * self.lives, "host")
        process = self.processes[name] = base.Process(member, self.staggered, ready=True, move=self.state.moving.move)
        self._of(process).outside = True
        self._connect(process)

    @invariant()
    def who_moves_is_a_member(self) -> None:
        if self.end is None:
            assert all(self.state.member(who) is not None for who in self.state.moving.moves.values())

    def check_always(self) -> None:
        super().check_always()
        self.who_moves_is_a_member()

    def teardown(self) -> None:
        super().teardown()
        for event in self.told:
            if event["event"] == "left" and event["kind"] == "move":
                proven = [other for other in self.told if other.get("moved_from") == event["worker"]]
                assert any(other["iteration"] < event["iteration"] for other in proven), "its new place had no state"
        if self.end is not None:
            return
        for to, who in self.state.moving.moves.items():
            stage = self.state.known[who].worker[-1]
            last = [name for name in self.state.members if name[-1] == stage] == [self.state.known[who].worker]
            assert last or to not in self.state.members, "its new process is in, and it has not gone"


Moves.TestCase.settings = settings(
    max_examples=10, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMoves = Moves.TestCase

ACTS: tuple[base.Act, ...] = (
    *joins.ACTS,
    (6, lambda p: p._movers(), lambda p, dice: p.planner_wants_a_move(dice)),
    (6, lambda p: set(p.state.moving.moves) & set(p._empty()),
     lambda p, dice: p.the_movers_launcher_starts_its_process(dice)),
)


@pytest.mark.parametrize("tens", by_day(2, range(5)))
def test_seeded_campaigns_with_moves(tens: int) -> None:
    for seed in range(6 * tens, 6 * tens + 6):
        base.campaign(Moves, seed, ACTS, 120)
