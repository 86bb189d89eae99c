"""What a worker tells of its training thread, with a clock that the test winds."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_recycle.membership import Process, Standing
from megatron_recycle.membership.detectors import Doing
from megatron_recycle.runtime.activity import COPY, HANDLES, OUTSIDE, RECOVERY, REDUCE, WAITING, WORKING, Activity
from megatron_recycle.runtime.phases import Phase, Phases


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def act(activity: Activity, clock: Clock, what: str, *seconds: float) -> None:
    for taken in seconds:
        with activity.during(WORKING, what):
            clock.now += taken


def limit(activity: Activity, state: str, what: str) -> float | None:
    with suppress(InterruptedError), activity.during(state, what):
        found = Doing.read(activity.told())
        raise InterruptedError  # so that asking teaches nothing
    assert found is not None
    return found.limit_s


def made() -> tuple[Activity, Clock]:
    clock = Clock()
    return Activity(10.0, clock), clock


def test_the_limit_of_an_action_is_learnt_from_the_longest_one_of_its_kind_once_the_first_are_over():
    activity, clock = made()
    assert limit(activity, WORKING, "forward") is None
    act(activity, clock, "forward", 60.0, 30.0)  # these compiled
    assert limit(activity, WORKING, "forward") is None
    act(activity, clock, "forward", 1.0, 2.0, 1.5)
    assert limit(activity, WORKING, "forward") == pytest.approx(16.0)
    assert limit(activity, WORKING, "backward") is None
    act(activity, clock, "forward", *[1.0] * 64)
    assert limit(activity, WORKING, "forward") == pytest.approx(13.0), "what is long past does not count"


def test_the_parts_of_its_time_add_up_to_all_of_it():
    activity, clock = made()
    clock.now += 1.0  # the script
    with activity.during(WORKING, "begin"):
        clock.now += 2.0
        activity.work("forward")
        clock.now += 4.0
        with activity.during(WAITING, "F0.1"):
            clock.now += 8.0
        with activity.during(WORKING, "data"):
            clock.now += 16.0
        activity.work("full backward")
        clock.now += 32.0
        with activity.during(WAITING, REDUCE):
            clock.now += 64.0
            assert activity.spent() == {"script": 1, "own": 2, "actions": 20, "messages": 8, "full backwards": 32,
                                        "reduction": 64}
            clock.now += 128.0
        with activity.during(WAITING, "a verdict"):
            clock.now += 256.0
    with activity.during(WAITING, HANDLES):
        clock.now += 512.0
    assert sum(activity.spent().values()) == 128 + 256 + 512 and not any(activity.spent().values())


def test_waiting_inside_an_action_does_not_count_as_working():
    activity, clock = made()
    for _ in range(5):
        activity.work("forward")
        clock.now += 1.0
        with activity.during(WAITING, "F0.1"):
            clock.now += 100.0
            told = activity.told()
            assert (told["state"], told["what"], told["for_s"]) == (WAITING, "F0.1", 100.0)
        clock.now += 2.0
        assert activity.told()["for_s"] == 2.0
    activity.work("backward")
    assert limit(activity, WORKING, "forward") == pytest.approx(16.0)


def test_work_that_was_cut_short_by_a_failure_teaches_nothing():
    activity, clock = made()
    act(activity, clock, REDUCE, 1.0, 1.0, 1.0)
    for _ in range(5):
        with pytest.raises(RuntimeError), activity.during(WAITING, REDUCE):
            clock.now += 500.0
            raise RuntimeError
    assert limit(activity, WAITING, "a verdict") == pytest.approx(63.0)


def test_who_has_not_seen_a_reduction_yet_waits_longer_for_the_others():
    activity, clock = made()
    assert limit(activity, WAITING, "a verdict") == pytest.approx(60.0)
    for _ in range(3):
        with activity.during(WAITING, REDUCE):
            clock.now += 4.0
    assert limit(activity, WAITING, "a verdict") == pytest.approx(22.0)


def test_the_scripts_own_code_has_no_limit():
    activity, clock = made()
    act(activity, clock, "forward", 1.0, 1.0, 1.0)
    clock.now += 1000.0
    told = activity.told()
    assert (told["state"], told["limit_s"]) == (OUTSIDE, None)


def test_a_phase_that_begins_while_waiting_is_work_until_the_wait_goes_on():
    """A verdict asks for another step than the one that was made: the step is made in the wait for the verdict."""
    activity, _clock = made()
    with activity.during(WORKING, "begin"):
        with activity.during(WAITING, "a recovery"):
            activity.work("step")
            assert activity.told()["state"] == WORKING
        assert activity.told()["what"] == "begin"
    assert activity.told()["state"] == OUTSIDE


def test_new_handles_may_take_as_long_as_a_recovery_since_the_store_may_have_to_come_back_first():
    activity, clock = made()
    act(activity, clock, "forward", 1.0, 1.0, 1.0)
    for _ in range(3):
        with activity.during(WAITING, REDUCE):
            clock.now += 0.5
    assert limit(activity, WAITING, "F0.1") == pytest.approx(13.0)
    assert limit(activity, WAITING, HANDLES) == limit(activity, WAITING, RECOVERY) == pytest.approx(70.0)


def test_who_gives_its_state_to_others_is_not_stuck_however_long_they_take():
    """One of them may be frozen, or its host gone, which takes longer to find out than a stall."""
    activity, clock = made()
    act(activity, clock, COPY, *[1.0] * 5)
    assert limit(activity, WORKING, COPY) is None


@pytest.mark.parametrize(("asked", "stepped", "behind"), [(5, 5, 5), (6, 5, 5), (3, 5, 3), (0, -1, None)])
def test_an_error_between_iterations_comes_after_the_last_one_that_was_made_and_asked_for(asked, stepped, behind):
    """Whether it is behind the last one of the job depends on it, though a checkpoint is of the next iteration."""
    standing = Standing(Process.parse("0:0"))
    standing.asked, standing.stepped = asked, stepped
    phases = Phases(standing, cast(Any, SimpleNamespace()), Activity(1.0), None)
    assert phases.fault(OSError(), outside=True).iteration is None, "before its first iteration"
    phases.enter(Phase.SAVE, asked + 1)
    assert [phases.fault(OSError(), outside).iteration for outside in (True, False)] == [behind, behind]
