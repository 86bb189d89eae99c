"""How many seeds a random campaign tries: a few by day, three times as many at night, or CAMPAIGN_SEEDS."""

from __future__ import annotations

import os
from typing import Any

import pytest


def seeds(usual: int) -> list[Any]:
    """``usual``, and more at night; or CAMPAIGN_SEEDS if that is set: ``CAMPAIGN_SEEDS=5000 scripts/test.sh
    tests/memory``."""
    if chosen := os.environ.get("CAMPAIGN_SEEDS"):
        return [*range(int(chosen))]
    return [*range(usual), *(pytest.param(seed, marks=pytest.mark.night) for seed in range(usual, 3 * usual))]
