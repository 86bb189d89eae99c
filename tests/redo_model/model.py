"""A job on paper, in which chance decides what happens next: the real planner, the real membership machine and the real
`Standing`, with plain values instead of tensors, and without processes, threads or time.

`play` runs one job from its seed and raises `Violation` where a rule of "redo only lost work" is broken
(docs/between-iterations.md). It says what led there.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from msgspec import structs

from megatron_recycle.membership import Process as Name
from megatron_recycle.membership.report import Report
from megatron_recycle.plan import Action, Plan, Problem, Worker
from megatron_recycle.plan.plan_file import PlanFile
from tests.redo_model import values
from tests.redo_model.coordinator import Asked, Coordinator, problem_of
from tests.redo_model.process import PASS, Life, Process, Rules, Violation
from tests.redo_model.values import Reference, Sums
from tests.redo_model.wires import Wires

STEPS = 50_000
"""More than any job takes."""
OFTEN = ("before", "waits", "made", "did", "parts")
LABELS = (*OFTEN, "script", "begin", "opened", "reduce", "tie", "loss", "reduced", "stepped", "acknowledgement",
          "close", "closed", "verdict", "rejoining", "stop", "retired", "go", "connect", "copy", "anew", "resumed",
          "agreement", "rolling back", "end", "lent layers", "lent sum", "norms", "gather", "gathered", "lacking",
          "adopt")
"""Where a process may die."""


@dataclass(frozen=True)
class Shape:
    """A job.

    Attributes:
        asked: the problem of the whole grid.
        iterations: how many.
        wrong: those in which a guess is wrong.
        tied: stages with a tied parameter.
        parts: processes of a worker.
        closes: whether scripts may leave an iteration before it is committed.
        hosts: by worker.
        spoils: whether a worker that waits for a message when its generation ends has to throw its sums away, as where
            an abort ends receives as if they had come. A message counts as used once its action has ended on the
            device. So nobody loses what was made of a closed stage's messages: who has used them all does not wait.
        lent: micro-batches whose first layer of chunk 1 is run by workers of chunk 0.
    """

    asked: Asked
    iterations: int = 3
    wrong: frozenset[int] = frozenset()
    tied: tuple[int, ...] = ()
    parts: int = 1
    closes: bool = True
    hosts: tuple[tuple[Worker, int], ...] = ()
    spoils: bool = False
    lent: frozenset[tuple[int, int]] = frozenset()

    @property
    def problem(self) -> Problem:
        return problem_of(self.asked)


@dataclass(frozen=True)
class Kill:
    """A death: when a process comes to ``label`` for the ``nth`` time in the whole job, or (without a label) after so
    many steps. ``host``: all workers of its host die with it."""

    label: str
    nth: int
    host: bool = False


@dataclass(frozen=True)
class Case:
    """A job with its failures. The same case runs the same way."""

    shape: Shape
    kills: tuple[Kill, ...]
    seed: int


@lru_cache(maxsize=256)
def _reference(shape: Shape) -> Reference:
    shards = len(shape.asked.microbatches) if shape.asked.copies else 0
    return values.reference(shape.problem, shape.iterations, shape.wrong, shape.lent, shape.tied, shards)


def _routes(plan: Plan, _: Worker) -> Mapping[tuple[int, int, int], Worker]:
    return plan.route()


@dataclass
class Outcome:
    """What came of a case: how many steps it took, its events, how often an iteration began anew since that takes less
    time, and by iteration how many actions were run that a live worker had done already."""

    steps: int
    events: Counter[str]
    begun_anew: int
    twice: Counter[int]


class Job:
    """One job.

    Args:
        case: what is run.
        rules: that hold.
        trace: whether every step is kept, to be told.
    """

    def __init__(self, case: Case, rules: Rules, trace: bool = False) -> None:
        self.shape, self.rules, self.problem = case.shape, rules, case.shape.problem
        self.draw = random.Random(case.seed)
        self.repeated: set[int] = set()
        self.story: list[str] = []
        self._trace = trace
        self._wires: dict[tuple[int, int], Wires] = {}
        self._plans: dict[str, Plan] = {}
        self._known: dict[Any, Any] = {}
        self._by: dict[tuple[int, int, int], int] = {}
        """By iteration, part and chunk, the parameters that activations of what is committed were made with."""
        self._latest: Wires | None = None
        self._mail: dict[str, list[Mapping[str, Any]]] = {}
        self._reports: list[tuple[str, int, Report]] = []
        self._exits: list[str] = []
        self._kills = list(case.kills)
        self._ran: dict[tuple[int, tuple[str, int, int, int]], set[str]] = {}
        self._twice: Counter[int] = Counter()
        self._steps, self._ended = 0, False
        self._told = 0
        self._passed: Counter[str] = Counter()
        parts = range(self.shape.parts) if self.shape.parts > 1 else (None,)
        names = [str(Name(worker, part)) for worker in self.problem.grid.workers() for part in parts]
        hosts = dict(self.shape.hosts)
        self.processes = {name: Process(self, name) for name in names}
        self._lives: dict[str, Life] = {}
        self._pauses: dict[str, Any] = {}
        self._slow = self._slow_ones(names)
        self._names = names
        self.lent = frozenset((d, m, 0) for d, m in self.shape.lent)
        self.coordinator = Coordinator(
            self.shape.asked, {name: f"h{hosts.get(Name.parse(name).worker, name)}" for name in names},
            self._post, self.shape.parts, self._of_parts)
        for name, process in self.processes.items():
            self._lives[name] = process.life()
            self._pauses[name] = next(self._lives[name])

    def _slow_ones(self, names: list[str]) -> set[str]:
        """Processes that seldom get a turn: some, or those of a stage, or all of a stage but one."""
        how, stage = self.draw.randrange(4), self.draw.randrange(self.problem.grid.stages)
        if not how:
            return {name for name in names if self.draw.random() < 0.3}
        mine = [name for name in names if Name.parse(name).worker.stage == stage]
        return set(mine if how < 3 else mine[1:])

    def _of_parts(self, reports: Sequence[Report]) -> Sequence[Report]:
        """The reports of a worker's parts, as the coordinator hears them; with a rule left out not as they are."""
        kept = [report.kept for report in reports]
        if not self.rules.parts_alike:
            return [structs.replace(report, kept=kept[0]) for report in reports]
        if not self.rules.parts_level and any(each != kept[0] for each in kept):
            return [structs.replace(report, kept=()) for report in reports]
        return reports

    # ---- what processes ask

    def watches(self, label: str) -> bool:
        """Whether somebody may die there, where nothing else can be told apart."""
        return any(kill.label == label for kill in self._kills)

    def wires(self, generation: int, renewal: int, members: tuple[str, ...]) -> Wires:
        """The process groups of an epoch; nobody uses older ones."""
        found = self._wires.get((generation, renewal))
        if found is None:
            found = self._latest = self._wires[generation, renewal] = Wires(members)
        return found

    def plan(self, told: PlanFile) -> Plan:
        found = self._plans.get(told.digest)
        if found is None:
            found = self._plans[told.digest] = Plan.from_file(told)
        return found

    def of_plan(self, function: Callable[[Plan, Worker], Any], plan: Plan, worker: Worker) -> Any:
        key = function, id(plan), worker
        if key not in self._known:
            self._known[key] = function(plan, worker)
        return self._known[key]

    def routes(self, plan: Plan) -> Mapping[tuple[int, int, int], Worker]:
        return self.of_plan(_routes, plan, Worker(0, 0)) if self.lent else {}

    def closes_with(self, stage: int) -> tuple[int, ...]:
        """The stages that are closed together with ``stage``."""
        return self.shape.tied if stage in self.shape.tied and self.rules.groups else (stage,)

    def closed_where(self, stage: int) -> list[int]:
        """The stages that are closed where ``stage`` is: a helper's is closed after the one whose layers it runs."""
        lends = self.lent and self.rules.lent_closing and stage == 0
        return sorted({*self.closes_with(stage), *((1,) if lends else ())})

    def report(self, process: Process, generation: int, report: Report) -> None:
        self._reports.append((process.name, generation, Report.from_json(json.loads(json.dumps(report.to_json())))))

    @property
    def all_finished(self) -> bool:
        """All scripts have ended, and nobody has to go on without somebody."""
        if self._ended:
            return True
        alive = [self.processes[name] for name in self._lives]
        self._ended = not self._exits and all(process.finished and not process.interrupted and (
            process.standing.epoch.generation == self.coordinator.generation) for process in alive)
        return self._ended

    # ---- what must hold

    def runs(self, process: Process, iteration: int, item: tuple[int, int, int], action: Action) -> None:
        """User code runs."""
        if self._trace:
            self._tell(f"{process.name} runs {action} of iteration {iteration}")
        if iteration <= process.left and iteration not in self.repeated:
            raise Violation(f"{process.name} runs {action} of iteration {iteration}, which its script has left")
        ran = self._ran.setdefault((iteration, (PASS[action.kind], *item)), set())
        self._twice[iteration] += any(name in self._lives for name in ran)
        ran.add(process.name)
        if iteration > process.standing.asked:
            raise Violation(f"{process.name} runs iteration {iteration} before its script has asked for it")

    def reduced(self, process: Process, iteration: int, given: Mapping[str, Sums]) -> Sums:
        """The sum of these; each contribution once, with its value."""
        found: Sums = {}
        for name, sums in given.items():
            for key, value in sums.items():
                if key in found:
                    raise Violation(f"{process.name} reduces iteration {iteration} with {key} of {name} and another")
                found[key] = value
        right = _reference(self.shape).sums[iteration][process.me.stage]
        if found != right:
            missing, strange = right.keys() - found.keys(), found.keys() - right.keys()
            raise Violation(f"{process.name} reduces iteration {iteration} without {sorted(missing)}, with "
                            f"{sorted(strange)}, and other values of "
                            f"{sorted(key for key in right if key in found and found[key] != right[key])}")
        return found

    def loss(self, iteration: int, given: Mapping[str, Mapping[tuple[int, int], int]]) -> int:
        """The loss of these micro-batches; a number that travels as a float without losing bits."""
        found: dict[tuple[int, int], int] = {}
        for losses in given.values():
            if found.keys() & losses.keys():
                raise Violation(f"the loss of iteration {iteration} has some micro-batch twice")
            found.update(losses)
        return hash(frozenset(found.items())) % (1 << 50)

    def committed(self, process: Process, iteration: int, by: Collection[tuple[int, int]]) -> None:
        """A step is final; ``by`` as in `Held`."""
        if self._trace:
            self._tell(f"{process.name} commits iteration {iteration}")
        right, cut = _reference(self.shape), process.cut
        if cut is not None and cut.state != {shard: right.pieces[iteration][process.me.stage][shard]
                                             for shard in cut.state}:
            raise Violation(f"{process.name} has another shard after iteration {iteration}")
        gathered = cut is None or cut.gathered == iteration
        if gathered and process.exact != right.parameters[iteration][process.me.stage]:
            raise Violation(f"{process.name} has other parameters after iteration {iteration}")
        if self.shape.tied and process.me.stage in self.shape.tied and process.tie[0] != right.ties[iteration]:
            raise Violation(f"{process.name} has another tied parameter after iteration {iteration}")
        self._alike(("rounded", iteration, process.me.stage, process.part), process.rounded, process)
        for chunk, parameters in by:
            if self._by.setdefault((iteration, process.part, chunk), parameters) != parameters:
                raise Violation(f"some of iteration {iteration} was computed with other parameters of chunk {chunk} "
                                f"than what {process.name} has of it")
        if process.me.stage in self.shape.tied:
            self._alike(("tied", iteration, process.part), process.tie[1], process)

    def _alike(self, what: Any, value: int, process: Process) -> None:
        """Peers that live have the same bits."""
        known = self._known.setdefault(what, {})
        known[process.name] = value
        if len({found for name, found in known.items() if name in self._lives}) > 1:
            raise Violation(f"{process.name} has other bits than its peers: {what}")

    # ---- what happens

    def play(self) -> Outcome:
        """Run to the end."""
        while self._pauses:
            if self._steps >= STEPS:
                raise Violation("there is no end to it")
            self._step()
        self._check()
        events = Counter(str(event["event"]) for event in self.coordinator.events)
        return Outcome(self._steps, events, self.coordinator.longer, self._twice)

    def _step(self) -> None:
        self._steps += 1
        for kill in [kill for kill in self._kills if not kill.label and kill.nth <= self._steps]:
            self._kills.remove(kill)
            self._kill(self.draw.choice([*self._lives]), kill)
        names = self._names
        wires = self._latest
        counts = (len(names), 0 if wires is None else min(3, len(wires.under_way)), len(self._mail), len(self._exits),
                  min(2, len(self._reports)), len(self.coordinator.orders))
        choices = [(what, place) for what, count in enumerate(counts) for place in range(count)]
        later: list[tuple[int, int]] = []
        draw = self.draw.random
        while choices or later:
            if not choices:
                choices, later = later, []
            place = int(draw() * len(choices))
            choice = choices[place]
            choices[place] = choices[-1]
            choices.pop()
            if not choice[0] and names[choice[1]] in self._slow and choices and draw() < 0.85:
                later.append(choice)
            elif self._happens(*choice):
                self._follow()
                return
        raise Violation(f"nothing goes on: { {name: pause.label for name, pause in self._pauses.items()} }")

    def _happens(self, what: int, place: int) -> bool:
        """Whether this can happen, and then it has."""
        draw, coordinator = self.draw, self.coordinator
        if what == 0:
            name = self._names[place]
            process, pause = self.processes[name], self._pauses[name]
            if process.commits and draw.random() < 0.3:
                process.hear_verdict()
            elif pause.ready is None or pause.ready():
                self._go_on(name)
            elif process.commits:
                process.hear_verdict()
            else:
                return False
        elif what == 1:
            assert self._latest is not None
            self._latest.deliver(draw)
        elif what == 2:
            self._read([*self._mail][place])
        elif what == 3:
            coordinator.exited(self._exits.pop(place))
        elif what == 4:
            coordinator.reported(*self._reports.pop(draw.randrange(len(self._reports))))
        else:
            coordinator.answer(coordinator.orders.pop(0))
        return True

    def _go_on(self, name: str) -> None:
        label = self._pauses[name].label
        self._passed[label] += 1
        for kill in self._kills:
            if kill.label == label and kill.nth == self._passed[label]:
                self._kills.remove(kill)
                self._kill(name, kill)
                break
        if name not in self._lives:
            return
        if self._trace:
            self._tell(f"{name}: {label}")
        pause = next(self._lives[name], None)
        if pause is None:
            del self._pauses[name]
            self._names.remove(name)
        else:
            self._pauses[name] = pause

    def _kill(self, name: str, kill: Kill) -> None:
        """A death, unless some stage would be empty."""
        if name not in self._pauses or self._ended:
            return
        hosts = dict(self.shape.hosts)
        me = Name.parse(name).worker
        dying = {worker for worker, host in hosts.items() if host == hosts.get(me)} if kill.host else {me}
        dead = [each for each in self._lives if Name.parse(each).worker in dying]
        if self.shape.parts > 1 and not kill.host:
            dead = [name]
        gone = {each for each in self._lives if Name.parse(each).worker in {Name.parse(one).worker for one in dead}}
        left = {Name.parse(each).worker.stage for each in self._lives if each not in gone}
        if len(left) < self.problem.grid.stages or self._last_of_a_shard(gone):
            return
        for each in gone:
            if self._trace:
                self._tell(f"{each} {'dies' if each in dead else 'is left without its sibling'} at "
                           f"{self._pauses[each].label if self._pauses.get(each) else 'its end'}")
            self._lives.pop(each).close()
            if self._pauses.pop(each, None) is not None:
                self._names.remove(each)
            self._mail.pop(each, None)
            for wires in self._wires.values():
                wires.lose(each, self.draw)
        self._exits += dead

    def _last_of_a_shard(self, gone: set[str]) -> bool:
        """Whether some shard would be lost with these."""
        if not self.shape.asked.copies:
            return False
        left = {(self.processes[name].me.stage, shard) for name in self._lives if name not in gone
                for shard in self.processes[name].shards}
        return len(left) < self.problem.grid.stages * self.problem.grid.pipelines

    def _post(self, name: str, message: Any) -> None:
        if message.type in ("stop", "go"):
            self._mail.setdefault(name, []).append(message)

    def _read(self, name: str) -> None:
        message = self._mail[name].pop(0)
        if not self._mail[name]:
            del self._mail[name]
        if name not in self._lives:
            return
        process = self.processes[name]
        if message.type == "stop":
            process.stop = message.generation
        else:
            process.stop = max(process.stop, message.generation)
            process.go = message

    def _follow(self) -> None:
        """What the coordinator has decided."""
        refused = [*self.coordinator.refused]
        for each in refused:
            self._check_refused(*each)
        self.coordinator.refused.clear()
        if (ended := self.coordinator.ended) is not None:
            if not (self.shape.asked.block and refused and refused[-1][2]):
                raise Violation(f"the job has ended: {ended.message}")
            for life in self._lives.values():
                life.close()
            self._lives.clear()
            self._pauses.clear()
        for event in self.coordinator.events[self._told:]:
            if self._trace and event["event"] in ("decided", "reconciled", "repeated"):
                self._tell(f"coordinator: {json.dumps(event)}")
            if event["event"] == "repeated":
                self.repeated.add(event["iteration"])
        self._told = len(self.coordinator.events)

    def _tell(self, line: str) -> None:
        self.story.append(f"{self._steps:5} {line}")

    def _check_refused(self, iteration: int, listed: Mapping[Worker, Sequence[Action]], closed: Sequence[int]) -> None:
        """An iteration begins anew only if a message of a closed stage is lost that somebody is still to read: with the
        worker that had made it and one that had used it, or has thrown its sums away."""
        problem = self.problem
        done = {(PASS[action.kind], *values.place(problem, worker.stage, action))
                for worker, actions in listed.items() for action in actions}
        lost = [(kind, d, m, to) for d, m in problem.grid.items() for chunk in range(problem.chunks)
                if problem.stage_of(chunk) in closed and ("F", d, m, chunk) not in done
                for kind, to in (("F", chunk + 1), ("B", chunk - 1))
                if 0 <= to < problem.chunks and problem.stage_of(to) not in closed
                and (kind, d, m, to) not in done]
        if not lost:
            raise Violation(f"iteration {iteration} begins anew, although nothing is lost: {listed}, closed {closed}")
        for each in lost:
            if not self.shape.spoils and all(name in self._lives for name in self._ran.get((iteration, each), ())):
                raise Violation(f"iteration {iteration} begins anew: {each} had nobody read, and its maker has left")

    def _check(self) -> None:
        """The end is that of a run without failures."""
        for name in self._lives:
            process = self.processes[name]
            right = _reference(self.shape)
            if process.exact != right.parameters[-1][process.me.stage]:
                raise Violation(f"{name} ends with other parameters")
            if process.losses != right.losses:
                raise Violation(f"{name} was told other losses")


ALL = Rules()


def play(case: Case, rules: Rules = ALL) -> Outcome:
    """Run a case. Raises Violation, with the case."""
    try:
        return Job(case, rules).play()
    except AssertionError as error:
        raise Violation(f"{error}\nin {case}") from error


def case_of(seed: int, **wanted: Any) -> Case:
    """A random case, with the ``wanted`` properties of its shape: parts, tied, idle, closes, spoils,
    lent, exact, copies (of shards), wrong (in all iterations)."""
    draw = random.Random(seed)
    parts = wanted.get("parts", 2 if draw.random() < 0.1 else 1)
    grids = ((2, 2), (2, 2), (2, 3), (3, 2), (3, 2), (3, 3))[:6 if parts == 1 else 3]
    stages, pipelines = draw.choice(grids)
    microbatches = [draw.choice((1, 2, 2, 3))] * pipelines
    placement: tuple[int, ...] = ()
    if draw.random() < 0.15:
        placement = (*range(stages), *(range(stages) if draw.random() < 0.5 else reversed(range(stages))))
    if wanted.get("idle", draw.random() < 0.1):
        microbatches[draw.randrange(pipelines)] = 0
    iterations = draw.choice((2, 3))
    wrong = frozenset(each for each in range(iterations) if draw.random() < 0.2)
    wrong = frozenset(range(iterations)) if wanted.get("wrong") else wrong
    tied = wanted.get("tied", draw.random() < 0.15)
    asked = Asked(stages, tuple(microbatches), placement, draw.random() < 0.8, (0,) if draw.random() < 0.2 else ())
    if asked.full_backward == () and wanted.get("exact", random.Random(f"exact {seed}").random() < 0.2):
        asked = asked._replace(block=1 + seed % 3)
    shift = draw.randrange(2)  # neighbours of a pipeline are on one host
    workers = problem_of(asked).grid.workers()
    hosts = tuple((worker, worker.pipeline * stages + (worker.stage + shift) // 2) for worker in workers)
    total = 40 * iterations * pipelines * stages
    kills = []
    for _ in range(draw.choice((0, 1, 1, 1, 1, 2, 2, 3))):
        label = draw.choice(LABELS) if draw.random() < 0.6 else ""
        most = total if not label else 60 if label in OFTEN else 12
        kills.append(Kill(label, draw.randint(1, most), draw.random() < 0.25))
    shape = Shape(asked, iterations, wrong, (0, stages - 1) if tied else (), parts,
                  wanted.get("closes", draw.random() < 0.9), hosts, wanted.get("spoils", draw.random() < 0.1))
    if parts == 1 and pipelines > 1 and wanted.get("copies", random.Random(f"copies {seed}").random() < 0.15):
        asked = asked._replace(copies=2 if pipelines > 2 or seed % 2 else 1)
        return Case(replace(shape, asked=asked), tuple(kills), seed)
    if parts == 1 and not placement and not tied and wanted.get("lent", draw.random() < 0.15):
        lent = frozenset(item for item in problem_of(asked).grid.items() if draw.random() < 0.5)
        shape = replace(shape, lent=lent)
    return Case(shape, tuple(kills), seed)
