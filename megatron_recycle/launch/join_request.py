"""`recycle run --join`: a host that comes to a running job asks its coordinator which workers it may start."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from megatron_recycle.control.link import Link
from megatron_recycle.control.wire import Message
from megatron_recycle.errors import RecycleError
from megatron_recycle.membership.messages import TO_LAUNCHER

_PATIENCE = 20.0


@dataclass(frozen=True)
class Vacancies:
    """The answer to a host that joins: ranks without a worker, the job's size, and the
    settings in the environment of the job's first host."""

    ranks: tuple[int, ...]
    size: int
    environ: Mapping[str, str]


def ask(control: str, token: str, count: int, timeout: float, say: Callable[[str], None]) -> Vacancies:
    """Up to `count` free places of the job whose coordinator listens at `control`; they are kept for this host.

    Waits up to `timeout` seconds for one to become free, and says so to `say`.

    Raises:
        RecycleError: nobody answers, the token is wrong, the job takes nobody, or no place became free.
    """
    wish: Message = {"type": "join", "count": count}
    limit, said = time.monotonic() + timeout, ""
    with _visit(control, token, wish) as (answers, link):
        while True:
            told = _answer(answers, link)
            why, left = told["refusal"], limit - time.monotonic()
            if not why:
                return Vacancies(tuple(told["ranks"]), told["size"], dict(told["environ"]))
            if not told["again_s"] or left <= 0:
                waited = f"; waited {timeout:.0f} s (--join-timeout)" if told["again_s"] and timeout else ""
                raise RecycleError(f"this host cannot join the job at {control}: {why}{waited}")
            if why != said:
                say(f"recycle: waiting up to {left:.0f} s (--join-timeout) for a place in the job: {why}")
                said = why
            time.sleep(min(told["again_s"], left))
            link.send(wish)


def call_off(control: str, token: str, why: str) -> None:
    """End the job, which this host cannot take part in: the others would wait for its workers."""
    message = {"type": "interrupt", "status": 1, "message": f"{socket.gethostname()} cannot take part: {why}"}
    with _visit(control, token, message) as (answers, link), suppress(RecycleError):
        _answer(answers, link)


@contextmanager
def _visit(control: str, token: str, message: Message) -> Iterator[tuple[queue.SimpleQueue[Message], Link]]:
    """A connection as a launcher without workers that says this; and what is answered."""
    answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
    hello: list[Message] = [{"type": "hello", "role": "launcher", "host": socket.gethostname(), "ranks": [],
                             "places": 0}, message]
    link = Link(
        control,
        token,
        hello=lambda: hello,
        handle=answers.put,
        beat=lambda: {"type": "heartbeat", "progress": None},
        interval=1.0,
        known=TO_LAUNCHER,
        name="recycle-visit",
    )
    link.start()
    try:
        yield answers, link
    finally:
        link.close()


def _answer(answers: queue.SimpleQueue[Message], link: Link) -> Mapping[str, Any]:
    while True:
        try:
            message = answers.get(timeout=_PATIENCE)
        except queue.Empty:
            raise RecycleError(
                f"the coordinator at {link.address} does not answer ({link.error or 'connected'}): give the run folder "
                "of a job that runs, or the address that its first host's launcher printed and the job's token"
            ) from None
        if message["type"] == "places":
            return message
        if message["type"] == "end":
            return {"refusal": f"it is over ({message['message']})", "again_s": 0}
