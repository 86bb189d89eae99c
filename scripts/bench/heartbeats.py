#!/usr/bin/env python3
"""The cost of a large job's heartbeats to its coordinator, and the time until it acts on a loss while they come in.

    python scripts/bench/heartbeats.py                   # 2,000 workers, 10 losses
    python scripts/bench/heartbeats.py --workers 500

The coordinator is the real one, in a process of its own, with its journal on disk. Its workers are connections of
one other process that speak the real protocol over loopback: a heartbeat each `--interval` seconds with what a
training thread does, and a commit each `--iteration` seconds. Then workers are lost, one after the other. Printed
and written to runs/bench/heartbeats.json: share of one core that the coordinator takes in steady training, and time
from a loss until it is decided, until the stop has reached the last worker, and until the last one is told to go
on (plans are empty here: scripts/bench/planner.py times the making of one).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import socket
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from megatron_recycle.control import Coordinator, Journal, Timeouts
from megatron_recycle.control.wire import Session
from megatron_recycle.membership import Process
from megatron_recycle.membership.standing import Standing

STAGES = 8
TOKEN = "heartbeats"
LIMIT = 120.0


def serve(size: int, interval: float, folder: str, pipe: Pipe) -> None:
    """The coordinator's process: tells where it listens, then when each generation was decided."""
    raise_file_limit()

    def emit(event: Any) -> None:
        if event["event"] in ("decided", "resumed", "suspected", "started"):
            pipe.send((event["event"], event.get("generation"), event["t"]))

    async def run() -> None:
        coordinator = Coordinator(
            size=size, token=TOKEN, journal=Journal.create(Path(folder) / "journal.jsonl"),
            plan=lambda description, failed: {"source": "none", "digest": str(len(failed))}, emit=emit,
            timeouts=Timeouts(heartbeat_interval=interval, heartbeat_timeout=20 * interval),
            listener=socket.create_server(("127.0.0.1", 0), backlog=4096))
        pipe.send(("listens", await coordinator.start(), 0.0))
        await asyncio.Event().wait()

    asyncio.run(run())


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class LightSession(Session):
    """Reads of a stop or go only its kind and generation: the time of thousands of workers to parse it is not
    the coordinator's cost."""

    def _receive(self, payload: bytes, mac: bytes) -> dict[str, Any] | None:
        kind, _, rest = payload[:60].partition(b',"generation":')
        if kind not in (b'{"type":"stop"', b'{"type":"go"'):
            return super()._receive(payload, mac)
        self._received += 1
        return {"type": kind[9:-1].decode(), "generation": int(rest.split(b",")[0])}


class Client(asyncio.Protocol):
    """One worker: sends its messages, and keeps the times of those that it hears."""

    def __init__(self, job: Clients, number: int) -> None:
        self.job = job
        self.name = f"{number // STAGES}:{number % STAGES}"
        self.number = number
        self.session = LightSession(TOKEN, server=False)
        self.transport: asyncio.Transport
        self.standing = Standing(Process.parse(self.name))
        self.dead = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        before = self.session.open
        for message in self.session.feed(data):
            self.hear(message)
        if self.session.open and not before:
            self.say(type="hello", role="worker", worker=self.name, rank=self.number, incarnation=f"i{self.number}",
                     pid=10_000 + self.number, host=f"host{self.number // 8}", generation=0)
            self.say(type="ready", description=self.job.description, report=self.standing.report())

    def connection_lost(self, error: Exception | None) -> None:
        if not self.dead:
            self.job.broken.append(f"{self.name}: {error}")
            self.job.told()

    def hear(self, message: Any) -> None:
        kind, generation = message["type"], message.get("generation")
        if kind == "stop":
            self.job.heard["stop", generation].append(time.time())
            self.say(type="report", generation=generation, report=self.standing.report())
        elif kind == "go":
            self.job.heard["go", generation].append(time.time())
            self.say(type="resumed", generation=generation, t=time.time(), received=None)
            self.job.told()

    def say(self, **message: Any) -> None:
        if not self.dead and not self.transport.is_closing():
            self.transport.write(self.session.seal(message))

    def beat(self) -> None:
        doing = {"state": "working", "what": "forward", "number": 4711, "for_s": 0.123, "limit_s": 12.345}
        self.say(type="heartbeat", progress={"iteration": self.standing.iteration, "attempt": 1, "phase": "forward",
                                             "action": "F0.1", "doing": doing})

    def commit(self, iteration: int, generation: int) -> None:
        self.standing.stand_at(iteration + 1)
        self.say(type="committed", iteration=iteration, generation=generation, loss=2.5)


class Clients:
    """All workers, their clocks spread evenly over an interval."""

    def __init__(self, args: argparse.Namespace, address: str) -> None:
        self.args = args
        host, _, port = address.rpartition(":")
        self.address = host, int(port)
        self.description = {"grid": {"stages": STAGES, "microbatches": [8] * (args.workers // STAGES)},
                            "heartbeat_interval": args.interval, "heartbeat_timeout": 20 * args.interval}
        self.clients: list[Client] = []
        self.heard: Any = Heard()
        self.broken: list[str] = []
        self.changed = asyncio.Event()
        self.live = args.workers
        self.iteration = 0
        self.training = True

    def told(self) -> None:
        self.changed.set()

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        for number in range(self.args.workers):
            _, client = await loop.create_connection(lambda number=number: Client(self, number), *self.address)
            self.clients.append(client)

    async def until_told(self, what: str, generation: int) -> float:
        """Time at which the last live worker has heard of it."""
        async with asyncio.timeout(LIMIT):
            while len(self.heard[what, generation]) < self.live:
                if self.broken:
                    raise ConnectionError(f"the coordinator has closed connections: {self.broken[:3]}")
                self.changed.clear()
                await self.changed.wait()
        return max(self.heard[what, generation])

    async def beat_on(self) -> None:
        """Every worker once each interval, in twenty groups."""
        groups = 20
        due = time.monotonic()
        number = 0
        while True:
            for client in self.clients[number % groups::groups]:
                client.beat()
            number += 1
            due += self.args.interval / groups
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def commit_on(self, generation: int) -> None:
        """Every worker each iteration, one stage after the other."""
        while self.training:
            for stage in range(STAGES):
                for client in self.clients[stage::STAGES]:
                    client.commit(self.iteration, generation)
                await asyncio.sleep(self.args.iteration / STAGES)
            self.iteration += 1


class Heard(dict[tuple[str, int], list[float]]):
    def __missing__(self, key: tuple[str, int]) -> list[float]:
        self[key] = []
        return self[key]


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def launcher(address: tuple[str, int]) -> Any:
    """A connection that reports exits, as a host's launcher does."""
    session = Session.client(TOKEN)
    reader, writer = await asyncio.open_connection(*address)
    while not session.open:
        session.feed(await reader.read(1 << 16))
    writer.write(session.seal({"type": "hello", "role": "launcher", "host": "host0", "ranks": [], "places": 0}))

    async def drain() -> None:
        while await reader.read(1 << 20):
            continue

    task = asyncio.create_task(drain())

    def lose(client: Client) -> float:
        now = time.time()
        writer.write(session.seal({"type": "exit", "rank": client.number, "pid": 10_000 + client.number, "status": -9,
                                   "t": now, "log": "", "move": 0}))
        client.dead = True
        client.transport.close()
        return now

    lose.task = task  # type: ignore[attr-defined]  # kept from being collected
    return lose


async def measure(args: argparse.Namespace, address: str, pid: int, pipe: Pipe) -> dict[str, Any]:
    job = Clients(args, address)
    began = time.monotonic()
    await job.connect()
    await job.until_told("go", 1)
    forming = time.monotonic() - began
    beating = asyncio.create_task(job.beat_on())
    committing = asyncio.create_task(job.commit_on(1))
    await asyncio.sleep(2 * args.interval)
    used, at = processor_seconds(pid), time.monotonic()
    own = processor_seconds(os.getpid())
    await asyncio.sleep(args.seconds)
    elapsed = time.monotonic() - at
    share = (processor_seconds(pid) - used) / elapsed
    own_share = (processor_seconds(os.getpid()) - own) / elapsed
    job.training = False
    await committing  # all have committed the same
    lose = await launcher(job.address)
    losses: list[dict[str, float]] = []
    for number in range(args.losses):
        victim = job.clients[number * STAGES * 3 + number % STAGES]
        generation = number + 2
        job.live -= 1
        used = processor_seconds(pid)
        lost = lose(victim)
        went = await job.until_told("go", generation)
        stopped = max(job.heard["stop", generation])
        decided = await asyncio.to_thread(wait_for, pipe, "decided", generation)
        losses.append({"decided_ms": 1000 * (decided - lost), "stopped_ms": 1000 * (stopped - lost),
                       "went_ms": 1000 * (went - lost)})
        await asyncio.to_thread(wait_for, pipe, "resumed", generation)
        losses[-1]["cpu_ms"] = 1000 * (processor_seconds(pid) - used)
        await asyncio.sleep(args.interval)
    beating.cancel()
    if job.broken:
        raise ConnectionError(f"the coordinator has closed connections: {job.broken[:3]}")
    return {"workers": args.workers, "load": os.getloadavg()[0],
            "interval_s": args.interval, "iteration_s": args.iteration,
            "heartbeats_per_s": args.workers / args.interval, "commits_per_s": args.workers / args.iteration,
            "forming_s": forming, "coordinator_cpu_share": share, "clients_cpu_share": own_share, "losses": losses}


def wait_for(pipe: Pipe, name: str, generation: int) -> float:
    while True:
        assert pipe.poll(LIMIT), f"no {name} of generation {generation}"
        kind, number, t = pipe.recv()
        if (kind, number) == (name, generation):
            return float(t)


def table(found: dict[str, Any]) -> str:
    share, own = (100 * found[f"{who}_cpu_share"] for who in ("coordinator", "clients"))
    lines = [f"{found['workers']} workers, a heartbeat each {found['interval_s']:g} s, an iteration each "
             f"{found['iteration_s']:g} s: the coordinator takes {share:.1f} % of a core (the simulated workers "
             f"{own:.1f} %); all were in after {found['forming_s']:.1f} s"]
    for key, text in (("cpu_ms", "the coordinator's processor time for a loss"),
                      ("decided_ms", "loss until decided"),
                      ("stopped_ms", "until the last worker is told to stop"),
                      ("went_ms", "until the last worker is told to go on")):
        values = [loss[key] for loss in found["losses"]]
        lines.append(f"{text}: median {statistics.median(values):.0f} ms, worst {max(values):.0f} ms")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2000, help=f"a multiple of {STAGES}")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between two heartbeats of a worker")
    parser.add_argument("--iteration", type=float, default=1.0, help="seconds that an iteration takes")
    parser.add_argument("--seconds", type=float, default=10.0, help="of steady training to measure")
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/heartbeats.json"))
    args = parser.parse_args()
    if args.workers % STAGES:
        parser.error(f"--workers must be a multiple of {STAGES}")
    raise_file_limit()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as cleanup:
        process = context.Process(target=serve, args=(args.workers, args.interval, folder, theirs), daemon=True)
        process.start()
        cleanup.callback(process.join)
        cleanup.callback(process.kill)
        kind, address, _ = ours.recv()
        assert kind == "listens" and process.pid is not None
        found = asyncio.run(measure(args, address, process.pid, ours))
    print(table(found))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
