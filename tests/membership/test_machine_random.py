"""Random interleavings of the whole protocol on paper: deaths, silence, stalls, broken connections between workers,
wrong guesses, delays and coordinator crashes.

Workers do what their `Standing` says, the coordinator is the real state machine, and messages travel in order on each
connection and are lost with it. An iteration is computed when all have stepped the one before; it can be held once all
members of the stage have contributed to its sum, which takes the verdict before; its verdict can be known once all
members hold it. Whatever is decided must be right for what the workers really hold.
"""

from __future__ import annotations

import copy
import json
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs
from megatron_recycle.membership import state as st
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.machine import step
from megatron_recycle.membership.promises import Offer
from megatron_recycle.membership.protocol import TO_WORKER, Go
from megatron_recycle.membership.records import restore, untold
from megatron_recycle.membership.report import Report
from megatron_recycle.membership.standing import Epoch, Reconciliation, Standing
from megatron_recycle.membership.verdict import Verdict
from megatron_recycle.plan import Action
from tests.membership.cluster import PLAN, described
from tests.membership.paper import GUESS, Paper, Update, verdict
from tests.seeds import examples, seeds

PIPELINES, STAGES = 3, 2
NAMES = [f"{d}:{s}" for d in range(PIPELINES) for s in range(STAGES)]
ORDERS = some.permutations(NAMES)
GRID = {"stages": STAGES, "microbatches": [1] * PIPELINES}


def _pick(source: Any, items: Sequence[Any]) -> Any:
    """One of `items`, by hypothesis's data or by a random number generator."""
    return source.choice(items) if isinstance(source, random.Random) else source.draw(some.sampled_from(items))


@dataclass
class Process:
    """A worker as it really is. `inbox` and `outbox` are its connection."""

    member: st.Member
    staggered: bool = True
    alive: bool = True
    ready: bool = False
    stop: int = 0
    move: int = 0
    running: bool = False
    """False while it stands still: before the first go, and from a stop until it goes on."""
    todo: Reconciliation | None = None
    """What is still to be done before it goes on; None: nothing."""
    gave: int = 0
    """The generation in which its peers have its reduced gradient, as far as they need it."""
    level: int = 0
    """The generation in which it stands where all go on."""
    contributed: int = -1
    """The last iteration that this worker has added its part to the sum of."""
    told: dict[int, int] = field(default_factory=dict)
    """Iteration held -> the offer that was promised with it."""
    offer: Offer | None = None
    committed: inputs.Committed | None = None
    """The last that it has said."""
    stands: inputs.Boundary | None = None
    go: Go | None = None
    ended: bool = False
    hint: inputs.Hinted | None = None
    """The last one, told again on every connection."""
    inbox: deque[Any] = field(default_factory=deque)
    outbox: deque[Any] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.paper = Paper(self.member.worker, self.staggered)

    @property
    def name(self) -> str:
        return self.member.worker

    @property
    def standing(self) -> Standing:
        return self.paper.standing

    @property
    def generation(self) -> int:
        return self.standing.epoch.generation

    @property
    def stepped(self) -> int:
        return self.standing.stepped

    @property
    def holds(self) -> int:
        return self.standing.holds

    @property
    def computed(self) -> int:
        """The last iteration all actions of which are done."""
        standing = self.standing
        return standing.stepped + ((standing.under_way and bool(standing.done)) or standing.holds > standing.stepped)

    @property
    def at_boundary(self) -> bool:
        return self.stands is not None and self.stands.generation == self.generation

    def report(self) -> Report:
        return self.standing.report()


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
        self.dead: list[st.Member] = []
        self.decided: list[int] = []
        self.announced: dict[int, tuple[int, int]] = {}
        self.committed: list[int] = []
        self.told: list[dict[str, Any]] = []
        self.end: do.End | None = None
        self.troubles = 0
        self.staggered = True
        self.rights: dict[int, float] = {}
        self.final: list[Update] = []
        self.attempts: dict[tuple[Epoch, int], int] = {}
        """Groups and iteration -> the attempt that was begun, first by one and then by the others."""
        self.dice = random.Random(0)
        self.works = self._can_begin, self._can_compute, self._can_contribute, self._can_hold, self._can_learn
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
        assert self.state.absent.fenced >= before.absent.fenced
        self.todo.extend(sorted(decisions, key=lambda one: not isinstance(one, do.Record)))  # all of that first

    def _carry_out(self) -> None:
        decision = self.todo.popleft()
        if isinstance(decision, do.Note):
            self.journal.append(json.loads(json.dumps(decision.record.to_json())))
        elif isinstance(decision, do.Record):
            self._stored(json.loads(json.dumps(decision.record.to_json())))
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
        message = decision.message
        if not isinstance(message, do.StopAll):
            message = TO_WORKER.read(json.loads(json.dumps(message.to_json())))
        if message.type in ("stop", "go"):
            kind = "decided" if message.type == "stop" else "go"
            assert any(r["kind"] == kind and r["generation"] == message.generation for r in self.journal), (
                "announced before it was stored"
            )
        if message.type == "go":
            self._check_go(message)
        for process in self.processes.values():
            if process.member.incarnation in decision.to:
                process.inbox.append(message)

    def _check_go(self, go: Go) -> None:
        """The resume point is one that the members really can reach. Standing still, they are as they reported."""
        resume, members = go.resume, [self.processes[name] for name in go.members]
        point = (resume.next, resume.attempt)
        if go.generation in self.announced:
            assert self.announced[go.generation] == point
            return  # told again after a reconnect; some may be on their way already
        assert go.plan.digest == str(go.generation), "the plan of another membership"
        target = resume.target
        for stage in range(STAGES):
            assert any(p.holds >= target for p in members if p.member.worker.endswith(f":{stage}"))
        todo = [copy.deepcopy(p.standing).reconciliation(resume) for p in members]
        assert len({each.anew for each in todo}) == 1, "a commit takes all members"
        assert not (todo[0].anew and go.resume.joined), "who comes in has no part in a commit"
        for process in members:
            assert process.standing.committed <= target, "a step would be lost"
            if process.holds < target:
                source = self.processes[resume.copies[process.name]]
                assert source.holds >= target and source.name.split(":")[1] == process.name.split(":")[1]
        if resume.verdict is not None:
            assert resume.verdict == self._verdict(target), "not what was found"
        assert max(p.holds for p in members) - target <= 1
        self.announced[go.generation] = point

    def _tell(self, event: Mapping[str, Any]) -> None:
        self.told.append(dict(event))
        if event["event"] == "committed":
            self._told_committed(event["iteration"])

    def _told_committed(self, iteration: int) -> None:
        assert iteration == (self.committed[-1] + 1 if self.committed else 0), "committed twice or out of order"
        self.committed.append(iteration)
        live = [p for p in self.processes.values() if p.member.incarnation not in self.state.absent.fenced]
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
        if process.committed is not None:
            process.outbox.append(process.committed)
        if process.hint is not None:
            process.outbox.append(process.hint)

    def _say_ready(self, process: Process) -> None:
        process.outbox.append(inputs.Ready(process.member.incarnation, described({"grid": GRID}), process.report()))

    def _some(self, data: Any, processes: list[Process]) -> Process:
        return self.processes[_pick(data, sorted(process.name for process in processes))]

    def _those(self, wanted: Any) -> list[Process]:
        return [process for process in self.processes.values() if process.alive and wanted(process)]

    # What happens in the workers

    @initialize(formed=some.sampled_from([True, True, True, False]), troubles=some.integers(2, 9),
                staggered=some.sampled_from([True, True, False]), seed=some.integers(0, 9))
    def all_become_ready(self, formed: bool, troubles: int, staggered: bool = True, seed: int = 0) -> None:
        """`troubles` is how much will go wrong; much of it would only end every job soon."""
        self.troubles, self.staggered, self.dice = troubles, staggered, random.Random(seed)
        for process in self.processes.values():
            process.paper = Paper(process.name, staggered)
            process.ready = True
            self._say_ready(process)
        while formed and not all(process.running for process in self.processes.values()):
            self.messages_flow(NAMES, 100)
            for process in self.processes.values():
                if process.todo is not None and self._can_work(process):
                    self._act(process)

    def _verdict(self, iteration: int) -> Verdict:
        """What is found once all hold ``iteration``, the same whoever holds it."""
        return verdict(iteration, self.rights.setdefault(iteration, self.dice.choice([GUESS] * 4 + [0.5])))

    def _others(self, process: Process, own_stage: bool) -> list[Process]:
        """The members of its generation."""
        assert process.go is not None
        return [self.processes[name] for name in process.go.members if not own_stage or name[-1] == process.name[-1]]

    def _all(self, process: Process, what: Callable[[Process], Any], own_stage: bool = False) -> bool:
        """Whether ``what`` is true of all members of its generation (the dead ones too: it was before they died)."""
        return all(other.generation == process.generation and what(other) for other in self._others(process, own_stage))

    def _has_met(self, process: Process) -> bool:
        """Whether all members have come to the groups that it makes; who has left for the next ones was there."""
        return self._all(process, lambda other: other.standing.epoch >= process.standing.epoch)

    def _can_begin(self, process: Process) -> bool:
        standing = process.standing
        k = standing.stepped + 1
        return (standing.may_begin and not process.at_boundary and self._has_met(process)
                and (not standing.promises.ends_before(k) or standing.held is None))

    def _can_compute(self, process: Process) -> bool:
        """With activations and gradients of all, who have stepped what is before."""
        standing, stepped = process.standing, process.stepped
        return standing.under_way and not standing.done and self._all(process, lambda other: other.stepped >= stepped)

    def _can_contribute(self, process: Process) -> bool:
        standing = process.standing
        return bool(standing.done) and standing.may_reduce and process.contributed == standing.stepped

    def _can_hold(self, process: Process) -> bool:
        k = process.stepped + 1
        return (process.contributed == k > process.holds
                and self._all(process, lambda other: other.contributed >= k, own_stage=True))

    def _can_learn(self, process: Process) -> bool:
        """All have added to the commit what they hold."""
        held = process.standing.held
        return held is not None and self._all(process, lambda other: other.holds >= held)

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
        if process.todo is not None:
            return process.alive and not process.ended and self._can_reconcile(process, process.todo)
        return process.running and any(can(process) for can in self.works)

    def _act(self, process: Process) -> None:
        if process.todo is not None:
            self._reconcile(process, process.todo)
            return
        what = self.dice.choice([can for can in self.works if can(process)])  # a verdict comes early or late
        k, standing = process.stepped + 1, process.standing
        if what == self._can_learn:
            self._learn(process)
        elif what == self._can_contribute:
            process.contributed = k
        elif what == self._can_hold:
            process.told[k] = standing.promises.promise(k, process.offer)
            process.paper.hold(k)
        elif what == self._can_begin and standing.promises.ends_before(k):
            process.stands = inputs.Boundary(process.member.incarnation, process.generation, k, self.now)
            process.outbox.append(process.stands)
        elif what == self._can_compute:
            standing.did(Action("F", 0, 0))
        else:
            standing.begin(k)
            attempt = self.attempts.setdefault((standing.epoch, k), standing.attempt)
            assert attempt == standing.attempt, "workers would not understand each other's messages"

    def _learn(self, process: Process, go_on: bool = True) -> None:
        """The verdict on what it holds arrives."""
        held, standing = process.standing.held, process.standing
        assert held is not None and process.go is not None
        promised = {self.processes[name].told.get(held, 0) for name in process.go.members}
        wrong = process.paper.settle(self._verdict(held))
        process.committed = inputs.Committed(process.member.incarnation, process.generation, held, 1.0)
        process.outbox.append(process.committed)
        if go_on and promised != {0} and len(promised) == 1:
            standing.promises.agreed(held)
        if go_on and wrong:
            standing.roll_back()
            standing.renew()

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
        if message.type == "end":
            process.ended, process.running = True, False
        elif message.type == "stop" and message.generation > process.stop:
            process.stop = message.generation
            self._stand_still(process)
            process.outbox.append(inputs.Reported(process.member.incarnation, process.stop, process.report()))
        elif message.type == "go" and message.generation >= max(process.stop, process.generation + 1):
            self._goes(process, message)
        elif message.type == "offer" and message.generation == process.generation:
            process.offer = message

    def _stand_still(self, process: Process) -> None:
        """A verdict that has arrived is taken in; one that is known to others may have, or not."""
        if process.running and self._can_learn(process) and self.dice.random() < 0.5:
            self._learn(process, go_on=False)
        process.standing.give_up()
        process.running, process.todo = False, None

    def _goes(self, process: Process, go: Go) -> None:
        process.go = go
        process.standing.join(go.generation)
        process.told, process.offer, process.stands = {}, None, None
        process.contributed = process.holds
        process.todo = process.standing.reconciliation(go.resume)

    def _can_reconcile(self, process: Process, todo: Reconciliation) -> bool:
        """Whether the next step of its recovery can be made: it waits for all to connect, for the peer that it takes a
        gradient from, and for the verdict."""
        assert process.go is not None
        generation, target = process.generation, process.go.resume.target
        if todo.enter:
            return self._all(process, lambda other: other.level == generation or other is process or (
                other.todo is not None and other.todo.enter))
        if process.gave < generation:
            return self._all(process, lambda other: True)
        if process.holds < target:
            source = self.processes[process.go.resume.copies[process.name]]
            return source.generation == generation and source.gave == generation
        if todo.anew and process.standing.committed < target:
            return self._all(process, lambda other: other.gave == generation and other.holds >= target)
        return True

    def _reconcile(self, process: Process, todo: Reconciliation) -> None:
        assert process.go is not None
        resume = process.go.resume
        standing, target = process.standing, resume.target
        if todo.enter:
            peers = [other for other in self._others(process, own_stage=True) if other.level == process.generation]
            process.paper.enter(peers[0].paper)
        elif process.gave < process.generation:
            process.paper.go_back(resume)
            process.gave = process.generation
            return
        elif process.holds < target:
            standing.receive(target)
            return
        elif standing.committed < target:
            assert todo.anew or todo.verdict is not None
            process.paper.settle(todo.verdict or self._verdict(target))
            process.committed = inputs.Committed(process.member.incarnation, process.generation, target)
            process.outbox.append(process.committed)
        standing.go_on(resume)
        process.level, process.todo, process.running = process.generation, None, True
        process.contributed = target
        self._resumes(process)

    def _resumes(self, process: Process) -> None:
        process.outbox.append(inputs.Resumed(process.member.incarnation, process.generation, self.now))

    @precondition(lambda self: self.plans)
    @rule(data=some.data())
    def plan_is_made(self, data: Any) -> None:
        generation = self.plans.pop(_pick(data, range(len(self.plans))))
        self._plan(generation)

    def _plan(self, generation: int) -> None:
        self._feed(inputs.Planned(generation, replace(PLAN, digest=str(generation)), 1.0))

    # What goes wrong

    @precondition(lambda self: self.troubles and self.state.generation and self._those(lambda p: True))
    @rule(data=some.data())
    def worker_dies(self, data: Any) -> None:
        self.troubles -= 1
        process = self._some(data, self._those(lambda p: True))
        process.alive = process.running = False
        process.todo = None
        member = process.member
        self.dead.append(member)
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
        self._stand_still(process)
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
        self.state = restore(PIPELINES * STAGES, self.journal)
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
    def what_is_final_stays(self) -> None:
        for process in self.processes.values():
            done = process.paper.updates[:process.standing.committed + 1]
            assert done == self.final[:len(done)] or self.final == done[:len(self.final)]
            self.final = max(self.final, done, key=len)
            assert [iteration for iteration, _ in process.paper.updates] == list(range(process.stepped + 1))

    @invariant()
    def the_fenced_are_no_members(self) -> None:
        assert not {m.incarnation for m in self.state.members.values()} & self.state.absent.fenced

    @invariant()
    def a_job_ends_only_for_want_of_a_stage_or_of_a_network(self) -> None:
        if self.end is not None:
            assert self.end.status == 1
            last = [record for record in self.journal if record["kind"] == "decided"][-2:]
            worn_out = "have not helped" in self.end.message and all(r["events"][-1].get("reason") for r in last)
            assert worn_out or "has lost its last worker" in self.end.message, self.end.message

    def check_always(self) -> None:
        """As hypothesis does after each step of its own runs."""
        self.what_is_final_stays()
        self.the_fenced_are_no_members()
        self.a_job_ends_only_for_want_of_a_stage_or_of_a_network()

    def teardown(self) -> None:
        """Left alone, every job comes to train again or ends; a dead worker is found at last."""
        before = max(process.stepped for process in self.processes.values())
        for _ in range(10):
            self._all_carried_out()
            while self.told_exits < len(self.exits):
                self.exit_is_reported()
                self._all_carried_out()
            self.messages_flow(NAMES, 100)
            # Also one whose end was told before its first words had come: it is silent from then on.
            for member in self.dead:
                if member in (self.state.members.get(member.worker), self.state.arrivals.joiners.get(member.worker)):
                    self._feed(inputs.Lost((inputs.Loss(member.incarnation, "frozen"),), self.now))
            self.messages_flow(NAMES, 100)
            while self.hinted:
                self.no_loss_follows(random.Random(0))
                self.messages_flow(NAMES, 100)
            self.work(NAMES, 48)
            if self.end is not None:
                break
        self.messages_flow(NAMES, 100)
        if self.end is None:
            assert self.state.phase is st.Phase.TRAINING, self.state
            members = {process.name for process in self._those(lambda p: p.running)}
            assert set(self.state.members) == members
            self.what_is_final_stays()
            stepped = [self.processes[name].stepped for name in members]
            assert max(stepped) - min(stepped) <= 1, stepped
            assert min(stepped) > before + 5, "training does not go on"
            assert self.committed[-1] == min(self.processes[name].standing.committed for name in members)
        self.the_fenced_are_no_members()
        self.a_job_ends_only_for_want_of_a_stage_or_of_a_network()
        decided = [event["generation"] for event in self.told if event["event"] == "decided"]
        assert decided == [generation for generation in self.decided if generation > 1], "told once, in order"


Protocol.TestCase.settings = settings(
    max_examples=examples(20), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestProtocol = Protocol.TestCase


def _orders(dice: random.Random) -> list[str]:
    return dice.sample(NAMES, len(NAMES))


Jobs = TypeVar("Jobs", bound=Protocol)
Act = tuple[int, Callable[[Any], Any], Callable[[Any, random.Random], None]]
"""What may happen: its weight, when it may, and how."""

ACTS: tuple[Act, ...] = (
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
"""Of `Protocol`. Hypothesis finds small cases, these runs get far."""


def campaign(kind: type[Jobs], seed: int, acts: Sequence[Act] = ACTS, steps: int = 80) -> Jobs:
    """A job of ``kind`` to which those of the ``acts`` happen that ``seed`` says; its invariants hold all the time."""
    dice = random.Random(seed)
    job = kind()
    job.all_become_ready(True, dice.randint(1, 6), staggered=dice.random() < 0.8, seed=seed)
    for _ in range(steps):
        possible = [act for act in acts if act[1](job)]
        ((_, _, act),) = dice.choices(possible, [act[0] for act in possible])
        act(job, dice)
        job.check_always()
    job.teardown()
    return job


@pytest.mark.parametrize("tens", seeds(6))
def test_seeded_campaigns(tens: int) -> None:
    for seed in range(5 * tens, 5 * tens + 5):
        campaign(Protocol, seed)
