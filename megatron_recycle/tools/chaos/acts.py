"""One order from its moment to its end: armed, done, perhaps undone. Never blocks; `poll` moves it on."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from megatron_recycle.membership.names import Process
from megatron_recycle.observe import holds
from megatron_recycle.observe.holds import Hold
from megatron_recycle.tools.chaos import network_faults
from megatron_recycle.tools.chaos.orders import HEAL, STALL, Order
from megatron_recycle.tools.chaos.target_job import ChaosError, TargetJob, TargetProcess

_NUMBERS = itertools.count()
_RUNS = 0.002
"""Seconds that the process runs between two stops: shorter than an action of any real model."""

Tell = Callable[..., None]
"""`tell(act, **fields)`: one line in chaos.jsonl and on the screen."""


class Missed(Exception):
    """The moment of an order has passed, or the job ended before it came."""


class Act:
    """One order in progress; `done` once its harm is done and, where due, undone.

    Raises ChaosError for a refused order, at once and from `poll`; Missed from `poll`.
    """

    def __init__(self, order: Order, job: TargetJob, tell: Tell) -> None:
        self.order = order = replace(order, workers=tuple(
            name for worker in order.workers for name in job.processes(worker)))
        self.done = False
        self._job = job
        self._tell = tell
        self._not_before = time.monotonic() + order.after
        self._armed: dict[str, tuple[Path, str]] = {}
        self._undo: Callable[[], None] | None = None
        self._undo_at: float | None = None
        for worker in order.workers:
            with job.held(worker):
                if order.observed:
                    self._meeting_place(worker)

    def poll(self) -> None:
        """Do the steps that are due."""
        now = time.monotonic()
        if self.done or now < self._not_before:
            return
        if self._undo is not None:
            if (self._undo_at is not None and now >= self._undo_at) or self._job.ended:
                self.close()
            return
        comes = self._held() if self.order.observed else self._is_in_flight()
        if comes:
            self._strike()

    def close(self) -> None:
        """Undo lasting harm, and release the workers that were held for this order."""
        undo, self._undo, self.done = self._undo, None, True
        self._release()
        if undo is not None:
            with suppress(ChaosError):  # it may be gone by now
                undo()

    # The moment

    def _is_in_flight(self) -> bool:
        wanted = self.order.iteration
        if wanted is None:
            return True
        if self._job.committed >= wanted:
            raise Missed(f"iteration {wanted} is committed already")
        self._check_running()
        return self._job.committed == wanted - 1

    def _check_running(self) -> None:
        if self._job.ended:
            raise Missed("the job ended before that")

    def _held(self) -> bool:
        """Whether all workers are held where they are to be hit, by one part at least: some phases only one part
        begins. Arms their observers first."""
        if not self._armed:
            for worker in self.order.workers:
                folder, name = self._meeting_place(worker), f"{self.order.act}-{os.getpid()}-{next(_NUMBERS)}"
                self._armed[worker] = (holds.arm(folder, name, self._hold()), name)
        reached = {Process.parse(worker).worker for worker, (path, name) in self._armed.items()
                   if (path.parent / (name + holds.REACHED)).exists()}
        for worker, (path, name) in self._armed.items():
            if (path.parent / (name + holds.MISSED)).exists():
                self.close()
                raise Missed(f"worker {worker} is past that moment already")
            if Process.parse(worker).worker not in reached:
                if self._job.ended or worker in self._job.out:
                    self.close()
                    self._check_running()
                    raise Missed(f"worker {worker} was declared out before that")
                return False
        return True

    def _hold(self) -> Hold:
        order, stalls = self.order, self.order.act == STALL
        return Hold(order.phase, order.iteration, order.nth, order.seconds if stalls else None,
                    None if stalls else holds.this_process())

    def _meeting_place(self, worker: str) -> Path:
        process = self._job.process(worker)
        folder = holds.folder_of(self._job.run_dir, process.rank, process.pid)
        if not folder.is_dir():
            raise ChaosError(f"worker {worker} does not listen for precise moments: start the job with "
                             "`recycle run --chaos allow`, or leave out --phase")
        return folder

    # The act

    def _strike(self) -> None:
        order = self.order
        if order.act in ("kill", "freeze"):
            number = signal.SIGKILL if order.act == "kill" else signal.SIGSTOP
            hit = self._job.signal(order.workers, number)
            self._release()
            for process in hit:
                self._report(process)
            self._lasts(lambda: self._thaw(order.workers))
        elif order.act == "thaw":
            self._thaw(order.workers)
            self.done = True
        elif order.act == STALL:
            for worker in order.workers:
                self._report(self._job.process(worker))
            self._armed = {}  # the stall goes on without this tool
            self.done = True
        elif order.act == "slow":
            self._slow()
        elif order.act == "coordinator":
            self._coordinator()
        else:
            self._network()

    def _report(self, process: TargetProcess, **fields: Any) -> None:
        order = self.order
        self._tell(order.act, worker=process.worker, pid=process.pid, rank=process.rank, phase=order.phase,
                   iteration=self._job.committed + 1 if order.iteration is None else order.iteration, **fields)

    def _release(self) -> None:
        for path, _ in self._armed.values():
            path.unlink(missing_ok=True)
        self._armed = {}

    def _lasts(self, undo: Callable[[], None]) -> None:
        """Undo the harm after the order's seconds. Without a duration it stays, except for slowed workers: this process
        slows them, and releases them when it ends."""
        if self.order.seconds is None and self.order.act != "slow":
            self.done, self._undo = True, None
            return
        self._undo = undo
        self._undo_at = None if self.order.seconds is None else time.monotonic() + self.order.seconds

    def _thaw(self, workers: tuple[str, ...]) -> None:
        for worker in workers:
            process = self._job.process(worker)
            folder = holds.folder_of(self._job.run_dir, process.rank, process.pid)
            for stall in folder.glob(f"{STALL}-*{holds.ARMED}"):
                stall.unlink(missing_ok=True)
            self._job.signal([worker], signal.SIGCONT)
            self._tell("thaw", worker=worker, pid=process.pid, rank=process.rank)

    def _slow(self) -> None:
        pacers = ExitStack()
        self._lasts(pacers.close)  # from the first one on: if only half are slowed, they are released as well
        for worker in self.order.workers:
            pacers.enter_context(slowed(self._job, worker, self.order.factor))
            self._report(self._job.process(worker), factor=self.order.factor)

    def _coordinator(self) -> None:
        pid = self._job.coordinator()
        os.kill(pid, signal.SIGSTOP if self.order.frozen else signal.SIGKILL)
        self._tell("coordinator", pid=pid, frozen=self.order.frozen or None, iteration=self._job.committed + 1)

        def wake() -> None:
            os.kill(pid, signal.SIGCONT)
            self._tell("thaw", coordinator=pid)

        self._lasts(wake)

    def _network(self) -> None:
        order, cuts = self.order, network_faults.Cuts()
        fields = {"hosts": list(order.hosts), "others": list(order.others) or None, "one_way": order.one_way or None,
                  "link": order.link or None, "iteration": self._job.committed + 1}
        if order.act == HEAL:
            network_faults.heal(self._job, order.hosts)
            self._tell(order.act, **fields)
            self.done = True
            return

        def undo() -> None:
            left = cuts.undo()
            self._tell(HEAL, hosts=list(order.hosts), left="; ".join(left) or None)

        self._undo = undo  # from the first cut on: half of a partition is undone as well
        network_faults.cut(self._job, order, cuts)
        self._tell(order.act, **fields, cuts=asdict(cuts))
        self._lasts(undo)


@contextmanager
def slowed(job: TargetJob, worker: str, factor: float) -> Iterator[None]:
    """A block in which `worker` takes `factor` times as long for all its work: its process is stopped and continued
    many times a second. It always runs again afterwards.

    Raises ChaosError if the process is not a live worker of the job.
    """
    with job.held(worker) as descriptor:
        process = os.dup(descriptor)
    over = threading.Event()

    def pace() -> None:
        with suppress(ProcessLookupError):  # it has ended
            while not over.wait(_RUNS):
                signal.pidfd_send_signal(process, signal.SIGSTOP)
                over.wait(_RUNS * (factor - 1.0))
                signal.pidfd_send_signal(process, signal.SIGCONT)

    thread = threading.Thread(target=pace, name=f"slow {worker}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGCONT)
        os.close(process)
