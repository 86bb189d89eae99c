"""Journal, lease and term in a real etcd: the leading host dies with all that is on it, and a member of etcd; others
join, and come back, whoever leads."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatron_recycle import cli
from megatron_recycle.control.etcd import Etcd, Place, StoreUnreachable
from megatron_recycle.control.leader_election import Sealed
from megatron_recycle.control.ports import listen
from megatron_recycle.observe.events import read_events
from tests.launch.running import FAKE_WORKER, ROOT

ETCD = shutil.which("etcd") or str(ROOT / ".venv" / "etcd" / "usr" / "bin" / "etcd")
TOKEN = "a token of this test alone"
HEARTBEAT_TIMEOUT = 3.0
LIMIT = 120.0


def free_port() -> int:
    with listen("127.0.0.1", 0) as chosen:
        return int(chosen.getsockname()[1])


def started(stack: ExitStack, command: list[str], output: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    with output.open("a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, text=True, env=environ)
    stack.callback(process.wait, 60)
    stack.callback(process.kill)
    return process


def command_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""  # it has ended meanwhile


class Hosts:
    """Three hosts of two workers, and three members of etcd."""

    def __init__(self, folder: Path, stack: ExitStack, orders: dict[str, Any]) -> None:
        self.folder = folder
        self.until = time.monotonic() + LIMIT
        ports = [(free_port(), free_port()) for _ in range(3)]
        members = ",".join(f"127.0.0.1:{client}:{peer}" for client, peer in ports)
        self.etcds = [started(stack, [str(ROOT / "scripts" / "etcd.sh"), members, str(k), str(folder)],
                              folder / f"etcd-{k}.out", {**os.environ, "ETCD": ETCD}) for k in range(3)]
        self.store = "etcd://" + ",".join(f"127.0.0.1:{client}" for client, _ in ports)
        self.etcd = Etcd(Place.parse(self.store))
        self.wait(self.answers, "answer of etcd")
        (folder / "marks").mkdir()
        self.stack = stack
        self.hosts = [self.host(node, orders, "--store", self.store, "--job", "a-job", "--nnodes", "3", "--node-rank",
                                str(node)) for node in range(3)]

    def host(self, number: int, orders: dict[str, Any], *options: str) -> subprocess.Popen[str]:
        """Start a host of two workers."""
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "RECYCLE_TOKEN": TOKEN, "RECYCLE_INTERFACE": "127.0.0.1",
                   "RECYCLE_FAKE": json.dumps({"marks": str(self.folder / "marks"), **orders})}
        command = [sys.executable, str(Path(__file__).with_name("start.py")), *options, "--nproc", "2", "--run-dir",
                   str(self.folder / f"host{number}"), str(FAKE_WORKER)]
        return started(self.stack, command, self.folder / f"host{number}.out", environ)

    def coordinator(self, host: int) -> int:
        """Pid of this host's coordinator."""
        mark = f"host{host}/node-{host}\0".encode()
        return next(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()
                    and mark in (line := command_of(entry)) and str(self.folder).encode() in line)

    def leads(self, term: int) -> int:
        """The host whose coordinator leads in this term, once it does."""
        return int(self.wait(lambda: [str(host) for host in range(3) for event in self.events(host, "leads")
                                      if event["term"] == term], f"leader of term {term}")[0])

    def answers(self) -> bool:
        try:
            return self.etcd.keep(self.etcd.grant(5))
        except StoreUnreachable:
            return False

    def events(self, host: int, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"host{host}" / f"node-{host}" / "events.jsonl"
        return [event for event in (read_events(path) if path.exists() else []) if event["event"] == name]

    def wait(self, found: Any, what: str) -> Any:
        while not (result := found()):
            assert time.monotonic() < self.until, f"no {what}\n{self.where()}"
            time.sleep(0.02)
        return result

    def pause(self, host: int, *ranks: int) -> dict[int, int]:
        """Pids of these ranks of this host, once they stand still."""
        files = {rank: self.folder / f"host{host}" / f"paused-{rank}" for rank in ranks}
        self.wait(lambda: all(file.exists() and file.read_text() for file in files.values()), f"pause of {ranks}")
        return {rank: int(file.read_text()) for rank, file in files.items()}

    def go_on(self) -> None:
        for file in self.folder.glob("host*/paused-*"):
            file.unlink(missing_ok=True)

    def where(self) -> str:
        return "\n".join(f"--- {path.relative_to(self.folder)}\n{path.read_text(errors='replace')[-1500:]}"
                         for path in sorted(self.folder.rglob("*")) if path.suffix in (".out", ".log"))


@pytest.mark.processes
@pytest.mark.skipif(not Path(ETCD).exists(), reason="there is no etcd: scripts/setup.sh could not get Debian's package")
def test_leaders_die_with_their_host_and_without_and_hosts_and_workers_come_back_and_no_iteration_is_lost(
        tmp_path: Path) -> None:
    """The host that leads, with a member of etcd; the coordinator that leads by then, alone; etcd's majority."""
    orders = {"iterations": 10, "pause": {str(rank): 2 for rank in range(6)}, "full": 4, "learnt": True,
              "description": {"heartbeat_timeout": HEARTBEAT_TIMEOUT, "max_restarts": 1}}
    with ExitStack() as stack:
        job = Hosts(tmp_path, stack, orders)
        pids = {rank: pid for host in range(3) for rank, pid in job.pause(host, 2 * host, 2 * host + 1).items()}
        first = job.leads(1)
        job.etcds[0].kill()
        job.hosts[first].kill()
        moment = time.time()
        second = job.leads(2)
        job.go_on()
        resumed = job.wait(lambda: job.events(second, "resumed"), "training")[0]["t"] - moment
        print(f"resumed {resumed:.1f} s after the kill, {HEARTBEAT_TIMEOUT} s of them heartbeat_timeout")
        decided = job.events(second, "decided")[0]
        assert len(decided["out"]) == 2 and set(decided["out"].values()) == {"unreachable"}

        # A host joins by all addresses, of which one answers, and with the lesser secret.
        lost = (2 * first, 2 * first + 1)
        (addresses,) = re.findall("control at (.*), logs", (tmp_path / f"host{second}.out").read_text())
        joins = job.host(3, {**orders, "pause": {str(rank): 7 for rank in lost}}, "--join", addresses, "--token-file",
                         str(tmp_path / f"host{second}" / "join.token"))
        job.pause(3, *lost)

        # Another leader, and then none while etcd has no majority: one more death waits for the next one.
        os.kill(job.coordinator(second), signal.SIGKILL)
        third = job.leads(3)
        job.etcds[1].send_signal(signal.SIGSTOP)
        log = tmp_path / f"host{third}" / f"node-{third}" / "coordinator.log"
        job.wait(lambda: "leads no more (term 3)" in log.read_text(), "end of the third term")
        back = 2 * ({0, 1, 2} - {first}).pop()
        os.kill(pids[back], signal.SIGKILL)
        job.etcds[1].send_signal(signal.SIGCONT)
        fourth = job.leads(4)
        job.wait(lambda: [event for event in job.events(fourth, "decided") if "exit" in event["out"].values()],
                 "decision of the fourth leader")
        job.go_on()
        left = [process.wait(LIMIT) for process in (*(job.hosts[host] for host in range(3) if host != first), joins)]
        assert left == [0, 0, 0], job.where()
        joined = {event["worker"] for event in job.events(fourth, "joined")}
        assert f"{back % 3}:{back // 3}" in joined, job.where()
        done = {event["iteration"] for host in range(3) for event in job.events(host, "committed")}
        assert done == set(range(10)), job.where()
        written = [content["record"] for content, _ in Sealed(job.etcd, "a-job", TOKEN).read("journal/").values()]
        generations = [one["generation"] for one in written if one["kind"] == "decided"]
        assert generations == [*range(1, len(generations) + 1)] and len(generations) >= 5


@pytest.mark.parametrize(("hosts", "client", "peer"), [
    ("h0,h1,h2", "http://h1:2379", "http://h1:2380"), ("h0:1:2,h1:3:4,h2", "http://h1:3", "http://h1:4"),
    ("[::1],[fd00::1]:3,[::3]", "http://[fd00::1]:3", "http://[fd00::1]:2380"), ("::1,::2,::3", None, None)])
def test_the_script_for_those_without_an_etcd_reads_addresses(hosts: str, client: str | None, peer: str | None) -> None:
    done = subprocess.run([ROOT / "scripts/etcd.sh", hosts, "1", "/none"], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "ETCD": "/bin/echo"})
    assert (done.returncode == 0) == (client is not None), done.stderr
    assert client is None or (f"--advertise-client-urls {client} " in done.stdout
                              and f"--initial-advertise-peer-urls {peer} " in done.stdout)


@pytest.mark.parametrize(("arguments", "why"), [
    (["--store", "etcd://h"], "needs a token"),
    (["--store", "h:2379", "--token-file", "FILE", "--job", "j"], "not of the form etcd://"),
    (["--store", "etcd://h", "--token-file", "FILE"], "names no job"),
    (["--store", "etcd://h", "--token-file", "FILE", "--job", "a/b"], "names no job"),
    (["--store", "etcd://h", "--token-file", "FILE", "--job", "j", "--job-restarts", "1"], "cannot be given together"),
    (["--job", "j"], "give both"),
])
def test_what_a_store_cannot_do_is_said(arguments: list[str], why: str, tmp_path: Path,
                                        capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECYCLE_TOKEN", raising=False)
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    given = [str(file) if one == "FILE" else one for one in arguments]
    assert cli.main(["run", *given, __file__]) == 2
    assert why in capfd.readouterr().err
