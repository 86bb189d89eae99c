"""Strangers at the door do not keep out who has the token."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from megatron_recycle.control import Timeouts, server
from megatron_recycle.control.admission import AcceptQueue, Unauthenticated
from megatron_recycle.control.wire import SecureChannel
from megatron_recycle.membership.detectors import RateLimit
from tests.membership.cluster import report
from tests.membership.service import DESCRIPTION, LIMIT, TOKEN, agent, service


def test_the_oldest_of_the_address_with_the_most_has_to_go() -> None:
    room: Unauthenticated[str] = Unauthenticated(4)
    assert [room.came(f"b{n}", "b") for n in range(1)] == [None]
    assert [room.came(f"a{n}", "a") for n in range(5)] == [None, None, None, "a0", "a1"]
    room.gone("a2")
    assert room.came("c0", "c") is None and len(room) == 4
    assert room.came("d0", "d") == "a3"
    assert [room.came(f"e{n}", "e") for n in range(2)] == ["b0", "e0"], "of many with one each the oldest"
    for name in ("a4", "c0", "d0", "e1", "never came"):
        room.gone(name)
    assert len(room) == 0


def test_of_a_crowd_that_comes_at_once_the_latest_are_let_in_first_and_the_oldest_are_turned_away() -> None:
    came: list[int] = []
    away: list[str] = []

    class Guest(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            came.append(transport.get_extra_info("peername")[1])

    async def let_in() -> None:
        door = AcceptQueue(listener, 40, Guest, away.append)
        door.open()
        limit = time.monotonic() + LIMIT
        while len(came) < 40:
            assert time.monotonic() < limit, came
            await asyncio.sleep(0)
        door.close()

    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        crowd = [stack.enter_context(socket.create_connection(listener.getsockname(), LIMIT)) for _ in range(50)]
        ports = [one.getsockname()[1] for one in crowd]
        asyncio.run(let_in())
        assert [one.recv(1) for one in crowd[:10]] == [b""] * 10
    assert came == ports[:9:-1] and away == ["127.0.0.1"] * 10


def test_a_crowd_that_never_says_hello_and_is_renewed_all_the_time_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the address of those who have the token, and from others. Who is let in stays; who is not comes again."""
    monkeypatch.setattr(server, "_SPARE_STRANGERS", 64)
    over = threading.Event()

    def crowd(address: str, held: list[socket.socket]) -> None:
        while not over.is_set():
            with suppress(OSError):
                one = socket.create_connection((host, int(port)), source_address=(address, 0), timeout=LIMIT)
                held.append(one)
                one.recv(1000)  # the greeting
                one.settimeout(0.02)
                if not one.recv(1):
                    held.remove(one)
                    one.close()

    patient = Timeouts(0.1, 2.0, 5.0, hello_timeout=60.0)  # their time is not over before the test is
    with service(tmp_path, timeouts=patient) as running, ExitStack() as stack:
        host, _, port = running.address.rpartition(":")
        threads = []
        for address in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            held: list[socket.socket] = []
            threads.append(threading.Thread(target=crowd, args=(address, held)))
            stack.callback(lambda held=held: [one.close() for one in held])
        for thread in threads:
            stack.callback(thread.join, LIMIT)
            thread.start()
        stack.callback(over.set)
        limit = time.monotonic() + LIMIT
        while len(running.coordinator.server.strangers) < 70:
            assert time.monotonic() < limit
            time.sleep(0.01)
        agents = {f"{d}:{s}": agent(running.address, f"{d}:{s}") for d in range(3) for s in range(2)}
        for one in agents.values():
            stack.callback(one.close)
            one.ready(DESCRIPTION, report(attempt=0))
        for one in agents.values():
            assert one.wait_go(1, LIMIT) is not None
        assert len(running.coordinator.server.strangers) <= 70


def test_a_hello_of_a_role_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with service(tmp_path) as running:
        host, _, port = running.address.rpartition(":")
        for number, role in enumerate(([], {}, None, 3, "x"), start=1):
            with socket.create_connection((host, int(port)), timeout=LIMIT) as connection:
                session = SecureChannel.client(TOKEN)
                while not session.open:
                    session.feed(connection.recv(4096))
                connection.sendall(session.seal({"type": "hello", "role": role}))
                while connection.recv(4096):
                    pass
            running._until(lambda number=number: len(running.events) == number, "refusal")
            assert "no hello of any role" in running.events[-1]["reason"], role
            running.coordinator.server._refusals = RateLimit(60.0)
