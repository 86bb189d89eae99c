"""Random interleavings with workers that come in and leave, beside all that goes wrong in `test_machine_random`.

A worker promises with what it holds the switch that it has been offered; if all members of an iteration promised the
same, all of them stop before the iteration after next, and say so.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as some
from hypothesis.stateful import invariant, precondition, rule
from msgspec.structs import replace

from megatron_recycle.membership import inputs
from megatron_recycle.membership import state as st
from megatron_recycle.membership.protocol import Go
from megatron_recycle.membership.standing import Reconciliation
from tests.membership import test_machine_random as base
from tests.seeds import by_day, examples

LIVES = 4
"""Processes of all joiners together."""


@dataclass
class More:
    """What a process of `base` has beside, by incarnation."""

    outside: bool = False
    leaving: bool = False
    holds: inputs.Holds | None = None
    resumed: inputs.Resumed | None = None


class Joins(base.Protocol):
    def __init__(self) -> None:
        self.more: defaultdict[str, More] = defaultdict(More)
        self.lives = 0
        super().__init__()

    def _of(self, process: base.Process) -> More:
        return self.more[process.member.incarnation]

    # Connections

    def _connect(self, process: base.Process) -> None:
        super()._connect(process)
        own = self._of(process)
        if own.outside and process.ready and process.generation:
            self._say_ready(process)
        process.outbox.extend(kept for kept in (process.stands, own.holds, own.resumed) if kept is not None)
        if own.leaving:
            process.outbox.append(inputs.Leave(process.member.incarnation))

    # Messages

    def _hear(self, process: base.Process) -> None:
        own, message = self._of(process), process.inbox[0]
        kind = message.type
        if kind == "end" and self.end is None:
            process.alive = False
            self.dead.append(process.member)
        elif kind == "stop" and message.generation > process.stop:
            inside = message.members.get(process.name) == process.member.incarnation
            if own.outside or not inside:
                process.inbox.popleft()
                process.stop = message.generation
                self._stand_still(process)
                own.outside = not inside
                if not inside:
                    self._say_ready(process)
                return
        super()._hear(process)

    def _goes(self, process: base.Process, go: Go) -> None:
        self._of(process).outside = False
        super()._goes(process, go)

    def _can_reconcile(self, process: base.Process, todo: Reconciliation) -> bool:
        """Who comes in takes everything from its peers, if they live."""
        if not super()._can_reconcile(process, todo):
            return False
        return not todo.enter or all(other.alive or other.name in process.go.resume.joined
                                     for other in self._others(process, own_stage=True))

    def _resumes(self, process: base.Process) -> None:
        own, generation = self._of(process), process.generation
        if process.name in process.go.resume.joined:
            own.holds = inputs.Holds(process.member.incarnation, generation, inputs.Received(1, 1.0))
            process.outbox.append(own.holds)
        super()._resumes(process)
        own.resumed = process.outbox[-1]

    # Checks

    def _check_go(self, go: Go) -> None:
        joined = go.resume.joined
        stays = {name: who for name, who in go.members.items() if name not in joined}
        assert all(any(name[-1] == other[-1] for other in stays) for name in joined), "nobody to get the state from"
        super()._check_go(replace(go, members=stays))

    def _told_committed(self, iteration: int) -> None:
        assert iteration == (self.committed[-1] + 1 if self.committed else 0), "committed twice or out of order"
        self.committed.append(iteration)
        proven = {member.incarnation for member in self.state.proven.values()}
        live = [p for p in self.processes.values() if p.alive and p.member.incarnation in proven]
        assert all(p.holds >= iteration for p in live), "committed, but not held by all"

    # What happens

    def _empty(self) -> list[str]:
        """Places whose last process is out, and known to be on disk."""
        decided = [record for record in self.journal if record["kind"] == "decided"]
        if self.end is not None or not decided or self.lives >= LIVES:
            return []
        return [name for name, process in sorted(self.processes.items())
                if name not in self.state.members and name not in decided[-1]["members"]
                and (not process.alive or process.member.incarnation in self.state.absent.fenced)]

    @precondition(lambda self: self._empty())
    @rule(data=some.data())
    def process_comes(self, data: Any) -> None:
        name = base._pick(data, self._empty())
        self.lives += 1
        rank = self.processes[name].member.rank
        member = st.Member(name, rank, f"{name}/{self.lives}", 100 + rank + 1000 * self.lives, "host")
        process = self.processes[name] = base.Process(member, self.staggered, ready=True)
        self._of(process).outside = True
        self._connect(process)

    def _staying(self, process: base.Process) -> bool:
        return process.running and not self._of(process).leaving

    @precondition(lambda self: self.troubles and self._those(self._staying))
    @rule(data=some.data())
    def worker_asks_to_leave(self, data: Any) -> None:
        self.troubles -= 1
        process = self._some(data, self._those(self._staying))
        self._of(process).leaving = True
        process.outbox.append(inputs.Leave(process.member.incarnation))

    @invariant()
    def a_job_ends_only_for_want_of_a_stage_or_of_a_network(self) -> None:
        if self.end is None or "would have no worker any more" not in self.end.message:
            super().a_job_ends_only_for_want_of_a_stage_or_of_a_network()

    @invariant()
    def who_holds_nothing_is_known_to(self) -> None:
        assert set(self.state.arrivals.unproven) <= set(self.state.members)
        assert not set(self.state.arrivals.unproven) & set(self.state.absent.out)

    def check_always(self) -> None:
        super().check_always()
        self.who_holds_nothing_is_known_to()

    def teardown(self) -> None:
        """Whoever wants to come in is in at last, whoever wants to leave is gone."""
        super().teardown()
        for _ in range(12):
            self.messages_flow(base.NAMES, 100)
            self.work(base.NAMES, 80)
        if self.end is None:
            assert not self.state.arrivals.joiners and not self.state.absent.leaving
            assert {process.name for process in self._those(lambda p: not p.ended)} == set(self.state.members)


Joins.TestCase.settings = settings(
    max_examples=examples(20), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestJoins = Joins.TestCase

ACTS: tuple[base.Act, ...] = (
    *base.ACTS,
    (3, lambda p: p._empty(), lambda p, dice: p.process_comes(dice)),
    (1, lambda p: p.troubles and p._those(p._staying), lambda p, dice: p.worker_asks_to_leave(dice)),
)


@pytest.mark.parametrize("tens", by_day(2, range(24)))
def test_seeded_campaigns_with_joins_and_leaves(tens: int) -> None:
    for seed in range(6 * tens, 6 * tens + 6):
        base.campaign(Joins, seed, ACTS, 120)
