"""`srun recycle run SCRIPT`, nothing else: with the variables that srun sets, and launchers of one machine as nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launch.running import FAKE_WORKER, ROOT, Running

LIMIT = 80.0


NODES = {"SLURM_STEP_NUM_NODES": "2"}
TASKS = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
"""Two launchers as srun starts them: one on each of two nodes, or one for each worker of a node."""


def node(stack: ExitStack, folder: Path, job: int, rank: int, nproc: int | None = 1, step: Mapping[str, str] = NODES,
         ) -> tuple[subprocess.Popen[str], Path]:
    """One of two launchers, started in `folder` as srun does on a shared file system."""
    environ = {name: text for name, text in os.environ.items() if name not in ("RECYCLE_TOKEN", "RECYCLE_RUN_DIR")}
    environ |= {
        "PYTHONPATH": str(ROOT), "RECYCLE_INTERFACE": "127.0.0.1", "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank * (step is TASKS)), **step,
        "RECYCLE_FAKE": json.dumps({"iterations": 4, "pause": {"1": 2}}),
    }
    output = folder / f"slurm-{job}-{rank}.out"
    command = [sys.executable, str(Path(__file__).with_name("start.py")), *(["--nproc", str(nproc)] if nproc else []),
               str(FAKE_WORKER)]
    with output.open("w") as file:
        process = subprocess.Popen(command, env=environ, stdout=file, stderr=file, text=True, cwd=folder)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process, output


@pytest.mark.processes
def test_two_jobs_with_neighbouring_numbers_share_their_nodes(tmp_path: Path) -> None:
    """One has a launcher on each node, the other one for each worker."""
    jobs = {41: NODES, 42: TASKS}
    with ExitStack() as stack:
        nodes = {(job, rank): node(stack, tmp_path, job, rank, 1 if step is NODES else None, step)
                 for rank in (1, 0) for job, step in jobs.items()}
        seen = [Running(nodes[job, 0][0], tmp_path / f"runs/slurm-{job}", nodes[job, 0][1], time.monotonic() + LIMIT)
                for job in jobs]
        for job in seen:
            job.paused(1)
        found = [json.loads((job.folder / "join.json").read_text()) for job in seen]
        assert len({entry["token"] for entry in found}) == len({entry["control"] for entry in found}) == 2
        assert [len(job.children()) for job in seen] == [2, 2]
        for job in seen:
            job.go_on(1)
        for job in seen:
            assert job.wait() == 0, job.where()
        assert [process.wait(LIMIT) for process, _ in nodes.values()] == [0, 0, 0, 0]
        for job, hosts in zip(seen, ((0, 1), (0,)), strict=True):
            assert set(job.event("started")["hosts"].values()) == {f"{os.uname().nodename}/{rank}" for rank in hosts}
            assert not (job.folder / "join.json").exists()
    first, second = (nodes[41, rank][1].read_text() for rank in (0, 1))
    assert "committed" in first and "committed" not in second.partition("recycle: the job has finished")[0]
    assert "node 1 of 2 waits for the first one" in second


@pytest.mark.processes
def test_nodes_that_do_not_fit_together_do_not_wait_for_each_other(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second = (node(stack, tmp_path, 43, rank, nproc=rank + 1) for rank in range(2))
        assert [process.wait(LIMIT) for process, _ in (first, second)] == [1, 1]
    why = "the first host starts 1 workers and this one 2: give the same --nproc on every host"
    assert why in first[1].read_text() and why in second[1].read_text()
