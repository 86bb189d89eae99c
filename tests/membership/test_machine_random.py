"""Random interleavings of the whole protocol on paper: deaths, silence, stalls, broken connections between workers,
delays and coordinator crashes.

Workers are simulated with the rules of the synchronous commit: a worker can hold k once all members of its stage
have computed k, and steps k only when it knows that all members hold k. Messages travel in order on each
connection and are lost with it. Whatever is decided must be right for what the workers really hold.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs
from megatron_recycle.membership import state as st
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.machine import step
from megatron_recycle.membership.records import restore, untold
from tests.membership.cluster import PLAN

PIPELINES, STAGES = 3, 2
NAMES = [f"{d}:{s}" for d in range(PIPELINES) for s in range(STAGES)]
ORDERS = some.permutations(NAMES)
GRID = {"stages": STAGES, "microbatches": [1] * PIPELINES}


def _pick(source: Any, items: Sequence[Any]) -> Any:
    """One of `items`, by hypothesis's data or by a random number generator."""
    return source.choice(items) if isinstance(source, random.Random) else source.draw(some.sampled_from(items))


@dataclass
class Process:
    """A worker as it really is. `inbox` and `outbox` are its connection; `done` are the generations it is over."""

    member: st.Member
    alive: bool = True
    ready: bool = False
    stop: int = 0
    move: int = 0
    generation: int = 0
    running: bool = False
    """False while it stands still: before the first go, and from a stop to the next go's end."""
    attempt: int = 0
    begun: tuple[int, int] = (-1, 0)
    """The latest iteration that it has begun, and which attempt at it that was."""
    computed: int = -1
    holds: int = -1
    stepped: int = -1
    verdict: int = -1
    """The last iteration that it knows to be held by all."""
    go: dict[str, Any] | None = None
    ended: bool = False
    hint: inputs.Hinted | None = None
    """The last one, told again on every connection."""
    inbox: deque[dict[str, Any]] = field(default_factory=deque)
    outbox: deque[Any] = field(default_factory=deque)

    @property
    def name(self) -> str:
        return self.member.worker

    def report(self) -> dict[str, Any]:
        verdict = {"iteration": self.verdict} if self.verdict >= 0 else None
        return {
            "iteration": self.stepped + 1,
            "attempt": self.attempt,
            "holds": self.holds,
            "stepped": self.stepped,
            "verdict": verdict,
            "actions": int(self.computed > self.stepped),
        }


class Protocol(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = st.State(size=PIPELINES * STAGES)
        self.journal: list[Any] = []
        self.todo: deque[do.Decision] = deque()
        self.now = 1000.0
        self.plans: list[int] = []
        self.limits: list[int] = []
        self.hinted: list[do.AwaitLoss] = []
        self.exits: list[inputs.Exited] = []
        self.told_exits = 0
        self.decided: list[int] = []
        self.announced: dict[int, tuple[int, int]] = {}
        self.committed: list[int] = []
        self.told: list[dict[str, Any]] = []
        self.end: do.End | None = None
        self.troubles = 0
        self.processes: dict[str, Process] = {}
        for pipeline in range(PIPELINES):
            for stage in range(STAGES):
                name, rank = f"{pipeline}:{stage}", pipeline * STAGES + stage
                process = Process(st.Member(name, rank, f"{name}/0", 100 + rank, "host"))
                self.processes[name] = process
                self._connect(process)

    # The coordinator around the machine

    def _feed(self, happened: Any) -> None:
        self.now += 0.001
        before = self.state
        self.state, decisions = step(before, happened, self.now)
        assert self.state.generation >= before.generation
        assert self.state.fenced >= before.fenced
        self.todo.extend(sorted(decisions, key=lambda one: not isinstance(one, do.Record)))  # all of that first

    def _carry_out(self) -> None:
        decision = self.todo.popleft()
        if isinstance(decision, do.Note):
            self.journal.append(dict(decision.record))
        elif isinstance(decision, do.Record):
            self._stored(json.loads(json.dumps(decision.record)))
        elif isinstance(decision, do.Tell):
            self._told(decision)
        elif isinstance(decision, do.MakePlan):
            self.plans.append(decision.generation)
        elif isinstance(decision, do.Await):
            self.limits.append(decision.generation)
        elif isinstance(decision, do.AwaitLoss):
            self.hinted.append(decision)
        elif isinstance(decision, do.Emit):
            self._tell(decision.event)
        elif isinstance(decision, do.End):
            self.end = decision

    def _all_carried_out(self) -> None:
        while self.todo:
            self._carry_out()

    def _stored(self, record: dict[str, Any]) -> None:
        if record["kind"] == "decided":
            assert not self.decided or record["generation"] > self.decided[-1], "a generation decided twice"
            self.decided.append(record["generation"])
            if record["events"] and record["events"][-1].get("reason"):
                before = next((r for r in reversed(self.journal) if r["kind"] == "decided"), None)
                assert before is None or before["members"] == record["members"], "nobody was at fault"
            fenced = set(record["fenced"])
            assert not fenced & {member["incarnation"] for member in record["members"].values()}
        self.journal.append(record)

    def _told(self, decision: do.Tell) -> None:
        message = json.loads(json.dumps(decision.message))
        if message["type"] in ("stop", "go"):
            kind = "decided" if message["type"] == "stop" else "go"
            assert any(r["kind"] == kind and r["generation"] == message["generation"] for r in self.journal), (
                "announced before it was stored"
            )
        if message["type"] == "go":
            self._check_go(message)
        for process in self.processes.values():
            if process.member.incarnation in decision.to:
                process.inbox.append(message)

    def _check_go(self, go: dict[str, Any]) -> None:
        """The resume point is one that the members really can reach. Standing still, they are as they reported."""
        resume, members = go["resume"], [self.processes[name] for name in go["members"]]
        point = (resume["next"], resume["attempt"])
        if go["generation"] in self.announced:
            assert self.announced[go["generation"]] == point
            return  # told again after a reconnect; some may be on their way already
        assert go["plan"]["generation"] == go["generation"], "the plan of another membership"
        target = resume["target"]
        for stage in range(STAGES):
            assert any(p.holds >= target for p in members if p.member.worker.endswith(f":{stage}"))
        for process in members:
            assert process.stepped <= target, "a step would be lost"
            if process.holds < target:
                source = self.processes[resume["copies"][process.name]]
                assert source.holds >= target and source.name.split(":")[1] == process.name.split(":")[1]
        assert max(p.holds for p in members) - target <= 1
        # One that was announced, and could not begin before who was to give a copy died, may be announced again.
        assert all(point > process.begun for process in members), "an attempt begun twice"
        self.announced[go["generation"]] = point

    def _tell(self, event: Mapping[str, Any]) -> None:
        self.told.append(dict(event))
        if event["event"] == "committed":
            self._told_committed(event["iteration"])

    def _told_committed(self, iteration: int) -> None:
        assert iteration == (self.committed[-1] + 1 if self.committed else 0), "committed twice or out of order"
        self.committed.append(iteration)
        live = [p for p in self.processes.values() if p.member.incarnation not in self.state.fenced]
        assert all(p.holds >= iteration for p in live if p.alive), "committed, but not held by all"

    # Connections

    def _connect(self, process: Process) -> None:
        """What an agent says first: who it is, and the latest of what must not be lost."""
        process.inbox.clear()
        process.outbox.clear()
        process.outbox.append(inputs.Hello(process.member, process.generation))
        who = process.member.incarnation
        if process.ready and process.generation == 0:
            self._say_ready(process)
        if process.stop > process.generation:
            process.outbox.append(inputs.Reported(who, process.stop, process.report()))
        if process.stepped >= 0:
            process.outbox.append(inputs.Committed(who, process.stepped))
        if process.hint is not None:
            process.outbox.append(process.hint)

    def _say_ready(self, process: Process) -> None:
        process.outbox.append(inputs.Ready(process.member.incarnation, {"grid": GRID}, process.report()))

    def _some(self, data: Any, processes: list[Process]) -> Process:
        return self.processes[_pick(data, sorted(process.name for process in processes))]

    def _those(self, wanted: Any) -> list[Process]:
        return [process for process in self.processes.values() if process.alive and wanted(process)]

    # What happens in the workers

    @initialize(formed=some.sampled_from([True, True, True, False]), troubles=some.integers(2, 9))
    def all_become_ready(self, formed: bool, troubles: int) -> None:
        """`troubles` is how much will go wrong; much of it would only end every job soon."""
        self.troubles = troubles
        for process in self.processes.values():
            process.ready = True
            self._say_ready(process)
        while formed and not self._those(lambda p: p.running):
            self.messages_flow(NAMES, 100)

    def _can_hold(self, process: Process) -> bool:
        k = process.stepped + 1
        return process.running and process.holds < k and self._all_did(process, k, "computed", own_stage=True)

    def _can_step(self, process: Process) -> bool:
        k = process.stepped + 1
        return process.running and process.holds == k and self._all_did(process, k, "holds", own_stage=False)

    def _all_did(self, process: Process, k: int, what: str, own_stage: bool) -> bool:
        """Whether all members of its generation got that far (the dead ones too: it was before they died)."""
        assert process.go is not None
        names = [n for n in process.go["members"] if not own_stage or n[-1] == process.name[-1]]
        others = [self.processes[name] for name in names]
        return all(getattr(p, what) >= k and p.generation == process.generation for p in others)

    @rule(names=ORDERS, actions=some.integers(1, 20))
    def work(self, names: list[str], actions: int) -> None:
        """So many single actions, shared out in this order: some workers get further than others."""
        for _ in range(actions):
            able = [self.processes[name] for name in names if self._can_work(self.processes[name])]
            if not able:
                return
            self._act(able[0])
            names = [*names[1:], names[0]]

    def _can_work(self, process: Process) -> bool:
        waits = process.computed > process.stepped
        return process.running and (not waits or self._can_hold(process) or self._can_step(process))

    def _act(self, process: Process) -> None:
        if self._can_step(process):
            process.stepped = process.verdict = process.holds
            process.outbox.append(inputs.Committed(process.member.incarnation, process.stepped, 1.0))
        elif self._can_hold(process):
            process.holds = process.stepped + 1
        else:
            process.computed = process.stepped + 1
            assert process.go is not None
            again = process.computed == process.go["resume"]["next"]
            process.begun = process.computed, process.attempt if again else 1

    # Messages arrive

    @rule(names=ORDERS, most=some.integers(1, 3))
    def messages_flow(self, names: list[str], most: int) -> None:
        """Up to `most` messages of each connection arrive, both ways; plans are made."""
        while self.plans:
            self._plan(self.plans.pop())
        self._all_carried_out()
        for name in names:
            process = self.processes[name]
            for _ in range(most):
                if process.outbox:
                    self._feed(process.outbox.popleft())
                    self._all_carried_out()
                if process.inbox and process.alive:
                    self._hear(process)

    @precondition(lambda self: any(p.outbox for p in self.processes.values()))
    @rule(data=some.data())
    def coordinator_hears(self, data: Any) -> None:
        process = self._some(data, [p for p in self.processes.values() if p.outbox])
        self._feed(process.outbox.popleft())
        if _pick(data, [False, True]):
            self._all_carried_out()

    @precondition(lambda self: self.todo)
    @rule()
    def coordinator_acts(self) -> None:
        self._carry_out()

    @precondition(lambda self: self._those(lambda p: p.inbox))
    @rule(data=some.data())
    def worker_hears(self, data: Any) -> None:
        self._hear(self._some(data, self._those(lambda p: p.inbox)))

    def _hear(self, process: Process) -> None:
        message = process.inbox.popleft()
        if message["type"] == "end":
            process.ended, process.running = True, False
        elif message["type"] == "stop" and message["generation"] > process.stop:
            process.stop = message["generation"]
            process.running = False
            process.computed = process.stepped
            process.outbox.append(inputs.Reported(process.member.incarnation, process.stop, process.report()))
        elif message["type"] == "go" and message["generation"] >= max(process.stop, process.generation + 1):
            self._reconcile(process, message)

    def _reconcile(self, process: Process, go: dict[str, Any]) -> None:
        resume = go["resume"]
        process.go, process.generation, process.attempt = go, go["generation"], resume["attempt"]
        target = resume["target"]
        if process.holds < target and not self.processes[resume["copies"][process.name]].alive:
            return  # the copy never comes: this worker waits for the next stop
        process.holds, process.computed = target, target
        if process.stepped < target:
            if resume["verdict"] is None:
                process.stepped = target - 1
                process.running = True  # it steps when all hold, as ever
                return
            process.stepped = target
            process.outbox.append(inputs.Committed(process.member.incarnation, target))
        process.running = True
        process.outbox.append(inputs.Resumed(process.member.incarnation, go["generation"], self.now))

    @precondition(lambda self: self.plans)
    @rule(data=some.data())
    def plan_is_made(self, data: Any) -> None:
        generation = self.plans.pop(_pick(data, range(len(self.plans))))
        self._plan(generation)

    def _plan(self, generation: int) -> None:
        self._feed(inputs.Planned(generation, {**PLAN, "generation": generation}, 1.0))

    # What goes wrong

    @precondition(lambda self: self.troubles and self.state.generation and self._those(lambda p: True))
    @rule(data=some.data())
    def worker_dies(self, data: Any) -> None:
        self.troubles -= 1
        process = self._some(data, self._those(lambda p: True))
        process.alive = process.running = False
        member = process.member
        self.exits.append(inputs.Exited(member.rank, member.pid, -9, self.now, move=process.move))

    @precondition(lambda self: self.told_exits < len(self.exits))
    @rule()
    def exit_is_reported(self) -> None:
        self._feed(self.exits[self.told_exits])
        self.told_exits += 1

    @precondition(lambda self: self.troubles and self.state.generation)
    @rule(data=some.data(), both=some.booleans())
    def worker_is_suspected(self, data: Any, both: bool) -> None:
        """Also of a worker that is well: it may have been slow. It goes on and does not know."""
        self.troubles -= 1
        names = sorted(self.processes)
        first = _pick(data, range(len(names)))
        chosen = names[first : first + 1 + both]
        losses = tuple(inputs.Loss(self.processes[name].member.incarnation, FailureKind.FROZEN) for name in chosen)
        self._feed(inputs.Lost(losses, self.now - 2))

    @precondition(lambda self: self.troubles and self.state.generation)
    @rule(data=some.data())
    def worker_is_stuck(self, data: Any) -> None:
        """Its training thread only; whoever is the last of its stage is spared, so that this ends no job."""
        self.troubles -= 1
        process = self.processes[_pick(data, sorted(self.processes))]
        before = self.state.phase is st.Phase.ENDED
        self._feed(inputs.Lost((inputs.Loss(process.member.incarnation, FailureKind.STALLED),), self.now - 12))
        assert (self.state.phase is st.Phase.ENDED) is before

    @precondition(lambda self: self.troubles and self._those(lambda p: p.running))
    @rule(data=some.data())
    def connection_between_workers_breaks(self, data: Any) -> None:
        """One of them notices, and waits for a decision."""
        self.troubles -= 1
        process = self._some(data, self._those(lambda p: p.running))
        process.running = False
        process.outbox.append(inputs.Hinted(process.member.incarnation, process.generation, "reset by peer"))
        process.hint = process.outbox[-1]

    @precondition(lambda self: self.hinted)
    @rule(data=some.data())
    def no_loss_follows(self, data: Any) -> None:
        hinted = self.hinted.pop(_pick(data, range(len(self.hinted))))
        self._feed(inputs.NoLoss(hinted.generation, hinted.since))

    @precondition(lambda self: self.troubles and self.state.generation)
    @rule()
    def message_is_lost(self) -> None:
        self.troubles -= 1
        self._feed(inputs.Stuck(self.state.generation, dict.fromkeys(self.state.members, "F0.1"), self.now - 12))

    @precondition(lambda self: self.troubles and self.limits)
    @rule(data=some.data())
    def reports_are_late(self, data: Any) -> None:
        self.troubles -= 1
        self._feed(inputs.ReportsLate(self.limits.pop(_pick(data, range(len(self.limits))))))

    @precondition(lambda self: self.troubles and self._those(lambda p: True))
    @rule(data=some.data())
    def connection_breaks(self, data: Any) -> None:
        self.troubles -= 1
        self._connect(self._some(data, self._those(lambda p: True)))

    @precondition(lambda self: self.troubles and self.end is None)
    @rule()
    def coordinator_dies_and_comes_back(self) -> None:
        """Whatever was decided but not carried out is forgotten; all connections are new."""
        self.troubles -= 1
        self.todo.clear()
        self.plans.clear()
        self.limits.clear()
        self.hinted.clear()
        self.told_exits = 0
        self.state = restore(PIPELINES * STAGES, self.journal, self.told)
        for event in untold(self.journal, self.told):
            self._tell(event)
        if self.state.ended is not None:
            self.end = do.End(*self.state.ended)  # written down; it is told to whoever comes back
        elif self.state.generation:
            self._feed(inputs.Restarted())
        for process in self._those(lambda p: True):
            self._connect(process)

    # What must always hold

    @invariant()
    def the_fenced_are_no_members(self) -> None:
        assert not {m.incarnation for m in self.state.members.values()} & self.state.fenced

    @invariant()
    def a_job_ends_only_for_want_of_a_stage_or_of_a_network(self) -> None:
        if self.end is not None:
            assert self.end.status == 1
            last = [record for record in self.journal if record["kind"] == "decided"][-2:]
            worn_out = "have not helped" in self.end.message and all(r["events"][-1].get("reason") for r in last)
            assert worn_out or "has lost its last worker" in self.end.message, self.end.message

    def teardown(self) -> None:
        """Left alone, every job comes to train again or ends; a dead worker is found at last."""
        before = max(process.stepped for process in self.processes.values())
        for _ in range(10):
            self._all_carried_out()
            while self.told_exits < len(self.exits):
                self.exit_is_reported()
                self._all_carried_out()
            self.messages_flow(NAMES, 100)
            while self.hinted:
                self.no_loss_follows(random.Random(0))
                self.messages_flow(NAMES, 100)
            self.work(NAMES, 36)
            if self.end is not None:
                break
        self.messages_flow(NAMES, 100)
        if self.end is None:
            assert self.state.phase is st.Phase.TRAINING, self.state
            members = {process.name for process in self._those(lambda p: p.running)}
            assert set(self.state.members) == members
            stepped = [self.processes[name].stepped for name in members]
            assert max(stepped) - min(stepped) <= 1, stepped
            assert min(stepped) > before + 5, "training does not go on"
            assert self.committed[-1] == min(stepped)
        self.the_fenced_are_no_members()
        self.a_job_ends_only_for_want_of_a_stage_or_of_a_network()
        decided = [event["generation"] for event in self.told if event["event"] == "decided"]
        assert decided == [generation for generation in self.decided if generation > 1], "told once, in order"


Protocol.TestCase.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestProtocol = Protocol.TestCase


def _orders(dice: random.Random) -> list[str]:
    return dice.sample(NAMES, len(NAMES))


ACTS: tuple[tuple[int, Callable[[Protocol], Any], Callable[[Protocol, random.Random], None]], ...] = (
    (4, lambda p: True, lambda p, dice: p.work(_orders(dice), dice.randint(1, 30))),
    (4, lambda p: True, lambda p, dice: p.messages_flow(_orders(dice), dice.randint(1, 3))),
    (4, lambda p: any(q.outbox for q in p.processes.values()), lambda p, dice: p.coordinator_hears(dice)),
    (4, lambda p: p.todo, lambda p, dice: p.coordinator_acts()),
    (4, lambda p: p._those(lambda q: q.inbox), lambda p, dice: p.worker_hears(dice)),
    (2, lambda p: p.plans, lambda p, dice: p.plan_is_made(dice)),
    (2, lambda p: p.told_exits < len(p.exits), lambda p, dice: p.exit_is_reported()),
    (1, lambda p: p.troubles and p._those(lambda q: True), lambda p, dice: p.worker_dies(dice)),
    (1, lambda p: p.troubles, lambda p, dice: p.worker_is_suspected(dice, dice.random() < 0.2)),
    (1, lambda p: p.troubles, lambda p, dice: p.worker_is_stuck(dice)),
    (1, lambda p: p.troubles and p._those(lambda q: q.running),
     lambda p, dice: p.connection_between_workers_breaks(dice)),
    (2, lambda p: p.hinted, lambda p, dice: p.no_loss_follows(dice)),
    (1, lambda p: p.troubles, lambda p, dice: p.message_is_lost()),
    (1, lambda p: p.troubles and p.limits, lambda p, dice: p.reports_are_late(dice)),
    (1, lambda p: p.troubles and p._those(lambda q: True), lambda p, dice: p.connection_breaks(dice)),
    (1, lambda p: p.troubles and p.end is None, lambda p, dice: p.coordinator_dies_and_comes_back()),
)
"""What may happen: its weight, when it may, and how. Hypothesis finds small cases, these runs get far."""


@pytest.mark.parametrize("tens", range(20))
def test_seeded_campaigns(tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        dice = random.Random(seed)
        job = Protocol()
        job.all_become_ready(formed=True, troubles=dice.randint(1, 6))
        for _ in range(80):
            possible = [act for act in ACTS if act[1](job)]
            ((_, _, act),) = dice.choices(possible, [act[0] for act in possible])
            act(job, dice)
            job.the_fenced_are_no_members()
            job.a_job_ends_only_for_want_of_a_stage_or_of_a_network()
        job.teardown()
