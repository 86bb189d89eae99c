"""Workers of a large job in one process: connections that speak the real protocol over loopback and compute nothing.

They come as real ones do, also again after a lost connection; those of a host fetch what they have in common once. The
coordinator is the real one, in a process of its own (`led`), with its journal on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from megatron_recycle.control import Coordinator, Journal, Timeouts, searches
from megatron_recycle.control.wire import SecureChannel
from megatron_recycle.membership import Process
from megatron_recycle.membership.standing import Standing

TOKEN = "light-workers"
LIMIT = 1500.0
"""Seconds that all may take to hear of something."""
PER_HOST = 8
_PAUSES = (0.05, 1.0)
"""Seconds between two attempts to connect, the first and the longest: those of a real worker."""

Plans = Callable[[Mapping[str, Any], frozenset[str]], dict[str, Any]]


# The coordinator's process


def serve(size: int, make_plans: Callable[[], Plans], timeouts: Timeouts, folder: str, pipe: Pipe) -> None:
    """Lead a job; tells where it listens, then when each generation was decided."""
    raise_file_limit()
    plan = make_plans()

    def emit(event: Any) -> None:
        if event["event"] in ("decided", "resumed", "suspected", "started"):
            pipe.send((event["event"], event.get("generation"), event["t"]))

    async def run() -> None:
        coordinator = Coordinator(size=size, token=TOKEN, journal=Journal.create(Path(folder) / "journal.jsonl"),
                                  plans=searches.Plans(plan), emit=emit, timeouts=timeouts,
                                  listener=socket.create_server(("127.0.0.1", 0), backlog=4096))
        pipe.send(("listens", await coordinator.start(), 0.0))
        await asyncio.Event().wait()

    asyncio.run(run())


@contextlib.contextmanager
def led(size: int, make_plans: Callable[[], Plans], timeouts: Timeouts) -> Iterator[tuple[str, int, Pipe]]:
    """A coordinator: its address, its process, and what it tells."""
    raise_file_limit()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as cleanup:
        process = context.Process(target=serve, args=(size, make_plans, timeouts, folder, theirs), daemon=True)
        process.start()
        cleanup.callback(process.join)
        cleanup.callback(process.kill)
        kind, address, _ = ours.recv()
        assert kind == "listens" and process.pid is not None
        yield address, process.pid, ours


def wait_for(pipe: Pipe, name: str, generation: int) -> float:
    """When this event happened."""
    while True:
        assert pipe.poll(LIMIT), f"no {name} of generation {generation}"
        kind, number, t = pipe.recv()
        if (kind, number) == (name, generation):
            return float(t)


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# The workers


class Client(asyncio.Protocol):
    """One worker: sends its messages, and keeps the times of those that it hears."""

    def __init__(self, job: Clients, number: int) -> None:
        self.job = job
        self.name = f"{number // job.stages}:{number % job.stages}"
        self.number = number
        self.host = f"host{number // PER_HOST}"
        self.standing = Standing(Process.parse(self.name))
        self.generation = 0
        self.dead = False
        self.came = asyncio.Event()
        self._session = SecureChannel.client(TOKEN)
        self._transport: asyncio.Transport | None = None
        self._latest: dict[str, dict[str, Any]] = {}
        self._digest = ""
        self._told = 0

    async def come(self) -> None:
        """Connect, and again after every loss."""
        pause = _PAUSES[0]
        while not self.dead:
            try:
                await asyncio.get_running_loop().create_connection(lambda: self, *self.job.address)
                return
            except OSError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PAUSES[1])

    async def _come_again(self) -> None:
        await asyncio.sleep(_PAUSES[0])
        await self.come()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._session = SecureChannel.client(TOKEN)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.job.bytes += len(data)
        before = self._session.open
        for message in self._session.feed(data):
            self._hear(message)
        if self._session.open and not before:
            self.say(type="hello", role="worker", worker=self.name, rank=self.number, incarnation=f"i{self.number}",
                     pid=10_000 + self.number, host=self.host, generation=self.generation)
            if not self.generation:
                self.say(type="ready", incarnation=f"i{self.number}", description=self.job.description,
                         report=self.standing.report().to_json())
            for message in self._latest.values():
                self.say(**message)
            self.came.set()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.dead:
            self.job.again += 1
            self.job.tasks.add(task := asyncio.get_running_loop().create_task(self._come_again()))
            task.add_done_callback(self.job.tasks.discard)

    def lose(self) -> None:
        """It dies."""
        self.dead = True
        if self._transport is not None:
            self._transport.close()

    def say(self, **message: Any) -> None:
        if self._transport is not None and not self._transport.is_closing() and self._session.open:
            self._transport.write(self._session.seal(message))

    def _say_kept(self, **message: Any) -> None:
        message["incarnation"] = f"i{self.number}"
        self._latest[message["type"]] = message
        self.say(**message)

    def beat(self) -> None:
        doing = {"state": "working", "what": "forward", "number": 4711, "for_s": 0.123, "limit_s": 12.345}
        self.say(type="heartbeat", progress={"iteration": self.standing.iteration, "attempt": 1, "phase": "forward",
                                             "action": "F0.1", "doing": doing})

    def commit(self, iteration: int, generation: int) -> None:
        self.standing.stand_at(iteration + 1)
        self._say_kept(type="committed", iteration=iteration, generation=generation, loss=2.5)

    def _hear(self, message: Any) -> None:
        kind = message["type"]
        if kind == "stop" and message["generation"] > self.generation:
            self.job.has_heard("stop", message["generation"], self.number)
            self._say_kept(type="report", generation=message["generation"], report=self.standing.report().to_json())
        elif kind == "parcel" and message["generation"] > self.generation:
            self._digest, self._told = message["digest"], message["generation"]
            if message["data"] or self._digest in self.job.fetched[self.host]:
                self._goes()
            else:
                self._fetch(0)
        elif kind == "part" and message["digest"] == self._digest:
            if message["part"] + 1 < message["parts"]:
                self._fetch(message["part"] + 1)
                return
            self.job.fetched[self.host].add(self._digest)
            self.say(type="fetched", digest=self._digest, memory=self.host)
            self._goes()
        elif kind == "there" and message["digest"] == self._digest:
            self._goes()
        elif kind == "end":
            self.job.ended = message["message"]
            self.job.changed.set()

    def _fetch(self, part: int) -> None:
        self.say(type="fetch", digest=self._digest, part=part, memory=self.host)

    def _goes(self) -> None:
        if self._told > self.generation:
            self.generation = self._told
            self.job.has_heard("go", self.generation, self.number)
            self._say_kept(type="resumed", generation=self.generation, t=time.time())


class Clients:
    """All workers of a job.

    Attributes:
        bytes: that have come to them.
        again: connections that were lost.
        heard: by kind and generation, when each worker was told to stop, or had all of its go.
        fetched: the digests that each host has.
    """

    def __init__(self, address: str, grid: Mapping[str, Any], **description: Any) -> None:
        host, _, port = address.rpartition(":")
        self.address = host, int(port)
        self.stages = grid["stages"]
        self.description = {"grid": dict(grid), **description}
        self.clients = [Client(self, number) for number in range(self.stages * len(grid["microbatches"]))]
        self.bytes = self.again = 0
        self.ended = ""
        self.heard: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        self.fetched: dict[str, set[str]] = defaultdict(set)
        self.changed = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    async def connect(self) -> None:
        """One host after the other: a crowd waits at the door, and has little room before it has said hello."""
        for first in range(0, len(self.clients), PER_HOST):
            host = self.clients[first:first + PER_HOST]
            await asyncio.gather(*(client.come() for client in host))
            await asyncio.gather(*(client.came.wait() for client in host))

    def has_heard(self, what: str, generation: int, number: int) -> None:
        self.heard[what, generation].setdefault(number, time.time())
        self.changed.set()

    async def until_told(self, what: str, generation: int) -> float:
        """Time at which the last live worker has heard of it."""
        async with asyncio.timeout(LIMIT):
            while len(self.heard[what, generation]) < sum(not client.dead for client in self.clients):
                if self.ended:
                    raise ConnectionError(f"the job has ended: {self.ended}")
                self.changed.clear()
                await self.changed.wait()
        return max(self.heard[what, generation].values())


class Launcher:
    """A connection that reports exits, as a host's launcher does; ``bytes`` have come to it."""

    def __init__(self, session: SecureChannel, writer: asyncio.StreamWriter) -> None:
        self.bytes = 0
        self._session = session
        self._writer = writer
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def come(cls, address: tuple[str, int], host: str) -> Launcher:
        while True:
            session = SecureChannel.client(TOKEN)
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(*address)
                while not session.open and (data := await reader.read(1 << 16)):
                    session.feed(data)
            if session.open:
                break
            await asyncio.sleep(_PAUSES[0])
        made = cls(session, writer)
        made._task = asyncio.create_task(made._drain(reader))
        writer.write(session.seal({"type": "hello", "role": "launcher", "host": host, "ranks": [], "places": 0}))
        return made

    async def _drain(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1 << 20):
            self.bytes += len(data)

    def lose(self, client: Client) -> float:
        """This worker has died; when."""
        now = time.time()
        self._writer.write(self._session.seal(
            {"type": "exit", "rank": client.number, "pid": 10_000 + client.number, "status": -9, "t": now, "log": "",
             "move": 0, "said": ""}))
        client.lose()
        return now
