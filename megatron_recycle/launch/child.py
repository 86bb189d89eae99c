"""Child processes that cannot outlive their parent, and whose end is seen at once."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megatron_recycle.errors import RecycleError

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def _tie_to(parent: int) -> Callable[[], None]:
    """For the child, between fork and exec: die when `parent` does. Calls nothing that could take a lock."""

    def tie() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return tie


def _open_log(log: Path) -> int:
    """A descriptor that appends to `log`, which only this user can read; not through a link, wherever that leads.

    Raises RecycleError.
    """
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise RecycleError(f"the log {log} cannot be written ({why}): remove it, or choose another --run-dir"
                           ) from error
    os.fchmod(descriptor, 0o600)
    return descriptor


class Child:
    """A process in a session of its own, so that a Ctrl-C at the terminal reaches only the launcher.

    Args:
        tied: whether the process is to be killed when this one dies.
        keep: descriptors that the process is to have, under the same numbers.

    Raises RecycleError if its log cannot be written.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        *,
        stdout: IO[Any] | int | None = None,
        tied: bool = True,
        keep: Sequence[int] = (),
    ) -> None:
        with os.fdopen(_open_log(log), "ab") as file:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=file if stdout is None else stdout,
                stderr=file,
                start_new_session=True,
                pass_fds=tuple(keep),
                preexec_fn=_tie_to(os.getpid()) if tied else None,  # noqa: PLW1509 - see _tie_to
            )
        self.pid = self._process.pid
        self.log = log
        self.pidfd = os.pidfd_open(self.pid)
        """Readable when the process has ended."""

    @property
    def stdout(self) -> IO[bytes] | None:
        return self._process.stdout

    def status(self) -> int | None:
        """Exit status (negative: signal), None while it lives."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the process and to what it has started."""
        if self._process.poll() is None:
            os.killpg(self.pid, number)

    def collect(self) -> int | None:
        """Exit status of a process whose pidfd is readable.

        If it failed, what it had started is killed too: a data loader without its trainer only holds memory.
        """
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if ended is not None and (ended.si_code != os.CLD_EXITED or ended.si_status != 0):
            # Not collected yet, so the group's number cannot be anybody else's.
            os.killpg(self.pid, signal.SIGKILL)
        return self.wait(5.0)

    def wait(self, timeout: float) -> int | None:
        """Exit status; None if it still lives after `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def release(self) -> None:
        """Close what is held of it here."""
        os.close(self.pidfd)
        if self._process.stdout is not None:
            self._process.stdout.close()
