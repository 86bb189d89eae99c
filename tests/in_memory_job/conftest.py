"""What all tests of jobs in memory have."""

from __future__ import annotations

import gc
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


@pytest.fixture(autouse=True)
def no_garbage_is_collected() -> Iterator[None]:
    """torch holds the lock of a random generator while it makes the tensor of its state. Garbage collected then,
    tensors among it, lets another worker's thread run, which waits for that lock for ever and keeps all others out."""
    gc.disable()
    yield
    gc.enable()
