"""A launcher does not depend on the process that has started it, nor on the terminal that shows its output."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_recycle.errors import ConfigError
from megatron_recycle.observe.output import detach_output


def withstand() -> None:
    """Undo all that the starter may have left to this process and that would harm it, before it starts another one.

    With SIGCHLD ignored the kernel forgets how children end. With SIGTERM blocked nobody could ask for the end.
    """
    detach_output()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def heeded() -> Sequence[int]:
    """The signals that end the job. `nohup` ignores SIGHUP, which a terminal sends when it goes away."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hangs_up else ()))


class Terminated(BaseException):
    """SIGTERM has come before a life of the job, or after it."""


@contextmanager
def terminable() -> Iterator[None]:
    """Block that SIGTERM leaves by Terminated, where no launcher heeds it: the block's own ends are carried out."""
    def leave(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def working_directory() -> str:
    """The working directory. Raises ConfigError if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the working directory was removed: start the job in another one") from error
