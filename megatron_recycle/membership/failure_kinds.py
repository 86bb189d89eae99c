"""Kinds of failures: why a position of the grid is without a worker, and the consequences."""

from __future__ import annotations

import signal
from enum import Enum


class FailureKind(str, Enum):
    """The way a worker failed or left. The text is the same on the wire, in the journal and in events.

    Attributes:
        lives: the process is alive and computes, only too slowly or wrongly. So the last such one of a stage stays:
            removing it would end the job, waiting for it may not.
        refilled: the position is refilled without the planner, by a launcher's restart or by the same process. So no
            healthy worker moves there while that may still happen.
        asked_for: nothing has failed.
    """

    lives: bool
    refilled: bool
    asked_for: bool

    EXIT = "exit"
    """The process has ended, or raised an error that its script has not handled."""
    FROZEN = "frozen"
    """No heartbeat for `heartbeat_timeout`, while its host is there."""
    STALLED = "stalled", True
    """Heartbeats, but one piece of work takes far longer than ever before; or no report in time."""
    SLOW = "slow", True
    """Slower than its peers by more than `slow_factor_out`."""
    CORRUPT = "corrupt", True
    """Its parameters or optimizer state differ from its peers'."""
    UNREACHABLE = "unreachable", False, False
    """Its whole host is silent, or has closed all its connections. Its launcher, if it comes back, rejoins."""
    LEAVE = "leave", False, False, True
    """It has asked to leave, or its script has ended well."""
    MOVE = "move", False, False, True
    """Another process stands for its worker at a position of another stage."""
    STRANDED = "stranded", True
    """It lives without work: another part of its worker (tensor parallelism) is out."""

    def __new__(cls, text: str, lives: bool = False, refilled: bool = True, asked_for: bool = False) -> FailureKind:
        made = str.__new__(cls, text)
        made._value_ = text
        made.lives, made.refilled, made.asked_for = lives, refilled, asked_for
        return made

    def __str__(self) -> str:
        return self.value


def describe_status(status: int | None) -> str:
    """An exit status in words: ``status 1``, ``signal SIGKILL``; None is an unknown one."""
    if status is None:
        return "an unknown status"
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
