"""Of jobs in memory a few cases of each kind run by day, and they are well chosen."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest


def cases(kind: str, **parameters: list[Any]) -> list[Any]:
    return [SimpleNamespace(nodeid=f"tests/in_memory_job/test_x.py::{kind}[{number}]",
                            get_closest_marker=lambda mark: None, callspec=SimpleNamespace(
                                params=dict(zip(parameters, values, strict=True))))
            for number, values in enumerate(product(*parameters.values()))]


def by_day(every: list[Any]) -> list[Any]:
    night = conftest._night_cases(every)
    return [case for case in every if case not in night]


@pytest.mark.parametrize("counts", list(product(range(2, 9), repeat=2)), ids=str)
def test_each_value_of_each_parameter_is_met_by_day_and_by_no_more_cases_than_that_takes(
        counts: tuple[int, int]) -> None:
    kept = by_day(cases("test_kind", one=[*range(counts[0])], same=[None], other=[*range(counts[1])]))
    for name, count in zip(("one", "other"), counts, strict=True):
        assert {case.callspec.params[name] for case in kept} == {*range(count)}
    assert len(kept) == max(counts)


def test_parameters_that_change_together_are_one() -> None:
    pairs = cases("test_kind", worker=[*range(6)], seed=[1])
    for case in pairs:
        case.callspec.params["after"] = case.callspec.params["worker"] + 1
    assert len(by_day(pairs)) == 3


def test_of_one_parameter_half_of_the_values_are_met_by_day_and_two_seeds_and_of_things_of_their_own_all() -> None:
    assert len(by_day(cases("test_worker", worker=[*range(8)]))) == 4
    assert len(by_day(cases("test_seed", seed=[*range(8)], same=[None]))) == 2
    assert len(by_day(cases("test_few", worker=[*range(3)]))) == 3
    marked = cases("test_defect", defect=[*range(8)])
    for case in marked:
        case.get_closest_marker = {"every": True}.get
    assert by_day(marked) == marked
