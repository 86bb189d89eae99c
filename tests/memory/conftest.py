"""What all tests of jobs in memory have."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from megatron_recycle.observe.log import get_logger


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Six workers in one process say everything six times; other tests of the process read what is said."""
    logger = get_logger()
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)
