"""The end of a script: an error that it has not handled is reported before anything waits for its threads.

An interpreter that ends joins the script's own threads first and runs `atexit` afterwards. A script that raises while
one of its threads (a prefetcher, a logger) goes on would let the others wait for it for ever.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ScriptEnd:
    """Watches one script.

    Args:
        failed: called with the error of a script that has failed, as soon as it is over.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._left: BaseException | None = None
        self._process = os.getpid()
        # As concurrent.futures does: these run before threads are joined.
        getattr(threading, "_register_atexit", atexit.register)(self._tell)

    @property
    def error(self) -> BaseException | None:
        """The error with which the script has failed. It counts handled or not: it is that of the last call to the
        engine, if that has raised."""
        return getattr(sys, "last_value", None) or self._left

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of the script to the engine. A script that handles what it raises, and calls no more, has failed."""
        try:
            yield
        except BaseException as error:
            self._left = error
            raise
        self._left = None

    def _tell(self) -> None:
        # A process that this one has forked since (to write a checkpoint, say) ends by this as well.
        if self.error is not None and os.getpid() == self._process:
            self._failed(self.error)
