"""What goes wrong inside a worker's process, as opposed to with it: for the bodies of the DeepSpeed jobs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_recycle.backends.deepspeed.engine import DeepSpeedStage
from megatron_recycle.runtime import recovery
from megatron_recycle.runtime.attempt import Attempt
from megatron_recycle.runtime.comm import network, rendezvous
from megatron_recycle.runtime.comm.abort import foreign
from megatron_recycle.runtime.comm.sending import Sender
from megatron_recycle.runtime.compute.data import DatasetSource
from megatron_recycle.runtime.phases import Phases
from megatron_recycle.runtime.worker import StageWorker
from tests.backends import gpt_job


@dataclass(frozen=True)
class Fault:
    """``kind`` happens to ``worker`` at its ``nth`` (from 0) arrival at ``phase`` of ``iteration``.

    Kinds: ``abort`` (all its connections break), ``apart`` (those of torch's WORLD do), ``swallow`` (its next
    activation or gradient never leaves it), ``flip`` (one bit of a parameter), ``nan`` (a parameter is not a number
    any more), ``vanish`` and ``freeze`` (when it connects next, and has told the others where it listens).
    """

    worker: str
    kind: str
    phase: str
    iteration: int
    nth: int = 0


def train(observer_of: Callable[[str], Any], rank: int, *, faults: Sequence[Fault] = (),
          hosts: Mapping[int, str] | None = None, slow: Mapping[str, tuple[int, float]] | None = None, hop: float = 0.0,
          connecting: float | None = None, **arguments: Any) -> Any:
    """As `gpt_job.train`; the result has "forwards" too, how many this worker ran in each attempt at an iteration.

    Args:
        faults: what goes wrong.
        hosts: name of the host that a rank says it is on.
        slow: worker -> from which iteration on each of its forwards takes how many seconds longer.
        hop: seconds that each message is under way, besides what it takes.
        connecting: seconds that it may take to connect, instead of the usual.
    """
    if hosts is not None:
        os.environ["RECYCLE_HOST"] = hosts[rank]
    _install(faults)
    _show_data_loading()
    _stretch_forwards(slow or {})
    if connecting is not None:
        recovery._LONGEST_CONNECT = connecting
        rendezvous._LONGEST_CONNECT = 0.0  # it would wait for that at the end, too
    if hop:
        _stretch_transfers(hop)
    forwards = _count_forwards()
    return {**gpt_job.train(observer_of, rank, **arguments), "forwards": forwards}


def _install(faults: Sequence[Fault]) -> None:
    seen: dict[tuple[str, int], int] = {}
    enter, make = Phases.enter, StageWorker.__init__
    made: list[StageWorker] = []

    def remembered(self: StageWorker, **arguments: Any) -> None:
        made.append(self)
        make(self, **arguments)

    def entered(self: Phases, phase: Any, iteration: int, *more: Any) -> None:
        enter(self, phase, iteration, *more)
        nth = seen.get((phase, iteration), 0)
        seen[phase, iteration] = nth + 1
        for fault in faults:
            if (fault.worker, fault.phase, fault.iteration, fault.nth) == (
                    str(made[-1].site.place.me), phase.value, iteration, nth):
                _DO[fault.kind](made[-1])

    Phases.enter = entered  # type: ignore[method-assign]
    StageWorker.__init__ = remembered  # type: ignore[method-assign]


def _abort(worker: StageWorker) -> None:
    worker.current_groups().abort()


def _apart(worker: StageWorker) -> None:
    foreign(dist.group.WORLD).abort()


class _Sent:
    """A send that says it is done."""

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


def _swallow(worker: StageWorker) -> None:
    start = Sender._start

    def swallowed(self: Sender, target: Any, channel: Any, tensor: torch.Tensor) -> Any:
        Sender._start = start  # type: ignore[method-assign]
        channel.number += 1
        return _Sent()

    Sender._start = swallowed  # type: ignore[method-assign]


def _flip(worker: StageWorker) -> None:
    with torch.no_grad():
        worker.site.stage.parameters[0].data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def _nan(worker: StageWorker) -> None:
    worker.site.stage.parameters[0].data.view(-1)[0] = float("nan")


class _LastWords(dist.Store):
    """Tells the others what it is given, and is hit by a signal when it waits for what they tell."""

    def __init__(self, store: dist.Store, hit: signal.Signals) -> None:
        super().__init__()
        self._store, self._hit = store, hit

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        if not keys[0].endswith("/0"):  # the first of the others is connecting to it by now
            os.kill(os.getpid(), self._hit)
        self._store.wait(keys)

    def get(self, key: str) -> bytes:
        return self._store.get(key)


def _hit_connecting(hit: signal.Signals) -> Callable[[StageWorker], None]:
    def install(worker: StageWorker) -> None:
        new_group = network.new_group

        def hit_group(name: str, ranks: Any, store: dist.Store, **options: Any) -> Any:
            return new_group(name, ranks, _LastWords(store, hit), **options)

        network.new_group = hit_group

    return install


_DO: Mapping[str, Callable[[StageWorker], None]] = {
    "abort": _abort, "apart": _apart, "swallow": _swallow, "flip": _flip, "nan": _nan,
    "vanish": _hit_connecting(signal.SIGKILL), "freeze": _hit_connecting(signal.SIGSTOP)}


def _show_data_loading() -> None:
    """Tells the observer of every batch that is read, so that a test can hold a worker there (phase ``data``)."""
    batch = DatasetSource.batch
    run = Attempt._micro_batch
    reader: list[Attempt] = []

    def remembered(self: Attempt, action: Any) -> None:
        reader[:] = [self]
        run(self, action)

    def read(self: DatasetSource, pipeline: int, number: int) -> Any:
        if reader:
            observer = reader[0]._site.phases._observer
            assert observer is not None
            observer.on("data", reader[0]._stepper.standing.iteration, None)
        return batch(self, pipeline, number)

    Attempt._micro_batch = remembered  # type: ignore[method-assign]
    DatasetSource.batch = read  # type: ignore[method-assign]


def _stretch_forwards(slow: Mapping[str, tuple[int, float]]) -> None:
    forward = DeepSpeedStage.forward

    def stretched(self: DeepSpeedStage, *arguments: Any) -> Any:
        begin, seconds = slow.get(str(self._engine.session.place.me), (0, 0.0))
        if self._engine.global_steps >= begin:
            time.sleep(seconds)
        return forward(self, *arguments)

    DeepSpeedStage.forward = stretched  # type: ignore[method-assign]


def _stretch_transfers(seconds: float) -> None:
    send = Sender._start

    def stretched(self: Sender, *arguments: Any) -> Any:
        time.sleep(seconds)
        return send(self, *arguments)

    Sender._start = stretched  # type: ignore[method-assign]


def _count_forwards() -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    run = Attempt._micro_batch

    def counted(self: Attempt, action: Any) -> None:
        key = self._stepper.standing.iteration, self._stepper.standing.attempt
        found[key] = found.get(key, 0) + (action.kind == "F")
        run(self, action)

    Attempt._micro_batch = counted  # type: ignore[method-assign]
    return found
