"""Waits for the moments of several orders at once and carries out each of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_recycle.observe.events import EventLog, format_event
from megatron_recycle.tools.chaos.acts import Act, Missed
from megatron_recycle.tools.chaos.dice import Dice
from megatron_recycle.tools.chaos.orders import HEAL, Order
from megatron_recycle.tools.chaos.target_job import ChaosError, TargetJob

_POLL = 0.005
_WAIT = 600.0
"""Seconds to wait for a job that has not begun to train."""
_ENDING = (signal.SIGINT, signal.SIGTERM)
REFUSED, MISSED = 2, 1
"""Exit statuses."""


class Director:
    """Hurts the job in `run_dir`. A context manager, so that no cut and no stopped worker outlives it.

    Args:
        say: gets one line for each act.
    """

    def __init__(self, run_dir: Path, say: Callable[[str], None]) -> None:
        self.job = TargetJob(run_dir)
        try:
            self._log = EventLog(run_dir / "chaos.jsonl", log=False)
        except OSError as error:
            raise ChaosError(f"{run_dir / 'chaos.jsonl'} cannot be written ({error.strerror})") from error
        self._say = say
        self._acts: list[Act] = []
        self._status = 0
        self._done = False

    def __enter__(self) -> Director:
        return self

    def __exit__(self, *failure: object) -> None:
        # A second Ctrl-C, which also reaches child processes, must not leave a network cut or a worker stopped.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            for act in self._acts:
                act.close()
            self._log.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def run(self, orders: Iterable[Order]) -> int:
        """Carry out all of `orders`, each at its own moment; returns 0, MISSED or REFUSED. `heal` works also after the
        end of the job."""
        orders = list(orders)
        self.job.follow()
        if any(order.act != HEAL for order in orders):
            self.await_start()
        for order in orders:
            self._begin(order)
        while self._poll():
            time.sleep(_POLL)
        return self._status

    def run_dice(self, dice: Dice, count: int | None) -> int:
        """Do `count` random acts, or acts until the (begun) job ends; returns 0, or as `run` if none was done.

        While no worker may be hit it waits: workers that come back may be hit again.
        """
        due, left, reported = time.monotonic() + dice.pause(), count, False
        while not self.job.ended and left != 0:
            self._poll(dice)
            if time.monotonic() >= due:
                order = dice.order(self.job)
                if order is None and not reported and not self._acts:
                    reported = True
                    self._say("recycle chaos: every stage is down to the last worker that was not hit; waiting for "
                              "workers to come back (max_restarts, `recycle run --join`), or for the end of the job")
                if order is not None:
                    reported = False
                    self._begin(order)
                    left = None if left is None else left - 1
                due = time.monotonic() + dice.pause()
            time.sleep(_POLL)
        while self._poll(dice):
            time.sleep(_POLL)
        return 0 if self._done else self._status

    def await_start(self) -> None:
        """Wait until the job's events name its workers. Raises ChaosError if no job runs there."""
        limit = time.monotonic() + _WAIT
        self.job.follow()
        while not self.job.workers:
            self.job.coordinator()
            if time.monotonic() > limit:
                raise ChaosError(f"the job in {self.job.run_dir} has not begun to train within {_WAIT:.0f} s")
            time.sleep(20 * _POLL)
            self.job.follow()
        if self.job.ended:
            raise ChaosError(f"the job in {self.job.run_dir} has ended")

    def _begin(self, order: Order) -> None:
        try:
            self._acts.append(Act(order, self.job, self._tell))
        except ChaosError as error:
            self._failed(order, error)

    def _poll(self, dice: Dice | None = None) -> bool:
        """Move every act on; returns whether any is left."""
        self.job.follow()
        for act in tuple(self._acts):
            try:
                act.poll()
            except (ChaosError, Missed) as error:
                self._failed(act.order, error)
                act.close()
                if dice is not None and isinstance(error, Missed):
                    dice.spared(act.order)
            if act.done:
                self._acts.remove(act)
        return bool(self._acts)

    def _failed(self, order: Order, error: ChaosError | Missed) -> None:
        word, status = ("missed", MISSED) if isinstance(error, Missed) else ("refused", REFUSED)
        self._status = max(self._status, status)
        self._log.emit(word, order=str(order), reason=str(error))
        self._say(f"recycle chaos: {order}: {error}")

    def _tell(self, act: str, **fields: Any) -> None:
        self._done = True
        record = self._log.emit(act, **fields)
        shown = {key: value for key, value in record.items() if key != "cuts"}
        self._say(format_event(shown).replace("recycle: ", "recycle chaos: ", 1))
