"""A host that joins may have a lesser secret than the job's token: with it workers come in, and nobody commands."""

from __future__ import annotations

import asyncio
import importlib.util
import queue
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recycle.control.admission import GuestPermissions, part
from megatron_recycle.control.link import Link
from megatron_recycle.control.store_client import StoreClient
from megatron_recycle.control.wire import GUEST, SecureChannel, WireError, for_joining
from megatron_recycle.membership import inputs
from megatron_recycle.membership.messages import group_prefix
from megatron_recycle.membership.protocol import TO_LAUNCHER, TO_WORKER, Ask, End, Go, Heartbeat, Places
from megatron_recycle.membership.resume import Resume
from megatron_recycle.membership.state import Member, State
from megatron_recycle.plan.plan_file import PlanFile
from tests.membership.cluster import report
from tests.membership.service import DESCRIPTION, LIMIT, TOKEN, Service, agent, service

_SPEC = importlib.util.spec_from_file_location("attack", Path(__file__).parents[2] / "scripts/lab/attack.py")
assert _SPEC is not None and _SPEC.loader is not None
sys.modules["attack"] = attack = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(attack)

SECRET = for_joining(TOKEN)
WORKERS = [f"{pipeline}:{stage}" for pipeline in range(3) for stage in range(2)]


def test_the_secret_does_not_tell_the_token_and_is_another_for_every_job() -> None:
    assert SECRET.startswith(GUEST) and TOKEN not in SECRET and for_joining(SECRET) == SECRET
    assert len({for_joining(token) for token in ("a", "b", TOKEN)}) == 3


def test_both_sides_know_which_of_the_secrets_was_used() -> None:
    for secret, guest in ((TOKEN, False), (SECRET, True)):
        server, client = SecureChannel.server(TOKEN), SecureChannel.client(secret)
        client.feed(server.greeting())
        assert server.feed(client.seal({"type": "a"}) + client.seal({"type": "b"}))[1]["type"] == "b"
        assert client.feed(server.seal({"type": "c"}))[0]["type"] == "c"
        assert (server.guest, client.guest) == (guest, guest)
    for wrong in (for_joining("another job's"), "another job's"):
        server, client = SecureChannel.server(TOKEN), SecureChannel.client(SECRET)
        client.feed(server.greeting())
        with pytest.raises(WireError, match="wrong token"):
            SecureChannel.server(wrong).feed(client.seal({"type": "a"}))


def test_who_has_the_secret_cannot_pass_for_the_coordinator() -> None:
    """Of a host that joins, too, it can only be the coordinator: the secret is the same for all of them."""
    impostor, worker = SecureChannel.server(SECRET), SecureChannel.client(TOKEN)
    with pytest.raises(WireError, match="wrong token"):
        worker.feed(impostor.greeting())


@contextmanager
def visit(running: Service, secret: str, hello: dict[str, Any], *messages: Any, worker: bool = False
          ) -> Iterator[queue.SimpleQueue[Any]]:
    """A connection that says this; gives what is answered."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    said: Sequence[Any] = [{"type": "hello", **hello}, *messages]
    link = Link(running.address, secret, hello=lambda: list(said), handle=answers.put,
                beat=Heartbeat, interval=0.1,
                known=TO_WORKER if worker else TO_LAUNCHER, name="visit")
    link.start()
    try:
        yield answers
    finally:
        link.close()


def launcher(host: str) -> dict[str, Any]:
    return {"role": "launcher", "host": host, "ranks": [], "places": 0}


EXIT = {"type": "exit", "rank": 2, "pid": 1002, "status": -9, "t": 0.0, "log": "", "move": 0, "said": ""}


def test_a_guest_ends_no_job_and_no_worker_but_its_own(tmp_path: Path) -> None:
    with service(tmp_path) as running:
        agents = [agent(running.address, worker) for worker in WORKERS]
        for one in agents:
            one.ready(DESCRIPTION, report())
        running.await_event("started")
        for number, wrong in enumerate((
            [launcher("far"), {"type": "interrupt", "status": 1, "message": "end"}],
            [{"role": "worker", "worker": "1:0", "rank": 2, "incarnation": "1:0/0", "pid": 9, "host": "far",
              "generation": 1}, inputs.Leave("1:0/0")],
        )):
            with visit(running, SECRET, *wrong):
                running._until(lambda number=number: sum(e["event"] == "refused" for e in running.events) > number,
                               "refusal")
                with running._changed:
                    running.coordinator.server._refusals = type(running.coordinator.server._refusals)(60.0)
        with visit(running, SECRET, launcher("far"), EXIT, {"type": "stays_out", "rank": 2},
                   {"type": "join", "count": 1}) as answers:
            while not isinstance(answer := answers.get(timeout=LIMIT), Places):
                pass  # what has happened so far
            assert "no place" in answer.refusal or "not started by" in answer.refusal
        assert not any(event["event"] in ("decided", "suspected", "left", "finished") for event in running.events)
        assert running.end is None
        with visit(running, TOKEN, launcher("near"), EXIT):
            running.await_event("decided", generation=2)
        with visit(running, SECRET, {"role": "worker", "worker": "1:0", "rank": 2, "incarnation": f"{GUEST}1",
                                     "pid": 77, "host": "far", "generation": 0},
                   inputs.Ready(f"{GUEST}1", DESCRIPTION, report()), worker=True):
            running.await_event("waiting", worker="1:0", pid=77)
        for one in agents:
            one.close()


def test_a_guest_begins_no_job(tmp_path: Path) -> None:
    hello = {"role": "worker", "worker": "0:0", "rank": 0, "incarnation": f"{GUEST}1", "pid": 1, "host": "far",
             "generation": 0}
    with service(tmp_path) as running, visit(running, SECRET, hello, worker=True) as answers:
        told = answers.get(timeout=LIMIT)
        assert isinstance(told, End) and "nobody begins a job" in told.message


def test_a_guest_writes_to_the_store_only_where_members_meet_and_over_nobody(tmp_path: Path) -> None:
    with service(tmp_path) as running:
        host, visitor = (StoreClient(running.address, secret) for secret in (TOKEN, SECRET))
        host.ask("set", ["k"], [b"v"], timeout=LIMIT)
        visitor.ask("tell", ["k"], [b"x"], timeout=LIMIT)
        for op, values in (("set", [b"x"]), ("add", []), ("delete", [])):
            with pytest.raises(ValueError, match="join with the job's token"):
                visitor.ask(op, ["k"], values, timeout=LIMIT)
        assert visitor.ask("get", ["k"], timeout=LIMIT).values == [b"v"]


def test_a_guest_does_not_tell_the_next_coordinator_what_others_have_to_tell(tmp_path: Path) -> None:
    """Else its store would answer counts before it knows them, and give a number twice."""
    with service(tmp_path) as running:
        agents = [agent(running.address, worker) for worker in WORKERS]
        for one in agents:
            one.ready(DESCRIPTION, report())
        running.await_event("started")
        store = running.coordinator.server.store
        store.gather([2])
        StoreClient(running.address, SECRET, 2).tell(LIMIT)
        assert store._pending == {2}
        StoreClient(running.address, TOKEN, 2).tell(LIMIT)
        assert not store._pending
        for one in agents:
            one.close()


def test_where_guests_meet_the_others() -> None:
    members = {"0:0": "1", "0:1": f"{GUEST}2"}
    began = State(size=2, generation=2, members={name: Member(name, 0, each, 1, "h")
                                                for name, each in members.items()})
    went = began.with_(go=Go(2, 1, members, PlanFile(), Resume(-1, 0, 1), "g2-a"))
    assert part(went) == "recycle/g2-a" and part(began) == f"recycle/{group_prefix(2, members)}"
    assert part(began.with_(go=replace(went.go, members={"0:0": "1"}))) == ""
    keys, guests = {"recycle/g2-a/met/0"}, GuestPermissions()
    for key, refused in (("recycle/g2-a/met/1", ""), ("recycle/g2-a/met/1", ""), ("recycle/g2-a-r1/met/1", ""),
                         ("recycle/g2-a/met/0", "has written it"), ("recycle/g2-ab/met/1", "join with"),
                         ("recycle/g1-a/met/1", "join with")):
        why = guests.refusal(Ask("set", (key,)), part(went), keys.__contains__)
        assert refused in why and bool(refused) == bool(why), key
        keys.add(key)


def test_attackers_draw_no_message_that_is_right_by_chance() -> None:
    for seed in range(3000):
        with pytest.raises(WireError):
            inputs.FROM_LAUNCHER.read(attack.wrong_field(random.Random(seed)))


def test_attackers_from_outside_get_nothing_in_and_nothing_down(tmp_path: Path) -> None:
    """scripts/lab/attack.py in small: 400 messages of ten kinds and 100 idle connections beside a job."""
    with service(tmp_path) as running:
        agents = [agent(running.address, worker) for worker in WORKERS]
        for one in agents:
            one.ready(DESCRIPTION, report())
        running.await_event("started")
        host, _, port = running.address.rpartition(":")
        target = attack.Target(host, int(port), TOKEN, random.Random(0))
        journal = (tmp_path / "journal.jsonl").read_text().count('"decided"')
        seen = asyncio.run(attack.assault(target, 400, 100))
        asyncio.run(asyncio.wait_for(attack.asked(target), LIMIT))
        assert set(seen.sent) == {kind.__name__ for kind in attack.KINDS} and not seen.kept
        assert {event["event"] for event in running.events} <= {"started", "planned", "refused"}
        assert (tmp_path / "journal.jsonl").read_text().count('"decided"') == journal and running.end is None
        for one in agents:
            one.close()
