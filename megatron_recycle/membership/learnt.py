"""What the processes of the start were told by each other before training began: kept for those that join later.

A process that is to join asks for the record of its rank before its script begins, when it has no name yet and is no
part of anything.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_recycle.errors import JobEnded
from megatron_recycle.membership.link import Link
from megatron_recycle.membership.messages import TO_NEWCOMER
from megatron_recycle.membership.state import State
from megatron_recycle.membership.wire import Message

_PATIENCE = 60.0
"""Seconds that a coordinator which is being started again is waited for."""


def answer(state: State, rank: int) -> dict[str, Any]:
    """The message that gives a newcomer the record of its rank."""
    return {"type": "learnt", "record": list(state.learnt.get(str(rank), ()))}


def stored(learnt: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """For the journal: a coordinator that is started again is asked too."""
    return {"kind": "learnt", "learnt": {rank: list(record) for rank, record in learnt.items()}, "events": []}


def restored(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """What `stored` has left in the journal."""
    return next((record["learnt"] for record in records if record["kind"] == "learnt"), {})


def ask_record(address: str, token: str, rank: int, patience: float = _PATIENCE) -> list[dict[str, Any]]:
    """What the process of this rank was told at the start of the job whose coordinator listens at ``address``.

    Raises:
        JobEnded: nobody answers within ``patience`` seconds, or the token is wrong.
    """
    answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
    link = Link(address, token, hello=lambda: [{"type": "hello", "role": "newcomer", "rank": rank}],
                handle=answers.put, beat=lambda: {"type": "heartbeat", "progress": None}, interval=1.0,
                known=TO_NEWCOMER, name="recycle-newcomer")
    link.start()
    try:
        return list(answers.get(timeout=patience)["record"])
    except queue.Empty:
        raise JobEnded(f"the coordinator at {address} does not say what this rank was told at the start of the job "
                       f"({link.error or 'connected'}), so that this process cannot join it") from None
    finally:
        link.close()
