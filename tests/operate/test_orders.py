"""Questions and orders of a job's owner, over real sockets; logs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recycle import cli
from megatron_recycle.control import Agent
from megatron_recycle.control.wire import for_joining
from megatron_recycle.errors import ConfigError, JobEnded
from megatron_recycle.launch import meeting
from megatron_recycle.launch.meeting import Meeting
from megatron_recycle.membership import inputs
from megatron_recycle.tools.operate import logs
from megatron_recycle.tools.operate.ask import Refused, Unreachable, ask, ask_stacks
from megatron_recycle.tools.operate.job_history import JobHistory
from megatron_recycle.tools.operate.runs import latest, split
from tests.membership.cluster import report
from tests.membership.service import DESCRIPTION, LIMIT, TOKEN, Service, agent, service
from tests.operate.test_status import DEGRADED, NAMES


def trains(running: Service, **other: Any) -> dict[str, Agent]:
    agents = {name: agent(running.address, name, host=f"n{name[0]}/{name[0]}") for name in NAMES}
    for one in agents.values():
        one.ready(replace(DESCRIPTION, **other), report(attempt=0))
    for one in agents.values():
        assert one.wait_go(1, LIMIT) is not None
        one.resumed(1)
        one.committed(0, 2.5)
    running.await_event("committed", iteration=0)
    return agents


def test_the_owner_asks_and_orders(tmp_path: Path) -> None:
    with service(tmp_path) as running:
        with pytest.raises(Refused, match="has not begun to train"):
            ask(running.address, TOKEN, "out", ["1:1"])
        agents = trains(running)
        told = ask(running.address, TOKEN, "status")
        assert (told["phase"], told["generation"], list(told["workers"])) == ("training", 1, NAMES)
        assert told["workers"]["1:1"]["host"] == "n1/1" and told["workers"]["1:1"]["silent_s"] < LIMIT

        stacks = ask_stacks(running.address, TOKEN, ["1:1"], "", LIMIT)
        assert list(stacks) == ["1:1"] and "test_the_owner_asks_and_orders" in str(stacks["1:1"])

        for wrong, host, text in ((["9:9"], "", "not of this job, whose workers are 0:0 to 2:1"),
                                  ([], "n7", "the job's hosts are n0/0, n1/1, n2/2"),
                                  (["0:1", "1:1", "2:1"], "", "stage 1 would have no worker any more")):
            with pytest.raises(Refused, match=text):
                ask(running.address, TOKEN, "out", wrong, host)
        with pytest.raises(Refused, match="nothing that this version"):
            ask(running.address, TOKEN, "dance")

        assert ask(running.address, TOKEN, "leave", [], "n2")["workers"] == ["2:0", "2:1"]
        assert running.await_event("leaving", worker="2:1") and running.await_event("leaving", worker="2:0")
        assert agents["2:1"].leaving and not agents["1:1"].leaving
        ordered = running.await_event("ordered", what="leave")
        assert ordered["workers"] == ["2:0", "2:1"] and ordered["by"] and ordered["host"] == "n2"

        assert ask(running.address, TOKEN, "out", ["1:1"])["workers"] == ["1:1"]
        assert running.await_event("decided", generation=2)["out"] == {"1:1": "stalled"}
        with pytest.raises(Refused, match=r"worker 1:1 is out already \(stalled\)"):
            ask(running.address, TOKEN, "out", ["1:1"])
        ask(running.address, TOKEN, "stop")
        assert "stopped by" in running.await_event("finished", status=130)["message"]
        with pytest.raises(JobEnded, match="stopped by"):
            agents["0:0"].wait_go(9, LIMIT)
        for one in agents.values():
            one.close()


def test_a_job_is_stopped_with_a_checkpoint_or_the_order_is_refused(tmp_path: Path) -> None:
    with service(tmp_path) as running:
        agents = trains(running, emergency=True)
        with pytest.raises(Refused, match="has saved none in this run yet"):
            ask(running.address, TOKEN, "save")
        ask(running.address, TOKEN, "save anyway")
        assert running.await_event("decided", generation=2)["reason"] == "the job ends after a last checkpoint"
        for one in agents.values():
            one.report(2, report(iteration=1, holds=0))
        for one in agents.values():
            go = one.wait_go(2, LIMIT)
            assert go is not None and "stopped by" in str(go.closing)
            one._send_kept(inputs.Saved(one.incarnation, 2, "ck/step1", ""))
        assert "is saved in ck/step1" in running.await_event("finished", status=130)["message"]
        for one in agents.values():
            one.close()


def test_only_the_owners_token_asks_and_commands(tmp_path: Path) -> None:
    with service(tmp_path) as running:
        for token in (for_joining(TOKEN), "another token of the same length"):
            with pytest.raises(Unreachable):
                ask(running.address, token, "status")
    with pytest.raises(Unreachable, match="does not answer"):
        ask(running.address, TOKEN, "status")


@pytest.mark.parametrize("command", [["stop"], ["drain", "n1", "--run"], ["out", "1:1", "--run"], ["stacks"],
                                     ["out", "1:1"]])
def test_a_wrong_run_or_token_is_one_line(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                          ) -> None:
    (tmp_path / "events.jsonl").write_text("")
    assert cli.main([*command, str(tmp_path)]) == 2
    assert "no job runs in" in capsys.readouterr().err
    meeting.publish(tmp_path, Meeting("", "127.0.0.1:9", "t" * 32))
    token = tmp_path / "join.token"
    token.write_text(for_joining("t" * 32))
    assert cli.main([*command, str(tmp_path), "--token-file", str(token)]) == 2
    assert "lets hosts join, and commands nothing" in capsys.readouterr().err
    assert cli.main([*command, str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "the coordinator at 127.0.0.1:9 does not answer: Connection refused" in told and told.count("\n") == 1


def test_a_run_and_workers_are_told_apart() -> None:
    assert split(["runs/x", "1:2", "0:1.3"], None) == (Path("runs/x"), ["1:2", "0:1.3"])
    assert split([], Path("y")) == (Path("y"), [])
    with pytest.raises(ConfigError, match="name one run"):
        split(["a", "b"], None)


def test_without_a_name_the_latest_run_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run in runs/"):
        latest()
    for age, name in ((100, "a"), (10, "b"), (50, "c")):
        events = Path("runs") / name / "events.jsonl"
        events.parent.mkdir(parents=True)
        events.touch()
        os.utime(events, (1e9 - age, 1e9 - age))
    assert latest() == Path("runs/b")


def test_logs_of_some_workers_with_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in DEGRADED))
    for rank in range(5):
        (tmp_path / f"worker-{rank}.log").write_text("".join(f"line {number} of {rank}\n" for number in range(9)))
    (tmp_path / "worker-3.log").write_text("a \x1b[31mred\x1b[0m end\n")
    assert cli.main(["logs", str(tmp_path), "--failed"]) == 0
    assert capsys.readouterr().out == "1:1 | a red end\n"
    assert cli.main(["logs", str(tmp_path), "0:0", "0:1", "-n", "1"]) == 0
    assert capsys.readouterr().out == "0:0 | line 8 of 0\n0:1 | line 8 of 1\n"
    assert cli.main(["logs", str(tmp_path), "2:1"]) == 1
    assert "2:1: not in" in capsys.readouterr().err
    for wrong, text in ((["7:7"], "workers are 0:0 to 2:1"), (["--host", "x"], "hosts are n0/0")):
        assert cli.main(["logs", str(tmp_path), *wrong]) == 2
        assert text in capsys.readouterr().err


def test_old_lines_are_left_out_and_new_ones_followed(tmp_path: Path) -> None:
    path, now = tmp_path / "worker-0.log", time.time()
    old, new = (time.strftime("[%Y-%m-%d %H:%M:%S,123] [INFO] x", time.localtime(now - age)) for age in (900, 5))
    path.write_text(f"start\n{old}\nmore of it\n{new}\nand this\n")
    lines, end = logs.tail(path, 50, now - 60)
    assert lines == [new, "and this"] and end == os.stat(path).st_size
    assert logs.tail(path, 50, now + 60)[0] == [] and logs.tail(path, 1)[0] == ["and this"]
    log = logs.Log("0:0", path)
    with path.open("a") as file:
        file.write("whole\nha")
    following = logs.follow({log: end})
    assert next(following) == (log, "whole")
    with path.open("a") as file:
        file.write("lf\n")
    assert next(following) == (log, "half")


def test_before_training_begins_logs_have_ranks(tmp_path: Path) -> None:
    (tmp_path / "worker-10.log").write_text("")
    (tmp_path / "worker-2.log").write_text("")
    assert [log.name for log in logs.chosen(tmp_path, JobHistory(), [], "", False)] == ["rank 2", "rank 10"]
    with pytest.raises(ConfigError, match="training has not begun"):
        logs.chosen(tmp_path, JobHistory(), ["1:1"], "", False)
