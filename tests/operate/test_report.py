"""`recycle report`: what the failures of a job have cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_recycle import cli
from megatron_recycle.tools.operate.report import account, markdown
from tests.operate.test_status import DEGRADED, NAMES, began, commits, lost

PLANNED = {"t": 1021.1, "event": "planned", "generation": 2, "plan_ms": 1.0}
BACK = {"t": 1081.5, "event": "decided", "generation": 3, "members": dict.fromkeys(NAMES, ""), "out": {}}


def test_failures_are_counted_in_gpu_hours_and_phases() -> None:
    found = account([*DEGRADED[:-21], PLANNED, *DEGRADED[-21:], BACK])
    (recovery,) = found.recoveries
    assert recovery.phases() == pytest.approx({"found": 0.5, "planned": 0.1, "training again": 0.4})
    assert recovery.saved_age == pytest.approx(20.5)
    # Six workers until it is decided, five from then on: 21 and 60.5 seconds.
    assert found.worker_seconds == pytest.approx(6 * 21 + 5 * 60.5) and found.absent_seconds == pytest.approx(60.5)
    text = markdown("a-run", found, 300.0)
    assert "| 1:1 | n0/0 | exit | 20 | 61 s |" in text and "still out" not in text
    assert f"| {6 * 320.5 / 3600:.2f} |" in text and "of 300 s each (assumed)" in text
    assert "| planned | 100 ms | 100 ms |" in text and "Repeat offenders" not in text


def test_hosts_whose_workers_are_lost_again_and_again_are_named() -> None:
    out = {"0:1": "exit", "2:1": "exit"}
    events = [*began(hosts=2), *lost("0:1", 1001.0, 2, out)[:1], *lost("2:1", 1001.0, 2, out)]
    text = markdown("a-run", account(events), 300.0)
    assert "- n1/1: 2 workers lost; `recycle drain n1/1`" in text and "still out" in text
    assert "No worker was lost." in markdown("a-run", account([*began(), *commits(1000.0, 0, 3, 1.0)]), 300.0)


def test_the_command_writes_a_file_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in DEGRADED))
    assert cli.main(["report", str(tmp_path), "-o", str(tmp_path / "report.md")]) == 0
    assert (tmp_path / "report.md").read_text().startswith(f"# {tmp_path.name}\n")
    assert cli.main(["report", str(tmp_path), "-o", "/nowhere/x.md"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    (tmp_path / "events.jsonl").write_text('{"t": 1.0, "event": "suspected"}\n')
    assert cli.main(["report", str(tmp_path)]) == 2 and "another version" in capsys.readouterr().err
