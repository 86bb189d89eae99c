"""Where training goes on, for every mix of what survivors hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from megatron_recycle.membership.resume import DeadEnd, Resume, decide
from tests.membership.cluster import report, verdict


def _decide(reports: dict[str, Any], stages: int = 2, **other: Any) -> Resume | DeadEnd:
    return decide(stages, dict.fromkeys(reports, "x"), reports, **other)


def test_all_in_the_middle_of_an_iteration_go_back_to_its_start() -> None:
    reports = {name: report(iteration=5, holds=4, actions=3) for name in ("0:0", "0:1", "1:0")}
    assert _decide(reports) == Resume(target=4, next=5, attempt=2, redone=9)


def test_a_stage_that_holds_pulls_everybody_forward_if_all_stages_hold() -> None:
    reports = {
        "0:0": report(iteration=5, holds=5, stepped=4),
        "1:0": report(iteration=5, holds=4),
        "2:0": report(iteration=5, holds=4),
        "0:1": report(iteration=5, holds=5, stepped=4, verdict=verdict(5, 2.0)),
    }
    resume = _decide(reports)
    assert resume == Resume(5, 6, 1, verdict(5, 2.0), {"1:0": "0:0", "2:0": "0:0"})


def test_a_stage_without_a_holder_sends_everybody_back() -> None:
    reports = {
        "0:0": report(iteration=5, holds=5, stepped=4, actions=12),
        "0:1": report(iteration=5, holds=4, actions=10),
    }
    resume = _decide(reports)
    assert isinstance(resume, Resume)
    assert (resume.target, resume.next, resume.attempt, resume.redone) == (4, 5, 2, 22)


def test_copies_are_spread_over_the_holders() -> None:
    reports = {f"{d}:0": report(iteration=1, holds=int(d < 2), stepped=0) for d in range(6)}
    resume = _decide(reports, stages=1)
    assert isinstance(resume, Resume)
    assert resume.copies == {"2:0": "0:0", "3:0": "1:0", "4:0": "0:0", "5:0": "1:0"}


def test_an_empty_stage_is_named() -> None:
    stop = _decide({"0:0": report(), "1:0": report()})
    assert isinstance(stop, DeadEnd) and "stage 1" in stop.message and "checkpoint" in stop.message


def test_a_step_that_another_stage_lost_is_a_stop() -> None:
    stop = _decide({"0:0": report(iteration=6, holds=5, stepped=5), "0:1": report(iteration=5, holds=4)})
    assert isinstance(stop, DeadEnd) and "0:0" in stop.message


def test_stages_two_iterations_apart_are_a_stop() -> None:
    stop = _decide({"0:0": report(iteration=6, holds=5, stepped=4), "0:1": report(iteration=4, holds=3)})
    assert isinstance(stop, DeadEnd) and "stage 1" in stop.message


def test_a_verdict_of_another_iteration_is_not_used() -> None:
    reports = {
        "0:0": report(iteration=5, holds=4, verdict=verdict(3, 1.0)),
        "0:1": report(iteration=5, holds=4, verdict=verdict(4, 2.0)),
    }
    resume = _decide(reports)
    assert isinstance(resume, Resume) and resume.verdict == verdict(4, 2.0)


def test_verdicts_that_differ_are_a_stop_but_a_norm_that_is_no_number_is_not() -> None:
    verdicts = [verdict(4, 1.0), verdict(4, 2.0)]
    reports = {f"{d}:0": report(iteration=5, holds=4, verdict=v) for d, v in enumerate(verdicts)}
    assert isinstance(_decide(reports, stages=1), DeadEnd)
    verdicts = [verdict(4, math.nan), verdict(4, float("nan"))]
    reports = {f"{d}:0": report(iteration=5, holds=4, verdict=v) for d, v in enumerate(verdicts)}
    assert isinstance(_decide(reports, stages=1), Resume)


def test_an_announced_attempt_is_passed_over() -> None:
    reports = {"0:0": report(iteration=5, holds=4, attempt=1)}
    for announced, attempt in (((5, 3), 4), ((4, 3), 2), (None, 2)):
        resume = _decide(reports, stages=1, announced=announced)
        assert isinstance(resume, Resume) and resume.attempt == attempt


@given(some.data())
def test_whoever_is_told_to_copy_gets_what_its_source_holds(data: some.DataObject) -> None:
    """With a synchronous commit nobody steps k before every stage holds it; then there is always a way on."""
    stages = data.draw(some.integers(1, 3))
    names = [f"{d}:{s}" for d in range(3) for s in range(stages)]
    all_hold = data.draw(some.booleans())
    reports: dict[str, Any] = {}
    for name in names:
        holds = data.draw(some.integers(6, 7))
        stepped = data.draw(some.integers(6, holds)) if all_hold else 6
        reports[name] = report(iteration=stepped + 1, holds=holds, stepped=stepped)
    if all_hold:
        for stage in range(stages):
            reports[f"0:{stage}"] = report(iteration=7, holds=7, stepped=6)
    resume = _decide(reports, stages)
    assert isinstance(resume, Resume)
    assert resume.target == (
        7 if all_hold else min(max(reports[f"{d}:{s}"].holds for d in range(3)) for s in range(stages))
    )
    for name in names:
        if reports[name].holds < resume.target:
            source = resume.copies[name]
            assert source.split(":")[1] == name.split(":")[1] and reports[source].holds >= resume.target
        else:
            assert name not in resume.copies


def test_json_round_trip() -> None:
    resume = Resume(5, 6, 1, verdict(5, 2.0), {"1:0": "0:0"}, 7)
    assert Resume.from_json(resume.to_json()) == resume


@pytest.mark.parametrize("missing", ["target", "attempt"])
def test_json_without_a_field_is_an_error(missing: str) -> None:
    data = Resume(5, 6, 1).to_json()
    del data[missing]
    with pytest.raises(ValueError, match=missing):
        Resume.from_json(data)
