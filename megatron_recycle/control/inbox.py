"""Messages of workers as inputs of the membership machine."""

from __future__ import annotations

from typing import get_args

from megatron_recycle.membership.inputs import Ending, FromWorker, Hello, Input, Raised, WorkerHello

_INPUTS = get_args(Input)


def input_of(message: FromWorker) -> Input | None:
    """The input that a message is; None of messages that change no state: signs of life, events, measurements, an end
    without an error."""
    if isinstance(message, WorkerHello):
        return Hello(message.member, message.generation)
    if isinstance(message, Ending):
        return None if message.fault is None else Raised(message.incarnation, message.fault, message.since)
    return message if isinstance(message, _INPUTS) else None
