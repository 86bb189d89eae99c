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
from megatron_recycle.runtime.comm import network, rendezvous
from megatron_recycle.runtime.comm.abort import foreign
from megatron_recycle.runtime.comm.sending import Sender
from megatron_recycle.runtime.compute.data import DatasetSource
from megatron_recycle.runtime.worker import StageWorker
from tests.backends import gpt_job
from tests.moments import Arrivals, Moment


@dataclass(frozen=True)
class Fault:
    """``kind`` happens to a worker when it has got to ``at``.

    Kinds: ``abort`` (all its connections break), ``apart`` (those of torch's WORLD do), ``swallow`` (its next
    activation or gradient never leaves it), ``flip`` (one bit of a parameter), ``nan`` (a parameter is not a number
    any more), ``vanish`` and ``freeze`` (when it connects next, and has told the others where it listens).
    """

    kind: str
    at: Moment


def train(observer_of: Callable[[str], Any], rank: int, *, faults: Sequence[Fault] = (),
          hosts: Mapping[int, str] | None = None, slow: Mapping[str, tuple[int, float]] | None = None, hop: float = 0.0,
          **arguments: Any) -> Any:
    """As `gpt_job.train`; the result has "forwards" too, how many this worker ran of each iteration.

    Args:
        faults: what goes wrong.
        hosts: name of the host that a rank says it is on.
        slow: worker -> from which iteration on each of its forwards takes how many seconds longer.
        hop: seconds that each message is under way, besides what it takes.
    """
    if hosts is not None:
        os.environ["RECYCLE_HOST"] = hosts[rank]
    rendezvous._LONGEST_CONNECT = 0.0  # nobody waits at the end for a connection that hangs
    _stretch_forwards(slow or {})
    if hop:
        _stretch_transfers(hop)
    made: list[_Observer] = []

    def watched(worker: str) -> _Observer:
        made.append(_Observer(worker, observer_of(worker), faults))
        return made[-1]

    def watch(engine: Any) -> None:
        made[-1].session = engine.session

    result = gpt_job.train(watched, rank, watch=watch, **arguments)
    return {**result, "forwards": made[-1].forwards}


class _Observer:
    """Stands between a worker and ``observer``: does the ``faults`` of ``worker``, counts its forwards, and tells of
    every batch that is read (phase ``data``), so that a test can hold a worker there."""

    def __init__(self, worker: str, observer: Any, faults: Sequence[Fault]) -> None:
        self.forwards: dict[int, int] = {}
        self._arrivals, self._observer, self._faults = Arrivals(worker), observer, faults
        self._iteration = 0
        self.session: Any = None
        batch = DatasetSource.batch

        def read(source: DatasetSource, pipeline: int, number: int) -> Any:
            self._observer.on("data", self._iteration, None)
            return batch(source, pipeline, number)

        DatasetSource.batch = read  # type: ignore[method-assign]

    def on(self, phase: str, iteration: int, action: Any) -> None:
        self._iteration = iteration
        self._observer.on(phase, iteration, action)
        moment = self._arrivals.at(phase, iteration)
        if phase == "forward":
            self.forwards[iteration] = self.forwards.get(iteration, 0) + 1
        for fault in self._faults:
            if fault.at == moment:
                _DO[fault.kind](self.session.worker)


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
