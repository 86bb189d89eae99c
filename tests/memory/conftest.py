"""What all tests of jobs in memory have."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Six workers in one process say everything six times; other tests of the process read what is said."""
    logger = logging.getLogger("megatron_recycle")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)
