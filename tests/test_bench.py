"""Benchmarks that speak the wire's protocol themselves keep up with it."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_recycle.control import Coordinator, Journal, Timeouts
from megatron_recycle.control.searches import Plans
from megatron_recycle.membership.inputs import WorkerHello
from megatron_recycle.plan.plan_file import PlanFile

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_simulated_workers_are_led_and_lost(tmp_path: Path):
    out = tmp_path / "heartbeats.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench" / "heartbeats.py"), "--workers", "96", "--losses", "2",
         "--seconds", "1", "--interval", "0.2", "--iteration", "0.5", "--out", str(out)],
        capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(out.read_text())["losses"]) == 2


@pytest.mark.slow
def test_a_change_of_the_membership_is_told_once_per_host(tmp_path: Path) -> None:
    out = tmp_path / "membership.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench" / "membership.py"), "--grid", "24x4x64", "--losses", "1",
         "--out", str(out)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    (loss,) = found["losses"]
    assert found["hosts"] == 12 and loss["workers_mb"] + loss["launchers_mb"] < found["each_mb"] / 20


def test_simulated_workers_come_again_as_real_ones_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's door turns some away, and connections are lost; each worker is led all the same."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    light = importlib.import_module("light_workers")

    async def led() -> Any:
        grid = {"stages": 2, "microbatches": [2] * 8}
        coordinator = Coordinator(size=16, token=light.TOKEN, journal=Journal.create(tmp_path / "journal.jsonl"),
                                  plans=Plans(lambda job, failed: PlanFile(digest=str(len(failed)))),
                                  emit=lambda event: None, timeouts=Timeouts(1000.0, 1000.0, 1000.0))
        job = light.Clients(await coordinator.start(), grid)
        server = coordinator.server
        received, turned = server.received, []

        def turn_away(connection: Any, message: Any) -> None:
            """Each one, the first time that it comes."""
            if isinstance(message, WorkerHello) and message.rank not in turned:
                turned.append(message.rank)
                connection._transport.abort()
            else:
                received(connection, message)

        monkeypatch.setattr(server, "received", turn_away)
        await job.connect()
        await job.until_told("go", 1)
        for connection in tuple(server.workers.values()):
            connection._transport.abort()
        launcher = await light.Launcher.come(job.address, "host0")
        launcher.lose(job.clients[3])
        await job.until_told("go", 2)
        for client in job.clients:
            client.lose()
        await coordinator.close()
        return job

    job = asyncio.run(asyncio.wait_for(led(), 60))
    assert job.again >= 31 and {client.generation for client in job.clients if client.number != 3} == {2}
