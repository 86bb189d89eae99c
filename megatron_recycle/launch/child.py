"""Child processes: none outlives its parent, and the end of each is seen at once."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_SIG_IGN = ctypes.c_void_p(1)


def _before_exec(parent: int | None, deaf: bool) -> Callable[[], None] | None:
    """A function for the child, between fork and exec: die when `parent` does, and ignore Slurm's signals. It calls
    nothing that could take a lock."""
    if parent is None and not deaf:
        return None

    def prepare() -> None:
        if deaf:
            _LIBC.signal(signal.SIGTERM, _SIG_IGN)
            _LIBC.signal(signal.SIGINT, _SIG_IGN)
        if parent is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

    return prepare


def _open_log(log: Path) -> int:
    """A descriptor that appends to `log`, which only this user can read. A link is not followed."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without modes
        os.fchmod(descriptor, 0o600)
    return descriptor


class Child:
    """A process in a session of its own, so that a Ctrl-C at the terminal reaches only the launcher.

    Args:
        tied: whether the process is to be killed when this one dies.
        deaf: whether it ignores SIGTERM and SIGINT, which Slurm sends to every process of a job: it ends when it is no
            longer needed.
        keep: descriptors that the process inherits, under the same numbers.

    Logs are expendable: a process starts without one, too. Raises OSError if the host has no room for the process, or
    no such program.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        *,
        stdout: IO[Any] | int | None = None,
        tied: bool = True,
        deaf: bool = False,
        keep: Sequence[int] = (),
    ) -> None:
        self.unlogged: str | None = None
        """Why the process's output is lost, if it is."""
        with os.fdopen(self._log_file(log), "ab") as file:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=file if stdout is None else stdout,
                stderr=file,
                start_new_session=True,
                pass_fds=tuple(keep),
                preexec_fn=_before_exec(os.getpid() if tied else None, deaf),  # noqa: PLW1509 - see there
            )
        self.pid = self._process.pid
        self.log = log
        try:
            self.pidfd = os.pidfd_open(self.pid)
            """Readable when the process has ended."""
        except OSError:  # no descriptor is left: nobody would know of this process
            self._process.kill()
            self._process.wait()
            raise

    def _log_file(self, log: Path) -> int:
        """Open the log, or else a file that takes everything."""
        try:
            return _open_log(log)
        except OSError as error:
            why = "it is a link" if error.errno == errno.ELOOP else error.strerror
            self.unlogged = f"{log} cannot be written ({why})"
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    @property
    def stdout(self) -> IO[bytes] | None:
        return self._process.stdout

    def status(self) -> int | None:
        """Exit status (negative: signal), None while it lives."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children, unless it has ended. Its status is left for `collect`."""
        if self._process.returncode is None and self._ended(os.WNOHANG) is None:
            os.killpg(self.pid, number)

    def collect(self) -> int | None:
        """Exit status of a process whose pidfd is readable.

        If it failed, its children are killed too: a data loader without its trainer only holds memory.
        """
        ended = self._ended() if self._process.returncode is None else None
        if ended is not None and (ended.si_code != os.CLD_EXITED or ended.si_status != 0):
            # Not reaped yet, so the group's number cannot have been reused.
            os.killpg(self.pid, signal.SIGKILL)
        return self.wait(5.0)

    def _ended(self, options: int = 0) -> os.waitid_result | None:
        """How the process has ended; does not reap it, so its number stays its own."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | options)

    def wait(self, timeout: float) -> int | None:
        """Exit status; None if it still lives after `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def release(self) -> None:
        """Close this process's descriptors of the child. Idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        if self._process.stdout is not None:
            self._process.stdout.close()
