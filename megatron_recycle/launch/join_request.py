"""`recycle run --join`: a joining host asks the job's coordinator which workers it may start."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from megatron_recycle.control.link import Link, visit
from megatron_recycle.errors import RecycleError
from megatron_recycle.membership.protocol import (
    TO_LAUNCHER,
    End,
    Interrupt,
    Join,
    LauncherHello,
    Message,
    Places,
    ToLauncher,
)

_PATIENCE = 20.0


def ask(control: str, token: str, count: int, timeout: float, say: Callable[[str], None]) -> Places:
    """Up to `count` open positions of the job whose coordinator listens at `control`; they are reserved for this host.

    Waits up to `timeout` seconds for one to become free, and reports the wait to `say`.

    Raises:
        RecycleError: no coordinator answers, the token is wrong, the job takes no hosts, or no position became free.
    """
    wish = Join(count)
    limit, shown = time.monotonic() + timeout, ""
    with visit(control, token, _greeted(wish), TO_LAUNCHER, "recycle-visit") as (answers, link):
        while True:
            places = _answer(answers, link)
            why, left = places.refusal, limit - time.monotonic()
            if not why:
                return places
            if not places.again_s or left <= 0:
                waited = f"; waited {timeout:.0f} s (--join-timeout)" if places.again_s and timeout else ""
                raise RecycleError(f"this host cannot join the job at {control}: {why}{waited}")
            if why != shown:
                say(f"recycle: waiting up to {left:.0f} s (--join-timeout) for a place in the job: {why}")
                shown = why
            time.sleep(min(places.again_s, left))
            link.send(wish)


def call_off(control: str, token: str, why: str) -> None:
    """End the job, which this host cannot take part in: the others would wait for its workers."""
    message = Interrupt(1, f"{socket.gethostname()} cannot take part: {why}")
    with (visit(control, token, _greeted(message), TO_LAUNCHER, "recycle-visit") as (answers, link),
          suppress(RecycleError)):
        _answer(answers, link)


def _greeted(message: Message) -> list[Message]:
    """The messages, preceded by the greeting of a launcher without workers."""
    return [LauncherHello(socket.gethostname(), (), 0, role="launcher"), message]


def _answer(answers: queue.SimpleQueue[ToLauncher], link: Link) -> Places:
    while True:
        try:
            message = answers.get(timeout=_PATIENCE)
        except queue.Empty:
            raise RecycleError(
                f"the coordinator at {link.address} does not answer ({link.error or 'connected'}): give the run folder "
                "of a job that runs, or the address that its first host's launcher printed and the job's token"
            ) from None
        if isinstance(message, Places):
            return message
        if isinstance(message, End):
            return Places(refusal=f"it is over ({message.message})")
