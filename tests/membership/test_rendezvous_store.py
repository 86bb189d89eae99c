"""The content of torch's store in the coordinator: asked, waited for, kept through the death of a coordinator."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_recycle.control import link, store_client
from megatron_recycle.control.ports import listen
from megatron_recycle.control.rendezvous_store import DELETED, ENTRY_BYTES, LARGEST, RendezvousStore, decoded, encoded
from megatron_recycle.control.server import Server
from megatron_recycle.control.store_client import GivenUp, NotThere, StoreClient
from megatron_recycle.membership.protocol import TO_STORE, Ask, Found, StoreHello

TOKEN = "a token that only this test has"


def ask(store: RendezvousStore, op: str, keys: Sequence[str], values: Sequence[bytes] = (), who: object = "one",
        number: int = 0, once: str = "", stamps: Sequence[int] = (),
        marks: Mapping[str, Any] | None = None) -> list[Found]:
    """The answers, in a list that a later one may come to."""
    answers: list[Found] = []
    message = Ask(op, tuple(keys), encoded(values), tuple(stamps), number, once, dict(marks or {}))
    store.ask(who, message, answers.append)
    return answers


def test_whoever_waits_is_answered_when_the_last_key_is_there_and_not_after_it_has_gone() -> None:
    store = RendezvousStore()
    first, gone = ask(store, "get", ["a", "b"], who="first"), ask(store, "wait", ["b"], who="gone")
    ask(store, "set", ["a"], [b"1"])
    store.gone("gone")
    assert not first and ask(store, "check", ["a", "b"])[0].number == 0
    ask(store, "set", ["b"], [b"2"])
    assert decoded(first[0].values) == [b"1", b"2"] and not gone


def test_whoever_looks_for_a_key_gets_its_neighbours() -> None:
    store = RendezvousStore()
    ask(store, "set", ["g/a/0", "g/a/2", "g/b/0"], [b"0", b"2", b"x"])
    ask(store, "delete", ["g/a/2"])
    waits = ask(store, "around", ["g/a/1"], who="one")
    ask(store, "set", ["g/a/1"], [b"1"])
    assert waits[0].keys == ("g/a/1", "g/a/0") and decoded(waits[0].values) == [b"1", b"0"]
    for key in ("g/a/3", "g/a/4"):
        ask(store, "set", [key], [b"x" * (LARGEST // 2 + 1)])
    assert ask(store, "around", ["g/a/0"])[0].keys == (), "the neighbours are too much: this one alone"


def test_what_must_not_be_done_twice_is_done_once_although_its_answer_was_lost() -> None:
    store = RendezvousStore()
    for _ in range(2):
        assert ask(store, "add", ["n"], number=3, once="this:1")[0].number == 3
    assert ask(store, "add", ["n"], number=1, once="another:1")[0].number == 4
    assert ask(store, "add", ["n"], number=1, once="this:2")[0].number == 5
    assert not ask(store, "add", ["n"], number=1, once="this:1"), "it comes from a connection that was left long ago"


@pytest.mark.parametrize(("op", "values", "fields"), [
    ("set", [b"x" * (LARGEST + 1)], {}), ("dance", [b"x"], {}), ("set", [b"x", b"y"], {}), ("compare_set", [b"x"], {}),
    ("tell", [b"x"], {"stamps": [-1]}), ("tell", [b"x"], {"stamps": []}), ("add", [], {"keys": []}),
    ("tell", [], {"keys": [], "marks": {"one": [1, 2]}}), ("set", [b"x"], {"once": "nameless"})])
def test_an_ask_that_makes_no_sense_is_answered_so(op: str, values: list[bytes], fields: dict[str, Any]) -> None:
    store = RendezvousStore()
    (answer,) = ask(store, op, fields.pop("keys", ["k"]), values, **fields)
    assert answer.error


def test_a_full_shelf_takes_no_more_and_keeps_what_it_has() -> None:
    store = RendezvousStore(most=10 + 2 * ENTRY_BYTES)
    assert not ask(store, "set", ["a"], [b"12345678"])[0].error
    assert "full" in ask(store, "set", ["b"], [b"123"])[0].error
    assert not ask(store, "set", ["a"], [b"1"])[0].error and not ask(store, "set", ["b"], [b"123"])[0].error
    assert "full" in ask(store, "set", ["c"], [b""])[0].error, "keys cost room, too"


def test_a_shelf_remembers_two_generations_and_not_all_that_was_ever_deleted() -> None:
    """Its size after many generations is that after the third, and a script's keys stay."""
    store, sizes = RendezvousStore(), list[int]()
    ask(store, "set", ["a script's"], [b"1"])
    for generation in range(1, 300):
        store.forget(generation - 2)
        for rank in range(8):
            ask(store, "set", [f"recycle/g{generation}-cafe/met/{rank}"], [b"here"])
            ask(store, "add", [f"recycle/g{generation}-cafe/world/n"], number=1, once=f"p{rank}.0:{generation}")
        sizes.append(len(store))
    assert sizes[1:] == [1 + 2 * 9] * 298
    ask(store, "set", ["recycle/g3-cafe/met/0"], [b"late"])
    ask(store, "tell", ["recycle/g3-cafe/met/1"], [b"late"], stamps=[1 << 62])
    assert len(store) == sizes[-1] and ask(store, "check", ["a script's"])[0].number == 1
    kept = store._bytes
    for number in range(3 * DELETED):
        ask(store, "set", [f"{number:06d}"], [b"x"])
        ask(store, "delete", [f"{number:06d}"])
    assert len(store) == sizes[-1] + DELETED and store._bytes == kept + DELETED * (ENTRY_BYTES + 6)


@contextmanager
def serving(port: int = 0) -> Iterator[tuple[str, Server]]:
    """A server with a store, in a thread."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def serve() -> None:
        async def go() -> None:
            server, over = Server(1, TOKEN, 5.0, SimpleNamespace(refused=lambda *_: None)), asyncio.Event()
            found.put((await server.start(listen("127.0.0.1", port)), server, asyncio.get_running_loop(), over))
            await over.wait()
            await server.close()

        asyncio.run(go())

    thread = threading.Thread(target=serve)
    thread.start()
    address, server, loop, over = found.get(timeout=60)
    try:
        yield address, server
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(60)


def test_an_empty_shelf_is_told_what_was_on_the_one_before_and_the_latest_value_counts() -> None:
    with serving() as (address, _):
        one, other = StoreClient(address, TOKEN), StoreClient(address, TOKEN)
        mine, its = one.said(0), other.said(2)
        one.ask("set", ["k", "gone"], [b"old", b"x"], timeout=60, said=mine)
        other.ask("set", ["k"], [b"new"], timeout=60, said=its)
        other.ask("add", ["n"], number=2, timeout=60, said=its)
        other.ask("delete", ["gone"], timeout=60, said=its)
    with serving(int(address.rpartition(":")[2])):
        other.ask("check", ["k"], timeout=60)
        assert one.ask("add", ["n"], number=3, timeout=60, said=mine).number == 5
        assert one.ask("get", ["k"], timeout=60).values == [b"new"]
        assert one.ask("check", ["gone"], timeout=60).number == 0


@pytest.mark.parametrize("greets", [True, False])
def test_a_coordinator_that_is_stopped_is_left_for_the_one_that_leads(monkeypatch: pytest.MonkeyPatch, greets: bool
                                                                      ) -> None:
    """Its kernel goes on to answer for it, and takes new connections."""
    for module, name in ((store_client, "SILENT_S"), (store_client, "_TURN_S"), (link, "SILENT_S"),
                         (link, "_TURN_TIMEOUT")):
        monkeypatch.setattr(module, name, 0.5)
    hold, told = threading.Event(), queue.SimpleQueue[Any]()
    with serving() as (frozen, server), serving() as (leads, other):
        client = StoreClient(f"{frozen},{leads}", TOKEN)
        connection = link.Link(client.address, TOKEN, hello=lambda: [StoreHello("store")],
                               handle=told.put, beat=lambda: Ask("count"), interval=0.05, known=TO_STORE, name="a link")
        if greets:
            connection.start()
            assert told.get(timeout=60).store == server.store.name
            client.ask("set", ["k"], [b"v"], timeout=60, said=client.said(0))
        assert server._accept_queue is not None
        server._accept_queue._loop.call_soon_threadsafe(hold.wait)
        try:
            if not greets:
                connection.start()
            assert client.ask("add", ["n"], number=1, timeout=60).number == 1
            assert client.ask("check", ["k"], timeout=60).number == int(greets)
            while getattr(told.get(timeout=60), "store", "") != other.store.name:
                continue
        finally:
            hold.set()
            connection.close()


def test_a_wait_ends_with_its_time_or_its_purpose_and_its_connection_with_it() -> None:
    with serving() as (address, _):
        client = StoreClient(address, TOKEN)
        assert client.ask("count", [], timeout=60).number == 0  # there is a connection
        with pytest.raises(NotThere, match="k: not there in time"):
            client.ask("wait", ["k"], timeout=0.01)
        with pytest.raises(GivenUp):
            client.ask("get", ["k"], timeout=60, given_up=lambda: True)
        assert client.ask("count", [], timeout=60).number == 0
        with pytest.raises(NotThere, match="cannot be reached"):
            StoreClient(address, "another token, of somebody").ask("count", [], timeout=0.2)
        client.ask("set", ["k"], [b"v"], timeout=60)
        assert client.ask("check", ["k"], timeout=60).number == 1
