"""What is tried by day, and what at night only: seeds of random campaigns, and rows of large tables."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from hypothesis import settings


def seeds(usual: int) -> list[Any]:
    """``usual``, and more at night; or CAMPAIGN_SEEDS if that is set: ``CAMPAIGN_SEEDS=5000 scripts/test.sh
    tests/in_memory_job``."""
    if chosen := os.environ.get("CAMPAIGN_SEEDS"):
        return [*range(int(chosen))]
    return [*range(usual), *(pytest.param(seed, marks=pytest.mark.night) for seed in range(usual, 6 * usual))]


def examples(count: int) -> int:
    """Random examples of a test: so many, and by day a third of them, which are the same each day."""
    return count // 3 if settings().derandomize else count


def by_day(count: int, values: Iterable[Any]) -> list[Any]:
    """All of ``values``, the first ``count`` of them by day too."""
    return [value if number < count else pytest.param(value, marks=pytest.mark.night)
            for number, value in enumerate(values)]


def rows(*values: Iterable[Any], every: int) -> list[Any]:
    """All combinations of ``values``, one of ``every`` by day; if ``every`` divides none of their counts, each value is
    met by day."""
    return [row if number % every == 0 else pytest.param(*row, marks=pytest.mark.night)
            for number, row in enumerate(product(*values))]
