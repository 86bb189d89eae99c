#!/usr/bin/env python3
"""Runs a training script whose iterations take turns with those of other jobs: for `overhead.py`.

    in_turns.py HOST:PORT SIDE SCRIPT [its arguments]

Every worker of every job says its SIDE once and is then told when its next iteration may begin (a byte). Where that
iteration ends, at the beginning of the next one or the end of the script, it sends a line with its times: seconds,
and processor seconds of this process.
"""

from __future__ import annotations

import json
import runpy
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Turns:
    """A worker's end of the line to the benchmark."""

    def __init__(self, address: str, side: str) -> None:
        host, _, port = address.rpartition(":")
        self._line = socket.create_connection((host, int(port)))
        self._line.sendall(f"{side}\n".encode())
        self._begun: tuple[float, float] | None = None

    def next(self) -> None:
        """An iteration begins as soon as it is this job's turn."""
        self.end()
        if not self._line.recv(1):
            raise SystemExit("in_turns.py: the benchmark has gone")
        self._begun = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """The iteration that was under way, if any, is over."""
        if self._begun is not None:
            wall, processor = self._begun
            self._begun = None
            took = time.perf_counter() - wall, time.process_time() - processor
            self._line.sendall(f"{json.dumps(took)}\n".encode())


def before(turns: Turns, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which begins an iteration, when it may."""
    def begin(*args: Any, **keywords: Any) -> Any:
        turns.next()
        return function(*args, **keywords)
    return begin


def hook_deepspeed(turns: Turns) -> None:
    import deepspeed

    initialize = deepspeed.initialize

    def initialized(*args: Any, **keywords: Any) -> Any:
        engine, *rest = initialize(*args, **keywords)
        engine.train_batch = before(turns, engine.train_batch)
        return engine, *rest

    deepspeed.initialize = initialized


def hook_megatron(turns: Turns) -> None:
    from megatron.core.distributed import DistributedDataParallel

    DistributedDataParallel.zero_grad_buffer = before(turns, DistributedDataParallel.zero_grad_buffer)


def main() -> None:
    address, side, script, *arguments = sys.argv[1:]
    turns = Turns(address, side)
    (hook_megatron if "megatron" in Path(script).name else hook_deepspeed)(turns)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        turns.end()


if __name__ == "__main__":
    main()
