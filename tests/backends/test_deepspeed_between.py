"""What scripts do between iterations ends with stock's bits, or is refused by name: `between_rows` has the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.between_job import PIPELINES, STAGES, run_rows
from tests.backends.between_rows import ALWAYS, ROWS, Row, table
from tests.harness import Job, Result
from tests.once import once

PAGE = Path(__file__).parents[2] / "docs" / "between-iterations.md"


def test_the_documentation_has_the_table():
    assert table() in PAGE.read_text(), "write it there: python -m tests.backends.between_rows"


@pytest.fixture(scope="module")
def results() -> list[Result]:
    """All rows, one after another in the same processes, on each rank."""
    return once("all rows", run)


def run() -> list[Result]:
    with Job(run_rows, STAGES * PIPELINES, {"numbers": range(len(ROWS))}, coordinated=False, limit=200) as job:
        found = job.wait()
        assert all(result.status == 0 for result in found.values()), job.where()
    return [found[rank] for rank in range(STAGES * PIPELINES)]


@pytest.mark.processes
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
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
