"""Only lost work is redone: on paper, whatever dies whenever."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest

from tests.redo_model.coordinator import Asked
from tests.redo_model.model import OFTEN, Case, Job, Kill, Shape, case_of, play
from tests.redo_model.process import Rules, Violation

LENT = {"lent": True, "tied": False, "parts": 1}
SHARDS = {"copies": True, "wrong": True, "parts": 1}
EACH = 20
"""Cases of one test."""


def batches(count: int) -> list[Any]:
    """Numbers of batches of ``EACH`` cases: ``count`` by day, 50 times as many at night, or CAMPAIGN_SEEDS."""
    if chosen := os.environ.get("CAMPAIGN_SEEDS"):
        return [*range(int(chosen))]
    return [*range(count), *(pytest.param(batch, marks=pytest.mark.night) for batch in range(count, 50 * count))]


def run(batch: int, **wanted: Any) -> Counter[str]:
    """The events of a batch of cases, all of which come to a good end."""
    seen = Counter[str]()
    for seed in range(EACH * batch, EACH * (batch + 1)):
        seen += play(case_of(seed, **wanted)).events
    return seen


@pytest.mark.parametrize("batch", batches(4))
def test_any_job_through_any_failures(batch):
    """Chance decides on the grid, on what is special about it, and on who dies when."""
    seen = run(batch)
    assert seen["reconciled"] > EACH / 4, "most failures are recovered from"


@pytest.mark.parametrize("batch", batches(1))
@pytest.mark.parametrize("wanted", [
    {"tied": True}, {"parts": 2}, {"parts": 2, "tied": True}, LENT, {"idle": True}, {"closes": False},
    {"spoils": True}, {"exact": True}, {"exact": True, "tied": True}, {"copies": True, "parts": 1}],
    ids=lambda wanted: ", ".join(each for each, value in wanted.items() if value) or "settles")
def test_special_jobs(batch, wanted):
    """Tied stages; workers of several parts; lent layers; workers without micro-batches; scripts that wait for
    commits; aborts that spoil sums; exact reductions, whose blocks stay whole and whose left iterations are left;
    optimizers in shards."""
    run(batch, **wanted)


@pytest.mark.parametrize("label", [
    *OFTEN[:-1], "reduce", "reduced", "stepped", "acknowledgement", "close", "closed", "script", "verdict", "rejoining",
    "retired", "connect", "resumed", "rolling back"])
def test_a_death_at_each_kind_of_moment(label):
    """The first, and a later one; followed by another, of whoever comes to some moment of the recovery."""
    draw, died = random.Random(label), 0
    for seed in range(12):
        case = case_of(seed, parts=1)
        second = Kill(draw.choice(("stop", "retired", "go", "connect", "resumed", "rejoining", "before")), seed)
        first = Kill("before", 20) if label in ("rejoining", "retired", "connect", "resumed") else second
        case = replace(case, kills=(Kill(label, 1 + 3 * seed // 2), first, second)[:2 + seed % 2])
        died += play(case).events["decided"]
    assert died or label == "rolling back"


@pytest.mark.parametrize("seed", range(6))
def test_without_failures_nobody_does_anything_twice(seed):
    case = case_of(seed)
    outcome = play(replace(case, kills=(), shape=replace(case.shape, wrong=frozenset())))
    assert not outcome.events["decided"] and not sum(outcome.twice.values())


@pytest.mark.parametrize("batch", batches(2))
def test_nothing_that_a_live_worker_has_done_of_an_iteration_is_run_again_after_one_death(batch):
    """Nor of the next iteration. Where the rest would take longer than the whole, all begin anew."""
    for seed in range(EACH * batch, EACH * (batch + 1)):
        case = case_of(seed, parts=1, spoils=False)
        kills = tuple(replace(kill, host=False) for kill in case.kills[:1])
        case = replace(case, kills=kills, shape=replace(case.shape, wrong=frozenset()))
        outcome = play(case)
        assert outcome.begun_anew or not sum(outcome.twice.values()), case
        assert not outcome.events["repeated"], "no message is lost with one worker"


class Directed(Job):
    """0:0 is the only one to hear that the first stage has closed iteration 0, and dies once 0:1 has run something of
    the next one with its message. The last stage has not reduced by then."""

    died = False

    def _happens(self, what: int, place: int) -> bool:
        reader = self.processes["0:1"].standing
        if not self.died and reader.iteration == 1 and reader.done:
            self.died = True
            self._kill("0:0", Kill("", 0))
            return True
        name = self._names[place] if what == 0 else ""
        late = {"1:0": ("close",), "2:0": ("close",), "1:2": ("agreement", "loss", "reduce")}.get(name, ())
        return (self.died or not name or self._pauses[name].label not in late) and super()._happens(what, place)


@pytest.mark.parametrize("block", [0, 1])
def test_work_of_one_iteration_is_computed_with_one_set_of_parameters(block):
    """`Job.committed` sees to it. A stage of which nobody is left who knows that it is closed reduces again, and is
    rounded in another way: of what others have done with its messages nothing is kept, but with the exact reduction."""
    kept = list[bool]()
    for seed in range(EACH):
        job = Directed(Case(Shape(Asked(3, (1, 1, 1), block=block), 3), (), seed), Rules())
        job.play()
        kept += [go.ahead is not None for go in job.coordinator.goes if go.resume.closed == (1,)]
    assert kept and set(kept) == {bool(block)}


def test_the_same_case_runs_the_same_way():
    first, second = (play(case_of(5)) for _ in range(2))
    assert first == second


BROKEN: dict[str, tuple[int, dict[str, Any]]] = {
    "acknowledge": (142, {"parts": 1}),
    "together": (117, {"parts": 1}),
    "log": (11, {"parts": 1}),
    "log_unread": (5, {"parts": 1}),
    "out_of_place": (2, {"parts": 1}),
    "once": (11, {"parts": 1}),
    "void": (9, {"parts": 1}),
    "idle": (85, {"idle": True}),
    "resend": (5, {"parts": 1}),
    "stays": (16, {"parts": 1}),
    "told_loss": (16, {"parts": 1}),
    "groups": (140, {"tied": True}),
    "all_parts": (174, {"parts": 2}),
    "parts_alike": (5, {"parts": 2}),
    "parts_level": (174, {"parts": 2, "tied": False}),
    "snapshot": (261, LENT),
    "lent_apart": (3, LENT),
    "lent_closing": (16, LENT),
    "adopt_late": (5, SHARDS),
    "had": (173, SHARDS),
}
"""By rule: a seed that shows what comes of leaving it out, and what its job is like."""


@pytest.mark.parametrize("rule", [each.name for each in fields(Rules)])
def test_no_rule_can_be_left_out(rule):
    """The model notices: there is a case that breaks with this rule left out, and does not with it."""
    hint, wanted = BROKEN[rule]
    for seed in (hint, *range(1500)):
        case = case_of(seed, **wanted)
        try:
            play(case, replace(Rules(), **{rule: False}))
        except Violation:
            play(case)
            return
    raise AssertionError(f"nothing in 1500 cases shows that {rule} is needed")


def shape_of(**wanted: Any) -> Shape:
    return case_of(0, **wanted).shape


def test_a_case_that_breaks_says_how_to_run_it_again():
    with pytest.raises(Violation, match=r"in Case\(shape=Shape\(.*seed=\d+\)"):
        seed = BROKEN["log"][0]
        play(case_of(seed), Rules(log=False))


def test_a_process_that_dies_in_a_stage_of_its_own_is_spared():
    """Nobody could take its place: the model kills no stage."""
    case = Case(shape_of(parts=1), (Kill("before", 1), Kill("before", 2), Kill("before", 3)), 1)
    assert play(case).events["decided"] <= 2
