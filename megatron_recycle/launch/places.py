"""`recycle run --join`: a host that comes to a running job asks its coordinator which workers it may start."""

from __future__ import annotations

import queue
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_recycle.errors import RecycleError
from megatron_recycle.membership.link import Link
from megatron_recycle.membership.messages import TO_LAUNCHER
from megatron_recycle.membership.wire import Message

_PATIENCE = 20.0


@dataclass(frozen=True)
class Places:
    """What a host that joins is told: ranks without a worker, the job's size, "host:port" of torch's store, and the
    settings in the environment of the job's first host."""

    ranks: tuple[int, ...]
    size: int
    store: str
    environ: Mapping[str, str]


def ask(control: str, token: str, count: int) -> Places:
    """Up to `count` free places of the job whose coordinator listens at `control`; they are kept for this host.

    Raises:
        RecycleError: nobody answers, the token is wrong, or no place is free.
    """
    answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
    hello: list[Message] = [
        {"type": "hello", "role": "launcher", "host": socket.gethostname(), "ranks": []},
        {"type": "join", "count": count},
    ]
    link = Link(
        control,
        token,
        hello=lambda: hello,
        handle=answers.put,
        beat=lambda: {"type": "heartbeat", "progress": None},
        interval=1.0,
        known=TO_LAUNCHER,
        name="recycle-join",
    )
    link.start()
    try:
        told = _answer(answers, link)
    finally:
        link.close()
    if told.get("refusal"):
        raise RecycleError(f"this host cannot join the job at {control}: {told['refusal']}")
    return Places(tuple(told["ranks"]), told["size"], told["store"], dict(told["environ"]))


def _answer(answers: queue.SimpleQueue[Message], link: Link) -> Mapping[str, Any]:
    while True:
        try:
            message = answers.get(timeout=_PATIENCE)
        except queue.Empty:
            raise RecycleError(
                f"the coordinator at {link.address} does not answer ({link.error or 'connected'}): give the address "
                "that the first host's launcher printed, and the job's token in RECYCLE_TOKEN"
            ) from None
        if message["type"] == "places":
            return message
        if message["type"] == "end":
            return {"refusal": f"it is over ({message['message']})"}
