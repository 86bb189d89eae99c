"""Levelling: a worker's parts report their progress when a generation ends, so that completed work can count.

A failure elsewhere ends the generation for all parts of a worker, while each of them may be in another place. They are
all alive, so their common collectives go on until all parts have reported their progress: a part completes its current
action as long as its siblings have entered that, too. Then it stands still. A part would wait for ever in an action
that its siblings stand still before; the abort of the communicator frees it.

Nothing of this is sent before a generation ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm.abort import abort
from megatron_recycle.runtime.comm.comm import Comm, Pending
from megatron_recycle.runtime.comm.tags import LEVELS
from megatron_recycle.runtime.comm.threads import Task, Threads

_GLANCE_SECONDS = 0.05


class Position(NamedTuple):
    """A part's progress: ``done`` actions of its last attempt, which is ``attempt`` at ``iteration``."""

    iteration: int
    attempt: int
    done: int


class Levelling:
    """One part's side of the levelling, in one generation.

    Args:
        siblings: all parts of this worker.
        threads: start the threads that talk to the siblings.
        limit: seconds after which a silent sibling is not waited for.

    Attributes:
        own: this part's progress.
    """

    def __init__(self, siblings: Comm, threads: Threads, limit: float) -> None:
        self.own = Position(-1, -1, 0)
        self._siblings, self._threads, self._limit = siblings, threads, limit
        self._inside = False
        self._changed = threading.Condition()
        self._thread: Task | None = None
        self._received: list[Position] = []
        self._sent: dict[int, Pending] = {}
        self._met = 0

    # ---- the training thread

    def begin(self, iteration: int, attempt: int, done: int) -> None:
        """An attempt begins, or goes on after ``done`` actions."""
        self.own, self._inside = Position(iteration, attempt, done), True

    def did(self) -> None:
        """One more action is done."""
        self.own = self.own._replace(done=self.own.done + 1)
        self._look_again()

    def stand(self) -> None:
        """This part has left the attempt."""
        self._inside = False
        self._look_again()

    def wait(self, given_up: Callable[[], bool]) -> None:
        """Block until all parts have reported their progress, if a failure has ended the generation, or until one of
        them is lost. ``given_up()``: whether the answer is not needed any more."""
        thread = self._thread
        while thread is not None and thread.is_alive():
            if given_up():
                self.give_up()
            thread.join(_GLANCE_SECONDS)

    def _look_again(self) -> None:
        if self._thread is not None:
            with self._changed:
                self._changed.notify_all()

    # ---- any thread

    @property
    def begun(self) -> bool:
        """Whether this part has begun an attempt. Until then there is nothing to level, and a sibling may never have
        had this generation. Afterwards it has: all members have met in it by then (`Evaluations.reconcile`)."""
        return self.own.iteration >= 0

    def start(self) -> None:
        """A failure elsewhere has ended the generation. Returns at once. Idempotent."""
        with self._changed:
            if self._thread is None:
                self._thread = self._threads.start("recycle-level", self._level, self._limit)

    def give_up(self) -> None:
        """Abort the siblings' communicator, which frees a part that waits there."""
        if not self._siblings.aborted:
            abort([self._siblings], self._threads)
        self._look_again()

    # ---- threads that talk to the siblings

    def _level(self) -> None:
        end = time.monotonic() + self._limit
        others = [rank for rank in range(self._siblings.size) if rank != self._siblings.rank]
        for rank in others:
            self._threads.start("recycle-level-with", partial(self._meet, rank), self._limit)

        def until(reached: Callable[[], bool]) -> None:
            with self._changed:
                self._changed.wait_for(lambda: reached() or self._siblings.aborted, end - time.monotonic())

        try:
            until(self._stands_or_is_stuck)
            with self._changed:
                self._sent = {rank: self._siblings.send(torch.tensor(self.own), rank, LEVELS[0]) for rank in others}
                self._changed.notify_all()
            until(lambda: self._met == len(others))
        except GenerationOver:
            pass  # a sibling is lost, and with it the worker
        finally:
            self.give_up()

    def _meet(self, rank: int) -> None:
        """Exchange positions with one sibling, and wait until both have them."""
        try:
            coming = self._siblings.receive(torch.zeros(3, dtype=torch.int64), rank, LEVELS[0])
            coming.wait()
            with self._changed:
                self._received.append(Position(*map(int, coming.tensor.tolist())))
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._sent or self._siblings.aborted)
            if self._sent:
                self._sent[rank].wait()
        except BaseException as error:
            self.give_up()  # the sibling is lost, and with it the worker; or the time is over
            if not isinstance(error, GenerationOver):
                raise
        else:
            with self._changed:
                self._met += 1
                self._changed.notify_all()

    def _stands_or_is_stuck(self) -> bool:
        """Whether this part has left its attempt, or is in an action that a sibling stands still before."""
        inside = self._inside  # read before the position, which is final once it is false
        return not inside or any(other <= self.own for other in self._received)
