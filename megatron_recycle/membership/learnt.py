"""What the processes of the start were told by each other before training began: kept for those that join later.

A process that is to join asks for the record of its rank before its script begins, when it has no name yet and is no
part of anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_recycle.membership.state import State


def answer(state: State, rank: int) -> dict[str, Any]:
    """The message that gives a newcomer the record of its rank."""
    return {"type": "learnt", "record": list(state.learnt.get(str(rank), ()))}


def stored(learnt: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """For the journal: a coordinator that is started again is asked too."""
    return {"kind": "learnt", "learnt": {rank: list(record) for rank, record in learnt.items()}, "events": []}


def restored(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """What `stored` has left in the journal."""
    return next((record["learnt"] for record in records if record["kind"] == "learnt"), {})
