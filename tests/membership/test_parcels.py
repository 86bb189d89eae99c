"""A go and an offer travel once per host: packed, told by their digest, fetched in parts. However large they are, and
whoever dies on the way, each worker gets them, or the job ends with the reason."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import secrets
import time
import tracemalloc
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recycle.control import parcels
from megatron_recycle.control.host_memory import HostMemory
from megatron_recycle.control.parcels import Arrivals, Parcels, opened
from megatron_recycle.control.wire import MAX_PAYLOAD, WireError, encode
from megatron_recycle.errors import JobEnded
from megatron_recycle.membership import forming, inputs
from megatron_recycle.membership.inputs import FROM_WORKER
from megatron_recycle.membership.protocol import TO_WORKER, Fetch, Fetched, Go, Offer, Parcel, Stop
from megatron_recycle.membership.resume import Resume
from megatron_recycle.membership.worker_events import RolledBack
from megatron_recycle.plan.plan_file import PlanFile
from tests.membership.cluster import Cluster, endings, report
from tests.membership.service import DESCRIPTION, LIMIT, Service, agent, fake_plan, service
from tests.membership.test_guests import SECRET, visit
from tests.membership.test_in_memory import Job

NAMES = [f"{pipeline}:{stage}" for pipeline in range(3) for stage in range(2)]


def go(generation: int, x: str = "") -> Go:
    return Go(generation, 1, {}, PlanFile(source=x), Resume(-1, 0, 1), "g")


def offer(generation: int, number: int, x: str = "") -> Offer:
    return Offer(generation, number, PlanFile(source=x))


def noise(size: int) -> str:
    """Text of about this many bytes that does not get shorter when packed."""
    return base64.b64encode(secrets.token_bytes(size * 3 // 4)).decode()


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    made = HostMemory.create()
    assert made is not None
    yield made
    made.close()


# Whoever dies on the way


class Worker:
    """One process: what it has handled, and the two directions of its connection."""

    def __init__(self, memory: HostMemory | None) -> None:
        self.out: deque[Any] = deque()
        self.back: deque[Any] = deque()
        self.connection = object()
        self.handled: list[tuple[int, int]] = []
        self.arrivals = Arrivals(self.out.append, self._handle, memory)

    def _handle(self, message: Go | Offer) -> None:
        self.handled.append((message.generation, getattr(message, "number", 0)))


class Host:
    """Six processes on two hosts with a memory, and one alone; a coordinator that tells one go after the other."""

    def __init__(self, seed: int, memories: list[HostMemory]) -> None:
        self.dice = random.Random(seed)
        self.parcels = Parcels()
        self.workers = [Worker(memory) for memory in (*memories * 3, None)]
        self.generation = self.number = self.parts = 0
        self.told: list[Any] = []
        self.next_go()

    def next_go(self) -> None:
        self.generation += 1
        self.number = 0
        self.told = [go(self.generation, x=noise(self.dice.choice((10, 400))))]
        for worker in self.workers:
            worker.back.append(self.stop())
            self.tell(worker)

    def stop(self) -> dict[str, Any]:
        return Stop(self.generation, "member", 0).to_json()

    def next_offer(self) -> None:
        self.number += 1
        self.told = [self.told[0], offer(self.generation, self.number, x=noise(200))]
        for worker in self.workers:
            self.tell(worker, self.told[1:])

    def tell(self, worker: Worker, told: list[Any] | None = None) -> None:
        worker.back.extend(json.loads(encode(self.parcels.form(message))) for message in told or self.told)

    def lose(self, worker: Worker) -> None:
        """Its connection; it comes again, and is told again."""
        self.parcels.gone(worker.connection)
        self.come(worker)

    def come(self, worker: Worker) -> None:
        """Words that it had no time to say are said later, as a link does it."""
        worker.back.clear()
        if self.dice.random() < 0.5:
            worker.out.clear()
        worker.connection = object()
        worker.arrivals.forget()
        worker.back.append(self.stop())
        self.tell(worker)

    def die(self) -> None:
        if len(self.workers) > 1:
            dead = self.workers.pop(self.dice.randrange(len(self.workers)))
            self.parcels.gone(dead.connection)

    def restart(self) -> None:
        """The next coordinator knows no go, and decides anew."""
        self.parcels = Parcels()
        self.next_go()
        for worker in self.workers:
            self.come(worker)

    def deliver(self) -> bool:
        """One message of somebody's; False: there is none."""
        ways = [(worker, way) for worker in self.workers for way in (worker.out, worker.back) if way]
        if not ways:
            return False
        worker, way = self.dice.choice(ways)
        message: Any = way.popleft()
        message = FROM_WORKER.read(message.to_json()) if way is worker.out else TO_WORKER.read(message)
        if message.type == "fetch":
            self.parcels.fetch(worker.connection, message, lambda encoded: self._answer(worker, encoded))
        elif message.type == "fetched":
            self.parcels.fetched(worker.connection, message)
        elif message.type == "stop":
            worker.arrivals.over(message.generation)
        else:
            arrivals = worker.arrivals
            {"parcel": arrivals.told, "part": arrivals.came, "there": arrivals.there}[message.type](message)
        return True

    def _answer(self, worker: Worker, encoded: bytes) -> None:
        self.parts += b'"part"' in encoded[:20]
        worker.back.append(json.loads(encoded))

    def drain(self) -> None:
        while self.deliver():
            pass


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is fetched, in several parts."""
    monkeypatch.setattr(parcels, "SHORT", 0)
    monkeypatch.setattr(parcels, "PART", 100)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(40))
def test_whoever_dies_each_worker_handles_the_last_go_and_the_last_offer(seed: int) -> None:
    memories = [HostMemory.create() for _ in range(2)]
    host = Host(seed, [memory for memory in memories if memory is not None])
    for _ in range(60):
        for _ in range(host.dice.randrange(25)):
            host.deliver()
        trouble = host.dice.choice((host.next_go, host.next_offer, host.next_offer, host.die, host.restart,
                                    lambda: host.lose(host.dice.choice(host.workers)),
                                    lambda: host.lose(host.dice.choice(host.workers))))
        trouble()
    host.drain()
    for worker in host.workers:
        assert worker.handled == sorted(worker.handled), "in the order in which they were told"
        assert len({*worker.handled}) == len(worker.handled), "and once"
        assert worker.handled[-1] == (host.generation, host.number)
        assert (host.generation, 0) in worker.handled
    assert not any(shared.waiting for packed in host.parcels._packed.values() for shared in packed.shared.values())
    for memory in memories:
        assert memory is not None
        memory.close()


@pytest.mark.usefixtures("small")
def test_each_host_fetches_once(memory: HostMemory) -> None:
    host = Host(0, [memory])
    host.told = [go(2, x=noise(1000))]
    for worker in host.workers:
        worker.back.clear()
        host.tell(worker)
    host.drain()
    *_, packed = host.parcels._packed.values()
    assert host.parts == 2 * len(packed.parts) > 10, "one for the memory, one for who is alone"
    assert all(worker.handled == [(2, 0)] for worker in host.workers)


@pytest.mark.usefixtures("small")
def test_the_next_one_carries_what_a_lost_one_has_not_brought(memory: HostMemory) -> None:
    parcel = (made := Parcels()).form(go(1, x=noise(1000)))
    answers: dict[str, list[dict[str, Any]]] = {"a": [], "b": [], "c": []}

    def fetch(who: str, digest: str = parcel.digest, part: int = 0) -> None:
        made.fetch(who, Fetch(digest, part, memory.name), lambda encoded: answers[who].append(json.loads(encoded)))

    for who in answers:
        fetch(who)
    assert [len(answers[who]) for who in "abc"] == [1, 0, 0]
    made.gone("a")
    assert [len(answers[who]) for who in "abc"] == [1, 1, 0]
    fetch("b", "another")  # it does not wait for that one any more
    assert answers["b"].pop()["parts"] == 0 and [len(answers[who]) for who in "abc"] == [1, 1, 1]
    made.fetched("b", Fetched(parcel.digest, memory.name))
    fetch("a")
    assert len(answers["a"]) == 1, "who carries nothing has brought nothing"
    made.fetched("c", Fetched(parcel.digest, memory.name))
    assert answers["a"][1]["type"] == "there"
    for number in range(parcels._REMEMBERED):
        fetch("b"), made.form(go(2 + number))
    fetch("b")
    assert answers["b"][-1]["parts"] == 0, "forgotten, for newer ones"


# Hostile, torn, too large


def test_what_is_not_what_was_told_is_refused_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "MOST_BYTES", 1 << 20)
    def parcel(content: bytes) -> Parcel:
        return Parcel(1, hashlib.sha256(content).hexdigest(), "")

    whole = zlib.compress(encode(go(1)))
    assert opened(whole, parcel(whole)).generation == 1
    bomb, deep = zlib.compress(bytes(64 << 20)), zlib.compress(b"[" * 200_000)
    tracemalloc.start()
    for content, why in ((bomb, "exceeds"), (whole[:-5], "cut short"), (b"x", "unpacked"), (deep, "unpacked"),
                         (zlib.compress(b"[]"), "travels so"), (zlib.compress(encode({"type": "end"})), "travels so"),
                         (zlib.compress(encode({**go(1).to_json(), "plan": 3})), "plan")):
        with pytest.raises(WireError, match=why):
            opened(content, parcel(content))
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    with pytest.raises(WireError, match="digest"):
        opened(whole, parcel(whole + b"x"))


def test_a_worker_that_cannot_read_its_go_ends_with_the_reason() -> None:
    job = Job()
    one = job.agents["0:0"]
    content = zlib.compress(b"{}")
    one._handle(Parcel(9, hashlib.sha256(content).hexdigest(), base64.b64encode(content).decode()))
    with pytest.raises(JobEnded, match="0:0 cannot read what the coordinator has told"):
        one.wait_go(9)


def test_a_memory_is_its_owner_s_and_holds_what_was_written_or_nothing(memory: HostMemory) -> None:
    same = HostMemory.given(memory.address)
    assert same is not None and same.name == memory.name
    content, digest = b"abc" * 1000, hashlib.sha256(b"abc" * 1000).hexdigest()
    assert same.read(digest) is None
    memory.write(b"x" * 9999), memory.write(content)
    assert same.read(digest) == content
    os.pwrite(memory.descriptor, b"?", 77)
    assert same.read(digest) is None, "half written, say"
    os.close(same.descriptor)
    assert same.read(digest) is None
    same.write(content)  # its owner has closed it: nothing happens
    with open(os.devnull) as other:
        for wrong in (None, "", "x", f"{other.fileno()}:{memory.name}", f"{memory.descriptor}:recycle-0", "-1:x",
                      f"{other.fileno()}:", "999999:x", f"{memory.descriptor}"):
            assert HostMemory.given(wrong) is None


def test_a_grid_that_no_plan_can_be_told_of_is_refused_when_the_job_forms() -> None:
    cluster = Cluster()
    cluster.grid = {**cluster.grid, "microbatches": [2_000_000] * 3}
    for name in cluster.names:
        cluster.hello(name)
    for name in cluster.names:
        decisions = cluster.ready(name)
    (end,) = endings(decisions)
    assert "the grid is too large: 3 pipelines x 2 stages with 6000000 micro-batches make 24000000" in end.message
    assert forming._too_large(forming.Grid(16, (64,) * 1024)) == ""


# Over sockets, and in memory


def large(job: Any, failed: frozenset[str]) -> PlanFile:
    """More than a frame holds; two parts and more when packed."""
    return replace(fake_plan(job, failed), source=noise(300_000) + "x" * MAX_PAYLOAD)


def train(running: Service, **options: Any) -> dict[str, Any]:
    agents = {name: agent(running.address, name, **options) for name in NAMES}
    for one in agents.values():
        one.ready(DESCRIPTION, report(attempt=0))
    return agents


def test_a_plan_larger_than_a_frame_is_told_after_each_failure_and_offered(tmp_path: Path, memory: HostMemory) -> None:
    with service(tmp_path, plan=large) as running:
        agents = train(running, memory=memory)
        for one in agents.values():
            first = one.wait_go(1, LIMIT)
            assert first is not None and len(first.plan.source) > MAX_PAYLOAD
            one.resumed(1)
        better = replace(large(None, frozenset()), digest="sha256:better")
        running.call(running.coordinator.feed, inputs.Improved(1, better, 1.0))
        limit = time.monotonic() + LIMIT
        while any(one.offer is None for one in agents.values()):
            assert time.monotonic() < limit
            time.sleep(0.005)
        assert all(one.offer is not None and one.offer.plan == better for one in agents.values())
        running.call(running.coordinator.feed, inputs.Exited(3, 1003, -9, time.time()))
        agents.pop("1:1").close()
        for one in agents.values():
            one.wait_stop(1)
            one.report(2, report())
        for one in agents.values():
            second = one.wait_go(2, LIMIT)
            assert second is not None and second.plan.failed == ["1:1"]
            one.close()


def test_a_go_that_cannot_be_told_ends_the_job_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an offer that cannot is done without."""
    monkeypatch.setattr(parcels, "MOST_BYTES", 10_000)
    sizes = iter((100, 20_000))
    with service(tmp_path, plan=lambda job, failed: replace(fake_plan(job, failed), source=noise(next(sizes)))
                 ) as running:
        agents = train(running)
        for one in agents.values():
            assert one.wait_go(1, LIMIT) is not None
            one.resumed(1)
        running.call(running.coordinator.feed, inputs.Improved(1, large(None, frozenset()), 1.0))
        agents["0:0"].event(RolledBack(1, 0))
        running.await_event("rolled_back")
        assert running.coordinator.state.ended is None
        running.call(running.coordinator.feed, inputs.Exited(3, 1003, -9, time.time()))
        agents.pop("1:1").close()
        for one in agents.values():
            one.wait_stop(1)
            one.report(2, report())
        for one in agents.values():
            with pytest.raises(JobEnded, match="cannot be told to go on: a go of .* bytes exceeds 10000"):
                one.wait_go(2, LIMIT)
            one.close()


def test_a_worker_that_cannot_tell_where_it_stands_ends_with_the_reason(tmp_path: Path) -> None:
    """What it was measuring is left out."""
    with service(tmp_path) as running:
        one = agent(running.address, "0:0")
        one.measured([{"F": 1.0}] * 500_000, [], None)
        one.leave()
        limit = time.monotonic() + LIMIT
        while not one._leave_sent:
            assert time.monotonic() < limit
            time.sleep(0.005)
        assert one.ended is None
        one.ready(DESCRIPTION, report(), ({"text": noise(MAX_PAYLOAD + 10_000)},))
        with pytest.raises(JobEnded, match="cannot tell what it has to: a message of .* bytes exceeds"):
            one.wait_go(1, LIMIT)
        one.close()


def test_a_guest_fetches_nothing_that_it_was_not_told_of(tmp_path: Path) -> None:
    hello = {"role": "worker", "worker": "1:0", "rank": 2, "incarnation": "join-1", "pid": 77, "host": "far",
             "generation": 0}
    asks = [{"type": "fetch", "digest": digest, "part": part, "memory": memory}
            for digest in ("", "0" * 64) for part in (0, -1, 10**9) for memory in ("", "x")]
    with service(tmp_path) as running:
        agents = train(running)
        for one in agents.values():
            assert one.wait_go(1, LIMIT) is not None
        with visit(running, SECRET, hello, *asks, {"type": "fetched", "digest": "", "memory": "x"},
                   worker=True) as answers:
            got = [answers.get(timeout=LIMIT) for _ in range(len(asks) + 1)]
        assert {message.type for message in got} == {"stop", "part"}
        assert not any(getattr(message, "parts", 0) for message in got)
        for one in agents.values():
            one.close()


@pytest.mark.usefixtures("small")
def test_a_coordinator_that_dies_while_its_go_is_fetched_is_followed_by_one_that_begins_again(
    monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    job.exit("1:1")
    job.heap.run()
    for one in job.agents.values():
        one.report(2, report())
    monkeypatch.setattr(job.coordinator._parcels, "fetch", lambda *ask: None)
    job.heap.run(0.2)
    assert job.coordinator.state.go is not None and job.coordinator.state.go.generation == 2
    assert all(one.generation == 1 for one in job.agents.values()), "all of them fetch it"
    job.coordinator = job.led(before=job.coordinator)
    job.heap.run(1.0)
    assert job.coordinator.state.generation == 3
    for one in job.agents.values():
        one.report(3, report())
    job.heap.run(1.0)
    assert {go.resume.next for go in job.resume(3).values()} == {0}
