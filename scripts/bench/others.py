#!/usr/bin/env python3
"""The same small model on the same cores under other systems that survive failures, beside ours, a worker killed.

    python scripts/bench/others.py                          # all systems, 3 kills each
    python scripts/bench/others.py --system ours torchft --rounds 1

Systems:

- `ours`: `recycle run`, a grid of 2 pipelines x 2 stages, `reduction: exact`.
- `torchft` 0.2.0: four replicas of the model and a lighthouse that gives up a replica after 1 s (default 5).
- `nvrx`: NVIDIA's resiliency extension 0.4.1, in-process restart, four replicas, a checkpoint every 10 iterations.
  Later versions want a newer C library than many clusters have.
- `torchrun`: torchrun's elastic restart from a checkpoint every 10 iterations, four replicas.

All train the quickstart's model (no dropout) on 16 windows of the same text an iteration, in four processes with one
thread each. One worker gets SIGKILL a third of an iteration after it has made its step. Each system is run once
without and then with failures; all rounds of all systems take turns.

Measured, from just before the signal: until somebody has made a step again; until the iteration in flight has been
made (what was lost has been made again); how many iterations were made again; how many windows no step has seen;
whether the final parameters are those of the same system's run without failure, bit for bit; windows per second
afterwards, in parts of those before. Prints a table and writes runs/bench/others.json.

The other systems get environments of their own under runs/bench/others/, made at the first use; they share this
interpreter's torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs import Job, JobFailed, exit_on_sigterm

from gpt_deepspeed import validate
from megatron_recycle.control.ports import listen
from megatron_recycle.launch.child import Child

RIVALS = Path(__file__).resolve().parent / "rivals"
PACKAGES = {"torchft": "torchft==0.2.0", "nvrx": "nvidia-resiliency-ext==0.4.1", "torchrun": ""}
SYSTEMS = ("ours", *PACKAGES)
WORKERS, BATCH = 4, 16
VICTIM = 2
"""A worker that hosts no store: the others' rank 0 does."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """A worker has made its step of an iteration."""

    t: float
    worker: int
    pid: int
    iteration: int
    samples: int


@dataclass
class Run:
    """A job of one system as a context manager: nothing of it outlives the block."""

    system: str
    folder: Path
    iterations: int
    limit: float
    python: Path = Path(sys.executable)
    service: Child | None = None

    def __enter__(self) -> Run:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.deadline = time.monotonic() + self.limit
        self.children = getattr(self, f"_start_{self.system}")()
        return self

    def __exit__(self, *failure: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):  # torchrun ends its workers when it gets the first
            for child in self.children:
                if child.status() is None:
                    child.signal(number)
            for child in self.children:
                child.wait(10)
        for child in self.children:
            child.release()

    def _child(self, command: Sequence[object], environ: Mapping[str, str], log: str) -> Child:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environ}
        return Child([str(word) for word in command], variables, self.folder / f"{log}.log")

    def _script(self) -> list[object]:
        return [RIVALS / f"train_{self.system}.py", "--iterations", self.iterations, "--folder", self.folder,
                "--workers", WORKERS]

    def _start_torchrun(self) -> list[Child]:
        command = [self.python, "-m", "torch.distributed.run", "--nproc-per-node", WORKERS, "--rdzv-backend",
                   "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--max-restarts", 3, *self._script()]
        # Or workers that are started again find the addresses of those before in the store that they share.
        return [self._child(command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "torchrun")]

    def _start_nvrx(self) -> list[Child]:
        common = {"WORLD_SIZE": str(WORKERS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [self._child([self.python, *self._script()], {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                            f"worker-{rank}") for rank in range(WORKERS)]

    def _start_torchft(self) -> list[Child]:
        port = free_port()
        lighthouse = [self.python.parent / "torchft_lighthouse", "--bind", f"127.0.0.1:{port}", "--min_replicas", 2,
                      "--quorum_tick_ms", 100, "--join_timeout_ms", 1000, "--heartbeat_timeout_ms", 1000]
        common = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
        self.service = self._child(lighthouse, {}, "lighthouse")
        workers = [self._child([self.python, *self._script()], {**common, "REPLICA_GROUP_ID": str(rank)},
                               f"worker-{rank}") for rank in range(WORKERS)]
        return [self.service, *workers]

    def lines(self) -> list[Line]:
        path = self.folder / "iterations.jsonl"
        if not path.exists():
            return []
        whole = path.read_text().rpartition("\n")[0]
        found = [json.loads(line) for line in whole.splitlines()]
        return [Line(line["t"], line["worker"], line["pid"], line["iteration"], line["samples"]) for line in found]

    def results(self) -> list[Path]:
        return sorted(self.folder.glob("result-*.pt"))

    def until(self, reached: Callable[[], Any], what: str) -> Any:
        while not (found := reached()):
            late = time.monotonic() > self.deadline
            # All are asked: nvrx waits until somebody has taken note of the end of a process.
            statuses = [child.status() for child in self.children if child is not self.service]
            if late or None not in statuses:
                why = f"within {self.limit:.0f} s" if late else "and its processes have ended"
                raise JobFailed(f"{self.system}: no {what} {why}; see {self.folder}")
            time.sleep(0.002)
        return found

    def ended(self, survivors: int) -> bool:
        """A worker that is left has written its result, and all of them have ended or need not be waited for."""
        if self.system == "torchft":
            return len(self.results()) >= survivors
        return bool(self.results())


def rival(system: str, python: Path, folder: Path, args: argparse.Namespace, kill: bool) -> Row:
    """One run of another system. Raises JobFailed."""
    with Run(system, folder, args.iterations, args.limit, python) as run:
        moment, flying = 0.0, 0
        if kill:
            line = run.until(lambda: next((line for line in run.lines() if line.worker == VICTIM
                                           and line.iteration >= args.kill_after), None), "iteration to kill in")
            time.sleep(pace([line for line in run.lines() if line.worker == VICTIM]) / 3)
            moment, flying = time.time(), line.iteration + 1
            os.kill(line.pid, signal.SIGKILL)
        run.until(lambda: run.ended(WORKERS - 1 if kill else WORKERS), "result")
        lines = run.lines()
        result = torch.load(run.results()[0], weights_only=True)
    # Of one that was there from the start: a replica of torchft's may come in later.
    survivor = min({line.worker for line in lines} - {VICTIM},
                   key=lambda worker: min(line.iteration for line in lines if line.worker == worker))
    steps = [(line.t, line.iteration) for line in lines if line.worker == survivor]
    return {**measured(steps, moment, flying), "parameters": result, "unseen": unseen(lines, args.iterations)}


def ours(folder: Path, args: argparse.Namespace, kill: bool) -> Row:
    """One run of ours. Raises JobFailed."""
    shutil.rmtree(folder, ignore_errors=True)
    words = ["--iterations", args.iterations, "--stages", 2, "--microbatches", 2, "--batch", BATCH // 4, "--dropout",
             0, "--lr", 1e-3, "--dump", folder / "dump"]
    commits: list[tuple[float, int]] = []
    moment = 0.0
    settings = {"reduction": "exact"}
    with Job("gpt_deepspeed.py", [str(word) for word in words], folder, WORKERS, settings, args.limit) as job:
        for event in job.events():
            if event["event"] != "committed":
                continue
            commits.append((event["t"], event["iteration"]))
            if kill and not moment and event["iteration"] == args.kill_after:
                time.sleep(pace([Line(t, 0, 0, i, 0) for t, i in commits]) / 3)
                moment = job.kill("1:1")
        job.check_ended_well()
    dumps = [torch.load(path, weights_only=True) for path in sorted((folder / "dump").glob("worker-0-*.pt"))]
    parameters = {name: value for dump in dumps for name, value in dump["parameters"].items()}
    return {**measured(commits, moment, args.kill_after + 1), "parameters": parameters, "unseen": 0,
            "validation": validate(folder / "dump")["final_validation_loss"]}


def measured(steps: Sequence[tuple[float, int]], moment: float, flying: int) -> Row:
    """What one worker's steps, as (time, iteration), say about a kill at `moment` in iteration `flying`."""
    if not moment:
        return {}
    before: list[tuple[float, int]] = []
    after: list[tuple[float, int]] = []
    for t, iteration in sorted(steps):
        # Who was a little behind the victim makes its step of an iteration that was reduced before the kill.
        late = iteration < flying and iteration not in [known for _, known in before]
        (before if t <= moment or late else after).append((t, iteration))
    back = next(t for t, iteration in after if iteration >= flying)
    usual = statistics.median(b[0] - a[0] for a, b in pairwise(before[-10:]))
    later = [t for t, iteration in after if iteration > flying]
    return {
        "again_s": round(after[0][0] - moment, 3),
        "caught_up_s": round(back - moment, 3),
        "lost_iterations": sum(1 for _, iteration in after if iteration < flying),
        "an_iteration_s": round(usual, 4),
        "pace_afterwards": round(usual / statistics.median(b - a for a, b in pairwise(later)), 3),
    }


def unseen(lines: Sequence[Line], iterations: int) -> int:
    """Windows of the run that no step has seen."""
    seen: dict[int, int] = {}
    for line in lines:
        seen[line.iteration] = max(seen.get(line.iteration, 0), line.samples)
    return iterations * BATCH - sum(seen.values())


def pace(lines: Sequence[Line]) -> float:
    """Seconds of the shortest of one worker's last iterations."""
    return min(after.t - before.t for before, after in pairwise(lines[-5:]))


def free_port() -> int:
    """A port that is free now; the two after it are used as well."""
    with listen("127.0.0.1", 0) as socket:
        return int(socket.getsockname()[1])


def environment(system: str, folder: Path) -> Path:
    """The interpreter of an environment with this system in it; made at the first use."""
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    if not stamp.exists() or stamp.read_text() != PACKAGES[system]:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        packages = next(folder.glob("lib/python*/site-packages"))
        (packages / "zz-shared-torch.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        if PACKAGES[system]:
            command = [str(python), "-m", "pip", "-q", "install", PACKAGES[system]]
            command = [str(python), "-m", "pip", "-q", "install", PACKAGES[system]]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise JobFailed(f"{system}: pip cannot install {PACKAGES[system]}:\n{done.stderr}")
        stamp.write_text(PACKAGES[system])
    return python


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def summary(rows: Sequence[Row]) -> Row:
    """Medians; counts as they were; bits equal only if they were each time."""
    found: Row = {name: statistics.median(row[name] for row in rows) for name in rows[0]
                  if name not in ("parameters", "validation", "bits_equal")}
    return {**found, "bits_equal": all(row["bits_equal"] for row in rows), "kills": len(rows)}


def show(results: Mapping[str, Row], console: Console) -> None:
    table = Table("", "step again", "caught up", "made again", "windows unseen", "bits equal", "an iteration",
                  "pace afterwards")
    for system, row in results.items():
        if "failed" in row:
            table.add_row(system, row["failed"].splitlines()[0])
            continue
        table.add_row(system, f"{row['again_s']:.2f} s", f"{row['caught_up_s']:.2f} s", f"{row['lost_iterations']:.0f}",
                      f"{row['unseen']:.0f}", "yes" if row["bits_equal"] else "no",
                      f"{1000 * row['an_iteration_s']:.0f} ms", f"{row['pace_afterwards']:.2f}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--system", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="kills of each system (default 3)")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--kill-after", type=int, default=27, metavar="ITERATION")
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS", help="for each run")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/others.json"))
    args = parser.parse_args()
    exit_on_sigterm()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    folder = args.output.absolute().with_suffix("")

    def once(system: str, number: int, kill: bool) -> Row:
        where = folder / f"{system}-{number}"
        if system == "ours":
            return ours(where, args, kill)
        return rival(system, environment(system, folder / f"env-{system}"), where, args, kill)

    rows: dict[str, list[Row]] = {system: [] for system in args.system}
    failed: dict[str, str] = {}
    calm: dict[str, Row] = {}
    for number in range(args.rounds + 1):
        for system in [name for name in args.system if name not in failed]:
            try:
                row = once(system, number, kill=number > 0)
            except JobFailed as error:
                failed[system] = str(error)
                print(f"others.py: {error}", file=sys.stderr)
                continue
            if number == 0:
                calm[system] = row
                continue
            rows[system].append({**row, "bits_equal": equal(row["parameters"], calm[system]["parameters"])})
            print(f"{system}: a step again after {row['again_s']:.2f} s", flush=True)
    results = {name: {"failed": failed[name]} if name in failed else summary(found) for name, found in rows.items()}
    show(results, console)
    each = {name: [{key: value for key, value in row.items() if key != "parameters"} for row in found]
            for name, found in rows.items()}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"systems": results, "each": each, "packages": PACKAGES, "workers": WORKERS,
                                       "processors": os.cpu_count(), "load": os.getloadavg()[0]}, indent=2) + "\n")
    print(f"every number is in {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
