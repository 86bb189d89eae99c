"""Real training jobs for tests: forked worker processes, a real coordinator, real signals, no sleeps.

`Job` starts a coordinator in a thread and one process per worker, forked from a server that has imported
torch and deepspeed once. A test holds a worker at a chosen moment by a `Hold`: the worker's observer tells the
test that it got there and waits; the test then kills it by pid, or lets it go. Every wait has a hard limit,
after which the test fails and says where each process stood.
"""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from megatron_recycle.control import Coordinator, Timeouts
from megatron_recycle.control.journal import Journal
from megatron_recycle.control.planning import Planning
from megatron_recycle.control.profiles import Conclusions, Profiles
from megatron_recycle.control.searches import Plans
from megatron_recycle.membership.protocol import Measured
from megatron_recycle.membership.state import Member, State
from tests.labels import check_label
from tests.moments import Arrivals, Moment
from tests.nccl_rules.rules import Rules
from tests.network.hosts import enter

_EXIT = os._exit  # the plugin's waits for the other workers
LIMIT = 100.0
"""Seconds after which a job counts as hung, once its first processes have been forked."""

_PRELOAD = ("torch", "deepspeed", "deepspeed.pipe", "megatron_recycle.backends.deepspeed.engine",
            "tests.backends.megatron_job", "megatron.core.optimizer", "megatron.core.models.gpt.gpt_layer_specs",
            "tests.preload")
# For the server that test workers are forked from, which is started with the first job.
os.environ.update({"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"})
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")])


Hold = Moment
"""Where a worker is held; in its first attempt, unless ``nth`` says otherwise."""


@dataclass
class Result:
    """What a worker returned, or how it ended."""

    value: Any = None
    error: str | None = None
    status: int | None = None


class HoldingObserver:
    """Runs in the worker: pauses it where the test wants."""

    def __init__(self, worker: str, holds: Sequence[Hold], pipe: Connection) -> None:
        self._arrivals = Arrivals(worker)
        self._holds = frozenset(holds)
        self._pipe = pipe

    def on(self, phase: str, iteration: int, action: Any) -> None:
        moment = self._arrivals.at(phase, iteration)
        if moment in self._holds:
            self._pipe.send(("held", moment))
            self._pipe.recv()


def _child(body: Callable[..., Any], rules: Rules | None, rank: int, size: int, port: int, coordinator: str, token: str,
           holds: Sequence[Hold], arguments: Mapping[str, Any], pipe: Connection, log: str, joining: bool,
           host: str | None) -> None:
    if host is not None:
        enter(host)  # before any thread is started: it holds for this thread and those that it starts
        os.environ.update({"RECYCLE_HOST": host, "GLOO_SOCKET_IFNAME": "eth0"})
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update({
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": coordinator.rpartition(":")[0] or "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"})
    if joining:
        os.environ["RECYCLE_JOIN"] = "1"
    if coordinator:
        os.environ.update({"RECYCLE_COORDINATOR": coordinator, "RECYCLE_TOKEN": token})
    torch.set_num_threads(1)
    if rules is not None:
        from tests.nccl_rules import jobs  # loads both frameworks

        jobs.install(rules)
    try:
        value = body(lambda worker: HoldingObserver(worker, holds, pipe), rank, **arguments)
        pipe.send(("done", value))
        status = 0
    except SystemExit as end:
        pipe.send(("exit", end.code))
        status = end.code if isinstance(end.code, int) else 1
    except Exception as error:  # noqa: BLE001  (the test reports it)
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        status = 1
    sys.stdout.flush()
    _EXIT(status)


@dataclass
class Job:
    """A job of ``size`` workers running ``body(observer_of, rank, **arguments)``."""

    body: Callable[..., Any]
    size: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    holds: Sequence[Hold] = ()
    coordinated: bool = True
    limit: float = LIMIT
    profiled: bool = False
    """Whether what the workers measure reaches the planner, as in a real job: plans then depend on timing."""

    hosts: Sequence[str] = ()
    """Network namespace of each rank; none: all of them here."""
    address: str = "127.0.0.1"
    """What the coordinator and torch's store listen on."""
    rules: Rules | None = field(default_factory=Rules.of_all)
    """Of the ordered backend that tensors travel over (tests/nccl_rules); None: over gloo."""

    def __enter__(self) -> Job:
        check_label()
        self.folder = Path(tempfile.mkdtemp(prefix="recycle-test-"))
        self.events: list[dict[str, Any]] = []
        self.measured: list[dict[str, Any]] = []
        self.results: dict[int, Result] = {rank: Result() for rank in range(self.size)}
        self.held: dict[Hold, int] = {}
        self._silent: set[int] = set()
        self._changed = threading.Condition()
        self._store = _store(self.size, self.address)
        self._address = self._start_coordinator() if self.coordinated else ""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_PRELOAD))
        self._pipes: dict[int, Connection] = {}
        self.processes = [self._start(rank, self.holds, self.arguments) for rank in range(self.size)]
        self._deadline = time.monotonic() + self.limit  # the server that they are forked from takes long to start
        return self

    def _start(self, rank: int, holds: Sequence[Hold], arguments: Mapping[str, Any], joining: bool = False) -> Any:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_child, args=(
            self.body, self.rules, rank, self.size, self._store.port, self._address, "token", tuple(holds),
            dict(arguments), theirs, str(self.folder / f"worker-{rank}.log"), joining,
            self.hosts[rank] if self.hosts else None))
        process.start()
        theirs.close()
        self._pipes[rank] = ours
        return process

    def rejoin(self, rank: int, *holds: Hold, **arguments: Any) -> None:
        """Start a process for the place of one that has ended, to join the running job; `holds` and changed
        `arguments` are this process's own."""
        assert self.results[rank].status is not None, f"rank {rank} still runs"
        self._pipes[rank].close()
        self.results[rank] = Result()
        self._silent.discard(rank)
        self.processes[rank] = self._start(rank, holds, {**self.arguments, **arguments}, joining=True)

    def comes_back(self, dies: Hold, late: Hold, rank: int) -> None:
        """The worker of `dies`, whose process has this `rank`, is killed there, and joins the job again while another
        one waits at `late`."""
        self.wait_held(dies)
        self.kill(dies)
        self.wait_ended(rank)
        self.wait_held(late)
        self.rejoin(rank)
        self.wait_event("waiting", worker=dies.worker)
        self.release(late)
        self.wait_event("joined", worker=dies.worker)

    def __exit__(self, *failure: object) -> None:
        if failure[0] is not None:
            print(self.where())
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        if self.coordinated:
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()
        for pipe in self._pipes.values():
            pipe.close()
        shutil.rmtree(self.folder)

    # ---- the coordinator, in a thread

    def _start_coordinator(self) -> str:
        started: list[str] = []
        ready = threading.Event()

        async def serve() -> None:
            self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
            journal = Journal.create(self.folder / "journal.jsonl")
            planning = self._planning = Planning()
            coordinator = self._coordinator = Coordinator(
                size=self.size, token="token", journal=journal, measure=self._measure,
                plans=Plans(planning.plan, planning.improve, planning.moves, planning.redo),
                emit=self._emit, timeouts=Timeouts(), launched=False, listener=socket.create_server((self.address, 0)))
            self._profiles = Profiles(planning)
            started.append(await coordinator.start())
            ready.set()
            await self._over.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), name="coordinator")
        self._thread.start()
        assert ready.wait(60)
        return started[0]

    def _measure(self, state: State, member: Member, message: Measured) -> Conclusions | None:
        self.measured.append({"worker": member.worker, **message.to_json()})
        return self._profiles.take(state, member, message) if self.profiled else None

    def _emit(self, event: Mapping[str, Any]) -> None:
        with self._changed:
            self.events.append(dict(event))
            self._changed.notify_all()

    # ---- what a test does

    def wait_event(self, name: str, **fields: Any) -> dict[str, Any]:
        """The first event ``name`` with these fields."""
        def found() -> list[dict[str, Any]]:
            return [event for event in self.events
                    if event["event"] == name and all(event.get(key) == value for key, value in fields.items())]

        with self._changed:
            if not self._changed.wait_for(found, max(0.0, self._deadline - time.monotonic())):
                raise AssertionError(f"no event {name} {fields}\n{self.where()}")
            return found()[0]

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Until the events so far fulfil a condition."""
        with self._changed:
            if not self._changed.wait_for(reached, max(0.0, self._deadline - time.monotonic())):
                raise AssertionError(f"waited in vain for {what}\n{self.where()}")

    def wait_held(self, *holds: Hold) -> None:
        """Until every one of ``holds`` is reached (all of the job's by default)."""
        wanted = set(holds or self.holds)
        while not wanted <= set(self.held):
            self._pump(f"holds {wanted - set(self.held)}")

    def wait_any(self, holds: Iterable[Hold]) -> Hold:
        """Until one of ``holds`` is reached; returns it."""
        while not (reached := set(holds) & set(self.held)):
            self._pump(f"one of {holds}")
        return min(reached, key=str)

    def release(self, hold: Hold) -> None:
        self._pipes[self.held[hold]].send("go on")

    def kill(self, *holds: Hold, with_signal: int = signal.SIGKILL) -> float:
        """End the held workers at once, by pid; returns when (Unix seconds)."""
        now = time.time()
        for hold in holds:
            os.kill(self.processes[self.held[hold]].pid, with_signal)
        return now

    def wait(self) -> dict[int, Result]:
        """Until every process has ended."""
        while any(result.status is None for result in self.results.values()):
            self._pump("the end")
        return self.results

    def wait_ended(self, rank: int) -> Result:
        """Until the process of this rank has ended."""
        while self.results[rank].status is None:
            self._pump(f"the end of rank {rank}")
        return self.results[rank]

    def _pump(self, what: str) -> None:
        """Take in what the workers tell, until something new has happened."""
        running = [rank for rank, result in self.results.items() if result.status is None]
        sources = {self._pipes[rank]: rank for rank in running if rank not in self._silent}
        sentinels = {self.processes[rank].sentinel: rank for rank in running}
        ready = wait([*sources, *sentinels], timeout=max(0.0, self._deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"waited in vain for {what}\n{self.where()}")
        for source in ready:
            if source in sources:
                self._take(sources[source])
        for source in ready:
            rank = sentinels.get(source)
            if rank is not None:
                while rank not in self._silent:
                    self._take(rank)
                self.results[rank].status = self.processes[rank].exitcode

    def _take(self, rank: int) -> None:
        try:
            kind, value = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):  # reset: it was killed before it had read what it was sent
            self._silent.add(rank)
            return
        if kind == "held":
            self.held[value] = rank
        elif kind == "done":
            self.results[rank].value = value
        elif kind == "error":
            self.results[rank].error = value

    def where(self) -> str:
        """Where each process stood: for the message of a failing test."""
        lines = [f"events: {[(e['event'], e.get('generation'), e.get('worker')) for e in self.events[-30:]]}"]
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)  # its threads' stacks go to its log
        time.sleep(0.5)
        for rank, process in enumerate(self.processes):
            log = self.folder / f"worker-{rank}.log"
            tail = log.read_text(errors="replace")[-3000:] if log.exists() else ""
            lines.append(f"--- rank {rank}: {'alive' if process.is_alive() else process.exitcode}\n{tail}")
        return "\n".join(lines)


def _store(size: int, address: str) -> TCPStore:
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    given: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "world_size": size,
                             "master_listen_fd": listener.detach()}
    try:
        return TCPStore(address, port, **given)
    except NotImplementedError:  # torch 2.6 has that in its older store only
        return TCPStore(address, port, use_libuv=False, **given)
