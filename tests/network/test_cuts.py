"""`recycle chaos partition` undoes its own cuts, whoever lives by then and however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.running import ROOT
from tests.network.hosts import Hosts, hosts, ip

LIMIT = 60.0


@pytest.fixture(scope="module")
def net() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


class FakeJob:
    """A job of a sleeping worker on each host."""

    def __init__(self, net: Hosts, folder: Path) -> None:
        self.net, self.folder = net, folder
        self.workers = [
            subprocess.Popen(["ip", "netns", "exec", name, "sleep", "60"],
                             env={**os.environ, "RECYCLE_RUN_DIR": str(folder), "RANK": str(rank)})
            for rank, name in enumerate(net.names)
        ]
        pids = {f"{rank}:0": worker.pid for rank, worker in enumerate(self.workers)}
        event = {"t": time.time(), "event": "started", "pids": pids, "ranks": {"0:0": 0, "1:0": 1},
                 "grid": {"stages": 1, "microbatches": [2, 2]}}
        (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
        self.until(lambda: all(Path(f"/proc/{worker.pid}/cmdline").read_bytes().split(b"\0")[0] == b"sleep"
                               for worker in self.workers))

    def until(self, there) -> None:
        deadline = time.monotonic() + LIMIT
        while not there():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()

    def chaos(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "megatron_recycle.cli", "chaos", "--run-dir", str(self.folder), *words]
        return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)

    def told(self, act: str) -> bool:
        path = self.folder / "chaos.jsonl"
        return path.exists() and f'"event": "{act}"' in path.read_text()

    def cuts(self) -> list[str]:
        lines = [ip("-n", name, "neighbour").stdout + ip("-n", name, "link", "show", "eth0").stdout
                 for name in self.net.names]
        return [line for text in lines for line in text.splitlines() if "PERMANENT" in line or "state DOWN" in line]


@pytest.fixture(scope="module", autouse=True)
def in_the_foreground() -> Iterator[None]:
    """What a shell runs in the background ignores SIGINT, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def job(net: Hosts, tmp_path: Path) -> Iterator[FakeJob]:
    made = FakeJob(net, tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("link", [(), ("--link",)])
def test_an_interrupted_cut_is_undone_when_no_worker_lives_any_more(job: FakeJob, link: tuple[str, ...]):
    ip("-n", job.net.names[0], "neighbour", "add", "10.9.9.9", "lladdr", "02:00:00:00:00:77", "dev", "eth0", "nud",
       "permanent")  # the user's own stays
    tool = job.chaos("partition", job.net.names[0], *link, "--for", "600")
    job.until(lambda: job.told("partition"))
    assert job.cuts()
    job.end()
    tool.send_signal(signal.SIGINT)
    said = tool.communicate(timeout=LIMIT)[1]
    assert tool.returncode == 130 and "recycle chaos: heal" in said, said
    assert [line.split()[0] for line in job.cuts()] in ([], ["10.9.9.9"])  # a link that goes down forgets it
    ip("-n", job.net.names[0], "neighbour", "del", "10.9.9.9", "dev", "eth0")


def test_what_was_cut_for_good_is_healed_after_the_end_of_the_job(job: FakeJob):
    assert job.chaos("partition", job.net.names[0]).wait(LIMIT) == 0
    job.end()
    with (job.folder / "events.jsonl").open("a") as events:
        events.write('{"t": 1.0, "event": "finished"}\n')
    assert job.cuts()
    tool = job.chaos("heal", job.net.names[0])
    assert "has ended" not in tool.communicate(timeout=LIMIT)[1] and tool.returncode == 0
    assert not job.cuts()


def test_a_shorter_cut_within_a_longer_one_does_not_undo_it(job: FakeJob):
    assert job.chaos("partition", job.net.names[0]).wait(LIMIT) == 0
    before = job.cuts()
    assert job.chaos("partition", job.net.names[0], "--from", job.net.names[1], "--for", "0.05").wait(LIMIT) == 0
    assert job.cuts() == before
    assert job.chaos("heal", job.net.names[0]).wait(LIMIT) == 0 and not job.cuts()
