"""A link outlives errors of its owner's callbacks, and never looks well while its owner is not heard."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron_recycle.control import Agent
from megatron_recycle.control.link import Link
from megatron_recycle.errors import JobEnded
from megatron_recycle.membership.protocol import TO_LAUNCHER, Heartbeat, LauncherHello, Message, Parcel
from tests.membership.service import LIMIT, TOKEN, Service, service


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("service")) as found:
        yield found


class Calls:
    """Callbacks of a link, which say that they were called; those that are named ``fail``, ``times`` times."""

    def __init__(self, *fail: str, times: int = 1000) -> None:
        self.made: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._fail = dict.fromkeys(fail, times)

    def call(self, name: str) -> None:
        self.made.put(name)
        if self._fail.get(name, 0):
            self._fail[name] -= 1
            raise ZeroDivisionError(f"in {name}")

    def hello(self) -> Sequence[Message]:
        self.call("hello")
        return [LauncherHello("far", (), 0, role="launcher")]

    def beat(self) -> Message:
        self.call("beat")
        return Heartbeat()

    def until(self, name: str, times: int = 1) -> None:
        """Wait until this one was called so many times."""
        limit = time.monotonic() + LIMIT
        while times:
            times -= self.made.get(timeout=limit - time.monotonic()) == name


@contextmanager
def linked(address: str, calls: Calls) -> Iterator[Link]:
    link = Link(address, TOKEN, hello=calls.hello, handle=lambda message: None, beat=calls.beat, interval=0.01,
                known=TO_LAUNCHER, name="link", failed=lambda: calls.call("failed"))
    link.start()
    try:
        yield link
    finally:
        link.close(LIMIT)
        assert not link._thread.is_alive()


@pytest.mark.parametrize("name", ["hello", "beat"])
def test_an_error_in_a_callback_costs_the_connection_and_is_said(
    running: Service, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    calls = Calls(name, times=1)
    with linked(running.address, calls) as link:
        calls.until("hello", 2)
        calls.until("beat", 3)
        assert link.lost_since is None and link.error is None
    assert f"in {name}" in caplog.text and "Traceback" in caplog.text


@pytest.mark.parametrize("name", ["hello", "beat"])
def test_a_link_whose_owner_is_never_heard_counts_as_lost(
    running: Service, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """So whoever waits for the coordinator does not wait for ever."""
    calls = Calls(name)
    with linked(running.address, calls) as link:
        begun = link.lost_since
        calls.until("failed", 3)
        assert link.lost_since == begun is not None and link.error == f"in {name}"
    assert caplog.text.count("Traceback") == 1, "it is said once"


def test_an_error_after_a_failed_attempt_does_not_end_the_attempts(caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls("failed")
    with linked("127.0.0.1:1", calls):
        calls.until("failed", 2)
    assert "handling a failed attempt to connect failed" in caplog.text


def test_a_worker_that_cannot_read_what_it_waits_for_ends_and_says_so() -> None:
    ended: list[Any] = []
    one = Agent("127.0.0.1:1", TOKEN, "0:0", 0, "0:0/0", link=MagicMock(), on_end=ended.append)
    one._arrivals = MagicMock(told=MagicMock(side_effect=MemoryError("no room")))
    one._handle(Parcel(1, "sha256:0", ""))
    assert "worker 0:0 cannot read what the coordinator has told: no room" in ended[0].message
    with pytest.raises(JobEnded, match="no room"):
        one.wait_go(1, LIMIT)
