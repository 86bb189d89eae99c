"""DeepSpeed's `wall_clock_breakdown`: its timers around the plan's actions, and its lines from a live worker.

Stock takes times in its own schedule, and rank 0 prints. Here the runtime reports its actions (`Stopwatch.beside`), and
the first live worker prints its own times, once for each iteration, when that is over for its script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from deepspeed.runtime.pipe.engine import BATCH_INPUT_TIMER
from deepspeed.utils import timer as stock

_BACKWARD = (stock.BACKWARD_MICRO_TIMER, stock.BACKWARD_GLOBAL_TIMER)
_INNER = (stock.BACKWARD_INNER_MICRO_TIMER, stock.BACKWARD_INNER_GLOBAL_TIMER)
_REDUCE = (stock.BACKWARD_REDUCE_MICRO_TIMER, stock.BACKWARD_REDUCE_GLOBAL_TIMER)
_TIMERS: Mapping[str, Sequence[str]] = {
    "B": (*_BACKWARD, *_INNER), "W": (*_BACKWARD, *_INNER), "reduce": _REDUCE}
"""By kind of action; DeepSpeed itself times forwards, by hooks, and the step."""


class _Timer(stock.SynchronizedWallClockTimer.Timer):
    """A timer that may be started again after its action has failed."""

    def start(self) -> None:
        self.started_ = False
        super().start()


class Timers(stock.SynchronizedWallClockTimer):
    """The engine's timers, whose lines wait until `lines` asks for them."""

    Timer = _Timer

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[tuple[str, ...], str] = {}

    def beside(self, kind: str) -> AbstractContextManager[None]:
        """A block in which the runtime runs an action of ``kind``."""
        return self.running(*_TIMERS.get(kind, ()))

    def reading(self) -> AbstractContextManager[None]:
        """A block that moves a micro-batch to its device."""
        return self.running(BATCH_INPUT_TIMER)

    @contextmanager
    def running(self, *names: str) -> Iterator[None]:
        """A block timed by the timers ``names``, even if it fails."""
        with ExitStack() as until:
            for name in names:
                self(name).start()
                until.callback(self(name).stop)
            yield

    def log(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True, memory_breakdown: bool = False,
            ranks: Sequence[int] | None = None) -> None:
        """Keep stock's line: its step may be run again."""
        found = {name: self.timers[name].elapsed(reset=reset) / normalizer for name in names if name in self.timers}
        if found:
            self._lines.setdefault(tuple(names), "time (ms)" + "".join(
                f" | {name}: {ms:.2f}" for name, ms in found.items()))

    def lines(self) -> list[str]:
        """The lines of the finished iteration."""
        found, self._lines = [*self._lines.values()], {}
        return found
