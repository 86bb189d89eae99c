"""A newcomer's question before its script begins: what the process of its rank was told at the start."""

from __future__ import annotations

import queue
from typing import Any

from megatron_recycle.control.link import Link
from megatron_recycle.errors import JobEnded
from megatron_recycle.membership.protocol import TO_NEWCOMER, Heartbeat, Learnt, NewcomerHello

_PATIENCE = 60.0
"""Seconds that a coordinator which is being started again is waited for."""


def ask_record(address: str, token: str, rank: int, patience: float = _PATIENCE) -> list[dict[str, Any]]:
    """The set-up record of this rank, from the start of the job whose coordinator listens at ``address``.

    Raises:
        JobEnded: nobody answers within ``patience`` seconds, or the token is wrong.
    """
    answers: queue.SimpleQueue[Learnt] = queue.SimpleQueue()
    link = Link(address, token, hello=lambda: [NewcomerHello(rank, "newcomer")],
                handle=answers.put, beat=Heartbeat, interval=1.0,
                known=TO_NEWCOMER, name="recycle-newcomer")
    link.start()
    try:
        return list(answers.get(timeout=patience).record)
    except queue.Empty:
        raise JobEnded(f"the coordinator at {address} does not say what this rank was told at the start of the job "
                       f"({link.error or 'connected'}), so that this process cannot join it") from None
    finally:
        link.close()
