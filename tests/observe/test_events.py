"""events.jsonl as its readers see it: while it grows, after a kill, and in the log."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest

from megatron_recycle.observe import EventLog, get_logger, read_events
from megatron_recycle.observe.events import EventReader, format_event


def test_an_event_reads_back_with_its_time_and_leading_fields_first(tmp_path: Path):
    before = time.time()
    with EventLog(tmp_path / "run" / "events.jsonl", log=False) as events:
        events.emit("suspected", pid=7, ms=12.5, kind="exit", worker="1:1", iteration=None)
        events.emit("decided", t=3.25, generation=2, out={"1:1": "exit"})
    first, second = read_events(tmp_path / "run" / "events.jsonl")
    assert list(first) == ["t", "event", "worker", "kind", "ms", "pid"]
    assert before <= first["t"] <= time.time()
    assert second == {"t": 3.25, "event": "decided", "generation": 2, "out": {"1:1": "exit"}}


def test_a_line_cut_short_by_a_kill_is_left_out_and_a_damaged_one_is_named(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, log=False) as events:
        events.emit("started")
    with path.open("a") as file:
        file.write('{"t": 1.0, "eve')
    assert [event["event"] for event in read_events(path)] == ["started"]
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match="line 2: not an event"):
        read_events(path)


def test_a_loss_that_is_no_number_does_not_break_the_file(tmp_path: Path):
    with EventLog(tmp_path / "e.jsonl", log=False) as events:
        events.emit("committed", loss=float("nan"), bounds=(float("-inf"), 1.0), peers={"0:1", "0:0"})
    (event,) = read_events(tmp_path / "e.jsonl")
    assert (event["loss"], event["bounds"], event["peers"]) == ("nan", ["-inf", 1.0], ["0:0", "0:1"])


def test_threads_may_emit_at_once_and_every_line_stays_whole(tmp_path: Path):
    path = tmp_path / "e.jsonl"
    with EventLog(path, log=False) as events:

        def emit(thread: int) -> None:
            for number in range(50):
                events.emit("committed", thread=thread, number=number, padding="x" * 500)

        threads = [threading.Thread(target=emit, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    written = read_events(path)
    for thread in range(4):
        assert [event["number"] for event in written if event["thread"] == thread] == list(range(50))


def test_a_continued_file_keeps_the_earlier_events(tmp_path: Path):
    for name in ("started", "finished"):
        with EventLog(tmp_path / "e.jsonl", log=False) as events:
            events.emit(name)
    assert [event["event"] for event in read_events(tmp_path / "e.jsonl")] == ["started", "finished"]


def test_nothing_is_written_after_close(tmp_path: Path):
    events = EventLog(tmp_path / "e.jsonl", log=False)
    events.close()
    events.close()
    with pytest.raises(ValueError, match="closed"):
        events.emit("started")


def test_each_event_is_one_log_line_in_deepspeeds_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with EventLog(tmp_path / "e.jsonl") as events:
        events.emit("planned", generation=2, ms=1.23456789, plan={"workers": {}}, failed=["1:1"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("recycle: planned generation=2 ms=1.23457 plan=<1> failed=[1:1]")
    assert "] [INFO] [test_events.py:" in line and json.dumps("1:1") not in line


def test_a_line_names_who_is_out_and_leaves_out_what_is_not_known():
    line = format_event({"event": "decided", "t": 1.0, "generation": 2, "out": {"1:1": "exit", "2:0": "frozen"},
                         "reason": None, "members": {str(n): "1f" for n in range(9)}})
    assert line == "recycle: decided generation=2 out=[1:1(exit),2:0(frozen)] members=<9>"


def test_a_line_says_what_a_worker_did_and_how_its_peers_noticed():
    doing = {"state": "waiting", "what": "F1.0", "number": 3067, "for_s": 0.0, "limit_s": 10.6}
    line = format_event({"event": "suspected", "t": 1.0, "worker": "1:1", "kind": "exit", "copies": [],
                         "progress": {"iteration": 69, "action": "F1.0", "doing": doing}})
    assert line == "recycle: suspected worker=1:1 kind=exit progress=waiting F1.0"
    said = ("receiving activations or gradients from 1:1 failed: [/w/gloo/transport/tcp/pair.cc:537] Read error "
            "[127.0.0.1]:17320: Connection reset by peer. This is typically caused by a remote worker hanging. GLHF!")
    assert format_event({"event": "hint", "t": 1.0, "error": said}) == (
        "recycle: hint error=receiving activations or gradients from 1:1 failed: Read error [127.0.0.1]:17320: "
        "Connection reset by peer")


def test_what_a_worker_says_does_not_command_the_terminal():
    said = "\x1b[2J\x1b]0;owned\x07ValueError: \x1b[31msample 31\x1b[0m\r\x9b5n is\x08 bad\nrecycle: finished"
    line = format_event({"event": "hint", "t": 1.0, "error": said})
    assert line == "recycle: hint error=ValueError: sample 31 is bad recycle: finished"


def test_the_log_format_is_the_one_of_the_installed_deepspeed():
    pytest.importorskip("deepspeed")
    from deepspeed.utils.logging import logger as theirs

    get_logger()
    formatters = [handler.formatter for handler in get_logger().handlers if handler.formatter is not None]
    assert theirs.handlers[0].formatter is not None
    assert [formatter._fmt for formatter in formatters].count(theirs.handlers[0].formatter._fmt) == 1


def test_a_disk_that_fails_costs_events_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Each write in turn takes nothing, or half of the line, and is said once; half a line is never left."""
    path, written = tmp_path / "e.jsonl", os.write
    takes: list[int | None] = [None, 0, 7, 7, None, 0, None]  # bytes; None: all

    def write(file: int, data: bytes) -> int:
        room = takes.pop(0)
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(file, data[:room])

    with EventLog(path, log=False) as events, monkeypatch.context() as patched:
        patched.setattr("megatron_recycle.observe.events.os.write", write)
        for iteration in range(7):
            events.emit("committed", iteration=iteration)
    assert [event["iteration"] for event in read_events(path)] == [0, 4, 6]
    said = capsys.readouterr().out
    assert said.count("events cannot be written") == 2 and str(tmp_path) in said
    assert "3 are missing" in said and "1 are missing" in said


def test_what_a_dead_process_has_left_of_a_line_is_not_continued(tmp_path: Path):
    path = tmp_path / "e.jsonl"
    path.write_text('{"event": "started"}\n{"event": "comm')
    with EventLog(path, log=False) as events:
        events.emit("finished")
    assert [event["event"] for event in read_events(path)] == ["started", "finished"]


def test_a_growing_file_is_read_on_without_its_unfinished_last_line(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert reader.new() == []
    path.write_text('{"event": "a"}\n{"event": "b"}\n{"eve')
    assert [event["event"] for event in reader.new()] == ["a", "b"]
    with path.open("a") as file:
        file.write('nt": "c"}\n')
    assert [event["event"] for event in reader.new()] == ["c"]
    assert reader.new() == []
