"""What scripts do between iterations ends with stock's bits, or is refused by name: `between_rows` has the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.between_job import PIPELINES, STAGES, run_rows
from tests.backends.between_rows import ALWAYS, ROWS, Row, table
from tests.harness import Job, Result
from tests.once import once

PAGE = Path(__file__).parents[2] / "docs" / "between-iterations.md"
BY_DAY = 4
"""Of so many rows one runs by day: one of each kind of habit."""


def test_the_documentation_has_the_table():
    assert table() in PAGE.read_text(), "write it there: python -m tests.backends.between_rows"


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> list[Result]:
    """The rows, one after another in the same processes, on each rank; by day one of each kind."""
    return once("rows", lambda: run(range(0, len(ROWS), 1 if request.config.getoption("--night") else BY_DAY)))


def run(numbers: range) -> list[Result]:
    with Job(run_rows, STAGES * PIPELINES, {"numbers": numbers}, coordinated=False, limit=200) as job:
        found = job.wait()
        assert all(result.status == 0 for result in found.values()), job.where()
    for result in found.values():
        result.value = dict(zip(numbers, result.value, strict=True))
    return [found[rank] for rank in range(STAGES * PIPELINES)]


@pytest.mark.processes
@pytest.mark.parametrize("row", [pytest.param(row, id=row.what, marks=[pytest.mark.night] * bool(number % BY_DAY))
                                 for number, row in enumerate(ROWS)])
def test_stocks_bits_or_a_refusal(row: Row, results: list[Result]):
    number = ROWS.index(row)
    if row.refused is not None:
        texts = [result.value[number][1] for result in results]
        assert all(isinstance(text, str) for text in texts), "training went on"
        assert {row.refused in text for text in texts if text} == {True}, texts
        return
    for result in results:
        expected, found, _ = result.value[number]
        assert not isinstance(found, str), found
        assert expected.keys() == found.keys()
        differ = [name for name in expected if expected[name].tobytes() != found[name].tobytes()]
        assert not differ, differ
    if row.clipping == ALWAYS and row.settings.get("step") != "barrier":
        assert results[0].value[number][2], "no step was undone"
