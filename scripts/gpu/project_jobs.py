#!/usr/bin/env python3
"""The project's own jobs on NCCL, with all workers on one GPU: without failures, then the quickstart with two kills.

    python scripts/gpu/project_jobs.py
    python scripts/gpu/project_jobs.py --only deepspeed-2x2 quickstart-deepspeed
    python scripts/gpu/project_jobs.py --cpu       # the same on gloo and CPUs: whether this script is right

A job without failures has to come to its end with status 0, every iteration committed and a loss that falls. The
quickstart compares survivors' parameters, optimizer state and losses with a run without failures, bit for bit, and
says itself whether all is well; once more with `keep_messages: all`, with which survivors run no action again. Workers
take turns on the GPU, so times say nothing about NCCL elsewhere.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # other scripts
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project need not be installed

import check_report
import one_gpu
from jobs import SCRIPTS, Job, JobFailed, exit_on_sigterm

ROOT = SCRIPTS.parent
TRAINING = {"deepspeed": "gpt_deepspeed.py", "megatron": "pretrain_gpt_megatron.py"}
_ITERATIONS = 20
_MICROBATCHES = 4
_ENDING = 30.0  # seconds for a quickstart to end what it started
_TAIL = 40  # lines of a log

Result = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """A job of ``pipelines`` x ``stages`` workers, or, with neither, the quickstart; ``limit`` in seconds. ``keeps``:
    workers keep messages, so that survivors lose nothing that they have done."""

    backend: str
    limit: float
    pipelines: int = 0
    stages: int = 0
    keeps: bool = False

    @property
    def name(self) -> str:
        quickstart = f"quickstart-{self.backend}{'-kept' * self.keeps}"
        return f"{self.backend}-{self.pipelines}x{self.stages}" if self.stages else quickstart

    def run(self, folder: Path) -> Result:
        """What came out; everything is left in ``folder``."""
        begun = time.monotonic()
        try:
            found = self._job(folder) if self.stages else self._quickstart(folder)
        except JobFailed as error:
            found = {"well": False, "error": str(error)[-4000:]}
        return {"job": self.name, **found, "seconds": round(time.monotonic() - begun, 1)}

    def _job(self, folder: Path) -> Result:
        arguments = ["--iterations", str(_ITERATIONS), "--stages", str(self.stages), "--microbatches",
                     str(_MICROBATCHES)]
        with Job(TRAINING[self.backend], arguments, folder, self.pipelines * self.stages, {}, self.limit) as job:
            committed = [event for event in job.events() if event["event"] == "committed"]
            job.check_ended_well()
        losses = [event["loss"] for event in committed]
        times = [after["t"] - before["t"] for before, after in pairwise(committed)]
        well = len(losses) == _ITERATIONS and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
        return {"well": well, "iterations": len(losses), "first_loss": losses[0], "last_loss": losses[-1],
                "median_iteration_ms": round(1000 * statistics.median(times), 1)}

    def _quickstart(self, folder: Path) -> Result:
        command = [sys.executable, str(SCRIPTS / "quickstart.py"), "--backend", self.backend, "--output", str(folder),
                   "--iterations", str(_ITERATIONS), "--limit", str(self.limit / 2)]
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "quickstart.log"
        environ = {**os.environ, "RECYCLE_KEEP_MESSAGES": "all" if self.keeps else "auto"}
        with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT,
                                                    env=environ) as child:
            try:
                status = child.wait(self.limit + _ENDING)
            except subprocess.TimeoutExpired:
                raise JobFailed(f"the quickstart did not end within {self.limit + _ENDING:.0f} s") from None
            finally:
                end(child)
        path = folder / "report.json"
        if not path.exists():
            lines = log.read_text(errors="replace").splitlines()[-_TAIL:]
            raise JobFailed(f"the quickstart ended with status {status} and no report:\n" + "\n".join(lines))
        said = json.loads(path.read_text())
        kept = ("bitwise_equal", "equal", "max_abs_difference", "values_compared", "lost_iterations", "redone_actions",
                "final_loss", "final_loss_fault_free", "failures")
        return {"well": status == 0 and not (self.keeps and said["redone_actions"]),
                **{name: said[name] for name in kept}}


def end(child: subprocess.Popen[bytes]) -> None:
    """End a quickstart that still runs, and by it the job that it has started."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_ENDING)
        except subprocess.TimeoutExpired:
            child.kill()


TRIALS = (
    Trial("deepspeed", 75, 2, 2),
    Trial("megatron", 75, 2, 2),
    Trial("deepspeed", 75, 3, 2),
    Trial("megatron", 75, 3, 2),
    Trial("deepspeed", 260),
    Trial("megatron", 260),
    Trial("deepspeed", 260, keeps=True),
)


def run_all(trials: Sequence[Trial], folder: Path, budget: float) -> Iterator[Result]:
    """One after the other; none is begun whose limit lies beyond ``budget`` seconds from now."""
    deadline = time.monotonic() + budget
    for trial in trials:
        if time.monotonic() + trial.limit > deadline:
            yield {"job": trial.name, "well": False, "error": "not run: out of time"}
        else:
            yield trial.run(folder / trial.name)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    names = [trial.name for trial in TRIALS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="JOB", choices=names, default=names, help=", ".join(names))
    parser.add_argument("--cpu", action="store_true", help="on gloo and CPUs")
    parser.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="for all of them")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu" / "jobs", help="for logs and events")
    parser.add_argument("--out", type=Path, metavar="JSON", help="the report, whose part b is written")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    exit_on_sigterm()
    if not args.cpu:
        if check_report.machine()["gpu"] is None:
            print("project_jobs.py: there is no GPU that torch can use; --cpu runs the jobs on gloo", file=sys.stderr)
            return 2
        os.environ.update(one_gpu.for_command(os.environ))
    results: list[Result] = []
    for result in run_all([trial for trial in TRIALS if trial.name in args.only], args.folder.absolute(), args.budget):
        results.append(result)
        print(f"{'well' if result['well'] else 'BAD '} {json.dumps(result)}", flush=True)
        check_report.write(args.out, "b: jobs", results)
    return 0 if all(result["well"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
