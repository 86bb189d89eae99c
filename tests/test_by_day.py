"""Of jobs in memory half of the cases run by day, and the half is well chosen."""

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


@pytest.mark.parametrize("counts", list(product(range(2, 9), repeat=2)), ids=str)
def test_each_value_of_each_parameter_is_met_by_day(counts: tuple[int, int]) -> None:
    every = cases("test_kind", one=[*range(counts[0])], other=[*range(counts[1])])
    kept = [case for case in every if case not in conftest._night_half(every)]
    for name, count in zip(("one", "other"), counts, strict=True):
        assert {case.callspec.params[name] for case in kept} == {*range(count)}
    assert len(kept) <= len(every) / 2 + max(counts)


def test_of_one_parameter_half_of_the_values_are_met_by_day_and_of_things_of_their_own_all() -> None:
    assert len(conftest._night_half(cases("test_seed", seed=[*range(8)]))) == 4
    assert not conftest._night_half(cases("test_few", seed=[*range(3)]))
    marked = cases("test_defect", defect=[*range(8)])
    for case in marked:
        case.get_closest_marker = {"every": True}.get
    assert not conftest._night_half(marked)
