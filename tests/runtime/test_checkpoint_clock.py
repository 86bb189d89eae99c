"""When a checkpoint is due, by what one costs and how often a job fails."""

from __future__ import annotations

import pytest

from megatron_recycle.checkpoint_period import young_daly
from megatron_recycle.runtime.checkpoint_clock import CheckpointClock


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_one_is_due_at_once_and_the_next_when_the_period_has_passed_since():
    time = Time()
    clock = CheckpointClock(3600.0, time)
    assert clock.due and clock.period is None
    assert clock.wrote(40.0, 0) is None, "how long an iteration takes is not known yet"
    assert clock.period == young_daly(60.0, 3600.0) == pytest.approx(617.9, abs=0.05)
    time.now += 617.0
    assert not clock.due
    time.now += 1.0
    assert clock.due


def test_the_line_says_the_period_in_iterations_and_comes_again_when_it_is_another():
    time = Time()
    clock = CheckpointClock(3600.0, time)
    clock.wrote(40.0, 0)
    time.now = 2560.0
    assert clock.wrote(2500.0, 200) == (
        "a checkpoint takes 60.00 s; with a failure every 3600 s (mtbf) least time is lost with one every 617.9 s "
        "(Young, Daly), which is 51 iterations; the last two were 2400.0 s and 200 iterations apart")
    time.now = 5020.0
    assert clock.wrote(4960.0, 400) is None, "no news"
    time.now = 7425.0
    line = clock.wrote(7420.0, 600)
    assert line is not None and "a checkpoint takes 5.00 s" in line


def test_without_a_failure_rate_nothing_is_due_and_nothing_is_said():
    clock = CheckpointClock(None, Time())
    assert not clock.due and clock.wrote(40.0, 0) is None and clock.wrote(90.0, 9) is None and not clock.due
