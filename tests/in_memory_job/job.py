"""A training job whose workers are threads: the real worker loop, recovery, stepper, decisions and planner.

A worker that is to die at some phase meets an exception there that nobody handles; its connections close, and what it
had under way is lost or not. Nothing depends on how long anything takes but the order in which messages arrive, which
is drawn from a seed.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from megatron_recycle.config import RecycleConfig
from megatron_recycle.control import agent as agents
from megatron_recycle.errors import JobEnded
from megatron_recycle.membership import Process as Position
from megatron_recycle.membership.shards import to_begin_with
from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.compute.random_state import Generators
from megatron_recycle.runtime.compute.split import Splitter
from megatron_recycle.runtime.grids import Grids
from megatron_recycle.runtime.memory_budget import profile
from megatron_recycle.runtime.place import Place
from megatron_recycle.runtime.registered import Registered
from megatron_recycle.runtime.saving import Save
from megatron_recycle.runtime.site import Framework
from megatron_recycle.runtime.worker import StageWorker
from tests.fakes.network import IN_MEMORY, MemoryNetwork
from tests.fakes.network import Killed as Gone
from tests.fakes.network.schedule import frames
from tests.in_memory_job.collecting import Ring, collect
from tests.in_memory_job.control import Control
from tests.in_memory_job.model import LENGTH, Block, Data, RowSplitter, SmallStage
from tests.in_memory_job.wires import Asked, Deaths, FirstPairs, Wires
from tests.moments import Arrivals, Moment
from tests.once import once

CPU = torch.device("cpu")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
LIMIT = 60.0
"""Seconds after which a job counts as hung."""
LEFT = "for which reduction exact does not run it again"
_QUIET = 1.0
"""Seconds for which all workers wait, with nothing under way and nothing to decide, after which nobody can go on."""


class Killed(BaseException):
    """SIGKILL: nothing handles it."""


@dataclass(frozen=True)
class Shape:
    """What makes two jobs the same but for failures."""

    pipelines: int = 3
    stages: int = 2
    microbatches: int = 4
    iterations: int = 4
    parts: int = 1
    sequences: bool = False
    """Whether parts keep their rows of a layer's input for W, which gathers the others (sequence parallelism)."""
    clipping: float = 0.0
    scale: float = 0.0
    tied: bool = False
    sharded: bool = False
    blocks: int = 0
    """Of the model; 0: few."""
    chunks: int = 1
    """Of a stage; 2: V-shaped, down the stages and up again."""
    interleaved: bool = False
    """They go down the stages each time instead, as Megatron's virtual pipelines do."""
    hosts: tuple[tuple[str, str], ...] = ()
    """By worker, if not each is on the same."""
    overflows: tuple[tuple[int, int], ...] = ()
    evaluate: tuple[int, ...] = ()
    save: tuple[int, ...] = ()
    full: tuple[tuple[int, str], ...] = ()
    """Iterations before which the disk does not take the checkpoint, and `Disk.WAYS` to find that."""
    collect: tuple[int, ...] = ()
    """Iterations after which the script has collectives of its own."""
    edit: tuple[int, ...] = ()
    """Iterations after which it halves the optimizer's first moments, once the step is final."""
    drops: tuple[int, ...] = ()
    """Iterations after which it drops out more."""
    hooks: tuple[int, ...] = ()
    """Iterations after which it puts hooks on all blocks of a stage, one stage after the other."""
    send: tuple[int, ...] = ()
    """Iterations after which it sends messages from rank to rank."""
    average: bool = False
    """Whether the script keeps an average of the stage's parameters, and has registered it."""
    anneals: bool = False
    """The script sets a factor of the loss for each iteration, where nothing can see it."""
    sizes: tuple[int, ...] = ()
    """Micro-batches of a pipeline in each iteration, and in all later ones."""
    lengths: tuple[int, ...] = ()
    """Of the samples of each iteration, and of all later ones, up to `model.LENGTH`, which it is without them."""
    folder: str = ""
    """Where survivors of a lost stage save what they hold."""
    settings: tuple[tuple[str, Any], ...] = (("reduction", "exact"),)

    @property
    def workers(self) -> list[str]:
        return [f"{pipeline}:{stage}" for pipeline in range(self.pipelines) for stage in range(self.stages)]

    def size(self, iteration: int) -> int:
        """Micro-batches of a pipeline in ``iteration``."""
        return self.sizes[min(iteration, len(self.sizes) - 1)] if self.sizes else self.microbatches

    def length(self, iteration: int) -> int:
        """Of the samples of ``iteration``."""
        return self.lengths[min(iteration, len(self.lengths) - 1)] if self.lengths else LENGTH

    @property
    def placement(self) -> tuple[int, ...]:
        """As `Place`'s."""
        down = range(self.stages)
        return () if self.chunks == 1 else tuple(
            stage for turn in range(self.chunks) for stage in (down if self.interleaved or turn % 2 == 0
                                                               else reversed(down)))

    @property
    def step(self) -> str:
        return str(dict(self.settings).get("step", "staggered"))

    @property
    def ahead(self) -> bool:
        """Whether workers go on to the next iteration before the last one is committed."""
        return dict(self.settings).get("keep_messages") != "none"

    def with_settings(self, **settings: Any) -> Shape:
        return replace(self, settings=tuple(sorted({**dict(self.settings), **settings}.items())))


@dataclass
class Result:
    """What a worker has at its end, or how it ended."""

    status: int | None = None
    error: str = ""
    losses: list[float] = field(default_factory=list)
    evaluated: list[list[float]] = field(default_factory=list)
    collected: list[list[float]] = field(default_factory=list)
    brought: dict[tuple[int, int], float | None] = field(default_factory=dict)
    """What messages brought, as `Ring.brought`."""
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    shards: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    counters: Any = None
    checkpoints: Mapping[int, Any] = field(default_factory=dict)
    """What is on disk at its end, as `Disk.named`."""
    unsaved: list[str | None] = field(default_factory=list)
    """What `StageWorker.save` has returned."""
    memory: Any = None
    """What `runtime.memory_budget.profile` finds."""


@dataclass
class Process:
    """One life of a worker."""

    rank: int
    pid: int
    name: str
    thread: threading.Thread
    result: Result
    network: MemoryNetwork
    worker: StageWorker | None = None


class Disk:
    """Checkpoints, as a file system would have them; any worker may write at any time.

    Attributes:
        named: the states of all (stage, part), and of (stage, part, shard), by the iteration before which they were
            written.
    """

    WAYS = ("all", "one", "alone", "named")
    """All workers cannot write; one cannot; one cannot, and others wait for it; the one that names it cannot."""

    def __init__(self, full: Mapping[int, str] = MappingProxyType({})) -> None:
        self.full = full
        self.named: dict[int, dict[tuple[int, ...], dict[str, torch.Tensor]]] = {}
        self.counters: dict[tuple[int, ...], Any] = {}
        self.cut: set[tuple[int, int]] = set()
        """Files (iteration, stage) that were cut off since they were written."""
        self.cleared = 0
        self._tries: dict[str, dict[tuple[int, ...], dict[str, torch.Tensor]]] = {}

    def load(self, place: str, name: str, stage: SmallStage) -> None:
        """As `Framework.restore`."""
        iteration, own = int(place.removeprefix("iteration ")), (stage.stage, stage.part)
        if (iteration, stage.stage) in self.cut:
            stage.load_state({**stage.fixed(), **{name: torch.zeros_like(of) for name, of in stage.state().items()}},
                             self.counters[(iteration, *own)])  # half of it was there
            raise EOFError("Ran out of input")
        found = self.named.get(iteration) or self._tries[f"{name} {iteration}"]  # who names it may have died
        stage.load_state({**stage.fixed(), **found[own]}, self.counters[(iteration, *own)])
        for shard in () if stage.shards is None else stage.shards.held:
            tensors = {name: tensor.clone() for name, tensor in found[(*own, shard)].items()}
            stage.shards.take(shard, tensors, self.counters[(iteration, *own, shard)])

    def write(self, save: Save, iteration: int, stage: SmallStage) -> bool:
        """As `runtime.saving.Write`."""
        groups, place, full = save.generation.groups, f"/disk/{iteration}", self.full.get(iteration)
        first = groups.me == groups.members[0] and not groups.part
        of_try, own, cuts = self._tries.setdefault(f"{save.name} {iteration}", {}), (
            stage.stage, stage.part), save.generation.cuts
        with save.each_writes(place):
            if full == "alone" and first:
                raise FULL
            count(groups.control, True)
        with save.all_write(place):
            for shard in () if cuts is None or stage.shards is None else cuts.spoken_for(groups.me):
                save.check()
                of_try[(*own, shard)] = {name: tensor.clone() for name, tensor in stage.shards.tensors(shard).items()}
                self.counters[(iteration, *own, shard)] = stage.shards.numbers(shard)
            if groups.me == groups.peers(groups.me.stage)[-1]:
                save.check()
                of_try[own] = {name: tensor.clone() for name, tensor in stage.state().items()}
                self.counters[(iteration, *own)] = stage.counters()
            if full == "all" or (full == "one" and groups.me == groups.members[-1]):
                raise FULL
        with save.all_write(place):
            if first and full == "named":
                raise FULL
            if first:
                save.whole(f"iteration {iteration}")
                self.named[iteration] = of_try
        return True

    def clear(self) -> None:
        """As `runtime.saving.save` calls it."""
        self.cleared += 1


class Job:
    """A job of ``shape``, which `run` runs to its end.

    Args:
        shape: the job.
        kills: who dies where.
        holds: who stops where, until `release`.
        seed: of how long messages take. Odd ones are of networks with NCCL's rules of order, even ones of gloo's.
        slow: the share of messages that take a while.
        at: called in a worker's thread whenever it gets to a phase.
        asked: who dies when it asks what of the network.
        moves: as `Control`'s.
        first_pairs: as `Wires`'.
    """

    def __init__(self, shape: Shape, kills: Sequence[Moment] = (), *, holds: Sequence[Moment] = (), seed: int = 0,
                 slow: float = 0.0, at: Callable[[Job, Moment], None] | None = None,
                 asked: Sequence[Asked] = (), moves: Mapping[str, str] = MappingProxyType({}),
                 first_pairs: FirstPairs = "refused") -> None:
        self.shape = shape
        self.kills, self.holds = set(kills), {hold: threading.Event() for hold in holds}
        self.held: set[Moment] = set()
        self.after_leaving: set[tuple[str, int]] = set()
        """Workers that have run something of an iteration which their script had left."""
        self.at = at
        self.disk = Disk(dict(shape.full))
        self.grid = Grid(shape.stages, (shape.microbatches,) * shape.pipelines)
        first = {worker: shape.parts * (worker.stage * shape.pipelines + worker.pipeline)
                 for worker in self.grid.workers()}
        self.ranks = {worker: tuple(range(rank, rank + shape.parts)) for worker, rank in first.items()}
        self.backend = IN_MEMORY[bool(seed % 2)]
        self.names = Place(Worker(0, 0), self.grid, self.ranks, self.backend).names
        self.deaths = Deaths(asked, lambda process: self.names[process.rank])
        self.fabric = Wires(seed, self.deaths.at, limit=LIMIT, ordered=bool(seed % 2), first_pairs=first_pairs)
        self.control = Control(len(self.names), seed + 1, slow, moves=moves)
        self.processes: dict[int, Process] = {}
        self.former: list[Process] = []
        self._pids = iter(range(1000, 2000))
        self.control.start = lambda rank: None if self._over else self.start(self.names[rank], joining=True)
        self._over = False

    # ---- its life

    def __enter__(self) -> Job:
        for name in self.names.values():
            self.start(name)
        return self

    def __exit__(self, *failure: object) -> None:
        if failure[0] is not None:
            print(self.where(), file=sys.stderr)
        self._over = True
        for process in self.processes.values():
            process.network.die()
        for event in self.holds.values():
            event.set()
        self.control.close()

    def start(self, name: str, joining: bool = False) -> None:
        """A process for this position; ``joining``: the job runs already."""
        worker, part = Position.parse(name)
        place = Place(worker, self.grid, self.ranks, self.backend, part or 0, self.shape.placement)
        rank, pid = self.ranks[worker][place.part], next(self._pids)
        if rank in self.processes:
            self.former.append(self.processes[rank])
        thread = threading.Thread(target=lambda: self._live(process, place, joining), name=f"worker-{name}",
                                  daemon=True)
        process = self.processes[rank] = Process(rank, pid, name, thread, Result(), MemoryNetwork(self.fabric, rank))
        thread.start()

    def comes_back(self, name: str, late: Moment) -> None:
        """A process for this position, which is out, asks to come in while the worker of the hold ``late`` stands; then
        that one goes on."""
        self.wait_event("decided", generation=2)
        self.wait_held(late)
        self.start(name, joining=True)
        self.wait_event("waiting", worker=name)
        self.release(late)

    def run(self) -> dict[int, Result]:
        """Until all have ended."""
        with self:
            return self.wait()

    def wait(self) -> dict[int, Result]:
        end = time.monotonic() + LIMIT
        while running := [process for process in self.processes.values() if process.thread.is_alive()]:
            if time.monotonic() > end:
                raise AssertionError(f"worker {running[0].name} hangs")
            running[0].thread.join(max(0.01, end - time.monotonic()))
        if self.control.failure is not None:
            raise AssertionError("the coordinator has failed") from self.control.failure
        return {rank: process.result for rank, process in self.processes.items()}

    # ---- one worker

    def _live(self, process: Process, place: Place, joining: bool) -> None:
        result = process.result
        try:
            self._train(process, place, joining)
            result.status = 0
        except (Killed, Gone):
            result.status = -9
        except JobEnded as end:
            result.status, result.error = end.status, str(end)
        except BaseException as error:  # noqa: BLE001  (the test reports it)
            result.status, result.error = 1, "".join(traceback.format_exception(error))
        if process.worker is not None:
            process.worker.stepper.close()
        process.network.die()
        self.control.exited(process.rank, process.pid, result.status)

    def _train(self, process: Process, place: Place, joining: bool) -> None:
        shape, result = self.shape, process.result
        config = RecycleConfig(**{"heartbeat_interval": 0.5, "heartbeat_timeout": 5.0, "planner_budget": 0.0,
                                  "verify": "peers", **dict(shape.settings)})
        stage = SmallStage(stages=shape.stages, stage=place.me.stage, pipelines=shape.pipelines,
                           microbatches=shape.microbatches, clipping=shape.clipping, scale=shape.scale,
                           tied=shape.tied, overflows=shape.overflows, part=place.part, parts=shape.parts,
                           blocks=shape.blocks, placement=shape.placement,
                           shards=to_begin_with(place.me.pipeline, shape.pipelines,
                                                config.state_copies or shape.pipelines) if shape.sharded else None)
        worker: list[StageWorker] = []
        kept = {"average": Average(stage)} if shape.average else {}

        def abort(generation: int) -> None:
            with suppress(Gone):  # its agent's thread would be dead as well
                for one in worker:
                    one.abort(generation)

        agent = agents.Agent("127.0.0.1:1", "token", place.name, process.rank, uuid.uuid4().hex[:12],
                             on_stop=lambda stop: abort(stop.generation), on_end=lambda ended: abort(sys.maxsize),
                             patience=LIMIT, pid=process.pid, host=dict(shape.hosts).get(place.name, "host"),
                             joining=joining, link=self.control.link)
        process.worker = made = StageWorker(
            place=place, agent=agent, config=config, observer=_Observer(self, process), network=process.network,
            framework=Framework(stage, (RowSplitter if shape.sequences else Splitter)(stage.module), self._data(),
                                _Own(CPU),
                                Grids(place.grid, config.block_size),
                                folder=(lambda: shape.folder) if shape.folder else None,
                                restore=functools.partial(self.disk.load, stage=stage), registered=Registered(kept)))
        worker.append(made)
        agent.start()
        ring = Ring(made, place)
        result.brought = ring.brought
        for iteration in range(shape.iterations):
            if iteration in shape.evaluate:
                number = 500 + iteration
                for limit in (None, number * shape.microbatches + 1):
                    table = made.evaluate(iteration, Data(), number, limit)
                    result.evaluated.append(table.flatten().tolist())
            if iteration in shape.save:
                result.unsaved.append(made.save(
                    iteration, lambda save, iteration=iteration: self.disk.write(save, iteration, stage),
                    self.disk.clear))
            if iteration and shape.length(iteration) != shape.length(iteration - 1):
                made.reshape(iteration, "reshape()")
            if iteration and shape.size(iteration) != stage.microbatches:  # as `backends.session.Session.resize`
                made.settle()
                made.site.grids.change(iteration, shape.size(iteration))
            stage.microbatches = shape.size(iteration)
            if shape.anneals:
                stage.factor = 1 + iteration / 8
            result.losses.append(made.train(iteration))
            for average in kept.values():
                made.settle()
                average.update()
            if iteration in shape.edit:
                made.settle()
                for state in stage.optimizer.state.values():
                    state["exp_avg"].mul_(0.5)
            for layer in stage.module.modules() if iteration in shape.drops else ():
                if isinstance(layer, Block):
                    layer.dropout += 0.25
            for layer in stage.module.modules() if iteration in shape.hooks else ():
                if isinstance(layer, Block) and iteration % shape.stages == place.me.stage:
                    layer.register_forward_hook(lambda module, inputs, output: None)
            if iteration in shape.collect:
                result.collected.append(collect(made, place, iteration, result.losses[-1]))
            if iteration in shape.send:
                ring.go_round(iteration)
        ring.end()
        made.settle()
        result.state = {name: tensor.clone() for name, tensor in stage.state().items()}
        for shard in () if stage.shards is None else stage.shards.held:
            result.shards[shard] = {name: tensor.clone() for name, tensor in stage.shards.tensors(shard).items()}
        for average in kept.values():
            result.state |= {f"average {name}": tensor.clone() for name, tensor in average.of.items()}
        result.counters = stage.counters()["own"]
        result.checkpoints = self.disk.named
        result.memory = profile(made.site, made.stepper.current.last, made.stepper.undo.nbytes)
        made.finish()

    def _data(self) -> Data:
        shape = self.shape
        return Data(lambda number: shape.length(number // shape.microbatches))

    # ---- what a test does

    def wait_left(self, stage: int, iteration: int) -> list[Process]:
        """Wait until the scripts of all workers of ``stage`` have left ``iteration``; returns them."""
        found = [each for each in self.processes.values() if Position.parse(each.name).worker.stage == stage]
        self.wait_for(lambda: all(len(each.result.losses) > iteration for each in found), f"stage {stage} to leave")
        return found

    def wait_held(self, *holds: Moment) -> None:
        self._wait_until(lambda: self.held >= set(holds or self.holds), f"{holds or list(self.holds)}")

    def wait_event(self, name: str, **fields: Any) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            return [event for event in self.control.events
                    if event["event"] == name and all(event.get(key) == value for key, value in fields.items())]

        self._wait_until(found, f"event {name} {fields}")
        return found()[0]

    def _wait_until(self, reached: Callable[[], Any], what: str) -> None:
        """Until the coordinator's thread or a worker makes it so. Workers that have met an error on the way are named
        with it: what nobody gets to looks like a hang otherwise."""
        try:
            self.control.wait_until(reached, what, LIMIT)
        except AssertionError as error:
            ends = [f"{process.name} has ended: {process.result.error.strip().splitlines()[-1]}"
                    for process in self.processes.values() if process.result.error.strip()]
            raise AssertionError("; ".join([str(error), *ends])) from error

    def release(self, hold: Moment, die: bool = False) -> None:
        if die:
            self.kills.add(hold)
        self.holds[hold].set()

    def wait_for(self, reached: Callable[[], Any], what: str) -> None:
        """Until something is so that nobody tells of."""
        end = time.monotonic() + LIMIT
        while not reached():
            assert time.monotonic() < end, f"waited in vain for {what}\n{self.where()}"
            time.sleep(0.01)

    def wait_waiting(self, *waits: str) -> None:
        """Until each of these patterns is in what the network tells of who waits for what."""
        self.wait_for(lambda: all(re.search(each, self.fabric.standing()) for each in waits), f"who waits: {waits}")

    def wait_or_stuck(self) -> str:
        """Until all have ended, or nobody can go on: where everybody stands then."""
        begun = since = time.monotonic()
        while threads := [each.thread for each in self.processes.values() if each.thread.is_alive()]:
            stuck = self.fabric.stuck(threads)
            if not stuck or not (self.control.idle() or self.fabric.stuck([*threads, self.control.thread])):
                since = time.monotonic()
            if stuck and time.monotonic() > since + _QUIET:
                return stuck
            assert time.monotonic() < begun + LIMIT, f"neither over nor stuck\n{self.where()}"
            threads[0].join(0.02)
        return ""

    def where(self) -> str:
        """Where each worker stood."""
        lines = [f"{(e['event'], e.get('generation'), e.get('worker'), e.get('iteration'))}"
                 for e in self.control.events[-40:]]
        found = frames()
        for process in self.processes.values():
            stack = found.get(process.thread.ident or 0)
            text = "".join(traceback.format_stack(stack)[-8:]) if stack is not None else process.result.error
            lines.append(f"--- {process.name} status {process.result.status}\n{text}")
        return "\n".join(lines)


class Average:
    """Of the stage's parameters, as a script keeps one."""

    def __init__(self, stage: SmallStage) -> None:
        self._stage, self.updates = stage, 0
        self.of = {name: parameter.detach().clone() for name, parameter in stage.module.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        for name, parameter in self._stage.module.named_parameters():
            self.of[name].lerp_(parameter, 1 / (1 + self.updates))

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "of": self.of}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.of = state["updates"], state["of"]


class _Own(Generators):
    """Those of the model; to look through all modules for named ones takes longer than to train."""

    def adopt_trackers(self) -> None:
        pass


class _Observer:
    """Counts a worker's arrivals, and lets it die or stop where the test wants."""

    def __init__(self, job: Job, process: Process) -> None:
        self._job, self._process = job, process
        self._arrivals = Arrivals(process.name)

    def on(self, phase: str, iteration: int, action: Any) -> None:
        job, process = self._job, self._process
        moment = self._arrivals.at(phase, iteration)
        if phase in ("forward", "backward", "weight") and iteration < len(process.result.losses):
            job.after_leaving.add((process.name, iteration))
        if job.at is not None:
            job.at(job, moment)
        if moment in job.holds and moment not in job.held:
            with job.control.changed:
                job.held.add(moment)
                job.control.changed.notify_all()
            job.holds[moment].wait(LIMIT)
        if moment in job.kills or process.network.dead:
            job.kills.discard(moment)
            process.network.die()
            raise Killed


def check(job: Job, results: Mapping[int, Result], out: Collection[str] = (), came: Collection[str] = (),
          within: float = 0.0, again: bool = False) -> None:
    """The job has ended as one whose stages wait for each other would have without failures; every iteration was
    committed once, in order, and nobody has run anything of an iteration that its script had left, but where the job
    has said so. Or two deaths have lost what an exact iteration needs that scripts have left: then it may end.

    Args:
        out: who need not have come to the end.
        came: who came in later, and has losses since then; its script's calls bring all that they brought others.
        within: by how much numbers may differ; 0: not in a bit.
        again: whether some iterations were made, and committed, again.
    """
    dead = [process for process in (*job.processes.values(), *job.former) if process.result.status == -9]
    if len(dead) > 1 and any(LEFT in result.error for result in results.values()):
        assert not job.after_leaving, f"run after their scripts had left: {job.after_leaving}\n{job.where()}"
        return
    reference = undisturbed(job.shape.with_settings(step="barrier"))
    for rank, result in results.items():
        name = job.processes[rank].name
        if name in out and (result.status != 0 or not result.counters):
            continue  # one that has woken up when all was done may have ended well
        well = result.status == 0 and result.counters
        assert well, f"{name} has ended with {result.status}: {result.error}\n{job.where()}"
        found = differences(result, reference[rank], within)
        found -= {"losses", "evaluated"} if name in came else set()
        found |= _other_shards(result, [reference[of] for of in reference if _alike_parts(job.shape, of, rank)], within)
        assert not found, f"{name} differs in {sorted(found)}\n{job.where()}"
    noted = [event["place"] for event in job.control.events if event["event"] == "checkpoint"]
    assert [*dict.fromkeys(noted)] == [f"iteration {iteration}" for iteration in job.shape.save
                                       if iteration not in dict(job.shape.full)], noted
    assert _alike_checkpoints(job, reference, within), f"checkpoints differ\n{job.where()}"
    said = {event["event"]: event for event in job.control.events if event["event"] in ("repeated", "restored")}
    assert "repeated" not in said or len(dead) > 1, f"one death has lost a message\n{job.where()}"
    assert said or not job.after_leaving, f"run after their scripts had left: {job.after_leaving}\n{job.where()}"
    committed = [event["iteration"] for event in job.control.events if event["event"] == "committed"]
    committed = sorted({*committed}) if again else committed
    assert committed == list(range(job.shape.iterations)), f"committed {committed}\n{job.where()}"


def differences(one: Result, other: Result, within: float = 0.0) -> set[str]:
    """What differs between two workers, by name."""
    found = {name for name in ("losses", "evaluated", "collected", "counters")
             if not _alike(*(torch.tensor(getattr(of, name), dtype=torch.float64) for of in (one, other)), within)}
    found |= one.state.keys() ^ other.state.keys()
    return found | {name for name in one.state.keys() & other.state.keys()
                    if not _alike(one.state[name], other.state[name], within)}


def _alike_parts(shape: Shape, one: int, other: int) -> bool:
    """Whether the processes of these ranks have the same parameters."""
    wide = shape.pipelines * shape.parts
    return (one // wide, one % shape.parts) == (other // wide, other % shape.parts)


def _other_shards(one: Result, peers: Sequence[Result], within: float) -> set[str]:
    """What differs of the shards of one worker from those of its ``peers``."""
    theirs = {shard: tensors for peer in peers for shard, tensors in peer.shards.items()}
    return {f"shard {shard}: {name}" for shard, tensors in one.shards.items() for name, tensor in tensors.items()
            if not _alike(tensor, theirs[shard][name], within)}


def _alike_checkpoints(job: Job, reference: Mapping[int, Result], within: float) -> bool:
    """Whether each checkpoint of ``job`` holds what the undisturbed job's state was when it was to be written."""
    named, expected = job.disk.named, reference[0].checkpoints
    return named.keys() == expected.keys() and all(
        named[at].keys() == expected[at].keys() and named[at][own].keys() == expected[at][own].keys()
        and all(_alike(tensor, expected[at][own][name], within) for name, tensor in named[at][own].items())
        for at in expected for own in expected[at])


def _alike(one: torch.Tensor, other: torch.Tensor, within: float) -> bool:
    if within:
        return one.shape == other.shape and torch.allclose(one, other, rtol=within, atol=within)
    return torch.equal(one, other)


@functools.cache
def undisturbed(shape: Shape) -> Mapping[int, Result]:
    """The job without failures."""
    def run() -> Mapping[int, Result]:
        results = Job(shape).run()
        bad = {rank: result.error for rank, result in results.items() if result.status != 0}
        assert not bad, bad
        return results

    return once(repr(shape), run)
