"""A launcher does not depend on the process that has started it, nor on the terminal that shows its output."""

from __future__ import annotations

import signal
from collections.abc import Sequence

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
