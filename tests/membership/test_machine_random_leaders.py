"""Random interleavings of the whole protocol, joins and leaves among it, whose journal is in a store that several hosts
share: it delays, forgets to answer and ends leases. Hosts' coordinators die and come back; one that leads no more may
not know it yet, and processes that are connected with it tell it what happens, too."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from megatron_recycle.control.etcd import StoreUnreachable
from megatron_recycle.control.leader_election import LEASE_S, Candidate, ElectedJournal, LeadLost, Sealed
from megatron_recycle.control.write_ahead import WriteAhead
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs
from megatron_recycle.membership import state as st
from megatron_recycle.membership.records import restore, untold
from tests.membership import test_machine_random as base
from tests.membership import test_machine_random_joins as joins
from tests.membership.test_elected import TOKEN, Paper, without_fence

SIZE = base.PIPELINES * base.STAGES


class Leader:
    """A coordinator that leads, or believes so. ``told`` is its host's events.jsonl."""

    def __init__(self, journal: ElectedJournal, told: list[dict[str, Any]]) -> None:
        self.journal, self.told, self.lives = journal, told, True
        self.memory = WriteAhead(journal)
        self.state = restore(SIZE, journal.records) if journal.records else st.State(size=SIZE)
        self.todo: deque[do.Decision] = deque()
        self.plans: list[int] = []
        self.limits: list[int] = []
        self.hinted: list[do.AwaitLoss] = []
        self.told_exits = 0

    def die(self) -> None:
        self.lives = False
        self.todo.clear()
        self.plans.clear()
        self.limits.clear()
        self.hinted.clear()


class Host:
    """A host of the job, as far as coordinators go."""

    def __init__(self, name: str, store: Paper) -> None:
        self.name, self.store, self.busy = name, store, False
        self.told: list[dict[str, Any]] = []
        self.leader: Leader | None = None
        self.born()

    def born(self) -> None:
        self.leader = None
        self.candidate = Candidate(Sealed(self.store, "job", TOKEN), self.name, "h:1", self.store.clock)


def _of_leader(name: str) -> Any:
    """What `base` keeps of its only coordinator is that of the one that acts now."""
    return property(lambda self: getattr(self.acting, name), lambda self, value: None)


class Led(joins.Joins):
    """Inputs of a process go to the leader that it is connected with; timers and exits are those of `acting`."""

    state, todo, plans, limits, hinted, told = map(_of_leader, ("state", "todo", "plans", "limits", "hinted", "told"))

    def __init__(self) -> None:
        self.chance = random.Random(0)
        self.store = Paper(self.chance)
        self.hosts = {name: Host(name, self.store) for name in "abc"}
        self.leaders: list[Leader] = []
        self.at: dict[str, Leader] = {}
        self.iterations: set[int] = set()
        self.depth = 0
        self.host_acts("a")
        super().__init__()

    @property
    def told_exits(self) -> int:
        return self.acting.told_exits

    @told_exits.setter
    def told_exits(self, value: int) -> None:
        self.acting.told_exits = value

    @property
    def journal(self) -> list[Any]:
        return list(self.acting.journal.records)

    @journal.setter
    def journal(self, value: list[Any]) -> None: ...

    @property
    def decided(self) -> list[int]:
        return [one["generation"] for one in self.journal if one["kind"] == "decided"]

    @decided.setter
    def decided(self, value: list[int]) -> None: ...

    # Leaders

    def host_acts(self, name: str) -> None:
        """It leads on, or tries to lead; others may do theirs in the middle of it."""
        host = self.hosts[name]
        if host.busy:
            return
        host.busy = True
        try:
            if host.leader is not None and not host.leader.lives:
                host.born()
            if host.leader is not None:
                host.leader.journal.beat()
            elif (journal := host.candidate.try_lead()) is not None:
                self._leads(host, journal)
        except StoreUnreachable:
            pass
        except LeadLost:
            assert host.leader is not None
            host.leader.die()
        finally:
            host.busy = False

    def _leads(self, host: Host, journal: ElectedJournal) -> None:
        self.acting = host.leader = Leader(journal, host.told)
        self.leaders.append(self.acting)
        for event in untold(journal.records, host.told):
            self._tell(event)
        if self.state.ended is not None:
            self.end = do.End(*self.state.ended)
        elif self.state.generation:
            self._feed(inputs.Restarted())

    def host_dies(self, name: str) -> None:
        """Its coordinator does, and comes back."""
        host = self.hosts[name]
        if not host.busy:
            if host.leader is not None:
                host.leader.die()
            host.born()

    def meanwhile(self) -> None:
        if self.depth < 3 and self.chance.random() < 0.2:
            acting, self.depth = self.acting, self.depth + 1
            self.store.pass_time(self.chance.choice((0.1, LEASE_S + 1.0)) if self.chance.random() < 0.3 else 0.0)
            self.host_acts(self.chance.choice("abc"))
            self.acting, self.depth = acting, self.depth - 1

    def living(self) -> list[Leader]:
        return [one for one in self.leaders if one.lives]

    def look_at(self, dice: random.Random) -> None:
        """Somebody that leads, or believes so, acts next."""
        if living := self.living():
            self.acting = dice.choice(living)

    # Between leaders and processes

    def _feed(self, happened: Any) -> None:
        who = happened.member.incarnation if isinstance(happened, inputs.Hello) else getattr(
            happened, "incarnation", None)
        if who is not None:
            if who not in self.at or not self.at[who].lives:
                self.at.pop(who, None)
                return
            self.acting = self.at[who]
        leader = self.acting
        if not leader.lives:
            return
        self.now += 0.001
        before = leader.state
        try:
            if not leader.journal.leads():
                leader.journal.beat()
            after, decisions = leader.memory.step(before, happened, self.now)
        except LeadLost:
            leader.die()
            return
        assert after.generation >= before.generation and after.absent.fenced >= before.absent.fenced
        leader.state = after
        leader.todo.extend(sorted(decisions, key=lambda one: not isinstance(one, do.Record)))
        self.acting = leader

    def _carry_out(self) -> None:
        if isinstance(self.todo[0], do.Note):
            self.acting.journal.note(self.todo.popleft().record.to_json())
        else:
            super()._carry_out()

    def _stored(self, record: dict[str, Any]) -> None:
        """It has been since it was decided; by `teardown` each generation was decided once."""
        if record["kind"] == "decided":
            earlier = [one for one in self.journal if one["kind"] == "decided"
                       and one["generation"] < record["generation"]]
            if earlier and record["events"] and record["events"][-1].get("reason"):
                assert {*earlier[-1]["members"]} == {*record["members"]}, "nobody was at fault"
            assert not {*record["fenced"]} & {member["incarnation"] for member in record["members"].values()}

    def _told(self, decision: do.Tell) -> None:
        """To those that are connected with this leader. One that leads no more may tell what is over by now."""
        message = decision.message
        kind = {"stop": "decided", "go": "go"}.get(message.type)
        generation = getattr(message, "generation", 0)
        assert kind is None or any(one["kind"] == kind and one["generation"] == generation for one in self.journal)
        if kind == "go" and all(self.processes[name].stop <= generation for name in message.members):
            self._check_go(message)
        for process in self.processes.values():
            who = process.member.incarnation
            if who in decision.to and self.at.get(who) is self.acting:
                process.inbox.append(message)

    def _told_committed(self, iteration: int) -> None:
        """The next leader may tell some again, in its own events.jsonl."""
        self.committed = [*range(iteration)]
        super()._told_committed(iteration)
        self.iterations.add(iteration)

    def _connect(self, process: base.Process) -> None:
        """With anybody that says it leads."""
        super()._connect(process)
        if living := self.living():
            self.at[process.member.incarnation] = self.chance.choice(living)

    def lost(self) -> list[base.Process]:
        return [one for one in self._those(lambda p: True)
                if (at := self.at.get(one.member.incarnation)) is None or not at.lives]

    def teardown(self) -> None:
        """The store answers again, one leads, and all find it."""
        self.store.meanwhile, self.store._trouble = (lambda: None), 0.0
        for leader in self.leaders:
            leader.die()
        self.store.pass_time(LEASE_S + 1.0)
        while not self.living():
            self.host_acts(self.chance.choice("abc"))
        for process in self._those(lambda p: True):
            self._connect(process)
        super().teardown()
        found = Sealed(self.store, "job", TOKEN).read("journal/")
        assert [*found] == [f"journal/{number:08d}" for number in range(len(found))], "a record is missing"
        assert {f"recycle/job/{name}": one["term"] for name, (one, _) in found.items()} == self.store.terms, (
            "an old leader wrote")
        generations = [one["record"]["generation"] for one, _ in found.values() if one["record"]["kind"] == "decided"]
        assert generations == [*range(1, len(generations) + 1)], "decided twice, or not at all"
        assert self.iterations == {*range(max(self.iterations, default=-1) + 1)}, "an iteration was told by nobody"


def _host_acts(job: Led, dice: random.Random) -> None:
    job.store.pass_time(dice.choice((0.1, 0.5, 1.0)))
    job.host_acts(dice.choice("abc"))


ACTS: tuple[base.Act, ...] = (
    *joins.ACTS[:len(base.ACTS) - 1],  # without the coordinator that dies and comes back
    *joins.ACTS[len(base.ACTS):],
    (6, lambda p: True, _host_acts),
    (1, lambda p: True, lambda p, dice: p.host_dies(dice.choice("abc"))),
    (1, lambda p: True, lambda p, dice: p.store.pass_time(LEASE_S + 1.0)),
    (6, lambda p: p.lost() and p.living(), lambda p, dice: p._connect(dice.choice(p.lost()))),
)


def campaign(seed: int, steps: int = 120) -> Led:
    """Raises AssertionError."""
    dice = random.Random(seed)
    job = Led()
    job.all_become_ready(True, dice.randint(1, 6), staggered=dice.random() < 0.8, seed=seed)
    job.chance.seed(seed)
    job.store._trouble, job.store.meanwhile = dice.choice((0.0, 0.05, 0.2)), job.meanwhile
    for _ in range(steps):
        job.look_at(dice)
        possible = [act for act in ACTS if act[1](job)]
        ((_, _, act),) = dice.choices(possible, [act[0] for act in possible])
        act(job, dice)
        job.check_always()
    job.teardown()
    return job


def test_whoever_leads_each_generation_is_decided_once_and_training_goes_on() -> None:
    jobs = [campaign(seed) for seed in range(24)]
    assert sum(len(job.leaders) for job in jobs) > 5 * len(jobs), "few have led"


def test_the_campaign_finds_a_leader_that_does_not_ask_for_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fence(monkeypatch)
    with pytest.raises(AssertionError, match="an old leader wrote"):
        for seed in range(60):
            campaign(seed)
