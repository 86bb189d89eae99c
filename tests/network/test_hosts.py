"""`recycle run` on several hosts, each with its own launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_recycle.tools.chaos.network_faults import find, set_link
from tests.launch.running import FAKE_WORKER, ROOT, Running, end
from tests.network.hosts import Hosts, hosts, ip

pytestmark = pytest.mark.processes

PORT = 29400
PATIENT = {"RECYCLE_HEARTBEAT_TIMEOUT": "30", "RECYCLE_REPORT_TIMEOUT": "40"}
QUICK = {"RECYCLE_HEARTBEAT_INTERVAL": "0.2", "RECYCLE_HEARTBEAT_TIMEOUT": "2", "RECYCLE_REPORT_TIMEOUT": "4"}


@dataclass
class Several:
    """One launcher per host; all of them write to the same run directory, as on a shared file system."""

    launchers: list[subprocess.Popen[str]]
    job: Running
    outputs: list[Path] = field(default_factory=list)

    def statuses(self) -> list[int]:
        try:
            return [process.wait(max(0.1, self.job.deadline - time.monotonic())) for process in self.launchers]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job hangs\n{self.where()}") from None

    def where(self) -> str:
        return "\n".join([*(output.read_text() for output in self.outputs), self.job.where()])


@contextmanager
def launched_on(net: Hosts, folder: Path, command: list[str], environ: Mapping[str, str], *options: str,
                limit: float = 60.0) -> Iterator[Several]:
    """`command` with the launcher's options for each host; nothing outlives the block."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "RECYCLE_TOKEN": "several hosts of one job",
                 "RECYCLE_RUN_DIR": str(folder), **QUICK, **environ}
    outputs = [folder.parent / f"host-{node}.out" for node in range(len(net.names))]
    launchers = []
    for node, name in enumerate(net.names):
        line = ["ip", "netns", "exec", name, sys.executable, *command, "--run-dir", str(folder), "--nnodes",
                str(len(net.names)), "--node-rank", str(node), "--master-addr", net.addresses[0], "--master-port",
                str(PORT), *options]
        with outputs[node].open("w") as file:
            launchers.append(subprocess.Popen(line, env=variables, stdout=file, stderr=file, text=True))
    job = Running(launchers[0], folder, outputs[0], time.monotonic() + limit)
    try:
        yield Several(launchers, job, outputs)
    finally:
        end(job, *launchers)


@pytest.fixture(scope="module")
def net() -> Iterator[Hosts]:
    with hosts(3) as made:
        yield made


@pytest.fixture(autouse=True)
def healed(net: Hosts) -> Iterator[None]:
    yield
    for name in net.names:
        set_link(name, True)
        find(name)


def fake(orders: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """A command and the environment of workers that compute nothing."""
    return [str(ROOT / "tests" / "launch" / "start.py")], {"RECYCLE_FAKE": json.dumps({"iterations": 8, **orders})}


@pytest.mark.night
def test_hosts_train_together_and_their_launchers_all_end_well(net: Hosts, tmp_path: Path):
    with launched_on(net, tmp_path / "run", *fake({}), "--nproc", "2", str(FAKE_WORKER)) as several:
        assert several.statuses() == [0, 0, 0], several.where()
        started = several.job.event("started")
        assert len(set(started["hosts"].values())) == 3
        assert [event["iteration"] for event in several.job.events if event["event"] == "committed"] == [*range(8)]


@pytest.mark.night
def test_hosts_that_have_ipv6_alone_train_over_gloo_and_one_is_lost(tmp_path: Path):
    script = [str(ROOT / "scripts/gpt_deepspeed.py"), "--stages", "2", "--iterations", "60"]
    with hosts(2, ipv6=True) as net6:
        net6 = replace(net6, addresses=(f"[{net6.addresses[0]}]", *net6.addresses[1:]))
        environ = {"DS_ACCELERATOR": "cpu", **PATIENT}
        command = ["-m", "megatron_recycle.cli", "run"]
        with launched_on(net6, tmp_path / "run", command, environ, "--nproc", "2", *script, limit=240.0) as several:
            several.job.event("committed")
            several.launchers[1].kill()
            assert len(several.job.event("decided")["out"]) == 2
            assert several.statuses() == [0, -signal.SIGKILL], several.where()
            committed = [event["iteration"] for event in several.job.events if event["event"] == "committed"]
            assert committed == [*range(60)]


@pytest.mark.night
def test_a_job_whose_grid_cannot_go_on_starts_again_on_the_hosts_that_are_left(net: Hosts, tmp_path: Path):
    """Ranks 3, 4 and 5 are stage 1; host 2 has the last two of them."""
    command, environ = fake({"pause": {"3": 2, "4": 2, "5": 2}})
    options = ("--nproc", "2", "--job-restarts", "2", str(FAKE_WORKER))
    with launched_on(net, tmp_path / "run", command, environ, *options) as several:
        several.job.paused(4, 5)
        several.launchers[2].kill()
        several.job.kill(3)
        again = several.job.event("started_again")
        assert (again["restart"], again["of"], again["workers"]) == (1, 2, 4)
        assert again["reason"].startswith("stage 1 has lost its last worker")
        assert several.statuses()[:2] == [0, 0], several.where()
        started = several.job.event("started")
        assert started["grid"] == {"stages": 2, "microbatches": [3, 3]} and len(set(started["hosts"].values())) == 2
        assert [event["iteration"] for event in several.job.events if event["event"] == "committed"] == [*range(8)]
    told = several.outputs[0].read_text()
    assert "recycle: restart 1 of 2: the script starts again with 4 workers (2 pipelines, 3 micro-batches" in told
    (before,) = (tmp_path / "run").glob("before-*")
    assert (before / "journal.jsonl").exists() and (before / "worker-0.log").exists()


def test_a_host_that_is_lost_with_its_launcher_is_one_decision(net: Hosts, tmp_path: Path):
    command, environ = fake({"pause": {"0": 3}})
    with launched_on(net, tmp_path / "run", command, environ | PATIENT, "--nproc", "2", str(FAKE_WORKER)) as several:
        several.job.paused(0)
        moment = time.time()
        several.launchers[2].kill()  # its workers are tied to it
        assert several.job.event("decided")["t"] - moment < 15, "their connections have ended: not heartbeat_timeout"
        assert several.statuses() == [0, 0, -signal.SIGKILL], several.where()
        decided = [event for event in several.job.events if event["event"] == "decided"]
        assert [event["out"] for event in decided] == [{"1:1": "unreachable", "2:1": "unreachable"}]


@pytest.mark.night
def test_a_host_whose_link_goes_down_ends_by_itself(net: Hosts, tmp_path: Path):
    orders = {"pause": {"0": 3}, "patience": 3}
    with launched_on(net, tmp_path / "run", *fake(orders), "--nproc", "2", str(FAKE_WORKER)) as several:
        several.job.paused(0)
        chaos(several.job, "partition", net.names[1], "--link")
        assert several.job.event("decided")["out"] == {"2:0": "unreachable", "0:1": "unreachable"}
        statuses = several.statuses()
        assert (statuses[0], statuses[2]) == (0, 0), several.where()
        assert statuses[1] != 0
        assert several.job.children() == []


@pytest.mark.night
def test_a_host_that_was_cut_off_and_healed_offers_its_places_again(net: Hosts, tmp_path: Path):
    # One pause to be cut off in, one to come back in; then all wait until they know of it.
    orders = {"pause": {"0": 3, "1": 6}, "offered": 7, "iterations": 10}
    with launched_on(net, tmp_path / "run", *fake(orders), "--nproc", "2", str(FAKE_WORKER)) as several:
        several.job.paused(0)
        set_link(net.names[1], False)
        assert several.job.event("decided")["out"] == {"2:0": "unreachable", "0:1": "unreachable"}
        set_link(net.names[1], True)
        for name in ("2:0", "0:1"):
            several.job.event("waiting", worker=name)
        several.job.paused(1)
        several.job.go_on(1)
        assert several.statuses() == [0, 0, 0], several.where()
        assert {event["worker"] for event in several.job.events if event["event"] == "joined"} == {"2:0", "0:1"}
        assert "places are free again: rejoining (rank 2, 3)" in several.outputs[1].read_text()


def test_a_host_that_is_cut_off_for_a_moment_stays(net: Hosts, tmp_path: Path):
    command, environ = fake({"pause": {"0": 3}})
    with launched_on(net, tmp_path / "run", command, environ | PATIENT, "--nproc", "2", str(FAKE_WORKER)) as several:
        several.job.paused(0)
        chaos(several.job, "partition", net.names[1], "--for", "0.5")
        chaos(several.job, "partition", net.names[2], "--from", net.names[0], "--one-way")
        chaos(several.job, "heal", net.names[2])
        for name in net.names:
            assert "PERMANENT" not in ip("-n", name, "neighbour").stdout
        several.job.go_on(0)
        assert several.statuses() == [0, 0, 0], several.where()
        assert not [event for event in several.job.events if event["event"] == "suspected"]
    acts = [json.loads(line)["event"] for line in (tmp_path / "run" / "chaos.jsonl").read_text().splitlines()]
    assert acts == ["partition", "heal", "partition", "heal"]


def chaos(job: Running, *words: str) -> None:
    command = [sys.executable, "-m", "megatron_recycle.cli", "chaos", "--run-dir", str(job.folder), *words]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                          timeout=110)
    assert done.returncode == 0, done.stderr
