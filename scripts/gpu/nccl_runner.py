"""Runs one check: a process for each of its ranks, a time limit, and a verdict."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from nccl_rank import Library, Nccl, OnCpu, Rank, since
from one_gpu import variables

from megatron_recycle import nccl_settings

Facts = dict[str, Any]
Program = Callable[[Rank], None]

BEGIN_LIMIT = 120.0
"""Seconds until all ranks of a check must be there: torch, CUDA and the default group take their time."""
_POLL = 0.1
_STACKS = 1.0  # seconds for what hangs to write its stacks


@dataclass(frozen=True)
class Check:
    """A program, and how it is expected to come out.

    Attributes:
        program: what each rank runs. Its first line of text says what happens.
        expected: "ends" (and nothing that a rank told under the name ``right`` is false), "hangs" (beyond ``limit``
            seconds), "fails" (a status other than 0), "wrong".
        means: what of the project rests on it.
        judged: ranks that count; others may do as they like. Empty: all.
        apart: nothing else runs meanwhile, since it measures times.
        torchs_settings: without the settings that a job needs.
        bound: the default group is bound to the device.
        on_cpu: whether the tests' ordered backend has what it looks at.
    """

    program: Program
    expected: str
    means: str
    size: int = 2
    limit: float = 20.0
    judged: tuple[int, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False
    torchs_settings: bool = False
    bound: bool = False
    on_cpu: bool = True

    @property
    def name(self) -> str:
        return self.program.__name__

    @property
    def what(self) -> str:
        return (self.program.__doc__ or "").strip().splitlines()[0]

    def verdict(self, statuses: Sequence[int | None], told: Sequence[Facts]) -> str:
        """How it came out, by each rank's status (None: its program was still running) and facts."""
        judged = self.judged or tuple(range(self.size))
        if not all(told[rank].get("begun") for rank in judged):
            return "does not begin"
        if any(statuses[rank] is None for rank in judged):
            return "hangs"
        if any(statuses[rank] for rank in judged):
            return "fails"
        return "wrong" if any(told[rank].get("right") is False for rank in judged) else "ends"


def environment(check: Check, rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank's process: its own NCCL_HOSTID, and the settings of a job or torch's own."""
    bare = {name: value for name, value in environ.items() if name not in nccl_settings.SETTINGS}
    bare |= {"RANK": str(rank), "WORLD_SIZE": str(check.size), "OMP_NUM_THREADS": "1"}
    settings = {} if check.torchs_settings else nccl_settings.defaults({})
    return {**bare, **variables(bare), **settings, **check.settings}


def run_rank(check: Check, rank: int, port: int, facts: Path, cpu: bool) -> None:
    """In a rank's process: run the program, and wait to be ended. It also ends with who started it, whose end of its
    standard input is closed then."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    file = os.open(facts, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(**told: Any) -> None:
        os.write(file, (json.dumps(told) + "\n").encode())  # whole, whichever thread tells

    def store(limit: float) -> dist.Store:
        return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False,
                             timeout=timedelta(seconds=limit))

    kept = store(BEGIN_LIMIT)
    library: Library = OnCpu() if cpu else Nccl(rank, check.size, kept, bound=check.bound)
    at = Rank(rank, check.size, library, store, tell)
    at.meet("begun")
    tell(begun=True)
    check.program(at)
    # It stays until all ranks are through: NCCL's sockets lose what is still on its way when their process ends.
    tell(over=True)
    threading.Event().wait()


def run_check(check: Check, cpu: bool) -> Facts:
    """Run ``check`` in processes of its own, none of which is left; returns its line of the report."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # it outlives every rank
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_Process(check, rank, store.port, Path(folder), cpu) for rank in range(check.size)]
        try:
            begun = time.monotonic()
            started = _until(lambda: all(rank.facts().get("begun") or rank.ended for rank in ranks), BEGIN_LIMIT)
            clock = time.monotonic()
            judged = [ranks[rank] for rank in check.judged] or ranks
            if started:
                _until(lambda: all(rank.ended for rank in judged), check.limit)
            statuses = [rank.status() for rank in ranks]
            found = check.verdict(statuses, told := [rank.facts() for rank in ranks])
            if found != check.expected:
                _stacks_of([rank for rank in ranks if not rank.ended])
            logs = [rank.log_tail() for rank in ranks] if found != check.expected else []
        finally:
            for rank in ranks:
                rank.end()
    return {"check": check.name, "what": check.what, "means": check.means, "expected": check.expected, "found": found,
            "as_expected": found == check.expected, "seconds": since(clock), "starting_s": round(clock - begun, 3),
            "statuses": statuses, "ranks": told, **({"logs": logs} if logs else {})}


class _Process:
    """One rank's process and what it leaves."""

    def __init__(self, check: Check, rank: int, port: int, folder: Path, cpu: bool) -> None:
        self._facts, self._log = folder / f"facts-{rank}.jsonl", folder / f"log-{rank}"
        command = [sys.executable, str(Path(__file__).with_name("nccl_checks.py")), "--rank", str(rank), "--port",
                   str(port), "--facts", str(self._facts), "--only", check.name, *(["--cpu"] if cpu else [])]
        with self._log.open("w") as log:
            self._child = subprocess.Popen(command, env=environment(check, rank, os.environ), stdin=subprocess.PIPE,
                                           stdout=log, stderr=subprocess.STDOUT)

    @property
    def ended(self) -> bool:
        return self.status() is not None

    def status(self) -> int | None:
        """Its exit status, 0 once its program is over; None before."""
        return 0 if self.facts().get("over") else self._child.poll()

    def facts(self) -> Facts:
        """All that it told, the last of each name; a line that is being written does not count yet."""
        found: Facts = {}
        if self._facts.exists():
            for line in self._facts.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    found.update(json.loads(line))
        return found

    def log_tail(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()[-40:]

    def ask_for_stacks(self) -> None:
        if not self.ended:
            self._child.send_signal(signal.SIGUSR1)

    def end(self) -> None:
        self._child.kill()
        self._child.communicate()


def _stacks_of(processes: Sequence[_Process]) -> None:
    for process in processes:
        process.ask_for_stacks()
    if processes:
        time.sleep(_STACKS)


def _until(done: Callable[[], bool], limit: float) -> bool:
    """Whether ``done()`` came true within ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while not (over := done()) and time.monotonic() < deadline:
        time.sleep(_POLL)
    return over
