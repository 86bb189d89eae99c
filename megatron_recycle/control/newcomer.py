"""A newcomer's question before its script begins: what the process of its rank was told at the start."""

from __future__ import annotations

import queue
from typing import Any

from megatron_recycle.control.link import visit
from megatron_recycle.errors import JobEnded
from megatron_recycle.membership.protocol import TO_NEWCOMER, NewcomerHello

_PATIENCE = 60.0
"""Seconds that a coordinator which is being started again is waited for."""


def ask_record(address: str, token: str, rank: int) -> list[dict[str, Any]]:
    """The set-up record of this rank, from the start of the job whose coordinator listens at ``address``.

    Raises:
        JobEnded: nobody answers within a minute, or the token is wrong.
    """
    hello = NewcomerHello(rank, "newcomer")
    with visit(address, token, [hello], TO_NEWCOMER, "recycle-newcomer") as (answers, link):
        try:
            return list(answers.get(timeout=_PATIENCE).record)
        except queue.Empty:
            raise JobEnded(f"the coordinator at {address} does not say what this rank was told at the start of the job "
                           f"({link.error or 'connected'}), so that this process cannot join it") from None
