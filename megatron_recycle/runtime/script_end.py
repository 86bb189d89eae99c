"""The end of a script: an error that it has not handled is reported before anything waits for its threads.

An interpreter that ends joins the script's own threads first and runs `atexit` afterwards. A script that raises while
one of its threads (a prefetcher, a logger) goes on would let the others wait for it for ever. `os._exit()` runs no
handler, and others may still need this process: in the script's own code it ends the script as `sys.exit()` does.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn


class ScriptEnd:
    """Watches one script.

    Args:
        failed: called with the error of a failed script, as soon as it is over.
        ended: called at the end of a script that calls `os._exit()`, after ``failed`` if that was called.
        outside: whether the calling thread is in the script's own code, between two iterations.
    """

    def __init__(self, failed: Callable[[BaseException], None], ended: Callable[[], None],
                 outside: Callable[[], bool]) -> None:
        self._failed, self._ended, self._outside = failed, ended, outside
        self._left: BaseException | None = None
        self._process = os.getpid()
        self._exit, os._exit = os._exit, self._leave
        # As concurrent.futures does: these run before threads are joined.
        getattr(threading, "_register_atexit", atexit.register)(self._tell)

    @property
    def error(self) -> BaseException | None:
        """The error with which the script has failed. A handled error counts, too, if the last call to the engine has
        raised it."""
        return getattr(sys, "last_value", None) or self._left

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of the script to the engine. A script that handles its error, and calls no more, has failed."""
        try:
            yield
        except BaseException as error:
            self._left = error
            raise
        self._left = None

    def _tell(self) -> None:
        # A process that was forked from this one (to write a checkpoint, say) ends by this as well.
        if self.error is not None and os.getpid() == self._process:
            self._failed(self.error)

    def _leave(self, status: int) -> NoReturn:
        """In place of `os._exit`. Unchanged for calls inside an iteration, by a thread of the script's while training
        goes on, or in a process forked from this one (a data loader)."""
        if os.getpid() == self._process and self._outside():
            try:
                if status:
                    self._left = self.error or sys.exc_info()[1] or SystemExit(status)
                    self._failed(self._left)
                self._ended()
            except BaseException:  # noqa: BLE001  (as an exit handler's)
                traceback.print_exc()
        self._exit(status)
