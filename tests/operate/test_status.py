"""`recycle status`: the verdict that follows from events, journal and the coordinator's answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_recycle import cli
from megatron_recycle.launch.meeting import Meeting
from megatron_recycle.tools.operate.job_history import JobHistory
from megatron_recycle.tools.operate.outlook import Facts, Level, Outlook, duration, judge
from megatron_recycle.tools.operate.status import to_json

NAMES = [f"{pipeline}:{stage}" for pipeline in range(3) for stage in range(2)]
START = 1000.0


def began(hosts: int = 1, pipelines: int = 3) -> list[dict[str, Any]]:
    names = [name for name in NAMES if int(name[0]) < pipelines]
    return [{"t": START, "event": "started", "generation": 1, "members": {name: f"{name}/0" for name in names},
             "ranks": {name: rank for rank, name in enumerate(names)},
             "pids": {name: 100 + rank for rank, name in enumerate(names)},
             "hosts": {name: f"n{rank % hosts}/{rank % hosts}" for rank, name in enumerate(names)}, "fatal_hosts": {},
             "grid": {"stages": 2, "microbatches": [4] * pipelines}, "max_restarts": 0}]


def commits(since: float, first: int, count: int, seconds: float) -> list[dict[str, Any]]:
    return [{"t": since + seconds * (number + 1), "event": "committed", "iteration": first + number, "loss": 2.5}
            for number in range(count)]


def lost(worker: str, moment: float, generation: int, out: dict[str, str], iteration: int = 20) -> list[dict[str, Any]]:
    members = {name: f"{name}/0" for name in NAMES if name not in out}
    return [{"t": moment, "event": "suspected", "generation": generation - 1, "iteration": iteration, "worker": worker,
             "kind": out[worker], "ms": 500.0, "rank": NAMES.index(worker), "pid": 104},
            {"t": moment, "event": "decided", "generation": generation, "ms": 500.0, "members": members, "out": out},
            {"t": moment + 0.5, "event": "resumed", "generation": generation, "ms": 1000.0, "iteration": iteration}]


DEGRADED = [*began(), *commits(START, 0, 20, 1.0), *lost("1:1", 1021.0, 2, {"1:1": "exit"}),
            *commits(1021.5, 20, 20, 2.0)]


def looked(events: list[dict[str, Any]], now: float | None = None, **other: Any) -> Outlook:
    moment = events[-1]["t"] + 1.0 if now is None else now
    return judge(Facts(JobHistory(events), moment, "runs/one", **other))


def test_a_job_with_all_its_workers_is_healthy_and_its_weakest_point_is_named() -> None:
    found = looked([*began(), *commits(START, 0, 20, 1.0)])
    assert (found.level, found.word) == (Level.HEALTHY, "HEALTHY")
    assert "6 of 6 workers" in found.line and "iteration 19" in found.line and "last commit 1.0 s ago" in found.line
    assert "whose loss ends the job" in found.next_end and "2 workers of stage 0 may go" in found.next_end


def test_a_lost_worker_degrades_it_since_then_with_its_cost_and_the_repair() -> None:
    script = Meeting("", "h:1", "t" * 16, 6, command=("train.py", "--x"), folder="/home/me")
    found = looked(DEGRADED, meeting=script)
    assert found.level is Level.DEGRADED and "5 of 6 workers, 0.50 of fault-free" in found.line
    assert found.repair == "cd /home/me && recycle run --join runs/one --nproc 1 train.py --x"
    told = to_json(Facts(JobHistory(DEGRADED), 1100.0, "runs/one"), found)
    assert told["degraded_since"] == 1020.5 and told["out"][0]["kind"] == "exit" and told["out"][0]["pid"] == 104
    assert told["cost"]["stood_still_s"] == 1.0 and told["cost"]["slower_s"] == pytest.approx(18.0)
    assert told["throughput"]["against_fault_free"] == pytest.approx(0.5)


def test_under_slurm_the_repair_is_to_heal() -> None:
    found = looked(DEGRADED, meeting=Meeting("slurm-4711.0.0", "h:1", "t" * 16))
    assert found.repair == "recycle slurm heal 4711"


def test_the_last_copy_of_a_stage_is_at_risk_and_says_what_its_loss_costs() -> None:
    out = {"1:1": "exit", "0:1": "frozen"}
    events = [*DEGRADED, *lost("0:1", 1100.0, 3, out, 40), *commits(1101.0, 40, 3, 2.0)]
    found = looked(events)
    assert found.level is Level.AT_RISK and "the loss of 2:1 on n0/0, the last copy of stage 1" in found.next_end
    assert "it ends the job" in found.next_end
    saved = [*events, {"t": 1107.5, "event": "checkpoint", "iteration": 30, "place": "ck/step31"}]
    assert "go back to the checkpoint of iteration 30, 12 iterations are lost" in looked(saved).next_end


def test_a_worker_brought_back_on_the_only_machine_is_on_no_other_host() -> None:
    """Its launcher counts as a host of its own, and the machine is still the only one."""
    workers = {name: {"host": "vm/7" if name == "1:0" else "vm/0"} for name in NAMES}
    found = looked([*began(), *commits(START, 0, 20, 1.0)], told={"workers": workers})
    assert found.level is Level.HEALTHY and "all workers are on host vm, whose loss ends the job" in found.next_end


def test_a_host_that_has_come_to_hold_a_stage_is_at_risk() -> None:
    events = [*began(hosts=3), *commits(START, 0, 5, 1.0)]
    assert looked(events).fatal_hosts == []
    found = looked([*events, *lost("1:0", 1006.0, 2, {"1:0": "exit", "2:0": "exit"})])
    assert found.level is Level.AT_RISK  # one worker of stage 0 is left


@pytest.mark.parametrize(("events", "now", "word", "level"), [
    (DEGRADED, 3000.0, "STALLED", Level.AT_RISK),
    (DEGRADED[:-20], None, "DEGRADED", Level.DEGRADED),
    (DEGRADED[:-21], None, "RECOVERING", Level.DEGRADED),
    ([*DEGRADED, {"t": 1062.0, "event": "finished", "status": 0, "message": "the job has finished"}], None, "ENDED",
     Level.OVER),
    ([*DEGRADED, {"t": 1062.0, "event": "finished", "status": 1, "message": "stage 1 is gone"}], None, "FAILED",
     Level.OVER),
])
def test_other_verdicts(events: list[dict[str, Any]], now: float | None, word: str, level: Level) -> None:
    found = looked(events, now)
    assert (found.word, found.level) == (word, level)


def test_a_worker_that_comes_back_ends_the_degradation() -> None:
    back = {"t": 1070.0, "event": "decided", "generation": 3, "members": dict.fromkeys(NAMES, ""), "out": {}}
    joined = {"t": 1071.0, "event": "joined", "generation": 3, "worker": "1:1", "pid": 9, "rank": 3}
    seen = JobHistory([*DEGRADED, back, joined, *commits(1071.0, 40, 5, 1.0)])
    assert not seen.out and seen.degraded_since is None and seen.joined == 1
    assert judge(Facts(seen, 1077.0, "run")).level is Level.HEALTHY


def test_without_a_coordinator_the_files_say_how_old_they_are() -> None:
    found = looked(DEGRADED, DEGRADED[-1]["t"] + 70.0, silent="nobody answers at h:1: refused")
    assert (found.word, found.level) == ("UNREACHABLE", Level.OVER) and "70 s old" in found.line


def test_a_coordinator_that_stood_still_and_tells_many_commits_at_once_changes_no_pace() -> None:
    seen = JobHistory([*began(), *commits(START, 0, 20, 1.0), *commits(1030.0, 20, 12, 0.001)])
    assert seen.seconds == pytest.approx(1.0)


def test_durations() -> None:
    assert [duration(each) for each in (1.44, 61.0, 600.0, 11520.0, 500000.0)] == ["1.4 s", "61 s", "10 min", "3.2 h",
                                                                                   "6 d"]


def test_a_wrong_folder_is_one_line_and_status_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(tmp_path / "none")]) == 3
    assert cli.main(["status", str(tmp_path)]) == 3
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "there is no folder" in told[0] and "is no run's" in told[1]
    with pytest.raises(SystemExit) as ended:
        cli.main(["status", "--what"])
    assert ended.value.code == 3


def test_the_command_reads_files_where_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in DEGRADED))
    assert cli.main(["status", str(tmp_path)]) == 3
    shown = capsys.readouterr().out
    assert "UNREACHABLE" in shown and "it has no join.json" in shown and "1:1 (rank 3, pid 104) on n0/0: exit" in shown
    assert cli.main(["status", str(tmp_path), "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["v"] == 1 and told["verdict"] == "unreachable" and not told["coordinator"]["reachable"]
    (tmp_path / "events.jsonl").write_text('{"t": 1.0, "event": "suspected"}\n')
    assert cli.main(["status", str(tmp_path)]) == 3
    assert "another version" in capsys.readouterr().err
