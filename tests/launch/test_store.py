"""Journal, lease and term in a real etcd: the leading host dies with all that is on it, and a member of etcd."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatron_recycle import cli
from megatron_recycle.control.elected import Sealed
from megatron_recycle.control.etcd import Etcd, Place, StoreUnreachable
from megatron_recycle.control.ports import listen
from megatron_recycle.observe.events import read_events
from tests.launch.running import FAKE_WORKER, ROOT

ETCD = shutil.which("etcd") or str(ROOT / ".venv" / "etcd" / "usr" / "bin" / "etcd")
TOKEN = "a token of this test alone"
HEARTBEAT_TIMEOUT = 3.0
LIMIT = 90.0


def free_port() -> int:
    with listen("127.0.0.1", 0) as chosen:
        return int(chosen.getsockname()[1])


def started(stack: ExitStack, command: list[str], output: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    with output.open("a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, text=True, env=environ)
    stack.callback(process.wait, 60)
    stack.callback(process.kill)
    return process


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
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "RECYCLE_TOKEN": TOKEN, "RECYCLE_INTERFACE": "127.0.0.1",
                   "RECYCLE_FAKE": json.dumps({"marks": str(folder / "marks"), **orders})}
        self.hosts = [started(stack, [
            sys.executable, str(Path(__file__).with_name("start.py")), "--store", self.store, "--job", "a-job",
            "--nnodes", "3", "--node-rank", str(node), "--nproc", "2", "--run-dir", str(folder / f"host{node}"),
            str(FAKE_WORKER)], folder / f"host{node}.out", environ) for node in range(3)]

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

    def where(self) -> str:
        return "\n".join(f"--- {path.relative_to(self.folder)}\n{path.read_text(errors='replace')[-1500:]}"
                         for path in sorted(self.folder.rglob("*")) if path.suffix in (".out", ".log"))


@pytest.mark.processes
@pytest.mark.skipif(not Path(ETCD).exists(), reason="there is no etcd: scripts/setup.sh could not get Debian's package")
def test_the_host_that_leads_dies_and_a_member_of_etcd_and_the_next_leader_loses_no_iteration(tmp_path: Path) -> None:
    orders = {"iterations": 6, "pause": {str(rank): 2 for rank in range(6)},
              "description": {"heartbeat_timeout": HEARTBEAT_TIMEOUT}}
    with ExitStack() as stack:
        job = Hosts(tmp_path, stack, orders)
        files = [tmp_path / f"host{rank // 2}" / f"paused-{rank}" for rank in range(6)]
        job.wait(lambda: all(file.exists() and file.read_text() for file in files), "pause of all")
        (first,) = [host for host in range(3) if job.events(host, "leads")]
        job.etcds[0].kill()
        job.hosts[first].kill()
        moment = time.time()
        leads = job.wait(lambda: [event for host in range(3) if host != first for event in job.events(host, "leads")],
                         "next leader")
        for file in files:
            file.unlink(missing_ok=True)
        left = [job.hosts[host].wait(LIMIT) for host in range(3) if host != first]
        assert left == [0, 0], job.where()
        second = next(host for host in range(3) if host != first and job.events(host, "committed"))
        assert leads[0]["term"] == 2
        (decided,) = job.events(second, "decided")
        assert len(decided["out"]) == 2 and set(decided["out"].values()) == {"unreachable"}
        done = {event["iteration"] for host in (first, second) for event in job.events(host, "committed")}
        assert done == set(range(6)), job.where()
        resumed = job.events(second, "resumed")[0]["t"] - moment
        print(f"resumed {resumed:.1f} s after the kill, {HEARTBEAT_TIMEOUT} s of them heartbeat_timeout")
        written = [content["record"] for content, _ in Sealed(job.etcd, "a-job", TOKEN).read("journal/").values()]
        assert [one["generation"] for one in written if one["kind"] == "decided"] == [1, 2]


@pytest.mark.parametrize(("arguments", "why"), [
    (["--store", "etcd://h"], "needs a token"),
    (["--store", "h:2379", "--token-file", "FILE", "--job", "j"], "not of the form etcd://"),
    (["--store", "etcd://h", "--token-file", "FILE"], "names no job"),
    (["--store", "etcd://h", "--token-file", "FILE", "--job", "a/b"], "names no job"),
    (["--store", "etcd://h", "--token-file", "FILE", "--job", "j", "--restarts", "1"], "cannot be given together"),
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
