"""What a script is told of its job: `megatron_recycle.status()` and `on_event()`."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

import megatron_recycle
from megatron_recycle import job_status
from megatron_recycle.job_status import JobStatus, Telling, changes

NAMES = ("0:0", "0:1", "1:0", "1:1")
WHOLE = JobStatus(worker="0:0", rank=0, generation=1, iteration=3, committed=2, live=NAMES,
                  lives={name: f"first {name}" for name in NAMES})
HURT = replace(WHOLE, generation=2, live=NAMES[:3], missing=("1:1",), last_copies=(1,),
               lives={name: WHOLE.lives[name] for name in NAMES[:3]})


def names(before: JobStatus, after: JobStatus) -> list[tuple[str, Any]]:
    return [(event["event"], event.get("workers")) for event in changes(before, after, 5.0)]


def test_a_loss_a_last_copy_and_the_way_back_are_told():
    back = replace(WHOLE, generation=3, lives={**WHOLE.lives, "1:1": "second"})
    assert names(WHOLE, HURT) == [("lost", ["1:1"]), ("resumed", list(NAMES[:3])), ("last_copy", ["0:1"])]
    assert names(HURT, back) == [("joined", ["1:1"]), ("resumed", list(NAMES)), ("whole", list(NAMES))]
    assert names(WHOLE, replace(WHOLE, iteration=4, committed=3)) == []
    assert next(changes(WHOLE, HURT, 5.0)) == {"event": "lost", "t": 5.0, "generation": 2, "iteration": 3, "live": 3,
                                               "of": 4, "workers": ["1:1"]}


def test_a_worker_that_was_replaced_within_one_call_was_lost_and_has_joined():
    """Its position is never seen empty."""
    back = replace(WHOLE, generation=3, lives={**WHOLE.lives, "1:1": "second"})
    assert names(WHOLE, back)[:2] == [("lost", ["1:1"]), ("joined", ["1:1"])]
    parts = replace(WHOLE, lives={"1:1.0": "a", "1:1.1": "b"})
    assert names(parts, replace(parts, generation=2, lives={"1:1.0": "a", "1:1.1": "c"}))[0] == ("lost", ["1:1"])


def test_a_new_generation_without_a_loss_is_told_as_resumed():
    assert names(WHOLE, replace(WHOLE, generation=2)) == [("resumed", list(NAMES))]
    assert names(replace(WHOLE, generation=0, lives={}), WHOLE) == []


def test_a_callback_that_raises_stops_neither_the_others_nor_training(caplog: pytest.LogCaptureFixture):
    telling, told = Telling(), list[Any]()
    now = [WHOLE]
    telling.reported_by(lambda: now[0])
    telling.add(lambda event: 1 / 0)
    telling.add(told.append)
    telling.tell()
    assert told == []
    now[0] = HURT
    logger = logging.getLogger("megatron_recycle")
    logger.addHandler(caplog.handler)
    try:
        telling.tell()
        telling.tell()
    finally:
        logger.removeHandler(caplog.handler)
    telling.end(0, "the job has finished")
    telling.end(1, "again")
    assert [event["event"] for event in told] == ["lost", "resumed", "last_copy", "ended"]
    assert "a callback of on_event() has failed at 'lost'" in caplog.text


def test_without_a_job_there_is_no_status(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_status, "HERE", Telling())
    assert megatron_recycle.status() is None
    with pytest.raises(TypeError, match="give a function that takes one event"):
        megatron_recycle.on_event("print")  # type: ignore[arg-type]


def test_a_status_says_who_speaks_and_whether_the_job_is_degraded():
    assert WHOLE.is_logging_rank and not WHOLE.degraded and HURT.degraded
    assert not replace(HURT, worker="0:1").is_logging_rank
