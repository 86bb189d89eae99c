"""A coordinator that is no training host's: any host may die, and the service may be started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_recycle import cli
from megatron_recycle.control.ports import listen
from megatron_recycle.errors import ConfigError
from megatron_recycle.launch import reachability
from megatron_recycle.launch.launcher import Launcher
from megatron_recycle.launch.processes import Job
from tests.launch.running import FAKE_WORKER, ROOT, Running
from tests.membership.service import service

TOKEN = "a token of this test alone"
HOSTS = 3


@dataclass
class Served:
    """A service, and three hosts of two workers each."""

    service: Running
    hosts: list[subprocess.Popen[str]]
    folder: Path

    def die(self, host: int) -> None:
        """The host's launcher and with it its workers, all at once: nobody reports anything."""
        self.hosts[host].kill()
        self.hosts[host].wait(60)


def environment(orders: dict[str, object]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "RECYCLE_TOKEN": TOKEN, "RECYCLE_FAKE": json.dumps(orders)}


@contextmanager
def process(command: Sequence[str], output: Path, environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with output.open("a") as file:
        started = subprocess.Popen([sys.executable, *command], stdout=file, stderr=file, text=True, env=environ)
    try:
        yield started
    finally:
        started.kill()
        started.wait(60)


def serve(folder: Path, port: int, *more: str) -> list[str]:
    return ["-m", "megatron_recycle.cli", "serve", "--workers", "6", "--port", str(port), "--run-dir",
            str(folder / "service"), *more]


@contextmanager
def served(folder: Path, port: int, orders: dict[str, object]) -> Iterator[Served]:
    environ = environment({"marks": str(folder / "marks"), **orders})
    (folder / "marks").mkdir()
    with ExitStack() as stack:
        output = folder / "service.out"
        service = stack.enter_context(process(serve(folder, port), output, environ))
        hosts = [stack.enter_context(process(
            [str(Path(__file__).with_name("start.py")), "--coordinator", f"127.0.0.1:{port}", "--nnodes", str(HOSTS),
             "--node-rank", str(node), "--nproc", "2", "--run-dir", str(folder / f"host{node}"), str(FAKE_WORKER)],
            folder / f"host{node}.out", environ)) for node in range(HOSTS)]
        yield Served(Running(service, folder / "service", output), hosts, folder)


@pytest.mark.processes
def test_the_first_host_dies_and_then_the_service_and_the_job_goes_on(tmp_path: Path) -> None:
    free_port = listen("127.0.0.1", 0).getsockname()[1]
    orders = {"iterations": 6, "pause": {"5": 2, "4": 4}, "description": {"heartbeat_timeout": 3.0}}
    with served(tmp_path, free_port, orders) as job, ExitStack() as stack:
        watch = job.service
        first, second = (tmp_path / "host2" / f"paused-{rank}" for rank in (5, 4))
        watch.until(lambda: first.exists() and first.read_text(), "pause")
        job.die(0)
        decided = watch.event("decided", generation=2)
        assert set(decided["out"]) == {"0:0", "1:0"}, "both workers of the first host, in one decision"
        watch.until(lambda: second.exists() and second.read_text(), "pause in generation 2")
        os.kill(watch.process.pid, signal.SIGKILL)
        watch.process.wait(60)
        environ = environment({})
        again = stack.enter_context(process(serve(tmp_path, free_port, "--resume"), watch.output, environ))
        watch.process = again
        watch.event("restarted")
        second.unlink(missing_ok=True)
        assert [host.wait(60) for host in job.hosts[1:]] == [0, 0], watch.where()
        assert again.wait(60) == 0, watch.where()
        assert [e["iteration"] for e in watch.events if e["event"] == "committed"] == list(range(6))
        assert not (tmp_path / "service" / "join.json").exists()
        watch.process = stack.enter_context(process(serve(tmp_path, free_port, "--resume"), watch.output, environ))
        assert watch.wait() == 0, "a service of a job that is over says how it has ended"
        last = watch.output.read_text().splitlines()[-1]
        assert "the job has finished (6 iterations committed" in last and "2 workers lost" in last, watch.where()


@pytest.mark.parametrize(("arguments", "why"), [
    (["serve", "--workers", "0"], "--workers is 0"),
    (["serve", "--workers", "2", "--port", "99999"], "a port up to 65535"),
    (["serve", "--workers", "2"], "a service needs a token"),
    (["serve", "--workers", "2", "--token-file", "FILE", "--interface", "192.0.2.1"], "in --interface or"),
    (["serve", "--workers", "2", "--token-file", "FILE", "--resume"], "give the same --run-dir and --port"),
    (["run", "--coordinator", "h:1", "--token-file", "FILE", "--job-restarts", "1", __file__], "one life of a job"),
    (["run", "--coordinator", "h:1", "--token-file", "FILE", "--master-port", "9", __file__], "contradict"),
    (["run", "--coordinator", "h", "--token-file", "FILE", __file__], "as `recycle serve` has printed it"),
    (["run", "--coordinator", "h:1", __file__], "--coordinator needs the service's token"),
])
def test_what_a_service_cannot_do_is_said(arguments: list[str], why: str, tmp_path: Path,
                                          capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECYCLE_TOKEN", raising=False)
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    began = time.monotonic()
    assert cli.main([str(file) if one == "FILE" else one for one in arguments]) == 2
    assert why in capfd.readouterr().err and time.monotonic() - began < 60


def test_a_host_of_another_job_is_told_so_and_the_job_does_not_notice(tmp_path: Path) -> None:
    with service(tmp_path, token=TOKEN) as running:
        job = Job([], {"GROUP_RANK": "7"}, tmp_path, (), 8, show="none")
        stranger = Launcher(job, running.address, TOKEN, print)
        assert stranger.run() == 1
        assert "give the same --nnodes and --nproc on each host" in stranger.message


def test_a_service_that_takes_a_job_up_waits_until_the_port_of_the_one_before_is_free(monkeypatch) -> None:
    with listen("127.0.0.1", 0) as before:
        port = before.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .*in use"):
            reachability.check_listening("127.0.0.1", port)
        monkeypatch.setattr(reachability.time, "sleep", lambda seconds: before.close())
        reachability.check_listening("127.0.0.1", port, patience=60.0)
