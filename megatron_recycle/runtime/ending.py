"""How a script ends: what it has not handled is told before anything waits for its threads.

An interpreter that ends joins the script's own threads first and runs `atexit` afterwards. A script that raises while
one of its threads (a prefetcher, a logger) goes on would let the others wait for it for ever.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_recycle.membership import Agent, Fault


class ScriptEnd:
    """Watches one script.

    Args:
        agent: told of a failure as soon as the script is over.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._left: BaseException | None = None
        # As concurrent.futures does: these run before threads are joined.
        getattr(threading, "_register_atexit", atexit.register)(self._tell)

    @property
    def error(self) -> BaseException | None:
        """What the script has failed with. Handled or not: the last call to the engine if that has raised."""
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
        error = self.error
        if error is not None and self._agent.ended is None:
            where = self._agent.progress() if self._agent.progress is not None else {}
            self._agent.ending(Fault.of(error, where.get("iteration")))
