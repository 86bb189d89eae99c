"""What a training thread did in an iteration, as it is written down for `recycle timeline RUN`."""

from __future__ import annotations

import json
import time
from pathlib import Path

from megatron_recycle.membership.detectors import ThreadState
from megatron_recycle.plan import Action
from megatron_recycle.runtime.activity import WAITING, Activity
from megatron_recycle.runtime.spans import Spans, append, record

F0, B0 = Action("F", 0, 0), Action("B", 0, 0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_action_has_its_begin_and_its_time_without_the_waits_in_it():
    clock = Clock()
    activity = Activity(10.0, clock)
    activity.at(6, None)
    activity.work("begin")
    clock.now += 1.0
    activity.at(7, F0)
    activity.work("forward")
    clock.now += 0.5
    with activity.during(WAITING, "F0.0"):
        clock.now += 2.0
    clock.now += 0.25
    activity.at(7, B0)
    activity.work("backward")
    clock.now += 0.75
    activity.at(8, F0)
    activity.work("forward")
    clock.now += 1.0
    activity.work("data")
    found = record(7, "0:0", activity.spans.marks, 1000.0)
    assert found == {"v": 1, "iteration": 7, "worker": "0:0", "t": 1101.0, "spans": [
        [0, 500000, "F0.0"], [500000, 2000000, "wait F0.0"], [2500000, 250000, "F0.0"], [2750000, 750000, "B0.0"]]}


def test_every_25th_iteration_and_those_around_a_failure_are_written_and_nobody_waits_for_that(tmp_path: Path):
    spans, file = Spans(), tmp_path / "timings" / "worker-3.jsonl"
    for iteration in range(60):
        if iteration == 33:
            spans.failed()
        spans.at(float(iteration), iteration, F0)
        spans.marks.append((float(iteration), ThreadState.WORKING, "forward"))
        spans.committed(iteration, "1:1", file)
    limit = time.monotonic() + 10
    while not file.exists() or len(file.read_text().splitlines()) < 5:
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert [json.loads(line)["iteration"] for line in file.read_text().splitlines()] == [0, 25, 33, 34, 50]


def test_without_a_run_folder_nothing_is_written():
    spans = Spans()
    spans.committed(25, "1:1", None)
    assert spans._thread is None


def test_a_file_of_records_does_not_grow_without_end(tmp_path: Path):
    file = tmp_path / "timings" / "worker-0.jsonl"
    for number in range(30):
        append(file, f"{number}:" + 99990 * "x" + "\n")
    lines = file.read_text().splitlines()
    assert file.stat().st_size < (1 << 20) + (1 << 18) and lines[-1].startswith("29:")
    assert all(len(line.partition(":")[2]) == 99990 for line in lines)
